//! A rank whose process died and was started again takes its place at the addresses that pulls hold. The oracle are the
//! owner's stamps; a process that gives other memory than it says shows what is read.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use forebay::check::watch::Watch;
use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::Faults;
use forebay::peer::{Event, Hello, Link, Links};
use forebay::weights::{Group, Plan, Pulls, Ring, RingOptions, Sharding, Source};
use forebay::{Error, Kind, Result};

use crate::children::alone_in_a_process;
use crate::faulty::Faulty;
use crate::refusals::{Nth, descriptors, given, part};
use crate::windows::{Folder, MODEL, PATIENCE, Rank, layers, patient, sharding, stamp};
use crate::{alone, devices, grain, no_faults};

/// Four layers over two buffers; of the third one, which has one page, only one rank owns anything.
fn plan(rank: u32, ranks: u32) -> Plan {
    let bytes = [vec![5 * grain()], vec![7 * grain(), 9], vec![grain()], vec![4 * grain() + 3]];
    Plan::new(&layers(&bytes), Group { id: 5, rank, ranks }, &sharding(grain())).unwrap()
}

/// A filled rank.
fn filled(device: &Arc<dyn Device>, rank: u32, ranks: u32) -> Rank {
    let mut rank = Rank::new(device, plan(rank, ranks), Pulls::default(), &no_faults()).unwrap();
    rank.fill().unwrap();
    rank
}

fn counted(faults: Arc<dyn Faults>) -> (Arc<Faulty>, Arc<dyn Device>) {
    let counted = Faulty::new(HostDevice::with_faults(HostOptions::default(), faults), false);
    (counted.clone(), counted)
}

/// A process of rank 1, from its fill on: it shares, does `work`, and ends.
fn process<'scope>(
    scope: &'scope Scope<'scope, '_>,
    folder: &Path,
    ranks: u32,
    work: impl FnOnce(&mut Rank, &mut Links) + Send + 'scope,
) -> ScopedJoinHandle<'scope, Result<()>> {
    let folder = folder.to_owned();
    scope.spawn(move || {
        let mut rank = filled(&devices(1)[0], 1, ranks);
        let mut links = rank.share(&folder, patient(), &no_faults())?;
        work(&mut rank, &mut links);
        Ok(())
    })
}

/// The error that says that rank 1 has ended.
fn ended(links: &mut Links) -> Error {
    let error = links.event(PATIENCE).unwrap_err();
    assert_eq!((error.kind(), error.number("rank")), (Kind::PeerLost, Some(1)), "{error}");
    error
}

fn pull_all(rank: &Rank) {
    rank.layers().iter().for_each(|layer| rank.pull(*layer));
}

fn addresses(rank: &Rank) -> Vec<u64> {
    rank.layers().iter().map(|layer| rank.windows.layer(*layer).unwrap().address()).collect()
}

#[test]
fn a_rank_that_comes_back_is_read_at_the_same_addresses() {
    let (folder, died) = (Folder::new(), Barrier::new(3));
    thread::scope(|scope| {
        for own in [0, 2] {
            let (folder, died) = (&folder.0, &died);
            scope.spawn(move || {
                let (counted, device) = counted(no_faults());
                let mut rank = filled(&device, own, 3);
                let mut links = rank.share(folder, patient(), &no_faults()).unwrap();
                let before = (addresses(&rank), counted.backings(), counted.ranges());
                for _ in 0..2 {
                    pull_all(&rank);
                    died.wait();
                    let error = ended(&mut links);
                    pull_all(&rank);
                    let early = rank.windows.reattach(1, &mut links, PATIENCE).unwrap_err();
                    assert_eq!(early, error, "it has not come back");
                    assert_eq!(links.readmit(PATIENCE).unwrap(), Some(1));
                    rank.windows.reattach(1, &mut links, PATIENCE).unwrap();
                    let after = (addresses(&rank), counted.backings(), counted.ranges());
                    assert_eq!((after, counted.unmapped()), (before.clone(), 0));
                    rank.windows.verify(rank.stream).unwrap();
                    // Only a rank that has come back is attached.
                    for (of, kind) in
                        [(1, Kind::InvalidState), (own, Kind::OutOfRange), (3, Kind::OutOfRange)]
                    {
                        let error = rank.windows.reattach(of, &mut links, PATIENCE).unwrap_err();
                        assert_eq!((error.kind(), error.number("rank")), (kind, Some(u64::from(of))));
                    }
                }
                pull_all(&rank);
                died.wait();
            });
        }
        for _ in 0..3 {
            let whole = |rank: &mut Rank, _: &mut Links| {
                pull_all(rank);
                rank.windows.verify(rank.stream).unwrap();
                died.wait();
            };
            process(scope, &folder.0, 3, whole).join().unwrap().unwrap();
        }
    });
}

