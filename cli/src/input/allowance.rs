//! The limit on the memory of a replay, checked before the replay takes any of it.
//!
//! A replay may hold its decoded trace and [`BESIDE`] in addition, or as much as `--memory` allows. The need is
//! computed from the trace's header before the trace is decoded. So a file of a few hundred bytes that declares
//! thousands of layers is refused at once, with both numbers, and not when the machine runs out of memory. Inputs
//! without such a header (recordings, request traces) are checked while they are read, before each growth.

use std::path::Path;

use forebay::trace::requests::Taken;
use forebay::{Error, Kind, Result};

use super::sizes;
use crate::present::numbers;
use crate::present::output::echo;

/// Bytes that a replay may hold in addition to its decoded trace by default.
pub const BESIDE: u64 = 500 * 1000 * 1000;

/// The program itself, the stacks of its threads, the memory that its allocator keeps, and the output.
const PROGRAM: u64 = 48 << 20;

/// The memory option of a replay.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct MemoryArguments {
    /// The most memory that a replay may hold, such as 8GiB. A replay that needs more is refused before it takes any
    /// [default: the decoded trace and 500MB].
    #[arg(long, value_name = "SIZE", value_parser = sizes::some_bytes)]
    pub memory: Option<u64>,
}

/// What kind of replay needs the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replayed {
    /// Selection traces, at named pool sizes.
    Selections,
    /// Selection traces whose misses a plan or a simulation needs.
    Misses,
    /// Selection traces that share one total of slots.
    Together,
    /// Request traces.
    Requests,
}

impl Replayed {
    /// The hint of the error.
    const fn hint(self) -> &'static str {
        match self {
            Replayed::Selections => {
                "allow more with --memory SIZE, pass a smaller --prompt-share or --slots, or cut the trace to fewer \
                 layers"
            }
            Replayed::Misses => {
                "allow more with --memory SIZE, pass a smaller --ratio, or cut the trace to fewer layers"
            }
            Replayed::Together => {
                "allow more with --memory SIZE, pass fewer traces, or cut them to fewer layers"
            }
            Replayed::Requests => "allow more with --memory SIZE, or cut the trace to fewer requests",
        }
    }
}

/// The allowance of a replay of one kind of trace.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// The kind of replay.
    pub of: Replayed,
    /// The value of `--memory`.
    pub memory: Option<u64>,
}

impl Allowance {
    /// Refuses a replay whose need, `beside` bytes and a decoded trace of `trace` bytes, exceeds the allowance.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`] names both numbers and the option, but not the file.
    pub fn check(&self, trace: u64, beside: u64) -> Result<()> {
        let needs = trace.saturating_add(beside).saturating_add(PROGRAM);
        let allowed = self.memory.unwrap_or(trace.saturating_add(BESIDE));
        if needs <= allowed {
            return Ok(());
        }
        let [needs, allowed] = [needs, allowed].map(|bytes| numbers::size(bytes as f64));
        Err(Error::new(Kind::OutOfMemory, "replay")
            .at(format!("needs {needs} of memory, but the limit is {allowed}"))
            .hint(self.of.hint()))
    }

    /// As [`Allowance::check`], for the trace at `path`.
    ///
    /// # Errors
    /// As [`Allowance::check`], with the file's name.
    pub fn check_of(&self, path: &Path, trace: u64, beside: u64) -> Result<()> {
        self.check(trace, beside).map_err(|e| {
            let place = format!("{}: {}", echo(path.display()), e.place());
            e.at(place)
        })
    }

    /// Whether a request trace may take as many bytes while it is read.
    ///
    /// # Errors
    /// As [`Allowance::check`].
    pub fn reading(&self, taken: Taken) -> Result<()> {
        self.check(taken.trace, taken.beside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_alongside_a_trace_is_bounded_and_all_memory_where_a_limit_is_given() {
        let usual = Allowance { of: Replayed::Requests, memory: None };
        assert!(usual.check(1 << 30, BESIDE - PROGRAM).is_ok());
        assert!(usual.check(0, BESIDE - PROGRAM + 1).is_err());
        let said = Allowance { memory: Some(PROGRAM + 100), ..usual };
        assert!(said.check(60, 40).is_ok() && said.check(61, 40).is_err() && said.check(60, 41).is_err());
        assert!(said.check(u64::MAX, u64::MAX).is_err());
    }
}
