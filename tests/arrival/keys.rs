//! Where index keys go, and which calls are refused.

use crate::rig::{KEY, KEYED, LAYERS, Own, PAGE, Rig, asks, config, key};
use std::ops::Range;

use forebay::device::Slice;
use forebay::{Config, Kind, Layer, Open, Sequence, Shape, Share, WarmUp};

/// A plain generator of numbers.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as u32) % limit
    }
}

/// Takes all pages in sequences of one page and closes them in another order, so that free pages are out of order.
fn mix_pages(rig: &mut Rig, random: &mut Random) {
    let one = Open { prompt: 4, ..asks(4, 0) };
    let mut all: Vec<Sequence> = std::iter::from_fn(|| rig.cache.arrive(&one).ok()).collect();
    while !all.is_empty() {
        let sequence = all.swap_remove(random.below(all.len() as u32) as usize);
        rig.cache.close(sequence, rig.main).unwrap();
        rig.sync();
        rig.cache.reap(rig.main).unwrap();
    }
}

/// The keys of a layer in every device page.
fn all_keys(rig: &Rig, layer: u32) -> Vec<u8> {
    let slice: Slice = rig.cache.index_keys(Layer(layer)).unwrap();
    let mut bytes = vec![0; slice.bytes() as usize];
    rig.memory.read(slice, &mut bytes).unwrap();
    bytes
}

#[test]
fn keys_go_to_their_pages_and_nowhere_else() {
    let mut random = Random(7);
    for run in 0..30 {
        let mut rig = Rig::new(Config { arriving: 24, ..config() });
        mix_pages(&mut rig, &mut random);
        let prompt = 1 + random.below(140);
        let own = rig.arrive(1, prompt, 10);
        let pages = rig.pages(&own);
        for layer in KEYED {
            // Byte by byte, by the place of each token.
            let mut wanted = all_keys(&rig, layer);
            let mut first = 0;
            while first < prompt {
                // Some again, and more than the prompt in its last page.
                let from = first - random.below(first.min(20) + 1);
                let page_end = prompt.next_multiple_of(PAGE);
                let most = if run % 2 == 0 { prompt } else { page_end };
                let count = 1 + random.below(most - from);
                let stream = if random.below(2) == 0 { rig.main } else { rig.side };
                let ticket = rig.place(&own, layer, from, count, stream).unwrap();
                for token in from..from + count {
                    let page = pages[(token / PAGE) as usize].1;
                    let at = (page * PAGE + token % PAGE) as usize * KEY;
                    wanted[at..at + KEY].copy_from_slice(&key(1, layer, token));
                }
                first = first.max((from + count).min(prompt));
                rig.sync();
                assert!(ticket.poll().is_some());
                assert_eq!(all_keys(&rig, layer), wanted, "run {run}, layer {layer}, {from} + {count}");
            }
            let more = rig.place(&own, layer, first + 1, 1, rig.main).unwrap_err();
            assert_eq!(more.number("placed"), Some(prompt.into()));
        }
    }
}

#[test]
fn pages_that_follow_each_other_are_one_copy() {
    let mut rig = Rig::new(config());
    let own = rig.arrive(1, 100, 0);
    assert!(rig.pages(&own).windows(2).all(|pair| pair[1].1 == pair[0].1 + 1), "a fresh pool is in order");
    let copies = |rig: &Rig| rig.faulty.copied();
    let before = copies(&rig);
    let _ticket = rig.place(&own, 0, 0, 50, rig.main).unwrap();
    assert_eq!(copies(&rig) - before, 1);
    let _ticket = rig.place(&own, 0, 50, 50, rig.main).unwrap();
    assert_eq!(copies(&rig) - before, 2);
    let none = rig.place(&own, 0, 100, 0, rig.main).unwrap();
    assert_eq!((copies(&rig) - before, none.poll().is_some()), (2, true));
    // Pages 7, then 0 to 2, then 8: three copies.
    rig.cache.close(own.handle, rig.main).unwrap();
    rig.sync();
    rig.cache.reap(rig.main).unwrap();
    let first = rig.arrive(1, 44, 0);
    let rest = rig.arrive(2, 40, 0);
    rig.cache.close(first.handle, rig.main).unwrap();
    rig.sync();
    rig.cache.reap(rig.main).unwrap();
    let own = rig.arrive(3, 140, 0);
    let keys: Vec<u32> = rig.pages(&own).iter().map(|(_, keys)| *keys).collect();
    let runs = 1 + keys.windows(2).filter(|pair| pair[1] != pair[0] + 1).count() as u64;
    assert!(runs > 1, "{keys:?}, {:?}", rig.pages(&rest));
    let before = copies(&rig);
    let _ticket = rig.place(&own, 0, 0, 140, rig.main).unwrap();
    assert_eq!(copies(&rig) - before, runs);
}

