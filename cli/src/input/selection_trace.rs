//! Selection traces as replays read them: no longer than they are, and not before it is known that they may be held.

use std::path::Path;

use forebay::trace::{Header, Promise, SelectionTrace};
use forebay::{Error, Kind, Result};

use super::allowance::Allowance;
use crate::present::output::echo;

/// A selection trace, and its header as it was recorded: sizes and reports go by that one.
pub struct Recorded {
    /// As recorded.
    pub header: Header,
    /// What is replayed; its prompt may be shorter.
    pub trace: SelectionTrace,
}

/// Bytes of the decoded sets.
fn decoded(header: &Header) -> u64 {
    4 * header.members()
}

/// Whether tables over the whole context would hold more than the trace does.
fn is_sparse(header: &Header) -> bool {
    u64::from(header.layers) * u64::from(header.context) > header.members()
}

/// Reads a trace for replays: over the positions that it names, where tables over its whole context would hold more
/// than it does. The counts are the same.
///
/// `needs` says from headers, the recorded one and that of what is replayed, what the replay holds beside the trace.
/// Whether it may is looked at before the trace is decoded where the header tells, and before a recording grows.
///
/// # Errors
/// Those of [`SelectionTrace::read`], of `needs`, and of the allowance.
pub fn read(
    path: &Path,
    allowance: &Allowance,
    needs: impl Fn(&Header, &Header) -> Result<u64>,
) -> Result<Recorded> {
    let ask = |promise: Promise<'_>| match promise {
        // How many positions are named is not known yet.
        Promise::Trace(header) if is_sparse(header) => allowance.check(decoded(header), 0),
        Promise::Trace(header) => allowance.check(decoded(header), needs(header, header)?),
        Promise::Recording(positions) => allowance.check(4 * positions, 0),
    };
    let trace = SelectionTrace::read_asking(path, ask)?;
    let header = trace.header().clone();
    let trace = if is_sparse(&header) { trace.compact()? } else { trace };
    allowance.check_of(path, decoded(&header), needs(&header, trace.header())?)?;
    Ok(Recorded { header, trace })
}

/// The error with the trace's name, and what helps against pools that are too large.
pub fn named(e: Error, path: &Path) -> Error {
    let too_large = matches!(e.kind(), Kind::OutOfMemory | Kind::Overflow);
    let place = match e.place() {
        "" => echo(path.display()),
        place => format!("{}: {place}", echo(path.display())),
    };
    let e = e.at(place);
    if too_large { e.hint("pass a smaller --prompt-share or --slots") } else { e }
}
