//! Weights by module, dtype and division, and what sharding saves of them, against published figures and sums by hand.
//!
//! Published figures are decimal (GB) or binary (GiB) without saying so; each test says which one it is.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use forebay::predict::plan::{Batch, Demand, plan};
use forebay::predict::weights::{Attention, Checkpoint, Division, Module, WeightDtype, tokens_gained};
use forebay::weights::{Group, Odd, Patterns, Plan, Sharding, Source};
use forebay::{Kind, Shape};

const GIB: f64 = (1_u64 << 30) as f64;
const MIB: f64 = (1_u64 << 20) as f64;
const GB: f64 = 1e9;

fn r1() -> Checkpoint {
    Checkpoint::of("deepseek-r1").unwrap().unwrap()
}

/// DeepSeek-R1 on GPUs that divide the experts alone, with `name` sharded over groups of 8.
fn sharded(name: &str, dtype: WeightDtype, drafts: bool, odd: Odd) -> Plan {
    let checkpoint = r1();
    let patterns = Patterns::new(&checkpoint.patterns(name)).unwrap();
    let sharding = Sharding { odd, ..Sharding::new(patterns) };
    let division = Division::of(32, Attention::Data);
    let group = Group { id: 0, rank: 0, ranks: 8 };
    checkpoint.sharded((&division, dtype, drafts), 32, group, &sharding).unwrap()
}

/// Two decimals, as published.
fn digits(value: f64) -> String {
    format!("{value:.2}")
}

fn saved(plan: &Plan) -> f64 {
    plan.exact_bytes().saved(plan.whole()) as f64 / GIB
}

/// In GiB, before rounding to granules, of 61 layers.
#[test]
fn what_sharding_saves_is_as_published() {
    use WeightDtype::{Bf16, Fp8};
    for (name, dtype, wanted, two_buffers) in [
        ("o_proj", Fp8, "5.55", "5.65"),
        ("mla", Fp8, "8.84", "9.00"),
        ("o_proj", Bf16, "11.10", "11.29"),
        ("mla", Bf16, "17.69", "17.99"),
    ] {
        for odd in [Odd::Cheapest, Odd::ThirdBuffer, Odd::ResidentLast] {
            assert_eq!(digits(saved(&sharded(name, dtype, false, odd))), wanted, "{name} {odd:?}");
        }
        // The published formula has two buffers for 61 layers, so the first layer could not be pulled in time.
        let third = sharded(name, dtype, false, Odd::ThirdBuffer);
        let buffer = third.exact_bytes().buffers[2] as f64 / GIB;
        assert_eq!(digits(saved(&third) + buffer), two_buffers, "{name}");
        // With the draft layer there are 62, and two buffers are enough.
        let even = sharded(name, dtype, true, Odd::Cheapest);
        assert!(even.sharded() == 62 && saved(&even) > saved(&third) + buffer, "{name}");
    }
}

/// In MiB, in FP8 over 8 ranks. In granules o_proj stays as it is, and all of MLA takes a page more at most.
#[test]
fn a_pull_moves_seven_eighths_of_a_layer() {
    for (name, pull, whole) in [("o_proj", 98.0, 112.0), ("mla", 156.1328125, 178.4375)] {
        let plan = sharded(name, WeightDtype::Fp8, false, Odd::Cheapest);
        let layer = &plan.layers()[7];
        assert_eq!(plan.pulled_exactly(layer) as f64 / MIB, pull);
        assert_eq!(layer.layout.bytes() as f64 / MIB, whole);
        let rounded = plan.pulled(layer) as f64 / MIB;
        assert!(rounded >= pull && rounded <= pull + 4.0, "{name}: {rounded}");
    }
    // 5.55 GiB are the rows of 84.8 thousand tokens: 576 BF16 values in each of 61 layers.
    let plan = sharded("o_proj", WeightDtype::Fp8, false, Odd::Cheapest);
    let saved = plan.bytes().saved(plan.whole());
    assert_eq!(tokens_gained(saved, Shape::DEEPSEEK_V3).unwrap(), saved as u64 / (576 * 2 * 61));
    assert_eq!(tokens_gained(-1, Shape::DEEPSEEK_V3).unwrap(), 0);
}

#[test]
fn from_the_host_nothing_of_a_sharded_layer_stays_on_the_device() {
    let checkpoint = r1();
    let patterns = Patterns::new(&checkpoint.patterns("mla")).unwrap();
    let sharding = Sharding { source: Source::Host, ..Sharding::new(patterns) };
    let group = Group { id: 0, rank: 3, ranks: 8 };
    let all = (&Division::of(16, Attention::Data), WeightDtype::Fp8, false);
    let plan = checkpoint.sharded(all, 16, group, &sharding).unwrap();
    let bytes = plan.bytes();
    // 60 layers of 90 pages on the host; one layer and two buffers on the device.
    assert_eq!((bytes.shards, bytes.host), (0, (60 * 90) << 21));
    assert_eq!((bytes.resident, bytes.buffers), (90 << 21, vec![90 << 21; 2]));
}

