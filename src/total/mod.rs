//! The total pool: every row of every live sequence, in pinned host memory. It is the complete copy from which the
//! sparse pool loads rows.
//!
//! A page is 64 consecutive tokens of a sequence, with the same index in every layer. A table entry pairs a host page
//! of rows with a device page of index keys. The two are allocated, shared, copied and freed together, so that a row
//! (latent) never loses the index key that finds it (kvcache-ai/Mooncake#2236).
//!
//! Each page counts its owners. A sequence that writes to a page is its only owner. A fork shares full pages and copies
//! the partial page. The prefix index holds published pages that other requests may share; it is one more owner.

mod blocks;
mod directory;
mod hash;
mod index;
pub(crate) mod memory;
mod page;
mod pool;
mod prefix;
mod recency;
mod table;
pub(crate) mod withheld;

pub use blocks::{CAPACITY_MAX, Inserted};
pub use directory::{Directory, Located, Victim};
pub use hash::{BlockHash, BlockHasher, Secret};
pub(crate) use index::IndexPool;
pub use page::Pages;
pub(crate) use pool::TotalPool;
pub use prefix::PrefixIndex;
pub use recency::Recency;
pub(crate) use table::PageTable;

pub use crate::ids::DevicePage;
