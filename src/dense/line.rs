//! The copies between the tiers in one direction, and the copies that are noted: what `moves` counts with.

use crate::device::{Device, Event, Stream};
use crate::error::Result;
use crate::fallible::{filled, vector};

/// How many batches of a line have events of their own, also where each layer is a batch (`arrive`). A wait for an
/// older batch is a wait for a newer one.
const BATCHES: u64 = 8;

/// The copies in one direction, one behind the other, in *batches*. The parts of a batch end one after the other, and
/// are numbered over all batches of the line. A batch has the number of its last part.
#[derive(Debug)]
pub(super) struct Line {
    /// The events that are recorded after the last parts, by their numbers.
    events: Vec<Event>,
    /// The parts of a batch that brings all layers.
    parts: u64,
    /// The number of the last part that was enqueued whole.
    last: u64,
    /// The number of the last part that the host has seen complete.
    seen: u64,
    /// A stream that may hold copies after which no event was recorded: the device refused.
    unsettled: Option<Stream>,
}

impl Line {
    /// `most` are the parts or batches that bring one sequence.
    fn new(parts: u32, most: u32, device: &dyn Device) -> Result<Line> {
        let events =
            (0..BATCHES * u64::from(parts.max(most))).map(|_| device.event()).collect::<Result<Vec<_>>>()?;
        Ok(Line { events, parts: parts.into(), last: 0, seen: 0, unsettled: None })
    }

    /// The number of the batch of all parts that is enqueued next.
    pub(super) const fn next(&self) -> u64 {
        self.last + self.parts
    }

    /// The number of the batch of one part that is enqueued next.
    pub(super) const fn next_part(&self) -> u64 {
        self.last + 1
    }

    /// The parts of a batch that brings all layers.
    pub(super) const fn parts(&self) -> u64 {
        self.parts
    }

    /// The event after part `number`. Each part comes after the one before it, so an event that a newer part has
    /// recorded covers the older one too.
    fn event(&self, number: u64) -> Event {
        self.events[(number % self.events.len() as u64) as usize]
    }

    /// Whether the host has seen the end of part `number`, or sees it now.
    pub(super) fn has_passed(&mut self, number: u64, device: &dyn Device) -> bool {
        if number <= self.seen {
            return true;
        }
        // A part that is not enqueued has not passed, whatever an event says of the ones before.
        if number > self.last {
            return false;
        }
        if matches!(device.query(self.event(number)), Ok(true)) {
            // The newest part that has recorded this event.
            self.seen = self.last - (self.last - number) % self.events.len() as u64;
        }
        number <= self.seen
    }

    /// Records the event after copies that a refused call left without it. They stay before the next part, whose event
    /// it is.
    pub(super) fn settle(&mut self, device: &dyn Device) -> Result<()> {
        if let Some(before) = self.unsettled {
            device.record(self.event(self.next_part()), before)?;
            self.unsettled = None;
        }
        Ok(())
    }

    /// Makes `stream` wait for part `number` and all parts before it, if it may still run. Of a batch that a refused
    /// call left, it waits for what is enqueued.
    pub(super) fn wait(&mut self, number: u64, stream: Stream, device: &dyn Device) -> Result<()> {
        self.settle(device)?;
        match self.has_passed(number, device) {
            true => Ok(()),
            false => device.wait(stream, self.event(number.min(self.next_part()))),
        }
    }

    /// Begins a batch on `stream`, after all batches before it and after what a refused call left of this one.
    pub(super) fn begin(&mut self, stream: Stream, device: &dyn Device) -> Result<()> {
        self.wait_all(stream, device)?;
        self.unsettled = Some(stream);
        Ok(())
    }

    /// Enqueues a batch without copies, of one part: it ends when `stream` has come this far. Returns its number.
    pub(super) fn mark(&mut self, stream: Stream, device: &dyn Device) -> Result<u64> {
        self.begin(stream, device)?;
        self.end(true, stream, device)?;
        Ok(self.last)
    }

