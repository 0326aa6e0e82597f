//! Windows of sharded weights: ranks fill, share and pull, and each byte of each window is that of its owner.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "windows/ahead.rs"]
mod ahead;
#[path = "windows/budget.rs"]
mod budget;
#[path = "windows/changes.rs"]
mod changes;
#[path = "support/children.rs"]
mod children;
#[path = "windows/faults.rs"]
mod faults;
#[path = "support/faulty.rs"]
mod faulty;
#[path = "windows/files.rs"]
mod files;
#[path = "windows/full.rs"]
mod full;
#[path = "windows/processes.rs"]
mod processes;
#[path = "windows/refusals.rs"]
mod refusals;
#[path = "windows/rejoin.rs"]
mod rejoin;
#[path = "windows/restarts.rs"]
mod restarts;
#[path = "windows/ring.rs"]
mod ring;
#[path = "support/skip.rs"]
mod skip;
#[path = "support/windows.rs"]
mod windows;

use std::sync::Arc;

use forebay::Kind;
use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Faults, NoFaults};
use forebay::weights::{Group, Odd, Patterns, Plan, Pulls, Sharding, Source, Tensor, Windows};
use proptest::prelude::*;
use windows::{Rank, group, layers, sharding, tensor};

/// The host device's granule.
pub fn grain() -> u64 {
    HostDevice::new(HostOptions::default()).granularity()
}

pub fn devices(count: u32) -> Vec<Arc<dyn Device>> {
    let device = |_| HostDevice::new(HostOptions::default()) as Arc<dyn Device>;
    (0..count).map(device).collect()
}

pub fn no_faults() -> Arc<dyn Faults> {
    Arc::new(NoFaults)
}

/// A filled rank that is alone in its group.
pub fn alone_on(device: &Arc<dyn Device>, bytes: &[Vec<u64>], sharding: &Sharding) -> Rank {
    let plan = Plan::new(&layers(bytes), Group { id: 0, rank: 0, ranks: 1 }, sharding).unwrap();
    let mut rank = Rank::new(device, plan, Pulls::default(), &no_faults()).unwrap();
    rank.fill().unwrap();
    rank
}

pub fn alone(bytes: &[Vec<u64>], sharding: &Sharding) -> Rank {
    alone_on(&devices(1)[0], bytes, sharding)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Any layers, some of no chosen tensor, among any ranks, some of which own nothing: each rank pulls all layers in
    /// the order of a step, twice.
    #[test]
    fn layers_come_together_from_all_ranks(
        pages in proptest::collection::vec(proptest::collection::vec(1..20_u64, 0..3), 1..8),
        ranks in 1..5_u32,
        odd in 0..4_usize,
        copies in 1..4_u64,
        over_host in any::<bool>(),
    ) {
        prop_assume!(pages.iter().any(|layer| !layer.is_empty()));
        let odd = [Odd::Cheapest, Odd::ThirdBuffer, Odd::ResidentFirst, Odd::ResidentLast][odd];
        let source = if over_host { Source::Host } else { Source::Peers };
        let bytes: Vec<Vec<u64>> = pages.iter().map(|layer| layer.iter().map(|n| n * grain() / 3).collect()).collect();
        let sharding = Sharding { odd, source, ..sharding(grain()) };
        group(&devices(ranks), &layers(&bytes), &sharding, Pulls { copy: copies * grain() }, |rank| {
            for _ in 0..2 {
                rank.layers().iter().for_each(|layer| rank.pull(*layer));
            }
            rank.windows.verify(rank.stream).unwrap();
        });
    }
}

/// A model with grouped-query attention and experts, in names and proportions: 8 heads of 64, two of keys and values,
/// four experts from the second layer on, norms and router that are not shared.
fn grouped_query_with_experts() -> Vec<Vec<Tensor>> {
    let layer = |layer: usize| {
        let named =
            |name: &str, bytes: u64| tensor(&format!("model.layers.{layer}.{name}.weight"), bytes, 256);
        let mut all = vec![named("input_layernorm", 1024)];
        for (name, outputs) in [("q", 512), ("k", 128), ("v", 128), ("o", 512)] {
            all.push(named(&format!("self_attn.{name}_proj"), outputs * 128 * 2));
        }
        let experts = if layer == 0 { 0 } else { 4 };
        for expert in 0..experts {
            for name in ["gate", "up", "down"] {
                all.push(named(&format!("mlp.experts.{expert}.{name}_proj"), 96 * 128));
            }
        }
        all.push(named("mlp.gate", 4 * 128 * 2));
        all
    };
    (0..5).map(layer).collect()
}

