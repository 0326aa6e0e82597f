//! Whether a compiler is there, and the line of a test that must skip without it (docs/testing.md).

use std::io::Write;
use std::process::Command;

/// Whether `compiler` runs; otherwise `test` says that it skips.
pub fn is_there(compiler: &str, test: &str) -> bool {
    if Command::new(compiler).arg("--version").output().is_ok_and(|ended| ended.status.success()) {
        return true;
    }
    let line = format!("SKIP: {test}: {compiler} is not there\n");
    eprint!("{line}");
    if let Some(file) = std::env::var_os("FOREBAY_SKIPS") {
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }
    false
}
