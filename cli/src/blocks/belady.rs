//! Belady's optimum: after each request the cache keeps, of the blocks that were resident or that the request used,
//! those that are requested again soonest.
//!
//! **What it optimises.** Every policy starts empty, and after a request holds at most `capacity` of
//! the blocks that it held before or that the request used. Among all such policies this one finds the most blocks
//! resident, counted over *all* requests, each block alike, by the usual exchange argument. If ids name
//! prefixes (Mooncake, sessions), a block is only requested after its prefix, so a prefix is never farther than
//! its continuations; ties evict the block used longest ago, which of two blocks of one prompt is the later one. So
//! whole prefixes are resident, every resident block counts under the prefix rule, and the optimum of
//! single blocks is that of the prefix rule as well. A search over all choices tests this.
//!
//! **What it does not optimise.** Tokens, if the last blocks of prompts are partial. The measured
//! requests alone, if some are skipped: it optimises all requests. The prefix rule if ids name
//! pieces (RAGPulse): there a resident piece after a missing one does not count.
//!
//! **Implementation.** A resident block waits in the queue of its next request; the queue of the farthest request
//! gives up its first block as a victim. Blocks that are never requested again have a queue of their own, which gives
//! up blocks before all others.

use std::collections::BinaryHeap;

use forebay::Result;
use forebay::trace::requests::RequestTrace;

use super::cache::Cache;
use crate::study::reserve;

/// No request, or no block.
const NONE: u32 = u32::MAX;

/// Blocks that wait for the same request, in the order in which they began to wait.
#[derive(Clone, Copy)]
struct Queue {
    first: u32,
    last: u32,
}

const EMPTY: Queue = Queue { first: NONE, last: NONE };

pub struct Belady {
    capacity: usize,
    /// By reference: the next request with its block, or [`NONE`].
    next: Vec<u32>,
    /// The number of requests and references processed.
    served: usize,
    references: usize,
    resident: Vec<bool>,
    /// By block: the next one in its queue.
    behind: Vec<u32>,
    /// By request, and last the queue of blocks that are never requested again.
    queues: Vec<Queue>,
    /// Requests with a queue, possibly including past ones.
    farthest: BinaryHeap<u32>,
    len: usize,
}

/// By reference: the next request with its block.
fn next_requests(trace: &RequestTrace) -> Result<Vec<u32>> {
    let mut next = reserve::filled(trace.references().len(), NONE)?;
    let mut soonest = reserve::filled(trace.distinct() as usize, NONE)?;
    let mut end = next.len();
    for i in (0..trace.requests()).rev() {
        let blocks = trace.blocks(i);
        let first = end - blocks.len();
        for (next, block) in next[first..end].iter_mut().zip(blocks) {
            *next = soonest[*block as usize];
        }
        blocks.iter().for_each(|block| soonest[*block as usize] = i as u32);
        end = first;
    }
    Ok(next)
}

impl Belady {
    pub fn new(trace: &RequestTrace, capacity: u32) -> Result<Belady> {
        let blocks = trace.distinct() as usize;
        Ok(Belady {
            capacity: capacity as usize,
            next: next_requests(trace)?,
            served: 0,
            references: 0,
            resident: reserve::filled(blocks, false)?,
            behind: reserve::filled(blocks, NONE)?,
            queues: reserve::filled(trace.requests() + 1, EMPTY)?,
            farthest: BinaryHeap::from(reserve::vector(trace.requests())?),
            len: 0,
        })
    }

    /// The queue of a request, or of none.
    fn queue(&mut self, request: u32) -> &mut Queue {
        let none = self.queues.len() - 1;
        &mut self.queues[none.min(request as usize)]
    }

    /// Empties the queue of the current request: its blocks are the resident ones that the request finds.
    fn release(&mut self) {
        let queue = std::mem::replace(&mut self.queues[self.served], EMPTY);
        let mut block = queue.first;
        while block != NONE {
            self.resident[block as usize] = false;
            self.len -= 1;
            block = self.behind[block as usize];
        }
    }

    /// Appends the block to a request's queue.
    fn wait(&mut self, block: u32, request: u32) {
        self.resident[block as usize] = true;
        self.len += 1;
        self.behind[block as usize] = NONE;
        let queue = self.queue(request);
        let last = std::mem::replace(&mut queue.last, block);
        if last != NONE {
            self.behind[last as usize] = block;
            return;
        }
        queue.first = block;
        if request != NONE {
            self.farthest.push(request);
        }
    }

    /// Evicts the block whose next request is farthest.
    fn drop_farthest(&mut self) {
        let request = match self.queue(NONE).first {
            NONE => self.farthest.peek().copied().unwrap_or(NONE),
            _ => NONE,
        };
        let block = self.queue(request).first;
        if block == NONE {
            return;
        }
        let behind = self.behind[block as usize];
        self.queue(request).first = behind;
        if behind == NONE {
            *self.queue(request) = EMPTY;
            if request != NONE {
                self.farthest.pop();
            }
        }
        self.resident[block as usize] = false;
        self.len -= 1;
    }
}

impl Cache for Belady {
    fn contains(&self, block: u32) -> bool {
        self.resident[block as usize]
    }

    fn serve(&mut self, blocks: &[u32]) -> u64 {
        self.release();
        let end = self.references + blocks.len();
        for (block, reference) in blocks.iter().zip(self.references..end).rev() {
            if !self.resident[*block as usize] {
                self.wait(*block, self.next[reference]);
            }
        }
        (self.served, self.references) = (self.served + 1, end);
        let surplus = self.len.saturating_sub(self.capacity);
        (0..surplus).for_each(|_| self.drop_farthest());
        surplus as u64
    }
}
