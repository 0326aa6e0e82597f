//! Both ways of an arrival give the bytes that steps write, in every page size and layout; and the numbers that go with
//! them.

use std::sync::Arc;

use crate::arrive::{reached, send, write_over};
use crate::device::TestDevice;
use crate::engine::{Expected, Kernels};
use crate::world::stamps;
use forebay::dense::{Cache, Config, Group, Layout, Open, Runs, Save, Shape, Way};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Stream};
use forebay::{Accepted, BatchRow, Memory, MicroBatch, Sequence, Tokens};

const PROMPT: u32 = 300;

fn config(page_tokens: u32, layout: Layout, runs: Runs) -> Config {
    let group = |layers: &[u32], runs, window| Group { layers: layers.to_vec(), runs, window };
    let groups =
        vec![group(&[1, 3], [32, 16], None), group(&[0, 4], [48, 0], None), group(&[2], [16, 16], Some(70))];
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let base = Config::new(Shape { page_tokens, groups }, 2, PROMPT + 8);
    let pages = (PROMPT + 8).div_ceil(page_tokens);
    let bring_layers = if layout == Layout::LayerFirst { 2 } else { 0 };
    Config { layout, runs, memory, bring_layers, host_pages: vec![pages; 3], ..base }
}

struct Rig {
    test: Arc<TestDevice>,
    cache: Cache,
    kernels: Kernels,
    stream: Stream,
}

impl Rig {
    fn new(config: Config) -> Rig {
        let test = TestDevice::new(HostOptions::default());
        let cache = Cache::new(config, test.device()).unwrap();
        let (kernels, stream) = (Kernels::new(&test, &cache), test.stream().unwrap());
        Rig { test, cache, kernels, stream }
    }

    fn ids() -> Vec<u32> {
        (0..PROMPT).collect()
    }

    /// A step that writes `fresh` new rows behind others, and reads all.
    fn step(&mut self, sequence: Sequence, (before, fresh): (usize, u32)) {
        let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: fresh };
        let mut step = self.cache.prepare(MicroBatch(0), &[row], None, self.stream).unwrap();
        let mut ids = Rig::ids();
        ids.push(PROMPT);
        let stamps = stamps(&ids[..before + fresh as usize]);
        let expected = vec![Expected { stamps, fresh: fresh as usize }];
        let on = (&*self.test.device() as &dyn Device, self.stream);
        self.kernels.enqueue(&mut self.cache, on, (&step, 0), expected);
        self.cache.finish(&mut step, self.stream).unwrap();
        let retired = self.cache.retire(step, self.stream).map(|retired| retired.lengths().to_vec());
        assert_eq!(retired.map_err(|unretired| unretired.error).unwrap(), [before as u32]);
        assert_eq!(*self.kernels.faults.lock().unwrap(), Vec::<String>::new());
    }

    /// The sequence, and the ticket of its arrival ended.
    fn arrive(&mut self, way: Way) -> Sequence {
        let open = Open { prompt: PROMPT, promised: 8 };
        let names = self.cache.names(b"", Tokens::new(&[])).unwrap();
        let opened = self.cache.arrive_shared(&open, &names, way, self.stream).unwrap();
        assert!(opened.ticket.poll().is_some());
        opened.sequence
    }

    fn send(&mut self, sequence: Sequence, way: Way) {
        let stamps = stamps(&Rig::ids());
        for layer in [3, 0, 4, 2, 1] {
            let Rig { kernels, cache, .. } = self;
            send(kernels, cache, (sequence, way), (layer, 0), &stamps, &mut |most| most);
            cache.append_layer_in_place(sequence, layer, PROMPT).unwrap();
        }
    }

    /// All bytes of the prompt that a query behind it reads, by layer, run and position.
    fn bytes(&self, sequence: Sequence) -> Vec<(u32, u32, usize, Vec<u8>)> {
        let config = self.cache.config();
        let mut all = Vec::new();
        for layer in 0..5 {
            let group = self.kernels.group_of(layer);
            let pages = self.cache.pages(sequence, group).unwrap();
            let window = config.shape.groups[group].window.unwrap_or(PROMPT + 1);
            for position in PROMPT + 1 - window..PROMPT {
                let page = pages[(position / config.shape.page_tokens) as usize];
                assert_ne!(page, 0, "layer {layer} position {position}");
                let slot = page * config.shape.page_tokens + position % config.shape.page_tokens;
                for (run, place) in self.kernels.places(group, slot.into(), layer) {
                    let mut bytes = vec![0; place.bytes() as usize];
                    self.test.read(place, &mut bytes).unwrap();
                    all.push((layer, position, run, bytes));
                }
            }
        }
        all
    }
}

#[test]
fn both_ways_give_the_bytes_that_steps_write() {
    for page_tokens in [16, 32, 64, 128, 256] {
        for layout in [Layout::LayerFirst, Layout::PageFirst] {
            for runs in [Runs::Apart, Runs::Together] {
                let of = |way: Option<Way>| {
                    let mut rig = Rig::new(config(page_tokens, layout, runs));
                    let Some(way) = way else {
                        let open = Open { prompt: PROMPT, promised: 8 };
                        let sequence = rig.cache.open(&open).unwrap();
                        rig.step(sequence, (0, PROMPT));
                        return rig.bytes(sequence);
                    };
                    let sequence = rig.arrive(way);
                    rig.send(sequence, way);
                    drop(rig.cache.join(sequence, rig.stream).unwrap());
                    let bytes = rig.bytes(sequence);
                    rig.step(sequence, (PROMPT as usize, 1));
                    bytes
                };
                let wanted = of(None);
                assert_eq!(wanted.len(), 2 * 300 * 2 + 2 * 300 + 69 * 2);
                for way in [Way::Direct, Way::Host] {
                    assert!(of(Some(way)) == wanted, "{page_tokens} {layout:?} {runs:?} {way:?}");
                }
            }
        }
    }
}

