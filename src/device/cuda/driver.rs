//! NVIDIA's driver, loaded at run time, and the context that its calls need.
//!
//! **What may be missing** is found at load time, and each gap is an error that says what to do: the library itself,
//! a stub library first on the path, a release that is too old, a symbol, a device, or a required ability of the
//! device.
//!
//! **Results are integers.** A newer driver returns codes that this source does not have, and none of them can become
//! an invalid enum value. A [`Refusal`] carries the driver's own name for its code.
//!
//! **Handles** are the driver's pointers as `u64`. Each handle passed to the driver came from it and is still valid:
//! a type of this folder owns it and gives it back in its `Drop`. Arguments passed by reference live through the
//! call, and the driver keeps no reference.
//!
//! **The context** is the device's primary context, which the engine's runtime uses too. This module never sets its
//! flags and never resets it. A caller may have any context current, or none: [`Context::enter`] pushes ours on the
//! thread's stack, and the guard pops it. Some calls are forbidden while any thread captures a stream in global mode;
//! [`Context::relaxed`] permits them.
//!
//! **Giving back** has no caller that could take an error. A refused call is made once more, unless the context is
//! lost: then the first call may have succeeded, and the handle may already belong to another owner.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ops::Deref;

use super::options::CudaOptions;
pub(super) use super::structs::{
    Access, BATCH_COPIES, Copy2d, CopyAttributes, LaunchAttribute, LaunchConfig, Location, Property,
};
use crate::error::{Error, Kind, Result};
use crate::os::{Faults, Library};

/// A pointer of the driver's, or an address of the device's.
pub(super) type Handle = u64;

/// A function that the driver calls on a thread of its own.
pub(super) type HostFunction = extern "C" fn(*mut c_void);

/// The oldest driver that is supported, in the driver's own numbering.
const OLDEST_DRIVER: i32 = 12_000;
/// The oldest compute capability that is supported.
const OLDEST_DEVICE: (u32, u32) = (8, 0);
/// The warp size that the kernels assume.
const WARP: i32 = 32;

/// Result codes that the device distinguishes.
pub(super) mod code {
    pub const INVALID_VALUE: i32 = 1;
    pub const OUT_OF_MEMORY: i32 = 2;
    pub const STUB_LIBRARY: i32 = 34;
    pub const NO_DEVICE: i32 = 100;
    pub const PEER_ACCESS: i32 = 217;
    /// A time was asked of an event that was never recorded.
    pub const INVALID_HANDLE: i32 = 400;
    pub const NOT_SUPPORTED: i32 = 801;
    pub const NOT_READY: i32 = 600;
    /// The stream cannot be captured, because it is already being captured.
    pub const ILLEGAL_STATE: i32 = 401;
    pub const ALREADY_REGISTERED: i32 = 712;
    /// The codes of calls that a capture forbids.
    pub const CAPTURE: std::ops::RangeInclusive<i32> = 900..=908;
    pub const CAPTURE_FORBIDS: i32 = 900;
    pub const CAPTURE_WRONG_THREAD: i32 = 908;

    /// Whether a code means that the context is lost, so that every later call fails.
    pub const fn is_sticky(code: i32) -> bool {
        // The driver is unloading; memory or a link is broken; a kernel faulted, or the context is gone.
        matches!(code, 4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721)
    }

    /// Whether a code means that the system refuses something that it has: an operating-system call failed, or is not
    /// permitted or not supported here.
    pub const fn is_withheld(code: i32) -> bool {
        matches!(code, 304 | 800 | NOT_SUPPORTED)
    }

    /// Whether an error means that the context is lost. Errors made from a refusal carry its code.
    pub fn is_lost(error: &crate::error::Error) -> bool {
        let code = error.number("code").and_then(|code| i32::try_from(code).ok());
        error.kind() == crate::error::Kind::DeviceFailed && code.is_some_and(is_sticky)
    }
}

