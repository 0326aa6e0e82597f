//! Tests of steps through C, next to a twin in Rust that gets the same calls: slots, lists, counters and lengths are
//! equal.

use std::ptr::{null, null_mut};

use forebay::device::{Slice, SplitIndices};
use forebay::{Buffers, Layer, LayerCall, Step, Streams};

use super::*;
use crate::cache::fb_slab;
use crate::config::FbCacheConfig;
use crate::layer::*;
use crate::testing::*;

/// Words of this process, under the twin device's name for them.
fn slice<T>(rig: &Rig, words: &[T]) -> Slice {
    // SAFETY: memory of the process, and the twin's stream runs inside its calls.
    unsafe { rig.own.import(words.as_ptr() as u64, 4 * words.len() as u64) }
}

/// One layer of the twin.
fn twin_layer(rig: &Rig, own: &Step, layer: u32, selection: &[i32]) -> Vec<i32> {
    let slots = vec![7; selection.len()];
    let buffers =
        Buffers { selection: slice(rig, selection), slots: slice(rig, &slots), split_indices: None };
    let streams = Streams { resolve: rig.stream, gather: rig.stream };
    rig.twin.layer(own, LayerCall::whole(Layer(layer)), streams, buffers).unwrap();
    slots
}

fn scatter(rig: &Rig, step: FbStep, own: &Step, layer: u32) {
    ok(fb_scatter(rig.cache, step, layer, null_mut()));
    rig.twin.scatter(own, LayerCall::whole(Layer(layer)), rig.stream).unwrap();
}

#[test]
fn layers_one_by_one_equal_rusts() {
    let mut rig = Rig::new(config());
    for _ in 0..12 {
        let (step, own) = rig.prepare(0..4, 0);
        for layer in 0..ALL {
            let selection = rig.selection(0..4);
            let mut slots = vec![7; selection.len()];
            // SAFETY: buffers of the step's shape.
            ok(unsafe {
                fb_layer(rig.cache, step, layer, selection.as_ptr(), slots.as_mut_ptr(), null_mut())
            });
            assert_eq!(slots, twin_layer(&rig, &own, layer, &selection));
            scatter(&rig, step, &own, layer);
        }
        rig.end(step, own);
    }
    let (counts, _) = report_of(rig.cache);
    assert!(counts.iter().all(|count| count.hits > 0 && count.misses > count.scratch), "{counts:?}");
    assert!(counts.iter().any(|count| count.scratch > 0), "{counts:?}");
}

#[test]
fn all_layers_in_one_call_equal_the_layers_one_by_one() {
    let mut rig = Rig::new(roomy());
    for _ in 0..6 {
        let (step, own) = rig.prepare(0..3, 0);
        let selection: Vec<i32> = (0..ALL).flat_map(|_| rig.selection(0..3)).collect();
        let mut slots = vec![7; selection.len() + 1];
        // SAFETY: buffers of the step's shape, one layer after the other.
        ok(unsafe { fb_layers(rig.cache, step, selection.as_ptr(), slots.as_mut_ptr(), null_mut()) });
        assert_eq!(slots.pop(), Some(7), "nothing after them");
        let chunks = selection.chunks(selection.len() / ALL as usize);
        let wanted: Vec<i32> =
            (0..).zip(chunks).flat_map(|(layer, chunk)| twin_layer(&rig, &own, layer, chunk)).collect();
        assert_eq!(slots, wanted);
        (0..ALL).for_each(|layer| scatter(&rig, step, &own, layer));
        rig.end(step, own);
    }
}

/// The first word of a row that C's cache has in a slot of its slab.
fn word_in_slot(rig: &Rig, layer: u32, slot: i32) -> u32 {
    let (mut address, mut bytes) = (null_mut(), 0);
    // SAFETY: room for the results.
    ok(unsafe { fb_slab(rig.cache, layer, &mut address, &mut bytes) });
    let at = slot as u64 * u64::from(ROW_BYTES);
    assert!(at + u64::from(ROW_BYTES) <= bytes);
    // SAFETY: a row of the host device's slab, whose inline stream is done.
    unsafe { address.cast::<u8>().add(at as usize).cast::<u32>().read() }
}

