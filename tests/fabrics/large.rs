//! Both machines over both fabrics with rows of megabytes: more than a socket, a queue or a piece takes at once.

use std::sync::Arc;
use std::time::Instant;

use forebay::os::{NoFaults, Request};
use forebay::transfer::memory::{Plane, Planes, SendMemory};
use forebay::transfer::sender::{self, Computed};
use forebay::transfer::socket::Options;
use forebay::transfer::{
    Component, FRAME_MAX, Fence, LayerPlaces, Place, Polled, Rank, Reason, Receiver, ReceivingEnd, Run,
    Sender, SendingEnd, Side, Split, Stage, Store, receiver,
};
use forebay::{Kind as Error, Result};

use crate::rig::{SocketReceiver, SocketSender, Way, connect, listen, options, until};

/// Bytes of a row, tokens of a page and of the request, layers.
const ROW: u64 = 128 << 10;
const PAGE: u64 = 4;
const TOKENS: u32 = 64;
const LAYERS: u32 = 2;
const PAGE_BYTES: u64 = LAYERS as u64 * PAGE * ROW;
const BYTES: u64 = PAGE_BYTES * (TOKENS as u64 / PAGE);
const FENCE: Fence = Fence { request: 1, generation: 1 };

fn side() -> Side {
    let place = |layer: u32| {
        let offset = u64::from(layer) * PAGE * ROW;
        Place { component: 0, plane: 0, offset, token_stride: ROW, head_stride: ROW }
    };
    let places = |layer| LayerPlaces { layer, places: vec![place(layer)] };
    let (name, dtype) = ("latent".to_owned(), "bf16".to_owned());
    Side {
        components: vec![Component { name, dtype, heads: 1, head_bytes: ROW }],
        stages: vec![Stage { layers: (0..LAYERS).map(places).collect(), page_bytes: vec![PAGE_BYTES] }],
        width: 1,
        split: Split::Heads,
        replicas: 1,
        page_tokens: PAGE as u32,
    }
}

/// The bytes of a place, 8 at a time.
fn expected(place: u64) -> u64 {
    (place / 8 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17)
}

fn memory() -> Arc<SendMemory> {
    let request =
        Request { bytes: BYTES, huge: false, populate: false, lock: false, node: None, shared: true };
    let planes = Planes(vec![Plane { offset: 0, page_bytes: PAGE_BYTES }]);
    let (memory, _) = SendMemory::new(&request, planes, &NoFaults).unwrap();
    for first in (0..BYTES).step_by(1 << 16) {
        let words = (first..first + (1 << 16)).step_by(8).flat_map(|place| expected(place).to_le_bytes());
        memory.map().copy_in(first, &words.collect::<Vec<u8>>()).unwrap();
    }
    Arc::new(memory)
}

/// Compares what it is given with what is at its place. Runs without digests go into `pages`, if there are any.
#[derive(Default)]
struct Compared {
    bytes: u64,
    wrong: Option<Run>,
    pages: Vec<u8>,
}

impl Store for Compared {
    fn place(&mut self, _: Fence, run: &Run) -> Option<&mut [u8]> {
        assert_eq!(run.pieces, 1);
        let first = (u64::from(run.to.page) * PAGE_BYTES + run.to.offset) as usize;
        self.pages.get_mut(first..)?.get_mut(..run.bytes as usize)
    }

