//! The clock device: streams, events, copy engines, SMs and a link on a virtual clock.
//!
//! The schedules of `step` and `overlap` enqueue on it as on any device, so what it says about time it says
//! about the schedule that runs in production. It does not compute faster or slower than the machine: it
//! reckons, from a table of costs, and the same calls give the same times on every machine.
//!
//! **Two uses.** [`ClockDevice::new`] has no memory: addresses are numbers, nothing is copied, a plan of any
//! size is taken. It is the simulator's device. [`ClockDevice::over`] lets each operation take effect on a
//! device beneath, whose streams run an operation where it is enqueued, when its time has come: with a seed
//! operations are delayed, drawn out and reordered as far as streams and events allow, so that a missing or
//! wrong edge gives wrong bytes for some seed, and for that seed every time.
//!
//! **When things run.** Time goes on when the host waits ([`Device::synchronize`], [`ClockDevice::run`]), when it
//! looks ([`Device::query`]: a little), when a stream's queue is full, and when the device is dropped. Without a
//! seed enqueueing runs nothing: the host is as far ahead as it can be. With one the host is slow now and then,
//! and what is enqueued runs meanwhile, so that what the host itself does too late shows as well. A look at a
//! ticket moves nothing: who waits for one in a loop has to look at an event too.
//!
//! **What it does not do.** It does not know what a resolve would find, so the rows that a gather moves are
//! declared ([`ClockDevice::set_misses`]). It does not check that operations are ordered
//! (`check` does), nor run two at the same instant: an effect is whole, at its operation's start or
//! at its end.

mod chance;
mod checks;
mod costs;
mod effect;
mod kernels;
mod operations;
#[cfg(test)]
mod tests;
mod timeline;

use std::ops::Range;

use crate::device::{Device, DeviceId, Event, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::Layer;
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, thread};

use chance::Draw;
use checks::{Extents, NAME};
use costs::Work;
pub use costs::{Costs, Demand, Direction, Kernel, Link, Mover};
use effect::{Beneath, Effect, call};
pub use kernels::{BLOCK_BYTES, Between, Cost, Design, KernelCosts, Resolve, SOURCES, fetched, sum};
use timeline::{Due, Machine, Next, Operation, Timeline, Until};
pub use timeline::{Label, Span};

/// How a clock device runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClockOptions {
    /// Delays and orders by chance; without a seed, exact costs.
    pub seed: Option<u64>,
    /// Fails the operation of this number, in the order of the clock from 0, and with it the device. Engines'
    /// calls, records, waits and tickets do not count.
    pub fail_operation: Option<u64>,
    /// What things cost.
    pub costs: Costs,
    /// Keeps the span of every operation.
    pub record: bool,
}

/// Things that a stream's queue holds. By chance it is the queue of a driver, which makes the host wait;
/// exactly, it is as long as any step.
const QUEUE: [usize; 2] = [1 << 10, 1 << 20];

/// See the module's head.
#[derive(Debug)]
pub struct ClockDevice {
    /// The device's beneath, where there is one: its slices are its own.
    id: DeviceId,
    seed: Option<u64>,
    costs: Costs,
    beneath: Option<Beneath>,
    state: Mutex<State>,
    /// Signals that nobody moves the clock any more.
    idle: Condvar,
}

#[derive(Debug)]
struct State {
    timeline: Timeline<Box<Effect>>,
    pools: Vec<Extents>,
    /// By layer the rows that a batch row misses.
    misses: Vec<f64>,
    /// The first failure.
    failure: Option<Kind>,
    /// By stream how many operations have been enqueued, and how often the host has looked.
    enqueued: Vec<u64>,
    polls: u64,
    /// How often it has enqueued something.
    calls: u64,
    /// Waits that have been enqueued, and those that are left out.
    waits: u64,
    without: Range<u64>,
    /// Nobody but this stream takes operations; and the first refusal since.
    confined: Option<Stream>,
    refusal: Option<Error>,
    /// Who moves the clock on.
    driver: Option<thread::ThreadId>,
    /// Where the next memory of a device without memory stands.
    next_address: u64,
    /// Bytes of its backings.
    backings: Vec<u64>,
    /// What stands in host memory: address and end.
    host: Vec<(u64, u64)>,
}

fn unknown(what: &'static str, handle: u64) -> Error {
    Error::new(Kind::OutOfRange, NAME).at(what).with("handle", handle)
}

/// What cannot be waited for, because nothing that is left can run.
fn stuck() -> Error {
    Error::new(Kind::Busy, "clock device")
        .at("what is waited for stands behind a stream that is held")
        .hint("let the stream go first")
}

impl ClockDevice {
    /// A device without memory, at time 0.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the cost that makes no sense.
    pub fn new(options: ClockOptions) -> Result<Arc<ClockDevice>> {
        Self::with(options, None)
    }

