//! Decodes the sets of a trace or of a recording, one after the other.
//!
//! A set is decoded from its predecessor in the same vector by one merge of three ascending lists (the old set, the
//! added positions, the dropped ranks), which detects every contradiction. Memory grows only with sets that were
//! decoded and found valid.

use super::header::Header;
use super::selection::SelectionTrace;
use super::source::{Source, malformed};
use crate::error::{Error, Kind, Result};

/// The least growth of memory, in members.
const GROWTH_LEAST: u64 = 1 << 12;

/// The sets decoded so far, and buffers for the current one.
pub(super) struct Body {
    pub header: Header,
    /// The possible number of members.
    most: u64,
    members: Vec<u32>,
    added: Vec<u32>,
    dropped: Vec<u32>,
    set: Vec<u32>,
}

impl Body {
    /// For the sets of `header`, in no more than `most` members.
    pub fn new(header: Header, most: u64) -> Self {
        let most = most.min(header.members_before(header.steps));
        Body { header, most, members: Vec::new(), added: Vec::new(), dropped: Vec::new(), set: Vec::new() }
    }

    /// Decodes the set of `step` and `layer`, the next in the file, and appends it.
    pub fn set(&mut self, source: &mut Source<'_>, step: u32, layer: u32) -> Result<()> {
        let size = self.header.set_size(step) as usize;
        let place = source.offset();
        let (adds, drops) = (usize::from(source.u16()?), usize::from(source.u16()?));
        let old = match step.checked_sub(1) {
            None => &[][..],
            Some(prior) => {
                let old_size = self.header.set_size(prior) as usize;
                let start = self.header.members_before(prior) as usize + layer as usize * old_size;
                self.members.get(start..start + old_size).unwrap_or_default()
            }
        };
        if drops > old.len() || old.len() - drops + adds != size {
            return Err(malformed("the set has the wrong size", place)
                .with("value", (old.len() + adds).saturating_sub(drops) as u64)
                .with("wanted", size as u64));
        }
        let position = u64::from(self.header.position(step));
        let beyond = "a position lies beyond the query's own";
        ascending(source, adds, position, beyond, &mut self.added)?;
        let ranks = (old.len() as u64).saturating_sub(1);
        ascending(source, drops, ranks, "a rank lies beyond the set", &mut self.dropped)?;
        merge(old, &self.added, &self.dropped, &mut self.set).map_err(|twice| {
            malformed("an added position was in the set already", place).with("position", twice)
        })?;
        self.append()
    }

    /// Appends the set of `layer` at `step` again, as the next layer's.
    pub fn again(&mut self, step: u32, layer: u32) -> Result<()> {
        let size = self.header.set_size(step) as usize;
        let start = self.header.members_before(step) as usize + layer as usize * size;
        self.set.clear();
        self.set.extend_from_slice(self.members.get(start..start + size).unwrap_or_default());
        self.append()
    }

    /// Discards the sets of `step` and of all later steps.
    pub fn forget_from(&mut self, step: u32) {
        self.members.truncate(self.header.members_before(step) as usize);
    }

    /// The trace of the sets decoded, under `header`.
    pub fn trace(self, header: Header) -> SelectionTrace {
        SelectionTrace::of_parts(header, self.members)
    }

    /// Appends the current set. Memory at most doubles, and never exceeds the possible members.
    fn append(&mut self) -> Result<()> {
        let length = self.members.len();
        if self.members.capacity() - length < self.set.len() {
            let growth = (length as u64).max(GROWTH_LEAST).min(self.most.saturating_sub(length as u64));
            let growth = (growth as usize).max(self.set.len());
            self.members.try_reserve_exact(growth).map_err(|_| {
                Error::new(Kind::OutOfMemory, "read trace")
                    .at("the decoded trace")
                    .with("bytes", 4 * (length + growth) as u64)
                    .with("whole at most", 4 * self.most)
                    .hint("free memory, or cut the trace to fewer steps or layers")
            })?;
        }
        self.members.extend_from_slice(&self.set);
        Ok(())
    }
}

/// Reads `count` gap-coded values, none above `most`, into `out`.
fn ascending(
    source: &mut Source<'_>,
    count: usize,
    most: u64,
    beyond: &'static str,
    out: &mut Vec<u32>,
) -> Result<()> {
    out.clear();
    let mut least = 0_u64;
    for _ in 0..count {
        let place = source.offset();
        let value = least + u64::from(source.varint()?);
        if value > most {
            return Err(malformed(beyond, place).with("value", value).with("most", most));
        }
        out.push(value as u32);
        least = value + 1;
    }
    Ok(())
}

/// Writes `old` without the ranks `dropped`, and with `added` inserted, ascending, to `out`. All lists ascend.
/// Fails with a position that is both old and added.
fn merge(old: &[u32], added: &[u32], dropped: &[u32], out: &mut Vec<u32>) -> std::result::Result<(), u32> {
    out.clear();
    let mut added = added.iter().copied().peekable();
    let mut dropped = dropped.iter().map(|rank| *rank as usize).peekable();
    for (rank, position) in old.iter().copied().enumerate() {
        while let Some(new) = added.next_if(|new| *new < position) {
            out.push(new);
        }
        if added.peek() == Some(&position) {
            return Err(position);
        }
        if dropped.next_if_eq(&rank).is_none() {
            out.push(position);
        }
    }
    out.extend(added);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_by_the_largest_possible_number_of_members() {
        // A recording's header allows steps to the longest context; the declared maximum holds.
        let mut body = Body::new(Header::example(3, 50, 100, 1, 1 << 20), 150 * 40);
        for _ in 0..3 * 40 {
            body.set = (0..50).collect();
            body.append().unwrap();
            assert!(body.members.capacity() <= 150 * 40, "{}", body.members.capacity());
        }
        assert_eq!(body.members.len(), 150 * 40);
    }
}
