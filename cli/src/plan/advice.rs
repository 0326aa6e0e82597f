//! The recommendation of a plan in one sentence: whether to offload, at which batch and ratio, the gain, and the cost
//! for each sequence.
//!
//! A gain below [`GAIN_LEAST`] or a ratio above [`RATIO_MOST`] leads to advice against offload. Neither justifies the
//! host memory and the additional component, and no simulation is that exact.

use forebay::Error;
use forebay::predict::plan::{Note, Planned};
use forebay::predict::provenance::Provenance;
use forebay::predict::worth::Baseline;

use super::deployment::Deployed;
use super::result::{Gain, Point, Slow};
use crate::present::numbers::{grouped, number, ratio, signed_percent, tokens};
use crate::present::output::harmless;

/// The least gain that justifies offload, as a share of the yield without it.
const GAIN_LEAST: f64 = 0.03;

/// Above this ratio nearly all rows stay on the device.
const RATIO_MOST: f64 = 0.98;

/// Memory sizes that differ by less than this share count as the same GPU: 141 GB are 131.3 GiB.
const MEMORY_NEAR: f64 = 0.01;

/// The advice for the plans of one setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// Whether to offload; none if unknown.
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

/// `the 8 GPUs`, or `the GPU`.
fn gpus(deployed: &Deployed) -> String {
    if deployed.gpus == 1 { "the GPU".to_owned() } else { format!("the {} GPUs", deployed.gpus) }
}

/// What does not fit, and where it does not fit.
fn beyond(point: &Point, error: &Error) -> String {
    let bytes = |name| error.number(name).map(|bytes| point.memory.size(bytes as f64));
    let (Some(batch), Some(wanted), Some(available)) =
        (error.number("batch"), bytes("wanted"), bytes("available"))
    else {
        return format!(": {}", error.place());
    };
    let place = if error.place().starts_with("host") { "of host memory for each GPU" } else { "of each GPU" };
    let batch = sequences(u32::try_from(batch).unwrap_or(u32::MAX));
    let verb = if batch.starts_with("1 ") { "takes" } else { "take" };
    format!(": {batch} {verb} {wanted} {place}, and {available} are there{}", counted(point))
}

/// `12 sequences on each GPU`.
fn sequences(count: u32) -> String {
    if count == 1 { "1 sequence".to_owned() } else { format!("{count} sequences") }
}

/// What the figures include that a reader would not expect: given weights, or memory of another size than that of the
/// GPU whose times were measured. Empty if neither applies.
fn counted(point: &Point) -> String {
    let memory = &point.memory;
    let weights = memory.weights.as_ref().map(|given| match given.bytes {
        0 => "no weights (--weights 0)".to_owned(),
        _ => format!("{given} of weights on each GPU (--weights)"),
    });
    let other = point.on.as_ref().filter(|on| (memory.gpu.bytes as f64 / on.gpu - 1.0).abs() > MEMORY_NEAR);
    let gpu = other
        .map(|on| format!("GPUs of {}, where those of the setup have {}", memory.gpu, memory.size(on.gpu)));
    let words: Vec<String> = weights.into_iter().chain(gpu).collect();
    if words.is_empty() { String::new() } else { format!("; it counts {}", words.join(" and ")) }
}

/// How reliable the times are: they are computed, and this says from what.
fn source(point: &Point) -> String {
    let Some(on) = &point.on else { return counted(point) };
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
    format!("; computed from setup {setup}{extrapolated}, {sure}{}", counted(point))
}

/// The advice for plans of one setting, which differ in batch and ratio alone. A plan slower than `least_otps` tokens
/// a second for each sequence is not considered; 0 sets no minimum.
pub fn of(points: &[&Point], least_otps: f64) -> Advice {
    let fits = |point: &&&Point| point.planned.is_ok();
    let Some(first) = points.iter().find(fits) else {
        let why = points.iter().find_map(|point| Some(beyond(point, point.planned.as_ref().err()?)));
        return Advice::to(false, format!("Nothing fits{}.", why.unwrap_or_default()));
    };
    let dense = first.planned.as_ref().is_ok_and(|planned| planned.notes.contains(&Note::Dense));
    if first.on.is_none() || dense {
        return by_memory(points);
    }
    match known(points).filter(|it| it.1.offloads() && it.2.outcome.otps >= least_otps).max_by(by_yield) {
        Some((point, planned, gain)) => judged(point, planned, gain),
        None => without(points, known(points).next(), least_otps),
    }
}

