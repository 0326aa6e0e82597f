//! Tests of shared weights by C's calls: two ranks, as threads, which meet in a folder. What a window has to show is
//! computed here, byte by byte, from layer, tensor and version.

#[cfg(feature = "cuda")]
mod captured;
mod decided;
mod refused;
mod replicas;

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Duration;

use super::*;
use crate::links::*;
use crate::ring::*;
use crate::testing::allocations;
use crate::update::*;
use crate::weights::*;

const MODEL: u32 = 6;
const SHARED: [(&CStr, usize); 2] = [(c"o_proj", 40_000), (c"kv_b", 9_001)];
const SOON: u32 = 20_000;

/// Where ranks wait for each other. One that fails elsewhere ends the others too.
struct Barrier {
    ranks: u32,
    came: Mutex<u32>,
    changed: Condvar,
}

impl Barrier {
    fn new(ranks: u32) -> Barrier {
        Barrier { ranks, came: Mutex::new(0), changed: Condvar::new() }
    }

    fn wait(&self) {
        let mut came = self.came.lock().unwrap();
        *came += 1;
        let all = came.next_multiple_of(self.ranks);
        self.changed.notify_all();
        let at_most = Duration::from_millis(SOON.into());
        let (came, waited) = self.changed.wait_timeout_while(came, at_most, |came| *came < all).unwrap();
        drop(came);
        assert!(!waited.timed_out(), "a rank has failed");
    }
}

/// The byte of a tensor, as every rank would load it.
fn weight(version: u32, layer: u32, tensor: usize, at: usize) -> u8 {
    (at / 3 + 29 * layer as usize + 83 * tensor + 151 * version as usize) as u8
}

fn whole(version: u32, layer: u32, tensor: usize) -> Vec<u8> {
    (0..SHARED[tensor].1).map(|at| weight(version, layer, tensor, at)).collect()
}

/// A folder of the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("forebay-c-weights-{}-{next}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The arrays of a configuration.
struct Model {
    tensors: Vec<FbTensor>,
    patterns: Vec<*const c_char>,
}

impl Model {
    /// Two tensors of each layer are shared, one is not.
    fn new() -> Model {
        let mut tensors = Vec::new();
        for layer in 0..MODEL {
            for (name, bytes) in SHARED.into_iter().chain([(c"q_norm", 64)]) {
                tensors.push(FbTensor { name: name.as_ptr(), bytes: bytes as u64, layer, ..sized() });
            }
        }
        Model { tensors, patterns: vec![c"o_*".as_ptr(), c"kv_b".as_ptr()] }
    }

    fn config(&self, rank: u32) -> FbWeightsConfig {
        FbWeightsConfig {
            tensors: self.tensors.as_ptr(),
            tensor_count: self.tensors.len() as u32,
            patterns: self.patterns.as_ptr(),
            pattern_count: self.patterns.len() as u32,
            layers: MODEL,
            rank,
            ranks: 2,
            ..sized()
        }
    }
}

fn plan(device: *const FbDevice, config: &FbWeightsConfig) -> Result<FbWeightsFootprint, (FbStatus, String)> {
    let (mut text, mut footprint) = ([0; 512], sized());
    // SAFETY: everything is valid and as long as stated, or refused.
    let status =
        unsafe { fb_weights_plan(device, config, text.as_mut_ptr(), text.len(), &raw mut footprint) };
    if status == FbOk { Ok(footprint) } else { Err((status, text_in(&text))) }
}

fn create(device: *const FbDevice, config: &FbWeightsConfig) -> Result<*mut FbWeights, (FbStatus, String)> {
    let (mut text, mut weights) = ([0; 512], null_mut());
    // SAFETY: everything is valid and as long as stated, or refused.
    let status =
        unsafe { fb_weights_create(device, config, text.as_mut_ptr(), text.len(), &raw mut weights) };
    if status == FbOk { Ok(weights) } else { Err((status, text_in(&text))) }
}

/// One rank. Its work runs inside the calls that enqueue it.
struct Rank {
    device: *mut FbDevice,
    weights: *mut FbWeights,
    links: *mut FbLinks,
}

impl Rank {
    /// Filled, with the weights of `version`.
    fn filled(rank: u32, version: u32) -> Rank {
        let device = host();
        let weights = create(device, &Model::new().config(rank)).unwrap();
        let made = Rank { device, weights, links: null_mut() };
        for layer in 0..MODEL {
            for tensor in 0..SHARED.len() {
                made.ok(made.fill(layer, tensor, &whole(version, layer, tensor)));
            }
        }
        made
    }

