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
use forebay::transfer::socket::{Options, ShmReceiver, ShmSender, TcpReceiver, TcpSender, Token};
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

/// Where a receiver listens.
#[derive(Clone, Debug)]
pub enum At {
    Port(std::net::SocketAddr),
    Path(PathBuf),
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

/// What both ends of both fabrics have.
pub trait End: Fabric {
    fn failure(&mut self) -> Option<Error>;
    fn wait(&self, at_most: Duration) -> Result<()>;
}

macro_rules! ends {
    ($($end:ty),*) => {$(
        impl End for $end {
            fn failure(&mut self) -> Option<Error> {
                <$end>::failure(self)
            }
            fn wait(&self, at_most: Duration) -> Result<()> {
                <$end>::wait(self, at_most)
            }
        }
    )*};
}
ends!(TcpSender, TcpReceiver, ShmSender, ShmReceiver);

/// A fabric over sockets.
pub trait Kind: Sized {
    type Sender: SenderFabric + End;
    type Receiver: ReceiverFabric + End + Send;
    fn sender(options: Options, memory: Arc<SendMemory>, at: &[At]) -> Result<Self::Sender>;
    fn add(sender: &mut Self::Sender, at: &At);
    fn remove(sender: &mut Self::Sender, at: &At);
    /// At a new place, or at the one of a receiver that is gone.
    fn receiver(options: Options, at: Option<&At>) -> Result<(Self::Receiver, At)>;
    fn memory(sender: &Self::Sender) -> &SendMemory;
    fn kept(receiver: &Self::Receiver) -> usize;
}

pub struct Tcp;
pub struct Shm;

fn port(at: &At) -> std::net::SocketAddr {
    match at {
        At::Port(address) => *address,
        At::Path(_) => panic!("a path"),
    }
}

pub fn file(at: &At) -> PathBuf {
    match at {
        At::Path(path) => path.clone(),
        At::Port(_) => panic!("a port"),
    }
}

impl Kind for Tcp {
    type Sender = TcpSender;
    type Receiver = TcpReceiver;

    fn sender(options: Options, memory: Arc<SendMemory>, at: &[At]) -> Result<TcpSender> {
        TcpSender::new(options, memory, &at.iter().map(port).collect::<Vec<_>>())
    }
    fn add(sender: &mut TcpSender, at: &At) {
        sender.add(port(at)).unwrap();
    }
    fn remove(sender: &mut TcpSender, at: &At) {
        sender.remove(port(at));
    }
    fn receiver(options: Options, at: Option<&At>) -> Result<(TcpReceiver, At)> {
        let address = at.map_or_else(|| "127.0.0.1:0".parse().unwrap(), port);
        let receiver = TcpReceiver::bind(options, address)?;
        let at = At::Port(receiver.address().unwrap());
        Ok((receiver, at))
    }
    fn memory(sender: &TcpSender) -> &SendMemory {
        sender.memory()
    }
    fn kept(receiver: &TcpReceiver) -> usize {
        receiver.kept()
    }
}

impl Kind for Shm {
    type Sender = ShmSender;
    type Receiver = ShmReceiver;

    fn sender(options: Options, memory: Arc<SendMemory>, at: &[At]) -> Result<ShmSender> {
        ShmSender::new(options, memory, &at.iter().map(file).collect::<Vec<_>>())
    }
    fn add(sender: &mut ShmSender, at: &At) {
        sender.add(&file(at)).unwrap();
    }
    fn remove(sender: &mut ShmSender, at: &At) {
        sender.remove(&file(at));
    }
    fn receiver(options: Options, at: Option<&At>) -> Result<(ShmReceiver, At)> {
        let path = at.map_or_else(path, file);
        Ok((ShmReceiver::bind(options, &path)?, At::Path(path)))
    }
    fn memory(sender: &ShmSender) -> &SendMemory {
        sender.memory()
    }
    fn kept(receiver: &ShmReceiver) -> usize {
        receiver.kept()
    }
}

/// An end, and all that has happened at it.
pub struct Polled<E> {
    pub end: E,
    pub happened: Vec<Happened>,
    pub frames: Vec<Vec<u8>>,
    pub failures: Vec<Error>,
}

impl<E: End> Polled<E> {
    pub fn new(end: E) -> Polled<E> {
        Polled { end, happened: Vec::new(), frames: Vec::new(), failures: Vec::new() }
    }

    pub fn poll(&mut self) {
        let mut frame = Vec::new();
        while let Some(happened) = self.end.poll(&mut frame).unwrap() {
            if let Happened::Frame { .. } = happened {
                self.frames.push(frame.clone());
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
pub struct Pair<K: Kind> {
    pub sender: Polled<K::Sender>,
    pub receiver: Polled<K::Receiver>,
    pub at: At,
}

impl<K: Kind> Pair<K> {
    pub fn new(options: &Options) -> Pair<K> {
        let (receiver, at) = K::receiver(options.clone(), None).unwrap();
        let sender = K::sender(options.clone(), memory(), std::slice::from_ref(&at)).unwrap();
        let mut pair = Pair { sender: Polled::new(sender), receiver: Polled::new(receiver), at };
        pair.until("a connection", |pair| pair.sender.link().is_some() && pair.receiver.link().is_some());
        pair
    }

    pub fn until(&mut self, what: &str, holds: impl Fn(&Pair<K>) -> bool) {
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
        send::<K>(&mut self.sender, &own);
        let link = self.receiver.link().unwrap();
        self.receiver.end.send(link, &own).unwrap();
        self.until("a frame each way", |pair| {
            pair.receiver.frames.len() > sent && pair.sender.frames.len() > back
        });
        assert!(self.receiver.frames.last() == Some(&own) && self.sender.frames.last() == Some(&own));
    }
}

/// Sends a frame without rows over the newest connection.
pub fn try_send<K: Kind>(sender: &mut Polled<K::Sender>, frame: &[u8]) -> Result<()> {
    let [side, _] = sides();
    let rank = Rank { instance: 1, replica: 0, stage: 0, lane: 0 };
    let machine = Sender::new(side, rank, sender::Options::default()).unwrap();
    let link = sender.link().unwrap();
    sender.end.send(link, frame, &Runs::of_frame(&machine, link, frame))
}

pub fn send<K: Kind>(sender: &mut Polled<K::Sender>, frame: &[u8]) {
    try_send::<K>(sender, frame).unwrap();
}
