//! What an end of a socket fabric is told at its start: times, bounds, and the token.

use std::fmt;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::os::{Faults, NoFaults};
use crate::sync::Arc;
use crate::transfer::frames::FRAME_MAX;

/// The fewest bytes of a token.
pub const TOKEN_MIN: usize = 16;

/// A secret that both sides have. Only a key that is derived from it is kept, and it is never shown.
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// From at least [`TOKEN_MIN`] random bytes.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for fewer bytes: such a secret can be guessed.
    pub fn new(secret: &[u8]) -> Result<Token> {
        if secret.len() < TOKEN_MIN {
            return Err(Error::new(Kind::InvalidConfig, "transfer token")
                .at("a token that can be guessed")
                .with("bytes", secret.len() as u64)
                .with("least", TOKEN_MIN as u64)
                .hint("draw a token of at least 16 random bytes"));
        }
        Ok(Token(blake3::derive_key("forebay transfer token 1", secret)))
    }

    /// The key that proofs are made with.
    pub(super) const fn key(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// What an end is told at its start: times, bounds, and the token. Both ends of a connection need the same token; all
/// else each end decides for itself.
#[derive(Clone, Debug)]
pub struct Options {
    /// What each side has to prove that it knows. Without one only addresses of this host are taken.
    pub token: Option<Token>,
    /// After how long without another byte to send a sign of life is sent.
    pub alive: Duration,
    /// After how long without a byte from the other end the connection is lost; longer than the other end's `alive`.
    /// Also after how long in which the other end takes nothing of what waits for it. Where this end was not polled
    /// for more than half of it, half of it is added once.
    pub lost: Duration,
    /// How long an opening may take.
    pub opening: Duration,
    /// The most connections that have not opened. One more drops the oldest.
    pub unopened: usize,
    /// The most open connections. One more is closed at once.
    pub links: usize,
    /// The most bytes that wait to be sent on a connection, rows included. One frame with its rows may be longer. At
    /// least four times [`FRAME_MAX`].
    pub queue: usize,
    /// The most bytes behind a frame of a stream, above
    /// [`notice_bytes`](crate::transfer::sender::Options::notice_bytes) of every sender.
    pub rows_max: usize,
    /// What the system is made to refuse, in tests: nothing by default.
    pub faults: Arc<dyn Faults>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            token: None,
            alive: Duration::from_secs(1),
            lost: Duration::from_secs(10),
            opening: Duration::from_secs(5),
            unopened: 64,
            links: 1024,
            queue: 4 << 20,
            rows_max: 64 << 20,
            faults: Arc::new(NoFaults),
        }
    }
}

impl Options {
    /// # Errors
    /// [`Kind::InvalidConfig`] for values with which no connection works.
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |place| Err(Error::new(Kind::InvalidConfig, "transfer socket").at(place));
        if self.alive.is_zero() || self.lost <= self.alive {
            return wrong("alive and lost: zero, or lost is not longer than alive");
        }
        if self.queue < 4 * FRAME_MAX {
            return wrong("queue: less than four frames");
        }
        if self.unopened == 0 || self.links == 0 || self.opening.is_zero() {
            return wrong("unopened, links or opening: zero");
        }
        // The length behind a frame has 4 bytes.
        if u32::try_from(self.rows_max).is_err() {
            return wrong("rows_max: more than 4 GiB");
        }
        Ok(())
    }
}
