//! What is on its way, and who is connected to whom.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::transfer::fabric::Happened;
use crate::transfer::frames::FRAME_MAX;
use crate::transfer::model::draw::Draw;
use crate::transfer::model::faults::{Faults, Seen, Way};
use crate::transfer::model::memory::{By, Landing, Memory};
use crate::transfer::quarantine::Fence;
use crate::transfer::runs::Run;

/// Runs that come with a notice, each with its origin and its bytes.
pub(super) type Carried = Vec<(u64, Run, Vec<u8>)>;

/// The most bytes of frames that wait on a connection in one direction.
const ROOM: usize = 4 * FRAME_MAX;

/// A frame on its way.
#[derive(Clone, Debug)]
pub struct Message {
    /// The connection.
    pub link: u32,
    /// Its direction.
    pub to_receiver: bool,
    /// The frame's bytes.
    pub bytes: Vec<u8>,
    /// How many bytes it had when it was sent.
    length: usize,
    /// What comes with it over a stream.
    pub(super) carried: Rc<Carried>,
}

impl Message {
    const fn end(&self) -> usize {
        self.to_receiver as usize
    }
}

/// A connection. Of two entries the first is the sender's.
struct Link {
    ends: [usize; 2],
    /// Whether each end takes it to be alive.
    up: [bool; 2],
    /// Bytes of frames that wait to be polled at each end.
    waiting: [usize; 2],
    /// Whether the sender and the receiver have found no room, and are to be told when there is; whether that is on
    /// its way.
    full: [bool; 2],
    told: [bool; 2],
    /// When the last message arrives at each end that overtakes none.
    last: [Duration; 2],
    /// When the hello arrives at each end.
    hello: [Duration; 2],
    broken: bool,
}

/// What happens at a time.
enum Happens {
    Arrives(Message),
    /// A run of a write lands.
    Lands {
        link: u32,
        fence: Fence,
        page: u32,
        origin: u64,
        run: Run,
    },
    Written {
        link: u32,
        write: u64,
        failed: bool,
    },
    /// An end learns that its connection is gone.
    Lost {
        link: u32,
        end: usize,
    },
    Destroyed(u32),
    /// An end has room again.
    Room {
        link: u32,
        end: usize,
    },
    Connect([usize; 2]),
}

/// An end: whether its process lives, and what waits to be polled.
struct End {
    alive: bool,
    inbox: VecDeque<(Happened, Option<Message>)>,
}

pub(super) struct State {
    pub way: Way,
    pub calm: Duration,
    pub now: Duration,
    pub sent: Vec<Message>,
    pub seen: Seen,
    faults: Faults,
    draw: Draw,
    memories: Vec<Rc<RefCell<dyn Memory>>>,
    landings: Vec<Rc<RefCell<dyn Landing>>>,
    /// Senders and receivers.
    ends: [Vec<End>; 2],
    links: Vec<Link>,
    future: BTreeMap<(Duration, u64), Happens>,
    count: u64,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let State { way, now, seen, faults, .. } = self;
        let named = (self.links.len(), self.future.len());
        write!(f, "{way:?} at {now:?}, {faults:?}, {seen:?}, connections and events {named:?}")
    }
}

const fn gone() -> Error {
    Error::new(Kind::PeerLost, "model fabric")
}

impl State {
    pub fn new(seed: u64, way: Way, faults: Faults) -> State {
        State {
            way,
            calm: Duration::MAX,
            now: Duration::ZERO,
            sent: Vec::new(),
            seen: Seen::default(),
            faults,
            draw: Draw::new(seed),
            memories: Vec::new(),
            landings: Vec::new(),
            ends: [Vec::new(), Vec::new()],
            links: Vec::new(),
            future: BTreeMap::new(),
            count: 0,
        }
    }

    pub fn add_sender(&mut self, memory: Rc<RefCell<dyn Memory>>) -> usize {
        self.memories.push(memory);
        self.add(0)
    }

    pub fn add_receiver(&mut self, landing: Rc<RefCell<dyn Landing>>) -> usize {
        self.landings.push(landing);
        self.add(1)
    }

    fn add(&mut self, end: usize) -> usize {
        let [senders, receivers] = &mut self.ends;
        let (own, others) = if end == 0 { (senders, receivers) } else { (receivers, senders) };
        own.push(End { alive: true, inbox: VecDeque::new() });
        let (index, others) = (own.len() - 1, others.len());
        for other in 0..others {
            let ends = if end == 0 { [index, other] } else { [other, index] };
            let time = self.now + self.draw.millis(30);
            self.at(time, Happens::Connect(ends));
        }
        index
    }

