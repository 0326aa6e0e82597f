//! A stand-in for a GPU's driver, for tests only; never shipped.
//!
//! [`Standin`] is a `libcuda.so.1` whose memory, streams, captures and graphs are in this process, with forebay's
//! kernels compiled in by the host's compiler. It is as strict as NVIDIA's driver. Where that driver leaves an order
//! open, a seed picks one: late, and across streams.
//!
//! **Private.** Each [`Standin`] loads its own copy of the library and so has its own globals: tests that run at the
//! same time share no memory, no counters and no failures. The copy is a file, which is removed with its [`Standin`].
//!
//! **Not modelled.** Time: operations take the host's time, and events read its clock. Memory that is slow to become
//! visible. A kernel runs as a whole when its turn comes, so two kernels of different streams never overlap; a missing
//! edge shows because the two may run in either order.

mod calls;
mod driver;
mod given;
mod run;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use calls::function;
pub use calls::{Access, Calls, Copy2d, CopyEnd, HostFunction, Location, MemoryProperties};
pub use driver::{Driver, Held};
pub use given::{Given, Hold};
pub use run::{Kernels, Launch, Memory};

/// The options of a stand-in driver.
#[derive(Clone, Debug)]
pub struct Options {
    /// The seed of the order. Without one, everything runs when it is enqueued, as far as its edges allow. With one,
    /// nothing runs by itself: calls that can notice progress run a random number of operations, of random streams.
    pub seed: Option<u64>,
    /// Bytes of device memory.
    pub memory: u64,
    /// The most bytes that one call registers; for more it returns 2, like systems that limit how much they pin at
    /// once.
    pub registration: u64,
    /// Compute capability: major, minor.
    pub capability: (u32, u32),
    /// The result of `cuDriverGetVersion`: 1000 x major + 10 x minor.
    pub driver_version: u32,
    /// The number of devices; with 0, `cuInit` returns 100.
    pub devices: u32,
    /// Threads of a warp, as the device reports. Kernels run with 32.
    pub warp: u32,
    /// Whether every call returns 34, like the stub libraries of toolkits.
    pub stub: bool,
    /// Whether physical memory can be exported as a descriptor.
    pub descriptors: bool,
    /// Multiprocessors, as the device reports. Kernels run on one processor of the host.
    pub processors: u32,
    /// Whether physical memory for other hosts of a fabric is available. The device claims it in any case.
    pub fabric: bool,
    /// Whether graphs can have conditional nodes.
    pub conditional_nodes: bool,
    /// Whether descriptors of memory are unavailable although the device claims them.
    pub withheld: bool,
    /// Whether physical memory is available on the nodes of the host. The driver supports it from 12.2 on.
    pub host_memory: bool,
    /// NUMA nodes of the host; with 0 the driver reports none. The devices are on the last node.
    pub nodes: u32,
    /// Bytes of a page of physical memory: a power of two from 4 KiB on.
    pub granule: u64,
    /// Whether memory that was imported can be reached. Without it, it lies on a device that this one cannot reach.
    pub peer_access: bool,
    /// Whether one call may enqueue several copies. The driver supports it from 12.8 on.
    pub batches: bool,
    /// Whether the device reports a cache before its memory.
    pub l2: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            seed: None,
            memory: 8 << 30,
            registration: u64::MAX,
            capability: (9, 0),
            driver_version: 12080,
            devices: 1,
            warp: 32,
            stub: false,
            descriptors: true,
            processors: 1,
            fabric: true,
            conditional_nodes: true,
            withheld: false,
            host_memory: true,
            nodes: 2,
            granule: 2 << 20,
            peer_access: true,
            batches: true,
            l2: true,
        }
    }
}

/// What was taken from a driver and not released.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Device memory.
    pub allocations: u64,
    /// Pinned host memory that the driver allocated.
    pub host_allocations: u64,
    /// Reserved address ranges.
    pub reservations: u64,
    /// Handles of physical memory.
    pub handles: u64,
    /// Mapped pieces.
    pub mappings: u64,
    /// Registered stretches of host memory.
    pub registrations: u64,
    /// Streams.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Captured graphs.
    pub graphs: u64,
    /// Graphs made ready to launch.
    pub execs: u64,
    /// Modules.
    pub modules: u64,
    /// Retains of primary contexts.
    pub contexts: u64,
    /// Bytes of host memory that are allocated or registered.
    pub pinned: u64,
}

/// The same layout as in the library's `state.h`.
#[repr(C)]
struct RawOptions {
    seed: u64,
    memory: u64,
    registration: u64,
    granule: u64,
    has_seed: u32,
    major: u32,
    minor: u32,
    driver_version: u32,
    devices: u32,
    warp: u32,
    stub: u32,
    descriptors: u32,
    processors: u32,
    fabric: u32,
    conditional_nodes: u32,
    withheld: u32,
    host_memory: u32,
    nodes: u32,
    peer_access: u32,
    batches: u32,
    l2: u32,
}

/// One driver with its own globals.
#[derive(Debug)]
pub struct Standin {
    handle: *mut c_void,
    path: String,
    control: Control,
    api: Calls,
}

