//! Selection traces as replays read them: with unused positions removed, and only after the memory for them is
//! allowed.

use std::path::Path;

use forebay::trace::{Header, Promise, SelectionTrace};
use forebay::{Error, Kind, Result};

use super::allowance::Allowance;
use crate::present::output::echo;

/// A selection trace for replays, and the header as recorded; sizes and reports use the recorded one.
pub struct Recorded {
    /// As recorded.
    pub header: Header,
    /// The replayed trace; its prompt may be shorter.
    pub trace: SelectionTrace,
}

/// Bytes of the decoded sets.
fn decoded(header: &Header) -> u64 {
    4 * header.members()
}

/// Whether tables over the whole context would hold more than the trace.
fn is_sparse(header: &Header) -> bool {
    u64::from(header.layers) * u64::from(header.context) > header.members()
}

/// Reads a trace for replays. If tables over its whole context would hold more than the trace does, only the positions
/// that it names remain. The counts are the same.
///
/// `needs` computes from two headers, the recorded and the replayed one, how much the replay holds in addition to the
/// trace. The limit is checked before the trace is decoded if the header suffices, and before a recording grows.
///
/// # Errors
/// Errors of [`SelectionTrace::read`], of `needs`, and of the allowance.
pub fn read(
    path: &Path,
    allowance: &Allowance,
    needs: impl Fn(&Header, &Header) -> Result<u64>,
) -> Result<Recorded> {
    let ask = |promise: Promise<'_>| match promise {
        // The number of named positions is not known yet.
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

/// The error with the trace's name, and a hint for pools that are too large.
pub fn named(e: Error, path: &Path) -> Error {
    let too_large = matches!(e.kind(), Kind::OutOfMemory | Kind::Overflow);
    let place = match e.place() {
        "" => echo(path.display()),
        place => format!("{}: {place}", echo(path.display())),
    };
    let e = e.at(place);
    if too_large { e.hint("pass a smaller --prompt-share or --slots") } else { e }
}
