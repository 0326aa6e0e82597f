//! The cache object of a dense model, and the calls that concern the whole cache.
//!
//! As `cache` does for sparse attention, the object contains the library's cache, its registration with the device, and
//! room for the steps in flight. Creation takes all of it: a step allocates nothing on this side either.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use forebay::dense::{Cache, Config, TierStats};
use forebay::{BatchRow, Error, Kind, MicroBatch, Result, Sequence, Step};

use crate::aborted::Aborted;
use crate::cache::{left, write_fallback};
use crate::cast::{self, Plain, Versioned};
use crate::dense_config::{self, FB_DENSE_GROUPS_MAX, FbDenseConfig};
use crate::device::{FbDevice, Tenant};
use crate::handle::{self, Object, change, read};
use crate::salt::Salt;
use crate::status::FbStatus;

/// In fb_dense_plane: the plane has all layers of the group, or both runs, or the only one.
pub const FB_DENSE_ALL: u32 = u32::MAX;

/// Statistics of a dense cache. A gauge describes the present; a counter only grows. Arrays have a number for each
/// group, 0 for groups that there are not.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbDenseCacheStats {
    /// sizeof(fb_dense_cache_stats), set by the caller.
    pub size: usize,
    /// Gauge: sequences that are open, and closed ones that are not released yet (fb_dense_reap).
    pub sequences: u32,
    /// Gauge: sequences that may still be opened, as far as pages allow.
    pub free_sequences: u32,
    /// Gauge: steps between prepare and retire.
    pub steps_in_flight: u32,
    /// Gauge: parked sequences, which `sequences` counts too.
    pub parked: u32,
    /// Gauge: device pages that a sequence may still take, or, with a sliding window, be promised. Unused published
    /// pages count: admission can evict and reuse them.
    pub free_pages: [u32; FB_DENSE_GROUPS_MAX],
    /// Gauge: published pages on the device.
    pub published: [u32; FB_DENSE_GROUPS_MAX],
    /// Gauge: those of them that no sequence uses.
    pub unused: [u32; FB_DENSE_GROUPS_MAX],
    /// Gauge: published pages in the host's tier, whether or not they are on the device too.
    pub saved: [u32; FB_DENSE_GROUPS_MAX],
    /// Gauge: free pages of the host's tier.
    pub free_host_pages: [u32; FB_DENSE_GROUPS_MAX],
    /// Gauge: pages of the host's tier that parked sequences have for themselves: those of them that are not published.
    pub parked_pages: [u32; FB_DENSE_GROUPS_MAX],
    /// Counter: bytes of pages that were copied to the host's tier.
    pub bytes_down: u64,
    /// Counter: bytes of pages that came back from it.
    pub bytes_up: u64,
    /// Counter: steps retired.
    pub steps: u64,
    /// Gauge: arriving sequences (fb_dense_arrive), which `sequences` counts too.
    pub arriving: u32,
    /// Gauge: pages, of the device and of the host, that are withheld after an abort (fb_dense_abort).
    pub withheld_pages: u32,
}

// SAFETY: words, thirty of 4 bytes between words of 8 and at the end.
unsafe impl Plain for FbDenseCacheStats {}
impl Versioned for FbDenseCacheStats {
    const NAME: &'static str = "fb_dense_cache_stats";
    const REQUIRED: usize = std::mem::offset_of!(FbDenseCacheStats, steps) + 8;
}

/// A plane of a group: device memory with one piece of every page. Page `p` begins at byte `p * page_bytes`. This
/// struct never grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct FbDensePlane {
    /// The device memory.
    pub address: *mut c_void,
    /// Bytes of the device memory: `page_bytes` for each of the group's device pages.
    pub bytes: u64,
    /// Bytes of the piece, and from one page of the plane to the next.
    pub page_bytes: u64,
    /// The layer, or FB_DENSE_ALL: all layers of the group, one after the other.
    pub layer: u32,
    /// The run: 0 for K, 1 for V, or FB_DENSE_ALL: both, or the only one.
    pub run: u32,
}

// SAFETY: a pointer, which is a word, and words, two of 4 bytes at the end.
unsafe impl Plain for FbDensePlane {}

/// Where one run of one layer is. Row `t` of page `p` begins at byte `p * stride + t * row_bytes` of `address`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbDenseLayerView {
    /// sizeof(fb_dense_layer_view), set by the caller.
    pub size: usize,
    /// The run's first row in page 0, on the device.
    pub address: *mut c_void,
    /// Bytes from one page to the next.
    pub stride: u64,
    /// Bytes of a row: a token's K, V or latent.
    pub row_bytes: u64,
    /// Device pages of the group, the null page included.
    pub pages: u32,
    /// The layer's group.
    pub group: u32,
}

