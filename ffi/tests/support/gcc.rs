//! Whether a compiler is installed, and the message of a test that skips without one (docs/testing.md).

#[path = "../../../tests/support/skip.rs"]
mod skip;

use std::process::Command;

/// Whether `compiler` runs; if not, the test prints that it skips.
pub fn is_there(compiler: &str) -> bool {
    if Command::new(compiler).arg("--version").output().is_ok_and(|ended| ended.status.success()) {
        return true;
    }
    skip::skip(compiler);
    false
}
