//! The rule about docs/walk.md: at most 12 stops, and every function that it names is defined in the file that it
//! names.

use crate::source::{split, test_lines, tokens};
use crate::{Fault, fault};

/// The page that follows one row through the code.
pub const WALK: &str = "docs/walk.md";

/// The most stops of the walk.
const STOPS: usize = 12;

/// The parts of a line between single backticks.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// The `(file, function)` pairs that a line names as `file.rs::function`.
fn functions(line: &str) -> impl Iterator<Item = (&str, &str)> {
    quoted(line).filter_map(|name| name.split_once("::")).filter(|(file, _)| file.ends_with(".rs"))
}

/// Whether the Rust text defines the function outside of tests.
fn defines(text: &str, function: &str) -> bool {
    let code = split(text).code;
    let (tokens, in_tests) = (tokens(&code), test_lines(&code));
    tokens.windows(2).any(|w| w[0].text == "fn" && w[1].text == function && !in_tests[w[0].line - 1])
}

/// Checks the stops of [`WALK`] against the files that `read` finds. A stop is a heading `## N. title`; the stops are
/// numbered from 1, there are at most [`STOPS`], and each names at least one function.
pub fn stops(text: &str, read: impl Fn(&str) -> Option<String>) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut report = |line: usize, what: String| faults.push(fault(WALK, line, what));
    // The heading's line of each stop, and how many functions it names.
    let mut named: Vec<(usize, usize)> = Vec::new();
    for (n, line) in text.lines().enumerate() {
        if let Some(heading) = line.strip_prefix("## ") {
            named.push((n + 1, 0));
            if !heading.starts_with(&format!("{}. ", named.len())) {
                report(n + 1, format!("the heading of stop {} is `## {}. title`", named.len(), named.len()));
            }
        }
        for (file, function) in functions(line) {
            if let Some((_, count)) = named.last_mut() {
                *count += 1;
            }
            match read(file) {
                None => report(n + 1, format!("no file {file}")),
                Some(source) if !defines(&source, function) => {
                    report(n + 1, format!("{file} defines no function {function}"));
                }
                Some(_) => {}
            }
        }
        for file in quoted(line).filter(|name| name.ends_with(".rs") && read(name).is_none()) {
            report(n + 1, format!("no file {file}"));
        }
    }
    for (line, _) in named.iter().filter(|(_, count)| *count == 0) {
        report(*line, "the stop names no function (`path/file.rs::function`)".to_owned());
    }
    match named.get(STOPS) {
        Some((line, _)) => report(*line, format!("more than {STOPS} stops: join some")),
        None if named.is_empty() => report(1, "no stops".to_owned()),
        None => {}
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "fn good() {}\n// fn said() {}\n#[cfg(test)]\nmod tests {\n    fn tested() {}\n}\n";

    fn walk(stops: usize) -> String {
        (1..=stops).map(|n| format!("## {n}. A stop\n\n`src/a.rs::good`\n\n")).collect()
    }

    fn check(text: &str) -> Vec<String> {
        let read = |file: &str| (file == "src/a.rs").then(|| FILE.to_owned());
        stops(text, read).iter().map(Fault::to_string).collect()
    }

    #[test]
    fn twelve_stops_are_taken_and_a_thirteenth_is_reported() {
        assert_eq!(check(&walk(1)), [""; 0]);
        assert_eq!(check(&walk(12)), [""; 0]);
        let faults = check(&walk(13));
        assert!(faults.len() == 1 && faults[0].contains("more than 12 stops"), "{faults:?}");
        assert_eq!(check("# A walk\n").len(), 1);
    }

    #[test]
    fn a_missing_function_is_reported() {
        for (name, wanted) in [
            ("src/a.rs::gone", "src/a.rs defines no function gone"),
            ("src/a.rs::said", "src/a.rs defines no function said"),
            ("src/a.rs::tested", "src/a.rs defines no function tested"),
            ("src/b.rs::good", "no file src/b.rs"),
            ("src/b.rs", "no file src/b.rs"),
        ] {
            let faults = check(&format!("{}`{name}`\n", walk(2)));
            assert!(faults.len() == 1 && faults[0].contains(wanted), "{name}: {faults:?}");
        }
    }

    #[test]
    fn a_stop_without_a_function_or_out_of_order_is_reported() {
        assert_eq!(check(&format!("{}## 3. Nothing\n", walk(2))).len(), 1);
        assert_eq!(check("## 2. A stop\n`src/a.rs::good`\n").len(), 1);
        assert_eq!(check("## A stop\n`src/a.rs::good`\n").len(), 1);
    }
}