/// The parts of rank 1 of two as it says them, with the digests of its stamps: BLAKE3 of what it filled of each layer.
fn said() -> Vec<(usize, u64, [u8; 32])> {
    let plan = plan(1, 2);
    let part = |layer: usize| {
        let pages = plan.part(layer, 1).unwrap();
        let own = pages.start * grain()..pages.end * grain();
        let mut hash = blake3::Hasher::new();
        for tensor in plan.layers()[layer].layout.tensors() {
            let bytes = (tensor.offset..tensor.offset + tensor.bytes).filter(|at| own.contains(at));
            hash.update(&bytes.map(|at| stamp(1, layer, at)).collect::<Vec<u8>>());
        }
        (layer, own.end - own.start, *hash.finalize().as_bytes())
    };
    (0..4).map(part).collect()
}

/// The memory of a part, of this value throughout.
fn memory(bytes: u64, value: u8) -> Option<OwnedFd> {
    (bytes > 0).then(|| given(bytes, value))
}

/// Says rank 1's parts after its hello, as far as `messages` go, and then waits for rank 0's end or ends itself.
fn fake(folder: &Path, content: [u8; 32], messages: Vec<(Vec<u8>, Option<OwnedFd>)>, waits: bool) {
    let plan = plan(1, 2).digest();
    let hello = Hello { group: 5, rank: 1, ranks: 2, geometry: MODEL, plan, content };
    let mut links = Links::meet(folder, hello, patient(), no_faults()).unwrap();
    for (message, descriptor) in messages {
        // The other side may have ended the session by now.
        let _ = links.send(0, &message, descriptor);
        while let Ok(Some((_, Event::Message { .. }))) = links.event(Duration::from_millis(1)) {}
    }
    while waits && links.event(PATIENCE).is_ok_and(|event| event.is_some()) {}
}

/// Rank 0 of two whose rank 1 has ended, its device, and rank 1's content.
fn survivor(folder: &Path) -> (Arc<Faulty>, Rank, Links, [u8; 32]) {
    let (counted, device) = counted(no_faults());
    let mut rank = filled(&device, 0, 2);
    let mut links = thread::scope(|scope| {
        process(scope, folder, 2, |_, _| {});
        rank.share(folder, patient(), &no_faults()).unwrap()
    });
    let content = links.link(1).and_then(|link| link.theirs()).unwrap().content;
    ended(&mut links);
    (counted, rank, links, content)
}

/// Waits for rank 1, and takes its parts.
fn back(rank: &mut Rank, links: &mut Links) -> Result<()> {
    assert_eq!(links.readmit(PATIENCE)?, Some(1));
    rank.windows.reattach(1, links, PATIENCE)
}

/// Whether each page of rank 1 shows this value in a layer, and each of rank 0 its stamps.
fn shows(rank: &Rank, layer: usize, value: u8) -> bool {
    rank.windows.pull(layer, rank.stream).unwrap();
    rank.wait().unwrap();
    let theirs = rank.plan().part(layer, 1).unwrap();
    let shown = rank.read(rank.windows.layer(layer).unwrap());
    let expected = rank.expected(layer);
    (0_u64..).zip(shown.iter().zip(&expected)).all(|(at, (shown, expected))| {
        let own = !theirs.contains(&(at / grain()));
        if own { expected.is_none_or(|byte| byte == *shown) } else { *shown == value }
    })
}

