//! Tables as text, prices against a naive interpolation, the best table against all tables, and the chooser
//! against its counters.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

const WORDS: [Overlap; 3] = Overlap::FIRST;

fn overlaps(layers: impl Into<prop::collection::SizeRange>) -> impl Strategy<Value = Vec<Overlap>> {
    prop::collection::vec(prop::sample::select(&Overlap::ALL[..]), layers)
}

/// A table with comments. The cases below give the number of the line of each word.
const TEXT: &str = "# by hand\nforebay overlap table 1\n\nversion 7\nlayers 3\n0 none\n1 dba\n  2   da\n";

#[test]
fn a_table_is_read_back_as_written() {
    let table = Table::from_text(TEXT).unwrap();
    assert_eq!(table, Table { version: 7, by_layer: vec![Overlap::None, Overlap::Dba, Overlap::Da] });
    assert_eq!(table.to_text(), "forebay overlap table 1\nversion 7\nlayers 3\n0 none\n1 dba\n2 da\n");
    assert_eq!(Table::fixed(2, Overlap::Da).by_layer, [Overlap::Da; 2]);
}

#[test]
fn a_fault_in_a_table_is_named_with_its_line() {
    let cases = [
        (
            "overlap table 1",
            "overlap tables 1",
            2,
            "`forebay overlap tables 1` where `forebay overlap table` belongs",
        ),
        ("table 1", "table one", 2, "forebay overlap table: `one` is not a number"),
        ("version 7", "version +7", 4, "version: `+7` is not a number"),
        ("version 7", "version 4294967296", 4, "version: `4294967296` is not a number"),
        ("version 7\n", "", 4, "`layers 3` where `version` belongs"),
        ("layers 3", "layers3", 5, "`layers3` where `layers` belongs"),
        ("layers 3", "layers 0", 5, "layers: 0 is not in 1 to 4096"),
        ("layers 3", "layers 5000", 5, "layers: 5000 is not in 1 to 4096"),
        ("layers 3", "layers 4", 9, "the text ends before layer 3"),
        ("layers 3", "layers 2", 8, "`2   da` after the last layer"),
        ("1 dba\n", "", 7, "layer 2 where layer 1 belongs"),
        ("1 dba", "0 dba", 7, "layer 0 where layer 1 belongs"),
        ("1 dba", "1", 7, "layer 1: `1` is not a layer and its order"),
        ("1 dba", "1 abd", 7, "layer 1: unknown order `abd`"),
        ("1 dba", "1 dba da", 7, "layer 1: unknown order `dba da`"),
        ("1 dba", "1 DBA", 7, "layer 1: unknown order `DBA`"),
    ];
    for (old, new, line, place) in cases {
        let error = Table::from_text(&TEXT.replace(old, new)).unwrap_err();
        assert_eq!((error.kind(), error.place(), error.number("line")), (Kind::BadFormat, place, Some(line)));
    }
    let error = Table::from_text(&TEXT.replace("table 1", "table 2")).unwrap_err();
    assert_eq!((error.kind(), error.number("found")), (Kind::BadVersion, Some(2)));
    assert_eq!(Table::from_text("").unwrap_err().place(), "the text ends before its title");
    let long = Table::from_text(&TEXT.replace("dba", &"é".repeat(500))).unwrap_err();
    assert!(long.place().chars().count() < 80, "{long}");
}

proptest! {
    #[test]
    fn any_table_survives_its_text_and_a_line_less_is_refused(
        by_layer in overlaps(1..80), version: u32, lost: prop::sample::Index,
    ) {
        let table = Table { version, by_layer };
        let text = table.to_text();
        prop_assert_eq!(Table::from_text(&text).unwrap(), table);
        let lost = lost.index(text.lines().count());
        let rest = text.lines().enumerate().filter(|(number, _)| *number != lost);
        let rest: Vec<&str> = rest.map(|(_, line)| line).collect();
        prop_assert!(Table::from_text(&rest.join("\n")).is_err());
    }

    #[test]
    fn no_text_makes_the_reader_panic(
        text in "(forebay overlap table 1\n)?(version [0-9]{0,11}\n)?(layers [0-9]{0,5}\n)?[0-9a-z# \n]{0,40}",
    ) {
        if let Ok(table) = Table::from_text(&text) {
            prop_assert_eq!(Table::from_text(&table.to_text()).unwrap(), table);
        }
    }
}

/// The prices of a layer that selects for itself.
fn first([none, da, dba]: [Vec<f64>; 3]) -> [Vec<f64>; 4] {
    [none, da, dba, Vec::new()]
}

