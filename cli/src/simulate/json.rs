//! Simulated steps as JSON. `docs/json.md` describes the entries.

use forebay::Result;
use forebay::predict::elastic::Pool;
use forebay::predict::provenance::Provenance;
use serde::Serialize;

use super::result::{Counts, Simulated, counts, mean_misses};
use crate::present::json::{self, Head};

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    head: Head,
    provenance: &'a Provenance,
    setup: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<&'a str>,
    context: u32,
    batch: u32,
    mtp: u32,
    accept: f64,
    ratio: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool_slots: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    misses_from: Option<u32>,
    two_batch: bool,
    fill: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    traffic_up: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traffic_down: Option<f64>,
    order: &'static str,
    step_ms: f64,
    throughput: f64,
    otps: f64,
    exposed_ms: f64,
    wait_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pulls: Option<Pulled<'a>>,
    host: Host,
    overlap: Counts,
    misses: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    misses_note: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<Steps>,
    per_layer: Vec<PerLayer>,
}

/// The host time that enqueueing a step takes.
#[derive(Serialize)]
struct Host {
    captured_us: f64,
    uncaptured_us: f64,
    bound_by: &'static str,
}

/// The pulls of sharded weights.
#[derive(Serialize)]
struct Pulled<'a> {
    shard: &'a [String],
    weights_from: &'static str,
    ranks: u32,
    sharded_layers: usize,
    pull_us: f64,
    exposed_ms: f64,
    slower_ms: f64,
}

/// The steps of a replay.
#[derive(Serialize)]
struct Steps {
    count: u32,
    worst: u32,
    worst_ms: f64,
    worst_exposed_ms: f64,
}

#[derive(Serialize)]
struct PerLayer {
    layer: usize,
    misses: f64,
    overlap: &'static str,
    exposed_us: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pulls_exposed_us: Option<f64>,
}

fn entry<'a>(simulated: &'a Simulated, misses_note: Option<&'a str>) -> Entry<'a> {
    let outcome = &simulated.outcome;
    let layers = outcome.misses.iter().zip(&outcome.overlap).zip(&outcome.exposed_us).enumerate();
    Entry {
        head: Head::new("simulate"),
        provenance: &simulated.provenance,
        setup: &simulated.provenance.setup,
        link: simulated.link.as_deref(),
        context: outcome.point.context,
        batch: outcome.point.batch,
        mtp: outcome.point.mtp,
        accept: outcome.point.accept,
        ratio: outcome.point.ratio,
        pool_slots: simulated.pool.map(Pool::slots),
        misses_from: simulated.pool.map(|pool| pool.misses_from(outcome.point.context)),
        two_batch: outcome.two_batch,
        fill: simulated.fill,
        traffic_up: simulated.traffic[0],
        traffic_down: simulated.traffic[1],
        order: simulated.choice,
        step_ms: outcome.step_ms,
        throughput: outcome.throughput,
        otps: outcome.otps,
        exposed_ms: outcome.exposed_ms,
        wait_ms: outcome.wait_ms,
        pulls: outcome.pulls.as_ref().zip(simulated.sharded.as_ref()).map(|(pulls, sharded)| Pulled {
            shard: &sharded.names,
            weights_from: sharded.source(),
            ranks: sharded.plan.group().ranks,
            sharded_layers: sharded.plan.sharded(),
            pull_us: pulls.pull_us,
            exposed_ms: pulls.exposed_ms,
            slower_ms: pulls.slower_ms,
        }),
        host: Host {
            captured_us: outcome.host.captured_us,
            uncaptured_us: outcome.host.uncaptured_us,
            bound_by: outcome.host.bound(outcome.step_ms).name(),
        },
        overlap: counts(outcome),
        misses: mean_misses(outcome),
        misses_note,
        steps: simulated.worst.as_ref().map(|worst| Steps {
            count: worst.steps,
            worst: worst.step,
            worst_ms: worst.outcome.step_ms,
            worst_exposed_ms: worst.outcome.exposed_ms,
        }),
        per_layer: layers
            .map(|(layer, ((misses, overlap), exposed_us))| PerLayer {
                layer,
                misses: *misses,
                overlap: overlap.name(),
                exposed_us: *exposed_us,
                pulls_exposed_us: outcome.pulls.as_ref().and_then(|p| p.exposed_us.get(layer).copied()),
            })
            .collect(),
    }
}

/// All entries as text, with a line end.
///
/// # Errors
/// [`forebay::Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(all: &[Simulated], note: Option<&str>) -> Result<Vec<u8>> {
    json::list(&all.iter().map(|simulated| entry(simulated, note)).collect::<Vec<_>>())
}
