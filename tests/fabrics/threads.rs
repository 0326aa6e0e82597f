//! Transfer threads: two ends whose threads move a request while the test only makes calls and takes events.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay::os::{NoFaults, Request};
use forebay::transfer::fabric::{Fabric, Happened, ReceiverFabric};
use forebay::transfer::memory::{Plane, Planes, SendMemory};
use forebay::transfer::receiver::Where;
use forebay::transfer::sender::{self, Computed};
use forebay::transfer::socket::{Options, Socket};
use forebay::transfer::thread::{Grant, News, ReceiveThread, SendThread};
use forebay::transfer::{
    Component, Fence, LayerPlaces, Place, Rank, Reason, Receiver, ReceivingEnd, Run, Sender, SendingEnd,
    Side, Split, Stage, Store, receiver,
};
use forebay::{Kind as Error, Result};

use crate::rig::{SocketReceiver, SocketSender, Way, connect, listen, options, until};

const LAYERS: u32 = 3;
const TOKENS: u32 = 50;
const PAGE: u32 = 16;
const ROW: u64 = 100;
const LAYER_BYTES: u64 = TOKENS.div_ceil(PAGE) as u64 * PAGE as u64 * ROW;

fn side() -> Side {
    let place = |layer| Place { component: 0, plane: layer, offset: 0, token_stride: ROW, head_stride: ROW };
    let layers = (0..LAYERS).map(|layer| LayerPlaces { layer, places: vec![place(layer)] }).collect();
    Side {
        components: vec![Component {
            name: "latent".to_owned(),
            dtype: "bytes".to_owned(),
            heads: 1,
            head_bytes: ROW,
        }],
        stages: vec![Stage { layers, page_bytes: vec![u64::from(PAGE) * ROW; LAYERS as usize] }],
        width: 1,
        split: Split::Heads,
        replicas: 1,
        page_tokens: PAGE,
    }
}

/// The byte of a request's place.
fn byte(request: u64, layer: u32, at: u64) -> u8 {
    (request * 89 + u64::from(layer) * 31 + at * 7 + at / 251) as u8
}

type Rows = BTreeMap<(Fence, u32), Vec<u8>>;

/// Rows by use of pages and layer, and the uses that have ended.
#[derive(Clone, Default)]
struct Stored {
    rows: Arc<Mutex<Rows>>,
    known: Arc<Mutex<Vec<Fence>>>,
    ended: Arc<Mutex<Vec<Fence>>>,
    /// Each store takes so long.
    slow: Duration,
}

/// A request whose rows the store panics over.
const PANICS: u64 = 99;

impl Store for Stored {
    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        assert!(fence.request != PANICS, "a panic of the test");
        assert!(self.known.lock().unwrap().contains(&fence), "rows before their use was prepared");
        assert!(!self.ended.lock().unwrap().contains(&fence), "rows after their use has ended");
        std::thread::sleep(self.slow);
        let mut rows = self.rows.lock().unwrap();
        let layer = rows.entry((fence, run.to.plane)).or_insert_with(|| vec![0; LAYER_BYTES as usize]);
        let first = u64::from(run.to.page) * u64::from(PAGE) * ROW + run.to.offset;
        layer[first as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn ended(&mut self, fence: Fence) {
        self.ended.lock().unwrap().push(fence);
    }
}

struct Pair {
    sender: SendThread<SocketSender>,
    receiver: ReceiveThread<SocketReceiver, Stored>,
    memory: Arc<SendMemory>,
    stored: Stored,
    sent: Vec<News<sender::Event>>,
    received: Vec<News<receiver::Event>>,
}

fn rank(instance: u64) -> Rank {
    Rank { instance, replica: 0, stage: 0, lane: 0 }
}

impl Pair {
    fn new(way: Way, options: &Options, slow: Duration) -> Pair {
        let request = Request {
            bytes: 4 * u64::from(LAYERS) * LAYER_BYTES,
            huge: false,
            populate: false,
            lock: false,
            node: None,
            shared: true,
        };
        let planes = vec![Plane { offset: 0, page_bytes: u64::from(PAGE) * ROW }; LAYERS as usize];
        let memory = Arc::new(SendMemory::new(&request, Planes(planes), &NoFaults).unwrap().0);
        let (fabric, at) = listen(way, options.clone(), None).unwrap();
        let machine = Receiver::new(side(), rank(2), receiver::Options::default()).unwrap();
        let stored = Stored { slow, ..Stored::default() };
        let receiver = ReceiveThread::start(ReceivingEnd::new(machine, fabric), stored.clone()).unwrap();
        let fabric = connect(way, options.clone(), memory.clone(), &[]).unwrap();
        let told = sender::Options { bulk_tokens: 0, ..sender::Options::default() };
        let machine = Sender::new(side(), rank(1), told).unwrap();
        let sender = SendThread::start(SendingEnd::new(machine, fabric)).unwrap();
        // Receivers may be added while it runs.
        sender.with(move |fabric| fabric.add(at));
        let mut pair = Pair { sender, receiver, memory, stored, sent: Vec::new(), received: Vec::new() };
        pair.until("a sender", |pair| pair.received.iter().any(is_met));
        pair
    }