/// The bytes of one module on a GPU, and before division.
fn module(division: &Division, dtype: WeightDtype, drafts: bool, module: Module) -> (f64, f64) {
    let all = r1().by_module(division, dtype, drafts);
    let found = all.iter().find(|bytes| bytes.module == module).unwrap();
    (found.on_gpu as f64, found.whole as f64)
}

/// In GB: BF16, 61 layers.
#[test]
fn unsharded_attention_takes_22_8_gb_in_bf16() {
    let (on_gpu, whole) =
        module(&Division::of(32, Attention::Data), WeightDtype::Bf16, false, Module::Attention);
    assert_eq!((digits(on_gpu / GB).as_str(), on_gpu), ("22.83", whole));
}

/// A decode card of a published deployment of DeepSeek-R1 in INT8: 32 cards of 64 GB, attention by sequences, one 32nd
/// of the experts, dense parts over 8 cards, 72 sequences of 4K, the draft layer included.
#[test]
fn a_published_decode_card_adds_up() {
    let dtype = WeightDtype::Int8;
    let division = Division { dense: 8, ..Division::of(32, Attention::Data) };
    r1().check(&division).unwrap();
    let of = |name| module(&division, dtype, true, name);
    // In GB: 62 layers of 187.1 MB; scales add 0.14%.
    let attention = of(Module::Attention).0;
    assert!((attention / (62.0 * 187.1e6) - 1.0).abs() < 2e-3, "{attention}");
    assert_eq!(format!("{:.1}", attention / GB), "11.6");
    // In GiB: what tensor parallelism saves, and of what. The published text says 1 of 1.1, 2.1, and 3 of 3.5.
    let saves = |names: &[Module]| {
        let sums = names.iter().map(|name| of(*name)).fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        (format!("{:.2}", (sums.1 - sums.0) / GIB), format!("{:.2}", sums.1 / GIB))
    };
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(saves(&[Module::DenseFfn]), pair("0.97", "1.11"));
    assert_eq!(saves(&[Module::SharedExpert]), pair("2.12", "2.42"));
    assert_eq!(saves(&[Module::Embedding, Module::Head]), pair("3.02", "3.45"));
    // In GB: 54 are published, with about 20 of rows. The plan's rows are 61 layers of 72 sequences of 4096 tokens, and
    // of each the page that its rows in flight need.
    let weights = r1().divided(&division, dtype, true);
    assert_eq!(format!("{:.1}, {:.0}", weights as f64 / GB, (weights as f64 + 20e9) / GB), "33.8, 54");
    let demand = Demand {
        weights,
        query_rows: 2,
        batch: Batch::Sequences(72),
        ..Demand::new(Shape::DEEPSEEK_V3, 64_000_000_000, 4096)
    };
    let rows = plan(&demand).unwrap().bytes.device();
    assert_eq!(rows, 72 * (4096 + 64) * 576 * 2 * 61);
    assert_eq!(format!("{:.1}, {:.1}", rows as f64 / GB, (weights + rows) as f64 / GB), "21.0, 54.8");
    // Without tensor parallelism of the dense parts there are 6.6 GB more.
    let whole = r1().divided(&Division::of(32, Attention::Data), dtype, true);
    assert_eq!(format!("{:.1}", (whole - weights) as f64 / GB), "6.6");
}

/// In GB: FP8, unsharded, on 8 GPUs of 96 GB. One 8th of the experts and everything else do not fit.
#[test]
fn unsharded_fp8_does_not_fit_on_eight_gpus_of_96_gb() {
    let weights = r1().on_gpu(8, Attention::Data, false);
    let demand = Demand { weights, ..Demand::new(Shape::DEEPSEEK_V3, 96_000_000_000, 4096) };
    let error = plan(&demand).unwrap_err();
    assert_eq!((error.kind(), error.number("weights")), (Kind::OutOfMemory, Some(weights)));
    assert!(error.to_string().contains("weights: nothing of the GPU's memory is left"), "{error}");
    // All of MLA sharded, it fits.
    let patterns = Patterns::new(&r1().patterns("mla")).unwrap();
    let group = Group { id: 0, rank: 0, ranks: 8 };
    let all = (&Division::of(8, Attention::Data), WeightDtype::Fp8, false);
    let sharded = r1().sharded(all, 8, group, &Sharding::new(patterns)).unwrap();
    let weights = weights - sharded.whole() + sharded.bytes().device();
    assert!(plan(&Demand { weights, ..demand }).is_ok());
}

