//! The memory at both ends of the model fabric, which the caller has.

use crate::error::Result;
use crate::transfer::quarantine::Fence;
use crate::transfer::runs::Run;

/// Who reads a sender's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The sender's machine, which must read only what is still held.
    Machine,
    /// The fabric, which may come late and find other bytes.
    Fabric,
}

/// A sender's rows.
pub trait Memory {
    /// Copies a run's pieces, one after another, from where an origin says.
    ///
    /// # Errors
    /// Any.
    fn read(&mut self, by: By, origin: u64, run: &Run, into: &mut [u8]) -> Result<()>;
}

/// A receiver's landing pages.
pub trait Landing {
    /// A writer from afar writes a run's bytes.
    fn write(&mut self, fence: Fence, page: u32, run: &Run, bytes: &[u8]);

    /// Copies a run's pieces, one after another.
    ///
    /// # Errors
    /// Any.
    fn read(&mut self, page: u32, run: &Run, into: &mut [u8]) -> Result<()>;
}
