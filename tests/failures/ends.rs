//! How sequences end, are truncated, draft and fail.

use crate::rig::{K, Machine, ROW, Rig, config, everywhere, row, stamp};
use forebay::{Config, Kind, Layer, LayerCall, MicroBatch, Shape, Step};
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn a_sequence_that_ends_with_its_next_step_in_flight_is_held_until_that_retires() {
    let mut rig = Rig::new(config(2, 64), true);
    let start = rig.gauges();
    let sequence = rig.open(24, 8, 1);
    let pages = rig.host_pages(sequence);
    let mut first = rig.prepare(sequence, 0);
    rig.all(&first);
    rig.cache.finish(&mut first, rig.stream).unwrap();
    rig.sync();
    let gate = rig.machine.gate(rig.stream);
    let mut second = rig.prepare(sequence, 1);
    rig.all(&second);
    rig.cache.finish(&mut second, rig.stream).unwrap();
    // The first step reports the end of the sequence; the second one is already in flight.
    rig.cache.retire(first, rig.stream).unwrap();
    rig.cache.close(sequence, rig.stream).unwrap();
    let other = rig.admit(40, 8, 2);
    assert!(rig.host_pages(other).iter().all(|page| !pages.contains(page)));
    gate.open();
    rig.sync();
    rig.cache.retire(second, rig.stream).unwrap();
    rig.cache.close(other, rig.stream).unwrap();
    assert_eq!(rig.gauges(), start);
    rig.cache.validate().unwrap();
}

/// A sequence of 24 tokens ends at the retirement of a step while its next step is held. With `other`, a sequence that
/// joins on another stream takes all free pages and slots; the result says whether the held step changed a byte of it.
/// Without, the result says whether it changed a row of the sequence's own page: a cache that freed pages at the
/// retirement would have given that page to another sequence.
fn held_step_writes(machine: Machine, other: bool) -> bool {
    let mut rig = Rig::on(machine, config(2, 64));
    let start = rig.gauges();
    let sequence = rig.open(24, 8, 1);
    let lands = |rig: &Rig, tag, position| {
        (0..2).for_each(|layer| rig.land(sequence, 0, layer, &stamp(tag, layer, position)));
    };
    let enqueue = |rig: &mut Rig, step: &mut Step| {
        rig.all(step);
        rig.cache.finish(step, rig.stream).unwrap();
    };
    let mut first = rig.prepare(sequence, 0);
    rig.sync();
    lands(&rig, 2, 24);
    enqueue(&mut rig, &mut first);
    rig.sync();
    let mut second = rig.prepare(sequence, 1);
    rig.sync();
    lands(&rig, 3, 25);
    let gate = rig.machine.gate(rig.stream);
    enqueue(&mut rig, &mut second);
    rig.cache.retire(first, rig.stream).unwrap();
    let row = |rig: &Rig| {
        let mut bytes = [0; ROW];
        rig.cache.read_row(sequence, Layer(1), 25, &mut bytes).unwrap();
        bytes
    };
    if !other {
        let before = row(&rig);
        gate.open();
        rig.sync();
        let changed = row(&rig) != before;
        rig.cache.retire(second, rig.stream).unwrap();
        return changed;
    }
    rig.cache.close(sequence, rig.stream).unwrap();
    let held = rig.stream;
    rig.stream = rig.device.stream().unwrap();
    let next = rig.open(40, 8, 4);
    let unharmed = |rig: &Rig| catch_unwind(AssertUnwindSafe(|| rig.check_total(next))).is_ok();
    assert!(unharmed(&rig));
    gate.open();
    rig.machine.sync(held);
    let changed = !unharmed(&rig);
    rig.cache.retire(second, rig.stream).unwrap();
    rig.decode(next, 0, 5).unwrap();
    rig.check_total(next);
    rig.cache.close(next, rig.stream).unwrap();
    rig.sync();
    assert_eq!(rig.gauges(), start);
    changed
}

#[test]
fn no_sequence_gets_pages_or_slots_that_a_held_step_of_a_closed_sequence_still_writes() {
    everywhere(|machine| assert!(!held_step_writes(machine, true)));
    everywhere(|machine| assert!(held_step_writes(machine, false), "the control: it does write"));
}

