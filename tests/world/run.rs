//! The interpreter: it applies every operation to the cache and to the model, and the two must agree, about errors too:
//! the kind is the one that the model expects, and nothing has changed.

use super::check::Outcomes;
use super::config::{config, groups};
use super::engine::{Engine, key, stamp};
use super::model::{FOUND, Origin, PageModel, Seq, State, blocks, budgets, reach};
use super::ops::{Op, Random};
use super::prefix::Index;
use super::share::By;
use super::steps::Flight;
use forebay::device::host::HostOptions;
use forebay::device::{Outcome, Slice, Ticket};
use forebay::{BringUp, Budget, Cache, Config, Geometries, Geometry, Kind, Layer, Open, Sequence};
use forebay::{Stats, WarmUp};
use std::collections::BTreeMap;
use std::ops::Range;

/// The most steps of warm-up selections.
pub const WARM_STEPS: u32 = 3;

/// The device that runs a world's operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// The device that tests run on.
    Host,
    /// A clock device over a host device, which delays and orders by chance.
    Clock { seed: u64 },
    /// The CUDA device on the stand-in driver: in order, or by chance.
    #[cfg(feature = "cuda")]
    Cuda { seed: Option<u64> },
}

/// The setup of a world.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The row format, the share and the index groups: see `config`.
    pub variant: u8,
    pub options: HostOptions,
    /// The device that runs the operations.
    pub on: On,
    /// Whether the order of all enqueued work is checked.
    pub watched: bool,
    /// For controls: the wait that is left out of the schedule, by its number.
    pub without: Option<u64>,
}

impl On {
    /// Whether enqueued work runs later, by chance.
    pub fn is_by_chance(self) -> bool {
        match self {
            On::Host => false,
            On::Clock { .. } => true,
            #[cfg(feature = "cuda")]
            On::Cuda { seed } => seed.is_some(),
        }
    }
}

impl Setup {
    /// A world of `variant` whose operations run when they are enqueued.
    pub fn inline(variant: u8) -> Setup {
        Setup { variant, options: HostOptions::default(), on: On::Host, watched: false, without: None }
    }
}

/// See the module's head.
#[derive(Debug)]
pub struct World {
    pub config: Config,
    /// The layers of every index group, draft layers last.
    pub groups: Vec<Range<u32>>,
    geometries: Geometries,
    pub engine: Engine,
    pub cache: Cache,
    pub seqs: Vec<Seq>,
    pub pages: PageModel,
    pub index: Index,
    /// Bytes of rows that were declared to be in place.
    found: Vec<Vec<u8>>,
    pub open: Vec<Option<Flight>>,
    pub flights: Vec<Flight>,
    pub generation: u32,
    pub counted: Stats,
    /// The results that another device must reach as well.
    pub log: Vec<u64>,
    pub start: Stats,
    pub reached: BTreeMap<String, u64>,
    pub landing_base: Option<u32>,
    warm: Slice,
    /// Operations run later than they are enqueued.
    pub asynchronous: bool,
    /// The device is made to fail.
    pub faulty: bool,
    /// The device had failed before this operation.
    dead: bool,
    /// Whether host-issued work is waited for at once.
    pub patient: bool,
    /// Every ticket that the cache returned.
    pub tickets: Vec<Ticket>,
}

/// Runs `ops` in a world of their own, from nothing to everything closed.
pub fn run(ops: &[Op]) {
    run_in(Setup::inline(ops.len() as u8), ops);
}

/// As [`run`], in a world of this setup.
pub fn run_in(setup: Setup, ops: &[Op]) -> Outcomes {
    let mut world = World::new(setup);
    for op in ops {
        world.apply(op);
    }
    world.end()
}

