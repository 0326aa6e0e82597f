//! Known failures of other engines, by the numbers of docs/testing.md; and how sequences end, are truncated, are
//! resized and fail.
//!
//! The tests force an order: a gate holds a stream of the threaded device back while the host goes on, and on the clock
//! device a seed tries hundreds of other orders. A control is the same scenario without the protection and must show
//! the damage; otherwise its test proves nothing.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "failures/controls.rs"]
mod controls;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[path = "failures/ends.rs"]
mod ends;
#[path = "failures/resizing.rs"]
mod resizing;
#[path = "failures/rig.rs"]
mod rig;
#[path = "failures/sizes.rs"]
mod sizes;

use forebay::{Config, Kind, Layer, LayerCall, MicroBatch};
use rig::{K, Machine, Rig, config, everywhere, row, some_wait_is_missed, stamp};

fn three_steps_while_a_stream_is_held(machine: Machine) {
    let mut rig = Rig::on(machine, Config { steps_in_flight: 3, ..config(4, 64) });
    let sequences = [10, 20, 30, 40].map(|prompt| rig.open(prompt, 8, prompt));
    let gate = rig.machine.gate(rig.stream);
    let mut steps = Vec::new();
    for sequence in &sequences[..3] {
        let mut step = rig.prepare(*sequence, 0);
        rig.all(&step);
        rig.cache.finish(&mut step, rig.stream).unwrap();
        steps.push(step);
    }
    let fourth = [row(sequences[3], 0, 1)];
    let full = rig.cache.prepare(MicroBatch(0), 1, &fourth, None, rig.stream).unwrap_err();
    assert_eq!((full.kind(), full.place()), (Kind::Busy, "every step descriptor is in flight"));
    let early = rig.cache.retire(steps.remove(0), rig.stream).unwrap_err();
    assert_eq!(early.error.kind(), Kind::Busy);
    steps.insert(0, early.step.unwrap());
    gate.open();
    rig.sync();
    for (step, prompt) in steps.into_iter().zip([10, 20, 30]) {
        assert_eq!(rig.cache.retire(step, rig.stream).unwrap().lengths(), [prompt]);
    }
    assert_eq!(rig.decode(sequences[3], 0, 5).unwrap(), 40);
}

#[test]
fn f3_a_step_descriptor_is_not_overwritten_while_its_copy_is_pending() {
    everywhere(three_steps_while_a_stream_is_held);
}

fn truncations_while_a_stream_is_held(machine: Machine) {
    let mut rig = Rig::on(machine, config(1, 64));
    let gate = rig.machine.gate(rig.stream);
    let first = rig.admit(14, 8, 1);
    let busy = rig.cache.truncate(first, 3, rig.stream).unwrap_err();
    assert_eq!((busy.kind(), busy.operation()), (Kind::Busy, "truncate"));
    assert_eq!(rig.cache.fork(first, &Rig::asks(0, 8), rig.stream).unwrap_err().kind(), Kind::Busy);
    rig.cache.close(first, rig.stream).unwrap();
    let refused = rig.cache.open(&Rig::asks(14, 8)).unwrap_err();
    assert_eq!((refused.kind(), refused.place()), (Kind::Exhausted, "lanes"), "the lane is still staged");
    assert_eq!(rig.cache.reap(rig.stream).unwrap(), 1);
    gate.open();
    rig.sync();
    assert_eq!(rig.cache.reap(rig.stream).unwrap(), 0);
    let second = rig.open(14, 8, 2);
    let _pending = {
        let _gate = rig.machine.gate(rig.stream);
        let ticket = rig.cache.truncate(second, 9, rig.stream).unwrap();
        let again = rig.cache.truncate(second, 3, rig.stream).unwrap_err();
        assert_eq!(again.kind(), Kind::Busy, "a truncation stages pages too");
        ticket
    };
    rig.sync();
    assert_eq!(rig.decode(second, 0, 3).unwrap(), 9);
}

#[test]
fn f4_the_staged_pages_of_a_lane_are_not_replaced_before_the_device_has_read_them() {
    everywhere(truncations_while_a_stream_is_held);
}