/// What arrived is published, found, saved, parked and resumed as what steps wrote.
#[test]
fn what_arrived_is_published_and_found_by_the_next_arrival() {
    for way in [Way::Direct, Way::Host] {
        let mut rig = Rig::new(config(32, Layout::LayerFirst, Runs::Apart));
        let start = rig.cache.stats();
        let first = rig.arrive(way);
        rig.send(first, way);
        assert_eq!((rig.cache.stats().arriving, rig.cache.length(first).unwrap().filled), (1, PROMPT));
        assert_eq!(rig.cache.length(first).unwrap().committed, 0);
        drop(rig.cache.join(first, rig.stream).unwrap());
        assert_eq!((rig.cache.stats().arriving, rig.cache.length(first).unwrap().committed), (0, PROMPT));
        // The host pages are free again, and each layer's pages came up once.
        let free = |rig: &Rig| rig.cache.stats().tiers.map(|tier| tier.free_host_pages);
        assert_eq!(free(&rig), start.tiers.map(|tier| tier.free_host_pages));
        let shape = rig.cache.config().shape.clone();
        // 300 tokens are 10 pages of 32; a window of 70 reads 3 of them.
        let all = 10 * shape.page_bytes(0) + 10 * shape.page_bytes(1) + 3 * shape.page_bytes(2);
        assert_eq!(rig.cache.stats().bytes_up, if way == Way::Host { all } else { 0 });
        assert_eq!(rig.cache.publish(first, 0, Tokens::new(&Rig::ids())).unwrap(), 288);
        drop(rig.cache.park(first, 0, rig.stream).unwrap());
        drop(rig.cache.resume(first, rig.stream).unwrap());
        rig.step(first, (PROMPT as usize, 1));
        // The next one has the published pages, and the transfer brings the rest.
        let ids = Rig::ids();
        let names = rig.cache.names(b"", Tokens::new(&ids)).unwrap();
        let open = Open { prompt: PROMPT, promised: 8 };
        rig.cache.close(first, rig.stream).unwrap();
        // The window of what arrived does not reach back to that of a query behind the prefix.
        assert_eq!(rig.cache.find(&names).tokens, 0);
        assert_eq!(rig.cache.find_arriving(&names, PROMPT).tokens, 288);
        let opened = rig.cache.arrive_shared(&open, &names, way, rig.stream).unwrap();
        assert_eq!(opened.found.tokens, 288);
        assert_eq!(rig.cache.length(opened.sequence).unwrap().filled, 288);
        let stamps = stamps(&ids);
        for layer in 0..5 {
            let Rig { kernels, cache, .. } = &mut rig;
            send(kernels, cache, (opened.sequence, way), (layer, 288), &stamps, &mut |most| most);
            cache.append_layer_in_place(opened.sequence, layer, 12).unwrap();
        }
        drop(rig.cache.join(opened.sequence, rig.stream).unwrap());
        rig.step(opened.sequence, (PROMPT as usize, 1));
        rig.cache.validate().unwrap();
    }
}

/// With write-back a published page goes down when an arrival takes it: before the transfer writes to it.
#[test]
fn pages_that_an_arrival_evicts_are_found_on_the_host() {
    let mut config = config(16, Layout::LayerFirst, Runs::Apart);
    (config.save, config.device_pages) = (Save::Evicted, config.pages_for(1, PROMPT + 8));
    config.host_pages.iter_mut().for_each(|pages| *pages *= 2);
    for way in [Way::Direct, Way::Host] {
        let mut rig = Rig::new(config.clone());
        let first = rig.arrive(way);
        rig.send(first, way);
        drop(rig.cache.join(first, rig.stream).unwrap());
        assert_eq!(rig.cache.publish(first, 0, Tokens::new(&Rig::ids())).unwrap(), 288);
        rig.cache.close(first, rig.stream).unwrap();
        assert_eq!(rig.cache.stats().bytes_down, 0);
        // Another one takes all pages, and its transfer writes to them.
        let second = rig.arrive(way);
        write_over(&rig.kernels, &rig.cache, way, &reached(&rig.cache, second, (way, PROMPT)));
        if way == Way::Host {
            for layer in 0..5 {
                rig.cache.append_layer_in_place(second, layer, PROMPT).unwrap();
            }
            drop(rig.cache.join(second, rig.stream).unwrap());
        }
        rig.cache.close(second, rig.stream).unwrap();
        assert!(rig.cache.stats().bytes_down > 0);
        let names = rig.cache.names(b"", Tokens::new(&Rig::ids())).unwrap();
        let open = Open { prompt: PROMPT, promised: 8 };
        let opened = rig.cache.arrive_shared(&open, &names, Way::Direct, rig.stream).unwrap();
        assert_eq!((opened.found.tokens, opened.found.host_tokens), (288, 288), "{way:?}");
        let stamps = stamps(&Rig::ids());
        for layer in 0..5 {
            let Rig { kernels, cache, .. } = &mut rig;
            send(kernels, cache, (opened.sequence, Way::Direct), (layer, 288), &stamps, &mut |most| most);
            cache.append_layer_in_place(opened.sequence, layer, 12).unwrap();
        }
        drop(rig.cache.join(opened.sequence, rig.stream).unwrap());
        rig.step(opened.sequence, (PROMPT as usize, 1));
        rig.cache.validate().unwrap();
    }
}
