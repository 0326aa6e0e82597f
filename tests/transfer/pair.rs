//! One sender and one receiver over queues that lose nothing, and a time that the tests move.
//!
//! Every row has bytes that only its request, layer and token have. The memory notes what is read from where and what
//! is stored, and checks at each access that the sender still holds what is read.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use forebay::transfer::receiver::{self, Mover, Wanted, Where};
use forebay::transfer::sender::{self, Computed, Source};
use forebay::transfer::{
    Component, Fence, Frame, LayerPlaces, Of, Place, Plan, Rank, Receiver, Request, Run, Sender, Side, Split,
    Stage,
};
use forebay::{Error, Kind, Result};

pub const LAYERS: u32 = 3;
pub const PAGE: u32 = 4;
/// Bytes of a row.
pub const ROW: usize = 8;
pub const LINK: u32 = 7;
pub const RANK: Rank = Rank { instance: 1, replica: 0, stage: 0, lane: 0 };

pub const SENDING: sender::Options = sender::Options {
    bulk_tokens: 0,
    bytes_per_second: 0,
    notice_bytes: 1 << 20,
    digests: true,
    repeats: 2,
    resend: Duration::from_millis(50),
    patience: Duration::from_secs(1),
    requests: 8,
};

pub const RECEIVING: receiver::Options = receiver::Options {
    window: 64,
    requests: 8,
    landing: 64,
    digests: true,
    resend: Duration::from_millis(60),
    patience: Duration::from_secs(30),
};

pub const fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// A side of one rank, whose layers have one component of one head.
pub fn side(layers: u32) -> Side {
    let row = ROW as u64;
    let page = u64::from(PAGE) * row;
    let place = |layer| Place {
        component: 0,
        plane: 0,
        offset: u64::from(layer) * page,
        token_stride: row,
        head_stride: row,
    };
    Side {
        components: vec![Component { name: "kv".into(), dtype: "bf16".into(), heads: 1, head_bytes: row }],
        stages: vec![Stage {
            layers: (0..layers).map(|layer| LayerPlaces { layer, places: vec![place(layer)] }).collect(),
            page_bytes: vec![u64::from(layers) * page],
        }],
        width: 1,
        split: Split::Heads,
        replicas: 1,
        page_tokens: PAGE,
    }
}

/// The bytes of a row.
pub fn row(request: u64, layer: u32, token: u32) -> [u8; ROW] {
    (request << 48 | u64::from(layer) << 32 | u64::from(token) | 0xA500_0000).to_le_bytes()
}

/// A row of a use of pages.
pub type Key = (Fence, u32, u32);

/// What both ends read and write.
#[derive(Default)]
pub struct Memory {
    /// What the sender holds, by origin.
    pub held: BTreeMap<u64, Computed>,
    next: u64,
    /// Rows on landing pages, if the sender writes from afar.
    far: bool,
    landed: BTreeMap<Key, [u8; ROW]>,
    /// How often a run, by its layer and first token, is still fetched wrong.
    pub wrong: BTreeMap<(u32, u32), u32>,
    /// How often a run, by its layer and first token, still cannot be fetched.
    pub refused: BTreeMap<(u32, u32), u32>,
    /// The runs that were fetched, by layer and first token.
    pub fetched: Vec<(u32, u32)>,
    /// How many runs the sender has read.
    pub read: usize,
    pub stored: BTreeMap<Key, [u8; ROW]>,
}

impl Memory {
    pub fn hold(&mut self, request: u64, layer: u32, tokens: std::ops::Range<u32>) -> Computed {
        self.next += 1;
        let part = Computed { request, layer, tokens, chunk: None, origin: self.next };
        self.held.insert(self.next, part.clone());
        part
    }

    fn rows(&self, origin: u64, run: &Run) -> Result<Vec<u8>> {
        let Some(part) = self.held.get(&origin) else { return Err(Error::new(Kind::OutOfRange, "read")) };
        let tokens = run.token..run.token + run.tokens;
        assert!(part.layer == run.layer, "{part:?} {run:?}");
        assert!(part.tokens.start <= tokens.start && tokens.end <= part.tokens.end, "{part:?} {run:?}");
        Ok(tokens.flat_map(|token| row(part.request, run.layer, token)).collect())
    }
}

