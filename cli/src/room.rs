//! Memory that a study takes: how much it may be, asked before any of it is taken, and the error that says it is
//! not there.
//!
//! A replay may hold its decoded trace and [`BESIDE`], or what `--memory` says. What it will hold is computed from the
//! trace's header, so a file of a few hundred bytes that declares thousands of layers is refused at once, with
//! both numbers, and not when the machine has no more.

use std::collections::VecDeque;
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

fn too_much<T>(count: usize) -> Error {
    let bytes = (size_of::<T>() as u64).saturating_mul(count as u64);
    Error::new(Kind::OutOfMemory, "study policies").at("tables").with("bytes", bytes)
}

/// An empty vector with room for `count`.
pub fn vector<T>(count: usize) -> Result<Vec<T>> {
    let mut room = Vec::new();
    room.try_reserve_exact(count).map_err(|_| too_much::<T>(count))?;
    Ok(room)
}

/// An empty queue with room for `count`.
pub fn queue<T>(count: usize) -> Result<VecDeque<T>> {
    let mut room = VecDeque::new();
    room.try_reserve_exact(count).map_err(|_| too_much::<T>(count))?;
    Ok(room)
}

/// `count` times `value`.
pub fn filled<T: Clone>(count: usize, value: T) -> Result<Vec<T>> {
    let mut all = vector(count)?;
    all.resize(count, value);
    Ok(all)
}

/// Room for `more` in a vector that grows.
pub fn grow<T>(all: &mut Vec<T>, more: usize) -> Result<()> {
    all.try_reserve(more).map_err(|_| too_much::<T>(all.len().saturating_add(more)))
}
