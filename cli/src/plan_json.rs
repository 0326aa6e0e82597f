//! Plans as JSON: one entry for each. `docs/json.md` describes it.

use forebay::Result;
use forebay::predict::plan::{Note, Planned};
use serde::Serialize;

use crate::json;
use crate::plan::{Gain, Point};

#[derive(Serialize)]
struct Entry<'a> {
    schema: u32,
    forebay: &'static str,
    kind: &'static str,
    model: &'static str,
    gpu_bytes: u64,
    context: u32,
    mtp: u32,
    #[serde(flatten)]
    planned: Option<Fits>,
    #[serde(flatten)]
    gain: Option<Yields<'a>>,
    fits: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

#[derive(Serialize)]
struct Yields<'a> {
    setup: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<&'a str>,
    accept: f64,
    step_ms: f64,
    throughput: f64,
    otps: f64,
    exposed_ms: f64,
    throughput_without: Option<f64>,
    pays: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pays_from: Option<Option<u32>>,
}

#[derive(Serialize)]
struct Fits {
    batch: u32,
    ratio: f64,
    slots: u32,
    offload: bool,
    bytes: u64,
    available_bytes: u64,
    bytes_by_part: Parts,
    host_bytes: u64,
    resident_batch: u32,
    most_batch: u32,
    live_tokens: Option<u64>,
    notes: Vec<&'static str>,
}

#[derive(Serialize)]
struct Parts {
    index_keys: u64,
    slots: u64,
    landing: u64,
    scratch: u64,
    padding: u64,
    tables: u64,
    host_rows: u64,
    host_step_blocks: u64,
}

fn fits(planned: &Planned, counted: bool) -> Fits {
    let bytes = &planned.bytes;
    Fits {
        batch: planned.batch,
        ratio: planned.ratio,
        slots: planned.slots,
        offload: planned.offloads(),
        bytes: if counted { bytes.device() } else { bytes.data() },
        available_bytes: planned.available,
        bytes_by_part: Parts {
            index_keys: bytes.index_keys,
            slots: bytes.slots,
            landing: bytes.landing,
            scratch: bytes.scratch,
            padding: bytes.padding,
            tables: bytes.tables,
            host_rows: bytes.rows,
            host_step_blocks: bytes.step_blocks,
        },
        host_bytes: bytes.host(),
        resident_batch: planned.resident_batch,
        most_batch: planned.most_batch,
        live_tokens: planned.live_tokens,
        notes: planned.notes.iter().copied().map(Note::describe).collect(),
    }
}

fn yields<'a>(gain: &'a Gain, point: &Point) -> Yields<'a> {
    let outcome = &gain.outcome;
    Yields {
        setup: &gain.setup,
        link: gain.link.as_deref(),
        accept: outcome.point.accept,
        step_ms: outcome.step_ms,
        throughput: outcome.throughput,
        otps: outcome.otps,
        exposed_ms: outcome.exposed_ms,
        throughput_without: gain.without,
        pays: point.pays(),
        pays_from: gain.pays_from,
    }
}

/// All entries as text, with a line's end.
///
/// # Errors
/// [`forebay::Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(points: &[Point]) -> Result<Vec<u8>> {
    let entries = points.iter().map(|point| Entry {
        schema: json::SCHEMA,
        forebay: env!("CARGO_PKG_VERSION"),
        kind: "plan",
        model: point.model,
        gpu_bytes: point.demand.gpu,
        context: point.demand.context,
        mtp: point.demand.query_rows,
        gain: point.gain.as_ref().map(|gain| yields(gain, point)),
        planned: point.planned.as_ref().ok().map(|planned| fits(planned, point.demand.count_tables)),
        fits: point.planned.is_ok(),
        why: point.planned.as_ref().err().map(ToString::to_string),
    });
    json::list(&entries.collect::<Vec<_>>())
}
