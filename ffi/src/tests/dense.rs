//! Tests of the calls of dense caches.

use super::*;
use crate::dense::*;
use crate::dense_config::*;
use crate::dense_sequence::*;
use crate::dense_step::*;
use crate::testing::allocations;

/// Bytes of a token's K, and of its V, in one layer.
const RUN: u32 = 32;
const ALL: [u32; 2] = [0, 2];
const LOCAL: [u32; 1] = [1];

const NONE: FbDenseGroup = FbDenseGroup { layers: null(), layer_count: 0, window: 0, row_bytes: [0; 2] };

fn group(layers: &'static [u32], row_bytes: [u32; 2], window: u32) -> FbDenseGroup {
    FbDenseGroup { layers: layers.as_ptr(), layer_count: layers.len() as u32, window, row_bytes }
}

/// Two layers with K and V that read everything, and one with a latent and a window of 20 tokens.
fn shape() -> FbDenseConfig {
    FbDenseConfig {
        groups: [group(&ALL, [RUN; 2], 0), group(&LOCAL, [RUN, 0], 20), NONE, NONE],
        group_count: 2,
        page_tokens: PAGE,
        sequences: 3,
        max_tokens: 100,
        step_tokens: 48,
        query_rows: 2,
        memory: FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED,
        ..sized()
    }
}

fn try_dense(device: *const FbDevice, config: &FbDenseConfig) -> Result<*mut FbDense, (FbStatus, String)> {
    let (mut dense, mut text) = (null_mut(), [0; 512]);
    // SAFETY: all pointers are valid and as long as stated.
    let status = unsafe { fb_dense_create(device, config, text.as_mut_ptr(), text.len(), &raw mut dense) };
    if status == FbOk { Ok(dense) } else { Err((status, text_in(&text))) }
}

fn make_dense(device: *const FbDevice, config: &FbDenseConfig) -> *mut FbDense {
    try_dense(device, config).unwrap()
}

fn stats(dense: *const FbDense) -> FbDenseCacheStats {
    let mut stats = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_dense_stats(dense, &raw mut stats) }, FbOk);
    stats
}

fn open(dense: *mut FbDense, prompt: u32, promised: u32) -> u64 {
    let mut sequence = 0;
    // SAFETY: the result has room.
    let status = unsafe { fb_dense_open(dense, prompt, promised, &raw mut sequence) };
    assert_eq!(status, FbOk, "{}", text_of(dense));
    sequence
}

fn prepare(dense: *mut FbDense, rows: &[FbBatchRow]) -> (FbStatus, FbStep) {
    let (mut step, count) = (0, rows.len() as u32);
    // SAFETY: as many rows as stated.
    let status =
        unsafe { fb_dense_prepare(dense, 0, rows.as_ptr(), count, null(), null_mut(), &raw mut step) };
    (status, step)
}

/// A whole step of one sequence. Returns the committed length.
fn step(dense: *mut FbDense, sequence: u64, accepted: u32, query_rows: u32) -> u32 {
    let (status, mut number) = prepare(dense, &[FbBatchRow { sequence, accepted, query_rows }]);
    assert_eq!(status, FbOk, "{}", text_of(dense));
    let (mut length, mut count) = (77, 77);
    // SAFETY: the results have room.
    unsafe {
        assert_eq!(fb_dense_finish(dense, number, null_mut()), FbOk, "{}", text_of(dense));
        let retired = fb_dense_retire(dense, &raw mut number, null_mut(), &raw mut length, 1, &raw mut count);
        assert_eq!((retired, number, count), (FbOk, 0, 1), "{}", text_of(dense));
    }
    length
}

fn length_of(dense: *const FbDense, sequence: u64) -> (u32, u32, u32) {
    let mut length: FbDenseSequenceLength = sized();
    // SAFETY: it states its size.
    let status = unsafe { fb_dense_length(dense, sequence, &raw mut length) };
    assert_eq!(status, FbOk, "{}", text_of(dense));
    (length.committed, length.landed, length.published)
}

fn pages_of(dense: *const FbDense, sequence: u64, group: u32) -> Vec<u32> {
    let (mut pages, mut count) = ([77; 16], 0);
    // SAFETY: as many places as stated.
    let status = unsafe { fb_dense_pages(dense, sequence, group, pages.as_mut_ptr(), 16, &raw mut count) };
    assert_eq!(status, FbOk, "{}", text_of(dense));
    pages[..count as usize].to_vec()
}

