//! A step that the engine captures by the driver's own calls, and launches by `fb_weights_launch`: on the stand-in
//! driver or the named driver. The graph copies each window while it may be read, and the copies are compared.

use forebay_standin::{Driver, Options};

use super::*;

#[allow(clippy::duplicate_mod, reason = "other tests have it too")]
#[path = "../../../../tests/support/skip.rs"]
mod skip;

const BEFORE: u8 = 0x5a;

/// A rank alone, which pulls from its own host memory, and the engine's objects in the driver.
struct Engine {
    driver: Driver,
    rank: Rank,
    stream: u64,
    /// Where a step copies each layer's window to, its first byte and the length.
    copies: Vec<(u64, FbLayerWeights)>,
    exec: u64,
}

fn done(code: i32) {
    assert_eq!(code, 0);
}

impl Engine {
    /// `None` without a driver.
    fn new(wrap: u32) -> Option<Engine> {
        let Some(driver) = Driver::new(Options { granule: 4096, ..Options::default() }).unwrap() else {
            skip::skip("g++, which builds the stand-in driver");
            return None;
        };
        let library = CString::new(driver.library()).unwrap();
        let library = library.as_ptr();
        let device = make_device(&FbDeviceConfig { kind: FB_DEVICE_CUDA, library, threads: 64, ..sized() });
        let model = Model::new();
        let config = FbWeightsConfig { source: FB_WEIGHTS_FROM_HOST, ranks: 1, wrap, ..model.config(0) };
        let (api, mut context, mut stream) = (driver.api(), 0, 0);
        // SAFETY: all pointers are valid. Both streams live until the device is destroyed.
        unsafe {
            done(api.primary_ctx_retain(&raw mut context, 0));
            done(api.ctx_push_current(context));
            done(api.stream_create(&raw mut stream, 1));
            assert_eq!(fb_stream_borrow(device, null_mut()), FbOk, "{}", text_of(device));
            assert_eq!(fb_stream_borrow(device, cuda(stream)), FbOk, "{}", text_of(device));
        }
        let weights = create(device, &config).unwrap();
        let rank = Rank { device, weights, links: null_mut() };
        Some(Engine { driver, rank, stream, copies: Vec::new(), exec: 0 })
    }

    /// Fills, meets no one, and shares; then each layer has its window.
    fn share(&mut self, folder: &Folder) {
        let sources: Vec<Vec<u8>> = (0..2 * MODEL).map(|at| whole(0, at / 2, at as usize % 2)).collect();
        for (at, source) in (0..).zip(&sources) {
            self.rank.ok(self.rank.fill(at / 2, at as usize % 2, source));
        }
        let met = self.rank.meet(folder);
        self.rank.ok(met);
        self.rank.ok(self.rank.share());
        for layer in 0..MODEL {
            let (window, mut to) = (self.rank.layer(layer), null_mut());
            assert!(window.pulled > 0, "layer {layer}");
            // SAFETY: room for the result.
            let status = unsafe { fb_device_allocate(self.rank.device, window.bytes, &raw mut to) };
            assert_eq!(status, FbOk);
            self.copies.push((to.addr() as u64, window));
        }
    }

    /// A step whose work copies the windows.
    fn step(&self) {
        let (weights, stream) = (self.rank.weights, cuda(self.stream));
        for (layer, (to, window)) in (0..).zip(&self.copies) {
            // SAFETY: the copy's memory lives as long as the device.
            unsafe {
                self.rank.ok(fb_weights_enter(weights, layer, 0, stream));
                let from = window.address.addr() as u64;
                done(self.driver.api().memcpy_async(*to, from, window.bytes as usize, self.stream));
                self.rank.ok(fb_weights_leave(weights, layer, 0, stream));
            }
        }
        // SAFETY: nothing is passed.
        self.rank.ok(unsafe { fb_weights_end(weights, stream) });
    }

