//! Tests of devices, their streams and their memory.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;

use super::*;

fn refusal(config: &FbDeviceConfig) -> (FbStatus, String) {
    let (mut device, mut text) = (null_mut(), [0; 512]);
    // SAFETY: all pointers are valid and as long as stated.
    let status = unsafe { fb_device_create(config, text.as_mut_ptr(), text.len(), &raw mut device) };
    assert!(device.is_null());
    (status, text_in(&text))
}

#[test]
fn fields_that_a_device_kind_lacks_are_refused_by_name() {
    let library = c"no-such-driver.so".as_ptr();
    for (config, name) in [
        (FbDeviceConfig { kind: 3, ..sized() }, "kind"),
        (FbDeviceConfig { number: 1, ..sized() }, "number"),
        (FbDeviceConfig { library, ..sized() }, "library"),
        (FbDeviceConfig { gather_blocks: 1, ..sized() }, "gather_blocks"),
        (FbDeviceConfig { kind: FB_DEVICE_HOST_THREADS, threads: 32, ..sized() }, "threads"),
        (FbDeviceConfig { host_memory: FB_HOST_MEMORY_DRIVER, ..sized() }, "host_memory"),
        (FbDeviceConfig { reserved: 1, ..sized() }, "reserved"),
    ] {
        let (status, text) = refusal(&config);
        assert_eq!(status, FbInvalidConfig);
        assert!(text.contains(&format!(": {name} (value ")), "{text}");
    }
    if cfg!(not(feature = "cuda")) {
        let (status, text) = refusal(&FbDeviceConfig { kind: FB_DEVICE_CUDA, ..sized() });
        assert_eq!(status, FbUnsupported);
        assert!(text.contains("this build has no CUDA device"), "{text}");
    } else {
        for (config, name) in [
            (FbDeviceConfig { kind: FB_DEVICE_CUDA, host_memory: 2, ..sized() }, "host_memory"),
            (FbDeviceConfig { kind: FB_DEVICE_CUDA, memory: 1, ..sized() }, "memory"),
        ] {
            let (status, text) = refusal(&config);
            assert_eq!(status, FbInvalidConfig);
            assert!(text.contains(&format!(": {name} (value ")), "{text}");
        }
        let (status, text) = refusal(&FbDeviceConfig { kind: FB_DEVICE_CUDA, library, ..sized() });
        assert_eq!(status, FbOsRefused);
        assert!(text.contains("no-such-driver.so"), "{text}");
        let library = [0xFF_u8, 0];
        let library = library.as_ptr().cast();
        let (status, text) = refusal(&FbDeviceConfig { kind: FB_DEVICE_CUDA, library, ..sized() });
        assert_eq!(status, FbInvalidConfig);
        assert!(text.contains("library"), "{text}");
    }
}

#[test]
fn a_device_is_kept_while_it_has_caches() {
    let device = host();
    let (one, other) = (make_cache(device, &declared()), make_cache(device, &declared()));
    // SAFETY: no call is running.
    unsafe {
        assert_eq!(fb_device_destroy(device), FbBusy);
        assert!(
            text_of(device).contains(
                "caches, captured layers, weights, updates or changes of replicas are left (left 2)"
            ),
            "{}",
            text_of(device)
        );
        assert_eq!(fb_cache_destroy(one), FbOk);
        assert_eq!(fb_device_destroy(device), FbBusy);
    }
    destroy(other, device);
    let mut cache = null_mut();
    // SAFETY: all pointers are valid.
    let status = unsafe { fb_cache_create(device, &declared(), null_mut(), 0, &raw mut cache) };
    assert_eq!((status, cache.is_null()), (FbClosed, true));
}

#[test]
fn a_cache_that_cannot_be_created_leaves_the_device_free() {
    let device = make_device(&FbDeviceConfig { memory: 1 << 16, ..sized() });
    let (mut cache, mut text) = (null_mut(), [0; 512]);
    let config = FbCacheConfig { lanes: 300, ..declared() };
    // SAFETY: all pointers are valid and as long as stated.
    unsafe {
        let status =
            fb_cache_create(device, &raw const config, text.as_mut_ptr(), text.len(), &raw mut cache);
        assert_eq!(status, FbOutOfMemory);
        assert!(text_in(&text).contains("out of memory"), "{}", text_in(&text));
        let mut address = null_mut();
        assert_eq!(fb_device_allocate(device, 1 << 20, &raw mut address), FbOutOfMemory);
        assert_eq!(fb_device_allocate(device, 0, &raw mut address), FbInvalidConfig);
        assert!(address.is_null());
        assert_eq!(fb_device_destroy(device), FbOk);
    }
}

