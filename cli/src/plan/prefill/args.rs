//! The arguments of `forebay plan --role prefill` that no other plan has.

use clap::ValueEnum;

use crate::input::sizes;

/// What a planned instance does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// It decodes, or does both.
    Decode,
    /// It computes prompts and sends their rows to a decode instance.
    Prefill,
}

/// The passes of a prefill instance, and its staging ring.
#[derive(clap::Args)]
pub struct PrefillArguments {
    /// What the planned instance does. For prefill the plan counts weights, activations, and the staging ring from
    /// which rows are sent; and where a prompt is computed in chunks, the pages that later chunks read.
    #[arg(long, value_enum, default_value_t = Role::Decode)]
    pub role: Role,
    /// With --role prefill: tokens of each prompt in a pass, at most --context [default: --context, at most 16K].
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = sizes::tokens)]
    pub chunk: Vec<u32>,
    /// With --role prefill: GPUs that the tokens of a pass are divided over (sequence parallel). It divides --gpus
    /// [default: 1].
    #[arg(long, value_name = "N", value_parser = sizes::gpus, allow_negative_numbers = true)]
    pub sp: Option<u32>,
    /// With --role prefill: the rate at which one GPU sends to the decode instance [default: 50GB/s, 400 Gb/s].
    #[arg(long, value_name = "RATE", value_parser = sizes::rate, allow_negative_numbers = true)]
    pub send_rate: Option<f64>,
    /// With --role prefill: milliseconds that one layer of a pass computes [default: 10.3 at 16,384 tokens, as
    /// published, in proportion to a GPU's tokens].
    #[arg(long, value_name = "MS", value_parser = sizes::positive, allow_negative_numbers = true)]
    pub layer_ms: Option<f64>,
    /// With --role prefill: milliseconds from the last byte of a layer to its acknowledgement [default: 1].
    #[arg(long, value_name = "MS", value_parser = sizes::positive, allow_negative_numbers = true)]
    pub acknowledge_ms: Option<f64>,
    /// With --role prefill: parts of the staging ring, a layer of a pass each [default: the fewest with which prefill
    /// never waits for the ring].
    #[arg(long, value_name = "N", value_parser = sizes::count, allow_negative_numbers = true)]
    pub ring_parts: Option<u32>,
}

impl PrefillArguments {
    /// The option among these that was given, if any.
    pub fn given(&self) -> Option<&'static str> {
        let all = [
            ("--chunk", !self.chunk.is_empty()),
            ("--sp", self.sp.is_some()),
            ("--send-rate", self.send_rate.is_some()),
            ("--layer-ms", self.layer_ms.is_some()),
            ("--acknowledge-ms", self.acknowledge_ms.is_some()),
            ("--ring-parts", self.ring_parts.is_some()),
        ];
        all.into_iter().find(|(_, given)| *given).map(|(option, _)| option)
    }
}
