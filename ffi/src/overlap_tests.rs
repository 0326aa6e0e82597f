//! Tests of overlapped layers through a C callback: the same calls and results as with an engine in Rust.

use std::ptr::{null, null_mut};

use forebay::device::{Slice, SplitIndices};
use forebay::overlap::{Engine, EngineCall};

use super::*;
use crate::cache::fb_cache_stats;
use crate::choice::{FB_OVERLAP_AHEAD, FB_OVERLAP_DA, FB_OVERLAP_DBA, FB_OVERLAP_NONE};
use crate::layer::*;
use crate::step::*;
use crate::testing::*;

const BATCH: u32 = 2;
const WORDS: usize = (BATCH * QUERY_ROWS * K) as usize;

/// The buffers of a micro-batch, and the selections of its layers: by layer or draft pass, all query rows of the batch.
#[derive(Clone, Debug, PartialEq)]
struct Side {
    selection: Vec<i32>,
    slots: Vec<i32>,
    lists: Vec<i32>,
    counts: Vec<u32>,
    selections: Vec<Vec<i32>>,
}

/// The script of both engines: they write the planned selections, note each call, and copy each layer's slots.
#[derive(Debug, Default)]
struct Script {
    sides: Vec<Side>,
    calls: Vec<[u32; 9]>,
    answers: Vec<i32>,
    /// The call with this number returns this status.
    fails: Option<(usize, u32)>,
    /// A cache that a callback must not enter.
    cache: Option<*mut FbCache>,
}

impl Script {
    fn called(&mut self, call: &FbEngineCall) -> u32 {
        let FbEngineCall { work, attended, attention_wave, micro_batch, layer, first, count, .. } = *call;
        let (first_query_row, query_rows) = (call.first_query_row, call.query_rows);
        self.calls.push([
            work,
            attended,
            attention_wave,
            micro_batch,
            layer,
            first,
            count,
            first_query_row,
            query_rows,
        ]);
        if let Some((_, status)) = self.fails.filter(|(number, _)| self.calls.len() == *number) {
            return status;
        }
        let side = &mut self.sides[micro_batch as usize];
        let row = (query_rows * K) as usize;
        if work == FB_WORK_INDEX {
            for one in first..first + count {
                let from = ((one * QUERY_ROWS + first_query_row) * K) as usize;
                let to = one as usize * row;
                side.selection[to..to + row]
                    .copy_from_slice(&side.selections[layer as usize][from..from + row]);
            }
        }
        if work == FB_WORK_ATTEND {
            self.answers.extend(&side.slots);
            self.answers.extend(&side.lists);
            self.answers.extend(side.counts.iter().map(|count| *count as i32));
        }
        0
    }
}

impl Engine for Script {
    fn enqueue(&mut self, call: &EngineCall, _stream: Stream) -> Result<()> {
        assert_eq!(self.called(&FbEngineCall::of(call)), 0);
        Ok(())
    }
}

/// # Safety
/// `data` is a script that nothing else uses, `call` the library's.
unsafe extern "C" fn enqueue(data: *mut c_void, call: *const FbEngineCall, stream: *mut c_void) -> u32 {
    // SAFETY: the script of the test, and the library's call.
    let (script, call) = unsafe { (&mut *data.cast::<Script>(), &*call) };
    assert_eq!((call.size, stream), (size_of::<FbEngineCall>(), null_mut()));
    if let Some(cache) = script.cache {
        let mut stats = blank();
        // SAFETY: room for the output, and a number that names no step.
        unsafe {
            assert_eq!(fb_cache_stats(cache, &mut stats), FbStatus::FbBusy);
            assert_eq!(fb_retire(cache, &mut 1, null_mut(), null_mut()), FbStatus::FbBusy);
        }
    }
    script.called(call)
}

fn engine(script: &mut Script) -> FbEngine {
    FbEngine { enqueue: Some(enqueue), data: (&raw mut *script).cast(), ..blank() }
}

