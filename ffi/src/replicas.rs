//! Copies of hot ranges of shared weights, whose set changes on all ranks at one border or on none.

use std::ffi::{CStr, CString, c_char, c_void};

use forebay::Result;
use forebay::peer::Links;
use forebay::weights::{Border, Outcome, Replica, Replication, Ring, Windows};

use crate::cast::{self, Plain};
use crate::device::Tenant;
use crate::handle::{self, Object, change, read, with_changed};
use crate::links::{FbLinks, milliseconds};
use crate::status::FbStatus;
use crate::update::{self, Said, Taken};
use crate::weights::FbWeights;

/// A copy of a tensor of a sharded layer, on a rank that does not own all of it. This struct never grows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbReplica {
    /// The tensor's name in UTF-8.
    pub tensor: *const c_char,
    /// Its layer.
    pub layer: u32,
    /// The rank that holds the copy, below `ranks` of the configuration.
    pub rank: u32,
}

// SAFETY: a pointer, which is a word, and two words of 4 bytes.
unsafe impl Plain for FbReplica {}

/// A change of the replicas.
#[derive(Debug)]
pub struct FbReplication {
    change: Replication,
    /// After the change: it ends before the device counts it out.
    tenant: Tenant,
}

impl Object for FbReplication {
    const KIND: u8 = 7;
    const NAME: &'static str = "fb_replication";

    fn give_up(&self) {
        self.tenant.leave();
    }
}

impl Taken for FbReplication {
    fn is_over(&self) -> bool {
        self.change.is_over()
    }

    fn commit(&mut self, ring: &mut Ring<Windows>, links: &mut Links, border: Border) -> Result<Outcome> {
        ring.commit_replicas(&mut self.change, links, border)
    }
}

impl FbWeights {
    fn replica(&self, replica: &Replica) -> Option<FbReplica> {
        let by = |name: &CString| CStr::to_bytes(name).cmp(replica.tensor.as_bytes());
        let name = self.names.get(self.names.binary_search_by(by).ok()?)?;
        // A plan has at most 4096 layers.
        Some(FbReplica { tensor: name.as_ptr(), layer: replica.layer as u32, rank: replica.rank })
    }
}

/// Begins a change of the replicas: `replicas` are all that there are to be after it, in any order, and those that are
/// there and are named stay. Takes the memory of the replicas that this rank gains, and nothing else changes; steps go
/// on. All ranks begin it with the same number and replicas. `number` is above all that were begun before, also those
/// that failed; otherwise FB_OUT_OF_RANGE. Numbers of changes and versions of updates count apart. `at_most` bounds the
/// bytes of device memory that it takes; FB_OUT_OF_MEMORY says how many it needs. Errors are texts of `weights`.
/// FB_OUT_OF_RANGE for a layer or tensor that was not chosen, and for a rank that the group does not have.
/// FB_INVALID_CONFIG for a replica that is named twice, or of which no whole granule is another rank's.
/// FB_INVALID_STATE before the parts were shared. FB_BUSY while an update or another change of these weights is there:
/// destroy it first, unless it was committed or aborted. FB_UNSUPPORTED with FB_WEIGHTS_FROM_HOST, and with a driver
/// older than CUDA 13. The error of a layer that cannot be used. An error of the device, also one that keeps an update
/// or a change that was destroyed from giving its memory back (fb_replication_abort): the call may be made again.
///
/// # Safety
/// `replicas` has `replica_count` entries, whose names end with a zero; `replication` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_replication_create(
    weights: *mut FbWeights,
    number: u32,
    replicas: *const FbReplica,
    replica_count: u32,
    at_most: u64,
    replication: *mut *mut FbReplication,
) -> FbStatus {
    change(weights, |weights| {
        // SAFETY: this call's contract, for both.
        let (replicas, replication) = unsafe {
            let replicas = cast::slice(replicas, replica_count as usize, "replicas")?;
            (replicas, cast::out(replication, "replication")?)
        };
        let wanted = |given: &FbReplica| {
            // SAFETY: the same.
            let tensor = unsafe { cast::text(given.tensor, "tensor") }?.to_owned();
            Ok(Replica { layer: given.layer as usize, tensor, rank: given.rank })
        };
        let wanted = replicas.iter().map(wanted).collect::<Result<Vec<_>>>()?;
        let tenant = weights.tenant.another();
        let ring = weights.serving()?;
        let begin = || Ok(FbReplication { change: ring.replicate(number, &wanted, at_most)?, tenant });
        replication.set(handle::give(begin)?);
        Ok(())
    })
}