    fn take(&mut self) {
        while let Some(news) = self.sender.poll().unwrap() {
            self.sent.push(news);
        }
        while let Some(news) = self.receiver.poll().unwrap() {
            self.received.push(news);
        }
    }

    fn until(&mut self, what: &str, holds: impl Fn(&Pair) -> bool) {
        until(what, || {
            self.take();
            holds(self)
        });
    }

    fn grant(&self, fence: Fence) {
        let grant = Grant {
            fence,
            tokens: TOKENS,
            first: 0,
            sender: (1, 0),
            payloads: Vec::new(),
            landing: Vec::new(),
            within: Some(Duration::from_secs(60)),
        };
        self.receiver.grant(grant, move |stored| {
            stored.known.lock().unwrap().push(fence);
            Ok(())
        });
    }

    /// Writes a layer of a request, and says that it is computed.
    fn compute(&self, request: u64, layer: u32) {
        let origin = ((request % 4) * u64::from(LAYERS) + u64::from(layer)) * LAYER_BYTES;
        let rows: Vec<u8> = (0..u64::from(TOKENS) * ROW).map(|at| byte(request, layer, at)).collect();
        self.memory.map().copy_in(origin, &rows).unwrap();
        self.sender.computed(vec![Computed { request, layer, tokens: 0..TOKENS, chunk: None, origin }]);
    }

    fn check(&self, fence: Fence) {
        let rows = self.stored.rows.lock().unwrap();
        for layer in 0..LAYERS {
            let own = &rows[&(fence, layer)][..(u64::from(TOKENS) * ROW) as usize];
            let same = (0..).zip(own).all(|(at, own)| *own == byte(fence.request, layer, at));
            assert!(same, "other rows of {fence:?} in layer {layer}");
        }
    }

    fn failed(&self, fence: Fence) -> Vec<Error> {
        let failed = |news: &News<receiver::Event>| match news {
            News::Event(receiver::Event::Failed { fence: of, error }) if *of == fence => Some(error.kind()),
            _ => None,
        };
        self.received.iter().filter_map(failed).collect()
    }

    fn is_whole(&self, fence: Fence) -> bool {
        self.received.contains(&News::Event(receiver::Event::Whole { fence }))
    }

