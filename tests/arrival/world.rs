//! Random lives of arrivals against a naive model: which rows and keys each sequence has, how many pages are taken, and
//! what each call must answer.
//!
//! The model knows no states of the library. A sequence is a list of counts; taken pages are a sum over sequences and
//! withheld ones. Writers from afar write for requests that ended at any time until they are drained. Every row and key
//! of every sequence is then compared with its stamp.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::device::tried;
use crate::keys::Random;
use crate::rig::{KEYED, LAYERS, Own, PAGE, Rig, asks, config, key, row};
use forebay::check::watch::Watch;
use forebay::device::Stream;
use forebay::{Cache, Config, Kind, Layer, Result, Share, WarmUp, Withheld};

/// A receiver that does it wrong, as a control.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Receiver {
    Right,
    /// Closes what others still write to.
    Closes,
    /// Releases pages before their writers are done.
    Early,
}

/// What the model knows of a sequence.
#[derive(Debug)]
struct Model {
    own: Own,
    prompt: u32,
    tokens: u32,
    /// By layer, rows that are in place.
    rows: [u32; LAYERS as usize],
    keys: [u32; KEYED.len()],
    /// Its length, once it runs.
    joined: Option<u32>,
    /// Whether it has a lane.
    lane: bool,
    /// By layer, whether it is warmed up after an early join.
    warmed: [bool; LAYERS as usize],
}

impl Model {
    fn is_arriving(&self) -> bool {
        self.joined.is_none() && !self.lane
    }

    fn is_parked(&self) -> bool {
        self.joined.is_some() && !self.lane
    }

    fn runs(&self) -> bool {
        self.joined.is_some() && self.lane
    }

    fn is_whole(&self, layer: usize) -> bool {
        let keyed = KEYED.iter().position(|keyed| *keyed as usize == layer);
        self.rows[layer] == self.prompt && keyed.is_none_or(|number| self.keys[number] == self.prompt)
    }
}

/// A request that ended while its writer was not done.
#[derive(Debug)]
struct Ended {
    tag: u32,
    pages: Vec<(u32, u32)>,
    withheld: Option<Withheld>,
}

struct World {
    rig: Rig,
    random: Random,
    /// Whether calls come while work is in flight. Else all work ends before each call that takes something.
    hurries: bool,
    receiver: Receiver,
    config: Config,
    live: Vec<Model>,
    ended: Vec<Ended>,
    tags: u32,
    /// How often each kind of event was met.
    met: [u32; KINDS],
}

const KINDS: usize = 12;
const ARRIVED: usize = 0;
const NO_ROOM: usize = 1;
const JOINED: usize = 2;
const JOIN_REFUSED: usize = 3;
const STEPPED: usize = 4;
const ABORTED: usize = 5;
const LATE: usize = 6;
const RELEASED: usize = 7;
const JOINED_EARLY: usize = 8;
const WARMED: usize = 9;
const WARM_REFUSED: usize = 10;
const WAITED: usize = 11;

fn pages_of(tokens: u32) -> u32 {
    // Two query rows in each of two steps in flight.
    (tokens + 4).div_ceil(PAGE)
}