impl Side {
    fn new(selections: Vec<Vec<i32>>) -> Side {
        let rows = 2 * (BATCH * QUERY_ROWS) as usize;
        Side {
            selection: vec![-1; WORDS],
            slots: vec![7; WORDS],
            lists: vec![7; rows * K as usize],
            counts: vec![7; rows],
            selections,
        }
    }

    fn config(&mut self) -> FbOverlapConfig {
        FbOverlapConfig {
            selection: self.selection.as_ptr(),
            slots: self.slots.as_mut_ptr(),
            lists: self.lists.as_mut_ptr(),
            counts: self.counts.as_mut_ptr(),
            lists_batch: BATCH,
            half: 1,
            ..blank()
        }
    }

    fn own(&self, rig: &Rig) -> Layers {
        let slice = |address: usize, words: usize| -> Slice {
            // SAFETY: memory of the process, and the twin's streams run inside its calls.
            unsafe { rig.own.import(address as u64, 4 * words as u64) }
        };
        let split_indices = SplitIndices {
            lists: slice(self.lists.as_ptr().addr(), self.lists.len()),
            counts: slice(self.counts.as_ptr().addr(), self.counts.len()),
            batch: BATCH,
        };
        let buffers = Buffers {
            selection: slice(self.selection.as_ptr().addr(), WORDS),
            slots: slice(self.slots.as_ptr().addr(), WORDS),
            split_indices: Some(split_indices),
        };
        let one = rig.stream;
        let streams = OverlapStreams { compute: one, resolve: one, gather: one, scatter: one };
        Layers { streams, batch: BATCH, half: 1, buffers }
    }
}

fn scripts(rig: &mut Rig, sides: u32) -> (Script, Script) {
    let sides: Vec<Side> = (0..sides as usize)
        .map(|side| Side::new((0..ALL).map(|_| rig.selection(2 * side..2 * side + 2)).collect()))
        .collect();
    (Script { sides: sides.clone(), ..Script::default() }, Script { sides, ..Script::default() })
}

#[test]
fn a_layer_in_each_order_equals_rusts() {
    let mut rig = Rig::new(config());
    for number in [FB_OVERLAP_NONE, FB_OVERLAP_DA, FB_OVERLAP_DBA] {
        for _ in 0..3 {
            let (step, mut own) = rig.prepare(0..2, 0);
            let (mut script, mut twin) = scripts(&mut rig, 1);
            script.cache = Some(rig.cache);
            let passes = (0..LAYERS).map(|layer| (layer, FB_ALL_QUERY_ROWS));
            for (layer, pass) in passes.chain((0..QUERY_ROWS).map(|pass| (LAYERS, pass + 1))) {
                let (layers, engine) = (script.sides[0].config(), engine(&mut script));
                // SAFETY: buffers of the step's shape, and the callback of this test.
                ok(unsafe { fb_overlap(rig.cache, step, layer, pass, number, &layers, &engine) });
                let layers = twin.sides[0].own(&rig);
                let (layer, pass, overlap) = (Layer(layer), pass.checked_sub(1), order(0, number).unwrap());
                rig.twin.overlap(&mut own, layer, pass, overlap, &layers, &mut twin).unwrap();
            }
            assert_eq!((&script.calls, &script.answers), (&twin.calls, &twin.answers));
            assert!(script.calls.iter().any(|call| call[0] == FB_WORK_REST));
            rig.end(step, own);
        }
    }
}

const ORDERS: [u32; ALL as usize] = [FB_OVERLAP_NONE, FB_OVERLAP_DBA, FB_OVERLAP_DA, FB_OVERLAP_DA];

