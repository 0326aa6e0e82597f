//! The table of predictions for forebay's own kernels: the expected value of each figure on a GPU, term by term,
//! before and after the kernels were optimised for GPUs. `docs/gpu-notes.md` contains it, and a test compares both.
//!
//! Each figure is a sum of the terms of [`clock::KernelCosts`](crate::device::clock::KernelCosts), from the least to
//! the greatest value that they allow. A measurement outside of a range refutes a named count or price.

use crate::device::clock::{BLOCK_BYTES, Between, Cost, Design, KernelCosts, Resolve, fetched, sum};

/// Bytes of a row of DeepSeek-V3.2, and its stride on the host.
const ROW: u32 = 656;
const STRIDE: u32 = 704;
/// The stride at which each row begins with a line of the GPU.
pub const ALIGNED: u32 = 768;
const LAYERS: f64 = 61.0;

/// A figure with both designs.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What is measured.
    pub name: String,
    /// The unit.
    pub unit: &'static str,
    /// The estimate before the changes.
    pub before: Estimate,
    /// The present estimate.
    pub now: Estimate,
}

/// A range, and its terms.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// The range, in the figure's unit.
    pub value: Between,
    /// The terms of a time; empty if the figure is not a sum of times.
    pub costs: Vec<Cost>,
    /// The arithmetic in words, if it is not a sum.
    pub words: String,
}

impl Estimate {
    fn time(costs: Vec<Cost>) -> Estimate {
        Estimate { value: sum(&costs), costs, words: String::new() }
    }

    fn said(value: Between, words: impl Into<String>) -> Estimate {
        Estimate { value, costs: Vec::new(), words: words.into() }
    }

    /// The terms in words.
    pub fn by(&self) -> String {
        if self.costs.is_empty() {
            return self.words.clone();
        }
        let term = |cost: &Cost| match cost.count == 1.0 {
            true => format!("{} {}", cost.name, range(cost.us)),
            false => format!("{} {} x {}", cost.name, number(cost.count), range(cost.us)),
        };
        self.costs.iter().map(term).collect::<Vec<_>>().join(", ")
    }
}

