//! `forebay fit`: makes a setup from measurements, and reports the residual of each measured row.

use std::path::Path;

use forebay::device::rates::Rates;
use forebay::predict::fit::{self, Measurements};
use forebay::predict::provenance::Part;
use forebay::predict::setup::{self, Link};
use forebay::{Error, Kind, Result};
use serde_json::Value;

use super::args::Arguments;
use super::{json, text};
use crate::input::file_kind::{self, FileKind};
use crate::present::json::escaped;
use crate::present::output::{self, Input, Results, echo};

/// Rates of a link, and the GPU of the `forebay doctor` run that measured them.
struct LinkRates {
    rates: Rates,
    /// The GPU; none if the file names none.
    measured_on: Option<String>,
}

impl LinkRates {
    /// Replaces the measurements' own rates, and records where the new ones come from.
    fn into_setup(self, measured: &mut Measurements) {
        let file = &mut measured.setup;
        measured.rates = None;
        file.link = Link::Rates(self.rates);
        file.measured.retain(|part| *part != Part::Link);
        file.forebay_setup = file.forebay_setup.max(setup::STATED);
        match self.measured_on {
            Some(device) => {
                file.measured.push(Part::Link);
                file.source.push(format!("the link's rates: forebay doctor, {device}"));
            }
            None => file.source.push("the link's rates: from a file that names no measured GPU".to_owned()),
        }
    }
}

/// The link's rates: alone, as a field of an object, or from the first object of a list that has them, as
/// `forebay doctor` writes them. The rates of its host device are of memory, not of a GPU's link.
fn rates(path: &Path) -> Result<LinkRates> {
    let bad = |what: String| {
        Error::new(Kind::BadFormat, "read rates")
            .at(format!("{}: {}", echo(path.display()), echo(what)))
            .hint("pass rates as a setup's link.rates has them, alone or as a field rates")
    };
    file_kind::expect("read rates", path, &[FileKind::Results], "rates")?;
    let text = output::read_text(path)?;
    let mut value: Value = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
    if let Some(entries) = value.as_array_mut() {
        let found = entries.iter_mut().find(|entry| entry.get("rates").is_some()).map(Value::take);
        value = found.ok_or_else(|| bad("no entry has a field rates".to_owned()))?;
    }
    let measured_on = measured_on(&value);
    if let Some(inner) = value.get_mut("rates") {
        value = inner.take();
    }
    let rates: Rates = serde_json::from_value(value).map_err(|error| bad(format!("rates: {error}")))?;
    rates.check().map_err(|error| output::within(error, path))?;
    Ok(LinkRates { rates, measured_on })
}

/// The GPU of an entry of `forebay doctor`, in words.
fn measured_on(entry: &Value) -> Option<String> {
    let text = |of: &Value| of.as_str().map(output::harmless);
    let device = entry.get("device").and_then(text).filter(|device| device.starts_with("cuda"))?;
    entry.get("kind").and_then(Value::as_str).filter(|kind| *kind == "doctor")?;
    let name = entry.pointer("/facts/name").and_then(text);
    Some(name.map_or_else(|| device.clone(), |name| format!("{name}, {device}")))
}

/// `forebay fit`.
///
/// # Errors
/// Errors of reading the measurements and rates, of measurements that no setup can meet, and of writing the setup.
pub fn command(arguments: &Arguments) -> Result<()> {
    let targets = [("--output", arguments.output.as_deref()), ("--json", arguments.json.as_deref())];
    let path = &arguments.measurements;
    let rates_file = arguments.rates.as_deref().map(|path| ("rates", path));
    let inputs: Vec<Input<'_>> =
        std::iter::once(("measurements", path.as_path())).chain(rates_file).collect();
    output::check_targets("fit", &targets, &inputs)?;
    file_kind::expect("fit", path, &[FileKind::Measurements], "a file of measurements")?;
    let mut measured =
        Measurements::parse(&output::read_text(path)?).map_err(|error| output::within(error, path))?;
    if let Some(path) = &arguments.rates {
        rates(path)?.into_setup(&mut measured);
    }
    let fitted = fit::fit(&measured).map_err(|error| output::within(error, path))?;
    let setup = escaped(fitted.setup.file().text()?.into_bytes());
    let mut results = Results::default();
    if let Some(path) = &arguments.output {
        results.write(path, setup);
    }
    if let Some(path) = &arguments.json {
        results.write(path, json::text(&fitted)?);
    }
    if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text::report(&fitted, look)));
    }
    results.deliver()
}
