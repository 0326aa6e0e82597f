//! Fabrics over real sockets whose frames come late, on a time of the test's own, and may be lost.
//!
//! A wrapper takes all that comes from its socket at once, and gives it on when the test's time has reached a frame's
//! own time. The rows behind a frame of a stream wait with it; those in shared memory are read when they are fetched.
//! The test's time moves only when all frames that were sent have come to the other wrapper. So what happens does
//! not depend on how busy the machine is.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forebay::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric};
use forebay::transfer::receiver::Where;
use forebay::transfer::sender::Source;
use forebay::transfer::socket::Options;
use forebay::transfer::{Fence, Run, receiver, sender};
use forebay::{Error, Kind as Wrong, Result};

use crate::naive::Naive;
use crate::ranks::{Receives, Sends, memory, told};
use crate::rig::{SocketReceiver, SocketSender, Way, connect, listen, options};

/// Numbers that a seed gives.
pub struct Draw(pub u64);

impl Draw {
    pub const fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % most
    }
}

/// The test's time in milliseconds.
pub type Clock = Rc<Cell<u64>>;

/// Something that is on its way: when it comes, its frame, and the rows behind it.
struct Late {
    at: u64,
    happened: Happened,
    frame: Vec<u8>,
    rows: Vec<Vec<u8>>,
}

/// The road to an end.
pub struct Road {
    clock: Clock,
    draw: Draw,
    /// The most milliseconds that a frame takes; it takes at least half of them.
    slow: u64,
    queue: VecDeque<Late>,
    /// Frames that the end has sent, and those that have come to its wrapper.
    sent: u64,
    came: u64,
    /// How many of the next frames of a kind are lost.
    pub loses: Vec<(u8, u32)>,
    /// Of a hundred frames so many are lost; hellos never are.
    pub chance: u64,
}

impl Road {
    fn new(clock: &Clock, slow: u64, seed: u64) -> Road {
        let (clock, draw, queue) = (Rc::clone(clock), Draw(seed), VecDeque::new());
        Road { clock, draw, slow, queue, sent: 0, came: 0, loses: Vec::new(), chance: 0 }
    }

    fn is_lost(&mut self, kind: u8) -> bool {
        let told = self.loses.iter_mut().find(|(of, left)| *of == kind && *left > 0);
        let told = told.map(|(_, left)| *left -= 1).is_some();
        told || (kind != 1 && self.draw.below(100) < self.chance)
    }

    fn take(&mut self, happened: Happened, frame: &[u8], rows: Vec<Vec<u8>>) {
        if let (Happened::Frame { .. }, Some(kind)) = (happened, frame.first()) {
            self.came += 1;
            if self.is_lost(*kind) {
                return;
            }
        }
        let slow = self.slow / 2 + self.draw.below(self.slow / 2 + 1);
        let before = self.queue.back().map_or(0, |late| late.at);
        let at = before.max(self.clock.get() + slow);
        self.queue.push_back(Late { at, happened, frame: frame.to_vec(), rows });
    }

    fn next(&mut self) -> Option<Late> {
        let is_due = self.queue.front().is_some_and(|late| late.at <= self.clock.get());
        if is_due { self.queue.pop_front() } else { None }
    }

    fn noted(&mut self, sent: Result<()>) -> Result<()> {
        self.sent += u64::from(sent.is_ok());
        sent
    }

    /// How many frames of a kind are on their way.
    pub fn waiting(&self, kind: u8) -> usize {
        self.queue.iter().filter(|late| late.frame.first() == Some(&kind)).count()
    }
}

pub struct SlowSender<F> {
    inner: F,
    pub road: Road,
}

impl<F: SenderFabric> Fabric for SlowSender<F> {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        while let Some(happened) = self.inner.poll(frame)? {
            let bytes = if let Happened::Frame { .. } = happened { frame.as_slice() } else { &[] };
            self.road.take(happened, bytes, Vec::new());
        }
        Ok(self.road.next().map(|late| {
            *frame = late.frame;
            late.happened
        }))
    }

    fn close(&mut self, link: u32) {
        self.inner.close(link);
    }
}

impl<F: SenderFabric> Source for SlowSender<F> {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.inner.read(origin, run, into)
    }
}

impl<F: SenderFabric> SenderFabric for SlowSender<F> {
    fn send(&mut self, link: u32, frame: &[u8], runs: &Runs<'_>) -> Result<()> {
        let sent = self.inner.send(link, frame, runs);
        self.road.noted(sent)
    }

    fn write(&mut self, link: u32, write: u64, fence: Fence, runs: &Runs<'_>) -> Result<()> {
        self.inner.write(link, write, fence, runs)
    }
}

pub struct SlowReceiver<F> {
    inner: F,
    pub road: Road,
    /// Rows come behind their notice, and those of the last one.
    stream: bool,
    rows: Vec<Vec<u8>>,
}

impl<F: ReceiverFabric> SlowReceiver<F> {
    fn behind(&mut self, link: u32, frame: &[u8]) -> Vec<Vec<u8>> {
        let mut rows = Vec::new();
        told(frame, |fence, at, run| {
            let mut bytes = vec![0; run.total() as usize];
            self.inner.fetch(link, fence, at, run, &mut bytes).unwrap();
            rows.push(bytes);
        });
        rows
    }
}

impl<F: ReceiverFabric> Fabric for SlowReceiver<F> {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        while let Some(happened) = self.inner.poll(frame)? {
            match happened {
                Happened::Frame { link } => {
                    let rows = if self.stream { self.behind(link, frame) } else { Vec::new() };
                    self.road.take(happened, frame, rows);
                }
                _ => self.road.take(happened, &[], Vec::new()),
            }
        }
        Ok(self.road.next().map(|late| {
            (*frame, self.rows) = (late.frame, late.rows);
            late.happened
        }))
    }

    fn close(&mut self, link: u32) {
        self.inner.close(link);
    }
}

