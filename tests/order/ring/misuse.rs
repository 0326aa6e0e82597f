//! Calls out of order, and ranks that end: one error each that names the layer, and what was enqueued stays right.

use forebay::device::Device;
use std::sync::atomic::Ordering;

use forebay::weights::{Odd, Pull, RingOptions, Wrap};
use forebay::{Error, Kind};

use super::Rig;
use super::model::{Model, OWN, plan};

fn rig(micro_batches: usize) -> Rig {
    let model = Model::new(plan(6, 4, Odd::Cheapest, |layer| layer != 3), None);
    Rig::new(model, RingOptions { micro_batches, draft_layers: 1, ..RingOptions::default() })
}

/// An error of the ring, which names a rank: this one, if no other was lost.
fn says(error: &Error) -> (Kind, &str) {
    let lost = error.kind() == Kind::PeerLost;
    assert_eq!(error.number("rank") != Some(OWN.into()), lost, "{error}");
    (error.kind(), error.place())
}

/// Gives the step up, and finds every layer in the next one.
fn goes_on(rig: &mut Rig, micro_batches: usize) {
    rig.ring.abandon().unwrap();
    rig.step(micro_batches, 1, 1).unwrap();
    assert_eq!(rig.watch.conflict(), None);
}

#[test]
fn layers_out_of_order_are_named() {
    let mut rig = rig(1);
    let stream = rig.streams[0];
    let error = rig.ring.enter(0, 0, stream).unwrap_err();
    assert_eq!(says(&error), (Kind::InvalidState, "layer 0: no step has begun"));
    assert_eq!(says(&rig.ring.end(stream).unwrap_err()), (Kind::InvalidState, "no step has begun"));
    rig.ring.begin(1, 1).unwrap();
    // The plan keeps layer 0 resident, and nothing of layer 3 was chosen: neither has an order.
    rig.ring.enter(0, 0, stream).unwrap();
    rig.ring.leave(3, 0, stream).unwrap();
    let error = rig.ring.leave(1, 0, stream).unwrap_err();
    let place = "layer 1: left without having been entered";
    assert_eq!((says(&error), error.number("expected")), ((Kind::InvalidState, place), Some(1)));
    let error = rig.ring.enter(2, 0, stream).unwrap_err();
    assert_eq!(
        (says(&error), error.number("expected")),
        ((Kind::InvalidState, "layer 2: entered out of order"), Some(1))
    );
    rig.ring.enter(1, 0, stream).unwrap();
    let error = rig.ring.enter(2, 0, stream).unwrap_err();
    assert_eq!(says(&error), (Kind::InvalidState, "layer 2: entered before the last layer was left"));
    let error = rig.ring.leave(2, 0, stream).unwrap_err();
    assert_eq!(says(&error), (Kind::InvalidState, "layer 2: left without having been entered"));
    let error = rig.ring.end(stream).unwrap_err();
    assert_eq!(says(&error), (Kind::InvalidState, "layer 1: not used in a step that ends"));
    let error = rig.ring.enter(6, 0, stream).unwrap_err();
    assert_eq!(says(&error), (Kind::OutOfRange, "layer 6: no layer of the model"));
    let error = rig.ring.enter(2, 1, stream).unwrap_err();
    assert_eq!(says(&error), (Kind::OutOfRange, "layer 2: a micro-batch that the step does not have"));
    goes_on(&mut rig, 1);
    // All uses are over, and one more is asked for.
    rig.ring.begin(1, 0).unwrap();
    rig.layers(1, 0..5).unwrap();
    let error = rig.ring.enter(5, 0, stream).unwrap_err();
    assert_eq!(says(&error), (Kind::InvalidState, "layer 5: entered out of order"));
    rig.ring.end(stream).unwrap();
    assert_eq!(says(&rig.ring.begin(2, 0).unwrap_err()).1, "micro-batches of a step");
    assert_eq!(says(&rig.ring.begin(0, 0).unwrap_err()).0, Kind::OutOfRange);
    goes_on(&mut rig, 1);
}

#[test]
fn a_ring_that_two_schedules_use_is_refused() {
    let mut rig = rig(2);
    rig.ring.begin(2, 0).unwrap();
    assert_eq!(says(&rig.ring.begin(2, 0).unwrap_err()), (Kind::Busy, "a step is open"));
    let [first, second] = [rig.streams[0], rig.streams[1]];
    rig.ring.enter(1, 0, first).unwrap();
    let error = rig.ring.leave(1, 0, second).unwrap_err();
    assert_eq!(says(&error), (Kind::InvalidState, "layer 1: the ring is used by two schedules"));
    // A micro-batch that runs ahead by a whole buffer.
    rig.ring.leave(1, 0, first).unwrap();
    rig.ring.enter(2, 0, first).unwrap();
    rig.ring.leave(2, 0, first).unwrap();
    let error = rig.ring.enter(4, 0, first).unwrap_err();
    assert_eq!(says(&error), (Kind::InvalidState, "layer 4: its pull has not begun"));
    goes_on(&mut rig, 2);
}

