//! Bad input: one error, which names the field.

use forebay::Kind;
use forebay::predict::fit::Measurements;
use forebay::predict::setup::Setup;
use forebay::predict::simulate::{Options, Order, Point, Traffic};

use super::{MEASUREMENTS, POINT, ess, simulator};

const ESS: &str = include_str!("../../data/setups/ess.json");

/// The built-in setup with one text replaced by another.
fn changed(from: &str, to: &str) -> String {
    assert!(ESS.contains(from), "{from}");
    ESS.replacen(from, to, 1)
}

#[test]
fn a_setup_that_cannot_be_used_is_refused_by_its_field() {
    let rest = "\"us\": [35";
    for (from, to, kind, words) in [
        (
            "\"forebay_setup\": 2",
            "\"forebay_setup\": 4",
            Kind::BadVersion,
            "forebay_setup (version 4, known 3)",
        ),
        ("\"forebay_setup\": 2,", "", Kind::BadFormat, "forebay_setup: missing"),
        ("\"captured\"", "\"captures\"", Kind::BadFormat, "unknown field `captures`"),
        ("\"kernel_us\"", "\"kernel_ms\"", Kind::BadFormat, "gpu.kernel_ms: unknown field"),
        ("\"preset\": \"deepseek-v3.2\"", "\"preset\": \"deepseek\"", Kind::InvalidConfig, "model.preset"),
        (
            "\"preset\": \"deepseek-v3.2\"",
            "\"preset\": \"deepseek-v3\"",
            Kind::InvalidConfig,
            "dense attention",
        ),
        ("\"memory_gb_s\": 4800.0", "\"memory_gb_s\": 0", Kind::InvalidConfig, "gpu.memory_gb_s"),
        ("\"memory_gb_s\": 4800.0", "\"memory_gb_s\": 1e999", Kind::BadFormat, "number out of range"),
        ("\"memory_gb_s\": 4800.0", "\"memory_gb_s\": NaN", Kind::BadFormat, "line"),
        ("\"fp8_share\": 0.5", "\"fp8_share\": 1.5", Kind::InvalidConfig, "gpu.fp8_share"),
        ("\"kernel_us\": 2.0", "\"kernel_us\": -2.0", Kind::InvalidConfig, "gpu.kernel_us"),
        ("\"kernel_us\": 2.0", "\"kernel_us\": \"2\"", Kind::BadFormat, "gpu.kernel_us: invalid type"),
        (
            "\"bytes_per_s\": 39",
            "\"bytes_per_s\": -39",
            Kind::InvalidConfig,
            "link.rates.gather.points[0].bytes_per_s",
        ),
        ("\"launch_ns\": 0.0", "\"launch_ns\": -1", Kind::InvalidConfig, "link.rates.launch_ns"),
        ("\"resolve_us\": 0.0", "\"resolve_us\": -1", Kind::InvalidConfig, "operations.resolve_us"),
        (
            "\"fetched_margin\": 1.0",
            "\"fetched_margin\": 0.5",
            Kind::InvalidConfig,
            "captured.fetched_margin",
        ),
        ("\"node_gpus\": 8", "\"node_gpus\": 64", Kind::InvalidConfig, "deployment.gpus"),
        (rest, "\"us\": [null, 35", Kind::InvalidConfig, "costs.rest.us"),
        (rest, "\"us\": [-35", Kind::InvalidConfig, "costs.rest.us[0] (tokens 12)"),
        (
            "\"name\": \"tokens\"",
            "\"name\": \"token\"",
            Kind::BadFormat,
            "costs.prepare.axes[0].name: unknown variant",
        ),
        ("[637.0, 188.0", "[637.0, null", Kind::InvalidConfig, "misses.curve.mean.rows[0][1]: a hole"),
        ("[637.0, 188.0", "[637.0, -188.0", Kind::InvalidConfig, "misses.curve.mean.rows[0][1]"),
        ("[36.0, 64.0,", "[64.0,", Kind::InvalidConfig, "misses.curve.layers[0].rows"),
    ] {
        let error = Setup::parse(&changed(from, to)).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(words), "{error}");
        assert!(error.to_string().contains("docs/setup-format.md") || kind == Kind::BadVersion, "{error}");
    }
    for text in ["", "{", "[]", "null", "3"] {
        assert_eq!(Setup::parse(text).unwrap_err().kind(), Kind::BadFormat);
    }
}

