//! Real processes: memory that one gives the other, and one that is killed, stopped, silent, or of another plan.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use forebay::os::{self, Map, NoFaults, Protection, Request};
use forebay::peer::{Event, Hello, Limits, Link};
use forebay::{Error, Kind};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::frames::OWN;

/// Gives a test's child process its role, and the socket to connect to.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// How long an answer may take. Far longer than any does: it ends a test that hangs, and decides nothing else.
const PATIENCE: Duration = Duration::from_secs(120);
const BYTES: u64 = 1 << 20;

/// What the other process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Gives memory that is to be read, changes it when it is told to, and ends when it is told to.
    Gives,
    /// Connects and says nothing.
    Silent,
    /// Has another plan.
    Disagrees,
}

const ROLES: [Role; 3] = [Role::Gives, Role::Silent, Role::Disagrees];

/// Limits that no busy machine exceeds.
fn patient() -> Limits {
    Limits { hello: PATIENCE, lost: PATIENCE, ..Limits::default() }
}

fn link(socket: UnixStream, own: Hello, limits: Limits) -> Link {
    Link::new(socket, own, limits, Arc::new(NoFaults)).unwrap()
}

/// The next event, or the error that ends the session.
fn event(link: &mut Link) -> Result<Event<std::os::fd::OwnedFd>, Error> {
    link.event(PATIENCE).map(|event| event.expect("an event in time"))
}

/// The child's part. Returns whether this process is the child.
fn is_child() -> bool {
    let Ok(told) = std::env::var(CHILD) else { return false };
    let (role, path) = told.split_once(':').unwrap();
    let role = ROLES.into_iter().find(|it| format!("{it:?}") == role).unwrap();
    let socket = UnixStream::connect(path).unwrap();
    let own = Hello { rank: 0, ..OWN };
    match role {
        Role::Gives => give(link(socket, own, patient())),
        // Until it is killed, or the test has gone.
        Role::Silent => {
            let _ = std::io::Read::read(&mut &socket, &mut [0; 4096]);
            std::thread::sleep(PATIENCE);
        }
        Role::Disagrees => {
            let mut link = link(socket, Hello { plan: [0; 32], ..own }, patient());
            assert_eq!(event(&mut link).unwrap_err().place(), "a process with another plan");
        }
    }
    true
}

fn give(mut link: Link) {
    assert!(matches!(event(&mut link).unwrap(), Event::Hello(_)));
    let request =
        Request { bytes: BYTES, huge: false, populate: false, lock: false, node: None, shared: true };
    let map = Map::new(&request, &NoFaults).unwrap().0;
    map.fill(0, BYTES, 1).unwrap();
    let exported = map.export(Protection::Read, &NoFaults).unwrap();
    link.send(&map.len().to_le_bytes(), Some(exported)).unwrap();
    loop {
        match link.event(Duration::from_millis(100)).unwrap() {
            Some(Event::Message { bytes, .. }) => {
                map.fill(0, BYTES, bytes[0]).unwrap();
                link.send(&bytes, None).unwrap();
            }
            Some(Event::Ended) => link.end().unwrap(),
            Some(Event::Hello(_)) => panic!("a second hello"),
            None if link.is_over() => return,
            None => {}
        }
    }
}

/// A child of the test `name` in a role, and the socket to it.
struct Other {
    child: Child,
    socket: Option<UnixStream>,
    path: PathBuf,
}

impl Other {
    fn start(name: &str, role: Role) -> Other {
        // Tests run at the same time, each with a socket of its own.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("forebay-peer-{}-{next}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("processes::{name}"), "--nocapture"])
            .env(CHILD, format!("{role:?}:{}", path.display()))
            .spawn()
            .unwrap();
        let socket = Some(listener.accept().unwrap().0);
        Other { child, socket, path }
    }

    fn link(&mut self, limits: Limits) -> Link {
        link(self.socket.take().unwrap(), OWN, limits)
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    fn ends_well(&mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.path);
    }
}

fn all_are(map: &Map, value: u8) {
    let mut bytes = vec![0; BYTES as usize];
    map.copy_out(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == value), "not all bytes are {value}");
}

/// The memory of the other process, adopted.
fn adopt(link: &mut Link, other: &Other) -> Map {
    let Event::Hello(theirs) = event(link).unwrap() else { panic!("no hello") };
    assert_eq!((theirs.rank, link.credentials().process.unsigned_abs()), (0, other.child.id()));
    let Event::Message { bytes, descriptor } = event(link).unwrap() else { panic!("no message") };
    let length = u64::from_le_bytes(bytes.try_into().unwrap());
    Map::adopt(descriptor.unwrap(), length, Protection::Read, &NoFaults).unwrap()
}

