//! A device that refuses a call of an arrival: the cache stays whole, the call is made again or the sequence given up,
//! and at the end every page is free.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::arrive::send;
use crate::device::TestDevice;
use crate::engine::{Expected, Kernels};
use crate::faulty::Faulty;
use crate::world::stamps;
use forebay::dense::{Cache, Config, Group, Names, Open, Save, Shape, Way};
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Stream};
use forebay::{Accepted, BatchRow, Kind, Memory, MicroBatch, Result, Sequence, Tokens};

fn config(save: Save) -> Config {
    let group = |layers: &[u32], runs, window| Group { layers: layers.to_vec(), runs, window };
    let groups = vec![group(&[1], [32, 16], None), group(&[0, 2], [16, 0], Some(49))];
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let bring_layers = if save == Save::Evicted { 1 } else { 0 };
    let base = Config::new(Shape { page_tokens: 16, groups }, 4, 80);
    let mut config = Config { step_tokens: 80, save, bring_layers, memory, ..base };
    (config.device_pages, config.host_pages) = (config.pages_for(2, 80), vec![6, 6]);
    config
}

struct Life {
    clock: Arc<ClockDevice>,
    faulty: Arc<Faulty>,
    cache: Cache,
    kernels: Kernels,
    main: Stream,
    /// Each further try takes the other one.
    sides: [Stream; 2],
    again: bool,
    refusals: u32,
    joins: u32,
    shared: u32,
}

impl Life {
    fn new(seed: u64, save: Save, again: bool) -> Life {
        let test = TestDevice::host(HostOptions::default());
        let options = ClockOptions { seed: Some(seed), ..ClockOptions::default() };
        let clock = ClockDevice::over(test.device(), options).unwrap();
        let faulty = Faulty::new(clock.clone(), false);
        let cache = Cache::new(config(save), faulty.clone()).unwrap();
        let kernels = Kernels::new(&test, &cache);
        let [main, a, b] = [(); 3].map(|()| clock.stream().unwrap());
        let (refusals, joins, shared) = (0, 0, 0);
        Life { clock, faulty, cache, kernels, main, sides: [a, b], again, refusals, joins, shared }
    }

    fn check(&self) {
        self.cache.validate().unwrap();
        assert_eq!(*self.kernels.faults.lock().unwrap(), Vec::<String>::new());
    }

    /// Makes a call, and makes it again on the other stream if it was refused and the life does so.
    fn twice<T>(&mut self, mut call: impl FnMut(&mut Life) -> Result<T>) -> Option<T> {
        let first = call(self);
        self.check();
        let Err(error) = first else { return first.ok() };
        assert_eq!((error.kind(), error.place()), (Kind::OutOfMemory, "refused by the test"));
        self.refusals += 1;
        if !self.again {
            return None;
        }
        self.sides.swap(0, 1);
        let made = call(self);
        self.check();
        Some(made.unwrap())
    }

    /// Frees what refused calls have left. A refusal is heard of later.
    fn free_all(&mut self) {
        self.clock.run().unwrap();
        self.refusals += u32::from(self.cache.reap(self.main).is_err());
        self.check();
    }

    fn close(&mut self, sequence: Sequence) {
        self.refusals += u32::from(self.cache.close(sequence, self.main).is_err());
        self.check();
    }

    /// A sequence arrives, its layers in the given order, and joins. `None`: it was given up.
    fn arrive(&mut self, ids: &[u32], names: &Names, way: Way, order: [u32; 3]) -> Option<Sequence> {
        let open = Open { prompt: ids.len() as u32, promised: 8 };
        let opened = self.twice(|life| {
            life.free_all();
            life.cache.arrive_shared(&open, names, way, life.sides[0])
        })?;
        self.shared += u32::from(opened.found.tokens > 0);
        let (sequence, found) = (opened.sequence, opened.found.tokens);
        self.clock.run().unwrap();
        assert!(opened.ticket.poll().is_some());
        let stamps = stamps(ids);
        for layer in order {
            let Life { kernels, cache, .. } = self;
            send(kernels, cache, (sequence, way), (layer, found as usize), &stamps, &mut |most| most);
            self.cache.append_layer_in_place(sequence, layer, open.prompt - found).unwrap();
            // The last one comes up with the join.
            if way == Way::Host && layer != order[2] {
                let brought = self.twice(|life| life.cache.bring_layer(sequence, layer, life.sides[0]));
                if brought.is_none() {
                    self.close(sequence);
                    return None;
                }
            }
        }
        if self.twice(|life| life.cache.join(sequence, life.sides[0]).map(drop)).is_none() {
            self.close(sequence);
            return None;
        }
        self.joins += 1;
        Some(sequence)
    }

