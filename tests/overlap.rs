//! Overlap: attention has the same result in every order that hides the gather.
//!
//! An engine with a small but real attention (`overlap/engine.rs`) decodes through `Cache::overlap_steps` in every
//! order, half, width, scratch and number of waves. The test compares the merged result with one attention in double
//! precision over rows that the test generates itself, never over a slab's contents (`overlap/reference.rs`). Residency
//! must not depend on the order at all.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[path = "overlap/engine.rs"]
mod engine;
#[path = "overlap/kernels.rs"]
mod kernels;
#[path = "overlap/reference.rs"]
mod reference;
#[path = "overlap/times.rs"]
mod times;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use device::TestDevice;
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Slice, SplitIndices};
use forebay::overlap::Overlap;
use forebay::{Kind, Layers};
use proptest::prelude::*;

use engine::{Decode, Fault, Setting};

/// Runs `steps` steps of `setting` in the given orders. Returns the digests of all sequences.
fn decode(setting: &Setting, orders: &[Overlap], threaded: bool, steps: u32) -> Vec<u64> {
    let device = TestDevice::new(HostOptions { threaded, ..HostOptions::default() });
    let memory = Arc::clone(&device);
    let mut decode = Decode::new(setting.clone(), device.device(), memory);
    for _ in 0..steps {
        decode.step(orders).unwrap();
    }
    decode.check();
    decode.digests()
}

fn plain() -> Setting {
    Setting { seed: 7, half: 1, query_rows: 2, budget: 24, waves: 1, real: [3, 2], ..Setting::default() }
}

#[test]
fn every_order_attends_to_the_same_rows_as_one_attention_over_the_complete_copy() {
    for overlap in Overlap::FIRST {
        for threaded in [false, true] {
            decode(&plain(), &[overlap], threaded, 12);
        }
    }
}

#[test]
fn orders_mixed_by_layer_leave_the_same_rows_resident() {
    let alone = decode(&plain(), &[Overlap::None], false, 10);
    for overlap in [Overlap::Da, Overlap::Dba] {
        assert_eq!(decode(&plain(), &[overlap], true, 10), alone);
    }
    let mixed = [Overlap::Dba, Overlap::None, Overlap::Da, Overlap::Dba];
    assert_eq!(decode(&plain(), &mixed, true, 10), alone);
}

#[test]
fn several_attention_waves_attend_to_every_row_once() {
    let whole = Setting { budget: 4, query_rows: 3, ..plain() };
    let alone = decode(&whole, &[Overlap::None], false, 8);
    for (n, waves) in [2, 3, 7, 44].into_iter().enumerate() {
        // One order for each number of waves, where the test does not try all.
        for overlap in Overlap::FIRST.into_iter().cycle().skip(n).take(device::tried(3) as usize) {
            let setting = Setting { waves, ..whole.clone() };
            assert_eq!(decode(&setting, &[overlap], true, 8), alone, "{waves} waves, {overlap:?}");
        }
    }
}

#[test]
fn query_rows_without_a_valid_index_merge_to_nothing() {
    // The chance that an entry of a selection is -1.
    let setting = Setting { empty: 0.6, ..plain() };
    for overlap in Overlap::FIRST {
        decode(&setting, &[overlap], false, 8);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(24), ..ProptestConfig::default() })]

    #[test]
    fn every_half_width_scratch_and_number_of_waves_gives_the_same_attention(
        seed in any::<u64>(),
        half in 0_u32..4,
        query_rows in 1_u32..4,
        budget in 4_u32..70,
        waves in 1_u32..5,
        real in [1_u32..4, 1..4],
        orders in prop::collection::vec(0_usize..3, 4),
        threaded in any::<bool>(),
        ways in any::<[bool; 3]>(),
    ) {
        let [captured, narrow, one_by_one] = ways;
        let sizes = Setting { half, query_rows, budget, waves, real, ..Setting::default() };
        let setting = Setting { seed, empty: 0.05, captured, narrow, one_by_one, ..sizes };
        let orders: Vec<Overlap> = orders.iter().map(|o| Overlap::FIRST[*o]).collect();
        let alone = decode(&setting, &[Overlap::None], false, 5);
        prop_assert_eq!(decode(&setting, &orders, threaded, 5), alone);
    }
}

/// Cases of a property: more in a soak, fewer where a case takes long.
fn cases(usual: u32) -> u32 {
    if std::env::var_os("FOREBAY_SOAK").is_some() { usual * 50 } else { device::tried(usual) }
}

