//! Text that others wrote, made fit to be shown: names in files, paths, arguments, messages of parsers about them.
//!
//! A terminal obeys control characters, and whatever shows text obeys the marks that turn its direction: a line can be
//! made to read as it does not stand. [`steers`] says which characters do so. Whatever shows foreign text asks it, by
//! [`harmless`] or by itself: errors, tables, pages. Files of results keep the text as it is; JSON has escapes for it.

use std::fmt::{self, Display, Write};

/// The most bytes that an error shows of one text that others wrote.
pub const ECHO: usize = 200;
/// Those of them that are the text's end: parsers say there where they stopped.
const END: usize = 60;
/// What stands for what was left out.
const GAP: &str = "...";

/// Whether the character steers whatever shows it, instead of being shown: controls (C0, DEL, C1), the separators of
/// lines and paragraphs, and the marks that turn the direction of writing (U+061C, U+200E, U+200F, U+202A to U+202E,
/// U+2066 to U+206F).
pub fn steers(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}')
}

/// The text with `?` for each character that [steers].
pub fn harmless(text: &str) -> String {
    text.chars().map(|c| if steers(c) { '?' } else { c }).collect()
}

/// The text as an error shows it: [harmless], and no more than [`ECHO`] bytes of it, its beginning and its end.
pub fn echo(text: impl Display) -> String {
    cut(harmless(&text.to_string()), ECHO)
}

/// No more than `most` bytes of the text, its beginning and its end.
fn cut(text: String, most: usize) -> String {
    if text.len() <= most {
        return text;
    }
    let front = text.floor_char_boundary(most.saturating_sub(END + GAP.len()));
    let back = text.ceil_char_boundary(text.len() - END.min(most));
    [text.get(..front).unwrap_or_default(), GAP, text.get(back..).unwrap_or_default()].concat()
}

/// Passes on what is written, harmless.
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
    fn what_steers_is_told_from_what_is_shown() {
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
