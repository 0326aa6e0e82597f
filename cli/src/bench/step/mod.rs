//! Benchmarks of a decode step through the facade, captured if the device has graphs, with a stand-in for the engine's
//! work: how much of the gather the orders none, DA and DBA expose.
//!
//! # What is measured
//! Steps of one cache, one after the other, in rounds that contain every kind of step:
//!
//! | step | content |
//! |---|---|
//! | engine alone | the engine's work with everything resident, and none of forebay's nodes |
//! | resident | the same work by the schedule, in the order none: R, G and S run and find nothing to fetch |
//! | none, DA, DBA | steps with the operating point's misses a sequence and layer |
//!
//! - **exposed**: such a step minus the resident one of the same round. It is the whole cost of misses: waits for
//!   rows, the slowdown of the engine's work while rows are fetched alongside it, and the extra cost of split
//!   attention.
//! - **forebay's nodes**: the resident step minus the engine alone, both with an engine that only selects: the cost of
//!   operations that find nothing to do. Between works of 100 ms it would vanish in their variation.
//! - **the work beside a gather**: the slowdown of the engine's work while rows are fetched. This
//!   interference does not depend on the order of a layer; exposed time contains part of it, but not separately.
//!
//! # What it cannot show
//! The stand-in multiplies matrices. It occupies the processors, but not the device's memory as attention does, so a
//! gather slows it down less, or more, than an engine. Its works are as long as a setup says, whichever kernels those
//! are. All layers have the same misses, so the best table by layer is the best of the three orders. If a host device
//! runs the steps, they are enqueued call by call on threads, because it has no graphs.
//!
//! # Where things are
//! [`point`]: operating points; [`selections`]: selections and the rule; [`engine`]: the engine; [`machine`]: a step,
//! timed and compared; [`interference`]: work beside a gather; [`predicted`]: the simulator; [`measured`]: what was
//! measured; [`figures`]: figures.

pub mod engine;
mod figures;
mod interference;
mod machine;
mod measured;
mod point;
mod predicted;
mod selections;

use std::sync::Arc;

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::rates::Rates;
use forebay::device::{Graph, Stream};
use forebay::measure::{Ceilings, Probe};
use forebay::overlap::Overlap;
use forebay::predict::setup::Setup;
use forebay::{Capture, Captured, Error, Kind, MicroBatch, Result};

use self::engine::{Lengths, Line, Works, calibrate, products};
use self::interference::{Beside, Layered, Turn};
use self::machine::{Machine, Took, Way, fills};
use self::measured::{Measured, Ordered, Selecting};
use self::point::Point;
use super::asked::Asked;
use super::result::{Figure, Spread};
use super::rows::rates;

/// The setup whose works the stand-in imitates.
const SETUP: &str = "ess";
/// Microseconds of the engine's work that run before a timed step; the host enqueues a step in less time.
const RUN_UP_US: f64 = 6000.0;
/// The same in rounds, before the time of a round is known.
const RUN_UP_ROUNDS: u32 = 64;
/// Works up to this many microseconds are checked to be proportional to their rounds.
const LONGEST_US: f64 = 2000.0;
/// Steps of work beside gathers, after one that measures the gather.
const BESIDE: u32 = 3;
/// On a GPU, a gather shorter than this many microseconds is too short to run work beside it.
const GATHER_LEAST_US: f64 = 100.0;
/// Gathers of smaller batches, in sequences, have no work beside them.
const BATCH_LEAST: u32 = 4;

/// The data that all points share.
struct Study<'a> {
    device: Arc<dyn Probe>,
    asked: &'a Asked,
    setup: Setup,
    gpu: bool,
    /// The link's rates in this run; none if the simulator cannot predict its points.
    rates: Option<Rates>,
}

/// Work on the compute stream, captured if possible.
struct Alone {
    device: Arc<dyn Probe>,
    graph: Option<Graph>,
}

impl Drop for Alone {
    fn drop(&mut self) {
        if let Some(graph) = self.graph {
            // This device made it, and it is released once.
            let _ = self.device.release(graph);
        }
    }
}

impl Alone {
    fn new(machine: &Machine, capture: bool, work: impl FnOnce(Stream) -> Result<()>) -> Result<Alone> {
        let (device, compute) = (Arc::clone(&machine.device), machine.layers.streams.compute);
        if !capture {
            return Ok(Alone { device, graph: None });
        }
        device.capture(compute)?;
        let enqueued = work(compute);
        // The capture ends even after an error.
        let graph = device.captured(compute);
        let alone = Alone { device: Arc::clone(&device), graph: graph.as_ref().ok().copied() };
        enqueued.and(graph)?;
        Ok(alone)
    }

