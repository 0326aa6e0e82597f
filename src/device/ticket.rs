//! The one completion of work that the host issued.
//!
//! | from | to | by |
//! |---|---|---|
//! | pending | Done | [`Completer::done`]: the stream reached the point and the device is sound |
//! | pending | Failed(kind) | [`Completer::fail`] |
//! | pending | Cancelled | the completer is dropped unused: shutdown, or a refused operation |
//!
//! One word and one completer, which is used up by ending it: exactly once, and no path can forget to,
//! because dropping the completer is one of the paths. Release on the end, acquire on the poll: who sees
//! Done sees the bytes. The waiting side cannot end it: what a ticket's work touches is given back when
//! the ticket has ended, so an end that comes before the work's would free memory under it.

use crate::error::Kind;
use crate::sync::{Arc, AtomicU32, Ordering};

/// How a ticket ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The work is done; only this makes bytes valid.
    Done,
    /// It failed.
    Failed(Kind),
    /// It never ran.
    Cancelled,
}

const PENDING: u32 = u32::MAX;
const DONE: u32 = 0;
const CANCELLED: u32 = Kind::Cancelled as u32;

/// The side that waits.
#[must_use]
#[derive(Clone, Debug)]
pub struct Ticket(Arc<AtomicU32>);

/// The side that ends it.
#[must_use]
#[derive(Debug)]
pub struct Completer(Option<Arc<AtomicU32>>);

impl Ticket {
    /// A pending ticket and its completer.
    pub fn new() -> (Ticket, Completer) {
        let word = Arc::new(AtomicU32::new(PENDING));
        (Ticket(Arc::clone(&word)), Completer(Some(word)))
    }

    /// How it ended, if it has.
    pub fn poll(&self) -> Option<Outcome> {
        match self.0.load(Ordering::Acquire) {
            PENDING => None,
            DONE => Some(Outcome::Done),
            CANCELLED => Some(Outcome::Cancelled),
            code => {
                let kind = Kind::ALL.iter().find(|k| **k as u32 == code);
                Some(Outcome::Failed(kind.copied().unwrap_or(Kind::Internal)))
            }
        }
    }
}

impl Completer {
    fn end(&mut self, code: u32) {
        if let Some(word) = self.0.take() {
            word.store(code, Ordering::Release);
        }
    }

    /// The work is done.
    pub fn done(mut self) {
        self.end(DONE);
    }

    /// The work failed.
    pub fn fail(mut self, kind: Kind) {
        self.end(kind as u32);
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        self.end(CANCELLED);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_ends_once_in_each_way() {
        let (ticket, completer) = Ticket::new();
        assert_eq!(ticket.poll(), None);
        completer.done();
        assert_eq!(ticket.poll(), Some(Outcome::Done));

        let (ticket, completer) = Ticket::new();
        completer.fail(Kind::Io);
        assert_eq!(ticket.poll(), Some(Outcome::Failed(Kind::Io)));

        let (ticket, completer) = Ticket::new();
        drop(completer);
        assert_eq!(ticket.poll(), Some(Outcome::Cancelled));
    }
}
