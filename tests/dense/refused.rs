//! A device that refuses a call: the cache stays whole, the engine tries again or closes, nothing is read that was not
//! written, and at the end every page is free.
//!
//! A life has everything: prefixes found on the device and on the host, a fork, truncations, steps, saving, publishing,
//! parking, closing. Each of its calls of the device is refused in a run of its own. A refused call of the cache is
//! made again, or its sequence closed, by the number of the run.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::device::TestDevice;
use crate::engine::{Expected, Kernels};
use crate::faulty::Faulty;
use crate::world::stamps;
use forebay::dense::{Cache, Config, Group, Open, Save, Shape};
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Stream};
use forebay::{Accepted, BatchRow, Error, Kind, Memory, MicroBatch, Result, Sequence, Tokens};

fn config(save: Save) -> Config {
    let group = |layers: &[u32], runs, window| Group { layers: layers.to_vec(), runs, window };
    let groups = vec![group(&[1], [32, 16], None), group(&[0, 2], [16, 0], Some(49))];
    let base = Config::new(Shape { page_tokens: 16, groups }, 4, 80);
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    // Pages come back at once, or layer by layer.
    let bring_layers = if save == Save::Evicted { 1 } else { 0 };
    let mut config = Config { step_tokens: 80, query_rows: 2, save, bring_layers, memory, ..base };
    config.device_pages = config.pages_for(3, 80);
    config.host_pages = vec![6, 6];
    config
}

/// A sequence and the token ids of its rows, the last `landed` of which are neither accepted nor rejected.
struct Text {
    handle: Sequence,
    ids: Vec<u32>,
    landed: u32,
}

struct Life {
    clock: Arc<ClockDevice>,
    faulty: Arc<Faulty>,
    cache: Cache,
    kernels: Kernels,
    main: Stream,
    /// The stream of copies; each further try takes the other one.
    side: Stream,
    other: Stream,
    /// In the order of their openings; none for one that was given up or closed.
    texts: Vec<Option<Text>>,
    /// Whether a refused call is made again.
    again: bool,
    refusals: u32,
    /// How many calls of the device pass in the second try before one is refused again; then there is a third.
    second: Option<u64>,
    /// The call of the device that was refused.
    refused: Option<&'static str>,
}

impl Life {
    fn new(seed: u64, save: Save, again: bool) -> Life {
        let test = TestDevice::host(HostOptions::default());
        let options = ClockOptions { seed: Some(seed), ..ClockOptions::default() };
        let clock = ClockDevice::over(test.device(), options).unwrap();
        let faulty = Faulty::new(clock.clone(), false);
        let cache = Cache::new(config(save), faulty.clone()).unwrap();
        let kernels = Kernels::new(&test, &cache);
        let [main, side, other] = [(); 3].map(|()| clock.stream().unwrap());
        Life {
            clock,
            faulty,
            cache,
            kernels,
            main,
            side,
            other,
            texts: Vec::new(),
            again,
            refusals: 0,
            second: None,
            refused: None,
        }
    }

    fn check(&self) {
        self.cache.validate().unwrap();
        assert_eq!(*self.kernels.faults.lock().unwrap(), Vec::<String>::new());
    }

    /// Makes a call, and makes it again if it was refused and the life does so. `None`: it was given up.
    fn twice<T>(&mut self, mut call: impl FnMut(&mut Life) -> Result<T>) -> Option<T> {
        let first = call(self);
        self.check();
        let error: Error = match first {
            Ok(made) => return Some(made),
            Err(error) => error,
        };
        assert_eq!((error.kind(), error.place()), (Kind::OutOfMemory, "refused by the test"));
        self.refusals += 1;
        if !self.again {
            return None;
        }
        self.clock.run().unwrap();
        std::mem::swap(&mut self.side, &mut self.other);
        if let Some(passing) = self.second.take() {
            self.refused = self.faulty.aim(Some(passing));
            let made = call(self);
            self.check();
            self.faulty.aim(None);
            std::mem::swap(&mut self.side, &mut self.other);
            if made.is_ok() {
                return made.ok();
            }
            self.refusals += 1;
        }
        let made = call(self);
        self.check();
        Some(made.unwrap())
    }

