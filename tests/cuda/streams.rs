//! Streams, events and the host work that they order: unknown handles, tickets, failures.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::rig::{Cache, Rig, pinned, usual};
use forebay::device::{Device, Event, Graph, Outcome, PoolOp, Slice, Stream, Ticket};
use forebay::{Kind, Lane};
use forebay_standin::{Options, Resources};

const ILLEGAL_ADDRESS: i32 = 700;

#[test]
fn unknown_handles_are_refused_before_the_driver_sees_them() {
    let (Some(rig), Some(other)) = (Rig::new(usual()), Rig::new(usual())) else { return };
    let device = &rig.device;
    let (stream, event) = (device.stream().unwrap(), device.event().unwrap());
    let (none, no_event) = (Stream(stream.0 + 8), Event(1));
    let slice = device.allocate(64).unwrap();
    let foreign = other.device.allocate(64).unwrap();
    // Pools of another device. This device has pools of the same number.
    let own = Cache::new(rig.device.clone()).unwrap();
    let pools = Cache::new(other.device.clone()).unwrap().pools;
    assert_ne!(own.pools, pools);
    let calls = rig.driver.calls();
    let work = Arc::new(|| ());
    let ticket = |stream| {
        let (ticket, completer) = Ticket::new();
        let refused = device.complete(stream, completer);
        assert_eq!(ticket.poll(), Some(Outcome::Cancelled));
        refused
    };
    for refused in [
        device.record(event, none),
        device.record(no_event, stream),
        device.wait(none, event),
        device.wait(stream, no_event),
        device.query(no_event).map(drop),
        device.synchronize(no_event),
        device.copy(none, slice, slice),
        device.copy(stream, foreign, slice),
        device.copy(stream, slice, foreign),
        device.call(none, work),
        ticket(none),
        device.enqueue(pools, stream, PoolOp::Leave(Lane(0))),
        device.validate(pools),
        device.digest(pools, Lane(0)).map(drop),
        device.capture(none),
        device.captured(none).map(drop),
        device.launch(Graph(0), stream),
        device.launch(Graph(0), none),
        device.release(Graph(0)),
        device.read(foreign, &mut [0; 64]),
    ] {
        assert_eq!(refused.unwrap_err().kind(), Kind::OutOfRange);
    }
    assert_eq!(rig.driver.calls(), calls);
    assert!(!device.owns(&foreign) && device.owns(&slice));
}

#[test]
fn an_event_is_reached_after_the_work_enqueued_before_it_and_queries_do_not_wait() {
    let Some(rig) = Rig::new(usual()) else { return };
    let device = &rig.device;
    let [first, second] = [0; 2].map(|_| device.stream().unwrap());
    let [a, b] = [0; 2].map(|_| device.event().unwrap());
    assert_eq!(device.query(a), Ok(true), "complete until it is recorded");
    let held = rig.driver.hold(first.0).unwrap();
    device.record(a, first).unwrap();
    device.wait(second, a).unwrap();
    device.record(b, second).unwrap();
    let blocking = rig.driver.synchronizations();
    assert_eq!((device.query(a), device.query(b)), (Ok(false), Ok(false)));
    assert_eq!(rig.driver.synchronizations(), blocking);
    drop(held);
    device.synchronize(b).unwrap();
    assert_eq!((device.query(a), device.query(b)), (Ok(true), Ok(true)));
}

/// Copies `rounds` times from one range of host memory to the next: work in which to fail.
fn copies(device: &dyn Device, stream: Stream, host: Slice, far: Slice, rounds: usize) {
    for _ in 0..rounds {
        device.copy(stream, host, far).unwrap();
    }
}

