//! Resources that a lane releases and another takes: pages, slot blocks, and the place where the host stages a lane's
//! arguments. Nothing else orders the two lanes, so each reuse needs an edge, or the host must have seen the first use
//! end.

use forebay::check::watch::Watch;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{
    Device, Join, Mapped, Newest, PoolLayout, PoolOp, Pools, Slice, Stream, Truncate, Warm, WarmGather,
};
use forebay::os::{Map, NoFaults, Protection, Request};
use forebay::residency::TableShape;
use forebay::{Error, Geometry, Kind, Lane, Result, Shape};
use std::sync::Arc;

const TOKENS: u32 = 16;

/// The order between an operation that releases something and the one that takes it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Between {
    Nothing,
    Edge,
    Seen,
}

/// Pools of one layer with two lanes, and two streams.
struct Reuse {
    watch: Arc<Watch>,
    pools: Pools,
    rows: Slice,
    page_bytes: u64,
    first: Stream,
    second: Stream,
}

impl Reuse {
    /// Lane 0 has pages 0 and 1, and slot block 0.
    fn new() -> Reuse {
        let watch = Watch::new(HostDevice::new(HostOptions::default()));
        let shape = Shape {
            layers: 1,
            draft_layers: 0,
            runs: [64, 0],
            page_tokens: TOKENS,
            top_k: 8,
            ..Shape::DEEPSEEK_V3_2
        };
        let geometry = Geometry::new(shape).unwrap();
        let page_bytes = geometry.host_page_bytes();
        let request = Request {
            bytes: 4 * page_bytes,
            huge: false,
            populate: false,
            lock: false,
            node: None,
            shared: false,
        };
        let rows = watch.register(&Arc::new(Map::new(&request, &NoFaults).unwrap().0)).unwrap();
        let tables = TableShape {
            lanes: 2,
            tokens: 2 * TOKENS,
            query_rows: 1,
            scratch: 8,
            waves: 1,
            scratch_base: 1,
            landing_base: 64,
            budget_base: 128,
            budget_blocks: 2,
        };
        let slabs = vec![watch.allocate(1 << 20).unwrap()];
        let plan = PoolLayout {
            geometry: geometry.into(),
            tables: vec![tables],
            slabs,
            rows: vec![rows],
            lane_pages: 2,
            micro_batches: 1,
            batch: 1,
            expected: Default::default(),
        };
        let pools = watch.attach(plan).unwrap();
        let [first, second] = [(); 2].map(|()| watch.stream().unwrap());
        let reuse = Reuse { watch, pools, rows, page_bytes, first, second };
        reuse.join(0, first, &[0, 1], 0).unwrap();
        reuse
    }

    /// A lane joins with pages and one slot block, and its rows are loaded.
    fn join(&self, lane: u32, stream: Stream, pages: &[u32], block: u32) -> Result<()> {
        let (lane, blocks, length) = (Lane(lane), [vec![block]], TOKENS * pages.len() as u32);
        self.watch.enqueue(
            self.pools,
            stream,
            PoolOp::Join(Join { lane, length, pages, blocks: &blocks, budgets: &[TOKENS] }),
        )?;
        self.watch.enqueue(
            self.pools,
            stream,
            PoolOp::WarmGather(WarmGather { lane, first: 0, count: TOKENS.into() }),
        )
    }

    /// Truncates lane 0 to page 0.
    fn truncate(&self, stream: Stream) -> Result<()> {
        let truncate = Truncate { lane: Lane(0), settle: 0, length: TOKENS, pages: &[0] };
        self.watch.enqueue(self.pools, stream, PoolOp::Truncate(truncate))
    }

    /// Lists lane 0's newest rows.
    fn newest(&self, stream: Stream, positions: Slice) -> Result<()> {
        self.watch.enqueue(self.pools, stream, PoolOp::Newest(Newest { lane: Lane(0), positions }))
    }

    fn leave(&self) {
        self.watch.enqueue(self.pools, self.first, PoolOp::Leave(Lane(0))).unwrap();
    }

    fn between(&self, what: Between) {
        let event = self.watch.event().unwrap();
        self.watch.record(event, self.first).unwrap();
        match what {
            Between::Nothing => {}
            Between::Edge => self.watch.wait(self.second, event).unwrap(),
            Between::Seen => self.watch.synchronize(event).unwrap(),
        }
    }

    /// Writes to a page, on the second stream.
    fn overwrite(&self, page: u64) -> Result<()> {
        let to = self.rows.part(page * self.page_bytes, 64).unwrap();
        self.watch.copy(self.second, self.watch.allocate(64).unwrap(), to)
    }

    /// The refusal, which is the watch's first conflict.
    fn refused(&self, refused: Result<()>) -> Error {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidState);
        assert_eq!(self.watch.conflict(), Some(error.clone()));
        error
    }
}

/// `gives` passes, and `takes` after it passes exactly when one of `enough` is between them; otherwise the refusal
/// names `what`.
fn needs(enough: &[Between], gives: impl Fn(&Reuse), takes: impl Fn(&Reuse) -> Result<()>, what: &str) {
    for between in [Between::Nothing, Between::Edge, Between::Seen] {
        let reuse = Reuse::new();
        // The watch has seen all work before: only the order between these two is missing.
        reuse.between(Between::Seen);
        gives(&reuse);
        reuse.between(between);
        let took = takes(&reuse);
        if enough.contains(&between) {
            took.unwrap();
            assert_eq!(reuse.watch.conflict(), None);
        } else {
            let error = reuse.refused(took).to_string();
            assert!(error.contains(what) && error.contains("is not ordered"), "{between:?}: {error}");
        }
    }
}

