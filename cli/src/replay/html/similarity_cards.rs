//! The pictures of the overlap of selections, within a layer and between layers.

use super::figures::Figures;
use super::similarity::{self, Within};
use crate::present::html::chart::{self, Axis, Grid, Plot, WIDTH};
use crate::present::html::numbers::{mean, percent};
use crate::present::html::page::{Card, Table};
use crate::present::html::scale::{Scale, Spread};
use crate::present::html::svg::{Anchor, Svg};

/// Cells at least this high and wide have room for their number.
const ROOM: f64 = 32.0;

/// The model's numbers of the layers shown.
fn ids(figures: &Figures) -> Vec<u32> {
    let id = |place: &u32| figures.header.layer_ids.get(*place as usize).copied().unwrap_or(*place);
    figures.shown.iter().map(id).collect()
}

/// Indices of the least and the greatest value.
fn extremes(values: &[f64]) -> (usize, usize) {
    let numbers = || values.iter().enumerate().filter(|(_, value)| value.is_finite());
    let place = |found: Option<(usize, &f64)>| found.map_or(0, |(place, _)| place);
    let by_value = |a: &(usize, &f64), b: &(usize, &f64)| a.1.total_cmp(b.1);
    (place(numbers().min_by(by_value)), place(numbers().max_by(by_value)))
}

/// A range extended to tenths, as the ends of its shades.
fn ends(range: Option<(f64, f64)>) -> (f64, f64) {
    let (least, most) = range.unwrap_or((0.0, 1.0));
    let (low, high) = ((least * 10.0 + 1e-9).floor() / 10.0, (most * 10.0 - 1e-9).ceil() / 10.0);
    if high > low { (low, high) } else { (low, low + 0.1) }
}

/// A note if not all recorded layers are shown.
fn picked(figures: &Figures) -> String {
    match figures.shown.get(..2) {
        Some([a, b]) if b - a > 1 => {
            format!(
                " The picture shows one of every {} of the {} recorded layers.",
                b - a,
                figures.header.layers
            )
        }
        _ => String::new(),
    }
}

/// When the overlap with the previous position was least and most; none if it does not change.
fn over_time(grid: &Grid, steps: u32) -> String {
    let columns = grid.columns.max(1);
    // A stretch without a number is skipped: the first position of a trace without prompt has no predecessor.
    let stretch = |c: usize| {
        let numbers = || grid.rows().filter_map(|row| row.get(c).copied().filter(|value| value.is_finite()));
        numbers().next().map_or(f64::NAN, |_| mean(numbers()))
    };
    let stretches: Vec<f64> = (0..columns).map(stretch).collect();
    let (low, high) = extremes(&stretches);
    // The first position of a stretch: those of a step are counted from 1.
    let first = |c: usize| (c as u64 * u64::from(steps)).div_ceil(columns as u64) + 1;
    let positions = |c: usize| match (first(c), first(c + 1) - 1) {
        (one, last) if one == last => format!("at decode position {one}"),
        (one, last) => format!("at decode positions {one} to {last}"),
    };
    let at = |place: usize| stretches.get(place).copied().unwrap_or(0.0);
    if percent(at(low)) == percent(at(high)) {
        return String::new();
    }
    format!(
        " Over time, least: {}, {}; most: {}, {}.",
        percent(at(low)),
        positions(low),
        percent(at(high)),
        positions(high),
    )
}

/// A layer's overlap with its own selection one position earlier, over time. None if no position has a
/// predecessor.
pub fn within(figures: &Figures) -> Option<Card> {
    let Within { grid, means } = figures.within.as_ref()?;
    let ids = ids(figures);
    let (least, most) = extremes(means);
    let at = |values: &[f64], place: usize| values.get(place).copied().unwrap_or(0.0);
    let id = |place: usize| ids.get(place).copied().unwrap_or(0);
    let mut sentence = format!(
        "Of the rows that a layer selects, it also selected {} one position earlier",
        percent(mean(means.iter().copied()))
    );
    sentence += &match means.len() {
        0 | 1 => ".".to_owned(),
        _ if percent(at(means, least)) == percent(at(means, most)) => ", the same in all layers.".to_owned(),
        _ => format!(
            " (mean of the layers); layer {} least, {}, layer {} most, {}.",
            id(least),
            percent(at(means, least)),
            id(most),
            percent(at(means, most)),
        ),
    };
    sentence += &over_time(grid, figures.header.decode_steps());
    sentence += &picked(figures);
    let steps = figures.header.decode_steps();
    let (from, to) = ends(grid.range());
    let height = 26.0 + chart::rows_height(ids.len()) + 38.0;
    let plot = Plot::new(height, 52.0);
    let name = "Similarity within a layer, over time".to_owned();
    let mut svg = Svg::new(WIDTH, height, &name, &sentence);
    let round = Scale::from_zero(f64::from(steps), 4, 0.0, 1.0).ticks;
    let x = Scale::exact(Spread::Even, 0.0, f64::from(steps), &round, plot.left, plot.right);
    let nothing = Scale::exact(Spread::Even, 0.0, 1.0, &[], plot.bottom, plot.top);
    plot.frame(
        &mut svg,
        &Axis { scale: &x, name: "decode position", write: |value| format!("{value}") },
        &Axis { scale: &nothing, name: "layer", write: |value| format!("{value}") },
    );
    chart::heat(&mut svg, &plot, grid, from, to);
    chart::key(&mut svg, &plot, &percent(from), &percent(to));
    let hint = |(id, mean): (&u32, &f64)| format!("layer {id}: {} on average", percent(*mean));
    chart::rows(&mut svg, &plot, &ids, &ids.iter().zip(means).map(hint).collect::<Vec<_>>());
    let shares: Vec<String> = means.iter().map(|mean| percent(*mean)).collect();
    chart::row_ends(&mut svg, &plot, "mean", &shares);
    let rows = ids.iter().zip(&shares).map(|(id, share)| vec![id.to_string(), share.clone()]);
    let head = ["layer", "also selected one position earlier"].map(str::to_owned).to_vec();
    Some(Card {
        name,
        sentence,
        pictures: vec![svg.finish()],
        table: Table { head, rows: rows.collect() },
        wide: false,
    })
}

