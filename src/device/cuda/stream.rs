//! Streams, events, and what runs on the host in a stream's order.
//!
//! **Streams** are the engine's, borrowed, or ours, which do not wait for the legacy stream and have the greatest
//! priority there is: of two kernels that wait for multiprocessors a GPU runs the blocks of the older one first, so
//! that a gather behind a large product would begin when that one ends; with a greater priority it gets the
//! multiprocessors on which blocks end. Either way a handle is the driver's own, and one that was not made known is
//! refused before the driver sees it.
//!
//! **Work that is dropped** is an engine's, and may call the device: no lock is held then.
//!
//! **Calls.** The driver runs a function with one word of data. The word is the address of a [`Slot`], which stands
//! where it is for as long as the driver may come back: slots are never moved, and given back only when the streams
//! have been drained. A slot holds work that runs once, which empties it, or the work of a captured graph, which
//! stays for as long as the graph. Where a stream fails the driver runs no more functions: the tickets whose
//! completers stand in slots are then ended from here, each by whoever takes it out, and so once.
//!
//! A function of the driver's may not call the driver. So work that ran is not dropped where it ran when it may be
//! the last owner of the device: [`Calls::is_running_here`] tells, and the device is then closed on another thread.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::driver::{Answer, Context, Handle, HostFunction, flag};
use crate::device::Completer;
use crate::error::{Error, Kind, Result};
use crate::sync::{Arc, AtomicU32, Mutex, Ordering, thread};

/// A stream that the device knows.
#[derive(Debug)]
pub(super) struct KnownStream {
    context: Arc<Context>,
    pub raw: Handle,
    pub own: bool,
}

impl KnownStream {
    /// One whose work goes before that of other streams.
    pub fn own(context: &Arc<Context>) -> Answer<KnownStream> {
        let (mut least, mut greatest) = (0, 0);
        context.relaxed()?.priorities(&mut least, &mut greatest)?;
        KnownStream::with(context, greatest)
    }

    /// One as an engine creates it.
    #[cfg(feature = "measure")]
    pub fn usual(context: &Arc<Context>) -> Answer<KnownStream> {
        KnownStream::with(context, 0)
    }

    fn with(context: &Arc<Context>, priority: i32) -> Answer<KnownStream> {
        let mut raw = 0;
        context.relaxed()?.stream_create(&mut raw, flag::STREAM_NON_BLOCKING, priority)?;
        Ok(KnownStream { context: Arc::clone(context), raw, own: true })
    }

    pub fn borrowed(context: &Arc<Context>, raw: Handle) -> Result<KnownStream> {
        const OPERATION: &str = "borrow stream";
        if raw == flag::STREAM_PER_THREAD {
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("the per-thread stream is another one on each thread")
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

/// An event; without times, which would cost a flush, unless they are asked for.
#[derive(Debug)]
pub(super) struct OwnEvent {
    context: Arc<Context>,
    pub raw: Handle,
}

impl OwnEvent {
    pub fn new(context: &Arc<Context>) -> Answer<OwnEvent> {
        OwnEvent::with(context, flag::EVENT_DISABLE_TIMING)
    }

    /// One that keeps the time at which it is reached.
    #[cfg(feature = "measure")]
    pub fn timed(context: &Arc<Context>) -> Answer<OwnEvent> {
        OwnEvent::with(context, flag::EVENT_DEFAULT)
    }

    fn with(context: &Arc<Context>, flags: u32) -> Answer<OwnEvent> {
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

/// Whether the device has failed, and by what.
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

/// What a slot runs.
enum Work {
    Nothing,
    Once(Arc<dyn Fn() + Send + Sync>),
    Captured(Arc<dyn Fn() + Send + Sync>),
    Complete(Completer),
}

/// Where the work of one enqueued function stands.
pub(super) struct Slot {
    work: Mutex<Work>,
    number: usize,
    shared: Arc<Shared>,
}

/// What slots share: it outlives the device where a function may still come.
#[derive(Debug)]
struct Shared {
    health: Arc<Health>,
    /// Numbers of slots that hold nothing.
    free: Mutex<Vec<usize>>,
    /// Threads that run work now.
    running: Mutex<Vec<thread::ThreadId>>,
}

/// Every slot of a device.
#[derive(Debug)]
pub(super) struct Calls {
    shared: Arc<Shared>,
    /// Behind each pointer a slot of its own, from `Box::into_raw`.
    slots: Mutex<Vec<SlotPointer>>,
}

/// A slot's address: it does not move when others come.
#[derive(Clone, Copy, Debug)]
struct SlotPointer(*const Slot);

// SAFETY: a slot is only looked at through its lock and what is shared, which any thread may.
unsafe impl Send for SlotPointer {}

/// A function that is to be enqueued: what the driver is to be given.
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

    /// Work of a graph, to run at each launch until [`Calls::clear`].
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
        // SAFETY: slots live until `close`, which nothing calls beside this.
        *unsafe { &*slot.0 }.work.lock() = work;
        Enqueued { function: run, data: slot.0.cast_mut().cast(), number }
    }

    /// Empties a slot whose function will not run, or not again.
    pub fn clear(&self, number: usize) {
        let slots = self.slots.lock();
        if let Some(slot) = slots.get(number) {
            // SAFETY: as above.
            let work = unsafe { &*slot.0 }.empty(|_| true);
            drop(slots);
            drop(work);
        }
    }

    /// Ends what was enqueued on a device that has failed, and so was not.
    pub fn fail_one(&self, number: usize, kind: Kind) {
        let slot = self.slots.lock().get(number).copied();
        // SAFETY: as above.
        if let Some(Work::Complete(completer)) = slot.map(|slot| unsafe { &*slot.0 }.empty(|_| true)) {
            completer.fail(kind);
        }
    }

    /// The context is lost: no function will run any more. Every ticket ends here, and work that was not reached
    /// is dropped.
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

    /// Whether the calling thread is one of the driver's, inside of work.
    pub fn is_running_here(&self) -> bool {
        let here = thread::current().id();
        self.shared.running.lock().contains(&here)
    }

    /// Gives all slots back. No function may come any more; where that is not sure they are left where they are.
    pub fn close(&self, drained: bool) {
        let slots = std::mem::take(&mut *self.slots.lock());
        for slot in slots {
            // SAFETY: taken out of the list, so given back once; until then it is alive.
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
    /// Takes the work out, if it is such, and makes the slot free; a free one stays as it is.
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

/// What the driver calls.
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
