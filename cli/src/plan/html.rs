//! The pictures of a planned sweep: the ratio by batch and, with a setup, the yield of each batch.

use forebay::predict::plan::Note;

use super::advice;
use super::deployment::Deployed;
use super::pulls;
use super::result::Point;
use super::settings::{Advised, Settings};
use super::text::{BY_ROOFLINE, given, misses_notes, of_setting};
use crate::present::html::numbers::{ratio, tile};
use crate::present::html::page::{self, Card, Head, Section, Table, Tile};
use crate::present::html::series::{BATCH, Series, grouped, over};
use crate::present::numbers::{counted, grouped as thousands, number, signed_percent};
use crate::present::provenance;

/// A batch of a plan's line: its name, its name without the link (which no ratio depends on), the batch, the ratio,
/// and tokens a second if known.
struct Dot {
    name: String,
    plain: String,
    batch: f64,
    ratio: f64,
    throughput: Option<f64>,
}

/// What identifies a line: everything that differs apart from the batch.
fn line(point: &Point, settings: &Settings, with_link: bool) -> String {
    let words = if with_link { settings.name(point) } else { settings.name_without_link(point) };
    let by_roofline = settings.mixed && point.on.as_ref().is_some_and(|on| on.by_roofline);
    let words = if words.is_empty() { point.model.clone() } else { words };
    if by_roofline { format!("{words} (by roofline)") } else { words }
}

