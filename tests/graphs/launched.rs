//! The script of `graphs.rs` in captured steps, on the CUDA device and the stand-in driver.

use super::*;
use crate::device::{driver_is_there, own_driver};
use forebay::Error;
use forebay::device::Stream;
use forebay::overlap::EngineCall;
use forebay_standin::Standin;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub fn soak() -> bool {
    std::env::var("FOREBAY_SOAK").is_ok_and(|value| value == "1")
}

fn on_cuda(seed: Option<u64>) -> Arc<TestDevice> {
    TestDevice::cuda(&HostOptions::default(), seed).unwrap()
}

/// The buckets of both micro-batches to capture.
fn bucket<'a>(both: &'a [(MicroBatch, Layers)], by_layer: &'a [Overlap]) -> Capture<'a> {
    Capture { micro_batches: both, query_rows: QUERY_ROWS, by_layer, draft_passes: QUERY_ROWS }
}

fn capture(run: &mut Run, tables: &[Vec<Overlap>]) {
    let both = run.both();
    for by_layer in tables {
        let captured = run.with_engine(|cache, engine| cache.capture(&bucket(&both, by_layer), engine));
        run.captured.push(captured.unwrap());
    }
}

/// The same script on the host device and by graphs, with nodes in order or by a seed.
fn agree(seed: u64, order: Option<u64>, steps: u64) {
    compare(&config(), seed, order, steps, false);
}

/// As [`agree`], with or without resizes between the launches. Returns the rows that they moved.
fn compare(config: &Config, seed: u64, order: Option<u64>, steps: u64, resizes: bool) -> u64 {
    let mut host = Run::of(config.clone(), seed, TestDevice::host(HostOptions::default()));
    let mut graphs = Run::of(config.clone(), seed, on_cuda(order));
    (host.resizes, graphs.resizes) = (resizes, resizes);
    capture(&mut graphs, &tables(config));
    for step in 1..=steps {
        host.step();
        graphs.step();
        if step % 100 == 0 || step == steps {
            host.check_total();
            graphs.check_total();
            assert_eq!(host.came(), graphs.came(), "seed {seed}, order {order:?}, by step {step}");
            host.came.lock().unwrap().clear();
            graphs.came.lock().unwrap().clear();
        }
    }
    let [wanted, found] = [&host, &graphs].map(|run| run.cache.stats());
    assert_eq!(
        (wanted.resizes, wanted.moved_rows),
        (found.resizes, found.moved_rows),
        "seed {seed}, {order:?}"
    );
    assert_eq!(found.resizes > 0, resizes);
    found.moved_rows
}

#[test]
fn a_thousand_launches_have_the_same_result_as_the_host_device() {
    if !driver_is_there() {
        return;
    }
    agree(1, None, 1000);
}

#[test]
fn launches_with_late_and_reordered_nodes_have_the_same_result() {
    if !driver_is_there() {
        return;
    }
    for seed in 0..if soak() { 400 } else { 12 } {
        agree(100 + seed, Some(seed), 20);
    }
}

#[test]
fn budgets_change_between_launches_of_the_same_graphs() {
    if !driver_is_there() {
        return;
    }
    let moved = compare(&config(), 200, None, 100, true);
    assert!(moved > 500, "{moved} rows moved");
}

#[test]
fn budgets_change_between_late_and_reordered_launches() {
    if !driver_is_there() {
        return;
    }
    for seed in 0..if soak() { 400 } else { 8 } {
        compare(&config(), 300 + seed, Some(seed), 20, true);
    }
}

#[test]
fn launches_of_layers_that_share_a_selection_have_the_same_result() {
    if !driver_is_there() {
        return;
    }
    let moved = compare(&grouped(), 400, None, 100, true);
    assert!(moved > 500, "{moved} rows moved");
    for seed in 0..if soak() { 400 } else { 6 } {
        compare(&grouped(), 500 + seed, Some(seed), 20, true);
    }
}

/// A script with one captured table, without the waits of a range, and the waits of its capture.
fn without(seed: u64, by_layer: &[Overlap], left_out: Range<u64>) -> (Run, Range<u64>) {
    let mut run = Run::new(seed, on_cuda(Some(seed)));
    let first = run.device.waits();
    run.device.without_waits(left_out.start + first..left_out.end + first);
    capture(&mut run, &[by_layer.to_vec()]);
    let captured = 0..run.device.waits() - first;
    (run, captured)
}

