//! The device object: the memory and streams that caches and buffers use.
//!
//! A stream is identified by its value alone, so no call on this side looks one up: on CUDA by the `CUstream`, on a
//! host device by the stream's number, where NULL is the first. The device itself rejects an unknown value.

use std::ffi::{CString, c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

#[cfg(feature = "cuda")]
use forebay::device::cuda::{CudaDevice, CudaOptions, HostMemory};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Event, Stream};
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned};
use crate::handle::{self, Object, read};
use crate::status::FbStatus;

/// Host memory. Enqueued work runs inside the call that enqueues it.
pub const FB_DEVICE_HOST: u32 = 0;
/// Host memory. Each stream is a thread.
pub const FB_DEVICE_HOST_THREADS: u32 = 1;
/// An NVIDIA GPU, through its driver.
pub const FB_DEVICE_CUDA: u32 = 2;

/// The total pool is in the system's memory and is registered with the driver.
pub const FB_HOST_MEMORY_REGISTERED: u32 = 0;
/// The total pool is in memory that the driver allocates on a NUMA node of the host. It needs a driver of CUDA 12.2 or
/// newer.
pub const FB_HOST_MEMORY_DRIVER: u32 = 1;

/// The configuration of a device. An optional field that is 0 gets the default that its comment names.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbDeviceConfig {
    /// sizeof(fb_device_config).
    pub size: usize,
    /// FB_DEVICE_HOST, FB_DEVICE_HOST_THREADS or FB_DEVICE_CUDA.
    pub kind: u32,
    /// Optional, CUDA: the device's number in the driver's order. Default: 0.
    pub number: u32,
    /// Optional, CUDA: path or name of the driver's library, in UTF-8. Default: libcuda.so.1.
    pub library: *const c_char,
    /// Optional, host: the most bytes of device memory. Default: as many as the machine has.
    pub memory: u64,
    /// Optional, CUDA: thread blocks of a gather, which bounds the multiprocessors (SMs) that it uses. Default: 4.
    pub gather_blocks: u32,
    /// Optional, CUDA: threads of a thread block, a multiple of 32 up to 512. Default: 512.
    pub threads: u32,
    /// Optional, CUDA: the memory of the total pool, an FB_HOST_MEMORY_ constant. Default: FB_HOST_MEMORY_REGISTERED.
    pub host_memory: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: words and a pointer, which is one; two of 4 bytes wherever one of 8 follows or the end.
unsafe impl Plain for FbDeviceConfig {}
impl Versioned for FbDeviceConfig {
    const NAME: &'static str = "fb_device_config";
    const REQUIRED: usize = std::mem::offset_of!(FbDeviceConfig, number);
}

/// A function that runs on the host in a stream's order: see fb_stream_call.
pub type FbWork = Option<unsafe extern "C" fn(data: *mut c_void)>;

/// A device: its memory, its streams, and the work on them.
#[derive(Debug)]
pub struct FbDevice {
    /// Tickets query the device through it. The drop closes it first, so that the device ends here and not inside a
    /// ticket's call.
    door: Door,
    device: Arc<dyn Device>,
    /// The same device, if it is a GPU.
    #[cfg(feature = "cuda")]
    cuda: Option<Arc<CudaDevice>>,
    /// The number of objects on this device that it may not end before.
    tenants: Arc<AtomicU32>,
    /// Never recorded: a query of it reports a device that has failed.
    asked: Event,
    /// Events of finished waits, for reuse: a device never frees an event.
    events: Mutex<Vec<Event>>,
    /// Names that C was given pointers to.
    names: Mutex<Vec<Arc<[CString]>>>,
}

impl Object for FbDevice {
    const KIND: u8 = 1;
    const NAME: &'static str = "fb_device";
}

/// Access to the device for objects that outlive its handle. It is empty once the device is destroyed.
#[derive(Clone, Debug)]
pub(crate) struct Door(Arc<RwLock<Option<Arc<dyn Device>>>>);

impl Door {
    /// Calls `what` with the device, which stays alive during the call.
    pub(crate) fn with(&self, what: impl FnOnce(&dyn Device)) {
        if let Some(device) = &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            what(&**device);
        }
    }
}

impl Drop for FbDevice {
    fn drop(&mut self) {
        *self.door.0.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The registration of an object with its device, which cannot be destroyed before it: a cache, captured layers,
/// weights, or an update or a change of replicas of weights.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) asked: Event,
    pub(crate) door: Door,
    /// The last field: the device is kept until it is counted out.
    place: Place,
}

#[derive(Debug)]
struct Place(Arc<AtomicU32>);

impl Tenant {
    /// Lets the device be destroyed without this one.
    pub(crate) fn leave(&self) {
        self.place.0.fetch_sub(1, Ordering::Release);
    }

