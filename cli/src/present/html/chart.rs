//! The kinds of pictures: lines, columns, bars, heat maps, each drawn from plain numbers.
//!
//! All are [`WIDTH`] units wide, so that the texts of all pictures of a page have the same size and are legible on a
//! phone. Lines have their names at their ends. A heat map is one path for each shade, for any number of cells.

use std::fmt::Write;

use super::scale::{Scale, Spread, apart};
use super::svg::{Anchor, Point, Svg, at, through};

/// Width of a picture in units.
pub const WIDTH: f64 = 460.0;

/// Distance between two lines of text.
pub const LINE: f64 = 15.0;

/// Shades of a heat map, classes `q0` to `q9`.
const SHADES: usize = 10;

/// The first shade on which light digits are easier to read in light mode, and dark digits in dark mode.
pub const STRONG: usize = 6;

/// The area of the data.
#[derive(Clone, Copy)]
pub struct Plot {
    /// Its left edge; the labels of the vertical axis are left of it.
    pub left: f64,
    /// Its right edge.
    pub right: f64,
    /// Its upper edge.
    pub top: f64,
    /// Its lower edge; the labels of the horizontal axis are below.
    pub bottom: f64,
}

/// An axis and its labels.
pub struct Axis<'a> {
    /// The positions of values.
    pub scale: &'a Scale,
    /// Its name, with the unit.
    pub name: &'a str,
    /// A value as text.
    pub write: fn(f64) -> String,
}

impl Plot {
    /// The plot of a picture `height` units high that keeps `right` units free for labels.
    pub fn new(height: f64, right: f64) -> Plot {
        Plot { left: 42.0, right: WIDTH - right, top: 26.0, bottom: height - 38.0 }
    }

    /// Grid, ticks and names of both axes.
    pub fn frame(&self, svg: &mut Svg, x: &Axis<'_>, y: &Axis<'_>) {
        for tick in &y.scale.ticks {
            let place = y.scale.place(*tick);
            svg.line("grid", (self.left, place), (self.right, place));
            svg.text("", Anchor::End, (self.left - 6.0, place + 4.0), &(y.write)(*tick));
        }
        svg.text("axis", Anchor::Start, (0.0, 12.0), y.name);
        svg.line("base", (self.left, self.bottom), (self.right, self.bottom));
        let mut free = f64::MIN;
        for tick in &x.scale.ticks {
            let place = x.scale.place(*tick);
            let text = (x.write)(*tick);
            let half = width(&text) / 2.0;
            svg.line("base", (place, self.bottom), (place, self.bottom + 4.0));
            // A tick without room keeps its mark and loses its number.
            if place - half > free {
                svg.text("", Anchor::Middle, (place, self.bottom + 17.0), &text);
                free = place + half + 4.0;
            }
        }
        svg.text("axis", Anchor::End, (self.right, self.bottom + 34.0), x.name);
    }
}

/// The approximate width of a text.
fn width(text: &str) -> f64 {
    text.chars().count() as f64 * 9.6
}

/// A line and its name.
pub struct Line {
    /// Its name, at its end and in its colour.
    pub name: String,
    /// Its colour: a class of the style sheet.
    pub class: &'static str,
    /// Its points, ascending in x; a single point has a name and no line.
    pub points: Vec<(f64, f64)>,
}

/// Draws lines, with their names right of the plot, moved apart if they would touch. The first line is on top.
pub fn lines(svg: &mut Svg, plot: &Plot, x: &Scale, y: &Scale, lines: &[Line]) {
    let placed: Vec<Vec<Point>> = lines
        .iter()
        .map(|line| line.points.iter().map(|(a, b)| (x.place(*a), y.place(*b))).collect())
        .collect();
    for (line, points) in lines.iter().zip(&placed).rev() {
        svg.polyline(&format!("line {}", line.class), points, &line.name);
    }
    let named: Vec<_> = lines
        .iter()
        .zip(&placed)
        .filter(|(line, _)| !line.name.is_empty())
        .filter_map(|(line, points)| Some((line, *points.last()?)))
        .collect();
    let ends: Vec<f64> = named.iter().map(|(_, end)| end.1).collect();
    let moved = apart(&ends, LINE, plot.top, plot.bottom);
    for ((line, end), label) in named.iter().zip(moved) {
        let room = plot.right + 14.0;
        if (label - end.1).abs() > 2.0 || plot.right - end.0 > 2.0 {
            let bend = [(end.0 + 2.0, end.1), (plot.right + 2.0, end.1), (room - 2.0, label)];
            svg.polyline("leader", &bend, "");
            svg.dot(&format!("fill {}", line.class), *end, 2.5, "");
        }
        svg.text(&format!("name {}", line.class), Anchor::Start, (room, label + 4.0), &line.name);
    }
}

