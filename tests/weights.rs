//! Plans of sharded weights against naive counts: an owner for each page, a buffer for each layer of a step, and bytes
//! added up page by page.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;

use forebay::Kind;
use forebay::weights::{Closing, Group, LayerPlan, Odd, Patterns, Place, Plan, Sharding, Source, Tensor};
use proptest::prelude::*;

const GRAIN: u64 = 1 << 16;

fn tensor(name: &str, bytes: u64, align: u64) -> Tensor {
    Tensor { name: name.to_owned(), bytes, align }
}

/// Layers whose chosen tensor takes so many pages, beside one that is not chosen. None: nothing is chosen.
fn layers(pages: &[Option<u64>]) -> Vec<Vec<Tensor>> {
    let layer = |pages: &Option<u64>| {
        let chosen = pages.map(|pages| tensor("a.chosen", pages * GRAIN, 256));
        chosen.into_iter().chain([tensor("a.other", 12345, 4)]).collect()
    };
    pages.iter().map(layer).collect()
}

fn sharding() -> Sharding {
    Sharding { grain: GRAIN, ..Sharding::new(Patterns::new(&["*.chosen"]).unwrap()) }
}

fn of(ranks: u32, rank: u32) -> Group {
    Group { id: 0, rank, ranks }
}

fn plan(pages: &[u64], ranks: u32, odd: Odd) -> Plan {
    let pages: Vec<Option<u64>> = pages.iter().copied().map(Some).collect();
    Plan::new(&layers(&pages), of(ranks, 0), &Sharding { odd, ..sharding() }).unwrap()
}

/// The owner of each page of each layer, by asking every rank for its part: each page has exactly one.
fn owners(plan: &Plan, layer: usize, pages: u64) -> Vec<u32> {
    let mut owners = vec![None; pages as usize];
    for rank in 0..plan.group().ranks {
        for page in plan.part(layer, rank).unwrap() {
            assert_eq!(
                owners[page as usize].replace(rank),
                None,
                "page {page} of layer {layer} has two owners"
            );
        }
    }
    owners.into_iter().map(|owner| owner.expect("an owner")).collect()
}

/// Walks two steps layer by layer, as an engine does, with the next sharded layer pulled into its buffer while this one
/// is in use: the buffer of a layer in use is never the one that is written.
fn never_overwritten(plan: &Plan) -> bool {
    let buffers: Vec<u8> = plan
        .layers()
        .iter()
        .filter_map(|layer| match layer.place {
            Place::Buffer(buffer) => Some(buffer),
            Place::Resident => None,
        })
        .collect();
    let twice: Vec<u8> = buffers.iter().chain(&buffers).copied().collect();
    buffers.len() < 2 || twice.windows(2).all(|two| two[0] != two[1])
}

