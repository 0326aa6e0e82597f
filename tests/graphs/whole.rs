//! Whole models: 61 layers and a draft layer in one graph, and buckets smaller than the cache's batch.

use super::*;
use crate::device::driver_is_there;
use forebay::Buffers;
use forebay::Result;
use forebay::device::{SplitIndices, Stream};
use forebay::overlap::{EngineCall, OverlapStreams};

const TOP_K: u32 = 4;
const WHOLE: u32 = 61;

/// An engine that computes nothing: the selection is already in its buffer.
struct Idle;

impl Engine for Idle {
    fn enqueue(&mut self, _: &EngineCall, _: Stream) -> Result<()> {
        Ok(())
    }
}

struct Model {
    device: Arc<TestDevice>,
    cache: Cache,
    layers: Layers,
    ended: Event,
    sequences: Vec<Sequence>,
    by_layer: Vec<Overlap>,
}

impl Model {
    fn new(device: Arc<TestDevice>) -> Model {
        let shape = Shape {
            layers: WHOLE,
            draft_layers: 1,
            runs: [16, 0],
            index_key_bytes: 0,
            page_tokens: 16,
            top_k: TOP_K,
            ..Shape::DEEPSEEK_V3_2
        };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config = Config { memory, min_budget: 3, ..Config::new(shape, BATCH, 64, 64) };
        let mut cache = Cache::new(config, device.device()).unwrap();
        let (stream, words) =
            (|| device.stream().unwrap(), |n: u32| device.allocate(4 * u64::from(n)).unwrap());
        let streams =
            OverlapStreams { compute: stream(), resolve: stream(), gather: stream(), scatter: stream() };
        let entries = BATCH * TOP_K;
        let split_indices =
            Some(SplitIndices { lists: words(2 * entries), counts: words(2 * BATCH), batch: BATCH });
        let buffers = Buffers { selection: words(entries), slots: words(entries), split_indices };
        let layers = Layers { streams, batch: BATCH, half: 1, buffers };
        let open = Open { prompt: 30, promised: 20, budget: Budget::Slots(3), bring_up: BringUp::Nothing };
        let sequences = (0..BATCH).map(|_| {
            let sequence = cache.open(&open).unwrap();
            cache.append_in_place(sequence, 30).unwrap();
            let _ticket = cache.join(sequence, streams.compute, WarmUp::default()).unwrap();
            sequence
        });
        let sequences = sequences.collect();
        let by_layer = (0..WHOLE as usize + 1).map(|layer| Overlap::FIRST[layer % 3]).collect();
        Model { ended: device.event().unwrap(), device, cache, layers, sequences, by_layer }
    }

    fn capture(&mut self, batch: u32) -> Captured {
        let own = [(MicroBatch(0), Layers { batch, ..self.layers })];
        let capture =
            Capture { micro_batches: &own, query_rows: 1, by_layer: &self.by_layer, draft_passes: 1 };
        self.cache.capture(&capture, &mut Idle).unwrap()
    }

    /// One step of the first `rows` sequences. Returns its counters and the digests of all sequences.
    fn step(&mut self, number: u32, rows: u32, captured: Option<&Captured>) -> (Vec<LayerCount>, Vec<u64>) {
        let compute = self.layers.streams.compute;
        let selection: Vec<u8> =
            (0..BATCH * TOP_K).flat_map(|n| ((n * 7 + number * 5) % 30).to_le_bytes()).collect();
        self.device.write(self.layers.buffers.selection, &selection).unwrap();
        let accepted = Accepted::Rows(0);
        let row = |sequence: &Sequence| BatchRow { sequence: *sequence, accepted, query_rows: 1 };
        let batch: Vec<BatchRow> = self.sequences[..rows as usize].iter().map(row).collect();
        let mut step = self.cache.prepare(MicroBatch(0), 1, &batch, None, compute).unwrap();
        match captured {
            Some(captured) => {
                self.cache.launch(captured, &mut [&mut step]).unwrap();
                let again = self.cache.launch(captured, &mut [&mut step]).unwrap_err();
                assert_eq!(again.place(), "the step's layers have been launched");
            }
            None => {
                let mut with = [(&mut step, Layers { batch: rows, ..self.layers })];
                self.cache.overlap_steps(&mut with, &self.by_layer, 1, &mut Idle).unwrap();
            }
        }
        self.cache.finish(&mut step, compute).unwrap();
        self.device.record(self.ended, compute).unwrap();
        self.device.synchronize(self.ended).unwrap();
        let counts = self.cache.retire(step, compute).unwrap().layers().to_vec();
        let digests = self.sequences.iter().map(|sequence| self.cache.digest(*sequence).unwrap());
        let digests = digests.collect();
        (counts, digests)
    }
}

#[test]
fn whole_models_in_buckets_smaller_than_the_batch_have_the_same_result() {
    if !driver_is_there() {
        return;
    }
    let options = HostOptions::default();
    let mut host = Model::new(TestDevice::host(options));
    let mut gpu = Model::new(TestDevice::cuda(&options, Some(3)).unwrap());
    let buckets: Vec<(u32, Captured)> = [1, 2, 4].map(|batch| (batch, gpu.capture(batch))).into();
    for number in 0..12 {
        let rows = 1 + number * 3 % BATCH;
        let (_, bucket) = buckets.iter().find(|(batch, _)| *batch >= rows).unwrap();
        let (counts, digests) = gpu.step(number, rows, Some(bucket));
        assert_eq!((counts.len(), counts[60].misses > 0), (62, true));
        assert_eq!((counts, digests), host.step(number, rows, None), "step {number} of {rows} rows");
    }
    let row =
        |model: &Model| BatchRow { sequence: model.sequences[0], accepted: Accepted::Rows(0), query_rows: 1 };
    let rows = [row(&gpu), BatchRow { sequence: gpu.sequences[1], ..row(&gpu) }];
    let compute = gpu.layers.streams.compute;
    let mut wide = gpu.cache.prepare(MicroBatch(0), 1, &rows, None, compute).unwrap();
    let error = gpu.cache.launch(&buckets[0].1, &mut [&mut wide]).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::OutOfRange, "batch rows"));
    gpu.cache.launch(&buckets[1].1, &mut [&mut wide]).unwrap();
}

#[test]
fn a_bucket_that_is_captured_again_releases_its_old_graph() {
    if !driver_is_there() {
        return;
    }
    let mut model = Model::new(TestDevice::cuda(&HostOptions::default(), None).unwrap());
    let execs = |model: &Model| model.device.standin().map(|standin| standin.held_resources().execs);
    let old = model.capture(1);
    let held = execs(&model);
    let new = model.capture(4);
    assert_eq!(execs(&model), held.map(|execs| execs + 1), "both are there");
    drop(old);
    assert_eq!(execs(&model), held);
    assert_eq!(new.micro_batches()[0].1.batch, 4);
}
