//! The device alongside an engine, which these tests imitate with the driver's own calls: contexts, streams and
//! captures of its own, and memory used as no device should.

#[path = "../../../tests/support/skip.rs"]
pub(super) mod skip;

use super::driver::flag;
use super::*;
use crate::device::{CopyPages, PageOp, Plane};
use crate::os::NoFaults;
use forebay_standin::{Calls as Api, Driver as Beneath, Given, Options, Resources, Standin};

/// The given driver, or a stand-in with two devices; `None` where there is no compiler to build one.
fn driver(options: Options) -> Option<Beneath> {
    let driver = Beneath::new(Options { devices: 2, ..options }).unwrap();
    if driver.is_none() {
        skip::skip("g++, which builds the stand-in driver");
    }
    driver
}

/// A stand-in of the test's own, which has the ability `does`.
fn own(options: Options, does: &str) -> Option<Standin> {
    if !skip::own_driver(does) {
        return None;
    }
    if let Beneath::Own(standin) = driver(options)? { Some(*standin) } else { None }
}

/// Few threads per block: a stand-in runs each of them by itself.
fn device(library: &str) -> Result<Arc<CudaDevice>> {
    let usual = CudaOptions { library: Some(library.to_owned()), ..CudaOptions::default() };
    let given = Given::named().unwrap().is_some();
    CudaDevice::new(if given { usual } else { CudaOptions { unload: true, threads: 64, ..usual } })
}

/// The driver calls of an engine. Pointers are to locals, and handles come from the driver.
struct Engine<'a> {
    api: &'a Api,
    context: u64,
}

fn done(code: i32) {
    assert_eq!(code, 0);
}

