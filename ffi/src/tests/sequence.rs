//! Tests of the life of sequences, and of tickets.

use super::*;
use crate::handle::give;
use crate::handle::tests::{Pear, first_wrong, in_child};
use crate::testing::allocations;

#[test]
fn a_sequence_is_grown_truncated_and_forked() {
    let device = host();
    let cache = make_cache(device, &declared());
    let sequence = join(cache, 40, 40);
    let length = length_of(cache, sequence);
    assert_eq!((length.committed, length.landed, length.published, length.running), (40, 0, 0, 1));
    step(cache, sequence, 0, null_mut());
    assert_eq!(length_of(cache, sequence).landed, 1);
    let (mut ticket, mut child, mut pages, mut count) = (null_mut(), 0, [zeroed::<FbPage>(); 2], 0);
    let fork = FbOpenConfig { bring_up: FB_BRING_UP_NOTHING, ..opening(0, 20) };
    // SAFETY: all pointers are valid and as long as stated.
    unsafe {
        // A row is neither accepted nor rejected.
        let refused = fb_fork(cache, sequence, &raw const fork, null_mut(), &raw mut child, &raw mut ticket);
        assert_eq!((refused, child, ticket.is_null()), (FbInvalidState, 0, true));
        assert_eq!(fb_truncate(cache, sequence, 42, null_mut(), &raw mut ticket), FbOutOfRange);
        assert_eq!(fb_truncate(cache, sequence, 35, null_mut(), &raw mut ticket), FbOk);
        assert_eq!(outcome(ticket), (FB_TICKET_DONE, FbOk as u32));
        assert_eq!(fb_ticket_destroy(ticket), FbOk);
        assert_eq!(fb_ticket_destroy(ticket), FbClosed);
        assert_eq!(length_of(cache, sequence).committed, 35);
        let forked = fb_fork(cache, sequence, &raw const fork, null_mut(), &raw mut child, null_mut());
        assert_eq!(forked, FbOk, "{}", text_of(cache));
        assert_eq!(length_of(cache, child).committed, 35);
        for position in [0, 20, 34] {
            assert_eq!(read_row(cache, child, 1, position), row_of(1, position));
        }
        assert_eq!(fb_pages(cache, child, pages.as_mut_ptr(), 2, &raw mut count), FbOk);
        assert!(count > 3, "{count}");
        let mut parents = [zeroed::<FbPage>(); 2];
        assert_eq!(fb_pages(cache, sequence, parents.as_mut_ptr(), 2, &raw mut count), FbOk);
        assert_eq!(pages, parents, "full pages are shared");
        assert_eq!(fb_pages(cache, sequence, null_mut(), 0, &raw mut count), FbOk);
        assert_eq!(fb_pages(cache, sequence, null_mut(), 1, &raw mut count), FbInvalidConfig);
        let (mut one, mut other) = (0, 0);
        assert_eq!(fb_digest(cache, sequence, &raw mut one), FbOk);
        assert_eq!(fb_digest(cache, child, &raw mut other), FbOk);
        assert_ne!(one, other, "no rows were loaded");
    }
    step(cache, child, 0, null_mut());
    close(cache, sequence);
    close(cache, child);
    destroy(cache, device);
}

