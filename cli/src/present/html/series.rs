//! Lines of a sweep: one for each setting, over the axis that the settings share.

use std::collections::HashMap;

use super::chart::{self, Axis, Line, Plot, WIDTH};
use super::numbers::short;
use super::scale::Scale;
use super::svg::{Anchor, Svg};

/// Height of a picture.
pub const HEIGHT: f64 = 290.0;

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
pub fn thousands(value: f64) -> String {
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
        svg.text("note", Anchor::End, (right - 6.0, y.place(value) - 5.0), name);
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
