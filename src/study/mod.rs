//! Miss-ratio curves for study: the misses at every cache size, from one pass over the selections.
//!
//! A replay at one size gives the misses of that size. An LRU cache of `n` holds the `n` last used rows, so one order
//! of use answers for all sizes: a row's depth in that order when it is used again is the smallest size that hits
//! (Mattson's stack distance). [`LruStack`] is that order. [`StackDistances`] applies the rule's calls to it, so that
//! a [`MissRatioCurve`] counts what a replay of [`crate::residency`] counts at each budget.
//!
//! No cache, device or step uses this module, and no feature of the library implies `study`: `forebay replay
//! --curve`, reports and request traces do. Unlike the rule, it may allocate while it runs.

mod curve;
mod stack;

pub use curve::{MissRatioCurve, StackDistances};
pub use stack::LruStack;
