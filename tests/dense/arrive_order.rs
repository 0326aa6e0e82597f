//! The order of arrivals: as in `order`, each wait is left out in a run of its own. A transfer is work of the engine on
//! the stream of the arrival, behind it, which needs no ticket.

use crate::order::{IDS, OTHER, Rig, SIDE, missed, missed_of};
use forebay::check::watch::bytes;
use forebay::dense::{Open, Way};
use forebay::device::Device;
use forebay::{Accepted, BatchRow, MicroBatch, Result, Sequence};

impl Rig {
    fn arrive(&mut self, prompt: u32, way: Way, stream: usize) -> Result<Sequence> {
        self.name("arriving");
        let open = Open { prompt, promised: 62 - prompt };
        self.cache.arrive(&open, way, self.streams[stream]).map(|(sequence, _)| sequence)
    }

    /// The engine writes all rows of a prompt to the device pages of the sequence.
    fn write(&mut self, sequence: Sequence, prompt: u32, stream: usize) -> Result<()> {
        let rows = self.rows(sequence, 0, prompt);
        let writes: Vec<_> = rows.iter().map(|slice| bytes(slice, true)).collect();
        self.watch.engine(self.streams[stream], "a transfer", &writes)
    }

    /// The engine writes whole host pages of the sequence.
    fn write_host(&mut self, sequence: Sequence, stream: usize) -> Result<()> {
        let all = self.cache.config().shape.page_bytes(0);
        let memory = self.cache.host_memory(0)?.unwrap();
        let pages = self.cache.host_pages(sequence, 0)?;
        let part = |page: u32| bytes(&memory.part(u64::from(page) * all, all).unwrap(), true);
        let writes: Vec<_> = pages.map(|(_, page)| part(page)).collect();
        self.watch.engine(self.streams[stream], "a transfer", &writes)
    }

    fn append(&mut self, sequence: Sequence, rows: u32) -> Result<()> {
        let layers = self.cache.config().shape.layers() as u32;
        (0..layers).try_for_each(|layer| self.cache.append_layer_in_place(sequence, layer, rows))
    }

    fn join(&mut self, sequence: Sequence, stream: usize) -> Result<()> {
        self.name("joining");
        self.cache.join(sequence, self.streams[stream]).map(drop)
    }
}

/// The pages of a closed sequence are evicted for one that arrives, while they still go down.
#[test]
fn a_transfer_writes_to_evicted_pages_after_their_copies_and_a_step_reads_after_the_join() {
    let found = missed((5, 4), |rig| {
        let first = rig.published(&IDS)?;
        rig.save(SIDE)?;
        rig.close(first, 0)?;
        let second = rig.arrive(40, Way::Direct, OTHER)?;
        rig.write(second, 40, OTHER)?;
        rig.append(second, 40)?;
        rig.join(second, OTHER)?;
        rig.step("its step", 0, second, (40, 0), 1).map(drop)
    });
    assert_eq!(found, [("arriving", 1), ("its step", 1)]);
}

/// A transfer on another stream than the one of the arrival, which the engine orders, and a join on a third one.
#[test]
fn a_step_reads_after_a_join_that_follows_the_transfer() {
    let found = missed((5, 4), |rig| {
        let second = rig.arrive(40, Way::Direct, SIDE)?;
        rig.write(second, 40, OTHER)?;
        rig.append(second, 40)?;
        rig.name("the engine");
        let written = rig.watch.event()?;
        rig.watch.record(written, rig.streams[OTHER])?;
        rig.watch.wait(rig.streams[1], written)?;
        rig.join(second, 1)?;
        let _step = rig.step("its step", 0, second, (40, 0), 1)?;
        // Later steps come behind the first one.
        rig.streams.swap(0, SIDE);
        rig.step("its next step", 0, second, (41, 1), 1).map(drop)
    });
    assert_eq!(found, [("the engine", 1), ("its step", 1), ("its next step", 1)]);
}

/// The engine still reads the pages on the stream on which a sequence was closed.
#[test]
fn a_transfer_writes_to_pages_after_the_close_that_left_them() {
    let found = missed((5, 4), |rig| {
        let first = rig.published(&IDS)?;
        let reads: Vec<_> = rig.rows(first, 0, 41).iter().map(|slice| bytes(slice, false)).collect();
        rig.watch.engine(rig.streams[OTHER], "another reader", &reads)?;
        rig.close(first, OTHER)?;
        let second = rig.arrive(40, Way::Direct, SIDE)?;
        rig.write(second, 40, SIDE)
    });
    assert_eq!(found, [("arriving", 1)]);
}

/// A resumed sequence comes up from host pages that one that arrives takes.
#[test]
fn a_transfer_writes_to_host_pages_after_copies_that_read_them() {
    let found = missed((9, 4), |rig| {
        let (first, _) = rig.open("opening", &[], 60, 0)?;
        let step = rig.step("its prompt", 0, first, (0, 0), 60)?;
        rig.retire(step)?;
        rig.name("parking");
        drop(rig.cache.park(first, 60, rig.streams[SIDE])?);
        rig.run();
        rig.name("resuming");
        drop(rig.cache.resume(first, rig.streams[OTHER])?);
        let second = rig.arrive(60, Way::Host, SIDE)?;
        rig.write_host(second, SIDE)
    });
    assert_eq!(found, [("arriving", 1)]);
}