/// Prices of one set of lines: by order, the cost without misses and the cost of a miss.
fn lines(orders: [(f64, f64); 3]) -> [Vec<f64>; 4] {
    first(orders.map(|(fixed, slope)| vec![fixed, fixed + 100.0 * slope]))
}

/// None is best below 10 misses a batch row, DA below 60, DBA above.
fn crossing() -> Prices {
    Prices::new(vec![0.0, 100.0], vec![lines([(0.0, 1000.0), (5000.0, 500.0), (23_000.0, 200.0)])]).unwrap()
}

#[test]
fn the_best_order_is_the_cheapest_and_of_equal_ones_the_simplest() {
    let prices = crossing();
    let table = Table::best(&prices, &[0.0, 9.9, 10.0, 10.1, 59.9, 60.0, 60.1, 1e6, f64::NAN, -1.0]).unwrap();
    let [none, da, dba] = WORDS;
    assert_eq!(table.by_layer, [none, none, none, da, da, da, dba, dba, none, none]);
    assert_eq!(prices.best(3, 10.0), (none, 10_000.0));
    // No overlap pays if split attention costs more than it can hide.
    let small =
        Prices::new(vec![0.0, 100.0], vec![lines([(0.0, 10.0), (5000.0, 0.0), (9000.0, 0.0)])]).unwrap();
    assert_eq!(Table::best(&small, &[0.0, 50.0, 100.0]).unwrap().by_layer, [none; 3]);
}

#[test]
fn prices_with_holes_are_refused() {
    let times = || first([vec![0.0, 1.0], vec![0.0, 1.0], vec![0.0, 1.0]]);
    let place = |misses: &[f64], exposed: Vec<[Vec<f64>; 4]>| {
        let error = Prices::new(misses.to_vec(), exposed).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidConfig);
        error.place().to_owned()
    };
    assert_eq!(place(&[], vec![times()]), "the first count of misses is not 0");
    assert_eq!(place(&[1.0, 2.0], vec![times()]), "the first count of misses is not 0");
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-9] {
        assert_eq!(place(&[0.0, bad], vec![times()]), "counts of misses do not ascend");
    }
    assert_eq!(place(&[0.0, 1.0], vec![]), "no layer");
    for bad in [vec![0.0], vec![0.0, f64::NAN], vec![-1.0, 0.0], vec![0.0, f64::INFINITY]] {
        let [none, da, ..] = times();
        let text = "exposed time of dba: one finite time for each count of misses";
        assert_eq!(place(&[0.0, 1.0], vec![times(), first([none, da, bad])]), text);
    }
    let [_, da, dba, ahead] = times();
    let text = "exposed time of none: one finite time for each count of misses";
    assert_eq!(place(&[0.0, 1.0], vec![times(), [Vec::new(), da.clone(), dba, ahead]]), text);
    let all = [da.clone(), da.clone(), Vec::new(), da.clone()];
    let text = "the order ahead in prices for all layers, of which the first selects";
    assert_eq!(place(&[0.0, 1.0], vec![all]), text);
    let two = Prices::new(vec![0.0, 1.0], vec![times(), times()]).unwrap();
    assert_eq!(Table::best(&two, &[1.0; 3]).unwrap_err().place(), "layers");
}

#[test]
fn an_order_without_a_price_is_not_chosen_and_no_table_may_have_it() {
    let times = |us: f64| vec![us, 100.0 * us];
    let follower = [times(9.0), times(5.0), Vec::new(), times(1.0)];
    let exposed = vec![first([times(9.0), times(5.0), times(3.0)]), follower];
    let prices = Prices::new(vec![0.0, 1.0], exposed).unwrap();
    let best = Table::best(&prices, &[1.0; 2]).unwrap();
    assert_eq!(best.by_layer, [Overlap::Dba, Overlap::Ahead]);
    assert!(prices.exposed(0, Overlap::Ahead, 1.0).is_infinite());
    assert!(prices.exposed(1, Overlap::Dba, f64::NAN).is_infinite());
    let bucket = |by_layer: [Overlap; 2]| {
        let by_layer = by_layer.to_vec();
        vec![Bucket { batch: 8, prices: prices.clone(), tables: vec![Table { version: 1, by_layer }] }]
    };
    let mut chooser = Chooser::new(bucket([Overlap::None; 2]), 1, RESTLESS).unwrap();
    assert!(chooser.choose(&[count(8); 2], 8, 8).unwrap().changed);
    assert_eq!(chooser.table(0, 0).unwrap().by_layer, best.by_layer);
    for (orders, layer) in [([Overlap::Ahead; 2], 0), ([Overlap::None, Overlap::Dba], 1)] {
        let error = Chooser::new(bucket(orders), 1, RESTLESS).unwrap_err();
        assert_eq!(error.place(), "a table has an order without a price in layer");
        assert_eq!(error.number("value"), Some(layer));
    }
}

