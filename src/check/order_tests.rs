//! The checker against a naive one: a graph with a node for each operation, an edge for each rule, and a search for
//! reachability; and what each place holds, one by one.

use proptest::prelude::*;

use super::*;

const SPACE: Space = Space::new("bytes of", [0, 0]);
const OTHER: Space = Space::new("bytes of", [0, 1]);

fn read(from: u64, to: u64) -> Access {
    Access::read(SPACE, from, to)
}

fn write(from: u64, to: u64) -> Access {
    Access::write(SPACE, from, to)
}

const A: Stream = Stream(7);
const B: Stream = Stream(3);
const E: Event = Event(0);

#[test]
fn streams_are_ordered_by_a_record_and_a_wait_for_it_alone() {
    let mut order = Order::new();
    order.access(A, "gather", &[write(0, 10)]).unwrap();
    order.access(B, "attend", &[read(10, 20), Access::read(OTHER, 0, 10)]).unwrap();
    let error = order.access(B, "attend", &[read(9, 20)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "order: wrong state: attend (stream 3) reads bytes of 0 0, which gather (stream 7) writes, and is \
         not ordered after it (from 9, to 20); record an event after the other and let this one's stream wait \
         for it"
    );
    assert!(!order.wait(B, E), "an event that was never recorded orders nothing");
    assert!(order.access(B, "attend", &[read(0, 1)]).is_err());
    order.record(E, A);
    assert!(order.access(B, "attend", &[read(0, 1)]).is_err(), "no stream waits for it");
    assert!(order.wait(B, E));
    assert!(!order.wait(B, E), "it is known already");
    order.access(B, "attend", &[read(0, 1)]).unwrap();
    // Concurrent reads are fine; a write after two of them needs both edges.
    order.access(A, "attend", &[read(0, 10)]).unwrap();
    assert!(order.access(A, "gather", &[write(0, 10)]).is_err());
    order.record(E, B);
    order.wait(A, E);
    order.access(A, "gather", &[write(0, 10)]).unwrap();
}

#[test]
fn a_wait_is_for_the_last_record_before_it() {
    let mut order = Order::new();
    order.record(E, A);
    order.access(A, "gather", &[write(0, 10)]).unwrap();
    assert!(!order.wait(B, E));
    assert!(order.access(B, "attend", &[read(0, 10)]).is_err());
    order.record(E, A);
    order.wait(B, E);
    order.access(B, "attend", &[read(0, 10)]).unwrap();
    // A later record in another stream takes the event over.
    order.access(A, "gather", &[write(20, 30)]).unwrap();
    order.record(E, A);
    order.record(E, B);
    let third = Stream(9);
    order.wait(third, E);
    assert!(order.access(third, "attend", &[read(20, 30)]).is_err());
    order.access(third, "attend", &[read(0, 10)]).unwrap();
}

#[test]
fn the_host_is_after_what_it_has_seen_and_before_what_it_enqueues() {
    let mut order = Order::new();
    order.host("prepare", &[write(0, 10)]).unwrap();
    order.access(A, "begin", &[read(0, 10)]).unwrap();
    let error = order.host("prepare", &[write(0, 10)]).unwrap_err();
    assert!(
        error.to_string().contains("prepare (host) writes bytes of 0 0, which begin (stream 7) reads"),
        "{error}"
    );
    assert!(!order.observed(E), "never recorded");
    order.record(E, A);
    assert!(order.host("prepare", &[write(0, 10)]).is_err(), "the host has not polled");
    assert!(order.observed(E));
    order.host("prepare", &[write(0, 10)]).unwrap();
    // A stream that waits for nothing still comes after all that the host had seen when it enqueued.
    order.access(B, "begin", &[write(0, 10)]).unwrap();
}

#[test]
fn memory_is_bounded_by_the_named_ranges() {
    for seen in [false, true] {
        let mut order = Order::new();
        for step in 0..2000_u64 {
            for place in 0..300 {
                let at = (place * 7 + step % 5) % 300;
                order.access(A, "resolve", &[read(at, at + 1 + step % 3)]).unwrap();
            }
            order.record(E, A);
            if seen {
                order.observed(E);
                // Spaces that are used once and never again.
                order
                    .access(A, "copy", &[Access::write(Space::new("page", [step as u32, 0]), 0, 1)])
                    .unwrap();
            }
        }
        assert!(order.remembered() <= 1000, "{}", order.remembered());
    }
}

#[test]
fn dropping_seen_operations_hides_no_unseen_one() {
    let mut order = Order::new();
    order.access(A, "old", &[write(0, 1000)]).unwrap();
    order.record(E, A);
    order.observed(E);
    order.access(A, "new", &[write(500, 501)]).unwrap();
    for place in 0..400 {
        order.access(A, "filler", &[Access::write(OTHER, 2 * place, 2 * place + 1)]).unwrap();
        order.record(E, A);
        if place % 3 == 0 && place < 300 {
            order.access(B, "during", &[read(0, 500), read(501, 1000)]).unwrap();
        }
    }
    assert!(order.access(B, "late", &[read(500, 501)]).is_err());
    assert!(order.access(B, "late", &[Access::read(OTHER, 0, 1)]).is_err());
}

const OLD: Content = Content { layer: 3, version: 1 };
const NEW: Content = Content { layer: 5, version: 1 };

#[test]
fn a_read_that_expects_what_the_bytes_do_not_hold_is_stale() {
    let mut order = Order::new();
    order.access(A, "pull", &[write(0, 10).of(OLD)]).unwrap();
    order.access(A, "use", &[read(0, 10).of(OLD)]).unwrap();
    order.access(A, "pull", &[write(4, 6).of(NEW)]).unwrap();
    order
        .access(A, "use", &[read(0, 4).of(OLD), read(4, 6).of(NEW), read(6, 10).of(OLD), read(0, 10)])
        .unwrap();
    let error = order.access(A, "use", &[read(2, 10).of(OLD)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "order: wrong state: stale read: use (stream 7) expects layer 3 version 1 in bytes of 0 0, which from 4 to 6 \
         holds layer 5 version 1 (expected layer 3, expected version 1, found layer 5, found version 1); enqueue what \
         writes it before the read, and what overwrites it behind the read"
    );
    // A write that says nothing leaves nothing that is known. It is a part of its own at the end of a range.
    order.access(A, "clear", &[write(8, 12)]).unwrap();
    let error = order.host("use", &[read(6, 9).of(OLD)]).unwrap_err();
    assert!(error.place().contains("not ordered after it"), "a race comes first: {error}");
    let error = order.access(A, "use", &[read(6, 9).of(OLD)]).unwrap_err();
    assert!(error.place().ends_with("which from 8 to 9 holds nothing that is known"), "{error}");
    assert_eq!((error.number("expected layer"), error.number("found layer")), (Some(3), None));
    order.access(A, "nothing", &[read(9, 9).of(OLD), read(9, 2).of(OLD)]).unwrap();
    // The version counts as the layer does, and another space holds nothing of this one.
    let later = Content { version: 2, ..OLD };
    order.access(A, "use", &[read(0, 1).of(later)]).unwrap_err();
    order.access(A, "use", &[Access::read(OTHER, 0, 1).of(OLD)]).unwrap_err();
    // An operation reads before it writes.
    order.access(A, "replace", &[write(0, 1).of(later), read(0, 1).of(OLD)]).unwrap();
    order.access(A, "use", &[read(0, 1).of(later)]).unwrap();
    order.gone(SPACE);
    order.access(A, "use", &[read(0, 1).of(later)]).unwrap_err();
}

#[test]
fn what_bytes_hold_outlives_the_accesses_that_the_host_has_seen() {
    let mut order = Order::new();
    order.access(A, "pull", &[write(0, 100).of(OLD)]).unwrap();
    order.record(E, A);
    order.observed(E);
    let mut most = 0;
    for step in 0..3000_u64 {
        // Windows that move over one buffer, each half of two contents, in a space of many.
        let space = Space::new("buffer", [(step % 7) as u32, 0]);
        let at = step * 13 % 90;
        let halves = [(at, at + 5, OLD), (at + 5, at + 10, NEW)];
        for (from, to, content) in halves {
            order.access(A, "pull", &[Access::write(space, from, to).of(content)]).unwrap();
        }
        let uses = halves.map(|(from, to, content)| Access::read(space, from, to).of(content));
        order.access(B, "use", &uses).unwrap_err();
        order.record(E, A);
        order.observed(E);
        order.access(A, "use", &uses).unwrap();
        // Ranges in use for once.
        let once = Space::new("once", [step as u32, 0]);
        order.access(A, "pull", &[Access::write(once, 0, 1).of(NEW)]).unwrap();
        order.gone(once);
        most = most.max(order.remembered());
    }
    assert!(most <= 1000, "{most}");
    order.record(E, A);
    order.observed(E);
    order.forget();
    assert_eq!(order.stretches, 0, "the host has seen everything");
    order.access(A, "use", &[read(0, 100).of(OLD)]).unwrap();
    assert!(order.access(A, "use", &[read(0, 100).of(NEW)]).unwrap_err().place().starts_with("stale read"));
}

/// One call.
#[derive(Clone, Debug)]
enum Call {
    Record(u64, u64),
    Wait(u64, u64),
    Observed(u64),
    Access(u64, Vec<Access>),
    Host(Vec<Access>),
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let content = (0..2_u32, 0..2_u32).prop_map(|(layer, version)| Content { layer, version });
    let content = prop::option::weighted(0.3, content);
    let access = (0..2_u32, 0..12_u64, 1..5_u64, prop::bool::weighted(0.35), content).prop_map(
        |(space, from, length, write, content)| {
            let space = Space::new("space", [space, 0]);
            Access { range: Range { space, from, to: from + length }, write, content }
        },
    );
    let accesses = prop::collection::vec(access, 1..3).boxed();
    let call = prop_oneof![
        3 => (0..3_u64, 0..3_u64).prop_map(|(event, stream)| Call::Record(event, stream)),
        3 => (0..3_u64, 0..3_u64).prop_map(|(stream, event)| Call::Wait(stream, event)),
        1 => (0..3_u64).prop_map(Call::Observed),
        5 => (0..3_u64, accesses.clone()).prop_map(|(stream, all)| Call::Access(stream, all)),
        1 => accesses.prop_map(Call::Host),
    ];
    prop::collection::vec(call, 1..60)
}

/// The node of each call, with its direct predecessors. Host calls and polls are a stream of their own, and each call
/// of a stream comes after the host's last call.
#[derive(Default)]
struct Naive {
    before: Vec<Vec<usize>>,
    touched: Vec<(usize, Access)>,
    last: HashMap<u64, usize>,
    recorded: HashMap<u64, usize>,
    held: HashMap<(Space, u64), Content>,
}

/// What the naive checker finds: a race, or what a stale read expects and finds first.
#[derive(Debug, PartialEq)]
enum Fault {
    Race,
    Stale(Content, Option<Content>),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        let content = |layer, version| {
            let number = |name| error.number(name).map(|number| number as u32);
            Some(Content { layer: number(layer)?, version: number(version)? })
        };
        match content("expected layer", "expected version") {
            Some(expected) => Fault::Stale(expected, content("found layer", "found version")),
            None => Fault::Race,
        }
    }
}

const HOST_STREAM: u64 = 99;

impl Naive {
    fn node(&mut self, stream: u64, also: Option<usize>) -> usize {
        let node = self.before.len();
        let known = [self.last.get(&stream), self.last.get(&HOST_STREAM), also.as_ref()];
        self.before.push(known.into_iter().flatten().copied().collect());
        self.last.insert(stream, node);
        node
    }

    fn is_before(&self, first: usize, then: usize) -> bool {
        let mut open = vec![then];
        let mut seen = vec![false; self.before.len()];
        while let Some(node) = open.pop() {
            if node == first {
                return true;
            }
            if !std::mem::replace(&mut seen[node], true) {
                open.extend(&self.before[node]);
            }
        }
        false
    }

    fn call(&mut self, call: &Call) -> Result<(), Fault> {
        match call {
            Call::Record(event, stream) => {
                let node = self.node(*stream, None);
                self.recorded.insert(*event, node);
                Ok(())
            }
            Call::Wait(stream, event) => {
                let also = self.recorded.get(event).copied();
                self.node(*stream, also);
                Ok(())
            }
            Call::Observed(event) => {
                let also = self.recorded.get(event).copied();
                self.node(HOST_STREAM, also);
                Ok(())
            }
            Call::Access(stream, all) => self.access(*stream, all),
            Call::Host(all) => self.access(HOST_STREAM, all),
        }
    }

    fn access(&mut self, stream: u64, all: &[Access]) -> Result<(), Fault> {
        let node = self.node(stream, None);
        let conflict = |(other, theirs): &(usize, Access)| {
            all.iter().any(|own| {
                let (a, b) = (own.range, theirs.range);
                let places = (a.from..a.to).any(|place| (b.from..b.to).contains(&place));
                a.space == b.space && places && (own.write || theirs.write)
            }) && !self.is_before(*other, node)
        };
        if self.touched.iter().any(conflict) {
            return Err(Fault::Race);
        }
        let places = |access: &Access| {
            let space = access.range.space;
            (access.range.from..access.range.to).map(move |place| (space, place))
        };
        for access in all.iter().filter(|access| !access.write) {
            let Some(expected) = access.content else { continue };
            let mut found = places(access).map(|place| self.held.get(&place).copied());
            if let Some(other) = found.find(|found| *found != Some(expected)) {
                return Err(Fault::Stale(expected, other));
            }
        }
        self.touched.extend(all.iter().map(|access| (node, *access)));
        for access in all.iter().filter(|access| access.write) {
            for place in places(access) {
                match access.content {
                    Some(content) => self.held.insert(place, content),
                    None => self.held.remove(&place),
                };
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn each_race_and_each_stale_read_is_one_that_a_naive_search_finds(calls in calls()) {
        let (mut order, mut naive) = (Order::new(), Naive::default());
        for (index, call) in calls.iter().enumerate() {
            let result = match call {
                Call::Record(event, stream) => {
                    order.record(Event(*event), Stream(*stream));
                    Ok(())
                }
                Call::Wait(stream, event) => {
                    let would = order.would_order(Stream(*stream), Event(*event));
                    prop_assert_eq!(order.wait(Stream(*stream), Event(*event)), would);
                    Ok(())
                }
                Call::Observed(event) => {
                    order.observed(Event(*event));
                    Ok(())
                }
                Call::Access(stream, all) => {
                    let checked = order.check(Stream(*stream), "access", all);
                    let result = order.access(Stream(*stream), "access", all);
                    prop_assert_eq!(&checked, &result);
                    result
                }
                Call::Host(all) => order.host("access", all),
            };
            // A refused operation is one that never was, for both.
            prop_assert_eq!(result.map_err(Fault::from), naive.call(call), "call {}", index);
            if index % 5 == 0 && !order.clocks.is_empty() {
                order.forget();
            }
        }
        for space in [0, 1].map(|space| Space::new("space", [space, 0])) {
            let parts = order.contents(Range { space, from: 0, to: 20 });
            prop_assert!(parts.windows(2).all(|two| two[0].0 < two[1].0 && two[0].1 != two[1].1), "{:?}", parts);
            let mut at = 0;
            for (to, content) in parts {
                prop_assert!((at..to).all(|place| naive.held.get(&(space, place)).copied() == content));
                at = to;
            }
            prop_assert_eq!(at, 20);
        }
    }
}
