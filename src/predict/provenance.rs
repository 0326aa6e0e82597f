//! The provenance of a computed figure: the setup, the source of its numbers, and which of them were measured.
//!
//! Every figure of the simulator and the planner carries it, so that a computed number is never mistaken for a
//! measured one. [`Provenance::sentence`] is for people, the fields are for programs. A setup states its `origin`,
//! which parts were `measured`, and its `assumptions`. This module adds what follows from the setup itself: works
//! without a measured cost, a link that is a preset, other GPUs than those of the costs.
//!
//! Terminals and pages show the texts of a setup; a setup whose texts could steer a terminal is refused.

use serde::{Deserialize, Serialize};

use super::setup::{File, Link, Setup, Term};
use super::wrong;
use crate::error::Result;
use crate::text::steers;

/// A part of a setup that can be measured on a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The costs of an engine's works.
    Costs,
    /// The rates of the link.
    Link,
    /// The rows that a step fetches.
    Misses,
}

impl Part {
    /// All of them.
    pub const ALL: [Part; 3] = [Part::Costs, Part::Link, Part::Misses];

    /// Its name in `measured` of a setup.
    pub const fn name(self) -> &'static str {
        match self {
            Part::Costs => "costs",
            Part::Link => "link",
            Part::Misses => "misses",
        }
    }
}

/// The GPUs of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Served {
    /// GPUs that the experts are divided over.
    pub gpus: u32,
    /// GPUs of one node.
    pub node_gpus: u32,
    /// GPUs that the setup's costs are of.
    pub costs_gpus: u32,
    /// Whether these differ, so that a model of the experts is used between the costs and the figure.
    pub extrapolated: bool,
}

/// The provenance of a figure. `docs/json.md` describes the fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Provenance {
    /// The setup's name.
    pub setup: String,
    /// The source of its numbers, or [`NOT_STATED`].
    pub origin: String,
    /// Whether costs, link and misses were all measured on a machine, for these GPUs.
    pub measured: bool,
    /// The parts that were.
    pub measured_parts: Vec<Part>,
    /// The GPUs.
    pub deployment: Served,
    /// The assumptions, in sentences.
    pub assumptions: Vec<String>,
}

/// The origin of a setup that has none.
pub const NOT_STATED: &str = "origin not stated";

impl Provenance {
    /// The provenance of figures from `setup`.
    pub fn of(setup: &Setup) -> Provenance {
        let file = setup.file();
        let deployment = setup.served();
        let mut measured_parts: Vec<Part> = file.measured.clone();
        measured_parts.sort();
        let mut assumptions = file.assumptions.clone();
        assumptions.extend(implied(setup));
        Provenance {
            setup: file.name.clone(),
            origin: file.origin.clone().unwrap_or_else(|| NOT_STATED.to_owned()),
            measured: measured_parts.len() == Part::ALL.len() && !deployment.extrapolated,
            measured_parts,
            deployment,
            assumptions,
        }
    }

    /// The same, with misses that are `from` another source instead of the setup.
    pub fn with_misses_from(mut self, from: &str) -> Provenance {
        self.measured_parts.retain(|part| *part != Part::Misses);
        self.measured = false;
        self.assumptions.push(format!("misses: {from}, not the setup's"));
        self
    }

    /// The provenance in one sentence.
    pub fn sentence(&self) -> String {
        let Served { gpus, costs_gpus, extrapolated, .. } = self.deployment;
        let count = |gpus: u32| if gpus == 1 { "1 GPU".to_owned() } else { format!("{gpus} GPUs") };
        let served = match extrapolated {
            true => format!("{}, extrapolated from {}", count(gpus), count(costs_gpus)),
            false => count(gpus),
        };
        let names = |measured: bool| {
            let of = Part::ALL.into_iter().filter(|part| self.measured_parts.contains(part) == measured);
            of.map(Part::name).collect::<Vec<_>>().join(", ")
        };
        let measured = match (self.measured_parts.is_empty(), names(false)) {
            (true, _) if self.origin == NOT_STATED => "it states no measured part".to_owned(),
            (true, _) => "nothing here was measured".to_owned(),
            (false, others) if others.is_empty() => format!("measured: {}", names(true)),
            (false, others) => format!("measured: {}; not measured: {others}", names(true)),
        };
        format!("Computed from setup {}: {served}, {}; {measured}.", self.setup, self.origin)
    }
}

/// The assumptions that a setup implies.
fn implied(setup: &Setup) -> Vec<String> {
    let file = setup.file();
    let mut all = Vec::new();
    let by_roofline: Vec<&str> =
        Term::ALL.into_iter().filter(|term| file.costs.get(*term).is_none()).map(Term::name).collect();
    if !by_roofline.is_empty() {
        all.push(format!(
            "costs without measured points, from the GPU's roofline: {}",
            by_roofline.join(", ")
        ));
    }
    match (setup.other_link(), &file.link) {
        (Some(other), _) => all.push(format!("link: {other}")),
        (None, Link::Preset(name)) => all.push(format!("link: the preset {name}")),
        (None, Link::Rates(_)) => {}
    }
    let Served { gpus, costs_gpus, extrapolated, .. } = setup.served();
    if extrapolated {
        let experts = |gpus: u32| setup.dims().experts / gpus.max(1);
        all.push(format!(
            "{gpus} GPUs by the model of docs/simulator.md: {} experts a GPU and layer instead of {}, evenly visited \
             and read at a byte a value; all other costs are those on {costs_gpus} GPUs",
            experts(gpus),
            experts(costs_gpus),
        ));
    }
    all
}

