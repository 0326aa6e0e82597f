//! The miss-ratio curve of a request trace: counts LRU's hits at every capacity in one pass.
//!
//! An LRU cache of `n` blocks holds the blocks with a stack distance of at most `n`, for any `n`. So a
//! reference finds its block resident at every capacity from its stack distance on. Under the prefix rule it is a hit
//! from the largest stack distance in its leading run on; a block that was never used before ends all runs. Two
//! histograms, of these largest distances and of the distances, answer every capacity from 1 on exactly:
//!
//! - hits, and the tokens in them, from the first;
//! - entering blocks from the second: the blocks that a request uses, each once, that were not resident. A cache
//!   that has seen `d` distinct blocks holds `min(n, d)`; every other block that entered has been evicted.

use forebay::Result;
use forebay::study::LruStack;
use forebay::trace::requests::RequestTrace;

use super::Outcome;
use crate::study::reserve;

/// The counts at a capacity; while counting, the increase from one distance to the next.
#[derive(Clone, Copy, Default)]
struct Sums {
    /// References whose run has at most this distance, and their tokens.
    hits: i64,
    tokens: i64,
    /// Blocks of a request, each once, with at most this distance.
    resident: i64,
}

/// The counts of [`replay`](super::replay) with LRU at every capacity.
pub struct BlockCurve {
    /// By capacity from 0 on; the last entry holds for all larger ones.
    sums: Vec<Sums>,
    /// The counts that do not depend on the capacity.
    measured: Outcome,
    /// Blocks of the measured requests, each once a request.
    used: u64,
    /// Distinct blocks before the measured requests, and at their end.
    seen: [u32; 2],
}

impl BlockCurve {
    /// The counts of a replay with `capacity` blocks, at least 1.
    pub fn at(&self, capacity: u32) -> Outcome {
        let last = self.sums.last().copied().unwrap_or_default();
        let sums = self.sums.get(capacity as usize).copied().unwrap_or(last);
        let [before, after] = self.seen.map(|blocks| u64::from(blocks.min(capacity)));
        Outcome {
            hit_blocks: sums.hits as u64,
            hit_tokens: sums.tokens as u64,
            evicted_blocks: before + (self.used - sums.resident as u64) - after,
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

/// Counts for every capacity what `replay` counts from request `skip` on. Calls `progress` after every request.
///
/// # Errors
/// [`forebay::Kind::OutOfMemory`].
pub fn curve(trace: &RequestTrace, skip: usize, progress: impl Fn()) -> Result<BlockCurve> {
    let mut order = LruStack::new(trace.distinct())?;
    let mut counts = Counts::new(trace)?;
    let mut before = None;
    for i in 0..trace.requests() {
        if i >= skip {
            before = before.or(Some(order.len()));
            counts.request(trace, i, &mut order);
        } else {
            order.touch(trace.blocks(i).iter().rev().copied());
        }
        progress();
    }
    let after = order.len();
    Ok(counts.finish([before.unwrap_or(after), after]))
}

/// Both histograms during the pass.
struct Counts {
    /// By stack distance.
    found: Vec<Sums>,
    measured: Outcome,
    used: u64,
    /// Stack distances of one request's pieces.
    depths: Vec<u32>,
    /// By piece: the last request that had it, plus 1. Empty if ids name prefixes, which a request never repeats.
    last: Vec<u32>,
}

/// A request's run so far.
struct Run {
    /// Its largest stack distance.
    deepest: u32,
    tokens: u64,
    ended: bool,
}

impl Counts {
    fn new(trace: &RequestTrace) -> Result<Counts> {
        let blocks = trace.distinct() as usize;
        let repeats = trace.block_tokens().is_none();
        Ok(Counts {
            found: reserve::filled(blocks + 2, Sums::default())?,
            measured: Outcome::default(),
            used: 0,
            depths: Vec::new(),
            last: if repeats { reserve::filled(blocks, 0)? } else { Vec::new() },
        })
    }

    /// Processes request `i` and its blocks.
    fn request(&mut self, trace: &RequestTrace, i: usize, order: &mut LruStack) {
        let (blocks, input) = (trace.blocks(i), trace.input_tokens(i));
        self.measured.requests += 1;
        self.measured.blocks += blocks.len() as u64;
        self.measured.input_tokens += input;
        let mut run = Run { deepest: 0, tokens: 0, ended: false };
        if let Some(tokens) = trace.block_tokens() {
            self.used += blocks.len() as u64;
            order.retouch(blocks, |depth, count| {
                self.resident(depth, count);
                self.hits(&mut run, depth, count, u64::from(tokens), input);
            });
            return;
        }
        let mut depths = std::mem::take(&mut self.depths);
        depths.clear();
        order.depths(blocks, |depth| depths.push(depth));
        for (block, depth) in blocks.iter().zip(&depths) {
            let last = &mut self.last[*block as usize];
            if std::mem::replace(last, i as u32 + 1) != i as u32 + 1 {
                self.used += 1;
                self.resident(*depth, 1);
            }
            self.hits(&mut run, *depth, 1, trace.tokens_of_block(*block), input);
        }
        self.depths = depths;
        order.touch(blocks.iter().rev().copied());
    }

    /// Counts blocks at `depth` and at the `count - 1` depths below it.
    fn resident(&mut self, depth: u32, count: u32) {
        if depth > 0 {
            self.found[depth as usize].resident += 1;
            self.found[(depth + count) as usize].resident -= 1;
        }
    }

    /// Counts the same blocks, each of `tokens`, as part of the run; their prompt has `input` tokens.
    fn hits(&mut self, run: &mut Run, depth: u32, count: u32, tokens: u64, input: u64) {
        run.ended |= depth == 0;
        if run.ended {
            return;
        }
        // Blocks above the deepest one so far count from that depth on.
        let above = (run.deepest + 1).saturating_sub(depth).min(count);
        self.add(run.deepest, 1, above, tokens);
        self.add(depth + above, count - above, 1, tokens);
        run.deepest = run.deepest.max(depth + count - 1);
        // The prompt may end in the last block.
        run.tokens += u64::from(count) * tokens;
        let beyond = run.tokens.saturating_sub(input);
        run.tokens -= beyond;
        self.found[run.deepest as usize].tokens -= beyond as i64;
        self.found[run.deepest as usize + 1].tokens += beyond as i64;
    }

    /// Adds `each` hits at every one of the `count` depths from `depth` on.
    fn add(&mut self, depth: u32, count: u32, each: u32, tokens: u64) {
        let (hits, tokens) = (i64::from(each), i64::from(each) * tokens as i64);
        let from = &mut self.found[depth as usize];
        (from.hits, from.tokens) = (from.hits + hits, from.tokens + tokens);
        let to = &mut self.found[(depth + count) as usize];
        (to.hits, to.tokens) = (to.hits - hits, to.tokens - tokens);
    }

    /// The curve, given the distinct blocks `seen` before and after the measured requests.
    fn finish(self, seen: [u32; 2]) -> BlockCurve {
        let Counts { found: mut sums, measured, used, .. } = self;
        let (mut at, mut all) = (Sums::default(), Sums::default());
        for sums in &mut sums {
            at.hits += sums.hits;
            at.tokens += sums.tokens;
            at.resident += sums.resident;
            all.hits += at.hits;
            all.tokens += at.tokens;
            all.resident += at.resident;
            *sums = all;
        }
        BlockCurve { sums, measured, used, seen }
    }
}
