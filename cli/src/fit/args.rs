//! The arguments of `forebay fit`.

use std::path::PathBuf;

use crate::present::terminal::LookArguments;

const AFTER_HELP: &str = "\
docs/setup-format.md describes measurements and setups. What was measured work by work is kept; the rest is fitted to \
whole steps and to what overlap costs. --rates takes rates that were measured here: what forebay doctor --json writes, \
or a JSON object with the fields of a setup's link.rates, alone or as the field rates of an object.";

/// The arguments of `forebay fit`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// What was measured.
    #[arg(value_name = "MEASUREMENTS")]
    pub measurements: PathBuf,
    /// Writes the setup, whole or not at all; `-` is standard output, without the tables.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Rates of the link, instead of the measurements' own: JSON as a setup's link.rates, alone or as a field rates.
    #[arg(long, value_name = "FILE")]
    pub rates: Option<PathBuf>,
    /// Writes what was found and the residuals as JSON; `-` is standard output, without the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub look: LookArguments,
}
