//! Streams, events, and host functions that run in a stream's order.
//!
//! **Streams** are the engine's, borrowed, or ours. Ours do not wait for the legacy stream and have the highest
//! priority. When two kernels wait for multiprocessors, a GPU runs the blocks of the older kernel first, so a gather
//! after a large product would begin only when the product ends. With a higher priority the gather gets
//! multiprocessors as soon as blocks end. Handles are the driver's own; a handle that was not registered here is
//! rejected before the driver sees it.
//!
//! **Dropping work.** Dropped callbacks belong to an engine and may call the device, so no lock is held meanwhile.
//!
//! **Calls.** The driver runs a host function with one word of data: the address of a [`Slot`]. Slots are never
//! moved, and are freed only when the streams have been drained, so the address stays valid as long as the driver may
//! call. A slot holds work that runs once and is then removed, or the work of a captured graph, which stays as long
//! as the graph. When a stream fails, the driver runs no more functions; the tickets whose completers are in slots
//! are then ended from here. Each completer is taken out under the slot's lock, and so ends once.
//!
//! A host function may not call the driver. So when work that ran may be the last owner of the device, it is not
//! dropped on that thread: [`Calls::is_running_here`] reports the case, and the device is closed on another thread.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::driver::{Context, DriverResult, Handle, HostFunction, flag};
use crate::device::Completer;
use crate::error::{Error, Kind, Result};
use crate::sync::{Arc, AtomicU32, Mutex, Ordering, thread};

/// A stream that is registered with the device.
#[derive(Debug)]
pub(super) struct KnownStream {
    context: Arc<Context>,
    pub raw: Handle,
    pub own: bool,
}

impl KnownStream {
    /// A stream of our own, whose work takes precedence over that of other streams.
    pub fn own(context: &Arc<Context>) -> DriverResult<KnownStream> {
        let (mut least, mut greatest) = (0, 0);
        context.relaxed()?.priorities(&mut least, &mut greatest)?;
        KnownStream::with(context, greatest)
    }

    /// A stream as an engine creates it.
    #[cfg(feature = "measure")]
    pub fn usual(context: &Arc<Context>) -> DriverResult<KnownStream> {
        KnownStream::with(context, 0)
    }

    fn with(context: &Arc<Context>, priority: i32) -> DriverResult<KnownStream> {
        let mut raw = 0;
        context.relaxed()?.stream_create(&mut raw, flag::STREAM_NON_BLOCKING, priority)?;
        Ok(KnownStream { context: Arc::clone(context), raw, own: true })
    }

    pub fn borrowed(context: &Arc<Context>, raw: Handle) -> Result<KnownStream> {
        const OPERATION: &str = "borrow stream";
        if raw == flag::STREAM_PER_THREAD {
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("the per-thread stream is a different stream on each thread")
                .hint("pass a stream that was created, or the legacy stream"));
        }
        let mut owner = 0;
        let asked = context.enter().and_then(|current| current.stream_context(raw, &mut owner));
        asked.map_err(|refusal| refusal.error(OPERATION))?;
        match context.is(owner) {
            true => Ok(KnownStream { context: Arc::clone(context), raw, own: false }),
            false => Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("the stream is of another context")
                .hint("pass a stream of the same device's primary context")),
        }
    }
}

impl Drop for KnownStream {
    fn drop(&mut self) {
        if self.own {
            self.context.give_back(|driver| driver.stream_destroy(self.raw));
        }
    }
}

/// An event; without timing, which would cost a flush, unless it is asked for.
#[derive(Debug)]
pub(super) struct OwnEvent {
    context: Arc<Context>,
    pub raw: Handle,
}

impl OwnEvent {
    pub fn new(context: &Arc<Context>) -> DriverResult<OwnEvent> {
        OwnEvent::with(context, flag::EVENT_DISABLE_TIMING)
    }

