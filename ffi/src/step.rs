//! The calls of one decode step: prepare, finish, abandon, retire.
//!
//! An `fb_step` is a number: the step's number in its cache, mixed with the cache's salt. Every call looks it up among
//! the few steps in flight, so a stale number, an invented one or another cache's is an error and never another step.
//! The cache object has room for all of them (`in_flight`), so nothing here allocates.
//!
//! `layer` has the calls of one layer; `overlap` and `capture` have those of whole steps.

use std::ffi::c_void;

use forebay::device::descriptor::LayerCount;
use forebay::{Accepted, BatchRow, Error, Kind, MicroBatch, Result, Step};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::handle::{change, read};
use crate::in_flight::closed;
use crate::status::FbStatus;

/// In fb_batch_row: the number of accepted rows is on the device, in `accepted` of fb_step_config.
pub const FB_ACCEPTED_ON_DEVICE: u32 = u32::MAX;

/// A step between prepare and retire, as its number. A cache never gives a number twice; 0 is no step.
pub type FbStep = u64;

/// One batch row of a step: a sequence and its query rows. This struct never grows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbBatchRow {
    /// The sequence.
    pub sequence: u64,
    /// How many rows of the sequence's previous step were accepted, or FB_ACCEPTED_ON_DEVICE. 0 if there was no step
    /// since the join, the fork or the last fb_truncate; in a dense cache, since the opening, the fork or the last
    /// fb_dense_truncate.
    pub accepted: u32,
    /// The sequence's query rows in this step, at most the step's `query_rows`. In a dense cache more than the cache's
    /// `query_rows` are a chunk of a prompt.
    pub query_rows: u32,
}

// SAFETY: words, two of 4 bytes after one of 8.
unsafe impl Plain for FbBatchRow {}

impl FbBatchRow {
    /// How many rows of the previous step were accepted.
    pub(crate) const fn accepted(&self) -> Accepted {
        match self.accepted {
            FB_ACCEPTED_ON_DEVICE => Accepted::OnDevice,
            count => Accepted::Rows(count),
        }
    }
}

/// What a step decodes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbStepConfig {
    /// sizeof(fb_step_config).
    pub size: usize,
    /// The batch rows. The call reads them before it returns.
    pub rows: *const FbBatchRow,
    /// The number of batch rows.
    pub row_count: u32,
    /// The width of the step: the most query rows of a batch row.
    pub query_rows: u32,
    /// Optional: accepted rows on the device, one uint32_t for each of the cache's `batch` rows. The device reads them
    /// in the stream's order.
    pub accepted: *const u32,
    /// Optional: the micro-batch of the step. Default: 0.
    pub micro_batch: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: words and pointers, which are words; two of 4 bytes wherever one of 8 follows or the end.
unsafe impl Plain for FbStepConfig {}
impl Versioned for FbStepConfig {
    const NAME: &'static str = "fb_step_config";
    const REQUIRED: usize = std::mem::offset_of!(FbStepConfig, accepted);
}

/// What a step did.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbRetired {
    /// sizeof(fb_retired), set by the caller.
    pub size: usize,
    /// The step's count in its cache, from 1. It is not the fb_step that fb_prepare returned.
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

/// Hits and misses of one layer in one step, over all batch rows. This struct never grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FbLayerCount {
    /// Distinct selected rows that were resident.
    pub hits: u32,
    /// Rows fetched.
    pub misses: u32,
    /// Misses whose rows were fetched into scratch slots.
    pub scratch: u32,
}

// SAFETY: three words of 4 bytes.
unsafe impl Plain for FbLayerCount {}

impl From<&LayerCount> for FbLayerCount {
    fn from(count: &LayerCount) -> Self {
        FbLayerCount { hits: count.hits, misses: count.misses, scratch: count.scratch }
    }
}

impl FbCache {
    /// The step that a caller's number names.
    pub(crate) fn step(&self, number: FbStep) -> Result<&Step> {
        let number = self.salted(number);
        self.steps.open.iter().find(|step| step.number() == number).ok_or_else(closed)
    }

    /// The number of layers, draft layers included.
    pub(crate) fn layers(&self) -> usize {
        self.cache.geometry().layers() as usize
    }

    /// Checks the number of steps of a call: one of each micro-batch at most.
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

    /// The index of the step with the caller's number.
    pub(crate) fn place(&self, number: FbStep) -> Result<usize> {
        self.steps.place(self.salted(number))
    }

