//! The clock against a simulation in tiny time steps.
//!
//! It has another structure: instead of streams and events, a list of works with the works that each one follows;
//! instead of computed ends, small portions of the remaining work. It divides a link by raising every transfer's
//! rate a little until that link is used up. It finds by bisection how much all that use the memory are slowed.

use super::costs;
use crate::device::clock::costs::{Direction, Work};
use crate::device::clock::timeline::{Label, Machine, Next, Operation, Timeline, Until};
use proptest::prelude::*;

/// Nanoseconds of a time step.
const TICK: f64 = 0.01;

/// One work of a random schedule.
#[derive(Clone, Debug)]
struct Item {
    stream: usize,
    gap: f64,
    work: Work,
    /// It comes after the last work, so far, of these streams.
    after: Vec<usize>,
}

fn machine(copy_engines: u32, duplex: f64) -> Machine {
    let copy_engines = [copy_engines, copy_engines, 3 - copy_engines];
    Machine { link: [1.0, 0.5, 0.7], duplex, copy_engines, memory: f64::INFINITY, l2: None }
}

/// The ends by the clock.
fn by_clock(items: &[Item], streams: usize, machine: Machine) -> Vec<f64> {
    let mut timeline: Timeline<usize> = Timeline::new(machine, u64::MAX, false);
    (0..streams).for_each(|_| assert!(timeline.stream().0 < streams as u64));
    let mut ends = vec![0.0; items.len()];
    for (number, item) in items.iter().enumerate() {
        for from in &item.after {
            let event = timeline.event();
            let event = timeline.find_event(event).unwrap();
            timeline.record(event, *from);
            timeline.wait(item.stream, event);
        }
        let label = Label { name: "", layer: None, micro_batch: None };
        let (gap_ns, effect) = (item.gap, Some(number));
        let operation =
            Operation { label, work: item.work, gap_ns, early: false, counts: true, effect, touches: vec![] };
        timeline.operation(item.stream, operation);
    }
    loop {
        match timeline.next(Until::Idle) {
            Next::Due(due) => ends[due.effect.unwrap()] = timeline.now(),
            Next::Met => return ends,
            Next::Stuck => panic!("nothing is held"),
        }
    }
}

/// The works that each work follows, by number.
fn dependencies(items: &[Item], streams: usize) -> Vec<Vec<usize>> {
    let mut last = vec![None; streams];
    let mut all = Vec::new();
    for (number, item) in items.iter().enumerate() {
        let from = item.after.iter().chain([&item.stream]).filter_map(|stream| last[*stream]);
        all.push(from.collect());
        last[item.stream] = Some(number);
    }
    all
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Waits,
    Gap(f64),
    Queued,
    Fixed(f64),
    Rest(f64),
    Done,
}

/// Parts per nanosecond of each work in its rest.
fn rates(items: &[Item], stages: &[Stage], machine: &Machine) -> Vec<f64> {
    let resting = |n: &usize| matches!(stages[*n], Stage::Rest(_));
    let all: Vec<usize> = (0..items.len()).filter(resting).collect();
    let shares: f64 = all.iter().map(|n| items[*n].work.sm).sum();
    let most = |n: usize| {
        let Work { ns, sm, .. } = items[n].work;
        if sm > 0.0 && shares > 1.0 { 1.0 / (ns * shares) } else { 1.0 / ns }
    };
    let mut rates = vec![0.0; items.len()];
    let users = |direction| {
        let uses = move |n: &usize| items[*n].work.direction == Some(direction);
        all.iter().copied().filter(uses).collect::<Vec<usize>>()
    };
    let both = !users(Direction::ToDevice).is_empty() && !users(Direction::ToHost).is_empty();
    for (direction, link) in Direction::ALL.into_iter().zip(machine.link) {
        let users = users(direction);
        let link = if both && direction != Direction::Peer { link * machine.duplex } else { link };
        // The level to which every transfer's bytes per nanosecond may rise, by bisection.
        let (mut low, mut high) = (0.0, link);
        let at = |level: f64, n: usize| f64::min(level, most(n) * items[n].work.bytes);
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            let used: f64 = users.iter().map(|n| at(middle, *n)).sum();
            if used > link { high = middle } else { low = middle }
        }
        users.iter().for_each(|n| rates[*n] = at(high, *n) / items[*n].work.bytes);
    }
    all.iter().filter(|n| items[**n].work.direction.is_none()).for_each(|n| rates[*n] = most(*n));
    let used = |kept: f64| all.iter().map(|n| kept * rates[*n] * items[*n].work.traffic).sum::<f64>();
    if used(1.0) > machine.memory {
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            if used(middle) > machine.memory { high = middle } else { low = middle }
        }
        let uses = |n: &&usize| items[**n].work.traffic > 0.0;
        all.iter().filter(uses).for_each(|n| rates[*n] *= high);
    }
    rates
}

