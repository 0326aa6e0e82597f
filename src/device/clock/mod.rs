//! The clock device: streams, events, copy engines, SMs and links on a virtual clock.
//!
//! The schedules of `step` and `overlap` enqueue on it as on any device, so its times describe the schedule that runs
//! in production. It computes times from a table of costs: the same calls give the same times on every machine.
//!
//! **Two uses.** [`ClockDevice::new`] has no memory: addresses are numbers, nothing is copied, and a layout of any
//! size is accepted. The simulator uses it. [`ClockDevice::over`] also runs each operation on an inline device
//! beneath, at the operation's virtual time. With a seed, operations are delayed, prolonged and reordered as far as
//! streams and events allow. So a missing or wrong edge gives wrong bytes for some seed, and for that seed every
//! time.
//!
//! **When things run.** Time advances when the host waits ([`Device::synchronize`], [`ClockDevice::run`]), a little
//! when it polls ([`Device::query`]), when a stream's queue is full, and when the device is dropped. Without a seed,
//! enqueueing runs nothing: the host is as far ahead as possible. With a seed the host is sometimes slow, and
//! enqueued work runs meanwhile, so that a late action of the host shows as well. Polling a ticket does not advance
//! time: a loop that waits for a ticket must also query an event.
//!
//! **L2.** A prefetch takes its time and its part of the memory's rate, and works that say which addresses they read
//! find the bytes there ([`ClockDevice::compute_reading`]); `l2` says what the model leaves out.
//!
//! **What it does not do.** It does not compute what a resolve would find, so the caller declares the rows that a
//! gather moves ([`ClockDevice::set_misses`]). It does not check that operations are ordered (`check` does). It never
//! runs two operations at the same instant: an effect happens in one piece, at its operation's start or end.

mod chance;
mod checks;
mod costs;
mod effect;
mod kernels;
mod l2;
mod operations;
mod peers;
#[cfg(test)]
mod tests;
mod timeline;

use std::ops::Range;

use crate::device::ranges::Ranges;
use crate::device::{Device, DeviceId, Event, Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::Layer;
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, thread};

use chance::Draw;
use checks::{Extents, NAME};
use costs::Work;
pub use costs::{Costs, Demand, Direction, Kernel, L2, Link, Mover, Peer};
use effect::{Beneath, Effect, call};
pub use kernels::{BLOCK_BYTES, Between, Cost, Design, KernelCosts, Resolve, SOURCES, fetched, sum};
use l2::Addresses;
use peers::Peers;
use timeline::{Due, Machine, Next, Operation, Timeline, Until};
pub use timeline::{Label, Span};

/// The granularity, and the first address, of a device without memory; so no slice has a null address.
const LINE: u64 = 4096;

/// The options of a clock device.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClockOptions {
    /// The seed of random delays and orders. `None`: exact costs.
    pub seed: Option<u64>,
    /// Makes the operation of this number fail, and the device with it. Operations count from 0 in the clock's order;
    /// engines' calls, records, waits and tickets do not count.
    pub fail_operation: Option<u64>,
    /// The cost table.
    pub costs: Costs,
    /// Keeps the span of every operation.
    pub record: bool,
}

/// The capacity of a stream's queue. With a seed it is that of a driver's queue, which makes the host wait; without a
/// seed it exceeds any step.
const QUEUE: [usize; 2] = [1 << 10, 1 << 20];

/// The clock device. See the [module](self) page.
#[derive(Debug)]
pub struct ClockDevice {
    /// The id of the device beneath, if there is one, so that its slices are this device's too.
    id: DeviceId,
    seed: Option<u64>,
    costs: Costs,
    beneath: Option<Beneath>,
    state: Mutex<State>,
    /// Signals that no thread is advancing the clock any more.
    idle: Condvar,
}

#[derive(Debug)]
struct State {
    timeline: Timeline<Box<Effect>>,
    pools: Vec<Extents>,
    /// For each layer, the rows that a batch row misses.
    misses: Vec<f64>,
    /// The first failure.
    failure: Option<Kind>,
    /// For each stream, how many operations were enqueued; and how often the host has polled.
    enqueued: Vec<u64>,
    polls: u64,
    /// How often the host has enqueued an operation.
    calls: u64,
    /// The number of waits enqueued so far, and the numbers of those to leave out.
    waits: u64,
    without: Range<u64>,
    /// The only stream that accepts operations, if set; and the first rejection since.
    confined: Option<Stream>,
    refusal: Option<Error>,
    /// The thread that advances the clock.
    driver: Option<thread::ThreadId>,
    /// The next free address of a device without memory.
    next_address: u64,
    /// Its backings and ranges, without a device beneath.
    ranges: Ranges,
    /// Slices in host memory: address and end.
    host: Vec<(u64, u64)>,
    /// Addresses that map other GPUs' memory.
    peers: Peers,
}

