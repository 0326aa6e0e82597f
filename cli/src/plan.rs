//! `forebay plan`: what fits on a GPU, at which ratio, and how many sequences that makes.
//!
//! Lists make a sweep: one plan for each combination. Of a sweep, a plan that does not fit is a line that says so; a
//! plan that makes no sense, and a single one that does not fit, are errors.

use std::path::PathBuf;

use clap::ValueEnum;
use forebay::predict::plan::{self, Batch, Demand, FEW_SLOTS, Note, Planned, Ratio};
use forebay::predict::setup::Setup;
use forebay::predict::simulate::{Options, Outcome};
use forebay::predict::worth::{self, Priced};
use forebay::{Error, Kind, Result};

use crate::miss_source::Source;
use crate::simulate::{self, Linked, Machine};
use crate::sizes::{self, Model};
use crate::{html, output, plan_json, plan_report, replay};

/// The most plans of one sweep.
const POINTS: usize = 100_000;

const AFTER_HELP: &str = "\
Lists, separated by commas, make a sweep: one plan for each combination.
Sizes have a unit: 80GiB, 141GB. Tokens: 4096, 32K (of 1024 each).
A batch that fits with all rows on the device needs no offload; the plan says so. With --setup each plan is simulated,
and --batch max is the batch of most tokens a second; without, the one that leaves --least-slots.";

/// The arguments of `forebay plan`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// Whose cache [default: deepseek-v3.2].
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = sizes::model)]
    model: Vec<Model>,
    /// Memory of one GPU.
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = sizes::some_bytes, required = true)]
    gpu: Vec<u64>,
    /// Weights on that GPU [default: 0].
    #[arg(long, value_name = "SIZE", value_parser = sizes::bytes)]
    weights: Option<u64>,
    /// Activations on that GPU [default: 0].
    #[arg(long, value_name = "SIZE", value_parser = sizes::bytes)]
    activations: Option<u64>,
    /// What else the engine takes of that GPU: workspace, graphs, communication buffers [default: 0].
    #[arg(long, value_name = "SIZE", value_parser = sizes::bytes)]
    workspace: Option<u64>,
    /// Host memory for one GPU's total pool [default: as much as it takes].
    #[arg(long, value_name = "SIZE", value_parser = sizes::some_bytes)]
    host: Option<u64>,
    /// Tokens of a sequence at its end: prompt and what it may decode.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = sizes::tokens, required = true)]
    context: Vec<u32>,
    /// Tokens of the longest sequence that the model takes [default: the preset's].
    #[arg(long, value_name = "TOKENS", value_parser = sizes::tokens)]
    longest: Option<u32>,
    /// Sequences on one GPU, or max for as many as pay or fit [default: max].
    #[arg(long, value_name = "N|max", value_delimiter = ',', value_parser = sizes::batch,
          allow_negative_numbers = true)]
    batch: Vec<Batch>,
    /// Slots per sequence and layer as a share of the context, 0 < R <= 1, or auto for the largest that fits
    /// [default: auto].
    #[arg(long, value_name = "R|auto", value_delimiter = ',', value_parser = sizes::ratio,
          allow_negative_numbers = true)]
    ratio: Vec<Ratio>,
    /// Query rows per decode step: 1 without drafts [default: 1].
    #[arg(long, value_name = "Q", value_delimiter = ',', value_parser = sizes::count,
          allow_negative_numbers = true)]
    mtp: Vec<u32>,
    /// Micro-batches that the batch is divided into [default: 2].
    #[arg(long, value_name = "N", value_parser = sizes::count, allow_negative_numbers = true)]
    micro_batches: Option<u32>,
    /// Slots that a sequence keeps in each layer when as many sequences as possible are wanted [default: 6400].
    #[arg(long, value_name = "N", value_parser = sizes::count, allow_negative_numbers = true)]
    least_slots: Option<u32>,
    /// Whether residency tables take part in what has to fit [default: counted].
    #[arg(long, value_enum)]
    tables: Option<Tables>,
    /// Tokens that a step yields for each sequence, from 1 to --mtp: one for all, or one for each --mtp
    /// [default: 1].
    #[arg(long, value_name = "A", value_delimiter = ',', value_parser = sizes::positive, requires = "setup",
          allow_negative_numbers = true)]
    accept: Vec<f64>,
    #[command(flatten)]
    machine: Machine,
    /// Writes a report with pictures instead of tables: one HTML file; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Writes the result as JSON, whole or not at all; `-` is standard output, without the tables.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What becomes of the residency tables.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Tables {
    /// They have to fit with everything else.
    Counted,
    /// They are only reported.
    Beside,
}

