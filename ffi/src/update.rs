//! A new version of shared weights, beside the one in use, which all ranks take at one border or none does.

use std::ffi::{c_char, c_void};

use forebay::Result;
use forebay::peer::Links;
use forebay::weights::{Border, Outcome, Ring, Update, Windows};

use crate::cast;
use crate::device::Tenant;
use crate::handle::{self, Object, change, with_changed};
use crate::links::{FbLinks, milliseconds};
use crate::status::{FbStatus, Text};
use crate::weights::{self, FbWeights};

/// Every rank keeps the old version, or the old replicas.
pub const FB_UPDATE_ABORTED: u32 = 0;
/// Every rank has the new version, or will have it before its next step. So it is with new replicas.
pub const FB_UPDATE_COMMITTED: u32 = 1;
/// Nothing was decided in a call that returned an error.
pub const FB_UPDATE_OPEN: u32 = 2;
/// The ranks have decided, and the call failed afterwards.
pub const FB_UPDATE_FAILED: u32 = 3;

/// A new version of some layers.
#[derive(Debug)]
pub struct FbUpdate {
    update: Update,
    /// After the update: it ends before the device counts it out.
    tenant: Tenant,
}

impl Object for FbUpdate {
    const KIND: u8 = 6;
    const NAME: &'static str = "fb_update";

    fn give_up(&self) {
        self.tenant.leave();
    }
}

impl Taken for FbUpdate {
    fn is_over(&self) -> bool {
        self.update.is_over()
    }

    fn commit(&mut self, ring: &mut Ring<Windows>, links: &mut Links, border: Border) -> Result<Outcome> {
        ring.commit(&mut self.update, links, border)
    }
}

/// What ranks take together at a border: an update, or a change of replicas.
pub(crate) trait Taken: Object {
    fn is_over(&self) -> bool;
    fn commit(&mut self, ring: &mut Ring<Windows>, links: &mut Links, border: Border) -> Result<Outcome>;
}

/// Where a commit says what it has done.
pub(crate) struct Said {
    pub outcome: *mut u32,
    pub reason: *mut c_char,
    pub reason_bytes: usize,
}

/// # Safety
/// As `fb_weights_commit`.
pub(crate) unsafe fn commit<T: Taken>(
    weights: *mut FbWeights,
    taken: *mut T,
    links: *mut FbLinks,
    border: Border,
    said: Said,
) -> FbStatus {
    let Said { outcome, reason, reason_bytes } = said;
    // SAFETY: this function's contract. Its error comes below.
    if let Ok(Some(open)) = unsafe { cast::out_or_none(outcome, "outcome") } {
        open.set(FB_UPDATE_OPEN);
    }
    change(weights, |weights| {
        // SAFETY: this function's contract.
        let outcome = unsafe { cast::out(outcome, "outcome") }?;
        let ring = weights.serving()?;
        let commit = |taken: &mut T| {
            let was_over = taken.is_over();
            let done = with_changed(links, |links| taken.commit(ring, &mut links.links, border));
            Ok((done, !was_over && taken.is_over()))
        };
        let mut why = Text::new();
        let (done, is_decided) = with_changed(taken, commit)?;
        let found = match done {
            Err(error) => {
                if is_decided {
                    outcome.set(FB_UPDATE_FAILED);
                }
                return Err(error);
            }
            Ok(Outcome::Committed) => FB_UPDATE_COMMITTED,
            Ok(Outcome::Aborted(error)) => {
                why.set(&error);
                FB_UPDATE_ABORTED
            }
        };
        // SAFETY: the same.
        unsafe { cast::write_text(reason, reason_bytes, why.with_end()) };
        outcome.set(found);
        Ok(())
    })
}

/// Begins an update of `layers` to `version`: takes the memory of this rank's new parts, and nothing else changes.
/// Steps go on with the old version. All ranks begin it with the same version and layers. `version` is above all that
/// were begun before, also those that failed; otherwise FB_OUT_OF_RANGE. `at_most` bounds the bytes of device memory
/// that it takes; FB_OUT_OF_MEMORY says how many it needs. Errors are texts of `weights`. FB_INVALID_STATE before the
/// parts were shared. FB_BUSY while another update of these weights, or a change of their replicas, is there: destroy
/// it first, unless it was committed or aborted. FB_UNSUPPORTED with FB_WEIGHTS_FROM_HOST. FB_INVALID_CONFIG for no
/// layers, or one twice. An error of the device, also one that keeps an update or a change that was destroyed from
/// giving its memory back: the call may be made again.
///
/// # Safety
/// `layers` has `layer_count` entries; `update` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_update_create(
    weights: *mut FbWeights,
    version: u32,
    layers: *const u32,
    layer_count: u32,
    at_most: u64,
    update: *mut *mut FbUpdate,
) -> FbStatus {
    change(weights, |weights| {
        // SAFETY: this call's contract, for both.
        let (layers, update) =
            unsafe { (cast::slice(layers, layer_count as usize, "layers")?, cast::out(update, "update")?) };
        let layers: Vec<usize> = layers.iter().map(|layer| *layer as usize).collect();
        let tenant = weights.tenant.another();
        let ring = weights.serving()?;
        update
            .set(handle::give(|| Ok(FbUpdate { update: ring.update(version, &layers, at_most)?, tenant }))?);
        Ok(())
    })
}

