//! Both machines in a world with one seed: ranks of one or two prefill and decode instances and of their replicas,
//! engines that compute and give up, and the model fabric (`transfer::model`), which loses, repeats, reorders, damages
//! and delays, and whose ends crash and start again.
//!
//! **What must hold.** A layer that is said to be ready has exactly the rows of its attempt, and keeps them until its
//! pages are given back. No write lands on a page that is not its own. Rows are read only while they are held. When
//! faults have ended every request becomes whole, and nothing is left: no page, no landing page, no part of a sender's
//! memory, no end without an answer.

mod fabric;
mod future;
mod nodes;
mod steps;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::time::Duration;

use forebay::transfer::model::{self, Draw, Net, Way};
use forebay::transfer::{
    Chunk, Fence, Plan, Rank, Receiver, ReceivingEnd, Request, Sender, SendingEnd, Side, Split, receiver,
    sender,
};

use crate::random::{Layout, side};
use future::{Future, Happens};
use nodes::{Listening, Origins, Pages, Prompt, ReceiverNode, SenderNode, rows};

/// A rule that a weaker receiver would follow, as a control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weak {
    No,
    /// A layer is complete once as many tokens were told as it has.
    ByCount,
    /// Landing pages of a request that was given up are used again at once: a time-out that was too short.
    TimeOut,
    /// Digests cover bytes alone.
    BytesOnly,
    /// What is stored is read once more after the check.
    ReadsTwice,
}

/// How often of a thousand times something happens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// What the fabric does.
    pub fabric: model::Faults,
    /// A notice arrives with another use's fence, and with a sum that fits: what a confused sender would say.
    pub misnamed: u64,
    /// Any bytes of a message are others, with a sum that fits.
    pub nonsense: u64,
    /// A sender's rows cannot be read; a receiver's cannot be stored.
    pub unread: u64,
    pub unstored: u64,
    pub crash: u64,
    pub abort: u64,
    /// Rows are told without digests, so nothing may make them wrong on their way.
    pub unchecked: bool,
}

/// One try at a request.
struct Attempt {
    request: u64,
    prompt: Prompt,
    first: u32,
    salt: u8,
    rows: Rc<nodes::Rows>,
    /// Chunk and layer, in the order of computing.
    steps: Vec<(usize, u32)>,
    next: usize,
    /// The ranks that take part: those of one replica of one instance on each side.
    from: Vec<usize>,
    to: Vec<usize>,
    /// Sender ranks at which it goes on.
    begun: Vec<bool>,
    /// By receiver: the use of its pages.
    fences: Vec<Option<Fence>>,
    whole: usize,
    given_up: bool,
    /// Whether something has happened meanwhile for which it may fail.
    touched: bool,
    /// Why it failed, in the machines' words.
    why: String,
    over: bool,
    began: Duration,
}

pub struct World {
    draw: Draw,
    way: Way,
    weak: Weak,
    faults: Faults,
    sides: [Side; 2],
    plan: Plan,
    senders: Vec<SenderNode>,
    receivers: Vec<ReceiverNode>,
    net: Net,
    last_seen: model::Seen,
    attempts: Vec<Attempt>,
    future: Future,
    now: Duration,
    /// By fence, receiver, layer and link: how many tokens were told, for the control.
    told: HashMap<(Fence, usize, u32, u32), u32>,
    broken: Option<String>,
    /// Whether requests have no deadline.
    patient: bool,
    /// Whether a message was nonsense.
    confused: bool,
    /// Notices and payloads that were told, by connection and number.
    numbers: HashSet<(u32, Vec<u8>)>,
    /// Uses whose end was not answered, by receiver.
    open: Vec<(usize, Fence)>,
    pub seen: Seen,
    /// How many processes there were on each side.
    processes: [usize; 2],
}

/// What a world has seen, so that tests know that faults happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub whole: u32,
    pub failed: u32,
    pub resent: u32,
    pub late_writes: u32,
    pub cut: u32,
    pub layers: u32,
    /// Worlds with several replicas or instances, and second connections of the same ends.
    pub several: u32,
    pub doubled: u32,
    pub unwritten: u32,
    pub full: u32,
    /// Messages that were told more than once.
    pub repeated: u32,
    /// The most requests whose rows were computed together.
    pub together: u32,
}

/// Faults end here.
const CALM: Duration = Duration::from_millis(1500);
/// By now all is over.
const END: Duration = Duration::from_secs(40);

