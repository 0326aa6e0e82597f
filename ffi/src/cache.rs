//! The cache object, and the calls that concern the whole cache.
//!
//! The object contains a [`Cache`], its registration with the device, and room for the steps in flight. Creation takes
//! all of it: a step allocates nothing on this side either.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use forebay::device::{Device, Slice};
use forebay::os::Fallback;
use forebay::{Cache, Config, Error, Kind, Layer, Result, Sequence, Stats};

use crate::aborted::Aborted;
use crate::cast::{self, Plain, Versioned};
use crate::config::{self, FbCacheConfig};
use crate::device::{FbDevice, Tenant};
use crate::handle::{self, Object, change, read};
use crate::in_flight::Steps;
use crate::salt::Salt;
use crate::status::{FbStatus, Text};

/// Statistics of a cache. A gauge describes the present; a counter only grows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbStats {
    /// sizeof(fb_stats), set by the caller.
    pub size: usize,
    /// Gauge: sequences that are open, and closed ones that are not released yet (fb_cache_reap).
    pub sequences: u32,
    /// Gauge: steps between prepare and retire.
    pub steps_in_flight: u32,
    /// Gauge: free pages of the total pool, not counting `unused_pages`.
    pub free_host_pages: u32,
    /// Gauge: free pages of index keys, not counting `unused_pages`.
    pub free_index_pages: u32,
    /// Gauge: published pages that no sequence uses. Each counts once, and is a page of rows and a page of index keys.
    /// Admission can evict and reuse them.
    pub unused_pages: u32,
    /// Gauge: free slots of the layer that has the fewest; in a cache with a `share`, slots that can still be promised.
    pub free_slots: u32,
    /// Gauge: free lanes.
    pub free_lanes: u32,
    /// Always 0.
    pub reserved: u32,
    /// Counter: steps retired.
    pub steps: u64,
    /// Counter: distinct selected rows that were resident, all layers.
    pub hits: u64,
    /// Counter: rows fetched, all layers.
    pub misses: u64,
    /// Counter: misses whose rows were fetched into scratch slots.
    pub scratch: u64,
    /// Counter: bytes of missed rows, host to device.
    pub bytes_up: u64,
    /// Counter: prompt tokens that were looked up among published pages.
    pub prompt_tokens: u64,
    /// Counter: prompt tokens found in published pages, whose pages the new sequence shares.
    pub shared_tokens: u64,
    /// Counter: pages that were published for other sequences to find.
    pub published_pages: u64,
    /// Counter: published pages that were evicted to make room.
    pub evicted_pages: u64,
    /// Gauge: slots that belong to a sequence, all layers, in whole blocks of 64.
    pub slots_in_use: u64,
    /// Counter: resizes of a sequence's budgets (fb_resize, or by the cache's share).
    pub resizes: u64,
    /// Counter: rows that resizes have moved to other slots, all layers, as far as a retired step has reported them.
    pub moved_rows: u64,
    /// Gauge: parked sequences.
    pub parked: u64,
    /// Gauge: arriving sequences (fb_arrive), of at most `arriving` of fb_cache_config. One that has ended counts until
    /// its work has ended.
    pub arriving: u32,
    /// Gauge: pages of rows, and as many of index keys, that are withheld after an abort (fb_abort).
    pub withheld_pages: u32,
}

// SAFETY: words, two of 4 bytes wherever one of 8 follows or the end.
unsafe impl Plain for FbStats {}
impl Versioned for FbStats {
    const NAME: &'static str = "fb_stats";
    const REQUIRED: usize = std::mem::offset_of!(FbStats, evicted_pages) + 8;
}

