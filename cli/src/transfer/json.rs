//! A demo's result as JSON (`docs/json.md`).

use forebay::Result;
use serde::Serialize;

use super::args::PromptArguments;
use super::result::Outcome;
use crate::present::json::{self, Head};

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    head: Head,
    fabric: &'static str,
    layers: u32,
    tokens: u32,
    row_bytes: [u32; 2],
    page: u32,
    chunk: u32,
    layer_ms: f64,
    spin: bool,
    digests: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<String>,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<&'a str>,
    verified: bool,
    bytes: u64,
    runs: u64,
    resent: u64,
    #[serde(flatten)]
    figures: Option<Figures>,
    timeline: Vec<Layer>,
}

#[derive(Serialize)]
struct Figures {
    compute_ms: f64,
    transfer_ms: f64,
    exposed_ms: f64,
    alone_ms: f64,
    hidden: f64,
    gb_s: f64,
}

#[derive(Serialize)]
struct Layer {
    layer: u32,
    computed_ms: Option<f64>,
    told_ms: Option<f64>,
    stored_ms: Option<f64>,
}

/// The entry as JSON, with a line end.
///
/// # Errors
/// [`forebay::Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(prompt: &PromptArguments, outcome: &Outcome) -> Result<Vec<u8>> {
    let failure = outcome.failure.as_ref();
    let entry = Entry {
        head: Head::new("transfer"),
        fabric: prompt.fabric.name(),
        layers: prompt.layers,
        tokens: prompt.tokens,
        row_bytes: prompt.row_bytes,
        page: prompt.page,
        chunk: prompt.chunk.unwrap_or(prompt.tokens),
        layer_ms: prompt.compute.as_secs_f64() * 1e3,
        spin: prompt.spin,
        digests: !prompt.no_digests,
        fault: prompt.fault.map(|fault| fault.to_string()),
        outcome: if failure.is_some() { "failed" } else { "done" },
        reason: failure.map(|failure| failure.reason.as_str()),
        detail: failure.and_then(|failure| failure.detail.as_deref()),
        verified: outcome.verified,
        bytes: outcome.bytes,
        runs: outcome.runs,
        resent: outcome.resent,
        figures: outcome.figures.map(|of| Figures {
            compute_ms: of.compute_ms,
            transfer_ms: of.transfer_ms,
            exposed_ms: of.exposed_ms,
            alone_ms: of.alone_ms,
            hidden: of.hidden,
            gb_s: of.gb_s,
        }),
        timeline: (0..)
            .zip(&outcome.layers)
            .map(|(layer, of)| Layer {
                layer,
                computed_ms: of.computed,
                told_ms: of.told,
                stored_ms: of.stored,
            })
            .collect(),
    };
    json::list(&[entry])
}