    pub fn memory(&self, sender: usize) -> Result<Rc<RefCell<dyn Memory>>> {
        self.memories.get(sender).cloned().ok_or_else(gone)
    }

    /// The memory of a connection's sender, whether it lives or not: what it shares is mapped at the other end.
    pub fn memory_over(&self, link: u32) -> Result<Rc<RefCell<dyn Memory>>> {
        let link = self.links.get(link as usize).ok_or_else(gone)?;
        self.memory(link.ends[0])
    }

    /// Whether a connection's sender has it still.
    pub fn is_held(&self, link: u32) -> bool {
        self.links.get(link as usize).is_some_and(|link| link.up[0] && !link.broken)
    }

    pub fn landing(&self, receiver: usize) -> Result<Rc<RefCell<dyn Landing>>> {
        self.landings.get(receiver).cloned().ok_or_else(gone)
    }

    pub fn ends(&self, link: u32) -> Option<(usize, usize)> {
        self.links.get(link as usize).map(|link| (link.ends[0], link.ends[1]))
    }

    /// Whether faults still happen, and one happens now.
    fn fault(&mut self, of: u64) -> bool {
        self.now < self.calm && self.draw.often(of)
    }

    pub fn spoils(&mut self) -> bool {
        self.fault(self.faults.fetched)
    }

    pub fn refuses(&mut self) -> bool {
        self.fault(self.faults.refused)
    }

    fn at(&mut self, time: Duration, happens: Happens) {
        self.future.insert((time, self.count), happens);
        self.count += 1;
    }

    fn end_of(&mut self, link: u32, end: usize) -> Option<&mut End> {
        let index = *self.links.get(link as usize)?.ends.get(end)?;
        self.ends.get_mut(end)?.get_mut(index)
    }

    /// The next entry of an end's inbox.
    pub fn poll(&mut self, sender: bool, index: usize) -> Option<(Happened, Option<Message>)> {
        let end = usize::from(!sender);
        let (happened, message) = self.ends.get_mut(end)?.get_mut(index)?.inbox.pop_front()?;
        if let Some(message) = &message
            && let Some(link) = self.links.get_mut(message.link as usize)
        {
            link.waiting[end] = link.waiting[end].saturating_sub(message.length);
            self.tell_of_room(message.link, 1 - end);
        }
        Some((happened, message))
    }

    /// Tells an end that found no room that there is some.
    fn tell_of_room(&mut self, link: u32, end: usize) {
        let Some(of) = self.links.get_mut(link as usize) else { return };
        if of.full[end] && !of.told[end] && of.waiting[1 - end] <= ROOM / 2 {
            of.told[end] = true;
            let time = self.now + self.draw.millis(20);
            self.at(time, Happens::Room { link, end });
        }
    }

    /// Whether an end may send so many bytes more.
    pub fn check_room(&mut self, sender: bool, index: usize, link: u32, bytes: usize) -> Result<()> {
        let (own, other) = (usize::from(!sender), usize::from(sender));
        let full = self.fault(self.faults.full);
        let of = self.links.get_mut(link as usize).filter(|of| of.ends[own] == index && of.up[own]);
        let of = of.ok_or_else(gone)?;
        if !full && (of.waiting[other] == 0 || of.waiting[other] + bytes <= ROOM) {
            return Ok(());
        }
        of.full[own] = true;
        self.seen.full += 1;
        self.tell_of_room(link, own);
        Err(Error::new(Kind::Exhausted, "model fabric").with("link", link))
    }

    pub fn send(
        &mut self,
        (sender, index): (bool, usize),
        link: u32,
        frame: &[u8],
        carried: Carried,
    ) -> Result<()> {
        let (own, other) = (usize::from(!sender), usize::from(sender));
        let of = self.links.get_mut(link as usize).filter(|of| of.ends[own] == index && of.up[own]);
        let of = of.ok_or_else(gone)?;
        of.waiting[other] += frame.len();
        let (bytes, carried) = (frame.to_vec(), Rc::new(carried));
        self.sent.push(Message { link, to_receiver: sender, length: bytes.len(), bytes, carried });
        Ok(())
    }

