//! Copies of hot ranges by C's calls.

use forebay::peer::Links;
use forebay::weights::{Border, Outcome, Ring, Windows};
use forebay::{Error, Kind};

use super::*;
use crate::handle::{self, Object};
use crate::replicas::*;
use crate::update::{self, Said, Taken};

fn replica(layer: u32, tensor: usize, rank: u32) -> FbReplica {
    FbReplica { tensor: SHARED[tensor].0.as_ptr(), layer, rank }
}

/// Layers, tensors and ranks.
type Set<'a> = &'a [(u32, usize, u32)];

/// Of which rank 0 gains two and rank 1 one.
const TWO_AND_ONE: Set<'_> = &[(4, 0, 1), (1, 0, 0), (4, 0, 0)];

impl Rank {
    fn try_replicate(
        &self,
        number: u32,
        wanted: &[FbReplica],
        at_most: u64,
    ) -> (FbStatus, *mut FbReplication) {
        let (mut made, list) = (null_mut(), wanted.as_ptr());
        let (weights, count) = (self.weights, wanted.len() as u32);
        // SAFETY: everything is valid.
        let status = unsafe { fb_replication_create(weights, number, list, count, at_most, &raw mut made) };
        (status, made)
    }

    fn replicate(&self, number: u32, wanted: Set<'_>) -> *mut FbReplication {
        let wanted: Vec<FbReplica> = wanted.iter().map(|one| replica(one.0, one.1, one.2)).collect();
        let (status, made) = self.try_replicate(number, &wanted, u64::MAX);
        self.ok(status);
        made
    }

    /// A change of which nothing is left to be copied.
    fn shared_replicas(&self, number: u32, wanted: Set<'_>) -> *mut FbReplication {
        let change = self.replicate(number, wanted);
        // SAFETY: nothing is passed but a null that is allowed.
        unsafe {
            assert_eq!(fb_replication_advance(change, u64::MAX, null_mut(), null_mut()), FbOk);
            let shared = fb_replication_share(change, self.links, null_mut(), SOON);
            assert_eq!(shared, FbOk, "{}", text_of(change));
        }
        change
    }

    fn try_commit(
        &self,
        change: *mut FbReplication,
        stream: *mut c_void,
        at_most: u32,
    ) -> (FbStatus, u32, String) {
        let (weights, links, mut outcome, mut reason) = (self.weights, self.links, 77, [0x33; 512]);
        let (out, text, bytes) = (&raw mut outcome, reason.as_mut_ptr(), reason.len());
        // SAFETY: everything is as long as stated; handles and streams are of this rank, or are refused.
        let status = unsafe {
            fb_weights_commit_replicas(weights, change, links, 17, stream, at_most, out, text, bytes)
        };
        (status, outcome, if status == FbOk { text_in(&reason) } else { String::new() })
    }

    fn replicas(&self) -> Vec<(u32, String, u32)> {
        // SAFETY: the weights are there.
        unsafe { named(&self.listed()) }
    }

    fn listed(&self) -> Vec<FbReplica> {
        let none = FbReplica { tensor: null(), layer: 77, rank: 77 };
        let (mut places, mut count) = (vec![none; 8], 0);
        let (list, room) = (places.as_mut_ptr(), places.len() as u32);
        // SAFETY: room for as many as stated.
        self.ok(unsafe { fb_weights_replicas(self.weights, list, room, &raw mut count) });
        places.truncate(count as usize);
        places
    }
}

/// # Safety
/// The device of the replicas is there.
unsafe fn named(replicas: &[FbReplica]) -> Vec<(u32, String, u32)> {
    // SAFETY: the same contract.
    let name = |one: &FbReplica| unsafe { CStr::from_ptr(one.tensor) }.to_string_lossy().into_owned();
    replicas.iter().map(|one| (one.layer, name(one), one.rank)).collect()
}

fn left(change: *const FbReplication) -> u64 {
    let mut left = 0;
    // SAFETY: room for the result.
    assert_eq!(unsafe { fb_replication_left(change, &raw mut left) }, FbOk);
    left
}

/// Copies so many bytes and returns what is left.
fn advance(change: *mut FbReplication, bytes: u64) -> u64 {
    let mut left = 0;
    // SAFETY: room for the result.
    let status = unsafe { fb_replication_advance(change, bytes, null_mut(), &raw mut left) };
    assert_eq!(status, FbOk, "{}", text_of(change));
    left
}

