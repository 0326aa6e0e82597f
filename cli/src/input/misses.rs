//! The source of a simulation's misses: the setup, a file, or a trace that the production pools replay.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use forebay::predict::misses::{Misses, Table};
use forebay::predict::provenance::Provenance;
use forebay::predict::setup::Setup;
use forebay::{Error, Kind, Result};

use super::allowance::{Allowance, Replayed};
use super::file_kind::{self, FileKind};
use super::selection_trace::{self, Recorded};
use super::sizes;
use crate::present::numbers::counted;
use crate::present::output::{self, Input, echo};
use crate::study::lru_stack;
use crate::study::pools::Setting;

/// Prompt steps replayed before the first decode step, if the trace has as many.
const WARMUP: u32 = 32;

/// The options that name the source.
#[derive(clap::Args)]
pub struct MissArguments {
    /// Takes misses from a JSON file instead of the setup: a curve, a table by layer, or a replay's steps, in the form
    /// of a setup's field `misses`.
    #[arg(long, value_name = "FILE", conflicts_with = "trace", requires = "setup")]
    misses: Option<PathBuf>,
    /// Takes misses from a selection trace, which the production pools replay at each ratio and --mtp. A layer of
    /// the model takes the misses of the trace's layer at the same relative depth.
    #[arg(long, value_name = "FILE", requires = "setup")]
    trace: Option<PathBuf>,
    /// With --trace: the most memory that its replay may hold on this machine, such as 8GiB [default: the decoded
    /// trace and 500MB].
    #[arg(long, value_name = "SIZE", requires = "trace", value_parser = sizes::some_bytes)]
    memory: Option<u64>,
}

/// Misses by ratio and query rows.
pub enum Source {
    /// The setup's own.
    Setup,
    /// A file's.
    File(PathBuf, Misses),
    /// A trace's, counted once when they are first needed.
    Trace(Box<Traced>),
}

/// A trace and its counts.
pub struct Traced {
    path: PathBuf,
    recorded: Recorded,
    /// What a replay may hold.
    allowance: Allowance,
    /// By slots and query rows: mean misses a step, by the trace's layers.
    known: HashMap<(u32, u32), Vec<f64>>,
}

impl MissArguments {
    /// The named files.
    pub fn inputs(&self) -> impl Iterator<Item = Input<'_>> {
        let misses = self.misses.as_deref().map(|path| ("misses", path));
        misses.into_iter().chain(self.trace.as_deref().map(|path| ("trace", path)))
    }

    /// Reads the named source.
    ///
    /// # Errors
    /// Errors of reading it, and of numbers that do not fit the setup's layers.
    pub fn source(&self, setup: &Setup) -> Result<Source> {
        if let Some(path) = &self.misses {
            file_kind::expect("read misses", path, &[], "the field misses of a setup")?;
            let text = output::read_text(path)?;
            let misses: Misses = serde_json::from_str(&text).map_err(|error| {
                Error::new(Kind::BadFormat, "read misses")
                    .at(format!("{}: {}", echo(path.display()), echo(error)))
                    .hint("docs/setup-format.md describes the field misses")
            })?;
            misses.check(setup.shape()).map_err(|error| output::within(error, path))?;
            return Ok(Source::File(path.clone(), misses));
        }
        let Some(path) = &self.trace else { return Ok(Source::Setup) };
        file_kind::expect("--trace", path, &[FileKind::Selections], "a selection trace")?;
        let allowance = Allowance { of: Replayed::Misses, memory: self.memory };
        // The memory of its replays depends on ratios and query rows, and is checked for each of them.
        let recorded = selection_trace::read(path, &allowance, |_, _| Ok(0))?;
        let path = path.clone();
        Ok(Source::Trace(Box::new(Traced { path, recorded, allowance, known: HashMap::new() })))
    }
}

fn refused(path: &Path, what: &str) -> Error {
    Error::new(Kind::InvalidConfig, "simulate").at(format!("{}: {what}", echo(path.display())))
}

impl Source {
    /// The misses at a ratio and a number of query rows; none for the setup's own.
    ///
    /// # Errors
    /// Errors of a replay.
    pub fn at(&mut self, setup: &Setup, ratio: f64, mtp: u32) -> Result<Option<Misses>> {
        match self {
            Source::Setup => Ok(None),
            Source::File(_, misses) => Ok(Some(misses.clone())),
            Source::Trace(traced) => traced.table(setup, ratio, mtp).map(Some),
        }
    }

