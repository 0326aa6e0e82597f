//! Pages of a dense cache on the CUDA device: which driver calls copy them, and what captures and refusals do.
//! `tests/pages.rs` compares the bytes.

use std::sync::Arc;

use crate::rig::{on, own, pinned, usual};
use forebay::Kind;
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::descriptor::Report;
use forebay::device::pages::descriptor::{Entry, FROM_DEVICE, encode, words};
use forebay::device::{BeginPages, CopyPages, Device, Event, PageOp, PageTables, Plane, Slice, Stream};
use forebay::os::{Faults, Inject, Map};
use forebay_standin::{Options, Standin};

/// From this many bytes on copy engines copy a piece.
const ENGINE: u64 = 4096;

struct Rig {
    device: Arc<CudaDevice>,
    stream: Stream,
    event: Event,
    driver: Standin,
}

impl Rig {
    fn new(does: &str) -> Option<Rig> {
        Rig::with(usual(), does, |_| {})
    }

    fn with(driver: Options, does: &str, change: impl FnOnce(&mut CudaOptions)) -> Option<Rig> {
        let driver = own(driver, does)?;
        let mut options = CudaOptions {
            copy_engine_bytes: ENGINE,
            registration_chunk: 1 << 20,
            gather_blocks: 3,
            ..on(driver.library())
        };
        change(&mut options);
        let device = CudaDevice::new(options).unwrap();
        Some(Rig { stream: device.stream().unwrap(), event: device.event().unwrap(), device, driver })
    }

    fn wait(&self) {
        self.device.record(self.event, self.stream).unwrap();
        self.device.synchronize(self.event).unwrap();
    }

    /// Launches, copies, copies in two dimensions and batches of copies that some pages take.
    fn calls(&self, planes: &[(Plane, Plane)], pages: &[(u32, u32)]) -> [u64; 4] {
        let calls = || {
            [c"cuLaunchKernelEx", c"cuMemcpyAsync", c"cuMemcpy2DAsync_v2", c"cuMemcpyBatchAsync"]
                .map(|name| self.driver.calls_of(name))
        };
        let before = calls();
        self.device.enqueue_pages(self.stream, PageOp::Copy(CopyPages { planes, pages })).unwrap();
        let after = calls();
        self.wait();
        std::array::from_fn(|call| after[call] - before[call])
    }
}

fn plane(memory: Slice, at: u64, stride: u64, bytes: u64) -> Plane {
    Plane { memory: memory.part(at, memory.bytes() - at).unwrap(), stride, bytes }
}

#[test]
fn short_pieces_are_gathered_many_in_a_launch() {
    let Some(rig) = Rig::new("counts calls") else { return };
    let map = pinned(8 << 20);
    let (host, own) = (rig.device.register(&map).unwrap(), rig.device.allocate(8 << 20).unwrap());
    for at in (0..8 << 20).step_by(4096) {
        map.copy_in(at, &[(at / 4096) as u8; 4096]).unwrap();
    }
    // 40 planes of 800 pages that do not follow each other: two lists of planes, three of pages.
    let planes: Vec<(Plane, Plane)> = (0..40)
        .map(|layer| (plane(host, 200 * layer, 9600, 64), plane(own, 200_000 * layer, 96, 64)))
        .collect();
    let pages: Vec<(u32, u32)> = (0..800).map(|page| (page, 2 * (page * 7 % 800))).collect();
    assert_eq!(rig.calls(&planes, &pages), [6, 0, 0, 0]);
    let mut piece = [0; 64];
    for (layer, page) in [(0, 0), (39, 799), (31, 376), (32, 375)] {
        let to = &planes[layer].1;
        let at = u64::from(pages[page].1) * to.stride;
        rig.device.read(to.memory.part(at, 64).unwrap(), &mut piece).unwrap();
        let from: Vec<u8> = (0..64).map(|byte| ((200 * layer + 9600 * page + byte) / 4096) as u8).collect();
        assert_eq!(piece[..], from, "layer {layer}, page {page}");
    }
    // Pieces of other bytes are another launch's; pieces side by side are one.
    let two = [planes[0], (plane(host, 200, 9600, 32), plane(own, 400_000, 96, 32))];
    assert_eq!(rig.calls(&two, &pages[..9]), [2, 0, 0, 0]);
    let halves = [0, 32].map(|at| (plane(host, at, 9600, 32), plane(own, at, 96, 32)));
    assert_eq!(rig.calls(&halves, &pages[..9]), [1, 0, 0, 0]);
    assert_eq!(rig.calls(&planes, &[]), [0; 4]);
    assert_eq!(rig.calls(&[], &pages), [0; 4]);
    let none = (plane(host, 0, 64, 0), plane(own, 0, 64, 0));
    assert_eq!(rig.calls(&[none], &pages), [0; 4]);
}

