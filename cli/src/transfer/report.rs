//! What an end reports, and how it tells the process that started it: one line of JSON each.

use forebay::{Error, Kind, Result};
use serde::{Deserialize, Serialize};

use crate::present::{json, output};

/// A line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "lowercase")]
pub enum Line {
    /// The receiver listens.
    Listening {
        at: String,
    },
    /// A sender has connected.
    Connected,
    /// A connection did not open.
    Unopened {
        why: String,
    },
    Sent(Sent),
    Received(Received),
}

impl Line {
    /// Prints it.
    ///
    /// # Errors
    /// [`Kind::Io`].
    pub fn print(&self) -> Result<()> {
        output::print(&json::line(self)?)
    }
}

/// Why a transfer failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// In a word or two.
    pub reason: String,
    /// What is known besides, as a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl Failure {
    pub fn new(reason: &str) -> Failure {
        Failure { reason: reason.to_owned(), detail: None }
    }

    /// From what an end was told.
    pub fn of(error: &Error) -> Failure {
        Failure { reason: word(error.kind()).to_owned(), detail: Some(sentence(error)) }
    }

    /// Of a lost connection, with what is known about it.
    pub fn lost(why: Option<&Error>) -> Failure {
        match why {
            Some(error) if !matches!(error.kind(), Kind::TimedOut | Kind::PeerLost) => Failure::of(error),
            _ => Failure { detail: why.map(sentence), ..Failure::new(word(Kind::PeerLost)) },
        }
    }
}

/// What an error says, without its hint, which is for a caller that could do something else.
fn sentence(error: &Error) -> String {
    let text = error.to_string();
    text.split_once("; ").map_or(text.as_str(), |(what, _)| what).to_owned()
}

/// A reason in a word or two.
pub const fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Cancelled => "aborted",
        Kind::PeerLost => "peer lost",
        Kind::TimedOut => "timed out",
        Kind::Corrupt => "corrupt",
        Kind::InvalidConfig | Kind::BadFormat | Kind::OutOfRange => "the ends do not agree",
        _ => "failed",
    }
}

/// What a sender reports. Times are in nanoseconds of the host's clock; those by layer are of the first request.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Sent {
    /// When the computation began.
    pub began: Option<u64>,
    pub computed: Vec<Option<u64>>,
    pub told: Vec<Option<u64>>,
    /// Runs that were told, those that were told again included.
    pub runs: u64,
    /// When all rows of the second request were told.
    pub alone: Option<u64>,
    pub failure: Option<Failure>,
}

/// What a receiver reports. Times as in [`Sent`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Received {
    pub stored: Vec<Option<u64>>,
    /// When each of the two requests was whole.
    pub whole: [Option<u64>; 2],
    /// Of the first request.
    pub bytes: u64,
    pub runs: u64,
    /// Whether every byte of the requests that became whole is the one that was sent.
    pub verified: bool,
    pub failure: Option<Failure>,
}
