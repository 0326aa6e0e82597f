//! The pictures of a sweep: throughput by batch, and the exposed share of a step, with a line for each setting. A
//! single point has no line: the page shows its step's timeline instead.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

use forebay::overlap::Overlap;
use forebay::predict::plan::Ratio;

use super::lanes::lanes;
use super::result::{Simulated, elastic, exposed_share, mean_misses, worst_layer};
use super::text::{beside, line, pulls, title};
use super::timeline;
use crate::present::html::chart::{self, Axis, Plot, WIDTH};
use crate::present::html::numbers::{percent, ratio, tile};
use crate::present::html::page::{self, Card, Head, Section, Table};
use crate::present::html::scale::{Scale, Spread};
use crate::present::html::series::{BATCH, HEIGHT, Series, grouped, over, thousands};
use crate::present::html::svg::Svg;
use crate::present::numbers::{grouped as apart, number, tokens};
use crate::present::output::harmless;
use crate::present::provenance;

/// A ratio as requested.
fn asked(simulated: &Simulated) -> String {
    match simulated.asked {
        Ratio::Share(share) => format!("ratio {}", ratio(share)),
        Ratio::Auto => "ratio auto".to_owned(),
    }
}

/// Whether ratios differ and batches do not: then lines go over the ratio.
fn by_ratio(all: &[Simulated]) -> bool {
    let first = all.first();
    let one = all.iter().all(|s| Some(s.outcome.point.batch) == first.map(|f| f.outcome.point.batch));
    let several = all.iter().any(|s| first.is_some_and(|first| asked(first) != asked(s)));
    one && several && all.iter().all(|s| s.asked != Ratio::Auto)
}

/// What identifies a line of a sweep: everything that differs apart from its x axis. Computed once for all lines.
struct Told {
    over_ratio: bool,
    link: bool,
    context: bool,
    mtp: bool,
    asked: bool,
    choice: bool,
    /// Query rows whose acceptance differs; otherwise a number of drafts has only one acceptance, which needs no name.
    accepts: HashSet<u32>,
}

impl Told {
    fn of(all: &[Simulated]) -> Told {
        let differ = |same: &dyn Fn(&Simulated, &Simulated) -> bool| {
            all.first().is_some_and(|first| !all.iter().all(|other| same(first, other)))
        };
        let over_ratio = by_ratio(all);
        let mut known: HashMap<u32, f64> = HashMap::new();
        let points = all.iter().map(|s| &s.outcome.point);
        let accepts = points.filter(|p| *known.entry(p.mtp).or_insert(p.accept) != p.accept).map(|p| p.mtp);
        Told {
            over_ratio,
            link: differ(&|a, b| a.link == b.link),
            context: differ(&|a, b| a.outcome.point.context == b.outcome.point.context),
            mtp: differ(&|a, b| a.outcome.point.mtp == b.outcome.point.mtp),
            asked: !over_ratio && differ(&|a, b| asked(a) == asked(b)),
            choice: differ(&|a, b| a.choice == b.choice),
            accepts: accepts.collect(),
        }
    }

    fn setting(&self, s: &Simulated) -> String {
        let of = &s.outcome.point;
        let words: [(bool, &dyn Fn() -> String); 6] = [
            (self.link, &|| s.link.clone().unwrap_or_default()),
            (self.context, &|| tokens(of.context)),
            (self.mtp, &|| format!("mtp {}", of.mtp)),
            (self.accepts.contains(&of.mtp), &|| format!("accept {}", of.accept)),
            (self.asked, &|| asked(s)),
            (self.choice, &|| s.choice.to_owned()),
        ];
        let words: Vec<String> =
            words.into_iter().filter(|(differ, _)| *differ).map(|(_, word)| word()).collect();
        if words.is_empty() { "tokens/s".to_owned() } else { words.join(", ") }
    }
}

