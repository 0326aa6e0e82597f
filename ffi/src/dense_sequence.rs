//! The calls for one sequence of a dense cache, from open to close.

use std::ffi::c_void;

use forebay::dense::Open;

use crate::cast::{self, Plain, Versioned};
use crate::dense::FbDense;
use crate::handle::{change, read};
use crate::status::FbStatus;
use crate::ticket::{self, FbTicket};

/// The lengths of a sequence of a dense cache.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbDenseSequenceLength {
    /// sizeof(fb_dense_sequence_length), set by the caller.
    pub size: usize,
    /// Committed tokens, as far as the host can see from retired steps.
    pub committed: u32,
    /// Rows that the last retired step wrote after the committed ones and that are neither accepted nor rejected yet.
    pub landed: u32,
    /// Tokens of the sequence's published pages. The next fb_dense_publish starts after them.
    pub published: u32,
    /// 1 if the sequence is arriving (fb_dense_arrive): it has pages, and takes part in no step. Otherwise 0.
    pub arriving: u32,
    /// Prompt rows that every layer has, while the sequence is arriving; otherwise `committed`.
    pub filled: u32,
    /// Always 0.
    pub reserved: u32,
}

// SAFETY: words, six of 4 bytes after one of 8.
unsafe impl Plain for FbDenseSequenceLength {}
impl Versioned for FbDenseSequenceLength {
    const NAME: &'static str = "fb_dense_sequence_length";
    const REQUIRED: usize = std::mem::offset_of!(FbDenseSequenceLength, arriving);
}

/// Admits a sequence of `prompt` tokens that may decode `promised` tokens after them: it takes, in every group, all
/// pages that the sequence's steps will need. Its first steps compute the prompt, in chunks. FB_EXHAUSTED names the
/// sequences, or the pages with their group, and gives `wanted` and `free`; FB_OUT_OF_RANGE for no tokens, and for more
/// than `max_tokens`. On an error the call has taken nothing.
///
/// # Safety
/// `sequence` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_open(
    dense: *mut FbDense,
    prompt: u32,
    promised: u32,
    sequence: *mut u64,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract.
        let sequence = unsafe { cast::out(sequence, "sequence") }?;
        let opened = dense.cache.open(&Open { prompt, promised })?;
        sequence.set(dense.number_of(opened));
        Ok(())
    })
}

/// Admits more tokens to a sequence: its prompt gets `prompt` tokens in all, and after them it may decode `promised`.
/// Neither the prompt nor the sum may become smaller. Steps in flight go on. FB_OUT_OF_RANGE for a smaller number or
/// more than `max_tokens`; FB_EXHAUSTED as in fb_dense_open; FB_INVALID_STATE for a sequence whose step failed. After
/// any of these nothing has changed.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_extend(
    dense: *mut FbDense,
    sequence: u64,
    prompt: u32,
    promised: u32,
) -> FbStatus {
    change(dense, |dense| dense.cache.extend(dense.sequence(sequence)?, prompt, promised))
}

/// Opens a sequence that begins as a copy of `parent`. The parent's committed tokens are its prompt, and after them it
/// may decode `promised` tokens. The two share full pages; the call copies the partial page on `stream`. The child may
/// take part in steps at once: they wait for the copy. `ticket` may be NULL; otherwise it receives the ticket of the
/// copy. FB_BUSY while work of the parent is in flight. FB_INVALID_STATE while the parent is parked, when a step of it
/// failed, or while it has rows that were neither accepted nor rejected: truncate it to the intended length first.
/// FB_DEVICE_FAILED if its last copy failed. Other errors are those of fb_dense_open.
///
/// # Safety
/// `child` has room for the result. `ticket` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_fork(
    dense: *mut FbDense,
    parent: u64,
    promised: u32,
    stream: *mut c_void,
    child: *mut u64,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract, for both.
        let (child, wanted) = unsafe { (cast::out(child, "child")?, ticket::wanted(ticket)?) };
        let parent = dense.sequence(parent)?;
        let (forked, ended) = dense.cache.fork(parent, promised, cast::stream(stream))?;
        child.set(dense.number_of(forked));
        wanted.give(ended, &dense.tenant);
        Ok(())
    })
}

/// Truncates a sequence to `length` tokens. Landed rows below the length are accepted, except those of a failed step;
/// landed rows from it on are rejected. Pages that other sequences share from the length on are replaced, and `stream`
/// copies the rows of the first of them that remain. After the call a sequence whose step failed may take part in steps
/// again. `ticket` may be NULL; otherwise it receives the ticket of the copy. FB_INVALID_STATE for a sequence that is
/// parked. FB_BUSY while work of the sequence is in flight. FB_OUT_OF_RANGE for a length beyond the committed and
/// landed rows, and for one whose sliding window was given back. FB_EXHAUSTED when shared pages cannot be replaced.
/// After any of these nothing has changed. If the device refuses the call half-way, call it again with the same length
/// or a smaller one; only fb_dense_close also accepts the sequence until then.
///
/// # Safety
/// `ticket` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_truncate(
    dense: *mut FbDense,
    sequence: u64,
    length: u32,
    stream: *mut c_void,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract.
        let wanted = unsafe { ticket::wanted(ticket) }?;
        let sequence = dense.sequence(sequence)?;
        let ended = dense.cache.truncate(sequence, length, cast::stream(stream))?;
        wanted.give(ended, &dense.tenant);
        Ok(())
    })
}

