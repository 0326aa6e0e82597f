//! The cache's handle: what it holds, how a call enters it, and the calls that concern all of it.
//!
//! A handle is a [`Cache`] on a host device of its own, the device's one stream, the places of the
//! steps in flight, and the text of the last error. All of it is taken at creation: a step allocates
//! nothing on this side either.

use std::ffi::{c_char, c_void};

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay::{Cache, Config, Error, Kind, Layer, Memory, Result, Row, Shape, Slots, Stats, Step};

use crate::cast::{self, Plain, Versioned};
use crate::panic::{is_panic, status, wall};
use crate::status::{FbStatus, Text};

/// Host memory, and the caller's thread as the only stream.
pub const FB_DEVICE_HOST: u32 = 0;

/// The total pool does without huge pages.
pub const FB_MEMORY_SMALL_PAGES: u32 = 1;
/// The total pool's pages become resident when they are first written.
pub const FB_MEMORY_LAZY: u32 = 2;
/// The total pool is not locked.
pub const FB_MEMORY_UNLOCKED: u32 = 4;

/// What a cache is made of. What is optional and 0 gets its default.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbCacheConfig {
    /// sizeof(fb_cache_config).
    pub size: usize,
    /// FB_DEVICE_HOST.
    pub device: u32,
    /// Layers that every decode step passes once.
    pub layers: u32,
    /// Further layers that draft tokens.
    pub draft_layers: u32,
    /// Bytes of one index key on the device; 0 when the model has no indexer.
    pub index_key_bytes: u32,
    /// Bytes of a row's runs; the second is 0 for rows in one run. Multiples of 4.
    pub row_bytes: [u32; 2],
    /// Tokens of a page: a power of two from 16 to 1024.
    pub page_tokens: u32,
    /// Positions that one query row selects in one layer.
    pub top_k: u32,
    /// Sequences that may be open.
    pub lanes: u32,
    /// Tokens of the longest sequence: prompt and promised.
    pub max_tokens: u32,
    /// Slots of one sequence in each layer.
    pub slots: u32,
    /// Query rows that a sequence may have in a step: 1 + drafts.
    pub query_rows: u32,
    /// Optional: bytes from one row to the next in host memory; the next multiple of 64.
    pub host_stride: u32,
    /// Optional: a device block of 64 slots is padded to a multiple of this; none.
    pub device_block_align: u32,
    /// Optional: pages of the total pool; enough for every lane.
    pub host_pages: u32,
    /// Optional: pages of index keys; enough for every lane.
    pub index_pages: u32,
    /// Optional: slots of each layer's pool, all sequences; enough for every lane.
    pub pool_slots: u32,
    /// Optional: the fewest slots a sequence may have in a layer; as `slots`.
    pub min_budget: u32,
    /// Optional: rows of a batch; as `lanes`.
    pub batch: u32,
    /// Optional: steps of one sequence that may be in flight; 2.
    pub steps_in_flight: u32,
    /// Optional: micro-batches whose steps may be open at the same time; 1.
    pub micro_batches: u32,
    /// Optional: FB_MEMORY_ flags; huge pages, resident, locked, as far as they can be had.
    pub memory: u32,
}

// SAFETY: words, two of 4 bytes after each other wherever one of 8 follows.
unsafe impl Plain for FbCacheConfig {}
impl Versioned for FbCacheConfig {
    const NAME: &'static str = "fb_cache_config";
    const REQUIRED: usize = std::mem::offset_of!(FbCacheConfig, host_stride);
}

/// What a cache has and does. Gauges describe now, counters only grow.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbStats {
    /// sizeof(fb_stats), set by the caller.
    pub size: usize,
    /// Gauge: sequences that are open, or closed while work that names them is in flight.
    pub sequences: u32,
    /// Gauge: steps between prepare and retire.
    pub steps_in_flight: u32,
    /// Gauge: free pages of the total pool.
    pub free_host_pages: u32,
    /// Gauge: free pages of index keys.
    pub free_index_pages: u32,
    /// Gauge: free slots of the layer that has the fewest.
    pub free_slots: u32,
    /// Gauge: free lanes.
    pub free_lanes: u32,
    /// Counter: steps retired.
    pub steps: u64,
    /// Counter: distinct selected rows that were resident, all layers.
    pub hits: u64,
    /// Counter: rows fetched, all layers.
    pub misses: u64,
    /// Counter: of these, rows in scratch slots.
    pub scratch: u64,
    /// Counter: bytes of rows that misses asked for, host to device.
    pub bytes_up: u64,
}

