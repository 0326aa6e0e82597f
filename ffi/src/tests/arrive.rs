//! Tests of sequences that arrive: rows and index keys layer by layer, early joins, aborts and later turns.

use super::*;
use crate::arrive::*;

const KEY: u32 = 8;
const PROMPT: u32 = 40;

fn arriving() -> FbCacheConfig {
    FbCacheConfig { arriving: 2, parked: 1, ..declared() }
}

fn stats_of(cache: *const FbCache) -> FbStats {
    let mut stats: FbStats = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_cache_stats(cache, &raw mut stats) }, FbOk);
    stats
}

fn arrive(cache: *mut FbCache, prompt: u32) -> u64 {
    let mut sequence = 0;
    // SAFETY: all pointers are valid.
    let status = unsafe { fb_arrive(cache, &opening(prompt, 20), &raw mut sequence) };
    assert_eq!(status, FbOk, "{}", text_of(cache));
    sequence
}

/// The bytes of a position's key.
fn key_of(layer: u32, position: u32) -> [u8; KEY as usize] {
    let mut key = [0xA0 + layer as u8; KEY as usize];
    key[..4].copy_from_slice(&position.to_ne_bytes());
    key
}

fn keys_of(layer: u32, positions: std::ops::Range<u32>) -> Vec<u64> {
    positions.map(|position| u64::from_ne_bytes(key_of(layer, position))).collect()
}

fn place(cache: *mut FbCache, sequence: u64, layer: u32, positions: std::ops::Range<u32>) -> FbStatus {
    let (keys, mut ticket) = (keys_of(layer, positions.clone()), null_mut());
    let (bytes, first) = (u64::from(KEY) * keys.len() as u64, positions.start);
    // SAFETY: the keys are as many as stated, and the inline stream has passed the call when it returns.
    unsafe {
        let from = keys.as_ptr().cast();
        let placed =
            fb_place_index_keys(cache, sequence, layer, first, from, bytes, null_mut(), &raw mut ticket);
        if placed == FbOk {
            assert_eq!(outcome(ticket).0, FB_TICKET_DONE);
            assert_eq!(fb_ticket_destroy(ticket), FbOk);
        }
        placed
    }
}

/// The pages of a sequence.
fn pages_of(cache: *const FbCache, sequence: u64) -> Vec<FbPage> {
    let (mut pages, mut count) = ([zeroed::<FbPage>(); 32], 0);
    // SAFETY: the places are as many as stated.
    assert_eq!(unsafe { fb_pages(cache, sequence, pages.as_mut_ptr(), 32, &raw mut count) }, FbOk);
    pages[..count as usize].to_vec()
}

/// The key of a position as it is in the sequence's pages.
fn key_in_place(cache: *const FbCache, sequence: u64, layer: u32, position: u32) -> [u8; KEY as usize] {
    let (mut keys, mut bytes) = (null_mut(), 0);
    let page = pages_of(cache, sequence)[(position / PAGE) as usize].index_keys;
    let at = (page * PAGE + position % PAGE) * KEY;
    // SAFETY: the key is inside the returned memory.
    unsafe {
        assert_eq!(fb_index_keys(cache, layer, &raw mut keys, &raw mut bytes), FbOk);
        assert!(u64::from(at + KEY) <= bytes);
        keys.cast::<u8>().add(at as usize).cast::<[u8; KEY as usize]>().read()
    }
}

fn append_layer(cache: *mut FbCache, sequence: u64, layer: u32, positions: std::ops::Range<u32>) {
    let rows: Vec<u8> = positions.clone().flat_map(|position| row_of(layer, position)).collect();
    // SAFETY: that many rows are valid.
    let status = unsafe { fb_append(cache, sequence, layer, rows.as_ptr().cast(), positions.len() as u32) };
    assert_eq!(status, FbOk, "{}", text_of(cache));
}

fn try_join(cache: *mut FbCache, sequence: u64) -> FbStatus {
    // SAFETY: nothing is passed.
    unsafe { fb_join(cache, sequence, null(), null_mut(), null_mut()) }
}

