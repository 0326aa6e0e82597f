//! The pool of slots that sequences with elastic budgets divide: how much of its rows each has, by their number.
//!
//! With [`Config::share`](crate::Config::share) the slots of a layer are fixed and the budgets are not. While few
//! sequences run, each has slots for all its rows and misses nothing. From some batch on the slots no longer hold the
//! rows of all, and every sequence has less. A [`Pool`] computes that batch, and the ratio at every other. It divides
//! as the cache does: whole blocks, and equal parts, since all sequences have the same length. The unit test compares
//! its parts with those of [`Share::targets`](crate::Share::targets).
//!
//! **What it does not know.** A change of a budget. A cache leaves small changes undone and limits what the changes of
//! a step cost ([`Share`](crate::Share)), a shrink moves rows, and a budget that has grown is filled by misses. None of
//! it is here: a ratio is that of sequences whose budgets have been equal parts for a while.

use crate::error::{Error, Kind, Result};
use crate::geometry::SLOT_BLOCK;

/// The slots of one layer, in whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pool {
    blocks: u32,
}

impl Pool {
    /// A pool of `slots` slots; those beyond a whole block have no use.
    pub const fn new(slots: u32) -> Pool {
        Pool { blocks: slots / SLOT_BLOCK }
    }

    /// The pool of a cache that was planned for `batch` sequences of `slots` slots each.
    pub const fn planned(batch: u32, slots: u32) -> Pool {
        Pool { blocks: slots.div_ceil(SLOT_BLOCK).saturating_mul(batch) }
    }

    /// Its slots.
    pub fn slots(self) -> u64 {
        u64::from(self.blocks) * u64::from(SLOT_BLOCK)
    }

    /// The smallest batch of sequences of `context` tokens whose rows do not all have slots. One sequence fewer
    /// misses nothing.
    pub const fn misses_from(self, context: u32) -> u32 {
        let context = if context == 0 { 1 } else { context };
        (self.blocks / context.div_ceil(SLOT_BLOCK)).saturating_add(1)
    }

    /// Slots over context of `batch` sequences of `context` tokens, mean over the sequences: 1 if all rows have slots,
    /// else `slots / (batch x context)`, where no part of a block is left over.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names a batch or a context of 0. [`Kind::OutOfMemory`] if the pool has fewer blocks than
    /// sequences: each needs one.
    pub fn ratio(self, batch: u32, context: u32) -> Result<f64> {
        if let Some((field, _)) = [("batch", batch), ("context", context)].iter().find(|(_, n)| *n == 0) {
            return Err(Error::new(Kind::InvalidConfig, "divide slots").at(*field).with("value", 0_u32));
        }
        if self.blocks < batch {
            return Err(Error::new(Kind::OutOfMemory, "divide slots")
                .at("the pool has fewer blocks of 64 slots than sequences")
                .with("blocks", self.blocks)
                .with("batch", batch)
                .hint("give the pool more slots, or run fewer sequences"));
        }
        let (each, more) = (self.blocks / batch, self.blocks % batch);
        let rows = |blocks: u32| (u64::from(blocks) * u64::from(SLOT_BLOCK)).min(context.into());
        let all = u64::from(more) * rows(each.saturating_add(1)) + u64::from(batch - more) * rows(each);
        Ok(all as f64 / (f64::from(batch) * f64::from(context)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sparse::{Share, Want};

    #[test]
    fn a_pool_of_whole_blocks_has_slots_over_batch_and_context() {
        // The slots of the ESS study's batch of 160 at 32K hold the rows of 33 sequences.
        let pool = Pool::planned(160, 6784);
        assert_eq!((pool.slots(), pool.misses_from(32 << 10)), (160 * 6784, 34));
        for (batch, ratio) in [(1, 1.0), (33, 1.0), (34, 1_085_440.0 / (34.0 * 32768.0)), (160, 0.20703125)] {
            assert_eq!(pool.ratio(batch, 32 << 10).unwrap(), ratio, "{batch}");
        }
    }

    #[test]
    fn blocks_are_not_divided() {
        // Two sequences of 65 tokens need four blocks. With three, one of them lacks a row.
        assert_eq!(Pool::new(255).ratio(2, 65).unwrap(), 129.0 / 130.0);
        assert_eq!((Pool::new(255).misses_from(65), Pool::new(256).misses_from(65)), (2, 3));
        assert_eq!(Pool::new(256).ratio(2, 65).unwrap(), 1.0);
        assert_eq!(Pool::planned(3, 65), Pool::new(6 * 64));
    }

    #[test]
    fn every_sequence_needs_a_block() {
        for (slots, batch, blocks) in [(0, 1, 0), (63, 1, 0), (64, 2, 1), (640, u32::MAX, 10)] {
            let error = Pool::new(slots).ratio(batch, 4096).unwrap_err();
            assert_eq!((error.kind(), error.number("blocks")), (Kind::OutOfMemory, Some(blocks)), "{error}");
        }
        for (batch, context, field) in [(0, 64, "batch"), (1, 0, "context")] {
            let error = Pool::new(64).ratio(batch, context).unwrap_err();
            assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, field));
        }
        assert_eq!(Pool::new(u32::MAX).misses_from(0), u32::MAX / 64 + 1);
        assert_eq!(Pool::planned(u32::MAX, u32::MAX).slots(), u64::from(u32::MAX) * 64);
        assert_eq!(Pool::planned(u32::MAX, u32::MAX).ratio(2, u32::MAX).unwrap(), 1.0);
    }

    proptest! {
        #[test]
        fn the_ratio_is_that_of_the_parts_that_a_share_gives(
            (blocks, batch, context) in (1_u32..200, 1_u32..20, 1_u32..1000),
        ) {
            let mut wants = vec![Want::new(1, context, 0, context); batch as usize];
            Share::default().targets(blocks, None, &mut wants);
            let pool = Pool::new(blocks * 64 + blocks % 64);
            if wants.iter().any(|want| want.blocks == 0) {
                prop_assert!(pool.ratio(batch, context).is_err());
            } else {
                let rows: u32 = wants.iter().map(|want| (want.blocks * 64).min(context)).sum();
                let ratio = pool.ratio(batch, context).unwrap();
                prop_assert_eq!(ratio, f64::from(rows) / f64::from(batch * context));
                prop_assert_eq!(ratio < 1.0, batch >= pool.misses_from(context));
            }
        }
    }
}
