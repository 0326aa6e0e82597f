//! Elastic budgets: steps at both sides of the batch where the slots end.

use forebay::predict::elastic::Pool;
use forebay::predict::simulate::{Options, Order, Outcome, Point};

use super::{POINT, all, on_the_page, simulator};
use forebay::overlap::Overlap;

/// The pool that 80 GiB leave 160 sequences of 32K.
fn pool() -> Pool {
    Pool::planned(160, 6784)
}

fn step(batch: u32, ratio: f64, options: &Options) -> Outcome {
    simulator().run(&Point { batch, ratio, ..POINT }, options).unwrap()
}

#[test]
fn nothing_is_missed_or_exposed_below_the_batch_where_the_slots_end() {
    let first = pool().misses_from(POINT.context);
    let best = Options { order: Order::ByLayer, ..Options::default() };
    for batch in (1..first + 3).step_by(4).chain([first - 1, first]) {
        let ratio = pool().ratio(batch, POINT.context).unwrap();
        let Outcome { misses, exposed_ms, exposed_us, overlap, .. } = step(batch, ratio, &best);
        let nothing = misses.iter().chain(&exposed_us).all(|of_layer| *of_layer == 0.0) && exposed_ms == 0.0;
        assert_eq!(nothing, batch < first, "batch {batch}: {exposed_ms} ms");
        assert!(batch >= first || overlap.iter().all(|order| *order == Overlap::None));
    }
    // An order that splits attention pays for it, whether or not there is anything to hide.
    assert!(step(first - 1, 1.0, &all(Overlap::Da)).exposed_ms > 0.0);
    assert_eq!(step(first - 1, 1.0, &all(Overlap::None)).exposed_ms, 0.0);
}

#[test]
fn the_table_of_elastic_budgets_is_the_computed_one() {
    let mean = |outcome: &Outcome| outcome.misses.iter().sum::<f64>() / outcome.misses.len() as f64;
    let fixed = pool().ratio(160, POINT.context).unwrap();
    let lines = [8, 16, 33, 34, 64, 96, 160].map(|batch| {
        let ratio = pool().ratio(batch, POINT.context).unwrap();
        let [own, planned] = [ratio, fixed].map(|ratio| step(batch, ratio, &Options::default()));
        let [misses, planned_misses] = [mean(&own), mean(&planned)];
        format!(
            "| {batch} | {ratio:.3} | {misses:.1} | {:.2} | {:.2} | {planned_misses:.1} | {:.2} | {:.2} |",
            own.step_ms, own.exposed_ms, planned.step_ms, planned.exposed_ms
        )
    });
    on_the_page(&lines);
}
