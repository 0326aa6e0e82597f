//! The arguments of `forebay transfer`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};

use super::fault::Fault;
use crate::input::sizes;
use crate::present::terminal::LookArguments;

const AFTER_HELP: &str = "\
Status: 0 if every byte arrived as it was sent, 1 if the transfer failed, 2 for bad input.";

/// The arguments of `forebay transfer`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Starts both ends as processes of this host, and reports what of the transfer the computation hides
    Demo(Box<DemoArguments>),
    /// Waits for a sender, takes a prompt's rows, and compares every byte
    Receive(Box<EndArguments>),
    /// Computes a prompt's rows and sends them to a receiver
    Send(Box<EndArguments>),
}

/// What carries frames and rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fabric {
    /// Shared memory, with a Unix socket for frames
    Shm,
    /// TCP
    Tcp,
}

impl Fabric {
    pub const fn name(self) -> &'static str {
        match self {
            Fabric::Shm => "shm",
            Fabric::Tcp => "tcp",
        }
    }
}

/// What is sent and how; both ends need the same layers, tokens, rows, seed.
#[derive(clap::Args, Clone)]
pub struct PromptArguments {
    /// What carries frames and rows.
    #[arg(long, value_enum, default_value = "shm")]
    pub fabric: Fabric,
    /// Layers of the model.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), default_value = "61")]
    pub layers: u32,
    /// Tokens of the prompt.
    #[arg(long, value_name = "N", value_parser = sizes::tokens, default_value = "4096")]
    pub tokens: u32,
    /// Bytes of a token's latent and of its index key in a layer.
    #[arg(long, value_name = "LATENT,KEY", value_parser = pair, default_value = "704,132")]
    pub row_bytes: [u32; 2],
    /// Tokens of a page.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536), default_value = "64")]
    pub page: u32,
    /// Tokens that the sender computes at a time; without it the whole prompt.
    #[arg(long, value_name = "N", value_parser = sizes::tokens)]
    pub chunk: Option<u32>,
    /// Time in which the sender computes a layer of the whole prompt.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "2ms")]
    pub compute: Duration,
    /// Computes without a pause, as a busy processor does, instead of sleeping.
    #[arg(long)]
    pub spin: bool,
    /// Sends rows without digests, which both ends have to want: nothing finds wrong bytes then, but this comparison.
    #[arg(long)]
    pub no_digests: bool,
    /// The number that the rows' bytes are made from.
    #[arg(long, value_name = "N", default_value = "0")]
    pub seed: u64,
    /// After how long without a sign of life an end counts as lost.
    #[arg(long, value_name = "TIME", value_parser = patience, default_value = "5s")]
    pub timeout: Duration,
    /// What goes wrong: flip:N, drop:N, kill-sender:LAYER, stop-receiver:LAYER, abort:LAYER.
    #[arg(long, value_name = "FAULT", value_parser = Fault::parse)]
    pub fault: Option<Fault>,
}

/// The arguments of `forebay transfer demo`.
#[derive(clap::Args)]
pub struct DemoArguments {
    #[command(flatten)]
    pub prompt: PromptArguments,
    /// Writes the result as JSON; `-` prints it instead of the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draws the timeline of the layers as an SVG picture.
    #[arg(long, value_name = "FILE")]
    pub picture: Option<PathBuf>,
    #[command(flatten)]
    pub look: LookArguments,
}

/// The arguments of `forebay transfer receive` and `forebay transfer send`.
#[derive(clap::Args)]
pub struct EndArguments {
    /// Where the receiver listens: an address and port, or the path of a socket.
    #[arg(long, value_name = "ADDRESS")]
    pub at: String,
    /// A file of at least 16 random bytes, the same at both ends. Addresses of a network need it.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    #[command(flatten)]
    pub prompt: PromptArguments,
    /// The process that started this one, gets its reports, and takes it along when it ends.
    #[arg(long, value_name = "PID", hide = true)]
    pub parent: Option<u32>,
}

/// A time with its unit.
fn time(text: &str) -> Result<Duration, String> {
    let units = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let found = units.iter().find_map(|(unit, seconds)| {
        let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
        Some(number * seconds).filter(|time| (0.0..=3600.0).contains(time))
    });
    found
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "not a time of at most an hour; wanted: such as 500us, 2ms, 1s".to_owned())
}

/// A time after which an end counts as lost.
fn patience(text: &str) -> Result<Duration, String> {
    let least = Duration::from_millis(100);
    time(text).and_then(|time| (time >= least).then_some(time).ok_or_else(|| "at least 100ms".to_owned()))
}

/// Two numbers of bytes.
fn pair(text: &str) -> Result<[u32; 2], String> {
    let bytes = |text: &str| text.trim().parse().ok().filter(|bytes| (1..=1 << 20).contains(bytes));
    text.split_once(',')
        .and_then(|(latent, key)| Some([bytes(latent)?, bytes(key)?]))
        .ok_or_else(|| "not two numbers of bytes, each from 1 to 1048576; wanted: such as 704,132".to_owned())
}