/// What is planned: whose cache, and what is asked.
struct Job {
    model: Model,
    demand: Demand,
    accept: f64,
}

/// One plan of the sweep.
pub struct Point {
    /// Whose cache.
    pub model: &'static str,
    /// What was asked.
    pub demand: Demand,
    /// The plan, or why there is none.
    pub planned: Result<Planned>,
    /// What it yields, with a setup.
    pub gain: Option<Gain>,
}

impl Point {
    /// Whether it offloads, and that yields more than none would.
    pub fn pays(&self) -> bool {
        let offloads = self.planned.as_ref().is_ok_and(Planned::offloads);
        let more = |gain: &Gain| gain.outcome.throughput > gain.without.unwrap_or(0.0);
        offloads && self.gain.as_ref().is_some_and(more)
    }
}

/// What a plan yields.
pub struct Gain {
    /// The setup's name.
    pub setup: String,
    /// The link, where one was named.
    pub link: Option<String>,
    /// The plan's step.
    pub outcome: Outcome,
    /// Tokens a second without offload.
    pub without: Option<f64>,
    /// The smallest batch from which offload pays, where the best one was looked for: none where it never does.
    pub pays_from: Option<Option<u32>>,
    /// By batch, where the best one was looked for: ratio, and tokens a second.
    pub curve: Vec<(u32, f64, f64)>,
}

/// The values, or the one that stands for none.
fn or<T: Clone>(values: &[T], otherwise: T) -> Vec<T> {
    if values.is_empty() { vec![otherwise] } else { values.to_vec() }
}

impl Arguments {
    /// Every combination, in the order of the command line. A setup's model is the one that is not named.
    fn jobs(&self, setup: Option<&Setup>) -> Result<Vec<Job>> {
        let preset = setup.and_then(|setup| setup.file().model.preset.as_deref()).unwrap_or(replay::MODEL);
        let preset = sizes::model(preset).map_err(|what| Error::new(Kind::InvalidConfig, "plan").at(what))?;
        let (models, mtps) = (or(&self.model, preset), or(&self.mtp, 1));
        let accepts = simulate::accepts("plan", &self.accept, &mtps)?;
        let (batches, ratios) = (or(&self.batch, Batch::Most), or(&self.ratio, Ratio::Auto));
        let lists =
            [models.len(), self.gpu.len(), self.context.len(), mtps.len(), batches.len(), ratios.len()];
        let points = lists.iter().try_fold(1_usize, |all, list| all.checked_mul(*list));
        if points.is_none_or(|points| points > POINTS) {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at("more combinations than one sweep takes")
                .with("most", POINTS as u64)
                .hint("name fewer values"));
        }
        let mut jobs = Vec::new();
        for (model, gpu) in models.iter().flat_map(|model| self.gpu.iter().map(move |gpu| (model, *gpu))) {
            for (context, (mtp, accept)) in self
                .context
                .iter()
                .flat_map(|context| mtps.iter().zip(&accepts).map(move |mtp| (*context, mtp)))
            {
                for (batch, ratio) in
                    batches.iter().flat_map(|b| ratios.iter().map(move |ratio| (*b, *ratio)))
                {
                    let mut demand = self.demand(model, gpu, context);
                    (demand.query_rows, demand.batch, demand.ratio) = (*mtp, batch, ratio);
                    jobs.push(Job { model: *model, demand, accept: *accept });
                }
            }
        }
        Ok(jobs)
    }

    fn demand(&self, model: &Model, gpu: u64, context: u32) -> Demand {
        Demand {
            longest: self.longest.or_else(|| plan::longest_context(model.name)),
            weights: self.weights.unwrap_or(0),
            activations: self.activations.unwrap_or(0),
            workspace: self.workspace.unwrap_or(0),
            host: self.host,
            micro_batches: self.micro_batches.unwrap_or(2),
            least_slots: self.least_slots.unwrap_or(FEW_SLOTS),
            count_tables: self.tables != Some(Tables::Beside),
            ..Demand::new(model.shape, gpu, context)
        }
    }
}

/// Plans, without a word on time.
fn plain(job: &Job) -> Result<Point> {
    Ok(Point {
        model: job.model.name,
        demand: job.demand.clone(),
        planned: fit(plan::plan(&job.demand))?,
        gain: None,
    })
}

