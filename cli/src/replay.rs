//! `forebay replay`: replays selection traces through pools of several sizes; [`crate::requests`] handles request
//! traces.
//!
//! A trace is read once and replayed at every requested size. First the last `--warmup` prompt steps are replayed, in
//! which no row is born; then decode steps of `--mtp` consecutive positions each. The selections of a step are united,
//! and every draft is accepted; an incomplete last group is dropped. Nothing is resident before the first step.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::ValueEnum;
use clap::builder::PossibleValuesParser;
use forebay::device::Device;
use forebay::trace::Header;
use forebay::{Error, Geometry, Kind, Result, Shape};
use indicatif::ProgressBar;

use crate::allowance::{self, Allowance, MemoryArguments};
use crate::kinds::{self, FileKind};
use crate::look::LookArguments;
use crate::output::{Input, Results, echo};
use crate::policy::Policy;
use crate::pools::Setting;
use crate::prefetch::Prefetched;
use crate::recorded::{self, Recorded};
use crate::requests::{Asked, Traces};
use crate::study::Study;
use crate::target::{DeviceName, Target};
use crate::{curve_report, html, json, output, report, requests};

/// Decode steps whose misses are reported separately: the start-up cost of a sequence.
pub const FIRST_STEPS: u32 = 8;

/// Prompt steps replayed first without `--warmup`; all if the trace has fewer.
const WARMUP: u32 = 32;

/// The model that sets the row size by default.
pub const MODEL: &str = "deepseek-v3.2";

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
    prompt_share: Vec<f64>,
    /// Slots per sequence and layer; several, separated by commas.
    #[arg(long, value_name = "N", value_delimiter = ',', conflicts_with = "prompt_share",
          value_parser = at_least_one, allow_negative_numbers = true)]
    slots: Vec<u32>,
    /// Prompt steps replayed before the first decode step; 0 starts cold [default: 32, or all if the trace has
    /// fewer].
    #[arg(long, value_name = "W", value_parser = whole, allow_negative_numbers = true)]
    warmup: Option<u32>,
    /// Query rows per decode step: 1 without drafts [default: 1].
    #[arg(long, value_name = "Q", value_parser = at_least_one, allow_negative_numbers = true)]
    mtp: Option<u32>,
    /// Counts misses, or hits by capacity, at every size in one exact pass. Prints the named sizes, and writes all
    /// of them as JSON [default: prompt shares from 0.05 to 1].
    #[arg(long)]
    curve: bool,
    /// Eviction policy; several, separated by commas, are compared. All but lru are for study; decay and
    /// decay-tokens work on selection traces only [default: lru].
    #[arg(long, value_enum, value_delimiter = ',')]
    policy: Vec<Policy>,
    /// How the slots are divided over the layers; by-layer, from lru's miss-ratio curves, is compared with uniform
    /// [default: uniform].
    #[arg(long, value_enum)]
    split: Option<Split>,
    /// Counts what prefetching each layer's rows would cover and cost: inter-layer fetches the rows that the
    /// preceding layer in the trace selected in the same step.
    #[arg(long, value_enum)]
    prefetch: Option<Prefetch>,
    /// The model that sets the bytes of one row [default: deepseek-v3.2].
    #[arg(long, value_name = "NAME", value_parser = presets())]
    model: Option<String>,
    /// The device of the pools: host, or cuda:N for GPU N [default: host].
    #[arg(long, value_name = "DEVICE", value_parser = DeviceName::parse)]
    device: Option<DeviceName>,
    /// The driver's library, for tests.
    #[arg(long, value_name = "FILE", hide = true)]
    driver: Option<String>,
    #[command(flatten)]
    pub memory: MemoryArguments,
    #[command(flatten)]
    requests: requests::RequestArguments,
    /// Writes the result as JSON, atomically; `-` prints it instead of the tables.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub look: LookArguments,
    #[command(flatten)]
    pub report: html::HtmlArguments,
}

impl Arguments {
    fn mtp(&self) -> u32 {
        self.mtp.unwrap_or(1)
    }

