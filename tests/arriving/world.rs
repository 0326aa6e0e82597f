//! The world of one seed: prefill ranks, decode ranks with their caches, connections, requests, and time.

use std::rc::Rc;
use std::time::Duration;

use forebay::transfer::{Chunk, Fence, Rank, Receiver, Run, Sender, Side, receiver, sender};
use forebay::{BringUp, Sequence};

use crate::decode::{Decode, Twin, host_stride};
use crate::model::{Model, Tag};
use crate::net::{Draw, Faults, Future};
use crate::oracle::Oracle;
use crate::prefill::Prefill;

/// How rows cross.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The receiver reads the sender's memory.
    Shared,
    /// The sender writes to landing pages beside the cache.
    Landing,
    /// The sender writes to the cache's own pages: the engine has registered them.
    Pages,
}

/// What an engine does wrong, as a control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    Nothing,
    /// It opens sequences, declares rows when all are there, and closes, as without arrivals.
    Closes,
    /// It releases the pages of an abort at once.
    ReleasesEarly,
    /// It declares index keys that it has not placed.
    DeclaresKeys,
    /// It declares a layer before the receiver says that the layer is ready.
    DeclaresRows,
    /// It warms a request up by the ages of another one.
    TakesOtherAges,
    /// It runs a request whose pages writers may still reach.
    RunsReached,
}

#[derive(Clone, Copy, Debug)]
pub struct Link {
    pub prefill: usize,
    pub decode: usize,
    /// Whether each end takes it to be alive.
    pub up: [bool; 2],
}

/// A conversation: prompts one after the other.
pub struct Talk {
    /// The prompt that it shares with others: whose rows, and how many tokens.
    pub family: Option<(Tag, u32)>,
    /// Its slots in each layer, and what it brings up.
    pub budget: u32,
    pub bring_up: BringUp,
    /// New tokens of each turn.
    pub turns: Vec<u32>,
    pub turn: usize,
    /// Whose row each token has that it keeps between turns.
    pub tags: Vec<Tag>,
    /// By decode rank the parked sequence; empty if it has none.
    pub handles: Vec<Sequence>,
    /// By index group the residency by the naive rule.
    pub oracles: Vec<Oracle>,
    pub over: bool,
}

/// One try at a turn.
pub struct Attempt {
    pub request: u64,
    pub talk: usize,
    pub open: forebay::Open,
    /// The tokens that parked sequences have.
    pub base: u32,
    pub tags: Rc<Vec<Tag>>,
    /// By group the selections of the last prompt positions, `[steps][k]`.
    pub steps: u32,
    pub selections: Vec<Vec<i32>>,
    /// The chunks of the prompt, and where each ends.
    pub chunks: Vec<Chunk>,
    pub ends: Vec<u32>,
    /// Chunk and layer in the order of computing, and the next of them.
    pub order: Vec<(usize, u32)>,
    pub next: usize,
    pub began: Duration,
    /// By decode rank.
    pub fences: Vec<Option<Fence>>,
    pub running: bool,
    /// Steps that it decodes, and whose row each token has that they read or write.
    pub decodes: u32,
    pub read: Vec<Tag>,
    pub given_up: bool,
    pub over: bool,
}

#[derive(Clone, Debug)]
pub enum Happens {
    ToDecode(u32, Vec<u8>),
    ToPrefill(u32, Vec<u8>),
    /// A run of a write lands.
    Lands {
        link: u32,
        write: u64,
        fence: Fence,
        page: u32,
        origin: u64,
        run: Run,
        last: bool,
    },
    Connect(usize, usize),
    /// One end learns that a connection is gone: 0 the prefill rank's, 1 the decode rank's.
    Lost(u32, usize),
    /// What its other end could write through no longer exists.
    Destroyed(u32),
    Begin(usize),
    Compute(usize),
    Abort(usize),
    Grant(usize, usize),
    Declare(usize, Fence, u32),
    Place(usize, Fence, u32),
    JoinEarly(usize, Fence),
    Warm(usize, Fence, u32),
    Join(usize, Fence),
    Step(usize),
    Finish(usize),
    Look,
}

