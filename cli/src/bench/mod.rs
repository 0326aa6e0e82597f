//! `forebay bench`: measures how close a device comes to its ceilings, and compares every outcome with the rule.
//!
//! A figure is the time that a stream takes for one of the device's own calls, next to the least time that this
//! machine allows for it, measured in the same run ([`Ceilings`]). Its steps differ: each has other rows and other
//! lanes, and nothing is reset in between. The rule on the host performs the same steps ([`oracle`]). A slot, row or
//! digest that differs is an error, and there is no figure.

mod fetch;
mod lines;
mod link;
mod nodes;
mod oracle;
mod packed;
mod pool;
pub mod report;
pub mod result;
mod reuse;
mod rig;
pub mod rows;
mod rule;
mod step;
mod timer;

use std::path::PathBuf;
use std::sync::Arc;

use clap::ValueEnum;
use forebay::measure::{Ceilings, Facts, Probe};
use forebay::{Error, Kind, Result, os};

use crate::look::LookArguments;
use crate::output::Results;
use crate::target::{DeviceName, Pinned, ProbeOptions, Target};
use crate::{html, output, sizes};
use lines::Lines;
use pool::Pool;
use result::{Asked, Figure};

const AFTER_HELP: &str = "\
Every time is shown next to its ceiling: the least time that this machine allows, measured in the same run. Every \
slot, fetched row and digest is compared with the rule on the host; a difference is an error, and there is no figure.

JSON: a list, first the device with its ceilings, then one entry for each figure. With --json-lines the same entries, \
a line each: a run that is killed leaves what it has measured.";

/// The function that measures a group's figures.
type Figures = fn(&Arc<dyn Probe>, &Ceilings, &Asked) -> Result<Vec<Figure>>;

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Group {
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
    /// A whole decode step in each order, captured.
    Step,
}

impl Group {
    /// The function that measures its figures.
    fn figures(self) -> Figures {
        match self {
            Group::Gather => rows::gather,
            Group::Scatter => rows::scatter,
            Group::Resolve => rule::resolve,
            Group::ResolveGather => fetch::resolve_gather,
            Group::Commit => rule::commit,
            Group::WarmUp => fetch::warm_up,
            Group::Nodes => nodes::nodes,
            Group::Step => step::figures,
        }
    }

    /// The fewest bytes of host memory for its rows; none for groups that choose how much they need.
    fn least(self) -> u64 {
        match self {
            Group::Gather | Group::Scatter | Group::WarmUp => pool::LEAST,
            Group::ResolveGather => fetch::SEQUENCES_LEAST,
            Group::Resolve | Group::Commit | Group::Nodes | Group::Step => 0,
        }
    }
}

/// The arguments of `forebay bench`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// The device to measure: host, or cuda:N for GPU N [default: host].
    #[arg(long, value_name = "DEVICE", value_parser = DeviceName::parse)]
    device: Option<DeviceName>,
    /// The driver's library, for tests.
    #[arg(long, value_name = "FILE", hide = true)]
    driver: Option<String>,
    /// Groups to measure; several, separated by commas [default: all].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "GROUP")]
    only: Vec<Group>,
    /// Tiny shapes and few rounds, in seconds: shows that everything works, and nothing about speed.
    #[arg(long)]
    quick: bool,
    /// Steps timed for each figure [default: 15; 3 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000),
          allow_negative_numbers = true)]
    rounds: Option<u32>,
    /// Host memory for the rows that are gathered and scattered, and for the rows of steps, such as 64GiB; at most
    /// seven eighths of what is free, on the GPU's NUMA node if there is one [default: a fifth of the free memory, up
    /// to 64 GiB for a GPU and 1.5 GiB for the host]. Steps take at least one prompt and all sequences' tails.
    #[arg(long, value_name = "BYTES", value_parser = sizes::some_bytes)]
    pool: Option<u64>,
    /// Measures only one gather, of this many rows of 656 bytes at a stride of 704, for a profiler: two warm-up calls,
    /// then the timed ones, and no other launch of its kernel; the host packs no rows.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000),
          allow_negative_numbers = true)]
    rows: Option<u32>,
    /// Measures only one resolve, of this many sequences with one query row, a budget of 6,881 and 13.4% misses, for a
    /// profiler: four warm-up launches, one a layer, then the timed ones, a multiple of four.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=160),
          allow_negative_numbers = true)]
    batch: Option<u32>,
    /// GPU: thread blocks of a gather.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_535),
          allow_negative_numbers = true)]
    gather_blocks: Option<u32>,
    /// GPU: threads of a block, a multiple of 32 up to 512.
    #[arg(long, value_name = "N", value_parser = threads, allow_negative_numbers = true)]
    threads: Option<u32>,
    /// GPU, from compute capability 9.0 on: gathers by bulk copies.
    #[arg(long)]
    bulk: bool,
    /// GPU, from compute capability 9.0 and driver 12.3 on: launches a kernel before the preceding ones on its stream
    /// have ended. It has an effect in the order `none`: in DA and DBA there are events between the kernels.
    #[arg(long)]
    programmatic: bool,
    /// The pinned memory of the rows: registered is the system's, driver is the driver's own in pages of 2 MiB (GPU
    /// only, CUDA 12.2 or newer).
    #[arg(long, value_enum, default_value = "registered")]
    pinned: Pinned,
    /// GPU: runs steps next to persistent kernels: the engine's work has one long block on each multiprocessor.
    #[arg(long)]
    persistent: bool,
    /// GPU: multiprocessors that the persistent kernels leave free.
    #[arg(long, value_name = "N", requires = "persistent", allow_negative_numbers = true)]
    leave_sms: Option<u32>,
    /// Draws the figures as an SVG picture.
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Writes the figures as JSON, atomically; `-` prints them instead of the tables.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Writes each figure as a line of JSON as soon as it is known, into a new file.
    #[arg(long, value_name = "FILE")]
    json_lines: Option<PathBuf>,
    #[command(flatten)]
    look: LookArguments,
}

