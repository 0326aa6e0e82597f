//! A device that forgets: calls that a test leaves out never reach the wrapped device, and the caller gets no error. It
//! imitates faults that the host cannot detect, such as a graph that lacks a layer.

use forebay::device::{
    Backing, Completer, Device, DeviceId, Event, Expected, Graph, Mapped, PageOp, PoolLayout, PoolOp, Pools,
    Slice, StepRange, Stream,
};
use forebay::os::{Map, Protection};
use forebay::{Lane, Result};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Calls of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Resolve,
    Gather,
    Scatter,
}

/// The calls to leave out; for a gather, its wave.
pub type Left = Box<dyn Fn(Call, &StepRange, u32) -> bool + Send>;

/// See the file's head.
pub struct Forgets {
    device: Arc<dyn Device>,
    left: Mutex<Left>,
    /// The due calls for reports, in place of those from the cache: for controls.
    expected: Option<Expected>,
    /// The number of waits of a stream for an event so far.
    pub waits: AtomicU32,
    /// The events recorded on each stream, in order, and the events that each stream waited for.
    pub recorded: Mutex<Vec<(Event, Stream)>>,
    pub awaited: Mutex<Vec<(Event, Stream)>>,
}

impl std::fmt::Debug for Forgets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a device that forgets")
    }
}

impl Forgets {
    pub fn new(device: Arc<dyn Device>, expected: Option<Expected>) -> Arc<Forgets> {
        Arc::new(Forgets {
            device,
            left: Mutex::new(Box::new(|_, _, _| false)),
            expected,
            waits: AtomicU32::new(0),
            recorded: Mutex::default(),
            awaited: Mutex::default(),
        })
    }

    /// From now on leaves out the calls that `left` selects.
    pub fn leave_out(&self, left: impl Fn(Call, &StepRange, u32) -> bool + Send + 'static) {
        *self.left.lock().unwrap() = Box::new(left);
    }

    fn leaves(&self, call: Call, range: &StepRange, wave: u32) -> bool {
        (self.left.lock().unwrap())(call, range, wave)
    }
}

/// The other methods, forwarded.
macro_rules! hand_on {
    ($($name:ident($($argument:ident: $of:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $of),*) -> $result { self.device.$name($($argument),*) })*
    };
}

impl Device for Forgets {
    fn attach(&self, layout: PoolLayout) -> Result<Pools> {
        let expected = self.expected.unwrap_or(layout.expected);
        self.device.attach(PoolLayout { expected, ..layout })
    }

    fn enqueue(&self, pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()> {
        let left_out = match &op {
            PoolOp::Resolve { range, .. } => self.leaves(Call::Resolve, range, 0),
            PoolOp::Gather { range, wave } => self.leaves(Call::Gather, range, *wave),
            PoolOp::Scatter(range) => self.leaves(Call::Scatter, range, 0),
            _ => false,
        };
        if left_out { Ok(()) } else { self.device.enqueue(pools, stream, op) }
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.awaited.lock().unwrap().push((event, stream));
        self.device.wait(stream, event)
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        self.recorded.lock().unwrap().push((event, stream));
        self.device.record(event, stream)
    }

    // SAFETY: asks of its caller what the trait's method asks.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice {
        // SAFETY: the caller of this method vouches for what the inner device asks.
        unsafe { self.device.import(address, bytes) }
    }

    hand_on! {
        allocate(bytes: u64) -> Result<Slice>;
        register(map: &Arc<Map>) -> Result<Slice>;
        id() -> DeviceId;
        granularity() -> u64;
        takes_host_memory() -> bool;
        pins_host_memory() -> bool;
        backing(bytes: u64) -> Result<Backing>;
        range(pieces: &[Mapped], protection: Protection) -> Result<Slice>;
        stream() -> Result<Stream>;
        event() -> Result<Event>;
        query(event: Event) -> Result<bool>;
        synchronize(event: Event) -> Result<()>;
        copy(stream: Stream, from: Slice, to: Slice) -> Result<()>;
        prefetch(stream: Stream, slice: Slice, rate: u64) -> Result<()>;
        enqueue_pages(stream: Stream, op: PageOp<'_>) -> Result<()>;
        call(stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()>;
        complete(stream: Stream, completer: Completer) -> Result<()>;
        capture(stream: Stream) -> Result<()>;
        captured(stream: Stream) -> Result<Graph>;
        is_capturing(stream: Stream) -> Result<bool>;
        launch(graph: Graph, stream: Stream) -> Result<()>;
        release(graph: Graph) -> Result<()>;
        digest(pools: Pools, lane: Lane) -> Result<u64>;
        validate(pools: Pools) -> Result<()>;
        confine(stream: Option<Stream>) -> Result<()>;
    }
}
