//! Shared prefixes of a dense cache: names of prompts, opening a sequence on published pages, publishing and saving
//! pages.
//!
//! The names of a prompt are an object of their own, because hashing takes longer than finding, and an engine asks more
//! than once for a prompt in its queue.

use std::ffi::c_void;

use forebay::dense::{Found, Names, Open};

use crate::cast::{self, Plain, Versioned};
use crate::dense::FbDense;
use crate::handle::{self, Object, change, read};
use crate::prefix::{FbTokens, Given};
use crate::status::FbStatus;
use crate::ticket::{self, FbTicket};

/// The block hashes of a prompt's full pages, in one dense cache. Other caches find nothing by them.
#[derive(Debug)]
pub struct FbDenseNames(pub(crate) Names);

impl Object for FbDenseNames {
    const KIND: u8 = 9;
    const NAME: &'static str = "fb_dense_names";
}

/// How much of a prompt a dense cache has.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbDenseFound {
    /// sizeof(fb_dense_found), set by the caller.
    pub size: usize,
    /// Leading tokens whose pages are published and in a tier, in whole pages.
    pub tokens: u32,
    /// Tokens of those of these pages that are in the host's tier alone in some group, and have to come back.
    pub host_tokens: u32,
}

// SAFETY: words, two of 4 bytes after one of 8.
unsafe impl Plain for FbDenseFound {}
impl Versioned for FbDenseFound {
    const NAME: &'static str = "fb_dense_found";
    const REQUIRED: usize = std::mem::offset_of!(FbDenseFound, host_tokens) + 4;
}

impl From<Found> for FbDenseFound {
    fn from(found: Found) -> Self {
        FbDenseFound { size: size_of::<FbDenseFound>(), tokens: found.tokens, host_tokens: found.host_tokens }
    }
}

/// Hashes the full pages of a prompt, for fb_dense_find and fb_dense_open_shared. The salt separates equal tokens of
/// different tenants, adapters or weights; it may be empty. FB_OUT_OF_RANGE for more ids than `max_tokens`, and for
/// keys that are neither none nor one for each full page. The names belong to no thread and outlive their cache.
///
/// # Safety
/// `salt` has `salt_bytes` bytes. `prompt` states its real size, and everything it points to is valid. `names` has room
/// for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_names_create(
    dense: *const FbDense,
    salt: *const c_void,
    salt_bytes: usize,
    prompt: *const FbTokens,
    names: *mut *mut FbDenseNames,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    read(dense, |dense| unsafe {
        let (names, prompt) = (cast::out(names, "names")?, Given::of(prompt)?);
        let salt = cast::slice(salt.cast::<u8>(), salt_bytes, "salt")?;
        names.set(handle::give(|| dense.cache.names(salt, prompt.tokens()).map(FbDenseNames))?);
        Ok(())
    })
}

/// Destroys names. Sequences that were opened by them stay.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_names_destroy(names: *mut FbDenseNames) -> FbStatus {
    handle::end(names, |_| Ok(()))
}

/// Returns how much of a prompt fb_dense_open_shared would find now. It changes nothing, not even the order in which
/// pages are evicted.
///
/// # Safety
/// `found` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_find(
    dense: *const FbDense,
    names: *const FbDenseNames,
    found: *mut FbDenseFound,
) -> FbStatus {
    read(dense, |dense| {
        // SAFETY: this call's contract.
        let found = unsafe { cast::versioned_out(found) }?;
        found.set(&handle::with(names, |names| Ok(dense.cache.find(&names.0).into()))?);
        Ok(())
    })
}

/// Opens a sequence like fb_dense_open, for a prompt whose names are known. The sequence shares the leading pages that
/// were published under these names and are still in a tier; those that are on the host alone come back on `stream`.
/// `found` receives how many tokens the sequence has already; its first step continues after them, and steps wait on
/// the device for what comes back. `ticket` may be NULL; otherwise it receives the ticket of these copies. Admission
/// counts only the pages that are not shared. Name the leading ids that may be shared: leave out the last one of the
/// prompt if its row must be computed again for its logits. For all ranks to share the same prefix, pass on each rank
/// the names that the rank with the fewest can find (fb_dense_find).
///
/// Errors are those of fb_dense_open, and FB_OUT_OF_RANGE for names of more tokens than the prompt has. An error takes
/// nothing; if the device refuses the call half-way, fb_dense_reap frees the pages later.
///
/// # Safety
/// `sequence` has room for the result; `found` states its real size; `ticket` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_open_shared(
    dense: *mut FbDense,
    prompt: u32,
    promised: u32,
    names: *const FbDenseNames,
    stream: *mut c_void,
    sequence: *mut u64,
    found: *mut FbDenseFound,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract, for all of them.
        let (sequence, found, wanted) = unsafe {
            let (sequence, found) = (cast::out(sequence, "sequence")?, cast::versioned_out(found)?);
            (sequence, found, ticket::wanted(ticket)?)
        };
        let open = Open { prompt, promised };
        let opened =
            handle::with(names, |names| dense.cache.open_shared(&open, &names.0, cast::stream(stream)))?;
        sequence.set(dense.number_of(opened.sequence));
        found.set(&opened.found.into());
        wanted.give(opened.ticket, &dense.tenant);
        Ok(())
    })
}

/// Starting at token `from`, publishes the full pages whose rows are accepted and whose steps have been retired, so
/// that other sequences can find them by block hash (vLLM: a cached full block). `next` has the sequence's token ids
/// from `from` on, as far as they are known. `*published` receives how many tokens the sequence's published pages have
/// now. Call it again after more steps have been retired, and before fb_dense_close; in a model with sliding windows,
/// after each chunk of a prompt, because pages before the window are gone. FB_INVALID_STATE for a sequence that neither
/// fb_dense_open_shared opened nor fb_dense_fork made from such a sequence, that is parked, or whose step failed.
/// FB_BUSY while a ticket's work for it is in flight; steps in flight do not matter. FB_DEVICE_FAILED if its last copy
/// failed. FB_OUT_OF_RANGE when `from` differs from the `published` that fb_dense_length returns, for more ids than
/// were admitted, and for keys that are neither none nor one for each full page.
///
/// # Safety
/// `next` states its real size, and everything it points to is valid. `published` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_publish(
    dense: *mut FbDense,
    sequence: u64,
    from: u32,
    next: *const FbTokens,
    published: *mut u32,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract, for both.
        let (published, next) = unsafe { (cast::out(published, "published")?, Given::of(next)?) };
        let sequence = dense.sequence(sequence)?;
        published.set(dense.cache.publish(sequence, from, next.tokens())?);
        Ok(())
    })
}

/// Copies published pages that are not yet in the host's tier to it, the oldest first, at most `bytes` bytes in this
/// call: so the caller bounds the bytes a second. `stream` should have a low priority, and be no stream of steps.
/// `*saved` receives the bytes; 0 if nothing is left to copy, `bytes` is less than a page, or there is no such tier.
/// The errors are the device's: the next call that copies or begins a step enqueues the copies that it refused.
///
/// # Safety
/// `saved` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_save(
    dense: *mut FbDense,
    stream: *mut c_void,
    bytes: u64,
    saved: *mut u64,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract.
        let saved = unsafe { cast::out(saved, "saved") }?;
        saved.set(dense.cache.save(cast::stream(stream), bytes)?);
        Ok(())
    })
}
