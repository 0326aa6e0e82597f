//! The calls for a sequence of a dense cache that arrives: a transfer brings its rows, layer by layer.

use std::ffi::c_void;

use forebay::dense::{Open, Way};
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain};
use crate::dense::{FbDense, FbDenseLayerView};
use crate::dense_prefix::{FbDenseFound, FbDenseNames};
use crate::handle::{self, change, read};
use crate::status::FbStatus;
use crate::ticket::{self, FbTicket};

/// A transfer writes to the device pages of the sequence.
pub const FB_DENSE_DIRECT: u32 = 0;
/// A transfer writes to pages of the host's tier, and the cache copies each layer up.
pub const FB_DENSE_HOST: u32 = 1;

/// A host page of a sequence that arrives. This struct never grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct FbDenseHostPage {
    /// The page's block of the sequence: it has the rows of positions from `block * page_tokens` on.
    pub block: u32,
    /// The number of the page in the host's tier (fb_dense_host_view).
    pub page: u32,
}

// SAFETY: two words of 4 bytes.
unsafe impl Plain for FbDenseHostPage {}

fn way_of(way: u32) -> Result<Way> {
    match way {
        FB_DENSE_DIRECT => Ok(Way::Direct),
        FB_DENSE_HOST => Ok(Way::Host),
        other => Err(Error::new(Kind::InvalidConfig, "arrive").at("way").with("value", other)),
    }
}

/// Opens a sequence whose rows a transfer brings: it takes the sequence's pages, as fb_dense_open does, and with
/// FB_DENSE_HOST a page of the host's tier for each page that is to be filled. It takes part in steps once it has
/// joined (fb_dense_join). `way` is FB_DENSE_DIRECT or FB_DENSE_HOST.
///
/// `ticket` may be NULL; otherwise it receives a ticket that is done when nothing uses the pages any more: only then
/// may a transfer write to them. `stream` should be the one of copies; work that is enqueued there behind this call may
/// write to the pages without the ticket.
///
/// Errors are those of fb_dense_open; also FB_EXHAUSTED with the group for host pages, FB_INVALID_STATE for
/// FB_DENSE_HOST in a cache without them, and FB_INVALID_CONFIG for another `way`. An error takes nothing; if the
/// device refuses the call half-way, fb_dense_reap frees the pages later.
///
/// # Safety
/// `sequence` has room for the result. `ticket` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_arrive(
    dense: *mut FbDense,
    prompt: u32,
    promised: u32,
    way: u32,
    stream: *mut c_void,
    sequence: *mut u64,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract, for both.
        let (sequence, wanted) = unsafe { (cast::out(sequence, "sequence")?, ticket::wanted(ticket)?) };
        let (open, way) = (Open { prompt, promised }, way_of(way)?);
        let (opened, ended) = dense.cache.arrive(&open, way, cast::stream(stream))?;
        sequence.set(dense.number_of(opened));
        wanted.give(ended, &dense.tenant);
        Ok(())
    })
}

/// Opens such a sequence for a prompt whose names are known, as fb_dense_open_shared does. The leading pages that the
/// cache has (fb_dense_find_arriving) are shared, and come back on `stream` if they are on the host alone. The transfer
/// leaves their tokens out, `tokens` of `found`: they count as rows in place. Errors are those of fb_dense_arrive and
/// of fb_dense_open_shared.
///
/// # Safety
/// As fb_dense_open_shared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_arrive_shared(
    dense: *mut FbDense,
    prompt: u32,
    promised: u32,
    names: *const FbDenseNames,
    way: u32,
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
        let (open, way) = (Open { prompt, promised }, way_of(way)?);
        let on = cast::stream(stream);
        let opened = handle::with(names, |names| dense.cache.arrive_shared(&open, &names.0, way, on))?;
        sequence.set(dense.number_of(opened.sequence));
        found.set(&opened.found.into());
        wanted.give(opened.ticket, &dense.tenant);
        Ok(())
    })
}

