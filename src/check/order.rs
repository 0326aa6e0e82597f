//! A happens-before checker: which operations are ordered by streams and events, and which that touch the
//! same bytes are not.
//!
//! A missing edge shows on a device only when two operations happen to run in the wrong order: most runs of a
//! wrong schedule are right. So what is checked here is not what happened but what was allowed to happen.
//! Callers tell an [`Order`] each record, each wait and what each operation touches, in the order in which
//! they are enqueued; the answer to [`Order::access`] is an error at the first operation that may run beside
//! one that it conflicts with, however the streams' speeds fall out.
//!
//! **What is ordered.** Operations of one stream, as they are enqueued. What stands before a record, before
//! what stands behind a wait for it; a wait is for the last record enqueued before it, and an event that was
//! never recorded orders nothing. What the host did or saw, before all that it enqueues later. What stands
//! before a record, before all that the host does after it has seen the event complete
//! ([`Order::observed`]). Nothing else: not time, not the order of enqueueing in two streams.
//!
//! **How.** Each stream, and the host, has a clock: by actor, how many of its operations are ordered before
//! the stream's next one. A record copies the stream's clock, a wait takes the larger of each number. A range
//! remembers the last write and, behind it, the last read of each actor; an access conflicts with what its
//! stream's clock does not reach. Forgetting the older ones loses nothing: the first conflict with an older
//! access is a conflict with the last one too, as that is ordered behind it, or had been reported itself.
//!
//! **Ranges are the caller's.** A [`Space`] is a name with numbers, a [`Range`] a stretch of it. Whether it
//! stands for bytes, slots of a lane or pages is nothing that matters here. Ranges that are too coarse give
//! conflicts where there are none, ranges that are left out hide some.
//!
//! **Memory** is bounded by what is named, not by how long it runs: a stretch has one write and at most a
//! read an actor, and a write joins what earlier accesses have divided. Beyond that, accesses that the host
//! has seen complete are dropped, and with them stretches that have none left: whatever is enqueued later is
//! behind them, on streams too that do not exist today. This is done whenever the stretches have doubled
//! since it was done last, so that it costs each access a constant.
//!
//! **What it does not do.** It sees one host thread: an owner that enqueues. It does not find waits that
//! never end; an event that is recorded after its wait orders nothing here, as on a device.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::device::{Event, Stream};
use crate::error::{Error, Kind, Result};

/// Something that operations touch, divided into a row of places from 0 on. Spaces of different names or
/// numbers have nothing in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Space {
    name: &'static str,
    numbers: [u32; 2],
}

impl Space {
    /// The space called `name`, of `numbers`: the name says what they count.
    pub const fn new(name: &'static str, numbers: [u32; 2]) -> Space {
        Space { name, numbers }
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.name, self.numbers[0], self.numbers[1])
    }
}

/// The places `from..to` of a space; none when `to` is not above `from`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Of what.
    pub space: Space,
    /// The first place.
    pub from: u64,
    /// The place after the last one.
    pub to: u64,
}

/// That an operation reads or writes a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// What it touches.
    pub range: Range,
    /// Whether it changes what is there. Operations that only read need no order among themselves.
    pub write: bool,
}

impl Access {
    /// Reads `from..to` of `space`.
    pub const fn read(space: Space, from: u64, to: u64) -> Access {
        Access { range: Range { space, from, to }, write: false }
    }

    /// Writes `from..to` of `space`.
    pub const fn write(space: Space, from: u64, to: u64) -> Access {
        Access { range: Range { space, from, to }, write: true }
    }
}

/// By actor, how many of its operations are known to be before.
type Clock = Vec<u64>;

/// The host's place among the actors; streams follow in the order in which they are first named.
const HOST: usize = 0;

/// One operation of an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    actor: usize,
    /// The how-manieth of its operations.
    number: u64,
    what: &'static str,
}

/// A stretch of a space whose places were touched alike.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stretch {
    to: u64,
    written: Option<Mark>,
    /// At most one an actor, all behind the write.
    read: Vec<Mark>,
}

/// By their first places; they do not overlap.
type Stretches = BTreeMap<u64, Stretch>;

/// See the module's head.
#[derive(Debug, Default)]
pub struct Order {
    streams: HashMap<u64, usize>,
    clocks: Vec<Clock>,
    events: HashMap<u64, Clock>,
    spaces: HashMap<Space, Stretches>,
    /// How many stretches there are, and how many there were after the last time that some were dropped.
    stretches: usize,
    kept: usize,
}

/// Stretches that are not worth looking through.
const FEW: usize = 64;

fn reaches(clock: &[u64], mark: &Mark) -> bool {
    clock.get(mark.actor).is_some_and(|known| *known >= mark.number)
}

/// Raises `clock` to `other`; whether that changed it.
fn join(clock: &mut Clock, other: &[u64]) -> bool {
    if clock.len() < other.len() {
        clock.resize(other.len(), 0);
    }
    let mut changed = false;
    for (own, theirs) in clock.iter_mut().zip(other) {
        changed |= *theirs > *own;
        *own = (*own).max(*theirs);
    }
    changed
}

