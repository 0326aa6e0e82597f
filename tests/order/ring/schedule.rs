//! The ring under the schedule of a cache: an engine whose hooks call it, in every order of overlap, with two
//! micro-batches and draft passes. Its work reads the layer's window in each callback that may.

use forebay::check::watch::Watch;
use forebay::device::{Device, Stream};
use forebay::overlap::{Engine, EngineCall, Overlap, Work};
use forebay::weights::{Odd, Ring, RingOptions};
use forebay::{Kind, Layer, MicroBatch, Result, Shape};
use std::sync::Arc;

use super::model::{Model, plan};
use crate::rig::{Caller, QUERY_ROWS, Rig, Sharing, config};

/// Four layers and a draft layer.
const LAYERS: usize = 5;

/// The engine: what the cache's own tests have, and windows.
struct Sharded<'a> {
    caller: Caller,
    ring: &'a mut Ring<Model>,
    /// Whether the output projection is a part of the rest, as in an engine that does not divide it.
    late: bool,
    /// The layer whose use fails.
    fails: Option<u32>,
}

impl Sharded<'_> {
    fn uses(&self, call: &EngineCall, what: &'static str, stream: Stream) -> Result<()> {
        if self.fails == Some(call.layer.0) {
            return Err(forebay::Error::new(Kind::Internal, "engine"));
        }
        self.ring.pulls().uses(call.layer.index(), what, stream)
    }
}

impl Engine for Sharded<'_> {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        match call.work {
            Work::Rest if !self.late => {}
            work => self.uses(call, if work == Work::Rest { "late output" } else { "attention" }, stream)?,
        }
        self.caller.enqueue(call, stream)
    }

    fn enter(&mut self, layer: Layer, micro_batch: MicroBatch, stream: Stream) -> Result<()> {
        self.ring.enter(layer.index(), micro_batch.index(), stream)
    }

    fn enqueue_output(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        self.uses(call, "output", stream)
    }

    fn leave(&mut self, layer: Layer, micro_batch: MicroBatch, stream: Stream) -> Result<()> {
        self.ring.leave(layer.index(), micro_batch.index(), stream)
    }

    fn end(&mut self, stream: Stream) -> Result<()> {
        self.ring.end(stream)
    }
}

struct Both {
    rig: Rig,
    ring: Ring<Model>,
}

impl Both {
    fn new(odd: Odd, sharing: Sharing, without: Option<u64>) -> Both {
        Both::grouped(0, odd, sharing, without)
    }

    /// With so many layers that share a selection; 0 if none do.
    fn grouped(group_layers: u32, odd: Odd, sharing: Sharing, without: Option<u64>) -> Both {
        let config = config(1);
        let shape = Shape { layers: LAYERS as u32 - 1, group_layers, ..config.shape };
        let mut rig = Rig::with(forebay::Config { shape, ..config }, sharing, without);
        rig.fill().unwrap();
        let model = Model::on(rig.watch.clone(), plan(LAYERS, 3, odd, |_| true));
        let device: Arc<dyn Device> = rig.watch.clone();
        let options = RingOptions { draft_layers: 1, micro_batches: 2, ..RingOptions::default() };
        Both { ring: Ring::new(&device, model, options).unwrap(), rig }
    }

    fn step(&mut self, orders: [Overlap; LAYERS], late: bool, fails: Option<u32>) -> Result<()> {
        self.ring.begin(2, QUERY_ROWS as usize)?;
        let mut engine = Sharded { caller: self.rig.caller(), ring: &mut self.ring, late, fails };
        self.rig.step_of(orders, 0, &mut engine)
    }

    fn watch(&self) -> &Watch {
        &self.rig.watch
    }
}

const ORDERS: [[Overlap; LAYERS]; 4] = [
    [Overlap::None; LAYERS],
    [Overlap::Da; LAYERS],
    [Overlap::Dba; LAYERS],
    [Overlap::Dba, Overlap::None, Overlap::Da, Overlap::Dba, Overlap::None],
];

