//! How rows stand in host memory.

/// How rows stand in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    /// Bytes of a row.
    pub row: u32,
    /// Bytes from a row to the next.
    pub stride: u32,
}
