//! A writer from afar writes after the end of its sequence: what the next tenant of the pages sees of it.

use crate::rig::{KEYED, LAYERS, Own, PAGE, Rig, asks, config, key, row};
use forebay::{
    Accepted, BatchRow, BringUp, Config, Kind, Layer, MicroBatch, Open, Sequence, Step, Tokens, WarmUp,
    Withheld,
};

/// How a receiver ends a sequence that a writer from afar fills.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// As before there were arrivals: `open`, `append_in_place`, `close`.
    Close,
    Abort,
    /// Aborts, and gives the pages back without a word of the writer: after some time, say.
    Early,
}

/// Writes all rows and keys of `tag` to these pages.
fn write_all(rig: &Rig, pages: &[(u32, u32)], tag: u32) {
    for (number, (page, keys)) in (0..).zip(pages) {
        for token in 0..PAGE {
            for layer in 0..LAYERS {
                let at = rig.row_at(layer, *page, token);
                rig.memory.write(at, &row(tag, layer, number * PAGE + token)).unwrap();
            }
            for layer in KEYED {
                let at = rig.key_at(layer, *keys, token);
                rig.memory.write(at, &key(tag, layer, number * PAGE + token)).unwrap();
            }
        }
    }
}

/// Ends a request while its writer is slow, fills a pool's worth of other requests, and lets the writer go on. Returns
/// whether the others are still whole.
fn survives(end: End) -> bool {
    let mut rig = Rig::new(Config { arriving: 8, ..config() });
    let start = rig.cache.stats();
    let open = asks(120, 0);
    let handle = match end {
        End::Close => {
            let handle = rig.cache.open(&open).unwrap();
            rig.cache.append_in_place(handle, 30).unwrap();
            handle
        }
        End::Abort | End::Early => {
            let handle = rig.cache.arrive(&open).unwrap();
            (0..LAYERS).for_each(|layer| rig.cache.append_layer_in_place(handle, Layer(layer), 30).unwrap());
            handle
        }
    };
    let pages = rig.pages(&Own { handle, tag: 1 });
    let withheld = match end {
        End::Close => rig.cache.close(handle, rig.main).map(|()| None).unwrap(),
        End::Abort | End::Early => Some(rig.cache.abort(handle, rig.main).unwrap()),
    };
    if end == End::Early {
        rig.cache.release(withheld.unwrap()).unwrap();
    }
    rig.sync();
    assert_eq!(rig.cache.reap(rig.main).unwrap(), 0, "nothing of the sequence itself is left");
    // Others take all the pages that there are.
    let mut tenants = Vec::new();
    while let Ok(handle) = rig.cache.arrive(&asks(60, 0)) {
        tenants.push(Own { handle, tag: 10 + tenants.len() as u32 });
    }
    for own in &tenants {
        rig.fill(own, 0..60);
    }
    let free = rig.cache.stats().free_host_pages;
    assert!(free < 4 && tenants.len() >= 4, "{free} pages, {} tenants", tenants.len());
    write_all(&rig, &pages, 1);
    let whole = tenants.iter().all(|own| rig.is_whole(own, 60));
    if whole {
        let _ticket = rig.cache.join(tenants[0].handle, rig.main, WarmUp::default()).unwrap();
        rig.step(&tenants[0], 60, 0, &[0, 1, 59]);
    }
    for own in &tenants {
        rig.cache.close(own.handle, rig.main).unwrap();
    }
    if end == End::Abort {
        assert_eq!(rig.cache.stats().withheld_pages, pages.len() as u32);
        let free = rig.cache.release(withheld.unwrap()).unwrap();
        assert_eq!(free, pages.len() as u32);
    }
    rig.check_free(&start);
    whole
}

#[test]
fn a_late_write_reaches_no_other_sequence_until_the_pages_are_released() {
    assert!(survives(End::Abort));
    assert!(!survives(End::Close), "the control: the late write reaches the next tenant");
    assert!(!survives(End::Early), "the control: the pages were released before the writer was done");
}

