//! Byte exactness: a world drives the cache like an engine, stamps every row, and checks every read against a naive
//! model.
//!
//! `world/` has the checks of a run: attention's view of every layer call, entry by entry; hits, misses and scratch
//! rows of every step by layer; every committed row and index key in the total pool; gauges, counters, lengths and
//! `validate()` after every operation; each error's kind, and that the rejected call changed nothing. In half of the
//! configurations the cache shares its slots; the budgets, which no model predicts, are then equal on every device,
//! however fast. In two thirds of them some layers share a selection: the model has one residency for them, and rows of
//! each layer, in one third of row formats of their own. This file has the runs.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[cfg(feature = "trace")]
#[path = "support/trace_bytes.rs"]
mod trace_body;
#[path = "world/mod.rs"]
mod world;

use forebay::device::host::HostOptions;
use forebay::device::{Outcome, PoolOp, ResolveOutput, Slice, StepRange};
use forebay::residency::QueryRange;
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Kind, Layer, LayerCall, MicroBatch, Open,
};
use forebay::{Step, Streams};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(feature = "trace")]
use trace_body::{GROUP, HEADER, content, recording, trace_bytes, trace_parts};
use world::bodies::cache_ops;
use world::check::{OF_GROUPS, REACHED};
use world::config::{Grouping, grouping};
#[cfg(feature = "cuda")]
use world::device::{driver_is_there, own_driver};
use world::device::{few, is_given};
use world::engine::Edge;
use world::ops::{OP_BYTES, Op, Random, ops_from_bytes};
use world::run::{On, Setup, World, run_in};
use world::share::VARIANTS;

fn ops() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(any::<[u8; OP_BYTES]>().prop_map(Op::decode), 1..90)
}

fn soak() -> bool {
    std::env::var("FOREBAY_SOAK").is_ok_and(|value| value == "1")
}

fn cases(usual: u32) -> ProptestConfig {
    ProptestConfig { cases: if soak() { usual * 50 } else { few(usual) }, ..ProptestConfig::default() }
}

fn random_ops(seed: u64, count: usize) -> Vec<Op> {
    ops_from_bytes(&Random::new(seed).bytes(count * OP_BYTES))
}

proptest! {
    #![proptest_config(cases(300))]
    #[test]
    fn every_row_read_is_the_row_that_was_written(ops in ops(), variant in 0..VARIANTS) {
        run_in(Setup::inline(variant), &ops);
    }
}

fn threaded(variant: u8) -> Setup {
    let options = HostOptions { threaded: true, ..HostOptions::default() };
    Setup { options, ..Setup::inline(variant) }
}

fn portable(variant: u8) -> Setup {
    let options = HostOptions { portable: true, ..HostOptions::default() };
    Setup { options, ..Setup::inline(variant) }
}

/// On a clock device that delays and reorders by this seed everything that no edge orders.
fn clocked(variant: u8, seed: u64) -> Setup {
    Setup { on: On::Clock { seed }, ..Setup::inline(variant) }
}

/// On the CUDA device, in order or by the seed of the stand-in driver.
#[cfg(feature = "cuda")]
fn on_cuda(variant: u8, seed: Option<u64>) -> Setup {
    Setup { on: On::Cuda { seed }, ..Setup::inline(variant) }
}

/// The devices that delay and reorder by chance, each with the setups of its seeds.
fn by_chance(variant: u8) -> Vec<Vec<Setup>> {
    let clock = seeds().map(|seed| clocked(variant, seed)).collect();
    // A given driver's streams are held, as threads are.
    if is_given() {
        return vec![clock, vec![threaded(variant)]];
    }
    #[cfg(feature = "cuda")]
    if driver_is_there() {
        return vec![clock, (0..seeds().end / 10).map(|seed| on_cuda(variant, Some(seed))).collect()];
    }
    vec![clock]
}

/// Seeds of the clock.
fn seeds() -> std::ops::Range<u64> {
    0..if soak() { 5_000 } else { few(200).into() }
}