/// A plan that does not fit is an answer; one that makes no sense is an error.
fn fit<T>(planned: Result<T>) -> Result<Result<T>> {
    match planned {
        Err(error) if error.kind() != Kind::OutOfMemory => Err(error),
        planned => Ok(planned),
    }
}

/// Plans and simulates.
fn priced(job: &Job, linked: &mut Linked, source: &mut Source) -> Result<Point> {
    let simulator = &mut linked.simulator;
    let setup = simulator.setup().clone();
    let demand = Demand { shape: *setup.shape(), ..job.demand.clone() };
    let point = |planned, gain| Ok(Point { model: job.model.name, demand: demand.clone(), planned, gain });
    // A replayed trace counts at one ratio; of a search for the best batch the ratio is not known before.
    let frame = match fit(plan::plan(&demand))? {
        Ok(planned) => planned,
        Err(error) => return point(Err(error), None),
    };
    let misses = source.at(&setup, frame.ratio, demand.query_rows)?;
    let options = Options { misses, ..Options::default() };
    let search = (demand.batch, demand.ratio) == (Batch::Most, Ratio::Auto) && !source.is_trace();
    let (mut curve, mut pays_from) = (Vec::new(), None);
    let priced = if search {
        let worth = worth::worth(&demand, job.accept, &options, simulator)?;
        let of = |priced: &Priced| (priced.planned.batch, priced.planned.ratio, priced.outcome.throughput);
        curve = worth.without.iter().chain(&worth.with).map(of).collect();
        pays_from = Some(worth.pays_from);
        worth.most().cloned()
    } else {
        match worth::price(&demand, job.accept, &options, simulator) {
            Err(error) if worth::is_unknown(&error) => {
                let mut planned = frame;
                planned.notes.push(Note::Unknown);
                return point(Ok(planned), None);
            }
            priced => Some(priced?),
        }
    };
    let Some(Priced { planned, outcome, without }) = priced else { return point(Ok(frame), None) };
    let (setup, link) = (setup.name().to_owned(), linked.link.clone());
    point(Ok(planned), Some(Gain { setup, link, outcome, without, pays_from, curve }))
}

/// Plans every combination. One that does not fit is an error only where nothing fits.
fn sweep(arguments: &Arguments) -> Result<Vec<Point>> {
    let setup = arguments.machine.setup.as_deref().map(simulate::read_setup).transpose()?;
    let jobs = arguments.jobs(setup.as_ref())?;
    let mut points = Vec::with_capacity(jobs.len());
    let bar = output::progress("plan", (jobs.len() * arguments.machine.links()) as u64);
    match &setup {
        None => {
            for job in &jobs {
                points.push(plain(job)?);
                bar.inc(1);
            }
        }
        Some(setup) => {
            for jobs in jobs.chunk_by(|a, b| a.model == b.model) {
                let setup = match jobs.first().filter(|_| !arguments.model.is_empty()) {
                    Some(job) => setup.of_model(job.model.name)?,
                    None => setup.clone(),
                };
                let mut source = arguments.machine.source(&setup)?;
                for mut linked in arguments.machine.of(&setup)? {
                    for job in jobs {
                        points.push(priced(job, &mut linked, &mut source)?);
                        bar.inc(1);
                    }
                }
            }
        }
    }
    bar.finish_and_clear();
    let fits = points.iter().any(|point| point.planned.is_ok());
    match points.iter().find_map(|point| point.planned.as_ref().err()) {
        Some(error) if !fits => Err(error.clone()),
        _ => Ok(points),
    }
}

/// `forebay plan`.
///
/// # Errors
/// Those of the library's plan, of a sweep that is too large, and of writing the result.
pub fn command(arguments: &Arguments) -> Result<()> {
    let targets = [("--json", arguments.json.as_deref()), ("--html", arguments.html.as_deref())];
    output::check_targets("plan", &targets)?;
    let points = sweep(arguments)?;
    if let Some(path) = &arguments.json {
        output::write_file(path, &plan_json::text(&points)?)?;
    }
    if let Some(path) = &arguments.html {
        return output::write_file(path, html::plans::page(&points).as_bytes());
    }
    if arguments.json.as_deref().is_some_and(output::is_stdout) {
        return Ok(());
    }
    output::print(plan_report::text(&points, output::speaks_utf8()).as_bytes())
}
