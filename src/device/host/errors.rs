//! The host device's name in errors, and the errors for arguments that it rejects. Every file of this folder may use
//! them, so they depend on none of it.

use crate::error::{Error, Kind};

/// The device's name in errors.
pub(super) const NAME: &str = "host device";

/// The error for a handle, a mark or a length that this device does not have.
pub(super) fn unknown(what: &'static str, handle: u64) -> Error {
    Error::new(Kind::OutOfRange, NAME).at(what).with("handle", handle)
}

/// The error for a number out of range.
pub(super) fn bad(place: &'static str, value: impl Into<u64>) -> Error {
    Error::new(Kind::OutOfRange, NAME).at(place).with("value", value)
}
