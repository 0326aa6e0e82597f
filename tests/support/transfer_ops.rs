//! The body of the fuzz target `transfer_ops`, which `tests/transfer.rs` replays: bytes become calls of a sender and a
//! receiver, frames between them that are lost, repeated, changed and forged, and time.
//!
//! **What must hold.** No call panics, and a machine rests after a bounded number of polls. What is stored was fetched
//! right before, has a digest that the frame told for its use, has rows that were not there, and is of a use that has
//! not ended. A layer that is ready has all its rows. The sender reads only what it holds, and releases it once.
//! Landing pages within reach are no more than the option says. When the connections are gone and the requests given up
//! nothing is left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use forebay::transfer::receiver::{self, Mover, Wanted, Where};
use forebay::transfer::sender::{self, Computed, Source};
use forebay::transfer::{
    Component, Fence, Frame, LayerPlaces, Of, Place, Plan, Rank, Receiver, Request, Run, Sender, Side, Split,
    Stage,
};
use forebay::{Error, Kind, Result};

const LAYERS: u32 = 2;
const PAGE: u32 = 3;
const LANDING: u32 = 24;
const REQUESTS: u32 = 4;
const WINDOW: u32 = 5;

/// What a run of operations has seen, so that tests know that it came far enough.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub whole: u32,
    pub failed: u32,
    pub stored: u32,
    /// Frames that ended a connection.
    pub refused: u32,
    pub wrong: u32,
    pub writes: u32,
}

/// Rows of two bytes, the sender's and the receiver's side alike.
fn side() -> Side {
    let place = |layer: u32| Place { component: 0, plane: layer, offset: 1, token_stride: 3, head_stride: 2 };
    Side {
        components: vec![Component { name: "kv".into(), dtype: "bf16".into(), heads: 1, head_bytes: 2 }],
        stages: vec![Stage {
            layers: (0..LAYERS).map(|layer| LayerPlaces { layer, places: vec![place(layer)] }).collect(),
            page_bytes: vec![u64::from(3 * PAGE + 1); LAYERS as usize],
        }],
        width: 1,
        split: Split::Heads,
        replicas: 1,
        page_tokens: PAGE,
    }
}

/// The input, byte by byte; zeros after its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn below(&mut self, end: u32) -> u32 {
        u32::from(self.byte()) % end
    }

    /// Mostly small; sometimes any.
    fn number(&mut self) -> u32 {
        match self.byte() {
            255 => u32::from_le_bytes([0; 4].map(|_: u8| self.byte())),
            other => u32::from(other % 16),
        }
    }

    fn bytes(&mut self, most: u32) -> Vec<u8> {
        let count = self.below(most);
        (0..count).map(|_| self.byte()).collect()
    }
}

/// CRC32C, a bit at a time.
fn sum(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82F6_3B78 } else { crc >> 1 };
        }
    }
    !crc
}

/// The digest of a run by its definition.
fn digest(fence: Fence, run: &Run, bytes: &[u8]) -> u32 {
    let name =
        [run.layer, run.component, run.token, run.tokens, run.head, run.heads, run.to.stage, run.to.lane];
    let fence = [fence.request, fence.generation].map(u64::to_le_bytes).concat();
    sum(&[fence, name.map(u32::to_le_bytes).concat(), sum(bytes).to_le_bytes().to_vec()].concat())
}

type Key = (Fence, u32, u32);

/// What both ends read and write.
#[derive(Default)]
struct Memory {
    far: bool,
    held: BTreeMap<u64, Computed>,
    next: u64,
    landed: BTreeMap<Key, [u8; 2]>,
    /// The next fetch reads wrong bytes.
    spoil: bool,
    /// The digests that the frame of this call tells.
    told: BTreeSet<(Fence, u32)>,
    fetched: Option<(Fence, Run, Vec<u8>)>,
    open: BTreeSet<Fence>,
    stored: BTreeSet<Key>,
    seen: Seen,
}

impl Memory {
    fn rows(&self, origin: u64, run: &Run) -> Option<Vec<u8>> {
        let part = self.held.get(&origin)?;
        let row = |token: u32| [part.request as u8 ^ run.layer as u8 ^ 0xA0, token as u8];
        Some((run.token..run.token + run.tokens).flat_map(row).collect())
    }
}

