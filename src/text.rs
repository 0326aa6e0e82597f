//! Untrusted text, made safe to display: names in files, paths, arguments, and parser messages that quote them.
//!
//! A terminal obeys control characters, and text renderers obey the marks that change the direction of writing. With
//! such characters a line can look different from its contents. [`steers`] finds them. Code that displays untrusted
//! text (errors, tables, HTML pages) filters it with [`harmless`] or calls [`steers`] itself. Result files keep the
//! text unchanged; JSON escapes it.

use std::fmt::{self, Display, Write};

/// The most bytes of one untrusted text that an error shows.
pub const ECHO: usize = 200;
/// How many of these bytes show the end of the text, where parsers report the position at which they stopped.
const END: usize = 60;
/// Replaces the part of the text that is left out.
const GAP: &str = "...";

/// Whether the character controls the display instead of being displayed: controls (C0, DEL, C1), the separators of
/// lines and paragraphs, and the marks that change the direction of writing (U+061C, U+200E, U+200F, U+202A to U+202E,
/// U+2066 to U+206F).
pub fn steers(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}')
}

/// The text with `?` for each character that [steers].
pub fn harmless(text: &str) -> String {
    text.chars().map(|c| if steers(c) { '?' } else { c }).collect()
}

/// The text as an error shows it: [harmless], and at most [`ECHO`] bytes, from its beginning and its end.
pub fn echo(text: impl Display) -> String {
    cut(harmless(&text.to_string()), ECHO)
}

/// At most `most` bytes of the text, from its beginning and its end.
fn cut(text: String, most: usize) -> String {
    if text.len() <= most {
        return text;
    }
    let front = text.floor_char_boundary(most.saturating_sub(END + GAP.len()));
    let back = text.ceil_char_boundary(text.len() - END.min(most));
    [text.get(..front).unwrap_or_default(), GAP, text.get(back..).unwrap_or_default()].concat()
}

/// A writer that replaces each character that [steers] by `?`.
pub(crate) struct Harmless<'a, 'b>(pub(crate) &'a mut fmt::Formatter<'b>);

impl Write for Harmless<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().try_for_each(|c| self.0.write_char(if steers(c) { '?' } else { c }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_told_from_printable_ones() {
        for c in ["\0\t\n\r\u{1b}\u{7f}\u{80}\u{9b}\u{9f}", "\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}"]
            .into_iter()
            .flat_map(str::chars)
            .chain('\u{202a}'..='\u{202e}')
            .chain('\u{2066}'..='\u{2069}')
        {
            assert!(steers(c), "{c:?}");
        }
        let shown = "aZ09 ~\u{a0}é漢字🦀ع\u{200d}\u{202f}";
        assert_eq!(harmless(shown), shown);
        assert_eq!(harmless("a\u{202e}\u{1b}[31mb"), "a??[31mb");
    }

    #[test]
    fn an_echo_has_a_beginning_an_end_and_at_most_200_bytes() {
        let exact = "x".repeat(ECHO);
        assert_eq!(echo(&exact), exact);
        for filling in ["x", "é", "漢", "🦀", "\u{202e}"] {
            for length in [ECHO, ECHO + 1, 10_000] {
                let text = echo(format!("begins {} ends", filling.repeat(length)));
                assert!(text.len() <= ECHO && text.len() > ECHO - 10, "{} bytes", text.len());
                assert!(
                    text.starts_with("begins ") && text.ends_with(" ends") && text.contains(GAP),
                    "{text}"
                );
            }
        }
    }
}