/// A new process whose memory is not what it says shows that pulls read it; and a remap that is left out shows the old
/// memory, and that the device still maps it.
#[test]
fn pulls_read_the_memory_of_the_new_process() {
    for leaves_out in [false, true] {
        let folder = Folder::new();
        let (counted, mut rank, mut links, content) = survivor(&folder.0);
        let message = |(layer, bytes, digest): (usize, u64, [u8; 32])| {
            (part(layer as u32, bytes, digest), memory(bytes, 0xA5))
        };
        let messages = said().into_iter().map(message).collect();
        counted.leave_out_remaps(leaves_out);
        let result = thread::scope(|scope| {
            scope.spawn(|| fake(&folder.0, content, messages, true));
            let result = back(&mut rank, &mut links);
            drop(links);
            result
        });
        let pulled: Vec<usize> =
            rank.layers().into_iter().filter(|layer| rank.windows.copies(*layer).unwrap() > 0).collect();
        assert!(pulled.len() >= 3);
        if leaves_out {
            assert_eq!(result.unwrap_err().kind(), Kind::Busy);
            pull_all(&rank);
            continue;
        }
        result.unwrap();
        assert!(pulled.iter().all(|layer| shows(&rank, *layer, 0xA5)));
        let error = rank.windows.verify(rank.stream).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::Corrupt, Some(1)));
    }
}

/// A process that ends again after any of its parts, or that gives another part: what was mapped stays right, the rank
/// is lost again, and the next process is taken.
#[test]
fn a_process_that_fails_while_it_gives_is_lost_again_and_the_next_one_is_taken() {
    let folder = Folder::new();
    let (counted, mut rank, mut links, content) = survivor(&folder.0);
    let before = (addresses(&rank), counted.backings(), counted.ranges());
    let all = said();
    for given in 0..all.len() {
        for ends in [true, false] {
            let message = |(layer, bytes, digest): (usize, u64, [u8; 32])| {
                // Stamps, as the digest says.
                let fd = (bytes > 0).then(|| stamped(layer));
                let digest = if !ends && layer == given { [0; 32] } else { digest };
                (part(layer as u32, bytes, digest), fd)
            };
            let messages =
                all.iter().copied().take(if ends { given } else { given + 1 }).map(message).collect();
            let error = thread::scope(|scope| {
                scope.spawn(|| fake(&folder.0, content, messages, !ends));
                back(&mut rank, &mut links).unwrap_err()
            });
            let kind = if ends { Kind::PeerLost } else { Kind::Corrupt };
            assert_eq!((error.kind(), error.number("rank")), (kind, Some(1)), "{given}: {error}");
            assert_eq!(links.lost().map(|(rank, _)| rank).collect::<Vec<_>>(), [1]);
            pull_all(&rank);
            let after = (addresses(&rank), counted.backings(), counted.ranges());
            assert_eq!((after, counted.unmapped()), (before.clone(), 0), "{given}");
        }
    }
    thread::scope(|scope| {
        process(scope, &folder.0, 2, |rank, _| pull_all(rank));
        back(&mut rank, &mut links).unwrap();
    });
    pull_all(&rank);
    rank.windows.verify(rank.stream).unwrap();
}

/// Rank 1's part of a layer.
fn stamped(layer: usize) -> OwnedFd {
    let plan = plan(1, 2);
    let pages = plan.part(layer, 1).unwrap();
    let own = pages.start * grain()..pages.end * grain();
    let request = forebay::os::Request {
        bytes: own.end - own.start,
        huge: false,
        populate: false,
        lock: false,
        node: None,
        shared: true,
    };
    let map = forebay::os::Map::new(&request, &forebay::os::NoFaults).unwrap().0;
    let bytes: Vec<u8> = own.map(|at| stamp(1, layer, at)).collect();
    map.copy_in(0, &bytes).unwrap();
    map.export(forebay::os::Protection::Read, &forebay::os::NoFaults).unwrap()
}

