//! Belady's optimum: after each request stay the blocks whose next request comes soonest, of those that were
//! resident and those that it used.
//!
//! **What it is the optimum of.** Every policy starts empty, and after a request holds at most `capacity` of
//! the blocks that it held before or that the request used. Over all of them this one finds the most blocks
//! resident, counted over *all* requests, each block alike: the usual exchange. Where ids name
//! prefixes (Mooncake, sessions), a block is only asked for behind its prefix, so a prefix is never farther than
//! its continuations; ties go against the block used longest ago, which of two of one prompt is the later. So what
//! is resident is whole prefixes, every resident block counts under the prefix rule, and the optimum of
//! single blocks is that of the prefix rule as well. Tested against a search over all choices.
//!
//! **What it is not the optimum of.** Of tokens, where the last blocks of prompts are partial. Of the measured
//! requests alone, when some are skipped: they profit from what is best for all. Of the prefix rule where ids name
//! pieces (RAGPulse): a resident piece behind a missing one counts for nothing there.
//!
//! **How.** A resident block waits in the queue of its next request; the queue of the farthest request gives up
//! its first. Blocks that nobody asks for again have a queue of their own, which gives up before all.

use std::collections::BinaryHeap;

use forebay::Result;
use forebay::trace::requests::RequestTrace;

use super::cache::Cache;
use crate::study::reserve;

/// No request, or no block.
const NONE: u32 = u32::MAX;

/// Blocks that wait for the same request, by the time at which they began to.
#[derive(Clone, Copy)]
struct Queue {
    first: u32,
    last: u32,
}

const EMPTY: Queue = Queue { first: NONE, last: NONE };

pub struct Belady {
    capacity: usize,
    /// By reference: the next request that has its block, or [`NONE`].
    next: Vec<u32>,
    /// Requests and references served.
    served: usize,
    references: usize,
    resident: Vec<bool>,
    /// By block: the one behind it in its queue.
    behind: Vec<u32>,
    /// By request, then of the blocks that nobody asks for again.
    queues: Vec<Queue>,
    /// Requests with a queue; past ones may be among them.
    farthest: BinaryHeap<u32>,
    len: usize,
}

/// By reference: the next request that has its block.
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
        let nobody = self.queues.len() - 1;
        &mut self.queues[nobody.min(request as usize)]
    }

    /// Empties the queue of the request that is served: its blocks are what the request finds resident.
    fn release(&mut self) {
        let queue = std::mem::replace(&mut self.queues[self.served], EMPTY);
        let mut block = queue.first;
        while block != NONE {
            self.resident[block as usize] = false;
            self.len -= 1;
            block = self.behind[block as usize];
        }
    }

    /// Lets the block wait for a request, behind those that do already.
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

    /// Drops the block whose next request is farthest.
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
