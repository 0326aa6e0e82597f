//! Fabrics: what carries frames and rows between a sender's and a receiver's ranks.
//!
//! The machines ([`Sender`], [`Receiver`](crate::transfer::Receiver)) do no I/O. A fabric does nothing else. Each rank
//! has one end of it, for all its connections: a [`SenderFabric`] or a [`ReceiverFabric`]. An end
//! ([`SendingEnd`](crate::transfer::SendingEnd), [`ReceivingEnd`](crate::transfer::ReceivingEnd)) is a machine with its
//! fabric. Shared memory, sockets and RDMA differ in where a run's bytes are when they are fetched:
//!
//! | way | a notice | a run is fetched from |
//! |---|---|---|
//! | shared memory | is a frame alone | the sender's memory, which the receiver maps |
//! | a stream | has its runs' bytes behind it | what came with the notice |
//! | a writer from afar | comes after [`SenderFabric::write`] | the receiver's landing pages |
//!
//! A writer from afar is what RDMA and NIXL call one-sided writes.
//!
//! **What a fabric promises.** `transfer::conformance` (feature `check`) holds each fabric to this:
//!
//! - A frame that was taken comes whole, once, and in its connection's order, unless the connection is lost.
//! - A frame or a write that has no room is refused, and [`Happened::Room`] comes when there is room again. What is
//!   kept for a slow or silent other end is bounded; what comes behind one frame is bounded by
//!   [`Options::notice_bytes`](crate::transfer::sender::Options::notice_bytes). No call waits.
//! - A connection's number is of one end, and never used again there. Its first event is [`Happened::Connected`].
//!   [`Happened::Lost`] comes once, and after it only [`Happened::Destroyed`]. Each end learns that the other one has
//!   closed a connection or has ended. The two connect again by themselves.
//! - Each connection has its turn: none waits for another one's backlog.
//! - [`Happened::Written`] comes once for each write that was taken, when nothing of it will land any more, unless the
//!   connection is lost before. A frame that is sent after it comes when the bytes are there to be fetched.
//! - After [`Happened::Destroyed`] nothing lands that came over this connection. An end of a fabric whose writers are
//!   from afar says so once for each connection that was lost, when its memory is out of reach.
//!
//! **Memory.** A sender's end has the memory that rows are sent from, for as long as the end lives. Rows that were
//! released may be overwritten at any time. A fabric that still reads them carries other bytes, which have no use.
//!
//! **What it does not promise.** Bytes may be wrong, and may change while they are fetched. The receiver finds that by
//! digests. Waiting is a fabric's own: one of the system has a descriptor to wait on.

use crate::error::{Error, Result};
use crate::fallible::reserve;
use crate::transfer::frames::{Frame, Rows};
use crate::transfer::quarantine::Fence;
use crate::transfer::receiver::Where;
use crate::transfer::runs::Run;
use crate::transfer::sender::{Computed, Landing, Sender, Source};

/// What has happened at an end of a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened {
    /// A connection to a rank of the other side is there.
    Connected {
        /// Its number, which this end has not used before.
        link: u32,
        /// Whether its sender writes to the receiver's landing pages.
        far: bool,
    },
    /// A frame has come. Its bytes are in the buffer of the call.
    Frame {
        /// On this connection.
        link: u32,
    },
    /// Something has come on a connection, though no whole frame: its other end lives.
    Alive {
        /// The connection.
        link: u32,
    },
    /// There is room again on a connection that has refused a frame or a write.
    Room {
        /// The connection.
        link: u32,
    },
    /// At a sender: a write has ended. Nothing of it will land later.
    Written {
        /// The connection.
        link: u32,
        /// The write.
        write: u64,
        /// Whether it did not write everything.
        failed: bool,
    },
    /// A connection is gone.
    Lost {
        /// The connection.
        link: u32,
    },
    /// At a receiver: nothing that was written over a lost connection will land any more.
    Destroyed {
        /// The connection.
        link: u32,
    },
}

/// One end of a fabric.
pub trait Fabric {
    /// The next thing that has happened here, or none. Does not wait. The bytes of a frame replace those of `frame`.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory) and
    /// [`Kind::OsRefused`](crate::error::Kind::OsRefused), if the end itself can no longer work. What goes wrong with
    /// one connection loses that connection alone.
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>>;

    /// Closes a connection. Nothing more happens on it here, but for [`Happened::Destroyed`]. The other end learns it.
    fn close(&mut self, link: u32);

    /// Why a connection was lost, where this end knows it. It is asked for after [`Happened::Lost`], before the next
    /// poll.
    fn why_lost(&mut self, _link: u32) -> Option<Error> {
        None
    }
}

