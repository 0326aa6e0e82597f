//! What a layer misses at which budget, estimated from the counters of its steps.
//!
//! A share by misses ([`ShareBy::Misses`](super::ShareBy::Misses)) must know what a slot is worth to a sequence before
//! the sequence has it. The steps' reports tell only what the budgets of the past have missed, and only as a sum over
//! a batch. [`MissCurve`] makes a curve of that: misses of a batch row by *ratio*, the budget over the length.
//!
//! **How.** Each retired step is one point: its misses over its batch rows, at the ratio of all slots to all tokens of
//! its batch. The ratios from 0 to 1 are 16 bins; each bin has a moving average, to which a new point contributes a
//! sixteenth. At ratio 1 nothing is missed, by the rule. The curve is the *lower convex hull* of the bins' averages and
//! of that last point. So it never rises, its slope never gets steeper, and a greedy division over it is the best one.
//! A curve with a cliff (a layer that reads the same rows in turn gains nothing until all of them fit) gets a slope
//! that leads over it; `cli/src/study/split.rs` argues the same for the slots of layers. Below the lowest bin, the
//! first slope continues. What a slot is worth is this line's slope with its corners rounded off ([`Slopes`]).
//!
//! **What it is not.** It is an estimate. The step's mean ratio hides how unlike its sequences are, and all sequences
//! of a layer have one curve. A bin that no step visits any more keeps its last average.
//!
//! **Cost.** 128 bytes a layer; a note is a division and an average, a hull takes 17 points. Whole numbers only, so
//! that equal notes in equal order give equal curves on every rank and machine.

/// Bins from ratio 0 to ratio 1.
const BINS: usize = 16;

/// Ratio 1.
const ONE: u64 = 1 << 16;

/// A miss.
const MISS: u64 = 1 << 8;

/// The part of a new point in a bin's average, as a divisor.
const SMOOTHING: i64 = 16;

/// Misses of a batch row in one layer by the ratio of budget and length. The module's head says how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissCurve {
    /// Averages in 256ths of a miss.
    bins: [Option<u32>; BINS],
}

impl MissCurve {
    /// Adds a step's counts in this layer: `misses` of `rows` batch rows, which held `slots` of their `tokens` tokens,
    /// all sequences together. Steps with a slot for every token say nothing new and are left out, as are empty ones.
    pub fn note(&mut self, slots: u64, tokens: u64, misses: u64, rows: u32) {
        let found = misses.saturating_mul(MISS).checked_div(u64::from(rows));
        let (Some(found), true) = (found, slots < tokens) else { return };
        let found = u32::try_from(found).unwrap_or(u32::MAX);
        let bin = u128::from(slots) * BINS as u128 / u128::from(tokens);
        if let Some(bin) = self.bins.get_mut(bin as usize) {
            let mean = i64::from(bin.unwrap_or(found));
            // Between the two, so it fits.
            *bin = Some((mean + (i64::from(found) - mean) / SMOOTHING) as u32);
        }
    }

    /// The estimated misses of a batch row, in 256ths of a miss, for a sequence of `tokens` tokens with `slots` slots.
    /// None before steps at two different ratios have been noted.
    pub fn misses(&self, slots: u32, tokens: u32) -> Option<u64> {
        let line = self.line()?;
        let ratio = (u64::from(slots) * ONE).checked_div(u64::from(tokens)).unwrap_or(ONE).min(ONE);
        Some(line.at(ratio))
    }

    /// The curve as a line with corners.
    pub(super) fn line(&self) -> Option<Line> {
        if self.bins.iter().flatten().count() < 2 {
            return None;
        }
        let mut line = Line { corners: [(0, 0); BINS + 1], count: 0 };
        for (bin, mean) in self.bins.iter().enumerate() {
            let Some(mean) = mean else { continue };
            // The middle of the bin.
            line.append((2 * bin as u64 + 1) * ONE / (2 * BINS as u64), u64::from(*mean));
        }
        line.append(ONE, 0);
        Some(line)
    }
}

/// A convex line of straight pieces that never rises, from ratio 0 to no misses at ratio 1.
pub(super) struct Line {
    /// Ratios and misses, by ascending ratio.
    corners: [(u64, u64); BINS + 1],
    count: usize,
}

impl Line {
    /// Appends a point, and drops the corners that are then on or above the line.
    fn append(&mut self, ratio: u64, misses: u64) {
        let signed = |corner: (u64, u64)| (corner.0 as i64, corner.1 as i64);
        let (x, y) = signed((ratio, misses));
        while let Some([a, b]) = self.corners.get(..self.count).and_then(<[_]>::last_chunk) {
            let ((ax, ay), (bx, by)) = (signed(*a), signed(*b));
            if (by - ay) * (x - ax) < (y - ay) * (bx - ax) {
                break;
            }
            self.count -= 1;
        }
        if let Some(next) = self.corners.get_mut(self.count) {
            *next = (ratio, misses);
            self.count += 1;
        }
    }

    /// The ends of each piece, the steepest and lowest first. The first piece begins at ratio 0, whatever its corner.
    fn pieces(&self) -> impl Iterator<Item = &[(u64, u64); 2]> {
        self.corners.get(..self.count).unwrap_or_default().array_windows()
    }

    fn at(&self, ratio: u64) -> u64 {
        let piece = self.pieces().find(|[_, (end, _)]| ratio <= *end);
        piece.map_or(0, |[(x, y), (end, low)]| low + (y - low) * (end - ratio) / (end - x))
    }

