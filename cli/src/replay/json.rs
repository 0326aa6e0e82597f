//! The result of a replay as JSON: one entry for each trace, size and policy, as `docs/json.md` describes.

use std::path::Path;

use forebay::Result;
use forebay::trace::Header;
use serde::Serialize;

use super::result::{Replay, Replayed, RowSize, bytes, miss_ratio};
use crate::policy::Policy;
use crate::present::json::{Head, list};
use crate::study::pools::Setting;
use crate::study::prefetch::Prefetched;

/// The fields that every entry of a selection trace begins with.
#[derive(Serialize)]
pub struct Heading<'a> {
    #[serde(flatten)]
    head: Head,
    trace: String,
    label: &'a str,
    model: &'a str,
    layers: u32,
    steps: u32,
    k: u32,
    context: u32,
    policy: &'static str,
    warmup: u32,
    mtp: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    unfinished_bytes: Option<u64>,
}

impl<'a> Heading<'a> {
    /// An entry of `kind` for the trace at `path`.
    pub fn new(
        kind: &'static str,
        path: &Path,
        header: &'a Header,
        setting: &Setting,
        policy: Policy,
    ) -> Heading<'a> {
        Heading {
            head: Head::new(kind),
            trace: path.display().to_string(),
            label: &header.label,
            model: &header.model,
            layers: header.layers,
            steps: setting.steps,
            k: header.k,
            context: header.context,
            policy: policy.name(),
            warmup: setting.warmup,
            mtp: setting.mtp,
            unfinished_bytes: header.unfinished,
        }
    }
}

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    heading: Heading<'a>,
    slots: u32,
    prompt_share: f64,
    split: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    slots_by_layer: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uniform_misses: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gain: Option<f64>,
    per_layer: Vec<PerLayer>,
    total: Total,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefetch: Option<Prefetch>,
    first_steps: FirstSteps,
    row_model: &'a str,
    row_bytes: u32,
    host_to_device_bytes: u64,
    device_to_host_bytes: u64,
}

#[derive(Serialize)]
struct PerLayer {
    layer: u32,
    hits: u64,
    misses: u64,
    misses_per_step: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    covered: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extra: Option<u64>,
}

#[derive(Serialize)]
struct Prefetch {
    kind: &'static str,
    covered: u64,
    covered_per_step: f64,
    extra: u64,
    extra_per_step: f64,
    extra_most: u64,
}

#[derive(Serialize)]
struct Total {
    hits: u64,
    misses: u64,
    miss_ratio: f64,
    misses_per_step: f64,
}

#[derive(Serialize)]
struct FirstSteps {
    steps: usize,
    misses: u64,
    misses_cold: u64,
}

fn entry<'a>(trace: &'a Replayed, replay: &'a Replay, row: &'a RowSize) -> Entry<'a> {
    let (header, setting, total) = (&trace.header, &replay.setting, replay.total());
    let (host_to_device_bytes, device_to_host_bytes) = bytes(replay, row);
    let prefetched = |layer: usize| replay.prefetched.as_ref().and_then(|layers| layers.get(layer));
    let layers = header.layer_ids.iter().zip(&replay.layers).enumerate();
    let per_layer = layers.map(|(i, (layer, count))| PerLayer {
        layer: *layer,
        hits: count.hits,
        misses: count.misses,
        misses_per_step: replay.per_step(count.misses),
        covered: prefetched(i).map(|layer| layer.covered),
        extra: prefetched(i).map(|layer| layer.extra),
    });
    Entry {
        heading: Heading::new("selection", &trace.path, header, setting, replay.policy),
        slots: setting.slots,
        prompt_share: replay.prompt_share,
        split: if replay.divided.is_some() { "by-layer" } else { "uniform" },
        slots_by_layer: replay.divided.as_ref().map(|divided| &divided.slots[..]),
        uniform_misses: replay.divided.as_ref().map(|divided| divided.uniform_misses),
        gain: replay.gain(),
        per_layer: per_layer.collect(),
        total: Total {
            hits: total.hits,
            misses: total.misses,
            miss_ratio: miss_ratio(total),
            misses_per_step: replay.per_step(total.misses),
        },
        prefetch: replay.prefetched.as_deref().map(Prefetched::total).map(|all| Prefetch {
            kind: "inter-layer",
            covered: all.covered,
            covered_per_step: replay.per_step(all.covered),
            extra: all.extra,
            extra_per_step: replay.per_step(all.extra),
            extra_most: all.extra_most,
        }),
        first_steps: FirstSteps {
            steps: replay.first.len(),
            misses: replay.first.iter().sum(),
            misses_cold: replay.cold.iter().sum(),
        },
        row_model: &row.model,
        row_bytes: row.bytes,
        host_to_device_bytes,
        device_to_host_bytes,
    }
}

/// All entries as text, with a line end.
///
/// # Errors
/// [`Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(traces: &[Replayed], row: &RowSize) -> Result<Vec<u8>> {
    let entries: Vec<Entry<'_>> = traces
        .iter()
        .flat_map(|trace| trace.replays.iter().map(move |replay| entry(trace, replay, row)))
        .collect();
    list(&entries)
}