/// A plan and its yield.
type Known<'a> = (&'a Point, &'a Planned, &'a Gain);

fn known<'a>(points: &[&'a Point]) -> impl Iterator<Item = Known<'a>> {
    points.iter().filter_map(|point| Some((*point, point.planned.as_ref().ok()?, point.gain.as_ref()?)))
}

fn by_yield(a: &Known<'_>, b: &Known<'_>) -> std::cmp::Ordering {
    a.2.outcome.throughput.total_cmp(&b.2.outcome.throughput)
}

/// The plan that represents a setting: of those that are fast enough, the one with the highest yield.
pub fn shown<'a>(points: &[&'a Point], least_otps: f64) -> Option<Known<'a>> {
    let fast = known(points).filter(|it| it.2.outcome.otps >= least_otps).max_by(by_yield);
    fast.or_else(|| known(points).max_by(by_yield))
}

/// The plan that the advice is about: the one of [`shown`], or without times the largest batch that fits.
fn chosen<'a>(points: &[&'a Point], least_otps: f64) -> Option<(&'a Point, &'a Planned)> {
    let fits = points.iter().filter_map(|point| Some((*point, point.planned.as_ref().ok()?)));
    let largest = || fits.max_by_key(|(_, planned)| planned.batch);
    shown(points, least_otps).map(|(point, planned, _)| (point, planned)).or_else(largest)
}

/// Up to which batch the chosen plan misses nothing, if budgets are elastic; none if its slots hold all rows anyway.
pub fn elastic(points: &[&Point], least_otps: f64) -> Option<String> {
    let (point, planned) = chosen(points, least_otps)?;
    let held = planned.misses_from?.saturating_sub(1);
    let slots = grouped(planned.pool().slots() as f64);
    let of = format!("the {slots} slots of batch {} at ratio {}", planned.batch, ratio(planned.ratio));
    let context = tokens(point.demand.context);
    Some(match held {
        0 => format!(
            "Elastic budgets: {of} do not hold the rows of one sequence of {context}; every batch misses."
        ),
        _ => format!(
            "Elastic budgets: {of} hold all rows of {} of {context}; nothing is missed up to batch {held}.",
            sequences(held)
        ),
    })
}