#[test]
fn a_ticket_does_not_keep_a_device_alive() {
    let device = make_device(&FbDeviceConfig { kind: FB_DEVICE_HOST_THREADS, ..sized() });
    let cache = make_cache(device, &declared());
    let mut door = None;
    let kept = crate::handle::read(cache, |cache| {
        door = Some(cache.tenant.door.clone());
        Ok(())
    });
    assert_eq!(kept, FbOk);
    let door = door.unwrap();
    let (asks, asked) = mpsc::channel();
    let (open, gate) = mpsc::channel::<()>();
    let inside = &AtomicU32::new(0);
    let sent = device.addr();
    thread::scope(|scope| {
        // A ticket that queries its device while the device is destroyed.
        let asking = door.clone();
        scope.spawn(move || {
            asking.with(|_| {
                asks.send(()).unwrap();
                gate.recv().unwrap();
                inside.store(1, Ordering::Release);
            });
        });
        asked.recv().unwrap();
        // SAFETY: no call is running.
        assert_eq!(unsafe { fb_cache_destroy(cache) }, FbOk);
        let destroyed = scope.spawn(move || {
            // SAFETY: as above.
            let status = unsafe { fb_device_destroy(std::ptr::without_provenance_mut(sent)) };
            (status, inside.load(Ordering::Acquire))
        });
        while crate::handle::read(device, |_| Ok(())) != FbClosed {
            thread::yield_now();
        }
        open.send(()).unwrap();
        assert_eq!(destroyed.join().unwrap(), (FbOk, 1), "the device ends after the query");
    });
    door.with(|_| panic!("the device is gone"));
}

#[test]
fn streams_run_in_the_requested_order() {
    let device = make_device(&FbDeviceConfig { kind: FB_DEVICE_HOST_THREADS, ..sized() });
    let (open, gate) = mpsc::channel();
    let data = (gate, AtomicU32::new(0));
    let held = (&raw const data).cast_mut().cast();
    let mut other = null_mut();
    let seen = Seen { calls: &raw const data.1, at: AtomicU32::new(99) };
    // SAFETY: what the calls are given outlives the device.
    unsafe {
        assert_eq!(fb_stream_create(device, &raw mut other), FbOk);
        assert_eq!(fb_stream_call(device, null_mut(), Some(wait), held), FbOk);
        assert_eq!(fb_stream_order(device, null_mut(), other), FbOk);
        // The other stream waits for the gate, but no thread waits here.
        assert_eq!(fb_stream_call(device, other, Some(see), (&raw const seen).cast_mut().cast()), FbOk);
        open.send(()).unwrap();
        assert_eq!(fb_stream_wait(device, other), FbOk);
        assert_eq!(seen.at.load(Ordering::Relaxed), 1, "after the first stream's work");
        let unknown = held;
        assert_eq!(fb_stream_order(device, unknown, other), FbOutOfRange);
        assert_eq!(fb_stream_order(device, other, unknown), FbOutOfRange);
        assert_eq!(fb_stream_order(device, other, other), FbOk);
        assert_eq!(fb_stream_order(null(), other, other), FbInvalidConfig);
        assert_eq!(fb_device_destroy(device), FbOk);
    }
}

/// The value of a counter when the callback read it.
struct Seen {
    calls: *const AtomicU32,
    at: AtomicU32,
}

