//! The wall: every entry runs behind it, and a panic becomes a status instead of leaving the library.
//!
//! A panic in a call that may change an object leaves it half-changed, so the object is broken from
//! then on: it answers every call with `FB_INTERNAL`, and can only be destroyed. Calls that cannot change
//! anything only answer that status.

use std::panic::{AssertUnwindSafe, catch_unwind};

use forebay::{Error, Kind, Result};

/// Runs `call`; nothing if it panicked.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(answer) => Some(answer),
        Err(payload) => {
            // Dropping a payload may panic again.
            std::mem::forget(payload);
            None
        }
    }
}

/// Runs `call`; a panic in it answers an error.
pub(crate) fn wall<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    caught(call).unwrap_or_else(|| Err(panicked()))
}

/// The error of a call that panicked.
pub(crate) fn panicked() -> Error {
    Error::new(Kind::Internal, "call").at("a rule of the library was broken")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status() {
        assert_eq!(wall(|| Ok(5)), Ok(5));
        assert_eq!(wall::<()>(|| Err(Error::new(Kind::Busy, "x"))), Err(Error::new(Kind::Busy, "x")));
        assert_eq!(wall::<()>(|| panic!("shown on standard error: this test means to")), Err(panicked()));
        assert_eq!(panicked().kind(), Kind::Internal);
        assert_eq!((caught(|| 7), caught::<()>(|| panic!("as above"))), (Some(7), None));
    }
}