/// No attention is special: projections of grouped queries, experts, and both.
#[test]
fn grouped_queries_and_experts_are_shared_as_any_tensors() {
    let model = grouped_query_with_experts();
    for (patterns, sharded, first) in [
        (&["*.self_attn.?_proj.weight"][..], 4, 4),
        (&["*.self_attn.[kv]_proj.weight"], 4, 2),
        (&["*.mlp.experts.*"], 4, 12),
        (&["*.self_attn.*", "*.mlp.experts.*"], 4, 16),
    ] {
        let patterns = Patterns::new(patterns).unwrap();
        let sharding = Sharding { patterns, ..sharding(grain()) };
        group(&devices(3), &model, &sharding, Pulls::default(), |rank| {
            let of = |layer: &forebay::weights::LayerPlan| (layer.layer, layer.layout.tensors().len());
            let last = rank.plan().layers().last().map(of);
            assert_eq!((rank.plan().sharded(), last), (sharded, Some((4, first))));
            for _ in 0..2 {
                rank.layers().iter().for_each(|layer| rank.pull(*layer));
            }
            rank.windows.verify(rank.stream).unwrap();
            // Each tensor has the bytes of its name.
            let (layer, placed) =
                rank.plan().layers().last().map(|it| (it.layer, it.layout.tensors().to_vec())).unwrap();
            let whole = rank.windows.layer(layer).unwrap();
            for one in placed {
                let found = rank.windows.tensor(layer, &one.name).unwrap();
                let length = model[layer].iter().find(|it| it.name == one.name).unwrap().bytes;
                assert_eq!(Ok(found), whole.part(one.offset, length));
            }
        });
    }
}

/// 61 layers, as DeepSeek-R1 has.
#[test]
fn an_odd_number_of_layers_is_whole_at_every_layer_of_two_steps() {
    let bytes: Vec<Vec<u64>> = (0..61).map(|layer| vec![5 * grain() + layer, 2 * grain()]).collect();
    group(&devices(3), &layers(&bytes), &sharding(grain()), Pulls::default(), |rank| {
        for _ in 0..2 {
            rank.layers().iter().for_each(|layer| rank.pull(*layer));
        }
        assert_eq!(rank.windows.plan().sharded(), 60);
    });
}

/// The slices of a pull: one of each other rank after another, beginning behind this rank.
#[test]
fn a_pull_takes_one_slice_of_each_rank_in_turn() {
    let bytes = vec![vec![12 * grain()]; 4];
    group(&devices(4), &layers(&bytes), &sharding(grain()), Pulls { copy: 2 * grain() }, |rank| {
        let own = rank.rank();
        // Of 12 pages each rank has 3: a slice of two pages and one of one.
        let mut expected = Vec::new();
        for slice in [0..2_u64, 2..3] {
            for step in 1..4 {
                let from = u64::from((own + step) % 4) * 3;
                expected.push((from + slice.start..from + slice.end).collect::<Vec<u64>>());
            }
        }
        rank.pull(2);
        assert_eq!(rank.windows.copies(0), Ok(expected.len()));
        let window = rank.windows.layer(0).unwrap();
        let right = |rank: &Rank| -> Vec<bool> {
            let (shown, wanted) = (rank.read(window), rank.expected(0));
            let pages = shown.chunks(grain() as usize).zip(wanted.chunks(grain() as usize));
            pages.map(|(shown, wanted)| shown.iter().zip(wanted).all(|(a, b)| *b == Some(*a))).collect()
        };
        let mut before = right(rank);
        for (copy, pages) in expected.iter().enumerate() {
            rank.windows.pull_some(0, rank.stream, copy..copy + 1).unwrap();
            rank.wait().unwrap();
            let now = right(rank);
            let new = (0..12).filter(|page| now[*page as usize] && !before[*page as usize]);
            assert_eq!(new.collect::<Vec<u64>>(), *pages, "copy {copy} of rank {own}");
            before = now;
        }
        assert!(rank.is_whole(0));
        let error = rank.windows.pull_some(0, rank.stream, 5..7).unwrap_err();
        assert_eq!((error.kind(), error.number("copies")), (Kind::OutOfRange, Some(6)));
    });
}