fn odd() -> impl Strategy<Value = Odd> {
    prop::sample::select(vec![Odd::Cheapest, Odd::ThirdBuffer, Odd::ResidentFirst, Odd::ResidentLast])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn every_page_of_a_sharded_layer_has_one_owner_and_ranks_own_equally_much(
        pages in prop::collection::vec(1_u64..40, 1..=62),
        ranks in 1_u32..=16,
        odd in odd(),
    ) {
        let plan = plan(&pages, ranks, odd);
        let mut totals = vec![0_u64; ranks as usize];
        for (layer, own) in plan.layers().iter().enumerate() {
            prop_assert_eq!(own.layout.pages(), pages[layer]);
            if own.place == Place::Resident {
                prop_assert_eq!(plan.part(layer, ranks - 1), Some(0..pages[layer]));
                continue;
            }
            let owners = owners(&plan, layer, pages[layer]);
            prop_assert!(owners.is_sorted(), "parts are in rank order: {:?}", owners);
            let mut of_layer = vec![0_u64; ranks as usize];
            owners.iter().for_each(|owner| of_layer[*owner as usize] += 1);
            let (least, most) = (of_layer.iter().min().unwrap(), of_layer.iter().max().unwrap());
            prop_assert!(most - least <= 1);
            totals.iter_mut().zip(of_layer).for_each(|(total, own)| *total += own);
        }
        prop_assert!(totals.iter().max().unwrap() - totals.iter().min().unwrap() <= 1, "{:?}", totals);
        prop_assert!(never_overwritten(&plan));
    }

    /// A map of each byte of each window: the tensor that it is of, laid out byte by byte, and the rank that owns it,
    /// with the remainder's pages dealt out one by one round the group.
    #[test]
    fn every_byte_has_its_tensor_and_its_owner(
        tensors in prop::collection::vec(prop::collection::vec((1_u64..300, 0_u32..7), 1..4), 1..=62),
        ranks in 1_u32..=16,
        odd in odd(),
    ) {
        const SMALL: u64 = 64;
        let name = |index: usize| format!("{index}.chosen");
        let layer = |all: &Vec<(u64, u32)>| -> Vec<Tensor> {
            let all = all.iter().enumerate();
            all.map(|(index, (bytes, align))| tensor(&name(index), *bytes, 1 << align)).collect()
        };
        let layers: Vec<_> = tensors.iter().map(layer).collect();
        let plan = Plan::new(&layers, of(ranks, 0), &Sharding { odd, grain: SMALL, ..sharding() }).unwrap();
        let mut dealt_to = 0;
        let is_sharded = |own: &&LayerPlan| own.place != Place::Resident;
        let (sharded, resident): (Vec<_>, Vec<_>) = plan.layers().iter().partition(is_sharded);
        for own in sharded.into_iter().chain(resident) {
            let mut bytes: Vec<Option<usize>> = Vec::new();
            for (index, (length, align)) in tensors[own.layer].iter().enumerate() {
                while !bytes.len().is_multiple_of(1 << align) {
                    bytes.push(None);
                }
                bytes.extend((0..*length).map(|_| Some(index)));
            }
            while !(bytes.len() as u64).is_multiple_of(SMALL) {
                bytes.push(None);
            }
            let mut owns = vec![0; ranks as usize];
            let pages = bytes.len() as u64 / SMALL;
            for page in 0..pages {
                // As many to each as to all, and then one by one from where the last layer ended.
                let full = pages - pages % u64::from(ranks);
                let to = if page < full { page % u64::from(ranks) } else { dealt_to };
                owns[to as usize] += SMALL;
                dealt_to = if page < full { dealt_to } else { (dealt_to + 1) % u64::from(ranks) };
            }
            let owner = owns.iter().enumerate().flat_map(|(rank, bytes)| (0..*bytes).map(move |_| rank as u32));
            let map: Vec<(Option<usize>, u32)> = bytes.iter().copied().zip(owner).collect();
            // The same of the plan.
            let placed = own.layout.tensors();
            let tensor_at = |at: u64| {
                placed.iter().position(|one| (one.offset..one.offset + one.bytes).contains(&at))
            };
            let owner_at = |at: u64| (0..ranks).find(|rank| own.cut.part(*rank).contains(&(at / SMALL))).unwrap();
            let planned: Vec<_> =
                (0..own.layout.pages() * SMALL).map(|at| (tensor_at(at), owner_at(at))).collect();
            prop_assert_eq!(map, planned, "layer {}", own.layer);
        }
    }

    /// Bytes, counted page by page: what is mapped for a rank, and the largest pull into each buffer.
    #[test]
    fn bytes_are_the_pages_counted_one_by_one(
        pages in prop::collection::vec(prop::option::weighted(0.8, 1_u64..30), 1..=62),
        (ranks, rank) in (1_u32..=16).prop_flat_map(|ranks| (Just(ranks), 0..ranks)),
        (odd, host) in (odd(), any::<bool>()),
    ) {
        prop_assume!(pages.iter().any(Option::is_some));
        let source = if host { Source::Host } else { Source::Peers };
        let plan = Plan::new(&layers(&pages), of(ranks, rank), &Sharding { odd, source, ..sharding() }).unwrap();
        let (mut resident, mut shards, mut on_host) = (0, 0, 0);
        let mut buffers: HashMap<u8, u64> = HashMap::new();
        for own in plan.layers() {
            let (mut mine, mut pulled) = (0, 0);
            for page in 0..pages[own.layer].unwrap() {
                let is_mine = plan.part(own.layer, rank).unwrap().contains(&page);
                if is_mine { mine += GRAIN } else { pulled += GRAIN }
            }
            prop_assert_eq!(plan.pulled(own), pulled);
            match own.place {
                Place::Resident => resident += mine,
                Place::Buffer(buffer) => {
                    shards += mine;
                    on_host += if host { mine + pulled } else { 0 };
                    let most = buffers.entry(buffer).or_default();
                    *most = pulled.max(*most);
                }
            }
            prop_assert!(!host || mine == 0 || own.place == Place::Resident);
        }
        let bytes = plan.bytes();
        prop_assert_eq!((bytes.resident, bytes.shards, bytes.host), (resident, shards, on_host));
        prop_assert_eq!(bytes.device(), resident + shards + buffers.values().sum::<u64>());
        let whole: u64 = pages.iter().flatten().sum::<u64>() * GRAIN;
        prop_assert_eq!(plan.whole(), whole);
        prop_assert_eq!(bytes.saved(whole), whole as i64 - bytes.device() as i64);
        // Whole pages and one rank: rounding changes nothing.
        prop_assert!(ranks > 1 || plan.exact_bytes() == bytes);
    }

    /// What is chosen for an odd number of layers is the cheapest on the rank that holds most, and a third buffer never
    /// is cheaper.
    #[test]
    fn nothing_costs_less_than_what_is_chosen(
        pages in prop::collection::vec(1_u64..40, 3..=21),
        ranks in 1_u32..=16,
    ) {
        let most = |odd| {
            let of_rank = |rank| {
                let layers = layers(&pages.iter().copied().map(Some).collect::<Vec<_>>());
                Plan::new(&layers, of(ranks, rank), &Sharding { odd, ..sharding() }).unwrap().bytes().device()
            };
            (0..ranks).map(of_rank).max().unwrap()
        };
        // The buffers of a decision are those that no rank exceeds: a page each more than the largest rank may have.
        let slack = 3 * GRAIN;
        let chosen = most(Odd::Cheapest);
        for other in [Odd::ThirdBuffer, Odd::ResidentFirst, Odd::ResidentLast] {
            prop_assert!(chosen <= most(other) + slack, "{:?}", other);
        }
    }

    /// A budget is kept on every rank, with the fewest layers that keep it.
    #[test]
    fn a_budget_is_kept_by_the_fewest_layers(
        pages in prop::collection::vec(1_u64..40, 1..=40),
        ranks in 1_u32..=16,
        share in 0.0_f64..1.2,
    ) {
        let layers = layers(&pages.iter().copied().map(Some).collect::<Vec<_>>());
        let budget = (share * (pages.iter().sum::<u64>() * GRAIN) as f64) as u64;
        let made = |rank, budget| Plan::new(&layers, of(ranks, rank), &Sharding { budget, ..sharding() });
        match made(0, Some(budget)) {
            Ok(plan) => {
                for rank in 0..ranks {
                    let other = made(rank, Some(budget)).unwrap();
                    prop_assert!(other.bytes().device() <= budget);
                    prop_assert_eq!(other.digest(), plan.digest());
                }
                prop_assert!(never_overwritten(&plan));
                let whole = pages.iter().sum::<u64>() * GRAIN;
                prop_assert_eq!(plan.sharded() == 0, budget >= whole);
            }
            Err(error) => {
                prop_assert_eq!(error.kind(), Kind::OutOfMemory);
                prop_assert!(error.number("least").unwrap() > budget);
                // What is said to be the least is enough.
                prop_assert!(made(0, error.number("least")).is_ok());
            }
        }
    }
}

