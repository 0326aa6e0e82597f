//! Parses numbers on the command line: `32K` tokens, `80GiB`, `0.31`, `auto`. Parsing is strict: anything else is
//! refused, because a misread size would plan for another machine.

use forebay::predict::plan::{Batch, Ratio};
use forebay::predict::weights::GPUS_MAX;
use forebay::{Shape, dense};

use crate::present::numbers;

type Parsed<T> = std::result::Result<T, String>;

/// The largest size that is accepted: 1 EiB.
const BYTES_MAX: f64 = (1_u64 << 60) as f64;

const UNITS: [(&str, f64); 8] = [
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
    ("kB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
];

/// Digits, with at most one point between digits: no sign, no exponent, no word.
fn decimal(text: &str) -> Option<f64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (digits(whole) && digits(part)).then(|| text.parse().ok())?
}

/// Whether sizes are shown in powers of 1024 or of 1000: as the caller wrote them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// KiB, MiB, GiB.
    Binary,
    /// kB, MB, GB.
    Decimal,
}

impl Unit {
    /// Bytes in the unit that leaves one to four digits.
    pub fn size(self, bytes: f64) -> String {
        if self == Unit::Binary {
            return numbers::size(bytes);
        }
        let mut value = bytes;
        for unit in ["B", "kB", "MB"] {
            if value < 1000.0 {
                let digits = if unit == "B" { format!("{value:.0}") } else { numbers::number(value) };
                return format!("{digits} {unit}");
            }
            value /= 1000.0;
        }
        format!("{} GB", numbers::number(value))
    }
}

/// A size as it was given; it is shown in the same form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Size {
    /// In bytes.
    pub bytes: u64,
    text: String,
}

impl Size {
    /// The units in which it was given.
    pub fn unit(&self) -> Unit {
        if self.text.contains('i') || self.bytes == 0 { Unit::Binary } else { Unit::Decimal }
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let unit = self.text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(self.text.len());
        let (digits, unit) = self.text.split_at(unit);
        f.write_str(digits)?;
        if unit.is_empty() { Ok(()) } else { write!(f, " {unit}") }
    }
}

/// A size with a unit, and the form in which it was written.
///
/// # Errors
/// As [`bytes`].
pub fn size(text: &str) -> Parsed<Size> {
    Ok(Size { bytes: bytes(text)?, text: text.to_owned() })
}

/// As [`size`], but above 0.
///
/// # Errors
/// As [`some_bytes`].
pub fn some_size(text: &str) -> Parsed<Size> {
    Ok(Size { bytes: some_bytes(text)?, text: text.to_owned() })
}

/// Bytes with a unit: `80GiB`, `141GB`, `1.5TiB`; `0` needs none.
///
/// # Errors
/// A sentence that says what is wanted.
pub fn bytes(text: &str) -> Parsed<u64> {
    if text == "0" {
        return Ok(0);
    }
    let split = UNITS.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
    let bytes = split.and_then(|(number, factor)| Some(decimal(number)? * factor));
    match bytes {
        Some(bytes) if bytes <= BYTES_MAX => Ok(bytes.round() as u64),
        _ => Err("not a size such as 80GiB or 141GB (kB, MB, GB, TB, KiB, MiB, GiB, TiB)".to_owned()),
    }
}

/// Bytes, more than 0.
///
/// # Errors
/// As [`bytes`].
pub fn some_bytes(text: &str) -> Parsed<u64> {
    match bytes(text)? {
        0 => Err("must be more than 0 bytes".to_owned()),
        bytes => Ok(bytes),
    }
}

/// Tokens: `4096`, `32K` (of 1024), `1M`.
///
/// # Errors
/// As [`bytes`].
pub fn tokens(text: &str) -> Parsed<u32> {
    let (number, factor) = match text.strip_suffix(['K', 'M']) {
        Some(number) if text.ends_with('K') => (number, 1 << 10),
        Some(number) => (number, 1 << 20),
        None => (text, 1),
    };
    let plain = number.bytes().all(|b| b.is_ascii_digit());
    let tokens = number.parse::<u32>().ok().filter(|_| plain).and_then(|n| n.checked_mul(factor));
    match tokens {
        Some(tokens) if tokens > 0 && tokens < i32::MAX as u32 => Ok(tokens),
        _ => Err("not a number of tokens from 1 to 2047M, such as 4096 or 32K".to_owned()),
    }
}

