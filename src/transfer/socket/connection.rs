//! A connection: a stream socket with what comes and goes on it, and the times of both.
//!
//! Nothing here waits. Time is the caller's.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};
use crate::os;
use crate::transfer::memory::SendMemory;
use crate::transfer::runs::Run;
use crate::transfer::socket::incoming::Incoming;
use crate::transfer::socket::options::Options;
use crate::transfer::socket::outgoing::Outgoing;
use crate::transfer::socket::record::{Header, Says};
use crate::transfer::socket::{refusal, rows};

/// What a turn of an open connection has found.
#[derive(Debug)]
pub enum Served {
    Nothing,
    /// Bytes came, and no whole frame.
    Alive,
    /// What was refused fits now.
    Room,
    /// A frame, and rows behind it. They stay until [`Incoming::consume`].
    Frame {
        frame: Range<usize>,
        rows: Range<usize>,
    },
}

#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    pub incoming: Incoming,
    pub outgoing: Outgoing,
    heard: Instant,
    said: Instant,
    /// Since when something waits to be sent of which the socket takes nothing.
    stuck: Option<Instant>,
    /// Its times were put off since the other end was heard.
    excused: bool,
    /// The weight of what was refused last, until there is room for it.
    refused: Option<usize>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        os::shutdown(&self.socket);
    }
}

impl Connection {
    pub fn new(socket: OwnedFd, now: Instant) -> Connection {
        let (incoming, outgoing) = (Incoming::default(), Outgoing::default());
        let (heard, said) = (now, now);
        Connection { socket, incoming, outgoing, heard, said, stuck: None, excused: false, refused: None }
    }

    /// Whether no process listens where it was begun to.
    ///
    /// # Errors
    /// Those of [`os::is_refused`].
    pub fn is_refused(&self, options: &Options) -> Result<bool> {
        os::is_refused(self.socket.as_fd(), &*options.faults)
    }

    /// Whether the other end has it open still, as far as can be seen. A sender that was not answered closes it before
    /// it uses the memory of the rows again that it told here.
    pub fn is_held(&self, options: &Options) -> bool {
        os::has_hung_up(self.socket.as_fd(), &*options.faults).is_ok_and(|ended| !ended)
    }

    /// The socket, and whether something waits to be sent.
    pub fn awaited(&self) -> (BorrowedFd<'_>, bool) {
        (self.socket.as_fd(), self.outgoing.waiting() > 0)
    }

    /// When it has to be served next although nothing happens; none for a time that no clock reaches. A sign of life
    /// is due only where nothing waits to be sent.
    pub fn due(&self, options: &Options) -> Option<Instant> {
        let says = if self.outgoing.waiting() == 0 { self.said.checked_add(options.alive) } else { None };
        let times = [says, self.heard.checked_add(options.lost), self.ends(options)];
        times.into_iter().flatten().min()
    }

    /// When it is lost because the other end reads nothing.
    fn ends(&self, options: &Options) -> Option<Instant> {
        self.stuck?.checked_add(options.lost)
    }

    /// Puts off its times, because this end was not polled for long: at least `left` of [`Options::lost`] is left.
    /// Only once until the other end is heard, so that no end which is polled seldom keeps a lost connection.
    pub fn excuse(&mut self, options: &Options, left: Duration, now: Instant) {
        let Some(first) = now.checked_sub(options.lost.saturating_sub(left)) else { return };
        if !std::mem::replace(&mut self.excused, true) {
            self.heard = self.heard.max(first);
            self.stuck = self.stuck.map(|since| since.max(first));
        }
    }

    /// Whether [`Connection::serve`] finds something that is here already.
    pub fn is_ready(&self, options: &Options, most: usize) -> bool {
        self.has_room(options) || self.outgoing.is_broken() || !matches!(self.incoming.record(most), Ok(None))
    }

    fn has_room(&self, options: &Options) -> bool {
        self.refused.is_some_and(|wanted| self.fits(wanted, options))
    }

    fn fits(&self, bytes: usize, options: &Options) -> bool {
        let waiting = self.outgoing.waiting();
        waiting == 0 || waiting.saturating_add(bytes) <= options.queue
    }