impl World {
    fn new(rig: Rig, seed: u64, receiver: Receiver) -> World {
        let config = rig.cache.config().clone();
        let random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 77);
        World {
            hurries: rig.watch.is_none() && seed % 4 < 2,
            rig,
            random,
            receiver,
            config,
            live: Vec::new(),
            ended: Vec::new(),
            tags: 0,
            met: [0; KINDS],
        }
    }

    fn taken(&self) -> u32 {
        let live: u32 = self.live.iter().map(|model| pages_of(model.tokens)).sum();
        let ended = self.ended.iter().filter(|ended| ended.withheld.is_some());
        live + ended.map(|ended| ended.pages.len() as u32).sum::<u32>()
    }

    /// Makes a call that takes what others may still hold. The world that hurries lets work end only if the call is
    /// refused for want of something, and then makes it again. A refusal changes no count.
    fn take<T>(&mut self, call: impl Fn(&mut Cache) -> Result<T>) -> Result<T> {
        if !self.hurries {
            self.settle();
        }
        let mut told = self.told(&call);
        if self.hurries && told.as_ref().is_err_and(|e| matches!(e.kind(), Kind::Exhausted | Kind::Busy)) {
            self.met[WAITED] += 1;
            self.settle();
            told = self.told(&call);
        }
        told
    }

    fn told<T>(&mut self, call: impl Fn(&mut Cache) -> Result<T>) -> Result<T> {
        let before = self.rig.cache.stats();
        let told = call(&mut self.rig.cache);
        if told.is_err() {
            assert_eq!(self.rig.cache.stats(), before);
        }
        told
    }

    /// Lets all work end and all that has ended be freed. On a watched device, on which work runs at once, the host
    /// learns of no end by this.
    fn settle(&mut self) {
        if self.rig.watch.is_some() {
            assert_eq!(self.rig.cache.reap(self.rig.main).unwrap(), 0);
            return;
        }
        self.end_work();
    }

    fn end_work(&mut self) {
        for _ in 0..3 {
            self.rig.sync();
            self.rig.cache.reap(self.rig.main).unwrap();
        }
    }

    fn pick(&mut self, fits: impl Fn(&Model) -> bool) -> Option<usize> {
        let fitting: Vec<usize> = (0..self.live.len()).filter(|at| fits(&self.live[*at])).collect();
        let at = self.random.below(fitting.len().max(1) as u32) as usize;
        fitting.get(at).copied()
    }

    fn arrive(&mut self) {
        let (prompt, promised) = (1 + self.random.below(90), self.random.below(20));
        let arriving = self.live.iter().filter(|model| model.is_arriving()).count() as u32;
        if self.rig.watch.is_some() {
            self.end_work();
        }
        let room = self.config.host_pages - self.taken();
        let expected = match () {
            () if arriving == self.config.arriving => Some("arriving sequences"),
            () => (pages_of(prompt + promised) > room).then_some("host pages"),
        };
        match (self.take(|cache| cache.arrive(&asks(prompt, promised))), expected) {
            (Ok(handle), None) => {
                self.tags += 1;
                let own = Own { handle, tag: self.tags % 250 + 1 };
                let (rows, keys) = ([0; LAYERS as usize], [0; KEYED.len()]);
                let tokens = prompt + promised;
                let warmed = [false; LAYERS as usize];
                let (joined, lane) = (None, false);
                self.live.push(Model { own, prompt, tokens, rows, keys, joined, lane, warmed });
                self.met[ARRIVED] += 1;
            }
            (Err(error), Some(place)) => {
                assert_eq!((error.kind(), error.place()), (Kind::Exhausted, place));
                self.met[NO_ROOM] += 1;
            }
            (result, expected) => panic!("{result:?}, not {expected:?}"),
        }
    }

    /// Some more rows of a layer: written from afar, or given to the cache.
    fn bring_rows(&mut self) {
        let Some(at) = self.pick(|model| model.joined.is_none()) else { return };
        let layer = self.random.below(LAYERS);
        let Model { own, prompt, rows, .. } = &self.live[at];
        let (own, first) = (*own, rows[layer as usize]);
        let end = *prompt;
        let count = if first == end { 0 } else { 1 + self.random.below(end - first) };
        let positions: Range<u32> = first..first + count;
        if self.random.below(2) == 0 {
            self.rig.write_rows(&own, layer, positions);
            self.rig.cache.append_layer_in_place(own.handle, Layer(layer), count).unwrap();
        } else {
            let rows: Vec<u8> = positions.flat_map(|position| row(own.tag, layer, position)).collect();
            self.rig.cache.append(own.handle, Layer(layer), &rows).unwrap();
        }
        self.live[at].rows[layer as usize] += count;
    }

    fn bring_keys(&mut self) {
        let Some(at) = self.pick(|model| model.joined.is_none()) else { return };
        let number = self.random.below(KEYED.len() as u32) as usize;
        let (own, placed, prompt) = (self.live[at].own, self.live[at].keys[number], self.live[at].prompt);
        let first = placed - self.random.below(placed.min(9) + 1);
        let count = if first == prompt { 0 } else { 1 + self.random.below(prompt - first) };
        let stream = self.stream();
        let _ticket = self.rig.place(&own, KEYED[number], first, count, stream).unwrap();
        self.live[at].keys[number] = placed.max(first + count);
    }

    /// Brings all that a sequence lacks.
    fn complete(&mut self, at: usize) {
        let Model { own, prompt, rows, keys, .. } = &self.live[at];
        let (own, prompt, rows, keys) = (*own, *prompt, *rows, *keys);
        for (layer, first) in (0..).zip(rows) {
            self.rig.write_rows(&own, layer, first..prompt);
            self.rig.cache.append_layer_in_place(own.handle, Layer(layer), prompt - first).unwrap();
        }
        for (layer, first) in KEYED.into_iter().zip(keys) {
            let _ticket = self.rig.place(&own, layer, first, prompt - first, self.rig.side).unwrap();
        }
        let model = &mut self.live[at];
        (model.rows, model.keys) = ([prompt; LAYERS as usize], [prompt; KEYED.len()]);
    }

    fn has_lane(&self) -> bool {
        self.live.iter().filter(|model| model.lane).count() < self.config.lanes as usize
    }

    fn join_early(&mut self) {
        let Some(at) = self.pick(Model::is_arriving) else { return };
        let (lane, stream, handle) = (self.has_lane(), self.stream(), self.live[at].own.handle);
        let joined = self.take(|cache| cache.join_early(handle, stream));
        assert_eq!(joined.is_ok(), lane, "{joined:?}");
        self.live[at].lane = lane;
        self.met[JOINED_EARLY] += u32::from(lane);
    }

    /// Warms up a layer, or is refused.
    fn warm(&mut self) {
        let Some(at) = self.pick(|model| model.joined.is_none() && model.lane) else { return };
        if self.random.below(3) == 0 {
            self.complete(at);
        }
        let (layer, stream) = (self.random.below(LAYERS), self.stream());
        let (model, number) = (&self.live[at], layer as usize);
        let selected = layer != 2 || model.warmed[1];
        let fits = model.is_whole(number) && selected && !model.warmed[number];
        let warmed = self.rig.cache.warm_layer(model.own.handle, Layer(layer), WarmUp::default(), stream);
        assert_eq!(warmed.as_ref().err().map(forebay::Error::kind), (!fits).then_some(Kind::InvalidState));
        self.met[if fits { WARMED } else { WARM_REFUSED }] += 1;
        let model = &mut self.live[at];
        model.warmed[number] |= fits;
        if model.warmed == [true; LAYERS as usize] {
            model.joined = Some(model.prompt);
        }
    }

    fn stream(&mut self) -> Stream {
        if self.random.below(2) == 0 { self.rig.main } else { self.rig.side }
    }

    fn join(&mut self) {
        let Some(at) = self.pick(Model::is_arriving) else { return };
        if self.random.below(3) > 0 {
            self.complete(at);
        }
        let model = &self.live[at];
        let whole = model.rows.iter().chain(&model.keys).all(|count| *count == model.prompt);
        let expected = match () {
            () if !whole => Some(Kind::InvalidState),
            () => (!self.has_lane()).then_some(Kind::Exhausted),
        };
        let (handle, stream) = (self.live[at].own.handle, self.stream());
        match (self.take(|cache| cache.join(handle, stream, WarmUp::default())), expected) {
            (Ok(_), None) => {
                (self.live[at].joined, self.live[at].lane) = (Some(self.live[at].prompt), true);
                self.met[JOINED] += 1;
            }
            (Err(error), Some(kind)) => {
                assert_eq!(error.kind(), kind, "{error}");
                self.met[JOIN_REFUSED] += 1;
            }
            (result, expected) => panic!("{result:?}, not {expected:?}"),
        }
    }

    fn step(&mut self) {
        let fits = |model: &Model| model.runs() && model.joined.is_some_and(|length| length < model.tokens);
        let Some(at) = self.pick(fits) else { return };
        let (own, length) = (self.live[at].own, self.live[at].joined.unwrap());
        // The row of the step before counts.
        let landed = self.rig.cache.length(own.handle).unwrap().landed;
        let committed = length - landed;
        let picks: Vec<u32> = [0, 5, 17, 40].map(|at| at % length).to_vec();
        self.rig.step(&own, committed, landed, &picks);
        self.live[at].joined = Some(length + 1);
        self.met[STEPPED] += 1;
    }

    fn park(&mut self) {
        let parked = self.live.iter().any(Model::is_parked);
        let Some(at) = self.pick(if parked { Model::is_parked } else { Model::runs }) else { return };
        let (handle, main) = (self.live[at].own.handle, self.rig.main);
        if parked {
            let lane = self.has_lane();
            let resumed = self.take(|cache| cache.resume(handle, main, 0));
            assert_eq!(resumed.is_ok(), lane, "{resumed:?}");
            self.live[at].lane = lane;
        } else {
            let landed = self.rig.cache.length(handle).unwrap().landed;
            self.take(|cache| cache.park(handle, landed, main)).unwrap();
            self.live[at].lane = false;
        }
    }

    /// Ends a sequence. One that has not joined may still be written to.
    fn end(&mut self) {
        let Some(at) = self.pick(|_| true) else { return };
        let model = self.live.swap_remove(at);
        let (own, pages) = (model.own, self.rig.pages(&model.own));
        let stream = self.stream();
        if model.joined.is_some() && self.random.below(2) == 0 {
            self.rig.cache.close(own.handle, stream).unwrap();
            return;
        }
        let withheld = match self.receiver {
            Receiver::Closes => self.rig.cache.close(own.handle, stream).map(|()| None).unwrap(),
            Receiver::Right | Receiver::Early => Some(self.rig.cache.abort(own.handle, stream).unwrap()),
        };
        self.met[ABORTED] += 1;
        self.ended.push(Ended { tag: own.tag, pages, withheld });
        if self.receiver == Receiver::Early {
            let withheld = self.ended.last_mut().and_then(|ended| ended.withheld.take()).unwrap();
            self.rig.cache.release(withheld).unwrap();
        }
    }

    /// A writer from afar writes a row and a key of a request that has ended.
    fn write_late(&mut self) {
        if self.ended.is_empty() {
            return;
        }
        let ended = &self.ended[self.random.below(self.ended.len() as u32) as usize];
        let number = self.random.below(ended.pages.len() as u32);
        let ((page, keys), token) = (ended.pages[number as usize], self.random.below(PAGE));
        let position = number * PAGE + token;
        let layer = self.random.below(LAYERS);
        self.rig.memory.write(self.rig.row_at(layer, page, token), &row(ended.tag, layer, position)).unwrap();
        let layer = KEYED[self.random.below(KEYED.len() as u32) as usize];
        self.rig.memory.write(self.rig.key_at(layer, keys, token), &key(ended.tag, layer, position)).unwrap();
        self.met[LATE] += 1;
    }

    /// A writer says that it is done.
    fn drain(&mut self) {
        if self.ended.is_empty() {
            return;
        }
        let at = self.random.below(self.ended.len() as u32) as usize;
        let ended = self.ended.swap_remove(at);
        if let Some(withheld) = ended.withheld {
            assert!(self.rig.cache.release(withheld).unwrap() <= ended.pages.len() as u32);
            assert_eq!(self.rig.cache.release(withheld).unwrap_err().kind(), Kind::Closed);
            self.met[RELEASED] += 1;
        }
    }

    /// Whether every sequence has its own rows and keys alone.
    fn is_whole(&mut self) -> bool {
        self.end_work();
        self.rig.cache.validate().unwrap();
        let stats = self.rig.cache.stats();
        assert_eq!(stats.free_host_pages, self.config.host_pages - self.taken());
        assert_eq!(stats.free_index_pages, stats.free_host_pages);
        let lanes = self.live.iter().filter(|model| model.lane).count() as u32;
        assert_eq!(stats.free_lanes, self.config.lanes - lanes);
        let arriving = self.live.iter().filter(|model| model.is_arriving()).count() as u32;
        assert_eq!((stats.arriving, stats.sequences), (arriving, self.live.len() as u32));
        self.live.iter().all(|model| {
            let least = model.rows.iter().chain(&model.keys).min().copied().unwrap();
            self.rig.is_whole(&model.own, model.joined.unwrap_or(least))
        })
    }

    /// Runs `operations`; whether every sequence was whole whenever it was looked at.
    fn run(&mut self, operations: u32) -> bool {
        for operation in 0..operations {
            match self.random.below(24) {
                0..3 => self.arrive(),
                3..6 => self.bring_rows(),
                6..9 => self.bring_keys(),
                9..12 => self.join(),
                12..14 => self.step_if_whole(),
                14 => self.park(),
                15 => self.end(),
                16..18 => self.write_late(),
                18..20 => self.drain(),
                20 => self.join_early(),
                _ => self.warm(),
            }
            let often = if self.rig.watch.is_some() || self.hurries { 50 } else { 7 };
            if operation % often == 0 && !self.is_whole() {
                return false;
            }
        }
        let whole = self.is_whole();
        while !self.live.is_empty() {
            self.end();
        }
        while !self.ended.is_empty() {
            self.drain();
        }
        whole
    }

    /// A step compares rows with its own stamps: a receiver that does it wrong is to be found by `is_whole`.
    fn step_if_whole(&mut self) {
        if self.receiver == Receiver::Right {
            self.step();
        }
    }
}

