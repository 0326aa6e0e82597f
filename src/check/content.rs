//! What bytes hold, by interval, as far as it is known.
//!
//! A map knows the contents of one space. Intervals are disjoint, and neighbours of one content are one interval, so
//! what is kept is bounded by the places that differ, however often they are written. Bytes that no write has declared
//! take no memory.

use std::collections::BTreeMap;
use std::fmt;

/// What bytes hold: the weights of one layer, as of one version. The checker only compares them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// The layer.
    pub layer: u32,
    /// The version of its weights.
    pub version: u32,
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {} version {}", self.layer, self.version)
    }
}

/// The known contents of a space: by an interval's first place, the place after its last one, and what it holds.
#[derive(Debug, Default)]
pub(super) struct Held(BTreeMap<u64, (u64, Content)>);

impl Held {
    /// The number of intervals.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// What `from..to` holds, in order and without gaps: the place after each part, and its content.
    pub(super) fn parts(&self, from: u64, to: u64) -> Vec<(u64, Option<Content>)> {
        let (mut parts, mut at) = (Vec::new(), from);
        if from >= to {
            return parts;
        }
        let before = self.0.range(..=from).next_back();
        let others = self.0.range(from..to).filter(|(start, _)| **start > from);
        for (start, (end, content)) in before.into_iter().chain(others).filter(|(_, (end, _))| *end > from) {
            if at < *start {
                parts.push((*start, None));
            }
            at = to.min(*end);
            parts.push((at, Some(*content)));
        }
        if at < to {
            parts.push((to, None));
        }
        parts
    }

    /// Notes what `from..to` holds from now on; `None` for something that is not known. `from` is below `to`.
    pub(super) fn set(&mut self, from: u64, to: u64, content: Option<Content>) {
        let (mut from, mut to) = (from, to);
        // Intervals that touch this one, also at its ends, where a neighbour may hold the same.
        let before = self.0.range(..from).next_back().filter(|(_, (end, _))| *end >= from);
        let first = before.map_or(from, |(start, _)| *start);
        let touched: Vec<(u64, (u64, Content))> =
            self.0.range(first..=to).map(|(start, held)| (*start, *held)).collect();
        for (start, (end, held)) in touched {
            self.0.remove(&start);
            if content == Some(held) {
                (from, to) = (from.min(start), to.max(end));
                continue;
            }
            if start < from {
                self.0.insert(start, (from, held));
            }
            if end > to {
                self.0.insert(start.max(to), (end, held));
            }
        }
        if let Some(content) = content {
            self.0.insert(from, (to, content));
        }
    }
}