/// A rank that ended: nothing is pulled from it, and the error says what needs it. What is resident goes on.
#[test]
fn a_pull_from_a_rank_that_ended_is_refused() {
    let mut rig = rig(1);
    let stream = rig.streams[0];
    rig.step(1, 1, 1).unwrap();
    rig.ring.lost(2);
    rig.ring.lost(2);
    // The first layers are there.
    rig.ring.begin(1, 0).unwrap();
    rig.ring.enter(1, 0, stream).unwrap();
    let error = rig.ring.leave(1, 0, stream).unwrap_err();
    let place = "layer 4: it is pulled from a rank that ended";
    assert_eq!((says(&error), error.number("rank")), ((Kind::PeerLost, place), Some(2)));
    rig.ring.abandon().unwrap();
    // The layer that is there stays; the one that is gone is asked for again.
    let error = rig.ring.begin(1, 0).unwrap_err();
    assert_eq!((says(&error).0, error.number("rank")), (Kind::PeerLost, Some(2)));
    let error = rig.ring.launch(stream, || Ok(())).unwrap_err();
    assert_eq!((says(&error).0, error.number("rank")), (Kind::PeerLost, Some(2)));
    assert_eq!(rig.watch.conflict(), None);
}

/// The last layer alone has the third buffer, and the second micro-batch may still read it when a step without that
/// micro-batch is abandoned: the buffer is not pulled again.
#[test]
fn an_abandoned_step_pulls_nothing_under_a_reader_of_the_step_before() {
    let model = Model::new(plan(5, 4, Odd::ThirdBuffer, |_| true), None);
    let acts = model.acts.clone();
    let mut rig = Rig::new(model, RingOptions { micro_batches: 2, ..RingOptions::default() });
    for used in 0..=5 {
        rig.step(2, 0, 0).unwrap();
        rig.ring.begin(1, 0).unwrap();
        rig.layers(1, 0..used).unwrap();
        rig.ring.abandon().unwrap();
        rig.step(2, 0, 0).unwrap();
        assert_eq!(rig.watch.conflict(), None, "{used} layers");
    }
    let pulled = acts.lock().unwrap().iter().filter(|act| **act == super::Act::Pulled(4)).count();
    assert_eq!(pulled, 1);
}

/// The second micro-batch of an abandoned step may still read a first layer, which stays, when a step without that
/// micro-batch leaves it: the next pull waits for both.
#[test]
fn a_pull_waits_for_the_readers_of_an_abandoned_step() {
    for used in 1..=4 {
        let model = Model::new(plan(4, 4, Odd::Cheapest, |_| true), None);
        let mut rig = Rig::new(model, RingOptions { micro_batches: 2, ..RingOptions::default() });
        rig.ring.begin(2, 0).unwrap();
        rig.layers(2, 0..used - 1).unwrap();
        // Both read the layer, and neither leaves it.
        for micro_batch in 0..2 {
            let stream = rig.streams[micro_batch];
            rig.ring.enter(used - 1, micro_batch, stream).unwrap();
            rig.ring.pulls().uses(used - 1, "attention", stream).unwrap();
        }
        rig.ring.abandon().unwrap();
        (0..2).for_each(|_| rig.step(1, 0, 0).unwrap());
        assert_eq!(rig.watch.conflict(), None, "{used} layers");
    }
}

/// Each copy is refused once; the step after finds every layer.
#[test]
fn each_refused_copy_leaves_a_ring_that_goes_on() {
    let copies = 3 * 4;
    for refused in 0..3 * copies {
        let model = Model::new(plan(4, 4, Odd::Cheapest, |_| true), None);
        model.passes.store(refused, Ordering::Relaxed);
        let mut rig = Rig::new(model, RingOptions { parts: 1 + refused % 3, ..RingOptions::default() });
        let mut errors = 0;
        for _ in 0..3 {
            if let Err(error) = rig.step(1, 0, 0) {
                assert_eq!(error.kind(), Kind::OsRefused, "{error}");
                errors += 1;
                rig.ring.abandon().unwrap();
            }
        }
        assert_eq!((errors, rig.watch.conflict()), (1, None), "copy {refused}");
    }
}