    /// The named policies, each once, in the order named.
    fn policies(&self) -> Vec<Policy> {
        let mut once = Vec::new();
        for policy in if self.policy.is_empty() { &[Policy::Lru] } else { &self.policy[..] } {
            if !once.contains(policy) {
                once.push(*policy);
            }
        }
        once
    }

    fn target(&self) -> Target {
        Target { name: self.device.unwrap_or_default(), driver: self.driver.clone() }
    }

    /// A given option that only the host counts, whichever device replays.
    fn for_the_host(&self) -> Option<&'static str> {
        let given = [
            ("--policy", self.policies() != [Policy::Lru]),
            ("--curve", self.curve),
            ("--prefetch", self.prefetch.is_some()),
            ("--html", self.report.html.is_some()),
        ];
        given.iter().find(|(_, given)| *given).map(|(name, _)| *name)
    }

    /// The number of named sizes.
    pub fn sizes(&self) -> usize {
        self.prompt_share.len() + self.slots.len()
    }

    /// A given option that does not apply to request traces.
    fn for_selections(&self) -> Option<&'static str> {
        let given = [
            ("--prompt-share", !self.prompt_share.is_empty()),
            ("--slots", !self.slots.is_empty()),
            ("--warmup", self.warmup.is_some()),
            ("--mtp", self.mtp.is_some()),
            ("--split", self.split.is_some()),
            ("--prefetch", self.prefetch.is_some()),
            ("--model", self.model.is_some()),
            ("--link-rate", self.report.link_rate.is_some()),
            ("--device", self.device.is_some()),
            ("--driver", self.driver.is_some()),
        ];
        given.iter().find(|(_, given)| *given).map(|(name, _)| *name)
    }
}

/// How the slots are divided over the layers.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Split {
    /// The same number in every layer.
    Uniform,
    /// By the gain of each layer, from the layers' curves.
    ByLayer,
}

/// Which rows are prefetched into a layer before its selection is known.
#[derive(Clone, Copy, ValueEnum)]
enum Prefetch {
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

/// The counts of one layer's pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Selected rows that were resident.
    pub hits: u64,
    /// Selected rows that were fetched.
    pub misses: u64,
}

/// Slots that were divided by the gain of each layer.
pub struct Divided {
    /// Slots of each layer.
    pub slots: Vec<u32>,
    /// Misses of all layers with a uniform split.
    pub uniform_misses: u64,
}

/// A trace's replay at one size, with everything that the reports show.
pub struct Replay {
    /// The replayed setting.
    pub setting: Setting,
    /// The eviction policy.
    pub policy: Policy,
    /// The slots of each layer, if they were divided; the setting's are the mean then.
    pub divided: Option<Divided>,
    /// Slots as a share of the prompt, as requested.
    pub prompt_share: f64,
    /// Hits and misses of every layer, over all decode steps.
    pub layers: Vec<Count>,
    /// What a prefetch fetches for each layer, if requested.
    pub prefetched: Option<Vec<Prefetched>>,
    /// Misses of each of the first [`FIRST_STEPS`] decode steps, all layers together.
    pub first: Vec<u64>,
    /// The same without warm-up.
    pub cold: Vec<u64>,
}

impl Replay {
    /// Hits and misses of all layers.
    pub fn total(&self) -> Count {
        self.layers.iter().fold(Count::default(), |sum, count| Count {
            hits: sum.hits + count.hits,
            misses: sum.misses + count.misses,
        })
    }

    /// The share of the uniform split's misses that dividing the slots avoids.
    pub fn gain(&self) -> Option<f64> {
        let before = self.divided.as_ref()?.uniform_misses as f64;
        Some((before - self.total().misses as f64) / before.max(1.0))
    }

    /// A count as a mean over the decode steps.
    pub fn per_step(&self, count: u64) -> f64 {
        count as f64 / f64::from(self.setting.steps)
    }

    /// The mean over the first steps and the layers.
    pub fn first_mean(&self, first: &[u64]) -> f64 {
        let cells = first.len() * self.layers.len();
        first.iter().sum::<u64>() as f64 / cells as f64
    }
}

