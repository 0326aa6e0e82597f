//! Real processes: one end is a child of the test, which is killed or stopped at each phase of a request (`dying`). The
//! other end is the test's own. It learns of the loss, keeps nothing of the request, and serves the next one from the
//! same memory. A child that was stopped goes on while that request is under way, and spoils nothing.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay::transfer::fabric::SenderFabric;
use forebay::transfer::socket::Socket;
use forebay::transfer::socket::{Options, Token};
use forebay::transfer::{Reason, receiver, sender};
use forebay::{Error, Kind as Wrong};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::dying::{Dying, PHASES, Phase};
use crate::naive::Naive;
use crate::ranks::{Pages, Receives, Sends, memory};
use crate::rig::{Address, Way, connect, listen, path, until};

/// Gives a test's child process what it is to do.
const CHILD: &str = "FOREBAY_TEST_CHILD";
/// The instance of a sender.
const INSTANCE: u64 = 10;
/// Far longer than anything takes: it decides nothing.
const LONG: Duration = Duration::from_secs(60);

/// When a child's work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    /// Its request has come or gone whole.
    Done,
    /// As that, but it computes only when it is told to.
    Told,
    /// It has gone on after a signal, has learnt that its connection is lost, and is connected again.
    Anew,
    /// As that, and the sender's memory had other rows when it went on.
    Overwritten,
    /// It has gone on after a signal, and its request was given up at the other end.
    GivenUp,
}

const UNTILS: [Until; 5] = [Until::Done, Until::Told, Until::Anew, Until::Overwritten, Until::GivenUp];

/// What a child is told.
#[derive(Clone, Debug)]
struct Work {
    sends: bool,
    /// Where a sender connects to, and where a receiver over shared memory listens.
    at: String,
    secret: String,
    request: u64,
    /// A sender's instance.
    instance: u64,
    signal: Option<(Phase, Signal)>,
    until: Until,
}

impl Work {
    fn text(&self) -> String {
        let Work { sends, at, secret, request, instance, signal, until } = self;
        let signal = signal.map_or_else(String::new, |(phase, signal)| format!("{phase:?} {signal}"));
        format!("{sends}|{at}|{secret}|{request}|{instance}|{signal}|{until:?}")
    }

    /// Its own work, if this process is a child.
    fn of_child() -> Option<Work> {
        let told = std::env::var(CHILD).ok()?;
        let fields: Vec<&str> = told.split('|').collect();
        let [sends, at, secret, request, instance, signal, until] = fields[..] else { panic!("{told}") };
        let signal = signal.split_once(' ').map(|(phase, signal)| {
            let phase = PHASES.into_iter().find(|of| format!("{of:?}") == phase).unwrap();
            (phase, signal.parse().unwrap())
        });
        Some(Work {
            sends: sends == "true",
            at: at.to_owned(),
            secret: secret.to_owned(),
            request: request.parse().unwrap(),
            instance: instance.parse().unwrap(),
            signal,
            until: UNTILS.into_iter().find(|of| format!("{of:?}") == until).unwrap(),
        })
    }
}

/// A place from what it is shown as.
fn place(at: &str) -> Address {
    at.parse().map_or_else(|_| Address::Shm(at.into()), Address::Tcp)
}

fn shown(at: &Address) -> String {
    match at {
        Address::Tcp(address) => address.to_string(),
        Address::Shm(path) => path.display().to_string(),
    }
}

/// A secret of one case: ports are used again.
fn secret() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("a token of processes {} {}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn options(secret: &str, lost: Duration) -> Options {
    let token = Some(Token::new(secret.as_bytes()).unwrap());
    let (alive, opening) = (Duration::from_millis(100), Duration::from_secs(2));
    Options { token, alive, lost, opening, ..Options::default() }
}

/// Computes all layers, one after another, once the request is granted.
fn serve<F: SenderFabric>(sends: &mut Sends<F>, request: u64, now: Duration) {
    sends.poll(now);
    while sends.granted.contains(&request) && sends.compute() {
        sends.poll(now);
    }
}