fn destroy(change: *mut FbReplication) {
    // SAFETY: nothing is passed.
    assert_eq!(unsafe { fb_replication_destroy(change) }, FbOk);
}

/// A rank ends in order. The names of its replicas outlive its weights.
fn closes_and_keeps_names(rank: &Rank) {
    let (listed, names) = (rank.listed(), rank.replicas());
    assert!(!names.is_empty());
    rank.leaves();
    // SAFETY: no call is running, and the device is there.
    unsafe {
        assert_eq!(fb_links_destroy(rank.links), FbOk);
        assert_eq!(fb_weights_destroy(rank.weights), FbOk);
        assert_eq!(named(&listed), names);
        assert_eq!(fb_device_destroy(rank.device), FbOk);
    }
}

#[test]
fn all_ranks_take_new_replicas_at_one_border_or_none_does() {
    let folder = Folder::new();
    let (met, gone) = (Barrier::new(2), Barrier::new(2));
    both(|number| {
        let rank = Rank::shared(&folder, number);
        rank.step(0);
        let (least, addresses) = (rank.bytes(), [1, 4].map(|layer| rank.layer(layer).address));
        let change = rank.replicate(3, TWO_AND_ONE);
        // Whole granules of the tensor that the other rank owns: at least two of nine.
        let gains = left(change);
        assert!(gains >= 2 * 4096 && gains.is_multiple_of(4096), "{gains}");
        let mut still = gains;
        while still > 0 {
            let now = advance(change, 5000);
            assert_eq!(now, still.saturating_sub(5000));
            still = now;
            rank.step(0);
        }
        if number == 0 {
            // What rank 1 says of the change meanwhile is kept for the call that takes it.
            assert_eq!(rank.event(300).0.kind, FB_LINKS_NOTHING);
        }
        // SAFETY: nothing is passed but a null that is allowed.
        unsafe {
            let shared = fb_replication_share(change, rank.links, null_mut(), SOON);
            assert_eq!(shared, FbOk, "{}", text_of(change));
            assert_eq!(fb_replication_share(change, rank.links, null_mut(), SOON), FbInvalidState);
            assert_eq!(fb_replication_advance(change, 1, null_mut(), null_mut()), FbInvalidState);
        }
        rank.step(0);
        assert_eq!((rank.replicas(), rank.bytes()), (vec![], least));
        // What is refused before the decision says so, and the call is repeated.
        let refused = |change, stream| {
            let (status, outcome, _) = rank.try_commit(change, stream, SOON);
            (status, outcome)
        };
        let strange = std::ptr::without_provenance_mut(1 << 40);
        assert_eq!(refused(change, strange), (FbOutOfRange, FB_UPDATE_OPEN));
        assert_eq!(refused(null_mut(), null_mut()), (FbInvalidConfig, FB_UPDATE_OPEN));
        assert_eq!(refused(rank.device.cast(), null_mut()), (FbInvalidConfig, FB_UPDATE_OPEN));
        rank.ok(rank.begin());
        assert_eq!(refused(change, null_mut()), (FbBusy, FB_UPDATE_OPEN));
        rank.abandon();
        assert_eq!(rank.try_commit(change, null_mut(), SOON), (FbOk, FB_UPDATE_COMMITTED, String::new()));
        assert_eq!(refused(change, null_mut()), (FbInvalidState, FB_UPDATE_OPEN));
        destroy(change);
        // The list is in order. What is gained is what was copied.
        let name = |layer, rank| (layer, "o_proj".to_owned(), rank);
        assert_eq!(rank.replicas(), [name(1, 0), name(4, 0), name(4, 1)]);
        assert_eq!(rank.bytes(), least + gains);
        assert_eq!([1, 4].map(|layer| rank.layer(layer).address), addresses);
        (0..2).for_each(|_| rank.step(0));
        // The next one is given up by rank 1 after it was shared.
        let change = rank.shared_replicas(4, &[(2, 0, 0), (2, 0, 1)]);
        met.wait();
        if number == 0 {
            gone.wait();
            let (status, outcome, reason) = rank.try_commit(change, null_mut(), SOON);
            assert_eq!((status, outcome), (FbOk, FB_UPDATE_ABORTED));
            assert!(reason.contains("another rank has aborted"), "{reason}");
        } else {
            // SAFETY: nothing is passed.
            unsafe {
                assert_eq!(fb_replication_abort(change), FbOk);
                assert_eq!(fb_replication_abort(change), FbOk, "nothing happens");
            }
            gone.wait();
        }
        destroy(change);
        assert_eq!((rank.replicas().len(), rank.bytes()), (3, least + gains));
        rank.step(0);
        closes_and_keeps_names(&rank);
    });
}

