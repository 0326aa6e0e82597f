//! Words that are not to come back, each with its replacement, and the name of the rule in the first lines of pages.

use crate::{Fault, fault};

/// The name of the residency rule, as README and the design page give it in their first lines.
const RULE: &str = "Exact LRU, step by step";

/// Pages that name the rule within so many lines.
const NAMES_RULE: [&str; 2] = ["README.md", "docs/design.md"];
const FIRST_LINES: usize = 12;

/// Endings of files whose prose is checked.
const ENDINGS: [&str; 9] = [".rs", ".md", ".py", ".pyi", ".h", ".hpp", ".c", ".cu", ".cuh"];

/// A banned word or phrase, in lower case and singular where "s" or "es" may follow, and what to write instead.
const BANNED: &[(&str, &str)] = &[
    ("nobody", "the thing by name: \"no sequence\", \"no caller\""),
    ("somebody", "the thing by name: \"another process\", \"the engine\""),
    ("whoever", "the thing by name: \"a caller that\""),
    ("stand", "\"is\", \"is stored\", \"is defined\", \"holds\" (\"stand-in\" and \"stands for\" are fine)"),
    ("heir", "\"next victim\""),
    ("eldest", "\"least recently used\""),
    ("roll back", "\"truncate\""),
    ("rolls back", "\"truncates\""),
    ("rolled back", "\"truncated\""),
    ("rolling back", "\"truncating\""),
    ("roll-back", "\"truncation\""),
    ("rollback", "\"truncation\""),
    ("step block", "\"step descriptor\""),
    ("pass of attention", "\"attention wave\""),
    ("passes of attention", "\"attention waves\""),
    ("attention pass", "\"attention wave\""),
    ("how-manieth", "\"sequence number\", \"index\""),
    ("who goes", "\"which row is the victim\", \"eviction policy\""),
    ("be had", "\"be available\""),
    ("is had", "\"is available\""),
    ("seal", "\"publish\" (the seals of a memfd are fine)"),
    ("sealed", "\"published\" (the seals of a memfd are fine)"),
    ("in front of", "\"before\""),
];

/// Whether the prose of a file is checked: not that of tests, nor of the changelog, which tells what was.
fn is_checked(file: &str) -> bool {
    let in_tests = file.split('/').any(|part| part == "tests" || part.ends_with("-tests"))
        || file.ends_with("_tests.rs")
        || file.ends_with("/tests.rs")
        || file.ends_with("/testing.rs");
    ENDINGS.iter().any(|end| file.ends_with(end)) && !in_tests && file != "CHANGELOG.md"
}

/// A word of a text in lower case, its line (from 1), and whether only blanks and marks of comments are before it.
struct Word {
    text: String,
    line: usize,
    follows: bool,
}

/// The words of a text. An identifier with underscores is one word, and so is a word with hyphens.
fn words(text: &str) -> Vec<Word> {
    let mut all: Vec<Word> = Vec::new();
    let mut follows = false;
    for (n, line) in text.lines().enumerate() {
        let mut rest = line;
        while let Some(first) = rest.chars().next() {
            if !first.is_alphanumeric() && first != '_' {
                // Between the words of a phrase: blanks, a line's end, and the marks that begin a line of comment.
                follows &= first.is_whitespace() || matches!(first, '/' | '!' | '*' | '#');
                rest = &rest[first.len_utf8()..];
                continue;
            }
            let inside = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-');
            let end = rest.find(|c| !inside(c)).unwrap_or(rest.len());
            let word = &rest[..end];
            all.push(Word { text: word.trim_matches('-').to_lowercase(), line: n + 1, follows });
            follows = !word.ends_with('-');
            rest = &rest[end..];
        }
    }
    all
}

/// Whether a phrase begins at the first of these words; its last word may have a plural's or a third person's "s".
fn begins(words: &[Word], phrase: &str) -> bool {
    let wanted: Vec<&str> = phrase.split(' ').collect();
    let Some(given) = words.get(..wanted.len()) else { return false };
    let last = wanted.len() - 1;
    wanted.iter().zip(given).enumerate().all(|(i, (wanted, given))| {
        let tail = given.text.strip_prefix(wanted);
        let same = tail == Some("") || i == last && matches!(tail, Some("s" | "es"));
        same && (i == 0 || given.follows)
    })
}

