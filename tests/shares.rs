//! Shared budgets: what a cache with [`Config::share`] gives each sequence, when it moves slots, and what it never
//! does.
//! The division itself is tested in `src/sparse/share.rs`; `tests/world.rs` checks every row in random runs.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "shares/asks.rs"]
mod asks;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[path = "shares/learnt.rs"]
mod learnt;

use std::sync::Arc;

use device::TestDevice;
use forebay::device::host::HostOptions;
use forebay::device::{Slice, Stream};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Cache, Config, Kind, Memory, MicroBatch, Open, Sequence, Shape,
    Share, ShareBy, Slots, Step, Streams, WarmUp,
};

const K: u32 = 16;
const LAYERS: u32 = 2;
/// Rows in flight: a step of one query row, of at most two steps.
const FLIGHT: u32 = 2;
/// Slots of a layer: 16 blocks.
const POOL: u32 = 1024;

struct Engine {
    cache: Cache,
    device: Arc<TestDevice>,
    stream: Stream,
    selection: Slice,
    slots: Slice,
    drawn: u64,
    lengths: Vec<(Sequence, u32)>,
    /// The misses of each layer in the last retired step.
    missed: Vec<u32>,
}

fn share() -> Share {
    Share { bytes_a_step: 1 << 30, resizes_a_step: 100, ..Share::default() }
}

fn config(share: Share) -> Config {
    let shape = Shape { layers: LAYERS, runs: [32, 0], page_tokens: 16, top_k: K, ..Shape::DEEPSEEK_V3_2 };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let slots = Slots::Uniform(POOL);
    Config { memory, slots, min_budget: K, share: Some(share), ..Config::new(shape, 8, 2_000, 64) }
}

/// A step's counts.
#[derive(Debug, PartialEq, Eq)]
struct Counts {
    hits: u64,
    misses: u64,
}

impl Engine {
    fn new(config: Config) -> Engine {
        Engine::on(HostOptions::default(), config)
    }

    /// Streams run only when they are waited for, or by threads of their own.
    fn threaded(config: Config) -> Engine {
        Engine::on(HostOptions { threaded: true, ..HostOptions::default() }, config)
    }

    fn on(options: HostOptions, config: Config) -> Engine {
        let device = TestDevice::new(options);
        let words = u64::from(LAYERS * config.batch * K);
        let buffer = || device.allocate(4 * words).unwrap();
        let (selection, slots) = (buffer(), buffer());
        let stream = device.stream().unwrap();
        let cache = Cache::new(config, device.device()).unwrap();
        let (lengths, missed) = (Vec::new(), Vec::new());
        Engine { cache, device, stream, selection, slots, drawn: 0, lengths, missed }
    }

    fn open(
        &mut self,
        prompt: u32,
        promised: u32,
        least: u32,
        bring_up: BringUp,
    ) -> forebay::Result<Sequence> {
        let sequence = self.cache.open(&Open { prompt, promised, budget: Budget::Slots(least), bring_up })?;
        for layer in 0..LAYERS {
            let rows: Vec<u8> =
                (0..prompt).flat_map(|at| [layer as u8, at as u8, (at >> 8) as u8, 7].repeat(8)).collect();
            self.cache.append(sequence, forebay::Layer(layer), &rows).unwrap();
        }
        Ok(sequence)
    }

    /// Opens and joins a sequence with all its rows, if they fit.
    fn start(&mut self, prompt: u32, promised: u32) -> Sequence {
        let sequence = self.open(prompt, promised, K, BringUp::Whole).unwrap();
        self.join(sequence).unwrap();
        sequence
    }

    fn join(&mut self, sequence: Sequence) -> forebay::Result<()> {
        let _ticket = self.cache.join(sequence, self.stream, WarmUp::default())?;
        self.settle();
        self.lengths.push((sequence, self.cache.length(sequence).unwrap().committed));
        self.cache.validate().unwrap();
        Ok(())
    }

    fn settle(&self) {
        self.drain(self.stream);
    }

    fn drain(&self, stream: Stream) {
        let event = self.device.event().unwrap();
        self.device.record(event, stream).unwrap();
        self.device.synchronize(event).unwrap();
    }

