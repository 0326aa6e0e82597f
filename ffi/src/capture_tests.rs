//! Tests of captured steps through C, on the stand-in driver or the named driver, next to a twin in Rust on the host
//! device, and of the errors.

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};

use forebay::device::{Slice, SplitIndices};
use forebay::overlap::{Engine, EngineCall, OverlapStreams};
use forebay::{Buffers, Layers};
use forebay_standin::{Driver, Options};

use super::*;
use crate::cache::fb_cache_create;
use crate::choice::{FB_OVERLAP_AHEAD, FB_OVERLAP_DA, FB_OVERLAP_DBA, FB_OVERLAP_NONE};
use crate::device::*;
use crate::overlap::FbEngineCall;
use crate::testing::*;

#[allow(clippy::duplicate_mod, reason = "other tests have it too")]
#[path = "../../tests/support/skip.rs"]
mod skip;

const BATCH: u32 = 2;
const WORDS: usize = (BATCH * QUERY_ROWS * K) as usize;
const ROWS: usize = 2 * (BATCH * QUERY_ROWS) as usize;
const ORDERS: [u32; ALL as usize] = [FB_OVERLAP_NONE, FB_OVERLAP_DBA, FB_OVERLAP_DA, FB_OVERLAP_DA];

/// An engine whose selection is written beforehand, the same in every layer; it can refuse one call of its choice.
/// # Safety
/// `data` is null or names a number, `call` the library's.
unsafe extern "C" fn enqueue(data: *mut c_void, call: *const FbEngineCall, _stream: *mut c_void) -> u32 {
    // SAFETY: a number of the test's or null, and the library's call.
    unsafe { if data.is_null() || (*call).work != *data.cast::<u32>() { 0 } else { 12 } }
}

const fn engine(data: *mut u32) -> FbEngine {
    FbEngine { size: size_of::<FbEngine>(), enqueue: Some(enqueue), data: data.cast() }
}

struct Idle;

impl Engine for Idle {
    fn enqueue(&mut self, _call: &EngineCall, _stream: forebay::device::Stream) -> Result<()> {
        Ok(())
    }
}

/// A cache on a driver with its twin, and two micro-batches.
struct Graphs {
    rig: Rig,
    sides: [FbOverlapConfig; 2],
    /// After the device in the order of fields, because the device is released first.
    driver: Driver,
}

impl Graphs {
    /// `None` without a driver.
    fn new() -> Option<Graphs> {
        let Some(driver) = Driver::new(Options::default()).unwrap() else {
            skip::skip("g++, which builds the stand-in driver");
            return None;
        };
        let library = CString::new(driver.library()).unwrap();
        let asked =
            FbDeviceConfig { kind: FB_DEVICE_CUDA, library: library.as_ptr(), threads: 64, ..blank() };
        let (mut device, mut cache, config) = (null_mut(), null_mut(), config());
        let stream = |device| {
            let mut stream = null_mut();
            // SAFETY: room for the output.
            ok(unsafe { fb_stream_create(device, &mut stream) });
            stream
        };
        let memory = |device, words: usize| {
            let mut address = null_mut();
            // SAFETY: room for the output.
            ok(unsafe { fb_device_allocate(device, 4 * words as u64, &mut address) });
            address
        };
        // SAFETY: room for the outputs.
        unsafe {
            ok(fb_device_create(&asked, null_mut(), 0, &mut device));
            ok(fb_cache_create(device, &config, null_mut(), 0, &mut cache));
        }
        let compute = stream(device);
        let sides = [0, 1].map(|micro_batch| FbOverlapConfig {
            compute,
            resolve: stream(device),
            gather: stream(device),
            scatter: stream(device),
            selection: memory(device, WORDS).cast(),
            slots: memory(device, WORDS).cast(),
            lists: memory(device, ROWS * K as usize).cast(),
            counts: memory(device, ROWS).cast(),
            lists_batch: BATCH,
            batch: BATCH,
            half: 1,
            micro_batch,
            ..blank()
        });
        Some(Graphs { rig: Rig::of(config, device, cache, compute), sides, driver })
    }

    fn bucket(&self) -> FbCaptureConfig {
        FbCaptureConfig {
            micro_batches: self.sides.as_ptr(),
            by_layer: ORDERS.as_ptr(),
            count: 2,
            query_rows: QUERY_ROWS,
            draft_passes: QUERY_ROWS,
            ..blank()
        }
    }

    fn capture(&self) -> *mut FbCaptured {
        let mut captured = null_mut();
        // SAFETY: buffers of the bucket's shape, and room for the output.
        ok(unsafe { fb_capture(self.rig.cache, &self.bucket(), &engine(null_mut()), &mut captured) });
        captured
    }