/// Runs a world on each device, and returns the seeds whose sequences were not whole.
fn broken(receiver: Receiver, seeds: Range<u64>, met: &mut [u32; KINDS]) -> usize {
    let mut broken = 0;
    for seed in seeds {
        let share = (seed % 2 == 1).then(Share::default);
        let config = Config { share, ..config() };
        let rig = match seed % 3 {
            0 => Rig::new(config),
            1 => Rig::threaded(config),
            _ => Rig::clock(config, seed),
        };
        let start = rig.cache.stats();
        let mut world = World::new(rig, seed, receiver);
        let whole = world.run(150);
        broken += usize::from(!whole);
        if whole {
            world.rig.check_free(&start);
        }
        met.iter_mut().zip(world.met).for_each(|(all, own)| *all += own);
    }
    broken
}

#[test]
fn random_arrivals_keep_their_rows_and_keys_and_leak_nothing() {
    let mut met = [0; KINDS];
    let soak = std::env::var("FOREBAY_SOAK").is_ok_and(|value| value == "1");
    let seeds = if soak { 5_000 } else { tried(90).into() };
    assert_eq!(broken(Receiver::Right, 0..seeds, &mut met), 0);
    assert!(met.iter().all(|met| *met > 5), "{met:?}");
}

#[test]
fn a_receiver_that_frees_pages_while_others_write_to_them_is_found() {
    for receiver in [Receiver::Closes, Receiver::Early] {
        assert!(broken(receiver, 0..30, &mut [0; KINDS]) > 3, "{receiver:?}");
    }
}

