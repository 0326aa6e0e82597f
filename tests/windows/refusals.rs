//! What the system refuses, and ranks that give other things than the plan's. Each leaves every layer either ready and
//! whole or with an error that names the rank, and no layer half mapped.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Call, Faults, Inject, Map, NoFaults, Protection, Request};
use forebay::peer::{Event, Hello, Limits, Links};
use forebay::weights::{Group, Plan, Pulls, Ring, RingOptions};
use forebay::{Error, Kind, Result};

use crate::children::alone_in_a_process;
use crate::faulty::Faulty;
use crate::windows::{Folder, MODEL, PATIENCE, Rank, layers, patient, sharding, tensor};
use crate::{devices, grain, no_faults};

/// Marks a child process of this test.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// Four layers; of the last one, which has one page, only one rank owns anything.
fn plan(rank: u32, ranks: u32) -> Plan {
    let bytes = [vec![5 * grain()], vec![7 * grain(), 9], vec![4 * grain()], vec![grain()]];
    Plan::new(&layers(&bytes), Group { id: 0, rank, ranks }, &sharding(grain())).unwrap()
}

/// A system that has no room for the memory that is to be filled, as for a file that may not be so long: an error says
/// so, no signal ends the process, and nothing is held. In a process with a limit of its own.
#[test]
fn memory_that_finds_no_room_is_an_error_and_holds_nothing() {
    const NAME: &str = "refusals::memory_that_finds_no_room_is_an_error_and_holds_nothing";
    if std::env::var_os(CHILD).is_none() {
        // In units of 512 or 1024 bytes: too little for the parts, and enough for one page.
        let script = "ulimit -f 16 && exec \"$0\" --exact --nocapture \"$@\"";
        let mut child = Command::new("sh");
        child.args(["-c", script]).arg(std::env::current_exe().unwrap()).arg(NAME).env(CHILD, "1");
        let run = child.output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let counted = Faulty::new(HostDevice::new(HostOptions::default()), false);
    let device: Arc<dyn Device> = counted.clone();
    let before = descriptors();
    let bytes = [vec![64 * grain()], vec![64 * grain()]];
    let plan = Plan::new(&layers(&bytes), Group { id: 0, rank: 0, ranks: 2 }, &sharding(grain())).unwrap();
    let error = forebay::weights::Windows::new(&device, plan, Pulls::default(), &no_faults()).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::OsRefused, "ftruncate: File too large"), "{error}");
    assert_eq!((counted.backings(), descriptors()), (0, before));
    device.backing(grain()).unwrap();
}

/// Rank 0 on a device, filled and with its digests.
fn prepared(device: &Arc<dyn Device>, faults: &Arc<dyn Faults>) -> Result<Rank> {
    let mut rank = Rank::new(device, plan(0, 2), Pulls::default(), faults)?;
    rank.fill()?;
    rank.windows.hello(MODEL, rank.stream)?;
    Ok(rank)
}

/// Shares with a second rank and pulls everything.
fn shared(rank: &mut Rank, folder: &Path, faults: &Arc<dyn Faults>) -> Result<()> {
    let shared = rank.share(folder, patient(), faults);
    ready_or_not(rank, shared)
}

/// A layer is ready, or says what is missing; it is never half of another.
fn ready_or_not(rank: &Rank, shared: Result<Links>) -> Result<()> {
    for layer in rank.layers() {
        match rank.windows.pull(layer, rank.stream) {
            Ok(()) => {
                rank.wait()?;
                assert!(rank.is_whole(layer));
            }
            Err(error) => {
                assert!(shared.is_err(), "{error}");
                assert_eq!((error.kind(), error.number("rank")), (Kind::InvalidState, Some(1)), "{error}");
            }
        }
    }
    shared.map(drop)
}