    fn close(&mut self, sequence: Sequence) {
        self.cache.close(sequence, self.stream).unwrap();
        self.lengths.retain(|(own, _)| *own != sequence);
        self.settle();
        self.cache.validate().unwrap();
    }

    fn draw(&mut self, below: u32) -> i32 {
        self.drawn =
            self.drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.drawn >> 33) % u64::from(below)) as i32
    }

    /// Begins a step of all joined sequences.
    fn prepare(&mut self) -> Step {
        let all: Vec<Sequence> = self.lengths.iter().map(|(sequence, _)| *sequence).collect();
        self.prepare_of(MicroBatch(0), &all)
    }

    /// Begins a step of these sequences.
    fn prepare_of(&mut self, micro_batch: MicroBatch, sequences: &[Sequence]) -> Step {
        let row = |sequence: &Sequence| BatchRow {
            sequence: *sequence,
            accepted: Accepted::Rows(self.cache.length(*sequence).unwrap().landed),
            query_rows: 1,
        };
        let rows: Vec<BatchRow> = sequences.iter().map(row).collect();
        self.cache.prepare(micro_batch, 1, &rows, None, self.stream).unwrap()
    }

    /// A step of all joined sequences, each with K random rows that it has.
    fn step(&mut self) -> Counts {
        let step = self.prepare();
        self.finish(step)
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            self.step();
        }
    }

    fn finish(&mut self, step: Step) -> Counts {
        let all: Vec<Sequence> = self.lengths.iter().map(|(sequence, _)| *sequence).collect();
        let step = self.enqueue(step, &all);
        self.retire(step)
    }

    /// Enqueues the rest of a step of these sequences, and leaves it in flight.
    fn enqueue(&mut self, mut step: Step, sequences: &[Sequence]) -> Step {
        let length = |own: &Sequence| self.cache.length(*own).unwrap();
        let lengths: Vec<u32> = sequences.iter().map(length).map(|l| l.committed + l.landed).collect();
        let rows = lengths.len();
        let mut words = Vec::new();
        let groups = self.cache.geometries().groups().len() as u32;
        for _ in 0..groups {
            for length in &lengths {
                let mut taken: Vec<i32> = Vec::new();
                while taken.len() < K as usize {
                    let one = self.draw(*length);
                    if !taken.contains(&one) {
                        taken.push(one);
                    }
                }
                words.extend(taken);
            }
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let part = |slice: Slice| slice.part(0, 4 * u64::from(groups * K) * rows as u64).unwrap();
        let (selection, slots) = (part(self.selection), part(self.slots));
        self.device.write(selection, &bytes).unwrap();
        let streams = Streams { resolve: self.stream, gather: self.stream };
        self.cache.layers(&step, streams, selection, slots).unwrap();
        for layer in 0..LAYERS {
            self.cache.scatter(&step, forebay::LayerCall::whole(forebay::Layer(layer)), self.stream).unwrap();
        }
        self.cache.finish(&mut step, self.stream).unwrap();
        step
    }

    fn retire(&mut self, step: Step) -> Counts {
        self.settle();
        let retired = self.cache.retire(step, self.stream).unwrap();
        let (hits, misses) = retired.total();
        self.missed = retired.layers().iter().map(|layer| layer.misses).collect();
        self.cache.validate().unwrap();
        Counts { hits, misses }
    }

    fn budgets(&self) -> Vec<u32> {
        self.lengths.iter().map(|(sequence, _)| self.cache.budgets(*sequence).unwrap()[0]).collect()
    }
}

#[test]
fn a_lone_sequence_never_misses() {
    let mut e = Engine::new(config(share()));
    // It may have 1,000 tokens, and fits the layer from its first step to its last.
    let own = e.start(700, 300);
    assert_eq!(e.cache.budgets(own).unwrap(), [1000 + FLIGHT; 2]);
    for step in 0..300 {
        let counts = e.step();
        assert_eq!(counts, Counts { hits: u64::from(LAYERS * K), misses: 0 }, "step {step}");
    }
    assert_eq!(e.cache.stats().resizes, 0);
}

