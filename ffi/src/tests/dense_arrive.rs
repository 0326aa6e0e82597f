//! Tests of sequences of a dense cache that arrive, in both ways.

use super::*;
use crate::dense::*;
use crate::dense_arrive::*;
use crate::dense_config::*;
use crate::dense_prefix::*;
use crate::dense_sequence::*;
use crate::dense_step::*;

/// Bytes of a token's K, and of its V, in one layer.
const RUN: u32 = 32;
const PROMPT: u32 = 40;
const ALL: [u32; 2] = [0, 1];

/// Two layers with K and V; device and host pages for one sequence and a half.
fn small() -> FbDenseConfig {
    let group = FbDenseGroup { layers: ALL.as_ptr(), layer_count: 2, window: 0, row_bytes: [RUN; 2] };
    FbDenseConfig {
        groups: [group, zeroed(), zeroed(), zeroed()],
        group_count: 1,
        page_tokens: PAGE,
        sequences: 3,
        max_tokens: 60,
        device_pages: [7, 0, 0, 0],
        host_pages: [5, 0, 0, 0],
        memory: FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED,
        ..sized()
    }
}

fn make_dense(device: *const FbDevice, config: &FbDenseConfig) -> *mut FbDense {
    let (mut dense, mut text) = (null_mut(), [0; 512]);
    // SAFETY: all pointers are valid and as long as stated.
    let status = unsafe { fb_dense_create(device, config, text.as_mut_ptr(), text.len(), &raw mut dense) };
    assert_eq!(status, FbOk, "{}", text_in(&text));
    dense
}

fn stats(dense: *const FbDense) -> FbDenseCacheStats {
    let mut stats = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_dense_stats(dense, &raw mut stats) }, FbOk);
    stats
}

fn length(dense: *const FbDense, sequence: u64) -> FbDenseSequenceLength {
    let mut length = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_dense_length(dense, sequence, &raw mut length) }, FbOk, "{}", text_of(dense));
    length
}

fn try_arrive(dense: *mut FbDense, way: u32) -> (FbStatus, u64) {
    let (mut sequence, mut ticket) = (0, null_mut());
    // SAFETY: the results have room.
    unsafe {
        let status = fb_dense_arrive(dense, PROMPT, 8, way, null_mut(), &raw mut sequence, &raw mut ticket);
        if status == FbOk {
            assert_eq!(outcome(ticket).0, FB_TICKET_DONE);
            assert_eq!(fb_ticket_destroy(ticket), FbOk);
        }
        (status, sequence)
    }
}

fn arrive(dense: *mut FbDense, way: u32) -> u64 {
    let (status, sequence) = try_arrive(dense, way);
    assert_eq!(status, FbOk, "{}", text_of(dense));
    sequence
}

fn pages_of(dense: *const FbDense, sequence: u64) -> Vec<u32> {
    let (mut pages, mut count) = ([77; 16], 0);
    // SAFETY: as many places as stated.
    let status = unsafe { fb_dense_pages(dense, sequence, 0, pages.as_mut_ptr(), 16, &raw mut count) };
    assert_eq!(status, FbOk, "{}", text_of(dense));
    pages[..count as usize].to_vec()
}

fn host_pages_of(dense: *const FbDense, sequence: u64) -> Vec<FbDenseHostPage> {
    let (mut pages, mut count) = ([zeroed(); 16], 0);
    // SAFETY: as many places as stated.
    let status = unsafe { fb_dense_host_pages(dense, sequence, 0, pages.as_mut_ptr(), 16, &raw mut count) };
    assert_eq!(status, FbOk, "{}", text_of(dense));
    pages[..count as usize].to_vec()
}

fn byte_of(layer: u32, run: u32, position: u32) -> u8 {
    (layer * 100 + run * 50 + position) as u8
}

/// Where a row is on the device.
fn row(dense: *const FbDense, sequence: u64, layer: u32, run: u32, position: u32) -> *mut [u8; RUN as usize] {
    let (mut view, page) =
        (sized::<FbDenseLayerView>(), pages_of(dense, sequence)[(position / PAGE) as usize]);
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_dense_view(dense, layer, run, &raw mut view) }, FbOk);
    assert_ne!(page, 0);
    let at = u64::from(page) * view.stride + u64::from(position % PAGE) * view.row_bytes;
    view.address.wrapping_byte_add(at as usize).cast()
}

fn each_row() -> impl Iterator<Item = (u32, u32, u32)> {
    ALL.into_iter().flat_map(|layer| (0..2).flat_map(move |run| (0..PROMPT).map(move |at| (layer, run, at))))
}