/// The tensors that are sharded are the matrices that are counted: names, modules and bytes.
#[test]
fn tensors_and_modules_have_the_same_bytes() {
    for name in ["deepseek-v3.2", "deepseek-r1", "glm-5"] {
        let checkpoint = Checkpoint::of(name).unwrap().unwrap();
        for dtype in [WeightDtype::Fp8, WeightDtype::Int4, WeightDtype::Nvfp4] {
            for drafts in [false, true] {
                let division = Division { attention: 4, dense: 8, experts: 32, redundant: 32 };
                let tensors = checkpoint.tensors(&division, dtype, drafts);
                let by_module = checkpoint.by_module(&division, dtype, drafts);
                let once = [Module::Embedding, Module::Head];
                let counted = by_module.iter().filter(|bytes| !once.contains(&bytes.module));
                let counted: u64 = counted.map(|bytes| bytes.on_gpu).sum();
                assert_eq!(tensors.iter().flatten().map(|tensor| tensor.bytes).sum::<u64>(), counted);
                let all: u64 = by_module.iter().map(|bytes| bytes.on_gpu).sum();
                assert_eq!(all, checkpoint.divided(&division, dtype, drafts));
                let experts = |layer: usize| {
                    let down =
                        |name: &str| name.contains(".mlp.experts.") && name.ends_with("down_proj.weight");
                    tensors[layer].iter().filter(|tensor| down(&tensor.name)).count()
                };
                // 256 experts and 32 copies on 32 GPUs; none in a dense layer.
                assert_eq!(
                    (experts(2), experts(3), tensors.len().is_multiple_of(2)),
                    (0, 9, (name == "glm-5") != drafts)
                );
            }
        }
    }
}

#[test]
fn a_division_that_the_model_cannot_have_is_refused() {
    let of = |attention, dense, experts, redundant| {
        r1().check(&Division { attention, dense, experts, redundant }).map_err(|error| error.to_string())
    };
    assert_eq!(of(8, 8, 32, 32), Ok(()));
    for (refused, words) in [
        (of(3, 1, 8, 0), "tensor parallelism (tp): does not divide the model's heads (degree 3, heads 128)"),
        (of(1, 0, 8, 0), "tensor parallelism (tp)"),
        (
            of(1, 1, 24, 0),
            "expert parallelism (ep): does not divide the model's experts (degree 24, experts 256)",
        ),
        (of(1, 1, 0, 0), "expert parallelism (ep)"),
        (of(1, 1, 8, 257), "redundant experts: more than the model has"),
    ] {
        assert!(refused.clone().unwrap_err().contains(words), "{refused:?}");
    }
}

/// Ranks that have different experts, or different parts of a dense FFN, cannot share them.
#[test]
fn ranks_share_only_what_they_all_have() {
    let checkpoint = r1();
    let group = Group { id: 0, rank: 0, ranks: 8 };
    let made = |pattern: &str, division: Division, gpus| {
        let sharding = Sharding::new(Patterns::new(&[pattern]).unwrap());
        checkpoint.sharded((&division, WeightDtype::Fp8, false), gpus, group, &sharding)
    };
    let eight = Division::of(8, Attention::Data);
    let error = made("*.mlp.experts.*.weight", eight, 8).unwrap_err();
    assert!(error.to_string().contains("have different parts of it (ranks 8, degree 8, gpus 8)"), "{error}");
    // Experts that all ranks have: 58 layers, of 256 experts or of 64, with three matrices of 7168 x 2048 bytes.
    for (experts, gpus, in_layer) in [(1, 8, 256), (4, 32, 64)] {
        let plan = made("*.mlp.experts.*.weight", Division { experts, ..eight }, gpus).unwrap();
        let layer = in_layer * 3 * 7168 * 2048_u64;
        assert_eq!((plan.layers().len(), plan.sharded(), plan.whole()), (58, 58, 58 * layer));
        assert_eq!(
            (plan.layers()[0].layer, plan.layers()[0].layout.tensors().len() as u64),
            (3, 3 * in_layer)
        );
        // An eighth of each layer, and two buffers for the rest of one.
        let exact = plan.exact_bytes();
        assert_eq!((exact.shards, exact.buffers), (58 * layer / 8, vec![layer / 8 * 7; 2]));
        assert!(plan.layers().iter().all(|one| plan.pulled_exactly(one) == layer / 8 * 7));
    }
    assert!(made("*.shared_experts.*", Division { dense: 8, ..eight }, 8).is_err());
    assert!(made("*.shared_experts.*", eight, 8).is_ok() && made("*.mlp.gate.*", eight, 8).is_ok());
    assert!(made("*.self_attn.*", Division { attention: 2, ..eight }, 8).is_err());
    assert!(made("*.self_attn.*", Division { attention: 2, ..eight }, 16).is_ok());
}
