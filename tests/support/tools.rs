//! The tools of ci/kernels, and what a test says when they are not there.

use std::path::{Path, PathBuf};
use std::process::Command;

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file that ci/kernels installs, by its path in `target/kernels`, and a C++ compiler. When one of the two is
/// missing the skip is printed and noted in `$FOREBAY_SKIPS`, and the caller returns.
pub fn installed(file: &str, test: &str) -> Option<PathBuf> {
    let path = root().join("target/kernels").join(file);
    let compiler = Command::new("g++").arg("--version").output().is_ok_and(|run| run.status.success());
    if path.is_file() && compiler {
        return Some(path);
    }
    skip(test, if compiler { "the tools of ci/kernels (make setup)" } else { "g++" });
    None
}

/// Says that a test did not run, without `what`.
pub fn skip(test: &str, what: &str) {
    let line = format!("SKIP: {test}: without {what}\n");
    eprint!("{line}");
    if let Some(list) = std::env::var_os("FOREBAY_SKIPS") {
        let list = std::fs::OpenOptions::new().create(true).append(true).open(list);
        std::io::Write::write_all(&mut list.expect("the list of skips"), line.as_bytes())
            .expect("a skip is noted");
    }
}
