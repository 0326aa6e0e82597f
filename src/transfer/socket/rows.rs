//! The rows behind a frame of a stream: a table of the runs' lengths, and their bytes.
//!
//! The table is a count, and so many lengths, of 4 bytes each. The runs' bytes follow one after another, in the order
//! in which the notice tells them. A frame without runs has nothing behind it.

use crate::error::{Error, Kind, Result};
use crate::fallible::reserve;
use crate::transfer::runs::Run;

const OPERATION: &str = "rows of a stream";

/// The table of runs that go behind a frame.
///
/// # Errors
/// [`Kind::OutOfRange`] for more than `most` bytes in all; [`Kind::OutOfMemory`].
pub fn table(rows: &[(u64, Run)], most: usize) -> Result<Vec<u8>> {
    let mut table = Vec::new();
    if rows.is_empty() {
        return Ok(table);
    }
    let room = rows.len().saturating_add(1).saturating_mul(4);
    let all = rows.iter().fold(room as u64, |sum, (_, run)| sum.saturating_add(run.total()));
    if all > most.min(u32::MAX as usize) as u64 {
        return Err(Error::new(Kind::OutOfRange, OPERATION)
            .at("more than a frame may carry")
            .with("bytes", all)
            .with("rows_max", most as u64)
            .hint("raise rows_max at both ends, or lower the sender's notice_bytes"));
    }
    reserve(&mut table, room, OPERATION, "table")?;
    table.extend((rows.len() as u32).to_le_bytes());
    rows.iter().for_each(|(_, run)| table.extend((run.total() as u32).to_le_bytes()));
    Ok(table)
}

/// The table's lengths, and the bytes after it; none if the table is longer than what is there.
fn split(behind: &[u8]) -> Option<(&[[u8; 4]], &[u8])> {
    let (count, rest) = behind.split_first_chunk()?;
    let bytes = usize::try_from(u32::from_le_bytes(*count)).ok()?.checked_mul(4)?;
    let (lengths, rows) = rest.split_at_checked(bytes)?;
    Some((lengths.as_chunks().0, rows))
}

/// Checks what came behind a frame.
///
/// # Errors
/// [`Kind::BadFormat`] for lengths that are not those of the bytes.
pub fn check(behind: &[u8]) -> Result<()> {
    let sums = |(lengths, rows): (&[[u8; 4]], &[u8])| {
        let sum: u64 = lengths.iter().map(|length| u64::from(u32::from_le_bytes(*length))).sum();
        sum == rows.len() as u64
    };
    match behind.is_empty() || split(behind).is_some_and(sums) {
        true => Ok(()),
        false => Err(Error::new(Kind::BadFormat, OPERATION).at("lengths").with("bytes", behind.len() as u64)),
    }
}

/// A place behind a frame: the next run, and where its bytes begin. Runs are asked for in their order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    nth: usize,
    at: usize,
}

impl Cursor {
    /// The bytes of the nth run, of so many bytes.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a run that did not come, or has another length.
    pub fn find<'a>(&mut self, behind: &'a [u8], nth: u32, bytes: usize) -> Result<&'a [u8]> {
        let nth = nth as usize;
        if nth < self.nth {
            *self = Cursor::default();
        }
        let found = split(behind).and_then(|(lengths, rows)| {
            let before = lengths.get(self.nth..nth)?;
            self.at += before.iter().map(|length| u32::from_le_bytes(*length) as usize).sum::<usize>();
            self.nth = nth;
            let length = u32::from_le_bytes(*lengths.get(nth)?) as usize;
            rows.get(self.at..)?.get(..length).filter(|found| found.len() == bytes)
        });
        found.ok_or_else(|| {
            Error::new(Kind::OutOfRange, OPERATION)
                .at("a run that did not come behind its notice")
                .with("run", nth as u64)
                .with("bytes", bytes as u64)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn behind(lengths: &[u32], bytes: usize) -> Vec<u8> {
        let numbers = [lengths.len() as u32].into_iter().chain(lengths.iter().copied());
        let mut behind: Vec<u8> = numbers.flat_map(u32::to_le_bytes).collect();
        behind.extend((0..bytes).map(|at| at as u8));
        behind
    }

    #[test]
    fn runs_are_found_in_any_order_and_only_with_their_lengths() {
        let behind = behind(&[3, 0, 5, 1], 9);
        check(&behind).unwrap();
        let mut cursor = Cursor::default();
        for (nth, bytes) in [(0, &[0, 1, 2][..]), (2, &[3, 4, 5, 6, 7]), (3, &[8]), (1, &[]), (0, &[0, 1, 2])]
        {
            assert_eq!(cursor.find(&behind, nth, bytes.len()).unwrap(), bytes);
            assert_eq!(cursor.find(&behind, nth, bytes.len() + 1).unwrap_err().kind(), Kind::OutOfRange);
        }
        for nth in [4, 5, u32::MAX] {
            assert!(cursor.find(&behind, nth, 0).is_err());
        }
        assert_eq!(cursor.find(&behind, 2, 5).unwrap(), [3, 4, 5, 6, 7]);
        assert!(Cursor::default().find(&[], 0, 0).is_err());
    }

    #[test]
    fn lengths_that_are_not_those_of_the_bytes_are_refused() {
        check(&[]).unwrap();
        for wrong in [behind(&[3, 5], 7), behind(&[3, 5], 9), behind(&[u32::MAX, u32::MAX], 8), vec![0; 3]] {
            assert_eq!(check(&wrong).unwrap_err().kind(), Kind::BadFormat);
        }
        let mut claims = behind(&[1], 1);
        claims[..4].fill(0xFF);
        assert!(check(&claims).is_err());
    }
}