fn unknown(what: &'static str, handle: u64) -> Error {
    Error::new(Kind::OutOfRange, NAME).at(what).with("handle", handle)
}

/// The error of a wait that can never end, because no remaining operation can run.
fn stuck() -> Error {
    Error::new(Kind::Busy, "clock device")
        .at("the record waited for comes after a hold, or is on a stream that waits for one")
        .hint("release the stream with let_go first")
}

/// The addresses of a slice.
fn addresses(slice: &Slice) -> Addresses {
    (slice.address(), slice.address().saturating_add(slice.bytes()))
}

impl ClockDevice {
    /// A device without memory, at time 0.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the cost that is out of range.
    pub fn new(options: ClockOptions) -> Result<Arc<ClockDevice>> {
        Self::with(options, None)
    }

    /// A clock device whose operations also run on `device`. That device must run an operation in the call that
    /// enqueues it, and nothing else may use it. Memory and slices are that device's.
    ///
    /// # Errors
    /// As [`ClockDevice::new`]; those of [`Device::stream`] and [`Device::event`].
    pub fn over(device: Arc<dyn Device>, options: ClockOptions) -> Result<Arc<ClockDevice>> {
        let beneath = Beneath::new(device)?;
        Self::with(options, Some(beneath))
    }

    fn with(options: ClockOptions, beneath: Option<Beneath>) -> Result<Arc<ClockDevice>> {
        let ClockOptions { seed, fail_operation, costs, record } = options;
        costs.check()?;
        let machine = Machine {
            link: Direction::ALL.map(|direction| costs.link_rate(direction)),
            duplex: costs.link.duplex,
            copy_engines: Direction::ALL.map(|direction| costs.copy_engines(direction)),
            memory: costs.memory_rate(),
            l2: costs.l2.map(|l2| l2.bytes),
        };
        let id = beneath.as_ref().map_or_else(DeviceId::new, |beneath| beneath.device.id());
        let state = State {
            timeline: Timeline::new(machine, fail_operation.unwrap_or(u64::MAX), record),
            pools: Vec::new(),
            misses: Vec::new(),
            failure: None,
            enqueued: Vec::new(),
            polls: 0,
            calls: 0,
            waits: 0,
            without: 0..0,
            confined: None,
            refusal: None,
            driver: None,
            next_address: 1 << 20,
            ranges: Ranges::new(id, LINE),
            host: Vec::new(),
            peers: Peers::default(),
        };
        let (state, idle) = (Mutex::new(state), Condvar::new());
        Ok(Arc::new(ClockDevice { id, seed, costs, beneath, state, idle }))
    }

    // ---- beyond the trait ----------------------------------------------------------------------------

    /// Enqueues a stand-in for an engine's work.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a demand out of range, or of more than 1e15 ns; those of [`Device::record`].
    pub fn compute(&self, stream: Stream, label: Label, demand: Demand) -> Result<()> {
        self.append(stream, label, Work::demand(demand)?, None)
    }

    /// Enqueues a stand-in for an engine's work that reads and writes `bytes` bytes of the device's memory. It takes
    /// the demand's time, or that of its bytes at [`Costs::memory`] if that is longer, and more beside others that use
    /// the memory.
    ///
    /// # Errors
    /// As [`ClockDevice::compute`], and for bytes that take more than 1e15 ns.
    pub fn compute_in_memory(&self, stream: Stream, label: Label, demand: Demand, bytes: u64) -> Result<()> {
        self.append(stream, label, Work::in_memory(&self.costs, demand, bytes as f64)?, None)
    }

