//! The arguments of `forebay replay`.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use clap::builder::PossibleValuesParser;
use forebay::trace::Header;
use forebay::{Error, Kind, Result, Shape};

use super::requests::args::RequestArguments;
use super::tiers::args::TiersArguments;
use super::together::args::TogetherArguments;
use crate::input::allowance::MemoryArguments;
use crate::input::device::{DeviceName, Target};
use crate::policy::Policy;
use crate::present::output::echo;
use crate::present::terminal::LookArguments;
use crate::study::pools::Setting;

/// Prompt steps replayed first without `--warmup`; all if the trace has fewer.
const WARMUP: u32 = 32;

/// The sizes at which a curve is printed if none are named.
pub const CURVE_SHARES: [f64; 13] = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];

/// The sizes replayed if none are named.
const SHARES: [f64; 3] = [0.1, 0.2, 0.3];

const AFTER_HELP: &str = "\
A hit is a selected row that was resident when its step began; a miss is fetched from host memory. \
Rows that a step writes are neither hits nor misses. Miss ratio: misses / (hits + misses).

JSON: a list, one entry for each trace, size and policy, or for each trace and capacity. `steps` counts decode \
steps of --mtp query rows each.
`misses_per_step` is misses / steps: of that layer in `per_layer`, of all layers together in `total`.
With --curve: one entry for each trace, with hits and misses at every size.

Limits: a selection trace has at most 2^28 positions, 4096 layers and a context of 2^24; a request trace 2^28 block \
references, 2^25 requests, 64 MiB a line and 8 GiB without its compression (docs/trace-format.md).";

/// The arguments of `forebay replay`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// Selection traces (TOPKTRC1, TOPKTRC2), or request traces (Mooncake, kv-cache-tester, RAGPulse, Azure);
    /// plain or zstd.
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Slots per sequence and layer as a share of the prompt (the tokens at decode start), 0 < S <= 1; several,
    /// separated by commas [default: 0.1,0.2,0.3]. (The ratio of plan and simulate is a share of the whole context.)
    #[arg(long, value_name = "S", value_delimiter = ',', value_parser = share, allow_negative_numbers = true)]
    pub prompt_share: Vec<f64>,
    /// Slots per sequence and layer; several, separated by commas.
    #[arg(long, value_name = "N", value_delimiter = ',', conflicts_with = "prompt_share",
          value_parser = at_least_one, allow_negative_numbers = true)]
    pub slots: Vec<u32>,
    /// Prompt steps replayed before the first decode step; 0 starts cold [default: 32, or all if the trace has
    /// fewer].
    #[arg(long, value_name = "W", value_parser = whole, allow_negative_numbers = true)]
    pub warmup: Option<u32>,
    /// Query rows per decode step: 1 without drafts [default: 1].
    #[arg(long, value_name = "Q", value_parser = at_least_one, allow_negative_numbers = true)]
    pub mtp: Option<u32>,
    /// Counts misses, or hits by capacity, at every size in one exact pass. Prints the named sizes, and writes all
    /// of them as JSON [default: prompt shares from 0.05 to 1].
    #[arg(long)]
    pub curve: bool,
    /// Eviction policy; several, separated by commas, are compared. All but lru are for study; decay and
    /// decay-tokens work on selection traces only [default: lru].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub policy: Vec<Policy>,
    /// How the slots are divided over the layers; by-layer, from lru's miss-ratio curves, is compared with uniform
    /// [default: uniform].
    #[arg(long, value_enum)]
    pub split: Option<Split>,
    /// Counts what prefetching each layer's rows would cover and cost: inter-layer fetches the rows that the
    /// preceding layer in the trace selected in the same step.
    #[arg(long, value_enum)]
    pub prefetch: Option<Prefetch>,
    /// The model that sets the bytes of one row [default: deepseek-v3.2]; with --device-blocks, of a block [default:
    /// none].
    #[arg(long, value_name = "NAME", value_parser = presets())]
    pub model: Option<String>,
    /// The device of the pools: host, or cuda:N for GPU N [default: host].
    #[arg(long, value_name = "DEVICE", value_parser = DeviceName::parse)]
    pub device: Option<DeviceName>,
    /// The driver's library, for tests.
    #[arg(long, value_name = "FILE", hide = true)]
    pub driver: Option<String>,
    #[command(flatten)]
    pub together: TogetherArguments,
    #[command(flatten)]
    pub memory: MemoryArguments,
    #[command(flatten)]
    pub requests: RequestArguments,
    #[command(flatten)]
    pub tiers: TiersArguments,
    /// Writes the result as JSON, atomically; `-` prints it instead of the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub look: LookArguments,
    #[command(flatten)]
    pub report: HtmlArguments,
}

