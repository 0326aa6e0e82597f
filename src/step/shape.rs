//! The sizes of the ring: how many slots, and how many bytes each takes.
//!
//! A cache computes them before it takes any memory, so they are known without a ring. The record of enqueued calls has
//! the same extents.

use crate::device::descriptor::Report;

/// The bytes of a cache line. A report starts on a line of its own, so that the device and the host never write to the
/// same line.
pub(super) const LINE: usize = 64;

/// The declared extents of the ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingShape {
    /// Steps that may be between prepare and retire.
    pub(crate) steps: u32,
    /// Rows of a batch.
    pub(crate) batch: u32,
    /// Layers whose calls a step records and whose hits and misses it reports; 0 for steps that have none.
    pub(crate) layers: u32,
    /// Query rows of a step.
    pub(crate) query_rows: u32,
    /// Words of a step descriptor for `batch` rows.
    pub(crate) descriptor_words: usize,
}

impl RingShape {
    /// Bytes of a step descriptor.
    pub(super) fn descriptor_bytes(&self) -> usize {
        4 * self.descriptor_words
    }

    /// Bytes of a report.
    pub(super) fn report_bytes(&self) -> usize {
        4 * Report::words(self.layers, self.batch)
    }

    /// Bytes of a slot: a descriptor and a report, each in whole lines.
    pub(super) fn slot_bytes(&self) -> u64 {
        (self.descriptor_bytes().next_multiple_of(LINE) + self.report_bytes().next_multiple_of(LINE)) as u64
    }

    /// Bytes of the whole ring, in pinned host memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.slot_bytes() * u64::from(self.steps)
    }
}