impl Source for Memory {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        let rows = self.rows(origin, run);
        assert!(rows.is_some(), "the sender reads what it has released");
        into.copy_from_slice(&rows.unwrap());
        Ok(())
    }
}

impl Mover for Memory {
    fn fetch(&mut self, _: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        let wrong = || Error::new(Kind::OutOfRange, "fetch");
        match at {
            Where::Landing(_) => {
                for (token, bytes) in (run.token..).zip(into.chunks_exact_mut(2)) {
                    bytes.copy_from_slice(self.landed.get(&(fence, run.layer, token)).ok_or_else(wrong)?);
                }
            }
            Where::Origin { origin, .. } => into.copy_from_slice(&self.rows(origin, run).ok_or_else(wrong)?),
        }
        if std::mem::take(&mut self.spoil) {
            into[0] ^= 0x40;
            self.seen.wrong += 1;
        }
        self.fetched = Some((fence, *run, into.to_vec()));
        Ok(())
    }

    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        assert_eq!(self.fetched.take(), Some((fence, *run, bytes.to_vec())), "other bytes are stored");
        assert!(self.told.contains(&(fence, digest(fence, run, bytes))), "unchecked bytes are stored");
        assert!(self.open.contains(&fence), "rows are stored for a use that has ended");
        // Parts may overlap here, and so may runs.
        let rows = (run.token..run.token + run.tokens).map(|token| (fence, run.layer, token));
        let fresh = rows.clone().any(|row| !self.stored.contains(&row));
        assert!(fresh, "a run is stored twice");
        self.stored.extend(rows);
        self.seen.stored += 1;
        Ok(())
    }

    fn holds(&mut self, _: u32) -> bool {
        true
    }
}

struct Ops {
    sender: Sender,
    receiver: Receiver,
    memory: Memory,
    now: Duration,
    /// The connection that is there now; each has a number of its own.
    link: u32,
    queues: [VecDeque<Vec<u8>>; 2],
    writes: VecDeque<(u64, Fence, Computed, Option<Vec<u32>>)>,
    generation: u64,
    /// Tokens by use, and whether it ended: whole, failed or given up.
    uses: BTreeMap<Fence, (std::ops::Range<u32>, u32)>,
    drained: Vec<Fence>,
    /// How often each request has begun and not ended.
    begun: BTreeMap<u64, u32>,
}

/// Runs operations that the bytes say.
pub fn transfer_ops(bytes: &[u8]) -> Seen {
    let mut input = Input(bytes);
    let rank = Rank { instance: 1, replica: 0, stage: 0, lane: 0 };
    let kind = input.byte();
    let sending = sender::Options {
        bulk_tokens: u32::from(kind >> 1 & 1) * 4,
        bytes_per_second: u64::from(kind >> 2 & 1) * 1000,
        notice_bytes: 1 << 20,
        digests: true,
        repeats: 2,
        resend: Duration::from_millis(50),
        patience: Duration::from_millis(400),
        requests: REQUESTS,
    };
    let resend = Duration::from_millis(60);
    let patience = Duration::from_millis(500);
    let receiving = receiver::Options {
        window: WINDOW,
        requests: REQUESTS,
        landing: LANDING,
        digests: true,
        resend,
        patience,
    };
    let mut ops = Ops {
        sender: Sender::new(side(), rank, sending).unwrap(),
        receiver: Receiver::new(side(), rank, receiving).unwrap(),
        memory: Memory { far: kind & 1 == 1, ..Memory::default() },
        now: Duration::ZERO,
        link: 0,
        queues: [VecDeque::new(), VecDeque::new()],
        writes: VecDeque::new(),
        generation: 0,
        uses: BTreeMap::new(),
        drained: Vec::new(),
        begun: BTreeMap::new(),
    };
    ops.connect();
    while !input.0.is_empty() {
        ops.operation(&mut input);
        assert!(ops.receiver.quarantine().reached() <= LANDING);
    }
    ops.close()
}

impl Ops {
    fn connect(&mut self) {
        self.sender.connect(self.link, self.memory.far).unwrap();
        self.receiver.connect(self.link, self.memory.far).unwrap();
    }