/// Enqueues on `stream` copies of at most `bytes` bytes into the replicas that this rank gains. `left`, which may be
/// NULL, receives how many bytes are left then. Call it once a step, with as many bytes as the link has room for, until
/// none are left. The copies need no order with a step's work, so a stream of their own lets them run beside it.
/// FB_INVALID_STATE once fb_replication_share was called. FB_BUSY if `stream` is being captured.
///
/// # Safety
/// `left` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_replication_advance(
    replication: *mut FbReplication,
    bytes: u64,
    stream: *mut c_void,
    left: *mut u64,
) -> FbStatus {
    change(replication, |replication| {
        // SAFETY: this call's contract.
        let left = unsafe { cast::out_or_none(left, "left") }?;
        let still = replication.change.advance(bytes, cast::stream(stream))?;
        if let Some(left) = left {
            left.set(still);
        }
        Ok(())
    })
}

/// Returns how many bytes this rank has still to copy before it can share: 0 if it gains no replica.
///
/// # Safety
/// `left` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_replication_left(replication: *const FbReplication, left: *mut u64) -> FbStatus {
    read(replication, |replication| {
        // SAFETY: this call's contract.
        unsafe { cast::out(left, "left") }?.set(replication.change.left());
        Ok(())
    })
}

/// Gives the replicas that this rank gains to the other ranks and takes theirs, while steps go on. All ranks call it,
/// also those that gain none, when nothing is left to be copied, on a thread that serves the sessions meanwhile. Owners
/// and holders hash what they have, and both have to agree. Blocks until the copies have run and this rank has hashed,
/// and then until all ranks have shared, for at most `at_most_ms` milliseconds. Errors are texts of `replication`.
/// FB_INVALID_STATE with the bytes that are left, for a change that was shared before, and while a rank that has come
/// back is not attached again; the error of a rank that is lost; FB_INVALID_CONFIG for `links` that is NULL or has
/// sessions of another group or plan; FB_BUSY while another call is inside one of the two; FB_CLOSED. Then nothing was
/// said to any rank, and the call may be made again.
///
/// After other errors the change cannot be committed by any rank, and is begun again, under a higher number.
/// FB_CORRUPT, with rank and layer, for a replica that is not what its owner has. FB_INVALID_CONFIG for a rank that has
/// other replicas or wants others: if it was called with the same, call fb_weights_drop_replicas on all ranks.
/// FB_CANCELLED for a rank whose own call has failed. FB_TIMED_OUT and FB_PEER_LOST name the rank.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_replication_share(
    replication: *mut FbReplication,
    links: *mut FbLinks,
    stream: *mut c_void,
    at_most_ms: u32,
) -> FbStatus {
    change(replication, |replication| {
        with_changed(links, |links| {
            replication.change.share(&mut links.links, cast::stream(stream), milliseconds(at_most_ms))
        })
    })
}

/// Gives a change up: the other ranks then abort it too, unless all have committed already, and its memory is given
/// back. Blocks until the copies into it have run. Nothing happens to a change that is over. After an error of the
/// device the change may keep its memory, and fb_replication_create returns FB_BUSY: call it again. If the change is
/// destroyed instead, the next call that returns FB_BUSY while a change is there, such as fb_update_create, first does
/// what is left, or returns the device's error.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_replication_abort(replication: *mut FbReplication) -> FbStatus {
    change(replication, |replication| replication.change.abort())
}

