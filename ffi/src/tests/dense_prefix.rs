//! Tests of prefixes that sequences of a dense cache share, in two tiers.

use std::sync::mpsc;
use std::time::Duration;

use super::budget::wait;
use super::*;
use crate::dense::*;
use crate::dense_config::*;
use crate::dense_prefix::*;
use crate::dense_sequence::*;
use crate::dense_step::*;

const LAYERS: [u32; 3] = [0, 1, 2];

/// One layer; device pages for one sequence and one page more, and a host's tier.
fn small() -> FbDenseConfig {
    let group = FbDenseGroup { layers: LAYERS.as_ptr(), layer_count: 1, window: 0, row_bytes: [ROW, 0] };
    FbDenseConfig {
        groups: [group, zeroed(), zeroed(), zeroed()],
        group_count: 1,
        page_tokens: PAGE,
        sequences: 2,
        max_tokens: 64,
        device_pages: [7, 0, 0, 0],
        host_pages: [8, 0, 0, 0],
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

fn tokens(ids: &[u32], keys: &[FbKey]) -> FbTokens {
    FbTokens {
        ids: ids.as_ptr(),
        count: ids.len() as u32,
        keys: keys.as_ptr(),
        key_count: keys.len() as u32,
        ..sized()
    }
}

fn names(dense: *const FbDense, salt: &[u8], prompt: &FbTokens) -> (FbStatus, *mut FbDenseNames) {
    let mut names = null_mut();
    let bytes = salt.as_ptr().cast();
    // SAFETY: all pointers are valid and as long as stated.
    let status = unsafe { fb_dense_names_create(dense, bytes, salt.len(), prompt, &raw mut names) };
    (status, names)
}

fn find(dense: *const FbDense, names: *const FbDenseNames) -> (u32, u32) {
    let mut found: FbDenseFound = sized();
    // SAFETY: it states its size.
    let status = unsafe { fb_dense_find(dense, names, &raw mut found) };
    assert_eq!(status, FbOk, "{}", text_of(dense));
    (found.tokens, found.host_tokens)
}

/// How much is found under a salt, with these keys.
fn found_of(dense: *const FbDense, salt: &[u8], prompt: &FbTokens) -> (u32, u32) {
    let (status, names) = names(dense, salt, prompt);
    assert_eq!(status, FbOk, "{}", text_of(dense));
    let found = find(dense, names);
    // SAFETY: no call is running.
    assert_eq!(unsafe { fb_dense_names_destroy(names) }, FbOk);
    found
}

fn open(dense: *mut FbDense, prompt: u32, names: *const FbDenseNames) -> (FbStatus, u64, u32) {
    let (mut sequence, mut found, mut ticket): (_, FbDenseFound, _) = (0, sized(), null_mut());
    // SAFETY: the results have room.
    let status = unsafe {
        let stream = null_mut();
        let (found, ticket) = (&raw mut found, &raw mut ticket);
        fb_dense_open_shared(dense, prompt, 8, names, stream, &raw mut sequence, found, ticket)
    };
    if status == FbOk {
        assert_eq!(outcome(ticket).0, FB_TICKET_DONE);
        // SAFETY: no call is running.
        assert_eq!(unsafe { fb_ticket_destroy(ticket) }, FbOk);
    }
    (status, sequence, found.tokens)
}

/// Computes a prompt from `from` on: writes rows of their positions, and accepts them.
fn prefill(dense: *mut FbDense, sequence: u64, from: u32, prompt: u32, mark: u8) {
    let row = FbBatchRow { sequence, accepted: 0, query_rows: prompt - from };
    let (mut number, mut tensors): (_, FbDenseStepTensors) = (0, sized());
    let mut view: FbDenseLayerView = sized();
    // SAFETY: the results have room, and rows are written in the planes while the step is open.
    unsafe {
        let begun = fb_dense_prepare(dense, 0, &raw const row, 1, null(), null_mut(), &raw mut number);
        assert_eq!(begun, FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_tensors(dense, 0, &raw mut tensors), FbOk);
        assert_eq!(fb_dense_view(dense, 0, 0, &raw mut view), FbOk);
        for at in 0..prompt - from {
            let slot = tensors.slots[0].cast::<i64>().add(at as usize).read() as usize;
            let row = view.address.cast::<u8>().add(slot * ROW as usize);
            row.write_bytes(mark + (from + at) as u8, ROW as usize);
        }
        assert_eq!(fb_dense_arrived(dense, number, 0, null_mut()), FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_finish(dense, number, null_mut()), FbOk, "{}", text_of(dense));
        let retired = fb_dense_retire(dense, &raw mut number, null_mut(), null_mut(), 0, null_mut());
        assert_eq!(retired, FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_truncate(dense, sequence, prompt, null_mut(), null_mut()), FbOk);
    }
}

/// The first byte of each row of a sequence.
fn marks(dense: *const FbDense, sequence: u64, count: u32) -> Vec<u8> {
    let (mut pages, mut all, mut view): (_, _, FbDenseLayerView) = ([0; 8], 0, sized());
    // SAFETY: the results have room, and nothing runs on the inline streams.
    unsafe {
        assert_eq!(fb_dense_pages(dense, sequence, 0, pages.as_mut_ptr(), 8, &raw mut all), FbOk);
        assert_eq!(fb_dense_view(dense, 0, 0, &raw mut view), FbOk);
        let byte = |at: u32| {
            let slot = pages[(at / PAGE) as usize] * PAGE + at % PAGE;
            view.address.cast::<u8>().add((slot * ROW) as usize).read()
        };
        (0..count).map(byte).collect()
    }
}

#[test]
fn a_published_prefix_is_found_in_both_tiers() {
    let device = host();
    let dense = make_dense(device, &small());
    let ids: Vec<u32> = (0..48).map(|at| at * 3 + 1).collect();
    let prompt = tokens(&ids, &[]);
    let (status, mine) = names(dense, b"tenant", &prompt);
    assert_eq!(status, FbOk, "{}", text_of(dense));
    let (status, sequence, shared) = open(dense, 48, mine);
    assert_eq!((status, shared), (FbOk, 0), "{}", text_of(dense));
    prefill(dense, sequence, 0, 48, 100);
    let (mut published, mut saved) = (77, 77);
    // SAFETY: all pointers are valid.
    unsafe {
        assert_eq!(
            fb_dense_publish(dense, sequence, 16, &raw const prompt, &raw mut published),
            FbOutOfRange
        );
        assert_eq!(published, 77);
        assert_eq!(fb_dense_publish(dense, sequence, 0, &raw const prompt, &raw mut published), FbOk);
        assert_eq!(published, 48);
        assert_eq!(fb_dense_save(dense, null_mut(), u64::from(PAGE * ROW) - 1, &raw mut saved), FbOk);
        assert_eq!(saved, 0, "less than a page");
        assert_eq!(fb_dense_save(dense, null_mut(), 1 << 20, &raw mut saved), FbOk);
        assert_eq!(saved, 3 * u64::from(PAGE * ROW));
        assert_eq!(fb_dense_close(dense, sequence, null_mut()), FbOk);
    }
    let mut keys = [zeroed::<FbKey>(); 3];
    assert_eq!((find(dense, mine), found_of(dense, b"other", &prompt)), ((48, 0), (0, 0)));
    assert_eq!(found_of(dense, b"tenant", &tokens(&ids, &keys)), (48, 0), "keys that are not set");
    keys[1] = FbKey { is_set: 1, bytes: [5; 16] };
    assert_eq!(found_of(dense, b"tenant", &tokens(&ids, &keys)), (16, 0));
    // Another prompt takes all six pages of the device.
    let none = tokens(&[], &[]);
    let (_, nothing) = names(dense, b"", &none);
    let (status, other, _) = open(dense, 56, nothing);
    assert_eq!(status, FbOk, "{}", text_of(dense));
    assert_eq!(open(dense, 48, mine).0, FbExhausted);
    prefill(dense, other, 0, 56, 0);
    // SAFETY: nothing is passed.
    assert_eq!(unsafe { fb_dense_close(dense, other, null_mut()) }, FbOk);
    let (tokens, host) = find(dense, mine);
    assert!(tokens == 48 && host > 0, "{host}");
    let (status, again, shared) = open(dense, 56, mine);
    assert_eq!((status, shared), (FbOk, 48), "{}", text_of(dense));
    assert_eq!(marks(dense, again, 48), (100..148).collect::<Vec<u8>>());
    let mut stats: FbDenseCacheStats = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_dense_stats(dense, &raw mut stats) }, FbOk);
    assert_eq!(stats.bytes_down, 3 * u64::from(PAGE * ROW));
    assert_eq!(stats.bytes_up, u64::from(host * ROW));
    assert_eq!((stats.saved[0], stats.saved[1]), (3, 0));
    // SAFETY: no call is running.
    unsafe {
        assert_eq!(fb_dense_close(dense, again, null_mut()), FbOk);
        assert_eq!(fb_dense_names_destroy(nothing), FbOk);
        assert_eq!(fb_dense_names_destroy(mine), FbOk);
        assert_eq!(fb_dense_names_destroy(mine), FbClosed);
        let mut found: FbDenseFound = sized();
        assert_eq!(fb_dense_find(dense, mine, &raw mut found), FbClosed, "stale names");
        assert_eq!(open(dense, 56, mine), (FbClosed, 0, 0));
        assert_eq!(fb_dense_validate(dense), FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_destroy(dense), FbOk, "{}", text_of(dense));
        assert_eq!(fb_device_destroy(device), FbOk);
    }
}