// SAFETY: words and a pointer, which is one; two of 4 bytes at the end.
unsafe impl Plain for FbDenseLayerView {}
impl Versioned for FbDenseLayerView {
    const NAME: &'static str = "fb_dense_layer_view";
    const REQUIRED: usize = std::mem::offset_of!(FbDenseLayerView, group) + 4;
}

/// What attention kernels read in the steps of one micro-batch: tensors in device memory, at addresses that never
/// change. Arrays have an address for each group, NULL for groups that there are not.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbDenseStepTensors {
    /// sizeof(fb_dense_step_tensors), set by the caller.
    pub size: usize,
    /// Page tables, int32_t `[batch][blocks]` (vLLM: block_table). Entries beyond a sequence's pages have no meaning.
    pub tables: [*mut c_void; FB_DENSE_GROUPS_MAX],
    /// Where the new rows go, `[step_tokens]` of `integer_bytes`: page * page_tokens + token (vLLM: slot_mapping). -1
    /// beyond the step's rows.
    pub slots: [*mut c_void; FB_DENSE_GROUPS_MAX],
    /// The position of each new row, `[step_tokens]` of `integer_bytes`. 0 beyond the step's rows.
    pub positions: *mut c_void,
    /// Tokens of each batch row's sequence, new rows included, int32_t `[batch]` (vLLM: seq_lens). 0 beyond the step's
    /// batch rows.
    pub lengths: *mut c_void,
    /// Where the new rows of each batch row begin, int32_t `[batch + 1]` (vLLM: query_start_loc).
    pub starts: *mut c_void,
    /// The most batch rows of a step.
    pub batch: u32,
    /// The most query rows of a step.
    pub step_tokens: u32,
    /// Entries of a page table: pages of the longest sequence with its rows in flight.
    pub blocks: u32,
    /// Bytes of a slot and of a position: 8 or 4 (`width` of fb_dense_config).
    pub integer_bytes: u32,
}

// SAFETY: words and pointers, which are words; four of 4 bytes at the end.
unsafe impl Plain for FbDenseStepTensors {}
impl Versioned for FbDenseStepTensors {
    const NAME: &'static str = "fb_dense_step_tensors";
    const REQUIRED: usize = std::mem::offset_of!(FbDenseStepTensors, integer_bytes) + 4;
}

/// A cache of one dense model on one device.
#[derive(Debug)]
pub struct FbDense {
    pub(crate) cache: Cache,
    /// After the cache: the cache ends before the device counts it out.
    pub(crate) tenant: Tenant,
    /// The steps between prepare and retire, in no particular order.
    pub(crate) open: Vec<Step>,
    /// Of the step that is being prepared.
    pub(crate) rows: Vec<BatchRow>,
    pub(crate) aborted: Aborted,
    salt: Salt,
}

impl Object for FbDense {
    const KIND: u8 = 8;
    const NAME: &'static str = "fb_dense";

    fn give_up(&self) {
        self.tenant.leave();
    }
}

impl FbDense {
    fn create(config: Config, device: &FbDevice) -> Result<FbDense> {
        let (tenant, salt) = (device.tenant(), Salt::draw()?);
        let cache = Cache::new(config, Arc::clone(&tenant.device))?;
        let config = cache.config();
        // The cache has a step descriptor for each of them, so these are not too many.
        let steps = config.steps_in_flight.saturating_mul(config.micro_batches) as usize;
        let (open, rows) = (Vec::with_capacity(steps), Vec::with_capacity(config.batch as usize));
        Ok(FbDense { cache, tenant, open, rows, aborted: Aborted::default(), salt })
    }

