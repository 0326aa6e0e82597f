//! The body of the fuzz target `ffi_calls`: any bytes decode to a run of calls of the C interface with any numbers.
//! Calls of a dense cache are in `dense_calls`.
//!
//! Pointers are valid and as long as stated. Every other argument may be invalid, but is often valid, so that runs get
//! far. After every call the status is one that a caller can cause, and the cache passes its checks. At the end the run
//! closes whatever is open, and everything that was free at the start is free again.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use super::arrive;
use super::budget::{self, FbBudget};
use super::cache::{self, FbCache, FbStats};
use super::config::{self, FbCacheConfig};
use super::device::{self, FbDevice, FbDeviceConfig};
use super::layer::{self, FbBuffers, FbStepRange};
use super::prefix::{self, FbTokens};
use super::sequence::{self, FbOpenConfig, FbPage, FbSequenceLength, FbWarmUp};
use super::status::FbStatus;
use super::step::{self, FbBatchRow, FbStepConfig};

const LAYERS: u32 = 3;
const ROW: usize = 32;
const TOP_K: usize = 6;
const QUERY: usize = 2;
const LANES: usize = 3;
const TOKENS: u32 = 96;
const ROWS_MOST: u32 = 64;
/// Bytes of an index key, and keys that the rows' memory is good for.
const KEY: u64 = 8;
const KEYS_MOST: u32 = ROWS_MOST * ROW as u32 / KEY as u32;
/// Words of a selection: one layer's, for a whole batch.
const WORDS: usize = LANES * QUERY * TOP_K;

/// A struct for C.
pub(super) fn zero<T: Copy>() -> T {
    // SAFETY: called for structs of numbers and pointers, all of which may be zero.
    unsafe { std::mem::zeroed() }
}

/// A zeroed struct except for these fields, with its size stated.
macro_rules! sized {
    (@ $field:ident) => { $field };
    (@ $field:ident $value:expr) => { $value };
    ($type:ident { $($field:ident $(: $value:expr)?),* $(,)? }) => {{
        let mut value = zero::<$type>();
        value.size = size_of::<$type>();
        $(value.$field = sized!(@ $field $($value)?);)*
        value
    }};
}
pub(super) use sized;

/// The interpretation of the bytes: numbers that are small, or as large as possible.
pub(super) struct Numbers<'a> {
    left: &'a [u8],
}

impl Numbers<'_> {
    pub(super) fn of(bytes: &[u8]) -> Numbers<'_> {
        Numbers { left: bytes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let (first, rest) = self.left.split_first().unwrap_or((&0, &[]));
        self.left = rest;
        *first
    }

    fn number(&mut self) -> u32 {
        match self.byte() {
            255 => u32::MAX,
            254 => u32::MAX - 1,
            253 => 1 << 31,
            252 => (1 << 31) - 1,
            251 => 1 << 16,
            small => u32::from(small) % 128,
        }
    }

    /// Mostly below `most`, sometimes anything.
    pub(super) fn below(&mut self, most: u32) -> u32 {
        match self.byte() {
            wild @ 240.. => u32::MAX - u32::from(wild % 4),
            small => u32::from(small) % most,
        }
    }
}

struct World {
    device: *mut FbDevice,
    cache: *mut FbCache,
    sequences: [u64; LANES + 1],
    /// Aborted sequences whose pages were not released.
    aborted: Vec<u64>,
    /// Aborts, and calls that placed index keys or warmed up a layer.
    arrived: [u64; 3],
    steps: [u64; 2],
    rows: Vec<u8>,
    selection: Vec<i32>,
    slots: Vec<i32>,
    ids: Vec<u32>,
}

/// A status that no caller can cause.
pub(super) fn sound(status: FbStatus, call: &str) -> bool {
    assert_ne!(status, FbStatus::FbInternal, "{call}");
    status == FbStatus::FbOk
}

