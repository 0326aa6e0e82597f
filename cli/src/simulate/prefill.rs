//! `forebay simulate --prefill`: when the rows of a prefill pass are computed, told, moved and stored.

use forebay::device::Stream;
use forebay::device::clock::Span;
use forebay::predict::layered::{self, Layered, Pass};
use forebay::{Error, Kind, Result};
use forebay::{Layer, MicroBatch};
use serde::Serialize;

use super::args::Arguments;
use super::lanes::Lane;
use super::{lanes, timeline};
use crate::present::html::page;
use crate::present::json::{self, Head};
use crate::present::numbers::{counted, fixed, number, size, tokens};
use crate::present::output::Results;
use crate::present::terminal::{Look, Spare, align_right};

/// The stages of a part: names on the lanes, and on the works.
const STAGES: [(&str, &str); 4] =
    [("GPU", "compute"), ("sender's core", "digest"), ("link", "link"), ("receiver's core", "store")];

#[derive(Serialize)]
struct Entry {
    #[serde(flatten)]
    head: Head,
    layers: u32,
    tokens: u32,
    micro_batches: u32,
    token_bytes: u32,
    layer_ms: f64,
    digests: bool,
    stage_gb_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    digest_gb_s: Option<f64>,
    link_gb_s: f64,
    store_gb_s: f64,
    acknowledge_ms: f64,
    ring_parts: u32,
    bytes: u64,
    compute_ms: f64,
    exposed_ms: f64,
    alone_ms: f64,
    hidden: f64,
    link_load: f64,
    slowed: f64,
    wait_ms: f64,
    timeline: Vec<Times>,
}

#[derive(Serialize)]
struct Times {
    layer: u32,
    micro_batch: u32,
    computed_ms: f64,
    told_ms: f64,
    moved_ms: f64,
    stored_ms: f64,
}

fn entry((pass, of): &(Pass, Layered)) -> Entry {
    let times = of.parts.iter().map(|part| {
        let [computed_ms, told_ms, moved_ms, stored_ms] = part.stages.map(|[_, end]| end / 1e3);
        Times { layer: part.layer, micro_batch: part.micro_batch, computed_ms, told_ms, moved_ms, stored_ms }
    });
    Entry {
        head: Head::new("simulate-prefill"),
        layers: pass.layers,
        tokens: pass.tokens,
        micro_batches: pass.micro_batches,
        token_bytes: pass.token_bytes,
        layer_ms: pass.layer_us / 1e3,
        digests: pass.digest_rate.is_some(),
        stage_gb_s: pass.stage_rate / 1e9,
        digest_gb_s: pass.digest_rate.map(|rate| rate / 1e9),
        link_gb_s: pass.link_rate / 1e9,
        store_gb_s: pass.store_rate / 1e9,
        acknowledge_ms: pass.acknowledge_us / 1e3,
        ring_parts: pass.depth,
        bytes: of.bytes,
        compute_ms: of.compute_us / 1e3,
        exposed_ms: of.exposed_us / 1e3,
        alone_ms: of.alone_us / 1e3,
        hidden: of.hidden,
        link_load: of.link_load,
        slowed: of.slowed,
        wait_ms: of.wait_us / 1e3,
        timeline: times.collect(),
    }
}

fn percent(share: f64) -> String {
    format!("{}%", fixed(100.0 * share, 2))
}

/// The passes as a table.
fn text(all: &[(Pass, Layered)], look: Look) -> String {
    let mut table = look.table();
    table.set_header([
        "tokens",
        "layer ms",
        "micro-batches",
        "compute ms",
        "alone ms",
        "exposed ms",
        "hidden",
        "link load",
        "slowed",
        "wait ms",
        "bytes",
    ]);
    for (pass, of) in all {
        let ms = |us: f64| fixed(us / 1e3, 2);
        table.add_row([
            tokens(pass.tokens),
            ms(pass.layer_us),
            pass.micro_batches.to_string(),
            ms(of.compute_us),
            ms(of.alone_us),
            ms(of.exposed_us),
            percent(of.hidden),
            percent(of.link_load),
            percent(of.slowed),
            ms(of.wait_us),
            size(of.bytes as f64),
        ]);
    }
    align_right(&mut table, |_| true);
    let table = look.fit(table, &Spare { columns: &["bytes", "wait", "compute"], keys: 3, text: None });
    let rates = all.first().map_or(String::new(), |(pass, _)| {
        let rate = |rate: f64| number(rate / 1e9);
        let digests = match pass.digest_rate {
            Some(of) => format!("a core makes digests at {} GB/s, another one checks and stores", rate(of)),
            None => "without digests; a core stores".to_owned(),
        };
        format!(
            "{}; the GPU stages at {} GB/s; {digests} at {} GB/s; the link moves {} GB/s; a ring of {}, acknowledged \
             {} ms after they are stored.",
            counted(pass.layers, "layer"),
            rate(pass.stage_rate),
            rate(pass.store_rate),
            rate(pass.link_rate),
            counted(pass.depth, "part"),
            number(pass.acknowledge_us / 1e3),
        )
    });
    format!(
        "What of a prefill pass's transfer its computation hides. Nothing here was measured but rates.\n\n{table}\n\n\
         {rates}\nAlone: all layers sent after the computation. Exposed: from its end until all is stored. Slowed: by \
         staging, and waits for the ring.\n"
    )
}