    /// The provenance of figures of `setup` with these misses.
    pub fn provenance(&self, setup: &Setup) -> Provenance {
        let provenance = Provenance::of(setup);
        match self {
            Source::Setup => provenance,
            Source::File(path, _) => provenance.with_misses_from(&path.display().to_string()),
            Source::Trace(traced) => {
                provenance.with_misses_from(&format!("{} replayed", traced.path.display()))
            }
        }
    }

    /// Whether the misses are counted for each ratio separately.
    pub const fn is_trace(&self) -> bool {
        matches!(self, Source::Trace(_))
    }

    /// Whether the misses depend on the ratio.
    pub fn is_by_ratio(&self, setup: &Setup) -> bool {
        let misses = match self {
            Source::Trace(_) => return true,
            Source::File(_, misses) => Some(misses),
            Source::Setup => setup.file().misses.as_ref(),
        };
        misses.is_none_or(|misses| matches!(misses, Misses::Curve(_)))
    }

    /// What a reader should know about the misses at `contexts`.
    pub fn note(&self, setup: &Setup, mut contexts: impl Iterator<Item = u32>) -> Option<String> {
        let Source::Trace(traced) = self else { return None };
        let (header, shape) = (&traced.recorded.header, setup.shape());
        let mut differ = Vec::new();
        if header.layers != shape.layers {
            differ.push(format!(
                "{}, spread over {} by depth",
                counted(header.layers, "layer"),
                shape.layers
            ));
        }
        if header.k != shape.top_k {
            differ.push(format!("k {}, not scaled to k {}", header.k, shape.top_k));
        }
        let end = traced.end();
        if contexts.any(|context| context != end) {
            differ.push(format!("{} of context, not scaled to another", counted(end, "token")));
        }
        let path = output::harmless(&traced.path.display().to_string());
        (!differ.is_empty()).then(|| format!("Misses of {path}: {}.", differ.join("; ")))
    }
}

impl Traced {
    /// Tokens of the trace's context at its end. A ratio is a share of it, as it is for a planned sequence.
    fn end(&self) -> u32 {
        let header = &self.recorded.header;
        header.decode_start.saturating_add(header.decode_steps())
    }

    /// Mean misses a step, by the trace's layers.
    fn count(&mut self, setup: &Setup, slots: u32, mtp: u32) -> Result<Vec<f64>> {
        if let Some(known) = self.known.get(&(slots, mtp)) {
            return Ok(known.clone());
        }
        let Recorded { header, trace } = &self.recorded;
        let steps = header.decode_steps() / mtp;
        if steps == 0 {
            return Err(refused(
                &self.path,
                "one step of --mtp query rows needs more decode steps than the trace has",
            )
            .with("mtp", mtp)
            .with("decode_steps", header.decode_steps()));
        }
        let setting = Setting { slots, warmup: WARMUP.min(header.warm_steps), mtp, steps };
        let named = |error| selection_trace::named(error, &self.path);
        let needs = lru_stack::needs(trace.header(), setup.shape(), setting).map_err(named)?;
        self.allowance.check_of(&self.path, 4 * trace.members(), needs)?;
        let outcome = lru_stack::replay(trace, setup.shape(), setting, || {}).map_err(named)?;
        let layers = outcome.layers;
        let means: Vec<f64> = layers.iter().map(|(_, misses)| *misses as f64 / f64::from(steps)).collect();
        self.known.insert((slots, mtp), means.clone());
        Ok(means)
    }

    /// The model's layers, each with the misses of the trace's layer at the same relative depth.
    fn table(&mut self, setup: &Setup, ratio: f64, mtp: u32) -> Result<Misses> {
        let slots = ((ratio * f64::from(self.end()) + 0.5).floor() as u32).max(1);
        let counted = self.count(setup, slots, mtp)?;
        let layers = setup.shape().layers;
        let rows = (0..layers).map(|layer| {
            let depth = u64::from(layer) * counted.len() as u64 / u64::from(layers.max(1));
            counted.get(depth as usize).copied().unwrap_or(0.0)
        });
        let rows = rows.collect();
        // The share of a step's misses that one query row reads is counted as well, not assumed.
        let alone: f64 = if mtp > 1 { self.count(setup, slots, 1)?.iter().sum() } else { 0.0 };
        let together: f64 = counted.iter().sum();
        let power = (together / alone).ln() / f64::from(mtp).ln();
        let query_rows_power = if power.is_finite() { power.clamp(0.0, 1.0) } else { 1.0 };
        Ok(Misses::Table(Table { query_rows: f64::from(mtp), query_rows_power, rows }))
    }
}