impl World {
    pub fn new(setup: Setup) -> World {
        let config = config(setup.variant);
        let engine = Engine::new(&setup, &config);
        let groups = groups(setup.variant);
        let words = WARM_STEPS * groups.len() as u32 * config.shape.top_k;
        let warm = engine.device.allocate(4 * u64::from(words)).unwrap();
        let cache = Cache::new(config.clone(), engine.queue()).unwrap();
        setup.options.fail_operation.into_iter().for_each(|number| engine.device.fail_operation(number));
        World {
            groups,
            geometries: cache.geometries().clone(),
            start: cache.stats(),
            open: (0..config.micro_batches).map(|_| None).collect(),
            config,
            engine,
            cache,
            seqs: Vec::new(),
            pages: PageModel::default(),
            index: Index::default(),
            found: Vec::new(),
            flights: Vec::new(),
            generation: 0,
            counted: Stats::default(),
            reached: BTreeMap::new(),
            log: Vec::new(),
            landing_base: None,
            warm,
            asynchronous: setup.options.threaded || setup.on.is_by_chance(),
            faulty: setup.options.fail_operation.is_some(),
            dead: false,
            patient: true,
            tickets: Vec::new(),
        }
    }

    /// The row format of a layer.
    pub fn format(&self, layer: u32) -> &Geometry {
        self.geometries.of(layer as usize)
    }

    /// Tokens of a page.
    pub fn page_tokens(&self) -> u32 {
        self.config.shape.page_tokens
    }

    /// Whether the device was told to fail, and has failed.
    pub fn failed(&self) -> bool {
        let base = self.engine.base();
        self.faulty && base.query(self.engine.probe).is_err()
    }

    /// Does one operation and checks everything.
    pub fn apply(&mut self, op: &Op) {
        self.dead = self.failed();
        if self.dead && op.needs_lengths() {
            // Reports were lost, and with them the lengths of the sequences.
            return;
        }
        match *op {
            Op::Open { prompt, promised, budget, whole } => {
                self.open(prompt, promised, budget, whole);
            }
            Op::Start { prompt, promised, budget, whole } => {
                if let Some(seq) = self.open(prompt % 90, promised, budget, whole) {
                    self.fill(seq);
                    self.join(seq, 0, 0, 0);
                }
            }
            Op::Append { seq, layer, count } => self.append_op(seq, layer, count),
            Op::InPlace { seq, count } => self.in_place(seq, count),
            Op::Fill { seq } => {
                if let Some(seq) = self.pick(seq).filter(|s| self.seqs[*s].is_prompt()) {
                    self.fill(seq);
                }
            }
            Op::Join { seq, warm, bound, seed } => {
                if let Some(seq) = self.pick(seq) {
                    self.join(seq, u32::from(warm) % (WARM_STEPS + 1), u32::from(bound), seed);
                }
            }
            Op::JoinMore { seq } => self.join_more_op(seq),
            Op::Begin { micro, rows, width, seed } => self.begin(micro, rows, width, seed),
            Op::Layers { micro, count } => {
                for _ in 0..count % 5 {
                    self.layer(micro);
                }
            }
            Op::Finish { micro } => self.finish(micro),
            Op::Step { micro, rows, width, seed } => {
                self.finish(micro);
                self.begin(micro, rows, width, seed);
                self.finish(micro);
                self.retire_soon(seed);
            }
            Op::Retire { which } => self.retire(which),
            Op::RetireOpen { micro } => self.retire_open(micro),
            Op::Truncate { seq, how, by } => self.truncation_op(seq, how, by),
            Op::Fork { seq, promised, budget, whole } => self.fork(seq, promised, budget, whole),
            Op::StartShared { prompt, promised, budget, script } => {
                self.start_shared(prompt, promised, budget, script);
            }
            Op::Publish { seq, by } => self.publish(seq, by),
            Op::Resize { seq, budget, stream } => self.resize_op(seq, budget, stream),
            Op::Share { stream } => self.share_op(stream),
            Op::Extend { seq, prompt, promised } => self.extend(seq, prompt, promised),
            Op::Park { seq, accepted, stream } => self.park(seq, accepted, stream),
            Op::Resume { seq, bound, stream } => self.resume(seq, bound, stream),
            Op::Close { seq } => self.close_op(seq),
            Op::Reap => {
                (0..self.seqs.len()).for_each(|seq| self.release_held(seq));
                assert_eq!(self.cache.reap(self.engine.host).unwrap(), self.closing());
            }
        }
        if !self.dead && matches!(op, Op::Finish { .. } | Op::Step { .. } | Op::Retire { .. }) {
            self.join_late();
        }
        self.check();
    }