/// A number of at least 1.
///
/// # Errors
/// As [`bytes`].
pub fn count(text: &str) -> Parsed<u32> {
    let plain = text.bytes().all(|b| b.is_ascii_digit());
    match text.parse::<u32>() {
        Ok(count) if plain && count > 0 => Ok(count),
        _ => Err(format!("not a whole number from 1 to {}", u32::MAX)),
    }
}

/// A number of GPUs that serve together.
///
/// # Errors
/// As [`bytes`].
pub fn gpus(text: &str) -> Parsed<u32> {
    match count(text) {
        Ok(gpus) if gpus <= GPUS_MAX => Ok(gpus),
        _ => Err(format!("not a whole number of GPUs from 1 to {GPUS_MAX}")),
    }
}

/// A number of sequences, or `max`.
///
/// # Errors
/// As [`bytes`].
pub fn batch(text: &str) -> Parsed<Batch> {
    match text {
        "max" => Ok(Batch::Most),
        number => count(number).map(Batch::Sequences).map_err(|error| format!("{error}, or max")),
    }
}

/// A share above 0 and at most 1, or `auto`.
///
/// # Errors
/// As [`bytes`].
pub fn ratio(text: &str) -> Parsed<Ratio> {
    if text == "auto" {
        return Ok(Ratio::Auto);
    }
    match decimal(text) {
        Some(ratio) if ratio > 0.0 && ratio <= 1.0 => Ok(Ratio::Share(ratio)),
        _ => Err("not a ratio above 0 and at most 1, or auto".to_owned()),
    }
}

/// A number above 0.
///
/// # Errors
/// As [`bytes`].
pub fn positive(text: &str) -> Parsed<f64> {
    match decimal(text) {
        Some(value) if value > 0.0 && value <= 1e6 => Ok(value),
        _ => Err("not a number above 0 and up to 1000000".to_owned()),
    }
}

/// A rate as bytes per second: `50GB/s`.
///
/// # Errors
/// As [`bytes`].
pub fn rate(text: &str) -> Parsed<f64> {
    let rate = text.strip_suffix("/s").and_then(|bytes| some_bytes(bytes).ok());
    rate.map(|bytes| bytes as f64).ok_or_else(|| "not a rate such as 50GB/s".to_owned())
}

/// A model preset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its geometry.
    pub shape: Shape,
}

/// A preset.
///
/// # Errors
/// As [`bytes`].
pub fn model(text: &str) -> Parsed<Model> {
    let found = Shape::PRESETS.iter().find(|(name, _)| *name == text);
    found.map(|(name, shape)| Model { name, shape: *shape }).ok_or_else(|| {
        let names = Shape::PRESETS.map(|(name, _)| name);
        format!("no model of that name; there are {}", names.join(", "))
    })
}

/// A preset of a dense model.
#[derive(Clone, Copy, Debug)]
pub struct DenseModel {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its shape, given the bytes of a value.
    pub shape: fn(u32) -> dense::Shape,
}

/// A preset of a dense model.
///
/// # Errors
/// As [`bytes`].
pub fn dense_model(text: &str) -> Parsed<DenseModel> {
    let found = dense::Shape::PRESETS.iter().find(|(name, _)| *name == text);
    found.map(|(name, shape)| DenseModel { name, shape: *shape }).ok_or_else(|| {
        let names = dense::Shape::PRESETS.map(|(name, _)| name);
        format!("no dense model of that name; there are {}", names.join(", "))
    })
}

/// Bytes of a cached value.
///
/// # Errors
/// As [`bytes`].
pub fn value_bytes(text: &str) -> Parsed<u32> {
    match text {
        "1" => Ok(1),
        "2" => Ok(2),
        _ => Err("not the bytes of a value: 2 for BF16, 1 for FP8".to_owned()),
    }
}