proptest! {
    #![proptest_config(cases(80))]
    #[test]
    fn devices_agree_step_by_step(ops in ops(), variant in 0..VARIANTS, seed: u64) {
        let inline = run_in(Setup::inline(variant), &ops);
        prop_assert_eq!(&run_in(portable(variant), &ops), &inline);
        prop_assert_eq!(&run_in(threaded(variant), &ops), &inline);
        // A conflict is an error of the call that makes it, and the model expects none.
        prop_assert_eq!(&run_in(Setup { watched: true, ..Setup::inline(variant) }, &ops), &inline);
        prop_assert_eq!(&run_in(clocked(variant, seed), &ops), &inline);
    }
}

#[cfg(feature = "cuda")]
proptest! {
    #![proptest_config(cases(20))]
    #[test]
    fn the_cuda_device_agrees_step_by_step(ops in ops(), variant in 0..VARIANTS, seed: u64) {
        if !driver_is_there() {
            return Ok(());
        }
        let inline = run_in(Setup::inline(variant), &ops);
        prop_assert_eq!(&run_in(on_cuda(variant, None), &ops), &inline);
        prop_assert_eq!(&run_in(on_cuda(variant, Some(seed)), &ops), &inline);
    }
}

#[cfg(feature = "cuda")]
#[test]
fn every_seed_of_the_stand_in_has_the_result_of_an_inline_device() {
    if !driver_is_there() {
        return;
    }
    let seeds = if is_given() { 8 } else { seeds().end / 5 };
    for seed in 0..seeds {
        let (ops, variant) = (random_ops(seed, 90), seed as u8);
        let came = run_in(on_cuda(variant, Some(seed)), &ops);
        assert_eq!(came, run_in(Setup::inline(variant), &ops), "seed {seed}");
    }
}

#[test]
fn every_seed_of_the_clock_has_the_result_of_an_inline_device() {
    for seed in seeds() {
        let (ops, variant) = (random_ops(seed, 90), seed as u8);
        assert_eq!(run_in(clocked(variant, seed), &ops), run_in(Setup::inline(variant), &ops), "seed {seed}");
    }
}

/// The control of the tests above: they reach every listed outcome, with index groups and without them.
#[test]
fn random_bytes_are_runs_that_reach_every_operation() {
    // Of runs without index groups, and with them.
    let mut reached = [BTreeMap::new(), BTreeMap::new()];
    for seed in 0..300 {
        let outcomes = run_in(Setup::inline(seed as u8), &random_ops(seed, 90));
        let reached = &mut reached[usize::from(grouping(seed as u8) != Grouping::Alone)];
        for (what, times) in outcomes.reached {
            *reached.entry(what).or_insert(0) += times;
        }
    }
    let [alone, grouped] = &reached;
    let is_missed = |what: &&&str| {
        !grouped.contains_key(**what) || !alone.contains_key(**what) && !OF_GROUPS.contains(what)
    };
    let missed: Vec<&&str> = REACHED.iter().chain(OF_GROUPS).filter(is_missed).collect();
    assert!(missed.is_empty(), "never reached: {missed:?}; reached: {reached:#?}");
}

/// Sequences that come and go until unused shared pages fill the pools.
#[test]
fn shared_pages_fill_the_pools_and_make_room() {
    let mut reached = BTreeMap::new();
    for seed in 0..if soak() { 2_000 } else { few(40).into() } {
        let ops = random_ops(7_000 + seed, 600).into_iter().filter_map(|op| match op {
            Op::Append { seq, .. } | Op::InPlace { seq, .. } | Op::Join { seq, .. } => {
                Some(Op::Close { seq })
            }
            Op::Open { .. } | Op::Start { .. } | Op::Begin { .. } | Op::RetireOpen { .. } => None,
            op => Some(op),
        });
        for (what, times) in run_in(Setup::inline(seed as u8), &ops.collect::<Vec<Op>>()).reached {
            *reached.entry(what).or_insert(0) += times;
        }
    }
    // Rare; single tests of tests/sharing.rs cover it for certain.
    let rare = if soak() { &["publish a page whose duplicate is gone"][..] } else { &[] };
    for what in ["evict a shared page", "fork of shared pages"].iter().chain(rare) {
        assert!(reached.contains_key(*what), "never reached: {what}; reached: {reached:#?}");
    }
}

