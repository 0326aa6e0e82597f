//! The copies between the tiers in one direction, and the copies that are noted: what `moves` counts with.

use crate::device::{Device, Event, Stream};
use crate::error::Result;
use crate::fallible::vector;

/// How many batches of a line have events of their own. A wait for an older batch is a wait for a newer one.
const BATCHES: u64 = 8;

/// The copies in one direction, in numbered batches. A batch consists of *parts*, which end one after the other.
#[derive(Debug)]
pub(super) struct Line {
    /// For each of the last batches, by its number, the events that are recorded after its parts.
    events: Vec<Vec<Event>>,
    /// The number of the last batch that was enqueued whole.
    last: u64,
    /// The number of the last batch that the host has seen complete.
    seen: u64,
    /// A stream that may hold copies after which no event was recorded: the device refused.
    unsettled: Option<Stream>,
}

impl Line {
    fn new(parts: u32, device: &dyn Device) -> Result<Line> {
        let batch = |_| (0..parts).map(|_| device.event()).collect::<Result<Vec<_>>>();
        let events = (0..BATCHES).map(batch).collect::<Result<Vec<_>>>()?;
        Ok(Line { events, last: 0, seen: 0, unsettled: None })
    }

    /// The number of the batch that is enqueued next.
    pub(super) const fn next(&self) -> u64 {
        self.last + 1
    }

    /// The parts of a batch.
    pub(super) fn parts(&self) -> usize {
        self.events[0].len()
    }

    /// The event after a part of batch `number`. Each batch comes after the one before it, so an event that a newer
    /// batch has recorded covers the older one too.
    fn event(&self, number: u64, part: usize) -> Event {
        self.events[(number % BATCHES) as usize][part]
    }

    fn end_event(&self, number: u64) -> Event {
        self.event(number, self.parts() - 1)
    }

    /// Whether the host has seen the end of batch `number`, or sees it now.
    pub(super) fn has_passed(&mut self, number: u64, device: &dyn Device) -> bool {
        if number <= self.seen {
            return true;
        }
        // A batch that is not enqueued has not passed, whatever an event says of the ones before.
        if number > self.last {
            return false;
        }
        if matches!(device.query(self.end_event(number)), Ok(true)) {
            // The newest batch that has recorded this event.
            self.seen = self.last - (self.last - number) % BATCHES;
        }
        number <= self.seen
    }

    /// Records the event after copies that a refused call left without it. They stay a part of the next batch, so that
    /// copies that are noted keep its number.
    pub(super) fn settle(&mut self, device: &dyn Device) -> Result<()> {
        if let Some(before) = self.unsettled {
            device.record(self.end_event(self.next()), before)?;
            self.unsettled = None;
        }
        Ok(())
    }

    /// Makes `stream` wait for batch `number`, if it may still run.
    pub(super) fn wait(&mut self, number: u64, stream: Stream, device: &dyn Device) -> Result<()> {
        self.wait_part(number, self.parts() - 1, stream, device)
    }

    /// Makes `stream` wait for a part of batch `number` and the parts before it, if the batch may still run.
    pub(super) fn wait_part(
        &mut self,
        number: u64,
        part: usize,
        stream: Stream,
        device: &dyn Device,
    ) -> Result<()> {
        self.settle(device)?;
        match self.has_passed(number, device) {
            true => Ok(()),
            false => device.wait(stream, self.event(number, part)),
        }
    }

    /// Begins a batch on `stream`, after all batches before it and after what a refused call left of this one.
    pub(super) fn begin(&mut self, stream: Stream, device: &dyn Device) -> Result<()> {
        self.wait_all(stream, device)?;
        self.unsettled = Some(stream);
        Ok(())
    }

    /// Enqueues a batch without copies: it ends when `stream` has come this far. Returns its number.
    pub(super) fn mark(&mut self, stream: Stream, device: &dyn Device) -> Result<u64> {
        self.begin(stream, device)?;
        (0..self.parts()).try_for_each(|part| self.end(part, stream, device))?;
        Ok(self.last)
    }

    /// Makes `stream` wait for all batches so far, and for what a refused call left of the next one.
    pub(super) fn wait_all(&mut self, stream: Stream, device: &dyn Device) -> Result<()> {
        self.settle(device)?;
        device.wait(stream, self.end_event(self.last))?;
        device.wait(stream, self.end_event(self.next()))
    }

