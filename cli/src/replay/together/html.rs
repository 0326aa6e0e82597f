//! The report of `--together`: the slots of each sequence over time, and the misses of a step by number of living
//! sequences.

use super::result::{Replayed, Run};
use crate::present::html::chart::{self, Axis, Line, Plot, WIDTH};
use crate::present::html::numbers::{percent, share, short, tile};
use crate::present::html::page::{self, Card, Head, Section, Table};
use crate::present::html::scale::{Scale, Spread};
use crate::present::html::svg::{Point, Svg};
use crate::present::numbers::{counted, number, size};
use crate::replay::result::{RowSize, miss_ratio};

const INTRO: &str = "Several sequences share the slots of each layer. With fixed budgets, slots are unused while few \
                     sequences are alive; shared budgets grow and shrink, so that all slots are in use.";

/// Shades of neighbouring sequences.
const SHADES: [&str; 4] = ["q3", "q5", "q2", "q7"];

/// Lines of the kinds of budgets, the fixed ones first.
const COLOURS: [&str; 4] = ["fifo", "lru", "tokens", "decay"];

/// The page.
pub fn page(replayed: &Replayed, row: &RowSize) -> String {
    let mut cards = vec![alive(replayed)];
    cards.extend(replayed.runs.iter().map(|run| slots(replayed, run)));
    let facts = replayed.sequences.iter().map(|sequence| {
        format!(
            "{}: {} tokens at decode start, steps {} to {}",
            sequence.path.display(),
            sequence.header.decode_start,
            sequence.arrives,
            sequence.arrives + sequence.steps
        )
    });
    let tiles = replayed.runs.iter().map(|run| {
        let moved = run.moved * u64::from(row.bytes);
        let more = format!("{}, {} moved", counted(run.resizes, "resize"), size(moved as f64));
        tile(percent(miss_ratio(run.total())), &format!("missed, {}", run.words()), more)
    });
    let count = counted(replayed.sequences.len() as u32, "sequence");
    let section = Section {
        title: format!("{count}, {} a layer", counted(replayed.slots, "slot")),
        warning: None,
        facts: facts.collect(),
        tiles: tiles.collect(),
        cards,
    };
    let notes = [
        "Fixed: the slots divided by the most sequences alive at a time. The other budgets are shares \
         (docs/policies.md): they are set anew when a sequence arrives, ends or outgrows its own."
            .to_owned(),
        "Miss: a selected row that was fetched from host memory. Misses of a step are those of all layers and \
         sequences together; slots of a sequence are those in one layer, as a mean over the layers. Moved: rows that \
         changed their slot by a resize, times row bytes."
            .to_owned(),
    ];
    let head =
        Head { command: "replay", question: "Fixed or shared budgets?", things: "replays", intro: INTRO };
    page::page(&head, &[section], &notes)
}

/// Misses of a step by number of living sequences.
fn alive(replayed: &Replayed) -> Card {
    let seen = |run: &Run| -> Vec<(usize, f64)> {
        let alive = run.alive.iter().enumerate().filter(|(_, alive)| alive.steps > 0);
        alive.map(|(count, alive)| (count, alive.misses_per_step())).collect()
    };
    let runs: Vec<(&Run, Vec<(usize, f64)>)> = replayed.runs.iter().map(|run| (run, seen(run))).collect();
    let misses = |run: &Run| run.total().misses as f64;
    let fixed = replayed.runs.first().map_or(0.0, misses);
    let best = replayed.runs.iter().skip(1).min_by(|a, b| misses(a).total_cmp(&misses(b)));
    let sentence = best.map_or(String::new(), |best| {
        let fewer = share(fixed - misses(best), fixed);
        let than = if fewer < 0.0 { "more" } else { "fewer" };
        format!("Over all steps, {} miss {} {than} rows than fixed ones.", best.words(), percent(fewer.abs()))
    });
    let name = "Misses of a step by number of living sequences".to_owned();
    let plot = Plot::new(260.0, 90.0);
    let most = runs.iter().flat_map(|(_, seen)| seen.iter().map(|(_, misses)| *misses)).fold(1.0, f64::max);
    let counts: Vec<f64> =
        runs.first().map_or(Vec::new(), |(_, seen)| seen.iter().map(|(n, _)| *n as f64).collect());
    let (first, last) = (counts.first().copied().unwrap_or(0.0), counts.last().copied().unwrap_or(1.0));
    let x = Scale::exact(Spread::Even, first, last.max(first + 1.0), &counts, plot.left, plot.right);
    let y = Scale::from_zero(most, 4, plot.bottom, plot.top);
    let mut svg = Svg::new(WIDTH, 260.0, &name, &sentence);
    plot.frame(
        &mut svg,
        &Axis { scale: &x, name: "sequences alive", write: short },
        &Axis { scale: &y, name: "misses a step", write: short },
    );
    let lines = runs.iter().zip(COLOURS).map(|((run, seen), class)| Line {
        name: run.budgets.to_owned(),
        class,
        points: seen.iter().map(|(count, misses)| (*count as f64, *misses)).collect(),
    });
    chart::lines(&mut svg, &plot, &x, &y, &lines.collect::<Vec<_>>());
    let head = ["sequences", "steps"].into_iter().chain(replayed.runs.iter().map(|run| run.budgets));
    let rows = counts.iter().map(|count| {
        let alive = |run: &Run| run.alive.get(*count as usize).copied().unwrap_or_default();
        let steps = replayed.runs.first().map_or(0, |run| alive(run).steps);
        let misses = replayed.runs.iter().map(|run| number(alive(run).misses_per_step()));
        [count.to_string(), steps.to_string()].into_iter().chain(misses).collect()
    });
    let table = Table { head: head.map(str::to_owned).collect(), rows: rows.collect() };
    Card { name, sentence, pictures: vec![svg.finish()], table, wide: false }
}

