//! Sequences that arrive: pages before lane and slots, rows and index keys by layer, and aborts while others still
//! write.
//!
//! A writer from afar is the test itself: it writes to the memory of pages whenever it likes, also after the sequence
//! has ended. Every row and key is stamped with its request, layer and token, so a foreign one shows.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "arrival/aborts.rs"]
mod aborts;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[path = "arrival/early.rs"]
mod early;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/faulty.rs"]
mod faulty;
#[path = "arrival/keys.rs"]
mod keys;
#[path = "arrival/refused.rs"]
mod refused;
#[path = "arrival/rig.rs"]
mod rig;
#[path = "arrival/world.rs"]
mod world;

use forebay::{Budget, Config, Kind, Layer, Open, Share, Slots, Tokens, WarmUp};
use rig::{KEYED, LAYERS, Own, PAGE, Rig, asks, config, row};

#[test]
fn an_arriving_sequence_has_pages_and_takes_lane_and_slots_when_it_joins() {
    for share in [None, Some(Share::default())] {
        let mut rig = Rig::new(Config { share, ..config() });
        let start = rig.cache.stats();
        let own = rig.arrive(1, 40, 10);
        let arriving = rig.cache.stats();
        assert_eq!((arriving.arriving, arriving.sequences), (1, 1));
        assert_eq!(
            (arriving.free_lanes, arriving.free_slots, arriving.slots_in_use),
            (start.free_lanes, start.free_slots, 0)
        );
        // 40 + 10 tokens and 2 x 2 rows in flight.
        assert_eq!(start.free_host_pages - arriving.free_host_pages, 54_u32.div_ceil(PAGE));
        assert_eq!(start.free_index_pages - arriving.free_index_pages, 54_u32.div_ceil(PAGE));
        assert!(rig.cache.is_arriving(own.handle).unwrap());
        for (call, error) in [
            ("landing slot", rig.cache.landing_slot(own.handle, 0).map(drop)),
            ("digest", rig.cache.digest(own.handle).map(drop)),
            ("park", rig.cache.park(own.handle, 0, rig.main)),
            ("resume", rig.cache.resume(own.handle, rig.main, 0).map(drop)),
        ] {
            let error = error.unwrap_err();
            assert_eq!(error.kind(), Kind::InvalidState, "{call}: {error}");
            assert!(error.to_string().contains("arriving"), "{call}: {error}");
        }
        rig.fill(&own, 0..40);
        let _ticket = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap();
        let joined = rig.cache.stats();
        assert_eq!((joined.arriving, joined.free_lanes), (0, start.free_lanes - 1));
        assert!(joined.slots_in_use > 0);
        assert_eq!(joined.free_host_pages, arriving.free_host_pages, "it had its pages");
        rig.step(&own, 40, 0, &[0, 17, 39]);
        rig.check(&own, 40);
        // Its next turn comes by the engine's own prefill, which declares its keys.
        rig.cache.park(own.handle, 1, rig.main).unwrap();
        rig.cache.extend(own.handle, 45, 5).unwrap();
        for layer in 0..LAYERS {
            let rows: Vec<u8> = (41..45).flat_map(|position| row(own.tag, layer, position)).collect();
            rig.cache.append(own.handle, Layer(layer), &rows).unwrap();
        }
        for layer in KEYED {
            rig.cache.index_keys_in_place(own.handle, Layer(layer), 4).unwrap();
        }
        let _ticket = rig.cache.resume(own.handle, rig.main, 0).unwrap();
        rig.step(&own, 45, 0, &[0, 40, 44]);
        rig.cache.close(own.handle, rig.main).unwrap();
        rig.sync();
        rig.check_free(&start);
    }
}

