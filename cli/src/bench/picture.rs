//! The figures of `forebay bench` as a picture: row rates next to their ceilings, and for each other figure a bar of
//! the share of its ceiling that it reaches.
//!
//! The picture is a separate file, so it contains the page's style.

use super::result::{Figure, Measured, gb, parameter};
use super::text::{above, ceilings_line, device_line, groups, parameters, percent};
use crate::present::html::numbers::{short, time};
use crate::present::html::scale::{Scale, apart};
use crate::present::html::svg::{Anchor, Point, Svg, document};
use crate::present::numbers::number;

/// Width of the picture in units, and its margin.
const WIDTH: f64 = 1240.0;
const MARGIN: f64 = 28.0;
/// Units between two columns.
const GAP: f64 = 36.0;
/// Height of a chart of rates.
const CHART: f64 = 330.0;
/// Distance between two bars.
const BAR: f64 = 17.0;
/// Distance from a column's top to its first bar, for the heads.
const HEAD: f64 = 24.0;
/// Width of a digit.
const DIGIT: f64 = 6.4;
/// Width of a time and a share after a bar.
const BEHIND: f64 = 104.0;
/// The least length of a full bar.
const SHORT: f64 = 44.0;

/// Parameters that follow from others, or that are the same for the whole run.
const DERIVED: [&str; 2] = ["missed_rows", "pool"];

/// The colours of a chart's lines, in order.
const CLASSES: [&str; 5] = ["lru", "optimum", "tokens", "s3", "fifo"];

/// A line of a chart.
struct Line {
    name: String,
    class: &'static str,
    /// Rows of a call, and GB/s.
    points: Vec<(f64, f64)>,
}

/// The whole file.
pub fn picture(measured: &Measured, style: &str) -> String {
    let Measured { device, facts, ceilings, figures, .. } = measured;
    let all = groups(figures);
    let (charts, bars): (Vec<&[Figure]>, Vec<&[Figure]>) =
        all.into_iter().partition(|figures| is_of_rows(figures));
    let blocks: Vec<Block<'_>> = bars.into_iter().map(Block::new).collect();
    let top = 92.0;
    let charts_height = if charts.is_empty() { 0.0 } else { CHART + 34.0 };
    let height = top + charts_height + blocks.iter().map(Block::height).sum::<f64>() + 34.0;
    let (title, line) = (device_line(device, facts), ceilings_line(ceilings));
    let mut svg = Svg::new(WIDTH, height, &title, &line);
    svg.text("head", Anchor::Start, (MARGIN, 36.0), &title);
    svg.text("axis", Anchor::Start, (MARGIN, 58.0), &format!("Ceilings of this run: {line}"));
    let width = (WIDTH - 2.0 * MARGIN - GAP) / 2.0;
    for (figures, place) in charts.iter().zip(0..) {
        let left = MARGIN + f64::from(place) * (width + GAP);
        chart(&mut svg, figures, left, top, width);
    }
    let mut y = top + charts_height;
    for block in &blocks {
        block.draw(&mut svg, y);
        y += block.height();
    }
    let checked: u64 = figures.iter().map(|figure| figure.checked).sum();
    let foot = format!(
        "A full bar is the ceiling: a launch, and the bytes that must move or be touched, at this machine's speeds{}. \
         Compared with the rule on the host: {checked} slots, rows, reports and digests.",
        if above(figures).is_some() { "; caches and short calls can beat it" } else { "" },
    );
    svg.text("axis", Anchor::Start, (MARGIN, height - 16.0), &foot);
    document(&svg.finish(), style)
}

/// Whether figures differ by the rows of a call, and so become lines.
fn is_of_rows(figures: &[Figure]) -> bool {
    figures.iter().all(|figure| figure.bytes.is_some() && figure.number("rows").is_some())
}

/// The lines of a group: one for each shape of rows, and one for each alternative measured with it.
fn lines(figures: &[Figure]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    let mut add = |name: String, point: (f64, f64)| match lines.iter_mut().find(|line| line.name == name) {
        Some(line) => line.points.push(point),
        None => {
            let class = CLASSES.get(lines.len() % CLASSES.len()).copied().unwrap_or("plain");
            lines.push(Line { name, class, points: vec![point] });
        }
    };
    for figure in figures {
        let (Some(rows), Some(rate)) = (figure.number("rows"), figure.rate()) else { continue };
        let kind = format!("{} B at {}", parameter(figure, "row_bytes"), parameter(figure, "stride"));
        add(kind, (rows, gb(rate)));
    }
    for figure in figures {
        let (Some(rows), Some(bytes)) = (figure.number("rows"), figure.bytes) else { continue };
        for (way, us) in figure.beside.iter().filter(|(way, us)| *way != "copy engine" && *us > 0.0) {
            add((*way).to_owned(), (rows, bytes as f64 / us / 1e3));
        }
    }
    lines
}

