//! The CUDA device's name in errors, and the error for arguments that it rejects. Every file of this folder may use
//! them, so they depend on none of it. The errors of a refusing driver are in `driver`.

use crate::error::{Error, Kind};

/// The device's name in errors.
pub(super) const NAME: &str = "CUDA device";

/// The error for a handle or a number that this device does not have or take.
pub(super) fn bad(place: &'static str, value: impl Into<u64>) -> Error {
    Error::new(Kind::OutOfRange, NAME).at(place).with("value", value)
}