/// Open descriptors.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Every call of the system that a rank makes is refused once, in a run of its own: its error says so, the other rank
/// loses a peer or ends well, and what can be pulled is right. While the device lives it holds what ranges map, with a
/// descriptor for each, and nothing else. In a process of its own, because other tests open descriptors.
#[test]
fn every_refused_call_leaves_layers_whole_or_unready() {
    const NAME: &str = "refusals::every_refused_call_leaves_layers_whole_or_unready";
    if !alone_in_a_process(NAME) {
        return;
    }
    let (mut refused, mut n, before) = ([0; 2], 0, descriptors());
    loop {
        let folder = Folder::new();
        let faults = Arc::new(Inject::nth(n, libc::EPERM));
        let faulty: Arc<dyn Faults> = faults.clone();
        let counted = Faulty::new(HostDevice::with_faults(HostOptions::default(), faults.clone()), false);
        let device: Arc<dyn Device> = counted.clone();
        let result = match prepared(&device, &faulty) {
            Err(error) => {
                refused[0] += 1;
                Err(error)
            }
            Ok(mut rank) => thread::scope(|scope| {
                let other = scope.spawn(|| {
                    let device = &devices(1)[0];
                    let mut rank = Rank::new(device, plan(1, 2), Pulls::default(), &no_faults()).unwrap();
                    rank.fill().unwrap();
                    // Not long after the other side has failed before it came.
                    let limits = Limits { hello: Duration::from_secs(2), ..patient() };
                    rank.share(&folder.0, limits, &no_faults()).map(drop)
                });
                let result = shared(&mut rank, &folder.0, &faulty);
                refused[1] += u32::from(result.is_err());
                if let Err(error) = other.join().unwrap() {
                    let told = matches!(error.kind(), Kind::PeerLost | Kind::TimedOut);
                    assert!(result.is_err() && told, "call {n}: {error}, {result:?}");
                }
                result
            }),
        };
        // The rank, its sessions and the other one are gone; the device lives.
        let held = descriptors() - before;
        assert_eq!((counted.unmapped(), counted.backings()), (0, held), "call {n}: {result:?}");
        drop((device, counted));
        assert_eq!(descriptors(), before, "call {n}");
        if faults.count() <= n {
            // Two buffers, and a part of each rank of each layer; of the last layer there is one.
            assert_eq!(held, 2 + 7);
            result.unwrap();
            break;
        }
        n += 1;
    }
    assert!(refused[0] > 40 && refused[1] > 20, "{refused:?} refused");
}

/// The same for every call of the device.
#[test]
fn every_refused_call_of_the_device_leaves_layers_whole_or_unready() {
    let (mut calls, mut refused) = (BTreeSet::new(), [0; 2]);
    for n in 0.. {
        let (folder, host) = (Folder::new(), HostDevice::new(HostOptions::default()));
        let counted = Faulty::new(host.clone(), false);
        let device: Arc<dyn Device> = counted.clone();
        counted.aim(Some(n));
        let prepared = Rank::new(&device, plan(0, 2), Pulls::default(), &no_faults()).and_then(|mut rank| {
            // The engine's own work is not refused.
            rank.device = host;
            rank.fill()?;
            rank.windows.hello(MODEL, rank.stream)?;
            Ok(rank)
        });
        refused[0] += u32::from(prepared.is_err());
        let shared = prepared.map(|mut rank| {
            thread::scope(|scope| {
                let other = scope.spawn(|| {
                    let mut rank =
                        Rank::new(&devices(1)[0], plan(1, 2), Pulls::default(), &no_faults()).unwrap();
                    rank.fill().unwrap();
                    rank.share(&folder.0, patient(), &no_faults()).map(drop)
                });
                let shared = rank.share(&folder.0, patient(), &no_faults());
                let call = counted.aim(None);
                let result = ready_or_not(&rank, shared);
                if let Err(error) = other.join().unwrap() {
                    assert!(
                        result.is_err() && error.kind() == Kind::PeerLost,
                        "call {n}: {error}, {result:?}"
                    );
                }
                (call, result)
            })
        });
        let (call, result) = match shared {
            Ok((call, result)) => (call, result),
            Err(error) => (counted.aim(None), Err(error)),
        };
        refused[1] += u32::from(result.is_err());
        assert_eq!(counted.unmapped(), 0, "call {n}, {call:?}: {result:?}");
        let Some(call) = call else {
            result.unwrap();
            break;
        };
        calls.insert(call);
    }
    assert!(refused[0] > 30 && refused[1] > refused[0] + 8, "{refused:?} refused");
    for call in ["backing", "import_backing", "export", "range", "copy", "record", "synchronize"] {
        assert!(calls.contains(call), "{call} is not among {calls:?}");
    }
}

