//! The simulator on the built-in setup: the fitted costs, the results, the rejected input.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "simulator/elastic.rs"]
mod elastic;
#[path = "support/forgets.rs"]
#[allow(dead_code, reason = "nothing is forgotten here, and waits are counted")]
mod forgets;
#[path = "simulator/gpus.rs"]
mod gpus;
#[path = "simulator/host.rs"]
mod host;
#[path = "simulator/pulls.rs"]
mod pulls;
#[path = "simulator/refusals.rs"]
mod refusals;

use forebay::Shape;
use forebay::device::rates::{Rates, RowRate};
use forebay::overlap::Overlap;
use forebay::predict::fit::{Fitted, Measurements, fit};
use forebay::predict::misses::{Misses, Steps};
use forebay::predict::setup::{Captured, File, Link, Resident, Setup, Term};
use forebay::predict::simulate::{Options, Order, Outcome, Point, Simulator, Traffic};

/// The measurements from which `data/setups/ess.json` is made.
const MEASUREMENTS: &str = include_str!("../data/setups/ess-measurements.json");

const PAGE: &str = include_str!("../docs/simulator.md");

fn measurements() -> Measurements {
    Measurements::parse(MEASUREMENTS).unwrap()
}

fn fitted() -> Fitted {
    fit(&measurements()).unwrap()
}

fn ess() -> Setup {
    Setup::named("ess").unwrap().unwrap()
}

fn simulator() -> Simulator {
    Simulator::new(ess())
}

/// The ESS operating point: 32K, batch 160.
const POINT: Point = Point { context: 32 << 10, batch: 160, mtp: 2, accept: 1.7, ratio: 0.21 };

fn run(options: &Options) -> Outcome {
    simulator().run(&POINT, options).unwrap()
}

fn all(order: Overlap) -> Options {
    Options { order: Order::All(order), ..Options::default() }
}

/// Checks that every line of `lines` is on the page; otherwise prints all of them, for the page.
fn on_the_page(lines: &[String]) {
    let missing = lines.iter().filter(|line| !PAGE.lines().any(|on| on == line.as_str())).count();
    assert_eq!(missing, 0, "docs/simulator.md should have:\n{}", lines.join("\n"));
}

/// Each layer of a GLM-5.2 step, and whether another one selects for it.
fn of_glm(out: &Outcome) -> impl Iterator<Item = (bool, Overlap, f64, f64)> {
    let follows = |layer: u32| Shape::GLM_5_2.group_of(layer).0 != layer;
    let layers = out.overlap.iter().zip(&out.exposed_us).zip(&out.misses);
    (0..).zip(layers).map(move |(layer, ((order, us), misses))| (follows(layer), *order, *us, *misses))
}

/// Issue 19: GLM-5.2 at batch 64 and 64K exposes at most 0.5% of the step in layers whose gather is known ahead. With
/// two query rows and a tenth of the rows resident, the link takes longer than the layers, and no order can hide that.
#[test]
fn gathers_that_are_known_ahead_are_hidden() {
    let mut glm = Simulator::new(ess().of_model("glm-5.2").unwrap());
    let mut lines = Vec::new();
    for (mtp, ratio) in [(1, 0.1), (1, 0.15), (1, 0.2), (1, 0.3), (2, 0.1), (2, 0.15), (2, 0.2), (2, 0.3)] {
        let accept = if mtp == 1 { 1.0 } else { 1.7 };
        let point = Point { context: 64 << 10, batch: 64, mtp, accept, ratio };
        let orders = [Overlap::None, Overlap::Da, Overlap::Ahead].map(Order::All);
        let exposed = orders.into_iter().chain([Order::ByLayer]).map(|order| {
            let options = Options { order, ..Options::default() };
            let (out, estimate) =
                (glm.run(&point, &options).unwrap(), glm.estimate(&point, &options).unwrap());
            assert_eq!(out.counts.iter().sum::<u32>(), 78);
            assert!(options.order != Order::ByLayer || out.counts[3] > 50, "{:?}", out.counts);
            assert!((estimate.step_ms / out.step_ms - 1.0).abs() < 0.001, "{point:?} {}", estimate.step_ms);
            let known: f64 = of_glm(&out).filter(|layer| layer.0).map(|layer| layer.2).sum();
            [known / 1e3, out.exposed_ms].map(|ms| 100.0 * (ms / out.step_ms).max(0.0))
        });
        let exposed: Vec<[f64; 2]> = exposed.collect();
        let [none, da, ahead, best] = exposed[..] else { panic!() };
        let most = if (mtp, ratio) == (2, 0.1) { 1.5 } else { 0.5 };
        assert!(ahead[0] <= most && best[0] <= most, "{point:?} {exposed:?}");
        assert!(none[0] > 5.0 && best[1] <= ahead[1] && ahead[1] < da[1] && da[1] < none[1], "{exposed:?}");
        let cells = [none, da, ahead, best].map(|[known, all]| format!("{known:.1}%, {all:.1}%"));
        lines.push(format!("| {mtp} | {ratio} | {} |", cells.join(" | ")));
    }
    on_the_page(&lines);
}