/// Two valid steps, then one whose engine fails at its call number `at`, in one way or the other; a truncation; three
/// valid steps. Returns whether the step reached the failure.
fn fails_at(setting: &Setting, overlap: Overlap, at: u32, how: Fault) -> bool {
    let device = TestDevice::new(HostOptions { threaded: at.is_multiple_of(2), ..HostOptions::default() });
    let mut decode = Decode::new(setting.clone(), device.device(), device);
    decode.step(&[overlap]).unwrap();
    decode.step(&[overlap]).unwrap();
    decode.fail_after(at, how);
    let failed = decode.step(&[overlap]);
    decode.truncate();
    for _ in 0..3 {
        decode.step(&[overlap]).unwrap();
    }
    decode.check();
    match (failed, how) {
        (Ok(()), _) => return false,
        (Err(error), Fault::Refuses) => {
            assert_eq!((error.kind(), error.place()), (Kind::Io, "the engine's own"), "{overlap:?} {at}");
        }
        (Err(error), Fault::Panics) => assert_eq!(error.kind(), Kind::Internal),
    }
    true
}

#[test]
fn an_engine_that_fails_at_any_call_abandons_the_step_and_a_truncation_heals_it() {
    let waves = Setting { waves: 2, budget: 10, query_rows: 2, ..plain() };
    let one_by_one = Setting { one_by_one: true, ..plain() };
    // Every ninth call where the test does not try all: together, all ways then begin at every call of nine.
    let stride = if device::tried(8) == 8 { 1 } else { 9 };
    let ways = [(&waves, Fault::Refuses), (&one_by_one, Fault::Refuses), (&plain(), Fault::Panics)];
    let ways = Overlap::FIRST.iter().flat_map(|overlap| ways.map(|way| (*overlap, way)));
    for (first, (overlap, (setting, how))) in (0..).zip(ways) {
        let calls = (first % stride..).step_by(stride as usize);
        let failed = calls.take_while(|at| fails_at(setting, overlap, *at, how)).count() as u32;
        assert!(failed * stride >= 30, "{overlap:?}: {failed} calls of the engine");
    }
}

