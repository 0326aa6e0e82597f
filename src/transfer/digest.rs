//! Digests of runs: CRC32C over which run it is, and over its bytes.
//!
//! A digest of bytes alone says that they are some rows, not whose. A stale page or a notice whose numbers were damaged
//! then passes, and a request decodes with the rows of another one (sglang#39229). So the digest begins with the fence
//! and the run's own numbers. It does not depend on where the bytes are in either side's pages. Padding is not covered.

use crc_fast::{CrcAlgorithm, Digest};

use crate::transfer::quarantine::Fence;
use crate::transfer::runs::Run;

/// The digest of a run's bytes, `bytes` being its pieces one after another.
pub fn digest(fence: Fence, run: &Run, bytes: &[u8]) -> u32 {
    let numbers =
        [run.layer, run.component, run.token, run.tokens, run.head, run.heads, run.to.stage, run.to.lane];
    let mut name = [0; 48];
    let words = [fence.request, fence.generation].into_iter().flat_map(u64::to_le_bytes);
    let all = words.chain(numbers.into_iter().flat_map(u32::to_le_bytes));
    name.iter_mut().zip(all).for_each(|(to, from)| *to = from);
    crc(&[&name, bytes])
}

/// The digest of a payload that is sent in a frame.
pub(super) fn of_payload(fence: Fence, kind: u8, bytes: &[u8]) -> u32 {
    let (request, generation) = (fence.request.to_le_bytes(), fence.generation.to_le_bytes());
    crc(&[&request, &generation, &[kind], bytes])
}

/// CRC32C of some bytes after each other.
pub(super) fn crc(parts: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    // A CRC of 32 bits.
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of CRC-32/ISCSI, from the catalogue of CRC algorithms.
    #[test]
    fn the_algorithm_is_crc32c() {
        assert_eq!(crc(&[b"1234", b"56789"]), 0xE306_9283);
        assert_eq!(crc(&[]), 0);
    }
}
