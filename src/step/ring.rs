//! The ring: pinned step descriptors and reports, one slot for each step between prepare and retire.
//!
//! A slot holds the host memory of one step: its descriptor, its report, its event, the batch rows that the step names,
//! and its record of enqueued calls (`enqueued`). The step's begin copies the descriptor to the device. The step's end
//! writes the report, and the event comes after that.
//!
//! **States of a slot:**
//!
//! | state | entered by | use of its memory |
//! |---|---|---|
//! | free | [`Ring::release`], [`Ring::reclaim`] | none |
//! | open | [`Ring::prepare`] writes the descriptor and returns the [`Step`] | the copy may read the descriptor |
//! | in flight | [`Ring::finish`], once the report and the event are enqueued | the device may write the report |
//! | ended | [`Ring::end`] finds the event reached and reads the report | none; it still lists the batch rows |
//! | refused | [`Ring::give_up`], after the device refused a begin half-way | the copy may read the descriptor |
//!
//! **Invariants.**
//!
//! - The host never writes a descriptor while a copy of it may still run, and never reads a report while the device
//!   may still write it. A slot becomes free after its event, or if no enqueued operation uses it. For a refused slot,
//!   the ring records the event first.
//! - A report contains its step's number. The report of another step is an error, never a result.
//! - A micro-batch has at most one open step, because it has one descriptor on the device.
//! - The ring's tag distinguishes its steps from those of another cache.
//!
//! **Costs.** [`Ring::new`] takes all memory: a descriptor and a report in whole cache lines for each slot, in one
//! pinned mapping. A step allocates nothing. Finding a free slot checks each of a handful of slots.
//!
//! The ring does not wait: a full ring is [`Kind::Busy`]. It holds sequences as plain numbers, and does not read the
//! descriptors that the cache encodes. The only operations that it enqueues are the events of refused slots.

