//! Steps over shared weights: pulls that run while other layers compute.
//!
//! An engine calls begin, then enter and leave around the work of each layer that reads its window, then end. The calls
//! enqueue and wait for nothing.

use std::ffi::c_void;

use forebay::{Error, Kind, Result};

use crate::cast;
use crate::handle::change;
use crate::status::FbStatus;
use crate::weights::FbWeights;

/// Launches a graph that contains a captured step, on `stream`. It returns 0 for success; any other value, normally an
/// fb_status, becomes the result of fb_weights_launch. Calls on the weights, even const ones, return FB_BUSY inside it.
pub type FbLaunchGraph = Option<unsafe extern "C" fn(data: *mut c_void, stream: *mut c_void) -> u32>;

/// Begins a step of so many micro-batches and draft passes, and enqueues the pulls of the first layers that are
/// missing. Call it before the first layer, and before a capture begins. FB_BUSY while a step is open. FB_INVALID_STATE
/// before the parts were shared. FB_OUT_OF_RANGE for no micro-batch, or more than the configuration has. FB_PEER_LOST
/// for a layer that is pulled from a rank that was lost, with both. The error of a layer whose memory could not be
/// mapped, also of one that this step does not pull.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_begin(
    weights: *mut FbWeights,
    micro_batches: u32,
    draft_passes: u32,
) -> FbStatus {
    change(weights, |weights| weights.serving()?.begin(micro_batches as usize, draft_passes as usize))
}

/// A micro-batch's use of a layer begins: the work that is enqueued on `stream` from here on finds the layer whole. A
/// micro-batch has one compute stream. Sharded layers are entered in their order, each once, then the draft layers in
/// each draft pass; with several micro-batches, each layer by all of them in turn. Nothing happens for a layer that is
/// not sharded. FB_INVALID_STATE for a layer out of order, without a step, or on another stream. FB_OUT_OF_RANGE for a
/// layer or micro-batch that there is not. After an error call fb_weights_abandon.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_enter(
    weights: *mut FbWeights,
    layer: u32,
    micro_batch: u32,
    stream: *mut c_void,
) -> FbStatus {
    change(weights, |weights| {
        weights.serving()?.enter(layer as usize, micro_batch as usize, cast::stream(stream))
    })
}

/// A micro-batch's use of a layer ends with the work that is enqueued on `stream` now: behind the output projection,
/// not behind the experts. When the last micro-batch has left the layer, the pull of the buffer's next layer begins.
/// FB_INVALID_STATE for a layer that was not entered. FB_PEER_LOST with the next layer and the rank. After an error
/// call fb_weights_abandon.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_leave(
    weights: *mut FbWeights,
    layer: u32,
    micro_batch: u32,
    stream: *mut c_void,
) -> FbStatus {
    change(weights, |weights| {
        weights.serving()?.leave(layer as usize, micro_batch as usize, cast::stream(stream))
    })
}

/// Enqueues a further part of each pull that is cut into parts (`parts` of fb_weights_config), behind the work that
/// `stream` has now. For an engine whose collectives need the link: call it behind a collective.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_advance(weights: *mut FbWeights, stream: *mut c_void) -> FbStatus {
    change(weights, |weights| weights.serving()?.advance(cast::stream(stream)))
}

/// Ends a step whose layers are all enqueued. In a capture, `stream` is the stream on which the capture began: the
/// pulls' streams are joined to it. FB_INVALID_STATE without a step, or with a layer that a micro-batch has not left.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_end(weights: *mut FbWeights, stream: *mut c_void) -> FbStatus {
    change(weights, |weights| weights.serving()?.end(cast::stream(stream)))
}

/// Abandons an open step, as after an error. What was enqueued runs; the next fb_weights_begin pulls the first layers
/// again, behind it. Discard a capture first. Without an open step nothing happens.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_abandon(weights: *mut FbWeights) -> FbStatus {
    change(weights, |weights| weights.serving()?.abandon())
}

/// Launches a graph that contains a captured step of these weights: `launch(data, stream)` enqueues it on `stream`. The
/// launch is ordered after the pulls before it, and the pulls behind it after the launch. The result of `launch` if it
/// is not 0; no step is open then. FB_BUSY while a step is open. FB_PEER_LOST before anything is launched, as for
/// fb_weights_begin; other errors are those of fb_weights_begin. FB_CLOSED in a child process that the callback forked.
///
/// # Safety
/// `launch` may be called with `data`, and returns normally, without a throw or a longjmp.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_launch(
    weights: *mut FbWeights,
    stream: *mut c_void,
    launch: FbLaunchGraph,
    data: *mut c_void,
) -> FbStatus {
    change(weights, |weights| {
        let launch = launch.ok_or_else(|| cast::null("launch"))?;
        // SAFETY: this call's contract.
        weights.serving()?.launch(cast::stream(stream), || launched(unsafe { launch(data, stream) }))
    })
}

/// What a callback's number means. One that is no status becomes a cancellation, with the number.
fn launched(status: u32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    let kind = Kind::ALL.into_iter().find(|kind| *kind as u32 == status).unwrap_or(Kind::Cancelled);
    Err(Error::new(kind, "launch").at("the engine's callback refused").with("status", status))
}

/// Tells the weights that a rank was lost (FB_LINKS_LOST): its memory stays mapped, and nothing else tells. From then
/// on a call that would pull a layer from it returns FB_PEER_LOST, and layers that are resident go on. Abandon an open
/// step. Then wait for the rank's new process (fb_links_readmit, fb_weights_reattach), or make every layer resident;
/// fb_weights_reroute reads replicas instead, where there are such.
/// FB_OUT_OF_RANGE for one's own rank and for one that the group does not have.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_lost(weights: *mut FbWeights, rank: u32) -> FbStatus {
    change(weights, |weights| {
        let group = weights.ring.pulls().plan().group();
        if rank == group.rank || rank >= group.ranks {
            return Err(Error::new(Kind::OutOfRange, "weights")
                .at("no other rank of the group")
                .with("rank", rank)
                .with("ranks", group.ranks));
        }
        weights.ring.lost(rank);
        Ok(())
    })
}