    /// The sequence that a caller's number names.
    pub(crate) fn sequence(&self, number: u64) -> Result<Sequence> {
        let sequence = Sequence::from_bits(self.salt.mix(number));
        // The cache's own error would show its own number, not the caller's.
        self.cache.length(sequence).map(|_| sequence).map_err(|_| {
            Error::new(Kind::Closed, "dense cache")
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
        let stats = self.cache.stats();
        if stats.sequences == 0 && stats.steps_in_flight == 0 && stats.withheld_pages == 0 {
            return Ok(());
        }
        let hint = "retire every step, close every sequence, call fb_dense_reap after their work, release withheld \
                    pages (fb_dense_release), then destroy";
        Err(left(stats.sequences, stats.steps_in_flight, stats.withheld_pages, hint))
    }

    fn stats(&self) -> FbDenseCacheStats {
        let now = self.cache.stats();
        let tiers = |of: fn(&TierStats) -> u32| now.tiers.each_ref().map(of);
        FbDenseCacheStats {
            size: size_of::<FbDenseCacheStats>(),
            sequences: now.sequences,
            free_sequences: now.free_sequences,
            steps_in_flight: now.steps_in_flight,
            parked: now.parked,
            free_pages: now.free_pages,
            published: tiers(|tier| tier.published),
            unused: tiers(|tier| tier.unused),
            saved: tiers(|tier| tier.saved),
            free_host_pages: tiers(|tier| tier.free_host_pages),
            parked_pages: tiers(|tier| tier.parked),
            bytes_down: now.bytes_down,
            bytes_up: now.bytes_up,
            steps: now.steps,
            arriving: now.arriving,
            withheld_pages: now.withheld_pages,
        }
    }

    fn view(&self, layer: u32, run: u32) -> Result<FbDenseLayerView> {
        let none =
            || Error::new(Kind::OutOfRange, "view").at("layer and run").with("layer", layer).with("run", run);
        let config = self.cache.config();
        let view = config.view(layer, run as usize).ok_or_else(none)?;
        let plane = self.cache.planes(view.group)?.nth(view.plane).ok_or_else(none)?;
        Ok(FbDenseLayerView {
            size: size_of::<FbDenseLayerView>(),
            address: cast::address(&plane.memory).wrapping_byte_add(view.offset as usize),
            stride: view.stride,
            row_bytes: view.row,
            pages: config.device_pages.get(view.group).copied().unwrap_or(0),
            group: view.group as u32,
        })
    }

    /// Where a run of a layer is in the host pages.
    pub(crate) fn host_view(&self, layer: u32, run: u32) -> Result<FbDenseLayerView> {
        let wrong =
            |kind, place| Error::new(kind, "host view").at(place).with("layer", layer).with("run", run);
        let config = self.cache.config();
        let view = config.host_view(layer, run as usize);
        let view = view.ok_or_else(|| wrong(Kind::OutOfRange, "layer and run"))?;
        let memory = self.cache.host_memory(view.group)?;
        let memory = memory.ok_or_else(|| wrong(Kind::InvalidState, "a cache without pages on the host"))?;
        Ok(FbDenseLayerView {
            size: size_of::<FbDenseLayerView>(),
            address: cast::address(&memory).wrapping_byte_add(view.offset as usize),
            stride: view.stride,
            row_bytes: view.row,
            pages: config.host_pages.get(view.group).copied().unwrap_or(0),
            group: view.group as u32,
        })
    }

    fn tensors(&self, micro_batch: u32) -> Result<FbDenseStepTensors> {
        let (found, config) = (self.cache.tensors(MicroBatch(micro_batch))?, self.cache.config());
        let mut tensors = FbDenseStepTensors {
            size: size_of::<FbDenseStepTensors>(),
            tables: [std::ptr::null_mut(); FB_DENSE_GROUPS_MAX],
            slots: [std::ptr::null_mut(); FB_DENSE_GROUPS_MAX],
            positions: cast::address(&found.positions),
            lengths: cast::address(&found.lengths),
            starts: cast::address(&found.starts),
            batch: config.batch,
            step_tokens: config.step_tokens,
            // Checked at creation: an entry is 4 bytes, and their number a u32.
            blocks: found.tables.first().map_or(0, |all| (all.bytes() / 4 / u64::from(config.batch)) as u32),
            integer_bytes: (found.positions.bytes() / u64::from(config.step_tokens)) as u32,
        };
        tensors.tables.iter_mut().zip(&found.tables).for_each(|(to, from)| *to = cast::address(from));
        tensors.slots.iter_mut().zip(&found.slots).for_each(|(to, from)| *to = cast::address(from));
        Ok(tensors)
    }
}

/// Makes a dense cache on a device and takes all its memory, which belongs to the device until fb_device_destroy.
/// Neither fb_dense_destroy nor a creation that fails half-way frees any of it; to replace a cache, make another
/// device. FB_INVALID_CONFIG and FB_OVERFLOW name the field; FB_OUT_OF_MEMORY gives the size. On failure, `text`
/// receives the reason.
///
/// # Safety
/// `config` states its real size, and the layers of its groups are valid; `text` has `text_bytes` bytes; `dense` has
/// room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_create(
    device: *const FbDevice,
    config: *const FbDenseConfig,
    text: *mut c_char,
    text_bytes: usize,
    dense: *mut *mut FbDense,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        cast::create(text, text_bytes, || {
            let (config, dense) = (cast::versioned(config)?, cast::out(dense, "dense")?);
            let config = FbDenseConfig::declare(&config)?;
            let made = handle::give(|| handle::with(device, |device| FbDense::create(config, device)));
            dense.set(made.map_err(dense_config::in_words)?);
            Ok(())
        })
    }
}