    /// Queues a frame, with rows behind it.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] if there is no room now; [`Kind::OutOfRange`] for more rows than one frame may carry.
    pub fn send(&mut self, frame: &[u8], rows: &[(u64, Run)], options: &Options) -> Result<()> {
        let table = rows::table(rows, options.rows_max)?;
        let behind = rows.iter().fold(table.len(), |sum, (_, run)| sum + run.total() as usize);
        let header = Header { says: Says::Frame, own: frame.len(), behind }.encode();
        let weight = Outgoing::weight_of(header.len() + frame.len() + table.len(), rows);
        if !self.fits(weight, options) {
            self.refused = Some(weight);
            return Err(Error::new(Kind::Exhausted, "transfer connection")
                .at("bytes that wait to be sent")
                .with("waiting", self.outgoing.waiting() as u64)
                .with("bytes", weight as u64));
        }
        self.outgoing.push([&header, frame, &table].concat());
        self.outgoing.push_rows(rows.iter().copied());
        Ok(())
    }

    /// Sends what the socket takes.
    ///
    /// # Errors
    /// Those of [`Outgoing::flush`].
    pub fn flush(&mut self, memory: Option<&SendMemory>, options: &Options, now: Instant) -> Result<()> {
        let took = self.outgoing.flush(self.socket.as_fd(), memory, &*options.faults)?;
        if took {
            self.said = now;
        }
        self.stuck = match self.outgoing.waiting() {
            0 => None,
            _ if took => Some(now),
            _ => self.stuck.or(Some(now)),
        };
        Ok(())
    }

    /// Sends, and reads once. Returns whether something came.
    ///
    /// # Errors
    /// Those of [`Connection::flush`] and [`Incoming::read`]. What the other end said before it closed comes first.
    pub fn step(&mut self, memory: Option<&SendMemory>, options: &Options, now: Instant) -> Result<bool> {
        let sent = self.flush(memory, options, now);
        match self.incoming.read(self.socket.as_fd(), &*options.faults) {
            Ok(true) => {
                (self.heard, self.excused) = (now, false);
                Ok(true)
            }
            Ok(false) => sent.map(|()| false),
            // The system tells why a connection has failed only once.
            Err(error) => Err(sent.err().unwrap_or(error)),
        }
    }

    /// The turn of an open connection.
    ///
    /// # Errors
    /// Those of [`Connection::step`]; [`Kind::BadFormat`] for records that no end sends; [`Kind::PeerLost`] for an end
    /// that gave no sign of life, reads nothing, or has refused the connection. The connection is of no use after any.
    pub fn serve(
        &mut self,
        memory: Option<&SendMemory>,
        options: &Options,
        now: Instant,
        most: usize,
    ) -> Result<Served> {
        if self.outgoing.waiting() == 0 && now.saturating_duration_since(self.said) >= options.alive {
            self.outgoing.release();
            self.outgoing.push(Header { says: Says::Alive, own: 0, behind: 0 }.encode().to_vec());
        }
        if self.has_room(options) {
            self.refused = None;
            return Ok(Served::Room);
        }
        let came = match self.incoming.record(most)? {
            Some(_) => {
                // An error of sending shows again once all that came was taken.
                let _ = self.flush(memory, options, now);
                false
            }
            None => self.step(memory, options, now)?,
        };
        if self.incoming.descriptor.is_some() {
            return Err(Error::new(Kind::BadFormat, "transfer connection")
                .at("a descriptor that no record announces"));
        }
        if self.ends(options).is_some_and(|end| end <= now) {
            return Err(Error::new(Kind::PeerLost, "transfer connection")
                .at("an end that reads nothing")
                .with("waiting", self.outgoing.waiting() as u64)
                .with("seconds", options.lost.as_secs())
                .hint("see whether that process polls its end of the fabric"));
        }
        match self.incoming.record(most)? {
            Some(record) => match record.says {
                Says::Frame => {
                    rows::check(self.incoming.bytes(record.behind.clone()))?;
                    Ok(Served::Frame { frame: record.own, rows: record.behind })
                }
                Says::Alive => {
                    self.incoming.consume(record.behind.end);
                    // The other end has had nothing to say for a while.
                    self.incoming.release();
                    Ok(Served::Alive)
                }
                Says::Refused => {
                    let why = self.incoming.bytes(record.own).first().copied();
                    Err(refusal::error(why.unwrap_or(0)))
                }
                Says::Proof | Says::Memory => Err(Error::new(Kind::BadFormat, "transfer connection")
                    .at("an opening on a connection that is open")),
            },
            None if came => Ok(Served::Alive),
            None => self.silent(options, now),
        }
    }

    fn silent(&self, options: &Options, now: Instant) -> Result<Served> {
        let silence: Duration = now.saturating_duration_since(self.heard);
        match silence < options.lost {
            true => Ok(Served::Nothing),
            false => Err(Error::new(Kind::PeerLost, "transfer connection")
                .at("no sign of life")
                .with("seconds", silence.as_secs())
                .hint("see whether that process runs, and polls its end of the fabric")),
        }
    }
}