/// The overlap of layers at the same position; none for a single layer.
pub fn between(figures: &Figures) -> Option<Card> {
    let (grid, ids) = (&figures.between, ids(figures));
    let count = ids.len();
    let (from, to) = ends(Some(grid.range()?));
    let cell = |a: usize, b: usize| grid.values.get(a * count + b).copied().unwrap_or(0.0);
    let id = |place: usize| ids.get(place).copied().unwrap_or(0);
    let neighbours: Vec<f64> = (1..count).map(|b| cell(b - 1, b)).collect();
    let (least, most) = extremes(&grid.values);
    let pair = |place: usize| ((place / count).min(place % count), (place / count).max(place % count));
    let (least, most) = (pair(least), pair(most));
    let gap = ids.iter().zip(ids.iter().skip(1)).map(|(a, b)| b.saturating_sub(*a)).min().unwrap_or(1);
    let apart = match picked(figures).as_str() {
        _ if gap == 1 => "Neighbouring layers".to_owned(),
        "" => format!("Adjacent recorded layers (at least {gap} apart)"),
        _ => format!("Adjacent layers shown here (at least {gap} apart)"),
    };
    let mut sentence =
        format!("{apart} have {} of their selections in common.", percent(mean(neighbours.iter().copied())));
    if count > 2 && percent(cell(most.0, most.1)) == percent(cell(least.0, least.1)) {
        sentence += " All pairs are equally similar.";
    } else if count > 2 {
        sentence += &format!(
            " The most similar are {} and {} ({}), the least similar {} and {} ({}).",
            id(most.0),
            id(most.1),
            percent(cell(most.0, most.1)),
            id(least.0),
            id(least.1),
            percent(cell(least.0, least.1)),
        );
    }
    let every = similarity::sampled(figures.header.decode_steps());
    if every > 1 {
        sentence += &format!(" Counted at one of every {every} decode positions.");
    }
    sentence += &picked(figures);
    let side = chart::square(count);
    let plot = Plot { left: 42.0, right: 42.0 + side, top: 26.0, bottom: 26.0 + side };
    let height = plot.bottom + 38.0;
    let name = "Similarity between layers".to_owned();
    let mut svg = Svg::new(WIDTH, height, &name, &sentence);
    svg.text("axis", Anchor::Start, (0.0, 12.0), "layer");
    chart::heat(&mut svg, &plot, grid, from, to);
    chart::key(
        &mut svg,
        &Plot { right: WIDTH.min(plot.right.max(260.0)), ..plot },
        &percent(from),
        &percent(to),
    );
    chart::names_below(&mut svg, &plot, &ids, "layer");
    let hint = |a: usize| {
        let (least, most) = extremes(grid.values.get(a * count..(a + 1) * count).unwrap_or_default());
        let (near, far) = (percent(cell(a, most)), percent(cell(a, least)));
        format!("layer {}: most similar to {} ({near}), least to {} ({far})", id(a), id(most), id(least))
    };
    chart::rows(&mut svg, &plot, &ids, &(0..count).map(hint).collect::<Vec<_>>());
    if side / count as f64 >= ROOM {
        chart::numbers(&mut svg, &plot, grid, from, to, percent);
    }
    let pairs = (1..count).map(|b| vec![format!("{} and {}", id(b - 1), id(b)), percent(cell(b - 1, b))]);
    let head = ["layers", "in common"].map(str::to_owned).to_vec();
    Some(Card {
        name,
        sentence,
        pictures: vec![svg.finish()],
        table: Table { head, rows: pairs.collect() },
        wide: false,
    })
}