#[test]
fn as_others_come_all_shrink_and_as_they_end_the_rest_grow() {
    let alone = config(share());
    let grouped = Config { shape: Shape { group_layers: LAYERS, ..alone.shape }, ..alone.clone() };
    [alone, grouped].into_iter().for_each(|config| come_and_go(Engine::new(config)));
}

fn come_and_go(mut e: Engine) {
    let first = e.start(1_000, 900);
    e.step();
    assert_eq!(e.budgets(), [POOL]);
    let second = e.start(1_000, 900);
    e.step();
    assert_eq!(e.budgets(), [POOL / 2; 2]);
    let others = [e.start(1_000, 900), e.start(1_000, 900)];
    // The first step after a join has not retired a step of the new ones; the next one evens out.
    e.run(3);
    assert_eq!(e.budgets(), [POOL / 4; 4]);
    assert_eq!(e.cache.stats().slots_in_use, u64::from(LAYERS * POOL));
    others.into_iter().for_each(|own| e.close(own));
    e.step();
    assert_eq!(e.budgets(), [POOL / 2; 2]);
    e.close(second);
    e.step();
    assert!(e.cache.budgets(first).unwrap().iter().all(|budget| *budget == POOL));
    assert_eq!(e.budgets(), [POOL]);
}

#[test]
fn short_sequences_are_whole_and_long_ones_share_the_rest() {
    let mut e = Engine::new(config(share()));
    let short = e.start(100, 20);
    let long = [e.start(1_500, 100), e.start(1_500, 100)];
    e.run(3);
    assert_eq!(e.cache.budgets(short).unwrap(), [122; 2]);
    // Two of 16 blocks are the short one's.
    long.into_iter().for_each(|own| assert_eq!(e.cache.budgets(own).unwrap(), [7 * 64; 2]));
}

#[test]
fn admission_reclaims_before_it_refuses() {
    let mut e = Engine::new(config(share()));
    let lone = e.open(1_500, 100, 256, BringUp::Nothing).unwrap();
    e.join(lone).unwrap();
    assert_eq!(e.budgets(), [POOL]);
    // All slots are in use, and yet 768 more can be promised, but no more than that.
    let second = e.open(1_500, 100, 512, BringUp::Nothing).unwrap();
    let third = e.open(1_500, 100, 256, BringUp::Nothing).unwrap();
    let refused = e.open(100, 10, K, BringUp::Nothing).unwrap_err();
    assert_eq!((refused.kind(), refused.place()), (Kind::Exhausted, "slot blocks"));
    // While a step of the lone sequence is open, its slots cannot move.
    let step = e.prepare();
    let digest = e.cache.budgets_digest();
    let busy = e.cache.join(second, e.stream, WarmUp::default()).unwrap_err();
    assert_eq!((busy.kind(), e.cache.budgets_digest()), (Kind::Busy, digest));
    e.finish(step);
    e.join(second).unwrap();
    e.join(third).unwrap();
    assert_eq!(e.budgets(), [256, 512, 256]);
    e.run(5);
    assert_eq!(e.budgets(), [256, 512, 256]);
}

#[test]
fn the_bytes_and_resizes_of_a_step_are_bounded() {
    // A block of rows in each layer, and one sequence, a step.
    let bytes = u64::from(64 * 32 * LAYERS);
    let mut e = Engine::new(config(Share { bytes_a_step: bytes, resizes_a_step: 1, ..share() }));
    let lone = e.start(1_500, 100);
    e.step();
    let second = e.open(1_500, 100, 64, BringUp::Nothing).unwrap();
    e.join(second).unwrap();
    // The join takes the block that it was promised; the rest of its share would move too many rows at once.
    assert_eq!(e.budgets(), [POOL - 64, 64]);
    for step in 0..40 {
        let before = e.cache.stats();
        e.step();
        let stats = e.cache.stats();
        assert!(stats.resizes - before.resizes <= 1, "step {step}");
        assert!(stats.moved_rows - before.moved_rows <= u64::from(64 * LAYERS), "step {step}");
    }
    assert_eq!(e.budgets(), [POOL / 2; 2]);
    e.close(second);
    e.run(2);
    assert_eq!(e.cache.budgets(lone).unwrap(), [POOL; 2]);
}

