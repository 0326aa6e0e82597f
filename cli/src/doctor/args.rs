//! The arguments of `forebay doctor`.

use std::path::PathBuf;

use crate::input::device::DeviceName;
use crate::present::terminal::LookArguments;

const AFTER_HELP: &str = "\
States: ok; note, worth knowing; warning, costs speed or room; problem, does not work. Status: 0 without problems, 1 \
with some, 2 for bad input. Rates are measured with runs of \
256 MiB, for a few seconds a GPU, best while nothing else uses it. The JSON holds them as forebay fit --rates takes \
them (docs/json.md).";

/// The arguments of `forebay doctor`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// What to look at beside the machine: host, or cuda:N; without it every GPU there is.
    #[arg(long, value_name = "DEVICE", value_parser = DeviceName::parse)]
    pub device: Option<DeviceName>,
    /// Measures nothing.
    #[arg(long)]
    pub no_rates: bool,
    /// Writes what was found as JSON; `-` is standard output, without the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub look: LookArguments,
    /// The driver's library, by path or name, instead of the system's.
    #[arg(long, value_name = "FILE", hide = true)]
    pub driver: Option<String>,
    /// A folder that stands before /proc and /sys.
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
    /// Measures with short runs, which say little.
    #[arg(long, hide = true)]
    pub quick: bool,
}