impl<'a> Engine<'a> {
    /// An engine on the primary context of device `ordinal`, which it makes current.
    fn new(api: &'a Api, ordinal: i32) -> Engine<'a> {
        let (mut number, mut context) = (0, 0);
        // SAFETY: see `Engine`.
        unsafe {
            done(api.init(0));
            done(api.device_get(&mut number, ordinal));
            done(api.primary_ctx_retain(&mut context, number));
            done(api.ctx_set_current(context));
        }
        Engine { api, context }
    }

    fn current(&self) -> u64 {
        let mut context = 1;
        // SAFETY: see `Engine`.
        let mut ask = || unsafe { self.api.ctx_get_current(&mut context) };
        // The refused call may be this one.
        if ask() != 0 {
            done(ask());
        }
        context
    }

    fn make_current(&self, context: u64) {
        // SAFETY: see `Engine`.
        done(unsafe { self.api.ctx_set_current(context) });
    }

    fn stream(&self) -> u64 {
        let mut stream = 0;
        // SAFETY: see `Engine`.
        done(unsafe { self.api.stream_create(&mut stream, flag::STREAM_NON_BLOCKING) });
        stream
    }

    fn fill(&self, address: u64, value: u8, bytes: usize, stream: u64) {
        // SAFETY: see `Engine`.
        done(unsafe { self.api.memset_d8_async(address, value, bytes, stream) });
    }

    fn synchronize(&self, stream: u64) {
        // SAFETY: see `Engine`.
        done(unsafe { self.api.stream_synchronize(stream) });
    }

    /// Begins a capture that other threads' calls can break, which is an engine's default.
    fn capture(&self, stream: u64) {
        const GLOBAL: i32 = 0;
        // SAFETY: see `Engine`.
        done(unsafe { self.api.stream_begin_capture(stream, GLOBAL) });
    }

    /// Ends a capture; returns its code.
    fn captured(&self, stream: u64) -> i32 {
        let mut graph = 0;
        // SAFETY: see `Engine`.
        unsafe {
            let code = self.api.stream_end_capture(stream, &mut graph);
            if code == 0 {
                done(self.api.graph_destroy(graph));
            }
            code
        }
    }
}

/// Makes calls of each kind; other tests check their results.
fn some_calls(device: &CudaDevice) -> Vec<Result<()>> {
    let slice = device.allocate(64);
    let streams = [device.stream(), device.stream()];
    let (Ok(slice), [Ok(stream), Ok(other)], Ok(event)) = (slice, streams, device.event()) else {
        return vec![];
    };
    let (_ticket, completer) = crate::device::Ticket::new();
    vec![
        device.copy(stream, slice, slice),
        device.record(event, stream),
        device.wait(other, event),
        device.complete(stream, completer),
        device.call(stream, Arc::new(|| ())),
        device.query(event).map(drop),
        device.synchronize(event),
        device.backing(1).map(drop),
        device.capture(stream),
        device.captured(stream).and_then(|graph| device.launch(graph, other)),
        device.record(Event(99), stream),
    ]
}

#[test]
fn a_callers_context_is_unchanged_whatever_a_call_returns() {
    let Some(standin) = own(Options::default(), "fails a call") else { return };
    let engine = Engine::new(standin.api(), 1);
    let mut stayed = 0;
    for n in 0.. {
        standin.fail_call(n, 1);
        let mut popped = true;
        let mut look = || {
            let refused = standin.failed_call();
            if popped && refused.as_deref() == Some("cuCtxPopCurrent_v2") {
                // It is not tried again: that could pop the caller's own context.
                popped = false;
                stayed += 1;
                assert_ne!(engine.current(), engine.context, "call {n}");
                // SAFETY: see `Engine`.
                done(unsafe { standin.api().ctx_pop_current(&mut 0) });
            }
            assert_eq!(engine.current(), engine.context, "call {n}, {refused:?}");
        };
        if let Ok(device) = device(standin.library()) {
            look();
            some_calls(&device);
            look();
        }
        look();
        if standin.failed_call().is_none() {
            assert!(n > 100 && stayed > 10, "{n} {stayed}");
            break;
        }
    }
    let held = standin.held_resources();
    assert_eq!(held, Resources { contexts: 1, ..Resources::default() }, "the engine's own");
}

#[test]
fn any_thread_may_call_and_has_no_context_when_it_had_none() {
    let Some(standin) = driver(Options::default()) else { return };
    let device = device(standin.library()).unwrap();
    let engine = Engine::new(standin.api(), 0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                assert_eq!(engine.current(), 0);
                assert!(some_calls(&device).iter().filter(|result| result.is_err()).count() == 1);
                assert_eq!(engine.current(), 0);
            });
        }
    });
    assert_eq!(engine.current(), engine.context);
    // Dropped on a thread without a context, too.
    std::thread::spawn(move || drop(device)).join().unwrap();
    assert!(standin.own().is_none_or(|standin| standin.held_resources().contexts == 1));
}

#[test]
fn a_stream_of_another_devices_context_is_not_borrowed() {
    let Some(standin) = own(Options::default(), "has two devices") else { return };
    let device = device(standin.library()).unwrap();
    let engines = [0, 1].map(|number| {
        let engine = Engine::new(standin.api(), number);
        (engine.stream(), engine)
    });
    // SAFETY: the streams live as long as their engines, until the test ends.
    let [own, other] = [0, 1].map(|number: usize| unsafe { device.borrow_stream(engines[number].0) });
    assert!(own.is_ok(), "{own:?}");
    let error = other.unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, "the stream is of another context"));
}

