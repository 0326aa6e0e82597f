//! The section of a request trace: counts and draws the hits of a prefix cache by capacity.
//!
//! LRU's hits come from its curve, which has every capacity and selects the interesting ones. The other policies run
//! at capacities from the one at which LRU has a tenth of the possible hits up to all blocks. The capacity shown in
//! detail is the one at which LRU has half of the possible hits. Hits are weighted by blocks, and also by tokens if
//! the trace has its blocks' lengths.

use std::path::{Path, PathBuf};

use forebay::trace::requests::{Format, RequestTrace};
use forebay::{Error, Kind, Result};

use super::args::RequestArguments;
use super::result::{self, About};
use super::text;
use crate::blocks::{self, Outcome, Policy};
use crate::input::allowance::{Allowance, Replayed};
use crate::present::html::chart::{self, Axis, Bar, HERO, Line, Plot, WIDTH};
use crate::present::html::numbers::{percent, short, tile};
use crate::present::html::page::{self, Card, Section, Table};
use crate::present::html::scale::{Scale, Spread, geometric};
use crate::present::html::svg::Svg;
use crate::present::numbers::counted;
use crate::present::progress;
use crate::study::threads;

/// Shares of the possible hits for which the required capacity is shown.
const NEEDED: [f64; 6] = [0.25, 0.5, 0.75, 0.9, 0.95, 0.99];

/// The approximate number of capacities at which the policies are compared.
const COMPARED: u32 = 12;

/// The policies that are compared with LRU.
const STUDIED: [Policy; 3] = [Policy::Fifo, Policy::S3Fifo, Policy::Belady];

/// All figures of the report about a trace.
pub struct Hits {
    /// The trace's description.
    pub about: About,
    /// The capacity that is shown in detail.
    pub shown: u32,
    /// Whether it was named; otherwise LRU has half of the possible hits there.
    pub named: bool,
    /// LRU by capacity, ascending.
    pub lru: Vec<(u32, Outcome)>,
    /// Shares of the possible hit blocks, each with the capacity that LRU needs for it.
    pub needed: Vec<(f64, u32)>,
    /// Every policy by capacity, ascending; empty if the trace names no blocks.
    pub policies: Vec<(Policy, Vec<(u32, Outcome)>)>,
}

/// Counts everything about the trace at `path`.
///
/// # Errors
/// Errors of reading the trace, of the skipped requests, and [`forebay::Kind::OutOfMemory`].
pub fn gather(path: &Path, arguments: &RequestArguments, memory: Option<u64>) -> Result<Hits> {
    if arguments.named().len() > 1 {
        return Err(several(arguments.named().len()));
    }
    let allowance = Allowance { of: Replayed::Requests, memory };
    let trace = RequestTrace::read_asking(path, &arguments.options(), |taken| allowance.reading(taken))?;
    let about = result::about(path, arguments, &trace)?;
    let curve_bytes = blocks::curve_bytes(&trace);
    let one = STUDIED.iter().map(|policy| blocks::bytes(&trace, *policy)).max().unwrap_or(0);
    let most = threads::held(STUDIED.len() * COMPARED as usize, one);
    allowance.check_of(path, trace.bytes(), curve_bytes.saturating_add(most))?;
    let curve = blocks::curve(&trace, about.skipped, || ())?;
    let all = curve.at(trace.distinct()).hit_blocks;
    let reaches = |share: f64| {
        let enough = |capacity: &u32| curve.at(*capacity).hit_blocks as f64 >= share * all as f64;
        curve.changes().find(enough)
    };
    let needed = NEEDED.iter().filter_map(|share| Some((*share, reaches(*share)?))).collect();
    let shown = arguments.named().first().copied().or(reaches(0.5)).unwrap_or(1);
    let mut capacities = geometric(reaches(0.1).unwrap_or(1), trace.distinct(), COMPARED);
    capacities.extend(arguments.named().iter().chain([&shown]));
    capacities.sort_unstable();
    capacities.dedup();
    let jobs: Vec<(Policy, u32)> =
        STUDIED.iter().flat_map(|policy| capacities.iter().map(|capacity| (*policy, *capacity))).collect();
    let bar = progress::of_trace(path, trace.requests() as u64 * jobs.len() as u64);
    let outcomes = threads::each(jobs.len(), one, |index| {
        let (policy, capacity) = jobs[index];
        blocks::replay(&trace, policy, capacity, about.skipped, || bar.inc(1))
    })?;
    bar.finish_and_clear();
    let at = |capacity: &u32| (*capacity, curve.at(*capacity));
    let least = capacities.first().copied().unwrap_or(1);
    let mut line = geometric(least, trace.distinct(), 100);
    line.extend(&capacities);
    line.sort_unstable();
    line.dedup();
    let mut policies = vec![(Policy::Lru, capacities.iter().map(at).collect())];
    for (policy, outcomes) in STUDIED.iter().zip(outcomes.chunks(capacities.len())) {
        policies.push((*policy, capacities.iter().copied().zip(outcomes.iter().copied()).collect()));
    }
    if about.distinct == 0 {
        policies.clear();
    }
    let named = !arguments.named().is_empty();
    Ok(Hits { about, shown, named, lru: line.iter().map(at).collect(), needed, policies })
}