const SENDING: sender::Options = sender::Options {
    bulk_tokens: 8,
    bytes_per_second: 0,
    notice_bytes: 120,
    digests: true,
    repeats: 4,
    resend: Duration::from_millis(50),
    patience: Duration::from_secs(2),
    requests: 8,
};

const RECEIVING: receiver::Options = receiver::Options {
    window: 6,
    requests: 8,
    landing: 64,
    digests: true,
    resend: Duration::from_millis(60),
    patience: Duration::from_secs(2),
};

fn shape(draw: &mut Draw) -> [Side; 2] {
    let latent = draw.often(500);
    let tokens = match latent {
        true => vec![("latent".to_owned(), 1, 5), ("keys".to_owned(), 1, 3)],
        false => vec![("k".to_owned(), 4, 3), ("v".to_owned(), 4, 2)],
    };
    // One layer of latents has no index keys.
    let layers: Vec<_> =
        (0..3).map(|layer| (layer, if latent && layer == 1 { vec![0] } else { vec![0, 1] })).collect();
    let mut end = |split, widths: &[u32]| {
        let layout = [Layout::Separate, Layout::Rows, Layout::Whole][draw.below(3) as usize];
        let width = widths[draw.below(widths.len() as u64) as usize];
        let stages: Vec<_> = layers.chunks(if draw.often(300) { 2 } else { 3 }).map(<[_]>::to_vec).collect();
        let page = [1, 4, 7, 16][draw.below(4) as usize];
        side(&tokens, &stages, (width, split, 1, page), (layout, draw.below(2), draw.often(500)))
    };
    let split = if latent { Split::Tokens } else { Split::Heads };
    [end(split, &[1, 2]), end(Split::Heads, &[1, 2])]
}

/// The ranks of so many instances from a number on.
fn ranks(side: &Side, instances: std::ops::Range<u64>) -> Vec<Rank> {
    let (stages, width) = (0..side.stages.len() as u32, side.width);
    let replicas = instances.flat_map(|instance| (0..side.replicas).map(move |replica| (instance, replica)));
    let places: Vec<_> = stages.flat_map(|stage| (0..width).map(move |lane| (stage, lane))).collect();
    replicas
        .flat_map(|(instance, replica)| {
            places.clone().into_iter().map(move |(stage, lane)| Rank { instance, replica, stage, lane })
        })
        .collect()
}

impl World {
    pub fn new(seed: u64, faults: Faults, way: Option<Way>, weak: Weak) -> World {
        let mut draw = Draw::new(seed);
        let mut sides = shape(&mut draw);
        // Replicas and instances of one side, seldom, because they cost time.
        let mut instances = [1, 1];
        let several = draw.below(12);
        if let Some(side) = sides.get_mut(several as usize) {
            side.replicas = 2;
        } else if let Some(count) = instances.get_mut((several as usize).wrapping_sub(2)) {
            *count = 2;
        }
        let plan = Plan::new(&sides[0], &sides[1]).unwrap();
        let way = way.unwrap_or([Way::Shared, Way::Stream, Way::Far][draw.below(3) as usize]);
        let senders: Vec<_> = ranks(&sides[0], 0..instances[0])
            .into_iter()
            .map(|rank| SenderNode { rank, process: 0, end: None, memory: Rc::default() })
            .collect();
        let receivers: Vec<_> = ranks(&sides[1], 50..50 + instances[1])
            .into_iter()
            .map(|rank| {
                let memory = Rc::new(RefCell::new(Pages::new(0, &[], false)));
                ReceiverNode { rank, process: 0, end: None, memory, links: Vec::new(), generation: 0 }
            })
            .collect();
        let net = Net::new(seed ^ 0xFAB, way, faults.fabric);
        net.calm(CALM);
        let mut world = World {
            draw,
            way,
            weak,
            faults,
            sides,
            plan,
            senders,
            receivers,
            last_seen: net.seen(),
            net,
            attempts: Vec::new(),
            future: Future::default(),
            now: Duration::ZERO,
            told: HashMap::new(),
            broken: None,
            patient: seed.is_multiple_of(3),
            confused: false,
            numbers: HashSet::new(),
            open: Vec::new(),
            seen: Seen { several: u32::from(several < 4), ..Seen::default() },
            processes: [0; 2],
        };
        (0..world.senders.len()).for_each(|index| world.start_sender(index));
        (0..world.receivers.len()).for_each(|index| world.start_receiver(index));
        for _ in 0..2 + world.draw.below(3) {
            world.attempt();
        }
        world
    }

