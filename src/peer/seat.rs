//! A rank's place in the folder where its group meets: the lock that says that the rank is taken, and the socket that
//! others connect to. Both are files that are named after group and rank.
//!
//! **The lock** is held for as long as the sessions live, and the system releases it when the process ends, however it
//! ends. So a second process of a rank is refused while the first one lives, and never after. No process connects in
//! order to see whether a rank lives: the rank would take that connection for one of its group. Only the lock's holder
//! touches the socket, so a socket that is there already is one that a killed process left.
//!
//! **Races.** A process removes its lock's file when it gives the lock back. Another may have opened that file before;
//! its lock would hold a file that no third process finds. So a lock counts if its file still has the name, and is
//! taken anew otherwise.
//!
//! **What it does not do.** A process that was forked off without a new program shares the lock, and keeps it when its
//! parent has died.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use super::hello::Hello;
use crate::error::{Error, Kind, Result};
use crate::os::{self, io_text};
use crate::text::echo;

/// The operation that errors of a meeting name.
pub(super) const OPERATION: &str = "meet the group's processes";

/// A rank that this process has taken. Its file is removed with it.
#[derive(Debug)]
pub(super) struct Seat {
    folder: PathBuf,
    group: u64,
    rank: u32,
    path: PathBuf,
    _lock: File,
}

/// A socket that others connect to. Its file is removed with it.
#[derive(Debug)]
pub(super) struct Listener {
    socket: UnixListener,
    path: PathBuf,
}

impl Drop for Seat {
    fn drop(&mut self) {
        // It may be gone with its folder.
        let _ = fs::remove_file(&self.path);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn named(folder: &Path, group: u64, rank: u32, ending: &str) -> PathBuf {
    folder.join(format!("forebay-{group}-{rank}.{ending}"))
}

fn failed<'a>(step: &'static str, path: &'a Path) -> impl Fn(std::io::Error) -> Error + 'a {
    move |error| {
        let place = format!("{}: {step}: {}", echo(path.display()), io_text(&error));
        Error::new(Kind::Io, OPERATION)
            .at(place)
            .hint("pass a folder with a short path that every process of the group can write")
    }
}

impl Seat {
    /// Takes this process's rank in `folder`.
    ///
    /// # Errors
    /// [`Kind::Busy`] for a second process of this rank; [`Kind::Io`] for a folder that takes no file or no lock.
    pub fn take(folder: &Path, own: &Hello) -> Result<Seat> {
        let path = named(folder, own.group, own.rank, "lock");
        loop {
            let open = File::options().write(true).create(true).truncate(false).open(&path);
            let lock = open.map_err(failed("open the rank's lock", &path))?;
            match lock.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::new(Kind::Busy, OPERATION)
                        .at("a second process of this rank")
                        .with("rank", own.rank)
                        .with("group", own.group)
                        .hint("give each process of a group a rank of its own"));
                }
                Err(TryLockError::Error(error)) => return Err(failed("lock the rank", &path)(error)),
            }
            let held = lock.metadata().map_err(failed("lock the rank", &path))?;
            match fs::metadata(&path) {
                Ok(named) if (named.dev(), named.ino()) == (held.dev(), held.ino()) => {
                    let (folder, group, rank) = (folder.to_owned(), own.group, own.rank);
                    return Ok(Seat { folder, group, rank, path, _lock: lock });
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(failed("lock the rank", &path)(error)),
            }
        }
    }

    /// Listens in the folder for other ranks.
    ///
    /// # Errors
    /// [`Kind::Io`] for a folder that takes no socket.
    pub fn listen(&self) -> Result<Listener> {
        let path = named(&self.folder, self.group, self.rank, "sock");
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(failed("remove a socket that was left behind", &path)(error));
            }
            _ => {}
        }
        let socket = UnixListener::bind(&path).map_err(failed("listen", &path))?;
        socket.set_nonblocking(true).map_err(failed("listen", &path))?;
        Ok(Listener { socket, path })
    }

    /// A connection to another rank of the group, if it listens and has room for one. Never blocks: a rank that was
    /// stopped takes no connections, and its queue may be full.
    ///
    /// # Errors
    /// [`Kind::Io`] with the rank.
    pub fn connected(&self, rank: u32) -> Result<Option<UnixStream>> {
        let path = named(&self.folder, self.group, rank, "sock");
        match os::connect(&path) {
            Ok(socket) => Ok(Some(socket)),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(failed("connect", &path)(error).with("rank", rank)),
        }
    }
}

impl Listener {
    /// Takes the name away, and returns the processes that have connected before.
    pub fn shut(self) -> Vec<UnixStream> {
        // Its folder may be gone.
        let _ = fs::remove_file(&self.path);
        std::iter::from_fn(|| self.next().ok().flatten()).collect()
    }

    /// The next process that has connected.
    pub fn next(&self) -> Result<Option<UnixStream>> {
        loop {
            match self.socket.accept() {
                Ok((socket, _)) => return Ok(Some(socket)),
                // The next one may wait behind a process that has connected and gone.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(failed("accept", &self.path)(error)),
            }
        }
    }
}
