//! Rules about the pages: promises and failures name existing tests, the commands and linked files exist, and the
//! README's program is the one that the tests run.

use crate::source::{has_word, is_word, split, tokens};
use crate::{Fault, fault};

/// The page with the tables of promises and failures.
pub const TESTING: &str = "docs/testing.md";

/// What a row may say of itself: tests hold it; tests hold a part of it; it waits for what it is about.
const STATES: [&str; 3] = ["kept", "partly", "later"];

/// Rows that the page must have, each once: P1 to P11 and F1 to F20.
fn rows_wanted() -> impl Iterator<Item = String> {
    (1..=11).map(|n| format!("P{n}")).chain((1..=20).map(|n| format!("F{n}")))
}

/// A row `| P1 | sentence | state | tests or theme |` of the page.
struct Row<'a> {
    line: usize,
    id: &'a str,
    state: &'a str,
    shown: &'a str,
}

fn rows(text: &str) -> impl Iterator<Item = Row<'_>> {
    text.lines().enumerate().filter_map(|(n, line)| {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let id = *cells.first()?;
        let number = id.strip_prefix(['P', 'F'])?;
        number.parse::<u32>().ok()?;
        Some(Row {
            line: n + 1,
            id,
            state: cells.get(2).copied().unwrap_or_default(),
            shown: cells.get(3).copied().unwrap_or_default(),
        })
    })
}

/// The parts of `text` between single backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The `file::test` names in a piece of a page.
fn named_tests(text: &str) -> impl Iterator<Item = (&str, &str)> {
    quoted(text).filter_map(|name| {
        let (file, test) = name.split_once("::")?;
        let is_test = [".rs", ".c", ".py"].iter().any(|end| file.ends_with(end));
        is_test.then(|| (file, test.rsplit("::").next().unwrap_or(test)))
    })
}

/// Whether `text`, a Rust, C or Python file, holds the test `name`.
fn holds(file: &str, text: &str, name: &str) -> bool {
    if file.ends_with(".py") {
        return name.starts_with("test_")
            && text.lines().any(|line| line.starts_with(&format!("def {name}(")));
    }
    let code = split(text).code;
    let tokens = tokens(&code);
    let texts: Vec<&str> = tokens.iter().map(|t| t.text.as_str()).collect();
    if file.ends_with(".c") {
        return texts.windows(2).any(|w| w == [name, "("]);
    }
    // A test is a function with `#[test]` among the attributes right before it.
    texts.windows(2).enumerate().any(|(i, w)| {
        let start = texts[..i].iter().rposition(|t| matches!(*t, "}" | ";" | "{")).map_or(0, |n| n + 1);
        w == ["fn", name] && texts[start..i].windows(4).any(|w| w == ["#", "[", "test", "]"])
    })
}

/// Checks the two tables of [`TESTING`] against the files that `read` finds.
pub fn promises(text: &str, read: impl Fn(&str) -> Option<String>) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut report = |line, what: String| faults.push(fault(TESTING, line, what));
    for id in rows_wanted() {
        let count = rows(text).filter(|row| row.id == id).count();
        if count != 1 {
            report(1, format!("{count} rows for {id}, one wanted"));
        }
    }
    for Row { line, id, state, shown } in rows(text) {
        if !STATES.contains(&state) {
            report(line, format!("{id}: state `{state}` is none of {STATES:?}"));
        }
        if state == "later" && shown.is_empty() {
            report(line, format!("{id}: say what it waits for"));
        }
        if matches!(state, "kept" | "partly") && named_tests(shown).next().is_none() {
            report(line, format!("{id} is {state} and names no test (`path/file.rs::test`)"));
        }
    }
    for (n, line) in text.lines().enumerate() {
        for (file, test) in named_tests(line) {
            match read(file) {
                None => report(n + 1, format!("no file {file}")),
                Some(source) if !holds(file, &source, test) => {
                    report(n + 1, format!("no test {test} in {file}"))
                }
                Some(_) => {}
            }
        }
    }
    faults
}

