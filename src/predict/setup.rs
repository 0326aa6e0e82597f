//! A setup: one versioned JSON file with the costs of an engine's step on a machine.
//!
//! `docs/setup-format.md` describes the file field by field. [`File`] is the file's content, [`Setup`] a
//! checked file with derived values. The version is a separate integer. A field that this build does
//! not support is refused, so that a misspelt field never silently becomes a default.

use serde::{Deserialize, Serialize};

use super::cost::{Cost, Load};
use super::misses::Misses;
use super::model::{Deployment, Dims, Gpu, Model};
use super::provenance::{self, Part, Served};
use super::roofline::Roofline;
use super::{finite, parse, wrong};
use crate::device::rates::{HostCosts, Rates, RowRates};
use crate::error::{Error, Kind, Result};
use crate::geometry::Shape;
use crate::text::echo;

/// The version that is written; versions from [`OLDEST`] on are read.
pub const VERSION: u64 = 2;

/// The oldest version that is read. It has no origin, measured parts, assumptions and GPUs of the costs.
pub const OLDEST: u64 = 1;

/// The built-in setups, by name.
const EMBEDDED: [(&str, &str); 1] = [("ess", include_str!("../../data/setups/ess.json"))];

/// A work that has a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Term {
    /// I0: the projections before the indexer.
    Project,
    /// I: the indexer's logits and top-k.
    Index,
    /// P: the preparation of attention.
    Prepare,
    /// A: attention, by its width.
    Attend,
    /// M: the merge of split attention.
    Merge,
    /// The rest of a layer after attention, without the exchange of the experts' tokens.
    Rest,
    /// That exchange, if no other micro-batch hides it.
    Exchange,
    /// Once a step: embedding, output, sampling, drafting.
    Step,
}

impl Term {
    /// All terms.
    pub const ALL: [Term; 8] = [
        Term::Project,
        Term::Index,
        Term::Prepare,
        Term::Attend,
        Term::Merge,
        Term::Rest,
        Term::Exchange,
        Term::Step,
    ];

