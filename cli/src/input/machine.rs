//! The machine that plans and steps are simulated on: a setup, its links, and where its misses come from.

use std::path::Path;

use forebay::predict::setup::{Link, Setup};
use forebay::predict::simulate::Simulator;
use forebay::{Error, Kind, Result};

use super::file_kind::{self, FileKind};
use super::misses::{MissArguments, Source};
use super::sizes;
use crate::present::output::{self, Input, echo};

/// The setup, and the misses of its model.
#[derive(clap::Args)]
pub struct Machine {
    /// A built-in setup, or a setup file, with the costs of an engine's step (docs/simulator.md).
    #[arg(long, value_name = "NAME|FILE")]
    pub setup: Option<String>,
    /// Links instead of the setup's: pcie4, pcie5, pcie6, c2c, or the rate at which single rows are gathered, such
    /// as 37GB/s; several are compared.
    #[arg(long, value_name = "NAME|RATE", value_delimiter = ',', requires = "setup")]
    link: Vec<String>,
    #[command(flatten)]
    misses: MissArguments,
}

impl Machine {
    /// The named files.
    pub fn inputs(&self) -> Vec<Input<'_>> {
        // The name of a built-in setup is not a file.
        let setup = self.setup.as_deref().filter(|name| Setup::named(name).is_none());
        setup.map(|name| ("setup", Path::new(name))).into_iter().chain(self.misses.inputs()).collect()
    }
}

/// A link, its name, and the simulator of the setup on it.
pub struct Linked {
    /// As named; none for the setup's own.
    pub link: Option<String>,
    /// The simulator, which caches the costs of layers.
    pub simulator: Simulator,
}

/// Accepted tokens for each number of query rows: one for all, or one for each.
///
/// # Errors
/// [`Kind::InvalidConfig`] where they are neither.
pub fn accepts(operation: &'static str, given: &[f64], mtps: &[u32]) -> Result<Vec<f64>> {
    match given {
        [] => Ok(vec![1.0; mtps.len()]),
        [one] => Ok(vec![*one; mtps.len()]),
        many if many.len() == mtps.len() => Ok(many.to_vec()),
        many => Err(Error::new(Kind::InvalidConfig, operation)
            .at("--accept needs one value, or one for each --mtp")
            .with("accept", many.len() as u64)
            .with("mtp", mtps.len() as u64)),
    }
}

/// The setup on a named link, or on its own link with another rate at which single rows are gathered.
fn on_link(setup: &Setup, text: &str) -> Result<Setup> {
    let Some(rate) = text.strip_suffix("GB/s") else { return setup.on_link(Link::Preset(text.to_owned())) };
    let wrong = || Error::new(Kind::InvalidConfig, "read link").at(format!("--link {}", echo(text)));
    let rate =
        sizes::positive(rate).map_err(|_| wrong().hint("pass a preset's name, or a rate such as 37GB/s"))?;
    setup.on_gather(rate * 1e9)
}

/// Reads a setup by its name or from its file; errors name it.
pub fn read_setup(name: &str) -> Result<Setup> {
    if let Some(setup) = Setup::named(name) {
        return setup;
    }
    let path = Path::new(name);
    if !path.exists() {
        let names: Vec<&str> = Setup::names().collect();
        return Err(Error::new(Kind::InvalidConfig, "read setup")
            .at(format!("--setup {}: neither a file nor a built-in setup ({})", echo(name), names.join(", ")))
            .hint("pass a built-in setup or a file"));
    }
    file_kind::expect("read setup", path, &[FileKind::Setup], "a setup")?;
    let text = output::read_text(path)?;
    Setup::parse(&text).map_err(|error| output::within(error, path))
}

impl Machine {
    /// Simulators of the setup on every link: of the preset `model` if it is not the setup's own, on `gpus` GPUs if
    /// they are not.
    ///
    /// # Errors
    /// Errors of reading it, of an unknown link, of a model without dimensions, and of GPUs that cannot be priced.
    pub fn simulators(&self, model: Option<&str>, gpus: Option<u32>) -> Result<Vec<Linked>> {
        let name = self.setup.as_deref().ok_or_else(|| {
            Error::new(Kind::InvalidConfig, "simulate")
                .at("--setup is not given")
                .hint("pass --setup with a built-in setup, such as ess, or a file")
        })?;
        let setup = read_setup(name)?;
        let own = self.of(&model.map_or_else(|| Ok(setup.clone()), |model| setup.of_model(model))?)?;
        let Some(gpus) = gpus else { return Ok(own) };
        let on = |Linked { link, simulator }: Linked| {
            let simulator = Simulator::new(simulator.setup().on_gpus(gpus)?);
            Ok(Linked { link, simulator })
        };
        own.into_iter().map(on).collect()
    }

    /// Simulators of `setup` on every link.
    ///
    /// # Errors
    /// Errors of an unknown link.
    pub fn of(&self, setup: &Setup) -> Result<Vec<Linked>> {
        if self.link.is_empty() {
            return Ok(vec![Linked { link: None, simulator: Simulator::new(setup.clone()) }]);
        }
        let on = |link: &String| {
            let changed = on_link(setup, link)?;
            Ok(Linked { link: Some(link.clone()), simulator: Simulator::new(changed) })
        };
        self.link.iter().map(on).collect()
    }

    /// How many links are compared.
    pub fn links(&self) -> usize {
        self.link.len().max(1)
    }

    /// The source of misses.
    ///
    /// # Errors
    /// Errors of reading it.
    pub fn source(&self, setup: &Setup) -> Result<Source> {
        self.misses.source(setup)
    }
}
