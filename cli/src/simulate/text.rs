//! Simulated steps as text and as JSON. `docs/json.md` describes the entries.

use forebay::predict::simulate::{Bound, Outcome};

use super::result::{Counts, Simulated, counts, elastic, exposed_share, mean_misses};
use crate::present::numbers::{counted, number, ratio, tokens};
use crate::present::provenance;
use crate::present::terminal::{Look, Spare, align_right};
use crate::study::mean_step::Worst;

/// Other requested conditions: elastic budgets, separate compute streams, traffic, sharded weights.
pub fn beside(simulated: &Simulated) -> String {
    let mut words = String::new();
    if simulated.pool.is_some() {
        words += ", elastic budgets";
    }
    if simulated.fill {
        words += ", waits filled";
    }
    for (rate, way) in simulated.traffic.iter().zip(["up", "down"]) {
        words += &rate.map_or(String::new(), |rate| format!(", traffic {way} {rate} GB/s"));
    }
    words += &simulated.sharded.as_ref().map_or(String::new(), |sharded| format!(", {}", sharded.words()));
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

/// Milliseconds that a step takes longer because weights are pulled: waits, and works that are slower beside pulls.
fn pulls_ms(outcome: &Outcome) -> f64 {
    outcome.pulls.as_ref().map_or(0.0, |pulls| pulls.exposed_ms + pulls.slower_ms).max(0.0)
}

/// The pulls of all points in one line; none if nothing is sharded.
pub fn pulls(all: &[Simulated]) -> Option<String> {
    let sharded = all.iter().find_map(|one| one.sharded.as_ref())?;
    let all = || all.iter().filter_map(|one| Some((one.outcome.pulls.as_ref()?, one.outcome.step_ms)));
    let most = all().max_by(|a, b| (a.0.exposed_ms / a.1).total_cmp(&(b.0.exposed_ms / b.1)))?;
    let (pulls, step_ms) = most;
    let pull_us = all().map(|(pulls, _)| pulls.pull_us).fold(0.0, f64::max);
    let several = if all().count() > 1 { "at most " } else { "" };
    Some(format!(
        "Pulls: {}, from {}. The longest takes {} us alone on the link. A step waits {several}{} ms for pulls \
         ({:.1}%), and is {several}{} ms longer because they use the memory.",
        sharded.words(),
        sharded.source(),
        number(pull_us),
        number(pulls.exposed_ms.max(0.0)),
        (100.0 * pulls.exposed_ms / step_ms).max(0.0),
        number(all().map(|(pulls, _)| pulls.slower_ms).fold(0.0, f64::max)),
    ))
}

/// The result in one line.
pub fn line(outcome: &Outcome) -> String {
    let Counts { none, da, dba, ahead } = counts(outcome);
    let ahead = if ahead > 0 { format!(", ahead {ahead}") } else { String::new() };
    let pulls = outcome.pulls.as_ref().map_or(String::new(), |_| {
        let ms = pulls_ms(outcome);
        format!(", {} ms for pulls ({:.1}%)", number(ms), 100.0 * ms / outcome.step_ms)
    });
    format!(
        "A step of {} ms, {} ms of it exposed ({:.1}%){pulls}; {} tokens/s of 8 GPUs; layers by order: none {none}, \
         da {da}, dba {dba}{ahead}",
        number(outcome.step_ms),
        number(outcome.exposed_ms),
        100.0 * exposed_share(outcome),
        number(outcome.throughput),
    )
}

/// The whole report.
pub fn report(all: &[Simulated], note: Option<&str>, look: Look) -> String {
    let mut out = String::new();
    if !all.is_empty() {
        let provenances = || all.iter().map(|simulated| &simulated.provenance);
        out += &provenance::header(provenances());
        out += &note.map_or(String::new(), |note| format!("{note}\n"));
        out.extend(elastic(all).iter().map(|line| format!("{line}\n")));
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
    out += &pulls(all).map_or(String::new(), |line| format!("\n{line}\n"));
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
    let groups = all.iter().any(|simulated| counts(&simulated.outcome).ahead > 0);
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
        if groups { "layers\nnone/da/dba/ahead" } else { "layers\nnone/da/dba" },
    ]);
    head.extend(several.then_some("longest\nstep ms"));
    let mut table = look.table();
    table.set_header(head);
    for simulated in all {
        let outcome = &simulated.outcome;
        let (point, Counts { none, da, dba, ahead }) = (&outcome.point, counts(outcome));
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
            if groups { format!("{none}/{da}/{dba}/{ahead}") } else { format!("{none}/{da}/{dba}") },
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