    /// A registration for another object on the same device.
    pub(crate) fn another(&self) -> Tenant {
        self.place.0.fetch_add(1, Ordering::Relaxed);
        Tenant {
            device: Arc::clone(&self.device),
            asked: self.asked,
            door: self.door.clone(),
            place: Place(Arc::clone(&self.place.0)),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

fn refuse(place: &'static str, value: impl Into<u64>, why: &'static str) -> Error {
    Error::new(Kind::InvalidConfig, "create").at(place).with("value", value).hint(why)
}

impl FbDeviceConfig {
    fn check_host(&self) -> Result<()> {
        const ONLY: &str = "leave it 0: it is for FB_DEVICE_CUDA";
        match self {
            _ if self.number != 0 => Err(refuse("number", self.number, ONLY)),
            _ if !self.library.is_null() => Err(refuse("library", 1_u32, ONLY)),
            _ if self.gather_blocks != 0 => Err(refuse("gather_blocks", self.gather_blocks, ONLY)),
            _ if self.threads != 0 => Err(refuse("threads", self.threads, ONLY)),
            _ if self.host_memory != 0 => Err(refuse("host_memory", self.host_memory, ONLY)),
            _ => Ok(()),
        }
    }

    fn host(&self, threaded: bool) -> Result<FbDevice> {
        self.check_host()?;
        let memory = Some(self.memory).filter(|bytes| *bytes != 0);
        let device = HostDevice::new(HostOptions { threaded, memory, ..HostOptions::default() });
        // The first stream is number 0, which is NULL.
        device.stream()?;
        FbDevice::of(device)
    }

    /// # Safety
    /// `library` is null, or a text that ends with a zero byte.
    #[cfg(feature = "cuda")]
    unsafe fn cuda(&self) -> Result<FbDevice> {
        if self.memory != 0 {
            return Err(refuse("memory", self.memory, "leave it 0: it is for host devices"));
        }
        let host_memory = match self.host_memory {
            FB_HOST_MEMORY_REGISTERED => HostMemory::Registered,
            FB_HOST_MEMORY_DRIVER => HostMemory::Driver,
            other => return Err(refuse("host_memory", other, "pass an FB_HOST_MEMORY_ constant")),
        };
        let defaults = CudaOptions::default();
        let or = |value: u32, default| if value == 0 { default } else { value };
        let library = match self.library.is_null() {
            true => None,
            // SAFETY: the same contract.
            false => Some(unsafe { cast::text(self.library, "library") }?.to_owned()),
        };
        let device = CudaDevice::new(CudaOptions {
            device: self.number,
            library,
            gather_blocks: or(self.gather_blocks, defaults.gather_blocks),
            threads: or(self.threads, defaults.threads),
            host_memory,
            ..defaults
        })?;
        let mut made = FbDevice::of(Arc::clone(&device) as Arc<dyn Device>)?;
        made.cuda = Some(device);
        Ok(made)
    }

    /// # Safety
    /// As above.
    #[cfg(not(feature = "cuda"))]
    unsafe fn cuda(&self) -> Result<FbDevice> {
        Err(Error::new(Kind::Unsupported, "create")
            .at("this build has no CUDA device")
            .hint("use a library that was built with the feature cuda"))
    }

    /// # Safety
    /// `library` is null, or a text that ends with a zero byte.
    unsafe fn create(&self) -> Result<FbDevice> {
        if self.reserved != 0 {
            return Err(refuse("reserved", self.reserved, "leave it 0"));
        }
        match self.kind {
            FB_DEVICE_HOST => self.host(false),
            FB_DEVICE_HOST_THREADS => self.host(true),
            // SAFETY: the same contract.
            FB_DEVICE_CUDA => unsafe { self.cuda() },
            other => Err(refuse("kind", other, "pass an FB_DEVICE_ constant")),
        }
    }
}

impl FbDevice {
    fn of(device: Arc<dyn Device>) -> Result<FbDevice> {
        Ok(FbDevice {
            door: Door(Arc::new(RwLock::new(Some(Arc::clone(&device))))),
            asked: device.event()?,
            device,
            #[cfg(feature = "cuda")]
            cuda: None,
            tenants: Arc::new(AtomicU32::new(0)),
            events: Mutex::new(Vec::new()),
            names: Mutex::new(Vec::new()),
        })
    }

    pub(crate) fn tenant(&self) -> Tenant {
        self.tenants.fetch_add(1, Ordering::Relaxed);
        Tenant {
            device: Arc::clone(&self.device),
            asked: self.asked,
            door: self.door.clone(),
            place: Place(Arc::clone(&self.tenants)),
        }
    }

    /// Keeps names as long as the device lives.
    pub(crate) fn keep(&self, names: Arc<[CString]>) {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).push(names);
    }

    fn check_ended(&mut self) -> Result<()> {
        match self.tenants.load(Ordering::Acquire) {
            0 => Ok(()),
            left => Err(Error::new(Kind::Busy, "destroy")
                .at("caches, captured layers, weights, updates or changes of replicas are left")
                .with("left", left)
                .hint("destroy them first")),
        }
    }

    #[cfg(feature = "cuda")]
    fn gpu(&self, operation: &'static str) -> Result<&CudaDevice> {
        self.cuda.as_deref().ok_or_else(|| borrows_nothing(operation))
    }

    /// # Safety
    /// As `fb_stream_borrow`.
    #[cfg(feature = "cuda")]
    unsafe fn borrow_stream(&self, stream: Stream) -> Result<()> {
        /// CU_STREAM_LEGACY: the driver's other name of the legacy stream.
        const LEGACY: u64 = 1;
        let gpu = self.gpu("borrow stream")?;
        if stream.0 == LEGACY {
            return Err(Error::new(Kind::InvalidConfig, "borrow stream")
                .at("CU_STREAM_LEGACY, the other name of the legacy stream")
                .hint("pass NULL for the legacy stream, here and in every call"));
        }
        // SAFETY: the same contract.
        unsafe { gpu.borrow_stream(stream.0) }.map(|_| ())
    }

    /// # Safety
    /// None: there is nothing to borrow.
    #[cfg(not(feature = "cuda"))]
    unsafe fn borrow_stream(&self, _stream: Stream) -> Result<()> {
        Err(borrows_nothing("borrow stream"))
    }

    #[cfg(feature = "cuda")]
    fn return_stream(&self, stream: Stream) -> Result<()> {
        self.gpu("return stream")?.return_stream(stream)
    }

    #[cfg(not(feature = "cuda"))]
    fn return_stream(&self, _stream: Stream) -> Result<()> {
        Err(borrows_nothing("return stream"))
    }

    /// Records an event on `stream` and passes it to `what`, which enqueues what must come after it.
    fn behind(&self, stream: Stream, what: impl FnOnce(Event) -> Result<()>) -> Result<()> {
        let free = || self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = free().pop();
        let event = taken.map_or_else(|| self.device.event(), Ok)?;
        let done = self.device.record(event, stream).and_then(|()| what(event));
        // An enqueued wait refers to this record, even after the event is recorded again.
        free().push(event);
        done
    }
}

fn borrows_nothing(operation: &'static str) -> Error {
    Error::new(Kind::Unsupported, operation)
        .at("a host device cannot borrow streams")
        .hint("use fb_stream_create, or NULL for the first stream")
}

/// Makes a device. It takes no memory yet. On failure, `text` receives the reason.
///
/// # Safety
/// `config` states its real size; its `library` is NULL or ends with a zero; `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_device_create(
    config: *const FbDeviceConfig,
    text: *mut c_char,
    text_bytes: usize,
    device: *mut *mut FbDevice,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        cast::create(text, text_bytes, || {
            let (config, device) = (cast::versioned::<FbDeviceConfig>(config)?, cast::out(device, "device")?);
            device.set(handle::give(|| config.create())?);
            Ok(())
        })
    }
}

/// Ends a device. The call waits for the work enqueued on its streams and on borrowed ones, then frees all memory
/// taken on it, including that of caches destroyed earlier; the memory of a cache that was leaked after a panic stays
/// allocated. FB_BUSY while caches, captured layers, weights, updates or changes of replicas are left. Tickets remain
/// valid.
///
/// # Safety
/// No work on its streams waits for something that only this thread would do.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_device_destroy(device: *mut FbDevice) -> FbStatus {
    handle::end(device, FbDevice::check_ended)
}

