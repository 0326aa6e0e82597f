//! Captures: which calls become nodes, and what each violation returns, at once and later.

use crate::support::{GLOBAL, Gpu, NON_BLOCKING, RELAXED, THREAD_LOCAL, code, made, standin};
use forebay_standin::Options;

const UNSUPPORTED: i32 = 900;
const INVALIDATED: i32 = 901;

fn begin(gpu: &Gpu<'_>, stream: u64, mode: i32) {
    assert_eq!(code!(gpu, stream_begin_capture(stream, mode)), 0);
}

/// Returns the code of the end of a capture, and whether a graph came out of it.
fn end(gpu: &Gpu<'_>, stream: u64) -> (i32, u64) {
    let mut graph = 1;
    let code = code!(gpu, stream_end_capture(stream, &mut graph));
    (code, graph)
}

fn status(gpu: &Gpu<'_>, stream: u64) -> i32 {
    let mut status = 0;
    assert_eq!(code!(gpu, stream_is_capturing(stream, &mut status)), 0);
    status
}

#[test]
fn captured_work_does_not_run_until_its_graph_is_launched() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory) = (gpu.stream(), gpu.memory(4096));
    gpu.fill(memory, 0, 1, stream);
    begin(&gpu, stream, GLOBAL);
    gpu.fill(memory, 3, 1, stream);
    assert_eq!(status(&gpu, stream), 1);
    let (code, graph) = end(&gpu, stream);
    assert_eq!((code, gpu.word(memory), status(&gpu, stream)), (0, 0, 0));
    let mut nodes = 0;
    assert_eq!(code!(gpu, graph_get_nodes(graph, std::ptr::null_mut(), &mut nodes)), 0);
    assert_eq!(nodes, 1);
    let exec = made!(gpu, graph_instantiate(graph, 0));
    assert_eq!(code!(gpu, graph_destroy(graph)), 0);
    assert_eq!(code!(gpu, graph_launch(exec, stream)), 0);
    assert_eq!(gpu.word(memory), 3);
}

/// Runs `wrong` in a capture of mode `mode`. Returns its code, and checks that the capture is invalid from then on.
fn breaks(mode: i32, expected: i32, wrong: impl Fn(&Gpu<'_>, u64, u64) -> i32) {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory) = (gpu.stream(), gpu.memory(4096));
    begin(&gpu, stream, mode);
    gpu.fill(memory, 3, 1, stream);
    assert_eq!(wrong(&gpu, stream, memory), expected);
    assert_eq!(status(&gpu, stream), 2);
    assert_eq!(code!(gpu, memset_d32_async(memory, 3, 1, stream)), INVALIDATED);
    assert_eq!(code!(gpu, memcpy_async(memory, memory + 512, 4, stream)), INVALIDATED);
    let event = gpu.event();
    assert_eq!(code!(gpu, event_record(event, stream)), INVALIDATED);
    assert_eq!(code!(gpu, stream_query(stream)), INVALIDATED);
    assert_eq!(end(&gpu, stream), (INVALIDATED, 0));
    // The stream works outside a capture again.
    gpu.fill(memory, 4, 1, stream);
    assert_eq!(gpu.word(memory), 4);
}

#[test]
fn a_synchronisation_breaks_a_capture() {
    for mode in [GLOBAL, THREAD_LOCAL] {
        breaks(mode, UNSUPPORTED, |gpu, stream, _| code!(gpu, stream_synchronize(stream)));
        breaks(mode, UNSUPPORTED, |gpu, stream, _| code!(gpu, stream_query(stream)));
        breaks(mode, UNSUPPORTED, |gpu, _, _| code!(gpu, ctx_synchronize()));
        breaks(mode, UNSUPPORTED, |gpu, _, _| {
            let other = gpu.stream();
            code!(gpu, stream_synchronize(other))
        });
        breaks(mode, UNSUPPORTED, |gpu, _, _| {
            let uncaptured = gpu.event();
            code!(gpu, event_query(uncaptured))
        });
    }
    breaks(RELAXED, UNSUPPORTED, |gpu, stream, _| code!(gpu, stream_synchronize(stream)));
}

#[test]
fn a_memory_call_breaks_a_capture_that_is_not_relaxed() {
    breaks(GLOBAL, UNSUPPORTED, |gpu, _, memory| code!(gpu, mem_free(memory)));
    breaks(THREAD_LOCAL, UNSUPPORTED, |gpu, _, _| {
        let mut address = 0;
        code!(gpu, mem_alloc(&mut address, 4096))
    });
    breaks(GLOBAL, UNSUPPORTED, |gpu, _, _| {
        let mut address = 0;
        code!(gpu, mem_address_reserve(&mut address, 2 << 20, 0, 0, 0))
    });
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let stream = gpu.stream();
    begin(&gpu, stream, RELAXED);
    gpu.memory(4096);
    assert_eq!(end(&gpu, stream).0, 0);
}

#[test]
fn another_thread_is_stopped_by_global_captures_unless_it_is_relaxed() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let stream = gpu.stream();
    let elsewhere = |mode: i32| {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                assert_eq!(code!(gpu, ctx_set_current(gpu.context)), 0);
                let (mut mode, mut address) = (mode, 0);
                assert_eq!(code!(gpu, exchange_capture_mode(&mut mode)), 0);
                code!(gpu, mem_alloc(&mut address, 4096))
            });
            other.join().unwrap()
        })
    };
    begin(&gpu, stream, THREAD_LOCAL);
    assert_eq!(elsewhere(GLOBAL), 0);
    assert_eq!(end(&gpu, stream).0, 0);
    begin(&gpu, stream, GLOBAL);
    assert_eq!((elsewhere(RELAXED), elsewhere(THREAD_LOCAL)), (0, 0));
    assert_eq!(elsewhere(GLOBAL), UNSUPPORTED);
    assert_eq!(end(&gpu, stream).0, INVALIDATED);
}

