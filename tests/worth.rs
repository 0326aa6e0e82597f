//! Whether offload pays: by the setup `ess`, against a search that tries every batch, and in cases where it must not
//! pay.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use forebay::Shape;
use forebay::device::rates::{Rates, RowRates};
use forebay::predict::plan::{Batch, Demand, Note, Ratio, plan};
use forebay::predict::setup::{Link, Setup};
use forebay::predict::simulate::{Options, Point, Simulator};
use forebay::predict::worth::{Aim, Worth, is_unknown, price, worth};

const ACCEPT: f64 = 1.7;

/// The cache of the ESS study: 80 GiB, two query rows.
fn demand(context: u32) -> Demand {
    Demand {
        query_rows: 2,
        micro_batches: 2,
        count_tables: false,
        ..Demand::new(Shape::DEEPSEEK_V3_2, 80 << 30, context)
    }
}

fn ess() -> Setup {
    Setup::named("ess").unwrap().unwrap()
}

/// The setup on a link that gathers rows at `rate` bytes per second.
fn gathers_at(rate: f64) -> Simulator {
    let base = Rates::preset("pcie5").unwrap();
    Simulator::new(ess().on_link(Link::Rates(Rates { gather: RowRates::flat(656, rate), ..base })).unwrap())
}

/// Tokens per second of every batch, planned and simulated one by one.
fn by_batch(
    demand: &Demand,
    simulator: &mut Simulator,
    batches: std::ops::RangeInclusive<u32>,
) -> Vec<(u32, f64)> {
    let mut all = Vec::new();
    for batch in batches {
        let one = Demand { batch: Batch::Sequences(batch), ratio: Ratio::Auto, ..demand.clone() };
        let Ok(planned) = plan(&one) else { break };
        let point = Point { context: demand.context, batch, mtp: 2, accept: ACCEPT, ratio: planned.ratio };
        let Ok(outcome) = simulator.run(&point, &Options::default()) else { break };
        all.push((batch, outcome.throughput));
    }
    all
}

#[test]
fn the_search_agrees_with_trying_every_batch() {
    for (context, rate) in [(32 * 1024, 39.7e9), (32 * 1024, 8e9), (128 * 1024, 39.7e9)] {
        let mut simulator = gathers_at(rate);
        let demand = demand(context);
        let worth = worth(&demand, ACCEPT, &Options::default(), &mut simulator).unwrap();
        let without = worth.without.as_ref().unwrap();
        let resident = without.planned.resident_batch;
        let all = by_batch(&demand, &mut simulator, resident + 1..=without.planned.most_batch);
        let most = all.iter().map(|(_, throughput)| *throughput).fold(0.0, f64::max);
        let found = worth.most().unwrap().outcome.throughput;
        // Throughput by batch has steps, and the search looks closely only around the best of every few batches.
        assert!(found > 0.99 * most, "{context} {rate}: {found} of {most}");
        let first = all.iter().find(|(_, throughput)| *throughput > worth.floor()).map(|(batch, _)| *batch);
        assert_eq!(worth.pays_from, first, "{context} {rate}");
        for tried in &worth.with {
            let (_, throughput) = all.iter().find(|(batch, _)| *batch == tried.planned.batch).unwrap();
            assert!((tried.outcome.throughput / throughput - 1.0).abs() < 1e-9);
        }
    }
}

#[test]
fn a_plan_says_when_slow_gathers_make_offloading_not_worth_it() {
    // Single rows by cudaMemcpyAsync (the ESS study: 0.79 GB/s).
    let mut simulator = gathers_at(0.79e9);
    let slow = worth(&demand(32 * 1024), ACCEPT, &Options::default(), &mut simulator).unwrap();
    assert_eq!(slow.pays_from, None);
    let most = slow.most().unwrap();
    assert!(!most.planned.offloads() && most.planned.notes.contains(&Note::Slower));
    let asked = Demand { batch: Batch::Sequences(128), ..demand(32 * 1024) };
    let priced = price(&asked, ACCEPT, &Options::default(), &mut simulator).unwrap();
    assert!(priced.planned.notes.contains(&Note::Slower));
    assert!(priced.outcome.throughput < priced.without.unwrap().throughput);
    // With a kernel it does.
    let fast = price(&asked, ACCEPT, &Options::default(), &mut gathers_at(37e9)).unwrap();
    assert!(!fast.planned.notes.contains(&Note::Slower));
    assert!(fast.outcome.throughput > 1.3 * fast.without.unwrap().throughput);
}

#[test]
fn a_faster_link_never_yields_less_and_its_best_batch_is_not_smaller() {
    let mut before: Option<(f64, u32)> = None;
    for link in Rates::PRESETS {
        let setup = ess().on_link(Link::Preset(link.to_owned())).unwrap();
        let worth =
            worth(&demand(32 * 1024), ACCEPT, &Options::default(), &mut Simulator::new(setup)).unwrap();
        let most = worth.most().unwrap();
        let now = (most.outcome.throughput, most.planned.batch);
        if let Some(before) = before {
            assert!(now.0 >= before.0 && now.1 >= before.1, "{link}: {now:?} after {before:?}");
        }
        before = Some(now);
    }
}

