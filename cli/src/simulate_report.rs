//! Simulated steps as text and as JSON. `docs/json.md` describes the entries.

use forebay::Result;
use forebay::overlap::Overlap;
use forebay::predict::provenance::Provenance;
use forebay::predict::simulate::{Bound, Outcome};
use serde::Serialize;

use crate::json;
use crate::look::{Look, Spare, align_right};
use crate::plan_report::tokens;
use crate::provenance;
use crate::report::{counted, number, ratio};
use crate::simulate::Simulated;
use crate::steps::Worst;

#[derive(Serialize)]
struct Entry<'a> {
    schema: u32,
    forebay: &'static str,
    kind: &'static str,
    provenance: &'a Provenance,
    setup: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<&'a str>,
    context: u32,
    batch: u32,
    mtp: u32,
    accept: f64,
    ratio: f64,
    two_batch: bool,
    fill: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    traffic_up: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traffic_down: Option<f64>,
    order: &'static str,
    step_ms: f64,
    throughput: f64,
    otps: f64,
    exposed_ms: f64,
    wait_ms: f64,
    host: Host,
    overlap: Counts,
    misses: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    misses_note: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<Steps>,
    per_layer: Vec<PerLayer>,
}

/// The host time that enqueueing a step takes.
#[derive(Serialize)]
struct Host {
    captured_us: f64,
    uncaptured_us: f64,
    bound_by: &'static str,
}

/// The steps of a replay.
#[derive(Serialize)]
struct Steps {
    count: u32,
    worst: u32,
    worst_ms: f64,
    worst_exposed_ms: f64,
}

/// The number of layers in each order.
#[derive(Serialize)]
struct Counts {
    none: u32,
    da: u32,
    dba: u32,
}

#[derive(Serialize)]
struct PerLayer {
    layer: usize,
    misses: f64,
    overlap: &'static str,
    exposed_us: f64,
}

fn counts(outcome: &Outcome) -> Counts {
    let count = |order| outcome.overlap.iter().filter(|overlap| **overlap == order).count() as u32;
    Counts { none: count(Overlap::None), da: count(Overlap::Da), dba: count(Overlap::Dba) }
}

/// Rows that a request misses in a layer, mean over the layers.
pub fn mean_misses(outcome: &Outcome) -> f64 {
    outcome.misses.iter().sum::<f64>() / outcome.misses.len().max(1) as f64
}

/// Exposed time as a share of the step.
pub fn exposed_share(outcome: &Outcome) -> f64 {
    if outcome.step_ms > 0.0 { outcome.exposed_ms / outcome.step_ms } else { 0.0 }
}

/// The layer with most exposed time.
pub fn worst_layer(outcome: &Outcome) -> u32 {
    let layers = (0_u32..).zip(&outcome.exposed_us);
    layers.max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(layer, _)| layer)
}

fn entry<'a>(simulated: &'a Simulated, misses_note: Option<&'a str>) -> Entry<'a> {
    let outcome = &simulated.outcome;
    let layers = outcome.misses.iter().zip(&outcome.overlap).zip(&outcome.exposed_us).enumerate();
    Entry {
        schema: json::SCHEMA,
        forebay: env!("CARGO_PKG_VERSION"),
        kind: "simulate",
        provenance: &simulated.provenance,
        setup: &simulated.provenance.setup,
        link: simulated.link.as_deref(),
        context: outcome.point.context,
        batch: outcome.point.batch,
        mtp: outcome.point.mtp,
        accept: outcome.point.accept,
        ratio: outcome.point.ratio,
        two_batch: outcome.two_batch,
        fill: simulated.fill,
        traffic_up: simulated.traffic[0],
        traffic_down: simulated.traffic[1],
        order: simulated.choice,
        step_ms: outcome.step_ms,
        throughput: outcome.throughput,
        otps: outcome.otps,
        exposed_ms: outcome.exposed_ms,
        wait_ms: outcome.wait_ms,
        host: Host {
            captured_us: outcome.host.captured_us,
            uncaptured_us: outcome.host.uncaptured_us,
            bound_by: outcome.host.bound(outcome.step_ms).name(),
        },
        overlap: counts(outcome),
        misses: mean_misses(outcome),
        misses_note,
        steps: simulated.worst.as_ref().map(|worst| Steps {
            count: worst.steps,
            worst: worst.step,
            worst_ms: worst.outcome.step_ms,
            worst_exposed_ms: worst.outcome.exposed_ms,
        }),
        per_layer: layers
            .map(|(layer, ((misses, overlap), exposed_us))| PerLayer {
                layer,
                misses: *misses,
                overlap: overlap.name(),
                exposed_us: *exposed_us,
            })
            .collect(),
    }
}

/// All entries as text, with a line end.
///
/// # Errors
/// [`forebay::Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn json(all: &[Simulated], note: Option<&str>) -> Result<Vec<u8>> {
    json::list(&all.iter().map(|simulated| entry(simulated, note)).collect::<Vec<_>>())
}

/// Other requested conditions: separate compute streams, traffic.
pub fn beside(simulated: &Simulated) -> String {
    let mut words = String::new();
    if simulated.fill {
        words += ", waits filled";
    }
    for (rate, way) in simulated.traffic.iter().zip(["up", "down"]) {
        words += &rate.map_or(String::new(), |rate| format!(", traffic {way} {rate} GB/s"));
    }
    words
}

