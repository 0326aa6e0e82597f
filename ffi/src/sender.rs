//! The sender of a transfer: a rank of a prefill instance, its memory, and the thread that tells rows.
//!
//! All calls but the two that end it go through const pointers, because each of them is safe beside the others: the
//! library's thread takes them one after another. So a thread may wait in a poll while others say what is computed.

use std::ffi::{c_char, c_void};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use forebay::os::{Fallback, NoFaults, Request};
use forebay::transfer::memory::{Plane, Planes, SendMemory};
use forebay::transfer::sender::{Computed, Event, Options};
use forebay::transfer::socket::{SocketSender, Way};
use forebay::transfer::thread::SendThread;
use forebay::transfer::{Chunk, PAYLOAD_MAX, Reason, Sender, SendingEnd};
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned, create};
use crate::config;
use crate::handle::{self, Object, change, read};
use crate::status::FbStatus;
use crate::transfer::{
    FB_TRANSFER_ENDED, FB_TRANSFER_GRANTED, FB_TRANSFER_RELEASED, FbTransferConfig, FbTransferEvent,
    FbTransferSide, Seen, address, counted, next, page_bytes, refuse, time_or, within,
};

/// The most planes of a rank, and parts of a call.
const LIST_MAX: u32 = 1 << 14;

/// Where the pages of a plane are in a sender's memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbSendPlane {
    /// Bytes from an origin to the plane's page 0.
    pub offset: u64,
    /// Bytes from a page to the next one, at least the side's `page_bytes` of the plane.
    pub page_bytes: u64,
}

// SAFETY: words.
unsafe impl Plain for FbSendPlane {}

/// The memory of a sender, which the library makes. The rows of a part begin at an origin, which is a byte of it: page
/// `p` of plane `i` is at `origin` + `planes[i].offset` + `p` * `planes[i].page_bytes`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbSendMemory {
    /// sizeof(fb_send_memory).
    pub size: usize,
    /// Its bytes, rounded up to whole pages of the system.
    pub bytes: u64,
    /// The planes of this rank's stage, in the order of the side.
    pub planes: *const FbSendPlane,
    /// Their number.
    pub plane_count: u32,
    /// Optional: FB_MEMORY_ flags without FB_MEMORY_OVERCOMMIT. Default: reserved huge pages, allocated at creation and
    /// locked. fb_sender_fallback names each of these options that the system refused.
    pub memory: u32,
    /// Optional: 1 + the NUMA node that has the memory. Default: any.
    pub numa_node: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: words and a pointer, which is one; four words of 4 bytes at the end.
unsafe impl Plain for FbSendMemory {}
impl Versioned for FbSendMemory {
    const NAME: &'static str = "fb_send_memory";
    const REQUIRED: usize = std::mem::offset_of!(FbSendMemory, memory);
}

/// Rows of one layer of a request that are computed and written.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbComputed {
    /// sizeof(fb_computed), the same in all entries of an array.
    pub size: usize,
    /// The request.
    pub request: u64,
    /// Where the rows are: a byte of the sender's memory.
    pub origin: u64,
    /// The layer's number in the model.
    pub layer: u32,
    /// The first token.
    pub first: u32,
    /// How many tokens.
    pub tokens: u32,
    /// Optional: of a sender that divides requests by tokens (FB_TRANSFER_SPLIT_TOKENS), tokens of the chunk's batch
    /// that each rank has, padding included. Otherwise 0.
    pub chunk_slice: u32,
    /// With `chunk_slice`: the chunk's first token in its request.
    pub chunk_first: u32,
    /// With `chunk_slice`: the place of that token among the tokens of the batch.
    pub chunk_at: u32,
}

// SAFETY: words; six of 4 bytes at the end.
unsafe impl Plain for FbComputed {}
impl Versioned for FbComputed {
    const NAME: &'static str = "fb_computed";
    const REQUIRED: usize = std::mem::offset_of!(FbComputed, chunk_slice);
}