/// Constants of the driver's header.
pub(super) mod flag {
    pub const HOST_PORTABLE_MAPPED: u32 = 1 | 2;
    pub const STREAM_NON_BLOCKING: u32 = 1;
    /// Handles with a special meaning: the legacy stream, which is also handle 0, and the per-thread stream.
    pub const STREAM_LEGACY: super::Handle = 1;
    pub const STREAM_PER_THREAD: super::Handle = 2;
    pub const EVENT_DEFAULT: u32 = 0;
    pub const EVENT_DISABLE_TIMING: u32 = 2;
    pub const CAPTURE_THREAD_LOCAL: i32 = 1;
    pub const CAPTURE_RELAXED: i32 = 2;
    pub const GRAPH_NODE_PRIORITIES: u64 = 8;
    pub const MEMORY_PINNED: u32 = 1;
    pub const LOCATION_DEVICE: u32 = 1;
    pub const LOCATION_HOST_NUMA: u32 = 3;
    pub const HANDLE_DESCRIPTOR: u32 = 1;
    pub const HANDLE_FABRIC: u32 = 8;
    pub const ACCESS_READ: u32 = 1;
    pub const ACCESS_READ_WRITE: u32 = 3;
    pub const LAUNCH_PROGRAMMATIC: u32 = 6;
    /// A copy of a batch reads its source in the stream's order.
    pub const COPY_IN_STREAM_ORDER: u32 = 1;
    /// A copy of a batch should run beside kernels.
    pub const COPY_BESIDE_COMPUTE: u32 = 1;
    /// The most threads per block that a function can be launched with.
    pub const FUNCTION_THREADS: i32 = 0;
    /// A function's static shared memory in bytes.
    pub const FUNCTION_SHARED: i32 = 1;
    /// The most dynamic shared memory that a function can be launched with, in bytes.
    pub const FUNCTION_MORE_SHARED: i32 = 8;
}

/// Numbers of device attributes.
pub(super) mod attribute {
    pub const WARP_SIZE: i32 = 10;
    /// The highest clock of a multiprocessor, in kHz.
    pub const CLOCK_RATE: i32 = 13;
    /// Bytes of L2; 0 on a device without it.
    pub const L2_BYTES: i32 = 38;
    pub const CAN_MAP_HOST_MEMORY: i32 = 19;
    pub const UNIFIED_ADDRESSING: i32 = 41;
    pub const CAPABILITY_MAJOR: i32 = 75;
    pub const CAPABILITY_MINOR: i32 = 76;
    pub const VIRTUAL_MEMORY: i32 = 102;
    pub const DESCRIPTOR_HANDLES: i32 = 103;
    /// The device's NUMA node; -1 where the system has none.
    pub const HOST_NUMA_ID: i32 = 134;
    pub const HOST_NUMA_MEMORY: i32 = 141;
    pub const SHARED_BYTES: i32 = 97;
    pub const PROCESSORS: i32 = 16;
    pub const COPY_ENGINES: i32 = 40;
}

/// A driver call's refusal.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    function: &'static str,
    pub code: i32,
    /// The driver's name for the code; empty if the code is no error.
    name: String,
}

/// The result of a driver call.
pub(super) type DriverResult<T = ()> = std::result::Result<T, Refusal>;

impl Refusal {
    /// The refusal as an error of `operation`.
    pub fn error(self, operation: &'static str) -> Error {
        let place = format!("{}: {}", self.function, self.name);
        let number = self.code.unsigned_abs();
        match self.code {
            code::OUT_OF_MEMORY => Error::new(Kind::OutOfMemory, operation).at(place),
            c if code::CAPTURE.contains(&c) => {
                Error::new(Kind::InvalidState, operation).at(place).with("code", number).hint(
                    "a captured stream takes a step's launches alone, from one thread, and joins its forks",
                )
            }
            code::PEER_ACCESS => Error::new(Kind::Unsupported, operation)
                .at(place)
                .with("code", number)
                .hint("these GPUs cannot reach each other's memory: take weights from the host's"),
            _ => Error::new(Kind::DeviceFailed, operation).at(place).with("code", number),
        }
    }
}

