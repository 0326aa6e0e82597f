//! `forebay replay --html`: a report with pictures, one file that needs no other.
//!
//! [`figures`] counts, [`selection`] and its neighbours write and draw, [`page`] assembles the file.

mod figures;
mod selection;
mod similarity;
mod similarity_cards;
mod slots;
mod steps;
#[cfg(test)]
mod tests;
mod view;

use forebay::{Result, Shape};

use self::view::View;
use super::args::Arguments;
use super::result::RowSize;
use crate::present::html::page;

/// Bytes a second that the ESS system measured for its gather of single rows over PCIe 5.
const LINK: f64 = 37e9;

/// The introduction of the report of selection traces.
const INTRO: &str = "What a small pool on the device misses, and why: which misses another eviction policy could \
                     avoid, and which only more memory can. A sentence explains each picture; the figures are \
                     below it.";

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