    /// The slope at every ratio. A piece's slope is that of its middle; in between, slopes change evenly.
    pub(super) fn slopes(&self) -> Slopes {
        let mut slopes = Slopes { knots: [(0, 0); BINS + 3], count: 0 };
        for [(x, y), (end, low)] in self.pieces() {
            let middle = (x + end) / 2;
            let slope = (((y - low) * ONE) / (end - x)) * ONE;
            if slopes.count == 0 {
                slopes.append(middle / 4, slope * 16);
                slopes.append(middle / 2, slope * 4);
            }
            slopes.append(middle, slope);
        }
        slopes.append(ONE, 0);
        slopes
    }
}

/// How many misses another slot avoids, by ratio: the slope of a [`Line`] without its corners. With them, all sequences
/// on one piece would gain nearly the same, and the least difference between two of them would give one of them the
/// whole piece.
///
/// Below the first piece's middle, half as many slots are taken to miss twice as much.
pub(super) struct Slopes {
    /// Ratios as parts of 2^16, ascending, and misses avoided by a ratio of 1, times 2^16, so that they can be compared
    /// after a division by a length.
    knots: [(u64, u64); BINS + 3],
    count: usize,
}

impl Slopes {
    fn append(&mut self, ratio: u64, slope: u64) {
        if let Some(next) = self.knots.get_mut(self.count) {
            *next = (ratio, slope);
            self.count += 1;
        }
    }

    /// The greatest slope.
    pub(super) fn steepest(&self) -> u64 {
        self.knots[0].1
    }

    /// The slots, for a sequence of `tokens` tokens, up to which each is worth more than `price`.
    pub(super) fn worth(&self, price: u64, tokens: u32) -> u64 {
        let tokens = u64::from(tokens);
        // Saturated, it exceeds every slope, as it should.
        let least = price.saturating_mul(tokens);
        if least >= self.steepest() {
            return 0;
        }
        let knots = self.knots.get(..self.count).unwrap_or_default();
        let ratio = knots.array_windows().find(|[_, (_, low)]| *low <= least).map_or(ONE, |[a, b]| {
            let part = u128::from(b.0 - a.0) * u128::from(a.1 - least) / u128::from((a.1 - b.1).max(1));
            a.0 + part as u64
        });
        (tokens * ratio).div_ceil(ONE)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn averages_move_by_a_sixteenth() {
        let mut curve = MissCurve::default();
        curve.note(100, 1000, 32, 2);
        assert_eq!(curve.bins[1], Some(16 * 256));
        curve.note(100, 1000, 0, 2);
        assert_eq!(curve.bins[1], Some(15 * 256));
        curve.note(100, 1000, 62, 2);
        assert_eq!(curve.bins[1], Some(16 * 256));
    }

    #[test]
    fn one_ratio_is_no_curve() {
        let mut curve = MissCurve::default();
        for tokens in [1600, 1590, 1500] {
            curve.note(400, tokens, 100, 1);
        }
        // No rows, no tokens, and a slot for every token.
        curve.note(1, 2, 3, 0);
        curve.note(0, 0, 3, 1);
        curve.note(9, 9, 3, 1);
        assert_eq!(curve.misses(400, 1600), None);
        curve.note(800, 1600, 20, 1);
        assert!(curve.misses(400, 1600).is_some());
    }

    #[test]
    fn the_line_is_the_lower_hull() {
        let mut curve = MissCurve::default();
        // Bins 0, 4, 8 and 12, in the middle of each. The second is above the line from the first to the third.
        for (bin, misses) in [(0, 100), (4, 90), (8, 20), (12, 8)] {
            curve.note(2 * bin + 1, 32, misses, 1);
        }
        let at = |slots| curve.misses(slots, 32).unwrap() / 256;
        assert_eq!([1, 9, 17, 25, 32, 40].map(at), [100, 60, 20, 8, 0, 0]);
        // The first slope continues to 0, and straight lines join the corners.
        assert_eq!([0, 5, 13, 21].map(at), [105, 80, 40, 14]);
        assert_eq!(curve.misses(3, 0), Some(0));
    }

    #[test]
    fn hostile_counts_do_not_overflow() {
        let mut curve = MissCurve::default();
        curve.note(u64::MAX - 1, u64::MAX, u64::MAX, 1);
        curve.note(0, u64::MAX, u64::MAX, u32::MAX);
        curve.note(u64::MAX / 2, u64::MAX, 0, u32::MAX);
        assert!(curve.misses(u32::MAX, u32::MAX).is_some());
        assert!(curve.misses(0, u32::MAX).is_some());
        let slopes = curve.line().unwrap().slopes();
        assert_eq!(slopes.worth(u64::MAX, u32::MAX), 0);
        assert_eq!(slopes.worth(slopes.steepest(), 1), 0);
    }

    proptest! {
        #[test]
        fn the_curve_never_rises_and_never_gets_steeper(
            notes in vec((0_u64..1000, 1_u64..1000, 0_u64..100_000, 1_u32..9), 0..60),
        ) {
            let mut curve = MissCurve::default();
            for (slots, tokens, misses, rows) in notes {
                curve.note(slots, tokens, misses, rows);
            }
            let (tokens, step) = (1 << 16, 1 << 10);
            let at: Option<Vec<u64>> = (0..=tokens / step).map(|i| curve.misses(i * step, tokens)).collect();
            if let Some(at) = at {
                prop_assert_eq!(at.last(), Some(&0));
                for [a, b, c] in at.array_windows() {
                    prop_assert!(a >= b && b >= c);
                    // Each is rounded down, so two slopes differ by up to two units too little.
                    prop_assert!(a - b + 2 >= b - c, "{a} {b} {c}");
                }
            }
        }
    }
}
