//! Formats the report's numbers, and computes a few simple figures.

use super::page::Tile;
use crate::present::numbers::{self, number};

/// Seconds in the unit that leaves one to four digits.
pub fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-6 => format!("{} ns", number(s * 1e9)),
        s if s < 1e-3 => format!("{} µs", number(s * 1e6)),
        s if s < 1.0 => format!("{} ms", number(s * 1e3)),
        s => format!("{} s", number(s)),
    }
}

/// A share as percent with at least two digits. A negative share keeps its sign.
pub fn percent(share: f64) -> String {
    if share < -0.000_05 {
        return format!("-{}", percent(-share));
    }
    match 100.0 * share {
        p if p < 0.005 => "0%".to_owned(),
        p if p < 1.0 => format!("{p:.2}%"),
        p if p < 10.0 => format!("{p:.1}%"),
        // A share just below 100% must not show as 100%.
        p if (99.5..99.95).contains(&p) => format!("{p:.1}%"),
        p if (99.95..100.0).contains(&p) => ">99.9%".to_owned(),
        p => format!("{p:.0}%"),
    }
}

/// A share of a whole; 0 of nothing.
pub fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// A number without trailing zeros.
pub fn short(value: f64) -> String {
    // Adding 0 removes the sign of -0.
    format!("{}", (value * 1e6).round() / 1e6 + 0.0)
}

/// A ratio to three decimals, or two digits if those would be too coarse; without trailing zeros.
pub fn ratio(value: f64) -> String {
    if value > 0.0 && value < 1e-6 {
        return format!("{value:.0e}");
    }
    match numbers::ratio(value).trim_end_matches('0') {
        whole if whole.ends_with('.') => format!("{value:.0}"),
        trimmed => trimmed.to_owned(),
    }
}

/// The mean of the numbers among the values; 0 if there are none.
pub fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let numbers = values.into_iter().filter(|value| value.is_finite());
    let (sum, count) = numbers.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    sum / f64::from(count.max(1))
}

/// The median of the values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let pair = sorted.get(middle.saturating_sub(1)..=middle).unwrap_or_default();
    match (sorted.len() % 2, pair) {
        (0, [a, b]) => (a + b) / 2.0,
        _ => sorted.get(middle).copied().unwrap_or(0.0),
    }
}

/// A figure at the top of a section.
pub fn tile(value: String, what: &str, more: String) -> Tile {
    Tile { value, what: what.to_owned(), more }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_keeps_its_sign_and_zero_has_none() {
        assert_eq!(
            [0.12, -0.12, -0.004, -0.000_01, -0.0].map(percent),
            ["12%", "-12%", "-0.40%", "0%", "0%"]
        );
        assert_eq!([-0.000_000_1, -1.5].map(short), ["0", "-1.5"]);
    }
}
