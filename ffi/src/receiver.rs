//! The receiver of a transfer: a rank of a decode instance, and the thread that stores checked rows in its pages.
//!
//! The pages are the engine's memory, which is named when the receiver is made, and pages are given to a use by their
//! numbers. Each run is checked against the pages of its use and against the bytes of a page before a byte is written.
//! So nothing that a sender says reaches other memory.
//!
//! As at a sender (`sender`), all calls go through const pointers.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, PoisonError};

use forebay::transfer::receiver::{Event, Options};
use forebay::transfer::socket::{Address, SocketReceiver};
use forebay::transfer::thread::{Grant, ReceiveThread};
use forebay::transfer::{Fence, Receiver, ReceivingEnd, Run, Store};
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned, create};
use crate::handle::{self, Object, read};
use crate::status::FbStatus;
use crate::transfer::{
    FB_TRANSFER_DRAINED, FB_TRANSFER_FAILED, FB_TRANSFER_PAYLOAD, FB_TRANSFER_READY, FB_TRANSFER_WHOLE,
    FbTransferConfig, FbTransferEvent, FbTransferSide, Seen, address, counted, next, page_bytes, refuse,
    time_or, within,
};
use crate::uses::{Lent, Told};

/// The most planes of a rank.
const PLANES_MAX: u32 = 1 << 14;
/// The most kinds of payloads.
const PAYLOADS_MAX: u32 = 256;

/// The pages of a plane, in the engine's own memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbReceivePlane {
    /// Page 0.
    pub address: *mut c_void,
    /// The bytes of all pages.
    pub bytes: u64,
    /// Bytes from a page to the next one, at least the side's `page_bytes` of the plane.
    pub page_bytes: u64,
}

// SAFETY: an address, which is a word, and words.
unsafe impl Plain for FbReceivePlane {}

/// A request that is wanted, and a use of pages for it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbWanted {
    /// sizeof(fb_wanted).
    pub size: usize,
    /// The number of this try at the request, as the sender has it in fb_sender_begin.
    pub request: u64,
    /// With `request` the name of the use; above the generations of all grants before.
    pub generation: u64,
    /// The sending instance.
    pub instance: u64,
    /// Its replica that has the request.
    pub replica: u32,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Optional: the first token that is wanted: the receiver has the rows before it, and these are not written.
    /// Default: 0.
    pub first: u32,
    /// Optional: the milliseconds after which it fails, if it is not whole by then. Default: it may take any time.
    pub within_ms: u32,
    /// Optional: the kinds of the payloads that belong to it, each once.
    pub payloads: *const u8,
    /// The number of kinds, at most 256.
    pub payload_count: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: words and a pointer, which is one; four words of 4 bytes, and two at the end.
unsafe impl Plain for FbWanted {}
impl Versioned for FbWanted {
    const NAME: &'static str = "fb_wanted";
    const REQUIRED: usize = std::mem::offset_of!(FbWanted, first);
}

/// What a receiver has seen since its creation.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbReceived {
    /// sizeof(fb_received), set by the caller.
    pub size: usize,
    /// Uses that became whole.
    pub whole: u64,
    /// Uses that failed or were aborted.
    pub failed: u64,
    /// Runs of bytes that were stored.
    pub runs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Runs that arrived with other bytes than their digests say, or could not be read.
    pub wrong: u64,
}

// SAFETY: words.
unsafe impl Plain for FbReceived {}
impl Versioned for FbReceived {
    const NAME: &'static str = "fb_received";
    const REQUIRED: usize = std::mem::offset_of!(FbReceived, wrong) + 8;
}

/// A plane of the engine's memory.
#[derive(Clone, Copy, Debug)]
struct Pages {
    /// Exposed, so that rows can be written there.
    address: usize,
    bytes: u64,
    stride: u64,
    /// The bytes of a page that rows may be in.
    page: u64,
}