/// A sender's child.
fn send(way: Way, work: &Work) {
    let memory = memory();
    let fabric = connect(way, options(&work.secret, LONG), memory.clone(), &[place(&work.at)]).unwrap();
    let fabric = Dying::new(fabric, work.signal);
    let mut sends = Sends::new(fabric, memory, work.instance, sender::Options::default());
    let start = Instant::now();
    sends.begin(work.request);
    if work.until == Until::Told {
        until("a grant", || {
            sends.poll(start.elapsed());
            !sends.granted.is_empty()
        });
        assert_eq!(std::io::stdin().read(&mut [0]).unwrap(), 1);
    }
    until("the end of a sender's work", || {
        serve(&mut sends, work.request, start.elapsed());
        sends.end.fabric.inner.wait(Duration::from_millis(5)).unwrap();
        let reason = sends.reason(work.request);
        match work.until {
            Until::Done | Until::Told => reason == Some(Reason::Done),
            Until::Anew | Until::Overwritten => sends.connected >= 2,
            Until::GivenUp => reason == Some(Reason::Aborted),
        }
    });
    if let (Until::Anew, Some((phase, _))) = (work.until, work.signal) {
        assert_eq!(sends.lost, 1);
        // The end that had come is taken before the loss.
        let done = if phase < Phase::Whole { Reason::PeerLost } else { Reason::Done };
        assert_eq!(sends.reason(work.request), (phase > Phase::Opening).then_some(done));
    }
    assert_eq!(sends.held(), 0);
}

/// A receiver's child.
fn receive(way: Way, work: &Work) {
    let at = (!work.at.is_empty()).then(|| place(&work.at));
    let (fabric, at) = listen(way, options(&work.secret, LONG), at.as_ref()).unwrap();
    println!("\nlistens|{}", shown(&at));
    let fabric = Naive::new(Dying::new(fabric, work.signal));
    let mut receives = Receives::new(fabric, receiver::Options::default());
    receives.end.fabric.grant(work.request);
    let (start, mut granted) = (Instant::now(), false);
    until("the end of a receiver's work", || {
        receives.poll(start.elapsed());
        granted = granted || receives.grant(work.request, work.instance, None).is_ok();
        receives.end.fabric.inner.inner.wait(Duration::from_millis(5)).unwrap();
        match work.until {
            Until::Anew | Until::Overwritten => receives.connected >= 2,
            _ => !receives.drained.is_empty(),
        }
    });
    let (whole, failed) = (&receives.whole, kinds(&receives.failed));
    let own = [(work.request, 0)];
    match work.signal {
        Some((Phase::Opening, _)) => assert_eq!((whole.len(), failed.len()), (0, 0)),
        // Rows that were on their way may all be there. Otherwise it has failed.
        Some((phase, _)) if phase < Phase::Whole && *whole != own => {
            assert_eq!((whole.len(), failed), (0, vec![Wrong::PeerLost]));
        }
        _ => assert_eq!((whole.as_slice(), failed), (&own[..], Vec::new())),
    }
    if work.until == Until::Overwritten {
        assert_eq!(receives.pages, Pages::default(), "rows were stored");
        // The control: a receiver that trusts notices has read another request's rows.
        assert!(receives.end.fabric.foreign > 0);
    }
    assert_eq!(receives.end.machine.quarantine().reached(), 0);
}

fn kinds(failed: &[(u64, Error)]) -> Vec<Wrong> {
    failed.iter().map(|(_, error)| error.kind()).collect()
}

/// Does a child's work, if this process is one.
fn is_child(way: Way) -> bool {
    let Some(work) = Work::of_child() else { return false };
    if work.sends {
        send(way, &work)
    } else {
        receive(way, &work)
    }
    true
}

