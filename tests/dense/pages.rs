//! Pages of windows and of shared prefixes: cases that random worlds meet too rarely.

use std::sync::Arc;

use crate::device::TestDevice;
use crate::engine::{Expected, Kernels};
use crate::faulty::Faulty;
use forebay::dense::{Cache, Config, Found, Group, Open, Save, Shape};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Stream};
use forebay::{Accepted, BatchRow, Kind, Memory, MicroBatch, Sequence, Step, Tokens};

/// A cache of one group, with a window or without.
fn cache(window: Option<u32>, change: impl FnOnce(&mut Config)) -> (Cache, Stream) {
    let test = TestDevice::new(HostOptions::default());
    let shape = Shape { page_tokens: 16, groups: vec![Group { layers: vec![0], runs: [16, 0], window }] };
    let mut config = Config::new(shape, 2, 512);
    config.memory = Memory { huge: false, populate: false, lock: false, node: None };
    change(&mut config);
    let stream = test.stream().unwrap();
    (Cache::new(config, test.device()).unwrap(), stream)
}

fn prepare(cache: &mut Cache, stream: Stream, sequence: Sequence, accepted: u32, rows: u32) -> Step {
    let row = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows: rows };
    let mut step = cache.prepare(MicroBatch(0), &[row], None, stream).unwrap();
    cache.finish(&mut step, stream).unwrap();
    step
}

fn step(cache: &mut Cache, stream: Stream, sequence: Sequence, accepted: u32, rows: u32) {
    let step = prepare(cache, stream, sequence, accepted, rows);
    cache.retire(step, stream).map(drop).map_err(|unretired| unretired.error).unwrap();
}

/// A chunk that is longer than the window: its pages can be published between its retirement and the next prepare.
#[test]
fn a_prompt_is_published_chunk_by_chunk_though_its_window_is_shorter() {
    let (mut cache, stream) = cache(Some(32), |config| config.device_pages = vec![60]);
    let ids: Vec<u32> = (0..256).collect();
    let names = cache.names(b"", Tokens::new(&ids)).unwrap();
    let open = Open { prompt: 256, promised: 16 };
    let first = cache.open_shared(&open, &names, stream).unwrap().sequence;
    for chunk in 0..4 {
        step(&mut cache, stream, first, if chunk == 0 { 0 } else { 64 }, 64);
        let published = cache.publish(first, 64 * chunk, Tokens::new(&ids[64 * chunk as usize..])).unwrap();
        assert_eq!(published, 64 * (chunk + 1));
        cache.validate().unwrap();
    }
    // Another prompt that begins with the same 128 tokens needs the window before its own first one.
    for common in [256, 128] {
        let mut other = ids.clone();
        other[common..].fill(9999);
        let names = cache.names(b"", Tokens::new(&other)).unwrap();
        assert_eq!(cache.find(&names), Found { tokens: common as u32, host_tokens: 0 });
    }
    // The sequence itself holds no more than its window.
    step(&mut cache, stream, first, 64, 1);
    assert_eq!(cache.pages(first, 0).unwrap().iter().filter(|page| **page != 0).count(), 3);
}

/// A sequence that is closed while its chunks are in flight gives their pages back as they end.
#[test]
fn a_closed_sequence_keeps_no_chunk_from_others() {
    let (mut cache, stream) = cache(Some(32), |config| {
        config.step_tokens = 128;
        config.device_pages = config.pages_for(2, 512);
    });
    let open = Open { prompt: 500, promised: 12 };
    let sequences = [0, 1].map(|_| cache.open(&open).unwrap());
    let mut steps = vec![prepare(&mut cache, stream, sequences[0], 0, 128)];
    steps.push(prepare(&mut cache, stream, sequences[0], 128, 128));
    cache.close(sequences[0], stream).unwrap();
    for step_of in steps {
        cache.retire(step_of, stream).map_err(|unretired| unretired.error).unwrap();
        let accepted = cache.length(sequences[1]).unwrap().landed;
        step(&mut cache, stream, sequences[1], accepted, 128);
        cache.validate().unwrap();
    }
}

