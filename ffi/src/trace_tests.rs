//! Tests of recordings through C: written, read back through Rust and through C, and their errors.

use std::ffi::{CString, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::ptr::{null, null_mut};

use forebay::trace::SelectionTrace;
use forebay::trace::requests::{Options, RequestTrace};

use super::*;
use crate::handle::give;
use crate::handle::tests::{Pear, first_wrong, in_child};
use crate::requests::*;
use crate::selections::*;
use crate::testing::*;

/// A path for one test only; the file is removed at the end.
struct Fresh(PathBuf, CString);

impl Fresh {
    fn new(name: &str) -> Fresh {
        // Bytes that are no UTF-8: the library passes a path through unchanged.
        let mut bytes = std::env::temp_dir().into_os_string().into_encoded_bytes();
        bytes.extend(format!("/forebay-{}-c-{name}-", std::process::id()).into_bytes());
        bytes.push(0xFF);
        let path = PathBuf::from(OsString::from_vec(bytes.clone()));
        let _ = std::fs::remove_file(&path);
        Fresh(path, CString::new(bytes).unwrap())
    }

    fn of(&self) -> *const c_char {
        self.1.as_ptr()
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

const K: u32 = 3;
const LAYERS: u32 = 2;

fn declared() -> FbTraceConfig {
    FbTraceConfig { layers: LAYERS, k: K, first_position: 1, decode_start: 3, ..blank() }
}

fn create_trace(path: &Fresh, config: &FbTraceConfig) -> (*mut FbTrace, FbStatus, String) {
    let mut trace = null_mut();
    let (status, said) = reason(|text, bytes| {
        // SAFETY: a text of that many bytes, and room for the output.
        unsafe { fb_trace_create(path.of(), config, text, bytes, &mut trace) }
    });
    (trace, status, said)
}

/// The selection of the query at a position: the last positions, in a kernel's order.
fn selected(position: u32) -> Vec<i32> {
    (0..LAYERS)
        .flat_map(|layer| {
            (0..K).map(move |of| match of <= position {
                true => (position - (of + layer) % K.min(position + 1)) as i32,
                false => -1,
            })
        })
        .collect()
}

fn record(trace: *mut FbTrace, positions: std::ops::Range<u32>) {
    for position in positions {
        let selected = selected(position);
        // SAFETY: that many numbers.
        ok(unsafe { fb_trace_record(trace, position, selected.as_ptr(), selected.len()) });
    }
}

fn open(path: &Fresh) -> *mut FbSelections {
    let mut selections = null_mut();
    // SAFETY: no text, and room for the output.
    ok(unsafe { fb_selections_open(path.of(), null_mut(), 0, &mut selections) });
    selections
}

fn said_of(selections: *const FbSelections, which: u32) -> String {
    let (status, said) = reason(|text, bytes| {
        // SAFETY: a text of that many bytes.
        unsafe { fb_selections_text(selections, which, text, bytes) }
    });
    ok(status);
    said
}

#[test]
fn a_recording_made_through_c_is_read_by_rust_and_through_c() {
    let path = Fresh::new("whole");
    let texts = ["label", "a model", "arch", "score", "mode", "te\u{e4}xt"].map(|t| CString::new(t).unwrap());
    let ids = [4, 9];
    let config = FbTraceConfig {
        context: 50,
        group_steps: 2,
        group_bytes: 1000,
        layer_ids: ids.as_ptr(),
        label: texts[0].as_ptr(),
        model: texts[1].as_ptr(),
        arch: texts[2].as_ptr(),
        score: texts[3].as_ptr(),
        mode: texts[4].as_ptr(),
        text: texts[5].as_ptr(),
        ..declared()
    };
    let (trace, status, said) = create_trace(&path, &config);
    assert_eq!((status, said.as_str()), (FbStatus::FbOk, ""));
    record(trace, 1..8);
    ok(fb_trace_flush(trace));
    ok(fb_trace_sync(trace));
    record(trace, 8..10);
    let mut steps = 0;
    // SAFETY: room for the output.
    ok(unsafe { fb_trace_finish(trace, &mut steps) });
    assert_eq!(steps, 9);
    ok(fb_trace_destroy(trace));

    let read = SelectionTrace::read(&path.0).unwrap();
    let selections = open(&path);
    let mut header: FbTraceHeader = blank();
    // SAFETY: room for the output.
    ok(unsafe { fb_selections_header(selections, &mut header) });
    let own = read.header();
    assert_eq!((header.layers, header.k, header.steps, header.warm_steps), (LAYERS, K, 9, 2));
    assert_eq!((header.first_position, header.decode_start, header.context), (1, 3, 50));
    assert_eq!((header.unfinished, header.left_off_bytes, header.members), (0, 0, read.members()));
    let all = [&own.label, &own.model, &own.arch, &own.score, &own.mode, &own.text];
    for (which, wanted) in (FB_SELECTIONS_LABEL..=FB_SELECTIONS_TEXT).zip(all) {
        assert_eq!(&said_of(selections, which), wanted);
        assert_eq!(wanted, texts[which as usize].to_str().unwrap());
    }
    let (mut layer_ids, mut count) = ([0; 2], 0);
    // SAFETY: room for two.
    ok(unsafe { fb_selections_layer_ids(selections, layer_ids.as_mut_ptr(), 2, &mut count) });
    assert_eq!((layer_ids, count), (ids, 2));

    let mut positions = vec![99; 4 * (LAYERS * K) as usize + 1];
    // SAFETY: room for three steps and one more number.
    ok(unsafe { fb_selections_read(selections, 0, 4, positions.as_mut_ptr()) });
    assert_eq!(positions.pop(), Some(99), "nothing after them");
    for (set, (step, layer)) in
        positions.chunks(K as usize).zip((0..4).flat_map(|step| (0..LAYERS).map(move |l| (step, l))))
    {
        let mut wanted: Vec<i32> = read.selection(step, layer).iter().map(|p| *p as i32).collect();
        assert_eq!(wanted.len(), K.min(step + 2) as usize);
        wanted.resize(K as usize, -1);
        assert_eq!(set, wanted, "step {step}, layer {layer}");
    }
    ok(fb_selections_destroy(selections));
}

#[test]
fn threads_read_one_trace_at_the_same_time() {
    let path = Fresh::new("threads");
    let (trace, ..) = create_trace(&path, &declared());
    record(trace, 1..40);
    ok(fb_trace_destroy(trace));
    let selections = open(&path).addr();
    std::thread::scope(|scope| {
        let read = || {
            let mut positions = vec![0; 39 * (LAYERS * K) as usize];
            for _ in 0..50 {
                let selections = std::ptr::without_provenance(selections);
                // SAFETY: room for all steps.
                ok(unsafe { fb_selections_read(selections, 0, 39, positions.as_mut_ptr()) });
            }
            positions
        };
        let threads = [0; 4].map(|_| scope.spawn(read));
        let all = threads.map(|thread| thread.join().unwrap());
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    });
    ok(fb_selections_destroy(std::ptr::without_provenance_mut(selections)));
}

#[test]
fn a_recording_destroyed_early_is_unfinished_and_readable() {
    let path = Fresh::new("unfinished");
    let (trace, ..) = create_trace(&path, &declared());
    record(trace, 1..6);
    ok(fb_trace_destroy(trace));
    assert_eq!(fb_trace_destroy(trace), FbStatus::FbClosed);
    let selections = open(&path);
    let mut header: FbTraceHeader = blank();
    // SAFETY: room for the output.
    ok(unsafe { fb_selections_header(selections, &mut header) });
    assert_eq!((header.steps, header.unfinished, header.context), (5, 1, 6));
    ok(fb_selections_destroy(selections));
}

#[test]
fn a_recording_refuses_selections_that_its_file_cannot_hold() {
    use FbStatus::*;
    let path = Fresh::new("refused");
    let not_utf8 = c"\xFF".as_ptr();
    for (config, wanted, said) in [
        (FbTraceConfig { layers: 0, ..declared() }, FbInvalidConfig, "layers"),
        (FbTraceConfig { layers: u32::MAX, ..declared() }, FbInvalidConfig, "layers"),
        (FbTraceConfig { k: 0, ..declared() }, FbInvalidConfig, "k"),
        (FbTraceConfig { k: 1 << 16, ..declared() }, FbInvalidConfig, "k"),
        (FbTraceConfig { decode_start: 0, ..declared() }, FbInvalidConfig, "decode_start"),
        (FbTraceConfig { context: 1, ..declared() }, FbInvalidConfig, "context"),
        (FbTraceConfig { group_bytes: u32::MAX, ..declared() }, FbInvalidConfig, "frames"),
        (FbTraceConfig { layer_ids: [3, 3].as_ptr(), ..declared() }, FbInvalidConfig, "layer_ids"),
        (FbTraceConfig { shares: [1, 0].as_ptr(), ..declared() }, FbInvalidConfig, "shares"),
        (FbTraceConfig { model: not_utf8, ..declared() }, FbInvalidConfig, "model"),
        (FbTraceConfig { reserved: 1, ..declared() }, FbInvalidConfig, "reserved"),
        (sized(16, declared()), FbInvalidConfig, "fb_trace_config"),
    ] {
        let (trace, status, text) = create_trace(&path, &config);
        assert!(status == wanted && text.contains(said) && trace.is_null(), "{said}: {text}");
        assert!(!path.0.exists(), "{said}");
    }
    let mut trace = null_mut();
    // SAFETY: null is refused, and room for the output.
    unsafe {
        let config = declared();
        assert_eq!(fb_trace_create(null(), &config, null_mut(), 0, &mut trace), FbInvalidConfig);
        assert_eq!(fb_trace_create(c"".as_ptr(), &config, null_mut(), 0, &mut trace), FbInvalidConfig);
        assert_eq!(fb_trace_create(path.of(), null(), null_mut(), 0, &mut trace), FbInvalidConfig);
        assert_eq!(fb_trace_create(path.of(), &config, null_mut(), 0, null_mut()), FbInvalidConfig);
        assert!(!path.0.exists(), "no file is left");
        let missing = c"/no such folder/trace".as_ptr();
        assert_eq!(fb_trace_create(missing, &config, null_mut(), 0, &mut trace), FbIo);
    }
    // An older caller's config ends before the context.
    let older = sized(std::mem::offset_of!(FbTraceConfig, context), declared());
    let (trace, status, _) = create_trace(&path, &older);
    ok(status);
    assert_eq!(create_trace(&path, &declared()).1, FbIo, "the file exists");
    let right = selected(1);
    let refuse = |position, selected: &[i32], wanted, said: &str| {
        // SAFETY: that many numbers.
        let status = unsafe { fb_trace_record(trace, position, selected.as_ptr(), selected.len()) };
        let text = error_text(trace);
        assert!(status == wanted && text.contains(said), "{said}: {text}");
    };
    refuse(2, &right, FbOutOfRange, "not the next one");
    refuse(1, &right[1..], FbOutOfRange, "layers x k");
    refuse(1, &[], FbOutOfRange, "layers x k");
    refuse(1, &[0, 1, -1, 0, 2, -1], FbOutOfRange, "beyond");
    refuse(1, &[0, 1, -1, 0, i32::MIN, -1], FbOutOfRange, "beyond");
    refuse(1, &[0, 1, -1, 0, 0, -1], FbOutOfRange, "too few");
    // SAFETY: null is refused, and room for the outputs.
    unsafe {
        assert_eq!(fb_trace_record(trace, 1, null(), 6), FbInvalidConfig);
        assert_eq!(fb_trace_record(null_mut(), 1, right.as_ptr(), 6), FbInvalidConfig);
        record(trace, 1..3);
        ok(fb_trace_finish(trace, null_mut()));
        assert_eq!(fb_trace_finish(trace, null_mut()), FbClosed);
    }
    refuse(3, &right, FbClosed, "finished");
    assert_eq!((fb_trace_flush(trace), fb_trace_sync(trace)), (FbClosed, FbClosed));
    ok(fb_trace_destroy(trace));
    assert_eq!(fb_trace_flush(null_mut()), FbInvalidConfig);
}

#[test]
fn a_reader_refuses_files_that_are_no_trace_and_steps_it_lacks() {
    use FbStatus::*;
    let path = Fresh::new("reader");
    std::fs::write(&path.0, b"nothing of the sort").unwrap();
    let mut selections = null_mut();
    let (status, said) = reason(|text, bytes| {
        // SAFETY: a text of that many bytes, and room for the output.
        unsafe { fb_selections_open(path.of(), text, bytes, &mut selections) }
    });
    assert!(status == FbBadFormat && !said.is_empty() && selections.is_null(), "{said}");
    // SAFETY: null is refused, and room for the output.
    unsafe {
        assert_eq!(fb_selections_open(null(), null_mut(), 0, &mut selections), FbInvalidConfig);
        assert_eq!(fb_selections_open(path.of(), null_mut(), 0, null_mut()), FbInvalidConfig);
        assert_eq!(fb_selections_open(c"/no such".as_ptr(), null_mut(), 0, &mut selections), FbIo);
    }
    std::fs::remove_file(&path.0).unwrap();
    let (trace, ..) = create_trace(&path, &declared());
    record(trace, 1..6);
    ok(fb_trace_destroy(trace));
    let selections = open(&path);
    let mut room = [0; 64];
    let mut header = sized(8, blank::<FbTraceHeader>());
    // SAFETY: refused before anything is written, and room for what is not.
    unsafe {
        let read = |first, steps, to| fb_selections_read(selections, first, steps, to);
        for (first, steps) in [(0, 6), (5, 1), (6, 0), (u32::MAX, 1), (1, u32::MAX)] {
            assert_eq!(read(first, steps, room.as_mut_ptr()), FbOutOfRange, "{first} {steps}");
        }
        assert_eq!(read(0, 1, null_mut()), FbInvalidConfig);
        ok(read(5, 0, null_mut()));
        assert_eq!(fb_selections_header(selections, &mut header), FbInvalidConfig);
        assert_eq!(fb_selections_header(selections, null_mut()), FbInvalidConfig);
        assert_eq!(fb_selections_text(selections, 6, null_mut(), 0), FbOutOfRange);
        ok(fb_selections_text(selections, 0, null_mut(), 0));
        assert_eq!(fb_selections_layer_ids(selections, null_mut(), 0, null_mut()), FbInvalidConfig);
        assert_eq!(fb_selections_layer_ids(selections, null_mut(), 1, &mut 0), FbInvalidConfig);
        assert_eq!(fb_selections_read(null(), 0, 1, room.as_mut_ptr()), FbInvalidConfig);
    }
    assert!(room.iter().all(|position| *position == 0));
    ok(fb_selections_destroy(selections));
    assert_eq!(fb_selections_destroy(selections), FbClosed);
}

#[test]
fn requests_recorded_through_c_are_a_trace() {
    use FbStatus::*;
    let path = Fresh::new("requests");
    let mut requests = null_mut();
    let (status, said) = reason(|text, bytes| {
        // SAFETY: a text of that many bytes, and room for the output.
        unsafe { fb_requests_create(path.of(), 0, text, bytes, &mut requests) }
    });
    assert!(status == FbInvalidConfig && said.contains("block_tokens"), "{said}");
    // SAFETY: null is refused, and room for the output.
    unsafe {
        assert_eq!(fb_requests_create(null(), 16, null_mut(), 0, &mut requests), FbInvalidConfig);
        assert_eq!(fb_requests_create(path.of(), 16, null_mut(), 0, null_mut()), FbInvalidConfig);
        ok(fb_requests_create(path.of(), 16, null_mut(), 0, &mut requests));
    }
    let blocks = [7, u64::MAX, 9];
    let arrival = FbArrival {
        milliseconds: 5,
        input_tokens: 40,
        output_tokens: 3,
        blocks: blocks.as_ptr(),
        block_count: 3,
        ..blank()
    };
    // SAFETY: that many blocks.
    let record = |arrival: FbArrival| unsafe { fb_requests_record(requests, &arrival) };
    ok(record(arrival));
    for (refused, wanted, said) in [
        (FbArrival { milliseconds: 4, ..arrival }, FbOutOfRange, "earlier"),
        (FbArrival { input_tokens: 0, ..arrival }, FbOutOfRange, "more blocks"),
        (FbArrival { blocks: [1, 1].as_ptr(), block_count: 2, ..arrival }, FbOutOfRange, "repeats"),
        (FbArrival { blocks: null(), ..arrival }, FbInvalidConfig, "blocks"),
        (FbArrival { block_count: usize::MAX, ..arrival }, FbOutOfRange, "blocks"),
        (sized(24, arrival), FbInvalidConfig, "fb_arrival"),
    ] {
        let status = record(refused);
        let text = error_text(requests);
        assert!(status == wanted && text.contains(said), "{said}: {text}");
    }
    ok(record(FbArrival { blocks: null(), block_count: 0, milliseconds: 6, ..arrival }));
    ok(fb_requests_flush(requests));
    ok(fb_requests_sync(requests));
    let mut count = 0;
    // SAFETY: null is refused, and room for the output.
    unsafe {
        assert_eq!(fb_requests_record(requests, null()), FbInvalidConfig);
        ok(fb_requests_finish(requests, &mut count));
        assert_eq!(fb_requests_finish(requests, null_mut()), FbClosed);
    }
    assert_eq!((count, record(arrival), fb_requests_flush(requests)), (2, FbClosed, FbClosed));
    ok(fb_requests_destroy(requests));
    assert_eq!(fb_requests_destroy(requests), FbClosed);
    let trace = RequestTrace::read(&path.0, &Options::default()).unwrap();
    assert_eq!((trace.requests(), trace.blocks(0), trace.input_tokens(1)), (2, &[0, 1, 2][..], 40));
}

#[test]
fn no_file_is_left_without_a_handle() {
    let (trace, requests) = (Fresh::new("full-trace"), Fresh::new("full-requests"));
    // A child has its own table to fill.
    let code = in_child(|| {
        while give(|| Ok(Pear)).is_ok() {}
        let (_, full, _) = create_trace(&trace, &declared());
        let mut made = null_mut();
        // SAFETY: room for the output.
        let also = unsafe { fb_requests_create(requests.of(), 64, null_mut(), 0, &mut made) };
        first_wrong(&[
            full == FbStatus::FbExhausted && also == FbStatus::FbExhausted,
            !trace.0.exists(),
            !requests.0.exists(),
        ])
    });
    assert_eq!(code, 0);
}
