//! The order of a dense cache's copies and steps: a watch sees every operation and what the engine's kernels touch, and
//! nothing has run yet when the next operation is enqueued. Each wait is left out in a run of its own.

use std::sync::Arc;

use forebay::check::watch::{Watch, bytes};
use forebay::dense::{Cache, Config, Group, Open, Shape};
use forebay::device::clock::{ClockDevice, ClockOptions, Costs};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice, Stream};
use forebay::{Accepted, BatchRow, Memory, MicroBatch, Result, Sequence, Step, Tokens};

const PAGE: u32 = 16;

/// A cache on a watched clock: what is enqueued runs when a scenario says so.
pub struct Rig {
    pub watch: Arc<Watch>,
    clock: Arc<ClockDevice>,
    pub cache: Cache,
    /// The streams of the two micro-batches, and two for copies.
    pub streams: [Stream; 4],
    /// The calls so far, each with the number of its first wait.
    calls: Vec<(&'static str, u64)>,
}

pub const SIDE: usize = 2;
pub const OTHER: usize = 3;

impl Rig {
    /// With more than one layer pages come back layer by layer.
    fn new(without: Option<u64>, (device_pages, host_pages): (u32, u32), layers: u32) -> Rig {
        let host = HostDevice::new(HostOptions::default());
        // A query does not make work end.
        let costs = Costs { poll_ns: 1.0, ..Costs::default() };
        let clock = ClockDevice::over(host, ClockOptions { costs, ..ClockOptions::default() }).unwrap();
        let watch = match without {
            Some(wait) => Watch::without_wait(clock.clone(), wait),
            None => Watch::new(clock.clone()),
        };
        let group = Group { layers: (0..layers).collect(), runs: [16, 16], window: None };
        let base = Config::new(Shape { page_tokens: PAGE, groups: vec![group] }, 4, 64);
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let mut config = Config { step_tokens: 64, micro_batches: 2, bring_layers: 1, memory, ..base };
        (config.device_pages, config.host_pages) = (vec![device_pages], vec![host_pages]);
        let cache = Cache::new(config, watch.clone()).unwrap();
        let streams = [(); 4].map(|()| watch.stream().unwrap());
        Rig { watch, clock, cache, streams, calls: Vec::new() }
    }

    pub fn name(&mut self, call: &'static str) {
        self.calls.push((call, self.watch.waits()));
    }

    /// Everything that was enqueued runs to its end, and the host has learnt it.
    pub fn run(&self) {
        self.clock.run().unwrap();
        self.streams.iter().for_each(|stream| self.watch.ended(*stream));
    }

    /// The bytes of rows `from..to` of a sequence, in all layers.
    pub fn rows(&self, sequence: Sequence, from: u32, to: u32) -> Vec<Slice> {
        let layers = 0..self.cache.config().shape.layers() as u32;
        layers.flat_map(|layer| self.layer(sequence, layer, from, to)).collect()
    }

    fn layer(&self, sequence: Sequence, layer: u32, from: u32, to: u32) -> Vec<Slice> {
        let planes: Vec<_> = self.cache.planes(0).unwrap().collect();
        let views = [0, 1].map(|run| self.cache.config().view(layer, run).unwrap());
        let pages = self.cache.pages(sequence, 0).unwrap();
        let place = |position: u32| {
            let page = u64::from(pages[(position / PAGE) as usize]);
            views.map(|view| {
                let at = page * view.stride + view.offset + u64::from(position % PAGE) * view.row;
                planes[view.plane].memory.part(at, view.row).unwrap()
            })
        };
        (from..to).flat_map(place).collect()
    }

    /// A step of one sequence with `before` rows, and the engine's kernels: they write the new rows and read all.
    pub fn step(
        &mut self,
        call: &'static str,
        micro: u32,
        of: Sequence,
        (before, accepted): (u32, u32),
        fresh: u32,
    ) -> Result<Step> {
        self.name(call);
        let stream = self.streams[micro as usize];
        let row = BatchRow { sequence: of, accepted: Accepted::Rows(accepted), query_rows: fresh };
        let mut step = self.cache.prepare(MicroBatch(micro), &[row], None, stream)?;
        let tensors = self.cache.tensors(MicroBatch(micro)).unwrap();
        let parts = [tensors.tables[0], tensors.slots[0], tensors.positions, tensors.lengths, tensors.starts];
        let reads = |slices: &[Slice]| slices.iter().map(|slice| bytes(slice, false)).collect::<Vec<_>>();
        for layer in 0..self.cache.config().shape.layers() as u32 {
            self.cache.arrived(&step, layer, stream)?;
            let new = self.layer(of, layer, before, before + fresh);
            let writes: Vec<_> = new.iter().map(|slice| bytes(slice, true)).collect();
            self.watch.engine(stream, "writing rows", &[reads(&parts), writes].concat())?;
            let all = self.layer(of, layer, 0, before + fresh);
            self.watch.engine(stream, "attention", &[reads(&parts), reads(&all)].concat())?;
        }
        self.cache.finish(&mut step, stream)?;
        Ok(step)
    }