impl Arguments {
    pub fn mtp(&self) -> u32 {
        self.mtp.unwrap_or(1)
    }

    /// The named policies, each once, in the order named.
    pub fn policies(&self) -> Vec<Policy> {
        let mut once = Vec::new();
        for policy in if self.policy.is_empty() { &[Policy::Lru] } else { &self.policy[..] } {
            if !once.contains(policy) {
                once.push(*policy);
            }
        }
        once
    }

    pub fn target(&self) -> Target {
        Target { name: self.device.unwrap_or_default(), driver: self.driver.clone() }
    }

    /// A given option that only the host counts, whichever device replays.
    pub fn for_the_host(&self) -> Option<&'static str> {
        let given = [
            ("--policy", self.policies() != [Policy::Lru]),
            ("--curve", self.curve),
            ("--prefetch", self.prefetch.is_some()),
            ("--html", self.report.html.is_some()),
            ("--together", self.together.together.is_some()),
        ];
        given.iter().find(|(_, given)| *given).map(|(name, _)| *name)
    }

    /// The number of named sizes.
    pub fn sizes(&self) -> usize {
        self.prompt_share.len() + self.slots.len()
    }

    /// A given option that does not apply to request traces.
    pub fn for_selections(&self) -> Option<&'static str> {
        let tiers = self.tiers.device_blocks;
        let given = [
            ("--prompt-share", !self.prompt_share.is_empty()),
            ("--slots", !self.slots.is_empty()),
            ("--warmup", self.warmup.is_some()),
            ("--mtp", self.mtp.is_some()),
            ("--split", self.split.is_some()),
            ("--prefetch", self.prefetch.is_some()),
            ("--model", self.model.is_some() && tiers.is_none()),
            ("--link-rate", self.report.link_rate.is_some() && tiers.is_none()),
            ("--device", self.device.is_some()),
            ("--driver", self.driver.is_some()),
            ("--together", self.together.together.is_some()),
        ];
        given.iter().find(|(_, given)| *given).map(|(name, _)| *name)
    }
}

/// How the slots are divided over the layers.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Split {
    /// The same number in every layer.
    Uniform,
    /// By the gain of each layer, from the layers' curves.
    ByLayer,
}

/// Which rows are prefetched into a layer before its selection is known.
#[derive(Clone, Copy, ValueEnum)]
pub enum Prefetch {
    /// The rows that the preceding layer selected.
    InterLayer,
}

fn share(text: &str) -> std::result::Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number; 0 < S <= 1".to_owned())?;
    if value > 0.0 && value <= 1.0 {
        return Ok(value);
    }
    Err("a prompt share must be above 0 and at most 1".to_owned())
}

/// A number of at least 0.
fn whole(text: &str) -> std::result::Result<u32, String> {
    text.parse().map_err(|_| format!("not a whole number from 0 to {}", u32::MAX))
}

/// A number of at least 1.
fn at_least_one(text: &str) -> std::result::Result<u32, String> {
    match whole(text) {
        Ok(value) if value > 0 => Ok(value),
        _ => Err(format!("not a whole number from 1 to {}", u32::MAX)),
    }
}

fn presets() -> PossibleValuesParser {
    PossibleValuesParser::new(Shape::PRESETS.map(|(name, _)| name))
}