fn several(capacities: usize) -> Error {
    Error::new(Kind::InvalidConfig, "replay")
        .at("--html shows one capacity in detail, but several are named")
        .with("capacities", capacities as u64)
        .hint("pass one with --capacity; the report shows the hits of every capacity anyway")
}

/// The weight of hits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Weight {
    Tokens,
    Blocks,
}

impl Weight {
    fn share(self, outcome: &Outcome) -> f64 {
        let (part, whole) = match self {
            Weight::Tokens => (outcome.hit_tokens, outcome.input_tokens),
            Weight::Blocks => (outcome.hit_blocks, outcome.blocks),
        };
        part as f64 / whole.max(1) as f64
    }

    fn of(self) -> &'static str {
        match self {
            Weight::Tokens => "input tokens",
            Weight::Blocks => "block references",
        }
    }
}

impl Hits {
    fn weight(&self) -> Weight {
        if self.about.knows_block_lengths { Weight::Tokens } else { Weight::Blocks }
    }

    /// Hits of a policy at the capacity shown.
    fn share(&self, policy: Policy) -> f64 {
        let sizes = self.policies.iter().find(|(p, _)| *p == policy).map_or(&[][..], |(_, sizes)| sizes);
        let at = sizes.iter().find(|(capacity, _)| *capacity == self.shown);
        at.map_or(0.0, |(_, outcome)| self.weight().share(outcome))
    }

    /// Hits of a cache that keeps everything.
    fn ceiling(&self) -> f64 {
        self.lru.last().map_or(0.0, |(_, outcome)| self.weight().share(outcome))
    }

    /// A policy's name and colour. If ids name pieces, Belady's rule does not bound these hits.
    fn style(&self, policy: Policy) -> (&'static str, &'static str) {
        match policy {
            Policy::Belady if self.about.format == Format::RagPulse => ("belady", "optimum"),
            Policy::Belady => ("optimum", "optimum"),
            Policy::S3Fifo => (policy.name(), "s3"),
            Policy::Lru | Policy::Fifo => (policy.name(), policy.name()),
        }
    }
}

