//! Plans of prefill instances as text: the given values, a line for each plan, and what each says in sentences.

use forebay::Geometry;
use forebay::predict::prefill::{Planned, Ring};

use super::result::Point;
use crate::present::numbers::{counted, grouped, number, tokens};
use crate::present::terminal::{Look, Spare, align_right};

/// Columns that a narrow table leaves out first.
const SPARED: [&str; 2] = ["workspace", "GPU"];

/// The heads of the columns.
pub const HEADS: [&str; 11] = [
    "model",
    "GPU",
    "context",
    "chunk",
    "batch",
    "weights",
    "activations",
    "workspace",
    "ring",
    "pages",
    "left",
];

/// The meaning of the columns.
pub const MEANING: &str = "Chunk: tokens of each prompt in a pass. Batch: prompts of a pass. Ring: staging memory from \
    which rows and index keys are sent, given back on acknowledgement. Pages: rows and index keys of prompts in \
    chunks, which later chunks read. Left: of the GPU, for published prefixes and further prompts.";

/// The whole report.
pub fn report(points: &[Point], look: Look) -> String {
    let mut lines = given(points);
    lines.push(String::new());
    lines.push(table(points, look));
    lines.push(String::new());
    lines.push(MEANING.to_owned());
    lines.extend(assumed(points));
    lines.push(String::new());
    lines.extend(points.iter().flat_map(|point| sentences(point, points.len() > 1)));
    lines.join("\n") + "\n"
}

/// What all plans of a model share: its shape, its GPUs and weights.
pub fn given(points: &[Point]) -> Vec<String> {
    let lines = points.iter().flat_map(|point| shape(point).into_iter().chain([deployment(point)]));
    each_once(lines)
}

/// The assumptions of the plans.
pub fn assumed(points: &[Point]) -> Vec<String> {
    let all = points.iter().flat_map(|point| point.demand.assumptions());
    each_once(all.map(|assumption| format!("Assumed: {assumption}.")))
}

fn each_once(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut once = Vec::new();
    for line in all {
        if !once.contains(&line) {
            once.push(line);
        }
    }
    once
}

fn shape(point: &Point) -> Option<String> {
    let geometry = Geometry::new(point.demand.shape).ok()?;
    let keys = match point.demand.shape.index_key_bytes {
        0 => "no index keys".to_owned(),
        bytes => format!("index keys of {bytes} bytes in {}", counted(geometry.index_layers(), "layer")),
    };
    Some(format!(
        "{}: {} layers, rows of {} bytes, {} in the ring, {keys}",
        point.model,
        geometry.layers(),
        geometry.row_bytes(),
        geometry.host_stride()
    ))
}

fn deployment(point: &Point) -> String {
    let gpus = counted(point.deployed.gpus, "GPU");
    let weights = point.size(point.demand.weights);
    let from = match &point.deployed.checkpoint {
        Some(checkpoint) => format!("{weights} on each, from the checkpoint {checkpoint}"),
        None => format!("{weights} on each, from --weights"),
    };
    let ranks = match point.demand.ranks {
        1 => "each GPU computes whole passes".to_owned(),
        ranks => format!("the tokens of a pass are divided over {ranks}"),
    };
    format!("{gpus}; weights: {from}; {ranks}")
}

/// The cells of a plan below [`HEADS`].
pub fn cells(point: &Point) -> [String; 11] {
    let demand = &point.demand;
    let [activations, ring, pages, left] = match &point.planned {
        Ok(planned) => [
            point.size(planned.activations),
            format!(
                "{}{}",
                point.size(planned.ring.bytes),
                if demand.host.is_some() { ", host" } else { "" }
            ),
            point.size(planned.kept.bytes()),
            point.size(planned.left),
        ],
        Err(_) => ["-", "-", "-", "does not fit"].map(str::to_owned),
    };
    [
        point.model.clone(),
        point.gpu.to_string(),
        tokens(demand.context),
        tokens(demand.chunk),
        demand.batch.to_string(),
        point.size(demand.weights),
        activations,
        point.size(demand.workspace),
        ring,
        pages,
        left,
    ]
}

