//! Captured steps: all layers of a bucket are recorded once and then launched as one operation.
//!
//! Captured layers have their own handle. They belong to the cache that captured them, and outliving it does no harm. A
//! capture allocates; a launch does not. A device without graphs returns FB_UNSUPPORTED.

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
    /// The micro-batches of the graph: for each its streams, its buffers, and the batch rows of the bucket.
    pub micro_batches: *const FbOverlapConfig,
    /// The FB_OVERLAP_ order of every layer, draft layers last.
    pub by_layer: *const u32,
    /// The number of micro-batches.
    pub count: u32,
    /// Query rows of the steps.
    pub query_rows: u32,
    /// Optional: the number of draft passes of each draft layer, at most `query_rows`. Default: 0. With draft layers,
    /// fb_finish needs a draft pass of each draft layer for each query row of the step; those beyond this number are
    /// enqueued by fb_overlap.
    pub draft_passes: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: words and pointers, which are words; four of 4 bytes at the end.
unsafe impl Plain for FbCaptureConfig {}
impl Versioned for FbCaptureConfig {
    const NAME: &'static str = "fb_capture_config";
    const REQUIRED: usize = std::mem::offset_of!(FbCaptureConfig, draft_passes);
}

/// The captured layers of steps, for the batch rows of one bucket.
#[derive(Debug)]
pub struct FbCaptured {
    captured: Captured,
    /// After them: they end before the device counts them out.
    _tenant: Tenant,
}

impl Object for FbCaptured {
    const KIND: u8 = 11;
    const NAME: &'static str = "fb_captured";
}

/// A bucket in the library's types.
struct Declared {
    micro_batches: Vec<(MicroBatch, Layers)>,
    by_layer: Vec<Overlap>,
}

impl FbCaptureConfig {
    /// # Safety
    /// Its arrays are valid, and the buffers are the device's to use by every launch.
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

/// Captures a bucket with `what`.
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

/// Captures a step's layers into a graph, for the batch rows of one bucket. The engine's callback enqueues the engine's
/// work; the call enqueues resolve, gather and scatter between the callback's calls. Nothing runs. Other steps may be
/// in flight, but no step of the captured micro-batches may be open, and the first compute stream must not be in a
/// capture already (FB_BUSY for both). On an error the capture has ended and no graph is left. FB_UNSUPPORTED on a
/// device without graphs. FB_INVALID_STATE if an operation cannot be captured; the error text names the driver's error.
/// FB_OUT_OF_RANGE for a micro-batch that the cache does not have, and for more query rows than its steps may have.
/// FB_INVALID_CONFIG for a micro-batch that is named twice. Other errors for streams, buffers, batch rows, draft passes
/// and orders are those of fb_overlap.
///
/// # Safety
/// `config` and `engine` state their real sizes, and everything they point to is valid; the buffers are valid at every
/// launch. The callback returns normally, without a throw or a longjmp. `captured` has room for the result.
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

/// Does the same as fb_capture, inside a capture that the engine itself has begun on the compute stream of the first
/// micro-batch: everything is enqueued there. FB_INVALID_STATE if that stream is not being captured. After an error the
/// engine's capture is unusable, unless the configuration was refused. The engine must destroy its graph before the
/// device is destroyed.
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

/// Calls `what` with captured layers and steps.
///
/// # Safety
/// `steps` has `count` entries.
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

/// Launches captured layers for open steps of the captured micro-batches. `steps` has the steps in the order of the
/// micro-batches in the capture. Then enqueue the draft passes that were not captured, if there are any (fb_overlap),
/// and call fb_finish, on any stream. If the steps or the capture are refused, nothing is enqueued. FB_OUT_OF_RANGE for
/// layers that another cache captured, and for a step with more batch rows than the bucket; FB_OUT_OF_RANGE if `count`
/// is 0 or more than the cache's micro-batches; FB_INVALID_CONFIG if it is otherwise not the number of captured
/// micro-batches, and for steps of other micro-batches or with another number of query rows; FB_INVALID_STATE for a
/// graph that the engine owns, a finished or abandoned step, a step whose layers were already launched, or a step that
/// was prepared on another stream than the compute stream of the capture. If the device refuses something afterwards,
/// the steps are abandoned.
///
/// # Safety
/// `steps` has `count` entries. The device may use the capture's buffers until the launch has ended.
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

/// Tells the cache that the engine has launched its own graph, captured with fb_capture_into, for these open steps,
/// ordered after the fb_prepare of each. Then enqueue the draft passes that were not captured, if there are any
/// (fb_overlap), and call fb_finish, on a stream that is ordered after the launch. The errors are those of fb_launch,
/// except that the stream on which a step was prepared is not checked, and that FB_INVALID_STATE is for a graph that
/// the cache owns.
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

/// Destroys captured layers. Launches in progress still run. Until this call fb_device_destroy returns FB_BUSY.
#[unsafe(no_mangle)]
pub extern "C" fn fb_captured_destroy(captured: *mut FbCaptured) -> FbStatus {
    handle::end(captured, |_| Ok(()))
}

#[cfg(test)]
#[cfg(feature = "cuda")]
#[path = "capture_tests.rs"]
mod tests;
