//! Digests of runs: CRC32C over which run it is, and over its bytes.
//!
//! A digest of bytes alone says that they are some rows, not whose. A stale page or a notice whose numbers were damaged
//! then passes, and a request decodes with the rows of another one (sglang#39229). So the digest begins with the fence
//! and the run's own numbers. It does not depend on where the bytes are in either side's pages. Padding is not covered.

use crc_fast::crc32_iscsi;

use crate::transfer::quarantine::Fence;
use crate::transfer::runs::Run;

/// The digest of a run's bytes, `bytes` being its pieces one after another: the CRC32C of the fence's two numbers, of
/// the run's layer, component, first token, tokens, first head and heads and the receiver's stage and lane, and of the
/// CRC32C of the bytes. Numbers are little-endian.
pub fn digest(fence: Fence, run: &Run, bytes: &[u8]) -> u32 {
    let [request, generation] =
        [fence.request, fence.generation].map(|word| [word as u32, (word >> 32) as u32]);
    let words = [
        request[0],
        request[1],
        generation[0],
        generation[1],
        run.layer,
        run.component,
        run.token,
        run.tokens,
        run.head,
        run.heads,
        run.to.stage,
        run.to.lane,
        crc(bytes),
    ];
    let mut name = [0; 4 * 13];
    let (places, _) = name.as_chunks_mut();
    places.iter_mut().zip(words).for_each(|(place, word)| *place = word.to_le_bytes());
    crc(&name)
}

/// The digest of a payload that is sent in a frame: of the fence, the kind and the CRC32C of the bytes.
pub(super) fn of_payload(fence: Fence, kind: u8, bytes: &[u8]) -> u32 {
    let mut name = [0; 21];
    let words = [fence.request, fence.generation].into_iter().flat_map(u64::to_le_bytes);
    let all = words.chain([kind]).chain(crc(bytes).to_le_bytes());
    name.iter_mut().zip(all).for_each(|(to, from)| *to = from);
    crc(&name)
}

/// CRC32C, as in iSCSI.
pub(super) fn crc(bytes: &[u8]) -> u32 {
    crc32_iscsi(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of CRC-32/ISCSI, from the catalogue of CRC algorithms.
    #[test]
    fn the_algorithm_is_crc32c() {
        assert_eq!((crc(b"123456789"), crc(b"")), (0xE306_9283, 0));
    }
}
