//! Sharded weights in a simulated step: what it waits is what the planner computes, and nothing else of it changes.

use forebay::Kind;
use forebay::device::clock::Span;
use forebay::overlap::Overlap;
use forebay::predict::plan::{Batch, Demand};
use forebay::predict::setup::Setup;
use forebay::predict::sharded::{Asked, Pulled};
use forebay::predict::simulate::{Options, Outcome, PULLS, Point, Simulator, Traffic};
use forebay::predict::weights::{Attention, Division};
use forebay::weights::{Group, Patterns, Plan, Sharding, Source};

use super::{POINT, all, ess, on_the_page, simulator};

/// The built-in setup whose GPUs' neighbours have this rate.
fn over(nvlink_gb_s: f64) -> Setup {
    let mut file = ess().file().clone();
    file.deployment.nvlink_gb_s = Some(nvlink_gb_s);
    Setup::new(file).unwrap()
}

fn plan(setup: &Setup, names: &str, ranks: u32, source: Source) -> Plan {
    let checkpoint = setup.checkpoint().unwrap().unwrap();
    let patterns = Patterns::new(&checkpoint.patterns(names)).unwrap();
    let gpus = setup.file().deployment.gpus;
    let (division, dtype) = (Division::of(gpus, Attention::Data), setup.file().model.weights());
    let sharding = Sharding { source, ..Sharding::new(patterns) };
    let drafts = setup.shape().draft_layers > 0;
    checkpoint.sharded((&division, dtype, drafts), gpus, Group { id: 0, rank: 0, ranks }, &sharding).unwrap()
}

fn sharded(plan: &Plan) -> Options {
    Options { sharded: Some(plan.clone()), ..Options::default() }
}

/// What the planner computes of the same step.
fn planned(setup: &Setup, plan: &Plan, point: &Point) -> Pulled {
    let (batch, query_rows) = (Batch::Sequences(point.batch), point.mtp);
    let demand = Demand { batch, query_rows, ..Demand::new(*setup.shape(), 1 << 42, point.context) };
    let asked =
        Asked { setup, plan, demand: &demand, unsharded: plan.whole(), by_heads: None, accept: point.accept };
    asked.compare().unwrap().sharded.unwrap()
}

const POINTS: [Point; 4] = [
    Point { context: 32 << 10, batch: 160, mtp: 2, accept: 1.7, ratio: 1.0 },
    Point { context: 32 << 10, batch: 61, mtp: 1, accept: 1.0, ratio: 1.0 },
    Point { context: 128 << 10, batch: 13, mtp: 2, accept: 1.7, ratio: 1.0 },
    Point { context: 128 << 10, batch: 54, mtp: 1, accept: 1.0, ratio: 1.0 },
];

/// Without misses: two micro-batches and one, layers that are longer than a pull and shorter ones.
#[test]
fn a_step_waits_for_pulls_as_long_as_the_planner_computes() {
    let (mut waited, mut hidden, mut nothing) = (0, 0, 0);
    for (nvlink, names) in
        [(305.0, "o_proj"), (305.0, "mla"), (900.0, "mla"), (60.0, "o_proj"), (20.0, "o_proj"), (20.0, "mla")]
    {
        let setup = over(nvlink);
        let plan = plan(&setup, names, 8, Source::Peers);
        let mut simulator = Simulator::new(setup.clone());
        for point in &POINTS {
            let wanted = planned(&setup, &plan, point);
            let found = simulator.run(point, &sharded(&plan)).unwrap();
            let pulls = found.pulls.as_ref().unwrap();
            let (us, wanted_us) = (1e3 * pulls.exposed_ms, wanted.exposed.us());
            let what = format!("{us} us, {wanted_us} planned: {nvlink} GB/s, {names}, {point:?}");
            assert!((us - wanted_us).abs() <= 0.01 * wanted_us.max(1.0), "{what}");
            assert!((1e3 * found.step_ms / wanted.step.step_us - 1.0).abs() < 0.01, "{what}");
            assert!((pulls.pull_us / wanted.pull_us - 1.0).abs() < 1e-6, "{what}");
            let by_layer = pulls.exposed_us.iter().zip(&wanted.exposed.layers_us);
            for (layer, (us, planned)) in by_layer.enumerate() {
                assert!(
                    (us - planned).abs() <= 0.01 * planned.max(1.0),
                    "layer {layer}: {us} {planned}; {what}"
                );
            }
            // Inside the step; the wrap waits behind short rests.
            let inside: f64 = wanted.exposed.layers_us.iter().sum();
            match inside > 0.0 {
                true => waited += 1,
                false => hidden += 1,
            }
            nothing += usize::from(us.abs() < 1e-3);
        }
    }
    let counts = format!("{waited} points wait inside the step, {hidden} do not, {nothing} nowhere");
    assert!(waited >= 6 && hidden >= 6 && nothing >= 3, "{counts}");
}

/// The parts of a step add up, beside misses and traffic; what gathers expose is what they expose without pulls.
#[test]
fn exposed_time_of_pulls_is_apart_from_that_of_gathers() {
    let setup = over(60.0);
    let mut simulator = Simulator::new(setup.clone());
    let bare = simulator.run(&Point { ratio: 1.0, ..POINT }, &all(Overlap::None)).unwrap();
    for traffic in [Traffic::default(), Traffic { to_device: 20e9, to_host: 0.0 }] {
        for source in [Source::Peers, Source::Host] {
            let plan = plan(&setup, "mla", 8, source);
            let with = |sharded: Option<Plan>| Options { traffic, sharded, ..Options::default() };
            let resident = simulator.run(&POINT, &with(None)).unwrap();
            let found = simulator.run(&POINT, &with(Some(plan))).unwrap();
            let pulls = found.pulls.clone().unwrap();
            let sum = bare.step_ms + found.exposed_ms + pulls.slower_ms + pulls.exposed_ms;
            assert!((sum / found.step_ms - 1.0).abs() < 1e-9, "{sum} {}", found.step_ms);
            assert!(pulls.exposed_ms > 0.0 && pulls.slower_ms >= 0.0, "{pulls:?}");
            let unsharded = Outcome {
                step_ms: resident.step_ms,
                otps: resident.otps,
                throughput: resident.throughput,
                pulls: None,
                ..found
            };
            assert_eq!(unsharded, resident, "all else is as without");
        }
    }
}