/// How often something was met, so that tests know it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Met {
    pub whole: u32,
    /// Tries that were given up, and those of them that waited for room for too long.
    pub failed: u32,
    pub waited: u32,
    pub resent: u32,
    pub cut: u32,
    pub late_writes: u32,
    pub withheld: u32,
    pub no_room: u32,
    /// Joins that were refused because a request was not complete, and those of them that lacked keys alone.
    pub joins_refused: u32,
    pub without_keys: u32,
    pub early: u32,
    pub warmed_before_whole: u32,
    pub early_digests: u32,
    pub shared: u32,
    pub later_turns: u32,
    pub shortened: u32,
    pub by_ages: u32,
    pub by_selections: u32,
    pub steps: u32,
}

impl Met {
    /// The sums of all counts.
    pub fn sum(all: &[Met]) -> Met {
        let mut sum = Met::default();
        for met in all {
            sum.whole += met.whole;
            sum.failed += met.failed;
            sum.waited += met.waited;
            sum.resent += met.resent;
            sum.cut += met.cut;
            sum.late_writes += met.late_writes;
            sum.withheld += met.withheld;
            sum.no_room += met.no_room;
            sum.joins_refused += met.joins_refused;
            sum.without_keys += met.without_keys;
            sum.early += met.early;
            sum.warmed_before_whole += met.warmed_before_whole;
            sum.early_digests += met.early_digests;
            sum.shared += met.shared;
            sum.later_turns += met.later_turns;
            sum.shortened += met.shortened;
            sum.by_ages += met.by_ages;
            sum.by_selections += met.by_selections;
            sum.steps += met.steps;
        }
        sum
    }
}

pub struct World {
    pub draw: Draw,
    pub way: Way,
    pub wrong: Wrong,
    pub faults: Faults,
    pub model: Rc<Model>,
    pub sides: [Side; 2],
    pub prefills: Vec<Prefill>,
    pub decodes: Vec<Decode>,
    pub links: Vec<Link>,
    pub talks: Vec<Talk>,
    pub attempts: Vec<Attempt>,
    pub future: Future<Happens>,
    pub now: Duration,
    pub broken: Option<String>,
    pub twin: Twin,
    pub met: Met,
}

/// Faults end here.
pub const CALM: Duration = Duration::from_millis(1500);
/// By now all is over.
const END: Duration = Duration::from_secs(60);

const SENDING: sender::Options = sender::Options {
    bulk_tokens: 8,
    bytes_per_second: 0,
    notice_bytes: 1 << 12,
    digests: true,
    repeats: 4,
    resend: Duration::from_millis(50),
    patience: Duration::from_secs(2),
    requests: 16,
};

const RECEIVING: receiver::Options = receiver::Options {
    window: 8,
    requests: 16,
    landing: 64,
    digests: true,
    resend: Duration::from_millis(60),
    patience: Duration::from_secs(2),
};

fn ranks(width: u32) -> impl Iterator<Item = Rank> {
    (0..width).map(|lane| Rank { instance: 0, replica: 0, stage: 0, lane })
}

impl World {
    pub fn new(seed: u64, (way, wrong, faults): (Way, Wrong, Faults)) -> World {
        let mut draw = Draw::new(seed);
        let model = Rc::new(Model::new(&mut draw));
        let target = model.target(draw.of(1, 2), host_stride(&model));
        let source = model.source(&mut draw);
        let prefill = |rank| Prefill {
            rank,
            machine: Sender::new(source.clone(), rank, SENDING).unwrap(),
            origins: Vec::new(),
        };
        let decode = |rank| {
            let machine = Receiver::new(target.clone(), rank, RECEIVING).unwrap();
            Decode::new(&model, (rank, machine), &target.stages[0].page_bytes, seed)
        };
        let mut world = World {
            way,
            wrong,
            faults,
            prefills: ranks(source.width).map(prefill).collect(),
            decodes: ranks(target.width).map(decode).collect(),
            twin: Twin::new(&model),
            sides: [source.clone(), target.clone()],
            model: Rc::clone(&model),
            draw,
            links: Vec::new(),
            talks: Vec::new(),
            attempts: Vec::new(),
            future: Future::new(),
            now: Duration::ZERO,
            broken: None,
            met: Met::default(),
        };
        for prefill in 0..world.prefills.len() {
            for decode in 0..world.decodes.len() {
                let time = world.draw.millis(30);
                world.future.at(time, Happens::Connect(prefill, decode));
            }
        }
        for _ in 0..world.draw.of(3, 5) {
            world.talk();
        }
        world
    }