#[test]
fn a_rank_may_own_nothing_of_a_layer() {
    let plan = plan(&[3, 3, 3, 3], 8, Odd::Cheapest);
    let owned: Vec<Vec<u32>> = (0..4).map(|layer| owners(&plan, layer, 3)).collect();
    // The remainder goes on where the layer before ended; within a window parts are in rank order.
    assert_eq!(owned, [vec![0, 1, 2], vec![3, 4, 5], vec![0, 6, 7], vec![1, 2, 3]]);
    assert_eq!(plan.part(0, 5), Some(3..3));
    assert_eq!(plan.part(2, 1), Some(1..1));
    assert_eq!((plan.part(4, 0), plan.part(0, 8)), (None, Some(3..3)));
}

#[test]
fn an_odd_number_of_layers_closes_by_what_costs_less() {
    let closing = |pages: &[u64], odd| plan(pages, 4, odd).closing();
    // Equal layers: a tie, and the first layer stays.
    assert_eq!(closing(&[8; 5], Odd::Cheapest), Closing::Resident(0));
    // A small layer costs the least if it is the resident one.
    assert_eq!(closing(&[8, 8, 8, 8, 2], Odd::Cheapest), Closing::Resident(4));
    assert_eq!(closing(&[2, 8, 8, 8, 8], Odd::Cheapest), Closing::Resident(0));
    for (odd, wanted) in [
        (Odd::ThirdBuffer, Closing::ThirdBuffer),
        (Odd::ResidentFirst, Closing::Resident(0)),
        (Odd::ResidentLast, Closing::Resident(4)),
    ] {
        assert_eq!(closing(&[8; 5], odd), wanted);
        assert_eq!(closing(&[8; 4], odd), Closing::Even);
    }
    let third = plan(&[8; 5], 4, Odd::ThirdBuffer);
    assert_eq!((third.bytes().buffers, third.sharded()), (vec![6 * GRAIN; 3], 5));
    // One layer stays resident, whatever is asked: a buffer would always hold it.
    for odd in [Odd::Cheapest, Odd::ThirdBuffer] {
        let one = plan(&[8], 4, odd);
        assert_eq!(
            (one.closing(), one.sharded(), one.bytes().device()),
            (Closing::Resident(0), 0, 8 * GRAIN)
        );
    }
    // Of two layers nothing is saved, and the plan says so.
    let two = plan(&[8; 2], 4, Odd::Cheapest);
    assert_eq!((two.sharded(), two.bytes().saved(two.whole())), (2, 0));
    let none = Plan::new(&layers(&[Some(4)]), of(4, 0), &Sharding::new(Patterns::default())).unwrap();
    assert!(none.layers().is_empty() && none.bytes().device() == 0 && none.closing() == Closing::Even);
}

