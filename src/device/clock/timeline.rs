//! The virtual timeline: streams, copy engines, and links and SMs that operations divide among them.
//!
//! It is a discrete-event simulation with processor sharing. Each stream runs one operation at a time, which goes
//! through these states:
//!
//! | state | until |
//! |---|---|
//! | gap | its launch gap is over |
//! | queued | a copy engine of its direction is free; in the order of becoming ready (copies only) |
//! | fixed | its fixed time is over |
//! | rest | its demand is served, at a rate that changes whenever the set of running operations does |
//!
//! **Rates.** A demand for SMs is served at `1 / max(1, sum of the demands)` of its full speed. Each transfer gets an
//! equal part of the direction's rate, and of the rate that other transfers cannot use. Where all of them together need
//! more of the device's memory than it has, each one that uses the memory is slowed by that factor. Bytes that it finds
//! in L2 when its rest begins are none of these.
//!
//! **Determinism.** The result depends only on the order of the calls: simultaneous events are processed in the order
//! of their streams. The timeline hands effects to the caller, which runs them outside, one at a time, before time
//! advances. An operation that is enqueued after the clock has advanced starts no earlier than the present time.
//! Nothing allocates once the queues have grown to their largest size.

use std::collections::VecDeque;

use crate::device::clock::costs::{Direction, Work};
use crate::device::clock::l2::{Addresses, L2};
use crate::device::{Event, Stream};
use crate::ids::{Layer, MicroBatch};

/// The label of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// The operation's name.
    pub name: &'static str,
    /// The operation's layer, if it has one.
    pub layer: Option<Layer>,
    /// The operation's micro-batch, if it has one.
    pub micro_batch: Option<MicroBatch>,
}

/// An operation's time on the virtual clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The stream on which it ran.
    pub stream: Stream,
    /// The operation's name.
    pub name: &'static str,
    /// The operation's layer, if it has one.
    pub layer: Option<Layer>,
    /// The operation's micro-batch, if it has one.
    pub micro_batch: Option<MicroBatch>,
    /// Nanoseconds at its start, after the launch gap.
    pub start_ns: f64,
    /// Nanoseconds at its end.
    pub end_ns: f64,
}

/// An operation in a stream's queue.
#[derive(Clone, Debug)]
pub(super) struct Operation<E> {
    pub(super) label: Label,
    pub(super) work: Work,
    /// Nanoseconds between the end of what it follows and its start.
    pub(super) gap_ns: f64,
    /// Whether its effect happens at its start; otherwise at its end.
    pub(super) early: bool,
    /// Whether it counts and is recorded; a mere point in a stream is not.
    pub(super) counts: bool,
    pub(super) effect: Option<E>,
    /// The addresses of its bytes in memory, as far as they are known.
    pub(super) touches: Vec<Addresses>,
}

/// An effect that is due. Time does not advance until the caller has run it.
#[derive(Debug)]
pub(super) struct Due<E> {
    pub(super) effect: Option<E>,
    /// Whether this is the operation that is meant to fail.
    pub(super) fails: bool,
}

/// How far to run.
#[derive(Clone, Copy, Debug)]
pub(super) enum Until {
    /// Nothing is left.
    Idle,
    /// The clock has reached this time.
    Time(f64),
    /// This record of an event has been reached.
    Reached(Event, u64),
    /// A stream's queue holds less than this.
    Room(Stream, usize),
}

#[derive(Debug)]
pub(super) enum Next<E> {
    Due(Due<E>),
    Met,
    /// The remaining operations wait for a stream that is held.
    Stuck,
}

#[derive(Debug)]
enum Thing<E> {
    Operation(Operation<E>),
    Record(usize, u64),
    Wait(usize, u64),
    Hold(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing runs; the queue has the next item.
    Free,
    /// A wait or a hold is at the queue's head.
    Blocked,
    Gap,
    Queued,
    Fixed,
    Rest,
}

#[derive(Debug)]
struct Line<E> {
    queue: VecDeque<Thing<E>>,
    state: State,
    current: Option<Operation<E>>,
    start: f64,
    /// Bytes of it that were in L2.
    found: u64,
    /// The fraction of the rest that was left at `since`, and its rate per nanosecond from then on.
    left: f64,
    since: f64,
    rate: f64,
    /// The number of holds enqueued, and of those released.
    holds: u64,
    let_go: u64,
}

#[derive(Debug, Default)]
struct EventState {
    recorded: u64,
    /// All records up to this one have been reached, and those in `ahead`.
    reached: u64,
    ahead: Vec<u64>,
    /// The time at which the last record was reached.
    last_ns: Option<f64>,
}

impl EventState {
    fn has(&self, number: u64) -> bool {
        number <= self.reached || self.ahead.contains(&number)
    }