    /// An event that keeps the time at which it is reached.
    #[cfg(feature = "measure")]
    pub fn timed(context: &Arc<Context>) -> DriverResult<OwnEvent> {
        OwnEvent::with(context, flag::EVENT_DEFAULT)
    }

    fn with(context: &Arc<Context>, flags: u32) -> DriverResult<OwnEvent> {
        let mut raw = 0;
        context.relaxed()?.event_create(&mut raw, flags)?;
        Ok(OwnEvent { context: Arc::clone(context), raw })
    }
}

impl Drop for OwnEvent {
    fn drop(&mut self) {
        self.context.give_back(|driver| driver.event_destroy(self.raw));
    }
}

/// Whether the device has failed, and how.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// The kind of the first failure; 0 while the device is sound.
    failure: AtomicU32,
}

impl Health {
    /// Remembers the first failure.
    pub fn fail(&self, kind: Kind) {
        let _ = self.failure.compare_exchange(0, kind as u32, Ordering::AcqRel, Ordering::Acquire);
    }

    pub fn failed(&self) -> Option<Kind> {
        match self.failure.load(Ordering::Acquire) {
            0 => None,
            code => Kind::ALL.iter().copied().find(|k| *k as u32 == code),
        }
    }
}

/// The work of a slot.
enum Work {
    Nothing,
    Once(Arc<dyn Fn() + Send + Sync>),
    Captured(Arc<dyn Fn() + Send + Sync>),
    Complete(Completer),
}

/// The storage of one enqueued host function's work.
pub(super) struct Slot {
    work: Mutex<Work>,
    number: usize,
    shared: Arc<Shared>,
}

/// The state that slots share. It outlives the device while the driver may still call.
#[derive(Debug)]
struct Shared {
    health: Arc<Health>,
    /// The numbers of empty slots.
    free: Mutex<Vec<usize>>,
    /// Threads that run work now.
    running: Mutex<Vec<thread::ThreadId>>,
}

/// Every slot of a device.
#[derive(Debug)]
pub(super) struct Calls {
    shared: Arc<Shared>,
    /// Each pointer is from `Box::into_raw` and owns its slot.
    slots: Mutex<Vec<SlotPointer>>,
}

/// A slot's address, which stays the same when slots are added.
#[derive(Clone, Copy, Debug)]
struct SlotPointer(*const Slot);

// SAFETY: a slot is only accessed through its lock and shared state, which any thread may use.
unsafe impl Send for SlotPointer {}

/// A host function to enqueue: the arguments for the driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct Enqueued {
    pub function: HostFunction,
    pub data: *mut c_void,
    pub number: usize,
}

impl Calls {
    pub fn new(health: &Arc<Health>) -> Calls {
        let (free, running) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        let shared = Shared { health: Arc::clone(health), free, running };
        Calls { shared: Arc::new(shared), slots: Mutex::new(Vec::new()) }
    }

    /// Work to run once.
    pub fn once(&self, work: Arc<dyn Fn() + Send + Sync>) -> Enqueued {
        self.take(Work::Once(work))
    }

    /// Work of a graph, which runs at each launch until [`Calls::clear`].
    pub fn captured(&self, work: Arc<dyn Fn() + Send + Sync>) -> Enqueued {
        self.take(Work::Captured(work))
    }

    /// A ticket's end.
    pub fn complete(&self, completer: Completer) -> Enqueued {
        self.take(Work::Complete(completer))
    }

    /// Puts work into a free slot, or into a new one.
    fn take(&self, work: Work) -> Enqueued {
        let mut slots = self.slots.lock();
        let free = self.shared.free.lock().pop();
        let number = free.unwrap_or(slots.len());
        let slot = match slots.get(number) {
            Some(slot) => *slot,
            None => {
                let shared = Arc::clone(&self.shared);
                let slot = Box::new(Slot { work: Mutex::new(Work::Nothing), number, shared });
                let slot = SlotPointer(Box::into_raw(slot));
                slots.push(slot);
                slot
            }
        };
        // SAFETY: slots live until `close`, which does not run at the same time.
        *unsafe { &*slot.0 }.work.lock() = work;
        Enqueued { function: run, data: slot.0.cast_mut().cast(), number }
    }

