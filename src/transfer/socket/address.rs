//! Where receivers listen and senders connect: an address of a network, or the file of a Unix socket.
//!
//! Both ends of a Unix socket have to be processes of one user.
//!
//! **A file that is there already** is one that a killed process left, if no process takes a connection through it. It
//! is replaced then. Two processes that find the same such file at the same moment may both replace it, and the first
//! one is found by no sender: each receiver needs a path of its own.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};
use crate::os::{self, Faults, io_text};
use crate::text::echo;
use crate::transfer::socket::options::Options;

const OPERATION: &str = "transfer socket";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            // It may be gone with its folder.
            let _ = fs::remove_file(path);
        }
    }
}

fn failed<'a>(kind: Kind, step: &'static str, of: &'a Address) -> impl Fn(io::Error) -> Error + 'a {
    move |error| {
        let name = match of {
            Address::Tcp(address) => address.to_string(),
            Address::Unix(path) => echo(path.display()),
        };
        Error::new(kind, OPERATION).at(format!("{name}: {step}: {}", io_text(&error)))
    }
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
    /// Checks that the address may be used with these options.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for an address of a network without a token.
    pub fn check(&self, options: &Options) -> Result<()> {
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
    pub fn connect(&self, faults: &dyn Faults) -> Result<Option<OwnedFd>> {
        let later = [ErrorKind::NotFound, ErrorKind::ConnectionRefused, ErrorKind::WouldBlock];
        let connected = match self {
            Address::Tcp(address) => os::connect_to(*address).and_then(|socket| {
                socket.set_nodelay(true)?;
                Ok(OwnedFd::from(socket))
            }),
            Address::Unix(path) => os::connect(path).map(OwnedFd::from),
        };
        match connected {
            Ok(socket) => {
                if let Address::Unix(_) = self {
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
    pub fn listen(&self) -> Result<Listener> {
        let bound = match self {
            Address::Tcp(address) => TcpListener::bind(address).map(Listener::Tcp),
            Address::Unix(path) => bind(path).map(|socket| Listener::Unix(socket, path.clone())),
        };
        let listener = bound.map_err(|error| match error.kind() {
            ErrorKind::AddrInUse => failed(Kind::Busy, "listen", self)(error)
                .hint("end the process that listens there, or give this one an address of its own"),
            _ => failed(Kind::OsRefused, "listen", self)(error)
                .hint("pass an address of this host, or a short path in a folder that can be written"),
        })?;
        match &listener {
            Listener::Tcp(socket) => socket.set_nonblocking(true),
            Listener::Unix(socket, _) => socket.set_nonblocking(true),
        }
        .map_err(failed(Kind::OsRefused, "listen", self))?;
        Ok(listener)
    }
}

/// Binds a path, in place of a file that a killed process left.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
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
    }
}

impl Listener {
    /// A connection that was made, if there is one.
    ///
    /// # Errors
    /// [`Kind::OsRefused`], as where this process may open no further file; [`Kind::InvalidConfig`] for a process of
    /// another user, which is not connected then.
    pub fn accept(&self, faults: &dyn Faults) -> Result<Option<OwnedFd>> {
        let accepted = match self {
            Listener::Tcp(socket) => socket.accept().and_then(|(socket, _)| {
                socket.set_nodelay(true)?;
                Ok(OwnedFd::from(socket))
            }),
            Listener::Unix(socket, _) => socket.accept().map(|(socket, _)| OwnedFd::from(socket)),
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
            Err(error) => Err(Error::new(Kind::OsRefused, OPERATION)
                .at(format!("accept: {}", io_text(&error)))
                .hint("raise this process's limit of open files (ulimit -n)")),
        }
    }

    /// The address of a network that it listens on.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Listener::Tcp(socket) => socket.local_addr().ok(),
            Listener::Unix(..) => None,
        }
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(socket) => socket.as_fd(),
            Listener::Unix(socket, _) => socket.as_fd(),
        }
    }
}
