//! Recording the requests of a service as they arrive, as JSON lines in the common format of request traces.
//!
//! As in `trace`, a handle owns the writer until the trace is finished, and calls wait for the file. If the handle is
//! destroyed earlier, the file keeps all its lines and is still a complete trace.

use std::ffi::c_char;

use forebay::trace::requests::{Arrival, RequestWriter};
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned, create};
use crate::handle::{self, Object, change};
use crate::status::FbStatus;

/// A request at its arrival.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbArrival {
    /// sizeof(fb_arrival).
    pub size: usize,
    /// The arrival, in milliseconds since the start of the recording.
    pub milliseconds: u64,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Generated tokens; 0 if the number is not known when the request is recorded.
    pub output_tokens: u32,
    /// Ids of the prompt's blocks of `block_tokens` tokens (fb_requests_create), from the beginning of the prompt; the
    /// last block may be partial. An id identifies the block and everything before it.
    pub blocks: *const u64,
    /// The number of block ids.
    pub block_count: usize,
}

// SAFETY: words and pointers, which are words; two of 4 bytes between words of 8.
unsafe impl Plain for FbArrival {}
impl Versioned for FbArrival {
    const NAME: &'static str = "fb_arrival";
    const REQUIRED: usize = std::mem::offset_of!(FbArrival, block_count) + 8;
}

/// A request trace in progress.
pub struct FbRequests(Option<RequestWriter>);

impl Object for FbRequests {
    const KIND: u8 = 13;
    const NAME: &'static str = "fb_requests";
}

impl FbRequests {
    fn writer(&mut self) -> Result<&mut RequestWriter> {
        self.0.as_mut().ok_or_else(finished)
    }
}

fn finished() -> Error {
    Error::new(Kind::Closed, "record").at("the request trace was finished").hint("destroy its handle")
}

/// Begins a request trace in the new file `path`, which must not exist. Its prompts are recorded as blocks of
/// `block_tokens` tokens. On failure, `text` receives the reason.
///
/// # Safety
/// `path` ends with a zero byte; `text` has `text_bytes` bytes; `requests` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_requests_create(
    path: *const c_char,
    block_tokens: u32,
    text: *mut c_char,
    text_bytes: usize,
    requests: *mut *mut FbRequests,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let (path, requests) = (cast::path(path, "path")?, cast::out(requests, "requests")?);
            let create = || RequestWriter::create(path, block_tokens);
            requests.set(handle::give(|| Ok(FbRequests(Some(create()?))))?);
            Ok(())
        })
    }
}

/// Records one request. Record requests in the order of their arrival. On FB_OUT_OF_RANGE nothing is recorded and the
/// caller may continue with a corrected call. After FB_IO the file ends with the last line that was written before, and
/// every later call but fb_requests_destroy fails.
///
/// # Safety
/// `arrival` states its real size, and its blocks are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_requests_record(
    requests: *mut FbRequests,
    arrival: *const FbArrival,
) -> FbStatus {
    change(requests, |requests| {
        // SAFETY: this call's contract, for both.
        let (arrival, blocks) = unsafe {
            let arrival = cast::versioned(arrival)?;
            (arrival, cast::slice(arrival.blocks, arrival.block_count, "blocks")?)
        };
        requests.writer()?.record(&Arrival {
            milliseconds: arrival.milliseconds,
            input_tokens: arrival.input_tokens,
            output_tokens: arrival.output_tokens,
            blocks,
        })
    })
}

/// Writes the buffered lines. Written lines survive the process.
#[unsafe(no_mangle)]
pub extern "C" fn fb_requests_flush(requests: *mut FbRequests) -> FbStatus {
    change(requests, |requests| requests.writer()?.flush())
}

/// Flushes, and syncs the file to disk, so that it survives a loss of power.
#[unsafe(no_mangle)]
pub extern "C" fn fb_requests_sync(requests: *mut FbRequests) -> FbStatus {
    change(requests, |requests| requests.writer()?.sync())
}

/// Ends the trace: writes the buffered lines and syncs the file. `count`, which may be NULL, receives the number of
/// recorded requests. Readers reject a file without any request. Whatever the result, the handle can then only be
/// destroyed.
///
/// # Safety
/// `count` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_requests_finish(requests: *mut FbRequests, count: *mut u64) -> FbStatus {
    change(requests, |requests| {
        // SAFETY: this call's contract.
        let count = unsafe { cast::out_or_none(count, "count") }?;
        let recorded = requests.0.take().ok_or_else(finished)?.finish()?;
        if let Some(count) = count {
            count.set(recorded);
        }
        Ok(())
    })
}

/// Destroys the handle. All recorded lines are in the file, unless writing fails or a call returned FB_IO before.
#[unsafe(no_mangle)]
pub extern "C" fn fb_requests_destroy(requests: *mut FbRequests) -> FbStatus {
    handle::end(requests, |_| Ok(()))
}
