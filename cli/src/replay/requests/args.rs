//! The arguments that only request traces have.

use std::path::PathBuf;

use forebay::trace::requests::Options;
use forebay::{Error, Kind, Result};

/// The arguments for request traces only.
#[derive(clap::Args)]
pub struct RequestArguments {
    /// Request traces: capacity of the prefix cache in blocks; several, separated by commas [default: 1, 2, 5, 10,
    /// 20, 50 and 100% of the distinct blocks].
    #[arg(long, value_name = "BLOCKS", value_delimiter = ',', allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub capacity: Vec<u32>,
    /// Request traces: first requests that only warm the cache and are not measured: a number (100) or a share of all
    /// (0.5).
    #[arg(long, value_name = "N|SHARE", value_parser = skip, allow_negative_numbers = true)]
    pub skip: Option<Skip>,
    /// Mooncake traces: tokens per block [default: 512].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..),
          allow_negative_numbers = true)]
    pub block_tokens: Option<u32>,
    /// RAGPulse traces: the side files with the pieces' lengths, separated by commas.
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    pub block_lengths: Vec<PathBuf>,
    /// Sessions of kv-cache-tester: also replay the requests of sub-agents.
    #[arg(long)]
    pub subagents: bool,
    /// Sessions of kv-cache-tester: replay them one after another, in file order. By default all sessions begin
    /// together and their requests are interleaved by time.
    #[arg(long)]
    pub one_after_another: bool,
}

/// How many requests are not measured.
#[derive(Clone, Copy)]
pub enum Skip {
    Requests(u64),
    Share(f64),
}

fn skip(text: &str) -> std::result::Result<Skip, String> {
    if let Ok(requests) = text.parse() {
        return Ok(Skip::Requests(requests));
    }
    match text.parse() {
        Ok(share) if (0.0..1.0).contains(&share) => Ok(Skip::Share(share)),
        _ => Err("neither a number of requests nor a share from 0 to below 1".to_owned()),
    }
}

impl RequestArguments {
    /// Refuses these options, and `other` if it is given, with selection traces.
    pub fn refuse(&self, other: Option<&'static str>) -> Result<()> {
        let RequestArguments { capacity, skip, block_tokens, block_lengths, subagents, one_after_another } =
            self;
        let given = [
            ("--capacity", !capacity.is_empty()),
            ("--skip", skip.is_some()),
            ("--block-tokens", block_tokens.is_some()),
            ("--block-lengths", !block_lengths.is_empty()),
            ("--subagents", *subagents),
            ("--one-after-another", *one_after_another),
        ];
        match given.iter().find(|(_, given)| *given).map(|(name, _)| *name).or(other) {
            None => Ok(()),
            Some(name) => Err(Error::new(Kind::InvalidConfig, "replay")
                .at(format!("{name} is for request traces, but these are selection traces"))
                .hint("leave it out, or pass a request trace")),
        }
    }

    /// The files that are read in addition to the traces.
    pub fn side_files(&self) -> &[PathBuf] {
        &self.block_lengths
    }

    /// The capacities named.
    pub fn named(&self) -> &[u32] {
        &self.capacity
    }

    pub fn options(&self) -> Options {
        Options {
            block_tokens: self.block_tokens,
            subagents: self.subagents,
            piece_lengths: self.block_lengths.clone(),
            one_after_another: self.one_after_another,
        }
    }
}
