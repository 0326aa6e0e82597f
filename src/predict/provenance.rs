//! The provenance of a computed figure: the setup, the source of its numbers, and which of them were measured.
//!
//! Every figure of the simulator and the planner carries it, so that a computed number is never mistaken for a
//! measured one. [`Provenance::sentence`] is for people, the fields are for programs. A setup states its `origin`,
//! which parts were `measured`, and its `assumptions`. This module adds what follows from the setup itself: works
//! without a measured cost, a link that is a preset, other GPUs than those of the costs.
//!
//! Terminals and pages show these texts, so a setup whose texts could steer a terminal is refused when it is read.

use serde::Serialize;

pub use super::model::Served;
pub use super::setup::file::Part;

use super::setup::{Link, Setup, Term};

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

    /// The same, with budgets that are equal parts of a pool ([`Pool`](super::elastic::Pool)).
    pub fn with_elastic_budgets(mut self) -> Provenance {
        self.assumptions.push(
            "elastic budgets: equal parts of the pool, set at once; misses are counts with fixed budgets of that \
             size, so they include neither the misses that follow a change of budget nor the time of moving rows"
                .to_owned(),
        );
        self
    }

    /// The same, with further assumptions.
    pub fn with_assumptions(mut self, assumptions: &[&str]) -> Provenance {
        self.assumptions.extend(assumptions.iter().map(|sentence| (*sentence).to_owned()));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::setup::File;

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
}
