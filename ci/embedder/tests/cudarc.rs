//! Tests of forebay-cudarc on the stand-in driver that `FOREBAY_STANDIN_LIBRARY` names: what a bridge accepts and
//! rejects, and that cudarc frees nothing while forebay may use it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../../../tests/support/skip.rs"]
mod skip;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::{CudaContext, DeviceSlice};
use forebay::Kind;
use forebay::device::cuda::CudaOptions;
use forebay::device::{Device, Mapped};
use forebay::os::Protection;
use forebay_cudarc::Bridge;

/// Runs one test at a time: a captured stream, or the end of a device, affects all tests.
static ALONE: Mutex<()> = Mutex::new(());

/// Loads the driver's library: cudarc finds a library that is already loaded under the name that it looks for. Returns
/// `None` without the driver, and the test then reports a skip.
fn driver() -> Option<(MutexGuard<'static, ()>, String)> {
    static LOADED: OnceLock<Option<libloading::Library>> = OnceLock::new();
    let path = std::env::var("FOREBAY_STANDIN_LIBRARY").ok().filter(|path| !path.is_empty());
    // SAFETY: the stand-in's library builds its own globals when it is loaded, and nothing else.
    LOADED.get_or_init(|| path.as_ref().map(|path| unsafe { libloading::Library::new(path).unwrap() }));
    if path.is_none() {
        skip::skip("g++, which builds the stand-in driver");
    }
    path.map(|path| (ALONE.lock().unwrap_or_else(PoisonError::into_inner), path))
}

fn bridge(context: &Arc<CudaContext>, library: String) -> Bridge {
    Bridge::open(context, CudaOptions { library: Some(library), ..CudaOptions::default() }).unwrap()
}

#[test]
fn an_engine_with_cudarcs_streams_and_memory_reads_the_rows_it_selected() {
    let Some((_alone, library)) = driver() else { return };
    let context = CudaContext::new(0).unwrap();
    let line = forebay_embedder::decode(&context, Some(library)).unwrap();
    assert!(line.starts_with("12 steps, ") && line.ends_with(" misses, 2304 rows read"), "{line}");
    context.check_err().unwrap();
}

#[test]
fn a_borrowed_stream_is_not_destroyed_before_the_device() {
    let Some((_alone, library)) = driver() else { return };
    let context = CudaContext::new(0).unwrap();
    let bridge = bridge(&context, library);
    let device = Arc::clone(bridge.device());
    let stream = context.new_stream().unwrap();
    let alive = Arc::downgrade(&stream);
    let known = bridge.stream(&stream).unwrap();
    assert_eq!(bridge.stream(&stream).unwrap(), known);
    assert_eq!(Arc::strong_count(&stream), 2, "kept once, however often it is borrowed");
    // The engine and the bridge drop the stream, and a call returns it to the device; a cache still holds the device.
    drop((stream, bridge));
    device.record(device.event().unwrap(), known).unwrap();
    device.return_stream(known).unwrap();
    assert!(alive.upgrade().is_some());
    assert_eq!(device.record(device.event().unwrap(), known).unwrap_err().kind(), Kind::OutOfRange);
    drop(device);
    assert!(alive.upgrade().is_none());
    context.check_err().unwrap();
}

#[test]
fn a_view_without_cudarcs_tracking_is_captured() {
    let Some((_alone, library)) = driver() else { return };
    let context = CudaContext::new(0).unwrap();
    // SAFETY: one stream uses all that is made from here on.
    unsafe { context.disable_event_tracking() };
    let bridge = bridge(&context, library);
    let (device, stream) = (bridge.device(), context.new_stream().unwrap());
    let known = bridge.stream(&stream).unwrap();
    let room = device.allocate(32).unwrap();
    device.write(room, &[7; 32]).unwrap();
    let [from, mut to] = [0, 16].map(|at| bridge.view::<u8>(room.part(at, 16).unwrap(), &stream).unwrap());
    device.capture(known).unwrap();
    stream.memcpy_dtod(&from.view(), &mut to.view_mut()).unwrap();
    drop((from, to));
    let graph = device.captured(known).unwrap();
    device.launch(graph, known).unwrap();
    stream.synchronize().unwrap();
    device.release(graph).unwrap();
    context.check_err().unwrap();
}

#[test]
fn streams_events_and_memory_of_another_context_are_refused() {
    let Some((_alone, library)) = driver() else { return };
    let context = CudaContext::new(0).unwrap();
    let bridge = bridge(&context, library.clone());
    // To cudarc this is a context of the next device. Its end would destroy the context, so the test never drops it.
    // SAFETY: a context of this driver; it is never dropped.
    let other = unsafe { CudaContext::from_raw_context(1, context.cu_device(), context.cu_ctx()) }.unwrap();
    std::mem::forget(Arc::clone(&other));
    let options = CudaOptions { library: Some(library), ..CudaOptions::default() };
    let error = Bridge::open(&other, options).unwrap_err();
    assert!(error.kind() == Kind::InvalidConfig && error.to_string().contains("primary"), "{error}");
    // The legacy stream has the same handle in every context.
    for stream in [other.default_stream(), other.new_stream().unwrap()] {
        let error = bridge.stream(&stream).unwrap_err();
        assert_eq!((error.kind(), error.number("its device")), (Kind::InvalidConfig, Some(1)), "{error}");
    }
    let event = other.new_event(None).unwrap();
    let ours = bridge.device().event().unwrap();
    assert_eq!(bridge.follow(ours, &event).unwrap_err().kind(), Kind::InvalidConfig);
    assert_eq!(bridge.lead(ours, &event).unwrap_err().kind(), Kind::InvalidConfig);
    let room = bridge.device().allocate(16).unwrap();
    assert_eq!(bridge.view::<i32>(room, &other.default_stream()).unwrap_err().kind(), Kind::InvalidConfig);
    let memory = other.default_stream().alloc_zeros::<i32>(4).unwrap();
    assert_eq!(bridge.lend(memory).unwrap_err().kind(), Kind::InvalidConfig);
    assert!(bridge.stream(&context.default_stream()).is_ok());
    assert!(bridge.stream(&context.per_thread_stream()).is_err(), "a different stream on each thread");
}