/// The driver's functions, each declared once with its symbol's type. Each method returns a [`Refusal`] for every
/// result but 0. Functions marked `?` may be missing: calling them then returns a refusal, and loading the driver
/// succeeds.
macro_rules! functions {
    ($($name:ident = $symbol:literal ($($arg:ident: $type:ty),*);)*
     $(? $may:ident = $lacked:literal ($($one:ident: $of:ty),*);)*) => {
        /// The loaded driver.
        #[derive(Debug)]
        pub(super) struct Driver {
            $($name: unsafe extern "C" fn($($type),*) -> i32,)*
            /// The driver's name for a result.
            name_of: unsafe extern "C" fn(i32, &mut *const c_char) -> i32,
            $($may: Option<unsafe extern "C" fn($($of),*) -> i32>,)*
            /// The newest CUDA version that it supports: 1000 x major + 10 x minor.
            pub version: i32,
            /// The library, if it is unloaded with this.
            _library: Option<Library>,
        }

        impl Driver {
            fn bind(library: Library, version: i32, unload: bool, faults: &dyn Faults) -> Result<Driver> {
                // SAFETY: the driver's header gives each symbol this type, pointers and handles being addresses,
                // enumerations integers, and sizes 64 bits on the one platform there is.
                unsafe {
                    Ok(Driver {
                        $($name: find::<unsafe extern "C" fn($($type),*) -> i32>(&library, $symbol, faults)?,)*
                        name_of: find(&library, "cuGetErrorName", faults)?,
                        $($may: find::<unsafe extern "C" fn($($of),*) -> i32>(&library, $lacked, faults).ok(),)*
                        version,
                        _library: if unload { Some(library) } else { library.stay(); None },
                    })
                }
            }

            $(pub fn $name(&self, $($arg: $type),*) -> DriverResult {
                // SAFETY: the type is the symbol's; references live through the call, and handles are the
                // driver's own and not given back, as the module's head says.
                let code = unsafe { (self.$name)($($arg),*) };
                self.judge($symbol, code)
            })*

            $(#[allow(clippy::too_many_arguments, reason = "they are the driver's")]
            pub fn $may(&self, $($one: $of),*) -> DriverResult {
                let Some(function) = self.$may else {
                    let name = "this driver does not have it".to_owned();
                    return Err(Refusal { function: $lacked, code: code::NOT_SUPPORTED, name });
                };
                // SAFETY: as above.
                let code = unsafe { function($($one),*) };
                self.judge($lacked, code)
            })*
        }
    };
}