    fn reach(&mut self, number: u64, now: f64) {
        if number == self.reached + 1 {
            self.reached = number;
            while let Some(place) = self.ahead.iter().position(|n| *n == self.reached + 1) {
                self.ahead.swap_remove(place);
                self.reached += 1;
            }
        } else {
            self.ahead.push(number);
        }
        if number == self.recorded {
            self.last_ns = Some(now);
        }
    }
}

/// The copy engines of one direction.
#[derive(Debug, Default)]
struct CopyEngines {
    busy: u32,
    queue: VecDeque<usize>,
}

/// Directions of links.
const SIDES: usize = Direction::ALL.len();

/// The machine's resources.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    /// Bytes per nanosecond, by direction.
    pub(super) link: [f64; SIDES],
    /// The fraction of its rate that a direction of the link to the host keeps while the other is busy.
    pub(super) duplex: f64,
    /// Copy engines of each direction.
    pub(super) copy_engines: [u32; SIDES],
    /// Bytes per nanosecond of the device's memory, reads and writes together.
    pub(super) memory: f64,
    /// Bytes of L2, if there is one.
    pub(super) l2: Option<u64>,
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Timeline<E> {
    machine: Machine,
    now: f64,
    lines: Vec<Line<E>>,
    /// For each stream, the time at which its timer ends or its rest is served; infinite if it has neither.
    finish: Vec<f64>,
    /// Streams whose queue has to be examined.
    ready: Vec<usize>,
    /// Streams in [`State::Rest`].
    working: Vec<usize>,
    /// Working memory for computing rates.
    moving: Vec<Moving>,
    rates: Vec<Rate>,
    /// Streams whose head is a wait, and for what.
    waiting: Vec<(usize, usize, u64)>,
    events: Vec<EventState>,
    copy_engines: [CopyEngines; SIDES],
    l2: Option<L2>,
    due: VecDeque<Due<E>>,
    /// Whether the set of working streams has changed since the rates were computed.
    stale: bool,
    counted: u64,
    fail: u64,
    spans: Option<Vec<Span>>,
}

/// An operation that moves bytes over a link.
#[derive(Clone, Copy, Debug)]
struct Moving {
    stream: usize,
    side: usize,
    bytes: f64,
    /// Bytes in the device's memory.
    traffic: f64,
    /// Bytes per nanosecond that it can use at most.
    most: f64,
}

/// How fast an operation's rest is served, as a fraction per nanosecond, and the bytes of memory in all of the rest.
#[derive(Clone, Copy, Debug)]
struct Rate {
    stream: usize,
    rate: f64,
    traffic: f64,
}

const NEVER: f64 = f64::INFINITY;

fn side(direction: Direction) -> usize {
    direction as usize
}

impl<E> Timeline<E> {
    /// A clock at 0. The counted operation of number `fail`, from 0, is handed out as one that fails;
    /// `record` keeps spans.
    pub(super) fn new(machine: Machine, fail: u64, record: bool) -> Self {
        Timeline {
            machine,
            now: 0.0,
            lines: Vec::new(),
            finish: Vec::new(),
            ready: Vec::new(),
            working: Vec::new(),
            moving: Vec::new(),
            rates: Vec::new(),
            waiting: Vec::new(),
            events: Vec::new(),
            copy_engines: Default::default(),
            l2: machine.l2.map(L2::new),
            due: VecDeque::new(),
            stale: false,
            counted: 0,
            fail,
            spans: record.then(Vec::new),
        }
    }

    pub(super) fn now(&self) -> f64 {
        self.now
    }

    /// The number of operations that have taken effect.
    pub(super) fn counted(&self) -> u64 {
        self.counted
    }

    pub(super) fn spans(&self) -> &[Span] {
        self.spans.as_deref().unwrap_or_default()
    }

    pub(super) fn stream(&mut self) -> Stream {
        self.lines.push(Line {
            queue: VecDeque::new(),
            state: State::Free,
            current: None,
            start: 0.0,
            found: 0,
            left: 0.0,
            since: 0.0,
            rate: 0.0,
            holds: 0,
            let_go: 0,
        });
        self.finish.push(NEVER);
        Stream(self.lines.len() as u64 - 1)
    }

