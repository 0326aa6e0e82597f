//! `forebay fit`: makes a setup from measurements, and reports the residual of each measured row.

use std::path::{Path, PathBuf};

use forebay::device::rates::Rates;
use forebay::predict::fit::{self, Fitted, Measurements};
use forebay::predict::provenance::{Part, Provenance};
use forebay::predict::setup::{self, Link};
use forebay::{Error, Kind, Result};
use serde::Serialize;
use serde_json::Value;

use crate::kinds::{self, FileKind};
use crate::look::{Look, LookArguments, Spare, align_right};
use crate::output::{Input, Results, echo};
use crate::report::{fixed, number, signed};
use crate::{json, output, provenance};

const AFTER_HELP: &str = "\
docs/setup-format.md describes measurements and setups. Times measured for single works are kept; the rest is fitted \
to whole steps and to the cost of overlap. --rates takes rates measured on this machine: the output of forebay doctor \
--json, or a JSON object with the fields of a setup's link.rates, alone or as the field rates of an object.";

/// The arguments of `forebay fit`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// The file of measurements.
    #[arg(value_name = "MEASUREMENTS")]
    measurements: PathBuf,
    /// Writes the setup, atomically; `-` prints it instead of the tables.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Rates of the link, instead of the measurements' own: JSON like a setup's link.rates, alone or as a field rates.
    #[arg(long, value_name = "FILE")]
    rates: Option<PathBuf>,
    /// Writes the results and the residuals as JSON; `-` prints them instead of the tables.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    look: LookArguments,
}

#[derive(Serialize)]
struct Entry<'a> {
    schema: u32,
    forebay: &'static str,
    kind: &'static str,
    provenance: Provenance,
    setup: &'a str,
    found: Vec<Found>,
    residuals: Vec<Residual<'a>>,
    mean_error: f64,
    most_error: f64,
}

#[derive(Serialize)]
struct Found {
    name: &'static str,
    unit: &'static str,
    value: f64,
}

#[derive(Serialize)]
struct Residual<'a> {
    row: &'a str,
    what: &'a str,
    unit: &'static str,
    measured: f64,
    fitted: f64,
    error: Option<f64>,
}

/// A residual as a share of the measured value; none if that is 0.
fn error_of(residual: &fit::Residual) -> Option<f64> {
    let error = (residual.fitted - residual.measured) / residual.measured;
    error.is_finite().then_some(error)
}

/// Mean and maximum of the absolute errors of whole steps; overlap residuals are compared in microseconds.
fn errors(fitted: &Fitted) -> (f64, f64) {
    let steps = fitted.residuals.iter().filter(|residual| residual.unit == "ms");
    let sizes: Vec<f64> = steps.filter_map(error_of).map(f64::abs).collect();
    let mean = sizes.iter().sum::<f64>() / sizes.len().max(1) as f64;
    (mean, sizes.into_iter().fold(0.0, f64::max))
}

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
        file.forebay_setup = setup::VERSION;
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
    kinds::expect("read rates", path, &[FileKind::Results], "rates")?;
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

fn residual(of: &fit::Residual) -> Residual<'_> {
    let fit::Residual { row, what, unit, measured, fitted } = of;
    Residual { row, what, unit, measured: *measured, fitted: *fitted, error: error_of(of) }
}

fn entry(fitted: &Fitted) -> Entry<'_> {
    let (mean_error, most_error) = errors(fitted);
    Entry {
        schema: json::SCHEMA,
        forebay: env!("CARGO_PKG_VERSION"),
        kind: "fit",
        provenance: Provenance::of(&fitted.setup),
        setup: fitted.setup.name(),
        found: fitted.found.iter().map(|f| Found { name: f.name, unit: f.unit, value: f.value }).collect(),
        residuals: fitted.residuals.iter().map(residual).collect(),
        mean_error,
        most_error,
    }
}

fn text(fitted: &Fitted, look: Look) -> String {
    let provenance = Provenance::of(&fitted.setup);
    let mut out = provenance::header(std::iter::once(&provenance)) + "\n";
    if !fitted.found.is_empty() {
        let mut found = look.table();
        found.set_header(["found", "value", "unit"]);
        for one in &fitted.found {
            found.add_row([one.name.to_owned(), format!("{:.4}", one.value), one.unit.to_owned()]);
        }
        align_right(&mut found, |column| column == 1);
        out += &format!("{}\n\n", look.fit(found, &Spare { keys: 1, ..Spare::default() }));
    }
    let mut residuals = look.table();
    residuals.set_header(["measured", "", "fitted", "residual", "", "row"]);
    for residual in &fitted.residuals {
        let share = error_of(residual).map_or(String::new(), |error| signed(&fixed(100.0 * error, 1)) + "%");
        let difference = signed(&number(residual.fitted - residual.measured));
        let what = format!("{} ({})", output::harmless(&residual.what), output::harmless(&residual.row));
        residuals.add_row([
            number(residual.measured),
            residual.unit.to_owned(),
            number(residual.fitted),
            difference,
            share,
            what,
        ]);
    }
    align_right(&mut residuals, |column| column != 1 && column != 5);
    let (mean, most) = errors(fitted);
    out += &look.fit(residuals, &Spare { text: Some("row"), ..Spare::default() });
    out += &format!(
        "\n\nWhole steps: mean error {:.1}%, at most {:.1}%.\n\
         The rows above were fitted. docs/simulator.md compares rows that were not.\n",
        100.0 * mean,
        100.0 * most
    );
    out + &provenance::footer(std::iter::once(&provenance))
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
    kinds::expect("fit", path, &[FileKind::Measurements], "a file of measurements")?;
    let mut measured =
        Measurements::parse(&output::read_text(path)?).map_err(|error| output::within(error, path))?;
    if let Some(path) = &arguments.rates {
        rates(path)?.into_setup(&mut measured);
    }
    let fitted = fit::fit(&measured).map_err(|error| output::within(error, path))?;
    let setup = json::escaped(fitted.setup.file().text()?.into_bytes());
    let mut results = Results::default();
    if let Some(path) = &arguments.output {
        results.write(path, setup);
    }
    if let Some(path) = &arguments.json {
        results.write(path, json::list(&[entry(&fitted)])?);
    }
    if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text(&fitted, look)));
    }
    results.deliver()
}
