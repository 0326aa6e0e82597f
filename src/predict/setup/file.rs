//! The content of a setup file, field by field, and what can be checked of it without a roofline or rates.
//!
//! [`Setup`](super::Setup) is a checked file with what follows from it; this file does not need it. Terminals and pages
//! show a file's origin and assumptions, so a text that could steer a terminal is refused.

use serde::{Deserialize, Serialize};

use super::term::Term;
use crate::device::rates::{HostCosts, Rates};
use crate::error::{Error, Kind, Result};
use crate::predict::cost::Cost;
use crate::predict::misses::Misses;
use crate::predict::model::{Deployment, Gpu, Model};
use crate::predict::wrong;
use crate::text::steers;

/// The newest version; versions from [`OLDEST`] on are read.
pub const VERSION: u64 = 3;

/// The version that states where its numbers come from, and that is written unless a file needs a newer one.
pub const STATED: u64 = 2;

/// The oldest version that is read. It has no origin, measured parts, assumptions and GPUs of the costs.
pub const OLDEST: u64 = 1;

/// The longest text of a setup's provenance, in characters, and the most assumptions.
const TEXT_MAX: usize = 240;
const ASSUMPTIONS_MAX: usize = 32;

/// A part of a setup that can be measured on a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The costs of an engine's works.
    Costs,
    /// The rates of the link.
    Link,
    /// The rows that a step fetches.
    Misses,
}

impl Part {
    /// All of them.
    pub const ALL: [Part; 3] = [Part::Costs, Part::Link, Part::Misses];

    /// Its name in `measured` of a setup.
    pub const fn name(self) -> &'static str {
        match self {
            Part::Costs => "costs",
            Part::Link => "link",
            Part::Misses => "misses",
        }
    }
}

/// The measured costs; the roofline replaces absent ones.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// See [`Term::Project`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<Cost>,
    /// See [`Term::Index`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<Cost>,
    /// See [`Term::Prepare`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepare: Option<Cost>,
    /// See [`Term::Attend`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attend: Option<Cost>,
    /// See [`Term::Merge`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<Cost>,
    /// See [`Term::Rest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest: Option<Cost>,
    /// See [`Term::Exchange`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchange: Option<Cost>,
    /// See [`Term::Step`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<Cost>,
}

impl Costs {
    /// The measured cost of a term.
    pub fn get(&self, term: Term) -> Option<&Cost> {
        match term {
            Term::Project => self.project.as_ref(),
            Term::Index => self.index.as_ref(),
            Term::Prepare => self.prepare.as_ref(),
            Term::Attend => self.attend.as_ref(),
            Term::Merge => self.merge.as_ref(),
            Term::Rest => self.rest.as_ref(),
            Term::Exchange => self.exchange.as_ref(),
            Term::Step => self.step.as_ref(),
        }
    }
}

/// The conditions under which a batch runs as two micro-batches, each of which hides the other's exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TwoBatch {
    /// The least batch.
    pub batch_from: u32,
    /// The longest context, in tokens.
    pub context_to: u32,
}

/// The widths, in keys, for which the calls of split attention are captured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Captured {
    /// The width of the call over resident rows: all k, or k less the expected misses.
    pub resident: Resident,
    /// The width of the call over fetched rows, as a factor on the expected misses of a query row, at least 1.
    pub fetched_margin: f64,
}

/// See [`Captured::resident`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resident {
    /// The whole top-k, regardless of misses.
    TopK,
    /// The top-k less the expected misses.
    Hits,
}

/// Widths of attention are multiples of this.
pub const WIDTH: f64 = 64.0;

impl Captured {
    /// The widths of the calls over resident and over fetched rows, if a query row of `k` keys
    /// misses `misses` of them.
    pub fn widths(&self, k: u32, misses: f64) -> (f64, f64) {
        let k = f64::from(k);
        let up = |keys: f64| ((keys / WIDTH).ceil() * WIDTH).clamp(WIDTH, (k / WIDTH).ceil() * WIDTH);
        let resident = match self.resident {
            Resident::TopK => up(k),
            Resident::Hits => up(k - misses),
        };
        (resident, up(misses * self.fetched_margin))
    }
}

/// The costs of forebay's own operations apart from the link, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operations {
    /// The fixed cost of a resolve.
    pub resolve_us: f64,
    /// The cost of a resolve's query row.
    pub resolve_row_us: f64,
    /// The fixed cost of a gather or scatter.
    pub move_us: f64,
    /// The cost of a step's begin and report.
    pub step_us: f64,
}

/// The link: a preset of [`Rates::PRESETS`], or measured rates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Link {
    /// By name.
    Preset(String),
    /// Measured rates.
    Rates(Rates),
}

/// The content of a setup file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// The version: [`VERSION`], or an older one.
    pub forebay_setup: u64,
    /// A short name.
    pub name: String,
    /// The source of the numbers in one line, shown with every figure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// The parts that were measured on a machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<Part>,
    /// The assumptions in sentences, shown with every figure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assumptions: Vec<String>,
    /// The source of the numbers in full.
    pub source: Vec<String>,
    /// The model.
    pub model: Model,
    /// The GPU.
    pub gpu: Gpu,
    /// The GPUs that serve together.
    pub deployment: Deployment,
    /// The link between host and device.
    pub link: Link,
    /// Two-batch overlap; absent if the engine has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub two_batch: Option<TwoBatch>,
    /// Widths of split attention.
    pub captured: Captured,
    /// Costs of forebay's own operations.
    #[serde(default)]
    pub operations: Operations,
    /// The host's time to enqueue a step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostCosts>,
    /// Measured costs.
    #[serde(default)]
    pub costs: Costs,
    /// Rows that a step fetches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub misses: Option<Misses>,
}