    /// Runs one step of each micro-batch, launched by `launch` and in the twin layer by layer.
    fn step(&mut self, launch: impl FnOnce(&Graphs, &[FbStep])) {
        let rig = &mut self.rig;
        let selections = [rig.selection(0..2), rig.selection(2..4)];
        let mut open = [rig.prepare(0..2, 0), rig.prepare(2..4, 1)];
        for (side, selections) in self.sides.iter().zip(&selections) {
            let bytes: Vec<u8> = selections.iter().flat_map(|position| position.to_le_bytes()).collect();
            assert!(self.driver.write(side.selection.addr() as u64, &bytes));
        }
        let steps = [open[0].0, open[1].0];
        launch(self, &steps);
        let answers = [(); 2].map(|()| (vec![7; WORDS], vec![7; ROWS * K as usize], vec![7_u32; ROWS]));
        let rig = &mut self.rig;
        let slice = |address: usize, words: usize| -> Slice {
            // SAFETY: memory of the process, and the twin's streams run inside its calls.
            unsafe { rig.own.import(address as u64, 4 * words as u64) }
        };
        let layers = |side: usize| {
            let (slots, lists, counts) = &answers[side];
            let split_indices = SplitIndices {
                lists: slice(lists.as_ptr().addr(), lists.len()),
                counts: slice(counts.as_ptr().addr(), ROWS),
                batch: BATCH,
            };
            let one = rig.stream;
            Layers {
                streams: OverlapStreams { compute: one, resolve: one, gather: one, scatter: one },
                batch: BATCH,
                half: 1,
                buffers: Buffers {
                    selection: slice(selections[side].as_ptr().addr(), WORDS),
                    slots: slice(slots.as_ptr().addr(), WORDS),
                    split_indices: Some(split_indices),
                },
            }
        };
        let mut orders = Vec::new();
        declare_orders(&ORDERS, &mut orders).unwrap();
        let [(_, first), (_, second)] = &mut open;
        let mut own = [(first, layers(0)), (second, layers(1))];
        rig.twin.overlap_steps(&mut own, &orders, QUERY_ROWS, &mut Idle).unwrap();
        open.into_iter().for_each(|(step, own)| rig.end(step, own));
        for (side, (slots, ..)) in self.sides.iter().zip(&answers) {
            let mut bytes = vec![0; 4 * WORDS];
            assert!(self.driver.read(side.slots.addr() as u64, &mut bytes));
            let launched: Vec<i32> =
                bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect();
            same_slots(&launched, slots);
        }
    }
}

/// Slots are equal except for the begin of scratch, landing and budget slots: devices map memory in other grains.
fn same_slots(launched: &[i32], own: &[i32]) {
    let mut shifts = [None; 3];
    for (launched, own) in launched.iter().zip(own) {
        match own {
            -1 => assert_eq!(*launched, -1),
            _ => {
                let shift = shifts[(own / 64).min(2) as usize].get_or_insert(launched - own);
                assert_eq!(launched - own, *shift, "{launched} for {own}");
            }
        }
    }
    assert!(shifts[2].is_some(), "{own:?}");
}

#[test]
fn launches_equal_rusts_layer_by_layer_steps() {
    let Some(mut graphs) = Graphs::new() else { return };
    let captured = graphs.capture();
    for _ in 0..6 {
        graphs.step(|graphs, steps| {
            // SAFETY: two steps.
            ok(unsafe { fb_launch(graphs.rig.cache, captured, steps.as_ptr(), 2) });
        });
    }
    let (counts, _) = report_of(graphs.rig.cache);
    assert!(counts.iter().all(|count| count.hits > 0) && counts.iter().any(|count| count.misses > 0));
    ok(fb_captured_destroy(captured));
    assert_eq!(fb_captured_destroy(captured), FbStatus::FbClosed);
    // SAFETY: no step.
    let closed = unsafe { fb_launch(graphs.rig.cache, captured, [0; 2].as_ptr(), 2) };
    assert_eq!((closed, error_text(graphs.rig.cache).contains("fb_captured")), (FbStatus::FbClosed, true));
}

#[test]
fn launches_allocate_nothing() {
    let Some(mut graphs) = Graphs::new() else { return };
    let captured = graphs.capture();
    for round in 0..3 {
        graphs.step(|graphs, steps| {
            let (cache, steps) = (graphs.rig.cache, steps.as_ptr());
            // SAFETY: two steps.
            let calls = allocations(|| ok(unsafe { fb_launch(cache, captured, steps, 2) }));
            assert!(round == 0 || calls == 0, "{calls} allocations");
        });
    }
    ok(fb_captured_destroy(captured));
}