#[test]
fn the_batched_copy_returns_900_and_is_not_captured() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory) = (gpu.stream(), gpu.memory(4096));
    gpu.fill(memory, 5, 1024, stream);
    let (mut to, mut from, mut bytes) = ([memory + 512], [memory], [4]);
    // The source in the stream's order.
    let (mut attributes, mut indices, mut failed) = ([1u64, 0, 0], [0], 0);
    let mut batch = || {
        code!(
            gpu,
            memcpy_batch_async(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                1,
                attributes.as_mut_ptr().cast(),
                indices.as_mut_ptr(),
                1,
                &mut failed,
                stream
            )
        )
    };
    assert_eq!(batch(), 0);
    begin(&gpu, stream, GLOBAL);
    gpu.fill(memory, 3, 1, stream);
    assert_eq!(batch(), UNSUPPORTED);
    gpu.fill(memory, 4, 1, stream);
    let (code, graph) = end(&gpu, stream);
    let mut nodes = 0;
    assert_eq!(code!(gpu, graph_get_nodes(graph, std::ptr::null_mut(), &mut nodes)), 0);
    assert_eq!((code, nodes), (0, 2));
}

#[test]
fn a_stream_that_is_not_joined_back_is_reported_at_the_end() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, branch, fork, join) = (gpu.stream(), gpu.stream(), gpu.event(), gpu.event());
    let memory = gpu.memory(4096);
    let forked = || {
        begin(&gpu, stream, GLOBAL);
        gpu.record(fork, stream);
        gpu.wait(branch, fork);
    };
    forked();
    gpu.fill(memory, 3, 1, branch);
    assert_eq!(status(&gpu, branch), 1);
    assert_eq!(end(&gpu, stream), (904, 0));
    assert_eq!(status(&gpu, branch), 0);
    forked();
    gpu.fill(memory, 3, 1, branch);
    gpu.record(join, branch);
    gpu.fill(memory, 4, 1, branch);
    gpu.wait(stream, join);
    assert_eq!(end(&gpu, stream), (904, 0), "the second fill came after the record");
    forked();
    assert_eq!(end(&gpu, stream).0, 0, "nothing was enqueued on the branch");
}

#[test]
fn a_capture_does_not_wait_for_work_outside() {
    breaks(GLOBAL, 905, |gpu, stream, _| {
        let (outside, event) = (gpu.stream(), gpu.event());
        gpu.record(event, outside);
        code!(gpu, stream_wait_event(stream, event, 0))
    });
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, event) = (gpu.stream(), gpu.event());
    gpu.exec(stream, || gpu.record(event, stream));
    assert_eq!(code!(gpu, stream_wait_event(stream, event, 0)), 905, "captured work is none to wait for");
    gpu.record(event, stream);
    gpu.wait(stream, event);
    assert_eq!(code!(gpu, event_query(event)), 0, "recorded outside, it is an event again");
}

#[test]
fn a_captured_event_cannot_be_queried() {
    breaks(RELAXED, 907, |gpu, stream, _| {
        let event = gpu.event();
        gpu.record(event, stream);
        code!(gpu, event_query(event))
    });
    breaks(GLOBAL, 907, |gpu, stream, _| {
        let event = gpu.event();
        gpu.record(event, stream);
        code!(gpu, event_synchronize(event))
    });
}

