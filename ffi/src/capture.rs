//! Captured steps: all layers of a bucket, recorded once, then launched as one operation.
//!
//! What was captured is a handle of its own, which belongs to the cache that captured it and outlives it harmlessly.
//! Capturing allocates; launching does not. A device without graphs answers FB_INVALID_CONFIG.

use forebay::overlap::Overlap;
use forebay::{Capture, Captured, Error, Kind, Layers, MicroBatch, Result, Step};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::device::Tenant;
use crate::handle::{self, Object, change};
use crate::layer::Imports;
use crate::overlap::{Callback, FbEngine, FbOverlapConfig, declare_orders};
use crate::status::FbStatus;
use crate::step::FbStep;

/// What to capture.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbCaptureConfig {
    /// sizeof(fb_capture_config).
    pub size: usize,
    /// The micro-batches whose steps run in one graph: their streams, the batch rows of the bucket, their buffers.
    pub micro_batches: *const FbOverlapConfig,
    /// FB_OVERLAP_ orders of every layer, draft layers last.
    pub by_layer: *const u32,
    /// How many micro-batches.
    pub count: u32,
    /// Query rows of the steps.
    pub query_rows: u32,
    /// Optional: passes of the draft layers.
    pub draft_passes: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: words and pointers, which are words; four of 4 bytes at the end.
unsafe impl Plain for FbCaptureConfig {}
impl Versioned for FbCaptureConfig {
    const NAME: &'static str = "fb_capture_config";
    const REQUIRED: usize = std::mem::offset_of!(FbCaptureConfig, draft_passes);
}

/// The layers of a bucket, captured.
#[derive(Debug)]
pub struct FbCaptured {
    captured: Captured,
    /// Behind them: they end before their place on the device is given back.
    _tenant: Tenant,
}

impl Object for FbCaptured {
    const KIND: u8 = 11;
    const NAME: &'static str = "fb_captured";
}

/// A bucket as the cache takes it.
struct Declared {
    micro_batches: Vec<(MicroBatch, Layers)>,
    by_layer: Vec<Overlap>,
}

impl FbCaptureConfig {
    /// # Safety
    /// Its lists are there, and the buffers are the device's to use by every launch.
    unsafe fn declare(&self, cache: &FbCache) -> Result<Declared> {
        if self.reserved != 0 {
            return Err(Error::new(Kind::InvalidConfig, "capture").at("reserved"));
        }
        cache.check_count("capture", self.count)?;
        let most = cache.cache.config().query_rows;
        if self.query_rows == 0 || self.query_rows > most {
            return Err(Error::new(Kind::OutOfRange, "capture")
                .at("query_rows")
                .with("value", self.query_rows)
                .with("most", most));
        }
        let imports = Imports::of(&cache.cache, cache.device());
        let mut micro_batches = Vec::with_capacity(self.count as usize);
        // SAFETY: this function's contract.
        let given = unsafe { cast::versioned_list(self.micro_batches, self.count as usize) };
        for layers in given {
            let layers = layers?;
            // SAFETY: this function's contract.
            let declared = unsafe { layers.declare(&imports, layers.batch, self.query_rows) }?;
            micro_batches.push((MicroBatch(layers.micro_batch), declared));
        }
        // SAFETY: this function's contract.
        let orders = unsafe { cast::slice(self.by_layer, cache.layers(), "by_layer") }?;
        let mut by_layer = Vec::with_capacity(orders.len());
        declare_orders(orders, &mut by_layer)?;
        Ok(Declared { micro_batches, by_layer })
    }
}

/// Captures, by `what`.
///
/// # Safety
/// As [`fb_capture`].
unsafe fn capture(
    cache: *mut FbCache,
    config: *const FbCaptureConfig,
    engine: *const FbEngine,
    captured: *mut *mut FbCaptured,
    what: impl FnOnce(&mut forebay::Cache, &Capture<'_>, &mut Callback) -> Result<Captured>,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this function's contract, for all of them.
        let (config, mut engine, captured) =
            unsafe { (cast::versioned(config)?, Callback::of(engine)?, cast::out(captured, "captured")?) };
        // SAFETY: the same.
        let declared = unsafe { config.declare(cache) }?;
        let bucket = Capture {
            micro_batches: &declared.micro_batches,
            query_rows: config.query_rows,
            by_layer: &declared.by_layer,
            draft_passes: config.draft_passes,
        };
        let tenant = cache.tenant.another();
        let made = handle::give(|| {
            let captured = what(&mut cache.cache, &bucket, &mut engine)?;
            Ok(FbCaptured { captured, _tenant: tenant })
        })?;
        captured.set(made);
        Ok(())
    })
}