/// A remap that is refused leaves the layer sharded, or resident, as it was; the next one succeeds.
#[test]
fn a_refused_change_leaves_the_layer_as_it_was() {
    let folder = Folder::new();
    let faults = Arc::new(Nth::default());
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut rank = Rank::new(&devices(1)[0], plan(1, 2), Pulls::default(), &no_faults()).unwrap();
            rank.fill().unwrap();
            rank.share(&folder.0, patient(), &no_faults()).unwrap()
        });
        let device: Arc<dyn Device> = HostDevice::with_faults(HostOptions::default(), faults.clone());
        let mut rank = Rank::new(&device, plan(0, 2), Pulls::default(), &no_faults()).unwrap();
        rank.fill().unwrap();
        let _links = rank.share(&folder.0, patient(), &no_faults()).unwrap();
        let mut refused = [0; 2];
        for (change, resident) in [true, false].into_iter().enumerate() {
            for n in 0.. {
                assert_eq!(rank.windows.is_resident(0), Ok(!resident));
                faults.aim(Some(n));
                let result = match resident {
                    true => rank.windows.make_resident(0, rank.stream),
                    false => rank.windows.make_sharded(0),
                };
                let reached = faults.aim(None);
                rank.pull(0);
                if result.is_ok() {
                    if !reached {
                        break;
                    }
                    // A refusal that the system's memory state or an option bears.
                    match resident {
                        true => rank.windows.make_sharded(0).unwrap(),
                        false => rank.windows.make_resident(0, rank.stream).unwrap(),
                    }
                    continue;
                }
                assert!(result.is_err() && rank.windows.is_resident(0) == Ok(!resident), "{n}: {result:?}");
                refused[change] += 1;
                // The buffer is still the layer's own where it is sharded, and free of it where it is resident.
                rank.pull(2);
                assert_eq!(rank.is_whole(0), !resident);
            }
        }
        assert!(refused[0] >= 4 && refused[1] >= 2, "{refused:?}");
        drop(other.join().unwrap());
    });
}

/// Refuses one call of those that follow [`Nth::aim`].
#[derive(Debug, Default)]
pub struct Nth(std::sync::Mutex<Option<(u64, bool)>>);

impl Nth {
    /// Aims at the n-th call from now on. Returns whether the last aim was reached.
    pub fn aim(&self, n: Option<u64>) -> bool {
        let mut aim = self.0.lock().unwrap();
        std::mem::replace(&mut *aim, n.map(|n| (n, false))).is_some_and(|(_, reached)| reached)
    }
}

impl Faults for Nth {
    fn before(&self, _: forebay::os::Call) -> Option<i32> {
        let mut aim = self.0.lock().unwrap();
        let (left, reached) = aim.as_mut()?;
        if *left == 0 && !*reached {
            *reached = true;
            return Some(libc::ENOMEM);
        }
        *left = left.saturating_sub(1);
        None
    }
}

/// A part as it is said on the wire (`weights/share.rs` has the format).
pub fn part(layer: u32, bytes: u64, digest: [u8; 32]) -> Vec<u8> {
    [&1_u32.to_le_bytes()[..], &layer.to_le_bytes(), &bytes.to_le_bytes(), &digest].concat()
}

/// Memory of so many bytes that others may read.
pub fn given(bytes: u64, value: u8) -> OwnedFd {
    let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: true };
    let map = Map::new(&request, &NoFaults).unwrap().0;
    map.fill(0, bytes, value).unwrap();
    map.export(Protection::Read, &NoFaults).unwrap()
}