    fn ok(&self, status: FbStatus) {
        assert_eq!(status, FbOk, "{}", text_of(self.weights));
    }

    fn fill(&self, layer: u32, tensor: usize, from: &[u8]) -> FbStatus {
        let (name, from, bytes) = (SHARED[tensor].0.as_ptr(), from.as_ptr().cast(), from.len() as u64);
        // SAFETY: the copy runs inside the call.
        unsafe { fb_weights_fill(self.weights, layer, name, from, bytes, null_mut()) }
    }

    fn meet(&mut self, folder: &Folder) -> FbStatus {
        let folder = CString::new(folder.0.to_str().unwrap()).unwrap();
        let config = FbLinksConfig { folder: folder.as_ptr(), geometry: [7; 32], hello_ms: SOON, ..sized() };
        // SAFETY: everything is valid.
        unsafe { fb_links_meet(self.weights, &raw const config, null_mut(), &raw mut self.links) }
    }

    fn share(&self) -> FbStatus {
        // SAFETY: nothing is passed.
        unsafe { fb_weights_share(self.weights, self.links, null_mut(), SOON) }
    }

    /// Two ranks that have shared.
    fn shared(folder: &Folder, rank: u32) -> Rank {
        let mut made = Rank::filled(rank, 0);
        let met = made.meet(folder);
        made.ok(met);
        made.ok(made.share());
        made
    }

    fn event(&self, at_most: u32) -> (FbLinksEvent, String) {
        let (mut text, mut event) = ([0x33; 512], sized());
        // SAFETY: everything is as long as stated.
        let status =
            unsafe { fb_links_poll(self.links, at_most, text.as_mut_ptr(), text.len(), &raw mut event) };
        assert_eq!(status, FbOk, "{}", text_of(self.links));
        (event, text_in(&text))
    }

    fn tensor(&self, layer: u32, tensor: usize) -> &[u8] {
        let (mut address, mut bytes) = (null_mut(), 0);
        let name = SHARED[tensor].0.as_ptr();
        // SAFETY: room for the results; the address is that of so many bytes, which no work writes meanwhile.
        unsafe {
            self.ok(fb_weights_tensor(self.weights, layer, name, &raw mut address, &raw mut bytes));
            std::slice::from_raw_parts(address.cast(), bytes as usize)
        }
    }

    /// Whether a layer's window shows this version.
    fn shows(&self, layer: u32, version: u32) -> bool {
        (0..SHARED.len()).all(|tensor| self.tensor(layer, tensor) == whole(version, layer, tensor))
    }

    fn layer(&self, layer: u32) -> FbLayerWeights {
        let mut found = sized();
        // SAFETY: it states its size.
        self.ok(unsafe { fb_weights_layer(self.weights, layer, &raw mut found) });
        found
    }

    fn bytes(&self) -> u64 {
        let mut bytes = 0;
        // SAFETY: room for the result.
        self.ok(unsafe { fb_weights_bytes(self.weights, &raw mut bytes) });
        bytes
    }

    fn begin(&self) -> FbStatus {
        // SAFETY: nothing is passed.
        unsafe { fb_weights_begin(self.weights, 1, 0) }
    }

    fn enter(&self, layer: u32) -> FbStatus {
        // SAFETY: nothing is passed.
        unsafe { fb_weights_enter(self.weights, layer, 0, null_mut()) }
    }

    fn leave(&self, layer: u32) -> FbStatus {
        // SAFETY: nothing is passed.
        unsafe { fb_weights_leave(self.weights, layer, 0, null_mut()) }
    }

    fn end(&self) -> FbStatus {
        // SAFETY: nothing is passed.
        unsafe { fb_weights_end(self.weights, null_mut()) }
    }

    fn abandon(&self) {
        // SAFETY: nothing is passed.
        self.ok(unsafe { fb_weights_abandon(self.weights) });
    }

    /// A step in which every layer shows this version while it is in use.
    fn step(&self, version: u32) {
        self.ok(self.begin());
        for layer in 0..MODEL {
            self.ok(self.enter(layer));
            assert!(self.shows(layer, version), "layer {layer}");
            // SAFETY: nothing is passed.
            self.ok(unsafe { fb_weights_advance(self.weights, null_mut()) });
            self.ok(self.leave(layer));
        }
        self.ok(self.end());
    }

