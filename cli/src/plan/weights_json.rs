//! The weights of a plan as JSON: the object `weights` of an entry, as `docs/json.md` describes.

use forebay::predict::weights::ModuleBytes;
use forebay::weights::{Closing, Source};
use serde::Serialize;

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
pub fn weights(weighed: &Weighed) -> Weights<'_> {
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
    }
}