/// The body of the fuzz target `cache_ops`: a fixed corpus, then strings that are short, uneven or long.
#[test]
fn any_bytes_are_a_run() {
    let corpus =
        [&[][..], &[0], &[1; 5], &[1; 6], &[255; 61], &[16; 600], &[2; 600], &[36; 66], &[0x55; 300]];
    corpus.iter().for_each(|bytes| cache_ops(bytes));
    for seed in 0..u64::from(few(200)) {
        cache_ops(&Random::new(seed).bytes(seed as usize * 7 % 650));
    }
}

/// The body of the fuzz target `trace_bytes`: traces, cut and damaged ones, and strings of any bytes.
#[cfg(feature = "trace")]
#[test]
fn any_bytes_are_a_trace_or_an_error() {
    // Both steps select positions 2 and 4: two gaps are added to nothing, then nothing changes.
    let body = [2, 0, 0, 0, 2, 1, 0, 0, 0, 0];
    let plain = content(b"TOPKTRC1", HEADER, &body);
    assert!(trace_bytes(&plain), "the control: the whole one is a trace");
    let packed = forebay::trace::SelectionTrace::from_bytes(&plain).unwrap().compress(3).unwrap();
    assert!(trace_bytes(&packed));
    let mut random = Random::new(9);
    let recorded = recording(&[GROUP, &[1, 0, 0, 0, 0, 0, 0, 0]]);
    assert!(trace_bytes(&recorded), "the control: a finished recording is a trace");
    let unfinished = recording(&[GROUP]).len();
    for (whole, first) in [(&plain, plain.len()), (&packed, packed.len()), (&recorded, unfinished)] {
        (0..whole.len()).for_each(|cut| assert_eq!(trace_bytes(&whole[..cut]), cut >= first, "{cut}"));
        for _ in 0..500 {
            let mut damaged = whole.clone();
            for _ in 0..=random.below(3) {
                damaged[random.below(whole.len() as u32) as usize] = random.below(256) as u8;
            }
            trace_bytes(&damaged);
        }
    }
    for size in 0..1000 {
        let noise = random.bytes(size % 300);
        trace_bytes(&noise);
        trace_parts(&noise);
    }
}

/// Fails the n-th operation of a run. Returns the number of operations, and the outcomes that the run reached.
fn failing(setup: Setup, ops: &[Op], number: u64) -> (u64, BTreeMap<String, u64>) {
    let options = HostOptions { fail_operation: Some(number), ..setup.options };
    let mut world = World::new(Setup { options, ..setup });
    ops.iter().for_each(|op| world.apply(op));
    world.close_all();
    let operations = world.engine.operations();
    (operations, world.end().reached)
}

#[test]
fn a_device_that_fails_at_any_operation_leaks_nothing() {
    #[cfg(feature = "cuda")]
    if is_given() && !own_driver("fails an operation") {
        return;
    }
    let (mut tickets, mut steps, mut shares, mut resumes) = (0, 0, 0, 0);
    // Runs that park and resume, among others.
    let many = if soak() { 1000..1050 } else { 0..0 };
    for seed in many.chain([1047, 1219, 1181]) {
        let ops = random_ops(seed, 60);
        // No share, one with loose limits, one with tight limits.
        let variant = [0, 4, 71][seed as usize % 3];
        let (count, reached) = failing(Setup::inline(variant), &ops, u64::MAX);
        resumes += reached.get("resume").unwrap_or(&0);
        for number in 0..count {
            let (_, reached) = failing(Setup::inline(variant), &ops, number);
            tickets += reached.get("ticket fails").unwrap_or(&0);
            steps += reached.get("step fails").unwrap_or(&0);
            shares += reached.get("shrink for a join").unwrap_or(&0);
        }
        for number in (0..count).step_by(41) {
            failing(threaded(variant), &ops, number);
        }
        let (count, _) = failing(clocked(variant, seed), &ops, u64::MAX);
        for number in (0..count).step_by(7) {
            failing(clocked(variant, seed + number), &ops, number);
        }
        #[cfg(feature = "cuda")]
        if driver_is_there() {
            let (count, _) = failing(on_cuda(variant, None), &ops, u64::MAX);
            for number in (0..count).step_by(if soak() { 3 } else { 43 }) {
                failing(on_cuda(variant, None), &ops, number);
                failing(on_cuda(variant, Some(seed + number)), &ops, number);
            }
        }
    }
    assert!(tickets > 0 && steps > 0, "tickets {tickets} and steps {steps} that failed");
    assert!(shares > 0 && resumes > 0, "shrinks for a join {shares}, resumes {resumes}");
}