    pub(super) fn event(&mut self) -> Event {
        self.events.push(EventState::default());
        Event(self.events.len() as u64 - 1)
    }

    /// The index of a stream of this clock.
    pub(super) fn find_stream(&self, stream: Stream) -> Option<usize> {
        usize::try_from(stream.0).ok().filter(|place| *place < self.lines.len())
    }

    /// The index of an event of this clock.
    pub(super) fn find_event(&self, event: Event) -> Option<usize> {
        usize::try_from(event.0).ok().filter(|place| *place < self.events.len())
    }

    /// The number of an event's last record, 0 before the first.
    pub(super) fn recorded(&self, event: usize) -> u64 {
        self.events[event].recorded
    }

    /// Whether the last record has been reached.
    pub(super) fn is_complete(&self, event: usize) -> bool {
        let event = &self.events[event];
        event.has(event.recorded)
    }

    /// The time at which the last record was reached.
    pub(super) fn reached_ns(&self, event: usize) -> Option<f64> {
        self.events[event].last_ns
    }

    /// The number of items in a stream's queue, without the running one.
    pub(super) fn queued(&self, stream: usize) -> usize {
        self.lines[stream].queue.len()
    }

    pub(super) fn operation(&mut self, stream: usize, operation: Operation<E>) {
        self.push(stream, Thing::Operation(operation));
    }

    pub(super) fn record(&mut self, event: usize, stream: usize) {
        let state = &mut self.events[event];
        state.recorded += 1;
        state.last_ns = None;
        let number = state.recorded;
        self.push(stream, Thing::Record(event, number));
    }

    pub(super) fn wait(&mut self, stream: usize, event: usize) {
        self.push(stream, Thing::Wait(event, self.events[event].recorded));
    }

    /// Holds a stream at this point until [`Timeline::let_go`].
    pub(super) fn hold(&mut self, stream: usize) {
        self.lines[stream].holds += 1;
        let number = self.lines[stream].holds;
        self.push(stream, Thing::Hold(number));
    }

    /// Lets a stream continue past every hold that was enqueued so far.
    pub(super) fn let_go(&mut self, stream: usize) {
        let line = &mut self.lines[stream];
        line.let_go = line.holds;
        if line.state == State::Blocked && matches!(line.queue.front(), Some(Thing::Hold(_))) {
            self.free(stream);
        }
    }

    /// Resets to time 0, with no event recorded, no operation counted and no span kept. Everything enqueued must have
    /// run.
    pub(super) fn reset(&mut self) {
        (self.now, self.counted) = (0.0, 0);
        for event in &mut self.events {
            (event.recorded, event.reached, event.last_ns) = (0, 0, None);
            event.ahead.clear();
        }
        self.spans.iter_mut().for_each(Vec::clear);
        self.l2.iter_mut().for_each(L2::clear);
    }

    /// Notes that addresses are other memory now.
    pub(super) fn remapped(&mut self, addresses: Addresses) {
        self.l2.iter_mut().for_each(|l2| l2.forget(addresses));
    }

    fn push(&mut self, stream: usize, thing: Thing<E>) {
        let line = &mut self.lines[stream];
        line.queue.push_back(thing);
        if line.state == State::Free && line.queue.len() == 1 {
            self.ready.push(stream);
        }
    }

    /// Marks a stream as idle, so that its next item may run.
    fn free(&mut self, stream: usize) {
        let line = &mut self.lines[stream];
        line.state = State::Free;
        self.finish[stream] = NEVER;
        if !line.queue.is_empty() {
            self.ready.push(stream);
        }
    }

    /// Runs until an effect is due or `until` is met.
    pub(super) fn next(&mut self, until: Until) -> Next<E> {
        loop {
            if let Some(due) = self.due.pop_front() {
                return Next::Due(due);
            }
            if let Some(stream) = self.take_ready() {
                self.advance(stream);
                continue;
            }
            let met = match until {
                Until::Reached(event, number) => self.events[event.0 as usize].has(number),
                Until::Room(stream, room) => self.lines[stream.0 as usize].queue.len() < room,
                Until::Idle | Until::Time(_) => false,
            };
            if met {
                return Next::Met;
            }
            let (stream, time) = self.first_to_finish();
            if self.stale && time > self.now {
                self.share_out();
                continue;
            }
            if let Until::Time(limit) = until
                && time > limit
            {
                self.now = self.now.max(limit);
                return Next::Met;
            }
            if time == NEVER {
                let left = self.lines.iter().any(|line| line.state != State::Free);
                return if left || !matches!(until, Until::Idle) { Next::Stuck } else { Next::Met };
            }
            self.now = time;
            self.go_on(stream);
        }
    }