/// The states in which a sequence is aborted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Arriving,
    Partial,
    Whole,
    /// Opened as before.
    Filling,
    Joining,
    Running,
    Open,
    Finished,
    Truncated,
    /// The device refused the truncate half-way.
    Truncating,
    Failed,
    Parked,
}

const STATES: [At; 12] = [
    At::Arriving,
    At::Partial,
    At::Whole,
    At::Filling,
    At::Joining,
    At::Running,
    At::Open,
    At::Finished,
    At::Truncated,
    At::Truncating,
    At::Failed,
    At::Parked,
];

#[test]
fn an_abort_ends_a_sequence_in_every_state_and_its_pages_are_withheld() {
    for threaded in [false, true] {
        for at in STATES {
            abort_at(at, if threaded { Rig::threaded(config()) } else { Rig::new(config()) });
        }
    }
}

fn abort_at(at: At, mut rig: Rig) {
    let start = rig.cache.stats();
    let own = match at {
        At::Filling => Own { handle: rig.cache.open(&asks(40, 0)).unwrap(), tag: 1 },
        At::Joining => {
            let open = Open { bring_up: BringUp::Whole, ..asks(40, 0) };
            Own { handle: rig.cache.arrive(&open).unwrap(), tag: 1 }
        }
        _ => rig.arrive(1, 40, 0),
    };
    let filled = match at {
        At::Arriving | At::Filling => 0,
        At::Partial => 20,
        _ => 40,
    };
    // Copies of keys, and all that follows them, are held where streams are threads.
    let held = rig.memory.runs_by_itself().then(|| [rig.memory.hold(rig.main), rig.memory.hold(rig.side)]);
    if filled > 0 {
        rig.fill(&own, 0..filled);
    }
    let joins = !matches!(at, At::Arriving | At::Partial | At::Whole | At::Filling);
    if joins {
        let warm = WarmUp { bytes_a_call: 64, ..WarmUp::default() };
        let _ticket = rig.cache.join(own.handle, rig.main, warm).unwrap();
        assert_eq!(rig.cache.is_running(own.handle).unwrap(), at != At::Joining);
    }
    if matches!(at, At::Parked | At::Truncated | At::Truncating | At::Failed) {
        drop(held);
        rig.sync();
        reach(at, &mut rig, own.handle);
        finish_abort(at, rig, own.handle, None, &start);
        return;
    }
    let step = matches!(at, At::Open | At::Finished).then(|| {
        let mut step = abandoned(&mut rig, own.handle);
        if at == At::Finished {
            rig.cache.finish(&mut step, rig.main).unwrap();
        }
        step
    });
    let withheld = rig.cache.abort(own.handle, rig.main).unwrap();
    let closed = rig.cache.length(own.handle).unwrap_err();
    assert_eq!(closed.kind(), Kind::Closed, "{at:?}");
    if let Some(mut step) = step {
        if at == At::Open {
            rig.cache.finish(&mut step, rig.main).unwrap();
        }
        drop(held);
        rig.sync();
        assert!(rig.cache.retire(step, rig.main).is_err(), "it was abandoned");
    } else {
        drop(held);
    }
    finish_abort(at, rig, own.handle, Some(withheld), &start);
}

/// A step of the sequence that will fail.
fn abandoned(rig: &mut Rig, sequence: Sequence) -> Step {
    let batch = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 };
    let mut step = rig.cache.prepare(MicroBatch(0), 1, &[batch], None, rig.main).unwrap();
    rig.cache.abandon(&mut step).unwrap();
    step
}