    fn capture(&mut self) {
        const GLOBAL: i32 = 0;
        self.rank.ok(self.rank.begin());
        let mut graph = 0;
        // SAFETY: all pointers are valid, and the stream is the engine's.
        unsafe {
            let api = self.driver.api();
            done(api.stream_begin_capture(self.stream, GLOBAL));
            self.step();
            done(api.stream_end_capture(self.stream, &raw mut graph));
            done(api.graph_instantiate(&raw mut self.exec, graph, 0));
            done(api.graph_destroy(graph));
        }
    }

    /// How many layers the copies show whole, behind a launch or a step.
    fn shown(&self, work: impl FnOnce(&Engine)) -> usize {
        for (to, window) in &self.copies {
            // SAFETY: the copy's memory.
            done(unsafe {
                self.driver.api().memset_d8_async(*to, BEFORE, window.bytes as usize, self.stream)
            });
        }
        work(self);
        // SAFETY: nothing is passed.
        assert_eq!(unsafe { fb_stream_wait(self.rank.device, cuda(self.stream)) }, FbOk);
        let layers = (0..).zip(&self.copies);
        layers.filter(|(layer, (to, window))| self.is_whole(*layer, *to, window.bytes)).count()
    }

    /// Whether a copy shows a layer's tensors, which lie in the window in their order, each at a multiple of 256.
    fn is_whole(&self, layer: u32, to: u64, bytes: u64) -> bool {
        let mut found = vec![0; bytes as usize];
        assert!(self.driver.read(to, &mut found));
        let mut at = 0;
        (0..SHARED.len()).all(|tensor| {
            let (wanted, from) = (whole(0, layer, tensor), at);
            at = (from + wanted.len()).next_multiple_of(256);
            found[from..from + wanted.len()] == wanted
        })
    }

    fn launch(&self, launch: FbLaunchGraph) {
        let data = (&raw const *self).cast_mut().cast();
        // SAFETY: the callback's data live longer than the call.
        self.rank.ok(unsafe { fb_weights_launch(self.rank.weights, cuda(self.stream), launch, data) });
    }

    fn end(mut self) {
        let api = self.driver.api();
        // SAFETY: the graph is the engine's, and no launch of it runs.
        done(unsafe { api.graph_exec_destroy(self.exec) });
        self.rank.destroy();
        // SAFETY: both are the engine's, and unused.
        unsafe {
            done(api.stream_destroy(self.stream));
            done(api.ctx_pop_current(&mut 0));
            done(api.primary_ctx_release(0));
        }
    }
}

fn cuda(stream: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(stream as usize)
}

/// # Safety
/// `data` is an `Engine`.
unsafe extern "C" fn launch(data: *mut c_void, stream: *mut c_void) -> u32 {
    // SAFETY: the same contract.
    let engine = unsafe { &*data.cast::<Engine>() };
    assert_eq!(stream.addr() as u64, engine.stream);
    // SAFETY: a graph and a stream of the engine's.
    done(unsafe { engine.driver.api().graph_launch(engine.exec, engine.stream) });
    0
}

/// # Safety
/// None: it does nothing.
unsafe extern "C" fn launch_nothing(_data: *mut c_void, _stream: *mut c_void) -> u32 {
    0
}

#[test]
fn a_captured_step_that_is_launched_finds_every_layer_whole() {
    for wrap in [FB_WRAP_JOINED, FB_WRAP_BEHIND] {
        let folder = Folder::new();
        let Some(mut engine) = Engine::new(wrap) else { return };
        engine.share(&folder);
        let all = MODEL as usize;
        let single = |engine: &Engine| {
            engine.rank.ok(engine.rank.begin());
            engine.step();
        };
        assert_eq!(engine.shown(single), all);
        engine.capture();
        // The controls: nothing ran in the capture, and nothing runs that is not launched.
        assert_eq!(engine.shown(|_| ()), 0);
        for _ in 0..3 {
            assert_eq!(engine.shown(|engine| engine.launch(Some(launch))), all, "wrap {wrap}");
        }
        assert_eq!(engine.shown(|engine| engine.launch(Some(launch_nothing))), 0);
        // A graph and single calls take turns.
        assert_eq!(engine.shown(single), all);
        assert_eq!(engine.shown(|engine| engine.launch(Some(launch))), all);
        engine.end();
    }
}