functions! {
    init = "cuInit"(flags: u32);
    device_count = "cuDeviceGetCount"(out: &mut i32);
    device = "cuDeviceGet"(out: &mut i32, ordinal: i32);
    attribute = "cuDeviceGetAttribute"(out: &mut i32, attribute: i32, device: i32);
    device_name = "cuDeviceGetName"(out: &mut [u8; 256], bytes: i32, device: i32);
    device_bus = "cuDeviceGetPCIBusId"(out: &mut [u8; 256], bytes: i32, device: i32);
    primary_retain = "cuDevicePrimaryCtxRetain"(out: &mut Handle, device: i32);
    primary_release = "cuDevicePrimaryCtxRelease_v2"(device: i32);
    context_push = "cuCtxPushCurrent_v2"(context: Handle);
    context_pop = "cuCtxPopCurrent_v2"(out: &mut Handle);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: &mut i32);
    module_load = "cuModuleLoadData"(out: &mut Handle, image: *const u8);
    module_unload = "cuModuleUnload"(module: Handle);
    module_function = "cuModuleGetFunction"(out: &mut Handle, module: Handle, name: *const c_char);
    function_attribute = "cuFuncGetAttribute"(out: &mut i32, attribute: i32, function: Handle);
    set_function_attribute = "cuFuncSetAttribute"(function: Handle, attribute: i32, value: i32);
    memory_info = "cuMemGetInfo_v2"(free: &mut u64, total: &mut u64);
    allocate = "cuMemAlloc_v2"(out: &mut Handle, bytes: u64);
    free = "cuMemFree_v2"(address: Handle);
    host_allocate = "cuMemHostAlloc"(out: &mut Handle, bytes: u64, flags: u32);
    host_free = "cuMemFreeHost"(address: Handle);
    host_register = "cuMemHostRegister_v2"(address: Handle, bytes: u64, flags: u32);
    host_unregister = "cuMemHostUnregister"(address: Handle);
    host_device_address = "cuMemHostGetDevicePointer_v2"(out: &mut Handle, address: Handle, flags: u32);
    granularity = "cuMemGetAllocationGranularity"(out: &mut u64, property: &Property, option: i32);
    memory_create = "cuMemCreate"(out: &mut Handle, bytes: u64, property: &Property, flags: u64);
    memory_release = "cuMemRelease"(memory: Handle);
    memory_export = "cuMemExportToShareableHandle"(out: &mut [u64; 8], memory: Handle, kind: u32, flags: u64);
    memory_import = "cuMemImportFromShareableHandle"(out: &mut Handle, descriptor: u64, kind: u32);
    address_reserve = "cuMemAddressReserve"(
        out: &mut Handle, bytes: u64, alignment: u64, address: Handle, flags: u64
    );
    address_free = "cuMemAddressFree"(address: Handle, bytes: u64);
    map = "cuMemMap"(address: Handle, bytes: u64, offset: u64, memory: Handle, flags: u64);
    unmap = "cuMemUnmap"(address: Handle, bytes: u64);
    set_access = "cuMemSetAccess"(address: Handle, bytes: u64, access: &Access, count: u64);
    copy = "cuMemcpyAsync"(to: Handle, from: Handle, bytes: u64, stream: Handle);
    copy_2d = "cuMemcpy2DAsync_v2"(copy: &Copy2d, stream: Handle);
    fill_bytes = "cuMemsetD8Async"(address: Handle, value: u8, count: u64, stream: Handle);
    fill_words = "cuMemsetD32Async"(address: Handle, value: u32, count: u64, stream: Handle);
    priorities = "cuCtxGetStreamPriorityRange"(least: &mut i32, greatest: &mut i32);
    stream_create = "cuStreamCreateWithPriority"(out: &mut Handle, flags: u32, priority: i32);
    stream_destroy = "cuStreamDestroy_v2"(stream: Handle);
    stream_synchronize = "cuStreamSynchronize"(stream: Handle);
    stream_wait = "cuStreamWaitEvent"(stream: Handle, event: Handle, flags: u32);
    stream_context = "cuStreamGetCtx"(stream: Handle, out: &mut Handle);
    event_create = "cuEventCreate"(out: &mut Handle, flags: u32);
    event_destroy = "cuEventDestroy_v2"(event: Handle);
    event_record = "cuEventRecord"(event: Handle, stream: Handle);
    event_query = "cuEventQuery"(event: Handle);
    event_synchronize = "cuEventSynchronize"(event: Handle);
    event_elapsed = "cuEventElapsedTime"(milliseconds: &mut f32, from: Handle, to: Handle);
    host_function = "cuLaunchHostFunc"(stream: Handle, function: HostFunction, data: *mut c_void);
    launch = "cuLaunchKernelEx"(
        config: &LaunchConfig, function: Handle, parameters: &[*const c_void; 1], extra: Handle
    );
    capture_begin = "cuStreamBeginCapture_v2"(stream: Handle, mode: i32);
    capture_end = "cuStreamEndCapture"(stream: Handle, out: &mut Handle);
    capture_info = "cuStreamGetCaptureInfo_v2"(
        stream: Handle, status: &mut i32, id: &mut u64, graph: Handle, edges: Handle, edge_count: Handle
    );
    graph_create = "cuGraphCreate"(out: &mut Handle, flags: u32);
    graph_instantiate = "cuGraphInstantiateWithFlags"(out: &mut Handle, graph: Handle, flags: u64);
    graph_destroy = "cuGraphDestroy"(graph: Handle);
    graph_upload = "cuGraphUpload"(graph: Handle, stream: Handle);
    graph_launch = "cuGraphLaunch"(graph: Handle, stream: Handle);
    graph_discard = "cuGraphExecDestroy"(graph: Handle);
    ? copy_batch = "cuMemcpyBatchAsync"(
        to: &[Handle; BATCH_COPIES], from: &[Handle; BATCH_COPIES], bytes: &[u64; BATCH_COPIES], count: u64,
        attributes: &CopyAttributes, first: &u64, attribute_count: u64, refused: &mut u64, stream: Handle
    );
    ? graph_conditional = "cuGraphConditionalHandleCreate"(
        out: &mut u64, graph: Handle, context: Handle, default: u32, flags: u32
    );
}

