//! Exact LRU, step by step: the rule that decides which rows are resident (in slots on the device) and which rows a
//! step evicts.
//!
//! The rule is defined here once. Every device follows it.
//!
//! # What it decides
//!
//! In each layer a sequence has a budget of slots, and these hold some of its rows of that layer. A step brings the
//! selections (top-k indices) of its query rows, and the rule uses their union. A step here is one resolve; a draft
//! layer has one for each draft pass. The rule orders the rows that were resident, and those that the step selected or
//! created, from oldest to newest:
//!
//! 1. rows that the step did not select, in their old order;
//! 2. rows that the step selected, hits and fetched rows alike, by ascending position;
//! 3. rows that the step created, by ascending position, once the commit at the next decode step's beginning has
//!    accepted them.
//!
//! The newest rows of that order, one for each slot of the budget, are resident: after the resolve those of groups 1
//! and 2, after the commit those of all three. There is one exception: if the hits and the fetched rows together are
//! more than the slots of the budget, all hits keep their slots, the fetched rows with the highest positions take the
//! remaining slots, and the other fetched rows are in scratch slots for this layer's attention only.
//!
//! An example: a sequence of six rows, 0 to 5, and a budget of 3 slots. (A real decode step also adds its new
//! row; the example leaves that out.)
//!
//! | step | selection | hits | misses | victims | resident after it, oldest to newest |
//! |---|---|---|---|---|---|
//! | before | | | | | 0, 1, 2 |
//! | 1 | {4, 1} | 1 | 4 | 0 | 2, 1, 4 |
//! | 2 | {3, 2} | 2 | 3 | 1 | 4, 2, 3 |
//! | 3 | {5, 0} | none | 0, 5 | 4, 2 | 3, 0, 5 |
//!
//! # Why there is no list
//!
//! Rows of one step are ordered by position, and new rows have the highest positions of all. So the order of all rows
//! is the order of the pairs *(stamp, position)*; the stamp is that of the last step that selected the row or, for a
//! new row, of the last step before its commit. No list has to be kept in order: a hit writes one stamp. The price is a
//! scan of the lane's stamps in each step that misses a row, and a few more if many slots must be evicted at once; it
//! finds the oldest slots. The scan is contiguous and free of branches, so it suits vector units and warps alike. The
//! rule never reads the order in which a top-k kernel emits its indices, so the outcome cannot depend on it.
//!
//! Ties are resolved the same way on every rank and device:
//!
//! - Missed rows are numbered by ascending position.
//! - The slots that a resolve takes are a set; empty slots count as the oldest. They go to the missed rows that get
//!   budget slots, by ascending position, in this order: first the slots with a stamp below the highest stamp of the
//!   set, then those with it, each group in the order of the lane's slots.
//! - New rows, by ascending position, take empty slots first, in the order of the lane's slots. Then each new
//!   row takes the slot of the oldest row by (stamp, position).
//!
//! # Another budget
//!
//! [`LayerTables::resize`] changes the budget of a running lane. A *place* is a slot's index in the lane, and the
//! places below the budget are in use. So a shrink gives up the last places, and the lane's last blocks leave; a
//! growth adds places at the end, and new blocks are appended. Which blocks leave or come depends on the lane's list
//! alone, so every rank and the host know it without asking a device. If a shrink leaves fewer slots than there are
//! resident rows, the oldest rows by (stamp, position) leave. The other rows at or beyond the new end move, by
//! ascending place, to the empty places before it, by ascending place. They keep their stamps. No other row moves.
//! Every copy of a resize reads a slot at or beyond the new end and writes a slot before it, so no two copies
//! overlap and they need no order. A growth removes and moves nothing; missed rows and new rows fill its slots.
//!
//! An example: a lane whose last step has stamp 5, with a budget of 10 slots. Each place holds (position, stamp):
//!
//! | place | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |
//! |---|---|---|---|---|---|---|---|---|---|---|
//! | 10 slots | (3, 5) | (7, 2) | (1, 4) | (9, 5) | (2, 2) | (8, 4) | empty | (5, 1) | (6, 5) | (4, 3) |
//! | then 6 | (3, 5) | (6, 5) | (1, 4) | (9, 5) | (4, 3) | (8, 4) | | | | |
//! | then 8 | (3, 5) | (6, 5) | (1, 4) | (9, 5) | (4, 3) | (8, 4) | empty | empty | | |
//!
//! At 6 slots, three of nine rows leave: 5, 2 and 7. Rows 6 and 4 move to places 1 and 4. If the 10 slots become 7, two
//! rows leave, 5 and 2. Row 7 has the stamp of row 2, but a higher position, and stays. Then row 6 moves to place 4 and
//! row 4 to place 6.
//!
//! LRU is a stack. A shrink leaves the rows that a lane with the smaller budget all along would have, under three
//! conditions: the lane's budget was never smaller, every budget held all rows that any one step selected, and no row
//! came by a bring-up or went by a truncation. If the budget was smaller in between, the shrink leaves a part of those
//! rows. A budget below the rows of the last step is allowed as well; the next step is exact by the rule of scratch
//! slots.
//!
//! # Costs
//!
//! Each layer stores four bytes for each token of a lane (`slot_of`) and eight bytes for each slot (`position_of`,
//! `stamp_of`). At 128K tokens, a ratio of 0.1 and rows of 656 bytes that is 7.3% of the bytes of the slots. A hit
//! costs two random accesses. A step that misses a row adds one scan of the lane's stamps, and a few more scans if many
//! slots must be evicted at once.
//!
//! A step without misses chooses no victim. It counts its hits by position, in the set of missed rows, which is empty.
//! A sequence that is resident as a whole has a slot for each of its tokens; such a step costs it the look-ups and that
//! set, a bit for each token. In a lane of few slots the host scans the stamps instead, which is quicker there.
//!
//! A new row takes an empty slot if there is one. The lane's head counts first places that are known to hold a row
//! ([`LaneHead::full_places`]), and the search begins behind them. So all new rows together cost one scan of the lane,
//! until a truncation empties slots; then the next search begins at the first place again.
//!
//! A shrink costs the scans of one choice of victims and one scan more. Each row that leaves or moves costs one random
//! access, to `slot_of`; its other words are in the order of the lane's slots. The copies of moved rows come on top. A
//! growth writes eight bytes for each new slot.
//!
//! # States of a row, in one lane and layer
//!
//! | state | `slot_of[position]` | what ends the state |
//! |---|---|---|
//! | absent | [`ABSENT`] | [`LayerTables::resolve`], a warm-up or the bring-up gives the row a slot |
//! | resident | a budget slot, whose `position_of` points back | an eviction, a truncation or a shrink |
//! | landing | a landing slot; positions from the committed length up | a commit or truncate accepts or forgets it |
//! | scratch | a scratch slot, inside one call of `resolve` | the end of that call; attention reads the bytes later |
//!
//! [`LayerTables::validate`] checks that the tables agree with these states. The tests call it after every operation.
//!
//! # What it does not do
//!
//! It moves no bytes, uses no device, takes no lock and allocates nothing after construction. It does not choose
//! budgets, and no two sequences have a slot in common.

mod commit;
mod digest;
mod divide;
mod newest;
mod resize;
mod resolve;
mod scan;
mod tables;
mod victims;
mod workspace;

pub use commit::Moved;
pub use divide::{Answered, Divider};
pub use resize::Resized;
pub use resolve::{Beyond, Counts, Fetch, QueryRange, Resolved, Selected, Selection};
pub use scan::{At, Portable, Scan, Split, Stamped, Tied, Touch, Touched};
pub(crate) use scan::{beyond, nth_lowest};
pub use tables::{ABSENT, EMPTY, LaneHead, LayerTables, TableShape, TableWords};
pub use workspace::Workspace;