/// Each remap refused, or failing the device: the layer's part is mapped as before, or the layer says that it is not
/// known. The next process is taken.
#[test]
fn a_refused_remap_leaves_a_part_as_it_was_or_its_layer_unusable() {
    for kind in [Kind::OutOfMemory, Kind::OsRefused, Kind::DeviceFailed] {
        // Of one layer rank 1 owns nothing.
        for passing in 0..3 {
            let folder = Folder::new();
            let (counted, mut rank, mut links, _) = survivor(&folder.0);
            let before = (counted.backings(), counted.ranges());
            let mut outcomes = vec![None; passing];
            outcomes.push(Some(kind));
            counted.remaps(&outcomes);
            let (error, told) = thread::scope(|scope| {
                let other = process(scope, &folder.0, 2, |_, _| {});
                (back(&mut rank, &mut links).unwrap_err(), other.join().unwrap())
            });
            assert_eq!((error.kind(), error.number("rank"), counted.remaps_left()), (kind, Some(1), 0));
            let layer = error.number("layer").unwrap() as usize;
            assert_eq!(told.unwrap_err().kind(), Kind::PeerLost);
            for one in rank.layers() {
                match rank.windows.layer(one) {
                    Ok(_) => rank.pull(one),
                    Err(error) => assert_eq!((one, error.kind(), kind), (layer, kind, Kind::DeviceFailed)),
                }
            }
            assert_eq!(rank.windows.layer(layer).is_err(), kind == Kind::DeviceFailed);
            if kind != Kind::DeviceFailed {
                assert_eq!((counted.backings(), counted.ranges()), before);
                thread::scope(|scope| {
                    process(scope, &folder.0, 2, |rank, _| pull_all(rank));
                    back(&mut rank, &mut links).unwrap();
                });
                pull_all(&rank);
            }
        }
    }
}

/// What a layer that cannot be used maps may be of another version than its digests say, so no rank is attached
/// over it. The call changes nothing.
#[test]
fn no_rank_is_attached_over_a_layer_that_cannot_be_used() {
    let folder = Folder::new();
    let (counted, mut rank, mut links, _) = survivor(&folder.0);
    rank.windows.make_resident(0, rank.stream).unwrap();
    counted.remaps(&[None, Some(Kind::DeviceFailed)]);
    rank.windows.make_sharded(0).unwrap_err();
    let broken = rank.windows.layer(0).unwrap_err();
    assert_eq!((broken.kind(), counted.remaps_left()), (Kind::DeviceFailed, 0));
    let before = (counted.imported(), counted.ranges());
    thread::scope(|scope| {
        let other = process(scope, &folder.0, 2, |_, _| {});
        assert_eq!(links.readmit(PATIENCE).unwrap(), Some(1));
        assert_eq!(rank.windows.reattach(1, &mut links, PATIENCE).unwrap_err(), broken);
        assert!(links.link(1).is_some());
        assert_eq!((counted.imported(), counted.ranges()), before);
        drop(links);
        assert_eq!(other.join().unwrap().unwrap_err().kind(), Kind::PeerLost);
    });
    (1..4).for_each(|layer| rank.pull(layer));
}