fn close(dense: *mut FbDense, sequence: u64) {
    // SAFETY: nothing is passed.
    assert_eq!(unsafe { fb_dense_close(dense, sequence, null_mut()) }, FbOk, "{}", text_of(dense));
}

fn destroy(dense: *mut FbDense, device: *mut FbDevice) {
    // SAFETY: no call is running.
    unsafe {
        assert_eq!(fb_dense_validate(dense), FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_destroy(dense), FbOk, "{}", text_of(dense));
        assert_eq!(fb_device_destroy(device), FbOk, "{}", text_of(device));
    }
}

fn view(dense: *const FbDense, layer: u32, run: u32) -> FbDenseLayerView {
    let mut view = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_dense_view(dense, layer, run, &raw mut view) }, FbOk, "{}", text_of(dense));
    view
}

fn planes(dense: *const FbDense, group: u32) -> Vec<FbDensePlane> {
    let (mut planes, mut count) = ([zeroed::<FbDensePlane>(); 8], 0);
    // SAFETY: as many places as stated.
    let status = unsafe { fb_dense_planes(dense, group, planes.as_mut_ptr(), 8, &raw mut count) };
    assert_eq!(status, FbOk, "{}", text_of(dense));
    planes[..count as usize].to_vec()
}

fn tensors(dense: *const FbDense) -> FbDenseStepTensors {
    let mut tensors = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_dense_tensors(dense, 0, &raw mut tensors) }, FbOk, "{}", text_of(dense));
    tensors
}

/// The first numbers of a tensor on the host device.
fn read<T: Plain>(address: *mut c_void, count: usize) -> Vec<T> {
    // SAFETY: tests read no more than a tensor has, after the inline stream has run.
    unsafe { std::slice::from_raw_parts(address.cast::<T>(), count) }.to_vec()
}

#[test]
fn the_tensors_of_a_step_say_where_its_rows_go() {
    let device = host();
    let dense = make_dense(device, &shape());
    let (one, other) = (open(dense, 30, 10), open(dense, 17, 3));
    let rows = [
        FbBatchRow { sequence: other, accepted: 0, query_rows: 17 },
        FbBatchRow { sequence: one, accepted: 0, query_rows: 30 },
    ];
    let (status, mut number) = prepare(dense, &rows);
    assert_eq!(status, FbOk, "{}", text_of(dense));
    let now = tensors(dense);
    assert_eq!((now.batch, now.step_tokens, now.blocks, now.integer_bytes), (3, 48, 7, 8));
    assert_eq!(read::<i32>(now.lengths, 3), [17, 30, 0]);
    assert_eq!(read::<i32>(now.starts, 4), [0, 17, 47, 47]);
    let positions: Vec<u64> = (0..17).chain(0..30).chain([0]).collect();
    assert_eq!(read::<u64>(now.positions, 48), positions);
    for group in 0..2 {
        let tables = read::<u32>(now.tables[group], 3 * now.blocks as usize);
        let slots = read::<u64>(now.slots[group], 48);
        let pages = [pages_of(dense, other, group as u32), pages_of(dense, one, group as u32)];
        for (row, pages) in pages.iter().enumerate() {
            assert_eq!(tables[row * now.blocks as usize..][..2], pages[..2], "group {group}");
        }
        let slot = |row: usize, at: u64| u64::from(pages[row][(at / 16) as usize]) * 16 + at % 16;
        let wanted = (0..17).map(|at| slot(0, at)).chain((0..30).map(|at| slot(1, at)));
        assert_eq!(slots, wanted.chain([u64::MAX]).collect::<Vec<_>>(), "group {group}");
    }
    assert!(now.tables[2].is_null() && now.slots[3].is_null());
    let (mut lengths, mut count) = ([77; 3], 0);
    // SAFETY: the results have room.
    unsafe {
        assert_eq!(fb_dense_finish(dense, number, null_mut()), FbOk);
        let retired =
            fb_dense_retire(dense, &raw mut number, null_mut(), lengths.as_mut_ptr(), 3, &raw mut count);
        assert_eq!((retired, lengths, count), (FbOk, [0, 0, 77], 2));
    }
    assert_eq!((step(dense, one, 30, 2), length_of(dense, one)), (30, (30, 2, 0)));
    assert_eq!((step(dense, one, 1, 1), length_of(dense, one)), (31, (31, 1, 0)));
    assert_eq!(stats(dense).steps, 3);
    close(dense, one);
    close(dense, other);
    assert_eq!((stats(dense).sequences, stats(dense).free_sequences), (0, 3));
    destroy(dense, device);
}

