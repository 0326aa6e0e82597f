//! Rules about the text of a file: its size, its head, and texts that it must not contain.

use crate::source::{has_word, is_word, split};
use crate::{Fault, fault};

/// Lines of a source file, tests included.
const LINES: usize = 700;

/// Characters of a line of source.
const WIDTH: usize = 120;

const SOURCES: [&str; 6] = [".rs", ".c", ".h", ".cu", ".cuh", ".py"];

/// Words that say "unfinished" or "dead", in pieces so that this file does not hold them.
const DEAD_WORDS: [&str; 4] =
    [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("HA", "CK")];
const DEAD_TEXTS: [&str; 6] = [
    concat!("to", "do!"),
    concat!("unimple", "mented!"),
    concat!("allow(dead", "_code)"),
    concat!("#[ign", "ore"),
    concat!("place", "holder"),
    concat!("not yet", " implemented"),
];

/// Absolute paths of one machine.
const MACHINE: [&str; 3] = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];

fn is_source(file: &str) -> bool {
    SOURCES.iter().any(|end| file.ends_with(end)) && !file.starts_with("ffi/include/")
}

/// Source files end at 700 lines of at most 120 characters; the generated header is as long as it is.
pub fn size(file: &str, text: &str) -> Vec<Fault> {
    if !is_source(file) {
        return Vec::new();
    }
    let wide = text.lines().enumerate().filter(|(_, line)| line.chars().count() > WIDTH);
    let mut faults: Vec<Fault> =
        wide.map(|(n, _)| fault(file, n + 1, format!("wider than {WIDTH} characters"))).collect();
    let lines = text.lines().count();
    if lines > LINES {
        faults.push(fault(file, lines, format!("longer than {LINES} lines: divide it")));
    }
    faults
}

/// Every Rust file starts with a head that says what it is for.
pub fn head(file: &str, text: &str) -> Vec<Fault> {
    let first = text.lines().find(|line| !line.trim().is_empty() && !line.starts_with("#!["));
    if file.ends_with(".rs") && !first.is_some_and(|line| line.starts_with("//!")) {
        return vec![fault(file, 1, "no `//!` head".to_owned())];
    }
    Vec::new()
}

/// Nothing unfinished, switched off, or left as a second version.
pub fn dead(file: &str, text: &str) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let words = DEAD_WORDS.iter().filter(|w| has_word(line, w));
        let texts = DEAD_TEXTS.iter().filter(|t| line.contains(*t));
        for found in words.chain(texts) {
            faults.push(fault(file, n + 1, format!("`{found}`")));
        }
        // The driver's own symbols end so, and so does the name of a model.
        let second = |word: &&str| {
            word.ends_with(concat!("_", "v2")) && !word.starts_with("cu") && !word.starts_with("deepseek")
        };
        if let Some(word) = line.split(|c| !is_word(c)).find(second) {
            faults.push(fault(file, n + 1, format!("`{word}`: a second version beside the first")));
        }
    }
    faults
}

/// No code in comments: history keeps what is deleted.
pub fn commented_code(file: &str, text: &str) -> Vec<Fault> {
    if !is_source(file) || file.ends_with(".py") {
        return Vec::new();
    }
    let comments = split(text).comments;
    let plain = comments.lines().enumerate().filter_map(|(n, line)| {
        let said = line.trim().strip_prefix("//")?;
        (!said.starts_with(['/', '!'])).then_some((n + 1, said.trim()))
    });
    plain
        .filter(|(_, said)| looks_like_code(said))
        .map(|(line, _)| fault(file, line, "code in a comment".to_owned()))
        .collect()
}

fn looks_like_code(said: &str) -> bool {
    let starts = ["let mut ", "pub fn ", "pub(crate) ", "use crate::", "use std::", "return ", "#["];
    let call = said.find('(').is_some_and(|i| said[..i].ends_with(is_word));
    let declares = |word: &str, then: char| {
        let rest = said.strip_prefix(word).unwrap_or_default();
        rest.trim_start_matches(is_word).trim_start().starts_with(then) && rest.starts_with(is_word)
    };
    declares("let ", '=')
        || declares("let ", ':')
        || declares("fn ", '(')
        || starts.iter().any(|s| said.starts_with(s) && said.ends_with([';', '{', ']', ',']))
        || said.ends_with(';') && (call || said.contains(" = ") || said.contains("::"))
}

/// No file names the machine it was written on.
pub fn machine(file: &str, text: &str) -> Vec<Fault> {
    let lines = text.lines().enumerate();
    let named = lines.flat_map(|(n, line)| MACHINE.iter().filter(|p| line.contains(*p)).map(move |p| (n, p)));
    named.map(|(n, path)| fault(file, n + 1, format!("`{path}` is a path of one machine"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_and_wide_files_are_reported() {
        let long = "x\n".repeat(LINES + 1);
        assert_eq!(size("src/a.rs", &long).len(), 1);
        assert_eq!(size("src/a.rs", &"x\n".repeat(LINES)).len(), 0);
        assert_eq!(size("ffi/c-tests/a.c", &"ä".repeat(WIDTH + 1)).len(), 1);
        assert_eq!(size("src/a.rs", &"ä".repeat(WIDTH)).len(), 0);
        assert_eq!(size("ffi/include/forebay.h", &long).len(), 0);
    }

    #[test]
    fn a_missing_head_is_reported() {
        assert_eq!(head("src/a.rs", "\n#![cfg(loom)]\nuse a;\n").len(), 1);
        assert_eq!(head("src/a.rs", "").len(), 1);
        assert_eq!(head("src/a.rs", "#![cfg(loom)]\n\n//! What for.\n").len(), 0);
    }

    #[test]
    fn every_dead_word_is_reported() {
        for word in DEAD_WORDS.iter().chain(&DEAD_TEXTS) {
            assert_eq!(dead("src/a.rs", &format!("a\n// {word} later\n"))[0].line, 2, "{word}");
            assert_eq!(dead("docs/a.md", word).len(), 1, "{word}");
        }
        assert_eq!(dead("src/a.rs", concat!("fn open_", "v2() {}")).len(), 1);
        assert_eq!(dead("src/a.rs", concat!("\"cuMemcpyHtoDAsync_", "v2\"")).len(), 0);
        assert_eq!(dead("src/a.rs", concat!("MAXXX", "XIMUM")).len(), 0);
    }

    #[test]
    fn code_in_comments_is_reported_and_prose_is_not() {
        for code in ["let a = 1;", "let b: u32", "fn f(a: u32) {", "return 3;", "self.lock();", "x = y;"] {
            assert_eq!(commented_code("src/a.rs", &format!("x();\n    // {code}\n"))[0].line, 2, "{code}");
        }
        for prose in [
            "let go of the lock before the wait",
            "a lock whose holder panicked is entered all the same;",
            "fn is the word",
            "return to the caller what it gave",
        ] {
            assert_eq!(commented_code("src/a.rs", &format!("// {prose}\n")).len(), 0, "{prose}");
        }
        assert_eq!(commented_code("src/a.rs", "/// let a = 1;\nlet s = \"// let a = 1;\";\n").len(), 0);
    }

    #[test]
    fn a_path_of_a_machine_is_reported() {
        for path in MACHINE {
            assert_eq!(machine("Makefile", &format!("a\ncd {path}x\n"))[0].line, 2);
        }
        assert_eq!(machine("Makefile", "cd ../shared/traces").len(), 0);
    }
}