#[test]
fn the_page_has_a_step_of_each_way() {
    let mut simulator = simulator();
    let ways = [(Source::Peers, "peers"), (Source::Host, "the host")];
    let lines = ways.into_iter().flat_map(|way| ["o_proj", "mla"].map(|names| (names, way)));
    let lines: Vec<String> = lines
        .map(|(names, (source, from))| {
            let found = simulator.run(&POINT, &sharded(&plan(&ess(), names, 8, source))).unwrap();
            let pulls = found.pulls.unwrap();
            format!(
                "| {names}, from {from} | {:.0} | {:.2} | {:.2} | {:.2} | {:.2} |",
                pulls.pull_us,
                found.step_ms,
                found.exposed_ms,
                pulls.slower_ms,
                pulls.exposed_ms.max(0.0),
            )
        })
        .collect();
    on_the_page(&lines);
}

/// From the host a pull crosses the link that gathers cross: each delays the other.
#[test]
fn pulls_from_the_host_share_the_link_with_gathers() {
    let setup = ess();
    let plan = plan(&setup, "o_proj", 8, Source::Host);
    let mut simulator = Simulator::new(setup.clone());
    let bare = Point { ratio: 1.0, ..POINT };
    let alone = simulator.run(&bare, &sharded(&plan)).unwrap().pulls.unwrap();
    let wanted = planned(&setup, &plan, &bare).exposed.us();
    assert!((1e3 * alone.exposed_ms - wanted).abs() <= 0.01 * wanted, "{alone:?} {wanted}");
    let beside = simulator.run(&POINT, &sharded(&plan)).unwrap().pulls.unwrap();
    assert!(beside.exposed_ms > 1.1 * alone.exposed_ms, "{beside:?} {alone:?}");
}

#[test]
fn spans_have_the_pulls_with_layer_and_buffer() {
    let setup = ess();
    let plan = plan(&setup, "o_proj", 8, Source::Peers);
    let options = Options { spans: true, ..sharded(&plan) };
    let found = Simulator::new(setup).run(&POINT, &options).unwrap();
    let of_pulls = |span: &&Span| PULLS.contains(&span.name);
    assert_eq!(found.spans.iter().filter(of_pulls).count(), plan.sharded());
    for one in plan.layers() {
        let own = |span: &&Span| of_pulls(span) && span.layer.is_some_and(|layer| layer.index() == one.layer);
        let spans: Vec<&Span> = found.spans.iter().filter(own).collect();
        match one.place {
            forebay::weights::Place::Resident => assert!(spans.is_empty()),
            forebay::weights::Place::Buffer(buffer) => {
                assert_eq!((spans.len(), spans[0].name), (1, PULLS[usize::from(buffer)]));
            }
        }
    }
    let bare = Simulator::new(ess()).run(&POINT, &Options { spans: true, ..Options::default() }).unwrap();
    assert!(!bare.spans.iter().any(|span| PULLS.contains(&span.name) || span.name == "output"));
}

#[test]
fn draft_layers_are_pulled_once_for_all_passes() {
    let mut file = over(20.0).file().clone();
    file.model.draft_layers = 1;
    let setup = Setup::new(file).unwrap();
    let plan = plan(&setup, "o_proj", 8, Source::Peers);
    assert_eq!(plan.model_layers(), 62);
    for point in [POINTS[0], Point { mtp: 4, accept: 2.8, ..POINTS[0] }, POINTS[1]] {
        let wanted = planned(&setup, &plan, &point).exposed.us();
        let found = Simulator::new(setup.clone()).run(&point, &sharded(&plan)).unwrap();
        let us = 1e3 * found.pulls.unwrap().exposed_ms;
        // Without drafts the planner has no layer 61, and the pull that follows layer 59 is of layer 1.
        let near = if point.mtp > 1 { 0.01 } else { 0.02 };
        assert!((us - wanted).abs() <= near * wanted && wanted > 1e4, "{us} {wanted} {point:?}");
    }
}

#[test]
fn what_cannot_be_sharded_is_refused() {
    let refused =
        |setup: &Setup, plan: &Plan| Simulator::new(setup.clone()).run(&POINT, &sharded(plan)).unwrap_err();
    let mut file = ess().file().clone();
    file.deployment.nvlink_gb_s = None;
    let lone = Setup::new(file).unwrap();
    let error = refused(&lone, &plan(&ess(), "o_proj", 8, Source::Peers));
    assert!(
        error.kind() == Kind::InvalidConfig && error.to_string().contains("nvlink_gb_s: missing"),
        "{error}"
    );
    let error = refused(&ess(), &plan(&ess(), "o_proj", 16, Source::Peers));
    assert!(error.to_string().contains("on one node of the setup"), "{error}");
    let other = ess().of_model("glm-5").unwrap();
    let error = refused(&other, &plan(&ess(), "o_proj", 8, Source::Peers));
    assert!(error.to_string().contains("another number of layers"), "{error}");
    let plan = plan(&ess(), "o_proj", 8, Source::Peers);
    let error = Simulator::new(ess()).estimate(&POINT, &sharded(&plan)).unwrap_err();
    assert!(error.to_string().contains("sharded need a whole step"), "{error}");
}