use crate::device::descriptor::{Cause, Report};
use crate::device::{Device, Event, Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::MicroBatch;
use crate::os::{Fallback, Faults, Map, Request};
use crate::step::enqueued::Enqueued;
use crate::step::phase::{Phase, RowInFlight, Step};
use crate::step::shape::{LINE, RingShape};
use crate::step::streams::WorkStreams;
use crate::sync::{Arc, unique};

/// A step whose begin the device refused half-way. The stream on which it was prepared may still read its descriptor.
#[derive(Clone, Copy, Debug)]
struct GivenUp {
    micro_batch: MicroBatch,
    /// Whether the slot's event has been recorded after that read.
    marked: bool,
}

/// A slot of the ring.
#[derive(Debug)]
pub(crate) struct RingSlot {
    /// The number of the step that uses the slot.
    step: Option<u64>,
    /// The step's micro-batch, until the step is finished.
    open: Option<MicroBatch>,
    /// The stream on which the step was prepared.
    pub(crate) prepared: Stream,
    /// The stream of the step's prefetches, if it has any.
    pub(crate) prefetches: Option<Stream>,
    given_up: Option<GivenUp>,
    pub(crate) descriptor: Slice,
    pub(crate) report: Slice,
    pub(crate) event: Event,
    pub(crate) rows: Vec<RowInFlight>,
    pub(crate) enqueued: Enqueued,
}

/// The outcome of a step, before its slot is freed.
pub(crate) enum Ended {
    /// The step is still in flight.
    Not(Error),
    /// The step ended. Its report has been read, or the error says why its tokens must be discarded.
    With(Result<()>),
}

/// All slots, their memory, and a buffer for the last report.
#[derive(Debug)]
pub(crate) struct Ring {
    tag: u32,
    shape: RingShape,
    memory: Arc<Map>,
    slots: Vec<RingSlot>,
    words: Vec<u32>,
    report: Report,
    last: u64,
}

impl Ring {
    /// Takes the memory. It adds the options that the system refused to `fallbacks`.
    pub(crate) fn new(
        shape: RingShape,
        lock: bool,
        device: &dyn Device,
        faults: &dyn Faults,
        fallbacks: &mut Vec<Fallback>,
    ) -> Result<Self> {
        let request =
            Request { bytes: shape.bytes(), huge: false, populate: true, lock, node: None, shared: false };
        let (memory, missed) = Map::new(&request, faults)?;
        fallbacks.extend(missed);
        let memory = Arc::new(memory);
        let all = device.register(&memory)?;
        let mut slots = Vec::with_capacity(shape.steps as usize);
        for slot in 0..u64::from(shape.steps) {
            let start = slot * shape.slot_bytes();
            let report = start + shape.descriptor_bytes().next_multiple_of(LINE) as u64;
            slots.push(RingSlot {
                step: None,
                open: None,
                prepared: Stream(0),
                prefetches: None,
                given_up: None,
                descriptor: all.part(start, shape.descriptor_bytes() as u64)?,
                report: all.part(report, shape.report_bytes() as u64)?,
                event: device.event()?,
                rows: Vec::with_capacity(shape.batch as usize),
                enqueued: Enqueued::new(&shape)?,
            });
        }
        let words = shape.descriptor_words.max(Report::words(shape.layers, shape.batch));
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

    /// The tag that distinguishes this ring's steps from those of other rings.
    pub(crate) const fn tag(&self) -> u32 {
        self.tag
    }

    /// Steps between prepare and retire.
    pub(crate) fn in_flight(&self) -> u32 {
        self.slots.iter().filter(|s| s.step.is_some()).count() as u32
    }

    /// Takes a slot for a new step of `rows` batch rows, at most those of a batch, and writes its descriptor. `encode`
    /// gets the step's number and writes the words of the descriptor, which hold earlier values.
    ///
    /// # Errors
    /// [`Kind::Busy`] if every slot has a step.
    pub(crate) fn prepare(
        &mut self,
        micro_batch: MicroBatch,
        query_rows: u32,
        rows: u32,
        encode: impl FnOnce(u64, &mut [u32]),
        prepared: Stream,
    ) -> Result<Step> {
        let free = self.free_slot()?;
        let number = self.last + 1;
        let words = &mut self.words[..self.shape.descriptor_words];
        encode(number, words);
        let offset = free as u64 * self.shape.slot_bytes();
        self.memory.copy_in_words(offset, words)?;
        self.last = number;
        self.slots[free].step = Some(number);
        self.slots[free].open = Some(micro_batch);
        self.slots[free].prepared = prepared;
        self.slots[free].prefetches = None;
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
            phase: Phase::Open { launched: false },
            work: WorkStreams::default(),
        })
    }

    /// Gives up a step whose begin the device refused half-way. [`Ring::reclaim`] frees its slot.
    pub(crate) fn give_up(&mut self, step: &Step) {
        if let Some(slot) = self.slots.get_mut(step.slot as usize) {
            slot.given_up = Some(GivenUp { micro_batch: step.micro_batch, marked: false });
        }
    }

    /// Frees refused slots, once their streams have passed the enqueued operations. The event in `stepped` orders the
    /// micro-batch's next step after those operations.
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
            // A failed device reads no more memory.
            if !matches!(device.query(slot.event), Ok(false)) {
                (slot.step, slot.given_up) = (None, None);
            }
        }
        Ok(())
    }

    fn free_slot(&self) -> Result<usize> {
        self.slots.iter().position(|s| s.step.is_none()).ok_or_else(|| {
            Error::new(Kind::Busy, "prepare")
                .at("every step descriptor is in flight")
                .with("steps", self.shape.steps)
        })
    }

    /// Checks that a step of `micro_batch` can be prepared now. A micro-batch has one descriptor on the device. The
    /// next step's descriptor must not overwrite it before the last step's report is enqueued.
    ///
    /// # Errors
    /// [`Kind::Busy`].
    pub(crate) fn check_room(&self, micro_batch: MicroBatch) -> Result<()> {
        self.check_closed(micro_batch)?;
        self.free_slot().map(|_| ())
    }

    /// Checks that no step of `micro_batch` is open.
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

    /// Notes that a step's enqueueing is finished.
    pub(crate) fn finish(&mut self, step: &mut Step) {
        step.finish();
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

    /// Adds a batch row to a step that was just prepared.
    pub(crate) fn add_row(&mut self, step: &Step, row: RowInFlight) {
        if let Some(slot) = self.slots.get_mut(step.slot as usize) {
            slot.rows.push(row);
        }
    }

    /// Notes the stream of a step's prefetches.
    pub(crate) fn prefetch_on(&mut self, step: &Step, stream: Stream) {
        if let Some(slot) = self.slots.get_mut(step.slot as usize) {
            slot.prefetches = Some(stream);
        }
    }

    /// Checks whether `step` has ended, and reads its report. The slot stays in use.
    pub(crate) fn end(&mut self, device: &dyn Device, step: &Step) -> Ended {
        let event = match self.slot(step) {
            Ok(slot) => slot.event,
            Err(error) => return Ended::Not(error),
        };
        if !step.is_finished() {
            return Ended::Not(Error::new(Kind::Busy, "retire").at("the step was not finished"));
        }
        match device.query(event) {
            Ok(false) => Ended::Not(Error::new(Kind::Busy, "retire").at("the step is in flight")),
            Err(error) if error.kind() != Kind::DeviceFailed => Ended::Not(error),
            Err(error) => Ended::With(Err(error)),
            Ok(true) if step.is_abandoned() => {
                let error = Error::new(Kind::Cancelled, "retire").at("a layer was not enqueued completely");
                let error = error.hint("truncate its sequences to a committed length, or close them");
                Ended::With(self.read_report(step).and(Err(error)))
            }
            Ok(true) => Ended::With(self.read_report(step).and_then(|()| self.check_sticky())),
        }
    }

    fn check_sticky(&self) -> Result<()> {
        match self.report.sticky {
            None => Ok(()),
            Some(sticky) => {
                let error = Error::new(Kind::DeviceFailed, "retire");
                let error = error.hint("truncate its sequences to a committed length, or close them");
                let (row, layer, what) = (sticky.row, sticky.layer, sticky.cause.describe());
                // Show the position as the engine wrote it: the device reads positions as unsigned numbers.
                Err(match i32::try_from(sticky.value) {
                    Err(_) if sticky.cause == Cause::BeyondLength => {
                        let position = sticky.value.cast_signed();
                        let error =
                            error.at(format!("a selected position is {position}, and only -1 is none"));
                        error.with("batch row", row).with("layer", layer)
                    }
                    _ => {
                        error.at(what).with("batch row", row).with("layer", layer).with("value", sticky.value)
                    }
                })
            }
        }
    }

    /// One batch row of a step that has ended, with its committed length if the report was read.
    pub(crate) fn row(&self, step: &Step, row: usize) -> Option<(RowInFlight, Option<u32>)> {
        let slot = self.slots.get(step.slot as usize)?;
        let row_in_flight = *slot.rows.get(row)?;
        let length = (self.report.step == step.number).then(|| self.report.lengths.get(row).copied());
        Some((row_in_flight, length.flatten()))
    }

    /// Frees the slot of a step that has ended.
    pub(crate) fn release(&mut self, step: &Step) {
        if let Some(slot) = self.slots.get_mut(step.slot as usize) {
            (slot.step, slot.open) = (None, None);
        }
    }

    /// The last report that was read.
    pub(crate) fn report(&self) -> &Report {
        &self.report
    }

    /// Reads the report of `step` from its slot.
    ///
    /// # Errors
    /// [`Kind::Internal`] if the slot holds another step's report.
    fn read_report(&mut self, step: &Step) -> Result<()> {
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
    use crate::step::enqueued::Due;

    #[test]
    fn a_step_of_another_ring_is_refused_though_its_number_is_the_same() {
        let device = HostDevice::new(HostOptions::default());
        let shape = RingShape { steps: 1, batch: 1, layers: 1, query_rows: 1, descriptor_words: 4 };
        let ring = || Ring::new(shape, false, &*device, &NoFaults, &mut Vec::new()).unwrap();
        let prepare = |ring: &mut Ring| ring.prepare(MicroBatch(0), 1, 1, |_, _| (), Stream(0)).unwrap();
        let (mut one, mut other) = (ring(), ring());
        let (step, foreign) = (prepare(&mut one), prepare(&mut other));
        assert_eq!(step.number(), foreign.number());
        assert!(one.slot(&step).is_ok());
        assert_eq!(one.slot(&foreign).unwrap_err().kind(), Kind::OutOfRange);
    }

    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn a_step_without_layers_has_a_descriptor_of_its_own_format_and_a_report_of_lengths() {
        let device = HostDevice::new(HostOptions::default());
        let stream = device.stream().unwrap();
        let shape = RingShape { steps: 2, batch: 2, layers: 0, query_rows: 1, descriptor_words: 37 };
        let mut ring = Ring::new(shape, false, &*device, &NoFaults, &mut Vec::new()).unwrap();
        let mut prepare = |micro_batch| {
            let encode =
                |number: u64, words: &mut [u32]| words.fill(100 * number as u32 + words.len() as u32);
            let step = ring.prepare(MicroBatch(micro_batch), 1, 2, encode, stream).unwrap();
            for sequence in [8, 9] {
                ring.add_row(&step, RowInFlight { sequence, enqueued_before: 0, query_rows: 1 });
            }
            step
        };
        let mut steps = [prepare(0), prepare(1)];
        for (step, word) in steps.iter().zip([137, 237]) {
            let mut read = vec![0; 4 * 37];
            device.read(ring.slot(step).unwrap().descriptor, &mut read).unwrap();
            assert_eq!(read, bytes(&[word; 37]), "each step has its own words, all of them");
        }
        for (step, lengths) in steps.iter_mut().zip([[5, 6], [7, 8]]) {
            let slot = ring.slot(step).unwrap();
            assert_eq!(slot.report.bytes(), 4 * Report::words(0, 2) as u64);
            slot.enqueued.check(&slot.rows, Due { waves: 1, scatter: true }).unwrap();
            let (report, event) = (slot.report, slot.event);
            device.record(event, stream).unwrap();
            device.synchronize(event).unwrap();
            ring.finish(step);
            let Ended::With(Err(error)) = ring.end(&*device, step) else { panic!("no report is there yet") };
            assert_eq!(error.kind(), Kind::Internal);
            let mut words = vec![0; Report::words(0, 2)];
            let written =
                Report { step: step.number(), lengths: lengths.to_vec(), ..Report::with_room(0, 2) };
            written.encode(&mut words);
            device.write(report, &bytes(&words)).unwrap();
            let Ended::With(Ok(())) = ring.end(&*device, step) else { panic!("the step has ended") };
            assert_eq!(ring.report(), &written);
            let rows = [0, 1].map(|row| ring.row(step, row).map(|(row, length)| (row.sequence, length)));
            assert_eq!(rows, [Some((8, Some(lengths[0]))), Some((9, Some(lengths[1])))]);
            ring.release(step);
        }
        assert_eq!(ring.in_flight(), 0);
    }
}