/// Returns how much of a prompt of `prompt` tokens fb_dense_arrive_shared would find now. It may be more than
/// fb_dense_find returns: a group with a sliding window needs only the pages that a query behind the prompt reads. It
/// changes nothing.
///
/// # Safety
/// `found` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_find_arriving(
    dense: *const FbDense,
    names: *const FbDenseNames,
    prompt: u32,
    found: *mut FbDenseFound,
) -> FbStatus {
    read(dense, |dense| {
        // SAFETY: this call's contract.
        let found = unsafe { cast::versioned_out(found) }?;
        found.set(&handle::with(names, |names| Ok(dense.cache.find_arriving(&names.0, prompt).into()))?);
        Ok(())
    })
}

/// Returns where a run of a layer is in the group's host pages, as fb_dense_view does for device pages: `pages` are
/// those of the host's tier. FB_INVALID_STATE for a cache without pages on the host; FB_OUT_OF_RANGE for an unknown
/// layer, or a run that the layer does not have.
///
/// # Safety
/// `view` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_host_view(
    dense: *const FbDense,
    layer: u32,
    run: u32,
    view: *mut FbDenseLayerView,
) -> FbStatus {
    read(dense, |dense| {
        // SAFETY: this call's contract.
        let view = unsafe { cast::versioned_out(view) }?;
        view.set(&dense.host_view(layer, run)?);
        Ok(())
    })
}

/// Copies the host pages of a sequence that arrives through them, in the order of their blocks, as many as `room`
/// allows. `*count` receives how many there are: none with FB_DENSE_DIRECT. A transfer that writes to them by itself
/// waits for the ticket of the arrival first. FB_OUT_OF_RANGE for an unknown group.
///
/// # Safety
/// `pages` has `room` places; `count` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_host_pages(
    dense: *const FbDense,
    sequence: u64,
    group: u32,
    pages: *mut FbDenseHostPage,
    room: u32,
    count: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    read(dense, |dense| unsafe {
        let all = dense.cache.host_pages(dense.sequence(sequence)?, group as usize)?;
        let all = all.map(|(block, page)| FbDenseHostPage { block, page });
        cast::write_list(all, pages, room, "pages", count, "count")
    })
}

/// Copies `count` bytes of a sequence that arrives through the host to a host page: to byte `offset` of what block
/// `block` has of run `run` of a layer. What comes before a sliding window is dropped. fb_dense_append_layer_in_place
/// says when rows are whole.
///
/// FB_INVALID_STATE for a sequence that does not arrive through the host, and for a layer that has all rows; FB_BUSY
/// before the ticket of the arrival is done, and FB_DEVICE_FAILED if that failed; FB_OUT_OF_RANGE for an unknown layer
/// or run, a block that is shared or behind the prompt, and bytes beyond the block. An error writes nothing.
///
/// # Safety
/// `bytes` has `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_store(
    dense: *mut FbDense,
    sequence: u64,
    layer: u32,
    run: u32,
    block: u32,
    offset: u64,
    bytes: *const c_void,
    count: u64,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract.
        let bytes = unsafe { cast::slice(bytes.cast::<u8>(), count as usize, "bytes") }?;
        let sequence = dense.sequence(sequence)?;
        dense.cache.store(sequence, (layer, run as usize), block, offset, bytes)
    })
}

/// Declares that `count` more rows of a layer are in place, in the order of their tokens: in the device pages of a
/// sequence that arrives (fb_dense_pages), or with FB_DENSE_HOST in its host pages. Rows before a sliding window count
/// too. Work on streams that writes such rows need not have ended, but the stream of the join is ordered after it.
///
/// FB_INVALID_STATE for a sequence that is not arriving; FB_OUT_OF_RANGE for an unknown layer and for rows beyond the
/// prompt; through the host FB_BUSY before the ticket of the arrival is done, and FB_DEVICE_FAILED if that failed. An
/// error changes nothing.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_append_layer_in_place(
    dense: *mut FbDense,
    sequence: u64,
    layer: u32,
    count: u32,
) -> FbStatus {
    change(dense, |dense| dense.cache.append_layer_in_place(dense.sequence(sequence)?, layer, count))
}