#[test]
fn an_engine_captures_around_the_layers_and_launches_its_own_graph() {
    let Some(mut graphs) = Graphs::new() else { return };
    let (mut captured, mut graph, mut exec) = (null_mut(), 0, 0);
    let (cache, stream) = (graphs.rig.cache, graphs.rig.at.addr() as u64);
    let bucket = graphs.bucket();
    // SAFETY: buffers of the bucket's shape, handles of the driver's, room for the outputs.
    unsafe {
        let early = fb_capture_into(cache, &bucket, &engine(null_mut()), &mut captured);
        assert_eq!(early, FbStatus::FbInvalidState);
        assert!(error_text(cache).contains("no capture is in progress"), "{}", error_text(cache));
        let api = graphs.driver.api();
        let mut context = 0;
        assert_eq!(api.primary_ctx_retain(&mut context, 0), 0);
        assert_eq!(api.ctx_push_current(context), 0);
        assert_eq!(api.stream_begin_capture(stream, 1), 0);
        ok(fb_capture_into(cache, &bucket, &engine(null_mut()), &mut captured));
        assert_eq!(api.stream_end_capture(stream, &mut graph), 0);
        assert_eq!(api.graph_instantiate(&mut exec, graph, 0), 0);
    }
    graphs.step(|graphs, steps| {
        // SAFETY: two steps, and the driver's handles.
        unsafe {
            let not_ours = fb_launch(cache, captured, steps.as_ptr(), 2);
            assert_eq!(not_ours, FbStatus::FbInvalidState, "the graph is the engine's");
            assert_eq!(graphs.driver.api().graph_launch(exec, stream), 0);
            ok(fb_launched(cache, captured, steps.as_ptr(), 2));
            assert_eq!(fb_launched(cache, captured, steps.as_ptr(), 2), FbStatus::FbInvalidState, "twice");
        }
    });
    ok(fb_captured_destroy(captured));
    // SAFETY: handles of the driver's, which nothing uses any more.
    unsafe {
        let api = graphs.driver.api();
        assert_eq!((api.graph_exec_destroy(exec), api.graph_destroy(graph)), (0, 0));
        assert_eq!((api.ctx_pop_current(&mut 0), api.primary_ctx_release(0)), (0, 0));
    }
}

fn refused(made: FbStatus, wanted: FbStatus, cache: *const FbCache, said: &str) {
    assert_eq!(made, wanted, "{said}");
    let text = error_text(cache);
    assert!(text.contains(said), "`{said}` is not in `{text}`");
}

#[test]
fn an_invalid_capture_is_refused_and_leaves_nothing() {
    use FbStatus::*;
    let Some(mut graphs) = Graphs::new() else { return };
    let (cache, right) = (graphs.rig.cache, graphs.bucket());
    let mut captured = null_mut();
    let mut capture = |config: FbCaptureConfig, engine: &FbEngine| {
        // SAFETY: buffers of the bucket's shape, and room for the output.
        let made = unsafe { fb_capture(cache, &config, engine, &mut captured) };
        assert!(captured.is_null(), "written on success only");
        made
    };
    let idle = engine(null_mut());
    let sides = graphs.sides;
    let twice = [sides[0], sides[0]];
    let unknown = [sides[0], FbOverlapConfig { micro_batch: 2, ..sides[1] }];
    let empty = [sides[0], FbOverlapConfig { batch: 0, ..sides[1] }];
    let without =
        [sides[0], FbOverlapConfig { lists: null_mut(), counts: null_mut(), lists_batch: 0, ..sides[1] }];
    let (orders, ahead) = ([0, 0, 0, 4], [0, 0, 0, FB_OVERLAP_AHEAD]);
    for (config, wanted, said) in [
        (FbCaptureConfig { micro_batches: null(), ..right }, FbInvalidConfig, "fb_overlap_config"),
        (FbCaptureConfig { micro_batches: twice.as_ptr(), ..right }, FbInvalidConfig, "named twice"),
        (FbCaptureConfig { micro_batches: unknown.as_ptr(), ..right }, FbOutOfRange, "micro-batch"),
        (FbCaptureConfig { micro_batches: empty.as_ptr(), ..right }, FbOutOfRange, "batch rows"),
        (FbCaptureConfig { micro_batches: without.as_ptr(), ..right }, FbInvalidConfig, "index lists"),
        (FbCaptureConfig { by_layer: null(), ..right }, FbInvalidConfig, "by_layer"),
        (FbCaptureConfig { by_layer: orders.as_ptr(), ..right }, FbInvalidConfig, "an order of a layer"),
        (FbCaptureConfig { by_layer: ahead.as_ptr(), ..right }, FbInvalidConfig, "the order ahead"),
        (FbCaptureConfig { count: 0, ..right }, FbOutOfRange, "one of each micro-batch"),
        (FbCaptureConfig { count: 3, ..right }, FbOutOfRange, "one of each micro-batch"),
        (FbCaptureConfig { query_rows: 0, ..right }, FbOutOfRange, "query_rows"),
        (FbCaptureConfig { query_rows: 3, ..right }, FbOutOfRange, "query_rows"),
        (FbCaptureConfig { draft_passes: 3, ..right }, FbOutOfRange, "draft_passes"),
        (FbCaptureConfig { reserved: 1, ..right }, FbInvalidConfig, "reserved"),
        (sized(16, right), FbInvalidConfig, "fb_capture_config"),
    ] {
        refused(capture(config, &idle), wanted, cache, said);
    }
    let mut refuses = crate::overlap::FB_WORK_PREPARE;
    refused(capture(right, &engine(&mut refuses)), FbIo, cache, "status 12");
    refused(capture(right, &FbEngine { enqueue: None, ..idle }), FbInvalidConfig, cache, "enqueue");
    let open = graphs.rig.prepare(0..2, 0);
    refused(capture(right, &idle), FbBusy, cache, "not finished");
    graphs.rig.rest(open.0, &open.1);
    graphs.rig.end(open.0, open.1);
    // SAFETY: null is refused.
    unsafe {
        let mut to = null_mut();
        refused(fb_capture(cache, null(), &idle, &mut to), FbInvalidConfig, cache, "fb_capture_config");
        refused(fb_capture(cache, &right, null(), &mut to), FbInvalidConfig, cache, "fb_engine");
        refused(fb_capture(cache, &right, &idle, null_mut()), FbInvalidConfig, cache, "captured");
        assert_eq!(fb_capture(null_mut(), &right, &idle, &mut to), FbInvalidConfig);
    }
    assert_eq!(graphs.driver.held_resources().graphs, 0);
}