#[test]
fn a_join_shrinks_no_more_sequences_than_the_bytes_of_a_step_allow() {
    let mut e = Engine::new(config(Share { bytes_a_step: u64::from(64 * 32 * LAYERS), ..share() }));
    for _ in 0..3 {
        e.start(1_500, 100);
    }
    e.run(60);
    assert_eq!(e.budgets(), [6 * 64, 5 * 64, 5 * 64]);
    // Its promise costs the bytes of the step; its share would take a block of the second and the third one too.
    e.start(1_500, 100);
    assert_eq!(e.budgets(), [5 * 64, 5 * 64, 5 * 64, 64]);
}

/// The device may have run the first resize or not: the second one waits for a retired step, so it makes no difference.
#[test]
fn a_long_shrink_goes_on_when_a_step_after_its_last_part_is_retired() {
    let bytes = u64::from(64 * 32 * LAYERS);
    let mut e = Engine::new(config(Share { bytes_a_step: bytes, ..share() }));
    let own = e.start(800, 60);
    e.step();
    let second = e.start(1_500, 100);
    assert_eq!(e.budgets(), [860 + FLIGHT, 2 * 64], "no block is lacking, and a whole share is too much");
    // The second one gets more once a step of it is retired.
    e.step();
    let all = [own, second];
    let first = e.prepare_of(MicroBatch(0), &all);
    assert_eq!(e.budgets(), [13 * 64, 3 * 64]);
    let first = e.enqueue(first, &all);
    let next = e.prepare_of(MicroBatch(0), &all);
    assert_eq!(e.budgets(), [13 * 64, 3 * 64]);
    let next = e.enqueue(next, &all);
    e.retire(first);
    let last = e.prepare_of(MicroBatch(0), &all);
    assert_eq!(e.budgets(), [12 * 64, 4 * 64]);
    let last = e.enqueue(last, &all);
    e.retire(next);
    e.retire(last);
}

#[test]
fn small_changes_are_left_alone_and_newcomers_get_their_share_from_all() {
    // Shares by length drift by a block or two in 300 steps.
    let resizes = |least_change| {
        let mut e = Engine::new(config(Share { by: ShareBy::Length, every: 1, least_change, ..share() }));
        e.start(300, 400);
        e.step();
        e.start(1_000, 400);
        e.run(5);
        let before = e.cache.stats().resizes;
        e.run(300);
        e.cache.stats().resizes - before
    };
    assert_eq!(resizes(1), 0);
    assert!(resizes(8) > 0);
    // Eight give a block each, which is less than an eighth of theirs.
    let slots = Slots::Uniform(64 * 72);
    let mut e = Engine::new(Config { slots, lanes: 9, batch: 9, ..config(share()) });
    for _ in 0..8 {
        e.start(1_500, 100);
        e.run(2);
    }
    assert_eq!(e.budgets(), [9 * 64; 8]);
    e.start(1_500, 100);
    assert_eq!(e.budgets(), [8 * 64; 9]);
}

#[test]
fn a_sequence_that_outgrows_its_budget_gets_slots_that_no_other_needs() {
    let mut e = Engine::new(config(Share { by: ShareBy::Length, ..share() }));
    let grows = e.start(64, 800);
    e.step();
    e.start(600, 110);
    e.run(2);
    for _ in 0..100 {
        let counts = e.step();
        assert_eq!(counts.misses, 0, "{:?} {:?}", e.cache.length(grows), e.budgets());
    }
}

#[test]
fn the_last_slots_that_a_sequence_can_use_are_worth_a_resize() {
    let mut e = Engine::new(config(share()));
    let short = e.start(30, 20);
    let own = e.start(900, 100);
    e.run(2);
    assert_eq!(e.cache.budgets(own).unwrap(), [15 * 64; 2]);
    e.close(short);
    e.step();
    assert_eq!(e.cache.budgets(own).unwrap(), [1000 + FLIGHT; 2]);
}