const ORDERED: &[Between] = &[Between::Edge, Between::Seen];

#[test]
fn a_page_is_not_written_before_its_last_lane_has_left() {
    needs(ORDERED, Reuse::leave, |reuse| reuse.overwrite(1), "which leave (stream");
}

#[test]
fn a_page_is_not_written_before_the_truncation_that_frees_it_has_ended() {
    needs(
        ORDERED,
        |reuse| reuse.truncate(reuse.first).unwrap(),
        |reuse| reuse.overwrite(1),
        "which truncate",
    );
}

#[test]
fn slot_blocks_go_to_another_lane_only_after_the_last_one_has_left() {
    let joins = |block| move |reuse: &Reuse| reuse.join(1, reuse.second, &[2], block);
    needs(ORDERED, Reuse::leave, joins(0), "slot blocks of pools, layer 0 0, which leave");
    // Other blocks have no owner.
    needs(&[Between::Nothing, Between::Edge, Between::Seen], Reuse::leave, joins(1), "");
}

#[test]
fn a_lanes_newest_rows_are_listed_before_it_leaves_or_is_truncated() {
    let list = |reuse: &Reuse, stream| reuse.newest(stream, reuse.watch.allocate(32).unwrap());
    let before = |reuse: &Reuse| list(reuse, reuse.first).unwrap();
    let after = |reuse: &Reuse| list(reuse, reuse.second);
    needs(ORDERED, Reuse::leave, after, "tables of pools, lane 0 0, which leave");
    needs(ORDERED, |reuse| reuse.truncate(reuse.first).unwrap(), after, "which truncate");
    let truncate = |reuse: &Reuse| reuse.truncate(reuse.second);
    needs(ORDERED, before, truncate, "which newest");
    // Two lists of one lane only read it.
    needs(&[Between::Nothing, Between::Edge, Between::Seen], before, after, "");
}

#[test]
fn a_warm_up_reads_the_list_of_newest_rows_after_it_was_written() {
    let lane = Lane(1);
    let to = std::cell::Cell::new(None);
    let gives = |reuse: &Reuse| {
        to.set(Some(reuse.watch.allocate(32).unwrap()));
        reuse.newest(reuse.first, to.get().unwrap()).unwrap();
    };
    let takes = |reuse: &Reuse| {
        let warm = Warm { lane, group: None, whole: false, selections: to.get(), steps: 1 };
        reuse.watch.enqueue(reuse.pools, reuse.second, PoolOp::Warm(warm))
    };
    needs(ORDERED, gives, takes, "which newest");
}

#[test]
fn f4_nothing_is_staged_for_a_lane_before_the_device_has_read_what_was_staged_last() {
    let seen = &[Between::Seen];
    let truncate = |reuse: &Reuse| reuse.truncate(reuse.first).unwrap();
    // An edge does not hold the host, nor does the stream's own order.
    needs(
        seen,
        truncate,
        |reuse| reuse.truncate(reuse.first),
        "staged arguments of pools, lane 0 0, which truncate",
    );
    let join = |reuse: &Reuse| reuse.join(1, reuse.first, &[2], 1).unwrap();
    let leave_and_join = |reuse: &Reuse| {
        reuse.watch.enqueue(reuse.pools, reuse.first, PoolOp::Leave(Lane(1)))?;
        reuse.join(1, reuse.first, &[3], 1)
    };
    needs(seen, join, leave_and_join, "staged arguments of pools, lane 0 1, which join");
}

/// Two ranges over one backing, as buffers share memory that they do not need at the same time.
#[test]
fn ranges_over_one_backing_are_the_same_bytes() {
    let watch = Watch::new(HostDevice::new(HostOptions::default()));
    let size = watch.granularity();
    let [shared, own] = [2, 1].map(|pieces| watch.backing(pieces * size).unwrap());
    let piece = |backing, offset| Mapped { backing, offset, bytes: size };
    // One has the shared bytes before and after its own ones; the other has only the first of them.
    let long =
        watch.range(&[piece(shared, 0), piece(own, 0), piece(shared, size)], Protection::ReadWrite).unwrap();
    let short = watch.range(&[piece(shared, 0)], Protection::ReadWrite).unwrap();
    let [a, b] = [(); 2].map(|()| watch.stream().unwrap());
    let from = watch.allocate(3 * size).unwrap();
    let writes = |stream, to: Slice| watch.copy(stream, from.part(0, to.bytes()).unwrap(), to);
    writes(a, short.part(0, size / 2).unwrap()).unwrap();
    // Other bytes of the backing and of the range are not affected.
    writes(b, long.part(size / 2, 2 * size).unwrap()).unwrap();
    for to in [long, long.part(size / 2 - 1, 2).unwrap()] {
        let error = writes(b, to).unwrap_err().to_string();
        assert!(error.contains("bytes of backing") && error.contains("which copy"), "{error}");
    }
    let event = watch.event().unwrap();
    watch.record(event, a).unwrap();
    watch.wait(b, event).unwrap();
    writes(b, long).unwrap();
    // The engine's own declarations are placed in the same way.
    let reads = [forebay::check::watch::bytes(&short, false)];
    watch.engine(a, "reader", &reads).unwrap_err();
    watch.engine(b, "reader", &reads).unwrap();
}
