//! Fallible allocation: vectors that return an error if there is no memory for them.
//!
//! A file's header or a cache's configuration may ask for more memory than the machine gives. The standard library
//! aborts the process then. Code that allocates by such a number uses these functions. Code that grows a vector item by
//! item calls `try_reserve` itself.

use crate::error::{Error, Kind, Result};

/// An empty vector with capacity for `count` items.
///
/// # Errors
/// [`Kind::OutOfMemory`] with `operation`, `place` and the bytes.
pub(crate) fn vector<T>(count: usize, operation: &'static str, place: &'static str) -> Result<Vec<T>> {
    let mut room = Vec::new();
    reserve(&mut room, count, operation, place)?;
    Ok(room)
}

/// Makes room for `more` items behind those of a vector.
///
/// # Errors
/// As [`vector`].
pub(crate) fn reserve<T>(
    items: &mut Vec<T>,
    more: usize,
    operation: &'static str,
    place: &'static str,
) -> Result<()> {
    items.try_reserve_exact(more).map_err(|_| {
        let bytes = (more as u64).saturating_mul(size_of::<T>() as u64);
        Error::new(Kind::OutOfMemory, operation).at(place).with("bytes", bytes)
    })
}

/// A vector of `count` copies of `value`.
///
/// # Errors
/// As [`vector`].
pub(crate) fn filled<T: Clone>(
    count: usize,
    value: T,
    operation: &'static str,
    place: &'static str,
) -> Result<Vec<T>> {
    let mut room = vector(count, operation, place)?;
    room.resize(count, value);
    Ok(room)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_that_is_too_large_is_an_error_with_its_bytes() {
        let error = filled(usize::MAX / 16, 7_u64, "open", "block hashes of pages").unwrap_err();
        let told = (error.kind(), error.operation(), error.place(), error.number("bytes"));
        assert_eq!(
            told,
            (Kind::OutOfMemory, "open", "block hashes of pages", Some((usize::MAX / 16) as u64 * 8))
        );
        assert_eq!(filled(3, 7_u64, "open", "block hashes of pages").unwrap(), [7, 7, 7]);
    }
}