    /// Begins a write: its runs land one by one, some late.
    pub fn write(
        &mut self,
        index: usize,
        (link, write): (u32, u64),
        fence: Fence,
        runs: Vec<(u32, u64, Run)>,
    ) -> Result<()> {
        let own = self.links.get(link as usize).filter(|of| of.ends[0] == index && of.up[0]);
        own.ok_or_else(gone)?;
        let failed = self.fault(self.faults.unwritten);
        self.seen.unwritten += u32::from(failed);
        let late = if self.fault(self.faults.late) { 400 } else { 0 };
        let mut last = self.now;
        for (page, origin, run) in runs {
            let time = self.now + self.draw.millis(10) + self.draw.millis(late);
            last = last.max(time);
            if !failed || self.draw.often(500) {
                self.at(time, Happens::Lands { link, fence, page, origin, run });
            }
        }
        self.at(last, Happens::Written { link, write, failed });
        Ok(())
    }

    /// Lets a message leave, with what may go wrong.
    pub fn post(&mut self, mut message: Message) {
        let (end, length, hello) = (message.end(), message.length, message.bytes.first() == Some(&1));
        if self.fault(self.faults.damaged) {
            let at = self.draw.below(message.bytes.len() as u64) as usize;
            let bit = 1 << self.draw.below(8);
            message.bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= bit);
        }
        let copies = match (self.fault(self.faults.lost), self.fault(self.faults.twice)) {
            (true, _) if !hello => 0,
            (_, true) if !hello => 2,
            _ => 1,
        };
        self.seen.lost_or_twice += u32::from(copies != 1);
        let (late, reordered) = (self.fault(self.faults.late), self.fault(self.faults.reordered));
        let Some(link) = self.links.get_mut(message.link as usize) else { return };
        link.waiting[end] = (link.waiting[end] + copies * length).saturating_sub(length);
        for _ in 0..copies {
            let takes = self.draw.millis(if late && !hello { 300 } else { 2 });
            let time = match reordered || late {
                // Nothing overtakes a hello.
                true if !hello => (self.now + takes).max(link.hello[end]),
                _ => link.last[end].max(self.now + takes),
            };
            if !(late || reordered) || hello {
                link.last[end] = time;
            }
            if hello {
                link.hello[end] = time;
            }
            self.future.insert((time, self.count), Happens::Arrives(message.clone()));
            self.count += 1;
        }
    }

    pub fn next(&self) -> Option<Duration> {
        let sent = (!self.sent.is_empty()).then_some(self.now);
        sent.or_else(|| self.future.first_key_value().map(|((time, _), _)| *time))
    }

    pub fn advance(&mut self, now: Duration) {
        std::mem::take(&mut self.sent).into_iter().for_each(|message| self.post(message));
        while let Some(entry) = self.future.first_entry().filter(|entry| entry.key().0 <= now) {
            let ((time, _), happens) = entry.remove_entry();
            self.now = self.now.max(time);
            self.happens(happens);
        }
        self.now = self.now.max(now);
    }

    fn happens(&mut self, happens: Happens) {
        if matches!(happens, Happens::Arrives(_) | Happens::Lands { .. }) && self.fault(self.faults.cut) {
            let link = self.draw.below(self.links.len() as u64) as u32;
            self.cut(link);
        }
        match happens {
            Happens::Arrives(message) => self.arrives(message),
            Happens::Lands { link, fence, page, origin, run } => {
                self.lands(link, fence, (page, origin), &run)
            }
            Happens::Written { link, write, failed } => {
                self.tell(link, 0, Happened::Written { link, write, failed });
            }
            Happens::Lost { link, end } => {
                self.tell(link, end, Happened::Lost { link });
                self.links.iter_mut().skip(link as usize).take(1).for_each(|link| link.up[end] = false);
            }
            Happens::Destroyed(link) => {
                self.future
                    .retain(|_, happens| !matches!(happens, Happens::Lands { link: of, .. } if *of == link));
                if let Some(end) = self.end_of(link, 1).filter(|end| end.alive) {
                    end.inbox.push_back((Happened::Destroyed { link }, None));
                }
            }
            Happens::Room { link, end } => {
                let own = self.links.iter_mut().skip(link as usize).take(1);
                own.for_each(|of| (of.full[end], of.told[end]) = (false, false));
                self.tell(link, end, Happened::Room { link });
            }
            Happens::Connect(ends) => self.connect(ends),
        }
    }

    /// Tells an end of a connection something, if the end takes it to be alive.
    fn tell(&mut self, link: u32, end: usize, happened: Happened) {
        let up = self.links.get(link as usize).is_some_and(|of| of.up[end]);
        if let Some(end) = self.end_of(link, end).filter(|end| up && end.alive) {
            end.inbox.push_back((happened, None));
        }
    }

    fn arrives(&mut self, message: Message) {
        let (link, end) = (message.link, message.end());
        let up = self.links.get(link as usize).is_some_and(|of| of.up[end]);
        match self.end_of(link, end).filter(|end| up && end.alive) {
            Some(end) => end.inbox.push_back((Happened::Frame { link }, Some(message))),
            None => {
                let own = self.links.iter_mut().skip(link as usize).take(1);
                own.for_each(|of| of.waiting[end] = of.waiting[end].saturating_sub(message.length));
            }
        }
    }

    fn lands(&mut self, link: u32, fence: Fence, (page, origin): (u32, u64), run: &Run) {
        let alive = self.end_of(link, 1).is_some_and(|end| end.alive);
        let ends = self.ends(link).filter(|_| alive);
        let Some((memory, landing)) =
            ends.and_then(|(from, to)| Some((self.memory(from).ok()?, self.landing(to).ok()?)))
        else {
            return;
        };
        let mut bytes = vec![0; usize::try_from(run.total()).unwrap_or(0)];
        // What cannot be read lands as zeros.
        let _ = memory.borrow_mut().read(By::Fabric, origin, run, &mut bytes);
        if self.spoils() {
            bytes.iter_mut().take(1).for_each(|byte| *byte ^= 1);
        }
        landing.borrow_mut().write(fence, page, run, &bytes);
    }

    fn connect(&mut self, ends: [usize; 2]) {
        let live = |end: usize| self.ends[end].get(ends[end]).is_some_and(|end| end.alive);
        let connected = self.links.iter().any(|link| link.ends == ends && link.up != [false; 2]);
        if connected || !live(0) || !live(1) {
            return;
        }
        let doubled = self.fault(self.faults.doubled);
        self.seen.doubled += u32::from(doubled);
        for _ in 0..1 + u32::from(doubled) {
            let (link, far) = (self.links.len() as u32, self.way == Way::Far);
            let (up, last) = ([true; 2], [self.now; 2]);
            let (full, told) = ([false; 2], [false; 2]);
            self.links.push(Link { ends, up, waiting: [0; 2], full, told, last, hello: last, broken: false });
            (0..2).for_each(|end| self.tell(link, end, Happened::Connected { link, far }));
        }
    }

    /// A connection breaks: its ends learn of it at different times, and connect again.
    pub fn cut(&mut self, link: u32) {
        let Some(of) = self.links.get_mut(link as usize).filter(|link| !link.broken) else { return };
        of.broken = true;
        let ends = of.ends;
        self.seen.cut += 1;
        let times = [self.now + self.draw.millis(60), self.now + self.draw.millis(60)];
        (0..).zip(times).for_each(|(end, time)| self.at(time, Happens::Lost { link, end }));
        let both = times[0].max(times[1]);
        let (gone, again) = (both + self.draw.millis(300), both + self.draw.millis(80));
        self.at(gone, Happens::Destroyed(link));
        self.at(again, Happens::Connect(ends));
    }

    /// An end closes a connection.
    pub fn close(&mut self, sender: bool, index: usize, link: u32) {
        let end = usize::from(!sender);
        let Some(of) = self.links.get_mut(link as usize).filter(|of| of.ends[end] == index) else { return };
        of.up[end] = false;
        if let Some(end) = self.end_of(link, end) {
            end.inbox.retain(|(happened, _)| match happened {
                Happened::Connected { link: of, .. }
                | Happened::Frame { link: of }
                | Happened::Alive { link: of }
                | Happened::Room { link: of }
                | Happened::Written { link: of, .. }
                | Happened::Lost { link: of } => *of != link,
                Happened::Destroyed { .. } => true,
            });
        }
        self.cut(link);
    }

    /// An end's process is gone. What it wrote before may still land.
    pub fn crash(&mut self, sender: bool, index: usize) {
        let end = usize::from(!sender);
        if let Some(own) = self.ends.get_mut(end).and_then(|ends| ends.get_mut(index)) {
            own.alive = false;
            own.inbox.clear();
        }
        for link in 0..self.links.len() {
            let Some(of) = self.links.get_mut(link).filter(|of| of.ends[end] == index) else { continue };
            of.up[end] = false;
            self.cut(link as u32);
        }
    }
}
