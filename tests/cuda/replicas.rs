//! Replicas under captured steps: one graph, captured before the first change, is launched again and again, and each
//! launch finds every byte of the owners. Memory of the driver is what it was.

use std::sync::Arc;
use std::thread;

use forebay::Kind;
use forebay::weights::{Border, Outcome, Replica, Wrap};
use forebay_standin::{Options, Resources};

use crate::rig::own;
use crate::ring::delayed;
use crate::updates::Captured;
use crate::windows::{Folder, PATIENCE};

fn replica(layer: usize, rank: u32) -> Replica {
    Replica { layer, tensor: format!("model.layers.{layer}.weight.0"), rank }
}

/// A change, with a launch after each part of it.
fn change(own: &mut Captured, number: u32, wanted: &[Replica]) {
    let (device, stream) = (Arc::clone(&own.rank.device), own.rank.stream);
    let filler = device.stream().unwrap();
    let mut change = own.ring.replicate(number, wanted, u64::MAX).unwrap();
    // Nothing is filled or mapped anew on a stream that is captured.
    device.capture(stream).unwrap();
    assert_eq!(change.advance(1, stream).unwrap_err().kind(), Kind::Busy);
    device.release(device.captured(stream).unwrap()).unwrap();
    while change.advance(device.granularity(), filler).unwrap() > 0 {
        own.launch();
    }
    change.share(&mut own.links, filler, PATIENCE).unwrap();
    own.launch();
    let border = Border { step: number.into(), stream, at_most: PATIENCE };
    device.capture(stream).unwrap();
    let busy = own.ring.commit_replicas(&mut change, &mut own.links, border).unwrap_err();
    assert_eq!(busy.kind(), Kind::Busy, "{busy}");
    device.release(device.captured(stream).unwrap()).unwrap();
    assert_eq!(own.ring.commit_replicas(&mut change, &mut own.links, border), Ok(Outcome::Committed));
    assert_eq!(own.ring.pulls().replicas(), wanted);
    (0..3).for_each(|_| own.launch());
}

#[test]
fn a_graph_is_launched_over_changes_and_finds_the_bytes_of_the_owners() {
    for (seed, wrap) in [(None, Wrap::Joined), (Some(4), Wrap::Behind), (Some(5), Wrap::Joined)] {
        let options = Options { driver_version: 13_000, ..delayed(seed) };
        let Some(standin) = own(options, "counts what is held") else { return };
        let folder = Folder::new();
        let work = |rank| {
            let mut own = Captured::new(standin.library(), rank, wrap, &folder);
            own.launch();
            change(&mut own, 1, &[replica(1, 1), replica(2, 0)]);
            let held = own.faulty.backings();
            own.ring.make_resident(2, own.rank.stream).unwrap();
            change(&mut own, 2, &[replica(2, 0), replica(2, 1), replica(3, 1)]);
            own.ring.make_sharded(2).unwrap();
            own.launch();
            change(&mut own, 3, &[]);
            // Two replicas less.
            assert_eq!(own.faulty.backings(), held - 2);
            own
        };
        let ended = thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| scope.spawn(move || work(rank)));
            ranks.map(|rank| rank.join().unwrap())
        });
        for own in ended {
            own.rank.device.release(own.graph).unwrap();
        }
        assert_eq!(standin.held_resources(), Resources::default(), "{seed:?}");
    }
}

/// A driver that maps memory from its beginning only cannot put a replica into a part.
#[test]
fn drivers_that_map_no_offsets_have_no_replicas() {
    let options = Options { driver_version: 12_040, ..delayed(None) };
    let Some(standin) = own(options, "has a version") else { return };
    let folder = Folder::new();
    let work = |rank| {
        let mut own = Captured::new(standin.library(), rank, Wrap::Joined, &folder);
        let held = own.faulty.backings();
        let error = own.ring.replicate(1, &[replica(1, 1)], u64::MAX).unwrap_err();
        assert_eq!((error.kind(), own.faulty.backings()), (Kind::Unsupported, held), "{error}");
        own.launch();
        own
    };
    let ended = thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || work(rank)));
        ranks.map(|rank| rank.join().unwrap())
    });
    for own in ended {
        own.rank.device.release(own.graph).unwrap();
    }
}