#[test]
fn long_pieces_and_runs_are_copied_by_engines() {
    let Some(rig) = Rig::new("counts calls") else { return };
    let map = pinned(4 << 20);
    let (host, own) = (rig.device.register(&map).unwrap(), rig.device.allocate(4 << 20).unwrap());
    let run = |from: u32, to: u32, count: u32| (0..count).map(move |page| (from + page, to + page));
    let scattered: Vec<(u32, u32)> = run(0, 9, 1).chain(run(5, 3, 1)).chain(run(2, 30, 3)).collect();
    // Pages that touch each other on both sides: a copy for each run, all in one call.
    let touching = [(plane(host, 0, 4096, 4096), plane(own, 0, 4096, 4096))];
    assert_eq!(rig.calls(&touching, &scattered), [0, 0, 0, 1]);
    // Short pages whose runs are long.
    let short = [(plane(host, 0, 2048, 2048), plane(own, 0, 2048, 2048))];
    assert_eq!(rig.calls(&short, &scattered), [1, 1, 0, 0]);
    // Apart on one side: two dimensions, where there is more than one page.
    let apart = [(plane(host, 0, 8192, 4096), plane(own, 0, 4096, 4096))];
    assert_eq!(rig.calls(&apart, &scattered), [0, 0, 1, 1]);
    // The end of a registration, which no driver's copy crosses, is at page 128.
    assert_eq!(rig.calls(&apart, &run(126, 0, 4).collect::<Vec<_>>()), [0, 0, 0, 1]);
    assert_eq!(rig.calls(&touching, &run(250, 0, 10).collect::<Vec<_>>()), [0, 0, 0, 1]);
    let ends = [(plane(own, 0, 4096, 4096), plane(host, 0, 8192, 4096))];
    assert_eq!(rig.calls(&ends, &run(0, 124, 4).collect::<Vec<_>>()), [0, 0, 1, 0]);
    // The driver's own copy inside host memory would block.
    let inside = [(plane(host, 0, 4096, 4096), plane(host, 2 << 20, 4096, 4096))];
    let before = rig.driver.synchronizations();
    assert_eq!(rig.calls(&inside, &scattered), [3, 0, 0, 0]);
    assert_eq!(rig.driver.synchronizations(), before + 1, "the test's own");
}

/// Two memories, and 300 pages of which no two touch each other: more than a batch takes.
struct Apart {
    _map: Arc<Map>,
    own: Slice,
    planes: [(Plane, Plane); 1],
    pages: Vec<(u32, u32)>,
}

impl Apart {
    fn new(rig: &Rig) -> Apart {
        let (map, own) = (pinned(4 << 20), rig.device.allocate(4 << 20).unwrap());
        let host = rig.device.register(&map).unwrap();
        for page in 0..600 {
            map.copy_in(page * ENGINE, &[(page % 251) as u8; ENGINE as usize]).unwrap();
        }
        let planes = [(plane(host, 0, ENGINE, ENGINE), plane(own, 0, ENGINE, ENGINE))];
        let pages = (0..300).map(|page| (2 * page, 2 * (page * 7 % 300))).collect();
        Apart { _map: map, own, planes, pages }
    }

    /// Reads the pages back, and compares them with their sources.
    fn compare(&self, rig: &Rig) {
        for (from, to) in &self.pages {
            let mut page = [0; ENGINE as usize];
            rig.device.read(self.own.part(u64::from(*to) * ENGINE, ENGINE).unwrap(), &mut page).unwrap();
            assert_eq!(page, [(from % 251) as u8; ENGINE as usize], "page {from} to {to}");
        }
    }
}

#[test]
fn copies_of_an_engine_go_in_batches_where_the_driver_takes_them() {
    let single = |options: &mut CudaOptions| options.batch_copies = false;
    let refusing = Options { batches: false, ..usual() };
    // In any order, one by one because the option says so, and because the driver does not support batches: asked once.
    for (driver, change, wanted) in [
        (usual(), None, [0, 0, 0, 2]),
        (Options { seed: Some(3), ..usual() }, None, [0, 0, 0, 2]),
        (usual(), Some(single), [0, 300, 0, 0]),
        (refusing, None, [0, 300, 0, 1]),
    ] {
        let refuses = !driver.batches;
        let change = |options: &mut CudaOptions| change.into_iter().for_each(|change| change(options));
        let Some(rig) = Rig::with(driver, "counts calls", change) else { return };
        let apart = Apart::new(&rig);
        assert_eq!(rig.calls(&apart.planes, &apart.pages), wanted);
        apart.compare(&rig);
        let again = if refuses { [0, 300, 0, 0] } else { wanted };
        assert_eq!(rig.calls(&apart.planes, &apart.pages), again);
        // As many as a batch takes, one more, and one alone.
        let batches = wanted[3] > 1;
        for (count, wanted) in
            [(256, [0, 0, 0, 1]), (257, [0, 1, 0, 1]), (2, [0, 0, 0, 1]), (1, [0, 1, 0, 0])]
        {
            let calls = rig.calls(&apart.planes, &apart.pages[..count]);
            assert!(!batches || calls == wanted, "{count}: {calls:?}");
        }
    }
}