/// # Safety
/// `data` is a `Seen` that outlives the device.
unsafe extern "C" fn see(data: *mut c_void) {
    // SAFETY: the same contract.
    unsafe {
        let seen = &*data.cast::<Seen>();
        seen.at.store((*seen.calls).load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[test]
fn allocated_memory_is_zero_and_separate() {
    let device = host();
    let mut addresses = [null_mut(); 2];
    // SAFETY: all pointers are valid, and the memory is as long as it was asked for.
    unsafe {
        for address in &mut addresses {
            assert_eq!(fb_device_allocate(device, 100, address), FbOk);
            let bytes = std::slice::from_raw_parts_mut(address.cast::<u8>(), 100);
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(9);
        }
        assert_eq!(fb_device_destroy(device), FbOk);
    }
}

/// Counts its calls.
///
/// # Safety
/// `data` is a counter that outlives the device.
unsafe extern "C" fn count(data: *mut c_void) {
    // SAFETY: the same contract.
    unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
}

/// Waits for a word, then counts.
///
/// # Safety
/// `data` is a gate and a counter that outlive the device.
unsafe extern "C" fn wait(data: *mut c_void) {
    // SAFETY: the same contract.
    let (gate, calls) = unsafe { &*data.cast::<(mpsc::Receiver<()>, AtomicU32)>() };
    gate.recv().unwrap();
    calls.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn work_on_the_inline_device_runs_in_its_call() {
    let device = host();
    let calls = AtomicU32::new(0);
    let data = (&raw const calls).cast_mut().cast();
    let mut stream = null_mut();
    // SAFETY: the counter outlives the device.
    unsafe {
        assert_eq!(fb_stream_create(device, &raw mut stream), FbOk);
        assert!(!stream.is_null());
        for stream in [null_mut(), stream] {
            assert_eq!(fb_stream_call(device, stream, Some(count), data), FbOk);
            assert_eq!(fb_stream_wait(device, stream), FbOk);
        }
        assert_eq!(calls.load(Ordering::Relaxed), 2);
        let unknown = data;
        assert_eq!(fb_stream_call(device, unknown, Some(count), data), FbOutOfRange);
        assert_eq!(fb_stream_wait(device, unknown), FbOutOfRange);
        assert_eq!(fb_stream_call(device, null_mut(), None, data), FbInvalidConfig);
        let mut mark = 0;
        assert_eq!(fb_stream_mark(device, unknown, &raw mut mark), FbOutOfRange);
        assert_eq!(fb_stream_mark(device, null_mut(), null_mut()), FbInvalidConfig);
        assert_eq!(mark, 0);
        assert_eq!(fb_stream_mark(device, stream, &raw mut mark), FbOk);
        assert_eq!(mark, 1);
        assert_eq!(fb_stream_create(device, null_mut()), FbInvalidConfig);
        assert_eq!(fb_stream_borrow(device, stream), FbUnsupported);
        assert_eq!(fb_stream_return(device, stream), FbUnsupported);
        assert!(text_of(device).contains("fb_stream_create"), "{}", text_of(device));
        assert_eq!(calls.load(Ordering::Relaxed), 2);
        assert_eq!(fb_device_destroy(device), FbOk);
    }
}

#[test]
fn a_stream_with_its_own_thread_is_waited_for() {
    let device = make_device(&FbDeviceConfig { kind: FB_DEVICE_HOST_THREADS, ..sized() });
    let (open, gate) = mpsc::channel();
    let data = (gate, AtomicU32::new(0));
    let held = (&raw const data).cast_mut().cast();
    let calls = (&raw const data.1).cast_mut().cast();
    let mut other = null_mut();
    // SAFETY: the counter outlives the device.
    unsafe {
        assert_eq!(fb_stream_create(device, &raw mut other), FbOk);
        assert_eq!(fb_stream_call(device, null_mut(), Some(wait), held), FbOk);
        assert_eq!(fb_stream_call(device, other, Some(count), calls), FbOk);
        // The other stream does not wait for the first, which still waits for its word.
        assert_eq!(fb_stream_wait(device, other), FbOk);
        assert_eq!(data.1.load(Ordering::Relaxed), 1);
        open.send(()).unwrap();
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);
        assert_eq!(data.1.load(Ordering::Relaxed), 2);
        // Work enqueued before the end of the device still runs.
        assert_eq!(fb_stream_call(device, other, Some(count), calls), FbOk);
        assert_eq!(fb_device_destroy(device), FbOk);
        assert_eq!(data.1.load(Ordering::Relaxed), 3);
    }
}

#[test]
fn a_mark_is_written_behind_the_work_before_it() {
    let device = make_device(&FbDeviceConfig { kind: FB_DEVICE_HOST_THREADS, ..sized() });
    let (open, gate) = mpsc::channel();
    let data = (gate, AtomicU32::new(0));
    let held = (&raw const data).cast_mut().cast();
    let marks = [const { AtomicU32::new(0) }; 2];
    let mut other = null_mut();
    // SAFETY: gate and marks outlive the device.
    unsafe {
        assert_eq!(fb_stream_create(device, &raw mut other), FbOk);
        assert_eq!(fb_stream_call(device, null_mut(), Some(wait), held), FbOk);
        for (mark, stream) in marks.iter().zip([null_mut(), other]) {
            assert_eq!(fb_stream_mark(device, stream, mark.as_ptr()), FbOk);
        }
        assert_eq!(fb_stream_wait(device, other), FbOk);
        // The control: on the other stream nothing is before it.
        assert_eq!(marks.each_ref().map(|mark| mark.load(Ordering::Acquire)), [0, 1]);
        open.send(()).unwrap();
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);
        assert_eq!(marks.each_ref().map(|mark| mark.load(Ordering::Acquire)), [1, 1]);
        assert_eq!(fb_device_destroy(device), FbOk);
    }
}
