//! The arguments of `forebay simulate`.

use std::path::PathBuf;

use clap::ValueEnum;
use forebay::overlap::{Overlap, Table};
use forebay::predict::plan::Ratio;
use forebay::predict::simulate::Order;

use super::passes::PrefillArguments;
use super::shards::ShardArguments;
use crate::input::machine::Machine;
use crate::input::sizes::{self, Model, Size};
use crate::present::terminal::LookArguments;

const AFTER_HELP: &str = "\
Lists, separated by commas, make a sweep: one step for each combination. With misses by step, every step is run, all \
in one order by layer; the figures are their mean, and pictures show the longest.
With --elastic the slots of a layer are fixed, and the sequences that run divide them: a small batch has slots for all \
its rows and misses nothing.
Throughput is tokens a second of 8 GPUs; OTPS is output tokens a second of one sequence. Exposed: how much longer the \
step takes than without misses.

The attention weights of 8 ranks are pulled before each layer. What does a step wait for them?

  forebay simulate --setup ess --context 32K --batch 160 --ratio 0.21 \\
      --shard mla --dp 8 --timeline step.svg";

/// The arguments of `forebay simulate`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    #[command(flatten)]
    pub machine: Machine,
    /// Another model on the setup's machine, with the costs of its roofline and the setup's misses at the same relative
    /// depth; layers that share a selection have the misses of the one that selects [default: the setup's].
    #[arg(long, value_name = "NAME", value_parser = sizes::model, requires = "setup")]
    pub model: Option<Model>,
    /// GPUs that the experts are divided over, instead of the setup's: a node is 8. For other numbers than the
    /// setup's, costs are extrapolated, and marked as such (docs/simulator.md).
    #[arg(long, value_name = "N", value_parser = sizes::count, allow_negative_numbers = true)]
    pub gpus: Option<u32>,
    /// Prints how long forebay's own kernels should take on a GPU, term by term, before any is measured, instead of a
    /// step (docs/gpu-notes.md).
    #[arg(long, conflicts_with_all = ["setup", "context", "batch", "elastic", "pool_slots", "model", "html",
                                      "timeline", "perfetto", "write_table", "shard"])]
    pub kernels: bool,
    /// Sets a price of --kernels, such as read_gb_s=25 or round_trip_us=1.2..1.8; the error for a wrong name lists
    /// all.
    #[arg(long, value_name = "NAME=PRICE", requires = "kernels")]
    pub assume: Vec<String>,
    /// Tokens of each sequence at its end.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = sizes::tokens,
          required_unless_present_any = ["kernels", "prefill"])]
    pub context: Vec<u32>,
    /// Query rows per decode step: 1 without drafts [default: 1].
    #[arg(long, value_name = "Q", value_delimiter = ',', value_parser = sizes::count,
          allow_negative_numbers = true)]
    pub mtp: Vec<u32>,
    /// Tokens that a step yields for each sequence, from 1 to --mtp: one value for all, or one for each --mtp
    /// [default: 1].
    #[arg(long, value_name = "A", value_delimiter = ',', value_parser = sizes::positive,
          allow_negative_numbers = true)]
    pub accept: Vec<f64>,
    /// Sequences on one GPU.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = sizes::count,
          required_unless_present_any = ["kernels", "prefill"], allow_negative_numbers = true)]
    pub batch: Vec<u32>,
    /// Slots per sequence and layer as a share of the context at its end, 0 < R <= 1, or auto for the largest ratio
    /// that fits --cache [default: auto].
    #[arg(long, value_name = "R|auto", value_delimiter = ',', value_parser = sizes::ratio,
          allow_negative_numbers = true)]
    pub ratio: Vec<Ratio>,
    /// Memory of one GPU for index keys and rows, without residency tables; --ratio auto and --elastic fill it.
    #[arg(long, value_name = "SIZE", value_parser = sizes::some_size)]
    pub cache: Option<Size>,
    /// Elastic budgets: one pool of slots, which the sequences of each --batch divide in equal parts, up to the whole
    /// context. --cache fills the pool at the largest --batch.
    #[arg(long, conflicts_with = "ratio")]
    pub elastic: bool,
    /// With --elastic: slots of one layer's pool, all sequences together, instead of --cache.
    #[arg(long, value_name = "N", value_parser = sizes::count, requires = "elastic",
          conflicts_with_all = ["cache", "ratio"], allow_negative_numbers = true)]
    pub pool_slots: Option<u32>,
    /// The order of a layer's work, which decides what hides the gather; best takes for each layer the fastest order.
    /// Several are compared [default: best].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub overlap: Vec<Choice>,
    /// Runs each layer in the order of this overlap table, instead of choosing orders.
    #[arg(long, value_name = "FILE", conflicts_with = "overlap")]
    pub table: Option<PathBuf>,
    /// Writes the order of each layer as an overlap table for an engine. For a single point.
    #[arg(long, value_name = "FILE")]
    pub write_table: Option<PathBuf>,
    /// Whether the batch runs as two micro-batches [default: as the setup says].
    #[arg(long, value_enum)]
    pub two_batch: Option<Switch>,
    /// Gives each micro-batch a compute stream of its own, so that one computes while the other waits for rows.
    #[arg(long)]
    pub fill: bool,
    /// Gigabytes a second (1e9) of other traffic on the link to the device during the step: warm-up.
    #[arg(long, value_name = "GB/S", value_parser = sizes::positive, allow_negative_numbers = true)]
    pub traffic_up: Option<f64>,
    /// Gigabytes a second of other traffic on the link to the host during the step: transfer.
    #[arg(long, value_name = "GB/S", value_parser = sizes::positive, allow_negative_numbers = true)]
    pub traffic_down: Option<f64>,
    #[command(flatten)]
    pub shards: ShardArguments,
    #[command(flatten)]
    pub prefill: PrefillArguments,
    /// Draws the step as an SVG picture, with a lane for each stream. For a single point.
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
    /// The layer that --timeline, or --html of a single point, enlarges, with its neighbours [default: the layer
    /// with most exposed time].
    #[arg(long, value_name = "LAYER")]
    pub layer: Option<u32>,
    /// Writes the step as trace events in JSON, for Perfetto. For a single point.
    #[arg(long, value_name = "FILE")]
    pub perfetto: Option<PathBuf>,
    /// Writes a report with pictures instead of tables as one HTML file; `-` prints it. For a single point it
    /// shows the step's timeline.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Writes the result as JSON, atomically; `-` prints it instead of the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub look: LookArguments,
}

/// An order, or a choice by layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// Nothing hides it: the order that engines run today.
    None,
    /// Attention on resident rows hides it.
    Da,
    /// The indexer's second half hides it too.
    Dba,
    /// The layers before hide it, in layers that another one selects for; the layers that select run in da.
    Ahead,
    /// For each layer the order of least time.
    Best,
    /// The orders of --table.
    #[value(skip)]
    Table,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Two micro-batches.
    On,
    /// One batch.
    Off,
}

impl Choice {
    pub fn order(self, table: Option<&Table>) -> Order {
        match self {
            Choice::Table => Order::Table(table.map(|table| table.by_layer.clone()).unwrap_or_default()),
            Choice::None => Order::All(Overlap::None),
            Choice::Da => Order::All(Overlap::Da),
            Choice::Dba => Order::All(Overlap::Dba),
            Choice::Ahead => Order::All(Overlap::Ahead),
            Choice::Best => Order::ByLayer,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Choice::None => "none",
            Choice::Da => "da",
            Choice::Dba => "dba",
            Choice::Ahead => "ahead",
            Choice::Best => "best",
            Choice::Table => "table",
        }
    }
}
