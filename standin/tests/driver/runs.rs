//! What runs, and when: without a seed at once; with one late and in an order that the seed picks.

use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use crate::support::{Add, Gpu, code, made, seeded, standin};
use forebay_standin::{Calls, Options};

/// The number of seeds within which a missing edge must show.
const SEEDS: u64 = 40;

#[test]
fn without_a_seed_everything_runs_when_it_is_enqueued() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory) = (gpu.stream(), gpu.memory(4096));
    gpu.fill(memory, 7, 1024, stream);
    assert_eq!((gpu.word(memory), gpu.word(memory + 4092)), (7, 7));
    let module = gpu.module();
    let args = Add { to: memory, from: memory, count: 1000, value: 5 };
    assert_eq!(gpu.add(gpu.function(module), args, stream), 0);
    assert_eq!((gpu.word(memory + 4 * 999), gpu.word(memory + 4 * 1000)), (12, 7));
    assert_eq!(standin.operations(), 2);
    assert_eq!(code!(gpu, stream_query(stream)), 0);
}

#[test]
fn with_a_seed_nothing_has_to_run_before_a_call_looks() {
    let mut late = 0;
    for seed in 0..20 {
        let Some(standin) = standin(seeded(seed)) else { return };
        let gpu = Gpu::new(&standin);
        let (stream, memory) = (gpu.stream(), gpu.memory(4096));
        gpu.fill(memory, 7, 1024, stream);
        late += u32::from(gpu.word(memory) != 7);
        assert_eq!(code!(gpu, stream_synchronize(stream)), 0);
        assert_eq!(gpu.word(memory), 7);
    }
    assert!(late > 10, "{late} of 20");
}

/// One stream fills, another waits and then copies. Returns what the copy read.
fn fill_then_copy(gpu: &Gpu<'_>) -> u32 {
    let (first, second, event) = (gpu.stream(), gpu.stream(), gpu.event());
    let memory = gpu.memory(4096);
    gpu.fill(memory, 1, 1, first);
    gpu.record(event, first);
    gpu.wait(second, event);
    gpu.copy(memory + 512, memory, 4, second);
    assert_eq!(code!(gpu, ctx_synchronize()), 0);
    gpu.word(memory + 512)
}

#[test]
fn an_edge_orders_two_streams_and_its_absence_shows() {
    let mut wrong = 0;
    for seed in 0..SEEDS {
        let Some(standin) = standin(seeded(seed)) else { return };
        let gpu = Gpu::new(&standin);
        assert_eq!(fill_then_copy(&gpu), 1, "seed {seed}");
        assert_eq!(standin.waits(), 1);
        standin.without_waits(1..2);
        wrong += u32::from(fill_then_copy(&gpu) != 1);
        assert_eq!(standin.waits(), 2);
    }
    assert!(wrong > 0);
}

/// The same in a graph of two branches; `event` joins the first one.
fn branches(gpu: &Gpu<'_>) -> u32 {
    let (first, second) = (gpu.stream(), gpu.stream());
    let (fork, join) = (gpu.event(), gpu.event());
    let memory = gpu.memory(4096);
    let exec = gpu.exec(first, || {
        gpu.record(fork, first);
        gpu.wait(second, fork);
        gpu.fill(memory, 1, 1, second);
        gpu.record(join, second);
        gpu.wait(first, join);
        gpu.copy(memory + 512, memory, 4, first);
    });
    assert_eq!(code!(gpu, graph_launch(exec, first)), 0);
    assert_eq!(code!(gpu, stream_synchronize(first)), 0);
    gpu.word(memory + 512)
}

#[test]
fn an_edge_orders_the_nodes_of_a_graph_and_its_absence_shows() {
    let mut wrong = 0;
    for seed in 0..SEEDS {
        let Some(standin) = standin(seeded(seed)) else { return };
        let gpu = Gpu::new(&standin);
        assert_eq!(branches(&gpu), 1, "seed {seed}");
        standin.without_waits(3..4);
        wrong += u32::from(branches(&gpu) != 1);
    }
    assert!(wrong > 0);
}

