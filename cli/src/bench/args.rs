//! The arguments of `forebay bench`.

use std::path::PathBuf;

use clap::ValueEnum;

use crate::input::device::{DeviceName, Pinned};
use crate::input::sizes;
use crate::present::terminal::LookArguments;

const AFTER_HELP: &str = "\
Every time is shown next to its ceiling: the least time that this machine allows, measured in the same run. Every \
slot, fetched row and digest is compared with the rule on the host; a difference is an error, and there is no figure.

JSON: a list, first the device with its ceilings, then one entry for each figure. With --json-lines the same entries, \
a line each: a run that is killed leaves what it has measured.";

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Group {
    /// Rows from host to device.
    Gather,
    /// Rows from device to host.
    Scatter,
    /// Selections to slots: the device's resolve.
    Resolve,
    /// Resolve, and the gather of its misses.
    ResolveGather,
    /// The commit: accepted rows to their slots, in every layer.
    Commit,
    /// The warm-up of a prompt.
    WarmUp,
    /// A step's resolves, gathers and scatters alone, with nothing to do.
    Nodes,
    /// Pages of a dense cache, from host to device and back.
    Pages,
    /// A layer of sharded weights, from a peer and from the host.
    Pull,
    /// Steps whose layers are pulled while others run.
    Ring,
    /// A whole decode step in each order, captured.
    Step,
}

/// The arguments of `forebay bench`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// The device to measure: host, or cuda:N for GPU N [default: host].
    #[arg(long, value_name = "DEVICE", value_parser = DeviceName::parse)]
    pub device: Option<DeviceName>,
    /// The driver's library, for tests.
    #[arg(long, value_name = "FILE", hide = true)]
    pub driver: Option<String>,
    /// Groups to measure; several, separated by commas [default: all].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "GROUP")]
    pub only: Vec<Group>,
    /// Tiny shapes and few rounds, in seconds: shows that everything works, and nothing about speed.
    #[arg(long)]
    pub quick: bool,
    /// Steps timed for each figure [default: 15; 3 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000),
          allow_negative_numbers = true)]
    pub rounds: Option<u32>,
    /// Host memory for the rows that are gathered and scattered, and for the rows of steps, such as 64GiB; at most
    /// seven eighths of what is free, on the GPU's NUMA node if there is one [default: a fifth of the free memory, up
    /// to 64 GiB for a GPU and 1.5 GiB for the host]. Steps take at least one prompt and all sequences' tails.
    #[arg(long, value_name = "BYTES", value_parser = sizes::some_bytes)]
    pub pool: Option<u64>,
    /// Measures only one gather, of this many rows of 656 bytes at a stride of 704, for a profiler: two warm-up calls,
    /// then the timed ones, and no other launch of its kernel; the host packs no rows.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000),
          allow_negative_numbers = true)]
    pub rows: Option<u32>,
    /// Measures only one resolve, of this many sequences with one query row, a budget of 6,881 and 13.4% misses, for a
    /// profiler: four warm-up launches, one a layer, then the timed ones, a multiple of four.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=160),
          allow_negative_numbers = true)]
    pub batch: Option<u32>,
    /// GPU: thread blocks of a gather.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_535),
          allow_negative_numbers = true)]
    pub gather_blocks: Option<u32>,
    /// GPU: threads of a block, a multiple of 32 up to 512.
    #[arg(long, value_name = "N", value_parser = threads, allow_negative_numbers = true)]
    pub threads: Option<u32>,
    /// GPU, from compute capability 9.0 on: gathers by bulk copies.
    #[arg(long)]
    pub bulk: bool,
    /// GPU, from compute capability 9.0 and driver 12.3 on: launches a kernel before the preceding ones on its stream
    /// have ended. It has an effect in the order `none`: in DA and DBA there are events between the kernels.
    #[arg(long)]
    pub programmatic: bool,
    /// The pinned memory of the rows: registered is the system's, driver is the driver's own in pages of 2 MiB (GPU
    /// only, CUDA 12.2 or newer).
    #[arg(long, value_enum, default_value = "registered")]
    pub pinned: Pinned,
    /// GPU: runs steps next to persistent kernels: the engine's work has one long block on each multiprocessor.
    #[arg(long)]
    pub persistent: bool,
    /// GPU: multiprocessors that the persistent kernels leave free.
    #[arg(long, value_name = "N", requires = "persistent", allow_negative_numbers = true)]
    pub leave_sms: Option<u32>,
    /// Draws the figures as an SVG picture.
    #[arg(long, value_name = "FILE")]
    pub picture: Option<PathBuf>,
    /// Writes the figures as JSON, atomically; `-` prints them instead of the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Writes each figure as a line of JSON as soon as it is known, into a new file.
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
