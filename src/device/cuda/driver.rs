//! NVIDIA's driver, loaded while the program runs, and the context that its calls need.
//!
//! **What may be missing** is found here, before anything is enqueued, and each is an error that says what to do:
//! the library itself, a stub of it that stands first on the path, a release that is too old, a symbol, a device,
//! or something that the device must be able to do.
//!
//! **Results are integers.** A newer driver answers codes that this source does not know: none of them can become
//! an invalid value of an enumeration. A [`Refusal`] carries the driver's own name for its code.
//!
//! **Handles** are the driver's pointers as `u64`. Each that is passed to the driver was given by it and was not
//! given back: the types of this folder that own one pass it on and give it back in their `Drop`. What is
//! passed by reference is alive during the call; the driver keeps none of it.
//!
//! **The context** is the device's primary one, which an engine's own runtime uses too. Its flags are never set
//! and it is never reset. A caller may have any context current, of any owner, or none: [`Context::enter`] puts
//! ours on top of its stack, and the guard takes it off again. Some calls may not run while a thread captures a
//! stream in the global mode; [`Context::relaxed`] lets them.
//!
//! **Giving back** has nobody to tell. A call that is refused is made once more, unless the context is lost: then it
//! may have been done all the same, and a handle that is gone may by now be somebody else's.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ops::Deref;

use super::CudaOptions;
use crate::error::{Error, Kind, Result};
use crate::os::{Faults, Library};

/// A pointer of the driver's, or an address of the device's.
pub(super) type Handle = u64;

/// Runs on a thread of the driver's.
pub(super) type HostFunction = extern "C" fn(*mut c_void);

/// The oldest driver that serves, as the driver says it.
const OLDEST_DRIVER: i32 = 12_000;
/// The oldest device that serves.
const OLDEST_DEVICE: (u32, u32) = (8, 0);
/// What kernels take a warp to be.
const WARP: i32 = 32;

/// Results that are told apart.
pub(super) mod code {
    pub const INVALID_VALUE: i32 = 1;
    pub const OUT_OF_MEMORY: i32 = 2;
    pub const STUB_LIBRARY: i32 = 34;
    pub const NO_DEVICE: i32 = 100;
    /// An event that was never recorded, where a time is asked for.
    pub const INVALID_HANDLE: i32 = 400;
    pub const NOT_SUPPORTED: i32 = 801;
    pub const NOT_READY: i32 = 600;
    /// The stream is in a state in which it cannot be captured: it is being captured.
    pub const ILLEGAL_STATE: i32 = 401;
    pub const ALREADY_REGISTERED: i32 = 712;
    /// The first and the last of what a capture forbids.
    pub const CAPTURE: std::ops::RangeInclusive<i32> = 900..=908;
    pub const CAPTURE_WRONG_THREAD: i32 = 908;

    /// Whether a result says that the context is lost: everything behind it fails.
    pub const fn is_sticky(code: i32) -> bool {
        // The driver is unloading; memory or a link is broken; a kernel faulted, or the context is gone.
        matches!(code, 4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721)
    }

    /// Whether a result says that the system has what was asked for, and does not give it: an operation of its own
    /// failed, or is not permitted or not supported here.
    pub const fn is_withheld(code: i32) -> bool {
        matches!(code, 304 | 800 | NOT_SUPPORTED)
    }

    /// Whether an error says that the context is lost: those of a refusal carry its code.
    pub fn is_lost(error: &crate::error::Error) -> bool {
        let code = error.number("code").and_then(|code| i32::try_from(code).ok());
        error.kind() == crate::error::Kind::DeviceFailed && code.is_some_and(is_sticky)
    }
}

/// Numbers of the driver's header.
pub(super) mod flag {
    pub const HOST_PORTABLE_MAPPED: u32 = 1 | 2;
    pub const STREAM_NON_BLOCKING: u32 = 1;
    /// Handles that the driver gives a meaning: the legacy stream, whose other name is 0, and the calling thread's.
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
    pub const ACCESS_READ_WRITE: u32 = 3;
    pub const LAUNCH_PROGRAMMATIC: u32 = 6;
    /// Threads of a block that a function can be launched with.
    pub const FUNCTION_THREADS: i32 = 0;
    /// Bytes of shared memory that a function has of its own.
    pub const FUNCTION_SHARED: i32 = 1;
    /// Bytes of shared memory that it can be launched with besides.
    pub const FUNCTION_MORE_SHARED: i32 = 8;
}