#[test]
fn a_bounded_warm_up_is_joined_in_several_calls() {
    let device = host();
    let cache = make_cache(device, &declared());
    let sequence = fill(cache, 190, 10);
    let selections: Vec<i32> = (0..LAYERS * 3 * TOP_K).map(|at| (at * 7 % 190) as i32).collect();
    let warm = FbWarmUp { selections: selections.as_ptr(), steps: 3, bytes_a_call: 3000, ..sized() };
    let mut more = 0;
    // SAFETY: the selections are as many as stated.
    unsafe {
        for wrong in [FbWarmUp { steps: 0, ..warm }, FbWarmUp { selections: null(), ..warm }] {
            let refused = fb_join(cache, sequence, &raw const wrong, null_mut(), null_mut());
            assert_eq!((refused, length_of(cache, sequence).running), (FbInvalidConfig, 0));
        }
        let reserved = FbWarmUp { reserved: 1, ..warm };
        assert_eq!(fb_join(cache, sequence, &raw const reserved, null_mut(), null_mut()), FbInvalidConfig);
        assert_eq!(fb_join_more(cache, sequence, null_mut(), null_mut()), FbInvalidState);
        let joined = fb_join(cache, sequence, &raw const warm, null_mut(), null_mut());
        assert_eq!(joined, FbOk, "{}", text_of(cache));
        while length_of(cache, sequence).running == 0 {
            let mut ticket = null_mut();
            assert_eq!(fb_join_more(cache, sequence, null_mut(), &raw mut ticket), FbOk);
            assert_eq!(outcome(ticket).0, FB_TICKET_DONE);
            assert_eq!(fb_ticket_destroy(ticket), FbOk);
            more += 1;
        }
        assert!(more > 1, "{more}");
        let mut stats: FbStats = sized();
        step(cache, sequence, 0, null_mut());
        assert_eq!(fb_cache_stats(cache, &raw mut stats), FbOk);
        assert_eq!((stats.hits, stats.misses), (1, 1), "position 0 was selected in layer 0 only");
    }
    close(cache, sequence);
    destroy(cache, device);
}

#[test]
fn rows_in_place_and_budgets_by_layer_are_accepted() {
    let device = host();
    let cache = make_cache(device, &FbCacheConfig { residency_only: 1, min_budget: 32, ..declared() });
    let mut sequence = 0;
    let table = [40, 64];
    let config = FbOpenConfig { slots_by_layer: table.as_ptr(), ..opening(50, 10) };
    // SAFETY: all pointers are valid, and the table has a value a layer.
    unsafe {
        assert_eq!(fb_open(cache, &raw const config, &raw mut sequence), FbOk, "{}", text_of(cache));
        assert_eq!(fb_append_in_place(cache, sequence, 30), FbOk);
        assert_eq!(fb_append_in_place(cache, sequence, 30), FbOutOfRange);
        assert_eq!(fb_append_in_place(cache, sequence, 20), FbOk);
        assert_eq!(fb_join(cache, sequence, null(), null_mut(), null_mut()), FbOk);
        let few = [31, 64];
        let config = FbOpenConfig { slots_by_layer: few.as_ptr(), ..config };
        let mut none = 0;
        assert_eq!(fb_open(cache, &raw const config, &raw mut none), FbInvalidConfig);
        assert_eq!(none, 0);
    }
    close(cache, sequence);
    destroy(cache, device);
}

#[test]
fn numbers_of_another_cache_and_of_a_closed_sequence_name_nothing() {
    let device = host();
    let (cache, other) = (make_cache(device, &declared()), make_cache(device, &declared()));
    let (mine, theirs) = (join(cache, 20, 10), join(other, 20, 10));
    assert_ne!(mine, theirs);
    let mut slot = 77;
    // SAFETY: the outputs have room.
    unsafe {
        for wrong in [theirs, 0, u64::MAX, mine ^ 1, mine ^ 1 << 40] {
            assert_eq!(fb_landing_slot(cache, wrong, 0, &raw mut slot), FbClosed);
            assert_eq!(fb_truncate(cache, wrong, 1, null_mut(), null_mut()), FbClosed);
            assert_eq!(fb_close(cache, wrong, null_mut()), FbClosed);
        }
        close(cache, mine);
        let next = join(cache, 20, 10);
        assert_eq!(fb_landing_slot(cache, mine, 0, &raw mut slot), FbClosed);
        assert_eq!((next == mine, slot), (false, 77));
        close(cache, next);
        close(other, theirs);
        assert_eq!(fb_cache_destroy(other), FbOk);
    }
    destroy(cache, device);
}

