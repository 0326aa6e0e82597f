//! LRU over blocks: evicts the block used longest ago. A request's blocks are used from the last to the first.

use forebay::total::Recency;
use forebay::trace::requests::RequestTrace;
use forebay::{Error, Kind, Result};

use super::cache::Cache;

pub struct Lru {
    order: Recency,
    capacity: u32,
}

impl Lru {
    pub fn new(trace: &RequestTrace, capacity: u32) -> Result<Lru> {
        let order = Recency::new(trace.distinct()).map_err(|bytes| {
            Error::new(Kind::OutOfMemory, "replay").at("the order of the blocks").with("bytes", bytes)
        })?;
        Ok(Lru { order, capacity })
    }
}

impl Cache for Lru {
    #[inline]
    fn contains(&self, block: u32) -> bool {
        self.order.contains(block)
    }

    #[inline]
    fn serve(&mut self, blocks: &[u32]) -> u64 {
        for block in blocks.iter().rev() {
            self.order.touch(*block);
        }
        let surplus = self.order.len().saturating_sub(self.capacity);
        for _ in 0..surplus {
            self.order.pop_oldest();
        }
        u64::from(surplus)
    }
}
