//! How much memory a replay may hold, asked before any of it is taken.
//!
//! A replay may hold its decoded trace and [`BESIDE`], or what `--memory` says. What it will hold is computed from the
//! trace's header before the trace is decoded, so a file of a few hundred bytes that declares thousands of layers
//! is refused at once, with both numbers, and not when the machine has no more. Of what has no such header (a
//! recording, a request trace) it is asked as it is read, before each growth.

use std::path::Path;

use forebay::trace::requests::Taken;
use forebay::{Error, Kind, Result};

use super::sizes;
use crate::present::numbers;
use crate::present::output::echo;

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

/// Whose memory is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replayed {
    /// Selections, at sizes of pools that were named.
    Selections,
    /// Selections, where a plan or a simulation needs their misses.
    Misses,
    /// Requests.
    Requests,
}

impl Replayed {
    /// What helps.
    const fn hint(self) -> &'static str {
        match self {
            Replayed::Selections => {
                "allow more with --memory SIZE, pass a smaller --prompt-share or --slots, or cut the trace to fewer \
                 layers"
            }
            Replayed::Misses => {
                "allow more with --memory SIZE, pass a smaller --ratio, or cut the trace to fewer layers"
            }
            Replayed::Requests => "allow more with --memory SIZE, or cut the trace to fewer requests",
        }
    }
}

/// What the replay of one kind of trace may hold.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// Of what.
    pub of: Replayed,
    /// What `--memory` says.
    pub memory: Option<u64>,
}

impl Allowance {
    /// Refuses a replay that holds `beside` bytes beside a decoded trace of `trace` bytes where fewer are allowed.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`] names both numbers and the option, and no file yet.
    pub fn check(&self, trace: u64, beside: u64) -> Result<()> {
        let needs = trace.saturating_add(beside).saturating_add(PROGRAM);
        let allowed = self.memory.unwrap_or(trace.saturating_add(BESIDE));
        if needs <= allowed {
            return Ok(());
        }
        let [needs, allowed] = [needs, allowed].map(|bytes| numbers::size(bytes as f64));
        Err(Error::new(Kind::OutOfMemory, "replay")
            .at(format!("needs {needs} of memory, allowed are {allowed}"))
            .hint(self.of.hint()))
    }

    /// The same of the trace at `path`.
    ///
    /// # Errors
    /// Likewise, with the file.
    pub fn check_of(&self, path: &Path, trace: u64, beside: u64) -> Result<()> {
        self.check(trace, beside).map_err(|e| {
            let place = format!("{}: {}", echo(path.display()), e.place());
            e.at(place)
        })
    }

    /// Whether a request trace that is being read may take as much.
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
    fn what_is_held_beside_a_trace_is_bounded_and_all_of_it_where_something_is_said() {
        let usual = Allowance { of: Replayed::Requests, memory: None };
        assert!(usual.check(1 << 30, BESIDE - PROGRAM).is_ok());
        assert!(usual.check(0, BESIDE - PROGRAM + 1).is_err());
        let said = Allowance { memory: Some(PROGRAM + 100), ..usual };
        assert!(said.check(60, 40).is_ok() && said.check(61, 40).is_err() && said.check(60, 41).is_err());
        assert!(said.check(u64::MAX, u64::MAX).is_err());
    }
}
