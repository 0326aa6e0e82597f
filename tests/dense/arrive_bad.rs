//! Calls of an arrival that a cache refuses: the error names kind, place and numbers, and nothing has changed.

use crate::bad::{Rig, config, row};
use forebay::dense::{Config, Open, Way};
use forebay::{Kind, Result, Sequence, Tokens};

type Call<'a> = &'a dyn Fn(&mut Rig) -> Result<()>;

/// A sequence that arrives with 40 tokens and 8 promised ones; its ticket is Done.
fn arriving(rig: &mut Rig, way: Way) -> Sequence {
    let (sequence, ticket) = rig.cache.arrive(&Open { prompt: 40, promised: 8 }, way, rig.stream).unwrap();
    while ticket.poll().is_none() {
        std::thread::yield_now();
    }
    sequence
}

#[test]
fn an_arrival_that_does_not_fit_takes_nothing() {
    let mut rig = Rig::new(config());
    let arrive = |prompt, promised, way| {
        move |rig: &mut Rig| rig.cache.arrive(&Open { prompt, promised }, way, rig.stream)
    };
    let numbers = [("prompt", 90), ("promised", 7), ("most", 96)];
    let place = "prompt and promised tokens";
    rig.refuses(&[], arrive(90, 7, Way::Direct), Kind::OutOfRange, place, &numbers);
    // The host has six pages of each group, and these take three.
    let both = [arriving(&mut rig, Way::Host), arriving(&mut rig, Way::Host)];
    let numbers = [("wanted", 1), ("free", 0), ("group", 0)];
    rig.refuses(&both, arrive(1, 1, Way::Host), Kind::Exhausted, "host pages of a group", &numbers);
    // 48 tokens and 4 rows in flight are 4 pages of 14.
    let numbers = [("wanted", 7), ("free", 6), ("group", 0)];
    rig.refuses(&both, arrive(90, 6, Way::Direct), Kind::Exhausted, "device pages of a group", &numbers);
    let names = rig.cache.names(b"", Tokens::new(&[1; 64])).unwrap();
    let shared = |rig: &mut Rig| {
        let open = Open { prompt: 63, promised: 9 };
        rig.cache.arrive_shared(&open, &names, Way::Direct, rig.stream)
    };
    let longer = "names of more tokens than the prompt has";
    rig.refuses(&both, shared, Kind::OutOfRange, longer, &[("pages", 4), ("prompt", 63)]);
    let _last = arriving(&mut rig, Way::Direct);
    let numbers = [("wanted", 1), ("free", 0)];
    rig.refuses(&both, arrive(1, 1, Way::Direct), Kind::Exhausted, "sequences", &numbers);
    // Without a tier nothing comes through it.
    let mut rig = Rig::new(Config { host_pages: Vec::new(), ..config() });
    let none = "a cache without pages on the host";
    rig.refuses(&[], arrive(1, 1, Way::Host), Kind::InvalidState, none, &[]);
    assert_eq!(rig.cache.host_memory(0).unwrap(), None);
    assert_eq!(rig.cache.host_memory(2).unwrap_err().kind(), Kind::OutOfRange);
}

