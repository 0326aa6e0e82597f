//! The arguments of `forebay plan`.

use std::path::PathBuf;

use clap::ValueEnum;
use forebay::predict::plan::{Batch, Ratio};

use super::dense::args::PageArguments;
use super::deployment::AttentionName;
use super::prefill::args::PrefillArguments;
use super::shards::WeightArguments;
use crate::input::machine::Machine;
use crate::input::sizes::{self, DenseModel, Model, Size};
use crate::present::terminal::LookArguments;

const AFTER_HELP: &str = "\
A node of 8 H200 serves DeepSeek-V3.2 at 64K. Does offload pay, at which batch and ratio, and how much?

  forebay plan --setup ess --gpus 8 --gpu 141GB --workspace 8GB \\
      --context 64K --mtp 2 --accept 1.7

Eight ranks of a host share the attention weights of DeepSeek-R1 instead of keeping them once each. What does it save?

  forebay plan --model deepseek-r1 --gpu 80GB --context 4K --shard mla --dp 8

Do they wait for each other's weights on 8 H20, and does it pay?

  forebay plan --setup r1-h20 --gpu 96GiB --context 4K --shard o_proj --dp 8

How many sequences of a dense model fit, and what do 64 GiB of host memory hold beside them?

  forebay plan --dense llama-3.1-70b --gpu 80GiB --weights 35GB --value-bytes 1 --context 32K --host 64GiB

What does a prefill instance of 8 H200 need for prompts of 16K in one pass, or of 128K in chunks?

  forebay plan --role prefill --gpus 8 --gpu 141GB --workspace 8GB --context 16K,128K

Lists, separated by commas, make a sweep: one plan for each combination.
Sizes have a unit: 80GiB, 141GB. Tokens: 4096, 32K (of 1024 each).
A batch that fits with all rows on the device needs no offload; the plan says so. With --setup each plan is simulated, \
and --batch max is the batch of most tokens a second; without, the one that leaves --least-slots.";

/// The arguments of `forebay plan`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// The model whose cache is planned [default: the setup's, or deepseek-v3.2].
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = sizes::model)]
    pub model: Vec<Model>,
    /// Plans the cache of a dense model instead: pages on the GPU for all tokens of its sequences, and --host as second
    /// tier for parked sequences and prefixes. Needs --weights.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = sizes::dense_model, requires = "weights",
          conflicts_with_all = ["model", "setup", "gpus", "attention", "shard", "host_stride", "longest", "ratio",
                                "least_slots", "tables", "html"])]
    pub dense: Vec<DenseModel>,
    #[command(flatten)]
    pub pages: PageArguments,
    #[command(flatten)]
    pub prefill: PrefillArguments,
    /// Memory of one GPU.
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = sizes::some_size, required = true)]
    pub gpu: Vec<Size>,
    /// GPUs that serve together: whole nodes, or a part of one. The setup says how many GPUs a node has, 8 without one
    /// [default: the setup's; without one 8, or the fewest nodes, doubled, on which the model's weights leave room].
    #[arg(long, value_name = "N", value_parser = sizes::gpus, allow_negative_numbers = true)]
    pub gpus: Option<u32>,
    /// How attention is divided over a node's GPUs: by sequences (dp), or by heads (tp). With tp each GPU holds the
    /// cache of all sequences [default: dp].
    #[arg(long, value_enum)]
    pub attention: Option<AttentionName>,
    /// Weights on each GPU; 0 for none [default: the model's published checkpoint, divided over --gpus].
    #[arg(long, value_name = "SIZE", value_parser = sizes::size)]
    pub weights: Option<Size>,
    #[command(flatten)]
    pub modules: WeightArguments,
    /// Activations on each GPU [default: 0; with --role prefill the published figure, scaled by the tokens of a pass].
    #[arg(long, value_name = "SIZE", value_parser = sizes::size)]
    pub activations: Option<Size>,
    /// Other memory that the engine takes on each GPU: workspace, graphs, communication buffers [default: 0].
    #[arg(long, value_name = "SIZE", value_parser = sizes::size)]
    pub workspace: Option<Size>,
    /// Host memory for one GPU's total pool [default: as much as the pool needs]; with --dense, for the second tier
    /// [default: none]; with --role prefill, for the staging ring [default: none, the ring is on the GPU].
    #[arg(long, value_name = "SIZE", value_parser = sizes::some_size)]
    pub host: Option<Size>,
    /// Bytes from one row to the next in host memory [default: the model's row, rounded up to a multiple of 64].
    #[arg(long, value_name = "BYTES", value_parser = sizes::count, allow_negative_numbers = true)]
    pub host_stride: Option<u32>,
    /// Tokens of a sequence at its end: the prompt and the tokens that it may decode; with --role prefill the prompt
    /// alone.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = sizes::tokens, required = true)]
    pub context: Vec<u32>,
    /// Tokens of the longest sequence that the model takes, at most the setup's [default: the setup's, or the
    /// preset's].
    #[arg(long, value_name = "TOKENS", value_parser = sizes::tokens)]
    pub longest: Option<u32>,
    /// Sequences on one GPU, or max for as many as pay or fit [default: max]; with --role prefill prompts of a pass, a
    /// number [default: 1].
    #[arg(long, value_name = "N|max", value_delimiter = ',', value_parser = sizes::batch,
          allow_negative_numbers = true)]
    pub batch: Vec<Batch>,
    /// Slots per sequence and layer as a share of the context at its end, 0 < R <= 1, or auto for the largest ratio
    /// that fits [default: auto].
    #[arg(long, value_name = "R|auto", value_delimiter = ',', value_parser = sizes::ratio,
          allow_negative_numbers = true)]
    pub ratio: Vec<Ratio>,
    /// Query rows per decode step: 1 without drafts [default: 1].
    #[arg(long, value_name = "Q", value_delimiter = ',', value_parser = sizes::count,
          allow_negative_numbers = true)]
    pub mtp: Vec<u32>,
    /// Micro-batches that the batch is divided into; with --setup 1 or 2 [default: as the setup says, or 2; with
    /// --dense 1].
    #[arg(long, value_name = "N", value_parser = sizes::count, allow_negative_numbers = true)]
    pub micro_batches: Option<u32>,
    /// Slots that each sequence keeps in each layer when the plan maximises sequences [default: 6400].
    #[arg(long, value_name = "N", value_parser = sizes::count, allow_negative_numbers = true)]
    pub least_slots: Option<u32>,
    /// Whether residency tables, and the GPU's page tables of host memory, count as memory that has to fit
    /// [default: counted].
    #[arg(long, value_enum)]
    pub tables: Option<Tables>,
    /// Tokens that a step yields for each sequence, from 1 to --mtp: one value for all, or one for each --mtp
    /// [default: 1].
    #[arg(long, value_name = "A", value_delimiter = ',', value_parser = sizes::positive, requires = "setup",
          allow_negative_numbers = true)]
    pub accept: Vec<f64>,
    /// The fewest tokens a second that each sequence must decode: slower batches are not recommended [default: any].
    #[arg(long, value_name = "N", value_parser = sizes::positive, requires = "setup",
          allow_negative_numbers = true)]
    pub min_otps: Option<f64>,
    #[command(flatten)]
    pub machine: Machine,
    /// Writes a report with pictures instead of tables as one HTML file; `-` prints it.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Writes the result as JSON, atomically; `-` prints it instead of the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub look: LookArguments,
}

/// How the residency tables and the GPU's page tables of host memory count.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Tables {
    /// They have to fit with everything else.
    Counted,
    /// They are only reported.
    Beside,
}