    /// Makes `stream` wait for all batches so far, and for what a refused call left of the next one.
    pub(super) fn wait_all(&mut self, stream: Stream, device: &dyn Device) -> Result<()> {
        self.settle(device)?;
        device.wait(stream, self.event(self.last))?;
        device.wait(stream, self.event(self.next_part()))
    }

    /// Ends a part of the batch, and with its last part the batch.
    pub(super) fn end(&mut self, is_last: bool, stream: Stream, device: &dyn Device) -> Result<()> {
        device.record(self.event(self.next_part()), stream)?;
        self.last = self.next_part();
        if is_last {
            self.unsettled = None;
        }
        Ok(())
    }
}

/// The copies up with which the last pages of a sequence come, of each part of its layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Coming {
    /// The newest of them; 0 for none.
    pub(super) last: u64,
    /// Their numbers, if each layer came by itself. Otherwise all parts came in one batch.
    pub(super) parts: Vec<u64>,
}

impl Coming {
    /// The pages come in a batch of all parts.
    pub(super) const fn batch(number: u64) -> Coming {
        Coming { last: number, parts: Vec::new() }
    }

    /// Nothing comes any more. Frees nothing: a step calls this.
    pub(super) fn clear(&mut self) {
        self.last = 0;
        self.parts.clear();
    }

    /// The copy with which a part of `parts` parts comes.
    pub(super) fn part(&self, part: usize, parts: usize) -> u64 {
        let of_batch = || self.last.saturating_sub(parts.saturating_sub(1 + part) as u64);
        self.parts.get(part).copied().unwrap_or_else(of_batch)
    }
}

/// What the open step of a micro-batch waits for.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// Of each part the newest copy up that brings it for a sequence of the step; 0 for none.
    pub(super) numbers: Vec<u64>,
    /// The parts, from the first, for which some stream waits.
    pub(super) parts: u32,
}

impl Arrivals {
    /// Of a step that waits for nothing, with room for `parts` parts.
    pub(super) fn new(parts: u32) -> Result<Arrivals> {
        Ok(Arrivals { numbers: filled(parts as usize, 0, "cache", "parts of a step")?, parts: 0 })
    }

    /// Begins a step without sequences.
    pub(super) fn clear(&mut self) {
        self.numbers.fill(0);
        self.parts = 0;
    }