    /// Opens a sequence for a prompt. Returns how many tokens were found, on the device and on the host.
    fn open(&mut self, ids: &[u32]) -> Option<(u32, u32)> {
        let names = self.cache.names(b"", Tokens::new(&ids[..ids.len() - 1])).unwrap();
        let open = Open { prompt: ids.len() as u32, promised: 80 - ids.len() as u32 };
        let opened = self.twice(|life| {
            // What a refused opening took comes back when its work has ended.
            life.free_all();
            life.cache.open_shared(&open, &names, life.side)
        });
        let text = opened.as_ref().map(|opened| {
            let ids = ids[..opened.found.tokens as usize].to_vec();
            Text { handle: opened.sequence, ids, landed: 0 }
        });
        self.texts.push(text);
        opened.map(|opened| (opened.found.tokens, opened.found.host_tokens))
    }

    /// Frees what refused calls have left, as an engine does between two steps. A refusal is heard of later.
    fn free_all(&mut self) {
        self.clock.run().unwrap();
        self.refusals += u32::from(self.cache.reap(self.main).is_err());
        self.check();
    }

    fn handle(&self, at: usize) -> Option<Sequence> {
        self.texts.get(at).and_then(Option::as_ref).map(|text| text.handle)
    }

    /// One step of a sequence: `accepted` of its landed rows count, and `fresh` are new.
    fn step(&mut self, at: usize, accepted: u32, fresh: &[u32]) {
        let Some(sequence) = self.handle(at) else { return };
        let query_rows = fresh.len() as u32;
        let row = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows };
        let begun = self.twice(|life| life.cache.prepare(MicroBatch(0), &[row], None, life.main));
        let Some(mut step) = begun else { return self.close(at) };
        let Some(text) = &mut self.texts[at] else { return };
        text.ids.truncate(text.ids.len() - (text.landed - accepted) as usize);
        text.ids.extend(fresh);
        text.landed = fresh.len() as u32;
        let before = text.ids.len() - fresh.len();
        let expected = vec![Expected { stamps: stamps(&text.ids), fresh: fresh.len() }];
        let on = (&*self.faulty as &dyn Device, self.main);
        self.refusals += self.kernels.enqueue(&mut self.cache, on, (&step, 0), expected);
        // A step that was begun has to be finished.
        while let Err(error) = self.cache.finish(&mut step, self.main) {
            assert_eq!(error.kind(), Kind::OutOfMemory);
            self.refusals += 1;
        }
        self.clock.run().unwrap();
        match self.cache.retire(step, self.main) {
            Ok(retired) => assert_eq!(retired.lengths(), [before as u32]),
            Err(unretired) => {
                // The step has ended, but its tokens are given up.
                assert_eq!((unretired.error.kind(), unretired.step.is_none()), (Kind::OutOfMemory, true));
                self.refusals += 1;
            }
        }
        self.check();
    }

    fn publish(&mut self, at: usize) {
        let Some(text) = &self.texts[at] else { return };
        let length = self.cache.length(text.handle).unwrap();
        let ids = &text.ids[length.published as usize..];
        self.cache.publish(text.handle, length.published, Tokens::new(ids)).unwrap();
        self.check();
    }

    fn truncate(&mut self, at: usize, length: u32) {
        let Some(handle) = self.handle(at) else { return };
        if self.twice(|life| life.cache.truncate(handle, length, life.side)).is_none() {
            return self.close(at);
        }
        if let Some(text) = &mut self.texts[at] {
            text.ids.truncate(length as usize);
            text.landed = 0;
        }
        self.clock.run().unwrap();
    }

    fn fork(&mut self, at: usize) {
        let Some(text) = &self.texts[at] else { return };
        let (parent, ids) = (text.handle, text.ids.clone());
        let forked = self.twice(|life| {
            life.free_all();
            life.cache.fork(parent, 4, life.side)
        });
        self.texts.push(forked.map(|(handle, _)| Text { handle, ids, landed: 0 }));
    }

    /// Parks a sequence; `accepted` of its landed rows count.
    fn park(&mut self, at: usize, accepted: u32) {
        let Some(handle) = self.handle(at) else { return };
        let parked = self.twice(|life| life.cache.park(handle, accepted, life.side).map(drop));
        if parked.is_none() {
            return self.close(at);
        }
        if let Some(text) = &mut self.texts[at] {
            text.ids.truncate(text.ids.len() - (text.landed - accepted) as usize);
            text.landed = 0;
        }
        self.clock.run().unwrap();
    }

    fn resume(&mut self, at: usize) {
        let Some(handle) = self.handle(at) else { return };
        let resumed = self.twice(|life| {
            life.free_all();
            life.cache.resume(handle, life.side)
        });
        if resumed.is_none() {
            self.close(at);
        }
    }

    fn save(&mut self) {
        let _ = self.twice(|life| life.cache.save(life.side, u64::MAX));
    }

    fn close(&mut self, at: usize) {
        let Some(text) = self.texts[at].take() else { return };
        if let Err(error) = self.cache.close(text.handle, self.main) {
            assert_eq!(error.kind(), Kind::OutOfMemory);
            self.refusals += 1;
        }
        self.check();
        assert_eq!(self.cache.length(text.handle).unwrap_err().kind(), Kind::Closed);
    }

    /// A sequence whose prompt is computed and published.
    fn write(&mut self, ids: &[u32]) {
        if let Some((found, _)) = self.open(ids) {
            let at = self.texts.len() - 1;
            self.step(at, 0, &ids[found as usize..]);
            self.publish(at);
        }
    }

    fn close_all(&mut self) {
        (0..self.texts.len()).for_each(|at| self.close(at));
        self.texts.clear();
    }

    /// The whole life. Returns what was found on the device and on the host.
    fn run(&mut self) -> Vec<(u32, u32)> {
        let text = |of: u32, count: u32| (0..count).map(|at| of * 1000 + at).collect::<Vec<u32>>();
        let mut found = Vec::new();
        self.write(&text(1, 50));
        self.save();
        self.step(0, 50, &[9, 9]);
        self.step(0, 1, &[8]);
        found.extend(self.open(&text(1, 50)));
        self.truncate(0, 51);
        self.fork(0);
        self.step(0, 0, &[7, 7]);
        self.step(1, 0, &[6, 6]);
        self.step(2, 0, &[6, 6]);
        self.park(2, 1);
        self.truncate(0, 40);
        self.step(0, 0, &[5]);
        self.resume(2);
        self.step(2, 0, &[3, 3]);
        // One that is parked is closed too.
        self.park(2, 2);
        self.close_all();
        // Three others evict what was published.
        for of in [2, 3, 4] {
            self.free_all();
            self.write(&text(of, 70));
        }
        self.step(0, 70, &[4, 4]);
        self.close_all();
        self.free_all();
        found.extend(self.open(&text(1, 50)));
        // The first tokens, if a refusal cost the prefix, else those behind it.
        let tokens = found.last().filter(|_| self.handle(0).is_some()).map_or(0, |found| found.0);
        self.step(0, 0, &text(1, 50)[tokens as usize..]);
        self.save();
        let shared = self.open(&text(1, 50));
        self.step(1, 0, &text(1, 50)[shared.map_or(0, |found| found.0 as usize)..]);
        found.extend(shared);
        self.end();
        found
    }

    fn end(&mut self) {
        self.close_all();
        self.free_all();
        self.refused = self.faulty.aim(None).or(self.refused);
        self.free_all();
        let unused =
            Cache::new(self.cache.config().clone(), TestDevice::host(HostOptions::default()).device());
        let (stats, unused) = (self.cache.stats(), unused.unwrap().stats());
        assert_eq!((stats.sequences, stats.free_pages), (0, unused.free_pages));
    }
}

