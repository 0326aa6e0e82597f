//! Tests of a process that forks inside a callback and continues in the child.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay::weights::{Pull, Ring, RingOptions, Wrap};

use super::*;
use crate::choice::FB_OVERLAP_NONE;
use crate::overlap::*;

/// The plan of a callback: it forks before its first preparation, and returns this status in the child.
struct Forks {
    child: i32,
    answer: u32,
    /// The place of the new row. The child shares the slabs here, so its engine can write another row.
    landing: *mut u8,
    /// The row in the total pool, which parent and child share.
    stored: *const u8,
    /// The child's exit status, and the content of the total pool afterwards.
    state: i32,
    left: u8,
    /// The child reuses the places of its parent's handles.
    gives: bool,
}

/// # Safety
/// `data` is a `Forks` that nothing else uses, `call` the library's.
unsafe extern "C" fn forks(data: *mut c_void, call: *const FbEngineCall, _stream: *mut c_void) -> u32 {
    // SAFETY: the same contract; a slot has a row's bytes.
    unsafe {
        let (forks, call) = (&mut *data.cast::<Forks>(), &*call);
        if call.work != FB_WORK_PREPARE || forks.child >= 0 {
            return 0;
        }
        forks.child = libc::fork();
        if forks.child != 0 {
            libc::waitpid(forks.child, &raw mut forks.state, 0);
            forks.left = forks.stored.read();
            forks.landing.write_bytes(0xAA, ROW as usize);
            return 0;
        }
        if forks.gives {
            let (mut device, config) = (null_mut(), sized());
            fb_device_create(&raw const config, null_mut(), 0, &raw mut device);
        }
        forks.landing.write_bytes(0xCC, ROW as usize);
        forks.answer
    }
}

/// Where a row of layer 0 is in the total pool.
fn stored_row(cache: *const FbCache, sequence: u64, position: u32) -> *const u8 {
    let (mut pages, mut count) = ([FbPage { host: 0, index_keys: 0 }; 4], 0);
    let (mut rows, mut bytes, mut info) = (null_mut(), 0, sized::<FbInfo>());
    // SAFETY: all pointers are valid and as long as stated; the row is inside the rows that `fb_rows` returns.
    unsafe {
        assert_eq!(fb_pages(cache, sequence, pages.as_mut_ptr(), 4, &raw mut count), FbOk);
        assert_eq!(fb_rows(cache, 0, &raw mut rows, &raw mut bytes), FbOk);
        assert_eq!(fb_cache_info(cache, &raw mut info), FbOk);
        let row = pages[(position / PAGE) as usize].host * PAGE + position % PAGE;
        rows.cast::<u8>().add((row * info.host_stride) as usize)
    }
}

/// One layer whose callback forks; in the child the call must return FB_CLOSED, and do nothing more.
fn overlap_in_a_child(answer: u32, gives: bool) {
    let device = host();
    let cache = make_cache(device, &declared());
    let sequence = join(cache, 20, 10);
    let row = FbBatchRow { sequence, accepted: 0, query_rows: 1 };
    let config = FbStepConfig { rows: &raw const row, row_count: 1, query_rows: 1, ..sized() };
    let (mut step, mut landing, mut slab, mut bytes) = (0, 0, null_mut(), 0);
    let (selection, mut slots) = ([0, -1, -1, -1], [-7; TOP_K as usize]);
    // SAFETY: all pointers are valid and as long as stated; the inline stream has passed each call when it returns.
    unsafe {
        assert_eq!(fb_landing_slot(cache, sequence, 0, &raw mut landing), FbOk);
        assert_eq!(fb_slab(cache, 0, &raw mut slab, &raw mut bytes), FbOk);
        let landing = slab.cast::<u8>().add((landing * ROW) as usize);
        let stored = stored_row(cache, sequence, 20);
        let before = stored.read();
        let mut data = Forks { child: -1, answer, landing, stored, state: -1, left: 99, gives };
        let engine = FbEngine { enqueue: Some(forks), data: (&raw mut data).cast(), ..sized() };
        let layers = FbOverlapConfig { selection: selection.as_ptr(), slots: slots.as_mut_ptr(), ..sized() };
        assert_eq!(fb_prepare(cache, &raw const config, null_mut(), &raw mut step), FbOk);
        let parent = std::process::id();
        let ended = fb_overlap(cache, step, 0, 0, FB_OVERLAP_NONE, &raw const layers, &raw const engine);
        if std::process::id() != parent {
            let closed = ended == FbClosed && fb_finish(cache, step, null_mut()) == FbClosed;
            libc::_exit(i32::from(!closed));
        }
        assert_eq!((data.state, data.left), (0, before), "the child got an error, and stored nothing");
        assert_eq!(ended, FbOk, "{}", text_of(cache));
        assert_eq!(fb_layer(cache, step, 1, selection.as_ptr(), slots.as_mut_ptr(), null_mut()), FbOk);
        assert_eq!(fb_scatter(cache, step, 1, null_mut()), FbOk);
        assert_eq!(fb_finish(cache, step, null_mut()), FbOk);
        assert_eq!(fb_retire(cache, &raw mut step, null_mut(), null_mut()), FbOk);
    }
    assert_eq!(read_row(cache, sequence, 0, 20), [0xAA; ROW as usize], "the parent's row");
    close(cache, sequence);
    destroy(cache, device);
}