    fn operation(&mut self, input: &mut Input<'_>) {
        let request = || u64::from(REQUESTS) - 1;
        match input.below(20) {
            0 => {
                let of = u64::from(input.byte()) & request();
                self.begin(of, input);
            }
            1 => self.grant(u64::from(input.byte()) & request(), input),
            2 => {
                // Both ends, in the order that goes well.
                let of = u64::from(input.byte()) & request();
                self.begin(of, input);
                self.grant(of, input);
            }
            3 | 4 => {
                let (of, layer) = (u64::from(input.byte()) & request(), input.below(LAYERS + 1));
                let tokens = self.tokens(of, input);
                let from = if input.byte() < 64 { input.below(4) } else { 0 };
                self.compute(of, layer, from..from.max(tokens));
            }
            5 => {
                let of = u64::from(input.byte()) & request();
                let tokens = self.tokens(of, input);
                (0..LAYERS).for_each(|layer| self.compute(of, layer, 0..tokens));
                for kind in [1, 2] {
                    let _ = self.sender.payload(of, kind, b"xy");
                }
            }
            6 => {
                let _ = self.sender.payload(u64::from(input.byte()) & request(), input.byte() & 3, b"xy");
            }
            7 => drop(self.sender.finish(u64::from(input.byte()) & request())),
            8 => match input.byte() & 31 {
                0 => drop(self.sender.abort(u64::from(input.byte()) & request())),
                1 => {
                    let fence = Fence { request: input.byte().into(), generation: input.byte().into() };
                    self.give_up(fence);
                }
                _ => {}
            },
            9 => self.now += Duration::from_millis(u64::from(input.byte()) / 2),
            10 | 11 => self.settle(),
            12 => drop(self.deliver(0)),
            13 => drop(self.deliver(1)),
            14 => self.poll(),
            15 => self.spoil(input),
            16 => self.land(input.byte() == 0),
            17 => self.memory.spoil = input.byte() & 1 == 0,
            18 => self.forge(input),
            _ => {
                if input.byte() & 15 == 0 {
                    self.cut();
                }
            }
        }
    }

    /// Loses, repeats, delays or changes the next frame of a queue.
    fn spoil(&mut self, input: &mut Input<'_>) {
        let queue = &mut self.queues[usize::from(input.byte() & 1)];
        match (input.byte() & 3, queue.pop_front()) {
            (0, Some(_)) | (_, None) => {}
            (1, Some(frame)) => queue.extend([frame.clone(), frame]),
            (2, Some(frame)) => queue.push_back(frame),
            (_, Some(mut frame)) => {
                let end = frame.len() - 4;
                let at = input.number() as usize % end;
                frame[at] ^= input.byte();
                let sum = sum(&frame[..end]);
                frame[end..].copy_from_slice(&sum.to_le_bytes());
                queue.push_front(frame);
            }
        }
    }

    /// A frame that no machine has made.
    fn forge(&mut self, input: &mut Input<'_>) {
        let to = usize::from(input.byte() & 1);
        // Mostly a kind that this end takes.
        let kinds = [[3, 3, 5, 7, 8, 1, 2, 9], [2, 2, 4, 4, 6, 1, 3, 9]][to];
        let mut frame = vec![kinds[input.below(8) as usize]];
        frame.extend(input.bytes(80));
        if input.byte() < 64 {
            frame.extend(sum(&frame).to_le_bytes());
            self.queues[to].push_front(frame);
        }
    }

    /// A request's tokens; seldom others.
    fn tokens(&self, request: u64, input: &mut Input<'_>) -> u32 {
        if input.byte() < 8 { input.below(16) } else { 4 + 2 * request as u32 }
    }

    fn begin(&mut self, request: u64, input: &mut Input<'_>) {
        let tokens = self.tokens(request, input);
        let deadline = (input.byte() & 7 == 0).then(|| self.now + Duration::from_millis(300));
        if self.sender.begin(request, tokens, deadline).is_ok() {
            *self.begun.entry(request).or_default() += 1;
        }
    }

    fn compute(&mut self, request: u64, layer: u32, tokens: std::ops::Range<u32>) {
        self.memory.next += 1;
        let origin = self.memory.next;
        let part = Computed { request, layer, tokens, chunk: None, origin };
        self.memory.held.insert(origin, part.clone());
        if self.sender.computed(&[part]).is_err() {
            self.memory.held.remove(&origin);
        }
    }