#[test]
fn soak_returns_every_counter_to_its_start() {
    let wanted = if soak() { 20_000 } else { 300 };
    let (mut world, mut opened, mut seed) = (World::new(Setup::inline(0)), 0, 5_000);
    while opened < wanted {
        random_ops(seed, 60).iter().for_each(|op| world.apply(op));
        seed += 1;
        world.close_all();
        opened += world.seqs.len();
        world.forget();
    }
    world.end();
}

/// A seed whose steps are neither refused nor made to fail, in a world of one sequence that joins without a warm-up.
fn sound_seed() -> u16 {
    let step = |seed| Op::Step { micro: 0, rows: 0, width: 1, seed };
    let sound = |seed: &u16| {
        let ops = [COLD, step(*seed), Op::Retire { which: 1 }, step(*seed), Op::Retire { which: 1 }];
        run_in(Setup::inline(0), &ops).reached.get("step is sound") == Some(&2)
    };
    (0..500).find(sound).unwrap()
}

const COLD: Op = Op::Start { prompt: 80, promised: 40, budget: 4, whole: false };

/// One step whose gathers are held, or late by chance. Returns whether attention read the selected rows.
fn attention_with_slow_gathers(setup: Setup, seed: u16, missing: Option<Edge>) -> bool {
    let mut world = World::new(setup);
    world.apply(&COLD);
    world.engine.missing = missing;
    world.apply(&Op::Begin { micro: 0, rows: 0, width: 1, seed });
    let held = (!setup.on.is_by_chance()).then(|| world.engine.hold(world.engine.gathers(0)));
    // The calls of a layer and pass fit the streams' queues: nothing here waits for the gathers.
    (0..9).for_each(|_| world.layer(0));
    if missing.is_some() && held.is_some() {
        world.engine.drain(world.engine.stream(0));
    }
    drop(held);
    world.engine.drain(world.engine.gathers(0));
    world.finish(0);
    world.engine.drain(world.engine.stream(0));
    world.engine.found.lock().unwrap().wrong.is_empty()
}

/// The effect of an edge holds on a threaded device, where it is forced, and for every seed of the clock. The controls:
/// without the edge, the clock shows it for some seed.
fn by_gate_and_by_chance(holds: impl Fn(Setup, u16, Option<Edge>) -> bool, edge: Edge) {
    let sound = sound_seed();
    assert!(holds(threaded(0), sound, None));
    assert!(!holds(threaded(0), sound, Some(edge)), "the control: without the edge it is seen");
    for setups in by_chance(0) {
        setups.iter().for_each(|setup| assert!(holds(*setup, sound, None), "{setup:?}"));
        let seen = setups.iter().any(|setup| !holds(*setup, sound, Some(edge)));
        assert!(seen, "the control, by chance: {:?}", setups[0].on);
    }
}

#[test]
fn attention_reads_after_the_gather() {
    by_gate_and_by_chance(attention_with_slow_gathers, Edge::Gathered);
}

/// Two steps; in the first the engine's own writes are held, or late by chance. Returns whether the total pool has the
/// rows.
fn stores_with_slow_writes(setup: Setup, seed: u16, missing: Option<Edge>) -> bool {
    let mut world = World::new(setup);
    world.apply(&COLD);
    world.apply(&Op::Begin { micro: 0, rows: 0, width: 1, seed });
    world.engine.drain(world.engine.stream(0));
    world.engine.missing = missing;
    let held = (!setup.on.is_by_chance()).then(|| world.engine.hold(world.engine.stream(0)));
    (0..9).for_each(|_| world.layer(0));
    if missing.is_some() && held.is_some() {
        world.engine.drain(world.engine.scatters(0));
    }
    drop(held);
    world.finish(0);
    world.engine.missing = None;
    let accepted = world.seqs[0].length() + world.seqs[0].landed.len() as u32;
    catch_unwind(AssertUnwindSafe(|| {
        world.apply(&Op::Retire { which: 1 });
        world.apply(&Op::Truncate { seq: 0, how: 1, by: 2 });
        assert_eq!(world.seqs[0].length(), accepted, "both rows were accepted, and are checked");
    }))
    .is_ok()
}

