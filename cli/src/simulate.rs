//! `forebay simulate`: computes the time of a step at an operating point, with the production schedule on a virtual
//! clock.
//!
//! Lists of values make a sweep: one step for each combination. Misses come from the setup, from a file, or from a
//! replay of a trace through the production pools at each requested ratio.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use forebay::overlap::{Overlap, Table};
use forebay::predict::misses::Misses;
use forebay::predict::plan::{self, Batch, Demand, Ratio};
use forebay::predict::provenance::Provenance;
use forebay::predict::setup::{Link, Setup};
use forebay::predict::simulate::{Options, Order, Outcome, Point, Simulator, Traffic};
use forebay::{Error, Kind, Result};

use crate::html::{self, timeline};
use crate::kinds::{self, FileKind};
use crate::look::LookArguments;
use crate::miss_source::{MissArguments, Source};
use crate::output::{Input, Results, echo};
use crate::sizes::{self, Size, Unit};
use crate::steps::{self, Run, Worst};
use crate::{kernel_costs, output, simulate_report, timeline as lanes};

/// The most points of one sweep.
const POINTS: usize = 100_000;

const AFTER_HELP: &str = "\
Lists, separated by commas, make a sweep: one step for each combination. With misses by step, every step is run, all \
in one order by layer; the figures are their mean, and pictures show the longest.
Throughput is tokens a second of 8 GPUs; OTPS is output tokens a second of one sequence. Exposed: how much longer the \
step takes than without misses.";

/// The arguments of `forebay simulate`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    #[command(flatten)]
    pub machine: Machine,
    /// GPUs that the experts are divided over, instead of the setup's: a node is 8. For other numbers than the
    /// setup's, costs are extrapolated, and marked as such (docs/simulator.md).
    #[arg(long, value_name = "N", value_parser = sizes::count, allow_negative_numbers = true)]
    gpus: Option<u32>,
    /// Prints how long forebay's own kernels should take on a GPU, term by term, before any is measured, instead of a
    /// step (docs/gpu-notes.md).
    #[arg(long, conflicts_with_all = ["setup", "context", "batch", "html", "timeline", "perfetto", "write_table"])]
    kernels: bool,
    /// Sets a price of --kernels, such as read_gb_s=25 or round_trip_us=1.2..1.8; the error for a wrong name lists
    /// all.
    #[arg(long, value_name = "NAME=PRICE", requires = "kernels")]
    assume: Vec<String>,
    /// Tokens of each sequence at its end.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = sizes::tokens,
          required_unless_present = "kernels")]
    context: Vec<u32>,
    /// Query rows per decode step: 1 without drafts [default: 1].
    #[arg(long, value_name = "Q", value_delimiter = ',', value_parser = sizes::count,
          allow_negative_numbers = true)]
    mtp: Vec<u32>,
    /// Tokens that a step yields for each sequence, from 1 to --mtp: one value for all, or one for each --mtp
    /// [default: 1].
    #[arg(long, value_name = "A", value_delimiter = ',', value_parser = sizes::positive,
          allow_negative_numbers = true)]
    accept: Vec<f64>,
    /// Sequences on one GPU.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = sizes::count,
          required_unless_present = "kernels", allow_negative_numbers = true)]
    batch: Vec<u32>,
    /// Slots per sequence and layer as a share of the context at its end, 0 < R <= 1, or auto for the largest ratio
    /// that fits --cache [default: auto].
    #[arg(long, value_name = "R|auto", value_delimiter = ',', value_parser = sizes::ratio,
          allow_negative_numbers = true)]
    ratio: Vec<Ratio>,
    /// Memory of one GPU for index keys and rows, without residency tables; --ratio auto fills it.
    #[arg(long, value_name = "SIZE", value_parser = sizes::some_size)]
    cache: Option<Size>,
    /// The order of a layer's work, which decides what hides the gather; best takes for each layer the fastest order.
    /// Several are compared [default: best].
    #[arg(long, value_enum, value_delimiter = ',')]
    overlap: Vec<Choice>,
    /// Runs each layer in the order of this overlap table, instead of choosing orders.
    #[arg(long, value_name = "FILE", conflicts_with = "overlap")]
    table: Option<PathBuf>,
    /// Writes the order of each layer as an overlap table for an engine. For a single point.
    #[arg(long, value_name = "FILE")]
    write_table: Option<PathBuf>,
    /// Whether the batch runs as two micro-batches [default: as the setup says].
    #[arg(long, value_enum)]
    two_batch: Option<Switch>,
    /// Gives each micro-batch a compute stream of its own, so that one computes while the other waits for rows.
    #[arg(long)]
    fill: bool,
    /// Gigabytes a second (1e9) of other traffic on the link to the device during the step: warm-up.
    #[arg(long, value_name = "GB/S", value_parser = sizes::positive, allow_negative_numbers = true)]
    traffic_up: Option<f64>,
    /// Gigabytes a second of other traffic on the link to the host during the step: transfer.
    #[arg(long, value_name = "GB/S", value_parser = sizes::positive, allow_negative_numbers = true)]
    traffic_down: Option<f64>,
    /// Draws the step as an SVG picture, with a lane for each stream. For a single point.
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// The layer that --timeline, or --html of a single point, enlarges, with its neighbours [default: the layer
    /// with most exposed time].
    #[arg(long, value_name = "LAYER")]
    layer: Option<u32>,
    /// Writes the step as trace events in JSON, for Perfetto. For a single point.
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    /// Writes a report with pictures instead of tables as one HTML file; `-` prints it. For a single point it
    /// shows the step's timeline.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Writes the result as JSON, atomically; `-` prints it instead of the tables.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    look: LookArguments,
}

