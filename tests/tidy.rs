//! Style as a test: the rules of CONTRIBUTING.md, checked over the whole tree.
//!
//! Every rule is a function from a file's name and text to faults. A test next to it plants a violation and checks that
//! the rule reports it, because a rule that never reports anything proves nothing. The compiler checks format and lints
//! (`make check`); these rules check the rest.
//!
//! The test walks the tree itself and obeys .gitignore. It does not call git, so it can also check an unpacked archive.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/filters.rs"]
mod filters;
#[path = "tidy/layout.rs"]
mod layout;
#[path = "tidy/pages.rs"]
mod pages;
#[path = "tidy/source.rs"]
mod source;
#[path = "tidy/text.rs"]
mod text;
#[path = "tidy/walk.rs"]
mod walk;
#[path = "tidy/words.rs"]
mod words;

/// A broken rule: where, and what is wrong there.
pub struct Fault {
    file: String,
    line: usize,
    what: String,
}

/// A fault in `file` at `line` (from 1).
pub fn fault(file: &str, line: usize, what: String) -> Fault {
    Fault { file: file.to_owned(), line, what }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.what)
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Whether .gitignore (`/path`, `name` or `*.ending` a line) leaves the file or folder out.
fn ignored(file: &str, patterns: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    let hit = |pattern: &str| match (pattern.strip_prefix('/'), pattern.strip_prefix('*')) {
        (Some(path), _) => file == path.trim_end_matches('/'),
        (_, Some(ending)) => name.ends_with(ending),
        _ => name == pattern.trim_end_matches('/'),
    };
    name == ".git" || patterns.lines().filter(|p| !p.is_empty() && !p.starts_with('#')).any(hit)
}

/// Every text file of the tree: its name from the root, and its text.
fn tree() -> Vec<(String, String)> {
    let patterns = read(".gitignore").unwrap_or_default();
    let mut folders: Vec<PathBuf> = vec![root().to_owned()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
            match entry.file_type() {
                _ if ignored(&name, &patterns) => {}
                Ok(kind) if kind.is_dir() => folders.push(path),
                Ok(kind) if kind.is_file() => files.extend(read(&name).map(|text| (name, text))),
                _ => {}
            }
        }
    }
    files.sort();
    files
}

/// The text of a file, by its name from the root; none where it is not there or no text.
fn read(file: &str) -> Option<String> {
    std::fs::read_to_string(root().join(file)).ok()
}

fn report(faults: &[Fault]) {
    let lines: Vec<String> = faults.iter().map(Fault::to_string).collect();
    assert!(lines.is_empty(), "\n{}\n", lines.join("\n"));
}

fn over_tree(rule: impl Fn(&str, &str) -> Vec<Fault>) {
    let faults: Vec<Fault> = tree().iter().flat_map(|(file, text)| rule(file, text)).collect();
    report(&faults);
}

#[test]
fn the_tree_is_read() {
    let names: Vec<String> = tree().into_iter().map(|(file, _)| file).collect();
    for file in ["src/lib.rs", "tests/tidy/text.rs", ".ci/run", "Makefile", "README.md"] {
        assert!(names.iter().any(|name| name == file), "{file}");
    }
    assert!(!names.iter().any(|name| name.starts_with("target/") || name.starts_with(".git/")));
    assert!(ignored("target", "/target\n") && ignored("a/b.so", "*.so") && !ignored("src/target", "/target"));
}

#[test]
fn modules_use_modules_above_them_only() {
    over_tree(layout::directions);
}

#[test]
fn files_of_a_member_import_each_other_in_no_circle() {
    report(&circles::circles(&tree()));
}

#[test]
fn filters_of_tests_select_some() {
    report(&filters::without_tests(&tree()));
}

#[test]
fn devices_do_not_name_each_other() {
    over_tree(layout::backends);
}

#[test]
fn the_command_and_the_c_side_use_only_public_items() {
    over_tree(layout::public_only);
}

#[test]
fn atomics_locks_and_threads_are_named_in_one_place() {
    over_tree(layout::primitives);
}

#[test]
fn unsafe_is_in_its_places_and_gives_reasons() {
    over_tree(layout::unsafety);
    report(&layout::exceptions(|file| read(file).is_some()));
}

#[test]
fn no_reference_points_into_memory_that_others_write() {
    over_tree(layout::references);
}

#[test]
fn files_and_lines_are_short() {
    over_tree(text::size);
}

#[test]
fn every_file_has_a_head() {
    over_tree(text::head);
}

#[test]
fn nothing_is_unfinished_or_dead() {
    over_tree(text::dead);
}