#[test]
fn invalid_tokens_make_no_names_and_publish_nothing() {
    let device = host();
    let dense = make_dense(device, &small());
    let ids = [7; 65];
    let keys = [FbKey { is_set: 2, ..zeroed() }; 3];
    for (wrong, status) in [
        (tokens(&ids, &[]), FbOutOfRange),
        (tokens(&ids[..48], &keys), FbInvalidConfig),
        (tokens(&ids[..48], &[zeroed(); 2]), FbOutOfRange),
        (FbTokens { ids: null(), ..tokens(&ids[..48], &[]) }, FbInvalidConfig),
        (FbTokens { size: 0, ..tokens(&ids[..48], &[]) }, FbInvalidConfig),
    ] {
        assert_eq!(names(dense, b"", &wrong), (status, null_mut()));
    }
    let (_, long) = names(dense, b"", &tokens(&ids[..48], &[]));
    assert_eq!(open(dense, 47, long), (FbOutOfRange, 0, 0), "names of more tokens than the prompt");
    let (mut plain, mut published, whole) = (0, 77, tokens(&ids[..16], &[]));
    // SAFETY: the results have room.
    unsafe {
        assert_eq!(fb_dense_open(dense, 20, 4, &raw mut plain), FbOk);
        let refused = fb_dense_publish(dense, plain, 0, &raw const whole, &raw mut published);
        assert_eq!((refused, published), (FbInvalidState, 77), "opened without names");
        assert_eq!(fb_dense_close(dense, plain, null_mut()), FbOk);
        assert_eq!(fb_dense_names_destroy(long), FbOk);
        assert_eq!(fb_dense_destroy(dense), FbOk);
        assert_eq!(fb_device_destroy(device), FbOk);
    }
}