impl Source for Memory {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.read += 1;
        into.copy_from_slice(&self.rows(origin, run)?);
        Ok(())
    }
}

impl Mover for Memory {
    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        assert_eq!(link, LINK);
        self.fetched.push((run.layer, run.token));
        if let Some(left) = self.refused.get_mut(&(run.layer, run.token)).filter(|left| **left > 0) {
            *left -= 1;
            return Err(Error::new(Kind::Io, "fetch"));
        }
        match at {
            Where::Landing(_) => {
                let landed = |token| {
                    let row = self.landed.get(&(fence, run.layer, token));
                    row.copied().ok_or_else(|| Error::new(Kind::OutOfRange, "a row that has not landed"))
                };
                let rows: Vec<_> = (run.token..run.token + run.tokens).map(landed).collect::<Result<_>>()?;
                into.copy_from_slice(&rows.concat());
            }
            Where::Origin { origin, .. } => into.copy_from_slice(&self.rows(origin, run)?),
        }
        if let Some(left) = self.wrong.get_mut(&(run.layer, run.token)).filter(|left| **left > 0) {
            *left -= 1;
            into[0] ^= 1;
        }
        Ok(())
    }

    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        for (token, bytes) in (run.token..).zip(bytes.chunks_exact(ROW)) {
            let twice = self.stored.insert((fence, run.layer, token), bytes.try_into().unwrap());
            assert_eq!(twice, None, "layer {} token {token} is stored twice", run.layer);
        }
        Ok(())
    }

    fn holds(&mut self, _: u32) -> bool {
        true
    }
}

/// Both machines, one connection between them, and what they have said.
pub struct Pair {
    pub sender: Sender,
    pub receiver: Receiver,
    pub memory: Memory,
    pub now: Duration,
    pub to_receiver: VecDeque<Vec<u8>>,
    pub to_sender: VecDeque<Vec<u8>>,
    /// Writes from afar that have not landed.
    pub writes: VecDeque<(u64, Fence, Computed, Option<Vec<u32>>)>,
    pub at_sender: Vec<sender::Event>,
    pub at_receiver: Vec<receiver::Event>,
    /// All frames that the sender has sent, and when; and those of the receiver.
    pub sent: Vec<(Duration, Vec<u8>)>,
    pub answered: Vec<(Duration, Vec<u8>)>,
    pub closed: Vec<Duration>,
    /// Every frame but the hello travels twice.
    pub twice: bool,
    generation: u64,
}

impl Pair {
    /// Both have said hello.
    pub fn new(far: bool, sending: sender::Options, receiving: receiver::Options) -> Pair {
        let mut pair = Pair {
            sender: Sender::new(side(LAYERS), RANK, sending).unwrap(),
            receiver: Receiver::new(side(LAYERS), RANK, receiving).unwrap(),
            memory: Memory { far, ..Memory::default() },
            now: Duration::ZERO,
            to_receiver: VecDeque::new(),
            to_sender: VecDeque::new(),
            writes: VecDeque::new(),
            at_sender: Vec::new(),
            at_receiver: Vec::new(),
            sent: Vec::new(),
            answered: Vec::new(),
            closed: Vec::new(),
            twice: false,
            generation: 0,
        };
        pair.sender.connect(LINK, far).unwrap();
        pair.receiver.connect(LINK, far).unwrap();
        pair.settle();
        pair
    }

    /// The usual options, and the receiver reads.
    pub fn usual() -> Pair {
        Pair::new(false, SENDING, RECEIVING)
    }

    /// What a receiver wants of a whole request.
    pub fn grant(&mut self, request: u64, tokens: u32) -> Fence {
        self.grant_with(request, tokens, |_| {}).unwrap()
    }

