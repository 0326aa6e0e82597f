//! Tests of the CUDA device through C calls, on the stand-in driver or on the named driver.

use std::ffi::CString;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay::Layer;
use forebay_standin::{Driver, Options, Resources};

use super::*;
use crate::cast;
use crate::handle::change;

#[path = "../../../tests/support/skip.rs"]
mod skip;

/// The driver below the library, and the engine's own objects on it.
struct Engine {
    driver: Driver,
    context: u64,
    stream: u64,
}

impl Engine {
    fn stream(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.stream as usize)
    }

    /// Releases the engine's own objects; returns the resources that are left.
    fn end(self) -> Resources {
        let api = self.driver.api();
        // SAFETY: both are the engine's own and unused.
        unsafe {
            assert_eq!(api.ctx_push_current(self.context), 0);
            assert_eq!(api.stream_destroy(self.stream), 0);
            assert_eq!(api.ctx_pop_current(&mut 0), 0);
            assert_eq!(api.primary_ctx_release(0), 0);
        }
        self.driver.held_resources()
    }
}

/// A device on a stand-in, and an engine with a stream in the same context; `None` without a compiler.
fn set_up(options: Options) -> Option<(*mut FbDevice, Engine)> {
    set_up_with(options, FB_HOST_MEMORY_REGISTERED)
}

fn set_up_with(options: Options, host_memory: u32) -> Option<(*mut FbDevice, Engine)> {
    let Some(driver) = Driver::new(options).unwrap() else {
        skip::skip("g++");
        return None;
    };
    let library = CString::new(driver.library()).unwrap();
    let library = library.as_ptr();
    let device = make_device(&FbDeviceConfig { kind: FB_DEVICE_CUDA, library, host_memory, ..sized() });
    let (mut context, mut stream, mut popped) = (0, 0, 0);
    let api = driver.api();
    // SAFETY: all pointers are valid.
    unsafe {
        assert_eq!(api.primary_ctx_retain(&raw mut context, 0), 0);
        assert_eq!(api.ctx_push_current(context), 0);
        assert_eq!(api.stream_create(&raw mut stream, 1), 0);
        assert_eq!(api.ctx_pop_current(&raw mut popped), 0);
    }
    Some((device, Engine { driver, context, stream }))
}

fn allocate(device: *const FbDevice, bytes: u64) -> *mut c_void {
    let mut address = null_mut();
    // SAFETY: it has room.
    assert_eq!(unsafe { fb_device_allocate(device, bytes, &raw mut address) }, FbOk, "{}", text_of(device));
    address
}

