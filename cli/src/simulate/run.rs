//! `forebay simulate`: computes the time of a step at an operating point, with the production schedule on a virtual
//! clock.
//!
//! Lists of values make a sweep: one step for each combination. Misses come from the setup, from a file, or from a
//! replay of a trace through the production pools at each requested ratio.

use std::ops::RangeInclusive;
use std::path::Path;

use forebay::overlap::Table;
use forebay::predict::elastic::Pool;
use forebay::predict::misses::Misses;
use forebay::predict::plan::{self, Batch, Demand, Planned, Ratio};
use forebay::predict::setup::Setup;
use forebay::predict::simulate::{Options, Order, Outcome, PULL_ASSUMPTIONS, Point, Traffic};
use forebay::{Error, Kind, Result};

use super::args::{Arguments, Choice, Switch};
use super::result::{self, Simulated};
use super::shards::Sharded;
use super::{html, json, kernels, lanes, prefill, text, timeline};
use crate::input::file_kind::{self, FileKind};
use crate::input::machine::accepts;
use crate::input::misses::Source;
use crate::input::sizes::{Size, Unit};
use crate::present::html::page;
use crate::present::output::{self, Results};
use crate::present::progress;
use crate::study::mean_step::{self, Run};

/// The most points of one sweep.
const POINTS: usize = 100_000;

/// Adds to an error the point of the sweep.
fn of_point(error: Error, point: &Point) -> Error {
    let ratio = if point.ratio.is_finite() { format!("{:.4}", point.ratio) } else { "auto".to_owned() };
    let Point { context, batch, mtp, .. } = point;
    let place = format!("{} (context {context}, batch {batch}, mtp {mtp}, ratio {ratio})", error.place());
    error.at(place)
}

/// As [`of_point`], for an error of finding the point's ratio.
fn unknown_ratio(error: Error, point: &Point) -> Error {
    of_point(error, &Point { ratio: f64::NAN, ..*point })
}

/// A point to simulate.
struct Job {
    point: Point,
    asked: Ratio,
    pool: Option<Pool>,
    choice: Choice,
}

impl Arguments {
    /// Every combination, in the order of the command line.
    fn jobs(&self, setup: &Setup) -> Result<Vec<Job>> {
        let mtps = if self.mtp.is_empty() { vec![1] } else { self.mtp.clone() };
        let accepts = accepts("simulate", &self.accept, &mtps)?;
        let ratios = if self.ratio.is_empty() { vec![Ratio::Auto] } else { self.ratio.clone() };
        let cache = self.cache.as_ref().filter(|_| ratios.contains(&Ratio::Auto));
        check_memory(setup, mtps.iter().copied().max().unwrap_or(1), cache)?;
        let choices = match (&self.table, &self.overlap[..]) {
            (Some(_), _) => vec![Choice::Table],
            (None, []) => vec![Choice::Best],
            (None, named) => named.to_vec(),
        };
        let lists = [self.context.len(), mtps.len(), self.batch.len(), ratios.len(), choices.len()];
        let points = lists.iter().try_fold(1_usize, |all, list| all.checked_mul(*list));
        if points.is_none_or(|points| points > POINTS) {
            return Err(Error::new(Kind::InvalidConfig, "simulate")
                .at("the sweep has too many combinations")
                .with("most", POINTS as u64)
                .hint("pass fewer values"));
        }
        let mut jobs = Vec::new();
        for context in &self.context {
            for (mtp, accept) in mtps.iter().zip(&accepts) {
                let of = |batch| Point { context: *context, batch, mtp: *mtp, accept: *accept, ratio: 1.0 };
                let pool = self.pool(setup, &of(self.batch.iter().copied().max().unwrap_or(1)))?;
                for batch in &self.batch {
                    for asked in &ratios {
                        let mut point = of(*batch);
                        point.check(setup)?;
                        let ratio = match pool {
                            Some(pool) => pool.ratio(*batch, *context),
                            None => self.ratio(setup, &point, *asked),
                        };
                        point.ratio = ratio.map_err(|error| unknown_ratio(error, &point))?;
                        jobs.extend(choices.iter().map(|choice| Job {
                            point,
                            asked: *asked,
                            pool,
                            choice: *choice,
                        }));
                    }
                }
            }
        }
        Ok(jobs)
    }