/// Ends a dense cache. Its pages are the device's memory, as fb_cache_destroy says. The call returns FB_BUSY while a
/// sequence is open, a closed sequence is not released (fb_dense_reap), a step is not retired, or pages are withheld
/// (fb_dense_release); nothing has ended then, and the handle stays valid.
///
/// # Safety
/// No operation that was enqueued for it still uses the caller's buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_destroy(dense: *mut FbDense) -> FbStatus {
    handle::end(dense, FbDense::check_ended)
}

/// Reads a dense cache's counters and gauges.
///
/// # Safety
/// `stats` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_stats(dense: *const FbDense, stats: *mut FbDenseCacheStats) -> FbStatus {
    read(dense, |dense| {
        // SAFETY: this call's contract.
        unsafe { cast::versioned_out(stats) }?.set(&dense.stats());
        Ok(())
    })
}

/// Copies the planes of a group, as many as `room` allows. They stay the same for the cache's life. `*count` receives
/// how many there are: one for each layer and run with FB_DENSE_LAYER_FIRST and FB_DENSE_RUNS_APART, by layer, then by
/// run; fewer where layers or runs share a plane. fb_dense_view says where a layer's rows are. FB_OUT_OF_RANGE for an
/// unknown group.
///
/// # Safety
/// `planes` has `room` places; `count` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_planes(
    dense: *const FbDense,
    group: u32,
    planes: *mut FbDensePlane,
    room: u32,
    count: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract.
    read(dense, |dense| unsafe {
        let memory = dense.cache.planes(group as usize)?;
        let shapes = dense.cache.config().planes(group as usize);
        let list = memory.zip(&shapes).map(|(plane, shape)| FbDensePlane {
            address: cast::address(&plane.memory),
            bytes: plane.memory.bytes(),
            page_bytes: plane.bytes,
            layer: shape.layer.unwrap_or(FB_DENSE_ALL),
            run: shape.run.map_or(FB_DENSE_ALL, |run| run as u32),
        });
        cast::write_list(list, planes, room, "planes", count, "count")
    })
}

/// Returns where a run of a layer is: run 0 is K or the latent, run 1 is V. The addresses stay the same for the cache's
/// life. FB_OUT_OF_RANGE for an unknown layer, or a run that the layer does not have.
///
/// # Safety
/// `view` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_view(
    dense: *const FbDense,
    layer: u32,
    run: u32,
    view: *mut FbDenseLayerView,
) -> FbStatus {
    read(dense, |dense| {
        // SAFETY: this call's contract.
        let view = unsafe { cast::versioned_out(view) }?;
        view.set(&dense.view(layer, run)?);
        Ok(())
    })
}

/// Returns what attention reads in the steps of a micro-batch. fb_dense_prepare enqueues the work that fills it. The
/// addresses stay the same for the cache's life, so a captured graph can read them. FB_OUT_OF_RANGE for an unknown
/// micro-batch.
///
/// # Safety
/// `tensors` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_tensors(
    dense: *const FbDense,
    micro_batch: u32,
    tensors: *mut FbDenseStepTensors,
) -> FbStatus {
    read(dense, |dense| {
        // SAFETY: this call's contract.
        let tensors = unsafe { cast::versioned_out(tensors) }?;
        tensors.set(&dense.tensors(micro_batch)?);
        Ok(())
    })
}

/// Frees what ended work still holds: closed sequences, and pages that finished copies have read. `waiting`, which may
/// be NULL, receives the number of closed sequences that still wait. `stream` is as for fb_dense_close.
///
/// # Safety
/// `waiting` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_reap(
    dense: *mut FbDense,
    stream: *mut c_void,
    waiting: *mut u32,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract.
        let waiting = unsafe { cast::out_or_none(waiting, "waiting") }?;
        let left = dense.cache.reap(cast::stream(stream))?;
        if let Some(waiting) = waiting {
            waiting.set(left);
        }
        Ok(())
    })
}

/// Checks every invariant of the pages and the page tables. It is for tests, between steps, and does not wait for the
/// device. On FB_INTERNAL the error text names the broken invariant.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_validate(dense: *const FbDense) -> FbStatus {
    read(dense, |dense| dense.cache.validate())
}

/// Copies fallback number `index`, from 0, to `text`, as fb_cache_fallback does.
///
/// # Safety
/// `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_fallback(
    dense: *const FbDense,
    index: usize,
    text: *mut c_char,
    text_bytes: usize,
) -> FbStatus {
    // SAFETY: this call's contract.
    read(dense, |dense| unsafe { write_fallback(dense.cache.fallbacks(), index, text, text_bytes) })
}