#[test]
fn layers_of_a_group_have_one_selection_and_the_same_slots() {
    const GROUPS: [usize; ALL as usize] = [0, 1, 1, 2];
    let mut rig = Rig::new(FbCacheConfig { lone_layers: 1, group_layers: 2, ..roomy() });
    for _ in 0..6 {
        let (step, own) = rig.prepare(0..3, 0);
        let mut words: Vec<i32> = (0..3).flat_map(|_| rig.selection(0..3)).collect();
        let of_groups = words.len();
        // The slots begin where the selection of the last group ends.
        words.resize(2 * of_groups + 1, 7);
        let from = words.as_mut_ptr();
        // SAFETY: buffers of the step's shape, one group after the other.
        unsafe {
            let short = fb_layers(rig.cache, step, from, from.add(of_groups - 1), null_mut());
            status(short, FbStatus::FbOutOfRange, &rig, "selection and slots overlap");
            ok(fb_layers(rig.cache, step, from, from.add(of_groups), null_mut()));
        }
        assert_eq!(words.pop(), Some(7), "nothing after them");
        let (selection, slots) = words.split_at(of_groups);
        let of_group = |words: &[i32], layer: u32| {
            words.chunks(of_groups / 3).nth(GROUPS[layer as usize]).unwrap().to_vec()
        };
        for layer in 0..ALL {
            let (selection, slots) = (of_group(selection, layer), of_group(slots, layer));
            let twin = twin_layer(&rig, &own, layer, &selection);
            assert_eq!(twin, if layer == 2 { vec![7; slots.len()] } else { slots.clone() });
            for (entry, (position, slot)) in (0..).zip(selection.iter().zip(&slots)) {
                assert_eq!(*slot < 0, *position < 0);
                if (0..PROMPT as i32).contains(position) {
                    let sequence = entry / (QUERY_ROWS * K);
                    let word = sequence * 1_000_000 + layer * 10_000 + *position as u32;
                    assert_eq!(word_in_slot(&rig, layer, *slot), word, "layer {layer} at {position}");
                }
            }
        }
        (0..ALL).for_each(|layer| scatter(&rig, step, &own, layer));
        rig.end(step, own);
    }
}

#[test]
fn all_layers_in_one_call_are_refused_where_a_row_might_be_in_a_scratch_slot() {
    let mut rig = Rig::new(config());
    let (step, own) = rig.prepare(0..3, 0);
    let selection: Vec<i32> = (0..ALL).flat_map(|_| rig.selection(0..3)).collect();
    let mut slots = vec![7; selection.len()];
    // SAFETY: buffers of the step's shape, one layer after the other.
    let made = unsafe { fb_layers(rig.cache, step, selection.as_ptr(), slots.as_mut_ptr(), null_mut()) };
    status(
        made,
        FbStatus::FbInvalidConfig,
        &rig,
        "all layers share the scratch slots, and no attention runs between them",
    );
    status(
        made,
        FbStatus::FbInvalidConfig,
        &rig,
        "(layer 0, batch row 0, selected 16, budget 12); call layer by layer",
    );
    assert!(slots.iter().all(|slot| *slot == 7), "nothing was enqueued");
    // The step continues, and gives the result of one without that call.
    for (layer, chunk) in (0..).zip(selection.chunks(selection.len() / ALL as usize)) {
        let slots = &mut slots[..chunk.len()];
        // SAFETY: buffers of the step's shape.
        ok(unsafe { fb_layer(rig.cache, step, layer, chunk.as_ptr(), slots.as_mut_ptr(), null_mut()) });
        assert_eq!(slots, twin_layer(&rig, &own, layer, chunk));
        scatter(&rig, step, &own, layer);
    }
    rig.end(step, own);
}