#[test]
fn replicas_are_dropped_without_the_others_and_a_rank_with_other_ones_is_refused() {
    let folder = Folder::new();
    let met = Barrier::new(2);
    both(|number| {
        let rank = Rank::shared(&folder, number);
        let least = rank.bytes();
        let change = rank.shared_replicas(1, TWO_AND_ONE);
        // SAFETY: nothing is passed.
        let drops = || unsafe { fb_weights_drop_replicas(rank.weights) };
        assert_eq!(drops(), FbBusy);
        assert!(text_of(rank.weights).contains("a change of replicas"), "{}", text_of(rank.weights));
        assert_eq!(rank.try_commit(change, null_mut(), SOON).1, FB_UPDATE_COMMITTED);
        destroy(change);
        let replicas = rank.bytes() - least;
        assert!(replicas > 0);
        // A list that is longer than its room.
        let mut places = [replica(77, 0, 77); 2];
        let mut count = 0;
        // SAFETY: room for one of them.
        rank.ok(unsafe { fb_weights_replicas(rank.weights, places.as_mut_ptr(), 1, &raw mut count) });
        assert_eq!((count, places[0].layer, places[1].layer), (3, 1, 77));
        rank.ok(rank.begin());
        // SAFETY: nothing is passed.
        assert_eq!((drops(), unsafe { fb_weights_reroute(rank.weights) }), (FbBusy, FbBusy));
        rank.abandon();
        if number == 0 {
            rank.ok(drops());
            assert_eq!((rank.replicas(), rank.bytes()), (vec![], least));
        }
        rank.step(0);
        met.wait();
        // Ranks with different sets refuse the next change.
        let change = rank.replicate(2, &[(0, 0, 0)]);
        advance(change, u64::MAX);
        // SAFETY: nothing is passed.
        let status = unsafe { fb_replication_share(change, rank.links, null_mut(), SOON) };
        assert!(matches!(status, FbInvalidConfig | FbCancelled), "{status:?}: {}", text_of(change));
        destroy(change);
        met.wait();
        rank.ok(drops());
        rank.step(0);
        let change = rank.shared_replicas(3, &[(0, 0, 0)]);
        assert_eq!(rank.try_commit(change, null_mut(), SOON).1, FB_UPDATE_COMMITTED);
        destroy(change);
        // A new version of the layer has none.
        let update = rank.update(1, &[0]);
        assert_eq!(rank.share_update(update), FbOk, "{}", text_of(update));
        assert_eq!(rank.commit(update, 18, SOON).0, FB_UPDATE_COMMITTED);
        // SAFETY: nothing is passed.
        assert_eq!(unsafe { fb_update_destroy(update) }, FbOk);
        assert_eq!((rank.replicas(), rank.bytes()), (vec![], least));
        rank.close();
    });
}

/// One of three ranks that have shared, whose layers are one tensor of ten granules.
fn of_three(folder: &Folder, number: u32) -> Rank {
    let (name, bytes) = (c"o_proj".as_ptr(), GRANULES.len() as u64);
    let tensors: Vec<FbTensor> = (0..MODEL).map(|layer| FbTensor { name, bytes, layer, ..sized() }).collect();
    let model = Model::new();
    let config = FbWeightsConfig {
        tensors: tensors.as_ptr(),
        tensor_count: MODEL,
        pattern_count: 1,
        ranks: 3,
        ..model.config(number)
    };
    let device = host();
    let mut rank = Rank { device, weights: create(device, &config).unwrap(), links: null_mut() };
    (0..MODEL).for_each(|layer| rank.ok(rank.fill(layer, 0, &granules(layer))));
    let met = rank.meet(folder);
    rank.ok(met);
    rank.ok(rank.share());
    rank
}

const GRANULES: std::ops::Range<usize> = 0..40_960;

fn granules(layer: u32) -> Vec<u8> {
    GRANULES.map(|at| weight(0, layer, 0, at)).collect()
}

