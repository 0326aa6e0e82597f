//! The times of one layer's spans on the virtual clock, in each order.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay::device::clock::{ClockDevice, ClockOptions, Demand, Label, Span};
use forebay::device::{Device, PoolLayout, Pools, SplitIndices, Stream};
use forebay::overlap::{
    Attended, Engine, EngineCall, Overlap, OverlapStreams, Run, Schedule, Work, enqueue_step,
};
use forebay::{Geometry, MicroBatch, Result, Shape};

const BATCH: u32 = 8;
const K: u32 = 64;
pub const LAYERS: u32 = 2;

/// An engine whose work is only time on the clock: 100 us for everything except the projections and the rest.
struct Timed<'a>(&'a ClockDevice);

impl Engine for Timed<'_> {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        let (name, ns) = match call.work {
            Work::Project => ("I0", 1e4),
            Work::Index if call.count == BATCH => ("I", 1e5),
            Work::Index if call.first == 0 => ("I1", 5e4),
            Work::Index => ("I2", 5e4),
            Work::Prepare => ("P", 1e5),
            Work::Attend(Attended::All) => ("A", 1e5),
            Work::Attend(Attended::Resident) => ("A0", 1e5),
            Work::Attend(Attended::Fetched { wave: 0 }) => ("A1", 1e5),
            Work::Attend(Attended::Fetched { .. }) => ("A1b", 1e5),
            Work::Merge => ("M", 1e4),
            Work::Rest => ("rest", 1e4),
        };
        let label = Label { name, layer: Some(call.layer), micro_batch: Some(call.micro_batch) };
        self.0.compute(stream, label, Demand { ns, sm: 0.1 })
    }
}

/// Start and end of all works of one layer by name; R, G and S by half or wave: "resolve 0", "gather 1".
pub type Times = BTreeMap<String, (f64, f64)>;

/// Runs one step of [`LAYERS`] layers in two micro-batches. Returns each layer's times, layer by layer, micro-batch by
/// micro-batch.
pub fn times(order: Overlap, waves: u32, misses: f64, seed: Option<u64>) -> Vec<Times> {
    let clock = ClockDevice::new(ClockOptions { seed, record: true, ..ClockOptions::default() }).unwrap();
    let shape = Shape { layers: LAYERS, top_k: K, ..Shape::DEEPSEEK_V3_2 };
    let pools = attach(&clock, shape, waves);
    let words = |count: u32| clock.allocate(u64::from(4 * count)).unwrap();
    let run = |micro_batch| {
        let stream = || clock.stream().unwrap();
        let streams =
            OverlapStreams { compute: stream(), resolve: stream(), gather: stream(), scatter: stream() };
        let lists = (1 + waves) * BATCH;
        Run {
            geometry: Geometry::new(shape).unwrap().into(),
            moves: true,
            schedule: Schedule::new(&*clock).unwrap(),
            micro_batch,
            batch: BATCH,
            half: BATCH / 2,
            query_rows: 1,
            top_k: K,
            waves,
            streams,
            selection: words(BATCH * K),
            slots: words(BATCH * K),
            split_indices: Some(SplitIndices { lists: words(lists * K), counts: words(lists), batch: BATCH }),
        }
    };
    let runs = [run(MicroBatch(0)), run(MicroBatch(1))];
    (0..LAYERS).for_each(|layer| clock.set_misses(forebay::Layer(layer), misses).unwrap());
    enqueue_step(&*clock, pools, &runs, &[order; LAYERS as usize], 0, 0, &mut Timed(&clock)).unwrap();
    clock.run().unwrap();
    by_layer(&clock.spans())
}

fn attach(clock: &Arc<ClockDevice>, shape: Shape, waves: u32) -> Pools {
    let table = forebay::residency::TableShape {
        lanes: 2 * BATCH,
        tokens: 4096,
        query_rows: 1,
        scratch: K,
        waves,
        scratch_base: 1,
        landing_base: 2048,
        budget_base: 4096,
        budget_blocks: 64,
    };
    let slab = clock.allocate(1 << 30).unwrap();
    let plan = PoolLayout {
        geometry: Geometry::new(shape).unwrap().into(),
        tables: vec![table; LAYERS as usize],
        slabs: vec![slab; LAYERS as usize],
        rows: vec![slab; LAYERS as usize],
        lane_pages: 64,
        micro_batches: 2,
        batch: BATCH,
        expected: Default::default(),
    };
    clock.attach(plan).unwrap()
}

fn by_layer(spans: &[Span]) -> Vec<Times> {
    let mut layers: BTreeMap<(u32, u32), Times> = BTreeMap::new();
    let mut spans: Vec<&Span> = spans.iter().filter(|span| span.layer.is_some()).collect();
    spans.sort_by(|a, b| a.start_ns.total_cmp(&b.start_ns));
    for span in spans {
        let place = (span.layer.unwrap().0, span.micro_batch.unwrap().0);
        let times = layers.entry(place).or_default();
        let ours = ["resolve", "gather", "scatter"].contains(&span.name);
        let name = |number: usize| match ours {
            true => format!("{} {number}", span.name),
            false => span.name.to_owned(),
        };
        let number = (0..).find(|number| !times.contains_key(&name(*number)) || !ours).unwrap();
        assert!(times.insert(name(number), (span.start_ns, span.end_ns)).is_none(), "{place:?}: {span:?}");
    }
    layers.into_values().collect()
}

/// The edges of an order, as in the section "Edges of one layer" of the design page. The first has ended when the
/// second starts.
pub fn edges(order: Overlap, waves: u32) -> Vec<(&'static str, &'static str)> {
    let mut edges = match order {
        Overlap::Ahead => panic!("each of these layers selects for itself"),
        Overlap::None => vec![("I0", "I"), ("I", "resolve 0"), ("resolve 0", "gather 0"), ("gather 0", "P")],
        Overlap::Da => vec![
            ("I0", "I"),
            ("I", "resolve 0"),
            ("resolve 0", "gather 0"),
            ("P", "A0"),
            ("resolve 0", "A0"),
            ("A0", "A1"),
            ("gather 0", "A1"),
        ],
        Overlap::Dba => vec![
            ("I0", "I1"),
            ("I1", "I2"),
            ("I1", "resolve 0"),
            ("I2", "resolve 1"),
            ("resolve 0", "gather 0"),
            ("resolve 1", "gather 1"),
            ("gather 0", "gather 1"),
            ("P", "A0"),
            ("resolve 0", "A0"),
            ("resolve 1", "A0"),
            ("A0", "A1"),
            ("gather 0", "A1"),
            ("gather 1", "A1"),
        ],
    };
    match (order, waves) {
        (Overlap::None, 1) => edges.extend([("P", "A"), ("A", "rest")]),
        (_, 1) => edges.push(("A1", "M")),
        // The second wave's rows take the slots of the first wave's rows.
        (Overlap::Dba, _) => edges.extend([("A1", "gather 2"), ("gather 2", "A1b"), ("A1b", "M")]),
        _ => edges.extend([("A1", "gather 1"), ("gather 1", "A1b"), ("A1b", "M")]),
    }
    edges.push(("P", "scatter 0"));
    edges
}