/// The same of the pulls around a launch, and a launch that is refused: whatever the graph left in the buffers, the
/// next steps find every layer, and pull nothing under a reader.
#[test]
fn each_refused_copy_around_a_launch_leaves_a_ring_that_goes_on() {
    for (wrap, fails, odd) in [Wrap::Joined, Wrap::Behind]
        .into_iter()
        .flat_map(|wrap| [false, true].map(|fails| (wrap, fails)))
        .flat_map(|(wrap, fails)| [Odd::Cheapest, Odd::ThirdBuffer].map(|odd| (wrap, fails, odd)))
    {
        let mut refusals = 0;
        for refused in 0..8 {
            let model = Model::new(plan(5, 4, odd, |_| true), None);
            let (passes, joined) = (model.passes.clone(), wrap == Wrap::Joined);
            let mut rig = Rig::new(model, RingOptions { micro_batches: 2, wrap, ..RingOptions::default() });
            rig.step(2, 0, 0).unwrap();
            let stream = rig.streams[0];
            let graph = rig.ring.pulls().graph(joined, stream);
            // A graph of both micro-batches begins behind the second one's stream too.
            rig.watch.edge(rig.watch.event().unwrap(), rig.streams[1], stream).unwrap();
            passes.store(refused, Ordering::Relaxed);
            let refuse = || Err(Error::new(Kind::OsRefused, "launch"));
            let launched = rig.ring.launch(stream, || if fails { refuse() } else { graph() });
            passes.store(usize::MAX, Ordering::Relaxed);
            refusals += u32::from(launched.is_err());
            (0..2).for_each(|_| rig.step(2, 0, 0).unwrap());
            assert_eq!(
                rig.watch.conflict(),
                None,
                "{wrap:?}, refused launch: {fails}, {odd:?}, copy {refused}"
            );
        }
        let expected = match (wrap, fails) {
            (_, true) => 8,
            (Wrap::Behind, false) => 6,
            (Wrap::Joined, false) => 0,
        };
        assert_eq!(refusals, expected, "{wrap:?}, {odd:?}");
    }
}

/// The last layer alone has the third buffer, which no graph changes: where a launch is refused before it begins, the
/// second micro-batch may still read it.
#[test]
fn a_refused_launch_pulls_nothing_under_a_reader() {
    let mut rig = Rig::new(
        Model::new(plan(5, 4, Odd::ThirdBuffer, |_| true), None),
        RingOptions { micro_batches: 2, ..RingOptions::default() },
    );
    rig.step(2, 0, 0).unwrap();
    let refuse = || Err(Error::new(Kind::OsRefused, "launch"));
    assert_eq!(rig.ring.launch(rig.streams[0], refuse).unwrap_err().kind(), Kind::OsRefused);
    (0..2).for_each(|_| rig.step(2, 0, 0).unwrap());
    assert_eq!(rig.watch.conflict(), None);
}

/// A launch that the engine refuses may have launched half of it, whatever the error says: its edges stay. (That a
/// forked child enqueues nothing is tested with a fork, in `ffi/src/tests/weights.rs`.)
#[test]
fn a_refused_launch_keeps_its_edges() {
    for kind in [Kind::Closed, Kind::OsRefused] {
        let model = Model::new(plan(4, 4, Odd::Cheapest, |_| true), None);
        let mut rig = Rig::new(model, RingOptions { wrap: Wrap::Behind, ..RingOptions::default() });
        rig.step(1, 0, 0).unwrap();
        let (watch, mut before) = (rig.watch.clone(), 0);
        let refuse = || {
            before = watch.waits();
            Err(Error::new(kind, "launch"))
        };
        assert_eq!(rig.ring.launch(rig.streams[0], refuse).unwrap_err().kind(), kind);
        assert!(watch.waits() > before, "{kind:?}");
        rig.step(1, 0, 0).unwrap();
        assert_eq!(rig.watch.conflict(), None);
    }
}

/// A rank that ends between two parts of a pull: the rest is not pulled.
#[test]
fn the_rest_of_a_pull_from_a_rank_that_ended_is_refused() {
    let model = Model::new(plan(4, 4, Odd::Cheapest, |_| true), None);
    let mut rig = Rig::new(model, RingOptions { parts: 3, ..RingOptions::default() });
    rig.step(1, 0, 0).unwrap();
    rig.ring.lost(3);
    let error = rig.ring.begin(1, 0).unwrap_err();
    let place = "layer 1: it is pulled from a rank that ended";
    assert_eq!((says(&error), error.number("rank")), ((Kind::PeerLost, place), Some(3)));
}

/// Layers that become resident between steps are not pulled any more.
#[test]
fn a_resident_layer_is_not_pulled() {
    let mut model = Model::new(plan(6, 4, Odd::Cheapest, |_| true), None);
    let stream = model.watch.stream().unwrap();
    [0, 3].into_iter().for_each(|layer| model.make_resident(layer, stream));
    let acts = model.acts.clone();
    acts.lock().unwrap().clear();
    let mut rig = Rig::new(model, RingOptions::default());
    (0..2).for_each(|_| rig.step(1, 0, 0).unwrap());
    assert_eq!(rig.watch.conflict(), None);
    let pulled = |layer| acts.lock().unwrap().contains(&super::Act::Pulled(layer));
    assert_eq!((0..6).filter(|layer| pulled(*layer)).collect::<Vec<_>>(), [1, 2, 4, 5]);
    assert!(rig.ring.pulls().is_whole(3));
}

#[test]
fn options_that_no_step_has_are_refused() {
    for options in [
        RingOptions { micro_batches: 0, ..RingOptions::default() },
        RingOptions { parts: 0, ..RingOptions::default() },
        RingOptions { draft_layers: 7, ..RingOptions::default() },
    ] {
        let model = Model::new(plan(6, 2, Odd::Cheapest, |_| true), None);
        let device: std::sync::Arc<dyn Device> = model.watch.clone();
        let error = forebay::weights::Ring::new(&device, model, options).unwrap_err();
        assert_eq!(says(&error), (Kind::InvalidConfig, "options"));
    }
}
