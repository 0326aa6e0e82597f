//! Where receivers listen and senders connect: an address of a network, or the file of a Unix socket.
//!
//! Both ends of a Unix socket have to be processes of one user.
//!
//! **A file that is there already** is one that a killed process left, if no process takes a connection through it. It
//! is replaced then. A receiver holds the lock of a second file, `<path>.lock`, from before it looks until it is gone.
//! So of two that start at once one is refused. Both files are removed with the receiver; a socket that another program
//! has put there is left.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};
use crate::os::{self, Faults, io_text};
use crate::text::echo;
use crate::transfer::socket::options::Options;

const OPERATION: &str = "transfer socket";

/// What carries frames and rows, by its number in an opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// TCP: between hosts, or between processes of one that share no memory. Rows go behind their notices. Each byte of
    /// them is copied by the sender into the socket, and by the receiver out of it and into its checked memory. What
    /// goes over a network is neither hidden nor protected against changes; a tunnel has to do that.
    Tcp = 1,
    /// Shared memory, between processes of one host and user. Frames go over a Unix socket. A sender hands over its
    /// memory once for each connection, to be read only. Rows are copied once, into the receiver's checked memory. Of a
    /// sender that has died the memory lives until its connection is lost.
    Shm = 2,
}

/// Where a receiver listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// An address and a port. One of this host (loopback) is open to all users of the host without a token; one of a
    /// network needs a token.
    Tcp(SocketAddr),
    /// The path of a Unix socket, for shared memory.
    Shm(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Shm(path) => f.write_str(&echo(path.display())),
        }
    }
}

#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Unix(Bound),
}

/// A socket at a path. Its file is removed with it.
#[derive(Debug)]
pub struct Bound {
    socket: UnixListener,
    path: PathBuf,
    /// The file's device and number.
    file: (u64, u64),
    /// It is given back last.
    _claim: Claim,
}

