//! The calls of one step of a dense cache: prepare, arrived, finish, abandon, retire.
//!
//! Step numbers are as in `step`, and batch rows are the same struct. Nothing here allocates.

use std::ffi::c_void;

use forebay::{BatchRow, Error, Kind, MicroBatch, Result};

use crate::cast;
use crate::dense::FbDense;
use crate::handle::change;
use crate::in_flight::closed;
use crate::status::FbStatus;
use crate::step::{FbBatchRow, FbStep};

impl FbDense {
    /// The index of the step with the caller's number.
    fn place(&self, number: FbStep) -> Result<usize> {
        let number = self.salted(number);
        self.open.iter().position(|step| step.number() == number).ok_or_else(closed)
    }

    /// # Safety
    /// `accepted` is null, or names a word for each of the cache's batch rows until the stream has passed the call.
    unsafe fn prepare(
        &mut self,
        micro_batch: u32,
        rows: &[FbBatchRow],
        accepted: *const u32,
        stream: *mut c_void,
    ) -> Result<FbStep> {
        self.rows.clear();
        for row in rows {
            let sequence = self.sequence(row.sequence)?;
            self.rows.push(BatchRow { sequence, accepted: row.accepted(), query_rows: row.query_rows });
        }
        let words = u64::from(self.cache.config().batch);
        let tensor = (!accepted.is_null())
            // SAFETY: the same contract.
            .then(|| unsafe { cast::buffer(&*self.tenant.device, accepted, words, "accepted") })
            .transpose()?;
        let step = self.cache.prepare(MicroBatch(micro_batch), &self.rows, tensor, cast::stream(stream))?;
        let number = self.salted(step.number());
        self.open.push(step);
        Ok(number)
    }
}

/// Begins a step of a micro-batch with these batch rows. It enqueues, on `stream`, the wait for earlier work and the
/// begin, which fills the micro-batch's tensors (fb_dense_tensors). The engine's kernels then write the new rows to
/// their slots, and attention reads the pages. A batch row is a decoding sequence with its drafts, or a chunk of a
/// prompt; the query rows of all of them together are at most `step_tokens` of fb_dense_config.
///
/// The call accepts rows, one step late. Of the rows that a sequence's previous step wrote, it commits the first
/// `accepted` of fb_batch_row and forgets the others; of a prompt's chunk all rows are accepted. For rows with
/// FB_ACCEPTED_ON_DEVICE, `accepted` has on the device one uint32_t for each of the cache's `batch` rows, which the
/// device reads in the stream's order. It may be NULL.
///
/// FB_BUSY when every step descriptor is in use or a sequence has `steps_in_flight` steps in flight (retire a step),
/// when the micro-batch's last step is not finished, and while steps behind a failed one are in flight in a model with
/// windows (retire those). FB_INVALID_STATE for a sequence that is parked, whose step failed, or whose first step
/// was in another micro-batch: its first one since it was opened or resumed. FB_INVALID_CONFIG for a sequence that is
/// named twice, and for FB_ACCEPTED_ON_DEVICE without `accepted`. FB_OUT_OF_RANGE for no or too many batch rows, query
/// rows or accepted rows, and for a sequence that would outgrow its admitted tokens. FB_DEVICE_FAILED if the last copy
/// of a sequence failed. FB_CLOSED for a closed sequence. On an error no step begins and no row is accepted.
///
/// # Safety
/// `rows` has `row_count` batch rows. `accepted` is NULL, or valid until the stream has passed this call. `step` has
/// room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_prepare(
    dense: *mut FbDense,
    micro_batch: u32,
    rows: *const FbBatchRow,
    row_count: u32,
    accepted: *const u32,
    stream: *mut c_void,
    step: *mut FbStep,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    change(dense, |dense| unsafe {
        let step = cast::out(step, "step")?;
        let most = dense.cache.config().batch;
        if row_count > most {
            return Err(Error::new(Kind::OutOfRange, "prepare")
                .at("rows of the batch")
                .with("value", row_count)
                .with("most", most));
        }
        let rows = cast::slice(rows, row_count as usize, "rows")?;
        step.set(dense.prepare(micro_batch, rows, accepted, stream)?);
        Ok(())
    })
}