/// Every relative link of a page leads to a file that `exists`, by its path from the root. What is in code
/// is no link.
pub fn links(file: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<Fault> {
    if !file.ends_with(".md") {
        return Vec::new();
    }
    let folder = file.rsplit_once('/').map_or(String::new(), |(folder, _)| format!("{folder}/"));
    let mut faults = Vec::new();
    let mut fenced = false;
    for (n, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        let plain: String = if fenced { String::new() } else { line.split('`').step_by(2).collect() };
        let targets = plain.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let files = targets.map(|target| target.split('#').next().unwrap_or_default());
        for target in files.filter(|target| !target.is_empty() && !target.contains(':')) {
            if !exists(&format!("{folder}{target}")) {
                faults.push(fault(file, n + 1, format!("the link to {target} leads nowhere")));
            }
        }
    }
    faults
}

/// Every `make` command that a page tells the reader to type exists.
pub fn commands(file: &str, text: &str, makefile: &str) -> Vec<Fault> {
    if !file.ends_with(".md") {
        return Vec::new();
    }
    let targets: Vec<&str> = makefile
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(names, _)| names)
        .filter(|names| names.chars().all(|c| is_word(c) || c == '-'))
        .collect();
    let mut faults = Vec::new();
    let mut fenced = false;
    for (n, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        let typed: Vec<&str> = if fenced { vec![line.trim()] } else { quoted(line).collect() };
        for command in typed {
            let command = command.trim_start_matches("$ ").split('#').next().unwrap_or_default();
            let mut words = command.split_whitespace().skip_while(|w| w.contains('='));
            if words.next() != Some("make") {
                continue;
            }
            for target in words.filter(|w| !w.contains('=') && !w.starts_with('-')) {
                if !targets.contains(&target) {
                    faults.push(fault(file, n + 1, format!("the Makefile has no `{target}`")));
                }
            }
        }
    }
    faults
}

/// A section of a page, from its heading to the next heading of its level or a higher one. The other lines are empty,
/// so that numbers of lines are the page's. A line that begins with `#` inside a listing is no heading.
pub fn section(page: &str, heading: &str) -> String {
    let level = |line: &str| line.chars().take_while(|c| *c == '#').count();
    let (mut inside, mut fenced) = (false, false);
    let mut text = String::new();
    for line in page.lines() {
        fenced ^= line.starts_with("```");
        if !fenced && (1..=level(heading)).contains(&level(line)) {
            inside = line == heading;
        }
        text += if inside { line } else { "" };
        text.push('\n');
    }
    text
}

/// The lines of a page's programs in `language` are, in their order, lines of the program that the tests run.
pub fn listing(page: (&str, &str), language: &str, program: (&str, &str)) -> Vec<Fault> {
    let mut there = program.1.lines().map(str::trim);
    let mut shown = false;
    let mut faults = Vec::new();
    for (n, line) in page.1.lines().enumerate() {
        if let Some(fence) = line.strip_prefix("```") {
            shown = fence == language;
            continue;
        }
        let wanted = line.trim();
        let left_out = wanted.is_empty() || wanted.trim_start_matches(['/', '#', ' ']) == "...";
        if !shown || left_out {
            continue;
        }
        let mut ahead = there.clone();
        if ahead.any(|line| line == wanted) {
            there = ahead;
        } else {
            faults.push(fault(page.0, n + 1, format!("not in {}, or not at this place", program.0)));
        }
    }
    faults
}