/// # Safety
/// `data` is a counter that outlives the device.
unsafe extern "C" fn count(data: *mut c_void) {
    // SAFETY: the same contract.
    unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn a_step_runs_on_the_engines_stream_and_every_resource_is_released() {
    let Some((device, engine)) = set_up(Options { seed: Some(3), ..Options::default() }) else { return };
    let (stream, driver) = (engine.stream(), &engine.driver);
    let cache = make_cache(device, &declared());
    let sequence = fill(cache, 100, 10);
    let words = u64::from(TOP_K) * 4;
    let (selection, slots) = (allocate(device, words), allocate(device, words));
    let selected: [u8; 16] = [7, 0, 0, 0, 93, 0, 0, 0, 255, 255, 255, 255, 7, 0, 0, 0];
    assert!(driver.write(selection.addr() as u64, &selected));
    let row = FbBatchRow { sequence, accepted: 0, query_rows: 1 };
    let config = FbStepConfig { rows: &raw const row, row_count: 1, query_rows: 1, ..sized() };
    let (mut ticket, mut step) = (null_mut(), 0);
    // SAFETY: all pointers are valid and as long as stated; buffers are the device's.
    unsafe {
        assert_eq!(fb_join(cache, sequence, null(), stream, null_mut()), FbOutOfRange, "not borrowed");
        assert_eq!(fb_stream_wait(device, stream), FbOutOfRange);
        assert_eq!(fb_stream_borrow(device, stream), FbOk, "{}", text_of(device));
        let held = driver.hold(engine.stream).unwrap();
        assert_eq!(fb_join(cache, sequence, null(), stream, &raw mut ticket), FbOk, "{}", text_of(cache));
        assert_eq!(outcome(ticket), (FB_TICKET_PENDING, FbOk as u32));
        assert_eq!(fb_prepare(cache, &raw const config, stream, &raw mut step), FbOk, "{}", text_of(cache));
        for layer in 0..LAYERS {
            let status = fb_layer(cache, step, layer, selection.cast(), slots.cast(), stream);
            assert_eq!(status, FbOk, "{}", text_of(cache));
            assert_eq!(fb_scatter(cache, step, layer, stream), FbOk);
        }
        assert_eq!(fb_finish(cache, step, stream), FbOk);
        assert_eq!(fb_retire(cache, &raw mut step, stream, null_mut()), FbBusy);
        drop(held);
        assert_eq!(fb_stream_wait(device, stream), FbOk);
        assert_eq!(outcome(ticket), (FB_TICKET_DONE, FbOk as u32));
        assert_eq!(fb_ticket_destroy(ticket), FbOk);
        let mut retired: FbRetired = sized();
        assert_eq!(fb_retire(cache, &raw mut step, stream, &raw mut retired), FbOk, "{}", text_of(cache));
        assert_eq!((step, retired.hits + retired.misses), (0, 2 * u64::from(LAYERS)));
        check_rows(cache, driver, slots);
        assert_eq!(fb_close(cache, sequence, stream), FbOk);
        assert_eq!(fb_stream_wait(device, stream), FbOk);
        assert_eq!(fb_cache_reap(cache, stream, null_mut()), FbOk);
        let calls = AtomicU32::new(0);
        assert_eq!(fb_stream_call(device, stream, Some(count), (&raw const calls).cast_mut().cast()), FbOk);
        assert_eq!(fb_stream_return(device, stream), FbOk, "{}", text_of(device));
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert_eq!(fb_stream_return(device, stream), FbOutOfRange);
        assert_eq!(fb_stream_call(device, stream, Some(count), null_mut()), FbOutOfRange);
    }
    destroy(cache, device);
    assert_eq!(engine.end(), Resources::default());
}

#[test]
fn rows_are_stored_in_the_memory_the_device_was_created_with() {
    for (host_memory, registered) in [(FB_HOST_MEMORY_REGISTERED, 2), (FB_HOST_MEMORY_DRIVER, 1)] {
        let Some((device, engine)) = set_up_with(Options::default(), host_memory) else { return };
        let cache = make_cache(device, &declared());
        if engine.driver.own().is_some() {
            assert_eq!(engine.driver.held_resources().registrations, registered, "the ring, and rows");
        }
        destroy(cache, device);
        assert_eq!(engine.end(), Resources::default());
    }
}

/// The rows of the last layer at the resolved slots.
fn check_rows(cache: *const FbCache, driver: &Driver, slots: *const c_void) {
    let mut answer = [0; 16];
    assert!(driver.read(slots.addr() as u64, &mut answer));
    let slot = |at: usize| i32::from_ne_bytes(answer[4 * at..][..4].try_into().unwrap());
    assert_eq!((slot(2), slot(3)), (-1, slot(0)));
    let (mut slab, mut bytes) = (null_mut(), 0);
    // SAFETY: both have room.
    assert_eq!(unsafe { fb_slab(cache, LAYERS - 1, &raw mut slab, &raw mut bytes) }, FbOk);
    for (at, position) in [(0, 7), (1, 93)] {
        let mut row = [0; ROW as usize];
        assert!(driver.read(slab.addr() as u64 + slot(at) as u64 * u64::from(ROW), &mut row));
        assert_eq!(row, row_of(LAYERS - 1, position));
    }
}

#[test]
fn streams_that_cannot_be_borrowed_are_refused() {
    let Some((device, engine)) = set_up(Options::default()) else { return };
    let mut own = null_mut();
    // SAFETY: the streams are none, the legacy one, or refused.
    unsafe {
        // The per-thread stream, and the legacy stream under its other name.
        for wrong in [2, 1] {
            let status = fb_stream_borrow(device, std::ptr::without_provenance_mut(wrong));
            assert_eq!(status, FbInvalidConfig, "{wrong}");
        }
        assert!(text_of(device).contains("pass NULL for the legacy stream"), "{}", text_of(device));
        assert_eq!(fb_stream_wait(device, null_mut()), FbOutOfRange, "the legacy stream is borrowed too");
        assert_eq!(fb_stream_borrow(device, null_mut()), FbOk);
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);
        assert_eq!(fb_stream_create(device, &raw mut own), FbOk);
        assert_eq!(fb_stream_return(device, own), FbOutOfRange, "it is the device's own");
        assert_eq!(fb_stream_wait(device, own), FbOk);
        assert_eq!(fb_device_destroy(device), FbOk);
    }
    assert_eq!(engine.end(), Resources::default());
}

#[test]
fn a_lost_device_ends_tickets_and_can_be_destroyed() {
    const ILLEGAL_ADDRESS: i32 = 700;
    if !skip::own_driver("fails an operation") {
        return;
    }
    let Some((device, engine)) = set_up(Options::default()) else { return };
    let stream = engine.stream();
    let standin = engine.driver.own().unwrap();
    let cache = make_cache(device, &declared());
    let sequence = fill(cache, 100, 10);
    let mut ticket = null_mut();
    // SAFETY: the stream lives until the device is destroyed; the outputs have room.
    unsafe {
        assert_eq!(fb_stream_borrow(device, stream), FbOk);
        standin.hold(engine.stream);
        assert_eq!(fb_join(cache, sequence, null(), stream, &raw mut ticket), FbOk, "{}", text_of(cache));
        standin.fail_operation(0, ILLEGAL_ADDRESS);
        standin.let_go(engine.stream);
        assert_eq!(outcome(ticket), (FB_TICKET_FAILED, FbDeviceFailed as u32));
        assert_eq!(fb_stream_wait(device, stream), FbDeviceFailed);
        assert_eq!(fb_ticket_destroy(ticket), FbOk);
        assert_eq!(fb_close(cache, sequence, stream), FbOk);
        assert_eq!(fb_cache_reap(cache, stream, null_mut()), FbOk);
        assert_eq!(fb_cache_destroy(cache), FbOk, "{}", text_of(cache));
        assert_eq!(fb_device_destroy(device), FbOk);
    }
    drop(engine);
}

