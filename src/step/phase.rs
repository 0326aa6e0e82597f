//! The step as its engine holds it, and its phases.
//!
//! A step is a plain value without the memory of its slot. It names its slot, and its number and tag tell the ring
//! whether the slot is still this step's. The phase is in the step and not in the slot: a step that the engine holds
//! cannot be changed behind its back.
//!
//! | phase | entered by | what the engine may do next |
//! |---|---|---|
//! | open | prepare; the end of a schedule's layers or of a launch | enqueue layers, finish |
//! | enqueueing | the begin of a schedule's layers or of a launch | if that failed: finish, without publishing tokens |
//! | abandoned | the engine abandons an open step | finish, without publishing tokens |
//! | finished | finish | retire |
//!
//! No phase knows which calls were enqueued, or whether the device has ended: `enqueued` and the slot's event do.

use crate::ids::MicroBatch;
use crate::step::streams::{OverlapStreams, WorkStreams};

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
    pub(super) phase: Phase,
    pub(crate) work: WorkStreams,
}

/// The phase of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
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
    pub(super) fn finish(&mut self) {
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

/// A row of a step that has not been retired.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowInFlight {
    /// The sequence's index in the cache.
    pub(crate) sequence: u32,
    /// Rows that the sequence had enqueued before this step, over its whole life.
    pub(crate) enqueued_before: u64,
    /// Query rows of this step.
    pub(crate) query_rows: u32,
}