#[test]
fn an_engines_stream_is_borrowed_and_stays_its_own() {
    let Some(library) = driver(Options::default()).map(Arc::new) else { return };
    let device = device(library.library()).unwrap();
    let engine = Engine::new(library.api(), 0);
    let raw = engine.stream();
    let slice = device.allocate(4).unwrap();
    let event = device.event().unwrap();
    assert_eq!(device.record(event, Stream(raw)).unwrap_err().kind(), Kind::OutOfRange, "not borrowed yet");
    // SAFETY: the stream lives until the test ends.
    let [stream, again] = [raw, raw].map(|raw| unsafe { device.borrow_stream(raw) });
    assert_eq!((stream.as_ref().unwrap(), &stream), (&Stream(raw), &again));
    let stream = stream.unwrap();
    // The engine's work and ours are in one order.
    let held = library.hold(raw).unwrap();
    engine.fill(slice.address(), 7, 4, raw);
    let (seen, address) = (Arc::new(Mutex::new(0)), slice.address());
    let (told, memory) = (Arc::clone(&seen), Arc::clone(&library));
    let look = move || {
        let (told, memory) = (Arc::clone(&told), Arc::clone(&memory));
        let aside = move || {
            let mut byte = [0];
            assert!(memory.read(address, &mut byte));
            *told.lock() = byte[0];
        };
        // A driver forbids its calls on the thread of a host function.
        assert!(std::thread::spawn(aside).join().is_ok());
    };
    device.call(stream, Arc::new(look)).unwrap();
    drop(held);
    device.record(event, stream).unwrap();
    device.synchronize(event).unwrap();
    assert_eq!(*seen.lock(), 7);
    let blocking = library.synchronizations();
    device.query(event).unwrap();
    assert_eq!(library.synchronizations(), blocking);
    drop(device);
    let streams = library.own().map(|standin| standin.held_resources().streams);
    assert!(streams.is_none_or(|streams| streams == 1), "the engine's is still there");
}

#[test]
fn memory_and_queries_break_no_capture_of_an_engine() {
    let Some(standin) = driver(Options::default()) else { return };
    let device = device(standin.library()).unwrap();
    let engine = Engine::new(standin.api(), 0);
    let (raw, event, stream) = (engine.stream(), device.event().unwrap(), device.stream().unwrap());
    device.record(event, stream).unwrap();
    let plain = |engine: &Engine<'_>| {
        let mut address = 0;
        // SAFETY: see `Engine`.
        unsafe { engine.api.mem_alloc(&mut address, 64) }
    };
    for elsewhere in [false, true] {
        let calls = || {
            device.allocate(64).unwrap();
            device.backing(1).unwrap();
            assert_eq!(device.query(event), Ok(true));
            device.synchronize(event).unwrap();
            device.event().unwrap();
        };
        engine.capture(raw);
        match elsewhere {
            false => calls(),
            true => std::thread::scope(|scope| scope.spawn(calls).join().unwrap()),
        }
        assert_eq!(engine.captured(raw), 0);
        // The control: the same without the device's measures against it.
        engine.capture(raw);
        let refused = match elsewhere {
            false => plain(&engine),
            true => std::thread::scope(|scope| {
                let call = || {
                    engine.make_current(engine.context);
                    plain(&engine)
                };
                scope.spawn(call).join().unwrap()
            }),
        };
        assert!(code::CAPTURE.contains(&refused), "{refused}");
        assert_ne!(engine.captured(raw), 0);
    }
}

#[test]
fn a_capture_of_the_engines_takes_launches_and_no_calls() {
    let Some(standin) = driver(Options::default()) else { return };
    let device = device(standin.library()).unwrap();
    let engine = Engine::new(standin.api(), 0);
    let raw = engine.stream();
    // SAFETY: the stream lives until the test ends.
    let stream = unsafe { device.borrow_stream(raw) }.unwrap();
    let slice = device.allocate(64).unwrap();
    engine.capture(raw);
    device.copy(stream, slice.part(0, 8).unwrap(), slice.part(8, 8).unwrap()).unwrap();
    let refused = device.call(stream, Arc::new(|| ())).unwrap_err();
    assert_eq!(refused.kind(), Kind::InvalidState);
    let (ticket, completer) = crate::device::Ticket::new();
    assert_eq!(device.complete(stream, completer).unwrap_err().kind(), Kind::InvalidState);
    assert!(ticket.poll().is_some());
    assert_eq!(device.capture(stream).unwrap_err().kind(), Kind::Busy);
    assert_eq!(device.captured(stream).unwrap_err().kind(), Kind::InvalidState, "it is the engine's");
    assert_eq!(engine.captured(raw), 0, "none of it has broken the capture");
}

