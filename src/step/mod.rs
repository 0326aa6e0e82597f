//! A decode step: prepare, the layers, finish, retire.
//!
//! | call | what the host does |
//! |---|---|
//! | prepare | fills a pinned step descriptor of the ring; enqueues its copy and the commit of the previous step |
//! | layer | enqueues R, G and S (resolve, gather, scatter) of one layer on the given streams |
//! | finish | enqueues the operation that writes the report to its pinned slot, then the step's event |
//! | retire | after that event, reads the report and frees the resources that only this step still named |
//!
//! A report holds counters, lengths and the sticky word (the step's error, if there was one), together with the step's
//! number. A [`Step`] is an owned token, not a borrow. It is *open* from prepare until finish, and then *in flight*
//! until it is retired. An open step becomes *abandoned* if one of its layers cannot be enqueued completely. The
//! engine must still finish and retire it, and must discard its tokens.
//!
//! A slot of the ring belongs to one step from prepare until retire. The host never writes its pinned descriptor while
//! a copy may still run (NVIDIA/TensorRT-LLM#15546 and vllm-project/vllm#51667 report this fault). A full ring is
//! [`crate::Kind::Busy`], never a wait. This module allocates nothing after construction.
//!
//! `ring` holds the slots, from prepare to retire. `layer` has the calls between them, `enqueued` records which calls
//! are still missing, and `retire` has the results.

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

/// A step between prepare and retire. Dropping it does not end it: its ring slot, and the resources of its sequences,
/// stay in use until it is retired.
#[must_use = "a step holds its sequences' memory until it is retired"]
#[derive(Debug, PartialEq, Eq)]
pub struct Step {
    /// The tag of its ring. Steps of two caches may have equal numbers and slots.
    pub(crate) ring: u32,
    pub(crate) number: u64,
    pub(crate) slot: u32,
    pub(crate) micro_batch: MicroBatch,
    pub(crate) rows: u32,
    pub(crate) query_rows: u32,
    phase: Phase,
    pub(crate) work: WorkStreams,
}

/// The phase of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Prepared. Its layers may be enqueued.
    Open {
        /// Whether a graph of all its layers has been launched; a second launch is rejected.
        launched: bool,
    },
    /// A schedule is enqueueing layers, or a launch is in progress. If a callback or the device fails or panics, the
    /// step stays in this phase and counts as abandoned.
    Enqueueing {
        /// As in `Open`.
        launched: bool,
    },
    /// The engine has abandoned it.
    Abandoned {
        /// As in `Open`.
        launched: bool,
    },
    /// Its report and its event are enqueued: it is in flight.
    Finished {
        /// Whether it was abandoned. Then its report may be read, but its tokens must be discarded.
        abandoned: bool,
    },
}

/// The streams that hold work of a step, in addition to the stream on which its end is enqueued. The end is ordered
/// after the work of all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkStreams {
    /// The streams of its layers, once a schedule has enqueued or launched one of them.
    pub(crate) layers: Option<OverlapStreams>,
    /// One more stream: that of a launch that is not yet ordered before all of them, or of an end that was refused.
    pub(crate) beside: Option<Stream>,
}

impl Step {
    pub(crate) const fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Finished { .. })
    }

    /// Whether a layer of it was not enqueued completely. Also true after its end.
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

    /// Abandons an open step.
    pub(crate) fn abandon(&mut self) {
        if let Phase::Open { launched } | Phase::Enqueueing { launched } = self.phase {
            self.phase = Phase::Abandoned { launched };
        }
    }

    /// Notes that layers of an open step are about to be enqueued on these streams. The step counts as abandoned until
    /// [`Step::end_layers`].
    pub(crate) fn begin_layers(&mut self, streams: OverlapStreams) {
        if let Phase::Open { launched } = self.phase {
            self.phase = Phase::Enqueueing { launched };
        }
        self.work.layers = Some(streams);
    }

    /// Notes that these layers were enqueued completely.
    pub(crate) fn end_layers(&mut self) {
        if let Phase::Enqueueing { launched } = self.phase {
            self.phase = Phase::Open { launched };
        }
    }

    /// Notes that a graph of all layers of an open step has been launched.
    pub(crate) fn launch(&mut self) {
        if let Phase::Open { .. } | Phase::Enqueueing { .. } = self.phase {
            self.phase = Phase::Open { launched: true };
        }
    }

    /// Notes that the end of an open step is enqueued.
    fn finish(&mut self) {
        self.phase = Phase::Finished { abandoned: self.is_abandoned() };
    }

    /// The step's number. A cache numbers its steps from 1.
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// Its micro-batch.
    pub const fn micro_batch(&self) -> MicroBatch {
        self.micro_batch
    }

    /// The number of batch rows.
    pub const fn rows(&self) -> u32 {
        self.rows
    }

    /// Query rows of each batch row.
    pub const fn query_rows(&self) -> u32 {
        self.query_rows
    }
}
