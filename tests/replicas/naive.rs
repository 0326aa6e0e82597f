//! The oracle: page by page, which ranks have it, without segments or parts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use forebay::weights::{Place, Plan, Replica};

use crate::{Engine, Faulty, grain, replica};

/// The replicas that a plan allows, by trying each.
pub fn possible(plan: &Plan) -> Vec<Replica> {
    let mut all = Vec::new();
    for own in plan.layers() {
        for tensor in 0..own.layout.tensors().len() {
            for rank in 0..plan.group().ranks {
                let one = replica(own.layer, tensor, rank);
                if gains(plan, &one) > 0 {
                    all.push(one);
                }
            }
        }
    }
    all
}

/// The rank that owns a page of a sharded layer.
fn owner(plan: &Plan, layer: usize, page: u64) -> u32 {
    (0..plan.group().ranks).find(|rank| plan.part(layer, *rank).unwrap().contains(&page)).unwrap()
}

/// The pages that a replica is of, each with its owner.
fn pages(plan: &Plan, replica: &Replica) -> Vec<(u64, u32)> {
    let layer = plan.layers().iter().find(|one| one.layer == replica.layer).unwrap();
    if layer.place == Place::Resident {
        return Vec::new();
    }
    let tensor = layer.layout.tensors().iter().find(|tensor| tensor.name == replica.tensor).unwrap();
    let whole =
        |page: &u64| page * grain() >= tensor.offset && (page + 1) * grain() <= tensor.offset + tensor.bytes;
    let pages = (0..layer.layout.pages()).filter(whole);
    let owned = pages.map(|page| (page, owner(plan, replica.layer, page)));
    owned.filter(|(_, owner)| *owner != replica.rank).collect()
}

/// Bytes that a replica's rank takes for it.
pub fn gains(plan: &Plan, replica: &Replica) -> u64 {
    pages(plan, replica).len() as u64 * grain()
}

/// Bytes that a rank takes for all of its replicas.
pub fn bytes(plan: &Plan, set: &BTreeSet<Replica>, rank: u32) -> u64 {
    set.iter().filter(|one| one.rank == rank).map(|one| gains(plan, one)).sum()
}

/// The ranks that own pages of a replica.
pub fn owners(plan: &Plan, replica: &Replica) -> BTreeSet<u32> {
    pages(plan, replica).into_iter().map(|(_, owner)| owner).collect()
}

/// Backings that each rank holds for all replicas: one for each owner of each.
pub fn backings(plan: &Plan, set: &BTreeSet<Replica>) -> usize {
    set.iter().map(|one| owners(plan, one).len()).sum()
}

/// The ranks that have a page of a sharded layer.
pub fn holders(plan: &Plan, set: &BTreeSet<Replica>, layer: usize, page: u64) -> BTreeSet<u32> {
    let of_layer = set.iter().filter(|one| one.layer == layer);
    let held =
        of_layer.filter(|one| pages(plan, one).iter().any(|(own, _)| *own == page)).map(|one| one.rank);
    held.chain([owner(plan, layer, page)]).collect()
}

/// By layer and page that the rank does not own: the rank whose memory it was read from.
pub type Sources = BTreeMap<(usize, u64), u32>;

/// Finds out from which memory a rank's pulls read.
pub struct Probe {
    faulty: Arc<Faulty>,
    /// By layer: where its pulls write, and how much.
    targets: BTreeMap<usize, (u64, u64)>,
}

impl Probe {
    /// Before the rank's first step, so that its ring does not miss what is pulled here.
    pub fn new(engine: &Engine, faulty: &Arc<Faulty>) -> Probe {
        let target = |layer: usize| {
            faulty.trace();
            engine.ring.pulls().pull(layer, engine.stream()).unwrap();
            engine.rank.wait().unwrap();
            let copies = faulty.traced();
            let from = copies.iter().map(|(_, to)| to.address()).min()?;
            let to = copies.iter().map(|(_, to)| to.address() + to.bytes()).max()?;
            Some((layer, (from, to)))
        };
        Probe {
            faulty: Arc::clone(faulty),
            targets: engine.layers().into_iter().filter_map(target).collect(),
        }
    }

    /// Makes two steps, in which each layer that is not resident is pulled.
    pub fn steps(&self, engine: &mut Engine) -> Sources {
        self.faulty.trace();
        engine.step().unwrap();
        engine.step().unwrap();
        let mut sources = Sources::new();
        for (from, to) in self.faulty.traced() {
            for at in (0..from.bytes()).step_by(grain() as usize) {
                let place = to.address() + at;
                let found = self.targets.iter().find(|(_, (start, end))| (*start..*end).contains(&place));
                let Some((layer, (start, _))) = found else { continue };
                let (index, own) =
                    ((place - start) / grain(), engine.plan.part(*layer, engine.own()).unwrap());
                let page = if index < own.start { index } else { index + own.end - own.start };
                let giver = self.faulty.giver(from.address() + at).expect("memory of no rank");
                let before = sources.insert((*layer, page), giver);
                assert!(before.is_none_or(|before| before == giver), "layer {layer}, page {page}");
            }
        }
        sources
    }

    /// Makes steps, and compares what is read with the set that there is.
    pub fn check(&self, engine: &mut Engine, set: &BTreeSet<Replica>) -> Sources {
        let (plan, own) = (engine.plan.clone(), engine.own());
        assert_eq!(engine.ring.pulls().replicas(), set.iter().cloned().collect::<Vec<_>>());
        assert_eq!(engine.ring.pulls().replica_bytes(), bytes(&plan, set, own));
        let sources = self.steps(engine);
        for ((layer, page), source) in &sources {
            let holders = holders(&plan, set, *layer, *page);
            let right = if holders.contains(&own) { *source == own } else { holders.contains(source) };
            assert!(right, "rank {own} reads layer {layer}, page {page} from {source}, not from {holders:?}");
            let reads = forebay::weights::Pull::reads(engine.ring.pulls(), *layer, *source);
            assert!(reads || *source == own, "layer {layer}, rank {source}");
        }
        // A rank of which nothing is read is not needed.
        for layer in engine.layers().into_iter().filter(|layer| sources.keys().any(|(one, _)| one == layer)) {
            for rank in (0..plan.group().ranks).filter(|rank| *rank != own) {
                let read = sources.iter().any(|((one, _), source)| (*one, *source) == (layer, rank));
                let reads = forebay::weights::Pull::reads(engine.ring.pulls(), layer, rank);
                assert_eq!(reads, read, "layer {layer}, rank {rank}");
            }
        }
        sources
    }
}
