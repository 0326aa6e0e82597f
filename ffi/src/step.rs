//! The calls of a decode step: prepare, layer, scatter, finish, retire.
//!
//! An `fb_step` is a value: the step's number, which its cache gives once. It is looked up among the few
//! steps in flight, so that a stale or invented one is an error and never another step.

use std::ffi::c_void;

use forebay::Streams;
use forebay::device::Stream;
use forebay::{Accepted, Buffers, Error, Kind, Layer, LayerCall, MicroBatch, Result, Row, Sequence, Step};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::handle::change;
use crate::status::FbStatus;

/// In fb_row: the accepted rows stand in the step's tensor on the device.
pub const FB_ACCEPTED_ON_DEVICE: u32 = u32::MAX;

/// A step between prepare and retire: its number in its cache, never given twice; 0 is none.
pub type FbStep = u64;

/// A row of a step's batch. It never grows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbRow {
    /// The sequence.
    pub sequence: u64,
    /// Rows of its previous step that were accepted, or FB_ACCEPTED_ON_DEVICE; 0 before its first step.
    pub accepted: u32,
    /// Its query rows in this step, at most the step's.
    pub query_rows: u32,
}

// SAFETY: words, two of 4 bytes behind one of 8.
unsafe impl Plain for FbRow {}

/// What a step decodes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbStepConfig {
    /// sizeof(fb_step_config).
    pub size: usize,
    /// The rows of the batch; read before the call returns.
    pub rows: *const FbRow,
    /// How many.
    pub row_count: u32,
    /// Query rows of each: the width of the step.
    pub query_rows: u32,
    /// Optional: accepted rows, one uint32_t for each of the cache's `batch` rows, on the device; read in
    /// the stream's order.
    pub accepted: *const u32,
    /// Optional: the micro-batch.
    pub micro_batch: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: words and pointers, which are words; two of 4 bytes wherever one of 8 follows or the end.
unsafe impl Plain for FbStepConfig {}
impl Versioned for FbStepConfig {
    const NAME: &'static str = "fb_step_config";
    const REQUIRED: usize = std::mem::offset_of!(FbStepConfig, accepted);
}

/// What a step has done.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbRetired {
    /// sizeof(fb_retired), set by the caller.
    pub size: usize,
    /// The step's number, from 1.
    pub step: u64,
    /// Distinct selected rows that were resident, all layers.
    pub hits: u64,
    /// Rows fetched, all layers.
    pub misses: u64,
}

// SAFETY: words of 8 bytes.
unsafe impl Plain for FbRetired {}
impl Versioned for FbRetired {
    const NAME: &'static str = "fb_retired";
    const REQUIRED: usize = size_of::<FbRetired>();
}

impl FbCache {
    /// The place of the step that a number names; 0 names none.
    fn place(&self, number: FbStep) -> Result<usize> {
        let wanted = self.salted(number);
        let named = |place: &Option<Step>| place.as_ref().is_some_and(|step| step.number() == wanted);
        self.steps.iter().position(named).ok_or_else(|| {
            Error::new(Kind::Closed, "step")
                .at("the step was retired, or never prepared in this cache")
                .with("step", number)
                .hint("prepare a new step")
        })
    }

    fn open_step(&self, number: FbStep) -> Result<&Step> {
        self.steps[self.place(number)?].as_ref().ok_or_else(emptied)
    }

    /// The words of a selection, and of its slots.
    fn words(&self, step: &Step) -> u64 {
        // Rows and query rows of a prepared step fit the tables' declared extents, and so do their products.
        u64::from(step.rows()) * u64::from(step.query_rows()) * u64::from(self.cache.geometry().shape().top_k)
    }

    fn prepare(&mut self, config: &FbStepConfig, rows: &[FbRow], stream: Stream) -> Result<FbStep> {
        let free = self.steps.iter().position(|place| place.is_none());
        let free = free.ok_or_else(|| Error::new(Kind::Busy, "prepare").at("every step is in flight"))?;
        self.rows.clear();
        let salt = self.salted(0);
        self.rows.extend(rows.iter().map(|row| Row {
            sequence: Sequence::from_bits(row.sequence ^ salt),
            accepted: match row.accepted {
                FB_ACCEPTED_ON_DEVICE => Accepted::OnDevice,
                count => Accepted::Rows(count),
            },
            query_rows: row.query_rows,
        }));
        let accepted = match config.accepted.is_null() {
            true => None,
            false => {
                let words = u64::from(self.cache.config().batch);
                // SAFETY: the contract of `fb_prepare`.
                Some(unsafe { cast::buffer(self.device(), config.accepted, words, "accepted") }?)
            }
        };
        let micro_batch = MicroBatch(config.micro_batch);
        let step = self.cache.prepare(micro_batch, config.query_rows, &self.rows, accepted, stream)?;
        let number = step.number();
        self.steps[free] = Some(step);
        Ok(self.salted(number))
    }

