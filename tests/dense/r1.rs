//! DeepSeek-R1 in BF16 from 16 prefill ranks to 32 decode ranks, through the machines of the transfer, into dense
//! caches: every row of every layer is in its page, byte for byte.
//!
//! A published deployment prefills with tensor parallel attention over 16 ranks, all of which have a prompt's latents,
//! and decodes with a replica of attention on each of 32 ranks. The frames go over queues that lose nothing. Rows are
//! made where they are read, from their request, layer and token.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::device::TestDevice;
use forebay::dense::{Cache, Config, Open, Shape, Way};
use forebay::device::Stream;
use forebay::device::host::HostOptions;
use forebay::transfer::receiver::{self, Mover, Wanted, Where};
use forebay::transfer::sender::{self, Computed, Source};
use forebay::transfer::{
    Chunk, Component, Fence, Frame, LayerPlaces, Place, Rank, Receiver, Run, Sender, Side, Split, Stage,
};
use forebay::{Accepted, BatchRow, Memory, MicroBatch, Result, Sequence};

const LAYERS: u32 = 61;
/// 512 values of the latent and 64 of the rope key.
const NOPE: u64 = 1024;
const ROW: u64 = NOPE + 128;
const SENDERS: u32 = 16;
const RECEIVERS: u32 = 32;
const PREFILL: u64 = 1;
const DECODE: u64 = 2;

/// A request: its number, the decode rank, the tokens of its prompt, and how it arrives there.
type Asked = (u64, u32, u32, Way);

const ASKED: [Asked; 6] = [
    (11, 0, 300, Way::Direct),
    (12, 0, 129, Way::Host),
    (13, 5, 64, Way::Host),
    (14, 19, 217, Way::Direct),
    (15, 31, 100, Way::Host),
    (16, 31, 191, Way::Direct),
];

/// The bytes of a row.
fn row(request: u64, layer: u32, token: u32) -> [u8; ROW as usize] {
    let mut row = [0; ROW as usize];
    let name = request << 40 | u64::from(layer) << 24 | u64::from(token);
    for (at, word) in row.as_chunks_mut().0.iter_mut().enumerate() {
        *word = (name.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (at as u64) << 48).to_le_bytes();
    }
    row
}

/// A side with a plane for each layer, whose rows are the latent with its rope key behind it.
fn side(width: u32, split: Split, replicas: u32, page_tokens: u32) -> Side {
    let component = |name: &str, head_bytes| Component {
        name: name.to_owned(),
        dtype: "bf16".to_owned(),
        heads: 1,
        head_bytes,
    };
    let layer = |layer| {
        let place = |component, offset, head_stride| Place {
            component,
            plane: layer,
            offset,
            token_stride: ROW,
            head_stride,
        };
        LayerPlaces { layer, places: vec![place(0, 0, NOPE), place(1, NOPE, ROW - NOPE)] }
    };
    Side {
        components: vec![component("nope", NOPE), component("rope", ROW - NOPE)],
        stages: vec![Stage {
            layers: (0..LAYERS).map(layer).collect(),
            page_bytes: vec![u64::from(page_tokens) * ROW; LAYERS as usize],
        }],
        width,
        split,
        replicas,
        page_tokens,
    }
}

/// The memory of a prefill rank. A part's origin is its request.
#[derive(Clone, Copy)]
struct Prefill {
    lane: u32,
    page_tokens: u32,
    /// Of a side that divides tokens the chunk of each request.
    chunk: Option<Chunk>,
}

impl Prefill {
    fn bytes(&self, request: u64, run: &Run, into: &mut [u8]) {
        assert_eq!(run.from.lane, self.lane);
        for (piece, into) in (0..).zip(into.chunks_exact_mut(run.bytes as usize)) {
            let at = run.from.offset + piece * run.from.stride;
            let own = run.from.page * self.page_tokens + (at / ROW) as u32;
            let token = self.chunk.map_or(own, |chunk| self.lane * chunk.slice + own - chunk.at);
            let first = (at % ROW) as usize;
            into.copy_from_slice(&row(request, run.layer, token)[first..][..run.bytes as usize]);
        }
    }

    /// The tokens of a prompt that this rank has.
    fn tokens(&self, tokens: u32) -> std::ops::Range<u32> {
        let Some(Chunk { at, slice, .. }) = self.chunk else { return 0..tokens };
        let local = |token: u32| (token * slice).saturating_sub(at).min(tokens);
        local(self.lane)..local(self.lane + 1)
    }
}

