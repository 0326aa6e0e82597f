//! Updates against the engine's work: on the virtual clock, whose seeds delay whatever no edge orders, each use of a
//! window compares every byte with the version of its step; under the order checker each use says which version it
//! expects. The controls leave the border out, and both must find it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay::Result;
use forebay::check::order::Content;
use forebay::check::watch::{Watch, bytes};
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Mapped, Stream};
use forebay::os::Protection;
use forebay::peer::Links;
use forebay::weights::{Border, Group, Outcome, Place, Plan, Pulls, Ring, RingOptions, Windows};

use crate::windows::{Folder, PATIENCE, Rank, expected, layers, patient, sharding, stamp_of};
use crate::{Engine, Faulty, grain, group, no_faults, right};

/// Enqueues a use of a layer, which counts itself in `wrong` if it finds another byte than its version's.
fn uses(engine: &Engine, host: &Arc<HostDevice>, layer: usize, stream: Stream, wrong: &Arc<AtomicU32>) {
    let window = engine.ring.pulls().layer(layer).unwrap();
    let expected = expected(&engine.plan, layer, engine.versions[layer]);
    let (host, wrong) = (Arc::clone(host), Arc::clone(wrong));
    let compare = move || {
        let mut shown = vec![0; expected.len()];
        host.read(window, &mut shown).unwrap();
        wrong.fetch_add(u32::from(!right(&shown, &expected)), Ordering::Relaxed);
    };
    engine.rank.device.call(stream, Arc::new(compare)).unwrap();
}

/// Two ranks with an update in the middle of their steps; returns how many uses found something else. Without its
/// border the commit does not wait for the stream of the uses.
fn wrong_uses(seed: u64, border: bool) -> u32 {
    let hosts: Vec<Arc<HostDevice>> = (0..2).map(|_| HostDevice::new(HostOptions::default())).collect();
    let clock = |(host, rank): (&Arc<HostDevice>, u64)| {
        let options = ClockOptions { seed: Some(2 * seed + rank), ..ClockOptions::default() };
        ClockDevice::over(host.clone(), options).unwrap()
    };
    let clocks: Vec<Arc<ClockDevice>> = hosts.iter().zip(0..).map(clock).collect();
    let wrong = AtomicU32::new(0);
    group(&clocks, |engine, clock| {
        let (host, all) = (&hosts[engine.own() as usize], engine.layers());
        let (compute, found) = (clock.stream().unwrap(), Arc::new(AtomicU32::new(0)));
        let step = |engine: &mut Engine| {
            engine.ring.begin(1, 0).unwrap();
            for layer in engine.layers() {
                engine.ring.enter(layer, 0, compute).unwrap();
                uses(engine, host, layer, compute, &found);
                engine.ring.leave(layer, 0, compute).unwrap();
            }
            engine.ring.end(compute).unwrap();
            engine.step += 1;
            // The layer that the plan keeps resident may be read at any time.
            let resident = engine.plan.layers().iter().find(|layer| layer.place == Place::Resident);
            (0..3).for_each(|_| uses(engine, host, resident.unwrap().layer, compute, &found));
        };
        step(engine);
        let mut update = engine.ring.update(1, &all, u64::MAX).unwrap();
        for layer in &all {
            engine.fill_one(&mut update, *layer).unwrap();
            step(engine);
        }
        engine.share(&mut update).unwrap();
        step(engine);
        let stream = if border { compute } else { clock.stream().unwrap() };
        let at = Border { stream, ..engine.border() };
        assert_eq!(engine.commit(&mut update, &all, at), Ok(Outcome::Committed));
        (0..2).for_each(|_| step(engine));
        clock.run().unwrap();
        wrong.fetch_add(found.load(Ordering::Relaxed), Ordering::Relaxed);
    });
    wrong.load(Ordering::Relaxed)
}

#[test]
fn every_use_finds_the_version_of_its_step_for_every_seed() {
    std::thread::scope(|scope| {
        for part in 0..4 {
            scope.spawn(move || {
                for seed in (part..40).step_by(4) {
                    assert_eq!(wrong_uses(seed, true), 0, "seed {seed}");
                }
            });
        }
    });
}

#[test]
fn control_a_commit_without_its_border_shows_for_some_seed() {
    assert!((0..40).any(|seed| wrong_uses(seed, false) > 0));
}

/// A rank whose bytes the order checker knows.
struct Tagged {
    watch: Arc<Watch>,
    faulty: Arc<Faulty>,
    rank: Rank,
    ring: Ring<Windows>,
    plan: Plan,
    links: Links,
    version: u32,
}

