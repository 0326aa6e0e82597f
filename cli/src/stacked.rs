//! The production rule without its pools, for sizes whose scans would take longer than the trace is.
//!
//! A pool passes over all slots of a sequence in every step: a vector's work for the budgets that engines have, and
//! hours for millions of slots of which each step selects one. Where a pool holds what each step selects, it holds the
//! newest rows of one order (`forebay::residency::Depths` says why), so a selected row is resident exactly when it
//! stands no deeper than there are slots. Hits and misses of every step are those of the pools, to the last one; the
//! work is in proportion to the selections, whatever the slots.
//!
//! What it does not do: pools that are smaller than a step's selection, whose rule knows no common order.

use forebay::residency::LruStack;
use forebay::trace::{Header, SelectionTrace};
use forebay::{Error, Kind, Result, Shape};

use crate::pools::{self, Outcome, Setting};
use crate::room;

/// Slots that the pools of one replay may pass over, all steps and layers together: half a minute's work at most.
pub const SCANNED_MAX: u64 = 1 << 34;

/// Positions of which a step passes over the marks in the time of one slot.
const MARKS: u64 = 16;

/// Bytes that the stack holds for each token.
const TOKEN: u64 = 48;

/// Slots that pools would pass over, and marks of positions in their time.
fn scanned(header: &Header, setting: Setting, slots: &[u32]) -> u64 {
    let tokens = u64::from(header.decode_start) + u64::from(setting.steps) * u64::from(setting.mtp);
    let slots: u64 = slots.iter().map(|slots| u64::from(*slots).min(tokens)).sum();
    let marks = u64::from(header.layers) * (tokens / MARKS);
    (u64::from(setting.steps) + u64::from(setting.warmup)).saturating_mul(slots + marks)
}

/// Bytes that [`replay`] holds beside the trace.
///
/// # Errors
/// Those of pools that cannot be.
pub fn needs(header: &Header, shape: &Shape, setting: Setting, slots: &[u32]) -> Result<u64> {
    if scanned(header, setting, slots) <= SCANNED_MAX {
        return pools::needs(header, shape, setting, slots);
    }
    let tokens = u64::from(header.decode_start) + u64::from(setting.steps) * u64::from(setting.mtp);
    Ok(TOKEN * tokens + 16 * u64::from(header.k) * u64::from(setting.mtp))
}

/// Replays the trace on the host, with slots by layer or as many in each: through the production pools, or as these
/// count where they would pass over more than [`SCANNED_MAX`] slots. Calls `progress` once for each step.
///
/// # Errors
/// [`Kind::OutOfRange`] where the pools would take too long and a step selects more rows than there are slots;
/// [`Kind::OutOfMemory`]; anything else is a defect.
pub fn replay(
    trace: &SelectionTrace,
    shape: &Shape,
    setting: Setting,
    slots: Option<&[u32]>,
    progress: impl FnMut(),
) -> Result<Outcome> {
    let uniform = vec![setting.slots; trace.header().layers as usize];
    let by_layer = slots.unwrap_or(&uniform);
    match (scanned(trace.header(), setting, by_layer) <= SCANNED_MAX, slots) {
        (false, _) => stacked(trace, setting, by_layer, progress),
        (true, None) => pools::replay(trace, shape, setting, progress),
        (true, Some(slots)) => pools::replay_by_layer(trace, shape, setting, slots, progress),
    }
}

/// One layer on its way.
struct Lane<'a> {
    order: LruStack,
    rows: Vec<u32>,
    slots: u32,
    found: &'a mut (u64, u64),
}

