//! The planner against published figures, against an oracle that counts, and against the pools themselves: a plan that
//! it says fits can be allocated.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay::os::page_size;
use forebay::predict::plan::{Batch, Demand, FEW_SLOTS, Note, Ratio, longest_context, plan};
use forebay::predict::setup::Setup;
use forebay::predict::weights::{Attention, Checkpoint, is_deployment};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Cache, Config, Kind, Layer, Memory, MicroBatch, Open, Result,
    Sequence, Shape, Share, Slots, Streams, WarmUp,
};
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

/// The ESS study's cache: 80 GiB of a GPU, two query rows, tables in addition.
fn ess(context: u32, batch: u32) -> Demand {
    Demand {
        query_rows: 2,
        micro_batches: 2,
        batch: Batch::Sequences(batch),
        count_tables: false,
        ..Demand::new(Shape::DEEPSEEK_V3_2, 80 * GIB, context)
    }
}

#[test]
fn the_ratio_column_of_the_ess_study_follows_from_one_budget() {
    let k = 1024;
    let rows = [
        (32 * k, 64, 0.82),
        (32 * k, 96, 0.48),
        (32 * k, 128, 0.31),
        (32 * k, 160, 0.21),
        (128 * k, 40, 0.21),
        (128 * k, 54, 0.10),
    ];
    for (context, batch, ratio) in rows {
        let planned = plan(&ess(context, batch)).unwrap();
        let digits = (planned.ratio * 100.0).round() / 100.0;
        assert_eq!(digits, ratio, "batch {batch}: {}", planned.ratio);
        assert!(planned.offloads() && planned.bytes.tables > 0);
        // Tables take little, but they do take something.
        let counted = plan(&Demand { count_tables: true, ..ess(context, batch) }).unwrap();
        assert!(counted.ratio < planned.ratio && counted.ratio > planned.ratio - 0.05, "{}", counted.ratio);
    }
    for (context, batch) in [(32 * k, 52), (128 * k, 13)] {
        let planned = plan(&ess(context, batch)).unwrap();
        assert_eq!((planned.ratio, planned.offloads()), (1.0, false));
        assert!(planned.bytes.device() <= planned.available && planned.notes.contains(&Note::AllResident));
    }
}

#[test]
fn deepseek_v3_in_bf16_takes_just_under_20_gib_for_72_sequences_of_4096_tokens() {
    let demand = Demand { batch: Batch::Sequences(72), ..Demand::new(Shape::DEEPSEEK_V3, 20 * GIB, 4096) };
    let planned = plan(&demand).unwrap();
    let gib = planned.bytes.device() as f64 / GIB as f64;
    assert!((19.0..20.0).contains(&gib), "{gib}");
    assert_eq!(planned.notes, [Note::Dense]);
    assert!(planned.config.is_none() && planned.live_tokens.is_none());
    let error = plan(&Demand { batch: Batch::Sequences(74), ..demand }).unwrap_err();
    assert_eq!((error.kind(), error.number("batch")), (Kind::OutOfMemory, Some(74)));
}

#[test]
fn index_keys_cap_the_live_tokens() {
    let planned = plan(&ess(128 * 1024, 54)).unwrap();
    let live = planned.live_tokens.unwrap();
    assert_eq!(live, 80 * GIB / (132 * 61));
    assert!(u64::from(planned.most_batch) * 128 * 1024 < live);
    // With hardly a slot left, the index keys limit the batch.
    let squeezed = Demand { batch: Batch::Most, least_slots: 64, ..ess(128 * 1024, 1) };
    let most = plan(&squeezed).unwrap().most_batch;
    assert!(u64::from(most + 5) * 128 * 1024 > live, "{most}");
}

#[test]
fn a_plan_says_when_its_slots_are_few() {
    let few = |batch| plan(&ess(32 * 1024, batch)).unwrap().notes.contains(&Note::FewSlots);
    assert!(!few(160) && few(170));
    // A short context needs no more slots than tokens.
    let short = Demand { ratio: Ratio::Share(1.0), ..ess(4096, 8) };
    assert!(!plan(&short).unwrap().notes.contains(&Note::FewSlots));
    let scratch = Demand { ratio: Ratio::Share(0.1), ..ess(32 * 1024, 8) };
    assert!(plan(&scratch).unwrap().notes.contains(&Note::Scratch));
}

