//! The calls for a sequence that arrives: a transfer brings its rows and index keys, layer by layer.

use std::ffi::c_void;

use forebay::{Layer, WarmUp};

use crate::cache::FbCache;
use crate::cast;
use crate::handle::change;
use crate::prefix::{FbTokens, Given};
use crate::sequence::{FbOpenConfig, FbWarmUp};
use crate::status::FbStatus;
use crate::ticket::{self, FbTicket};

/// Opens a sequence whose rows and index keys a transfer brings: it takes the sequence's pages, but neither slots nor a
/// lane. fb_append, fb_append_layer_in_place, fb_place_index_keys and fb_index_keys_in_place count what has come of
/// each layer, and fb_join takes slots and a lane when every layer is whole (FB_INVALID_STATE before that, with the
/// layer). `arriving` of fb_cache_config bounds the sequences that arrive at once: FB_EXHAUSTED. The other errors are
/// those of fb_open, but FB_EXHAUSTED also for slots that the pool does not have. On an error the call has taken
/// nothing.
///
/// # Safety
/// As fb_open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_arrive(
    cache: *mut FbCache,
    config: *const FbOpenConfig,
    sequence: *mut u64,
) -> FbStatus {
    // SAFETY: this call's contract, for all three.
    unsafe {
        change(cache, |cache| {
            let (config, sequence) = (cast::versioned(config)?, cast::out(sequence, "sequence")?);
            let open = FbOpenConfig::declare(&config, cache)?;
            let opened = cache.cache.arrive(&open)?;
            sequence.set(cache.number_of(opened));
            Ok(())
        })
    }
}

/// Opens such a sequence for a prompt whose token ids are known, as fb_open_shared does. `*shared` receives how many
/// leading tokens the cache has: their rows and index keys are there, and the transfer brings what follows. Nothing may
/// write to their pages. Errors are those of fb_arrive and of fb_open_shared.
///
/// # Safety
/// As fb_open_shared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_arrive_shared(
    cache: *mut FbCache,
    config: *const FbOpenConfig,
    prompt: *const FbTokens,
    salt: *const c_void,
    salt_bytes: usize,
    sequence: *mut u64,
    shared: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        change(cache, |cache| {
            let (sequence, shared) = (cast::out(sequence, "sequence")?, cast::out(shared, "shared")?);
            let open = FbOpenConfig::declare(&cast::versioned(config)?, cache)?;
            let (prompt, salt) = (Given::of(prompt)?, cast::slice(salt.cast::<u8>(), salt_bytes, "salt")?);
            let (opened, tokens) = cache.cache.arrive_shared(&open, salt, prompt.tokens())?;
            sequence.set(cache.number_of(opened));
            shared.set(tokens);
            Ok(())
        })
    }
}

/// Copies index keys of a layer to the pages of a sequence that arrives, or that arrived and is parked, on `stream`.
/// `keys` has `bytes` bytes: the keys of the tokens from `first` on, one after the other. Keys in place may be placed
/// again, but not those of tokens that the sequence shares or had when it was parked; `first` may not be beyond those
/// in place. The last page may be given whole. The join waits for the copy. `ticket` may be NULL; otherwise it receives
/// the ticket of the copy.
///
/// Where the engine's pages are not `[page_tokens][index_key_bytes]` inside, such as with all scales behind all keys,
/// pass whole pages, and a `first` that begins one.
///
/// FB_INVALID_STATE for a sequence that did not arrive, or that has joined and is not parked. FB_OUT_OF_RANGE for a
/// layer without index keys of its own (fb_index_keys), bytes that are not whole keys, keys beyond the last page of the
/// prompt, another `first`, and memory of another device or that does not begin at a multiple of 4. FB_DEVICE_FAILED if
/// an earlier copy failed. After any of these nothing has changed. If the device refuses the call half-way, the keys
/// from `first` on count no more: place them again, on any stream. The memory of the refused call stays in use until a
/// later ticket of the sequence has ended.
///
/// # Safety
/// The device may read `bytes` bytes of `keys` until the ticket has ended, and nothing changes them before. `ticket` is
/// NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_place_index_keys(
    cache: *mut FbCache,
    sequence: u64,
    layer: u32,
    first: u32,
    keys: *const c_void,
    bytes: u64,
    stream: *mut c_void,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        change(cache, |cache| {
            let wanted = ticket::wanted(ticket)?;
            let keys = cast::memory(cache.device(), keys, bytes, "keys")?;
            let (sequence, on) = (cache.sequence(sequence)?, cast::stream(stream));
            let ended = cache.cache.place_index_keys(sequence, Layer(layer), first, keys, on)?;
            wanted.give(ended, &cache.tenant);
            Ok(())
        })
    }
}