/// Makes `at` a border between stretches, if one lies across it.
fn divide(stretches: &mut Stretches, at: u64) {
    let across = stretches.range_mut(..at).next_back().filter(|(_, stretch)| stretch.to > at);
    if let Some((_, stretch)) = across {
        let behind = stretch.clone();
        stretch.to = at;
        stretches.insert(at, behind);
    }
}

impl Order {
    /// Nothing enqueued, nothing touched.
    pub fn new() -> Order {
        Order::default()
    }

    fn actor(&mut self, stream: Stream) -> usize {
        // The host is there from the first call on.
        self.clocks.resize(self.clocks.len().max(1), Clock::new());
        *self.streams.entry(stream.0).or_insert_with(|| {
            self.clocks.push(Clock::new());
            self.clocks.len() - 1
        })
    }

    /// The clock of a stream's end: what the host knows comes before whatever it enqueues.
    fn end_of(&mut self, stream: Stream) -> (usize, Clock) {
        let actor = self.actor(stream);
        let host = std::mem::take(&mut self.clocks[HOST]);
        join(&mut self.clocks[actor], &host);
        self.clocks[HOST] = host;
        (actor, std::mem::take(&mut self.clocks[actor]))
    }

    /// Records `event` at the end of `stream`.
    pub fn record(&mut self, event: Event, stream: Stream) {
        let (actor, clock) = self.end_of(stream);
        self.events.entry(event.0).or_default().clone_from(&clock);
        self.clocks[actor] = clock;
    }

    /// Makes what follows in `stream` wait for the last record of `event`. Whether that orders anything
    /// that was not ordered before: a wait that does not could be left out.
    pub fn wait(&mut self, stream: Stream, event: Event) -> bool {
        let (actor, mut clock) = self.end_of(stream);
        let changed = self.events.get(&event.0).is_some_and(|recorded| join(&mut clock, recorded));
        self.clocks[actor] = clock;
        changed
    }

    /// The host has seen that the last record of `event` was reached: what stands before it is before all
    /// that the host does, and enqueues, from now on. Whether that orders anything new.
    pub fn observed(&mut self, event: Event) -> bool {
        self.clocks.resize(self.clocks.len().max(1), Clock::new());
        match self.events.get(&event.0) {
            Some(recorded) => join(&mut self.clocks[HOST], recorded),
            None => false,
        }
    }

    /// The host has learned by other means that what was enqueued on `stream` by now has ended. Whether that
    /// orders anything new.
    pub fn ended(&mut self, stream: Stream) -> bool {
        let (actor, clock) = self.end_of(stream);
        let changed = join(&mut self.clocks[HOST], &clock);
        self.clocks[actor] = clock;
        changed
    }

    /// Enqueues the operation `what`, which touches `accesses`, at the end of `stream`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] when it may run beside an operation that it conflicts with: the text names
    /// both, what they touch (`from`, `to`), and who has to wait for whom. It counts as not enqueued then.
    pub fn access(&mut self, stream: Stream, what: &'static str, accesses: &[Access]) -> Result<()> {
        let (actor, clock) = self.end_of(stream);
        self.touch(actor, clock, what, accesses)
    }

    /// Whether [`Order::access`] would be in order. Enqueues nothing.
    ///
    /// # Errors
    /// As [`Order::access`].
    pub fn check(&mut self, stream: Stream, what: &'static str, accesses: &[Access]) -> Result<()> {
        let (actor, clock) = self.end_of(stream);
        let refused = self.refused(actor, &clock, what, accesses);
        self.clocks[actor] = clock;
        refused.map_or(Ok(()), Err)
    }

    /// Whether [`Order::wait`] would order anything that is not ordered already.
    pub fn would_order(&mut self, stream: Stream, event: Event) -> bool {
        let (actor, clock) = self.end_of(stream);
        let recorded = self.events.get(&event.0);
        let changes = recorded.is_some_and(|recorded| join(&mut clock.clone(), recorded));
        self.clocks[actor] = clock;
        changes
    }

    /// The host itself touches `accesses`, now.
    ///
    /// # Errors
    /// As [`Order::access`].
    pub fn host(&mut self, what: &'static str, accesses: &[Access]) -> Result<()> {
        self.clocks.resize(self.clocks.len().max(1), Clock::new());
        let clock = std::mem::take(&mut self.clocks[HOST]);
        self.touch(HOST, clock, what, accesses)
    }

    /// How many stretches of all spaces are remembered.
    pub const fn remembered(&self) -> usize {
        self.stretches
    }