#[test]
fn an_engine_that_sets_budgets_itself_and_a_share_exclude_each_other() {
    let mut e = Engine::new(config(share()));
    let own = e.start(100, 10);
    let refused = e.cache.resize(own, &Budget::Slots(64), e.stream).unwrap_err();
    assert_eq!((refused.kind(), refused.place()), (Kind::InvalidConfig, "the cache shares its slots"));
    let mut e = Engine::new(Config { share: None, ..config(share()) });
    let refused = e.cache.share_slots(e.stream).unwrap_err();
    assert_eq!((refused.kind(), refused.place()), (Kind::InvalidConfig, "the cache has no share"));
    let device = TestDevice::new(HostOptions::default());
    let bad = config(Share { resizes_a_step: 0, ..share() });
    let refused = Cache::new(bad, device.device()).unwrap_err();
    assert_eq!((refused.kind(), refused.place()), (Kind::InvalidConfig, "resizes_a_step"));
}

#[test]
fn a_share_by_misses_learns_from_the_steps() {
    let mut e = Engine::new(config(Share { by: ShareBy::Misses, every: 4, ..share() }));
    e.start(1_500, 200);
    e.start(300, 200);
    let mut before = 0;
    for step in 0..100 {
        let misses = e.step().misses;
        before += if step < 20 { misses } else { 0 };
    }
    assert!(before > 0);
    assert_eq!(e.cache.stats().slots_in_use, u64::from(LAYERS * POOL));
    assert!(e.budgets().iter().all(|budget| *budget >= K), "{:?}", e.budgets());
}

#[test]
fn ranks_that_make_the_same_calls_have_the_same_budgets() {
    let digests = |third: u32| {
        let mut e = Engine::new(config(Share { by: ShareBy::Misses, every: 3, ..share() }));
        e.start(1_500, 200);
        e.start(300, 200);
        e.run(20);
        e.start(third, 20);
        e.run(3);
        e.cache.budgets_digest()
    };
    assert_eq!(digests(700), digests(700));
    assert_ne!(digests(700), digests(100));
}

#[test]
fn a_fork_takes_its_share_from_its_parent_too() {
    let mut e = Engine::new(config(share()));
    let parent = e.open(1_000, 100, K, BringUp::Nothing).unwrap();
    e.join(parent).unwrap();
    assert_eq!(e.budgets(), [POOL]);
    let open = Open { prompt: 0, promised: 300, budget: Budget::Slots(256), bring_up: BringUp::Nothing };
    let (child, ticket) = e.cache.fork(parent, &open, e.stream).unwrap();
    e.settle();
    assert!(ticket.poll().is_some());
    e.lengths.push((child, 1_000));
    assert_eq!(e.budgets(), [POOL / 2; 2]);
    e.run(3);
    assert_eq!(e.budgets(), [POOL / 2; 2]);
    e.close(parent);
    e.step();
    assert_eq!(e.budgets(), [POOL]);
}

/// The slots that a fork needs are in an open step. `early`: the fork is tried before that step is finished, too.
fn fork_beside_an_open_step(early: bool) -> u64 {
    let mut e = Engine::new(config(share()));
    let parent = e.start(100, 20);
    let other = e.start(1_500, 100);
    assert_eq!(e.budgets(), [122, 14 * 64]);
    let open = Open { prompt: 0, promised: 800, budget: Budget::Slots(640), bring_up: BringUp::Nothing };
    let step = e.prepare_of(MicroBatch(0), &[other]);
    if early {
        let before = (e.cache.stats(), e.cache.budgets_digest());
        let busy = e.cache.fork(parent, &open, e.stream).unwrap_err();
        assert_eq!((busy.kind(), busy.place()), (Kind::Busy, "slots of sequences that cannot shrink now"));
        assert_eq!((e.cache.stats(), e.cache.budgets_digest()), before);
    }
    let step = e.enqueue(step, &[other]);
    e.retire(step);
    let (child, _ticket) = e.cache.fork(parent, &open, e.stream).unwrap();
    e.settle();
    e.lengths.push((child, 100));
    assert!(e.cache.budgets(child).unwrap().iter().all(|budget| *budget >= 640));
    e.run(3);
    e.cache.budgets_digest()
}

#[test]
fn a_fork_that_is_busy_changes_nothing() {
    assert_eq!(fork_beside_an_open_step(true), fork_beside_an_open_step(false));
}

