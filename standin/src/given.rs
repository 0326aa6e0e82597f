//! A driver from outside: the system's own, or one named by its library's path. This module has what tests need of it
//! and the library does not: the driver's calls for tests that act as the engine, and held streams.
//!
//! **Held streams.** A stream waits on the device for a word of pinned memory, and the host writes the word. A host
//! function that blocks would hold more streams: a driver may run the functions of all streams on one thread.

use std::ffi::{CString, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::Calls;

/// The number of words that streams wait for, used in turn: many more than tests hold at a time.
const WORDS: usize = 1024;
/// The value of a word that releases its stream.
const OPEN: u32 = 1;

/// A driver's library, and the primary context of its first device, which is retained until the process ends.
#[derive(Debug)]
pub struct Given {
    library: String,
    api: Calls,
    context: u64,
    words: u64,
    next: AtomicUsize,
    /// Never recorded: a query of it lets a stand-in run operations.
    event: u64,
    /// The stream of copies.
    stream: u64,
}

/// A stream that is held until this is dropped.
#[derive(Debug)]
pub struct Hold {
    driver: &'static Given,
    word: u64,
}

impl Given {
    /// Returns the driver that `FOREBAY_TEST_DRIVER` names, if it names one.
    ///
    /// # Errors
    /// The errors of [`Given::open`].
    pub fn named() -> Result<Option<&'static Given>, String> {
        static NAMED: OnceLock<Result<Option<&'static Given>, String>> = OnceLock::new();
        let open =
            || std::env::var("FOREBAY_TEST_DRIVER").ok().map(|library| Given::open(&library)).transpose();
        NAMED.get_or_init(open).clone()
    }

    /// Loads a driver, starts it and retains the context. The context is never released.
    ///
    /// # Errors
    /// The refused call, in words.
    pub fn open(library: &str) -> Result<&'static Given, String> {
        let path = CString::new(library).map_err(|error| error.to_string())?;
        // SAFETY: the system's driver, or a library that the caller named as one: the caller wants its code to run.
        let handle: *mut c_void = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(format!("{library} cannot be loaded"));
        }
        // SAFETY: just opened, and never closed.
        let api = unsafe { Calls::of_any(handle) }.ok_or("a name of a call")?;
        let (mut context, mut words, mut event, mut stream) = (0, 0, 0, 0);
        let done = |call: &str, code: i32| match code {
            0 => Ok(()),
            code => Err(format!("{library}: {call} returned {code}")),
        };
        // SAFETY: the results have room; the context is pushed before it is needed, and popped.
        unsafe {
            done("cuInit", api.init(0))?;
            done("cuDevicePrimaryCtxRetain", api.primary_ctx_retain(&mut context, 0))?;
            done("cuCtxPushCurrent", api.ctx_push_current(context))?;
            // Portable to every context, and at the same address on the device.
            const PORTABLE_MAPPED: u32 = 3;
            done("cuMemHostAlloc", api.mem_host_alloc(&mut words, 4 * WORDS, PORTABLE_MAPPED))?;
            const NO_TIMES: u32 = 2;
            done("cuEventCreate", api.event_create(&mut event, NO_TIMES))?;
            const NON_BLOCKING: u32 = 1;
            done("cuStreamCreate", api.stream_create(&mut stream, NON_BLOCKING))?;
            done("cuCtxPopCurrent", api.ctx_pop_current(&mut 0))?;
        }
        let (library, next) = (library.to_owned(), AtomicUsize::new(0));
        Ok(Box::leak(Box::new(Given { library, api, context, words, next, event, stream })))
    }

    /// The library's name or path, as given.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// The driver's API, for tests that act as the engine.
    pub fn api(&self) -> &Calls {
        &self.api
    }

    /// Until the result is dropped, nothing runs that is enqueued on the stream from now on.
    ///
    /// # Errors
    /// The refused call, in words.
    pub fn hold(&'static self, stream: u64) -> Result<Hold, String> {
        let number = self.next.fetch_add(1, Ordering::Relaxed) % WORDS;
        let hold = Hold { driver: self, word: self.words + 4 * number as u64 };
        hold.word().store(0, Ordering::Release);
        const EQUAL: u32 = 1;
        // SAFETY: the word lives as long as the process.
        let code = self.inside(|api| unsafe { api.stream_wait_value(stream, hold.word, OPEN, EQUAL) });
        if code == 0 { Ok(hold) } else { Err(format!("cuStreamWaitValue32_v2 returned {code}")) }
    }

    /// Copies, and waits for the copy; returns false if that is refused. A driver takes an address outside every slice
    /// for a host address: it does not refuse it, and may end the process.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> bool {
        // SAFETY: one address is a slice's, as tests have them; the other names as many bytes of the caller's.
        let copied = self.inside(|api| unsafe {
            match api.memcpy_async(to, from, bytes, self.stream) {
                0 => api.stream_synchronize(self.stream),
                code => code,
            }
        });
        copied == 0
    }

    /// Calls `work` with the context current, in a mode that no capture of this thread objects to.
    fn inside(&self, call: impl FnOnce(&Calls) -> i32) -> i32 {
        const RELAXED: i32 = 2;
        let mut mode = RELAXED;
        // SAFETY: the context is retained; the mode has room.
        unsafe {
            self.api.ctx_push_current(self.context);
            self.api.exchange_capture_mode(&mut mode);
            let code = call(&self.api);
            self.api.exchange_capture_mode(&mut mode);
            self.api.ctx_pop_current(&mut 0);
            code
        }
    }
}

impl Hold {
    fn word(&self) -> &AtomicU32 {
        // SAFETY: one of the driver's words, which live as long as the process; the device only reads it.
        unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(self.word as usize)) }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.word().store(OPEN, Ordering::Release);
        // SAFETY: the event lives as long as the process.
        self.driver.inside(|api| unsafe { api.event_query(self.driver.event) });
    }
}