impl Source for Prefill {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.bytes(origin, run, into);
        Ok(())
    }
}

/// The cache of a decode rank, and what arrives there.
struct Decode {
    test: Arc<TestDevice>,
    cache: Cache,
    main: Stream,
    copies: Stream,
    prefill: Vec<Prefill>,
    arriving: BTreeMap<Fence, (Sequence, Way, u32)>,
    /// A layer and token whose rows are not stored: a mover that loses some.
    loses: Option<(u32, u32)>,
}

impl Decode {
    fn new(rank: u32, prefill: Vec<Prefill>, loses: Option<(u32, u32)>) -> Decode {
        let test = TestDevice::host(HostOptions::default());
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let mut config = Config { memory, ..Config::new(Shape::deepseek_v3(2), 2, 304) };
        (config.host_pages, config.bring_layers) = (vec![5], 1 + rank % 2 * 9);
        let cache = Cache::new(config, test.device()).unwrap();
        let [main, copies] = [(); 2].map(|()| test.device().stream().unwrap());
        Decode { test, cache, main, copies, prefill, arriving: BTreeMap::new(), loses }
    }

    fn arrive(&mut self, fence: Fence, tokens: u32, way: Way) {
        let open = Open { prompt: tokens, promised: 4 };
        let (sequence, ticket) = self.cache.arrive(&open, way, self.copies).unwrap();
        assert!(ticket.poll().is_some());
        self.arriving.insert(fence, (sequence, way, tokens));
    }

    /// A layer has all rows; each is declared once.
    fn ready(&mut self, fence: Fence, layer: u32) {
        let (sequence, way, tokens) = self.arriving[&fence];
        self.cache.append_layer_in_place(sequence, layer, tokens).unwrap();
        if way == Way::Host {
            self.cache.bring_layer(sequence, layer, self.copies).unwrap();
        }
    }

    /// The first row that is not the one that was sent.
    fn wrong(&self, fence: Fence) -> Option<(u32, u32)> {
        let (sequence, _, tokens) = self.arriving[&fence];
        let pages = self.cache.pages(sequence, 0).unwrap();
        let planes: Vec<_> = self.cache.planes(0).unwrap().collect();
        let mut found = [0; ROW as usize];
        let mut all = (0..LAYERS).flat_map(|layer| (0..tokens).map(move |token| (layer, token)));
        all.find(|(layer, token)| {
            // A page of a layer has the rows of 64 tokens, one after the other.
            let at = (u64::from(pages[*token as usize / 64]) * 64 + u64::from(token % 64)) * ROW;
            self.test.read(planes[*layer as usize].memory.part(at, ROW).unwrap(), &mut found).unwrap();
            found != row(fence.request, *layer, *token)
        })
    }

    /// A step of both sequences of the rank.
    fn step(&mut self) -> Vec<u32> {
        let rows: Vec<_> = self.arriving.values().collect();
        let rows: Vec<_> = rows
            .into_iter()
            .map(|(sequence, ..)| BatchRow {
                sequence: *sequence,
                accepted: Accepted::Rows(0),
                query_rows: 1,
            })
            .collect();
        let mut step = self.cache.prepare(MicroBatch(0), &rows, None, self.main).unwrap();
        (0..LAYERS).for_each(|layer| self.cache.arrived(&step, layer, self.main).unwrap());
        self.cache.finish(&mut step, self.main).unwrap();
        self.cache.retire(step, self.main).unwrap().lengths().to_vec()
    }
}

impl Mover for Decode {
    fn fetch(&mut self, link: u32, _: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        let Where::Origin { origin, .. } = at else { unreachable!("no sender writes from afar") };
        self.prefill[(link % SENDERS) as usize].bytes(origin, run, into);
        Ok(())
    }

    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        let (sequence, way, _) = self.arriving[&fence];
        for (piece, bytes) in (0..).zip(bytes.chunks_exact(run.bytes as usize)) {
            let at = run.to.offset + piece * run.to.stride;
            let lost = (run.layer, run.to.page * 64 + (at / ROW) as u32);
            if self.loses == Some(lost) {
                continue;
            }
            if way == Way::Host {
                self.cache.store(sequence, (run.layer, 0), run.to.page, at, bytes)?;
                continue;
            }
            let view = self.cache.config().view(run.layer, 0).unwrap();
            let page = u64::from(self.cache.pages(sequence, 0)?[run.to.page as usize]);
            let plane = self.cache.planes(0)?.nth(view.plane).unwrap();
            let to = plane.memory.part(page * view.stride + view.offset + at, run.bytes)?;
            self.test.write(to, bytes)?;
        }
        Ok(())
    }

    fn holds(&mut self, _: u32) -> bool {
        true
    }
}