/// All replays of one trace.
pub struct Replayed {
    /// The file, as named.
    pub path: PathBuf,
    /// The trace's header.
    pub header: Header,
    /// One replay for each size and policy, ordered by size.
    pub replays: Vec<Replay>,
}

/// The bytes of one row, and the model that they come from.
pub struct RowSize {
    /// The preset's name.
    pub model: String,
    /// Bytes.
    pub bytes: u32,
}

/// The setting and prompt share of every requested size, checked against the trace.
pub fn settings(header: &Header, path: &Path, arguments: &Arguments) -> Result<Vec<(Setting, f64)>> {
    let invalid = |what: &str| {
        Error::new(Kind::InvalidConfig, "replay").at(format!("{}: {what}", echo(path.display())))
    };
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
    let setting = |slots| Setting { slots, warmup, mtp: arguments.mtp(), steps };
    let prompt = f64::from(header.decode_start);
    if !arguments.slots.is_empty() {
        let share = |slots: u32| f64::from(slots) / prompt.max(1.0);
        return Ok(arguments.slots.iter().map(|slots| (setting(*slots), share(*slots))).collect());
    }
    let shares = match (arguments.prompt_share.is_empty(), arguments.curve) {
        (true, true) => &curve_report::SHARES[..],
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
            return Err(invalid(&format!("--prompt-share {share} leaves no slot"))
                .with("decode_start", header.decode_start)
                .hint(hint));
        }
        all.push((setting(slots), *share));
    }
    Ok(all)
}

/// A progress bar on standard error over steps of one layer each; hidden if that is no terminal.
pub fn progress(path: &Path, steps: u64) -> ProgressBar {
    output::progress(&path.display().to_string(), steps)
}

/// The error with the trace's name, and a hint for pools that are too large.
pub fn named(e: Error, path: &Path) -> Error {
    let too_large = matches!(e.kind(), Kind::OutOfMemory | Kind::Overflow);
    let place = match e.place() {
        "" => echo(path.display()),
        place => format!("{}: {place}", echo(path.display())),
    };
    let e = e.at(place);
    if too_large { e.hint("pass a smaller --prompt-share or --slots") } else { e }
}

/// Replays the trace at `path` at every size.
fn replay(path: &Path, shape: &Shape, arguments: &Arguments) -> Result<Replayed> {
    let study = Study {
        policies: arguments.policies(),
        by_layer: arguments.split == Some(Split::ByLayer),
        prefetch: arguments.prefetch.is_some(),
        target: arguments.target(),
    };
    let allowance = Allowance { of: allowance::Replayed::Selections, memory: arguments.memory.memory };
    let Recorded { header, trace } = recorded::read(path, &allowance, |recorded, header| {
        let settings = settings(recorded, path, arguments)?;
        study.needs(header, shape, &settings).map_err(|e| named(e, path))
    })?;
    let settings = settings(&header, path, arguments)?;
    let bar = progress(path, study.work(&trace, &settings));
    let replays =
        study.run(&trace, header.decode_start, shape, &settings, &bar).map_err(|e| named(e, path))?;
    bar.finish_and_clear();
    Ok(Replayed { path: path.to_owned(), header, replays })
}

/// Refuses to read a trace twice that can be read only once: report and JSON each read their own.
fn check_twice(arguments: &Arguments) -> Result<()> {
    let both = arguments.report.html.is_some() && arguments.json.is_some();
    let once = |path: &&PathBuf| std::fs::metadata(path).is_ok_and(|file| !file.is_file() && !file.is_dir());
    match arguments.traces.iter().find(once).filter(|_| both) {
        None => Ok(()),
        Some(path) => Err(Error::new(Kind::InvalidConfig, "replay")
            .at(format!(
                "--html and --json read a trace twice, but {} is not a regular file",
                echo(path.display())
            ))
            .hint("leave one of the two out, or pass a file")),
    }
}

/// The requested device, which supports the other requested options.
fn open(arguments: &Arguments) -> Result<Arc<dyn Device>> {
    let target = arguments.target();
    match arguments.for_the_host() {
        Some(option) if target.name != DeviceName::Host => Err(Error::new(Kind::InvalidConfig, "replay")
            .at(format!("{option} works on the host only, but --device names a GPU, which replays lru"))
            .hint("leave one of the two out")),
        _ => target.open(),
    }
}

