//! What is for study: the misses of every cache size from one pass over what was used.
//!
//! A replay of one size says what that size would have missed. A least-recently-used cache of `n` holds the `n` last
//! used of everything, so one order of use answers for all sizes: how deep a number stands in it when it is used again
//! is the least size with a hit (Mattson's stack distance). [`LruStack`] is that order. [`StackDistances`] makes the calls of
//! the rule on it, so that a [`MissRatioCurve`] counts what a replay of [`crate::residency`] counts at each budget.
//!
//! No cache, device or step uses this room, and no feature of the library implies `study`: the command has it for
//! `forebay replay --curve`, for reports and for request traces. Unlike the rule it may allocate as it goes.

mod curve;
mod stack;

pub use curve::{MissRatioCurve, StackDistances};
pub use stack::LruStack;
