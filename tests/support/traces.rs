//! Where recorded traces are, and what a test says when they are not there.

use std::path::PathBuf;

/// The directory `kind` of the traces: in `$FOREBAY_TRACES`, or beside the repository. When it is missing
/// the skip is printed and noted in `$FOREBAY_SKIPS`, and the caller returns.
pub fn directory(kind: &str, test: &str) -> Option<PathBuf> {
    let beside = || {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let root = if root.ends_with("cli") { root.join("..") } else { root };
        root.join("../shared/traces")
    };
    let directory = std::env::var_os("FOREBAY_TRACES").map_or_else(beside, PathBuf::from).join(kind);
    if directory.is_dir() {
        return Some(directory);
    }
    let line = format!("SKIP: {test}: no recorded traces in {} (set FOREBAY_TRACES)\n", directory.display());
    eprint!("{line}");
    if let Some(list) = std::env::var_os("FOREBAY_SKIPS") {
        let list = std::fs::OpenOptions::new().create(true).append(true).open(list);
        std::io::Write::write_all(&mut list.expect("the list of skips"), line.as_bytes())
            .expect("a skip is noted");
    }
    None
}