struct World {
    senders: Vec<(Sender, Prefill)>,
    receivers: Vec<Receiver>,
    /// The ranks that have requests.
    ranks: BTreeMap<u32, Decode>,
    /// Frames on their way, each with its connection: receiver by receiver one for each sender.
    frames: VecDeque<(u32, bool, Vec<u8>)>,
    /// How many layers of a request are ready.
    ready: BTreeMap<u64, u32>,
    /// The lanes that told rows.
    told: BTreeSet<u32>,
}

impl World {
    fn new(split: Split, loses: Option<(u32, u32)>) -> World {
        let source = side(SENDERS, split, 1, 128);
        let target = side(1, Split::Heads, RECEIVERS, 64);
        // Each request is a part of a batch of its own, behind 37 tokens of others: 23 tokens a rank.
        let chunk = (split == Split::Tokens).then_some(Chunk { first: 0, at: 37, slice: 23 });
        let prefill: Vec<_> = (0..SENDERS).map(|lane| Prefill { lane, page_tokens: 128, chunk }).collect();
        let sending = sender::Options { bulk_tokens: 0, ..sender::Options::default() };
        let sender = |own: &Prefill| {
            let rank = Rank { instance: PREFILL, replica: 0, stage: 0, lane: own.lane };
            let mut sender = Sender::new(source.clone(), rank, sending).unwrap();
            (0..RECEIVERS).for_each(|to| sender.connect(to * SENDERS + own.lane, false).unwrap());
            (sender, *own)
        };
        let receiver = |replica| {
            let rank = Rank { instance: DECODE, replica, stage: 0, lane: 0 };
            let mut receiver = Receiver::new(target.clone(), rank, receiver::Options::default()).unwrap();
            (0..SENDERS).for_each(|from| receiver.connect(replica * SENDERS + from, false).unwrap());
            receiver
        };
        let ranks: BTreeSet<u32> = ASKED.iter().map(|(_, rank, ..)| *rank).collect();
        World {
            senders: prefill.iter().map(sender).collect(),
            receivers: (0..RECEIVERS).map(receiver).collect(),
            ranks: ranks.iter().map(|rank| (*rank, Decode::new(*rank, prefill.clone(), loses))).collect(),
            frames: VecDeque::new(),
            ready: BTreeMap::new(),
            told: BTreeSet::new(),
        }
    }

    /// Until nothing is left to be done without time passing.
    fn pump(&mut self) {
        while self.poll() || !self.frames.is_empty() {
            while let Some((link, down, frame)) = self.frames.pop_front() {
                let (rank, lane) = (link / SENDERS, link % SENDERS);
                if !down {
                    self.senders[lane as usize].0.frame(link, &frame).unwrap();
                    continue;
                }
                if let Frame::Notice(_) = Frame::decode(&frame).unwrap() {
                    self.told.insert(lane);
                }
                let receiver = &mut self.receivers[rank as usize];
                match self.ranks.get_mut(&rank) {
                    Some(decode) => receiver.frame(link, &frame, decode).unwrap(),
                    None => receiver.frame(link, &frame, &mut Nothing).unwrap(),
                }
            }
        }
    }

