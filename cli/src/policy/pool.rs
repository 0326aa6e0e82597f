//! The interface of a pool under a policy, and what it learns about a selected row.

/// The next step of a row that is not selected again.
pub const NEVER: u32 = u32::MAX;

/// A row that a step selects or a commit bears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selected {
    /// Its position.
    pub position: u32,
    /// The next step, counted from the first warm-up step, that selects it; [`NEVER`] if there is none, or if a
    /// warm-up step comes first, whose misses are not counted.
    pub next: u32,
}

/// One layer's pool under one policy.
pub trait Pool {
    /// Whether the row is resident.
    fn holds(&self, position: u32) -> bool;

    /// Step `step` selects `rows`, ascending by position. Returns the number of misses.
    fn select(&mut self, step: u32, rows: &[Selected]) -> u32;

    /// `rows`, ascending, were born in step `step`, the last one passed to `select`.
    fn bear(&mut self, step: u32, rows: &[Selected]);
}