/// A child, which is gone when this is.
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    /// Starts the test `name` as a child. Its process group is its own: if this process dies, the system ends a child
    /// that is stopped.
    fn start(name: &str, work: &Work) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("processes::{name}"), "--nocapture"])
            .env(CHILD, work.text())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Other { child, input, output: BufReader::new(output) }
    }

    /// Where a receiver's child listens.
    fn listens(&mut self) -> Address {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(at) = line.strip_prefix("listens|") {
                return place(at.trim_end());
            }
            line.clear();
        }
        panic!("a receiver's child does not listen");
    }

    fn go_on(&self) {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGCONT).unwrap();
    }

    fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        stat.rsplit_once(')').unwrap().1.trim_start().starts_with('T')
    }

    /// Whether it has ended; well, if it has.
    fn has_ended(&mut self) -> bool {
        let Some(status) = self.child.try_wait().unwrap() else { return false };
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        assert!(status.success(), "{status}: {said}");
        true
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Longer than a child's signs of life come late on a busy machine.
const LOST: Duration = Duration::from_secs(2);

/// A sender gets a signal at a phase; the receiver is this process.
fn sender_dies(way: Way, name: &str, (phase, signal): (Phase, Signal)) {
    let case = format!("{phase:?} {signal}");
    let secret = secret();
    let (fabric, at) = listen(way, options(&secret, LOST), None).unwrap();
    let mut receives = Receives::new(fabric, receiver::Options::default());
    let start = Instant::now();
    let mut work = Work {
        sends: true,
        at: shown(&at),
        secret,
        request: 1,
        instance: INSTANCE,
        signal: Some((phase, signal)),
        until: Until::Anew,
    };
    let mut old = Other::start(name, &work);
    let mut granted = phase == Phase::Opening;
    until(&format!("{case}: the loss of a sender"), || {
        receives.poll(start.elapsed());
        granted = granted || receives.grant(1, INSTANCE, None).is_ok();
        receives.end.fabric.wait(Duration::from_millis(5)).unwrap();
        // A child that is stopped while it opens may never have been connected here.
        receives.lost > 0 || (phase == Phase::Opening && receives.end.fabric.failure().is_some())
    });
    match phase {
        Phase::Opening => assert!(receives.failed.is_empty()),
        Phase::Whole | Phase::Drained => assert_eq!(receives.whole, [(1, 0)], "{case}"),
        _ => assert_eq!(kinds(&receives.failed), [Wrong::PeerLost], "{case}"),
    }
    assert_eq!(receives.drained, vec![1; usize::from(phase > Phase::Opening)], "{case}");
    assert_eq!(receives.end.machine.quarantine().reached(), 0);

    (work.request, work.instance) = (2, INSTANCE + 1);
    (work.signal, work.until) = (None, Until::Done);
    let mut fresh = Other::start(name, &work);
    until(&format!("{case}: a successor"), || {
        receives.poll(start.elapsed());
        receives.grant(2, INSTANCE + 1, None).is_ok()
    });
    let resumed = signal == Signal::SIGSTOP;
    if resumed {
        old.go_on();
    }
    until(&format!("{case}: the successor's request"), || {
        receives.poll(start.elapsed());
        receives.end.fabric.wait(Duration::from_millis(5)).unwrap();
        receives.drained.contains(&2) && fresh.has_ended() && (!resumed || old.has_ended())
    });
    assert_eq!(receives.whole.last(), Some(&(2, 0)), "{case}");
    assert_eq!(receives.pages.wrong(2), 0, "{case}: rows of another request");
    assert!(receives.failed.len() <= 1, "{case}: {:?}", receives.failed);
}

/// A receiver gets a signal at a phase; the sender is this process. `at` says where the next receiver is to listen, if
/// the system does not choose that.
fn receiver_dies(way: Way, name: &str, at: fn() -> String, (phase, signal): (Phase, Signal)) {
    let case = format!("{phase:?} {signal}");
    let secret = secret();
    let mut work = Work {
        sends: false,
        at: at(),
        secret: secret.clone(),
        request: 1,
        instance: INSTANCE,
        signal: Some((phase, signal)),
        until: Until::Anew,
    };
    let mut old = Other::start(name, &work);
    let place = old.listens();
    let memory = memory();
    let fabric = connect(way, options(&secret, LOST), memory.clone(), std::slice::from_ref(&place)).unwrap();
    let mut sends = Sends::new(fabric, memory, INSTANCE, sender::Options::default());
    let start = Instant::now();
    sends.begin(1);
    until(&format!("{case}: the loss of a receiver"), || {
        serve(&mut sends, 1, start.elapsed());
        sends.end.fabric.wait(Duration::from_millis(5)).unwrap();
        sends.lost > 0 || (phase == Phase::Opening && sends.end.fabric.failure().is_some())
    });
    match phase {
        Phase::Opening => {
            assert_eq!(sends.reason(1), None, "{case}");
            sends.end.machine.abort(1).unwrap();
            sends.poll(start.elapsed());
            assert_eq!(sends.reason(1), Some(Reason::Aborted));
        }
        Phase::Drained => assert_eq!(sends.reason(1), Some(Reason::Done), "{case}"),
        _ => assert_eq!(sends.reason(1), Some(Reason::PeerLost), "{case}"),
    }
    assert_eq!(sends.held(), 0, "{case}");

    // The successor of one that was killed takes its place. Its end is waited for here.
    let mut stopped = (signal == Signal::SIGSTOP).then_some(old);
    let next = if stopped.is_some() { at() } else { shown(&place) };
    (work.at, work.request, work.signal, work.until) = (next, 2, None, Until::Done);
    let mut fresh = Other::start(name, &work);
    sends.end.fabric.add(fresh.listens()).unwrap();
    sends.begin(2);
    until(&format!("{case}: a successor's grant"), || {
        sends.poll(start.elapsed());
        sends.granted.contains(&2)
    });
    stopped.iter().for_each(Other::go_on);
    until(&format!("{case}: the successor's request"), || {
        serve(&mut sends, 2, start.elapsed());
        sends.end.fabric.wait(Duration::from_millis(5)).unwrap();
        let ended = sends.reason(2).is_some() && fresh.has_ended();
        ended && stopped.as_mut().is_none_or(Other::has_ended)
    });
    // The child has compared its rows.
    assert_eq!((sends.reason(2), sends.held()), (Some(Reason::Done), 0), "{case}");
}

/// A receiver is stopped with notices on their way, and lost. The sender's memory is another request's when it goes on
/// and reads what the notices name.
#[test]
fn notices_of_memory_that_has_other_rows_by_now_give_none() {
    if is_child(Way::Shm) {
        return;
    }
    let name = "notices_of_memory_that_has_other_rows_by_now_give_none";
    let at = || path().display().to_string();
    let secret = secret();
    let signal = Some((Phase::FirstLayer, Signal::SIGSTOP));
    let mut work = Work {
        sends: false,
        at: at(),
        secret: secret.clone(),
        request: 1,
        instance: INSTANCE,
        signal,
        until: Until::Overwritten,
    };
    let mut old = Other::start(name, &work);
    let (place, memory) = (old.listens(), memory());
    let fabric =
        connect(Way::Shm, options(&secret, LOST), memory.clone(), std::slice::from_ref(&place)).unwrap();
    let mut sends = Sends::new(fabric, memory, INSTANCE, sender::Options::default());
    let start = Instant::now();
    sends.begin(1);
    until("the loss of a receiver", || {
        serve(&mut sends, 1, start.elapsed());
        sends.lost > 0
    });
    assert_eq!((sends.reason(1), sends.held(), sends.computes), (Some(Reason::PeerLost), 0, None));
    sends.begin(2);
    while sends.compute() {}
    old.go_on();
    until("the end of the old receiver's work", || {
        sends.poll(start.elapsed());
        old.has_ended()
    });
    (work.at, work.request, work.signal, work.until) = (at(), 2, None, Until::Done);
    let mut fresh = Other::start(name, &work);
    sends.end.fabric.add(fresh.listens()).unwrap();
    until("the next request", || {
        sends.poll(start.elapsed());
        sends.reason(2).is_some() && fresh.has_ended()
    });
    assert_eq!((sends.reason(2), sends.held()), (Some(Reason::Done), 0));
}

/// All phases at the same time, each first with one signal and then with the other.
fn at_all_phases(dies: impl Fn((Phase, Signal)) + Sync) {
    std::thread::scope(|scope| {
        for phase in PHASES {
            let dies = &dies;
            scope.spawn(move || {
                dies((phase, Signal::SIGKILL));
                dies((phase, Signal::SIGSTOP));
            });
        }
    });
}

#[test]
fn a_sender_over_tcp_is_killed_or_stopped_at_each_phase() {
    if !is_child(Way::Tcp) {
        let name = "a_sender_over_tcp_is_killed_or_stopped_at_each_phase";
        at_all_phases(|at| sender_dies(Way::Tcp, name, at));
    }
}

#[test]
fn a_sender_over_shared_memory_is_killed_or_stopped_at_each_phase() {
    if !is_child(Way::Shm) {
        let name = "a_sender_over_shared_memory_is_killed_or_stopped_at_each_phase";
        at_all_phases(|at| sender_dies(Way::Shm, name, at));
    }
}

#[test]
fn a_receiver_over_tcp_is_killed_or_stopped_at_each_phase() {
    if !is_child(Way::Tcp) {
        let name = "a_receiver_over_tcp_is_killed_or_stopped_at_each_phase";
        at_all_phases(|at| receiver_dies(Way::Tcp, name, String::new, at));
    }
}

#[test]
fn a_receiver_over_shared_memory_is_killed_or_stopped_at_each_phase() {
    if !is_child(Way::Shm) {
        let name = "a_receiver_over_shared_memory_is_killed_or_stopped_at_each_phase";
        at_all_phases(|at| receiver_dies(Way::Shm, name, || path().display().to_string(), at));
    }
}

/// A sender is stopped as it tells a layer. Its request is given up here, and its connection stays. It goes on when its
/// pages are another request's, and tells the layer, whose fence is over.
fn old_rows_come_late(way: Way, name: &str) {
    let secret = secret();
    let (fabric, at) = listen(way, options(&secret, LONG), None).unwrap();
    let options = receiver::Options { patience: LONG, ..receiver::Options::default() };
    let mut receives = Receives::new(Naive::new(fabric), options);
    let start = Instant::now();
    let mut work = Work {
        sends: true,
        at: shown(&at),
        secret,
        request: 1,
        instance: INSTANCE,
        signal: Some((Phase::Halfway, Signal::SIGSTOP)),
        until: Until::GivenUp,
    };
    let mut old = Other::start(name, &work);
    let mut fence = None;
    until("a sender that is stopped", || {
        receives.poll(start.elapsed());
        fence = fence.or_else(|| receives.grant(1, INSTANCE, None).ok());
        old.is_stopped()
    });
    receives.end.machine.abort(fence.unwrap()).unwrap();

    (work.request, work.instance) = (2, INSTANCE + 1);
    (work.signal, work.until) = (None, Until::Told);
    let mut fresh = Other::start(name, &work);
    until("a successor", || {
        receives.poll(start.elapsed());
        receives.grant(2, INSTANCE + 1, None).is_ok()
    });
    receives.end.fabric.grant(2);
    old.go_on();
    until("the end of the old sender's work", || {
        receives.poll(start.elapsed());
        old.has_ended()
    });
    fresh.input.write_all(&[1]).unwrap();
    until("the successor's request", || {
        receives.poll(start.elapsed());
        receives.drained.contains(&2) && fresh.has_ended()
    });
    assert_eq!((&receives.drained, &receives.whole), (&vec![1, 2], &vec![(2, 0)]));
    assert_eq!(receives.pages.wrong(2), 0);
    // The control: a receiver that counts rows has taken those of the old request.
    let naive = &receives.end.fabric.whole;
    assert!(naive.len() == 1 && naive[0].0 == 2 && naive[0].1 > 0, "{naive:?}");
}

#[test]
fn rows_of_a_sender_that_was_stopped_are_not_taken_for_those_of_the_next_request_over_tcp() {
    if !is_child(Way::Tcp) {
        let name = "rows_of_a_sender_that_was_stopped_are_not_taken_for_those_of_the_next_request_over_tcp";
        old_rows_come_late(Way::Tcp, name);
    }
}

#[test]
fn rows_of_a_sender_that_was_stopped_are_not_taken_for_those_of_the_next_request_over_memory() {
    if !is_child(Way::Shm) {
        let name =
            "rows_of_a_sender_that_was_stopped_are_not_taken_for_those_of_the_next_request_over_memory";
        old_rows_come_late(Way::Shm, name);
    }
}
