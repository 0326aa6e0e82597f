//! The sessions of a rank with the others of its group: how they meet, share their weights, and learn that one has
//! died.
//!
//! C never sees the messages of an update or a change of replicas that is under way: they are kept for the call that
//! reads them.

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::os::NoFaults;
use forebay::peer::{Event, Limits, Links};
use forebay::weights::Update;
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned};
use crate::handle::{self, Object, change, with_changed};
use crate::status::{FbStatus, Text};
use crate::weights::FbWeights;

/// Nothing has happened for the given time.
pub const FB_LINKS_NOTHING: u32 = 0;
/// A rank was lost: its process has died, or has broken the protocol. Call fb_weights_lost.
pub const FB_LINKS_LOST: u32 = 1;
/// A rank that was lost has come back. Call fb_weights_reattach next.
pub const FB_LINKS_RETURNED: u32 = 2;
/// A rank has ended its session in order (fb_links_end).
pub const FB_LINKS_ENDED: u32 = 3;
/// A rank has sent a message that is of no call of this header; it was dropped.
pub const FB_LINKS_MESSAGE: u32 = 4;

/// Where the ranks of a group meet, and their times. An optional field that is 0 gets the default that its comment
/// names.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbLinksConfig {
    /// sizeof(fb_links_config).
    pub size: usize,
    /// A folder that all ranks of the host can write.
    pub folder: *const c_char,
    /// Optional: a digest of what the checkpoint is at the group's start, such as the hashes of its files. Ranks with
    /// different ones refuse each other. Checkpoints of one shape are told apart by this alone. It stays the same as
    /// long as the group lives, also for a rank that comes back and after new weights were committed. Default: zeros.
    pub geometry: [u8; 32],
    /// Optional: how long to wait for all ranks, in milliseconds. Ranks fill their weights before they meet. Default:
    /// 10 minutes.
    pub hello_ms: u32,
    /// Optional: after how long without a message a rank says that it is alive. Default: 1 second.
    pub interval_ms: u32,
    /// Optional: after how long without a sign of life a rank counts as lost; at least two intervals. Default: 10
    /// seconds.
    pub lost_ms: u32,
    /// Optional: the most bytes that wait to be sent to one rank, at least 65,536. Default: 1 MiB.
    pub queue_bytes: u32,
}

// SAFETY: words, a pointer, which is one, and bytes, a multiple of a word; four words of 4 bytes at the end.
unsafe impl Plain for FbLinksConfig {}
impl Versioned for FbLinksConfig {
    const NAME: &'static str = "fb_links_config";
    const REQUIRED: usize = std::mem::offset_of!(FbLinksConfig, geometry);
}

/// What another rank did.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbLinksEvent {
    /// sizeof(fb_links_event), set by the caller.
    pub size: usize,
    /// An FB_LINKS_ constant.
    pub kind: u32,
    /// The rank; 0 for FB_LINKS_NOTHING.
    pub rank: u32,
    /// For FB_LINKS_LOST: the fb_status of the error. Otherwise 0.
    pub status: u32,
    /// 1 when every session has ended or was lost: no further event comes.
    pub is_over: u32,
}

// SAFETY: words; four of 4 bytes at the end.
unsafe impl Plain for FbLinksEvent {}
impl Versioned for FbLinksEvent {
    const NAME: &'static str = "fb_links_event";
    const REQUIRED: usize = std::mem::offset_of!(FbLinksEvent, is_over) + 4;
}

/// The sessions of a rank with all others of its group.
#[derive(Debug)]
pub struct FbLinks {
    pub(crate) links: Links,
}

impl Object for FbLinks {
    const KIND: u8 = 5;
    const NAME: &'static str = "fb_links";
}

/// A time that a caller gives in milliseconds.
pub(crate) fn milliseconds(count: u32) -> Duration {
    Duration::from_millis(count.into())
}

impl FbLinksConfig {
    fn limits(&self) -> Limits {
        let defaults = Limits::default();
        let or = |count, default| if count == 0 { default } else { milliseconds(count) };
        Limits {
            hello: or(self.hello_ms, defaults.hello),
            interval: or(self.interval_ms, defaults.interval),
            lost: or(self.lost_ms, defaults.lost),
            queue: if self.queue_bytes == 0 { defaults.queue } else { self.queue_bytes as usize },
        }
    }
}

/// What an event is for C.
enum Seen {
    Nothing,
    Lost(u32, Error),
    Ended(u32),
    Message(u32),
}