#[test]
fn planes_and_views_lead_to_the_same_rows() {
    for (layout, runs, counts) in [
        (FB_DENSE_LAYER_FIRST, FB_DENSE_RUNS_APART, [4, 1]),
        (FB_DENSE_LAYER_FIRST, FB_DENSE_RUNS_TOGETHER, [2, 1]),
        (FB_DENSE_PAGE_FIRST, FB_DENSE_RUNS_APART, [2, 1]),
        (FB_DENSE_PAGE_FIRST, FB_DENSE_RUNS_TOGETHER, [1, 1]),
    ] {
        let device = host();
        let config = FbDenseConfig { layout, runs, device_pages: [9, 8, 0, 0], ..shape() };
        let dense = make_dense(device, &config);
        assert_eq!([planes(dense, 0).len(), planes(dense, 1).len()], counts);
        for (layer, run) in [(0, 0), (0, 1), (2, 0), (2, 1), (1, 0)] {
            let view = view(dense, layer, run);
            let group = u32::from(layer == 1);
            assert_eq!((view.group, view.row_bytes, view.pages), (group, RUN.into(), 9 - group));
            let start = view.address.addr() as u64;
            let is_in = |plane: &&FbDensePlane| {
                (plane.address.addr() as u64..plane.address.addr() as u64 + plane.page_bytes).contains(&start)
            };
            let plane = *planes(dense, group).iter().find(is_in).unwrap();
            assert!([layer, FB_DENSE_ALL].contains(&plane.layer) && [run, FB_DENSE_ALL].contains(&plane.run));
            assert_eq!((plane.page_bytes, plane.bytes), (view.stride, view.stride * u64::from(view.pages)));
        }
        let mut none: FbDenseLayerView = sized();
        let mut count = 77;
        // SAFETY: the struct states its size, and refused calls write nothing.
        unsafe {
            assert_eq!(fb_dense_view(dense, 3, 0, &raw mut none), FbOutOfRange);
            assert_eq!(fb_dense_view(dense, 1, 1, &raw mut none), FbOutOfRange);
            assert_eq!(fb_dense_view(dense, 0, u32::MAX, &raw mut none), FbOutOfRange);
            assert_eq!(fb_dense_planes(dense, 2, null_mut(), 0, &raw mut count), FbOutOfRange);
            assert_eq!((none.stride, count), (0, 77));
            assert_eq!(fb_dense_planes(dense, 0, null_mut(), 0, &raw mut count), FbOk);
        }
        assert_eq!(count, counts[0] as u32);
        destroy(dense, device);
    }
}

