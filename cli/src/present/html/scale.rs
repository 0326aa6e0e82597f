//! Maps values to positions on an axis, and selects the values that label it.

/// How values are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Linear: equal differences have equal distances.
    Even,
    /// Logarithmic: equal ratios have equal distances; values are above 0.
    Factors,
}

/// An axis: values from `least` to `most`, laid out from `from` to `to`.
#[derive(Clone, Debug)]
pub struct Scale {
    spread: Spread,
    least: f64,
    most: f64,
    from: f64,
    to: f64,
    /// The labelled values, ascending.
    pub ticks: Vec<f64>,
}

impl Scale {
    /// From 0 to a round value not below `most`, about `wanted` ticks.
    pub fn from_zero(most: f64, wanted: usize, from: f64, to: f64) -> Scale {
        let most = if most.is_finite() && most > 0.0 { most } else { 1.0 };
        let step = round_up(most / wanted.max(1) as f64);
        let count = (most / step - 1e-9).ceil().max(1.0);
        let ticks = (0..=count as usize).map(|i| i as f64 * step).collect();
        Scale { spread: Spread::Even, least: 0.0, most: count * step, from, to, ticks }
    }

    /// Exactly from `least` to `most`, with the ticks given that lie between.
    pub fn exact(spread: Spread, least: f64, most: f64, ticks: &[f64], from: f64, to: f64) -> Scale {
        let most = if most > least { most } else { least + least.abs().max(1.0) };
        let inside = |tick: &f64| *tick >= least * 0.9999 && *tick <= most * 1.0001;
        Scale { spread, least, most, from, to, ticks: ticks.iter().copied().filter(inside).collect() }
    }

    /// Powers of ten and their halves and fifths around `least` to `most`, both above 0.
    pub fn factors(least: f64, most: f64, from: f64, to: f64) -> Scale {
        let (least, most) = if least > 0.0 && most >= least { (least, most) } else { (1.0, 10.0) };
        let decade = |exponent: i32| 10f64.powi(exponent);
        let exponents = (least.log10().floor() as i32)..=(most.log10().ceil() as i32);
        let all: Vec<f64> =
            exponents.flat_map(|e| [1.0, 2.0, 5.0].map(|mantissa| mantissa * decade(e))).collect();
        let low = all.iter().copied().filter(|t| *t <= least * 1.0001).fold(f64::MIN, f64::max);
        let high = all.iter().copied().filter(|t| *t >= most * 0.9999).fold(f64::MAX, f64::min);
        let mut ticks: Vec<f64> = all.into_iter().filter(|t| *t >= low && *t <= high).collect();
        if ticks.len() > 11 {
            ticks.retain(|t| (t.log10() - t.log10().round()).abs() < 1e-9);
        }
        Scale { spread: Spread::Factors, least: low, most: high, from, to, ticks }
    }

    /// Whether `value` is on the axis.
    pub fn holds(&self, value: f64) -> bool {
        (self.least..=self.most).contains(&value)
    }

    /// The position of `value`; values beyond an end are placed there.
    pub fn place(&self, value: f64) -> f64 {
        let (value, least, most) = match self.spread {
            Spread::Even => (value, self.least, self.most),
            Spread::Factors => (value.max(f64::MIN_POSITIVE).log10(), self.least.log10(), self.most.log10()),
        };
        let share = (value - least) / (most - least);
        let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
        self.from + share * (self.to - self.from)
    }
}

/// The next of 1, 2, 5 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let mantissa = [1.0, 2.0, 5.0, 10.0].into_iter().find(|m| m * power >= value * (1.0 - 1e-9));
    mantissa.unwrap_or(10.0) * power
}

/// Labels on one side of a picture, moved apart until they are `gap` from each other, within `low` to `high`
/// if they fit; each stays as near as possible to its place.
pub fn apart(places: &[f64], gap: f64, low: f64, high: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..places.len()).collect();
    let place = |i: usize| places.get(i).copied().unwrap_or(low);
    order.sort_by(|a, b| place(*a).total_cmp(&place(*b)));
    // Runs of labels that touch: each is centred on the mean of its labels' places.
    let mut runs: Vec<(f64, usize)> = Vec::new();
    let top = |(mean, count): (f64, usize)| {
        let height = gap * (count - 1) as f64;
        (mean - height / 2.0).min(high - height).max(low)
    };
    for i in &order {
        let mut run = (place(*i), 1);
        while let Some(last) = runs.last().copied() {
            if top(last) + gap * last.1 as f64 <= top(run) + 1e-9 {
                break;
            }
            let count = last.1 + run.1;
            run = ((last.0 * last.1 as f64 + run.0 * run.1 as f64) / count as f64, count);
            runs.pop();
        }
        runs.push(run);
    }
    let mut moved = vec![low; places.len()];
    let slots = runs.iter().flat_map(|run| (0..run.1).map(|n| top(*run) + gap * n as f64));
    for (i, slot) in order.into_iter().zip(slots) {
        if let Some(place) = moved.get_mut(i) {
            *place = slot;
        }
    }
    moved
}

/// About `count` sizes from `least` to `most`, including both, with equal ratios between them.
pub fn geometric(least: u32, most: u32, count: u32) -> Vec<u32> {
    let (least, most) = (least.max(1), most.max(least).max(1));
    let factor = (f64::from(most) / f64::from(least)).powf(1.0 / f64::from(count.max(1)));
    let mut sizes: Vec<u32> =
        (0..count).map(|i| (f64::from(least) * factor.powi(i as i32)).round() as u32).collect();
    sizes.push(most);
    sizes.dedup();
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_hold_every_value() {
        let scale = Scale::from_zero(98.1, 4, 0.0, 1.0);
        assert_eq!(scale.ticks, [0.0, 50.0, 100.0]);
        assert_eq!(Scale::from_zero(0.0, 4, 0.0, 1.0).ticks, [0.0, 0.5, 1.0]);
        assert_eq!(Scale::from_zero(0.3, 3, 0.0, 1.0).place(0.0), 0.0);
        assert_eq!(Scale::from_zero(f64::NAN, 3, 0.0, 1.0).place(f64::NAN), 0.0);
    }

    #[test]
    fn equal_factors_are_equally_far_apart() {
        let scale = Scale::factors(3.0, 180.0, 100.0, 0.0);
        assert_eq!(scale.ticks, [2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]);
        let (a, b, c) = (scale.place(2.0), scale.place(20.0), scale.place(200.0));
        assert!((a, c) == (100.0, 0.0) && (b - 50.0).abs() < 1e-9, "{a} {b} {c}");
        assert_eq!(scale.place(0.0), 100.0);
        assert_eq!(Scale::factors(1e-3, 1e6, 0.0, 1.0).ticks.len(), 10);
        assert_eq!(Scale::factors(1.0, 1000.0, 0.0, 1.0).ticks.len(), 10);
    }

    #[test]
    fn labels_move_apart_and_stay_in_order() {
        let moved = apart(&[50.0, 50.0, 10.0, 52.0], 12.0, 0.0, 100.0);
        assert_eq!(moved[2], 10.0);
        assert!((moved[3] - moved[1], moved[1] - moved[0]) == (12.0, 12.0), "{moved:?}");
        assert!((moved[1] - 50.666).abs() < 0.01);
        assert_eq!(apart(&[99.0, 100.0], 12.0, 0.0, 100.0), [88.0, 100.0]);
        assert!(apart(&[], 12.0, 0.0, 100.0).is_empty());
    }
}