    fn closing(&self) -> u32 {
        self.seqs.iter().filter(|s| s.state == State::Closing).count() as u32
    }

    /// The open sequence that a wish selects.
    pub fn pick(&self, wish: u8) -> Option<usize> {
        let open: Vec<usize> = (0..self.seqs.len()).filter(|s| self.seqs[*s].is_open()).collect();
        open.get(usize::from(wish).checked_rem(open.len())?).copied()
    }

    /// A handle that names no sequence any more, or never did.
    pub fn dead_handle(&self, wish: u8) -> Sequence {
        let closed: Vec<_> = self.seqs.iter().filter(|s| !s.is_open()).map(|s| s.handle).collect();
        let forged = Sequence::from_bits(u64::from(wish) << 40 | 1);
        closed.get(usize::from(wish) % closed.len().max(1)).copied().unwrap_or(forged)
    }

    /// The bytes of a row.
    pub fn row(&self, layer: u32, position: u32, origin: Origin) -> Vec<u8> {
        match origin.owner {
            FOUND => self.found[origin.generation as usize].clone(),
            _ => stamp(self.format(layer), layer, position, origin),
        }
    }

    /// The place of an index key, from the pages that the cache named.
    pub fn key_offset(&self, key_pages: &[u32], position: u32) -> u64 {
        let tokens = self.page_tokens();
        let page = key_pages[(position / tokens) as usize];
        u64::from(page * tokens + position % tokens) * u64::from(self.config.shape.index_key_bytes)
    }

    /// Writes the index key of a prompt row, in a layer that has index keys.
    fn write_key(&self, seq: usize, layer: u32, position: u32, origin: Origin) {
        if self.selects(layer) {
            let offset = self.key_offset(&self.seqs[seq].key_pages, position);
            let key = key(self.format(layer), layer, position, origin);
            self.engine.write_key(&self.cache, Layer(layer), offset, &key);
        }
    }

    // ---- opening -------------------------------------------------------------------------------------

    pub fn budget(&self, wish: u8) -> Budget {
        match wish % 12 {
            0 => Budget::Slots(4),
            1 => Budget::Slots(9),
            2 | 3 => Budget::Slots(20),
            4 => Budget::Slots(40),
            5 | 6 => Budget::Slots(100),
            7 => Budget::Ratio(0.3),
            8 => self.by_layer([6, 64, 30], wish > 150),
            9 => Budget::Ratio(1.0),
            10 if wish > 200 => Budget::Ratio(7.0),
            11 if wish > 200 => Budget::Slots(3),
            _ => Budget::Slots(65),
        }
    }

    /// The reason why an opening, which `joins` or not, must be refused, else its budgets and pages; `shared` pages are
    /// not taken.
    pub fn admit(&mut self, open: &Open, shared: u32, joins: bool) -> Result<(Vec<u32>, u32), Kind> {
        let admitted = open.prompt + open.promised;
        if admitted == 0 || admitted > self.config.max_tokens {
            return Err(Kind::OutOfRange);
        }
        let taken = self.seqs.iter().filter(|s| s.state != State::Gone).count() as u32;
        if taken == self.config.lanes + self.config.parked {
            return Err(Kind::Exhausted);
        }
        let table = budgets(&self.config, &open.budget, admitted, &self.groups).ok_or(Kind::InvalidConfig)?;
        if self.free_lanes() == 0
            || blocks(&table).iter().zip(self.room_to_promise()).any(|(wanted, free)| *wanted > free)
        {
            return Err(Kind::Exhausted);
        }
        let pages = reach(&self.config, admitted).div_ceil(self.page_tokens()) - shared;
        match (self.has_room(pages), joins && self.join_is_busy(&table)) {
            (false, _) => Err(Kind::Exhausted),
            (true, true) => Err(Kind::Busy),
            (true, false) => Ok((table, pages)).inspect(|_| assert!(self.room(pages))),
        }
    }

