//! What comes to a receiver without forebay: a raw socket, and the bytes of an opening as they are documented.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use forebay::os::{self, NoFaults};

use crate::rig::Address;

/// A connection of a stranger.
pub enum Stranger {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stranger {
    pub fn new(at: &Address) -> Stranger {
        let stranger = match at {
            Address::Tcp(address) => Stranger::Tcp(TcpStream::connect(address).unwrap()),
            Address::Shm(path) => Stranger::Unix(UnixStream::connect(path).unwrap()),
        };
        match &stranger {
            Stranger::Tcp(socket) => socket.set_nonblocking(true).unwrap(),
            Stranger::Unix(socket) => socket.set_nonblocking(true).unwrap(),
        }
        stranger
    }

    pub fn is_unix(&self) -> bool {
        matches!(self, Stranger::Unix(_))
    }

    /// Writes what the socket takes. Returns how much; none if it is closed.
    pub fn write(&mut self, bytes: &[u8]) -> Option<usize> {
        let written = match self {
            Stranger::Tcp(socket) => socket.write(bytes),
            Stranger::Unix(socket) => socket.write(bytes),
        };
        match written {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Some(0),
            Err(_) => None,
        }
    }

    /// Writes all of a few bytes, perhaps with a descriptor.
    pub fn say(&mut self, bytes: &[u8], descriptor: Option<&OwnedFd>) {
        let descriptor = descriptor.map(AsFd::as_fd);
        let sent = match self {
            Stranger::Tcp(socket) => os::send(&*socket, bytes, descriptor, &NoFaults),
            Stranger::Unix(socket) => os::send(&*socket, bytes, descriptor, &NoFaults),
        };
        assert_eq!(sent.unwrap(), bytes.len());
    }

    /// Appends what came. Returns whether the connection is open.
    pub fn read(&mut self, into: &mut Vec<u8>) -> bool {
        let mut buffer = [0; 4096];
        loop {
            let read = match self {
                Stranger::Tcp(socket) => socket.read(&mut buffer),
                Stranger::Unix(socket) => socket.read(&mut buffer),
            };
            match read {
                Ok(0) => return false,
                Ok(bytes) => into.extend(&buffer[..bytes]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(_) => return false,
            }
        }
    }

    /// Reads until so many bytes came or the connection is closed, while `poll` serves the other end.
    pub fn await_bytes(&mut self, bytes: usize, mut poll: impl FnMut()) -> Vec<u8> {
        let mut came = Vec::new();
        for _ in 0..20_000 {
            poll();
            if !self.read(&mut came) || came.len() >= bytes {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        came
    }
}

/// A sender's hello.
pub fn hello(version: u32, side: u8, way: u8, token: u8) -> Vec<u8> {
    let mut hello = b"FOREBAYC".to_vec();
    hello.extend(version.to_le_bytes());
    hello.extend([side, way, token, 0]);
    hello.extend([0x5A; 32]);
    hello
}

/// A record: its lengths, its kind, and what follows.
pub fn record(kind: u8, own: &[u8], behind: u32) -> Vec<u8> {
    let mut record = (own.len() as u32).to_le_bytes().to_vec();
    record.extend(behind.to_le_bytes());
    record.extend([kind, 0, 0, 0]);
    record.extend(own);
    record
}

/// Opens a connection without a token as a sender does, up to the receiver's proof.
pub fn opened(at: &Address, mut poll: impl FnMut()) -> Stranger {
    let mut stranger = Stranger::new(at);
    let way = if stranger.is_unix() { 2 } else { 1 };
    stranger.say(&hello(1, 1, way, 0), None);
    let theirs = stranger.await_bytes(48, &mut poll);
    assert_eq!(theirs[..16], [b"FOREBAYC", &[1, 0, 0, 0, 2, way, 0, 0][..]].concat()[..]);
    assert_eq!(theirs.len(), 48);
    stranger.say(&record(1, &[0; 32], 0), None);
    assert_eq!(stranger.await_bytes(44, poll), record(1, &[0; 32], 0));
    stranger
}