/// The advice for plans without a setup, whose times are not simulated.
fn by_memory(points: &[&Point]) -> Advice {
    let Some((point, planned)) = chosen(points, 0.0) else {
        return Advice::to(false, "Nothing fits.".to_owned());
    };
    let counted = counted(point);
    if !planned.offloads() {
        return Advice::against(&format!("{}{counted}", resident(planned)));
    }
    if planned.batch <= planned.resident_batch {
        let fit = sequences(planned.resident_batch);
        return Advice::against(&format!("{fit} fit on each GPU without it{counted}"));
    }
    if planned.ratio > RATIO_MOST {
        let ratio = ratio(planned.ratio);
        return Advice::against(&format!("ratio {ratio} leaves nearly all rows on the device{counted}"));
    }
    let deployed = &point.deployed;
    Advice::to(
        None,
        format!(
            "With offload {} hold {} sequences of {} instead of {}, at batch {} on each GPU and ratio {}, with {} of \
             host memory on each node; pass --setup to find out whether that pays{counted}.",
            gpus(deployed),
            grouped(deployed.sequences(planned.batch) as f64),
            tokens(point.demand.context),
            grouped(deployed.sequences(planned.resident_batch) as f64),
            planned.batch,
            ratio(planned.ratio),
            point.host_of_node(planned),
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

/// The advice from the best plan that offloads and is fast enough.
fn judged(point: &Point, planned: &Planned, gain: &Gain) -> Advice {
    let deployed = &point.deployed;
    let of = format!("batch {} on each GPU and ratio {}", planned.batch, ratio(planned.ratio));
    let share = point.gain();
    if planned.ratio > RATIO_MOST {
        return Advice::against(&format!(
            "the best batch with it, {of}, leaves nearly all rows on the device{}",
            source(point)
        ));
    }
    if let (Some(share), Some(Baseline { batch, .. })) = (share, gain.without)
        && share < GAIN_LEAST
    {
        let more = format!("{:.1}% {}", 100.0 * share.abs(), if share < 0.0 { "fewer" } else { "more" });
        return Advice::against(&format!(
            "the best batch with it, {of}, yields {more} tokens a second than {batch} on each GPU without, and less \
             than {:.0}% more is not worth it{}",
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
             sequence decodes {} tokens a second{then}{}.",
            gpus(deployed),
            grouped(deployed.sequences(planned.batch) as f64),
            tokens(point.demand.context),
            point.host_of_node(planned),
            number(gain.outcome.otps),
            source(point),
        ),
    )
}

/// Which batches are too slow: the named ones, or all.
fn too_slow(named: &[Known<'_>], asked: &str) -> String {
    match named {
        [] => format!("no batch with it decodes {asked} tokens a second for each sequence"),
        [(_, planned, gain)] => {
            let otps = number(gain.outcome.otps);
            let just = if otps == asked { "just under " } else { "" };
            format!(
                "with it batch {} decodes {just}{otps} tokens a second for each sequence, not {asked}",
                planned.batch
            )
        }
        _ => {
            format!("with it none of the batches asked for decodes {asked} tokens a second for each sequence")
        }
    }
}

/// The advice if no plan both offloads and is fast enough.
fn without(points: &[&Point], known: Option<(&Point, &Planned, &Gain)>, least_otps: f64) -> Advice {
    if let Some((point, alone)) = points.iter().find_map(|point| Some((*point, point.alone?))) {
        return Advice::against(&format!(
            "not even one sequence on each GPU decodes {} tokens a second, but {}{}",
            number(least_otps),
            number(alone),
            source(point)
        ));
    }
    let Some((point, planned, gain)) = known else {
        let why = points.iter().find_map(|point| point.unknown.as_ref());
        let why = why.map_or(String::new(), |error| format!(": {}", error.place()));
        return Advice::to(None, format!("Unknown: the yield of these plans could not be simulated{why}."));
    };
    // A search drops every plan that is too slow, so these plans have named batches.
    let named: Vec<Known<'_>> = self::known(points).filter(|(_, planned, _)| planned.offloads()).collect();
    let slow = if named.is_empty() { gain.slow } else { Slow::All };
    let asked = number(least_otps);
    if slow == Slow::Nothing {
        let too_slow = gain.outcome.otps < least_otps;
        let each = if planned.batch == 1 { "and it decodes" } else { "and each decodes" };
        let otps = number(gain.outcome.otps);
        let slow =
            if too_slow { format!(", {each} {otps} tokens a second, not {asked}") } else { String::new() };
        return Advice::against(&format!("{}{slow}{}", resident(planned), source(point)));
    }
    let fast = gain.without.map(|Baseline { batch, otps, .. }| {
        (sequences(batch), if batch == 1 { "decodes" } else { "decode" }, number(otps))
    });
    let why = match (slow, fast) {
        (Slow::More, Some((batch, verb, otps))) => format!(
            "no batch with it that decodes {asked} tokens a second for each sequence yields more than {batch} on each \
             GPU without, which {verb} {otps}"
        ),
        (_, Some((batch, verb, otps))) => {
            format!("{}, and without it {batch} on each GPU {verb} {otps}", too_slow(&named, &asked))
        }
        (_, None) => too_slow(&named, &asked),
    };
    Advice::against(&format!("{why}{}", source(point)))
}