#[test]
fn a_step_moves_budgets_of_its_own_micro_batch_only() {
    let config = Config { micro_batches: 2, ..config(share()) };
    let mut e = Engine::new(config);
    // Short, so that none asks for slots by itself.
    let [a, b] = [e.start(300, 600), e.start(300, 600)];
    for _ in 0..2 {
        // Both steps are open at once.
        let steps = [e.prepare_of(MicroBatch(0), &[a]), e.prepare_of(MicroBatch(1), &[b])];
        let [first, second] = steps;
        let first = e.enqueue(first, &[a]);
        e.retire(first);
        let second = e.enqueue(second, &[b]);
        e.retire(second);
    }
    assert_eq!(e.budgets(), [POOL / 2; 2]);
    let c = e.start(300, 600);
    let third = e.cache.budgets(c).unwrap().to_vec();
    e.close(c);
    let before = e.budgets();
    assert!(before.iter().zip(&third).all(|(own, third)| own + third < POOL), "{before:?} {third:?}");
    // A step of each has been retired since the join took slots from them.
    for (micro, own) in [(MicroBatch(0), a), (MicroBatch(1), b)] {
        let step = e.prepare_of(micro, &[own]);
        assert_eq!(e.budgets(), before, "the resizes of the join are not covered yet");
        let step = e.enqueue(step, &[own]);
        e.retire(step);
    }
    let first = e.prepare_of(MicroBatch(0), &[a]);
    assert_eq!(e.budgets(), [POOL / 2, before[1]]);
    // The other one's turn, while the first one's step is in flight.
    let first = e.enqueue(first, &[a]);
    let second = e.prepare_of(MicroBatch(1), &[b]);
    assert_eq!(e.budgets(), [POOL / 2; 2]);
    e.retire(first);
    let second = e.enqueue(second, &[b]);
    e.retire(second);
}

#[test]
fn a_failed_sequence_keeps_its_slots_until_it_is_truncated() {
    let mut e = Engine::new(config(share()));
    let failed = e.start(1_500, 100);
    e.step();
    let mut step = e.prepare();
    e.cache.abandon(&mut step).unwrap();
    e.cache.finish(&mut step, e.stream).unwrap();
    e.settle();
    assert_eq!(e.cache.retire(step, e.stream).unwrap_err().error.kind(), Kind::Cancelled);
    let second = e.open(1_500, 100, 512, BringUp::Nothing).unwrap();
    let digest = e.cache.budgets_digest();
    assert_eq!(e.join(second).unwrap_err().kind(), Kind::Busy);
    assert_eq!((e.cache.share_slots(e.stream).unwrap(), e.cache.budgets_digest()), (0, digest));
    let length = e.cache.length(failed).unwrap().committed;
    let _ticket = e.cache.truncate(failed, length, e.stream).unwrap();
    e.settle();
    e.join(second).unwrap();
    assert_eq!(e.budgets(), [POOL / 2; 2]);
    e.run(3);
}

/// An engine, on a device whose streams run later or at once, a stream of its own, and a sequence that has not joined.
fn with_a_third(later: bool) -> (Engine, Stream, Sequence) {
    let mut e = if later { Engine::threaded(config(share())) } else { Engine::new(config(share())) };
    let other = e.device.stream().unwrap();
    let third = e.open(1_500, 100, 256, BringUp::Nothing).unwrap();
    (e, other, third)
}

/// A lone sequence whose growth to all slots is enqueued on a stream of its own.
fn grown_on(e: &mut Engine, stream: Stream) -> Sequence {
    let own = e.start(1_500, 100);
    e.step();
    let second = e.start(1_500, 100);
    e.run(2);
    assert_eq!(e.budgets(), [POOL / 2; 2]);
    e.close(second);
    assert_eq!(e.cache.share_slots(stream).unwrap(), 1);
    assert_eq!(e.budgets(), [POOL]);
    own
}

#[test]
fn a_join_whose_slots_are_still_being_resized_is_made_later() {
    let digests = [false, true].map(|waits| {
        let (mut e, other, third) = with_a_third(waits);
        let device = e.device.clone();
        let held = waits.then(|| device.hold(other));
        grown_on(&mut e, other);
        if waits {
            let before = (e.cache.stats(), e.cache.budgets_digest());
            let busy = e.cache.join(third, e.stream, WarmUp::default()).unwrap_err();
            let place = "work of a sequence that must give up slots is in flight";
            assert_eq!((busy.kind(), busy.place()), (Kind::Busy, place));
            assert_eq!((e.cache.stats(), e.cache.budgets_digest()), before);
        }
        drop(held);
        e.drain(other);
        e.join(third).unwrap();
        assert_eq!(e.budgets(), [POOL / 2; 2]);
        e.run(3);
        e.cache.budgets_digest()
    });
    assert_eq!(digests[0], digests[1]);
}