#[test]
fn layers_of_a_group_have_the_misses_of_the_one_that_selects() {
    let (glm, plain) = (ess().of_model("glm-5.2").unwrap(), ess().of_model("glm-5").unwrap());
    let point = Point { context: 64 << 10, batch: 64, mtp: 1, accept: 1.0, ratio: 0.2 };
    let out = Simulator::new(glm).run(&point, &all(Overlap::None)).unwrap();
    let known = Simulator::new(plain).run(&point, &all(Overlap::None)).unwrap();
    for (layer, (_, _, _, misses)) in of_glm(&out).enumerate() {
        assert_eq!(misses, known.misses[Shape::GLM_5_2.group_of(layer as u32).0 as usize]);
    }
    // 57 layers have no indexer.
    assert!(out.step_ms < known.step_ms);
    let error = simulator().run(&POINT, &all(Overlap::Ahead)).unwrap_err();
    assert!(error.to_string().contains("ahead needs layers that another one selects for"), "{error}");
    let mut glm = Simulator::new(ess().of_model("glm-5.3").unwrap());
    let error = glm.split(&point, &Options::default()).unwrap_err();
    assert!(error.to_string().contains("each select for themselves"), "{error}");
}

// ---- what was fitted ---------------------------------------------------------------------------------

#[test]
fn the_built_in_setup_is_the_fit_of_the_measurements() {
    let text = fitted().setup.file().text().unwrap();
    assert_eq!(Setup::parse(&text).unwrap().file(), fitted().setup.file());
    let made = text == include_str!("../data/setups/ess.json");
    assert!(made, "make it again: forebay fit data/setups/ess-measurements.json");
    assert_eq!(ess().name(), "ess");
}

#[test]
fn fitted_rows_are_met_within_the_stated_residuals() {
    let fitted = fitted();
    assert_eq!(fitted.residuals.len(), 19 + 15);
    for residual in &fitted.residuals {
        let off = (residual.fitted - residual.measured).abs();
        match residual.unit {
            "ms" => assert!(off < 0.01, "{residual:?}"),
            _ if residual.what.starts_with("none") => assert!(off < 4.5, "{residual:?}"),
            _ => assert!(off < 5.0, "{residual:?}"),
        }
    }
}

/// An engine with other numbers is found again from its measurements.
#[test]
fn a_known_engine_is_found_from_its_measurements() {
    let mut known = ess().file().clone();
    let scaled = |cost: &mut Option<forebay::predict::cost::Cost>, by: f64| {
        cost.iter_mut().flat_map(|cost| &mut cost.us).flatten().for_each(|us| *us *= by);
    };
    scaled(&mut known.costs.index, 0.9);
    scaled(&mut known.costs.prepare, 1.1);
    scaled(&mut known.costs.rest, 1.3);
    known.deployment.exchange_us = 40.0;
    let mut known = Simulator::new(Setup::new(known).unwrap());
    let mut measured = measurements();
    let options = |two_batch| Options { two_batch: Some(two_batch), ..all(Overlap::None) };
    let point = |batch, context, mtp| Point { context, batch, mtp, accept: 1.0, ratio: 1.0 };
    for row in &mut measured.steps {
        let point = point(row.batch, row.context, row.query_rows);
        row.ms = known.run(&point, &options(row.two_batch)).unwrap().step_ms;
    }
    for row in &mut measured.overlap {
        let (point, options) = (point(row.batch, row.context, row.query_rows), options(row.two_batch));
        let order = Overlap::FIRST.into_iter().find(|order| order.name() == row.order).unwrap();
        let mut us = |misses, order| known.layer_us(&point, &options, misses, order).unwrap();
        row.us = (us(row.misses, order) - us(0.0, Overlap::None)) / 2.0;
    }
    let mut found = Simulator::new(fit(&measured).unwrap().setup);
    for (batch, context, ratio) in [(64, 32 << 10, 0.3), (160, 32 << 10, 0.21), (40, 128 << 10, 0.1)] {
        let point = Point { ratio, accept: 1.7, ..point(batch, context, 2) };
        for order in Overlap::FIRST {
            let (a, b) = (known.run(&point, &all(order)).unwrap(), found.run(&point, &all(order)).unwrap());
            assert!((a.step_ms / b.step_ms - 1.0).abs() < 0.005, "{} {} {}", batch, a.step_ms, b.step_ms);
        }
    }
}

