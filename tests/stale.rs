//! Stale reads are found: an engine that reads a layer's window while it holds another layer, or another version, is
//! reported even where nothing races. Published schedules of sharded weights and their mistakes are the controls,
//! written by hand over the watching device: two buffers, a stream for the engine and one for each buffer's pulls.
//!
//! The device is inline, so what its memory holds in the order of enqueueing is there to be looked at: wherever the
//! order accepts a use or calls it stale, the bytes themselves must say the same.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "stale/contents.rs"]
mod contents;

use std::sync::Arc;

use forebay::check::order::Content;
use forebay::check::watch::{Watch, bytes};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Event, Slice, Stream};
use forebay::{Error, Result};

/// The words of a part, and the parts of a window.
const WORDS: usize = 4;
const PARTS: usize = 2;
const PART: u64 = 4 * WORDS as u64;
const WINDOW: u64 = PARTS as u64 * PART;

pub fn is_stale(error: &Error) -> bool {
    error.place().starts_with("stale read: ")
}

/// What a word of memory says: no content is 0.
pub fn stamp(content: Option<Content>) -> u32 {
    content.map_or(0, |content| (content.layer + 1) << 16 | content.version)
}

pub fn content(word: u32) -> Option<Content> {
    Some(Content { layer: (word >> 16).checked_sub(1)?, version: word & 0xFFFF })
}