/// The operation's name in errors of loading.
const OPERATION: &str = "CUDA driver";

const NEWER: &str = "install NVIDIA's driver of release 525 or newer, or use the host device";

fn lacking(kind: Kind, place: impl Into<std::borrow::Cow<'static, str>>, hint: &'static str) -> Error {
    Error::new(kind, OPERATION).at(place).hint(hint)
}

fn missing(e: &Error) -> Error {
    lacking(e.kind(), e.place().to_owned(), NEWER)
}

fn stub(library: &str) -> Error {
    lacking(
        Kind::OsRefused,
        format!("{library} is a stub for linking, not a driver"),
        "take the toolkit's folder of stubs off the library path, or name the driver's own libcuda.so.1",
    )
}

/// A symbol as a function of type `F`.
///
/// # Safety
/// `F` is a function's pointer, of the type that the library's header gives the symbol.
unsafe fn find<F: Copy>(library: &Library, symbol: &str, faults: &dyn Faults) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let address = library.symbol(symbol, faults).map_err(|e| missing(&e))?.as_ptr();
    // SAFETY: both are pointers, and the caller knows the type.
    Ok(unsafe { std::mem::transmute_copy(&address) })
}

impl Driver {
    /// Loads and starts the driver.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] says what is missing; [`Kind::Unsupported`] for a driver that is too old;
    /// [`Kind::InvalidConfig`] for a library's name with a zero byte.
    pub fn load(options: &CudaOptions) -> Result<Driver> {
        let (name, faults) = (options.library.as_deref().unwrap_or("libcuda.so.1"), &*options.faults);
        // SAFETY: the system's driver, or a library that the caller named as the driver, and so lets run its code.
        let library = unsafe { Library::open(name, faults) }.map_err(|e| missing(&e))?;
        // Check the version first: for an old driver, "too old" helps the reader more than the name of a missing
        // symbol.
        // SAFETY: the driver's header gives this symbol this type.
        let version: unsafe extern "C" fn(&mut i32) -> i32 =
            unsafe { find(&library, "cuDriverGetVersion", faults)? };
        let mut found = 0;
        // SAFETY: the type is the symbol's, and the number is alive.
        let code = unsafe { version(&mut found) };
        if code == code::STUB_LIBRARY {
            return Err(stub(name));
        }
        if code == 0 && found < OLDEST_DRIVER {
            return Err(lacking(Kind::Unsupported, format!("the driver of {name} is too old"), NEWER)
                .with("found", found.unsigned_abs())
                .with("wanted", OLDEST_DRIVER.unsigned_abs()));
        }
        let driver = Driver::bind(library, found, options.unload, faults)?;
        driver.judge("cuDriverGetVersion", code).map_err(|refusal| driver.not_started(name, refusal))?;
        driver.init(0).map_err(|refusal| driver.not_started(name, refusal))?;
        Ok(driver)
    }

    /// The number of devices.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] if there is none; [`Kind::DeviceFailed`].
    pub fn devices(&self) -> Result<u32> {
        let mut count = 0;
        match self.device_count(&mut count) {
            Err(refusal) if refusal.code != code::NO_DEVICE => Err(refusal.error(OPERATION)),
            Ok(()) if count > 0 => Ok(count.unsigned_abs()),
            _ => Err(no_device()),
        }
    }

    fn not_started(&self, library: &str, refusal: Refusal) -> Error {
        match refusal.code {
            code::STUB_LIBRARY => stub(library),
            code::NO_DEVICE => no_device(),
            code => lacking(
                Kind::OsRefused,
                format!("{}: {}", refusal.function, refusal.name),
                "see that nvidia-smi works for this user: module loaded, device files there, one driver's release",
            )
            .with("code", code.unsigned_abs()),
        }
    }

    /// What a function's result means.
    pub fn judge(&self, function: &'static str, code: i32) -> DriverResult {
        match code {
            0 => Ok(()),
            // Not an error, and frequent on the step path, so the name is not looked up.
            code::NOT_READY => Err(Refusal { function, code, name: String::new() }),
            _ => Err(Refusal { function, code, name: self.name_of(code) }),
        }
    }