#[test]
fn arrivals_are_refused_by_name_and_take_nothing() {
    let few = Config { lanes: 1, arriving: 2, host_pages: 9, index_pages: 9, ..config() };
    let mut rig = Rig::new(Config { slots: Slots::Uniform(128), ..few });
    let refused = |rig: &mut Rig, open: &Open| {
        let before = rig.cache.stats();
        let error = rig.cache.arrive(open).unwrap_err();
        assert_eq!(rig.cache.stats(), before);
        rig.cache.validate().unwrap();
        error
    };
    let first = rig.arrive(1, 20, 0);
    // 20 tokens and 4 rows in flight are 2 pages; 100 are 7.
    let error = refused(&mut rig, &asks(100, 10));
    assert_eq!((error.kind(), error.place(), error.number("free")), (Kind::Exhausted, "host pages", Some(7)));
    let many = Open { budget: Budget::Slots(200), ..asks(20, 180) };
    assert_eq!(refused(&mut rig, &many).place(), "slot blocks");
    assert_eq!(refused(&mut rig, &asks(1000, 0)).kind(), Kind::OutOfRange);
    let second = rig.arrive(2, 20, 0);
    let error = refused(&mut rig, &asks(20, 0));
    assert_eq!((error.kind(), error.place()), (Kind::Exhausted, "arriving sequences"));
    // Of two complete ones, one has the lane. The other stays as it is, and joins later.
    for own in [&first, &second] {
        rig.fill(own, 0..20);
    }
    let _ticket = rig.cache.join(first.handle, rig.main, WarmUp::default()).unwrap();
    let before = rig.cache.stats();
    let error = rig.cache.join(second.handle, rig.main, WarmUp::default()).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::Exhausted, "lanes"));
    assert_eq!((rig.cache.stats(), rig.cache.is_arriving(second.handle).unwrap()), (before, true));
    // A third may arrive now, and an open finds no lane.
    let _third = rig.arrive(3, 20, 0);
    let error = rig.cache.open(&asks(20, 0)).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::Exhausted, "lanes"));
    rig.sync();
    rig.cache.close(first.handle, rig.main).unwrap();
    let _ticket = rig.cache.join(second.handle, rig.main, WarmUp::default()).unwrap();
    rig.step(&second, 20, 0, &[0, 19]);
}

#[test]
fn a_join_lacks_slots_and_changes_nothing() {
    let mut rig = Rig::new(config());
    let one = Open { budget: Budget::Slots(128), ..asks(20, 108) };
    // Each layer has 4 blocks of 64.
    let opened = [0, 1].map(|_| rig.cache.open(&one).unwrap());
    let own = rig.arrive(1, 20, 0);
    rig.fill(&own, 0..20);
    let before = rig.cache.stats();
    let error = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::Exhausted, "slot blocks"));
    assert_eq!((rig.cache.stats(), rig.cache.is_arriving(own.handle).unwrap()), (before, true));
    rig.cache.validate().unwrap();
    rig.cache.close(opened[0], rig.main).unwrap();
    rig.sync();
    rig.cache.reap(rig.main).unwrap();
    let _ticket = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap();
    rig.step(&own, 20, 0, &[3, 4]);
}

#[test]
fn a_configuration_with_more_arrivals_than_pages_is_refused() {
    let error = Rig::try_new(Config { arriving: 25, ..config() }).unwrap_err();
    assert_eq!(
        (error.kind(), error.place(), error.number("most")),
        (Kind::InvalidConfig, "arriving", Some(24))
    );
    let mut rig = Rig::new(Config { arriving: 0, ..config() });
    let error = rig.cache.arrive(&asks(10, 0)).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::Exhausted, "arriving sequences"));
}

#[test]
fn layers_are_filled_on_their_own_and_a_join_names_the_first_that_is_not_whole() {
    let mut rig = Rig::new(config());
    let own = rig.arrive(1, 40, 0);
    let unfilled = |rig: &mut Rig| {
        let error = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidState, "{error}");
        assert!(rig.cache.is_arriving(own.handle).unwrap());
        (error.place().to_owned(), error.number("layer").unwrap())
    };
    for layer in (0..LAYERS).rev() {
        assert_eq!(unfilled(&mut rig), ("the prompt of a layer is incomplete".to_owned(), 0));
        rig.write_rows(&own, layer, 0..40);
        rig.cache.append_layer_in_place(own.handle, Layer(layer), 30).unwrap();
        let error = rig.cache.append_layer_in_place(own.handle, Layer(layer), 11).unwrap_err();
        assert_eq!((error.kind(), error.number("filled")), (Kind::OutOfRange, Some(30)));
        rig.cache.append_layer_in_place(own.handle, Layer(layer), 10).unwrap();
    }
    let error = rig.cache.append_layer_in_place(own.handle, Layer(LAYERS), 1).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::OutOfRange, "layer"));
    // The first layers of the groups have keys: 0 and 1.
    let keys = "the index keys of a layer are incomplete";
    assert_eq!(unfilled(&mut rig), (keys.to_owned(), 0));
    let _ticket = rig.place(&own, 0, 0, 40, rig.main).unwrap();
    assert_eq!(unfilled(&mut rig), (keys.to_owned(), 1));
    let _ticket = rig.place(&own, 1, 0, 39, rig.main).unwrap();
    assert_eq!(unfilled(&mut rig), (keys.to_owned(), 1));
    let _ticket = rig.place(&own, 1, 39, 1, rig.main).unwrap();
    let _ticket = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap();
    rig.step(&own, 40, 0, &[0, 39]);
    rig.check(&own, 40);
}