    /// Adds a sequence of the step.
    pub(super) fn add(&mut self, coming: &Coming) {
        let parts = self.numbers.len();
        for (part, number) in self.numbers.iter_mut().enumerate().filter(|_| coming.last > 0) {
            *number = coming.part(part, parts).max(*number);
        }
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
    /// No copies, with room for one of each device page. Copies up have `parts` parts, or bring one of `layers` layers.
    pub(super) fn new(device_pages: &[u32], parts: u32, layers: u32, device: &dyn Device) -> Result<Moves> {
        let mut noted = vector(device_pages.len(), "cache", "copies of pages")?;
        for pages in device_pages {
            noted.push(vector(*pages as usize, "cache", "copies of pages")?);
        }
        let (down, up) = (Line::new(1, 1, device)?, Line::new(parts, layers, device)?);
        Ok(Moves { down, up, noted, bytes: [0; 2] })
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
        let mut line = Line::new(2, 1, &*clock).unwrap();
        let batch = |line: &mut Line, stream| {
            line.begin(stream, &*clock).unwrap();
            [false, true].into_iter().for_each(|is_last| line.end(is_last, stream, &*clock).unwrap());
        };
        (0..3).for_each(|_| batch(&mut line, first));
        clock.run().unwrap();
        clock.hold(held).unwrap();
        // More parts than events: number 6 has the event of number 22.
        for _ in 3..BATCHES + 2 {
            assert!(line.has_passed(6, &*clock));
            batch(&mut line, held);
        }
        let all = 2 * (BATCHES + 2);
        assert_eq!((line.last, line.seen), (all, 6));
        assert!(!line.has_passed(8, &*clock) && !line.has_passed(all, &*clock));
        assert!(!line.has_passed(all + 1, &*clock), "not enqueued");
        line.wait(7, first, &*clock).unwrap();
        assert!(!is_reached(&clock, first));
        clock.let_go(held).unwrap();
        clock.run().unwrap();
        assert!(line.has_passed(8, &*clock) && line.seen == 8);
        assert!(line.has_passed(all, &*clock));
    }

    /// Layers that come one by one are batches of one part. Those of many sequences behind it do not hide the end of an
    /// older one.
    #[test]
    fn a_layer_that_has_come_is_not_waited_for_because_others_come_behind_it() {
        let clock = ClockDevice::new(ClockOptions::default()).unwrap();
        let [first, held, reader] = [(); 3].map(|()| clock.stream().unwrap());
        for layers in [1, 5] {
            let mut line = Line::new(1, layers, &*clock).unwrap();
            let number = line.mark(first, &*clock).unwrap();
            clock.run().unwrap();
            clock.hold(held).unwrap();
            for _ in 0..BATCHES {
                line.mark(held, &*clock).unwrap();
            }
            line.wait(number, reader, &*clock).unwrap();
            // With as few events as batches the event is a newer batch's by now.
            assert_eq!(is_reached(&clock, reader), layers == 5);
            clock.let_go(held).unwrap();
            clock.run().unwrap();
        }
    }

    /// A part is waited for alone, and the end of a batch covers what a refused call left of it on another stream.
    #[test]
    fn a_batch_comes_after_what_a_refused_call_left_of_it() {
        let clock = ClockDevice::new(ClockOptions::default()).unwrap();
        let [left, again, reader, other] = [(); 4].map(|()| clock.stream().unwrap());
        let mut line = Line::new(2, 1, &*clock).unwrap();
        clock.hold(left).unwrap();
        // The device refuses the rest of this batch, before its first part or behind it.
        let number = line.next();
        line.begin(left, &*clock).unwrap();
        line.wait(number, other, &*clock).unwrap();
        assert!(!is_reached(&clock, other), "a batch that is not whole is waited for as far as it came");
        line.begin(left, &*clock).unwrap();
        line.end(false, left, &*clock).unwrap();
        line.begin(again, &*clock).unwrap();
        [false, true].into_iter().for_each(|is_last| line.end(is_last, again, &*clock).unwrap());
        assert_eq!(line.last, 3);
        line.wait(number, reader, &*clock).unwrap();
        assert!(!is_reached(&clock, reader));
        clock.let_go(left).unwrap();
        clock.run().unwrap();
        assert!(is_reached(&clock, reader));
        // A batch of which only the first part can end.
        line.begin(again, &*clock).unwrap();
        line.end(false, again, &*clock).unwrap();
        clock.hold(again).unwrap();
        line.end(true, again, &*clock).unwrap();
        line.wait(4, reader, &*clock).unwrap();
        assert!(is_reached(&clock, reader));
        line.wait(5, reader, &*clock).unwrap();
        assert!(!is_reached(&clock, reader));
    }

    /// A sequence whose layers came by themselves waits for each of them; one whose pages came in a batch, for its
    /// parts.
    #[test]
    fn a_step_waits_for_the_newest_copy_of_each_part() {
        let mut step = Arrivals::new(3).unwrap();
        step.add(&Coming::default());
        assert_eq!(step.numbers, [0; 3]);
        step.add(&Coming { last: 9, parts: vec![9, 4, 7] });
        assert_eq!(step.numbers, [9, 4, 7]);
        step.add(&Coming::batch(8));
        assert_eq!(step.numbers, [9, 7, 8]);
        step.clear();
        step.add(&Coming::batch(1));
        assert_eq!(step.numbers, [0, 0, 1]);
    }
}
