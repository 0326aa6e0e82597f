//! Tests that make the C calls from Rust and need a device, a cache and sequences together.
//!
//! The programs in `c-tests` test the same from outside; this module has the cases that need many small set-ups.

mod arrive;
mod budget;
mod cache;
#[cfg(feature = "cuda")]
mod cuda;
mod dense;
mod dense_arrive;
mod dense_prefix;
mod device;
mod forked;
mod prefix;
mod sequence;
mod sizes;
mod transfer;
mod weights;

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};

use crate::budget::*;
use crate::cache::*;
use crate::cast::{Plain, Versioned};
use crate::config::*;
use crate::device::*;
use crate::error_text::fb_error_text;
use crate::layer::*;
use crate::prefix::*;
use crate::sequence::*;
use crate::status::FbStatus::{self, *};
use crate::step::*;
use crate::ticket::*;

const LAYERS: u32 = 2;
const ROW: u32 = 64;
const PAGE: u32 = 16;
const TOP_K: u32 = 4;

/// A struct as a caller sets it up: zero, with its size.
fn sized<T: Versioned>() -> T {
    let mut value = zeroed::<T>();
    // SAFETY: a versioned struct begins with its size.
    unsafe { (&raw mut value).cast::<usize>().write(size_of::<T>()) };
    value
}

fn zeroed<T: Plain>() -> T {
    // SAFETY: any bytes are a plain value.
    unsafe { std::mem::zeroed() }
}

fn make_device(config: &FbDeviceConfig) -> *mut FbDevice {
    let mut device = null_mut();
    let mut text = [0; 512];
    // SAFETY: all pointers are valid and as long as stated.
    let status = unsafe { fb_device_create(config, text.as_mut_ptr(), text.len(), &raw mut device) };
    assert_eq!(status, FbOk, "{}", text_in(&text));
    device
}

fn host() -> *mut FbDevice {
    make_device(&sized())
}

fn declared() -> FbCacheConfig {
    FbCacheConfig {
        layers: LAYERS,
        row_bytes: [ROW, 0],
        index_key_bytes: 8,
        page_tokens: PAGE,
        top_k: TOP_K,
        lanes: 3,
        max_tokens: 200,
        slots: 64,
        query_rows: 2,
        memory: FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED,
        ..sized()
    }
}

fn make_cache(device: *const FbDevice, config: &FbCacheConfig) -> *mut FbCache {
    let mut cache = null_mut();
    let mut text = [0; 512];
    // SAFETY: all pointers are valid and as long as stated.
    let status = unsafe { fb_cache_create(device, config, text.as_mut_ptr(), text.len(), &raw mut cache) };
    assert_eq!(status, FbOk, "{}", text_in(&text));
    cache
}

fn text_in(text: &[c_char]) -> String {
    // SAFETY: the texts of these tests end with a zero byte.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap().to_owned()
}

fn text_of<T>(handle: *const T) -> String {
    let mut text = [0; 512];
    // SAFETY: the buffer is as long as stated.
    assert_eq!(unsafe { fb_error_text(handle.cast(), text.as_mut_ptr(), text.len()) }, FbOk);
    text_in(&text)
}

/// The content of a position's row.
fn row_of(layer: u32, position: u32) -> [u8; ROW as usize] {
    let mut row = [layer as u8 + 1; ROW as usize];
    row[..4].copy_from_slice(&position.to_ne_bytes());
    row
}

fn opening(prompt: u32, promised: u32) -> FbOpenConfig {
    FbOpenConfig { prompt, promised, ..sized() }
}

/// Opens a sequence and appends its prompt.
fn fill(cache: *mut FbCache, prompt: u32, promised: u32) -> u64 {
    let mut sequence = 0;
    // SAFETY: all pointers are valid.
    let status = unsafe { fb_open(cache, &opening(prompt, promised), &raw mut sequence) };
    assert_eq!(status, FbOk, "{}", text_of(cache));
    append(cache, sequence, 0..prompt);
    sequence
}

fn append(cache: *mut FbCache, sequence: u64, positions: std::ops::Range<u32>) {
    for layer in 0..LAYERS {
        let rows: Vec<u8> = positions.clone().flat_map(|position| row_of(layer, position)).collect();
        // SAFETY: that many rows are valid.
        let status =
            unsafe { fb_append(cache, sequence, layer, rows.as_ptr().cast(), positions.len() as u32) };
        assert_eq!(status, FbOk, "{}", text_of(cache));
    }
}

/// Opens, appends, joins on the first stream.
fn join(cache: *mut FbCache, prompt: u32, promised: u32) -> u64 {
    let sequence = fill(cache, prompt, promised);
    // SAFETY: nothing is passed.
    let status = unsafe { fb_join(cache, sequence, null(), null_mut(), null_mut()) };
    assert_eq!(status, FbOk, "{}", text_of(cache));
    sequence
}

fn length_of(cache: *const FbCache, sequence: u64) -> FbSequenceLength {
    let mut length = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_length(cache, sequence, &raw mut length) }, FbOk, "{}", text_of(cache));
    length
}

