//! What a cache will do before it is built: setups, the simulator, the planner.
//!
//! A [`Setup`](setup::Setup) is a file: a model, a GPU, a link, and what an engine's works cost there, measured
//! at points or by a [roofline]. [`fit`] makes one from measurements. [`misses`] says how many rows a step
//! fetches. [`simulate`] runs the production schedule with those costs on a virtual clock. [`plan`] says what
//! fits on a GPU, [`stride`] what another stride of rows on the host costs, [`worth`] whether offload pays there;
//! [`weights`] what a model's weights leave of it. [`kernels`] says what forebay's own kernels should take of a GPU.
//! [`provenance`] goes out with all of it: what a figure rests on. [`experts`] prices other numbers of GPUs than the
//! setup's.
//!
//! Every number that comes in is checked where it comes in, and the error names its field; so every number
//! that goes out is finite. Times are microseconds in files and functions, milliseconds for whole steps.

mod choice;
pub mod cost;
pub mod experts;
pub mod fit;
pub mod kernels;
pub mod misses;
pub mod model;
pub mod plan;
pub mod provenance;
pub mod roofline;
pub mod setup;
pub mod simulate;
pub mod stride;
pub mod weights;
pub mod worth;

use std::ops::RangeInclusive;

use serde::de::DeserializeOwned;

use crate::error::{Error, Kind, Result};
use crate::text::echo;

/// A field of a setup or of measurements that cannot be used.
fn wrong(place: impl Into<String>) -> Error {
    Error::new(Kind::InvalidConfig, "read setup")
        .at(place.into())
        .hint("correct the named field; docs/setup-format.md")
}

/// What is wrong with something that stands at `place`: its own error, with one hint.
fn within(place: &str, error: &Error) -> Error {
    let what = if error.place().is_empty() { error.kind().describe() } else { error.place() };
    let outer = wrong(format!("{place}: {what}"));
    error.numbers().iter().fold(outer, |outer, (name, value)| outer.with(name, *value))
}

/// A question that a setup does not reach: [`Kind::OutOfRange`], and nothing else is.
fn outside(place: impl Into<String>) -> Error {
    Error::new(Kind::OutOfRange, "simulate")
        .at(place.into())
        .hint("measure a point there, or ask nearer to those measured")
}

/// Numbers beyond this, or above zero and below its inverse, mean nothing in any unit, and their products
/// would leave the numbers.
const MOST: f64 = 1e18;

/// Whether a time or a count is a number that is not negative.
fn finite(value: f64, place: impl Fn() -> String) -> Result<()> {
    match (0.0..=MOST).contains(&value) {
        true => Ok(()),
        false => Err(wrong(format!("{}: {value} is negative, beyond {MOST:e} or no number", place()))),
    }
}

/// Whether a speed or a size is a number above zero.
fn positive(value: f64, place: impl Fn() -> String) -> Result<()> {
    match (1.0 / MOST..=MOST).contains(&value) {
        true => Ok(()),
        false => Err(wrong(format!("{}: {value} is not above 0, beyond {MOST:e} or no number", place()))),
    }
}

/// A JSON text as `T`; an error names the field's path.
fn parse<T: DeserializeOwned>(text: &str, field: &'static str, known: RangeInclusive<u64>) -> Result<T> {
    let bad = |place: String| {
        Error::new(Kind::BadFormat, "read setup")
            .at(place)
            .hint("correct the named field; docs/setup-format.md")
    };
    // The version before the fields: of another version they may mean anything.
    let value: serde_json::Value = serde_json::from_str(text).map_err(|e| bad(echo(e)))?;
    match value.get(field).and_then(serde_json::Value::as_u64) {
        Some(found) if known.contains(&found) => {}
        Some(found) => {
            return Err(Error::new(Kind::BadVersion, "read setup")
                .at(field)
                .with("version", found)
                .with("known", *known.end()));
        }
        None => return Err(bad(format!("{field}: not there, or no whole number"))),
    }
    let mut json = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut json).map_err(|e| {
        let path = e.path().to_string();
        bad(echo(format_args!("{path}: {}", e.into_inner())))
    })
}
