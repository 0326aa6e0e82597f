//! Prefetches: refused alike on every device, and on the CUDA device one kernel, which reads its lines and changes
//! nothing, also in a graph.

use std::sync::Arc;

use crate::rig::{Rig, pinned, usual};
use forebay::Kind;
use forebay::check::watch::Watch;
use forebay::device::clock::{ClockDevice, ClockOptions, Costs, L2};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay_standin::Options;

/// A rate at which no test waits.
const RATE: u64 = 1 << 40;

/// What becomes of some prefetches: of a slice, of nothing, of another device's slice, at no rate, on no stream.
fn outcomes(device: &dyn Device) -> [Option<Kind>; 6] {
    let (stream, own) = (device.stream().unwrap(), device.allocate(1000).unwrap());
    let foreign = HostDevice::new(HostOptions::default()).allocate(1000).unwrap();
    let nothing = own.part(3, 0).unwrap();
    let unknown = Stream(stream.0 ^ 1 << 40);
    [
        (stream, own, RATE),
        (stream, nothing, RATE),
        (stream, foreign, RATE),
        (stream, own, 0),
        (unknown, own, RATE),
        (unknown, nothing, RATE),
    ]
    .map(|(stream, slice, rate)| device.prefetch(stream, slice, rate).err().map(|error| error.kind()))
}

#[test]
fn a_prefetch_is_refused_alike_on_every_device() {
    let range = Some(Kind::OutOfRange);
    let wanted = [None, None, range, range, range, range];
    let host = |threaded| HostDevice::new(HostOptions { threaded, ..HostOptions::default() });
    for threaded in [false, true] {
        let host = host(threaded);
        assert_eq!(outcomes(&*host), wanted);
        assert_eq!(host.operations(), 0, "it does nothing");
    }
    assert_eq!(outcomes(&*Watch::new(host(false))), wanted);
    for l2 in [None, Some(L2 { bytes: 1 << 20, fixed_ns: 1.0, sm: 0.1 })] {
        let options = ClockOptions { costs: Costs { l2, ..Costs::default() }, ..ClockOptions::default() };
        let clocks = [ClockDevice::new(options), ClockDevice::over(host(false), options)];
        for clock in clocks.map(Result::unwrap) {
            assert_eq!(outcomes(&*clock), wanted, "{l2:?}");
            clock.run().unwrap();
            assert_eq!(clock.operations(), u64::from(l2.is_some()));
        }
    }
    let Some(rig) = Rig::new(usual()) else { return };
    assert_eq!(outcomes(&*rig.device), wanted);
}

#[test]
fn a_prefetch_is_one_kernel_that_changes_nothing_also_in_a_graph() {
    let Some(rig) = Rig::own(usual(), "counts operations") else { return };
    let (device, driver) = (&rig.device, &rig.driver);
    let (stream, event) = (device.stream().unwrap(), device.event().unwrap());
    let memory = device.allocate(1 << 16).unwrap();
    let bytes: Vec<u8> = (0..1 << 16).map(|at| (at % 251) as u8).collect();
    device.write(memory, &bytes).unwrap();
    let ends = |work: &dyn Fn()| {
        let before = driver.operations();
        work();
        device.record(event, stream).unwrap();
        device.synchronize(event).unwrap();
        driver.operations() - before
    };
    // Any beginning and length: no line is touched that has no byte of the slice.
    for (at, length) in [(0, 1 << 16), (1, 1), (127, 2), (5, 40_000), ((1 << 16) - 1, 1)] {
        let part = memory.part(at, length).unwrap();
        assert_eq!(ends(&|| device.prefetch(stream, part, RATE).unwrap()), 1);
    }
    assert_eq!(ends(&|| device.prefetch(stream, memory.part(9, 0).unwrap(), RATE).unwrap()), 0);
    let mut found = vec![0; bytes.len()];
    device.read(memory, &mut found).unwrap();
    assert_eq!(found, bytes);
    device.capture(stream).unwrap();
    assert_eq!(driver.operations(), {
        let before = driver.operations();
        device.prefetch(stream, memory, RATE).unwrap();
        before
    });
    let graph = device.captured(stream).unwrap();
    for _ in 0..3 {
        assert_eq!(ends(&|| device.launch(graph, stream).unwrap()), 1);
    }
    device.release(graph).unwrap();
}

/// Of host memory, which L2 does not keep, and on a device without L2.
#[test]
fn a_prefetch_does_nothing_where_it_is_of_no_use() {
    for l2 in [true, false] {
        let Some(rig) = Rig::own(Options { l2, ..usual() }, "lacks something") else { return };
        let device = &rig.device;
        let map = pinned(1 << 16);
        let (host, own) = (device.register(&map).unwrap(), device.allocate(1 << 12).unwrap());
        let stream = device.stream().unwrap();
        let launched = |slice| {
            let before = rig.driver.calls_of(c"cuLaunchKernelEx");
            device.prefetch(stream, slice, RATE).unwrap();
            rig.driver.calls_of(c"cuLaunchKernelEx") - before
        };
        assert_eq!([launched(host), launched(host.part(100, 7).unwrap()), launched(own)], [0, 0, l2.into()]);
    }
}

/// A launch that the driver refuses is an error, and nothing is enqueued; on a device that has failed it does nothing.
#[test]
fn a_prefetch_that_the_driver_refuses_is_an_error_and_enqueues_nothing() {
    let Some(rig) = Rig::own(usual(), "fails a call or an operation") else { return };
    let (device, driver) = (&rig.device, &rig.driver);
    let (stream, own) = (device.stream().unwrap(), device.allocate(1 << 12).unwrap());
    let before = driver.operations();
    let mut refused = 0;
    for n in 0.. {
        driver.fail_call(n, 1);
        let outcome = device.prefetch(stream, own, RATE);
        let Some(call) = driver.failed_call() else { break };
        refused += u32::from(call == "cuLaunchKernelEx");
        assert_eq!(outcome.is_err(), call != "cuCtxPopCurrent_v2", "{call}");
    }
    driver.fail_call(1 << 40, 1);
    assert_eq!(refused, 1);
    // Those whose refusal came behind the launch, or not at all.
    assert!(driver.operations() - before <= 2);
    driver.fail_call(0, 700);
    device.prefetch(stream, own, RATE).unwrap();
    driver.fail_call(1 << 40, 1);
    let event = device.event();
    assert!(event.is_err() || device.query(event.unwrap()).unwrap_err().kind() == Kind::DeviceFailed);
    device.prefetch(stream, own, RATE).unwrap();
    let _kept = Arc::clone(device);
}
