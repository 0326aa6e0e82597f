//! Whether a file is still what it was when it was opened.
//!
//! A trace is read, not mapped, so a file that is cut or grows under the reader is no fault; but half of one content
//! and half of another may pass for a third. So size and time of the last change are compared when all was read. A
//! file that is replaced under its name is another one: whoever has opened the old one reads that to its end.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use crate::error::{Error, Kind, Result};
use crate::os::io_text;

pub(super) fn unreadable_file(e: &io::Error) -> Error {
    Error::new(Kind::Io, "read trace").at(io_text(e))
}

/// See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    /// Size, seconds and nanoseconds; none of what is no regular file and cannot be asked.
    regular: Option<(u64, i64, i64)>,
}

impl Stamp {
    /// Of an open file as it is now.
    ///
    /// # Errors
    /// [`Kind::Io`], also for a directory.
    pub fn of(file: &File) -> Result<Stamp> {
        let state = file.metadata().map_err(|e| unreadable_file(&e))?;
        if state.is_dir() {
            return Err(Error::new(Kind::Io, "read trace")
                .at("this is a directory")
                .hint("name a trace file"));
        }
        let stamp = (state.size(), state.mtime(), state.mtime_nsec());
        Ok(Stamp { regular: state.is_file().then_some(stamp) })
    }

    /// Whether the file is as it was.
    ///
    /// # Errors
    /// [`Kind::Io`] where it is not.
    pub fn check(&self, file: &File) -> Result<()> {
        match Stamp::of(file)? == *self {
            true => Ok(()),
            false => Err(Error::new(Kind::Io, "read trace")
                .at("the file was changed while it was read")
                .hint("read it again once nothing writes it, or read a copy")),
        }
    }
}
