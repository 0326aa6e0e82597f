//! First in, first out: evicts the block that entered first, regardless of later uses.
//!
//! The missing blocks of a request enter one by one, the prompt's first block first; each replaces the
//! oldest block if the cache is full. So a block that is resident when the request arrives may be evicted before
//! its turn, and enters again as the newest. Of a prompt longer than the cache the end remains, which is useless
//! under the prefix rule. Published simulators implement FIFO in this way (`kvcache-simulator` 0.1.3).

use forebay::Result;
use forebay::trace::requests::RequestTrace;

use super::cache::Cache;
use crate::study::reserve;

pub struct Fifo {
    /// Resident blocks by entry, a ring once it is full.
    queue: Vec<u32>,
    /// The oldest of a full ring.
    oldest: usize,
    capacity: usize,
    resident: Vec<bool>,
}

impl Fifo {
    pub fn new(trace: &RequestTrace, capacity: u32) -> Result<Fifo> {
        let capacity = capacity as usize;
        let resident = reserve::filled(trace.distinct() as usize, false)?;
        Ok(Fifo { queue: reserve::vector(capacity)?, oldest: 0, capacity, resident })
    }

    /// Admits the block. Returns whether another was evicted.
    fn enter(&mut self, block: u32) -> bool {
        self.resident[block as usize] = true;
        if self.queue.len() < self.capacity {
            self.queue.push(block);
            return false;
        }
        let gone = std::mem::replace(&mut self.queue[self.oldest], block);
        self.resident[gone as usize] = false;
        self.oldest += 1;
        if self.oldest == self.capacity {
            self.oldest = 0;
        }
        true
    }
}

impl Cache for Fifo {
    fn contains(&self, block: u32) -> bool {
        self.resident[block as usize]
    }

    fn serve(&mut self, blocks: &[u32]) -> u64 {
        let mut gone = 0;
        for block in blocks {
            if !self.resident[*block as usize] {
                gone += u64::from(self.enter(*block));
            }
        }
        gone
    }
}
