//! Both fabrics behind one trait, so that each test runs over both; memory for the suite's origins; and ends that poll
//! in turn until something holds.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay::os::{NoFaults, Request};
use forebay::transfer::conformance::{ORIGINS, TOKENS, sides};
use forebay::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric};
use forebay::transfer::memory::{Plane, Planes, SendMemory};
pub use forebay::transfer::socket::{Address, SocketReceiver, SocketSender, Way};
use forebay::transfer::socket::{Options, Socket, Token};
use forebay::transfer::{Fence, Frame, Payload, Rank, Sender, sender};
use forebay::{Error, Result};

/// Bytes of an origin: pages of both planes for its tokens.
pub fn origin_bytes() -> u64 {
    let [side, _] = sides();
    let pages = u64::from(TOKENS.div_ceil(side.page_tokens));
    side.stages[0].page_bytes.iter().sum::<u64>() * pages
}

/// Memory for the suite.
pub fn memory() -> Arc<SendMemory> {
    let [side, _] = sides();
    let pages = u64::from(TOKENS.div_ceil(side.page_tokens));
    let mut offset = 0;
    let planes = side.stages[0].page_bytes.iter().map(|page_bytes| {
        let plane = Plane { offset, page_bytes: *page_bytes };
        offset += page_bytes * pages;
        plane
    });
    let planes = Planes(planes.collect());
    let bytes = origin_bytes() * ORIGINS;
    let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: true };
    Arc::new(SendMemory::new(&request, planes, &NoFaults).unwrap().0)
}

/// A path that no other test has.
pub fn path() -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("fabrics-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    std::env::temp_dir().join(name)
}

/// A token that no other test has: ports are used again, and another test's sender may come to them.
pub fn token() -> Option<Token> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name =
        format!("a token of the tests {} {}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    Some(Token::new(name.as_bytes()).unwrap())
}

/// Options with such a token.
pub fn options() -> Options {
    Options { token: token(), ..Options::default() }
}

/// A sender's end with these receivers.
pub fn connect(way: Way, options: Options, memory: Arc<SendMemory>, at: &[Address]) -> Result<SocketSender> {
    let mut sender = SocketSender::new(way, options, memory)?;
    at.iter().try_for_each(|at| sender.add(at.clone()))?;
    Ok(sender)
}

/// A receiver's end at a new place, or at the one of a receiver that is gone.
pub fn listen(way: Way, options: Options, at: Option<&Address>) -> Result<(SocketReceiver, Address)> {
    let new = match way {
        Way::Tcp => Address::Tcp("127.0.0.1:0".parse().unwrap()),
        Way::Shm => Address::Shm(path()),
    };
    let receiver = SocketReceiver::bind(options, at.unwrap_or(&new))?;
    let at = receiver.address().unwrap();
    Ok((receiver, at))
}

pub fn file(at: &Address) -> PathBuf {
    match at {
        Address::Shm(path) => path.clone(),
        Address::Tcp(_) => panic!("a port"),
    }
}

/// An end, and all that has happened at it.
pub struct Polled<E> {
    pub end: E,
    pub happened: Vec<Happened>,
    pub frames: Vec<Vec<u8>>,
    pub failures: Vec<Error>,
}

impl<E: Fabric + Socket> Polled<E> {
    pub fn new(end: E) -> Polled<E> {
        Polled { end, happened: Vec::new(), frames: Vec::new(), failures: Vec::new() }
    }

    pub fn poll(&mut self) {
        let mut frame = Vec::new();
        while let Some(happened) = self.end.poll(&mut frame).unwrap() {
            if let Happened::Frame { .. } = happened {
                self.frames.push(frame.clone());
            }
            if let Happened::Lost { link } = happened {
                self.failures.extend(self.end.why_lost(link));
            }
            self.happened.push(happened);
        }
        while let Some(failure) = self.end.failure() {
            self.failures.push(failure);
        }
    }

    /// The newest connection, if there is one that is not lost.
    pub fn link(&self) -> Option<u32> {
        self.happened.iter().fold(None, |newest, happened| match happened {
            Happened::Connected { link, .. } => Some(*link),
            Happened::Lost { link } if newest == Some(*link) => None,
            _ => newest,
        })
    }

    pub fn has(&self, kind: forebay::Kind) -> bool {
        self.failures.iter().any(|failure| failure.kind() == kind)
    }
}

/// Calls `step` about every millisecond, until it says that something holds.
pub fn until(what: &str, mut step: impl FnMut() -> bool) {
    let start = Instant::now();
    while !step() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} did not come");
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// A frame of so many bytes.
pub fn frame(number: u64, bytes: usize) -> Vec<u8> {
    let body = vec![number as u8; bytes];
    let fence = Fence { request: number, generation: 1 };
    let mut frame = Vec::new();
    Frame::Payload(Payload { number, fence, kind: 1, digest: 0, bytes: &body }).encode(&mut frame);
    frame
}

/// Two ends that are connected.
pub struct Pair {
    pub sender: Polled<SocketSender>,
    pub receiver: Polled<SocketReceiver>,
    pub at: Address,
}

impl Pair {
    pub fn new(way: Way, options: &Options) -> Pair {
        let (receiver, at) = listen(way, options.clone(), None).unwrap();
        let sender = connect(way, options.clone(), memory(), std::slice::from_ref(&at)).unwrap();
        let mut pair = Pair { sender: Polled::new(sender), receiver: Polled::new(receiver), at };
        pair.until("a connection", |pair| pair.sender.link().is_some() && pair.receiver.link().is_some());
        pair
    }

    pub fn until(&mut self, what: &str, holds: impl Fn(&Pair) -> bool) {
        until(what, || {
            self.sender.poll();
            self.receiver.poll();
            holds(self)
        });
    }

    /// A frame goes each way, so both are served.
    pub fn is_served(&mut self) {
        let (sent, back) = (self.receiver.frames.len(), self.sender.frames.len());
        let own = frame(sent as u64, 300);
        send(&mut self.sender, &own);
        let link = self.receiver.link().unwrap();
        self.receiver.end.send(link, &own).unwrap();
        self.until("a frame each way", |pair| {
            pair.receiver.frames.len() > sent && pair.sender.frames.len() > back
        });
        assert!(self.receiver.frames.last() == Some(&own) && self.sender.frames.last() == Some(&own));
    }
}

/// Sends a frame without rows over the newest connection.
pub fn try_send(sender: &mut Polled<SocketSender>, frame: &[u8]) -> Result<()> {
    let [side, _] = sides();
    let rank = Rank { instance: 1, replica: 0, stage: 0, lane: 0 };
    let machine = Sender::new(side, rank, sender::Options::default()).unwrap();
    let link = sender.link().unwrap();
    sender.end.send(link, frame, &Runs::of_frame(&machine, link, frame))
}

pub fn send(sender: &mut Polled<SocketSender>, frame: &[u8]) {
    try_send(sender, frame).unwrap();
}