    fn start_sender(&mut self, index: usize) {
        let node = &mut self.senders[index];
        let options = sender::Options { digests: !self.faults.unchecked, ..SENDING };
        let machine = Sender::new(self.sides[0].clone(), node.rank, options).unwrap();
        node.memory = Rc::new(RefCell::new(Origins::default()));
        node.end = Some(SendingEnd::new(machine, self.net.sender(node.memory.clone())));
        node.process = self.processes[0];
        self.processes[0] += 1;
    }

    fn start_receiver(&mut self, index: usize) {
        let node = &mut self.receivers[index];
        let bytes = &self.sides[1].stages[node.rank.stage as usize].page_bytes;
        // Few pages, so that they are used again.
        let pages = 96 / self.sides[1].page_tokens.min(8) as usize + 2;
        let options = receiver::Options { digests: !self.faults.unchecked, ..RECEIVING };
        let machine = Receiver::new(self.sides[1].clone(), node.rank, options).unwrap();
        node.memory = Rc::new(RefCell::new(Pages::new(pages, bytes, self.weak == Weak::ReadsTwice)));
        let inner = self.net.receiver(node.memory.clone());
        node.end = Some(ReceivingEnd::new(
            machine,
            Listening { inner, heard: Vec::new(), listens: self.weak == Weak::ByCount },
        ));
        node.links.clear();
        node.process = self.processes[1];
        self.processes[1] += 1;
        self.open.retain(|(of, _)| *of != index);
    }

    /// The ranks of one replica of one instance: those of any rank that is drawn.
    fn replica(&mut self, end: usize) -> Vec<usize> {
        let all: Vec<Rank> = match end {
            0 => self.senders.iter().map(|node| node.rank).collect(),
            _ => self.receivers.iter().map(|node| node.rank).collect(),
        };
        let one = all[self.draw.below(all.len() as u64) as usize];
        let same = |rank: &Rank| (rank.instance, rank.replica) == (one.instance, one.replica);
        (0..all.len()).filter(|index| same(&all[*index])).collect()
    }

    /// Plans one more try at a request. Each has a number of its own.
    fn attempt(&mut self) {
        let request = self.attempts.len() as u64;
        let tokens = 1 + self.draw.below(40) as u32;
        let mut ends: Vec<u32> =
            (0..self.draw.below(3)).map(|_| 1 + self.draw.below(tokens.into()) as u32).collect();
        ends.push(tokens);
        ends.sort_unstable();
        ends.dedup();
        let divides = self.sides[0].split == Split::Tokens;
        let mut chunks = Vec::new();
        for (index, end) in ends.iter().enumerate().filter(|_| divides) {
            let first = if index == 0 { 0 } else { ends[index - 1] };
            let at = self.draw.below(9) as u32;
            let all = at + (end - first) + self.draw.below(4) as u32;
            chunks.push(Chunk { first, at, slice: all.div_ceil(self.sides[0].width) });
        }
        let salt = (self.attempts.len() as u8).wrapping_mul(37).wrapping_add(11);
        let all = Request { tokens, replicas: [0, 0], chunks: &chunks };
        let rows = Rc::new(rows(&self.sides[0], &all, salt));
        let (from, to) = (self.replica(0), self.replica(1));
        let layers: Vec<u32> = self.plan.layers().collect();
        let steps =
            (0..ends.len()).flat_map(|chunk| layers.iter().map(move |layer| (chunk, *layer))).collect();
        self.attempts.push(Attempt {
            request,
            first: if self.draw.often(300) { self.draw.below(u64::from(tokens) + 1) as u32 } else { 0 },
            prompt: Prompt { tokens, chunks, ends },
            salt,
            rows,
            steps,
            next: 0,
            from,
            to,
            begun: vec![false; self.senders.len()],
            fences: vec![None; self.receivers.len()],
            whole: 0,
            given_up: false,
            // Nonsense may name a request that has not begun.
            touched: self.confused,
            why: String::new(),
            over: false,
            began: self.now,
        });
        let index = self.attempts.len() - 1;
        self.future.at(self.now + self.draw.millis(150), Happens::Attempt(index));
    }

    /// When a request fails by itself. In every third world none does: the router gives up what takes too long.
    fn deadline(&self, after: u64) -> Option<Duration> {
        (!self.patient).then(|| self.now + Duration::from_secs(after))
    }

