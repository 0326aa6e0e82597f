//! What is known of a sequence whatever its attention reads: how many rows it has, which of its steps are in flight,
//! and the block hashes of its published pages.
//!
//! A cache keeps one of each part for a sequence, in its own record, and calls them where steps begin and end. `rows`
//! counts rows, and has the rules by which drafts are accepted. `flight` lists the steps between prepare and retire.
//! `tokens` names pages by their contents.
//!
//! **Costs.** All lists take their memory when the sequence is opened or extended. A step allocates nothing here.
//!
//! **What it does not do.** It knows no state of a sequence, no lane, no page and no device. It frees nothing: the
//! cache does that, when a step that ends here was the last one that named the sequence.

mod flight;
mod rows;
mod tokens;

use crate::ids::Sequence;

pub(crate) use flight::SequenceSteps;
pub use rows::Accepted;
pub(crate) use rows::RowCounts;
pub(crate) use tokens::BlockHashes;
pub use tokens::Tokens;

/// One row of a batch: a sequence and its query rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRow {
    /// The sequence.
    pub sequence: Sequence,
    /// How many rows of its previous step are accepted.
    pub accepted: Accepted,
    /// Its query rows in this step, at most the step's `query_rows`.
    pub query_rows: u32,
}

/// How long a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    /// Committed tokens, counting only retired steps and host-issued work.
    pub committed: u32,
    /// Rows of the last step, in flight or retired, that are neither accepted nor rejected yet.
    pub landed: u32,
    /// Tokens in published pages. [`Cache::publish`](crate::Cache::publish) continues after them.
    pub published: u32,
    /// Prompt rows that every layer has. While the sequence is parked, all its tokens are a prompt.
    pub filled: u32,
}
