//! A selection trace in memory: every set of every step and layer, ascending, in one flat vector.
//!
//! All sets of a step have the same size, min(k, position + 1), so a set's place follows from its step and
//! layer, without a table of offsets.

use super::header::{Header, MEMBERS_MAX};
use crate::error::{Error, Kind, Result};

/// The memory that a file will need, before it is taken: see [`SelectionTrace::read_asking`].
#[derive(Clone, Copy, Debug)]
pub enum Promise<'a> {
    /// A finished trace, with its header; nothing is decoded yet.
    Trace(&'a Header),
    /// A recording, which grows step by step: the number of its positions including the next step's.
    Recording(u64),
}

/// The function that is asked.
pub(super) type Ask<'a> = dyn Fn(Promise<'_>) -> Result<()> + 'a;

/// The selections of one sequence, step by step and layer by layer. Checked: every set ascends strictly,
/// has min(k, position + 1) positions, and none beyond its query's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectionTrace {
    header: Header,
    members: Vec<u32>,
}

impl SelectionTrace {
    /// A trace of `members`: all sets one after the other, by step, then by layer, each ascending.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] if the header contradicts itself or the members, or if a set is invalid.
    pub fn new(header: Header, members: Vec<u32>) -> Result<SelectionTrace> {
        header.check(MEMBERS_MAX)?;
        let wanted = header.members_before(header.steps);
        if members.len() as u64 != wanted {
            return Err(Error::new(Kind::BadFormat, "new trace")
                .at("number of members")
                .with("value", members.len() as u64)
                .with("wanted", wanted));
        }
        let trace = SelectionTrace { header, members };
        for step in 0..trace.header.steps {
            for layer in 0..trace.header.layers {
                let set = trace.selection(step, layer);
                let ascends = set.array_windows().all(|[a, b]| a < b);
                if !ascends || set.last().is_some_and(|p| *p > trace.header.position(step)) {
                    return Err(Error::new(Kind::BadFormat, "new trace")
                        .at("a set does not ascend to its query's position at most")
                        .with("step", step)
                        .with("layer", layer));
                }
            }
        }
        Ok(trace)
    }

    /// Header and members, which [`SelectionTrace::of_parts`] joins again.
    pub(super) fn into_parts(self) -> (Header, Vec<u32>) {
        (self.header, self.members)
    }

    /// A trace of parts that are known to match.
    pub(super) fn of_parts(header: Header, members: Vec<u32>) -> SelectionTrace {
        SelectionTrace { header, members }
    }

    /// The trace's header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The positions that `step` selected in `layer` (both from 0), ascending; empty for a step or layer
    /// that the trace does not have.
    pub fn selection(&self, step: u32, layer: u32) -> &[u32] {
        if step >= self.header.steps || layer >= self.header.layers {
            return &[];
        }
        let size = self.header.set_size(step) as usize;
        let start = self.header.members_before(step) as usize + layer as usize * size;
        self.members.get(start..start + size).unwrap_or_default()
    }

    /// The number of selected positions of all steps and layers.
    pub fn members(&self) -> u64 {
        self.members.len() as u64
    }
}
