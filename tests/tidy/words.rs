//! Words that are not to come back, each with its replacement, and the name of the rule in the first lines of pages.

use crate::{Fault, fault};

/// The name of the residency rule, as README and the design page give it in their first lines.
const RULE: &str = "Exact LRU, step by step";

/// Pages that name the rule within so many lines.
const NAMES_RULE: [&str; 2] = ["README.md", "docs/design.md"];
const FIRST_LINES: usize = 12;

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

/// Files that hold the banned words for a reason: the changelog tells what was, and this rule lists them. The built
/// kernels are not prose.
fn is_checked(file: &str) -> bool {
    let built = file.starts_with("src/device/cuda/kernels/built/");
    !built && file != "CHANGELOG.md" && file != "docs/versions.md" && file != "tests/tidy/words.rs"
}

/// A word of a text in lower case, its line (from 1), and whether only blanks and marks of comments are before it.
struct Word {
    text: String,
    line: usize,
    follows: bool,
}

/// The words of a text. The parts of an identifier between underscores are words; a word with hyphens is one.
fn words(text: &str) -> Vec<Word> {
    let mut all: Vec<Word> = Vec::new();
    let mut follows = false;
    for (n, line) in text.lines().enumerate() {
        let mut rest = line;
        while let Some(first) = rest.chars().next() {
            if !first.is_alphanumeric() {
                // Between the words of a phrase: blanks, a line's end, the marks that begin a line of comment, and
                // the underscores of an identifier.
                follows &= first.is_whitespace() || matches!(first, '/' | '!' | '*' | '#' | '_');
                rest = &rest[first.len_utf8()..];
                continue;
            }
            let inside = |c: char| c.is_alphanumeric() || c == '-';
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
        "stand" => {
            let stand_in = line.contains("stand_in");
            stand_in || words.get(1).is_some_and(|next| next.text == "for" && next.follows)
        }
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

/// README and the design page exist and name the rule in their first lines.
pub fn rule(read: impl Fn(&str) -> Option<String>) -> Vec<Fault> {
    let named = |page: &str| {
        let text = read(page)?;
        text.lines().take(FIRST_LINES).any(|line| line.contains(RULE)).then_some(())
    };
    let missing = NAMES_RULE.into_iter().filter(|page| named(page).is_none());
    missing
        .map(|page| fault(page, 1, format!("\"{RULE}\" is not in the first {FIRST_LINES} lines")))
        .collect()
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
            ["a stand-in", "0 stands for\n// none", "fn stand_in()", "in front. Of", "standard", "sealing"]
        {
            assert_eq!(words_of("src/a.rs", text), [], "{text}");
        }
        assert_eq!(words_of("src/os/a.rs", "sealed"), []);
        assert_eq!(words_of("docs/a.md", "seals of a memfd"), []);
        assert_eq!(words_of("docs/a.md", "memfd\nseals"), [(2, "seal")]);
        let [fault] = &banned("src/a.rs", "heir")[..] else { panic!("one fault") };
        assert!(fault.to_string().contains("next victim"), "{fault}");
        for file in ["CHANGELOG.md", "docs/versions.md", "src/device/cuda/kernels/built/a.ptx"] {
            assert_eq!(words_of(file, "nobody"), [], "{file}");
        }
        for file in ["tests/a.rs", "cli/tests/a.rs", "ffi/c-tests/a.c", "standin/a.cpp", "ci/a", "Makefile"] {
            assert_eq!(
                words_of(file, "fn a_step_block_of_nobody()"),
                [(1, "step block"), (1, "nobody")],
                "{file}"
            );
        }
    }

    #[test]
    fn a_page_that_does_not_name_the_rule_at_once_is_reported() {
        let late = format!("{}{RULE}\n", "\n".repeat(FIRST_LINES));
        let faults = |readme: &str, design: Option<&str>| {
            let read = |page: &str| match page {
                "README.md" => Some(readme.to_owned()),
                "docs/design.md" => design.map(str::to_owned),
                _ => None,
            };
            rule(read).into_iter().map(|fault| fault.file).collect::<Vec<_>>()
        };
        assert_eq!(faults(&late[1..], Some(RULE)), [""; 0]);
        assert_eq!(faults(&late, Some("")), NAMES_RULE);
        assert_eq!(faults(&late[1..], None), ["docs/design.md"]);
    }
}
