//! A setup: one versioned JSON file with the costs of an engine's step on a machine.
//!
//! `docs/setup-format.md` describes the file field by field. [`File`] is the file's content, [`Setup`] a
//! checked file with derived values. The version is a separate integer. A field that this build does
//! not support is refused, so that a misspelt field never silently becomes a default.

pub(super) mod file;
mod term;

pub use file::{Captured, Costs, File, Link, OLDEST, Operations, Resident, STATED, TwoBatch, VERSION, WIDTH};
pub use term::Term;

use file::Part;

use super::cost::Load;
use super::misses::Misses;
use super::model::{Deployment, Dims, Model, Served};
use super::roofline::Roofline;
use super::{finite, parse, wrong};
use crate::device::rates::{HostCosts, Rates, RowRates};
use crate::error::{Error, Kind, Result};
use crate::geometry::Shape;
use crate::text::echo;

/// The built-in setups, by name.
const EMBEDDED: [(&str, &str); 3] = [
    ("ess", include_str!("../../../data/setups/ess.json")),
    ("r1-h20", include_str!("../../../data/setups/r1-h20.json")),
    ("r1-h800", include_str!("../../../data/setups/r1-h800.json")),
];

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
    /// [`Kind::InvalidConfig`] names the field: a negative time, NaN, a hole, an unknown preset, layers that do not
    /// match, misses of dense attention.
    pub fn new(file: File) -> Result<Setup> {
        if !(OLDEST..=VERSION).contains(&file.forebay_setup) {
            return Err(Error::new(Kind::BadVersion, "read setup")
                .at("forebay_setup")
                .with("version", file.forebay_setup)
                .with("known", VERSION));
        }
        file.check_version()?;
        file.check_stated()?;
        file.gpu.check()?;
        file.deployment.check()?;
        let (shape, dims) = (file.model.shape()?, file.model.dims()?);
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
            if shape.top_k == 0 {
                return Err(wrong("misses: dense attention reads every row and misses none; leave them out"));
            }
            misses.check(&shape)?;
        }
        let roofline = Roofline {
            dims,
            index_key_bytes: f64::from(shape.index_key_bytes),
            row_bytes: shape.runs.into_iter().map(f64::from).sum(),
            dense: shape.top_k == 0,
            weights: file.model.weights(),
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
    /// [`Kind::InvalidConfig`] for an unknown preset, or one without dimensions.
    pub fn of_model(&self, name: &str) -> Result<Setup> {
        if self.file.model.preset.as_deref() == Some(name) {
            return Ok(self.clone());
        }
        let model =
            Model { preset: Some(name.to_owned()), shape: None, dims: None, ..self.file.model.clone() };
        let layers = model.shape()?.layers;
        // Dense attention reads every row, so none is missed.
        let sparse = model.shape()?.top_k > 0;
        let misses = self.file.misses.as_ref().filter(|_| sparse).map(|misses| misses.spread(layers));
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
        let file =
            File { forebay_setup: self.file.forebay_setup.max(STATED), deployment, ..self.file.clone() };
        Ok(Setup { other_link: self.other_link.clone(), ..Setup::new(file)? })
    }

    /// The replacement of the file's own link, in words.
    pub(super) fn other_link(&self) -> Option<&str> {
        self.other_link.as_deref()
    }

    /// The GPUs of this setup's figures.
    pub fn served(&self) -> Served {
        self.file.deployment.served()
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

    /// Whether attention reads every row. Such a setup has no misses, and the simulator has no step of it.
    pub const fn is_dense(&self) -> bool {
        self.shape.top_k == 0
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
