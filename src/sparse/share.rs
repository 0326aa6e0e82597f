//! Shares: how the slots of a layer are divided over the sequences of a cache.
//!
//! Budgets that are fixed at open leave slots unused while few sequences run, and those that run miss rows for which
//! there is memory. A [`Share`] gives every slot to some sequence: a lone sequence gets all that it can ever use, and
//! as others come, all shrink. It is only arithmetic. It takes lengths and limits ([`Want`]) and returns blocks; who
//! calls it, when, and what a resize does, is not decided here.
//!
//! # The division
//!
//! The unit is the block of 64 slots. Each layer is divided by itself: its slab is its own memory. Three passes give
//! out the blocks that the layer has, each pass until all sequences have reached its limit or no block is left:
//!
//! 1. up to [`Want::least`], which admission has promised;
//! 2. up to [`Want::now`], the rows that the sequence has, with some headroom: beyond it nothing is missed;
//! 3. up to [`Want::most`], the rows that it may ever have.
//!
//! Within a pass, the sequence on the lowest *level* gets the next block. The level is the number of its blocks
//! ([`ShareBy::Equal`]), or its blocks divided by its length ([`ShareBy::Length`]). Among equal levels the sequence
//! that was opened first gets it: the order of the slice. So a block more, or a sequence fewer, takes a block from
//! no sequence. (Shares in proportion with the largest remainders rounded up would: the paradox of Alabama.)
//!
//! [`ShareBy::Misses`] goes by level in the passes 1 and 3. In pass 2 the next block goes where it avoids the most
//! misses, by the layer's [`MissCurve`]; blocks of equal gain, and those that gain nothing, go by length. Without a
//! curve it is [`ShareBy::Length`].
//!
//! **Result.** The blocks given are as many as the layer has, or the sum of all `most` if that is less. No sequence
//! gets less than `least` if the sum of all `least` fits; if it does not, pass 1 ends early and no sequence gets more
//! than its `least`.
//!
//! # How
//!
//! Blocks are not given out one by one. A pass finds the level that is paid for by a binary search, then gives out the
//! few blocks that are left at that level. The unit tests do it one by one and get the same. All numbers are whole, so
//! the same input gives the same shares on every rank and machine.
//!
//! **Costs.** A call is one layer. For 61 layers of 64 sequences between 2K and 128K tokens that do not all fit,
//! `targets` took 65 us by equal slots, 0.2 ms by length and 0.8 ms by misses on one core of an AMD EPYC (1.4, 3.1 and
//! 15 million instructions). That is for a sequence that comes or ends, not for every step; and layers with as many
//! blocks have the same shares, except by misses. Memory: what the caller passes, 24 bytes a sequence.
//!
//! # What it does not do
//!
//! It allocates nothing, takes no lock and knows no cache. It moves no slots between layers.

use crate::error::{Error, Kind, Result};
use crate::geometry::SLOT_BLOCK;
use crate::sparse::curve::{MissCurve, Slopes};

/// By which measure slots are divided. The example of `docs/policies.md` compares them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ShareBy {
    /// The same number of slots for each sequence. Short sequences are wholly resident.
    #[default]
    Equal,
    /// In proportion to the length of each sequence. All sequences have about the same part of their rows.
    Length,
    /// Where a slot avoids the most misses, estimated layer by layer from the counters of past steps ([`MissCurve`]);
    /// by length until there are counts at two budgets.
    Misses,
}

/// A policy that sets the budgets of all sequences of a cache, and limits what its changes cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// By which measure slots are divided.
    pub by: ShareBy,
    /// Budgets are set anew every so many steps; 0: only when a sequence comes, ends or outgrows its budget.
    pub every: u32,
    /// The least change that is made, as a divisor of the budget: 8 is an eighth. See [`Share::is_worth`].
    pub least_change: u32,
    /// The most bytes that the shrinks of one step may move on the device: at least those of 64 rows in every layer. A
    /// join that lacks slots for its promise may move more.
    pub bytes_a_step: u64,
    /// The most sequences that one step resizes.
    pub resizes_a_step: u32,
}

impl Default for Share {
    /// Equal slots when sequences come and go; changes of an eighth; at most 64 MiB and 8 sequences a step.
    fn default() -> Self {
        Share { by: ShareBy::Equal, every: 0, least_change: 8, bytes_a_step: 64 << 20, resizes_a_step: 8 }
    }
}