    /// As [`ClockDevice::compute_in_memory`], where some of the `bytes` bytes are read at known addresses, each slice
    /// once: those that are in L2 ([`Costs::l2`]) when the work starts are not read from memory.
    ///
    /// # Errors
    /// As [`ClockDevice::compute_in_memory`]; [`Kind::OutOfRange`] for a slice of another device, and for slices of
    /// more bytes than `bytes`.
    pub fn compute_reading(
        &self,
        stream: Stream,
        label: Label,
        demand: Demand,
        bytes: u64,
        reads: &[Slice],
    ) -> Result<()> {
        reads.iter().try_for_each(|slice| self.id.check(slice))?;
        let known = reads.iter().fold(0_u64, |sum, slice| sum.saturating_add(slice.bytes()));
        if known > bytes {
            return Err(unknown("slices of more bytes than the work moves", known));
        }
        let touches: Vec<Addresses> = reads.iter().filter(|slice| slice.bytes() > 0).map(addresses).collect();
        if touches.is_empty() {
            return self.compute_in_memory(stream, label, demand, bytes);
        }
        self.append_at(stream, label, Work::reading(demand, bytes as f64)?, touches)
    }

    /// Enqueues a stand-in for an engine's collective, which moves `bytes` bytes over the link between GPUs and takes
    /// the demand's time if it has its part of that link and of the SMs to itself. Beside others it takes longer: all
    /// that cross the link divide its rate.
    ///
    /// # Errors
    /// As [`ClockDevice::compute`], and for bytes that take more than 1e15 ns.
    pub fn collective(&self, stream: Stream, label: Label, demand: Demand, bytes: u64) -> Result<()> {
        self.append(stream, label, Work::collective(demand, bytes as f64)?, None)
    }

    /// Enqueues a copy of `bytes` by a copy engine, for traffic outside of steps.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for bytes that take more than 1e15 ns; those of [`Device::record`].
    pub fn traffic(&self, stream: Stream, label: Label, direction: Direction, bytes: u64) -> Result<()> {
        self.append(stream, label, Work::copy(&self.costs, direction, bytes as f64), None)
    }

    /// Declares the mean number of rows that one batch row misses in `layer`. Gathers that are enqueued from now on
    /// move so many. It is 0 before the first call.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a negative number, NaN, or one above 1e9.
    pub fn set_misses(&self, layer: Layer, rows: f64) -> Result<()> {
        costs::check_misses(rows)?;
        let misses = &mut self.state.lock().misses;
        if misses.len() <= layer.index() {
            misses.resize(layer.index() + 1, 0.0);
        }
        misses[layer.index()] = rows;
        Ok(())
    }

    /// Runs everything that is enqueued. Returns the time in nanoseconds.
    ///
    /// # Errors
    /// [`Kind::Busy`] when a stream is held, [`Kind::DeviceFailed`] when the device has failed.
    pub fn run(&self) -> Result<f64> {
        let state = self.drive(Until::Idle)?;
        state.check().map(|()| state.timeline.now())
    }

    /// Runs everything, then restarts at time 0: records, spans and declared misses are cleared, and the seed's draws
    /// start again. Streams, events, memory and pools stay. The numbers of the failing operation and of the left-out
    /// waits stay set, and count from 0 again.
    ///
    /// # Errors
    /// As [`ClockDevice::run`].
    pub fn reset(&self) -> Result<()> {
        let mut state = self.drive(Until::Idle)?;
        state.check()?;
        state.timeline.reset();
        state.misses.clear();
        state.enqueued.fill(0);
        (state.polls, state.calls, state.waits) = (0, 0, 0);
        Ok(())
    }

    /// The time, in nanoseconds.
    pub fn now(&self) -> f64 {
        self.state.lock().timeline.now()
    }

    /// The time at which the last record of `event` was reached, in nanoseconds. `None` if it has not been reached,
    /// or was never recorded.
    pub fn reached(&self, event: Event) -> Option<f64> {
        let state = self.state.lock();
        state.timeline.find_event(event).and_then(|event| state.timeline.reached_ns(event))
    }

    /// The spans of all ended operations, in the order of their ends. Empty unless [`ClockOptions::record`] is set.
    pub fn spans(&self) -> Vec<Span> {
        self.state.lock().timeline.spans().to_vec()
    }

    /// The number of operations that have taken effect, in the count of [`ClockOptions::fail_operation`].
    pub fn operations(&self) -> u64 {
        self.state.lock().timeline.counted()
    }

    /// Leaves out the waits of these numbers, counted from 0 over all streams, as if the schedule had forgotten them.
    /// Tests use it to show that a missing wait is found.
    pub fn without_waits(&self, numbers: Range<u64>) {
        self.state.lock().without = numbers;
    }