#[test]
fn wrong_configurations_are_refused_by_the_names_of_their_fields() {
    let device = host();
    for (config, words) in [
        (FbDenseConfig { size: 8, ..shape() }, "fb_dense_config"),
        (FbDenseConfig { group_count: 5, ..shape() }, "group_count"),
        (FbDenseConfig { group_count: 0, ..shape() }, "group_count"),
        (FbDenseConfig { group_count: u32::MAX, ..shape() }, "group_count"),
        (FbDenseConfig { groups: [NONE; 4], ..shape() }, "layers of a group"),
        (FbDenseConfig { groups: [FbDenseGroup { layer_count: 4097, ..NONE }; 4], ..shape() }, "layer_count"),
        (FbDenseConfig { groups: [FbDenseGroup { layer_count: 1, ..NONE }; 4], ..shape() }, "layers"),
        (FbDenseConfig { groups: [group(&ALL, [8, 8], 0), NONE, NONE, NONE], ..shape() }, "row_bytes"),
        (FbDenseConfig { groups: [group(&ALL, [RUN; 2], 0); 4], ..shape() }, "a layer in two groups"),
        (FbDenseConfig { page_tokens: 24, ..shape() }, "page_tokens"),
        (FbDenseConfig { sequences: 0, ..shape() }, "sequences"),
        (FbDenseConfig { max_tokens: 0, ..shape() }, "max_tokens"),
        (FbDenseConfig { layout: 2, ..shape() }, "layout"),
        (FbDenseConfig { runs: 2, ..shape() }, "runs"),
        (FbDenseConfig { width: 2, ..shape() }, "width"),
        (FbDenseConfig { save: 2, ..shape() }, "save"),
        (FbDenseConfig { memory: 16, ..shape() }, "memory"),
        (FbDenseConfig { layout: FB_DENSE_PAGE_FIRST, bring_layers: 1, ..shape() }, "bring_layers"),
        (FbDenseConfig { step_tokens: 5, ..shape() }, "step_tokens"),
        (FbDenseConfig { batch: 40_000, ..shape() }, "batch"),
        (FbDenseConfig { device_pages: [1, 0, 0, 0], ..shape() }, "device_pages"),
        (FbDenseConfig { device_pages: [0, 0, 9, 0], ..shape() }, "device_pages"),
        (FbDenseConfig { host_pages: [9, 0, 0, 0], ..shape() }, "host_pages"),
        (FbDenseConfig { host_pages: [9, 9, 0, 9], ..shape() }, "host_pages"),
    ] {
        let (status, text) = try_dense(device, &config).unwrap_err();
        assert!(status == FbInvalidConfig && text.contains(words), "{words}: {text}");
        let (mut footprint, mut pages): (FbDenseCacheFootprint, _) = (sized(), [77; 4]);
        // SAFETY: the structs state their sizes, or none that is accepted.
        unsafe {
            let refused = fb_dense_footprint(&raw const config, null_mut(), 0, &raw mut footprint);
            assert_eq!((refused, footprint.pages), (FbInvalidConfig, 0), "{words}");
            // These pages are ignored.
            if words != "device_pages" {
                let refused = fb_dense_pages_for(&raw const config, 1, 1, null_mut(), 0, pages.as_mut_ptr());
                assert_eq!((refused, pages), (FbInvalidConfig, [77; 4]), "{words}");
            }
        }
    }
    // SAFETY: no call is running.
    assert_eq!(unsafe { fb_device_destroy(device) }, FbOk);
}

#[test]
fn defaults_pages_and_bytes_follow_from_the_configuration() {
    let config = FbDenseConfig { step_tokens: 0, query_rows: 1000, ..shape() };
    let (mut pages, mut footprint): (_, FbDenseCacheFootprint) = ([77; 4], sized());
    // SAFETY: the structs state their sizes, and the result has four places.
    unsafe {
        let found = fb_dense_pages_for(&raw const config, 2, 50, null_mut(), 0, pages.as_mut_ptr());
        assert_eq!(found, FbOk);
        for (sequences, tokens) in [(0, 50), (u32::MAX, 50)] {
            let mut none = [77; 4];
            let text = (null_mut(), 0);
            let found =
                fb_dense_pages_for(&raw const config, sequences, tokens, text.0, text.1, none.as_mut_ptr());
            assert_eq!((found, none), (FbInvalidConfig, [77; 4]), "{sequences} of {tokens}");
        }
        assert_eq!(fb_dense_footprint(&raw const config, null_mut(), 0, &raw mut footprint), FbOk);
    }
    // Two steps of 1000 rows in flight, after 50 tokens or after 100.
    let whole = |tokens: u32| (tokens + 2000_u32).div_ceil(PAGE);
    assert_eq!(pages, [2 * whole(50) + 1, 2 * whole(50) + 1, 0, 0]);
    let bytes = u64::from(3 * whole(100) + 1) * u64::from(PAGE) * u64::from(RUN) * (4 + 1);
    assert_eq!(footprint.pages, bytes);
    // Slots of two groups and positions, of 3 x 1000 rows; lengths, and starts.
    assert_eq!(footprint.tensors, 3 * 3000 * 8 + 4 * (3 + 4));
    assert_eq!(footprint.host_tables, 3 * 2 * 4 * u64::from(whole(100)));
}