#[test]
fn a_launch_is_refused_for_steps_that_do_not_fit_the_capture() {
    use FbStatus::*;
    let Some(mut graphs) = Graphs::new() else { return };
    let (cache, captured) = (graphs.rig.cache, graphs.capture());
    let mut other = Graphs::new().unwrap();
    let foreign = other.capture();
    graphs.step(|_, steps| {
        let swapped = [steps[1], steps[0]];
        // SAFETY: that many steps.
        unsafe {
            let launch =
                |captured, steps: &[FbStep]| fb_launch(cache, captured, steps.as_ptr(), steps.len() as u32);
            refused(launch(null(), steps), FbInvalidConfig, cache, "fb_captured");
            refused(launch(cache.cast_const().cast(), steps), FbInvalidConfig, cache, "fb_captured");
            refused(launch(foreign, steps), FbOutOfRange, cache, "another cache");
            refused(launch(captured, &steps[..1]), FbInvalidConfig, cache, "one step for each");
            refused(launch(captured, &[]), FbOutOfRange, cache, "one of each");
            refused(launch(captured, &swapped), FbInvalidConfig, cache, "another micro-batch");
            refused(launch(captured, &[steps[0]; 2]), FbInvalidConfig, cache, "named twice");
            refused(launch(captured, &[steps[0], 5]), FbClosed, cache, "step");
            refused(fb_launch(cache, captured, null(), 2), FbInvalidConfig, cache, "steps");
            let ours = fb_launched(cache, captured, steps.as_ptr(), 2);
            refused(ours, FbInvalidState, cache, "the graph is the cache's");
            ok(launch(captured, steps));
            refused(launch(captured, steps), FbInvalidState, cache, "have been launched");
        }
    });
    ok(fb_captured_destroy(captured));
    // A capture outlives its cache, and keeps the device.
    let device = other.rig.device;
    other.rig.end_cache();
    // SAFETY: it is refused.
    assert_eq!(unsafe { fb_device_destroy(device) }, FbStatus::FbBusy);
    assert!(
        error_text(device).contains("weights, updates or changes of replicas are left (left 1)"),
        "{}",
        error_text(device)
    );
    ok(fb_captured_destroy(foreign));
    drop(other.rig);
}

#[test]
fn a_device_without_graphs_refuses_a_capture() {
    let rig = Rig::new(config());
    let (mut words, mut captured) = (vec![0; 2 * WORDS], null_mut());
    let side = FbOverlapConfig {
        selection: words.as_ptr(),
        slots: words[WORDS..].as_mut_ptr(),
        batch: BATCH,
        ..blank()
    };
    let orders = [FB_OVERLAP_NONE; ALL as usize];
    let config = FbCaptureConfig {
        micro_batches: &side,
        by_layer: orders.as_ptr(),
        count: 1,
        query_rows: QUERY_ROWS,
        ..blank()
    };
    // SAFETY: buffers of the bucket's shape, and room for the output.
    let made = unsafe { fb_capture(rig.cache, &config, &engine(null_mut()), &mut captured) };
    refused(made, FbStatus::FbUnsupported, rig.cache, "graphs");
}