#[test]
fn a_node_comes_after_all_that_its_stream_waited_for() {
    for seed in 0..SEEDS {
        let Some(standin) = standin(seeded(seed)) else { return };
        let gpu = Gpu::new(&standin);
        let (origin, memory, fork) = (gpu.stream(), gpu.memory(4096), gpu.event());
        let exec = gpu.exec(origin, || {
            gpu.record(fork, origin);
            for branch in 0..3 {
                let (stream, join) = (gpu.stream(), gpu.event());
                gpu.wait(stream, fork);
                gpu.fill(memory + 4 * branch, 1, 1, stream);
                gpu.record(join, stream);
                gpu.wait(origin, join);
            }
            gpu.copy(memory + 512, memory, 12, origin);
        });
        assert_eq!(code!(gpu, graph_launch(exec, origin)), 0);
        assert_eq!(code!(gpu, stream_synchronize(origin)), 0);
        assert_eq!([0, 4, 8].map(|word| gpu.word(memory + 512 + word)), [1; 3], "seed {seed}");
    }
}

#[test]
fn a_fork_whose_edge_is_left_out_is_still_captured() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    standin.without_waits(0..1);
    assert_eq!(branches(&gpu), 1);
    assert_eq!(standin.operations(), 2);
}

#[test]
fn nodes_of_a_graph_run_between_the_work_of_other_streams() {
    let mut between = 0;
    for seed in 0..SEEDS {
        let Some(standin) = standin(seeded(seed)) else { return };
        let gpu = Gpu::new(&standin);
        let (first, second) = (gpu.stream(), gpu.stream());
        let memory = gpu.memory(4096);
        let exec = gpu.exec(first, || {
            gpu.fill(memory, 1, 1, first);
            gpu.fill(memory + 4, 1, 1, first);
        });
        assert_eq!(code!(gpu, graph_launch(exec, first)), 0);
        gpu.copy(memory + 512, memory, 8, second);
        assert_eq!(code!(gpu, ctx_synchronize()), 0);
        between += u32::from(gpu.word(memory + 512) == 1 && gpu.word(memory + 516) != 1);
    }
    assert!(between > 0);
}

#[test]
fn launches_of_one_graph_run_one_after_the_other_also_in_two_streams() {
    for seed in 0..SEEDS {
        let Some(standin) = standin(seeded(seed)) else { return };
        let gpu = Gpu::new(&standin);
        let (first, second) = (gpu.stream(), gpu.stream());
        let memory = gpu.memory(4096);
        let function = gpu.function(gpu.module());
        gpu.fill(memory, 0, 2, first);
        assert_eq!(code!(gpu, stream_synchronize(first)), 0);
        // Adds one to a word by way of another word: two launches that mix lose an increment.
        let exec = gpu.exec(first, || {
            assert_eq!(gpu.add(function, Add { to: memory + 4, from: memory, count: 1, value: 1 }, first), 0);
            gpu.copy(memory, memory + 4, 4, first);
        });
        for launch in 0..6 {
            assert_eq!(code!(gpu, graph_launch(exec, if launch % 2 == 0 { first } else { second })), 0);
        }
        assert_eq!(code!(gpu, ctx_synchronize()), 0);
        assert_eq!(gpu.word(memory), 6, "seed {seed}");
    }
}

#[test]
fn the_same_seed_runs_the_same_order() {
    let order = |seed| {
        let standin = standin(seeded(seed))?;
        let gpu = Gpu::new(&standin);
        let memory = gpu.memory(4096);
        let streams: Vec<u64> = (0..4).map(|_| gpu.stream()).collect();
        let mut seen = Vec::new();
        for turn in 0..40 {
            gpu.fill(memory, turn, 1, streams[turn as usize % 4]);
            let asked = code!(gpu, stream_query(streams[0]));
            assert!(asked == 0 || asked == 600);
            seen.push(gpu.word(memory));
        }
        Some(seen)
    };
    let Some(first) = order(3) else { return };
    assert_eq!(order(3), Some(first.clone()));
    assert_ne!(order(4), Some(first));
}

