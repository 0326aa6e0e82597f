//! Writers that write too late or too early: what the other tenant of the pages sees of it.

use std::sync::Arc;

use crate::arrive::{reached, send, write_over};
use crate::device::TestDevice;
use crate::devices::over;
use crate::engine::{Expected, Kernels};
use crate::world::stamps;
use forebay::dense::{Cache, Config, Group, Open, Shape, Way};
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Stream};
use forebay::{Accepted, BatchRow, Memory, MicroBatch, Sequence};

struct Rig {
    clock: Option<Arc<ClockDevice>>,
    device: Arc<dyn Device>,
    cache: Cache,
    kernels: Kernels,
    main: Stream,
    side: Stream,
}

/// Full attention, and a window that is shorter than the prompts.
fn config() -> Config {
    let group = |layers: &[u32], runs, window| Group { layers: layers.to_vec(), runs, window };
    let groups = vec![group(&[1], [32, 16], None), group(&[0, 2], [16, 0], Some(33))];
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let mut config = Config { memory, ..Config::new(Shape { page_tokens: 16, groups }, 6, 80) };
    (config.device_pages, config.host_pages) = (config.pages_for(3, 80), vec![10, 10]);
    config
}

impl Rig {
    fn new(clock: bool) -> Rig {
        let test = TestDevice::host(HostOptions::default());
        let (test, clock, device) = match clock {
            true => over(test, ClockOptions::default()),
            false => {
                let device = test.device();
                (test, None, device)
            }
        };
        let cache = Cache::new(config(), Arc::clone(&device)).unwrap();
        let kernels = Kernels::new(&test, &cache);
        let [main, side] = [(); 2].map(|()| device.stream().unwrap());
        Rig { clock, device, cache, kernels, main, side }
    }

    fn run(&self) {
        self.clock.iter().for_each(|clock| assert!(clock.run().is_ok()));
    }

    /// The rows of a prompt that no other one has.
    fn rows(of: u32) -> Vec<u64> {
        stamps(&(0..60).map(|at| of * 1000 + at).collect::<Vec<u32>>())
    }

    fn send(&mut self, handle: Sequence, way: Way, of: u32) {
        let rows = Rig::rows(of);
        for layer in 0..3 {
            send(&self.kernels, &mut self.cache, (handle, way), (layer, 0), &rows, &mut |most| most);
            self.cache.append_layer_in_place(handle, layer, 60).unwrap();
        }
    }

    /// A step that reads the rows of a prompt. Returns whether they are all there.
    fn reads(&mut self, sequence: Sequence, of: u32) -> bool {
        let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 };
        let mut step = self.cache.prepare(MicroBatch(0), &[row], None, self.main).unwrap();
        let stamps = [Rig::rows(of), vec![7]].concat();
        let on = (&*self.device as &dyn Device, self.main);
        let expected = vec![Expected { stamps, fresh: 1 }];
        self.kernels.enqueue(&mut self.cache, on, (&step, 0), expected);
        self.cache.finish(&mut step, self.main).unwrap();
        self.run();
        self.cache.retire(step, self.main).map(drop).map_err(|unretired| unretired.error).unwrap();
        self.kernels.faults.lock().unwrap().drain(..).count() == 0
    }
}

const OPEN: Open = Open { prompt: 60, promised: 8 };

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Close,
    Abort,
    /// Aborts, and gives the pages back without a word of the writer.
    Early,
}

/// Ends a request while its writer is slow, lets others take its pages, and lets the writer go on. Returns whether the
/// others still have all their rows.
fn survives(way: Way, end: End) -> bool {
    let mut rig = Rig::new(false);
    let start = rig.cache.stats();
    let (first, _ticket) = rig.cache.arrive(&OPEN, way, rig.side).unwrap();
    let pages = reached(&rig.cache, first, (way, 60));
    assert!(pages.iter().any(|(group, _)| *group == 0) && pages.iter().any(|(group, _)| *group == 1));
    let withheld = match end {
        End::Close => rig.cache.close(first, rig.side).map(|()| None).unwrap(),
        _ => Some(rig.cache.abort(first, rig.side).unwrap()),
    };
    if end == End::Early {
        let free = rig.cache.release(withheld.unwrap()).unwrap();
        assert_eq!(free as usize, pages.len());
    }
    rig.cache.validate().unwrap();
    // Others take what there is.
    let mut tenants = Vec::new();
    while let Ok((tenant, _)) = rig.cache.arrive(&OPEN, way, rig.side) {
        rig.send(tenant, way, 1 + tenants.len() as u32);
        tenants.push(tenant);
    }
    assert!(!tenants.is_empty());
    write_over(&rig.kernels, &rig.cache, way, &pages);
    let mut whole = true;
    for (of, tenant) in (1..).zip(tenants) {
        drop(rig.cache.join(tenant, rig.side).unwrap());
        whole &= rig.reads(tenant, of);
        rig.cache.close(tenant, rig.main).unwrap();
    }
    if end == End::Abort {
        assert_eq!(rig.cache.stats().withheld_pages as usize, pages.len());
        assert_eq!(rig.cache.release(withheld.unwrap()).unwrap() as usize, pages.len());
    }
    rig.cache.validate().unwrap();
    let stats = rig.cache.stats();
    assert_eq!((stats.free_pages, stats.tiers), (start.free_pages, start.tiers));
    assert_eq!((stats.sequences, stats.withheld_pages), (0, 0));
    assert!(rig.cache.shut_down().is_ok());
    whole
}

