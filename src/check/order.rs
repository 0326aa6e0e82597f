//! A happens-before checker: it finds operations that touch the same bytes without being ordered by streams and
//! events, and reads of bytes that hold something else than the reader expects.
//!
//! On a device, a missing edge shows only when two operations happen to run in the wrong order, and most runs of a
//! wrong schedule give right results. So this checker examines what was allowed to happen, not what happened. Callers
//! report to an [`Order`] each record, each wait and the memory that each operation touches, in the order of
//! enqueueing. [`Order::access`] returns an error at the first operation that can run at the same time as one that it
//! conflicts with, at any speeds of the streams.
//!
//! **What is ordered.** Operations of one stream, in the order of enqueueing. Everything before a record comes before
//! everything after a wait for it; a wait is for the last record enqueued before it, and an event that was never
//! recorded orders nothing. Everything that the host did or saw comes before all that it enqueues later. Everything
//! before a record comes before all that the host does after it has seen the event complete ([`Order::observed`]).
//! Nothing else orders: not time, and not the order of enqueueing in two streams.
//!
//! **How.** Each stream, and the host, has a vector clock: for each actor, how many of its operations are ordered
//! before the stream's next one. A record copies the stream's clock; a wait takes the maximum of each number. A range
//! remembers its last write and, after it, the last read of each actor. An access conflicts with any of these that
//! its stream's clock does not reach. Forgetting older accesses loses nothing: they are ordered before the last one,
//! or were reported themselves, so the first conflict with an older access is also a conflict with the last one.
//!
//! **Stale reads.** Operations can be in order and still be wrong: a layer is computed from a buffer that the next
//! layer's weights have already replaced. So a write can say what the bytes hold afterwards, a [`Content`], and a read
//! what it expects ([`Access::of`]). A read that expects a content where the last write left another, or none that is
//! known, is a stale read. The last write is the last one that was enqueued. That is also the last one that runs: an
//! edge leads from what was enqueued earlier to what was enqueued later, and a pair without one is reported as a race,
//! before any stale read. So one run finds a stale read at any speeds of the streams.
//!
//! **Ranges are the caller's choice.** A [`Space`] is a name with numbers, and a [`Range`] is an interval of it. It
//! can stand for bytes, slots of a lane or pages; the checker does not care. Too coarse ranges give false conflicts,
//! and missing ranges hide true ones.
//!
//! **Memory** is bounded by the ranges in use, not by the length of the run. A stretch has one write and at most one
//! read per actor, and a write merges what earlier accesses have divided. Accesses that the host has seen complete
//! are dropped, and with them stretches that have none left: whatever is enqueued later comes after them, also on
//! streams that do not exist yet. Dropping happens whenever the number of stretches has doubled, so its cost per
//! access is constant. What bytes hold is kept apart from these accesses and is never dropped, because a read may
//! expect it however late it comes: one interval for neighbours of one content, until a write without content or
//! [`Order::gone`].
//!
//! **What it does not do.** It models one host thread, the owner that enqueues. It does not find waits that never
//! end. An event that is recorded after its wait orders nothing here, as on a device.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

pub use super::content::Content;
use super::content::Held;
use crate::device::{Event, Stream};
use crate::error::{Error, Kind, Result};

/// Something that operations touch, divided into places numbered from 0. Spaces of different names or numbers are
/// disjoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Space {
    name: &'static str,
    numbers: [u32; 2],
}

impl Space {
    /// The space called `name` with `numbers`. The name says what the numbers count.
    pub const fn new(name: &'static str, numbers: [u32; 2]) -> Space {
        Space { name, numbers }
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.name, self.numbers[0], self.numbers[1])
    }
}

/// The places `from..to` of a space; empty if `to` is not above `from`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The space.
    pub space: Space,
    /// The first place.
    pub from: u64,
    /// The place after the last one.
    pub to: u64,
}

/// An operation's read or write of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The range that it touches.
    pub range: Range,
    /// Whether it writes. Reads need no order among themselves.
    pub write: bool,
    /// What the range holds after a write; what a read expects in all of it. `None`: after a write nothing that is
    /// known, before a read anything.
    pub content: Option<Content>,
}

impl Access {
    /// Reads `from..to` of `space`, whatever it holds.
    pub const fn read(space: Space, from: u64, to: u64) -> Access {
        Access { range: Range { space, from, to }, write: false, content: None }
    }

    /// Writes `from..to` of `space`, which then holds nothing that is known.
    pub const fn write(space: Space, from: u64, to: u64) -> Access {
        Access { range: Range { space, from, to }, write: true, content: None }
    }