/// Memory that is written on one stream as soon as it is allocated. Returns whether the bytes stay.
fn first_written_elsewhere(seed: u64, zeroed_in_time: bool) -> bool {
    let Some(standin) = driver(Options { seed: Some(seed), ..Options::default() }) else {
        return zeroed_in_time;
    };
    let device = device(standin.library()).unwrap();
    let engine = Engine::new(standin.api(), 0);
    let [own, other] = [0; 2].map(|_| engine.stream());
    let address = match zeroed_in_time {
        true => device.allocate(64).unwrap().address(),
        false => {
            let mut address = 0;
            // SAFETY: see `Engine`.
            done(unsafe { engine.api.mem_alloc(&mut address, 64) });
            engine.fill(address, 0, 64, other);
            address
        }
    };
    engine.fill(address, 7, 64, own);
    [own, other].iter().for_each(|stream| engine.synchronize(*stream));
    let mut bytes = [0; 64];
    assert!(standin.read(address, &mut bytes));
    bytes == [7; 64]
}

#[test]
fn f5_memory_is_zeroed_before_it_is_first_written_whatever_the_stream() {
    assert!((0..50).all(|seed| first_written_elsewhere(seed, true)));
}

#[test]
fn f5_control_memory_zeroed_on_another_stream_loses_what_was_written() {
    if own(Options::default(), "delays by a seed").is_none() {
        return;
    }
    let lost = (0..50).filter(|seed| !first_written_elsewhere(*seed, false)).count();
    assert!(lost > 0, "no seed of 50 shows it");
}

#[test]
fn an_engine_that_passes_no_address_or_an_odd_one_is_refused() {
    let Some(standin) = driver(Options::default()) else { return };
    let device = device(standin.library()).unwrap();
    let asker = crate::device::checks::Asker { name: NAME, device: device.id(), exact: true, top_k_max: 8 };
    let geometry = crate::geometry::Geometry::new(crate::geometry::Shape::DEEPSEEK_V3_2).unwrap();
    let layout = PoolLayout {
        geometry: geometry.into(),
        tables: vec![],
        slabs: vec![],
        rows: vec![],
        lane_pages: 1,
        micro_batches: 1,
        batch: 1,
        expected: Default::default(),
    };
    for address in [0, 6] {
        // SAFETY: nothing is enqueued with it.
        let slice = unsafe { device.import(address, 64) };
        assert_eq!(asker.words(&slice, 16).unwrap_err().kind(), Kind::OutOfRange, "{address}");
    }
    assert_eq!(device.attach(layout).unwrap_err().kind(), Kind::InvalidConfig);
}

#[test]
fn a_selection_too_large_for_the_kernels_counters_is_refused() {
    use crate::geometry::{Geometry, Shape};
    let Some(standin) = driver(Options::default()) else { return };
    let device = device(standin.library()).unwrap();
    let refused = |top_k| {
        let geometry = Geometry::new(Shape { top_k, ..Shape::DEEPSEEK_V3_2 }).unwrap();
        let [slabs, rows] = [vec![], vec![]];
        let layout = PoolLayout {
            geometry: geometry.into(),
            tables: vec![],
            slabs,
            rows,
            lane_pages: 1,
            micro_batches: 1,
            batch: 1,
            expected: Default::default(),
        };
        device.attach(layout).unwrap_err().place().to_owned()
    };
    assert_eq!(refused(65_536), "selected positions of a query row");
    assert_eq!(refused(65_535), "layers of the pool layout");
}

