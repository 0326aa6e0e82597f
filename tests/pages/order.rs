//! The order of pages' operations: a watch finds each edge that a schedule left out, and without an edge bytes are
//! wrong.

use std::sync::Arc;

use forebay::check::watch::{Watch, bytes};
use forebay::device::descriptor::Report;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::pages::descriptor::{Changed, Entry, FROM_DEVICE, encode, words};
use forebay::device::{BeginPages, CopyPages, Device, Event, PageOp, PageTables, Plane, Slice, Stream};
use forebay::os::{Map, NoFaults, Request};
use forebay::{Kind, Result};

use crate::device::TestDevice;

const PAGE: u64 = 4096;

/// A cache of one group whose pages have two pieces, beside host memory for pages.
struct Rig {
    watch: Arc<Watch>,
    map: Arc<Map>,
    pinned: Slice,
    device: Slice,
    compute: Stream,
    transfer: Stream,
    events: [Event; 4],
}

impl Rig {
    fn new(without: Option<u64>) -> Rig {
        let inner = HostDevice::new(HostOptions::default());
        let watch = without
            .map_or_else(|| Watch::new(inner.clone()), |wait| Watch::without_wait(inner.clone(), wait));
        let bytes = 1 << 17;
        let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: false };
        let map = Arc::new(Map::new(&request, &NoFaults).unwrap().0);
        Rig {
            pinned: watch.register(&map).unwrap(),
            device: watch.allocate(bytes).unwrap(),
            compute: watch.stream().unwrap(),
            transfer: watch.stream().unwrap(),
            events: [(); 4].map(|()| watch.event().unwrap()),
            map,
            watch,
        }
    }

    /// The planes of keys and values: side by side on the host, apart on the device.
    fn planes(&self) -> [(Plane, Plane); 2] {
        let host =
            |at| Plane { memory: self.pinned.part(at, 8 * PAGE).unwrap(), stride: PAGE, bytes: PAGE / 2 };
        let device =
            |at| Plane { memory: self.device.part(at, 4 * PAGE).unwrap(), stride: PAGE / 2, bytes: PAGE / 2 };
        [(host(0), device(0)), (host(PAGE / 2), device(4 * PAGE))]
    }

    fn up(&self, pages: &[(u32, u32)]) -> Result<()> {
        let planes = self.planes();
        self.watch.enqueue_pages(self.transfer, PageOp::Copy(CopyPages { planes: &planes, pages }))
    }

    fn down(&self, pages: &[(u32, u32)]) -> Result<()> {
        let planes = self.planes().map(|(host, device)| (device, host));
        self.watch.enqueue_pages(self.transfer, PageOp::Copy(CopyPages { planes: &planes, pages }))
    }

    /// The engine's attention, which reads pages of the device.
    fn attend(&self, pages: &[u64]) -> Result<()> {
        let piece = |(plane, page): (Plane, &u64)| {
            bytes(&plane.memory.part(page * plane.stride, plane.bytes).unwrap(), false)
        };
        let planes = self.planes().map(|(_, device)| device);
        let reads: Vec<_> =
            planes.iter().flat_map(|plane| pages.iter().map(|page| piece((*plane, page)))).collect();
        self.watch.engine(self.compute, "attention", &reads)
    }

    /// The begin of a step of one row, and the slices that attention reads.
    fn begin(&self, stream: Stream, number: u64) -> Result<Vec<Slice>> {
        let place = |memory: Slice, at, bytes| memory.part(16 * PAGE + at, bytes).unwrap();
        let mut descriptor = vec![0; words(1, 1)];
        let changed = [Changed { first: 1, count: 2 }; 4];
        let entry = Entry { lane: 1, length: FROM_DEVICE, accepted: 0, query_rows: 1, changed };
        encode(number, 1, [entry].into_iter(), &mut descriptor);
        self.map.copy_in_words(16 * PAGE, &descriptor).unwrap();
        let tables = [PageTables {
            lanes: place(self.pinned, 256, 32),
            table: place(self.device, 0, 16),
            slots: place(self.device, 64, 16),
            page_tokens: 16,
            pages: 8,
        }];
        let [lengths, starts, positions] =
            [(128, 4), (192, 8), (256, 16)].map(|(at, bytes)| place(self.device, at, bytes));
        let begin = BeginPages {
            descriptor: place(self.pinned, 0, 4 * words(1, 1) as u64),
            lanes: place(self.device, 512, 16),
            accepted: None,
            lengths,
            starts,
            positions,
            wide: false,
            groups: &tables,
            report: place(self.pinned, 512, 4 * Report::words(0, 1) as u64),
        };
        self.watch.enqueue_pages(stream, PageOp::Begin(begin))?;
        Ok(vec![tables[0].table, tables[0].slots, lengths, starts, positions])
    }

    fn edge(&self, event: usize, from: Stream, to: Stream) -> Result<()> {
        self.watch.edge(self.events[event], from, to)
    }
}