/// Whether a few steps go wrong: rows, tables or selections, on a device that has not failed.
fn goes_wrong(mut run: Run) -> bool {
    let probe = run.device.event().unwrap();
    let steps = catch_unwind(AssertUnwindSafe(|| {
        (0..4).for_each(|_| run.step());
        run.check_total();
    }));
    assert!(run.device.query(probe).unwrap(), "the device is sound");
    steps.is_err()
}

#[test]
fn control_each_wait_that_is_left_out_of_a_graph_shows_for_some_seed() {
    if !own_driver("captures without a wait") {
        return;
    }
    for order in [Overlap::Da, Overlap::Dba] {
        let by_layer = [order; ALL as usize];
        let (run, waits) = without(0, &by_layer, 0..0);
        assert!(waits.end > 60 && !goes_wrong(run), "{waits:?}");
        // The second micro-batch's fork and the joins order nothing beyond the graph's own start and end. They are
        // there because a driver refuses streams that are not forked and joined.
        let end = waits.end;
        let demanded = vec![0, end - 3, end - 2, end - 1];
        let wrong = |wait: u64| {
            let mut seeds = 0..if demanded.contains(&wait) { 15 } else { 60 };
            seeds.any(|seed| goes_wrong(without(seed, &by_layer, wait..wait + 1).0))
        };
        let whole: Vec<u64> = waits.filter(|wait| !wrong(*wait)).collect();
        assert_eq!(whole, demanded, "{order:?}: waits that are not missed");
    }
}

/// Four launched steps, the second without the waits of a range. Returns which of its waits belong to the launch.
fn without_around(seed: u64, left_out: Range<u64>) -> Range<u64> {
    let mut run = Run::new(77, on_cuda(Some(seed)));
    capture(&mut run, &[vec![Overlap::Da; ALL as usize]]);
    run.step();
    let first = run.device.waits();
    run.device.without_waits(first + left_out.start..first + left_out.end);
    run.step();
    let launch = run.launch.start - first..run.launch.end - first;
    (0..2).for_each(|_| run.step());
    run.check_total();
    launch
}

#[test]
fn control_the_edges_around_a_launch_that_are_left_out_show_for_some_seed() {
    if !own_driver("delays by a seed") {
        return;
    }
    let launch = without_around(0, 0..0);
    assert_eq!(launch.end - launch.start, 2, "the second micro-batch before it and after it");
    for wait in launch {
        let wrong = |seed| catch_unwind(|| without_around(seed, wait..wait + 1)).is_err();
        assert!((0..200).any(wrong), "wait {wait} is not missed");
    }
}

/// A launch while the second micro-batch's stream is held, with the launch's first wait left out or not. Returns
/// whether the graph ends nevertheless.
fn launched_next_to_a_held_stream(left_out: u64) -> bool {
    let mut run = Run::new(8, on_cuda(None));
    capture(&mut run, &tables(&config()));
    (0..2).for_each(|micro| run.open(micro));
    run.number += 1;
    let (device, computes) = (run.device.clone(), run.layers.map(|layers| layers.streams.compute));
    let held = device.hold(computes[1]);
    let [mut first, mut second] = [run.prepare(0), run.prepare(1)];
    let next = device.waits();
    device.without_waits(next..next + left_out);
    run.cache.launch(&run.captured[0], &mut [&mut first, &mut second]).unwrap();
    let end = device.event().unwrap();
    device.record(end, computes[0]).unwrap();
    let ended = (0..10_000).any(|_| device.query(end).unwrap());
    drop(held);
    device.synchronize(end).unwrap();
    ended
}

#[test]
fn a_graph_runs_after_the_earlier_work_of_its_second_micro_batch() {
    if !driver_is_there() {
        return;
    }
    assert!(!launched_next_to_a_held_stream(0));
    assert!(launched_next_to_a_held_stream(1), "the control: without its edge the graph runs");
}