    fn ended(&self, request: u64) -> Option<Reason> {
        self.sent.iter().find_map(|news| match news {
            News::Event(sender::Event::Ended { request: of, reason }) if *of == request => Some(*reason),
            _ => None,
        })
    }
}

fn is_met(news: &News<receiver::Event>) -> bool {
    matches!(news, News::Event(receiver::Event::Met { rank, .. }) if rank.instance == 1)
}

const fn fence(number: u64) -> Fence {
    Fence { request: number, generation: number }
}

fn moves(way: Way) {
    let mut pair = Pair::new(way, &options(), Duration::ZERO);
    for number in 1..=20 {
        pair.grant(fence(number));
        pair.sender.begin(number, TOKENS, None);
        (0..LAYERS).for_each(|layer| pair.compute(number, layer));
        pair.sender.finish(number);
        pair.until("both ends", |pair| pair.is_whole(fence(number)) && pair.ended(number).is_some());
        assert_eq!(pair.ended(number), Some(Reason::Done));
        pair.check(fence(number));
        assert!(pair.stored.ended.lock().unwrap().contains(&fence(number)));
    }
    let (sent, received) = (pair.sender.statistics(), pair.receiver.statistics());
    assert_eq!((sent.done, sent.failed, sent.held), (20, 0, 0));
    assert_eq!(sent.lag.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
    assert!(sent.lag.values().all(|lag| lag.count == 20 && lag.total >= lag.longest), "{sent:?}");
    assert!(sent.exposed.count == 20 && sent.exposed.longest > Duration::ZERO);
    assert_eq!((received.whole, received.failed), (20, 0));
    let bytes = 20 * u64::from(LAYERS) * u64::from(TOKENS) * ROW;
    assert_eq!((received.moved.bytes, received.moved.wrong), (bytes, 0));
    // What was not answered in time was told again.
    assert!(sent.told.runs >= received.moved.runs && sent.told.again == 0, "{sent:?}");
}

#[test]
fn threads_move_requests_over_both_fabrics() {
    moves(Way::Tcp);
    moves(Way::Shm);
}

#[test]
fn what_is_refused_comes_out_and_changes_nothing() {
    let mut pair = Pair::new(Way::Shm, &options(), Duration::ZERO);
    let refused = |pair: &Pair, of| {
        pair.sent.iter().any(|news| matches!(news, News::Refused { request, .. } if *request == of))
    };
    pair.sender.begin(1, 0, None);
    pair.until("a refusal", |pair| refused(pair, Some(1)));
    let other = forebay::transfer::socket::Address::new(Way::Tcp, "127.0.0.1:9").unwrap();
    pair.sender.with(move |fabric| fabric.add(other));
    pair.until("a refused address", |pair| refused(pair, None));
    // A grant that cannot be fails.
    let mut grant = Grant {
        fence: fence(1),
        tokens: 0,
        first: 0,
        sender: (1, 0),
        payloads: Vec::new(),
        landing: Vec::new(),
        within: None,
    };
    pair.receiver.grant(grant.clone(), |_| Ok(()));
    pair.until("a failed grant", |pair| !pair.failed(fence(1)).is_empty());
    assert_eq!(pair.failed(fence(1)), [Error::OutOfRange]);
    // So does one of a sender that is not there, and one that the store does not take.
    (grant.fence, grant.tokens, grant.sender) = (fence(2), 1, (7, 0));
    pair.receiver.grant(grant.clone(), |_| Ok(()));
    pair.until("a failed grant", |pair| !pair.failed(fence(2)).is_empty());
    assert_eq!(pair.failed(fence(2)), [Error::InvalidState]);
    (grant.fence, grant.sender) = (fence(3), (1, 0));
    pair.receiver.grant(grant, |_| Err(forebay::Error::new(Error::Exhausted, "test")));
    pair.until("a failed grant", |pair| !pair.failed(fence(3)).is_empty());
    assert_eq!(pair.failed(fence(3)), [Error::Exhausted]);
    // Both go on.
    pair.grant(fence(4));
    pair.sender.begin(4, TOKENS, None);
    (0..LAYERS).for_each(|layer| pair.compute(4, layer));
    pair.sender.finish(4);
    pair.until("the request", |pair| pair.is_whole(fence(4)));
    pair.check(fence(4));
}

/// An abort takes effect when its event comes: the store asserts that nothing comes after it.
fn aborts(way: Way) {
    let mut pair = Pair::new(way, &options(), Duration::from_millis(1));
    for number in 1..=20 {
        pair.grant(fence(number));
        pair.sender.begin(number, TOKENS, None);
        (0..LAYERS).for_each(|layer| pair.compute(number, layer));
        match number % 3 {
            0 => pair.receiver.abort(fence(number)),
            1 => pair.sender.abort(number),
            _ => {}
        }
        // An abort may come after the receiver has all rows. The sender waits then for nothing but this.
        pair.sender.finish(number);
        pair.until("both ends", |pair| {
            let own = pair.is_whole(fence(number)) || !pair.failed(fence(number)).is_empty();
            own && pair.ended(number).is_some()
        });
        match pair.is_whole(fence(number)) {
            true => pair.check(fence(number)),
            false => assert_eq!(pair.failed(fence(number)), [Error::Cancelled]),
        }
        // A call for what has ended does nothing.
        pair.receiver.abort(fence(number));
        pair.sender.abort(number);
        pair.sender.finish(number);
    }
    assert_eq!(pair.sender.statistics().held, 0);
    assert!(!pair.sent.iter().any(|news| matches!(news, News::Refused { .. })), "{:?}", pair.sent);
}

#[test]
fn an_abort_takes_effect_with_its_event() {
    aborts(Way::Tcp);
    aborts(Way::Shm);
}

#[test]
fn the_descriptor_is_readable_while_there_is_news() {
    let mut pair = Pair::new(Way::Shm, &options(), Duration::ZERO);
    pair.take();
    let readable = |pair: &Pair| {
        let descriptor = pair.receiver.descriptor();
        assert!(descriptor.as_raw_fd() >= 0);
        forebay::os::wait(&[(descriptor, false)], Duration::ZERO, &NoFaults).unwrap()
    };
    assert!(!readable(&pair));
    pair.grant(fence(1));
    pair.sender.begin(1, TOKENS, None);
    pair.compute(1, 0);
    let start = Instant::now();
    while !readable(&pair) {
        assert!(start.elapsed() < Duration::from_secs(20));
        pair.receiver.wait(Duration::from_secs(1)).unwrap();
    }
    assert!(readable(&pair), "a look takes nothing");
    assert!(pair.receiver.poll().unwrap().is_some());
    pair.take();
    assert!(!readable(&pair));
}

#[test]
fn an_end_that_is_dropped_is_lost_at_once_and_its_thread_is_gone() {
    for way in [Way::Tcp, Way::Shm] {
        let pair = Pair::new(way, &options(), Duration::from_millis(1));
        pair.grant(fence(1));
        pair.sender.begin(1, TOKENS, None);
        (0..LAYERS).for_each(|layer| pair.compute(1, layer));
        let Pair { sender, receiver, memory, .. } = pair;
        drop(sender);
        // The thread had the fabric, and the fabric the memory.
        assert_eq!(Arc::strong_count(&memory), 1);
        until("the loss", || {
            let mut lost = false;
            while let Some(news) = receiver.poll().unwrap() {
                lost |= matches!(news, News::Lost { .. });
            }
            lost
        });
    }
}

/// A batch that names a request which has ended takes the others' rows.
#[test]
fn rows_of_a_batch_are_taken_one_by_one() {
    let mut pair = Pair::new(Way::Shm, &options(), Duration::ZERO);
    pair.grant(fence(1));
    pair.grant(fence(2));
    pair.sender.begin(1, TOKENS, None);
    pair.sender.begin(2, TOKENS, None);
    pair.receiver.abort(fence(1));
    pair.until("the end of one", |pair| pair.ended(1).is_some());
    for layer in 0..LAYERS {
        let origin = |request: u64| ((request % 4) * u64::from(LAYERS) + u64::from(layer)) * LAYER_BYTES;
        let rows: Vec<u8> = (0..u64::from(TOKENS) * ROW).map(|at| byte(2, layer, at)).collect();
        pair.memory.map().copy_in(origin(2), &rows).unwrap();
        let part =
            |request| Computed { request, layer, tokens: 0..TOKENS, chunk: None, origin: origin(request) };
        pair.sender.computed(vec![part(1), part(2)]);
    }
    pair.sender.finish(2);
    // One that never began is refused.
    pair.sender.finish(7);
    pair.until("the other one", |pair| pair.is_whole(fence(2)) && pair.ended(2).is_some());
    pair.check(fence(2));
    let refused: Vec<_> = pair.sent.iter().filter(|news| matches!(news, News::Refused { .. })).collect();
    assert!(matches!(refused[..], [News::Refused { request: Some(7), .. }]), "{refused:?}");
    assert_eq!(pair.sender.statistics().held, 0);
}

#[test]
fn a_use_that_is_granted_twice_keeps_its_pages() {
    let mut pair = Pair::new(Way::Shm, &options(), Duration::ZERO);
    pair.grant(fence(1));
    pair.receiver.grant(
        Grant {
            fence: fence(1),
            tokens: TOKENS,
            first: 0,
            sender: (1, 0),
            payloads: Vec::new(),
            landing: Vec::new(),
            within: None,
        },
        |_| panic!("the store is told of it again"),
    );
    pair.until("a refusal", |pair| {
        pair.received.iter().any(|news| matches!(news, News::Refused { request: Some(1), .. }))
    });
    assert!(pair.failed(fence(1)).is_empty() && pair.stored.ended.lock().unwrap().is_empty());
    pair.sender.begin(1, TOKENS, None);
    (0..LAYERS).for_each(|layer| pair.compute(1, layer));
    pair.sender.finish(1);
    pair.until("the request", |pair| pair.is_whole(fence(1)));
    pair.check(fence(1));
}

#[test]
fn a_thread_that_panics_says_so_and_keeps_nothing() {
    let pair = Pair::new(Way::Shm, &options(), Duration::ZERO);
    pair.grant(fence(PANICS));
    pair.sender.begin(PANICS, TOKENS, None);
    pair.compute(PANICS, 0);
    let mut error = None;
    until("the panic", || {
        error = error.take().or(pair.receiver.poll().err());
        error.is_some()
    });
    assert_eq!(error.unwrap().kind(), Error::Internal);
    assert!(forebay::os::wait(&[(pair.receiver.descriptor(), false)], Duration::ZERO, &NoFaults).unwrap());
    // Calls go, with what they own.
    let owned = Arc::new(());
    let kept = Arc::clone(&owned);
    pair.receiver.with(move |_| {
        drop(kept);
        Ok(())
    });
    assert_eq!(Arc::strong_count(&owned), 1);
    // Its connection is closed.
    until("the loss", || {
        let mut lost = false;
        while let Some(news) = pair.sender.poll().unwrap() {
            lost |= matches!(news, News::Lost { .. });
        }
        lost
    });
}

/// A receiver's end at which something happens all the time.
struct Flooded(SocketReceiver);

impl Fabric for Flooded {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        Ok(self.0.poll(frame)?.or(Some(Happened::Alive { link: u32::MAX })))
    }

    fn close(&mut self, link: u32) {
        self.0.close(link);
    }
}

impl ReceiverFabric for Flooded {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        self.0.send(link, frame)
    }

    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        self.0.fetch(link, fence, at, run, into)
    }

    fn holds(&mut self, link: u32) -> bool {
        self.0.holds(link)
    }
}

