//! The pictures of a planned sweep: the ratio by batch and, with a setup, what each batch yields.

use forebay::predict::plan::Note;

use super::page::{self, Card, Head, Section, Table};
use super::sweep::{BATCH, Series, grouped, over};
use super::words::{ratio, tile};
use crate::plan::Point;
use crate::plan_report::{BY_ROOFLINE, misses_notes, mixed, tokens};
use crate::report::size;

/// A batch of a plan's line: its name, that without the link, which no ratio depends on, the batch, the ratio,
/// tokens a second where they are known.
struct Dot {
    name: String,
    plain: String,
    batch: f64,
    ratio: f64,
    throughput: Option<f64>,
}

/// Where the link stands among what tells lines apart.
const LINK: usize = 1;

/// What tells the lines apart: whatever differs beside the batch.
fn setting(point: &Point, all: &[Point], with_link: bool) -> String {
    let differ = |get: &dyn Fn(&Point) -> String| all.iter().any(|other| get(other) != get(point));
    let link = |point: &Point| point.link().unwrap_or_default().to_owned();
    let parts: [&dyn Fn(&Point) -> String; 5] = [
        &|point| point.model.clone(),
        &link,
        &|point| size(point.demand.gpu as f64),
        &|point| tokens(point.demand.context),
        &|point| format!("mtp {}", point.demand.query_rows),
    ];
    let told = parts.into_iter().enumerate().filter(|(i, part)| (with_link || *i != LINK) && differ(part));
    let words: Vec<String> = told.map(|(_, part)| part(point)).collect();
    let by_roofline = mixed(all) && point.on.as_ref().is_some_and(|on| on.by_roofline);
    let words = if words.is_empty() { point.model.clone() } else { words.join(", ") };
    if by_roofline { format!("{words} (by roofline)") } else { words }
}

/// Every batch that is known something of.
fn dots(all: &[Point]) -> Vec<Dot> {
    let mut dots = Vec::new();
    for point in all {
        let Ok(planned) = &point.planned else { continue };
        let (name, plain) = (setting(point, all, true), setting(point, all, false));
        let curve = point.gain.iter().flat_map(|gain| &gain.curve);
        dots.extend(curve.map(|(batch, ratio, throughput)| Dot {
            name: name.clone(),
            plain: plain.clone(),
            batch: f64::from(*batch),
            ratio: *ratio,
            throughput: Some(*throughput),
        }));
        if point.gain.as_ref().is_none_or(|gain| gain.curve.is_empty()) {
            let throughput = point.gain.as_ref().map(|gain| gain.outcome.throughput);
            dots.push(Dot { name, plain, batch: f64::from(planned.batch), ratio: planned.ratio, throughput });
        }
    }
    dots
}

fn table(all: &[Point]) -> Table {
    let head = ["setting", "batch", "ratio", "slots", "device", "host", "tokens/s", "without offload"];
    let row = |point: &Point| {
        let planned = point.planned.as_ref().ok()?;
        let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.0}"));
        Some(vec![
            setting(point, all, true),
            planned.batch.to_string(),
            ratio(planned.ratio),
            planned.slots.to_string(),
            size(planned.bytes.device() as f64),
            size(planned.bytes.host() as f64),
            number(point.gain.as_ref().map(|gain| gain.outcome.throughput)),
            number(point.gain.as_ref().and_then(|gain| gain.without)),
        ])
    };
    Table { head: head.map(str::to_owned).into(), rows: all.iter().filter_map(row).collect() }
}

fn card(
    name: &str,
    sentence: String,
    y: &str,
    series: &[Series],
    rule: Option<(f64, &str)>,
    table: Table,
) -> Card {
    let picture = over(name, &sentence, (BATCH, y), series, rule);
    Card { name: name.to_owned(), sentence, pictures: vec![picture], table, wide: false }
}

/// Throughput by batch, and the line that offload has to beat.
fn yields(all: &[Point], dots: &[Dot]) -> Option<Card> {
    let known: Vec<&Dot> = dots.iter().filter(|dot| dot.throughput.is_some()).collect();
    let best =
        known.iter().max_by(|a, b| a.throughput.unwrap_or(0.0).total_cmp(&b.throughput.unwrap_or(0.0)))?;
    let series = grouped(&known, |dot| dot.name.clone(), |dot| (dot.batch, dot.throughput.unwrap_or(0.0)));
    let floors: Vec<f64> = all.iter().filter_map(|point| point.gain.as_ref()?.without).collect();
    // One line for all, where all have the same to beat.
    let same =
        floors.first().copied().filter(|first| floors.iter().all(|floor| (floor / first - 1.0).abs() < 1e-3));
    let without = same.map_or(String::new(), |floor| format!(" Without offload: {floor:.0}."));
    let named = if series.len() > 1 { format!(": {}", best.name) } else { String::new() };
    let sentence = format!(
        "Most tokens a second, {:.0} a node, at batch {} and ratio {}{named}.{without}",
        best.throughput.unwrap_or(0.0),
        best.batch,
        ratio(best.ratio),
    );
    let rule = same.map(|floor| (floor, "all rows on the device"));
    Some(card("Throughput by batch", sentence, "tokens/s, 8 GPUs", &series, rule, table(all)))
}

