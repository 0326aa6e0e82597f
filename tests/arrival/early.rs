//! Joins before all layers are there: the result of one join, layer by layer.

use crate::rig::{K, KEYED, LAYERS, Own, Rig, asks, config, row};
use forebay::device::{PoolOp, Slice, Warm};
use forebay::{BringUp, Budget, Config, Kind, Lane, Layer, Open, Share, WarmUp};
use std::collections::BTreeSet;

const STEPS: u32 = 5;
const PROMPT: u32 = 70;

/// Selections of the last prompt positions, `[groups][steps][k]`.
fn selections(rig: &mut Rig) -> Slice {
    let pick = |at: u32| ((at * 37 + at / 11) % PROMPT) as i32;
    let words = (0..2 * STEPS * K).map(pick);
    let bytes: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
    rig.stage_bytes(&bytes)
}

fn warm_of(rig: &mut Rig, group: Option<u32>) -> WarmUp {
    let all = selections(rig);
    let one = u64::from(4 * STEPS * K);
    let own = group.map_or(all, |group| all.part(u64::from(group) * one, one).unwrap());
    WarmUp { selections: Some(own), steps: STEPS, bytes_a_call: 0 }
}

/// The warm-up of a layer: of the group whose first it is, else none.
fn layer_warm(rig: &mut Rig, layer: u32, warms: bool) -> WarmUp {
    match layer {
        0 | 1 if warms => warm_of(rig, Some(layer)),
        _ => WarmUp::default(),
    }
}

fn bring(rig: &mut Rig, own: &Own, layer: u32) {
    rig.write_rows(own, layer, 0..PROMPT);
    rig.cache.append_layer_in_place(own.handle, Layer(layer), PROMPT).unwrap();
    if KEYED.contains(&layer) {
        let _ticket = rig.place(own, layer, 0, PROMPT, rig.side).unwrap();
    }
}

fn open(bring_up: BringUp, slots: u32) -> Open {
    Open { budget: Budget::Slots(slots), bring_up, ..asks(PROMPT, 20) }
}

/// The orders in which layers come that keep layer 1 before layer 2.
const ORDERS: [[u32; 3]; 3] = [[0, 1, 2], [1, 0, 2], [1, 2, 0]];

/// A sequence that joins early and gets its layers in an order.
fn early(rig: &mut Rig, open: &Open, order: [u32; 3], warms: bool) -> Own {
    let own = Own { handle: rig.cache.arrive(open).unwrap(), tag: 1 };
    let before = rig.cache.stats();
    let _ticket = rig.cache.join_early(own.handle, rig.main).unwrap();
    let joined = rig.cache.stats();
    assert_eq!((joined.arriving, joined.free_lanes), (0, before.free_lanes - 1));
    assert!(joined.slots_in_use > 0);
    for (number, layer) in (0..).zip(order) {
        assert!(!rig.cache.is_running(own.handle).unwrap());
        let length = rig.cache.length(own.handle).unwrap();
        assert_eq!((length.committed, length.filled), (0, 0), "some layer has no row");
        bring(rig, &own, layer);
        let warm = layer_warm(rig, layer, warms);
        let stream = if number % 2 == 0 { rig.side } else { rig.main };
        let _ticket = rig.cache.warm_layer(own.handle, Layer(layer), warm, stream).unwrap();
    }
    assert!(rig.cache.is_running(own.handle).unwrap());
    assert_eq!(rig.cache.length(own.handle).unwrap().committed, PROMPT);
    own
}

/// A sequence that joins when it is whole.
fn whole(rig: &mut Rig, open: &Open, warms: bool) -> Own {
    let own = Own { handle: rig.cache.arrive(open).unwrap(), tag: 1 };
    (0..LAYERS).for_each(|layer| bring(rig, &own, layer));
    let warm = if warms { warm_of(rig, None) } else { WarmUp::default() };
    let _ticket = rig.cache.join(own.handle, rig.main, warm).unwrap();
    own
}

fn rigs(config: &Config) -> Vec<Rig> {
    let mut rigs = vec![Rig::new(config.clone()), Rig::threaded(config.clone())];
    rigs.extend((0..10).map(|seed| Rig::clock(config.clone(), seed)));
    rigs
}