/// What a sender has seen since its creation.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbSent {
    /// sizeof(fb_sent), set by the caller.
    pub size: usize,
    /// Requests that have ended with all rows at their receivers.
    pub done: u64,
    /// Requests that have ended otherwise.
    pub failed: u64,
    /// Parts whose rows are held: computed, and not yet released.
    pub held: u64,
    /// Runs of bytes that were told, each as often as it was told.
    pub runs: u64,
    /// Runs that were told again because they had arrived with other bytes.
    pub again: u64,
    /// Messages that were sent again because no answer came in time.
    pub repeats: u64,
    /// Nanoseconds of all requests that were done, from when all was computed until the receivers had it: the part of
    /// transfers that computation does not hide.
    pub exposed_ns: u64,
    /// The longest of them.
    pub exposed_longest_ns: u64,
}

// SAFETY: words.
unsafe impl Plain for FbSent {}
impl Versioned for FbSent {
    const NAME: &'static str = "fb_sent";
    const REQUIRED: usize = std::mem::offset_of!(FbSent, exposed_longest_ns) + 8;
}

/// How long rows of a layer were held: from when they were computed until their memory was free again.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbLag {
    /// sizeof(fb_lag), set by the caller.
    pub size: usize,
    /// Parts that were released.
    pub count: u64,
    /// Nanoseconds of all of them.
    pub total_ns: u64,
    /// The longest.
    pub longest_ns: u64,
}

// SAFETY: words.
unsafe impl Plain for FbLag {}
impl Versioned for FbLag {
    const NAME: &'static str = "fb_lag";
    const REQUIRED: usize = std::mem::offset_of!(FbLag, longest_ns) + 8;
}

/// A rank of a sending instance, and its thread.
#[derive(Debug)]
pub struct FbSender {
    /// None after fb_sender_end.
    thread: Option<SendThread<SocketSender>>,
    memory: Arc<SendMemory>,
    fallbacks: Vec<Fallback>,
    way: Way,
}

impl Object for FbSender {
    const KIND: u8 = 15;
    const NAME: &'static str = "fb_sender";
}

impl FbSender {
    fn thread(&self) -> Result<&SendThread<SocketSender>> {
        self.thread.as_ref().ok_or_else(|| Error::new(Kind::Closed, "transfer sender").at("it was ended"))
    }
}

impl FbSendMemory {
    /// Makes the memory of a rank whose stage has pages of `page_bytes`.
    ///
    /// # Safety
    /// `planes` names `plane_count` planes.
    unsafe fn make(&self, page_bytes: &[u64]) -> Result<(SendMemory, Vec<Fallback>)> {
        let count = counted(self.plane_count, LIST_MAX, "plane_count")?;
        // SAFETY: the same contract.
        let planes = unsafe { cast::slice(self.planes, count, "planes") }?;
        if planes.len() != page_bytes.len() {
            return Err(refuse("plane_count", self.plane_count.into())
                .with("planes of the stage", page_bytes.len() as u64));
        }
        let mut made = Vec::with_capacity(count);
        for (plane, least) in planes.iter().zip(page_bytes) {
            if plane.page_bytes < *least {
                return Err(refuse("page_bytes of a plane", plane.page_bytes).with("least", *least));
            }
            made.push(Plane { offset: plane.offset, page_bytes: plane.page_bytes });
        }
        if self.reserved != 0 {
            return Err(refuse("reserved", self.reserved.into()));
        }
        let (memory, beyond) = config::memory(self.memory, self.numa_node)?;
        if beyond {
            return Err(refuse("memory", self.memory.into()).hint("leave FB_MEMORY_OVERCOMMIT out"));
        }
        let request = Request {
            bytes: self.bytes,
            huge: memory.huge,
            populate: memory.populate,
            lock: memory.lock,
            node: memory.node,
            shared: true,
        };
        SendMemory::new(&request, Planes(made), &NoFaults)
    }
}

impl FbTransferConfig {
    fn sender_options(&self) -> Options {
        let defaults = Options::default();
        Options {
            bulk_tokens: config::or(self.bulk_tokens, defaults.bulk_tokens),
            bytes_per_second: self.bytes_per_second,
            notice_bytes: config::or(self.notice_bytes.into(), defaults.notice_bytes),
            resend: time_or(self.resend_ms, defaults.resend),
            patience: time_or(self.patience_ms, defaults.patience),
            requests: self.requests_or(defaults.requests),
            ..defaults
        }
    }
}

