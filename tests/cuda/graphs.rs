//! Captured work: what a graph holds, what invalidates a capture, and when a graph is destroyed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::rig::{Rig, pinned, usual};
use forebay::Kind;
use forebay::device::{Device, Graph, Outcome, Slice, Stream, Ticket};
use forebay_standin::{Driver, Options, Resources, Standin};

struct Captured<D = Driver> {
    rig: Rig<D>,
    stream: Stream,
    host: Slice,
    far: Slice,
    map: Arc<forebay::os::Map>,
    count: Arc<AtomicU32>,
}

impl Captured {
    fn new(options: Options) -> Option<Captured> {
        Rig::new(options).map(Captured::of)
    }

    fn seen(&self) -> u8 {
        self.rig.read(self.far)[0]
    }
}

impl Captured<Standin> {
    /// On a driver of the test's own, which has the ability `does`.
    fn own(does: &str) -> Option<Captured<Standin>> {
        Rig::own(usual(), does).map(Captured::of)
    }
}

impl<D> Captured<D> {
    fn of(rig: Rig<D>) -> Captured<D> {
        let map = pinned(4096);
        let host = rig.device.register(&map).unwrap().part(0, 64).unwrap();
        let (far, stream) = (rig.device.allocate(64).unwrap(), rig.device.stream().unwrap());
        Captured { rig, stream, host, far, map, count: Arc::new(AtomicU32::new(0)) }
    }

    fn counts(&self, stream: Stream) -> forebay::Result<()> {
        let count = Arc::clone(&self.count);
        self.rig.device.call(stream, Arc::new(move || _ = count.fetch_add(1, Ordering::Relaxed)))
    }

    /// A graph that copies and counts.
    fn graph(&self) -> forebay::Result<Graph> {
        let device = &self.rig.device;
        device.capture(self.stream)?;
        device.copy(self.stream, self.host, self.far)?;
        self.counts(self.stream)?;
        device.captured(self.stream)
    }

    fn sync(&self, stream: Stream) {
        let event = self.rig.device.event().unwrap();
        self.rig.device.record(event, stream).unwrap();
        self.rig.device.synchronize(event).unwrap();
    }
}

#[test]
fn a_graph_does_nothing_when_captured_and_everything_at_each_launch() {
    let Some(c) = Captured::new(usual()) else { return };
    c.map.copy_in(0, &[7; 64]).unwrap();
    let graph = c.graph().unwrap();
    c.sync(c.stream);
    assert_eq!((c.seen(), c.count.load(Ordering::Relaxed)), (0, 0));
    for round in 1..=5 {
        c.map.copy_in(0, &[round; 64]).unwrap();
        c.rig.device.launch(graph, c.stream).unwrap();
        c.sync(c.stream);
        assert_eq!((c.seen(), c.count.load(Ordering::Relaxed)), (round, round.into()));
    }
    c.rig.device.release(graph).unwrap();
    assert_eq!(c.rig.device.launch(graph, c.stream).unwrap_err().kind(), Kind::OutOfRange);
    assert_eq!(c.rig.device.release(graph).unwrap_err().kind(), Kind::OutOfRange);
}

#[test]
fn forked_streams_are_captured_with_the_stream_they_fork_from() {
    let Some(c) = Captured::new(usual()) else { return };
    let device = &c.rig.device;
    let side = device.stream().unwrap();
    let [fork, join] = [0; 2].map(|_| device.event().unwrap());
    device.capture(c.stream).unwrap();
    device.record(fork, c.stream).unwrap();
    device.wait(side, fork).unwrap();
    c.counts(side).unwrap();
    device.record(join, side).unwrap();
    device.wait(c.stream, join).unwrap();
    let graph = device.captured(c.stream).unwrap();
    assert_eq!(c.count.load(Ordering::Relaxed), 0);
    device.launch(graph, c.stream).unwrap();
    c.sync(c.stream);
    assert_eq!(c.count.load(Ordering::Relaxed), 1);
    assert_eq!(device.query(fork).unwrap_err().kind(), Kind::InvalidState, "the event is the capture's");
    c.sync(side);
}