// SAFETY: the handle is a name for the loader, which has its own lock, and every function of the library takes the
// library's lock.
unsafe impl Send for Standin {}
// SAFETY: as above.
unsafe impl Sync for Standin {}

/// The library's functions for the methods below.
#[derive(Clone, Copy, Debug)]
struct Control {
    configure: unsafe extern "C" fn(*const RawOptions),
    calls: unsafe extern "C" fn() -> u64,
    calls_of: unsafe extern "C" fn(*const c_char) -> u64,
    operations: unsafe extern "C" fn() -> u64,
    waits: unsafe extern "C" fn() -> u64,
    synchronizations: unsafe extern "C" fn() -> u64,
    prioritized: unsafe extern "C" fn() -> u64,
    fail_call: unsafe extern "C" fn(u64, c_int),
    failed: unsafe extern "C" fn() -> *const c_char,
    fail_operation: unsafe extern "C" fn(u64, c_int),
    hold: unsafe extern "C" fn(u64, c_int),
    without_waits: unsafe extern "C" fn(u64, u64),
    held_resources: unsafe extern "C" fn(*mut Resources),
    read: unsafe extern "C" fn(u64, *mut c_void, u64) -> c_int,
    write: unsafe extern "C" fn(u64, *const c_void, u64) -> c_int,
}

impl Control {
    /// # Safety
    /// `handle` is an open stand-in library.
    unsafe fn of(handle: *mut c_void) -> Option<Control> {
        // SAFETY: control.cpp declares each of them with the type of its field.
        unsafe {
            Some(Control {
                configure: function(handle, c"standin_configure")?,
                calls: function(handle, c"standin_calls")?,
                calls_of: function(handle, c"standin_calls_of")?,
                operations: function(handle, c"standin_operations")?,
                waits: function(handle, c"standin_waits")?,
                synchronizations: function(handle, c"standin_synchronizations")?,
                prioritized: function(handle, c"standin_prioritized")?,
                fail_call: function(handle, c"standin_fail_call")?,
                failed: function(handle, c"standin_failed")?,
                fail_operation: function(handle, c"standin_fail_operation")?,
                hold: function(handle, c"standin_hold")?,
                without_waits: function(handle, c"standin_without_waits")?,
                held_resources: function(handle, c"standin_held_resources")?,
                read: function(handle, c"standin_read")?,
                write: function(handle, c"standin_write")?,
            })
        }
    }
}

/// Removes the copies of processes that ended without doing so, such as crashed tests.
fn remove_stale(built: &Path) {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let Some(own) = name(built) else { return };
    let entries = built.parent().and_then(|folder| fs::read_dir(folder).ok());
    for path in entries.into_iter().flatten().flatten().map(|entry| entry.path()) {
        let of_copy =
            name(&path).and_then(|name| name.strip_prefix(&own)?.strip_prefix('.').map(str::to_owned));
        let process = of_copy.and_then(|numbers| numbers.split('.').next()?.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new("/proc").join(process.to_string()).exists()) {
            drop(fs::remove_file(path));
        }
    }
}

/// Returns a new path, one per driver and process.
fn copy_library() -> Option<PathBuf> {
    static COPIES: AtomicU64 = AtomicU64::new(0);
    static CLEANED: Once = Once::new();
    let built = option_env!("STANDIN_LIBRARY")?;
    CLEANED.call_once(|| remove_stale(Path::new(built)));
    let number = COPIES.fetch_add(1, Ordering::Relaxed);
    let copy = PathBuf::from(format!("{built}.{}.{number}", std::process::id()));
    fs::copy(built, &copy).ok()?;
    Some(copy)
}