/// The setup, and the misses of its model.
#[derive(clap::Args)]
pub struct Machine {
    /// A built-in setup, or a setup file, with the costs of an engine's step (docs/simulator.md).
    #[arg(long, value_name = "NAME|FILE")]
    pub setup: Option<String>,
    /// Links instead of the setup's: pcie4, pcie5, pcie6, c2c, or the rate at which single rows are gathered, such
    /// as 37GB/s; several are compared.
    #[arg(long, value_name = "NAME|RATE", value_delimiter = ',', requires = "setup")]
    link: Vec<String>,
    #[command(flatten)]
    misses: MissArguments,
}

impl Machine {
    /// The named files.
    pub fn inputs(&self) -> Vec<Input<'_>> {
        // The name of a built-in setup is not a file.
        let setup = self.setup.as_deref().filter(|name| Setup::named(name).is_none());
        setup.map(|name| ("setup", Path::new(name))).into_iter().chain(self.misses.inputs()).collect()
    }
}

/// An order, or a choice by layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Choice {
    /// Nothing hides it: the order that engines run today.
    None,
    /// Attention on resident rows hides it.
    Da,
    /// The indexer's second half hides it too.
    Dba,
    /// For each layer the order of least time.
    Best,
    /// The orders of --table.
    #[value(skip)]
    Table,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    /// Two micro-batches.
    On,
    /// One batch.
    Off,
}

impl Choice {
    fn order(self, table: Option<&Table>) -> Order {
        match self {
            Choice::Table => Order::Table(table.map(|table| table.by_layer.clone()).unwrap_or_default()),
            Choice::None => Order::All(Overlap::None),
            Choice::Da => Order::All(Overlap::Da),
            Choice::Dba => Order::All(Overlap::Dba),
            Choice::Best => Order::ByLayer,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Choice::None => "none",
            Choice::Da => "da",
            Choice::Dba => "dba",
            Choice::Best => "best",
            Choice::Table => "table",
        }
    }
}

/// Reads a setup by its name or from its file; errors name it.
pub fn read_setup(name: &str) -> Result<Setup> {
    if let Some(setup) = Setup::named(name) {
        return setup;
    }
    let path = Path::new(name);
    if !path.exists() {
        let names: Vec<&str> = Setup::names().collect();
        return Err(Error::new(Kind::InvalidConfig, "read setup")
            .at(format!("--setup {}: neither a file nor a built-in setup ({})", echo(name), names.join(", ")))
            .hint("pass a built-in setup or a file"));
    }
    kinds::expect("read setup", path, &[FileKind::Setup], "a setup")?;
    let text = output::read_text(path)?;
    Setup::parse(&text).map_err(|error| output::within(error, path))
}

/// The setup on a named link, or on its own link with another rate at which single rows are gathered.
fn on_link(setup: &Setup, text: &str) -> Result<Setup> {
    let Some(rate) = text.strip_suffix("GB/s") else { return setup.on_link(Link::Preset(text.to_owned())) };
    let wrong = || Error::new(Kind::InvalidConfig, "read link").at(format!("--link {}", echo(text)));
    let rate =
        sizes::positive(rate).map_err(|_| wrong().hint("pass a preset's name, or a rate such as 37GB/s"))?;
    setup.on_gather(rate * 1e9)
}

/// A link, its name, and the simulator of the setup on it.
pub struct Linked {
    /// As named; none for the setup's own.
    pub link: Option<String>,
    /// The simulator, which caches the costs of layers.
    pub simulator: Simulator,
}