    /// The first stream whose queue has to be examined.
    fn take_ready(&mut self) -> Option<usize> {
        let place = (0..self.ready.len()).min_by_key(|place| self.ready[*place])?;
        Some(self.ready.swap_remove(place))
    }

    /// The stream whose timer or rest ends first, and when.
    fn first_to_finish(&self) -> (usize, f64) {
        let mut first = (0, NEVER);
        for (stream, time) in self.finish.iter().enumerate() {
            if *time < first.1 {
                first = (stream, *time);
            }
        }
        first
    }

    /// Advances through an idle stream's queue to the next operation, or to an item that blocks it.
    fn advance(&mut self, stream: usize) {
        while let Some(thing) = self.lines[stream].queue.pop_front() {
            match thing {
                Thing::Record(event, number) => self.reach(event, number),
                Thing::Wait(event, number) if self.events[event].has(number) => {}
                Thing::Wait(event, number) => {
                    self.waiting.push((stream, event, number));
                    return self.block(stream, thing);
                }
                Thing::Hold(number) if number <= self.lines[stream].let_go => {}
                Thing::Hold(_) => return self.block(stream, thing),
                Thing::Operation(operation) => {
                    let gap = operation.gap_ns;
                    self.lines[stream].current = Some(operation);
                    if gap > 0.0 {
                        self.enter(stream, State::Gap, gap);
                    } else {
                        self.begin(stream);
                    }
                    return;
                }
            }
        }
    }

    fn block(&mut self, stream: usize, thing: Thing<E>) {
        let line = &mut self.lines[stream];
        line.queue.push_front(thing);
        line.state = State::Blocked;
    }

    fn reach(&mut self, event: usize, number: u64) {
        self.events[event].reach(number, self.now);
        let mut place = 0;
        while let Some((stream, what, which)) = self.waiting.get(place).copied() {
            if (what, which) == (event, number) {
                self.waiting.swap_remove(place);
                self.free(stream);
            } else {
                place += 1;
            }
        }
    }

    fn enter(&mut self, stream: usize, state: State, ns: f64) {
        self.lines[stream].state = state;
        self.finish[stream] = self.now + ns;
    }

    /// Moves an operation on: its timer has ended, or its rest has been served.
    fn go_on(&mut self, stream: usize) {
        match self.lines[stream].state {
            State::Gap => self.begin(stream),
            State::Fixed => self.work(stream),
            _ => self.end(stream),
        }
    }

    /// After the gap: a copy needs a copy engine.
    fn begin(&mut self, stream: usize) {
        let Some(operation) = &self.lines[stream].current else { return };
        if let (true, Some(direction)) = (operation.work.copy_engine, operation.work.direction) {
            let engines = &mut self.copy_engines[side(direction)];
            if engines.busy == self.machine.copy_engines[side(direction)] {
                engines.queue.push_back(stream);
                self.lines[stream].state = State::Queued;
                self.finish[stream] = NEVER;
                return;
            }
            engines.busy += 1;
        }
        self.start(stream);
    }

    fn start(&mut self, stream: usize) {
        self.lines[stream].start = self.now;
        let Some(operation) = &self.lines[stream].current else { return };
        let (early, fixed) = (operation.early, operation.work.fixed_ns);
        if early {
            self.take_effect(stream);
        }
        if fixed > 0.0 { self.enter(stream, State::Fixed, fixed) } else { self.work(stream) }
    }

    fn work(&mut self, stream: usize) {
        let line = &mut self.lines[stream];
        line.found = 0;
        if let Some(operation) = &mut line.current
            && !operation.touches.is_empty()
        {
            let l2 = self.l2.iter();
            line.found = l2.flat_map(|l2| operation.touches.iter().map(|touched| l2.found(*touched))).sum();
            operation.work = operation.work.without(line.found as f64, self.machine.memory);
        }
        if !line.current.as_ref().is_some_and(|operation| operation.work.has_rest()) {
            return self.end(stream);
        }
        (line.state, line.left, line.since, line.rate) = (State::Rest, 1.0, self.now, 0.0);
        self.finish[stream] = NEVER;
        self.working.push(stream);
        self.stale = true;
    }

    /// Counts an operation and hands out its effect.
    fn take_effect(&mut self, stream: usize) {
        let Some(operation) = &mut self.lines[stream].current else { return };
        let fails = operation.counts && self.counted == self.fail;
        self.counted += u64::from(operation.counts);
        let effect = operation.effect.take();
        if fails || effect.is_some() {
            self.due.push_back(Due { effect, fails });
        }
    }