    fn open(&mut self, prompt: u8, promised: u8, budget: u8, whole: bool) -> Option<usize> {
        let bring_up = if whole { BringUp::Whole } else { BringUp::Nothing };
        // Sometimes more than the capacity of the cache.
        let prompt = u32::from(prompt) % if promised > 250 { 255 } else { 110 };
        let promised = u32::from(promised) % 60;
        let open = Open { prompt, promised, budget: self.wished(budget), bring_up };
        let admitted = self.admit(&open, 0, false);
        let before = self.snapshot();
        let result = self.cache.open(&open);
        let handle = self.expect(before, result, admitted.as_ref().err().copied())?;
        let (table, pages) = admitted.unwrap();
        let pages = self.pages.take(pages);
        Some(self.enter(handle, &open, table, pages))
    }

    /// Adds a sequence to the model.
    pub fn enter(&mut self, handle: Sequence, open: &Open, least: Vec<u32>, pages: Vec<usize>) -> usize {
        let budgets = if self.config.share.is_some() { vec![0; least.len()] } else { least.clone() };
        self.seqs.push(Seq {
            handle,
            state: State::Filling,
            prompt: open.prompt,
            admitted: open.prompt + open.promised,
            whole: open.bring_up == BringUp::Whole,
            asked: open.budget.clone(),
            blocks: blocks(&budgets),
            budgets,
            least,
            busy: false,
            resizing: None,
            rows: vec![Vec::new(); self.layers() as usize],
            landed: Vec::new(),
            oracles: Vec::new(),
            micro: None,
            in_flight: 0,
            tainted: false,
            lost: false,
            pages,
            held: None,
            lane: 0,
            landing: Vec::new(),
            key_pages: Vec::new(),
            unvisited: 0,
            rows_a_call: 0,
            script: None,
            names: Vec::new(),
            stored: 0,
            noted: None,
        });
        self.learn_lane(self.seqs.len() - 1);
        self.learn_pages(self.seqs.len() - 1);
        self.seqs.len() - 1
    }

    pub fn learn_pages(&mut self, seq: usize) {
        let pages = self.cache.pages(self.seqs[seq].handle).unwrap().map(|(_, keys)| keys.0);
        self.seqs[seq].key_pages = pages.collect();
        assert_eq!(self.seqs[seq].key_pages.len(), self.seqs[seq].pages.len());
    }

    /// Appends `count` stamped rows and their index keys in one layer.
    fn append(&mut self, seq: usize, layer: u32, count: u32, expected: Option<Kind>) {
        let s = &self.seqs[seq];
        let (handle, first) = (s.handle, s.rows.get(layer as usize).map_or(0, Vec::len) as u32);
        // A row that replaces a truncated one differs from it.
        self.generation += 1;
        let origin = Origin { owner: handle.to_bits(), generation: self.generation };
        let rows: Vec<u8> = (first..first + count).flat_map(|p| self.row(layer, p, origin)).collect();
        let before = self.snapshot();
        let result = self.cache.append(handle, Layer(layer), &rows);
        if self.expect(before, result, expected).is_some() {
            for position in first..first + count {
                self.write_key(seq, layer, position, origin);
                self.seqs[seq].rows[layer as usize].push(origin);
            }
        }
    }

    fn append_op(&mut self, wish: u8, layer: u8, count: u8) {
        let Some(seq) = self.pick(wish) else { return };
        // One of the layers does not exist.
        let (layer, s) = (u32::from(layer) % (self.layers() + 1), &self.seqs[seq]);
        let left = s.rows.get(layer as usize).map(|rows| s.prompt.saturating_sub(rows.len() as u32));
        let count = if count > 240 { 200 } else { u32::from(count) % (left.unwrap_or(0) + 1) };
        let expected = match (left, count) {
            (None, _) => Some(Kind::OutOfRange),
            _ if !s.is_prompt() => Some(Kind::InvalidState),
            (Some(left), _) if count > left => Some(Kind::OutOfRange),
            _ => None,
        };
        self.append(seq, layer, count, expected);
    }

    pub fn fill(&mut self, seq: usize) {
        for layer in 0..self.layers() {
            let left = self.seqs[seq].prompt - self.seqs[seq].rows[layer as usize].len() as u32;
            self.append(seq, layer, left.min(17), None);
            self.append(seq, layer, left - left.min(17), None);
        }
    }

