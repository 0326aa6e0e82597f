//! The GPUs that serve a model together: what one GPU's plan makes of all of them, and of a node.

use clap::ValueEnum;
use forebay::predict::simulate;
use forebay::predict::weights::Attention;

/// How attention is divided, by its name.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AttentionName {
    /// By sequences.
    Dp,
    /// By heads.
    Tp,
}

/// The GPUs that serve together, and what stands on them beside the cache.
#[derive(Clone, Debug, PartialEq)]
pub struct Deployed {
    /// How many.
    pub gpus: u32,
    /// How many a whole node has.
    pub node: u32,
    /// How attention is divided over a node of them.
    pub attention: Attention,
    /// Whose published weights; none where they were given.
    pub checkpoint: Option<String>,
}

impl Deployed {
    /// GPUs of one node, where there are so many.
    pub fn node_gpus(&self) -> u32 {
        self.gpus.min(self.node)
    }

    /// How many times the sequences of one GPU's plan are served.
    pub fn groups(&self) -> u64 {
        match self.attention {
            Attention::Data => u64::from(self.gpus),
            Attention::Tensor => u64::from(self.gpus / self.node_gpus().max(1)),
        }
    }

    /// Sequences of all GPUs, where one GPU's plan has so many.
    pub fn sequences(&self, batch: u32) -> u64 {
        self.groups() * u64::from(batch)
    }

    /// Tokens a second of one GPU, where the simulator tells those of 8.
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