    /// A step reads all rows.
    fn step(&mut self, sequence: Sequence, ids: &[u32]) -> Option<()> {
        let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 };
        let begun = self.twice(|life| life.cache.prepare(MicroBatch(0), &[row], None, life.main));
        let mut step = begun?;
        let expected = vec![Expected { stamps: stamps(&[ids, &[9]].concat()), fresh: 1 }];
        let on = (&*self.faulty as &dyn Device, self.main);
        self.refusals += self.kernels.enqueue(&mut self.cache, on, (&step, 0), expected);
        while self.cache.finish(&mut step, self.main).is_err() {
            self.refusals += 1;
        }
        self.clock.run().unwrap();
        self.refusals += u32::from(self.cache.retire(step, self.main).is_err());
        self.check();
        Some(())
    }

    fn run(&mut self) {
        let texts = [1, 2, 3].map(|of| (0..60).map(|at| of * 1000 + at).collect::<Vec<u32>>());
        let none = self.cache.names(b"", Tokens::new(&[])).unwrap();
        for (text, way) in texts.iter().zip([Way::Direct, Way::Host, Way::Host]) {
            if let Some(sequence) = self.arrive(text, &none, way, [2, 0, 1]) {
                let _ = self.step(sequence, text);
                if self.cache.length(sequence).is_ok_and(|length| length.committed == 60) {
                    self.clock.run().unwrap();
                    self.cache.publish(sequence, 0, Tokens::new(&text[..48])).unwrap();
                    let _ = self.twice(|life| life.cache.save(life.sides[0], u64::MAX));
                }
                self.close(sequence);
            }
            self.free_all();
        }
        // The first prefix is on the host, the last one on the device.
        for (text, way) in [(&texts[0], Way::Host), (&texts[2], Way::Direct)] {
            let names = self.cache.names(b"", Tokens::new(&text[..48])).unwrap();
            if let Some(sequence) = self.arrive(text, &names, way, [0, 1, 2]) {
                let _ = self.step(sequence, text);
                self.close(sequence);
            }
        }
        for way in [Way::Direct, Way::Host] {
            let open = Open { prompt: 40, promised: 8 };
            let arrived = self.twice(|life| {
                life.free_all();
                life.cache.arrive(&open, way, life.sides[0])
            });
            let Some((sequence, _)) = arrived else { continue };
            self.clock.run().unwrap();
            if way == Way::Host {
                self.cache.append_layer_in_place(sequence, 1, 40).unwrap();
                let _ = self.twice(|life| life.cache.bring_layer(sequence, 1, life.sides[0]));
            }
            match self.twice(|life| life.cache.abort(sequence, life.sides[0])) {
                Some(withheld) => drop(self.cache.release(withheld).unwrap()),
                None => self.close(sequence),
            }
        }
    }

    /// The call of the device that was refused. All pages are free.
    fn end(mut self) -> Option<&'static str> {
        self.free_all();
        let refused = self.faulty.aim(None);
        self.free_all();
        let test = TestDevice::host(HostOptions::default());
        let unused = Cache::new(self.cache.config().clone(), test.device()).unwrap().stats();
        let stats = self.cache.stats();
        assert_eq!((stats.sequences, stats.withheld_pages, stats.free_pages), (0, 0, unused.free_pages));
        assert_eq!(stats.tiers.map(|tier| tier.parked), [0; 4]);
        refused
    }
}

#[test]
fn every_call_of_the_device_may_be_refused_while_sequences_arrive() {
    let mut refused = BTreeSet::new();
    for (save, again) in [Save::Published, Save::Evicted].into_iter().flat_map(|s| [(s, true), (s, false)]) {
        let mut whole = Life::new(1, save, again);
        whole.run();
        assert_eq!((whole.refusals, whole.joins, whole.shared), (0, 5, 2), "{save:?}");
        whole.end();
        for passing in 0.. {
            let mut life = Life::new(passing, save, again);
            life.faulty.aim(Some(passing));
            life.run();
            let refusals = life.refusals;
            assert!(!again || life.joins == 5, "number {passing}");
            let Some(call) = life.end() else { break };
            assert!(refusals <= 1, "{call} number {passing}");
            refused.insert(call);
        }
    }
    assert_eq!(refused, BTreeSet::from(["complete", "enqueue_pages", "record", "wait"]));
}
