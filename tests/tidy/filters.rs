//! The rule that filters of tests in the Makefile and in `ci/gpu/run.sh` select something. A filter without a test is
//! no error for the test program, so a renamed test would silently no longer run, or no longer be left out.

use crate::source::{split, tokens};
use crate::{Fault, fault};

/// The files that call test programs with filters.
const CALLERS: [&str; 2] = ["Makefile", "ci/gpu/run.sh"];

/// Whether the word can be a part of a test's path, and no option or variable.
fn is_filter(word: &str) -> bool {
    !word.is_empty()
        && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | ':'))
}

/// The words of a line that are filters: after each `--skip`, in `filters="..."`, after `--test-threads=1`, and the
/// words from the fourth on in the table of `binaries`.
fn filters(line: &str, in_table: bool) -> Vec<&str> {
    let words: Vec<&str> = line.split([' ', '\t', '(', ')']).filter(|word| !word.is_empty()).collect();
    let after = |name: &str| words.iter().position(|word| *word == name).map_or(words.len(), |at| at + 1);
    let skipped = words.windows(2).filter(|pair| pair[0] == "--skip").map(|pair| pair[1]);
    let named =
        line.split_once("filters=\"").and_then(|(_, rest)| rest.split_once('"')).map_or("", |(list, _)| list);
    let listed = words.iter().skip(if in_table { 3 } else { after("--test-threads=1") });
    let listed = listed.copied().take_while(|word| *word != "--skip");
    skipped.chain(named.split(' ')).chain(listed).filter(|word| is_filter(word)).collect()
}

/// Every name that a test's path may have: functions, modules and files.
fn names(tree: &[(String, String)]) -> String {
    let mut all = String::new();
    for (file, text) in tree.iter().filter(|(file, _)| file.ends_with(".rs")) {
        let path = file.trim_end_matches(".rs").trim_end_matches("/mod").replace('/', "::");
        all.push_str(&format!("{path}::\n"));
        let code = split(text).code;
        let tokens = tokens(&code);
        for pair in tokens.windows(2).filter(|pair| matches!(&*pair[0].text, "fn" | "mod")) {
            all.push_str(&format!("{}::\n", pair[1].text));
        }
    }
    all
}

/// Filters of [`CALLERS`] that no test's path contains.
pub fn without_tests(tree: &[(String, String)]) -> Vec<Fault> {
    let names = names(tree);
    let mut faults = Vec::new();
    for (file, text) in tree.iter().filter(|(file, _)| CALLERS.contains(&&**file)) {
        let mut in_table = false;
        for (n, line) in text.lines().enumerate() {
            in_table = in_table && line != "LIST";
            for filter in filters(line, in_table).into_iter().filter(|filter| !names.contains(*filter)) {
                faults.push(fault(file, n + 1, format!("no test has `{filter}` in its path")));
            }
            in_table |= line.ends_with("<<'LIST'");
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_without_a_test_is_reported() {
        let source = "mod edges {\n    #[test]\n    fn f1_a_lane_is_kept() {}\n}\n";
        let check = |file: &str, text: &str| {
            let tree =
                [("tests/a.rs", source), (file, text)].map(|(name, text)| (name.to_owned(), text.to_owned()));
            without_tests(&tree).iter().map(|fault| fault.line).collect::<Vec<_>>()
        };
        let table = "cat <<'LIST'\nedges edges cuda f1_ gone\nedges edges - edges::\nLIST\nother words of text here\n";
        for (text, lines) in [
            ("\tcargo test -- --skip f1_a_lane --skip gone\n", &[1][..]),
            ("    x) more=(--skip f1_ --skip a_lane) ;;\n", &[]),
            ("filters=\"f1_ edges\"\nfilters=\"f1_ gone\"\n", &[2]),
            ("    \"$tests/a\" --test-threads=1 a_lane gone\n", &[1]),
            ("    \"$tests/a\" --test-threads=1 \"$@\"\n", &[]),
            (table, &[2]),
        ] {
            assert_eq!(check("ci/gpu/run.sh", text), lines, "{text}");
            assert_eq!(check("ci/other", text), [0; 0], "{text}");
        }
    }
}