    pub fn retire(&mut self, step: Step) -> Result<()> {
        self.run();
        self.cache.retire(step, self.streams[0]).map(drop).map_err(|unretired| unretired.error)
    }

    /// A sequence with names whose prompt is `ids`; the first rows may come from a tier.
    pub fn open(
        &mut self,
        call: &'static str,
        ids: &[u32],
        prompt: u32,
        stream: usize,
    ) -> Result<(Sequence, u32)> {
        self.name(call);
        let names = self.cache.names(b"", Tokens::new(ids)).unwrap();
        let open = Open { prompt, promised: 62 - prompt };
        let opened = self.cache.open_shared(&open, &names, self.streams[stream])?;
        Ok((opened.sequence, opened.found.tokens))
    }

    /// A sequence of 40 tokens with its two full pages published.
    pub fn published(&mut self, ids: &[u32]) -> Result<Sequence> {
        let (sequence, _) = self.open("opening", &ids[..32], 40, 0)?;
        let step = self.step("the prompt", 0, sequence, (0, 0), 40)?;
        self.retire(step)?;
        let step = self.step("a token", 0, sequence, (40, 40), 1)?;
        self.retire(step)?;
        assert_eq!(self.cache.publish(sequence, 0, Tokens::new(&ids[..32]))?, 32);
        Ok(sequence)
    }

    /// Two other sequences take all pages, and are gone without a step.
    fn take_all(&mut self, stream: usize) -> Result<()> {
        let others = [8, 9].map(|id| self.open("others", &[id; 32], 60, 0));
        others.into_iter().try_for_each(|other| self.close(other?.0, stream))
    }

    pub fn save(&mut self, stream: usize) -> Result<()> {
        self.name("saving");
        assert!(self.cache.save(self.streams[stream], u64::MAX)? > 0);
        Ok(())
    }