#[test]
fn a_graph_released_while_it_runs_ends_its_run_and_is_destroyed() {
    let Some(c) = Captured::new(usual()) else { return };
    let (device, driver) = (&c.rig.device, &c.rig.driver);
    let execs = |count| driver.own().is_none_or(|standin| standin.held_resources().execs == count);
    c.map.copy_in(0, &[7; 64]).unwrap();
    let graph = c.graph().unwrap();
    let held = driver.hold(c.stream.0).unwrap();
    device.launch(graph, c.stream).unwrap();
    device.release(graph).unwrap();
    assert!(execs(1), "a launch of it is under way");
    drop(held);
    c.sync(c.stream);
    assert_eq!((c.seen(), c.count.load(Ordering::Relaxed)), (7, 1));
    // The next call that uses graphs finds it ended.
    let next = c.graph().unwrap();
    assert!(execs(1));
    assert_eq!(Arc::strong_count(&c.count), 2, "its work was dropped with it");
    device.release(next).unwrap();
    assert!(execs(0) && Arc::strong_count(&c.count) == 1, "never launched");
}

#[test]
fn a_capture_ends_where_it_began_and_holds_no_second_one() {
    let Some(c) = Captured::new(usual()) else { return };
    let device = &c.rig.device;
    assert_eq!(device.captured(c.stream).unwrap_err().kind(), Kind::InvalidState);
    let side = device.stream().unwrap();
    device.capture(c.stream).unwrap();
    assert_eq!(device.capture(c.stream).unwrap_err().kind(), Kind::Busy);
    assert_eq!(device.captured(side).unwrap_err().kind(), Kind::InvalidState);
    c.counts(c.stream).unwrap();
    let (ticket, completer) = Ticket::new();
    assert_eq!(device.complete(c.stream, completer).unwrap_err().kind(), Kind::InvalidState);
    assert_eq!(ticket.poll(), Some(Outcome::Cancelled), "a ticket ends once, a graph runs often");
    let graph = device.captured(c.stream).unwrap();
    device.capture(side).unwrap();
    assert_eq!(device.launch(graph, side).unwrap_err().kind(), Kind::InvalidState);
    device.captured(side).unwrap();
    device.launch(graph, side).unwrap();
    c.sync(side);
    assert_eq!(c.count.load(Ordering::Relaxed), 1);
}

#[test]
fn a_broken_capture_is_an_error_with_the_drivers_name_and_leaks_nothing() {
    let Some(c) = Captured::new(usual()) else { return };
    let device = &c.rig.device;
    let (side, outside) = (device.stream().unwrap(), device.event().unwrap());
    device.record(outside, side).unwrap();
    let fork = device.event().unwrap();
    let breaks: [(&str, &dyn Fn()); 3] = [
        ("a wait for what is not captured", &|| {
            let refused = device.wait(c.stream, outside).unwrap_err();
            assert_eq!(refused.kind(), Kind::InvalidState);
            assert!(refused.place().contains("CUDA_ERROR_STREAM_CAPTURE_"), "{refused}");
            assert!(refused.number("code").is_some_and(|code| (900..=908).contains(&code)));
        }),
        ("a fork that is not joined", &|| {
            device.record(fork, c.stream).unwrap();
            device.wait(side, fork).unwrap();
            c.counts(side).unwrap();
        }),
        ("an end on another thread", &|| {
            std::thread::scope(|scope| {
                let ended = scope.spawn(|| device.captured(c.stream).unwrap_err()).join().unwrap();
                assert_eq!((ended.kind(), ended.number("code")), (Kind::InvalidState, Some(908)));
            });
            device.wait(c.stream, outside).unwrap_err();
        }),
    ];
    for (what, breaks) in breaks {
        device.capture(c.stream).unwrap();
        c.counts(c.stream).unwrap();
        breaks();
        let refused = device.captured(c.stream).unwrap_err();
        assert_eq!(refused.kind(), Kind::InvalidState, "{what}");
        let held = c.rig.driver.held_resources();
        assert_eq!((held.graphs, held.execs, Arc::strong_count(&c.count)), (0, 0, 1), "{what}");
        // The stream is unchanged.
        c.counts(c.stream).unwrap();
        c.sync(c.stream);
        c.sync(side);
    }
    assert_eq!(c.count.load(Ordering::Relaxed), 3);
    let graph = c.graph().unwrap();
    device.launch(graph, c.stream).unwrap();
}

