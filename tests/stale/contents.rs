//! What the watch says that bytes hold, against the bytes: each word of real memory is a stamp of its content. Ranges
//! over shared backings, remaps, copies between them and writes of the engine and the host come in any order. The
//! memory's own mapping is the oracle.

use std::sync::Arc;

use forebay::check::order::Content;
use forebay::check::watch::{Watch, bytes};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Backing, Device, Event, Mapped, Slice, Stream};
use forebay::os::Protection;
use proptest::prelude::*;

use super::{content, fill, found, is_stale, stamp, words};

/// The backings, each of two granules, by their numbers; then memory that was allocated as a whole.
const BACKINGS: usize = 3;
/// The pieces of each range: a backing, and a granule of it. Ranges share granules in different places.
const RANGES: [&[(usize, u64)]; 3] = [&[(0, 0), (1, 0), (0, 1)], &[(1, 0), (2, 1)], &[(2, 0)]];
/// The granules of allocated memory.
const PLAIN: usize = 2;
/// Cuts of a granule at which accesses begin and end.
const CUTS: u64 = 4;

/// Part of a range, or of the allocated memory behind the last one, in cuts; what lies behind the end is cut off.
#[derive(Clone, Copy, Debug)]
struct Place {
    range: usize,
    from: u64,
    length: u64,
}

#[derive(Clone, Debug)]
enum Call {
    Holds(Place, Content),
    /// An engine's write, with or without a content.
    Writes(Place, Option<Content>),
    Copy(Place, Place),
    /// Expects what the place's first word holds, or something else.
    Uses(Place, Option<Content>),
    Remap(usize, usize, (usize, u64)),
}

struct Rig {
    host: Arc<HostDevice>,
    watch: Arc<Watch>,
    backings: Vec<Backing>,
    ranges: Vec<Slice>,
    /// What each granule of a range maps; allocated memory is a backing of its own.
    maps: Vec<Vec<(usize, u64)>>,
    streams: [Stream; 3],
    last: Stream,
    event: Event,
    grain: u64,
}

impl Rig {
    fn new() -> Rig {
        let host = HostDevice::new(HostOptions::default());
        let watch = Watch::new(host.clone());
        let grain = watch.granularity();
        let backings: Vec<Backing> = (0..BACKINGS).map(|_| watch.backing(2 * grain).unwrap()).collect();
        let piece = |(backing, granule): (usize, u64)| Mapped {
            backing: backings[backing],
            offset: granule * grain,
            bytes: grain,
        };
        let range = |pieces: &&[(usize, u64)]| {
            let pieces: Vec<Mapped> = pieces.iter().copied().map(piece).collect();
            watch.range(&pieces, Protection::ReadWrite).unwrap()
        };
        let mut ranges: Vec<Slice> = RANGES.iter().map(range).collect();
        ranges.push(watch.allocate(PLAIN as u64 * grain).unwrap());
        let mut maps: Vec<_> = RANGES.iter().map(|pieces| pieces.to_vec()).collect();
        maps.push((0..PLAIN as u64).map(|granule| (BACKINGS, granule)).collect());
        let streams = [(); 3].map(|()| watch.stream().unwrap());
        let event = watch.event().unwrap();
        Rig { host, backings, ranges, maps, streams, last: streams[0], event, grain, watch }
    }

    fn slice(&self, place: &Place) -> Slice {
        let (range, cut) = (self.ranges[place.range], self.grain / CUTS);
        let from = (place.from * cut).min(range.bytes() - cut);
        range.part(from, (place.length * cut).min(range.bytes() - from)).unwrap()
    }

    /// The cuts of memory behind a slice of a place's range.
    fn memory(&self, place: &Place) -> Vec<(usize, u64)> {
        let (slice, cut) = (self.slice(place), self.grain / CUTS);
        let first = (slice.address() - self.ranges[place.range].address()) / cut;
        let behind = |at: u64| {
            let (backing, granule) = self.maps[place.range][(at / CUTS) as usize];
            (backing, granule * CUTS + at % CUTS)
        };
        (first..first + slice.bytes() / cut).map(behind).collect()
    }