    /// Ends a part of the batch; the last part ends the batch.
    pub(super) fn end(&mut self, part: usize, stream: Stream, device: &dyn Device) -> Result<()> {
        device.record(self.event(self.next(), part), stream)?;
        if part + 1 == self.parts() {
            (self.last, self.unsettled) = (self.next(), None);
        }
        Ok(())
    }
}

/// What the open step of a micro-batch waits for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arrivals {
    /// The newest batch of copies up that brings pages of the step; 0 for none.
    pub(super) number: u64,
    /// The parts, from the first, for which some stream waits.
    pub(super) parts: u32,
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
    /// No copies, with room for one of each device page. Copies up have `parts` parts.
    pub(super) fn new(device_pages: &[u32], parts: u32, device: &dyn Device) -> Result<Moves> {
        let mut noted = vector(device_pages.len(), "cache", "copies of pages")?;
        for pages in device_pages {
            noted.push(vector(*pages as usize, "cache", "copies of pages")?);
        }
        Ok(Moves { down: Line::new(1, device)?, up: Line::new(parts, device)?, noted, bytes: [0; 2] })
    }

    /// Whether a copy is noted.
    pub(super) fn is_noted(&self) -> bool {
        self.noted.iter().any(|noted| !noted.is_empty())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::clock::{ClockDevice, ClockOptions};

    /// Whether work that `stream` gets now is reached while other streams are held.
    fn is_reached(clock: &ClockDevice, stream: Stream) -> bool {
        let event = clock.event().unwrap();
        clock.record(event, stream).unwrap();
        clock.synchronize(event).is_ok()
    }

    #[test]
    fn only_the_batches_that_an_event_covers_have_passed() {
        let clock = ClockDevice::new(ClockOptions::default()).unwrap();
        let [first, held] = [(); 2].map(|()| clock.stream().unwrap());
        let mut line = Line::new(2, &*clock).unwrap();
        let batch = |line: &mut Line, stream| {
            line.begin(stream, &*clock).unwrap();
            (0..2).for_each(|part| line.end(part, stream, &*clock).unwrap());
        };
        (0..3).for_each(|_| batch(&mut line, first));
        clock.run().unwrap();
        clock.hold(held).unwrap();
        // More batches than events: number 3 waits for the event of number 11.
        for _ in 3..BATCHES + 2 {
            assert!(line.has_passed(3, &*clock));
            batch(&mut line, held);
        }
        assert_eq!((line.last, line.seen), (BATCHES + 2, 3));
        assert!(!line.has_passed(4, &*clock) && !line.has_passed(BATCHES + 2, &*clock));
        assert!(!line.has_passed(BATCHES + 3, &*clock), "not enqueued");
        line.wait_part(4, 0, first, &*clock).unwrap();
        assert!(!is_reached(&clock, first));
        clock.let_go(held).unwrap();
        clock.run().unwrap();
        assert!(line.has_passed(4, &*clock) && line.seen == 4);
        assert!(line.has_passed(BATCHES + 2, &*clock));
    }

    /// A part is waited for alone, and the end of a batch covers what a refused call left of it on another stream.
    #[test]
    fn a_batch_comes_after_what_a_refused_call_left_of_it() {
        let clock = ClockDevice::new(ClockOptions::default()).unwrap();
        let [left, again, reader] = [(); 3].map(|()| clock.stream().unwrap());
        let mut line = Line::new(2, &*clock).unwrap();
        clock.hold(left).unwrap();
        // The device refuses the rest of this batch.
        line.begin(left, &*clock).unwrap();
        line.begin(again, &*clock).unwrap();
        (0..2).for_each(|part| line.end(part, again, &*clock).unwrap());
        line.wait(1, reader, &*clock).unwrap();
        assert!(!is_reached(&clock, reader));
        clock.let_go(left).unwrap();
        clock.run().unwrap();
        assert!(is_reached(&clock, reader));
        // A batch of which only the first part can end.
        line.begin(again, &*clock).unwrap();
        line.end(0, again, &*clock).unwrap();
        clock.hold(again).unwrap();
        line.end(1, again, &*clock).unwrap();
        line.wait_part(2, 0, reader, &*clock).unwrap();
        assert!(is_reached(&clock, reader));
        line.wait(2, reader, &*clock).unwrap();
        assert!(!is_reached(&clock, reader));
    }
}
