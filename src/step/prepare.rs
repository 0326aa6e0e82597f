//! The ring of pinned step blocks, and what a step still names.

use crate::device::block::{self, Entry, Report};
use crate::device::{Device, Event, Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::MicroBatch;
use crate::os::{Fallback, Faults, Map, Request};
use crate::step::{Enqueued, Step};
use crate::sync::{Arc, unique};

/// The declared extents of the ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingShape {
    /// Steps that may be between prepare and retire.
    pub(crate) steps: u32,
    /// Rows of a batch.
    pub(crate) batch: u32,
    /// Layers.
    pub(crate) layers: u32,
    /// Query rows of a step.
    pub(crate) query_rows: u32,
}

impl RingShape {
    /// Bytes of a slot's step block, of its report, and of the slot with both.
    fn slot(&self) -> (usize, usize, usize) {
        let block = 4 * block::step::words(self.batch);
        let report = 4 * Report::words(self.layers, self.batch);
        (block, report, block.next_multiple_of(LINE) + report.next_multiple_of(LINE))
    }

    /// Bytes of the whole ring, in pinned host memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.slot().2 as u64 * u64::from(self.steps)
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

/// A step whose begin was refused half-way: its block may still be read, on the stream that it was prepared on.
#[derive(Clone, Copy, Debug)]
struct GivenUp {
    micro_batch: MicroBatch,
    /// The slot's event stands behind the reading.
    marked: bool,
}

/// A slot of the ring.
#[derive(Debug)]
pub(crate) struct RingSlot {
    /// The step that has it.
    pub(super) step: Option<u64>,
    /// The step's micro-batch until it is finished.
    pub(super) open: Option<MicroBatch>,
    /// The stream that it was prepared on.
    pub(crate) prepared: Stream,
    given_up: Option<GivenUp>,
    pub(crate) block: Slice,
    pub(crate) report: Slice,
    pub(crate) event: Event,
    pub(crate) rows: Vec<RowInFlight>,
    pub(crate) enqueued: Enqueued,
}

/// All slots, their memory, and room to read a report.
#[derive(Debug)]
pub(crate) struct Ring {
    tag: u32,
    shape: RingShape,
    memory: Arc<Map>,
    pub(super) slots: Vec<RingSlot>,
    words: Vec<u32>,
    pub(super) report: Report,
    last: u64,
}

/// A report starts on a line of its own, so that a device's write does not share one with the host's.
const LINE: usize = 64;

impl Ring {
    /// Takes the memory. What it had to do without is added to `fallbacks`.
    pub(crate) fn new(
        shape: RingShape,
        lock: bool,
        device: &dyn Device,
        faults: &dyn Faults,
        fallbacks: &mut Vec<Fallback>,
    ) -> Result<Self> {
        let (block_bytes, report_bytes, slot_bytes) = shape.slot();
        let request =
            Request { bytes: shape.bytes(), huge: false, populate: true, lock, node: None, shared: false };
        let (memory, missed) = Map::new(&request, faults)?;
        fallbacks.extend(missed);
        let memory = Arc::new(memory);
        let all = device.register(&memory)?;
        let mut slots = Vec::with_capacity(shape.steps as usize);
        for slot in 0..u64::from(shape.steps) {
            let start = slot * slot_bytes as u64;
            let report = start + block_bytes.next_multiple_of(LINE) as u64;
            slots.push(RingSlot {
                step: None,
                open: None,
                prepared: Stream(0),
                given_up: None,
                block: all.part(start, block_bytes as u64)?,
                report: all.part(report, report_bytes as u64)?,
                event: device.event()?,
                rows: Vec::with_capacity(shape.batch as usize),
                enqueued: Enqueued::new(&shape)?,
            });
        }
        let words = block::step::words(shape.batch).max(Report::words(shape.layers, shape.batch));
        Ok(Ring {
            tag: unique(),
            shape,
            memory,
            slots,
            words: vec![0; words],
            report: Report::with_room(shape.layers, shape.batch),
            last: 0,
        })
    }

    /// What tells this ring's steps from others'.
    pub(crate) const fn tag(&self) -> u32 {
        self.tag
    }

    /// Steps between prepare and retire.
    pub(crate) fn in_flight(&self) -> u32 {
        self.slots.iter().filter(|s| s.step.is_some()).count() as u32
    }

    /// Takes a slot for a new step and writes its block.
    ///
    /// # Errors
    /// [`Kind::Busy`] when every slot has a step.
    pub(crate) fn prepare(
        &mut self,
        micro_batch: MicroBatch,
        query_rows: u32,
        entries: impl ExactSizeIterator<Item = Entry>,
        prepared: Stream,
    ) -> Result<Step> {
        let free = self.free_slot()?;
        let rows = entries.len() as u32;
        let number = self.last + 1;
        let words = &mut self.words[..block::step::words(self.shape.batch)];
        block::step::encode(number, entries, words);
        let offset = self.slots[free].block.address() - self.memory.as_ptr() as u64;
        self.memory.copy_in_words(offset, words)?;
        self.last = number;
        self.slots[free].step = Some(number);
        self.slots[free].open = Some(micro_batch);
        self.slots[free].prepared = prepared;
        self.slots[free].rows.clear();
        self.slots[free].enqueued.clear();
        let (slot, ring) = (free as u32, self.tag);
        Ok(Step {
            ring,
            number,
            slot,
            micro_batch,
            rows,
            query_rows,
            finished: false,
            launched: false,
            abandoned: false,
            streams: None,
            tail: None,
        })
    }

