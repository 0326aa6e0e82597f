//! Shared by the tests of the calls: a cache under its handle, and its twin in Rust, which gets the same calls.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Kind, Layer, LayerCall, MicroBatch, Open, Result,
    Sequence, Step, Streams, WarmUp,
};

use crate::cache::*;
use crate::cast::{self, Plain, Versioned};
use crate::config::*;
use crate::device::{FbDevice, fb_device_create, fb_device_destroy};
use crate::error_text::fb_error_text;
use crate::handle;
use crate::layer::{fb_layer, fb_scatter};
use crate::status::FbStatus;
use crate::step::*;

/// A zeroed struct, as a C caller makes it.
pub(crate) fn zeroed<T: Plain>() -> T {
    // SAFETY: any bytes are a valid value.
    unsafe { std::mem::zeroed() }
}

/// The size that the head of a struct states.
pub(crate) fn sized<T: Versioned>(size: usize, value: T) -> T {
    let mut value = value;
    // SAFETY: a versioned struct begins with its size.
    unsafe { (&raw mut value).cast::<usize>().write(size) };
    value
}

/// A zeroed struct with its size stated.
pub(crate) fn blank<T: Versioned>() -> T {
    sized(size_of::<T>(), zeroed())
}

pub(crate) fn ok(status: FbStatus) {
    assert_eq!(status, FbStatus::FbOk);
}