/// Numbers of what a device is asked.
pub(super) mod attribute {
    pub const WARP_SIZE: i32 = 10;
    pub const CAN_MAP_HOST_MEMORY: i32 = 19;
    pub const UNIFIED_ADDRESSING: i32 = 41;
    pub const CAPABILITY_MAJOR: i32 = 75;
    pub const CAPABILITY_MINOR: i32 = 76;
    pub const VIRTUAL_MEMORY: i32 = 102;
    pub const DESCRIPTOR_HANDLES: i32 = 103;
    /// The NUMA node beside the device; -1 where the system has none.
    pub const HOST_NUMA_ID: i32 = 134;
    pub const HOST_NUMA_MEMORY: i32 = 141;
    pub const SHARED_BYTES: i32 = 97;
    pub const PROCESSORS: i32 = 16;
    pub const COPY_ENGINES: i32 = 40;
}

/// Where memory is.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Location {
    pub kind: u32,
    pub ordinal: i32,
}

/// What physical memory should be: the driver's `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Property {
    pub kind: u32,
    pub handles: u32,
    pub location: Location,
    pub unused: [u64; 2],
}

/// Who may use a range: the driver's `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Access {
    pub location: Location,
    pub flags: u32,
}

/// A property of a launch: the driver's `CUlaunchAttribute`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct LaunchAttribute {
    pub id: u32,
    pub unused: u32,
    pub value: [u64; 8],
}

/// A launch's extents: the driver's `CUlaunchConfig`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct LaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub stream: Handle,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: u32,
}

const _: () = assert!(size_of::<Property>() == 32 && size_of::<Access>() == 12);
const _: () = assert!(size_of::<LaunchAttribute>() == 72 && size_of::<LaunchConfig>() == 56);

/// What the driver answered instead of doing it.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    function: &'static str,
    pub code: i32,
    /// The driver's name for the code; empty for what is no error.
    name: String,
}

/// The answer of a driver's call.
pub(super) type Answer<T = ()> = std::result::Result<T, Refusal>;

impl Refusal {
    /// As an error of `operation`.
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
            _ => Error::new(Kind::DeviceFailed, operation).at(place).with("code", number),
        }
    }
}