fn digest_of(cache: *const FbCache, sequence: u64) -> u64 {
    let mut digest = 0;
    // SAFETY: the output has room.
    assert_eq!(unsafe { fb_digest(cache, sequence, &raw mut digest) }, FbOk);
    digest
}

#[test]
fn a_sequence_arrives_layer_by_layer_and_is_then_like_one_that_was_opened() {
    let device = host();
    let cache = make_cache(device, &arriving());
    let free = stats_of(cache).free_lanes;
    let sequence = arrive(cache, PROMPT);
    let length = length_of(cache, sequence);
    assert_eq!((length.arriving, length.running, length.filled), (1, 0, 0));
    assert_eq!((stats_of(cache).free_lanes, stats_of(cache).arriving), (free, 1), "it takes no lane");
    append_layer(cache, sequence, 0, 0..PROMPT);
    assert_eq!(try_join(cache, sequence), FbInvalidState, "layer 1 has no rows");
    let (pages, mut rows, mut bytes) = (pages_of(cache, sequence), null_mut(), 0);
    // SAFETY: rows are written to the sequence's own pages, inside the returned rows.
    unsafe {
        assert_eq!(fb_rows(cache, 1, &raw mut rows, &raw mut bytes), FbOk);
        for position in 0..PROMPT {
            let page = pages[(position / PAGE) as usize].host;
            let at = (page * PAGE + position % PAGE) * ROW;
            rows.cast::<u8>().add(at as usize).cast::<[u8; ROW as usize]>().write(row_of(1, position));
        }
        assert_eq!(fb_append_layer_in_place(cache, sequence, 1, 30), FbOk);
        assert_eq!(fb_append_layer_in_place(cache, sequence, 1, 11), FbOutOfRange);
        assert_eq!(fb_append_layer_in_place(cache, sequence, 1, 10), FbOk);
        assert_eq!(try_join(cache, sequence), FbInvalidState, "no layer has index keys");
        assert!(text_of(cache).contains("index keys"), "{}", text_of(cache));
        assert_eq!(place(cache, sequence, 0, 0..20), FbOk);
        assert_eq!(place(cache, sequence, 0, 20..48), FbOk, "the last page whole");
        assert_eq!(fb_index_keys_in_place(cache, sequence, 1, 39), FbOk);
        assert_eq!(try_join(cache, sequence), FbInvalidState, "layer 1 lacks a key");
        assert_eq!(fb_index_keys_in_place(cache, sequence, 1, 1), FbOk);
    }
    assert_eq!(try_join(cache, sequence), FbOk, "{}", text_of(cache));
    assert_eq!((length_of(cache, sequence).arriving, length_of(cache, sequence).running), (0, 1));
    let opened = join(cache, PROMPT, 20);
    assert_eq!(digest_of(cache, sequence), digest_of(cache, opened));
    for position in [0, 15, 16, PROMPT - 1] {
        assert_eq!(key_in_place(cache, sequence, 0, position), key_of(0, position));
        for layer in 0..LAYERS {
            assert_eq!(read_row(cache, sequence, layer, position), row_of(layer, position));
        }
    }
    step(cache, sequence, 0, null_mut());
    step(cache, opened, 0, null_mut());
    assert_eq!(digest_of(cache, sequence), digest_of(cache, opened));
    close(cache, sequence);
    close(cache, opened);
    destroy(cache, device);
}

