//! Costs for other numbers of GPUs than the setup's: closed forms, order, published times, errors.

use forebay::Kind;
use forebay::predict::cost::Load;
use forebay::predict::provenance::Provenance;
use forebay::predict::setup::{File, Setup, Term};
use forebay::predict::simulate::{Options, Point, Simulator};

use super::{POINT, ess, on_the_page};

fn of_tokens(tokens: f64) -> Load {
    Load { rows: tokens / 2.0, query_rows: 2.0, context: 32768.0, width: 2048.0 }
}

/// DeepSeek-V3.2's experts by hand: 256 per layer, 8 per token, three matrices of 7168 x 2048, one byte per value; 1979
/// TFLOPS and 4800 GB/s, of which 50% and 80%.
fn routed_us(tokens: f64, gpus: f64) -> f64 {
    let (expert, per_gpu) = (3.0 * 7168.0 * 2048.0, 256.0 / gpus);
    let each_expert_is_visited = 1.0 - (-(tokens * gpus * 8.0 / 256.0)).exp();
    let read = per_gpu * each_expert_is_visited * expert / (4800.0e9 * 0.8) * 1e6;
    let computed = 2.0 * tokens * 8.0 * expert / (1979.0e12 * 0.5) * 1e6;
    if read > computed { read } else { computed }
}

#[test]
fn experts_and_exchange_on_other_numbers_of_gpus_follow_the_closed_forms() {
    let (own, one_node) = (ess(), ess().on_gpus(8).unwrap());
    for tokens in [2.0, 24.0, 64.0, 160.0, 288.0, 400.0] {
        let load = of_tokens(tokens);
        let us = |setup: &Setup, term| setup.us(term, &load).unwrap();
        let rest = us(&own, Term::Rest) + routed_us(tokens, 8.0) - routed_us(tokens, 32.0);
        assert!((us(&one_node, Term::Rest) - rest).abs() < 1e-6, "{tokens}");
        // Inside a node nothing crosses the network: 7 of 8 ranks are neighbours.
        let bytes = tokens * 8.0 * 7168.0 * 3.0;
        let exchange = 97.2563 + bytes * 7.0 / 8.0 / 305.0e9 * 1e6;
        assert!((us(&one_node, Term::Exchange) - exchange).abs() < 1e-6, "{tokens}");
        for term in Term::ALL.into_iter().filter(|term| !matches!(term, Term::Rest | Term::Exchange)) {
            assert_eq!(us(&own, term), us(&one_node, term), "{term:?}");
        }
    }
}

/// Where the exchange itself was measured, its bytes change.
#[test]
fn a_measured_exchange_changes_by_its_bytes() {
    let mut file = ess().file().clone();
    let cost = forebay::predict::cost::Cost { axes: Vec::new(), us: vec![Some(500.0)] };
    file.costs.exchange = Some(cost);
    let setup = Setup::new(file).unwrap();
    let bytes = 64.0 * 8.0 * 7168.0 * 3.0;
    let us = setup.on_gpus(16).unwrap().us(Term::Exchange, &of_tokens(64.0)).unwrap();
    assert!((us - (500.0 + bytes * (8.0 / 16.0 - 24.0 / 32.0) / 50.0e9 * 1e6)).abs() < 1e-6, "{us}");
    assert_eq!(setup.us(Term::Exchange, &of_tokens(64.0)).unwrap(), 500.0);
}

#[test]
fn fewer_gpus_never_take_less_for_experts_nor_more_for_the_exchange() {
    let setups = [8, 16, 32, 64, 128].map(|gpus| ess().on_gpus(gpus).unwrap());
    for tokens in 1..=512 {
        let load = of_tokens(tokens.into());
        for pair in setups.windows(2) {
            let us = |setup: &Setup, term| setup.us(term, &load).unwrap();
            assert!(us(&pair[0], Term::Rest) >= us(&pair[1], Term::Rest), "{tokens}");
            assert!(us(&pair[0], Term::Exchange) <= us(&pair[1], Term::Exchange), "{tokens}");
        }
    }
}

/// Before the model of GPUs, 8, 32 and 256 GPUs all took 79.6 ms.
#[test]
fn a_step_takes_longer_on_fewer_gpus_and_as_long_as_measured_on_its_own_number() {
    let step = |setup: Setup| Simulator::new(setup).run(&POINT, &Options::default()).unwrap().step_ms;
    let (own, same) = (step(ess()), step(ess().on_gpus(32).unwrap()));
    assert_eq!(own, same);
    assert!(!ess().on_gpus(32).unwrap().served().extrapolated);
    let (node, two) = (step(ess().on_gpus(8).unwrap()), step(ess().on_gpus(16).unwrap()));
    assert!(node > 1.02 * two && two >= own, "{node} {two} {own}");
    // A file that names other GPUs than its costs has the same effect as the option.
    let mut file = ess().file().clone();
    file.deployment.gpus = 8;
    assert_eq!(step(Setup::new(file).unwrap()), node);
    let back = ess().on_gpus(8).unwrap().on_gpus(32).unwrap();
    assert_eq!(step(back), own);
}

