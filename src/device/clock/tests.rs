//! The clock against closed forms.

use super::*;
use crate::device::{Completer, Outcome, PoolLayout, PoolOp, ResolveOutput, Slice, StepRange, Ticket};
use crate::geometry::{Geometry, Shape};
use crate::ids::{Lane, MicroBatch};
use crate::residency::{QueryRange, TableShape};

mod l2;
mod oracle;
mod pages;
mod peers;

/// Costs in round numbers: no launch gap, a link of 1 byte a nanosecond each way.
fn costs() -> Costs {
    let kernel = Kernel { fixed_ns: 0.0, row_ns: 0.0, sm: 0.0 };
    let mover = Mover { fixed_ns: 0.0, rate: 1e9, sm: 0.0 };
    Costs {
        launch_ns: 0.0,
        poll_ns: 1.0,
        link: Link { to_device: 1e9, to_host: 1e9, duplex: 1.0, copy_engines: 1 },
        peer: Peer { rate: 4e9, copy_engines: 2 },
        device_copy: 1e9,
        memory: None,
        l2: None,
        copy_ns: 0.0,
        resolve: kernel,
        resolve_wave: None,
        begin: kernel,
        report: kernel,
        lane: kernel,
        warm: kernel,
        gather: mover,
        scatter: mover,
    }
}

fn exact(costs: Costs) -> Arc<ClockDevice> {
    ClockDevice::new(ClockOptions { costs, record: true, ..ClockOptions::default() }).unwrap()
}

fn named(name: &'static str) -> Label {
    Label { name, layer: None, micro_batch: None }
}

fn compute(device: &ClockDevice, stream: Stream, ns: f64, sm: f64) {
    device.compute(stream, named("work"), Demand { ns, sm }).unwrap();
}

/// Start and end of each span, in the order of their ends.
fn times(device: &ClockDevice) -> Vec<(f64, f64)> {
    device.spans().iter().map(|span| (span.start_ns, span.end_ns)).collect()
}

fn streams<const N: usize>(device: &ClockDevice) -> [Stream; N] {
    [(); N].map(|()| device.stream().unwrap())
}

fn edge(device: &ClockDevice, from: Stream, to: Stream) {
    let event = device.event().unwrap();
    device.record(event, from).unwrap();
    device.wait(to, event).unwrap();
}

/// A cache of V3.2's rows with `layers` layers and a batch of 8.
fn layout(device: &ClockDevice, layers: u32) -> PoolLayout {
    let shape = Shape { layers, draft_layers: 0, ..Shape::DEEPSEEK_V3_2 };
    let tables = TableShape {
        lanes: 8,
        tokens: 1024,
        query_rows: 4,
        waves: 1,
        scratch: 0,
        scratch_base: 1,
        landing_base: 64,
        budget_base: 128,
        budget_blocks: 1,
    };
    PoolLayout {
        geometry: Geometry::new(shape).unwrap().into(),
        tables: vec![tables; layers as usize],
        slabs: vec![device.allocate(1 << 40).unwrap(); layers as usize],
        rows: vec![device.allocate(1 << 40).unwrap(); layers as usize],
        lane_pages: 16,
        micro_batches: 2,
        batch: 8,
        expected: Default::default(),
    }
}

fn range(layer: u32, first: u32, count: u32) -> StepRange {
    StepRange {
        micro_batch: MicroBatch(1),
        layer: Layer(layer),
        first,
        count,
        rows: QueryRange { first: 0, count: 2 },
    }
}

#[test]
fn one_stream_takes_the_sum_of_its_gaps_and_operations() {
    let device = exact(Costs { launch_ns: 5.0, ..costs() });
    let [stream] = streams(&device);
    (1..=3).for_each(|n| compute(&device, stream, 10.0 * f64::from(n), 1.0));
    assert_eq!(device.run().unwrap(), 75.0);
    assert_eq!(times(&device), [(5.0, 15.0), (20.0, 40.0), (45.0, 75.0)]);
    // Time continues from there; after a reset it begins at 0.
    compute(&device, stream, 10.0, 1.0);
    assert_eq!(device.run().unwrap(), 90.0);
    device.reset().unwrap();
    assert_eq!((device.now(), times(&device).len()), (0.0, 0));
    compute(&device, stream, 10.0, 1.0);
    assert_eq!(device.run().unwrap(), 15.0);
}