    fn in_place(&mut self, wish: u8, count: u8) {
        let Some(seq) = self.pick(wish) else { return };
        let s = &self.seqs[seq];
        let least = s.rows.iter().map(|rows| s.prompt.saturating_sub(rows.len() as u32)).min().unwrap();
        let count = u32::from(count) % (least + 3);
        let expected = match s.state {
            State::Filling | State::Parked => (count > least).then_some(Kind::OutOfRange),
            _ => Some(Kind::InvalidState),
        };
        let before = self.snapshot();
        let result = self.cache.append_in_place(s.handle, count);
        if self.expect(before, result, expected).is_none() {
            return;
        }
        for layer in 0..self.layers() {
            for _ in 0..count {
                let s = &self.seqs[seq];
                let position = s.rows[layer as usize].len() as u32;
                let mut row = vec![0; self.format(layer).row_bytes() as usize];
                self.cache.read_row(s.handle, Layer(layer), position, &mut row).unwrap();
                let origin = Origin { owner: FOUND, generation: self.found.len() as u32 };
                self.write_key(seq, layer, position, origin);
                self.found.push(row);
                self.seqs[seq].rows[layer as usize].push(origin);
            }
        }
    }

    // ---- joining -------------------------------------------------------------------------------------

    pub fn join(&mut self, seq: usize, warm: u32, bound: u32, seed: u16) {
        let (s, k) = (&self.seqs[seq], self.config.shape.top_k);
        let complete = s.rows.iter().all(|rows| rows.len() as u32 == s.prompt);
        let expected = match s.state == State::Filling && complete {
            false => Some(Kind::InvalidState),
            true => self.join_is_busy(&s.least).then_some(Kind::Busy),
        };
        let mut random = Random::new(seed.into());
        // A hint may be wrong: positions at and beyond the length warm nothing.
        let limit = s.prompt + u32::from(random.one_in(3)) * 5;
        let position = |_| if random.one_in(6) { -1 } else { random.below(limit.max(1)) as i32 };
        let positions: Vec<i32> = (0..warm * self.groups.len() as u32 * k).map(position).collect();
        let selections = self.warm.part(0, 4 * positions.len() as u64).unwrap();
        let bytes: Vec<u8> = positions.iter().flat_map(|p| p.to_le_bytes()).collect();
        self.engine.device.write(selections, &bytes).unwrap();
        let warm_up = WarmUp {
            selections: (warm > 0).then_some(selections),
            steps: warm,
            bytes_a_call: u64::from(bound) * self.largest_row(),
        };
        let (handle, before) = (s.handle, self.snapshot());
        let host = self.engine.host;
        let result = self.claim(|cache| cache.join(handle, host, warm_up));
        self.learn_budgets(By::Join(Some(seq)), host);
        self.seqs[seq].busy = expected == Some(Kind::Busy);
        let Some(ticket) = self.expect(before, result, expected) else { return };
        let steps = |group: usize| {
            let all = positions.chunks_exact(k as usize).skip(group * warm as usize).take(warm as usize);
            all.map(|step| step.iter().filter_map(|p| u32::try_from(*p).ok()).collect()).collect()
        };
        let steps = (0..self.groups.len()).map(steps).collect();
        self.joined(seq, (warm > 0).then_some(steps), bound, &ticket);
    }

    /// The model's side of a join. The warm-up has steps of selections by group.
    pub fn joined(&mut self, seq: usize, warm: Option<Vec<Vec<Vec<u32>>>>, bound: u32, ticket: &Ticket) {
        let s = &mut self.seqs[seq];
        s.enter();
        for (oracle, steps) in s.oracles.iter_mut().zip(warm.iter().flatten()) {
            steps.iter().for_each(|step| drop(oracle.select(step.iter().copied())));
        }
        s.state = State::Joining;
        s.stored = s.prompt;
        let idle = !s.whole && warm.is_none();
        let slots =
            s.budgets.iter().zip(&self.groups).map(|(budget, group)| u64::from(*budget) * group.len() as u64);
        s.unvisited = if idle { 0 } else { slots.sum() };
        s.rows_a_call = if bound == 0 { u64::MAX } else { bound.into() };
        self.visit(seq, ticket);
    }

