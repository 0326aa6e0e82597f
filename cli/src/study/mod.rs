//! Computations that several commands share: a trace replayed through pools or counted for one order, at one size or at
//! every size, and the means of a replay's steps.

pub mod curve;
pub mod lru_stack;
pub mod mean_step;
pub mod pools;
pub mod prefetch;
pub mod reserve;
pub mod s3fifo_queues;
pub mod split;
pub mod threads;
pub mod together;