/// Resolves and gathers a step range on both sides, with split indices, and compares the outputs.
fn range(rig: &Rig, step: FbStep, own: &Step, range: &FbStepRange, call: LayerCall, selection: &[i32]) {
    let rows = call.draft_pass.map_or(QUERY_ROWS, |_| 1) * 4;
    let room = || (vec![7; selection.len()], vec![7; (2 * rows * K) as usize], vec![7; 2 * rows as usize]);
    let (mut written, wanted) = (room(), room());
    let buffers = FbBuffers {
        selection: selection.as_ptr(),
        slots: written.0.as_mut_ptr(),
        lists: written.1.as_mut_ptr(),
        counts: written.2.as_mut_ptr(),
        batch: 4,
        ..blank()
    };
    let split_indices =
        SplitIndices { lists: slice(rig, &wanted.1), counts: slice(rig, &wanted.2), batch: 4 };
    let own_buffers = Buffers {
        selection: slice(rig, selection),
        slots: slice(rig, &wanted.0),
        split_indices: Some(split_indices),
    };
    // SAFETY: buffers of the step range's shape.
    unsafe {
        ok(fb_resolve(rig.cache, step, range, &buffers, null_mut()));
        ok(fb_gather(rig.cache, step, range, 0, null_mut()));
        ok(fb_scatter_range(rig.cache, step, range, null_mut()));
    }
    rig.twin.resolve(own, call, rig.stream, own_buffers).unwrap();
    rig.twin.gather(own, call, 0, rig.stream).unwrap();
    rig.twin.scatter(own, call, rig.stream).unwrap();
    assert_eq!(written, wanted);
}

#[test]
fn step_ranges_equal_rusts() {
    let mut rig = Rig::new(config());
    for round in 0..6 {
        let (step, own) = rig.prepare(0..4, 0);
        for layer in 0..LAYERS {
            let selection = rig.selection(0..4);
            let row = (QUERY_ROWS * K) as usize;
            let of = |first, count, given| {
                let call =
                    LayerCall { layer: Layer(layer), batch_rows: Some((first, count)), draft_pass: None };
                (FbStepRange { layer, first, count: given, ..blank() }, call)
            };
            let (passed, call) = of(0, 1, 1);
            range(&rig, step, &own, &passed, call, &selection[..row]);
            // All rows from the second one on.
            let (passed, call) = of(1, 3, if round % 2 == 0 { 0 } else { 3 });
            range(&rig, step, &own, &passed, call, &selection[row..]);
        }
        for pass in 0..QUERY_ROWS {
            let call = LayerCall { layer: Layer(LAYERS), batch_rows: None, draft_pass: Some(pass) };
            let selection: Vec<i32> =
                rig.selection(0..4).chunks(K as usize).step_by(2).flatten().copied().collect();
            let passed = FbStepRange { layer: LAYERS, draft_pass: pass + 1, ..blank() };
            range(&rig, step, &own, &passed, call, &selection);
        }
        rig.end(step, own);
    }
}

fn status(made: FbStatus, wanted: FbStatus, rig: &Rig, said: &str) {
    assert_eq!(made, wanted, "{said}");
    let text = error_text(rig.cache);
    assert!(text.contains(said), "`{said}` is not in `{text}`");
}