#[test]
fn no_code_is_in_comments() {
    over_tree(text::commented_code);
}

#[test]
fn no_file_names_a_machine() {
    over_tree(text::machine);
}

#[test]
fn promises_and_failures_name_existing_tests() {
    report(&pages::promises(&read(pages::TESTING).unwrap_or_default(), read));
}

#[test]
fn links_of_the_pages_lead_somewhere() {
    over_tree(|file, text| pages::links(file, text, |target| root().join(target).exists()));
}

#[test]
fn commands_of_the_pages_exist() {
    let makefile = read("Makefile").unwrap_or_default();
    over_tree(|file, text| pages::commands(file, text, &makefile));
}

#[test]
fn listings_of_the_pages_are_programs_that_are_run() {
    let shown = [
        ("README.md", "# forebay", "rust", "examples/decode_loop.rs"),
        ("docs/integration.md", "## The loop in four languages", "rust", "examples/integration.rs"),
        ("docs/integration.md", "## The loop in four languages", "c", "examples/integration/decode.c"),
        ("docs/integration.md", "## The loop in four languages", "cpp", "examples/integration/decode.cpp"),
        ("docs/integration.md", "## The loop in four languages", "python", "examples/integration/decode.py"),
        ("docs/integration.md", "## Dense models", "c", "examples/integration/dense.c"),
        ("docs/integration.md", "## Dense models", "rust", "examples/dense.rs"),
        ("docs/integration.md", "## Dense models", "cpp", "examples/integration/dense.cpp"),
        ("docs/integration.md", "## Dense models", "python", "examples/integration/dense.py"),
    ];
    for (page, heading, language, program) in shown {
        let (text, run) = (read(page).unwrap_or_default(), read(program).unwrap_or_default());
        let text = pages::section(&text, heading);
        assert!(text.contains(&format!("```{language}\n")), "{page} has no listing in {language}");
        report(&pages::listing((page, &text), language, (program, &run)));
    }
}

#[test]
fn the_walk_has_at_most_twelve_stops_at_functions_that_exist() {
    report(&walk::stops(&read(walk::WALK).unwrap_or_default(), read));
}

#[test]
fn banned_words_do_not_come_back() {
    over_tree(words::banned);
}

#[test]
fn the_first_lines_name_the_rule() {
    report(&words::rule(read));
}

#[test]
fn variables_of_the_environment_are_documented() {
    let page = read(pages::TESTING).unwrap_or_default();
    over_tree(|file, text| pages::variables(file, text, &page));
}

/// Runs ci/skips as `make test` does, over a command that notes `lines` and ends with `code`; whether it
/// lets the run pass, and what it shows.
fn run_with_skips(name: &str, lines: &str, code: u8, require_all: &str) -> std::io::Result<(bool, String)> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let (skips, list) = (folder.join("skips.txt"), folder.join("allowed.txt"));
    std::fs::create_dir_all(&folder)?;
    std::fs::write(&skips, "SKIP: test of the last run: gone\n")?;
    std::fs::write(&list, "# A reason.\nlisted test\n")?;
    let mut command = Command::new(root().join("ci/skips"));
    let script = format!("printf '%s' '{lines}' >>\"$FOREBAY_SKIPS\"; exit {code}");
    command.args(["sh", "-c", &script]).env("FOREBAY_SKIPS", skips);
    command.env("FOREBAY_ALLOWED", list).env("FOREBAY_REQUIRE_ALL", require_all);
    let ended = command.output()?;
    let shown = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(!shown.contains("last run"), "{shown}");
    Ok((ended.status.success(), shown))
}

#[test]
fn an_unlisted_skip_fails_where_every_test_is_required() {
    let listed = "SKIP: listed test: no such: device\n";
    let other = "SKIP: other test: no traces\n";
    assert!(run_with_skips("none", "", 0, "1").unwrap().0);
    assert!(run_with_skips("listed", listed, 0, "1").unwrap().0);
    assert!(!run_with_skips("other", &format!("{listed}{other}"), 0, "1").unwrap().0);
    assert!(run_with_skips("lenient", other, 0, "").unwrap().0);
}

#[test]
fn a_failed_run_prints_its_skips_and_fails() {
    for require_all in ["", "1"] {
        let (passes, shown) = run_with_skips("failed", "SKIP: listed test: why\n", 3, require_all).unwrap();
        assert!(!passes && shown.contains("SKIP: listed test: why\n"), "{shown}");
        assert!(!run_with_skips("failed", "", 3, require_all).unwrap().0);
    }
}
