//! Sharded weights on the CUDA device: ranks with a device each share and pull; drivers that map a backing from its
//! beginning only, small pages, and GPUs that cannot reach each other.

use std::sync::Arc;

use forebay::Kind;
use forebay::device::Device;
use forebay::device::cuda::CudaDevice;
use forebay::os::{Faults, NoFaults};
use forebay::weights::{Group, Plan, Pulls, Sharding, Source};
use forebay_standin::{Options, Resources};

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
