//! New versions of sharded weights under captured steps: one graph, captured before the first update, is launched again
//! and again, and each launch finds every byte of the version that its rank has, at the same addresses. Memory of the
//! driver is what it was.

use std::sync::Arc;
use std::thread;

use forebay::Kind;
use forebay::device::cuda::CudaDevice;
use forebay::device::{Device, Graph, Slice};
use forebay::os::{Faults, NoFaults};
use forebay::peer::Links;
use forebay::weights::{Border, Group, Outcome, Plan, Pulls, Ring, RingOptions, Update, Windows, Wrap};
use forebay_standin::{Options, Resources};

use crate::faulty::Faulty;
use crate::rig::{on, own};
use crate::ring::delayed;
use crate::windows::{Folder, PATIENCE, Rank, expected, filler, layers, patient, sharding, stamp_of};

/// A rank whose step reads each window whole, as a graph.
pub struct Captured {
    pub faulty: Arc<Faulty>,
    pub rank: Rank,
    pub ring: Ring<Windows>,
    plan: Plan,
    pub links: Links,
    /// By layer: where a launch copies what its window shows.
    logs: Vec<Slice>,
    pub graph: Graph,
    version: u32,
}

fn plan(grain: u64, rank: u32) -> Plan {
    let model: Vec<Vec<u64>> = (0..5).map(|layer| vec![(3 + layer % 3) * grain]).collect();
    Plan::new(&layers(&model), Group { id: 3, rank, ranks: 2 }, &sharding(grain)).unwrap()
}

impl Captured {
    pub fn new(library: &str, rank: u32, wrap: Wrap, folder: &Folder) -> Captured {
        let faulty = Faulty::new(CudaDevice::new(on(library)).unwrap(), false);
        let (device, faults): (Arc<dyn Device>, Arc<dyn Faults>) = (faulty.clone(), Arc::new(NoFaults));
        let plan = plan(device.granularity(), rank);
        let mut own = Rank::new(&device, plan.clone(), Pulls { copy: plan.grain() }, &faults).unwrap();
        own.fill().unwrap();
        let links = own.share(&folder.0, patient(), &faults).unwrap();
        let one = Plan::new(&layers(&[vec![1]]), Group { id: 0, rank: 0, ranks: 1 }, &sharding(plan.grain()));
        let one = Windows::new(&device, one.unwrap(), Pulls::default(), &faults).unwrap();
        let windows = std::mem::replace(&mut own.windows, one);
        let mut ring = Ring::new(&device, windows, RingOptions { wrap, ..RingOptions::default() }).unwrap();
        let logs: Vec<Slice> = (0..plan.model_layers())
            .map(|layer| device.allocate(ring.pulls().layer(layer).unwrap().bytes()).unwrap())
            .collect();
        ring.begin(1, 0).unwrap();
        device.capture(own.stream).unwrap();
        for (layer, log) in logs.iter().enumerate() {
            ring.enter(layer, 0, own.stream).unwrap();
            device.copy(own.stream, ring.pulls().layer(layer).unwrap(), *log).unwrap();
            ring.leave(layer, 0, own.stream).unwrap();
        }
        ring.end(own.stream).unwrap();
        let graph = device.captured(own.stream).unwrap();
        Captured { faulty, rank: own, ring, plan, links, logs, graph, version: 0 }
    }

    /// Launches the graph, and compares every byte that it has read.
    pub fn launch(&mut self) {
        let (device, stream) = (Arc::clone(&self.rank.device), self.rank.stream);
        self.ring.launch(stream, || device.launch(self.graph, stream)).unwrap();
        for (layer, log) in self.logs.iter().enumerate() {
            let (shown, expected) = (self.rank.read(*log), expected(&self.plan, layer, self.version));
            assert!(shown.iter().zip(&expected).all(|(shown, byte)| *byte == Some(*shown)), "layer {layer}");
        }
    }

    /// On a stream that is being captured nothing is filled: its copy would not have run, and nothing says when.
    fn fills_in_no_capture(&self, update: &mut Update) {
        let (device, stream) = (&self.rank.device, self.rank.stream);
        let placed = &self.plan.layers()[0].layout.tensors()[0];
        let from = self.rank.holds(&vec![0; placed.bytes as usize]);
        device.capture(stream).unwrap();
        let busy = update.fill(0, &placed.name, from, stream).unwrap_err();
        assert_eq!(busy.kind(), Kind::Busy, "{busy}");
        device.release(device.captured(stream).unwrap()).unwrap();
    }

    fn update(&mut self, version: u32, taken: bool) {
        let all: Vec<usize> = (0..self.plan.model_layers()).collect();
        let mut update = self.ring.update(version, &all, u64::MAX).unwrap();
        self.fills_in_no_capture(&mut update);
        for layer in self.plan.layers().to_vec() {
            let own = filler(&self.plan, layer.layer);
            for placed in layer.layout.tensors() {
                let at = placed.offset..placed.offset + placed.bytes;
                let bytes: Vec<u8> = at.map(|at| stamp_of(own, version, layer.layer, at)).collect();
                let from = self.rank.holds(&bytes);
                update.fill(layer.layer, &placed.name, from, self.rank.stream).unwrap();
                self.rank.wait().unwrap();
            }
            self.launch();
        }
        update.share(&mut self.links, self.rank.stream, PATIENCE).unwrap();
        update.verify(self.rank.stream).unwrap();
        self.launch();
        // Of two borders there is none that all ranks are at.
        let step = u64::from(version) + if taken { 0 } else { u64::from(self.plan.group().rank) };
        let border = Border { step, stream: self.rank.stream, at_most: PATIENCE };
        // Nothing is mapped anew on a stream that is captured.
        let (device, stream) = (&self.rank.device, self.rank.stream);
        device.capture(stream).unwrap();
        let busy = self.ring.commit(&mut update, &mut self.links, border).unwrap_err();
        assert_eq!(busy.kind(), Kind::Busy, "{busy}");
        device.release(device.captured(stream).unwrap()).unwrap();
        let outcome = self.ring.commit(&mut update, &mut self.links, border).unwrap();
        assert_eq!(outcome == Outcome::Committed, taken, "{outcome:?}");
        self.version = if taken { version } else { self.version };
        (0..3).for_each(|_| self.launch());
    }
}

#[test]
fn a_graph_is_launched_over_updates_and_finds_the_version_of_its_rank() {
    for (seed, wrap, driver_version) in
        [(None, Wrap::Joined, 12_040), (Some(4), Wrap::Behind, 13_000), (Some(5), Wrap::Joined, 12_040)]
    {
        let Some(standin) = own(Options { driver_version, ..delayed(seed) }, "counts what is held") else {
            return;
        };
        let folder = Folder::new();
        let work = |rank| {
            let mut own = Captured::new(standin.library(), rank, wrap, &folder);
            own.launch();
            own.update(1, true);
            own.ring.make_resident(2, own.rank.stream).unwrap();
            own.launch();
            let held = own.faulty.backings();
            own.update(2, false);
            own.update(3, true);
            assert_eq!(own.faulty.backings(), held);
            own.ring.make_sharded(2).unwrap();
            own.launch();
            own
        };
        let ended = thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| scope.spawn(move || work(rank)));
            ranks.map(|rank| rank.join().unwrap())
        });
        for own in ended {
            own.rank.device.release(own.graph).unwrap();
        }
        assert_eq!(standin.held_resources(), Resources::default(), "{seed:?}");
    }
}
