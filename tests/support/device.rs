//! A device for tests, and access to its current memory: the host device, or the CUDA device on the stand-in driver.
//!
//! Tests that make their device here run on both: on the host device by default, and on the CUDA device with
//! `FOREBAY_TEST_DEVICE=cuda` (`make on-cuda`). If `FOREBAY_TEST_DRIVER` names a driver's library, such as the system's
//! `libcuda.so.1`, the CUDA device uses that driver, and tests that need a stand-in of their own skip ([`own_driver`]).

#[cfg(feature = "cuda")]
#[allow(clippy::duplicate_mod, reason = "a test may have it from other support too")]
#[path = "skip.rs"]
mod skip;

#[cfg(feature = "cuda")]
#[path = "given.rs"]
mod given;

use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, mpsc};

#[cfg(feature = "cuda")]
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Pools, Slice, Stream};
#[cfg(feature = "cuda")]
use forebay::{Error, Kind};
use forebay::{Lane, Result};
#[cfg(feature = "cuda")]
use forebay_standin::{Given, Hold, Options, Standin};
#[cfg(feature = "cuda")]
use given::{Remote, given};

/// A device whose memory a test reads and writes at any time.
#[derive(Debug)]
pub struct TestDevice {
    memory: Memory,
    threaded: bool,
}

#[derive(Debug)]
enum Memory {
    Host(Arc<HostDevice>),
    #[cfg(feature = "cuda")]
    Cuda(Box<Cuda>),
}

/// The CUDA device and the driver under it.
#[cfg(feature = "cuda")]
#[derive(Debug)]
struct Cuda {
    device: Arc<CudaDevice>,
    driver: Driver,
    digests: Digests,
}

#[cfg(feature = "cuda")]
#[derive(Debug)]
enum Driver {
    Own(Box<Standin>),
    Given(&'static Given, Arc<Remote>),
}

/// Places for digests, taken in turn: many more than are in use at once.
#[cfg(feature = "cuda")]
#[derive(Debug)]
struct Digests {
    places: Slice,
    next: std::sync::atomic::AtomicU64,
}

#[cfg(feature = "cuda")]
impl Digests {
    const COUNT: u64 = 4096;

    fn place(&self) -> Slice {
        let next = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.places.part(8 * (next % Digests::COUNT), 8).unwrap()
    }
}

/// Whether tests run on the CUDA device.
fn on_cuda() -> bool {
    cfg!(feature = "cuda") && std::env::var("FOREBAY_TEST_DEVICE").is_ok_and(|value| value == "cuda")
}

/// The number of cases, out of `usual`, that a test tries on its device: an eighth on the stand-in, which runs every
/// thread of a kernel by itself.
pub fn tried(usual: u32) -> u32 {
    if on_cuda() { usual.div_ceil(8) } else { few(usual) }
}

/// The number of cases, out of `usual`, that a test tries on any device: an eighth with `FOREBAY_FEW=1`, for a build
/// that checks something which every run does (`make asan`).
pub fn few(usual: u32) -> u32 {
    if std::env::var("FOREBAY_FEW").is_ok_and(|value| value == "1") { usual.div_ceil(8) } else { usual }
}

/// Whether there is a driver: a given one, or a stand-in that could be built. If not, reports a skip of the parts that
/// need one.
#[cfg(feature = "cuda")]
pub fn driver_is_there() -> bool {
    let there = given().is_some() || Standin::new(Options::default()).is_some();
    if !there {
        skip::skip("g++, which builds the stand-in driver");
    }
    there
}

/// Whether the CUDA device is on a given driver.
pub fn is_given() -> bool {
    #[cfg(feature = "cuda")]
    return given().is_some();
    #[cfg(not(feature = "cuda"))]
    false
}

/// Whether the driver is a stand-in of the test's own, which has the ability `does`. If not, reports a skip of the
/// parts that need it.
#[cfg(feature = "cuda")]
pub fn own_driver(does: &str) -> bool {
    skip::own_driver(does) && driver_is_there()
}

impl TestDevice {
    /// The device that tests run on: the host device of these options, or its counterpart on the stand-in.
    pub fn new(options: HostOptions) -> Arc<TestDevice> {
        #[cfg(feature = "cuda")]
        if on_cuda()
            && driver_is_there()
            && let Some(device) = TestDevice::cuda(&options, options.threaded.then_some(1))
        {
            return device;
        }
        TestDevice::host(options)
    }

    /// The host device.
    pub fn host(options: HostOptions) -> Arc<TestDevice> {
        Arc::new(TestDevice { memory: Memory::Host(HostDevice::new(options)), threaded: options.threaded })
    }