    /// Empties a slot whose function will not run any more.
    pub fn clear(&self, number: usize) {
        let slots = self.slots.lock();
        if let Some(slot) = slots.get(number) {
            // SAFETY: as above.
            let work = unsafe { &*slot.0 }.empty(|_| true);
            drop(slots);
            drop(work);
        }
    }

    /// Ends the ticket of a function that was not enqueued because the device has failed.
    pub fn fail_one(&self, number: usize, kind: Kind) {
        let slot = self.slots.lock().get(number).copied();
        // SAFETY: as above.
        if let Some(Work::Complete(completer)) = slot.map(|slot| unsafe { &*slot.0 }.empty(|_| true)) {
            completer.fail(kind);
        }
    }

    /// Handles a lost context, in which no function will run any more: ends every ticket, and drops the work that was
    /// not reached.
    pub fn fail(&self, kind: Kind) {
        let slots: Vec<SlotPointer> = self.slots.lock().clone();
        for slot in slots {
            // SAFETY: as above.
            let slot = unsafe { &*slot.0 };
            if let Work::Complete(completer) = slot.empty(|work| !matches!(work, Work::Captured(_))) {
                completer.fail(kind);
            }
        }
    }

    /// Whether the calling thread is a driver's thread that is running work.
    pub fn is_running_here(&self) -> bool {
        let here = thread::current().id();
        self.shared.running.lock().contains(&here)
    }

    /// Frees all slots. No function may be called any more; if that is uncertain (`drained` is false), the slots are
    /// leaked.
    pub fn close(&self, drained: bool) {
        let slots = std::mem::take(&mut *self.slots.lock());
        for slot in slots {
            // SAFETY: taken out of the list, so freed once; until then it is alive.
            let work = unsafe { &*slot.0 }.empty(|_| true);
            drop(work);
            if drained {
                // SAFETY: made by `Box::into_raw`, and the streams whose functions point here are drained.
                drop(unsafe { Box::from_raw(slot.0.cast_mut()) });
            }
        }
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Slot {
    /// Takes the work out if it matches, and makes the slot free. A free slot stays as it is.
    fn empty(&self, such: impl FnOnce(&Work) -> bool) -> Work {
        let mut held = self.work.lock();
        let work = if such(&held) { std::mem::replace(&mut *held, Work::Nothing) } else { Work::Nothing };
        drop(held);
        if !matches!(work, Work::Nothing) {
            self.shared.free.lock().push(self.number);
        }
        work
    }

    fn run(&self) {
        let captured = match &*self.work.lock() {
            Work::Captured(work) => Some(Arc::clone(work)),
            _ => None,
        };
        if let Some(work) = captured {
            return work();
        }
        match self.empty(|_| true) {
            Work::Once(work) | Work::Captured(work) => work(),
            Work::Complete(completer) => match self.shared.health.failed() {
                None => completer.done(),
                Some(kind) => completer.fail(kind),
            },
            Work::Nothing => {}
        }
    }
}

/// The function that the driver calls.
extern "C" fn run(data: *mut c_void) {
    // SAFETY: the data of every function that is enqueued is a slot, and slots stay until streams are drained.
    let slot = unsafe { &*data.cast_const().cast::<Slot>() };
    let shared = Arc::clone(&slot.shared);
    let here = thread::current().id();
    shared.running.lock().push(here);
    // A panic in an engine's work must not reach the driver.
    if catch_unwind(AssertUnwindSafe(|| slot.run())).is_err() {
        shared.health.fail(Kind::Internal);
    }
    let mut running = shared.running.lock();
    if let Some(at) = running.iter().position(|thread| *thread == here) {
        running.swap_remove(at);
    }
}
