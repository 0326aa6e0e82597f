//! What computed figures rest on, as reports show it: the same sentences in texts and pages.

use std::collections::HashSet;

use forebay::predict::provenance::Provenance;

use super::output::harmless;

/// The sentences of a report's figures, each once, in their order, as a terminal may see them.
pub fn sentences<'a>(all: impl Iterator<Item = &'a Provenance>) -> Vec<String> {
    each_once(all.map(|provenance| harmless(&provenance.sentence())))
}

/// What was assumed for a report's figures, each once, in their order.
pub fn assumptions<'a>(all: impl Iterator<Item = &'a Provenance>) -> Vec<String> {
    each_once(all.flat_map(|provenance| &provenance.assumptions).map(|assumption| harmless(assumption)))
}

/// What a text report opens with.
pub fn header<'a>(all: impl Iterator<Item = &'a Provenance>) -> String {
    sentences(all).into_iter().map(|sentence| sentence + "\n").collect()
}

/// What it ends with.
pub fn footer<'a>(all: impl Iterator<Item = &'a Provenance>) -> String {
    assumptions(all).into_iter().map(|assumption| format!("Assumed: {assumption}.\n")).collect()
}

fn each_once(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut known = HashSet::new();
    all.filter(|text| known.insert(text.clone())).collect()
}