#[test]
fn memory_that_a_process_gives_is_read_by_the_other() {
    if is_child() {
        return;
    }
    let mut other = Other::start("memory_that_a_process_gives_is_read_by_the_other", Role::Gives);
    let mut link = other.link(patient());
    let map = adopt(&mut link, &other);
    all_are(&map, 1);
    for value in [7, 8] {
        link.send(&[value], None).unwrap();
        assert!(matches!(event(&mut link).unwrap(), Event::Message { bytes, .. } if bytes == [value]));
        all_are(&map, value);
    }
    assert_eq!(map.fill(0, 1, 9).unwrap_err().kind(), Kind::InvalidState);
    link.end().unwrap();
    assert!(matches!(event(&mut link).unwrap(), Event::Ended));
    assert!(link.event(PATIENCE).unwrap().is_none() && link.is_over());
    other.ends_well();
}

/// The pages of a dead process live on: copies from them succeed, and only the session tells.
#[test]
fn a_killed_process_is_a_lost_peer_whose_memory_stays() {
    if is_child() {
        return;
    }
    let mut other = Other::start("a_killed_process_is_a_lost_peer_whose_memory_stays", Role::Gives);
    let mut link = other.link(patient());
    let map = adopt(&mut link, &other);
    other.signal(Signal::SIGKILL);
    let error = event(&mut link).unwrap_err();
    assert_eq!((error.kind(), error.number("rank")), (Kind::PeerLost, Some(0)));
    assert_eq!(link.send(&[1], None).unwrap_err(), error);
    all_are(&map, 1);
}

/// A process that hangs keeps its connection: only its missing signs of life tell.
#[test]
fn a_stopped_process_is_a_lost_peer() {
    if is_child() {
        return;
    }
    let mut other = Other::start("a_stopped_process_is_a_lost_peer", Role::Gives);
    let mut link = other.link(Limits {
        hello: PATIENCE,
        interval: Duration::from_millis(50),
        lost: Duration::from_secs(2),
        ..Limits::default()
    });
    let map = adopt(&mut link, &other);
    other.signal(Signal::SIGSTOP);
    let error = event(&mut link).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::PeerLost, "no sign of life"));
    all_are(&map, 1);
}

#[test]
fn a_process_that_ends_or_stays_silent_before_hello_is_told_apart() {
    if is_child() {
        return;
    }
    let name = "a_process_that_ends_or_stays_silent_before_hello_is_told_apart";
    let mut silent = Other::start(name, Role::Silent);
    let mut link = silent.link(Limits { hello: Duration::from_millis(100), ..Limits::default() });
    let error = event(&mut link).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::TimedOut, "the other side's hello"));
    drop(silent);
    let mut killed = Other::start(name, Role::Silent);
    let mut link = killed.link(patient());
    killed.signal(Signal::SIGKILL);
    let error = event(&mut link).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::PeerLost, "the connection was closed"));
}

#[test]
fn processes_of_another_plan_refuse_each_other() {
    if is_child() {
        return;
    }
    let mut other = Other::start("processes_of_another_plan_refuse_each_other", Role::Disagrees);
    let mut link = other.link(patient());
    let error = event(&mut link).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, "a process with another plan"));
    // The other side finds the same, once it has this side's hello.
    other.ends_well();
}

/// A process that may open no further file cannot take a descriptor. That is its own limit, and it says so; the other
/// side has broken nothing.
#[test]
fn a_process_at_its_limit_of_open_files_says_so() {
    const NAME: &str = "processes::a_process_at_its_limit_of_open_files_says_so";
    if std::env::var(CHILD).is_err() {
        // A limit of a process of its own, because all tests of this one share theirs.
        let script = "ulimit -n 64 && exec \"$0\" --exact --nocapture \"$@\"";
        let mut child = Command::new("sh");
        child.args(["-c", script]).arg(std::env::current_exe().unwrap()).arg(NAME);
        assert!(child.env(CHILD, "limit").status().unwrap().success());
        return;
    }
    let (a, b) = UnixStream::pair().unwrap();
    let null = File::open("/dev/null").unwrap();
    let mut open = Vec::new();
    let all = loop {
        match File::open("/dev/null") {
            Ok(file) => open.push(file),
            Err(error) => break error,
        }
    };
    assert_eq!(all.raw_os_error(), Some(libc::EMFILE));
    os::send(&a, b"x", Some(null.as_fd()), &NoFaults).unwrap();
    let error = os::receive(&b, &mut [0; 8], &NoFaults).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::OsRefused, "recvmsg: Too many open files"));
    assert!(error.advice().contains("ulimit -n"), "{error}");
    // With room for one it is taken.
    open.pop();
    os::send(&a, b"y", Some(null.as_fd()), &NoFaults).unwrap();
    assert!(os::receive(&b, &mut [0; 8], &NoFaults).unwrap().unwrap().descriptor.is_some());
}
