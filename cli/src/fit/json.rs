//! A fit as JSON (`docs/json.md`).

use forebay::Result;
use forebay::predict::fit::{self, Fitted};
use forebay::predict::provenance::Provenance;
use serde::Serialize;

use super::result::{error_of, errors};
use crate::present::json::{self, Head};

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    head: Head,
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

fn residual(of: &fit::Residual) -> Residual<'_> {
    let fit::Residual { row, what, unit, measured, fitted } = of;
    Residual { row, what, unit, measured: *measured, fitted: *fitted, error: error_of(of) }
}

fn entry(fitted: &Fitted) -> Entry<'_> {
    let (mean_error, most_error) = errors(fitted);
    Entry {
        head: Head::new("fit"),
        provenance: Provenance::of(&fitted.setup),
        setup: fitted.setup.name(),
        found: fitted.found.iter().map(|f| Found { name: f.name, unit: f.unit, value: f.value }).collect(),
        residuals: fitted.residuals.iter().map(residual).collect(),
        mean_error,
        most_error,
    }
}

/// The entry as JSON, with a line end.
///
/// # Errors
/// [`forebay::Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(fitted: &Fitted) -> Result<Vec<u8>> {
    json::list(&[entry(fitted)])
}
