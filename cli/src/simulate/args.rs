//! The arguments of `forebay simulate`.

use std::path::PathBuf;

use clap::ValueEnum;
use forebay::overlap::{Overlap, Table};
use forebay::predict::plan::Ratio;
use forebay::predict::simulate::Order;

use crate::input::machine::Machine;
use crate::input::sizes::{self, Size};
use crate::present::terminal::LookArguments;

const AFTER_HELP: &str = "\
Lists, separated by commas, make a sweep: one step for each combination. Of misses by step every step is run, all in \
one order by layer: the figures are their mean, and pictures show the longest.
Throughput is of 8 GPUs, in tokens a second; OTPS of one sequence. Exposed: what the step takes beyond \
the same step without misses.";

/// The arguments of `forebay simulate`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    #[command(flatten)]
    pub machine: Machine,
    /// GPUs that the experts are divided over, instead of the setup's: a node is 8. Other than those of the setup's
    /// costs are extrapolated, and marked so (docs/simulator.md).
    #[arg(long, value_name = "N", value_parser = sizes::count, allow_negative_numbers = true)]
    pub gpus: Option<u32>,
    /// Prints what forebay's own kernels should take of a GPU, before any is measured, and by which terms, instead of a
    /// step (docs/gpu-notes.md).
    #[arg(long, conflicts_with_all = ["setup", "context", "batch", "html", "timeline", "perfetto", "write_table"])]
    pub kernels: bool,
    /// Another price of --kernels, such as read_gb_s=25 or round_trip_us=1.2..1.8; a wrong name is told all of them.
    #[arg(long, value_name = "NAME=PRICE", requires = "kernels")]
    pub assume: Vec<String>,
    /// Tokens of each sequence at its end.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = sizes::tokens,
          required_unless_present = "kernels")]
    pub context: Vec<u32>,
    /// Query rows per decode step: 1 without drafts [default: 1].
    #[arg(long, value_name = "Q", value_delimiter = ',', value_parser = sizes::count,
          allow_negative_numbers = true)]
    pub mtp: Vec<u32>,
    /// Tokens that a step yields for each sequence, from 1 to --mtp: one for all, or one for each --mtp
    /// [default: 1].
    #[arg(long, value_name = "A", value_delimiter = ',', value_parser = sizes::positive,
          allow_negative_numbers = true)]
    pub accept: Vec<f64>,
    /// Sequences on one GPU.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = sizes::count,
          required_unless_present = "kernels", allow_negative_numbers = true)]
    pub batch: Vec<u32>,
    /// Slots per sequence and layer as a share of the context at its end, 0 < R <= 1, or auto for the largest
    /// that fits --cache [default: auto].
    #[arg(long, value_name = "R|auto", value_delimiter = ',', value_parser = sizes::ratio,
          allow_negative_numbers = true)]
    pub ratio: Vec<Ratio>,
    /// Memory of one GPU for index keys and rows, without residency tables: what --ratio auto fills.
    #[arg(long, value_name = "SIZE", value_parser = sizes::some_size)]
    pub cache: Option<Size>,
    /// What hides the gather; best takes for each layer the order of least time. Several are set side by side
    /// [default: best].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub overlap: Vec<Choice>,
    /// Runs each layer in the order that this overlap table says, instead of a choice.
    #[arg(long, value_name = "FILE", conflicts_with = "overlap")]
    pub table: Option<PathBuf>,
    /// Writes the order of each layer as an overlap table, which an engine loads. Of a single point.
    #[arg(long, value_name = "FILE")]
    pub write_table: Option<PathBuf>,
    /// Whether the batch runs as two micro-batches [default: as the setup says].
    #[arg(long, value_enum)]
    pub two_batch: Option<Switch>,
    /// Gives each micro-batch a compute stream of its own: one computes while the other waits for rows.
    #[arg(long)]
    pub fill: bool,
    /// Gigabytes a second (1e9) that cross the link to the device beside the step: warm-up.
    #[arg(long, value_name = "GB/S", value_parser = sizes::positive, allow_negative_numbers = true)]
    pub traffic_up: Option<f64>,
    /// Gigabytes a second that cross it to the host: transfer.
    #[arg(long, value_name = "GB/S", value_parser = sizes::positive, allow_negative_numbers = true)]
    pub traffic_down: Option<f64>,
    /// Draws the step, a lane for each stream: an SVG picture. Of a single point.
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
    /// The layer that --timeline, or --html of a single point, shows enlarged, with its neighbours [default: the one
    /// with most exposed time].
    #[arg(long, value_name = "LAYER")]
    pub layer: Option<u32>,
    /// Writes the step as trace events in JSON, for Perfetto. Of a single point.
    #[arg(long, value_name = "FILE")]
    pub perfetto: Option<PathBuf>,
    /// Writes a report with pictures instead of tables: one HTML file; `-` is standard output. Of a single point it
    /// shows the step's timeline.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Writes the result as JSON, whole or not at all; `-` is standard output, without the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub look: LookArguments,
}

/// An order, or the choice by layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// Nothing hides it: the order that engines run today.
    None,
    /// Attention on resident rows hides it.
    Da,
    /// The indexer's second half hides it too.
    Dba,
    /// For each layer the order of least time.
    Best,
    /// As --table says.
    #[value(skip)]
    Table,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// It does.
    On,
    /// It does not.
    Off,
}

impl Choice {
    pub fn order(self, table: Option<&Table>) -> Order {
        match self {
            Choice::Table => Order::Table(table.map(|table| table.by_layer.clone()).unwrap_or_default()),
            Choice::None => Order::All(Overlap::None),
            Choice::Da => Order::All(Overlap::Da),
            Choice::Dba => Order::All(Overlap::Dba),
            Choice::Best => Order::ByLayer,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Choice::None => "none",
            Choice::Da => "da",
            Choice::Dba => "dba",
            Choice::Best => "best",
            Choice::Table => "table",
        }
    }
}
