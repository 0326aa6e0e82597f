//! Plans as JSON: one entry for each plan, as `docs/json.md` describes.

use forebay::predict::plan::{Batch, Demand, Note, Planned, Ratio};
use forebay::predict::provenance::Provenance;
use forebay::predict::stride::Stride;
use forebay::predict::weights::Attention;
use forebay::{Geometry, Result};
use serde::Serialize;

use super::deployment::Deployed;
use super::result::{Gain, On, Point};
use super::settings::Advised;
use super::weights_json::{Weights, weights};
use crate::present::json::{self, Head};

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    head: Head,
    role: &'static str,
    model: &'a str,
    gpu_bytes: u64,
    context: u32,
    mtp: u32,
    deployment: Gpus<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<Weights<'a>>,
    asked: Asked,
    #[serde(flatten)]
    on: Option<Machine<'a>>,
    #[serde(flatten)]
    planned: Option<Fits>,
    #[serde(flatten)]
    gain: Option<Yields>,
    fits: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    advice: Option<Advice<'a>>,
}

/// The GPUs that serve together.
#[derive(Serialize)]
pub struct Gpus<'a> {
    gpus: u32,
    node_gpus: u32,
    attention: &'static str,
    weights_bytes: u64,
    weights_of: Option<&'a str>,
}

/// The GPUs, each with so many bytes of weights.
pub fn gpus(deployed: &Deployed, weights_bytes: u64) -> Gpus<'_> {
    Gpus {
        gpus: deployed.gpus,
        node_gpus: deployed.node_gpus(),
        attention: match deployed.attention {
            Attention::Data => "dp",
            Attention::Tensor => "tp",
        },
        weights_bytes,
        weights_of: deployed.checkpoint.as_deref(),
    }
}

/// The advice, if the entry is one of several batches and ratios.
#[derive(Serialize)]
struct Advice<'a> {
    offload: Option<bool>,
    sentence: &'a str,
}

/// Numbers, or the words `max` and `auto` for a search.
#[derive(Serialize)]
struct Asked {
    batch: serde_json::Value,
    ratio: serde_json::Value,
}

impl Asked {
    fn of(demand: &Demand) -> Asked {
        let batch = match demand.batch {
            Batch::Sequences(batch) => batch.into(),
            Batch::Most => "max".into(),
        };
        let ratio = match demand.ratio {
            Ratio::Share(ratio) => ratio.into(),
            Ratio::Auto => "auto".into(),
        };
        Asked { batch, ratio }
    }
}

#[derive(Serialize)]
struct Machine<'a> {
    provenance: &'a Provenance,
    setup: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<&'a str>,
    accept: f64,
    micro_batches: u32,
    by_roofline: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    misses_note: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown: Option<String>,
}

#[derive(Serialize)]
struct Yields {
    step_ms: f64,
    throughput: f64,
    otps: f64,
    exposed_ms: f64,
    throughput_gpu: f64,
    throughput_node: f64,
    throughput_all: f64,
    throughput_without: Option<f64>,
    without: Option<Without>,
    gain: Option<f64>,
    pays: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pays_from: Option<Option<u32>>,
}

/// The most sequences with all rows on the device.
#[derive(Serialize)]
struct Without {
    batch: u32,
    sequences: u64,
    step_ms: f64,
    otps: f64,
    throughput_all: f64,
}

#[derive(Serialize)]
struct Fits {
    batch: u32,
    sequences: u64,
    ratio: f64,
    slots: u32,
    offload: bool,
    bytes: u64,
    available_bytes: u64,
    bytes_by_part: SplitIndices,
    host_bytes: u64,
    host_bytes_node: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    host_stride: Option<Strides>,
    resident_batch: u32,
    most_batch: u32,
    live_tokens: Option<u64>,
    misses_from: Option<u32>,
    notes: Vec<&'static str>,
}

#[derive(Serialize)]
struct SplitIndices {
    index_keys: u64,
    slots: u64,
    landing: u64,
    scratch: u64,
    padding: u64,
    tables: u64,
    host_page_tables: u64,
    host_rows: u64,
    host_step_descriptors: u64,
}

/// Rows of the total pool in host memory, and an alternative stride for them.
#[derive(Serialize)]
struct Strides {
    #[serde(flatten)]
    own: OneStride,
    #[serde(skip_serializing_if = "Option::is_none")]
    other: Option<OneStride>,
}

#[derive(Serialize)]
struct OneStride {
    bytes: u32,
    requests: f64,
    fetched_bytes: f64,
    host_rows: u64,
}