    /// The ratio, or the largest that fits.
    fn ratio(&self, setup: &Setup, point: &Point, ratio: Ratio) -> Result<f64> {
        match ratio {
            Ratio::Share(ratio) => Ok(ratio),
            Ratio::Auto => Ok(self.filled(setup, point)?.ratio),
        }
    }

    /// With --elastic the pool that all batches divide: --pool-slots, or what fills --cache at the `largest` batch.
    fn pool(&self, setup: &Setup, largest: &Point) -> Result<Option<Pool>> {
        if !self.elastic {
            return Ok(None);
        }
        largest.check(setup)?;
        match self.pool_slots {
            Some(slots) => Ok(Some(Pool::new(slots))),
            None => match self.filled(setup, largest) {
                Ok(planned) => Ok(Some(planned.pool())),
                Err(error) => Err(unknown_ratio(error, largest)),
            },
        }
    }

    /// The plan of a batch that fills --cache.
    fn filled(&self, setup: &Setup, point: &Point) -> Result<Planned> {
        let cache = self.cache.as_ref().ok_or_else(|| {
            let error = Error::new(Kind::InvalidConfig, "simulate");
            match self.elastic {
                true => error
                    .at("--elastic without --cache or --pool-slots")
                    .hint("pass --cache SIZE, the memory that index keys and rows may take, or --pool-slots"),
                false => error
                    .at("--ratio auto without --cache")
                    .hint("pass --cache SIZE, the memory that index keys and rows may take, or a ratio"),
            }
        })?;
        let asked = self.two_batch.map(|switch| switch == Switch::On && point.batch >= 2);
        let two = asked.unwrap_or_else(|| setup.two_batch(point.batch, point.context));
        let micro_batches = if two { 2 } else { 1 };
        let demand = Demand {
            query_rows: point.mtp,
            micro_batches,
            batch: Batch::Sequences(point.batch),
            count_tables: false,
            ..Demand::new(*setup.shape(), cache.bytes, point.context)
        };
        plan::plan(&demand)
    }

    fn options(
        &self,
        order: Order,
        misses: Option<Misses>,
        sharded: Option<&Sharded>,
        spans: bool,
    ) -> Options {
        Options {
            order,
            two_batch: self.two_batch.map(|switch| switch == Switch::On),
            fill: self.fill,
            traffic: Traffic {
                to_device: self.traffic_up.unwrap_or(0.0) * 1e9,
                to_host: self.traffic_down.unwrap_or(0.0) * 1e9,
            },
            misses,
            step: 0,
            sharded: sharded.map(|sharded| sharded.plan.clone()),
            spans,
        }
    }

    /// Refuses traffic that the link cannot carry: its queue would grow without bound.
    fn check_traffic(&self, setup: &Setup) -> Result<()> {
        let rates = setup.rates();
        let both = [
            ("--traffic-up", self.traffic_up, rates.copy_up),
            ("--traffic-down", self.traffic_down, rates.copy_down),
        ];
        match both.iter().find(|(_, asked, most)| asked.is_some_and(|asked| asked * 1e9 > *most)) {
            Some((option, _, most)) => Err(Error::new(Kind::InvalidConfig, "simulate")
                .at(format!("{option}: more than the link's {} GB/s", most / 1e9))
                .hint("pass the other traffic of the link, at most what it carries")),
            None => Ok(()),
        }
    }

