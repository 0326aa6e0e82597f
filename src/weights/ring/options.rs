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

/// What a ring brings into L2 of the next layer's window while the engine communicates: [`Device::prefetch`].
///
/// [`Device::prefetch`]: crate::device::Device::prefetch
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetch {
    /// The first bytes of the window, at least 1; a window that is shorter is touched whole. More than the device's L2
    /// has room for, beside what the engine moves meanwhile, are in vain.
    pub bytes: u64,
    /// Bytes per second, at least 1. What other work needs of the memory's rate at that time is not to be used.
    pub rate: u64,
}

/// What a ring is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingOptions {
    /// The last layers of the model that run once for each draft pass.
    pub draft_layers: usize,
    /// The most micro-batches of a step, at least 1.
    pub micro_batches: usize,
    /// Parts of a pull, at least 1. The first begins with the pull; a further one at each later
    /// [`enter`](super::Ring::enter) and [`leave`](super::Ring::leave) of a sharded layer, and at each
    /// [`advance`](super::Ring::advance). What is left when the layer is entered is enqueued then.
    pub parts: usize,
    /// How a captured step ends.
    pub wrap: Wrap,
    /// What is brought into L2 when a layer is left, if anything is.
    pub prefetch: Option<Prefetch>,
}

impl Default for RingOptions {
    /// No draft layers, one micro-batch, pulls in one part, joined in the graph, and nothing brought into L2.
    fn default() -> RingOptions {
        RingOptions { draft_layers: 0, micro_batches: 1, parts: 1, wrap: Wrap::Joined, prefetch: None }
    }
}
