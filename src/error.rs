//! The error type of forebay: a kind, an operation, a place and numbers.
//!
//! An engine reacts to the [`Kind`]; a person reads the rest. The kinds are the status codes of the C interface. A
//! number never changes its meaning. An error owns its text only if the place is a file or a message of the operating
//! system, so errors on the step path allocate nothing.
//!
//! An error displays as one line that says what is wrong, where, and what to do:
//! `open: pool exhausted: host pages (wanted 12, free 3); close sequences or enlarge the pool`.
//!
//! A place may contain text from outside, such as a file name. An error shows `?` for control characters, which could
//! steer a terminal ([`text`](crate::text)). Code that builds such a place shortens the text with
//! [`text::echo`](crate::text::echo).

use std::borrow::Cow;
use std::fmt::{self, Write};

use crate::text::Harmless;

/// The result of every fallible call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error. Its number is the C status code (0 is success).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Kind {
    /// A declared value is invalid, by itself or together with another value.
    InvalidConfig = 1,
    /// A size or product does not fit its type.
    Overflow = 2,
    /// The operating system or the device has no more memory.
    OutOfMemory = 3,
    /// The operating system refused a call.
    OsRefused = 4,
    /// A pool, whose size is fixed at construction, has too little left.
    Exhausted = 5,
    /// Work in flight still uses the object; try again when that work has ended.
    Busy = 6,
    /// The sequence was closed, or the handle never named one.
    Closed = 7,
    /// A position, layer, slot or count is outside the declared range.
    OutOfRange = 8,
    /// The device failed, or a step's report contains an error, for example in its selections.
    DeviceFailed = 9,
    /// A file does not have the required format.
    BadFormat = 10,
    /// This build does not read this version.
    BadVersion = 11,
    /// Reading or writing a file failed.
    Io = 12,
    /// A step was abandoned, the work of a ticket never ran, or a callback returned a number that is no status.
    Cancelled = 13,
    /// The library broke one of its own invariants; always a defect of forebay.
    Internal = 14,
    /// The call does not fit the state of the sequence, step or stream that it names.
    InvalidState = 15,
    /// The device, its driver, or this build of forebay lacks the requested ability.
    Unsupported = 16,
    /// Another process of the group has ended, or no sign of life has come from it in time.
    PeerLost = 17,
    /// A deadline passed before the call was done.
    TimedOut = 18,
    /// Bytes do not have the digest that was stated for them.
    Corrupt = 19,
}

impl Kind {
    /// Every kind, in the order of its number.
    pub const ALL: [Kind; 19] = [
        Kind::InvalidConfig,
        Kind::Overflow,
        Kind::OutOfMemory,
        Kind::OsRefused,
        Kind::Exhausted,
        Kind::Busy,
        Kind::Closed,
        Kind::OutOfRange,
        Kind::DeviceFailed,
        Kind::BadFormat,
        Kind::BadVersion,
        Kind::Io,
        Kind::Cancelled,
        Kind::Internal,
        Kind::InvalidState,
        Kind::Unsupported,
        Kind::PeerLost,
        Kind::TimedOut,
        Kind::Corrupt,
    ];

    /// The kind in words.
    pub const fn describe(self) -> &'static str {
        match self {
            Kind::InvalidConfig => "invalid configuration",
            Kind::Overflow => "size overflow",
            Kind::OutOfMemory => "out of memory",
            Kind::OsRefused => "refused by the operating system",
            Kind::Exhausted => "pool exhausted",
            Kind::Busy => "busy",
            Kind::Closed => "closed",
            Kind::OutOfRange => "out of range",
            Kind::DeviceFailed => "device failed",
            Kind::BadFormat => "malformed input",
            Kind::BadVersion => "unsupported version",
            Kind::Io => "input or output failed",
            Kind::Cancelled => "cancelled",
            Kind::Internal => "internal error",
            Kind::InvalidState => "wrong state",
            Kind::Unsupported => "not supported",
            Kind::PeerLost => "peer lost",
            Kind::TimedOut => "timed out",
            Kind::Corrupt => "corrupt data",
        }
    }

    /// What the caller can do about an error of this kind.
    pub const fn hint(self) -> &'static str {
        match self {
            Kind::InvalidConfig => "correct the named value",
            Kind::Overflow => "declare smaller sizes",
            Kind::OutOfMemory => "declare smaller pools or free memory",
            Kind::OsRefused => "raise the limit that the system names, or run without that option",
            Kind::Exhausted => "close sequences or enlarge the pool",
            Kind::Busy => "retire the work in flight, then call again",
            Kind::Closed => "open a new sequence",
            Kind::OutOfRange => "pass a value inside the declared range",
            Kind::DeviceFailed => "discard this step's tokens and close the sequence",
            Kind::BadFormat => "check the file's origin; docs/trace-format.md describes the trace format",
            Kind::BadVersion => "convert the file or use a matching release",
            Kind::Io => "check path, permissions and free space",
            Kind::Cancelled => "submit the work again if you still need it",
            Kind::Internal => "please report this with the whole message",
            Kind::InvalidState => "make the missing call first",
            Kind::Unsupported => "do without it, or use a device and a driver that support it",
            Kind::PeerLost => "restart that process, then connect again",
            Kind::TimedOut => "see what the other side waits for, or allow more time",
            Kind::Corrupt => "do not use the data; read or transfer it again",
        }
    }
}

