//! Sequences that arrive: a world of random transfers, with late writers, beside sequences that run.
//!
//! The model is a list of stamps for each sequence. The transfer is naive: it writes a row's bytes where the page table
//! or the host page says. What arrived is read by the kernels of `engine`, through the page tables of a step, as rows
//! that steps wrote are. So both ways give the bytes that steps would have written.

use std::sync::Arc;

use crate::configs::{Random, config};
use crate::device::TestDevice;
use crate::devices::On;
use crate::engine::{Expected, Kernels, bytes};
use crate::seeds;
use crate::world::stamps;
use forebay::dense::{Cache, Config, Layout, Open, Way};
use forebay::device::clock::ClockDevice;
use forebay::device::host::HostOptions;
use forebay::device::{Device, Slice, Stream, Ticket};
use forebay::{Accepted, BatchRow, Kind, MicroBatch, Sequence, Tokens, Withheld};

/// What the world does, in the order of [`Arrivals::done`].
const WHAT: [&str; 14] = [
    "arrive direct",
    "arrive through the host",
    "share pages",
    "bring a layer",
    "join direct",
    "join through the host",
    "abort direct",
    "abort through the host",
    "late write",
    "step",
    "publish",
    "park",
    "resume",
    "close while arriving",
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Is {
    Arriving,
    Running,
    Parked,
}

struct Own {
    handle: Sequence,
    is: Is,
    way: Way,
    /// The token ids of the prompt and of the rows behind it.
    ids: Vec<u32>,
    prompt: u32,
    tokens: u32,
    named: bool,
    /// Rows of the last step.
    landed: u32,
    ticket: Ticket,
    /// While it arrives, the rows of each layer.
    filled: Vec<u32>,
    brought: Vec<bool>,
}

/// An aborted sequence, whose writer goes on.
struct Late {
    withheld: Withheld,
    way: Way,
    /// Group and page.
    pages: Vec<(usize, u32)>,
}

struct Arrivals {
    clock: Option<Arc<ClockDevice>>,
    device: Arc<dyn Device>,
    cache: Cache,
    kernels: Kernels,
    main: Stream,
    sides: [Stream; 2],
    random: Random,
    own: Vec<Own>,
    late: Vec<Late>,
    fresh: u32,
    done: [u32; WHAT.len()],
}

/// A naive transfer: writes rows `from..` of a layer where the page table or the host pages say. `cut` says how many of
/// the rows that follow each other in a host page are stored in one call.
pub fn send(
    kernels: &Kernels,
    cache: &mut Cache,
    (handle, way): (Sequence, Way),
    (layer, from): (u32, usize),
    stamps: &[u64],
    cut: &mut dyn FnMut(usize) -> usize,
) {
    let (group, page_tokens) = (kernels.group_of(layer), cache.config().shape.page_tokens as usize);
    if way == Way::Direct {
        let pages = cache.pages(handle, group).unwrap();
        for (position, stamp) in stamps.iter().enumerate().skip(from) {
            let page = pages[position / page_tokens] as usize;
            // Before a window nothing is written.
            for (run, place) in kernels
                .places(group, (page * page_tokens + position % page_tokens) as u64, layer)
                .filter(|_| page > 0)
            {
                kernels.test.write(place, &bytes(*stamp, layer, run, place.bytes())).unwrap();
            }
        }
        return;
    }
    for run in 0..2 {
        let Some(view) = cache.config().view(layer, run) else { continue };
        let mut position = from;
        while position < stamps.len() {
            let (block, token) = (position / page_tokens, position % page_tokens);
            let count = cut((page_tokens - token).min(stamps.len() - position));
            let rows = stamps[position..position + count].iter();
            let rows: Vec<u8> = rows.flat_map(|stamp| bytes(*stamp, layer, run, view.row)).collect();
            cache.store(handle, (layer, run), block as u32, token as u64 * view.row, &rows).unwrap();
            position += count;
        }
    }
}

/// The pages to which the transfer of a sequence writes, with their groups.
pub fn reached(cache: &Cache, handle: Sequence, (way, prompt): (Way, u32)) -> Vec<(usize, u32)> {
    let page_tokens = cache.config().shape.page_tokens;
    let (shared, end) = (cache.length(handle).unwrap().committed / page_tokens, prompt.div_ceil(page_tokens));
    let groups = 0..cache.config().shape.groups.len();
    let of_group = |group: usize| -> Vec<u32> {
        match way {
            Way::Direct => {
                let table = cache.pages(handle, group).unwrap()[..end as usize].iter().skip(shared as usize);
                table.copied().filter(|page| *page != 0).collect()
            }
            Way::Host => cache.host_pages(handle, group).unwrap().map(|(_, page)| page).collect(),
        }
    };
    groups.flat_map(|group| of_group(group).into_iter().map(move |page| (group, page))).collect()
}

/// A writer writes to every byte of these pages.
pub fn write_over(kernels: &Kernels, cache: &Cache, way: Way, pages: &[(usize, u32)]) {
    for (group, page) in pages {
        let own: Vec<(Slice, u64, u64)> = match way {
            Way::Direct => {
                cache.planes(*group).unwrap().map(|plane| (plane.memory, plane.stride, plane.bytes)).collect()
            }
            Way::Host => {
                let all = cache.config().shape.page_bytes(*group);
                vec![(cache.host_memory(*group).unwrap().unwrap(), all, all)]
            }
        };
        for (memory, stride, bytes) in own {
            let piece = memory.part(u64::from(*page) * stride, bytes).unwrap();
            kernels.test.write(piece, &vec![0xEE; bytes as usize]).unwrap();
        }
    }
}

/// One of many configurations, of all page sizes.
fn any_config(seed: u64) -> Config {
    let mut random = Random::new(seed ^ 0xA771);
    let mut config = config(seed);
    config.shape.page_tokens = [16, 16, 32, 64, 128, 256][random.below(6) as usize];
    config.device_pages = config.pages_for(1 + random.below(config.sequences), config.max_tokens);
    if random.below(4) > 0 {
        let least = config.max_tokens.div_ceil(config.shape.page_tokens);
        config.host_pages = config.device_pages.iter().map(|_| least + random.below(20)).collect();
    } else {
        config.host_pages = Vec::new();
    }
    if config.layout == Layout::LayerFirst {
        config.bring_layers = random.below(3);
    }
    config
}

impl Arrivals {
    fn new(seed: u64, on: On) -> Arrivals {
        let (test, clock, device) = on.devices();
        let cache = Cache::new(any_config(seed), Arc::clone(&device)).unwrap();
        let kernels = Kernels::new(&test, &cache);
        let [main, a, b] = [(); 3].map(|()| device.stream().unwrap());
        let random = Random::new(seed ^ 0xD15C);
        Arrivals {
            clock,
            device,
            cache,
            kernels,
            main,
            sides: [a, b],
            random,
            own: Vec::new(),
            late: Vec::new(),
            fresh: 1 << 20,
            done: [0; WHAT.len()],
        }
    }

    fn did(&mut self, what: &str) {
        self.done[WHAT.iter().position(|own| *own == what).unwrap()] += 1;
    }

    fn settle(&self) {
        self.clock.iter().for_each(|clock| assert!(clock.run().is_ok()));
    }

    fn side(&mut self) -> Stream {
        self.sides[self.random.below(2) as usize]
    }

    fn pick(&mut self, is: Is) -> Option<usize> {
        let of: Vec<usize> = (0..self.own.len()).filter(|at| self.own[*at].is == is).collect();
        let at = self.random.below(of.len().max(1) as u32) as usize;
        of.get(at).copied()
    }

    fn operate(&mut self) {
        match self.random.below(43) {
            0..=4 => self.arrive(),
            5..=17 => self.come(),
            18..=21 => self.bring(),
            22..=25 => self.join(),
            26..=30 => self.step(),
            31..=34 => self.publish(),
            35 => self.park(),
            36 => self.resume(),
            37 => self.abort(),
            38 | 39 => self.write_late(),
            40 => self.close(),
            41 => self.settle(),
            _ => {
                let side = self.side();
                self.cache.save(side, u64::MAX).unwrap();
                self.cache.reap(side).unwrap();
            }
        }
        self.check();
    }

    fn check(&self) {
        self.cache.validate().unwrap();
        let faults = self.kernels.faults.lock().unwrap();
        assert!(faults.is_empty(), "{faults:?} {:?}", self.cache.config());
        let stats = self.cache.stats();
        let arriving = self.own.iter().filter(|own| own.is == Is::Arriving);
        assert_eq!(stats.arriving as usize, arriving.clone().count());
        assert_eq!(
            stats.withheld_pages as usize,
            self.late.iter().map(|late| late.pages.len()).sum::<usize>()
        );
        for own in arriving {
            let length = self.cache.length(own.handle).unwrap();
            assert_eq!(length.filled, *own.filled.iter().min().unwrap());
            assert!(self.cache.is_arriving(own.handle).unwrap());
        }
    }

    fn arrive(&mut self) {
        let most = self.cache.config().max_tokens;
        let prompt = self.random.below(most);
        let promised = 1 + self.random.below(most - prompt);
        let way = if self.random.one_in(2) { Way::Direct } else { Way::Host };
        let (script, turn) = (self.random.below(2), self.random.below(3) * 40);
        let mut ids: Vec<u32> = (0..prompt).map(|at| if at < turn { script } else { 10 + script }).collect();
        let known = if self.random.one_in(3) { self.random.below(prompt + 1) } else { prompt } as usize;
        for id in &mut ids[known..] {
            self.fresh += 1;
            *id = self.fresh;
        }
        let (open, stream, before) = (Open { prompt, promised }, self.side(), self.cache.stats());
        let named = !self.random.one_in(3);
        let arrived = match named {
            true => {
                let names = self.cache.names(b"", Tokens::new(&ids[..known])).unwrap();
                let found = self.cache.find_arriving(&names, prompt);
                assert!(found.tokens >= self.cache.find(&names).tokens && found.tokens as usize <= known);
                let opened = self.cache.arrive_shared(&open, &names, way, stream);
                assert!(opened.as_ref().is_ok_and(|opened| opened.found == found) || opened.is_err());
                opened.map(|opened| (opened.sequence, opened.ticket, opened.found.tokens))
            }
            false => self.cache.arrive(&open, way, stream).map(|(sequence, ticket)| (sequence, ticket, 0)),
        };
        let (handle, ticket, found) = match arrived {
            Ok(arrived) => arrived,
            Err(error) => {
                assert_eq!(self.cache.stats(), before);
                if error.kind() == Kind::InvalidState {
                    let tier = self.cache.host_memory(0).unwrap();
                    assert!(way == Way::Host && tier.is_none(), "{error}");
                } else {
                    assert_eq!(error.kind(), Kind::Exhausted, "{error}");
                    assert!(error.number("wanted") > error.number("free"), "{error}");
                }
                return;
            }
        };
        self.did(if way == Way::Direct { "arrive direct" } else { "arrive through the host" });
        if found > 0 {
            self.did("share pages");
        }
        let layers = self.cache.config().shape.layers();
        let (filled, brought) = (vec![found; layers], vec![false; layers]);
        let tokens = prompt + promised;
        let is = Is::Arriving;
        self.own.push(Own {
            handle,
            is,
            way,
            ids,
            prompt,
            tokens,
            named,
            landed: 0,
            ticket,
            filled,
            brought,
        });
    }

    /// Some rows of a layer come.
    fn come(&mut self) {
        let Some(at) = self.pick(Is::Arriving) else { return };
        let (layer, most) = (self.random.below(self.own[at].filled.len() as u32), self.own[at].prompt);
        let from = self.own[at].filled[layer as usize];
        let count = match self.random.one_in(2) {
            true => most - from,
            false => self.random.below(most - from + 1),
        };
        let (handle, way) = (self.own[at].handle, self.own[at].way);
        if self.own[at].ticket.poll().is_none() {
            // On threads it may be Done by now.
            if way == Way::Host && self.clock.is_some() {
                let early = self.cache.append_layer_in_place(handle, layer, count).unwrap_err();
                assert_eq!(early.kind(), Kind::Busy, "{early}");
            }
            return self.settle();
        }
        let stamps = stamps(&self.own[at].ids[..(from + count) as usize]);
        let Arrivals { kernels, cache, random, .. } = self;
        let mut cut = |most: usize| 1 + random.below(most as u32) as usize;
        send(kernels, cache, (handle, way), (layer, from as usize), &stamps, &mut cut);
        self.cache.append_layer_in_place(handle, layer, count).unwrap();
        self.own[at].filled[layer as usize] += count;
    }

    fn bring(&mut self) {
        let Some(at) = self.pick(Is::Arriving) else { return };
        let layer = self.random.below(self.own[at].filled.len() as u32);
        let stream = self.side();
        let own = &self.own[at];
        let whole = own.filled[layer as usize] == own.prompt;
        let may = own.way == Way::Host && whole && !own.brought[layer as usize];
        match self.cache.bring_layer(own.handle, layer, stream) {
            Ok(()) => {
                assert!(may);
                self.own[at].brought[layer as usize] = true;
                self.did("bring a layer");
            }
            // The ticket was not Done yet.
            Err(error) if error.kind() == Kind::Busy => assert_eq!(own.way, Way::Host),
            Err(error) => assert!(!may && error.kind() == Kind::InvalidState, "{error}"),
        }
    }

    fn join(&mut self) {
        let Some(at) = self.pick(Is::Arriving) else { return };
        let stream = self.side();
        let own = &mut self.own[at];
        let whole = own.filled.iter().all(|filled| *filled == own.prompt);
        match self.cache.join(own.handle, stream) {
            Ok(ticket) => {
                assert!(whole);
                (own.is, own.ticket) = (Is::Running, ticket);
                let length = self.cache.length(own.handle).unwrap();
                assert_eq!((length.committed, length.filled), (own.prompt, own.prompt));
                let direct = own.way == Way::Direct;
                self.did(if direct { "join direct" } else { "join through the host" });
            }
            Err(error) => assert!(!whole && error.kind() == Kind::InvalidState, "{error}"),
        }
    }

    /// A step of one running sequence, at once after its join or later.
    fn step(&mut self) {
        let Some(at) = self.pick(Is::Running) else { return };
        let own = &mut self.own[at];
        let left = (own.tokens as usize).saturating_sub(own.ids.len()) as u32;
        let query_rows = (1 + self.random.below(self.cache.config().query_rows)).min(left);
        if query_rows == 0 {
            return;
        }
        let row = BatchRow { sequence: own.handle, accepted: Accepted::Rows(own.landed), query_rows };
        let mut step = self.cache.prepare(MicroBatch(0), &[row], None, self.main).unwrap();
        for _ in 0..query_rows {
            self.fresh += 1;
            own.ids.push(self.fresh);
        }
        own.landed = query_rows;
        let expected = vec![Expected { stamps: stamps(&own.ids), fresh: query_rows as usize }];
        let on = (&*self.device as &dyn Device, self.main);
        assert_eq!(self.kernels.enqueue(&mut self.cache, on, (&step, 0), expected), 0);
        self.cache.finish(&mut step, self.main).unwrap();
        self.settle();
        let mut open = Some(step);
        while let Some(step) = open.take() {
            if let Err(unretired) = self.cache.retire(step, self.main) {
                assert_eq!(unretired.error.kind(), Kind::Busy, "{}", unretired.error);
                open = unretired.step;
                std::thread::yield_now();
            }
        }
        self.did("step");
    }

    fn publish(&mut self) {
        let Some(at) = self.pick(Is::Running) else { return };
        let own = &self.own[at];
        let published = self.cache.length(own.handle).unwrap().published;
        let stored = own.ids.len() - own.landed as usize;
        let next = &own.ids[published as usize..stored];
        match self.cache.publish(own.handle, published, Tokens::new(next)) {
            Ok(now) => {
                assert!(own.named && now as usize <= stored);
                if now > published {
                    self.did("publish");
                }
            }
            // Its copies may be in flight.
            Err(error) if error.kind() == Kind::Busy => {}
            Err(error) => assert!(!own.named && error.kind() == Kind::InvalidState, "{error}"),
        }
    }

    fn park(&mut self) {
        let Some(at) = self.pick(Is::Running) else { return };
        let stream = self.side();
        let own = &mut self.own[at];
        match self.cache.park(own.handle, own.landed, stream) {
            Ok(_) => {
                (own.is, own.landed) = (Is::Parked, 0);
                self.did("park");
            }
            Err(error) => assert!(matches!(error.kind(), Kind::Busy | Kind::Exhausted), "{error}"),
        }
    }

    fn resume(&mut self) {
        let Some(at) = self.pick(Is::Parked) else { return };
        let stream = self.side();
        match self.cache.resume(self.own[at].handle, stream) {
            Ok(ticket) => {
                (self.own[at].is, self.own[at].ticket) = (Is::Running, ticket);
                self.did("resume");
            }
            Err(error) => assert_eq!(error.kind(), Kind::Exhausted, "{error}"),
        }
    }

    /// Aborts a sequence at any point of its arrival. Its writer does not hear of it.
    fn abort(&mut self) {
        let Some(at) = self.pick(Is::Arriving) else { return };
        let own = self.own.swap_remove(at);
        let pages = reached(&self.cache, own.handle, (own.way, own.prompt));
        let stream = self.side();
        let withheld = self.cache.abort(own.handle, stream).unwrap();
        assert_eq!(self.cache.length(own.handle).unwrap_err().kind(), Kind::Closed);
        self.did(if own.way == Way::Direct { "abort direct" } else { "abort through the host" });
        // A transfer begins to write when the ticket says so.
        while own.ticket.poll().is_none() {
            self.settle();
            // A device that runs late goes on when it is asked.
            self.cache.reap(stream).unwrap();
            std::thread::yield_now();
        }
        self.late.push(Late { withheld, way: own.way, pages });
    }

    /// The writer of an aborted sequence writes to all its pages, and is done with them or not.
    fn write_late(&mut self) {
        if self.late.is_empty() {
            return;
        }
        let at = self.random.below(self.late.len() as u32) as usize;
        let late = &self.late[at];
        write_over(&self.kernels, &self.cache, late.way, &late.pages);
        self.did("late write");
        if self.random.one_in(2) {
            let late = self.late.swap_remove(at);
            let free = self.cache.release(late.withheld).unwrap();
            assert!(free as usize <= late.pages.len());
            assert_eq!(self.cache.release(late.withheld).unwrap_err().kind(), Kind::Closed);
        }
    }

    fn close(&mut self) {
        if self.own.is_empty() {
            return;
        }
        let at = self.random.below(self.own.len() as u32) as usize;
        let own = self.own.swap_remove(at);
        let stream = self.side();
        self.cache.close(own.handle, stream).unwrap();
        if own.is == Is::Arriving {
            self.did("close while arriving");
        }
    }

    fn end(&mut self) {
        let fresh =
            Cache::new(self.cache.config().clone(), TestDevice::host(HostOptions::default()).device());
        let unused = fresh.unwrap().stats();
        while !self.own.is_empty() {
            self.close();
        }
        while let Some(late) = self.late.pop() {
            self.cache.release(late.withheld).unwrap();
        }
        while self.cache.reap(self.main).unwrap() > 0 {
            self.settle();
            std::thread::yield_now();
        }
        self.check();
        let stats = self.cache.stats();
        assert_eq!((stats.sequences, stats.free_pages), (0, unused.free_pages));
        assert_eq!(stats.tiers.map(|tier| tier.parked), [0; 4]);
    }
}

/// Runs a world for each seed, in which each operation must do something more than `least` times in all.
fn run(seeds: std::ops::Range<u64>, least: Option<u32>, on: impl Fn(u64) -> On) {
    let mut done = [0; WHAT.len()];
    for seed in seeds {
        let mut world = Arrivals::new(seed, on(seed));
        (0..400).for_each(|_| world.operate());
        world.end();
        done.iter_mut().zip(world.done).for_each(|(sum, done)| *sum += done);
    }
    let rare: Vec<_> =
        WHAT.iter().zip(done).filter(|(_, done)| least.is_some_and(|least| *done <= least)).collect();
    assert!(rare.is_empty(), "hardly tried: {rare:?}");
}

#[test]
fn every_row_that_arrived_is_the_row_that_was_sent() {
    run(seeds(300), Some(20), |_| On::Inline);
}

#[test]
fn rows_arrive_on_threads_too() {
    // How much is done depends on the machine's load.
    run(seeds(60), None, |_| On::Threads);
}

#[test]
fn rows_arrive_on_a_clock_that_delays_and_reorders() {
    run(seeds(300), Some(20), On::Clock);
}
