//! The end of a step: its report, and the slot of the ring back.

use crate::device::Device;
use crate::device::block::{Cause, LayerCount, Report};
use crate::error::{Error, Kind, Result};
use crate::step::Step;
use crate::step::prepare::{Ring, RowInFlight};

/// What a step has done.
#[derive(Clone, Copy, Debug)]
pub struct Retired<'a> {
    pub(crate) report: &'a Report,
}

impl Retired<'_> {
    /// The step's number.
    pub const fn step(&self) -> u64 {
        self.report.step
    }

    /// Hits and misses by layer, all rows of the batch.
    pub fn layers(&self) -> &[LayerCount] {
        &self.report.layers
    }

    /// The committed length of each batch row's sequence, as of this step's commit.
    pub fn lengths(&self) -> &[u32] {
        &self.report.lengths
    }

    /// Hits and misses of all layers.
    pub fn total(&self) -> (u64, u64) {
        self.report.layers.iter().fold((0, 0), |(hits, misses), layer| {
            (hits + u64::from(layer.hits), misses + u64::from(layer.misses))
        })
    }
}

/// A step that could not be retired, or that failed.
#[derive(Debug)]
pub struct Unretired {
    /// Why.
    pub error: Error,
    /// The step, when it is still in flight and must be retired later; nothing when it has ended.
    pub step: Option<Step>,
}

/// How a step ended, before its slot is given back.
pub(crate) enum Ended {
    /// It is still in flight.
    Not(Error),
    /// It ended; the report is read, or the error says why its tokens must not be published.
    With(Result<()>),
}

impl Ring {
    /// Looks whether `step` has ended and reads its report. The slot stays taken.
    pub(crate) fn end(&mut self, device: &dyn Device, step: &Step) -> Ended {
        let event = match self.slot(step) {
            Ok(slot) => slot.event,
            Err(error) => return Ended::Not(error),
        };
        if !step.finished {
            return Ended::Not(Error::new(Kind::Busy, "retire").at("the step was not finished"));
        }
        match device.query(event) {
            Ok(false) => Ended::Not(Error::new(Kind::Busy, "retire").at("the step is in flight")),
            Err(error) if error.kind() != Kind::DeviceFailed => Ended::Not(error),
            Err(error) => Ended::With(Err(error)),
            Ok(true) if step.abandoned => {
                let error = Error::new(Kind::Cancelled, "retire").at("a layer was not enqueued whole");
                let error = error.hint("roll its sequences back to a committed length, or close them");
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
                let error = error.hint("roll its sequences back to a committed length, or close them");
                let (row, layer, what) = (sticky.row, sticky.layer, sticky.cause.describe());
                // As the engine's selection has it: the device reads positions without signs.
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

    /// The rows of a step that has ended, one by one; then the slot is free.
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
}
