//! What a plan comes to, in one sentence: offload or not, at which batch and ratio, what that gains, and what it costs
//! each sequence.
//!
//! A gain below [`GAIN_LEAST`] and a ratio above [`RATIO_MOST`] are advice against it: neither is worth host memory and
//! another moving part, and no simulation is that exact.

use forebay::predict::plan::{Note, Planned};
use forebay::predict::provenance::Provenance;
use forebay::predict::worth::Baseline;

use crate::deployment::Deployed;
use crate::output::harmless;
use crate::plan::{Gain, Point};
use crate::plan_report::tokens;
use crate::report::{number, ratio, size};

/// The least gain that is worth it, as a share of what there is without.
const GAIN_LEAST: f64 = 0.03;

/// A ratio above it leaves nearly all rows where they were.
const RATIO_MOST: f64 = 0.98;

/// What to do about the plans of one setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// Whether to offload; none where that is not known.
    pub offload: Option<bool>,
    /// The sentence, with its full stop.
    pub sentence: String,
}

impl Advice {
    fn to(offload: impl Into<Option<bool>>, sentence: String) -> Advice {
        Advice { offload: offload.into(), sentence }
    }

    fn against(why: &str) -> Advice {
        Advice::to(false, format!("Do not offload: {why}."))
    }
}

/// A number with its thousands apart.
pub fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let whole = digits.trim_start_matches('-');
    let mut out = String::new();
    for (i, digit) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    if digits.len() > whole.len() { format!("-{out}") } else { out }
}

/// A share as percent with its sign, with a decimal where it is small.
pub fn signed_percent(share: f64) -> String {
    let percent = 100.0 * share;
    if percent.abs() < 9.95 { format!("{percent:+.1}%") } else { format!("{percent:+.0}%") }
}

/// `the 8 GPUs`, or `the GPU`.
fn gpus(deployed: &Deployed) -> String {
    if deployed.gpus == 1 { "the GPU".to_owned() } else { format!("the {} GPUs", deployed.gpus) }
}

/// `12 sequences on each GPU`.
fn sequences(count: u32) -> String {
    if count == 1 { "1 sequence".to_owned() } else { format!("{count} sequences") }
}

/// How sure the times are: they are computed, and from what.
fn source(point: &Point) -> String {
    let Some(on) = &point.on else { return String::new() };
    let Provenance { setup, measured, measured_parts, deployment: of, .. } = &on.provenance;
    let setup = harmless(setup);
    let extrapolated = match of.extrapolated {
        true => format!(" and extrapolated from {} GPUs", of.costs_gpus),
        false => String::new(),
    };
    let sure = match (measured, measured_parts.is_empty()) {
        (true, _) => "whose costs were measured",
        (false, false) => "of which a part was measured",
        (false, true) => "not measured",
    };
    format!("computed from setup {setup}{extrapolated}, {sure}")
}

/// What to do about plans of one setting, which differ in batch and ratio alone. Slower than `least_otps` tokens a
/// second for each sequence is no answer; 0 asks for no speed.
pub fn of(points: &[&Point], least_otps: f64) -> Advice {
    let fits = |point: &&&Point| point.planned.is_ok();
    let Some(first) = points.iter().find(fits) else {
        let why = points.iter().find_map(|point| point.planned.as_ref().err());
        let why = why.map_or(String::new(), |error| format!(": {}", error.place()));
        return Advice::to(false, format!("Nothing fits{why}."));
    };
    if first.on.is_none() {
        return by_memory(points);
    }
    let known = || {
        points.iter().filter_map(|point| Some((*point, point.planned.as_ref().ok()?, point.gain.as_ref()?)))
    };
    let by_yield = |a: &(&Point, &Planned, &Gain), b: &(&Point, &Planned, &Gain)| {
        a.2.outcome.throughput.total_cmp(&b.2.outcome.throughput)
    };
    let fast = |(_, planned, gain): &(&Point, &Planned, &Gain)| {
        planned.offloads() && gain.outcome.otps >= least_otps
    };
    match known().filter(fast).max_by(by_yield) {
        Some((point, planned, gain)) => judged(point, planned, gain),
        None => without(points, known().next(), least_otps),
    }
}

/// Of plans whose times nobody asked for.
fn by_memory(points: &[&Point]) -> Advice {
    let fits = points.iter().filter_map(|point| Some((*point, point.planned.as_ref().ok()?)));
    let Some((point, planned)) = fits.max_by_key(|(_, planned)| planned.batch) else {
        return Advice::to(false, "Nothing fits.".to_owned());
    };
    if !planned.offloads() {
        return Advice::against(&resident(planned));
    }
    if planned.batch <= planned.resident_batch {
        return Advice::against(&format!("{} fit on each GPU without it", sequences(planned.resident_batch)));
    }
    if planned.ratio > RATIO_MOST {
        return Advice::against(&format!(
            "ratio {} leaves nearly all rows on the device",
            ratio(planned.ratio)
        ));
    }
    let deployed = &point.deployed;
    Advice::to(
        None,
        format!(
            "With offload {} hold {} sequences of {} instead of {}, at batch {} on each GPU and ratio {}, with {} of \
             host memory on each node; whether that pays only --setup tells.",
            gpus(deployed),
            grouped(deployed.sequences(planned.batch) as f64),
            tokens(point.demand.context),
            grouped(deployed.sequences(planned.resident_batch) as f64),
            planned.batch,
            ratio(planned.ratio),
            size(planned.bytes.host() as f64 * f64::from(deployed.node_gpus())),
        ),
    )
}