/// The whole section.
pub fn section(hits: &Hits) -> Section {
    let measured = hits.lru.last().map(|(_, outcome)| *outcome).unwrap_or_default();
    let facts = text::introduction(&hits.about, measured);
    let name =
        hits.about.path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let mut section = Section {
        title: name,
        warning: None,
        facts: facts.lines().map(str::to_owned).collect(),
        tiles: Vec::new(),
        cards: Vec::new(),
    };
    if hits.policies.is_empty() {
        return section;
    }
    let of = format!("of the {}", hits.weight().of());
    let shown = format!("{of}, at {}", blocks(hits.shown));
    section.tiles = vec![
        tile(points(hits.share(Policy::Lru)), "hit with LRU", shown.clone()),
        tile(points(hits.share(Policy::Belady)), &format!("hit with {}", spoken(hits)), shown),
        tile(
            points(hits.ceiling()),
            "hit when all is kept",
            format!("{of}; {}", blocks(hits.about.distinct)),
        ),
        tile(
            measured.requests.to_string(),
            if measured.requests == 1 { "request measured" } else { "requests measured" },
            counted(measured.blocks, "block reference"),
        ),
    ];
    section.cards = vec![by_capacity(hits), by_policy(hits)];
    section.cards.extend(needed(hits));
    section
}

/// The optimum, or the rule in its place.
fn spoken(hits: &Hits) -> &'static str {
    if hits.style(Policy::Belady).0 == "optimum" { "the optimum" } else { "Belady's rule" }
}

fn blocks(count: u32) -> String {
    format!("{} {}", thousands(f64::from(count)), if count == 1 { "block" } else { "blocks" })
}