/// The configuration of a cache and the sizes that follow from it. It does not change.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbInfo {
    /// sizeof(fb_info), set by the caller.
    pub size: usize,
    /// Layers, draft layers included.
    pub layers: u32,
    /// Layers that draft tokens. They are the last ones, and `layers` counts them too.
    pub draft_layers: u32,
    /// Bytes of a row, both runs together, as fb_append takes it.
    pub row_bytes: u32,
    /// Bytes of the first run.
    pub first_run_bytes: u32,
    /// Bytes from one row to the next in host memory.
    pub host_stride: u32,
    /// Bytes of a slot block, padding included.
    pub block_bytes: u32,
    /// Bytes of one index key; 0 for a model without them.
    pub index_key_bytes: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Positions that one query row selects in one layer.
    pub top_k: u32,
    /// The most sequences that may be open at once.
    pub lanes: u32,
    /// Tokens of the longest sequence: prompt plus promised tokens.
    pub max_tokens: u32,
    /// The most batch rows of a step.
    pub batch: u32,
    /// The most query rows of a sequence in one step.
    pub query_rows: u32,
    /// The most steps of one sequence in flight.
    pub steps_in_flight: u32,
    /// Micro-batches that may each have a step open at the same time.
    pub micro_batches: u32,
    /// The most attention waves of a step: split attention has 1 + this many index lists (`lists` and `counts` of
    /// fb_buffers).
    pub attention_waves: u32,
    /// The fewest slots that a sequence may have in a layer.
    pub min_budget: u32,
    /// Pages of the total pool.
    pub host_pages: u32,
    /// Pages of index keys.
    pub index_pages: u32,
    /// 1 if the cache was configured with residency_only: its rows have no bytes.
    pub residency_only: u32,
    /// Index groups: layers that select, draft layers included. Without groups it is `layers`.
    pub index_groups: u32,
    /// The `group_layers` of the configuration; 0 if it has a `selects_by_layer`.
    pub group_layers: u32,
}

// SAFETY: words, twenty-two of 4 bytes after one of 8.
unsafe impl Plain for FbInfo {}
impl Versioned for FbInfo {
    const NAME: &'static str = "fb_info";
    const REQUIRED: usize = std::mem::offset_of!(FbInfo, residency_only) + 4;
}

/// A cache of one model on one device.
#[derive(Debug)]
pub struct FbCache {
    pub(crate) cache: Cache,
    /// After the cache: the cache ends before the device counts it out.
    pub(crate) tenant: Tenant,
    /// The steps in flight, and room for their calls.
    pub(crate) steps: Steps,
    pub(crate) aborted: Aborted,
    /// Sequence and step numbers are mixed with this salt, so that another cache's numbers name nothing here.
    salt: Salt,
}

impl Object for FbCache {
    const KIND: u8 = 2;
    const NAME: &'static str = "fb_cache";

    fn give_up(&self) {
        self.tenant.leave();
    }
}

impl FbCache {
    fn create(config: Config, device: &FbDevice) -> Result<FbCache> {
        let tenant = device.tenant();
        let salt = Salt::draw()?;
        let cache = Cache::new(config, Arc::clone(&tenant.device))?;
        let steps = Steps::of(&cache);
        Ok(FbCache { cache, tenant, steps, aborted: Aborted::default(), salt })
    }

    /// The device, to import a caller's buffers.
    pub(crate) fn device(&self) -> &dyn Device {
        &*self.tenant.device
    }

    /// The sequence that a caller's number names.
    pub(crate) fn sequence(&self, number: u64) -> Result<Sequence> {
        let sequence = Sequence::from_bits(self.salt.mix(number));
        // The cache's own error would show its own number, not the caller's.
        self.cache.is_running(sequence).map(|_| sequence).map_err(|_| {
            Error::new(Kind::Closed, "cache")
                .at(format!("sequence {number:#x} was closed, or never opened in this cache"))
        })
    }

    /// The number of a sequence for callers.
    pub(crate) fn number_of(&self, sequence: Sequence) -> u64 {
        self.salt.mix(sequence.to_bits())
    }

    /// Turns a step's number into the caller's number, and back.
    pub(crate) const fn salted(&self, step: u64) -> u64 {
        self.salt.mix(step)
    }

    fn check_ended(&mut self) -> Result<()> {
        let Stats { sequences, steps_in_flight, withheld_pages, .. } = self.cache.stats();
        if sequences == 0 && steps_in_flight == 0 && withheld_pages == 0 {
            return Ok(());
        }
        let hint = "retire every step, close every sequence, call fb_cache_reap after their work, release withheld \
                    pages (fb_release), then destroy";
        Err(left(sequences, steps_in_flight, withheld_pages, hint))
    }
}

