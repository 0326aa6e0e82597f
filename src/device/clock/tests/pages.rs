//! Operations on pages: what a begin and copies cost.

use super::*;
use crate::device::{BeginPages, CopyPages, PageOp, PageTables, Plane};
use crate::os::{Map, NoFaults, Request};

/// Two planes of host memory and two of the device's, of pages of 300 bytes.
fn planes(device: &ClockDevice) -> [(Plane, Plane); 2] {
    let request =
        Request { bytes: 4096, huge: false, populate: false, lock: false, node: None, shared: false };
    let host = device.register(&Arc::new(Map::new(&request, &NoFaults).unwrap().0)).unwrap();
    let own = device.allocate(4096).unwrap();
    let plane =
        |memory: Slice, at, bytes| Plane { memory: memory.part(at, 2048).unwrap(), stride: 300, bytes };
    [(plane(host, 0, 100), plane(own, 0, 100)), (plane(host, 100, 200), plane(own, 2048, 200))]
}

fn turned(planes: [(Plane, Plane); 2]) -> [(Plane, Plane); 2] {
    planes.map(|(source, target)| (target, source))
}

#[test]
fn the_copies_of_a_call_take_their_bytes_over_the_link_and_begin_once() {
    let costs = Costs {
        copy_ns: 7.0,
        launch_ns: 3.0,
        link: Link { to_device: 2e9, to_host: 1e9, duplex: 1.0, copy_engines: 1 },
        device_copy: 4e9,
        ..costs()
    };
    let device = exact(costs);
    let ([stream], planes) = (streams(&device), planes(&device));
    let pages = [(0, 1), (1, 2), (4, 0)];
    let bytes = 900.0;
    let inside = [(planes[0].1, planes[1].1)];
    let inside = inside.map(|(a, b)| (a, Plane { bytes: 100, ..b }));
    for (planes, pages, ns) in [
        (&planes[..], &pages[..], 7.0 + bytes / 2.0),
        (&turned(planes)[..], &pages[..], 7.0 + bytes),
        // Read and written in the device's memory.
        (&inside[..], &pages[..], 7.0 + 2.0 * 300.0 / 4.0),
        (&planes[..1], &pages[..1], 7.0 + 100.0 / 2.0),
        (&planes[..], &[], 0.0),
        (&[], &pages[..], 0.0),
    ] {
        device.reset().unwrap();
        device.enqueue_pages(stream, PageOp::Copy(CopyPages { planes, pages })).unwrap();
        assert_eq!((device.run().unwrap(), times(&device)), (3.0 + ns, vec![(3.0, 3.0 + ns)]));
        assert_eq!(device.spans()[0].name, "copy pages");
    }
}

/// Two directions at once take the longer one's time; two of one direction wait for the engine.
#[test]
fn copies_of_pages_share_engines_and_links_with_others() {
    let device = exact(costs());
    let ([up, down], planes) = (streams(&device), planes(&device));
    let turned = turned(planes);
    let copy = |stream, planes: &[_], count: u32| {
        let pages: Vec<(u32, u32)> = (0..count).map(|page| (page, page)).collect();
        device.enqueue_pages(stream, PageOp::Copy(CopyPages { planes, pages: &pages })).unwrap();
    };
    copy(up, &planes, 2);
    copy(down, &turned, 3);
    assert_eq!(device.run().unwrap(), 900.0);
    device.reset().unwrap();
    copy(up, &planes, 2);
    copy(down, &planes, 3);
    assert_eq!(device.run().unwrap(), 1500.0);
}

#[test]
fn a_begin_takes_its_words_over_the_link_and_its_tensors_in_memory() {
    let begin = Kernel { fixed_ns: 20.0, row_ns: 1e6, sm: 0.5 };
    let device = exact(Costs { begin, launch_ns: 3.0, device_copy: 10e9, ..costs() });
    let [stream] = streams(&device);
    let slice = |bytes| device.allocate(bytes).unwrap();
    let tables = |slots| PageTables {
        lanes: slice(1 << 30),
        table: slice(1 << 20),
        slots: slice(slots),
        page_tokens: 16,
        pages: 100,
    };
    let ns = |words, slots| {
        let groups = [tables(slots), tables(slots)];
        let begin = BeginPages {
            descriptor: slice(words),
            lanes: slice(64),
            accepted: None,
            lengths: slice(400),
            starts: slice(600),
            positions: slice(4000),
            wide: true,
            groups: &groups,
            report: slice(100),
        };
        device.reset().unwrap();
        device.enqueue_pages(stream, PageOp::Begin(begin)).unwrap();
        device.run().unwrap()
    };
    // 400 + 600 + 4000 + 2 x 10000 bytes at 10 a nanosecond; 1900 and the report's 100 at 1.
    assert_eq!(ns(1900, 10_000), 3.0 + 20.0 + 2500.0);
    assert_eq!(ns(1900, 0), 3.0 + 20.0 + 2000.0);
}

#[test]
fn a_clock_without_memory_refuses_what_a_schedule_gets_wrong() {
    let device = exact(costs());
    let ([stream], [first, second]) = (streams(&device), planes(&device));
    let other = planes(&exact(costs()));
    let kind = |stream, planes: &[(Plane, Plane)]| {
        let copy = PageOp::Copy(CopyPages { planes, pages: &[(0, 1000)] });
        device.enqueue_pages(stream, copy).err().map(|error| error.kind())
    };
    // Memory has no end there.
    assert_eq!(kind(stream, &[first, second]), None);
    assert_eq!(kind(Stream(9), &[first]), Some(Kind::OutOfRange));
    assert_eq!(kind(stream, &[first, (other[0].0, second.1)]), Some(Kind::OutOfRange));
    assert_eq!(kind(stream, &[(first.0, second.1)]), Some(Kind::OutOfRange));
    assert_eq!(kind(stream, &[(Plane { stride: 96, ..first.0 }, first.1)]), Some(Kind::OutOfRange));
    device.run().unwrap();
    assert_eq!(device.operations(), 1);
}
