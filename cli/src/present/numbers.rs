//! Numbers as every command writes them.

/// `1 layer`, `2 layers`.
pub fn counted(count: impl Into<u64>, thing: &str) -> String {
    let count = count.into();
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// Three decimals, or two significant digits if those would be too coarse.
pub fn ratio(value: f64) -> String {
    let decimals = if value < 0.001 { 1 - value.log10().floor() as i32 } else { 3 };
    format!("{value:.*}", usize::try_from(decimals).unwrap_or(3))
}

/// A count with as many digits as it needs.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size < 9.995 => fixed(value, 2),
        size if size < 99.95 => fixed(value, 1),
        _ => fixed(value, 0),
    }
}

/// A fixed number of decimals. A value that rounds to 0 has no sign.
pub fn fixed(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    let nothing = text.bytes().all(|digit| matches!(digit, b'-' | b'0' | b'.'));
    if nothing { text.trim_start_matches('-').to_owned() } else { text }
}

/// A difference with its sign; no sign if it rounds to 0.
pub fn signed(text: &str) -> String {
    let nothing = !text.bytes().any(|digit| matches!(digit, b'1'..=b'9'));
    if nothing || text.starts_with('-') { text.to_owned() } else { format!("+{text}") }
}

/// Bytes in the unit that leaves one to four digits.
pub fn size(bytes: f64) -> String {
    let mut value = bytes;
    for unit in ["B", "KiB", "MiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{value:.0} B") } else { format!("{} {unit}", number(value)) };
        }
        value /= 1024.0;
    }
    format!("{} GiB", number(value))
}

/// A number with thousands separators.
pub fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let whole = digits.trim_start_matches('-');
    let mut out = String::new();
    for (i, digit) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    if digits.len() > whole.len() { format!("-{out}") } else { out }
}

/// A share as a signed percentage, with one decimal if it is small.
pub fn signed_percent(share: f64) -> String {
    let percent = 100.0 * share;
    if percent.abs() < 9.95 { format!("{percent:+.1}%") } else { format!("{percent:+.0}%") }
}

/// Tokens in units of 1024 if they are a multiple.
pub fn tokens(tokens: u32) -> String {
    if tokens.is_multiple_of(1024) { format!("{}K", tokens / 1024) } else { tokens.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_ratios_keep_two_digits() {
        assert_eq!([1.0, 0.1, 0.0234, 0.001].map(ratio), ["1.000", "0.100", "0.023", "0.001"]);
        assert_eq!([0.000_99, 0.000_16, 0.000_061].map(ratio), ["0.00099", "0.00016", "0.000061"]);
    }

    #[test]
    fn no_sign_is_lost_and_zero_has_none() {
        assert_eq!(
            [2.34567, 23.4567, 234.567, 9.999, 99.97].map(number),
            ["2.35", "23.5", "235", "10.0", "100"]
        );
        assert_eq!([-2.34567, -23.4567, -234.567, -9.999].map(number), ["-2.35", "-23.5", "-235", "-10.0"]);
        assert_eq!([-0.001, 0.0, -0.0].map(number), ["0.00"; 3]);
        assert_eq!(["0.00", "0.0%", "1.2", "-1.2"].map(signed), ["0.00", "0.0%", "+1.2", "-1.2"]);
    }

    #[test]
    fn sizes_keep_a_readable_unit() {
        assert_eq!([0.0, 656.0, 2048.0].map(size), ["0 B", "656 B", "2.00 KiB"]);
        assert_eq!(size(5.5 * 1024.0 * 1024.0), "5.50 MiB");
        assert_eq!(size(3e12), "2794 GiB");
    }
}