fn check_rows(dense: *const FbDense, sequence: u64) {
    for (layer, run, position) in each_row() {
        // SAFETY: the row is in a page of the sequence.
        let found = unsafe { row(dense, sequence, layer, run, position).read() };
        assert_eq!(found, [byte_of(layer, run, position); RUN as usize], "{layer} {run} {position}");
    }
}

fn join(dense: *mut FbDense, sequence: u64) -> FbStatus {
    // SAFETY: nothing is passed.
    unsafe { fb_dense_join(dense, sequence, null_mut(), null_mut()) }
}

fn step(dense: *mut FbDense, sequence: u64) -> (FbStatus, u32) {
    let (rows, mut number) = ([FbBatchRow { sequence, accepted: 0, query_rows: 1 }], 0);
    let (mut length, mut count) = (0, 0);
    // SAFETY: as many rows as stated, and the results have room.
    unsafe {
        let status = fb_dense_prepare(dense, 0, rows.as_ptr(), 1, null(), null_mut(), &raw mut number);
        if status == FbOk {
            assert_eq!(fb_dense_finish(dense, number, null_mut()), FbOk, "{}", text_of(dense));
            let retired =
                fb_dense_retire(dense, &raw mut number, null_mut(), &raw mut length, 1, &raw mut count);
            assert_eq!(retired, FbOk, "{}", text_of(dense));
        }
        (status, length)
    }
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

#[test]
fn rows_that_come_to_device_pages_are_those_of_the_joined_sequence() {
    let device = host();
    let dense = make_dense(device, &small());
    let sequence = arrive(dense, FB_DENSE_DIRECT);
    assert_eq!((stats(dense).arriving, length(dense, sequence).arriving), (1, 1));
    assert_eq!(host_pages_of(dense, sequence), []);
    for (layer, run, position) in each_row() {
        // SAFETY: the row is in a page of the sequence, and the ticket is done.
        unsafe {
            row(dense, sequence, layer, run, position).write([byte_of(layer, run, position); RUN as usize])
        };
    }
    // SAFETY: a number alone.
    unsafe {
        assert_eq!(fb_dense_append_layer_in_place(dense, sequence, 1, PROMPT), FbOk);
        assert_eq!(fb_dense_append_layer_in_place(dense, sequence, 0, PROMPT - 1), FbOk);
        assert_eq!(length(dense, sequence).filled, PROMPT - 1);
        assert_eq!(join(dense, sequence), FbInvalidState, "a row of layer 0 is missing");
        assert_eq!(step(dense, sequence).0, FbInvalidState, "no step names it");
        assert_eq!(fb_dense_append_layer_in_place(dense, sequence, 0, 2), FbOutOfRange);
        assert_eq!(fb_dense_append_layer_in_place(dense, sequence, 0, 1), FbOk);
        assert_eq!(
            fb_dense_bring_layer(dense, sequence, 0, null_mut()),
            FbInvalidState,
            "it is not on the host"
        );
    }
    assert_eq!(join(dense, sequence), FbOk, "{}", text_of(dense));
    assert_eq!((length(dense, sequence).arriving, length(dense, sequence).committed), (0, PROMPT));
    check_rows(dense, sequence);
    assert_eq!(step(dense, sequence), (FbOk, PROMPT));
    close(dense, sequence);
    destroy(dense, device);
}

#[test]
fn rows_that_come_to_host_pages_go_up_layer_by_layer() {
    let device = host();
    let dense = make_dense(device, &small());
    let sequence = arrive(dense, FB_DENSE_HOST);
    let pages = host_pages_of(dense, sequence);
    assert_eq!(pages.iter().map(|page| page.block).collect::<Vec<_>>(), [0, 1, 2]);
    // Layer 0 is given, and layer 1 is written to the host pages.
    for (_, run, position) in each_row().filter(|row| row.0 == 0) {
        let (bytes, offset) = ([byte_of(0, run, position); RUN as usize], u64::from(position % PAGE * RUN));
        let (block, from) = (position / PAGE, bytes.as_ptr().cast());
        // SAFETY: as many bytes as stated.
        let stored = unsafe { fb_dense_store(dense, sequence, 0, run, block, offset, from, RUN.into()) };
        assert_eq!(stored, FbOk, "{}", text_of(dense));
    }
    for (layer, run, position) in each_row().filter(|row| row.0 == 1) {
        let mut view = sized::<FbDenseLayerView>();
        // SAFETY: the row is in a host page of the sequence, inside the view's pages.
        unsafe {
            assert_eq!(fb_dense_host_view(dense, layer, run, &raw mut view), FbOk, "{}", text_of(dense));
            let page = pages[(position / PAGE) as usize].page;
            assert!(page < view.pages);
            let at = u64::from(page) * view.stride + u64::from(position % PAGE) * view.row_bytes;
            let place = view.address.byte_add(at as usize).cast::<[u8; RUN as usize]>();
            place.write([byte_of(layer, run, position); RUN as usize]);
        }
    }
    // SAFETY: a number alone.
    unsafe {
        assert_eq!(fb_dense_bring_layer(dense, sequence, 1, null_mut()), FbInvalidState, "it is not whole");
        for layer in [1, 0] {
            assert_eq!(fb_dense_append_layer_in_place(dense, sequence, layer, PROMPT), FbOk);
        }
        assert_eq!(fb_dense_bring_layer(dense, sequence, 1, null_mut()), FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_bring_layer(dense, sequence, 1, null_mut()), FbInvalidState);
    }
    assert_eq!(join(dense, sequence), FbOk, "{}", text_of(dense));
    check_rows(dense, sequence);
    assert_eq!((step(dense, sequence), host_pages_of(dense, sequence)), ((FbOk, PROMPT), vec![]));
    close(dense, sequence);
    destroy(dense, device);
}

#[test]
fn leading_pages_that_the_cache_has_need_not_come() {
    let device = host();
    let dense = make_dense(device, &FbDenseConfig { device_pages: [12, 0, 0, 0], ..small() });
    let ids: Vec<u32> = (0..PROMPT).collect();
    let tokens = FbTokens { ids: ids.as_ptr(), count: PROMPT, ..sized() };
    let (mut names, mut sequence, mut found) = (null_mut(), 0, sized::<FbDenseFound>());
    // SAFETY: all pointers are valid and as long as stated.
    unsafe {
        assert_eq!(fb_dense_names_create(dense, null(), 0, &raw const tokens, &raw mut names), FbOk);
        let mut arrive = |way| {
            let (to, found) = (&raw mut sequence, &raw mut found);
            let status =
                fb_dense_arrive_shared(dense, PROMPT, 8, names, way, null_mut(), to, found, null_mut());
            (status, sequence)
        };
        let (status, first) = arrive(FB_DENSE_DIRECT);
        assert_eq!(status, FbOk, "{}", text_of(dense));
        for layer in ALL {
            assert_eq!(fb_dense_append_layer_in_place(dense, first, layer, PROMPT), FbOk);
        }
        assert_eq!(join(dense, first), FbOk);
        let mut published = 0;
        assert_eq!(fb_dense_publish(dense, first, 0, &raw const tokens, &raw mut published), FbOk);
        assert_eq!(published, 32);
        let (status, second) = arrive(FB_DENSE_HOST);
        assert_eq!((status, found.tokens), (FbOk, 32), "{}", text_of(dense));
        let mut asked = sized::<FbDenseFound>();
        assert_eq!(fb_dense_find_arriving(dense, names, PROMPT, &raw mut asked), FbOk);
        assert_eq!((asked.tokens, asked.host_tokens), (32, 0));
        assert_eq!(pages_of(dense, first)[..2], pages_of(dense, second)[..2]);
        assert_eq!(host_pages_of(dense, second).len(), 1, "the transfer brings the last page alone");
        assert_eq!(length(dense, second).filled, 32);
        close(dense, first);
        close(dense, second);
        assert_eq!(fb_dense_names_destroy(names), FbOk);
    }
    destroy(dense, device);
}

#[test]
fn pages_of_an_abort_are_free_after_their_release_and_those_of_a_close_at_once() {
    for (way, pages) in [(FB_DENSE_DIRECT, 3), (FB_DENSE_HOST, 3)] {
        let device = host();
        let dense = make_dense(device, &small());
        let free = (stats(dense).free_pages, stats(dense).free_host_pages);
        let closed = arrive(dense, way);
        assert_eq!(try_arrive(dense, way).0, FbExhausted, "the two do not fit at once");
        close(dense, closed);
        let sequence = arrive(dense, way);
        let mut count = 0;
        // SAFETY: numbers, and room for the results.
        unsafe {
            assert_eq!(fb_dense_abort(dense, sequence, null_mut()), FbOk, "{}", text_of(dense));
            assert_eq!(fb_dense_abort(dense, sequence, null_mut()), FbClosed);
            assert_eq!(fb_dense_reap(dense, null_mut(), null_mut()), FbOk);
            assert_eq!((stats(dense).withheld_pages, stats(dense).sequences), (pages, 0));
            assert_eq!(try_arrive(dense, way).0, FbExhausted, "they are withheld");
            assert_eq!(fb_dense_validate(dense), FbOk, "{}", text_of(dense));
            assert_eq!(fb_dense_destroy(dense), FbBusy);
            assert!(text_of(dense).contains("fb_dense_release"), "{}", text_of(dense));
            assert_eq!(fb_dense_release(dense, sequence ^ 1, &raw mut count), FbClosed);
            assert_eq!((fb_dense_release(dense, sequence, &raw mut count), count), (FbOk, pages));
            assert_eq!(fb_dense_release(dense, sequence, null_mut()), FbClosed);
        }
        assert_eq!((stats(dense).free_pages, stats(dense).free_host_pages), free);
        close(dense, arrive(dense, way));
        destroy(dense, device);
    }
}

#[test]
fn wrong_arguments_and_states_are_refused_and_change_nothing() {
    let device = host();
    let dense = make_dense(device, &FbDenseConfig { device_pages: [12, 0, 0, 0], ..small() });
    let without = make_dense(device, &FbDenseConfig { host_pages: [0; 4], ..small() });
    let (mut opened, mut view, bytes) = (0, sized::<FbDenseLayerView>(), [1_u8; 2048]);
    let sequence = arrive(dense, FB_DENSE_HOST);
    let from = bytes.as_ptr().cast::<c_void>();
    assert_eq!(try_arrive(dense, 2), (FbInvalidConfig, 0));
    assert!(text_of(dense).contains("way"), "{}", text_of(dense));
    assert_eq!(try_arrive(without, FB_DENSE_HOST), (FbInvalidState, 0));
    // SAFETY: null and wrong numbers are refused; all else is valid and as long as stated.
    unsafe {
        assert_eq!(fb_dense_arrive(dense, PROMPT, 0, 0, null_mut(), null_mut(), null_mut()), FbInvalidConfig);
        assert_eq!(fb_dense_open(dense, PROMPT, 8, &raw mut opened), FbOk, "{}", text_of(dense));
        let store = |sequence, layer, run, block, offset, bytes, count| {
            fb_dense_store(dense, sequence, layer, run, block, offset, bytes, count)
        };
        assert_eq!(store(sequence, 2, 0, 0, 0, from, 8), FbOutOfRange);
        assert_eq!(store(sequence, 0, 2, 0, 0, from, 8), FbOutOfRange);
        assert_eq!(store(sequence, 0, 0, 3, 0, from, 8), FbOutOfRange);
        assert_eq!(store(sequence, 0, 0, 0, 1, from, u64::from(PAGE * RUN)), FbOutOfRange);
        assert_eq!(store(sequence, 0, 0, 0, u64::MAX, from, 8), FbOutOfRange);
        assert_eq!(store(sequence, 0, 0, 0, 0, null(), 8), FbInvalidConfig);
        assert_eq!(store(sequence, 0, 0, 0, 0, from, u64::MAX), FbOutOfRange);
        assert_eq!(store(opened, 0, 0, 0, 0, from, 8), FbInvalidState);
        assert_eq!(store(sequence, 0, 0, 0, 0, from, u64::from(PAGE * RUN)), FbOk, "a whole block");
        assert_eq!(fb_dense_append_layer_in_place(dense, sequence, 2, 1), FbOutOfRange);
        assert_eq!(fb_dense_append_layer_in_place(dense, opened, 0, 1), FbInvalidState);
        assert_eq!(fb_dense_bring_layer(dense, sequence, 2, null_mut()), FbOutOfRange);
        assert_eq!(fb_dense_abort(dense, opened, null_mut()), FbInvalidState, "close it");
        assert_eq!(join(dense, opened), FbInvalidState);
        assert_eq!(fb_dense_release(dense, sequence, null_mut()), FbClosed);
        assert_eq!(fb_dense_host_pages(dense, sequence, 1, null_mut(), 0, &raw mut view.pages), FbOutOfRange);
        assert_eq!(fb_dense_host_view(dense, 2, 0, &raw mut view), FbOutOfRange);
        assert_eq!(fb_dense_host_view(without, 0, 0, &raw mut view), FbInvalidState);
        assert_eq!(fb_dense_host_view(dense, 0, 0, null_mut()), FbInvalidConfig);
        assert_eq!(fb_dense_find_arriving(dense, null(), PROMPT, null_mut()), FbInvalidConfig);
        close(dense, opened);
        assert_eq!(fb_dense_abort(dense, opened, null_mut()), FbClosed);
        assert_eq!(join(dense, opened), FbClosed);
        assert_eq!(fb_dense_destroy(without), FbOk);
    }
    assert_eq!((stats(dense).arriving, length(dense, sequence).filled), (1, 0));
    close(dense, sequence);
    destroy(dense, device);
}