    pub fn grant_with(
        &mut self,
        request: u64,
        tokens: u32,
        change: impl FnOnce(&mut Wanted<'_>),
    ) -> Result<Fence> {
        let fence = Fence { request, generation: self.generation };
        let pages: Vec<u32> = (0..tokens.div_ceil(PAGE)).map(|page| page + 100).collect();
        let landing = if self.memory.far { pages.as_slice() } else { &[] };
        let mut wanted =
            Wanted { fence, tokens, first: 0, sender: (1, 0), payloads: &[], landing, deadline: None };
        change(&mut wanted);
        self.receiver.grant(&wanted)?;
        self.generation += 1;
        Ok(fence)
    }

    /// The engine has computed a layer of all tokens. Rows that the sender does not take are given up.
    pub fn compute(&mut self, request: u64, layer: u32, tokens: u32) -> Result<()> {
        let part = self.memory.hold(request, layer, 0..tokens);
        let done = self.sender.computed(std::slice::from_ref(&part));
        if done.is_err() {
            self.memory.held.remove(&part.origin);
        }
        done
    }

    /// A request's way at the sender, from its beginning to its end.
    pub fn send(&mut self, request: u64, tokens: u32) {
        self.sender.begin(request, tokens, None).unwrap();
        (0..LAYERS).for_each(|layer| self.compute(request, layer, tokens).unwrap());
        self.sender.finish(request).unwrap();
    }

    pub fn send_with_payload(&mut self, request: u64, tokens: u32, kind: u8, bytes: &[u8]) {
        self.sender.begin(request, tokens, None).unwrap();
        (0..LAYERS).for_each(|layer| self.compute(request, layer, tokens).unwrap());
        self.sender.payload(request, kind, bytes).unwrap();
        self.sender.finish(request).unwrap();
    }

    pub fn poll_sender(&mut self) -> bool {
        let mut frame = Vec::new();
        match self.sender.poll(self.now, &mut self.memory, &mut frame).unwrap() {
            None => return false,
            Some(sender::Action::Frame { link }) => {
                assert_eq!(link, LINK);
                self.sent.push((self.now, frame.clone()));
                let copies = if self.twice && frame[0] != 1 { 2 } else { 1 };
                self.to_receiver.extend(vec![frame; copies]);
            }
            Some(sender::Action::Write { link, write, fence, rows, some, .. }) => {
                assert_eq!(link, LINK);
                self.writes.push_back((write, fence, rows, some));
            }
            Some(sender::Action::Close { link }) => {
                assert_eq!(link, LINK);
                self.closed.push(self.now);
                self.cut();
            }
            Some(sender::Action::Event(sender::Event::Met { link, .. })) => assert_eq!(link, LINK),
            Some(sender::Action::Event(event)) => {
                if let sender::Event::Released { origin, .. } = event {
                    let was = self.memory.held.remove(&origin);
                    assert!(was.is_some(), "origin {origin} is released twice");
                }
                self.at_sender.push(event);
            }
        }
        true
    }

    pub fn poll_receiver(&mut self) -> bool {
        let mut frame = Vec::new();
        match self.receiver.poll(self.now, &mut frame) {
            None => return false,
            Some(receiver::Action::Frame { link }) => {
                assert_eq!(link, LINK);
                self.answered.push((self.now, frame.clone()));
                let copies = if self.twice && frame[0] != 1 { 2 } else { 1 };
                self.to_sender.extend(vec![frame; copies]);
            }
            Some(receiver::Action::Close { link }) => {
                assert_eq!(link, LINK);
                self.closed.push(self.now);
                self.cut();
            }
            Some(receiver::Action::Event(receiver::Event::Met { link, .. })) => assert_eq!(link, LINK),
            Some(receiver::Action::Event(event)) => self.at_receiver.push(event),
        }
        true
    }

    pub fn deliver_to_receiver(&mut self) -> bool {
        let frame = self.to_receiver.pop_front();
        frame.map(|frame| self.receiver.frame(LINK, &frame, &mut self.memory).unwrap()).is_some()
    }

    pub fn deliver_to_sender(&mut self) -> bool {
        let frame = self.to_sender.pop_front();
        frame.map(|frame| self.sender.frame(LINK, &frame).unwrap()).is_some()
    }

    /// The oldest write from afar lands.
    pub fn land(&mut self) -> bool {
        let Some((write, fence, rows, some)) = self.writes.pop_front() else { return false };
        let plan = Plan::new(&side(LAYERS), &side(LAYERS)).unwrap();
        let request = Request { tokens: rows.tokens.end, replicas: [0, 0], chunks: &[] };
        let mut index = 0;
        plan.runs(&request, (rows.layer, rows.tokens.clone()), Of::All, |run| {
            let asked = some.as_ref().is_none_or(|some| some.contains(&index));
            index += 1;
            if asked {
                let bytes = self.memory.rows(rows.origin, &run)?;
                for (token, bytes) in (run.token..).zip(bytes.chunks_exact(ROW)) {
                    self.memory.landed.insert((fence, run.layer, token), bytes.try_into().unwrap());
                }
            }
            Ok(())
        })
        .unwrap();
        self.sender.written(LINK, write, false);
        true
    }

    /// The connection breaks, and both ends know it.
    pub fn cut(&mut self) {
        self.to_receiver.clear();
        self.to_sender.clear();
        self.writes.clear();
        self.sender.disconnect(LINK);
        self.receiver.disconnect(LINK);
        self.receiver.destroyed(LINK).unwrap();
    }

    /// The next thing that can happen without time passing.
    pub fn step(&mut self) -> bool {
        self.poll_sender()
            || self.poll_receiver()
            || self.deliver_to_receiver()
            || self.deliver_to_sender()
            || self.land()
    }

    pub fn settle(&mut self) {
        for _ in 0..10_000 {
            if !self.step() {
                return;
            }
        }
        panic!("the machines never rest");
    }

    /// Time passes, from one thing that is due to the next.
    pub fn pass(&mut self, until: Duration) {
        self.settle();
        while let Some(due) = self.due().filter(|due| *due <= until) {
            self.now = due;
            self.settle();
        }
        self.now = until;
        self.settle();
    }

    /// When something is due; in the future, because what is due now was polled.
    pub fn due(&self) -> Option<Duration> {
        let due = [self.sender.due(), self.receiver.due()].into_iter().flatten().min()?;
        Some(due.max(self.now + millis(1)))
    }

    /// The notices that were sent, and when: of each the parts.
    pub fn notices(&self) -> Vec<(Duration, usize)> {
        let parts = |(at, frame): &(Duration, Vec<u8>)| match Frame::decode(frame).unwrap() {
            Frame::Notice(notice) => Some((*at, notice.parts().count())),
            _ => None,
        };
        self.sent.iter().filter_map(parts).collect()
    }

    /// Nothing is left at either end: no row, no landing page, no end without an answer.
    pub fn check_nothing_left(&self, fences: &[Fence]) {
        assert_eq!(self.memory.held, BTreeMap::new(), "rows are held");
        assert_eq!(self.receiver.quarantine().reached(), 0, "landing pages are reached");
        assert_eq!(self.receiver.quarantine().waiting(), 0);
        for fence in fences {
            let drained = receiver::Event::Drained { fence: *fence };
            let count = self.at_receiver.iter().filter(|event| **event == drained).count();
            assert_eq!(count, 1, "{fence:?}: {:?}", self.at_receiver);
        }
        assert_eq!((self.sender.due(), self.receiver.due()), (None, None));
    }

    /// Exactly the rows of some tokens are stored, in all layers, with their own bytes.
    pub fn check_rows(&self, fence: Fence, tokens: std::ops::Range<u32>) {
        let own = |key: &&Key| key.0 == fence;
        let found: Vec<Key> = self.memory.stored.keys().filter(own).copied().collect();
        let wanted: Vec<Key> =
            (0..LAYERS).flat_map(|layer| tokens.clone().map(move |token| (fence, layer, token))).collect();
        assert_eq!(found, wanted);
        for (key, bytes) in self.memory.stored.iter().filter(|(key, _)| own(key)) {
            assert_eq!(*bytes, row(fence.request, key.1, key.2), "{key:?}");
        }
    }

    pub fn is_whole(&self, fence: Fence) -> bool {
        self.at_receiver.contains(&receiver::Event::Whole { fence })
    }

    /// Why a request ended at the sender.
    pub fn ended(&self, request: u64) -> Vec<forebay::transfer::Reason> {
        let ended = self.at_sender.iter().filter_map(|event| match event {
            sender::Event::Ended { request: of, reason } if *of == request => Some(*reason),
            _ => None,
        });
        ended.collect()
    }

    /// Why a use of pages failed at the receiver.
    pub fn failed(&self, fence: Fence) -> Vec<Error> {
        let failed = self.at_receiver.iter().filter_map(|event| match event {
            receiver::Event::Failed { fence: of, error } if *of == fence => Some(error.clone()),
            _ => None,
        });
        failed.collect()
    }
}