#[test]
fn presets_fill_in_the_model_and_nothing_else() {
    let (mut layers, mut text) = ([77; 64], [0; 512]);
    let mut config = FbDenseConfig { sequences: 5, ..sized() };
    let mut preset = |name: &CStr, room: u32, config: &mut FbDenseConfig| {
        // SAFETY: the name ends with a zero, and the buffers are as long as stated.
        let status = unsafe {
            let (layers, text) = (layers.as_mut_ptr(), text.as_mut_ptr());
            fb_dense_preset(name.as_ptr(), text, 512, layers, room, config)
        };
        (status, text_in(&text), layers)
    };
    let (status, text, _) = preset(c"gpt-2", 64, &mut config);
    assert!(status == FbOutOfRange && text.contains("gpt-2"), "{text}");
    let (status, text, same) = preset(c"gpt-oss-20b", 23, &mut config);
    assert!(status == FbOutOfRange && text.contains("wanted 24"), "{text}");
    assert_eq!((same, config.group_count), ([77; 64], 0));
    let (status, _, found) = preset(c"gpt-oss-20b", 64, &mut config);
    assert_eq!((status, config.group_count, config.page_tokens, config.sequences), (FbOk, 2, 64, 5));
    assert_eq!((found[..2].to_vec(), found[12..14].to_vec(), found[24]), (vec![1, 3], vec![0, 2], 77));
    assert_eq!(config.groups.map(|group| group.layer_count), [12, 12, 0, 0]);
    assert_eq!((config.groups[0].window, config.groups[1].window), (0, 128));
    assert_eq!(config.groups[1].row_bytes, [1024, 1024]);
    config.max_tokens = 1000;
    let mut footprint: FbDenseCacheFootprint = sized();
    // SAFETY: the structs state their sizes, and the layers are still there.
    assert_eq!(unsafe { fb_dense_footprint(&config, null_mut(), 0, &raw mut footprint) }, FbOk);
    assert_ne!(footprint.pages, 0);
}

#[test]
fn a_sequence_is_extended_forked_and_truncated() {
    let device = host();
    let dense = make_dense(device, &FbDenseConfig { steps_in_flight: 1, ..shape() });
    let sequence = open(dense, 24, 2);
    step(dense, sequence, 0, 24);
    let (mut child, mut ticket) = (0, null_mut());
    // SAFETY: the results have room.
    unsafe {
        let refused = fb_dense_fork(dense, sequence, 8, null_mut(), &raw mut child, &raw mut ticket);
        assert_eq!((refused, child, ticket.is_null()), (FbInvalidState, 0, true), "landed rows");
        assert_eq!(fb_dense_extend(dense, sequence, 24, 0), FbOutOfRange);
        assert_eq!(fb_dense_extend(dense, sequence, 24, 40), FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_truncate(dense, sequence, 25, null_mut(), &raw mut ticket), FbOutOfRange);
        assert_eq!(fb_dense_truncate(dense, sequence, 20, null_mut(), &raw mut ticket), FbOk);
        assert_eq!(outcome(ticket), (FB_TICKET_DONE, FbOk as u32));
        assert_eq!(fb_ticket_destroy(ticket), FbOk);
        assert_eq!(length_of(dense, sequence), (20, 0, 0));
        let forked = fb_dense_fork(dense, sequence, 8, null_mut(), &raw mut child, &raw mut ticket);
        assert_eq!((forked, outcome(ticket).0), (FbOk, FB_TICKET_DONE), "{}", text_of(dense));
        assert_eq!(fb_ticket_destroy(ticket), FbOk);
    }
    let (parents, childs) = (pages_of(dense, sequence, 0), pages_of(dense, child, 0));
    assert_eq!(parents[0], childs[0], "a full page is shared");
    assert_ne!(parents[1], childs[1], "a partial page is copied");
    assert_eq!(step(dense, child, 0, 2), 20);
    close(dense, sequence);
    close(dense, child);
    destroy(dense, device);
}

#[test]
fn a_failed_step_is_retired_and_truncated() {
    let device = host();
    let dense = make_dense(device, &shape());
    let sequence = open(dense, 20, 20);
    step(dense, sequence, 0, 20);
    let row = FbBatchRow { sequence, accepted: 20, query_rows: 1 };
    let (status, mut number) = prepare(dense, &[row]);
    assert_eq!(status, FbOk);
    let busy = number;
    let mut count = 77;
    // SAFETY: the results have room.
    unsafe {
        let retire = |number: &mut u64, count: &mut u32| {
            fb_dense_retire(dense, number, null_mut(), null_mut(), 0, count)
        };
        assert_eq!((retire(&mut number, &mut count), number, count), (FbBusy, busy, 77));
        assert_eq!(fb_dense_destroy(dense), FbBusy);
        assert_eq!(fb_dense_abandon(dense, number), FbOk);
        assert_eq!(fb_dense_finish(dense, number, null_mut()), FbOk);
        assert_eq!(fb_dense_finish(dense, number, null_mut()), FbInvalidState);
        assert_eq!(fb_dense_abandon(dense, number), FbInvalidState);
        assert_eq!((retire(&mut number, &mut count), number, count), (FbCancelled, 0, 77));
        number = busy;
        assert_eq!((retire(&mut number, &mut count), number), (FbClosed, busy));
        assert_eq!(prepare(dense, &[row]).0, FbInvalidState);
        assert_eq!(fb_dense_truncate(dense, sequence, 20, null_mut(), null_mut()), FbOk);
    }
    assert_eq!(step(dense, sequence, 0, 1), 20);
    close(dense, sequence);
    destroy(dense, device);
}