#[test]
fn calls_that_place_keys_are_refused_by_name_and_change_nothing() {
    let mut rig = Rig::new(config());
    let own = rig.arrive(1, 40, 10);
    let _ticket = rig.place(&own, 0, 0, 10, rig.main).unwrap();
    rig.sync();
    let before = (rig.cache.stats(), all_keys(&rig, 0));
    let foreign = Rig::new(config()).stage(&own, 0, 0, 10);
    let (one, many) = (rig.stage(&own, 0, 0, 1), rig.stage(&own, 0, 0, 39));
    let mut tell = |layer, first, keys: Slice, kind, place: &str| {
        let error = rig.cache.place_index_keys(own.handle, Layer(layer), first, keys, rig.main).unwrap_err();
        assert_eq!((error.kind(), error.place()), (kind, place), "{error}");
    };
    let range = Kind::OutOfRange;
    tell(LAYERS, 10, one, range, "layer");
    tell(0, 11, one, range, "the first token");
    tell(0, u32::MAX, one, range, "the first token");
    tell(0, 10, many, range, "index keys beyond the last page of the prompt");
    tell(0, 10, one.part(0, 7).unwrap(), range, "bytes that are not whole keys");
    tell(0, 10, many.part(2, 8).unwrap(), range, "memory of the keys");
    tell(0, 10, foreign, range, "memory of the keys");
    // Layer 2 has the selection of layer 1, and no keys.
    let error = rig.cache.place_index_keys(own.handle, Layer(2), 0, one, rig.main).unwrap_err();
    assert_eq!((error.kind(), error.number("selects for it")), (range, Some(1)), "{error}");
    let error = rig.cache.index_keys_in_place(own.handle, Layer(0), 31).unwrap_err();
    assert_eq!((error.kind(), error.place()), (range, "index keys beyond the prompt"));
    let error = rig.cache.index_keys_in_place(own.handle, Layer(0), u32::MAX).unwrap_err();
    assert_eq!(error.kind(), range);
    assert_eq!((rig.cache.stats(), all_keys(&rig, 0)), before);
    // A sequence whose keys the engine's own kernels write counts none.
    let open = Own { handle: rig.cache.open(&asks(40, 0)).unwrap(), tag: 2 };
    let error = rig.place(&open, 0, 0, 1, rig.main).unwrap_err();
    let declared = rig.cache.index_keys_in_place(open.handle, Layer(0), 1).unwrap_err();
    for error in [error, declared] {
        assert_eq!(error.kind(), Kind::InvalidState, "{error}");
        assert_eq!(error.place(), "the index keys of the sequence are not counted");
    }
    rig.cache.close(own.handle, rig.main).unwrap();
    assert_eq!(rig.place(&own, 0, 10, 1, rig.main).unwrap_err().kind(), Kind::Closed);
}