#[test]
fn gpus_that_the_model_cannot_price_are_refused_in_one_line() {
    let with = |change: fn(&mut File)| {
        let mut file = ess().file().clone();
        change(&mut file);
        Setup::new(file).unwrap()
    };
    let silent: fn(&mut File) = |file| file.deployment.nvlink_gb_s = None;
    let odd: fn(&mut File) = |file| {
        let dims = *ess().dims();
        file.model.dims = Some(forebay::predict::model::Dims { experts: 96, ..dims });
    };
    for (setup, gpus, words) in [
        (ess(), 4, "4 GPUs: the costs are of 32, and can be extrapolated to 8 to 128"),
        (ess(), 256, "256 GPUs: the costs are of 32, and can be extrapolated to 8 to 128"),
        (ess(), 24, "24 GPUs: 256 experts do not divide among them"),
        (with(odd), 12, "12 GPUs: not a multiple of a node's 8"),
        (with(silent), 8, "8 GPUs: deployment.nvlink_gb_s is missing"),
    ] {
        let error = setup.on_gpus(gpus).unwrap_err();
        assert_eq!(error.kind(), Kind::OutOfRange, "{error}");
        assert!(error.to_string().contains(words) && !error.to_string().contains('\n'), "{error}");
    }
    let none = ess().on_gpus(0).unwrap_err().to_string();
    assert!(none.contains("deployment.gpus"), "{none}");
    // Costs so short that the experts' part would exceed the total.
    let mut file = ess().file().clone();
    file.costs.rest = Some(forebay::predict::cost::Cost { axes: Vec::new(), us: vec![Some(1.0)] });
    let more = Setup::new(file).unwrap().on_gpus(128).unwrap();
    assert!(more.us(Term::Rest, &of_tokens(2.0)).unwrap_err().to_string().contains("costs.rest at 2 tokens"));
}

/// Dispatch and combine of 128 tokens by DeepEP's low-latency kernels on H800 (NVLink 160 GB/s, network 50 GB/s), in
/// microseconds, by GPUs; the fit used none of it.
const DEEPEP: [(u32, f64); 6] = [
    (8, 77.0 + 114.0),
    (16, 118.0 + 195.0),
    (32, 155.0 + 273.0),
    (64, 173.0 + 314.0),
    (128, 192.0 + 369.0),
    (256, 194.0 + 360.0),
];

#[test]
fn the_exchange_agrees_with_published_times() {
    let lines = DEEPEP.map(|(gpus, published)| {
        let mut file = ess().file().clone();
        file.deployment.nvlink_gb_s = Some(160.0);
        // The bound alone: no cost of the exchange is measured in it.
        (file.deployment.gpus, file.deployment.costs_gpus) = (gpus, None);
        let us = Setup::new(file).unwrap().us(Term::Exchange, &of_tokens(128.0)).unwrap();
        let off = us / published - 1.0;
        assert!(off.abs() < 0.15, "{gpus}: {us} {published}");
        format!("| {gpus} | {published:.0} | {us:.0} | {:+.0}% |", 100.0 * off)
    });
    on_the_page(&lines);
}

#[test]
fn the_page_has_the_step_times_of_other_numbers_of_gpus() {
    let lines = [8, 16, 32, 64, 128].map(|gpus| {
        let setup = ess().on_gpus(gpus).unwrap();
        // Those of the planner: POINT has two query rows, so it has the draft layer.
        let weights = setup.weights(2).unwrap().unwrap() as f64 / 1e9;
        let mut simulator = Simulator::new(setup);
        let mut cell = |context, batch, ratio| {
            let point = Point { context, batch, ratio, ..POINT };
            let outcome = simulator.run(&point, &Options::default()).unwrap();
            format!("{:.1}, {:.0}", outcome.step_ms, outcome.throughput)
        };
        let (small, large) = (cell(32 << 10, 64, 0.82), cell(32 << 10, 160, 0.21));
        format!("| {gpus} | {weights:.1} | {small} | {large} | {} |", cell(128 << 10, 40, 0.2))
    });
    on_the_page(&lines);
}

/// A file without an origin, of the first version, is still read, and the result says that the origin is not stated.
#[test]
fn a_file_of_the_first_version_states_no_origin() {
    let mut file = ess().file().clone();
    file.forebay_setup = 1;
    (file.origin, file.assumptions) = (None, Vec::new());
    (file.deployment.nvlink_gb_s, file.deployment.costs_gpus) = (None, None);
    let old = Setup::parse(&file.text().unwrap()).unwrap();
    let provenance = Provenance::of(&old);
    assert!(!provenance.measured && provenance.sentence().contains("origin not stated"), "{provenance:?}");
    let (own, then) = (ess(), old.us(Term::Exchange, &of_tokens(64.0)).unwrap());
    assert_eq!(own.us(Term::Exchange, &of_tokens(64.0)).unwrap(), then);
    let text = file.text().unwrap().replacen("\"name\"", "\"origin\": \"x\", \"name\"", 1);
    assert!(Setup::parse(&text).unwrap_err().to_string().contains("origin: a field of version 2"));
}

/// A fit states the origin of its numbers, or that its measurements state none.
#[test]
fn a_fit_states_its_origin() {
    let origin = |change: fn(&mut File)| {
        let mut measured = super::measurements();
        change(&mut measured.setup);
        forebay::predict::fit::fit(&measured).unwrap().setup.file().clone()
    };
    let stated = origin(|_| ());
    assert_eq!((stated.forebay_setup, stated.deployment.costs_gpus), (2, Some(32)));
    assert_eq!(stated.origin.as_deref(), Some("fitted to a published simulation on an assumed H200"));
    let silent = origin(|file| file.origin = None);
    let words = "fitted to 19 steps and 15 costs of overlap whose origin is not stated";
    assert_eq!(silent.origin.as_deref(), Some(words));
    let mut wrong = super::measurements();
    wrong.setup.deployment.gpus = 16;
    let error = forebay::predict::fit::fit(&wrong).unwrap_err().to_string();
    assert!(error.contains("setup.deployment.costs_gpus"), "{error}");
}