/// Every environment variable `FOREBAY_...` that Rust files quote, the Makefile sets or a script reads is on
/// the page about testing.
pub fn variables(file: &str, text: &str, page: &str) -> Vec<Fault> {
    let script = file == "Makefile" || file.starts_with("ci/") || file.starts_with(".ci/");
    if !script && !file.ends_with(".rs") {
        return Vec::new();
    }
    let mut faults = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let names =
            line.split(|c| !is_word(c)).filter(|w| w.starts_with("FOREBAY_") && w.len() > "FOREBAY_".len());
        let read = names.filter(|name| script || line.contains(&format!("\"{name}\"")));
        for name in read.filter(|name| !has_word(page, name)) {
            faults.push(fault(file, n + 1, format!("{name} is not on {TESTING}")));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "/// Doc.\n#[test]\nfn good() {}\nfn helper() {}\n// #[test] fn said() {}\n";

    fn page(rows: &str) -> String {
        let rest = rows_wanted().filter(|id| !rows.contains(&format!("| {id} |")));
        let rest: String = rest.map(|id| format!("| {id} | x | later | its module |\n")).collect();
        format!("{rows}{rest}")
    }

    fn check(rows: &str) -> usize {
        promises(&page(rows), |file| (file == "src/a.rs").then(|| FILE.to_owned())).len()
    }

    #[test]
    fn a_promise_without_its_test_is_reported() {
        assert_eq!(check(""), 0);
        assert_eq!(check("| P1 | x | kept | `src/a.rs::tests::good` |\n"), 0);
        assert_eq!(check("| P1 | x | kept | `src/a.rs::helper` |\n"), 1);
        assert_eq!(check("| P1 | x | kept | `src/a.rs::said` |\n"), 1);
        assert_eq!(check("| P1 | x | kept | `src/b.rs::good` |\n"), 1);
        assert_eq!(check("| P1 | x | kept | |\n"), 1);
        assert_eq!(check("| F3 | x | partly | all of it |\n"), 1);
        assert_eq!(check("| F3 | x | later | |\n"), 1);
        assert_eq!(check("| F3 | x | soon | y |\n"), 1);
        assert_eq!(check("| P2 | x | later | y |\n| P2 | x | later | y |\n"), 1);
        assert_eq!(promises("", |_| None).len(), 31);
    }

    #[test]
    fn a_test_in_c_or_python_is_found_by_its_function() {
        assert!(holds("a.c", "int main(void) {}", "main"));
        assert!(!holds("a.c", "/* main( */", "main"));
        assert!(holds("a.py", "def test_a() -> None:\n    pass\n", "test_a"));
        assert!(
            !holds("a.py", "def helper():\n    pass\n", "helper") && !holds("a.py", "# test_a(", "test_a")
        );
    }

    #[test]
    fn a_command_that_does_not_exist_is_reported() {
        let makefile = ".PHONY: gone\nA := b\ntest: setup\nc-test:\n\tgone: x\n";
        let text = "Type `make test`, `A=1 make c-test` and make sure.\n\
                    ```\nmake gone  # not there\n```\n`make sure`\n";
        let lines: Vec<usize> = commands("a.md", text, makefile).iter().map(|f| f.line).collect();
        assert_eq!(lines, [3, 5]);
    }

    #[test]
    fn a_link_that_leads_nowhere_is_reported() {
        let text = "[a](there.md) and [b](gone.md#part)\n[c](https://x.y/gone)\n[d](#part)\n`[e](gone.md)`\n\
                    ```\n[f](gone.md)\n```\n[`g`](gone.md)\n";
        let check = |file| links(file, text, |target| target == "docs/there.md");
        let lines: Vec<usize> = check("docs/a.md").iter().map(|f| f.line).collect();
        assert_eq!(lines, [1, 8]);
        assert_eq!(check("a.md").len(), 3, "from another folder nothing is there");
        assert_eq!(check("src/a.rs").len(), 0);
    }

    #[test]
    fn a_listing_that_differs_from_its_program_is_reported() {
        let page = "```rust\nlet a = 1;\n// ...\nlet b = 2;\n```\n```python\na = 1\n# ...\nb = 2\n```\n";
        let faults = |language, text| listing(("a.md", page), language, ("a", text)).len();
        assert_eq!(faults("rust", "  let a = 1;\n  more();\n  let b = 2;\n"), 0);
        assert_eq!(faults("rust", "let b = 2;\nlet a = 1;\n"), 1);
        assert_eq!(faults("rust", ""), 2);
        assert_eq!(faults("python", "if True:\n    a = 1\n    b = 2\n"), 0);
        assert_eq!(faults("c", ""), 0);
    }

    #[test]
    fn a_section_ends_at_the_next_heading_of_its_level() {
        let page = "# a\n## b\n```c\n# x\n```\n### c\n## d\n";
        assert_eq!(section(page, "## b"), "\n## b\n```c\n# x\n```\n### c\n\n");
        assert_eq!(section(page, "# a"), page);
        assert_eq!(section(page, "## e"), "\n".repeat(7));
    }

    #[test]
    fn a_variable_that_no_page_names_is_reported() {
        let name = concat!("FOREBAY", "_X");
        assert_eq!(variables("src/a.rs", &format!("var(\"{name}\")"), "FOREBAY_SKIPS").len(), 1);
        assert_eq!(variables("src/a.rs", &format!("var(\"{name}\")"), name).len(), 0);
    }
}