/// Ends in tiny time steps; `None` when two copies became ready so close to each other that only smaller steps could
/// tell which was first.
fn by_ticks(items: &[Item], streams: usize, machine: Machine) -> Option<Vec<f64>> {
    let after = dependencies(items, streams);
    let mut stages = vec![Stage::Waits; items.len()];
    let (mut ends, mut ready) = (vec![0.0; items.len()], vec![f64::NAN; items.len()]);
    let mut tick = 0_u64;
    while stages.iter().any(|stage| *stage != Stage::Done) {
        let now = tick as f64 * TICK;
        // A work with nothing left moves on, as far as it can at this time.
        loop {
            let before = stages.clone();
            for (n, item) in items.iter().enumerate() {
                let Work { direction, copy_engine, .. } = item.work;
                let free = |stages: &[Stage]| {
                    let runs = |m: &usize| matches!(stages[*m], Stage::Fixed(_) | Stage::Rest(_));
                    let same =
                        |m: &usize| items[*m].work.copy_engine && items[*m].work.direction == direction;
                    let busy = (0..items.len()).filter(runs).filter(same).count();
                    let first = (0..items.len()).filter(|m| stages[*m] == Stage::Queued).filter(same);
                    let first = first.min_by(|a, b| ready[*a].total_cmp(&ready[*b]));
                    let engines = direction.map_or(0, |direction| machine.copy_engines[direction as usize]);
                    busy < engines as usize && first == Some(n)
                };
                stages[n] = match stages[n] {
                    Stage::Waits if after[n].iter().all(|m| stages[*m] == Stage::Done) => {
                        Stage::Gap(item.gap)
                    }
                    Stage::Gap(left) if left <= 0.0 => {
                        ready[n] = now;
                        if copy_engine { Stage::Queued } else { Stage::Fixed(item.work.fixed_ns) }
                    }
                    Stage::Queued if free(&stages) => Stage::Fixed(item.work.fixed_ns),
                    Stage::Fixed(left) if left <= 0.0 => Stage::Rest(1.0),
                    Stage::Rest(left) if left <= 0.0 || !item.work.has_rest() => {
                        ends[n] = now;
                        Stage::Done
                    }
                    stage => stage,
                };
            }
            if stages == before {
                break;
            }
        }
        let rates = rates(items, &stages, &machine);
        for (n, stage) in stages.iter_mut().enumerate() {
            match stage {
                Stage::Gap(left) | Stage::Fixed(left) => *left -= TICK,
                Stage::Rest(left) => *left -= rates[n] * TICK,
                _ => {}
            }
        }
        tick += 1;
    }
    let close = Direction::ALL.into_iter().any(|direction| {
        let copies = |n: &usize| items[*n].work.copy_engine && items[*n].work.direction == Some(direction);
        let mut times: Vec<f64> = (0..items.len()).filter(copies).map(|n| ready[n]).collect();
        times.sort_by(f64::total_cmp);
        times.windows(2).any(|pair| pair[1] - pair[0] < 1.0)
    });
    (!close).then_some(ends)
}