    /// Runs the world to its end. Returns what went wrong.
    pub fn run(&mut self) -> Result<(), String> {
        let mut count = 0;
        while !self.is_over() {
            let times = [self.future.first(), self.net.next(), self.due()];
            let Some(time) = times.into_iter().flatten().min() else {
                return Err(format!("nothing happens any more: {}", self.left()));
            };
            self.now = self.now.max(time);
            self.net.advance(self.now);
            self.watch_connections();
            if let Some(happens) = self.future.take(self.now) {
                self.happens(happens);
            }
            self.pump();
            if let Some(due) = self.due().filter(|due| *due <= self.now) {
                return Err(format!("something is due that poll did not do: {due:?} at {:?}", self.now));
            }
            self.route();
            count += 1;
            if self.now > END || count > 200_000 {
                return Err(format!("a hang at {:?}: {}", self.now, self.left()));
            }
            if let Some(broken) = self.broken.take() {
                return Err(broken);
            }
        }
        let seen = self.net.seen();
        (self.seen.cut, self.seen.resent) = (seen.cut, seen.lost_or_twice);
        (self.seen.doubled, self.seen.unwritten, self.seen.full) = (seen.doubled, seen.unwritten, seen.full);
        self.check_nothing_left()
    }

    fn due(&self) -> Option<Duration> {
        let due = self.senders.iter().filter_map(|node| node.end.as_ref()?.machine.due());
        due.chain(self.receivers.iter().filter_map(|node| node.end.as_ref()?.machine.due())).min()
    }

    fn is_over(&self) -> bool {
        let quiet = |node: &ReceiverNode| {
            let memory = node.memory.borrow();
            memory.tables.values().all(|table| table.ended) && memory.landing.is_free()
        };
        let over = self.attempts.iter().all(|attempt| attempt.over) && self.open.is_empty();
        over && self.receivers.iter().all(quiet)
    }

    fn left(&self) -> String {
        let attempts: Vec<_> = self
            .attempts
            .iter()
            .filter(|of| !of.over)
            .map(|of| (of.request, of.next, of.steps.len(), &of.begun, &of.fences, of.whole, of.given_up))
            .collect();
        if std::env::var_os("WORLD_DEBUG").is_some() {
            for node in &self.senders {
                println!("{:#?}", node.end.as_ref().map(|end| &end.machine));
            }
        }
        format!("{attempts:?}, ends {:?}, {:?}", self.open, self.way)
    }

    fn check_nothing_left(&self) -> Result<(), String> {
        for node in &self.receivers {
            let Some(end) = &node.end else { continue };
            let memory = node.memory.borrow();
            let reached = end.machine.quarantine().reached();
            if !memory.cache.is_free() || !memory.landing.is_free() || reached > 0 {
                return Err(format!("pages are left at {:?}", node.rank));
            }
        }
        for node in self.senders.iter().filter(|node| node.end.is_some()) {
            if node.memory.borrow().parts.iter().any(|origin| !origin.released) {
                return Err(format!("rows are held at {:?}", node.rank));
            }
        }
        Ok(())
    }

    /// Whether faults still happen, and one happens now.
    fn fault(&mut self, of: u64) -> bool {
        self.now < CALM && self.draw.often(of)
    }
}

/// Draws the faults of a seed: often none of a kind.
pub fn faults(seed: u64) -> Faults {
    let mut draw = Draw::new(seed ^ 0xF00D);
    let mut some = |most: u64| if draw.often(400) { draw.below(most) } else { 0 };
    let fabric = model::Faults {
        lost: some(200),
        twice: some(200),
        reordered: some(1000),
        late: some(300),
        damaged: some(30),
        fetched: some(100),
        refused: some(60),
        full: some(200),
        unwritten: some(60),
        cut: some(15),
        doubled: some(500),
    };
    Faults {
        fabric,
        misnamed: some(100),
        nonsense: some(60),
        unread: some(8),
        unstored: some(8),
        crash: some(12),
        abort: some(300),
        unchecked: false,
    }
}

/// Those that no digest has to find.
fn faults_without_digests(seed: u64) -> Faults {
    let all = faults(seed);
    let fabric = model::Faults { damaged: 0, fetched: 0, ..all.fabric };
    Faults { fabric, misnamed: 0, nonsense: 0, unchecked: true, ..all }
}

/// Runs one seed.
pub fn run(seed: u64, faults: Faults, way: Option<Way>, weak: Weak) -> Result<Seen, String> {
    let mut world = World::new(seed, faults, way, weak);
    let done = world.run();
    done.map(|()| world.seen).map_err(|wrong| format!("seed {seed}: {wrong}"))
}

fn seeds() -> u64 {
    if std::env::var_os("FOREBAY_SOAK").is_some() { 20_000 } else { 200 }
}