fn threads(text: &str) -> std::result::Result<u32, String> {
    match text.parse::<u32>() {
        Ok(threads) if (32..=512).contains(&threads) && threads.is_multiple_of(32) => Ok(threads),
        _ => Err("not a multiple of 32 from 32 to 512".to_owned()),
    }
}

/// How a GPU was opened, and what ran next to it; none is the device's default.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Options {
    /// The pinned memory of the rows.
    pinned: &'static str,
    /// Thread blocks of a gather.
    #[serde(skip_serializing_if = "Option::is_none")]
    gather_blocks: Option<u32>,
    /// Threads of a block.
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<u32>,
    /// Gathers by bulk copies.
    bulk: bool,
    /// Kernels launched before the preceding ones have ended.
    programmatic: bool,
    /// Steps next to persistent kernels.
    persistent: bool,
    /// Multiprocessors that the persistent kernels leave free.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_sms: Option<u32>,
}

/// The measured figures, and the device.
pub struct Measured {
    /// Its name on the command line.
    pub device: String,
    /// The options of a GPU.
    pub options: Option<Options>,
    /// Its facts.
    pub facts: Facts,
    /// Its ceilings.
    pub ceilings: Ceilings,
    /// All figures, group by group.
    pub figures: Vec<Figure>,
    /// Steps timed for each figure, at most.
    pub rounds: u32,
    /// Tiny shapes.
    pub quick: bool,
}

/// Bytes of a ceiling's run: on a GPU a short run would include its launch, and much of it would fit in caches.
fn run_bytes() -> u64 {
    (os::memory().1 / 32).clamp(128 << 20, 512 << 20)
}

impl Arguments {
    fn target(&self) -> Target {
        Target { name: self.device.unwrap_or_default(), driver: self.driver.clone() }
    }

    fn open(&self) -> Result<Arc<dyn Probe>> {
        let Arguments { gather_blocks, threads, bulk, programmatic, pinned, .. } = *self;
        let options =
            ProbeOptions { gather_blocks, threads, bulk, programmatic, pinned, ..ProbeOptions::of("bench") };
        self.target().probe(options)
    }

    /// The named groups, each once, in the fixed order.
    fn groups(&self) -> Vec<Group> {
        let named = |group: &Group| self.only.is_empty() || self.only.contains(group);
        Group::value_variants().iter().copied().filter(named).collect()
    }

    /// Refuses options that no named group would use.
    fn check(&self) -> Result<()> {
        let wrong = |place: &'static str| Error::new(Kind::InvalidConfig, "bench").at(place);
        let (groups, gpu) = (self.groups(), self.target().name != DeviceName::Host);
        if !gpu && self.persistent {
            let place = if self.leave_sms.is_some() {
                "--leave-sms without a GPU"
            } else {
                "--persistent without a GPU"
            };
            return Err(wrong(place).hint("pass --device cuda:N with it"));
        }
        let without = [
            (self.persistent, Group::Step, "--persistent without the group step", "pass --only step"),
            (self.rows.is_some(), Group::Gather, "--rows without the group gather", "pass --only gather"),
            (
                self.batch.is_some(),
                Group::Resolve,
                "--batch without the group resolve",
                "pass --only resolve",
            ),
        ];
        let unused = without.into_iter().find(|(set, group, ..)| *set && !groups.contains(group));
        unused.map_or(Ok(()), |(.., place, hint)| Err(wrong(place).hint(hint)))
    }