#[test]
fn leading_pages_that_the_cache_has_need_not_come() {
    let device = host();
    let cache = make_cache(device, &arriving());
    let ids: Vec<u32> = (0..PROMPT).collect();
    let tokens = FbTokens { ids: ids.as_ptr(), count: PROMPT, ..sized() };
    let (mut first, mut second, mut shared) = (0, 0, 77);
    let open = opening(PROMPT, 20);
    // SAFETY: all pointers are valid and as long as stated.
    unsafe {
        let arrive = |sequence: &mut u64, shared: &mut u32| {
            fb_arrive_shared(cache, &raw const open, &raw const tokens, null(), 0, sequence, shared)
        };
        assert_eq!((arrive(&mut first, &mut shared), shared), (FbOk, 0), "{}", text_of(cache));
        append(cache, first, 0..PROMPT);
        for layer in 0..LAYERS {
            assert_eq!(place(cache, first, layer, 0..PROMPT), FbOk);
        }
        assert_eq!(try_join(cache, first), FbOk);
        assert_eq!(fb_publish(cache, first, 0, &raw const tokens, &raw mut shared), FbOk);
        assert_eq!((arrive(&mut second, &mut shared), shared), (FbOk, 32), "{}", text_of(cache));
    }
    append(cache, second, 32..PROMPT);
    assert_eq!(place(cache, second, 0, 16..PROMPT), FbOutOfRange, "shared keys are placed no more");
    for layer in 0..LAYERS {
        assert_eq!(place(cache, second, layer, 32..PROMPT), FbOk, "{}", text_of(cache));
    }
    assert_eq!(try_join(cache, second), FbOk, "{}", text_of(cache));
    assert_eq!(read_row(cache, second, 1, 5), row_of(1, 5));
    assert_eq!(key_in_place(cache, second, 1, 5), key_of(1, 5));
    close(cache, first);
    close(cache, second);
    destroy(cache, device);
}

#[test]
fn layers_of_an_early_join_are_warmed_up_as_by_one_join() {
    let device = host();
    let cache = make_cache(device, &FbCacheConfig { slots: 32, min_budget: 32, ..arriving() });
    let selections: Vec<i32> = (0..LAYERS * 3 * TOP_K).map(|at| (at * 7 % PROMPT) as i32).collect();
    let of_layer = (3 * TOP_K) as usize;
    let warm = |layer: u32| FbWarmUp {
        selections: selections[layer as usize * of_layer..].as_ptr(),
        steps: 3,
        ..sized()
    };
    let (whole, early) = (fill(cache, PROMPT, 20), arrive(cache, PROMPT));
    let warm_layer = |layer: u32, warm: &FbWarmUp| {
        // SAFETY: the selections are as many as stated.
        unsafe { fb_warm_layer(cache, early, layer, warm, null_mut(), null_mut()) }
    };
    let mut ticket = null_mut();
    // SAFETY: the selections are as many as stated.
    unsafe {
        assert_eq!(fb_join(cache, whole, &warm(0), null_mut(), null_mut()), FbOk, "{}", text_of(cache));
        assert_eq!(warm_layer(0, &warm(0)), FbInvalidState, "it has not joined");
        assert_eq!(fb_join_early(cache, early, null_mut(), &raw mut ticket), FbOk, "{}", text_of(cache));
        assert_eq!(outcome(ticket).0, FB_TICKET_DONE);
        assert_eq!(fb_ticket_destroy(ticket), FbOk);
        assert_eq!(fb_join_early(cache, early, null_mut(), null_mut()), FbInvalidState);
    }
    for layer in 0..LAYERS {
        append_layer(cache, early, layer, 0..PROMPT);
        assert_eq!(warm_layer(layer, &warm(layer)), FbInvalidState, "the keys are missing");
        assert_eq!(place(cache, early, layer, 0..PROMPT), FbOk);
        let bound = FbWarmUp { bytes_a_call: 1, ..warm(layer) };
        assert_eq!(warm_layer(layer, &bound), FbOutOfRange);
        assert_eq!(warm_layer(layer, &FbWarmUp { steps: 0, ..warm(layer) }), FbInvalidConfig);
        assert_eq!(length_of(cache, early).running, 0);
        assert_eq!(warm_layer(layer, &warm(layer)), FbOk, "{}", text_of(cache));
    }
    assert_eq!(warm_layer(LAYERS, &warm(0)), FbOutOfRange);
    assert_eq!(length_of(cache, early).running, 1);
    assert_eq!(digest_of(cache, early), digest_of(cache, whole));
    let nothing = arrive(cache, PROMPT);
    // SAFETY: nothing is passed.
    unsafe {
        assert_eq!(fb_join_early(cache, nothing, null_mut(), null_mut()), FbOk);
        for layer in 0..LAYERS {
            append_layer(cache, nothing, layer, 0..PROMPT);
            assert_eq!(place(cache, nothing, layer, 0..PROMPT), FbOk);
            assert_eq!(fb_warm_layer(cache, nothing, layer, null(), null_mut(), null_mut()), FbOk);
        }
    }
    assert_ne!(digest_of(cache, nothing), digest_of(cache, whole), "other selections leave other rows");
    for sequence in [whole, early, nothing] {
        close(cache, sequence);
    }
    destroy(cache, device);
}

