//! The pictures of a sweep: throughput by batch, and the exposed share of a step, with a line for each setting. A
//! single point has no line: the page shows its step's timeline instead.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

use forebay::overlap::Overlap;
use forebay::predict::plan::Ratio;

use super::chart::{self, Axis, Line, Plot, WIDTH};
use super::page::{self, Card, Head, Section, Table};
use super::scale::Scale;
use super::svg::Svg;
use super::timeline;
use super::words::{percent, ratio, short, tile};
use crate::advice::grouped as apart;
use crate::output::harmless;
use crate::plan_report::tokens;
use crate::provenance;
use crate::report::number;
use crate::simulate::Simulated;
use crate::simulate_report::{beside, exposed_share, line, mean_misses, title, worst_layer};
use crate::timeline::lanes;

/// Height of a picture.
const HEIGHT: f64 = 290.0;

/// A line with more points than this has no dots.
const DOTS: usize = 20;

/// The colours of lines, in order; the later ones are dashed.
const CLASSES: [&str; 16] = [
    "lru",
    "optimum",
    "tokens",
    "s3",
    "decay",
    "fifo",
    "warmed",
    "cold",
    "lru dash",
    "optimum dash",
    "tokens dash",
    "s3 dash",
    "decay dash",
    "fifo dash",
    "warmed dash",
    "cold dash",
];

/// A line's name and its computed points.
pub type Series = (String, Vec<(f64, f64)>);

/// A number on an axis, with round thousands abbreviated.
fn thousands(value: f64) -> String {
    if value >= 10_000.0 && value % 100.0 == 0.0 {
        format!("{}K", short(value / 1000.0))
    } else {
        short(value)
    }
}

/// The name of an axis of batches.
pub const BATCH: &str = "sequences on one GPU";

/// Lines over the batch, or over the quantity that names the x axis.
pub fn over(
    title: &str,
    sentence: &str,
    x_name: &str,
    y_name: &str,
    series: &[Series],
    rule: Option<(f64, &str)>,
) -> String {
    let points = || series.iter().flat_map(|(_, points)| points);
    let most = points().map(|point| point.1).chain(rule.map(|rule| rule.0)).fold(0.0, f64::max);
    let widest = points().map(|point| point.0).fold(0.0, f64::max);
    // A single line needs no name; of several the longest needs room.
    let named = |name: &String| if series.len() > 1 { name.clone() } else { String::new() };
    let longest = series.iter().map(|(name, _)| named(name).chars().count()).max().unwrap_or(0);
    let plot = Plot::new(HEIGHT, (24.0 + 7.4 * longest as f64).min(WIDTH / 2.0));
    let (left, right) = (plot.left + 6.0, plot.right);
    let plot = Plot { left, ..plot };
    let x = Scale::from_zero(widest, 5, left, right);
    let y = Scale::from_zero(most, 5, plot.bottom, plot.top);
    let mut svg = Svg::new(WIDTH, HEIGHT, title, sentence);
    let axis = |scale, name| Axis { scale, name, write: thousands };
    plot.frame(&mut svg, &axis(&x, x_name), &axis(&y, y_name));
    if let Some((value, name)) = rule {
        svg.line("rule", (left, y.place(value)), (right, y.place(value)));
        // At its end, where other lines begin and rise.
        svg.text("note", super::svg::Anchor::End, (right - 6.0, y.place(value) - 5.0), name);
    }
    let lines: Vec<Line> = series
        .iter()
        .zip(CLASSES.iter().cycle())
        .map(|((name, points), class)| Line { name: named(name), class, points: points.clone() })
        .collect();
    chart::lines(&mut svg, &plot, &x, &y, &lines);
    for line in lines.iter().filter(|line| line.points.len() <= DOTS) {
        chart::dots(&mut svg, line.class, &x, &y, &line.points);
    }
    svg.finish()
}

/// The points with their groups' names, in order of appearance.
pub fn grouped<T>(all: &[T], name: impl Fn(&T) -> String, point: impl Fn(&T) -> (f64, f64)) -> Vec<Series> {
    let mut series: Vec<Series> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for one in all {
        let (name, point) = (name(one), point(one));
        let place = *known.entry(name.clone()).or_insert(series.len());
        match series.get_mut(place) {
            Some((_, points)) => points.push(point),
            None => series.push((name, vec![point])),
        }
    }
    for (_, points) in &mut series {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    series
}

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
    let none = Scale::exact(super::scale::Spread::Even, 0.0, 1.0, &[], plot.left, plot.right);
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
    let caption = timeline::Caption { title: &title, line: &sentence, source: &source, layers };
    let pictures = vec![timeline::inline(&lanes(&simulated.drawn().spans), &caption)];
    let table = table(std::slice::from_ref(simulated));
    Card { name: "The step by streams".to_owned(), sentence, pictures, table, wide: true }
}

/// The source of the figures, the number of points, and a replay's steps.
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
    source.into_iter().chain([points]).chain(longest).collect()
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
