//! Pages of a dense cache on the CUDA device: which driver calls copy them, and what captures and refusals do.
//! `tests/pages.rs` compares the bytes.

use std::sync::Arc;

use crate::rig::{on, own, pinned, usual};
use forebay::Kind;
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::descriptor::Report;
use forebay::device::pages::descriptor::{Entry, FROM_DEVICE, encode, words};
use forebay::device::{BeginPages, CopyPages, Device, Event, PageOp, PageTables, Plane, Slice, Stream};
use forebay::os::Map;
use forebay_standin::Standin;

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
        let driver = own(usual(), does)?;
        let options = CudaOptions {
            copy_engine_bytes: ENGINE,
            registration_chunk: 1 << 20,
            gather_blocks: 3,
            ..on(driver.library())
        };
        let device = CudaDevice::new(options).unwrap();
        Some(Rig { stream: device.stream().unwrap(), event: device.event().unwrap(), device, driver })
    }

    fn wait(&self) {
        self.device.record(self.event, self.stream).unwrap();
        self.device.synchronize(self.event).unwrap();
    }

    /// Launches, copies and copies in two dimensions that some pages take.
    fn calls(&self, planes: &[(Plane, Plane)], pages: &[(u32, u32)]) -> [u64; 3] {
        let calls = || {
            [c"cuLaunchKernelEx", c"cuMemcpyAsync", c"cuMemcpy2DAsync_v2"]
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
    assert_eq!(rig.calls(&planes, &pages), [6, 0, 0]);
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
    assert_eq!(rig.calls(&two, &pages[..9]), [2, 0, 0]);
    let halves = [0, 32].map(|at| (plane(host, at, 9600, 32), plane(own, at, 96, 32)));
    assert_eq!(rig.calls(&halves, &pages[..9]), [1, 0, 0]);
    assert_eq!(rig.calls(&planes, &[]), [0; 3]);
    assert_eq!(rig.calls(&[], &pages), [0; 3]);
    let none = (plane(host, 0, 64, 0), plane(own, 0, 64, 0));
    assert_eq!(rig.calls(&[none], &pages), [0; 3]);
}

#[test]
fn long_pieces_and_runs_are_copied_by_engines() {
    let Some(rig) = Rig::new("counts calls") else { return };
    let map = pinned(4 << 20);
    let (host, own) = (rig.device.register(&map).unwrap(), rig.device.allocate(4 << 20).unwrap());
    let run = |from: u32, to: u32, count: u32| (0..count).map(move |page| (from + page, to + page));
    let scattered: Vec<(u32, u32)> = run(0, 9, 1).chain(run(5, 3, 1)).chain(run(2, 30, 3)).collect();
    // Pages that touch each other on both sides: a copy for each run.
    let touching = [(plane(host, 0, 4096, 4096), plane(own, 0, 4096, 4096))];
    assert_eq!(rig.calls(&touching, &scattered), [0, 3, 0]);
    // Short pages whose runs are long.
    let short = [(plane(host, 0, 2048, 2048), plane(own, 0, 2048, 2048))];
    assert_eq!(rig.calls(&short, &scattered), [1, 1, 0]);
    // Apart on one side: two dimensions, where there is more than one page.
    let apart = [(plane(host, 0, 8192, 4096), plane(own, 0, 4096, 4096))];
    assert_eq!(rig.calls(&apart, &scattered), [0, 2, 1]);
    // The end of a registration, which no driver's copy crosses, is at page 128.
    assert_eq!(rig.calls(&apart, &run(126, 0, 4).collect::<Vec<_>>()), [0, 4, 0]);
    assert_eq!(rig.calls(&touching, &run(250, 0, 10).collect::<Vec<_>>()), [0, 2, 0]);
    let ends = [(plane(own, 0, 4096, 4096), plane(host, 0, 8192, 4096))];
    assert_eq!(rig.calls(&ends, &run(0, 124, 4).collect::<Vec<_>>()), [0, 0, 1]);
    // The driver's own copy inside host memory would block.
    let inside = [(plane(host, 0, 4096, 4096), plane(host, 2 << 20, 4096, 4096))];
    let before = rig.driver.synchronizations();
    assert_eq!(rig.calls(&inside, &scattered), [3, 0, 0]);
    assert_eq!(rig.driver.synchronizations(), before + 1, "the test's own");
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
    let operations: [(&str, Enqueue<'_>); 4] = [
        ("cuLaunchKernelEx", &|| step.enqueue(&rig)),
        ("cuLaunchKernelEx", &|| copies(128, 64)),
        ("cuMemcpyAsync", &|| copies(ENGINE, ENGINE)),
        ("cuMemcpy2DAsync_v2", &|| copies(2 * ENGINE, ENGINE)),
    ];
    for (wanted, enqueue) in operations {
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
        assert!(rig.driver.operations() - before <= 3, "{wanted}");
    }
    rig.driver.fail_call(0, 700);
    step.enqueue(&rig).unwrap();
    rig.driver.fail_call(1 << 40, 1);
    assert_eq!(rig.device.query(rig.event).unwrap_err().kind(), Kind::DeviceFailed);
    assert_eq!((step.enqueue(&rig), copies(128, 64)), (Ok(()), Ok(())));
}