/// What a rank that keeps the rules gets from one that sends `messages`, and whose hello has this content.
fn told(content: [u8; 32], messages: Vec<(Vec<u8>, Option<OwnedFd>)>) -> (Rank, Error) {
    let folder = Folder::new();
    let mut rank = Rank::new(&devices(1)[0], plan(0, 2), Pulls::default(), &no_faults()).unwrap();
    rank.fill().unwrap();
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            let plan = plan(1, 2).digest();
            let hello = Hello { group: 0, rank: 1, ranks: 2, geometry: MODEL, plan, content };
            let mut links = Links::meet(&folder.0, hello, patient(), no_faults()).unwrap();
            for (message, descriptor) in messages {
                links.send(0, &message, descriptor).unwrap();
            }
            links.end().unwrap();
            while let Ok(Some(_)) = links.event(PATIENCE) {}
        });
        rank.share(&folder.0, patient(), &no_faults()).map(drop).unwrap_err()
    });
    (rank, error)
}

#[test]
fn a_rank_that_gives_other_parts_is_named_with_the_layer() {
    let own = |layer: usize| {
        let pages = plan(1, 2).part(layer, 1).unwrap();
        (pages.end - pages.start) * grain()
    };
    let zero = [0; 32];
    for (message, descriptor, place) in [
        (b"hello".to_vec(), None, "layer 0: a message that is no part"),
        (part(1, own(1), zero), Some(given(own(1), 0)), "layer 0: the part of another layer"),
        (
            part(0, own(0) + grain(), zero),
            Some(given(own(0) + grain(), 0)),
            "layer 0: a part of another size",
        ),
        (part(0, own(0), zero), None, "layer 0: a part of another size"),
        (part(0, own(0), zero), Some(given(grain(), 0)), "shared memory of another size"),
        (
            part(0, own(0), zero),
            Some(std::fs::File::open("/dev/null").unwrap().into()),
            "a descriptor that is not shared memory",
        ),
    ] {
        let (rank, error) = told(zero, vec![(message, descriptor)]);
        assert_eq!(error.kind(), Kind::BadFormat, "{error}");
        assert!(error.place().starts_with(place), "{error}");
        assert_eq!(error.number("rank"), Some(1), "{error}");
        // Where the place does not begin with the layer, a number has it.
        assert!(place.starts_with("layer 0: ") || error.number("layer") == Some(0), "{error}");
        assert_eq!(rank.windows.pull(0, rank.stream).unwrap_err().number("rank"), Some(1));
    }
    let (_, error) = told(zero, Vec::new());
    assert_eq!(
        (error.kind(), error.place(), error.number("rank")),
        (Kind::PeerLost, "a rank that ended", Some(1))
    );
}

/// The sessions of two ranks over a socket, and the second one's end.
fn two(rank: &mut Rank) -> (Links, Links) {
    let hello = rank.windows.hello(MODEL, rank.stream).unwrap();
    let (a, b) = UnixStream::pair().unwrap();
    let over = move |rank, socket| {
        let content = if rank == 0 { hello.content } else { [0; 32] };
        Links::over(vec![socket], Hello { rank, content, ..hello }, patient(), no_faults()).unwrap()
    };
    let other = thread::spawn(move || over(1, b));
    (over(0, a), other.join().unwrap())
}

/// A rank that is lost before the parts are shared is that error, and the windows can be shared over other sessions.
#[test]
fn nothing_is_shared_without_a_rank_that_was_lost() {
    let mut rank = Rank::new(&devices(1)[0], plan(0, 2), Pulls::default(), &no_faults()).unwrap();
    rank.fill().unwrap();
    for _ in 0..2 {
        let (mut links, other) = two(&mut rank);
        drop(other);
        let error = links.event(PATIENCE).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::PeerLost, Some(1)));
        assert_eq!(rank.windows.share(&mut links, rank.stream, PATIENCE).unwrap_err(), error);
    }
}

/// A part that the system does not let out of this process is named: which layer, and for which rank.
#[test]
fn a_refused_export_names_rank_and_layer() {
    let faults = Arc::new(Inject::call(Call::Duplicate, libc::EMFILE));
    let device: Arc<dyn Device> = HostDevice::with_faults(HostOptions::default(), faults);
    let mut rank = Rank::new(&device, plan(0, 2), Pulls::default(), &no_faults()).unwrap();
    rank.fill().unwrap();
    let (mut links, _other) = two(&mut rank);
    let error = rank.windows.share(&mut links, rank.stream, PATIENCE).unwrap_err();
    assert_eq!(
        (error.kind(), error.number("rank"), error.number("layer")),
        (Kind::OsRefused, Some(1), Some(0))
    );
}

