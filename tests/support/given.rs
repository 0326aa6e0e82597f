//! The CUDA device on a named driver (`FOREBAY_TEST_DRIVER`), which has none of a stand-in's test functions.
//!
//! A test's engine is host functions that read and write the device's memory. A driver forbids its calls in host
//! functions, so each piece of work runs on a thread of its own, for which the function waits. This module counts
//! waits, and does not pass on those that a control leaves out.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use forebay::device::cuda::CudaDevice;
use forebay::device::{
    Backing, Completer, Device, DeviceId, Event, Graph, Mapped, PageOp, PoolLayout, PoolOp, Pools, Slice,
    Stream,
};
use forebay::os::{Map, Protection};
use forebay::{Lane, Result};
use forebay_standin::Given;

/// The driver that tests must run on, if one is named.
pub fn given() -> Option<&'static Given> {
    Given::named().unwrap_or_else(|refused| panic!("FOREBAY_TEST_DRIVER: {refused}"))
}

/// See the module's head.
#[derive(Debug)]
pub struct Remote {
    device: Arc<CudaDevice>,
    waits: AtomicU64,
    without: Mutex<Range<u64>>,
    enqueued: AtomicU64,
}

impl Remote {
    pub fn new(device: Arc<CudaDevice>) -> Remote {
        Remote { device, waits: 0.into(), without: Mutex::new(0..0), enqueued: 0.into() }
    }

    /// The number of waits so far.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Leaves out the waits of these numbers, as if the caller had not made them.
    pub fn without_waits(&self, numbers: Range<u64>) {
        *self.without.lock().unwrap() = numbers;
    }

    /// The number of copies and pool operations enqueued so far.
    pub fn enqueued(&self) -> u64 {
        self.enqueued.load(Ordering::Relaxed)
    }

    /// Counts an enqueued operation.
    fn count(&self, result: Result<()>) -> Result<()> {
        self.enqueued.fetch_add(u64::from(result.is_ok()), Ordering::Relaxed);
        result
    }
}

impl Device for Remote {
    fn allocate(&self, bytes: u64) -> Result<Slice> {
        self.device.allocate(bytes)
    }
    fn register(&self, map: &Arc<Map>) -> Result<Slice> {
        self.device.register(map)
    }
    // SAFETY: the caller's promise, handed on.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice {
        // SAFETY: as above.
        unsafe { self.device.import(address, bytes) }
    }
    fn id(&self) -> DeviceId {
        self.device.id()
    }
    fn granularity(&self) -> u64 {
        self.device.granularity()
    }
    fn takes_host_memory(&self) -> bool {
        self.device.takes_host_memory()
    }
    fn pins_host_memory(&self) -> bool {
        self.device.pins_host_memory()
    }
    fn backing(&self, bytes: u64) -> Result<Backing> {
        self.device.backing(bytes)
    }
    fn range(&self, pieces: &[Mapped], protection: Protection) -> Result<Slice> {
        self.device.range(pieces, protection)
    }
    fn stream(&self) -> Result<Stream> {
        self.device.stream()
    }
    fn event(&self) -> Result<Event> {
        self.device.event()
    }
    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        self.device.record(event, stream)
    }
    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        let number = self.waits.fetch_add(1, Ordering::Relaxed);
        let left_out = self.without.lock().unwrap().contains(&number);
        if left_out { Ok(()) } else { self.device.wait(stream, event) }
    }
    fn query(&self, event: Event) -> Result<bool> {
        self.device.query(event)
    }
    fn synchronize(&self, event: Event) -> Result<()> {
        self.device.synchronize(event)
    }
    fn copy(&self, stream: Stream, from: Slice, to: Slice) -> Result<()> {
        self.count(self.device.copy(stream, from, to))
    }
    fn prefetch(&self, stream: Stream, slice: Slice, rate: u64) -> Result<()> {
        self.count(self.device.prefetch(stream, slice, rate))
    }
    fn call(&self, stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()> {
        let aside = move || {
            let work = Arc::clone(&work);
            if let Err(panic) = std::thread::spawn(move || work()).join() {
                resume_unwind(panic);
            }
        };
        self.device.call(stream, Arc::new(aside))
    }
    fn complete(&self, stream: Stream, completer: Completer) -> Result<()> {
        self.device.complete(stream, completer)
    }
    fn attach(&self, layout: PoolLayout) -> Result<Pools> {
        self.device.attach(layout)
    }
    fn enqueue(&self, pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()> {
        self.count(self.device.enqueue(pools, stream, op))
    }
    fn enqueue_pages(&self, stream: Stream, op: PageOp<'_>) -> Result<()> {
        self.count(self.device.enqueue_pages(stream, op))
    }
    fn capture(&self, stream: Stream) -> Result<()> {
        self.device.capture(stream)
    }
    fn captured(&self, stream: Stream) -> Result<Graph> {
        self.device.captured(stream)
    }
    fn is_capturing(&self, stream: Stream) -> Result<bool> {
        self.device.is_capturing(stream)
    }
    fn launch(&self, graph: Graph, stream: Stream) -> Result<()> {
        self.count(self.device.launch(graph, stream))
    }
    fn release(&self, graph: Graph) -> Result<()> {
        self.device.release(graph)
    }
    fn digest(&self, pools: Pools, lane: Lane) -> Result<u64> {
        self.device.digest(pools, lane)
    }
    fn validate(&self, pools: Pools) -> Result<()> {
        self.device.validate(pools)
    }
}