    /// The number of waits enqueued so far, including those left out.
    pub fn waits(&self) -> u64 {
        self.state.lock().waits
    }

    /// Holds a stream at its current end: operations enqueued from now on wait for [`ClockDevice::let_go`].
    ///
    /// # Errors
    /// Those of [`Device::record`].
    pub fn hold(&self, stream: Stream) -> Result<()> {
        let mut state = self.state.lock();
        let stream = state.stream(stream)?;
        state.timeline.hold(stream);
        Ok(())
    }

    /// Lets a stream continue past every [`ClockDevice::hold`] so far.
    ///
    /// # Errors
    /// Those of [`Device::record`].
    pub fn let_go(&self, stream: Stream) -> Result<()> {
        let mut state = self.state.lock();
        let stream = state.stream(stream)?;
        state.timeline.let_go(stream);
        Ok(())
    }

    // ---- enqueueing ----------------------------------------------------------------------------------

    /// The state, with room in the stream's queue.
    fn room(&self, stream: Stream) -> Result<(MutexGuard<'_, State>, usize)> {
        let most = QUEUE[usize::from(self.seed.is_none())];
        let mut state = self.state.lock();
        if let Some(only) = state.confined.filter(|only| *only != stream) {
            let error = Error::new(Kind::InvalidConfig, "clock device")
                .at("an operation on another stream than the one that was given")
                .with("stream", stream.0)
                .with("given", only.0);
            return Err(state.refusal.get_or_insert(error).clone());
        }
        let place = state.stream(stream)?;
        let mut until = (state.timeline.queued(place) >= most).then_some(Until::Room(stream, most));
        // Time does not advance while a callback enqueues.
        if let (Some(seed), None, None) = (self.seed, until, state.driver) {
            state.calls += 1;
            let passes = chance::enqueueing(seed, state.calls);
            until = (passes > 0.0).then_some(Until::Time(state.timeline.now() + passes));
        }
        if let Some(until) = until {
            drop(state);
            state = self.drive(until)?;
        }
        Ok((state, place))
    }

    fn append(&self, stream: Stream, label: Label, work: Work, effect: Option<Effect>) -> Result<()> {
        let work = work.check(&self.costs)?;
        let (state, place) = self.room(stream)?;
        self.push(state, place, label, work, Vec::new(), effect);
        Ok(())
    }

    /// As [`ClockDevice::append`], for work without an effect whose bytes, or some of them, are at known addresses.
    fn append_at(&self, stream: Stream, label: Label, work: Work, touches: Vec<Addresses>) -> Result<()> {
        let work = work.check(&self.costs)?;
        let (state, place) = self.room(stream)?;
        self.push(state, place, label, work, touches, None);
        Ok(())
    }

    fn push(
        &self,
        mut state: MutexGuard<'_, State>,
        stream: usize,
        label: Label,
        mut work: Work,
        touches: Vec<Addresses>,
        effect: Option<Effect>,
    ) {
        let draw = self.draw(&mut state, stream);
        work.fixed_ns += draw.during_ns;
        let gap_ns = self.costs.launch_ns + draw.before_ns;
        let effect = effect.map(Box::new);
        let operation = Operation { label, work, gap_ns, early: draw.early, counts: true, effect, touches };
        state.timeline.operation(stream, operation);
    }

    /// Enqueues an item that takes no time.
    fn point(&self, stream: Stream, effect: Effect) -> Result<()> {
        let (mut state, place) = self.room(stream)?;
        let draw = self.draw(&mut state, place);
        let label = Label { name: "call", layer: None, micro_batch: None };
        let operation = Operation {
            label,
            work: Work::default(),
            gap_ns: draw.before_ns,
            early: false,
            counts: false,
            effect: Some(Box::new(effect)),
            touches: Vec::new(),
        };
        state.timeline.operation(place, operation);
        Ok(())
    }

    fn draw(&self, state: &mut State, stream: usize) -> Draw {
        let Some(seed) = self.seed else { return Draw::NONE };
        state.enqueued[stream] += 1;
        chance::operation(seed, stream as u64, state.enqueued[stream])
    }

    // ---- running -------------------------------------------------------------------------------------