/// A page that a fork holds without using its block is not free when its block is unused.
#[test]
fn a_page_that_a_fork_holds_is_not_counted_as_free() {
    let (mut cache, stream) = cache(None, |config| config.device_pages = vec![12]);
    let ids: Vec<u32> = (0..16).collect();
    let nothing = cache.names(b"", Tokens::default()).unwrap();
    let parent = cache.open_shared(&Open { prompt: 16, promised: 10 }, &nothing, stream).unwrap().sequence;
    step(&mut cache, stream, parent, 0, 16);
    let _ticket = cache.truncate(parent, 16, stream).unwrap();
    // The fork comes before the names.
    let (child, _ticket) = cache.fork(parent, 10, stream).unwrap();
    assert_eq!(cache.publish(parent, 0, Tokens::new(&ids)).unwrap(), 16);
    cache.close(parent, stream).unwrap();
    let free = cache.stats().free_pages[0];
    assert_eq!((free, cache.stats().tiers[0].unused), (9, 1));
    let tokens = free * 16;
    let error = cache.open(&Open { prompt: tokens, promised: 1 }).unwrap_err();
    assert_eq!((error.kind(), error.number("free")), (Kind::Exhausted, Some(9)), "{error}");
    let other = cache.open(&Open { prompt: tokens - 3, promised: 1 }).unwrap();
    cache.validate().unwrap();
    for sequence in [child, other] {
        cache.close(sequence, stream).unwrap();
    }
    assert_eq!(cache.stats().free_pages[0], 11);
}

/// With write-back an unused page goes to the host when its device page is taken, and comes back.
#[test]
fn an_evicted_page_is_found_on_the_host() {
    for save in [Save::Published, Save::Evicted] {
        let (mut cache, stream) = cache(None, |config| {
            (config.device_pages, config.host_pages, config.save) = (vec![34], vec![48], save);
        });
        let open = Open { prompt: 160, promised: 1 };
        let prompts = [1, 2, 3, 4].map(|first| (first * 1000..first * 1000 + 160).collect::<Vec<u32>>());
        for ids in &prompts {
            let names = cache.names(b"", Tokens::new(ids)).unwrap();
            let opened = cache.open_shared(&open, &names, stream).unwrap();
            step(&mut cache, stream, opened.sequence, 0, 160);
            cache.publish(opened.sequence, 0, Tokens::new(ids)).unwrap();
            if save == Save::Published {
                // A page at a time: the bytes of a call are bounded.
                while cache.save(stream, 256).unwrap() > 0 {}
            }
            cache.close(opened.sequence, stream).unwrap();
        }
        // The device has room for three prompts, and the last pages of the oldest one had to go.
        let found = prompts.each_ref().map(|ids| cache.find(&cache.names(b"", Tokens::new(ids)).unwrap()));
        assert_eq!(found.map(|found| found.tokens), [160; 4], "{save:?}");
        assert_eq!(
            found.map(|found| found.host_tokens > 0),
            [true, false, false, false],
            "{save:?} {found:?}"
        );
        let names = cache.names(b"", Tokens::new(&prompts[0])).unwrap();
        let opened = cache.open_shared(&open, &names, stream).unwrap();
        assert_eq!(opened.found, found[0]);
        let stats = cache.stats();
        assert_eq!(stats.bytes_up, u64::from(found[0].host_tokens) * 16);
        cache.validate().unwrap();
    }
}

