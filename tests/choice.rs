//! Tables of orders, made from prices that come from running the schedule itself on the virtual clock.
#![allow(clippy::unwrap_used, missing_docs)]

use forebay::device::descriptor::LayerCount;
use forebay::overlap::{Bucket, Chooser, Hysteresis, Overlap, Table};
use forebay::predict::setup::Setup;
use forebay::predict::simulate::{Options, Order, Point, Simulator};

const POINT: Point = Point { context: 128 << 10, batch: 160, mtp: 2, accept: 1.7, ratio: 0.21 };

fn simulator() -> Simulator {
    Simulator::new(Setup::named("ess").unwrap().unwrap())
}

fn halves() -> Options {
    Options { two_batch: Some(true), ..Options::default() }
}

/// The ESS study's figure: 128K, half batches of 80, 37 GiB/s.
#[test]
fn the_orders_cross_where_the_digitised_curves_do() {
    let prices = simulator().prices(&POINT, &halves()).unwrap();
    for misses in [32.0, 64.0, 128.0, 256.0, 512.0] {
        let [none, da, dba] = Overlap::FIRST.map(|order| prices.exposed(0, order, misses));
        assert_eq!(da <= dba, misses <= 128.0, "{misses}: {da} {dba}");
        assert!(none >= da.min(dba), "{misses}: {none}");
    }
    let misses = [0.0, 64.0, 128.0, 256.0, 512.0];
    let table: Vec<Overlap> = misses.map(|misses| prices.best(0, misses).0).to_vec();
    assert_eq!(table[1..], [Overlap::Da, Overlap::Da, Overlap::Dba, Overlap::Dba]);
}

#[test]
fn no_order_is_worth_it_for_a_small_batch() {
    let prices = simulator().prices(&Point { batch: 2, ..POINT }, &Options::default()).unwrap();
    let few = Table::best(&prices, &[0.0, 20.0, 60.0]).unwrap_err();
    assert_eq!(few.place(), "layers", "prices are by layer");
    let table = Table::best(&prices, &[40.0; 61]).unwrap();
    assert_eq!(table, Table::fixed(61, Overlap::None));
}

/// A lookup in a table is as good as a simulation of every layer.
#[test]
fn a_table_from_prices_is_as_good_as_one_by_simulation() {
    let mut simulator = simulator();
    for (context, batch, ratio) in [(32 << 10, 160, 0.21), (128 << 10, 54, 0.1), (32 << 10, 24, 0.5)] {
        let point = Point { context, batch, ratio, ..POINT };
        let found = simulator.run(&point, &Options::default()).unwrap();
        let prices = simulator.prices(&point, &Options::default()).unwrap();
        let table = Table::best(&prices, &found.misses).unwrap();
        let table = Table::from_text(&table.to_text()).unwrap();
        let options = Options { order: Order::Table(table.by_layer), ..Options::default() };
        let looked_up = simulator.run(&point, &options).unwrap();
        assert!(looked_up.step_ms <= found.step_ms * 1.001, "{} {}", looked_up.step_ms, found.step_ms);
        let worst = [Overlap::None, Overlap::Da, Overlap::Dba].map(|order| {
            let options = Options { order: Order::All(order), ..Options::default() };
            simulator.run(&point, &options).unwrap().step_ms
        });
        assert!(worst.iter().all(|ms| looked_up.step_ms <= ms * 1.001), "{} {worst:?}", looked_up.step_ms);
    }
}

/// Sequences grow beyond their budgets: the misses rise, layer by layer, and the chooser follows in few moves.
#[test]
fn a_chooser_follows_rising_misses_in_few_moves() {
    let (mut simulator, rows) = (simulator(), 80);
    let prices = simulator.prices(&POINT, &halves()).unwrap();
    let tables = vec![Table::fixed(61, Overlap::None), Table::fixed(61, Overlap::Da)];
    let bucket = Bucket { batch: rows, prices: prices.clone(), tables };
    let mut chooser = Chooser::new(vec![bucket], 3, Hysteresis::default()).unwrap();
    let mut moves = Vec::new();
    for step in 0..6000_u32 {
        let misses = |layer: u32| (step / 20 * (layer % 3 + 1) / 3 + (step * 7 + layer) % 9).min(400);
        let counts =
            (0..61).map(|layer| LayerCount { misses: rows * misses(layer), ..LayerCount::default() });
        let counts: Vec<LayerCount> = counts.collect();
        let choice = chooser.choose(&counts, rows, rows).unwrap();
        if moves.last() != Some(&(choice.index, choice.version)) {
            moves.push((choice.index, choice.version));
        }
    }
    let (index, _) = *moves.last().unwrap();
    let table = chooser.table(0, index).unwrap();
    let best = Table::best(&prices, chooser.misses()).unwrap();
    let exposed = |table: &Table| -> f64 {
        let layers = table.by_layer.iter().zip(chooser.misses()).enumerate();
        layers.map(|(layer, (order, misses))| prices.exposed(layer, *order, *misses)).sum()
    };
    assert!(exposed(table) <= 1.2 * exposed(&best), "{table:?} {best:?}");
    assert!((2..8).contains(&moves.len()), "{moves:?}");
    assert!(table.by_layer.contains(&Overlap::Dba), "{table:?}");
}

/// A draft layer is priced by its own draft passes: one query row each, the misses divided among them.
#[test]
fn draft_layers_have_prices_of_their_own() {
    let mut file = Setup::named("ess").unwrap().unwrap().file().clone();
    file.model.draft_layers = 1;
    let mut simulator = Simulator::new(Setup::new(file).unwrap());
    let point = Point { mtp: 3, ..POINT };
    let prices = simulator.prices(&point, &halves()).unwrap();
    let one = Point { mtp: 1, accept: 1.0, ..POINT };
    let mut us = |misses, order| simulator.layer_us(&one, &halves(), misses, order).unwrap();
    for order in Overlap::FIRST {
        // Two draft passes, from no misses to 64 of each: the draft layer is exposed so much longer.
        let wanted = 2.0 * (us(64.0, order) - us(0.0, order)) * 1e3;
        let found = prices.exposed(61, order, 128.0) - prices.exposed(61, order, 0.0);
        assert!((found - wanted).abs() < 1e-6 * wanted.abs(), "{} {found} {wanted}", order.name());
        assert_ne!(prices.exposed(60, order, 128.0), prices.exposed(61, order, 128.0));
    }
}