    /// Refuses pictures of several steps: a picture shows one.
    fn check_single(&self, jobs: usize) -> Result<()> {
        let targets = [
            ("--timeline", self.timeline.is_some()),
            ("--perfetto", self.perfetto.is_some()),
            ("--write-table", self.write_table.is_some()),
            ("--layer", self.layer.is_some()),
        ];
        match targets.iter().find(|(_, given)| *given) {
            Some((option, _)) if jobs != 1 => Err(Error::new(Kind::InvalidConfig, "simulate")
                .at(format!("{option} shows one step, but this is a sweep"))
                .with("points", jobs as u64)
                .hint("pass one value of each option")),
            _ => Ok(()),
        }
    }

    fn check_targets(&self) -> Result<()> {
        let mut inputs = self.machine.inputs();
        inputs.extend(self.table.as_deref().map(|path| ("table", path)));
        output::check_targets(
            "simulate",
            &[
                ("--json", self.json.as_deref()),
                ("--html", self.html.as_deref()),
                ("--timeline", self.timeline.as_deref()),
                ("--perfetto", self.perfetto.as_deref()),
                ("--write-table", self.write_table.as_deref()),
            ],
            &inputs,
        )
    }

    /// The layers that are enlarged.
    fn enlarged(&self, outcome: &Outcome) -> Result<RangeInclusive<u32>> {
        let layers = outcome.overlap.len() as u32;
        if let Some(layer) = self.layer.filter(|layer| *layer >= layers) {
            return Err(Error::new(Kind::OutOfRange, "simulate")
                .at("--layer")
                .with("layer", layer)
                .with("layers", layers));
        }
        let middle = self.layer.unwrap_or_else(|| result::worst_layer(outcome));
        Ok(middle.saturating_sub(1)..=(middle + 1).min(layers.saturating_sub(1)))
    }

    fn draw<'a>(&'a self, simulated: &Simulated, results: &mut Results<'a>) -> Result<()> {
        let outcome = simulated.drawn();
        let lanes = lanes::lanes(&outcome.spans);
        let title = text::title(simulated);
        if let Some(path) = &self.write_table {
            let table = Table { version: 1, by_layer: outcome.overlap.clone() };
            results.write(path, table.to_text());
        }
        if let Some(path) = &self.perfetto {
            results.write(path, lanes::perfetto(&lanes, &title)?);
        }
        if let Some(path) = &self.timeline {
            let layers = self.enlarged(outcome)?;
            let line = text::line(outcome);
            let source = simulated.provenance.sentence();
            let caption = timeline::Caption {
                title: &title,
                line: &line,
                source: &source,
                whole: "The whole step",
                layers,
            };
            results.write(path, timeline::picture(&lanes, &caption, page::STYLE));
        }
        Ok(())
    }
}

/// Checks that the model's published weights leave room for the cache, in steps of `query_rows`. For other GPUs than
/// the setup's, nothing has checked that before.
fn check_memory(setup: &Setup, query_rows: u32, cache: Option<&Size>) -> Result<()> {
    let (served, memory) = (setup.served(), setup.file().gpu.memory_gib * f64::from(1 << 30));
    let Some(weights) = setup.weights(query_rows)?.filter(|_| served.extrapolated) else { return Ok(()) };
    if weights as f64 + cache.map_or(0.0, |cache| cache.bytes as f64) <= memory {
        return Ok(());
    }
    let unit = cache.map_or(Unit::Binary, Size::unit);
    let (weights, memory) = (unit.size(weights as f64), unit.size(memory));
    let and = cache.map_or(String::new(), |cache| format!("--cache {cache} and "));
    Err(Error::new(Kind::OutOfRange, "price GPUs")
        .at(format!("{and}{weights} of weights on each of {} GPUs are more than its {memory}", served.gpus))
        .hint(if cache.is_some() { "pass a smaller cache, or more GPUs" } else { "pass more GPUs" }))
}

fn read_table(path: &Path) -> Result<Table> {
    file_kind::expect("load overlap table", path, &[FileKind::OverlapTable], "an overlap table")?;
    Table::from_text(&output::read_text(path)?).map_err(|error| output::within(error, path))
}

