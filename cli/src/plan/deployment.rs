//! The GPUs that serve a model together: turns the plan of one GPU into figures for all of them, and for a node.

use clap::ValueEnum;
use forebay::predict::simulate;
use forebay::predict::weights::Attention;

/// The name of the way in which attention is divided.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AttentionName {
    /// By sequences.
    Dp,
    /// By heads.
    Tp,
}

/// The GPUs that serve together, and the memory that other things take on them.
#[derive(Clone, Debug, PartialEq)]
pub struct Deployed {
    /// The number of GPUs.
    pub gpus: u32,
    /// The number of GPUs of a whole node.
    pub node: u32,
    /// How attention is divided over a node.
    pub attention: Attention,
    /// GPUs that attention's heads are divided over; 1 if it is divided by sequences.
    pub heads: u32,
    /// The checkpoint that the weights come from; none if they were given.
    pub checkpoint: Option<String>,
}

impl Deployed {
    /// GPUs of one node, or all if there are fewer.
    pub fn node_gpus(&self) -> u32 {
        self.gpus.min(self.node)
    }

    /// How many distinct sets of sequences the GPUs serve, each as large as one GPU's plan.
    pub fn groups(&self) -> u64 {
        u64::from(self.gpus / self.heads.max(1))
    }

    /// Sequences of all GPUs, if one GPU's plan has `batch`.
    pub fn sequences(&self, batch: u32) -> u64 {
        self.groups() * u64::from(batch)
    }

    /// Tokens a second of one GPU, from the simulator's figure for 8.
    pub fn of_gpu(throughput: f64) -> f64 {
        throughput / simulate::NODE_GPUS
    }

    /// Tokens a second of one node.
    pub fn of_node(&self, throughput: f64) -> f64 {
        Deployed::of_gpu(throughput) * f64::from(self.node_gpus())
    }

    /// Tokens a second of all GPUs.
    pub fn of_all(&self, throughput: f64) -> f64 {
        Deployed::of_gpu(throughput) * f64::from(self.gpus)
    }
}