#[test]
fn host_memory_ends_the_batch_where_it_is_less() {
    let demand = Demand { batch: Batch::Most, ..ess(32 * 1024, 1) };
    let free = plan(&demand).unwrap();
    assert!(free.slots >= FEW_SLOTS && !free.notes.contains(&Note::HostBound));
    let host = free.bytes.host();
    let exact = plan(&Demand { host: Some(host), ..demand.clone() }).unwrap();
    assert_eq!(exact.batch, free.batch);
    let less = plan(&Demand { host: Some(host - 1), ..demand.clone() }).unwrap();
    assert_eq!((less.batch, less.notes.contains(&Note::HostBound)), (free.batch - 1, true));
    assert!(less.slots > free.slots);
    let tiny = plan(&Demand { host: Some(1 << 20), ..demand.clone() }).unwrap();
    assert_eq!((tiny.offloads(), &tiny.notes[..]), (false, &[Note::AllResident, Note::HostBound][..]));
    // With a byte less they have fewer slots, and a join of fewer slots is staged in less; rows alone leave no room for
    // the staging.
    let fixed = Demand { host: Some(free.bytes.rows), batch: Batch::Sequences(free.batch), ..demand };
    let error = plan(&fixed).unwrap_err();
    assert!(error.place().contains("host"), "{error}");
    // 64 tokens of 704 bytes a page, 513 pages with the rows in flight.
    assert_eq!(free.bytes.rows, u64::from(free.batch) * 513 * 64 * 704 * 61);
}

#[test]
fn impossible_plans_are_one_error_that_names_the_field() {
    let good = ess(32 * 1024, 64);
    let longest = longest_context("deepseek-v3.2");
    let small = Shape { layers: 1, draft_layers: 0, top_k: 64, ..Shape::DEEPSEEK_V3_2 };
    let cases: [(&str, Demand); 17] = [
        ("weights", Demand { weights: 80 * GIB, ..good.clone() }),
        ("activations", Demand { weights: 79 * GIB, activations: 2 * GIB, ..good.clone() }),
        ("workspace", Demand { workspace: u64::MAX, ..good.clone() }),
        ("gpu", Demand { gpu: 0, ..good.clone() }),
        ("gpu", Demand { batch: Batch::Sequences(60_000), ..good.clone() }),
        ("context", Demand { context: 0, ..good.clone() }),
        ("context", Demand { context: 200_000, longest, ..good.clone() }),
        ("batch", Demand { batch: Batch::Sequences(0), ..good.clone() }),
        ("query_rows", Demand { query_rows: 0, ..good.clone() }),
        ("least_slots", Demand { least_slots: 0, ..good.clone() }),
        ("query_rows", Demand { query_rows: u32::MAX, ..good.clone() }),
        ("steps_in_flight", Demand { steps_in_flight: u32::MAX, ..good.clone() }),
        ("micro_batches", Demand { micro_batches: u32::MAX, ..good.clone() }),
        ("gpu: has room for more", Demand { gpu: u64::MAX, context: 64, shape: small, ..good.clone() }),
        ("ratio", Demand { ratio: Ratio::Share(0.0), ..good.clone() }),
        ("ratio", Demand { ratio: Ratio::Share(f64::NAN), ..good.clone() }),
        ("ratio", Demand { ratio: Ratio::Share(0.5), shape: Shape::DEEPSEEK_V3, ..good.clone() }),
    ];
    for (field, demand) in cases {
        let error = plan(&demand).unwrap_err();
        assert!(error.place().starts_with(field), "{field}: {error}");
        assert_eq!(error.to_string().lines().count(), 1);
    }
    // A search ends at the widest batch that a cache allows.
    let wide = Demand { gpu: 32 << 40, batch: Batch::Most, ..good.clone() };
    assert_eq!(plan(&wide).unwrap().batch, 32_767 * wide.micro_batches);
    assert!(plan(&Demand { ratio: Ratio::Share(1.5), ..good }).is_err());
}

