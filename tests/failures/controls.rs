//! Controls: without the protections of F3, F4 and F12, the damage shows that their tests look for.

use crate::rig::{Machine, everywhere};
use forebay::device::{Join, Mapped, PoolLayout, PoolOp, Truncate, Warm, WarmGather};
use forebay::os::{Map, NoFaults, Protection, Request};
use forebay::residency::TableShape;
use forebay::{Geometry, Lane, Shape};
use std::sync::Arc;

fn pinned(bytes: u64) -> Arc<Map> {
    let request = Request { bytes, huge: false, populate: true, lock: false, node: None, shared: false };
    Arc::new(Map::new(&request, &NoFaults).unwrap().0)
}

fn one_block_for_two_steps(machine: Machine) {
    let (device, stream) = machine.device_and_stream();
    let map = pinned(64);
    let block = device.register(&map).unwrap().part(0, 64).unwrap();
    let loaded = [0; 2].map(|_| device.allocate(64).unwrap());
    let gate = machine.gate(stream);
    for (number, to) in (1..).zip(loaded) {
        map.copy_in(0, &[number; 64]).unwrap();
        device.copy(stream, block, to).unwrap();
    }
    gate.open();
    machine.sync(stream);
    assert_eq!(machine.bytes(loaded[0]), [2; 64], "the first step has read the second one's descriptor");
}

#[test]
fn f3_control_one_reused_step_descriptor_carries_the_next_steps_words() {
    everywhere(one_block_for_two_steps);
}

fn page_written_before_its_copy(machine: Machine) {
    let (device, stream) = machine.device_and_stream();
    let map = pinned(128);
    let all = device.register(&map).unwrap();
    let (page, copy) = (all.part(0, 64).unwrap(), all.part(64, 64).unwrap());
    map.copy_in(0, &[1; 64]).unwrap();
    let gate = machine.gate(stream);
    device.copy(stream, page, copy).unwrap();
    map.copy_in(0, &[9; 64]).unwrap();
    gate.open();
    machine.sync(stream);
    assert_eq!(machine.bytes(copy), [9; 64], "the child has its parent's successor's rows");
}

#[test]
fn f12_control_a_page_written_while_its_copy_is_pending_spoils_the_copy() {
    everywhere(page_written_before_its_copy);
}

/// Joins a lane with page 0 and truncates it to page 1, which is enqueued before the join has run or after. Returns the
/// page whose row the join's gather loaded.
fn page_of_the_join(machine: &Machine, wait_between: bool) -> u8 {
    let (device, stream) = machine.device_and_stream();
    let shape =
        Shape { layers: 1, draft_layers: 0, runs: [64, 0], page_tokens: 16, top_k: 8, ..Shape::GLM_5 };
    let geometry = Geometry::new(shape).unwrap();
    let map = pinned(2 * geometry.host_page_bytes());
    for page in 0..2 {
        map.copy_in(page * geometry.host_page_bytes(), &[page as u8; 16 * 64]).unwrap();
    }
    let grain = device.granularity();
    let mapped = Mapped { backing: device.backing(4 * grain).unwrap(), offset: 0, bytes: 4 * grain };
    let slab = device.range(&[mapped], Protection::ReadWrite).unwrap();
    let tables = TableShape {
        lanes: 1,
        tokens: 32,
        query_rows: 1,
        scratch: 8,
        waves: 1,
        scratch_base: 1,
        landing_base: 64,
        budget_base: 128,
        budget_blocks: 1,
    };
    let plan = PoolLayout {
        geometry: geometry.into(),
        tables: vec![tables],
        slabs: vec![slab],
        rows: vec![device.register(&map).unwrap()],
        lane_pages: 2,
        micro_batches: 1,
        batch: 1,
        expected: Default::default(),
    };
    let pools = device.attach(plan).unwrap();
    let lane = Lane(0);
    let gate = machine.gate(stream);
    let join = Join { lane, length: 16, pages: &[0], blocks: &[vec![0]], budgets: &[16] };
    device.enqueue(pools, stream, PoolOp::Join(join)).unwrap();
    device
        .enqueue(
            pools,
            stream,
            PoolOp::Warm(Warm { lane, group: None, whole: true, selections: None, steps: 0 }),
        )
        .unwrap();
    device.enqueue(pools, stream, PoolOp::WarmGather(WarmGather { lane, first: 0, count: 16 })).unwrap();
    if wait_between {
        gate.open();
        machine.sync(stream);
    }
    device
        .enqueue(pools, stream, PoolOp::Truncate(Truncate { lane, settle: 0, length: 16, pages: &[1] }))
        .unwrap();
    gate.open();
    machine.sync(stream);
    let first = geometry.pieces(128)[0];
    machine.bytes(slab.part(first.slab, 1).unwrap())[0]
}

#[test]
fn f4_control_pages_staged_before_the_device_has_read_the_last_ones_replace_them() {
    everywhere(|machine| assert_eq!(page_of_the_join(&machine, true), 0));
    everywhere(|machine| {
        assert_eq!(page_of_the_join(&machine, false), 1, "the join has gathered from the truncation's page");
    });
}

/// A host that writes a descriptor and then enqueues its reader; or the other way round, with nothing that makes it
/// write in time. Returns whether the reader saw the descriptor.
fn block_is_seen(machine: &Machine, in_time: bool) -> bool {
    let (device, stream) = machine.device_and_stream();
    let map = pinned(64);
    let block = device.register(&map).unwrap().part(0, 64).unwrap();
    let (to, event) = (device.allocate(64).unwrap(), device.event().unwrap());
    if in_time {
        map.copy_in(0, &[9; 64]).unwrap();
    }
    device.copy(stream, block, to).unwrap();
    // Other work that a host enqueues.
    (0..20).for_each(|_| device.record(event, stream).unwrap());
    map.copy_in(0, &[9; 64]).unwrap();
    machine.sync(stream);
    machine.bytes(to) == [9; 64]
}

#[test]
fn a_host_that_writes_after_it_enqueued_the_reader_is_late_for_some_seed() {
    let clocks = || (0..200).map(|seed| Machine::clock(seed, 0..0));
    assert!(clocks().all(|machine| block_is_seen(&machine, true)));
    let late = clocks().filter(|machine| !block_is_seen(machine, false)).count();
    assert!((20..180).contains(&late), "{late} of 200");
}