impl Socket for Flooded {
    fn failure(&mut self) -> Option<forebay::Error> {
        self.0.failure()
    }

    fn descriptors(&self) -> Vec<(BorrowedFd<'_>, bool)> {
        self.0.descriptors()
    }

    fn due(&self) -> Duration {
        self.0.due()
    }
}

/// A thread that never finds its end idle carries out calls, says what became of them, and ends.
#[test]
fn a_thread_that_is_flooded_does_what_it_is_told() {
    let (fabric, _) = listen(Way::Shm, options(), None).unwrap();
    let machine = Receiver::new(side(), rank(2), receiver::Options::default()).unwrap();
    let end = ReceivingEnd::new(machine, Flooded(fabric));
    let receiver = ReceiveThread::start(end, Stored::default()).unwrap();
    let grant = Grant {
        fence: fence(1),
        tokens: TOKENS,
        first: 0,
        sender: (1, 0),
        payloads: Vec::new(),
        landing: Vec::new(),
        within: None,
    };
    receiver.grant(grant, |_| Ok(()));
    until("a grant that fails", || {
        let mut failed = false;
        while let Some(news) = receiver.poll().unwrap() {
            failed |= matches!(news, News::Event(receiver::Event::Failed { .. }));
        }
        failed
    });
    drop(receiver);
}
