//! The arguments of a replay through two tiers.

use clap::ValueEnum;
use clap::builder::PossibleValue;
use forebay::{Error, Geometry, Kind, Result, Shape};

use super::result::{BlockBytes, Rates};
use crate::blocks::tiers::Save;
use crate::input::sizes;

/// The arguments for two tiers only.
#[derive(clap::Args)]
pub struct TiersArguments {
    /// Request traces: replays them through a prefix cache in two tiers, of which the device holds N blocks. All blocks
    /// of a running request are on the device.
    #[arg(long, value_name = "N", group = "linked", requires = "host_blocks", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..),
          conflicts_with_all = ["capacity", "policy", "curve", "html"])]
    pub device_blocks: Option<u32>,
    /// With --device-blocks: the blocks that host memory holds; 0 for a device alone.
    #[arg(long, value_name = "M", requires = "device_blocks", allow_negative_numbers = true)]
    pub host_blocks: Option<u32>,
    /// With --device-blocks: when a block is saved to the host [default: published].
    #[arg(long, value_enum, requires = "device_blocks")]
    pub save: Option<Save>,
    /// With --device-blocks: tokens of a prompt that the engine computes in a second; with --link-rate it gives the
    /// time to first token that hits save.
    #[arg(long, value_name = "TOKENS/S", requires = "device_blocks", value_parser = prefill_rate,
          allow_negative_numbers = true)]
    pub prefill_rate: Option<f64>,
    /// With --device-blocks: bytes of a block in all layers, such as 64MiB or 43974656; --model sets them instead from
    /// the tokens of a block.
    #[arg(long, value_name = "B", requires = "device_blocks", conflicts_with = "model", value_parser = block_bytes,
          allow_negative_numbers = true)]
    pub block_bytes: Option<u64>,
}

impl ValueEnum for Save {
    fn value_variants<'a>() -> &'a [Save] {
        &[Save::Published, Save::Evicted]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Save::Published => {
                "Write-through: when the block is published, so that an eviction copies nothing"
            }
            Save::Evicted => "Write-back: when the block's device page goes to another block",
        };
        Some(PossibleValue::new(self.name()).help(help))
    }
}

fn prefill_rate(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(rate) if (1e-3..=1e9).contains(&rate) => Ok(rate),
        _ => Err("not a number of tokens a second from 0.001 to 1000000000".to_owned()),
    }
}

fn block_bytes(text: &str) -> std::result::Result<u64, String> {
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse() {
        Ok(bytes) if plain && (1..=1 << 60).contains(&bytes) => Ok(bytes),
        _ if plain => Err("not a number of bytes from 1 to 2^60".to_owned()),
        _ => sizes::some_bytes(text),
    }
}

impl TiersArguments {
    /// A given option, if any: all are for request traces.
    pub fn given(&self) -> Option<&'static str> {
        self.device_blocks.map(|_| "--device-blocks")
    }

    /// The bytes of a block, by the size or the model that was named.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`].
    pub fn block_bytes(&self, model: Option<&str>) -> Result<Option<BlockBytes>> {
        let Some(name) = model else { return Ok(self.block_bytes.map(BlockBytes::Block)) };
        let shape =
            Shape::preset(name).ok_or_else(|| Error::new(Kind::InvalidConfig, "replay").at("--model"))?;
        let geometry = Geometry::new(shape)?;
        let rows = u64::from(geometry.layers()) * u64::from(geometry.row_bytes());
        let keys = u64::from(geometry.index_layers()) * u64::from(shape.index_key_bytes);
        Ok(Some(BlockBytes::Token { model: name.to_owned(), bytes: rows + keys }))
    }

    /// The rates, if both are given.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] if one is missing, or the bytes of a block are.
    pub fn rates(&self, link_gb: Option<f64>, bytes: Option<&BlockBytes>) -> Result<Option<Rates>> {
        let missing = |given: &str, missing: &str| {
            Error::new(Kind::InvalidConfig, "replay")
                .at(format!("{given} is given without {missing}: the time to first token needs both rates"))
                .hint("pass both, or neither")
        };
        match (self.prefill_rate, link_gb) {
            (None, None) => Ok(None),
            (Some(_), None) => Err(missing("--prefill-rate", "--link-rate")),
            (None, Some(_)) => Err(missing("--link-rate", "--prefill-rate")),
            (Some(_), Some(_)) if bytes.is_none() => Err(Error::new(Kind::InvalidConfig, "replay")
                .at("the time to first token needs the bytes of a block: --block-bytes or --model")
                .hint("pass one of the two, or leave out --prefill-rate and --link-rate")),
            (Some(prefill), Some(link)) => Ok(Some(Rates { prefill, link: link * 1e9 })),
        }
    }
}