/// Why a request has ended.
fn ended(request: u64, reason: Reason) -> Seen {
    let seen = Seen::new(FB_TRANSFER_ENDED).of(request);
    let why = match reason {
        Reason::Done => return seen,
        Reason::Aborted => "a side gave the request up",
        Reason::Corrupt => "rows arrived with other bytes, time after time",
        Reason::TimedOut => "the request took too long",
        Reason::PeerLost => "a receiver is gone",
        Reason::BadFormat => "a receiver sent what none of this version sends",
        Reason::Gone => "this rank holds the rows no longer",
    };
    seen.why(&Error::new(reason.kind(), "transfer sender").at(why).with("request", request))
}

fn seen(event: Event) -> Seen {
    match event {
        Event::Met { link, rank } => Seen::met(link, rank),
        Event::Granted { request, link, fence, first } => {
            let mut seen = Seen::new(FB_TRANSFER_GRANTED).of(request).on(link);
            (seen.event.generation, seen.event.first) = (fence.generation, first);
            seen
        }
        Event::Released { request, origin } => {
            let mut seen = Seen::new(FB_TRANSFER_RELEASED).of(request);
            seen.event.origin = origin;
            seen
        }
        Event::Ended { request, reason } => ended(request, reason),
    }
}

/// Rows as the library takes them.
fn computed(part: &FbComputed) -> Result<Computed> {
    let FbComputed { request, origin, layer, first, tokens, .. } = *part;
    let end = first.checked_add(tokens).ok_or_else(|| {
        let error = Error::new(Kind::OutOfRange, "transfer sender").at("first and tokens");
        error.with("first", first).with("tokens", tokens)
    })?;
    let chunk = (part.chunk_slice != 0).then_some(Chunk {
        first: part.chunk_first,
        at: part.chunk_at,
        slice: part.chunk_slice,
    });
    Ok(Computed { request, layer, tokens: first..end, chunk, origin })
}

/// Creates a sender: its memory, its end of the fabric, and the thread that drives them. It connects to no receiver
/// yet. FB_INVALID_CONFIG names a field; FB_OUT_OF_MEMORY, FB_OS_REFUSED for memory, sockets or a thread that cannot
/// be.
///
/// # Safety
/// All structs state their real sizes, and have as many entries as they say; `text` is NULL or has `text_bytes` bytes;
/// `sender` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_create(
    config: *const FbTransferConfig,
    side: *const FbTransferSide,
    memory: *const FbSendMemory,
    text: *mut c_char,
    text_bytes: usize,
    sender: *mut *mut FbSender,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let config = cast::versioned::<FbTransferConfig>(config)?;
            let (side, memory) = (cast::versioned(side)?, cast::versioned(memory)?);
            let sender = cast::out(sender, "sender")?;
            if !config.address.is_null() {
                return Err(refuse("address of a sender", 1).hint("pass NULL, and call fb_sender_add"));
            }
            sender.set(handle::give(|| {
                let (way, side) = (config.way()?, FbTransferSide::side(&side)?);
                let page_bytes = page_bytes(&side, config.stage)?;
                let machine = Sender::new(side, config.rank(), config.sender_options())?;
                let options = config.options()?;
                let (memory, fallbacks) = FbSendMemory::make(&memory, &page_bytes)?;
                let memory = Arc::new(memory);
                let fabric = SocketSender::new(way, options, Arc::clone(&memory))?;
                let thread = Some(SendThread::start(SendingEnd::new(machine, fabric))?);
                Ok(FbSender { thread, memory, fallbacks, way })
            })?);
            Ok(())
        })
    }
}

/// Writes where the sender's memory is, and its bytes. It is zero at first and stays there until fb_sender_destroy. The
/// engine, or a copy of a device, writes rows there before fb_sender_computed, and again only after
/// FB_TRANSFER_RELEASED of the rows' origin or FB_TRANSFER_ENDED of their request. A device that writes there may have
/// to register the memory first.
///
/// # Safety
/// `address` and `bytes` have room for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_memory(
    sender: *const FbSender,
    address: *mut *mut c_void,
    bytes: *mut u64,
) -> FbStatus {
    read(sender, |sender| {
        // SAFETY: this call's contract, for both.
        let (address, bytes) = unsafe { (cast::out(address, "address")?, cast::out(bytes, "bytes")?) };
        address.set(sender.memory.map().as_ptr().cast());
        bytes.set(sender.memory.map().len());
        Ok(())
    })
}