impl Machine {
    /// The setup on every link.
    ///
    /// # Errors
    /// Errors of reading it, and of an unknown link.
    pub fn simulators(&self) -> Result<Vec<Linked>> {
        let name = self.setup.as_deref().ok_or_else(|| {
            Error::new(Kind::InvalidConfig, "simulate")
                .at("--setup is not given")
                .hint("pass --setup with a built-in setup, such as ess, or a file")
        })?;
        self.of(&read_setup(name)?)
    }

    /// Simulators of the setup on every link, on `gpus` GPUs if they are not the setup's.
    ///
    /// # Errors
    /// As [`Machine::simulators`], and errors of GPUs that cannot be priced.
    pub fn on_gpus(&self, gpus: Option<u32>) -> Result<Vec<Linked>> {
        let own = self.simulators()?;
        let Some(gpus) = gpus else { return Ok(own) };
        let on = |Linked { link, simulator }: Linked| {
            let simulator = Simulator::new(simulator.setup().on_gpus(gpus)?);
            Ok(Linked { link, simulator })
        };
        own.into_iter().map(on).collect()
    }

    /// Simulators of `setup` on every link.
    ///
    /// # Errors
    /// Errors of an unknown link.
    pub fn of(&self, setup: &Setup) -> Result<Vec<Linked>> {
        if self.link.is_empty() {
            return Ok(vec![Linked { link: None, simulator: Simulator::new(setup.clone()) }]);
        }
        let on = |link: &String| {
            let changed = on_link(setup, link)?;
            Ok(Linked { link: Some(link.clone()), simulator: Simulator::new(changed) })
        };
        self.link.iter().map(on).collect()
    }

    /// How many links are compared.
    pub fn links(&self) -> usize {
        self.link.len().max(1)
    }

    /// The source of misses.
    ///
    /// # Errors
    /// Errors of reading it.
    pub fn source(&self, setup: &Setup) -> Result<Source> {
        self.misses.source(setup)
    }
}

/// A point of the sweep, simulated.
pub struct Simulated {
    /// The provenance of its figures.
    pub provenance: Provenance,
    /// The link, if one was named.
    pub link: Option<String>,
    /// Which orders were allowed.
    pub choice: &'static str,
    /// The ratio as requested.
    pub asked: Ratio,
    /// Whether each micro-batch had a compute stream of its own.
    pub fill: bool,
    /// Gigabytes a second of other traffic, up and down.
    pub traffic: [Option<f64>; 2],
    /// The step; the mean of a replay's steps.
    pub outcome: Outcome,
    /// The longest of a replay's steps.
    pub worst: Option<Worst>,
}

impl Simulated {
    /// The step that is drawn: a mean has no timeline, so of several steps it is the longest.
    pub fn drawn(&self) -> &Outcome {
        self.worst.as_ref().map_or(&self.outcome, |worst| &worst.outcome)
    }
}

/// Accepted tokens for each number of query rows: one for all, or one for each.
///
/// # Errors
/// [`Kind::InvalidConfig`] where they are neither.
pub fn accepts(operation: &'static str, given: &[f64], mtps: &[u32]) -> Result<Vec<f64>> {
    match given {
        [] => Ok(vec![1.0; mtps.len()]),
        [one] => Ok(vec![*one; mtps.len()]),
        many if many.len() == mtps.len() => Ok(many.to_vec()),
        many => Err(Error::new(Kind::InvalidConfig, operation)
            .at("--accept needs one value, or one for each --mtp")
            .with("accept", many.len() as u64)
            .with("mtp", mtps.len() as u64)),
    }
}

/// Adds to an error the point of the sweep.
fn of_point(error: Error, point: &Point) -> Error {
    let ratio = if point.ratio.is_finite() { format!("{:.4}", point.ratio) } else { "auto".to_owned() };
    let Point { context, batch, mtp, .. } = point;
    let place = format!("{} (context {context}, batch {batch}, mtp {mtp}, ratio {ratio})", error.place());
    error.at(place)
}

