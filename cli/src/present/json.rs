//! What all JSON of the commands has in common. `docs/json.md` describes the entries.

use forebay::text::steers;
use forebay::{Error, Kind, Result};
use serde::Serialize;

/// The version of the entries (`docs/versions.md`).
const SCHEMA: u32 = 2;

/// The beginning of every entry.
#[derive(Serialize)]
pub struct Head {
    schema: u32,
    forebay: &'static str,
    kind: &'static str,
}

impl Head {
    /// The beginning of an entry of `kind`.
    pub fn new(kind: &'static str) -> Head {
        Head { schema: SCHEMA, forebay: env!("CARGO_PKG_VERSION"), kind }
    }
}

/// A list of entries as text, with a line end.
///
/// # Errors
/// [`Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn list<T: Serialize>(entries: &[T]) -> Result<Vec<u8>> {
    ended(serde_json::to_vec_pretty(entries))
}

/// An entry as one line.
///
/// # Errors
/// As [`list`].
pub fn line<T: Serialize>(entry: &T) -> Result<Vec<u8>> {
    ended(serde_json::to_vec(entry))
}

fn ended(text: serde_json::Result<Vec<u8>>) -> Result<Vec<u8>> {
    let mut text = text.map_err(|e| Error::new(Kind::Internal, "write JSON").at(e.to_string()))?;
    text.push(b'\n');
    Ok(escaped(text))
}

/// The JSON text with each character that steers a terminal escaped. Such characters occur in strings alone, where the
/// escape has the same meaning. Controls below U+0020 are escaped already, or are the text's own line ends.
pub fn escaped(text: Vec<u8>) -> Vec<u8> {
    let steering = |c: char| c > '\u{1f}' && steers(c);
    match std::str::from_utf8(&text) {
        Ok(known) if known.chars().any(steering) => {
            let mut out = String::with_capacity(text.len());
            for c in known.chars() {
                match c {
                    c if steering(c) => out += &format!("\\u{:04x}", u32::from(c)),
                    c => out.push(c),
                }
            }
            out.into_bytes()
        }
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_on_a_terminal_has_no_control_characters_and_the_same_value() {
        let text = "a\u{7f}\u{9b}31m\u{202e}\u{2067}\u{1b}\n\"é漢\"".to_owned();
        let written = String::from_utf8(list(&[&text]).unwrap()).unwrap();
        assert!(!written.chars().any(|c| c != '\n' && steers(c)), "{written}");
        assert!(written.contains("\\u202e") && written.contains("é漢"), "{written}");
        assert_eq!(serde_json::from_str::<Vec<String>>(&written).unwrap(), [text]);
    }
}