#[test]
fn a_stream_that_was_given_back_may_be_destroyed_before_the_device() {
    let Some(standin) = driver(Options { seed: Some(1), ..Options::default() }) else { return };
    let device = device(standin.library()).unwrap();
    let engine = Engine::new(standin.api(), 0);
    let (raw, event, own) = (engine.stream(), device.event().unwrap(), device.stream().unwrap());
    // SAFETY: the stream lives until it has been given back.
    let stream = unsafe { device.borrow_stream(raw) }.unwrap();
    let far = device.allocate(64).unwrap();
    let [near, other] = [0, 32].map(|at| far.part(at, 32).unwrap());
    let graphs = [0; 2].map(|_| {
        device.capture(stream).unwrap();
        device.copy(stream, near, other).unwrap();
        assert_eq!(device.return_stream(stream).unwrap_err().kind(), Kind::InvalidState, "captured");
        let graph = device.captured(stream).unwrap();
        device.launch(graph, stream).unwrap();
        graph
    });
    device.release(graphs[0]).unwrap();
    let count = Arc::new(());
    let kept = Arc::clone(&count);
    let held = standin.hold(raw).unwrap();
    device.call(stream, Arc::new(move || drop(Arc::clone(&kept)))).unwrap();
    assert_eq!(Arc::strong_count(&count), 2);
    drop(held);
    assert_eq!(device.return_stream(own).unwrap_err().kind(), Kind::OutOfRange, "not borrowed");
    device.return_stream(stream).unwrap();
    assert_eq!(Arc::strong_count(&count), 1, "the enqueued work has ended");
    // SAFETY: the engine's own stream, which no device has registered any more.
    done(unsafe { standin.api().stream_destroy(raw) });
    for refused in [device.return_stream(stream), device.record(event, stream)] {
        assert_eq!(refused.unwrap_err().kind(), Kind::OutOfRange);
    }
    device.release(graphs[1]).unwrap();
    assert_eq!(standin.held_resources().execs, 0, "they are not looked for on the stream");
    device.record(event, own).unwrap();
    device.synchronize(event).unwrap();
    drop(device);
    let left = standin.own().map(Standin::held_resources);
    assert!(left.is_none_or(|left| left == Resources { contexts: 1, ..Resources::default() }), "{left:?}");
}

#[test]
fn a_value_that_a_device_keeps_is_dropped_after_the_enqueued_work() {
    let Some(standin) = driver(Options { seed: Some(1), ..Options::default() }) else { return };
    let device = device(standin.library()).unwrap();
    let stream = device.stream().unwrap();
    let (value, (sender, receiver)) = (Arc::new(()), std::sync::mpsc::channel());
    let alive = Arc::downgrade(&value);
    device.keep(value);
    let seen = std::sync::Weak::clone(&alive);
    device.call(stream, Arc::new(move || sender.send(seen.upgrade().is_some()).unwrap())).unwrap();
    drop(device);
    assert!(receiver.recv().unwrap(), "running work may need it");
    assert!(alive.upgrade().is_none());
}

#[test]
fn the_legacy_stream_is_one_and_the_per_thread_one_is_refused() {
    let Some(standin) = driver(Options::default()) else { return };
    let device = device(standin.library()).unwrap();
    // SAFETY: the driver's own streams.
    let borrow = |raw| unsafe { device.borrow_stream(raw) };
    assert_eq!([0, 1].map(borrow), [Ok(Stream(0)), Ok(Stream(0))]);
    let refused = borrow(2).unwrap_err();
    assert_eq!((refused.kind(), refused.operation()), (Kind::InvalidConfig, "borrow stream"));
    let event = device.event().unwrap();
    // A driver takes no batch of copies there, so these are single ones.
    let bytes = 32 << 10;
    let [from, to] = [0; 2].map(|_| device.allocate(3 * bytes).unwrap());
    device.write(from, &[7; 3 * (32 << 10)]).unwrap();
    let of = |memory| Plane { memory, stride: bytes, bytes };
    let copy = CopyPages { planes: &[(of(from), of(to))], pages: &[(0, 2), (2, 0)] };
    device.enqueue_pages(Stream(0), PageOp::Copy(copy)).unwrap();
    device.record(event, Stream(0)).unwrap();
    device.synchronize(event).unwrap();
    let mut found = [0; 2];
    for (page, found) in [0, 2].into_iter().zip(&mut found) {
        device.read(to.part(page * bytes, 1).unwrap(), std::slice::from_mut(found)).unwrap();
    }
    assert_eq!(found, [7; 2]);
}

