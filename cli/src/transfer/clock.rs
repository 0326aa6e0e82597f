//! The clock that all processes of a host share.

use std::time::Duration;

use forebay::{Error, Kind, Result};
use nix::time::{ClockId, clock_gettime};

/// Time since a beginning that all processes of this host have in common.
///
/// # Errors
/// [`Kind::OsRefused`].
pub fn now() -> Result<Duration> {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_err(|errno| Error::new(Kind::OsRefused, "transfer").at(format!("clock: {errno}")))?;
    Ok(Duration::from(time))
}

/// The same in nanoseconds.
///
/// # Errors
/// As [`now`].
pub fn nanos() -> Result<u64> {
    Ok(u64::try_from(now()?.as_nanos()).unwrap_or(u64::MAX))
}
