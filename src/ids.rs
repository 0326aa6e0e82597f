//! Ids: a distinct type for each kind of number that names something.
//!
//! A common cause of silent corruption in KV caches is a number of one kind used as another: a logical page as a
//! physical page, a slot of a sequence as a slot of the pool. So each public id has its own type over a `u32`. The flat
//! tables of [`crate::residency`] hold plain words, because kernels read them too.

use std::fmt;

macro_rules! id {
    ($($(#[$doc:meta])* $name:ident $text:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The id as an index into a table.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($text, " {}"), self.0)
            }
        }
    )*};
}

id! {
    /// A layer of the cache, draft layers included, from 0.
    Layer "layer";
    /// A sequence's index in the device's tables, from open until its resources are freed.
    Lane "lane";
    /// A page of 64 rows in the total pool, the same index in every layer.
    HostPage "host page";
    /// A page of 64 index keys on the device, the same index in every layer.
    IndexPage "index page";
    /// A page of rows on the device, the same index in every layer of its group.
    DevicePage "device page";
    /// One of the micro-batches whose steps may be open at the same time.
    MicroBatch "micro-batch";
}

/// A handle of a sequence in a cache. Because of the generation, the handle of a closed sequence never names a later
/// sequence with the same index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl Sequence {
    /// The handle as one word, for callers in other languages: the generation in the upper 32 bits, the index in the
    /// lower.
    pub const fn to_bits(self) -> u64 {
        ((self.generation as u64) << 32) | self.index as u64
    }

    /// The handle from a word made by [`Sequence::to_bits`]. Any word is allowed: calls with a handle that names no
    /// open sequence return [`crate::Kind::Closed`].
    pub const fn from_bits(bits: u64) -> Self {
        Sequence { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}.{}", self.index, self.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_the_round_trip_through_a_word() {
        let s = Sequence { index: 7, generation: 0xFFFF_FFFF };
        assert_eq!(Sequence::from_bits(s.to_bits()), s);
        assert_eq!(s.to_string(), "sequence 7.4294967295");
        assert_eq!(Layer(3).to_string(), "layer 3");
    }
}