#[test]
fn keys_that_something_else_wrote_are_declared() {
    let mut rig = Rig::new(config());
    let own = rig.arrive(1, 40, 10);
    for layer in 0..LAYERS {
        rig.write_rows(&own, layer, 0..40);
        rig.cache.append_layer_in_place(own.handle, Layer(layer), 40).unwrap();
    }
    for layer in KEYED {
        for (position, (_, keys)) in rig.pages(&own).into_iter().enumerate() {
            for token in 0..PAGE {
                let to = rig.key_at(layer, keys, token);
                rig.memory.write(to, &key(1, layer, position as u32 * PAGE + token)).unwrap();
            }
        }
        rig.cache.index_keys_in_place(own.handle, Layer(layer), 17).unwrap();
        let error = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap_err();
        assert_eq!((error.number("layer"), error.number("placed")), (Some(layer.into()), Some(17)));
        rig.cache.index_keys_in_place(own.handle, Layer(layer), 23).unwrap();
    }
    let _ticket = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap();
    rig.step(&own, 40, 0, &[1, 39]);
    rig.check(&own, 41);
}

#[test]
fn a_model_without_index_keys_needs_none() {
    let base = config();
    let mut rig = Rig::new(Config { shape: Shape { index_key_bytes: 0, ..base.shape }, ..base });
    let own = rig.arrive(1, 40, 10);
    for layer in 0..LAYERS {
        rig.write_rows(&own, layer, 0..40);
        rig.cache.append_layer_in_place(own.handle, Layer(layer), 40).unwrap();
    }
    let error = rig.place(&own, 0, 0, 1, rig.main).unwrap_err();
    assert_eq!(error.kind(), Kind::OutOfRange, "{error}");
    let _ticket = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap();
    assert!(rig.cache.is_running(own.handle).unwrap());
}

/// Keys that are placed on two streams, first foreign ones and then those of the sequence, and a join on a third one.
/// Returns whether the engine, which reads the keys behind the join on the join's stream, finds the sequence's; and for
/// each call, the numbers of the waits that it enqueued. `without` is a wait that is left out.
fn engine_finds_keys(seed: u64, without: Option<u64>) -> (bool, Vec<Range<u64>>) {
    let mut rig = Rig::clock(config(), seed);
    let clock = rig.clock.clone().unwrap();
    let third = rig.device.stream().unwrap();
    let own = rig.arrive(1, 40, 0);
    let foreign = Own { tag: 2, ..own };
    for layer in 0..LAYERS {
        rig.write_rows(&own, layer, 0..40);
        rig.cache.append_layer_in_place(own.handle, Layer(layer), 40).unwrap();
    }
    clock.without_waits(without.map_or(0..0, |wait| wait..wait + 1));
    let (mut waits, mut begin) = (Vec::new(), clock.waits());
    let mut note = || waits.push(std::mem::replace(&mut begin, clock.waits())..clock.waits());
    let (main, side) = (rig.main, rig.side);
    for (keys, layer, stream) in [(foreign, 0, main), (own, 0, side), (foreign, 1, main), (own, 1, side)] {
        let _ticket = rig.place(&keys, layer, 0, 40, stream).unwrap();
        note();
    }
    let _ticket = rig.cache.join(own.handle, third, WarmUp::default()).unwrap();
    note();
    let mut found = true;
    for layer in KEYED {
        let keys = rig.cache.index_keys(Layer(layer)).unwrap();
        let read = rig.device.allocate(keys.bytes()).unwrap();
        rig.device.copy(third, keys, read).unwrap();
        let event = rig.device.event().unwrap();
        rig.device.record(event, third).unwrap();
        rig.device.synchronize(event).unwrap();
        let mut bytes = vec![0; read.bytes() as usize];
        rig.memory.read(read, &mut bytes).unwrap();
        found &= (0..40).all(|token| {
            let page = rig.pages(&own)[(token / PAGE) as usize].1;
            let at = (page * PAGE + token % PAGE) as usize * KEY;
            bytes[at..at + KEY] == key(1, layer, token)
        });
    }
    rig.sync();
    (found, waits)
}

#[test]
fn what_follows_a_join_follows_the_copies_of_keys_on_every_stream() {
    let mut missed = [0; 5];
    for seed in 0..60 {
        let (found, waits) = engine_finds_keys(seed, None);
        assert!(found, "seed {seed}");
        // The control: each wait of these calls is left out, alone.
        for (missed, waits) in missed.iter_mut().zip(waits) {
            *missed += waits.filter(|wait| !engine_finds_keys(seed, Some(*wait)).0).count();
        }
    }
    // The first copy has none before it. The third is behind the second without a wait: the fourth is on its stream.
    assert!([1, 3, 4].iter().all(|call| missed[*call] > 0), "{missed:?}");
    assert_eq!([missed[0], missed[2]], [0, 0]);
}

