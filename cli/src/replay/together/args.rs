//! The arguments of `forebay replay --together`.

use clap::ValueEnum;
use forebay::{Share, ShareBy};

/// The arguments of a replay of several traces that share slots.
#[derive(clap::Args)]
pub struct TogetherArguments {
    /// Replays the traces as sequences of one engine that share so many slots in each layer, in whole blocks of 64:
    /// once with fixed budgets, once with budgets that grow and shrink as sequences arrive and end.
    #[arg(long, value_name = "SLOTS", value_parser = clap::value_parser!(u32).range(64..=1 << 30),
          allow_negative_numbers = true,
          conflicts_with_all = ["prompt_share", "slots", "curve", "policy", "split", "prefetch", "link_rate"])]
    pub together: Option<u32>,
    /// With --together: how the slots are shared; several, separated by commas, are compared [default: equal].
    #[arg(long, value_name = "BY", value_enum, value_delimiter = ',', requires = "together")]
    pub share: Vec<By>,
    /// With --together: the steps from one sequence's arrival to the next one's; 0: all arrive at once [default: the
    /// steps of the shortest trace, divided by the traces].
    #[arg(long, value_name = "N", requires = "together", allow_negative_numbers = true)]
    pub gap: Option<u32>,
}

/// How slots are shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// The same number for each sequence.
    Equal,
    /// In proportion to the length of each sequence.
    Length,
    /// Where a slot avoids the most misses, estimated from the steps so far.
    Misses,
}

impl By {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            By::Equal => "equal",
            By::Length => "length",
            By::Misses => "misses",
        }
    }

    /// The library's policy.
    pub fn policy(self) -> Share {
        let by = match self {
            By::Equal => ShareBy::Equal,
            By::Length => ShareBy::Length,
            By::Misses => ShareBy::Misses,
        };
        Share { by, ..Share::default() }
    }
}

impl TogetherArguments {
    /// The named ways to share, each once, in the order named.
    pub fn shares(&self) -> Vec<By> {
        let mut once = Vec::new();
        for by in if self.share.is_empty() { &[By::Equal] } else { &self.share[..] } {
            if !once.contains(by) {
                once.push(*by);
            }
        }
        once
    }
}