/// Makes a stream that belongs to the device and lives as long as the device.
///
/// # Safety
/// `stream` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_stream_create(device: *const FbDevice, stream: *mut *mut c_void) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe {
        read(device, |device| {
            let stream = cast::out(stream, "stream")?;
            stream.set(cast::stream_pointer(device.device.stream()?));
            Ok(())
        })
    }
}

/// Tells the device about a CUstream of the engine, once for each stream; NULL is the legacy default stream. The
/// library neither synchronises nor destroys it. FB_UNSUPPORTED on a host device. FB_INVALID_CONFIG for a stream of
/// another context, for the per-thread stream, and for CU_STREAM_LEGACY: pass NULL.
///
/// # Safety
/// `stream` is a stream of this process until it is returned or the device is destroyed. It is not being captured when
/// the device is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_stream_borrow(device: *const FbDevice, stream: *mut c_void) -> FbStatus {
    // SAFETY: this call's contract.
    read(device, |device| unsafe { device.borrow_stream(cast::stream(stream)) })
}

/// Returns a borrowed stream to the engine: the call waits for the work enqueued on it, and the device then forgets it.
/// FB_OUT_OF_RANGE for a stream that was not borrowed. FB_UNSUPPORTED on a host device. FB_INVALID_STATE for a stream
/// that is being captured.
///
/// # Safety
/// No other thread enqueues on the stream during the call, and no work on the stream makes this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_stream_return(device: *const FbDevice, stream: *mut c_void) -> FbStatus {
    read(device, |device| device.return_stream(cast::stream(stream)))
}