#[test]
fn a_mark_in_a_capture_is_refused() {
    const GLOBAL: i32 = 0;
    let Some((device, engine)) = set_up(Options::default()) else { return };
    let (stream, api) = (engine.stream(), engine.driver.api());
    let (mark, mut graph) = (AtomicU32::new(0), 0);
    // SAFETY: all pointers are valid; the mark outlives the device.
    unsafe {
        assert_eq!(fb_stream_borrow(device, stream), FbOk, "{}", text_of(device));
        assert_eq!(api.ctx_push_current(engine.context), 0);
        assert_eq!(api.stream_begin_capture(engine.stream, GLOBAL), 0);
        assert_eq!(fb_stream_mark(device, stream, mark.as_ptr()), FbBusy);
        assert!(text_of(device).contains("captured"), "{}", text_of(device));
        // The capture is whole, and no launch writes the mark.
        let mut exec = 0;
        assert_eq!(api.stream_end_capture(engine.stream, &raw mut graph), 0);
        assert_eq!(api.graph_instantiate(&raw mut exec, graph, 0), 0);
        assert_eq!(api.graph_launch(exec, engine.stream), 0);
        assert_eq!(fb_stream_wait(device, stream), FbOk);
        assert_eq!(mark.load(Ordering::Acquire), 0);
        // The control: behind the launch it is written.
        assert_eq!(fb_stream_mark(device, stream, mark.as_ptr()), FbOk);
        assert_eq!(fb_stream_wait(device, stream), FbOk);
        assert_eq!(mark.load(Ordering::Acquire), 1);
        assert_eq!((api.graph_exec_destroy(exec), api.graph_destroy(graph)), (0, 0));
        assert_eq!(api.ctx_pop_current(&mut 0), 0);
        assert_eq!(fb_device_destroy(device), FbOk);
    }
    assert_eq!(engine.end(), Resources::default());
}

/// A stream of the engine's that was returned between a prefetch and the step's end holds no work to wait for.
#[test]
fn a_step_ends_although_the_stream_of_its_prefetches_was_returned() {
    let Some((device, engine)) = set_up(Options::default()) else { return };
    let side = engine.stream();
    let cache = make_cache(device, &declared());
    let sequence = fill(cache, 100, 10);
    let (selection, slots) = (allocate(device, 16), allocate(device, 16));
    assert!(engine.driver.write(selection.addr() as u64, &[0xff; 16]), "nothing is selected");
    let row = FbBatchRow { sequence, accepted: 0, query_rows: 1 };
    let config = FbStepConfig { rows: &raw const row, row_count: 1, query_rows: 1, ..sized() };
    let (mut compute, mut step) = (null_mut(), 0);
    // SAFETY: all pointers are valid and as long as stated; buffers are the device's.
    unsafe {
        assert_eq!(fb_stream_create(device, &raw mut compute), FbOk);
        assert_eq!(fb_stream_borrow(device, side), FbOk, "{}", text_of(device));
        assert_eq!(fb_join(cache, sequence, null(), compute, null_mut()), FbOk, "{}", text_of(cache));
        assert_eq!(fb_prepare(cache, &raw const config, compute, &raw mut step), FbOk, "{}", text_of(cache));
        for layer in 0..LAYERS {
            let status = fb_layer(cache, step, layer, selection.cast(), slots.cast(), compute);
            assert_eq!(status, FbOk, "{}", text_of(cache));
            assert_eq!(fb_scatter(cache, step, layer, compute), FbOk);
        }
        let prefetched = change(cache, |cache| {
            let keys = cache.cache.index_keys(Layer(0))?;
            let (place, streams) = (cache.place(step)?, [compute, side].map(cast::stream));
            cache.cache.prefetch(&cache.steps.open[place], &[keys], 1 << 40, streams[0], streams[1])
        });
        assert_eq!(prefetched, FbOk, "{}", text_of(cache));
        assert_eq!(fb_stream_return(device, side), FbOk, "{}", text_of(device));
        // The control: the device refuses the stream, also in an order.
        assert_eq!(fb_stream_order(device, side, compute), FbOutOfRange);
        assert_eq!(fb_finish(cache, step, compute), FbOk, "{}", text_of(cache));
        assert_eq!(fb_stream_wait(device, compute), FbOk);
        assert_eq!(fb_retire(cache, &raw mut step, compute, null_mut()), FbOk, "{}", text_of(cache));
        assert_eq!(fb_close(cache, sequence, compute), FbOk);
        assert_eq!(fb_stream_wait(device, compute), FbOk);
        assert_eq!(fb_cache_reap(cache, compute, null_mut()), FbOk);
    }
    destroy(cache, device);
    assert_eq!(engine.end(), Resources::default());
}
