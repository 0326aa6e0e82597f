//! The steps of a dense cache: a loop that decodes drafts, slides its windows, publishes pages, and whose steps evict
//! published pages and copy them to the host's tier first.

use std::sync::Arc;

use forebay::dense::{Cache, Config, Group, Open, Save, Shape, Way};
use forebay::device::{Device, Event, Slice, Stream};
use forebay::{Accepted, BatchRow, Memory, MicroBatch, Sequence, Tokens};

use crate::counted;

const SEQUENCES: u32 = 3;
const TOKENS: u32 = 640;
const PROMPT: u32 = 40;

struct Loop {
    cache: Cache,
    device: Arc<dyn Device>,
    stream: Stream,
    done: Event,
    accepted: Slice,
    sequences: Vec<(Sequence, Vec<u32>)>,
}

impl Loop {
    fn new(device: Arc<dyn Device>) -> Loop {
        let group = |layers: &[u32], window| Group { layers: layers.to_vec(), runs: [32, 32], window };
        let groups = vec![group(&[1], None), group(&[0, 2], Some(33))];
        let base = Config::new(Shape { page_tokens: 16, groups }, SEQUENCES, TOKENS);
        let memory = Memory { huge: false, populate: true, lock: false, node: None };
        let mut config = Config { query_rows: 2, step_tokens: PROMPT, save: Save::Evicted, memory, ..base };
        config.device_pages = config.pages_for(SEQUENCES, TOKENS);
        // The windows of all sequences leave more published pages than the host has room for.
        config.host_pages = vec![TOKENS / 16; 2];
        let stream = device.stream().unwrap();
        let mut cache = Cache::new(config, Arc::clone(&device)).unwrap();
        let names = cache.names(b"", Tokens::new(&[])).unwrap();
        let open = Open { prompt: PROMPT, promised: TOKENS - PROMPT };
        let sequences = (0..SEQUENCES).map(|sequence| {
            let opened = cache.open_shared(&open, &names, stream).unwrap();
            (opened.sequence, (0..TOKENS).map(|at| sequence * TOKENS + at).collect())
        });
        let sequences = sequences.collect();
        let accepted = device.allocate(u64::from(4 * SEQUENCES)).unwrap();
        Loop { cache, done: device.event().unwrap(), stream, accepted, sequences, device }
    }

    /// One step of the batch, from prepare to retire, with its pages published. Tokens accepted on the device are none:
    /// the tensor is zeros.
    fn step(&mut self, accepted: Accepted, query_rows: u32, rows: std::ops::Range<usize>) {
        let row = |at: usize| BatchRow { sequence: self.sequences[at].0, accepted, query_rows };
        let batch = [row(rows.start), row((rows.start + 1).min(2)), row(2)];
        let tensor = (accepted == Accepted::OnDevice).then_some(self.accepted);
        let mut step = self.cache.prepare(MicroBatch(0), &batch[..rows.len()], tensor, self.stream).unwrap();
        self.cache.finish(&mut step, self.stream).unwrap();
        let mut left = Some(step);
        while let Some(step) = left.take() {
            // Sometimes too early on a threaded device; the refusal allocates nothing either.
            if let Err(unretired) = self.cache.retire(step, self.stream) {
                left = Some(unretired.step.unwrap());
            }
        }
        for (sequence, ids) in &self.sequences[rows] {
            let length = self.cache.length(*sequence).unwrap();
            let known = &ids[length.published as usize..length.committed as usize];
            self.cache.publish(*sequence, length.published, Tokens::new(known)).unwrap();
        }
    }

    fn decode(&mut self, steps: std::ops::Range<u32>) {
        for step in steps {
            let accepted =
                if step.is_multiple_of(7) { Accepted::OnDevice } else { Accepted::Rows(1 + step % 2) };
            self.step(accepted, 2, 0..3);
        }
    }

    fn wait(&self) {
        self.device.record(self.done, self.stream).unwrap();
        self.device.synchronize(self.done).unwrap();
    }
}

/// The allocations and frees of steps of a warm dense cache.
pub fn steps(device: Arc<dyn Device>) -> u64 {
    let mut own = Loop::new(device);
    for at in 0..3 {
        own.step(Accepted::Rows(0), PROMPT, at..at + 1);
        own.step(Accepted::Rows(PROMPT), 1, at..at + 1);
    }
    own.step(Accepted::Rows(1), 2, 0..3);
    // Until pages are evicted in every few steps.
    own.decode(1..120);
    own.wait();
    let before = own.cache.stats();
    let calls = counted(|| own.decode(120..390));
    own.wait();
    let after = own.cache.stats();
    assert!(own.sequences.iter().all(|(sequence, _)| own.cache.length(*sequence).unwrap().committed > 450));
    // Pages were evicted, in the windows' group alone, and more of them than the host's tier keeps.
    let bytes = 2 * 64 * 16;
    let copied = (after.bytes_down - before.bytes_down) / bytes;
    assert!(copied > u64::from(TOKENS / 16), "{copied} pages went down");
    assert_eq!((after.tiers[1].free_host_pages, after.tiers[0].saved), (0, 0));
    own.cache.validate().unwrap();
    calls
}

/// The allocations and frees while the rows of a sequence arrive through the host, layer by layer, and in its first
/// step, which waits for each layer.
pub fn arrival(device: Arc<dyn Device>) -> u64 {
    let group = |layers: &[u32], window| Group { layers: layers.to_vec(), runs: [32, 32], window };
    let groups = vec![group(&[1], None), group(&[0, 2], Some(33))];
    let base = Config::new(Shape { page_tokens: 16, groups }, 1, PROMPT + 8);
    let memory = Memory { huge: false, populate: true, lock: false, node: None };
    let mut cache =
        Cache::new(Config { bring_layers: 1, host_pages: vec![3; 2], memory, ..base }, Arc::clone(&device))
            .unwrap();
    let (stream, done) = (device.stream().unwrap(), device.event().unwrap());
    let wait = || {
        device.record(done, stream).unwrap();
        device.synchronize(done).unwrap();
    };
    let mut calls = 0;
    for _ in 0..3 {
        let open = Open { prompt: PROMPT, promised: 8 };
        let (sequence, _ticket) = cache.arrive(&open, Way::Host, stream).unwrap();
        wait();
        calls = counted(|| {
            for layer in [2, 0, 1] {
                for (block, run) in (0..3).flat_map(|block| [(block, 0), (block, 1)]) {
                    cache.store(sequence, (layer, run), block, 0, &[7; 16 * 32]).unwrap();
                }
                cache.append_layer_in_place(sequence, layer, PROMPT).unwrap();
                cache.bring_layer(sequence, layer, stream).unwrap();
            }
        });
        let _ticket = cache.join(sequence, stream).unwrap();
        let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 };
        calls += counted(|| {
            let mut step = cache.prepare(MicroBatch(0), &[row], None, stream).unwrap();
            (0..3).for_each(|layer| cache.arrived(&step, layer, stream).unwrap());
            cache.finish(&mut step, stream).unwrap();
            let mut left = Some(step);
            while let Some(step) = left.take() {
                if let Err(unretired) = cache.retire(step, stream) {
                    left = Some(unretired.step.unwrap());
                }
            }
        });
        cache.close(sequence, stream).unwrap();
        wait();
        assert_eq!(cache.reap(stream).unwrap(), 0);
    }
    calls
}