/// Blocks the caller until everything now enqueued on the stream has ended. FB_DEVICE_FAILED when the device has
/// failed.
///
/// # Safety
/// No work on the stream waits for something that only this thread would do.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_stream_wait(device: *const FbDevice, stream: *mut c_void) -> FbStatus {
    read(device, |device| device.behind(cast::stream(stream), |event| device.device.synchronize(event)))
}

/// Orders two streams: work enqueued on `after` from now on runs after the work that is now enqueued on `before`. The
/// call does not wait.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_stream_order(
    device: *const FbDevice,
    before: *mut c_void,
    after: *mut c_void,
) -> FbStatus {
    read(device, |device| {
        let after = cast::stream(after);
        device.behind(cast::stream(before), |event| device.device.wait(after, event))
    })
}

/// Runs `work(data)` in the stream's order, on a thread of the device; on FB_DEVICE_HOST inside this call. On a GPU's
/// stream `work` must not call the driver, and therefore no function of this header that enqueues or waits. On
/// FB_DEVICE_HOST_THREADS it must not enqueue on its own stream or wait for it. If the device fails first, `work` never
/// runs.
///
/// # Safety
/// `work` may be called with `data` on another thread, until it has run or the device is destroyed. It returns
/// normally, without a throw or a longjmp.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_stream_call(
    device: *const FbDevice,
    stream: *mut c_void,
    work: FbWork,
    data: *mut c_void,
) -> FbStatus {
    read(device, |device| {
        let work = work.ok_or_else(|| cast::null("work"))?;
        let data = data.expose_provenance();
        // SAFETY: this call's contract.
        let run = move || unsafe { work(std::ptr::with_exposed_provenance_mut(data)) };
        device.device.call(cast::stream(stream), Arc::new(run))
    })
}

/// Writes 1 to `*mark` in the stream's order, on a thread of the device; on FB_DEVICE_HOST inside this call. It runs no
/// code of the caller and takes no lock of his, so a thread that waits for the stream may hold any: that is how a
/// program with an interpreter's lock sees that enqueued work has run, where the work of fb_stream_call would wait for
/// the lock. If the device fails first, nothing is written.
///
/// The write is a release: read `*mark` with acquire before you read what the work has written. To free or to
/// overwrite what the work has only read, one load of the whole word is enough, of any order: no processor makes a
/// write visible before a load that decides whether it happens.
///
/// FB_OUT_OF_RANGE for a stream that the device does not have. FB_BUSY for one that is being captured: every launch
/// would write the word again. After an error nothing is written, nor on a device that has failed, which FB_OK does not
/// tell: other calls do.
///
/// # Safety
/// `mark` is a word that nothing else writes, and that whole loads alone read, until it was written or the device is
/// destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_stream_mark(
    device: *const FbDevice,
    stream: *mut c_void,
    mark: *mut u32,
) -> FbStatus {
    read(device, |device| {
        let (mark, stream) = (cast::word(mark, "mark")?, cast::stream(stream));
        if device.device.is_capturing(stream)? {
            return Err(Error::new(Kind::Busy, "mark")
                .at("a stream that is being captured")
                .hint("mark behind the launch"));
        }
        let write = move || {
            // SAFETY: neither null nor misaligned; there until this write, by this call's contract.
            let mark = unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(mark)) };
            mark.store(1, Ordering::Release);
        };
        device.device.call(stream, Arc::new(write))
    })
}

/// Allocates zeroed device memory that lives as long as the device, for an engine without an allocator of its own.
///
/// # Safety
/// `address` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_device_allocate(
    device: *const FbDevice,
    bytes: u64,
    address: *mut *mut c_void,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe {
        read(device, |device| {
            let address = cast::out(address, "address")?;
            if bytes == 0 {
                return Err(Error::new(Kind::InvalidConfig, "allocate").at("bytes").with("value", bytes));
            }
            address.set(cast::address(&device.device.allocate(bytes)?));
            Ok(())
        })
    }
}