#[test]
fn memory_is_allocated_while_streams_are_captured() {
    let Some(c) = Captured::new(usual()) else { return };
    let device = &c.rig.device;
    device.capture(c.stream).unwrap();
    c.counts(c.stream).unwrap();
    let slice = device.allocate(100).unwrap();
    assert_eq!(c.rig.read(slice), [0; 100]);
    std::thread::scope(|scope| {
        let elsewhere = scope.spawn(|| {
            device.backing(1).unwrap();
            device.register(&pinned(4096)).unwrap();
            device.stream().unwrap();
        });
        elsewhere.join().unwrap();
    });
    let graph = device.captured(c.stream).unwrap();
    device.launch(graph, c.stream).unwrap();
    c.sync(c.stream);
    assert_eq!(c.count.load(Ordering::Relaxed), 1);
}

#[test]
fn graphs_and_open_captures_are_destroyed_with_the_device() {
    let Some(c) = Captured::new(Options { seed: Some(3), ..usual() }) else { return };
    let [first, second] = [0; 2].map(|_| c.graph().unwrap());
    c.rig.device.launch(first, c.stream).unwrap();
    c.rig.device.launch(second, c.stream).unwrap();
    c.rig.device.release(second).unwrap();
    let side = c.rig.device.stream().unwrap();
    c.rig.device.capture(side).unwrap();
    c.counts(side).unwrap();
    let Captured { rig: Rig { device, driver }, count, .. } = c;
    drop(device);
    assert_eq!(driver.held_resources(), Resources::default());
    assert_eq!((count.load(Ordering::Relaxed), Arc::strong_count(&count)), (2, 1));
}

#[test]
fn a_call_that_is_refused_in_a_capture_leaves_its_slot_to_the_next_one() {
    let mut seen = 0;
    for n in 0..20 {
        let Some(c) = Captured::own("fails a call") else { return };
        let (device, standin) = (&c.rig.device, &c.rig.driver);
        let side = device.stream().unwrap();
        device.capture(c.stream).unwrap();
        standin.fail_call(n, 2);
        let refused = c.counts(c.stream);
        let call = standin.failed_call();
        standin.fail_call(u64::MAX, 2);
        if call.as_deref() != Some("cuLaunchHostFunc") {
            continue;
        }
        seen += 1;
        assert_eq!(refused.unwrap_err().kind(), Kind::OutOfMemory);
        assert_eq!(Arc::strong_count(&c.count), 1, "the work is dropped");
        standin.hold(side.0);
        let (ticket, completer) = Ticket::new();
        device.complete(side, completer).unwrap();
        let graph = device.captured(c.stream).unwrap();
        device.release(graph).unwrap();
        assert_eq!(ticket.poll(), None, "its stream is held");
        standin.let_go(side.0);
        c.sync(side);
        assert_eq!(ticket.poll(), Some(Outcome::Done));
    }
    assert_eq!(seen, 1);
}

/// Releases a graph when it is dropped, as captured work of an engine may.
struct Owns(std::sync::Weak<forebay::device::cuda::CudaDevice>, Graph);

impl Drop for Owns {
    fn drop(&mut self) {
        if let Some(device) = self.0.upgrade() {
            device.release(self.1).unwrap();
        }
    }
}

#[test]
fn captured_work_may_own_another_graph() {
    let Some(c) = Captured::own("fails an operation") else { return };
    let device = &c.rig.device;
    let launched = |c: &Captured<Standin>, graph| {
        c.rig.device.launch(graph, c.stream).unwrap();
        c.sync(c.stream);
    };
    for launch in [false, true] {
        let owns = Owns(Arc::downgrade(device), c.graph().unwrap());
        device.capture(c.stream).unwrap();
        device.call(c.stream, Arc::new(move || _ = &owns)).unwrap();
        let graph = device.captured(c.stream).unwrap();
        if launch {
            launched(&c, graph);
        }
        device.release(graph).unwrap();
        let last = c.graph().unwrap();
        device.release(last).unwrap();
        assert_eq!(c.rig.driver.held_resources().execs, 0);
    }
    // Dropped in a launch that reports the lost context.
    let owns = Owns(Arc::downgrade(device), c.graph().unwrap());
    let graph = c.graph().unwrap();
    c.rig.driver.hold(c.stream.0);
    device.copy(c.stream, c.host, c.far).unwrap();
    device.call(c.stream, Arc::new(move || _ = &owns)).unwrap();
    c.rig.driver.fail_operation(0, 700);
    c.rig.driver.let_go(c.stream.0);
    device.launch(graph, c.stream).unwrap();
    assert_eq!(device.capture(c.stream).unwrap_err().kind(), Kind::DeviceFailed);
}

