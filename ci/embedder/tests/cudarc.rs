//! forebay-cudarc on the stand-in driver, which `FOREBAY_STANDIN_LIBRARY` names: what a bridge takes and refuses, and
//! that nothing of cudarc's goes while forebay may use it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../../../tests/support/skip.rs"]
mod skip;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::CudaContext;
use forebay::Kind;
use forebay::device::Device;
use forebay::device::cuda::CudaOptions;
use forebay_cudarc::Bridge;

/// One test after the other: a captured stream, or a device that ends, is all tests' own.
static ALONE: Mutex<()> = Mutex::new(());

/// The driver's library, loaded: cudarc finds what is loaded under the name that it looks for. None without the driver,
/// and then the test says that it skips.
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
fn a_borrowed_stream_is_not_destroyed_while_it_is_borrowed() {
    let Some((_alone, library)) = driver() else { return };
    let context = CudaContext::new(0).unwrap();
    let bridge = bridge(&context, library);
    let stream = context.new_stream().unwrap();
    let (first, second) = (bridge.stream(&stream).unwrap(), bridge.stream(&stream).unwrap());
    assert_eq!(first.stream(), second.stream());
    let known = first.stream();
    // Its engine lets go of it; it is still a stream.
    drop(stream);
    drop(first);
    assert_eq!(Arc::strong_count(second.cuda()), 1);
    let event = bridge.device().event().unwrap();
    bridge.device().record(event, known).unwrap();
    second.cuda().synchronize().unwrap();
    drop(second);
    let error = bridge.device().record(event, known).unwrap_err();
    assert_eq!(error.kind(), Kind::OutOfRange, "given back: {error}");
    context.check_err().unwrap();
}

#[test]
fn a_stream_that_is_captured_when_it_is_given_back_stays() {
    let Some((_alone, library)) = driver() else { return };
    let context = CudaContext::new(0).unwrap();
    let bridge = bridge(&context, library);
    let stream = context.new_stream().unwrap();
    let borrowed = bridge.stream(&stream).unwrap();
    let known = borrowed.stream();
    bridge.device().capture(known).unwrap();
    drop(borrowed);
    let still = Arc::strong_count(&stream);
    let graph = bridge.device().captured(known).unwrap();
    bridge.device().release(graph).unwrap();
    assert_eq!(still, 2, "the device knows it, so somebody keeps it");
}

#[test]
fn another_context_is_refused_whatever_is_of_it() {
    let Some((_alone, library)) = driver() else { return };
    let context = CudaContext::new(0).unwrap();
    let bridge = bridge(&context, library.clone());
    // Of the next device as far as cudarc knows; its end would destroy the context, and is left out.
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
    let memory = other.default_stream().alloc_zeros::<i32>(4).unwrap();
    assert_eq!(bridge.lend(memory).unwrap_err().kind(), Kind::InvalidConfig);
    assert!(bridge.stream(&context.default_stream()).is_ok());
    assert!(bridge.stream(&context.per_thread_stream()).is_err(), "another one on each thread");
}

#[test]
fn events_go_both_ways() {
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
fn lent_memory_outlives_who_lent_it_and_the_devices_is_not_freed_by_cudarc() {
    let Some((_alone, library)) = driver() else { return };
    let context = CudaContext::new(0).unwrap();
    let bridge = bridge(&context, library);
    let stream = context.new_stream().unwrap();
    let borrowed = bridge.stream(&stream).unwrap();
    let mut lent = bridge.lend(stream.clone_htod(&[1, 2, 3, 4]).unwrap()).unwrap();
    let room = bridge.device().allocate(16).unwrap();
    bridge.device().copy(borrowed.stream(), lent.slice(), room).unwrap();
    let view = bridge.view::<i32>(room).unwrap();
    assert_eq!(stream.clone_dtoh(&view.view()).unwrap(), [1, 2, 3, 4]);
    drop(view);
    stream.memcpy_htod(&[5, 6, 7, 8], &mut lent.view_mut()).unwrap();
    let named = lent.slice();
    {
        let _gone = lent;
    }
    // Both are still there: cudarc's memory, which a step may name, and the device's own.
    bridge.device().copy(borrowed.stream(), named, room).unwrap();
    stream.synchronize().unwrap();
    let mut bytes = [0; 16];
    bridge.device().read(room, &mut bytes).unwrap();
    assert_eq!((bytes[0], bytes[12]), (5, 8));
    // Whole elements, of this device.
    assert_eq!(bridge.view::<i32>(room.part(0, 7).unwrap()).unwrap_err().kind(), Kind::InvalidConfig);
    assert_eq!(bridge.view::<i64>(room.part(4, 8).unwrap()).unwrap_err().kind(), Kind::InvalidConfig);
    let other =
        Bridge::open(&context, CudaOptions { library: driver_path(), ..CudaOptions::default() }).unwrap();
    assert_eq!(other.view::<i32>(room).unwrap_err().kind(), Kind::OutOfRange);
    let none = context.default_stream().null::<u8>();
    assert!(none.is_err() || bridge.lend(none.unwrap()).is_err());
    context.check_err().unwrap();
}

fn driver_path() -> Option<String> {
    std::env::var("FOREBAY_STANDIN_LIBRARY").ok()
}
