//! The works of an engine's step that have a cost, by the names that a setup file, a roofline and a simulation share.

/// A work that has a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Term {
    /// I0: the projections before the indexer.
    Project,
    /// I: the indexer's logits and top-k.
    Index,
    /// P: the preparation of attention.
    Prepare,
    /// A: attention, by its width.
    Attend,
    /// M: the merge of split attention.
    Merge,
    /// The rest of a layer after attention, without the exchange of the experts' tokens.
    Rest,
    /// That exchange, if no other micro-batch hides it.
    Exchange,
    /// Once a step: embedding, output, sampling, drafting.
    Step,
}

impl Term {
    /// All terms.
    pub const ALL: [Term; 8] = [
        Term::Project,
        Term::Index,
        Term::Prepare,
        Term::Attend,
        Term::Merge,
        Term::Rest,
        Term::Exchange,
        Term::Step,
    ];

    /// The field of `costs`.
    pub const fn name(self) -> &'static str {
        match self {
            Term::Project => "project",
            Term::Index => "index",
            Term::Prepare => "prepare",
            Term::Attend => "attend",
            Term::Merge => "merge",
            Term::Rest => "rest",
            Term::Exchange => "exchange",
            Term::Step => "step",
        }
    }
}
