//! A group's windows, seen from one rank of it, over a watched device: plain stretches of memory, whose places are
//! those of a real plan. Each layer's pull is one copy of each other rank's part.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use forebay::check::order::Content;
use forebay::check::watch::Watch;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice, Stream};
use forebay::weights::{Group, Odd, Patterns, Place, Plan, Pull, Sharding, Tensor};
use forebay::{Kind, Result};

/// Bytes of a rank's part of a layer.
const PART: u64 = 64;
/// The rank from which the group is seen, if it has several.
pub const OWN: u32 = 1;

/// What happened, in the order of enqueueing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// The first copy of a layer's pull.
    Pulled(usize),
    /// A micro-batch's use of a layer.
    Used(usize),
}

/// See the module's head.
#[derive(Debug)]
pub struct Model {
    pub watch: Arc<Watch>,
    pub plan: Plan,
    layers: usize,
    /// By rank and layer, the part; of this rank's own device too.
    parts: Vec<Vec<Slice>>,
    /// By buffer: the parts of the other ranks, one after another.
    buffers: Vec<Slice>,
    /// The same memory of its own for each layer, while it is resident.
    own: Vec<Slice>,
    resident: Vec<bool>,
    pub acts: Arc<Mutex<Vec<Act>>>,
    /// The copies that pass before one is refused.
    pub passes: Arc<AtomicUsize>,
}

pub fn content(layer: usize) -> Content {
    Content { layer: layer as u32, version: 1 }
}

/// The plan of `layers` layers, of which those that `shardable` says are.
pub fn plan(layers: usize, ranks: u32, odd: Odd, shardable: impl Fn(usize) -> bool) -> Plan {
    let tensor = |name: &str| Tensor { name: name.to_owned(), bytes: u64::from(ranks) * PART, align: 1 };
    let all: Vec<Vec<Tensor>> =
        (0..layers).map(|layer| vec![tensor(if shardable(layer) { "o_proj" } else { "other" })]).collect();
    let sharding = Sharding { odd, grain: PART, ..Sharding::new(Patterns::new(&["o_proj"]).unwrap()) };
    Plan::new(&all, Group { id: 0, rank: OWN.min(ranks - 1), ranks }, &sharding).unwrap()
}

impl Model {
    pub fn new(plan: Plan, without: Option<u64>) -> Model {
        let host = HostDevice::new(HostOptions::default());
        let watch = match without {
            Some(number) => Watch::without_wait(host, number),
            None => Watch::new(host),
        };
        Model::on(watch, plan)
    }

    pub fn on(watch: Arc<Watch>, plan: Plan) -> Model {
        let (layers, ranks) = (plan.model_layers(), plan.group().ranks as usize);
        let others = PART * (ranks as u64 - 1).max(1);
        let memory = watch.allocate((2 * layers as u64 + 3) * (others + PART)).unwrap();
        let mut taken = 0;
        let mut take = |bytes: u64| {
            taken += bytes;
            memory.part(taken - bytes, bytes).unwrap()
        };
        let parts: Vec<Vec<Slice>> = (0..layers).map(|_| (0..ranks).map(|_| take(PART)).collect()).collect();
        for (layer, parts) in parts.iter().enumerate() {
            parts.iter().for_each(|part| watch.holds(part, content(layer)).unwrap());
        }
        let buffers = (0..3).map(|_| take(others)).collect();
        let own = (0..layers).map(|_| take(others)).collect();
        Model {
            watch,
            plan,
            layers,
            parts,
            buffers,
            own,
            resident: vec![false; layers],
            acts: Arc::default(),
            passes: Arc::new(AtomicUsize::new(usize::MAX)),
        }
    }

    /// The place of copy `copy` of a pull among the parts: the other ranks, beginning behind this one.
    fn from(&self, copy: usize) -> usize {
        (self.plan.group().rank as usize + 1 + copy) % self.plan.group().ranks as usize
    }

    /// Where a sharded layer's window shows the parts of the other ranks, if there are any.
    fn others(&self, layer: usize) -> Option<Slice> {
        let buffer = self.buffer(layer)?;
        let memory = if self.resident[layer] { self.own[layer] } else { self.buffers[buffer] };
        (self.parts[layer].len() > 1).then_some(memory)
    }

    /// Declares a read of a whole window, which expects the layer.
    pub fn uses(&self, layer: usize, what: &'static str, stream: Stream) -> Result<()> {
        self.acts.lock().unwrap().push(Act::Used(layer));
        let mut window =
            [Some(self.parts[layer][self.rank() as usize]), self.others(layer)].into_iter().flatten();
        window.try_for_each(|slice| self.watch.uses(stream, what, &slice, content(layer)))
    }

    /// What a graph of a step leaves in each buffer that layers use in turn: its first layer, or its last one.
    pub fn graph(&self, joined: bool, stream: Stream) -> impl FnOnce() -> Result<()> + use<> {
        let mut copies = Vec::new();
        for buffer in 0..3 {
            let layers: Vec<usize> =
                (0..self.layers).filter(|layer| self.buffer(*layer) == Some(buffer)).collect();
            let [first, .., last] = layers[..] else { continue };
            let layer = if joined { first } else { last };
            for copy in 0..self.parts[layer].len() - 1 {
                let to = self.buffers[buffer].part(PART * copy as u64, PART).unwrap();
                copies.push((self.parts[layer][self.from(copy)], to));
            }
        }
        let watch = self.watch.clone();
        move || copies.into_iter().try_for_each(|(from, to)| watch.copy(stream, from, to))
    }

    /// Makes a layer resident, as [`forebay::weights::Windows`] do: its pulls write memory of its own from now on.
    pub fn make_resident(&mut self, layer: usize, stream: Stream) {
        self.resident[layer] = true;
        self.pull_some(layer, stream, 0..self.copies(layer).unwrap()).unwrap();
        let event = self.watch.event().unwrap();
        self.watch.record(event, stream).unwrap();
        self.watch.synchronize(event).unwrap();
    }
}

impl Pull for Model {
    fn rank(&self) -> u32 {
        self.plan.group().rank
    }

    fn layers(&self) -> usize {
        self.layers
    }

    fn buffer(&self, layer: usize) -> Option<usize> {
        let found = self.plan.layers().iter().find(|one| one.layer == layer)?;
        match found.place {
            Place::Resident => None,
            Place::Buffer(buffer) => Some(buffer.into()),
        }
    }

    fn copies(&self, _: usize) -> Result<usize> {
        Ok(self.plan.group().ranks as usize - 1)
    }

    fn pull_some(&self, layer: usize, stream: Stream, copies: Range<usize>) -> Result<()> {
        if copies.start == 0 {
            self.acts.lock().unwrap().push(Act::Pulled(layer));
        }
        for copy in copies {
            // It wraps to the largest number, which no test reaches.
            if self.passes.fetch_sub(1, Ordering::Relaxed) == 0 {
                return Err(forebay::Error::new(Kind::OsRefused, "copy").at("refused by a test"));
            }
            let to = self.others(layer).unwrap().part(PART * copy as u64, PART).unwrap();
            self.watch.copy(stream, self.parts[layer][self.from(copy)], to)?;
        }
        Ok(())
    }

    fn window(&self, layer: usize) -> Result<Option<Slice>> {
        Ok(self.others(layer))
    }

    fn is_whole(&self, layer: usize) -> bool {
        self.resident[layer]
    }

    fn reads(&self, _: usize, rank: u32) -> bool {
        rank != self.rank() && rank < self.plan.group().ranks
    }
}