/// A truncation puts another page into the middle of a page table: the tensor of a later step has it.
#[test]
fn attention_reads_the_page_that_a_truncation_put_in_place_of_a_shared_one() {
    let test = TestDevice::new(HostOptions::default());
    let group = Group { layers: vec![0], runs: [16, 0], window: None };
    let mut config = Config::new(Shape { page_tokens: 16, groups: vec![group] }, 2, 64);
    config.memory = Memory { huge: false, populate: false, lock: false, node: None };
    let (device, stream) = (test.device(), test.stream().unwrap());
    let mut cache = Cache::new(config, test.device()).unwrap();
    let kernels = Kernels::new(&test, &cache);
    let parent = cache.open(&Open { prompt: 40, promised: 8 }).unwrap();
    let step = |cache: &mut Cache, of, stamps: &mut Vec<u64>, accepted, fresh: u32| {
        stamps.extend((0..u64::from(fresh)).map(|at| 100 * u64::from(fresh) + at));
        let row = BatchRow { sequence: of, accepted: Accepted::Rows(accepted), query_rows: fresh };
        let mut step = cache.prepare(MicroBatch(0), &[row], None, stream).unwrap();
        let expected = vec![Expected { stamps: stamps.clone(), fresh: fresh as usize }];
        kernels.enqueue(cache, (&*device, stream), (&step, 0), expected);
        cache.finish(&mut step, stream).unwrap();
        cache.retire(step, stream).map(drop).map_err(|unretired| unretired.error).unwrap();
        assert_eq!(*kernels.faults.lock().unwrap(), Vec::<String>::new());
    };
    let mut rows = Vec::new();
    step(&mut cache, parent, &mut rows, 0, 40);
    step(&mut cache, parent, &mut rows, 40, 1);
    drop(cache.truncate(parent, 41, stream).unwrap());
    let (child, _) = cache.fork(parent, 4, stream).unwrap();
    let mut others = rows.clone();
    drop(cache.truncate(parent, 20, stream).unwrap());
    rows.truncate(20);
    let page = |cache: &Cache, of| cache.pages(of, 0).unwrap()[1];
    assert_ne!(page(&cache, parent), page(&cache, child));
    step(&mut cache, parent, &mut rows, 0, 9);
    // The new rows are in the new page, and the other sequence still has its own.
    step(&mut cache, child, &mut others, 0, 1);
    step(&mut cache, parent, &mut rows, 9, 1);
}

/// Of a closed sequence's pages the last goes first, so the prefix outlives its continuation.
#[test]
fn an_eviction_takes_the_end_of_a_prefix_first() {
    let (mut cache, stream) = cache(None, |config| (config.device_pages, config.max_tokens) = (vec![7], 96));
    let ids: Vec<u32> = (0..64).collect();
    let names = cache.names(b"", Tokens::new(&ids)).unwrap();
    let first = cache.open_shared(&Open { prompt: 64, promised: 1 }, &names, stream).unwrap().sequence;
    step(&mut cache, stream, first, 0, 64);
    step(&mut cache, stream, first, 64, 1);
    assert_eq!(cache.publish(first, 0, Tokens::new(&ids)).unwrap(), 64);
    cache.close(first, stream).unwrap();
    // Two pages are free. Each sequence takes one page more than those that are left.
    for (tokens, left) in [(33, 48), (49, 32), (65, 16), (81, 0)] {
        let other = cache.open(&Open { prompt: tokens, promised: 0 }).unwrap();
        assert_eq!(cache.find(&names), Found { tokens: left, host_tokens: 0 }, "{tokens} tokens");
        cache.close(other, stream).unwrap();
    }
}

/// All rows of a chunk are accepted, so when it is retired the window may leave its beginning, though another chunk is
/// in flight.
#[test]
fn a_window_slides_over_a_retired_chunk_while_the_next_one_is_in_flight() {
    let (mut cache, stream) = cache(Some(17), |_| ());
    let sequence = cache.open(&Open { prompt: 128, promised: 16 }).unwrap();
    let first = prepare(&mut cache, stream, sequence, 0, 32);
    let second = prepare(&mut cache, stream, sequence, 32, 32);
    cache.retire(first, stream).map(drop).map_err(|unretired| unretired.error).unwrap();
    let third = prepare(&mut cache, stream, sequence, 32, 32);
    // The second chunk begins at position 32, whose window begins at 16.
    let pages = cache.pages(sequence, 0).unwrap();
    let held: Vec<bool> = pages.iter().map(|page| *page != 0).collect();
    assert_eq!(held, [false, true, true, true, true, true]);
    for step in [second, third] {
        cache.retire(step, stream).map(drop).map_err(|unretired| unretired.error).unwrap();
    }
    cache.validate().unwrap();
}

