//! A simulated step as a picture: a lane for each stream, the whole step above, some layers of it enlarged below.
//!
//! A separate file contains the page's style; on a page the picture has no captions. Works that are narrower than a
//! line are drawn anyway, so that a short work does not look like a missing one.

use std::ops::RangeInclusive;

use forebay::device::clock::Span;
use forebay::predict::simulate::PULLS;

use super::lanes::Lane;
use crate::present::html::numbers::{short, time};
use crate::present::html::scale::{Scale, Spread};
use crate::present::html::svg::{Anchor, Svg, document};

/// Width of the picture in units.
const WIDTH: f64 = 1200.0;
/// Width of the lanes' names at the left.
const LEFT: f64 = 176.0;
const RIGHT: f64 = WIDTH - 24.0;
/// Distance between lanes in the overview, and in the enlarged part.
const THIN: f64 = 20.0;
const THICK: f64 = 44.0;

/// The captions of the picture, and the layers that are enlarged.
pub struct Caption<'a> {
    /// What was simulated.
    pub title: &'a str,
    /// The result.
    pub line: &'a str,
    /// The source of the figures.
    pub source: &'a str,
    /// What the upper part shows: the whole of it.
    pub whole: &'a str,
    /// The enlarged layers.
    pub layers: RangeInclusive<u32>,
}

/// Whether a span is a pull of sharded weights.
fn is_pull(span: &Span) -> bool {
    PULLS.contains(&span.name)
}

/// A work's name, without the buffer that its lane names.
fn work(span: &Span) -> &'static str {
    if is_pull(span) { "pull" } else { span.name }
}

/// The words on a work. A pull is of a later layer than the works above it, so they name its layer.
fn words(span: &Span) -> String {
    match span.layer.filter(|_| is_pull(span)) {
        Some(layer) => format!("layer {}", layer.0),
        None => span.name.to_owned(),
    }
}

/// A work's colour: a class of the style sheet.
fn class(name: &str) -> &'static str {
    match name {
        "pull" => "pull",
        "gather" => "optimum",
        "resolve" | "digest" => "tokens",
        "scatter" | "store" => "warmed",
        "traffic up" | "traffic down" | "link" => "traffic",
        "index" => "s3",
        "attend" | "attend resident" | "compute" => "lru",
        "attend fetched" => "cold",
        "merge" => "decay",
        "project" | "output" => "project",
        "prepare" => "fifo",
        _ => "plain",
    }
}

/// The period of the layers, in nanoseconds. Their pulls begin up to two layers before.
fn stretch(lanes: &[Lane], layers: &RangeInclusive<u32>) -> (f64, f64) {
    let spans = lanes.iter().flat_map(|lane| &lane.spans).filter(|span| !is_pull(span));
    let spans = spans.filter(|span| span.layer.is_some_and(|layer| layers.contains(&layer.0)));
    let spans = spans.filter(|span| span.end_ns > span.start_ns);
    let (from, to) =
        spans.fold((f64::MAX, f64::MIN), |(from, to), span| (from.min(span.start_ns), to.max(span.end_ns)));
    if to > from { (from, to) } else { (0.0, end(lanes)) }
}

fn end(lanes: &[Lane]) -> f64 {
    lanes.iter().flat_map(|lane| &lane.spans).map(|span| span.end_ns).fold(0.0, f64::max)
}

/// The whole file.
pub fn picture(lanes: &[Lane], caption: &Caption<'_>, style: &str) -> String {
    document(&drawing(lanes, caption, CAPTIONS), style)
}

/// The picture for a page, which has captions of its own.
pub fn inline(lanes: &[Lane], caption: &Caption<'_>) -> String {
    drawing(lanes, caption, 0.0)
}

/// Height of the captions.
const CAPTIONS: f64 = 90.0;