#[test]
fn another_model_is_planned_by_its_roofline() {
    let glm = ess().of_model("glm-5").unwrap();
    assert_eq!(glm.shape().layers, 78);
    assert!(glm.name().contains("roofline") && glm.file().costs == Default::default());
    let demand = Demand { shape: *glm.shape(), ..demand(32 * 1024) };
    let judged = worth(&demand, ACCEPT, &Options::default(), &mut Simulator::new(glm)).unwrap();
    assert!(judged.pays_from.is_some());
    assert_eq!(ess().of_model("deepseek-v3.2").unwrap().file(), ess().file());
    // Dense attention has no misses to simulate; its setup is for plans of sharded weights.
    let dense = ess().of_model("deepseek-v3").unwrap();
    let demand = Demand { shape: *dense.shape(), ..demand };
    let error = worth(&demand, ACCEPT, &Options::default(), &mut Simulator::new(dense)).unwrap_err();
    assert!(error.place().contains("dense"), "{error}");
    for (name, field) in [("gqa-8x128", "model.dims"), ("gpt", "model.preset")] {
        let error = ess().of_model(name).unwrap_err();
        assert!(error.place().contains(field), "{name}: {error}");
    }
}

#[test]
fn points_without_known_misses_are_not_tried_and_are_listed() {
    let worth = worth(&demand(128 * 1024), ACCEPT, &Options::default(), &mut Simulator::new(ess())).unwrap();
    let most = worth.most().unwrap();
    assert!(most.planned.notes.contains(&Note::Untried) && !most.planned.notes.contains(&Note::Unknown));
    assert!(worth.with.iter().all(|priced| priced.planned.ratio > 0.099));
}

/// Costs end at the last measurement, as misses do: the plan remains, and says that its time is unknown.
#[test]
fn points_without_known_costs_are_not_tried_and_are_listed() {
    let ends_at = |tokens: f64| {
        let mut file = ess().file().clone();
        let rest = file.costs.rest.as_mut().unwrap();
        let count = rest.axes[0].at.iter().filter(|at| **at <= tokens).count();
        rest.axes[0].at.truncate(count);
        rest.us.truncate(count);
        *rest.axes[0].at.last_mut().unwrap() = tokens;
        Simulator::new(Setup::new(file).unwrap())
    };
    let (demand, options) = (demand(32 * 1024), Options::default());
    // Two micro-batches of 64 tokens, twice over: 128 sequences.
    let some = worth(&demand, ACCEPT, &options, &mut ends_at(64.0)).unwrap();
    let last = some.with.last().unwrap();
    assert!(last.planned.notes.contains(&Note::Untried));
    assert!((100..=128).contains(&last.planned.batch), "{}", last.planned.batch);
    // Not even the first sequence beyond those that are held whole.
    let none = worth(&demand, ACCEPT, &options, &mut ends_at(27.0)).unwrap();
    assert!(none.with.is_empty() && none.pays_from.is_none(), "{:?}", none.best);
    assert!(none.most().unwrap().planned.notes.contains(&Note::Untried));
    let asked = Demand { batch: Batch::Sequences(100), ..demand.clone() };
    assert!(is_unknown(&price(&asked, ACCEPT, &options, &mut ends_at(27.0)).unwrap_err()));
    // The costs of batches that are held whole are unknown too, or larger than a step is simulated for.
    assert!(is_unknown(&worth(&demand, ACCEPT, &options, &mut ends_at(12.0)).unwrap_err()));
    let few = Demand { batch: Batch::Sequences(8), ..demand.clone() };
    assert!(price(&few, ACCEPT, &options, &mut ends_at(12.0)).unwrap().without.is_none());
    let huge = Demand { gpu: 32 << 40, ..demand };
    assert!(is_unknown(&worth(&huge, ACCEPT, &options, &mut ends_at(64.0)).unwrap_err()));
    let point = Point { context: 32 << 10, batch: 1 << 20, mtp: 2, accept: ACCEPT, ratio: 1.0 };
    assert!(is_unknown(&ends_at(64.0).run(&point, &options).unwrap_err()));
    // Invalid input is another error.
    let error = price(&few, 9.0, &options, &mut ends_at(64.0)).unwrap_err();
    assert!(!is_unknown(&error) && error.place().starts_with("accept"), "{error}");
}