/// A rank's error as an event; an error without a rank is the call's.
fn lost(error: Error) -> Result<Seen> {
    match error.number("rank").and_then(|rank| u32::try_from(rank).ok()) {
        Some(rank) => Ok(Seen::Lost(rank, error)),
        None => Err(error),
    }
}

impl FbLinks {
    /// The next event that is not of an update or a change of replicas under way.
    fn next(&mut self, at_most: Duration) -> Result<Seen> {
        let start = Instant::now();
        loop {
            let event = match self.links.event(at_most.saturating_sub(start.elapsed())) {
                Ok(event) => event,
                Err(error) => return lost(error),
            };
            match event {
                None => return Ok(Seen::Nothing),
                Some((rank, Event::Ended)) => return Ok(Seen::Ended(rank)),
                Some((rank, event)) if Update::concerns(&event) => {
                    if let Err(error) = self.links.set_aside(rank, event) {
                        return lost(error);
                    }
                }
                Some((rank, Event::Message { .. })) => return Ok(Seen::Message(rank)),
                // It was said when the ranks met.
                Some((_, Event::Hello(_))) => {}
            }
        }
    }

    fn event(&self, kind: u32, rank: u32, status: u32) -> FbLinksEvent {
        let is_over = self.links.is_over().into();
        FbLinksEvent { size: size_of::<FbLinksEvent>(), kind, rank, status, is_over }
    }
}

/// Meets the other ranks of the group of `weights` in a folder: they say who they are and compare plan, `geometry` and
/// content. Blocks until the copies on `stream` have run, this rank's part was hashed, and all ranks are there. Every
/// tensor must have been filled, on `stream` or on streams that it is ordered after. Errors are texts of `weights`.
/// FB_INVALID_STATE for weights that are not filled, or were shared. FB_TIMED_OUT with the lowest rank that did not
/// come. FB_INVALID_CONFIG for ranks that differ, and for times that contradict each other. FB_BUSY for a second
/// process of this rank. FB_IO for a folder that takes no socket. After an error the weights are filled as before, and
/// the call may be repeated.
///
/// # Safety
/// `config` states its real size, and its `folder` ends with a zero; `links` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_links_meet(
    weights: *mut FbWeights,
    config: *const FbLinksConfig,
    stream: *mut c_void,
    links: *mut *mut FbLinks,
) -> FbStatus {
    change(weights, |weights| {
        // SAFETY: this call's contract, for all of them.
        let (config, links) =
            unsafe { (cast::versioned::<FbLinksConfig>(config)?, cast::out(links, "links")?) };
        // SAFETY: the same.
        let folder = unsafe { cast::path(config.folder, "folder") }?;
        let made = handle::give(|| {
            let own = weights.ring.filling()?.hello(config.geometry, cast::stream(stream))?;
            let links = Links::meet(folder, own, config.limits(), Arc::new(NoFaults))?;
            Ok(FbLinks { links })
        })?;
        links.set(made);
        Ok(())
    })
}

/// Gives this rank's parts to all other ranks and takes theirs. All ranks call it, each for at most `at_most_ms`
/// milliseconds. From then on the weights serve steps, and cannot be filled any more. With FB_WEIGHTS_FROM_HOST, or in
/// a group of one rank, nothing is exchanged. Errors are texts of `weights`. FB_TIMED_OUT, FB_PEER_LOST, FB_BAD_FORMAT
/// and FB_CORRUPT name the rank. FB_INVALID_STATE for weights that are not filled, or were shared before.
/// FB_INVALID_CONFIG for sessions of other weights. If a rank is lost meanwhile, the call exchanges the parts of all
/// others and then returns that rank's error; fb_links_readmit and fb_weights_reattach do the rest. After FB_TIMED_OUT
/// the weights cannot be shared any more: destroy sessions, weights and device, and begin anew, on all ranks.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_share(
    weights: *mut FbWeights,
    links: *mut FbLinks,
    stream: *mut c_void,
    at_most_ms: u32,
) -> FbStatus {
    change(weights, |weights| {
        with_changed(links, |links| {
            let windows = weights.ring.filling()?;
            windows.share(&mut links.links, cast::stream(stream), milliseconds(at_most_ms))
        })
    })
}