impl Pages {
    /// Where byte `offset` of a page is, if `bytes` bytes from there on are in the page and in the plane.
    fn find(&self, page: u32, offset: u64, bytes: u64) -> Option<usize> {
        offset.checked_add(bytes).filter(|end| *end <= self.page)?;
        let at = u64::from(page).checked_mul(self.stride)?.checked_add(offset)?;
        at.checked_add(bytes).filter(|end| *end <= self.bytes)?;
        self.address.checked_add(usize::try_from(at).ok()?)
    }
}

/// The engine's pages, and which of them each use has.
#[derive(Debug)]
struct Planes {
    planes: Vec<Pages>,
    uses: BTreeMap<Fence, Vec<u32>>,
}

impl Planes {
    /// # Safety
    /// `planes` names `count` planes, whose bytes are there as long as this.
    unsafe fn new(planes: *const FbReceivePlane, count: u32, page_bytes: &[u64]) -> Result<Planes> {
        let counted = counted(count, PLANES_MAX, "plane_count")?;
        // SAFETY: the same contract.
        let planes = unsafe { cast::slice(planes, counted, "planes") }?;
        if planes.len() != page_bytes.len() {
            return Err(
                refuse("plane_count", count.into()).with("planes of the stage", page_bytes.len() as u64)
            );
        }
        let mut made = Vec::with_capacity(counted);
        for (plane, page) in planes.iter().zip(page_bytes.iter().copied()) {
            if plane.address.is_null() {
                return Err(cast::null("address of a plane"));
            }
            if plane.page_bytes < page {
                return Err(refuse("page_bytes of a plane", plane.page_bytes).with("least", page));
            }
            let (address, stride) = (plane.address.expose_provenance(), plane.page_bytes);
            let end = usize::try_from(plane.bytes).ok().and_then(|bytes| address.checked_add(bytes));
            if end.is_none() {
                return Err(refuse("bytes of a plane", plane.bytes));
            }
            made.push(Pages { address, bytes: plane.bytes, stride, page });
        }
        Ok(Planes { planes: made, uses: BTreeMap::new() })
    }

    /// Checks that a page is in all planes.
    fn check(&self, page: u32) -> Result<()> {
        match self.planes.iter().all(|plane| plane.find(page, 0, plane.page).is_some()) {
            true => Ok(()),
            false => Err(Error::new(Kind::OutOfRange, "transfer receiver")
                .at("a page that a plane does not have")
                .with("page", page)),
        }
    }
}

impl Store for Planes {
    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        let wrong = || {
            Error::new(Kind::OutOfRange, "transfer receiver")
                .at("a run outside of the use's pages")
                .with("request", fence.request)
                .with("page", run.to.page)
                .with("plane", run.to.plane)
        };
        let plane = self.planes.get(run.to.plane as usize).ok_or_else(wrong)?;
        let pages = self.uses.get(&fence).ok_or_else(wrong)?;
        let page = *pages.get(run.to.page as usize).ok_or_else(wrong)?;
        let piece = usize::try_from(run.bytes).ok().filter(|piece| *piece > 0).ok_or_else(wrong)?;
        let mut offset = run.to.offset;
        for from in bytes.chunks(piece) {
            let to = plane.find(page, offset, from.len() as u64).ok_or_else(wrong)?;
            let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
            // SAFETY: `find` has compared the place with the plane, whose bytes are there by the contract of
            // fb_receiver_create; a caller's memory is no memory of the library.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
            offset = offset.checked_add(run.to.stride).ok_or_else(wrong)?;
        }
        Ok(())
    }

    fn ended(&mut self, fence: Fence) {
        self.uses.remove(&fence);
    }
}

/// A rank of a receiving instance, and its thread.
#[derive(Debug)]
pub struct FbReceiver {
    thread: ReceiveThread<SocketReceiver, Planes>,
    /// Where it listens, and a zero.
    address: Vec<u8>,
    /// To check pages by at once; it has no uses.
    planes: Planes,
    page_tokens: u32,
    told: Mutex<Told>,
}

impl Object for FbReceiver {
    const KIND: u8 = 16;
    const NAME: &'static str = "fb_receiver";
}

