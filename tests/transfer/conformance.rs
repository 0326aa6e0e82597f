//! The model fabric keeps what the suite asks for, in all its ways; and each check has a fabric that fails in it.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use forebay::transfer::conformance::{
    self, CHANGES, CLOSED, CLOSES, CRASHES, DESTROYED, FRAMES, LANDING, MIXING, REUSE, ROWS, SILENCE, Subject,
};
use forebay::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric};
use forebay::transfer::model::{By, Faults, Landing, Memory, ModelReceiver, ModelSender, Net, Way};
use forebay::transfer::receiver::Where;
use forebay::transfer::sender::Source;
use forebay::transfer::{FRAME_MAX, Fence, Run};
use forebay::{Error, Kind, Result};

/// Places of a run's bytes at one end.
fn places(run: &Run, from: bool) -> impl Iterator<Item = (u32, u32, u64)> {
    let (end, bytes) = (if from { run.from } else { run.to }, run.bytes);
    (0..run.total()).map(move |at| (end.page, end.plane, end.offset + at / bytes * end.stride + at % bytes))
}

/// A sender's memory, byte by byte.
#[derive(Default)]
struct Bytes(HashMap<(u64, u32, u32, u64), u8>);

impl Memory for Bytes {
    fn read(&mut self, _: By, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        for (to, (page, plane, at)) in into.iter_mut().zip(places(run, true)) {
            *to = self.0.get(&(origin, page, plane, at)).copied().unwrap_or(0xEE);
        }
        Ok(())
    }
}

/// Landing pages, byte by byte.
#[derive(Default)]
struct Pages(HashMap<(u32, u32, u64), u8>);

impl Landing for Pages {
    fn write(&mut self, _: Fence, page: u32, run: &Run, bytes: &[u8]) {
        assert!(page < LANDING);
        self.0.extend(places(run, false).zip(bytes).map(|((_, plane, at), byte)| ((page, plane, at), *byte)));
    }

    fn read(&mut self, page: u32, run: &Run, into: &mut [u8]) -> Result<()> {
        for (to, (_, plane, at)) in into.iter_mut().zip(places(run, false)) {
            *to = self.0.get(&(page, plane, at)).copied().unwrap_or(0xDD);
        }
        Ok(())
    }
}

/// A promise that a fabric breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Breaks {
    Nothing,
    /// A frame without room is taken and forgotten.
    DropsWhatHasNoRoom,
    /// A frame without room is kept.
    KeepsAll,
    /// The other end does not learn that a connection was closed.
    ClosesInSilence,
    /// The other end does not learn that a sender has gone.
    HidesCrashes,
    /// Every connection has the same number.
    OneNumber,
    /// A write is said to have ended when it has begun; only writes of requests that will be aborted.
    EndsWritesEarly,
    EndsAbortedWritesEarly,
    /// A write is said to have ended twice.
    EndsWritesTwice,
    /// Rows come from somewhere else.
    WrongRows,
    /// What was fetched once is kept.
    KeepsRows,
    /// The end of a write is not told, of late requests.
    ForgetsWrites,
    /// A frame goes over the newest connection.
    NewestConnection,
    /// What was written is said to be out of reach when the connection is lost.
    DestroyedEarly,
    /// A sender is said to have its rows when it has closed the connection.
    HoldsWhatIsClosed,
}

struct Model {
    net: Net,
    memories: Vec<Rc<RefCell<Bytes>>>,
    landings: Vec<Rc<RefCell<Pages>>>,
    breaks: Breaks,
}

struct Sends {
    inner: Option<ModelSender>,
    index: usize,
    breaks: Breaks,
    links: Vec<u32>,
    told: VecDeque<Happened>,
    /// Writes whose end is not told, or was told before.
    forgotten: Vec<u64>,
    early: Vec<u64>,
    /// Connections that are closed here, without a word to the other end.
    closed: Vec<u32>,
}

