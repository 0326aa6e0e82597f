//! Replays request traces through a prefix cache of one size, or of every size at once ([`curve()`]).
//!
//! A request's hits are its leading run of resident blocks (*prefix rule*). Then the request uses its blocks, and the
//! policy decides which blocks the cache keeps, at most its capacity:
//!
//! | policy | order in which blocks are used | victim |
//! |---|---|---|
//! | [`lru`](Policy::Lru) | last to first, so that a prefix outlives its continuations | the block used longest ago |
//! | [`fifo`](Policy::Fifo) | first to last, as other simulators do | the block that entered first |
//! | [`s3-fifo`](Policy::S3Fifo) | last to first | see `crate::study::s3fifo_queues` |
//! | [`belady`](Policy::Belady) | all at once | the block whose next request is farthest, see `belady` |
//!
//! Under every policy a block that was used and is not kept has entered and is evicted. Memory of a running request
//! beyond the capacity is not counted. Nothing is resident before the first request.

mod belady;
mod cache;
mod curve;
mod fifo;
mod lru;
mod s3fifo;
pub mod tiers;

use forebay::Result;
use forebay::trace::requests::RequestTrace;

use self::cache::Cache;
pub use self::curve::{BlockCurve, curve};

/// Eviction policy of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Evicts the block used longest ago.
    Lru,
    /// Evicts the block that entered first.
    Fifo,
    /// Evicts blocks used once early, and blocks used again later.
    S3Fifo,
    /// Evicts the block whose next request is farthest in the future.
    Belady,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 4] = [Policy::Lru, Policy::Fifo, Policy::S3Fifo, Policy::Belady];

    /// Its name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Fifo => "fifo",
            Policy::S3Fifo => "s3-fifo",
            Policy::Belady => "belady",
        }
    }
}

/// The counts of a replay over the measured requests.
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
    /// Evicted blocks.
    pub evicted_blocks: u64,
}

/// The most bytes that a replay under `policy` holds in addition to the trace.
pub fn bytes(trace: &RequestTrace, policy: Policy) -> u64 {
    let [blocks, references, requests] =
        [trace.distinct() as usize, trace.references().len(), trace.requests()].map(|count| count as u64);
    match policy {
        Policy::Lru => 16 * blocks,
        Policy::Fifo => 8 * blocks,
        Policy::S3Fifo => 32 * blocks,
        Policy::Belady => 4 * references + 12 * blocks + 12 * requests,
    }
}

/// The most bytes that [`curve()`] holds in addition to the trace.
pub fn curve_bytes(trace: &RequestTrace) -> u64 {
    72 * u64::from(trace.distinct())
}

/// Replays all requests through a cache of `capacity` blocks, at least 1, and counts from request `skip` on.
/// Calls `progress` after every request.
///
/// # Errors
/// [`forebay::Kind::OutOfMemory`].
pub fn replay(
    trace: &RequestTrace,
    policy: Policy,
    capacity: u32,
    skip: usize,
    progress: impl Fn(),
) -> Result<Outcome> {
    // A larger cache would never fill.
    let capacity = capacity.min(trace.distinct()).max(1);
    Ok(match policy {
        Policy::Lru => count(trace, lru::Lru::new(trace, capacity)?, skip, progress),
        Policy::Fifo => count(trace, fifo::Fifo::new(trace, capacity)?, skip, progress),
        Policy::S3Fifo => count(trace, s3fifo::S3Fifo::new(trace, capacity)?, skip, progress),
        Policy::Belady => count(trace, belady::Belady::new(trace, capacity)?, skip, progress),
    })
}

fn count(trace: &RequestTrace, mut cache: impl Cache, skip: usize, progress: impl Fn()) -> Outcome {
    let mut outcome = Outcome::default();
    for i in 0..trace.requests() {
        let blocks = trace.blocks(i);
        let run = blocks.iter().take_while(|block| cache.contains(**block)).count();
        let evicted = cache.serve(blocks);
        if i >= skip {
            outcome.requests += 1;
            outcome.blocks += blocks.len() as u64;
            outcome.hit_blocks += run as u64;
            outcome.input_tokens += trace.input_tokens(i);
            outcome.hit_tokens += trace.tokens_of_run(i, run);
            outcome.evicted_blocks += evicted;
        }
        progress();
    }
    outcome
}
