//! The sources of computed figures, in the same sentences for text and HTML reports.

use std::collections::HashSet;

use forebay::predict::provenance::Provenance;

use super::output::harmless;

/// The sentences of a report's figures, each once, in order, safe for a terminal.
pub fn sentences<'a>(all: impl Iterator<Item = &'a Provenance>) -> Vec<String> {
    each_once(all.map(|provenance| harmless(&provenance.sentence())))
}

/// The assumptions of a report's figures, each once, in order.
pub fn assumptions<'a>(all: impl Iterator<Item = &'a Provenance>) -> Vec<String> {
    each_once(all.flat_map(|provenance| &provenance.assumptions).map(|assumption| harmless(assumption)))
}

/// The opening of a text report.
pub fn header<'a>(all: impl Iterator<Item = &'a Provenance>) -> String {
    sentences(all).into_iter().map(|sentence| sentence + "\n").collect()
}

/// The end of a text report.
pub fn footer<'a>(all: impl Iterator<Item = &'a Provenance>) -> String {
    assumptions(all).into_iter().map(|assumption| format!("Assumed: {assumption}.\n")).collect()
}

fn each_once(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut known = HashSet::new();
    all.filter(|text| known.insert(text.clone())).collect()
}
