//! Parses one line of the Azure CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`.

use super::input::{Line, digits};
use crate::error::Result;

/// The whole first line, without its line end.
const COLUMNS: &[u8] = b"TIMESTAMP,ContextTokens,GeneratedTokens";

/// Refuses a header with other columns.
pub(super) fn header(line: Line<'_>) -> Result<()> {
    if line.bytes.trim_ascii_end() == COLUMNS {
        return Ok(());
    }
    Err(line.wrong("the columns are not TIMESTAMP,ContextTokens,GeneratedTokens", 1))
}

/// Seconds, input tokens, output tokens.
pub(super) fn row(line: Line<'_>) -> Result<(f64, u32, u32)> {
    let text = std::str::from_utf8(line.bytes)
        .map_err(|e| line.wrong("the line is not UTF-8", e.valid_up_to() + 1))?
        .trim_ascii_end();
    // A fourth piece is everything after the third comma.
    let mut pieces = text.splitn(4, ',');
    let fields = [pieces.next(), pieces.next(), pieces.next(), pieces.next()];
    let (time, input, output) = match fields {
        [Some(time), Some(input), Some(output), None] => (time, input, output),
        [.., Some(rest)] => {
            return Err(line.wrong("the line has more than three fields", line.column(rest)));
        }
        _ if line.whole => {
            return Err(line.wrong("the line has fewer than three fields", text.len() + 1));
        }
        _ => return Err(line.cut(text.len() + 1)),
    };
    let tokens = |field: &str| {
        let number = digits(field.as_bytes()).and_then(|number| u32::try_from(number).ok());
        number.ok_or_else(|| match field.is_empty() && !line.whole {
            true => line.cut(line.column(field)),
            false => line.wrong("a length is not a whole number below 2^32", line.column(field)),
        })
    };
    let seconds = seconds(time).ok_or_else(|| {
        line.wrong("the timestamp is not YYYY-MM-DD HH:MM:SS[.fraction][+00:00]", line.column(time))
    })?;
    Ok((seconds, tokens(input)?, tokens(output)?))
}

/// Seconds since the year 0 of `2023-11-16 18:17:03.9799600`; a zone may follow, and must be UTC.
fn seconds(text: &str) -> Option<f64> {
    let text = text.strip_suffix("+00:00").unwrap_or(text);
    let (date, time) = text.split_once(' ')?;
    let part = |text: &str, most: u32| -> Option<u32> {
        let digits = !text.is_empty() && text.len() <= 4 && text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|value| digits && *value <= most)
    };
    let mut date = date.split('-');
    let (year, month, day) = (part(date.next()?, 9999)?, part(date.next()?, 12)?, part(date.next()?, 31)?);
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut clock = clock.split(':');
    let (hour, minute, second) =
        (part(clock.next()?, 23)?, part(clock.next()?, 59)?, part(clock.next()?, 60)?);
    if date.next().is_some() || clock.next().is_some() || month == 0 || day == 0 || day > days_of(year, month)
    {
        return None;
    }
    if fraction.is_empty() || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let fraction: f64 = format!("0.{fraction}").parse().ok()?;
    // Days of the Gregorian calendar, counted from a first of March so that the leap day comes last.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year.checked_sub(1)?, month + 9) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day;
    let whole = (u64::from(days) * 24 + u64::from(hour)) * 3600 + u64::from(minute * 60 + second);
    Some(whole as f64 + fraction)
}

/// Days of a month in the Gregorian calendar.
fn days_of(year: u32, month: u32) -> u32 {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    match month {
        2 => 28 + u32::from(leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::seconds;

    #[test]
    fn times_continue_over_days_months_and_leap_years() {
        let gap = |a, b| seconds(b).unwrap() - seconds(a).unwrap();
        assert_eq!(gap("2023-11-16 23:59:59.5", "2023-11-17 00:00:00.5"), 1.0);
        assert_eq!(gap("2024-02-28 00:00:00", "2024-03-01 00:00:00"), 2.0 * 86_400.0);
        assert_eq!(gap("2023-02-28 00:00:00", "2023-03-01 00:00:00"), 86_400.0);
        assert_eq!(gap("2023-12-31 00:00:00", "2024-01-01 00:00:00+00:00"), 86_400.0);
        let leap = ["2024-02-29 00:00:00", "2000-02-29 00:00:00"];
        assert!(leap.iter().all(|day| seconds(day).is_some()));
        for bad in ["2023-02-31 0:0:0", "2023-02-29 0:0:0", "1900-02-29 0:0:0", "2023-04-31 0:0:0"] {
            assert_eq!(seconds(bad), None, "{bad}");
        }
        for bad in ["", "2023-11-16", "2023-13-16 0:0:0", "2023-11-16 24:00:00", "2023-11-16 1:2:3.", "a b"] {
            assert_eq!(seconds(bad), None, "{bad}");
        }
    }
}