impl File {
    /// Refuses fields of a later version than the file's, which an older build would refuse.
    pub(super) fn check_version(&self) -> Result<()> {
        let new = [
            ("origin", STATED, self.origin.is_some()),
            ("host", STATED, self.host.is_some()),
            ("measured", STATED, !self.measured.is_empty()),
            ("assumptions", STATED, !self.assumptions.is_empty()),
            ("deployment.costs_gpus", STATED, self.deployment.costs_gpus.is_some()),
            ("deployment.nvlink_gb_s", STATED, self.deployment.nvlink_gb_s.is_some()),
            ("model.weight_dtype", 3, self.model.weight_dtype.is_some()),
        ];
        match new.iter().find(|(_, since, there)| *there && self.forebay_setup < *since) {
            Some((field, since, _)) => Err(wrong(format!(
                "{field}: a field of version {since}, but forebay_setup is {}",
                self.forebay_setup
            ))),
            None => Ok(()),
        }
    }

    /// Checks that the origin, the assumptions and the measured parts can be shown, and belong to the rest of the file.
    pub(super) fn check_stated(&self) -> Result<()> {
        if let Some(origin) = &self.origin {
            shown(origin, "origin")?;
        }
        if self.assumptions.len() > ASSUMPTIONS_MAX {
            return Err(wrong("too many assumptions")
                .with("sentences", self.assumptions.len() as u64)
                .with("most", ASSUMPTIONS_MAX as u64));
        }
        for (i, text) in self.assumptions.iter().enumerate() {
            shown(text, &format!("assumptions[{i}]"))?;
        }
        for (i, part) in self.measured.iter().enumerate() {
            if self.measured.iter().take(i).any(|other| other == part) {
                return Err(wrong(format!("measured[{i}]: \"{}\" appears twice", part.name())));
            }
        }
        let measures = |part| self.measured.contains(&part);
        if measures(Part::Misses) && self.misses.is_none() {
            return Err(wrong("measured: \"misses\", but the setup has none"));
        }
        if measures(Part::Link) && matches!(self.link, Link::Preset(_)) {
            return Err(wrong("measured: \"link\", but the link is a preset"));
        }
        Ok(())
    }

    /// The file's text: JSON, with lists of numbers in lines of up to 110 characters.
    ///
    /// # Errors
    /// [`Kind::Internal`] if it cannot be written as JSON.
    pub fn text(&self) -> Result<String> {
        let pretty = serde_json::to_string_pretty(self)
            .map_err(|e| Error::new(Kind::Internal, "write setup").at(e.to_string()))?;
        let mut text = String::with_capacity(pretty.len());
        let mut lines = pretty.lines().peekable();
        while let Some(line) = lines.next() {
            text.push_str(line);
            let number = |line: &str| line.trim_start().starts_with(|c: char| c.is_ascii_digit() || c == '-');
            if line.ends_with('[') && lines.peek().is_some_and(|next| number(next)) {
                let mut width = line.len();
                while let Some(entry) = lines.next_if(|next| number(next)).map(str::trim) {
                    let indent = line.len() - line.trim_start().len() + 2;
                    if width + 1 + entry.len() > 110 {
                        text.push_str(&format!("\n{:indent$}", ""));
                        width = indent;
                    } else if !text.ends_with('[') {
                        text.push(' ');
                    }
                    text.push_str(entry);
                    width += 1 + entry.len();
                }
                text.push_str(lines.next().unwrap_or_default().trim_start());
            }
            text.push('\n');
        }
        Ok(text)
    }
}

/// Checks that a text is one short line without control characters.
fn shown(text: &str, place: &str) -> Result<()> {
    if text.trim().is_empty() {
        return Err(wrong(format!("{place}: empty")));
    }
    let length = text.chars().count();
    if length > TEXT_MAX {
        return Err(wrong(format!("{place}: longer than one line"))
            .with("characters", length as u64)
            .with("most", TEXT_MAX as u64));
    }
    match text.chars().find(|c| hides(*c)) {
        Some(c) => Err(wrong(format!(
            "{place}: the character U+{:04X} is not allowed in a line of text",
            u32::from(c)
        ))),
        None => Ok(()),
    }
}

/// Whether a character steers a terminal, or is invisible.
fn hides(c: char) -> bool {
    steers(c) || matches!(c, '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2065}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::setup::Setup;

    #[test]
    fn texts_with_control_characters_or_false_claims_are_refused() {
        let refused = |change: &dyn Fn(&mut File), words: &str| {
            let mut file = Setup::named("ess").unwrap().unwrap().file().clone();
            change(&mut file);
            let error = Setup::new(file).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused(&|file| file.origin = Some("\u{1b}[2J".to_owned()), "origin: the character U+001B");
        refused(&|file| file.origin = Some("a\nb".to_owned()), "origin: the character U+000A");
        refused(&|file| file.origin = Some("x\u{202e}y".to_owned()), "origin: the character U+202E");
        refused(&|file| file.origin = Some(" ".to_owned()), "origin: empty");
        refused(&|file| file.origin = Some("x".repeat(241)), "origin: longer");
        refused(&|file| file.assumptions = vec!["a".to_owned(), "\u{7f}".to_owned()], "assumptions[1]");
        refused(&|file| file.assumptions = vec!["a".to_owned(); 33], "too many assumptions");
        refused(&|file| file.measured = vec![Part::Link; 2], "measured[1]: \"link\" appears twice");
        refused(
            &|file| {
                file.measured = vec![Part::Misses];
                file.misses = None;
            },
            "measured: \"misses\"",
        );
        refused(
            &|file| {
                file.measured = vec![Part::Link];
                file.link = Link::Preset("pcie5".to_owned());
            },
            "measured: \"link\"",
        );
        refused(&|file| file.forebay_setup = 1, "of version 2");
    }
}
