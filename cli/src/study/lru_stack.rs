//! The production rule without its pools, for sizes whose scans would take longer than the rest of the replay.
//!
//! A pool scans all slots of a sequence in every step. That is fast at the budgets of engines, and takes hours for
//! millions of slots of which each step selects one. A pool that can hold every step's selection holds the newest rows
//! of one order (`forebay::study::StackDistances` explains why), so a selected row is resident exactly if its stack
//! distance is at most the number of slots. Hits and misses of every step equal those of the pools; the work is
//! proportional to the selections, at any number of slots.
//!
//! It does not cover pools that are smaller than a step's selection, which keep no common order.

use forebay::study::LruStack;
use forebay::trace::{Header, SelectionTrace};
use forebay::{Error, Kind, Result, Shape};

use super::pools::{self, Outcome, Setting};
use super::reserve;

/// The most slots that the pools of one replay of one size may scan, all steps and layers together.
pub const SCANNED_MAX: u64 = 1 << 34;

/// Positions whose marks a step scans in the time of one slot.
const MARKS: u64 = 16;

/// Bytes that the LRU stack holds for each token.
const TOKEN: u64 = 48;

/// Slots that pools would scan, with the marks of positions converted by time.
fn scanned(header: &Header, setting: Setting, slots: &[u32]) -> u64 {
    let tokens = u64::from(header.decode_start) + u64::from(setting.steps) * u64::from(setting.mtp);
    let slots: u64 = slots.iter().map(|slots| u64::from(*slots).min(tokens)).sum();
    let marks = u64::from(header.layers) * (tokens / MARKS);
    (u64::from(setting.steps) + u64::from(setting.warmup)).saturating_mul(slots + marks)
}

/// The implementation that replays a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The production pools.
    Pools,
    /// The LRU stack, if the pools would scan more than [`SCANNED_MAX`] slots.
    Stack,
}

impl How {
    /// The implementation for a replay of this setting, with slots by layer.
    pub fn of(header: &Header, setting: Setting, slots: &[u32]) -> How {
        if scanned(header, setting, slots) <= SCANNED_MAX { How::Pools } else { How::Stack }
    }
}

/// Refuses pools of `slots` a layer that cannot be counted for sure. Pools that hold any step's selection can, and so
/// can small pools of traces that are short enough. For others the replay finds out.
pub fn can_count(header: &Header, setting: Setting) -> bool {
    let slots = vec![setting.slots; header.layers as usize];
    let least = u64::from(header.k) * u64::from(setting.mtp);
    u64::from(setting.slots) >= least || How::of(header, setting, &slots) == How::Pools
}

fn too_few(rows: u64, slots: u32) -> Error {
    Error::new(Kind::OutOfRange, "replay")
        .at("a step may select more rows than there are slots, and the trace is too long for such pools")
        .with("rows", rows)
        .with("slots", slots)
        .hint("ask for more slots, or cut the trace to fewer steps")
}

/// Bytes that a replay of this setting holds in addition to the trace, with the same number of slots in each layer.
///
/// # Errors
/// Errors of invalid pools.
pub fn needs(header: &Header, shape: &Shape, setting: Setting) -> Result<u64> {
    let slots = vec![setting.slots; header.layers as usize];
    if How::of(header, setting, &slots) == How::Pools {
        return pools::needs(header, shape, setting, &slots);
    }
    let tokens = u64::from(header.decode_start) + u64::from(setting.steps) * u64::from(setting.mtp);
    Ok(TOKEN * tokens + 16 * u64::from(header.k) * u64::from(setting.mtp))
}

/// Replays the trace on the host with the same number of slots in each layer. Calls `progress` once for each step.
///
/// # Errors
/// As [`replay_by_layer`].
pub fn replay(
    trace: &SelectionTrace,
    shape: &Shape,
    setting: Setting,
    progress: impl FnMut(),
) -> Result<Outcome> {
    let slots = vec![setting.slots; trace.header().layers as usize];
    match How::of(trace.header(), setting, &slots) {
        How::Stack => stacked(trace, setting, &slots, progress),
        How::Pools => pools::replay(trace, shape, setting, progress),
    }
}

/// Replays the trace on the host with slots by layer. Calls `progress` once for each step.
///
/// # Errors
/// [`Kind::OutOfRange`] if a step selects more rows than a stack has slots; [`Kind::OutOfMemory`]; any other error is
/// a defect.
pub fn replay_by_layer(
    how: How,
    trace: &SelectionTrace,
    shape: &Shape,
    setting: Setting,
    slots: &[u32],
    progress: impl FnMut(),
) -> Result<Outcome> {
    match how {
        How::Stack => stacked(trace, setting, slots, progress),
        How::Pools => pools::replay_by_layer(trace, shape, setting, slots, progress),
    }
}

/// The state of one layer.
struct Lane<'a> {
    order: LruStack,
    rows: Vec<u32>,
    slots: u32,
    found: &'a mut (u64, u64),
}

impl Lane<'_> {
    /// The committed rows of a step, below `length`, ascending and without duplicates.
    fn select<'s>(&mut self, sets: impl Iterator<Item = &'s [u32]>, length: u32) -> Result<()> {
        self.rows.clear();
        for set in sets {
            reserve::grow(&mut self.rows, set.len())?;
            self.rows.extend(set.iter().filter(|position| **position < length));
        }
        self.rows.sort_unstable();
        self.rows.dedup();
        match self.rows.len() <= self.slots as usize {
            true => Ok(()),
            false => Err(too_few(self.rows.len() as u64, self.slots)),
        }
    }

    /// Counts the misses among the selected rows.
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

/// Counts what the pools would count, without them.
fn stacked(
    trace: &SelectionTrace,
    setting: Setting,
    slots: &[u32],
    mut progress: impl FnMut(),
) -> Result<Outcome> {
    let Setting { warmup, mtp, steps, .. } = setting;
    let header = trace.header();
    let (layers, start) = (header.layers, header.decode_start);
    let misses = reserve::filled(steps as usize, 0)?;
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
            // Layers run one after another; steps are counted over all of them.
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
    use crate::study::pools;

    /// Every step and layer of the demo's selections has the counts of the production pools, at sizes above a step's
    /// rows.
    #[test]
    fn the_lru_stack_equals_the_pools() {
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

    /// The method that runs is the one chosen from the header alone.
    #[test]
    fn the_header_decides_the_method_and_its_memory() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst");
        let demo = SelectionTrace::read(&path).unwrap().header().clone();
        let long = Header { layers: 1024, k: 64, decode_start: 1 << 18, ..demo.clone() };
        let shape = Shape::DEEPSEEK_V3_2;
        let at = |slots, steps| Setting { slots, warmup: 0, mtp: 1, steps };
        let how = |header: &Header, at: Setting| How::of(header, at, &vec![at.slots; header.layers as usize]);
        assert_eq!((how(&demo, at(1000, 60)), how(&long, at(1 << 17, 4096))), (How::Pools, How::Stack));
        // Eight equal steps go through pools, which have tables of every layer.
        assert_eq!(how(&long, at(1 << 17, 8)), How::Pools);
        let bytes = [4096, 8].map(|steps| needs(&long, &shape, at(1 << 17, steps)).unwrap());
        assert!(bytes[0] < 1 << 24 && bytes[1] > 1 << 30, "{bytes:?}");
        assert!(!can_count(&long, at(63, 1 << 20)) && can_count(&long, at(64, 1 << 20)));
        assert!(can_count(&demo, at(63, 60)));
    }
}
