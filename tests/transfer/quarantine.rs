//! Writers from afar whose writes land late: no write reaches a page that another request has.

use std::collections::{BTreeMap, BTreeSet};

use forebay::Kind;
use forebay::transfer::{Fence, Quarantine, Writer};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

const PAGES: u32 = 8;
const WRITERS: u32 = 3;
const MOST: u32 = 6;

/// How pages become free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Quarantine,
    /// After some operations, although writers may still write.
    Time,
    /// By an acknowledgement of any use that the request had.
    Request,
    /// By the first writer's acknowledgement.
    AnyWriter,
    /// A writer that connects again has the number that it had.
    Rank,
}

#[derive(Clone, Copy, Debug)]
enum Op {
    /// A request lends pages to some writers, each of which enqueues a write to each page.
    Lend {
        request: u8,
        pages: u8,
        writers: u8,
    },
    GiveBack {
        request: u8,
    },
    /// A connection's oldest write lands.
    Land {
        pick: u8,
    },
    /// A writer learns of an abort, drops what it has not written, and acknowledges.
    Stop {
        request: u8,
        writer: u8,
    },
    /// A writer that has written everything of a use acknowledges it, perhaps not for the first time.
    Acknowledge {
        pick: u8,
    },
    /// A writer connects again, while what its old connection had enqueued may still land.
    Reconnect {
        writer: u8,
    },
    /// An old connection is gone, with what it had enqueued.
    Destroy {
        pick: u8,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let request = || 0_u8..3;
    let writer = || 0_u8..WRITERS as u8;
    prop_oneof![
        3 => (request(), 1_u8..4, 0_u8..8).prop_map(|(request, pages, writers)| Op::Lend { request, pages, writers }),
        3 => request().prop_map(|request| Op::GiveBack { request }),
        4 => any::<u8>().prop_map(|pick| Op::Land { pick }),
        2 => (request(), writer()).prop_map(|(request, writer)| Op::Stop { request, writer }),
        3 => any::<u8>().prop_map(|pick| Op::Acknowledge { pick }),
        1 => writer().prop_map(|writer| Op::Reconnect { writer }),
        1 => any::<u8>().prop_map(|pick| Op::Destroy { pick }),
    ]
}

struct World {
    rule: Rule,
    quarantine: Quarantine,
    free: BTreeSet<u32>,
    /// Who has each page that is not free.
    owners: BTreeMap<u32, Fence>,
    /// The newest use of each request, and those that were not given back.
    newest: BTreeMap<u64, Fence>,
    open: BTreeSet<Fence>,
    /// Each connection's writes that have not landed: the fence and the page.
    writes: BTreeMap<u32, Vec<(Fence, u32)>>,
    /// Uses that a writer has nothing more to write for.
    done: Vec<(Fence, Writer)>,
    generation: u64,
    /// The writer of each connection so far.
    connections: Vec<u8>,
    /// Old connections that still exist.
    old: Vec<u32>,
    /// Writes that reached another request's page, or a free one.
    wrong: u32,
    /// For the rule of time: pages given back, and how many operations ago.
    aging: Vec<(Fence, u32)>,
    /// For the model: who may still write to the pages of each use.
    reach: BTreeMap<Fence, (BTreeSet<Writer>, BTreeSet<u32>, bool)>,
}

impl World {
    fn new(rule: Rule) -> World {
        World {
            rule,
            quarantine: Quarantine::new(MOST),
            free: (0..PAGES).collect(),
            owners: BTreeMap::new(),
            newest: BTreeMap::new(),
            open: BTreeSet::new(),
            writes: BTreeMap::new(),
            done: Vec::new(),
            generation: 0,
            connections: (0..WRITERS as u8).collect(),
            old: Vec::new(),
            wrong: 0,
            aging: Vec::new(),
            reach: BTreeMap::new(),
        }
    }

    /// The connection of a writer.
    fn connection(&self, writer: u8) -> u32 {
        self.connections.iter().rposition(|other| *other == writer).unwrap() as u32
    }

    /// What the receiver calls a connection.
    fn named(&self, connection: u32) -> Writer {
        match self.rule {
            Rule::Rank => Writer(self.connections[connection as usize].into()),
            _ => Writer(connection),
        }
    }

    fn freed(&mut self, pages: impl IntoIterator<Item = u32>) {
        for page in pages {
            self.owners.remove(&page);
            assert!(self.free.insert(page), "page {page} is free twice");
        }
    }

