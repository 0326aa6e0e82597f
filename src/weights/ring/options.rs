//! What a ring is made for.

/// How a captured step treats the pulls of the next step's first layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wrap {
    /// They are in the graph, which ends behind them. A launch takes longer by the part of such a pull that is longer
    /// than the work behind the buffer's last use: max(0, pull - tail).
    #[default]
    Joined,
    /// They are enqueued behind the launch, and the next launch waits for them: it begins later by the part that is
    /// longer than the time between two launches, max(0, pull - gap).
    Behind,
}

/// What a ring is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingOptions {
    /// The last layers of the model that run once for each draft pass.
    pub draft_layers: usize,
    /// The most micro-batches of a step, at least 1.
    pub micro_batches: usize,
    /// Parts of a pull, at least 1. The first begins with the pull; a further one at each later [`Ring::enter`] and
    /// [`Ring::leave`] of a sharded layer, and at each [`Ring::advance`]. What is left when the layer is entered is
    /// enqueued then.
    pub parts: usize,
    /// How a captured step ends.
    pub wrap: Wrap,
}

impl Default for RingOptions {
    /// No draft layers, one micro-batch, pulls in one part, joined in the graph.
    fn default() -> RingOptions {
        RingOptions { draft_layers: 0, micro_batches: 1, parts: 1, wrap: Wrap::Joined }
    }
}
