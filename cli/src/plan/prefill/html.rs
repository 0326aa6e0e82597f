//! The page of plans of prefill instances: a section for each plan, with its memory part by part.

use forebay::predict::prefill::Planned;

use super::result::Point;
use super::text::{HEADS, MEANING, assumed, cells, given, name, sentences};
use crate::present::html::chart::{self, Bar, WIDTH};
use crate::present::html::numbers::tile;
use crate::present::html::page::{self, Card, Head, Section, Table, Tile};
use crate::present::html::svg::Svg;
use crate::present::numbers::{counted, grouped};

/// The page of these plans.
pub fn page(points: &[Point]) -> String {
    let sections: Vec<Section> = points.iter().map(|point| section(point, points)).collect();
    let head = Head {
        command: "plan",
        question: "What does a prefill instance need?",
        things: "plans",
        intro: "The memory of one GPU: weights, activations, the staging ring, and the pages of prompts in chunks.",
    };
    let notes: Vec<String> = std::iter::once(MEANING.to_owned()).chain(assumed(points)).collect();
    page::page(&head, &sections, &notes)
}

fn section(point: &Point, points: &[Point]) -> Section {
    let one = std::slice::from_ref(point);
    let facts = given(one).into_iter().chain(sentences(point, false)).collect();
    let title = if points.len() > 1 { name(point) } else { point.model.clone() };
    let Ok(planned) = &point.planned else {
        let warning = Some("does not fit".to_owned());
        return Section { title, warning, facts, tiles: Vec::new(), cards: Vec::new() };
    };
    let tiles = tiles(point, planned);
    Section { title, warning: None, facts, tiles, cards: vec![memory(point, planned)] }
}

fn tiles(point: &Point, planned: &Planned) -> Vec<Tile> {
    let ring = &planned.ring;
    vec![
        tile(point.size(planned.bytes), "of the GPU are taken", format!("of {}", point.gpu)),
        tile(
            point.size(ring.bytes),
            "staging ring",
            format!("{} of {}", counted(ring.depth, "part"), point.size(ring.part)),
        ),
        tile(
            point.size(planned.activations),
            "activations",
            format!("of {} tokens", grouped(planned.tokens as f64)),
        ),
        tile(
            point.size(planned.left),
            "left",
            format!("rows and index keys of {} tokens", grouped(planned.left_tokens as f64)),
        ),
    ]
}

/// The parts of the GPU's memory as bars.
fn memory(point: &Point, planned: &Planned) -> Card {
    let ring = if point.demand.host.is_some() { 0 } else { planned.ring.bytes };
    let parts = [
        ("weights", point.demand.weights),
        ("activations", planned.activations),
        ("workspace", point.demand.workspace),
        ("staging ring", ring),
        ("pages", planned.kept.bytes()),
        ("left", planned.left),
    ];
    let bars = parts.map(|(part, bytes)| Bar {
        name: part.to_owned(),
        value: bytes as f64,
        mark: None,
        text: point.size(bytes),
        class: if part == "staging ring" { "here" } else { "plain" },
    });
    let name = "Memory of the GPU".to_owned();
    let sentence = format!("{} of {} are taken.", point.size(planned.bytes), point.gpu);
    let mut svg = Svg::new(WIDTH, chart::bars_height(bars.len()), &name, &sentence);
    chart::bars(&mut svg, &bars, "bytes on one GPU");
    let table = Table { head: HEADS.map(str::to_owned).into(), rows: vec![cells(point).into()] };
    Card { name, sentence, pictures: vec![svg.finish()], table, wide: false }
}