impl FbReceiver {
    fn told<R>(&self, act: impl FnOnce(&mut Told) -> R) -> R {
        act(&mut self.told.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Checks the pages of a use, one for each page of the request. Those before the first token that is wanted are not
    /// written; what is given beyond the request's pages is not of the use.
    fn check(&self, tokens: u32, first: u32, pages: &[u32]) -> Result<Lent> {
        let page_tokens = self.page_tokens.max(1);
        let wanted = tokens.div_ceil(page_tokens) as usize;
        if pages.len() < wanted {
            return Err(Error::new(Kind::OutOfRange, "transfer receiver")
                .at("pages of a request")
                .with("given", pages.len() as u64)
                .with("wanted", wanted as u64));
        }
        pages.iter().try_for_each(|page| self.planes.check(*page))?;
        let first = if first < tokens { (first / page_tokens) as usize } else { wanted };
        let part = |range: Range<usize>| pages.get(range).unwrap_or_default().to_vec();
        Ok(Lent { kept: part(0..first), written: part(first..wanted) })
    }

    fn seen(&self, event: Event) -> Seen {
        let of = |kind, fence: Fence| {
            let mut seen = Seen::new(kind).of(fence.request);
            seen.event.generation = fence.generation;
            seen
        };
        match event {
            Event::Met { link, rank } => Seen::met(link, rank),
            Event::Ready { fence, layer } => {
                let mut seen = of(FB_TRANSFER_READY, fence);
                seen.event.layer = layer;
                seen
            }
            Event::Payload { fence, kind, bytes } => {
                let mut seen = of(FB_TRANSFER_PAYLOAD, fence);
                // A frame holds it.
                (seen.event.payload, seen.event.payload_bytes) = (kind.into(), bytes.len() as u32);
                self.told(|told| {
                    // Another thread may have taken the end of the use meanwhile.
                    if told.is_open(fence) {
                        told.payloads.insert((fence, kind), bytes);
                    }
                });
                seen
            }
            Event::Whole { fence } => {
                self.told(|told| told.ended(fence));
                of(FB_TRANSFER_WHOLE, fence)
            }
            Event::Failed { fence, error } => {
                self.told(|told| told.ended(fence));
                of(FB_TRANSFER_FAILED, fence).why(&error)
            }
            Event::Drained { fence } => of(FB_TRANSFER_DRAINED, fence),
            // Sockets have no landing pages.
            Event::Free { .. } => Seen::new(crate::transfer::FB_TRANSFER_NOTHING),
        }
    }
}

impl FbTransferConfig {
    fn receiver_options(&self) -> Options {
        let defaults = Options::default();
        Options {
            resend: time_or(self.resend_ms, defaults.resend),
            patience: time_or(self.patience_ms, defaults.patience),
            requests: self.requests_or(defaults.requests),
            ..defaults
        }
    }
}

/// Creates a receiver, which listens at `address` of `config`, and the thread that drives it. `planes` are those of
/// this rank's stage, in the order of the side. They are the engine's own memory, of the host, such as the rows of a
/// cache. Rows are written there by the thread, only to pages of a use (fb_receiver_grant), and only until
/// FB_TRANSFER_WHOLE or FB_TRANSFER_FAILED has come for the use. FB_INVALID_CONFIG names a field, also for an address
/// of a network without a token; FB_BUSY where another process listens; FB_OS_REFUSED for an address, sockets or a
/// thread that cannot be.
///
/// # Safety
/// All structs state their real sizes, and have as many entries as they say. The planes' bytes may be written until
/// fb_receiver_destroy has returned. `text` is NULL or has `text_bytes` bytes; `receiver` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_receiver_create(
    config: *const FbTransferConfig,
    side: *const FbTransferSide,
    planes: *const FbReceivePlane,
    plane_count: u32,
    text: *mut c_char,
    text_bytes: usize,
    receiver: *mut *mut FbReceiver,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let (config, side) = (cast::versioned::<FbTransferConfig>(config)?, cast::versioned(side)?);
            let receiver = cast::out(receiver, "receiver")?;
            receiver.set(handle::give(|| {
                let side = FbTransferSide::side(&side)?;
                let (page_bytes, page_tokens) = (page_bytes(&side, config.stage)?, side.page_tokens);
                let stored = Planes::new(planes, plane_count, &page_bytes)?;
                let known = Planes { planes: stored.planes.clone(), uses: BTreeMap::new() };
                let machine = Receiver::new(side, config.rank(), config.receiver_options())?;
                let at = address(config.way()?, config.address)?;
                let fabric = SocketReceiver::bind(config.options()?, &at)?;
                let mut address = match fabric.address().unwrap_or(at) {
                    Address::Shm(path) => path.as_os_str().as_bytes().to_vec(),
                    at @ Address::Tcp(_) => at.to_string().into_bytes(),
                };
                address.push(0);
                let thread = ReceiveThread::start(ReceivingEnd::new(machine, fabric), stored)?;
                Ok(FbReceiver { thread, address, planes: known, page_tokens, told: Mutex::default() })
            })?);
            Ok(())
        })
    }
}