    /// A stretch of a warm-up has been enqueued.
    fn visit(&mut self, seq: usize, ticket: &Ticket) {
        self.ended(ticket);
        let s = &mut self.seqs[seq];
        s.unvisited = s.unvisited.saturating_sub(s.rows_a_call);
        if s.unvisited == 0 {
            s.state = State::Running;
            let warm = s.oracles.iter().any(|oracle| !oracle.order.is_empty());
            self.note(if warm { "warm start" } else { "cold start" });
        }
    }

    fn join_more_op(&mut self, wish: u8) {
        let Some(seq) = self.pick(wish) else { return };
        loop {
            let expected = (self.seqs[seq].state != State::Joining).then_some(Kind::InvalidState);
            let before = self.snapshot();
            let result = self.cache.join_more(self.seqs[seq].handle, self.engine.host);
            let Some(ticket) = self.expect(before, result, expected) else { return };
            self.visit(seq, &ticket);
            self.note("join more");
        }
    }

    /// Waits for a ticket. It must end, and end well unless the device has failed. On a device that had failed before,
    /// no ticket ends well.
    fn ended(&mut self, ticket: &Ticket) {
        self.tickets.push(ticket.clone());
        if !self.patient {
            return;
        }
        self.engine.settle();
        match ticket.poll() {
            Some(Outcome::Done) => assert!(!self.dead, "done on a device that had failed"),
            Some(Outcome::Failed(kind)) => {
                assert_eq!((kind, self.failed()), (Kind::DeviceFailed, true));
                self.note("ticket fails");
            }
            other => panic!("a ticket ended as {other:?}"),
        }
    }

    // ---- cutting, forking, closing -------------------------------------------------------------------

    /// A held page is freed: by the step that follows, or by an earlier call that takes it back.
    pub fn release_held(&mut self, seq: usize) {
        if let Some(page) = self.seqs[seq].held.take() {
            self.pages.release(page);
        }
    }

    fn truncation_op(&mut self, wish: u8, how: u8, by: u8) {
        let Some(seq) = self.pick(wish) else { return };
        let (s, by) = (&self.seqs[seq], u32::from(by));
        let (handle, length) = (s.handle, if s.is_prompt() { s.prompt } else { s.length() });
        let landed = if s.state == State::Failed { 0 } else { s.landed.len() as u32 };
        let to = match how % 5 {
            0 => length,
            1 => length + by % (landed + 1),
            2 => length.saturating_sub(by % 4),
            3 => length.saturating_sub(by % (length + 1)),
            _ if by > 200 => length + landed + 1,
            _ => length.saturating_sub(by % 40),
        };
        if s.is_prompt() {
            return self.truncate_prompt(seq, to);
        }
        let page = self.page_tokens();
        let first = (to / page) as usize;
        self.release_held(seq);
        self.settle_resize(seq);
        let shared = self.shared_pages(seq, first);
        let (state, in_flight) = (self.seqs[seq].state, self.seqs[seq].in_flight);
        let expected = match state {
            State::Joining => Some(Kind::InvalidState),
            _ if in_flight > 0 => Some(Kind::Busy),
            _ if to > length + landed => Some(Kind::OutOfRange),
            _ if !self.room(shared.len() as u32) => Some(Kind::Exhausted),
            _ => None,
        };
        let before = self.snapshot();
        let result = self.cache.truncate(handle, to, self.engine.host);
        let Some(ticket) = self.expect(before, result, expected) else { return };
        self.ended(&ticket);
        self.remove_block_hashes(seq, first, &shared);
        let fresh = self.pages.take(shared.len() as u32);
        for (place, fresh) in shared.into_iter().zip(fresh) {
            let old = std::mem::replace(&mut self.seqs[seq].pages[place], fresh);
            self.note("truncate into a shared page");
            match place == first && !to.is_multiple_of(page) {
                true => self.seqs[seq].held = Some(old),
                false => self.pages.release(old),
            }
        }
        self.note(if to < length { "truncate deep" } else { "truncate drafts" });
        let s = &mut self.seqs[seq];
        s.commit(to.saturating_sub(length), Vec::new());
        s.rows.iter_mut().for_each(|rows| rows.truncate(to as usize));
        let lost = std::mem::take(&mut s.lost);
        s.oracles.iter_mut().filter(|_| lost).for_each(|oracle| oracle.order.clear());
        s.oracles.iter_mut().for_each(|oracle| oracle.truncate(to));
        s.state = State::Running;
        s.tainted = false;
        s.stored = to;
        self.learn_pages(seq);
    }