#[test]
fn rows_that_cannot_come_are_refused() {
    let mut rig = Rig::new(config());
    let (host, direct) = (arriving(&mut rig, Way::Host), arriving(&mut rig, Way::Direct));
    let both = [host, direct];
    let append =
        |sequence, layer, count| move |rig: &mut Rig| rig.cache.append_layer_in_place(sequence, layer, count);
    for sequence in both {
        let numbers = [("layer", 3), ("layers", 3)];
        rig.refuses(&both, append(sequence, 3, 1), Kind::OutOfRange, "layer", &numbers);
        append(sequence, 1, 30)(&mut rig).unwrap();
        let numbers = [("layer", 1), ("rows", 11), ("filled", 30), ("prompt", 40)];
        rig.refuses(&both, append(sequence, 1, 11), Kind::OutOfRange, "rows beyond the prompt", &numbers);
        append(sequence, 1, 10)(&mut rig).unwrap();
        let numbers = [("layer", 1), ("rows", 40), ("filled", 40), ("prompt", 40)];
        rig.refuses(&both, append(sequence, 1, 40), Kind::OutOfRange, "rows beyond the prompt", &numbers);
        let all = u64::from(u32::MAX);
        let numbers = [("layer", 1), ("rows", all), ("filled", 40), ("prompt", 40)];
        rig.refuses(
            &both,
            append(sequence, 1, u32::MAX),
            Kind::OutOfRange,
            "rows beyond the prompt",
            &numbers,
        );
    }
    let store = |sequence, of, block, offset: u64, count: usize| {
        move |rig: &mut Rig| rig.cache.store(sequence, of, block, offset, &vec![1; count])
    };
    let mut refuses = |call: Call<'_>, kind, place, numbers: &[(&'static str, u64)]| {
        rig.refuses(&both, call, kind, place, numbers);
    };
    let place = "the transfer writes to the device pages";
    refuses(&store(direct, (0, 0), 0, 0, 16), Kind::InvalidState, place, &[]);
    refuses(&store(host, (3, 0), 0, 0, 16), Kind::OutOfRange, "layer", &[("layer", 3), ("layers", 3)]);
    let run = "run of a layer";
    refuses(&store(host, (0, 1), 0, 0, 16), Kind::OutOfRange, run, &[("layer", 0), ("run", 1)]);
    refuses(&store(host, (0, 2), 0, 0, 16), Kind::OutOfRange, run, &[("layer", 0), ("run", 2)]);
    let whole = "a layer that has all rows";
    refuses(&store(host, (1, 0), 0, 0, 16), Kind::InvalidState, whole, &[("layer", 1)]);
    let block = "a block that the transfer does not bring";
    let numbers = [("layer", 0), ("block", 3), ("first", 0), ("end", 3)];
    refuses(&store(host, (0, 0), 3, 0, 16), Kind::OutOfRange, block, &numbers);
    let beyond = "bytes beyond what a block has of a layer";
    let numbers = [("layer", 0), ("offset", 16), ("bytes", 256), ("most", 256)];
    refuses(&store(host, (0, 0), 2, 16, 256), Kind::OutOfRange, beyond, &numbers);
    let numbers = [("layer", 0), ("offset", u64::MAX), ("bytes", 1), ("most", 256)];
    refuses(&store(host, (0, 0), 2, u64::MAX, 1), Kind::OutOfRange, beyond, &numbers);
    // Block 0 is before the window of layer 0: what comes of it is dropped.
    let window: Vec<_> = rig.cache.host_pages(host, 1).unwrap().map(|(block, _)| block).collect();
    assert_eq!(window, [1, 2]);
    rig.cache.store(host, (0, 0), 0, 0, &[1; 256]).unwrap();
    assert_eq!(rig.cache.pages(host, 1).unwrap()[0], 0);
    assert_eq!(rig.cache.host_pages(direct, 0).unwrap().count(), 0);
    assert_eq!(rig.cache.host_pages(direct, 2).map(drop).unwrap_err().kind(), Kind::OutOfRange);
}

