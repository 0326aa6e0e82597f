//! Copies from peers' memory: what is one, its rate, and who divides the link.

use std::fs::File;
use std::os::fd::OwnedFd;

use super::*;
use crate::device::Mapped;
use crate::os::Protection;

/// Bytes of a copy: a granule of a device without memory.
const GRAIN: u64 = LINE;

/// Nanoseconds of a copy of a granule inside the device, by [`costs`]: read and written at 1 byte a nanosecond.
const INSIDE: f64 = 2.0 * GRAIN as f64;

/// Nanoseconds of one from a peer, alone on its link of 4 bytes a nanosecond.
const PULL: f64 = GRAIN as f64 / 4.0;

/// A descriptor: a device without memory takes any.
fn descriptor() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

fn piece(backing: crate::device::Backing) -> Mapped {
    Mapped { backing, offset: 0, bytes: GRAIN }
}

/// A granule of a peer's memory, to be read.
fn peer(device: &ClockDevice) -> Slice {
    let backing = device.import_backing(descriptor(), GRAIN, Protection::Read).unwrap();
    device.range(&[piece(backing)], Protection::Read).unwrap()
}

/// The time of a copy that runs alone.
fn alone(device: &ClockDevice, from: Slice, to: Slice) -> f64 {
    let (stream, start) = (device.stream().unwrap(), device.now());
    device.copy(stream, from, to).unwrap();
    device.run().unwrap() - start
}

#[test]
fn a_copy_is_a_peers_where_it_maps_an_imported_backing_now() {
    let device = exact(costs());
    let own = device.allocate(2 * GRAIN).unwrap();
    let [first, second] = [0, GRAIN].map(|at| own.part(at, GRAIN).unwrap());
    assert_eq!(alone(&device, first, second), INSIDE);
    assert_eq!(alone(&device, peer(&device), second), PULL);
    // A range of a peer's page and two of its own: only what touches the peer's page crosses the link.
    let theirs = device.import_backing(descriptor(), 2 * GRAIN, Protection::ReadWrite).unwrap();
    let ours = device.backing(2 * GRAIN).unwrap();
    let pieces = [piece(ours), piece(theirs), piece(ours)];
    let range = device.range(&pieces, Protection::ReadWrite).unwrap();
    let pages = [0, 1, 2].map(|page| range.part(page * GRAIN, GRAIN).unwrap());
    let times = || pages.map(|page| alone(&device, page, second));
    assert_eq!(times(), [INSIDE, PULL, INSIDE]);
    assert_eq!(alone(&device, first, pages[1]), PULL, "a push crosses it too");
    let across = range.part(GRAIN / 2, GRAIN).unwrap();
    assert_eq!(alone(&device, across, second), PULL);
    // Remapped, the same addresses are something else, and back again.
    device.remap(pages[1], &[piece(ours)]).unwrap();
    assert_eq!(times(), [INSIDE; 3]);
    device.remap(pages[2], &[piece(theirs)]).unwrap();
    assert_eq!(times(), [INSIDE, INSIDE, PULL]);
    device.remap(range, &[piece(theirs), piece(ours), piece(ours)]).unwrap();
    assert_eq!(times(), [PULL, INSIDE, INSIDE]);
    // The numbers of backings that were given back are no peer's.
    device.remap(range, &[piece(ours); 3]).unwrap();
    device.give_back(theirs).unwrap();
    assert_eq!(times(), [INSIDE; 3]);
    let odd = device.import_backing(descriptor(), GRAIN + 1, Protection::Read).unwrap_err();
    assert_eq!(odd.kind(), Kind::InvalidConfig);
}

#[test]
fn pulls_and_collectives_divide_the_link_and_the_links_to_the_host_are_others() {
    let device = exact(costs());
    let [a, b, c, d, e] = streams(&device);
    let (from, to) = (peer(&device), device.allocate(GRAIN).unwrap());
    device.copy(a, from, to).unwrap();
    device.copy(b, from, to).unwrap();
    // Alone it would move 2 bytes a nanosecond; a third of the link is less than that.
    let demand = Demand { ns: PULL, sm: 0.5 };
    device.collective(c, named("exchange"), demand, GRAIN / 2).unwrap();
    // Neither work without bytes nor a copy from the host notices.
    compute(&device, d, PULL, 0.5);
    device.traffic(e, named("up"), Direction::ToDevice, GRAIN).unwrap();
    assert_eq!(device.run().unwrap(), 4.0 * PULL);
    // 4/3 bytes a nanosecond each, until the collective has moved its half: then the two pulls share.
    let collective = 1.5 * PULL;
    let all: Vec<(f64, f64)> = times(&device);
    let near =
        |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-6 * PULL, "{found} for {wanted}");
    assert_eq!(all[0], (0.0, PULL));
    near(all[1].1, collective);
    near(all[2].1, collective + PULL);
    near(all[3].1, collective + PULL);
    assert_eq!(all[4], (0.0, 4.0 * PULL));
}

#[test]
fn a_collective_that_cannot_use_its_part_leaves_the_rest_to_a_pull() {
    let device = exact(costs());
    let [a, b] = streams(&device);
    let (from, to) = (peer(&device), device.allocate(GRAIN).unwrap());
    device.copy(a, from, to).unwrap();
    // 1 byte a nanosecond of 4, so that 3 are left to the pull.
    device.collective(b, named("exchange"), Demand { ns: GRAIN as f64, sm: 0.0 }, GRAIN).unwrap();
    device.run().unwrap();
    assert_eq!(times(&device), [(0.0, GRAIN as f64 / 3.0), (0.0, GRAIN as f64)]);
    let kind = |demand| device.collective(a, named(""), demand, 1).unwrap_err().kind();
    assert_eq!(kind(Demand { ns: -1.0, sm: 0.0 }), Kind::InvalidConfig);
    let slow = exact(Costs { peer: Peer { rate: 1.0, copy_engines: 1 }, ..costs() });
    let stream = slow.stream().unwrap();
    let long = slow.collective(stream, named(""), Demand { ns: 1.0, sm: 0.0 }, 2_000_000).unwrap_err();
    assert_eq!(long.place().split(' ').next(), Some("operation.ns"));
}

#[test]
fn pulls_beyond_the_copy_engines_wait_in_the_order_of_becoming_ready() {
    let device = exact(Costs { peer: Peer { rate: 4e9, copy_engines: 1 }, ..costs() });
    let [a, b, c] = streams(&device);
    let (from, to) = (peer(&device), device.allocate(GRAIN).unwrap());
    // Copies from the host have copy engines of their own.
    device.traffic(c, named("up"), Direction::ToDevice, 10).unwrap();
    compute(&device, a, 1.0, 0.0);
    device.copy(a, from, to).unwrap();
    device.copy(b, from, to).unwrap();
    assert_eq!(device.run().unwrap(), 2.0 * PULL);
    assert_eq!(times(&device)[2..], [(0.0, PULL), (PULL, 2.0 * PULL)]);
}