#[test]
fn steps_of_several_micro_batches_equal_rusts() {
    let mut rig = Rig::new(config());
    for round in 0..4 {
        // Every other time the second step is the first one in the cache.
        let mut open = [rig.prepare(0..2, 0), rig.prepare(2..4, 1)];
        let (mut script, mut twin) = scripts(&mut rig, 2);
        let named: Vec<usize> = if round % 2 == 0 { vec![0, 1] } else { vec![1, 0] };
        let steps: Vec<FbStep> = named.iter().map(|of| open[*of].0).collect();
        let layers: Vec<FbOverlapConfig> = named.iter().map(|of| script.sides[*of].config()).collect();
        let (of, to) = (steps.as_ptr(), layers.as_ptr());
        let engine = engine(&mut script);
        // SAFETY: buffers of the steps' shape, and the callback of this test.
        ok(unsafe { fb_overlap_steps(rig.cache, of, to, 2, ORDERS.as_ptr(), QUERY_ROWS, &engine) });
        let layers: Vec<Layers> = named.iter().map(|of| twin.sides[*of].own(&rig)).collect();
        let orders: Vec<Overlap> = ORDERS.iter().map(|one| order(0, *one).unwrap()).collect();
        let [(_, first), (_, second)] = &mut open;
        let mut own = if round % 2 == 0 { [first, second] } else { [second, first] };
        let mut own: Vec<(&mut Step, Layers)> = own.iter_mut().map(|own| &mut **own).zip(layers).collect();
        rig.twin.overlap_steps(&mut own, &orders, QUERY_ROWS, &mut twin).unwrap();
        assert_eq!((&script.calls, &script.answers), (&twin.calls, &twin.answers));
        open.into_iter().for_each(|(step, own)| rig.end(step, own));
    }
}

fn refused(made: FbStatus, wanted: FbStatus, rig: &Rig, said: &str) {
    assert_eq!(made, wanted, "{said}");
    let text = error_text(rig.cache);
    assert!(text.contains(said), "`{said}` is not in `{text}`");
}

#[test]
fn an_error_of_a_callback_is_returned_and_abandons_the_step() {
    let mut rig = Rig::new(config());
    let kinds = [(8, FbStatus::FbOutOfRange), (12, FbStatus::FbIo), (14, FbStatus::FbInternal)];
    for (number, (said, wanted)) in
        [(1, kinds[0]), (2, kinds[1]), (4, kinds[2]), (3, (77, FbStatus::FbCancelled))]
    {
        let (mut step, mut own) = rig.prepare(0..2, 0);
        let (mut script, _) = scripts(&mut rig, 1);
        script.fails = Some((number, said));
        let (layers, engine) = (script.sides[0].config(), engine(&mut script));
        // SAFETY: buffers of the step's shape, and the callback of this test.
        unsafe {
            let made = fb_overlap(rig.cache, step, 0, 0, FB_OVERLAP_DA, &layers, &engine);
            refused(made, wanted, &rig, &format!("status {said}"));
            assert_eq!(script.calls.len(), number, "no call after it");
            let again = fb_overlap(rig.cache, step, 0, 0, FB_OVERLAP_DA, &layers, &engine);
            refused(again, FbStatus::FbInvalidState, &rig, "abandoned");
            ok(fb_finish(rig.cache, step, null_mut()));
            let ended = fb_retire(rig.cache, &mut step, null_mut(), null_mut());
            refused(ended, FbStatus::FbCancelled, &rig, "");
        }
        rig.twin.abandon(&mut own).unwrap();
        rig.twin.finish(&mut own, rig.stream).unwrap();
        let ended = rig.twin.retire(own, rig.stream).unwrap_err();
        assert_eq!(ended.error.kind(), Kind::Cancelled);
        rig.reopen(0..2);
    }
}

