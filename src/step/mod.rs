//! A decode step: prepare, the layers, finish, retire.
//!
//! | call | where | does |
//! |---|---|---|
//! | prepare | host | fills a pinned step block of the ring, enqueues its copy and the commit of the step before |
//! | layer | host, enqueues only | R, G and S of one layer on the streams it is given; changes no state |
//! | finish | host, enqueues only | a last operation writes the report to its pinned slot; then the step's event |
//! | retire | host, after that event | reads the report and gives back what only this step still named |
//!
//! A report holds counters, lengths and the sticky word, stamped with the step's number. A [`Step`] is an
//! owned token, not a borrow: *open* from prepare until finish, *in flight* until retired.
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
pub use layer::{Buffers, LayerCall, OverlapStreams, Streams};
pub(crate) use layer::{gather, resolve, scatter};
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
    pub(crate) finished: bool,
    /// A graph of all its layers has been launched.
    pub(crate) launched: bool,
    /// One of its layers is not enqueued whole.
    pub(crate) abandoned: bool,
    /// The streams of its layers, once one of them was enqueued by a schedule.
    pub(crate) streams: Option<OverlapStreams>,
    /// A stream beside these on which work of it may stand: its end is ordered behind that too.
    pub(crate) tail: Option<Stream>,
}

impl Step {
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