#[test]
fn an_edge_makes_one_stream_follow_another() {
    let device = exact(costs());
    let [a, b] = streams(&device);
    compute(&device, b, 1.0, 0.1);
    compute(&device, a, 10.0, 0.1);
    edge(&device, a, b);
    compute(&device, a, 3.0, 0.1);
    compute(&device, b, 7.0, 0.1);
    assert_eq!(device.run().unwrap(), 17.0);
    assert_eq!(times(&device), [(0.0, 1.0), (0.0, 10.0), (10.0, 13.0), (10.0, 17.0)]);
}

#[test]
fn a_wait_is_for_the_last_record_before_it_and_for_none_that_comes_later() {
    let device = exact(costs());
    let [a, b, c, d] = streams(&device);
    let event = device.event().unwrap();
    assert_eq!(device.reached(event), None);
    // Never recorded: the wait passes.
    device.wait(c, event).unwrap();
    compute(&device, c, 1.0, 0.0);
    compute(&device, a, 10.0, 0.0);
    device.record(event, a).unwrap();
    device.wait(b, event).unwrap();
    // Recorded again, later and on another stream: b does not wait for that.
    compute(&device, a, 90.0, 0.0);
    device.record(event, a).unwrap();
    compute(&device, b, 5.0, 0.0);
    device.wait(d, event).unwrap();
    compute(&device, d, 2.0, 0.0);
    assert!(!device.query(event).unwrap(), "a query takes a moment, not all the time there is");
    assert_eq!(device.run().unwrap(), 102.0);
    assert_eq!(times(&device), [(0.0, 1.0), (0.0, 10.0), (10.0, 15.0), (10.0, 100.0), (100.0, 102.0)]);
    assert_eq!(device.reached(event), Some(100.0));
    assert!(device.query(event).unwrap());
}

#[test]
fn a_record_in_a_fast_stream_does_not_end_a_wait_for_one_in_a_slow_stream() {
    let device = exact(costs());
    let [slow, fast, waits] = streams(&device);
    let event = device.event().unwrap();
    compute(&device, slow, 50.0, 0.0);
    device.record(event, slow).unwrap();
    device.wait(waits, event).unwrap();
    device.record(event, fast).unwrap();
    compute(&device, waits, 1.0, 0.0);
    device.synchronize(event).unwrap();
    assert_eq!(device.now(), 0.0, "the last record is the fast stream's");
    assert_eq!(device.run().unwrap(), 51.0);
}

#[test]
fn operations_that_want_more_than_all_sms_slow_each_other_in_proportion() {
    let device = exact(costs());
    let [a, b, c] = streams(&device);
    // 0.9 + 0.6 = 1.5: both run at two thirds of their speed; work without SMs is not slowed.
    compute(&device, a, 20.0, 0.9);
    compute(&device, b, 40.0, 0.6);
    compute(&device, c, 10.0, 0.0);
    assert_eq!(device.run().unwrap(), 50.0);
    // Until 30 both have done 20; then b does its remaining 20 alone.
    let ends: Vec<f64> = times(&device).iter().map(|t| t.1).collect();
    assert_eq!(ends, [10.0, 30.0, 50.0]);
}

#[test]
fn gathers_divide_the_link_and_give_it_back() {
    let device = exact(costs());
    let [a, b] = streams(&device);
    let pools = device.attach(layout(&device, 2)).unwrap();
    // A row is 656 bytes: 656 ns alone.
    device.set_misses(Layer(0), 1.0).unwrap();
    device.set_misses(Layer(1), 2.5).unwrap();
    device.enqueue(pools, a, PoolOp::Gather { range: range(0, 0, 2), wave: 0 }).unwrap();
    device.enqueue(pools, b, PoolOp::Gather { range: range(1, 2, 4), wave: 0 }).unwrap();
    // The other direction is another link.
    device.enqueue(pools, a, PoolOp::Scatter(range(0, 0, 1))).unwrap();
    device.enqueue(pools, a, PoolOp::Gather { range: range(0, 0, 2), wave: 1 }).unwrap();
    device.run().unwrap();
    // 2 rows alongside 10: after the time of 4 rows the 2 are done, and 8 remain.
    let row = 656.0;
    let (first, second) = (4.0 * row, 12.0 * row);
    assert_eq!(
        times(&device),
        [(0.0, first), (first, first + 2.0 * row), (first + 2.0 * row, first + 2.0 * row), (0.0, second)]
    );
    let spans = device.spans();
    assert_eq!(
        (spans[0].name, spans[0].layer, spans[0].micro_batch),
        ("gather", Some(Layer(0)), Some(MicroBatch(1)))
    );
    assert_eq!((spans[1].name, spans[3].layer), ("scatter", Some(Layer(1))));
}