    fn grant(&mut self, request: u64, input: &mut Input<'_>) {
        let generation = if input.byte() == 0 { input.number().into() } else { self.generation };
        let fence = Fence { request, generation };
        let (tokens, first) = (self.tokens(request, input), input.byte().saturating_sub(250).into());
        let deadline = (input.byte() & 7 == 0).then(|| self.now + Duration::from_millis(300));
        let payloads = [&[][..], &[1], &[1, 2], &[2, 2]][input.below(4) as usize];
        let end = if first < tokens { tokens.div_ceil(PAGE) } else { 0 };
        let pages: Vec<u32> = (first / PAGE..end).collect();
        let landing = if self.memory.far { pages.as_slice() } else { &[] };
        let wanted = Wanted {
            fence,
            tokens,
            first,
            sender: (1, u32::from(input.byte() < 8)),
            payloads,
            landing,
            deadline,
        };
        let before = self.receiver.quarantine().reached();
        match self.receiver.grant(&wanted) {
            Ok(()) => {
                self.generation = generation + 1;
                self.memory.open.insert(fence);
                assert!(self.uses.insert(fence, (first..tokens, 0)).is_none());
            }
            Err(_) => assert_eq!(self.receiver.quarantine().reached(), before),
        }
    }

    fn give_up(&mut self, fence: Fence) {
        if self.receiver.abort(fence).is_ok() {
            self.memory.open.remove(&fence);
            self.uses.get_mut(&fence).unwrap().1 += 1;
        }
    }

    fn poll(&mut self) {
        let mut frame = Vec::new();
        for count in 0.. {
            assert!(count < 3000, "the sender never rests");
            match self.sender.poll(self.now, &mut self.memory, &mut frame).unwrap() {
                None => break,
                Some(sender::Action::Frame { link }) => {
                    assert!(link == self.link && Frame::decode(&frame).is_ok());
                    self.queues[0].push_back(frame.clone());
                }
                Some(sender::Action::Write { link, write, fence, rows, some, .. }) => {
                    assert!(
                        link == self.link && self.memory.far && self.memory.held.contains_key(&rows.origin)
                    );
                    self.writes.push_back((write, fence, rows, some));
                }
                Some(sender::Action::Close { .. }) => self.cut(),
                Some(sender::Action::Event(event)) => self.sent(&event),
            }
        }
        for count in 0.. {
            assert!(count < 3000, "the receiver never rests");
            match self.receiver.poll(self.now, &mut frame) {
                None => break,
                Some(receiver::Action::Frame { link }) => {
                    assert!(link == self.link && Frame::decode(&frame).is_ok());
                    self.queues[1].push_back(frame.clone());
                }
                Some(receiver::Action::Close { .. }) => self.cut(),
                Some(receiver::Action::Event(event)) => self.received(&event),
            }
        }
    }

    fn sent(&mut self, event: &sender::Event) {
        match event {
            sender::Event::Met { .. } | sender::Event::Granted { .. } => {}
            sender::Event::Released { request, origin } => {
                let part = self.memory.held.remove(origin);
                assert_eq!(part.map(|part| part.request), Some(*request), "rows are released twice");
                let written = self.writes.iter().any(|(_, _, rows, _)| rows.origin == *origin);
                assert!(!written, "rows are released while they are written");
            }
            sender::Event::Ended { request, .. } => {
                let left = self.begun.entry(*request).or_default();
                assert!(*left > 0, "a request ends twice");
                *left -= 1;
                // It may have begun anew before its end was polled.
                assert!(*left > 0 || !self.memory.held.values().any(|part| part.request == *request));
            }
        }
    }

    fn received(&mut self, event: &receiver::Event) {
        match event {
            receiver::Event::Met { .. } => {}
            receiver::Event::Ready { fence, layer } => self.check(*fence, *layer),
            receiver::Event::Payload { fence, .. } => assert!(self.uses.contains_key(fence)),
            receiver::Event::Whole { fence } => {
                (0..LAYERS).for_each(|layer| self.check(*fence, layer));
                self.end(*fence);
                self.memory.seen.whole += 1;
            }
            receiver::Event::Failed { fence, .. } => {
                self.end(*fence);
                self.memory.seen.failed += 1;
            }
            receiver::Event::Drained { fence } => self.drained.push(*fence),
            receiver::Event::Free { landing } => assert!(!landing.is_empty()),
        }
    }