struct Receives {
    inner: ModelReceiver,
    index: usize,
    breaks: Breaks,
    links: Vec<u32>,
    told: VecDeque<Happened>,
    kept: VecDeque<(u32, Vec<u8>)>,
    rows: Vec<(Fence, Where, Run, Vec<u8>)>,
}

impl Subject for Model {
    type Sender = Sends;
    type Receiver = Receives;

    fn sender(&mut self) -> Result<Sends> {
        let memory = Rc::new(RefCell::new(Bytes::default()));
        self.memories.push(memory.clone());
        Ok(Sends {
            inner: Some(self.net.sender(memory)),
            index: self.memories.len() - 1,
            breaks: self.breaks,
            links: Vec::new(),
            told: VecDeque::new(),
            forgotten: Vec::new(),
            early: Vec::new(),
            closed: Vec::new(),
        })
    }

    fn receiver(&mut self) -> Result<Receives> {
        let landing = Rc::new(RefCell::new(Pages::default()));
        self.landings.push(landing.clone());
        Ok(Receives {
            inner: self.net.receiver(landing),
            index: self.landings.len() - 1,
            breaks: self.breaks,
            links: Vec::new(),
            told: VecDeque::new(),
            kept: VecDeque::new(),
            rows: Vec::new(),
        })
    }

    fn put(&mut self, sender: &mut Sends, origin: u64, run: &Run, bytes: &[u8]) -> Result<()> {
        let mut memory = self.memories[sender.index].borrow_mut();
        let named = |(page, plane, at)| (origin, page, plane, at);
        memory.0.extend(places(run, true).map(named).zip(bytes.iter().copied()));
        Ok(())
    }

    fn landed(&mut self, receiver: &mut Receives, page: u32, run: &Run, into: &mut [u8]) -> Result<()> {
        self.landings[receiver.index].borrow_mut().read(page, run, into)
    }

    fn wait(&mut self) -> Duration {
        let soon = self.net.now() + Duration::from_millis(1);
        self.net.advance(self.net.next().map_or(soon, |next| next.min(soon)));
        self.net.now()
    }
}

impl Drop for Sends {
    fn drop(&mut self) {
        if self.breaks == Breaks::HidesCrashes {
            std::mem::forget(self.inner.take());
        }
    }
}

impl Sends {
    fn inner(&mut self) -> &mut ModelSender {
        self.inner.as_mut().unwrap()
    }

    /// The connection that a number means.
    fn link(&self, link: u32) -> u32 {
        match self.breaks {
            Breaks::OneNumber | Breaks::NewestConnection => *self.links.last().unwrap(),
            _ => link,
        }
    }
}

impl Fabric for Sends {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        if let Some(happened) = self.told.pop_front() {
            return Ok(Some(happened));
        }
        let happened = self.inner().poll(frame)?;
        let Some(mut happened) = happened else { return Ok(None) };
        match (&mut happened, self.breaks) {
            (Happened::Written { .. }, Breaks::EndsWritesEarly) => return self.poll(frame),
            (Happened::Written { write, .. }, Breaks::EndsAbortedWritesEarly)
                if self.early.contains(write) =>
            {
                return self.poll(frame);
            }
            (Happened::Written { write, .. }, _) if self.forgotten.contains(write) => {
                return self.poll(frame);
            }
            (Happened::Frame { link } | Happened::Room { link }, _) if self.closed.contains(link) => {
                return self.poll(frame);
            }
            (Happened::Written { .. }, Breaks::EndsWritesTwice) => self.told.push_back(happened),
            (Happened::Connected { link, .. }, breaks) => {
                self.links.push(*link);
                if breaks == Breaks::OneNumber {
                    *link = 0;
                }
            }
            (
                Happened::Frame { link } | Happened::Room { link } | Happened::Lost { link },
                Breaks::OneNumber,
            ) => *link = 0,
            _ => {}
        }
        Ok(Some(happened))
    }

    fn close(&mut self, link: u32) {
        let link = self.link(link);
        match self.breaks {
            Breaks::ClosesInSilence => self.closed.push(link),
            _ => self.inner().close(link),
        }
    }
}

