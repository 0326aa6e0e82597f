//! A rank that steps over a ring, and compares every byte of each use with the version that it has. The test's root has
//! the model.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use crate::faulty::Faulty;
use crate::model;
use crate::windows::{Folder, MODEL, PATIENCE, Rank, expected, filler, layers, patient, sharding, stamp_of};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice, Stream};
use forebay::os::{Faults, NoFaults};
use forebay::peer::{Limits, Links};
use forebay::weights::{Border, Group, Outcome, Plan, Pulls, Ring, RingOptions, Update, Windows};
use forebay::{Kind, Result};

/// The host device's granule.
pub fn grain() -> u64 {
    HostDevice::new(HostOptions::default()).granularity()
}

pub fn no_faults() -> Arc<dyn Faults> {
    Arc::new(NoFaults)
}

pub fn plan(rank: u32, ranks: u32) -> Plan {
    Plan::new(&layers(&model()), Group { id: 9, rank, ranks }, &sharding(grain())).unwrap()
}

/// Whether bytes are what they have to be.
pub fn right(shown: &[u8], expected: &[Option<u8>]) -> bool {
    shown.len() == expected.len()
        && shown.iter().zip(expected).all(|(shown, byte)| byte.is_none_or(|byte| byte == *shown))
}

/// A rank that steps: each use of a layer compares every byte.
pub struct Engine {
    pub rank: Rank,
    pub ring: Ring<Windows>,
    pub plan: Plan,
    pub links: Links,
    /// The version that it has, by layer; and what its windows say, which begin with 0 when it is started again.
    pub versions: Vec<u32>,
    told: Vec<u32>,
    pub step: u64,
    addresses: Vec<Slice>,
    /// By layer: what it has to show, of which version.
    expected: RefCell<BTreeMap<usize, Expected>>,
}

/// A version, and the bytes of a layer of it.
type Expected = (u32, Vec<Option<u8>>);

impl Engine {
    /// A rank that has met its group and shared the first version.
    pub fn new(
        device: &Arc<dyn Device>,
        (rank, ranks): (u32, u32),
        folder: &Path,
        faults: &Arc<dyn Faults>,
    ) -> Result<Engine> {
        Engine::of_versions(device, (rank, ranks), folder, faults, &vec![0; model().len()])
    }

    /// A rank that has met its group and shared layers of these versions.
    pub fn of_versions(
        device: &Arc<dyn Device>,
        (rank, ranks): (u32, u32),
        folder: &Path,
        faults: &Arc<dyn Faults>,
        versions: &[u32],
    ) -> Result<Engine> {
        Engine::within(patient(), device, (rank, ranks), folder, faults, versions)
    }

    /// The same with other limits of its sessions.
    pub fn within(
        limits: Limits,
        device: &Arc<dyn Device>,
        (rank, ranks): (u32, u32),
        folder: &Path,
        faults: &Arc<dyn Faults>,
        versions: &[u32],
    ) -> Result<Engine> {
        let plan = plan(rank, ranks);
        let mut own = Rank::new(device, plan.clone(), Pulls { copy: 2 * grain() }, faults)?;
        for (layer, version) in plan.layers().iter().zip(versions) {
            let rank = filler(&plan, layer.layer);
            for placed in layer.layout.tensors() {
                let at = placed.offset..placed.offset + placed.bytes;
                let bytes: Vec<u8> = at.map(|at| stamp_of(rank, *version, layer.layer, at)).collect();
                let from = own.holds(&bytes);
                own.windows.fill(layer.layer, &placed.name, from, own.stream)?;
                own.wait()?;
            }
        }
        let hello = own.windows.hello(MODEL, own.stream)?;
        let mut links = loop {
            match Links::meet(folder, hello, limits, Arc::clone(faults)) {
                // A rank that it met has ended meanwhile.
                Err(error) if error.kind() == Kind::PeerLost => {}
                met => break met?,
            }
        };
        own.windows.share(&mut links, own.stream, PATIENCE)?;
        // The windows go into the ring; the rank keeps others, of one page, and its memory to read with.
        let one =
            Plan::new(&layers(&[vec![1]]), Group { id: 0, rank: 0, ranks: 1 }, &sharding(grain())).unwrap();
        let other = HostDevice::new(HostOptions::default()) as Arc<dyn Device>;
        let one = Windows::new(&other, one, Pulls::default(), &no_faults())?;
        let windows = std::mem::replace(&mut own.windows, one);
        let all: Vec<usize> = plan.layers().iter().map(|layer| layer.layer).collect();
        let addresses = all.iter().map(|layer| windows.layer(*layer)).collect::<Result<Vec<_>>>()?;
        let ring = Ring::new(device, windows, RingOptions::default())?;
        let (versions, told) = (versions.to_vec(), vec![0; all.len()]);
        let expected = RefCell::default();
        Ok(Engine { rank: own, ring, plan, links, versions, told, step: 0, addresses, expected })
    }