/// A driver that is older than the call.
#[test]
fn copies_go_one_by_one_where_the_driver_has_no_batches() {
    let Some(driver) = own(usual(), "lacks a symbol") else { return };
    // The first symbol without which a device can be opened is that of the call.
    let lacking = |n| {
        let faults: Arc<dyn Faults> = Arc::new(Inject::nth(n, 2));
        CudaDevice::new(CudaOptions { faults, copy_engine_bytes: ENGINE, ..on(driver.library()) }).ok()
    };
    let device = (0..).find_map(lacking).unwrap();
    let rig = Rig { stream: device.stream().unwrap(), event: device.event().unwrap(), device, driver };
    let apart = Apart::new(&rig);
    assert_eq!(rig.calls(&apart.planes, &apart.pages), [0, 300, 0, 0]);
    apart.compare(&rig);
}

/// The first batch was enqueued, the second is refused: an error, and the pages that were copied are right ones.
#[test]
fn a_batch_that_is_refused_is_an_error() {
    let Some(rig) = Rig::new("fails a call") else { return };
    let apart = Apart::new(&rig);
    let copy = || {
        let copy = CopyPages { planes: &apart.planes, pages: &apart.pages };
        rig.device.enqueue_pages(rig.stream, PageOp::Copy(copy))
    };
    let mut refused = 0;
    for n in 0.. {
        rig.driver.fail_call(n, 1);
        let outcome = copy();
        let Some(call) = rig.driver.failed_call() else { break };
        if call == "cuMemcpyBatchAsync" {
            let error = outcome.unwrap_err();
            assert_eq!((error.kind(), error.operation()), (Kind::DeviceFailed, "copy pages"));
            assert_eq!(error.place(), "cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE");
            refused += 1;
        }
    }
    rig.driver.fail_call(1 << 40, 1);
    assert_eq!(refused, 2);
    copy().unwrap();
    rig.wait();
    apart.compare(&rig);
}

/// The begin of a step of one row with one query row.
struct Step {
    map: Arc<Map>,
    pinned: Slice,
    own: Slice,
}

impl Step {
    fn new(rig: &Rig) -> Step {
        let map = pinned(4096);
        let own = rig.device.allocate(1024).unwrap();
        rig.device.write(own, &[0; 1024]).unwrap();
        let step = Step { pinned: rig.device.register(&map).unwrap(), own, map };
        let entry =
            Entry { lane: 1, length: FROM_DEVICE, accepted: 0, query_rows: 1, changed: Default::default() };
        let mut descriptor = vec![0; words(1, 1)];
        encode(7, 1, [entry].into_iter(), &mut descriptor);
        step.map.copy_in_words(0, &descriptor).unwrap();
        rig.device.write(step.table(), &3_u32.to_le_bytes()).unwrap();
        step
    }

    fn table(&self) -> Slice {
        self.own.part(0, 4).unwrap()
    }

    fn enqueue(&self, rig: &Rig) -> forebay::Result<()> {
        let own = |at, bytes| self.own.part(at, bytes).unwrap();
        let pinned = |at, bytes| self.pinned.part(at, bytes).unwrap();
        let tables = [PageTables {
            lanes: pinned(512, 8),
            table: self.table(),
            slots: own(64, 8),
            page_tokens: 16,
            pages: 4,
        }];
        let begin = BeginPages {
            descriptor: pinned(0, 4 * words(1, 1) as u64),
            lanes: own(128, 16),
            accepted: None,
            lengths: own(192, 4),
            starts: own(256, 8),
            positions: own(320, 8),
            wide: true,
            groups: &tables,
            report: pinned(1024, 4 * Report::words(0, 1) as u64),
        };
        rig.device.enqueue_pages(rig.stream, PageOp::Begin(begin))
    }