#[test]
fn a_sequence_that_joins_early_is_as_one_that_joins_whole() {
    for share in [None, Some(Share::default())] {
        let config = Config { share, ..config() };
        for (bring_up, slots) in [(BringUp::Nothing, 20), (BringUp::Whole, 80), (BringUp::Whole, 20)] {
            for warms in [false, true] {
                let open = open(bring_up, slots);
                let mut one = Rig::new(config.clone());
                let reference = whole(&mut one, &open, warms);
                let share = one.cache.budgets(reference.handle).unwrap().to_vec();
                for (number, mut rig) in rigs(&config).into_iter().enumerate() {
                    let own = early(&mut rig, &open, ORDERS[number % 3], warms);
                    rig.sync();
                    let told = (bring_up, slots, warms, number);
                    match config.share {
                        None => {
                            let digests = [&one, &rig].map(|rig| rig.cache.digest(own.handle).unwrap());
                            assert_eq!(digests[0], digests[1], "{told:?}");
                        }
                        // It has what it was promised. Its share is below.
                        Some(_) => assert_eq!(rig.cache.budgets(own.handle).unwrap(), [slots; 2], "{told:?}"),
                    }
                    rig.cache.validate().unwrap();
                    rig.step(&own, PROMPT, 0, &[0, 3, 36, 37, 69]);
                    rig.step(&own, PROMPT, 1, &[70, 5, 6]);
                    rig.check(&own, PROMPT + 2);
                    if config.share.is_some() {
                        rig.cache.share_slots(rig.main).unwrap();
                        let got = rig.cache.budgets(own.handle).unwrap();
                        assert!(got == share && share[0] > slots, "{told:?}: its share, once it runs");
                    }
                }
                one.step(&reference, PROMPT, 0, &[0, 3, 36, 37, 69]);
            }
        }
    }
}

#[test]
fn rows_are_in_their_slots_when_each_layer_is_warmed_up() {
    let mut rig = Rig::new(config());
    let own = Own { handle: rig.cache.arrive(&open(BringUp::Whole, 80)).unwrap(), tag: 1 };
    let _ticket = rig.cache.join_early(own.handle, rig.main).unwrap();
    // How many of the rows of a layer are in its slab.
    let loaded = |rig: &Rig, layer: u32| {
        rig.sync();
        let slab = rig.cache.slab(Layer(layer)).unwrap();
        let mut bytes = vec![0; slab.bytes() as usize];
        rig.memory.read(slab, &mut bytes).unwrap();
        let slots: BTreeSet<&[u8]> = bytes.chunks_exact(32).collect();
        (0..PROMPT).filter(|position| slots.contains(&row(1, layer, *position)[..])).count()
    };
    let mut wanted = [0; LAYERS as usize];
    for layer in 0..LAYERS {
        bring(&mut rig, &own, layer);
        let _ticket = rig.cache.warm_layer(own.handle, Layer(layer), WarmUp::default(), rig.side).unwrap();
        wanted[layer as usize] = PROMPT as usize;
        assert_eq!([0, 1, 2].map(|layer| loaded(&rig, layer)), wanted);
    }
}

#[test]
fn calls_of_an_early_join_are_refused_by_name_and_change_nothing() {
    let mut rig = Rig::new(config());
    let own = Own { handle: rig.cache.arrive(&open(BringUp::Nothing, 20)).unwrap(), tag: 1 };
    let refused = |rig: &mut Rig, layer: u32, warm: WarmUp, kind: Kind, place: &str| {
        let before = rig.cache.stats();
        let error = rig.cache.warm_layer(own.handle, Layer(layer), warm, rig.main).unwrap_err();
        assert_eq!((error.kind(), error.place()), (kind, place), "{error}");
        assert_eq!(rig.cache.stats(), before);
    };
    let (state, range) = (Kind::InvalidState, Kind::OutOfRange);
    let none = WarmUp::default();
    refused(&mut rig, 0, none, state, "the sequence is arriving");
    let _ticket = rig.cache.join_early(own.handle, rig.main).unwrap();
    refused(&mut rig, LAYERS, none, range, "layer");
    refused(&mut rig, 0, none, state, "the prompt of a layer is incomplete");
    rig.write_rows(&own, 0, 0..PROMPT);
    rig.cache.append_layer_in_place(own.handle, Layer(0), PROMPT).unwrap();
    refused(&mut rig, 0, none, state, "the index keys of a layer are incomplete");
    let _ticket = rig.place(&own, 0, 0, PROMPT, rig.main).unwrap();
    let (all, group) = (warm_of(&mut rig, None), warm_of(&mut rig, Some(0)));
    refused(&mut rig, 0, all, range, "warm-up selections");
    refused(&mut rig, 0, WarmUp { bytes_a_call: 1, ..group }, range, "bytes a call");
    bring(&mut rig, &own, 2);
    refused(&mut rig, 2, none, state, "the layer that selects for it is not warmed up");
    let _ticket = rig.cache.warm_layer(own.handle, Layer(0), group, rig.main).unwrap();
    refused(&mut rig, 0, group, state, "a layer that was warmed up before");
    bring(&mut rig, &own, 1);
    let _ticket = rig.cache.warm_layer(own.handle, Layer(1), none, rig.main).unwrap();
    refused(&mut rig, 2, group, range, "selections of a layer that another one selects for");
    // Neither a step nor another call takes it yet.
    let stream = rig.main;
    for error in [
        rig.cache.join(own.handle, stream, none).map(drop).unwrap_err(),
        rig.cache.join_more(own.handle, stream).map(drop).unwrap_err(),
        rig.cache.join_early(own.handle, stream).map(drop).unwrap_err(),
        rig.cache.truncate(own.handle, 3, stream).map(drop).unwrap_err(),
        rig.cache.extend(own.handle, PROMPT, 30).unwrap_err(),
        rig.cache.park(own.handle, 0, stream).unwrap_err(),
        rig.cache.resize(own.handle, &Budget::Slots(30), stream).unwrap_err(),
    ] {
        assert_eq!(error.kind(), state, "{error}");
        assert!(error.to_string().contains("joined early"), "{error}");
    }
    let _ticket = rig.cache.warm_layer(own.handle, Layer(2), none, rig.main).unwrap();
    rig.step(&own, PROMPT, 0, &[0, 69]);
    refused(&mut rig, 2, none, state, "the sequence is decoding");
}