    fn prepare(&mut self, config: &FbStepConfig, rows: &[FbBatchRow], stream: *mut c_void) -> Result<FbStep> {
        let mut own = std::mem::take(&mut self.steps.rows);
        own.clear();
        let named = rows.iter().try_for_each(|row| {
            own.push(BatchRow {
                sequence: self.sequence(row.sequence)?,
                accepted: row.accepted(),
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

    /// Retires the step at `place`; returns whether it has ended, and what it did. A step that has not ended stays.
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

/// Begins a step. It enqueues, on `stream`, the wait for earlier work, the copy of the step descriptor, and the commit
/// of the accepted rows among those that the sequences' previous steps left in their landing slots. The call returns
/// FB_BUSY when every step descriptor is in use or a sequence has `steps_in_flight` steps in flight (retire a step),
/// when the micro-batch's last step is not finished (fb_finish), or when another call is inside the cache (see Threads
/// at the top). FB_INVALID_STATE for a sequence that is not running yet, whose first step was in another micro-batch (a
/// sequence keeps it), or whose step failed. FB_OUT_OF_RANGE for too many batch rows, query rows or accepted rows, and
/// for a sequence that could then have more tokens than its prompt, its promised tokens and an allowance for rows in
/// flight (the cache's `query_rows` x `steps_in_flight`). FB_INVALID_CONFIG for a sequence that is named twice, and for
/// FB_ACCEPTED_ON_DEVICE without `accepted`. FB_DEVICE_FAILED if a sequence's warm-up failed. On an error no step
/// begins. In a cache with a `share` the call first resizes sequences of its micro-batch, if there is cause; their new
/// budgets hold even if the call then fails. If the device refuses the call half-way, its step descriptor becomes free
/// once the stream has passed what was enqueued.
///
/// # Safety
/// `config` states its real size. Its `rows` are valid for the call, and its `accepted` until the stream has passed
/// this call. `step` has room for the result.
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

/// Ends the enqueueing of a step: it enqueues the report and records the step's event on `stream`. The call orders
/// `stream` after what fb_overlap, fb_overlap_steps or fb_launch enqueued. If the engine orders layers itself, `stream`
/// must already be ordered after that work.
///
/// A step is complete when every query row of its batch rows was resolved, gathered in each attention wave, and
/// scattered, in every layer, draft layers included. With residency_only, resolving is enough. While a call is missing,
/// fb_finish returns FB_INVALID_STATE, and the error text names the call, its layer, batch row and query row. It then
/// enqueues nothing and the step stays open: make the missing call, or abandon the step with fb_abandon. A missing
/// gather may still be enqueued until any layer's next resolve of these batch rows. After that, fb_finish accepts the
/// step only if the layer with the missing gather is resolved and gathered again. If its first resolve had misses,
/// fb_retire returns FB_DEVICE_FAILED even so. FB_INVALID_STATE also for a step that is already finished.
#[unsafe(no_mangle)]
pub extern "C" fn fb_finish(cache: *mut FbCache, step: FbStep, stream: *mut c_void) -> FbStatus {
    change(cache, |cache| {
        let place = cache.place(step)?;
        cache.cache.finish(&mut cache.steps.open[place], cast::stream(stream))
    })
}

/// Abandons an open step, for an engine that fails between layers. The step must still be finished and retired;
/// fb_retire then returns FB_CANCELLED. Truncate its sequences (fb_truncate) or close them afterwards.
/// FB_INVALID_STATE for a finished step.
#[unsafe(no_mangle)]
pub extern "C" fn fb_abandon(cache: *mut FbCache, step: FbStep) -> FbStatus {
    change(cache, |cache| {
        let place = cache.place(step)?;
        cache.cache.abandon(&mut cache.steps.open[place])
    })
}

/// Ends a step whose work has ended, and sets `*step` to 0. FB_BUSY means that the step's work is still running, or
/// that fb_finish was not called for it: the caller retires it later. After an error the step has ended if and only if
/// `*step` is 0. FB_BUSY, FB_CLOSED and FB_INVALID_CONFIG leave the step and `*step` as they were. So does an error
/// with which the driver does not say whether the work has ended: retire the step again later. After FB_INTERNAL from a
/// panic the cache is unusable. FB_DEVICE_FAILED means that the device failed, a selection was invalid, missed rows
/// were not gathered, or a launched graph lacked a call. FB_CANCELLED means that the step was abandoned. After any
/// error that sets `*step` to 0, discard the step's tokens, and truncate (fb_truncate) or close its sequences. If a
/// later step of one of these sequences was already enqueued, it fails too: retire it as well, then truncate to at most
/// the length that was committed before the first failed step. `retired` may be NULL. If the call frees closed
/// sequences, it enqueues the operations that empty their lanes on `stream`.
///
/// # Safety
/// `step` points to a step's number; `retired` is NULL or states its real size.
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

/// Copies the hits and misses of each layer of the step that was retired last, as many as `room` allows, to `counts`.
/// `count` receives how many layers there are; it is 0 if that step failed. `counts` may be NULL with a `room` of 0.
///
/// # Safety
/// `counts` has room for `room` entries; `count` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_retired_counts(
    cache: *const FbCache,
    counts: *mut FbLayerCount,
    room: u32,
    count: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract.
    read(cache, |cache| unsafe {
        let list = cache.steps.counts.iter().map(FbLayerCount::from);
        cast::write_list(list, counts, room, "counts", count, "count")
    })
}

/// Copies the committed length, in tokens, of each batch row's sequence, as the report of the step that was retired
/// last gives it: after the step's own commit, without its new rows. It copies in the same way as fb_retired_counts.
///
/// # Safety
/// `lengths` has room for `room` numbers; `count` has room for the result.
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