#[test]
fn a_step_of_any_width_uses_the_start_of_the_buffers() {
    let setting = Setting { narrow: true, captured: true, query_rows: 3, ..plain() };
    for overlap in Overlap::FIRST {
        for one_by_one in [false, true] {
            decode(&Setting { one_by_one, ..setting.clone() }, &[overlap], true, 10);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_enqueued() {
    let device = TestDevice::new(HostOptions::default());
    let mut decode = Decode::new(plain(), device.device(), Arc::clone(&device));
    decode.step(&[Overlap::None]).unwrap();
    let mut steps = decode.prepare();
    let before = device.operations();
    let mut refused = |orders: &[Overlap], change: &dyn Fn(&mut Layers), place: &str| {
        let error = decode.enqueue_only(&mut steps, orders, change).unwrap_err();
        assert_eq!(error.place(), place);
        assert_eq!(device.operations(), before);
    };
    let split_indices = |layers: &mut Layers| layers.buffers.split_indices.unwrap();
    let da = [Overlap::Da; 4];
    refused(&[Overlap::Da; 3], &|_| {}, "orders by layer");
    let last = [Overlap::None, Overlap::None, Overlap::None, Overlap::Dba];
    for orders in [da, last] {
        refused(&orders, &|l| l.buffers.split_indices = None, "split attention needs index lists");
    }
    refused(&da, &|l| l.batch = 1, "batch rows");
    refused(&da, &|l| l.batch = 4, "batch rows");
    refused(&da, &|l| l.buffers.selection = l.buffers.selection.part(0, 64).unwrap(), "selection");
    refused(&da, &|l| l.buffers.slots = l.buffers.slots.part(0, 64).unwrap(), "slots");
    refused(
        &da,
        &|l| l.buffers.split_indices = Some(SplitIndices { batch: 2, ..split_indices(l) }),
        "batch rows of the index lists",
    );
    let short = |slice: Slice| slice.part(0, slice.bytes() - 4).unwrap();
    refused(
        &da,
        &|l| {
            l.buffers.split_indices =
                Some(SplitIndices { lists: short(split_indices(l).lists), ..split_indices(l) })
        },
        "index lists",
    );
    let elsewhere = TestDevice::new(HostOptions::default()).allocate(4096).unwrap();
    refused(
        &da,
        &|l| l.buffers.split_indices = Some(SplitIndices { counts: elsewhere, ..split_indices(l) }),
        "counts of the index lists",
    );
    decode.enqueue_only(&mut steps, &[Overlap::None; 4], &|l| l.buffers.split_indices = None).unwrap();
    let (error, engine_calls) = decode.other_streams(&mut steps);
    assert_eq!(error.place(), "other streams than the step's earlier layers had");
    assert_eq!(engine_calls, 0);
}

#[test]
fn only_a_truncation_may_follow_an_abandoned_step() {
    for calls in [0, 7, 20] {
        let device = TestDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
        let mut decode = Decode::new(plain(), device.device(), device);
        decode.step(&[Overlap::Da]).unwrap();
        let (refused, retired) = decode.after_an_abandoned_step(calls, &[Overlap::Da; 4]);
        assert_eq!((refused.kind(), refused.place()), (Kind::InvalidState, "a step of the sequence failed"));
        assert_eq!(retired, [Kind::Cancelled; 2]);
        decode.truncate();
        decode.step(&[Overlap::Da]).unwrap();
        decode.check();
    }
}

#[test]
fn an_abandoned_step_ends_after_all_its_enqueued_work() {
    let memory = TestDevice::host(HostOptions::default());
    let clock = ClockDevice::over(memory.device(), ClockOptions::default()).unwrap();
    let mut decode = Decode::new(plain(), Arc::clone(&clock) as Arc<dyn Device>, memory);
    decode.step(&[Overlap::None]).unwrap();
    assert!(decode.ends_after_its_work(&clock, &[Overlap::None; 4]));
}

#[test]
fn draft_passes_beyond_those_of_a_layer_are_refused() {
    let device = TestDevice::new(HostOptions::default());
    let mut decode = Decode::new(plain(), device.device(), device);
    let mut steps = decode.prepare();
    for (layer, draft_pass, place) in [
        (0, Some(0), "a draft pass of a layer that is no draft layer"),
        (engine::LAYERS, Some(2), "draft passes"),
        (engine::LAYERS, Some(u32::MAX), "draft passes"),
        (engine::LAYERS + 1, None, "layer"),
    ] {
        let error = decode.one_layer(&mut steps, (layer, draft_pass)).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::OutOfRange, place));
    }
}

#[test]
fn a_step_ends_after_its_scatters_on_any_stream_that_finishes_it() {
    for overlap in Overlap::FIRST {
        let memory = TestDevice::host(HostOptions::default());
        let clock = ClockDevice::over(memory.device(), ClockOptions::default()).unwrap();
        let setting = Setting { one_by_one: true, ..plain() };
        let mut decode = Decode::new(setting, Arc::clone(&clock) as Arc<dyn Device>, memory);
        decode.step(&[overlap]).unwrap();
        let other = clock.stream().unwrap();
        for finished_on in [None, Some(other)] {
            assert!(decode.is_held_by_its_scatters(&clock, &[overlap; 4], finished_on), "{overlap:?}");
        }
    }
}

/// Seeds of the virtual clock: 200, thousands in a soak, few on a device that does not use them.
fn seeds() -> std::ops::Range<u64> {
    0..if std::env::var_os("FOREBAY_SOAK").is_some() { 5_000 } else { u64::from(device::tried(200)) }
}

fn on_the_clock(seed: u64, setting: &Setting) -> Decode {
    let memory = TestDevice::host(HostOptions::default());
    let options = ClockOptions { seed: Some(seed), ..ClockOptions::default() };
    let clock = ClockDevice::over(memory.device(), options).unwrap();
    Decode::new(setting.clone(), clock, memory)
}

#[test]
fn attention_is_the_same_whatever_the_delays_of_the_streams() {
    let alone = decode(&plain(), &[Overlap::None], false, 3);
    let waves = Setting { waves: 2, budget: 10, query_rows: 3, ..plain() };
    let passed = decode(&waves, &[Overlap::None], false, 3);
    for seed in seeds() {
        let orders = [0, 1, 2, 3].map(|layer| Overlap::FIRST[(seed >> layer) as usize % 3]);
        let mut runs = on_the_clock(seed, &plain());
        let mut in_waves = on_the_clock(seed, &waves);
        for _ in 0..3 {
            runs.step(&orders).unwrap();
            in_waves.step(&orders).unwrap();
        }
        assert_eq!((runs.digests(), in_waves.digests()), (alone.clone(), passed.clone()), "seed {seed}");
    }
}

#[test]
fn an_engine_on_the_wrong_stream_is_found_where_the_device_sees_it() {
    let mut decode = on_the_clock(1, &plain());
    decode.step(&[Overlap::Da]).unwrap();
    decode.stray();
    let error = decode.step(&[Overlap::Da]).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidConfig);
    assert!(error.to_string().contains("stream"), "{error}");
    decode.truncate();
    decode.step(&[Overlap::Da]).unwrap();
    decode.check();
}