#[test]
fn an_invalid_step_is_refused_and_nothing_begins() {
    use FbStatus::*;
    let rig = Rig::new(config());
    let rows: Vec<FbBatchRow> = rig
        .sequences
        .iter()
        .map(|of| FbBatchRow { sequence: of.number, accepted: 0, query_rows: 1 })
        .collect();
    let right = FbStepConfig { rows: rows.as_ptr(), row_count: 4, query_rows: 1, ..blank() };
    let foreign = [FbBatchRow { sequence: rows[0].sequence ^ 1 << 40, ..rows[0] }];
    let twice = [rows[0], rows[0]];
    let mut step = 99;
    let mut refuse = |config: FbStepConfig, wanted, said| {
        // SAFETY: its rows are valid, and room for the output.
        let made = unsafe { fb_prepare(rig.cache, &config, null_mut(), &mut step) };
        status(made, wanted, &rig, said);
        assert_eq!(step, 99, "written on success only");
    };
    refuse(FbStepConfig { rows: null(), ..right }, FbInvalidConfig, "rows");
    refuse(FbStepConfig { row_count: 0, ..right }, FbOutOfRange, "rows of the batch");
    refuse(FbStepConfig { row_count: 5, ..right }, FbOutOfRange, "rows of the batch");
    refuse(FbStepConfig { row_count: u32::MAX, ..right }, FbOutOfRange, "rows of the batch");
    refuse(FbStepConfig { query_rows: 0, ..right }, FbOutOfRange, "query rows");
    refuse(FbStepConfig { query_rows: 3, ..right }, FbOutOfRange, "query rows");
    refuse(FbStepConfig { micro_batch: 2, ..right }, FbOutOfRange, "micro-batch");
    refuse(FbStepConfig { reserved: 1, ..right }, FbInvalidConfig, "reserved");
    refuse(FbStepConfig { size: 8, ..right }, FbInvalidConfig, "fb_step_config");
    refuse(FbStepConfig { size: usize::MAX, ..right }, FbInvalidConfig, "fb_step_config");
    refuse(FbStepConfig { rows: foreign.as_ptr(), row_count: 1, ..right }, FbClosed, "sequence");
    refuse(FbStepConfig { rows: twice.as_ptr(), row_count: 2, ..right }, FbInvalidConfig, "twice");
    let more = [FbBatchRow { accepted: 1, ..rows[0] }];
    refuse(FbStepConfig { rows: more.as_ptr(), row_count: 1, ..right }, FbOutOfRange, "accepted rows");
    let device = [FbBatchRow { accepted: FB_ACCEPTED_ON_DEVICE, ..rows[0] }];
    refuse(FbStepConfig { rows: device.as_ptr(), row_count: 1, ..right }, FbInvalidConfig, "tensor");
    let wide = [FbBatchRow { query_rows: 2, ..rows[0] }];
    refuse(FbStepConfig { rows: wide.as_ptr(), row_count: 1, ..right }, FbOutOfRange, "query rows");
    // SAFETY: null is refused.
    unsafe {
        status(fb_prepare(rig.cache, null(), null_mut(), &mut step), FbInvalidConfig, &rig, "fb_step_config");
        status(fb_prepare(rig.cache, &right, null_mut(), null_mut()), FbInvalidConfig, &rig, "step");
        assert_eq!(fb_prepare(null_mut(), &right, null_mut(), &mut step), FbInvalidConfig);
        // A stream that the device does not have.
        status(fb_prepare(rig.cache, &right, 77 as *mut _, &mut step), FbOutOfRange, &rig, "");
    }
    // A caller built before `accepted` existed.
    let older = FbStepConfig { size: std::mem::offset_of!(FbStepConfig, accepted), micro_batch: 9, ..right };
    // SAFETY: its rows are valid, and room for the output.
    ok(unsafe { fb_prepare(rig.cache, &older, null_mut(), &mut step) });
    // SAFETY: room for the number.
    unsafe {
        ok(fb_abandon(rig.cache, step));
        ok(fb_finish(rig.cache, step, null_mut()));
        assert_eq!(fb_retire(rig.cache, &mut step, null_mut(), null_mut()), FbCancelled);
    }
}

#[test]
fn the_device_may_hold_the_numbers_of_accepted_rows() {
    let mut rig = Rig::new(config());
    let (step, own) = rig.prepare(0..2, 0);
    rig.rest(step, &own);
    rig.end(step, own);
    let rows: Vec<FbBatchRow> = (0..2)
        .map(|of| FbBatchRow {
            sequence: rig.sequences[of].number,
            accepted: FB_ACCEPTED_ON_DEVICE,
            query_rows: 1,
        })
        .collect();
    let accepted = [2, 1, 0, 0];
    let config = FbStepConfig {
        rows: rows.as_ptr(),
        row_count: 2,
        query_rows: 1,
        accepted: accepted.as_ptr(),
        ..blank()
    };
    let mut step = 0;
    // SAFETY: the rows and as many counts as the cache's batch has rows.
    unsafe {
        ok(fb_prepare(rig.cache, &config, null_mut(), &mut step));
        let (selection, mut slots) = ([-1; (2 * K) as usize], [0; (2 * K) as usize]);
        for layer in 0..ALL {
            ok(fb_layer(rig.cache, step, layer, selection.as_ptr(), slots.as_mut_ptr(), null_mut()));
            ok(fb_scatter(rig.cache, step, layer, null_mut()));
        }
        ok(fb_finish(rig.cache, step, null_mut()));
        ok(fb_retire(rig.cache, &mut step, null_mut(), null_mut()));
    }
    assert_eq!(report_of(rig.cache).1, [PROMPT + 2, PROMPT + 1]);
}