    fn fork(&mut self, wish: u8, promised: u8, budget: u8, whole: bool) {
        let Some(parent) = self.pick(wish) else { return };
        let bring_up = if whole { BringUp::Whole } else { BringUp::Nothing };
        self.settle_resize(parent);
        let p = self.seqs[parent].clone();
        let (prompt, page) = (p.length(), self.page_tokens());
        let open = Open { prompt, promised: u32::from(promised) % 60, budget: self.wished(budget), bring_up };
        let full = prompt / page;
        let admitted = match p.state {
            State::Running if p.in_flight > 0 => Err(Kind::Busy),
            State::Running if p.landed.is_empty() => self.admit(&open, full, true),
            _ => Err(Kind::InvalidState),
        };
        let (handle, before) = (p.handle, self.snapshot());
        // The prompt is the parent's, whatever the request says.
        let asked = Open { prompt: 7, ..open.clone() };
        let host = self.engine.host;
        let result = self.claim(|cache| cache.fork(handle, &asked, host));
        let refused = admitted.as_ref().err().copied();
        let Some((child, ticket)) = self.expect(before, result, refused) else {
            self.learn_budgets(By::Join(None), host);
            return;
        };
        self.ended(&ticket);
        self.note(if prompt.is_multiple_of(page) { "fork of full pages" } else { "fork in a page" });
        let (table, count) = admitted.unwrap();
        let mut pages = self.seqs[parent].pages[..full as usize].to_vec();
        pages.iter().for_each(|page| self.pages.share(*page));
        pages.extend(self.pages.take(count));
        let held = (!prompt.is_multiple_of(page)).then(|| self.seqs[parent].pages[full as usize]);
        held.into_iter().for_each(|page| self.pages.share(page));
        let child = self.enter(child, &open, table, pages);
        self.learn_budgets(By::Join(Some(child)), host);
        let rows = self.seqs[parent].rows.clone();
        let c = &mut self.seqs[child];
        (c.rows, c.held, c.state, c.stored) = (rows, held, State::Running, prompt);
        c.enter();
        self.share_names(parent, child, full);
    }

    fn close_op(&mut self, wish: u8) {
        match self.pick(wish) {
            Some(seq) => self.close(seq),
            None => {
                let (dead, before) = (self.dead_handle(wish), self.snapshot());
                let result = self.cache.close(dead, self.engine.host);
                self.expect(before, result, Some(Kind::Closed));
            }
        }
    }

    pub fn close(&mut self, seq: usize) {
        let handle = self.seqs[seq].handle;
        if self.config.share.is_none() {
            self.settle_resize(seq);
        }
        self.cache.close(handle, self.engine.host).unwrap();
        let host = self.engine.host;
        assert_eq!(self.cache.close(handle, host).unwrap_err().kind(), Kind::Closed);
        assert_eq!(self.cache.length(handle).unwrap_err().kind(), Kind::Closed);
        self.note(if self.seqs[seq].in_flight > 0 { "close in flight" } else { "close idle" });
        let waits = self.seqs[seq].is_prompt();
        self.seqs[seq].state = State::Closing;
        self.leave(seq);
        if waits || self.seqs[seq].resizing.is_some() {
            // Its pages are freed when the engine's prefill has passed, its lane when a resize has.
            self.settle_resize(seq);
            self.engine.settle();
            (0..self.seqs.len()).for_each(|seq| self.release_held(seq));
            assert_eq!(self.cache.reap(host).unwrap(), self.closing());
        }
    }

    /// The resources of a closed sequence are freed once no operation names them.
    pub fn leave(&mut self, seq: usize) {
        if self.seqs[seq].state == State::Closing && self.seqs[seq].in_flight == 0 {
            self.seqs[seq].state = State::Gone;
            self.release_held(seq);
            self.drop_names(seq);
            for page in std::mem::take(&mut self.seqs[seq].pages) {
                self.pages.release(page);
            }
        }
    }
}