#[test]
fn every_edge_of_an_order_holds_on_the_clock() {
    for seed in seeds().map(Some).chain([None]) {
        for (order, waves) in Overlap::FIRST.iter().flat_map(|o| [(*o, 1), (*o, 2)]) {
            let layers = times::times(order, waves, 20.0, seed);
            assert_eq!(layers.len(), 2 * times::LAYERS as usize);
            for (index, times) in layers.iter().enumerate() {
                for (from, to) in times::edges(order, waves) {
                    let (end, start) = (times[from].1, times[to].0);
                    assert!(end <= start, "{order:?} {waves} {seed:?}: {to} at {start}, {from} until {end}");
                }
                // I0(l+1) <- M(l), of the same micro-batch.
                if let Some(next) = layers.get(index + 2) {
                    assert!(times["rest"].1 <= next["I0"].0);
                }
            }
        }
    }
}

#[test]
fn hidden_work_of_an_order_runs_during_the_gather() {
    let meets = |a: (f64, f64), b: (f64, f64)| a.0 < b.1 && b.0 < a.1;
    // A gather of some 130 us a half.
    let layer = |order| times::times(order, 1, 2000.0, None).swap_remove(0);
    let (none, da, dba) = (layer(Overlap::None), layer(Overlap::Da), layer(Overlap::Dba));
    assert!(none.iter().all(|(name, span)| name == "gather 0" || !meets(*span, none["gather 0"])));
    assert!(meets(da["gather 0"], da["P"]) && meets(da["gather 0"], da["A0"]));
    assert!(meets(da["resolve 0"], da["P"]), "P needs no R");
    assert!(meets(dba["gather 0"], dba["I2"]) && meets(dba["gather 1"], dba["A0"]));
    let end = |times: &times::Times| times["rest"].1;
    assert!(end(&dba) < end(&da) && end(&da) < end(&none));
}

/// A work of docs/images/overlap.svg: its stream, its start and end, and the works on other streams that it waits for.
struct Drawn {
    name: &'static str,
    stream: &'static str,
    span: (f64, f64),
    after: Option<&'static str>,
}

/// An order as in the picture: its works in order.
fn drawn(order: &str) -> Vec<Drawn> {
    let on_the_clock = |name: &'static str| match name {
        "R" | "R1" => "resolve 0",
        "R2" => "resolve 1",
        "G" | "G1" => "gather 0",
        "G2" => "gather 1",
        "S" => "scatter 0",
        own => own,
    };
    let picture = include_str!("../docs/images/overlap.svg");
    let cells = picture.split("data-cell=\"").skip(1).filter_map(|rest| rest.split('"').next());
    let works = cells.filter_map(|cell| cell.strip_prefix(order)?.strip_prefix(' '));
    let parsed = works.map(|cell| {
        let words: Vec<&str> = cell.split_whitespace().collect();
        Drawn {
            name: on_the_clock(words[0]),
            stream: words[1],
            span: (words[2].parse().unwrap(), words[3].parse().unwrap()),
            after: words.get(4).map(|name| on_the_clock(name)),
        }
    });
    parsed.collect()
}

#[test]
fn the_picture_of_the_orders_has_their_edges_and_no_others() {
    for (order, name) in [(Overlap::None, "none"), (Overlap::Da, "DA"), (Overlap::Dba, "DBA")] {
        let works = drawn(name);
        let edges: Vec<_> = times::edges(order, 1).into_iter().filter(|(_, to)| *to != "rest").collect();
        let mut after: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (index, work) in works.iter().enumerate() {
            let waits = works.iter().find(|other| Some(other.name) == work.after);
            assert!(
                waits.is_none_or(|other| edges.contains(&(other.name, work.name))),
                "{name}: {}",
                work.name
            );
            let last = works[..index].iter().rfind(|other| other.stream == work.stream);
            let before: Vec<&Drawn> = waits.into_iter().chain(last).collect();
            let earliest = before.iter().map(|other| other.span.1).fold(0.0, f64::max);
            assert!(
                work.span.0 == earliest && work.span.1 > earliest,
                "{name}: {} from {earliest}",
                work.name
            );
            let all = before.iter().flat_map(|other| after[other.name].iter().copied().chain([other.name]));
            let all = all.collect();
            after.insert(work.name, all);
        }
        for (from, to) in edges {
            assert!(after[to].contains(from), "{name}: {to} is not drawn after {from}");
        }
        let clock = times::times(order, 1, 20.0, None).swap_remove(0);
        assert!(after.keys().eq(clock.keys().filter(|work| *work != "rest")), "{name}");
    }
}