// SAFETY: words, six of 4 bytes between words of 8.
unsafe impl Plain for FbStats {}
impl Versioned for FbStats {
    const NAME: &'static str = "fb_stats";
    const REQUIRED: usize = size_of::<FbStats>();
}

/// A cache of one model on one device.
#[derive(Debug)]
pub struct FbCache {
    pub(crate) cache: Cache,
    pub(crate) device: std::sync::Arc<dyn Device>,
    pub(crate) stream: Stream,
    /// Places of the steps in flight.
    pub(crate) steps: Box<[Option<Step>]>,
    /// Room for a batch.
    pub(crate) rows: Vec<Row>,
    text: Text,
    /// A call panicked.
    broken: bool,
}

/// Pointers to const handles may be used by several threads at once.
const _: fn() = || {
    fn concurrent<T: Send + Sync>() {}
    concurrent::<FbCache>();
};

fn refuse(place: &'static str, value: u32) -> Error {
    Error::new(Kind::InvalidConfig, "create").at(place).with("value", value)
}

fn or(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}

impl FbCacheConfig {
    fn declare(&self) -> Result<Config> {
        if self.device != FB_DEVICE_HOST {
            return Err(refuse("device", self.device).hint("pass FB_DEVICE_HOST"));
        }
        let flags = FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED;
        if self.memory & !flags != 0 {
            return Err(refuse("memory", self.memory).hint("pass FB_MEMORY_ flags only"));
        }
        let shape = Shape {
            layers: self.layers,
            draft_layers: self.draft_layers,
            runs: self.row_bytes,
            host_stride: self.host_stride,
            device_block_align: self.device_block_align,
            index_key_bytes: self.index_key_bytes,
            page_tokens: self.page_tokens,
            top_k: self.top_k,
        };
        let all = Config::new(shape, self.lanes, self.max_tokens, self.slots);
        Ok(Config {
            host_pages: or(self.host_pages, all.host_pages),
            index_pages: or(self.index_pages, all.index_pages),
            slots: if self.pool_slots == 0 { all.slots } else { Slots::Uniform(self.pool_slots) },
            min_budget: or(self.min_budget, all.min_budget),
            batch: or(self.batch, all.batch),
            query_rows: self.query_rows,
            steps_in_flight: or(self.steps_in_flight, all.steps_in_flight),
            micro_batches: or(self.micro_batches, all.micro_batches),
            memory: Memory {
                huge: self.memory & FB_MEMORY_SMALL_PAGES == 0,
                populate: self.memory & FB_MEMORY_LAZY == 0,
                lock: self.memory & FB_MEMORY_UNLOCKED == 0,
                node: None,
            },
            ..all
        })
    }
}

impl FbCache {
    fn create(config: &FbCacheConfig) -> Result<Box<FbCache>> {
        let config = config.declare()?;
        let device = HostDevice::new(HostOptions::default());
        let stream = device.stream()?;
        let (steps, batch) = (config.steps_in_flight.saturating_mul(config.micro_batches), config.batch);
        // The cache is made first: it refuses numbers that are too large to be meant.
        let cache = Cache::new(config, device.clone())?;
        let steps = (0..steps).map(|_| None).collect();
        let rows = Vec::with_capacity(batch as usize);
        Ok(Box::new(FbCache { cache, device, stream, steps, rows, text: Text::new(), broken: false }))
    }

    fn check(&self) -> Result<()> {
        match self.broken {
            false => Ok(()),
            true => Err(Error::new(Kind::Internal, "call")
                .at("an earlier call broke a rule of the library")
                .hint("destroy the cache")),
        }
    }

    /// Runs a call that may change the cache, and keeps the text of its error.
    fn change(&mut self, call: impl FnOnce(&mut FbCache) -> Result<()>) -> Result<()> {
        let ended = self.check().and_then(|()| wall(|| call(self)));
        if let Err(error) = &ended {
            self.broken |= is_panic(error);
            self.text.set(error);
        }
        ended
    }

    fn check_ended(&mut self) -> Result<()> {
        self.cache.reap(self.stream)?;
        let Stats { sequences, steps_in_flight, .. } = self.cache.stats();
        if sequences == 0 && steps_in_flight == 0 {
            return Ok(());
        }
        Err(Error::new(Kind::Busy, "destroy")
            .at("sequences or steps are left")
            .with("sequences", sequences)
            .with("steps", steps_in_flight)
            .hint("retire every step and close every sequence, then destroy"))
    }
}