/// Destroys a change of the replicas. One that was not committed is aborted, as by fb_replication_abort; what the
/// device refuses then is left to a later call, as described there.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_replication_destroy(replication: *mut FbReplication) -> FbStatus {
    handle::end(replication, |_| Ok(()))
}

/// Takes a change of the replicas, at a border between two steps at which all ranks do, or at which none does: then the
/// old ones stay, on every rank. All is as for fb_weights_commit, `outcome` and its FB_UPDATE_ constants too.
/// FB_UPDATE_COMMITTED: every rank reads the new replicas, and the memory of those that are gone was given back.
/// FB_UPDATE_ABORTED: `reason` receives why. After an error `reason` is not written. No byte of a layer changes, so the
/// next step pulls nothing anew. Destroy the change afterwards.
///
/// Errors are texts of `weights`. With FB_UPDATE_OPEN nothing was decided in this call, and it may be called again:
/// FB_BUSY while a step is open or if `stream` is being captured; FB_INVALID_STATE for a change that was not shared, is
/// over, or is of other weights or sessions. With FB_UPDATE_FAILED the ranks have decided. A layer whose memory cannot
/// be mapped returns the error from then on (fb_weights_layer), no step begins, and this process is ended and started
/// again; so it is with FB_CORRUPT. If no layer returns an error, only memory of replicas that are gone could not be
/// given back, and steps go on.
///
/// # Safety
/// No work that is enqueued or runs uses a window, except on `stream`. `outcome` has room for the result; `reason` is
/// NULL or has `reason_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_commit_replicas(
    weights: *mut FbWeights,
    replication: *mut FbReplication,
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
    unsafe { update::commit(weights, replication, links, border, said) }
}

/// Copies the replicas that ranks hold for each other at present, in the order of layers, tensors and ranks, as many as
/// `room` allows. `*count` receives how many there are. Their names stay valid until the device is destroyed, also when
/// the weights are.
///
/// # Safety
/// `replicas` has `room` places; `count` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_replicas(
    weights: *const FbWeights,
    replicas: *mut FbReplica,
    room: u32,
    count: *mut u32,
) -> FbStatus {
    read(weights, |weights| {
        let all = weights.ring.pulls().replicas();
        let all = all.iter().filter_map(|replica| weights.replica(replica));
        // SAFETY: this call's contract, for both.
        unsafe { cast::write_list(all, replicas, room, "replicas", count, "count") }
    })
}

/// Gives up all replicas, on this rank alone, between steps: it reads from owners again, and gives back the memory of
/// its own replicas and what it holds of others'. Blocks until the pulls that were enqueued have run. No byte of a
/// layer changes. The device has the memory again when no rank reads it any more. For ranks of which one has replicas
/// that another has not, and for a group that needs the memory: before the next change all ranks do so.
/// FB_INVALID_STATE before the parts were shared. FB_BUSY while a step is open or a change is there. An error of the
/// device names the layer, which keeps its replicas; where the device has failed, every later call for it returns that
/// error.
///
/// # Safety
/// No work that is enqueued or runs uses a window.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_drop_replicas(weights: *mut FbWeights) -> FbStatus {
    change(weights, |weights| weights.serving()?.drop_replicas())
}

/// Reads around the ranks that were lost (fb_weights_lost), on this rank alone, between steps: where another rank has
/// the same bytes, pulls read them there from now on. A layer that still needs a rank that was lost is FB_PEER_LOST as
/// before. Blocks until the pulls that were enqueued have run. FB_INVALID_STATE before the parts were shared. FB_BUSY
/// while a step is open or a change is there. After an error of the device each part is read where it was before or
/// where it is anew, and the bytes of both are the same; where the device has failed, every later call for the layer
/// returns that error.
///
/// # Safety
/// No work that is enqueued or runs uses a window.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_reroute(weights: *mut FbWeights) -> FbStatus {
    change(weights, |weights| weights.serving()?.reroute())
}