/// Makes `stream` wait until the pages of the step's sequences are on the device in `layer` and all layers before it.
/// Call it before each layer's new rows are written, on the stream that computes the layer: the last page comes back
/// whole, and would overwrite them. It costs nothing while no pages are coming back, and without `bring_layers` of
/// fb_dense_config, where fb_dense_prepare has waited for all layers. A graph that is being captured cannot wait for a
/// copy outside of it: for a captured step call this for the last layer, before the graph is launched. FB_OUT_OF_RANGE
/// for an unknown layer, FB_INVALID_STATE for a finished step.
#[unsafe(no_mangle)]
pub extern "C" fn fb_dense_arrived(
    dense: *mut FbDense,
    step: FbStep,
    layer: u32,
    stream: *mut c_void,
) -> FbStatus {
    change(dense, |dense| {
        let place = dense.place(step)?;
        dense.cache.arrived(&dense.open[place], layer, cast::stream(stream))
    })
}

/// Ends the enqueueing of a step. `stream` must be ordered after everything that the engine has enqueued for the step:
/// pages and tensors may be used for other rows once the stream has passed this call. FB_INVALID_STATE for a finished
/// step and, with `bring_layers` of fb_dense_config, for one that did not call fb_dense_arrived for all layers;
/// FB_CLOSED for one that is not this cache's. If the device refuses the call, call it again.
#[unsafe(no_mangle)]
pub extern "C" fn fb_dense_finish(dense: *mut FbDense, step: FbStep, stream: *mut c_void) -> FbStatus {
    change(dense, |dense| {
        let place = dense.place(step)?;
        dense.cache.finish(&mut dense.open[place], cast::stream(stream))
    })
}

/// Abandons an open step whose work the engine cannot enqueue. The step must still be finished and retired;
/// fb_dense_retire then returns FB_CANCELLED. Truncate its sequences (fb_dense_truncate) or close them afterwards.
/// FB_INVALID_STATE for a finished step.
#[unsafe(no_mangle)]
pub extern "C" fn fb_dense_abandon(dense: *mut FbDense, step: FbStep) -> FbStatus {
    change(dense, |dense| {
        let place = dense.place(step)?;
        dense.cache.abandon(&mut dense.open[place])
    })
}

/// Ends a step whose work has ended, and sets `*step` to 0. `lengths` receives the committed length, in tokens, of each
/// batch row's sequence, as many as `room` allows: after the step's own commit, without its new rows. `count`, which
/// may be NULL, receives the number of batch rows. FB_BUSY means that the step's work is still running, that
/// fb_dense_finish was not called for it, or that an earlier step of one of its sequences is not retired: retire it
/// later. After an error the step has ended if and only if `*step` is
/// 0. FB_DEVICE_FAILED means that the device failed or a step asked for what its sequences do not have; FB_CANCELLED
/// that the step was abandoned. After any error that sets `*step` to 0, discard the step's tokens, and truncate
/// (fb_dense_truncate) or close its sequences. A step that was enqueued after a failed one fails too: retire it as
/// well, then truncate to at most the length that was committed before the first failed step. `stream` is as for
/// fb_dense_close.
///
/// # Safety
/// `step` points to a step's number; `lengths` has `room` places; `count` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_retire(
    dense: *mut FbDense,
    step: *mut FbStep,
    stream: *mut c_void,
    lengths: *mut u32,
    room: u32,
    count: *mut u32,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract, for all of them.
        let (step, places, count) = unsafe {
            let places = cast::room(lengths, room as usize, "lengths")?;
            (cast::exclusive(step, "step")?, places, cast::out_or_none(count, "count")?)
        };
        let place = dense.place(*step)?;
        let ended = dense.open.swap_remove(place);
        match dense.cache.retire(ended, cast::stream(stream)) {
            Ok(done) => {
                *step = 0;
                for (place, length) in places.iter_mut().zip(done.lengths()) {
                    place.write(*length);
                }
                if let Some(count) = count {
                    // A batch has at most 32,767 rows.
                    count.set(done.lengths().len() as u32);
                }
                Ok(())
            }
            Err(unretired) => {
                match unretired.step {
                    Some(left) => dense.open.push(left),
                    None => *step = 0,
                }
                Err(unretired.error)
            }
        }
    })
}