    /// Refuses `--leave-sms` if it leaves no multiprocessor for the work.
    fn check_left(&self, facts: &Facts) -> Result<()> {
        match self.leave_sms {
            Some(left) if left >= facts.processors => {
                let error = Error::new(Kind::InvalidConfig, "bench")
                    .at("--leave-sms leaves no multiprocessor for the work")
                    .with("value", left)
                    .with("multiprocessors", facts.processors);
                Err(error.hint("pass fewer than the GPU has"))
            }
            _ => Ok(()),
        }
    }

    fn options(&self) -> Options {
        let Arguments { gather_blocks, threads, bulk, programmatic, persistent, leave_sms, .. } = *self;
        let pinned = match self.pinned {
            Pinned::Registered => "registered",
            Pinned::Driver => "driver",
        };
        let left_sms = persistent.then(|| leave_sms.unwrap_or_default());
        Options { pinned, gather_blocks, threads, bulk, programmatic, persistent, left_sms }
    }

    /// The memory of the groups' rows, computed before any of it is taken.
    fn pool(&self, facts: &Facts) -> Result<Pool> {
        let least = self.groups().into_iter().map(Group::least).max().unwrap_or_default();
        let wanted = pool::For { asked: self.pool, quick: self.quick, gpu: facts.gpu.is_some(), least };
        let bytes = pool::bytes(wanted, pool::Free::beside(facts))?;
        Ok(Pool::new(bytes).of_driver(self.pinned == Pinned::Driver))
    }

    /// Opens the device and what the groups share. The ceilings are measured before the first group takes memory.
    fn begin(&self) -> Result<(Measured, Asked)> {
        self.check()?;
        let (quick, name) = (self.quick, self.target().name.to_string());
        let rounds = self.rounds.unwrap_or(if quick { 3 } else { 15 });
        let device = self.open()?;
        let facts = device.facts()?;
        self.check_left(&facts)?;
        let asked = Asked {
            rounds,
            quick,
            progress: output::progress("bench", 0),
            pool: self.pool(&facts)?,
            lines: Lines::create(name.clone(), self.json_lines.as_deref())?,
            persistent: self.persistent.then(|| self.leave_sms.unwrap_or_default()),
            bulk: self.bulk,
            rows: self.rows,
            batch: self.batch,
        };
        let (bytes, runs) = if quick { (1 << 20, 2) } else { (run_bytes(), 10) };
        let ceilings = Ceilings::measure(&*device, bytes, runs)?;
        let launch_us = timer::Timer::new(&device, quick)?.launch_us()?;
        let ceilings = Ceilings { launch_us, ..ceilings };
        let options = facts.gpu.is_some().then(|| self.options());
        Ok((Measured { device: name, options, facts, ceilings, figures: Vec::new(), rounds, quick }, asked))
    }

    fn measure(&self) -> Result<Measured> {
        let (mut measured, asked) = self.begin()?;
        asked.lines.begin(&measured)?;
        for group in self.groups() {
            if group == Group::Step {
                asked.pool.give_back();
            }
            let figures = group.figures()(&self.open()?, &measured.ceilings, &asked)?;
            measured.figures.extend(figures);
        }
        Ok(measured)
    }
}

/// `forebay bench`.
///
/// # Errors
/// Errors of opening the device, of memory, of a wrong outcome, and of writing the results.
pub fn command(arguments: &Arguments) -> Result<()> {
    let Arguments { json, json_lines, picture, .. } = arguments;
    let targets = [
        ("--json", json.as_deref()),
        ("--json-lines", json_lines.as_deref()),
        ("--picture", picture.as_deref()),
    ];
    output::check_targets("bench", &targets, &[])?;
    let measured = arguments.measure()?;
    let mut results = Results::default();
    if let Some(path) = picture {
        results.write(path, html::bench::picture(&measured, html::STYLE));
    }
    if let Some(path) = json {
        results.write(path, report::text(&measured)?);
    }
    if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&report::tables(&measured, look)));
    }
    results.deliver()
}