/// A step over such layers, up to one that cannot be pulled.
fn steps(rank: &Rank) -> FbStatus {
    let ok = |status| if status == FbOk { Ok(()) } else { Err(status) };
    let all = || {
        ok(rank.begin())?;
        for layer in 0..MODEL {
            ok(rank.enter(layer))?;
            assert_eq!(rank.tensor(layer, 0), granules(layer), "layer {layer}");
            ok(rank.leave(layer))?;
        }
        ok(rank.end())
    };
    all().err().unwrap_or(FbOk)
}

#[test]
fn a_rank_that_was_lost_is_read_around_where_another_has_its_bytes() {
    let folder = Folder::new();
    let taken = Barrier::new(3);
    let run = |number| {
        let mut rank = of_three(&folder, number);
        let every: Vec<(u32, usize, u32)> = (0..MODEL).map(|layer| (layer, 0, 1)).collect();
        let change = rank.shared_replicas(1, &every);
        assert_eq!(rank.try_commit(change, null_mut(), SOON).1, FB_UPDATE_COMMITTED);
        destroy(change);
        assert_eq!(steps(&rank), FbOk, "{}", text_of(rank.weights));
        taken.wait();
        if number == 0 {
            rank.destroy();
            taken.wait();
            return;
        }
        let (event, text) = rank.event(SOON);
        assert_eq!((event.kind, event.rank), (FB_LINKS_LOST, 0), "{text}");
        // SAFETY: nothing is passed.
        rank.ok(unsafe { fb_weights_lost(rank.weights, 0) });
        // Rank 1 has a copy of all that rank 0 owned. Rank 2 has none, and reads some of it at its owner.
        let wanted = if number == 1 { FbOk } else { FbPeerLost };
        assert_eq!(steps(&rank), wanted, "{}", text_of(rank.weights));
        rank.abandon();
        // SAFETY: nothing is passed.
        rank.ok(unsafe { fb_weights_reroute(rank.weights) });
        (0..2).for_each(|_| assert_eq!(steps(&rank), FbOk, "{}", text_of(rank.weights)));
        taken.wait();
        rank.close();
    };
    thread::scope(|scope| {
        let run = &run;
        let threads = [0, 1, 2].map(|number| scope.spawn(move || run(number)));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_change_that_cannot_be_is_refused_and_one_that_is_left_keeps_its_device() {
    let folder = Folder::new();
    both(|number| {
        let early = Rank::filled(number, 0);
        let (status, made) = early.try_replicate(1, &[replica(0, 0, 0)], u64::MAX);
        assert_eq!((status, made), (FbInvalidState, null_mut()));
        assert!(text_of(early.weights).contains("not shared"), "{}", text_of(early.weights));
        let mut early = early;
        early.destroy();
        let mut rank = Rank::shared(&folder, number);
        let one = [replica(0, 0, 0)];
        let unnamed = [FbReplica { tensor: null(), layer: 0, rank: 0 }];
        let unknown = [FbReplica { tensor: c"q_norm".as_ptr(), layer: 0, rank: 0 }];
        let crooked = [FbReplica { tensor: c"\xFF".as_ptr(), layer: 0, rank: 0 }];
        let refused = [
            ((0, &one[..], u64::MAX), FbOutOfRange, "number 0"),
            ((1, &unnamed, u64::MAX), FbInvalidConfig, "tensor"),
            ((1, &unknown, u64::MAX), FbOutOfRange, "q_norm"),
            ((1, &crooked, u64::MAX), FbInvalidConfig, "UTF-8"),
            ((1, &[replica(MODEL, 0, 0)], u64::MAX), FbOutOfRange, "layer 6"),
            ((1, &[replica(0, 0, 2)], u64::MAX), FbOutOfRange, "rank 2"),
            ((1, &[one[0], one[0]], u64::MAX), FbInvalidConfig, "twice"),
            ((1, &[replica(0, 0, number)], 5), FbOutOfMemory, "allowed 5"),
        ];
        for ((begun, wanted, at_most), status, words) in refused {
            assert_eq!(rank.try_replicate(begun, wanted, at_most), (status, null_mut()));
            assert!(text_of(rank.weights).contains(words), "{}, not {words}", text_of(rank.weights));
        }
        let create = |weights, list, count, made| {
            // SAFETY: nulls and handles of another kind are refused.
            unsafe { fb_replication_create(weights, 1, list, count, u64::MAX, made) }
        };
        let mut made = null_mut();
        assert_eq!(create(null_mut(), one.as_ptr(), 1, &raw mut made), FbInvalidConfig);
        assert_eq!(create(rank.links.cast(), one.as_ptr(), 1, &raw mut made), FbInvalidConfig);
        assert_eq!(create(rank.weights, null(), 1, &raw mut made), FbInvalidConfig);
        assert_eq!(create(rank.weights, one.as_ptr(), 1, null_mut()), FbInvalidConfig);
        assert!(made.is_null());
        let change = rank.replicate(1, &[(0, 0, number)]);
        assert_eq!(rank.try_replicate(2, &one, u64::MAX).0, FbBusy);
        let (mut update, links, step) = (null_mut(), rank.links, null_mut());
        // SAFETY: everything is valid, or refused.
        unsafe {
            let updates = fb_update_create(rank.weights, 1, [0].as_ptr(), 1, u64::MAX, &raw mut update);
            assert_eq!((updates, update), (FbBusy, null_mut()));
            assert_eq!(fb_replication_share(change, links, step, 0), FbInvalidState);
            assert!(text_of(change).contains(&format!("bytes {}", left(change))), "{}", text_of(change));
            assert_eq!(fb_replication_share(change, null_mut(), step, 0), FbInvalidConfig);
            assert_eq!(fb_replication_left(change, null_mut()), FbInvalidConfig);
            let strange = std::ptr::without_provenance_mut(77);
            assert_eq!(fb_replication_advance(change, 1, strange, null_mut()), FbOutOfRange);
            let commit = |links, outcome| {
                fb_weights_commit_replicas(rank.weights, change, links, 1, step, 0, outcome, null_mut(), 0)
            };
            let mut outcome = 77;
            assert_eq!(commit(links, &raw mut outcome), FbInvalidState, "it is not shared");
            assert_eq!(commit(null_mut(), &raw mut outcome), FbInvalidConfig);
            assert_eq!(commit(links, null_mut()), FbInvalidConfig);
            assert_eq!(outcome, FB_UPDATE_OPEN);
            assert_eq!(fb_links_destroy(std::mem::replace(&mut rank.links, null_mut())), FbOk);
            assert_eq!(fb_weights_destroy(rank.weights), FbOk);
            assert_eq!(fb_device_destroy(rank.device), FbBusy);
            assert!(text_of(rank.device).contains("left 1"), "{}", text_of(rank.device));
            assert_eq!(fb_replication_destroy(change), FbOk);
            assert_eq!(fb_replication_destroy(change), FbClosed);
            assert_eq!(fb_replication_abort(change), FbClosed);
            assert_eq!(fb_device_destroy(rank.device), FbOk);
        }
    });
}

/// A commit that fails, with or without a decision.
struct Fails {
    decides: bool,
    is_over: bool,
}

impl Object for Fails {
    const KIND: u8 = 230;
    const NAME: &'static str = "fails";
}

impl Taken for Fails {
    fn is_over(&self) -> bool {
        self.is_over
    }

    fn commit(
        &mut self,
        _ring: &mut Ring<Windows>,
        _links: &mut Links,
        _border: Border,
    ) -> Result<Outcome, Error> {
        self.is_over |= self.decides;
        Err(Error::new(Kind::DeviceFailed, "commit"))
    }
}

#[test]
fn an_error_after_the_decision_is_told_from_one_before_it() {
    let folder = Folder::new();
    let mut rank = alone(Model::new().config(0));
    let met = rank.meet(&folder);
    rank.ok(met);
    rank.ok(rank.share());
    let cases = [
        (Fails { decides: false, is_over: false }, FB_UPDATE_OPEN),
        (Fails { decides: true, is_over: false }, FB_UPDATE_FAILED),
        (Fails { decides: true, is_over: true }, FB_UPDATE_OPEN),
    ];
    for (fails, wanted) in cases {
        let (taken, mut outcome, mut reason) = (handle::give(|| Ok(fails)).unwrap(), 77, [0x33; 8]);
        let border =
            Border { step: 1, stream: forebay::device::Stream(0), at_most: std::time::Duration::ZERO };
        let said =
            Said { outcome: &raw mut outcome, reason: reason.as_mut_ptr(), reason_bytes: reason.len() };
        // SAFETY: everything is as long as stated.
        let status = unsafe { update::commit(rank.weights, taken, rank.links, border, said) };
        assert_eq!((status, outcome, reason), (FbDeviceFailed, wanted, [0x33; 8]));
        assert_eq!(handle::end(taken, |_| Ok(())), FbOk);
    }
    rank.step(0);
    rank.close();
}