/// Brings a running sequence to a state in which no work is in flight.
fn reach(at: At, rig: &mut Rig, sequence: Sequence) {
    match at {
        At::Parked => rig.cache.park(sequence, 0, rig.main).unwrap(),
        At::Truncated => drop(rig.cache.truncate(sequence, 20, rig.main).unwrap()),
        At::Truncating => {
            rig.faulty.aim(Some(1));
            rig.cache.truncate(sequence, 20, rig.main).unwrap_err();
            assert_eq!(rig.faulty.aim(None), Some("enqueue"));
        }
        _ => {
            let mut step = abandoned(rig, sequence);
            rig.cache.finish(&mut step, rig.main).unwrap();
            rig.sync();
            assert!(rig.cache.retire(step, rig.main).is_err(), "it was abandoned");
        }
    }
    let place = match at {
        At::Parked => "the sequence is parked",
        At::Truncating => "the device refused a truncate half-way",
        At::Failed => "a step of the sequence failed",
        _ => "the sequence is decoding",
    };
    assert_eq!(rig.cache.join_early(sequence, rig.main).unwrap_err().place(), place, "{at:?}");
}

/// Aborts if `withheld` is none, and checks that everything but the pages comes back, then the pages too.
fn finish_abort(
    at: At,
    mut rig: Rig,
    sequence: Sequence,
    withheld: Option<Withheld>,
    start: &forebay::Stats,
) {
    let withheld = withheld.unwrap_or_else(|| rig.cache.abort(sequence, rig.main).unwrap());
    assert_eq!(rig.cache.abort(sequence, rig.main).unwrap_err().kind(), Kind::Closed, "{at:?}");
    for _ in 0..3 {
        rig.sync();
        rig.cache.reap(rig.main).unwrap();
    }
    let stats = rig.cache.stats();
    // 40 tokens and 4 rows in flight.
    assert_eq!((stats.withheld_pages, stats.sequences), (3, 0), "{at:?}");
    assert_eq!((stats.free_lanes, stats.slots_in_use), (start.free_lanes, 0), "{at:?}");
    assert_eq!((start.free_host_pages - stats.free_host_pages, stats.parked), (3, 0), "{at:?}");
    rig.cache.validate().unwrap();
    assert_eq!(rig.cache.release(withheld).unwrap(), 3);
    let before = rig.cache.stats();
    let twice = rig.cache.release(withheld).unwrap_err();
    assert_eq!((twice.kind(), twice.place()), (Kind::Closed, "pages that are not withheld"), "{at:?}");
    assert_eq!(rig.cache.stats(), before);
    rig.check_free(start);
}

#[test]
fn pages_that_are_released_while_a_copy_to_them_waits_stay_until_it_has_run() {
    let mut rig = Rig::threaded(config());
    if !rig.memory.runs_by_itself() {
        return;
    }
    let start = rig.cache.stats();
    for aborts in [false, true] {
        let own = rig.arrive(1, 40, 0);
        let held = rig.memory.hold(rig.side);
        rig.fill(&own, 0..40);
        if aborts {
            let withheld = rig.cache.abort(own.handle, rig.main).unwrap();
            assert_eq!(rig.cache.release(withheld).unwrap(), 0, "the copies of keys are not done");
        } else {
            rig.cache.close(own.handle, rig.main).unwrap();
        }
        assert_eq!(rig.cache.reap(rig.main).unwrap(), 1);
        assert_eq!(start.free_index_pages - rig.cache.stats().free_index_pages, 3);
        // A record that ends counts as one of the arriving ones.
        let others: Vec<Sequence> = (0..3).map(|_| rig.cache.arrive(&asks(10, 0)).unwrap()).collect();
        let full = rig.cache.arrive(&asks(10, 0)).unwrap_err();
        assert_eq!((full.kind(), full.place()), (Kind::Exhausted, "arriving sequences"));
        for other in others {
            rig.cache.close(other, rig.main).unwrap();
        }
        drop(held);
        rig.sync();
        assert_eq!(rig.cache.reap(rig.main).unwrap(), 0, "one reap is enough");
        rig.check_free(&start);
    }
}