impl Lane<'_> {
    /// The committed rows of a step, below `length`, ascending and each once.
    fn select<'s>(&mut self, sets: impl Iterator<Item = &'s [u32]>, length: u32) -> Result<()> {
        self.rows.clear();
        for set in sets {
            room::grow(&mut self.rows, set.len())?;
            self.rows.extend(set.iter().filter(|position| **position < length));
        }
        self.rows.sort_unstable();
        self.rows.dedup();
        match self.rows.len() <= self.slots as usize {
            true => Ok(()),
            false => Err(Error::new(Kind::OutOfRange, "replay")
                .at("a step selects more rows than there are slots, in a trace too long for such pools")
                .with("rows", self.rows.len() as u64)
                .with("slots", self.slots)
                .hint("ask for more slots, or cut the trace to fewer steps")),
        }
    }

    /// Counts the rows selected: how many are missed.
    fn count(&mut self) -> u64 {
        let (mut hits, slots) = (0, self.slots);
        self.order.depths(&self.rows, |depth| hits += u64::from(depth > 0 && depth <= slots));
        let misses = self.rows.len() as u64 - hits;
        *self.found = (self.found.0 + hits, self.found.1 + misses);
        misses
    }

    fn touch(&mut self) {
        self.order.touch(self.rows.iter().copied());
    }
}

/// What the pools count, without them.
fn stacked(
    trace: &SelectionTrace,
    setting: Setting,
    slots: &[u32],
    mut progress: impl FnMut(),
) -> Result<Outcome> {
    let Setting { warmup, mtp, steps, .. } = setting;
    let header = trace.header();
    let (layers, start) = (header.layers, header.decode_start);
    let misses = room::filled(steps as usize, 0)?;
    let mut outcome = Outcome { layers: vec![(0, 0); layers as usize], steps: misses };
    let mut done = 0;
    for ((layer, found), slots) in (0..layers).zip(&mut outcome.layers).zip(slots) {
        let order = LruStack::new(start + steps * mtp)?;
        let mut lane = Lane { order, rows: Vec::new(), slots: *slots, found };
        for step in header.warm_steps - warmup..header.warm_steps {
            lane.select(std::iter::once(trace.selection(step, layer)), start)?;
            lane.touch();
        }
        for (group, missed) in (0..steps).zip(&mut outcome.steps) {
            let length = start + group * mtp;
            if group > 0 {
                lane.order.touch(length - mtp..length);
            }
            let first = header.warm_steps + group * mtp;
            lane.select((first..first + mtp).map(|step| trace.selection(step, layer)), length)?;
            *missed += lane.count();
            lane.touch();
            // Layers come one after another, steps are counted of all of them together.
            done += 1;
            if done == layers {
                done = 0;
                progress();
            }
        }
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use forebay::Shape;

    use super::*;
    use crate::pools;

    /// The demo's selections at sizes above what a step selects: every step and layer as the production pools count.
    #[test]
    fn the_stack_counts_what_the_pools_count() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst");
        let trace = SelectionTrace::read(&path).unwrap();
        let header = trace.header();
        for (mtp, warmup, slots) in [(1, 0, 600), (1, 32, 1000), (2, 32, 1100), (3, 5, 3000)] {
            let setting = Setting { slots, warmup, mtp, steps: 60 / mtp };
            let mut by_layer = vec![slots; header.layers as usize];
            by_layer[0] += 100;
            let (mut a, mut b) = (0, 0);
            let device = forebay::device::host::HostDevice::new(Default::default());
            let shape = Shape::DEEPSEEK_V3_2;
            let pools = pools::replay_on(device, &trace, &shape, setting, &by_layer, || a += 1).unwrap();
            let stack = stacked(&trace, setting, &by_layer, || b += 1).unwrap();
            assert!(pools.steps.iter().any(|misses| *misses > 0));
            assert_eq!((pools, a), (stack, b), "{setting:?}");
        }
        let setting = Setting { slots: 10, warmup: 0, mtp: 1, steps: 5 };
        let e = stacked(&trace, setting, &vec![10; header.layers as usize], || ()).unwrap_err();
        assert_eq!((e.kind(), e.number("slots")), (Kind::OutOfRange, Some(10)));
    }
}