fn table(points: &[Point], look: Look) -> String {
    // The lines above the table name the model if it is the only one.
    let one_model = points.iter().all(|point| points.first().is_some_and(|first| first.model == point.model));
    let skipped = usize::from(one_model);
    let mut table = look.table();
    table.set_header(HEADS.into_iter().skip(skipped));
    for point in points {
        table.add_row(cells(point).into_iter().skip(skipped));
    }
    align_right(&mut table, |column| column >= 1 - skipped);
    look.fit(table, &Spare { columns: &SPARED, keys: 5 - skipped, text: None })
}

/// A plan's name among others.
pub fn name(point: &Point) -> String {
    let demand = &point.demand;
    let (context, chunk) = (tokens(demand.context), tokens(demand.chunk));
    format!("{} on {}, {context} in chunks of {chunk}, batch {}", point.model, point.gpu, demand.batch)
}

/// What a plan says: the memory, the ring and why it has so many parts, and what else is kept.
pub fn sentences(point: &Point, named: bool) -> Vec<String> {
    let name = if named { format!("{}: ", name(point)) } else { String::new() };
    match &point.planned {
        Err(error) => vec![format!("{name}{error}.")],
        Ok(planned) => {
            let memory = format!(
                "{name}{} of {} are taken. {} are left, which hold the rows and index keys of {} tokens.",
                point.size(planned.bytes),
                point.gpu,
                point.size(planned.left),
                grouped(planned.left_tokens as f64)
            );
            vec![memory, ring(point, planned), pages(point, planned)]
        }
    }
}

fn ms(us: f64) -> String {
    format!("{} ms", number(us / 1e3))
}

/// The ring, and the reason for its depth.
fn ring(point: &Point, planned: &Planned) -> String {
    let ring = &planned.ring;
    let place = if point.demand.host.is_some() { "in host memory" } else { "on the GPU" };
    let content = match ring.key_bytes {
        0 => "rows alone".to_owned(),
        keys => format!("rows {} and index keys {}", point.size(ring.row_bytes), point.size(keys)),
    };
    let parts = format!(
        "The ring {place} has {} of {}: a layer of a pass of {} tokens, {content}.",
        counted(ring.depth, "part"),
        point.size(ring.part),
        grouped(planned.tokens as f64),
    );
    let times = format!(
        "A layer computes {}, its part crosses in {} and is acknowledged {} later.",
        ms(ring.layer_us),
        ms(ring.transfer_us),
        ms(ring.acknowledge_us)
    );
    format!("{parts} {times} {}", depth(point, ring))
}

fn depth(point: &Point, ring: &Ring) -> String {
    let held = ms(ring.held_us());
    let wait = ms(ring.wait_us);
    let every = ms(ring.layer_us.max(ring.transfer_us));
    let link = match ring.is_link_bound() {
        true => format!(" The link is slower than the computation: prefill waits {wait} in each layer."),
        false => String::new(),
    };
    match point.demand.depth {
        None => format!(
            "So a part is held for {held}, and a further one is taken every {every}: {} are the fewest with which \
             prefill never waits for the ring.{link}",
            counted(ring.depth, "part")
        ),
        Some(_) if ring.wait_us > 0.0 => format!(
            "So a part is held for {held}: with {} prefill waits {wait} in each layer.",
            counted(ring.depth, "part")
        ),
        Some(_) => {
            format!("So a part is held for {held}: with {} prefill never waits.", counted(ring.depth, "part"))
        }
    }
}

/// What is kept behind the ring, and what the other way would take.
fn pages(point: &Point, planned: &Planned) -> String {
    if point.demand.in_one_pass() {
        let all = planned.ring.all_row_bytes.saturating_add(planned.ring.all_key_bytes);
        return format!(
            "A pass computes whole prompts, so nothing is kept behind the ring. Without it the rows and index keys of \
             all layers, {}, would be held until they are acknowledged.",
            point.size(all)
        );
    }
    let whole = match &point.in_one_pass {
        Some(Ok(whole)) => format!(
            " In one pass a prompt would need none: {} in all, {} of activations.",
            point.size(whole.bytes),
            point.size(whole.activations)
        ),
        Some(Err(error)) => format!(" In one pass a prompt would need none, but that does not fit: {error}."),
        None => String::new(),
    };
    format!(
        "A prompt takes {} passes, and later ones read the rows of earlier ones in every layer: its pages stay, {}, \
         until the last one is computed. The ring serves the transfer alone.{whole}",
        planned.passes,
        point.size(planned.kept.bytes())
    )
}
