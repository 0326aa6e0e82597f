//! First in, first out: the block leaves that entered longest ago, however often it was used since.
//!
//! A request's blocks that are not resident enter one by one, the prompt's first block first; each takes the
//! place of the oldest when the cache is full. So one that is resident when the request arrives may go before
//! its turn comes, and enters again as the newest; and of a prompt longer than the cache the end stays, of no
//! use to the prefix rule. That is FIFO as published simulators have it (`kvcache-simulator` 0.1.3).

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

    /// Lets the block in; whether another went.
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