// ---- the ESS study's figures -------------------------------------------------------------------------

/// Microseconds of one micro-batch of 80 at 128K beyond a layer without misses: Fig. 7's bars.
fn bar(simulator: &mut Simulator, misses: f64, order: Overlap) -> f64 {
    let point = Point { context: 128 << 10, ratio: 1.0, ..POINT };
    let options = Options { two_batch: Some(true), ..Options::default() };
    let mut us = |misses, order| simulator.layer_us(&point, &options, misses, order).unwrap();
    (us(misses, order) - us(0.0, Overlap::None)) / 2.0
}

#[test]
fn without_overlap_a_layer_waits_for_every_row_of_the_half_batch() {
    let mut simulator = simulator();
    for (misses, digitised) in [(32.0, 39.0), (64.0, 81.0), (128.0, 165.0), (256.0, 334.0), (512.0, 674.0)] {
        let line = misses * 80.0 * 656.0 / (37.0 * (1_u64 << 30) as f64) * 1e6;
        let us = bar(&mut simulator, misses, Overlap::None);
        assert!((us - line).abs() < 1e-3 * line, "{us} {line}");
        // The figure was read to 5 us.
        assert!((us - digitised).abs() < 5.0, "{us} {digitised}");
        assert!(misses < 256.0 || (us / digitised - 1.0).abs() < 0.015);
    }
}

#[test]
fn the_orders_rank_as_in_the_digitised_figure() {
    let mut simulator = simulator();
    for misses in [32.0, 64.0, 128.0, 256.0, 512.0] {
        let [none, da, dba] = Overlap::FIRST.map(|order| bar(&mut simulator, misses, order));
        assert_eq!(da <= dba, misses <= 128.0, "{misses}: {da} {dba}");
        assert!(none > da.min(dba), "{misses}: {none}");
    }
}

#[test]
fn no_order_pays_at_small_batches() {
    let mut simulator = simulator();
    let batches = |simulator: &mut Simulator, context, ratio| -> u32 {
        let paying = (1..=64).find(|batch| {
            let point = Point { context, batch: *batch, ratio, ..POINT };
            simulator.run(&point, &Options::default()).unwrap().counts[0] < 31
        });
        paying.unwrap()
    };
    let point = Point { context: 32 << 10, batch: 4, ratio: 0.5, ..POINT };
    assert_eq!(simulator.run(&point, &Options::default()).unwrap().counts, [61, 0, 0, 0]);
    let lines = [(32, 0.5), (32, 0.21), (128, 0.2)].map(|(context, ratio)| {
        format!("| {context}K | {ratio} | {} |", batches(&mut simulator, context << 10, ratio))
    });
    on_the_page(&lines);
}

/// The rows that the facts do not have. The page has them as they are computed here.
#[test]
fn the_page_has_the_predictions() {
    let mut simulator = simulator();
    let points = [(2, 1.7), (4, 2.8), (4, 3.4)].into_iter().flat_map(|(mtp, accept)| {
        [(64, 0.82), (96, 0.48), (128, 0.31), (160, 0.21)].map(|(batch, ratio)| Point {
            context: 32 << 10,
            batch,
            mtp,
            accept,
            ratio,
        })
    });
    let long = [(40, 0.2), (54, 0.1)];
    let long = long.map(|(batch, ratio)| Point { context: 128 << 10, batch, ratio, ..POINT });
    let mut lines = Vec::new();
    for point in points.chain(long) {
        let out = simulator.run(&point, &Options::default()).unwrap();
        let [none, da, dba, _] = out.counts;
        lines.push(format!(
            "| {}K | {} | {} | {} | {} | {:.2} | {:.0} | {:.2} | {:.2} | {none}, {da}, {dba} |",
            point.context >> 10,
            point.mtp,
            point.accept,
            point.batch,
            point.ratio,
            out.step_ms,
            out.throughput,
            out.otps,
            out.exposed_ms,
        ));
    }
    on_the_page(&lines);
}

