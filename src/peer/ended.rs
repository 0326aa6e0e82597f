//! What is known of the processes that end their sessions while the group meets.
//!
//! A process that has gone may be followed by another one, so the meeting waits for its rank. One that lives and
//! *refuses* this process would be waited for in vain. Nothing tells the two apart at the first end. A refusal follows
//! a hello, and the process closes the connection; the second one of the same process is an error. What a process does
//! that has died since looks different: it was silent, or a connection that waited for it ends without a hello.
//!
//! A process of another namespace has number 0, as all of its kind, so its refusals are never counted. A process that
//! is itself stopped twice for longer than the others wait finds two closed connections too, and holds that for a
//! refusal.

use std::collections::BTreeMap;

use super::link::Link;
use super::session::SILENT;
use crate::error::{Error, Kind, Result};

/// The processes that ended their sessions while the group meets.
#[derive(Debug)]
pub(super) struct Ended {
    followed: bool,
    /// Of each rank: the process that may have refused this one, and why the last session ended.
    ranks: BTreeMap<u32, (Option<i32>, Error)>,
}

impl Ended {
    /// None so far. `followed` says whether others may follow them.
    pub fn new(followed: bool) -> Ended {
        Ended { followed, ranks: BTreeMap::new() }
    }

    /// Whether another process may follow one that has ended.
    pub fn is_followed(&self) -> bool {
        self.followed
    }

    /// Notes that a session failed; the rank is given where it is known.
    ///
    /// # Errors
    /// The given one, unless it says that the process was lost and another one may follow.
    pub fn note(&mut self, rank: Option<u32>, link: &Link, error: Error) -> Result<()> {
        // One that said its end, and is over, does not refuse either.
        let refuses = link.theirs().is_some() && !link.is_over() && error.place() != SILENT;
        self.add(rank, refuses.then_some(link.credentials().process), error)
    }

    /// The same, with the process if it may have refused this one.
    fn add(&mut self, rank: Option<u32>, refuses: Option<i32>, error: Error) -> Result<()> {
        if !self.followed || error.kind() != Kind::PeerLost {
            return Err(error);
        }
        let Some(rank) = rank else { return Ok(()) };
        let before = self.ranks.get(&rank).and_then(|(process, _)| *process);
        let refuses = refuses.filter(|process| *process != 0);
        if refuses.is_some() && refuses == before {
            return Err(error);
        }
        self.ranks.insert(rank, (refuses.or(before), error));
        Ok(())
    }

    /// Why the last process of the rank ended its session, if one did.
    pub fn why(&self, rank: u32) -> Option<&Error> {
        self.ranks.get(&rank).map(|(_, error)| error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(place: &'static str) -> Error {
        Error::new(Kind::PeerLost, "test").at(place)
    }

    #[test]
    fn only_the_second_refusal_of_one_process_of_a_rank_is_an_error() {
        for (ends, refused) in [
            (&[(Some(1), Some(5)), (Some(1), Some(5))][..], true),
            // Whatever ends between the two.
            (&[(Some(1), Some(5)), (Some(1), None), (Some(1), Some(5))], true),
            (&[(Some(1), Some(5)), (Some(1), Some(6))], false),
            (&[(Some(1), Some(5)), (Some(2), Some(5))], false),
            (&[(Some(1), None), (Some(1), Some(5)), (Some(1), None)], false),
            // A process of another namespace is any, and so is one of no known rank.
            (&[(Some(1), Some(0)), (Some(1), Some(0))], false),
            (&[(None, Some(5)), (None, Some(5))], false),
        ] {
            let mut ended = Ended::new(true);
            let results: Vec<_> =
                ends.iter().map(|(rank, process)| ended.add(*rank, *process, lost("x"))).collect();
            let (last, before) = results.split_last().unwrap();
            assert!(before.iter().all(Result::is_ok) && last.is_err() == refused, "{ends:?}: {results:?}");
        }
    }

    #[test]
    fn the_last_end_of_a_rank_is_known() {
        let mut ended = Ended::new(true);
        for place in ["first", "second"] {
            ended.add(Some(1), Some(0), lost(place)).unwrap();
        }
        assert_eq!((ended.why(1), ended.why(2)), (Some(&lost("second")), None));
        // Where no process can follow, and for what a process breaks, the first end is an error.
        assert!(Ended::new(false).add(Some(1), None, lost("x")).is_err());
        assert!(ended.add(Some(3), None, Error::new(Kind::BadFormat, "test")).is_err());
    }
}