/// Enters a cache with a call that may change it.
///
/// # Safety
/// `cache` is null, or a handle that no other thread uses and nothing has destroyed.
pub(crate) unsafe fn change(cache: *mut FbCache, call: impl FnOnce(&mut FbCache) -> Result<()>) -> FbStatus {
    // SAFETY: the same contract.
    status(|| unsafe { cast::exclusive(cache, "cache") }?.change(call))
}

/// Enters a cache with a call that changes nothing, its error's text included.
///
/// # Safety
/// `cache` is null, or a handle that no other thread changes and nothing has destroyed.
pub(crate) unsafe fn read(cache: *const FbCache, call: impl FnOnce(&FbCache) -> Result<()>) -> FbStatus {
    status(|| {
        // SAFETY: the same contract.
        let cache = unsafe { cast::shared(cache, "cache") }?;
        cache.check()?;
        call(cache)
    })
}

/// Makes a cache and takes all its memory. When that fails, the reason is written to `text`, cut to
/// `text_bytes` bytes with its ending zero; `text` may be NULL.
///
/// # Safety
/// `config` states its size truly; `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_cache_create(
    config: *const FbCacheConfig,
    text: *mut c_char,
    text_bytes: usize,
    cache: *mut *mut FbCache,
) -> FbStatus {
    let made = wall(|| {
        // SAFETY: this call's contract.
        let (config, cache) = unsafe { (cast::versioned(config)?, cast::out(cache, "cache")?) };
        cache.set(Box::into_raw(FbCache::create(&config)?));
        Ok(())
    });
    let Err(error) = made else { return FbStatus::FbOk };
    let mut reason = Text::new();
    reason.set(&error);
    // SAFETY: this call's contract.
    unsafe { cast::write_text(text, text_bytes, reason.with_end()) };
    error.kind().into()
}

/// Ends a cache and frees its memory; after a panic the memory is given up instead. FB_BUSY while a
/// sequence is open or a step is not retired: nothing is freed then, and the handle stays good.
///
/// # Safety
/// `cache` was created and not destroyed; no other thread uses it, and nobody afterwards on FB_OK.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_cache_destroy(cache: *mut FbCache) -> FbStatus {
    status(|| {
        // SAFETY: this call's contract.
        let handle = unsafe { cast::exclusive(cache, "cache") }?;
        let ended = handle.change(FbCache::check_ended);
        let broken = handle.broken;
        if !broken {
            ended?;
        }
        // SAFETY: this call's contract: creation gave the pointer away, and it is not used again.
        let owned = unsafe { cast::owned(cache, "cache") }?;
        // What a panic left half-changed cannot be trusted to end: its memory is given up.
        if broken {
            std::mem::forget(owned)
        } else {
            drop(owned)
        }
        Ok(())
    })
}

/// The text of the last error of a call that took this handle without const; empty before the first.
/// It stays as it is until the next such call. Calls that take a const handle answer a status alone.
///
/// # Safety
/// `cache` is a handle that no other thread changes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_cache_error_text(cache: *const FbCache) -> *const c_char {
    // SAFETY: this call's contract.
    match unsafe { cast::shared(cache, "cache") } {
        Ok(cache) => cache.text.with_end().as_ptr().cast(),
        Err(_) => c"the cache is NULL".as_ptr(),
    }
}

/// Reads a cache's counters and gauges.
///
/// # Safety
/// `cache` is a handle that no other thread changes; `stats` states its size truly.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_cache_stats(cache: *const FbCache, stats: *mut FbStats) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        read(cache, |cache| {
            let stats = cast::versioned_out(stats)?;
            let now = cache.cache.stats();
            stats.set(&FbStats {
                size: size_of::<FbStats>(),
                sequences: now.sequences,
                steps_in_flight: now.steps_in_flight,
                free_host_pages: now.free_host_pages,
                free_index_pages: now.free_index_pages,
                free_slots: now.free_slots,
                free_lanes: now.free_lanes,
                steps: now.steps,
                hits: now.hits,
                misses: now.misses,
                scratch: now.scratch,
                bytes_up: now.bytes_up,
            });
            Ok(())
        })
    }
}

/// What the cache had to do without: the fallback number `index`, from 0, as a line of text, cut to
/// `text_bytes` bytes with its ending zero. FB_OUT_OF_RANGE past the last one: none, if `index` is 0.
/// `text` may be NULL.
///
/// # Safety
/// `cache` is a handle that no other thread changes; `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_cache_fallback(
    cache: *const FbCache,
    index: usize,
    text: *mut c_char,
    text_bytes: usize,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        read(cache, |cache| {
            let fallbacks = cache.cache.fallbacks();
            let fallback = fallbacks.get(index).ok_or_else(|| {
                Error::new(Kind::OutOfRange, "fallback")
                    .at("index")
                    .with("value", index as u64)
                    .with("count", fallbacks.len() as u64)
            })?;
            let mut line = Text::new();
            line.set(fallback);
            cast::write_text(text, text_bytes, line.with_end());
            Ok(())
        })
    }
}

