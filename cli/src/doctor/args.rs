//! The arguments of `forebay doctor`.

use std::path::PathBuf;

use crate::input::device::DeviceName;
use crate::present::terminal::LookArguments;

const AFTER_HELP: &str = "\
States: ok; note, worth knowing; warning, costs speed or memory; problem, does not work. Status: 0 without problems, 1 \
with some, 2 for bad input. Rates are measured with runs of \
256 MiB, for a few seconds a GPU; nothing else should use it meanwhile. forebay fit --rates takes the JSON \
(docs/json.md).";

/// The arguments of `forebay doctor`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// A device to check in addition to the machine: host, or cuda:N; without it every GPU.
    #[arg(long, value_name = "DEVICE", value_parser = DeviceName::parse)]
    pub device: Option<DeviceName>,
    /// Skips measuring rates.
    #[arg(long)]
    pub no_rates: bool,
    /// Writes the findings as JSON; `-` prints them instead of the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub look: LookArguments,
    /// The driver's library, by path or name, instead of the system's.
    #[arg(long, value_name = "FILE", hide = true)]
    pub driver: Option<String>,
    /// A folder to read instead of the root of /proc and /sys, for tests.
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
    /// Measures with short runs, which are imprecise.
    #[arg(long, hide = true)]
    pub quick: bool,
}