#[test]
fn wrong_batches_begin_no_step() {
    let device = host();
    let (dense, other) = (make_dense(device, &shape()), make_dense(device, &shape()));
    let (sequence, theirs) = (open(dense, 20, 20), open(other, 20, 20));
    assert_ne!(sequence, theirs);
    let row = FbBatchRow { sequence, accepted: 0, query_rows: 1 };
    for (rows, status) in [
        (vec![], FbOutOfRange),
        (vec![row; 2], FbInvalidConfig),
        (vec![row; 4], FbOutOfRange),
        (vec![FbBatchRow { query_rows: 0, ..row }], FbOutOfRange),
        (vec![FbBatchRow { query_rows: 49, ..row }], FbOutOfRange),
        (vec![FbBatchRow { accepted: 1, ..row }], FbOutOfRange),
        (vec![FbBatchRow { accepted: FB_ACCEPTED_ON_DEVICE, ..row }], FbInvalidConfig),
        (vec![FbBatchRow { sequence: theirs, ..row }], FbClosed),
        (vec![FbBatchRow { sequence: 0, ..row }], FbClosed),
    ] {
        assert_eq!(prepare(dense, &rows), (status, 0), "{rows:?}");
    }
    let mut number = 0;
    let odd = null::<u32>().wrapping_byte_add(1);
    // SAFETY: refused before they are followed.
    unsafe {
        let start = |micro, rows, accepted, stream, number: *mut u64| {
            fb_dense_prepare(dense, micro, rows, 1, accepted, stream, number)
        };
        assert_eq!(start(1, &raw const row, null(), null_mut(), &raw mut number), FbOutOfRange);
        assert_eq!(start(0, null(), null(), null_mut(), &raw mut number), FbInvalidConfig);
        assert_eq!(start(0, &raw const row, odd, null_mut(), &raw mut number), FbInvalidConfig);
        assert_eq!(start(0, &raw const row, null(), null_mut(), null_mut()), FbInvalidConfig);
        assert_eq!(start(0, &raw const row, null(), device.cast(), &raw mut number), FbOutOfRange);
        assert_eq!(fb_dense_finish(dense, 0, null_mut()), FbClosed);
        assert_eq!(fb_dense_close(dense, theirs, null_mut()), FbClosed);
    }
    assert_eq!((number, stats(dense).steps_in_flight), (0, 0));
    close(dense, sequence);
    close(other, theirs);
    // SAFETY: no call is running.
    assert_eq!(unsafe { fb_dense_destroy(other) }, FbOk);
    destroy(dense, device);
}

#[test]
fn accepted_rows_are_read_on_the_device() {
    let device = host();
    let dense = make_dense(device, &shape());
    let sequence = open(dense, 16, 20);
    step(dense, sequence, 0, 16);
    assert_eq!(step(dense, sequence, 16, 2), 16);
    let (accepted, mut number, mut length) = ([1_u32, 0, 0], 0, 0);
    let row = FbBatchRow { sequence, accepted: FB_ACCEPTED_ON_DEVICE, query_rows: 1 };
    // SAFETY: the tensor has a word for each row of the batch, and the inline stream has passed when a call returns.
    unsafe {
        let status =
            fb_dense_prepare(dense, 0, &raw const row, 1, accepted.as_ptr(), null_mut(), &raw mut number);
        assert_eq!(status, FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_finish(dense, number, null_mut()), FbOk);
        let retired = fb_dense_retire(dense, &raw mut number, null_mut(), &raw mut length, 1, null_mut());
        assert_eq!((retired, length), (FbOk, 17));
    }
    close(dense, sequence);
    destroy(dense, device);
}

#[test]
fn a_step_allocates_nothing() {
    let device = host();
    let dense = make_dense(device, &shape());
    let sequence = open(dense, 16, 60);
    step(dense, sequence, 0, 16);
    step(dense, sequence, 16, 1);
    let counted = allocations(|| (0..20).for_each(|_| assert!(step(dense, sequence, 1, 1) > 16)));
    assert_eq!(counted, 0);
    close(dense, sequence);
    destroy(dense, device);
}