/// Refuses elastic budgets with misses of a single operating point: they are not those of another ratio.
fn check_elastic(source: &Source, setup: &Setup, jobs: &[Job]) -> Result<()> {
    match jobs.iter().find(|job| job.pool.is_some() && job.point.ratio < 1.0) {
        Some(Job { point, .. }) if !source.is_by_ratio(setup) => Err(of_point(
            Error::new(Kind::InvalidConfig, "simulate")
                .at("--elastic: the misses are of one operating point, and elastic budgets have many ratios")
                .hint("pass misses as a curve, or --trace"),
            point,
        )),
        _ => Ok(()),
    }
}

/// The simulated points, and notes about them.
struct Sweep {
    all: Vec<Simulated>,
    note: Option<String>,
}

/// Simulates every point on every link.
fn sweep(arguments: &Arguments) -> Result<Sweep> {
    let mut simulators =
        arguments.machine.simulators(arguments.model.as_ref().map(|model| model.name), arguments.gpus)?;
    let setup = simulators.first().map(|linked| linked.simulator.setup().clone());
    let Some(setup) = setup else { return Ok(Sweep { all: Vec::new(), note: None }) };
    let jobs = arguments.jobs(&setup)?;
    let points = jobs.len() * simulators.len();
    arguments.check_single(points)?;
    let sharded = arguments.shards.of(&setup)?;
    let mut source = arguments.machine.source(&setup)?;
    check_elastic(&source, &setup, &jobs)?;
    let table = arguments.table.as_deref().map(read_table).transpose()?;
    let page = arguments.html.is_some() && points == 1;
    let spans = arguments.timeline.is_some() || arguments.perfetto.is_some() || page;
    let bar = progress::bar("simulate", points as u64);
    let mut all = Vec::with_capacity(points);
    for linked in &mut simulators {
        arguments.check_traffic(linked.simulator.setup())?;
        let provenance = source.provenance(linked.simulator.setup());
        let provenance = if arguments.elastic { provenance.with_elastic_budgets() } else { provenance };
        let assumed: &[&str] = if sharded.is_some() { &PULL_ASSUMPTIONS } else { &[] };
        let provenance = provenance.with_assumptions(assumed);
        for Job { point, asked, pool, choice } in &jobs {
            let misses = source.at(&setup, point.ratio, point.mtp)?;
            let options = arguments.options(choice.order(table.as_ref()), misses, sharded.as_ref(), spans);
            let run = mean_step::run(&mut linked.simulator, point, options);
            let Run { outcome, worst } = run.map_err(|error| of_point(error, point))?;
            all.push(Simulated {
                provenance: provenance.clone(),
                link: linked.link.clone(),
                choice: choice.name(),
                asked: *asked,
                pool: *pool,
                fill: arguments.fill,
                traffic: [arguments.traffic_up, arguments.traffic_down],
                sharded: sharded.clone(),
                outcome,
                worst,
            });
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let note = source.note(&setup, arguments.context.iter().copied());
    Ok(Sweep { all, note })
}

/// `forebay simulate`.
///
/// # Errors
/// Errors of reading setup, misses and trace, of a point that the setup does not reach, and of writing the result.
pub fn command(arguments: &Arguments) -> Result<()> {
    arguments.check_targets()?;
    if arguments.kernels {
        return kernels::command(&arguments.assume, arguments.json.as_deref(), arguments.look.look());
    }
    if !arguments.prefill.prefill.is_empty() {
        return prefill::command(arguments);
    }
    let Sweep { all, note } = sweep(arguments)?;
    let mut results = Results::default();
    if let [one] = &all[..] {
        arguments.draw(one, &mut results)?;
    }
    if let Some(path) = &arguments.json {
        results.write(path, json::text(&all, note.as_deref())?);
    }
    if let Some(path) = &arguments.html {
        let layers = match &all[..] {
            [one] => arguments.enlarged(one.drawn())?,
            _ => 0..=0,
        };
        results.write(path, html::simulated(&all, note.as_deref(), layers));
    } else if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text::report(&all, note.as_deref(), look)));
    }
    results.deliver()
}