    fn lend(&mut self, request: u64, count: usize, writers: u8) {
        if self.open.iter().any(|fence| fence.request == request) || self.free.len() < count {
            return;
        }
        let connections: Vec<u32> = (0..WRITERS as u8)
            .filter(|writer| writers & 1 << writer != 0)
            .map(|writer| self.connection(writer))
            .collect();
        let writers: Vec<Writer> = connections.iter().map(|connection| self.named(*connection)).collect();
        let pages: Vec<u32> = self.free.iter().copied().take(count).collect();
        let fence = Fence { request, generation: self.generation };
        self.generation += 1;
        let room = MOST - self.quarantine.reached();
        let lent = self.quarantine.lend(fence, &pages, &writers);
        if !writers.is_empty() && count as u32 > room {
            let error = lent.unwrap_err();
            assert_eq!((error.kind(), error.number("free")), (Kind::Exhausted, Some(room.into())));
            return;
        }
        lent.unwrap();
        assert_eq!(self.quarantine.lend(fence, &pages, &writers).unwrap_err().kind(), Kind::InvalidState);
        for page in &pages {
            self.free.remove(page);
            self.owners.insert(*page, fence);
            for connection in &connections {
                self.writes.entry(*connection).or_default().push((fence, *page));
            }
        }
        self.reach.insert(fence, (writers.into_iter().collect(), pages.into_iter().collect(), false));
        self.newest.insert(request, fence);
        self.open.insert(fence);
    }

    fn give_back(&mut self, request: u64) {
        let Some(fence) = self.newest.get(&request).copied().filter(|fence| self.open.remove(fence)) else {
            return;
        };
        let freed = self.quarantine.give_back(fence).unwrap();
        let (writers, pages, given) = self.reach.get_mut(&fence).unwrap();
        *given = true;
        assert_eq!(freed.is_some(), writers.is_empty());
        match freed {
            Some(freed) => {
                assert_eq!(&freed.iter().copied().collect::<BTreeSet<_>>(), pages);
                self.freed(freed);
            }
            None => self.aging.push((fence, 0)),
        }
        assert_eq!(self.quarantine.give_back(fence).unwrap_err().kind(), Kind::InvalidState);
    }

    fn land(&mut self, pick: usize) {
        let busy = self.writes.iter().filter(|(_, writes)| !writes.is_empty());
        let busy: Vec<u32> = busy.map(|(connection, _)| *connection).collect();
        if busy.is_empty() {
            return;
        }
        let connection = busy[pick % busy.len()];
        let writes = self.writes.get_mut(&connection).unwrap();
        let (fence, page) = writes.remove(0);
        let done = writes.iter().all(|(other, _)| *other != fence);
        self.wrong += u32::from(self.owners.get(&page) != Some(&fence));
        if done {
            self.done.push((fence, self.named(connection)));
        }
    }

    fn acknowledge(&mut self, fence: Fence, writer: Writer) {
        let fence = match self.rule {
            // The receiver looks at the request alone.
            Rule::Request => self.newest[&fence.request],
            _ => fence,
        };
        let writers = match self.rule {
            Rule::AnyWriter => {
                self.reach.get(&fence).map_or(Vec::new(), |reach| reach.0.iter().copied().collect())
            }
            _ => vec![writer],
        };
        for writer in writers {
            let freed = self.quarantine.drained(fence, writer);
            let mut expected = None;
            if let Some((writers, pages, given)) = self.reach.get_mut(&fence) {
                let last = writers.remove(&writer) && writers.is_empty();
                expected = (last && *given).then(|| pages.iter().copied().collect::<Vec<_>>());
            }
            assert_eq!(freed, expected);
            self.freed(freed.into_iter().flatten());
        }
    }

