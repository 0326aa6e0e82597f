//! The body of the fuzz target `update_bytes`, which `tests/update.rs` replays.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{self, Call, Faults, Map, NoFaults, Protection, Request};
use forebay::peer::{Hello, Limits, Links};
use forebay::weights::{Border, Group, LayerPlan, Outcome, Place, Plan, Pulls, Windows};
use forebay::{Error, Kind};

use crate::frames::{frame, hello};
use crate::windows::{MODEL, PATIENCE, Rank, expected, filler, layers, sharding, stamp_of};

/// Far longer than any call of a run takes.
const BOUND: Duration = Duration::from_secs(20);
const STEP: u64 = 5;
const READY: u64 = 1 << 63 | STEP;
/// Layers of the update.
const LAYERS: [usize; 4] = [0, 1, 3, 4];
/// The layer that the plan keeps resident.
const RESIDENT: usize = 0;

fn plan(rank: u32) -> Plan {
    let grain = HostDevice::new(HostOptions::default()).granularity();
    let bytes = [vec![3 * grain], vec![grain, 90], vec![2 * grain], vec![grain], vec![5 * grain]];
    let plan = Plan::new(&layers(&bytes), Group { id: 7, rank, ranks: 2 }, &sharding(grain)).unwrap();
    // One that every rank has whole is among those of the update.
    assert!(plan.layers()[RESIDENT].place == Place::Resident && plan.sharded() == 4);
    plan
}

/// Memory of these bytes that others may read, or write too.
fn memory(bytes: &[u8], protection: Protection) -> OwnedFd {
    let bytes_long = bytes.len() as u64;
    let request =
        Request { bytes: bytes_long, huge: false, populate: false, lock: false, node: None, shared: true };
    let map = Map::new(&request, &NoFaults).unwrap().0;
    map.copy_in(0, bytes).unwrap();
    map.export(protection, &NoFaults).unwrap()
}

/// What the other side says of a layer: the bytes of its part with the gaps, and their digest; no bytes of one that
/// every rank has whole.
fn part(plan: &Plan, layer: &LayerPlan, rank: u32, version: u32) -> (Vec<u8>, [u8; 32]) {
    let pages = plan.part(layer.layer, rank).unwrap();
    let own: Range<u64> = pages.start * plan.grain()..pages.end * plan.grain();
    let resident = layer.place == Place::Resident;
    let rank = if resident { 0 } else { rank };
    let bytes: Vec<u8> = own.clone().map(|at| stamp_of(rank, version, layer.layer, at)).collect();
    let mut hash = blake3::Hasher::new();
    for tensor in layer.layout.tensors() {
        let (from, to) = (tensor.offset.max(own.start), (tensor.offset + tensor.bytes).min(own.end));
        if from < to {
            hash.update(&bytes[(from - own.start) as usize..(to - own.start) as usize]);
        }
    }
    (if resident { Vec::new() } else { bytes }, *hash.finalize().as_bytes())
}

/// A message of an honest rank: its kind, layer, digest and version, and the memory that it gives.
#[derive(Clone)]
struct Honest {
    kind: u32,
    layer: u32,
    length: u64,
    digest: [u8; 32],
    version: Option<u32>,
    memory: Vec<u8>,
    /// Whether others may write the memory.
    written: bool,
}

impl Honest {
    fn encode(&self) -> Vec<u8> {
        let version = self.version.map(u32::to_le_bytes);
        let parts: [&[u8]; 5] = [
            &self.kind.to_le_bytes(),
            &self.layer.to_le_bytes(),
            &self.length.to_le_bytes(),
            &self.digest,
            version.as_ref().map_or(&[], |version| version),
        ];
        parts.concat()
    }
}

/// How far the rank is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    Exchange,
    Commit,
}

/// The other side. Whenever the rank has nothing to do but to wait, it does one thing, and a byte of `script` says
/// how it differs from what an honest rank would do. Behind the script it is honest, and it ends when it has
/// nothing to say.
struct Other {
    script: Vec<u8>,
    socket: Option<UnixStream>,
    phase: Phase,
    say: Vec<Honest>,
    rank: u32,
    /// The memory of the decision.
    words: Option<File>,
    /// Whether everything so far was what an honest rank says; and whether something was that may not be taken.
    honest: bool,
    broken: bool,
    /// Whether memory or digests were lies, which only reading finds.
    lies: bool,
}

/// The other side as what is asked before each call of the rank.
struct Asked(Mutex<Other>);

impl std::fmt::Debug for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Asked")
    }
}

impl Faults for Asked {
    fn before(&self, call: Call) -> Option<i32> {
        if call == Call::Poll {
            self.0.lock().unwrap().act();
        }
        None
    }
}