/// What it lacks of its share is no cause to wait.
#[test]
fn a_join_that_finds_its_promise_free_does_not_wait_for_a_resize() {
    let (mut e, other, third) = with_a_third(true);
    let device = e.device.clone();
    let held = device.hold(other);
    let own = e.start(500, 100);
    e.step();
    let second = e.start(1_500, 100);
    e.run(2);
    e.close(second);
    assert_eq!(e.cache.share_slots(other).unwrap(), 1);
    assert_eq!(e.cache.budgets(own).unwrap(), [600 + FLIGHT; 2]);
    let _ticket = e.cache.join(third, e.stream, WarmUp::default()).unwrap();
    assert_eq!(e.cache.budgets(third).unwrap(), [6 * 64; 2]);
    drop(held);
    e.drain(other);
    e.settle();
    e.lengths.push((third, 1_500));
    e.run(3);
    assert_eq!(e.budgets(), [POOL / 2; 2]);
}

/// A slow device and one that works at once give the same budgets, though only one of them has freed the lane.
#[test]
fn the_slots_of_a_closed_sequence_are_free_while_its_resize_is_in_flight() {
    let digests = [false, true].map(|waits| {
        let (mut e, other, third) = with_a_third(waits);
        let device = e.device.clone();
        let held = waits.then(|| device.hold(other));
        let own = grown_on(&mut e, other);
        e.cache.close(own, e.stream).unwrap();
        e.lengths.clear();
        assert_eq!(e.cache.stats().slots_in_use, 0);
        assert_eq!(e.cache.reap(e.stream).unwrap(), u32::from(waits), "its lane and pages");
        // Its promise is gone too: all but the third one's can be promised.
        let fourth = e.open(1_500, 100, POOL - 256, BringUp::Nothing).unwrap();
        let ticket = e.cache.join(third, e.stream, WarmUp::default()).unwrap();
        assert_eq!(e.cache.budgets(third).unwrap(), [POOL; 2]);
        assert_eq!(ticket.poll().is_none(), waits, "its join comes after the resize");
        drop(held);
        e.settle();
        assert_eq!(e.cache.reap(e.stream).unwrap(), 0);
        e.lengths.push((third, 1_500));
        e.run(2);
        e.join(fourth).unwrap();
        assert_eq!(e.budgets(), [256, POOL - 256]);
        e.run(3);
        e.cache.budgets_digest()
    });
    assert_eq!(digests[0], digests[1]);
}

/// A sequence without steps cannot be resized, since nothing shows that the device has run its last resize. The others
/// get what it leaves, and then nothing is left to do.
#[test]
fn an_idle_sequence_keeps_its_slots_and_the_others_have_the_rest() {
    let mut e = Engine::new(config(share()));
    let idle = e.start(1_500, 100);
    e.step();
    let [second, third] = [e.start(1_500, 100), e.start(1_500, 400)];
    e.run(3);
    e.lengths.retain(|(own, _)| *own != idle);
    let fourth = e.start(1_500, 100);
    e.run(3);
    let kept = e.cache.budgets(idle).unwrap()[0];
    [second, fourth].into_iter().for_each(|own| e.close(own));
    e.run(3);
    assert_eq!((e.cache.budgets(idle).unwrap()[0], e.cache.budgets(third).unwrap()[0]), (kept, POOL - kept));
    let resizes = e.cache.stats().resizes;
    assert_eq!(e.cache.share_slots(e.stream).unwrap(), 0);
    e.run(20);
    assert_eq!(e.cache.stats().resizes, resizes);
    // Its next step shows it, and the division is even again.
    e.lengths.push((idle, 1_500));
    e.run(3);
    assert_eq!(e.cache.budgets(idle).unwrap()[0], POOL / 2);
}
