//! Resizes among the work of other streams: blocks that pass from one sequence to another, calls that come while a
//! resize is still queued, and caches without row bytes.

use crate::rig::{K, Machine, Rig, config, everywhere, row, some_wait_is_missed, stamp};
use forebay::device::Stream;
use forebay::{BringUp, Budget, Buffers, Config, Kind, Layer, LayerCall, MicroBatch, Open, SLOT_BLOCK};
use forebay::{Sequence, Slots, Step, Streams, WarmUp};

const PROMPT: u32 = 150;

/// Room for two sequences and a fork, with four slot blocks in each layer.
fn roomy() -> Config {
    let slots = Slots::Uniform(4 * SLOT_BLOCK);
    Config { slots, micro_batches: 2, ..config(3, PROMPT + 20) }
}

/// A sequence of `prompt` rows, whose join is enqueued. All rows are resident if they fit its budget.
fn admit(rig: &mut Rig, (prompt, budget): (u32, u32), tag: u32) -> Sequence {
    let open = Open { prompt, promised: 20, budget: Budget::Slots(budget), bring_up: BringUp::Whole };
    let sequence = rig.cache.open(&open).unwrap();
    for layer in [0, 1] {
        let rows: Vec<u8> = (0..prompt).flat_map(|position| stamp(tag, layer, position)).collect();
        rig.cache.append(sequence, Layer(layer), &rows).unwrap();
    }
    rig.joins.push(rig.cache.join(sequence, rig.stream, WarmUp::default()).unwrap());
    rig.tags.insert(sequence, vec![tag; prompt as usize]);
    sequence
}

fn resize(rig: &mut Rig, sequence: Sequence, slots: u32, stream: Stream) {
    rig.cache.resize(sequence, &Budget::Slots(slots), stream).unwrap();
    assert_eq!(rig.cache.budgets(sequence).unwrap(), [slots; 2]);
}

/// A step of one sequence that selects the same positions in both layers, up to its end on `rig.stream`.
struct Enqueued {
    step: Step,
    sequence: Sequence,
    first: u32,
    slots: [Buffers; 2],
}

fn enqueue(rig: &mut Rig, sequence: Sequence, micro: u32, first: u32) -> Enqueued {
    let positions: Vec<u8> = (first..first + K as u32).flat_map(u32::to_le_bytes).collect();
    let rows = [row(sequence, 0, 1)];
    let stream = rig.stream;
    let mut step = rig.cache.prepare(MicroBatch(micro), 1, &rows, None, stream).unwrap();
    let slots = [0, 1].map(|layer| {
        let [selection, slots] = [(); 2].map(|()| rig.device.allocate(4 * K as u64).unwrap());
        rig.machine.memory.write(selection, &positions).unwrap();
        let buffers = Buffers { selection, slots, split_indices: None };
        let call = LayerCall::whole(Layer(layer));
        rig.cache.layer(&step, call, Streams { resolve: stream, gather: stream }, buffers).unwrap();
        rig.cache.scatter(&step, call, stream).unwrap();
        buffers
    });
    rig.cache.finish(&mut step, stream).unwrap();
    Enqueued { step, sequence, first, slots }
}

/// Retires a step whose stream has run: every row is in its slot. Returns hits and misses.
fn retire(rig: &mut Rig, enqueued: Enqueued) -> (u64, u64) {
    let Enqueued { step, sequence, first, slots } = enqueued;
    let positions: Vec<i32> = (first as i32..).take(K).collect();
    for (layer, buffers) in (0..).zip(slots) {
        rig.check_slots(sequence, layer, &positions, &rig.slots(buffers));
    }
    rig.cache.retire(step, rig.stream).unwrap().total()
}

/// Slots of all layers that belong to a sequence, in blocks of each layer.
fn blocks(rig: &Rig) -> u64 {
    rig.cache.stats().slots_in_use / 2 / u64::from(SLOT_BLOCK)
}