    fn talk(&mut self) {
        let family = self.draw.often(600).then(|| {
            let name = self.draw.below(2);
            (1 << 40 | Tag::from(name), [34, 50][name as usize])
        });
        let least = family.map_or(1, |(_, tokens)| tokens - 10);
        let mut turns = vec![self.draw.of(least, 64)];
        (0..self.draw.below(3)).for_each(|_| turns.push(self.draw.of(1, 24)));
        let talk = Talk {
            family,
            budget: self.draw.one(&[4, 6, 12, 20, 64]),
            bring_up: self.draw.one(&[BringUp::Whole, BringUp::Nothing]),
            turns,
            turn: 0,
            tags: Vec::new(),
            handles: Vec::new(),
            oracles: Vec::new(),
            over: false,
        };
        self.talks.push(talk);
        self.attempt(self.talks.len() - 1);
    }

    /// Whether something goes wrong now.
    pub fn fault(&mut self, of: u32) -> bool {
        self.now < CALM && self.draw.often(of)
    }

    pub fn after(&mut self, millis: u32, happens: Happens) {
        let time = self.now + self.draw.millis(millis);
        self.future.at(time, happens);
    }

    pub fn breaks(&mut self, what: String) {
        self.broken.get_or_insert(what);
    }

    /// Runs the world to its end. Returns what went wrong.
    pub fn run(&mut self) -> Result<(), String> {
        let mut count = 0;
        while !self.is_over() {
            match (self.future.first(), self.due()) {
                (Some(first), due) if due.is_none_or(|due| first <= due) => {
                    let (time, happens) = self.future.take().unwrap();
                    self.now = self.now.max(time);
                    self.happens(happens);
                }
                (_, Some(due)) => self.now = self.now.max(due),
                (_, None) => return Err(format!("nothing happens any more: {}", self.left())),
            }
            self.pump();
            self.route();
            // What the engine has done may give the machines something to say.
            self.pump();
            if let Some(broken) = self.broken.take() {
                return Err(broken);
            }
            if let Some(due) = self.due().filter(|due| *due <= self.now) {
                return Err(format!("something is due that poll did not do: {due:?} at {:?}", self.now));
            }
            count += 1;
            if self.now > END || count > 200_000 {
                return Err(format!("a hang at {:?}: {}", self.now, self.left()));
            }
        }
        self.nothing_is_left()
    }

    fn due(&self) -> Option<Duration> {
        let due = self.prefills.iter().filter_map(|rank| rank.machine.due());
        due.chain(self.decodes.iter().filter_map(|rank| rank.machine.due())).min()
    }

    fn is_over(&self) -> bool {
        self.talks.iter().all(|talk| talk.over)
            && self
                .decodes
                .iter()
                .all(|rank| rank.uses.is_empty() && rank.machine.quarantine().reached() == 0)
            && self.prefills.iter().flat_map(|rank| &rank.origins).all(|origin| origin.released)
    }

    fn left(&self) -> String {
        let talks: Vec<_> =
            self.talks.iter().filter(|of| !of.over).map(|of| (of.turn, &of.turns, of.tags.len())).collect();
        let attempts: Vec<_> = self
            .attempts
            .iter()
            .filter(|of| !of.over)
            .map(|of| (of.request, of.talk, of.next, of.order.len(), &of.fences, of.running))
            .collect();
        let uses: Vec<_> = self.decodes.iter().map(|rank| &rank.uses).collect();
        let held = self.prefills.iter().flat_map(|rank| &rank.origins).filter(|of| !of.released).count();
        format!("{:?}, talks {talks:?}, attempts {attempts:?}, uses {uses:#?}, {held} held", self.way)
    }

    fn nothing_is_left(&mut self) -> Result<(), String> {
        for rank in &mut self.decodes {
            rank.settle();
            rank.cache.validate().map_err(|error| error.to_string())?;
            let (stats, config) = (rank.cache.stats(), rank.cache.config());
            let counts = [stats.sequences, stats.arriving, stats.parked, stats.withheld_pages];
            let free = [stats.free_host_pages, stats.free_index_pages].map(|free| free + stats.unused_pages);
            let all = counts == [0; 4]
                && free == [config.host_pages, config.index_pages]
                && (stats.free_lanes, stats.slots_in_use) == (config.lanes, 0);
            if !all || !rank.landing.is_free() || rank.machine.quarantine().reached() > 0 {
                return Err(format!("something is left at {:?}: {stats:?}", rank.rank));
            }
        }
        Ok(())
    }
}