/// A layer that was made resident keeps addresses and bytes while others use its buffer, also under a pull that was
/// enqueued for it as before; made sharded again, its memory is free.
#[test]
fn a_layer_becomes_resident_and_sharded_again_at_its_addresses() {
    for source in [Source::Peers, Source::Host] {
        let bytes = vec![vec![9 * grain()]; 4];
        // Room for the windows, the engine's buffer and one resident layer, so that each round needs the memory of the
        // round before.
        let memory = match source {
            Source::Peers => (4 * 3 + 2 * 6 + 6 + 9) * grain(),
            Source::Host => (2 * 9 + 9 + 9) * grain(),
        };
        let limited = |_| {
            HostDevice::new(HostOptions { memory: Some(memory), ..HostOptions::default() }) as Arc<dyn Device>
        };
        let devices: Vec<_> = (0..3).map(limited).collect();
        let sharding = Sharding { source, ..sharding(grain()) };
        group(&devices, &layers(&bytes), &sharding, Pulls::default(), |rank| {
            let address = rank.windows.layer(1).unwrap();
            for _ in 0..3 {
                rank.pull(3);
                rank.windows.make_resident(1, rank.stream).unwrap();
                assert!(rank.windows.is_resident(1).unwrap() && rank.is_whole(1) && rank.is_whole(3));
                rank.windows.make_resident(1, rank.stream).unwrap();
                let error = rank.windows.make_resident(0, rank.stream).unwrap_err();
                assert_eq!(error.kind(), Kind::OutOfMemory);
                rank.pull(1);
                rank.pull(3);
                assert!(rank.is_whole(1));
                rank.windows.make_sharded(1).unwrap();
                rank.windows.make_sharded(1).unwrap();
                assert!(!rank.windows.is_resident(1).unwrap() && rank.is_whole(3) && !rank.is_whole(1));
                rank.pull(1);
                assert!(!rank.is_whole(3));
                assert_eq!(rank.windows.layer(1), Ok(address));
            }
        });
    }
}

#[test]
fn tensors_lie_in_their_windows() {
    let rank = alone(&[vec![100, 300, 7]], &sharding(grain()));
    let mut rank = rank;
    rank.windows.hello(windows::MODEL, rank.stream).unwrap();
    let whole = rank.windows.layer(0).unwrap();
    for (index, offset, bytes) in [(0, 0, 100), (1, 256, 300), (2, 768, 7)] {
        let name = format!("model.layers.0.weight.{index}");
        assert_eq!(rank.windows.tensor(0, &name), whole.part(offset, bytes));
    }
    assert!(rank.is_whole(0));
    assert_eq!(rank.windows.copies(0), Ok(0));
    assert!(rank.windows.is_resident(0).unwrap());
}

#[test]
fn what_is_not_ready_has_no_address_and_is_not_pulled() {
    let of = |rank| Group { id: 0, rank, ranks: 2 };
    let layers = vec![
        vec![tensor("a", grain(), 1), tensor("b", grain(), 1)],
        vec![],
        vec![tensor("c", 2 * grain(), 1)],
    ];
    let plan = Plan::new(&layers, of(0), &sharding(grain())).unwrap();
    let device = &devices(1)[0];
    let mut rank = Rank::new(device, plan, Pulls::default(), &no_faults()).unwrap();
    rank.fill_one(0, 0).unwrap();
    let error = rank.windows.layer(0).unwrap_err();
    assert_eq!((error.kind(), error.number("rank")), (Kind::InvalidState, Some(0)));
    assert_eq!(error.place(), "layer 0: b was not filled");
    assert_eq!(rank.windows.pull(0, rank.stream).unwrap_err(), error);
    assert_eq!(rank.windows.hello(windows::MODEL, rank.stream).unwrap_err(), error);
    rank.fill().unwrap();
    let error = rank.windows.pull(2, rank.stream).unwrap_err();
    assert_eq!((error.kind(), error.number("rank")), (Kind::InvalidState, Some(1)));
    assert_eq!(error.place(), "layer 2: the part of another rank is missing");
    assert_eq!(
        rank.windows.verify(rank.stream).unwrap_err().place(),
        "layer 0: the part of another rank is missing"
    );
    let error = rank.windows.layer(1).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::OutOfRange, "layer 1: no tensor of it was chosen"));
    let from = rank.holds(&vec![0; grain() as usize]);
    let error = rank.windows.fill(2, "d", from, rank.stream).unwrap_err();
    assert_eq!(error.place(), "layer 2: no chosen tensor is named d");
    let error = rank.windows.fill(2, "c", from, rank.stream).unwrap_err();
    assert_eq!((error.place(), error.number("planned")), ("layer 2: c: its bytes", Some(2 * grain())));
    // A device with larger pages than the plan's.
    let small = Sharding { grain: grain() / 2, ..sharding(grain()) };
    let plan = Plan::new(&layers, of(0), &small).unwrap();
    let error = Windows::new(device, plan, Pulls::default(), &no_faults()).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, "the plan's granule"));
}

#[test]
fn a_stream_of_another_device_is_refused_with_the_layer() {
    group(
        &devices(2),
        &layers(&[vec![4 * grain()], vec![4 * grain()]]),
        &sharding(grain()),
        Pulls::default(),
        |rank| {
            let foreign = forebay::device::Stream(u64::MAX);
            let error = rank.windows.pull(1, foreign).unwrap_err();
            assert_eq!((error.kind(), error.number("layer")), (Kind::OutOfRange, Some(1)));
            let from = rank.holds(&vec![0; 4 * grain() as usize]);
            let error = rank.windows.fill(0, "model.layers.0.weight.0", from, rank.stream).unwrap_err();
            assert_eq!(error.place(), "layer 0: other ranks have been given its parts");
        },
    );
}