/// Values at equal distances, each as a column from the base, with a hint. `marked` is highlighted.
pub fn columns(svg: &mut Svg, plot: &Plot, y: &Scale, values: &[(f64, String)], marked: Option<usize>) {
    let step = (plot.right - plot.left) / values.len().max(1) as f64;
    let gap = (step * 0.22).min(4.0);
    for (i, (value, hint)) in values.iter().enumerate() {
        let (left, top) = (plot.left + step * i as f64 + gap / 2.0, y.place(*value));
        let class = if marked == Some(i) { "bar mark" } else { "bar" };
        svg.rect(class, (left, top), step - gap, plot.bottom - top, hint);
        if values.len() <= 128 {
            // The whole height responds to a pointer, also above a low column.
            svg.rect("touch", (left, plot.top), step - gap, plot.bottom - plot.top, hint);
        }
    }
}

/// Names below `count` places at equal distances, as many as have room.
pub fn names_below(svg: &mut Svg, plot: &Plot, names: &[u32], axis: &str) {
    let step = (plot.right - plot.left) / names.len().max(1) as f64;
    let longest = names.iter().map(|name| width(&name.to_string())).fold(0.0, f64::max);
    let every = every_with_room(names.len(), step, longest + 6.0);
    for (i, name) in names.iter().enumerate().step_by(every) {
        let place = plot.left + step * (i as f64 + 0.5);
        svg.text("", Anchor::Middle, (place, plot.bottom + 17.0), &name.to_string());
    }
    svg.text("axis", Anchor::End, (plot.right, plot.bottom + 34.0), axis);
}

/// Of `count` places `step` apart, every how many have room for a label of width `room`.
fn every_with_room(count: usize, step: f64, room: f64) -> usize {
    let fits = |every: &usize| *every as f64 * step >= room;
    let round = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
    round.into_iter().find(fits).unwrap_or(count.max(1))
}

/// One bar of a list.
pub struct Bar {
    /// The text before it.
    pub name: String,
    /// Its length.
    pub value: f64,
    /// A mark across it, if any.
    pub mark: Option<f64>,
    /// The text after it.
    pub text: String,
    /// Its colour.
    pub class: &'static str,
}

/// Height of a list of bars.
pub fn bars_height(count: usize) -> f64 {
    26.0 + 26.0 * count as f64
}

/// A list of bars, each with its name before it and its text after it, below `head`.
pub fn bars(svg: &mut Svg, bars: &[Bar], head: &str) {
    let left = bars.iter().map(|bar| width(&bar.name)).fold(0.0, f64::max) + 8.0;
    let right = bars.iter().map(|bar| width(&bar.text)).fold(0.0, f64::max) + 10.0;
    let most = bars.iter().map(|bar| bar.value.max(bar.mark.unwrap_or(0.0))).fold(0.0, f64::max);
    let scale = Scale::exact(Spread::Even, 0.0, most, &[], left, WIDTH - right);
    svg.text("axis", Anchor::Start, (0.0, 12.0), head);
    for (i, bar) in bars.iter().enumerate() {
        let top = 24.0 + 26.0 * i as f64;
        svg.text(&format!("name {}", bar.class), Anchor::End, (left - 8.0, top + 14.0), &bar.name);
        let end = if bar.value > 0.0 { scale.place(bar.value) } else { left };
        svg.rect(&format!("fill {}", bar.class), (left, top + 1.0), end - left, 17.0, "");
        if let Some(mark) = bar.mark {
            let place = scale.place(mark);
            svg.line("tick", (place, top - 2.0), (place, top + 21.0));
        }
        let end = end.max(bar.mark.map_or(left, |mark| scale.place(mark)));
        svg.text("", Anchor::Start, (end + 7.0, top + 14.0), &bar.text);
    }
}

