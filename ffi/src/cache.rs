//! The cache: what its object holds, and the calls that concern all of it.
//!
//! The object is a [`Cache`], its place on the device, and the places of the steps in flight. All of it is taken
//! at creation: a step allocates nothing on this side either.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use forebay::device::Device;
use forebay::os::{NoFaults, random};
use forebay::{Cache, Config, Error, Kind, Layer, Memory, Result, Sequence, Shape, Slots, Stats};

use crate::cast::{self, Plain, Versioned};
use crate::device::{FbDevice, Tenant};
use crate::handle::{self, Object, read};
use crate::status::{FbStatus, Text};
use crate::step::Steps;

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
    /// 0.
    pub reserved: u32,
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
    /// Behind the cache: it ends before its place on the device is given back.
    pub(crate) tenant: Tenant,
    /// The steps in flight, and room for their calls.
    pub(crate) steps: Steps,
    /// What its numbers of sequences and steps are mixed with, so that those of another cache name nothing here.
    salt: u64,
}

impl Object for FbCache {
    const KIND: u8 = 2;
    const NAME: &'static str = "fb_cache";
}

/// Bits that every salt has: lanes are fewer, and steps too, so that no number is 0, which is none.
const SALT: u64 = 1 << 63 | 1 << 31;

fn refuse(place: &'static str, value: u32) -> Error {
    Error::new(Kind::InvalidConfig, "create").at(place).with("value", value)
}

fn or(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}

impl FbCacheConfig {
    /// The model's fields.
    pub(crate) const fn shape(&self) -> Shape {
        Shape {
            layers: self.layers,
            draft_layers: self.draft_layers,
            runs: self.row_bytes,
            host_stride: self.host_stride,
            device_block_align: self.device_block_align,
            index_key_bytes: self.index_key_bytes,
            page_tokens: self.page_tokens,
            top_k: self.top_k,
        }
    }

    fn declare(&self) -> Result<Config> {
        if self.reserved != 0 {
            return Err(refuse("reserved", self.reserved));
        }
        let flags = FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED;
        if self.memory & !flags != 0 {
            return Err(refuse("memory", self.memory).hint("pass FB_MEMORY_ flags only"));
        }
        let all = Config::new(self.shape(), self.lanes, self.max_tokens, self.slots);
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
    fn create(config: &FbCacheConfig, device: &FbDevice) -> Result<FbCache> {
        let config = config.declare()?;
        let tenant = device.tenant();
        let mut salt = [0; 8];
        random(&mut salt, &NoFaults)?;
        let cache = Cache::new(config, Arc::clone(&tenant.device))?;
        let steps = Steps::of(&cache);
        Ok(FbCache { cache, tenant, steps, salt: u64::from_ne_bytes(salt) | SALT })
    }

    /// The device, for a caller's buffers.
    pub(crate) fn device(&self) -> &dyn Device {
        &*self.tenant.device
    }

    /// The sequence that a caller's number names.
    pub(crate) fn sequence(&self, number: u64) -> Sequence {
        Sequence::from_bits(number ^ self.salt)
    }

    /// The number of a sequence for callers.
    pub(crate) fn number_of(&self, sequence: Sequence) -> u64 {
        sequence.to_bits() ^ self.salt
    }

    /// The number of a step for callers, and back.
    pub(crate) fn salted(&self, step: u64) -> u64 {
        step ^ self.salt
    }

    fn check_ended(&mut self) -> Result<()> {
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

/// Makes a cache on a device and takes all its memory. When that fails, the reason is written to `text`, cut to
/// `text_bytes` bytes with its ending zero; `text` may be NULL.
///
/// # Safety
/// `config` states its size truly; `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_cache_create(
    device: *const FbDevice,
    config: *const FbCacheConfig,
    text: *mut c_char,
    text_bytes: usize,
    cache: *mut *mut FbCache,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        cast::create(text, text_bytes, || {
            let (config, cache) = (cast::versioned(config)?, cast::out(cache, "cache")?);
            let made = handle::with(device, |device| FbCache::create(&config, device))?;
            cache.set(handle::give(made)?);
            Ok(())
        })
    }
}

/// Ends a cache and frees its memory; after a panic the memory is given up instead. FB_BUSY while a
/// sequence is open or a step is not retired: nothing is freed then, and the handle stays good.
///
/// # Safety
/// No operation that was enqueued for it is at work in the caller's buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_cache_destroy(cache: *mut FbCache) -> FbStatus {
    handle::end(cache, FbCache::check_ended)
}

/// Reads a cache's counters and gauges.
///
/// # Safety
/// `stats` states its size truly.
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
/// `text` has `text_bytes` bytes.
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
/// `address` and `bytes` have room for the answers.
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
            reserved: 0,
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
    fn unknown_flags_are_refused() {
        let reserved = FbCacheConfig { reserved: 1, ..small() }.declare().unwrap_err();
        assert_eq!((reserved.kind(), reserved.place()), (Kind::InvalidConfig, "reserved"));
        let memory = FbCacheConfig { memory: 8, ..small() }.declare().unwrap_err();
        assert_eq!((memory.kind(), memory.place()), (Kind::InvalidConfig, "memory"));
    }
}