/// The exposed time of each layer of a step.
fn by_layer(simulated: &Simulated) -> Card {
    let outcome = &simulated.outcome;
    let worst = worst_layer(outcome);
    let most = outcome.exposed_us.iter().copied().fold(0.0, f64::max);
    let sentence = format!(
        "At batch {} and ratio {}: layer {worst} exposes most, {} µs. A column is the wait for rows, plus the extra \
         cost of split attention.",
        outcome.point.batch,
        ratio(outcome.point.ratio),
        number(most),
    );
    let layers = outcome.exposed_us.iter().zip(&outcome.overlap).zip(&outcome.misses).enumerate();
    let hint = |(layer, ((us, overlap), misses)): (usize, ((&f64, &Overlap), &f64))| {
        let hint = format!(
            "layer {layer}: {} µs, {} misses, order {}",
            number(us.max(0.0)),
            number(*misses),
            overlap.name()
        );
        (us.max(0.0), hint)
    };
    let columns: Vec<(f64, String)> = layers.map(hint).collect();
    let plot = Plot::new(HEIGHT, 10.0);
    let y = Scale::from_zero(most, 4, plot.bottom, plot.top);
    let names: Vec<u32> = (0..columns.len() as u32).collect();
    let mut svg = Svg::new(WIDTH, HEIGHT, "Exposed time by layer", &sentence);
    let none = Scale::exact(Spread::Even, 0.0, 1.0, &[], plot.left, plot.right);
    let x = Axis { scale: &none, name: "", write: thousands };
    plot.frame(&mut svg, &x, &Axis { scale: &y, name: "µs", write: thousands });
    chart::columns(&mut svg, &plot, &y, &columns, Some(worst as usize));
    chart::names_below(&mut svg, &plot, &names, "layer");
    let name = "Exposed time by layer".to_owned();
    Card { name, sentence, pictures: vec![svg.finish()], table: Table::default(), wide: false }
}

fn table(all: &[Simulated]) -> Table {
    let told = Told::of(all);
    let head = ["setting", "batch", "ratio", "misses", "step ms", "exposed ms", "share", "tokens/s", "OTPS"];
    let row = |simulated: &Simulated| {
        let outcome = &simulated.outcome;
        vec![
            told.setting(simulated),
            outcome.point.batch.to_string(),
            ratio(outcome.point.ratio),
            number(mean_misses(outcome)),
            number(outcome.step_ms),
            number(outcome.exposed_ms),
            percent(exposed_share(outcome)),
            format!("{:.0}", outcome.throughput),
            number(outcome.otps),
        ]
    };
    Table { head: head.map(str::to_owned).into(), rows: all.iter().map(row).collect() }
}

/// Tokens a second without misses: the throughput of the batch with unlimited device memory.
fn unhindered(simulated: &Simulated) -> f64 {
    let outcome = &simulated.outcome;
    let without = outcome.step_ms - outcome.exposed_ms;
    if without > 0.0 { outcome.throughput * outcome.step_ms / without } else { 0.0 }
}

/// A picture over the batch or the ratio.
fn card(name: &str, sentence: &str, x_name: &str, y_name: &str, series: &[Series], table: Table) -> Card {
    let pictures = vec![over(name, sentence, x_name, y_name, series, None)];
    Card { name: name.to_owned(), sentence: sentence.to_owned(), pictures, table, wide: false }
}

/// The pictures of the sweep; `best` has the most throughput.
fn cards(all: &[Simulated], best: &Simulated) -> Vec<Card> {
    let told = Told::of(all);
    let over_ratio = told.over_ratio;
    let (x, by) = if over_ratio { ("slots / context", "ratio") } else { (BATCH, "batch") };
    let at = |s: &Simulated| {
        if over_ratio { s.outcome.point.ratio } else { f64::from(s.outcome.point.batch) }
    };
    let mut throughput = grouped(all, |s| told.setting(s), |s| (at(s), s.outcome.throughput));
    if let [with] = &mut throughput[..] {
        with.0 = "with misses".to_owned();
        throughput.extend(grouped(all, |_| "without".to_owned(), |s| (at(s), unhindered(s))));
    }
    let exposed = grouped(all, |s| told.setting(s), |s| (at(s), 100.0 * exposed_share(&s.outcome)));
    let worst = all.iter().map(|s| exposed_share(&s.outcome)).fold(0.0, f64::max);
    let point = &best.outcome.point;
    let most = format!(
        "Most tokens a second: {:.0} of 8 GPUs, at batch {} and ratio {}, {} tokens, mtp {}{}, order {}{}.",
        best.outcome.throughput,
        point.batch,
        ratio(point.ratio),
        tokens(point.context),
        point.mtp,
        best.link.as_ref().map_or(String::new(), |link| format!(", link {link}")),
        best.choice,
        beside(best),
    );
    let waits = format!("At most {} of a step is exposed.", percent(worst.max(0.0)));
    vec![
        card(&format!("Throughput by {by}"), &most, x, "tokens/s, 8 GPUs", &throughput, table(all)),
        card(&format!("Exposed time by {by}"), &waits, x, "% of the step", &exposed, Table::default()),
        by_layer(best),
    ]
}