/// The refusal of a changed bucket, without a driver call.
fn refused(
    run: &mut Run,
    by_layer: &[Overlap],
    micro_batches: &[(MicroBatch, Layers)],
    (query_rows, draft_passes): (u32, u32),
) -> (Kind, String) {
    let capture = Capture { micro_batches, query_rows, by_layer, draft_passes };
    let device = run.device.clone();
    let calls = || device.standin().map(Standin::calls);
    let before = calls();
    let error = run.with_engine(|cache, engine| cache.capture(&capture, engine)).unwrap_err();
    assert_eq!(calls(), before, "{error}");
    (error.kind(), error.place().to_owned())
}

#[test]
fn steps_that_do_not_fit_a_bucket_are_refused_before_anything_is_captured() {
    if !driver_is_there() {
        return;
    }
    let mut run = Run::new(3, on_cuda(None));
    let (orders, both) = ([Overlap::Da; ALL as usize], run.both());
    let usual = (QUERY_ROWS, QUERY_ROWS);
    let (range, config) = (Kind::OutOfRange, Kind::InvalidConfig);
    let is = |kind: Kind, place: &str| (kind, place.to_owned());
    assert_eq!(refused(&mut run, &orders[..2], &both, usual), is(config, "orders by layer"));
    assert_eq!(refused(&mut run, &orders, &[], usual), is(config, "no micro-batch"));
    let twice = [both[0], both[0]];
    assert_eq!(refused(&mut run, &orders, &twice, usual), is(config, "a micro-batch is named twice"));
    let unknown = [(MicroBatch(2), both[0].1)];
    assert_eq!(refused(&mut run, &orders, &unknown, usual), is(range, "micro-batch"));
    let wide = [(MicroBatch(0), Layers { batch: BATCH + 1, ..both[0].1 })];
    assert_eq!(refused(&mut run, &orders, &wide, usual), is(range, "batch rows"));
    assert_eq!(refused(&mut run, &orders, &both, (0, 0)), is(range, "query rows"));
    assert_eq!(refused(&mut run, &orders, &both, (QUERY_ROWS + 1, 0)), is(range, "query rows"));
    let passes = (QUERY_ROWS, QUERY_ROWS + 1);
    assert_eq!(refused(&mut run, &orders, &both, passes), is(range, "draft passes"));
    // While a step of a micro-batch is open, its events are the step's.
    (0..2).for_each(|micro| run.open(micro));
    let open = run.prepare(0);
    let (kind, _) = refused(&mut run, &orders, &both, usual);
    assert_eq!(kind, Kind::Busy);
    drop(open);
}

#[test]
fn a_graph_serves_only_steps_of_its_own_cache_while_that_cache_exists() {
    if !driver_is_there() {
        return;
    }
    let device = on_cuda(None);
    let mut run = Run::new(4, device.clone());
    capture(&mut run, &tables(&config()));
    let mut other = Run::new(4, device);
    (0..2).for_each(|micro| other.open(micro));
    let mut steps = [other.prepare(0), other.prepare(1)];
    let operations = other.device.operations();
    let mut refused = |captured: &Captured| {
        let [first, second] = &mut steps;
        let error = other.cache.launch(captured, &mut [first, second]).unwrap_err();
        (error.kind(), error.place().to_owned())
    };
    let expected = (Kind::OutOfRange, "layers that another cache has captured".to_owned());
    assert_eq!(refused(&run.captured[0]), expected);
    // The cache that captured it is closed, and the graph still exists.
    let captured = std::mem::take(&mut run.captured);
    drop(run);
    assert_eq!(refused(&captured[0]), expected);
    drop(captured);
    assert_eq!(other.device.operations(), operations, "nothing has run");
}

#[test]
fn steps_that_do_not_fit_a_graph_are_refused_and_unchanged() {
    if !driver_is_there() {
        return;
    }
    let mut run = Run::new(11, on_cuda(None));
    capture(&mut run, &tables(&config()));
    (0..2).for_each(|micro| run.open(micro));
    run.number += 1;
    let mut steps = [run.prepare(0), run.prepare(1)];
    let [first, second] = &mut steps;
    let error = run.cache.launch(&run.captured[0], &mut [second, first]).unwrap_err();
    assert_eq!(error.place(), "a step of another micro-batch or of other query rows");
    let error = run.cache.launch(&run.captured[0], &mut [first]).unwrap_err();
    assert_eq!(error.place(), "one step for each captured micro-batch");
    let error = run.cache.launched(&run.captured[0], &mut [first, second]).unwrap_err();
    assert_eq!(error.place(), "the graph is the cache's");
    run.cache.launch(&run.captured[0], &mut [first, second]).unwrap();
}

