//! How a system call is answered: by its result, or by the refusal of a fault or of the system.
//!
//! Both refusals look the same to the code that made the call: the call's name and an errno. That code falls back from
//! some refusals ([`super::Fallback`]), and turns the others into errors.

use std::{fmt, io};

use nix::errno::Errno;

use super::faults::{Call, Faults};
use crate::error::{Error, Kind};

/// A refused call: its name and its errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) name: &'static str,
    pub(super) errno: i32,
}

/// The result of a system call.
pub(super) type OsResult<T> = std::result::Result<T, Refusal>;

impl Refusal {
    /// The refusal of call `name`. Where nix has no name for the number, errno still holds it.
    pub(super) fn of(name: &'static str, errno: Errno) -> Self {
        let number = if errno == Errno::UnknownErrno { Errno::last_raw() } else { errno as i32 };
        Refusal { name, errno: number }
    }

    /// As [`Refusal::of`], for memmap2, which itself refuses only sizes that no address reaches.
    pub(super) fn io(name: &'static str, error: &io::Error) -> Self {
        Refusal { name, errno: error.raw_os_error().unwrap_or(libc::ENOMEM) }
    }

    /// The refusal as an error: out of memory where the system says so, refused otherwise.
    pub(super) fn error(self, operation: &'static str) -> Error {
        let kind = if self.errno == libc::ENOMEM { Kind::OutOfMemory } else { Kind::OsRefused };
        Error::new(kind, operation).at(self.to_string())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, errno_text(self.errno))
    }
}

/// The text of an I/O error, without the system's number.
pub fn io_text(error: &io::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" (os error") {
        Some((words, _)) => words.to_owned(),
        None => text,
    }
}

/// The system's text for an errno, without its number.
pub(super) fn errno_text(errno: i32) -> String {
    io_text(&io::Error::from_raw_os_error(errno))
}

/// Asks the faults whether `call`, which the system calls `name`, may be made.
pub(super) fn ask(faults: &dyn Faults, call: Call, name: &'static str) -> OsResult<()> {
    match faults.before(call) {
        None => Ok(()),
        Some(errno) => Err(Refusal { name, errno }),
    }
}

/// The result of call `name` from nix, or from [`Errno::result`] for a call that nix lacks.
pub(super) fn answer<T>(name: &'static str, returned: nix::Result<T>) -> OsResult<T> {
    returned.map_err(|errno| Refusal::of(name, errno))
}
