//! Bytes in L2: what a prefetch costs, and what work that finds them there is spared.

use std::fs::File;

use super::*;
use crate::device::Mapped;
use crate::os::{Map, NoFaults, Protection, Request};

/// Bytes of a window, and of what a layer's work reads with it.
const WINDOW: u64 = 1000;
const ALL: u64 = 1600;

/// As [`costs`], with a memory of 2 bytes a nanosecond and an L2 of 2000 bytes.
fn cached() -> Costs {
    let l2 = L2 { bytes: 2000, fixed_ns: 10.0, sm: 0.1 };
    Costs { memory: Some(2e9), l2: Some(l2), ..costs() }
}

/// A device, two streams, and a window.
struct Rig {
    device: Arc<ClockDevice>,
    compute: Stream,
    side: Stream,
    window: Slice,
}

impl Rig {
    fn new(costs: Costs) -> Rig {
        let device = exact(costs);
        let [compute, side] = streams(&device);
        let window = device.allocate(WINDOW).unwrap();
        Rig { device, compute, side, window }
    }

    /// Work that reads the window and more, with so many nanoseconds of its own.
    fn reads(&self, ns: f64) {
        let demand = Demand { ns, sm: 0.5 };
        self.device.compute_reading(self.compute, named("work"), demand, ALL, &[self.window]).unwrap();
    }

    fn prefetch(&self, bytes_a_ns: f64) {
        self.device.prefetch(self.side, self.window, (bytes_a_ns * 1e9) as u64).unwrap();
    }

    /// Runs everything. The start and end of the last work and of the last prefetch.
    fn run(&self) -> [Option<(f64, f64)>; 2] {
        self.device.run().unwrap();
        let spans = self.device.spans();
        ["work", "prefetch"]
            .map(|name| spans.iter().rfind(|span| span.name == name).map(|span| (span.start_ns, span.end_ns)))
    }
}

/// A layer communicates for 600 ns and then reads 1600 bytes, of which a prefetch has brought 1000 meanwhile: it is
/// faster by their time at the memory's rate.
#[test]
fn a_layer_whose_window_was_brought_is_faster_by_the_windows_time() {
    for (cost, ahead, took) in [
        (cached(), true, (ALL - WINDOW) as f64 / 2.0),
        (cached(), false, ALL as f64 / 2.0),
        (Costs { l2: None, ..cached() }, true, ALL as f64 / 2.0),
        // Memory that is enough for all: nothing to be spared.
        (Costs { memory: None, ..cached() }, true, 100.0),
    ] {
        let rig = Rig::new(cost);
        compute(&rig.device, rig.compute, 600.0, 0.5);
        if ahead {
            rig.prefetch(2.0);
        }
        rig.reads(100.0);
        let [work, prefetch] = rig.run();
        assert_eq!(work, Some((600.0, 600.0 + took)), "{cost:?} {ahead}");
        assert_eq!(prefetch, (ahead && cost.l2.is_some()).then_some((0.0, 510.0)));
    }
}

/// The time of the work itself is a bound, however much is found.
#[test]
fn work_that_the_memory_does_not_bound_is_spared_nothing() {
    let rig = Rig::new(cached());
    compute(&rig.device, rig.compute, 600.0, 0.5);
    rig.prefetch(2.0);
    rig.reads(900.0);
    assert_eq!(rig.run()[0], Some((600.0, 1500.0)));
}

/// Without time in which nothing else needs the memory, a prefetch costs its bytes: work that began before it ended
/// finds nothing, and divides the memory with it.
#[test]
fn a_prefetch_beside_work_that_the_memory_bounds_costs_its_bytes() {
    for rate in [0.5, 1.0, 2.0] {
        let rig = Rig::new(Costs { l2: cached().l2.map(|l2| L2 { fixed_ns: 0.0, ..l2 }), ..cached() });
        rig.prefetch(rate);
        rig.reads(0.0);
        let [work, prefetch] = rig.run();
        // Together they need 2 + rate of 2 bytes a nanosecond, so both are slowed by that until one has ended.
        let slower = (2.0 + rate) / 2.0;
        let (alone, ahead) = (ALL as f64 / 2.0, WINDOW as f64 / rate);
        let wanted = match slower * alone < slower * ahead {
            true => (slower * alone, slower * alone + (ahead - alone)),
            false => (alone + WINDOW as f64 / 2.0, slower * ahead),
        };
        let near = |found: Option<(f64, f64)>, wanted: f64| (found.unwrap().1 - wanted).abs() < 1e-6;
        assert!(near(work, wanted.0) && near(prefetch, wanted.1), "{rate}: {work:?} {prefetch:?} {wanted:?}");
    }
}

/// The rate is a bound: on an idle memory too a prefetch takes its bytes by its rate, also of bytes that are there.
#[test]
fn a_prefetch_takes_its_bytes_by_its_rate_and_no_longer_where_they_are_there() {
    let rig = Rig::new(cached());
    rig.prefetch(0.25);
    assert_eq!(rig.run()[1], Some((0.0, 4010.0)));
    // Alone it would take the memory's time; what is there needs none of it.
    rig.prefetch(4.0);
    assert_eq!(rig.run()[1], Some((4010.0, 4010.0 + 260.0)));
}

