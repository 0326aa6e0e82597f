//! Every schedule is ordered by its edges, and every edge is needed: with the device watched
//! (`device::watch`), steps of two micro-batches pass in every order, and each wait that orders anything, left
//! out, gives a conflict.
//!
//! Nothing is timed and no stream is held back: what is checked is what the edges allow, not what one run
//! happened to do.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "order/rig.rs"]
mod rig;

use forebay::overlap::Overlap;
use rig::{Rig, Sharing};

const ORDERS: [[Overlap; 3]; 5] = [
    [Overlap::None; 3],
    [Overlap::Da; 3],
    [Overlap::Dba; 3],
    [Overlap::Dba, Overlap::None, Overlap::Da],
    [Overlap::Da, Overlap::Dba, Overlap::None],
];
const SHARINGS: [Sharing; 3] = [Sharing::None, Sharing::Two, Sharing::Copies];

#[test]
fn every_order_of_a_step_is_ordered_by_its_edges() {
    for (orders, sharing, passes) in
        ORDERS.iter().flat_map(|o| SHARINGS.map(|s| (*o, s))).flat_map(|(o, s)| [1, 2].map(|p| (o, s, p)))
    {
        let mut rig = Rig::new(passes, sharing, None);
        rig.fill().unwrap();
        rig.run(orders, 3).unwrap_or_else(|error| panic!("{orders:?} {sharing:?} {passes}: {error}"));
        rig.retire();
        rig.run(orders, 3).unwrap();
        rig.retire();
        assert_eq!(rig.watch.conflict(), None);
        rig.cache.validate().unwrap();
    }
}

/// Waits of the first two of three steps; the third stands for whatever follows.
#[test]
fn every_edge_left_out_is_caught() {
    for (orders, sharing, passes) in
        ORDERS.iter().flat_map(|o| SHARINGS.map(|s| (*o, s))).flat_map(|(o, s)| [1, 2].map(|p| (o, s, p)))
    {
        let mut whole = Rig::new(passes, sharing, None);
        whole.fill().unwrap();
        let first = whole.watch.waits();
        whole.run(orders, 2).unwrap();
        let last = whole.watch.waits();
        let (mut needed, mut idle) = (0, 0);
        for number in first..last {
            let mut rig = Rig::new(passes, sharing, Some(number));
            rig.fill().unwrap();
            let ran = rig.run(orders, 3);
            let left_out = rig.watch.left_out().unwrap();
            if left_out.ordering {
                needed += 1
            } else {
                idle += 1
            }
            if ran.is_err() != left_out.ordering {
                println!(
                    "{orders:?} {sharing:?} {passes}: wait {} of {}: {left_out:?} {ran:?}",
                    number - first,
                    last - first
                );
            }
        }
        println!("{orders:?} {sharing:?} {passes}: {needed} needed, {idle} idle");
    }
}