/// Copies to `text` where the receiver listens: for port 0 with the port that the system chose. FB_OUT_OF_RANGE for an
/// address that `text_bytes` bytes do not hold.
///
/// # Safety
/// `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_receiver_address(
    receiver: *const FbReceiver,
    text: *mut c_char,
    text_bytes: usize,
) -> FbStatus {
    read(receiver, |receiver| {
        if text.is_null() {
            return Err(cast::null("text"));
        }
        if text_bytes < receiver.address.len() {
            return Err(Error::new(Kind::OutOfRange, "transfer receiver")
                .at("text_bytes")
                .with("given", text_bytes as u64)
                .with("wanted", receiver.address.len() as u64));
        }
        // SAFETY: this call's contract.
        unsafe { cast::write_text(text, text_bytes, &receiver.address) };
        Ok(())
    })
}

/// Wants a request: gives its pages to it, and asks the sender's ranks for its rows. Call it when FB_TRANSFER_MET has
/// come for all of these ranks; otherwise it fails. `pages` has one page for each `page_tokens` tokens of the prompt,
/// in its order; page `pages[i]` of every plane gets the rows of these tokens. From this call on the pages are the
/// receiver's. They are the engine's again when FB_TRANSFER_WHOLE or FB_TRANSFER_FAILED has come for the use, one of
/// which always comes, or when the receiver was destroyed. A page that is written is in no other use. Pages that have
/// only rows before the first wanted token may be those of several uses.
///
/// FB_OUT_OF_RANGE for too few pages, and for one that a plane does not have; FB_INVALID_STATE for a generation that is
/// not above those of all grants before, and for a page that another use has. All change nothing, and no event follows.
/// Everything else that is wrong comes out as FB_TRANSFER_FAILED. If fb_receiver_poll gives an error of its own, the
/// receiver has ended: nothing is written any more, and no event follows.
///
/// # Safety
/// `wanted` states its real size, and has as many payloads as it says; `pages` has `page_count` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_receiver_grant(
    receiver: *const FbReceiver,
    wanted: *const FbWanted,
    pages: *const u32,
    page_count: u32,
) -> FbStatus {
    read(receiver, |receiver| {
        // SAFETY: this call's contract, for all of them.
        let (wanted, pages) = unsafe {
            (cast::versioned::<FbWanted>(wanted)?, cast::slice(pages, page_count as usize, "pages")?)
        };
        let payload_count = counted(wanted.payload_count, PAYLOADS_MAX, "payload_count")?;
        // SAFETY: the same.
        let payloads = unsafe { cast::slice(wanted.payloads, payload_count, "payloads") }?;
        if wanted.reserved != 0 {
            return Err(refuse("reserved", wanted.reserved.into()));
        }
        let lent = receiver.check(wanted.tokens, wanted.first, pages)?;
        let fence = Fence { request: wanted.request, generation: wanted.generation };
        let grant = Grant {
            fence,
            tokens: wanted.tokens,
            first: wanted.first,
            sender: (wanted.instance, wanted.replica),
            payloads: payloads.to_vec(),
            landing: Vec::new(),
            within: within(wanted.within_ms),
        };
        // Under one lock, so that grants of several threads are queued in the order of their generations.
        receiver.told(|told| {
            told.lend(fence, lent)?;
            let pages = pages.to_vec();
            receiver.thread.grant(grant, move |planes| {
                planes.uses.insert(fence, pages);
                Ok(())
            });
            Ok(())
        })
    })
}