impl Other {
    fn act(&mut self) {
        if self.phase == Phase::Idle {
            return;
        }
        self.hear();
        let choice = if self.script.is_empty() { 0 } else { self.script.remove(0) };
        match self.phase {
            Phase::Commit => self.decide(choice),
            _ if self.say.is_empty() => self.close(),
            _ => {
                let next = self.say.remove(0);
                self.tell(next, choice % 24, choice / 24);
            }
        }
    }

    /// Reads what the rank says. The first memory that it gives in an update is that of the decision.
    fn hear(&mut self) {
        let Some(socket) = &self.socket else { return };
        let mut buffer = [0; 1 << 14];
        while let Ok(Some(received)) = os::receive(socket, &mut buffer, &NoFaults) {
            let begins = |it: &[u8]| it[..5] == [52, 0, 0, 0, 3] && it[8..] == [16, 0, 0, 0];
            let update = buffer[..received.bytes].windows(12).any(begins);
            if let Some(given) = received.descriptor.filter(|_| update && self.words.is_none()) {
                self.words = Some(File::from(given));
            }
        }
    }

    fn close(&mut self) {
        (self.socket, self.honest) = (None, false);
        self.broken |= self.phase == Phase::Exchange;
    }

    fn write(&self, bytes: &[u8], with: Option<&OwnedFd>) {
        // The rank may have ended the session.
        let _ = self.socket.as_ref().map(|it| os::send(it, bytes, with.map(AsFd::as_fd), &NoFaults));
    }

    /// Says a message, changed as `how` says.
    fn tell(&mut self, honest: Honest, how: u8, much: u8) {
        let (mut said, mut given) = (honest.clone(), None);
        let grain = os::page_size();
        match how {
            8 => said.kind = [1, 16, 17, 18, 0, 19, u32::MAX, 2][usize::from(much) % 8],
            9 => said.layer ^= 1 + u32::from(much),
            10 => said.length += grain * u64::from(1 + much),
            11 => said.length = 0,
            12 => said.digest[usize::from(much)] ^= 1,
            13 => said.version = said.version.map(|version| version - 1),
            14 => said.version = said.version.map(|version| version + 1 + u32::from(much)),
            15 if !said.memory.is_empty() => said.memory.clear(),
            16 => said.memory.resize(said.memory.len() + grain as usize, 7),
            17 => given = Some(File::open("/dev/null").unwrap().into()),
            18 => {
                let file = File::options().read(true).write(true).open("/proc/self/exe");
                given = Some(file.or_else(|_| File::open("/proc/self/exe")).unwrap().into());
            }
            19 => given = Some(UnixStream::pair().unwrap().0.into()),
            20 if said.kind != 16 && !said.memory.is_empty() => {
                said.memory[usize::from(much)] ^= 1;
                self.lies = true;
            }
            _ => {}
        }
        let protection = if said.written { Protection::ReadWrite } else { Protection::Read };
        let given = given.or_else(|| (!said.memory.is_empty()).then(|| memory(&said.memory, protection)));
        if said.kind == 16 && self.rank == 0 {
            self.words = given.as_ref().map(|given| File::from(given.try_clone().unwrap()));
        }
        let mut bytes = said.encode();
        match how {
            21 if much.is_multiple_of(2) => drop(bytes.pop()),
            21 => bytes.push(0),
            _ => {}
        }
        // Of parts in use the digests have to be those of the hello, and of what each rank has whole the other's own;
        // of parts of a new version reading finds them.
        let whole = honest.kind != 16 && honest.layer as usize == RESIDENT;
        self.lies |= honest.kind == 17 && said.digest != honest.digest && !said.memory.is_empty();
        let header = (said.kind, said.layer, said.length, said.version);
        let sizes = header == (honest.kind, honest.layer, honest.length, honest.version)
            && said.memory.len() == honest.memory.len()
            && !matches!(how, 17..=19 | 21)
            && (honest.kind == 17 && !whole || said.digest == honest.digest);
        self.broken |= !sizes;
        self.honest &= sizes;
        match how {
            22 => self.aside(much),
            23 if much.is_multiple_of(4) => return self.close(),
            // The same twice; the second one is for no call, or for a wrong place.
            23 => {
                self.honest = false;
                self.write(&frame(3, u8::from(given.is_some()), &bytes), given.as_ref());
            }
            _ => {}
        }
        self.write(&frame(3, u8::from(given.is_some()), &bytes), given.as_ref());
    }

    /// Says something else before.
    fn aside(&mut self, what: u8) {
        let raw = match what % 5 {
            // A sign of life is nothing.
            0 => frame(2, 0, &[]),
            1 => frame(4, 0, &[]),
            2 => frame(3, 1, b"a descriptor that does not come"),
            3 => frame(9, 0, &[]),
            _ => frame(3, 0, &[18; 4]),
        };
        if !what.is_multiple_of(5) {
            self.honest = false;
        }
        self.write(&raw, None);
    }