/// A work of one of the kinds.
fn item(streams: usize, kinds: impl Strategy<Value = u8>) -> impl Strategy<Value = Item> {
    let numbers = (0..40_u32, 0..8_u32, 0..30_u32, 1..30_u32, 0..5_u32);
    (0..streams, kinds, numbers, prop::collection::vec(0..streams, 0..3)).prop_map(
        |(stream, kind, (gap, fixed, ns, bytes, sm), after)| {
            // Odd fractions: another test covers two events at the same time.
            let odd = |n: u32, part: f64| f64::from(n) * (1.0 + part);
            let (ns, sm, bytes) = (odd(ns, 0.137), f64::from(sm) / 4.0, odd(bytes, 0.071));
            let fixed_ns = odd(fixed, 0.0413);
            // Some works of an engine use the memory, and all transfers do.
            let in_memory = if fixed % 2 == 0 { 0.6 * ns } else { 0.0 };
            let traffic = bytes * (1.0 + f64::from(fixed % 2));
            let direction = match kind {
                6.. => Direction::Peer,
                _ if kind % 2 == 0 => Direction::ToDevice,
                _ => Direction::ToHost,
            };
            let work = match kind {
                0 | 1 => Work { fixed_ns, ns, sm, traffic: in_memory, ..Work::default() },
                2 | 3 | 6 => {
                    let (direction, copy_engine) = (Some(direction), false);
                    Work { fixed_ns, ns, sm, bytes, direction, copy_engine, traffic }
                }
                _ => {
                    let direction = Some(direction);
                    Work { fixed_ns, bytes, direction, copy_engine: true, traffic, ..Work::default() }
                }
            };
            Item { stream, gap: odd(gap, 0.0217), work, after }
        },
    )
}

/// Compares the ends by the clock with those by ticks.
fn compare(items: &[Item], streams: usize, machine: Machine) -> Result<(), TestCaseError> {
    let ends = by_clock(items, streams, machine);
    // A work's error of one step passes to the works after it, and changes the rates of those that run at the same
    // time.
    let most = 6.0 * TICK * items.len() as f64;
    let wanted = by_ticks(items, streams, machine);
    prop_assume!(wanted.is_some(), "two copies are ready at the same time");
    for (n, (end, wanted)) in ends.iter().zip(&wanted.unwrap()).enumerate() {
        prop_assert!((end - wanted).abs() <= most, "work {}: {} for {}", n, end, wanted);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn ends_are_those_of_a_simulation_in_tiny_steps(
        items in prop::collection::vec(item(4, 0..8_u8), 1..14),
        engines in 1..3_u32,
        duplex in prop::sample::select(vec![0.6, 1.0]),
        memory in prop::sample::select(vec![f64::INFINITY, 1.3, 0.7]),
    ) {
        compare(&items, 4, Machine { memory, ..machine(engines, duplex) })?;
    }

    #[test]
    fn copies_that_queue_end_as_in_a_simulation_in_tiny_steps(
        items in prop::collection::vec(item(6, prop::sample::select(vec![4, 5, 7])), 6..12),
        engines in 1..3_u32,
    ) {
        compare(&items, 6, machine(engines, 1.0))?;
    }
}

/// The control: the oracle distinguishes machines.
#[test]
fn the_oracle_sees_a_link_that_is_not_divided() {
    let rows = |stream| Item {
        stream,
        gap: 0.0,
        work: Work::rows(&costs().gather, Direction::ToDevice, 40.0),
        after: Vec::new(),
    };
    let items = [rows(0), rows(1)];
    let ends = by_ticks(&items, 2, machine(1, 1.0)).unwrap();
    assert!(ends.iter().all(|end| (end - 80.0).abs() < 0.1), "{ends:?}");
    let double = Machine { link: [2.0, 1.0, 0.7], ..machine(1, 1.0) };
    assert!(by_ticks(&items, 2, double).unwrap().iter().all(|end| (end - 40.0).abs() < 0.1));
    assert_eq!(by_clock(&items, 2, machine(1, 1.0)), [80.0, 80.0]);
    // Of a memory of half the link's rate they get half of that each.
    let narrow = Machine { memory: 0.5, ..machine(1, 1.0) };
    assert!(by_ticks(&items, 2, narrow).unwrap().iter().all(|end| (end - 160.0).abs() < 0.1));
}