/// Gives a use up. Its pages are the engine's again when FB_TRANSFER_FAILED or FB_TRANSFER_WHOLE has come, and not
/// before. One that has ended meanwhile is no error. Waits for nothing.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_receiver_abort(
    receiver: *const FbReceiver,
    request: u64,
    generation: u64,
) -> FbStatus {
    read(receiver, |receiver| {
        receiver.thread.abort(Fence { request, generation });
        Ok(())
    })
}

/// Takes the next event, as fb_sender_poll does.
///
/// # Safety
/// `event` states its real size; `text` is NULL or has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_receiver_poll(
    receiver: *const FbReceiver,
    at_most_ms: u32,
    text: *mut c_char,
    text_bytes: usize,
    event: *mut FbTransferEvent,
) -> FbStatus {
    read(receiver, |receiver| {
        // SAFETY: this call's contract.
        let event = unsafe { cast::versioned_out(event) }?;
        let news = next(at_most_ms, || receiver.thread.poll(), |left| receiver.thread.wait(left))?;
        // SAFETY: the same.
        unsafe { Seen::news(news, |event| receiver.seen(event)).write(event, text, text_bytes) };
        Ok(())
    })
}

/// Copies a payload of which FB_TRANSFER_PAYLOAD has told, and drops it: `room` bytes are at least the event's
/// `payload_bytes`, which are written. FB_OUT_OF_RANGE for less room: the payload is still there. FB_CLOSED if there is
/// none, because it was read, or FB_TRANSFER_WHOLE or FB_TRANSFER_FAILED has come for the use.
///
/// # Safety
/// `bytes` has `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_receiver_payload(
    receiver: *const FbReceiver,
    request: u64,
    generation: u64,
    kind: u32,
    bytes: *mut u8,
    room: usize,
) -> FbStatus {
    read(receiver, |receiver| {
        // SAFETY: this call's contract.
        let into = unsafe { cast::room(bytes, room, "bytes") }?;
        let fence = Fence { request, generation };
        let wrong = |kind, place| Error::new(kind, "transfer receiver").at(place).with("request", request);
        receiver.told(|told| {
            let name = u8::try_from(kind).ok().map(|kind| (fence, kind));
            let found = name.and_then(|name| told.payloads.get(&name).map(|bytes| (name, bytes)));
            let (name, bytes) = found.ok_or_else(|| wrong(Kind::Closed, "a payload that is not there"))?;
            let to = into.get_mut(..bytes.len()).ok_or_else(|| {
                wrong(Kind::OutOfRange, "room for a payload").with("wanted", bytes.len() as u64)
            })?;
            to.iter_mut().zip(bytes).for_each(|(to, byte)| {
                to.write(*byte);
            });
            told.payloads.remove(&name);
            Ok(())
        })
    })
}

/// Writes a descriptor, as fb_sender_descriptor does.
///
/// # Safety
/// `descriptor` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_receiver_descriptor(
    receiver: *const FbReceiver,
    descriptor: *mut i32,
) -> FbStatus {
    read(receiver, |receiver| {
        // SAFETY: this call's contract.
        let descriptor = unsafe { cast::out(descriptor, "descriptor") }?;
        descriptor.set(receiver.thread.descriptor().as_raw_fd());
        Ok(())
    })
}

/// Writes what the receiver has seen.
///
/// # Safety
/// `stats` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_receiver_stats(receiver: *const FbReceiver, stats: *mut FbReceived) -> FbStatus {
    read(receiver, |receiver| {
        // SAFETY: this call's contract.
        let stats = unsafe { cast::versioned_out(stats) }?;
        let seen = receiver.thread.statistics();
        stats.set(&FbReceived {
            size: size_of::<FbReceived>(),
            whole: seen.whole,
            failed: seen.failed,
            runs: seen.moved.runs,
            bytes: seen.moved.bytes,
            wrong: seen.moved.wrong,
        });
        Ok(())
    })
}