#[test]
fn no_wrong_row_is_ready_and_nothing_is_left_whatever_the_fabric_does() {
    let mut all = Seen::default();
    for seed in 0..seeds() {
        let seen = run(seed, faults(seed), None, Weak::No).unwrap();
        all.whole += seen.whole;
        all.failed += seen.failed;
        all.resent += seen.resent;
        all.late_writes += seen.late_writes;
        all.cut += seen.cut;
        all.layers += seen.layers;
        all.several += seen.several;
        all.doubled += seen.doubled;
        all.unwritten += seen.unwritten;
        all.full += seen.full;
        all.repeated += seen.repeated;
        all.together = all.together.max(seen.together);
    }
    println!("{all:?}");
    assert!(all.failed > 50 && all.resent > 50 && all.late_writes > 10 && all.cut > 50, "{all:?}");
    assert!(all.several > 30 && all.doubled > 30 && all.unwritten > 10 && all.together > 2, "{all:?}");
    assert!(all.full > 100 && all.repeated > 100, "{all:?}");
}

/// Without faults each request is whole at the first try.
#[test]
fn without_faults_nothing_fails_and_nothing_is_sent_twice() {
    for seed in 0..60 {
        for way in [Way::Shared, Way::Stream, Way::Far] {
            let (reordered, full) = if seed % 2 == 0 { (0, 0) } else { (800, 300) };
            let fabric = model::Faults { reordered, full, ..model::Faults::default() };
            let seen = run(seed, Faults { fabric, ..Faults::default() }, Some(way), Weak::No).unwrap();
            assert_eq!((seen.failed, seen.cut), (0, 0), "seed {seed} {way:?}");
            // An answer that waits for room is asked for again.
            assert!(full > 0 || seen.repeated == 0, "seed {seed} {way:?}: {}", seen.repeated);
        }
    }
}

/// Messages that are lost, come twice or late are no reason to fail: both sides ask again.
#[test]
fn lost_messages_fail_no_request() {
    for seed in 0..100 {
        let fabric =
            model::Faults { lost: 150, twice: 100, late: 100, reordered: 500, ..model::Faults::default() };
        let faults = Faults { fabric, ..Faults::default() };
        let seen = run(seed, faults, None, Weak::No).unwrap();
        assert_eq!((seen.failed, seen.cut), (0, 0), "seed {seed}");
    }
}

fn a_seed_fails(way: Way, weak: Weak, faults: Faults, says: &str) {
    let wrong = (0..300).find_map(|seed| run(seed, faults, Some(way), weak).err());
    let wrong = wrong.unwrap_or_else(|| panic!("{weak:?} was never wrong"));
    assert!(wrong.contains(says), "{wrong}");
    // The same faults do no harm to the machines.
    (0..150).for_each(|seed| {
        run(seed, faults, Some(way), Weak::No).unwrap();
    });
}

#[test]
fn control_a_layer_that_is_complete_by_count_has_wrong_rows() {
    let fabric = model::Faults { twice: 200, fetched: 100, lost: 100, ..model::Faults::default() };
    let faults = Faults { fabric, ..Faults::default() };
    a_seed_fails(Way::Stream, Weak::ByCount, faults, "layer");
}

#[test]
fn control_landing_pages_that_are_used_again_after_a_time_are_written_by_others() {
    let fabric = model::Faults { late: 500, ..model::Faults::default() };
    let faults = Faults { fabric, abort: 600, ..Faults::default() };
    a_seed_fails(Way::Far, Weak::TimeOut, faults, "is not its own");
}

#[test]
fn control_a_digest_of_bytes_alone_takes_rows_of_another_request() {
    let faults = Faults { misnamed: 200, ..Faults::default() };
    a_seed_fails(Way::Shared, Weak::BytesOnly, faults, "layer");
}

#[test]
fn control_what_is_read_again_after_the_check_may_be_wrong() {
    let fabric = model::Faults { fetched: 100, ..model::Faults::default() };
    let faults = Faults { fabric, ..Faults::default() };
    a_seed_fails(Way::Far, Weak::ReadsTwice, faults, "layer");
}

/// Digests find what the fabric does to rows. All else holds without them.
#[test]
fn no_wrong_row_is_ready_without_digests_where_nothing_makes_rows_wrong() {
    let mut failed = 0;
    for seed in 0..seeds() {
        failed += run(seed, faults_without_digests(seed), None, Weak::No).unwrap().failed;
    }
    assert!(failed > 50, "{failed}");
}