    /// Retires the step at `place`; a step that has not ended stays there.
    fn retire(&mut self, place: usize, stream: Stream) -> Result<FbRetired> {
        let step = self.steps[place].take().ok_or_else(emptied)?;
        match self.cache.retire(step, stream) {
            Ok(done) => {
                let (hits, misses) = done.total();
                Ok(FbRetired { size: size_of::<FbRetired>(), step: done.step(), hits, misses })
            }
            Err(unretired) => {
                self.steps[place] = unretired.step;
                Err(unretired.error)
            }
        }
    }
}

/// A place that was just found to hold a step holds none.
fn emptied() -> Error {
    Error::new(Kind::Internal, "step").at("a place without its step")
}

/// Begins a step: enqueues the wait for the work before it, its block, and the commit of what its
/// sequences' previous steps left in their landing slots. FB_BUSY when every step is in flight: retire
/// one. Nothing is enqueued on an error.
///
/// # Safety
/// `config` states its size truly, its rows and tensor
/// are there, the tensor until the stream has passed this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_prepare(
    cache: *mut FbCache,
    config: *const FbStepConfig,
    stream: *mut c_void,
    step: *mut FbStep,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        change(cache, |cache| {
            let (config, step) = (cast::versioned(config)?, cast::out(step, "step")?);
            if config.reserved != 0 {
                return Err(Error::new(Kind::InvalidConfig, "prepare").at("reserved"));
            }
            let most = cache.cache.config().batch;
            if config.row_count > most {
                return Err(Error::new(Kind::OutOfRange, "prepare")
                    .at("rows of the batch")
                    .with("value", config.row_count)
                    .with("most", most));
            }
            let rows = cast::slice(config.rows, config.row_count as usize, "rows")?;
            step.set(cache.prepare(&config, rows, cast::stream(stream))?);
            Ok(())
        })
    }
}

/// Resolves a layer's selection and gathers what it misses. `selection` holds token positions, -1 for
/// none, `[rows of the step][query rows][top_k]`; `slots`, of the same shape, receives their slots in the
/// layer's slab. A position at or beyond the sequence's length makes fb_retire answer FB_DEVICE_FAILED.
///
/// # Safety
/// Both buffers are the device's to use until the stream has passed this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_layer(
    cache: *mut FbCache,
    step: FbStep,
    layer: u32,
    selection: *const i32,
    slots: *mut i32,
    stream: *mut c_void,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        change(cache, |cache| {
            let step = cache.open_step(step)?;
            let words = cache.words(step);
            let selection = cast::buffer(cache.device(), selection, words, "selection")?;
            let slots = cast::buffer(cache.device(), slots.cast_const(), words, "slots")?;
            let own = cast::stream(stream);
            let streams = Streams { resolve: own, gather: own };
            cache.cache.layer(
                step,
                LayerCall::whole(Layer(layer)),
                streams,
                Buffers { selection, slots, parts: None },
            )
        })
    }
}

/// Stores a layer's new rows in the total pool, once they stand in their landing slots.
///
/// # Safety
/// What the library enqueues on `stream` may be enqueued there now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_scatter(
    cache: *mut FbCache,
    step: FbStep,
    layer: u32,
    stream: *mut c_void,
) -> FbStatus {
    change(cache, |cache| {
        cache.cache.scatter(cache.open_step(step)?, LayerCall::whole(Layer(layer)), cast::stream(stream))
    })
}

/// Ends the enqueueing of a step.
///
/// # Safety
/// `stream` is behind all of the step's work.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_finish(cache: *mut FbCache, step: FbStep, stream: *mut c_void) -> FbStatus {
    change(cache, |cache| {
        let place = cache.place(step)?;
        let step = cache.steps[place].as_mut().ok_or_else(emptied)?;
        cache.cache.finish(step, cast::stream(stream))
    })
}

/// Ends a step whose work has ended, and sets `*step` to 0. FB_BUSY while it runs or is not finished:
/// `*step` stays, to be retired later. FB_DEVICE_FAILED ends it too: none of its tokens may be published,
/// and in this version its sequences can only be closed. `retired` may be NULL.
///
/// # Safety
/// `step` points to a step's number; `retired` states its size truly.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_retire(
    cache: *mut FbCache,
    step: *mut FbStep,
    stream: *mut c_void,
    retired: *mut FbRetired,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        change(cache, |cache| {
            let step = cast::exclusive(step, "step")?;
            let answer = match retired.is_null() {
                true => None,
                false => Some(cast::versioned_out(retired)?),
            };
            let place = cache.place(*step)?;
            let ended = cache.retire(place, cast::stream(stream));
            if cache.steps[place].is_none() {
                *step = 0;
            }
            let ended = ended?;
            if let Some(answer) = answer {
                answer.set(&ended);
            }
            Ok(())
        })
    }
}
