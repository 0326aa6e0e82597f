//! The suite that every fabric is held to, over TCP and over shared memory.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::transfer::conformance::{self, Subject};
use forebay::transfer::fabric::{Fabric, Happened, Runs, SenderFabric};
use forebay::transfer::sender::Source;
use forebay::transfer::socket::Options;
use forebay::transfer::{Fence, Run};
use forebay::{Error, Result};

use crate::rig::{
    Address, SocketReceiver, SocketSender, Way, connect, listen, memory, options, origin_bytes,
};

/// Where receivers listen. Each sender connects to all of them, those that come later too.
type Places = Rc<RefCell<Vec<Address>>>;

struct Ends {
    options: Options,
    places: Places,
    start: Instant,
    way: Way,
}

/// A sender that learns of new receivers.
struct Sends {
    inner: SocketSender,
    places: Places,
    known: usize,
}

impl Fabric for Sends {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        for at in self.places.borrow().iter().skip(self.known) {
            self.inner.add(at.clone())?;
            self.known += 1;
        }
        self.inner.poll(frame)
    }

    fn close(&mut self, link: u32) {
        self.inner.close(link);
    }
}

impl Source for Sends {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.inner.read(origin, run, into)
    }
}

impl SenderFabric for Sends {
    fn send(&mut self, link: u32, frame: &[u8], runs: &Runs<'_>) -> Result<()> {
        self.inner.send(link, frame, runs)
    }

    fn write(&mut self, link: u32, write: u64, fence: Fence, runs: &Runs<'_>) -> Result<()> {
        self.inner.write(link, write, fence, runs)
    }
}

impl Subject for Ends {
    type Sender = Sends;
    type Receiver = SocketReceiver;

    fn sender(&mut self) -> Result<Sends> {
        let inner = connect(self.way, self.options.clone(), memory(), &[])?;
        Ok(Sends { inner, places: self.places.clone(), known: 0 })
    }

    fn receiver(&mut self) -> Result<SocketReceiver> {
        let (receiver, at) = listen(self.way, self.options.clone(), None)?;
        self.places.borrow_mut().push(at);
        Ok(receiver)
    }

    fn origin(&self, nth: u64) -> u64 {
        nth * origin_bytes()
    }

    fn put(&mut self, sender: &mut Sends, origin: u64, run: &Run, bytes: &[u8]) -> Result<()> {
        sender.inner.memory().write(origin, run, bytes)
    }

    fn landed(&mut self, _: &mut SocketReceiver, _: u32, _: &Run, _: &mut [u8]) -> Result<()> {
        Err(Error::new(forebay::Kind::Unsupported, "test"))
    }

    fn wait(&mut self) -> Duration {
        std::thread::sleep(Duration::from_micros(200));
        self.start.elapsed()
    }
}

fn check(way: Way, options: &Options) {
    conformance::run(|| {
        let (options, places) = (options.clone(), Places::default());
        Ok(Ends { options, places, start: Instant::now(), way })
    })
    .unwrap_or_else(|broken| panic!("{broken}"));
}

#[test]
fn tcp_keeps_what_every_fabric_promises() {
    check(Way::Tcp, &options());
}

#[test]
fn shared_memory_keeps_what_every_fabric_promises() {
    check(Way::Shm, &options());
}

/// Calls of the system that are refused now and then cost connections alone.
#[derive(Debug, Default)]
struct Sometimes(std::sync::atomic::AtomicU64);

impl forebay::os::Faults for Sometimes {
    fn before(&self, call: forebay::os::Call) -> Option<i32> {
        use forebay::os::Call;
        let moves = matches!(call, Call::Send | Call::Receive | Call::Credentials | Call::Random);
        let count = || self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        (moves && count() % 97 == 96).then_some(libc::ENOBUFS)
    }
}

fn calls_that_are_refused(way: Way) {
    let (receiver, at) = listen(way, options(), None).unwrap();
    drop(receiver);
    let mut options = options();
    options.faults = Arc::new(Sometimes::default());
    let (receiver, at) = listen(way, options.clone(), Some(&at)).unwrap();
    let sender = connect(way, options, memory(), &[at]).unwrap();
    let (mut sender, mut receiver) = (crate::rig::Polled::new(sender), crate::rig::Polled::new(receiver));
    let mut links = 0;
    crate::rig::until("eight connections", || {
        sender.poll();
        receiver.poll();
        links = sender.happened.iter().filter(|of| matches!(of, Happened::Connected { .. })).count();
        links >= 8
    });
    assert!(sender.has(forebay::Kind::OsRefused) || receiver.has(forebay::Kind::OsRefused));
}

#[test]
fn calls_of_the_system_that_are_refused_cost_a_connection_and_not_the_end() {
    calls_that_are_refused(Way::Tcp);
    calls_that_are_refused(Way::Shm);
}
