//! Windows that the ring brings into L2: no use is wrong by it, and each edge that orders it against a pull is needed.

use std::sync::Arc;

use forebay::check::watch::Watch;
use forebay::device::{Device, Stream};
use forebay::weights::{Odd, Prefetch, Ring, RingOptions};
use forebay::{Kind, Result};

use super::model::{Model, plan};
use super::{Rig, shardable};

/// More bytes than some windows have, and fewer than others.
const AHEAD: Option<Prefetch> = Some(Prefetch { bytes: 150, rate: 1 << 30 });

#[test]
fn every_use_finds_its_layer_when_windows_are_touched_ahead() {
    for layers in 1..=12 {
        for ranks in [1, 2, 5] {
            for micro_batches in 1..=2 {
                for parts in [1, 2, 9] {
                    let odd = [Odd::Cheapest, Odd::ThirdBuffer, Odd::ResidentLast][layers % 3];
                    let model = Model::new(plan(layers, ranks, odd, shardable(layers % 3)), None);
                    let draft_layers = usize::from(layers > 3);
                    let options = RingOptions {
                        micro_batches,
                        parts,
                        draft_layers,
                        prefetch: AHEAD,
                        ..Default::default()
                    };
                    let mut rig = Rig::new(model, options);
                    for passes in [0, 2, 1] {
                        rig.step(micro_batches, draft_layers, passes).unwrap();
                    }
                    // A step that is abandoned with a prefetch under way.
                    rig.ring.begin(micro_batches, 0).unwrap();
                    rig.layers(micro_batches, 0..(layers - draft_layers).div_ceil(2)).unwrap();
                    rig.ring.abandon().unwrap();
                    rig.step(micro_batches, draft_layers, 1).unwrap();
                    assert_eq!(rig.watch.conflict(), None);
                }
            }
        }
    }
}

/// What leaving a wait out shows, in steps of five layers.
struct Found {
    /// Waits of the prefetches' stream, and of others, that are missed.
    ahead: u32,
    others: u32,
    /// Waits that order something and are not missed: they pace a prefetch behind a layer's end.
    paces: u32,
}

fn found(odd: Odd, options: RingOptions) -> Found {
    let run = |without: Option<u64>| -> (Arc<Watch>, Option<Stream>, Result<()>) {
        let mut rig = Rig::new(Model::new(plan(5, 4, odd, |_| true), without), options);
        let result = (0..3).try_for_each(|_| rig.step(options.micro_batches, options.draft_layers, 2));
        (rig.watch, rig.ring.prefetch_stream(), result)
    };
    let (watch, _, result) = run(None);
    result.unwrap();
    let mut found = Found { ahead: 0, others: 0, paces: 0 };
    for wait in 0..watch.waits() {
        let (watch, ahead, result) = run(Some(wait));
        let left_out = watch.left_out().unwrap();
        match (result.is_err(), Some(left_out.stream) == ahead) {
            (true, true) => found.ahead += 1,
            (true, false) => found.others += 1,
            (false, true) => found.paces += u32::from(left_out.ordering),
            (false, false) => assert!(!left_out.ordering, "wait {wait}"),
        }
    }
    found
}

#[test]
fn each_edge_around_a_prefetch_is_needed() {
    for (micro_batches, draft_layers, odd) in
        [(1, 0, Odd::Cheapest), (2, 0, Odd::ThirdBuffer), (2, 1, Odd::Cheapest)]
    {
        let options = RingOptions { micro_batches, draft_layers, ..RingOptions::default() };
        let without = found(odd, options);
        let with = found(odd, RingOptions { prefetch: AHEAD, ..options });
        assert_eq!((without.ahead, without.paces), (0, 0));
        // Three steps of at least three prefetches: each waits for an arrival, and a pull for each but the last ones.
        assert!(with.ahead >= 9 && with.paces >= 9, "{} {}", with.ahead, with.paces);
        assert!(with.others >= without.others + 6, "{} {}", with.others, without.others);
    }
}

#[test]
fn a_prefetch_without_bytes_or_rate_is_no_option() {
    for prefetch in [Prefetch { bytes: 0, rate: 1 }, Prefetch { bytes: 1, rate: 0 }] {
        let model = Model::new(plan(4, 2, Odd::Cheapest, |_| true), None);
        let device: Arc<dyn Device> = model.watch.clone();
        let options = RingOptions { prefetch: Some(prefetch), ..RingOptions::default() };
        let error = Ring::new(&device, model, options).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, "options"));
    }
}