    fn update(&self, version: u32, layers: &[u32]) -> *mut FbUpdate {
        let mut update = null_mut();
        let (list, count) = (layers.as_ptr(), layers.len() as u32);
        // SAFETY: everything is valid.
        self.ok(unsafe { fb_update_create(self.weights, version, list, count, u64::MAX, &raw mut update) });
        for layer in layers {
            for (tensor, (name, bytes)) in SHARED.into_iter().enumerate() {
                let from = whole(version, *layer, tensor);
                let from = from.as_ptr().cast();
                // SAFETY: the copy runs inside the call.
                let filled =
                    unsafe { fb_update_fill(update, *layer, name.as_ptr(), from, bytes as u64, null_mut()) };
                assert_eq!(filled, FbOk, "{}", text_of(update));
            }
        }
        update
    }

    fn share_update(&self, update: *mut FbUpdate) -> FbStatus {
        // SAFETY: nothing is passed.
        unsafe { fb_update_share(update, self.links, null_mut(), SOON) }
    }

    fn commit(&self, update: *mut FbUpdate, step: u64, at_most: u32) -> (u32, String) {
        let (mut outcome, mut reason) = (77, [0x33; 512]);
        let (text, bytes) = (reason.as_mut_ptr(), reason.len());
        // SAFETY: everything is as long as stated.
        self.ok(unsafe {
            fb_weights_commit(
                self.weights,
                update,
                self.links,
                step,
                null_mut(),
                at_most,
                &raw mut outcome,
                text,
                bytes,
            )
        });
        (outcome, text_in(&reason))
    }

    /// The rank ends in order.
    fn close(mut self) {
        self.leaves();
        self.destroy();
    }

    /// Its sessions end in order.
    fn leaves(&self) {
        // SAFETY: nothing is passed.
        assert_eq!(unsafe { fb_links_end(self.links) }, FbOk, "{}", text_of(self.links));
        while self.event(SOON).0.is_over == 0 {}
    }

    /// The rank ends as a process that dies does: its sessions close without a word.
    fn destroy(&mut self) {
        // SAFETY: nothing is passed; no call is running.
        unsafe {
            if !self.links.is_null() {
                assert_eq!(fb_links_destroy(self.links), FbOk);
            }
            assert_eq!(fb_weights_destroy(self.weights), FbOk);
            assert_eq!(fb_device_destroy(self.device), FbOk, "{}", text_of(self.device));
        }
    }
}