#[test]
fn ranges_are_aligned_and_rounded_up_once() {
    let layers =
        [vec![tensor("b", 100, 4), tensor("a", 3, 1), tensor("c", GRAIN, 256)], vec![tensor("a", 5, 8)]];
    let sharding = Sharding { grain: GRAIN, ..Sharding::new(Patterns::new(&["?"]).unwrap()) };
    let plan = Plan::new(&layers, of(2, 1), &sharding).unwrap();
    let placed: Vec<(&str, u64, u64)> = plan.layers()[0]
        .layout
        .tensors()
        .iter()
        .map(|placed| (placed.name.as_str(), placed.offset, placed.bytes))
        .collect();
    assert_eq!(placed, [("b", 0, 100), ("a", 100, 3), ("c", 256, GRAIN)]);
    assert_eq!((plan.layers()[0].layout.pages(), plan.layers()[0].layout.bytes()), (2, 103 + GRAIN));
    assert_eq!(plan.pulled_exactly(&plan.layers()[1]), 2);
}

#[test]
fn a_digest_is_of_everything_but_the_rank() {
    let pages = [Some(5), Some(6), None, Some(7), Some(3)];
    let base = |rank| Plan::new(&layers(&pages), of(4, rank), &sharding()).unwrap().digest();
    assert!((0..4).all(|rank| base(rank) == base(0)));
    let with = |layers: &[Vec<Tensor>], group, sharding: &Sharding| {
        Plan::new(layers, group, sharding).unwrap().digest()
    };
    let renamed = {
        let mut renamed = layers(&pages);
        renamed[0][0].name = "b.chosen".to_owned();
        renamed
    };
    let (mut longer, mut later) = (layers(&pages), layers(&pages));
    longer[4][0].bytes -= 1;
    later.push(vec![]);
    let own = layers(&pages);
    let others = [
        with(&renamed, of(4, 0), &sharding()),
        with(&longer, of(4, 0), &sharding()),
        with(&later, of(4, 0), &sharding()),
        with(&own, of(5, 0), &sharding()),
        with(&own, Group { id: 1, ..of(4, 0) }, &sharding()),
        with(&own, of(4, 0), &Sharding { source: Source::Host, ..sharding() }),
        with(&own, of(4, 0), &Sharding { grain: 2 * GRAIN, ..sharding() }),
        with(&own, of(4, 0), &Sharding { budget: Some(1 << 40), ..sharding() }),
    ];
    for (i, one) in others.iter().enumerate() {
        assert!(*one != base(0) && !others[..i].contains(one), "{i}");
    }
}