#[test]
fn a_call_of_an_early_join_that_the_device_refuses_is_made_again() {
    let open = open(BringUp::Nothing, 20);
    let mut one = Rig::new(config());
    let reference = whole(&mut one, &open, true);
    let wanted = one.cache.digest(reference.handle).unwrap();
    let mut names = BTreeSet::new();
    for passing in 0..60 {
        let mut rig = Rig::new(config());
        let start = rig.cache.stats();
        let own = Own { handle: rig.cache.arrive(&open).unwrap(), tag: 1 };
        rig.faulty.aim(Some(passing));
        if rig.cache.join_early(own.handle, rig.main).is_err() {
            let _ticket = rig.cache.join_early(own.handle, rig.side).unwrap();
        }
        for layer in [1, 2, 0] {
            rig.write_rows(&own, layer, 0..PROMPT);
            rig.cache.append_layer_in_place(own.handle, Layer(layer), PROMPT).unwrap();
            if KEYED.contains(&layer) && rig.place(&own, layer, 0, PROMPT, rig.side).is_err() {
                let _ticket = rig.place(&own, layer, 0, PROMPT, rig.main).unwrap();
            }
            let warm = layer_warm(&mut rig, layer, true);
            if rig.cache.warm_layer(own.handle, Layer(layer), warm, rig.main).is_err() {
                let _ticket = rig.cache.warm_layer(own.handle, Layer(layer), warm, rig.side).unwrap();
            }
        }
        names.extend(rig.faulty.aim(None));
        rig.sync();
        assert_eq!(rig.cache.digest(own.handle).unwrap(), wanted, "{passing}");
        rig.step(&own, PROMPT, 0, &[0, 3, 36, 37, 69]);
        rig.cache.close(own.handle, rig.main).unwrap();
        rig.check_free(&start);
    }
    assert_eq!(names.into_iter().collect::<Vec<_>>(), ["complete", "copy", "enqueue", "record", "wait"]);
}

#[test]
fn an_early_join_may_be_aborted_at_every_layer() {
    for layers in 0..=LAYERS {
        for mut rig in [Rig::new(config()), Rig::threaded(config())] {
            let start = rig.cache.stats();
            let own = Own { handle: rig.cache.arrive(&open(BringUp::Whole, 80)).unwrap(), tag: 1 };
            let _ticket = rig.cache.join_early(own.handle, rig.main).unwrap();
            for layer in 0..layers {
                bring(&mut rig, &own, layer);
                let _ticket =
                    rig.cache.warm_layer(own.handle, Layer(layer), WarmUp::default(), rig.main).unwrap();
            }
            let withheld = rig.cache.abort(own.handle, rig.side).unwrap();
            for _ in 0..3 {
                rig.sync();
                rig.cache.reap(rig.main).unwrap();
            }
            let stats = rig.cache.stats();
            assert_eq!((stats.sequences, stats.free_lanes, stats.slots_in_use), (0, start.free_lanes, 0));
            assert_eq!(start.free_host_pages - stats.free_host_pages, stats.withheld_pages);
            rig.cache.release(withheld).unwrap();
            rig.check_free(&start);
        }
    }
}