/// Runs both ranks, each on a thread.
fn both(run: impl Fn(u32) + Sync) {
    thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            scope.spawn({
                let run = &run;
                move || run(rank)
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// A rank without others, filled; its group is its own.
fn alone(config: FbWeightsConfig) -> Rank {
    static GROUP: AtomicU32 = AtomicU32::new(1000);
    let group = u64::from(GROUP.fetch_add(1, Ordering::Relaxed));
    let device = host();
    let weights = create(device, &FbWeightsConfig { group, rank: 0, ranks: 1, ..config }).unwrap();
    let made = Rank { device, weights, links: null_mut() };
    for layer in 0..config.layers {
        for tensor in 0..SHARED.len() {
            made.ok(made.fill(layer, tensor, &whole(0, layer, tensor)));
        }
    }
    made
}

#[test]
fn two_ranks_share_their_weights_and_every_step_finds_every_layer_whole() {
    let folder = Folder::new();
    both(|number| {
        let rank = Rank::shared(&folder, number);
        let footprint = plan(rank.device, &Model::new().config(number)).unwrap();
        // Pages of a layer, and which are pulled: from the lengths alone.
        let granule = footprint.granule;
        let pages = (SHARED[0].1.next_multiple_of(256) + SHARED[1].1).div_ceil(granule as usize) as u64;
        let tensors = (u64::from(MODEL)) * (SHARED[0].1 + SHARED[1].1) as u64;
        assert_eq!((footprint.whole, footprint.layers, footprint.sharded_layers), (tensors, MODEL, MODEL));
        assert_eq!((footprint.closing, footprint.resident, footprint.host), (FB_CLOSING_EVEN, 0, 0));
        assert_eq!(footprint.shards + footprint.pulled, u64::from(MODEL) * pages * granule);
        let all = footprint.shards + footprint.buffers.iter().sum::<u64>();
        assert_eq!((footprint.device, rank.bytes()), (all, all));
        assert_eq!(footprint.saved, tensors as i64 - all as i64);
        rank.ok(rank.begin());
        assert!(rank.shows(0, 0) && !rank.shows(2, 0), "layer 2 has the buffer of layer 0");
        rank.abandon();
        for _ in 0..2 {
            rank.step(0);
        }
        let mut pulled = 0;
        for layer in 0..MODEL {
            let found = rank.layer(layer);
            assert_eq!((found.bytes, found.buffer), (pages * granule, layer % 2));
            assert_eq!((found.is_sharded, found.is_resident, found.version), (1, 0, 0));
            assert!(found.copies > 0 && std::ptr::addr_eq(found.address, rank.tensor(layer, 0).as_ptr()));
            pulled += found.pulled;
            // SAFETY: nothing is passed.
            rank.ok(unsafe { fb_weights_verify(rank.weights, layer, null_mut()) });
        }
        assert_eq!(pulled, footprint.pulled);
        rank.close();
    });
}

#[test]
fn a_layer_is_made_resident_and_sharded_again_at_the_same_address() {
    let folder = Folder::new();
    both(|number| {
        let rank = Rank::shared(&folder, number);
        let least = rank.bytes();
        let before = rank.layer(3);
        let call = |status| rank.ok(status);
        let mut bytes = 0;
        // SAFETY: nothing is passed but room for results.
        call(unsafe { fb_weights_make_resident(rank.weights, 3, null_mut()) });
        let after = rank.layer(3);
        assert_eq!((after.is_resident, after.is_sharded, after.address), (1, 1, before.address));
        assert_eq!(rank.bytes(), least + before.pulled);
        assert!(rank.shows(3, 0), "without a step");
        rank.step(0);
        // SAFETY: as above.
        call(unsafe { fb_weights_make_sharded(rank.weights, 3) });
        assert_eq!((rank.layer(3).is_resident, rank.bytes()), (0, least));
        rank.step(0);
        // SAFETY: as above.
        call(unsafe { fb_weights_grow(rank.weights, u64::MAX, null_mut(), &raw mut bytes) });
        assert!((0..MODEL).all(|layer| rank.layer(layer).is_resident == 1));
        assert!((0..MODEL).all(|layer| rank.shows(layer, 0)), "all at once");
        assert_eq!(bytes, rank.bytes());
        rank.step(0);
        // SAFETY: as above.
        call(unsafe { fb_weights_shrink(rank.weights, least, null_mut()) });
        assert_eq!(rank.bytes(), least);
        rank.step(0);
        // SAFETY: as above.
        let refused = unsafe { fb_weights_shrink(rank.weights, least - 1, &raw mut bytes) };
        assert_eq!(refused, FbOutOfMemory);
        assert!(text_of(rank.weights).contains(&format!("least {least}")), "{}", text_of(rank.weights));
        rank.close();
    });
}

/// What a launch's callback saw, and what it returns.
struct Launched {
    weights: *mut FbWeights,
    calls: u32,
    stream: usize,
    inside: FbStatus,
    result: u32,
}

/// # Safety
/// `data` is a `Launched` that nothing else uses.
unsafe extern "C" fn launch(data: *mut c_void, stream: *mut c_void) -> u32 {
    // SAFETY: the same contract.
    let launched = unsafe { &mut *data.cast::<Launched>() };
    launched.calls += 1;
    launched.stream = stream.addr();
    // SAFETY: nothing is passed.
    launched.inside = unsafe { fb_weights_begin(launched.weights, 1, 0) };
    launched.result
}

#[test]
fn a_launch_calls_back_once_and_its_result_is_that_of_the_call() {
    let folder = Folder::new();
    both(|number| {
        let rank = Rank::shared(&folder, number);
        let mut stream = null_mut();
        // SAFETY: room for the result.
        rank.ok(unsafe { fb_stream_create(rank.device, &raw mut stream) });
        let results = [
            (0, FbOk, ""),
            (FbClosed as u32, FbClosed, "refused (status"),
            (FbExhausted as u32, FbExhausted, "refused (status"),
            (999, FbCancelled, "999"),
        ];
        for (result, wanted, words) in results {
            let weights = rank.weights;
            let mut seen = Launched { weights, calls: 0, stream: 0, inside: FbOk, result };
            let data = (&raw mut seen).cast();
            // SAFETY: the callback's data live longer than the call.
            let status = unsafe { fb_weights_launch(weights, stream, Some(launch), data) };
            assert_eq!((status, seen.calls, seen.stream), (wanted, 1, stream.addr()));
            assert_eq!(seen.inside, FbBusy);
            assert!(text_of(rank.weights).contains(words), "{}", text_of(rank.weights));
            // A graph and single calls take turns.
            rank.step(0);
        }
        rank.ok(rank.begin());
        let mut seen = Launched { weights: rank.weights, calls: 0, stream: 0, inside: FbOk, result: 0 };
        let data = (&raw mut seen).cast();
        // SAFETY: as above.
        let status = unsafe { fb_weights_launch(rank.weights, null_mut(), Some(launch), data) };
        assert_eq!((status, seen.calls), (FbBusy, 0));
        rank.abandon();
        rank.close();
    });
}

/// A launch's callback that forks, and where it returns.
struct Forks {
    is_child: bool,
    state: i32,
}

/// # Safety
/// `data` is a `Forks` that nothing else uses.
unsafe extern "C" fn forks(data: *mut c_void, _stream: *mut c_void) -> u32 {
    // SAFETY: the same contract; the child runs on alone.
    unsafe {
        let forks = &mut *data.cast::<Forks>();
        let child = libc::fork();
        forks.is_child = child == 0;
        if child > 0 {
            libc::waitpid(child, &raw mut forks.state, 0);
        }
    }
    0
}

#[test]
fn a_launch_that_forks_is_closed_in_the_child_and_goes_on_in_the_parent() {
    let folder = Folder::new();
    let mut rank = alone(Model::new().config(0));
    let met = rank.meet(&folder);
    rank.ok(met);
    rank.ok(rank.share());
    let mut seen = Forks { is_child: false, state: -1 };
    // SAFETY: the callback's data live longer than the call.
    let status = unsafe { fb_weights_launch(rank.weights, null_mut(), Some(forks), (&raw mut seen).cast()) };
    if seen.is_child {
        let closed = status == FbClosed && rank.begin() == FbClosed;
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!closed)) };
    }
    rank.ok(status);
    assert_eq!(seen.state, 0, "the child's");
    rank.step(0);
    rank.close();
}