/// The study runs two micro-batches at 32K and one at 128K. The faster way at each point shows how the exchange grows.
#[test]
fn the_page_has_where_two_micro_batches_pay() {
    let lines = [37.5, 50.0, 100.0, 1e9].map(|network| {
        let mut measured = measurements();
        measured.setup.deployment.network_gb_s = network;
        if network == 1e9 {
            measured.setup.deployment.nvlink_gb_s = None;
        }
        let mut simulator = Simulator::new(fit(&measured).unwrap().setup);
        let mut cell = |context, batch, ratio| {
            let point = Point { context, batch, ratio, ..POINT };
            let [one, two] = [false, true].map(|two| {
                let options = Options { two_batch: Some(two), ..Options::default() };
                simulator.run(&point, &options).unwrap().step_ms
            });
            format!("{one:.1} / {two:.1}")
        };
        let cells = [cell(32 << 10, 52, 1.0), cell(32 << 10, 160, 0.21), cell(128 << 10, 40, 0.2)];
        let network = if network == 1e9 { "no growth".to_owned() } else { format!("{network} GB/s") };
        format!("| {network} | {} | {} |", cells.join(" | "), cell(128 << 10, 54, 0.1))
    });
    on_the_page(&lines);
}

/// How much an assumption matters: the rows again, fitted under another one.
#[test]
fn the_page_says_how_much_each_assumption_matters() {
    type Change = fn(&mut Measurements);
    let changes: [(&str, Change); 8] = [
        ("as above", |_| ()),
        ("the exchange does not grow", |m| {
            (m.setup.deployment.network_gb_s, m.setup.deployment.nvlink_gb_s) = (1e9, None);
        }),
        ("the exchange grows by 100 GB/s", |m| m.setup.deployment.network_gb_s = 100.0),
        ("the exchange grows by 37.5 GB/s", |m| m.setup.deployment.network_gb_s = 37.5),
        ("misses grow with q", |m| m.misses_by_query_rows.clear()),
        ("a quarter more misses", |m| {
            let Some(Misses::Curve(curve)) = &mut m.setup.misses else { return };
            curve.mean.rows.iter_mut().flatten().flatten().for_each(|rows| *rows *= 1.25);
        }),
        ("captured for k and twice the misses", |m| {
            m.setup.captured = Captured { resident: Resident::TopK, fetched_margin: 2.0 };
        }),
        ("the gather takes 1/16 of the SMs", |m| {
            let Link::Rates(rates) = &mut m.setup.link else { return };
            rates.gather_sm = 1.0 / 16.0;
        }),
    ];
    let short = [(64, 0.82), (96, 0.48), (128, 0.31), (160, 0.21)];
    let lines = changes.map(|(what, change)| {
        let mut measured = measurements();
        change(&mut measured);
        let mut simulator = Simulator::new(fit(&measured).unwrap().setup);
        let mut row = |context, mtp, points: &[(u32, f64)]| -> String {
            let throughput = points.iter().map(|(batch, ratio)| {
                let accept = if mtp == 2 { 1.7 } else { 2.8 };
                let point = Point { context, batch: *batch, mtp, accept, ratio: *ratio };
                format!("{:.0}", simulator.run(&point, &Options::default()).unwrap().throughput)
            });
            throughput.collect::<Vec<_>>().join(", ")
        };
        let (two, long) = (row(32 << 10, 2, &short), row(128 << 10, 2, &[(40, 0.2), (54, 0.1)]));
        format!("| {what} | {two} | {long} | {} |", row(32 << 10, 4, &short))
    });
    on_the_page(&lines);
}

