//! `forebay plan`: what fits on a GPU, at which ratio, and how many sequences that makes.
//!
//! Lists make a sweep: one plan for each combination. Of a sweep, a plan that does not fit is a line that says so; a
//! plan that makes no sense, and a single one that does not fit, are errors.

use std::path::PathBuf;

use clap::ValueEnum;
use forebay::predict::plan::{self, Batch, Demand, FEW_SLOTS, Planned, Ratio};
use forebay::{Error, Kind, Result};

use crate::sizes::{self, Model};
use crate::{output, plan_json, plan_report, replay};

/// The most plans of one sweep.
const POINTS: usize = 100_000;

const AFTER_HELP: &str = "\
Lists, separated by commas, make a sweep: one plan for each combination.
Sizes have a unit: 80GiB, 141GB. Tokens: 4096, 32K (of 1024 each).
A batch that fits with all rows on the device needs no offload; the plan says so.";

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

/// One plan of the sweep.
pub struct Point {
    /// Whose cache.
    pub model: &'static str,
    /// What was asked.
    pub demand: Demand,
    /// The plan, or why there is none.
    pub planned: Result<Planned>,
}

/// The values, or the one that stands for none.
fn or<T: Clone>(values: &[T], otherwise: T) -> Vec<T> {
    if values.is_empty() { vec![otherwise] } else { values.to_vec() }
}

impl Arguments {
    /// Every combination, in the order of the command line.
    fn demands(&self) -> Result<Vec<(&'static str, Demand)>> {
        let preset = sizes::model(replay::MODEL);
        let preset = preset.map_err(|what| Error::new(Kind::Internal, "plan").at(what))?;
        let (models, mtps) = (or(&self.model, preset), or(&self.mtp, 1));
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
        let mut demands = Vec::new();
        for (model, gpu) in models.iter().flat_map(|model| self.gpu.iter().map(move |gpu| (model, *gpu))) {
            for (context, mtp) in
                self.context.iter().flat_map(|context| mtps.iter().map(move |mtp| (*context, *mtp)))
            {
                for (batch, ratio) in
                    batches.iter().flat_map(|batch| ratios.iter().map(move |ratio| (*batch, *ratio)))
                {
                    let demand = Demand {
                        longest: self.longest.or_else(|| plan::longest_context(model.name)),
                        weights: self.weights.unwrap_or(0),
                        activations: self.activations.unwrap_or(0),
                        workspace: self.workspace.unwrap_or(0),
                        host: self.host,
                        query_rows: mtp,
                        micro_batches: self.micro_batches.unwrap_or(2),
                        batch,
                        ratio,
                        least_slots: self.least_slots.unwrap_or(FEW_SLOTS),
                        count_tables: self.tables != Some(Tables::Beside),
                        ..Demand::new(model.shape, gpu, context)
                    };
                    demands.push((model.name, demand));
                }
            }
        }
        Ok(demands)
    }
}

/// Plans every demand. One that does not fit is an error only where nothing fits.
fn sweep(demands: Vec<(&'static str, Demand)>) -> Result<Vec<Point>> {
    let bar = output::progress("plan", demands.len() as u64);
    let mut points = Vec::with_capacity(demands.len());
    for (model, demand) in demands {
        let planned = match plan::plan(&demand) {
            Err(error) if error.kind() != Kind::OutOfMemory => return Err(error),
            planned => planned,
        };
        points.push(Point { model, demand, planned });
        bar.inc(1);
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
    let points = sweep(arguments.demands()?)?;
    if let Some(path) = &arguments.json {
        output::write_file(path, &plan_json::text(&points)?)?;
    }
    if arguments.json.as_deref().is_some_and(output::is_stdout) {
        return Ok(());
    }
    output::print(plan_report::text(&points, output::speaks_utf8()).as_bytes())
}