    /// Advances the clock until `until` is met. Effects happen here, on the caller's thread, with no lock held,
    /// because a callback may use the device.
    fn drive(&self, until: Until) -> Result<MutexGuard<'_, State>> {
        let me = thread::current().id();
        // Declared before the lock, so that it is dropped after the lock.
        let mut driving = Driving(None);
        let mut state = self.state.lock();
        while let Some(driver) = state.driver {
            if driver == me {
                return Err(Error::new(Kind::Busy, "clock device").at("a callback waits for the device"));
            }
            state = self.idle.wait(state);
        }
        state.driver = Some(me);
        driving.0 = Some(self);
        let met = loop {
            match state.timeline.next(until) {
                Next::Met => break Ok(()),
                Next::Stuck => break Err(stuck()),
                Next::Due(due) => state = self.take_effect(state, due),
            }
        };
        driving.0 = None;
        self.let_others_drive(&mut state);
        met.map(|()| state)
    }

    fn let_others_drive(&self, state: &mut State) {
        state.driver = None;
        self.idle.notify_all();
    }

    fn take_effect<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        due: Due<Box<Effect>>,
    ) -> MutexGuard<'a, State> {
        if due.fails {
            state.failure.get_or_insert(Kind::DeviceFailed);
        }
        let Some(effect) = due.effect else { return state };
        let (failure, beneath) = (state.failure, self.beneath.as_ref());
        let staged = match &*effect {
            Effect::Pool(pools, op) => {
                pools.of(self.id).ok().and_then(|index| state.pools.get(index)?.staged(op))
            }
            _ => None,
        };
        drop(state);
        let ended = match (*effect, beneath, failure) {
            (Effect::Complete(completer), _, None) => {
                completer.done();
                Ok(())
            }
            (Effect::Complete(completer), _, Some(kind)) => {
                completer.fail(kind);
                Ok(())
            }
            (Effect::Call(work), ..) => call(&*work),
            // After a failure memory no longer changes.
            (_, None, _) | (_, _, Some(_)) => Ok(()),
            (Effect::Copy { from, to }, Some(beneath), None) => beneath.copy(from, to).map_err(kind_of),
            (Effect::Pool(pools, op), Some(beneath), None) => {
                let op = staged.as_ref().map_or(op, |staged| staged.attached(op));
                beneath.run(pools, op).map_err(kind_of)
            }
            (Effect::Pages(kept), Some(beneath), None) => beneath.run_pages(&kept).map_err(kind_of),
        };
        let mut state = self.state.lock();
        if let Err(kind) = ended {
            state.failure.get_or_insert(kind);
        }
        state
    }
}

/// Marks the thread that is advancing the clock. If an effect panics, dropping this makes the device fail, and
/// waiting threads continue and see the failure.
struct Driving<'a>(Option<&'a ClockDevice>);

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        if let Some(clock) = self.0 {
            let mut state = clock.state.lock();
            state.failure.get_or_insert(Kind::Internal);
            clock.let_others_drive(&mut state);
        }
    }
}

/// The kind of a failure; a failed device reports the kind of its first failure.
fn kind_of(error: Error) -> Kind {
    let first = error.number("kind").and_then(|code| Kind::ALL.into_iter().find(|k| *k as u64 == code));
    first.unwrap_or(error.kind())
}

impl State {
    fn check(&self) -> Result<()> {
        match self.failure {
            None => Ok(()),
            Some(cause) => Err(Error::new(Kind::DeviceFailed, "clock device")
                .at(cause.describe())
                .with("kind", cause as u32)),
        }
    }

    fn stream(&self, stream: Stream) -> Result<usize> {
        self.timeline.find_stream(stream).ok_or_else(|| unknown("stream", stream.0))
    }

    fn event(&self, event: Event) -> Result<usize> {
        self.timeline.find_event(event).ok_or_else(|| unknown("event", event.0))
    }

    /// Whether an address is in host memory.
    fn is_host(&self, address: u64) -> bool {
        self.host.iter().any(|(start, end)| (*start..*end).contains(&address))
    }
}

impl Drop for ClockDevice {
    fn drop(&mut self) {
        let streams = self.state.lock().enqueued.len();
        (0..streams as u64).for_each(|stream| drop(self.let_go(Stream(stream))));
        // Queued operations still run, so that tickets end and the memory that they guard is released.
        drop(self.drive(Until::Idle));
    }
}