/// Does what fb_weights_fill does, for the new version; on any thread, while steps go on. FB_OUT_OF_RANGE also for a
/// layer that the update does not name. FB_INVALID_STATE once fb_update_share was called.
///
/// # Safety
/// As fb_weights_fill.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_update_fill(
    update: *mut FbUpdate,
    layer: u32,
    name: *const c_char,
    from: *const c_void,
    bytes: u64,
    stream: *mut c_void,
) -> FbStatus {
    change(update, |update| {
        // SAFETY: this call's contract, for both.
        let (name, from) =
            unsafe { (cast::text(name, "name")?, weights::source(&*update.tenant.device, from, bytes)?) };
        update.update.fill(layer as usize, name, from, cast::stream(stream))
    })
}

/// Gives the new parts to the other ranks and takes theirs, while steps go on. Call it when every tensor of the layers
/// is filled, on a thread that serves the sessions meanwhile. Blocks until the copies into the update have run and this
/// rank's part is hashed, and then until all ranks have shared, for at most `at_most_ms` milliseconds. Errors are texts
/// of `update`. FB_INVALID_STATE for an update that is not filled or was shared before, and while a rank that has come
/// back is not attached again; the error of a rank that is lost; FB_INVALID_CONFIG for `links` that is NULL or has
/// sessions of another group or plan; FB_BUSY while another call is inside one of the two; FB_CLOSED. Then nothing was
/// said to any rank, and the call may be made again.
///
/// After other errors the update cannot be committed by any rank, and is begun again, under a higher version.
/// FB_INVALID_CONFIG for a rank that updates other layers or to a later version. FB_CANCELLED for a rank whose own call
/// has failed. FB_TIMED_OUT and FB_PEER_LOST name the rank.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_update_share(
    update: *mut FbUpdate,
    links: *mut FbLinks,
    stream: *mut c_void,
    at_most_ms: u32,
) -> FbStatus {
    change(update, |update| {
        with_changed(links, |links| {
            update.update.share(&mut links.links, cast::stream(stream), milliseconds(at_most_ms))
        })
    })
}

/// Does what fb_weights_verify does, for a layer of an update that was shared.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_update_verify(
    update: *mut FbUpdate,
    layer: u32,
    stream: *mut c_void,
) -> FbStatus {
    change(update, |update| update.update.verify_layer(layer as usize, cast::stream(stream)))
}

/// Takes the new version, at a border between two steps at which all ranks do, or at which none does: then the old
/// version stays, on every rank. `step` is a number of the border, the same on all ranks. `stream` is ordered after all
/// steps. Waits until all ranks are there, for at most `at_most_ms` milliseconds. `outcome` receives
/// FB_UPDATE_COMMITTED or FB_UPDATE_ABORTED; an abort is no failure of this call, and `reason` receives why, as far as
/// this rank knows; after a commit `reason` is empty, and after an error it is not written. Addresses and captured
/// graphs hold; replicas of the layers are dropped on all ranks. Destroy the update afterwards.
///
/// Errors are texts of `weights`. With an error, too, `outcome` is written. FB_UPDATE_OPEN: nothing was decided in this
/// call, and it may be called again. So it is with FB_BUSY while a step is open or if `stream` is being captured, with
/// FB_INVALID_STATE for an update that was not shared, is over, or is of other weights or sessions, and with every
/// error of handles, streams and the device before the decision. FB_INTERNAL is the exception: a panic behind the
/// decision leaves FB_UPDATE_OPEN too, and the weights can only be destroyed. FB_UPDATE_FAILED: the ranks have decided.
/// A layer whose new memory cannot be mapped returns the error from then on (fb_weights_layer), no step begins, and
/// this process is ended and started again with the new weights; so it is with FB_CORRUPT. If every layer of the update
/// has its version (fb_layer_weights), only old memory could not be given back, and steps go on.
///
/// # Safety
/// No work that is enqueued or runs uses a window, except on `stream`. `outcome` has room for the result; `reason` is
/// NULL or has `reason_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_commit(
    weights: *mut FbWeights,
    update: *mut FbUpdate,
    links: *mut FbLinks,
    step: u64,
    stream: *mut c_void,
    at_most_ms: u32,
    outcome: *mut u32,
    reason: *mut c_char,
    reason_bytes: usize,
) -> FbStatus {
    let border = Border { step, stream: cast::stream(stream), at_most: milliseconds(at_most_ms) };
    let said = Said { outcome, reason, reason_bytes };
    // SAFETY: this call's contract.
    unsafe { commit(weights, update, links, border, said) }
}

/// Destroys an update. One that was not committed is aborted: the others then abort too, and its memory is given back.
/// Blocks until the copies into it have run. What the device refuses is left to the next fb_update_create or other call
/// that needs the update to be over.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_update_destroy(update: *mut FbUpdate) -> FbStatus {
    handle::end(update, |_| Ok(()))
}
