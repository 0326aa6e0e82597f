//! S3-FIFO over blocks; [`Queues`] implements the queues. Each use of a block is an access: a hit, or an entry that
//! evicts one block from a full cache. A request's blocks are used from the last to the first, so that the end of a
//! long prompt that enters at once is evicted first.

use forebay::Result;
use forebay::trace::requests::RequestTrace;

use super::cache::Cache;
use crate::study::s3fifo_queues::Queues;

pub struct S3Fifo {
    queues: Queues,
    capacity: usize,
}

impl S3Fifo {
    pub fn new(trace: &RequestTrace, capacity: u32) -> Result<S3Fifo> {
        let capacity = capacity as usize;
        Ok(S3Fifo { queues: Queues::new(capacity, trace.distinct() as usize)?, capacity })
    }
}

impl Cache for S3Fifo {
    fn contains(&self, block: u32) -> bool {
        self.queues.contains(block)
    }

    fn serve(&mut self, blocks: &[u32]) -> u64 {
        let mut gone = 0;
        for block in blocks.iter().rev() {
            if self.queues.hit(*block) {
                continue;
            }
            let full = self.queues.len() == self.capacity;
            self.queues.evict(usize::from(full), |_| false);
            self.queues.enter(*block);
            gone += u64::from(full);
        }
        gone
    }
}