/// A list of ranges on a logarithmic axis, each from a bar's mark to its value, with its name before and its text
/// after it, below `head`. A value of 0 is drawn at the beginning of the axis.
pub fn ranges(svg: &mut Svg, bars: &[Bar], head: &str) {
    let left = bars.iter().map(|bar| width(&bar.name)).fold(0.0, f64::max) + 8.0;
    let right = bars.iter().map(|bar| width(&bar.text)).fold(0.0, f64::max) + 10.0;
    let values =
        || bars.iter().flat_map(|bar| [Some(bar.value), bar.mark]).flatten().filter(|value| *value > 0.0);
    let (least, most) = (values().fold(f64::MAX, f64::min), values().fold(0.0, f64::max));
    let scale = Scale::exact(Spread::Factors, least, most, &[], left + 6.0, WIDTH - right);
    svg.text("axis", Anchor::Start, (0.0, 12.0), head);
    for (i, bar) in bars.iter().enumerate() {
        let middle = 34.0 + 26.0 * i as f64;
        svg.text(&format!("name {}", bar.class), Anchor::End, (left - 8.0, middle + 4.5), &bar.name);
        let at = |value: f64| if value > 0.0 { scale.place(value) } else { left };
        let (value, mark) = (at(bar.value), at(bar.mark.unwrap_or(bar.value)));
        let (from, to) = (value.min(mark), value.max(mark));
        svg.rect(&format!("fill {}", bar.class), (from, middle - 2.5), to - from, 5.0, "");
        svg.dot("fill optimum", (mark, middle), 4.5, "");
        svg.dot("fill lru", (value, middle), 5.5, "");
        svg.text("", Anchor::Start, (to + 11.0, middle + 4.5), &bar.text);
    }
}

/// Dots at the computed points of a line.
pub fn dots(svg: &mut Svg, class: &str, x: &Scale, y: &Scale, points: &[(f64, f64)]) {
    for (a, b) in points {
        svg.dot(&format!("fill {class}"), (x.place(*a), y.place(*b)), 2.6, "");
    }
}

/// Values in rows and columns; a cell without a number stays empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grid {
    /// Values of a row.
    pub columns: usize,
    /// Row by row.
    pub values: Vec<f64>,
}

impl Grid {
    /// The rows.
    pub fn rows(&self) -> std::slice::Chunks<'_, f64> {
        self.values.chunks(self.columns.max(1))
    }

    /// The least and the greatest number; none if there are no numbers.
    pub fn range(&self) -> Option<(f64, f64)> {
        let numbers = self.values.iter().copied().filter(|value| value.is_finite());
        numbers.fold(None, |range, value| match range {
            None => Some((value, value)),
            Some((least, most)) => Some((value.min(least), value.max(most))),
        })
    }
}

/// The grid as cells that fill the plot, from `least` (pale) to `most` (strong).
pub fn heat(svg: &mut Svg, plot: &Plot, grid: &Grid, least: f64, most: f64) {
    let mut shades = vec![String::new(); SHADES];
    let rows = grid.rows().len().max(1) as f64;
    let (wide, high) =
        ((plot.right - plot.left) / grid.columns.max(1) as f64, (plot.bottom - plot.top) / rows);
    for (r, row) in grid.rows().enumerate() {
        let (top, bottom) = (plot.top + high * r as f64, plot.top + high * (r + 1) as f64);
        let mut c = 0;
        while let Some(shade) = row.get(c).map(|value| shade(*value, least, most)) {
            let first = c;
            while row.get(c).is_some_and(|value| self::shade(*value, least, most) == shade) {
                c += 1;
            }
            let (left, right) = (plot.left + wide * first as f64, plot.left + wide * c as f64);
            if let Some(path) = shade.and_then(|shade| shades.get_mut(shade)) {
                // Both cells at an edge use the same rounded number.
                let _ = write!(path, "M{} {}H{}V{}H{}z", at(left), at(top), at(right), at(bottom), at(left));
            }
        }
    }
    for (i, path) in shades.iter().enumerate() {
        svg.path(&format!("q{i}"), path, "");
    }
}