#[test]
fn an_engine_that_fails_in_a_capture_leaks_nothing() {
    if !driver_is_there() {
        return;
    }
    let mut run = Run::new(8, on_cuda(None));
    let held = run.device.standin().map(Standin::held_resources);
    let (orders, both) = ([Overlap::Dba; ALL as usize], run.both());
    let mut calls = 0;
    loop {
        let captured = run.with_engine(|cache, engine| {
            cache.capture(&bucket(&both, &orders), &mut Failing { engine, left: calls })
        });
        match captured {
            Ok(_) => break,
            Err(error) => assert_eq!(error.kind(), Kind::Io),
        }
        assert_eq!(run.device.standin().map(Standin::held_resources), held, "call {calls}");
        calls += 1;
    }
    assert!(calls > 60, "{calls}");
    // Nothing ran, and the streams are unchanged.
    capture(&mut run, &tables(&config()));
    (0..10).for_each(|_| run.step());
    run.check_total();
}

/// Fails at a call.
struct Failing<'a> {
    engine: &'a mut dyn Engine,
    left: u32,
}

impl Engine for Failing<'_> {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> forebay::Result<()> {
        let Some(left) = self.left.checked_sub(1) else { return Err(Error::new(Kind::Io, "engine")) };
        self.left = left;
        self.engine.enqueue(call, stream)
    }
}

/// The engine captures both micro-batches by itself; later launches use its graph.
fn engine_captures(run: &mut Run, overlap: Overlap) -> Graph {
    let (both, by_layer) = (run.both(), [overlap; ALL as usize]);
    let first = run.layers[0].streams.compute;
    run.device.capture(first).unwrap();
    let captured = run.with_engine(|cache, engine| cache.capture_into(&bucket(&both, &by_layer), engine));
    let graph = run.device.captured(first).unwrap();
    run.own = Some((graph, captured.unwrap()));
    graph
}

#[test]
fn an_engine_that_captures_by_itself_reports_its_launches() {
    if !driver_is_there() {
        return;
    }
    let mut run = Run::new(9, on_cuda(Some(3)));
    engine_captures(&mut run, Overlap::Da);
    (0..20).for_each(|_| run.step());
    run.check_total();
}

#[test]
fn a_graph_that_is_launched_without_a_step_does_nothing() {
    if !driver_is_there() {
        return;
    }
    let mut run = Run::new(13, on_cuda(None));
    let graph = engine_captures(&mut run, Overlap::Dba);
    let first = run.layers[0].streams.compute;
    (0..3).for_each(|_| run.step());
    run.check_total();
    let digests = |run: &Run| -> Vec<u64> {
        run.sequences.iter().flatten().map(|s| run.cache.digest(s.handle).unwrap()).collect()
    };
    let before = digests(&run);
    for micro in 0..2 {
        // The engine has no rows either; its selections for them must resolve to no slots.
        run.shared.queue(micro, StepWork { number: 0, seed: 0, rows: Vec::new() });
    }
    run.device.launch(graph, first).unwrap();
    assert_eq!(digests(&run), before);
    // As for the steps that come.
    (0..10).for_each(|_| run.step());
    run.check_total();
    // Its cache is gone; the cache's memory is the device's.
    let (device, shared) = (run.device.clone(), run.shared.clone());
    drop(run);
    (0..2).for_each(|micro| shared.queue(micro, StepWork { number: 0, seed: 0, rows: Vec::new() }));
    device.launch(graph, first).unwrap();
    let end = device.event().unwrap();
    device.record(end, first).unwrap();
    device.synchronize(end).unwrap();
    assert_eq!(shared.wrong(), Vec::<String>::new());
}

/// Panics at its first call.
struct Panicking;

impl Engine for Panicking {
    fn enqueue(&mut self, _: &EngineCall, _: Stream) -> forebay::Result<()> {
        panic!("engine")
    }
}