#[test]
fn a_row_is_read_whole_or_not_at_all() {
    let device = host();
    let cache = make_cache(device, &declared());
    let sequence = fill(cache, 20, 10);
    let mut row = [9_u8; ROW as usize];
    let place = row.as_mut_ptr().cast::<c_void>();
    let size = u64::from(ROW);
    // SAFETY: no more than the row's bytes are stated, or a size that is refused before.
    unsafe {
        assert_eq!(fb_read_row(cache, sequence, 0, 7, place, size - 1), FbOutOfRange);
        assert_eq!(fb_read_row(cache, sequence, 0, 7, place, u64::MAX), FbOutOfRange);
        assert_eq!(fb_read_row(cache, sequence, LAYERS, 7, place, size), FbOutOfRange);
        assert_eq!(fb_read_row(cache, sequence, 0, 1 << 20, place, size), FbOutOfRange);
        assert_eq!(fb_read_row(cache, sequence, 0, 7, null_mut(), size), FbInvalidConfig);
    }
    assert_eq!(row, [9; ROW as usize]);
    assert_eq!(read_row(cache, sequence, 0, 7), row_of(0, 7));
    close(cache, sequence);
    destroy(cache, device);
}

#[test]
fn a_ticket_outlives_its_cache_and_its_device() {
    let device = make_device(&FbDeviceConfig { kind: FB_DEVICE_HOST_THREADS, ..sized() });
    let cache = make_cache(device, &declared());
    let sequence = fill(cache, 100, 10);
    let mut ticket = null_mut();
    // SAFETY: the outputs have room.
    unsafe {
        assert_eq!(fb_join(cache, sequence, null(), null_mut(), &raw mut ticket), FbOk);
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);
        close(cache, sequence);
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);
        assert_eq!(fb_cache_reap(cache, null_mut(), null_mut()), FbOk);
        destroy(cache, device);
        assert_eq!(outcome(ticket), (FB_TICKET_DONE, FbOk as u32));
        let mut now = 77;
        assert_eq!(fb_ticket_outcome(ticket, &raw mut now, null_mut()), FbOk);
        assert_eq!(now, FB_TICKET_DONE);
        assert_eq!(fb_ticket_outcome(ticket, null_mut(), null_mut()), FbInvalidConfig);
        assert_eq!(fb_ticket_destroy(ticket), FbOk);
    }
}

#[test]
fn without_room_for_a_ticket_nothing_is_enqueued() {
    let code = in_child(|| {
        let device = host();
        let cache = make_cache(device, &FbCacheConfig { parked: 1, ..declared() });
        let (sequence, parked) = (fill(cache, 20, 10), join(cache, 20, 10));
        // SAFETY: a handle and numbers alone.
        let is_parked = unsafe { fb_park(cache, parked, 0, null_mut()) } == FbOk;
        while give(|| Ok(Pear)).is_ok() {}
        let mut ticket = null_mut();
        // SAFETY: the output has room.
        let (refused, joined) = unsafe {
            let refused = fb_join(cache, sequence, null(), null_mut(), &raw mut ticket);
            let still = length_of(cache, sequence).running == 0 && ticket.is_null();
            (refused == FbExhausted && still, fb_join(cache, sequence, null(), null_mut(), null_mut()))
        };
        // SAFETY: the output has room.
        let (kept, resumed) = unsafe {
            let refused = fb_resume(cache, parked, 0, null_mut(), &raw mut ticket);
            let still = length_of(cache, parked).parked == 1 && ticket.is_null();
            (refused == FbExhausted && still, fb_resume(cache, parked, 0, null_mut(), null_mut()))
        };
        let running = [sequence, parked].map(|sequence| length_of(cache, sequence).running == 1);
        first_wrong(&[refused, joined == FbOk, running[0], is_parked, kept, resumed == FbOk, running[1]])
    });
    assert_eq!(code, 0);
}

#[test]
fn a_forked_child_cannot_write_to_its_parents_rows() {
    let device = host();
    let cache = make_cache(device, &declared());
    let sequence = fill(cache, 20, 10);
    let row = [9_u8; ROW as usize];
    let code = in_child(|| {
        let mut other = 0;
        // SAFETY: all pointers are valid.
        unsafe {
            first_wrong(&[
                fb_append(cache, sequence, 0, row.as_ptr().cast(), 1) == FbClosed,
                fb_open(cache, &opening(4, 4), &raw mut other) == FbClosed,
                fb_cache_destroy(cache) == FbClosed,
                fb_device_destroy(device) == FbClosed,
            ])
        }
    });
    assert_eq!(code, 0);
    assert_eq!(read_row(cache, sequence, 0, 19), row_of(0, 19));
    close(cache, sequence);
    destroy(cache, device);
}