/// The search among batches that decode fast enough, against trying every one: with offload the best of them, without
/// it the largest.
#[test]
fn batches_slower_than_the_asked_speed_are_not_chosen() {
    let (demand, options) = (demand(64 * 1024), Options::default());
    let mut simulator = Simulator::new(ess());
    let all = by_batch(&demand, &mut simulator, 1..=200);
    for least_otps in [15.0, 20.0, 24.0, 26.0, 30.0, 45.0, 70.0] {
        let aim = Aim { accept: ACCEPT, least_otps };
        let worth = worth(&demand, aim, &options, &mut simulator).unwrap();
        let resident = plan(&demand).unwrap().resident_batch;
        let fast: Vec<(u32, f64)> = all
            .iter()
            .copied()
            .filter(|(batch, throughput)| throughput / 8.0 / f64::from(*batch) >= least_otps)
            .collect();
        let without = fast.iter().filter(|(batch, _)| *batch <= resident).map(|(batch, _)| *batch).max();
        assert_eq!(worth.without.as_ref().map(|without| without.planned.batch), without, "{least_otps}");
        let most = fast
            .iter()
            .filter(|(batch, _)| *batch > resident)
            .map(|(_, throughput)| *throughput)
            .fold(0.0, f64::max);
        let best = worth.with.iter().find(|priced| Some(priced.planned.batch) == worth.best);
        let found = best.map_or(0.0, |best| best.outcome.throughput);
        assert!(found >= 0.99 * most && found <= most * (1.0 + 1e-9), "{least_otps}: {found} of {most}");
        assert_eq!(worth.alone.is_some(), fast.is_empty(), "{least_otps}");
        // Batches that yield more but are too slow do not count as batches that do not pay.
        let more = all.iter().any(|(batch, throughput)| *batch > resident && *throughput > worth.floor());
        assert_eq!(worth.more_too_slow, more && worth.pays_from.is_none(), "{least_otps}");
        if let Some(without) = worth.without.as_ref().filter(|_| worth.pays_from.is_none()) {
            let has = |note| without.planned.notes.contains(&note);
            assert_eq!([has(Note::MoreTooSlow), has(Note::Slower)], [more, !more], "{least_otps}");
        }
        for priced in &worth.with {
            let slow = priced.outcome.otps < least_otps;
            assert_eq!(priced.planned.notes.contains(&Note::TooSlow), slow);
        }
    }
}

/// 16,152 for 16152.3.
fn thousands(value: f64) -> String {
    let whole = format!("{value:.0}");
    match whole.len() {
        0..=3 => whole,
        n => format!("{},{}", &whole[..n - 3], &whole[n - 3..]),
    }
}

/// The page's text for a model, a context and a link.
fn found(model: &str, context: u32, link: Link) -> Worth {
    let setup = ess().of_model(model).unwrap().on_link(link).unwrap();
    let demand = Demand { shape: *setup.shape(), count_tables: true, ..demand(context) };
    worth(&demand, ACCEPT, &Options::default(), &mut Simulator::new(setup)).unwrap()
}

fn context(cell: &str) -> u32 {
    1024 * cell.strip_suffix('K').unwrap().parse::<u32>().unwrap()
}

/// A row of the page's table of links. Only the first row of four has the name of the model and the context.
fn check_link(page: &mut (String, u32), cells: &[&str]) {
    if !cells[0].is_empty() {
        *page = (cells[0].to_owned(), context(cells[1]));
    }
    let worth = found(&page.0, page.1, Link::Preset(cells[3].to_owned()));
    let (most, without) = (worth.most().unwrap(), worth.without.as_ref().unwrap());
    if !cells[0].is_empty() {
        let whole = format!("{}, {}", without.planned.batch, thousands(worth.floor()));
        assert_eq!(cells[2], whole, "{cells:?}");
    }
    let outcome = &most.outcome;
    let row = [
        most.planned.batch.to_string(),
        format!("{:.2}", most.planned.ratio),
        thousands(outcome.throughput),
        format!("{:.2}", outcome.throughput / worth.floor()),
        format!("{:.1}%", 100.0 * outcome.exposed_ms / outcome.step_ms),
        worth.pays_from.unwrap().to_string(),
    ];
    let cells: Vec<&str> = cells[4..].iter().map(|cell| cell.trim_end_matches('*')).collect();
    assert_eq!(cells, row, "{page:?}");
}

/// A row of the table of rates.
fn check_rate(cells: &[&str]) {
    let base = Rates::preset("pcie5").unwrap();
    let gather = RowRates::flat(656, cells[0].parse::<f64>().unwrap() * 1e9);
    for (cell, context) in cells[1..].iter().zip([32, 64, 128]) {
        let worth = found(
            "deepseek-v3.2",
            context * 1024,
            Link::Rates(Rates { gather: gather.clone(), ..base.clone() }),
        );
        let most = worth.most().unwrap();
        let said = match worth.pays_from {
            None => format!("{}, none, **never**", most.planned.batch),
            Some(from) => {
                format!("{}, {:.2}, {from}", most.planned.batch, most.outcome.throughput / worth.floor())
            }
        };
        assert_eq!(*cell, said, "{cells:?}");
    }
}

#[test]
fn the_figures_of_the_page_are_the_computed_ones() {
    let page = include_str!("../docs/planner.md");
    let (mut links, mut rates, mut place) = (0, 0, (String::new(), 0));
    for line in page.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if cells.len() == 10 && Rates::preset(cells[3]).is_some() {
            check_link(&mut place, &cells);
            links += 1;
        }
        if cells.len() == 4 && cells[0].parse::<f64>().is_ok() {
            check_rate(&cells);
            rates += 1;
        }
    }
    assert_eq!((links, rates), (24, 5), "rows of the page's tables");
}