#[test]
fn a_step_allocates_nothing() {
    let folder = Folder::new();
    both(|number| {
        let rank = Rank::shared(&folder, number);
        rank.step(0);
        let step = || {
            let mut all = rank.begin() as u32;
            for layer in 0..MODEL {
                all |= rank.enter(layer) as u32 | rank.leave(layer) as u32;
            }
            assert_eq!(all | rank.end() as u32, 0);
        };
        step();
        assert_eq!(allocations(step), 0);
        rank.close();
    });
}

#[test]
fn a_rank_that_ended_comes_back_at_the_same_addresses() {
    let folder = Folder::new();
    let died = Barrier::new(2);
    both(|number| {
        let mut rank = Rank::shared(&folder, number);
        rank.step(0);
        if number == 1 {
            rank.destroy();
            died.wait();
            // Its next process has other memory, and the same weights.
            let rank = Rank::shared(&folder, 1);
            rank.step(0);
            rank.close();
            return;
        }
        let addresses = [0, 1].map(|layer| rank.layer(layer).address);
        let (event, text) = rank.event(SOON);
        assert_eq!((event.kind, event.rank, event.is_over), (FB_LINKS_LOST, 1, 1), "{text}");
        assert_eq!(event.status, FbPeerLost as u32);
        assert!(text.contains("rank 1"), "{text}");
        assert_eq!(rank.event(0).0.kind, FB_LINKS_NOTHING, "once");
        // SAFETY: nothing is passed.
        rank.ok(unsafe { fb_weights_lost(rank.weights, 1) });
        rank.ok(rank.begin());
        rank.ok(rank.enter(0));
        assert_eq!(rank.leave(0), FbPeerLost);
        assert!(text_of(rank.weights).contains("layer 2"), "{}", text_of(rank.weights));
        rank.abandon();
        // SAFETY: nothing is passed.
        let early = unsafe { fb_weights_reattach(rank.weights, rank.links, 1, SOON) };
        assert_eq!(early, FbPeerLost, "{}", text_of(rank.weights));
        died.wait();
        let mut event = sized::<FbLinksEvent>();
        // SAFETY: nothing is passed but an event of its size.
        unsafe {
            assert_eq!(fb_links_readmit(rank.links, SOON, &raw mut event), FbOk, "{}", text_of(rank.links));
            assert_eq!((event.kind, event.rank, event.is_over), (FB_LINKS_RETURNED, 1, 0));
            let early = fb_links_poll(rank.links, 0, null_mut(), 0, &raw mut event);
            assert_eq!(early, FbInvalidState);
            assert!(text_of(rank.links).contains("rank 1"), "{}", text_of(rank.links));
            rank.ok(fb_weights_reattach(rank.weights, rank.links, 1, SOON));
            assert_eq!(fb_links_readmit(rank.links, SOON, &raw mut event), FbOk);
            assert_eq!(event.kind, FB_LINKS_NOTHING);
        }
        assert_eq!(addresses, [0, 1].map(|layer| rank.layer(layer).address));
        rank.step(0);
        rank.close();
    });
}

