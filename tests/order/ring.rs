//! The ring of sharded weights: each use of a window finds its layer, whatever the layers, ranks, micro-batches, orders
//! of overlap and draft passes; every edge is needed; misuse is an error that changes nothing.

#[path = "ring/ahead.rs"]
mod ahead;
#[path = "ring/misuse.rs"]
mod misuse;
#[path = "ring/model.rs"]
mod model;
#[path = "ring/schedule.rs"]
mod schedule;

use std::sync::Arc;

use forebay::Result;
use forebay::check::watch::Watch;
use forebay::device::{Device, Stream};
use forebay::weights::{Odd, Pull, Ring, RingOptions};
use model::{Act, Model, plan};

/// A ring over a watched model, and a compute stream for each micro-batch.
struct Rig {
    watch: Arc<Watch>,
    ring: Ring<Model>,
    streams: Vec<Stream>,
}

impl Rig {
    fn new(model: Model, options: RingOptions) -> Rig {
        let watch = model.watch.clone();
        let device: Arc<dyn Device> = watch.clone();
        let ring = Ring::new(&device, model, options).unwrap();
        let streams = (0..options.micro_batches).map(|_| watch.stream().unwrap()).collect();
        Rig { watch, ring, streams }
    }

    /// A use of a layer by a micro-batch: its attention and its output projection read the window.
    fn uses(&mut self, layer: usize, micro_batch: usize) -> Result<()> {
        let stream = self.streams[micro_batch];
        self.ring.enter(layer, micro_batch, stream)?;
        self.ring.pulls().uses(layer, "attention", stream)?;
        self.ring.pulls().uses(layer, "output", stream)?;
        self.ring.leave(layer, micro_batch, stream)
    }

    fn layers(&mut self, micro_batches: usize, layers: impl Iterator<Item = usize>) -> Result<()> {
        for layer in layers {
            (0..micro_batches).try_for_each(|micro_batch| self.uses(layer, micro_batch))?;
        }
        Ok(())
    }

    /// A step of all layers; the last `draft_layers` in each of so many passes.
    fn step(&mut self, micro_batches: usize, draft_layers: usize, draft_passes: usize) -> Result<()> {
        let all = self.ring.pulls().layers();
        self.ring.begin(micro_batches, draft_passes)?;
        self.layers(micro_batches, 0..all - draft_layers)?;
        for _ in 0..draft_passes {
            self.layers(micro_batches, all - draft_layers..all)?;
        }
        self.ring.end(self.streams[0])
    }
}

/// Which layers are shardable: all, or some of them with resident ones between.
fn shardable(kind: usize) -> impl Fn(usize) -> bool {
    move |layer| match kind {
        0 => true,
        1 => layer % 3 != 1,
        _ => layer % 5 < 2,
    }
}

#[test]
fn every_use_finds_its_layer() {
    for layers in 1..=62 {
        for ranks in 1..=8 {
            for micro_batches in 1..=2 {
                let kind = (layers + ranks as usize) % 3;
                let odd = [Odd::Cheapest, Odd::ThirdBuffer, Odd::ResidentFirst, Odd::ResidentLast];
                let odd = odd[(layers / 2 + ranks as usize) % 4];
                let parts = 1 + (layers + micro_batches) % 3;
                let model = Model::new(plan(layers, ranks, odd, shardable(kind)), None);
                let mut rig = Rig::new(model, RingOptions { micro_batches, parts, ..RingOptions::default() });
                for _ in 0..3 {
                    rig.step(micro_batches, 0, 0).unwrap_or_else(|error| {
                        panic!("{layers} layers, {ranks} ranks, {micro_batches} micro-batches: {error}")
                    });
                }
                assert_eq!(rig.watch.conflict(), None);
            }
        }
    }
}

/// Draft layers run once for each draft pass, in passes that change from step to step.
#[test]
fn draft_passes_find_their_layers() {
    for layers in 4..=11 {
        for draft_layers in 1..=3 {
            for odd in [Odd::Cheapest, Odd::ThirdBuffer] {
                for micro_batches in 1..=2 {
                    let model = Model::new(plan(layers, 3, odd, |_| true), None);
                    let options = RingOptions { draft_layers, micro_batches, ..RingOptions::default() };
                    let mut rig = Rig::new(model, options);
                    for passes in [2, 0, 1, 3, 0, 0, 2] {
                        rig.step(micro_batches, draft_layers, passes).unwrap();
                    }
                    assert_eq!(rig.watch.conflict(), None);
                }
            }
        }
    }
}

/// Uses of one draft layer, one after another, count as one: nothing is pulled between them.
#[test]
fn consecutive_uses_of_a_draft_layer_count_once() {
    let mut rig = Rig::new(
        Model::new(plan(4, 4, Odd::Cheapest, |_| true), None),
        RingOptions { draft_layers: 1, ..RingOptions::default() },
    );
    let acts = rig.ring.pulls().acts.clone();
    rig.step(1, 1, 3).unwrap();
    let pulled: Vec<usize> = acts
        .lock()
        .unwrap()
        .iter()
        .filter_map(|act| if let Act::Pulled(l) = act { Some(*l) } else { None })
        .collect();
    assert_eq!(pulled, [0, 1, 2, 3, 0, 1]);
}

/// The order of FlowMLA's publication: pulls 0 and 1 come first; use i follows pull i; pull i + 2 follows use i.
#[test]
fn four_layers_and_four_ranks_have_the_published_order() {
    let model = Model::new(plan(4, 4, Odd::Cheapest, |_| true), None);
    let acts = model.acts.clone();
    let mut rig = Rig::new(model, RingOptions::default());
    for _ in 0..2 {
        rig.step(1, 0, 0).unwrap();
    }
    let mut expected = vec![Act::Pulled(0), Act::Pulled(1)];
    for layer in [0, 1, 2, 3, 0, 1, 2, 3] {
        expected.extend([Act::Used(layer), Act::Used(layer), Act::Pulled((layer + 2) % 4)]);
    }
    assert_eq!(*acts.lock().unwrap(), expected);
}

/// Each wait that orders something is needed: without it, the order finds a race. Waits between the parts of a pull are
/// for its pace: with parts, as many others are needed as without.
#[test]
fn each_edge_left_out_is_found() {
    for (micro_batches, draft_layers, odd) in
        [(1, 0, Odd::Cheapest), (2, 0, Odd::ThirdBuffer), (2, 1, Odd::Cheapest), (1, 0, Odd::ThirdBuffer)]
    {
        let found = |parts: usize| {
            let options = RingOptions { micro_batches, draft_layers, parts, ..RingOptions::default() };
            let run = |without: Option<u64>| {
                let mut rig = Rig::new(Model::new(plan(5, 4, odd, |_| true), without), options);
                let result = (0..3).try_for_each(|_| rig.step(micro_batches, draft_layers, 2));
                (rig.watch, result)
            };
            let (watch, result) = run(None);
            result.unwrap();
            let mut found = 0;
            for wait in 0..watch.waits() {
                let (watch, result) = run(Some(wait));
                let ordering = watch.left_out().unwrap().ordering;
                let is_known = parts > 1 || result.is_err() == ordering;
                assert!(is_known, "wait {wait} orders something: {ordering}, without it {result:?}");
                assert!(ordering || result.is_ok(), "wait {wait} orders nothing, without it {result:?}");
                found += u32::from(result.is_err());
            }
            found
        };
        let whole = found(1);
        assert!(whole > 10, "{whole}");
        assert_eq!(found(3), whole, "{micro_batches} micro-batches, {draft_layers} draft layers, {odd:?}");
    }
}