/// Takes a rank in that has come back (FB_LINKS_RETURNED): gives it this rank's parts, takes its parts, and maps them
/// at the addresses of its last process's. Between steps, when all steps have run that pull from the rank. Blocks for
/// at most `at_most_ms` milliseconds; let that be at least `hello_ms`, because the rank may still wait for another one
/// that comes back, and its meeting ends if this call ends twice before. fb_links_poll is refused until then, because
/// it would drop the rank's first part. Several ranks are taken one after another, the lowest first. Replicas are
/// dropped, because the rank has none: those that it held or owned, and all once no other rank is lost or waits to be
/// attached. Errors are texts of `weights`.
///
/// FB_BUSY while a step is open or a change of replicas is there. FB_INVALID_STATE for a rank that was never lost. The
/// error of a rank that was lost and has not come back, such as FB_PEER_LOST. FB_CORRUPT for a part that is not the one
/// of before. After an error of the exchange the rank is lost again, and can come back again.
///
/// # Safety
/// No work that is enqueued or runs pulls from the rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_reattach(
    weights: *mut FbWeights,
    links: *mut FbLinks,
    rank: u32,
    at_most_ms: u32,
) -> FbStatus {
    change(weights, |weights| {
        with_changed(links, |links| {
            weights.serving()?.reattach(rank, &mut links.links, milliseconds(at_most_ms))
        })
    })
}

/// Serves the sessions and returns the next event, or FB_LINKS_NOTHING after `at_most_ms` milliseconds, at once if all
/// sessions are over; 0 looks once and never waits. Call it at least every few seconds, on any thread: other ranks hold
/// one for lost that says nothing. For FB_LINKS_LOST, `text` receives the rank's error; otherwise it is empty. A rank
/// that was lost is an event and no failure of this call. Messages of an update or a change of replicas are kept for
/// fb_update_share and fb_replication_share. FB_INVALID_STATE, with the rank, between the fb_links_readmit that
/// returned a rank and its fb_weights_reattach.
///
/// # Safety
/// `event` states its real size; `text` is NULL or has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_links_poll(
    links: *mut FbLinks,
    at_most_ms: u32,
    text: *mut c_char,
    text_bytes: usize,
    event: *mut FbLinksEvent,
) -> FbStatus {
    change(links, |links| {
        // SAFETY: this call's contract.
        let event = unsafe { cast::versioned_out(event) }?;
        if let Some(rank) = links.links.unattached() {
            return Err(Error::new(Kind::InvalidState, "links")
                .at("a rank that has come back and was not attached again")
                .with("rank", rank)
                .hint("call fb_weights_reattach first, or fb_weights_share if nothing was shared"));
        }
        let mut said = Text::new();
        let (kind, rank, status) = match links.next(milliseconds(at_most_ms))? {
            Seen::Nothing => (FB_LINKS_NOTHING, 0, FbStatus::FbOk),
            Seen::Ended(rank) => (FB_LINKS_ENDED, rank, FbStatus::FbOk),
            Seen::Message(rank) => (FB_LINKS_MESSAGE, rank, FbStatus::FbOk),
            Seen::Lost(rank, error) => {
                said.set(&error);
                (FB_LINKS_LOST, rank, error.kind().into())
            }
        };
        // SAFETY: the same.
        unsafe { cast::write_text(text, text_bytes, said.with_end()) };
        event.set(&links.event(kind, rank, status as u32));
        Ok(())
    })
}

/// Looks whether a rank that was lost has come back, for at most `at_most_ms` milliseconds; 0 looks once and never
/// waits. The event is FB_LINKS_RETURNED with the rank, the lowest first, or FB_LINKS_NOTHING; at once if no rank was
/// lost. Its new process does what it did at the start: fill, fb_links_meet in the same folder, fb_weights_share.
/// FB_INVALID_CONFIG for a process with another plan, `geometry` or content than its rank had: that connection is
/// closed, and the next process can come.
///
/// # Safety
/// `event` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_links_readmit(
    links: *mut FbLinks,
    at_most_ms: u32,
    event: *mut FbLinksEvent,
) -> FbStatus {
    change(links, |links| {
        // SAFETY: this call's contract.
        let event = unsafe { cast::versioned_out(event) }?;
        let (kind, rank) = match links.links.readmit(milliseconds(at_most_ms))? {
            Some(rank) => (FB_LINKS_RETURNED, rank),
            None => (FB_LINKS_NOTHING, 0),
        };
        event.set(&links.event(kind, rank, 0));
        Ok(())
    })
}

/// Ends this side of every session in order. Then poll until `is_over`, so that the other ranks do not hold this one
/// for lost.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_links_end(links: *mut FbLinks) -> FbStatus {
    change(links, |links| links.links.end())
}

/// Destroys the sessions. To ranks with which they had not ended this one is lost.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_links_destroy(links: *mut FbLinks) -> FbStatus {
    handle::end(links, |_| Ok(()))
}
