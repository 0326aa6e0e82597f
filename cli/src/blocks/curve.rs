//! LRU at every capacity at once.
//!
//! An LRU cache of `n` blocks holds what stands no deeper than `n` in the order of use, whatever `n` is. So a
//! reference finds its block resident at every capacity from its depth on, and is a hit under the prefix rule
//! from the largest depth in the run that leads up to it; a block that was never used ends all runs. Two
//! histograms, of these largest depths and of depths, answer every capacity from 1 on exactly:
//!
//! - hits, and the tokens in them, by the first;
//! - blocks that enter by the second: the blocks that a request uses, each once, that were not resident. A cache
//!   that has seen `d` distinct blocks holds `min(n, d)`; what entered and is not there has been evicted.

use forebay::Result;
use forebay::residency::LruStack;
use forebay::trace::requests::RequestTrace;

use super::{Outcome, table};

/// Sums over all depths up to one.
#[derive(Clone, Copy, Default)]
struct Sums {
    /// References whose run is no deeper, and their tokens.
    hits: u64,
    tokens: u64,
    /// Blocks of a request, each once, that stood no deeper.
    resident: u64,
}

/// What [`replay`](super::replay) with LRU counts at every capacity.
pub struct BlockCurve {
    /// By capacity from 0 on; the last one stands for all larger ones.
    sums: Vec<Sums>,
    /// What does not depend on the capacity.
    measured: Outcome,
    /// Blocks of the measured requests, each once a request.
    used: u64,
    /// Distinct blocks before the measured requests, and at their end.
    seen: [u32; 2],
}

impl BlockCurve {
    /// What a replay with `capacity` blocks, at least 1, counts.
    pub fn at(&self, capacity: u32) -> Outcome {
        let last = self.sums.last().copied().unwrap_or_default();
        let sums = self.sums.get(capacity as usize).copied().unwrap_or(last);
        let [before, after] = self.seen.map(|blocks| u64::from(blocks.min(capacity)));
        Outcome {
            hit_blocks: sums.hits,
            hit_tokens: sums.tokens,
            evicted_blocks: before + (self.used - sums.resident) - after,
            ..self.measured
        }
    }

    /// The capacities with more hits than the one below them, ascending.
    pub fn changes(&self) -> impl Iterator<Item = u32> {
        (1..).zip(self.sums.array_windows()).filter(|(_, [below, at])| below.hits < at.hits).map(|(n, _)| n)
    }

    /// The smallest capacity with the hits of all larger ones.
    pub fn flat_from(&self) -> u32 {
        self.changes().last().unwrap_or(1)
    }
}

/// Counts at every capacity what `replay` counts from request `skip` on. Calls `progress` after every request.
///
/// # Errors
/// [`forebay::Kind::OutOfMemory`].
pub fn curve(trace: &RequestTrace, skip: usize, progress: impl Fn()) -> Result<BlockCurve> {
    let mut order = LruStack::new(trace.distinct())?;
    let mut counts = Counts::new(trace)?;
    let mut before = None;
    for i in 0..trace.requests() {
        let blocks = trace.blocks(i);
        if i >= skip {
            before = before.or(Some(order.len()));
            counts.request(trace, i, &mut order);
        }
        order.touch(blocks.iter().rev().copied());
        progress();
    }
    let after = order.len();
    Ok(counts.finish([before.unwrap_or(after), after]))
}

/// Both histograms on the way.
struct Counts {
    /// By depth.
    found: Vec<Sums>,
    measured: Outcome,
    used: u64,
    /// Depths of one request's blocks.
    depths: Vec<u32>,
    /// By block: the last request that had it, plus 1. Empty where no request repeats a block.
    last: Vec<u32>,
}

impl Counts {
    fn new(trace: &RequestTrace) -> Result<Counts> {
        let blocks = trace.distinct() as usize;
        let repeats = trace.notes().repeats > 0;
        Ok(Counts {
            found: table(blocks + 1, Sums::default())?,
            measured: Outcome::default(),
            used: 0,
            depths: Vec::new(),
            last: if repeats { table(blocks, 0)? } else { Vec::new() },
        })
    }

    /// Whether this is the request's first reference to the block.
    fn is_first(&mut self, i: usize, block: u32) -> bool {
        let now = i as u32 + 1;
        self.last.get_mut(block as usize).is_none_or(|last| std::mem::replace(last, now) != now)
    }

    /// Request `i` arrives.
    fn request(&mut self, trace: &RequestTrace, i: usize, order: &mut LruStack) {
        let blocks = trace.blocks(i);
        let input = trace.input_tokens(i);
        self.measured.requests += 1;
        self.measured.blocks += blocks.len() as u64;
        self.measured.input_tokens += input;
        let mut depths = std::mem::take(&mut self.depths);
        depths.clear();
        order.depths(blocks, |depth| depths.push(depth));
        // The run so far: its largest depth, its tokens; at depth 0 it has ended.
        let (mut deepest, mut tokens, mut runs) = (0, 0, true);
        for (block, depth) in blocks.iter().zip(&depths) {
            runs &= *depth > 0;
            if runs {
                deepest = deepest.max(*depth);
                let longer = input.min(tokens + trace.tokens_of_block(*block));
                let found = &mut self.found[deepest as usize];
                found.hits += 1;
                found.tokens += longer - tokens;
                tokens = longer;
            }
            if self.is_first(i, *block) {
                self.used += 1;
                self.found[*depth as usize].resident += 1;
            }
        }
        self.depths = depths;
    }

    /// The curve, where the distinct blocks before and after the measured requests were `seen`.
    fn finish(self, seen: [u32; 2]) -> BlockCurve {
        let Counts { found: mut sums, measured, used, .. } = self;
        // What was never used before is resident nowhere.
        let mut sum = Sums::default();
        sums.iter_mut().take(1).for_each(|never| *never = sum);
        for at in &mut sums {
            sum.hits += at.hits;
            sum.tokens += at.tokens;
            sum.resident += at.resident;
            *at = sum;
        }
        BlockCurve { sums, measured, used, seen }
    }
}
