//! A decode step: prepare, the layers, finish, retire.
//!
//! | call | where | does |
//! |---|---|---|
//! | prepare | host | fills a pinned step descriptor of the ring, enqueues its copy and the commit of the step before |
//! | layer | host, enqueues only | R, G and S of one layer on the streams it is given; changes no state |
//! | finish | host, enqueues only | a last operation writes the report to its pinned slot; then the step's event |
//! | retire | host, after that event | reads the report and gives back what only this step still named |
//!
//! A report holds counters, lengths and the sticky word, stamped with the step's number. A [`Step`] is an
//! owned token, not a borrow: *open* from prepare until finish, *in flight* until retired. While it is open it may be
//! *abandoned*, when a layer of it could not be enqueued whole: then it ends all the same, and its tokens are worth
//! nothing.
//! A slot of the ring belongs to one step from prepare until retire: its pinned block is never written
//! while a copy of it may still run (NVIDIA/TensorRT-LLM#15546, vllm-project/vllm#51667 did). A full ring
//! is [`crate::Kind::Busy`], never a wait. Nothing here allocates.
//!
//! `ring` has the slots, from prepare to retire; `layer` the calls between; `enqueued` which of them are still due;
//! `retire` what an engine is told at the end.

mod enqueued;
mod layer;
mod retire;
mod ring;

pub(crate) use enqueued::{Due, Enqueued};
pub(crate) use layer::LayerCalls;
pub use layer::{Buffers, LayerCall, OverlapStreams, Streams};
pub use retire::{Retired, Unretired};
pub(crate) use ring::{Ended, Ring, RingShape, RowInFlight};

use crate::device::Stream;
use crate::ids::MicroBatch;

/// A step between prepare and retire. Dropping it does not end it: its ring slot, and what its sequences
/// hold, stay taken until it is retired.
#[must_use = "a step holds its sequences' memory until it is retired"]
#[derive(Debug, PartialEq, Eq)]
pub struct Step {
    /// Which ring it is of: numbers and slots of two caches are alike.
    pub(crate) ring: u32,
    pub(crate) number: u64,
    pub(crate) slot: u32,
    pub(crate) micro_batch: MicroBatch,
    pub(crate) rows: u32,
    pub(crate) query_rows: u32,
    phase: Phase,
    pub(crate) work: WorkStreams,
}

/// How far the enqueueing of a step has come. Each phase keeps what is still asked of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// From prepare on: its layers are being enqueued, or have been.
    Open {
        /// A graph of all of them has been launched: not a second one.
        launched: bool,
    },
    /// Layers are being enqueued by a schedule or launched: a callback or a device that refuses or panics leaves the
    /// step here, and then it is as abandoned.
    Enqueueing {
        /// As before.
        launched: bool,
    },
    /// Its engine has given it up.
    Abandoned {
        /// As before.
        launched: bool,
    },
    /// Its report and its event are enqueued: in flight.
    Finished {
        /// It was abandoned before: its report may be read, its tokens not published.
        abandoned: bool,
    },
}

/// The streams on which work of a step stands, beside the one that its end is enqueued on: the end is ordered behind
/// them all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkStreams {
    /// Those of its layers, once one of them was enqueued by a schedule or launched.
    pub(crate) layers: Option<OverlapStreams>,
    /// One beside these: that of a launch which is not ordered before all of them, or of an end that was refused.
    pub(crate) beside: Option<Stream>,
}

impl Step {
    pub(crate) const fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Finished { .. })
    }

    /// Whether a layer of it was not enqueued whole, before or behind its end.
    pub(crate) const fn is_abandoned(&self) -> bool {
        let left = matches!(self.phase, Phase::Enqueueing { .. } | Phase::Abandoned { .. });
        left || matches!(self.phase, Phase::Finished { abandoned: true })
    }

    /// Whether a graph of all layers of an open step has been launched.
    pub(crate) const fn is_launched(&self) -> bool {
        match self.phase {
            Phase::Open { launched } | Phase::Enqueueing { launched } | Phase::Abandoned { launched } => {
                launched
            }
            Phase::Finished { .. } => false,
        }
    }

    /// An open step is given up.
    pub(crate) fn abandon(&mut self) {
        if let Phase::Open { launched } | Phase::Enqueueing { launched } = self.phase {
            self.phase = Phase::Abandoned { launched };
        }
    }

    /// Layers of an open step are about to be enqueued on these streams: until [`Step::end_layers`] they count as
    /// not enqueued whole.
    pub(crate) fn begin_layers(&mut self, streams: OverlapStreams) {
        if let Phase::Open { launched } = self.phase {
            self.phase = Phase::Enqueueing { launched };
        }
        self.work.layers = Some(streams);
    }

    /// They all were enqueued.
    pub(crate) fn end_layers(&mut self) {
        if let Phase::Enqueueing { launched } = self.phase {
            self.phase = Phase::Open { launched };
        }
    }

    /// A graph of all layers of an open step has been launched.
    pub(crate) fn launch(&mut self) {
        if let Phase::Open { .. } | Phase::Enqueueing { .. } = self.phase {
            self.phase = Phase::Open { launched: true };
        }
    }

    /// The end of an open step is enqueued.
    fn finish(&mut self) {
        self.phase = Phase::Finished { abandoned: self.is_abandoned() };
    }

    /// The step's number, from 1, counted through the life of its cache.
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// Its micro-batch.
    pub const fn micro_batch(&self) -> MicroBatch {
        self.micro_batch
    }

    /// Rows of the batch.
    pub const fn rows(&self) -> u32 {
        self.rows
    }

    /// Query rows of each batch row.
    pub const fn query_rows(&self) -> u32 {
        self.query_rows
    }
}