#[test]
fn calls_of_a_layer_refuse_arguments_that_do_not_fit_the_step() {
    use FbStatus::*;
    let mut rig = Rig::new(config());
    let (step, own) = rig.prepare(0..2, 0);
    let selection = rig.selection(0..2);
    let mut slots = vec![7; selection.len()];
    let (from, to, cache) = (selection.as_ptr(), slots.as_mut_ptr(), rig.cache);
    let odd = from.cast::<u8>().wrapping_add(1).cast::<i32>();
    // SAFETY: all are refused before a buffer is touched.
    unsafe {
        let layer =
            |step, layer, from, to, stream: usize| fb_layer(cache, step, layer, from, to, stream as _);
        status(layer(step, 0, null(), to, 0), FbInvalidConfig, &rig, "selection");
        status(layer(step, 0, odd, to, 0), FbInvalidConfig, &rig, "selection");
        status(layer(step, 0, from, null_mut(), 0), FbInvalidConfig, &rig, "slots");
        status(layer(step, ALL, from, to, 0), FbOutOfRange, &rig, "layer");
        status(layer(step, u32::MAX, from, to, 0), FbOutOfRange, &rig, "layer");
        status(layer(step, 0, from, from.cast_mut(), 0), FbOutOfRange, &rig, "");
        status(layer(step, 0, from, to, 5), FbOutOfRange, &rig, "");
        status(layer(0, 0, from, to, 0), FbClosed, &rig, "the step was retired");
        status(layer(step ^ 2, 0, from, to, 0), FbClosed, &rig, "the step was retired");
        assert_eq!(fb_layer(null_mut(), step, 0, from, to, null_mut()), FbInvalidConfig);
        status(fb_layers(cache, step, null(), to, null_mut()), FbInvalidConfig, &rig, "selection");
        status(fb_layers(cache, step ^ 2, from, to, null_mut()), FbClosed, &rig, "step");

        let buffers = FbBuffers { selection: from, slots: to, ..blank() };
        let whole: FbStepRange = blank();
        let resolve =
            |range: FbStepRange, buffers: FbBuffers| fb_resolve(cache, step, &range, &buffers, null_mut());
        for (range, said) in [
            (FbStepRange { layer: ALL, ..whole }, "layer"),
            (FbStepRange { first: 2, ..whole }, "rows of the step"),
            (FbStepRange { first: u32::MAX, ..whole }, "rows of the step"),
            (FbStepRange { first: 1, count: 2, ..whole }, "rows of the step"),
            (FbStepRange { count: u32::MAX, first: 1, ..whole }, "rows of the step"),
            (FbStepRange { draft_pass: 3, ..whole }, "rows of the step"),
        ] {
            status(resolve(range, buffers), FbOutOfRange, &rig, said);
            status(fb_gather(cache, step, &range, 0, null_mut()), FbOutOfRange, &rig, said);
            status(fb_scatter_range(cache, step, &range, null_mut()), FbOutOfRange, &rig, said);
        }
        let mut counts = [0; 64];
        let mut lists = vec![0; 64 * K as usize];
        let (lists, counts) = (lists.as_mut_ptr(), counts.as_mut_ptr());
        status(resolve(whole, FbBuffers { lists, ..buffers }), FbInvalidConfig, &rig, "counts");
        status(resolve(whole, FbBuffers { counts, batch: 2, ..buffers }), FbInvalidConfig, &rig, "lists");
        status(resolve(whole, FbBuffers { batch: 2, ..buffers }), FbInvalidConfig, &rig, "lists");
        let short = FbBuffers { lists, counts, batch: 1, ..buffers };
        status(resolve(whole, short), FbOutOfRange, &rig, "");
        status(resolve(whole, FbBuffers { reserved: 1, ..buffers }), FbInvalidConfig, &rig, "reserved");
        status(resolve(whole, FbBuffers { size: 16, ..buffers }), FbInvalidConfig, &rig, "fb_buffers");
        status(resolve(FbStepRange { size: 0, ..whole }, buffers), FbInvalidConfig, &rig, "fb_step_range");
        status(fb_resolve(cache, step, null(), &buffers, null_mut()), FbInvalidConfig, &rig, "fb_step_range");
        status(fb_resolve(cache, step, &whole, null(), null_mut()), FbInvalidConfig, &rig, "fb_buffers");
        status(fb_gather(cache, step, null(), 0, null_mut()), FbInvalidConfig, &rig, "fb_step_range");
        status(fb_gather(cache, step, &whole, 1, null_mut()), FbOutOfRange, &rig, "");
        status(fb_scatter_range(cache, step, null(), null_mut()), FbInvalidConfig, &rig, "fb_step_range");
        status(fb_scatter(cache, step, ALL, null_mut()), FbOutOfRange, &rig, "layer");
        status(fb_scatter(cache, 0, 0, null_mut()), FbClosed, &rig, "step");
    }
    assert!(slots.iter().all(|slot| *slot == 7), "nothing was written");
    rig.rest(step, &own);
    rig.end(step, own);
}