/// Every note, and how many of the plans it is of.
fn facts(all: &[Point]) -> Vec<String> {
    let planned: Vec<_> = all.iter().filter_map(|point| point.planned.as_ref().ok()).collect();
    let mut counts: Vec<(Note, usize)> = Vec::new();
    for note in planned.iter().flat_map(|planned| &planned.notes) {
        match counts.iter_mut().find(|(known, _)| known == note) {
            Some((_, count)) => *count += 1,
            None => counts.push((*note, 1)),
        }
    }
    let words =
        |(note, count): &(Note, usize)| format!("{count} of {} plans: {}.", all.len(), note.describe());
    let missing = all.len() - planned.len();
    let none = (missing > 0).then(|| format!("{missing} of {} plans: does not fit.", all.len()));
    counts.iter().map(words).chain(none).collect()
}

/// The page of a planned sweep.
pub fn page(all: &[Point]) -> String {
    let dots = dots(all);
    let ratios = grouped(&dots, |dot| dot.plain.clone(), |dot| (dot.batch, dot.ratio));
    let fit = all.iter().filter_map(|point| point.planned.as_ref().ok());
    let resident = fit.clone().map(|planned| planned.resident_batch).max().unwrap_or(0);
    let most = fit.clone().map(|planned| planned.most_batch).max().unwrap_or(0);
    let sentence = format!("Up to {resident} sequences keep all rows on the device; at most {most} fit.");
    let mut cards: Vec<Card> = yields(all, &dots).into_iter().collect();
    let below = if cards.is_empty() { table(all) } else { Table::default() };
    cards.push(card(
        "The largest ratio that fits, by batch",
        sentence,
        "slots / context",
        &ratios,
        None,
        below,
    ));
    let best = fit.clone().zip(all.iter().filter(|point| point.planned.is_ok()));
    let best =
        best.filter_map(|(planned, point)| Some((planned.batch, point.gain.as_ref()?.outcome.throughput)));
    let best = best.max_by(|a, b| a.1.total_cmp(&b.1));
    let tokens = fit.clone().filter_map(|planned| planned.live_tokens).max();
    let mut warnings = misses_notes(all);
    let rooflines = format!("Some lines are {BY_ROOFLINE}.");
    warnings.extend(mixed(all).then_some(rooflines.as_str()));
    let section = Section {
        title: all.first().map_or(String::new(), |point| point.model.clone()),
        warning: (!warnings.is_empty()).then(|| warnings.join(" ")),
        facts: facts(all),
        tiles: vec![
            tile(resident.to_string(), "sequences with all rows on the device", "at most".to_owned()),
            tile(most.to_string(), "sequences with offload", "at most".to_owned()),
            tile(
                size(fit.map(|planned| planned.bytes.host()).max().unwrap_or(0) as f64),
                "host memory",
                "for the largest plan".to_owned(),
            ),
            match (best, tokens) {
                (Some((batch, most)), _) => tile(
                    format!("{most:.0}"),
                    "tokens/s, a node of 8 GPUs",
                    format!("the most, at batch {batch}"),
                ),
                (None, Some(tokens)) => {
                    let millions = format!("{:.1}M", tokens as f64 / 1e6);
                    tile(millions, "live tokens", "at most: index keys stay on the device".to_owned())
                }
                (None, None) => tile("-".to_owned(), "index keys", "the model has none".to_owned()),
            },
        ],
        cards,
    };
    let head = Head {
        command: "plan",
        question: "What fits, and does it pay?",
        things: "models",
        intro: "How many sequences share a GPU, what of their rows it holds, and what that yields.",
    };
    let notes = [
        "Ratio: slots of a sequence and layer / context. Rows beyond them stand in host memory.".to_owned(),
        "Tokens a second are of a node of 8 GPUs, by the production schedule on a virtual clock.".to_owned(),
    ];
    page::page(&head, &[section], &notes)
}