    /// The slot, and the report's number and cause.
    fn found(&self, rig: &Rig) -> (i64, [u32; 3]) {
        let (mut slot, mut report) = ([0; 8], [0; 3]);
        rig.device.read(self.own.part(64, 8).unwrap(), &mut slot).unwrap();
        self.map.copy_out_words(1024, &mut report).unwrap();
        (i64::from_le_bytes(slot), report)
    }
}

#[test]
fn a_begin_is_one_kernel_also_in_a_graph_and_a_copy_is_refused_there() {
    let Some(rig) = Rig::new("counts operations") else { return };
    let (step, map) = (Step::new(&rig), pinned(1 << 16));
    let (host, own) = (rig.device.register(&map).unwrap(), rig.device.allocate(1 << 16).unwrap());
    let before = rig.driver.operations();
    rig.device.capture(rig.stream).unwrap();
    step.enqueue(&rig).unwrap();
    for bytes in [64, 2 * ENGINE] {
        let planes = [(plane(host, 0, bytes, bytes), plane(own, 0, bytes, bytes))];
        let copy = PageOp::Copy(CopyPages { planes: &planes, pages: &[(0, 0)] });
        let error = rig.device.enqueue_pages(rig.stream, copy).unwrap_err();
        assert_eq!((error.kind(), error.operation()), (Kind::InvalidState, "copy pages"));
        assert_eq!(error.place(), "the stream is being captured");
    }
    let graph = rig.device.captured(rig.stream).unwrap();
    assert_eq!((rig.driver.operations() - before, step.found(&rig).1), (0, [0; 3]));
    let before = rig.driver.operations();
    rig.device.launch(graph, rig.stream).unwrap();
    rig.wait();
    assert_eq!((rig.driver.operations() - before, step.found(&rig)), (1, (3 * 16, [7, 0, 0])));
    rig.device.release(graph).unwrap();
}

/// A call that the driver refuses is an error, and nothing is enqueued; on a device that has failed it does nothing.
#[test]
fn operations_on_pages_that_the_driver_refuses_are_errors_and_enqueue_nothing() {
    let Some(rig) = Rig::new("fails a call") else { return };
    let (step, map) = (Step::new(&rig), pinned(1 << 16));
    let (host, own) = (rig.device.register(&map).unwrap(), rig.device.allocate(1 << 16).unwrap());
    let copies = |stride: u64, bytes| {
        let planes = [(plane(host, 0, stride, bytes), plane(own, 0, bytes, bytes))];
        rig.device
            .enqueue_pages(rig.stream, PageOp::Copy(CopyPages { planes: &planes, pages: &[(0, 0), (1, 1)] }))
    };
    type Enqueue<'a> = &'a dyn Fn() -> forebay::Result<()>;
    let scattered = || {
        let planes = [(plane(host, 0, ENGINE, ENGINE), plane(own, 0, ENGINE, ENGINE))];
        rig.device
            .enqueue_pages(rig.stream, PageOp::Copy(CopyPages { planes: &planes, pages: &[(0, 1), (2, 5)] }))
    };
    let operations: [(&str, u64, Enqueue<'_>); 5] = [
        ("cuLaunchKernelEx", 1, &|| step.enqueue(&rig)),
        ("cuLaunchKernelEx", 1, &|| copies(128, 64)),
        ("cuMemcpyAsync", 1, &|| copies(ENGINE, ENGINE)),
        ("cuMemcpy2DAsync_v2", 1, &|| copies(2 * ENGINE, ENGINE)),
        ("cuMemcpyBatchAsync", 2, &scattered),
    ];
    for (wanted, each, enqueue) in operations {
        let (before, mut refused) = (rig.driver.operations(), 0);
        for n in 0.. {
            rig.driver.fail_call(n, 1);
            let outcome = enqueue();
            let Some(call) = rig.driver.failed_call() else { break };
            refused += u32::from(call == wanted);
            assert_eq!(outcome.is_err(), call != "cuCtxPopCurrent_v2", "{call}");
        }
        rig.driver.fail_call(1 << 40, 1);
        assert_eq!(refused, 1, "{wanted}");
        rig.wait();
        // Those whose refusal came behind it, or not at all.
        let ran = rig.driver.operations() - before;
        assert!(ran <= 3 * each, "{wanted}: {ran}");
    }
    rig.driver.fail_call(0, 700);
    step.enqueue(&rig).unwrap();
    rig.driver.fail_call(1 << 40, 1);
    assert_eq!(rig.device.query(rig.event).unwrap_err().kind(), Kind::DeviceFailed);
    assert_eq!((step.enqueue(&rig), copies(128, 64)), (Ok(()), Ok(())));
}