#[test]
fn rows_written_in_place_are_rows_of_the_sequence() {
    let device = host();
    let cache = make_cache(device, &declared());
    let (mut sequence, mut pages, mut count) = (0, [zeroed::<FbPage>(); 16], 0);
    // SAFETY: all pointers are valid; rows are written to pages of the sequence's own, inside the returned rows.
    unsafe {
        assert_eq!(fb_open(cache, &opening(20, 10), &raw mut sequence), FbOk);
        assert_eq!(fb_pages(cache, sequence, pages.as_mut_ptr(), 16, &raw mut count), FbOk);
        for layer in 0..LAYERS {
            let (mut rows, mut bytes) = (null_mut(), 0);
            assert_eq!(fb_rows(cache, layer, &raw mut rows, &raw mut bytes), FbOk);
            for position in 0..20 {
                let page = pages[(position / PAGE) as usize].host;
                let at = u64::from(page * PAGE + position % PAGE) * u64::from(ROW);
                assert!(at + u64::from(ROW) <= bytes);
                let place = rows.cast::<u8>().add(at as usize).cast::<[u8; ROW as usize]>();
                place.write(row_of(layer, position));
            }
        }
        assert_eq!(fb_append_in_place(cache, sequence, 20), FbOk);
        assert_eq!(fb_join(cache, sequence, null(), null_mut(), null_mut()), FbOk);
        let (mut rows, mut bytes) = (null_mut(), 7);
        assert_eq!(fb_rows(cache, LAYERS, &raw mut rows, &raw mut bytes), FbOutOfRange);
        assert_eq!((rows.is_null(), bytes), (true, 7));
    }
    for position in 0..20 {
        assert_eq!(read_row(cache, sequence, 1, position), row_of(1, position));
    }
    close(cache, sequence);
    destroy(cache, device);
}

#[test]
fn texts_name_the_argument_and_the_callers_number() {
    let device = host();
    let cache = make_cache(device, &declared());
    let sequence = join(cache, 20, 10);
    let (mut count, row) = (0, FbBatchRow { sequence: 77, accepted: 0, query_rows: 1 });
    let config = FbStepConfig { rows: &raw const row, row_count: 1, query_rows: 1, ..sized() };
    let mut pages = [FbPage { host: 0, index_keys: 0 }; 1];
    // SAFETY: null is refused, and all else is valid.
    unsafe {
        let calls = allocations(|| {
            assert_eq!(fb_pages(cache, sequence, pages.as_mut_ptr(), 1, &raw mut count), FbOk);
        });
        assert_eq!((calls, count), (0, 3), "block tables are read in every step");
        count = 0;
        assert_eq!(fb_pages(cache, sequence, null_mut(), 4, &raw mut count), FbInvalidConfig);
        assert!(text_of(cache).contains("pages"), "{}", text_of(cache));
        assert_eq!(fb_retired_counts(cache, null_mut(), 4, &raw mut count), FbInvalidConfig);
        assert!(text_of(cache).contains("counts"), "{}", text_of(cache));
        assert_eq!(fb_retired_lengths(cache, null_mut(), 4, &raw mut count), FbInvalidConfig);
        assert!(text_of(cache).contains("lengths"), "{}", text_of(cache));
        assert_eq!(fb_close(cache, 77, null_mut()), FbClosed);
        assert!(text_of(cache).contains("sequence 0x4d"), "{}", text_of(cache));
        let mut step = 0;
        assert_eq!(fb_prepare(cache, &raw const config, null_mut(), &raw mut step), FbClosed);
        assert!(text_of(cache).contains("sequence 0x4d"), "{}", text_of(cache));
        assert_eq!((count, step), (0, 0));
    }
    close(cache, sequence);
    destroy(cache, device);
}