/// The first process of rank 2 ends when it has met rank 0 and not rank 1. So rank 0 waits for the parts of rank 1,
/// which waits for a process of rank 2; when that is there, all three come together.
#[test]
fn a_rank_that_ends_between_two_meetings_is_met_again() {
    let folder = Folder::new();
    let folder = &folder.0;
    thread::scope(|scope| {
        let first = scope.spawn(move || {
            let mut rank = filled(&devices(1)[0], 0, 3);
            let hello = rank.windows.hello(MODEL, rank.stream).unwrap();
            let mut links = Links::meet(folder, hello, patient(), no_faults()).unwrap();
            let error = rank.windows.share(&mut links, rank.stream, PATIENCE).unwrap_err();
            assert_eq!((error.kind(), error.number("rank")), (Kind::PeerLost, Some(2)), "{error}");
            assert_eq!(links.readmit(PATIENCE).unwrap(), Some(2));
            rank.windows.reattach(2, &mut links, PATIENCE).unwrap();
            pull_all(&rank);
            links
        });
        let second = process(scope, folder, 3, |rank, links| {
            pull_all(rank);
            // It lives until another one has ended.
            while links.event(PATIENCE).is_ok() {}
        });
        let mut rank = filled(&devices(1)[0], 2, 3);
        let hello = rank.windows.hello(MODEL, rank.stream).unwrap();
        let socket = loop {
            match UnixStream::connect(folder.join("forebay-5-0.sock")) {
                Ok(socket) => break socket,
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        };
        let mut link = Link::new(socket, hello, patient(), no_faults()).unwrap();
        // Its first part says that rank 0 has met both.
        while !matches!(link.event(PATIENCE).unwrap().unwrap(), Event::Message { .. }) {}
        drop(link);
        let links = rank.share(folder, patient(), &no_faults()).unwrap();
        pull_all(&rank);
        drop((first.join().unwrap(), links));
        second.join().unwrap().unwrap();
    });
}

/// Parts are mapped anew only when no pull runs that may read them. The ring waits for its own; the windows themselves
/// are the control: the order checker finds the pull that a return without the ring did not wait for.
#[test]
fn a_return_waits_for_the_pulls_of_the_ring() {
    let folder = Folder::new();
    let watch = Watch::new(HostDevice::new(HostOptions::default()));
    let device: Arc<dyn Device> = watch.clone();
    let mut rank = filled(&device, 0, 2);
    let mut links = thread::scope(|scope| {
        process(scope, &folder.0, 2, |_, _| {});
        rank.share(&folder.0, patient(), &no_faults()).unwrap()
    });
    ended(&mut links);
    rank.windows.pull(0, watch.stream().unwrap()).unwrap();
    let error = thread::scope(|scope| {
        process(scope, &folder.0, 2, |_, _| {});
        back(&mut rank, &mut links).unwrap_err().to_string()
    });
    assert!(error.contains("remap") && error.contains("copy"), "{error}");
    rank.wait().unwrap();
    // On a device whose work the checker has found in order.
    let watch = Watch::new(HostDevice::new(HostOptions::default()));
    let device: Arc<dyn Device> = watch.clone();
    let folder = Folder::new();
    let mut rank = filled(&device, 0, 2);
    let mut links = thread::scope(|scope| {
        process(scope, &folder.0, 2, |_, _| {});
        rank.share(&folder.0, patient(), &no_faults()).unwrap()
    });
    ended(&mut links);
    let mut ring = Ring::new(&device, rank.windows, RingOptions::default()).unwrap();
    // The first layers' pulls are enqueued.
    ring.begin(1, 0).unwrap();
    ring.abandon().unwrap();
    thread::scope(|scope| {
        process(scope, &folder.0, 2, |_, _| {});
        assert_eq!(links.readmit(PATIENCE).unwrap(), Some(1));
        ring.reattach(1, &mut links, PATIENCE).unwrap();
    });
    assert_eq!(watch.conflict(), None);
}

/// Every call of the system that a rank makes while it takes another one back, refused in turn: no layer shows other
/// bytes, and descriptors, memory and ranges are as before. In a process of its own, because other tests open
/// descriptors.
#[test]
fn every_refused_call_of_a_return_leaves_all_as_it_was() {
    const NAME: &str = "rejoin::every_refused_call_of_a_return_leaves_all_as_it_was";
    if !alone_in_a_process(NAME) {
        return;
    }
    let (folder, faults) = (Folder::new(), Arc::new(Nth::default()));
    let (counted, device) = counted(faults.clone());
    let mut rank = filled(&device, 0, 2);
    let faulty: Arc<dyn Faults> = faults.clone();
    let mut links = thread::scope(|scope| {
        process(scope, &folder.0, 2, |_, _| {});
        rank.share(&folder.0, patient(), &faulty).unwrap()
    });
    ended(&mut links);
    // The door, too, has been open before.
    links.readmit(Duration::ZERO).unwrap();
    let before = (descriptors(), addresses(&rank), counted.backings(), counted.ranges());
    let mut refused = 0;
    for n in 0.. {
        let (result, reached) = thread::scope(|scope| {
            let other = process(scope, &folder.0, 2, |_, _| {});
            faults.aim(Some(n));
            // A refusal may cost the connection, and its process with it, or this call alone.
            let found = loop {
                match links.readmit(Duration::from_millis(10)) {
                    Ok(Some(rank)) => break Some(rank),
                    _ if other.is_finished() => break None,
                    _ => {}
                }
            };
            let result = found.map(|found| rank.windows.reattach(found, &mut links, PATIENCE));
            (result, faults.aim(None))
        });
        pull_all(&rank);
        if result == Some(Ok(())) {
            ended(&mut links);
        }
        // What that process left at the door.
        while links.readmit(Duration::ZERO).is_err() {}
        let after = (descriptors(), addresses(&rank), counted.backings(), counted.ranges());
        assert_eq!((&after, counted.unmapped()), (&before, 0), "call {n}: {result:?}");
        refused += u32::from(result != Some(Ok(())));
        if !reached {
            assert_eq!(result, Some(Ok(())));
            break;
        }
    }
    assert!(refused > 20, "{refused} refused");
}

/// The ring: it takes no rank back within a step, goes on when it has, and the flag that a rank has ended is the
/// control: without the return a step says that it has.
#[test]
fn a_ring_goes_on_with_a_rank_that_has_come_back() {
    let folder = Folder::new();
    let (_, mut rank, mut links, _) = survivor(&folder.0);
    let expected: Vec<_> = rank.layers().iter().map(|layer| rank.expected(*layer)).collect();
    let (device, stream) = (Arc::clone(&rank.device), rank.stream);
    let one = alone(&[vec![grain()]], &sharding(grain()));
    let windows = std::mem::replace(&mut rank.windows, one.windows);
    let mut ring = Ring::new(&device, windows, RingOptions::default()).unwrap();
    let step = |ring: &mut Ring| -> Result<()> {
        ring.begin(1, 0)?;
        for (layer, expected) in expected.iter().enumerate() {
            ring.enter(layer, 0, stream)?;
            let shown = rank.read(ring.pulls().layer(layer)?);
            assert!(shown.iter().zip(expected).all(|(shown, byte)| byte.is_none_or(|byte| byte == *shown)));
            ring.leave(layer, 0, stream)?;
        }
        ring.end(stream)
    };
    step(&mut ring).unwrap();
    ring.lost(1);
    let error = step(&mut ring).unwrap_err();
    assert_eq!((error.kind(), error.number("rank")), (Kind::PeerLost, Some(1)));
    thread::scope(|scope| {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        process(scope, &folder.0, 2, move |rank, _| {
            pull_all(rank);
            wait.recv().unwrap_err();
        });
        assert_eq!(links.readmit(PATIENCE).unwrap(), Some(1));
        // The step is still open.
        let error = ring.reattach(1, &mut links, PATIENCE).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::Busy, Some(1)), "{error}");
        ring.abandon().unwrap();
        let error = step(&mut ring).unwrap_err();
        assert_eq!(error.kind(), Kind::PeerLost, "it is there, and not attached");
        ring.abandon().unwrap();
        // A layer that was made resident meanwhile becomes sharded again.
        ring.make_resident(0, stream).unwrap();
        ring.reattach(1, &mut links, PATIENCE).unwrap();
        step(&mut ring).unwrap();
        ring.make_sharded(0).unwrap();
        step(&mut ring).unwrap();
        drop(done);
    });
    // The rank ends again, and the ring learns it from a return that fails.
    ended(&mut links);
    let error = ring.reattach(1, &mut links, PATIENCE).unwrap_err();
    assert_eq!(error.kind(), Kind::PeerLost);
    assert_eq!(step(&mut ring).unwrap_err().kind(), Kind::PeerLost);
}

