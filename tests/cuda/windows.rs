//! Sharded weights on the CUDA device: ranks with a device each share and pull; drivers that map a backing from its
//! beginning only, small pages, and GPUs that cannot reach each other.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use forebay::device::Device;
use forebay::device::cuda::CudaDevice;
use forebay::os::{Faults, NoFaults};
use forebay::weights::{Group, Plan, Pulls, Sharding, Source, Windows};
use forebay::{Kind, Result};
use forebay_standin::{Options, Resources, Standin};

use crate::faulty::Faulty;
use crate::mapped::assert_holds;
use crate::rig::{driver, on, own, usual};
use crate::windows::{Folder, Rank, group, layers, patient, sharding};

/// Layers of some pages each, so that parts begin at different ones.
fn model(grain: u64) -> Vec<Vec<u64>> {
    vec![vec![2 * grain + 5, grain], vec![], vec![4 * grain], vec![3 * grain + 1, 300, 7], vec![grain]]
}

fn device(library: &str) -> Arc<dyn Device> {
    CudaDevice::new(on(library)).unwrap()
}

/// Each rank pulls all layers twice; one layer becomes resident and sharded again.
fn work(rank: &mut Rank) {
    for _ in 0..2 {
        rank.layers().iter().for_each(|layer| rank.pull(*layer));
    }
    rank.windows.verify(rank.stream).unwrap();
    let address = rank.windows.layer(2).unwrap();
    rank.windows.make_resident(2, rank.stream).unwrap();
    rank.pull(0);
    assert!(rank.is_whole(2) && rank.windows.layer(2) == Ok(address));
    rank.windows.make_sharded(2).unwrap();
    rank.pull(2);
}

#[test]
fn ranks_share_their_weights() {
    for options in [
        Options { granule: 64 << 10, ..usual() },
        Options { granule: 64 << 10, driver_version: 13_000, ..usual() },
        Options { granule: 64 << 10, seed: Some(3), ..usual() },
        usual(),
    ] {
        let Some(driver) = driver(options) else { return };
        let devices: Vec<_> = (0..3).map(|_| device(driver.library())).collect();
        let grain = devices[0].granularity();
        for source in [Source::Peers, Source::Host] {
            let sharding = Sharding { source, ..sharding(grain) };
            group(&devices, &layers(&model(grain)), &sharding, Pulls::default(), work);
        }
    }
}

/// Gives a test's child process its rank and the folder in which the ranks meet.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// One rank as a process, which loads the driver by itself.
fn process(told: &str, options: Options) {
    let (rank, folder) = told.split_once(',').unwrap();
    let driver = driver(options).unwrap();
    let device = device(driver.library());
    let grain = device.granularity();
    let own = Group { id: 0, rank: rank.parse().unwrap(), ranks: 2 };
    let plan = Plan::new(&layers(&model(grain)), own, &sharding(grain)).unwrap();
    let faults: Arc<dyn Faults> = Arc::new(NoFaults);
    let mut rank = Rank::new(&device, plan, Pulls::default(), &faults).unwrap();
    rank.fill().unwrap();
    let mut links = rank.share(Path::new(folder), patient(), &faults).unwrap();
    work(&mut rank);
    links.end().unwrap();
    while !links.is_over() {
        links.event(Duration::from_millis(100)).unwrap();
    }
}

