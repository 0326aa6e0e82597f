//! The errors for files that are not a trace of the expected kind: what was found, and what can be read.

use super::magic::{AZURE, BYTE_ORDER_MARK, GZIP_MAGIC};
use crate::error::{Error, Kind};

/// The readable formats.
const READABLE: &str = "forebay reads selection traces (TOPKTRC1, TOPKTRC2) and request traces (Mooncake, \
                        kv-cache-tester, RAGPulse, Azure), plain or zstd; see docs/trace-format.md";

/// The error for a content that begins with `start`, if a selection trace, or any trace, is expected.
pub(super) fn unknown(start: &[u8]) -> Error {
    let found = |what| Error::new(Kind::BadFormat, "read trace").at(what);
    if start.starts_with(&GZIP_MAGIC) {
        return found("the file is gzip").hint("unpack it; plain text and zstd are read");
    }
    let text = start.strip_prefix(BYTE_ORDER_MARK).unwrap_or(start).trim_ascii_start();
    let csv = !text.is_empty() && text.iter().zip(AZURE).all(|(a, b)| a == b);
    if text.starts_with(b"{") || csv {
        return found("the file holds a request trace, but a selection trace is expected").hint(
            "request traces are read from regular files, not through a pipe; in a program, by RequestTrace",
        );
    }
    // A section of an INI file begins in the same way.
    let list = text.strip_prefix(b"[").map(|inner| inner.trim_ascii_start().first().copied());
    if list.is_some_and(|first| first.is_none_or(|first| b"{[]\"-0123456789".contains(&first))) {
        return found("the file holds a JSON array").hint(
            "request traces are JSON lines: one object a line, no brackets around all and no commas between",
        );
    }
    let printed = |byte: &u8| !byte.is_ascii_control() || byte.is_ascii_whitespace();
    match start.iter().all(printed) {
        true => found("the file holds text of no known kind").hint(READABLE),
        false => found("the file is neither text nor a zstd frame").hint(READABLE),
    }
}