impl<F: ReceiverFabric> ReceiverFabric for SlowReceiver<F> {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        let sent = self.inner.send(link, frame);
        self.road.noted(sent)
    }

    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        match at {
            Where::Origin { nth, .. } if self.stream => {
                let none = || Error::new(Wrong::OutOfRange, "a run that did not come");
                into.copy_from_slice(self.rows.get(nth as usize).ok_or_else(none)?);
                Ok(())
            }
            _ => self.inner.fetch(link, fence, at, run, into),
        }
    }

    fn holds(&mut self, link: u32) -> bool {
        self.inner.holds(link)
    }
}

/// A sender's and a receiver's rank over a slow fabric.
pub struct World {
    pub sends: Sends<SlowSender<SocketSender>>,
    pub receives: Receives<Naive<SlowReceiver<SocketReceiver>>>,
    pub clock: Clock,
    /// A request of which the sender computes only so many layers.
    pub limit: Option<(u64, u32)>,
}

/// The sender's instance.
pub const INSTANCE: u64 = 1;

impl World {
    /// Connected. A frame takes at most `slow` milliseconds, and what is not answered is told again after `resend`.
    pub fn new(way: Way, slow: u64, resend: Duration, seed: u64) -> World {
        let minute = Duration::from_secs(60);
        // No sign of life comes: it would have a time of the machine.
        let options = Options { alive: minute, lost: 2 * minute, ..options() };
        let (inner, at) = listen(way, options.clone(), None).unwrap();
        let (clock, memory, patience) = (Clock::default(), memory(), 100 * resend);
        let road = Road::new(&clock, slow, seed);
        let receiver = Naive::new(SlowReceiver { inner, road, stream: way == Way::Tcp, rows: Vec::new() });
        let inner = connect(way, options, memory.clone(), &[at]).unwrap();
        let sender = SlowSender { inner, road: Road::new(&clock, slow, seed + 1) };
        let receiving = receiver::Options { resend, patience, ..receiver::Options::default() };
        let sending = sender::Options { resend, patience, ..sender::Options::default() };
        let mut world = World {
            sends: Sends::new(sender, memory, INSTANCE, sending),
            receives: Receives::new(receiver, receiving),
            clock,
            limit: None,
        };
        let start = Instant::now();
        while world.sends.connected == 0 || world.receives.connected == 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "no connection");
            world.poll();
            world.clock.set(world.clock.get() + 1);
            std::thread::sleep(Duration::from_micros(200));
        }
        // Hellos.
        world.pass(2 * slow + 1);
        world
    }

    /// What comes to the receiver, and what comes to the sender.
    pub const fn roads(&mut self) -> [&mut Road; 2] {
        [&mut self.receives.end.fabric.inner.road, &mut self.sends.end.fabric.road]
    }

    pub fn grant(&mut self, request: u64) -> Fence {
        self.receives.end.fabric.grant(request);
        self.receives.grant(request, INSTANCE, None).unwrap()
    }

    fn poll(&mut self) {
        let now = Duration::from_millis(self.clock.get());
        self.sends.poll(now);
        let limit = self.limit;
        let goes_on = |of: Option<(u64, u32)>| {
            of.is_some_and(|of| limit.is_none_or(|limit| of.0 != limit.0 || of.1 < limit.1))
        };
        while goes_on(self.sends.computes) && self.sends.compute() {
            self.sends.poll(now);
        }
        self.receives.poll(now);
    }

    /// Polls until all that was sent has come to the wrappers.
    fn settle(&mut self) {
        let start = Instant::now();
        for turn in 0.. {
            self.poll();
            let [to, back] = self.roads();
            if (to.came, back.came) == (back.sent, to.sent) {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "frames do not come");
            // A socket of this host has what was sent at once, nearly always.
            if turn > 100 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// When something is to be done; none for never.
    fn due(&mut self) -> Option<u64> {
        let machines = [self.sends.end.machine.due(), self.receives.end.machine.due()];
        let machines = machines.into_iter().flatten().map(|due| due.as_micros().div_ceil(1000) as u64);
        let (machines, now) = (machines.min(), self.clock.get());
        let ways = self.roads().into_iter().filter_map(|way| way.queue.front().map(|late| late.at));
        Some(ways.chain(machines).min()?.max(now + 1))
    }

    /// Lets time pass until something holds, for at most so long. Returns whether it does.
    pub fn holds_within(&mut self, most: u64, mut holds: impl FnMut(&mut World) -> bool) -> bool {
        let end = self.clock.get() + most;
        loop {
            self.settle();
            if holds(self) {
                return true;
            }
            let next = self.due().filter(|due| *due <= end);
            self.clock.set(next.unwrap_or(end));
            if next.is_none() {
                self.settle();
                return holds(self);
            }
        }
    }

    pub fn until(&mut self, what: &str, holds: impl FnMut(&mut World) -> bool) {
        assert!(self.holds_within(600_000, holds), "{what} did not come");
    }

    pub fn pass(&mut self, most: u64) {
        self.holds_within(most, |_| false);
    }

    /// Nothing is left of any request at either end.
    pub fn check_nothing_left(&self) {
        assert_eq!(self.sends.held(), 0, "rows are held");
        assert_eq!(self.receives.end.machine.quarantine().reached(), 0);
        assert_eq!((self.sends.end.machine.due(), self.receives.end.machine.due()), (None, None));
        assert_eq!((self.sends.lost, self.receives.lost), (0, 0), "a connection was lost");
    }
}