/// Published pages still go down to host pages that one that arrives takes from them.
#[test]
fn a_transfer_writes_to_host_pages_after_copies_that_fill_them() {
    let found = missed((13, 4), |rig| {
        let both = [rig.published(&IDS)?, rig.published(&[9; 48])?];
        rig.save(SIDE)?;
        both.into_iter().try_for_each(|sequence| rig.close(sequence, 0))?;
        let second = rig.arrive(60, Way::Host, OTHER)?;
        rig.write_host(second, OTHER)
    });
    assert_eq!(found, [("arriving", 1)]);
}

/// Layers come up on two streams as they are whole, and each is read behind its own copy. The last one goes up with the
/// join.
#[test]
fn each_layer_that_arrived_is_read_after_its_own_copy() {
    let found = missed_of((9, 8), 3, |rig| {
        let second = rig.arrive(40, Way::Host, SIDE)?;
        rig.run();
        rig.append(second, 40)?;
        for (layer, stream) in [(0, SIDE), (1, OTHER)] {
            rig.name("bringing");
            rig.cache.bring_layer(second, layer, rig.streams[stream])?;
        }
        rig.join(second, SIDE)?;
        let _step = rig.step("its step", 0, second, (40, 0), 1)?;
        rig.streams.swap(0, SIDE);
        rig.step("its next step", 0, second, (41, 1), 1).map(drop)
    });
    assert_eq!(found, [("its step", 3), ("its next step", 1)]);
}

/// Layers that came up in another order: the wait for a layer is one for all before it.
#[test]
fn layers_that_came_in_another_order_are_read_after_their_copies() {
    let found = missed_of((9, 8), 3, |rig| {
        let second = rig.arrive(40, Way::Host, SIDE)?;
        rig.run();
        rig.append(second, 40)?;
        for layer in [1, 2, 0] {
            rig.name("bringing");
            rig.cache.bring_layer(second, layer, rig.streams[SIDE])?;
        }
        rig.join(second, SIDE)?;
        rig.step("its step", 0, second, (40, 0), 1).map(drop)
    });
    // Layer 0 came last, so its wait covers the others.
    assert_eq!(found, [("its step", 1)]);
}

/// An aborted sequence still comes up when its host pages are released, and others go down to them.
#[test]
fn released_host_pages_are_written_after_the_copies_of_the_aborted_sequence() {
    let found = missed((11, 4), |rig| {
        let other = rig.published(&[9; 48])?;
        let second = rig.arrive(60, Way::Host, SIDE)?;
        rig.run();
        rig.append(second, 60)?;
        rig.name("bringing");
        rig.cache.bring_layer(second, 0, rig.streams[SIDE])?;
        rig.name("aborting");
        let withheld = rig.cache.abort(second, rig.streams[SIDE])?;
        assert_eq!(rig.cache.release(withheld)?, 4);
        rig.save(OTHER)?;
        rig.close(other, 0)?;
        rig.run();
        rig.cache.reap(rig.streams[0]).map(drop)
    });
    assert_eq!(found, [("saving", 1)]);
}

/// A captured step waits for its last layer alone, which here came up first.
#[test]
fn a_wait_for_the_last_layer_is_one_for_all() {
    let found = missed_of((9, 8), 3, |rig| {
        let second = rig.arrive(40, Way::Host, SIDE)?;
        rig.run();
        rig.append(second, 40)?;
        for layer in [2, 0, 1] {
            rig.name("bringing");
            rig.cache.bring_layer(second, layer, rig.streams[SIDE])?;
        }
        rig.join(second, SIDE)?;
        rig.name("its step");
        let (stream, accepted) = (rig.streams[0], Accepted::Rows(0));
        let row = BatchRow { sequence: second, accepted, query_rows: 1 };
        let mut step = rig.cache.prepare(MicroBatch(0), &[row], None, stream)?;
        rig.cache.arrived(&step, 2, stream)?;
        let reads: Vec<_> = rig.rows(second, 0, 40).iter().map(|slice| bytes(slice, false)).collect();
        rig.watch.engine(stream, "a graph", &reads)?;
        rig.cache.finish(&mut step, stream)
    });
    assert_eq!(found, [("its step", 1)]);
}

/// A sequence that is closed while a layer comes up leaves its pages to others behind the copy.
#[test]
fn pages_of_a_closed_arrival_are_written_after_its_copies() {
    let found = missed((5, 8), |rig| {
        let second = rig.arrive(40, Way::Host, SIDE)?;
        rig.run();
        rig.append(second, 40)?;
        rig.name("bringing");
        rig.cache.bring_layer(second, 0, rig.streams[SIDE])?;
        rig.close(second, SIDE)?;
        assert_eq!(rig.cache.stats().free_pages[0], 0, "the copy is in flight");
        rig.run();
        rig.cache.reap(rig.streams[0])?;
        let third = rig.arrive(40, Way::Direct, OTHER)?;
        rig.write(third, 40, OTHER)
    });
    assert_eq!(found, []);
}