    fn end(&mut self, stream: usize) {
        if self.lines[stream].state == State::Rest {
            self.working.retain(|working| *working != stream);
            self.stale = true;
        }
        if self.lines[stream].current.as_ref().is_some_and(|operation| !operation.early) {
            self.take_effect(stream);
        }
        let line = &mut self.lines[stream];
        let Some(operation) = line.current.take() else { return };
        if let Some(l2) = &mut self.l2 {
            let known: u64 = operation.touches.iter().map(|(from, to)| to - from).sum();
            l2.pass_others((operation.work.traffic as u64 + line.found).saturating_sub(known));
            operation.touches.iter().for_each(|addresses| l2.pass(*addresses));
        }
        if let (true, Some(spans)) = (operation.counts, &mut self.spans) {
            let Label { name, layer, micro_batch } = operation.label;
            let (start_ns, end_ns) = (line.start, self.now);
            spans.push(Span { stream: Stream(stream as u64), name, layer, micro_batch, start_ns, end_ns });
        }
        self.free(stream);
        if let (true, Some(direction)) = (operation.work.copy_engine, operation.work.direction) {
            let engines = &mut self.copy_engines[side(direction)];
            match engines.queue.pop_front() {
                Some(next) => self.start(next),
                None => engines.busy -= 1,
            }
        }
    }

    /// Computes the rates of all working streams, and when each will be done. The two directions of the link to the
    /// host slow each other; the link between GPUs is another one.
    fn share_out(&mut self) {
        self.stale = false;
        self.working.sort_unstable();
        let shares: f64 = self.working.iter().filter_map(|stream| self.work_of(*stream)).map(|w| w.sm).sum();
        let slow = f64::max(1.0, shares);
        let mut users = [0.0; SIDES];
        for place in 0..self.working.len() {
            let stream = self.working[place];
            let Some(work) = self.work_of(stream) else { continue };
            let ns = if work.sm > 0.0 { slow * work.ns } else { work.ns };
            match work.direction.filter(|_| work.bytes > 0.0) {
                None => self.rates.push(Rate { stream, rate: 1.0 / ns, traffic: work.traffic }),
                Some(direction) => {
                    let (side, most) = (side(direction), work.bytes / ns);
                    users[side] += 1.0;
                    self.moving.push(Moving { stream, side, bytes: work.bytes, traffic: work.traffic, most });
                }
            }
        }
        self.share_links(users);
        let traffic: f64 = self.rates.iter().map(|one| one.rate * one.traffic).sum();
        let kept = f64::min(1.0, self.machine.memory / traffic);
        for place in 0..self.rates.len() {
            let Rate { stream, rate, traffic } = self.rates[place];
            self.set_rate(stream, if traffic > 0.0 { kept * rate } else { rate });
        }
        self.rates.clear();
    }

    /// Divides the links among those that move bytes over them, of which each direction has so many users.
    fn share_links(&mut self, mut users: [f64; SIDES]) {
        let host = [Direction::ToDevice, Direction::ToHost].map(side);
        let both = host.iter().all(|side| users[*side] > 0.0);
        let keep = if both { self.machine.duplex } else { 1.0 };
        let mut left = self.machine.link;
        host.iter().for_each(|side| left[*side] *= keep);
        // Those that can use least come first: the rate that they leave is divided among the others.
        self.moving.sort_unstable_by(|a, b| a.most.total_cmp(&b.most).then(a.stream.cmp(&b.stream)));
        for Moving { stream, side, bytes, traffic, most } in self.moving.drain(..) {
            let rate = most.min(left[side] / users[side]);
            left[side] -= rate;
            users[side] -= 1.0;
            self.rates.push(Rate { stream, rate: rate / bytes, traffic });
        }
    }

    fn work_of(&self, stream: usize) -> Option<Work> {
        self.lines[stream].current.as_ref().map(|operation| operation.work)
    }

    /// Serves a stream's rest at `rate` per nanosecond from now on. An unchanged rate is left alone, so that rounding
    /// errors do not add up.
    fn set_rate(&mut self, stream: usize, rate: f64) {
        let line = &mut self.lines[stream];
        if line.rate.to_bits() != rate.to_bits() {
            line.left = f64::max(0.0, line.left - line.rate * (self.now - line.since));
            (line.since, line.rate) = (self.now, rate);
            self.finish[stream] = self.now + line.left / rate;
        }
    }
}