    fn end(&mut self, fence: Fence) {
        self.memory.open.remove(&fence);
        self.uses.get_mut(&fence).unwrap().1 += 1;
    }

    /// All rows of a layer of a use are stored.
    fn check(&self, fence: Fence, layer: u32) {
        for token in self.uses[&fence].0.clone() {
            assert!(self.memory.stored.contains(&(fence, layer, token)), "a layer is ready without its rows");
        }
    }

    /// One frame arrives: 0 at the receiver, 1 at the sender.
    fn deliver(&mut self, to: usize) -> bool {
        let Some(frame) = self.queues[to].pop_front() else { return false };
        self.memory.told.clear();
        if let (0, Ok(Frame::Notice(notice))) = (to, Frame::decode(&frame)) {
            let told = notice.parts().flat_map(|part| {
                let fence = part.fence;
                part.digests.iter().filter_map(move |(_, digest)| Some((fence, digest?)))
            });
            self.memory.told = told.collect();
        }
        let done = match to {
            0 => self.receiver.frame(self.link, &frame, &mut self.memory),
            _ => self.sender.frame(self.link, &frame),
        };
        if let Err(error) = done {
            let kinds =
                [Kind::BadFormat, Kind::BadVersion, Kind::InvalidConfig, Kind::Unsupported, Kind::OutOfRange];
            assert!(kinds.contains(&error.kind()) || error.kind() == Kind::Exhausted, "{error}");
            self.memory.seen.refused += 1;
            self.cut();
        }
        true
    }

    /// A write lands, as far as its rows are there.
    fn land(&mut self, failed: bool) {
        let Some((write, fence, rows, some)) = self.writes.pop_front() else { return };
        let plan = Plan::new(&side(), &side()).unwrap();
        let request = Request { tokens: rows.tokens.end, replicas: [0, 0], chunks: &[] };
        let mut index = 0;
        let visit = |run: Run| {
            if some.as_ref().is_none_or(|some| some.contains(&index)) {
                let bytes = self.memory.rows(rows.origin, &run);
                assert!(bytes.is_some(), "rows are written that were released");
                let bytes = bytes.unwrap();
                for (token, bytes) in (run.token..).zip(bytes.chunks_exact(2)) {
                    self.memory.landed.insert((fence, run.layer, token), [bytes[0], bytes[1]]);
                }
            }
            index += 1;
            Ok(())
        };
        plan.runs(&request, (rows.layer, rows.tokens.clone()), Of::All, visit).unwrap();
        self.memory.seen.writes += 1;
        self.sender.written(self.link, write, failed);
    }

    fn settle(&mut self) {
        for _ in 0..200 {
            self.poll();
            let arrived = [self.deliver(0), self.deliver(1)];
            let lands = !self.writes.is_empty();
            self.land(false);
            if arrived == [false; 2] && !lands {
                return;
            }
        }
    }

    /// The connection breaks, and another one is made.
    fn cut(&mut self) {
        self.disconnect();
        self.link += 1;
        self.connect();
    }

    fn disconnect(&mut self) {
        self.queues.iter_mut().for_each(VecDeque::clear);
        self.writes.clear();
        self.sender.disconnect(self.link);
        self.receiver.disconnect(self.link);
        self.receiver.destroyed(self.link).unwrap();
    }

    /// Ends everything. Nothing is left.
    fn close(mut self) -> Seen {
        self.disconnect();
        for request in 0..u64::from(REQUESTS) {
            let _ = self.sender.abort(request);
        }
        self.poll();
        assert!(self.begun.values().all(|count| *count == 0), "requests never end: {:?}", self.begun);
        assert!(self.memory.held.is_empty(), "rows are held: {:?}", self.memory.held);
        assert_eq!(self.receiver.quarantine().reached(), 0);
        assert_eq!((self.sender.due(), self.receiver.due()), (None, None));
        assert!(self.uses.values().all(|(_, ends)| *ends == 1), "{:?}", self.uses);
        self.drained.sort_unstable();
        assert!(self.uses.keys().eq(&self.drained), "{:?} {:?}", self.uses, self.drained);
        self.memory.seen
    }
}