    /// What it does while the rank waits for a decision.
    fn decide(&mut self, choice: u8) {
        let Some(words) = &self.words else { return self.close() };
        let own = 8 * (1 + u64::from(self.rank));
        let writes: &[(u64, u64)] = match choice % 16 {
            0..=7 => &[(own, READY)],
            8 => &[(0, 0x6162_6F72_7465_6421)],
            9 => &[(0, 0x636F_6D6D_6974_6564)],
            10 => &[(0, 77)],
            11 => &[(own, READY + 1)],
            12 => &[(own, 3)],
            13 => &[(8 * (2 - u64::from(self.rank)), 0), (own, READY)],
            14 => &[(24, u64::MAX)],
            _ => &[],
        };
        self.honest &= choice % 16 <= 7;
        for (at, value) in writes {
            words.write_all_at(&value.to_le_bytes(), *at).unwrap();
        }
        if writes.is_empty() {
            self.close();
        } else if self.say.is_empty() && self.script.is_empty() && !self.honest {
            // It has done its harm.
            self.close();
        }
    }
}

/// The rank, and the other side of its session.
struct Run {
    own: Rank,
    other: Arc<Asked>,
    links: Links,
    /// How far it came, in words, for a test that looks what was reached.
    reached: Vec<String>,
}

/// The messages of an honest rank: its parts in use, or those of a version behind its first message.
fn honest(plan: &Plan, rank: u32, version: Option<u32>) -> Vec<Honest> {
    let mut all = Vec::new();
    if version.is_some() {
        let mut hash = blake3::Hasher::new();
        for layer in LAYERS {
            hash.update(&(layer as u64).to_le_bytes());
        }
        let (digest, length) = (*hash.finalize().as_bytes(), LAYERS.len() as u64);
        let memory = vec![0; if rank == 0 { os::page_size() as usize } else { 0 }];
        all.push(Honest { kind: 16, layer: 0, length, digest, version, memory, written: true });
    }
    let named = |layer: &&LayerPlan| version.is_none() || LAYERS.contains(&layer.layer);
    for layer in plan.layers().iter().filter(named) {
        let (memory, digest) = part(plan, layer, rank, version.unwrap_or(0));
        let kind = if version.is_some() { 17 } else { 1 };
        let (length, layer) = (memory.len() as u64, layer.layer as u32);
        all.push(Honest { kind, layer, length, digest, version, memory, written: false });
    }
    all
}