/// Makes the cache of a plan on a device of `bytes` bytes, and opens all its sequences.
fn make(config: &Config, bytes: u64, slots: u32) -> Result<()> {
    let device = HostDevice::new(HostOptions { memory: Some(bytes), ..HostOptions::default() });
    assert_eq!(device.granularity(), page_size());
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let mut cache = Cache::new(Config { memory, ..config.clone() }, device as Arc<dyn Device>)?;
    let open = Open {
        prompt: config.max_tokens - 1,
        promised: 1,
        budget: Budget::Slots(slots),
        bring_up: BringUp::Nothing,
    };
    for _ in 0..config.lanes {
        cache.open(&open)?;
    }
    assert_eq!(cache.open(&open).unwrap_err().kind(), Kind::Exhausted, "the plan has one lane a sequence");
    Ok(())
}

#[test]
fn a_batch_that_the_plan_fits_can_be_made_and_one_more_cannot() {
    let shape = Shape { layers: 3, draft_layers: 1, top_k: 256, ..Shape::DEEPSEEK_V3_2 };
    for (context, query_rows, ratio) in [(1000, 1, 0.5), (4096, 2, 0.2), (5000, 3, 0.11), (640, 2, 1.0)] {
        let gpu = 48 << 20;
        let demand = Demand {
            query_rows,
            ratio: Ratio::Share(ratio),
            count_tables: false,
            grain: page_size(),
            ..Demand::new(shape, gpu, context)
        };
        let planned = plan(&demand).unwrap();
        make(planned.config.as_ref().unwrap(), gpu, planned.slots).unwrap();
        make(planned.config.as_ref().unwrap(), planned.bytes.data(), planned.slots).unwrap();
        let less = make(planned.config.as_ref().unwrap(), planned.bytes.data() - 1, planned.slots);
        assert_eq!(less.unwrap_err().kind(), Kind::OutOfMemory, "no byte is planned that is not taken");
        // One sequence more, as plan itself would lay it out with a little more memory.
        let more = Demand { batch: Batch::Sequences(planned.batch + 1), ..demand.clone() };
        assert_eq!(plan(&more).unwrap_err().kind(), Kind::OutOfMemory);
        let larger = plan(&Demand { gpu: 2 * gpu, ..more }).unwrap();
        let refused = make(larger.config.as_ref().unwrap(), gpu, larger.slots).unwrap_err();
        assert_eq!((refused.kind(), refused.place()), (Kind::OutOfMemory, "device memory"));
    }
}

