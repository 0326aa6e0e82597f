//! The arguments of `forebay plan --dense` that no other plan has.

use crate::input::sizes;

/// The pages of a dense model's cache.
#[derive(clap::Args)]
pub struct PageArguments {
    /// With --dense: tokens of a page, 16, 32, 64, 128 or 256, as the attention kernel takes them [default: 64].
    #[arg(long, value_name = "TOKENS", value_parser = sizes::count, allow_negative_numbers = true, requires = "dense")]
    pub page_tokens: Option<u32>,
    /// With --dense: bytes of a cached value, 2 for BF16, 1 for FP8 [default: 2].
    #[arg(long, value_name = "N", value_parser = sizes::value_bytes, allow_negative_numbers = true, requires = "dense")]
    pub value_bytes: Option<u32>,
    /// With --dense: the most query rows of a step, prompt chunks included. Windows keep pages for them
    /// [default: 2048].
    #[arg(long, value_name = "TOKENS", value_parser = sizes::tokens, requires = "dense")]
    pub step_tokens: Option<u32>,
}

impl PageArguments {
    /// Bytes of a cached value.
    pub fn value_bytes(&self) -> u32 {
        self.value_bytes.unwrap_or(2)
    }
}
