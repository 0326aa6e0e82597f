//! What a test says when it cannot run here.

/// Says that the test that calls did not run, without `what`: on standard error, and in `$FOREBAY_SKIPS`.
pub fn skip(what: &str) {
    let thread = std::thread::current();
    let line = format!("SKIP: {}: without {what}\n", thread.name().unwrap_or("a test"));
    eprint!("{line}");
    if let Some(list) = std::env::var_os("FOREBAY_SKIPS") {
        let mut list = std::fs::OpenOptions::new().create(true).append(true).open(list).unwrap();
        std::io::Write::write_all(&mut list, line.as_bytes()).unwrap();
    }
}