#[test]
fn a_step_ends_once_and_is_kept_until_it_can_end() {
    use FbStatus::*;
    let mut rig = Rig::new(config());
    let (mut step, own) = rig.prepare(0..2, 0);
    let (kept, mut done): (_, FbRetired) = (step, blank());
    done.hits = 99;
    // SAFETY: room for the outputs.
    unsafe {
        let busy = fb_retire(rig.cache, &mut step, null_mut(), &mut done);
        status(busy, FbBusy, &rig, "the step was not finished");
        assert_eq!((step, done.hits), (kept, 99));
        done.size = 8;
        status(fb_retire(rig.cache, &mut step, null_mut(), &mut done), FbInvalidConfig, &rig, "fb_retired");
        status(fb_retire(rig.cache, null_mut(), null_mut(), null_mut()), FbInvalidConfig, &rig, "step");
        status(fb_finish(rig.cache, step ^ 4, null_mut()), FbClosed, &rig, "step");
        rig.rest(step, &own);
        rig.end(step, own);
        status(fb_retire(rig.cache, &mut step, null_mut(), null_mut()), FbClosed, &rig, "step");
        status(fb_finish(rig.cache, step, null_mut()), FbClosed, &rig, "step");
        status(fb_abandon(rig.cache, step), FbClosed, &rig, "step");
        status(fb_retired_counts(rig.cache, null_mut(), 1, &mut 0), FbInvalidConfig, &rig, "counts");
        status(fb_retired_lengths(rig.cache, null_mut(), 0, null_mut()), FbInvalidConfig, &rig, "count");
    }
    // Another cache's number is unknown here.
    let mut other = Rig::new(config());
    let (foreign, twin) = other.prepare(0..1, 0);
    status(fb_finish(rig.cache, foreign, null_mut()), FbClosed, &rig, "step");
    other.rest(foreign, &twin);
    other.end(foreign, twin);
}

#[test]
fn an_abandoned_step_is_cancelled_and_reports_nothing() {
    let mut rig = Rig::new(config());
    let (step, own) = rig.prepare(0..2, 0);
    rig.rest(step, &own);
    rig.end(step, own);
    assert!(!report_of(rig.cache).0.is_empty());
    let (mut step, mut own) = rig.prepare(0..2, 0);
    ok(fb_abandon(rig.cache, step));
    ok(fb_finish(rig.cache, step, null_mut()));
    // SAFETY: room for the number.
    let ended = unsafe { fb_retire(rig.cache, &mut step, null_mut(), null_mut()) };
    status(ended, FbStatus::FbCancelled, &rig, "not enqueued completely");
    assert_eq!((step, report_of(rig.cache)), (0, (Vec::new(), Vec::new())));
    rig.twin.abandon(&mut own).unwrap();
    rig.twin.finish(&mut own, rig.stream).unwrap();
    assert_eq!(rig.twin.retire(own, rig.stream).unwrap_err().error.kind(), Kind::Cancelled);
}