/// Exposed transfer at the operating point: how the share falls, measure by measure.
#[test]
fn the_page_says_what_reduces_the_exposed_share() {
    let mut simulator = simulator();
    let mut lines = Vec::new();
    let mut shares = Vec::new();
    let mut line = |what: &str, out: Outcome| {
        let share = |ms: f64| 100.0 * ms / out.step_ms;
        // No minus before a zero.
        let (exposed, wait) = (share(out.exposed_ms), share(out.wait_ms).max(0.0));
        shares.push((exposed, wait));
        lines.push(format!(
            "| {what} | {:.2} | {:.2} | {exposed:.2}% | {wait:.2}% |",
            out.step_ms, out.exposed_ms
        ));
    };
    for (name, order) in [("none", Overlap::None), ("DA", Overlap::Da), ("DBA", Overlap::Dba)] {
        line(&format!("{name} in every layer"), simulator.run(&POINT, &all(order)).unwrap());
    }
    line("choice by layer", simulator.run(&POINT, &Options::default()).unwrap());
    let mut rates = ess().rates().clone();
    rates.gather = forebay::device::rates::RowRates::flat(656, rates.copy_up);
    let mut faster = Simulator::new(ess().on_link(Link::Rates(rates)).unwrap());
    line("choice by layer, gathers at 53 GB/s", faster.run(&POINT, &Options::default()).unwrap());
    let split = Options {
        misses: Some(simulator.split(&POINT, &Options::default()).unwrap().misses),
        ..Options::default()
    };
    line("choice and split by layer", simulator.run(&POINT, &split).unwrap());
    let merged = File { costs: costs_without_merge(), ..ess().file().clone() };
    let mut merged = Simulator::new(Setup::new(merged).unwrap());
    let split = merged.split(&POINT, &Options::default()).unwrap();
    let split = Options { misses: Some(split.misses), ..Options::default() };
    line("these, and A1 goes on from A0's sums: no merge", merged.run(&POINT, &split).unwrap());
    let fill = Options { fill: true, ..all(Overlap::None) };
    line("none, each micro-batch computes in the other's wait", simulator.run(&POINT, &fill).unwrap());
    on_the_page(&lines);
    let [none, _, _, choice, faster, split, merged, fill] = shares[..] else { panic!("{shares:?}") };
    // Choice by layer leaves less than 1.5% of waiting; with the price of split attention it takes more.
    assert!(choice.1 < 1.5 && choice.0 > 1.5 && none.0 > 10.0);
    assert!(faster.0 < choice.0 && split.0 < choice.0 && split.1 < 0.05);
    assert!(merged.0 < 1.5 && fill.0 < 1.5);
}

fn costs_without_merge() -> forebay::predict::setup::Costs {
    let mut costs = ess().file().costs.clone();
    costs.merge = Some(forebay::predict::cost::Cost { axes: Vec::new(), us: vec![Some(0.0)] });
    costs
}

// ---- the simulator -----------------------------------------------------------------------------------

#[test]
fn the_same_point_gives_the_same_step() {
    let options = Options { spans: true, ..Options::default() };
    let (a, b) = (run(&options), run(&options));
    assert_eq!(a, b);
    let mut used = simulator();
    used.run(&Point { batch: 64, ..POINT }, &Options::default()).unwrap();
    assert_eq!(used.run(&POINT, &options).unwrap(), a);
}

/// Without misses a step in the order none is the sum of its works, as the setup has them.
#[test]
fn a_step_without_misses_is_the_sum_of_its_works() {
    use forebay::predict::cost::Load;
    let setup = ess();
    for (batch, context, two) in [(160, 32 << 10, 2.0), (40, 128 << 10, 1.0)] {
        let rows = f64::from(batch) / two;
        let load = Load { rows, query_rows: 2.0, context: f64::from(context), width: 2048.0 };
        let mut terms = vec![Term::Project, Term::Index, Term::Prepare, Term::Attend, Term::Rest];
        terms.extend((two == 1.0).then_some(Term::Exchange));
        let layer: f64 = terms.iter().map(|term| setup.us(*term, &load).unwrap()).sum();
        let point = Point { context, batch, ratio: 1.0, ..POINT };
        let out = simulator().run(&point, &all(Overlap::None)).unwrap();
        assert!((out.step_ms - 61.0 * two * layer / 1e3).abs() < 1e-6 * out.step_ms);
        assert_eq!((out.exposed_ms, out.two_batch), (0.0, two == 2.0));
        assert!((out.throughput - 8.0 * f64::from(batch) * 1.7 / out.step_ms * 1e3).abs() < 1e-6);
    }
}

#[test]
fn an_estimate_is_within_a_percent_of_the_run() {
    let mut simulator = simulator();
    for batch in [13, 64, 97, 160, 256] {
        for (context, ratio) in [(32 << 10, 0.15), (32 << 10, 0.4), (100_000, 0.2)] {
            let point = Point { batch, context, ratio, ..POINT };
            for order in [Order::ByLayer, Order::All(Overlap::Da), Order::All(Overlap::Dba)] {
                let options = Options { order, ..Options::default() };
                let (run, estimate) =
                    (simulator.run(&point, &options).unwrap(), simulator.estimate(&point, &options).unwrap());
                assert!((run.step_ms / estimate.step_ms - 1.0).abs() < 0.01, "{point:?}");
                assert!((run.wait_ms - estimate.wait_ms).abs() < 0.01 * run.step_ms, "{point:?}");
            }
        }
    }
}