/// Copies fallback number `index`, from 0, to `text`, as fb_cache_fallback does: each is an option of the memory that
/// the system refused.
///
/// # Safety
/// `text` is NULL or has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_fallback(
    sender: *const FbSender,
    index: usize,
    text: *mut c_char,
    text_bytes: usize,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe { read(sender, |sender| crate::cache::write_fallback(&sender.fallbacks, index, text, text_bytes)) }
}

/// Connects to the receiver at `address`, an address as fb_transfer_config has it, again and again until
/// fb_sender_remove or the end. A process that does not listen yet is no error. FB_INVALID_CONFIG for a text that is no
/// address; one that the sender may not use comes out as FB_TRANSFER_REFUSED.
///
/// # Safety
/// `address` ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_add(sender: *const FbSender, address: *const c_char) -> FbStatus {
    read(sender, |sender| {
        // SAFETY: this call's contract.
        let address = unsafe { self::address(sender.way, address) }?;
        sender.thread()?.with(move |fabric| fabric.add(address));
        Ok(())
    })
}

/// Connects to the receiver at `address` no longer. A connection to it is lost.
///
/// # Safety
/// `address` ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_remove(sender: *const FbSender, address: *const c_char) -> FbStatus {
    read(sender, |sender| {
        // SAFETY: this call's contract.
        let address = unsafe { self::address(sender.way, address) }?;
        sender.thread()?.with(move |fabric| {
            fabric.remove(&address);
            Ok(())
        });
        Ok(())
    })
}

/// A request of `tokens` tokens is computed here. `request` is the number of this try at it: no other try has the same,
/// here or at any receiver. If a receiver has given it up already, it ends at once. It fails if it is not over within
/// `within_ms` milliseconds; 0: it may take any time, and the engine gives up by fb_sender_abort what no receiver
/// wants. Like all calls up to fb_sender_abort it waits for nothing: the sender's thread carries it out, and
/// FB_TRANSFER_REFUSED says if it could not, as for a request that has begun already. A call for a request that is over
/// does nothing.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_begin(
    sender: *const FbSender,
    request: u64,
    tokens: u32,
    within_ms: u32,
) -> FbStatus {
    read(sender, |sender| {
        sender.thread()?.begin(request, tokens, within(within_ms));
        Ok(())
    })
}

/// Says that `count` parts, at most 16,384, are computed and written. Call it when the copies into the memory have run,
/// not before: rows are read from now on. They stay as they are until FB_TRANSFER_RELEASED or FB_TRANSFER_ENDED.
/// FB_OUT_OF_RANGE for tokens that no request has. Waits for nothing (fb_sender_begin).
///
/// # Safety
/// `parts` has `count` entries, each of which states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_computed(
    sender: *const FbSender,
    parts: *const FbComputed,
    count: u32,
) -> FbStatus {
    read(sender, |sender| {
        let count = counted(count, LIST_MAX, "count")?;
        // SAFETY: this call's contract.
        let listed = unsafe { cast::versioned_list(parts, count) };
        let parts = listed.map(|part| computed(&part?)).collect::<Result<Vec<_>>>()?;
        sender.thread()?.computed(parts);
        Ok(())
    })
}

/// Adds a payload of a kind below 256, such as the first token, which reaches each receiver whole. FB_OUT_OF_RANGE for
/// a larger kind, and for bytes that no frame holds: about 64 KiB. Waits for nothing (fb_sender_begin).
///
/// # Safety
/// `bytes` has `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_payload(
    sender: *const FbSender,
    request: u64,
    kind: u32,
    bytes: *const u8,
    count: usize,
) -> FbStatus {
    read(sender, |sender| {
        // SAFETY: this call's contract.
        let bytes = unsafe { cast::slice(bytes, count, "bytes") }?;
        let wrong = |place| Error::new(Kind::OutOfRange, "transfer sender").at(place);
        let kind = u8::try_from(kind).map_err(|_| wrong("kind of a payload").with("given", kind))?;
        if count > PAYLOAD_MAX {
            return Err(wrong("bytes of a payload")
                .with("given", count as u64)
                .with("most", PAYLOAD_MAX as u64));
        }
        sender.thread()?.payload(request, kind, bytes.to_vec());
        Ok(())
    })
}

/// Says that all of a request is computed. FB_TRANSFER_ENDED follows when its receivers have it. Waits for nothing
/// (fb_sender_begin).
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_finish(sender: *const FbSender, request: u64) -> FbStatus {
    read(sender, |sender| {
        sender.thread()?.finish(request);
        Ok(())
    })
}