    /// Gives `actor` its clock back, one operation on if that is in order.
    fn touch(&mut self, actor: usize, mut clock: Clock, what: &'static str, all: &[Access]) -> Result<()> {
        let refused = self.refused(actor, &clock, what, all);
        if let Some(refused) = refused {
            self.clocks[actor] = clock;
            return Err(refused);
        }
        clock.resize(clock.len().max(actor + 1), 0);
        clock[actor] += 1;
        let mark = Mark { actor, number: clock[actor], what };
        self.clocks[actor] = clock;
        for access in all.iter().filter(|access| access.range.from < access.range.to) {
            self.apply(access, mark);
        }
        if self.stretches > FEW.max(2 * self.kept) {
            self.forget();
        }
        Ok(())
    }

    fn refused(&self, actor: usize, clock: &[u64], what: &'static str, all: &[Access]) -> Option<Error> {
        all.iter().find_map(|access| {
            let (other, writes) = self.conflict(clock, access)?;
            Some(self.refusal(Mark { actor, number: 0, what }, access, other, writes))
        })
    }

    /// An earlier access in the way of `access`, and whether it was a write.
    fn conflict(&self, clock: &[u64], access: &Access) -> Option<(Mark, bool)> {
        let Range { space, from, to } = access.range;
        let stretches = self.spaces.get(&space).filter(|_| from < to)?;
        let first = stretches.range(..=from).next_back().filter(|(_, stretch)| stretch.to > from);
        let others = stretches.range(from..to).filter(|(start, _)| **start > from);
        first.into_iter().chain(others).find_map(|(_, stretch)| {
            let beside = |mark: &&Mark| !reaches(clock, mark);
            let written = stretch.written.as_ref().filter(beside).map(|mark| (*mark, true));
            let read = || stretch.read.iter().find(beside).map(|mark| (*mark, false));
            written.or_else(|| read().filter(|_| access.write))
        })
    }

    fn apply(&mut self, access: &Access, mark: Mark) {
        let Range { space, from, to } = access.range;
        let stretches = self.spaces.entry(space).or_default();
        self.stretches -= stretches.len();
        divide(stretches, from);
        divide(stretches, to);
        if access.write {
            let inside: Vec<u64> = stretches.range(from..to).map(|(start, _)| *start).collect();
            inside.iter().for_each(|start| drop(stretches.remove(start)));
            stretches.insert(from, Stretch { to, written: Some(mark), read: Vec::new() });
        } else {
            let mut gaps = Vec::new();
            let mut next = from;
            for (start, stretch) in stretches.range_mut(from..to) {
                if next < *start {
                    gaps.push((next, *start));
                }
                next = stretch.to;
                stretch.read.retain(|read| read.actor != mark.actor);
                stretch.read.push(mark);
            }
            if next < to {
                gaps.push((next, to));
            }
            let new = |(from, to)| (from, Stretch { to, written: None, read: vec![mark] });
            stretches.extend(gaps.into_iter().map(new));
        }
        self.stretches += stretches.len();
    }

    /// Drops what the host has seen complete, and joins stretches that are alike then.
    fn forget(&mut self) {
        let seen = std::mem::take(&mut self.clocks[HOST]);
        self.stretches = 0;
        for stretches in self.spaces.values_mut() {
            let mut kept = Stretches::new();
            for (start, mut stretch) in std::mem::take(stretches) {
                stretch.written = stretch.written.filter(|mark| !reaches(&seen, mark));
                stretch.read.retain(|mark| !reaches(&seen, mark));
                if stretch.written.is_none() && stretch.read.is_empty() {
                    continue;
                }
                match kept.last_entry() {
                    Some(mut last) if last.get().is_continued_by(start, &stretch) => {
                        last.get_mut().to = stretch.to;
                    }
                    _ => drop(kept.insert(start, stretch)),
                }
            }
            *stretches = kept;
            self.stretches += stretches.len();
        }
        self.spaces.retain(|_, stretches| !stretches.is_empty());
        self.kept = self.stretches;
        self.clocks[HOST] = seen;
    }

    fn name(&self, mark: Mark) -> String {
        let stream = self.streams.iter().find(|(_, actor)| **actor == mark.actor);
        match stream {
            Some((stream, _)) => format!("{} (stream {stream})", mark.what),
            None => format!("{} (host)", mark.what),
        }
    }

    fn refusal(&self, mark: Mark, access: &Access, other: Mark, writes: bool) -> Error {
        let verb = |write| if write { "writes" } else { "reads" };
        let (own, theirs, space) = (verb(access.write), verb(writes), access.range.space);
        let place = format!(
            "{} {own} {space}, which {} {theirs}, and is not ordered behind it",
            self.name(mark),
            self.name(other)
        );
        let hint = match (mark.actor, other.actor) {
            (HOST, _) => "look whether an event recorded behind the other has completed before this one",
            _ => "record an event behind the other and let this one's stream wait for it",
        };
        let error = Error::new(Kind::InvalidState, "order").at(place).hint(hint);
        error.with("from", access.range.from).with("to", access.range.to)
    }
}

impl Stretch {
    fn is_continued_by(&self, start: u64, next: &Stretch) -> bool {
        self.to == start && self.written == next.written && self.read == next.read
    }
}

#[cfg(all(test, not(loom)))]
#[path = "order_tests.rs"]
mod tests;