#[test]
fn f1_a_store_waits_for_the_rows_that_it_reads() {
    by_gate_and_by_chance(stores_with_slow_writes, Edge::Written);
}

/// Steps enqueued while a warm-up, a resize, two truncations and a fork still have to run on the host's stream. Returns
/// the waits of each step's prepare, on the clock.
fn steps_after_the_work_that_made_them_ready(
    setup: Setup,
    seed: u16,
    without: Range<u64>,
) -> Vec<Range<u64>> {
    let mut world = World::new(setup);
    world.engine.without_waits(without);
    let mut begins = Vec::new();
    world.apply(&Op::Open { prompt: 80, promised: 40, budget: 5, whole: true });
    world.apply(&Op::Fill { seq: 0 });
    world.patient = false;
    for make_ready in [
        Op::Join { seq: 0, warm: 2, bound: 0, seed: 3 },
        Op::Resize { seq: 0, budget: 1, stream: 5 },
        Op::Truncate { seq: 0, how: 1, by: 1 },
        Op::Truncate { seq: 0, how: 3, by: 20 },
        Op::Fork { seq: 0, promised: 30, budget: 5, whole: true },
    ] {
        let held = world.engine.hold(world.engine.host);
        world.apply(&make_ready);
        let resized = matches!(make_ready, Op::Resize { .. });
        assert!(resized || world.tickets.last().unwrap().poll().is_none(), "it has not run");
        let first = world.engine.waits();
        world.apply(&Op::Begin { micro: 0, rows: 0, width: 1, seed });
        begins.push(first..world.engine.waits());
        world.apply(&Op::Finish { micro: 0 });
        // Time for a step that does not wait to do harm; a step that waits is not affected.
        world.engine.idle();
        drop(held);
        world.engine.settle();
        world.apply(&Op::Retire { which: 1 });
        if let Op::Truncate { how: 3, .. } = make_ready {
            world.apply(&Op::Truncate { seq: 0, how: 0, by: 0 });
            world.engine.settle();
        }
    }
    assert_eq!((world.reached["step is sound"], world.reached["shrink"]), (5, 1));
    world.end();
    begins
}

#[test]
fn a_step_waits_for_the_work_that_made_its_sequence_ready() {
    let sound = sound_seed();
    steps_after_the_work_that_made_them_ready(threaded(0), sound, 0..0);
    for setups in by_chance(0) {
        let mut begins = Vec::new();
        for setup in &setups {
            begins = steps_after_the_work_that_made_them_ready(*setup, sound, 0..0);
        }
        // The controls: without the waits of its prepare each step goes wrong, for some seed.
        for begin in begins {
            let wrong = |setup: &Setup| {
                let run = || steps_after_the_work_that_made_them_ready(*setup, sound, begin.clone());
                catch_unwind(run).is_err()
            };
            assert!(setups.iter().any(wrong), "waits {begin:?}: {:?}", setups[0].on);
        }
    }
}

/// An abort while a fork's copy is in flight: the resources that the copy names are freed when its ticket has ended.
#[test]
fn f9_a_ticket_that_ends_after_an_abort_still_frees_its_pages() {
    let mut world = World::new(threaded(0));
    world.apply(&START);
    let (start, parent, stream) = (world.start, world.seqs[0].handle, world.engine.host);
    let open = Open { prompt: 0, promised: 20, budget: Budget::Slots(20), bring_up: BringUp::Nothing };
    let held = world.engine.hold(stream);
    let cache = &mut world.cache;
    let (child, ticket) = cache.fork(parent, &open, stream).unwrap();
    assert_eq!(ticket.poll(), None);
    assert_eq!(cache.truncate(child, 1, stream).unwrap_err().kind(), Kind::Busy);
    assert_eq!(cache.fork(child, &open, stream).unwrap_err().kind(), Kind::Busy);
    let before = cache.stats();
    cache.close(child, stream).unwrap();
    cache.close(parent, stream).unwrap();
    assert_eq!(cache.length(child).unwrap_err().kind(), Kind::Closed);
    assert_eq!(cache.stats().sequences, before.sequences - 1, "the parent is gone, the child waits");
    assert!(cache.stats().free_host_pages < start.free_host_pages, "the page that is copied from is owned");
    assert_eq!(cache.reap(stream).unwrap(), 1);
    cache.validate().unwrap();
    drop(held);
    world.engine.settle();
    assert_eq!((ticket.poll(), world.cache.reap(stream).unwrap()), (Some(Outcome::Done), 0));
    assert_eq!(world.cache.stats(), start);
    world.cache.validate().unwrap();
}