#[test]
fn pages_of_an_abort_are_free_after_their_release_and_those_of_a_close_at_once() {
    let device = host();
    let cache = make_cache(device, &FbCacheConfig { host_pages: 7, index_pages: 7, ..arriving() });
    let mut other = 0;
    let try_open = || {
        let mut opened = 0;
        // SAFETY: all pointers are valid.
        let status = unsafe { fb_open(cache, &opening(PROMPT, 20), &raw mut opened) };
        (status, opened)
    };
    let sequence = arrive(cache, PROMPT);
    assert_eq!(try_open().0, FbExhausted, "the two do not fit at once");
    close(cache, sequence);
    let (status, opened) = try_open();
    assert_eq!(status, FbOk, "a close gives the pages back");
    close(cache, opened);
    let sequence = arrive(cache, PROMPT);
    let pages = pages_of(cache, sequence).len() as u32;
    // SAFETY: nothing is passed, and the outputs have room.
    unsafe {
        assert_eq!(fb_release(cache, sequence, null_mut()), FbClosed, "it was not aborted");
        assert_eq!(fb_abort(cache, sequence, null_mut()), FbOk, "{}", text_of(cache));
        assert_eq!(fb_abort(cache, sequence, null_mut()), FbClosed);
        assert_eq!(fb_close(cache, sequence, null_mut()), FbClosed);
        assert_eq!(fb_cache_reap(cache, null_mut(), null_mut()), FbOk);
        assert_eq!((stats_of(cache).withheld_pages, stats_of(cache).arriving), (pages, 0));
        assert_eq!((stats_of(cache).sequences, try_open().0), (0, FbExhausted), "they are withheld");
        assert_eq!(fb_cache_validate(cache), FbOk, "{}", text_of(cache));
        assert_eq!(fb_cache_destroy(cache), FbBusy);
        assert!(text_of(cache).contains("fb_release"), "{}", text_of(cache));
        assert_eq!(fb_release(cache, sequence ^ 1, &raw mut other), FbClosed);
        assert!(text_of(cache).contains("was not aborted"), "{}", text_of(cache));
        assert_eq!((fb_release(cache, sequence, &raw mut other), other), (FbOk, pages));
        assert_eq!(fb_release(cache, sequence, &raw mut other), FbClosed);
    }
    let (status, opened) = try_open();
    assert_eq!((status, stats_of(cache).withheld_pages), (FbOk, 0), "{}", text_of(cache));
    close(cache, opened);
    destroy(cache, device);
}

#[test]
fn the_next_turn_comes_to_a_parked_sequence() {
    let device = host();
    let cache = make_cache(device, &arriving());
    let sequence = arrive(cache, 20);
    append(cache, sequence, 0..20);
    for layer in 0..LAYERS {
        assert_eq!(place(cache, sequence, layer, 0..20), FbOk);
    }
    assert_eq!(try_join(cache, sequence), FbOk);
    assert_eq!(place(cache, sequence, 0, 0..20), FbInvalidState, "it has joined");
    // SAFETY: nothing is passed.
    unsafe {
        assert_eq!(fb_park(cache, sequence, 0, null_mut()), FbOk);
        assert_eq!(fb_extend(cache, sequence, PROMPT, 10), FbOk);
        append(cache, sequence, 20..PROMPT);
        assert_eq!(
            fb_resume(cache, sequence, 0, null_mut(), null_mut()),
            FbInvalidState,
            "the keys are missing"
        );
        assert_eq!(place(cache, sequence, 0, 10..PROMPT), FbOutOfRange, "the first turn's keys stay");
        for layer in 0..LAYERS {
            assert_eq!(place(cache, sequence, layer, 20..PROMPT), FbOk, "{}", text_of(cache));
        }
        assert_eq!(fb_resume(cache, sequence, 0, null_mut(), null_mut()), FbOk, "{}", text_of(cache));
    }
    assert_eq!(length_of(cache, sequence).committed, PROMPT);
    assert_eq!(key_in_place(cache, sequence, 1, 25), key_of(1, 25));
    close(cache, sequence);
    destroy(cache, device);
}