fn fork_that_closes(machine: Machine) {
    let mut rig = Rig::on(machine, config(3, 64));
    let parent = rig.open(40, 8, 1);
    let child = rig.fork(parent, 8);
    rig.sync();
    let shared = rig.host_pages(parent)[..2].to_vec();
    assert_eq!(rig.host_pages(child)[..2], shared);
    assert_ne!(rig.host_pages(child)[2], rig.host_pages(parent)[2], "a partial page is a copy");

    let gate = rig.machine.gate(rig.stream);
    let mut step = rig.prepare(parent, 0);
    let positions: Vec<i32> = (0..K as i32).map(|n| n * 3).collect();
    let buffers = rig.select(&step, LayerCall::whole(Layer(0)), &positions);
    rig.cache.close(child, rig.stream).unwrap();
    // The pages and slots that are free now go to other sequences at once.
    for tag in [7, 8] {
        let other = rig.admit(60, 2, tag);
        assert!(rig.host_pages(other).iter().all(|page| !shared.contains(page)));
    }
    gate.open();
    rig.cache.scatter(&step, LayerCall::whole(Layer(0)), rig.stream).unwrap();
    rig.rest(&step, [1], rig.stream);
    rig.cache.finish(&mut step, rig.stream).unwrap();
    rig.sync();
    rig.check_slots(parent, 0, &positions, &rig.slots(buffers));
    rig.cache.retire(step, rig.stream).unwrap();
    rig.cache.validate().unwrap();
    // The end of the last owner frees them; the test would have seen them free before.
    rig.cache.close(parent, rig.stream).unwrap();
    let next = rig.open(60, 2, 9);
    assert!(rig.host_pages(next).iter().any(|page| shared.contains(page)));
}

#[test]
fn f6_a_shared_page_lives_while_either_sequence_uses_it() {
    everywhere(fork_that_closes);
}

#[test]
fn f6_a_truncation_into_a_shared_page_replaces_the_physical_page() {
    let mut rig = Rig::new(config(3, 64), true);
    let parent = rig.open(40, 8, 1);
    let child = rig.fork(parent, 8);
    rig.sync();
    rig.truncate(child, 9);
    assert!(rig.host_pages(child)[..2].iter().all(|page| !rig.host_pages(parent).contains(page)));
    rig.check_total(child);
    let mut accepted = 0;
    for tag in 2..14 {
        rig.decode(child, accepted, tag).unwrap();
        accepted = 1;
    }
    rig.check_total(child);
    rig.check_total(parent);
    rig.decode(parent, 0, 20).unwrap();
    rig.cache.validate().unwrap();
}

fn aborts_while_a_stream_is_held(machine: Machine) {
    let mut rig = Rig::on(machine, config(3, 64));
    let start = rig.gauges();
    let running = rig.open(24, 8, 1);
    let gate = rig.machine.gate(rig.stream);
    let joining = rig.admit(24, 8, 2);
    let filling = rig.cache.open(&Rig::asks(24, 8)).unwrap();
    let steps = [0, 1].map(|accepted| {
        let mut step = rig.prepare(running, accepted);
        rig.all(&step);
        rig.cache.finish(&mut step, rig.stream).unwrap();
        step
    });
    for sequence in [running, joining, filling] {
        rig.cache.close(sequence, rig.stream).unwrap();
        assert_eq!(rig.cache.close(sequence, rig.stream).unwrap_err().kind(), Kind::Closed);
    }
    let held = |rig: &Rig| (rig.cache.stats().sequences, rig.cache.stats().free_host_pages < start[2]);
    assert_eq!(held(&rig), (3, true), "the engine may still be writing to a sequence that did not join");
    assert_eq!(rig.cache.reap(rig.stream).unwrap(), 3);
    gate.open();
    rig.sync();
    let [first, second] = steps;
    rig.cache.retire(first, rig.stream).unwrap();
    assert_eq!(held(&rig), (3, true), "the second step still names one of them");
    rig.cache.retire(second, rig.stream).unwrap();
    assert_eq!(held(&rig), (2, true), "no call has looked at the other two tickets yet");
    assert_eq!(rig.cache.reap(rig.stream).unwrap(), 0);
    assert_eq!(rig.gauges(), start);
    rig.sync();
    rig.cache.validate().unwrap();
}

#[test]
fn f9_an_abort_frees_everything_once_the_operations_that_name_it_have_ended() {
    everywhere(aborts_while_a_stream_is_held);
}

#[test]
fn f9_an_abort_on_a_failed_device_frees_everything_too() {
    let mut rig = Rig::new(config(2, 64), true);
    let start = rig.gauges();
    let sequence = rig.open(24, 8, 1);
    let mut step = rig.prepare(sequence, 0);
    rig.all(&step);
    rig.device.call(rig.stream, std::sync::Arc::new(|| panic!("an engine's callback"))).unwrap();
    rig.cache.finish(&mut step, rig.stream).unwrap();
    let joining = rig.admit(24, 8, 2);
    rig.sync();
    let failed = rig.cache.retire(step, rig.stream).unwrap_err();
    assert_eq!((failed.error.kind(), failed.step), (Kind::DeviceFailed, None));
    rig.cache.close(sequence, rig.stream).unwrap();
    rig.cache.close(joining, rig.stream).unwrap();
    assert_eq!(rig.cache.reap(rig.stream).unwrap(), 0);
    assert_eq!(rig.gauges(), start);
}

