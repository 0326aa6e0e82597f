//! A fabric under test.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::transfer::fabric::{ReceiverFabric, SenderFabric};
use crate::transfer::runs::Run;

/// A fabric under test. Its ends connect to all ends of the other side by themselves.
pub trait Subject {
    /// A sender's end.
    type Sender: SenderFabric;
    /// A receiver's end.
    type Receiver: ReceiverFabric;

    /// A new sender's end. Its memory has room for [`ORIGINS`](crate::transfer::conformance::ORIGINS) origins of
    /// [`TOKENS`](crate::transfer::conformance::TOKENS) tokens each, in pages of the first of
    /// [`sides`](crate::transfer::conformance::sides). Dropping it ends its process, or does what that does.
    ///
    /// # Errors
    /// Any: the check fails.
    fn sender(&mut self) -> Result<Self::Sender>;

    /// A new receiver's end. If its writers are from afar, it has
    /// [`LANDING`](crate::transfer::conformance::LANDING) landing pages of the second of
    /// [`sides`](crate::transfer::conformance::sides).
    ///
    /// # Errors
    /// Any: the check fails.
    fn receiver(&mut self) -> Result<Self::Receiver>;

    /// What the suite's nth origin, below [`ORIGINS`](crate::transfer::conformance::ORIGINS), is called by the fabric:
    /// where the memory of a part begins, if places are computed from it.
    fn origin(&self, nth: u64) -> u64 {
        nth
    }

    /// Puts a run's pieces, one after another in `bytes`, where an origin says in a sender's memory.
    ///
    /// # Errors
    /// Any: the check fails.
    fn put(&mut self, sender: &mut Self::Sender, origin: u64, run: &Run, bytes: &[u8]) -> Result<()>;

    /// Reads a run's pieces, one after another, from a landing page of a receiver. A fabric whose receivers fetch is
    /// never asked.
    ///
    /// # Errors
    /// Any: the check fails.
    fn landed(&mut self, receiver: &mut Self::Receiver, page: u32, run: &Run, into: &mut [u8]) -> Result<()>;

    /// Lets time pass: until something that is on its way has moved on, or for about a millisecond. Returns the time
    /// since any beginning.
    fn wait(&mut self) -> Duration;

    /// How long something that must come may take.
    fn limit(&self) -> Duration {
        Duration::from_secs(10)
    }

    /// How long nothing may happen after what ends it.
    fn quiet(&self) -> Duration {
        Duration::from_secs(1)
    }
}

/// What was wrong in a check.
pub(super) type Wrong = String;

/// What a check has to say.
pub(super) type Checked<T = ()> = std::result::Result<T, Wrong>;

pub(super) fn told(error: Error) -> Wrong {
    error.to_string()
}