#[test]
fn handles_of_another_device_are_refused() {
    let (Some(c), Some(other)) = (Captured::new(usual()), Captured::new(usual())) else { return };
    let (device, graph) = (&c.rig.device, other.graph().unwrap());
    let event = other.rig.device.event().unwrap();
    let (own, own_event) = (c.graph().unwrap(), device.event().unwrap());
    assert!(own != graph && own_event != event);
    for refused in [
        device.launch(graph, c.stream),
        device.release(graph),
        device.record(event, c.stream),
        device.wait(c.stream, event),
        device.query(event).map(drop),
        device.synchronize(event),
    ] {
        assert_eq!(refused.unwrap_err().kind(), Kind::OutOfRange);
    }
    assert_eq!(other.rig.device.release(graph), Ok(()));
}

#[test]
fn a_graph_is_on_the_device_before_it_is_launched() {
    let mut calls = Vec::new();
    for n in 0.. {
        let Some(c) = Captured::own("fails a call") else { return };
        c.rig.device.capture(c.stream).unwrap();
        c.counts(c.stream).unwrap();
        c.rig.driver.fail_call(n, 2);
        let captured = c.rig.device.captured(c.stream);
        let Some(call) = c.rig.driver.failed_call() else { break };
        if captured.is_err() {
            calls.push(call);
            let held = c.rig.driver.held_resources();
            assert_eq!((held.graphs, held.execs, Arc::strong_count(&c.count)), (0, 0, 1), "{calls:?}");
        }
    }
    let at = |name: &str| calls.iter().position(|call| call == name);
    assert!(at("cuGraphInstantiateWithFlags") < at("cuGraphUpload"), "{calls:?}");
    assert!(at("cuGraphUpload") < at("cuStreamSynchronize"), "{calls:?}");
}

/// A call that reports the lost context.
type Hears = fn(&Captured<Standin>, Graph) -> bool;

#[test]
fn any_call_that_reports_a_lost_context_fails_the_device() {
    let calls: [(&str, Hears); 9] = [
        ("allocate", |c, _| c.rig.device.allocate(64).is_err()),
        ("register", |c, _| c.rig.device.register(&pinned(4096)).is_err()),
        ("backing", |c, _| c.rig.device.backing(1).is_err()),
        ("stream", |c, _| c.rig.device.stream().is_err()),
        ("event", |c, _| c.rig.device.event().is_err()),
        ("capture", |c, _| c.rig.device.capture(c.stream).is_err()),
        ("read", |c, _| c.rig.device.read(c.far, &mut [0; 64]).is_err()),
        ("launch", |c, graph| c.rig.device.launch(graph, c.stream).is_ok()),
        ("cache", |c, _| crate::rig::Cache::new(c.rig.device.clone()).is_err()),
    ];
    for (name, call) in calls {
        let Some(c) = Captured::own("fails an operation") else { return };
        let (device, graph) = (&c.rig.device, c.graph().unwrap());
        c.rig.driver.hold(c.stream.0);
        device.copy(c.stream, c.host, c.far).unwrap();
        let (ticket, completer) = Ticket::new();
        device.complete(c.stream, completer).unwrap();
        c.rig.driver.fail_operation(0, 700);
        c.rig.driver.let_go(c.stream.0);
        assert_eq!(ticket.poll(), None, "{name}: no call has reported it");
        assert!(call(&c, graph), "{name}");
        assert_eq!(ticket.poll(), Some(Outcome::Failed(Kind::DeviceFailed)), "{name}");
    }
}
