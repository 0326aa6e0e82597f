//! What operations do: on the device beneath, when their time has come.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::device::{
    Answer, Begin, Completer, Cut, Device, Event, Join, Part, Pools, Raise, Slice, Stream, Warm,
};
use crate::error::{Kind, Result};
use crate::ids::{Lane, MicroBatch};
use crate::sync::Arc;

/// An effect that waits for its operation's time.
pub(super) enum Effect {
    Call(Arc<dyn Fn() + Send + Sync>),
    Complete(Completer),
    Copy {
        from: Slice,
        to: Slice,
    },
    /// On pools of the device beneath.
    Pool(Pools, PoolEffect),
}

/// An effect on the tables and lists of a cache.
#[derive(Clone, Copy, Debug)]
pub(super) enum PoolEffect {
    /// Takes over what was staged last for the lane, which is what the caller's edges are there for.
    Join(Lane),
    Truncate {
        lane: Lane,
        settle: u32,
        length: u32,
    },
    Leave(Lane),
    Warm(Warm),
    Raise(Raise),
    Begin(Begin),
    Resolve {
        part: Part,
        selection: Slice,
        answer: Answer,
    },
    Gather {
        part: Part,
        pass: u32,
    },
    Scatter(Part),
    Report {
        micro_batch: MicroBatch,
        slot: Slice,
    },
}

impl std::fmt::Debug for Effect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Effect::Call(_) => f.write_str("call"),
            Effect::Complete(_) => f.write_str("complete"),
            Effect::Copy { from, to } => write!(f, "copy {from:?} {to:?}"),
            Effect::Pool(pools, effect) => write!(f, "{pools:?} {effect:?}"),
        }
    }
}

/// What the host keeps for the operation that will take it over, and must leave alone until then.
#[derive(Clone, Debug, Default)]
pub(super) struct Staged {
    pub(super) pages: Vec<u32>,
    pub(super) blocks: Vec<Vec<u32>>,
    pub(super) budgets: Vec<u32>,
    pub(super) length: u32,
}

/// A device whose streams run each operation where it is enqueued, and one of its streams.
#[derive(Debug)]
pub(super) struct Beneath {
    pub(super) device: Arc<dyn Device>,
    stream: Stream,
    /// Never recorded, and so complete: a look at it tells whether the device has failed.
    sound: Event,
}

impl Beneath {
    pub(super) fn new(device: Arc<dyn Device>) -> Result<Self> {
        Ok(Beneath { stream: device.stream()?, sound: device.event()?, device })
    }

    pub(super) fn copy(&self, from: Slice, to: Slice) -> Result<()> {
        self.device.copy(self.stream, from, to)?;
        self.check()
    }

    pub(super) fn run(&self, pools: Pools, effect: PoolEffect, staged: &Staged) -> Result<()> {
        let (device, stream) = (&*self.device, self.stream);
        match effect {
            PoolEffect::Join(lane) => {
                let Staged { pages, blocks, budgets, length } = staged;
                device.join(pools, stream, Join { lane, length: *length, pages, blocks, budgets })
            }
            PoolEffect::Truncate { lane, settle, length } => {
                device.truncate(pools, stream, Cut { lane, settle, length, pages: &staged.pages })
            }
            PoolEffect::Leave(lane) => device.leave(pools, stream, lane),
            PoolEffect::Warm(warm) => device.warm(pools, stream, warm),
            PoolEffect::Raise(raise) => device.raise(pools, stream, raise),
            PoolEffect::Begin(begin) => device.begin(pools, stream, begin),
            PoolEffect::Resolve { part, selection, answer } => {
                device.resolve(pools, stream, part, selection, answer)
            }
            PoolEffect::Gather { part, pass } => device.gather(pools, stream, part, pass),
            PoolEffect::Scatter(part) => device.scatter(pools, stream, part),
            PoolEffect::Report { micro_batch, slot } => device.report(pools, stream, micro_batch, slot),
        }?;
        self.check()
    }

    /// Whether the device has failed.
    fn check(&self) -> Result<()> {
        self.device.query(self.sound).map(|_| ())
    }
}

/// Runs an engine's callback; one that panics has failed.
pub(super) fn call(work: &(dyn Fn() + Send + Sync)) -> Result<(), Kind> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| Kind::Internal)
}