/// The warm-up steps and the decode steps to replay, checked against the trace.
pub fn steps(header: &Header, path: &Path, arguments: &Arguments) -> Result<(u32, u32)> {
    let invalid = |what: &str| invalid(path, what);
    let warmup = arguments.warmup.unwrap_or(WARMUP.min(header.warm_steps));
    if warmup > header.warm_steps {
        return Err(invalid("--warmup asks for more than the trace's warm steps")
            .with("warmup", warmup)
            .with("warm_steps", header.warm_steps)
            .hint("pass --warmup with a value up to warm_steps; 0 starts cold"));
    }
    if header.decode_steps() == 0 {
        return Err(invalid("the trace has no decode steps")
            .with("steps", header.steps)
            .with("warm_steps", header.warm_steps)
            .hint("record steps beyond the prompt"));
    }
    let steps = header.decode_steps() / arguments.mtp();
    if steps == 0 {
        return Err(invalid("one step of --mtp query rows needs more decode steps than the trace has")
            .with("mtp", arguments.mtp())
            .with("decode_steps", header.decode_steps())
            .hint("pass --mtp up to decode_steps"));
    }
    Ok((warmup, steps))
}

/// An option that does not fit the trace.
fn invalid(path: &Path, what: &str) -> Error {
    Error::new(Kind::InvalidConfig, "replay").at(format!("{}: {what}", echo(path.display())))
}

/// The setting and prompt share of every requested size, checked against the trace.
pub fn settings(header: &Header, path: &Path, arguments: &Arguments) -> Result<Vec<(Setting, f64)>> {
    let (warmup, steps) = steps(header, path, arguments)?;
    let setting = |slots| Setting { slots, warmup, mtp: arguments.mtp(), steps };
    let prompt = f64::from(header.decode_start);
    if !arguments.slots.is_empty() {
        let share = |slots: u32| f64::from(slots) / prompt.max(1.0);
        return Ok(arguments.slots.iter().map(|slots| (setting(*slots), share(*slots))).collect());
    }
    let shares = match (arguments.prompt_share.is_empty(), arguments.curve) {
        (true, true) => &CURVE_SHARES[..],
        (true, false) => &SHARES[..],
        (false, _) => &arguments.prompt_share,
    };
    let mut all = Vec::with_capacity(shares.len());
    for share in shares {
        let slots = (share * prompt + 0.5).floor() as u32;
        let last = shares.last() == Some(share) && all.is_empty();
        if slots == 0 && arguments.prompt_share.is_empty() && !last {
            continue;
        }
        if slots == 0 {
            let hint = match header.decode_start {
                0 => "pass --slots: a share of an empty prompt is 0",
                _ => "pass a larger share, or --slots",
            };
            return Err(invalid(path, &format!("--prompt-share {share} leaves no slot"))
                .with("decode_start", header.decode_start)
                .hint(hint));
        }
        all.push((setting(slots), *share));
    }
    Ok(all)
}

/// The arguments of the report alone.
#[derive(clap::Args)]
pub struct HtmlArguments {
    /// Writes a report with pictures instead of tables as one HTML file, atomically; `-` prints it. It
    /// compares all policies at several sizes; --prompt-share or --slots sets the size shown by layer and step
    /// [default: 0.2].
    #[arg(long, value_name = "FILE", group = "linked", conflicts_with_all = ["curve", "policy", "split", "prefetch"])]
    pub html: Option<PathBuf>,
    /// With --html or --device-blocks: the rate of the link to the device in gigabytes a second (1e9) [default with
    /// --html: 37, measured by ESS for gathering single rows].
    #[arg(long, value_name = "GB/S", requires = "linked", value_parser = rate, allow_negative_numbers = true)]
    pub link_rate: Option<f64>,
}

fn rate(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(rate) if (1e-3..=1e6).contains(&rate) => Ok(rate),
        _ => Err("not a number of GB/s from 0.001 to 1000000".to_owned()),
    }
}