#[test]
fn equal_tensor_parallel_indices_share() {
    let group = Group::of_dp_tp((3, 4), (1, 2)).unwrap();
    assert_eq!(group, Group { id: 1, rank: 3, ranks: 4 });
    assert_eq!(Group::of_dp_tp((4, 4), (0, 2)).unwrap_err().kind(), Kind::OutOfRange);
    assert_eq!(Group::of_dp_tp((0, 4), (2, 2)).unwrap_err().kind(), Kind::OutOfRange);
    assert_eq!(Group::of_dp_tp((0, 0), (0, 1)).unwrap_err().kind(), Kind::InvalidConfig);
}

#[test]
fn each_refusal_names_what_is_wrong() {
    let good = layers(&[Some(4), Some(4), Some(4), Some(4)]);
    let refuse = |layers: &[Vec<Tensor>], group: Group, sharding: &Sharding, kind: Kind, words: &str| {
        let error = Plan::new(layers, group, sharding).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let of_one = |tensor: Tensor| vec![vec![], vec![tensor]];
    let invalid = Kind::InvalidConfig;
    let chosen = "layer 1, a.chosen";
    let all = sharding();
    refuse(
        &of_one(tensor("a.chosen", 0, 4)),
        of(2, 0),
        &all,
        invalid,
        &format!("{chosen}: a tensor of no bytes"),
    );
    for align in [0, 3, 2 * GRAIN] {
        let words = format!("{chosen}: its alignment (align {align}, grain {GRAIN})");
        refuse(&of_one(tensor("a.chosen", 8, align)), of(2, 0), &all, invalid, &words);
    }
    refuse(&of_one(tensor("a.chosen", u64::MAX, 1)), of(2, 0), &all, Kind::Overflow, "layer 1");
    let long = vec![vec![tensor("a.chosen", u64::MAX, 1), tensor("b.chosen", 1, 1)]];
    refuse(&long, of(2, 0), &all, Kind::Overflow, "layer 0, b.chosen: the layer's bytes");
    let many = vec![vec![tensor("a.chosen", 1 << 59, 1)]; 3];
    refuse(&many, of(2, 0), &all, Kind::Overflow, "layer 2: the chosen tensors up to here");
    refuse(&vec![vec![]; 5000], of(2, 0), &Sharding::new(Patterns::default()), Kind::Overflow, "layers");
    refuse(&good, of(0, 0), &all, invalid, "the ranks of a group (ranks 0, most 4096)");
    refuse(&good, of(4097, 0), &all, invalid, "the ranks of a group");
    refuse(&good, of(4, 4), &all, Kind::OutOfRange, "the rank in its group (rank 4, ranks 4)");
    refuse(&good, of(4, 0), &Sharding { grain: 0, ..sharding() }, invalid, "the granule");
    refuse(&good, of(4, 0), &Sharding { grain: 3 << 20, ..sharding() }, invalid, "the granule");
    refuse(&good, of(4, 0), &Sharding { budget: Some(1), ..sharding() }, Kind::OutOfMemory, "the budget");
}