#[test]
fn an_arriving_sequence_shares_the_leading_pages_that_the_cache_has() {
    let mut rig = Rig::new(config());
    let ids: Vec<u32> = (0..40).collect();
    let open = asks(40, 0);
    let (first, none) = rig.arrive_shared(1, &open, &ids);
    assert_eq!(none, 0);
    rig.fill(&first, 0..40);
    let _ticket = rig.cache.join(first.handle, rig.main, WarmUp::default()).unwrap();
    rig.sync();
    assert_eq!(rig.cache.publish(first.handle, 0, Tokens::new(&ids)).unwrap(), 32);
    // The same prompt, of the same tag: its first two pages are there, and the transfer brings 8 tokens.
    let before = rig.cache.stats();
    let (second, shared) = rig.arrive_shared(1, &open, &ids);
    assert_eq!((shared, before.free_host_pages - rig.cache.stats().free_host_pages), (32, 1));
    assert_eq!(rig.cache.length(second.handle).unwrap().filled, 32);
    for at in [0, 31, 33] {
        let error = rig.place(&second, 0, at, 1, rig.main).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::OutOfRange, "the first token"), "{error}");
    }
    rig.fill(&second, 32..40);
    let _ticket = rig.cache.join(second.handle, rig.main, WarmUp::default()).unwrap();
    rig.step(&second, 40, 0, &[0, 31, 32, 39]);
    rig.check(&second, 40);
    // An abort withholds the pages behind the shared ones.
    let (third, _) = rig.arrive_shared(1, &open, &ids);
    let withheld = rig.cache.abort(third.handle, rig.main).unwrap();
    assert_eq!(rig.cache.stats().withheld_pages, 1);
    rig.cache.validate().unwrap();
    rig.sync();
    rig.cache.reap(rig.main).unwrap();
    assert_eq!(rig.cache.release(withheld).unwrap(), 1);
    rig.check(&first, 40);
}

#[test]
fn a_prompt_grows_and_shrinks_while_it_arrives() {
    let mut rig = Rig::new(config());
    let start = rig.cache.stats();
    let own = rig.arrive(1, 20, 0);
    rig.fill(&own, 0..20);
    rig.cache.extend(own.handle, 50, 10).unwrap();
    let stats = rig.cache.stats();
    assert_eq!((start.free_host_pages - stats.free_host_pages, stats.free_lanes), (4, start.free_lanes));
    rig.fill(&own, 20..50);
    assert!(rig.cache.truncate(own.handle, 18, rig.main).unwrap().poll().is_some());
    // Its keys beyond 18 count no more.
    let error = rig.place(&own, 0, 19, 1, rig.main).unwrap_err();
    assert_eq!((error.place(), error.number("placed")), ("the first token", Some(18)));
    rig.cache.extend(own.handle, 25, 35).unwrap();
    rig.fill(&own, 18..25);
    let _ticket = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap();
    rig.step(&own, 25, 0, &[0, 17, 18, 24]);
    rig.check(&own, 25);
    rig.cache.close(own.handle, rig.main).unwrap();
    rig.sync();
    rig.check_free(&start);
}

#[test]
fn a_prompt_does_not_grow_until_no_pool_could_hold_its_slots() {
    for parks in [false, true] {
        let mut rig = Rig::new(Config { slots: Slots::Uniform(128), ..config() });
        let start = rig.cache.stats();
        let open = Open { budget: Budget::Ratio(1.0), ..asks(100, 0) };
        let own = Own { handle: rig.cache.arrive(&open).unwrap(), tag: 1 };
        rig.fill(&own, 0..100);
        if parks {
            let _ticket = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap();
            rig.sync();
            rig.cache.park(own.handle, 0, rig.main).unwrap();
        }
        let before = rig.cache.stats();
        let error = rig.cache.extend(own.handle, 150, 0).unwrap_err();
        assert_eq!(
            (error.kind(), error.place(), error.number("wanted")),
            (Kind::Exhausted, "slot blocks", Some(3))
        );
        assert_eq!(rig.cache.stats(), before);
        rig.cache.extend(own.handle, 110, 0).unwrap();
        rig.fill(&own, 100..110);
        let _ticket = match parks {
            true => rig.cache.resume(own.handle, rig.main, 0).unwrap(),
            false => rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap(),
        };
        rig.step(&own, 110, 0, &[0, 109]);
        rig.cache.close(own.handle, rig.main).unwrap();
        rig.check_free(&start);
    }
}