#[test]
fn every_call_of_the_device_may_be_refused() {
    let mut refused = BTreeSet::new();
    for (save, again) in [Save::Published, Save::Evicted].into_iter().flat_map(|s| [(s, true), (s, false)]) {
        let mut whole = Life::new(1, save, again);
        let found = whole.run();
        assert_eq!((found.as_slice(), whole.refusals), (&[(48, 0), (48, 48), (48, 0)][..], 0), "{save:?}");
        for passing in 0.. {
            let mut life = Life::new(passing, save, again);
            life.faulty.aim(Some(passing));
            let found = life.run();
            let Some(call) = life.refused else { break };
            assert_eq!(life.refusals, 1, "{call} number {passing}");
            assert!(!again || found.len() == 3, "{call} number {passing}");
            refused.insert(call);
        }
    }
    assert_eq!(refused, BTreeSet::from(["complete", "enqueue_pages", "record", "wait"]));
}

/// A call that is refused twice in a row, at any two of its calls of the device, is made a third time.
#[test]
fn a_call_may_be_refused_twice_in_a_row() {
    let mut twice = 0;
    for save in [Save::Published, Save::Evicted] {
        for (second, passing) in (0..8).flat_map(|second| (0..).map(move |passing| (second, passing))) {
            let mut life = Life::new(passing, save, true);
            life.second = Some(second);
            life.faulty.aim(Some(passing));
            life.run();
            twice += u32::from(life.refusals > 1);
            if life.refused.is_none() {
                break;
            }
        }
    }
    assert!(twice > 100, "{twice} calls were refused twice");
}