#[test]
fn the_keys_of_every_turn_are_counted() {
    let shared = Config { share: Some(Share::default()), ..config() };
    for (mut rig, moves) in [
        (Rig::new(config()), false),
        (Rig::new(shared.clone()), true),
        (Rig::threaded(config()), true),
        (Rig::clock(shared, 3), false),
        (Rig::watched(config(), None), true),
    ] {
        let own = rig.arrive(1, 40, 10);
        rig.fill(&own, 0..40);
        let _ticket = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap();
        let error = rig.place(&own, 0, 39, 1, rig.main).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::InvalidState, "the sequence is decoding"));
        if moves {
            rig.step(&own, 40, 0, &[0, 39]);
        }
        rig.sync();
        rig.cache.park(own.handle, moves.into(), rig.main).unwrap();
        let length = 40 + u32::from(moves);
        rig.cache.extend(own.handle, 60, 10).unwrap();
        for layer in 0..LAYERS {
            rig.write_rows(&own, layer, length..60);
            rig.cache.append_layer_in_place(own.handle, Layer(layer), 60 - length).unwrap();
        }
        for layer in KEYED {
            // A refused resume takes nothing, and leaves it parked.
            let before = rig.cache.stats();
            let error = rig.cache.resume(own.handle, rig.main, 0).unwrap_err();
            assert_eq!((error.kind(), error.number("layer")), (Kind::InvalidState, Some(layer.into())));
            assert_eq!(error.number("placed"), Some(length.into()));
            assert_eq!((rig.cache.stats(), rig.cache.is_parked(own.handle).unwrap()), (before, true));
            // Others may share what it had.
            let error = rig.place(&own, layer, length - 1, 1, rig.main).unwrap_err();
            assert_eq!((error.place(), error.number("least")), ("the first token", Some(length.into())));
            let _ticket = rig.place(&own, layer, length, 5, rig.side).unwrap();
            let _ticket = rig.place(&own, layer, length + 3, 57 - length, rig.main).unwrap();
        }
        let _ticket = rig.cache.resume(own.handle, rig.main, 0).unwrap();
        rig.step(&own, 60, 0, &[0, length, 59]);
        assert!(rig.watch.as_ref().is_none_or(|watch| watch.conflict().is_none()));
        rig.check(&own, 61);
    }
}

#[test]
fn keys_of_a_replacement_that_the_device_refuses_count_no_more() {
    let mut refused = 0;
    for passing in 0..6 {
        let mut rig = Rig::new(config());
        let start = rig.cache.stats();
        let own = rig.arrive(1, 40, 0);
        rig.fill(&own, 0..40);
        rig.faulty.aim(Some(passing));
        let placed = rig.place(&own, 1, 10, 5, rig.main);
        let name = rig.faulty.aim(None);
        let joined = rig.cache.join(own.handle, rig.main, WarmUp::default());
        match (placed, name) {
            (Err(_), Some(name)) if name != "wait" => {
                let error = joined.unwrap_err();
                assert_eq!((error.number("layer"), error.number("placed")), (Some(1), Some(10)), "{name}");
                let _ticket = rig.place(&own, 1, 10, 30, rig.side).unwrap();
                let _ticket = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap();
                refused += 1;
            }
            // What was refused before a copy changes nothing.
            (placed, name) => {
                assert_eq!(placed.is_err(), name.is_some());
                drop(joined.unwrap());
            }
        }
        rig.step(&own, 40, 0, &[0, 12, 39]);
        rig.check(&own, 41);
        rig.cache.close(own.handle, rig.main).unwrap();
        rig.check_free(&start);
    }
    // The copy, the ticket and the event.
    assert_eq!(refused, 3);
}
