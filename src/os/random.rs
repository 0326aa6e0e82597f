//! Random bytes from getrandom(2).

use nix::errno::Errno;

use super::refusal::{OsResult, Refusal, answer, ask};
use super::{Call, Faults};
use crate::error::Result;

/// Fills `bytes` with random bytes from the system's generator.
///
/// # Errors
/// [`crate::Kind::OsRefused`].
pub fn random(bytes: &mut [u8], faults: &dyn Faults) -> Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = &mut bytes[filled..];
        match part(rest, faults) {
            Ok(count) => filled += count,
            Err(Refusal { errno: libc::EINTR, .. }) => {}
            Err(refusal) => return Err(refusal.error("draw random bytes")),
        }
    }
    Ok(())
}

/// Fills the beginning of `bytes`; returns its length.
fn part(bytes: &mut [u8], faults: &dyn Faults) -> OsResult<usize> {
    ask(faults, Call::Random, "getrandom")?;
    // SAFETY: the slice is writable for its whole length, and bytes have no invalid values.
    let returned = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    answer("getrandom", Errno::result(returned)).map(|count| count as usize)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::super::{Inject, NoFaults};
    use super::*;
    use crate::error::Kind;

    #[test]
    fn all_bytes_are_drawn() {
        let (mut one, mut other) = ([0; 600], [0; 600]);
        random(&mut one, &NoFaults).unwrap();
        random(&mut other, &NoFaults).unwrap();
        assert_ne!(one, other);
        assert!(one[568..].iter().any(|byte| *byte != 0), "the last 32 bytes are all zero by chance: no");
        random(&mut [], &NoFaults).unwrap();
    }

    /// Interrupts the first calls.
    #[derive(Debug)]
    struct Interrupted(AtomicU32);

    impl Faults for Interrupted {
        fn before(&self, _: Call) -> Option<i32> {
            (self.0.fetch_add(1, Ordering::Relaxed) < 3).then_some(libc::EINTR)
        }
    }

    #[test]
    fn an_interrupted_call_is_made_again_and_a_refused_one_is_an_error() {
        let mut bytes = [0; 32];
        random(&mut bytes, &Interrupted(AtomicU32::new(0))).unwrap();
        assert_ne!(bytes, [0; 32]);
        let e = random(&mut bytes, &Inject::call(Call::Random, libc::ENOSYS)).unwrap_err();
        assert_eq!(e.kind(), Kind::OsRefused);
        assert!(e.to_string().contains("getrandom"), "{e}");
    }
}
