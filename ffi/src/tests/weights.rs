//! Tests of shared weights by C's calls: two ranks, as threads, which meet in a folder. What a window has to show is
//! computed here, byte by byte, from layer, tensor and version.

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use super::*;
use crate::links::*;
use crate::ring::*;
use crate::testing::allocations;
use crate::update::*;
use crate::weights::*;

const MODEL: u32 = 6;
const SHARED: [(&CStr, usize); 2] = [(c"o_proj", 40_000), (c"kv_b", 9_001)];
const SOON: u32 = 20_000;

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
        // SAFETY: nothing is passed.
        assert_eq!(unsafe { fb_links_end(self.links) }, FbOk, "{}", text_of(self.links));
        while self.event(SOON).0.is_over == 0 {}
        self.destroy();
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

unsafe extern "C" fn launch(data: *mut c_void, stream: *mut c_void) -> u32 {
    // SAFETY: the data of the tests below, which nothing else uses meanwhile.
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
        let results =
            [(0, FbOk, ""), (FbExhausted as u32, FbExhausted, "refused (status"), (999, FbCancelled, "999")];
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

unsafe extern "C" fn forks(data: *mut c_void, _stream: *mut c_void) -> u32 {
    // SAFETY: the data of the test below, which nothing else uses meanwhile; the child runs on alone.
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
fn a_configuration_that_no_rank_can_have_is_refused_by_name_and_takes_nothing() {
    let model = Model::new();
    let device = host();
    let unknown = [c"v_proj".as_ptr()];
    let crooked = [FbTensor { name: c"o_proj".as_ptr(), bytes: 64, align: 3, ..sized() }];
    let nameless = [FbTensor { bytes: 64, ..sized() }];
    let of = |tensors: &[FbTensor], config: FbWeightsConfig| FbWeightsConfig {
        tensors: tensors.as_ptr(),
        tensor_count: tensors.len() as u32,
        pattern_count: 1,
        ..config
    };
    let config = model.config(0);
    let wrong = [
        (FbWeightsConfig { reserved: 1, ..config }, FbInvalidConfig, "reserved (value 1)"),
        (FbWeightsConfig { layers: 4097, ..config }, FbInvalidConfig, "layers (value 4097)"),
        (
            FbWeightsConfig { layers: MODEL - 1, ..config },
            FbOutOfRange,
            "layer of a tensor (layer 5, layers 5)",
        ),
        (FbWeightsConfig { draft_layers: MODEL + 1, ..config }, FbInvalidConfig, "draft_layers (value 7)"),
        (FbWeightsConfig { micro_batches: 1025, ..config }, FbInvalidConfig, "micro_batches"),
        (FbWeightsConfig { parts: 1025, ..config }, FbInvalidConfig, "parts"),
        (FbWeightsConfig { source: 2, ..config }, FbInvalidConfig, "FB_WEIGHTS_FROM_"),
        (FbWeightsConfig { odd: 4, ..config }, FbInvalidConfig, "FB_ODD_"),
        (FbWeightsConfig { wrap: 2, ..config }, FbInvalidConfig, "FB_WRAP_"),
        (FbWeightsConfig { ranks: 0, ..config }, FbInvalidConfig, "ranks"),
        (FbWeightsConfig { rank: 2, ..config }, FbOutOfRange, "rank 2"),
        (FbWeightsConfig { budget: 1, ..config }, FbOutOfMemory, "least"),
        (
            FbWeightsConfig { patterns: unknown.as_ptr(), pattern_count: 1, ..config },
            FbInvalidConfig,
            "v_proj",
        ),
        (FbWeightsConfig { patterns: null(), ..config }, FbInvalidConfig, "patterns"),
        (FbWeightsConfig { tensors: null(), ..config }, FbInvalidConfig, "fb_tensor"),
        (of(&crooked, config), FbInvalidConfig, "align 3"),
        (of(&nameless, config), FbInvalidConfig, "name"),
    ];
    for (config, status, words) in wrong {
        for found in [plan(device, &config).unwrap_err(), create(device, &config).unwrap_err()] {
            assert_eq!(found.0, status, "{}", found.1);
            assert!(found.1.contains(words), "{}, not {words}", found.1);
        }
    }
    // SAFETY: no call is running, and nothing is left on the device.
    assert_eq!(unsafe { fb_device_destroy(device) }, FbOk, "{}", text_of(device));
    let small = make_device(&FbDeviceConfig { memory: 100_000, ..sized() });
    assert_eq!(create(small, &config).unwrap_err().0, FbOutOfMemory);
    // SAFETY: as above.
    assert_eq!(unsafe { fb_device_destroy(small) }, FbOk, "{}", text_of(small));
}

#[test]
fn each_choice_of_a_configuration_reaches_the_plan() {
    let (model, device) = (Model::new(), host());
    // An odd number of layers: the last one has no tensors.
    let odd = |odd| {
        let tensor_count = (model.tensors.len() - 3) as u32;
        plan(device, &FbWeightsConfig { odd, tensor_count, layers: MODEL - 1, ..model.config(0) }).unwrap()
    };
    let closing = |found: FbWeightsFootprint| (found.closing, found.resident_layer, found.buffers[2] > 0);
    assert_eq!(closing(odd(FB_ODD_CHEAPEST)), (FB_CLOSING_RESIDENT, 0, false));
    assert_eq!(closing(odd(FB_ODD_RESIDENT_FIRST)), (FB_CLOSING_RESIDENT, 0, false));
    assert_eq!(closing(odd(FB_ODD_RESIDENT_LAST)), (FB_CLOSING_RESIDENT, MODEL - 2, false));
    assert_eq!(closing(odd(FB_ODD_THIRD_BUFFER)), (FB_CLOSING_THIRD_BUFFER, 0, true));
    assert!(odd(FB_ODD_RESIDENT_LAST).resident > 0);
    let all = plan(device, &model.config(0)).unwrap();
    let host = plan(device, &FbWeightsConfig { source: FB_WEIGHTS_FROM_HOST, ..model.config(0) }).unwrap();
    assert_eq!((host.shards, host.host > host.whole, host.pulled), (0, true, host.host));
    // Four of six layers sharded: two whole, four halves and two buffers of a half, which is up to a page more.
    let layer = (all.shards + all.pulled) / u64::from(MODEL);
    let most = 5 * layer + 2 * all.granule;
    let budget = plan(device, &FbWeightsConfig { budget: most, ..model.config(0) }).unwrap();
    assert_eq!((budget.sharded_layers, budget.resident, budget.device <= most), (4, 2 * layer, true));
    let eight = plan(device, &FbWeightsConfig { ranks: 8, rank: 7, ..model.config(0) }).unwrap();
    assert!(eight.shards < all.shards && eight.pulled > all.pulled);
    // SAFETY: no call is running.
    assert_eq!(unsafe { fb_device_destroy(device) }, FbOk);
}

#[test]
fn weights_from_the_host_and_copies_of_one_granule_show_the_same_bytes() {
    let folder = Folder::new();
    let model = Model::new();
    let config = FbWeightsConfig { source: FB_WEIGHTS_FROM_HOST, copy_bytes: 1, ..model.config(0) };
    let mut rank = alone(config);
    let met = rank.meet(&folder);
    rank.ok(met);
    rank.ok(rank.share());
    let (layer, granule) = (rank.layer(2), plan(rank.device, &config).unwrap().granule);
    assert_eq!(u64::from(layer.copies) * granule, layer.pulled);
    rank.step(0);
    let mut update = null_mut();
    // SAFETY: everything is valid.
    let refused = unsafe { fb_update_create(rank.weights, 1, [0].as_ptr(), 1, u64::MAX, &raw mut update) };
    assert_eq!(refused, FbUnsupported, "{}", text_of(rank.weights));
    rank.close();
}

#[test]
fn micro_batches_and_draft_passes_are_entered_in_their_order() {
    let folder = Folder::new();
    let model = Model::new();
    let config = FbWeightsConfig { micro_batches: 2, draft_layers: 1, parts: 3, ..model.config(0) };
    let mut rank = alone(config);
    let met = rank.meet(&folder);
    rank.ok(met);
    rank.ok(rank.share());
    let mut other = null_mut();
    // SAFETY: room for the result.
    rank.ok(unsafe { fb_stream_create(rank.device, &raw mut other) });
    // SAFETY: nothing is passed.
    let begin = |batches, passes| unsafe { fb_weights_begin(rank.weights, batches, passes) };
    assert_eq!((begin(0, 0), begin(3, 0)), (FbOutOfRange, FbOutOfRange));
    rank.ok(begin(2, 3));
    let once = (0..MODEL - 1).chain([MODEL - 1; 3]);
    for layer in once {
        for (batch, stream) in [(0, null_mut()), (1, other)] {
            // SAFETY: as above.
            unsafe {
                rank.ok(fb_weights_enter(rank.weights, layer, batch, stream));
                rank.ok(fb_weights_leave(rank.weights, layer, batch, stream));
            }
        }
    }
    // SAFETY: as above.
    let last = unsafe { fb_weights_enter(rank.weights, MODEL - 1, 0, null_mut()) };
    assert_eq!(last, FbInvalidState, "a fourth draft pass");
    rank.ok(rank.end());
    rank.close();
}

#[test]
fn each_call_out_of_its_order_is_a_status_with_a_text() {
    let folder = Folder::new();
    let said = |rank: &Rank, status: FbStatus, wanted: FbStatus, words: &str| {
        let text = text_of(rank.weights);
        assert!(status == wanted && text.contains(words), "{status:?}: {text}, not {words}");
    };
    let mut rank = alone(Model::new().config(0));
    let (name, from, none) = (c"o_proj".as_ptr(), whole(0, 0, 0), null_mut());
    let weights = rank.weights;
    let fill = |name, from: *const u8, bytes| {
        // SAFETY: the memory is as long as stated, or refused.
        unsafe { fb_weights_fill(weights, 0, name, from.cast(), bytes, none) }
    };
    said(&rank, fill(name, from.as_ptr(), 39_999), FbOutOfRange, "planned 40000");
    said(&rank, fill(name, null(), 40_000), FbInvalidConfig, "from");
    said(&rank, fill(null(), from.as_ptr(), 40_000), FbInvalidConfig, "name");
    said(&rank, fill(c"q_norm".as_ptr(), from.as_ptr(), 64), FbOutOfRange, "q_norm");
    said(&rank, rank.begin(), FbInvalidState, "not shared");
    said(&rank, rank.enter(0), FbInvalidState, "not shared");
    // SAFETY: nothing is passed, or a null that is refused.
    unsafe {
        said(&rank, fb_weights_make_resident(rank.weights, 0, none), FbInvalidState, "not shared");
        said(&rank, fb_weights_launch(rank.weights, none, None, none), FbInvalidConfig, "launch");
        said(&rank, fb_weights_lost(rank.weights, 0), FbOutOfRange, "no other rank");
        said(&rank, fb_weights_share(rank.weights, null_mut(), none, 0), FbInvalidConfig, "fb_links");
        said(
            &rank,
            fb_weights_share(rank.weights, rank.device.cast(), none, 0),
            FbInvalidConfig,
            "of this kind",
        );
    }
    let nowhere = rank.meet(&Folder("/nowhere/at/all".into()));
    said(&rank, nowhere, FbIo, "/nowhere/at/all");
    let met = rank.meet(&folder);
    rank.ok(met);
    rank.ok(rank.share());
    said(&rank, rank.share(), FbInvalidState, "not filled any more");
    said(&rank, fill(name, from.as_ptr(), 40_000), FbInvalidState, "not filled any more");
    said(&rank, rank.end(), FbInvalidState, "no step has begun");
    rank.ok(rank.begin());
    said(&rank, rank.enter(1), FbInvalidState, "expected 0");
    // SAFETY: nothing is passed; the stream is none of the device's.
    let strange = unsafe { fb_weights_enter(rank.weights, 0, 0, std::ptr::without_provenance_mut(77)) };
    said(&rank, strange, FbOutOfRange, "stream");
    // SAFETY: nothing is passed.
    said(&rank, unsafe { fb_weights_shrink(rank.weights, u64::MAX, null_mut()) }, FbBusy, "a step is open");
    rank.abandon();
    rank.close();
}

#[test]
fn an_update_that_cannot_be_is_refused_and_one_that_is_left_keeps_its_device() {
    let folder = Folder::new();
    let mut rank = alone(Model::new().config(0));
    let met = rank.meet(&folder);
    rank.ok(met);
    rank.ok(rank.share());
    let begin = |version, layers: &[u32], at_most| {
        let mut update = null_mut();
        let (list, count) = (layers.as_ptr(), layers.len() as u32);
        // SAFETY: everything is valid.
        let status =
            unsafe { fb_update_create(rank.weights, version, list, count, at_most, &raw mut update) };
        (status, update)
    };
    let refused = [
        ((0, &[0][..], u64::MAX), FbOutOfRange, "version 0"),
        ((1, &[], u64::MAX), FbInvalidConfig, "no layers"),
        ((1, &[2, 2], u64::MAX), FbInvalidConfig, "twice"),
        ((1, &[MODEL], u64::MAX), FbOutOfRange, "layer 6"),
        ((1, &[0], 5), FbOutOfMemory, "allowed 5"),
    ];
    for ((version, layers, at_most), status, words) in refused {
        assert_eq!(begin(version, layers, at_most), (status, null_mut()));
        assert!(text_of(rank.weights).contains(words), "{}", text_of(rank.weights));
    }
    let (status, update) = begin(1, &[0], u64::MAX);
    rank.ok(status);
    assert_eq!(begin(2, &[1], u64::MAX).0, FbBusy);
    let (mut outcome, step) = (77, null_mut());
    // SAFETY: everything is valid, or refused.
    unsafe {
        let commit = |update, links, outcome| {
            fb_weights_commit(rank.weights, update, links, 1, step, 0, outcome, null_mut(), 0)
        };
        assert_eq!(commit(update, rank.links, &raw mut outcome), FbInvalidState, "it is not shared");
        assert_eq!(commit(null_mut(), rank.links, &raw mut outcome), FbInvalidConfig);
        assert_eq!(commit(update, null_mut(), &raw mut outcome), FbInvalidConfig);
        assert_eq!(commit(update, rank.links, null_mut()), FbInvalidConfig);
        assert_eq!(outcome, 77);
        assert_eq!(fb_update_share(update, rank.links, step, 0), FbInvalidState, "it is not filled");
        assert!(text_of(update).contains("o_proj"), "{}", text_of(update));
        assert_eq!(fb_update_verify(update, 0, step), FbInvalidState);
        let from = whole(1, 1, 0);
        let fill = |layer| {
            let from = from.as_ptr().cast();
            fb_update_fill(update, layer, c"o_proj".as_ptr(), from, 40_000, step)
        };
        assert_eq!((fill(0), fill(1)), (FbOk, FbOutOfRange));
        assert_eq!(fb_links_destroy(rank.links), FbOk);
        assert_eq!(fb_weights_destroy(rank.weights), FbOk);
        assert_eq!(fb_device_destroy(rank.device), FbBusy);
        assert!(text_of(rank.device).contains("left 1"), "{}", text_of(rank.device));
        assert_eq!(fb_update_destroy(update), FbOk);
        assert_eq!(fb_device_destroy(rank.device), FbOk);
    }
}

#[test]
fn a_rank_that_does_not_come_or_differs_is_named_and_the_weights_stay_filled() {
    let folder = Folder::new();
    let mut rank = Rank::filled(0, 0);
    let path = CString::new(folder.0.to_str().unwrap()).unwrap();
    let config = FbLinksConfig { folder: path.as_ptr(), hello_ms: 20, ..sized() };
    let meet = |rank: &Rank, config: &FbLinksConfig| {
        let mut links = null_mut();
        // SAFETY: everything is valid.
        unsafe { fb_links_meet(rank.weights, config, null_mut(), &raw mut links) }
    };
    assert_eq!(meet(&rank, &config), FbTimedOut);
    assert!(text_of(rank.weights).contains("rank 1"), "{}", text_of(rank.weights));
    let crooked = |geometry| FbLinksConfig { folder: path.as_ptr(), geometry, hello_ms: SOON, ..sized() };
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut rank = Rank::filled(1, 0);
            let status = meet(&rank, &crooked([9; 32]));
            assert!(matches!(status, FbInvalidConfig | FbPeerLost), "{}", text_of(rank.weights));
            rank.destroy();
        });
        let status = meet(&rank, &crooked([8; 32]));
        assert!(matches!(status, FbInvalidConfig | FbPeerLost), "{}", text_of(rank.weights));
        other.join().unwrap();
    });
    thread::scope(|scope| {
        let other = scope.spawn(|| Rank::shared(&folder, 1).close());
        let met = rank.meet(&folder);
        rank.ok(met);
        rank.ok(rank.share());
        rank.step(0);
        rank.close();
        other.join().unwrap();
    });
}