impl World {
    fn new() -> World {
        let config = sized!(FbCacheConfig {
            layers: LAYERS,
            index_key_bytes: KEY as u32,
            row_bytes: [ROW as u32, 0],
            page_tokens: 16,
            top_k: TOP_K as u32,
            lanes: LANES as u32,
            max_tokens: TOKENS,
            slots: 16,
            query_rows: QUERY as u32,
            parked: 1,
            arriving: 2,
            min_budget: 4,
            memory: config::FB_MEMORY_SMALL_PAGES | config::FB_MEMORY_LAZY | config::FB_MEMORY_UNLOCKED,
        });
        let (mut device, mut cache) = (null_mut(), null_mut());
        // SAFETY: both configs state their sizes, and the outputs have room.
        unsafe {
            let host = sized!(FbDeviceConfig { kind: device::FB_DEVICE_HOST });
            assert!(sound(device::fb_device_create(&host, null_mut(), 0, &mut device), "device"));
            assert!(sound(cache::fb_cache_create(device, &config, null_mut(), 0, &mut cache), "cache"));
        }
        World {
            device,
            cache,
            sequences: [0; LANES + 1],
            aborted: Vec::new(),
            arrived: [0; 3],
            steps: [0; 2],
            rows: (0..ROWS_MOST as usize * ROW).map(|byte| byte as u8).collect(),
            selection: vec![-1; LAYERS as usize * WORDS],
            slots: vec![0; LAYERS as usize * WORDS],
            ids: (0..TOKENS).collect(),
        }
    }

    fn stats(&self) -> FbStats {
        let mut stats = sized!(FbStats {});
        // SAFETY: the size is stated.
        assert!(sound(unsafe { cache::fb_cache_stats(self.cache, &mut stats) }, "stats"));
        stats
    }

    /// The free resources when everything is closed.
    fn gauges(&self) -> [u32; 6] {
        let now = self.stats();
        [
            now.sequences,
            now.steps_in_flight,
            // Unused published pages count as free.
            now.free_host_pages + now.unused_pages,
            now.free_index_pages + now.unused_pages,
            now.free_slots,
            now.free_lanes,
        ]
    }

    fn open_config(&self, numbers: &mut Numbers<'_>) -> FbOpenConfig {
        let (prompt, promised) = (numbers.below(48), numbers.below(32));
        let ratio = [0.0, 0.0, 0.0, 0.5, f64::NAN, -1.0][numbers.byte() as usize % 6];
        let slots = if ratio == 0.0 { 4 + numbers.below(16) % 32 } else { 0 };
        sized!(FbOpenConfig { prompt, promised, slots, bring_up: numbers.below(2), ratio })
    }

    fn tokens(&self, numbers: &mut Numbers<'_>) -> FbTokens {
        let first = usize::from(numbers.byte().is_multiple_of(4));
        sized!(FbTokens { ids: self.ids[first..].as_ptr(), count: numbers.byte() as u32 % (TOKENS - 1) })
    }

    /// A sequence that is open, or a number that never was one.
    fn sequence(&self, numbers: &mut Numbers<'_>) -> u64 {
        match numbers.byte() {
            wild @ 250.. => u64::MAX >> (wild % 8 * 8),
            place => self.sequences[place as usize % self.sequences.len()],
        }
    }

    fn open_place(&mut self, numbers: &mut Numbers<'_>) -> *mut u64 {
        let free = self.sequences.iter().position(|sequence| *sequence == 0);
        let place = free.unwrap_or(numbers.byte() as usize % self.sequences.len());
        // A sequence in this place is closed first; otherwise the run would forget it.
        let before = self.sequences[place];
        if before != 0 {
            self.close(before);
        }
        &mut self.sequences[place]
    }

    fn close(&mut self, sequence: u64) {
        // SAFETY: no pointer is read.
        let closed = sound(unsafe { sequence::fb_close(self.cache, sequence, null_mut()) }, "close");
        if closed {
            self.sequences.iter_mut().filter(|own| **own == sequence).for_each(|own| *own = 0);
        }
    }

