//! The order of everything that a random world does: a watch sees each operation of the cache and what the engine's
//! kernels touch, and nothing runs before the world asks for it.
//!
//! The control leaves out, one in a run, the waits that order something. Not each of them is missed: of two waits that
//! lead to the same work one is enough, and some order work that touches other memory. So the control counts which
//! conflicts are found, and asks that more than a quarter of the waits are missed. `order` leaves out each wait of
//! scenarios whose every wait is needed.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::device::TestDevice;
use crate::devices::over;
use crate::engine::{Expected, Kernels, Launch};
use crate::seeds;
use crate::world::{DONE, World};
use forebay::check::watch::{Watch, bytes};
use forebay::dense::Cache;
use forebay::device::clock::{ClockOptions, Costs};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Slice, Stream};
use forebay::{MicroBatch, Step};

/// Announces what each layer's kernels touch.
#[derive(Debug)]
struct Announces(Arc<Watch>);

/// The bytes of rows `from..to` of a sequence in a layer, one row after the other.
fn rows(kernels: &Kernels, pages: &[u32], (from, to): (usize, usize), layer: u32) -> Vec<Slice> {
    let page_tokens = kernels.config.shape.page_tokens as usize;
    let slot = |position: usize| {
        let page = pages[position / page_tokens];
        assert_ne!(page, 0, "position {position} has no page");
        page as usize * page_tokens + position % page_tokens
    };
    let group = kernels.group_of(layer);
    (from..to).flat_map(|at| kernels.places(group, slot(at) as u64, layer)).map(|(_, slice)| slice).collect()
}

impl Launch for Announces {
    fn launch(
        &self,
        kernels: &Kernels,
        cache: &mut Cache,
        (device, stream): (&dyn Device, Stream),
        (step, micro): (&Step, u32),
        expected: Vec<Expected>,
    ) {
        let (watch, expected) = (&self.0, Arc::new(expected));
        for layer in 0..kernels.config.shape.layers() as u32 {
            cache.arrived(step, layer, stream).unwrap();
            let (tensors, group) = (cache.tensors(MicroBatch(micro)).unwrap(), kernels.group_of(layer));
            let parts = [
                tensors.tables[group],
                tensors.slots[group],
                tensors.positions,
                tensors.lengths,
                tensors.starts,
            ];
            let (mut reads, mut writes) = (parts.to_vec(), Vec::new());
            for (row, sequence) in expected.iter().zip(&kernels.sequences) {
                let (pages, end) = (cache.pages(*sequence, group).unwrap(), row.stamps.len());
                writes.extend(rows(kernels, pages, (end - row.fresh, end), layer));
                reads.extend(rows(kernels, pages, (kernels.first_read(row, layer), end), layer));
            }
            let parts = parts.iter().map(|slice| bytes(slice, false));
            let writes: Vec<_> = parts.chain(writes.iter().map(|slice| bytes(slice, true))).collect();
            watch.engine(stream, "writing rows", &writes).unwrap();
            let reads: Vec<_> = reads.iter().map(|slice| bytes(slice, false)).collect();
            watch.engine(stream, "attention", &reads).unwrap();
            kernels.enqueue_layer(device, stream, tensors, &expected, layer);
        }
    }

    fn settles(&self, _: u32) -> bool {
        // Steps that are not retired would soon leave nothing to do.
        true
    }

    fn ended(&self, streams: &[Stream]) {
        streams.iter().for_each(|stream| self.0.ended(*stream));
    }
}

/// A world under a watch, without a wait if one is given.
fn watched(seed: u64, without: Option<u64>) -> (World, Arc<Watch>) {
    // A query does not make work end.
    let costs = Costs { poll_ns: 1.0, ..Costs::default() };
    let test = TestDevice::host(HostOptions::default());
    let (test, clock, device) = over(test, ClockOptions { costs, ..ClockOptions::default() });
    let watch = match without {
        Some(wait) => Watch::without_wait(device, wait),
        None => Watch::new(device),
    };
    let devices = (test, clock, Arc::clone(&watch) as Arc<dyn Device>);
    (World::over(seed, devices, Some(Arc::new(Announces(Arc::clone(&watch))))), watch)
}

#[test]
fn every_operation_of_a_random_world_is_ordered_after_those_that_it_must_follow() {
    let mut done = [0; DONE];
    for seed in seeds(40) {
        let (mut world, watch) = watched(seed, None);
        world.run(400);
        assert_eq!(watch.conflict(), None, "seed {seed}");
        done.iter_mut().zip(world.done).for_each(|(sum, done)| *sum += done);
    }
    assert!(done.iter().all(|done| *done > 2), "some operations were hardly tried: {done:?}");
}

/// A conflict without streams and places: what the operation does that came too early, and what the one does that it
/// had to follow.
fn named(conflict: &str) -> String {
    let did = |text: &str, verb: [&str; 2]| {
        let (name, rest) = text.split_once(" (stream ").unwrap();
        let verb = verb.into_iter().find(|verb| rest.contains(&format!(" {verb}"))).unwrap();
        format!("{name} {verb}")
    };
    let (own, other) = conflict.split_once(", which ").unwrap();
    format!("{} what {}", did(own, ["reads", "writes"]), did(other, ["reads", "writes"]))
}

#[test]
fn control_waits_that_are_left_out_of_random_worlds_are_missed() {
    let (mut ordering, mut missed) = (0, BTreeMap::<String, u32>::new());
    for seed in seeds(200) {
        let (mut whole, watch) = watched(seed, None);
        whole.run(400);
        for wait in watch.ordering() {
            let (mut world, watch) = watched(seed, Some(wait));
            let ended = catch_unwind(AssertUnwindSafe(|| world.run(400)));
            let conflict = watch.conflict();
            assert_eq!(conflict.is_some(), ended.is_err(), "seed {seed}, wait {wait}: only for a conflict");
            ordering += 1;
            if let Some(conflict) = conflict {
                *missed.entry(named(conflict.place())).or_default() += 1;
            }
        }
    }
    let all: u32 = missed.values().sum();
    assert!(4 * all > ordering, "{all} of {ordering}: {missed:#?}");
    // A page that still goes down, one that was copied for a fork or came up, and one that still comes up.
    for what in [
        "writing rows writes what copy pages reads",
        "writing rows writes what copy pages writes",
        "attention reads what copy pages writes",
    ] {
        assert!(missed.get(what).is_some_and(|times| *times > 10), "{what}: {missed:#?}");
    }
}
