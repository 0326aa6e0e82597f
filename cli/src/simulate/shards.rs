//! The options of `forebay simulate` about sharded weights.
//!
//! They are `forebay plan`'s, and mean the same bytes ([`plan_of`]). The dtype is the setup's: its costs are those of
//! its own weights, and other bytes beside them would be the pulls of one engine and the speed of another.

use forebay::predict::setup::Setup;
use forebay::predict::weights::{Attention, Division};
use forebay::weights::{Plan, Source};
use forebay::{Error, Kind, Result};

use crate::input::sizes;
use crate::plan::shards::{From, plan_of};

/// The options about sharded weights.
#[derive(clap::Args)]
pub struct ShardArguments {
    /// Weights that the ranks of a host share instead of each keeping them, pulled before each layer: o_proj, mla, or a
    /// pattern of names such as '*.o_proj.*' (docs/planner.md).
    #[arg(long, value_name = "o_proj|mla|GLOB", value_delimiter = ',', requires = "dp")]
    pub shard: Vec<String>,
    /// Data-parallel ranks of one host that share weights.
    #[arg(long, value_name = "N", value_parser = sizes::gpus, requires = "shard", allow_negative_numbers = true)]
    pub dp: Option<u32>,
    /// Where a sharded layer's missing bytes come from: the other ranks' GPUs, or the rank's own pinned host memory
    /// [default: peers].
    #[arg(long, value_enum, requires = "shard")]
    pub weights_from: Option<From>,
}

/// What is sharded.
#[derive(Clone, Debug, PartialEq)]
pub struct Sharded {
    /// As asked.
    pub names: Vec<String>,
    /// Seen from the first rank.
    pub plan: Plan,
}

impl ShardArguments {
    /// What is sharded in steps of the setup's model; none without `--shard`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a model without a published checkpoint, and for more ranks than the setup has GPUs;
    /// errors of [`plan_of`].
    pub fn of(&self, setup: &Setup) -> Result<Option<Sharded>> {
        let Some(ranks) = self.dp.filter(|_| !self.shard.is_empty()) else { return Ok(None) };
        let wrong = |place: &'static str| Error::new(Kind::InvalidConfig, "simulate").at(place);
        let Some(checkpoint) = setup.checkpoint()? else {
            return Err(wrong("--shard: no checkpoint of the setup's model is known")
                .hint("choose a model whose matrices are published, such as deepseek-v3.2"));
        };
        let gpus = setup.file().deployment.gpus;
        if ranks > gpus {
            return Err(wrong("--dp: more ranks than GPUs").with("value", ranks).with("gpus", gpus));
        }
        // The draft layer is in the plan where the setup runs it as a layer of its own.
        let drafts = setup.shape().draft_layers > 0;
        let of = (&Division::of(gpus, Attention::Data), setup.file().model.weights(), drafts);
        let plan = plan_of(&checkpoint, of, gpus, (&self.shard, self.weights_from), ranks)?;
        Ok(Some(Sharded { names: self.shard.clone(), plan }))
    }
}

impl Sharded {
    /// The source's name.
    pub const fn source(&self) -> &'static str {
        match self.plan.source() {
            Source::Peers => "peers",
            Source::Host => "host",
        }
    }

    /// What is sharded, in words.
    pub fn words(&self) -> String {
        format!("{} sharded over {} ranks", self.names.join(", "), self.plan.group().ranks)
    }
}
