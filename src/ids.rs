//! The names of things, each a type of its own.
//!
//! Most silent corruption in this field is one number taken for another: a logical page for a physical
//! one, a slot of one sequence for a slot of the pool. Here every public name is a distinct type over a
//! `u32`; the flat tables of [`crate::residency`] hold the bare words, because a kernel reads them too.

use std::fmt;

macro_rules! id {
    ($($(#[$doc:meta])* $name:ident $text:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// As an index into a table.
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
    /// A sequence's place in the device's tables, from joining the batch to leaving it.
    Lane "lane";
    /// A page of 64 rows in the total pool, the same index in every layer.
    HostPage "host page";
    /// A page of 64 index keys on the device, the same index in every layer.
    IndexPage "index page";
    /// One of the micro-batches whose steps may be open at the same time.
    MicroBatch "micro-batch";
}

/// A sequence of a cache. The generation makes a handle of a closed sequence an error, not another
/// sequence's handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl Sequence {
    /// The handle as one word, for foreign callers: generation above index.
    pub const fn to_bits(self) -> u64 {
        ((self.generation as u64) << 32) | self.index as u64
    }

    /// The handle of a word made by [`Sequence::to_bits`]. Any word is allowed: one that names no open
    /// sequence is answered with [`crate::Kind::Closed`].
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
