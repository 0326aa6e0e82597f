//! Effects of operations: what runs on the device beneath at an operation's virtual time.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::device::pages::Kept;
use crate::device::{Completer, Device, Event, PoolOp, Pools, Slice, Stream};
use crate::error::{Kind, Result};
use crate::sync::Arc;

/// An effect that waits for its operation's time.
pub(super) enum Effect {
    Call(Arc<dyn Fn() + Send + Sync>),
    Complete(Completer),
    Copy {
        from: Slice,
        to: Slice,
    },
    /// An operation on pools of the device beneath.
    Pool(Pools, PoolOp<'static>),
    /// An operation on pages of the device beneath.
    Pages(Kept),
}

impl std::fmt::Debug for Effect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Effect::Call(_) => f.write_str("call"),
            Effect::Complete(_) => f.write_str("complete"),
            Effect::Copy { from, to } => write!(f, "copy {from:?} {to:?}"),
            Effect::Pool(pools, op) => write!(f, "{pools:?} {op:?}"),
            Effect::Pages(kept) => write!(f, "{kept:?}"),
        }
    }
}

/// A device whose streams run each operation where it is enqueued, and one of its streams.
#[derive(Debug)]
pub(super) struct Beneath {
    pub(super) device: Arc<dyn Device>,
    stream: Stream,
    /// An event that was never recorded and so is complete: querying it reports whether the device has failed.
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

    pub(super) fn run(&self, pools: Pools, op: PoolOp<'_>) -> Result<()> {
        self.device.enqueue(pools, self.stream, op)?;
        self.check()
    }

    pub(super) fn run_pages(&self, kept: &Kept) -> Result<()> {
        self.device.enqueue_pages(self.stream, kept.op())?;
        self.check()
    }

    /// Returns an error if the device has failed.
    fn check(&self) -> Result<()> {
        self.device.query(self.sound).map(|_| ())
    }
}

/// Runs an engine's callback; a panic counts as a failure.
pub(super) fn call(work: &(dyn Fn() + Send + Sync)) -> Result<(), Kind> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| Kind::Internal)
}