/// No single order for all layers beats the order by layer, except for the error of interpolated prices.
#[test]
fn choice_by_layer_is_the_best_order() {
    let mut simulator = simulator();
    for (batch, ratio) in [(8, 0.21), (64, 0.82), (128, 0.31), (160, 0.21), (200, 0.12)] {
        let point = Point { batch, ratio, ..POINT };
        let best = simulator.run(&point, &Options::default()).unwrap().step_ms;
        for order in Overlap::FIRST {
            assert!(best <= simulator.run(&point, &all(order)).unwrap().step_ms * 1.0005);
        }
    }
}

#[test]
fn exposed_times_of_layers_add_up_and_follow_their_misses() {
    let out = run(&all(Overlap::None));
    let sum: f64 = out.exposed_us.iter().sum();
    assert!((sum / 1e3 - out.exposed_ms).abs() < 1e-6);
    let most = (0..61).max_by(|a, b| out.exposed_us[*a].total_cmp(&out.exposed_us[*b])).unwrap();
    assert_eq!(most, 17);
    for (us, misses) in out.exposed_us.iter().zip(&out.misses) {
        // Two halves of 80.
        let line = misses * 160.0 * 656.0 / (37.0 * (1_u64 << 30) as f64) * 1e6;
        assert!((us - line).abs() < 1e-3 * line + 1e-6);
    }
}

#[test]
fn a_timeline_has_one_work_at_a_time_in_each_stream() {
    let out = run(&Options { spans: true, ..Options::default() });
    let mut streams: Vec<u64> = out.spans.iter().map(|span| span.stream.0).collect();
    streams.sort_unstable();
    streams.dedup();
    // Compute, and for each micro-batch resolve, gather and scatter.
    assert_eq!(streams.len(), 7);
    for stream in streams {
        let mut spans: Vec<_> = out.spans.iter().filter(|span| span.stream.0 == stream).collect();
        spans.sort_by(|a, b| a.start_ns.total_cmp(&b.start_ns));
        assert!(spans.array_windows().all(|[a, b]| a.end_ns <= b.start_ns + 1e-6));
    }
    let end = out.spans.iter().map(|span| span.end_ns).fold(0.0, f64::max);
    assert!((end / 1e6 - out.step_ms).abs() < 1e-9);
}

#[test]
fn background_traffic_lengthens_the_step_and_its_absence_does_not() {
    let with = |to_device, to_host| {
        run(&Options { traffic: Traffic { to_device, to_host }, ..Options::default() }).step_ms
    };
    let alone = run(&Options::default()).step_ms;
    assert_eq!(with(0.0, 0.0), alone);
    let (some, more) = (with(5e9, 0.0), with(20e9, 0.0));
    assert!(alone < some && some < more, "{alone} {some} {more}");
    // The other direction has its own traffic.
    assert!((with(0.0, 20e9) - alone).abs() < 0.01 * alone);
    let lines: Vec<String> = [5.0, 10.0, 20.0]
        .map(|gb| {
            format!(
                "| {gb:.0} GB/s | {:.2} | {:.1}% |",
                with(gb * 1e9, 0.0),
                100.0 * (with(gb * 1e9, 0.0) / alone - 1.0)
            )
        })
        .into();
    on_the_page(&lines);
}

/// A rate of gathers changes only that: launches, SMs and the other speeds are still the setup's.
#[test]
fn another_rate_of_gathers_changes_only_their_points() {
    let own = ess().rates().clone();
    let slow = ess().on_gather(5e9).unwrap();
    assert_eq!(slow.rates().gather.points, [RowRate { rows: 1, bytes_per_s: 5e9 }]);
    assert_eq!(Rates { gather: own.gather.clone(), ..slow.rates().clone() }, own);
    // At the setup's own rate the step is the setup's own.
    let same = ess().on_gather(own.gather.points[0].bytes_per_s).unwrap();
    let step = |setup| Simulator::new(setup).run(&POINT, &Options::default()).unwrap();
    assert_eq!(step(same), step(ess()));
    assert!(step(slow).step_ms > step(ess()).step_ms);
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = ess().on_gather(rate).unwrap_err().to_string();
        assert!(error.contains("link.rates.gather.points[0].bytes_per_s"), "{error}");
    }
}