    fn store(&mut self, _: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        for (piece, bytes) in (0..).zip(bytes.chunks_exact(run.bytes as usize)) {
            let first = u64::from(run.from.page) * PAGE_BYTES + run.from.offset + piece * run.from.stride;
            let words = (first..).step_by(8).map(|place| expected(place).to_le_bytes());
            if bytes.chunks_exact(8).zip(words).any(|(own, word)| own != word) {
                self.wrong = Some(*run);
            }
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

/// Two ranks over a fabric.
struct Ranks {
    memory: Arc<SendMemory>,
    sending: SendingEnd<SocketSender>,
    receiving: ReceivingEnd<SocketReceiver>,
    stored: Compared,
    start: Instant,
    ended: Vec<Reason>,
    whole: bool,
    failed: Vec<forebay::Error>,
    granted: bool,
    /// Why connections were lost, at the sender and at the receiver.
    lost: [Vec<Option<forebay::Error>>; 2],
}

impl Ranks {
    /// Connected, and the receiver has granted.
    fn new(way: Way, from: Options, to: Options, digests: bool) -> Ranks {
        let (receiver, at) = listen(way, to, None).unwrap();
        let memory = memory();
        let sender = connect(way, from, memory.clone(), &[at]).unwrap();
        let rank = |instance| Rank { instance, replica: 0, stage: 0, lane: 0 };
        // Each layer is told when it is computed, as of long prompts.
        let told = sender::Options { bulk_tokens: 0, digests, ..sender::Options::default() };
        let sends = Sender::new(side(), rank(1), told).unwrap();
        let receives =
            Receiver::new(side(), rank(2), receiver::Options { digests, ..Default::default() }).unwrap();
        let mut ranks = Ranks {
            memory,
            sending: SendingEnd::new(sends, sender),
            receiving: ReceivingEnd::new(receives, receiver),
            stored: Compared::default(),
            start: Instant::now(),
            ended: Vec::new(),
            whole: false,
            failed: Vec::new(),
            granted: false,
            lost: [Vec::new(), Vec::new()],
        };
        ranks.sending.machine.begin(1, TOKENS, None).unwrap();
        let sender = (1, 0);
        let wanted = receiver::Wanted {
            fence: FENCE,
            tokens: TOKENS,
            first: 0,
            sender,
            payloads: &[],
            landing: &[],
            deadline: None,
        };
        ranks.until("a grant", |ranks| ranks.receiving.machine.grant(&wanted).is_ok());
        ranks.until("a grant at the sender", |ranks| ranks.granted);
        ranks
    }

    fn compute(&mut self, layers: u32) {
        for layer in 0..layers {
            let part = Computed { request: 1, layer, tokens: 0..TOKENS, chunk: None, origin: 0 };
            self.sending.machine.computed(&[part]).unwrap();
        }
    }

    fn poll(&mut self) {
        while let Some(polled) = self.sending.poll(self.start.elapsed()).unwrap() {
            match polled {
                Polled::Event(sender::Event::Granted { .. }) => self.granted = true,
                Polled::Event(sender::Event::Ended { reason, .. }) => self.ended.push(reason),
                Polled::Lost { why, .. } => self.lost[0].push(why),
                _ => {}
            }
        }
        while let Some(polled) = self.receiving.poll(self.start.elapsed(), &mut self.stored).unwrap() {
            match polled {
                Polled::Event(receiver::Event::Whole { .. }) => self.whole = true,
                Polled::Event(receiver::Event::Failed { error, .. }) => self.failed.push(error),
                Polled::Lost { why, .. } => self.lost[1].push(why),
                _ => {}
            }
        }
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Ranks) -> bool) {
        until(what, || {
            self.poll();
            holds(self)
        });
    }
}

/// A queue that holds much less than a notice with its rows.
fn small() -> Options {
    Options { queue: 4 * FRAME_MAX, ..options() }
}

fn whole(way: Way) {
    let options = small();
    let mut ranks = Ranks::new(way, options.clone(), options, true);
    let start = Instant::now();
    ranks.compute(LAYERS);
    ranks.sending.machine.finish(1).unwrap();
    ranks.until("a whole request", |ranks| ranks.whole && ranks.ended == [Reason::Done]);
    let rate = BYTES as f64 / start.elapsed().as_secs_f64() / 1e6;
    println!("{:.0} MB/s, both ends on one thread", rate);
    assert_eq!((ranks.stored.bytes, ranks.stored.wrong), (BYTES, None));
    assert!(ranks.lost.iter().all(Vec::is_empty));
}

/// Without digests rows go straight to the receiver's pages, if it says where: none is stored.
fn in_place(way: Way) {
    for (digests, gives) in [(false, true), (false, false), (true, true)] {
        let options = small();
        let mut ranks = Ranks::new(way, options.clone(), options, digests);
        let straight = gives && !digests;
        ranks.stored.pages = vec![0; if gives { BYTES as usize } else { 0 }];
        ranks.compute(LAYERS);
        ranks.sending.machine.finish(1).unwrap();
        ranks.until("a whole request", |ranks| ranks.whole && ranks.ended == [Reason::Done]);
        assert_eq!((ranks.stored.bytes, ranks.stored.wrong), (if straight { 0 } else { BYTES }, None));
        let words = ranks.stored.pages.chunks_exact(8).zip((0..BYTES).step_by(8));
        let same = words.filter(|(own, place)| **own == expected(*place).to_le_bytes()).count() as u64;
        assert_eq!(same, if straight { BYTES / 8 } else { 0 });
    }
}

#[test]
fn rows_without_digests_are_fetched_into_their_place() {
    in_place(Way::Shm);
    in_place(Way::Tcp);
}

/// Replaces the sender's rows before the first one is copied, as it may when the receiver was stopped for so long that
/// the sender has closed the connection.
struct Replaced {
    memory: Arc<SendMemory>,
    /// The sender's end, whose drop closes the connection.
    sending: Option<SendingEnd<SocketSender>>,
    closes: bool,
    pages: Vec<u8>,
}

impl Store for Replaced {
    fn place(&mut self, _: Fence, run: &Run) -> Option<&mut [u8]> {
        if self.closes {
            self.sending = None;
        }
        self.memory.map().copy_in(0, &[0x5A; BYTES as usize / 2]).unwrap();
        let first = (u64::from(run.to.page) * PAGE_BYTES + run.to.offset) as usize;
        self.pages.get_mut(first..)?.get_mut(..run.bytes as usize)
    }

    fn store(&mut self, _: Fence, _: &Run, _: &[u8]) -> Result<()> {
        unreachable!("rows without digests have a place");
    }
}

/// What becomes of a request without digests whose rows are replaced, and the bytes of its first page.
fn replaced(closes: bool) -> (Vec<receiver::Event>, u64) {
    let options = options();
    let mut ranks = Ranks::new(Way::Shm, options.clone(), options, false);
    ranks.compute(LAYERS);
    ranks.sending.machine.finish(1).unwrap();
    while ranks.sending.poll(ranks.start.elapsed()).unwrap().is_some() {}
    let Ranks { memory, sending, mut receiving, start, .. } = ranks;
    let (sending, pages) = (Some(sending), vec![0; BYTES as usize]);
    let mut store = Replaced { memory, sending, closes, pages };
    let mut events = Vec::new();
    until("the request's end", || {
        while let Some(polled) = receiving.poll(start.elapsed(), &mut store).unwrap() {
            if let Polled::Event(event) = polled {
                events.push(event);
            }
        }
        let ends =
            |event: &_| matches!(event, receiver::Event::Whole { .. } | receiver::Event::Failed { .. });
        events.iter().any(ends)
    });
    (events, u64::from_le_bytes(*store.pages.first_chunk().unwrap()))
}

/// See "what can fail" in `docs/transfer.md`.
#[test]
fn rows_that_a_sender_replaces_after_it_has_closed_are_not_taken_without_digests() {
    let (events, _) = replaced(true);
    let failed = |event: &_| match event {
        receiver::Event::Failed { error, .. } => Some((error.kind(), error.place().to_owned())),
        _ => None,
    };
    let lost = (Error::PeerLost, "a sender that has closed its connection".to_owned());
    assert_eq!(events.iter().find_map(failed), Some(lost), "{events:?}");
    assert!(!events.iter().any(|event| matches!(event, receiver::Event::Ready { .. })), "{events:?}");
    // Control: nothing else finds them.
    let (events, bytes) = replaced(false);
    assert!(events.contains(&receiver::Event::Whole { fence: FENCE }), "{events:?}");
    assert_eq!(bytes, 0x5A5A_5A5A_5A5A_5A5A);
}

#[test]
fn rows_of_megabytes_come_whole_through_queues_that_are_smaller() {
    whole(Way::Tcp);
    whole(Way::Shm);
}

/// Either end aborts while rows are on their way. `aborts` has the time that it takes.
fn aborts(way: Way, by_sender: bool) {
    let options = small();
    let mut ranks = Ranks::new(way, options.clone(), options, true);
    ranks.compute(1);
    // The first layer's rows are under way.
    ranks.sending.poll(ranks.start.elapsed()).unwrap();
    match by_sender {
        true => ranks.sending.machine.abort(1).unwrap(),
        false => ranks.receiving.machine.abort(FENCE).unwrap(),
    }
    // The end that aborts knows by itself.
    ranks.until("the end at both", |ranks| {
        !ranks.ended.is_empty() && (!by_sender || !ranks.failed.is_empty())
    });
    assert!(ranks.ended == [Reason::Aborted] && !ranks.whole, "{:?}", ranks.ended);
    assert!(ranks.stored.bytes < BYTES && ranks.stored.wrong.is_none());
    assert!(ranks.lost.iter().all(Vec::is_empty));
}

#[test]
fn an_abort_of_either_end_ends_the_request_at_both() {
    for by_sender in [true, false] {
        aborts(Way::Tcp, by_sender);
        aborts(Way::Shm, by_sender);
    }
}

/// A notice with more rows than either end takes loses the connection, and the end that refuses says why.
#[test]
fn more_rows_than_a_frame_may_carry_lose_the_connection_with_the_reason() {
    let few = Options { rows_max: 1 << 20, ..options() };
    let mut ranks = Ranks::new(Way::Tcp, few.clone(), few.clone(), true);
    ranks.compute(LAYERS);
    ranks.until("the loss", |ranks| !ranks.lost[0].is_empty());
    let why = ranks.lost[0][0].clone().unwrap();
    assert_eq!((why.kind(), why.number("rows_max")), (Error::OutOfRange, Some(1 << 20)), "{why}");

    let many = Options { rows_max: 64 << 20, ..few.clone() };
    let mut ranks = Ranks::new(Way::Tcp, many, few, true);
    ranks.compute(LAYERS);
    ranks.until("the loss", |ranks| !ranks.lost[0].is_empty() && !ranks.lost[1].is_empty());
    let why = ranks.lost[1][0].clone().unwrap();
    assert_eq!(why.kind(), Error::BadFormat, "{why}");
    assert_eq!(ranks.stored.bytes, 0);
}