#[test]
fn a_wait_means_the_last_record_before_it() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (held, second, event) = (gpu.stream(), gpu.stream(), gpu.event());
    let memory = gpu.memory(4096);
    gpu.fill(memory, 0, 8, second);
    assert_eq!(code!(gpu, event_query(event)), 0, "never recorded");
    gpu.wait(second, event);
    gpu.record(event, second);
    gpu.wait(second, event);
    standin.hold(held);
    gpu.record(event, held);
    gpu.fill(memory, 1, 1, second);
    assert_eq!(gpu.word(memory), 1, "the wait came before that record");
    assert_eq!(code!(gpu, event_query(event)), 600);
    gpu.wait(second, event);
    gpu.fill(memory, 2, 1, second);
    assert_eq!(gpu.word(memory), 1);
    standin.let_go(held);
    assert_eq!(gpu.word(memory), 2);
}

#[test]
fn waiting_for_work_that_cannot_run_is_an_error_and_not_a_hang() {
    for seed in [None, Some(1)] {
        let Some(standin) = standin(Options { seed, ..Options::default() }) else { return };
        let gpu = Gpu::new(&standin);
        let (held, other, event) = (gpu.stream(), gpu.stream(), gpu.event());
        let memory = gpu.memory(4096);
        standin.hold(held);
        gpu.fill(memory, 1, 1, held);
        gpu.record(event, held);
        gpu.wait(other, event);
        for code in [
            code!(gpu, stream_synchronize(held)),
            code!(gpu, stream_synchronize(other)),
            code!(gpu, event_synchronize(event)),
            code!(gpu, ctx_synchronize()),
            code!(gpu, mem_free(memory)),
        ] {
            assert_eq!(code, 702);
        }
        standin.let_go(held);
        assert_eq!(code!(gpu, mem_free(memory)), 0);
        assert_eq!(code!(gpu, stream_synchronize(other)), 0);
    }
}

#[test]
fn work_of_a_destroyed_stream_still_runs() {
    for hold in [false, true] {
        let Some(standin) = standin(seeded(3)) else { return };
        let gpu = Gpu::new(&standin);
        let (stream, memory) = (gpu.stream(), gpu.memory(4096));
        if hold {
            standin.hold(stream);
        }
        gpu.fill(memory, 1, 1, stream);
        assert_eq!(code!(gpu, stream_destroy(stream)), 0);
        assert_eq!(code!(gpu, memset_d32_async(memory, 2, 1, stream)), 400);
        assert_eq!(code!(gpu, ctx_synchronize()), 0);
        assert_eq!(gpu.word(memory), 1);
        assert_eq!(standin.held_resources().streams, 0);
    }
}

/// What a host function records: how often it ran, and what a driver call in it returned.
struct Seen<'a> {
    api: &'a Calls,
    ran: AtomicU32,
    code: AtomicI32,
}