#[test]
fn a_gather_that_cannot_use_its_half_of_the_link_leaves_the_rest_to_others() {
    let slow = Mover { fixed_ns: 0.0, rate: 0.25e9, sm: 0.0 };
    let device = exact(Costs { gather: slow, ..costs() });
    let [a, b] = streams(&device);
    let pools = device.attach(layout(&device, 1)).unwrap();
    device.set_misses(Layer(0), 1.0).unwrap();
    device.enqueue(pools, a, PoolOp::Gather { range: range(0, 0, 1), wave: 0 }).unwrap();
    device.traffic(b, named("weights"), Direction::ToDevice, 3 * 656).unwrap();
    assert_eq!(device.run().unwrap(), 4.0 * 656.0);
    assert_eq!(times(&device), [(0.0, 4.0 * 656.0); 2]);
}

#[test]
fn both_directions_at_once_keep_a_part_of_their_rates() {
    let mut costs = costs();
    costs.link.duplex = 0.5;
    let device = exact(costs);
    let [a, b] = streams(&device);
    device.traffic(a, named("up"), Direction::ToDevice, 100).unwrap();
    device.traffic(b, named("down"), Direction::ToHost, 200).unwrap();
    assert_eq!(device.run().unwrap(), 300.0);
    assert_eq!(times(&device), [(0.0, 200.0), (0.0, 300.0)]);
}

#[test]
fn a_copy_engine_takes_copies_in_the_order_of_becoming_ready() {
    let device = exact(costs());
    let [a, b, c] = streams(&device);
    let copy = |stream, bytes| device.traffic(stream, named("copy"), Direction::ToDevice, bytes).unwrap();
    compute(&device, b, 2.0, 0.0);
    compute(&device, c, 1.0, 0.0);
    copy(a, 10);
    // b's operation was enqueued first, c's is ready first; a's second one comes after both.
    copy(b, 40);
    copy(c, 20);
    copy(a, 10);
    assert_eq!(device.run().unwrap(), 80.0);
    assert_eq!(times(&device)[2..], [(0.0, 10.0), (10.0, 30.0), (30.0, 70.0), (70.0, 80.0)]);
}

#[test]
fn two_copy_engines_divide_the_link() {
    let mut costs = costs();
    costs.link.copy_engines = 2;
    let device = exact(costs);
    let [a, b, c] = streams(&device);
    let copy = |stream, bytes| device.traffic(stream, named("copy"), Direction::ToDevice, bytes).unwrap();
    copy(a, 10);
    copy(b, 40);
    copy(c, 20);
    copy(a, 10);
    assert_eq!(device.run().unwrap(), 80.0);
    // c's begins when a's ends, and a's second one when c's does; b's runs at half the rate all the time.
    assert_eq!(times(&device), [(0.0, 20.0), (20.0, 60.0), (60.0, 80.0), (0.0, 80.0)]);
}

#[test]
fn calls_and_tickets_complete_when_their_stream_reaches_them() {
    let device = exact(costs());
    let [a, b] = streams(&device);
    let times = Arc::new(Mutex::new(Vec::new()));
    let note = |stream| {
        let (times, clock) = (Arc::clone(&times), Arc::downgrade(&device));
        let work = move || times.lock().push(clock.upgrade().unwrap().now());
        device.call(stream, Arc::new(work)).unwrap();
    };
    compute(&device, a, 30.0, 0.0);
    note(a);
    compute(&device, b, 20.0, 0.0);
    note(b);
    let (ticket, completer) = Ticket::new();
    device.complete(b, completer).unwrap();
    assert_eq!(ticket.poll(), None, "enqueueing runs nothing");
    device.run().unwrap();
    assert_eq!((&*times.lock(), ticket.poll()), (&vec![20.0, 30.0], Some(Outcome::Done)));
}