/// A number with three significant digits.
fn number(value: f64) -> String {
    let digits = match value {
        _ if value >= 100.0 => 0,
        _ if value >= 10.0 => 1,
        _ if value >= 1.0 => 2,
        _ => 4,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A range as text.
pub fn range(of: Between) -> String {
    match (number(of.low), number(of.high)) {
        (low, high) if low == high => low,
        (low, high) => format!("{low} to {high}"),
    }
}

/// A gather after another operation, with a launch in between.
fn behind(name: &'static str, first: Between, launch: Option<Between>, gather: Vec<Cost>) -> Vec<Cost> {
    let one = |name, us| Cost { name, count: 1.0, us };
    let launch = launch.map(|us| one("launch", us));
    std::iter::once(one(name, first)).chain(launch).chain(gather).collect()
}

/// The range of GB/s for `bytes` in a range of microseconds.
fn gb_s(bytes: f64, us: Between) -> Between {
    Between { low: bytes / us.high / 1e3, high: bytes / us.low / 1e3 }
}

/// All figures.
pub fn table(costs: &KernelCosts) -> Vec<Figure> {
    let both = |name: &str, unit, of: &dyn Fn(&Design) -> Estimate| Figure {
        name: name.to_owned(),
        unit,
        before: of(&Design::BEFORE),
        now: of(&Design::NOW),
    };
    let mut figures = Vec::new();
    figures.extend(loads(&both));
    figures.extend(rows(costs, &both));
    figures.extend(resolves(costs, &both));
    figures.extend(steps(costs, &both));
    figures
}

type Both<'a> = dyn Fn(&str, &'static str, &dyn Fn(&Design) -> Estimate) -> Figure + 'a;

/// Loads before the first useful one.
fn loads(both: &Both<'_>) -> Vec<Figure> {
    let [resolve, gather, scatter] = [
        "resolve: the first look-up of a selection",
        "gather: the first load of a row",
        "scatter: the first load of a row",
    ];
    let at = |index: usize| {
        move |design: &Design| {
            let loads = design.heads.get(index).copied().unwrap_or(0);
            Estimate::said(Between::just(loads.into()), "counted from the source")
        }
    };
    let unit = "dependent loads";
    vec![both(resolve, unit, &at(0)), both(gather, unit, &at(1)), both(scatter, unit, &at(2))]
}

/// Rows over the link.
fn rows(costs: &KernelCosts, both: &Both<'_>) -> Vec<Figure> {
    let mut figures = Vec::new();
    for stride in [ROW, STRIDE, ALIGNED] {
        figures.push(both(&format!("requests of a row of 656 B, stride {stride}"), "requests", &|design| {
            let by = design.requests(ROW, stride);
            let by_bytes = if design.by_lines { 128 } else { 64 };
            let words = format!("lines of 128 B by warps, pieces numbered by {by_bytes} B");
            Estimate::said(Between::just(by), words)
        }));
    }
    for stride in [STRIDE, ALIGNED] {
        figures.push(both(
            &format!("gather, 4,096 rows of 656 B, stride {stride}"),
            "GB/s of rows",
            &|design| {
                let rows = 4_096.0;
                let time = costs.gather(design, rows, ROW, stride);
                let requested = design.requests(ROW, stride) * 128.0;
                let words = format!(
                    "656 of {} B if requests are the limit, of {} B if bytes; {}",
                    number(requested),
                    number(fetched(ROW, stride)),
                    Estimate::time(time.clone()).by()
                );
                Estimate::said(gb_s(rows * f64::from(ROW), sum(&time)), words)
            },
        ));
    }
    figures.push(both("scatter, 4,096 rows of 656 B, stride 704", "GB/s of rows", &|_| {
        Estimate::said(
            costs.stored(ROW, STRIDE),
            "656 of whole lines to 656 of sectors; without waiting for a round trip",
        )
    }));
    let flight = |us: f64, rate: f64| rate * us * 1e3;
    figures.push(both("blocks of a gather that keep the link busy", "blocks", &|_| {
        let Between { low, high } = costs.round_trip_us;
        let bytes =
            Between { low: flight(low, costs.read_gb_s.low), high: flight(high, costs.read_gb_s.high) };
        let blocks =
            Between { low: (bytes.low / BLOCK_BYTES).ceil(), high: (bytes.high / BLOCK_BYTES).ceil() };
        Estimate::said(
            blocks,
            format!("{} KB in flight, {} a block", range(bytes.times(1e-3)), number(BLOCK_BYTES / 1e3)),
        )
    }));
    figures.push(both("wait of another host read for a gather", "us", &|design| {
        let bytes = f64::from(design.gather_blocks) * BLOCK_BYTES;
        let us = Between { low: bytes / costs.read_gb_s.high / 1e3, high: bytes / costs.read_gb_s.low / 1e3 };
        Estimate::said(
            us,
            format!("{} blocks with {} KB each", design.gather_blocks, number(BLOCK_BYTES / 1e3)),
        )
    }));
    figures
}

fn of_lane(query_rows: u32, budget: u32, misses: u32) -> Resolve {
    Resolve { query_rows, top_k: 2048, budget, misses }
}

/// The rule, alone and with a gather after it.
fn resolves(costs: &KernelCosts, both: &Both<'_>) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (query_rows, misses) in [(1, 274), (2, 548)] {
        let name = format!("resolve, 160 lanes, q {query_rows}, budget 6,881, 13.4% missed");
        figures.push(both(&name, "us", &|design| {
            Estimate::time(costs.resolve(design, &of_lane(query_rows, 6_881, misses)))
        }));
    }
    let one = |design: &Design| sum(&costs.resolve(design, &of_lane(1, 6_881, 410)));
    for (name, launch) in
        [("resolve + gather, batch 1, 410 misses", Some(costs.launch_us)), ("the same, launched early", None)]
    {
        figures.push(both(name, "us", &|design| {
            Estimate::time(behind("resolve", one(design), launch, costs.gather(design, 410.0, ROW, STRIDE)))
        }));
    }
    figures.push(both("resolve + gather, batch 100, 41,000 misses", "us", &|design| {
        Estimate::time(behind(
            "resolve",
            one(design),
            Some(costs.launch_us),
            costs.gather(design, 41_000.0, ROW, STRIDE),
        ))
    }));
    figures
}