#[test]
fn a_parked_sequence_gives_its_pages_to_others_and_comes_back() {
    let device = host();
    let dense = make_dense(device, &small());
    let none = tokens(&[], &[]);
    let (_, nothing) = names(dense, b"", &none);
    let (_, sequence, _) = open(dense, 40, nothing);
    prefill(dense, sequence, 0, 40, 100);
    let (mut ticket, mut stats) = (null_mut(), sized::<FbDenseCacheStats>());
    // SAFETY: the results have room.
    unsafe {
        assert_eq!(fb_dense_resume(dense, sequence, null_mut(), null_mut()), FbInvalidState);
        assert_eq!(fb_dense_park(dense, sequence, 1, null_mut(), null_mut()), FbOutOfRange);
        assert_eq!(fb_dense_park(dense, 77, 0, null_mut(), null_mut()), FbClosed);
        let parked = fb_dense_park(dense, sequence, 0, null_mut(), &raw mut ticket);
        assert_eq!(parked, FbOk, "{}", text_of(dense));
        assert_eq!(outcome(ticket).0, FB_TICKET_DONE);
        assert_eq!(fb_ticket_destroy(ticket), FbOk);
        assert_eq!(fb_dense_stats(dense, &raw mut stats), FbOk);
        assert_eq!((stats.parked, stats.parked_pages[0], stats.free_pages[0]), (1, 3, 6));
        assert_eq!(stats.bytes_down, 3 * u64::from(PAGE * ROW));
    }
    let (status, other, _) = open(dense, 56, nothing);
    assert_eq!(status, FbOk, "{}", text_of(dense));
    prefill(dense, other, 0, 56, 0);
    // SAFETY: the results have room.
    unsafe {
        assert_eq!(fb_dense_resume(dense, sequence, null_mut(), &raw mut ticket), FbExhausted);
        assert_eq!(fb_dense_close(dense, other, null_mut()), FbOk);
        let resumed = fb_dense_resume(dense, sequence, null_mut(), &raw mut ticket);
        assert_eq!(resumed, FbOk, "{}", text_of(dense));
        assert_eq!(outcome(ticket).0, FB_TICKET_DONE);
        assert_eq!(fb_ticket_destroy(ticket), FbOk);
    }
    assert_eq!(marks(dense, sequence, 40), (100..140).collect::<Vec<u8>>());
    // SAFETY: no call is running.
    unsafe {
        assert_eq!(fb_dense_close(dense, sequence, null_mut()), FbOk);
        assert_eq!(fb_dense_names_destroy(nothing), FbOk);
        assert_eq!(fb_dense_validate(dense), FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_destroy(dense), FbOk, "{}", text_of(dense));
        assert_eq!(fb_device_destroy(device), FbOk);
    }
}