/// The parent's window has moved on when it is forked: the child uses none of the blocks before it.
#[test]
fn a_fork_uses_no_block_whose_page_it_does_not_own() {
    let (mut cache, stream) = cache(Some(16), |config| {
        (config.steps_in_flight, config.step_tokens, config.max_tokens) = (1, 96, 208);
        config.device_pages = config.pages_for(2, 208);
    });
    let ids: Vec<u32> = (0..192).collect();
    let nothing = cache.names(b"", Tokens::default()).unwrap();
    let parent = cache.open_shared(&Open { prompt: 192, promised: 4 }, &nothing, stream).unwrap().sequence;
    step(&mut cache, stream, parent, 0, 96);
    assert_eq!(cache.publish(parent, 0, Tokens::new(&ids)).unwrap(), 96);
    let _ticket = cache.truncate(parent, 96, stream).unwrap();
    let (child, _ticket) = cache.fork(parent, 4, stream).unwrap();
    cache.validate().unwrap();
    step(&mut cache, stream, parent, 0, 96);
    cache.validate().unwrap();
    step(&mut cache, stream, child, 0, 1);
    for sequence in [parent, child] {
        cache.close(sequence, stream).unwrap();
    }
    cache.validate().unwrap();
}

/// A cache whose window's pages are 16 tokens, on a device that refuses calls.
fn refusing() -> (Cache, Stream, Arc<Faulty>) {
    let faulty = Faulty::new(TestDevice::host(HostOptions::default()).device(), false);
    let shape =
        Shape { page_tokens: 16, groups: vec![Group { layers: vec![0], runs: [16, 0], window: Some(16) }] };
    let mut config = Config { query_rows: 4, ..Config::new(shape, 2, 256) };
    config.memory = Memory { huge: false, populate: false, lock: false, node: None };
    let stream = faulty.stream().unwrap();
    (Cache::new(config, faulty.clone()).unwrap(), stream, faulty)
}

/// Drafts that a refused step would have accepted are neither accepted nor rejected.
#[test]
fn a_refused_prepare_gives_no_page_back() {
    let (mut cache, stream, faulty) = refusing();
    let sequence = cache.open(&Open { prompt: 92, promised: 40 }).unwrap();
    step(&mut cache, stream, sequence, 0, 92);
    step(&mut cache, stream, sequence, 92, 4);
    let row = |accepted| BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows: 1 };
    // Without them the window begins in page 4, with them in page 5.
    let mut refused = 0;
    for passing in 0.. {
        faulty.aim(Some(passing));
        let prepared = cache.prepare(MicroBatch(0), &[row(4)], None, stream);
        if faulty.aim(None).is_none() {
            drop(prepared.unwrap());
            break;
        }
        prepared.unwrap_err();
        refused += 1;
        assert_ne!(cache.pages(sequence, 0).unwrap()[4], 0, "call {passing}");
        cache.validate().unwrap();
    }
    assert!(refused > 2 && cache.pages(sequence, 0).unwrap()[4] == 0);
    let (mut cache, stream, faulty) = refusing();
    let sequence = cache.open(&Open { prompt: 92, promised: 40 }).unwrap();
    step(&mut cache, stream, sequence, 0, 92);
    step(&mut cache, stream, sequence, 92, 4);
    faulty.aim(Some(refused - 1));
    let row = |accepted| BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows: 1 };
    cache.prepare(MicroBatch(0), &[row(4)], None, stream).unwrap_err();
    drop(cache.prepare(MicroBatch(0), &[row(0)], None, stream).unwrap());
}

/// What a truncation that was refused half-way has cut is gone: another try is not longer. And it has cut all.
#[test]
fn a_refused_truncation_is_not_tried_again_with_a_larger_length() {
    let mut half_way = 0;
    for passing in 0.. {
        let (mut cache, stream, faulty) = refusing();
        let ids: Vec<u32> = (0..160).collect();
        let names = |count| Tokens::new(&ids[..count]);
        let prefix = cache.names(b"", names(64)).unwrap();
        let open = Open { prompt: 200, promised: 40 };
        let sequence = cache.open_shared(&open, &prefix, stream).unwrap().sequence;
        step(&mut cache, stream, sequence, 0, 40);
        step(&mut cache, stream, sequence, 40, 120);
        assert_eq!(cache.publish(sequence, 0, names(160)).unwrap(), 160);
        // Another one shares the page of position 50, so the truncation copies it.
        assert_eq!(cache.open_shared(&open, &prefix, stream).unwrap().found.tokens, 64);
        faulty.aim(Some(passing));
        let truncated = cache.truncate(sequence, 50, stream);
        if faulty.aim(None).is_none() {
            drop(truncated.unwrap());
            break;
        }
        truncated.unwrap_err();
        let error = cache.fork(sequence, 1, stream).unwrap_err();
        if error.place() == "the device refused a truncate half-way" {
            half_way += 1;
            let longer = cache.truncate(sequence, 51, stream).unwrap_err();
            assert_eq!((longer.kind(), longer.number("landed")), (Kind::OutOfRange, Some(10)), "{longer}");
        }
        let shorter = passing % 2 == 0 && error.place() == "the device refused a truncate half-way";
        drop(cache.truncate(sequence, if shorter { 40 } else { 50 }, stream).unwrap());
        // A page to which the first try may have enqueued a copy stays.
        assert_eq!(cache.pages(sequence, 0).unwrap().len(), 4);
        cache.validate().unwrap();
    }
    assert!(half_way >= 3, "{half_way}");
}

