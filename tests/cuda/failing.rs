//! Each driver call, refused once: the caller gets an error or none, nothing leaks, and every ticket ends.

use crate::rig::{Cache, Rig, entry, on, own, selection, usual};
use forebay::device::cuda::CudaDevice;
use forebay::device::{Device, Outcome, Ticket};
use forebay::measure::Probe;
use forebay::{Error, Kind, Result};
use forebay_standin::{Options, Resources, Standin};

/// A failure that no test reaches.
const NEVER: u64 = 1 << 40;
const ILLEGAL_ADDRESS: i32 = 700;
/// The ability that only a stand-in has.
const FAILS: &str = "fails a call or an operation";

/// Construction, two steps and a graph, with their tickets.
fn scenario(standin: &Standin, tickets: &mut Vec<Ticket>) -> Result<()> {
    let device = CudaDevice::new(on(standin.library()))?;
    let cache = Cache::new(device)?;
    cache.join(0, 20)?;
    cache.join(1, 30)?;
    for number in 1..=2 {
        cache.prepare(number, &[entry(0, number), entry(1, number)], &selection(number, 20))?;
        cache.enqueue()?;
        tickets.push(cache.ticket()?);
        cache.device.synchronize(cache.event)?;
    }
    cache.prepare(3, &[entry(0, 3), entry(1, 3)], &selection(3, 20))?;
    let slice = cache.device.allocate(256)?;
    cache.device.capture(cache.stream)?;
    let enqueued = cache.enqueue().and_then(|()| cache.device.prefetch(cache.stream, slice, 1 << 40));
    let enqueued = enqueued.and_then(|()| cache.device.call(cache.stream, std::sync::Arc::new(|| ())));
    let graph = cache.device.captured(cache.stream);
    let graph = enqueued.and(graph)?;
    cache.device.launch(graph, cache.stream)?;
    tickets.push(cache.ticket()?);
    cache.device.release(graph)?;
    cache.device.synchronize(cache.event)
}

/// Construction, and the queries of tools.
fn probing(standin: &Standin, _tickets: &mut Vec<Ticket>) -> Result<()> {
    let count = CudaDevice::count(&on(standin.library()))?;
    assert_eq!(count, 1);
    let device = CudaDevice::new(on(standin.library()))?;
    device.facts()?;
    for ability in device.abilities() {
        ability.usable?;
    }
    let (stream, slice) = (device.stream()?, device.allocate(64)?);
    let (from, to) = (device.mark()?, device.mark()?);
    device.stamp(from, stream)?;
    device.carry(stream, slice.part(0, 32)?, slice.part(32, 32)?, 2)?;
    device.compute(stream, 1)?;
    device.stamp(to, stream)?;
    device.elapsed_us(from, to).map(drop)
}

type Scenario = fn(&Standin, &mut Vec<Ticket>) -> Result<()>;

/// The result of a scenario in which call `n` returns `code`, and the name of that call.
fn failing(
    scenario: Scenario,
    n: u64,
    code: i32,
    seed: Option<u64>,
) -> Option<(Option<String>, Option<Error>)> {
    let standin = own(Options { seed, ..usual() }, FAILS)?;
    standin.fail_call(n, code);
    let mut tickets = Vec::new();
    let ended = scenario(&standin, &mut tickets);
    let call = standin.failed_call();
    standin.fail_call(NEVER, code);
    assert!(tickets.iter().all(|ticket| ticket.poll().is_some()), "call {n} ({call:?}): a ticket never ends");
    // On a lost context a refused release is not tried again: the resource may be gone.
    if code != ILLEGAL_ADDRESS || !call.as_deref().is_some_and(|call| gives_back(call) || undone(call)) {
        assert_eq!(standin.held_resources(), Resources::default(), "call {n} ({call:?}): {ended:?}");
    }
    Some((call, ended.err()))
}