    /// Gives up a step whose begin was refused half-way. Its slot comes back by [`Ring::reclaim`].
    pub(crate) fn give_up(&mut self, step: &Step) {
        if let Some(slot) = self.slots.get_mut(step.slot as usize) {
            slot.given_up = Some(GivenUp { micro_batch: step.micro_batch, marked: false });
        }
    }

    /// Takes slots back that were given up and whose streams have come past what was enqueued. The next step of the
    /// micro-batch is ordered behind it by `stepped`.
    ///
    /// # Errors
    /// As [`Device::record`].
    pub(crate) fn reclaim(&mut self, device: &dyn Device, stepped: &[Event]) -> Result<()> {
        for slot in &mut self.slots {
            let Some(given_up) = &mut slot.given_up else { continue };
            if !given_up.marked {
                device.record(slot.event, slot.prepared)?;
                device.record(stepped[given_up.micro_batch.index()], slot.prepared)?;
                given_up.marked = true;
                slot.open = None;
            }
            // A device that has failed reads nothing any more.
            if !matches!(device.query(slot.event), Ok(false)) {
                (slot.step, slot.given_up) = (None, None);
            }
        }
        Ok(())
    }

    fn free_slot(&self) -> Result<usize> {
        self.slots.iter().position(|s| s.step.is_none()).ok_or_else(|| {
            Error::new(Kind::Busy, "prepare")
                .at("every step block is in flight")
                .with("steps", self.shape.steps)
        })
    }

    /// Whether a step of `micro_batch` can be prepared now. A micro-batch has one record on the device:
    /// the next step's block must not be loaded over it before the last one's report is enqueued.
    ///
    /// # Errors
    /// [`Kind::Busy`].
    pub(crate) fn check_room(&self, micro_batch: MicroBatch) -> Result<()> {
        self.check_closed(micro_batch)?;
        self.free_slot().map(|_| ())
    }

    /// Whether no step of `micro_batch` is open.
    ///
    /// # Errors
    /// [`Kind::Busy`].
    pub(crate) fn check_closed(&self, micro_batch: MicroBatch) -> Result<()> {
        if self.slots.iter().all(|s| s.open != Some(micro_batch)) {
            return Ok(());
        }
        Err(Error::new(Kind::Busy, "prepare")
            .at("the micro-batch's last step is not finished")
            .with("micro-batch", micro_batch.0)
            .hint("finish that step first"))
    }

    /// Notes that all of a step has been enqueued.
    pub(crate) fn finish(&mut self, step: &mut Step) {
        step.finished = true;
        if let Some(slot) = self.slots.get_mut(step.slot as usize) {
            slot.open = None;
        }
    }

    /// The slot of a step of this ring.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for another cache's step.
    pub(crate) fn slot(&self, step: &Step) -> Result<&RingSlot> {
        let found = self.slots.get(step.slot as usize);
        let found = found.filter(|s| step.ring == self.tag && s.step == Some(step.number));
        found.ok_or_else(|| {
            Error::new(Kind::OutOfRange, "step").at("a step of another cache").with("step", step.number)
        })
    }

    /// Notes a row of a step that was just prepared.
    pub(crate) fn add_row(&mut self, step: &Step, row: RowInFlight) {
        if let Some(slot) = self.slots.get_mut(step.slot as usize) {
            slot.rows.push(row);
        }
    }

    /// Reads the report of `step` from its slot.
    ///
    /// # Errors
    /// [`Kind::Internal`] when the slot holds another step's report.
    pub(super) fn read_report(&mut self, step: &Step) -> Result<()> {
        let slot = &self.slots[step.slot as usize];
        let words = &mut self.words[..Report::words(self.shape.layers, self.shape.batch)];
        self.memory.copy_out_words(slot.report.address() - self.memory.as_ptr() as u64, words)?;
        self.report.decode(words, step.number, step.rows as usize)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::host::{HostDevice, HostOptions};
    use crate::os::NoFaults;

    #[test]
    fn a_step_of_another_ring_is_refused_though_its_number_is_the_same() {
        let device = HostDevice::new(HostOptions::default());
        let shape = RingShape { steps: 1, batch: 1, layers: 1, query_rows: 1 };
        let ring = || Ring::new(shape, false, &*device, &NoFaults, &mut Vec::new()).unwrap();
        let prepare = |ring: &mut Ring| {
            ring.prepare(MicroBatch(0), 1, [Entry::default()].into_iter(), Stream(0)).unwrap()
        };
        let (mut one, mut other) = (ring(), ring());
        let (step, foreign) = (prepare(&mut one), prepare(&mut other));
        assert_eq!(step.number(), foreign.number());
        assert!(one.slot(&step).is_ok());
        assert_eq!(one.slot(&foreign).unwrap_err().kind(), Kind::OutOfRange);
    }
}