/// A sender's end. It has the memory that rows are sent from, so it is their [`Source`].
pub trait SenderFabric: Fabric + Source {
    /// Sends a frame. A stream sends the bytes of `runs` behind it: those that the frame tells, none if it is no
    /// notice.
    ///
    /// # Errors
    /// [`Kind::Exhausted`](crate::error::Kind::Exhausted) if there is no room now: it is given again when there is.
    /// [`Kind::PeerLost`](crate::error::Kind::PeerLost) for a connection that is gone, of which the next poll tells.
    /// Any other error loses the connection.
    fn send(&mut self, link: u32, frame: &[u8], runs: &Runs<'_>) -> Result<()>;

    /// Begins to write runs to the landing pages of a use. A fabric whose receiver fetches is never asked.
    ///
    /// # Errors
    /// Any: nothing of it lands, and no [`Happened::Written`] comes.
    /// [`Kind::Exhausted`](crate::error::Kind::Exhausted) if there is no room now; after any other error the request
    /// fails.
    fn write(&mut self, link: u32, write: u64, fence: Fence, runs: &Runs<'_>) -> Result<()>;
}

/// A receiver's end.
pub trait ReceiverFabric: Fabric {
    /// Sends a frame.
    ///
    /// # Errors
    /// As [`SenderFabric::send`].
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()>;

    /// Copies a run's pieces, one after another, into private memory. It is called for the runs of the frame that the
    /// last poll gave, in their order; some may be left out. The bytes behind a notice are those of its runs, in the
    /// order of [`Where::Origin::nth`].
    ///
    /// # Errors
    /// Any: the run is asked for again.
    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()>;

    /// Whether what was fetched for the last frame were the rows that it told, if the sender's memory is right: not if
    /// the sender has closed the connection meanwhile, after which it may put other rows there. It is asked about runs
    /// without digests.
    fn holds(&mut self, link: u32) -> bool;
}

/// The runs that a frame tells, or those of a write. Both sides compute them; nothing lists them in memory.
#[derive(Debug)]
pub struct Runs<'a> {
    machine: &'a Sender,
    link: u32,
    of: What<'a>,
}

#[derive(Debug)]
enum What<'a> {
    Frame(&'a [u8]),
    Write(&'a Computed, Option<&'a [u32]>, &'a Landing),
}

/// One of the [`Runs`].
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// Where the sender has its rows ([`Computed::origin`]).
    pub origin: u64,
    /// Of a write the landing page that it goes to, at [`Run::to`].
    pub page: Option<u32>,
    /// The run.
    pub run: Run,
}

impl<'a> Runs<'a> {
    /// Those that a frame of a machine tells, for a caller that gives a fabric frames without an end. There are none if
    /// the frame is no notice.
    pub const fn of_frame(machine: &'a Sender, link: u32, frame: &'a [u8]) -> Runs<'a> {
        Runs { machine, link, of: What::Frame(frame) }
    }

    pub(super) const fn of_write(
        machine: &'a Sender,
        link: u32,
        (rows, some): (&'a Computed, Option<&'a [u32]>),
        landing: &'a Landing,
    ) -> Runs<'a> {
        Runs { machine, link, of: What::Write(rows, some, landing) }
    }

    /// Visits each run in the order in which the receiver fetches them.
    ///
    /// # Errors
    /// [`Kind::Closed`](crate::error::Kind::Closed) for a connection that is gone;
    /// [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory); errors of `visit`, the first of which ends it.
    pub fn each(&self, mut visit: impl FnMut(&Told) -> Result<()>) -> Result<()> {
        match self.of {
            What::Write(rows, some, landing) => self.machine.runs(self.link, rows, some, |run| {
                let page = landing.page(run.to.page);
                visit(&Told { origin: rows.origin, page, run })
            }),
            What::Frame(frame) => match Frame::decode(frame)? {
                Frame::Notice(notice) => notice.parts().try_for_each(|part| self.part(&part, &mut visit)),
                _ => Ok(()),
            },
        }
    }

    fn part(&self, part: &Rows<'_>, visit: &mut impl FnMut(&Told) -> Result<()>) -> Result<()> {
        let mut some = Vec::new();
        if !part.digests.are_all() {
            let count = part.digests.count();
            reserve(&mut some, count, "transfer fabric", "runs of a part")?;
            some.extend(part.digests.iter().map(|(index, _)| index));
        }
        let rows = Computed {
            request: part.fence.request,
            layer: part.layer,
            tokens: part.tokens.clone(),
            chunk: self.machine.divides().then_some(part.chunk),
            origin: part.origin,
        };
        let (origin, page) = (part.origin, None);
        let some = (!part.digests.are_all()).then_some(some.as_slice());
        self.machine.runs(self.link, &rows, some, |run| visit(&Told { origin, page, run }))
    }
}