impl Drop for Bound {
    fn drop(&mut self) {
        // It may be gone with its folder, and another program's file may be there.
        if fs::symlink_metadata(&self.path).is_ok_and(|of| (of.dev(), of.ino()) == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The lock of a path. Its file is removed before the lock is released.
#[derive(Debug)]
struct Claim {
    path: PathBuf,
    _lock: File,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Claim {
    /// Takes the lock of a path. It counts if its file still has the name: one that was removed holds nothing.
    fn take(of: &Path) -> io::Result<Claim> {
        let mut name = of.as_os_str().to_owned();
        name.push(".lock");
        let path = PathBuf::from(name);
        loop {
            let lock = File::options().write(true).create(true).truncate(false).open(&path)?;
            match lock.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(ErrorKind::AddrInUse.into()),
                Err(TryLockError::Error(error)) => return Err(error),
            }
            let held = lock.metadata()?;
            match fs::metadata(&path) {
                Ok(named) if (named.dev(), named.ino()) == (held.dev(), held.ino()) => {
                    return Ok(Claim { path, _lock: lock });
                }
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
}

fn failed<'a>(kind: Kind, step: &'static str, of: &'a Address) -> impl Fn(io::Error) -> Error + 'a {
    move |error| Error::new(kind, OPERATION).at(format!("{of}: {step}: {}", io_text(&error)))
}

fn check_user(socket: &OwnedFd, faults: &dyn Faults) -> Result<()> {
    let theirs = os::credentials(socket, faults)?.user;
    match theirs == os::user() {
        true => Ok(()),
        false => Err(Error::new(Kind::InvalidConfig, OPERATION)
            .at("a process of another user")
            .with("user", theirs)
            .with("own", os::user())
            .hint("run prefill and decode instances of a host as one user")),
    }
}

impl Address {
    /// The address that a text says: an IP address and a port such as `127.0.0.1:7000`, or a path.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a text that is no address and port.
    pub fn new(way: Way, text: &str) -> Result<Address> {
        match way {
            Way::Shm => Ok(Address::Shm(PathBuf::from(text))),
            Way::Tcp => text.parse().map(Address::Tcp).map_err(|_| {
                Error::new(Kind::InvalidConfig, OPERATION)
                    .at(format!("{}: no address and port", echo(text)))
                    .hint("give an IP address and a port, such as 127.0.0.1:7000")
            }),
        }
    }

    /// What listens there.
    pub const fn way(&self) -> Way {
        match self {
            Address::Tcp(_) => Way::Tcp,
            Address::Shm(_) => Way::Shm,
        }
    }

    /// Checks that the address may be used with these options.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for an address of a network without a token.
    pub(super) fn check(&self, options: &Options) -> Result<()> {
        match self {
            Address::Tcp(address) if !address.ip().to_canonical().is_loopback() && options.token.is_none() => {
                Err(Error::new(Kind::InvalidConfig, OPERATION)
                    .at(format!("{address}: an address of a network without a token"))
                    .hint("give both instances the same token, and use a tunnel where others can read or change it"))
            }
            _ => Ok(()),
        }
    }

    /// Begins to connect. None if no process takes connections there now.
    ///
    /// # Errors
    /// [`Kind::OsRefused`]; [`Kind::InvalidConfig`] for a process of another user.
    pub(super) fn connect(&self, faults: &dyn Faults) -> Result<Option<OwnedFd>> {
        let later = [ErrorKind::NotFound, ErrorKind::ConnectionRefused, ErrorKind::WouldBlock];
        let connected = match self {
            Address::Tcp(address) => os::connect_to(*address).and_then(|socket| {
                socket.set_nodelay(true)?;
                Ok(OwnedFd::from(socket))
            }),
            Address::Shm(path) => os::connect(path).map(OwnedFd::from),
        };
        match connected {
            Ok(socket) => {
                if let Address::Shm(_) = self {
                    check_user(&socket, faults)?;
                }
                Ok(Some(socket))
            }
            Err(error) if later.contains(&error.kind()) => Ok(None),
            Err(error) => Err(failed(Kind::OsRefused, "connect", self)(error)),
        }
    }

    /// Listens.
    ///
    /// # Errors
    /// [`Kind::Busy`] where another process listens; [`Kind::OsRefused`].
    pub(super) fn listen(&self) -> Result<Listener> {
        let bound = match self {
            Address::Tcp(address) => TcpListener::bind(address).map(Listener::Tcp),
            Address::Shm(path) => bind(path).map(Listener::Unix),
        };
        let listener = bound.map_err(|error| match error.kind() {
            ErrorKind::AddrInUse => failed(Kind::Busy, "listen", self)(error)
                .hint("end the process that listens there, or give this one an address of its own"),
            _ => failed(Kind::OsRefused, "listen", self)(error)
                .hint("pass an address of this host, or a short path in a folder that can be written"),
        })?;
        match &listener {
            Listener::Tcp(socket) => socket.set_nonblocking(true),
            Listener::Unix(of) => of.socket.set_nonblocking(true),
        }
        .map_err(failed(Kind::OsRefused, "listen", self))?;
        Ok(listener)
    }
}

/// Binds a path, in place of a file that a killed process left.
fn bind(path: &Path) -> io::Result<Bound> {
    let claim = Claim::take(path)?;
    let socket = match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            // A file that is no socket refuses connections too.
            let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
            match os::connect(path) {
                Err(refused) if is_socket && refused.kind() == ErrorKind::ConnectionRefused => {
                    fs::remove_file(path)?;
                    UnixListener::bind(path)
                }
                _ => Err(error),
            }
        }
        bound => bound,
    }?;
    let file = fs::symlink_metadata(path)?;
    Ok(Bound { socket, path: path.to_owned(), file: (file.dev(), file.ino()), _claim: claim })
}

impl Listener {
    /// A connection that was made, if there is one.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] where the system has no room for a connection now, as where this process may open no further
    /// file. All others cost that connection alone: [`Kind::InvalidConfig`] for a process of another user,
    /// [`Kind::OsRefused`].
    pub fn accept(&self, faults: &dyn Faults) -> Result<Option<OwnedFd>> {
        let accepted = match self {
            Listener::Tcp(socket) => socket.accept().and_then(|(socket, _)| {
                socket.set_nodelay(true)?;
                Ok(OwnedFd::from(socket))
            }),
            Listener::Unix(of) => of.socket.accept().map(|(socket, _)| OwnedFd::from(socket)),
        };
        match accepted {
            Ok(socket) => {
                if let Listener::Unix(..) = self {
                    check_user(&socket, faults)?;
                }
                Ok(Some(socket))
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                ) =>
            {
                Ok(None)
            }
            Err(error) => {
                let full = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
                let is_full = error.raw_os_error().is_some_and(|errno| full.contains(&errno));
                let kind = if is_full { Kind::Exhausted } else { Kind::OsRefused };
                let place = format!("accept: {}", io_text(&error));
                Err(Error::new(kind, OPERATION)
                    .at(place)
                    .hint("raise this process's limit of open files (ulimit -n)"))
            }
        }
    }

    /// Where it listens.
    pub fn address(&self) -> Option<Address> {
        match self {
            Listener::Tcp(socket) => socket.local_addr().ok().map(Address::Tcp),
            Listener::Unix(of) => Some(Address::Shm(of.path.clone())),
        }
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(socket) => socket.as_fd(),
            Listener::Unix(of) => of.socket.as_fd(),
        }
    }
}