#[test]
fn all_ranks_take_a_new_version_at_one_border_or_none_does() {
    let folder = Folder::new();
    let (met, gone) = (Barrier::new(2), Barrier::new(2));
    let layers = [4, 1];
    both(|number| {
        let rank = Rank::shared(&folder, number);
        rank.step(0);
        let (address, least) = (rank.layer(4).address, rank.bytes());
        let update = rank.update(3, &layers);
        if number == 0 {
            // What rank 1 says of its update meanwhile is kept for the call that takes it.
            assert_eq!(rank.event(300).0.kind, FB_LINKS_NOTHING);
        }
        assert_eq!(rank.share_update(update), FbOk, "{}", text_of(update));
        // SAFETY: nothing is passed.
        unsafe {
            assert_eq!(fb_update_verify(update, 4, null_mut()), FbOk, "{}", text_of(update));
            assert_eq!(fb_update_verify(update, 0, null_mut()), FbOutOfRange);
        }
        rank.step(0);
        // What is refused before the decision says so, and the call is repeated.
        let refused = |update: *mut FbUpdate, stream: *mut c_void| {
            let (weights, links, mut outcome) = (rank.weights, rank.links, 77);
            let (text, out) = (null_mut(), &raw mut outcome);
            // SAFETY: room for the outcome; handles and streams are of this rank, or are refused.
            let status = unsafe { fb_weights_commit(weights, update, links, 17, stream, SOON, out, text, 0) };
            (status, outcome)
        };
        assert_eq!(
            refused(update, std::ptr::without_provenance_mut(1 << 40)),
            (FbOutOfRange, FB_UPDATE_OPEN)
        );
        assert_eq!(refused(null_mut(), null_mut()), (FbInvalidConfig, FB_UPDATE_OPEN));
        rank.ok(rank.begin());
        assert_eq!(refused(update, null_mut()), (FbBusy, FB_UPDATE_OPEN));
        rank.abandon();
        assert_eq!(rank.commit(update, 17, SOON), (FB_UPDATE_COMMITTED, String::new()));
        let version = |layer| if layers.contains(&layer) { 3 } else { 0 };
        assert!((0..MODEL).all(|layer| rank.layer(layer).version == version(layer)));
        assert_eq!((rank.layer(4).address, rank.bytes()), (address, least));
        let step = || {
            rank.ok(rank.begin());
            for layer in 0..MODEL {
                rank.ok(rank.enter(layer));
                assert!(rank.shows(layer, version(layer)), "layer {layer}");
                rank.ok(rank.leave(layer));
            }
            rank.ok(rank.end());
        };
        step();
        assert_eq!(refused(update, null_mut()), (FbInvalidState, FB_UPDATE_OPEN));
        // SAFETY: nothing is passed.
        assert_eq!(unsafe { fb_update_destroy(update) }, FbOk);
        // The next one is given up by rank 1 after it was shared.
        let update = rank.update(4, &[0]);
        assert_eq!(rank.share_update(update), FbOk, "{}", text_of(update));
        met.wait();
        if number == 0 {
            gone.wait();
            let (outcome, reason) = rank.commit(update, 18, SOON);
            assert_eq!(outcome, FB_UPDATE_ABORTED);
            assert!(reason.contains("another rank has aborted"), "{reason}");
        }
        // SAFETY: nothing is passed.
        assert_eq!(unsafe { fb_update_destroy(update) }, FbOk);
        if number == 1 {
            gone.wait();
        }
        step();
        rank.close();
    });
}