#[test]
fn overlap_refuses_invalid_arguments_before_it_enqueues_anything() {
    use FbStatus::*;
    let mut rig = Rig::new(config());
    let open = [rig.prepare(0..2, 0), rig.prepare(2..4, 1)];
    let (mut script, _) = scripts(&mut rig, 2);
    let engine = engine(&mut script);
    let right = script.sides[0].config();
    let step = open[0].0;
    let overlap = |layer: u32, pass: u32, order: u32, layers: FbOverlapConfig| {
        // SAFETY: all are refused before a buffer is touched.
        unsafe { fb_overlap(rig.cache, step, layer, pass, order, &layers, &engine) }
    };
    refused(overlap(ALL, 0, 0, right), FbOutOfRange, &rig, "layer");
    refused(overlap(0, 1, 0, right), FbOutOfRange, &rig, "no draft layer");
    refused(overlap(LAYERS, 3, 0, right), FbOutOfRange, &rig, "draft_passes");
    refused(overlap(0, u32::MAX, 0, right), FbOutOfRange, &rig, "draft_passes");
    refused(overlap(2, 0, 4, right), FbInvalidConfig, &rig, "an order of a layer");
    refused(overlap(2, 0, FB_OVERLAP_AHEAD, right), FbInvalidConfig, &rig, "the order ahead");
    let without = FbOverlapConfig { lists: null_mut(), counts: null_mut(), lists_batch: 0, ..right };
    refused(overlap(0, 0, FB_OVERLAP_DA, without), FbInvalidConfig, &rig, "index lists");
    for (layers, wanted, said) in [
        (FbOverlapConfig { batch: 1, ..right }, FbOutOfRange, "batch rows"),
        (FbOverlapConfig { batch: u32::MAX, ..right }, FbOutOfRange, "batch rows"),
        (FbOverlapConfig { micro_batch: 1, ..right }, FbInvalidConfig, "micro_batch"),
        (FbOverlapConfig { selection: null(), ..right }, FbInvalidConfig, "selection"),
        (FbOverlapConfig { slots: null_mut(), ..right }, FbInvalidConfig, "slots"),
        (FbOverlapConfig { slots: right.selection.cast_mut(), ..right }, FbOutOfRange, "slots"),
        (FbOverlapConfig { lists: null_mut(), ..right }, FbInvalidConfig, "lists"),
        (FbOverlapConfig { counts: null_mut(), ..right }, FbInvalidConfig, "counts"),
        (FbOverlapConfig { lists_batch: 1, ..right }, FbOutOfRange, "index lists"),
        (FbOverlapConfig { compute: 9 as *mut _, ..right }, FbInvalidState, "prepared on another stream"),
        (FbOverlapConfig { size: 8, ..right }, FbInvalidConfig, "fb_overlap_config"),
    ] {
        refused(overlap(0, 0, 0, layers), wanted, &rig, said);
    }
    let none = FbEngine { enqueue: None, ..engine };
    let of =
        |steps: &[FbStep], layers: &[FbOverlapConfig], count, orders: &[u32], drafts, engine: &FbEngine| {
            let (steps, layers, orders) = (steps.as_ptr(), layers.as_ptr(), orders.as_ptr());
            // SAFETY: as above.
            unsafe { fb_overlap_steps(rig.cache, steps, layers, count, orders, drafts, engine) }
        };
    let both = [open[0].0, open[1].0];
    let sides = [right, script.sides[1].config()];
    // SAFETY: null is refused.
    unsafe {
        let made = fb_overlap(rig.cache, step, 0, 0, 0, null(), &engine);
        refused(made, FbInvalidConfig, &rig, "fb_overlap_config");
        refused(fb_overlap(rig.cache, step, 0, 0, 0, &right, null()), FbInvalidConfig, &rig, "fb_engine");
        refused(fb_overlap(rig.cache, step, 0, 0, 0, &right, &none), FbInvalidConfig, &rig, "enqueue");
        refused(fb_overlap(rig.cache, 5, 0, 0, 0, &right, &engine), FbClosed, &rig, "step");
        let steps = |steps, layers, orders| fb_overlap_steps(rig.cache, steps, layers, 2, orders, 0, &engine);
        refused(steps(null(), sides.as_ptr(), ORDERS.as_ptr()), FbInvalidConfig, &rig, "steps");
        refused(steps(both.as_ptr(), null(), ORDERS.as_ptr()), FbInvalidConfig, &rig, "fb_overlap_config");
        refused(steps(both.as_ptr(), sides.as_ptr(), null()), FbInvalidConfig, &rig, "by_layer");
    }
    refused(of(&both, &sides, 0, &ORDERS, 0, &engine), FbOutOfRange, &rig, "one of each micro-batch");
    refused(of(&both, &sides, 3, &ORDERS, 0, &engine), FbOutOfRange, &rig, "one of each micro-batch");
    refused(of(&[step; 2], &sides, 2, &ORDERS, 0, &engine), FbInvalidConfig, &rig, "named twice");
    refused(of(&[step, 9], &sides, 2, &ORDERS, 0, &engine), FbClosed, &rig, "step");
    refused(of(&both, &sides, 2, &[0, 0, 5, 0], 0, &engine), FbInvalidConfig, &rig, "an order of a layer");
    refused(of(&both, &sides, 2, &ORDERS, 3, &engine), FbOutOfRange, &rig, "draft_passes");
    refused(of(&both, &sides, 2, &ORDERS, 0, &none), FbInvalidConfig, &rig, "enqueue");
    assert!(script.calls.is_empty(), "nothing was enqueued");
    for (step, own) in open {
        rig.rest(step, &own);
        rig.end(step, own);
    }
}