/// Ends the thread and closes all connections. No page is written any more when it has returned FB_OK. Uses that are
/// not over fail at their senders. FB_BUSY while another thread waits in fb_receiver_poll.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_receiver_destroy(receiver: *mut FbReceiver) -> FbStatus {
    handle::end(receiver, |receiver| {
        // While the handle is valid: another destroy is FB_BUSY until nothing is written any more.
        receiver.thread.end();
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use forebay::transfer::End;

    use super::*;

    const FENCE: Fence = Fence { request: 3, generation: 4 };
    const CANARY: u8 = 0xEE;

    fn run(plane: u32, page: u32, offset: u64, stride: u64, (bytes, pieces): (u64, u32)) -> Run {
        let to = End { stage: 0, lane: 0, page, plane, offset, stride };
        let (layer, component, chunk, token, tokens, head, heads) = (0, 0, 0, 0, 1, 0, 1);
        Run { layer, component, chunk, token, tokens, head, heads, from: to, to, bytes, pieces }
    }

    /// Two planes of four pages of 10 bytes, 16 bytes apart, in a memory that is larger on both sides.
    #[test]
    fn a_run_is_written_only_inside_of_its_uses_pages() {
        let mut memory = vec![CANARY; 256];
        let plane = |from: usize, memory: &mut Vec<u8>| FbReceivePlane {
            address: memory[from..].as_mut_ptr().cast(),
            bytes: 3 * 16 + 10,
            page_bytes: 16,
        };
        let planes = [plane(32, &mut memory), plane(128, &mut memory)];
        // SAFETY: both are inside of the memory.
        let mut store = unsafe { Planes::new(planes.as_ptr(), 2, &[10, 10]) }.unwrap();
        store.uses.insert(FENCE, vec![3, 0]);
        let refused = [
            ("another use", Fence { generation: 5, ..FENCE }, run(0, 0, 0, 0, (4, 1))),
            ("another plane", FENCE, run(2, 0, 0, 0, (4, 1))),
            ("a page of the request that has none", FENCE, run(0, 2, 0, 0, (4, 1))),
            ("behind a page's rows, inside of the plane", FENCE, run(0, 1, 7, 0, (4, 1))),
            ("behind the plane", FENCE, run(0, 0, 10, 0, (4, 1))),
            ("far behind", FENCE, run(0, 0, u64::MAX - 1, 0, (4, 1))),
            ("no bytes", FENCE, run(0, 0, 0, 0, (0, 1))),
        ];
        for (what, fence, run) in refused {
            assert_eq!(store.store(fence, &run, &[1; 4]).unwrap_err().kind(), Kind::OutOfRange, "{what}");
            assert!(memory.iter().all(|byte| *byte == CANARY), "{what}");
        }
        // A second piece that leaves the page is not written; the first one was in it.
        assert!(store.store(FENCE, &run(0, 1, 0, 8, (4, 2)), &[1; 8]).is_err());
        store.store(FENCE, &run(1, 0, 1, 5, (4, 2)), &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        let mut wanted = vec![CANARY; 256];
        wanted[32..36].fill(1);
        let page = 128 + 3 * 16;
        wanted[page + 1..page + 5].copy_from_slice(&[1, 2, 3, 4]);
        wanted[page + 6..page + 10].copy_from_slice(&[5, 6, 7, 8]);
        assert_eq!(memory, wanted);
        // Nothing is written for a use that has ended.
        store.ended(FENCE);
        assert!(store.store(FENCE, &run(1, 0, 1, 5, (4, 2)), &[9; 8]).is_err());
        assert_eq!(memory, wanted);
        assert!(store.check(3).is_ok());
        assert_eq!(store.check(4).unwrap_err().kind(), Kind::OutOfRange);
    }
}