/// Three steps on the clock by a seed, the second without the waits of a range. Returns the second's number of waits.
fn without(seed: u64, order: Overlap, left_out: std::ops::Range<u64>) -> std::ops::Range<u64> {
    let memory = TestDevice::host(HostOptions::default());
    let options = ClockOptions { seed: Some(seed), ..ClockOptions::default() };
    let clock = ClockDevice::over(memory.device(), options).unwrap();
    clock.without_waits(left_out);
    let setting = Setting { query_rows: 1, real: [1, 1], half: 0, ..plain() };
    let setting = if order == Overlap::Dba { Setting { real: [2, 2], half: 1, ..setting } } else { setting };
    let mut decode = Decode::new(setting, Arc::clone(&clock) as Arc<dyn Device>, memory);
    decode.step(&[order]).unwrap();
    let first = clock.waits();
    decode.step(&[order]).unwrap();
    let second = first..clock.waits();
    decode.step(&[order]).unwrap();
    second
}

#[test]
fn control_each_wait_of_a_step_that_is_left_out_shows_for_some_seed() {
    for (order, rows) in [(Overlap::Da, 1), (Overlap::Dba, 2)] {
        let waits = without(0, order, 0..0);
        // Prepare waits in the compute stream for work recorded there: such a wait orders nothing unless the stream is
        // another.
        let prepares = 2 * (1 + rows);
        let edges = waits.start + prepares..waits.end;
        assert!(edges.end - edges.start > 30, "{order:?}: {edges:?}");
        for wait in edges {
            let shows = (0..400)
                .any(|seed| std::panic::catch_unwind(|| without(seed, order, wait..wait + 1)).is_err());
            assert!(shows, "{order:?}: wait {} of {waits:?} is not missed", wait - waits.start);
        }
    }
}

/// Three steps on the CUDA device whose attention takes two waves, by a seed of the stand-in, the second step without
/// one of its waits. Returns the number of waits of that step.
#[cfg(feature = "cuda")]
fn in_waves_on_cuda(seed: u64, left_out: Option<u64>) -> u64 {
    let device = TestDevice::cuda(&HostOptions::default(), Some(seed)).unwrap();
    let setting = Setting { waves: 2, budget: 10, query_rows: 3, real: [1, 1], half: 0, ..plain() };
    let mut decode = Decode::new(setting, device.device(), device.clone());
    decode.step(&[Overlap::Da]).unwrap();
    let first = device.waits();
    left_out.into_iter().for_each(|wait| device.without_waits(first + wait..first + wait + 1));
    decode.step(&[Overlap::Da]).unwrap();
    let waits = device.waits() - first;
    decode.step(&[Overlap::Da]).unwrap();
    waits
}

/// Waves fetch into the same scratch slots: the next one's gather waits for the attention of the last one.
#[cfg(feature = "cuda")]
#[test]
fn f2_an_attention_wave_fetches_nothing_into_slots_that_the_last_wave_still_reads() {
    if !device::driver_is_there() {
        return;
    }
    // Each micro-batch's prepare waits twice; each layer of each has seven edges, the sixth from A1 to the next G.
    let (prepares, edges, layers) = (4, 7, 2 * u64::from(engine::LAYERS));
    for seed in 0..20 {
        assert!(in_waves_on_cuda(seed, None) >= prepares + edges * layers);
    }
    if !device::own_driver("delays by a seed") {
        return;
    }
    let missed = |layer: u64| {
        let wait = prepares + edges * layer + 5;
        (0..40).any(|seed| std::panic::catch_unwind(|| in_waves_on_cuda(seed, Some(wait))).is_err())
    };
    // If a step fetches so few rows that one wave holds them, the next wave has nothing to overwrite.
    let shows = (0..layers).filter(|layer| missed(*layer)).count();
    assert!(shows > 1, "the control: without the edge attention reads the next wave's rows");
}
