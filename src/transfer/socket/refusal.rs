//! Why an end refuses a connection, in a byte, so that both ends can say it.

use crate::error::{Error, Kind};

const OPERATION: &str = "transfer connection";

/// The other end knows another token, or none. One message for all: it tells a stranger nothing.
pub const TOKEN: u8 = 1;
/// The memory that was handed over is not what was said of it.
pub const MEMORY: u8 = 2;
/// Anything else.
pub const OTHER: u8 = 3;
/// The end has as many connections as it may.
pub const FULL: u8 = 4;

/// The error of an end that was refused.
pub fn error(why: u8) -> Error {
    match why {
        TOKEN => token(),
        MEMORY => Error::new(Kind::BadFormat, OPERATION)
            .at("the other end cannot use this end's memory")
            .hint("ask for shared memory of this release, and see the other end's error"),
        FULL => Error::new(Kind::Exhausted, OPERATION)
            .at("the other end has as many connections as it may")
            .hint("raise its links"),
        _ => Error::new(Kind::PeerLost, OPERATION)
            .at("the other end has refused the connection")
            .hint("see the other end's error"),
    }
}

/// The error of an end that has as many connections as it may.
pub fn full(links: usize) -> Error {
    Error::new(Kind::Exhausted, OPERATION)
        .at("connections of an end")
        .with("links", links as u64)
        .hint("raise links")
}

/// The error of both ends whose tokens differ.
pub fn token() -> Error {
    Error::new(Kind::InvalidConfig, OPERATION)
        .at("the two ends do not have the same token")
        .hint("give both instances the same token, or neither of them one")
}
