//! Numbers from a seed (SplitMix64; Steele, Lea and Flood, 2014), the same on every machine.

use std::time::Duration;

/// See the module's head.
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// The numbers of a seed.
    pub const fn new(seed: u64) -> Draw {
        Draw(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x6A09_E667_F3BC_C909)
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next().checked_rem(end).unwrap_or(0)
    }

    /// True `of` times in a thousand.
    pub fn often(&mut self, of: u64) -> bool {
        self.below(1000) < of
    }

    /// A time of at most so many milliseconds.
    pub fn millis(&mut self, most: u64) -> Duration {
        Duration::from_micros(self.below(most.saturating_mul(1000).saturating_add(1)))
    }
}