    /// The field of `costs`.
    pub const fn name(self) -> &'static str {
        match self {
            Term::Project => "project",
            Term::Index => "index",
            Term::Prepare => "prepare",
            Term::Attend => "attend",
            Term::Merge => "merge",
            Term::Rest => "rest",
            Term::Exchange => "exchange",
            Term::Step => "step",
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
    fn check_version(&self) -> Result<()> {
        let new = [
            ("origin", self.origin.is_some()),
            ("host", self.host.is_some()),
            ("measured", !self.measured.is_empty()),
            ("assumptions", !self.assumptions.is_empty()),
            ("deployment.costs_gpus", self.deployment.costs_gpus.is_some()),
            ("deployment.nvlink_gb_s", self.deployment.nvlink_gb_s.is_some()),
        ];
        match new.iter().find(|(_, there)| *there && self.forebay_setup < 2) {
            Some((field, _)) => Err(wrong(format!("{field}: a field of version 2, but forebay_setup is 1"))),
            None => Ok(()),
        }
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

/// A checked setup.
#[derive(Clone, Debug)]
pub struct Setup {
    file: File,
    shape: Shape,
    rates: Rates,
    roofline: Roofline,
    /// The roofline on the GPUs of the measured costs.
    of_costs: Roofline,
    /// The replacement of the file's own link, in words.
    other_link: Option<String>,
}

impl Setup {
    /// The names of the built-in setups.
    pub fn names() -> impl Iterator<Item = &'static str> {
        EMBEDDED.iter().map(|(name, _)| *name)
    }

    /// The built-in setup called `name`; none if there is no such setup.
    ///
    /// # Errors
    /// Errors of [`Setup::parse`]; a built-in setup has none.
    pub fn named(name: &str) -> Option<Result<Setup>> {
        EMBEDDED.iter().find(|(known, _)| *known == name).map(|(_, text)| Setup::parse(text))
    }

    /// Reads the text of a setup file.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for a text that is not JSON, and for an unknown, missing or mistyped field;
    /// [`Kind::BadVersion`]; errors of [`Setup::new`]. The place is the field's path.
    pub fn parse(text: &str) -> Result<Setup> {
        Setup::new(parse(text, "forebay_setup", OLDEST..=VERSION)?)
    }

    /// Checks a setup.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the field: a negative time, NaN, a hole, an unknown preset, a model without
    /// top-k, layers that do not match.
    pub fn new(file: File) -> Result<Setup> {
        if !(OLDEST..=VERSION).contains(&file.forebay_setup) {
            return Err(Error::new(Kind::BadVersion, "read setup")
                .at("forebay_setup")
                .with("version", file.forebay_setup)
                .with("known", VERSION));
        }
        file.check_version()?;
        provenance::check(&file)?;
        file.gpu.check()?;
        file.deployment.check()?;
        let (shape, dims) = (file.model.shape()?, file.model.dims()?);
        if shape.top_k == 0 {
            return Err(wrong("model: dense attention selects nothing; the simulator needs a top-k"));
        }
        let rates = match &file.link {
            Link::Rates(rates) => rates.clone(),
            Link::Preset(name) => preset_of(name)?,
        };
        rates.check().map_err(|e| wrong(format!("link.rates.{}", e.place())))?;
        let margin = file.captured.fetched_margin;
        if !(margin.is_finite() && margin >= 1.0) {
            return Err(wrong(format!("captured.fetched_margin: {margin} is below 1, or not a number")));
        }
        let own = &file.operations;
        for (name, us) in [
            ("resolve_us", own.resolve_us),
            ("resolve_row_us", own.resolve_row_us),
            ("move_us", own.move_us),
            ("step_us", own.step_us),
        ] {
            finite(us, || format!("operations.{name}"))?;
        }
        let host = file.host.unwrap_or_default();
        host.check().map_err(|e| wrong(format!("host.{}", e.place())))?;
        for term in Term::ALL {
            if let Some(cost) = file.costs.get(term) {
                cost.check(&format!("costs.{}", term.name()))?;
            }
        }
        if let Some(misses) = &file.misses {
            misses.check(&shape)?;
        }
        let roofline = Roofline {
            dims,
            index_key_bytes: f64::from(shape.index_key_bytes),
            row_bytes: shape.runs.into_iter().map(f64::from).sum(),
            gpu: file.gpu.clone(),
            deployment: file.deployment.clone(),
        };
        let setup = Setup {
            of_costs: roofline.on(file.deployment.costs_gpus()),
            file,
            shape,
            rates,
            roofline,
            other_link: None,
        };
        setup.check_deployment()?;
        Ok(setup)
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.file.name
    }

    /// The cache's geometry, including draft layers.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The model's dimensions.
    pub fn dims(&self) -> &Dims {
        &self.roofline.dims
    }

    /// The rates of the link.
    pub fn rates(&self) -> &Rates {
        &self.rates
    }

    /// The host's time to enqueue a step.
    pub fn host(&self) -> HostCosts {
        self.file.host.unwrap_or_default()
    }

    /// The roofline that replaces missing measurements.
    pub fn roofline(&self) -> &Roofline {
        &self.roofline
    }

    /// The roofline on the GPUs of the measured costs.
    pub(super) fn roofline_of_costs(&self) -> &Roofline {
        &self.of_costs
    }

    /// The same setup on another link. Of a preset the rates are taken; launches and the SMs of a gather belong to
    /// the GPU, and stay the setup's.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for an unknown link or an invalid rate.
    pub fn on_link(&self, link: Link) -> Result<Setup> {
        match link {
            Link::Rates(rates) => self.at_rates(rates, "other rates than the setup's".to_owned()),
            Link::Preset(name) => {
                let Rates { launch_ns, gather_sm, .. } = self.rates;
                let rates = Rates { launch_ns, gather_sm, ..preset_of(&name)? };
                self.at_rates(rates, format!("the preset {name}"))
            }
        }
    }

    /// The same setup with these rates, whose source `other` describes.
    fn at_rates(&self, rates: Rates, other: String) -> Result<Setup> {
        let mut file = File { link: Link::Rates(rates), ..self.file.clone() };
        file.measured.retain(|part| *part != Part::Link);
        Ok(Setup { other_link: Some(other), ..Setup::new(file)? })
    }

    /// The same setup with single rows gathered at `bytes_per_s`, for any number of rows. Nothing else changes:
    /// not the scatter, the plain copies, the launches or the SMs of a gather.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a rate below 1 byte per second, or NaN.
    pub fn on_gather(&self, bytes_per_s: f64) -> Result<Setup> {
        let gather = RowRates::flat(self.rates.gather.row_bytes, bytes_per_s);
        let other = format!(
            "single rows gathered at {} GB/s, as given; all other rates are the setup's",
            bytes_per_s / 1e9
        );
        self.at_rates(Rates { gather, ..self.rates.clone() }, other)
    }

    /// The same machine with the preset model `name`. Costs measured with another model do not apply, so the model's
    /// roofline replaces all of them. Its layers have the misses of the setup's layers at the same relative depth.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for an unknown preset, or one without dimensions or top-k.
    pub fn of_model(&self, name: &str) -> Result<Setup> {
        if self.file.model.preset.as_deref() == Some(name) {
            return Ok(self.clone());
        }
        let model =
            Model { preset: Some(name.to_owned()), shape: None, dims: None, ..self.file.model.clone() };
        let layers = model.shape()?.layers;
        let misses = self.file.misses.as_ref().map(|misses| misses.spread(layers));
        let name = format!("{}, {name} by its roofline", self.file.name);
        // Measurements of another model are not measurements of this one.
        let measured = self.file.measured.iter().copied().filter(|part| *part == Part::Link).collect();
        let file = File { name, model, misses, measured, costs: Costs::default(), ..self.file.clone() };
        Ok(Setup { other_link: self.other_link.clone(), ..Setup::new(file)? })
    }

    /// The same setup served by `gpus` GPUs: its measured costs keep their number of GPUs, and the model of
    /// [`super::experts`] prices the difference for the experts and their exchange.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] in one line for GPUs that the model cannot price.
    pub fn on_gpus(&self, gpus: u32) -> Result<Setup> {
        if gpus == self.file.deployment.gpus {
            return Ok(self.clone());
        }
        let costs_gpus = Some(self.file.deployment.costs_gpus());
        let deployment = Deployment { gpus, costs_gpus, ..self.file.deployment.clone() };
        let file = File { forebay_setup: VERSION, deployment, ..self.file.clone() };
        Ok(Setup { other_link: self.other_link.clone(), ..Setup::new(file)? })
    }

    /// The replacement of the file's own link, in words.
    pub(super) fn other_link(&self) -> Option<&str> {
        self.other_link.as_deref()
    }

    /// The GPUs of this setup's figures.
    pub fn served(&self) -> Served {
        let Deployment { gpus, node_gpus, .. } = self.file.deployment;
        let costs_gpus = self.file.deployment.costs_gpus();
        Served { gpus, node_gpus: node_gpus.min(gpus), costs_gpus, extrapolated: gpus != costs_gpus }
    }

    /// Whether a batch runs as two micro-batches.
    pub fn two_batch(&self, batch: u32, context: u32) -> bool {
        batch >= 2 && self.file.two_batch.is_some_and(|t| batch >= t.batch_from && context <= t.context_to)
    }

    /// The cost of a term in microseconds, for one micro-batch and layer ([`Term::Step`]: for a step).
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a load too far beyond the measured points.
    pub fn us(&self, term: Term, load: &Load) -> Result<f64> {
        let Some(cost) = self.file.costs.get(term) else { return Ok(self.roofline.us(term, load)) };
        let us = cost.us(load, |load| self.of_costs.us(term, load), term.name())?;
        match self.served().extrapolated {
            true => self.elsewhere(term, load, us),
            false => Ok(us),
        }
    }

    /// The model of misses.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] if the setup has none.
    pub fn misses(&self) -> Result<&Misses> {
        self.file
            .misses
            .as_ref()
            .ok_or_else(|| wrong("misses: missing; set a curve, a table or a replay's steps"))
    }
}

fn preset_of(name: &str) -> Result<Rates> {
    Rates::preset(name).ok_or_else(|| {
        wrong(format!(
            "link.preset: unknown link {:?}; the presets are pcie4, pcie5, pcie6 and c2c",
            echo(name)
        ))
    })
}
