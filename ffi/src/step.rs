//! The calls of a decode step: prepare, its layers, finish, retire.
//!
//! An `fb_step` is a value: the step's number, mixed with its cache's salt. It is looked up among the few steps in
//! flight, so that a stale or invented one, or another cache's, is an error and never another step. [`Steps`] has
//! room for all that there may be: nothing here allocates, also where a call borrows several steps at once.
//!
//! `layer` has the calls of one layer, `overlap` and `capture` those of whole steps.

use std::ffi::c_void;

use forebay::device::descriptor::LayerCount;
use forebay::overlap::Overlap;
use forebay::{Accepted, BatchRow, Cache, Error, Kind, Layers, MicroBatch, Result, Step};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::handle::{change, read};
use crate::status::FbStatus;

/// In fb_batch_row: the accepted rows stand in the step's tensor on the device.
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
    /// Which step of its cache it was, from 1.
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
    const REQUIRED: usize = std::mem::offset_of!(FbRetired, misses) + 8;
}

/// Hits and misses of one layer in one step, all rows of the batch. It never grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FbLayerCount {
    /// Distinct selected rows that were resident.
    pub hits: u32,
    /// Rows fetched.
    pub misses: u32,
    /// Of these, rows in scratch slots.
    pub scratch: u32,
}

// SAFETY: three words of 4 bytes.
unsafe impl Plain for FbLayerCount {}

impl From<&LayerCount> for FbLayerCount {
    fn from(count: &LayerCount) -> Self {
        FbLayerCount { hits: count.hits, misses: count.misses, scratch: count.scratch }
    }
}

/// The steps of a cache between prepare and retire, and room for what their calls need.
#[derive(Debug)]
pub(crate) struct Steps {
    /// In no order.
    pub(crate) open: Vec<Step>,
    rows: Vec<BatchRow>,
    /// Empty between calls, as the next one.
    several: Vec<&'static mut Step>,
    with_layers: Vec<(&'static mut Step, Layers)>,
    pub(crate) orders: Vec<Overlap>,
    /// Of the step retired last.
    counts: Vec<FbLayerCount>,
    lengths: Vec<u32>,
}

impl Steps {
    /// Room for the steps of `cache`.
    pub(crate) fn of(cache: &Cache) -> Steps {
        let config = cache.config();
        // The cache has a block for each of them, so these are not too many.
        let steps = config.steps_in_flight.saturating_mul(config.micro_batches) as usize;
        Steps {
            open: Vec::with_capacity(steps),
            rows: Vec::with_capacity(config.batch as usize),
            several: Vec::with_capacity(config.micro_batches as usize),
            with_layers: Vec::with_capacity(config.micro_batches as usize),
            orders: Vec::with_capacity(cache.geometry().layers() as usize),
            counts: Vec::with_capacity(cache.geometry().layers() as usize),
            lengths: Vec::with_capacity(config.batch as usize),
        }
    }

    /// The place of the step of this number in its cache.
    pub(crate) fn place(&self, number: u64) -> Result<usize> {
        self.open.iter().position(|step| step.number() == number).ok_or_else(closed)
    }

    /// Brings the steps of these numbers to the front, in their order.
    fn bring(&mut self, numbers: impl Iterator<Item = u64>) -> Result<()> {
        for (front, number) in numbers.enumerate() {
            let place = self.place(number)?;
            if place < front {
                return Err(Error::new(Kind::InvalidConfig, "steps").at("a step is named twice"));
            }
            self.open.swap(front, place);
        }
        Ok(())
    }

    /// Calls `what` with the steps of these numbers.
    pub(crate) fn with_several(
        &mut self,
        numbers: impl ExactSizeIterator<Item = u64>,
        what: impl FnOnce(&mut [&mut Step]) -> Result<()>,
    ) -> Result<()> {
        let count = numbers.len();
        self.bring(numbers)?;
        let mut several: Vec<&mut Step> = std::mem::take(&mut self.several);
        several.extend(self.open.iter_mut().take(count));
        let ended = what(&mut several);
        self.several = emptied(several);
        ended
    }

