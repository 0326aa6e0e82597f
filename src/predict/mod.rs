//! Predicts the behaviour of a cache before it is built: setups, the simulator, the planner.
//!
//! A [`Setup`](setup::Setup) is a file with a model, a GPU, a link, and the costs of an engine's works on them,
//! measured at points or computed from a [roofline]. [`fit`] makes one from measurements. [`misses`] models how many
//! rows a step fetches. [`simulate`] runs the production schedule with those costs on a virtual clock. [`plan`]
//! computes what fits on a GPU, [`dense`] what of a dense model fits, [`prefill`] what a prefill instance needs,
//! [`elastic`] what each sequence has if fewer divide its slots, [`stride`] the cost of another stride of rows on the
//! host, [`worth`] whether offload pays, and [`weights`] how much of the GPU a model's weights take. [`pulls`] says
//! how long a step waits for sharded weights, and [`sharded`] what sharding gives on a setup. [`layered`] says what of
//! a prompt's transfer its computation hides. [`kernels`] predicts the times of forebay's own kernels on a GPU. Every
//! figure carries its [`provenance`]. [`experts`] prices other numbers of GPUs than the setup's.
//!
//! Every number is checked on input, and the error names its field, so every number on output is finite. Times are
//! microseconds in files and functions, and milliseconds for whole steps.

mod choice;
pub mod cost;
pub mod dense;
pub mod elastic;
pub mod experts;
pub mod fit;
pub mod kernels;
pub mod layered;
mod matrices;
pub mod misses;
pub mod model;
pub mod plan;
pub mod prefill;
pub mod provenance;
pub mod pulls;
pub mod roofline;
pub mod setup;
pub mod sharded;
pub mod simulate;
pub mod stride;
pub mod weights;
pub mod worth;

use std::ops::RangeInclusive;

use serde::de::DeserializeOwned;

use crate::error::{Error, Kind, Result};
use crate::text::echo;

/// The error for an unusable field of a setup or of measurements.
fn wrong(place: impl Into<String>) -> Error {
    Error::new(Kind::InvalidConfig, "read setup")
        .at(place.into())
        .hint("correct the named field; docs/setup-format.md")
}

/// Adds the place to an error, and replaces its hint.
fn within(place: &str, error: &Error) -> Error {
    let what = if error.place().is_empty() { error.kind().describe() } else { error.place() };
    let outer = wrong(format!("{place}: {what}"));
    error.numbers().iter().fold(outer, |outer, (name, value)| outer.with(name, *value))
}

/// The error for an operating point that a setup does not reach: [`Kind::OutOfRange`], and no other error is.
fn outside(place: impl Into<String>) -> Error {
    Error::new(Kind::OutOfRange, "simulate")
        .at(place.into())
        .hint("measure a point there, or stay closer to the measured ones")
}

/// Numbers above this, and positive numbers below its inverse, are meaningless in any unit, and their products
/// would overflow.
const MOST: f64 = 1e18;

/// Checks that a time or a count is a non-negative number.
fn finite(value: f64, place: impl Fn() -> String) -> Result<()> {
    match (0.0..=MOST).contains(&value) {
        true => Ok(()),
        false => Err(wrong(format!("{}: {value} is negative, beyond {MOST:e} or not a number", place()))),
    }
}

/// Checks that a rate or a size is a number above zero.
fn positive(value: f64, place: impl Fn() -> String) -> Result<()> {
    match (1.0 / MOST..=MOST).contains(&value) {
        true => Ok(()),
        false => Err(wrong(format!("{}: {value} is not above 0, beyond {MOST:e} or not a number", place()))),
    }
}

/// A JSON text as `T`; an error names the field's path.
fn parse<T: DeserializeOwned>(text: &str, field: &'static str, known: RangeInclusive<u64>) -> Result<T> {
    let bad = |place: String| {
        Error::new(Kind::BadFormat, "read setup")
            .at(place)
            .hint("correct the named field; docs/setup-format.md")
    };
    // The version is checked before the fields: in another version they may mean anything.
    let value: serde_json::Value = serde_json::from_str(text).map_err(|e| bad(echo(e)))?;
    match value.get(field).and_then(serde_json::Value::as_u64) {
        Some(found) if known.contains(&found) => {}
        Some(found) => {
            return Err(Error::new(Kind::BadVersion, "read setup")
                .at(field)
                .with("version", found)
                .with("known", *known.end()));
        }
        None => return Err(bad(format!("{field}: missing, or not a whole number"))),
    }
    let mut json = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut json).map_err(|e| {
        let path = e.path().to_string();
        bad(echo(format_args!("{path}: {}", e.into_inner())))
    })
}
