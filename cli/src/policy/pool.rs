//! What a pool under a policy is, and what it is told of a selected row.

/// The step that never comes: of a row that is not selected again.
pub const NEVER: u32 = u32::MAX;

/// A row, as a step selects it or a commit bears it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selected {
    /// Its position.
    pub position: u32,
    /// The next step, counted from the first warm-up step, that selects it; [`NEVER`] if none does, or a warm-up
    /// step does first, whose misses are not counted.
    pub next: u32,
}

/// One layer's pool under one policy.
pub trait Pool {
    /// Whether the row is resident.
    fn holds(&self, position: u32) -> bool;

    /// Step `step` selects `rows`, ascending by position. Returns how many were missed.
    fn select(&mut self, step: u32, rows: &[Selected]) -> u32;

    /// `rows`, ascending, were born in step `step`, the last one selected for.
    fn bear(&mut self, step: u32, rows: &[Selected]);
}