    /// Calls `what` with the steps of these numbers, each with its layers.
    pub(crate) fn with_layers(
        &mut self,
        numbers: impl ExactSizeIterator<Item = u64>,
        mut layers: impl FnMut(&Step) -> Result<Layers>,
        what: impl FnOnce(&mut [(&mut Step, Layers)]) -> Result<()>,
    ) -> Result<()> {
        let count = numbers.len();
        self.bring(numbers)?;
        let mut room: Vec<(&mut Step, Layers)> = std::mem::take(&mut self.with_layers);
        let filled = self.open.iter_mut().take(count).try_for_each(|step| {
            let layers = layers(step)?;
            room.push((step, layers));
            Ok(())
        });
        let ended = filled.and_then(|()| what(&mut room));
        self.with_layers = emptied(room);
        ended
    }

    /// Keeps what the step retired last has done.
    fn remember(&mut self, layers: &[LayerCount], lengths: &[u32]) {
        self.counts.clear();
        self.counts.extend(layers.iter().map(FbLayerCount::from));
        self.lengths.clear();
        self.lengths.extend_from_slice(lengths);
    }
}

/// The room of a list, for one whose values live longer: a collection takes the place of what it consumes.
fn emptied<T, U>(mut list: Vec<T>) -> Vec<U> {
    list.clear();
    list.into_iter().map_while(|_| None).collect()
}

/// The error of a number that names no step.
fn closed() -> Error {
    Error::new(Kind::Closed, "step")
        .at("the step was retired, or never prepared in this cache")
        .hint("prepare a new step")
}

impl FbCache {
    /// The step that a caller's number names.
    pub(crate) fn step(&self, number: FbStep) -> Result<&Step> {
        let number = self.salted(number);
        self.steps.open.iter().find(|step| step.number() == number).ok_or_else(closed)
    }

    /// Layers, draft layers included.
    pub(crate) fn layers(&self) -> usize {
        self.cache.geometry().layers() as usize
    }

    /// Whether so many steps can be meant: one of each micro-batch.
    pub(crate) fn check_count(&self, operation: &'static str, count: u32) -> Result<()> {
        let most = self.cache.config().micro_batches;
        match (1..=most).contains(&count) {
            true => Ok(()),
            false => Err(Error::new(Kind::OutOfRange, operation)
                .at("steps: at most one of each micro-batch")
                .with("count", count)
                .with("most", most)),
        }
    }

    /// Its place.
    pub(crate) fn place(&self, number: FbStep) -> Result<usize> {
        self.steps.place(self.salted(number))
    }

    fn prepare(&mut self, config: &FbStepConfig, rows: &[FbRow], stream: *mut c_void) -> Result<FbStep> {
        let mut own = std::mem::take(&mut self.steps.rows);
        own.clear();
        let named = rows.iter().try_for_each(|row| {
            let accepted = match row.accepted {
                FB_ACCEPTED_ON_DEVICE => Accepted::OnDevice,
                count => Accepted::Rows(count),
            };
            own.push(BatchRow {
                sequence: self.sequence(row.sequence)?,
                accepted,
                query_rows: row.query_rows,
            });
            Ok(())
        });
        let accepted = match config.accepted.is_null() {
            true => Ok(None),
            false => {
                let words = u64::from(self.cache.config().batch);
                // SAFETY: the contract of `fb_prepare`.
                unsafe { cast::buffer(self.device(), config.accepted, words, "accepted") }.map(Some)
            }
        };
        let micro_batch = MicroBatch(config.micro_batch);
        let prepared = named.and(accepted).and_then(|accepted| {
            self.cache.prepare(micro_batch, config.query_rows, &own, accepted, cast::stream(stream))
        });
        self.steps.rows = own;
        let step = prepared?;
        let number = self.salted(step.number());
        self.steps.open.push(step);
        Ok(number)
    }

    /// Retires the step at `place`; whether it has ended, and what it has done. One that has not stays.
    fn retire(&mut self, place: usize, stream: *mut c_void) -> (bool, Result<FbRetired>) {
        let step = self.steps.open.swap_remove(place);
        match self.cache.retire(step, cast::stream(stream)) {
            Ok(done) => {
                self.steps.remember(done.layers(), done.lengths());
                let (hits, misses) = done.total();
                (true, Ok(FbRetired { size: size_of::<FbRetired>(), step: done.step(), hits, misses }))
            }
            Err(unretired) => {
                let ended = unretired.step.is_none();
                if ended {
                    self.steps.remember(&[], &[]);
                }
                self.steps.open.extend(unretired.step);
                (ended, Err(unretired.error))
            }
        }
    }
}

/// Begins a step: enqueues the wait for the work before it, its block, and the commit of what its
/// sequences' previous steps left in their landing slots. FB_BUSY when every step is in flight: retire
/// one; or when another call is inside the cache: see Threads in the head. Nothing is enqueued on an error.
///
/// # Safety
/// `config` states its size truly, its rows and tensor are there, the tensor until the stream has passed this call;
/// `step` has room for the answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_prepare(
    cache: *mut FbCache,
    config: *const FbStepConfig,
    stream: *mut c_void,
    step: *mut FbStep,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract, for both.
        let (config, step) = unsafe { (cast::versioned(config)?, cast::out(step, "step")?) };
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
        // SAFETY: this call's contract.
        let rows = unsafe { cast::slice(config.rows, config.row_count as usize, "rows") }?;
        step.set(cache.prepare(&config, rows, stream)?);
        Ok(())
    })
}