/// The slab of a layer, which attention reads: its address and size on the device. Slots stand in blocks
/// of 64, padded as declared; in a block, run 0 of all 64 slots, then run 1 of all 64 slots. With rows in
/// one run and no padding, slot `s` stands at `s * row_bytes[0]`.
///
/// # Safety
/// `cache` is a handle that no other thread changes; `address` and `bytes` have room for the answers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_slab(
    cache: *const FbCache,
    layer: u32,
    address: *mut *mut c_void,
    bytes: *mut u64,
) -> FbStatus {
    // SAFETY: this call's contract, for all three.
    unsafe {
        read(cache, |cache| {
            let (address, bytes) = (cast::out(address, "address")?, cast::out(bytes, "bytes")?);
            let slab = cache.cache.slab(Layer(layer))?;
            address.set(slab.address() as *mut c_void);
            bytes.set(slab.bytes());
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> FbCacheConfig {
        FbCacheConfig {
            size: size_of::<FbCacheConfig>(),
            device: FB_DEVICE_HOST,
            layers: 2,
            draft_layers: 0,
            index_key_bytes: 0,
            row_bytes: [64, 0],
            page_tokens: 64,
            top_k: 4,
            lanes: 1,
            max_tokens: 100,
            slots: 64,
            query_rows: 1,
            host_stride: 0,
            device_block_align: 0,
            host_pages: 0,
            index_pages: 0,
            pool_slots: 0,
            min_budget: 0,
            batch: 0,
            steps_in_flight: 0,
            micro_batches: 0,
            memory: FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED,
        }
    }

    #[test]
    fn what_is_declared_arrives_and_what_is_zero_gets_its_default() {
        let wanted = |config: &FbCacheConfig| config.declare().unwrap();
        let plain = wanted(&small());
        assert_eq!(plain.memory, Memory { huge: false, populate: false, lock: false, node: None });
        assert_eq!((plain.batch, plain.steps_in_flight, plain.micro_batches), (1, 2, 1));
        assert_eq!((plain.slots, plain.min_budget), (Slots::Uniform(64), 64));
        assert_eq!((plain.shape.runs, plain.shape.top_k), ([64, 0], 4));
        let full = FbCacheConfig {
            host_stride: 128,
            device_block_align: 256,
            host_pages: 9,
            index_pages: 8,
            pool_slots: 640,
            min_budget: 32,
            batch: 7,
            steps_in_flight: 3,
            micro_batches: 2,
            memory: 0,
            ..small()
        };
        let full = wanted(&full);
        assert_eq!((full.shape.host_stride, full.shape.device_block_align), (128, 256));
        assert_eq!((full.host_pages, full.index_pages), (9, 8));
        assert_eq!((full.slots, full.min_budget, full.batch), (Slots::Uniform(640), 32, 7));
        assert_eq!((full.steps_in_flight, full.micro_batches), (3, 2));
        assert_eq!(full.memory, Memory::default());
    }

    #[test]
    fn unknown_devices_and_flags_are_refused() {
        let device = FbCacheConfig { device: 1, ..small() }.declare().unwrap_err();
        assert_eq!((device.kind(), device.place()), (Kind::InvalidConfig, "device"));
        let memory = FbCacheConfig { memory: 8, ..small() }.declare().unwrap_err();
        assert_eq!((memory.kind(), memory.place()), (Kind::InvalidConfig, "memory"));
    }

    #[test]
    fn a_cache_in_which_a_call_panicked_answers_nothing_more() {
        let mut cache = FbCache::create(&small()).unwrap();
        let panicked = cache.change(|_| panic!("shown on standard error: this test means to"));
        assert_eq!(panicked.unwrap_err().kind(), Kind::Internal);
        assert!(cache.text.with_end().starts_with(b"call: internal error: a rule"));
        let mut ran = false;
        let after = cache.change(|_| {
            ran = true;
            Ok(())
        });
        assert_eq!((after.unwrap_err().kind(), ran), (Kind::Internal, false));
        // SAFETY: the handle is a live reference.
        assert_eq!(unsafe { read(&raw const *cache, |_| Ok(())) }, FbStatus::FbInternal);
    }
}
