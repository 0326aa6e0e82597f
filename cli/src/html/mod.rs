//! `forebay replay --html`: a report with pictures, one file that needs no other.
//!
//! [`figures`] counts, [`selection`] and its neighbours write and draw, [`page`] assembles the file. [`svg`] and
//! [`chart`] write the pictures without a plotting library, because light and dark mode, phones, pointer hints and
//! screen readers need classes, names and hints in the markup itself.

pub mod bench;
mod chart;
mod figures;
mod hits;
mod page;
pub mod plans;
mod scale;
mod selection;
mod similarity;
mod similarity_cards;
mod slots;
mod steps;
mod svg;
pub mod sweep;
#[cfg(test)]
mod tests;
pub mod timeline;
mod words;

use std::path::PathBuf;

use forebay::trace::requests::Format;
use forebay::{Result, Shape};

use crate::replay::{Arguments, RowSize};
use crate::requests::RequestArguments;
pub use page::STYLE;
use selection::View;

/// Bytes a second that the ESS system measured for its gather of single rows over PCIe 5.
const LINK: f64 = 37e9;

/// The introduction of the report of selection traces.
const INTRO: &str = "What a small pool on the device misses, and why: which misses another eviction policy could \
                     avoid, and which only more memory can. A sentence explains each picture; the figures are \
                     below it.";

/// The introduction of the report of request traces.
const REQUESTS: &str = "What a prefix cache of blocks hits by its capacity, and why not more: which hits another \
                        eviction policy could gain, and which only more capacity can. A sentence explains each \
                        picture; the figures are below it.";

/// The arguments of the report alone.
#[derive(clap::Args)]
pub struct HtmlArguments {
    /// Writes a report with pictures instead of tables as one HTML file, atomically; `-` prints it. It
    /// compares all policies at several sizes; --prompt-share or --slots sets the size shown by layer and step
    /// [default: 0.2].
    #[arg(long, value_name = "FILE", conflicts_with_all = ["curve", "policy", "split", "prefetch"])]
    pub html: Option<PathBuf>,
    /// With --html: the rate of the link to the device in gigabytes a second (1e9) [default: 37, measured by ESS for
    /// gathering single rows].
    #[arg(long, value_name = "GB/S", requires = "html", value_parser = rate, allow_negative_numbers = true)]
    pub link_rate: Option<f64>,
}

fn rate(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(rate) if (1e-3..=1e6).contains(&rate) => Ok(rate),
        _ => Err("not a number of GB/s from 0.001 to 1000000".to_owned()),
    }
}

/// The page of `forebay replay --html` for selection traces.
///
/// # Errors
/// Errors of reading a trace, and of a size that does not fit it.
pub fn selections(arguments: &Arguments, shape: &Shape, row: &RowSize) -> Result<String> {
    let link = arguments.report.link_rate.map_or(LINK, |rate| rate * 1e9);
    let mut sections = Vec::with_capacity(arguments.traces.len());
    for path in &arguments.traces {
        let figures = figures::gather(path, shape, arguments)?;
        sections.push(selection::section(&View { figures: &figures, row, link }));
    }
    page::tell_apart(&mut sections, &arguments.traces);
    Ok(page::document(&sections, INTRO, &notes(link)))
}

/// The page of `forebay replay --html` for request traces.
///
/// # Errors
/// Errors of reading a trace, and of settings that do not fit it.
pub fn requests(traces: &[PathBuf], arguments: &RequestArguments, memory: Option<u64>) -> Result<String> {
    let mut sections = Vec::with_capacity(traces.len());
    let mut pieces = false;
    for path in traces {
        let hits = hits::gather(path, arguments, memory)?;
        pieces |= hits.about.format == Format::RagPulse;
        sections.push(hits::section(&hits));
    }
    page::tell_apart(&mut sections, traces);
    Ok(page::document(&sections, REQUESTS, &hits::notes(pieces)))
}

/// The definitions at the end of the page.
fn notes(link: f64) -> Vec<String> {
    let measured = if link == LINK { ", what the ESS system measured for gathering single rows" } else { "" };
    vec![
        "Hit: a selected row that was resident when its step began. Miss: one fetched from host memory. Rows \
         written in a step are neither. A step's query rows are united first. Miss ratio: misses / (hits + misses). \
         Means are over all decode steps of one sequence. Prompt share: slots of a layer over the tokens at decode \
         start."
            .to_owned(),
        "lru is the rule of the production pools, counted exactly at every size. The other policies are for study \
         (docs/policies.md); the optimum is Belady's: it knows the future, and no policy misses less."
            .to_owned(),
        format!(
            "Bytes: misses x row bytes. Time: bytes / {} GB/s{measured}; without latency, and without the part that \
             computation hides.",
            link / 1e9
        ),
    ]
}