#[test]
fn events_work_in_both_directions() {
    let Some((_alone, library)) = driver() else { return };
    let context = CudaContext::new(0).unwrap();
    let bridge = bridge(&context, library);
    let (engine, own) = (context.new_stream().unwrap(), bridge.device().stream().unwrap());
    let ours = bridge.device().event().unwrap();
    let theirs = engine.record_event(None).unwrap();
    bridge.wait(own, &theirs).unwrap();
    bridge.follow(ours, &theirs).unwrap();
    bridge.device().synchronize(ours).unwrap();
    bridge.lead(ours, &theirs).unwrap();
    theirs.synchronize().unwrap();
    let unknown = forebay::device::Stream(own.0 + 8);
    assert_eq!(bridge.wait(unknown, &theirs).unwrap_err().kind(), Kind::OutOfRange);
    context.check_err().unwrap();
}

#[test]
fn lent_memory_outlives_its_lender_and_cudarc_does_not_free_the_devices_memory() {
    let Some((_alone, library)) = driver() else { return };
    let context = CudaContext::new(0).unwrap();
    let bridge = bridge(&context, library);
    let stream = context.new_stream().unwrap();
    let known = bridge.stream(&stream).unwrap();
    let mut lent = bridge.lend(stream.clone_htod(&[1, 2, 3, 4]).unwrap()).unwrap();
    let room = bridge.device().allocate(16).unwrap();
    bridge.device().copy(known, lent.slice(), room).unwrap();
    let view = bridge.view::<i32>(room, &stream).unwrap();
    assert_eq!(stream.clone_dtoh(&view.view()).unwrap(), [1, 2, 3, 4]);
    assert_eq!(view.view().stream(), &stream, "no other stream waits for its end");
    drop(view);
    stream.memcpy_htod(&[5, 6, 7, 8], &mut lent.view_mut()).unwrap();
    let named = lent.slice();
    {
        let _gone = lent;
    }
    // Both still exist: cudarc's memory, which a step may use, and the device's own.
    bridge.device().copy(known, named, room).unwrap();
    stream.synchronize().unwrap();
    let mut bytes = [0; 16];
    bridge.device().read(room, &mut bytes).unwrap();
    assert_eq!((bytes[0], bytes[12]), (5, 8));
    context.check_err().unwrap();
}

#[test]
fn views_cover_whole_elements_of_memory_that_the_device_keeps() {
    let Some((_alone, library)) = driver() else { return };
    let context = CudaContext::new(0).unwrap();
    let (bridge, other) = (bridge(&context, library.clone()), bridge(&context, library));
    let (device, stream) = (bridge.device(), context.new_stream().unwrap());
    let room = device.allocate(16).unwrap();
    let refused = |slice| bridge.view::<i32>(slice, &stream).unwrap_err();
    assert_eq!(refused(room.part(0, 7).unwrap()).kind(), Kind::InvalidConfig);
    let whole = bridge.view::<i64>(room.part(4, 8).unwrap(), &stream).unwrap_err();
    assert_eq!(whole.kind(), Kind::InvalidConfig);
    assert_eq!(other.view::<i32>(room, &stream).unwrap_err().kind(), Kind::OutOfRange);
    // The owner of lent memory may free it, and a view would outlive that.
    let lent = bridge.lend(stream.alloc_zeros::<i32>(4).unwrap()).unwrap();
    let error = refused(lent.slice());
    assert!(
        error.kind() == Kind::InvalidConfig && error.to_string().contains("not the device's own"),
        "{error}"
    );
    // SAFETY: no operation used it.
    drop(unsafe { lent.take_back() });
    // A slice is rejected even if it ends after the device's memory, or begins before it.
    for (before, bytes) in [(0, 20), (4, 16), (4, 24)] {
        // SAFETY: nothing is enqueued with it.
        let around = unsafe { device.import(room.address() - before, bytes) };
        assert_eq!(refused(around).kind(), Kind::InvalidConfig);
    }
    // Mapped and registered memory belongs to the device as well.
    let backing = device.backing(device.granularity()).unwrap();
    let mapped = Mapped { backing, offset: 0, bytes: device.granularity() };
    assert!(bridge.view::<i32>(device.range(&[mapped], Protection::ReadWrite).unwrap(), &stream).is_ok());
    let taken = stream.alloc_zeros::<u8>(4).unwrap().leak();
    // SAFETY: memory of cudarc's, which is freed with this value.
    let none = unsafe { stream.upgrade_device_ptr::<u8>(taken, 0) };
    assert_eq!(bridge.lend(none).unwrap_err().kind(), Kind::InvalidConfig);
    context.check_err().unwrap();
}