#[test]
fn a_hole_is_named_with_its_point() {
    let hole = ESS.find("\"rest\"").unwrap();
    let us = hole + ESS[hole..].find("\"us\": [").unwrap() + "\"us\": [".len();
    let end = us + ESS[us..].find(',').unwrap();
    let text = format!("{}null{}", &ESS[..us], &ESS[end..]);
    let error = Setup::parse(&text).unwrap_err().to_string();
    assert!(error.contains("costs.rest.us[0] (tokens 12): a hole"), "{error}");
}

#[test]
fn numbers_that_no_file_can_hold_are_refused_too() {
    let mut file = ess().file().clone();
    file.costs.rest.as_mut().unwrap().us[2] = Some(f64::NAN);
    assert!(Setup::new(file).unwrap_err().to_string().contains("costs.rest.us[2]"));
    let mut file = ess().file().clone();
    file.gpu.memory_gb_s = f64::INFINITY;
    assert!(Setup::new(file).unwrap_err().to_string().contains("gpu.memory_gb_s"));
}

#[test]
fn an_invalid_point_is_refused_by_its_field() {
    for (point, words) in [
        (Point { context: 0, ..POINT }, "context"),
        (Point { context: 163_841, ..POINT }, "context (tokens 163841, most 163840)"),
        (Point { batch: 0, ..POINT }, "batch"),
        (Point { batch: u32::MAX, ..POINT }, "batch (requests 4294967295, most 16384)"),
        (Point { mtp: 0, ..POINT }, "mtp"),
        (Point { accept: 2.5, ..POINT }, "accept: 2.5"),
        (Point { accept: 0.0, ..POINT }, "accept: 0"),
        (Point { accept: 0.99, ..POINT }, "accept: 0.99 is not from 1 to mtp"),
        (Point { accept: f64::NAN, ..POINT }, "accept: NaN"),
        (Point { ratio: 0.0, ..POINT }, "ratio: 0"),
        (Point { ratio: f64::NAN, ..POINT }, "ratio: NaN"),
        (Point { ratio: 0.05, ..POINT }, "misses.curve.mean.ratio: 0.0500 is below"),
        (Point { context: 8192, ..POINT }, "misses.curve.mean.context"),
        // Beyond twice the largest measured micro-batch.
        (Point { batch: 1200, ..POINT }, "costs.rest: tokens beyond twice the last point"),
        (Point { mtp: 64, accept: 1.0, batch: 1, ..POINT }, "costs.index: query_rows beyond"),
    ] {
        let error = simulator().run(&point, &Options::default()).unwrap_err();
        // Invalid points, and valid points without known costs.
        let unknown = ["misses.", "costs.", "batch (requests 4294967295"];
        let kind = match unknown.iter().any(|unknown| words.starts_with(unknown)) {
            true => Kind::OutOfRange,
            false => Kind::InvalidConfig,
        };
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(simulator().estimate(&point, &Options::default()).unwrap_err(), error);
    }
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let refused = |options: Options, words: &str| {
        let error = simulator().run(&POINT, &options).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(
        Options { order: Order::Table(Vec::new()), ..Options::default() },
        "order: not one for each layer",
    );
    // The built-in link copies 53 GB/s up and 52.8 down.
    for rate in [-1.0, 53.1e9, f64::NAN, f64::INFINITY] {
        let traffic = Traffic { to_device: rate, to_host: 0.0 };
        refused(Options { traffic, ..Options::default() }, "traffic.to_device");
        let traffic = Traffic { to_device: 0.0, to_host: rate };
        refused(Options { traffic, ..Options::default() }, "traffic.to_host");
    }
    let whole = Options { spans: true, ..Options::default() };
    assert!(simulator().estimate(&POINT, &whole).unwrap_err().to_string().contains("options"));
    let mut file = ess().file().clone();
    file.misses = None;
    let mut without = forebay::predict::simulate::Simulator::new(Setup::new(file).unwrap());
    let error = without.run(&POINT, &Options::default()).unwrap_err().to_string();
    assert!(error.contains("misses: missing"), "{error}");
    // At a ratio of 1 no misses are needed.
    without.run(&Point { ratio: 1.0, ..POINT }, &Options::default()).unwrap();
}

#[test]
fn measurements_that_cannot_be_met_are_refused_by_their_row() {
    for (from, to, words) in [
        ("\"ms\": 59.345", "\"ms\": -59.345", "steps[0].ms"),
        ("\"ms\": 59.345", "\"ms\": 9.345", "steps[0].ms: 9.345 ms, its works without the rest take"),
        ("\"ms\": 59.345", "\"msec\": 59.345", "steps[0].msec: unknown field"),
        ("\"order\": \"none\"", "\"order\": \"nil\"", "overlap[0].order"),
        ("\"misses\": 32", "\"misses\": -32", "overlap[0].misses: -32"),
        ("\"misses\": 32", "\"misses\": 4097", "overlap[0].misses: 4097"),
        ("\"ms\": 59.345", "\"ms\": 1e7", "steps[0].ms: 10000000 is longer than any step"),
        ("\"rows\": 857.5", "\"rows\": 0", "misses_by_query_rows[0].rows"),
        ("\"fp8_share\": 0.5", "\"fp8_share\": 0", "gpu.fp8_share"),
        (
            "\"context\": 131072, \"query_rows\": 2, \"two_batch\": false",
            "\"context\": 231072, \"query_rows\": 2, \"two_batch\": false",
            "steps[18]: context (tokens 231072, most 163840);",
        ),
        (
            "\"forebay_measurements\": 1",
            "\"forebay_measurements\": 3",
            "forebay_measurements (version 3, known 1)",
        ),
    ] {
        assert!(MEASUREMENTS.contains(from), "{from}");
        let text = MEASUREMENTS.replacen(from, to, 1);
        let error =
            Measurements::parse(&text).and_then(|m| forebay::predict::fit::fit(&m)).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Rows of overlap without information are an error of the rows, not of the values computed from them.
#[test]
fn rows_of_overlap_without_information_are_refused() {
    use forebay::predict::fit::{OverlapRow, fit};
    let refused = |change: fn(&mut Vec<OverlapRow>), words: &str| {
        let mut measured = Measurements::parse(MEASUREMENTS).unwrap();
        change(&mut measured.overlap);
        let error = fit(&measured).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidConfig, "{error}");
        assert!(error.place().starts_with(words), "{error}");
        assert_eq!(error.to_string().matches("correct the named").count(), 1, "one hint: {error}");
    };
    refused(|rows| rows.truncate(3), "overlap: fewer rows");
    refused(|rows| rows[4].us = f64::NAN, "overlap[4].us");
    refused(|rows| rows[4].us = 1e9, "overlap[4].us");
    refused(|rows| rows[4].misses = f64::INFINITY, "overlap[4].misses");
    refused(|rows| rows[4].context = 1 << 30, "overlap[4]: context");
    refused(|rows| rows.iter_mut().for_each(|row| row.us = 5e5), "overlap: no engine");
    refused(|rows| rows.iter_mut().for_each(|row| row.us = -5e5), "overlap: no engine");
    // The orders hide nothing: no work runs that could hide it.
    refused(
        |rows| {
            let none: Vec<f64> = rows.iter().filter(|row| row.order == "none").map(|row| row.us).collect();
            rows.iter_mut().enumerate().for_each(|(i, row)| row.us = none[i % none.len()]);
        },
        "overlap: by these times the indexer takes no time",
    );
}

/// The example on the page is a valid setup.
#[test]
fn the_setup_on_the_page_of_the_format_is_read() {
    let page = include_str!("../../docs/setup-format.md");
    let example = page.split("```json\n").nth(1).unwrap().split("```").next().unwrap();
    let mut simulator = forebay::predict::simulate::Simulator::new(Setup::parse(example).unwrap());
    let out = simulator.run(&Point { batch: 32, ..POINT }, &Options::default()).unwrap();
    assert!(out.step_ms > 0.0 && out.throughput.is_finite());
}

/// A setup with a damaged piece of text is refused, or simulates to finite numbers.
#[test]
fn a_damaged_setup_is_refused_or_gives_numbers() {
    let mut state = 1_u64;
    let mut chance = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let pieces =
        ["9", "0", "-", ".", "e9", "e-9", "e99", "e-99", "null", "\"", "[", "]", "{}", ",", ":", "0.0", ""];
    let mut taken = 0;
    for _ in 0..3000 {
        let (from, cut) = (chance(ESS.len()), chance(4));
        let to = (from + cut).min(ESS.len());
        let text = format!("{}{}{}", &ESS[..from], pieces[chance(pieces.len())], &ESS[to..]);
        let Ok(setup) = Setup::parse(&text) else { continue };
        taken += 1;
        let mut simulator = forebay::predict::simulate::Simulator::new(setup);
        let Ok(out) = simulator.run(&POINT, &Options::default()) else { continue };
        let numbers = [out.step_ms, out.exposed_ms, out.wait_ms, out.throughput, out.otps];
        assert!(numbers.iter().chain(&out.exposed_us).chain(&out.misses).all(|x| x.is_finite()), "{out:?}");
    }
    assert!(taken > 100, "{taken}");
}