#[test]
fn calls_and_tickets_complete_once_and_in_the_streams_order() {
    for seed in 0..20 {
        let Some(rig) = Rig::new(Options { seed: Some(seed), ..usual() }) else { return };
        let (device, count) = (&rig.device, Arc::new(AtomicU32::new(0)));
        let (stream, event) = (device.stream().unwrap(), device.event().unwrap());
        let mut tickets = Vec::new();
        for number in 0..10 {
            let count = Arc::clone(&count);
            let step = move || {
                let before = count.fetch_add(1, Ordering::Relaxed);
                assert_eq!(before, number);
            };
            device.call(stream, Arc::new(step)).unwrap();
            let (ticket, completer) = Ticket::new();
            device.complete(stream, completer).unwrap();
            tickets.push(ticket);
        }
        device.record(event, stream).unwrap();
        device.synchronize(event).unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 10);
        assert!(tickets.iter().all(|ticket| ticket.poll() == Some(Outcome::Done)));
        assert_eq!(Arc::strong_count(&count), 1, "the callback is dropped");
    }
}

#[test]
fn a_panic_in_a_call_fails_the_device_and_ends_every_wait() {
    let Some(rig) = Rig::new(usual()) else { return };
    let (stream, event) = (rig.device.stream().unwrap(), rig.device.event().unwrap());
    rig.device.call(stream, Arc::new(|| panic!("an engine's callback"))).unwrap();
    let (ticket, completer) = Ticket::new();
    rig.device.complete(stream, completer).unwrap();
    rig.device.record(event, stream).unwrap();
    assert_eq!(rig.device.synchronize(event).unwrap_err().kind(), Kind::DeviceFailed);
    assert_eq!(ticket.poll(), Some(Outcome::Failed(Kind::Internal)));
}

#[test]
fn a_lost_context_ends_every_ticket_and_every_wait() {
    let Some(rig) = Rig::own(usual(), "fails an operation") else { return };
    let device = &rig.device;
    let map = pinned(4096);
    let host = device.register(&map).unwrap();
    let far = device.allocate(4096).unwrap();
    let [stream, other] = [0; 2].map(|_| device.stream().unwrap());
    let [event, second] = [0; 2].map(|_| device.event().unwrap());
    let watched = Arc::new(());
    rig.driver.hold(stream.0);
    copies(&**device, stream, host, far, 3);
    let kept = Arc::clone(&watched);
    device.call(stream, Arc::new(move || drop(Arc::clone(&kept)))).unwrap();
    let (ticket, completer) = Ticket::new();
    device.complete(stream, completer).unwrap();
    device.record(event, stream).unwrap();
    device.wait(other, event).unwrap();
    device.record(second, other).unwrap();
    let (waiting, completer) = Ticket::new();
    device.complete(other, completer).unwrap();
    rig.driver.fail_operation(1, ILLEGAL_ADDRESS);
    rig.driver.let_go(stream.0);
    for event in [event, second] {
        assert_eq!(device.query(event).unwrap_err().kind(), Kind::DeviceFailed);
        assert_eq!(device.synchronize(event).unwrap_err().kind(), Kind::DeviceFailed);
    }
    for ticket in [ticket, waiting] {
        assert_eq!(ticket.poll(), Some(Outcome::Failed(Kind::DeviceFailed)));
    }
    assert_eq!(Arc::strong_count(&watched), 1, "work that was not reached is dropped");
    // From here on enqueued work does nothing, and tickets end at once.
    copies(&**device, stream, host, far, 1);
    device.record(event, stream).unwrap();
    device.wait(other, event).unwrap();
    let (late, completer) = Ticket::new();
    device.complete(stream, completer).unwrap();
    assert_eq!(late.poll(), Some(Outcome::Failed(Kind::DeviceFailed)));
    let Rig { device, driver } = rig;
    drop(device);
    assert_eq!(driver.held_resources(), Resources::default());
}

#[test]
fn work_that_is_the_last_to_hold_the_device_may_end_on_its_stream() {
    let Some(Rig { device, driver }) = Rig::own(usual(), "tells what it holds") else { return };
    let stream = device.stream().unwrap();
    driver.hold(stream.0);
    let own = Arc::clone(&device);
    device.call(stream, Arc::new(move || assert!(own.granularity() > 0))).unwrap();
    drop(device);
    assert_ne!(driver.held_resources(), Resources::default(), "the work keeps the device");
    driver.let_go(stream.0);
    // A thread of its own closes it.
    for _ in 0..10_000 {
        if driver.held_resources() == Resources::default() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("{:?}", driver.held_resources());
}
