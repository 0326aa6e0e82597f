//! The wall: every entry runs behind it, and a panic becomes a status instead of leaving the library.
//!
//! A panic in a call that may change a cache leaves that cache half-changed, so the cache is broken from
//! then on: it answers every call with `FB_INTERNAL`, and can only be destroyed. Calls that cannot change
//! anything only answer that status.

use std::panic::{AssertUnwindSafe, catch_unwind};

use forebay::{Error, Kind, Result};

use crate::status::FbStatus;

/// Runs `call`; a panic in it answers an error.
pub(crate) fn wall<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(answer) => answer,
        Err(payload) => {
            // Dropping a payload may panic again.
            std::mem::forget(payload);
            Err(panicked())
        }
    }
}

/// As [`wall`], for an entry: the status alone.
pub(crate) fn status(call: impl FnOnce() -> Result<()>) -> FbStatus {
    wall(call).map_or_else(|error| error.kind().into(), |()| FbStatus::FbOk)
}

fn panicked() -> Error {
    Error::new(Kind::Internal, "call").at("a rule of the library was broken")
}

/// Whether this is the wall's own error: the call has not come to its end.
pub(crate) fn is_panic(error: &Error) -> bool {
    *error == panicked()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status() {
        assert_eq!(status(|| Ok(())), FbStatus::FbOk);
        assert_eq!(status(|| Err(Error::new(Kind::Busy, "x"))), FbStatus::FbBusy);
        assert_eq!(status(|| panic!("shown on standard error: this test means to")), FbStatus::FbInternal);
        assert!(is_panic(&wall::<()>(|| panic!("as above")).unwrap_err()));
        assert!(!is_panic(&Error::new(Kind::Internal, "x")));
    }
}