fn gives_back(call: &str) -> bool {
    const BACK: [&str; 3] = ["Destroy", "Free", "Un"];
    BACK.iter().any(|word| call.contains(word))
        || ["cuMemRelease", "cuDevicePrimaryCtxRelease_v2"].contains(&call)
}

/// The calls of the guard of a context, also around a release.
fn undone(call: &str) -> bool {
    ["cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent_v2"].contains(&call)
}

fn each_call(scenario: Scenario, least: u64, code: i32, seed: Option<u64>) {
    let mut silent = Vec::new();
    for n in 0.. {
        let Some((call, error)) = failing(scenario, n, code, seed) else { return };
        let Some(call) = call else {
            assert!(n > least && error.is_none(), "{n} {error:?}");
            break;
        };
        match error {
            // The calls of the construction and the last ones only release resources.
            None => silent.push(call),
            Some(error) => {
                let place = error.place();
                assert!(place.contains("cu") || place.contains("device"), "{call}: {error}");
            }
        }
    }
    silent.sort();
    silent.dedup();
    // Refusals that no caller can react to: releases, what the guard of the context undoes, and waits for the end.
    let ends = ["cuStreamSynchronize", "cuEventQuery", "cuEventRecord", "cuStreamGetCaptureInfo_v2"];
    for call in silent {
        let known = gives_back(&call) || undone(&call) || ends.contains(&call.as_str());
        assert!(known, "{call} was refused, and no caller got an error");
    }
}

#[test]
fn every_call_refused_once_is_an_error_and_leaks_nothing() {
    // An invalid value, no memory, and a lost context.
    for code in [1, 2, ILLEGAL_ADDRESS] {
        each_call(scenario, 300, code, None);
    }
}

#[test]
fn every_query_of_tools_refused_once_is_an_error_and_leaks_nothing() {
    for code in [1, ILLEGAL_ADDRESS] {
        each_call(probing, 150, code, None);
    }
}

#[test]
fn a_context_lost_at_any_operation_ends_every_ticket_and_leaks_nothing() {
    for seed in [None, Some(1)] {
        let mut failed = 0;
        for n in 0.. {
            let Some(standin) = own(Options { seed, ..usual() }, FAILS) else { return };
            standin.fail_operation(n, ILLEGAL_ADDRESS);
            let mut tickets = Vec::new();
            let ended = scenario(&standin, &mut tickets);
            assert!(
                tickets.iter().all(|ticket| ticket.poll().is_some()),
                "operation {n}: a ticket never ends"
            );
            assert_eq!(standin.held_resources(), Resources::default(), "operation {n}");
            let all_done = tickets.iter().all(|ticket| ticket.poll() == Some(Outcome::Done));
            match ended {
                Ok(()) if standin.operations() <= n => {
                    assert!(tickets.len() == 3 && all_done);
                    break;
                }
                Ok(()) => panic!("operation {n} failed, and no caller got an error"),
                Err(error) => assert_eq!(error.kind(), Kind::DeviceFailed, "operation {n}: {error}"),
            }
            failed += 1;
        }
        assert!(failed > 35, "{failed}");
    }
}

#[test]
fn every_call_refused_once_in_another_order_leaks_nothing_either() {
    each_call(scenario, 300, 1, Some(5));
}

#[test]
fn a_free_that_is_refused_is_tried_again_unless_the_memory_may_be_gone() {
    for (code, left) in [(1, 0), (ILLEGAL_ADDRESS, 1)] {
        for n in 0.. {
            let Some(Rig { device, driver: standin }) = Rig::own(usual(), FAILS) else { return };
            device.allocate(64).unwrap();
            standin.fail_call(n, code);
            drop(device);
            if standin.failed_call().as_deref() == Some("cuMemFree_v2") {
                assert_eq!(standin.held_resources().allocations, left, "{code}");
                break;
            }
            assert!(standin.failed_call().is_some(), "the memory is never freed");
        }
    }
}