/// A share as percent with one decimal, so that shares can be compared.
fn points(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// A count with k for thousands and M for millions, with at least three digits.
fn thousands(count: f64) -> String {
    match count {
        c if c < 1e4 => short(c),
        c if c < 1e6 => format!("{}k", short((c / 100.0).round() / 10.0)),
        c => format!("{}M", short((c / 1e4).round() / 100.0)),
    }
}

fn answer(hits: &Hits) -> String {
    let (lru, best, ceiling) = (hits.share(Policy::Lru), hits.share(Policy::Belady), hits.ceiling());
    let of = hits.weight().of();
    if ceiling == 0.0 {
        return "No block is requested again while it could be hit, so no cache helps.".to_owned();
    }
    let mut out = format!(
        "With {}{}, LRU hits {} of the {of}, {} {}; a cache that keeps everything hits {}, and the rest cannot be hit.",
        blocks(hits.shown),
        if hits.named { "" } else { ", where LRU has half of the possible block hits" },
        points(lru),
        spoken(hits),
        points(best),
        points(ceiling),
    );
    if ceiling - lru > 1e-9 {
        let policy = ((best - lru) / (ceiling - lru)).clamp(0.0, 1.0);
        out += &format!(
            " Of the hits that LRU loses there, {} are lost to its policy and {} to the capacity.",
            percent(policy),
            percent(1.0 - policy),
        );
    }
    out
}

fn by_capacity(hits: &Hits) -> Card {
    let sentence = answer(hits);
    let mut pictures = vec![curve(hits, hits.weight(), &sentence)];
    if hits.weight() == Weight::Tokens {
        pictures.push(curve(hits, Weight::Blocks, "The same, weighted by blocks"));
    }
    let mut head = vec!["blocks".to_owned(), "of distinct".to_owned()];
    let weights: &[Weight] = match hits.weight() {
        Weight::Tokens => &[Weight::Tokens, Weight::Blocks],
        Weight::Blocks => &[Weight::Blocks],
    };
    for weight in weights {
        let unit = if *weight == Weight::Tokens { "tokens" } else { "blocks" };
        head.extend(hits.policies.iter().map(|(policy, _)| format!("{}, {unit}", hits.style(*policy).0)));
    }
    let capacities = hits.policies.first().map_or(&[][..], |(_, sizes)| sizes);
    let rows = capacities.iter().enumerate().map(|(place, (capacity, _))| {
        let share = f64::from(*capacity) / f64::from(hits.about.distinct.max(1));
        let mut row = vec![capacity.to_string(), percent(share)];
        for weight in weights {
            let at = |sizes: &[(u32, Outcome)]| sizes.get(place).map_or(0.0, |(_, o)| weight.share(o));
            row.extend(hits.policies.iter().map(|(_, sizes)| points(at(sizes))));
        }
        row
    });
    let table = Table { head, rows: rows.collect() };
    Card {
        name: "Hits by capacity".to_owned(),
        sentence,
        pictures,
        table,
        wide: hits.weight() == Weight::Tokens,
    }
}

/// A line for each policy; LRU's has many more capacities.
fn curve(hits: &Hits, weight: Weight, sentence: &str) -> String {
    let through = |sizes: &[(u32, Outcome)]| -> Vec<(f64, f64)> {
        let held = sizes.iter().filter(|(capacity, _)| *capacity <= hits.about.distinct);
        held.map(|(capacity, o)| (f64::from(*capacity), 100.0 * weight.share(o))).collect()
    };
    let mut lines: Vec<Line> = hits
        .policies
        .iter()
        .map(|(policy, sizes)| {
            let (name, class) = hits.style(*policy);
            let sizes = if *policy == Policy::Lru { &hits.lru } else { sizes };
            Line { name: name.to_owned(), class, points: through(sizes) }
        })
        .collect();
    lines.sort_by_key(|line| !matches!(line.class, "lru" | "optimum"));
    // No cache holds more than all blocks.
    let (least, most) = (
        lines.iter().flat_map(|line| &line.points).map(|point| point.0).fold(f64::MAX, f64::min),
        f64::from(hits.about.distinct.max(1)),
    );
    let plot = Plot::new(HERO, 92.0);
    let round = Scale::factors(least, most, 0.0, 1.0).ticks;
    let x = Scale::exact(Spread::Factors, least, most, &round, plot.left, plot.right);
    let top = lines.iter().flat_map(|line| &line.points).map(|point| point.1).fold(0.0, f64::max);
    let y = match top {
        top if top > 50.0 => {
            Scale::exact(Spread::Even, 0.0, 100.0, &[0.0, 25.0, 50.0, 75.0, 100.0], plot.bottom, plot.top)
        }
        top => Scale::from_zero(top, 4, plot.bottom, plot.top),
    };
    let mut svg = Svg::new(WIDTH, HERO, &format!("Hits by capacity, of the {}", weight.of()), sentence);
    let name = format!("hits, % of the {}", weight.of());
    plot.frame(
        &mut svg,
        &Axis { scale: &x, name: "capacity, blocks (log)", write: thousands },
        &Axis { scale: &y, name: &name, write: short },
    );
    let shown = x.place(f64::from(hits.shown));
    svg.line("rule", (shown, plot.top), (shown, plot.bottom));
    let on_paper = |class: &str| -> Vec<(f64, f64)> {
        let line = lines.iter().find(|line| line.class == class);
        line.map(|l| l.points.iter().map(|(a, b)| (x.place(*a), y.place(*b))).collect()).unwrap_or_default()
    };
    chart::area(&mut svg, "gap", &on_paper("optimum"), &on_paper("lru"));
    chart::lines(&mut svg, &plot, &x, &y, &lines);
    if let Some(best) = lines.iter().find(|line| line.class == "optimum") {
        chart::dots(&mut svg, best.class, &x, &y, &best.points);
    }
    svg.finish()
}

/// The policies at the capacity shown, best first.
fn ranked(hits: &Hits) -> Vec<(Policy, f64)> {
    let mut all: Vec<(Policy, f64)> =
        hits.policies.iter().map(|(policy, _)| (*policy, hits.share(*policy))).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

/// The best policy that can be built.
fn best_rule(hits: &Hits) -> String {
    let (all, lru) = (ranked(hits), hits.share(Policy::Lru));
    let rule = |policy: Policy| !matches!(policy, Policy::Lru | Policy::Belady);
    let best = all.iter().find(|(policy, _)| rule(*policy));
    match best {
        Some((policy, share)) if *share > lru + 1e-9 => format!(
            "Of the policies that do not know the future, {} hits most: {:.1} points more than LRU.",
            policy.name(),
            100.0 * (share - lru),
        ),
        Some((policy, share)) if lru > *share + 1e-9 => format!(
            "Of the policies that do not know the future, LRU hits most; {} comes next, {:.1} points below.",
            policy.name(),
            100.0 * (lru - share),
        ),
        _ => "No other policy that does not know the future hits more than LRU.".to_owned(),
    }
}

/// The policies at the capacity shown, next to a cache that keeps everything.
fn bars(hits: &Hits) -> String {
    let ceiling = hits.ceiling();
    let bars: Vec<Bar> = ranked(hits)
        .iter()
        .map(|(policy, share)| Bar {
            name: hits.style(*policy).0.to_owned(),
            value: 100.0 * share,
            mark: Some(100.0 * ceiling),
            text: points(*share),
            class: hits.style(*policy).1,
        })
        .collect();
    let name = format!("Policies at {}", blocks(hits.shown));
    let mut svg = Svg::new(WIDTH, chart::bars_height(bars.len()), &name, &best_rule(hits));
    let head = format!("hits, of the {}; tick: all is kept", hits.weight().of());
    chart::bars(&mut svg, &bars, &head);
    svg.finish()
}

/// The policies at the capacity shown.
fn by_policy(hits: &Hits) -> Card {
    let name = format!("Policies at {}", blocks(hits.shown));
    let (sentence, pictures) = (best_rule(hits), vec![bars(hits)]);
    Card { name, sentence, pictures, table: Table::default(), wide: false }
}

/// The capacity that LRU needs for shares of the possible hits.
fn needed(hits: &Hits) -> Option<Card> {
    let (first, last) = (hits.needed.first()?, hits.needed.last()?);
    let times = f64::from(last.1) / f64::from(first.1.max(1));
    let sentence = format!(
        "LRU reaches {} of all possible block hits with {}, and {} with {}: {} times as many.",
        percent(first.0),
        blocks(first.1),
        percent(last.0),
        blocks(last.1),
        if times < 10.0 { format!("{times:.1}") } else { thousands(times.round()) },
    );
    let bar = |(share, capacity): &(f64, u32)| Bar {
        name: percent(*share),
        value: f64::from(*capacity),
        mark: None,
        text: blocks(*capacity),
        class: "plain",
    };
    let bars: Vec<Bar> = hits.needed.iter().map(bar).collect();
    let name = "Capacity that hits need".to_owned();
    let mut svg = Svg::new(WIDTH, chart::bars_height(bars.len()), &name, &sentence);
    chart::bars(&mut svg, &bars, "lru · share of the block hits when all is kept");
    let pictures = vec![svg.finish()];
    Some(Card { name, sentence, pictures, table: Table::default(), wide: false })
}

/// The definitions at the end of the page.
pub fn notes(pieces: bool) -> Vec<String> {
    let mut notes: Vec<String> = text::DEFINITIONS.lines().map(str::to_owned).collect();
    let policies = Policy::ALL.iter().map(|policy| text::definition(*policy, pieces));
    notes.extend(policies.map(|line| line.trim_end().to_owned()));
    if pieces {
        notes.push(text::PIECES.replace('\n', " ").trim_end().to_owned());
    }
    notes
}

/// The introduction of the report of request traces.
const REQUESTS: &str = "What a prefix cache of blocks hits by its capacity, and why not more: which hits another \
                        eviction policy could gain, and which only more capacity can. A sentence explains each \
                        picture; the figures are below it.";

/// The page of `forebay replay --html` for request traces.
///
/// # Errors
/// Errors of reading a trace, and of settings that do not fit it.
pub fn page(traces: &[PathBuf], arguments: &RequestArguments, memory: Option<u64>) -> Result<String> {
    let mut sections = Vec::with_capacity(traces.len());
    let mut pieces = false;
    for path in traces {
        let hits = gather(path, arguments, memory)?;
        pieces |= hits.about.format == Format::RagPulse;
        sections.push(section(&hits));
    }
    page::tell_apart(&mut sections, traces);
    Ok(page::document(&sections, REQUESTS, &notes(pieces)))
}