impl Run {
    fn new(own: u32, script: &[u8]) -> Run {
        let (plan, rank) = (plan(own), 1 - own);
        let (socket, mut theirs) = UnixStream::pair().unwrap();
        let say = honest(&plan, rank, None);
        let mut content = blake3::Hasher::new();
        content.update(b"forebay weights content 1\0");
        say.iter().for_each(|said| {
            content.update(&said.digest);
        });
        let other = Other {
            script: script.to_vec(),
            socket: None,
            phase: Phase::Idle,
            say,
            rank,
            words: None,
            honest: true,
            broken: false,
            lies: false,
        };
        let other = Arc::new(Asked(Mutex::new(other)));
        let faults: Arc<dyn Faults> = other.clone();
        let device: Arc<dyn Device> = HostDevice::new(HostOptions::default());
        let mut own = Rank::new(&device, plan, Pulls::default(), &faults).unwrap();
        own.fill().unwrap();
        let mine = own.windows.hello(MODEL, own.stream).unwrap();
        theirs.write_all(&hello(Hello { rank, content: *content.finalize().as_bytes(), ..mine })).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let limits = Limits { hello: PATIENCE, lost: PATIENCE, ..Limits::default() };
        let links = Links::over(vec![socket], mine, limits, faults).unwrap();
        other.0.lock().unwrap().socket = Some(theirs);
        Run { own, other, links, reached: Vec::new() }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Other) -> T) -> T {
        work(&mut self.other.0.lock().unwrap())
    }

    /// Notes what a call said, and that it is an error exactly where it has to be.
    fn judged<T>(&mut self, call: &str, result: Result<T, Error>) -> Option<T> {
        let (honest, broken) = self.with(|other| {
            other.phase = Phase::Idle;
            (other.honest, other.broken)
        });
        match &result {
            Ok(_) => assert!(!broken, "{call}: a wrong message was taken"),
            Err(error) => {
                assert!(!honest, "{call}: {error}");
                assert!(!matches!(error.kind(), Kind::TimedOut), "{call}: {error}");
            }
        }
        let said = result.as_ref().map_or_else(|error| error.place().to_owned(), |_| "done".to_owned());
        self.reached.push(format!("{call}: {said}"));
        result.ok()
    }

    /// Each layer that can be used shows its version: the new one in `new`.
    fn shows(&self, version: u32, new: &[usize]) {
        let windows: &Windows = &self.own.windows;
        for layer in self.own.layers() {
            let version = if new.contains(&layer) { version } else { 0 };
            let Ok(window) = windows.layer(layer) else { continue };
            windows.pull(layer, self.own.stream).unwrap();
            let shown = self.own.read(window);
            let wanted = expected(windows.plan(), layer, version);
            let right = shown.iter().zip(wanted).all(|(shown, byte)| byte.is_none_or(|byte| byte == *shown));
            assert!(right, "layer {layer} shows no whole version {version}: {:?}", self.reached);
        }
    }

    fn run(&mut self) {
        self.with(|other| other.phase = Phase::Exchange);
        let shared = self.own.windows.share(&mut self.links, self.own.stream, PATIENCE);
        if self.judged("share", shared).is_none() {
            // Parts that had come before the error are of the weights that were announced, if nothing lies.
            if !self.with(|other| other.lies) {
                self.shows(0, &[]);
            }
            return;
        }
        let verified = self.own.windows.verify(self.own.stream);
        if self.with(|other| other.lies) {
            assert_eq!(verified.unwrap_err().kind(), Kind::Corrupt);
            self.reached.push("share: lies".to_owned());
            return;
        }
        verified.unwrap();
        self.shows(0, &[]);
        self.update();
    }

    fn update(&mut self) {
        let (plan, version) = (self.own.windows.plan().clone(), 2);
        let mut update = self.own.windows.update(version, &LAYERS, u64::MAX).unwrap();
        for layer in LAYERS {
            let found = plan.layers().iter().find(|one| one.layer == layer).unwrap();
            for placed in found.layout.tensors() {
                let at = placed.offset..placed.offset + placed.bytes;
                let bytes: Vec<u8> =
                    at.map(|at| stamp_of(filler(&plan, layer), version, layer, at)).collect();
                let from = self.own.holds(&bytes);
                update.fill(layer, &placed.name, from, self.own.stream).unwrap();
                self.own.wait().unwrap();
            }
        }
        self.with(|other| {
            other.say = honest(&plan, other.rank, Some(version));
            other.phase = Phase::Exchange;
        });
        let shared = update.share(&mut self.links, self.own.stream, PATIENCE);
        let shared = self.judged("update", shared);
        self.shows(0, &[]);
        if shared.is_none() {
            return;
        }
        let verified = update.verify(self.own.stream);
        if self.with(|other| other.lies) {
            assert_eq!(verified.unwrap_err().kind(), Kind::Corrupt);
            self.reached.push("update: lies".to_owned());
            return;
        }
        verified.unwrap();
        self.with(|other| other.phase = Phase::Commit);
        let border = Border { step: STEP, stream: self.own.stream, at_most: PATIENCE };
        let outcome = self.own.windows.commit(&mut update, &mut self.links, border);
        let honest = self.with(|other| other.honest);
        match self.judged("commit", outcome) {
            Some(Outcome::Committed) => self.shows(version, &LAYERS),
            Some(Outcome::Aborted(why)) => {
                assert!(!honest, "{why}");
                self.reached.push(format!("aborted: {}", why.place()));
                self.shows(0, &[]);
            }
            None => {
                assert!(LAYERS.iter().all(|layer| self.own.windows.layer(*layer).is_err()));
                self.shows(0, &[]);
            }
        }
    }
}

/// Open descriptors, by what they are.
fn descriptors() -> BTreeMap<String, usize> {
    let mut all = BTreeMap::new();
    for one in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let to = std::fs::read_link(one.path()).map(|to| to.display().to_string()).unwrap_or_default();
        let kind = to.split(['[', ' ']).next().unwrap_or_default().to_owned();
        *all.entry(kind).or_default() += 1;
    }
    all
}

/// A rank shares its parts, then those of an update, and commits, while the other side says what `bytes` make of an
/// honest rank's messages: the first byte chooses which of the two is rank 0. Whatever comes, a call ends, an honest
/// rank is served and a wrong message refused, no layer that can be used shows another byte than those of the version
/// that was decided, and no descriptor stays open. Returns how far the rank came.
pub fn update_bytes(bytes: &[u8]) -> Vec<String> {
    let (first, script) = bytes.split_first().map_or((0, bytes), |(first, rest)| (*first, rest));
    let (start, before) = (Instant::now(), descriptors());
    let mut run = Run::new(u32::from(first % 2), script);
    run.run();
    let reached = std::mem::take(&mut run.reached);
    drop(run);
    assert_eq!(descriptors(), before, "{reached:?}");
    assert!(start.elapsed() < BOUND, "{reached:?}");
    reached
}
