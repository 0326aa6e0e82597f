//! The rule: what is resident, in which order, and who goes. It stands here once; every device obeys it.
//!
//! # What it decides
//!
//! For one sequence in one layer, a *budget* of slots holds a subset of the sequence's rows. After a step
//! the resident rows are ordered from oldest to newest: rows not selected in the step, in their old order;
//! rows selected in it, hit or fetched, by ascending position; rows born in it, ascending. The newest
//! `budget` of that order stay. When the fetched rows and the hits alone exceed the budget, all hits keep
//! their slots, the fetched rows with the highest positions take what is left, and the others live in
//! scratch slots for this step.
//!
//! # Why the tables look as they do
//!
//! Rows of one step stand in ascending position, and births have the highest positions of all. So the
//! whole order is the pair *(stamp of the last step that selected or bore the row, position)*, and no list
//! has to be kept in order: a hit writes one stamp. The price is a pass over the lane's stamps a step, which
//! tells the oldest: contiguous, branch-free work for vector units and for warps alike. The outcome cannot
//! depend on the order in which a top-k kernel emits its indices, because no order is read from them.
//!
//! Ties are settled so that every rank and device places rows alike: missed rows are numbered by ascending
//! position; their victims are a set, handed out with the last ones' ties behind the others, both in the order
//! of the lane's slots; born rows, ascending, take the slots of the oldest rows one by one, by (stamp,
//! position), empty slots first and in the lane's order.
//!
//! # Costs
//!
//! Per lane and layer four bytes a token (`slot_of`), and eight bytes a slot (`position_of`, `stamp_of`):
//! at 128K tokens and a ratio of 0.1 that is 7.3% of the 656-byte rows the slots hold. A hit costs two
//! random accesses; a step adds one pass over the lane's stamps, and a few more when the oldest are many.
//!
//! # States of a row, in one lane and layer
//!
//! | state | `slot_of[position]` | who moves it on |
//! |---|---|---|
//! | absent | [`ABSENT`] | [`LayerTables::resolve`] fetches it |
//! | resident | a budget slot, whose `position_of` points back | it becomes a victim, or is truncated |
//! | landing | a landing slot, for the positions from `length` on | [`LayerTables::commit`] accepts or forgets it |
//! | scratch | a scratch slot, only inside one call of `resolve` | the same call makes it absent again |
//!
//! [`LayerTables::validate`] checks all of it, and the tests call it after every operation.
//!
//! # What it does not do
//!
//! It moves no bytes, knows no device, takes no lock and allocates nothing after construction. It does not choose
//! budgets, nor does it share slots between sequences.

mod commit;
mod digest;
mod divide;
mod resolve;
mod scan;
mod tables;
mod victims;

pub use commit::Moved;
pub use divide::{Answered, Divider};
pub use resolve::Workspace;
pub use resolve::{Beyond, Counts, Fetch, QueryRange, Resolved, Selected, Selection};
pub use scan::{At, Portable, Scan, Split, Stamped, Tied, Touch, Touched};
pub(crate) use scan::{beyond, nth_lowest};
pub use tables::{ABSENT, EMPTY, LaneHead, LayerTables, TableShape, TableWords};
