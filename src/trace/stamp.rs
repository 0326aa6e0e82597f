//! Detects whether a file has changed since it was opened.
//!
//! A trace is read, not mapped, so truncation or growth during reading causes no fault. But half of one content
//! and half of another may look like a valid third. So size and modification time are compared after reading. A
//! file that is replaced under its name is another file: a reader that has opened the old one reads that to its end.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use crate::error::{Error, Kind, Result};
use crate::os::io_text;

pub(super) fn unreadable_file(e: &io::Error) -> Error {
    Error::new(Kind::Io, "read trace").at(io_text(e))
}

/// The stamp; see the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    /// Size, seconds and nanoseconds; none for a file that is not regular.
    regular: Option<(u64, i64, i64)>,
}

impl Stamp {
    /// The stamp of an open file.
    ///
    /// # Errors
    /// [`Kind::Io`], also for a directory.
    pub fn of(file: &File) -> Result<Stamp> {
        let state = file.metadata().map_err(|e| unreadable_file(&e))?;
        if state.is_dir() {
            return Err(Error::new(Kind::Io, "read trace")
                .at("this is a directory")
                .hint("pass a trace file"));
        }
        let stamp = (state.size(), state.mtime(), state.mtime_nsec());
        Ok(Stamp { regular: state.is_file().then_some(stamp) })
    }

    /// Checks that the file has not changed.
    ///
    /// # Errors
    /// [`Kind::Io`] if it has.
    pub fn check(&self, file: &File) -> Result<()> {
        match Stamp::of(file)? == *self {
            true => Ok(()),
            false => Err(Error::new(Kind::Io, "read trace")
                .at("the file was changed while it was read")
                .hint("read it again once nothing writes it, or read a copy")),
        }
    }
}