/// An engine that does nothing.
///
/// # Safety
/// Always.
unsafe extern "C" fn idle(_data: *mut c_void, _call: *const FbEngineCall, _stream: *mut c_void) -> u32 {
    0
}

#[test]
fn no_call_of_a_step_allocates() {
    let rig = Rig::new(roomy());
    let row =
        |of: usize| FbBatchRow { sequence: rig.sequences[of].number, accepted: 0, query_rows: QUERY_ROWS };
    let (first, second) = ([row(0), row(1)], [row(2), row(3)]);
    let mut sides = [Side::new(Vec::new()), Side::new(Vec::new())];
    sides.iter_mut().for_each(|side| side.selection.iter_mut().zip(0..).for_each(|(to, p)| *to = p));
    let (selection, mut slots) = (vec![5; ALL as usize * WORDS], vec![7; ALL as usize * WORDS]);
    let (mut counts, mut count) = ([Default::default(); ALL as usize], 0);
    let layers = sides.each_mut().map(Side::config);
    let engine = FbEngine { enqueue: Some(idle), ..blank() };
    let step = |rows: &[FbBatchRow; 2], micro_batch| {
        let config = FbStepConfig {
            rows: rows.as_ptr(),
            row_count: 2,
            query_rows: QUERY_ROWS,
            micro_batch,
            ..blank()
        };
        let mut step = 0;
        // SAFETY: the rows are valid, and room for the output.
        ok(unsafe { fb_prepare(rig.cache, &config, null_mut(), &mut step) });
        step
    };
    let mut whole = || {
        let mut steps = [step(&first, 0), step(&second, 1)];
        let (to, range, none) = (slots.as_mut_ptr(), blank::<FbStepRange>(), null_mut());
        let buffers = FbBuffers { selection: selection.as_ptr(), slots: to, ..blank() };
        // SAFETY: buffers of the steps' shape, and room for the outputs.
        unsafe {
            ok(fb_layer(rig.cache, steps[0], 0, selection.as_ptr(), to, none));
            ok(fb_layers(rig.cache, steps[0], selection.as_ptr(), to, none));
            ok(fb_resolve(rig.cache, steps[0], &range, &buffers, none));
            ok(fb_gather(rig.cache, steps[0], &range, 0, none));
            ok(fb_scatter(rig.cache, steps[0], 0, none));
            ok(fb_scatter_range(rig.cache, steps[0], &range, none));
            ok(fb_overlap(rig.cache, steps[0], 1, 0, FB_OVERLAP_DBA, &layers[0], &engine));
            let (of, orders) = (steps.as_ptr(), ORDERS.as_ptr());
            ok(fb_overlap_steps(rig.cache, of, layers.as_ptr(), 2, orders, QUERY_ROWS, &engine));
            for step in &mut steps {
                ok(fb_finish(rig.cache, *step, none));
                ok(fb_retire(rig.cache, step, none, none.cast()));
            }
            ok(fb_retired_counts(rig.cache, counts.as_mut_ptr(), ALL, &mut count));
        }
    };
    whole();
    assert_eq!(allocations(whole), 0);
    assert!(allocations(|| drop(std::hint::black_box(Box::new(1)))) > 0, "the control");
}
