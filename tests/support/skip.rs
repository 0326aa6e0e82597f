//! What a test says when it cannot run here.
#![allow(clippy::expect_used)]

/// Says that the test that calls did not run, without `what`: on standard error, and in `$FOREBAY_SKIPS`.
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