/// The sockets of three ranks, one from each to each other.
fn mesh() -> [Vec<UnixStream>; 3] {
    let mut sockets = [Vec::new(), Vec::new(), Vec::new()];
    for (a, b) in [(0, 1), (0, 2), (1, 2)] {
        let (one, other) = UnixStream::pair().unwrap();
        sockets[a].push(one);
        sockets[b].push(other);
    }
    sockets
}

/// A rank ends while it owes parts, and then another one breaks the exchange: the call has that error, and the next
/// event tells the loss.
#[test]
fn a_loss_is_told_although_another_error_ends_the_exchange() {
    let [own, ends, breaks] = mesh();
    let mut rank = Rank::new(&devices(1)[0], plan(0, 3), Pulls::default(), &no_faults()).unwrap();
    rank.fill().unwrap();
    let hello = rank.windows.hello(MODEL, rank.stream).unwrap();
    let over = |of: u32, sockets| {
        let content = if of == 0 { hello.content } else { [0; 32] };
        let hello = Hello { rank: of, plan: plan(of, 3).digest(), content, ..hello };
        Links::over(sockets, hello, patient(), no_faults()).unwrap()
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut links = over(1, ends);
            // It ends when both others have met all: rank 0 gives its first part then.
            let mut heard = [0, 0, 0];
            while heard.contains(&0) {
                let (rank, _) = links.event(PATIENCE).unwrap().unwrap();
                heard[rank as usize] += 1;
                heard[1] = 1;
            }
        });
        scope.spawn(|| {
            let mut links = over(2, breaks);
            links.send(1, b"met", None).unwrap();
            let lost = loop {
                if let Err(error) = links.event(PATIENCE) {
                    break error;
                }
            };
            assert_eq!(lost.number("rank"), Some(1), "{lost}");
            // Time for rank 0 to see it too; what it returns is the same without.
            thread::sleep(Duration::from_millis(50));
            links.send(0, b"hello", None).unwrap();
            while links.event(PATIENCE).is_ok_and(|event| event.is_some()) {}
        });
        let mut links = over(0, own);
        let error = rank.windows.share(&mut links, rank.stream, PATIENCE).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::BadFormat, Some(2)), "{error}");
        let error = links.event(PATIENCE).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::PeerLost, Some(1)), "{error}");
    });
}

/// A rank that has given all its parts, and goes on talking while this one waits for another rank's: what is kept of it
/// has a bound, in descriptors too.
#[test]
fn a_rank_that_says_more_than_its_parts_is_named() {
    for with in [false, true] {
        let [own, talks, silent] = mesh();
        let one = |rank| Rank::new(&devices(1)[0], plan(rank, 3), Pulls::default(), &no_faults()).unwrap();
        let limits = Limits { queue: 1 << 22, ..patient() };
        let begin = move |rank: &mut Rank, sockets| {
            rank.fill().unwrap();
            let hello = rank.windows.hello(MODEL, rank.stream).unwrap();
            Links::over(sockets, hello, limits, no_faults()).unwrap()
        };
        let (error, kept) = thread::scope(|scope| {
            scope.spawn(move || {
                let mut links = begin(&mut one(2), silent);
                // It gives nothing, and lives until rank 0 is gone.
                while links.link(0).is_some() {
                    let _ = links.event(PATIENCE);
                }
            });
            scope.spawn(move || {
                let mut rank = one(1);
                let mut links = begin(&mut rank, talks);
                let mut given = rank.windows.share(&mut links, rank.stream, Duration::from_millis(500));
                assert_eq!(given.unwrap_err().number("rank"), Some(2));
                given = (0..40).try_for_each(|_| {
                    let null = with.then(|| std::fs::File::open("/dev/null").unwrap().into());
                    links.send(0, &vec![0; if with { 0 } else { 60_000 }], null)
                });
                given.unwrap();
                while links.event(PATIENCE).is_ok() {}
            });
            let mut rank = one(0);
            let mut links = begin(&mut rank, own);
            let error = rank.windows.share(&mut links, rank.stream, PATIENCE).unwrap_err();
            let lost: Vec<u32> = links.lost().map(|(rank, _)| rank).collect();
            assert_eq!(lost, [1]);
            // What was kept comes first, and then rank 2 is still there.
            let mut kept = 0;
            while let Ok(Some((1, Event::Message { .. }))) = links.event(Duration::ZERO) {
                kept += 1;
            }
            assert!(links.link(2).is_some());
            (error, kept)
        });
        assert_eq!((error.kind(), error.number("rank")), (Kind::Exhausted, Some(1)), "{error}");
        assert_eq!(kept, if with { 16 } else { (1 << 20) / 60_200 });
    }
}