/// The limits of one sequence in one layer, in blocks of 64 slots, and the blocks that [`Share::targets`] gave it.
///
/// Limits out of order are put in order: `most` counts as at least `least`, and `now` as between the two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Want {
    /// The least blocks, promised at open.
    pub least: u32,
    /// Blocks for the rows that the sequence has, with headroom.
    pub now: u32,
    /// Blocks for all rows that the sequence may ever have.
    pub most: u32,
    /// Its tokens; 0 counts as 1.
    pub length: u32,
    /// The blocks that it was given.
    pub blocks: u32,
    /// The limit of the present pass.
    limit: u32,
}

impl Want {
    /// The limits of a sequence of `length` tokens that may grow to `reach` tokens, rows in flight included, was
    /// promised `least` slots, and has up to `flight` rows in flight. The headroom is an eighth of the length.
    pub fn new(least: u32, length: u32, flight: u32, reach: u32) -> Want {
        let now = length.saturating_add(length / 8).saturating_add(flight).min(reach);
        let [least, now, most] = [least, now, reach].map(|slots| slots.div_ceil(SLOT_BLOCK));
        Want { least, now, most, length, ..Want::default() }
    }
}

impl Want {
    /// The limits of a sequence that keeps the `blocks` blocks that it has.
    pub fn fixed(blocks: u32, length: u32) -> Want {
        Want { least: blocks, now: blocks, most: blocks, length, ..Want::default() }
    }
}

impl Share {
    /// Checks the limits of a step.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the field that is 0 and must not be.
    pub fn check(&self) -> Result<()> {
        let fields = [
            (
                "least_change",
                u64::from(self.least_change),
                "pass 1 or more: 8 leaves changes below an eighth",
            ),
            (
                "bytes_a_step",
                self.bytes_a_step,
                "pass 1 or more: without moved rows no sequence could shrink",
            ),
            ("resizes_a_step", u64::from(self.resizes_a_step), "pass 1 or more"),
        ];
        match fields.iter().find(|(_, value, _)| *value == 0) {
            Some((field, value, hint)) => {
                Err(Error::new(Kind::InvalidConfig, "share").at(*field).with("value", *value).hint(hint))
            }
            None => Ok(()),
        }
    }

    /// Divides the `blocks` blocks of a layer over the sequences, and writes their parts into [`Want::blocks`]. The
    /// sequences come in the order in which they were opened. `curve` is the layer's; only [`ShareBy::Misses`] looks
    /// at it. The module's head says how.
    pub fn targets(&self, blocks: u32, curve: Option<&MissCurve>, wants: &mut [Want]) {
        let even = self.by == ShareBy::Equal;
        let line = if self.by == ShareBy::Misses { curve.and_then(MissCurve::line) } else { None };
        for want in &mut *wants {
            (want.blocks, want.limit) = (0, want.least);
        }
        let left = fill(wants, even, u64::from(blocks));
        for want in &mut *wants {
            want.limit = want.now.min(want.most).max(want.blocks);
        }
        let left = match line {
            Some(line) => fill_by_gain(wants, &line.slopes(), left),
            None => fill(wants, even, left),
        };
        for want in &mut *wants {
            want.limit = want.most.max(want.blocks);
        }
        fill(wants, even, left);
    }

    /// Whether a change from `budget` to `target` slots is worth a resize: from the
    /// [`least_change`](Share::least_change)-th part of the budget on if the budget shrinks, from half that part on if
    /// it grows, and if it changes the number of blocks or 64 slots. A growth moves no rows; and a sequence that gets
    /// the headroom of [`Want::new`] by it must get it before the old headroom is used up.
    pub fn is_worth(&self, budget: u32, target: u32) -> bool {
        let part =
            if target > budget { u64::from(self.least_change) * 2 } else { u64::from(self.least_change) };
        let change = budget.abs_diff(target);
        let blocks = budget.div_ceil(SLOT_BLOCK) != target.div_ceil(SLOT_BLOCK);
        (blocks || change >= SLOT_BLOCK) && u64::from(change) >= u64::from(budget) / part.max(1)
    }

    /// The budget closest to `target` slots that a resize from `budget` slots reaches if it may move at most `rows`
    /// rows: the target, or on the way there a number of whole blocks, or `budget`. A resize moves at most the rows
    /// that the given-up slots hold, and at most those that the slots that remain can take.
    pub fn within(budget: u32, target: u32, rows: u64) -> u32 {
        let moved = target.min(budget.saturating_sub(target));
        if u64::from(moved) <= rows {
            return target;
        }
        let rows = u32::try_from(rows).unwrap_or(u32::MAX);
        let part = budget.saturating_sub(rows).div_ceil(SLOT_BLOCK).saturating_mul(SLOT_BLOCK);
        part.min(budget)
    }
}