    /// Every call that makes a sequence ready to decode.
    fn start(&mut self, numbers: &mut Numbers<'_>) {
        let config = self.open_config(numbers);
        let shares = !numbers.byte().is_multiple_of(4);
        let tokens = sized!(FbTokens { ids: self.ids.as_ptr(), count: config.prompt.min(TOKENS) });
        let place = self.open_place(numbers);
        let (mut shared, cache) = (0, self.cache);
        // SAFETY: sizes are stated; ids and outputs are valid.
        let status = unsafe {
            match shares {
                true => prefix::fb_open_shared(cache, &config, &tokens, null(), 0, place, &mut shared),
                false => sequence::fb_open(cache, &config, place),
            }
        };
        if !sound(status, "start") {
            return;
        }
        // SAFETY: the place is one of this world's, and set.
        let sequence = unsafe { *place };
        let left = config.prompt - shared;
        for layer in 0..LAYERS {
            // SAFETY: a prompt has fewer rows than the buffer.
            let status =
                unsafe { sequence::fb_append(cache, sequence, layer, self.rows.as_ptr().cast(), left) };
            assert!(sound(status, "append"));
        }
        // SAFETY: no pointer but the cache.
        sound(unsafe { sequence::fb_join(cache, sequence, null(), null_mut(), null_mut()) }, "join");
    }

    fn fill(&mut self, numbers: &mut Numbers<'_>) {
        for word in &mut self.selection {
            *word = match numbers.byte() {
                0..=20 => -1,
                251.. => numbers.number() as i32,
                near => i32::from(near) % 24,
            };
        }
    }