#[test]
fn wrong_arguments_and_states_are_refused_and_change_nothing() {
    let device = host();
    let cache = make_cache(device, &arriving());
    let opened = fill(cache, PROMPT, 10);
    let (mut none, keys, key) = (0, keys_of(0, 0..64), u64::from(KEY));
    let from = keys.as_ptr().cast::<c_void>();
    let (one, two) = (arrive(cache, PROMPT), arrive(cache, PROMPT));
    let odd = from.wrapping_byte_add(2);
    // SAFETY: null and wrong numbers are refused; all else is valid.
    unsafe {
        assert_eq!(fb_arrive(cache, &opening(PROMPT, 20), &raw mut none), FbExhausted);
        assert!(text_of(cache).contains("arriving sequences"), "{}", text_of(cache));
        assert_eq!(fb_close(cache, two, null_mut()), FbOk);
        assert_eq!(fb_arrive(cache, null(), &raw mut none), FbInvalidConfig);
        assert_eq!(fb_arrive(cache, &opening(PROMPT, 20), null_mut()), FbInvalidConfig);
        assert_eq!(fb_arrive(cache, &opening(500, 20), &raw mut none), FbOutOfRange);
        let wrong = |sequence, layer, first, from, bytes| {
            fb_place_index_keys(cache, sequence, layer, first, from, bytes, null_mut(), null_mut())
        };
        assert_eq!(wrong(one, 0, 0, null(), key), FbInvalidConfig);
        assert_eq!(wrong(one, 0, 0, odd, key), FbOutOfRange);
        assert_eq!(wrong(one, 0, 0, from, key - 1), FbOutOfRange);
        assert_eq!(wrong(one, 0, 0, from, 49 * key), FbOutOfRange, "beyond the last page");
        assert_eq!(wrong(one, 0, 1, from, key), FbOutOfRange, "a gap");
        assert_eq!(wrong(one, LAYERS, 0, from, key), FbOutOfRange);
        assert_eq!(wrong(opened, 0, 0, from, key), FbInvalidState, "it did not arrive");
        assert_eq!(wrong(two, 0, 0, from, key), FbClosed);
        assert_eq!(wrong(one, 0, 0, from, u64::MAX), FbOutOfRange);
        assert_eq!(fb_index_keys_in_place(cache, one, 0, PROMPT + 1), FbOutOfRange);
        assert_eq!(fb_index_keys_in_place(cache, one, LAYERS, 1), FbOutOfRange);
        assert_eq!(fb_index_keys_in_place(cache, opened, 0, 1), FbInvalidState);
        assert_eq!(fb_append_layer_in_place(cache, one, LAYERS, 1), FbOutOfRange);
        for call in [fb_join_early, fb_join_more] {
            assert_eq!(call(cache, two, null_mut(), null_mut()), FbClosed);
        }
        assert_eq!(fb_abort(cache, two, null_mut()), FbClosed);
        assert_eq!((none, stats_of(cache).arriving), (0, 1));
        assert_eq!(fb_index_keys_in_place(cache, one, 0, PROMPT), FbOk, "no wrong call has counted a key");
    }
    let mut none = null_mut();
    let config = FbCacheConfig { arriving: u32::MAX, ..declared() };
    // SAFETY: all pointers are valid.
    let made = unsafe { fb_cache_create(device, &raw const config, null_mut(), 0, &raw mut none) };
    assert_eq!((made, none.is_null()), (FbInvalidConfig, true));
    close(cache, one);
    close(cache, opened);
    destroy(cache, device);
}
