//! Request traces through a prefix cache of one size.
//!
//! A request's hits are its leading run of resident blocks. Then all its blocks are touched, the last one
//! first, so that a prefix outlives its continuations; and the least recently used beyond the capacity go.

use forebay::total::Recency;
use forebay::trace::requests::RequestTrace;
use forebay::{Error, Kind, Result};

/// What a replay counted, over the measured requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Requests.
    pub requests: u64,
    /// Their block references.
    pub blocks: u64,
    /// References in leading runs of resident blocks.
    pub hit_blocks: u64,
    /// Tokens of the prompts.
    pub input_tokens: u64,
    /// Tokens in those runs.
    pub hit_tokens: u64,
    /// Blocks that went to make room.
    pub evicted_blocks: u64,
}

/// Replays all requests through a cache of `capacity` blocks and counts from request `skip` on.
///
/// # Errors
/// [`Kind::OutOfMemory`].
pub fn replay(trace: &RequestTrace, capacity: u32, skip: usize, progress: impl Fn()) -> Result<Outcome> {
    let mut order = Recency::new(trace.distinct()).map_err(|bytes| {
        Error::new(Kind::OutOfMemory, "replay").at("the order of the blocks").with("bytes", bytes)
    })?;
    let mut outcome = Outcome::default();
    for i in 0..trace.requests() {
        let blocks = trace.blocks(i);
        let run = blocks.iter().take_while(|block| order.contains(**block)).count();
        for block in blocks.iter().rev() {
            order.touch(*block);
        }
        let surplus = order.len().saturating_sub(capacity);
        for _ in 0..surplus {
            order.pop_oldest();
        }
        if i >= skip {
            outcome.requests += 1;
            outcome.blocks += blocks.len() as u64;
            outcome.hit_blocks += run as u64;
            outcome.input_tokens += trace.input_tokens(i);
            outcome.hit_tokens += trace.tokens_of_run(i, run);
            outcome.evicted_blocks += u64::from(surplus);
        }
        progress();
    }
    Ok(outcome)
}