/// Declares that the index keys of `count` more tokens of a layer are in place in the pages of such a sequence
/// (fb_index_keys, fb_pages): a transfer or a kernel of the engine wrote them there, and the stream of the join is
/// ordered after that. Errors are those of fb_place_index_keys; FB_OUT_OF_RANGE for keys beyond the prompt. An error
/// changes nothing.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_index_keys_in_place(
    cache: *mut FbCache,
    sequence: u64,
    layer: u32,
    count: u32,
) -> FbStatus {
    change(cache, |cache| {
        let sequence = cache.sequence(sequence)?;
        cache.cache.index_keys_in_place(sequence, Layer(layer), count)
    })
}

/// Takes a lane and slots for a sequence before its prompt is complete, and enters the lane on `stream`. Its rows and
/// index keys go on coming, and fb_warm_layer loads each layer that is whole. So rows come to their slots while the
/// transfer brings later layers. Until the sequence runs it has slots that no step uses: call it only if nothing else
/// wants them. `ticket` may be NULL; otherwise it receives the ticket of the enqueued work.
///
/// FB_INVALID_STATE if the sequence has joined, or is parked; FB_EXHAUSTED names lanes or slot blocks; FB_BUSY as in
/// fb_join; FB_DEVICE_FAILED if a copy of its index keys failed. After any of these nothing has changed. If the device
/// refuses the call half-way, the sequence has its lane: try again, or call fb_join when it is complete.
///
/// # Safety
/// `ticket` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_join_early(
    cache: *mut FbCache,
    sequence: u64,
    stream: *mut c_void,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract.
        let wanted = unsafe { ticket::wanted(ticket) }?;
        let sequence = cache.sequence(sequence)?;
        let ended = cache.cache.join_early(sequence, cast::stream(stream))?;
        wanted.give(ended, &cache.tenant);
        Ok(())
    })
}

/// Loads the rows of one layer of a sequence that joined early, once the layer has all rows and all index keys. The
/// first layer of an index group decides which rows the whole group has, as fb_join does: `warm_up`, which may be NULL,
/// has the selections of this group alone, `[steps][top_k]`. The group's other layers come after it, and take no
/// selections. `bytes_a_call` must be 0. After the last layer the sequence is running (fb_length). `ticket` may be
/// NULL; otherwise it receives the ticket of the enqueued work.
///
/// FB_INVALID_STATE for a sequence that did not join early, an incomplete layer, one that was warmed up before, and
/// before the layer that selects for it. FB_OUT_OF_RANGE for an unknown layer, for selections of a layer that another
/// one selects for, and for a bound of bytes. FB_DEVICE_FAILED if work of the sequence failed. After any of these
/// nothing has changed. If the device refuses the call half-way, try again on any stream, with the same warm-up.
///
/// # Safety
/// `warm_up` states its real size. The device may read its selections until the stream has passed this call. `ticket`
/// is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_warm_layer(
    cache: *mut FbCache,
    sequence: u64,
    layer: u32,
    warm_up: *const FbWarmUp,
    stream: *mut c_void,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        change(cache, |cache| {
            let wanted = ticket::wanted(ticket)?;
            let warm_up = match warm_up.is_null() {
                true => WarmUp::default(),
                false => FbWarmUp::declare(&cast::versioned(warm_up)?, cache, 1)?,
            };
            let sequence = cache.sequence(sequence)?;
            let ended = cache.cache.warm_layer(sequence, Layer(layer), warm_up, cast::stream(stream))?;
            wanted.give(ended, &cache.tenant);
            Ok(())
        })
    }
}

/// Ends a sequence to whose pages others may still write, in any state: a write that is under way when a transfer is
/// given up lands later, and may not land in another sequence's rows. It is like fb_close, but the pages behind the
/// leading ones that the sequence shared stay withheld: no sequence gets them until fb_release, which takes the
/// sequence's number. Until then the number names nothing else. No time releases them.
///
/// The errors are FB_CLOSED, FB_OUT_OF_MEMORY, and the device's for a sequence that has not joined. The sequence is as
/// before then.
///
/// # Safety
/// As fb_close.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_abort(cache: *mut FbCache, sequence: u64, stream: *mut c_void) -> FbStatus {
    change(cache, |cache| {
        let ended = cache.sequence(sequence)?;
        cache.aborted.reserve()?;
        let withheld = cache.cache.abort(ended, cast::stream(stream))?;
        cache.aborted.add(sequence, withheld);
        Ok(())
    })
}

/// Releases the pages of an aborted sequence, once no writer reaches them any more: each has said that it is done, or
/// what it could write through is destroyed. They are free at once; if the sequence's own work has not ended, in the
/// fb_cache_reap or fb_retire after its end. `free`, which may be NULL, receives how many pages of rows are free now.
/// FB_CLOSED for a sequence that was not aborted, and for pages that were released before. An error changes nothing.
///
/// # Safety
/// `free` is NULL or has room for the result. No one writes to these pages any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_release(cache: *mut FbCache, sequence: u64, free: *mut u32) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract.
        let free = unsafe { cast::out_or_none(free, "free") }?;
        let FbCache { cache, aborted, .. } = cache;
        let count = aborted.release(sequence, |withheld| cache.release(withheld))?;
        if let Some(free) = free {
            free.set(count);
        }
        Ok(())
    })
}