    /// The CUDA device on a stand-in of its own, which delays and reorders by the seed, with the memory that the
    /// options say; none where the stand-in could not be built. With a given driver: on that driver, without a seed.
    #[cfg(feature = "cuda")]
    pub fn cuda(options: &HostOptions, seed: Option<u64>) -> Option<Arc<TestDevice>> {
        TestDevice::cuda_with(options, seed, CudaOptions::default())
    }

    /// As [`TestDevice::cuda`], with other options of the CUDA device than its library and threads.
    #[cfg(feature = "cuda")]
    pub fn cuda_with(options: &HostOptions, seed: Option<u64>, own: CudaOptions) -> Option<Arc<TestDevice>> {
        if let Some(driver) = given() {
            let library = Some(driver.library().to_owned());
            let device = CudaDevice::new(CudaOptions { library, ..own }).unwrap();
            let remote = Arc::new(Remote::new(Arc::clone(&device)));
            return Some(TestDevice::of(device, Driver::Given(driver, remote)));
        }
        let usual = Options::default();
        let standin =
            Standin::new(Options { seed, memory: options.memory.unwrap_or(usual.memory), ..usual })?;
        let library = Some(standin.library().to_owned());
        // Few threads per block: the stand-in runs each of them by itself.
        let device = CudaDevice::new(CudaOptions { library, unload: true, threads: 64, ..own }).unwrap();
        Some(TestDevice::of(device, Driver::Own(Box::new(standin))))
    }

    #[cfg(feature = "cuda")]
    fn of(device: Arc<CudaDevice>, driver: Driver) -> Arc<TestDevice> {
        let places = device.allocate(8 * Digests::COUNT).unwrap();
        let digests = Digests { places, next: 0.into() };
        let memory = Memory::Cuda(Box::new(Cuda { device, driver, digests }));
        Arc::new(TestDevice { memory, threaded: false })
    }

    /// The device, as a trait object.
    pub fn device(&self) -> Arc<dyn Device> {
        match &self.memory {
            Memory::Host(host) => host.clone(),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => match &cuda.driver {
                Driver::Own(_) => cuda.device.clone(),
                Driver::Given(_, remote) => remote.clone(),
            },
        }
    }

    /// The stand-in of the test's own, if the test runs on one.
    #[cfg(feature = "cuda")]
    pub fn standin(&self) -> Option<&Standin> {
        match &self.memory {
            Memory::Cuda(cuda) => match &cuda.driver {
                Driver::Own(standin) => Some(standin),
                Driver::Given(..) => None,
            },
            Memory::Host(_) => None,
        }
    }

    /// The given driver, if the tests run on one.
    #[cfg(feature = "cuda")]
    fn given(&self) -> Option<(&'static Given, &Arc<Remote>)> {
        match &self.memory {
            Memory::Cuda(cuda) => match &cuda.driver {
                Driver::Given(driver, remote) => Some((driver, remote)),
                Driver::Own(_) => None,
            },
            Memory::Host(_) => None,
        }
    }

    /// Whether its memory is separate from the host's, as a GPU's is.
    pub fn is_remote(&self) -> bool {
        !matches!(self.memory, Memory::Host(_))
    }

    /// Whether each stream is a thread.
    pub fn runs_by_itself(&self) -> bool {
        self.threaded
    }

    /// Holds a stream until the result is dropped: a thread of the host device by a call, a stream of the stand-in, or
    /// one of a given driver.
    pub fn hold(self: &Arc<Self>, stream: Stream) -> Held {
        #[cfg(feature = "cuda")]
        if let Some((driver, _)) = self.given() {
            let hold = Some(driver.hold(stream.0).unwrap());
            return Held { device: Arc::clone(self), stream, _open: mpsc::channel().0, _hold: hold };
        }
        let (open, closed) = mpsc::channel::<()>();
        if self.is_remote() {
            self.hold_by_itself(stream, true);
        } else {
            let closed = Mutex::new(closed);
            // The sender's drop is the signal.
            self.call(stream, Arc::new(move || assert!(closed.lock().unwrap().recv().is_err()))).unwrap();
        }
        Held {
            device: Arc::clone(self),
            stream,
            _open: open,
            #[cfg(feature = "cuda")]
            _hold: None,
        }
    }

    fn hold_by_itself(&self, _stream: Stream, _hold: bool) {
        #[cfg(feature = "cuda")]
        if let Some(standin) = self.standin() {
            if _hold { standin.hold(_stream.0) } else { standin.let_go(_stream.0) }
        }
    }