/// Bytes that pass later push the window out: as many as there is no more room for. Works without bytes push nothing.
#[test]
fn later_bytes_push_earlier_ones_out() {
    for (copied, left) in [(0, 1000), (300, 1000), (500, 1000), (600, 800), (1000, 0), (4000, 0)] {
        let rig = Rig::new(cached());
        rig.prefetch(2.0);
        let other = rig.device.allocate(2 * copied.max(1)).unwrap();
        let [from, to] = [0, copied].map(|at| other.part(at, copied).unwrap());
        // It reads and writes: twice its bytes pass.
        rig.device.copy(rig.side, from, to).unwrap();
        compute(&rig.device, rig.side, 1e4, 0.1);
        edge(&rig.device, rig.side, rig.compute);
        rig.reads(0.0);
        let (start, end) = rig.run()[0].unwrap();
        assert_eq!(end - start, (ALL - left) as f64 / 2.0, "{copied}");
    }
}

/// Bytes that a work names are there for the next one, as many as there is room for: those without a name go first.
#[test]
fn a_work_finds_what_the_one_before_has_read() {
    for (bytes, found) in [(2000, WINDOW), (WINDOW, WINDOW), (400, 400), (0, 0)] {
        let rig = Rig::new(Costs { l2: cached().l2.map(|l2| L2 { bytes, ..l2 }), ..cached() });
        rig.reads(0.0);
        rig.reads(0.0);
        let (start, end) = rig.run()[0].unwrap();
        assert_eq!((start, end - start), (ALL as f64 / 2.0, (ALL - found) as f64 / 2.0), "{bytes}");
    }
}

/// Host memory and other GPUs' is not in this device's L2.
#[test]
fn a_prefetch_of_memory_that_l2_does_not_keep_does_nothing() {
    let rig = Rig::new(cached());
    let request =
        Request { bytes: LINE, huge: false, populate: false, lock: false, node: None, shared: false };
    let host = rig.device.register(&Arc::new(Map::new(&request, &NoFaults).unwrap().0)).unwrap();
    let nothing = File::open("/dev/null").unwrap().into();
    let backing = rig.device.import_backing(nothing, LINE, Protection::Read).unwrap();
    let piece = Mapped { backing, offset: 0, bytes: LINE };
    let peer = rig.device.range(&[piece], Protection::Read).unwrap();
    for slice in [host, peer, rig.window.part(0, 0).unwrap()] {
        rig.device.prefetch(rig.side, slice, 1).unwrap();
    }
    assert_eq!((rig.device.run().unwrap(), rig.device.operations()), (0.0, 0));
}

/// Addresses that were mapped anew are other memory, which no prefetch has brought.
#[test]
fn what_was_remapped_is_not_found() {
    for remapped in [false, true] {
        let rig = Rig::new(Costs { l2: Some(L2 { bytes: 2 * LINE, fixed_ns: 0.0, sm: 0.0 }), ..cached() });
        let pieces = [0, 1].map(|_| {
            let backing = rig.device.backing(LINE).unwrap();
            [Mapped { backing, offset: 0, bytes: LINE }]
        });
        let range = rig.device.range(&pieces[0], Protection::Read).unwrap();
        rig.device.prefetch(rig.side, range, 1 << 40).unwrap();
        rig.device.run().unwrap();
        if remapped {
            rig.device.remap(range, &pieces[1]).unwrap();
        }
        let demand = Demand { ns: 5.0, sm: 0.0 };
        rig.device.compute_reading(rig.compute, named("work"), demand, LINE, &[range]).unwrap();
        let (start, end) = rig.run()[0].unwrap();
        assert_eq!(end - start, if remapped { LINE as f64 / 2.0 } else { 5.0 });
    }
}

#[test]
fn works_that_name_what_they_do_not_read_are_refused() {
    let (rig, other) = (Rig::new(cached()), Rig::new(cached()));
    let demand = Demand { ns: 1.0, sm: 0.0 };
    let kind = |bytes: u64, reads: &[Slice]| {
        let asked = rig.device.compute_reading(rig.compute, named("work"), demand, bytes, reads);
        asked.unwrap_err().kind()
    };
    assert_eq!(kind(WINDOW - 1, &[rig.window]), Kind::OutOfRange);
    assert_eq!(kind(2 * WINDOW - 1, &[rig.window, rig.window]), Kind::OutOfRange);
    assert_eq!(kind(WINDOW, &[other.window]), Kind::OutOfRange);
    // A rate at which it would take longer than the clock resolves.
    let slow = rig.device.allocate(1 << 40).unwrap();
    assert_eq!(rig.device.prefetch(rig.side, slow, 1).unwrap_err().kind(), Kind::InvalidConfig);
}