#[test]
fn every_order_of_overlap_finds_its_layers() {
    for orders in ORDERS {
        for odd in [Odd::Cheapest, Odd::ThirdBuffer, Odd::ResidentLast] {
            for sharing in [Sharing::None, Sharing::Two, Sharing::One] {
                let mut both = Both::new(odd, sharing, None);
                (0..3).for_each(|_| both.step(orders, false, None).unwrap());
                assert_eq!(both.watch().conflict(), None);
                both.rig.retire();
            }
        }
    }
}

/// Layers that share a selection, whose gathers run ahead: their windows are entered before a gather that the layer
/// before has ordered.
#[test]
fn layers_that_run_ahead_find_their_windows() {
    let [none, da, dba, ahead] = Overlap::ALL;
    for group_layers in [2, 4] {
        let second = if group_layers == 2 { dba } else { ahead };
        for orders in
            [[none, ahead, second, ahead, none], [dba, ahead, second, da, dba], [da, da, da, ahead, da]]
        {
            for sharing in [Sharing::None, Sharing::Two, Sharing::One] {
                let mut both = Both::grouped(group_layers, Odd::Cheapest, sharing, None);
                (0..3).for_each(|_| both.step(orders, false, None).unwrap());
                assert_eq!(both.watch().conflict(), None, "{orders:?}");
                both.rig.retire();
            }
        }
    }
}

/// Each wait of two steps that orders something is needed, those of the cache and those of the ring.
#[test]
fn each_edge_of_a_schedule_with_a_ring_is_needed() {
    for orders in ORDERS {
        let new = |without| Both::new(Odd::Cheapest, Sharing::None, without);
        let (mut both, mut needed) = (new(None), 0);
        let first = both.watch().waits();
        (0..2).for_each(|_| both.step(orders, false, None).unwrap());
        let last = both.watch().waits();
        both.step(orders, false, None).unwrap();
        for wait in first..last {
            let mut both = new(Some(wait));
            let result = (0..3).try_for_each(|_| both.step(orders, false, None));
            let ordering = both.watch().left_out().unwrap().ordering;
            assert_eq!(result.is_err(), ordering, "{orders:?}: wait {wait}: {result:?}");
            needed += u32::from(ordering);
        }
        // Of the ring's: an arrival and a release for each of two micro-batches, in five uses of two buffers at least.
        assert!(needed > 40, "{needed}");
    }
}

/// The control: an engine that leaves the output projection in the rest, behind the end of the use.
#[test]
fn a_window_that_is_read_after_its_release_is_found() {
    let mut both = Both::new(Odd::Cheapest, Sharing::None, None);
    let error = both.step([Overlap::Da; LAYERS], true, None).unwrap_err();
    assert!(both.watch().conflict().is_some(), "{error}");
}

/// A step that is given up in the middle of a layer is abandoned in the cache and in the ring. The next one finds every
/// layer.
#[test]
fn an_abandoned_step_leaves_the_ring_at_its_border() {
    for fails in 0..LAYERS as u32 {
        let mut both = Both::new(Odd::Cheapest, Sharing::None, None);
        both.step(ORDERS[2], false, None).unwrap();
        assert_eq!(both.step(ORDERS[2], false, Some(fails)).unwrap_err().kind(), Kind::Internal);
        let error = both.ring.begin(2, 1).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::Busy, "a step is open"));
        both.ring.abandon().unwrap();
        both.ring.begin(2, 1).unwrap();
        let streams = [0, 1].map(|micro: usize| both.rig.micro[micro].streams.compute);
        for layer in 0..LAYERS {
            for (micro, stream) in streams.iter().enumerate() {
                both.ring.enter(layer, micro, *stream).unwrap();
                both.ring.pulls().uses(layer, "attention", *stream).unwrap();
                both.ring.leave(layer, micro, *stream).unwrap();
            }
        }
        both.ring.end(streams[0]).unwrap();
        assert_eq!(both.watch().conflict(), None);
    }
}