#[test]
fn a_deep_truncation_forgets_every_row_after_it_and_new_rows_take_their_place() {
    let mut rig = Rig::new(Config { query_rows: 3, ..config(1, 128) }, true);
    let sequence = rig.open(20, 100, 1);
    let mut accepted = 0;
    for tag in 2..30 {
        rig.decode(sequence, accepted, tag).unwrap();
        accepted = tag % 4;
    }
    let grown = rig.cache.length(sequence).unwrap().committed;
    assert!(grown > 50, "{grown} tokens");
    for (length, tag) in [(grown - 1, 40), (33, 41), (16, 42), (3, 43)] {
        rig.truncate(sequence, length);
        assert_eq!(rig.cache.length(sequence).unwrap().committed, length);
        rig.cache.validate().unwrap();
        rig.decode(sequence, 0, tag).unwrap();
        rig.decode(sequence, 2, tag).unwrap();
        rig.check_total(sequence);
    }
    let beyond = rig.cache.truncate(sequence, 90, rig.stream).unwrap_err();
    assert_eq!((beyond.kind(), beyond.number("length")), (Kind::OutOfRange, Some(90)));
}

#[test]
fn a_truncation_can_accept_landed_rows() {
    let mut rig = Rig::new(Config { query_rows: 3, ..config(1, 64) }, true);
    let sequence = rig.open(20, 30, 1);
    rig.decode(sequence, 0, 2).unwrap();
    rig.truncate(sequence, 22);
    rig.check_total(sequence);
    rig.decode(sequence, 0, 3).unwrap();
    // Two of three rows were accepted, and are where they landed.
    let positions = [20, 21];
    assert_eq!(positions.map(|p| rig.tags[&sequence][p]), [2, 2]);
    assert_eq!(rig.cache.length(sequence).unwrap().committed, 22);
}

#[test]
fn draft_passes_resolve_to_landing_slots_and_their_rows_are_born_once() {
    let base = config(1, 64);
    let shape = Shape { layers: 1, draft_layers: 1, ..base.shape };
    let mut rig = Rig::new(Config { shape, query_rows: 3, ..base }, true);
    let sequence = rig.open(12, 30, 1);
    let landing: Vec<i32> = (0..3).map(|row| rig.cache.landing_slot(sequence, row).unwrap() as i32).collect();
    let mut step = rig.prepare(sequence, 0);
    for pass in 0..3_i32 {
        // Each draft pass attends to a committed row and to all rows that landed in it and in the passes before it.
        let mut positions = vec![-1; K];
        positions[0] = pass;
        (0..=pass).for_each(|row| positions[1 + row as usize] = 12 + row);
        rig.land(sequence, pass as u32, 1, &stamp(2, 1, 12 + pass as u32));
        let buffers = rig.select(&step, LayerCall::draft_pass(Layer(1), pass as u32), &positions);
        rig.sync();
        let slots = rig.slots(buffers);
        let drafts = 1 + pass as usize;
        assert_eq!(slots[1..=drafts], landing[..drafts], "pass {pass}");
        assert!(slots[1 + drafts..].iter().all(|slot| *slot == -1));
        rig.check_slots(sequence, 1, &positions[..1], &slots[..1]);
        rig.cache.scatter(&step, LayerCall::draft_pass(Layer(1), pass as u32), rig.stream).unwrap();
    }
    rig.land(sequence, 0, 0, &stamp(2, 0, 12));
    rig.land(sequence, 1, 0, &stamp(2, 0, 13));
    rig.rest(&step, [0], rig.stream);
    rig.cache.finish(&mut step, rig.stream).unwrap();
    rig.sync();
    rig.cache.retire(step, rig.stream).unwrap();

    // Two of three are accepted: they are resident now in both layers, and none is resident twice.
    rig.tags.get_mut(&sequence).unwrap().extend([2, 2]);
    let mut step = rig.prepare(sequence, 2);
    for layer in 0..2 {
        let mut positions = vec![-1; 3 * K];
        (positions[0], positions[1]) = (12, 13);
        let buffers = rig.select(&step, LayerCall::whole(Layer(layer)), &positions);
        rig.sync();
        let slots = rig.slots(buffers);
        rig.check_slots(sequence, layer, &positions[..2], &slots[..2]);
        rig.cache.scatter(&step, LayerCall::whole(Layer(layer)), rig.stream).unwrap();
        assert!(slots[..2].iter().all(|slot| !landing.contains(slot)), "no longer in a landing slot");
    }
    rig.cache.finish(&mut step, rig.stream).unwrap();
    rig.sync();
    let retired = rig.cache.retire(step, rig.stream).unwrap();
    assert_eq!(retired.lengths(), [14], "born once, not once a pass");
    assert_eq!(retired.total(), (4, 0));
    rig.cache.validate().unwrap();
    rig.check_total(sequence);
}