    /// The driver's name for a result.
    fn name_of(&self, code: i32) -> String {
        let mut text = std::ptr::null();
        // SAFETY: the type is the symbol's, and the pointer is alive.
        let answer = unsafe { (self.name_of)(code, &mut text) };
        if answer != 0 || text.is_null() {
            return format!("unknown code {code}");
        }
        // SAFETY: the driver returns a text of its own, which lives as long as the driver is loaded.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

fn no_device() -> Error {
    lacking(
        Kind::OsRefused,
        "no device",
        "see what nvidia-smi and CUDA_VISIBLE_DEVICES say, or use the host device",
    )
}

/// A device's primary context, retained.
#[derive(Debug)]
pub(super) struct Context {
    driver: Driver,
    /// The driver's number for the device.
    pub device: i32,
    ordinal: u32,
    pub handle: Handle,
    /// Compute capability.
    pub capability: (u32, u32),
    /// The most shared memory that a block can opt in to, in bytes.
    pub shared_bytes: u32,
    /// Whether device memory can be exported to other processes by descriptors.
    pub descriptors: bool,
}

impl Context {
    /// Retains the primary context of device `ordinal`, after checking that the device has the required abilities.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] if there is no device at all; [`Kind::InvalidConfig`] if there is none of this number;
    /// [`Kind::Unsupported`] if it lacks a required ability; [`Kind::DeviceFailed`], [`Kind::OutOfMemory`].
    pub fn retain(driver: Driver, ordinal: u32) -> Result<Context> {
        let failed = |refusal: Refusal| refusal.error(OPERATION);
        let count = driver.devices()?;
        if ordinal >= count {
            return Err(lacking(
                Kind::InvalidConfig,
                "no such device",
                "name one that is there, counted from 0",
            )
            .with("device", ordinal)
            .with("devices", count));
        }
        let mut device = 0;
        driver.device(&mut device, ordinal as i32).map_err(failed)?;
        let ask = |attribute| {
            let mut value = 0;
            driver.attribute(&mut value, attribute, device).map_err(failed)?;
            Ok(value)
        };
        let capability = suits(ask)?;
        let descriptors = ask(attribute::DESCRIPTOR_HANDLES)? != 0;
        let shared_bytes = ask(attribute::SHARED_BYTES)?.unsigned_abs();
        let mut handle = 0;
        driver.primary_retain(&mut handle, device).map_err(failed)?;
        Ok(Context { driver, device, ordinal, handle, capability, shared_bytes, descriptors })
    }

    /// Whether this is the context of that handle.
    pub fn is(&self, handle: Handle) -> bool {
        self.handle == handle
    }

    /// An id of the driver library: equal for contexts of one library, different for each further library.
    pub fn library(&self) -> usize {
        self.driver.host_register as usize
    }

    /// The newest CUDA version that the driver supports.
    pub fn version(&self) -> i32 {
        self.driver.version
    }

    /// Reads an attribute of the device.
    pub fn ask(&self, attribute: i32) -> DriverResult<i32> {
        let mut value = 0;
        self.driver.attribute(&mut value, attribute, self.device).map(|()| value)
    }

    /// The location of this device's memory.
    pub fn location(&self) -> Location {
        Location { kind: flag::LOCATION_DEVICE, ordinal: self.ordinal as i32 }
    }

    /// Makes this context current until the guard is dropped.
    pub fn enter(&self) -> DriverResult<Current<'_>> {
        self.driver.context_push(self.handle)?;
        Ok(Current { context: self, mode: None, here: PhantomData })
    }

    /// As [`Context::enter`]; calls under the guard are not part of any capture and do not break one.
    pub fn relaxed(&self) -> DriverResult<Current<'_>> {
        let mut current = self.enter()?;
        let mut mode = flag::CAPTURE_RELAXED;
        self.driver.exchange_capture_mode(&mut mode)?;
        current.mode = Some(mode);
        Ok(current)
    }

    /// Makes a call that gives something back; see the module's head.
    pub fn give_back(&self, call: impl Fn(&Driver) -> DriverResult) {
        twice(|| self.relaxed().and_then(|current| call(&current)));
    }
}

/// Makes a call that gives something back, and repeats it once if it was certainly refused.
fn twice(call: impl Fn() -> DriverResult) {
    let _ = call().or_else(|refusal| if code::is_sticky(refusal.code) { Err(refusal) } else { call() });
}