impl Source for Sends {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.inner().read(origin, run, into)
    }
}

impl SenderFabric for Sends {
    fn send(&mut self, link: u32, frame: &[u8], runs: &Runs<'_>) -> Result<()> {
        let link = self.link(link);
        if self.closed.contains(&link) {
            return Err(Error::new(Kind::PeerLost, "test"));
        }
        let sent = self.inner().send(link, frame, runs);
        match (sent, self.breaks) {
            // Where frames of all sizes come it would fail before.
            (Err(error), Breaks::DropsWhatHasNoRoom)
                if error.kind() == Kind::Exhausted && frame.len() < FRAME_MAX / 3 =>
            {
                Ok(())
            }
            (sent, _) => sent,
        }
    }

    fn write(&mut self, link: u32, write: u64, fence: Fence, runs: &Runs<'_>) -> Result<()> {
        self.inner().write(link, write, fence, runs)?;
        match self.breaks {
            Breaks::EndsWritesEarly => self.told.push_back(Happened::Written { link, write, failed: false }),
            // The checks before have fewer requests; of those of this check every second one is aborted.
            Breaks::ForgetsWrites if fence.request > 30 => self.forgotten.push(write),
            Breaks::EndsAbortedWritesEarly if fence.request > 30 && fence.request % 2 == 1 => {
                self.told.push_back(Happened::Written { link, write, failed: true });
                self.early.push(write);
            }
            _ => {}
        }
        Ok(())
    }
}

impl Fabric for Receives {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        if let Some(happened) = self.told.pop_front() {
            return Ok(Some(happened));
        }
        while let Some((link, kept)) = self.kept.front()
            && self.inner.send(*link, kept).is_ok()
        {
            self.kept.pop_front();
        }
        let happened = self.inner.poll(frame)?;
        let Some(mut happened) = happened else { return Ok(None) };
        match (&mut happened, self.breaks) {
            (Happened::Destroyed { .. }, Breaks::DestroyedEarly) => return self.poll(frame),
            (Happened::Lost { link }, Breaks::DestroyedEarly) => {
                self.told.push_back(Happened::Destroyed { link: *link });
            }
            (Happened::Connected { link, .. }, Breaks::OneNumber) => {
                self.links.push(*link);
                *link = 0;
            }
            (
                Happened::Frame { link }
                | Happened::Room { link }
                | Happened::Lost { link }
                | Happened::Destroyed { link },
                Breaks::OneNumber,
            ) => *link = 0,
            _ => {}
        }
        Ok(Some(happened))
    }

    fn close(&mut self, link: u32) {
        let link = if self.breaks == Breaks::OneNumber { *self.links.last().unwrap() } else { link };
        self.inner.close(link);
    }
}

impl ReceiverFabric for Receives {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        let link = if self.breaks == Breaks::OneNumber { *self.links.last().unwrap() } else { link };
        if self.breaks == Breaks::KeepsAll {
            self.kept.push_back((link, frame.to_vec()));
            return Ok(());
        }
        self.inner.send(link, frame)
    }

    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        if self.breaks == Breaks::KeepsRows {
            let same = |of: &&(Fence, Where, Run, Vec<u8>)| (of.0, of.1, of.2) == (fence, at, *run);
            if let Some((.., bytes)) = self.rows.iter().find(same) {
                into.copy_from_slice(bytes);
                return Ok(());
            }
        }
        self.inner.fetch(link, fence, at, run, into)?;
        if self.breaks == Breaks::WrongRows {
            into[0] ^= 1;
        }
        self.rows.push((fence, at, *run, into.to_vec()));
        Ok(())
    }

    fn holds(&mut self, link: u32) -> bool {
        self.breaks == Breaks::HoldsWhatIsClosed || self.inner.holds(link)
    }
}