pub fn words(host: &HostDevice, slice: Slice) -> Vec<u32> {
    let mut bytes = vec![0; slice.bytes() as usize];
    host.read(slice, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

pub fn fill(host: &HostDevice, slice: Slice, content: Option<Content>) {
    let words = stamp(content).to_le_bytes().repeat(slice.bytes() as usize / 4);
    host.write(slice, &words).unwrap();
}

/// The content that a stale read found.
pub fn found(error: &Error) -> Option<Content> {
    let number = |name| error.number(name).map(|number| number as u32);
    Some(Content { layer: number("found layer")?, version: number("found version")? })
}

/// A schedule of uses and pulls.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    layers: u32,
    /// The first layers that stay where they are.
    resident: u32,
    /// Whether a pull takes the buffer of its number, not of its layer.
    ring: bool,
    /// Whether the end of a use is recorded for the other buffer.
    other_parity: bool,
    /// A draft pass that uses the last layer once more, and whether the next pull waits for it.
    draft: Option<bool>,
    /// Whether uses say what they expect.
    expects: bool,
}

const FLOW: Schedule =
    Schedule { layers: 4, resident: 0, ring: false, other_parity: false, draft: None, expects: true };

/// A rank that pulls parts of layers into two buffers.
struct Rig {
    host: Arc<HostDevice>,
    watch: Arc<Watch>,
    compute: Stream,
    pulls: [Stream; 2],
    arrived: [Event; 2],
    released: [Event; 2],
    seen: Event,
    buffers: [Slice; 2],
    /// By layer.
    parts: Vec<[Slice; PARTS]>,
    version: u32,
    /// The uses of sharded layers that were enqueued.
    used: u32,
    /// Uses whose window held something else, whatever the order says.
    wrong: u32,
}

impl Rig {
    fn new(layers: u32, without: Option<u64>) -> Rig {
        let host = HostDevice::new(HostOptions::default());
        let watch = match without {
            Some(number) => Watch::without_wait(host.clone(), number),
            None => Watch::new(host.clone()),
        };
        let memory = watch.allocate(u64::from(layers) * WINDOW).unwrap();
        let at = |layer: u32, index: usize| u64::from(layer) * WINDOW + index as u64 * PART;
        let own = |layer| [0, 1].map(|index| memory.part(at(layer, index), PART).unwrap());
        let [arrived, released] = [(); 2].map(|()| [(); 2].map(|()| watch.event().unwrap()));
        let mut rig = Rig {
            compute: watch.stream().unwrap(),
            pulls: [(); 2].map(|()| watch.stream().unwrap()),
            seen: watch.event().unwrap(),
            buffers: [(); 2].map(|()| watch.allocate(WINDOW).unwrap()),
            parts: (0..layers).map(own).collect(),
            version: 0,
            used: 0,
            wrong: 0,
            arrived,
            released,
            host,
            watch,
        };
        rig.refill().unwrap();
        rig
    }

    /// The owners of all parts write the next version.
    fn refill(&mut self) -> Result<()> {
        self.version += 1;
        for (layer, part) in (0..).zip(&self.parts).flat_map(|(layer, parts)| parts.map(|part| (layer, part)))
        {
            let content = Content { layer, version: self.version };
            self.watch.holds(&part, content)?;
            fill(&self.host, part, Some(content));
        }
        Ok(())
    }

    /// The host waits for all that was enqueued.
    fn settle(&self) {
        for stream in [self.compute, self.pulls[0], self.pulls[1]] {
            self.watch.record(self.seen, stream).unwrap();
            self.watch.synchronize(self.seen).unwrap();
        }
    }

    fn pull_parts(&self, layer: u32, buffer: usize, parts: std::ops::Range<usize>) -> Result<()> {
        parts.into_iter().try_for_each(|index| {
            let target = self.buffers[buffer].part(index as u64 * PART, PART)?;
            self.watch.copy(self.pulls[buffer], self.parts[layer as usize][index], target)
        })
    }

    fn pull(&self, layer: u32, buffer: usize) -> Result<()> {
        self.watch.wait(self.pulls[buffer], self.released[buffer])?;
        self.pull_parts(layer, buffer, 0..PARTS)?;
        self.watch.record(self.arrived[buffer], self.pulls[buffer])
    }

    /// The engine reads a window. Where the order says what it holds, the bytes must agree.
    fn attend(&mut self, window: Slice, layer: u32, expects: bool) -> Result<()> {
        let expected = Content { layer, version: self.version };
        let verdict = match expects {
            true => self.watch.uses(self.compute, "attention", &window, expected),
            false => self.watch.engine(self.compute, "attention", &[bytes(&window, false)]),
        };
        let shown = words(&self.host, window);
        let other = shown.iter().find(|word| **word != stamp(Some(expected)));
        self.wrong += u32::from(other.is_some());
        match &verdict {
            Ok(()) if expects => assert_eq!(other, None),
            Err(error) if is_stale(error) => assert_eq!(other.copied(), Some(stamp(found(error)))),
            _ => {}
        }
        verdict
    }

    /// The layer and the buffer of pull number `number`.
    fn pulled(schedule: &Schedule, number: u32) -> (u32, usize) {
        let ordinal = number % (schedule.layers - schedule.resident);
        let parity = if schedule.ring { number } else { ordinal };
        (schedule.resident + ordinal, parity as usize % 2)
    }

    /// The first two pulls.
    fn start(&self, schedule: &Schedule) -> Result<()> {
        [self.used, self.used + 1].into_iter().try_for_each(|number| {
            let (layer, buffer) = Rig::pulled(schedule, number);
            self.pull(layer, buffer)
        })
    }

    /// A use ends, and the pull after the next begins.
    fn release(&mut self, schedule: &Schedule, buffer: usize) -> Result<()> {
        let recorded = if schedule.other_parity { 1 - buffer } else { buffer };
        self.watch.record(self.released[recorded], self.compute)?;
        let (layer, buffer) = Rig::pulled(schedule, self.used + 2);
        self.used += 1;
        self.pull(layer, buffer)
    }

    fn step(&mut self, schedule: &Schedule) -> Result<()> {
        for layer in 0..schedule.resident {
            let [first, second] = self.parts[layer as usize];
            self.attend(first, layer, schedule.expects)?;
            self.attend(second, layer, schedule.expects)?;
        }
        for layer in schedule.resident..schedule.layers {
            let (own, buffer) = Rig::pulled(schedule, self.used);
            assert_eq!(own, layer);
            let window = self.buffers[buffer];
            self.watch.wait(self.compute, self.arrived[buffer])?;
            self.attend(window, layer, schedule.expects)?;
            let draft = schedule.draft.filter(|_| layer + 1 == schedule.layers);
            if draft != Some(true) {
                self.release(schedule, buffer)?;
            }
            if let Some(waits) = draft {
                self.watch.wait(self.compute, self.arrived[buffer])?;
                self.attend(window, layer, schedule.expects)?;
                if waits {
                    self.release(schedule, buffer)?;
                }
            }
        }
        Ok(())
    }

    fn run(&mut self, schedule: &Schedule, steps: u32) -> Result<()> {
        self.start(schedule)?;
        (0..steps).try_for_each(|_| self.step(schedule))
    }
}

/// Runs three steps; returns the first fault, and how many uses read something else.
fn outcome(schedule: Schedule) -> (Option<Error>, u32) {
    let mut rig = Rig::new(schedule.layers, None);
    let ran = rig.run(&schedule, 3);
    assert_eq!(rig.watch.conflict(), ran.err());
    (rig.watch.conflict(), rig.wrong)
}

#[test]
fn schedules_that_are_right_are_clean() {
    for layers in 1..=62 {
        // An odd number of sharded layers needs one that is resident, or a buffer for each pull in turn.
        let resident = layers % 2;
        let mut right = vec![Schedule { layers, ring: true, ..FLOW }];
        if layers > 1 {
            right.push(Schedule { layers, resident, ..FLOW });
            right.push(Schedule { layers, resident, draft: Some(true), ..FLOW });
        }
        for schedule in right {
            assert_eq!(outcome(schedule), (None, 0), "{schedule:?}");
        }
    }
}

/// An odd number of layers in two buffers by parity: the pull of layer 0 for the next step follows the use of the layer
/// before the last one, and overwrites the last one.
#[test]
fn prefetch_across_steps_in_parity_slots_is_a_stale_read_although_nothing_races() {
    for layers in (3..=61).step_by(2) {
        let wrong = Schedule { layers, ..FLOW };
        let (fault, _) = outcome(wrong);
        let fault = fault.unwrap();
        assert!(is_stale(&fault), "{fault}");
        let numbers = ["expected layer", "expected version", "found layer", "found version"];
        assert_eq!(numbers.map(|name| fault.number(name)), [layers - 1, 1, 0, 1].map(|n| Some(n.into())));
        // Without contents nothing is found, though the last layer of each step is computed from another one's weights.
        assert_eq!(outcome(Schedule { expects: false, ..wrong }), (None, 3));
    }
}

#[test]
fn a_release_that_is_recorded_for_the_other_parity_is_a_race() {
    for (layers, resident) in [(4, 0), (62, 0), (61, 1)] {
        let (fault, _) = outcome(Schedule { layers, resident, other_parity: true, ..FLOW });
        let fault = fault.unwrap();
        assert!(!is_stale(&fault) && fault.place().contains("not ordered after it"), "{fault}");
        assert!(fault.place().contains("copy") && fault.place().contains("attention"), "{fault}");
    }
}

/// Each wait orders something except those of the two first pulls, and without any of the others there is a race.
#[test]
fn each_edge_left_out_is_found() {
    let draft = Schedule { draft: Some(true), ..FLOW };
    for (schedule, needed, idle) in
        [(FLOW, 24, 2), (Schedule { layers: 5, resident: 1, ..FLOW }, 24, 2), (draft, 24, 5)]
    {
        let mut whole = Rig::new(schedule.layers, None);
        whole.run(&schedule, 3).unwrap();
        let mut counts = [0, 0];
        for number in 0..whole.watch.waits() {
            let mut rig = Rig::new(schedule.layers, Some(number));
            let ran = rig.run(&schedule, 3);
            let left_out = rig.watch.left_out().unwrap();
            assert_eq!(ran.is_err(), left_out.ordering, "wait {number}: {left_out:?} {ran:?}");
            assert!(!ran.is_err_and(|error| is_stale(&error)), "wait {number}: a race comes first");
            counts[usize::from(!left_out.ordering)] += 1;
        }
        assert_eq!(counts, [needed, idle]);
    }
}

/// A draft layer of the same weights comes after the release of the last layer, which has pulled the next one.
#[test]
fn a_draft_pass_that_repeats_a_released_layer_is_a_stale_read() {
    for (layers, resident) in [(4, 0), (61, 1)] {
        let wrong = Schedule { layers, resident, draft: Some(false), ..FLOW };
        let fault = outcome(wrong).0.unwrap();
        assert!(is_stale(&fault), "{fault}");
        // Of two buffers, the last layer's holds the second sharded layer.
        let [expected, found] = ["expected layer", "found layer"].map(|name| fault.number(name));
        assert_eq!((expected, found), (Some(u64::from(layers) - 1), Some(u64::from(resident) + 1)));
        assert_eq!(outcome(Schedule { expects: false, ..wrong }), (None, 3));
    }
}

#[test]
fn a_swap_of_versions_within_a_pull_is_a_stale_read_of_half_a_window() {
    let mut rig = Rig::new(4, None);
    rig.pull_parts(0, 0, 0..1).unwrap();
    let racing = rig.refill().unwrap_err();
    assert!(racing.place().starts_with("filling by others (host) writes"), "in use by the pull: {racing}");
    rig.settle();
    rig.version = 1;
    rig.refill().unwrap();
    rig.pull_parts(0, 0, 1..PARTS).unwrap();
    rig.watch.record(rig.arrived[0], rig.pulls[0]).unwrap();
    rig.watch.wait(rig.compute, rig.arrived[0]).unwrap();
    for (expected, other, half) in [(2, 1, 0), (1, 2, 1)] {
        rig.version = expected;
        let fault = rig.attend(rig.buffers[0], 0, true).unwrap_err();
        assert_eq!(found(&fault), Some(Content { layer: 0, version: other }), "{fault}");
        let part = rig.buffers[0].part(half * PART, PART).unwrap();
        let place = format!("from {} to {} holds", part.address(), part.address() + PART);
        assert!(is_stale(&fault) && fault.place().contains(&place), "{fault}, not {place}");
        // Each half alone is what its version expects.
        rig.version = other;
        rig.attend(part, 0, true).unwrap();
    }
}

/// A border between steps: all ranks have ended their pulls, all parts change, and what was prefetched is pulled again.
#[test]
fn a_swap_of_versions_at_a_border_is_clean_if_prefetched_windows_are_pulled_again() {
    for again in [true, false] {
        let mut rig = Rig::new(4, None);
        rig.run(&FLOW, 2).unwrap();
        rig.settle();
        rig.refill().unwrap();
        if again {
            rig.run(&FLOW, 2).unwrap();
            assert_eq!(rig.wrong, 0);
            continue;
        }
        let fault = rig.step(&FLOW).unwrap_err();
        assert!(is_stale(&fault), "{fault}");
        assert_eq!(found(&fault), Some(Content { layer: 0, version: 1 }));
    }
}