// SAFETY: declared as the driver calls it, with the data that the test passes.
unsafe extern "C" fn look(data: *mut c_void) {
    // SAFETY: the test passes a `Seen` that outlives the stream's work.
    let seen = unsafe { &*data.cast::<Seen<'_>>() };
    let mut event = 0;
    // SAFETY: a local.
    let code = unsafe { seen.api.event_create(&mut event, 0) };
    seen.code.store(code, Ordering::Relaxed);
    seen.ran.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn host_functions_run_in_order_and_may_not_call_the_driver() {
    let Some(standin) = standin(seeded(5)) else { return };
    let gpu = Gpu::new(&standin);
    let stream = gpu.stream();
    let seen = Seen { api: standin.api(), ran: AtomicU32::new(0), code: AtomicI32::new(0) };
    let data = (&raw const seen).cast_mut().cast::<c_void>();
    assert_eq!(code!(gpu, launch_host_func(stream, look, data)), 0);
    let exec = gpu.exec(stream, || assert_eq!(code!(gpu, launch_host_func(stream, look, data)), 0));
    for _ in 0..3 {
        assert_eq!(code!(gpu, graph_launch(exec, stream)), 0);
    }
    assert_eq!(code!(gpu, stream_synchronize(stream)), 0);
    assert_eq!((seen.ran.into_inner(), seen.code.into_inner()), (4, 800));
}

#[test]
fn arguments_are_those_of_the_launch_and_of_the_capture() {
    let Some(standin) = standin(seeded(1)) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory) = (gpu.stream(), gpu.memory(4096));
    let function = gpu.function(gpu.module());
    gpu.fill(memory, 0, 1, stream);
    let mut args = Box::new(Add { to: memory, from: memory, count: 1, value: 1 });
    let exec = gpu.exec(stream, || {
        assert_eq!(gpu.add(function, Add { ..*args }, stream), 0);
    });
    args.value = 100;
    assert_eq!(gpu.add(function, *args, stream), 0);
    assert_eq!(code!(gpu, graph_launch(exec, stream)), 0);
    assert_eq!(code!(gpu, graph_launch(exec, stream)), 0);
    assert_eq!(code!(gpu, graph_exec_destroy(exec)), 0, "the launched graph still runs");
    assert_eq!(code!(gpu, stream_synchronize(stream)), 0);
    assert_eq!(gpu.word(memory), 102);
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_and_they_for_it() {
    for seed in 0..SEEDS {
        let Some(standin) = standin(seeded(seed)) else { return };
        let gpu = Gpu::new(&standin);
        let blocking = made!(gpu, stream_create(0));
        let memory = gpu.memory(4096);
        for turn in 1..8 {
            gpu.fill(memory, turn, 1, blocking);
            gpu.copy(memory + 512, memory, 4, 0);
            gpu.copy(memory + 512 + 4 * u64::from(turn), memory + 512, 4, blocking);
        }
        assert_eq!(code!(gpu, stream_synchronize(blocking)), 0);
        for turn in 1..8 {
            assert_eq!(gpu.word(memory + 512 + 4 * u64::from(turn)), turn, "seed {seed}");
        }
    }
}

#[test]
fn time_passes_with_operations_between_timed_events() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory) = (gpu.stream(), gpu.memory(4096));
    let (start, end) = (made!(gpu, event_create(0)), made!(gpu, event_create(0)));
    gpu.record(start, stream);
    gpu.fill(memory, 1, 1, stream);
    gpu.record(end, stream);
    let mut milliseconds = 0.0;
    assert_eq!(code!(gpu, event_elapsed_time(&mut milliseconds, start, end)), 0);
    assert!(milliseconds > 0.0);
    let untimed = gpu.event();
    gpu.record(untimed, stream);
    assert_eq!(code!(gpu, event_elapsed_time(&mut milliseconds, start, untimed)), 400);
    let never = made!(gpu, event_create(0));
    assert_eq!(code!(gpu, event_elapsed_time(&mut milliseconds, never, end)), 400);
    gpu.standin.hold(stream);
    gpu.record(end, stream);
    assert_eq!(code!(gpu, event_elapsed_time(&mut milliseconds, start, end)), 600, "not reached yet");
    gpu.standin.let_go(stream);
    let before = milliseconds;
    assert_eq!(code!(gpu, event_elapsed_time(&mut milliseconds, start, end)), 0);
    assert!(milliseconds > before, "the last record counts");
    assert_eq!(code!(gpu, event_elapsed_time(&mut milliseconds, end, start)), 0);
    assert!(milliseconds < 0.0, "the other way round");
}

// SAFETY: declared as the driver calls it, with the data that the test passes.
unsafe extern "C" fn count(data: *mut c_void) {
    // SAFETY: the test passes a counter that outlives the streams' work.
    unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn threads_share_a_driver_and_every_wait_ends() {
    for seed in [None, Some(1), Some(2)] {
        let Some(standin) = standin(Options { seed, ..Options::default() }) else { return };
        let gpu = Gpu::new(&standin);
        let calls = AtomicU32::new(0);
        let (shared, first) = (gpu.event(), gpu.stream());
        gpu.record(shared, first);
        let work = || {
            assert_eq!(code!(gpu, ctx_set_current(gpu.context)), 0);
            let (stream, memory) = (gpu.stream(), gpu.memory(4096));
            for turn in 0..50 {
                gpu.fill(memory, turn, 1024, stream);
                gpu.wait(stream, shared);
                let data = (&raw const calls).cast_mut().cast::<c_void>();
                assert_eq!(code!(gpu, launch_host_func(stream, count, data)), 0);
                gpu.record(shared, stream);
                if turn % 5 == 0 {
                    assert_eq!(code!(gpu, stream_synchronize(stream)), 0);
                    assert_eq!(gpu.word(memory), turn);
                }
            }
            assert_eq!(code!(gpu, mem_free(memory)), 0);
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
        assert_eq!(calls.into_inner(), 200);
    }
}