/// The longest text of a setup's provenance, in characters, and the most assumptions.
const TEXT_MAX: usize = 240;
const ASSUMPTIONS_MAX: usize = 32;

/// Checks that a setup's origin, assumptions and measured parts can be shown, and belong to its version.
pub(super) fn check(file: &File) -> Result<()> {
    if let Some(origin) = &file.origin {
        shown(origin, "origin")?;
    }
    if file.assumptions.len() > ASSUMPTIONS_MAX {
        return Err(wrong("too many assumptions")
            .with("sentences", file.assumptions.len() as u64)
            .with("most", ASSUMPTIONS_MAX as u64));
    }
    for (i, text) in file.assumptions.iter().enumerate() {
        shown(text, &format!("assumptions[{i}]"))?;
    }
    for (i, part) in file.measured.iter().enumerate() {
        if file.measured.iter().take(i).any(|other| other == part) {
            return Err(wrong(format!("measured[{i}]: \"{}\" appears twice", part.name())));
        }
    }
    let measures = |part| file.measured.contains(&part);
    if measures(Part::Misses) && file.misses.is_none() {
        return Err(wrong("measured: \"misses\", but the setup has none"));
    }
    if measures(Part::Link) && matches!(file.link, Link::Preset(_)) {
        return Err(wrong("measured: \"link\", but the link is a preset"));
    }
    Ok(())
}

/// Checks that a text is one short line without control characters.
fn shown(text: &str, place: &str) -> Result<()> {
    if text.trim().is_empty() {
        return Err(wrong(format!("{place}: empty")));
    }
    let length = text.chars().count();
    if length > TEXT_MAX {
        return Err(wrong(format!("{place}: longer than one line"))
            .with("characters", length as u64)
            .with("most", TEXT_MAX as u64));
    }
    match text.chars().find(|c| hides(*c)) {
        Some(c) => Err(wrong(format!(
            "{place}: the character U+{:04X} is not allowed in a line of text",
            u32::from(c)
        ))),
        None => Ok(()),
    }
}

/// Whether a character steers a terminal, or is invisible.
fn hides(c: char) -> bool {
    steers(c) || matches!(c, '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2065}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ess() -> File {
        Setup::named("ess").unwrap().unwrap().file().clone()
    }

    fn sentence(change: impl Fn(&mut File)) -> String {
        let mut file = ess();
        change(&mut file);
        Provenance::of(&Setup::new(file).unwrap()).sentence()
    }

    #[test]
    fn one_sentence_names_the_sources_and_what_was_measured() {
        assert_eq!(
            sentence(|_| {}),
            "Computed from setup ess: 32 GPUs, fitted to a published simulation on an assumed H200; nothing here \
             was measured."
        );
        assert_eq!(
            sentence(|file| file.measured = vec![Part::Misses, Part::Link]),
            "Computed from setup ess: 32 GPUs, fitted to a published simulation on an assumed H200; measured: link, \
             misses; not measured: costs."
        );
        assert!(
            sentence(|file| file.measured = Part::ALL.to_vec()).ends_with("; measured: costs, link, misses.")
        );
        assert!(
            sentence(|file| file.origin = None)
                .ends_with(": 32 GPUs, origin not stated; it states no measured part.")
        );
        assert!(
            sentence(|file| file.deployment.gpus = 16)
                .contains(": 16 GPUs, extrapolated from 32 GPUs, fitted")
        );
    }

    #[test]
    fn a_plan_is_measured_only_if_every_part_was_measured_on_the_gpus_of_the_costs() {
        let measured = |parts: &[Part], gpus| {
            let mut file = ess();
            file.measured = parts.to_vec();
            file.deployment.gpus = gpus;
            Provenance::of(&Setup::new(file).unwrap())
        };
        assert!(measured(&Part::ALL, 32).measured);
        assert!(!measured(&Part::ALL, 16).measured);
        assert!(!measured(&[Part::Costs, Part::Link], 32).measured);
        assert!(!measured(&Part::ALL, 32).with_misses_from("a trace's").measured);
    }

    #[test]
    fn texts_with_control_characters_or_false_claims_are_refused() {
        let refused = |change: &dyn Fn(&mut File), words: &str| {
            let mut file = ess();
            change(&mut file);
            let error = Setup::new(file).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused(&|file| file.origin = Some("\u{1b}[2J".to_owned()), "origin: the character U+001B");
        refused(&|file| file.origin = Some("a\nb".to_owned()), "origin: the character U+000A");
        refused(&|file| file.origin = Some("x\u{202e}y".to_owned()), "origin: the character U+202E");
        refused(&|file| file.origin = Some(" ".to_owned()), "origin: empty");
        refused(&|file| file.origin = Some("x".repeat(241)), "origin: longer");
        refused(&|file| file.assumptions = vec!["a".to_owned(), "\u{7f}".to_owned()], "assumptions[1]");
        refused(&|file| file.assumptions = vec!["a".to_owned(); 33], "too many assumptions");
        refused(&|file| file.measured = vec![Part::Link; 2], "measured[1]: \"link\" appears twice");
        refused(
            &|file| {
                file.measured = vec![Part::Misses];
                file.misses = None;
            },
            "measured: \"misses\"",
        );
        refused(
            &|file| {
                file.measured = vec![Part::Link];
                file.link = Link::Preset("pcie5".to_owned());
            },
            "measured: \"link\"",
        );
        refused(&|file| file.forebay_setup = 1, "of version 2");
    }
}
