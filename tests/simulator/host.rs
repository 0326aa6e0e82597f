//! The host's time to enqueue a step: the calls are those of the production schedule, and the test checks what waits
//! for what.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::rates::HostCosts;
use forebay::device::{Device, PoolLayout, SplitIndices};
use forebay::overlap::{Engine, EngineCall, Overlap, OverlapStreams, Run, Schedule, enqueue_layer};
use forebay::predict::setup::{File, Setup};
use forebay::predict::simulate::{Bound, HostTime};
use forebay::{Geometries, Geometry, Layer, MicroBatch, Result, Shape};

use crate::forgets::Forgets;
use crate::{POINT, Simulator, all, ess, on_the_page};

struct Nothing;

impl Engine for Nothing {
    fn enqueue(&mut self, _call: &EngineCall, _stream: forebay::device::Stream) -> Result<()> {
        Ok(())
    }
}

/// Operations and waits of one layer, counted by a device that the schedule enqueues it on. Layer 1 follows layer 0.
fn counted(layer: Layer, order: Overlap) -> (u32, u32) {
    let geometry = Geometries::from(Geometry::new(Shape { group_layers: 2, ..*ess().shape() }).unwrap());
    let device = Forgets::new(ClockDevice::new(ClockOptions::default()).unwrap(), None);
    let operations = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&operations);
    device.leave_out(move |_, _, _| {
        seen.fetch_add(1, Ordering::Relaxed);
        false
    });
    let pools = device
        .attach(PoolLayout {
            geometry: geometry.clone(),
            tables: Vec::new(),
            slabs: Vec::new(),
            rows: Vec::new(),
            lane_pages: 0,
            micro_batches: 1,
            batch: 4,
            expected: Default::default(),
        })
        .unwrap();
    let stream = || device.stream().unwrap();
    let streams =
        OverlapStreams { compute: stream(), resolve: stream(), gather: stream(), scatter: stream() };
    let words = |count: u64| device.allocate(4 * count).unwrap();
    let entries = 4 * u64::from(ess().shape().top_k);
    let run = Run {
        geometry,
        moves: true,
        schedule: Schedule::new(&*device).unwrap(),
        micro_batch: MicroBatch(0),
        batch: 4,
        half: 2,
        query_rows: 1,
        top_k: ess().shape().top_k,
        waves: 1,
        streams,
        selection: words(entries),
        slots: words(entries),
        split_indices: Some(SplitIndices { lists: words(2 * entries), counts: words(8), batch: 4 }),
    };
    enqueue_layer(&*device, pools, &run, layer, None, order, &mut Nothing).unwrap();
    (operations.load(Ordering::Relaxed), device.waits.load(Ordering::Relaxed))
}

/// The host's time of the operating point with these costs.
fn host(host: HostCosts, order: Overlap) -> HostTime {
    let file = File { host: Some(host), ..ess().file().clone() };
    Simulator::new(Setup::new(file).unwrap()).run(&POINT, &all(order)).unwrap().host
}

#[test]
fn the_hosts_calls_of_a_layer_are_those_that_the_schedule_makes() {
    let none = HostCosts { step_us: 0.0, row_us: 0.0, operation_us: 0.0, edge_us: 0.0 };
    for order in Overlap::FIRST {
        let (operations, edges) = counted(Layer(0), order);
        assert!(operations >= 3 && edges >= 1);
        // 61 layers and one draft pass where the setup has a draft layer, of two micro-batches.
        let shape = *ess().shape();
        let layers = f64::from(2 * (shape.layers + shape.draft_layers));
        let of = |costs| host(costs, order).uncaptured_us / layers;
        assert_eq!(of(HostCosts { operation_us: 1.0, ..none }), f64::from(operations), "{order:?}");
        assert_eq!(of(HostCosts { edge_us: 1.0, ..none }), f64::from(edges), "{order:?}");
    }
    // GLM-5.2 has no draft layer here; 21 layers select for 57 others.
    let glm = |host, order| {
        let setup = ess().of_model("glm-5.2").unwrap();
        let setup = Setup::new(File { host: Some(host), ..setup.file().clone() }).unwrap();
        Simulator::new(setup).run(&POINT, &all(order)).unwrap().host.uncaptured_us / 2.0
    };
    for order in Overlap::ALL {
        let first = if order == Overlap::Ahead { Overlap::Da } else { order };
        let (a, b) = (counted(Layer(0), first), counted(Layer(1), order));
        let [operations, edges] = [(a.0, b.0), (a.1, b.1)].map(|(a, b)| f64::from(21 * a + 57 * b));
        assert_eq!(glm(HostCosts { operation_us: 1.0, ..none }, order), operations, "{order:?}");
        assert_eq!(glm(HostCosts { edge_us: 1.0, ..none }, order), edges, "{order:?}");
    }
    let time = host(HostCosts { step_us: 3.0, row_us: 0.5, ..none }, Overlap::Dba);
    assert_eq!((time.captured_us, time.uncaptured_us), (6.0 + 80.0, 86.0));
    // Both micro-batches' captured layers are one launch.
    assert_eq!(host(HostCosts { operation_us: 1.0, ..none }, Overlap::Dba).captured_us, 1.0);
}

#[test]
fn a_step_waits_for_the_host_where_that_takes_longer() {
    let time = HostTime { captured_us: 20.0, uncaptured_us: 1500.0 };
    let of = |step_ms| time.bound(step_ms).name();
    assert_eq!(
        [2.0, 1.5, 1.4, 0.02, 0.019].map(of),
        [Bound::Device.name(), "device", "host-unless-captured", "host-unless-captured", "host"]
    );
    let wrong = HostCosts { edge_us: -1.0, ..HostCosts::default() };
    let refused = Setup::new(File { host: Some(wrong), ..ess().file().clone() }).unwrap_err();
    assert!(refused.to_string().contains("host.edge_us"), "{refused}");
    let old = Setup::new(File { forebay_setup: 1, host: Some(HostCosts::default()), ..ess().file().clone() });
    assert!(old.is_err());
}

#[test]
fn the_host_times_of_the_page_are_the_computed_ones() {
    let outcome = Simulator::new(ess()).run(&POINT, &Default::default()).unwrap();
    on_the_page(&[
        format!("| captured | {:.3} ms |", outcome.host.captured_us / 1e3),
        format!("| not captured | {:.2} ms |", outcome.host.uncaptured_us / 1e3),
        format!("| the step on the device | {:.2} ms |", outcome.step_ms),
    ]);
}