#[test]
fn layers_come_up_once_and_whole_and_a_join_wants_all() {
    let mut rig = Rig::new(config());
    let (host, direct) = (arriving(&mut rig, Way::Host), arriving(&mut rig, Way::Direct));
    let both = [host, direct];
    let join = |sequence| move |rig: &mut Rig| rig.cache.join(sequence, rig.stream);
    let bring = |sequence, layer| move |rig: &mut Rig| rig.cache.bring_layer(sequence, layer, rig.stream);
    for sequence in both {
        let missing = |layer, filled| [("layer", layer), ("filled", filled), ("prompt", 40)];
        rig.refuses(&both, join(sequence), Kind::InvalidState, "a layer without all rows", &missing(0, 0));
        for layer in [0, 2] {
            rig.cache.append_layer_in_place(sequence, layer, 40).unwrap();
        }
        rig.cache.append_layer_in_place(sequence, 1, 39).unwrap();
        rig.refuses(&both, join(sequence), Kind::InvalidState, "a layer without all rows", &missing(1, 39));
    }
    let numbers = [("layer", 1), ("filled", 39), ("prompt", 40)];
    rig.refuses(&both, bring(host, 1), Kind::InvalidState, "a layer without all rows", &numbers);
    rig.refuses(&both, bring(host, 3), Kind::OutOfRange, "layer", &[("layer", 3), ("layers", 3)]);
    let place = "the transfer writes to the device pages";
    rig.refuses(&both, bring(direct, 0), Kind::InvalidState, place, &[]);
    rig.cache.bring_layer(host, 0, rig.stream).unwrap();
    rig.refuses(
        &both,
        bring(host, 0),
        Kind::InvalidState,
        "a layer that was brought before",
        &[("layer", 0)],
    );
    for sequence in both {
        rig.cache.append_layer_in_place(sequence, 1, 1).unwrap();
        drop(rig.cache.join(sequence, rig.stream).unwrap());
        assert!(!rig.cache.is_arriving(sequence).unwrap());
        let running = "the sequence is running";
        rig.refuses(&both, join(sequence), Kind::InvalidState, running, &[]);
        let abort = |rig: &mut Rig| rig.cache.abort(sequence, rig.stream);
        rig.refuses(&both, abort, Kind::InvalidState, running, &[]);
        let append = |rig: &mut Rig| rig.cache.append_layer_in_place(sequence, 0, 0);
        rig.refuses(&both, append, Kind::InvalidState, running, &[]);
        let store = |rig: &mut Rig| rig.cache.store(sequence, (0, 0), 0, 0, &[]);
        rig.refuses(&both, store, Kind::InvalidState, running, &[]);
        rig.refuses(&both, bring(sequence, 0), Kind::InvalidState, running, &[]);
    }
    let step = rig.prepare(0, &[row(host, 0, 1), row(direct, 0, 1)]).unwrap();
    assert_eq!(step.rows(), 2);
}

#[test]
fn what_a_sequence_that_arrives_cannot_do_is_refused() {
    let mut rig = Rig::new(config());
    for way in [Way::Direct, Way::Host] {
        let sequence = arriving(&mut rig, way);
        let calls: [Call<'_>; 7] = [
            &|rig| rig.prepare(0, &[row(sequence, 0, 1)]).map(drop),
            &|rig| rig.cache.park(sequence, 0, rig.stream).map(drop),
            &|rig| rig.cache.resume(sequence, rig.stream).map(drop),
            &|rig| rig.cache.fork(sequence, 1, rig.stream).map(drop),
            &|rig| rig.cache.truncate(sequence, 0, rig.stream).map(drop),
            &|rig| rig.cache.extend(sequence, 50, 8),
            &|rig| rig.cache.publish(sequence, 0, Tokens::new(&[])).map(drop),
        ];
        for call in calls {
            rig.refuses(&[sequence], call, Kind::InvalidState, "the sequence is arriving", &[]);
        }
        let withheld = rig.cache.abort(sequence, rig.stream).unwrap();
        for call in [
            &(|rig: &mut Rig| rig.cache.abort(sequence, rig.stream).map(drop)) as Call<'_>,
            &|rig| rig.cache.join(sequence, rig.stream).map(drop),
            &|rig| rig.cache.append_layer_in_place(sequence, 0, 1),
            &|rig| rig.cache.store(sequence, (0, 0), 0, 0, &[]),
            &|rig| rig.cache.bring_layer(sequence, 0, rig.stream),
            &|rig| rig.cache.is_arriving(sequence).map(drop),
            &|rig| rig.cache.host_pages(sequence, 0).map(drop),
            &|rig| rig.cache.close(sequence, rig.stream),
        ] {
            rig.refuses(&[], call, Kind::Closed, &sequence.to_string(), &[]);
        }
        // Another cache's abort, and a second release.
        let mut strange = Rig::new(config());
        let other = arriving(&mut strange, way);
        let of_other = strange.cache.abort(other, strange.stream).unwrap();
        let place = "pages that are not withheld";
        rig.refuses(&[], |rig| rig.cache.release(of_other), Kind::Closed, place, &[]);
        assert_eq!(rig.cache.release(withheld).unwrap(), 3 + 2);
        rig.refuses(&[], |rig| rig.cache.release(withheld), Kind::Closed, place, &[]);
    }
}
