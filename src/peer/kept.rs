//! Events that were received before a call asked for them, in order.
//!
//! A process keeps what others say until all have met, and until it has everything that it waits for. What one rank
//! can make it keep has a bound, in bytes and in descriptors: a rank that says more breaks an agreement of its group.
//! That a rank was lost is kept too, behind what it said.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;

use super::session::{DESCRIPTORS_MAX, Event};
use crate::error::{Error, Kind, Result};

/// The most memory of events that are kept of one rank, in bytes.
pub const KEPT_MAX: usize = 1 << 20;

#[derive(Debug, Default)]
pub(super) struct Kept {
    events: VecDeque<(u32, Result<Event<OwnedFd>>)>,
    /// By rank: bytes of memory, and descriptors.
    held: BTreeMap<u32, (usize, usize)>,
}

/// An event's memory in bytes, and its descriptors. An empty message has a weight too.
fn weight(event: &Event<OwnedFd>) -> (usize, usize) {
    match event {
        Event::Message { bytes, descriptor } => {
            (size_of_val(event) + bytes.len(), usize::from(descriptor.is_some()))
        }
        Event::Hello(_) | Event::Ended => (size_of_val(event), 0),
    }
}

impl Kept {
    /// Keeps an event behind the others.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] with the rank if too much of it is kept; the event is dropped.
    pub fn push(&mut self, rank: u32, event: Event<OwnedFd>) -> Result<()> {
        let held = self.held.entry(rank).or_default();
        let (bytes, descriptors) = weight(&event);
        let (bytes, descriptors) = (held.0 + bytes, held.1 + descriptors);
        if bytes > KEPT_MAX || descriptors > DESCRIPTORS_MAX {
            return Err(Error::new(Kind::Exhausted, "keep what a rank says early")
                .at("messages that no call waits for")
                .with("rank", rank)
                .with("bytes", bytes as u64)
                .with("descriptors", descriptors as u64)
                .hint("let ranks wait for an answer before they send more"));
        }
        *held = (bytes, descriptors);
        self.events.push_back((rank, Ok(event)));
        Ok(())
    }

    /// Keeps the error of a rank that was lost. Each loss is kept once, so these have a bound of their own.
    pub fn push_loss(&mut self, rank: u32, error: Error) {
        self.events.push_back((rank, Err(error)));
    }

    /// Drops what a rank said, and that it was lost.
    pub fn forget(&mut self, rank: u32) {
        self.events.retain(|(other, _)| *other != rank);
        self.held.remove(&rank);
    }

    /// The first event, or the error of a rank that was lost.
    pub fn pop(&mut self) -> Option<(u32, Result<Event<OwnedFd>>)> {
        let (rank, event) = self.events.pop_front()?;
        let (bytes, descriptors) = event.as_ref().map_or((0, 0), weight);
        if let Some(held) = self.held.get_mut(&rank) {
            *held = (held.0.saturating_sub(bytes), held.1.saturating_sub(descriptors));
        }
        Some((rank, event))
    }

    /// Puts all of `earlier` before these.
    pub fn prepend(&mut self, mut earlier: Kept) {
        for (rank, (bytes, descriptors)) in std::mem::take(&mut earlier.held) {
            let held = self.held.entry(rank).or_default();
            *held = (held.0 + bytes, held.1 + descriptors);
        }
        earlier.events.append(&mut self.events);
        self.events = earlier.events;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(length: usize, descriptor: bool) -> Event<OwnedFd> {
        let descriptor = descriptor.then(|| std::fs::File::open("/dev/null").unwrap().into());
        Event::Message { bytes: vec![0; length], descriptor }
    }

    #[test]
    fn each_rank_has_a_bound_of_its_own_and_room_again_after_a_pop() {
        for (length, descriptor) in [(0, false), (60_000, false), (0, true)] {
            let mut kept = Kept::default();
            let fill = |kept: &mut Kept, rank| {
                let mut fit = 0;
                loop {
                    match kept.push(rank, message(length, descriptor)) {
                        Ok(()) => fit += 1,
                        Err(error) => break (fit, error),
                    }
                }
            };
            for rank in [1, 2] {
                let (fit, error) = fill(&mut kept, rank);
                let bytes = fit * (length + size_of::<Event<OwnedFd>>());
                assert!(if descriptor { fit == 16 } else { bytes > (1 << 20) - 61_000 && bytes <= 1 << 20 });
                assert_eq!((error.kind(), error.number("rank")), (Kind::Exhausted, Some(u64::from(rank))));
            }
            assert_eq!(kept.pop().map(|(rank, _)| rank), Some(1));
            assert_eq!((fill(&mut kept, 2).0, fill(&mut kept, 1).0), (0, 1));
        }
    }

    #[test]
    fn earlier_events_come_first() {
        let mut all = [Kept::default(), Kept::default()];
        for (kept, lengths) in all.iter_mut().zip([[3, 4], [1, 2]]) {
            lengths.iter().for_each(|length| kept.push(0, message(*length, false)).unwrap());
        }
        let [mut later, earlier] = all;
        later.prepend(earlier);
        let mut lengths = Vec::new();
        while let Some((_, Ok(Event::Message { bytes, .. }))) = later.pop() {
            lengths.push(bytes.len());
        }
        assert_eq!((lengths, later.held.get(&0)), (vec![1, 2, 3, 4], Some(&(0, 0))));
    }

    #[test]
    fn a_rank_that_is_forgotten_leaves_the_others_and_has_its_whole_room_again() {
        let mut kept = Kept::default();
        let lost = Error::new(Kind::PeerLost, "test");
        for rank in [1, 2] {
            (0..16).for_each(|_| kept.push(rank, message(0, true)).unwrap());
            kept.push_loss(rank, lost.clone());
        }
        kept.forget(1);
        (0..16).for_each(|_| kept.push(1, message(0, true)).unwrap());
        let all: Vec<_> = std::iter::from_fn(|| kept.pop()).map(|(rank, it)| (rank, it.err())).collect();
        let told = |rank, error: Option<&Error>| (rank, error.cloned());
        assert_eq!(all[..16], vec![told(2, None); 16]);
        assert_eq!((&all[16], all.len()), (&told(2, Some(&lost)), 33));
    }
}