/// The simulated point in one line.
pub fn title(simulated: &Simulated) -> String {
    let point = &simulated.outcome.point;
    let link = simulated.link.as_ref().map_or(String::new(), |link| format!(" on {link}"));
    let step = |worst: &Worst| format!(", step {}: the longest of {}", worst.step, worst.steps);
    let gpus = match simulated.provenance.deployment {
        of if of.extrapolated => format!(" on {} GPUs, extrapolated", of.gpus),
        _ => String::new(),
    };
    format!(
        "{}{gpus}{link}: {} tokens, batch {}, {}, ratio {}, order {}{}{}",
        simulated.provenance.setup,
        tokens(point.context),
        point.batch,
        counted(point.mtp, "query row"),
        ratio(point.ratio),
        simulated.choice,
        beside(simulated),
        simulated.worst.as_ref().map_or(String::new(), step),
    )
}

/// The result in one line.
pub fn line(outcome: &Outcome) -> String {
    let Counts { none, da, dba } = counts(outcome);
    format!(
        "A step of {} ms, {} ms of it exposed ({:.1}%); {} tokens/s of 8 GPUs; layers by order: none {none}, \
         da {da}, dba {dba}",
        number(outcome.step_ms),
        number(outcome.exposed_ms),
        100.0 * exposed_share(outcome),
        number(outcome.throughput),
    )
}

/// The whole report.
pub fn text(all: &[Simulated], note: Option<&str>, look: Look) -> String {
    let mut out = String::new();
    if !all.is_empty() {
        let provenances = || all.iter().map(|simulated| &simulated.provenance);
        out += &provenance::header(provenances());
        out += &note.map_or(String::new(), |note| format!("{note}\n"));
        if let Some(worst) = all.iter().find_map(|simulated| simulated.worst.as_ref()) {
            out += &format!(
                "Misses by step: mean of {}, all in the same order by layer.\n",
                counted(worst.steps, "step")
            );
        }
        out += "\n";
    }
    out += &steps(all, look);
    out += "\n";
    out += &host(all);
    out += "\n\nRatio: slots of a sequence and layer as a share of its context at its end. Misses: rows that a \
            sequence fetches a layer, mean. Exposed: how much longer the step takes than without misses. \
            Tokens/s: of 8 GPUs. OTPS: output tokens a second of one sequence. Layers: how many run in each order.\n";
    out + &provenance::footer(all.iter().map(|simulated| &simulated.provenance))
}

/// The host time of steps, and the steps that wait for the host.
fn host(all: &[Simulated]) -> String {
    let most = |of: fn(&Outcome) -> f64| all.iter().map(|one| of(&one.outcome)).fold(0.0, f64::max) / 1e3;
    let (captured, uncaptured) = (most(|one| one.host.captured_us), most(|one| one.host.uncaptured_us));
    let mut out = format!(
        "\nHost: forebay's calls take up to {} ms of one core a step with captured layers, {} ms without, in \
         addition to an engine's own launches.",
        number(captured),
        number(uncaptured)
    );
    for (bound, when) in [(Bound::Host, "captured or not"), (Bound::HostUnlessCaptured, "unless captured")] {
        let waits = |one: &&Simulated| one.outcome.host.bound(one.outcome.step_ms) == bound;
        if let Some(one) = all.iter().find(waits) {
            let steps = counted(all.iter().filter(waits).count() as u32, "step");
            let first = format!("{} ms, batch {}", number(one.outcome.step_ms), one.outcome.point.batch);
            out += &format!(" Bound by the host {when}: {steps}, the first of {first}.");
        }
    }
    if all.iter().all(|one| one.outcome.host.bound(one.outcome.step_ms) == Bound::Device) {
        out += " No step waits for the host.";
    }
    out + "\n"
}

fn steps(all: &[Simulated], look: Look) -> String {
    let links = all.iter().any(|simulated| simulated.link.is_some());
    let orders = all.iter().any(|simulated| simulated.choice != "best");
    let several = all.iter().any(|simulated| simulated.worst.is_some());
    let mut head = Vec::new();
    head.extend(links.then_some("link"));
    head.extend(orders.then_some("order"));
    head.extend([
        "context",
        "mtp",
        "accept",
        "batch",
        "ratio",
        "misses",
        "step\nms",
        "exposed\nms",
        "share",
        "tokens/s",
        "OTPS",
        "layers\nnone/da/dba",
    ]);
    head.extend(several.then_some("longest\nstep ms"));
    let mut table = look.table();
    table.set_header(head);
    for simulated in all {
        let outcome = &simulated.outcome;
        let (point, Counts { none, da, dba }) = (&outcome.point, counts(outcome));
        let mut row = Vec::new();
        row.extend(links.then(|| simulated.link.clone().unwrap_or_default()));
        row.extend(orders.then(|| simulated.choice.to_owned()));
        row.extend([
            tokens(point.context),
            point.mtp.to_string(),
            point.accept.to_string(),
            point.batch.to_string(),
            ratio(point.ratio),
            number(mean_misses(outcome)),
            number(outcome.step_ms),
            number(outcome.exposed_ms),
            format!("{:.1}%", 100.0 * exposed_share(outcome)),
            format!("{:.0}", outcome.throughput),
            number(outcome.otps),
            format!("{none}/{da}/{dba}"),
        ]);
        let longest = || simulated.worst.as_ref().map_or(outcome.step_ms, |worst| worst.outcome.step_ms);
        row.extend(several.then(|| number(longest())));
        table.add_row(row);
    }
    let names = usize::from(links) + usize::from(orders);
    align_right(&mut table, |column| column >= names);
    // The context, query rows, acceptance, batch and ratio identify lines as well.
    look.fit(table, &Spare { columns: &["share", "layers", "misses", "OTPS"], keys: names + 5, text: None })
}