    pub fn close(&mut self, sequence: Sequence, stream: usize) -> Result<()> {
        self.name("closing");
        self.cache.close(sequence, self.streams[stream])
    }
}

/// Runs a scenario whole and without each wait. For each call with waits that matter: how many of its waits are missed.
#[track_caller]
pub fn missed(pages: (u32, u32), scenario: fn(&mut Rig) -> Result<()>) -> Vec<(&'static str, u32)> {
    missed_of(pages, 1, scenario)
}

#[track_caller]
pub fn missed_of(
    pages: (u32, u32),
    layers: u32,
    scenario: fn(&mut Rig) -> Result<()>,
) -> Vec<(&'static str, u32)> {
    let mut whole = Rig::new(None, pages, layers);
    scenario(&mut whole).unwrap();
    assert_eq!(whole.watch.conflict(), None);
    whole.cache.validate().unwrap();
    let mut missed: Vec<(&'static str, u32)> = Vec::new();
    for wait in 0..whole.watch.waits() {
        let mut rig = Rig::new(Some(wait), pages, layers);
        let found = scenario(&mut rig).is_err();
        assert_eq!(rig.watch.conflict().is_some(), found, "only for a conflict");
        let (call, _) = whole.calls.iter().rfind(|(_, first)| *first <= wait).unwrap();
        if found {
            match missed.last_mut().filter(|(last, _)| last == call) {
                Some((_, count)) => *count += 1,
                None => missed.push((call, 1)),
            }
        }
    }
    missed
}

pub const IDS: [u32; 48] = [7; 48];

/// The pages of a closed sequence are evicted for another, while they still go down.
#[test]
fn a_step_writes_to_an_evicted_page_after_its_copy_to_the_host() {
    let found = missed((5, 4), |rig| {
        let first = rig.published(&IDS)?;
        rig.save(SIDE)?;
        rig.close(first, 0)?;
        let (second, _) = rig.open("opening in its place", &[8; 32], 40, 0)?;
        let _step = rig.step("writing to its pages", 0, second, (0, 0), 40)?;
        Ok(())
    });
    assert_eq!(found, [("writing to its pages", 1)]);
}

/// A published prefix comes back on a stream beside the steps, to pages that another sequence has just left; a third
/// sequence shares it before it has come. Each step waits for the copies itself.
#[test]
fn pages_come_back_after_their_last_use_and_are_read_after_that() {
    let found = missed((9, 4), |rig| {
        let first = rig.published(&IDS)?;
        rig.save(SIDE)?;
        rig.close(first, 0)?;
        rig.run();
        // Two others take all pages. The engine still reads them on its stream when they are closed there.
        let others = [8, 9].map(|id| rig.open("others", &[id; 32], 60, 0));
        for other in others {
            let (other, _) = other?;
            let rows = rig.rows(other, 0, 60);
            let reads: Vec<_> = rows.iter().map(|slice| bytes(slice, false)).collect();
            rig.watch.engine(rig.streams[0], "another reader", &reads)?;
            rig.close(other, 0)?;
        }
        let (third, tokens) = rig.open("bringing back", &IDS[..32], 33, SIDE)?;
        let (fourth, shared) = rig.open("sharing", &IDS[..32], 33, OTHER)?;
        assert_eq!((tokens, shared, rig.cache.stats().bytes_up), (32, 32, 1024));
        let _step = rig.step("the third's step", 0, third, (32, 0), 1)?;
        rig.step("the fourth's step", 1, fourth, (32, 0), 1).map(drop)
    });
    assert_eq!(found, [("bringing back", 1), ("the third's step", 1), ("the fourth's step", 1)]);
}

/// A page goes down on two streams, and its host page goes to others while it still comes up.
#[test]
fn host_pages_are_written_after_the_copies_that_read_them() {
    let found = missed((8, 4), |rig| {
        let first = rig.published(&IDS)?;
        rig.save(SIDE)?;
        rig.close(first, 0)?;
        rig.run();
        // Two sequences that evict it from the device.
        for id in [8, 9] {
            let (other, _) = rig.open("others", &[id; 32], 60, 0)?;
            let step = rig.step("a prompt", 0, other, (0, 0), 60)?;
            rig.retire(step)?;
            rig.cache.publish(other, 0, Tokens::new(&[id; 48]))?;
            rig.close(other, 0)?;
            rig.run();
        }
        let (_, tokens) = rig.open("bringing back", &IDS[..32], 33, OTHER)?;
        assert_eq!((tokens, rig.cache.stats().bytes_up), (32, 1024));
        // The host has no more room: the oldest pages go, those that come up among them.
        rig.save(SIDE)?;
        rig.run();
        Ok(())
    });
    assert_eq!(found, [("saving", 1)]);
}

/// A fork copies the partial page on a stream of its own: the parent writes to it later, and the child to its copy.
#[test]
fn steps_of_parent_and_child_come_after_the_copy_of_their_page() {
    let found = missed((12, 4), |rig| {
        let parent = rig.published(&IDS)?;
        rig.name("truncating");
        drop(rig.cache.truncate(parent, 41, rig.streams[0])?);
        rig.run();
        rig.name("forking");
        let (child, _ticket) = rig.cache.fork(parent, 8, rig.streams[SIDE])?;
        let _step = rig.step("the parent's step", 0, parent, (41, 0), 1)?;
        rig.step("the child's step", 1, child, (41, 0), 1).map(drop)
    });
    assert_eq!(found, [("the parent's step", 1), ("the child's step", 1)]);
}

/// A truncation inside a page that others share copies it, to a page that still goes down.
#[test]
fn a_truncation_copies_to_a_page_after_the_copy_that_reads_it() {
    let found = missed((9, 4), |rig| {
        let gone = rig.published(&[9; 48])?;
        rig.close(gone, 0)?;
        rig.run();
        let first = rig.published(&IDS)?;
        let _shares = rig.open("sharing", &IDS[..32], 33, 0)?;
        rig.save(SIDE)?;
        rig.name("truncating");
        drop(rig.cache.truncate(first, 20, rig.streams[OTHER])?);
        rig.step("a step after it", 0, first, (20, 0), 1).map(drop)
    });
    assert_eq!(found, [("truncating", 1), ("a step after it", 1)]);
}

/// The pages of a sequence that was closed on one stream are written by a step on another.
#[test]
fn a_step_writes_to_pages_after_the_close_that_left_them() {
    let found = missed((5, 4), |rig| {
        let first = rig.published(&IDS)?;
        let reads: Vec<_> = rig.rows(first, 0, 41).iter().map(|slice| bytes(slice, false)).collect();
        rig.watch.engine(rig.streams[OTHER], "another reader", &reads)?;
        rig.close(first, OTHER)?;
        let (second, _) = rig.open("opening in its place", &[8; 32], 40, 0)?;
        rig.step("writing to its pages", 0, second, (0, 0), 40).map(drop)
    });
    assert_eq!(found, [("writing to its pages", 1)]);
}

/// Steps of a micro-batch use the same tensors, whatever streams they are on.
#[test]
fn a_micro_batchs_step_comes_after_its_last_one() {
    let found = missed((9, 4), |rig| {
        let (first, _) = rig.open("opening", &[], 40, 0)?;
        let (second, _) = rig.open("opening", &[], 40, 0)?;
        let _step = rig.step("a step", 0, first, (0, 0), 40)?;
        rig.streams.swap(0, OTHER);
        rig.step("a step on another stream", 0, second, (0, 0), 40).map(drop)
    });
    assert_eq!(found, [("a step on another stream", 1)]);
}

/// Pages go down on two streams, one batch after the other: the last event covers both.
#[test]
fn a_batch_of_copies_comes_after_the_one_before_it() {
    let found = missed((9, 4), |rig| {
        for id in [7, 8] {
            let sequence = rig.published(&[id; 48])?;
            rig.close(sequence, 0)?;
        }
        rig.run();
        rig.name("the first batch");
        assert_eq!(rig.cache.save(rig.streams[SIDE], 1024)?, 1024);
        rig.name("the second batch");
        assert_eq!(rig.cache.save(rig.streams[OTHER], 1024)?, 1024);
        // Their steps take pages of both.
        for micro in [0, 1] {
            let (other, _) = rig.open("opening in their place", &[5; 32], 60, 0)?;
            let _step = rig.step("writing to their pages", micro, other, (0, 0), 60)?;
        }
        Ok(())
    });
    assert_eq!(found, [("the second batch", 1), ("writing to their pages", 1)]);
}

/// A prefix comes back to pages that still go down, from host pages that are still filled.
#[test]
fn pages_come_back_after_the_copies_down_of_both_their_pages() {
    let found = missed((9, 4), |rig| {
        let first = rig.published(&IDS)?;
        rig.close(first, 0)?;
        rig.run();
        rig.save(SIDE)?;
        rig.take_all(OTHER)?;
        let (third, tokens) = rig.open("bringing back", &IDS[..32], 33, OTHER)?;
        assert_eq!((tokens, rig.cache.stats().bytes_up), (32, 1024));
        rig.step("its step", 0, third, (32, 0), 1).map(drop)
    });
    assert_eq!(found, [("bringing back", 1), ("its step", 1)]);
}

/// The page of a fork's partial copy still goes down for another.
#[test]
fn a_fork_copies_to_a_page_after_the_copy_that_reads_it() {
    let found = missed((9, 4), |rig| {
        let gone = rig.published(&[9; 48])?;
        rig.close(gone, 0)?;
        rig.run();
        let parent = rig.published(&IDS)?;
        rig.name("truncating");
        drop(rig.cache.truncate(parent, 41, rig.streams[0])?);
        let _takes = rig.open("sharing", &IDS[..32], 33, 0)?;
        rig.save(SIDE)?;
        rig.name("forking");
        let (child, _ticket) = rig.cache.fork(parent, 1, rig.streams[OTHER])?;
        rig.step("the child's step", 1, child, (41, 0), 1).map(drop)
    });
    assert_eq!(found, [("forking", 1), ("the child's step", 1)]);
}

/// A fork keeps pages that its parent publishes later. The parent is gone and its blocks are evicted, while the pages
/// still go down: who publishes a page is not who rewrites it.
#[test]
fn a_truncation_follows_the_copies_of_pages_that_another_sequence_published() {
    let found = missed((10, 8), |rig| {
        let gone = rig.published(&[9; 48])?;
        let (parent, _) = rig.open("opening", &[], 32, 0)?;
        let step = rig.step("the prompt", 0, parent, (0, 0), 32)?;
        rig.retire(step)?;
        drop(rig.cache.truncate(parent, 32, rig.streams[0])?);
        let (child, _ticket) = rig.cache.fork(parent, 8, rig.streams[0])?;
        assert_eq!(rig.cache.publish(parent, 0, Tokens::new(&IDS[..32]))?, 32);
        rig.save(SIDE)?;
        rig.close(parent, 0)?;
        rig.close(gone, 0)?;
        let small = Open { prompt: 10, promised: 10 };
        rig.cache.open(&Open { prompt: 40, promised: 22 })?;
        rig.cache.open(&small)?;
        assert_eq!((rig.cache.stats().tiers[0].published, rig.cache.stats().free_pages[0]), (0, 0));
        drop(rig.cache.truncate(child, 20, rig.streams[OTHER])?);
        rig.step("a step after it", 1, child, (20, 0), 1).map(drop)
    });
    assert_eq!(found, [("a step after it", 1)]);
}

/// A prefix comes back layer by layer; another sequence shares it before it has come. Each layer of both waits.
#[test]
fn each_layer_is_read_after_its_own_copy() {
    let found = missed_of((9, 4), 3, |rig| {
        let first = rig.published(&IDS)?;
        rig.save(SIDE)?;
        rig.close(first, 0)?;
        rig.run();
        rig.take_all(0)?;
        let (third, tokens) = rig.open("bringing back", &IDS[..32], 33, SIDE)?;
        let (fourth, shared) = rig.open("sharing", &IDS[..32], 33, OTHER)?;
        assert_eq!((tokens, shared, rig.cache.stats().bytes_up), (32, 32, 3072));
        let _step = rig.step("the third's step", 0, third, (32, 0), 1)?;
        let _step = rig.step("the fourth's step", 1, fourth, (32, 0), 1)?;
        // Later steps come behind the first, on any stream.
        rig.streams.swap(1, SIDE);
        rig.step("its next step", 1, fourth, (33, 1), 1).map(drop)
    });
    assert_eq!(found, [("the third's step", 3), ("the fourth's step", 3), ("its next step", 1)]);
}

/// The pages of a parked sequence are written by another one while they go down, and so are those to which they come
/// back.
#[test]
fn parked_pages_are_written_after_their_copies_and_read_after_they_came_back() {
    let found = missed((5, 8), |rig| {
        let first = rig.published(&IDS)?;
        rig.name("parking");
        drop(rig.cache.park(first, 1, rig.streams[SIDE])?);
        let (second, _) = rig.open("opening in its place", &[8; 32], 40, 0)?;
        let _step = rig.step("writing to its pages", 0, second, (0, 0), 40)?;
        rig.run();
        rig.cache.retire(_step, rig.streams[0]).unwrap();
        rig.name("parking the second");
        drop(rig.cache.park(second, 40, rig.streams[SIDE])?);
        rig.name("resuming");
        drop(rig.cache.resume(first, rig.streams[OTHER])?);
        rig.step("its step", 1, first, (41, 0), 1).map(drop)
    });
    assert_eq!(found, [("writing to its pages", 1), ("resuming", 1), ("its step", 1)]);
}

/// The engine still reads the pages on the stream on which a sequence is parked.
#[test]
fn parked_pages_are_written_after_the_work_before_the_parking() {
    let found = missed((5, 8), |rig| {
        let first = rig.published(&IDS)?;
        drop(rig.cache.truncate(first, 32, rig.streams[0])?);
        rig.save(SIDE)?;
        rig.run();
        let reads: Vec<_> = rig.rows(first, 0, 32).iter().map(|slice| bytes(slice, false)).collect();
        rig.watch.engine(rig.streams[OTHER], "another reader", &reads)?;
        rig.clock.hold(rig.streams[OTHER])?;
        rig.name("parking");
        drop(rig.cache.park(first, 0, rig.streams[OTHER])?);
        assert_eq!(rig.cache.stats().bytes_down, 1024, "nothing else goes down");
        let (second, _) = rig.open("opening in its place", &[8; 32], 60, 0)?;
        rig.step("writing to its pages", 0, second, (0, 0), 60).map(drop)
    });
    assert_eq!(found, [("writing to its pages", 1)]);
}

/// A resumed sequence leaves its own host pages: others go down to them while they still come up.
#[test]
fn host_pages_of_a_resumed_sequence_are_written_after_its_copies() {
    let found = missed((9, 4), |rig| {
        let other = rig.published(&[9; 48])?;
        let (first, _) = rig.open("opening", &[], 40, 0)?;
        let step = rig.step("its prompt", 0, first, (0, 0), 40)?;
        rig.retire(step)?;
        rig.name("parking");
        drop(rig.cache.park(first, 40, rig.streams[SIDE])?);
        rig.run();
        rig.name("resuming");
        drop(rig.cache.resume(first, rig.streams[OTHER])?);
        rig.save(SIDE)?;
        rig.close(other, 0)?;
        rig.run();
        Ok(())
    });
    assert_eq!(found, [("saving", 1)]);
}

/// The blocks of a parked sequence come back for another one, and are shared while they come.
#[test]
fn a_resumed_sequence_shares_pages_that_still_come_back() {
    let found = missed((9, 4), |rig| {
        let first = rig.published(&IDS)?;
        drop(rig.cache.truncate(first, 32, rig.streams[0])?);
        rig.save(SIDE)?;
        drop(rig.cache.park(first, 0, rig.streams[SIDE])?);
        rig.take_all(0)?;
        rig.run();
        let (_, tokens) = rig.open("bringing back", &IDS[..32], 33, SIDE)?;
        assert_eq!((tokens, rig.cache.stats().bytes_up), (32, 1024));
        rig.name("resuming");
        drop(rig.cache.resume(first, rig.streams[OTHER])?);
        assert_eq!(rig.cache.stats().bytes_up, 1024);
        rig.step("its step", 1, first, (32, 0), 1).map(drop)
    });
    assert_eq!(found, [("its step", 1)]);
}

/// A sequence whose pages have come back is truncated inside one of them before its first step.
#[test]
fn the_first_step_comes_after_a_truncation_of_pages_that_came_back() {
    let found = missed((10, 4), |rig| {
        let first = rig.published(&IDS)?;
        rig.save(SIDE)?;
        rig.close(first, 0)?;
        rig.take_all(0)?;
        rig.run();
        let (third, tokens) = rig.open("bringing back", &IDS[..32], 33, SIDE)?;
        let (_shares, shared) = rig.open("sharing", &IDS[..32], 33, SIDE)?;
        assert_eq!((tokens, shared), (32, 32));
        rig.run();
        rig.name("truncating");
        drop(rig.cache.truncate(third, 20, rig.streams[OTHER])?);
        rig.step("its step", 0, third, (20, 0), 1).map(drop)
    });
    assert_eq!(found, [("its step", 1)]);
}

/// A sequence is closed while its ticket is pending; a call that names another stream gives its pages back.
#[test]
fn pages_that_are_given_back_later_are_written_after_the_stream_of_the_close() {
    let found = missed((7, 4), |rig| {
        let first = rig.published(&IDS)?;
        drop(rig.cache.truncate(first, 41, rig.streams[0])?);
        rig.run();
        let (child, ticket) = rig.cache.fork(first, 8, rig.streams[SIDE])?;
        let other = rig.streams[OTHER];
        rig.clock.hold(other)?;
        rig.name("reading");
        let forked = rig.watch.event()?;
        rig.watch.record(forked, rig.streams[SIDE])?;
        rig.watch.wait(other, forked)?;
        let reads: Vec<_> = rig.rows(child, 32, 41).iter().map(|slice| bytes(slice, false)).collect();
        rig.watch.engine(other, "another reader", &reads)?;
        rig.close(child, OTHER)?;
        assert_eq!(rig.cache.stats().free_pages[0], 0);
        // The copy has ended; the reader has not.
        rig.watch.synchronize(forked)?;
        assert!(ticket.poll().is_some());
        rig.name("reaping");
        assert_eq!((rig.cache.reap(rig.streams[0])?, rig.cache.stats().free_pages[0]), (0, 2));
        let second = rig.cache.open(&Open { prompt: 20, promised: 8 })?;
        let step = rig.step("writing to its pages", 0, second, (0, 0), 20);
        rig.clock.let_go(other)?;
        step.map(drop)
    });
    assert_eq!(found, [("reading", 1), ("reaping", 1)]);
}

/// A sequence whose pages have come back is forked inside one of them before its first step.
#[test]
fn the_first_step_comes_after_the_fork_of_pages_that_came_back() {
    let found = missed((9, 8), |rig| {
        let parent = rig.published(&IDS)?;
        drop(rig.cache.park(parent, 1, rig.streams[SIDE])?);
        rig.run();
        drop(rig.cache.resume(parent, rig.streams[SIDE])?);
        rig.run();
        rig.name("forking");
        let (child, _ticket) = rig.cache.fork(parent, 8, rig.streams[OTHER])?;
        let _step = rig.step("the parent's step", 0, parent, (41, 0), 1)?;
        rig.step("the child's step", 1, child, (41, 0), 1).map(drop)
    });
    assert_eq!(found, [("the parent's step", 1), ("the child's step", 1)]);
}