/// The refusal to destroy a cache in which something is left.
pub(crate) fn left(sequences: u32, steps: u32, withheld: u32, hint: &'static str) -> Error {
    Error::new(Kind::Busy, "destroy")
        .at("sequences, steps or withheld pages are left")
        .with("sequences", sequences)
        .with("steps", steps)
        .with("withheld", withheld)
        .hint(hint)
}

/// Makes a cache on a device and takes all its memory, which belongs to the device until fb_device_destroy. Neither
/// fb_cache_destroy nor a creation that fails half-way frees any of it; to replace a cache, make another device. On
/// failure, `text` receives the reason.
///
/// # Safety
/// `config` states its real size, and its `slots_by_layer` and `selects_by_layer` are NULL or have an entry for each
/// layer; `text` has `text_bytes` bytes.
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
            let config = FbCacheConfig::declare(&config)?;
            let made = handle::give(|| handle::with(device, |device| FbCache::create(config, device)));
            cache.set(made.map_err(config::in_words)?);
            Ok(())
        })
    }
}

/// Ends a cache. Its pools are the device's memory, which fb_device_destroy frees. No other cache can reuse them: a
/// new cache on this device takes as much memory again. After a panic the call leaks the cache, on purpose, because
/// its state may be inconsistent: fb_device_destroy does not free its memory either. The call returns FB_BUSY while a
/// sequence is open, a closed sequence is not released (fb_cache_reap), a step is not retired, or pages are withheld
/// (fb_release); nothing has ended then, and the handle stays valid.
///
/// # Safety
/// No operation that was enqueued for it still uses the caller's buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_cache_destroy(cache: *mut FbCache) -> FbStatus {
    handle::end(cache, FbCache::check_ended)
}

/// Reads a cache's counters and gauges.
///
/// # Safety
/// `stats` states its real size.
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
                unused_pages: now.unused_pages,
                free_slots: now.free_slots,
                free_lanes: now.free_lanes,
                reserved: 0,
                steps: now.steps,
                hits: now.hits,
                misses: now.misses,
                scratch: now.scratch,
                bytes_up: now.bytes_up,
                prompt_tokens: now.prompt_tokens,
                shared_tokens: now.shared_tokens,
                published_pages: now.published_pages,
                evicted_pages: now.evicted_pages,
                slots_in_use: now.slots_in_use,
                resizes: now.resizes,
                moved_rows: now.moved_rows,
                parked: now.parked.into(),
                arriving: now.arriving,
                withheld_pages: now.withheld_pages,
            });
            Ok(())
        })
    }
}

/// Reads a cache's configuration and sizes.
///
/// # Safety
/// `info` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_cache_info(cache: *const FbCache, info: *mut FbInfo) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe {
        read(cache, |cache| {
            let info = cast::versioned_out(info)?;
            let (geometry, config) = (cache.cache.geometry(), cache.cache.config());
            let shape = geometry.shape();
            info.set(&FbInfo {
                size: size_of::<FbInfo>(),
                layers: geometry.layers(),
                draft_layers: shape.draft_layers,
                row_bytes: geometry.row_bytes(),
                first_run_bytes: shape.runs[0],
                host_stride: geometry.host_stride(),
                block_bytes: geometry.block_bytes(),
                index_key_bytes: shape.index_key_bytes,
                page_tokens: geometry.page_tokens(),
                top_k: shape.top_k,
                lanes: config.lanes,
                max_tokens: config.max_tokens,
                batch: config.batch,
                query_rows: config.query_rows,
                steps_in_flight: config.steps_in_flight,
                micro_batches: config.micro_batches,
                attention_waves: cache.cache.attention_waves(),
                min_budget: config.min_budget,
                host_pages: config.host_pages,
                index_pages: config.index_pages,
                residency_only: u32::from(config.residency_only),
                index_groups: cache.cache.geometries().groups().len() as u32,
                group_layers: shape.group_layers,
            });
            Ok(())
        })
    }
}

