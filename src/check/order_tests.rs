//! The checker against a naive one: a graph with a node for each operation, an edge for each rule, and a search for
//! reachability.

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
    let access = (0..2_u32, 0..12_u64, 1..5_u64, prop::bool::weighted(0.35)).prop_map(
        |(space, from, length, write)| {
            let space = Space::new("space", [space, 0]);
            Access { range: Range { space, from, to: from + length }, write, content: None }
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

    /// Whether the call is in order.
    fn call(&mut self, call: &Call) -> bool {
        match call {
            Call::Record(event, stream) => {
                let node = self.node(*stream, None);
                self.recorded.insert(*event, node);
                true
            }
            Call::Wait(stream, event) => {
                let also = self.recorded.get(event).copied();
                self.node(*stream, also);
                true
            }
            Call::Observed(event) => {
                let also = self.recorded.get(event).copied();
                self.node(HOST_STREAM, also);
                true
            }
            Call::Access(stream, all) => self.access(*stream, all),
            Call::Host(all) => self.access(HOST_STREAM, all),
        }
    }

    fn access(&mut self, stream: u64, all: &[Access]) -> bool {
        let node = self.node(stream, None);
        let conflict = |(other, theirs): &(usize, Access)| {
            all.iter().any(|own| {
                let (a, b) = (own.range, theirs.range);
                let places = (a.from..a.to).any(|place| (b.from..b.to).contains(&place));
                a.space == b.space && places && (own.write || theirs.write)
            }) && !self.is_before(*other, node)
        };
        let sound = !self.touched.iter().any(conflict);
        self.touched.extend(all.iter().map(|access| (node, *access)));
        sound
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn the_first_conflict_is_the_one_that_a_naive_search_finds(calls in calls()) {
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
            prop_assert_eq!(result.is_ok(), naive.call(call), "call {}", index);
            if result.is_err() {
                break;
            }
            if index % 5 == 0 && !order.clocks.is_empty() {
                order.forget();
            }
        }
    }
}