/// The shade of a value; none if it is not a number.
fn shade(value: f64, least: f64, most: f64) -> Option<usize> {
    let share = (value - least) / (most - least);
    value
        .is_finite()
        .then(|| if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 })
        .map(|share| ((share * SHADES as f64) as usize).min(SHADES - 1))
}

/// The scale of shades with the values at its ends, above the plot at the right.
pub fn key(svg: &mut Svg, plot: &Plot, least: &str, most: &str) {
    let (wide, top) = (11.0, 3.0);
    let right = plot.right - width(most) - 17.0;
    let left = right - wide * SHADES as f64;
    svg.text("", Anchor::End, (left - 5.0, 12.0), least);
    for i in 0..SHADES {
        svg.rect(&format!("q{i}"), (left + wide * i as f64, top), wide, 10.0, "");
    }
    svg.text("", Anchor::Start, (right + 5.0, 12.0), most);
}

/// Names left of the rows of a heat map, as many as have room, and a hint for each row.
pub fn rows(svg: &mut Svg, plot: &Plot, names: &[u32], hints: &[String]) {
    let step = (plot.bottom - plot.top) / names.len().max(1) as f64;
    let every = every_with_room(names.len(), step, LINE);
    for (i, name) in names.iter().enumerate() {
        let top = plot.top + step * i as f64;
        if i % every == 0 {
            svg.text("", Anchor::End, (plot.left - 6.0, top + step / 2.0 + 4.5), &name.to_string());
        }
        if let Some(hint) = hints.get(i) {
            svg.rect("touch", (plot.left, top), plot.right - plot.left, step, hint);
        }
    }
}

/// Texts right of the rows of a heat map, as many as have room, below a heading.
pub fn row_ends(svg: &mut Svg, plot: &Plot, name: &str, texts: &[String]) {
    let step = (plot.bottom - plot.top) / texts.len().max(1) as f64;
    let every = every_with_room(texts.len(), step, LINE);
    svg.text("axis", Anchor::Start, (plot.right + 6.0, 12.0), name);
    for (i, text) in texts.iter().enumerate().step_by(every) {
        svg.text("", Anchor::Start, (plot.right + 6.0, plot.top + step * (i as f64 + 0.5) + 4.5), text);
    }
}

/// The numbers themselves, in the cells of a heat map.
pub fn numbers(svg: &mut Svg, plot: &Plot, grid: &Grid, least: f64, most: f64, write: fn(f64) -> String) {
    let (wide, high) = (
        (plot.right - plot.left) / grid.columns.max(1) as f64,
        (plot.bottom - plot.top) / grid.rows().len().max(1) as f64,
    );
    for (r, row) in grid.rows().enumerate() {
        for (c, value) in row.iter().enumerate() {
            let Some(shade) = shade(*value, least, most) else { continue };
            let class = if shade < STRONG { "on0" } else { "on9" };
            let middle = (plot.left + wide * (c as f64 + 0.5), plot.top + high * (r as f64 + 0.5) + 4.5);
            svg.text(class, Anchor::Middle, middle, &write(*value));
        }
    }
}

/// The side of a square heat map of `count` rows.
pub fn square(count: usize) -> f64 {
    (60.0 * count as f64).min(400.0)
}

/// An area between two lines that share their x.
pub fn area(svg: &mut Svg, class: &str, upper: &[Point], lower: &[Point]) {
    let around: Vec<Point> = upper.iter().chain(lower.iter().rev()).copied().collect();
    if upper.len() > 1 {
        svg.path(class, &(through(&around) + "z"), "");
    }
}

/// The height of a heat map's rows: low enough for many, not too high for few.
pub fn rows_height(rows: usize) -> f64 {
    let rows = rows.max(1) as f64;
    rows * (300.0 / rows).clamp(3.0, 26.0)
}

/// Height of the pictures by size.
pub const HERO: f64 = 290.0;
