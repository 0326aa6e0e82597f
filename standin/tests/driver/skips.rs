//! What a test says that cannot run here, where `make test` looks for it.

use std::fs::OpenOptions;
use std::io::Write;

/// Notes that the test of this thread is skipped, and why.
pub fn note(reason: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let line = format!("SKIP: {test}: {reason}\n");
    eprint!("{line}");
    let Some(list) = std::env::var_os("FOREBAY_SKIPS") else { return };
    let list = OpenOptions::new().create(true).append(true).open(list);
    let noted = list.and_then(|mut list| list.write_all(line.as_bytes()));
    assert!(noted.is_ok(), "a skip is noted: {noted:?}");
}