#[test]
fn a_device_that_fails_reaches_its_events_and_ends_its_tickets() {
    let options = ClockOptions { fail_operation: Some(1), costs: costs(), ..ClockOptions::default() };
    let device = ClockDevice::new(options).unwrap();
    let [stream] = streams(&device);
    let ticket = || {
        let (ticket, completer): (Ticket, Completer) = Ticket::new();
        compute(&device, stream, 1.0, 0.0);
        device.complete(stream, completer).unwrap();
        ticket
    };
    let tickets = [(); 3].map(|()| ticket());
    let event = device.event().unwrap();
    device.record(event, stream).unwrap();
    assert_eq!(device.synchronize(event).unwrap_err().kind(), Kind::DeviceFailed);
    assert_eq!(device.query(event).unwrap_err().kind(), Kind::DeviceFailed);
    let failed = Some(Outcome::Failed(Kind::DeviceFailed));
    assert_eq!(tickets.map(|ticket| ticket.poll()), [Some(Outcome::Done), failed, failed]);
    assert_eq!((device.now(), device.operations()), (4.0, 3));

    let device = exact(costs());
    let [stream] = streams(&device);
    device.call(stream, Arc::new(|| panic!("an engine's callback"))).unwrap();
    assert_eq!(device.run().unwrap_err().number("kind"), Some(Kind::Internal as u64));
}

#[test]
fn work_after_a_held_stream_is_refused_and_runs_when_the_stream_is_released() {
    let device = exact(costs());
    let [a, b] = streams(&device);
    compute(&device, a, 5.0, 0.0);
    device.hold(a).unwrap();
    compute(&device, a, 5.0, 0.0);
    edge(&device, a, b);
    compute(&device, b, 5.0, 0.0);
    assert_eq!(device.run().unwrap_err().kind(), Kind::Busy);
    assert_eq!(device.spans().len(), 1);
    let event = device.event().unwrap();
    device.record(event, b).unwrap();
    for _ in 0..100 {
        assert!(!device.query(event).unwrap());
    }
    device.let_go(a).unwrap();
    device.synchronize(event).unwrap();
    assert_eq!(device.spans().len(), 3);
}

#[test]
fn a_device_that_is_dropped_runs_its_queued_work() {
    let device = exact(costs());
    let [stream] = streams(&device);
    device.hold(stream).unwrap();
    let (ticket, completer) = Ticket::new();
    device.complete(stream, completer).unwrap();
    drop(device);
    assert_eq!(ticket.poll(), Some(Outcome::Done));
}

#[test]
fn a_callback_that_waits_for_the_device_is_refused() {
    let device = exact(costs());
    let [stream] = streams(&device);
    let event = device.event().unwrap();
    let found = Arc::new(Mutex::new(Vec::new()));
    let (noted, clock) = (Arc::clone(&found), Arc::downgrade(&device));
    let work = move || {
        let clock = clock.upgrade().unwrap();
        let seen = clock.query(event).unwrap();
        noted.lock().push((clock.synchronize(event).unwrap_err().kind(), seen));
    };
    device.call(stream, Arc::new(work)).unwrap();
    device.record(event, stream).unwrap();
    device.synchronize(event).unwrap();
    assert_eq!(*found.lock(), [(Kind::Busy, false)]);
}

/// A value that a callback holds, which panics when it is dropped: not inside the callback, where the panic would be
/// caught.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("a value that a callback holds");
    }
}

#[test]
fn an_effect_that_panics_fails_the_device_and_ends_every_wait() {
    let device = exact(costs());
    let [stream] = streams(&device);
    let bomb = Bomb;
    let holds = move || {
        let _held = &bomb;
    };
    device.call(stream, Arc::new(holds)).unwrap();
    compute(&device, stream, 5.0, 0.1);
    let (ticket, completer) = Ticket::new();
    device.complete(stream, completer).unwrap();
    let panics = std::panic::AssertUnwindSafe(|| device.run());
    std::panic::catch_unwind(panics).unwrap_err();
    // Another thread may drive the clock, and learns the state of the device.
    let other = device.clone();
    let error = std::thread::spawn(move || other.run()).join().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.number("kind")), (Kind::DeviceFailed, Some(Kind::Internal as u64)));
    assert_eq!((device.now(), ticket.poll()), (5.0, Some(Outcome::Failed(Kind::Internal))));
}

#[test]
fn counts_restart_and_settings_stay() {
    let device = exact(costs());
    let [a, b] = streams(&device);
    device.without_waits(1..2);
    for _ in 0..2 {
        for work in [10.0, 20.0] {
            compute(&device, a, work, 0.1);
            edge(&device, a, b);
            compute(&device, b, 1.0, 0.1);
        }
        assert_eq!((device.run().unwrap(), device.operations(), device.waits()), (30.0, 4, 2));
        assert_eq!(times(&device), [(0.0, 10.0), (10.0, 11.0), (11.0, 12.0), (10.0, 30.0)]);
        device.reset().unwrap();
        assert_eq!((device.operations(), device.waits()), (0, 0));
    }
}