#[test]
fn a_step_waits_for_the_pages_of_each_layer() {
    let device = host();
    let mut config = FbDenseConfig { bring_layers: 2, ..small() };
    config.groups[0].layer_count = 3;
    let dense = make_dense(device, &config);
    let (mut sequence, mut number) = (0, 0);
    // SAFETY: the results have room.
    unsafe {
        assert_eq!(fb_dense_open(dense, 8, 8, &raw mut sequence), FbOk);
        let row = FbBatchRow { sequence, accepted: 0, query_rows: 8 };
        let begun = fb_dense_prepare(dense, 0, &raw const row, 1, null(), null_mut(), &raw mut number);
        assert_eq!(begun, FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_finish(dense, number, null_mut()), FbInvalidState);
        assert_eq!(fb_dense_arrived(dense, number, 1, null_mut()), FbOk);
        assert_eq!(fb_dense_finish(dense, number, null_mut()), FbInvalidState);
        assert!(text_of(dense).contains("first layer 2"), "{}", text_of(dense));
        assert_eq!(fb_dense_arrived(dense, number, 3, null_mut()), FbOutOfRange);
        assert_eq!(fb_dense_arrived(dense, number + 1, 0, null_mut()), FbClosed);
        assert_eq!(fb_dense_arrived(dense, number, 2, null_mut()), FbOk);
        assert_eq!(fb_dense_finish(dense, number, null_mut()), FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_arrived(dense, number, 2, null_mut()), FbInvalidState);
        let retired = fb_dense_retire(dense, &raw mut number, null_mut(), null_mut(), 0, null_mut());
        assert_eq!(retired, FbOk, "{}", text_of(dense));
        assert_eq!(fb_dense_close(dense, sequence, null_mut()), FbOk);
        assert_eq!(fb_dense_destroy(dense), FbOk, "{}", text_of(dense));
        assert_eq!(fb_device_destroy(device), FbOk);
    }
}