/// Ranks that pull from their hosts share nothing, and yet only one that has come back is there again.
#[test]
fn only_a_rank_that_came_back_is_attached_where_nothing_is_shared() {
    let (folder, met) = (Folder::new(), Barrier::new(2));
    let start = |own: u32| {
        let sharding = Sharding { source: Source::Host, ..sharding(grain()) };
        let group = Group { id: 5, rank: own, ranks: 2 };
        let plan = Plan::new(&layers(&[vec![5 * grain()], vec![grain()]]), group, &sharding).unwrap();
        let mut rank = Rank::new(&devices(1)[0], plan, Pulls::default(), &no_faults()).unwrap();
        rank.fill().unwrap();
        let links = rank.share(&folder.0, patient(), &no_faults()).unwrap();
        (rank, links)
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let first = start(1);
            met.wait();
            drop(first);
            met.wait();
            let _second = start(1);
            met.wait();
        });
        let (mut rank, mut links) = start(0);
        let kind = |result: Result<()>| result.unwrap_err().kind();
        assert_eq!(kind(rank.windows.reattach(1, &mut links, PATIENCE)), Kind::InvalidState, "never lost");
        met.wait();
        let lost = ended(&mut links);
        assert_eq!(rank.windows.reattach(1, &mut links, PATIENCE), Err(lost));
        met.wait();
        assert_eq!(links.readmit(PATIENCE), Ok(Some(1)));
        rank.windows.reattach(1, &mut links, PATIENCE).unwrap();
        assert_eq!(kind(rank.windows.reattach(1, &mut links, PATIENCE)), Kind::InvalidState, "attached");
        pull_all(&rank);
        met.wait();
    });
}