/// Gives a request up. Its rows are free when FB_TRANSFER_ENDED has come, and not before. Waits for nothing
/// (fb_sender_begin).
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_abort(sender: *const FbSender, request: u64) -> FbStatus {
    read(sender, |sender| {
        sender.thread()?.abort(request);
        Ok(())
    })
}

/// Takes the next event, or FB_TRANSFER_NOTHING after `at_most_ms` milliseconds; 0 looks once and never waits. `text`
/// receives the error of an event that has one; otherwise it is empty. Other calls go on while one waits; but
/// fb_sender_destroy is then FB_BUSY. If the thread has ended by an error, that error is returned after all events, and
/// no row is read any more. An engine that takes no events is lost to receivers when 65,536 wait.
///
/// # Safety
/// `event` states its real size; `text` is NULL or has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_poll(
    sender: *const FbSender,
    at_most_ms: u32,
    text: *mut c_char,
    text_bytes: usize,
    event: *mut FbTransferEvent,
) -> FbStatus {
    read(sender, |sender| {
        // SAFETY: this call's contract.
        let event = unsafe { cast::versioned_out(event) }?;
        let thread = sender.thread()?;
        let news = next(at_most_ms, || thread.poll(), |left| thread.wait(left))?;
        // SAFETY: the same.
        unsafe { Seen::news(news, seen).write(event, text, text_bytes) };
        Ok(())
    })
}

/// Writes a descriptor that is readable while there are events, for poll, epoll or asyncio. It is the sender's own:
/// only wait for it. It is closed by fb_sender_destroy.
///
/// # Safety
/// `descriptor` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_descriptor(sender: *const FbSender, descriptor: *mut i32) -> FbStatus {
    read(sender, |sender| {
        // SAFETY: this call's contract.
        let descriptor = unsafe { cast::out(descriptor, "descriptor") }?;
        descriptor.set(sender.thread()?.descriptor().as_raw_fd());
        Ok(())
    })
}

/// Writes what the sender has seen.
///
/// # Safety
/// `stats` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_stats(sender: *const FbSender, stats: *mut FbSent) -> FbStatus {
    read(sender, |sender| {
        // SAFETY: this call's contract.
        let stats = unsafe { cast::versioned_out(stats) }?;
        let seen = sender.thread()?.statistics();
        stats.set(&FbSent {
            size: size_of::<FbSent>(),
            done: seen.done,
            failed: seen.failed,
            held: seen.held,
            runs: seen.told.runs,
            again: seen.told.again,
            repeats: seen.told.repeats,
            exposed_ns: nanoseconds(seen.exposed.total),
            exposed_longest_ns: nanoseconds(seen.exposed.longest),
        });
        Ok(())
    })
}

/// Writes how long rows of a layer of the model were held; zeros if none were released.
///
/// # Safety
/// `lag` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_lag(sender: *const FbSender, layer: u32, lag: *mut FbLag) -> FbStatus {
    read(sender, |sender| {
        // SAFETY: this call's contract.
        let lag = unsafe { cast::versioned_out(lag) }?;
        let span = sender.thread()?.statistics().lag.get(&layer).copied().unwrap_or_default();
        lag.set(&FbLag {
            size: size_of::<FbLag>(),
            count: span.count,
            total_ns: nanoseconds(span.total),
            longest_ns: nanoseconds(span.longest),
        });
        Ok(())
    })
}

fn nanoseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Ends the thread and closes all connections; the memory stays. Requests that are not over fail at their receivers. No
/// event comes any more: from now on all calls but this one, fb_sender_memory, fb_sender_fallback and fb_sender_destroy
/// are FB_CLOSED. FB_BUSY while another thread waits in fb_sender_poll.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_end(sender: *mut FbSender) -> FbStatus {
    change(sender, |sender| {
        sender.thread = None;
        Ok(())
    })
}

/// Ends the thread, closes all connections, and frees the memory. Requests that are not over fail at their receivers.
/// FB_BUSY while another thread waits in fb_sender_poll.
///
/// # Safety
/// Nothing writes to the sender's memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_sender_destroy(sender: *mut FbSender) -> FbStatus {
    handle::end(sender, |sender| {
        sender.thread = None;
        Ok(())
    })
}
