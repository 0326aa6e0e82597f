//! The total pool: every row of every live sequence, in pinned host memory. The truth.
//!
//! A page is 64 consecutive tokens of a sequence, the same index in every layer; a table entry pairs a
//! host page of rows with a device page of index keys, and the two are allocated, shared, copied and freed
//! together, so that a latent never travels without the key that finds it (kvcache-ai/Mooncake#2236).
//!
//! Pages are counted by owner. Whoever writes to a page owns it alone; a fork shares full pages and copies
//! the partial one. Published pages that requests share are found in the prefix index, which is one more owner.

mod index;
mod page;
mod pool;
mod prefix;
mod recency;
mod table;

pub(crate) use index::IndexPool;
pub use page::Pages;
pub(crate) use pool::TotalPool;
pub use prefix::{BlockHash, BlockHasher, CAPACITY_MAX, Inserted, PrefixIndex, Secret};
pub use recency::Recency;
pub(crate) use table::PageTable;