/// Every batch with known figures.
fn dots(all: &[Point], settings: &Settings) -> Vec<Dot> {
    let mut dots = Vec::new();
    for point in all {
        let Ok(planned) = &point.planned else { continue };
        let (name, plain) = (line(point, settings, true), line(point, settings, false));
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

fn table(all: &[Point], settings: &Settings) -> Table {
    let head = [
        "setting",
        "batch, a GPU",
        "sequences in all",
        "ratio",
        "slots",
        "misses from batch",
        "cache, a GPU",
        "host, a GPU",
        "host, a node",
        "tokens/s, a GPU",
        "tokens/s, a node",
        "OTPS",
        "step, ms",
        "without offload: batch",
        "tokens/s, a node",
        "OTPS",
        "gain",
    ];
    let row = |point: &Point| {
        let planned = point.planned.as_ref().ok()?;
        let deployed = &point.deployed;
        let gain = point.gain.as_ref();
        let outcome = gain.map(|gain| &gain.outcome);
        let without = gain.and_then(|gain| gain.without);
        let whole = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.0}"));
        let short = |value: Option<f64>| value.map_or(String::new(), number);
        Some(vec![
            line(point, settings, true),
            planned.batch.to_string(),
            deployed.sequences(planned.batch).to_string(),
            ratio(planned.ratio),
            planned.slots.to_string(),
            planned.misses_from.map_or(String::new(), |first| first.to_string()),
            point.memory.size(planned.bytes.device() as f64),
            point.memory.size(planned.bytes.host() as f64),
            point.host_of_node(planned),
            whole(outcome.map(|outcome| Deployed::of_gpu(outcome.throughput))),
            whole(outcome.map(|outcome| deployed.of_node(outcome.throughput))),
            short(outcome.map(|outcome| outcome.otps)),
            short(outcome.map(|outcome| outcome.step_ms)),
            without.map_or(String::new(), |without| without.batch.to_string()),
            whole(without.map(|without| deployed.of_node(without.throughput))),
            short(without.map(|without| without.otps)),
            point.gain().map_or(String::new(), signed_percent),
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
    let picture = over(name, &sentence, BATCH, y, series, rule);
    Card { name: name.to_owned(), sentence, pictures: vec![picture], table, wide: false }
}

/// Throughput of a node by batch, and the throughput without offload.
fn yields(all: &[Point], settings: &Settings, dots: &[Dot]) -> Option<Card> {
    let deployed = &all.first()?.deployed;
    let known: Vec<&Dot> = dots.iter().filter(|dot| dot.throughput.is_some()).collect();
    let best =
        known.iter().max_by(|a, b| a.throughput.unwrap_or(0.0).total_cmp(&b.throughput.unwrap_or(0.0)))?;
    let of_node = |throughput: Option<f64>| deployed.of_node(throughput.unwrap_or(0.0));
    let series = grouped(&known, |dot| dot.name.clone(), |dot| (dot.batch, of_node(dot.throughput)));
    let floors: Vec<f64> = all
        .iter()
        .filter_map(|point| point.gain.as_ref()?.without)
        .map(|it| deployed.of_node(it.throughput))
        .collect();
    // One reference line if it is the same for all.
    let same =
        floors.first().copied().filter(|first| floors.iter().all(|floor| (floor / first - 1.0).abs() < 1e-3));
    let without = same.map_or(String::new(), |floor| format!(" Without offload: {floor:.0}."));
    let named = if series.len() > 1 { format!(": {}", best.name) } else { String::new() };
    let sentence = format!(
        "Most tokens a second, {:.0} a node, at batch {} and ratio {}{named}.{without}",
        of_node(best.throughput),
        best.batch,
        ratio(best.ratio),
    );
    let rule = same.map(|floor| (floor, "all rows on the device"));
    let axis = match deployed.node_gpus() {
        1 => "tokens/s of the GPU".to_owned(),
        gpus => format!("tokens/s of {gpus} GPUs"),
    };
    Some(card("Throughput by batch", sentence, &axis, &series, rule, table(all, settings)))
}

/// Every note, and the number of plans it applies to.
fn facts(all: &[Point]) -> Vec<String> {
    let planned: Vec<_> = all.iter().filter_map(|point| point.planned.as_ref().ok()).collect();
    let mut counts: Vec<(Note, usize)> = Vec::new();
    for note in planned.iter().flat_map(|planned| &planned.notes) {
        match counts.iter_mut().find(|(known, _)| known == note) {
            Some((_, count)) => *count += 1,
            None => counts.push((*note, 1)),
        }
    }
    let plans = counted(all.len() as u64, "plan");
    let words = |(note, count): &(Note, usize)| format!("{count} of {plans}: {}.", note.describe());
    let missing = all.len() - planned.len();
    let none = (missing > 0).then(|| format!("{missing} of {plans}: does not fit."));
    counts.iter().map(words).chain(none).collect()
}

/// The figures at the top: the throughput without offload, with it, and what offload needs.
fn tiles(all: &[Point], only: Option<&[&Point]>, least_otps: f64) -> Vec<Tile> {
    let fits = || all.iter().filter_map(|point| Some((point, point.planned.as_ref().ok()?)));
    if let Some((point, planned, gain)) = only.and_then(|plans| advice::shown(plans, least_otps)) {
        let deployed = &point.deployed;
        let baseline = gain.without.map(|without| {
            let more = format!(
                "tokens/s a GPU: {:.0}; each sequence {}",
                Deployed::of_gpu(without.throughput),
                number(without.otps)
            );
            let what = format!(
                "tokens/s a node without offload, {} sequences in all",
                deployed.sequences(without.batch)
            );
            tile(thousands(deployed.of_node(without.throughput)), &what, more)
        });
        let slow = gain.outcome.otps < least_otps;
        let how = if slow { "and too slow" } else { "at best" };
        let with = tile(
            thousands(deployed.of_node(gain.outcome.throughput)),
            &format!("tokens/s a node {how}, {} sequences in all", deployed.sequences(planned.batch)),
            format!(
                "tokens/s a GPU: {:.0}; each sequence {}",
                Deployed::of_gpu(gain.outcome.throughput),
                number(gain.outcome.otps)
            ),
        );
        let share = point.gain().filter(|_| !slow).map(|share| {
            tile(
                signed_percent(share),
                "tokens/s, gained",
                format!("batch {}, ratio {}", planned.batch, ratio(planned.ratio)),
            )
        });
        let memory = tile(
            point.host_of_node(planned),
            "host memory a node",
            format!("{} a GPU", point.memory.size(planned.bytes.host() as f64)),
        );
        return baseline.into_iter().chain([with]).chain(share).chain([memory]).collect();
    }
    let resident = fits().map(|(_, planned)| planned.resident_batch).max().unwrap_or(0);
    let most = fits().map(|(_, planned)| planned.most_batch).max().unwrap_or(0);
    let host = fits().max_by_key(|(_, planned)| planned.bytes.host());
    let host =
        host.map_or_else(String::new, |(point, planned)| point.memory.size(planned.bytes.host() as f64));
    let live = match fits().filter_map(|(_, planned)| planned.live_tokens).max() {
        Some(tokens) => tile(
            format!("{:.1}M", tokens as f64 / 1e6),
            "live tokens a GPU",
            "at most: index keys stay on the device".to_owned(),
        ),
        None => tile("-".to_owned(), "index keys", "the model has none".to_owned()),
    };
    vec![
        tile(resident.to_string(), "sequences a GPU, all rows on it", "at most".to_owned()),
        tile(most.to_string(), "sequences a GPU with offload", "at most".to_owned()),
        tile(host, "host memory a GPU", "for the largest plan".to_owned()),
        live,
    ]
}

/// The page of a planned sweep.
pub fn page(all: &[Point], least_otps: f64) -> String {
    let settings = Settings::of(all);
    let dots = dots(all, &settings);
    let ratios = grouped(&dots, |dot| dot.plain.clone(), |dot| (dot.batch, dot.ratio));
    let fit = all.iter().filter_map(|point| point.planned.as_ref().ok());
    let resident = fit.clone().map(|planned| planned.resident_batch).max().unwrap_or(0);
    let most = fit.map(|planned| planned.most_batch).max().unwrap_or(0);
    let sentence =
        format!("Up to {resident} sequences keep all rows on one GPU; at most {most} fit with offload.");
    let mut cards: Vec<Card> = yields(all, &settings, &dots).into_iter().collect();
    let below = if cards.is_empty() { table(all, &settings) } else { Table::default() };
    cards.push(card(
        "The largest ratio that fits, by batch",
        sentence,
        "slots / context",
        &ratios,
        None,
        below,
    ));
    let mut warnings = misses_notes(all);
    let rooflines = format!("Some lines are {BY_ROOFLINE}.");
    warnings.extend(settings.mixed.then_some(rooflines.as_str()));
    let advised = Advised::of(all, least_otps);
    // The sentence of a single setting is the page's headline; with several settings each has its own, above
    // everything else.
    let only = advised.only();
    let headline = only.map_or("What fits, and does it pay?", |(_, advice)| &advice.sentence);
    let several = advised.all().filter(|_| only.is_none());
    let said = several.map(|(name, advice)| of_setting(name, &advice.sentence));
    let elastic = advised.elastic().map(|(name, sentence)| of_setting(name, sentence));
    let shared = all.first().map(|first| given(first, all)).unwrap_or_default();
    let shards = pulls::sentences(all).map(|(point, said)| of_setting(&settings.name(point), &said));
    let rests = || all.iter().filter_map(|point| Some(&point.on.as_ref()?.provenance));
    let section = Section {
        title: all.first().map_or(String::new(), |point| point.model.clone()),
        warning: (!warnings.is_empty()).then(|| warnings.join(" ")),
        facts: said
            .chain(elastic)
            .chain(shards)
            .chain(provenance::sentences(rests()))
            .chain(shared)
            .chain(facts(all))
            .collect(),
        tiles: tiles(all, only.map(|(plans, _)| plans), least_otps),
        cards,
    };
    let head = Head {
        command: "plan",
        question: headline,
        things: "models",
        intro: "How many sequences share a GPU, how many of their rows it holds, and the throughput.",
    };
    let notes = [
        "Ratio: slots of a sequence and layer as a share of its context at its end, prompt and promised tokens. Other \
         rows are in host memory."
            .to_owned(),
        "Tokens a second: by the production schedule on a virtual clock, with the setup's costs. OTPS: output tokens \
         a second of each sequence."
            .to_owned(),
        "Misses from: with elastic budgets, the smallest batch whose rows do not all have slots. Misses after a change \
         of budget are not counted."
            .to_owned(),
    ];
    let assumed = provenance::assumptions(rests());
    let assumed = assumed.into_iter().map(|assumption| format!("Assumed: {assumption}."));
    page::page(&head, &[section], &notes.into_iter().chain(assumed).collect::<Vec<_>>())
}