/// The text of the handle's last failed call.
pub(crate) fn error_text<T>(handle: *const T) -> String {
    let mut text = [0 as c_char; 512];
    // SAFETY: as many bytes as stated.
    ok(unsafe { fb_error_text(handle.cast(), text.as_mut_ptr(), text.len()) });
    // SAFETY: the call has ended it with a zero byte.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}

/// The text and the status of a creation.
pub(crate) fn reason(create: impl FnOnce(*mut c_char, usize) -> FbStatus) -> (FbStatus, String) {
    let mut text = [0 as c_char; 512];
    let status = create(text.as_mut_ptr(), text.len());
    // SAFETY: zeros, or a text that the call has ended with a zero byte.
    (status, unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

/// A random number.
pub(crate) fn draw(state: &mut u64, below: u32) -> u32 {
    *state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
    ((*state >> 33) as u32) % below.max(1)
}

pub(crate) const LAYERS: u32 = 3;
pub(crate) const DRAFT_LAYERS: u32 = 1;
pub(crate) const ALL: u32 = LAYERS + DRAFT_LAYERS;
pub(crate) const K: u32 = 8;
pub(crate) const QUERY_ROWS: u32 = 2;
pub(crate) const PROMPT: u32 = 90;
pub(crate) const ROW_BYTES: u32 = 64;

/// Budgets smaller than prompts, so that many rows miss, and smaller than a step's selection, so that it uses scratch.
pub(crate) fn config() -> FbCacheConfig {
    FbCacheConfig {
        layers: LAYERS,
        draft_layers: DRAFT_LAYERS,
        row_bytes: [ROW_BYTES, 0],
        page_tokens: 16,
        top_k: K,
        lanes: 4,
        max_tokens: 300,
        slots: 12,
        query_rows: QUERY_ROWS,
        min_budget: 12,
        micro_batches: 2,
        memory: FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED,
        ..blank()
    }
}

/// Budgets that hold every selection of a step: no row is in a scratch slot.
pub(crate) fn roomy() -> FbCacheConfig {
    let slots = QUERY_ROWS * K;
    FbCacheConfig { slots, min_budget: slots, ..config() }
}

/// A sequence in both caches.
#[derive(Clone, Debug)]
pub(crate) struct Twin {
    pub(crate) number: u64,
    pub(crate) own: Sequence,
    pub(crate) length: u32,
    landed: u32,
}

/// A cache behind its handle, and its twin.
pub(crate) struct Rig {
    pub(crate) device: *mut FbDevice,
    pub(crate) cache: *mut FbCache,
    pub(crate) own: Arc<dyn Device>,
    pub(crate) twin: Cache,
    pub(crate) stream: Stream,
    /// The stream of the calls through C.
    pub(crate) at: *mut c_void,
    pub(crate) sequences: Vec<Twin>,
    pub(crate) chance: u64,
}

/// Admits a sequence whose rows hold its number, layer and position.
pub(crate) fn open(cache: &mut Cache, number: u32, stream: Stream) -> Result<Sequence> {
    let budget = Budget::Slots(cache.config().min_budget);
    let opened = cache.open(&Open { prompt: PROMPT, promised: 200, budget, bring_up: BringUp::Nothing })?;
    for layer in 0..ALL {
        let word = |position: u32| (number * 1_000_000 + layer * 10_000 + position).to_le_bytes();
        let rows: Vec<u8> = (0..PROMPT).flat_map(|p| word(p).repeat(ROW_BYTES as usize / 4)).collect();
        cache.append(opened, Layer(layer), &rows)?;
    }
    let _joined = cache.join(opened, stream, WarmUp::default())?;
    Ok(opened)
}

impl Rig {
    pub(crate) fn new(config: FbCacheConfig) -> Rig {
        let (mut device, mut cache) = (null_mut(), null_mut());
        // SAFETY: room for the outputs.
        unsafe {
            ok(fb_device_create(&blank(), null_mut(), 0, &mut device));
            ok(fb_cache_create(device, &config, null_mut(), 0, &mut cache));
        }
        Rig::of(config, device, cache, null_mut())
    }

    /// With a cache that was created elsewhere; its twin is on the host device.
    pub(crate) fn of(
        config: FbCacheConfig,
        device: *mut FbDevice,
        cache: *mut FbCache,
        at: *mut c_void,
    ) -> Rig {
        let own: Arc<dyn Device> = HostDevice::new(HostOptions::default());
        let stream = own.stream().unwrap();
        // SAFETY: it names no list.
        let twin = Cache::new(unsafe { config.declare() }.unwrap(), own.clone()).unwrap();
        let sequences = Vec::new();
        let mut rig = Rig { device, cache, own, twin, stream, at, sequences, chance: 1 };
        for number in 0..config.lanes {
            let own = open(&mut rig.twin, number, stream).unwrap();
            let mut made = 0;
            ok(handle::change(cache, |cache| {
                made =
                    open(&mut cache.cache, number, cast::stream(at)).map(|opened| cache.number_of(opened))?;
                Ok(())
            }));
            rig.sequences.push(Twin { number: made, own, length: PROMPT, landed: 0 });
        }
        rig
    }

    /// Prepares a step of some sequences in both caches.
    pub(crate) fn prepare(&mut self, of: std::ops::Range<usize>, micro_batch: u32) -> (FbStep, Step) {
        let mut rows = (Vec::new(), Vec::new());
        for twin in &mut self.sequences[of] {
            let accepted = draw(&mut self.chance, twin.landed + 1);
            twin.length += accepted;
            twin.landed = QUERY_ROWS;
            rows.0.push(FbBatchRow { sequence: twin.number, accepted, query_rows: QUERY_ROWS });
            rows.1.push(BatchRow {
                sequence: twin.own,
                accepted: Accepted::Rows(accepted),
                query_rows: QUERY_ROWS,
            });
        }
        let config = FbStepConfig {
            rows: rows.0.as_ptr(),
            row_count: rows.0.len() as u32,
            query_rows: QUERY_ROWS,
            micro_batch,
            ..blank()
        };
        let mut step = 0;
        // SAFETY: the rows are valid, and room for the output.
        ok(unsafe { fb_prepare(self.cache, &config, self.at, &mut step) });
        let own = self.twin.prepare(MicroBatch(micro_batch), QUERY_ROWS, &rows.1, None, self.stream).unwrap();
        (step, own)
    }

    /// Closes some sequences in both, and opens others in their place.
    pub(crate) fn reopen(&mut self, of: std::ops::Range<usize>) {
        let (stream, at) = (self.stream, self.at);
        for (number, twin) in (0..).zip(&mut self.sequences).skip(of.start).take(of.len()) {
            self.twin.close(twin.own, stream).unwrap();
            let own = open(&mut self.twin, number, stream).unwrap();
            let mut made = 0;
            ok(handle::change(self.cache, |cache| {
                cache.cache.close(cache.sequence(twin.number)?, cast::stream(at))?;
                made =
                    open(&mut cache.cache, number, cast::stream(at)).map(|opened| cache.number_of(opened))?;
                Ok(())
            }));
            *twin = Twin { number: made, own, length: PROMPT, landed: 0 };
        }
    }

    /// The selection of the sequences in one layer: `[rows][query rows][k]`, some entries empty.
    pub(crate) fn selection(&mut self, of: std::ops::Range<usize>) -> Vec<i32> {
        let mut selection = Vec::new();
        for twin in &self.sequences[of] {
            for query in 0..QUERY_ROWS {
                let from = selection.len();
                for _ in 0..K {
                    let position = draw(&mut self.chance, twin.length + query + 1) as i32;
                    let none = selection[from..].contains(&position) || draw(&mut self.chance, 9) == 0;
                    selection.push(if none { -1 } else { position });
                }
            }
        }
        selection
    }

    /// The calls that a step still requires for layers that a test does not use, in both: they select nothing and store
    /// the contents of the landing slots.
    pub(crate) fn rest(&self, step: FbStep, own: &Step) {
        let words = (own.rows() * own.query_rows() * K) as usize;
        let (selection, mut slots) = (vec![-1_i32; words], vec![0_i32; words]);
        for layer in 0..ALL {
            // SAFETY: buffers of the step's shape, and the inline stream runs inside the calls.
            unsafe {
                ok(fb_layer(self.cache, step, layer, selection.as_ptr(), slots.as_mut_ptr(), self.at));
                ok(fb_scatter(self.cache, step, layer, self.at));
            }
        }
        // SAFETY: memory of the process, and the twin's stream runs inside its calls.
        let slice =
            |words: &[i32]| unsafe { self.own.import(words.as_ptr() as u64, size_of_val(words) as u64) };
        let buffers = Buffers { selection: slice(&selection), slots: slice(&slots), split_indices: None };
        let streams = Streams { resolve: self.stream, gather: self.stream };
        for call in (0..ALL).map(|layer| LayerCall::whole(Layer(layer))) {
            self.twin.layer(own, call, streams, buffers).unwrap();
            self.twin.scatter(own, call, self.stream).unwrap();
        }
    }

    /// Ends a step in both, and compares the reports.
    pub(crate) fn end(&mut self, mut step: FbStep, mut own: Step) {
        self.twin.finish(&mut own, self.stream).unwrap();
        let mut done: FbRetired = blank();
        // SAFETY: room for the outputs.
        unsafe {
            ok(fb_finish(self.cache, step, self.at));
            ok(fb_retire(self.cache, &mut step, self.at, &mut done));
        }
        assert_eq!(step, 0);
        let retired = self.twin.retire(own, self.stream).unwrap();
        assert_eq!((done.hits, done.misses), retired.total());
        assert_eq!(done.step, retired.step());
        let counts: Vec<FbLayerCount> = retired.layers().iter().map(FbLayerCount::from).collect();
        assert_eq!((counts, retired.lengths().to_vec()), report_of(self.cache));
    }
}

/// Counters and lengths of the last retired step.
pub(crate) fn report_of(cache: *const FbCache) -> (Vec<FbLayerCount>, Vec<u32>) {
    let (mut layers, mut rows) = (0, 0);
    // SAFETY: no room except for the number of entries.
    unsafe {
        ok(fb_retired_counts(cache, null_mut(), 0, &mut layers));
        ok(fb_retired_lengths(cache, null_mut(), 0, &mut rows));
    }
    let mut counts = vec![FbLayerCount::default(); layers as usize];
    let mut lengths = vec![0; rows as usize];
    // SAFETY: room for that many.
    unsafe {
        ok(fb_retired_counts(cache, counts.as_mut_ptr(), layers, &mut layers));
        ok(fb_retired_lengths(cache, lengths.as_mut_ptr(), rows, &mut rows));
    }
    (counts, lengths)
}

impl Rig {
    /// Closes the sequences and destroys the cache.
    pub(crate) fn end_cache(&mut self) {
        let at = self.at;
        for twin in &self.sequences {
            ok(handle::change(self.cache, |cache| {
                let sequence = cache.sequence(twin.number);
                match sequence.and_then(|sequence| cache.cache.close(sequence, cast::stream(at))) {
                    Err(error) if error.kind() != Kind::Closed => Err(error),
                    _ => Ok(()),
                }
            }));
        }
        // SAFETY: no call is running.
        ok(unsafe { fb_cache_destroy(self.cache) });
        self.cache = null_mut();
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        if !self.cache.is_null() {
            self.end_cache();
        }
        // SAFETY: no call is running.
        ok(unsafe { fb_device_destroy(self.device) });
    }
}

/// The system's allocator, counting the calls of each thread.
struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

impl Counting {
    fn note() {
        // A thread that is ending is no longer counted.
        let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Counting::note();
        // SAFETY: the caller's layout, unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        Counting::note();
        // SAFETY: `at` came from the system's allocator with this layout, as all of ours do.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Counting::note();
        // SAFETY: as `dealloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations, growths and frees of this thread while `work` runs.
pub(crate) fn allocations(work: impl FnOnce()) -> u64 {
    let before = CALLS.get();
    work();
    CALLS.get() - before
}