const fn content(layer: usize, version: u32) -> Content {
    Content { layer: layer as u32, version }
}

/// Every layer but the first and the last, which one rank of two owns alone, has parts of both.
fn tagged_plan(rank: u32) -> Plan {
    let model = vec![vec![5 * grain()], vec![4 * grain(), 2 * grain()], vec![3 * grain()], vec![4 * grain()]];
    Plan::new(&layers(&model), Group { id: 2, rank, ranks: 2 }, &sharding(grain())).unwrap()
}

/// An engine's tensor of a version, which the checker knows.
fn tensor(
    rank: &Rank,
    watch: &Watch,
    (layer, version): (usize, u32),
    at: std::ops::Range<u64>,
) -> forebay::device::Slice {
    let bytes: Vec<u8> = at.map(|at| stamp_of(0, version, layer, at)).collect();
    let from = rank.holds(&bytes);
    watch.holds(&from, content(layer, version)).unwrap();
    from
}

impl Tagged {
    fn new(rank: u32, folder: &Folder) -> Tagged {
        let watch = Watch::new(HostDevice::new(HostOptions::default()));
        let faulty = Faulty::new(watch.clone(), false);
        let (device, plan): (Arc<dyn Device>, _) = (faulty.clone(), tagged_plan(rank));
        let mut own = Rank::new(&device, plan.clone(), Pulls::default(), &no_faults()).unwrap();
        for layer in plan.layers() {
            for placed in layer.layout.tensors() {
                let at = placed.offset..placed.offset + placed.bytes;
                let from = tensor(&own, &watch, (layer.layer, 0), at);
                own.windows.fill(layer.layer, &placed.name, from, own.stream).unwrap();
                own.wait().unwrap();
            }
        }
        let links = own.share(&folder.0, patient(), &no_faults()).unwrap();
        let one = Plan::new(&layers(&[vec![1]]), Group { id: 0, rank: 0, ranks: 1 }, &sharding(grain()));
        let one = Windows::new(&device, one.unwrap(), Pulls::default(), &no_faults()).unwrap();
        let windows = std::mem::replace(&mut own.windows, one);
        let ring = Ring::new(&device, windows, RingOptions::default()).unwrap();
        let tagged = Tagged { watch, faulty, rank: own, ring, plan, links, version: 0 };
        tagged.imported(0);
        tagged
    }

    fn layers(&self) -> Vec<usize> {
        self.plan.layers().iter().map(|layer| layer.layer).collect()
    }

    /// Declares what the parts hold that came last from the other rank.
    fn imported(&self, version: u32) {
        let imported = self.faulty.imported();
        let layers = self.plan.layers();
        for (backing, layer) in imported[imported.len() - layers.len()..].iter().zip(layers) {
            let part = layer.cut.part(1 - self.plan.group().rank);
            let piece = Mapped { backing: *backing, offset: 0, bytes: (part.end - part.start) * grain() };
            let mapped = self.faulty.mapped(*backing);
            let seen = mapped.unwrap_or_else(|| self.watch.range(&[piece], Protection::Read).unwrap());
            self.watch.holds(&seen, content(layer.layer, version)).unwrap();
            if mapped.is_none() {
                // The memory is not mapped for longer than this.
                let other = Mapped { backing: self.watch.backing(piece.bytes).unwrap(), ..piece };
                self.watch.remap(seen, &[other]).unwrap();
            }
        }
    }

    /// A use of each tensor of a layer, which says what it expects.
    fn attend(&self, layer: usize) -> Result<()> {
        let plan = self.plan.layers().iter().find(|one| one.layer == layer).unwrap();
        plan.layout.tensors().iter().try_for_each(|placed| {
            let slice = self.ring.pulls().tensor(layer, &placed.name)?;
            self.watch.uses(self.rank.stream, "attention", &slice, content(layer, self.version))
        })
    }

    fn step(&mut self) -> Result<()> {
        self.ring.begin(1, 0)?;
        for layer in self.layers() {
            self.ring.enter(layer, 0, self.rank.stream)?;
            self.attend(layer)?;
            self.ring.leave(layer, 0, self.rank.stream)?;
        }
        self.ring.end(self.rank.stream)
    }

    /// Everything up to the border.
    fn shared(&mut self, version: u32) -> forebay::weights::Update {
        let all = self.layers();
        let mut update = self.ring.update(version, &all, u64::MAX).unwrap();
        for layer in self.plan.layers() {
            for placed in layer.layout.tensors() {
                let at = placed.offset..placed.offset + placed.bytes;
                let from = tensor(&self.rank, &self.watch, (layer.layer, version), at);
                update.fill(layer.layer, &placed.name, from, self.rank.stream).unwrap();
                self.rank.wait().unwrap();
            }
        }
        update.share(&mut self.links, self.rank.stream, PATIENCE).unwrap();
        self.imported(version);
        update
    }