impl Standin {
    /// Loads a driver. Returns `None` if this crate was built without g++: the test then skips and reports it.
    pub fn new(options: Options) -> Option<Standin> {
        let copy = copy_library()?;
        let path = copy.to_str()?.to_owned();
        let c_path = CString::new(path.clone()).ok()?;
        // SAFETY: a library of this crate, whose initialisers only build its own globals.
        let handle = unsafe { libc::dlopen(c_path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            drop(fs::remove_file(&copy));
            return None;
        }
        // SAFETY: just opened, and closed when this is dropped.
        let entries = unsafe { Control::of(handle).zip(Calls::of(handle)) };
        let Some((control, api)) = entries else {
            drop(fs::remove_file(&copy));
            return None;
        };
        let raw = RawOptions {
            seed: options.seed.unwrap_or(0),
            memory: options.memory,
            registration: options.registration,
            granule: options.granule,
            has_seed: options.seed.is_some().into(),
            major: options.capability.0,
            minor: options.capability.1,
            driver_version: options.driver_version,
            devices: options.devices,
            warp: options.warp,
            stub: options.stub.into(),
            descriptors: options.descriptors.into(),
            processors: options.processors,
            fabric: options.fabric.into(),
            conditional_nodes: options.conditional_nodes.into(),
            withheld: options.withheld.into(),
            host_memory: options.host_memory.into(),
            nodes: options.nodes,
            peer_access: options.peer_access.into(),
            batches: options.batches.into(),
            l2: options.l2.into(),
        };
        // SAFETY: the library copies its argument.
        unsafe { (control.configure)(&raw) };
        Some(Standin { handle, path, control, api })
    }

    /// The path under which the library is loaded; loading it again gives this driver, not another.
    pub fn library(&self) -> &str {
        &self.path
    }

    /// The driver's API, for tests that act as the engine.
    pub fn api(&self) -> &Calls {
        &self.api
    }

    /// The `n`-th driver call from now on, counted from 0, returns `code` and does nothing.
    pub fn fail_call(&self, n: u64, code: i32) {
        // SAFETY: the library is loaded; so for all methods below.
        unsafe { (self.control.fail_call)(n, code) }
    }

    /// The name of the call that [`Standin::fail_call`] has failed since.
    pub fn failed_call(&self) -> Option<String> {
        // SAFETY: the library is loaded.
        let name = unsafe { (self.control.failed)() };
        // SAFETY: a literal of the library, or null.
        (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }

    /// Driver calls so far.
    pub fn calls(&self) -> u64 {
        // SAFETY: the library is loaded.
        unsafe { (self.control.calls)() }
    }

    /// Calls so far of the function of this name, including refused ones.
    pub fn calls_of(&self, name: &CStr) -> u64 {
        // SAFETY: the library is loaded, and only compares the name.
        unsafe { (self.control.calls_of)(name.as_ptr()) }
    }

    /// The `n`-th operation (kernel, copy, fill) executed from now on, counted from 0, fails. From then on nothing
    /// runs, and every call returns `code`; calls that release something still release it.
    pub fn fail_operation(&self, n: u64, code: i32) {
        // SAFETY: the library is loaded.
        unsafe { (self.control.fail_operation)(n, code) }
    }

    /// Operations executed so far: kernels, copies and fills, including those of graphs.
    pub fn operations(&self) -> u64 {
        // SAFETY: the library is loaded.
        unsafe { (self.control.operations)() }
    }

    /// Nothing of the stream runs until [`Standin::let_go`]. A call that waits for it returns 702 if nothing else can
    /// run.
    pub fn hold(&self, stream: u64) {
        // SAFETY: the library is loaded.
        unsafe { (self.control.hold)(stream, 1) }
    }

    /// Ends [`Standin::hold`].
    pub fn let_go(&self, stream: u64) {
        // SAFETY: the library is loaded.
        unsafe { (self.control.hold)(stream, 0) }
    }

    /// Leaves out the edges of these `cuStreamWaitEvent` calls, counted from the first ever. A stream that such a wait
    /// draws into a capture is captured all the same, and counts as joined if such a wait would have joined it.
    pub fn without_waits(&self, numbers: Range<u64>) {
        // SAFETY: the library is loaded.
        unsafe { (self.control.without_waits)(numbers.start, numbers.end) }
    }

    /// Calls of `cuStreamWaitEvent` so far.
    pub fn waits(&self) -> u64 {
        // SAFETY: the library is loaded.
        unsafe { (self.control.waits)() }
    }

    /// Calls so far that may block the host or synchronise implicitly, including the memory calls.
    pub fn synchronizations(&self) -> u64 {
        // SAFETY: the library is loaded.
        unsafe { (self.control.synchronizations)() }
    }

    /// Graphs so far that were instantiated to run with their nodes' priorities. The priorities do not change the order
    /// in which the stand-in runs nodes.
    pub fn prioritized(&self) -> u64 {
        // SAFETY: the library is loaded.
        unsafe { (self.control.prioritized)() }
    }

    /// What is taken now; all 0 after everything was released.
    pub fn held_resources(&self) -> Resources {
        let mut resources = Resources::default();
        // SAFETY: the library writes one `Resources`, of the same layout.
        unsafe { (self.control.held_resources)(&mut resources) };
        resources
    }

    /// Reads memory as it is now, regardless of enqueued work; returns false outside the driver's memory.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        // SAFETY: the library checks the address, and writes as many bytes as the slice has.
        unsafe { (self.control.read)(address, bytes.as_mut_ptr().cast(), bytes.len() as u64) != 0 }
    }

    /// Changes memory now; returns false outside the driver's memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> bool {
        // SAFETY: the library checks the address, and reads as many bytes as the slice has.
        unsafe { (self.control.write)(address, bytes.as_ptr().cast(), bytes.len() as u64) != 0 }
    }
}

impl Drop for Standin {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.path));
        // SAFETY: opened once and closed once; any other opener holds a reference of its own.
        unsafe { libc::dlclose(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_copies_of_dead_processes_are_removed() {
        let folder = Path::new(env!("OUT_DIR")).join(format!("stale.{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        // No process has such a high number.
        let own = format!("lib.so.{}.3", std::process::id());
        let names = ["lib.so", "lib.so.4294967295.0", &own, "other.so.4294967295.0", "lib.so.none"];
        names.iter().for_each(|name| fs::write(folder.join(name), "").unwrap());
        remove_stale(&folder.join("lib.so"));
        let left = names.map(|name| folder.join(name).exists());
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(left, [true, false, true, true, true]);
    }
}