    /// The same access, which leaves `content` behind if it writes, and expects it if it reads.
    #[must_use]
    pub const fn of(self, content: Content) -> Access {
        Access { content: Some(content), ..self }
    }

    const fn is_empty(&self) -> bool {
        self.range.from >= self.range.to
    }
}

/// A vector clock: for each actor, how many of its operations come before.
type Clock = Vec<u64>;

/// The host's index among the actors. Streams follow in the order in which they are first named.
const HOST: usize = 0;

/// One operation of an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    actor: usize,
    /// Its sequence number within this actor.
    number: u64,
    what: &'static str,
}

/// A stretch of a space whose places had the same accesses.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stretch {
    to: u64,
    written: Option<Mark>,
    /// The reads after the write, at most one per actor.
    read: Vec<Mark>,
}

/// Disjoint stretches by their first places.
type Stretches = BTreeMap<u64, Stretch>;

/// The checker. See the [module](self) page.
#[derive(Debug, Default)]
pub struct Order {
    streams: HashMap<u64, usize>,
    clocks: Vec<Clock>,
    events: HashMap<u64, Clock>,
    spaces: HashMap<Space, Stretches>,
    /// What the places of a space hold, where that is known.
    held: HashMap<Space, Held>,
    /// The number of stretches, and their number after the last time that some were dropped.
    stretches: usize,
    kept: usize,
}

/// The number of stretches up to which dropping is not worthwhile.
const FEW: usize = 64;

fn reaches(clock: &[u64], mark: &Mark) -> bool {
    clock.get(mark.actor).is_some_and(|known| *known >= mark.number)
}

/// Sets `clock` to the maximum with `other`; returns whether that changed it.
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

/// Splits the stretch that contains `at`, if any, at `at`.
fn divide(stretches: &mut Stretches, at: u64) {
    let across = stretches.range_mut(..at).next_back().filter(|(_, stretch)| stretch.to > at);
    if let Some((_, stretch)) = across {
        let behind = stretch.clone();
        stretch.to = at;
        stretches.insert(at, behind);
    }
}

impl Order {
    /// An order with nothing enqueued.
    pub fn new() -> Order {
        Order::default()
    }

    fn actor(&mut self, stream: Stream) -> usize {
        // The host's clock exists from the first call on.
        self.clocks.resize(self.clocks.len().max(1), Clock::new());
        *self.streams.entry(stream.0).or_insert_with(|| {
            self.clocks.push(Clock::new());
            self.clocks.len() - 1
        })
    }

    /// The clock of a stream's end. Everything that the host has seen comes before whatever it enqueues.
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

    /// Makes the following operations of `stream` wait for the last record of `event`. Returns whether that orders
    /// anything new; a wait that does not is redundant.
    pub fn wait(&mut self, stream: Stream, event: Event) -> bool {
        let (actor, mut clock) = self.end_of(stream);
        let changed = self.events.get(&event.0).is_some_and(|recorded| join(&mut clock, recorded));
        self.clocks[actor] = clock;
        changed
    }

    /// Notes that the host has seen the last record of `event` complete: everything before it comes before all that
    /// the host does and enqueues from now on. Returns whether that orders anything new.
    pub fn observed(&mut self, event: Event) -> bool {
        self.clocks.resize(self.clocks.len().max(1), Clock::new());
        match self.events.get(&event.0) {
            Some(recorded) => join(&mut self.clocks[HOST], recorded),
            None => false,
        }
    }

    /// Notes that the host has learned by other means (a ticket) that everything enqueued on `stream` so far has
    /// ended. Returns whether that orders anything new.
    pub fn ended(&mut self, stream: Stream) -> bool {
        let (actor, clock) = self.end_of(stream);
        let changed = join(&mut self.clocks[HOST], &clock);
        self.clocks[actor] = clock;
        changed
    }

    /// Enqueues the operation `what`, which touches `accesses`, at the end of `stream`.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] when it can run at the same time as an operation that it conflicts with. The text names
    /// both, what they touch (`from`, `to`), and which has to wait for which. The same kind when nothing of that sort
    /// is found and a read expects what its range does not hold: the place begins with "stale read" and has the part,
    /// and the numbers are `expected layer` and `expected version`, and `found layer` and `found version` where what
    /// the part holds is known. The operation then counts as not enqueued.
    pub fn access(&mut self, stream: Stream, what: &'static str, accesses: &[Access]) -> Result<()> {
        let (actor, clock) = self.end_of(stream);
        self.touch(actor, clock, what, accesses)
    }