/// Prices for `layers` layers, or once for all layers.
fn prices(layers: usize) -> impl Strategy<Value = Prices> {
    (1..5_usize, prop::sample::select(vec![1, layers])).prop_flat_map(|(points, layers)| {
        let gaps = prop::collection::vec(0.5..200.0, points - 1);
        let times = || prop::collection::vec(0.0..50_000.0, points);
        let exposed = prop::collection::vec([times(), times(), times()], layers);
        (gaps, exposed).prop_map(|(gaps, exposed)| {
            let exposed = exposed.into_iter().map(first).collect();
            let misses = gaps.iter().scan(0.0, |sum, gap| {
                *sum += gap;
                Some(*sum)
            });
            Prices::new(std::iter::once(0.0).chain(misses).collect(), exposed).unwrap()
        })
    })
}

/// Walks along the measured points.
fn naive(misses: &[f64], times: &[f64], at: f64) -> f64 {
    let mut segment = (0, 0);
    for index in 1..misses.len() {
        if index == 1 || at >= misses[index - 1] {
            segment = (index - 1, index);
        }
    }
    let (from, to) = segment;
    if from == to {
        return times[0];
    }
    let slope = (times[to] - times[from]) / (misses[to] - misses[from]);
    f64::max(0.0, times[from] + slope * (at - misses[from]))
}

proptest! {
    #[test]
    fn prices_are_linear_between_the_points(prices in prices(3), layer in 0..3_usize, at in 0.0..900.0) {
        for overlap in WORDS {
            let times = &prices.exposed[if prices.exposed.len() == 1 { 0 } else { layer }][place(overlap)];
            let (found, wanted) = (prices.exposed(layer, overlap, at), naive(&prices.misses, times, at));
            prop_assert!((found - wanted).abs() <= 1e-9 * wanted.max(1e6), "{found} {wanted}");
            for (misses, time) in prices.misses.iter().zip(times) {
                let found = prices.exposed(layer, overlap, *misses);
                prop_assert!((found - time).abs() <= 1e-6, "{found} {time}");
            }
            for odd in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, -0.0] {
                prop_assert!(prices.exposed(layer, overlap, odd).is_finite());
            }
        }
    }

    #[test]
    fn no_table_exposes_less_than_the_best(prices in prices(4), misses in prop::collection::vec(0.0..900.0, 4)) {
        let best = prices.of_table(&Table::best(&prices, &misses).unwrap().by_layer, &misses);
        for number in 0..81_usize {
            let table = [1, 3, 9, 27].map(|place| WORDS[number / place % 3]);
            prop_assert!(best <= prices.of_table(&table, &misses));
        }
    }
}

fn count(misses: u32) -> LayerCount {
    LayerCount { misses, ..LayerCount::default() }
}

fn chooser(tables: &[Overlap], most: u32, hysteresis: Hysteresis) -> Chooser {
    let tables = tables.iter().map(|overlap| Table::fixed(3, *overlap)).collect();
    Chooser::new(vec![Bucket { batch: 8, prices: crossing(), tables }], most, hysteresis).unwrap()
}

const STEADY: Hysteresis = Hysteresis { smoothing: 0.25, share: 0.1, least_ns: 100.0, steps: 4 };
const RESTLESS: Hysteresis = Hysteresis { smoothing: 1.0, share: 0.0, least_ns: 0.0, steps: 1 };

#[test]
fn a_captured_table_is_taken_when_it_has_been_better_for_some_steps() {
    let mut chooser = chooser(&WORDS, 3, STEADY);
    let mut choose = |misses: u32| chooser.choose(&[count(8 * misses); 3], 8, 5).unwrap();
    let at = |index, version| Choice { bucket: 0, index, version, changed: false };
    assert_eq!([(); 6].map(|()| choose(0)), [at(0, 1); 6]);
    // 30 misses a row, smoothed: 7.5, 13.1, ... DA saves a tenth from the second step on.
    assert_eq!([(); 6].map(|()| choose(30)), [at(0, 1), at(0, 1), at(0, 1), at(0, 1), at(1, 1), at(1, 1)]);
    // A single step counts only with its smoothing weight.
    assert_eq!([choose(300), choose(30), choose(30), choose(30)], [at(1, 1); 4]);
    assert_eq!(chooser.table(0, 1), Some(&Table::fixed(3, Overlap::Da)));
    assert_eq!((chooser.table(0, 3), chooser.table(1, 0)), (None, None));
}