    /// Device microseconds of the work, and host microseconds of its launch; `work` enqueues what was captured.
    fn run(&self, machine: &Machine, work: impl FnOnce(Stream) -> Result<()>) -> Result<(f64, f64)> {
        machine.timed(|compute| match self.graph {
            Some(graph) => self.device.launch(graph, compute),
            None => work(compute),
        })
    }
}

/// The figures of the group. The host is measured only if its streams have threads: an order can hide something only
/// if streams run concurrently.
///
/// # Errors
/// Errors of cache and device; [`Kind::Internal`] if an outcome differs from the rule's.
pub fn figures(device: &Arc<dyn Probe>, ceilings: &Ceilings, asked: &Asked) -> Result<Vec<Figure>> {
    let gpu = device.facts()?.gpu.is_some();
    let setup = Setup::named(SETUP).ok_or_else(|| Error::new(Kind::Internal, "bench step").at(SETUP))??;
    let threads = || HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
    let device: Arc<dyn Probe> = if gpu { Arc::clone(device) } else { threads() };
    let rates = if gpu && !asked.quick { Some(rates(&device, ceilings, false, &|| ())?) } else { None };
    let study = Study { device, asked, setup, gpu, rates };
    let groups = Point::groups(gpu, asked.quick);
    let figures = groups.into_iter().map(|points| study.group(&points));
    Ok(by_ceiling(figures.collect::<Result<Vec<_>>>()?.concat()))
}

/// All points' figures, sorted by kind so that each kind forms one table.
fn by_ceiling(mut figures: Vec<Figure>) -> Vec<Figure> {
    let all: Vec<&str> = figures.iter().map(|figure| figure.ceiling.0).collect();
    figures.sort_by_key(|figure| all.iter().position(|ceiling| *ceiling == figure.ceiling.0));
    figures
}