/// Runs a schedule with each of its waits left out in turn: each is missed.
#[track_caller]
fn needs_every_wait(schedule: fn(&Rig) -> Result<()>, waits: u64) {
    let whole = Rig::new(None);
    schedule(&whole).unwrap();
    assert_eq!((whole.watch.conflict(), whole.watch.waits()), (None, waits));
    for wait in 0..waits {
        let rig = Rig::new(Some(wait));
        let error = schedule(&rig).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidState, "{error}");
        assert_eq!(rig.watch.conflict(), Some(error), "wait {wait}");
    }
}

#[test]
fn pages_that_come_back_are_there_before_attention_and_go_after_it() {
    needs_every_wait(
        |rig| {
            rig.up(&[(3, 1), (5, 2)])?;
            rig.edge(0, rig.transfer, rig.compute)?;
            rig.attend(&[2])?;
            // The page goes, and another one takes its place.
            rig.edge(1, rig.compute, rig.transfer)?;
            rig.down(&[(2, 6)])?;
            rig.up(&[(0, 2)])?;
            rig.edge(2, rig.transfer, rig.compute)?;
            rig.attend(&[1, 2])
        },
        3,
    );
}

#[test]
fn pages_that_no_copy_touches_need_no_order() {
    let rig = Rig::new(None);
    rig.up(&[(3, 1), (4, 2)]).unwrap();
    rig.attend(&[0, 3]).unwrap();
    rig.down(&[(1, 6), (2, 7)]).unwrap();
    rig.attend(&[4]).unwrap();
    assert_eq!(rig.watch.conflict(), None);
    let error = rig.attend(&[2]).unwrap_err();
    assert_eq!(rig.watch.conflict(), Some(error));
}

#[test]
fn a_step_begins_after_what_its_tensors_lanes_and_report_were_used_for() {
    // Another stream than the one that the last step was on.
    needs_every_wait(
        |rig| {
            let tensors = rig.begin(rig.transfer, 1)?;
            rig.edge(0, rig.transfer, rig.compute)?;
            let reads: Vec<_> = tensors.iter().map(|slice| bytes(slice, false)).collect();
            rig.watch.engine(rig.compute, "attention", &reads)?;
            rig.edge(1, rig.compute, rig.transfer)?;
            rig.watch.record(rig.events[3], rig.transfer)?;
            rig.watch.synchronize(rig.events[3])?;
            rig.begin(rig.transfer, 2).map(drop)
        },
        2,
    );
    // The host must have seen the end of the step whose descriptor it writes.
    let rig = Rig::new(None);
    rig.begin(rig.compute, 1).unwrap();
    let error = rig.begin(rig.compute, 2).unwrap_err();
    assert!(error.to_string().contains("prepare"), "{error}");
    // Two steps of one lane are ordered, as are a step and what writes its page table's words.
    let pinned = |rig: &Rig| {
        let rows = rig.pinned.part(16 * PAGE + 256 + 20, 8).unwrap();
        rig.watch.engine(rig.transfer, "another writer", &[bytes(&rows, true)])
    };
    let rig = Rig::new(None);
    rig.begin(rig.compute, 1).unwrap();
    assert_eq!(pinned(&rig).unwrap_err().kind(), Kind::InvalidState);
    let rig = Rig::new(None);
    rig.begin(rig.compute, 1).unwrap();
    rig.edge(0, rig.compute, rig.transfer).unwrap();
    pinned(&rig).unwrap();
}

/// What a copy down finds of a page whose copy up is held back, with and without the edge between them.
fn found(ordered: bool) -> u8 {
    let device = TestDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
    let request =
        Request { bytes: PAGE, huge: false, populate: false, lock: false, node: None, shared: false };
    let map = Arc::new(Map::new(&request, &NoFaults).unwrap().0);
    let (host, pages) = (device.register(&map).unwrap(), device.allocate(PAGE).unwrap());
    let [up, down] = [(); 2].map(|()| device.stream().unwrap());
    let [came, went, begun] = [(); 3].map(|()| device.event().unwrap());
    device.write(host.part(0, 256).unwrap(), &[7; 256]).unwrap();
    let plane = |memory: Slice| Plane { memory, stride: 256, bytes: 256 };
    let planes = [(plane(host), plane(pages))];
    let held = device.hold(up);
    device.enqueue_pages(up, PageOp::Copy(CopyPages { planes: &planes, pages: &[(0, 3)] })).unwrap();
    if ordered {
        device.edge(came, up, down).unwrap();
    }
    let planes = [(plane(pages), plane(host))];
    device.enqueue_pages(down, PageOp::Copy(CopyPages { planes: &planes, pages: &[(3, 9)] })).unwrap();
    device.record(went, down).unwrap();
    if !ordered {
        // Nothing holds it back.
        device.synchronize(went).unwrap();
    }
    drop(held);
    device.synchronize(went).unwrap();
    device.record(begun, up).unwrap();
    device.synchronize(begun).unwrap();
    let mut page = [0];
    device.read(host.part(9 * 256, 1).unwrap(), &mut page).unwrap();
    page[0]
}

#[test]
fn copies_run_in_their_streams_order() {
    assert_eq!((found(true), found(false)), (7, 0));
}