#[test]
fn the_legacy_stream_breaks_captures_of_blocking_streams_only() {
    for (flags, code) in [(0, 906), (NON_BLOCKING, 0)] {
        let Some(standin) = standin(Options::default()) else { return };
        let gpu = Gpu::new(&standin);
        let (stream, memory) = (made!(gpu, stream_create(flags)), gpu.memory(4096));
        begin(&gpu, stream, GLOBAL);
        assert_eq!(code!(gpu, memset_d32_async(memory, 3, 1, 0)), code);
        assert_eq!(end(&gpu, stream).0, if code == 0 { 0 } else { INVALIDATED });
    }
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    assert_eq!(code!(gpu, stream_begin_capture(0, GLOBAL)), UNSUPPORTED);
}

#[test]
fn a_capture_ends_where_and_by_whom_it_began() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, branch, fork) = (gpu.stream(), gpu.stream(), gpu.event());
    assert_eq!(end(&gpu, stream).0, 401);
    begin(&gpu, stream, GLOBAL);
    assert_eq!(code!(gpu, stream_begin_capture(stream, GLOBAL)), 401);
    let elsewhere = || {
        assert_eq!(code!(gpu, ctx_set_current(gpu.context)), 0);
        end(&gpu, stream).0
    };
    assert_eq!(std::thread::scope(|scope| scope.spawn(elsewhere).join().unwrap()), 908);
    assert_eq!(end(&gpu, stream).0, 0);
    begin(&gpu, stream, RELAXED);
    assert_eq!(std::thread::scope(|scope| scope.spawn(elsewhere).join().unwrap()), 0);
    begin(&gpu, stream, GLOBAL);
    gpu.record(fork, stream);
    gpu.wait(branch, fork);
    assert_eq!(end(&gpu, branch).0, 903);
    assert_eq!(end(&gpu, stream).0, INVALIDATED);
}

#[test]
fn two_captures_do_not_merge() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (first, second, event) = (gpu.stream(), gpu.stream(), gpu.event());
    begin(&gpu, first, RELAXED);
    begin(&gpu, second, RELAXED);
    gpu.record(event, first);
    assert_eq!(code!(gpu, stream_wait_event(second, event, 0)), 902);
    assert_eq!((end(&gpu, first).0, end(&gpu, second).0), (INVALIDATED, INVALIDATED));
}

#[test]
fn external_events_may_be_nodes_of_a_graph() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, outside) = (gpu.stream(), gpu.stream());
    let (before, after) = (gpu.event(), gpu.event());
    let memory = gpu.memory(4096);
    gpu.fill(memory, 0, 1, stream);
    let exec = gpu.exec(stream, || {
        assert_eq!(code!(gpu, stream_wait_event(stream, before, 1)), 0);
        gpu.fill(memory, 3, 1, stream);
        assert_eq!(code!(gpu, event_record_with_flags(after, stream, 1)), 0);
    });
    standin.hold(outside);
    gpu.record(before, outside);
    assert_eq!(code!(gpu, graph_launch(exec, stream)), 0);
    assert_eq!((gpu.word(memory), code!(gpu, event_query(after))), (0, 600));
    standin.let_go(outside);
    assert_eq!((gpu.word(memory), code!(gpu, event_query(after))), (3, 0));
    assert_eq!(
        code!(gpu, stream_wait_event(stream, before, 1)),
        1,
        "outside a capture there is no such wait"
    );
}

#[test]
fn pageable_memory_is_not_captured_and_blocks_outside() {
    breaks(RELAXED, UNSUPPORTED, |gpu, stream, memory| {
        let word = 1u32;
        code!(gpu, memcpy_async(memory, (&raw const word) as u64, 4, stream))
    });
    let Some(standin) = standin(Options { seed: Some(1), ..Options::default() }) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory, word) = (gpu.stream(), gpu.memory(4096), 7u32);
    let before = standin.synchronizations();
    gpu.copy(memory, (&raw const word) as u64, 4, stream);
    assert_eq!((gpu.word(memory), standin.synchronizations()), (7, before + 1));
}

#[test]
fn a_handle_of_a_conditional_node_is_destroyed_with_its_graph_and_needs_its_node() {
    for conditional_nodes in [true, false] {
        let Some(standin) = standin(Options { conditional_nodes, ..Options::default() }) else { return };
        let gpu = Gpu::new(&standin);
        let graph = made!(gpu, graph_create(0));
        let (mut handle, mut exec) = (0, 0);
        let made = code!(gpu, graph_conditional_handle_create(&mut handle, graph, gpu.context, 0, 0));
        assert_eq!(made, if conditional_nodes { 0 } else { 801 });
        assert_eq!(code!(gpu, graph_conditional_handle_create(&mut handle, 7, gpu.context, 0, 0)), 1);
        // A handle without its node makes a graph that cannot be launched.
        let made = code!(gpu, graph_instantiate(&mut exec, graph, 0));
        assert_eq!(made, i32::from(conditional_nodes));
        assert_eq!(code!(gpu, graph_destroy(graph)), 0);
    }
}