/// Few bytes a call: both groups get their turn.
#[test]
fn saving_by_little_at_a_time_serves_every_group() {
    let test = TestDevice::new(HostOptions::default());
    let group = |layer, runs| Group { layers: vec![layer], runs, window: None };
    let groups = vec![group(0, [32, 0]), group(1, [16, 0])];
    let mut config = Config::new(Shape { page_tokens: 16, groups }, 2, 128);
    config.memory = Memory { huge: false, populate: false, lock: false, node: None };
    config.host_pages = vec![16, 16];
    let stream = test.stream().unwrap();
    let mut cache = Cache::new(config, test.device()).unwrap();
    let ids: Vec<u32> = (0..64).collect();
    let names = cache.names(b"", Tokens::new(&ids)).unwrap();
    let sequence = cache.open_shared(&Open { prompt: 64, promised: 4 }, &names, stream).unwrap().sequence;
    step(&mut cache, stream, sequence, 0, 64);
    assert_eq!(cache.publish(sequence, 0, Tokens::new(&ids)).unwrap(), 64);
    let saved: Vec<(u32, u32)> = (0..8)
        .map(|_| {
            assert!(cache.save(stream, 512).unwrap() > 0);
            let tiers = cache.stats().tiers;
            (tiers[0].saved, tiers[1].saved)
        })
        .take_while(|saved| *saved != (4, 4))
        .collect();
    assert!(saved.iter().all(|(first, second)| first.abs_diff(*second) <= 2), "{saved:?}");
    assert_eq!(cache.stats().tiers.map(|tier| tier.saved), [4, 4, 0, 0]);
}

/// The pages of a chunk that was abandoned come back when its step is retired, of a closed sequence too.
#[test]
fn an_abandoned_chunk_keeps_no_page() {
    let (mut cache, stream) = cache(Some(16), |_| ());
    let sequence = cache.open(&Open { prompt: 200, promised: 40 }).unwrap();
    step(&mut cache, stream, sequence, 0, 40);
    let row = BatchRow { sequence, accepted: Accepted::Rows(40), query_rows: 120 };
    let mut step = cache.prepare(MicroBatch(0), &[row], None, stream).unwrap();
    cache.abandon(&mut step).unwrap();
    cache.finish(&mut step, stream).unwrap();
    assert_eq!(cache.pages(sequence, 0).unwrap().len(), 10);
    let unretired = cache.retire(step, stream).unwrap_err();
    assert_eq!(unretired.error.kind(), Kind::Cancelled);
    assert_eq!(cache.pages(sequence, 0).unwrap().len(), 3);
    cache.validate().unwrap();
}