    /// Makes the check of [`Order::access`] without enqueueing anything.
    ///
    /// # Errors
    /// As [`Order::access`].
    pub fn check(&mut self, stream: Stream, what: &'static str, accesses: &[Access]) -> Result<()> {
        let (actor, clock) = self.end_of(stream);
        let refused = self.refused(actor, &clock, what, accesses);
        self.clocks[actor] = clock;
        refused.map_or(Ok(()), Err)
    }

    /// Whether [`Order::wait`] would order anything new.
    pub fn would_order(&mut self, stream: Stream, event: Event) -> bool {
        let (actor, clock) = self.end_of(stream);
        let recorded = self.events.get(&event.0);
        let changes = recorded.is_some_and(|recorded| join(&mut clock.clone(), recorded));
        self.clocks[actor] = clock;
        changes
    }

    /// Reports that the host itself touches `accesses` now.
    ///
    /// # Errors
    /// As [`Order::access`].
    pub fn host(&mut self, what: &'static str, accesses: &[Access]) -> Result<()> {
        self.clocks.resize(self.clocks.len().max(1), Clock::new());
        let clock = std::mem::take(&mut self.clocks[HOST]);
        self.touch(HOST, clock, what, accesses)
    }

    /// What a range holds, in order and without gaps: the place after each part, and its content if that is known.
    pub fn contents(&self, range: Range) -> Vec<(u64, Option<Content>)> {
        let Range { space, from, to } = range;
        let nothing = Held::default();
        self.held.get(&space).unwrap_or(&nothing).parts(from, to)
    }

    /// Notes that the memory that a space stands for is gone, with what it held.
    pub fn gone(&mut self, space: Space) {
        self.held.remove(&space);
    }

    /// The number of stretches of all spaces that are remembered: those with accesses, and those that hold something
    /// that is known.
    pub fn remembered(&self) -> usize {
        self.stretches + self.held.values().map(Held::len).sum::<usize>()
    }

    /// Restores `actor`'s clock, advanced by one operation if the access is in order.
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
        for access in all.iter().filter(|access| !access.is_empty()) {
            self.apply(access, mark);
            self.hold(access);
        }
        if self.stretches > FEW.max(2 * self.kept) {
            self.forget();
        }
        Ok(())
    }

    fn refused(&self, actor: usize, clock: &[u64], what: &'static str, all: &[Access]) -> Option<Error> {
        let mark = Mark { actor, number: 0, what };
        let races = all.iter().find_map(|access| {
            let (other, writes) = self.conflict(clock, access)?;
            Some(self.refusal(mark, access, other, writes))
        });
        // Where a race is, what a range holds is not known.
        races.or_else(|| all.iter().find_map(|access| self.stale(mark, access)))
    }

    /// The error for a read of a range that does not hold what it expects.
    fn stale(&self, mark: Mark, access: &Access) -> Option<Error> {
        let expected = access.content.filter(|_| !access.write)?;
        let mut from = access.range.from;
        let parts = self.contents(access.range).into_iter();
        let mut parts = parts.map(|(to, found)| (std::mem::replace(&mut from, to), to, found));
        let (from, to, found) = parts.find(|(.., found)| *found != Some(expected))?;
        let space = access.range.space;
        let holds = found.map_or_else(|| "nothing that is known".to_owned(), |found| found.to_string());
        let place = format!(
            "stale read: {} expects {expected} in {space}, which from {from} to {to} holds {holds}",
            self.name(mark)
        );
        let hint = "enqueue what writes it before the read, and what overwrites it behind the read";
        let error = Error::new(Kind::InvalidState, "order").at(place).hint(hint);
        let error = error.with("expected layer", expected.layer).with("expected version", expected.version);
        Some(match found {
            Some(found) => error.with("found layer", found.layer).with("found version", found.version),
            None => error,
        })
    }

    /// Notes what a write leaves behind.
    fn hold(&mut self, access: &Access) {
        let Range { space, from, to } = access.range;
        if !access.write || (access.content.is_none() && !self.held.contains_key(&space)) {
            return;
        }
        let held = self.held.entry(space).or_default();
        held.set(from, to, access.content);
        if held.len() == 0 {
            self.held.remove(&space);
        }
    }

    /// An earlier access that conflicts with `access`, and whether it was a write.
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

    /// Drops accesses that the host has seen complete, and merges stretches that are then equal.
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
            "{} {own} {space}, which {} {theirs}, and is not ordered after it",
            self.name(mark),
            self.name(other)
        );
        let hint = match (mark.actor, other.actor) {
            (HOST, _) => {
                "before this one, query an event that is recorded after the other, until it has completed"
            }
            _ => "record an event after the other and let this one's stream wait for it",
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