    /// The next stream, after all that was enqueued.
    fn next(&mut self, index: usize) -> Stream {
        self.watch.record(self.event, self.last).unwrap();
        self.last = self.streams[index % self.streams.len()];
        self.watch.wait(self.last, self.event).unwrap();
        self.last
    }

    /// The host has seen the end of all that was enqueued.
    fn settle(&self) {
        self.watch.record(self.event, self.last).unwrap();
        self.watch.synchronize(self.event).unwrap();
    }

    /// Makes a call. Returns whether it was a use that is as it expects, and whether it was one that is stale.
    fn call(&mut self, index: usize, call: &Call) -> (bool, bool) {
        match call {
            Call::Holds(place, content) => {
                self.settle();
                self.watch.holds(&self.slice(place), *content).unwrap();
                fill(&self.host, self.slice(place), Some(*content));
            }
            Call::Writes(place, content) => {
                let write = bytes(&self.slice(place), true);
                let write = content.map_or(write, |content| write.of(content));
                let stream = self.next(index);
                self.watch.engine(stream, "fills", &[write]).unwrap();
                fill(&self.host, self.slice(place), *content);
            }
            Call::Copy(from, to) => {
                let length = from.length.min(to.length);
                let cut = |place: &Place| Place { length, ..*place };
                let (from, to) = (cut(from), cut(to));
                let (own, other) = (self.memory(&from), self.memory(&to));
                // A copy onto itself has no defined result.
                if own.len() == other.len() && !own.iter().any(|cut| other.contains(cut)) {
                    let stream = self.next(index);
                    self.watch.copy(stream, self.slice(&from), self.slice(&to)).unwrap();
                }
            }
            Call::Uses(place, other) => return self.uses(index, place, *other),
            Call::Remap(range, granule, piece) => {
                self.settle();
                let granule = granule % RANGES[*range].len();
                let part = self.ranges[*range].part(granule as u64 * self.grain, self.grain).unwrap();
                let (backing, offset) = (self.backings[piece.0], piece.1 * self.grain);
                self.watch.remap(part, &[Mapped { backing, offset, bytes: self.grain }]).unwrap();
                self.maps[*range][granule] = *piece;
            }
        }
        (false, false)
    }

    fn uses(&mut self, index: usize, place: &Place, other: Option<Content>) -> (bool, bool) {
        let slice = self.slice(place);
        let shown = words(&self.host, slice);
        let Some(expected) = other.or_else(|| content(shown[0])) else { return (false, false) };
        let stream = self.next(index);
        let verdict = self.watch.uses(stream, "reads", &slice, expected);
        match shown.iter().find(|word| **word != stamp(Some(expected))) {
            None => verdict.unwrap(),
            Some(word) => {
                let error = verdict.unwrap_err();
                assert!(is_stale(&error), "{error}");
                assert_eq!(found(&error), content(*word), "{error}");
                return (false, true);
            }
        }
        (true, false)
    }
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let place = || {
        (0..=RANGES.len(), 0..3 * CUTS, 1..2 * CUTS).prop_map(|(range, from, length)| Place {
            range,
            from,
            length,
        })
    };
    let content = || (0..3_u32, 0..2_u32).prop_map(|(layer, version)| Content { layer, version });
    let call = prop_oneof![
        2 => (place(), content()).prop_map(|(place, content)| Call::Holds(place, content)),
        1 => (place(), prop::option::of(content())).prop_map(|(place, content)| Call::Writes(place, content)),
        4 => (place(), place()).prop_map(|(from, to)| Call::Copy(from, to)),
        4 => (place(), prop::option::weighted(0.2, content())).prop_map(|(place, other)| Call::Uses(place, other)),
        1 => (0..RANGES.len(), 0..3_usize, (0..BACKINGS, 0..2_u64))
            .prop_map(|(range, granule, piece)| Call::Remap(range, granule, piece)),
    ];
    prop::collection::vec(call, 1..60)
}