/// Refuses options that `--curve` cannot count.
fn check_curve(arguments: &Arguments) -> Result<()> {
    if arguments.policies() != [Policy::Lru] {
        return Err(Error::new(Kind::InvalidConfig, "replay")
            .at("--curve counts the production rule, lru, but --policy names another")
            .hint("replay the other policies at named sizes, without --curve"));
    }
    if arguments.split == Some(Split::ByLayer) {
        return Err(Error::new(Kind::InvalidConfig, "replay")
            .at("--split by-layer replays named sizes, but --curve counts all")
            .hint("pass one of the two"));
    }
    if arguments.prefetch.is_some() {
        return Err(Error::new(Kind::InvalidConfig, "replay")
            .at("--prefetch needs pools of named sizes, but --curve builds none")
            .hint("pass one of the two"));
    }
    Ok(())
}

/// `forebay replay`.
///
/// # Errors
/// Errors of reading a trace, of settings that do not fit it, and of writing the result.
pub fn command(arguments: &Arguments) -> Result<()> {
    let model = arguments.model.as_deref().unwrap_or(MODEL);
    let shape =
        Shape::preset(model).ok_or_else(|| Error::new(Kind::InvalidConfig, "replay").at("--model"))?;
    let row = RowSize { model: model.to_owned(), bytes: Geometry::new(shape)?.row_bytes() };
    let html = arguments.report.html.as_deref();
    check_twice(arguments)?;
    let traces = arguments.traces.iter().map(|path| ("trace", path.as_path()));
    let sides = arguments.requests.side_files().iter().map(|path| ("side file", path.as_path()));
    let inputs: Vec<Input<'_>> = traces.chain(sides).collect();
    output::check_targets("replay", &[("--html", html), ("--json", arguments.json.as_deref())], &inputs)?;
    for path in &arguments.traces {
        kinds::expect("replay", path, &[FileKind::Selections, FileKind::Requests], "a trace")?;
    }
    let mut results = Results::default();
    match requests::kind_of(&arguments.traces)? {
        Traces::Requests => of_requests(arguments, &mut results)?,
        kind => {
            if kind == Traces::Selections {
                arguments.requests.refuse()?;
            }
            of_selections(arguments, &shape, &row, &mut results)?;
        }
    }
    results.deliver()
}

/// Replays request traces.
fn of_requests<'a>(arguments: &'a Arguments, results: &mut Results<'a>) -> Result<()> {
    requests::check_option(arguments.for_selections())?;
    let memory = arguments.memory.memory;
    let html = arguments.report.html.as_deref();
    if let Some(target) = html {
        results.write(target, html::requests(&arguments.traces, &arguments.requests, memory)?);
        if arguments.json.is_none() {
            return Ok(());
        }
    }
    let asked = Asked { policies: arguments.policies(), curve: arguments.curve, memory };
    let tables = html.is_none().then(|| arguments.look.look());
    let json = arguments.json.as_deref();
    requests::command(&arguments.requests, &asked, &arguments.traces, json, tables, results)
}

/// Replays selection traces.
fn of_selections<'a>(
    arguments: &'a Arguments,
    shape: &Shape,
    row: &RowSize,
    results: &mut Results<'a>,
) -> Result<()> {
    // Stays open to the end, so that the replays' own devices share the GPU's context.
    let _device = open(arguments)?;
    let html = arguments.report.html.as_deref();
    if let Some(target) = html {
        results.write(target, html::selections(arguments, shape, row)?);
        if arguments.json.is_none() {
            return Ok(());
        }
    }
    if arguments.curve {
        check_curve(arguments)?;
        return curve_report::command(arguments, shape, row, results);
    }
    let replayed =
        arguments.traces.iter().map(|path| replay(path, shape, arguments)).collect::<Result<Vec<_>>>()?;
    if let Some(path) = &arguments.json {
        results.write(path, json::text(&replayed, row)?);
    }
    if html.is_none() && !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&report::text(&replayed, row, look)));
    }
    Ok(())
}