#[test]
fn a_child_forked_inside_a_callback_gets_an_error_and_the_step_ends() {
    for answer in [0, 1, FbIo as u32, 77] {
        overlap_in_a_child(answer, false);
        overlap_in_a_child(answer, true);
    }
}

/// # Safety
/// `data` has room for a word.
unsafe extern "C" fn fork_and_return(data: *mut c_void) {
    // SAFETY: the child leaves by `_exit` after the call.
    let child = unsafe { libc::fork() };
    if child != 0 {
        let mut state = 0;
        // SAFETY: the child made above; `data` has room for the answer.
        unsafe {
            libc::waitpid(child, &raw mut state, 0);
            data.cast::<i32>().write(state);
        }
    }
}

#[test]
fn a_child_forked_inside_a_streams_work_gets_an_error() {
    let device = host();
    let (mut state, parent) = (-1, std::process::id());
    // SAFETY: the output has room until the work has run, which is in the call.
    let ended = unsafe { fb_stream_call(device, null_mut(), Some(fork_and_return), (&raw mut state).cast()) };
    if std::process::id() != parent {
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(ended != FbClosed)) };
    }
    assert_eq!((ended, state), (FbOk, 0));
    // SAFETY: no call is running.
    assert_eq!(unsafe { fb_device_destroy(device) }, FbOk);
}

/// Two layers that take turns in one buffer. Counts the pulls.
struct Turns(AtomicU32);

impl Pull for Turns {
    fn rank(&self) -> u32 {
        0
    }

    fn layers(&self) -> usize {
        2
    }

    fn buffer(&self, _layer: usize) -> Option<usize> {
        Some(0)
    }

    fn copies(&self, _layer: usize) -> forebay::Result<usize> {
        Ok(1)
    }

    fn pull_some(&self, _layer: usize, _stream: Stream, _copies: Range<usize>) -> forebay::Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn is_whole(&self, _layer: usize) -> bool {
        false
    }

    fn reads(&self, _layer: usize, _rank: u32) -> bool {
        false
    }
}

/// Launches a step; its callback forks if it is told to. Returns the pulls behind the callback, in the parent.
fn pulls_behind_a_launch(forks: bool) -> u32 {
    let device: Arc<dyn Device> = HostDevice::new(HostOptions::default());
    let turns = Turns(AtomicU32::new(0));
    let options =
        RingOptions { draft_layers: 0, micro_batches: 1, parts: 1, wrap: Wrap::Behind, prefetch: None };
    let mut ring = Ring::new(&device, &turns, options).unwrap();
    let stream = device.stream().unwrap();
    let (mut state, mut before, parent) = (0, 0, std::process::id());
    let result = ring.launch(stream, || {
        before = turns.0.load(Ordering::Relaxed);
        if forks {
            // SAFETY: room for the state. The child leaves by `_exit` behind the launch.
            unsafe { fork_and_return((&raw mut state).cast()) };
        }
        Ok(())
    });
    let pulls = turns.0.load(Ordering::Relaxed) - before;
    if std::process::id() != parent {
        let is_silent = pulls == 0 && result.is_err_and(|error| error.kind() == forebay::Kind::Closed);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!is_silent)) };
    }
    assert_eq!((result, state), (Ok(()), 0), "the parent's result, and whether the child was silent");
    pulls
}

/// The child has no device: there the launch enqueues nothing behind its callback. The parent pulls.
#[test]
fn a_launch_enqueues_nothing_behind_it_in_a_forked_child() {
    assert_eq!([false, true].map(pulls_behind_a_launch), [1, 1]);
}
