//! The sparse pool: the rows on the device, a cache of the total pool.
//!
//! Each layer has a slab of slots in blocks of 64, the layout that attention kernels address. This module assigns
//! blocks and lanes to sequences, lays out the slab, and says how many slots each sequence should have ([`Share`]). The
//! device decides which row is in which slot, by the rule of [`crate::residency`].

pub mod ages;
mod budget;
mod curve;
mod pool;
mod share;
mod slots;
mod warmup;

pub use budget::Budget;
pub(crate) use budget::one_of;
pub use curve::MissCurve;
pub(crate) use pool::{SparseConfig, SparsePool};
pub use share::{Share, ShareBy, Want};
pub(crate) use slots::Holding;
pub use warmup::BringUp;
pub(crate) use warmup::Stretches;
pub use warmup::WarmUp;
