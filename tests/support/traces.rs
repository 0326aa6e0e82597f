//! The places of recorded traces, and the report of a test that lacks them.

#[allow(clippy::duplicate_mod, reason = "a test may have it from other support too")]
#[path = "skip.rs"]
mod skip;

use std::path::PathBuf;

/// The directory `kind` of the traces: in `$FOREBAY_TRACES`, or next to the repository. If it is missing, reports a
/// skip and returns none.
pub fn directory(kind: &str) -> Option<PathBuf> {
    let default = || {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let root = if root.ends_with("cli") { root.join("..") } else { root };
        root.join("../shared/traces")
    };
    let directory = std::env::var_os("FOREBAY_TRACES").map_or_else(default, PathBuf::from).join(kind);
    if directory.is_dir() {
        return Some(directory);
    }
    skip::skip(&format!("recorded traces in {} (set FOREBAY_TRACES)", directory.display()));
    None
}