/// Brings a layer that has all rows up, from the host pages of a sequence that arrives through them. `stream` should be
/// the one of copies. Layers may go up in any order, and fb_dense_join brings those that are left. FB_INVALID_STATE for
/// a sequence that does not arrive through the host, a layer without all rows, and one that was brought before;
/// FB_OUT_OF_RANGE for an unknown layer; FB_DEVICE_FAILED if an earlier copy failed. After any of these nothing has
/// changed. If the device refuses the call half-way, call it again, on any stream.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_bring_layer(
    dense: *mut FbDense,
    sequence: u64,
    layer: u32,
    stream: *mut c_void,
) -> FbStatus {
    change(dense, |dense| dense.cache.bring_layer(dense.sequence(sequence)?, layer, cast::stream(stream)))
}

/// Ends the arrival of a sequence whose layers have all rows: it may take part in steps from now on, in any
/// micro-batch. With FB_DENSE_DIRECT `stream` is ordered after the work on streams that wrote its rows. With
/// FB_DENSE_HOST it copies up the layers that fb_dense_bring_layer did not, and the host pages go back. The first step
/// waits for the copies on the device, layer by layer if `bring_layers` of fb_dense_config says so. `ticket` may be
/// NULL; otherwise it receives a ticket that ends when all rows are there.
///
/// No one may write to the pages of the arrival any more: while a writer still may, do not join, but fb_dense_abort.
///
/// FB_INVALID_STATE for a sequence that is not arriving, and while a layer lacks rows, with the layer; FB_DEVICE_FAILED
/// if the work of the arrival failed. After any of these nothing has changed. If the device refuses the call half-way,
/// the sequence still arrives: call it again, on any stream.
///
/// # Safety
/// `ticket` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_join(
    dense: *mut FbDense,
    sequence: u64,
    stream: *mut c_void,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract.
        let wanted = unsafe { ticket::wanted(ticket) }?;
        let sequence = dense.sequence(sequence)?;
        let ended = dense.cache.join(sequence, cast::stream(stream))?;
        wanted.give(ended, &dense.tenant);
        Ok(())
    })
}

/// Ends a sequence that arrives, to whose pages others may still write: a write that is under way when a transfer is
/// given up lands later, and may not land in another sequence's rows. It is like fb_dense_close, but the pages that the
/// transfer writes to stay withheld: no sequence gets them until fb_dense_release, which takes the sequence's number.
/// Until then the number names nothing else. No time releases them.
///
/// FB_INVALID_STATE for a sequence that is not arriving: close it. Other errors are FB_CLOSED, FB_OUT_OF_MEMORY and the
/// device's. The sequence is arriving still then.
///
/// # Safety
/// As fb_dense_close.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_abort(dense: *mut FbDense, sequence: u64, stream: *mut c_void) -> FbStatus {
    change(dense, |dense| {
        let ended = dense.sequence(sequence)?;
        dense.aborted.reserve()?;
        let withheld = dense.cache.abort(ended, cast::stream(stream))?;
        dense.aborted.add(sequence, withheld);
        Ok(())
    })
}

/// Releases the pages of an aborted sequence, once no writer reaches them any more. They are free at once; if the
/// sequence's own work has not ended, in the fb_dense_reap after its end. `free`, which may be NULL, receives how many
/// pages are free now, of the device and of the host. FB_CLOSED for a sequence that was not aborted, and for pages that
/// were released before. An error changes nothing.
///
/// # Safety
/// `free` is NULL or has room for the result. No one writes to these pages any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_release(dense: *mut FbDense, sequence: u64, free: *mut u32) -> FbStatus {
    change(dense, |dense| {
        // SAFETY: this call's contract.
        let free = unsafe { cast::out_or_none(free, "free") }?;
        let FbDense { cache, aborted, .. } = dense;
        let count = aborted.release(sequence, |withheld| cache.release(withheld))?;
        if let Some(free) = free {
            free.set(count);
        }
        Ok(())
    })
}
