//! A new version of the weights, beside the one in use, that all ranks of a group take at one border or none takes.
//!
//! Reinforcement learning updates weights while it serves. An [`Update`] has memory of its own: the new version of this
//! rank's part of each layer that it names. It is filled as the windows were, on any thread, while steps go on with the
//! old version. [`Update::share`] gives the new parts to the other ranks and takes theirs. Then, at one border that the
//! engine chose, every rank calls `commit` ([`super::Ring::commit`]).
//!
//! **States** of an update: *filling*, from [`super::Windows::update`] on; *shared*, when the parts of all ranks are
//! there; *over*, when it was committed or aborted. One that is dropped aborts. Windows have one update at a time.
//!
//! **The decision** ([`decision`]) is one word in memory that all ranks map: rank 0 makes it anew for each update and
//! gives it to the others with its first message. A rank says in it that it is ready, waits until all are, and
//! whichever changes the word first has decided for all, whenever any of them ends. A rank that runs out of time, or
//! learns that another one was lost, aborts. The step is part of what a rank says, so ranks at two borders abort.
//!
//! **The flip** ([`commit`]) maps the new memory at the old addresses: this rank's pages in its window, and the parts
//! of the others, from which pulls read, captured ones too. Addresses and graphs hold. Then the old memory is given
//! back. Other processes have imported it by themselves, so one that has not flipped yet goes on reading the old
//! version.
//!
//! **No mixture.** A layer whose new mappings are not all there cannot be used: every later call for it returns the
//! error. Such a rank cannot go back, because others have committed. It says so and is started again.
//!
//! **Costs.** Commit is for all layers of an update at once, so the new parts of all of them exist beside the old ones
//! until then: 1/n of a sharded layer, the whole of one that the plan keeps resident, and one granule. An engine that
//! accepts layers of different versions updates some layers at a time, within less memory. A commit waits in steps of a
//! millisecond for the others, and remaps 1 + n ranges a layer.
//!
//! **What it does not do.** Weights that are pulled from the host ([`super::Source::Host`]) are not updated: their
//! memory is registered, not mapped. It takes in no rank that ended meanwhile.

mod commit;
mod decision;
#[cfg(test)]
mod decision_tests;
pub(super) mod pact;
mod share;
mod version;

pub use pact::{Border, Outcome};
pub use version::Update;