    /// Fails the operation of this number, counted from now on, on the stand-in. The host device got the number at its
    /// start.
    pub fn fail_operation(&self, _number: u64) {
        #[cfg(feature = "cuda")]
        if let Some(standin) = self.standin() {
            const ILLEGAL_ADDRESS: i32 = 700;
            standin.fail_operation(_number, ILLEGAL_ADDRESS);
        }
    }

    /// The waits that a driver saw enqueued, captured ones too.
    pub fn waits(&self) -> u64 {
        #[cfg(feature = "cuda")]
        match (self.standin(), self.given()) {
            (Some(standin), _) => return standin.waits(),
            (_, Some((_, remote))) => return remote.waits(),
            _ => {}
        }
        0
    }

    /// Leaves out the waits of these numbers, as if the caller had not made them; the stand-in does so in captures too.
    pub fn without_waits(&self, _numbers: Range<u64>) {
        #[cfg(feature = "cuda")]
        match (self.standin(), self.given()) {
            (Some(standin), _) => standin.without_waits(_numbers),
            (_, Some((_, remote))) => remote.without_waits(_numbers),
            _ => {}
        }
    }

    /// The number of operations that have run. A planned failure is numbered by it. On a given driver, the operations
    /// that were enqueued.
    pub fn operations(&self) -> u64 {
        match &self.memory {
            Memory::Host(host) => host.operations(),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => match &cuda.driver {
                Driver::Own(standin) => standin.operations(),
                Driver::Given(_, remote) => remote.enqueued(),
            },
        }
    }

    /// Reads the bytes that the device sees now.
    pub fn read(&self, slice: Slice, bytes: &mut [u8]) -> Result<()> {
        match &self.memory {
            Memory::Host(host) => host.read(slice, bytes),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => {
                let Cuda { device, driver, .. } = &**cuda;
                let Driver::Own(standin) = driver else { return device.read(slice, bytes) };
                let fits = device.owns(&slice) && slice.bytes() == bytes.len() as u64;
                outside(fits && standin.read(slice.address(), bytes))
            }
        }
    }

    /// Writes bytes that the device sees, at once.
    pub fn write(&self, slice: Slice, bytes: &[u8]) -> Result<()> {
        match &self.memory {
            Memory::Host(host) => host.write(slice, bytes),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => {
                let Cuda { device, driver, .. } = &**cuda;
                let Driver::Own(standin) = driver else { return device.write(slice, bytes) };
                let fits = device.owns(&slice) && slice.bytes() == bytes.len() as u64;
                outside(fits && standin.write(slice.address(), bytes))
            }
        }
    }

    /// Enqueues the residency digest of a lane on `queue`, which is this device or a clock over it. Calls `then` with
    /// it when the stream reaches it.
    pub fn digest_in(
        self: &Arc<Self>,
        queue: &dyn Device,
        (pools, lane): (Pools, Lane),
        stream: Stream,
        then: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<()> {
        let own = Arc::downgrade(self);
        match &self.memory {
            Memory::Host(_) => {
                let tell = move || {
                    if let Some(digest) = own.upgrade().and_then(|device| device.digest(pools, lane).ok()) {
                        then(digest);
                    }
                };
                queue.call(stream, Arc::new(tell))
            }
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => {
                let Cuda { device, digests, .. } = &**cuda;
                let to = digests.place();
                device.digest_into(pools, stream, lane, to)?;
                let tell = move || {
                    let mut digest = [0; 8];
                    if own.upgrade().is_some_and(|device| device.read(to, &mut digest).is_ok()) {
                        then(u64::from_le_bytes(digest));
                    }
                };
                queue.call(stream, Arc::new(tell))
            }
        }
    }
}

/// A stream that is held until this is dropped.
#[derive(Debug)]
pub struct Held {
    // Before the device, because the device's end waits for its streams.
    #[cfg(feature = "cuda")]
    _hold: Option<Hold>,
    _open: mpsc::Sender<()>,
    device: Arc<TestDevice>,
    stream: Stream,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.device.hold_by_itself(self.stream, false);
    }
}

/// The result of a read or write outside the device's memory.
#[cfg(feature = "cuda")]
fn outside(inside: bool) -> Result<()> {
    if inside { Ok(()) } else { Err(Error::new(Kind::OutOfRange, "test device").at("slice")) }
}

impl Deref for TestDevice {
    type Target = dyn Device;

    fn deref(&self) -> &Self::Target {
        match &self.memory {
            Memory::Host(host) => &**host,
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => match &cuda.driver {
                Driver::Own(_) => &*cuda.device,
                Driver::Given(_, remote) => &**remote,
            },
        }
    }
}