impl Drop for Context {
    fn drop(&mut self) {
        twice(|| self.driver.primary_release(self.device));
    }
}

/// A guard: while it lives, the device's context is the thread's current one.
#[derive(Debug)]
pub(super) struct Current<'a> {
    context: &'a Context,
    /// The thread's capture mode before.
    mode: Option<i32>,
    /// Not `Send`: the current context belongs to the thread.
    here: PhantomData<*const ()>,
}

impl Deref for Current<'_> {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        &self.context.driver
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let driver = &self.context.driver;
        if let Some(mode) = self.mode {
            // Setting it twice does no harm.
            let set = || driver.exchange_capture_mode(&mut { mode });
            let _ = set().or_else(|_| set());
        }
        // Never repeated: a second pop could remove the caller's own context.
        let _ = driver.context_pop(&mut 0);
    }
}

/// Checks that a device with these attributes has the required abilities; returns its compute capability.
fn suits(ask: impl Fn(i32) -> Result<i32>) -> Result<(u32, u32)> {
    const OTHER: &str = "choose another device";
    let major = ask(attribute::CAPABILITY_MAJOR)?.unsigned_abs();
    let capability = (major, ask(attribute::CAPABILITY_MINOR)?.unsigned_abs());
    if capability < OLDEST_DEVICE {
        return Err(lacking(Kind::Unsupported, "compute capability below 8.0", OTHER)
            .with("major", capability.0)
            .with("minor", capability.1));
    }
    let warp = ask(attribute::WARP_SIZE)?;
    if warp != WARP {
        return Err(lacking(Kind::Unsupported, "threads of a warp", OTHER)
            .with("found", warp.unsigned_abs())
            .with("wanted", WARP.unsigned_abs()));
    }
    for (attribute, what) in [
        (attribute::CAN_MAP_HOST_MEMORY, "the device does not map host memory"),
        (attribute::UNIFIED_ADDRESSING, "the device has addresses of its own for host memory"),
        (attribute::VIRTUAL_MEMORY, "the device has no virtual memory management"),
    ] {
        if ask(attribute)? == 0 {
            return Err(lacking(Kind::Unsupported, what, OTHER));
        }
    }
    Ok(capability)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The attributes of a device that has every ability except one.
    fn but(missing: i32, value: i32) -> impl Fn(i32) -> Result<i32> {
        move |attribute| {
            Ok(match attribute {
                of if of == missing => value,
                attribute::WARP_SIZE => WARP,
                attribute::CAPABILITY_MAJOR => 8,
                _ => 1,
            })
        }
    }

    #[test]
    fn a_device_that_lacks_an_ability_is_refused_by_its_name() {
        assert_eq!(suits(but(-1, 0)), Ok((8, 1)));
        assert_eq!(suits(but(attribute::CAPABILITY_MINOR, 0)), Ok((8, 0)));
        for (attribute, value, place) in [
            (attribute::CAPABILITY_MAJOR, 7, "compute capability below 8.0"),
            (attribute::WARP_SIZE, 64, "threads of a warp"),
            (attribute::CAN_MAP_HOST_MEMORY, 0, "the device does not map host memory"),
            (attribute::UNIFIED_ADDRESSING, 0, "the device has addresses of its own for host memory"),
            (attribute::VIRTUAL_MEMORY, 0, "the device has no virtual memory management"),
        ] {
            let refused = suits(but(attribute, value)).unwrap_err();
            assert_eq!((refused.kind(), refused.place()), (Kind::Unsupported, place));
        }
    }

    #[test]
    fn a_result_is_an_error_of_its_kind_with_the_drivers_name() {
        let of = |code, name: &str| Refusal { function: "cuX", code, name: name.to_owned() }.error("test");
        let kinds = [(2, Kind::OutOfMemory), (900, Kind::InvalidState), (908, Kind::InvalidState)];
        for (code, kind) in kinds.into_iter().chain([1, 700, 909, 999, -1].map(|c| (c, Kind::DeviceFailed))) {
            let error = of(code, "NAME");
            assert_eq!((error.kind(), error.place()), (kind, "cuX: NAME"), "{code}");
        }
    }
}
