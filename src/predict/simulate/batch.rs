//! The content of a simulated step: its micro-batches, and what follows from their rows.

/// The content of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Batch {
    /// Batch rows of the micro-batches; the second may have none.
    pub rows: [u32; 2],
    /// Query rows of each.
    pub query_rows: u32,
    /// Tokens of context.
    pub context: u32,
    /// Each micro-batch has a compute stream of its own.
    pub fill: bool,
}

impl Batch {
    /// Micro-batches that have rows.
    pub fn micro_batches(&self) -> usize {
        if self.rows[1] > 0 { 2 } else { 1 }
    }

    /// Whether the exchange of experts' tokens is charged, because no other micro-batch hides it.
    pub fn exchanges(&self) -> bool {
        self.micro_batches() == 1
    }
}

/// Draft passes: one for each draft.
pub fn draft_passes(batch: &Batch) -> u32 {
    batch.query_rows.saturating_sub(1)
}