/// A lane for each stage that takes time.
fn drawn(of: &Layered) -> Vec<Lane> {
    let span = |stage: usize, name, part: &layered::Part| {
        let [start_ns, end_ns] = part.stages.get(stage).map_or([0.0; 2], |times| times.map(|us| us * 1e3));
        let (layer, micro_batch) = (Some(Layer(part.layer)), Some(MicroBatch(part.micro_batch)));
        Span { stream: Stream(stage as u64), name, layer, micro_batch, start_ns, end_ns }
    };
    let lanes = STAGES.iter().enumerate().map(|(stage, (lane, name))| Lane {
        name: (*lane).to_owned(),
        spans: of.parts.iter().map(|part| span(stage, name, part)).collect(),
    });
    lanes.filter(|lane| lane.spans.iter().any(|span| span.end_ns > span.start_ns)).collect()
}

/// Draws the only pass.
fn draw<'a>(arguments: &'a Arguments, all: &[(Pass, Layered)], results: &mut Results<'a>) -> Result<()> {
    if arguments.timeline.is_none() && arguments.perfetto.is_none() {
        return Ok(());
    }
    let [(pass, of)] = all else {
        return Err(Error::new(Kind::InvalidConfig, "simulate")
            .at("--timeline and --perfetto of several passes")
            .hint("give one --prefill, --layer-ms and --micro-batches"));
    };
    let last = pass.layers - 1;
    let layer = arguments.layer.unwrap_or(last);
    if layer > last {
        return Err(Error::new(Kind::InvalidConfig, "simulate").at("--layer").with("layers", pass.layers));
    }
    let title = format!(
        "Prefill of {} tokens, {} of {} ms{}",
        tokens(pass.tokens),
        counted(pass.layers, "layer"),
        number(pass.layer_us / 1e3),
        if pass.micro_batches > 1 {
            format!(", {} micro-batches", pass.micro_batches)
        } else {
            String::new()
        },
    );
    let line = format!(
        "{}: exposed {} ms of {} ms that the transfer takes alone: {} hidden; link load {}",
        size(of.bytes as f64),
        fixed(of.exposed_us / 1e3, 2),
        fixed(of.alone_us / 1e3, 2),
        percent(of.hidden),
        percent(of.link_load),
    );
    let lanes = drawn(of);
    if let Some(path) = &arguments.timeline {
        let layers = layer.saturating_sub(1)..=last.min(layer + 1);
        let caption = timeline::Caption {
            title: &title,
            line: &line,
            source: "Computed from rates.",
            whole: "The whole pass",
            layers,
        };
        results.write(path, timeline::picture(&lanes, &caption, page::STYLE));
    }
    if let Some(path) = &arguments.perfetto {
        results.write(path, lanes::perfetto(&lanes, &title)?);
    }
    Ok(())
}

/// `forebay simulate --prefill`.
///
/// # Errors
/// [`Kind::InvalidConfig`] for a pass that cannot be, and for a picture of several; errors of writing the result.
pub fn command(arguments: &Arguments) -> Result<()> {
    let passes = arguments.prefill.passes();
    let all: Vec<(Pass, Layered)> =
        passes.into_iter().map(|pass| Ok((pass, pass.simulate()?))).collect::<Result<_>>()?;
    let mut results = Results::default();
    draw(arguments, &all, &mut results)?;
    if let Some(path) = &arguments.json {
        results.write(path, json::list(&all.iter().map(entry).collect::<Vec<_>>())?);
    }
    if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text(&all, look)));
    }
    results.deliver()
}