#[test]
fn a_confined_device_refuses_other_streams_and_reports_it_at_the_end() {
    let device = exact(costs());
    let [a, b] = streams(&device);
    device.confine(Some(a)).unwrap();
    compute(&device, a, 1.0, 0.0);
    let error = device.compute(b, named("work"), Demand { ns: 1.0, sm: 0.0 }).unwrap_err();
    assert_eq!((error.kind(), error.number("stream")), (Kind::InvalidConfig, Some(b.0)));
    assert_eq!(device.confine(None), Err(error));
    assert_eq!(device.confine(None), Ok(()));
    compute(&device, b, 1.0, 0.0);
    assert_eq!(device.run().unwrap(), 1.0);
}

#[test]
fn misuse_is_an_error_that_names_the_field() {
    let (device, other) = (exact(costs()), exact(costs()));
    let [stream] = streams(&device);
    let pools = device.attach(layout(&device, 2)).unwrap();
    let kind = |result: Result<()>| result.unwrap_err().kind();
    assert_eq!(kind(device.set_misses(Layer(0), f64::NAN)), Kind::InvalidConfig);
    assert_eq!(kind(device.set_misses(Layer(0), -1.0)), Kind::InvalidConfig);
    assert_eq!(kind(device.compute(stream, named(""), Demand { ns: -1.0, sm: 0.0 })), Kind::InvalidConfig);
    // Another device's, though their numbers are the same; and a number that this device never returned.
    let foreign = other.attach(layout(&other, 2)).unwrap();
    for unknown in [foreign, device.id().pools(1)] {
        assert_eq!(kind(device.enqueue(unknown, stream, PoolOp::Leave(Lane(0)))), Kind::OutOfRange);
    }
    assert_eq!(
        kind(device.enqueue(pools, Stream(1), PoolOp::Gather { range: range(0, 0, 1), wave: 0 })),
        Kind::OutOfRange
    );
    assert_eq!(
        kind(device.enqueue(pools, stream, PoolOp::Gather { range: range(2, 0, 1), wave: 0 })),
        Kind::OutOfRange
    );
    assert_eq!(
        kind(device.enqueue(pools, stream, PoolOp::Gather { range: range(0, 5, 4), wave: 0 })),
        Kind::OutOfRange
    );
    assert_eq!(kind(device.enqueue(pools, stream, PoolOp::Leave(Lane(8)))), Kind::OutOfRange);
    assert_eq!(kind(device.record(Event(0), stream)), Kind::OutOfRange);
    let [ours, theirs]: [Slice; 2] = [&device, &other].map(|device| device.allocate(64).unwrap());
    let output = ResolveOutput { slots: theirs, split_indices: None };
    assert_eq!(
        kind(device.enqueue(
            pools,
            stream,
            PoolOp::Resolve { range: range(0, 0, 1), selection: ours, output }
        )),
        Kind::OutOfRange
    );
    assert_eq!(kind(device.copy(stream, ours, theirs)), Kind::OutOfRange);
    let mut bad = costs();
    bad.link.to_device = f64::NAN;
    let refused = ClockDevice::new(ClockOptions { costs: bad, ..ClockOptions::default() }).unwrap_err();
    assert_eq!((refused.kind(), refused.place()), (Kind::InvalidConfig, "link.to_device NaN"));
}

#[test]
fn one_seed_gives_the_same_times_again_and_another_seed_gives_others() {
    let run = |seed| {
        let options = ClockOptions { seed: Some(seed), record: true, ..ClockOptions::default() };
        let device = ClockDevice::new(options).unwrap();
        let all: [Stream; 4] = streams(&device);
        for n in 0..40_usize {
            compute(&device, all[n % 4], 1000.0, 0.4);
            if n % 3 == 0 {
                edge(&device, all[n % 4], all[(n + 1) % 4]);
            }
        }
        device.run().unwrap();
        device.spans()
    };
    assert_eq!(run(1), run(1));
    let orders: std::collections::BTreeSet<Vec<u64>> =
        (0..20).map(|seed| run(seed).iter().map(|span| span.stream.0).collect()).collect();
    assert!(orders.len() > 15, "{} orders of 20 seeds", orders.len());
}