    fn destroy(&mut self, connection: u32) {
        self.writes.remove(&connection);
        let (writer, mut freed) = (self.named(connection), Vec::new());
        self.quarantine.destroyed(writer, &mut freed).unwrap();
        let mut expected = BTreeSet::new();
        for (writers, pages, given) in self.reach.values_mut() {
            if writers.remove(&writer) && writers.is_empty() && *given {
                expected.extend(pages.iter().copied());
            }
        }
        assert_eq!(freed.iter().copied().collect::<BTreeSet<_>>(), expected);
        self.freed(freed);
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Lend { request, pages, writers } => self.lend(request.into(), pages.into(), writers),
            Op::GiveBack { request } => self.give_back(request.into()),
            Op::Land { pick } => self.land(pick.into()),
            Op::Stop { request, writer } => {
                let Some(fence) = self.newest.get(&u64::from(request)).copied() else { return };
                if self.open.contains(&fence) {
                    return;
                }
                let connection = self.connection(writer);
                self.writes.entry(connection).or_default().retain(|(other, _)| *other != fence);
                self.acknowledge(fence, self.named(connection));
            }
            Op::Acknowledge { pick } => {
                if !self.done.is_empty() {
                    let (fence, writer) = self.done[usize::from(pick) % self.done.len()];
                    self.acknowledge(fence, writer);
                }
            }
            Op::Reconnect { writer } => {
                self.old.push(self.connection(writer));
                self.connections.push(writer);
            }
            Op::Destroy { pick } => {
                if !self.old.is_empty() {
                    let connection = self.old.remove(usize::from(pick) % self.old.len());
                    self.destroy(connection);
                }
            }
        }
        if self.rule == Rule::Time {
            self.aging.iter_mut().for_each(|(_, age)| *age += 1);
            for (fence, _) in self.aging.extract_if(.., |(_, age)| *age > 4).collect::<Vec<_>>() {
                for writer in self.reach[&fence].0.clone() {
                    let freed = self.quarantine.drained(fence, writer);
                    self.reach.entry(fence).and_modify(|(writers, ..)| {
                        writers.remove(&writer);
                    });
                    self.freed(freed.into_iter().flatten());
                }
            }
        }
        let reached = |given: Option<bool>| {
            let fences = self
                .reach
                .values()
                .filter(|(writers, _, is)| !writers.is_empty() && given.is_none_or(|given| given == *is));
            fences.map(|(_, pages, _)| pages.len() as u32).sum::<u32>()
        };
        assert_eq!(
            (self.quarantine.reached(), self.quarantine.waiting()),
            (reached(None), reached(Some(true)))
        );
        assert!(self.quarantine.reached() <= MOST);
        let outstanding: BTreeMap<Fence, _> = self
            .quarantine
            .outstanding()
            .map(|(fence, writers, pages, given)| (fence, (writers.iter().copied().collect(), pages, given)))
            .collect();
        let reach = self.reach.iter().filter(|(_, (writers, ..))| !writers.is_empty());
        let reach =
            reach.map(|(fence, (writers, pages, given))| (*fence, (writers.clone(), pages.len(), *given)));
        assert_eq!(outstanding, reach.collect());
    }
}

fn wrong(rule: Rule, ops: &[Op]) -> u32 {
    let mut world = World::new(rule);
    ops.iter().for_each(|op| world.run(*op));
    world.wrong
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1_000) })]
    #[test]
    fn no_late_write_reaches_another_requests_page(ops in prop::collection::vec(op(), 1..80)) {
        prop_assert_eq!(wrong(Rule::Quarantine, &ops), 0);
    }
}

/// Pages that are used again by any weaker rule are written to by a use before.
#[test]
fn controls_weaker_rules_let_a_late_write_through() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let lists: Vec<Vec<Op>> =
        (0..400).map(|_| prop::collection::vec(op(), 80).new_tree(&mut runner).unwrap().current()).collect();
    for rule in [Rule::Time, Rule::Request, Rule::AnyWriter, Rule::Rank] {
        assert!(lists.iter().map(|ops| wrong(rule, ops)).sum::<u32>() > 0, "{rule:?}");
    }
    assert_eq!(lists.iter().map(|ops| wrong(Rule::Quarantine, ops)).sum::<u32>(), 0);
}

#[test]
fn what_was_never_lent_cannot_be_given_back() {
    let mut quarantine = Quarantine::new(1);
    let fence = Fence { request: 7, generation: 1 };
    let error = quarantine.give_back(fence).unwrap_err();
    assert_eq!((error.kind(), error.number("request")), (Kind::InvalidState, Some(7)));
    assert_eq!(quarantine.drained(fence, Writer(0)), None);
    // Without writers the bound does not count.
    quarantine.lend(fence, &[1, 2, 3], &[]).unwrap();
    assert_eq!((quarantine.reached(), quarantine.give_back(fence)), (0, Ok(Some(vec![1, 2, 3]))));
    // A late acknowledgement of a use that is over must not meet a later use.
    for generation in [0, 1] {
        let error = quarantine.lend(Fence { request: 8, generation }, &[1], &[Writer(0)]).unwrap_err();
        assert_eq!((error.kind(), error.number("generation")), (Kind::InvalidState, Some(generation)));
    }
    quarantine.lend(Fence { request: 7, generation: 2 }, &[1], &[Writer(0)]).unwrap();
}