/// A point's step as a timeline, `layers` of it enlarged, with its figures.
fn step(simulated: &Simulated, layers: RangeInclusive<u32>) -> Card {
    let (title, sentence) = (title(simulated), format!("{}.", line(simulated.drawn())));
    let source = simulated.provenance.sentence();
    let caption = timeline::Caption {
        title: &title,
        line: &sentence,
        source: &source,
        whole: "The whole step",
        layers,
    };
    let pictures = vec![timeline::inline(&lanes(&simulated.drawn().spans), &caption)];
    let table = table(std::slice::from_ref(simulated));
    Card { name: "The step by streams".to_owned(), sentence, pictures, table, wide: true }
}

/// The source of the figures, the number of points, the pools of elastic budgets, and a replay's steps.
fn facts(all: &[Simulated]) -> Vec<String> {
    let longest = all.iter().filter_map(|s| s.worst.as_ref());
    let longest = longest.max_by(|a, b| a.outcome.step_ms.total_cmp(&b.outcome.step_ms)).map(|worst| {
        format!(
            "Each point is the mean of {} steps, all in the same order by layer. The longest step of all takes {} ms.",
            worst.steps,
            number(worst.outcome.step_ms)
        )
    });
    let points = match all {
        [one] => format!("One point: {}.", title(one)),
        _ => format!("{} points.", all.len()),
    };
    let source = provenance::sentences(all.iter().map(|simulated| &simulated.provenance));
    let facts = source.into_iter().chain([points]).chain(elastic(all));
    facts.chain(pulls(all)).chain(longest).collect()
}

/// Warnings above all figures: GPUs other than those of the costs, misses of another model.
fn warning(best: &Simulated, note: Option<&str>) -> Option<String> {
    let of = best.provenance.deployment;
    let extrapolated =
        of.extrapolated.then(|| format!("Extrapolated: {} GPUs, from costs of {}.", of.gpus, of.costs_gpus));
    let words: Vec<String> = extrapolated.into_iter().chain(note.map(str::to_owned)).collect();
    (!words.is_empty()).then(|| words.join(" "))
}

/// The page of a simulated sweep; of a single point `layers` are enlarged.
pub fn simulated(all: &[Simulated], note: Option<&str>, layers: RangeInclusive<u32>) -> String {
    let best = all.iter().max_by(|a, b| a.outcome.throughput.total_cmp(&b.outcome.throughput));
    let Some(best) = best else { return String::new() };
    let (outcome, point) = (&best.outcome, &best.outcome.point);
    let there = || if all.len() > 1 { "there".to_owned() } else { String::new() };
    let at = match all.len() {
        1 => format!("ratio {}", ratio(point.ratio)),
        _ => format!("there, ratio {}", ratio(point.ratio)),
    };
    let most = if all.len() > 1 { "the most" } else { "computed" };
    let section = Section {
        title: format!("Setup {}", best.provenance.setup),
        warning: warning(best, note),
        facts: facts(all),
        tiles: vec![
            tile(apart(outcome.throughput), "tokens/s of 8 GPUs", most.to_owned()),
            tile(point.batch.to_string(), "sequences on one GPU", at),
            tile(number(outcome.step_ms), "ms a step", there()),
            tile(percent(exposed_share(outcome).max(0.0)), "of it exposed", there()),
        ],
        cards: match all {
            [one] => vec![step(one, layers), by_layer(one)],
            _ => cards(all, best),
        },
    };
    // A single point is described by one sentence; a sweep is not.
    let headline = match all {
        [_] => format!(
            "A step of {} ms, {} of it exposed: {} tokens a second of 8 GPUs, computed from setup {}.",
            number(outcome.step_ms),
            percent(exposed_share(outcome).max(0.0)),
            apart(outcome.throughput),
            harmless(&best.provenance.setup),
        ),
        _ => "How much of the fetch is hidden?".to_owned(),
    };
    let head = Head {
        command: "simulate",
        question: &headline,
        things: "setups",
        intro: "Steps of the production schedule on a virtual clock, with the setup's costs. They show how long a step \
                waits for rows, and how much of a larger batch's throughput remains.",
    };
    let notes = [
        "Exposed: how much longer a step takes than without misses in the order none.".to_owned(),
        "Misses: rows that a sequence fetches in a layer, mean over the layers. Without: with no misses, \
         which needs memory for all rows."
            .to_owned(),
    ];
    let assumed = provenance::assumptions(all.iter().map(|simulated| &simulated.provenance));
    let assumed = assumed.into_iter().map(|assumption| format!("Assumed: {assumption}."));
    page::page(&head, &[section], &notes.into_iter().chain(assumed).collect::<Vec<_>>())
}
