//! The weights of a plan as JSON: the object `weights` of an entry, as `docs/json.md` describes.

use forebay::predict::sharded::{Compared, Pulled, Step};
use forebay::predict::weights::ModuleBytes;
use forebay::weights::{Closing, Source};
use serde::Serialize;

use super::pulls;
use super::shards::{Counted, Sharded, Weighed};

/// The weights on one GPU.
#[derive(Serialize)]
pub struct Weights<'a> {
    dtype: &'static str,
    on_gpu_bytes: u64,
    tp: u32,
    attention_tp: u32,
    ep: u32,
    redundant_experts: u32,
    modules: Vec<Module>,
    #[serde(flatten)]
    sharded: Option<Shards<'a>>,
    #[serde(flatten)]
    times: Option<Times>,
}

/// What sharding gives on a setup.
#[derive(Serialize)]
struct Times {
    pull_us: Option<f64>,
    exposed_us: Option<Exposed>,
    batch: Ways<u32>,
    throughput: Ways<f64>,
    layer_us: Ways<f64>,
    step_us: Ways<f64>,
    activations: Option<Moved>,
    gain: Option<f64>,
    pays: bool,
    verdict: &'static str,
    better: Option<&'static str>,
    sentence: String,
}

/// A value by the way in which the weights are kept; none where that has no room.
#[derive(Serialize)]
struct Ways<T> {
    resident: Option<T>,
    sharded: Option<T>,
    activations: Option<T>,
    by_heads: Option<T>,
}

#[derive(Serialize)]
struct Exposed {
    total: f64,
    layers: Vec<f64>,
    wrap: f64,
}

#[derive(Serialize)]
struct Moved {
    saved_bytes: u64,
    layer_bytes: f64,
    collectives_us: f64,
}

fn times(sharded: &Sharded, compared: &Compared) -> Times {
    fn ways<T>(compared: &Compared, of: impl Fn(&Step) -> T) -> Ways<T> {
        Ways {
            resident: compared.resident.as_ref().map(&of),
            sharded: compared.sharded.as_ref().map(|pulled| of(&pulled.step)),
            activations: compared.moved.as_ref().map(|moved| of(&moved.step)),
            by_heads: compared.by_heads.as_ref().map(&of),
        }
    }
    let exposed = |pulled: &Pulled| Exposed {
        total: pulled.exposed.us(),
        layers: pulled.exposed.layers_us.clone(),
        wrap: pulled.exposed.wrap_us,
    };
    Times {
        pull_us: compared.sharded.as_ref().map(|pulled| pulled.pull_us),
        exposed_us: compared.sharded.as_ref().map(exposed),
        batch: ways(compared, |step| step.batch),
        throughput: ways(compared, |step| step.throughput),
        layer_us: ways(compared, |step| step.layer_us),
        step_us: ways(compared, |step| step.step_us),
        activations: compared.moved.as_ref().map(|moved| Moved {
            saved_bytes: moved.saved,
            layer_bytes: moved.bytes,
            collectives_us: moved.collectives_us,
        }),
        gain: compared.gain(),
        pays: pulls::pays(compared.verdict),
        verdict: pulls::verdict(compared.verdict),
        better: compared.better().map(|(way, _)| pulls::way(way)),
        sentence: pulls::sentence(sharded, compared),
    }
}

#[derive(Serialize)]
struct Module {
    module: &'static str,
    whole_bytes: u64,
    on_gpu_bytes: u64,
}

/// What is sharded over the ranks of a host.
#[derive(Serialize)]
struct Shards<'a> {
    shard: &'a [String],
    weights_from: &'static str,
    ranks: u32,
    sharded_layers: usize,
    closing: &'static str,
    resident_layer: Option<usize>,
    unsharded_bytes: u64,
    #[serde(flatten)]
    rounded: Bytes,
    before_rounding: Bytes,
}

#[derive(Serialize)]
struct Bytes {
    resident_bytes: u64,
    sharded_bytes: u64,
    buffers: Vec<u64>,
    device_bytes: u64,
    host_bytes: u64,
    saved_bytes: i64,
    latent_tokens_gained: u64,
    pull_bytes: u64,
    layer_bytes: u64,
}

fn bytes(counted: &Counted) -> Bytes {
    Bytes {
        resident_bytes: counted.bytes.resident,
        sharded_bytes: counted.bytes.shards,
        buffers: counted.bytes.buffers.clone(),
        device_bytes: counted.bytes.device(),
        host_bytes: counted.bytes.host,
        saved_bytes: counted.saved,
        latent_tokens_gained: counted.tokens,
        pull_bytes: counted.pull,
        layer_bytes: counted.layer,
    }
}

fn shards(sharded: &Sharded) -> Shards<'_> {
    Shards {
        shard: &sharded.names,
        weights_from: match sharded.source {
            Source::Peers => "peers",
            Source::Host => "host",
        },
        ranks: sharded.plan.group().ranks,
        sharded_layers: sharded.plan.sharded(),
        closing: match sharded.plan.closing() {
            Closing::Even => "even",
            Closing::ThirdBuffer => "third buffer",
            Closing::Resident(_) => "resident layer",
        },
        resident_layer: sharded.resident_layer(),
        unsharded_bytes: sharded.plan.whole(),
        rounded: bytes(&sharded.rounded),
        before_rounding: bytes(&sharded.exact),
    }
}

/// The object `weights`.
pub fn weights<'a>(weighed: &'a Weighed, compared: Option<&Compared>) -> Weights<'a> {
    let module = |bytes: &ModuleBytes| Module {
        module: bytes.module.describe(),
        whole_bytes: bytes.whole,
        on_gpu_bytes: bytes.on_gpu,
    };
    Weights {
        dtype: weighed.dtype,
        on_gpu_bytes: weighed.on_gpu,
        tp: weighed.division.dense,
        attention_tp: weighed.division.attention,
        ep: weighed.division.experts,
        redundant_experts: weighed.division.redundant,
        modules: weighed.modules.iter().map(module).collect(),
        sharded: weighed.sharded.as_ref().map(shards),
        times: weighed.sharded.as_ref().zip(compared).map(|(sharded, compared)| times(sharded, compared)),
    }
}