#[test]
fn the_drivers_library_stays_loaded_when_the_last_device_is_dropped() {
    let Some(standin) = own(Options::default(), "can be unloaded") else { return };
    let path = std::ffi::CString::new(standin.library()).unwrap();
    // SAFETY: a path; nothing is loaded that is not there.
    let loaded = || !unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) }.is_null();
    drop(device(standin.library()).unwrap());
    let stays = CudaOptions { library: Some(standin.library().to_owned()), ..CudaOptions::default() };
    drop(CudaDevice::new(stays).unwrap());
    drop(standin);
    assert!(loaded());
    // The control: a library that no device kept loaded is gone.
    let Some(standin) = own(Options::default(), "can be unloaded") else { return };
    let path = std::ffi::CString::new(standin.library()).unwrap();
    drop(device(standin.library()).unwrap());
    drop(standin);
    // SAFETY: as above.
    assert!(unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) }.is_null());
}

#[test]
fn registering_memory_twice_is_an_error_that_says_so() {
    let Some(standin) = driver(Options::default()) else { return };
    let device = device(standin.library()).unwrap();
    let request = crate::os::Request {
        bytes: 8192,
        huge: false,
        populate: true,
        lock: false,
        node: None,
        shared: false,
    };
    let map = Arc::new(Map::new(&request, &NoFaults).unwrap().0);
    // Registered by another owner: the driver's own call, of a part of the mapping.
    let (engine, address) = (Engine::new(standin.api(), 0), map.as_ptr() as u64);
    // SAFETY: the mapping lives until the test ends.
    done(unsafe { engine.api.mem_host_register(address, 4096, flag::HOST_PORTABLE_MAPPED) });
    for _ in 0..2 {
        let refused = device.register(&map).unwrap_err();
        assert_eq!(refused.number("code"), Some(712));
        assert!(refused.to_string().ends_with("register memory once, by one owner"), "{refused}");
    }
    // SAFETY: registered above.
    done(unsafe { engine.api.mem_host_unregister(address) });
    device.register(&map).unwrap();
}

#[cfg(feature = "measure")]
#[test]
fn our_streams_are_destroyed_before_an_engines() {
    use crate::device::probe::Probe;
    let Some(standin) = driver(Options::default()) else { return };
    let device = device(standin.library()).unwrap();
    let engine = Engine::new(standin.api(), 0);
    let priority = |stream: u64| {
        let mut priority = 7;
        // SAFETY: see `Engine`.
        done(unsafe { engine.api.stream_get_priority(stream, &mut priority) });
        priority
    };
    let (own, usual) = (device.stream().unwrap(), device.engine_stream().unwrap());
    assert!(priority(own.0) < 0, "less is more");
    assert_eq!((priority(usual.0), priority(engine.stream())), (0, 0));
    // A graph would run all of it with the priority of the stream of its launch, unless it is configured otherwise.
    device.capture(usual).unwrap();
    device.captured(usual).unwrap();
    if let Beneath::Own(standin) = &standin {
        assert_eq!(standin.prioritized(), 1);
    }
}

#[test]
fn a_turn_on_a_stream_that_was_given_back_owes_no_record() {
    let Some(standin) = own(Options::default(), "refuses a call") else { return };
    let device = device(standin.library()).unwrap();
    let engine = Engine::new(standin.api(), 0);
    let (raw, next) = (engine.stream(), engine.stream());
    let turns = super::lanes::Turns::new(&device.inner.context).unwrap();
    let current = device.inner.context.enter().unwrap();
    // A wait, nothing to launch, and the record.
    standin.fail_call(1, code::OUT_OF_MEMORY);
    turns.take(&current, raw, || Ok(())).unwrap();
    assert_eq!(standin.failed_call().as_deref(), Some("cuEventRecord"));
    standin.fail_call(u64::MAX, code::OUT_OF_MEMORY);
    // SAFETY: the engine's own stream, on which nothing is left.
    done(unsafe { standin.api().stream_destroy(raw) });
    assert!(turns.take(&current, next, || Ok(())).is_err(), "the stream is gone");
    turns.forget(raw);
    turns.take(&current, next, || Ok(())).unwrap();
}
