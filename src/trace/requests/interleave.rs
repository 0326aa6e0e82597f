//! Interleaves sessions: puts the requests of a trace in the order of their times.
//!
//! A session's times begin with its first request, so all sessions begin together. Among equal times the
//! earlier session's request comes first, and within a session the order is the file's. Blocks are renumbered
//! in order of first appearance.
//!
//! While it runs, it takes 24 bytes for each request (its time, its place, a copy of its record), 4 for
//! each distinct block, and a copy of the references, in addition to the trace. The memory is requested before any is
//! taken.

use super::ledger::{Ledger, Part, no_room};
use super::request::Record;
use crate::error::Result;

/// A block that has not appeared yet.
const UNSEEN: u32 = u32::MAX;

/// Bytes that [`interleave`] takes in addition to the trace and the times.
fn needs(requests: usize, references: usize, distinct: u32) -> u64 {
    let [requests, references] = [requests, references].map(|count| count as u64);
    let words = requests + references + u64::from(distinct);
    4 * words + size_of::<Record>() as u64 * requests
}

/// Puts the requests in the order of `seconds`. Returns false if all times are equal and give no order.
pub(super) fn interleave(
    records: &mut Vec<Record>,
    blocks: &mut Vec<u32>,
    distinct: u32,
    seconds: &[f64],
    ledger: &Ledger<'_>,
) -> Result<bool> {
    if seconds.array_windows().all(|[a, b]| a == b) {
        return Ok(false);
    }
    ledger.set(Part::Interleaving, needs(records.len(), blocks.len(), distinct)).map_err(|e| {
        e.hint(
            "allow more with --memory SIZE, or leave sessions as the file has them with --one-after-another",
        )
    })?;
    let full = |_| no_room("the sessions' requests in the order of their times");
    let mut order: Vec<u32> = Vec::new();
    order.try_reserve_exact(records.len()).map_err(full)?;
    // REQUESTS_MAX is below 2^32.
    order.extend(0..records.len() as u32);
    let time = |i: &u32| seconds.get(*i as usize).copied().unwrap_or(0.0);
    order.sort_unstable_by(|a, b| time(a).total_cmp(&time(b)).then(a.cmp(b)));
    let (mut sorted, mut moved, mut names) = (Vec::new(), Vec::new(), Vec::new());
    sorted.try_reserve_exact(records.len()).map_err(full)?;
    moved.try_reserve_exact(blocks.len()).map_err(full)?;
    names.try_reserve_exact(distinct as usize).map_err(full)?;
    names.resize(distinct as usize, UNSEEN);
    let mut next = 0;
    for i in order.iter().map(|i| *i as usize) {
        let Some(record) = records.get(i) else { continue };
        let start = i.checked_sub(1).and_then(|before| records.get(before)).map_or(0, |before| before.end);
        let own = blocks.get(start as usize..record.end as usize).unwrap_or_default();
        for block in own {
            // Every block is below `distinct`.
            let Some(name) = names.get_mut(*block as usize) else { continue };
            if *name == UNSEEN {
                *name = next;
                next += 1;
            }
            moved.push(*name);
        }
        // REFERENCES_MAX is below 2^32.
        sorted.push(Record { end: moved.len() as u32, ..*record });
    }
    (*records, *blocks) = (sorted, moved);
    Ok(true)
}