fn read_row(cache: *const FbCache, sequence: u64, layer: u32, position: u32) -> [u8; ROW as usize] {
    let mut row = [0; ROW as usize];
    // SAFETY: the buffer is as long as stated.
    let status =
        unsafe { fb_read_row(cache, sequence, layer, position, row.as_mut_ptr().cast(), u64::from(ROW)) };
    assert_eq!(status, FbOk, "{}", text_of(cache));
    row
}

/// A step of one sequence with one query row, on one stream: selects position 0 in every layer. Returns its slots.
fn step(cache: *mut FbCache, sequence: u64, accepted: u32, stream: *mut c_void) -> Vec<i32> {
    let row = FbBatchRow { sequence, accepted, query_rows: 1 };
    let config = FbStepConfig { rows: &raw const row, row_count: 1, query_rows: 1, ..sized() };
    let (mut step, mut answers) = (0, Vec::new());
    let selection = [0, -1, -1, -1];
    // SAFETY: the buffers have a query row's selection, and the inline stream has passed each call when it returns.
    unsafe {
        assert_eq!(fb_prepare(cache, &raw const config, stream, &raw mut step), FbOk, "{}", text_of(cache));
        for layer in 0..LAYERS {
            let mut slots = [-7; TOP_K as usize];
            let status = fb_layer(cache, step, layer, selection.as_ptr(), slots.as_mut_ptr(), stream);
            assert_eq!(status, FbOk, "{}", text_of(cache));
            assert_eq!(fb_scatter(cache, step, layer, stream), FbOk);
            answers.push(slots[0]);
        }
        assert_eq!(fb_finish(cache, step, stream), FbOk);
        assert_eq!(fb_retire(cache, &raw mut step, stream, null_mut()), FbOk, "{}", text_of(cache));
    }
    answers
}

fn close(cache: *mut FbCache, sequence: u64) {
    // SAFETY: nothing is passed.
    assert_eq!(unsafe { fb_close(cache, sequence, null_mut()) }, FbOk, "{}", text_of(cache));
}

/// Destroys the cache, then the device; everything in them must be closed.
fn destroy(cache: *mut FbCache, device: *mut FbDevice) {
    // SAFETY: no call is running.
    unsafe {
        assert_eq!(fb_cache_validate(cache), FbOk, "{}", text_of(cache));
        assert_eq!(fb_cache_destroy(cache), FbOk, "{}", text_of(cache));
        assert_eq!(fb_device_destroy(device), FbOk, "{}", text_of(device));
    }
}

fn outcome(ticket: *const FbTicket) -> (u32, u32) {
    let (mut outcome, mut status) = (77, 77);
    // SAFETY: both have room.
    assert_eq!(unsafe { fb_ticket_outcome(ticket, &raw mut outcome, &raw mut status) }, FbOk);
    (outcome, status)
}

#[test]
fn structs_have_no_padding() {
    const WORD: usize = 8;
    for (size, words, halves) in [
        (size_of::<FbDeviceConfig>(), 3, 6),
        (size_of::<FbCacheConfig>(), 4, 32),
        (size_of::<FbStats>(), 14, 10),
        (size_of::<FbInfo>(), 1, 22),
        (size_of::<FbCacheFootprint>(), 10, 0),
        (size_of::<FbOpenConfig>(), 3, 4),
        (size_of::<FbBudget>(), 3, 2),
        (size_of::<FbWarmUp>(), 3, 2),
        (size_of::<FbSequenceLength>(), 1, 8),
        (size_of::<FbPage>(), 0, 2),
        (size_of::<FbTokens>(), 3, 2),
        (size_of::<FbKey>(), 2, 1),
        (size_of::<FbBatchRow>(), 1, 2),
        (size_of::<FbStepConfig>(), 3, 4),
        (size_of::<FbRetired>(), 4, 0),
        (size_of::<crate::dense_config::FbDenseGroup>(), 1, 4),
        (size_of::<crate::dense_config::FbDenseConfig>(), 1 + 4 * 3, 24),
        (size_of::<crate::dense_config::FbDenseCacheFootprint>(), 8, 0),
        (size_of::<crate::dense::FbDenseCacheStats>(), 4, 30),
        (size_of::<crate::dense::FbDensePlane>(), 3, 2),
        (size_of::<crate::dense::FbDenseLayerView>(), 4, 2),
        (size_of::<crate::dense::FbDenseStepTensors>(), 12, 4),
        (size_of::<crate::dense_sequence::FbDenseSequenceLength>(), 1, 6),
        (size_of::<crate::dense_arrive::FbDenseHostPage>(), 0, 2),
        (size_of::<crate::dense_prefix::FbDenseFound>(), 1, 2),
        (size_of::<crate::weights::FbTensor>(), 3, 2),
        (size_of::<crate::weights::FbWeightsConfig>(), 8, 12),
        (size_of::<crate::weights::FbWeightsFootprint>(), 12, 4),
        (size_of::<crate::weights::FbLayerWeights>(), 4, 6),
        (size_of::<crate::links::FbLinksConfig>(), 6, 4),
        (size_of::<crate::links::FbLinksEvent>(), 1, 4),
    ] {
        assert_eq!(size, words * WORD + halves * WORD / 2);
    }
}
