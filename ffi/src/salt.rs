//! The salt of a cache object. Sequence and step numbers that callers get are mixed with it, so that the numbers of one
//! cache name nothing in another.

use forebay::Result;
use forebay::os::{NoFaults, random};

/// A cache's salt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Salt(u64);

/// Bits that every salt has. Lanes and steps are fewer, so no number is 0, which means none.
const ALWAYS: u64 = 1 << 63 | 1 << 31;

impl Salt {
    /// A random salt.
    pub(crate) fn draw() -> Result<Salt> {
        let mut salt = [0; 8];
        random(&mut salt, &NoFaults)?;
        Ok(Salt(u64::from_ne_bytes(salt) | ALWAYS))
    }

    /// Turns the library's number into the caller's, and back.
    pub(crate) const fn mix(self, number: u64) -> u64 {
        number ^ self.0
    }
}