/// A step of all sequences. Its new rows are rejected, so the sequences keep their lengths.
fn decode(cache: &mut Cache, device: &HostDevice, stream: Stream, sequences: &[Sequence], shape: Shape) {
    let selected = u64::from(shape.layers * shape.top_k) * sequences.len() as u64;
    let [selection, slots] = [(); 2].map(|()| device.allocate(4 * selected).unwrap());
    let words = (0..selected).map(|i| i as u32 % shape.top_k);
    device.write(selection, &words.flat_map(u32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    let row = |own: &Sequence| BatchRow { sequence: *own, accepted: Accepted::Rows(0), query_rows: 1 };
    let rows: Vec<BatchRow> = sequences.iter().map(row).collect();
    let mut step = cache.prepare(MicroBatch(0), 1, &rows, None, stream).unwrap();
    let streams = Streams { resolve: stream, gather: stream };
    cache.layers(&step, streams, selection, slots).unwrap();
    cache.finish(&mut step, stream).unwrap();
    cache.retire(step, stream).unwrap();
}

/// With as many sequences a shared cache soon gives each slots for all its rows, and with one more it cannot.
#[test]
fn elastic_budgets_hold_all_rows_below_the_batch_that_the_plan_names() {
    let shape = Shape { layers: 2, runs: [32, 0], top_k: 64, ..Shape::DEEPSEEK_V3_2 };
    for (context, batch, ratio, first) in [(320, 8, 0.4, 4), (1000, 8, 0.25, 3), (4096, 5, 0.25, 2)] {
        let demand = Demand {
            batch: Batch::Sequences(batch),
            ratio: Ratio::Share(ratio),
            grain: page_size(),
            ..Demand::new(shape, GIB, context)
        };
        let planned = plan(&demand).unwrap();
        assert_eq!(planned.misses_from, Some(first), "context {context}");
        let share = Share { bytes_a_step: u64::MAX, resizes_a_step: batch, ..Share::default() };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config = planned.config.clone().unwrap();
        assert_eq!(config.slots, Slots::Uniform(planned.pool().slots() as u32));
        let config = Config { memory, share: Some(share), residency_only: true, ..config };
        let device = HostDevice::new(HostOptions::default());
        let stream = device.stream().unwrap();
        let mut cache = Cache::new(config, Arc::clone(&device) as Arc<dyn Device>).unwrap();
        let budget = Budget::Slots(planned.slots);
        let open = Open { prompt: context, promised: 0, budget, bring_up: BringUp::Nothing };
        let mut sequences = Vec::new();
        for count in 1..=batch {
            let sequence = cache.open(&open).unwrap();
            for layer in 0..shape.layers {
                cache.append(sequence, Layer(layer), &vec![0; 32 * context as usize]).unwrap();
            }
            let _ticket = cache.join(sequence, stream, WarmUp::default()).unwrap();
            sequences.push(sequence);
            (0..3).for_each(|_| decode(&mut cache, &device, stream, &sequences, shape));
            let least = sequences.iter().flat_map(|own| cache.budgets(*own).unwrap()).min().unwrap();
            assert_eq!(*least >= context, count < first, "{least} slots of {count} sequences of {context}");
        }
    }
    // The rows of the whole batch have slots: with all rows on the device, and in a plan at ratio 1.
    for ratio in [Ratio::Auto, Ratio::Share(1.0)] {
        let demand = Demand { batch: Batch::Sequences(3), ratio, ..Demand::new(shape, GIB, 4096) };
        assert_eq!(plan(&demand).unwrap().misses_from, None);
    }
}

/// Bytes of `batch` sequences with `slots` slots each, allocated block by block and added up. Tables and mapping
/// borders are left out.
fn counted(demand: &Demand, batch: u32, slots: u32) -> u64 {
    let shape = demand.shape;
    let row = u64::from(shape.runs[0] + shape.runs[1]);
    let mut bytes = 0;
    for _layer in 0..shape.layers + shape.draft_layers {
        let mut landing = 0;
        for _sequence in 0..batch {
            let mut tokens = 0;
            while tokens < demand.context + demand.query_rows * demand.steps_in_flight {
                tokens += shape.page_tokens;
                bytes += u64::from(shape.page_tokens * shape.index_key_bytes);
            }
            let mut held = 0;
            while held < slots {
                held += 64;
                bytes += 64 * row;
            }
            landing += demand.query_rows;
        }
        bytes += u64::from(landing.div_ceil(64)) * 64 * row;
    }
    let beyond = (demand.query_rows * shape.top_k).saturating_sub(slots);
    bytes + u64::from((1 + batch * beyond).div_ceil(64)) * 64 * row
}

/// The largest whole number of blocks that fits, tried one after the other from the whole context down.
fn largest_by_counting(demand: &Demand, batch: u32) -> Option<u32> {
    let sizes = (1..=demand.context).filter(|slots| *slots % 64 == 0 || *slots == demand.context);
    sizes.rev().find(|slots| counted(demand, batch, *slots) <= demand.gpu)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Mappings of one block leave no gaps, so the count is exact.
    #[test]
    fn slots_and_batch_agree_with_allocation_by_counting(
        (layers, draft_layers) in (1_u32..5, 0_u32..2),
        (row, key) in (1_u32..40, 0_u32..20),
        (context, top_k, query_rows) in (1_u32..700, 1_u32..300, 1_u32..4),
        (batch, kib) in (1_u32..12, 1_u64..2000),
    ) {
        let shape = Shape { layers, draft_layers, runs: [4 * row, 0], index_key_bytes: 4 * key, top_k, ..Shape::GLM_5 };
        let demand = Demand {
            query_rows,
            batch: Batch::Sequences(batch),
            count_tables: false,
            least_slots: 64,
            grain: 64 * 4 * u64::from(row),
            ..Demand::new(shape, kib << 10, context)
        };
        let found = largest_by_counting(&demand, batch);
        match plan(&demand) {
            Ok(planned) if planned.offloads() => prop_assert_eq!(Some(planned.slots), found),
            Ok(planned) => prop_assert!(batch <= planned.resident_batch),
            Err(error) => {
                prop_assert_eq!(error.kind(), Kind::OutOfMemory);
                prop_assert_eq!(found, None);
            }
        }
        let least = 64.min(context);
        let fits = |lanes: &u32| counted(&demand, *lanes, least) <= demand.gpu;
        let most = (1..).take_while(fits).last().unwrap_or(0);
        if let Ok(planned) = plan(&Demand { batch: Batch::Most, ..demand.clone() }) {
            prop_assert_eq!(planned.most_batch, most.max(planned.resident_batch));
            prop_assert_eq!(planned.batch, planned.most_batch);
            let sum = planned.bytes.data();
            prop_assert!(sum <= demand.gpu);
            if planned.offloads() {
                prop_assert_eq!(sum - planned.bytes.padding, counted(&demand, planned.batch, planned.slots));
            }
        } else {
            prop_assert_eq!(most, 0);
        }
    }
}

/// The matrices of DeepSeek-V3.2's checkpoint as its files list them: rows, columns, bytes of a value; how many
/// layers have them, and whether each GPU has all of it under TP attention.
const MATRICES: [(u64, u64, u64, u64, bool); 15] = [
    (1536, 7168, 1, 61, true),       // q_a_proj
    (24_576, 1536, 1, 61, false),    // q_b_proj
    (576, 7168, 1, 61, true),        // kv_a_proj_with_mqa
    (32_768, 512, 1, 61, false),     // kv_b_proj
    (7168, 16_384, 1, 61, false),    // o_proj
    (8192, 1536, 1, 61, true),       // indexer.wq_b
    (128, 7168, 1, 61, true),        // indexer.wk
    (64, 7168, 2, 61, true),         // indexer.weights_proj
    (256, 7168, 2, 58, true),        // mlp.gate
    (2 * 2048, 7168, 1, 58, false),  // shared_experts.gate_proj, up_proj
    (7168, 2048, 1, 58, false),      // shared_experts.down_proj
    (2 * 18_432, 7168, 1, 3, false), // mlp.gate_proj, up_proj
    (7168, 18_432, 1, 3, false),     // mlp.down_proj
    (129_280, 7168, 2, 1, false),    // embed_tokens
    (129_280, 7168, 2, 1, false),    // lm_head
];

/// With FP8's scales, of four bytes for each block of 128 x 128.
fn matrix((rows, columns, value, layers, _): (u64, u64, u64, u64, bool)) -> u64 {
    let scales = if value == 1 { rows * columns / (128 * 128) * 4 } else { 0 };
    layers * (rows * columns * value + scales)
}

#[test]
fn weights_on_a_gpu_are_the_checkpoints_matrices_divided() {
    let checkpoint = Checkpoint::of("deepseek-v3.2").unwrap().unwrap();
    // 3 matrices of 2048 x 7168 per expert, 256 / 8 experts per GPU, 58 layers.
    let experts = 58 * 32 * 3 * (2048 * 7168 + 2048 * 7168 / (128 * 128) * 4);
    let others: u64 = MATRICES.into_iter().map(matrix).sum();
    let close = |found: u64, hand: u64| assert!(found.abs_diff(hand) < 1 << 20, "{found} {hand}");
    close(checkpoint.on_gpu(8, Attention::Data, false), experts + others);
    let divided: u64 = MATRICES.into_iter().filter(|it| !it.4).map(matrix).sum();
    close(checkpoint.on_gpu(8, Attention::Tensor, false), experts + others - divided + divided / 8);
    // On 32 GPUs attention is still divided over a node's 8, experts over all.
    close(checkpoint.on_gpu(32, Attention::Tensor, false), experts / 4 + others - divided + divided / 8);
    close(checkpoint.on_gpu(1, Attention::Data, false), 8 * experts + others);
    // 256 experts over 24 GPUs: some GPUs have 11, and those must fit.
    close(checkpoint.on_gpu(24, Attention::Data, false), experts / 32 * 11 + others);
    // The draft layer is a layer with experts, and a matrix that joins it to the last one.
    let one = |(rows, columns, value, layers, _)| match layers {
        61 | 58 => matrix((rows, columns, value, 1, false)),
        _ => 0,
    };
    let draft = experts / 58 + MATRICES.into_iter().map(one).sum::<u64>() + 2 * 2 * 7168 * 7168;
    let both = checkpoint.on_gpu(8, Attention::Data, true) - checkpoint.on_gpu(8, Attention::Data, false);
    close(both, draft);
}

/// The parts of every checkpoint add up to its published size, to a thousandth.
#[test]
fn weights_of_the_table_make_the_published_sizes() {
    for (name, bytes) in [
        ("deepseek-v3.2", Some(642.1 * GIB as f64)),
        ("deepseek-v3", Some(688_586_727_753.0)),
        ("deepseek-r1", Some(688_586_727_753.0)),
        ("glm-5", None),
    ] {
        let checkpoint = Checkpoint::of(name).unwrap().unwrap();
        let published = checkpoint.published();
        let near = |found: f64, wanted: f64, share: f64| {
            assert!((found / wanted - 1.0).abs() < share, "{name}: {found} {wanted}")
        };
        if let Some(bytes) = bytes {
            near(checkpoint.bytes() as f64, bytes, 1e-3);
            near(published.bytes.unwrap(), bytes, 1e-3);
        }
        // Nearly all parameters take a byte; embedding, head and routers take two.
        near(checkpoint.bytes() as f64, published.parameters, 1e-2);
        assert!(!checkpoint.source().is_empty() && !checkpoint.name().is_empty());
    }
    // Another format of rows has the same weights; a model without published figures has none.
    let of = |name| Checkpoint::of(name).unwrap().map(|checkpoint| checkpoint.bytes());
    assert!(
        of("deepseek-v3.2-bf16") == of("deepseek-v3.2") && of("deepseek-v3.2-int8") == of("deepseek-v3.2")
    );
    assert!(of("gqa-8x128").is_none() && of("deepseek-v3") < of("deepseek-v3.2"));
    assert_eq!(of("deepseek-r1"), of("deepseek-v3"));
}

/// The page's table of weights equals the checkpoints' weights, divided.
#[test]
fn the_pages_weights_are_the_checkpoints() {
    let mut rows = 0;
    for line in include_str!("../docs/planner.md").lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let Some(checkpoint) = Checkpoint::of(cells[0]).unwrap().filter(|_| cells.len() == 6) else {
            continue;
        };
        let gb =
            |gpus, attention| format!("{:.1} GB", checkpoint.on_gpu(gpus, attention, false) as f64 / 1e9);
        let weights = [gb(8, Attention::Data), gb(8, Attention::Tensor), gb(32, Attention::Data)];
        assert_eq!(cells[3..], weights, "{line}");
        rows += 1;
    }
    assert_eq!(rows, 4);
}

#[test]
fn gpus_are_whole_nodes_or_a_part_of_one() {
    let of = |node| (0..=40).filter(|gpus| is_deployment(*gpus, node)).collect::<Vec<u32>>();
    assert_eq!(of(8), [1, 2, 4, 8, 16, 24, 32, 40]);
    assert_eq!(of(4), [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]);
    assert_eq!(of(72), [1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36]);
    assert!(is_deployment(4096, 8) && !is_deployment(4104, 8) && !is_deployment(1_000_000_000, 8));
}

/// One number for the memory of the weights, from every query: the checkpoint's, on the setup's GPUs.
#[test]
fn a_setups_weights_are_the_checkpoints_on_its_gpus() {
    let ess = Setup::named("ess").unwrap().unwrap();
    let checkpoint = Checkpoint::of("deepseek-v3.2").unwrap().unwrap();
    for gpus in [8, 16, 32, 64, 128] {
        let setup = ess.on_gpus(gpus).unwrap();
        for (query_rows, drafts) in [(1, false), (2, true), (4, true)] {
            let weights = checkpoint.on_gpu(gpus, Attention::Data, drafts);
            assert_eq!(setup.weights(query_rows).unwrap(), Some(weights), "{gpus} {query_rows}");
        }
    }
    let glm = ess.of_model("glm-5").unwrap().weights(1).unwrap();
    assert_eq!(glm, Some(Checkpoint::of("glm-5").unwrap().unwrap().on_gpu(32, Attention::Data, false)));
    // For a model of one's own nothing is published.
    let mut file = ess.file().clone();
    file.model.dims = Some(*ess.dims());
    assert_eq!(Setup::new(file).unwrap().weights(1).unwrap(), None);
}