/// Captures the layers of a bucket into a graph: the engine's work by its callback; resolve, gather and scatter
/// between. Nothing runs. Steps may be in flight meanwhile; none of the bucket's micro-batches may be open. On an
/// error the capture has ended, and nothing is left of it.
///
/// # Safety
/// `config` and `engine` state their sizes truly, and what they name is there, the buffers at every launch; the
/// callback returns, by no other way than its end; `captured` has room for the answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_capture(
    cache: *mut FbCache,
    config: *const FbCaptureConfig,
    engine: *const FbEngine,
    captured: *mut *mut FbCaptured,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe { capture(cache, config, engine, captured, |cache, bucket, engine| cache.capture(bucket, engine)) }
}

/// The same for an engine whose own capture is under way on the compute stream of the first micro-batch: everything
/// is enqueued there. After an error that capture is worth nothing, unless the config was refused. The engine's graph
/// must be gone before the device is.
///
/// # Safety
/// As fb_capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_capture_into(
    cache: *mut FbCache,
    config: *const FbCaptureConfig,
    engine: *const FbEngine,
    captured: *mut *mut FbCaptured,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe {
        capture(cache, config, engine, captured, |cache, bucket, engine| cache.capture_into(bucket, engine))
    }
}

/// Launches or notes what was captured, for steps.
///
/// # Safety
/// `steps` has `count` of them.
unsafe fn with_captured(
    cache: *mut FbCache,
    captured: *const FbCaptured,
    steps: *const FbStep,
    count: u32,
    what: impl FnOnce(&mut forebay::Cache, &Captured, &mut [&mut Step]) -> Result<()>,
) -> FbStatus {
    change(cache, |cache| {
        cache.check_count("launch", count)?;
        // SAFETY: this function's contract.
        let steps = unsafe { cast::slice(steps, count as usize, "steps") }?;
        let salt = cache.salted(0);
        handle::with(captured, |captured| {
            let numbers = steps.iter().map(|step| step ^ salt);
            cache.steps.with_several(numbers, |steps| what(&mut cache.cache, &captured.captured, steps))
        })
    })
}

/// Launches captured layers for the open steps of its micro-batches, in the capture's order of them. fb_finish comes
/// next, on any stream. On an error of the steps or of the capture nothing is enqueued; what the device refuses
/// afterwards abandons the steps.
///
/// # Safety
/// `steps` has `count` of them; the buffers of the capture are the device's to use until the launch has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_launch(
    cache: *mut FbCache,
    captured: *const FbCaptured,
    steps: *const FbStep,
    count: u32,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe {
        with_captured(cache, captured, steps, count, |cache, captured, steps| cache.launch(captured, steps))
    }
}

/// The engine has launched a graph that it captured around fb_capture_into, for these open steps, ordered behind each
/// one's fb_prepare. fb_finish comes next, on a stream that is ordered behind the launch.
///
/// # Safety
/// As fb_launch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_launched(
    cache: *mut FbCache,
    captured: *const FbCaptured,
    steps: *const FbStep,
    count: u32,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe {
        with_captured(cache, captured, steps, count, |cache, captured, steps| cache.launched(captured, steps))
    }
}

/// Gives captured layers up. Launches under way still run. Their device stays until then.
#[unsafe(no_mangle)]
pub extern "C" fn fb_captured_destroy(captured: *mut FbCaptured) -> FbStatus {
    handle::end(captured, |_| Ok(()))
}

#[cfg(test)]
#[cfg(feature = "cuda")]
#[path = "capture_tests.rs"]
mod tests;