/// The driver's functions: each is named once, with the type of its symbol. Its method answers a [`Refusal`] for
/// every result but 0. Those behind a `?` may be missing: an answer of theirs, and no reason not to load the driver.
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
            /// The newest CUDA that it knows, as it says it: 1000 x major + 10 x minor.
            pub version: i32,
            /// The library, if it is to go with this.
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

            $(pub fn $name(&self, $($arg: $type),*) -> Answer {
                // SAFETY: the type is the symbol's; references live through the call, and handles are the
                // driver's own and not given back, as the module's head says.
                let code = unsafe { (self.$name)($($arg),*) };
                self.judge($symbol, code)
            })*

            $(pub fn $may(&self, $($one: $of),*) -> Answer {
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
    ? graph_conditional = "cuGraphConditionalHandleCreate"(
        out: &mut u64, graph: Handle, context: Handle, default: u32, flags: u32
    );
}

/// The operation that errors of loading name.
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
        format!("{library} is a stub to link with, no driver"),
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
    /// [`Kind::OsRefused`] says what is missing or too old; [`Kind::InvalidConfig`] for a library's name with
    /// a zero byte.
    pub fn load(options: &CudaOptions) -> Result<Driver> {
        let (name, faults) = (options.library.as_deref().unwrap_or("libcuda.so.1"), &*options.faults);
        // SAFETY: the system's driver, or a library that the caller named as one: its code runs by the caller's
        // will.
        let library = unsafe { Library::open(name, faults) }.map_err(|e| missing(&e))?;
        // The version comes first: an old driver lacks symbols, and is better told so than which.
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
            return Err(lacking(Kind::OsRefused, format!("the driver of {name} is too old"), NEWER)
                .with("found", found.unsigned_abs())
                .with("wanted", OLDEST_DRIVER.unsigned_abs()));
        }
        let driver = Driver::bind(library, found, options.unload, faults)?;
        driver.judge("cuDriverGetVersion", code).map_err(|refusal| driver.not_started(name, refusal))?;
        driver.init(0).map_err(|refusal| driver.not_started(name, refusal))?;
        Ok(driver)
    }

    /// How many devices there are.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] where there is none; [`Kind::DeviceFailed`].
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

    fn judge(&self, function: &'static str, code: i32) -> Answer {
        match code {
            0 => Ok(()),
            // Asked for on the step path, and no error.
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
        // SAFETY: the driver answers with a text of its own, which lives as long as it is loaded.
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
    /// Bytes of shared memory that a block can have that asks for them.
    pub shared_bytes: u32,
    /// Whether memory can be had by other processes.
    pub descriptors: bool,
}

impl Context {
    /// Retains the primary context of device `ordinal`, which must be able to do what is needed here.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] where there is no device at all; [`Kind::InvalidConfig`] where there is none of
    /// this number, or where it will not do; [`Kind::DeviceFailed`], [`Kind::OutOfMemory`].
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

    /// Which driver it is of: the same number for one library, and another for each that is loaded beside it.
    pub fn library(&self) -> usize {
        self.driver.host_register as usize
    }

    /// The newest CUDA that the driver knows.
    pub fn version(&self) -> i32 {
        self.driver.version
    }

    /// What the driver says of an attribute of the device.
    pub fn ask(&self, attribute: i32) -> Answer<i32> {
        let mut value = 0;
        self.driver.attribute(&mut value, attribute, self.device).map(|()| value)
    }

    /// Where this device's memory is.
    pub fn location(&self) -> Location {
        Location { kind: flag::LOCATION_DEVICE, ordinal: self.ordinal as i32 }
    }

    /// Makes this context current until the guard is dropped.
    pub fn enter(&self) -> Answer<Current<'_>> {
        self.driver.context_push(self.handle)?;
        Ok(Current { context: self, mode: None, here: PhantomData })
    }

    /// As [`Context::enter`]; what is called under the guard is no part of any capture, nor does it break one.
    pub fn relaxed(&self) -> Answer<Current<'_>> {
        let mut current = self.enter()?;
        let mut mode = flag::CAPTURE_RELAXED;
        self.driver.exchange_capture_mode(&mut mode)?;
        current.mode = Some(mode);
        Ok(current)
    }

    /// Gives something back; see the module's head.
    pub fn give_back(&self, call: impl Fn(&Driver) -> Answer) {
        twice(|| self.relaxed().and_then(|current| call(&current)));
    }
}

/// Makes a call that gives something back, and once more where it was refused for sure.
fn twice(call: impl Fn() -> Answer) {
    let _ = call().or_else(|refusal| if code::is_sticky(refusal.code) { Err(refusal) } else { call() });
}

impl Drop for Context {
    fn drop(&mut self) {
        twice(|| self.driver.primary_release(self.device));
    }
}

/// While it lives, the device's context is the thread's current one.
#[derive(Debug)]
pub(super) struct Current<'a> {
    context: &'a Context,
    /// The thread's capture mode before.
    mode: Option<i32>,
    /// What is current is the thread's own matter.
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
            // Done twice it is as done once.
            let set = || driver.exchange_capture_mode(&mut { mode });
            let _ = set().or_else(|_| set());
        }
        // Never twice: the second one could take the caller's own off.
        let _ = driver.context_pop(&mut 0);
    }
}

/// Whether a device of these attributes can do what is needed; answers its compute capability.
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

    /// What a device would say that can do everything, but for one attribute.
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
    fn a_device_that_cannot_do_what_is_needed_is_told_what() {
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