/// Parts whose digests are not those of the hello; and parts that are not what they are said to be, which only reading
/// them finds.
#[test]
fn other_bytes_than_announced_are_found() {
    let parts = |digest: [u8; 32]| {
        let message = |layer: usize| {
            let pages = plan(1, 2).part(layer, 1).unwrap();
            let bytes = (pages.end - pages.start) * grain();
            (part(layer as u32, bytes, digest), (bytes > 0).then(|| given(bytes, 1)))
        };
        (0..4).map(message).collect::<Vec<_>>()
    };
    let (_, error) = told([0; 32], parts([0; 32]));
    assert_eq!((error.kind(), error.number("rank")), (Kind::Corrupt, Some(1)), "{error}");
    // The content is BLAKE3 over a tag and the layers' digests.
    let mut hash = blake3::Hasher::new();
    hash.update(b"forebay weights content 1\0");
    (0..4).for_each(|_| {
        hash.update(&[0; 32]);
    });
    let folder = Folder::new();
    let content = *hash.finalize().as_bytes();
    thread::scope(|scope| {
        scope.spawn(|| {
            let plan = plan(1, 2).digest();
            let hello = Hello { group: 0, rank: 1, ranks: 2, geometry: MODEL, plan, content };
            let mut links = Links::meet(&folder.0, hello, patient(), no_faults()).unwrap();
            for (message, descriptor) in parts([0; 32]) {
                links.send(0, &message, descriptor).unwrap();
            }
            // Until the other side goes.
            while let Ok(Some((_, Event::Message { .. }))) = links.event(PATIENCE) {}
        });
        let mut rank = Rank::new(&devices(1)[0], plan(0, 2), Pulls::default(), &no_faults()).unwrap();
        rank.fill().unwrap();
        let links = rank.share(&folder.0, patient(), &no_faults()).unwrap();
        let error = rank.windows.verify(rank.stream).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::Corrupt, Some(1)), "{error}");
        assert_eq!(error.place(), "layer 0: another rank's part is not what it filled");
        // By layer: each has its own error, and of the last one this rank has all pages.
        let by_layer = [0, 1, 2, 3].map(|layer| rank.windows.verify_layer(layer, rank.stream));
        let corrupt = |layer: usize| {
            let own = plan(0, 2).part(layer, 1).unwrap();
            let expected = if own.is_empty() { None } else { Some(format!("layer {layer}:")) };
            let told = by_layer[layer].as_ref().err().map(|error| error.place()[..8].to_owned());
            assert_eq!(told, expected);
        };
        (0..4).for_each(corrupt);
        assert_eq!(rank.windows.verify_layer(4, rank.stream).unwrap_err().kind(), Kind::OutOfRange);
        // The same of windows in a ring, while a step is open.
        let (device, stream) = (Arc::clone(&rank.device), rank.stream);
        let mut ring = Ring::new(&device, rank.windows, RingOptions::default()).unwrap();
        ring.begin(1, 0).unwrap();
        assert_eq!([0, 1, 2, 3].map(|layer| ring.verify_layer(layer, stream)), by_layer);
        drop(links);
    });
}