/// A world under the order checker, without one of its waits; whether it ended without a conflict.
fn is_ordered(seed: u64, without: Option<u64>) -> (bool, Arc<Watch>) {
    let rig = Rig::watched(config(), without);
    let watch = rig.watch.clone().unwrap();
    let mut world = World::new(rig, seed, Receiver::Right);
    let ended = catch_unwind(AssertUnwindSafe(|| world.run(150)));
    // An abort leaves what the device refuses to a later call.
    assert!(
        ended.is_ok() || watch.conflict().is_some(),
        "seed {seed}, wait {without:?}: only for a conflict"
    );
    (ended.is_ok_and(|whole| whole) && watch.conflict().is_none(), watch)
}

#[test]
fn every_operation_of_arrivals_is_ordered_and_waits_that_are_left_out_are_missed() {
    let (mut ordering, mut missed) = (0, Vec::new());
    for seed in 0..20 {
        let (ordered, watch) = is_ordered(seed, None);
        assert!(ordered, "seed {seed}: {:?}", watch.conflict());
        for wait in watch.ordering() {
            ordering += 1;
            missed.extend(
                is_ordered(seed, Some(wait)).1.conflict().map(|conflict| conflict.place().to_owned()),
            );
        }
    }
    assert!(5 * missed.len() > ordering, "{} of {ordering}: {missed:#?}", missed.len());
    // The indexer's reads of a step, the step itself, and a warm-up or a copy of keys behind another one.
    for begins in ["copy (stream 0) reads", "begin", "warm", "copy (stream 1) writes"] {
        assert!(missed.iter().any(|place| place.starts_with(begins)), "{begins}: {missed:#?}");
    }
}
