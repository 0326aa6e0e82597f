//! Aborts whose pages and memory are used again at once, and messages that are lost, over slow fabrics.

use std::time::Duration;

use forebay::Kind as Error;
use forebay::transfer::{Fence, Reason};

use crate::ranks::LAYERS;
use crate::rig::Way;
use crate::slowed::{Draw, World};

const RESEND: Duration = Duration::from_millis(200);
/// Kinds of frames.
const GRANT: u8 = 2;
const NOTICE: u8 = 3;
const ANSWER: u8 = 4;
const END: u8 = 6;
const FAILED: u8 = 7;
const DRAINED: u8 = 8;
const KNOWN: u8 = 9;

/// What rounds have seen.
#[derive(Debug, Default)]
struct Seen {
    /// Rounds with notices on their way when the abort was said.
    crossed: u32,
    /// The longest time until the other end knew of an abort, in milliseconds of the test's time.
    known: u64,
}

/// Requests that one end aborts. The other requests take their pages, and their memory at the sender, at once.
struct Rounds {
    world: World,
    draw: Draw,
    seen: Seen,
}

impl Rounds {
    fn new(way: Way, slow: u64, seed: u64) -> Rounds {
        let world = World::new(way, slow, RESEND, seed);
        Rounds { world, draw: Draw(seed), seen: Seen::default() }
    }

    /// A request that has been told in part.
    fn begin(&mut self, request: u64) -> Fence {
        let fence = self.world.grant(request);
        self.world.sends.begin(request);
        let layers = 1 + self.draw.below(u64::from(LAYERS) - 1) as u32;
        self.world.limit = Some((request, layers));
        self.world.until("a grant", |world| world.sends.granted.contains(&request));
        let more = self.draw.below(80);
        self.world.pass(more);
        fence
    }

    /// One end aborts the request `old`, and from then on each end gives what it had to `new` when it may.
    fn abort(&mut self, (old, new): (u64, u64), fence: Fence, by_sender: bool) {
        let Rounds { world, seen, .. } = self;
        seen.crossed += u32::from(world.roads()[0].waiting(NOTICE) > 0);
        let start = world.clock.get();
        match by_sender {
            true => {
                world.sends.end.machine.abort(old).unwrap();
                world.sends.begin(new);
            }
            false => {
                world.receives.end.machine.abort(fence).unwrap();
                world.grant(new);
            }
        }
        let mut known = None;
        world.until("the new request", |world| {
            let knows = match by_sender {
                true => world.receives.has_failed(old),
                false => world.sends.reason(old).is_some(),
            };
            if knows && known.is_none() {
                known = Some(world.clock.get() - start);
                match by_sender {
                    true => drop(world.grant(new)),
                    false => world.sends.begin(new),
                }
            }
            let drained = [old, new].iter().all(|of| world.receives.drained.contains(of));
            drained && world.sends.reason(new).is_some()
        });
        seen.known = seen.known.max(known.unwrap());
        let ended = (world.sends.reason(old), world.sends.reason(new));
        assert_eq!(ended, (Some(Reason::Aborted), Some(Reason::Done)));
        assert_eq!(world.receives.whole, [(new, 0)], "rows of another request");
        assert_eq!(world.receives.pages.wrong(new), 0);
        let failed: Vec<_> = world.receives.failed.iter().map(|(of, error)| (*of, error.kind())).collect();
        assert_eq!(failed, if by_sender { vec![(old, Error::Cancelled)] } else { Vec::new() });
        world.check_nothing_left();
        world.sends.ended.clear();
        world.sends.granted.clear();
        world.receives.whole.clear();
        world.receives.failed.clear();
        world.receives.drained.clear();
    }

    fn round(&mut self, number: u64) {
        let (old, new) = (2 * number + 1, 2 * number + 2);
        let fence = self.begin(old);
        // Now and then the first word of the abort is lost.
        if number % 10 < 2 {
            let [to, back] = self.world.roads();
            to.loses.push((FAILED, 1));
            back.loses.push((END, 1));
        }
        self.abort((old, new), fence, number.is_multiple_of(2));
        self.world.roads().into_iter().for_each(|way| way.loses.clear());
    }
}

fn rounds() -> u64 {
    if std::env::var_os("FOREBAY_SOAK").is_some() { 20_000 } else { 1000 }
}

fn abort_then_reuse(way: Way) {
    let mut rounds = Rounds::new(way, 100, 7);
    let count = self::rounds();
    (0..count).for_each(|number| rounds.round(number));
    let Seen { crossed, known } = rounds.seen;
    println!("{count} aborts, {crossed} with notices on their way, known after at most {known} ms");
    assert!(u64::from(crossed) > count / 4, "{crossed}");
    assert!(known <= 1000, "{known} ms");
    // The control: the same frames give a receiver that counts rows another request's.
    let naive = &rounds.world.receives.end.fabric.whole;
    let wrong = naive.iter().filter(|(_, wrong)| *wrong > 0).count();
    println!("the naive receiver was wrong {wrong} times of {}", naive.len());
    assert!(wrong as u64 > count / 4, "{wrong} of {}", naive.len());
}

