//! A driver with a current context, and the tests' calls as functions that return what they create.

use std::ffi::c_void;

use crate::skip;
use forebay_standin::{Access, Calls, Location, MemoryProperties, Options, Standin};

pub const GRANULE: usize = 2 << 20;
pub const NON_BLOCKING: u32 = 1;
pub const GLOBAL: i32 = 0;
pub const THREAD_LOCAL: i32 = 1;
pub const RELAXED: i32 = 2;

/// The argument of `standin_add`.
#[repr(C)]
pub struct Add {
    pub to: u64,
    pub from: u64,
    pub count: u32,
    pub value: u32,
}

/// A PTX text with the parts that the stand-in inspects.
const IMAGE: &[u8] = b".version 8.0\n.target sm_80\n.visible .entry standin_add()\n\0";

/// Returns a driver. Without g++ the test skips and reports it.
pub fn standin(options: Options) -> Option<Standin> {
    let standin = Standin::new(options);
    if standin.is_none() {
        skip::skip("g++, which builds the stand-in driver");
    }
    standin
}

pub fn seeded(seed: u64) -> Options {
    Options { seed: Some(seed), ..Options::default() }
}

/// A driver whose first device's context is current on this thread.
pub struct Gpu<'a> {
    pub standin: &'a Standin,
    pub api: &'a Calls,
    pub context: u64,
}

/// Asserts success, and returns what the call wrote.
macro_rules! made {
    ($gpu:expr, $name:ident($($arg:expr),*)) => {{
        let mut made = 0;
        // SAFETY: pointers to locals of the size that the call writes.
        assert_eq!(unsafe { $gpu.api.$name(&mut made $(, $arg)*) }, 0, stringify!($name));
        made
    }};
}

/// Returns the code of a call without pointers.
macro_rules! code {
    ($gpu:expr, $name:ident($($arg:expr),*)) => {
        // SAFETY: words, and addresses that the driver checks.
        unsafe { $gpu.api.$name($($arg),*) }
    };
}

pub(crate) use {code, made};

impl<'a> Gpu<'a> {
    pub fn new(standin: &'a Standin) -> Gpu<'a> {
        let mut gpu = Gpu { standin, api: standin.api(), context: 0 };
        assert_eq!(code!(gpu, init(0)), 0);
        gpu.context = made!(gpu, primary_ctx_retain(0));
        assert_eq!(code!(gpu, ctx_set_current(gpu.context)), 0);
        gpu
    }

    pub fn stream(&self) -> u64 {
        made!(self, stream_create(NON_BLOCKING))
    }

    pub fn event(&self) -> u64 {
        made!(self, event_create(2))
    }

    pub fn memory(&self, bytes: usize) -> u64 {
        made!(self, mem_alloc(bytes))
    }

    pub fn record(&self, event: u64, stream: u64) {
        assert_eq!(code!(self, event_record(event, stream)), 0);
    }

    pub fn wait(&self, stream: u64, event: u64) {
        assert_eq!(code!(self, stream_wait_event(stream, event, 0)), 0);
    }

    /// Enqueues a fill with one word.
    pub fn fill(&self, to: u64, value: u32, count: usize, stream: u64) {
        assert_eq!(code!(self, memset_d32_async(to, value, count, stream)), 0);
    }

    pub fn copy(&self, to: u64, from: u64, bytes: usize, stream: u64) {
        assert_eq!(code!(self, memcpy_async(to, from, bytes, stream)), 0);
    }

    pub fn word(&self, address: u64) -> u32 {
        let mut bytes = [0; 4];
        assert!(self.standin.read(address, &mut bytes));
        u32::from_le_bytes(bytes)
    }

    pub fn module(&self) -> u64 {
        made!(self, module_load_data(IMAGE.as_ptr().cast()))
    }

    pub fn function(&self, module: u64) -> u64 {
        made!(self, module_get_function(module, c"standin_add".as_ptr()))
    }

    /// Launches `standin_add` and returns the code.
    pub fn add(&self, function: u64, mut args: Add, stream: u64) -> i32 {
        let mut params = [(&raw mut args).cast::<c_void>()];
        // SAFETY: one parameter, of the size that the kernel takes.
        unsafe {
            self.api.launch_kernel(
                function,
                2,
                1,
                1,
                64,
                1,
                1,
                0,
                stream,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }

    /// Physical memory that can be exported.
    pub fn handle(&self, bytes: usize) -> u64 {
        made!(self, mem_create(bytes, &DEVICE_MEMORY, 0))
    }

    pub fn reserve(&self, bytes: usize) -> u64 {
        made!(self, mem_address_reserve(bytes, 0, 0, 0))
    }

    pub fn open(&self, address: u64, bytes: usize) -> i32 {
        code!(self, mem_set_access(address, bytes, &READ_WRITE, 1))
    }

    /// Captures what `work` enqueues on `stream` and on the streams that wait for it; returns the graph, ready to
    /// launch.
    pub fn exec(&self, stream: u64, work: impl FnOnce()) -> u64 {
        assert_eq!(code!(self, stream_begin_capture(stream, THREAD_LOCAL)), 0);
        work();
        let mut graph = 0;
        assert_eq!(code!(self, stream_end_capture(stream, &mut graph)), 0);
        let exec = made!(self, graph_instantiate(graph, 0));
        assert_eq!(code!(self, graph_destroy(graph)), 0);
        exec
    }
}

const DEVICE: Location = Location { kind: 1, id: 0 };
pub const DEVICE_MEMORY: MemoryProperties =
    MemoryProperties { kind: 1, handle_types: 1, location: DEVICE, metadata: 0, flags: [0; 8] };
pub const READ_WRITE: Access = Access { location: DEVICE, flags: 3 };
