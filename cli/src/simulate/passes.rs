//! The arguments of `forebay simulate --prefill`, and the passes that they ask for.

use forebay::predict::layered::{self, Pass};
use forebay::predict::prefill::{ACKNOWLEDGE_US, LINK_RATE, PUBLISHED_LAYER_US, PUBLISHED_TOKENS};

use crate::input::sizes;

/// The arguments of `--prefill`.
#[derive(clap::Args)]
pub struct PrefillArguments {
    /// Tokens of a pass on one GPU of a prefill instance. Prints what of sending their rows layer by layer the
    /// computation hides, instead of a step of decode.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = sizes::tokens,
          conflicts_with_all = ["kernels", "setup", "context", "batch", "mtp", "accept", "ratio", "elastic",
                                "pool_slots", "cache", "model", "html", "write_table", "overlap", "table", "shard",
                                "two_batch", "fill", "traffic_up", "traffic_down"])]
    pub prefill: Vec<u32>,
    /// With --prefill: milliseconds that one layer of the pass computes [default: 10.3 at 16,384 tokens, as published,
    /// in proportion].
    #[arg(long, value_name = "MS", value_delimiter = ',', value_parser = sizes::positive, requires = "prefill",
          allow_negative_numbers = true)]
    pub layer_ms: Vec<f64>,
    /// With --prefill: micro-batches that divide the tokens and take turns in each layer.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = sizes::count, requires = "prefill",
          default_value = "1", allow_negative_numbers = true)]
    pub micro_batches: Vec<u32>,
    /// With --prefill: layers of the model.
    #[arg(long, value_name = "N", value_parser = sizes::count, requires = "prefill", default_value = "61",
          allow_negative_numbers = true)]
    pub layers: u32,
    /// With --prefill: bytes of a token's row and index key in a layer.
    #[arg(long, value_name = "N", value_parser = sizes::count, requires = "prefill", default_value = "836",
          allow_negative_numbers = true)]
    pub token_bytes: u32,
    /// With --prefill: the rate of the link to the receiver [default: 50GB/s, 400 Gb/s].
    #[arg(long, value_name = "RATE", value_parser = sizes::rate, requires = "prefill", allow_negative_numbers = true)]
    pub send_rate: Option<f64>,
    /// With --prefill: the rate at which a core of the sender makes digests [default: 17GB/s].
    #[arg(long, value_name = "RATE", value_parser = sizes::rate, requires = "prefill", allow_negative_numbers = true)]
    pub digest_rate: Option<f64>,
    /// With --prefill: the rate at which a core of the receiver checks and stores [default: 10GB/s; without digests
    /// 17GB/s].
    #[arg(long, value_name = "RATE", value_parser = sizes::rate, requires = "prefill", allow_negative_numbers = true)]
    pub store_rate: Option<f64>,
    /// With --prefill: rows are sent without digests.
    #[arg(long, requires = "prefill", conflicts_with = "digest_rate")]
    pub no_digests: bool,
    /// With --prefill: parts of the staging ring, each a layer of a micro-batch.
    #[arg(long, value_name = "N", value_parser = sizes::count, requires = "prefill", default_value = "4",
          allow_negative_numbers = true)]
    pub ring_parts: u32,
}

impl PrefillArguments {
    /// The passes that are asked for.
    pub fn passes(&self) -> Vec<Pass> {
        let store_rate = if self.no_digests { layered::STORE_RATE } else { layered::CHECK_RATE };
        let mut passes = Vec::new();
        for tokens in &self.prefill {
            let published = PUBLISHED_LAYER_US * f64::from(*tokens) / f64::from(PUBLISHED_TOKENS);
            let given: Vec<f64> = self.layer_ms.iter().map(|ms| ms * 1e3).collect();
            for layer_us in if given.is_empty() { vec![published] } else { given } {
                passes.extend(self.micro_batches.iter().map(|micro_batches| Pass {
                    layers: self.layers,
                    tokens: *tokens,
                    micro_batches: *micro_batches,
                    token_bytes: self.token_bytes,
                    layer_us,
                    stage_rate: layered::STAGE_RATE,
                    digest_rate:
                        (!self.no_digests).then_some(self.digest_rate.unwrap_or(layered::DIGEST_RATE)),
                    link_rate: self.send_rate.unwrap_or(LINK_RATE),
                    store_rate: self.store_rate.unwrap_or(store_rate),
                    acknowledge_us: ACKNOWLEDGE_US,
                    depth: self.ring_parts,
                }));
            }
        }
        passes
    }
}