impl Want {
    /// What its blocks are divided by to give its level.
    fn weight(&self, even: bool) -> u32 {
        if even { 1 } else { self.length.max(1) }
    }

    /// Its blocks once all blocks that are worth more than `price` are given out.
    fn worth(&self, slopes: &Slopes, price: u64) -> u32 {
        let blocks = slopes.worth(price, self.length.max(1)).div_ceil(u64::from(SLOT_BLOCK));
        u32::try_from(blocks).unwrap_or(u32::MAX).clamp(self.blocks, self.limit)
    }
}

/// The bits of a number.
fn bits(number: u64) -> u32 {
    u64::BITS - number.leading_zeros()
}

/// Gives out up to `give` blocks to the sequences on the lowest level, up to their limits, and returns those left.
///
/// The level is a fixed-point number so fine that from one to the next no sequence gets more than one block, and few
/// get one. That is for speed: what is left goes one by one, whatever it is.
fn fill(wants: &mut [Want], even: bool, give: u64) -> u64 {
    if give == 0 {
        return 0;
    }
    let wanted: u64 = wants.iter().map(|want| u64::from(want.limit - want.blocks)).sum();
    if wanted <= give {
        wants.iter_mut().for_each(|want| want.blocks = want.limit);
        return give - wanted;
    }
    let heaviest = wants.iter().map(|want| u64::from(want.weight(even))).max().unwrap_or(1);
    let shift = (bits(heaviest - 1) + if even { 0 } else { bits(wants.len() as u64) }).min(u32::BITS);
    let round = (1_u128 << shift) - 1;
    let below = |want: &Want, level: u64| {
        let blocks = (u128::from(level) * u128::from(want.weight(even)) + round) >> shift;
        blocks.clamp(u128::from(want.blocks), u128::from(want.limit)) as u32
    };
    let price = |level: u64| wants.iter().map(|w| u64::from(below(w, level) - w.blocks)).sum::<u64>();
    // Every limit is below the first, and the blocks below the second can be paid.
    let top = |want: &Want| (u64::from(want.limit) << shift) / u64::from(want.weight(even)) + 1;
    let mut beyond = wants.iter().map(top).max().unwrap_or(0);
    let (mut paid, mut left) = (0, give);
    while beyond - paid > 1 {
        let level = paid + (beyond - paid) / 2;
        match give.checked_sub(price(level)) {
            Some(rest) => (paid, left) = (level, rest),
            None => beyond = level,
        }
    }
    for want in &mut *wants {
        want.blocks = below(want, paid);
    }
    hand_out(wants, even, left);
    0
}

/// Gives `left` blocks to the sequences on the lowest level, each of equal level one by one. The limits have room for
/// them.
fn hand_out(wants: &mut [Want], even: bool, mut left: u64) {
    let level = |a: &Want, b: &Want| {
        let across = |a: &Want, b: &Want| u64::from(a.blocks) * u64::from(b.weight(even));
        across(a, b).cmp(&across(b, a))
    };
    while left > 0 {
        let Some(lowest) = wants.iter().filter(|w| w.blocks < w.limit).min_by(|a, b| level(a, b)).copied()
        else {
            return;
        };
        for want in wants.iter_mut().filter(|w| w.blocks < w.limit) {
            if left > 0 && level(want, &lowest).is_eq() {
                want.blocks += 1;
                left -= 1;
            }
        }
    }
}

