//! A descriptor that one thread makes readable for another.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use crate::error::{Error, Kind, Result};
use crate::os::io_text;

/// A pair of sockets: the one is readable from a call of [`Wake::wake`] until [`Wake::clear`].
#[derive(Debug)]
pub struct Wake {
    to: UnixStream,
    from: UnixStream,
}

impl Wake {
    /// # Errors
    /// [`Kind::OsRefused`].
    pub fn new() -> Result<Wake> {
        let made = UnixStream::pair().and_then(|(to, from)| {
            to.set_nonblocking(true)?;
            from.set_nonblocking(true)?;
            Ok(Wake { to, from })
        });
        made.map_err(|error| Error::new(Kind::OsRefused, "transfer thread").at(io_text(&error)))
    }

    /// Whether it is readable now. If the system has no memory for the byte, it is not.
    pub fn wake(&self) -> bool {
        loop {
            match (&self.to).write(&[1]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // A socket that takes no more bytes is readable at its other end already.
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
                Ok(_) => return true,
            }
        }
    }

    /// Makes it unreadable. What was said before has to be looked for after this call.
    pub fn clear(&self) {
        let mut bytes = [0; 64];
        loop {
            match (&self.from).read(&mut bytes) {
                Ok(read) if read == bytes.len() => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => return,
            }
        }
    }

    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.from.as_fd()
    }
}