/// Whether a word has its other sense: "stands for"; seals of a memfd, in `os`, in the stand-in or on a line that names
/// one; a sealed trait, in `cudarc`.
fn is_allowed(phrase: &str, file: &str, line: &str, words: &[Word]) -> bool {
    match phrase {
        "stand" => words.get(1).is_some_and(|next| next.text == "for" && next.follows),
        "seal" | "sealed" => {
            ["src/os/", "standin/", "cudarc/"].iter().any(|folder| file.starts_with(folder))
                || line.contains("memfd")
        }
        _ => false,
    }
}

/// Every banned word of a file.
pub fn banned(file: &str, text: &str) -> Vec<Fault> {
    found(file, text)
        .into_iter()
        .map(|(line, word, instead)| {
            fault(file, line, format!("`{word}` is not to come back: write {instead}"))
        })
        .collect()
}

/// The line of each banned word of a file, the word, and what to write instead.
fn found(file: &str, text: &str) -> Vec<(usize, &'static str, &'static str)> {
    if !is_checked(file) {
        return Vec::new();
    }
    let lines: Vec<&str> = text.lines().collect();
    let words = words(text);
    let mut found = Vec::new();
    for i in 0..words.len() {
        let line = words[i].line;
        for (word, instead) in BANNED {
            if begins(&words[i..], word) && !is_allowed(word, file, lines[line - 1], &words[i..]) {
                found.push((line, *word, *instead));
            }
        }
    }
    found
}

/// README and the design page name the rule in their first lines.
pub fn rule(file: &str, text: &str) -> Vec<Fault> {
    let named = text.lines().take(FIRST_LINES).any(|line| line.contains(RULE));
    if NAMES_RULE.contains(&file) && !named {
        return vec![fault(file, 1, format!("\"{RULE}\" is not in the first {FIRST_LINES} lines"))];
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of(file: &str, text: &str) -> Vec<(usize, &'static str)> {
        found(file, text).into_iter().map(|(line, word, _)| (line, word)).collect()
    }

    #[test]
    fn every_banned_word_is_reported() {
        for (phrase, _) in BANNED {
            let text = format!("//! A head.\n// So {phrase} it is.\n");
            assert_eq!(words_of("src/a.rs", &text), [(2, *phrase)]);
            let capital = phrase[..1].to_uppercase() + &phrase[1..];
            assert_eq!(words_of("docs/a.md", &format!("{capital}, they say.\n")), [(1, *phrase)]);
            let broken = phrase.replace(' ', "\n    /// ");
            assert_eq!(words_of("ffi/a.h", &format!("    /// {broken}\n")), [(1, *phrase)]);
        }
        assert_eq!(words_of("cli/src/a.rs", "\"it stands\"; nobody's"), [(1, "stand"), (1, "nobody")]);
        assert_eq!(
            words_of("a.py", "attention passes and step blocks"),
            [(1, "attention pass"), (1, "step block")]
        );
    }

    #[test]
    fn other_senses_and_other_files_are_left_alone() {
        for text in
            ["a stand-in", "0 stands for\n// none", "fn step_block()", "stand_in", "in front. Of", "standard"]
        {
            assert_eq!(words_of("src/a.rs", text), [], "{text}");
        }
        assert_eq!(words_of("src/os/a.rs", "sealed"), []);
        assert_eq!(words_of("docs/a.md", "seals of a memfd"), []);
        assert_eq!(words_of("docs/a.md", "memfd\nseals"), [(2, "seal")]);
        let [fault] = &banned("src/a.rs", "heir")[..] else { panic!("one fault") };
        assert!(fault.to_string().contains("next victim"), "{fault}");
        for file in [
            "CHANGELOG.md",
            "tests/a.rs",
            "cli/tests/a.rs",
            "src/a_tests.rs",
            "src/testing.rs",
            "ffi/c-tests/a.c",
            "Makefile",
        ] {
            assert_eq!(words_of(file, "nobody"), [], "{file}");
        }
    }

    #[test]
    fn a_page_that_does_not_name_the_rule_at_once_is_reported() {
        let late = format!("{}{RULE}\n", "\n".repeat(FIRST_LINES));
        assert_eq!(rule("README.md", &late).len(), 1);
        assert_eq!(rule("README.md", &late[1..]).len(), 0);
        assert_eq!(rule("docs/design.md", "").len(), 1);
        assert_eq!(rule("docs/a.md", "").len(), 0);
    }
}