/// Tells that its stream has come this far.
///
/// # Safety
/// `data` is a sender that outlives the device.
unsafe extern "C" fn tell(data: *mut c_void) {
    // SAFETY: the same contract.
    unsafe { &*data.cast::<mpsc::Sender<()>>() }.send(()).unwrap();
}

/// A step on a stream: its number.
fn begin(dense: *mut FbDense, sequence: u64, rows: u32, stream: *mut c_void) -> u64 {
    let (row, mut number) = (FbBatchRow { sequence, accepted: 0, query_rows: rows }, 0);
    // SAFETY: the row is valid, and the number has room.
    let begun = unsafe { fb_dense_prepare(dense, 0, &raw const row, 1, null(), stream, &raw mut number) };
    assert_eq!(begun, FbOk, "{}", text_of(dense));
    number
}

#[test]
fn the_stream_that_waits_for_a_layer_is_held_while_its_pages_come_back() {
    let (long, short) = (Duration::from_secs(60), Duration::from_millis(200));
    let device = make_device(&FbDeviceConfig { kind: FB_DEVICE_HOST_THREADS, ..sized() });
    let mut config = FbDenseConfig { bring_layers: 2, ..small() };
    config.groups[0].layer_count = 3;
    let dense = make_dense(device, &config);
    let ((open, gate), (tells, told)) = (mpsc::channel::<()>(), mpsc::channel());
    let (held, tells) = ((&raw const gate).cast_mut().cast(), (&raw const tells).cast_mut().cast());
    let [mut own, mut other, mut copies] = [null_mut(); 3];
    let mut sequence = 0;
    // SAFETY: the results have room, and what the calls are given outlives the device.
    unsafe {
        for stream in [&raw mut own, &raw mut other, &raw mut copies] {
            assert_eq!(fb_stream_create(device, stream), FbOk);
        }
        let end = |mut number| {
            assert_eq!(fb_dense_finish(dense, number, own), FbOk, "{}", text_of(dense));
            assert_eq!(fb_stream_wait(device, own), FbOk);
            let retired = fb_dense_retire(dense, &raw mut number, own, null_mut(), 0, null_mut());
            assert_eq!(retired, FbOk, "{}", text_of(dense));
        };
        assert_eq!(fb_dense_open(dense, 40, 8, &raw mut sequence), FbOk);
        let number = begin(dense, sequence, 40, own);
        assert_eq!(fb_dense_arrived(dense, number, 2, own), FbOk);
        end(number);
        assert_eq!(fb_dense_park(dense, sequence, 40, own, null_mut()), FbOk, "{}", text_of(dense));
        assert_eq!(fb_stream_wait(device, own), FbOk);

        assert_eq!(fb_stream_call(device, copies, Some(wait), held), FbOk);
        assert_eq!(fb_dense_resume(dense, sequence, copies, null_mut()), FbOk, "{}", text_of(dense));
        let number = begin(dense, sequence, 1, own);
        assert_eq!(fb_dense_arrived(dense, number, 1, other), FbOk);
        assert_eq!(fb_stream_call(device, own, Some(tell), tells), FbOk);
        assert_eq!(told.recv_timeout(long), Ok(()), "neither prepare nor the other stream's wait hold it");
        assert_eq!(fb_dense_arrived(dense, number, 2, own), FbOk);
        for stream in [own, other] {
            assert_eq!(fb_stream_call(device, stream, Some(tell), tells), FbOk);
            assert!(told.recv_timeout(short).is_err(), "the copies are held");
        }
        open.send(()).unwrap();
        assert_eq!([told.recv_timeout(long), told.recv_timeout(long)], [Ok(()); 2]);
        end(number);
        assert_eq!(fb_dense_close(dense, sequence, own), FbOk);
        assert_eq!(fb_dense_destroy(dense), FbOk, "{}", text_of(dense));
        assert_eq!(fb_device_destroy(device), FbOk);
    }
}