#[test]
fn a_late_write_reaches_no_other_sequence_until_the_pages_are_released() {
    for way in [Way::Direct, Way::Host] {
        assert!(survives(way, End::Abort), "{way:?}");
        assert!(!survives(way, End::Close), "the control: the late write reaches the next tenant, {way:?}");
        assert!(!survives(way, End::Early), "the control: released before the writer was done, {way:?}");
    }
}

/// A cache with withheld pages is not shut down: a writer may still write to them.
#[test]
fn a_cache_with_withheld_pages_does_not_shut_down() {
    let mut rig = Rig::new(false);
    let (first, _ticket) = rig.cache.arrive(&OPEN, Way::Direct, rig.side).unwrap();
    let withheld = rig.cache.abort(first, rig.side).unwrap();
    let (mut cache, error) = rig.cache.shut_down().unwrap_err();
    assert_eq!((error.number("sequences"), error.number("withheld")), (Some(0), Some(4 + 3)));
    cache.release(withheld).unwrap();
    assert!(cache.shut_down().is_ok());
}

/// A parked sequence still goes down from the pages that another one takes, or comes up from them, and the transfer
/// waits for the ticket or does not. Returns whether the parked one has all its rows.
fn waits(way: Way, patient: bool) -> bool {
    let mut rig = Rig::new(true);
    let (first, _ticket) = rig.cache.arrive(&OPEN, Way::Direct, rig.side).unwrap();
    rig.run();
    rig.send(first, Way::Direct, 1);
    drop(rig.cache.join(first, rig.side).unwrap());
    rig.run();
    let clock = Arc::clone(rig.clock.as_ref().unwrap());
    if way == Way::Host {
        drop(rig.cache.park(first, 0, rig.side).unwrap());
        rig.run();
    }
    clock.hold(rig.side).unwrap();
    match way {
        Way::Direct => drop(rig.cache.park(first, 0, rig.side).unwrap()),
        Way::Host => drop(rig.cache.resume(first, rig.side).unwrap()),
    }
    // They take all pages.
    let mut arriving = Vec::new();
    while let Ok((handle, ticket)) = rig.cache.arrive(&OPEN, way, rig.main) {
        arriving.push((handle, ticket));
    }
    assert_eq!(arriving.len(), if way == Way::Direct { 3 } else { 2 });
    // What does not depend on the held stream runs.
    let event = clock.event().unwrap();
    clock.record(event, rig.side).unwrap();
    assert!(clock.synchronize(event).is_err());
    assert!(arriving.iter().any(|(_, ticket)| ticket.poll().is_none()), "the pages are in use");
    if patient {
        clock.let_go(rig.side).unwrap();
        rig.run();
        assert!(arriving.iter().all(|(_, ticket)| ticket.poll().is_some()));
    }
    for (handle, _) in &arriving {
        write_over(&rig.kernels, &rig.cache, way, &reached(&rig.cache, *handle, (way, 60)));
    }
    if !patient {
        clock.let_go(rig.side).unwrap();
        rig.run();
    }
    for (handle, _) in arriving {
        rig.cache.close(handle, rig.main).unwrap();
    }
    rig.run();
    rig.cache.reap(rig.main).unwrap();
    if way == Way::Direct {
        drop(rig.cache.resume(first, rig.side).unwrap());
    }
    rig.reads(first, 1)
}

#[test]
fn a_transfer_that_waits_for_the_ticket_writes_over_no_copy() {
    for way in [Way::Direct, Way::Host] {
        assert!(waits(way, true), "{way:?}");
        assert!(!waits(way, false), "the control: it does not wait, {way:?}");
    }
}