/// Handles of the driver's memory go from process to process, and each reads the other's memory.
#[test]
fn processes_share_their_weights() {
    let options = Options { granule: 64 << 10, ..usual() };
    if let Ok(told) = std::env::var(CHILD) {
        return process(&told, options);
    }
    if driver(options).is_none() {
        return;
    }
    let folder = Folder::new();
    let start = |rank| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sharded::processes_share_their_weights", "--nocapture"])
            .env(CHILD, format!("{rank},{}", folder.0.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    for child in [0, 1].map(start) {
        let ended = child.wait_with_output().unwrap();
        assert!(ended.status.success() && String::from_utf8_lossy(&ended.stdout).contains("1 passed"));
    }
}

#[test]
fn nothing_is_held_when_the_devices_are_gone() {
    let options = Options { granule: 64 << 10, ..usual() };
    let Some(standin) = own(options, "counts what is held") else { return };
    let devices: Vec<_> = (0..2).map(|_| device(standin.library())).collect();
    let grain = devices[0].granularity();
    group(&devices, &layers(&model(grain)), &sharding(grain), Pulls::default(), work);
    drop(devices);
    assert_eq!(standin.held_resources(), Resources::default());
}

/// The first part says that it cannot be reached, with rank and layer; from the host the same windows serve.
#[test]
fn ranks_that_cannot_reach_each_other_take_weights_from_the_host() {
    let options = Options { granule: 64 << 10, peer_access: false, ..usual() };
    let Some(standin) = own(options, "cannot reach a peer") else { return };
    let devices: Vec<_> = (0..2).map(|_| device(standin.library())).collect();
    let grain = devices[0].granularity();
    let layers = layers(&model(grain));
    let folder = Folder::new();
    let faults: Arc<dyn Faults> = Arc::new(NoFaults);
    std::thread::scope(|scope| {
        for (device, own) in devices.iter().zip(0..) {
            let (layers, folder, faults) = (&layers, &folder, &faults);
            scope.spawn(move || {
                let plan = Plan::new(layers, Group { id: 0, rank: own, ranks: 2 }, &sharding(grain)).unwrap();
                let mut rank = Rank::new(device, plan, Pulls::default(), faults).unwrap();
                rank.fill().unwrap();
                let error = rank.share(&folder.0, patient(), faults).unwrap_err();
                // Who is refused first ends; the other may learn of that first.
                let unreachable = error.kind() == Kind::Unsupported && error.number("layer") == Some(0);
                assert!(unreachable || error.kind() == Kind::PeerLost, "{error}");
                assert_eq!(error.number("rank"), Some(u64::from(1 - own)), "{error}");
            });
        }
    });
    let sharding = Sharding { source: Source::Host, ..sharding(grain) };
    group(&devices, &layers, &sharding, Pulls::default(), work);
}

/// A graph holds the addresses that pulls write, and not what is mapped there: it goes on being right when one of its
/// layers becomes resident, and when that is sharded again.
#[test]
fn a_captured_pull_stays_right_when_its_layer_is_mapped_anew() {
    for driver_version in [12_080, 13_000] {
        let options = Options { granule: 64 << 10, driver_version, seed: Some(5), ..usual() };
        let Some(standin) = own(options, "has small pages") else { return };
        let devices: Vec<_> = (0..2).map(|_| device(standin.library())).collect();
        let grain = devices[0].granularity();
        // Layers 0 and 2 use one buffer, layers 1 and 3 the other.
        let model = vec![vec![4 * grain]; 4];
        group(&devices, &layers(&model), &sharding(grain), Pulls { copy: grain }, |rank| {
            let (device, stream) = (Arc::clone(&rank.device), rank.stream);
            device.capture(stream).unwrap();
            rank.windows.pull(0, stream).unwrap();
            rank.windows.pull(1, stream).unwrap();
            let graph = device.captured(stream).unwrap();
            let whole = |rank: &Rank| [0, 1, 2, 3].map(|layer| rank.is_whole(layer));
            let launch = |rank: &Rank| {
                device.launch(graph, stream).unwrap();
                rank.wait().unwrap();
                whole(rank)
            };
            let others = |rank: &Rank| {
                [2, 3].iter().for_each(|layer| rank.pull(*layer));
                whole(rank)
            };
            // Nothing of the capture has run.
            assert_eq!(others(rank), [false, false, true, true]);
            for _ in 0..2 {
                assert_eq!(launch(rank), [true, true, false, false]);
                rank.windows.make_resident(1, stream).unwrap();
                assert_eq!(others(rank), [false, true, true, true]);
                // The graph writes the layer's own memory, and no longer the buffer.
                assert_eq!(launch(rank), [true, true, false, true]);
                rank.windows.make_sharded(1).unwrap();
                assert_eq!(whole(rank), [true, false, false, true]);
            }
            device.release(graph).unwrap();
        });
    }
}

/// Does `work` with the `n`-th call refused. Returns the refused call too. In a thread of its own: where the call that
/// leaves a context is refused, the thread stays in it.
fn with_refused<T: Send>(
    standin: &Standin,
    n: u64,
    work: impl FnOnce() -> Result<T> + Send,
) -> (Result<T>, Option<String>) {
    standin.fail_call(n, 1);
    let result = std::thread::scope(|scope| scope.spawn(work).join().unwrap());
    let failed = standin.failed_call();
    standin.fail_call(u64::MAX / 2, 1);
    (result, failed)
}

/// Every call of a construction, refused in turn on one device, which lives: handles are those that ranges map.
#[test]
fn a_refused_construction_holds_no_handle_that_no_range_maps() {
    for driver_version in [12_080, 13_000] {
        let options = Options { granule: 64 << 10, driver_version, ..usual() };
        let Some(standin) = own(options, "fails a call") else { return };
        let counted = Faulty::new(device(standin.library()), false);
        let device: Arc<dyn Device> = counted.clone();
        let grain = device.granularity();
        device.maps_offsets().unwrap();
        let plan = || {
            let group = Group { id: 0, rank: 0, ranks: 2 };
            Plan::new(&layers(&[vec![3 * grain], vec![2 * grain]]), group, &sharding(grain)).unwrap()
        };
        let (before, mut refused) = (standin.held_resources(), BTreeSet::new());
        for n in 0.. {
            let make = || {
                let faults: Arc<dyn Faults> = Arc::new(NoFaults);
                Windows::new(&device, plan(), Pulls::default(), &faults)
            };
            let (made, failed) = with_refused(&standin, n, make);
            let case = format!("call {n}, {failed:?}: {:?}", made.as_ref().err());
            assert_eq!(counted.unmapped(), 0, "{case}");
            assert_holds(&standin, before, &counted, &case);
            match failed {
                Some(call) => drop(refused.insert(call)),
                None => {
                    made.unwrap();
                    break;
                }
            }
        }
        for call in ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"] {
            assert!(refused.contains(call), "{call} was never refused: {refused:?}");
        }
    }
}

/// A filled rank that is alone and pulls from the host.
fn alone(device: &Arc<dyn Device>) -> Rank {
    let grain = device.granularity();
    let bytes = [vec![3 * grain], vec![2 * grain]];
    let sharding = Sharding { source: Source::Host, ..sharding(grain) };
    let plan = Plan::new(&layers(&bytes), Group { id: 0, rank: 0, ranks: 1 }, &sharding).unwrap();
    let faults: Arc<dyn Faults> = Arc::new(NoFaults);
    let mut rank = Rank::new(device, plan, Pulls::default(), &faults).unwrap();
    rank.fill().unwrap();
    // What it takes at the first digest and the first wait.
    rank.windows.hello([0; 32], rank.stream).unwrap();
    rank
}

/// A counting device, what the driver held before it, and a rank on it.
fn counting(standin: &Standin) -> (Arc<Faulty>, Resources, Rank) {
    let inner = device(standin.library());
    let (before, counted) = (standin.held_resources(), Faulty::new(inner, false));
    let device: Arc<dyn Device> = counted.clone();
    let rank = alone(&device);
    (counted, before, rank)
}

/// Every call of a change, refused in turn: the layer is as it was, and only what ranges map is held. Where the device
/// has failed, or it cannot be known whether copies have ended, the error says so.
#[test]
fn a_refused_change_holds_no_handle() {
    for driver_version in [12_080, 13_000] {
        let options = Options { granule: 64 << 10, driver_version, ..usual() };
        let Some(standin) = own(options, "fails a call") else { return };
        for resident in [false, true] {
            let (mut counted, mut empty, mut rank) = counting(&standin);
            let (mut refused, mut unusable) = (BTreeSet::new(), BTreeSet::new());
            for n in 0..1000 {
                if resident {
                    rank.windows.make_resident(1, rank.stream).unwrap();
                }
                let before = counted.backings();
                let change = || match resident {
                    false => rank.windows.make_resident(1, rank.stream),
                    true => rank.windows.make_sharded(1),
                };
                let (result, failed) = with_refused(&standin, n, change);
                let case = format!("resident {resident}, call {n}, {failed:?}: {result:?}");
                assert_holds(&standin, empty, &counted, &case);
                if rank.windows.layer(1).is_err() || rank.wait().is_err() {
                    assert!(result.is_err(), "{case}");
                    unusable.insert(failed.unwrap());
                    drop(rank);
                    drop(counted);
                    (counted, empty, rank) = counting(&standin);
                    continue;
                }
                if result.is_err() {
                    let now = (rank.windows.is_resident(1), counted.backings());
                    assert_eq!(now, (Ok(resident), before), "{case}");
                }
                rank.pull(1);
                rank.windows.make_sharded(1).unwrap();
                assert_eq!(counted.unmapped(), 0, "{case}");
                rank.pull(0);
                rank.pull(1);
                match failed {
                    Some(call) => drop(refused.insert(call)),
                    None => break,
                }
            }
            for call in ["cuMemMap", "cuMemSetAccess", "cuMemUnmap"] {
                assert!(refused.contains(call), "{call} was never refused: {refused:?}");
            }
            // The mappings themselves are restored, whichever call was refused.
            assert!(!unusable.iter().any(|call| call.starts_with("cuMemMap")), "{unusable:?}");
        }
    }
}

/// A graph holds the addresses of other ranks' parts too: it goes on being right when a rank's new process has come
/// back, and what the driver held of the old one is given back.
#[test]
fn a_captured_pull_stays_right_when_a_rank_comes_back() {
    for driver_version in [12_080, 13_000] {
        let options = Options { granule: 64 << 10, driver_version, seed: Some(6), ..usual() };
        let Some(standin) = own(options, "has small pages") else { return };
        let (folder, faults): (Folder, Arc<dyn Faults>) = (Folder::new(), Arc::new(NoFaults));
        let start = |own: u32| {
            let device = device(standin.library());
            let grain = device.granularity();
            let plan = Plan::new(
                &layers(&vec![vec![4 * grain]; 4]),
                Group { id: 0, rank: own, ranks: 2 },
                &sharding(grain),
            );
            let mut rank = Rank::new(&device, plan.unwrap(), Pulls { copy: grain }, &faults).unwrap();
            rank.fill().unwrap();
            let links = rank.share(&folder.0, patient(), &faults).unwrap();
            (rank, links)
        };
        std::thread::scope(|scope| {
            let first = scope.spawn(|| start(1));
            let (mut rank, mut links) = start(0);
            let first = first.join().unwrap();
            let memory = || {
                let now = standin.held_resources();
                (now.handles, now.reservations, now.mappings)
            };
            let (device, stream, held) = (Arc::clone(&rank.device), rank.stream, memory());
            device.capture(stream).unwrap();
            rank.windows.pull(0, stream).unwrap();
            rank.windows.pull(1, stream).unwrap();
            let graph = device.captured(stream).unwrap();
            let launch = |rank: &Rank| {
                [2, 3].iter().for_each(|layer| rank.pull(*layer));
                device.launch(graph, stream).unwrap();
                rank.wait().unwrap();
                assert!(rank.is_whole(0) && rank.is_whole(1));
            };
            launch(&rank);
            drop(first);
            assert_eq!(links.event(Duration::from_secs(60)).unwrap_err().kind(), Kind::PeerLost);
            launch(&rank);
            let second = scope.spawn(|| start(1));
            assert_eq!(links.readmit(Duration::from_secs(60)), Ok(Some(1)));
            rank.windows.reattach(1, &mut links, Duration::from_secs(60)).unwrap();
            let second = second.join().unwrap();
            launch(&rank);
            device.release(graph).unwrap();
            assert_eq!(memory(), held);
            drop(second);
        });
    }
}