#[test]
fn a_cache_with_withheld_pages_is_not_shut_down() {
    let mut rig = Rig::new(config());
    let own = rig.arrive(1, 40, 0);
    let withheld = rig.cache.abort(own.handle, rig.main).unwrap();
    rig.sync();
    rig.cache.reap(rig.main).unwrap();
    let Rig { cache, .. } = rig;
    let (mut cache, error) = cache.shut_down().unwrap_err();
    assert_eq!(
        (error.kind(), error.number("sequences"), error.number("withheld")),
        (Kind::Busy, Some(0), Some(3))
    );
    cache.release(withheld).unwrap();
    assert!(cache.shut_down().is_ok());
}

#[test]
fn an_id_of_no_abort_releases_nothing() {
    let mut rig = Rig::new(config());
    let mut other = Rig::new(config());
    let tell = |rig: &mut Rig, prompt| {
        let own = rig.arrive(1, prompt, 0);
        rig.cache.abort(own.handle, rig.main).unwrap()
    };
    let ids = [tell(&mut rig, 10), tell(&mut rig, 60)];
    assert_ne!(ids[0], ids[1]);
    rig.cache.release(ids[0]).unwrap();
    let before = rig.cache.stats();
    assert_eq!(rig.cache.release(ids[0]).unwrap_err().kind(), Kind::Closed);
    assert_eq!(rig.cache.stats(), before);
    // Another cache has aborted as often, and its pages are not these.
    let others = [tell(&mut other, 10), tell(&mut other, 60)];
    assert!(others.iter().all(|own| !ids.contains(own)));
    let before = other.cache.stats();
    assert_eq!(other.cache.release(ids[1]).unwrap_err().kind(), Kind::Closed);
    assert_eq!(other.cache.stats(), before);
    assert!(other.cache.release(others[1]).unwrap() > 0);
    // Ids are not used again.
    let third = tell(&mut rig, 10);
    assert!(!ids.contains(&third));
}

#[test]
fn pages_that_a_sequence_got_in_place_of_shared_ones_are_withheld() {
    let mut rig = Rig::new(Config { arriving: 8, ..config() });
    let ids: Vec<u32> = (0..40).collect();
    let (first, _) = rig.arrive_shared(1, &asks(40, 0), &ids);
    rig.fill(&first, 0..40);
    let _ticket = rig.cache.join(first.handle, rig.main, WarmUp::default()).unwrap();
    rig.sync();
    rig.cache.publish(first.handle, 0, Tokens::new(&ids)).unwrap();
    let (own, shared) = rig.arrive_shared(1, &asks(40, 0), &ids);
    assert_eq!(shared, 32);
    rig.fill(&own, 32..40);
    let _ticket = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap();
    rig.sync();
    // It keeps 5 tokens, and what comes behind them goes to fresh pages.
    let _ticket = rig.cache.truncate(own.handle, 5, rig.main).unwrap();
    rig.sync();
    rig.cache.park(own.handle, 0, rig.main).unwrap();
    rig.cache.extend(own.handle, 40, 0).unwrap();
    let pages = rig.pages(&own);
    assert!(rig.pages(&first).iter().all(|page| !pages.contains(page)));
    let withheld = rig.cache.abort(own.handle, rig.main).unwrap();
    rig.sync();
    assert_eq!(rig.cache.reap(rig.main).unwrap(), 0);
    let mut tenants = Vec::new();
    while let Ok(handle) = rig.cache.arrive(&asks(40, 0)) {
        tenants.push(Own { handle, tag: 10 + tenants.len() as u32 });
    }
    for tenant in &tenants {
        rig.fill(tenant, 0..40);
    }
    assert!(tenants.len() == 6 && rig.cache.stats().free_host_pages < 3);
    write_all(&rig, &pages, 9);
    for tenant in tenants.iter().chain([&first]) {
        rig.check(tenant, 40);
    }
    assert_eq!(rig.cache.release(withheld).unwrap(), 3);
}