/// Traffic continues for the whole step, however much its misses lengthen the step, and no longer.
#[test]
fn background_traffic_lasts_as_long_as_the_step() {
    let rows = vec![vec![3000.0; 61]];
    let misses = Misses::Steps(Steps { query_rows: 2.0, query_rows_power: 1.0, rows });
    let traffic = Traffic { to_device: 10e9, to_host: 0.0 };
    let options = Options { traffic, misses: Some(misses), spans: true, ..all(Overlap::None) };
    let out = run(&options);
    let baseline = run(&Options { misses: None, ..all(Overlap::None) });
    assert!(out.step_ms > 5.0 * (baseline.step_ms - baseline.exposed_ms), "{}", out.step_ms);
    let step_ns = out.step_ms * 1e6;
    let copies: Vec<_> = out.spans.iter().filter(|span| span.name == "traffic up").collect();
    let last = copies.iter().map(|span| span.end_ns).fold(0.0, f64::max);
    assert!(last > 0.99 * step_ns, "{last} {step_ns}");
    // At this rate and no higher: a MiB at a time.
    let bytes = copies.len() as f64 * (1 << 20) as f64;
    assert!((bytes / (step_ns * 10.0) - 1.0).abs() < 0.01, "{bytes}");
    let streams: std::collections::BTreeSet<u64> = out.spans.iter().map(|span| span.stream.0).collect();
    assert_eq!(streams.len(), 4, "compute, two scatters, the copies");
}

/// At many query rows a request may miss more than the grid's last point.
#[test]
fn an_estimate_reaches_as_far_as_a_request_can_miss() {
    let mut simulator = simulator();
    let point = Point { batch: 24, mtp: 8, ..POINT };
    for rows in [8192.0, 9000.0, 13_000.0, 16_384.0] {
        let rows = vec![vec![rows; 61]];
        let misses = Some(Misses::Steps(Steps { query_rows: 8.0, query_rows_power: 0.8, rows }));
        for order in Overlap::FIRST {
            let options = Options { misses: misses.clone(), ..all(order) };
            let run = simulator.run(&point, &options).unwrap().step_ms;
            let estimate = simulator.estimate(&point, &options).unwrap().step_ms;
            assert!((run / estimate - 1.0).abs() < 0.01, "{run} {estimate}");
        }
    }
}

#[test]
fn a_split_keeps_the_total_and_gains() {
    let mut simulator = simulator();
    let split = simulator.split(&POINT, &Options::default()).unwrap();
    assert_eq!(split.ratios.len(), 61);
    assert!((split.ratios.iter().sum::<f64>() - 61.0 * POINT.ratio).abs() < 1e-9);
    assert!(split.ratios.iter().all(|ratio| (0.1 - 1e-9..=1.0).contains(ratio)));
    let by_layer = Options { misses: Some(split.misses), ..Options::default() };
    assert!(simulator.run(&POINT, &by_layer).unwrap().step_ms < run(&Options::default()).step_ms);
}

/// All of the memory is divided, however much there is, and the step is no longer than with the same share for all.
#[test]
fn a_split_is_never_worse_than_the_same_for_all() {
    let mut simulator = simulator();
    for (context, batch) in [(32 << 10, 160), (128 << 10, 40)] {
        for ratio in [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99] {
            let point = Point { context, batch, ratio, ..POINT };
            let split = simulator.split(&point, &Options::default()).unwrap();
            assert!((split.ratios.iter().sum::<f64>() - 61.0 * ratio).abs() < 1e-9, "{point:?}");
            assert!(split.ratios.iter().all(|ratio| (0.1 - 1e-9..=1.0).contains(ratio)), "{point:?}");
            let by_layer = Options { misses: Some(split.misses), ..Options::default() };
            let alike = simulator.run(&point, &Options::default()).unwrap().step_ms;
            let split = simulator.run(&point, &by_layer).unwrap().step_ms;
            assert!(split <= alike * (1.0 + 1e-9), "{point:?}: {split} {alike}");
        }
    }
}

#[test]
fn a_replays_steps_are_misses_like_any_others() {
    let rows = vec![vec![0.0; 61], vec![500.0; 61]];
    let misses = Misses::Steps(Steps { query_rows: 2.0, query_rows_power: 1.0, rows });
    let at = |step| run(&Options { misses: Some(misses.clone()), step, ..all(Overlap::None) });
    assert_eq!(at(0).exposed_ms, 0.0);
    assert_eq!(at(1).misses, [500.0; 61]);
    assert_eq!(at(3), at(1));
    let short = Misses::Steps(Steps { query_rows: 2.0, query_rows_power: 1.0, rows: vec![vec![0.0; 60]] });
    let refused = simulator().run(&POINT, &Options { misses: Some(short), ..Options::default() });
    assert!(refused.unwrap_err().to_string().contains("misses.steps.rows[0]"));
}