/// The model that sets the row size by default.
pub const MODEL: &str = "deepseek-v3.2";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_a_number_with_a_unit() {
        assert_eq!(bytes("80GiB"), Ok(80 << 30));
        assert_eq!(bytes("141GB"), Ok(141_000_000_000));
        assert_eq!(bytes("0.5KiB"), Ok(512));
        assert_eq!(bytes("0"), Ok(0));
        for text in
            ["", "80", "80 GiB", "80gib", "-1GiB", "1e3GB", "nanGB", "infTiB", ".5GB", "5.GB", "2000000TiB"]
        {
            assert!(bytes(text).is_err(), "{text}");
        }
        assert!(some_bytes("0").is_err() && some_bytes("0MB").is_err());
    }

    #[test]
    fn tokens_are_counted_in_1024s() {
        assert_eq!([tokens("32K"), tokens("4096"), tokens("1M")], [Ok(32768), Ok(4096), Ok(1 << 20)]);
        for text in ["", "K", "0", "-1", "+5", "32k", "32KiB", "3.5K", "4096M", "2147483647"] {
            assert!(tokens(text).is_err(), "{text}");
        }
    }

    #[test]
    fn gpus_are_counted_up_to_a_limit() {
        assert_eq!([gpus("1"), gpus("8"), gpus("72"), gpus("4096")], [Ok(1), Ok(8), Ok(72), Ok(4096)]);
        for text in ["0", "-8", "8.0", "1e9", "1000000000", "4104", ""] {
            assert!(gpus(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_printed_in_the_units_of_the_input() {
        let shown = ["100GB", "80GiB", "1.5TiB", "0", "512MB"].map(|text| size(text).unwrap().to_string());
        assert_eq!(shown, ["100 GB", "80 GiB", "1.5 TiB", "0", "512 MB"]);
        assert_eq!(
            [size("1GB").unwrap().unit(), size("1GiB").unwrap().unit()],
            [Unit::Decimal, Unit::Binary]
        );
        assert!(some_size("0").is_err() && size("80").is_err());
        assert_eq!(
            [0.0, 656.0, 2048.0, 3e12].map(|it| Unit::Decimal.size(it)),
            ["0 B", "656 B", "2.05 kB", "3000 GB"]
        );
        assert_eq!([5.5e6, 80e9].map(|it| Unit::Decimal.size(it)), ["5.50 MB", "80.0 GB"]);
        assert_eq!(Unit::Binary.size(2048.0), "2.00 KiB");
    }

    #[test]
    fn batches_ratios_and_rates_are_parsed() {
        assert_eq!([batch("max"), batch("160")], [Ok(Batch::Most), Ok(Batch::Sequences(160))]);
        assert_eq!(
            [ratio("auto"), ratio("0.31"), ratio("1")],
            [Ok(Ratio::Auto), Ok(Ratio::Share(0.31)), Ok(Ratio::Share(1.0))]
        );
        for text in ["0", "1.1", "-0.1", "NaN", "inf", "1e-1", "Auto", ""] {
            assert!(ratio(text).is_err() && batch(text).is_err(), "{text}");
        }
        assert_eq!([rate("50GB/s"), rate("0.5kB/s")], [Ok(5e10), Ok(500.0)]);
        assert!(["50", "50GB", "0GB/s", "-1GB/s", "50Gb/s", "/s", ""].iter().all(|text| rate(text).is_err()));
        assert!(positive("1.7").is_ok() && positive("0").is_err() && positive("inf").is_err());
        assert!(model("deepseek-v3.2").is_ok() && model("DeepSeek").is_err());
        assert!(dense_model("gpt-oss-20b").is_ok() && dense_model("deepseek-v3.2").is_err());
        assert_eq!([value_bytes("1"), value_bytes("2")], [Ok(1), Ok(2)]);
        assert!(["0", "4", "bf16", ""].iter().all(|text| value_bytes(text).is_err()));
    }
}
