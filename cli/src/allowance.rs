//! How much memory a replay may hold, asked before any of it is taken.
//!
//! A replay may hold its decoded trace and [`BESIDE`], or what `--memory` says. What it will hold is computed from the
//! trace's header, so a file of a few hundred bytes that declares thousands of layers is refused at once, with
//! both numbers, and not when the machine has no more.

use std::path::Path;

use forebay::trace::SelectionTrace;
use forebay::trace::requests::RequestTrace;
use forebay::{Error, Kind, Result};

use crate::output::echo;
use crate::{report, sizes};

/// What a replay may hold beside its decoded trace where nothing is said.
pub const BESIDE: u64 = 500 * 1000 * 1000;

/// The program itself, the stacks of its threads, what its allocator keeps, and what is written.
const PROGRAM: u64 = 48 << 20;

/// What a replay may hold.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct MemoryArguments {
    /// The most memory that a replay may hold, such as 8GiB; what needs more is refused before it is taken [default:
    /// the decoded trace and 500MB].
    #[arg(long, value_name = "SIZE", value_parser = sizes::some_bytes)]
    pub memory: Option<u64>,
}

/// The decoded trace.
pub trait Decoded {
    /// Bytes that it holds.
    fn bytes(&self) -> u64;
}

impl Decoded for SelectionTrace {
    fn bytes(&self) -> u64 {
        4 * self.members()
    }
}

impl Decoded for RequestTrace {
    fn bytes(&self) -> u64 {
        4 * self.references().len() as u64 + 12 * self.requests() as u64
    }
}

/// Refuses a replay that holds `needs` bytes beside the decoded trace where fewer are allowed.
///
/// # Errors
/// [`Kind::OutOfMemory`] names both numbers and the option.
pub fn check(path: &Path, trace: &impl Decoded, needs: u64, allowed: Option<u64>) -> Result<()> {
    let needs = trace.bytes().saturating_add(needs).saturating_add(PROGRAM);
    let allowed = allowed.unwrap_or(trace.bytes() + BESIDE);
    if needs <= allowed {
        return Ok(());
    }
    let [needs, allowed] = [needs, allowed].map(|bytes| report::size(bytes as f64));
    Err(Error::new(Kind::OutOfMemory, "replay")
        .at(format!("{}: needs {needs} of memory, allowed are {allowed}", echo(path.display())))
        .hint("allow more with --memory SIZE, pass a smaller --ratio or --slots, or cut the trace to fewer layers"))
}