    fn commit(&mut self, update: &mut forebay::weights::Update, stream: Stream) -> Result<Outcome> {
        let border = Border { step: 7, stream, at_most: PATIENCE };
        let outcome = self.ring.commit(update, &mut self.links, border);
        self.version = update.version();
        outcome
    }
}

/// Two ranks under the order checker.
fn tagged(work: impl Fn(&mut Tagged) + Sync) {
    let folder = Folder::new();
    std::thread::scope(|scope| {
        let one = |rank| {
            let mut tagged = Tagged::new(rank, &folder);
            work(&mut tagged);
            tagged
        };
        let ranks = [0, 1].map(|rank| scope.spawn(move || one(rank)));
        let ended = ranks.map(std::thread::ScopedJoinHandle::join);
        assert!(ended.iter().all(std::result::Result::is_ok), "a rank has failed");
    });
}

fn is_stale(error: &forebay::Error) -> bool {
    error.place().starts_with("stale read: ")
}

#[test]
fn no_use_under_the_checker_finds_another_version() {
    tagged(|rank| {
        rank.step().unwrap();
        let mut update = rank.shared(1);
        rank.step().unwrap();
        let stream = rank.rank.stream;
        assert_eq!(rank.commit(&mut update, stream), Ok(Outcome::Committed));
        rank.step().unwrap();
        // Once more, with a layer that is resident.
        rank.ring.make_resident(1, stream).unwrap();
        rank.step().unwrap();
        let mut update = rank.shared(2);
        rank.step().unwrap();
        assert_eq!(rank.commit(&mut update, stream), Ok(Outcome::Committed));
        rank.step().unwrap();
        rank.ring.make_sharded(1).unwrap();
        rank.step().unwrap();
        assert_eq!(rank.watch.conflict(), None);
    });
}

/// The controls: a buffer that was pulled before the border, a commit that does not wait for the engine, and a rank
/// that maps a new version on its own.
#[test]
fn controls_swaps_without_the_border_are_found() {
    // What the buffers hold is of the old version, and this rank's part of the new one.
    tagged(|rank| {
        rank.step().unwrap();
        let mut update = rank.shared(1);
        let stream = rank.rank.stream;
        rank.commit(&mut update, stream).unwrap();
        let error = rank.attend(0).unwrap_err();
        assert!(is_stale(&error) && error.number("found version") == Some(0), "{error}");
        rank.version = 0;
        let error = rank.attend(0).unwrap_err();
        assert!(is_stale(&error) && error.number("found version") == Some(1), "{error}");
    });
    // Work of the step before still reads the windows, on a stream that the commit does not wait for.
    tagged(|rank| {
        rank.step().unwrap();
        let mut update = rank.shared(1);
        let (other, window) = (rank.watch.stream().unwrap(), rank.ring.pulls().layer(3).unwrap());
        let pages = rank.plan.layers()[3].cut.part(rank.plan.group().rank);
        let own = window.part(pages.start * grain(), (pages.end - pages.start) * grain()).unwrap();
        rank.watch.engine(other, "attention", &[bytes(&own, false)]).unwrap();
        let stream = rank.rank.stream;
        let error = rank.commit(&mut update, stream).unwrap_err().to_string();
        assert!(error.contains("remap") && error.contains("attention"), "{error}");
        assert_eq!(rank.ring.pulls().layer(3).unwrap_err().to_string(), error);
    });
    // A rank that maps its own new part before all have decided.
    tagged(|rank| {
        rank.step().unwrap();
        let (plan, own) = (&rank.plan.layers()[1], rank.plan.group().rank);
        let pages = plan.cut.part(own);
        let length = (pages.end - pages.start) * grain();
        let backing = rank.faulty.backing(length).unwrap();
        let new = Mapped { backing, offset: 0, bytes: length };
        let slice = rank.faulty.range(&[new], Protection::ReadWrite).unwrap();
        rank.watch.holds(&slice, content(1, 1)).unwrap();
        let window = rank.ring.pulls().layer(1).unwrap();
        rank.ring.begin(1, 0).unwrap();
        rank.ring.abandon().unwrap();
        rank.rank.wait().unwrap();
        rank.faulty.remap(window.part(pages.start * grain(), length).unwrap(), &[new]).unwrap();
        let error = rank.step().unwrap_err();
        assert!(is_stale(&error) && error.number("found version") == Some(1), "{error}");
    });
}