    fn prepare(&mut self, numbers: &mut Numbers<'_>) {
        let Some(free) = self.steps.iter().position(|step| *step == 0) else { return };
        let width = numbers.below(QUERY as u32).wrapping_add(1);
        let row = |numbers: &mut Numbers<'_>, sequence| FbBatchRow {
            sequence,
            accepted: numbers.below(2),
            query_rows: if numbers.byte() < 240 { width } else { numbers.number() },
        };
        let mut rows = Vec::new();
        for _ in 0..1 + numbers.byte() as usize % 4 / 2 {
            let sequence = self.sequence(numbers);
            rows.push(row(numbers, sequence));
        }
        let config = sized!(FbStepConfig {
            rows: rows.as_ptr(),
            row_count: rows.len() as u32,
            query_rows: width,
            micro_batch: if numbers.byte() < 250 { 0 } else { numbers.number() },
        });
        // SAFETY: the rows are valid, and the output has room.
        sound(unsafe { step::fb_prepare(self.cache, &config, null_mut(), &mut self.steps[free]) }, "prepare");
    }

    /// Ends a step in any state.
    fn end_step(&mut self, place: usize) {
        // SAFETY: the step's number is this world's.
        unsafe {
            let finished = step::fb_finish(self.cache, self.steps[place], null_mut());
            sound(finished, "finish");
            // Some call was not made.
            if finished == FbStatus::FbInvalidState {
                sound(step::fb_abandon(self.cache, self.steps[place]), "abandon");
                sound(step::fb_finish(self.cache, self.steps[place], null_mut()), "finish");
            }
            sound(step::fb_retire(self.cache, &mut self.steps[place], null_mut(), null_mut()), "retire");
        }
    }

    /// One call on a sequence.
    fn on_sequence(&mut self, kind: u8, numbers: &mut Numbers<'_>) {
        let (cache, sequence, stream) = (self.cache, self.sequence(numbers), null_mut::<c_void>());
        let rows: *const c_void = self.rows.as_ptr().cast();
        // SAFETY: sizes are stated, buffers as long as the numbers that go with them.
        let status = unsafe {
            match kind {
                0 => {
                    let count = numbers.below(24).min(ROWS_MOST);
                    sequence::fb_append(cache, sequence, numbers.below(LAYERS), rows, count)
                }
                1 => sequence::fb_append_in_place(cache, sequence, numbers.below(48)),
                2 => {
                    let steps = u32::from(numbers.byte()) % 3;
                    let selections = if steps == 0 { null() } else { self.selection.as_ptr() };
                    let bytes = u64::from(numbers.byte() % 4) * ROW as u64;
                    let warm_up = sized!(FbWarmUp { selections, steps, bytes_a_call: bytes });
                    sequence::fb_join(cache, sequence, &warm_up, stream, null_mut())
                }
                3 => sequence::fb_join_more(cache, sequence, stream, null_mut()),
                4 => sequence::fb_truncate(cache, sequence, numbers.below(64), stream, null_mut()),
                5 => {
                    let config = self.open_config(numbers);
                    let child = self.open_place(numbers);
                    sequence::fb_fork(cache, sequence, &config, stream, child, null_mut())
                }
                6 => {
                    let (tokens, mut published) = (self.tokens(numbers), 0);
                    let from = if numbers.byte() < 160 { 0 } else { numbers.below(6).wrapping_mul(16) };
                    prefix::fb_publish(cache, sequence, from, &tokens, &mut published)
                }
                7 => {
                    let table = [4, 1, 9].map(|least| least + u32::from(numbers.byte()) % 128);
                    let budget = match numbers.byte() % 4 {
                        0 => sized!(FbBudget { slots_by_layer: table.as_ptr() }),
                        1 => sized!(FbBudget { ratio: f64::from(numbers.byte()) / 200.0 }),
                        _ => sized!(FbBudget { slots: numbers.number() }),
                    };
                    budget::fb_resize(cache, sequence, &budget, stream)
                }
                8 => {
                    self.close(sequence);
                    FbStatus::FbOk
                }
                9 => sequence::fb_extend(cache, sequence, numbers.below(120), numbers.below(40)),
                10 => sequence::fb_park(cache, sequence, numbers.below(3), stream),
                11 => {
                    let bytes = u64::from(numbers.byte() % 4) * ROW as u64;
                    sequence::fb_resume(cache, sequence, bytes, stream, null_mut())
                }
                12 => self.arrive(numbers),
                13 => self.bring(sequence, numbers),
                14 => self.warm(sequence, numbers),
                _ => self.abort_or_release(sequence, numbers),
            }
        };
        sound(status, "on a sequence");
    }

    /// A sequence arrives, and some of its layers come. It may join early, or behind the last one.
    fn arrive(&mut self, numbers: &mut Numbers<'_>) -> FbStatus {
        let (config, place, how) = (self.open_config(numbers), self.open_place(numbers), numbers.byte());
        let (cache, keys) = (self.cache, self.rows.as_ptr().cast::<c_void>());
        let (at, to) = (null_mut::<c_void>(), null_mut());
        // SAFETY: sizes are stated, the keys are as many as a prompt has tokens, and the place is one of this world's.
        unsafe {
            let status = arrive::fb_arrive(cache, &config, place);
            if status != FbStatus::FbOk {
                return status;
            }
            let (sequence, count) = (*place, config.prompt);
            let early = how % 2 == 1 && sound(arrive::fb_join_early(cache, sequence, at, to), "early");
            for layer in 0..LAYERS {
                if numbers.byte().is_multiple_of(8) {
                    return FbStatus::FbOk;
                }
                let bytes = u64::from(count) * KEY;
                let rows = sequence::fb_append_layer_in_place(cache, sequence, layer, count);
                let placed = arrive::fb_place_index_keys(cache, sequence, layer, 0, keys, bytes, at, to);
                assert_eq!([rows, placed], [FbStatus::FbOk; 2]);
                self.arrived[0] += 1;
                if early {
                    let warmed = arrive::fb_warm_layer(cache, sequence, layer, null(), at, to);
                    assert_eq!(warmed, FbStatus::FbOk);
                    self.arrived[1] += 1;
                }
            }
            if how.is_multiple_of(4) {
                sound(sequence::fb_join(cache, sequence, null(), at, to), "join");
            }
            FbStatus::FbOk
        }
    }

    /// Rows or index keys of a layer come: of any, or of all layers and tokens.
    fn bring(&mut self, sequence: u64, numbers: &mut Numbers<'_>) -> FbStatus {
        let (cache, keys, all) = (self.cache, self.rows.as_ptr().cast::<c_void>(), numbers.byte());
        let (layer, count) = (numbers.below(LAYERS), numbers.below(48));
        let bytes = u64::from(count.min(KEYS_MOST)) * KEY;
        // SAFETY: the keys have that many bytes, and the inline stream has passed the call when it returns.
        unsafe {
            match all % 4 {
                0 => sequence::fb_append_layer_in_place(cache, sequence, layer, count),
                1 => arrive::fb_index_keys_in_place(cache, sequence, layer, count),
                2 => {
                    let first = numbers.below(16);
                    let to = (null_mut(), null_mut());
                    let status =
                        arrive::fb_place_index_keys(cache, sequence, layer, first, keys, bytes, to.0, to.1);
                    self.arrived[0] += u64::from(status == FbStatus::FbOk);
                    status
                }
                _ => {
                    // Complete, so that some sequences join.
                    for (layer, _) in (0..LAYERS).flat_map(|layer| (0..48).map(move |at| (layer, at))) {
                        sound(sequence::fb_append_layer_in_place(cache, sequence, layer, 1), "rows in place");
                        sound(arrive::fb_index_keys_in_place(cache, sequence, layer, 1), "keys in place");
                    }
                    FbStatus::FbOk
                }
            }
        }
    }

    /// An early join, or the warm-up of a layer.
    fn warm(&mut self, sequence: u64, numbers: &mut Numbers<'_>) -> FbStatus {
        let (cache, stream, steps) = (self.cache, null_mut(), u32::from(numbers.byte()) % 4);
        // SAFETY: the selections are a layer's of that many steps.
        unsafe {
            if steps == 3 {
                return arrive::fb_join_early(cache, sequence, stream, null_mut());
            }
            let selections = if steps == 0 { null() } else { self.selection.as_ptr() };
            let warm_up = sized!(FbWarmUp { selections, steps });
            let layer = numbers.below(LAYERS);
            let status = arrive::fb_warm_layer(cache, sequence, layer, &warm_up, stream, null_mut());
            self.arrived[1] += u64::from(status == FbStatus::FbOk);
            status
        }
    }

    fn abort_or_release(&mut self, sequence: u64, numbers: &mut Numbers<'_>) -> FbStatus {
        let place = numbers.byte() as usize;
        // SAFETY: numbers alone.
        unsafe {
            if place.is_multiple_of(3) && !self.aborted.is_empty() {
                let released = self.aborted.swap_remove(place % self.aborted.len());
                return arrive::fb_release(self.cache, released, null_mut());
            }
            let status = arrive::fb_abort(self.cache, sequence, null_mut());
            if status == FbStatus::FbOk {
                self.arrived[2] += 1;
                self.aborted.push(sequence);
                self.sequences.iter_mut().filter(|own| **own == sequence).for_each(|own| *own = 0);
            }
            status
        }
    }

    /// One call on a step.
    fn on_step(&mut self, kind: u8, numbers: &mut Numbers<'_>) {
        let place = numbers.byte() as usize % self.steps.len();
        let (cache, step, stream) = (self.cache, self.steps[place], null_mut::<c_void>());
        let (selection, slots) = (self.selection.as_ptr(), self.slots.as_mut_ptr());
        let range = sized!(FbStepRange {
            layer: numbers.below(LAYERS),
            first: numbers.below(LANES as u32),
            count: numbers.below(LANES as u32),
            draft_pass: if numbers.byte() < 240 { 0 } else { numbers.number() },
        });
        let buffers = sized!(FbBuffers { selection, slots });
        // SAFETY: sizes are stated; both buffers have a whole step's words.
        let status = unsafe {
            match kind {
                0 | 1 => layer::fb_layer(cache, step, numbers.below(LAYERS), selection, slots, stream),
                2 if numbers.byte() < 64 => layer::fb_layers(cache, step, selection, slots, stream),
                2 => {
                    // Complete, so that some steps are accepted.
                    for layer in 0..LAYERS {
                        sound(layer::fb_layer(cache, step, layer, selection, slots, stream), "layer");
                        sound(layer::fb_scatter(cache, step, layer, stream), "scatter");
                    }
                    FbStatus::FbOk
                }
                3 => layer::fb_scatter(cache, step, numbers.below(LAYERS), stream),
                4 => layer::fb_resolve(cache, step, &range, &buffers, stream),
                5 => layer::fb_gather(cache, step, &range, numbers.below(2), stream),
                6 => layer::fb_scatter_range(cache, step, &range, stream),
                7 => step::fb_abandon(cache, step),
                8 => step::fb_finish(cache, step, stream),
                _ => step::fb_retire(cache, &mut self.steps[place], stream, null_mut()),
            }
        };
        sound(status, "on a step");
    }

    /// One call that only reads.
    fn read(&mut self, numbers: &mut Numbers<'_>) {
        let (cache, sequence) = (self.cache.cast_const(), self.sequence(numbers));
        let (mut word, mut number, mut address) = (0, 0, null_mut());
        let mut row = [0_u8; ROW];
        let mut pages = [FbPage { host: 0, index_keys: 0 }; 4];
        let mut room = [0; LAYERS as usize];
        let mut length = sized!(FbSequenceLength {});
        let tokens = self.tokens(numbers);
        // SAFETY: sizes are stated, and every output has the stated room.
        let status = unsafe {
            match numbers.byte() % 9 {
                0 => sequence::fb_length(cache, sequence, &mut length),
                1 => sequence::fb_landing_slot(cache, sequence, numbers.below(2), &mut word),
                2 => sequence::fb_pages(cache, sequence, pages.as_mut_ptr(), 4, &mut word),
                3 => {
                    let (layer, position) = (numbers.below(LAYERS), numbers.below(64));
                    let to = row.as_mut_ptr().cast();
                    sequence::fb_read_row(cache, sequence, layer, position, to, ROW as u64)
                }
                4 => sequence::fb_digest(cache, sequence, &mut number),
                5 => cache::fb_slab(cache, numbers.below(LAYERS), &mut address, &mut number),
                6 => cache::fb_index_keys(cache, numbers.below(LAYERS), &mut address, &mut number),
                7 => budget::fb_budgets(cache, sequence, room.as_mut_ptr(), numbers.below(LAYERS + 1)),
                _ => prefix::fb_find_shared(cache, &tokens, null(), 0, &mut word),
            }
        };
        sound(status, "read");
    }

    fn call(&mut self, numbers: &mut Numbers<'_>) {
        let kind = numbers.byte();
        match kind % 42 {
            // Bytes that were aliases: most older strings make the calls that they did.
            _ if kind >= 248 => {
                self.on_sequence([9, 12, 10, 13, 12, 11, 14, 15][usize::from(kind - 248)], numbers)
            }
            0 => {
                let config = self.open_config(numbers);
                let place = self.open_place(numbers);
                // SAFETY: the size is stated, and the output has room.
                sound(unsafe { sequence::fb_open(self.cache, &config, place) }, "open");
            }
            1..=4 => self.start(numbers),
            5..=9 => self.prepare(numbers),
            kind @ 10..=18 => self.on_sequence(kind - 10, numbers),
            19 => self.fill(numbers),
            kind @ 20..=29 => self.on_step(kind - 20, numbers),
            30..=36 => self.end_step(numbers.byte() as usize % self.steps.len()),
            37..=39 => self.read(numbers),
            _ => {
                // SAFETY: the number of those that wait is not asked for.
                sound(unsafe { cache::fb_cache_reap(self.cache, null_mut(), null_mut()) }, "reap");
            }
        }
        // SAFETY: a handle alone.
        assert!(sound(unsafe { cache::fb_cache_validate(self.cache) }, "validate"));
    }

    /// Closes what is open.
    fn end(&mut self) {
        for place in 0..self.steps.len() {
            if self.steps[place] != 0 {
                self.end_step(place);
                assert_eq!(self.steps[place], 0, "a step that has ended");
            }
        }
        for sequence in self.sequences {
            if sequence != 0 {
                self.close(sequence);
            }
        }
        assert_eq!(self.sequences, [0; LANES + 1]);
        for released in self.aborted.drain(..) {
            // SAFETY: a number alone.
            assert!(sound(unsafe { arrive::fb_release(self.cache, released, null_mut()) }, "release"));
        }
        // SAFETY: handles alone.
        assert!(sound(unsafe { cache::fb_cache_reap(self.cache, null_mut(), null_mut()) }, "reap"));
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // SAFETY: handles alone; nothing is left on them.
        let ended = unsafe { [cache::fb_cache_destroy(self.cache), device::fb_device_destroy(self.device)] };
        if !std::thread::panicking() {
            assert_eq!(ended, [FbStatus::FbOk; 2]);
        }
    }
}

/// Any bytes decode to a run of calls; returns the effects on the cache, and index keys that were placed, layers that
/// were warmed up, and aborts.
pub fn ffi_calls(bytes: &[u8]) -> (FbStats, [u64; 3]) {
    let mut world = World::new();
    let start = world.gauges();
    let mut numbers = Numbers::of(bytes);
    while !numbers.is_empty() {
        world.call(&mut numbers);
    }
    world.end();
    assert_eq!(world.gauges(), start, "everything was given back");
    (world.stats(), world.arrived)
}