#[test]
fn draft_layers_run_once_for_each_draft() {
    let mut file = ess().file().clone();
    file.model.draft_layers = 1;
    let mut drafting = Simulator::new(Setup::new(file).unwrap());
    let once = drafting.run(&POINT, &all(Overlap::Da)).unwrap();
    assert_eq!((once.exposed_us.len(), once.overlap.len()), (62, 62));
    let estimate = drafting.estimate(&POINT, &all(Overlap::Da)).unwrap();
    assert!((once.exposed_us[61] / estimate.exposed_us[61] - 1.0).abs() < 0.05, "{once:?}");
    // A draft pass fetches the misses of one query row of an average layer.
    let waits = drafting.run(&Point { mtp: 4, ..POINT }, &all(Overlap::None)).unwrap();
    let mean = waits.misses[..61].iter().sum::<f64>() / 61.0;
    let share = ess().misses().unwrap().share(4);
    let us = 3.0 * mean * share * 160.0 * 656.0 / (37.0 * (1_u64 << 30) as f64) * 1e6;
    assert!((waits.exposed_us[61] - us).abs() < 1e-3 * us, "{} {us}", waits.exposed_us[61]);
    // Without drafts they have no pass, and count nowhere.
    let one = Point { mtp: 1, accept: 1.0, ..POINT };
    for order in [Order::ByLayer, Order::All(Overlap::Da), Order::Table(vec![Overlap::Dba; 62])] {
        let options = Options { order, ..Options::default() };
        let run = drafting.run(&one, &options).unwrap();
        let estimate = drafting.estimate(&one, &options).unwrap();
        for out in [run, estimate] {
            assert_eq!(
                (out.counts.iter().sum::<u32>(), out.misses.len(), out.exposed_us.len()),
                (61, 61, 61)
            );
        }
    }
    let more = |mtp| {
        let point = Point { mtp, accept: 1.0, ratio: 1.0, ..POINT };
        let plain = simulator().run(&point, &all(Overlap::None)).unwrap().step_ms;
        drafting.run(&point, &all(Overlap::None)).unwrap().step_ms - plain
    };
    let [one, two, four] = [1, 2, 4].map(more);
    assert_eq!(one, 0.0);
    assert!(two > 0.0 && (four / two - 3.0).abs() < 1e-6, "{two} {four}");
}

/// Over a wide grid every result is finite, and more misses never make a step shorter.
#[test]
fn a_sweep_has_no_holes() {
    let mut simulator = simulator();
    for batch in [1, 2, 3, 17, 64, 160, 280] {
        for context in [20_000, 32 << 10, 77_777, 128 << 10, 163_840] {
            let mut last = f64::INFINITY;
            for ratio in [0.17, 0.2, 0.35, 0.6, 0.9, 0.97, 1.0, 1.5] {
                let point = Point { batch, context, ratio, ..POINT };
                let out = simulator.estimate(&point, &Options::default()).unwrap();
                let numbers = [out.step_ms, out.exposed_ms, out.wait_ms, out.throughput, out.otps];
                assert!(numbers.iter().chain(&out.exposed_us).chain(&out.misses).all(|x| x.is_finite()));
                assert!(out.step_ms <= last * (1.0 + 1e-9), "{point:?}");
                last = out.step_ms;
            }
            assert!(
                simulator
                    .estimate(&Point { batch, context, ratio: 1.0, ..POINT }, &Options::default())
                    .unwrap()
                    .exposed_ms
                    == 0.0
            );
        }
    }
}

/// The time of a setup without measured points is below the measured one, and not by more than the page says.
#[test]
fn the_roofline_is_a_bound() {
    let costs = forebay::predict::setup::Costs::default();
    let mut roofline = Simulator::new(Setup::new(File { costs, ..ess().file().clone() }).unwrap());
    for row in measurements().steps {
        let point =
            Point { context: row.context, batch: row.batch, mtp: row.query_rows, accept: 1.0, ratio: 1.0 };
        let share = roofline.run(&point, &all(Overlap::None)).unwrap().step_ms / row.ms;
        assert!((0.45..0.70).contains(&share), "{row:?} {share}");
    }
}