/// The slots of each sequence over time, one above the other.
fn slots(replayed: &Replayed, run: &Run) -> Card {
    let steps =
        replayed.sequences.iter().map(|sequence| sequence.arrives + sequence.steps).max().unwrap_or(0);
    let used = |slots: &[u64]| slots.iter().sum::<u64>() as f64;
    let ends = run.slots.iter().skip(1).map(|(step, _)| *step).chain([steps]);
    let filled: f64 = run
        .slots
        .iter()
        .zip(ends.clone())
        .map(|((step, slots), end)| used(slots) * f64::from(end - step))
        .sum();
    let whole = f64::from(replayed.slots) * f64::from(steps);
    let name = format!("Slots over time, {}", run.words());
    let sentence = format!(
        "On average {} of the slots belong to a sequence; budgets change {}.",
        percent(share(filled, whole)),
        counted(run.resizes, "time"),
    );
    let plot = Plot::new(240.0, 8.0);
    let round = Scale::from_zero(f64::from(steps), 5, plot.left, plot.right);
    let x = Scale::exact(Spread::Even, 0.0, f64::from(steps.max(1)), &round.ticks, plot.left, plot.right);
    let y = Scale::from_zero(f64::from(replayed.slots), 4, plot.bottom, plot.top);
    let mut svg = Svg::new(WIDTH, 240.0, &name, &sentence);
    plot.frame(
        &mut svg,
        &Axis { scale: &x, name: "step", write: short },
        &Axis { scale: &y, name: "slots", write: short },
    );
    for (index, shade) in (0..replayed.sequences.len()).zip(SHADES.iter().cycle()) {
        // Slots of the sequences up to `count`, from one change to the next.
        let edge = |count: usize| -> Vec<Point> {
            let level = |slots: &[u64]| y.place(used(slots.get(..count).unwrap_or_default()));
            let stretch = |((step, slots), end): (&(u32, Vec<u64>), u32)| {
                [(x.place(f64::from(*step)), level(slots)), (x.place(f64::from(end)), level(slots))]
            };
            run.slots.iter().zip(ends.clone()).flat_map(stretch).collect()
        };
        chart::area(&mut svg, shade, &edge(index + 1), &edge(index));
    }
    let level = y.place(f64::from(replayed.slots));
    svg.line("rule", (plot.left, level), (plot.right, level));
    let head = std::iter::once("step".to_owned());
    let head = head.chain((1..=replayed.sequences.len()).map(|count| format!("sequence {count}"))).collect();
    let cells = |(step, slots): &(u32, Vec<u64>)| {
        std::iter::once(step.to_string()).chain(slots.iter().map(u64::to_string)).collect()
    };
    let table = Table { head, rows: run.slots.iter().map(cells).collect() };
    Card { name, sentence, pictures: vec![svg.finish()], table, wide: false }
}