/// A step of two sequences in which batch row 1 selects `position` in layer 1, in a row of `limit` tokens.
fn fail_at(rig: &mut Rig, sequences: [forebay::Sequence; 2], position: i32) -> Result<(), forebay::Error> {
    let rows = sequences.map(|sequence| row(sequence, 0, 1));
    let mut step = rig.cache.prepare(MicroBatch(0), 1, &rows, None, rig.stream).unwrap();
    let second = LayerCall { batch_rows: Some((1, 1)), ..LayerCall::whole(Layer(1)) };
    let mut positions = [-1; K];
    (positions[2], positions[3]) = (5, position);
    let buffers = rig.select(&step, second, &positions);
    rig.sync();
    let slots = rig.slots(buffers);
    rig.check_slots(sequences[1], 1, &[5], &slots[2..3]);
    let first = LayerCall { batch_rows: Some((0, 1)), ..second };
    rig.select(&step, first, &[-1; K]);
    rig.cache.scatter(&step, LayerCall::whole(Layer(1)), rig.stream).unwrap();
    rig.rest(&step, [0], rig.stream);
    rig.cache.finish(&mut step, rig.stream).unwrap();
    rig.sync();
    rig.cache.retire(step, rig.stream).map(|_| ()).map_err(|unretired| unretired.error)
}

#[test]
fn a_position_beyond_the_length_fails_the_step_and_a_truncation_clears_it() {
    for position in [25, 26, 1000, i32::MAX, -2] {
        let mut rig = Rig::new(config(2, 64), true);
        let sequences = [rig.open(24, 8, 1), rig.open(24, 8, 2)];
        fail_at(&mut rig, sequences, 24).unwrap();
        for sequence in sequences {
            rig.truncate(sequence, 24);
        }
        let error = fail_at(&mut rig, sequences, position).unwrap_err();
        assert_eq!((error.kind(), error.operation()), (Kind::DeviceFailed, "retire"));
        // A number below 0 is reported as in the selection.
        let negative = format!("a selected position is {position}, and only -1 is none");
        let (place, value) = match u64::try_from(position) {
            Ok(value) => ("a selected position is at or beyond the length", Some(value)),
            Err(_) => (negative.as_str(), None),
        };
        assert_eq!(error.place(), place);
        let numbers = ["batch row", "layer", "value"].map(|name| error.number(name));
        assert_eq!(numbers, [Some(1), Some(1), value]);
        for sequence in sequences {
            let rows = [row(sequence, 0, 1)];
            let refused = rig.cache.prepare(MicroBatch(0), 1, &rows, None, rig.stream).unwrap_err();
            assert_eq!(refused.place(), "a step of the sequence failed");
            let landed = rig.cache.truncate(sequence, 25, rig.stream).unwrap_err();
            assert_eq!(landed.kind(), Kind::OutOfRange, "landed rows of a failed step are not accepted");
            rig.truncate(sequence, 24);
            assert_eq!(rig.decode(sequence, 0, 7).unwrap(), 24);
        }
        rig.cache.validate().unwrap();
    }
}

#[test]
fn a_failed_step_with_the_next_one_in_flight_fails_its_sequence_once() {
    let mut rig = Rig::new(config(2, 64), true);
    let sequence = rig.open(24, 8, 1);
    let mut first = rig.prepare(sequence, 0);
    rig.all(&first);
    rig.cache.finish(&mut first, rig.stream).unwrap();
    let mut second = rig.prepare(sequence, 1);
    let mut positions = [-1; K];
    positions[0] = 50;
    rig.select(&second, LayerCall::whole(Layer(0)), &positions);
    rig.cache.scatter(&second, LayerCall::whole(Layer(0)), rig.stream).unwrap();
    rig.rest(&second, [1], rig.stream);
    rig.cache.finish(&mut second, rig.stream).unwrap();
    rig.sync();
    let early = rig.cache.truncate(sequence, 24, rig.stream).unwrap_err();
    assert_eq!(early.kind(), Kind::Busy);
    // Both used the same micro-batch's record; each report is its own.
    assert_eq!(rig.cache.retire(first, rig.stream).unwrap().lengths(), [24]);
    let failed = rig.cache.retire(second, rig.stream).unwrap_err();
    assert_eq!((failed.error.kind(), failed.error.number("value")), (Kind::DeviceFailed, Some(50)));
    rig.truncate(sequence, 24);
    assert_eq!(rig.decode(sequence, 0, 7).unwrap(), 24);
}