/// A sequence whose layers are warmed up on two streams, and what the first step's stream finds in the slabs. The rows
/// of a layer come to host memory only before its own warm-up. Also the waits of the calls.
fn slabs_are_loaded(seed: u64, without: std::ops::Range<u64>) -> (bool, std::ops::Range<u64>) {
    let mut rig = Rig::clock(config(), seed);
    let clock = rig.clock.clone().unwrap();
    let own = Own { handle: rig.cache.arrive(&open(BringUp::Whole, 80)).unwrap(), tag: 1 };
    clock.without_waits(without);
    let begin = clock.waits();
    let _ticket = rig.cache.join_early(own.handle, rig.main).unwrap();
    for (layer, stream) in [(0, rig.side), (1, rig.main), (2, rig.side)] {
        bring(&mut rig, &own, layer);
        let _ticket = rig.cache.warm_layer(own.handle, Layer(layer), WarmUp::default(), stream).unwrap();
    }
    let waits = begin..clock.waits();
    rig.sync();
    let loaded = (0..LAYERS).all(|layer| {
        let slab = rig.cache.slab(Layer(layer)).unwrap();
        let mut bytes = vec![0; slab.bytes() as usize];
        rig.memory.read(slab, &mut bytes).unwrap();
        let slots: BTreeSet<&[u8]> = bytes.chunks_exact(32).collect();
        (0..PROMPT).all(|position| slots.contains(&row(1, layer, position)[..]))
    });
    (loaded, waits)
}

#[test]
fn each_layer_is_warmed_up_behind_the_join_and_the_layer_that_selects_for_it() {
    let mut missed = 0;
    for seed in 0..100 {
        let (loaded, waits) = slabs_are_loaded(seed, 0..0);
        assert!(loaded, "seed {seed}");
        missed += usize::from(!slabs_are_loaded(seed, waits).0);
    }
    assert!(missed > 0, "the control: without the waits some row is not loaded");
}

#[test]
fn a_warm_up_of_one_group_has_its_selections_alone() {
    let mut rig = Rig::new(config());
    let (group, selections) = (warm_of(&mut rig, Some(1)).selections, selections(&mut rig));
    let warm = |group, selections| Warm { lane: Lane(0), group, whole: false, selections, steps: STEPS };
    let enqueue = |warm| rig.device.enqueue(rig.cache.pools(), rig.main, PoolOp::Warm(warm));
    for (wrong, place) in [
        (warm(Some(2), None), "index group"),
        (warm(Some(u32::MAX), None), "index group"),
        // Selections of one group, where all are meant.
        (warm(None, group), "bytes of a slice"),
    ] {
        let error = enqueue(wrong).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::OutOfRange, place), "{error}");
    }
    for right in [warm(Some(1), group), warm(None, Some(selections)), warm(Some(0), None)] {
        enqueue(right).unwrap();
    }
}

#[test]
fn slots_and_promise_of_an_early_join_that_ends_do_not_wait_for_the_device() {
    let config = Config { share: Some(Share::default()), ..config() };
    for aborts in [false, true] {
        let mut rig = Rig::threaded(config.clone());
        if !rig.memory.runs_by_itself() {
            return;
        }
        let start = rig.cache.stats();
        let all = Open { budget: Budget::Slots(256), ..asks(180, 20) };
        let held = [rig.memory.hold(rig.main), rig.memory.hold(rig.side)];
        let own = Own { handle: rig.cache.arrive(&open(BringUp::Whole, 80)).unwrap(), tag: 1 };
        let _ticket = rig.cache.join_early(own.handle, rig.main).unwrap();
        bring(&mut rig, &own, 0);
        let _ticket = rig.cache.warm_layer(own.handle, Layer(0), WarmUp::default(), rig.side).unwrap();
        let promised = rig.cache.open(&all).unwrap_err();
        assert_eq!((promised.kind(), promised.place()), (Kind::Exhausted, "slot blocks"));
        let withheld = match aborts {
            true => Some(rig.cache.abort(own.handle, rig.main).unwrap()),
            false => rig.cache.close(own.handle, rig.main).map(|()| None).unwrap(),
        };
        assert_eq!(rig.cache.stats().slots_in_use, 0);
        let next = rig.cache.open(&all).unwrap();
        assert_eq!(rig.cache.reap(rig.main).unwrap(), 1, "its work is in flight");
        drop(held);
        rig.sync();
        rig.cache.close(next, rig.main).unwrap();
        if let Some(withheld) = withheld {
            rig.cache.release(withheld).unwrap();
        }
        rig.check_free(&start);
    }
}