/// A point to simulate.
struct Job {
    point: Point,
    asked: Ratio,
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
                for batch in &self.batch {
                    for ratio in &ratios {
                        let mut point = Point {
                            context: *context,
                            batch: *batch,
                            mtp: *mtp,
                            accept: *accept,
                            ratio: 1.0,
                        };
                        point.check(setup)?;
                        let share = self.share(setup, &point, *ratio);
                        point.ratio =
                            share.map_err(|error| of_point(error, &Point { ratio: f64::NAN, ..point }))?;
                        jobs.extend(choices.iter().map(|choice| Job {
                            point,
                            asked: *ratio,
                            choice: *choice,
                        }));
                    }
                }
            }
        }
        Ok(jobs)
    }

    /// The ratio, or the largest that fits.
    fn share(&self, setup: &Setup, point: &Point, ratio: Ratio) -> Result<f64> {
        let Ratio::Auto = ratio else {
            return match ratio {
                Ratio::Share(ratio) => Ok(ratio),
                Ratio::Auto => Ok(1.0),
            };
        };
        let cache = self.cache.as_ref().ok_or_else(|| {
            Error::new(Kind::InvalidConfig, "simulate")
                .at("--ratio auto without --cache")
                .hint("pass --cache SIZE, the memory that index keys and rows may take, or a ratio")
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
        Ok(plan::plan(&demand)?.ratio)
    }

    fn options(&self, order: Order, misses: Option<Misses>, spans: bool) -> Options {
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
        let middle = self.layer.unwrap_or_else(|| simulate_report::worst_layer(outcome));
        Ok(middle.saturating_sub(1)..=(middle + 1).min(layers.saturating_sub(1)))
    }

    fn draw<'a>(&'a self, simulated: &Simulated, results: &mut Results<'a>) -> Result<()> {
        let outcome = simulated.drawn();
        let lanes = lanes::lanes(&outcome.spans);
        let title = simulate_report::title(simulated);
        if let Some(path) = &self.write_table {
            let table = Table { version: 1, by_layer: outcome.overlap.clone() };
            results.write(path, table.to_text());
        }
        if let Some(path) = &self.perfetto {
            results.write(path, lanes::perfetto(&lanes, &title)?);
        }
        if let Some(path) = &self.timeline {
            let layers = self.enlarged(outcome)?;
            let line = simulate_report::line(outcome);
            let source = simulated.provenance.sentence();
            let caption = timeline::Caption { title: &title, line: &line, source: &source, layers };
            results.write(path, timeline::picture(&lanes, &caption, html::STYLE));
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
    kinds::expect("load overlap table", path, &[FileKind::OverlapTable], "an overlap table")?;
    Table::from_text(&output::read_text(path)?).map_err(|error| output::within(error, path))
}

/// The simulated points, and notes about them.
struct Sweep {
    all: Vec<Simulated>,
    note: Option<String>,
}

/// Simulates every point on every link.
fn sweep(arguments: &Arguments) -> Result<Sweep> {
    let mut simulators = arguments.machine.on_gpus(arguments.gpus)?;
    let setup = simulators.first().map(|linked| linked.simulator.setup().clone());
    let Some(setup) = setup else { return Ok(Sweep { all: Vec::new(), note: None }) };
    let jobs = arguments.jobs(&setup)?;
    let points = jobs.len() * simulators.len();
    arguments.check_single(points)?;
    let mut source = arguments.machine.source(&setup)?;
    let table = arguments.table.as_deref().map(read_table).transpose()?;
    let page = arguments.html.is_some() && points == 1;
    let spans = arguments.timeline.is_some() || arguments.perfetto.is_some() || page;
    let bar = output::progress("simulate", points as u64);
    let mut all = Vec::with_capacity(points);
    for linked in &mut simulators {
        arguments.check_traffic(linked.simulator.setup())?;
        let provenance = source.provenance(linked.simulator.setup());
        for Job { point, asked, choice } in &jobs {
            let misses = source.at(&setup, point.ratio, point.mtp)?;
            let options = arguments.options(choice.order(table.as_ref()), misses, spans);
            let run = steps::run(&mut linked.simulator, point, options);
            let Run { outcome, worst } = run.map_err(|error| of_point(error, point))?;
            all.push(Simulated {
                provenance: provenance.clone(),
                link: linked.link.clone(),
                choice: choice.name(),
                asked: *asked,
                fill: arguments.fill,
                traffic: [arguments.traffic_up, arguments.traffic_down],
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
        return kernel_costs::command(&arguments.assume, arguments.json.as_deref(), arguments.look.look());
    }
    let Sweep { all, note } = sweep(arguments)?;
    let mut results = Results::default();
    if let [one] = &all[..] {
        arguments.draw(one, &mut results)?;
    }
    if let Some(path) = &arguments.json {
        results.write(path, simulate_report::json(&all, note.as_deref())?);
    }
    if let Some(path) = &arguments.html {
        let layers = match &all[..] {
            [one] => arguments.enlarged(one.drawn())?,
            _ => 0..=0,
        };
        results.write(path, html::sweep::simulated(&all, note.as_deref(), layers));
    } else if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&simulate_report::text(&all, note.as_deref(), look)));
    }
    results.deliver()
}