#[test]
fn where_no_table_is_near_the_best_the_oldest_is_replaced_and_its_version_rises() {
    let mut chooser = chooser(&[Overlap::None, Overlap::Dba], 3, Hysteresis { steps: 2, ..RESTLESS });
    let mut choose = |misses: [u32; 3]| {
        let choice = chooser.choose(&misses.map(|m| count(8 * m)), 8, 8).unwrap();
        (
            choice.index,
            choice.version,
            choice.changed,
            chooser.table(0, choice.index).unwrap().by_layer.clone(),
        )
    };
    let [none, da, dba] = WORDS;
    let mixed = [0, 30, 90];
    assert_eq!(choose(mixed), (0, 1, false, vec![none; 3]));
    // An empty place first,
    assert_eq!(choose(mixed), (2, 1, true, vec![none, da, dba]));
    assert_eq!(choose(mixed), (2, 1, false, vec![none, da, dba]));
    // then a table that is already there,
    assert_eq!(choose([0; 3]).0, 2);
    assert_eq!(choose([0; 3]), (0, 1, false, vec![none; 3]));
    // then the place of the least recently used table, which was never used.
    choose([30; 3]);
    assert_eq!(choose([30; 3]), (1, 2, true, vec![da; 3]));
    choose([90, 0, 0]);
    assert_eq!(choose([90, 0, 0]), (2, 2, true, vec![dba, none, none]));
}

#[test]
fn a_single_table_is_replaced_in_place() {
    let mut chooser = chooser(&[Overlap::None], 1, RESTLESS);
    let choice = chooser.choose(&[count(8 * 30); 3], 8, 8).unwrap();
    assert_eq!(choice, Choice { bucket: 0, index: 0, version: 2, changed: true });
    assert_eq!(chooser.table(0, 0).unwrap().by_layer, [Overlap::Da; 3]);
}

#[test]
fn tables_that_do_not_fit_a_chooser_are_refused() {
    let bucket =
        |batch, layers| Bucket { batch, prices: crossing(), tables: vec![Table::fixed(layers, Overlap::Da)] };
    let place = |buckets: Vec<Bucket>, most, hysteresis| {
        let error = Chooser::new(buckets, most, hysteresis).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidConfig);
        error.place().to_owned()
    };
    assert_eq!(place(vec![], 1, STEADY), "no bucket, no table or no layer");
    assert_eq!(place(vec![bucket(1, 0)], 1, STEADY), "no bucket, no table or no layer");
    assert_eq!(place(vec![bucket(1, 3)], 0, STEADY), "tables of a bucket");
    assert_eq!(place(vec![bucket(1, 3)], 257, STEADY), "tables captured at most");
    assert_eq!(place(vec![bucket(1, 3), bucket(2, 4)], 1, STEADY), "layers of a table");
    assert_eq!(place(vec![bucket(2, 3), bucket(2, 3)], 1, STEADY), "batches of the buckets do not ascend");
    assert_eq!(place(vec![bucket(0, 3)], 1, STEADY), "batches of the buckets do not ascend");
    for smoothing in [0.0, -1.0, 1.1, f64::NAN] {
        let text = place(vec![bucket(1, 3)], 1, Hysteresis { smoothing, ..STEADY });
        assert_eq!(text, "smoothing, above 0 and at most 1");
    }
    let text = "share, least_ns or steps of the hysteresis";
    assert_eq!(place(vec![bucket(1, 3)], 1, Hysteresis { share: f64::NAN, ..STEADY }), text);
    assert_eq!(place(vec![bucket(1, 3)], 1, Hysteresis { least_ns: f64::INFINITY, ..STEADY }), text);
    assert_eq!(place(vec![bucket(1, 3)], 1, Hysteresis { steps: 0, ..STEADY }), text);

    let mut chooser = chooser(&WORDS, 3, STEADY);
    let mut place = |counts: &[LayerCount], rows, next| {
        let error = chooser.choose(counts, rows, next).unwrap_err();
        (error.kind(), error.place().to_owned())
    };
    assert_eq!(place(&[count(1); 2], 8, 8), (Kind::OutOfRange, "layers of the counters".to_owned()));
    assert_eq!(place(&[count(1); 3], 0, 8), (Kind::OutOfRange, "batch rows".to_owned()));
    assert_eq!(place(&[count(1); 3], 8, 9), (Kind::OutOfRange, "batch rows".to_owned()));
    assert_eq!(chooser.misses(), [0.0; 3], "nothing has changed");
}