/// Rates by the rows of a call, and the ceilings of the longest call.
fn chart(svg: &mut Svg, figures: &[Figure], left: f64, top: f64, width: f64) {
    let lines = lines(figures);
    let longest = figures.iter().max_by(|a, b| a.bytes.cmp(&b.bytes));
    let ceilings: Vec<(&str, f64)> = longest.map_or(Vec::new(), |figure| {
        let speed = |us: f64| figure.bytes.unwrap_or_default() as f64 / us.max(1e-9) / 1e3;
        let beside = figure.beside.iter().filter(|(name, _)| *name == "copy engine");
        [figure.ceiling].iter().chain(beside).map(|(name, us)| (*name, speed(*us))).collect()
    });
    let points = lines.iter().flat_map(|line| line.points.iter().copied());
    let most = points.clone().map(|(_, rate)| rate).chain(ceilings.iter().map(|(_, rate)| *rate));
    let rows = |pick: fn(f64, f64) -> f64, from: f64| points.clone().map(|(rows, _)| rows).fold(from, pick);
    let (from, to, bottom) = (left + 40.0, left + width - 158.0, top + CHART - 40.0);
    let x = Scale::factors(rows(f64::min, f64::MAX), rows(f64::max, 1.0), from, to);
    let y = Scale::from_zero(most.fold(0.0, f64::max), 5, bottom, top + 40.0);

    let group = figures.first().map_or("", |figure| figure.group);
    svg.text("name", Anchor::Start, (left, top + 4.0), &format!("{group}: GB/s of row bytes"));
    for tick in &y.ticks {
        svg.line("grid", (from, y.place(*tick)), (to, y.place(*tick)));
        svg.text("", Anchor::End, (from - 8.0, y.place(*tick) + 4.0), &short(*tick));
    }
    svg.line("base", (from, bottom), (to, bottom));
    for tick in &x.ticks {
        svg.line("base", (x.place(*tick), bottom), (x.place(*tick), bottom + 4.0));
        svg.text("", Anchor::Middle, (x.place(*tick), bottom + 19.0), &thousands(*tick));
    }
    svg.text("axis", Anchor::Middle, ((from + to) / 2.0, bottom + 36.0), "rows of a call");

    let mut labels: Vec<(f64, String, String)> = Vec::new();
    for (name, rate) in &ceilings {
        svg.line("rule", (from, y.place(*rate)), (to, y.place(*rate)));
        labels.push((y.place(*rate), "axis".to_owned(), format!("{name} {}", number(*rate))));
    }
    for line in &lines {
        let places: Vec<Point> =
            line.points.iter().map(|(rows, rate)| (x.place(*rows), y.place(*rate))).collect();
        svg.polyline(&format!("line {}", line.class), &places, &line.name);
        for ((rows, rate), place) in line.points.iter().zip(&places) {
            let hint = format!("{}: {} rows, {} GB/s", line.name, short(*rows), number(*rate));
            svg.dot(&format!("fill {}", line.class), *place, 2.6, &hint);
        }
        if let (Some(last), Some((_, rate))) = (places.last(), line.points.last()) {
            let label = format!("{} {}", line.name, number(*rate));
            labels.push((last.1, format!("name {}", line.class), label));
        }
    }
    let wanted: Vec<f64> = labels.iter().map(|(place, _, _)| *place).collect();
    for ((place, class, text), moved) in labels.iter().zip(apart(&wanted, 16.0, top + 34.0, bottom)) {
        svg.line("leader", (to + 2.0, *place), (to + 12.0, moved));
        svg.text(class, Anchor::Start, (to + 16.0, moved + 4.0), text);
    }
}

/// A count, in thousands from 1000 on.
fn thousands(count: f64) -> String {
    if count >= 1000.0 { format!("{}K", short(count / 1000.0)) } else { short(count) }
}

/// A group as bars, in as many columns as fit next to its parameters.
struct Block<'a> {
    figures: &'a [Figure],
    /// The parameters in which the figures differ, each with the width it takes.
    differ: Vec<(&'static str, f64)>,
    /// The parameters that they share.
    shared: String,
    /// Width of the figures' names; 0 if all have the group's.
    names: f64,
    columns: usize,
}