    pub fn layers(&self) -> Vec<usize> {
        self.plan.layers().iter().map(|layer| layer.layer).collect()
    }

    pub fn own(&self) -> u32 {
        self.plan.group().rank
    }

    pub fn stream(&self) -> Stream {
        self.rank.stream
    }

    /// Whether a layer shows its version now.
    pub fn shows(&self, layer: usize) -> bool {
        let window = self.ring.pulls().layer(layer).unwrap();
        let (version, mut all) = (self.versions[layer], self.expected.borrow_mut());
        if all.get(&layer).is_none_or(|(of, _)| *of != version) {
            all.insert(layer, (version, expected(&self.plan, layer, version)));
        }
        right(&self.rank.read(window), &all[&layer].1)
    }

    /// One step.
    pub fn step(&mut self) -> Result<()> {
        self.ring.begin(1, 0)?;
        for layer in self.layers() {
            self.ring.enter(layer, 0, self.stream())?;
            assert_eq!(self.ring.pulls().layer(layer)?, self.addresses[layer]);
            assert!(
                self.shows(layer),
                "rank {}, step {}: layer {layer} shows no whole version {}",
                self.own(),
                self.step,
                self.versions[layer]
            );
            self.ring.leave(layer, 0, self.stream())?;
        }
        self.step += 1;
        self.ring.end(self.stream())
    }

    /// Fills all of an update.
    pub fn fill(&self, update: &mut Update, layers: &[usize]) -> Result<()> {
        layers.iter().try_for_each(|layer| self.fill_one(update, *layer))
    }

    pub fn fill_one(&self, update: &mut Update, layer: usize) -> Result<()> {
        let (version, own) = (update.version(), filler(&self.plan, layer));
        let plan = self.plan.layers().iter().find(|one| one.layer == layer).unwrap();
        for placed in plan.layout.tensors() {
            let at = placed.offset..placed.offset + placed.bytes;
            let bytes: Vec<u8> = at.map(|at| stamp_of(own, version, layer, at)).collect();
            let from = self.rank.holds(&bytes);
            update.fill(layer, &placed.name, from, self.stream())?;
            self.rank.wait()?;
        }
        Ok(())
    }

    /// An update that is filled.
    pub fn filled(&mut self, version: u32, layers: &[usize]) -> Result<Update> {
        let mut update = self.ring.update(version, layers, u64::MAX)?;
        self.fill(&mut update, layers)?;
        Ok(update)
    }

    pub fn share(&mut self, update: &mut Update) -> Result<()> {
        let stream = self.stream();
        update.share(&mut self.links, stream, PATIENCE)
    }

    pub fn border(&self) -> Border {
        Border { step: self.step, stream: self.stream(), at_most: PATIENCE }
    }

    /// Commits, and notes what this rank has then.
    pub fn commit(&mut self, update: &mut Update, layers: &[usize], border: Border) -> Result<Outcome> {
        let outcome = self.ring.commit(update, &mut self.links, border)?;
        if outcome == Outcome::Committed {
            for layer in layers {
                (self.versions[*layer], self.told[*layer]) = (update.version(), update.version());
            }
        }
        for layer in self.layers() {
            assert_eq!(self.ring.pulls().version(layer), Ok(self.told[layer]));
        }
        Ok(outcome)
    }

    /// A whole update with a step after each of its calls.
    pub fn updates(&mut self, version: u32, layers: &[usize]) -> Result<Outcome> {
        let mut update = self.ring.update(version, layers, u64::MAX)?;
        for layer in layers {
            self.fill_one(&mut update, *layer)?;
            self.step()?;
        }
        self.share(&mut update)?;
        self.step()?;
        update.verify(self.stream())?;
        self.step()?;
        let outcome = self.commit(&mut update, layers, self.border())?;
        self.step()?;
        self.step()?;
        Ok(outcome)
    }
}

/// Host devices that count what they hold.
pub fn counted(count: u32) -> Vec<Arc<Faulty>> {
    (0..count).map(|_| Faulty::new(HostDevice::new(HostOptions::default()), false)).collect()
}

/// Ranks that have shared, each in a thread of its own, which do `work`. Sessions and devices live as long as the
/// slowest of them.
pub fn group<D: Device + 'static>(devices: &[Arc<D>], work: impl Fn(&mut Engine, &Arc<D>) + Sync) {
    let folder = Folder::new();
    let one = |own: &Arc<D>, rank: u32| {
        let device: Arc<dyn Device> = own.clone();
        let mut engine = Engine::new(&device, (rank, devices.len() as u32), &folder.0, &no_faults()).unwrap();
        work(&mut engine, own);
        engine
    };
    thread::scope(|scope| {
        let threads: Vec<_> =
            devices.iter().zip(0..).map(|(own, rank)| scope.spawn(move || one(own, rank))).collect();
        let ended: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
        assert!(ended.iter().all(std::result::Result::is_ok), "a rank has failed");
    });
}