/// A sequence gives up two of its three blocks while a step of it is held. Another one takes them, on another stream,
/// and gathers its rows into them.
fn blocks_that_pass_on(machine: Machine) {
    let mut rig = Rig::on(machine, roomy());
    let [home, one, two] = [rig.stream, rig.device.stream().unwrap(), rig.device.stream().unwrap()];
    let (first, _second) = (admit(&mut rig, (PROMPT, PROMPT), 1), admit(&mut rig, (PROMPT, 16), 2));
    rig.sync();
    assert_eq!(blocks(&rig), 4, "none is free");
    let gate = rig.machine.gate(home);
    let held = enqueue(&mut rig, first, 0, 0);
    resize(&mut rig, first, 20, one);
    assert_eq!(blocks(&rig), 2);
    rig.stream = two;
    let third = admit(&mut rig, (100, 128), 3);
    let fetched = enqueue(&mut rig, third, 1, 60);
    assert_eq!(blocks(&rig), 4);
    gate.open();
    rig.machine.sync(home);
    rig.sync();
    assert_eq!(retire(&mut rig, held), (16, 0));
    assert_eq!(retire(&mut rig, fetched), (16, 0));
    // The rows of the step, and the newest ones of the bring-up, which have moved in both layers.
    for (position, counts) in [(142, (16, 0)), (0, (16, 0)), (132, (4, 12))] {
        let step = enqueue(&mut rig, first, 0, position);
        rig.sync();
        assert_eq!(retire(&mut rig, step), counts, "from {position}");
    }
    for position in [0, 92] {
        let step = enqueue(&mut rig, third, 1, position);
        rig.sync();
        assert_eq!(retire(&mut rig, step), (16, 0), "from {position}");
    }
    let stats = rig.cache.stats();
    assert_eq!((stats.resizes, stats.moved_rows), (1, 24));
    rig.cache.validate().unwrap();
}

#[test]
fn blocks_that_a_resize_gives_up_are_taken_by_another_sequence() {
    everywhere(blocks_that_pass_on);
    some_wait_is_missed(blocks_that_pass_on);
}

fn calls_while_a_resize_is_queued(machine: Machine) {
    let mut rig = Rig::on(machine, roomy());
    let start = rig.gauges();
    let (first, second) = (admit(&mut rig, (PROMPT, PROMPT), 1), admit(&mut rig, (PROMPT, 64), 2));
    rig.sync();
    let one = rig.device.stream().unwrap();
    let gate = rig.machine.gate(one);
    for sequence in [first, second] {
        resize(&mut rig, sequence, 30, one);
        let again = rig.cache.resize(sequence, &Budget::Slots(40), rig.stream).unwrap_err();
        let truncated = rig.cache.truncate(sequence, 140, rig.stream).unwrap_err();
        for (error, operation) in [(again, "resize"), (truncated, "truncate")] {
            assert_eq!((error.kind(), error.operation()), (Kind::Busy, operation));
            assert_eq!(error.place(), "the last resize of the sequence is in flight");
        }
        assert_eq!(rig.cache.budgets(sequence).unwrap(), [30; 2]);
    }
    // A fork stages nothing for its parent, and a step follows on the device.
    let child = rig.fork(first, 8);
    let step = enqueue(&mut rig, second, 1, 100);
    rig.cache.close(first, rig.stream).unwrap();
    assert_eq!((rig.cache.reap(rig.stream).unwrap(), blocks(&rig)), (1, 3), "its lane is still staged");
    assert_eq!(rig.cache.open(&Rig::asks(20, 8)).unwrap_err().place(), "lanes");
    gate.open();
    rig.machine.sync(one);
    rig.sync();
    assert_eq!((rig.cache.reap(rig.stream).unwrap(), blocks(&rig)), (0, 2));
    retire(&mut rig, step);
    rig.truncate(second, 140);
    resize(&mut rig, second, 100, one);
    rig.decode(child, 0, 5).unwrap();
    for tag in [6, 7] {
        let step = enqueue(&mut rig, second, 1, 130 - tag);
        rig.sync();
        retire(&mut rig, step);
    }
    [second, child].into_iter().for_each(|sequence| rig.cache.close(sequence, rig.stream).unwrap());
    rig.sync();
    assert_eq!((rig.cache.reap(rig.stream).unwrap(), rig.gauges()), (0, start));
    rig.cache.validate().unwrap();
}

#[test]
fn a_call_that_stages_lists_is_busy_until_the_last_resize_has_run() {
    everywhere(calls_while_a_resize_is_queued);
}

/// Digests, counts and moved rows of steps with resizes between them.
fn lives(residency_only: bool) -> Vec<[u64; 4]> {
    let mut rig = Rig::on(Machine::host(false), Config { residency_only, ..roomy() });
    let sequence = admit(&mut rig, (PROMPT, 64), 1);
    let mut seen = Vec::new();
    for (number, slots) in (0..).zip([150, 20, 16, 129, 172, 40, 64, 65]) {
        for first in [number * 7, number * 13 % 120, 60] {
            let Enqueued { step, .. } = enqueue(&mut rig, sequence, 0, first);
            let (hits, misses) = rig.cache.retire(step, rig.stream).unwrap().total();
            let digest = rig.cache.digest(sequence).unwrap();
            seen.push([digest, hits, misses, rig.cache.stats().moved_rows]);
        }
        let stream = rig.stream;
        resize(&mut rig, sequence, slots, stream);
        rig.cache.validate().unwrap();
    }
    seen
}

#[test]
fn a_cache_without_row_bytes_resizes_as_one_with_them() {
    let seen = lives(true);
    assert_eq!(seen, lives(false));
    assert!(seen.last().unwrap()[3] > 20, "rows must move: {seen:?}");
}
