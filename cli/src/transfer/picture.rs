//! The timeline as a picture: a row for each layer, with its computation and its way to the receiver.
//!
//! The picture is a separate file, so it contains the page's style. What is narrower than a line is drawn anyway, so
//! that a short way does not look like a missing one.

use super::result::LayerTimes;
use crate::present::html::numbers::short;
use crate::present::html::scale::{Scale, Spread};
use crate::present::html::svg::{Anchor, Svg, document};

/// Width of the picture in units, and of the layers' numbers at its left.
const WIDTH: f64 = 1000.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = WIDTH - 24.0;
/// Height of the captions.
const TOP: f64 = 96.0;
/// Distance between two layers.
const ROW: f64 = 13.0;

/// The colours, and what they mean.
const KEYS: [(&str, &str); 3] =
    [("lru", "computes"), ("plain", "waits to be told"), ("optimum", "on its way, until it is stored")];

/// The whole file. `title` says what was sent, `line` what was found.
pub fn picture(layers: &[LayerTimes], (title, line): (&str, &str), style: &str) -> String {
    let last = layers.iter().flat_map(|of| [of.computed, of.told, of.stored]).flatten().fold(0.0, f64::max);
    let scale = Scale::from_zero(last, 8, LEFT, RIGHT);
    let scale = Scale::exact(Spread::Even, 0.0, last, &scale.ticks, LEFT, RIGHT);
    let bottom = TOP + ROW * layers.len() as f64;
    let mut svg = Svg::new(WIDTH, bottom + 40.0, title, line);
    svg.text("head", Anchor::Start, (24.0, 34.0), title);
    svg.text("axis", Anchor::Start, (24.0, 56.0), line);
    let mut left = LEFT;
    for (class, name) in KEYS {
        svg.rect(&format!("fill {class}"), (left, TOP - 24.0), 12.0, 12.0, "");
        svg.text("", Anchor::Start, (left + 17.0, TOP - 14.0), name);
        left += 17.0 + 7.2 * name.len() as f64 + 18.0;
    }
    let mut before = 0.0;
    for (layer, of) in layers.iter().enumerate() {
        let top = TOP + ROW * layer as f64;
        // Numbers of all layers would touch each other.
        if layer % 5 == 0 {
            svg.text("axis", Anchor::End, (LEFT - 10.0, top + ROW - 3.0), &format!("layer {layer}"));
        }
        let mut bar = |class: &str, what: &str, from: f64, to: Option<f64>| {
            if let Some(to) = to {
                let width = (scale.place(to) - scale.place(from)).max(0.6);
                let hint = format!("layer {layer} {what}: {} ms", short(to - from));
                svg.rect(&format!("fill {class}"), (scale.place(from), top + 1.0), width, ROW - 2.0, &hint);
            }
        };
        bar("lru", "computes", before, of.computed);
        let computed = of.computed.unwrap_or(before);
        bar("plain", "waits to be told", computed, of.told);
        bar("optimum", "is on its way", of.told.unwrap_or(computed), of.stored);
        before = computed;
    }
    svg.line("base", (LEFT, bottom), (RIGHT, bottom));
    for tick in &scale.ticks {
        let place = scale.place(*tick);
        svg.line("base", (place, bottom), (place, bottom + 4.0));
        svg.text("", Anchor::Middle, (place, bottom + 18.0), &short(*tick));
    }
    svg.text("axis", Anchor::End, (LEFT - 10.0, bottom + 18.0), "ms");
    document(&svg.finish(), style)
}
