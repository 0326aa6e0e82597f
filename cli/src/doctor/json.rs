//! Findings as JSON (`docs/json.md`).

use forebay::Result;
use forebay::device::rates::Rates;
use forebay::measure::Ceilings;
use serde::Serialize;

use super::finding::Finding;
use super::result::{Checked, FactsEntry};
use crate::present::json::{self, Head};

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    head: Head,
    device: &'a str,
    #[serde(skip_serializing_if = "FactsEntry::is_unknown")]
    facts: &'a FactsEntry,
    findings: &'a [Finding],
    #[serde(skip_serializing_if = "Option::is_none")]
    rates: Option<&'a Rates>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ceilings: Option<&'a Ceilings>,
}

fn entry(checked: &Checked) -> Entry<'_> {
    Entry {
        head: Head::new("doctor"),
        device: &checked.device,
        facts: &checked.facts,
        findings: &checked.findings,
        rates: checked.measured.as_ref().and_then(|measured| measured.rates.as_ref()),
        ceilings: checked.measured.as_ref().map(|measured| &measured.ceilings),
    }
}

/// All entries as JSON, with a line end.
///
/// # Errors
/// [`forebay::Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(devices: &[Checked]) -> Result<Vec<u8>> {
    let entries: Vec<Entry<'_>> = devices.iter().map(entry).collect();
    json::list(&entries)
}