#[test]
fn a_callback_that_panics_in_a_capture_leaks_nothing() {
    if !driver_is_there() {
        return;
    }
    let mut run = Run::new(8, on_cuda(None));
    let held = run.device.standin().map(Standin::held_resources);
    let (orders, both) = ([Overlap::Da; ALL as usize], run.both());
    let captured =
        AssertUnwindSafe(|| run.cache.capture(&bucket(&both, &orders), &mut Panicking).map(|_| ()));
    assert!(catch_unwind(captured).is_err());
    assert_eq!(run.device.standin().map(Standin::held_resources), held);
    capture(&mut run, &tables(&config()));
    (0..4).for_each(|_| run.step());
    run.check_total();
}

#[test]
fn layers_for_an_engines_capture_are_refused_without_one() {
    if !driver_is_there() {
        return;
    }
    let mut run = Run::new(9, on_cuda(None));
    let (both, by_layer) = (run.both(), [Overlap::Da; ALL as usize]);
    let operations = run.device.operations();
    let error = run.with_engine(|cache, engine| cache.capture_into(&bucket(&both, &by_layer), engine));
    assert_eq!(error.unwrap_err().place(), "no capture is in progress on the first compute stream");
    assert_eq!(run.device.operations(), operations, "nothing has run");
}

#[test]
fn a_cache_closes_on_a_lost_context_that_only_a_ticket_would_report() {
    if !own_driver("fails an operation") {
        return;
    }
    let mut run = Run::new(8, on_cuda(None));
    let compute = run.layers[0].streams.compute;
    run.device.standin().unwrap().hold(compute.0);
    run.open(0);
    let standin = run.device.standin().unwrap();
    standin.fail_operation(0, 700);
    standin.let_go(compute.0);
    let handle = run.sequences[0][0].handle;
    run.cache.close(handle, compute).unwrap();
    assert_eq!(run.cache.reap(compute).unwrap(), 0);
}

#[test]
fn a_replay_that_is_refused_after_its_launch_ends_after_the_graph() {
    if !own_driver("fails a call") {
        return;
    }
    let mut late = 0;
    for call in 0.. {
        let mut run = Run::new(8, on_cuda(None));
        capture(&mut run, &tables(&config()));
        (0..2).for_each(|micro| run.open(micro));
        run.number += 1;
        let mut steps = [run.prepare(0), run.prepare(1)];
        let computes = run.layers.map(|layers| layers.streams.compute);
        let device = run.device.clone();
        let standin = device.standin().unwrap();
        standin.hold(computes[0].0);
        let before = standin.operations();
        standin.fail_call(call, 1);
        let [first, second] = &mut steps;
        let refused = run.cache.launch(&run.captured[0], &mut [first, second]);
        if standin.failed_call().is_none() {
            refused.unwrap();
            standin.let_go(computes[0].0);
            break;
        }
        standin.fail_call(u64::MAX, 1);
        let [first, mut second] = steps;
        run.cache.finish(&mut second, computes[1]).unwrap();
        let ended = run.cache.retire(second, computes[1]).map(|_| ()).unwrap_err();
        standin.let_go(computes[0].0);
        let ran = standin.operations() - before;
        // More than the ends of both steps: the graph was launched.
        if refused.is_err() && ran > 20 {
            assert!(ended.step.is_some(), "call {call}: retired while the graph that runs it is held back");
            late += 1;
        }
        drop(first);
    }
    assert!(late > 0, "none was refused after the launch");
}

#[test]
fn layers_on_another_stream_than_the_steps_are_refused() {
    if !driver_is_there() {
        return;
    }
    let mut run = Run::new(11, on_cuda(None));
    capture(&mut run, &tables(&config()));
    (0..2).for_each(|micro| run.open(micro));
    run.number += 1;
    run.layers.swap(0, 1);
    let mut steps = [run.prepare(0), run.prepare(1)];
    let [first, second] = &mut steps;
    let error = run.cache.launch(&run.captured[0], &mut [first, second]).unwrap_err();
    assert_eq!((error.kind(), error.operation()), (Kind::InvalidState, "launch"));
    assert_eq!(error.place(), "the step was prepared on another stream than the compute stream");
}
