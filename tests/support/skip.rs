//! The report of a test that cannot run on this machine.
#![allow(clippy::expect_used)]

/// Reports that the calling test did not run, because `what` is missing: on standard error, and in `$FOREBAY_SKIPS`.
pub fn skip(what: &str) {
    let thread = std::thread::current();
    let line = format!("SKIP: {}: without {what}\n", thread.name().unwrap_or("a test"));
    eprint!("{line}");
    if let Some(list) = std::env::var_os("FOREBAY_SKIPS") {
        let list = std::fs::OpenOptions::new().create(true).append(true).open(list);
        std::io::Write::write_all(&mut list.expect("the list of skips"), line.as_bytes())
            .expect("a skip is noted");
    }
}

/// Whether the driver is a stand-in of the test's own, which has the ability `does`. Reports a skip if the test runs on
/// the driver that `FOREBAY_TEST_DRIVER` names.
#[allow(dead_code, reason = "a test takes what it needs")]
pub fn own_driver(does: &str) -> bool {
    let own = std::env::var_os("FOREBAY_TEST_DRIVER").is_none();
    if !own {
        skip(&format!("a stand-in driver of its own, which {does}"));
    }
    own
}
