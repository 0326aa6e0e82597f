//! The arguments of `forebay fit`.

use std::path::PathBuf;

use crate::present::terminal::LookArguments;

const AFTER_HELP: &str = "\
docs/setup-format.md describes measurements and setups. Times measured for single works are kept; the rest is fitted \
to whole steps and to the cost of overlap. --rates takes rates measured on this machine: the output of forebay doctor \
--json, or a JSON object with the fields of a setup's link.rates, alone or as the field rates of an object.";

/// The arguments of `forebay fit`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// The file of measurements.
    #[arg(value_name = "MEASUREMENTS")]
    pub measurements: PathBuf,
    /// Writes the setup, atomically; `-` prints it instead of the tables.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Rates of the link, instead of the measurements' own: JSON like a setup's link.rates, alone or as a field rates.
    #[arg(long, value_name = "FILE")]
    pub rates: Option<PathBuf>,
    /// Writes the results and the residuals as JSON; `-` prints them instead of the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub look: LookArguments,
}