/// Releases what ended work still holds: pages, step descriptors, and closed sequences whose last work has ended.
/// `waiting`, which may be NULL, receives the number of closed sequences that still wait. On `stream` the call
/// enqueues the operations that empty the lanes of the released sequences; later sequences wait for them by themselves.
///
/// # Safety
/// `waiting` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_cache_reap(
    cache: *mut FbCache,
    stream: *mut c_void,
    waiting: *mut u32,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract.
        let waiting = unsafe { cast::out_or_none(waiting, "waiting") }?;
        let left = cache.cache.reap(cast::stream(stream))?;
        if let Some(waiting) = waiting {
            waiting.set(left);
        }
        Ok(())
    })
}

/// Checks every invariant of the pools, the page tables and the residency tables. It is for tests, between steps. On a
/// GPU it waits for the device. On FB_INTERNAL the error text names the broken invariant.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_cache_validate(cache: *const FbCache) -> FbStatus {
    read(cache, |cache| cache.cache.validate())
}

/// Copies fallback number `index`, from 0, to `text`, as one line. Each fallback is an option that the system refused,
/// such as huge pages. The call returns FB_OUT_OF_RANGE past the last fallback; for `index` 0 this means that there
/// are no fallbacks.
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
    unsafe { read(cache, |cache| write_fallback(cache.cache.fallbacks(), index, text, text_bytes)) }
}

/// Writes a fallback as one line.
///
/// # Safety
/// `text` is null, or names `text_bytes` bytes that nothing else uses during the call.
pub(crate) unsafe fn write_fallback(
    fallbacks: &[Fallback],
    index: usize,
    text: *mut c_char,
    text_bytes: usize,
) -> Result<()> {
    let fallback = fallbacks.get(index).ok_or_else(|| {
        Error::new(Kind::OutOfRange, "fallback")
            .at("index")
            .with("value", index as u64)
            .with("count", fallbacks.len() as u64)
    })?;
    let mut line = Text::new();
    line.set(fallback);
    // SAFETY: the same contract.
    unsafe { cast::write_text(text, text_bytes, line.with_end()) };
    Ok(())
}

/// Returns the address and size of a layer's slab on the device, which attention reads. Both stay the same for the
/// cache's life. The slab is `[slot blocks][block_bytes]`, padded as configured. A slot block holds run 0 of its 64
/// slots, then run 1 of its 64 slots. With rows in one run and no padding, slot `s` is at byte `s * row_bytes[0]`.
///
/// # Safety
/// `address` and `bytes` have room for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_slab(
    cache: *const FbCache,
    layer: u32,
    address: *mut *mut c_void,
    bytes: *mut u64,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe { memory(cache, address, bytes, |cache| cache.cache.slab(Layer(layer))) }
}

/// Returns the rows of a layer in the total pool, `[pages][page tokens][host_stride]`. A prefill on the device or a
/// transfer may write prompt rows there and then call fb_append_in_place. fb_pages returns the pages of a sequence.
/// The pages that fb_open_shared or fb_fork shares must not be written. FB_OUT_OF_RANGE for an unknown layer.
///
/// # Safety
/// `address` and `bytes` have room for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_rows(
    cache: *const FbCache,
    layer: u32,
    address: *mut *mut c_void,
    bytes: *mut u64,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe { memory(cache, address, bytes, |cache| cache.cache.rows(Layer(layer))) }
}

/// Returns the index keys of a layer on the device, `[pages][page tokens][key bytes]`. The engine writes and reads
/// them. fb_pages returns the pages of a sequence. FB_OUT_OF_RANGE for an unknown layer, or a model without index
/// keys.
///
/// # Safety
/// `address` and `bytes` have room for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_index_keys(
    cache: *const FbCache,
    layer: u32,
    address: *mut *mut c_void,
    bytes: *mut u64,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe { memory(cache, address, bytes, |cache| cache.cache.index_keys(Layer(layer))) }
}

/// # Safety
/// `address` and `bytes` have room for the results, or are null.
unsafe fn memory(
    cache: *const FbCache,
    address: *mut *mut c_void,
    bytes: *mut u64,
    find: impl FnOnce(&FbCache) -> Result<Slice>,
) -> FbStatus {
    read(cache, |cache| {
        // SAFETY: this call's contract, for both.
        let (address, bytes) = unsafe { (cast::out(address, "address")?, cast::out(bytes, "bytes")?) };
        let found = find(cache)?;
        address.set(cast::address(&found));
        bytes.set(found.bytes());
        Ok(())
    })
}