/// Why a plan keeps all rows on the device.
fn resident(planned: &Planned) -> String {
    let is = |note| planned.notes.contains(&note);
    let untried = if is(Note::Untried) { "; larger batches were not tried" } else { "" };
    let batch = sequences(planned.batch);
    if is(Note::Dense) {
        "dense attention reads every row in every step".to_owned()
    } else if is(Note::Slower) {
        format!("no batch with it yields more than the {batch} on each GPU that fit without it{untried}")
    } else if is(Note::NoRoom) {
        format!(
            "index keys and slots leave room for no more than the {batch} on each GPU that fit without it"
        )
    } else {
        format!("all rows of {batch} fit on each GPU{untried}")
    }
}

/// Of the best plan that offloads and is fast enough.
fn judged(point: &Point, planned: &Planned, gain: &Gain) -> Advice {
    let deployed = &point.deployed;
    let of = format!("batch {} on each GPU and ratio {}", planned.batch, ratio(planned.ratio));
    let share = point.gain();
    if planned.ratio > RATIO_MOST {
        return Advice::against(&format!(
            "the best batch with it, {of}, leaves nearly all rows on the device; {}",
            source(point)
        ));
    }
    if let (Some(share), Some(Baseline { batch, .. })) = (share, gain.without)
        && share < GAIN_LEAST
    {
        let more = format!("{:.1}% {}", 100.0 * share.abs(), if share < 0.0 { "fewer" } else { "more" });
        return Advice::against(&format!(
            "the best batch with it, {of}, yields {more} tokens a second than {batch} on each GPU without, and less \
             than {:.0}% more is not worth it; {}",
            100.0 * GAIN_LEAST,
            source(point)
        ));
    }
    let (now, then) = match (gain.without, share) {
        (Some(without), Some(share)) => (
            format!(
                " instead of {}, and {} tokens a second instead of {} ({})",
                grouped(deployed.sequences(without.batch) as f64),
                grouped(deployed.of_all(gain.outcome.throughput)),
                grouped(deployed.of_all(without.throughput)),
                signed_percent(share),
            ),
            format!(" instead of {}", number(without.otps)),
        ),
        _ => (
            format!(
                ", of which none fits without offload, and {} tokens a second",
                grouped(deployed.of_all(gain.outcome.throughput))
            ),
            String::new(),
        ),
    };
    Advice::to(
        true,
        format!(
            "Offload: at {of}, {} serve {} sequences of {}{now}, with {} of host memory on each node, while each \
             sequence decodes {} tokens a second{then}; {}.",
            gpus(deployed),
            grouped(deployed.sequences(planned.batch) as f64),
            tokens(point.demand.context),
            size(planned.bytes.host() as f64 * f64::from(deployed.node_gpus())),
            number(gain.outcome.otps),
            source(point),
        ),
    )
}

/// Where no plan both offloads and is fast enough.
fn without(points: &[&Point], known: Option<(&Point, &Planned, &Gain)>, least_otps: f64) -> Advice {
    if let Some((point, alone)) = points.iter().find_map(|point| Some((*point, point.alone?))) {
        return Advice::against(&format!(
            "not even one sequence on each GPU decodes {} tokens a second, but {}; {}",
            number(least_otps),
            number(alone),
            source(point)
        ));
    }
    let Some((point, planned, gain)) = known else {
        let why = points.iter().find_map(|point| point.unknown.as_ref());
        let why = why.map_or(String::new(), |error| format!(": {}", error.place()));
        return Advice::to(None, format!("Not known: what these plans yield could not be simulated{why}."));
    };
    let slow = points.iter().filter_map(|point| Some((point.planned.as_ref().ok()?, point.gain.as_ref()?)));
    let slow = slow.into_iter().any(|(planned, gain)| planned.offloads() || gain.too_slow);
    if !slow {
        return Advice::against(&format!("{}; {}", resident(planned), source(point)));
    }
    let fast = match gain.without {
        Some(Baseline { batch, otps, .. }) => {
            let verb = if batch == 1 { "decodes" } else { "decode" };
            format!(", and without it {} on each GPU {verb} {}", sequences(batch), number(otps))
        }
        None => String::new(),
    };
    Advice::against(&format!(
        "no batch with it decodes {} tokens a second for each sequence{fast}; {}",
        number(least_otps),
        source(point)
    ))
}