/// The number of a chooser's moves, over misses that jump between two levels.
fn moves(hysteresis: Hysteresis, levels: [u32; 2], steps: usize) -> usize {
    let mut chooser = chooser(&WORDS, 3, hysteresis);
    let choices: Vec<(usize, u32)> = (0..steps)
        .map(|step| chooser.choose(&[count(8 * levels[step % 2]); 3], 8, 8).unwrap())
        .map(|choice| (choice.index, choice.version))
        .collect();
    choices.windows(2).filter(|pair| pair[0] != pair[1]).count()
}

#[test]
fn the_chooser_does_not_flap_and_without_hysteresis_it_would() {
    for levels in [[5, 18], [50, 72], [2, 40]] {
        assert!(moves(STEADY, levels, 1000) <= 1, "{levels:?}");
        assert!(moves(RESTLESS, levels, 1000) >= 998, "{levels:?}");
    }
}

/// Counters of a run: each level for some steps, with noise.
fn runs() -> impl Strategy<Value = Vec<[u32; 3]>> {
    let level = ([0..120_u32, 0..120, 0..120], 1..20_usize, 0..30_u32);
    prop::collection::vec(level, 1..12).prop_map(|levels| {
        let noisy = |(level, steps, noise): ([u32; 3], usize, u32)| {
            (0..steps as u32).map(move |step| level.map(|misses| misses + step * 7919 % (noise + 1)))
        };
        levels.into_iter().flat_map(noisy).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn each_move_was_worth_it_for_long_enough(
        runs in runs(), prices in prices(3), most in 1..4_u32,
        smoothing in 0.05..1.0_f64, share in 0.0..0.5_f64, least_ns in 0.0..2000.0_f64, steps in 1..6_u32,
    ) {
        let hysteresis = Hysteresis { smoothing, share, least_ns, steps };
        let tables = vec![Table::fixed(3, Overlap::None)];
        let bucket = Bucket { batch: 4, prices: prices.clone(), tables: tables.clone() };
        let new = || Chooser::new(vec![bucket.clone()], most, hysteresis);
        let (mut chooser, mut twin) = (new().unwrap(), new().unwrap());
        let (mut current, mut version, mut since) = (tables[0].clone(), (0, 1), 0);
        let mut history: Vec<[f64; 3]> = Vec::new();
        let last = *runs.last().unwrap();
        let settled = std::iter::repeat_n(last, 400);
        for (step, misses) in runs.into_iter().chain(settled).enumerate() {
            let counts = misses.map(|misses| count(4 * misses));
            let choice = chooser.choose(&counts, 4, 4).unwrap();
            prop_assert_eq!(twin.choose(&counts, 4, 4).unwrap(), choice);
            prop_assert!(choice.index < most as usize);
            let before = history.last().copied();
            history.push(std::array::from_fn(|layer| match before {
                Some(known) => known[layer] * (1.0 - smoothing) + f64::from(misses[layer]) * smoothing,
                None => misses[layer].into(),
            }));
            let table = chooser.table(0, choice.index).unwrap();
            prop_assert_eq!(table.version, choice.version);
            if (choice.index, choice.version) == version {
                prop_assert!(!choice.changed);
                prop_assert_eq!(&table.by_layer, &current.by_layer, "a table changes with its version");
                continue;
            }
            // The saving was available for enough steps since the last move, and large enough.
            prop_assert!(step + 1 >= since + steps as usize);
            for known in &history[step + 1 - steps as usize..] {
                let now = prices.of_table(&current.by_layer, known);
                let best = prices.of_table(&Table::best(&prices, known).unwrap().by_layer, known);
                prop_assert!(now - best >= (share * now).max(least_ns) - 1e-6, "{now} {best}");
            }
            (current, version, since) = (table.clone(), (choice.index, choice.version), step + 1);
        }
        // With constant misses it ends at a table from which neither a move nor a new table pays.
        let known = history.last().unwrap();
        let now = prices.of_table(&current.by_layer, known);
        let best = prices.of_table(&Table::best(&prices, known).unwrap().by_layer, known);
        prop_assert!(now - best <= 2.0 * (share * now).max(least_ns) + 1e-3, "{now} {best}");
    }
}
