//! The copies between the tiers in one direction, and the copies that are noted: what `moves` counts with.

use crate::device::{Device, Event, Stream};
use crate::error::Result;
use crate::fallible::vector;

/// The copies in one direction.
#[derive(Debug)]
pub(super) struct Line {
    event: Event,
    /// The number of the last batch that was enqueued whole.
    last: u64,
    /// The number of the last batch that the host has seen complete.
    seen: u64,
    /// A stream that may hold copies after which the event was not recorded: the device refused.
    unsettled: Option<Stream>,
}

impl Line {
    fn new(device: &dyn Device) -> Result<Line> {
        Ok(Line { event: device.event()?, last: 0, seen: 0, unsettled: None })
    }

    /// The number of the batch that is enqueued next.
    pub(super) const fn next(&self) -> u64 {
        self.last + 1
    }

    /// Whether the host has seen the end of batch `number`, or sees it now.
    pub(super) fn has_passed(&mut self, number: u64, device: &dyn Device) -> bool {
        if number <= self.seen {
            return true;
        }
        // A batch that is not enqueued has not passed, whatever the event says of the one before.
        if number <= self.last && self.unsettled.is_none() && matches!(device.query(self.event), Ok(true)) {
            self.seen = self.last;
        }
        number <= self.seen
    }

    /// Records the event after copies that a refused call left without it. They stay a part of the next batch, so that
    /// copies that are noted keep its number.
    pub(super) fn settle(&mut self, device: &dyn Device) -> Result<()> {
        if let Some(before) = self.unsettled {
            device.record(self.event, before)?;
            self.unsettled = None;
        }
        Ok(())
    }

    /// Makes `stream` wait for batch `number`, if it may still run.
    pub(super) fn wait(&mut self, number: u64, stream: Stream, device: &dyn Device) -> Result<()> {
        self.settle(device)?;
        match self.has_passed(number, device) {
            true => Ok(()),
            false => device.wait(stream, self.event),
        }
    }

    /// Begins a batch on `stream`, after all batches before it.
    pub(super) fn begin(&mut self, stream: Stream, device: &dyn Device) -> Result<()> {
        self.settle(device)?;
        device.wait(stream, self.event)?;
        self.unsettled = Some(stream);
        Ok(())
    }

    /// Ends a batch.
    pub(super) fn end(&mut self, stream: Stream, device: &dyn Device) -> Result<()> {
        device.record(self.event, stream)?;
        (self.last, self.unsettled) = (self.next(), None);
        Ok(())
    }
}

/// All copies between the tiers.
#[derive(Debug)]
pub(super) struct Moves {
    pub(super) down: Line,
    pub(super) up: Line,
    /// For each group the copies down that are noted: device page, host page.
    pub(super) noted: Vec<Vec<(u32, u32)>>,
    /// Bytes that were copied down and up.
    pub(super) bytes: [u64; 2],
}

impl Moves {
    /// No copies, with room for one of each device page.
    pub(super) fn new(device_pages: &[u32], device: &dyn Device) -> Result<Moves> {
        let mut noted = vector(device_pages.len(), "cache", "copies of pages")?;
        for pages in device_pages {
            noted.push(vector(*pages as usize, "cache", "copies of pages")?);
        }
        Ok(Moves { down: Line::new(device)?, up: Line::new(device)?, noted, bytes: [0; 2] })
    }

    /// Notes a copy of a device page to a host page.
    pub(super) fn note(&mut self, group: usize, page: u32, host: u32) {
        self.noted[group].push((page, host));
    }

    /// Forgets a noted copy to a host page, whose block has left the host's tier again.
    pub(super) fn forget(&mut self, group: usize, host: u32) {
        self.noted[group].retain(|(_, to)| *to != host);
    }
}