/// A captured batch is as wide as its bucket: rows beyond the real ones resolve to -1 and move nothing.
#[test]
fn padded_rows_of_a_captured_batch_are_inert() {
    let mut world = World::new(Setup::inline(0));
    world.apply(&Op::Start { prompt: 40, promised: 40, budget: 5, whole: true });
    let (device, stream, k) = (world.engine.device.clone(), world.engine.host, world.config.shape.top_k);
    let (sequence, batch) = (world.seqs[0].handle, world.config.batch);
    let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 };
    let mut step = world.cache.prepare(MicroBatch(0), 1, &[row], None, stream).unwrap();
    let words = u64::from(batch * k);
    let (selection, slots) = (device.allocate(4 * words).unwrap(), device.allocate(4 * words).unwrap());
    // The real row selects existing positions; the others hold what no row may select.
    let positions = (0..batch * k).map(|i| if i < k { i } else { 0x7000_0000 + i });
    device.write(selection, &positions.flat_map(u32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    let rows = QueryRange { first: 0, count: 1 };
    let range = StepRange { micro_batch: MicroBatch(0), layer: Layer(1), first: 0, count: batch, rows };
    device
        .enqueue(
            world.cache.pools(),
            stream,
            PoolOp::Resolve { range, selection, output: ResolveOutput { slots, split_indices: None } },
        )
        .unwrap();
    device.enqueue(world.cache.pools(), stream, PoolOp::Gather { range, wave: 0 }).unwrap();
    device.enqueue(world.cache.pools(), stream, PoolOp::Scatter(range)).unwrap();
    let mut returned = vec![0; 4 * words as usize];
    device.read(slots, &mut returned).unwrap();
    let returned: Vec<i32> = returned.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
    assert!(returned[..k as usize].iter().all(|slot| *slot >= 0));
    assert!(returned[k as usize..].iter().all(|slot| *slot == -1));
    // The cache has seen none of these calls: for it the step is not enqueued yet.
    let own = |buffer: Slice| buffer.part(0, 4 * u64::from(k)).unwrap();
    let complete = |cache: &Cache, step: &Step| {
        for layer in (0..cache.geometry().layers()).map(Layer) {
            let buffers = Buffers { selection: own(selection), slots: own(slots), split_indices: None };
            let streams = Streams { resolve: stream, gather: stream };
            cache.layer(step, LayerCall::whole(layer), streams, buffers).unwrap();
            cache.scatter(step, LayerCall::whole(layer), stream).unwrap();
        }
    };
    complete(&world.cache, &step);
    world.cache.finish(&mut step, stream).unwrap();
    let retired = world.cache.retire(step, stream).unwrap();
    let hits = u64::from(k) * (1 + u64::from(world.config.shape.layers + world.config.shape.draft_layers));
    assert_eq!((retired.total(), retired.lengths()), ((hits, 0), &[40][..]));
    // A call through the cache is as wide as the step, no wider.
    let row = BatchRow { accepted: Accepted::Rows(0), ..row };
    let mut step = world.cache.prepare(MicroBatch(0), 1, &[row], None, stream).unwrap();
    let wide = LayerCall { batch_rows: Some((0, 2)), ..LayerCall::whole(Layer(0)) };
    assert_eq!(world.cache.gather(&step, wide, 0, stream).unwrap_err().kind(), Kind::OutOfRange);
    complete(&world.cache, &step);
    world.cache.finish(&mut step, stream).unwrap();
    assert!(world.cache.retire(step, stream).is_ok());
}

const START: Op = Op::Start { prompt: 40, promised: 40, budget: 4, whole: true };

/// A second step of a micro-batch would replace the open step's descriptor on the device.
#[test]
fn a_micro_batch_has_one_open_step() {
    let mut world = World::new(Setup::inline(0));
    [START, START].iter().for_each(|op| world.apply(op));
    world.apply(&Op::Begin { micro: 0, rows: 0b10, width: 1, seed: 1 });
    assert!(world.open[0].is_some());
    (1..20).for_each(|seed| world.apply(&Op::Begin { micro: 0, rows: 0b01, width: 1, seed }));
    assert!(world.reached["prepare Busy"] > 9, "{:?}", world.reached);
    world.apply(&Op::Begin { micro: 1, rows: 0b01, width: 1, seed: 1 });
    assert!(world.open[1].is_some(), "another micro-batch's step may be open at the same time");
    world.close_all();
    world.end();
}

/// Layers fill unevenly, and a count that fits one does not fit another.
#[test]
fn a_refused_append_in_place_claims_nothing() {
    let mut world = World::new(Setup::inline(0));
    world.apply(&Op::Open { prompt: 10, promised: 10, budget: 4, whole: true });
    world.apply(&Op::Append { seq: 0, layer: 1, count: 5 });
    let handle = world.seqs[0].handle;
    let refused = world.cache.append_in_place(handle, 6).unwrap_err();
    assert_eq!(refused.kind(), Kind::OutOfRange);
    // Every layer still takes exactly the rest of its prompt.
    world.apply(&Op::Fill { seq: 0 });
    world.apply(&Op::Join { seq: 0, warm: 0, bound: 0, seed: 0 });
    world.end();
}

/// Steps of two sequences, one in each micro-batch, with two steps in flight and a truncation between them. Every step
/// accepts all rows that the one before has landed, so every lost row is read again.
fn accepting_steps() -> Vec<Op> {
    let retire = || Op::Retire { which: 1 };
    let mut ops = vec![START, Op::Start { prompt: 60, promised: 50, budget: 0, whole: true }];
    for round in 0..5 {
        for (micro, rows, seq) in [(0, 1, 1), (1, 2, 0)] {
            let accepts_all = |seed: &u16| {
                let mut world = World::new(Setup::inline(0));
                ops.iter().for_each(|op| world.apply(op));
                let wanted = world.seqs[seq].length() + world.seqs[seq].landed.len() as u32;
                world.apply(&Op::Step { micro, rows, width: 1, seed: *seed });
                let sound = world.flights.last().is_some_and(|flight| !flight.fails);
                sound && world.seqs[seq].landed.len() == 2 && world.seqs[seq].length() == wanted
            };
            let seed = (0..500).find(accepts_all).unwrap();
            ops.push(Op::Step { micro, rows, width: 1, seed });
        }
        ops.extend([retire(), retire()]);
        if round == 1 {
            ops.push(Op::Truncate { seq: 0, how: 1, by: 2 });
        }
    }
    ops
}

/// A schedule without one of its waits goes wrong on the clock exactly when the order checker sees that the wait
/// ordered something: each is the other's control.
#[test]
fn each_wait_that_orders_something_shows_on_the_clock_when_it_is_left_out() {
    let ops = accepting_steps();
    let right = run_in(Setup::inline(0), &ops);
    // No later round reads the rows that the last two rounds store.
    let mut world = World::new(clocked(0, 0));
    ops[..ops.len() - 8].iter().for_each(|op| world.apply(op));
    let waits = world.engine.clock.as_ref().unwrap().waits();
    drop(world);
    let mut orders = 0;
    for number in 0..waits {
        let without = |setup| Setup { without: Some(number), ..setup };
        let mut world = World::new(without(Setup { watched: true, ..Setup::inline(0) }));
        let watch = world.engine.watch.clone().unwrap();
        // A conflict ends the run.
        let _ = catch_unwind(AssertUnwindSafe(|| ops.iter().for_each(|op| world.apply(op))));
        let ordering = watch.left_out().unwrap().ordering;
        assert_eq!(watch.conflict().is_some(), ordering, "wait {number}");
        let wrong = |seed| {
            let run = catch_unwind(|| run_in(without(clocked(0, seed)), &ops));
            run.ok().as_ref() != Some(&right)
        };
        let (mut enough, mut few) = (seeds(), 0..seeds().end / 10);
        let shown = if ordering { enough.any(wrong) } else { few.any(wrong) };
        assert_eq!(shown, ordering, "wait {number}: {:?}", watch.conflict());
        orders += u32::from(ordering);
    }
    assert!(orders > 60, "{orders} of {waits} waits order something");
}
