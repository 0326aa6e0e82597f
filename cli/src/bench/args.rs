//! The arguments of `forebay bench`.

use std::path::PathBuf;

use clap::ValueEnum;

use crate::input::device::{DeviceName, Pinned};
use crate::input::sizes;
use crate::present::terminal::LookArguments;

const AFTER_HELP: &str = "\
Every time stands beside its ceiling: the least time that this machine allows, measured in the same run. Every slot, \
fetched row and digest is compared with the rule on the host; what differs is an error and no figure.

JSON: a list, first the device with its ceilings, then one entry for each figure. With --json-lines the same entries, \
a line each: a run that is killed leaves what it has measured.";

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Group {
    /// Rows from host to device.
    Gather,
    /// Rows from device to host.
    Scatter,
    /// Selections to slots.
    Resolve,
    /// Resolve, and the rows that it missed.
    ResolveGather,
    /// Accepted rows to their slots, in every layer.
    Commit,
    /// What a prompt leaves resident.
    WarmUp,
    /// A step's resolves, gathers and scatters by themselves, with nothing to do.
    Nodes,
    /// A whole decode step in each order, captured.
    Step,
}

/// The arguments of `forebay bench`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// What is measured: host, or cuda:N for the GPU of that number [default: host].
    #[arg(long, value_name = "DEVICE", value_parser = DeviceName::parse)]
    pub device: Option<DeviceName>,
    /// The driver's library, for tests.
    #[arg(long, value_name = "FILE", hide = true)]
    pub driver: Option<String>,
    /// Which groups; several, separated by commas [default: all].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "GROUP")]
    pub only: Vec<Group>,
    /// Tiny shapes and few rounds, in seconds: shows that all works, and says nothing about speed.
    #[arg(long)]
    pub quick: bool,
    /// Steps timed for each figure [default: 15; 3 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000),
          allow_negative_numbers = true)]
    pub rounds: Option<u32>,
    /// Host memory from which rows are gathered, to which they are scattered, and which steps run over, such as 64GiB;
    /// at most seven eighths of what is free, on the GPU's NUMA node where there is one [default: a fifth of these, up
    /// to 64 GiB for a GPU and 1.5 GiB for the host]. Steps take one prompt and all sequences' tails in any case.
    #[arg(long, value_name = "BYTES", value_parser = sizes::some_bytes)]
    pub pool: Option<u64>,
    /// One gather alone, of so many rows of 656 bytes that stand 704 apart, for a profiler: two calls that warm up,
    /// then the timed ones, and no other launch of its kernel; none are packed on the host.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000),
          allow_negative_numbers = true)]
    pub rows: Option<u32>,
    /// One resolve alone, of so many sequences with one query row, a budget of 6,881 and 13.4% misses, for a profiler:
    /// four launches that warm up, a layer each, then the timed ones, a multiple of four.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=160),
          allow_negative_numbers = true)]
    pub batch: Option<u32>,
    /// Of a GPU: thread blocks of a gather.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_535),
          allow_negative_numbers = true)]
    pub gather_blocks: Option<u32>,
    /// Of a GPU: threads of a block, a multiple of 32 up to 512.
    #[arg(long, value_name = "N", value_parser = threads, allow_negative_numbers = true)]
    pub threads: Option<u32>,
    /// Of a GPU from 9.0 on: gathers by bulk copies.
    #[arg(long)]
    pub bulk: bool,
    /// Of a GPU from 9.0 on, driver 12.3 or newer: launches kernels before those in front of them on the same stream
    /// have ended. It acts in the order `none`: in DA and DBA events stand between them.
    #[arg(long)]
    pub programmatic: bool,
    /// Whose pinned memory the rows stand in: registered is the system's, driver is the driver's own in pages of 2 MiB
    /// (a GPU's alone, CUDA 12.2 or newer).
    #[arg(long, value_enum, default_value = "registered")]
    pub pinned: Pinned,
    /// Of a GPU: steps run beside persistent kernels: the engine's work has one long block on each multiprocessor.
    #[arg(long)]
    pub persistent: bool,
    /// Of a GPU: multiprocessors that these leave free.
    #[arg(long, value_name = "N", requires = "persistent", allow_negative_numbers = true)]
    pub leave_sms: Option<u32>,
    /// Draws the figures: an SVG picture.
    #[arg(long, value_name = "FILE")]
    pub picture: Option<PathBuf>,
    /// Writes the figures as JSON, whole or not at all; `-` is standard output, without the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Writes each figure as a line of JSON once it is known, into a new file.
    #[arg(long, value_name = "FILE")]
    pub json_lines: Option<PathBuf>,
    #[command(flatten)]
    pub look: LookArguments,
}

fn threads(text: &str) -> std::result::Result<u32, String> {
    match text.parse::<u32>() {
        Ok(threads) if (32..=512).contains(&threads) && threads.is_multiple_of(32) => Ok(threads),
        _ => Err("not a multiple of 32 from 32 to 512".to_owned()),
    }
}