#[test]
fn what_bytes_hold_is_what_memory_shows() {
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let counts = std::cell::Cell::new([0_u32; 2]);
    let run = |calls: Vec<Call>| {
        let mut rig = Rig::new();
        for (index, call) in calls.iter().enumerate() {
            let (right, stale) = rig.call(index, call);
            let [all_right, all_stale] = counts.get();
            counts.set([all_right + u32::from(right), all_stale + u32::from(stale)]);
        }
        Ok(())
    };
    runner.run(&calls(), run).unwrap();
    let counts = counts.get();
    assert!(counts.iter().all(|count| *count > 500), "too few uses of one sort: {counts:?}");
}

/// A window as sharded weights have it: the rank's own part in place, a buffer around it that another range writes.
#[test]
fn a_window_shows_its_own_part_and_what_was_pulled_and_other_memory_once_it_is_mapped() {
    let host = HostDevice::new(HostOptions::default());
    let watch = Watch::new(host);
    let grain = watch.granularity();
    let [own, buffer, resident] = [1, 2, 3].map(|granules| watch.backing(granules * grain).unwrap());
    let piece =
        |backing, offset, granules| Mapped { backing, offset: offset * grain, bytes: granules * grain };
    let around = [piece(buffer, 0, 1), piece(own, 0, 1), piece(buffer, 1, 1)];
    let window = watch.range(&around, Protection::Read).unwrap();
    let pulled = watch.range(&[piece(buffer, 0, 2)], Protection::ReadWrite).unwrap();
    let [own, all] = [piece(own, 0, 1), piece(resident, 0, 3)]
        .map(|piece| watch.range(&[piece], Protection::ReadWrite).unwrap());
    let parts = watch.allocate(2 * grain).unwrap();
    let (stream, event) = (watch.stream().unwrap(), watch.event().unwrap());
    let settle = || {
        watch.record(event, stream).unwrap();
        watch.synchronize(event).unwrap();
    };
    let weights = |layer, version| Content { layer, version };
    watch.holds(&parts, weights(7, 1)).unwrap();
    watch.copy(stream, parts, pulled).unwrap();
    let error = watch.uses(stream, "attention", &window, weights(7, 1)).unwrap_err();
    assert!(error.place().contains("holds nothing that is known"), "its own part was not filled: {error}");
    settle();
    watch.holds(&own, weights(7, 1)).unwrap();
    watch.uses(stream, "attention", &window, weights(7, 1)).unwrap();
    // A copy of the window has both.
    watch.copy(stream, window, all).unwrap();
    watch.uses(stream, "attention", &all, weights(7, 1)).unwrap();
    // The buffer goes to another layer, and this layer is resident.
    settle();
    watch.remap(window, &[piece(resident, 0, 3)]).unwrap();
    watch.holds(&parts, weights(9, 1)).unwrap();
    watch.copy(stream, parts, pulled).unwrap();
    watch.uses(stream, "attention", &window, weights(7, 1)).unwrap();
    settle();
    watch.remap(window, &around).unwrap();
    let error = watch.uses(stream, "attention", &window, weights(7, 1)).unwrap_err();
    assert_eq!(found(&error), Some(weights(9, 1)), "{error}");
}

/// Backings that come and go leave nothing behind, though each held something when it went.
#[test]
fn a_backing_that_is_given_back_takes_no_memory() {
    let watch = Watch::new(HostDevice::new(HostOptions::default()));
    let grain = watch.granularity();
    let piece = |backing| Mapped { backing, offset: 0, bytes: grain };
    let rest = piece(watch.backing(grain).unwrap());
    let window = watch.range(&[rest], Protection::ReadWrite).unwrap();
    let (stream, event) = (watch.stream().unwrap(), watch.event().unwrap());
    let mut most = 0;
    for version in 0..500 {
        let backing = watch.backing(grain).unwrap();
        watch.remap(window, &[piece(backing)]).unwrap();
        watch.holds(&window, Content { layer: 0, version }).unwrap();
        watch.uses(stream, "attention", &window, Content { layer: 0, version }).unwrap();
        watch.record(event, stream).unwrap();
        watch.synchronize(event).unwrap();
        watch.remap(window, &[rest]).unwrap();
        watch.give_back(backing).unwrap();
        most = most.max(watch.remembered());
    }
    assert!(most <= 200, "{most}");
}