fn fork_of_a_parent_that_closes(machine: Machine) {
    let mut rig = Rig::on(machine, config(3, 64));
    let parent = rig.open(24, 8, 1);
    let partial = rig.host_pages(parent)[1];
    let gate = rig.machine.gate(rig.stream);
    let child = rig.fork(parent, 8);
    rig.cache.close(parent, rig.stream).unwrap();
    // The parent is gone. A sequence that opens now writes to the free pages while the copy still waits.
    let other = rig.admit(40, 8, 9);
    assert!(!rig.host_pages(other).contains(&partial));
    gate.open();
    rig.sync();
    rig.check_total(child);
    assert_eq!(rig.decode(child, 0, 3).unwrap(), 24);
    rig.check_total(child);
    // The copy has ended and the child's step has noticed it: now any sequence may get the page.
    let next = rig.open(60, 2, 10);
    assert!(rig.host_pages(next).contains(&partial));
    rig.check_total(child);
    rig.cache.validate().unwrap();
}

#[test]
fn f12_a_page_is_not_written_while_its_copy_is_pending() {
    everywhere(fork_of_a_parent_that_closes);
}

fn fork_of_a_parent_that_decodes(machine: Machine) {
    let mut rig = Rig::on(machine, config(2, 64));
    let parent = rig.open(24, 8, 1);
    let gate = rig.machine.gate(rig.stream);
    let child = rig.fork(parent, 8);
    // The parent's next step runs on another stream and must wait for the copy by an edge.
    let other = rig.device.stream().unwrap();
    let mut step = rig.cache.prepare(MicroBatch(0), 1, &[row(parent, 0, 1)], None, other).unwrap();
    rig.land(parent, 0, 0, &stamp(5, 0, 24));
    rig.rest(&step, 0..2, other);
    rig.cache.finish(&mut step, other).unwrap();
    // A step that does not wait for the copy would end meanwhile.
    for _ in 0..rig.machine.looks() {
        let early = rig.cache.retire(step, other).unwrap_err();
        assert_eq!(early.error.kind(), Kind::Busy, "it waits for the copy");
        step = early.step.unwrap();
        std::thread::yield_now();
    }
    gate.open();
    rig.machine.sync(other);
    rig.sync();
    rig.cache.retire(step, other).unwrap();
    rig.check_total(child);
    rig.decode(child, 0, 6).unwrap();
    rig.check_total(parent);
}

#[test]
fn f12_a_parent_that_decodes_on_does_not_write_into_the_copy() {
    everywhere(fork_of_a_parent_that_decodes);
    some_wait_is_missed(fork_of_a_parent_that_decodes);
}

fn lanes_given_out_again(machine: Machine) {
    let mut rig = Rig::on(machine, config(2, 64));
    let (slow, fast) = (rig.device.stream().unwrap(), rig.device.stream().unwrap());
    let first = rig.open(14, 8, 1);
    let second = rig.open(14, 8, 2);
    let gate = rig.machine.gate(slow);
    rig.cache.close(first, slow).unwrap();
    rig.cache.close(second, fast).unwrap();
    // Both lanes are given to new sequences while the first one's leave still waits on the slow stream.
    let next = [rig.admit(14, 8, 3), rig.admit(14, 8, 4)];
    // Joins that are ordered after only one of the two leaves would run meanwhile. A clock advances when the host
    // queries any event.
    let event = rig.device.event().unwrap();
    for _ in 0..rig.machine.looks() {
        rig.device.query(event).unwrap();
        assert!(rig.joins[2..].iter().all(|join| join.poll().is_none()));
        std::thread::yield_now();
    }
    gate.open();
    rig.machine.sync(slow);
    rig.sync();
    for sequence in next {
        assert_eq!(rig.decode(sequence, 0, 5).unwrap(), 14);
    }
    rig.cache.validate().unwrap();
}

#[test]
fn a_lane_is_not_joined_before_its_last_sequence_has_left_it_on_any_stream() {
    everywhere(lanes_given_out_again);
    some_wait_is_missed(lanes_given_out_again);
}