#[test]
fn pages_and_memory_of_an_aborted_request_are_used_again_at_once_over_tcp() {
    abort_then_reuse(Way::Tcp);
}

#[test]
fn pages_and_memory_of_an_aborted_request_are_used_again_at_once_over_shared_memory() {
    abort_then_reuse(Way::Shm);
}

/// The naive receiver is right where no request ends early, so it is not wrong by its own fault.
fn nothing_is_aborted(way: Way) {
    let mut world = World::new(way, 100, RESEND, 3);
    for request in 1..=20 {
        world.grant(request);
        world.sends.begin(request);
        world.until("a whole request", |world| {
            world.receives.drained.contains(&request) && world.sends.reason(request).is_some()
        });
        assert_eq!(world.sends.reason(request), Some(Reason::Done));
        world.check_nothing_left();
    }
    let all: Vec<_> = (1..=20).map(|request| (request, 0)).collect();
    assert_eq!((&world.receives.whole, &world.receives.end.fabric.whole), (&all, &all));
}

#[test]
fn a_naive_receiver_is_right_where_nothing_is_aborted() {
    nothing_is_aborted(Way::Tcp);
    nothing_is_aborted(Way::Shm);
}

/// A request of which the next frames of a kind are lost. Returns whether it is whole, and whether both ends are done
/// with it, within a minute of the test's time.
fn with_lost(way: Way, (kind, times): (u8, u32), resend: Duration) -> (bool, bool) {
    let mut world = World::new(way, 20, resend, 5);
    world.roads().into_iter().for_each(|way| way.loses.push((kind, times)));
    let fence = world.grant(1);
    world.sends.begin(1);
    if kind == FAILED {
        world.limit = Some((1, 2));
        world.until("rows", |world| world.sends.granted == [1]);
        world.sends.end.machine.abort(1).unwrap();
    }
    let start = world.clock.get();
    let done =
        world.holds_within(60_000, |world| world.receives.drained == [1] && world.sends.reason(1).is_some());
    if done {
        let lost = world.roads().into_iter().any(|way| way.loses[0].1 < times);
        assert!(lost, "nothing of kind {kind} was lost");
        println!("kind {kind}, lost {times} times: done after {} ms", world.clock.get() - start);
        world.check_nothing_left();
    }
    assert!(world.receives.whole.iter().all(|whole| *whole == (1, 0)), "{fence:?}");
    (world.receives.is_whole(1), done)
}

fn lost(way: Way) {
    let hour = Duration::from_secs(3600);
    for kind in [GRANT, NOTICE, ANSWER, END, FAILED, DRAINED, KNOWN] {
        for times in [1, 2, 4] {
            let whole = with_lost(way, (kind, times), RESEND);
            assert_eq!(whole, (kind != FAILED, true), "kind {kind}, {times} times");
        }
        // The control: an end that does not ask again. An answer and *known* are not missed where all else comes.
        let (whole, done) = with_lost(way, (kind, 1), hour);
        assert_eq!(whole, ![GRANT, NOTICE, FAILED].contains(&kind), "kind {kind}");
        assert_eq!(done, [ANSWER, KNOWN].contains(&kind), "kind {kind}");
    }
}

#[test]
fn a_lost_message_is_recovered_by_asking() {
    lost(Way::Tcp);
    lost(Way::Shm);
}

/// Of all frames but hellos a third is lost, each way.
fn a_third_is_lost(way: Way) {
    let mut world = World::new(way, 20, RESEND, 11);
    world.roads().into_iter().for_each(|way| way.chance = 33);
    for request in 1..=30 {
        let fence = world.grant(request);
        world.sends.begin(request);
        let aborts = request % 3 == 0;
        if aborts {
            world.limit = Some((request, 2));
            world.until("a grant", |world| world.sends.granted.contains(&request));
            match request % 2 {
                0 => world.sends.end.machine.abort(request).unwrap(),
                _ => world.receives.end.machine.abort(fence).unwrap(),
            }
        }
        world.until("the end at both", |world| {
            world.receives.drained.contains(&request) && world.sends.reason(request).is_some()
        });
        let whole = world.receives.whole.contains(&(request, 0));
        assert_eq!(whole, !aborts, "request {request}: {:?}", world.receives.failed);
        // What crossed the end comes to rest.
        world.pass(60_000);
        world.check_nothing_left();
    }
    assert_eq!(world.receives.whole.len(), 20);
}

#[test]
fn requests_become_whole_though_a_third_of_all_messages_is_lost() {
    a_third_is_lost(Way::Tcp);
    a_third_is_lost(Way::Shm);
}