fn check(way: Way, faults: Faults, breaks: Breaks) -> std::result::Result<(), conformance::Broken> {
    conformance::run(|| {
        let (memories, landings) = (Vec::new(), Vec::new());
        Ok(Model { net: Net::new(9, way, faults), memories, landings, breaks })
    })
}

#[test]
fn the_model_fabric_keeps_all_promises_in_all_its_ways() {
    for way in [Way::Shared, Way::Stream, Way::Far] {
        check(way, Faults::default(), Breaks::Nothing).unwrap_or_else(|broken| panic!("{way:?}: {broken}"));
    }
}

/// A fabric may have no room at any time.
#[test]
fn a_fabric_that_often_has_no_room_breaks_no_promise() {
    for way in [Way::Shared, Way::Stream, Way::Far] {
        let faults = Faults { full: 200, ..Faults::default() };
        check(way, faults, Breaks::Nothing).unwrap_or_else(|broken| panic!("{way:?}: {broken}"));
    }
}

/// Bytes may be wrong: the receiver finds it.
#[test]
fn bytes_that_are_fetched_wrong_break_no_promise() {
    for way in [Way::Shared, Way::Stream] {
        let faults = Faults { fetched: 60, refused: 60, ..Faults::default() };
        check(way, faults, Breaks::Nothing).unwrap_or_else(|broken| panic!("{way:?}: {broken}"));
    }
}

#[test]
fn control_frames_that_are_lost_come_twice_overtake_or_are_damaged_fail() {
    let some = Faults::default();
    let wrong = [
        Faults { lost: 100, ..some },
        Faults { twice: 100, ..some },
        Faults { reordered: 300, ..some },
        Faults { damaged: 100, ..some },
    ];
    for faults in wrong {
        let broken = check(Way::Shared, faults, Breaks::Nothing).unwrap_err();
        assert_eq!(broken.check, FRAMES, "{faults:?}: {broken}");
    }
}

#[test]
fn control_each_check_has_a_fabric_that_fails_in_it() {
    let wrong = [
        (Way::Shared, Breaks::DropsWhatHasNoRoom, SILENCE),
        (Way::Shared, Breaks::KeepsAll, SILENCE),
        (Way::Shared, Breaks::ClosesInSilence, CLOSES),
        (Way::Shared, Breaks::OneNumber, CLOSES),
        (Way::Shared, Breaks::HidesCrashes, CRASHES),
        (Way::Shared, Breaks::WrongRows, ROWS),
        (Way::Stream, Breaks::WrongRows, ROWS),
        (Way::Far, Breaks::EndsWritesEarly, ROWS),
        (Way::Far, Breaks::EndsWritesTwice, ROWS),
        (Way::Shared, Breaks::KeepsRows, CHANGES),
        (Way::Far, Breaks::KeepsRows, CHANGES),
        (Way::Shared, Breaks::HoldsWhatIsClosed, CLOSED),
        (Way::Far, Breaks::ForgetsWrites, REUSE),
        (Way::Far, Breaks::EndsAbortedWritesEarly, REUSE),
        (Way::Shared, Breaks::NewestConnection, MIXING),
        (Way::Far, Breaks::DestroyedEarly, DESTROYED),
    ];
    for (way, breaks, named) in wrong {
        let broken = check(way, Faults::default(), breaks).unwrap_err();
        println!("{way:?} {breaks:?}: {broken}");
        assert_eq!(broken.check, named, "{way:?} {breaks:?}: {broken}");
    }
}

/// A subject that cannot make an end fails with its error.
#[test]
fn a_subject_that_fails_is_told() {
    let refused = || -> Result<Model> { Err(Error::new(Kind::OsRefused, "test")) };
    let broken = conformance::run(refused).unwrap_err();
    assert_eq!(broken.check, FRAMES);
    assert!(broken.what.contains("refused"), "{broken}");
}
