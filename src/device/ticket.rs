//! A ticket: the completion of work that the host issued, which ends exactly once.
//!
//! | from | to | by |
//! |---|---|---|
//! | pending | Done | [`Completer::done`]: the stream reached the point and the device is sound |
//! | pending | Failed(kind) | [`Completer::fail`] |
//! | pending | Cancelled | the completer is dropped unused: shutdown, or a refused operation |
//!
//! A ticket is one atomic word with one completer. Ending the ticket consumes the completer, so it ends at most once.
//! Dropping the completer also ends it, so no path can forget to. The end is a release store and the poll an acquire
//! load: a caller that sees Done sees the bytes. The waiting side cannot end a ticket. Memory that the work uses is
//! freed when the ticket has ended, so an early end would free memory in use.

use crate::error::Kind;
use crate::sync::{Arc, AtomicU32, Ordering};

/// The way in which a ticket ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The work is done. The bytes are valid only in this case.
    Done,
    /// The work failed.
    Failed(Kind),
    /// The work never ran.
    Cancelled,
}

const PENDING: u32 = u32::MAX;
const DONE: u32 = 0;
const CANCELLED: u32 = Kind::Cancelled as u32;

/// The side that polls.
#[must_use]
#[derive(Clone, Debug)]
pub struct Ticket(Arc<AtomicU32>);

/// The side that ends the ticket.
#[must_use]
#[derive(Debug)]
pub struct Completer(Option<Arc<AtomicU32>>);

impl Ticket {
    /// A pending ticket and its completer.
    pub fn new() -> (Ticket, Completer) {
        let word = Arc::new(AtomicU32::new(PENDING));
        (Ticket(Arc::clone(&word)), Completer(Some(word)))
    }

    /// The ticket of a call that had nothing to enqueue.
    pub(crate) fn done() -> Ticket {
        Ticket(Arc::new(AtomicU32::new(DONE)))
    }

    /// The outcome, or `None` while the work is pending.
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

    /// Ends the ticket as done.
    pub fn done(mut self) {
        self.end(DONE);
    }

    /// Ends the ticket as failed.
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
