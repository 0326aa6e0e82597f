//! The layout of rows in host memory.

/// The layout of rows in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    /// Bytes of a row.
    pub row: u32,
    /// Bytes from one row to the next.
    pub stride: u32,
}