/// The most named numbers of an error.
const NUMBERS: usize = 4;

/// An error: kind, operation, place and numbers. See the module's head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: Kind,
    operation: &'static str,
    place: Cow<'static, str>,
    numbers: [(&'static str, u64); NUMBERS],
    count: u8,
    hint: Option<&'static str>,
}

impl Error {
    /// An error of `kind` in `operation` (the public call, or what a module was doing).
    pub const fn new(kind: Kind, operation: &'static str) -> Self {
        Error { kind, operation, place: Cow::Borrowed(""), numbers: [("", 0); NUMBERS], count: 0, hint: None }
    }

    /// Sets the place: a field, a pool, a file.
    #[must_use]
    pub fn at(mut self, place: impl Into<Cow<'static, str>>) -> Self {
        self.place = place.into();
        self
    }

    /// Adds a named number. An error keeps the first four and drops further ones.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<u64>) -> Self {
        if let Some(place) = self.numbers.get_mut(usize::from(self.count)) {
            *place = (name, value.into());
            self.count += 1;
        }
        self
    }

    /// Replaces the kind's hint with a more specific one.
    #[must_use]
    pub const fn hint(mut self, hint: &'static str) -> Self {
        self.hint = Some(hint);
        self
    }

    /// What to do: the last part of the displayed line, after the `;`.
    pub fn advice(&self) -> &'static str {
        self.hint.unwrap_or_else(|| self.kind.hint())
    }

    /// The kind.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The operation that failed.
    pub const fn operation(&self) -> &'static str {
        self.operation
    }

    /// The place; empty if the operation alone is specific enough.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The named numbers, in the order in which they were added.
    pub fn numbers(&self) -> &[(&'static str, u64)] {
        &self.numbers[..usize::from(self.count)]
    }

    /// The value of the number called `name`, if the error has it.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.numbers().iter().find(|(n, _)| *n == name).map(|(_, v)| *v)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.kind.describe())?;
        if !self.place.is_empty() {
            f.write_str(": ")?;
            Harmless(f).write_str(&self.place)?;
        }
        for (i, (name, value)) in self.numbers().iter().enumerate() {
            let open = if i == 0 { " (" } else { ", " };
            write!(f, "{open}{name} {value}")?;
        }
        if self.count > 0 {
            f.write_str(")")?;
        }
        write!(f, "; {}", self.advice())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_kinds_are_dense_and_stable() {
        for (i, kind) in Kind::ALL.iter().enumerate() {
            assert_eq!(*kind as usize, i + 1);
            assert!(!kind.describe().is_empty() && !kind.hint().is_empty());
        }
    }

    #[test]
    fn display_says_what_is_wrong_where_and_what_to_do() {
        let e =
            Error::new(Kind::Exhausted, "open").at("host pages").with("wanted", 12_u32).with("free", 3_u32);
        assert_eq!(
            e.to_string(),
            "open: pool exhausted: host pages (wanted 12, free 3); close sequences or enlarge the pool"
        );
        assert_eq!(e.number("free"), Some(3));
        assert_eq!(e.advice(), "close sequences or enlarge the pool");
        assert_eq!(e.hint("wait").advice(), "wait");
    }

    #[test]
    fn a_place_that_others_wrote_stays_in_its_line() {
        let e = Error::new(Kind::Io, "read").at("a\n\u{1b}[2J\u{202e}b".to_owned()).hint("look");
        assert_eq!(e.to_string(), "read: input or output failed: a??[2J?b; look");
    }

    #[test]
    fn a_fifth_number_is_dropped() {
        let e = (0_u32..6).fold(Error::new(Kind::Busy, "x"), |e, i| e.with("n", i));
        assert_eq!(e.numbers().len(), 4);
    }
}