/// Ends the enqueueing of a step: its report, then its event. What fb_overlap, fb_overlap_steps or fb_launch have
/// enqueued is joined there; behind what an engine orders itself, `stream` must be ordered already.
///
/// A step is whole when every query row of its batch rows was resolved, gathered in each pass of attention, and
/// scattered, in every layer, draft layers included; with residency_only, when it was resolved. While a call is
/// missing: FB_INVALID_CONFIG, whose text names the call, its layer, batch row and query row. Nothing is enqueued then,
/// and the step stays open, to be completed or given up by fb_abandon. A gather can be made up for until any
/// layer's next resolve of these batch rows. Behind that, resolve again and gather; where rows were missed that had to
/// be fetched, the step fails all the same, as fb_retire says. FB_INVALID_CONFIG also for a step that is finished.
#[unsafe(no_mangle)]
pub extern "C" fn fb_finish(cache: *mut FbCache, step: FbStep, stream: *mut c_void) -> FbStatus {
    change(cache, |cache| {
        let place = cache.place(step)?;
        cache.cache.finish(&mut cache.steps.open[place], cast::stream(stream))
    })
}

/// Gives an open step up, for an engine that fails between its layers. It is still to be finished and retired, which
/// answers FB_CANCELLED; its sequences are then rolled back or closed.
#[unsafe(no_mangle)]
pub extern "C" fn fb_abandon(cache: *mut FbCache, step: FbStep) -> FbStatus {
    change(cache, |cache| {
        let place = cache.place(step)?;
        cache.cache.abandon(&mut cache.steps.open[place])
    })
}

/// Ends a step whose work has ended, and sets `*step` to 0. FB_BUSY while it runs or is not finished: `*step` stays,
/// to be retired later. Any other error ends it too: FB_DEVICE_FAILED when the device failed, a selection was wrong,
/// or a launched graph held less than was said; FB_CANCELLED for an abandoned step. None of its tokens may be
/// published then, and its sequences are rolled back or closed. `retired` may be NULL. `stream` orders what becomes
/// free behind the step.
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
    change(cache, |cache| {
        // SAFETY: this call's contract, for both.
        let (step, answer) = unsafe {
            let answer = (!retired.is_null()).then(|| cast::versioned_out(retired)).transpose()?;
            (cast::exclusive(step, "step")?, answer)
        };
        let place = cache.place(*step)?;
        let (ended, done) = cache.retire(place, stream);
        if ended {
            *step = 0;
        }
        let done = done?;
        if let Some(answer) = answer {
            answer.set(&done);
        }
        Ok(())
    })
}

/// Hits and misses by layer of the step that was retired last: as many as `room` holds are written to `counts`, and
/// `count` receives how many there are: none where that step failed. `counts` may be NULL with a room of 0.
///
/// # Safety
/// `counts` has room for `room` of them; `count` has room for the answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_retired_counts(
    cache: *const FbCache,
    counts: *mut FbLayerCount,
    room: u32,
    count: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract.
    read(cache, |cache| unsafe {
        cast::write_list(cache.steps.counts.iter().copied(), counts, room, "counts", count, "count")
    })
}

/// The committed length, in tokens, of each batch row's sequence as of the step that was retired last, in the same
/// way.
///
/// # Safety
/// `lengths` has room for `room` numbers; `count` has room for the answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_retired_lengths(
    cache: *const FbCache,
    lengths: *mut u32,
    room: u32,
    count: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract.
    read(cache, |cache| unsafe {
        cast::write_list(cache.steps.lengths.iter().copied(), lengths, room, "lengths", count, "count")
    })
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
