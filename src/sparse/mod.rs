//! The sparse pool: the rows that stand on the device, a cache of the truth.
//!
//! Each layer has a slab of slots in blocks of 64, as the attention kernels address it. This room decides
//! who has which blocks and lanes and how the slab is laid out; which row stands in which slot is decided
//! on the device, by the rule of [`crate::residency`].

mod budget;
mod pool;
mod slots;
mod warmup;

pub use budget::Budget;
pub(crate) use pool::{SparseConfig, SparsePool};
pub(crate) use slots::Holding;
pub use warmup::BringUp;
pub(crate) use warmup::Stretches;
pub use warmup::WarmUp;