    /// Takes what the machines want done. Returns whether there was anything.
    fn poll(&mut self) -> bool {
        let (mut frame, mut any) = (Vec::new(), false);
        for (sender, prefill) in &mut self.senders {
            while let Some(action) = sender.poll(Duration::ZERO, prefill, &mut frame).unwrap() {
                any = true;
                match action {
                    sender::Action::Frame { link } => self.frames.push_back((link, true, frame.clone())),
                    sender::Action::Event(_) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        for (rank, receiver) in (0..).zip(&mut self.receivers) {
            while let Some(action) = receiver.poll(Duration::ZERO, &mut frame) {
                any = true;
                match action {
                    receiver::Action::Frame { link } => self.frames.push_back((link, false, frame.clone())),
                    receiver::Action::Event(receiver::Event::Ready { fence, layer }) => {
                        *self.ready.entry(fence.request).or_default() += 1;
                        self.ranks.get_mut(&rank).unwrap().ready(fence, layer);
                    }
                    receiver::Action::Event(receiver::Event::Whole { fence }) => {
                        let decode = self.ranks.get_mut(&rank).unwrap();
                        let (sequence, ..) = decode.arriving[&fence];
                        drop(decode.cache.join(sequence, decode.copies).unwrap());
                    }
                    receiver::Action::Event(
                        receiver::Event::Met { .. } | receiver::Event::Drained { .. },
                    ) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        any
    }

    /// All requests, layer by layer. Returns the fence of each.
    fn serve(&mut self) -> Vec<(u32, Fence)> {
        self.pump();
        let mut fences = Vec::new();
        for (generation, (request, rank, tokens, way)) in (0..).zip(ASKED) {
            let fence = Fence { request, generation };
            self.ranks.get_mut(&rank).unwrap().arrive(fence, tokens, way);
            let (sender, payloads, landing) = ((PREFILL, 0), &[][..], &[][..]);
            let wanted = Wanted { fence, tokens, first: 0, sender, payloads, landing, deadline: None };
            self.receivers[rank as usize].grant(&wanted).unwrap();
            fences.push((rank, fence));
        }
        for (sender, _) in &mut self.senders {
            ASKED.iter().for_each(|(request, _, tokens, _)| sender.begin(*request, *tokens, None).unwrap());
        }
        for layer in 0..LAYERS {
            for (sender, prefill) in &mut self.senders {
                for (request, _, tokens, _) in ASKED {
                    let (tokens, chunk) = (prefill.tokens(tokens), prefill.chunk);
                    if !tokens.is_empty() {
                        let part = Computed { request, layer, tokens, chunk, origin: request };
                        sender.computed(&[part]).unwrap();
                    }
                }
            }
            self.pump();
            // The next layer is not computed yet.
            assert!(ASKED.iter().all(|(request, ..)| self.ready[request] == layer + 1), "layer {layer}");
        }
        for (sender, _) in &mut self.senders {
            ASKED.iter().for_each(|(request, ..)| sender.finish(*request).unwrap());
        }
        self.pump();
        fences
    }
}

/// A rank without requests moves nothing.
struct Nothing;

impl Mover for Nothing {
    fn fetch(&mut self, _: u32, _: Fence, _: Where, run: &Run, _: &mut [u8]) -> Result<()> {
        panic!("{run:?}")
    }

    fn store(&mut self, _: Fence, run: &Run, _: &[u8]) -> Result<()> {
        panic!("{run:?}")
    }

    fn holds(&mut self, _: u32) -> bool {
        true
    }
}

fn serves(split: Split) {
    let mut world = World::new(split, None);
    let fences = world.serve();
    for (rank, fence) in &fences {
        assert_eq!(world.ranks[rank].wrong(*fence), None, "request {}", fence.request);
    }
    let most = if split == Split::Heads { SENDERS } else { (37 + 300_u32).div_ceil(23) };
    let first = if split == Split::Heads { 0 } else { 37 / 23 };
    assert_eq!(world.told, (first..most).collect(), "the lanes that have rows told them");
    for decode in world.ranks.values_mut() {
        let tokens: Vec<u32> = decode.arriving.values().map(|(.., tokens)| *tokens).collect();
        assert_eq!(decode.step(), tokens);
        decode.cache.validate().unwrap();
        for (sequence, ..) in decode.arriving.values() {
            decode.cache.close(*sequence, decode.main).unwrap();
        }
        let stats = decode.cache.stats();
        assert_eq!((stats.sequences, stats.tiers[0].free_host_pages, stats.free_pages[0]), (0, 5, 10));
    }
    // Of those through the host each page came up once.
    let up: u64 = world.ranks.values().map(|decode| decode.cache.stats().bytes_up).sum();
    assert_eq!(up, (3 + 1 + 2) * 64 * ROW * u64::from(LAYERS));
}

#[test]
fn r1_arrives_from_16_ranks_that_all_have_a_prompt_at_ranks_of_32() {
    serves(Split::Heads);
}

/// Sequence parallel prefill: each rank has 23 tokens of a request's batch.
#[test]
fn r1_arrives_from_16_ranks_that_divide_a_prompt_at_ranks_of_32() {
    serves(Split::Tokens);
}

#[test]
fn control_a_row_that_is_not_stored_is_missed() {
    let mut world = World::new(Split::Heads, Some((60, 63)));
    for (rank, fence) in world.serve() {
        assert_eq!(world.ranks[&rank].wrong(fence), Some((60, 63)), "request {}", fence.request);
    }
}