#[test]
fn ranks_that_disagree_refuse_each_other() {
    let (own, folder) = (plan(0, 2), Folder::new());
    let mut rank = Rank::new(&devices(1)[0], own, Pulls::default(), &no_faults()).unwrap();
    rank.fill().unwrap();
    let hello = rank.windows.hello(MODEL, rank.stream).unwrap();
    let reversed: Vec<_> =
        layers(&[vec![5 * grain()], vec![7 * grain(), 9], vec![4 * grain()], vec![grain()]])
            .into_iter()
            .rev()
            .collect();
    let group = |rank| Group { id: 0, rank, ranks: 2 };
    let other = Plan::new(&reversed, group(1), &sharding(grain())).unwrap();
    // The same tensors of the same sizes, in another order of layers.
    let [ordered, swapped] = [(0, ["a", "b"]), (1, ["b", "a"])].map(|(rank, names)| {
        let layers = names.map(|name| vec![tensor(name, 4 * grain(), 256)]);
        Plan::new(&layers, group(rank), &sharding(grain())).unwrap()
    });
    for (hello, theirs, place) in [
        (hello, Hello { rank: 1, plan: other.digest(), ..hello }, "a process with another plan"),
        (
            Hello { plan: ordered.digest(), ..hello },
            Hello { rank: 1, plan: swapped.digest(), ..hello },
            "a process with another plan",
        ),
        (hello, Hello { rank: 1, geometry: [9; 32], ..hello }, "a process with another model"),
    ] {
        let errors = thread::scope(|scope| {
            let [a, b] = [hello, theirs].map(|hello| {
                let folder = &folder.0;
                scope.spawn(move || Links::meet(folder, hello, patient(), no_faults()).map(drop).unwrap_err())
            });
            [a.join().unwrap(), b.join().unwrap()]
        });
        // Who reads the other's hello second may find that it has gone; the first always knows why.
        assert!(errors.iter().any(|error| error.place() == place), "{errors:?}");
        for error in errors {
            assert!(error.kind() == Kind::PeerLost || error.place() == place, "{error}");
        }
    }
    // Sessions that were begun with another hello than these windows'.
    let folder = Folder::new();
    thread::scope(|scope| {
        let meet = |hello| Links::meet(&folder.0, hello, patient(), no_faults()).unwrap();
        let foreign = Hello { content: [1; 32], ..hello };
        let other = scope.spawn(move || meet(Hello { rank: 1, ..foreign }));
        let mut links = meet(foreign);
        let error = rank.windows.share(&mut links, rank.stream, PATIENCE).unwrap_err();
        let place = "sessions that began with another hello";
        assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, place));
        // Both sides live until both have met.
        drop((other.join().unwrap(), links));
    });
}

#[test]
fn those_who_do_not_come_are_named() {
    let folder = Folder::new();
    let hello = Hello { group: 7, rank: 0, ranks: 3, geometry: MODEL, plan: MODEL, content: MODEL };
    let short = Limits { hello: Duration::from_millis(50), ..patient() };
    let error = Links::meet(&folder.0, hello, short, no_faults()).unwrap_err();
    assert_eq!((error.kind(), error.number("rank")), (Kind::TimedOut, Some(1)), "{error}");
    // Its socket is gone; one that a killed process left is replaced.
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
    let path = folder.0.join("forebay-7-0.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    assert_eq!(Links::meet(&folder.0, hello, short, no_faults()).unwrap_err().kind(), Kind::TimedOut);
    let error = Links::meet(folder.0.join("none"), hello, short, no_faults()).unwrap_err();
    assert!(error.kind() == Kind::Io && error.place().contains("open the rank's lock"), "{error}");
    // A name that the system takes for a file and not for a socket.
    let long = folder.0.join("long".repeat(30));
    std::fs::create_dir(&long).unwrap();
    let error = Links::meet(&long, hello, short, no_faults()).unwrap_err();
    assert!(error.kind() == Kind::Io && error.place().contains("listen"), "{error}");
    assert_eq!(std::fs::read_dir(&long).unwrap().count(), 0);
}