/// As [`fill`], but the blocks that avoid the most misses come first.
///
/// A search finds two neighbouring prices. Blocks that are worth more than the higher one can all be paid; of those
/// that are worth the lower one, only some, and these go by length.
fn fill_by_gain(wants: &mut [Want], slopes: &Slopes, give: u64) -> u64 {
    let total = |price: u64| wants.iter().map(|w| u64::from(w.worth(slopes, price) - w.blocks)).sum::<u64>();
    let (mut few, mut many) = (slopes.steepest(), None);
    let mut left = give;
    while many.is_none_or(|many| few - many > 1) {
        let price = many.map_or(0, |many| many + (few - many) / 2);
        match give.checked_sub(total(price)) {
            Some(rest) => (few, left) = (price, rest),
            None => many = Some(price),
        }
        if few == 0 {
            break;
        }
    }
    for want in &mut *wants {
        let limit = many.map_or(want.limit, |many| want.worth(slopes, many));
        (want.blocks, want.limit) = (want.worth(slopes, few), limit);
    }
    fill(wants, false, left)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const fn by(by: ShareBy) -> Share {
        Share { by, every: 0, least_change: 8, bytes_a_step: 1, resizes_a_step: 1 }
    }

    fn blocks(wants: &[Want]) -> Vec<u32> {
        wants.iter().map(|want| want.blocks).collect()
    }

    fn divided(by_what: ShareBy, slots: u32, wants: &[Want]) -> Vec<u32> {
        let mut wants = wants.to_vec();
        by(by_what).targets(slots, None, &mut wants);
        blocks(&wants)
    }

    /// One block at a time, to the first of the sequences with the lowest level.
    fn naive(even: bool, blocks: u32, wants: &[Want]) -> Vec<u32> {
        let mut given = vec![0_u32; wants.len()];
        let length = |i: usize| if even { 1 } else { u128::from(wants[i].length.max(1)) };
        let least = |want: &Want| want.least;
        let now = |want: &Want| want.now.min(want.most.max(want.least));
        let most = |want: &Want| want.most;
        let limits: [&dyn Fn(&Want) -> u32; 3] = [&least, &now, &most];
        let mut left = blocks;
        for limit in limits {
            while left > 0 {
                let open = (0..wants.len()).filter(|i| given[*i] < limit(&wants[*i]));
                let Some(next) = open.reduce(|a, b| {
                    let lower = u128::from(given[b]) * length(a) < u128::from(given[a]) * length(b);
                    if lower { b } else { a }
                }) else {
                    break;
                };
                given[next] += 1;
                left -= 1;
            }
        }
        given
    }

    /// The example of `docs/policies.md`: 512 blocks; 4,096, 32,768 and 16,384 tokens, of which each may grow by half.
    #[test]
    fn the_example_of_the_page() {
        let [a, b, c] = [4096, 32_768, 16_384].map(|tokens| Want::new(2048, tokens, 1, tokens / 2 * 3));
        assert_eq!(
            [a, b, c].map(|w| [w.least, w.now, w.most]),
            [[32, 73, 96], [32, 577, 768], [32, 289, 384]]
        );
        for policy in [ShareBy::Equal, ShareBy::Length, ShareBy::Misses] {
            assert_eq!(divided(policy, 512, &[a]), [96]);
        }
        assert_eq!(divided(ShareBy::Equal, 512, &[a, b]), [73, 439]);
        assert_eq!(divided(ShareBy::Length, 512, &[a, b]), [57, 455]);
        assert_eq!(divided(ShareBy::Equal, 512, &[a, b, c]), [73, 220, 219]);
        assert_eq!(divided(ShareBy::Length, 512, &[a, b, c]), [40, 315, 157]);
        assert_eq!(divided(ShareBy::Equal, 90, &[a, b, c]), [30, 30, 30]);
    }

    #[test]
    fn the_sequence_opened_first_gets_what_is_left() {
        let want = Want { least: 1, now: 4, most: 9, length: 300, ..Want::default() };
        for policy in [ShareBy::Equal, ShareBy::Length, ShareBy::Misses] {
            assert_eq!(divided(policy, 11, &[want; 4]), [3, 3, 3, 2]);
            assert_eq!(divided(policy, 17, &[want; 4]), [5, 4, 4, 4]);
            assert_eq!(divided(policy, 3, &[want; 4]), [1, 1, 1, 0]);
            assert_eq!(divided(policy, 99, &[want; 4]), [9; 4]);
        }
        assert_eq!(divided(ShareBy::Equal, 9, &[]), [0_u32; 0]);
    }

    #[test]
    fn big_numbers_do_not_overflow() {
        let most = u32::MAX;
        let all = Want { least: most, now: most, most, length: most, ..Want::default() };
        let one = Want { least: 0, now: 1, most: 1, length: 1, ..Want::default() };
        let mut curve = MissCurve::default();
        curve.note(1, u64::from(most), u64::MAX, 1);
        curve.note(u64::from(most / 2), u64::from(most), u64::MAX, 1);
        for policy in [ShareBy::Equal, ShareBy::Length, ShareBy::Misses] {
            let mut wants = vec![Want { least: 1, ..all }; 4000];
            wants.extend([one; 1000]);
            by(policy).targets(most, Some(&curve), &mut wants);
            assert_eq!(wants.iter().map(|want| u64::from(want.blocks)).sum::<u64>(), u64::from(most));
            let mut wants = [all, one, all];
            by(policy).targets(most, Some(&curve), &mut wants);
            assert_eq!(wants.iter().map(|want| u64::from(want.blocks)).sum::<u64>(), u64::from(most));
        }
        let want = Want::new(most, most, most, most);
        assert_eq!([want.least, want.now, want.most], [most.div_ceil(64); 3]);
        assert!(by(ShareBy::Equal).is_worth(0, most) && by(ShareBy::Equal).is_worth(most, 0));
    }

    /// Two sequences of 1,000 and 100 blocks of rows: the short one gets more of its rows, since each of its slots
    /// avoids more misses.
    #[test]
    fn slots_go_where_they_avoid_most_misses() {
        let tokens = |blocks: u32| Want {
            least: 1,
            now: blocks,
            most: blocks,
            length: blocks * 64,
            ..Want::default()
        };
        let mut wants = [tokens(1000), tokens(100)];
        let mut curve = MissCurve::default();
        curve.note(1, 32, 1000, 1);
        curve.note(17, 32, 50, 1);
        by(ShareBy::Misses).targets(200, Some(&curve), &mut wants);
        // A ratio of 1 avoids 7,600 misses at 0.141, and about a tenth of that at 0.59.
        assert_eq!(blocks(&wants), [141, 59]);
        assert_eq!(divided(ShareBy::Length, 200, &wants), [181, 19]);
        // Two sequences of almost equal length get almost the same.
        let mut alike = [tokens(1000), tokens(990), tokens(1010)];
        by(ShareBy::Misses).targets(900, Some(&curve), &mut alike);
        assert!(alike.iter().all(|want| want.blocks.abs_diff(300) < 5), "{alike:?}");
        // No curve, and one that gains nothing: by length.
        let mut flat = MissCurve::default();
        flat.note(1, 32, 0, 1);
        flat.note(17, 32, 0, 1);
        for curve in [None, Some(&MissCurve::default()), Some(&flat)] {
            by(ShareBy::Misses).targets(200, curve, &mut wants);
            assert_eq!(blocks(&wants), divided(ShareBy::Length, 200, &wants));
        }
    }

    #[test]
    fn small_changes_are_not_worth_a_resize() {
        let share = Share::default();
        for (budget, target, worth) in [
            (8000, 7000, true),
            (8000, 7001, false),
            (8000, 8500, true),
            (8000, 8499, false),
            (128, 64, true),
            (128, 65, false),
            (128, 192, true),
            (128, 191, true),
            (128, 128 + 7, false),
            (192, 204, true),
            (64, 64, false),
        ] {
            assert_eq!(share.is_worth(budget, target), worth, "{budget} to {target}");
        }
        assert!(Share { least_change: u32::MAX, ..share }.is_worth(1 << 30, (1 << 30) + 64));
        assert!(!Share { least_change: 0, ..share }.is_worth(1000, 100));
    }

    /// A sequence of any length that grows row by row is resized before its budget is used up.
    #[test]
    fn headroom_is_renewed_before_it_is_used_up() {
        let slots = |length: u32| Want::new(1, length, 1, u32::MAX).now * SLOT_BLOCK;
        for length in (64..20_000).step_by(97) {
            let budget = slots(length);
            let resized = (length..).find(|rows| Share::default().is_worth(budget, slots(*rows))).unwrap();
            assert!(resized <= budget, "{length}: {resized} of {budget}");
        }
    }

    #[test]
    fn a_long_shrink_goes_part_way() {
        for (budget, target, rows, reached) in [
            (1024, 512, 512, 512),
            (1024, 512, 511, 576),
            (1024, 512, 64, 960),
            (1024, 512, 63, 1024),
            (1024, 1024, 0, 1024),
            (1000, 512, 10, 1000),
            (1000, 512, 40, 960),
            // Few rows remain, so few can move.
            (1024, 64, 64, 64),
            (1024, 4096, 0, 4096),
            (u32::MAX, 1 << 31, u64::MAX, 1 << 31),
        ] {
            assert_eq!(Share::within(budget, target, rows), reached, "{budget} to {target} with {rows}");
        }
    }

    #[test]
    fn limits_of_nothing_are_refused() {
        let share = Share::default();
        share.check().unwrap();
        let bad = [
            ("least_change", Share { least_change: 0, ..share }),
            ("bytes_a_step", Share { bytes_a_step: 0, ..share }),
            ("resizes_a_step", Share { resizes_a_step: 0, ..share }),
        ];
        for (place, share) in bad {
            let error = share.check().unwrap_err();
            assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, place));
        }
    }

    /// Limits in any order, with many equal lengths.
    fn wants() -> impl Strategy<Value = Vec<Want>> {
        let length = prop_oneof![0_u32..4, 1_u32..1000, Just(500), Just(u32::MAX), any::<u32>()];
        let want = (0_u32..6, 0_u32..40, 0_u32..60, length).prop_map(|(least, now, most, length)| Want {
            least,
            now,
            most,
            length,
            ..Want::default()
        });
        vec(want, 0..12)
    }

    fn curve() -> impl Strategy<Value = MissCurve> {
        vec((0_u64..1000, 0_u64..10_000), 0..8).prop_map(|notes| {
            let mut curve = MissCurve::default();
            for (slots, misses) in notes {
                curve.note(slots, 1000, misses, 1);
            }
            curve
        })
    }

    proptest! {
        #[test]
        fn one_block_at_a_time_gives_the_same(wants in wants(), slots in 0_u32..500) {
            prop_assert_eq!(divided(ShareBy::Equal, slots, &wants), naive(true, slots, &wants));
            prop_assert_eq!(divided(ShareBy::Length, slots, &wants), naive(false, slots, &wants));
        }

        #[test]
        fn all_blocks_are_given_and_no_floor_is_undercut(
            wants in wants(), slots in 0_u32..500, curve in curve(),
        ) {
            let most: u32 = wants.iter().map(|want| want.most.max(want.least)).sum();
            let least: u32 = wants.iter().map(|want| want.least).sum();
            for policy in [ShareBy::Equal, ShareBy::Length, ShareBy::Misses] {
                let mut given = wants.clone();
                by(policy).targets(slots, Some(&curve), &mut given);
                prop_assert_eq!(given.iter().map(|want| want.blocks).sum::<u32>(), slots.min(most));
                for want in &given {
                    prop_assert!(least > slots || want.blocks >= want.least);
                    prop_assert!(least <= slots || want.blocks <= want.least);
                    prop_assert!(want.blocks <= want.most.max(want.least));
                }
            }
        }

        #[test]
        fn a_block_more_takes_none_from_any_sequence(wants in wants(), slots in 0_u32..500) {
            for policy in [ShareBy::Equal, ShareBy::Length] {
                let (few, more) = (divided(policy, slots, &wants), divided(policy, slots + 1, &wants));
                prop_assert!(few.iter().zip(&more).all(|(few, more)| few <= more));
            }
        }

        /// By misses, no block that was given avoids less than one that was not.
        #[test]
        fn no_block_would_avoid_more_misses_elsewhere(
            lengths in vec(1_u32..4000, 1..8), slots in 0_u32..300, curve in curve(),
        ) {
            let Some(slopes) = curve.line().map(|line| line.slopes()) else { return Ok(()) };
            let mut wants: Vec<Want> = lengths.iter().map(|length| Want::new(1, *length, 0, *length)).collect();
            by(ShareBy::Misses).targets(slots, Some(&curve), &mut wants);
            // What the block from `from` on is worth, by halving.
            let worth = |want: &Want, from: u32| {
                let given = |price: u64| slopes.worth(price, want.length).div_ceil(64) > u64::from(from);
                (0..54).rev().fold(0_u64, |price, bit| if given(price | 1 << bit) { price | 1 << bit } else { price })
            };
            let taken = wants.iter().filter(|w| w.blocks > w.least).map(|w| worth(w, w.blocks - 1)).min();
            let refused = wants.iter().filter(|w| w.blocks < w.now.min(w.most)).map(|w| worth(w, w.blocks)).max();
            if let (Some(taken), Some(refused)) = (taken, refused) {
                prop_assert!(taken + 1 >= refused, "{taken} {refused} {wants:?}");
            }
        }

        #[test]
        fn a_part_of_a_shrink_moves_few_rows(budget in 1_u32..5000, target in 1_u32..5000, rows in 0_u64..5000) {
            let reached = Share::within(budget, target, rows);
            prop_assert!(u64::from(reached.min(budget.saturating_sub(reached))) <= rows);
            prop_assert!((target..=budget.max(target)).contains(&reached));
        }
    }
}