fn strides(planned: &Planned, point: &Point) -> Option<Strides> {
    let geometry = Geometry::new(point.demand.shape).ok().filter(|_| planned.offloads())?;
    let own = Stride::of(&geometry);
    let one = |of: Stride| OneStride {
        bytes: of.bytes,
        requests: of.requests,
        fetched_bytes: of.fetched,
        host_rows: of.host_bytes(planned.bytes.rows, own.bytes),
    };
    Some(Strides { own: one(own), other: Stride::other(&geometry).map(one) })
}

fn fits(planned: &Planned, point: &Point) -> Fits {
    let (bytes, counted) = (&planned.bytes, point.demand.count_tables);
    Fits {
        batch: planned.batch,
        sequences: point.deployed.sequences(planned.batch),
        ratio: planned.ratio,
        slots: planned.slots,
        offload: planned.offloads(),
        bytes: if counted { bytes.device() } else { bytes.data() },
        available_bytes: planned.available,
        bytes_by_part: SplitIndices {
            index_keys: bytes.index_keys,
            slots: bytes.slots,
            landing: bytes.landing,
            scratch: bytes.scratch,
            padding: bytes.padding,
            tables: bytes.tables,
            host_page_tables: bytes.host_page_tables,
            host_rows: bytes.rows,
            host_step_descriptors: bytes.step_descriptors,
        },
        host_bytes: bytes.host(),
        host_bytes_node: bytes.host().saturating_mul(u64::from(point.deployed.node_gpus())),
        host_stride: strides(planned, point),
        resident_batch: planned.resident_batch,
        most_batch: planned.most_batch,
        live_tokens: planned.live_tokens,
        misses_from: planned.misses_from,
        notes: planned.notes.iter().copied().map(Note::describe).collect(),
    }
}

fn machine<'a>(on: &'a On, point: &Point) -> Machine<'a> {
    Machine {
        provenance: &on.provenance,
        setup: &on.provenance.setup,
        link: on.link.as_deref(),
        accept: on.accept,
        micro_batches: point.demand.micro_batches,
        by_roofline: on.by_roofline,
        misses_note: on.misses_note.as_deref(),
        unknown: point.unknown.as_ref().map(ToString::to_string),
    }
}

fn yields(gain: &Gain, point: &Point) -> Yields {
    let outcome = &gain.outcome;
    Yields {
        step_ms: outcome.step_ms,
        throughput: outcome.throughput,
        otps: outcome.otps,
        exposed_ms: outcome.exposed_ms,
        throughput_gpu: Deployed::of_gpu(outcome.throughput),
        throughput_node: point.deployed.of_node(outcome.throughput),
        throughput_all: point.deployed.of_all(outcome.throughput),
        throughput_without: gain.without.map(|without| without.throughput),
        without: gain.without.map(|without| Without {
            batch: without.batch,
            sequences: point.deployed.sequences(without.batch),
            step_ms: without.step_ms,
            otps: without.otps,
            throughput_all: point.deployed.of_all(without.throughput),
        }),
        gain: point.gain(),
        pays: point.pays(),
        pays_from: gain.pays_from,
    }
}

/// All entries as text, with a line end.
///
/// # Errors
/// [`forebay::Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(points: &[Point], least_otps: f64) -> Result<Vec<u8>> {
    let advised = Advised::of(points, least_otps);
    let entries = points.iter().enumerate().map(|(i, point)| Entry {
        head: Head::new("plan"),
        role: "decode",
        model: &point.model,
        gpu_bytes: point.demand.gpu,
        context: point.demand.context,
        mtp: point.demand.query_rows,
        deployment: gpus(&point.deployed, point.demand.weights),
        weights: point.weighed.as_deref().map(|weighed| {
            weights(weighed, point.compared.as_ref().and_then(|compared| compared.as_ref().ok()))
        }),
        asked: Asked::of(&point.demand),
        on: point.on.as_ref().map(|on| machine(on, point)),
        gain: point.gain.as_ref().map(|gain| yields(gain, point)),
        planned: point.planned.as_ref().ok().map(|planned| fits(planned, point)),
        fits: point.planned.is_ok(),
        why: point.planned.as_ref().err().map(ToString::to_string),
        advice: advised
            .of_point(i)
            .map(|advice| Advice { offload: advice.offload, sentence: &advice.sentence }),
    });
    json::list(&entries.collect::<Vec<_>>())
}