/// Whole layers and steps.
fn steps(costs: &KernelCosts, both: &Both<'_>) -> Vec<Figure> {
    let mut figures = Vec::new();
    figures.push(both("launches of R, G and S, 61 layers, captured", "us", &|_| {
        Estimate::time(vec![Cost { name: "nodes", count: 3.0 * LAYERS, us: costs.node_us }])
    }));
    figures.push(both("loads before R, G and S, 61 layers", "us", &|design| {
        let loads: u32 = design.heads.iter().sum();
        Estimate::time(vec![Cost { name: "loads", count: f64::from(loads) * LAYERS, us: costs.load_us }])
    }));
    figures.push(both("a layer's gather, batch 160, 190 misses", "us", &|design| {
        Estimate::time(costs.gather(design, 160.0 * 190.0, ROW, STRIDE))
    }));
    // A step with misses has its own terms, and lacks those of a step without.
    let missed = |design: &Design| {
        let mut terms = costs.resolve(design, &of_lane(1, 4_096, 137));
        for hit in costs.resolve(design, &of_lane(1, 4_096, 0)) {
            match terms.iter_mut().find(|term| term.name == hit.name) {
                Some(term) => term.count -= hit.count,
                None => terms.push(Cost { count: -hit.count, ..hit }),
            }
        }
        terms.retain(|term| term.count != 0.0);
        terms
    };
    figures.push(both(
        "batch 1, budget 4,096, 137 misses: a layer compared with one without, order none",
        "us",
        &|design| {
            let gather = costs.gather(design, 137.0, ROW, STRIDE);
            Estimate::time(behind("victims of misses", sum(&missed(design)), Some(costs.node_us), gather))
        },
    ));
    figures.push(both("the same in DA, if all of the gather is hidden", "us", &|design| {
        Estimate::time(missed(design))
    }));
    figures
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::clock::{ClockDevice, ClockOptions, Span};
    use crate::device::{Device, PoolLayout, PoolOp, ResolveOutput, Slice, StepRange};
    use crate::geometry::{Geometry, Shape};
    use crate::ids::{Layer, MicroBatch};
    use crate::residency::{QueryRange, TableShape};

    fn figure(name: &str) -> Figure {
        let found = table(&KernelCosts::default()).into_iter().find(|figure| figure.name.starts_with(name));
        found.unwrap_or_else(|| unreachable!("{name}"))
    }

    fn near(found: Between, low: f64, high: f64) {
        assert!((found.low - low).abs() < 1e-6 && (found.high - high).abs() < 1e-6, "{found:?} {low} {high}");
    }

    /// Computes every figure again, by plain arithmetic on numbers.
    #[test]
    fn each_figure_agrees_with_plain_arithmetic() {
        let loads = |count: f64| (count * 0.3, count * 0.6);
        let of = |name| figure(name).now.value;
        near(of("resolve: the first"), 3.0, 3.0);
        near(of("gather: the first"), 2.0, 2.0);
        near(of("scatter: the first"), 3.0, 3.0);
        near(of("requests of a row of 656 B, stride 704"), 6.0, 6.0);
        near(figure("requests of a row of 656 B, stride 704").before.value, 6.625, 6.625);
        let gather = |rows: f64, loads: f64, requests: f64| {
            (
                loads * 0.3 + 0.08 + 1.5 + rows * 704.0 / 35_200.0,
                loads * 0.6 + 0.12 + 2.0 + rows * requests * 128.0 / 35_200.0,
            )
        };
        let bytes = 4_096.0 * 656.0 / 1e3;
        let (least, most) = gather(4_096.0, 2.0, 6.0);
        near(of("gather, 4,096 rows of 656 B, stride 704"), bytes / most, bytes / least);
        near(of("gather, 4,096 rows of 656 B, stride 768"), bytes / most, bytes / least);
        let (least, most) = gather(4_096.0, 5.0, 6.625);
        near(figure("gather, 4,096 rows of 656 B, stride 704").before.value, bytes / most, bytes / least);
        near(of("scatter, 4,096"), 52.8 * 656.0 / 768.0, 52.8 * 656.0 / 704.0);
        // 52.8 and 70.4 KB by blocks of 512 threads with four pieces of 16 bytes.
        near(of("blocks of a gather"), 2.0, 3.0);
        near(of("wait of another"), 4.0 * 32.768 / 35.2, 4.0 * 32.768 / 35.2);
        near(figure("wait of another").before.value, 16.0 * 32.768 / 35.2, 16.0 * 32.768 / 35.2);
        let (low, high) = loads(17.0);
        let resolve = (low + 65.0 * 0.02, high + 65.0 * 0.03);
        near(of("resolve, 160 lanes, q 1"), resolve.0, resolve.1);
        // Twice the selections: two more loads to look up, two more victims, two more slots to return.
        let (low, high) = loads(23.0);
        near(of("resolve, 160 lanes, q 2"), low + 65.0 * 0.02, high + 65.0 * 0.03);
        let (least, most) = gather(410.0, 2.0, 6.0);
        near(of("resolve + gather, batch 1"), resolve.0 + 2.0 + least, resolve.1 + 2.0 + most);
        near(of("the same, launched early"), resolve.0 + least, resolve.1 + most);
        let (least, most) = gather(41_000.0, 2.0, 6.0);
        near(of("resolve + gather, batch 100"), resolve.0 + 2.0 + least, resolve.1 + 2.0 + most);
        near(of("launches of R"), 183.0 * 0.8, 183.0 * 1.2);
        near(of("loads before R"), 8.0 * 61.0 * 0.3, 8.0 * 61.0 * 0.6);
        near(figure("loads before R").before.value, 15.0 * 61.0 * 0.3, 15.0 * 61.0 * 0.6);
        let (least, most) = gather(30_400.0, 2.0, 6.0);
        near(of("a layer's gather"), least, most);
        // 128 words of stamps in two rounds of four, 8 turns of 512 slots in two as well, two loads per victim. A step
        // without misses has one load and four turns of 512 positions instead.
        let choice = (5.0 * 0.3 + 20.0 * 0.02 + 9.0 * 0.02, 5.0 * 0.6 + 20.0 * 0.03 + 9.0 * 0.03);
        near(of("the same in DA"), choice.0, choice.1);
        let (least, most) = gather(137.0, 2.0, 6.0);
        near(of("batch 1, budget 4,096"), choice.0 + 0.8 + least, choice.1 + 1.2 + most);
    }

    /// A step's largest batch, and query rows of each.
    const BATCH: u32 = 160;
    const QUERY_ROWS: u32 = 32;

    fn plan(device: &ClockDevice) -> crate::error::Result<PoolLayout> {
        let shape = Shape { layers: 1, draft_layers: 0, ..Shape::DEEPSEEK_V3_2 };
        let tables = TableShape {
            lanes: BATCH,
            tokens: 1024,
            query_rows: QUERY_ROWS,
            waves: 1,
            scratch: 0,
            scratch_base: 1,
            landing_base: 64,
            budget_base: 64 + BATCH * QUERY_ROWS,
            budget_blocks: 1,
        };
        Ok(PoolLayout {
            geometry: Geometry::new(shape)?.into(),
            tables: vec![tables],
            slabs: vec![device.allocate(1 << 40)?],
            rows: vec![device.allocate(1 << 40)?],
            lane_pages: 16,
            micro_batches: 1,
            batch: BATCH,
            expected: Default::default(),
        })
    }

    /// The clock device's times of R, G and S for so many batch and query rows, `misses` of them all missing.
    fn clocked(works: &str, batch: u32, query_rows: u32, misses: f64) -> crate::error::Result<Vec<Span>> {
        let device = ClockDevice::new(ClockOptions { record: true, ..ClockOptions::default() })?;
        let (stream, pools) = (device.stream()?, device.attach(plan(&device)?)?);
        device.set_misses(Layer(0), misses / f64::from(batch))?;
        let rows = QueryRange { first: 0, count: query_rows };
        let step_range =
            StepRange { micro_batch: MicroBatch(0), layer: Layer(0), first: 0, count: batch, rows };
        let words = u64::from(4 * batch * query_rows * 2048);
        let [selection, slots]: [Slice; 2] = [device.allocate(words)?, device.allocate(words)?];
        for work in works.chars() {
            let op = match work {
                'R' => PoolOp::Resolve {
                    range: step_range,
                    selection,
                    output: ResolveOutput { slots, split_indices: None },
                },
                'G' => PoolOp::Gather { range: step_range, wave: 0 },
                _ => PoolOp::Scatter(step_range),
            };
            device.enqueue(pools, stream, op)?;
        }
        device.run()?;
        Ok(device.spans())
    }

    #[test]
    fn the_clocks_default_prices_lie_in_the_tables_ranges() {
        let bytes = 4_096.0 * f64::from(ROW);
        for (name, works, batch, query_rows, misses) in [
            ("resolve, 160 lanes, q 1", "R", 160, 1, 0.0),
            ("resolve, 160 lanes, q 2", "R", 160, 2, 0.0),
            ("gather, 4,096 rows of 656 B, stride 704", "G", 160, 1, 4_096.0),
            ("scatter, 4,096", "S", 128, 32, 0.0),
            ("resolve + gather, batch 1, 410", "RG", 1, 1, 410.0),
            ("resolve + gather, batch 100", "RG", 100, 1, 41_000.0),
            ("a layer's gather, batch 160, 190", "G", 160, 1, 30_400.0),
        ] {
            let spans = clocked(works, batch, query_rows, misses).unwrap_or_else(|e| unreachable!("{e}"));
            let (Some(first), Some(last)) = (spans.first(), spans.last()) else { unreachable!("{name}") };
            let ns = last.end_ns - first.start_ns;
            let Figure { unit, now, .. } = figure(name);
            let found = if unit == "us" { ns / 1e3 } else { bytes / ns };
            let Between { low, high } = now.value;
            assert!((low..=high).contains(&found), "{name}: {found} of {low} to {high} {unit}");
        }
        // Each gap before one of a step's 183 is a node.
        let spans = clocked("RRRR", 1, 1, 0.0).unwrap_or_else(|e| unreachable!("{e}"));
        let gaps = spans.array_windows().map(|[a, b]| (b.start_ns - a.end_ns) / 1e3);
        let Between { low, high } = figure("launches of R, G and S").now.value;
        gaps.for_each(|gap| assert!((low..=high).contains(&(183.0 * gap)), "{gap}"));
    }

    #[test]
    fn a_price_changes_only_the_figures_that_contain_it() {
        let mut costs = KernelCosts::default();
        let of = |costs: &KernelCosts, name: &str| {
            table(costs)
                .into_iter()
                .find(|figure| figure.name.starts_with(name))
                .map(|figure| figure.now.value)
        };
        costs.set("round_trip_us", Between::just(3.0)).unwrap_or_else(|error| unreachable!("{error}"));
        let before = KernelCosts::default();
        assert_ne!(of(&costs, "a layer's gather"), of(&before, "a layer's gather"));
        assert_eq!(of(&costs, "resolve, 160"), of(&before, "resolve, 160"));
    }

    #[test]
    fn numbers_have_three_significant_digits() {
        let texts = [183.4, 17.25, 6.625, 6.0, 0.02, 1.5].map(number);
        assert_eq!(texts, ["183", "17.2", "6.62", "6", "0.02", "1.5"]);
        assert_eq!(range(Between { low: 1.0, high: 2.5 }), "1 to 2.5");
    }
}
