//! What every fabric is held to: one suite for shared memory, sockets, and writers from afar.
//!
//! A fabric under test is a [`Subject`]: it makes ends, puts rows into a sender's memory, and lets time pass. [`run`]
//! makes a new subject for each check, and stops at the first thing that is wrong. The checks follow the promises of
//! [`fabric`](crate::transfer::fabric):
//!
//! | check | what must hold |
//! |---|---|
//! | [`FRAMES`] | frames of every size come whole, once and in order, both ways |
//! | [`SILENCE`] | an end that is not polled makes the other one's frames be refused, and loses none that was taken |
//! | [`CLOSES`] | who closes hears nothing more; the other end learns it; the next connection has another number |
//! | [`CRASHES`] | an end that is gone is noticed; its successor is connected |
//! | [`ROWS`] | requests of several sizes, chunks and prefixes become whole; a write that has ended has landed |
//! | [`CHANGES`] | rows that change while they are read are found, and sent again |
//! | [`CLOSED`] | without digests: what is read when its sender has closed the connection is not taken |
//! | [`REUSE`] | a request that is aborted at any point does no harm to the next one on its pages |
//! | [`MIXING`] | connections between several ranks with the same numbers do not mix |
//! | [`DESTROYED`] | nothing lands over a connection whose destruction was told |
//!
//! The suite takes a fabric that works: it injects no faults but those that its two ends can bring about. What a fabric
//! does with bytes of strangers is for its own tests. `tests/transfer/conformance.rs` shows that fabrics which break a
//! promise fail.

mod frames;
mod rig;
mod rows;
mod subject;

use std::fmt;

use crate::error::Result;
use subject::{Checked, told};

pub use rig::{LANDING, ORIGINS, TOKENS, sides};
pub use subject::Subject;

/// See the module's head.
pub const FRAMES: &str = "frames come whole, once and in order";
/// See the module's head.
pub const SILENCE: &str = "an end that is not polled";
/// See the module's head.
pub const CLOSES: &str = "a connection that is closed";
/// See the module's head.
pub const CRASHES: &str = "an end that is gone";
/// See the module's head.
pub const ROWS: &str = "requests become whole";
/// See the module's head.
pub const CHANGES: &str = "rows that change";
/// See the module's head.
pub const CLOSED: &str = "rows of a sender that has closed";
/// See the module's head.
pub const REUSE: &str = "pages that are used again after an abort";
/// See the module's head.
pub const MIXING: &str = "connections do not mix";
/// See the module's head.
pub const DESTROYED: &str = "nothing lands after the destruction";

/// What a fabric does not keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// The check, by its name above.
    pub check: &'static str,
    /// What was wrong.
    pub what: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.check, self.what)
    }
}

impl std::error::Error for Broken {}

/// A check of one subject.
type Check<S> = fn(&mut S) -> Checked;

/// Runs all checks.
///
/// # Errors
/// The first check that found something wrong, and what.
pub fn run<S: Subject>(mut make: impl FnMut() -> Result<S>) -> std::result::Result<(), Broken> {
    let checks: [(&'static str, Check<S>); 10] = [
        (FRAMES, frames::whole_and_in_order),
        (SILENCE, frames::silence),
        (CLOSES, frames::closes),
        (CRASHES, frames::crashes),
        (ROWS, rows::whole),
        (CHANGES, rows::changes),
        (CLOSED, rows::closed),
        (REUSE, rows::reuse),
        (MIXING, rows::mixing),
        (DESTROYED, rows::destroyed),
    ];
    for (check, of) in checks {
        let broken = |what| Broken { check, what };
        let mut subject = make().map_err(|error| broken(told(error)))?;
        of(&mut subject).map_err(broken)?;
    }
    Ok(())
}