/// Parks a sequence: its rows go to the host's tier, and its device pages are free for others when the call returns.
/// `accepted` is how many rows of its last step count, as in fb_dense_prepare; the others are rejected. fb_dense_resume
/// brings it back. Until then it can be extended and closed. `stream` copies the pages that have no copy on the host
/// yet; it is ordered as for fb_dense_close, and should be a stream of copies, not of steps: it waits for all copies to
/// the host that were enqueued before. `ticket` may be NULL; otherwise it receives the ticket of these copies. Nothing
/// needs to wait for it.
///
/// FB_INVALID_STATE for a sequence that is parked, or whose step failed (truncate it first). FB_BUSY while work of the
/// sequence is in flight. FB_DEVICE_FAILED if that work failed. FB_OUT_OF_RANGE for more accepted rows than landed, and
/// for a length whose sliding window was given back: accept all rows of a prompt's chunk. FB_EXHAUSTED names the host
/// pages with their group. After any of these nothing has changed. If the device refuses the call half-way, call it
/// again, on a stream that is ordered as the first: it goes on where it stopped, and until then the sequence may be
/// parked or not.
///
/// # Safety
/// `ticket` is NULL or has room for the result. `stream` is as for fb_dense_close.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_park(
    dense: *mut FbDense,
    sequence: u64,
    accepted: u32,
    stream: *mut c_void,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract.
        let wanted = unsafe { ticket::wanted(ticket) }?;
        let sequence = dense.sequence(sequence)?;
        let ended = dense.cache.park(sequence, accepted, cast::stream(stream))?;
        wanted.give(ended, &dense.tenant);
        Ok(())
    })
}

/// Resumes a parked sequence: takes the device pages that it will need, and brings its rows back on `stream`. Its steps
/// wait for them on the device, as those of fb_dense_open_shared do; it may enter any micro-batch. `ticket` may be
/// NULL; otherwise it receives a ticket that ends when all of its pages are there. FB_INVALID_STATE for a sequence that
/// is not parked. FB_EXHAUSTED names the device pages with their group. After any of these nothing has changed. If the
/// device refuses the call half-way, the sequence stays parked and keeps the device pages that it has taken: resume it
/// again, or close it.
///
/// # Safety
/// `ticket` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_resume(
    dense: *mut FbDense,
    sequence: u64,
    stream: *mut c_void,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract.
        let wanted = unsafe { ticket::wanted(ticket) }?;
        let sequence = dense.sequence(sequence)?;
        let ended = dense.cache.resume(sequence, cast::stream(stream))?;
        wanted.give(ended, &dense.tenant);
        Ok(())
    })
}

/// Reads the lengths of a sequence, in tokens, as far as the host has them.
///
/// # Safety
/// `length` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_length(
    dense: *const FbDense,
    sequence: u64,
    length: *mut FbDenseSequenceLength,
) -> FbStatus {
    read(dense, |dense| {
        // SAFETY: this call's contract.
        let length = unsafe { cast::versioned_out(length) }?;
        let sequence = dense.sequence(sequence)?;
        let now = dense.cache.length(sequence)?;
        length.set(&FbDenseSequenceLength {
            size: size_of::<FbDenseSequenceLength>(),
            committed: now.committed,
            landed: now.landed,
            published: now.published,
            arriving: u32::from(dense.cache.is_arriving(sequence)?),
            filled: now.filled,
            reserved: 0,
        });
        Ok(())
    })
}

/// Copies the device pages of a sequence in a group, in token order, as many as `room` allows: number `b` has the rows
/// of positions from `b * page_tokens` on. Pages before a sliding window are 0, the null page. A parked sequence has
/// none. `*count` receives how many there are. FB_OUT_OF_RANGE for an unknown group.
///
/// # Safety
/// `pages` has `room` places; `count` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_pages(
    dense: *const FbDense,
    sequence: u64,
    group: u32,
    pages: *mut u32,
    room: u32,
    count: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    read(dense, |dense| unsafe {
        let all = dense.cache.pages(dense.sequence(sequence)?, group as usize)?;
        cast::write_list(all.iter().copied(), pages, room, "pages", count, "count")
    })
}

/// Ends a sequence, also to abort a request. Its number is closed at once. Its pages become free when the last step
/// that uses them has been retired and every ticket of the sequence has ended: in this call, in that fb_dense_retire,
/// or in fb_dense_reap. If the device refuses the call, the sequence is closed even so, and fb_dense_reap frees its
/// pages.
///
/// # Safety
/// `stream` is ordered after the work that the engine has enqueued for the sequence outside of steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_close(dense: *mut FbDense, sequence: u64, stream: *mut c_void) -> FbStatus {
    change(dense, |dense| dense.cache.close(dense.sequence(sequence)?, cast::stream(stream)))
}