/// Copies to the host that are refused twice, after those of another group were enqueued, and whose host pages go to
/// others before the third try.
#[test]
fn copies_that_are_refused_twice_are_forgotten_with_their_host_pages() {
    let mut twice = 0;
    for (first, second) in (0..6).flat_map(|first| (0..6).map(move |second| (first, second))) {
        let faulty = Faulty::new(TestDevice::host(HostOptions::default()).device(), false);
        let group = |layer| Group { layers: vec![layer], runs: [16, 0], window: None };
        let mut config = Config::new(Shape { page_tokens: 16, groups: vec![group(0), group(1)] }, 2, 64);
        config.memory = Memory { huge: false, populate: false, lock: false, node: None };
        config.host_pages = vec![4, 4];
        let stream = faulty.stream().unwrap();
        let mut cache = Cache::new(config, faulty.clone()).unwrap();
        for prompt in [1, 2] {
            let ids: Vec<u32> = (0..64).map(|at| 100 * prompt + at).collect();
            let nothing = cache.names(b"", Tokens::default()).unwrap();
            let open = Open { prompt: 64, promised: 0 };
            let sequence = cache.open_shared(&open, &nothing, stream).unwrap().sequence;
            step(&mut cache, stream, sequence, 0, 64);
            assert_eq!(cache.publish(sequence, 0, Tokens::new(&ids)).unwrap(), 64);
        }
        // Those of the first prompt; the second time it tries them again.
        let mut refusals = 0;
        for (passing, bytes) in [(first, 8 * 256), (second, 0)] {
            faulty.aim(Some(passing));
            refusals += u32::from(cache.save(stream, bytes).is_err());
            faulty.aim(None);
        }
        // The host has room for one prompt.
        twice += u32::from(refusals == 2);
        cache.save(stream, u64::MAX).unwrap();
        cache.validate().unwrap();
        assert_eq!(cache.stats().tiers.map(|tier| tier.saved), [4, 4, 0, 0]);
    }
    assert!(twice > 3, "{twice}");
}

/// Two sequences compute the same pages, and the pages of the first are evicted: those of the second are found when it
/// publishes its next ones.
#[test]
fn pages_that_were_computed_twice_are_found_while_one_of_them_is_there() {
    let (mut cache, stream) = cache(None, |config| {
        (config.sequences, config.batch, config.device_pages) = (3, 3, vec![16]);
    });
    let ids: Vec<u32> = (0..96).collect();
    let none = cache.names(b"", Tokens::new(&[])).unwrap();
    let open = Open { prompt: 64, promised: 14 };
    let both = [(); 2].map(|()| cache.open_shared(&open, &none, stream).unwrap().sequence);
    for sequence in both {
        step(&mut cache, stream, sequence, 0, 64);
        assert_eq!(cache.publish(sequence, 0, Tokens::new(&ids[..64])).unwrap(), 64);
    }
    let names = cache.names(b"", Tokens::new(&ids)).unwrap();
    assert_eq!(cache.find(&names).tokens, 64);
    cache.close(both[0], stream).unwrap();
    // Another one takes all ten pages that are free or evicted.
    let other = cache.open(&Open { prompt: 150, promised: 8 }).unwrap();
    assert_eq!((cache.stats().free_pages[0], cache.find(&names).tokens), (0, 0));
    for accepted in [64, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1] {
        step(&mut cache, stream, both[1], accepted, 1);
    }
    assert_eq!(cache.publish(both[1], 64, Tokens::new(&ids[64..77])).unwrap(), 64);
    assert_eq!(cache.find(&names).tokens, 64);
    cache.validate().unwrap();
    cache.close(other, stream).unwrap();
    cache.close(both[1], stream).unwrap();
    cache.validate().unwrap();
}

/// A sequence that is truncated takes the name from its page, and its twin's page gets it.
#[test]
fn a_page_is_found_after_the_sequence_of_its_twin_was_truncated() {
    let (mut cache, stream) = cache(None, |_| {});
    let ids: Vec<u32> = (0..64).collect();
    let none = cache.names(b"", Tokens::new(&[])).unwrap();
    let open = Open { prompt: 64, promised: 14 };
    let both = [(); 2].map(|()| cache.open_shared(&open, &none, stream).unwrap().sequence);
    for sequence in both {
        step(&mut cache, stream, sequence, 0, 64);
        assert_eq!(cache.publish(sequence, 0, Tokens::new(&ids)).unwrap(), 64);
    }
    let names = cache.names(b"", Tokens::new(&ids)).unwrap();
    drop(cache.truncate(both[0], 32, stream).unwrap());
    assert_eq!(cache.find(&names).tokens, 32);
    assert_eq!(cache.publish(both[1], 64, Tokens::new(&[])).unwrap(), 64);
    assert_eq!(cache.find(&names).tokens, 64);
    cache.validate().unwrap();
}
