//! The boundary that no panic crosses: every call runs inside it, and a panic becomes a status.
//!
//! A panic in a call that may change an object leaves the object half-changed. The object is then broken: it returns
//! `FB_INTERNAL` for every call, and can only be destroyed. After a panic in a call that cannot change the object, only
//! that call returns this status.

use std::panic::{AssertUnwindSafe, catch_unwind};

use forebay::{Error, Kind, Result};

/// Runs `call`; returns nothing if it panicked.
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

/// Runs `call`; turns a panic into an error.
pub(crate) fn wall<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    caught(call).unwrap_or_else(|| Err(panicked()))
}

/// The error of a call that panicked.
pub(crate) fn panicked() -> Error {
    Error::new(Kind::Internal, "call").at("the library broke one of its own rules")
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