    /// A device whose operations take effect on `device`, which must run an operation in the call that
    /// enqueues it, and is driven by nobody else. Memory and slices are that device's.
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
            link: [Direction::ToDevice, Direction::ToHost].map(|direction| costs.link_rate(direction)),
            duplex: costs.link.duplex,
            copy_engines: costs.link.copy_engines,
        };
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
            backings: Vec::new(),
            host: Vec::new(),
        };
        let id = beneath.as_ref().map_or_else(DeviceId::new, |beneath| beneath.device.id());
        let (state, idle) = (Mutex::new(state), Condvar::new());
        Ok(Arc::new(ClockDevice { id, seed, costs, beneath, state, idle }))
    }

    // ---- what only a clock has -----------------------------------------------------------------------

    /// Enqueues an engine's work.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a demand that makes no sense, or of more than 1e15 ns; those of [`Device::record`].
    pub fn compute(&self, stream: Stream, label: Label, demand: Demand) -> Result<()> {
        self.append(stream, label, Work::demand(demand)?, None)
    }

    /// Enqueues a copy of `bytes` by a copy engine: traffic that is not a step's.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for bytes that take more than 1e15 ns; those of [`Device::record`].
    pub fn traffic(&self, stream: Stream, label: Label, direction: Direction, bytes: u64) -> Result<()> {
        self.append(stream, label, Work::copy(&self.costs, direction, bytes as f64), None)
    }

    /// Declares how many rows one batch row misses when it is resolved in `layer`, on average: what a gather
    /// moves that is enqueued from now on. None before the first call.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a number that is negative, none, or above 1e9.
    pub fn set_misses(&self, layer: Layer, rows: f64) -> Result<()> {
        costs::check_misses(rows)?;
        let misses = &mut self.state.lock().misses;
        if misses.len() <= layer.index() {
            misses.resize(layer.index() + 1, 0.0);
        }
        misses[layer.index()] = rows;
        Ok(())
    }

    /// Runs everything that is enqueued. Answers the time, in nanoseconds.
    ///
    /// # Errors
    /// [`Kind::Busy`] when a stream is held, [`Kind::DeviceFailed`] when the device has failed.
    pub fn run(&self) -> Result<f64> {
        let state = self.drive(Until::Idle)?;
        state.check().map(|()| state.timeline.now())
    }

    /// Runs everything, then begins anew at time 0: no event is recorded, no span kept, no miss declared, and
    /// chance begins again. Streams, events, memory and pools stay; the operation that fails and the waits that
    /// are left out stay as they were set, and are counted from 0 again.
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

    /// When the last record of `event` was reached, in nanoseconds; none if it has not been, or was never
    /// recorded.
    pub fn reached(&self, event: Event) -> Option<f64> {
        let state = self.state.lock();
        state.timeline.find_event(event).and_then(|event| state.timeline.reached_ns(event))
    }

    /// The spans of all operations that have ended, in the order of their ends; none unless
    /// [`ClockOptions::record`] was set.
    pub fn spans(&self) -> Vec<Span> {
        self.state.lock().timeline.spans().to_vec()
    }

    /// Operations that have taken effect: what [`ClockOptions::fail_operation`] counts.
    pub fn operations(&self) -> u64 {
        self.state.lock().timeline.counted()
    }

    /// For controls: leaves out the waits of these numbers, counted from 0 over all streams, as if the
    /// schedule had forgotten them.
    pub fn without_waits(&self, numbers: Range<u64>) {
        self.state.lock().without = numbers;
    }

    /// Waits that have been enqueued, those that were left out among them.
    pub fn waits(&self) -> u64 {
        self.state.lock().waits
    }

    /// Holds a stream at its end: what is enqueued on it from now on waits until it is let go.
    ///
    /// # Errors
    /// Those of [`Device::record`].
    pub fn hold(&self, stream: Stream) -> Result<()> {
        let mut state = self.state.lock();
        let stream = state.stream(stream)?;
        state.timeline.hold(stream);
        Ok(())
    }

    /// Lets a stream go on past every [`ClockDevice::hold`].
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
        // A callback enqueues while time stands still.
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
        self.push(state, place, label, work, effect);
        Ok(())
    }

    fn push(
        &self,
        mut state: MutexGuard<'_, State>,
        stream: usize,
        label: Label,
        mut work: Work,
        effect: Option<Effect>,
    ) {
        let draw = self.draw(&mut state, stream);
        work.fixed_ns += draw.during_ns;
        let gap_ns = self.costs.launch_ns + draw.before_ns;
        let effect = effect.map(Box::new);
        let operation = Operation { label, work, gap_ns, early: draw.early, counts: true, effect };
        state.timeline.operation(stream, operation);
    }

    /// Enqueues what takes no time.
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

    /// Moves the clock on until `until` is met. Effects happen here, on the caller's thread, with no lock
    /// held, because a callback may use the device.
    fn drive(&self, until: Until) -> Result<MutexGuard<'_, State>> {
        let me = thread::current().id();
        // Stands before the lock, and so is dropped behind it.
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
            // After a failure memory stays as it is.
            (_, None, _) | (_, _, Some(_)) => Ok(()),
            (Effect::Copy { from, to }, Some(beneath), None) => beneath.copy(from, to).map_err(kind_of),
            (Effect::Pool(pools, op), Some(beneath), None) => {
                let op = staged.as_ref().map_or(op, |staged| staged.attached(op));
                beneath.run(pools, op).map_err(kind_of)
            }
        };
        let mut state = self.state.lock();
        if let Err(kind) = ended {
            state.failure.get_or_insert(kind);
        }
        state
    }
}

/// Who moves the clock on, until that has come to its end. If an effect panics instead, the device has failed, and
/// whoever waits goes on to see it.
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

/// What failed: a device that has failed says which kind was the first.
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

    /// Whether an address stands in host memory.
    fn is_host(&self, address: u64) -> bool {
        self.host.iter().any(|(start, end)| (*start..*end).contains(&address))
    }
}

impl Drop for ClockDevice {
    fn drop(&mut self) {
        let streams = self.state.lock().enqueued.len();
        (0..streams as u64).for_each(|stream| drop(self.let_go(Stream(stream))));
        // What is queued still runs: tickets end, and what they guard is given back.
        drop(self.drive(Until::Idle));
    }
}
