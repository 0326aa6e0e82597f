//! Plans of prefill instances as JSON: one entry for each plan, as `docs/json.md` describes.

use forebay::Result;
use forebay::predict::prefill::{Planned, Ring};
use serde::Serialize;

use super::super::json::{Gpus, gpus};
use super::result::Point;
use crate::present::json::{self, Head};

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    head: Head,
    role: &'static str,
    model: &'a str,
    gpu_bytes: u64,
    context: u32,
    chunk: u32,
    batch: u32,
    ranks: u32,
    deployment: Gpus<'a>,
    assumptions: Vec<String>,
    fits: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    #[serde(flatten)]
    planned: Option<Takes>,
    in_one_pass: Option<OnePass>,
}

#[derive(Serialize)]
struct Takes {
    pass_tokens: u64,
    passes: u32,
    bytes: u64,
    bytes_by_part: Parts,
    ring: Staging,
    left_bytes: u64,
    left_tokens: u64,
}

/// The parts on the GPU.
#[derive(Serialize)]
struct Parts {
    weights: u64,
    activations: u64,
    workspace: u64,
    ring: u64,
    rows: u64,
    index_keys: u64,
}

#[derive(Serialize)]
struct Staging {
    on_host: bool,
    bytes: u64,
    parts: u32,
    part_bytes: u64,
    part_rows: u64,
    part_index_keys: u64,
    all_rows: u64,
    all_index_keys: u64,
    layer_ms: f64,
    transfer_ms: f64,
    acknowledge_ms: f64,
    held_ms: f64,
    wait_ms: f64,
}

/// The same prompts in one pass.
#[derive(Serialize)]
struct OnePass {
    fits: bool,
    bytes: Option<u64>,
    why: Option<String>,
}

fn staging(ring: &Ring, on_host: bool) -> Staging {
    Staging {
        on_host,
        bytes: ring.bytes,
        parts: ring.depth,
        part_bytes: ring.part,
        part_rows: ring.row_bytes,
        part_index_keys: ring.key_bytes,
        all_rows: ring.all_row_bytes,
        all_index_keys: ring.all_key_bytes,
        layer_ms: ring.layer_us / 1e3,
        transfer_ms: ring.transfer_us / 1e3,
        acknowledge_ms: ring.acknowledge_us / 1e3,
        held_ms: ring.held_us() / 1e3,
        wait_ms: ring.wait_us / 1e3,
    }
}

fn takes(point: &Point, planned: &Planned) -> Takes {
    let on_host = point.demand.host.is_some();
    Takes {
        pass_tokens: planned.tokens,
        passes: planned.passes,
        bytes: planned.bytes,
        bytes_by_part: Parts {
            weights: point.demand.weights,
            activations: planned.activations,
            workspace: point.demand.workspace,
            ring: if on_host { 0 } else { planned.ring.bytes },
            rows: planned.kept.rows,
            index_keys: planned.kept.index_keys,
        },
        ring: staging(&planned.ring, on_host),
        left_bytes: planned.left,
        left_tokens: planned.left_tokens,
    }
}

/// All entries as text, with a line end.
///
/// # Errors
/// [`forebay::Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(points: &[Point]) -> Result<Vec<u8>> {
    let entries = points.iter().map(|point| Entry {
        head: Head::new("plan-prefill"),
        role: "prefill",
        model: &point.model,
        gpu_bytes: point.demand.gpu,
        context: point.demand.context,
        chunk: point.demand.chunk,
        batch: point.demand.batch,
        ranks: point.demand.ranks,
        deployment: gpus(&point.deployed, point.demand.weights),
        assumptions: point.demand.assumptions(),
        fits: point.planned.is_ok(),
        why: point.planned.as_ref().err().map(ToString::to_string),
        planned: point.planned.as_ref().ok().map(|planned| takes(point, planned)),
        in_one_pass: point.in_one_pass.as_ref().map(|whole| OnePass {
            fits: whole.is_ok(),
            bytes: whole.as_ref().ok().map(|whole| whole.bytes),
            why: whole.as_ref().err().map(ToString::to_string),
        }),
    });
    json::list(&entries.collect::<Vec<_>>())
}
