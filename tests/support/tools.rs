//! The tools of ci/kernels, and the report of a test that lacks them.

#[path = "skip.rs"]
mod skip;

#[allow(unused_imports, reason = "a test takes what it needs")]
pub use skip::{own_driver, skip};
use std::path::{Path, PathBuf};
use std::process::Command;

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file that ci/kernels installs, by its path in `target/kernels`, and a C++ compiler. If one of the two is missing,
/// reports a skip and returns none.
pub fn installed(file: &str) -> Option<PathBuf> {
    let path = root().join("target/kernels").join(file);
    let compiler = Command::new("g++").arg("--version").output().is_ok_and(|run| run.status.success());
    if path.is_file() && compiler {
        return Some(path);
    }
    skip(if compiler { "the tools of ci/kernels (make setup)" } else { "g++" });
    None
}