impl<'a> Block<'a> {
    fn new(figures: &'a [Figure]) -> Block<'a> {
        let values = |name: &'static str| figures.iter().map(move |figure| parameter(figure, name));
        let is_shared = |name: &&'static str| {
            let mut all = values(name);
            let first = all.next();
            figures.len() > 1 && all.all(|value| Some(value) == first)
        };
        let (shared, differ): (Vec<&'static str>, Vec<&'static str>) =
            parameters(figures).into_iter().filter(|name| !DERIVED.contains(name)).partition(is_shared);
        let units = |text: &str| DIGIT * text.chars().count() as f64;
        let differ: Vec<(&'static str, f64)> = differ
            .into_iter()
            .map(|name| (name, values(name).map(|value| units(&value)).fold(units(name), f64::max) + 10.0))
            .collect();
        let of_shared = |name: &&'static str| {
            let value = figures.first().map(|figure| parameter(figure, name)).unwrap_or_default();
            format!("{} {value}", name.replace('_', " "))
        };
        let shared = shared.iter().map(of_shared).collect::<Vec<_>>().join(", ");
        let named = figures.array_windows().any(|[a, b]| a.name != b.name);
        let names = if named {
            figures.iter().map(|figure| units(&figure.name)).fold(0.0, f64::max) + 12.0
        } else {
            0.0
        };
        let taken = names + differ.iter().map(|(_, units)| units).sum::<f64>() + BEHIND + SHORT;
        let fit = ((WIDTH - 2.0 * MARGIN + GAP) / (taken + GAP)).floor().clamp(1.0, 3.0) as usize;
        Block { figures, differ, shared, names, columns: fit.min(figures.len().div_ceil(4)).max(1) }
    }

    fn rows(&self) -> usize {
        self.figures.len().div_ceil(self.columns)
    }

    fn height(&self) -> f64 {
        36.0 + HEAD + BAR * self.rows() as f64 + 26.0
    }

    fn draw(&self, svg: &mut Svg, top: f64) {
        let Some(first) = self.figures.first() else { return };
        let one = self.figures.iter().all(|figure| figure.ceiling.0 == first.ceiling.0);
        let ceiling =
            if one { format!("the ceiling ({})", first.ceiling.0) } else { "its ceiling".to_owned() };
        let title = format!("{}: share of {ceiling}", first.group);
        svg.text("name", Anchor::Start, (MARGIN, top + 14.0), &title);
        let after = MARGIN + 8.0 * title.chars().count() as f64;
        svg.text("axis", Anchor::Start, (after, top + 14.0), &self.shared);
        // A single column is no wider than one of two, so that its bars can be compared with those.
        let columns = self.columns.max(2) as f64;
        let width = (WIDTH - 2.0 * MARGIN - GAP * (columns - 1.0)) / columns;
        for (column, figures) in self.figures.chunks(self.rows().max(1)).enumerate() {
            let left = MARGIN + column as f64 * (width + GAP);
            self.column(svg, figures, left, top + 36.0, width);
        }
    }

    fn column(&self, svg: &mut Svg, figures: &[Figure], left: f64, top: f64, width: f64) {
        let bar = left + self.names + self.differ.iter().map(|(_, units)| units).sum::<f64>() + 8.0;
        let full = left + width - BEHIND - bar;
        let mut x = left + self.names;
        for (name, units) in &self.differ {
            x += units;
            svg.text("axis", Anchor::End, (x - 4.0, top + 8.0), &name.replace('_', " "));
        }
        let mut before: Vec<String> = Vec::new();
        for (figure, place) in figures.iter().zip(0..) {
            let y = top + HEAD + BAR * f64::from(place);
            if self.names > 0.0 {
                svg.text("", Anchor::Start, (left, y), &figure.name);
            }
            let mut x = left + self.names;
            let values: Vec<String> = self.differ.iter().map(|(name, _)| parameter(figure, name)).collect();
            for (i, ((_, units), value)) in self.differ.iter().zip(&values).enumerate() {
                x += units;
                // A value equal to that of the bar above is pale.
                let class = if before.get(i) == Some(value) { "note" } else { "" };
                svg.text(class, Anchor::End, (x - 4.0, y), value);
            }
            before = values;
            let share = figure.fraction();
            let hint = format!("{} of {}", percent(share), figure.ceiling.0);
            svg.rect("track", (bar, y - 10.0), full, 12.0, "");
            svg.rect("bar", (bar, y - 10.0), full * share.clamp(0.0, 1.0), 12.0, &hint);
            let end = left + width - BEHIND + 40.0;
            svg.text("", Anchor::End, (end, y), &percent(share));
            let mark = match figure.target {
                Some(target) if target.met => "name tokens",
                Some(_) => "name cold",
                None => "",
            };
            svg.text(mark, Anchor::End, (left + width, y), &time(figure.us / 1e6));
        }
    }
}