impl Study<'_> {
    /// Timed rounds, after one that is not timed.
    fn rounds(&self) -> u32 {
        self.asked.rounds.max(1)
    }

    /// The most steps that a cache of these points makes.
    fn steps(&self, points: &[Point]) -> u32 {
        // Every kind of step in each round and in the first one, checks, and works beside gathers.
        let each = (self.rounds() + 1) * (2 * Overlap::FIRST.len() as u32 + 2) + BESIDE + 2;
        let fill = points.first().map_or(0, |point| fills(point.budget, point.top_k));
        fill + each * points.len() as u32
    }

    /// Points that share a cache.
    fn group(&self, points: &[Point]) -> Result<Vec<Figure>> {
        let Some(first) = points.first() else { return Ok(Vec::new()) };
        let share = self.setup.misses()?.share(first.query_rows);
        let promised = self.steps(points) * first.query_rows;
        let mut machine = Machine::open(&self.device, first, promised, share, self.asked.pool.bytes)?;
        machine.persistent = self.asked.persistent;
        let longest = if self.asked.quick { LONGEST_US / 10.0 } else { LONGEST_US };
        let time = |machine: &Machine, rounds| {
            let work = |stream| products(&*self.device, stream, rounds, self.asked.persistent);
            machine.timed(work).map(|(us, _)| us)
        };
        // The host must be ahead here, too: a launch that the device waits for is not part of a work.
        machine.run_up.0 = if self.asked.quick { 0 } else { RUN_UP_ROUNDS };
        let line = calibrate(longest, |rounds| time(&machine, rounds))?;
        let rounds = line.rounds(longest).max(1);
        let longest = (0..self.rounds()).map(|_| time(&machine, rounds)).collect::<Result<Vec<f64>>>()?;
        let run_up_us = if self.asked.quick { RUN_UP_US / 10.0 } else { RUN_UP_US };
        machine.run_up = (line.rounds(run_up_us), run_up_us);
        machine.fill(&mut self.works(&machine, first, None)?)?;
        let answers = machine.answers()?;
        let mut figures = vec![self.asked.known(figures::work(&line, longest, rounds))?];
        for point in points {
            let asked = point.batch;
            let point = Point { batch: asked.min(machine.batch()), ..point.clone() };
            let before = machine.checked;
            let mut measured = self.measure(&mut machine, &point, line)?;
            let picks = machine.rule.next(point.batch, point.query_rows, point.misses)?;
            machine.check_rows(&picks, &self.works(&machine, &point, None)?, answers)?;
            machine.check_digests()?;
            (measured.checked, measured.asked) = (machine.checked - before, asked);
            for figure in figures::figures(&measured, self.gpu && !self.asked.quick) {
                figures.push(self.asked.known(figure)?);
            }
        }
        self.asked.progress.inc(figures.len() as u64);
        Ok(figures)
    }

    fn works(&self, machine: &Machine, point: &Point, line: Option<Line>) -> Result<Works> {
        Ok(Works {
            device: Arc::clone(&self.device),
            line,
            lengths: Lengths::new(&self.setup, point)?,
            staging: machine.staging,
            selection: machine.layers.buffers.selection,
            persistent: self.asked.persistent,
        })
    }

    /// Adjusts the engine's works to the requested total: their fixed times, and a clock that drops under load, are
    /// compensated once they have been measured.
    fn engine(&self, machine: &Machine, point: &Point, line: Line) -> Result<(Works, Alone)> {
        let mut works = self.works(machine, point, Some(line))?;
        for _ in 0..2 {
            let alone = Alone::new(machine, self.gpu, |compute| works.alone(compute))?;
            let times = (0..4).map(|_| alone.run(machine, |compute| works.alone(compute)).map(|(us, _)| us));
            // The first one warms up.
            let times = times.skip(1).collect::<Result<Vec<f64>>>()?;
            works.lengths.fit(&times);
        }
        let alone = Alone::new(machine, self.gpu, |compute| works.alone(compute))?;
        Ok((works, alone))
    }

    /// Steps in the order none without misses, next to the engine alone and to empty operations, all with an engine
    /// that only selects.
    fn selecting(&self, machine: &mut Machine, point: &Point) -> Result<Selecting> {
        let mut works = self.works(machine, point, None)?;
        let by_layer = vec![Overlap::None; point.layers as usize];
        let captured = self.capture(machine, point, &by_layer, &mut works)?;
        let engine = Alone::new(machine, self.gpu, |compute| works.alone(compute))?;
        let (from, to) =
            (machine.layers.buffers.slots.part(0, 16)?, machine.layers.buffers.selection.part(0, 16)?);
        let nothing = |compute| {
            let each = |_| self.device.carry(compute, from, to, 1);
            (0..figures::operations(point.layers)).try_for_each(each)
        };
        let empty = Alone::new(machine, self.gpu, nothing)?;
        let (mut steps, mut alone, mut empty_us) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=self.rounds() {
            let (engine_us, _) = engine.run(machine, |compute| works.alone(compute))?;
            let (us, _) = empty.run(machine, nothing)?;
            let picks = machine.rule.next(point.batch, point.query_rows, 0)?;
            let way = match &captured {
                Some(captured) => Way::Launch(captured),
                None => Way::Calls(&by_layer, &mut works),
            };
            let took = machine.step(&picks, way)?;
            if round > 0 {
                steps.push(took);
                alone.push(engine_us);
                empty_us.push(us);
            }
        }
        Ok(Selecting { steps, alone, empty_us: Spread::of(empty_us).us })
    }

    fn capture(
        &self,
        machine: &mut Machine,
        point: &Point,
        orders: &[Overlap],
        works: &mut Works,
    ) -> Result<Option<Captured>> {
        if !self.gpu {
            return Ok(None);
        }
        let bucket = [(MicroBatch(0), machine.bucket(point.batch))];
        let capture = Capture {
            micro_batches: &bucket,
            query_rows: point.query_rows,
            by_layer: orders,
            draft_passes: 0,
        };
        machine.cache.capture(&capture, works).map(Some)
    }

    fn measure(&self, machine: &mut Machine, point: &Point, line: Line) -> Result<Measured> {
        let (mut works, engine) = self.engine(machine, point, line)?;
        let scale = works.lengths.scale;
        // One sequence has no halves, so DBA is DA.
        let orders = Overlap::FIRST.into_iter().filter(|order| *order != Overlap::Dba || point.batch > 1);
        let mut kinds = Vec::new();
        for order in orders {
            let by_layer = vec![order; point.layers as usize];
            let captured = self.capture(machine, point, &by_layer, &mut works)?;
            kinds.push((by_layer, captured, Ordered { order, missing: Vec::new(), resident: Vec::new() }));
        }
        let (mut alone, rates) = (Vec::new(), self.rates.as_ref());
        for round in 0..=self.rounds() {
            let engine_us = engine.run(machine, |compute| works.alone(compute))?;
            let timed = round > 0;
            alone.extend(timed.then_some(engine_us));
            for (by_layer, captured, ordered) in &mut kinds {
                for (misses, kept) in [(0, &mut ordered.resident), (point.misses, &mut ordered.missing)] {
                    let picks = machine.rule.next(point.batch, point.query_rows, misses)?;
                    let way = match captured {
                        Some(captured) => Way::Launch(captured),
                        None => Way::Calls(by_layer, &mut works),
                    };
                    let took = machine.step(&picks, way)?;
                    kept.extend(timed.then_some(took));
                }
            }
        }
        Ok(Measured {
            point: point.clone(),
            alone,
            orders: kinds.into_iter().map(|(_, _, ordered)| ordered).collect(),
            calls: self.calls(machine, point)?,
            selecting: self.selecting(machine, point)?,
            beside: self.beside(machine, point, line)?,
            // If the simulator refuses the rates, the figure has no prediction.
            predicted: rates.and_then(|rates| predicted::exposed(&self.setup, rates, point, scale).ok()),
            checked: 0,
            captured: self.gpu,
            asked: point.batch,
            prompts: machine.prompts.min(point.batch),
            pool: machine.pool,
            persistent: self.asked.persistent,
        })
    }

    /// Resident steps whose layers are enqueued call by call, with an engine that only selects: otherwise a queue of
    /// pending works would make the host wait.
    fn calls(&self, machine: &mut Machine, point: &Point) -> Result<Vec<Took>> {
        let orders = vec![Overlap::None; point.layers as usize];
        let mut works = self.works(machine, point, None)?;
        let run_up = std::mem::take(&mut machine.run_up);
        let mut calls = Vec::new();
        for _ in 0..=self.rounds() {
            let picks = machine.rule.next(point.batch, point.query_rows, 0)?;
            calls.push(machine.step(&picks, Way::Calls(&orders, &mut works))?);
        }
        machine.run_up = run_up;
        calls.remove(0);
        Ok(calls)
    }

    fn beside(&self, machine: &mut Machine, point: &Point, line: Line) -> Result<Vec<Layered>> {
        if point.batch < BATCH_LEAST || point.layers < 3 {
            return Ok(Vec::new());
        }
        let works = self.works(machine, point, None)?;
        let beside = Beside::new(machine, point.layers)?;
        let (mut gather_us, mut layers) = (0.0, Vec::new());
        for number in 0..=BESIDE {
            let picks = machine.rule.next(point.batch, point.query_rows, point.misses)?;
            let step = beside.step(machine, &picks, &works, &line, gather_us)?;
            let alone = step.iter().filter(|layer| layer.turn == Turn::Alone).map(|layer| layer.gather_us);
            gather_us = Spread::of(alone.collect()).us;
            if self.gpu && !self.asked.quick && gather_us < GATHER_LEAST_US {
                return Ok(Vec::new());
            }
            if number > 0 {
                layers.extend(step);
            }
        }
        Ok(layers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::host_memory::{self, Pool};
    use crate::bench::json_lines::Lines;
    use crate::input::device::{ProbeOptions, Target};
    use indicatif::ProgressBar;

    /// Tiny steps on the host.
    fn quick() -> (Arc<dyn Probe>, Ceilings, Asked) {
        let device: Arc<dyn Probe> =
            HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
        let ceilings = Ceilings::measure(&*device, 1 << 16, 1).unwrap();
        let (progress, pool, lines) =
            (ProgressBar::hidden(), Pool::new(host_memory::QUICK), Lines::default());
        (
            device,
            ceilings,
            Asked {
                rounds: 1,
                quick: true,
                progress,
                target: Target::default(),
                options: ProbeOptions::of("bench"),
                pool,
                lines,
                persistent: None,
                bulk: false,
                rows: None,
                batch: None,
            },
        )
    }

    /// A machine of the smallest point, with its slots filled, and an engine that only selects.
    fn filled(study: &Study<'_>) -> (Machine, Works, Point) {
        let point = Point::groups(false, true)[0][0].clone();
        let mut machine = Machine::open(&study.device, &point, 100, 0.6, host_memory::QUICK).unwrap();
        let mut works = study.works(&machine, &point, None).unwrap();
        machine.fill(&mut works).unwrap();
        (machine, works, point)
    }

    fn study(device: Arc<dyn Probe>, asked: &Asked) -> Study<'_> {
        let setup = Setup::named(SETUP).unwrap().unwrap();
        Study { device, asked, setup, gpu: false, rates: None }
    }

    fn are_whole(figures: &[Figure]) {
        let count = |name: &str| figures.iter().filter(|figure| figure.name == name).count();
        // Batch 4 with 2 and 1 query rows, batch 2, batch 1.
        assert_eq!((count("engine alone"), count("step, none"), count("step, da")), (4, 4, 4));
        assert_eq!(count("step, dba"), 3, "one sequence has no halves");
        let besides = ("work beside a gather", "gather behind work");
        assert_eq!((count("forebay's nodes"), count(besides.0), count(besides.1)), (4, 2, 2));
        assert_eq!(count("rounds of products"), 2, "one a cache");
        for figure in figures.iter().filter(|figure| figure.name != "rounds of products") {
            assert!(figure.us.is_finite() && figure.target.is_none(), "{figure:?}");
            // Sequences' digests, and rows of three layers.
            assert!(figure.checked > 20, "{figure:?}");
        }
    }

    #[test]
    fn every_point_has_its_figures_and_everything_is_compared() {
        let (device, ceilings, asked) = quick();
        are_whole(&figures(&device, &ceilings, &asked).unwrap());
    }

    #[test]
    fn sequences_have_their_own_prompts_as_far_as_the_pool_holds_them() {
        let (device, _, asked) = quick();
        let study = study(device, &asked);
        let point = Point::groups(false, true)[0][0].clone();
        let row = |machine: &mut Machine, sequence| machine.row(sequence, forebay::Layer(1), 5).unwrap();
        for (pool, prompts) in [(64 << 20, 4), (host_memory::QUICK, 2), (1 << 20, 1)] {
            let mut machine = Machine::open(&study.device, &point, 100, 0.6, pool).unwrap();
            assert_eq!(machine.prompts, prompts, "of {pool} bytes");
            // One prompt is the least.
            assert!(machine.pool <= pool.max(3 << 20), "{} of {pool} bytes", machine.pool);
            let rows: Vec<Vec<u8>> = (0..4).map(|sequence| row(&mut machine, sequence)).collect();
            for (number, other) in (0..4).flat_map(|one| (0..4).map(move |other| (one, other))) {
                let same = number as u32 % prompts == other as u32 % prompts;
                assert_eq!(rows[number] == rows[other], same, "{number} and {other} of {prompts} prompts");
            }
        }
    }

    #[test]
    fn a_wrong_selection_is_found_by_the_counts_and_by_the_digests() {
        let (device, _, asked) = quick();
        let study = study(device, &asked);
        let (mut machine, mut works, point) = filled(&study);
        let orders = vec![Overlap::Da; point.layers as usize];
        machine.check_digests().unwrap();
        // A row is resident that was to be fetched: other counts.
        let mut picks = machine.rule.next(4, 2, 6).unwrap();
        let missed = picks.missed[1][0];
        let hit = *picks.selections[1].iter().find(|row| !picks.missed[1].contains(row)).unwrap();
        for position in &mut picks.selections[1] {
            *position = if *position == missed { hit } else { *position };
        }
        let error = machine.step(&picks, Way::Calls(&orders, &mut works)).unwrap_err();
        assert_eq!((error.kind(), error.number("layer")), (Kind::Internal, Some(1)), "{error}");
        assert!(error.place().contains("hits and misses"), "{error}");
        assert!(machine.check_digests().unwrap_err().place().contains("digest"));
    }

    #[test]
    fn the_digests_find_a_layer_that_was_resolved_as_another() {
        let (device, _, asked) = quick();
        let study = study(device, &asked);
        let (mut machine, mut works, point) = filled(&study);
        let orders = vec![Overlap::None; point.layers as usize];
        let mut picks = machine.rule.next(4, 2, 36).unwrap();
        // All rows miss in either pattern, so the counts are those of the rule.
        picks.selections.swap(0, 2);
        picks.missed.swap(0, 2);
        let stepped = machine.step(&picks, Way::Calls(&orders, &mut works));
        let found = stepped.map(|_| ()).and_then(|()| machine.check_digests());
        assert_eq!(found.unwrap_err().kind(), Kind::Internal);
    }

    #[test]
    fn a_wrong_row_in_a_slot_is_found() {
        let (device, _, asked) = quick();
        let study = study(device, &asked);
        let (mut machine, works, point) = filled(&study);
        let answers = machine.answers().unwrap();
        let picks = machine.rule.next(point.batch, point.query_rows, point.misses).unwrap();
        let before = machine.checked;
        machine.check_rows(&picks, &works, answers).unwrap();
        assert!(machine.checked >= before + 3 * 3 * 6, "{} rows", machine.checked - before);
        // All slots of one layer.
        let slab = machine.cache.slab(forebay::Layer(1)).unwrap();
        let picks = machine.rule.next(point.batch, point.query_rows, 0).unwrap();
        machine.device.write(slab, &vec![0x5A; slab.bytes() as usize]).unwrap();
        let error = machine.check_rows(&picks, &works, answers).unwrap_err();
        assert_eq!((error.kind(), error.number("layer")), (Kind::Internal, Some(1)), "{error}");
    }
}