fn drawing(lanes: &[Lane], caption: &Caption<'_>, captions: f64) -> String {
    let count = lanes.len().max(1) as f64;
    let overview = captions + 26.0;
    let enlarged = overview + THIN * count + 84.0;
    let bottom = enlarged + THICK * count;
    let height = bottom + 78.0;
    let total = end(lanes).max(1.0);
    let (from, to) = stretch(lanes, &caption.layers);
    let mut svg = Svg::new(WIDTH, height, caption.title, caption.line);
    if captions > 0.0 {
        svg.text("head", Anchor::Start, (24.0, 34.0), caption.title);
        svg.text("axis", Anchor::Start, (24.0, 56.0), caption.line);
        svg.text("axis", Anchor::Start, (24.0, 76.0), caption.source);
    }

    svg.text("axis", Anchor::Start, (24.0, overview - 12.0), caption.whole);
    let scale = Scale::from_zero(total / 1e6, 8, LEFT, RIGHT);
    let scale = Scale::exact(Spread::Even, 0.0, total / 1e6, &scale.ticks, LEFT, RIGHT);
    let whole = Strip { lanes, scale: &scale, per_ns: 1e-6, top: overview, lane: THIN, named: false };
    let (left, right) = (scale.place(from / 1e6), scale.place(to / 1e6));
    svg.rect("gap", (left, overview - 4.0), (right - left).max(1.0), THIN * count + 8.0, "enlarged below");
    whole.draw(&mut svg, 0.0, total);
    whole.axis(&mut svg, "ms");

    let (first, last) = (caption.layers.start(), caption.layers.end());
    let name = if first == last { format!("Layer {first}") } else { format!("Layers {first} to {last}") };
    svg.text("axis", Anchor::Start, (24.0, enlarged - 14.0), &format!("{name}, enlarged"));
    let scale = Scale::from_zero((to - from) / 1e3, 8, LEFT, RIGHT);
    let scale = Scale::exact(Spread::Even, 0.0, (to - from) / 1e3, &scale.ticks, LEFT, RIGHT);
    let near = Strip { lanes, scale: &scale, per_ns: 1e-3, top: enlarged, lane: THICK, named: true };
    near.draw(&mut svg, from, to);
    near.axis(&mut svg, "µs");
    legend(&mut svg, lanes, bottom + 62.0);
    svg.finish()
}

/// Lanes over a stretch of time.
struct Strip<'a> {
    lanes: &'a [Lane],
    scale: &'a Scale,
    per_ns: f64,
    top: f64,
    lane: f64,
    named: bool,
}

impl Strip<'_> {
    fn draw(&self, svg: &mut Svg, from: f64, to: f64) {
        for (i, lane) in self.lanes.iter().enumerate() {
            let top = self.top + self.lane * i as f64;
            svg.text("", Anchor::End, (LEFT - 10.0, top + self.lane / 2.0 + 4.0), &lane.name);
            svg.line("grid", (LEFT, top + self.lane - 2.0), (RIGHT, top + self.lane - 2.0));
            for span in lane.spans.iter().filter(|span| span.end_ns > from && span.start_ns < to) {
                let place = |ns: f64| self.scale.place((ns.clamp(from, to) - from) * self.per_ns);
                let (left, right) = (place(span.start_ns), place(span.end_ns));
                if span.end_ns <= span.start_ns {
                    continue;
                }
                let layer = span.layer.map_or(String::new(), |layer| format!(", layer {}", layer.0));
                let batch = span.micro_batch.map_or(String::new(), |m| format!(", micro-batch {}", m.0 + 1));
                let took = time((span.end_ns - span.start_ns) / 1e9);
                let hint = format!("{}{layer}{batch}: {took}", span.name);
                let width = (right - left).max(0.6);
                svg.rect(
                    &format!("fill {}", class(work(span))),
                    (left, top + 2.0),
                    width,
                    self.lane - 6.0,
                    &hint,
                );
                let words = words(span);
                if self.named && width > 6.6 * words.len() as f64 + 4.0 {
                    let middle = (left + width / 2.0, top + self.lane / 2.0 + 3.0);
                    let on = if class(work(span)) == "plain" { "inside pale" } else { "inside" };
                    svg.text(on, Anchor::Middle, middle, &words);
                }
            }
        }
    }

    fn axis(&self, svg: &mut Svg, unit: &str) {
        let bottom = self.top + self.lane * self.lanes.len() as f64;
        svg.line("base", (LEFT, bottom), (RIGHT, bottom));
        for tick in &self.scale.ticks {
            let place = self.scale.place(*tick);
            svg.line("base", (place, bottom), (place, bottom + 4.0));
            svg.text("", Anchor::Middle, (place, bottom + 18.0), &short(*tick));
        }
        svg.text("axis", Anchor::End, (LEFT - 10.0, bottom + 18.0), unit);
    }
}

/// The colours that occur, each with its works.
fn legend(svg: &mut Svg, lanes: &[Lane], y: f64) {
    let mut entries: Vec<(&str, Vec<&str>)> = Vec::new();
    for span in lanes.iter().flat_map(|lane| &lane.spans).filter(|span| span.end_ns > span.start_ns) {
        let name = work(span);
        let class = class(name);
        match entries.iter_mut().find(|(known, _)| *known == class) {
            Some((_, names)) if names.contains(&name) => {}
            Some((_, names)) => names.push(name),
            None => entries.push((class, vec![name])),
        }
    }
    let mut left = 24.0;
    for (class, names) in entries {
        let names = names.join(", ");
        svg.rect(&format!("fill {class}"), (left, y - 10.0), 12.0, 12.0, "");
        svg.text("", Anchor::Start, (left + 17.0, y), &names);
        left += 17.0 + 7.2 * names.len() as f64 + 18.0;
    }
}
