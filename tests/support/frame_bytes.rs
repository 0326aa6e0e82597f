//! The body of the fuzz target `frame_bytes`, which `tests/transfer.rs` replays.

use forebay::transfer::{Digests, FRAME_MAX, Frame, Rows};
use forebay::{Error, Kind};

/// CRC32C, a bit at a time.
pub fn sum(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82F6_3B78 } else { crc >> 1 };
        }
    }
    !crc
}

/// Reads any bytes as a frame, as they are and with a sum that fits. What is a frame has the same bytes again, and all
/// that it lists is in it; what is none is of a bad format. Returns the error of the bytes with the sum.
pub fn frame_bytes(bytes: &[u8]) -> Option<Error> {
    read(bytes);
    read(&[bytes, &sum(bytes).to_le_bytes()].concat())
}

fn read(bytes: &[u8]) -> Option<Error> {
    let frame = match Frame::decode(bytes) {
        Ok(frame) => frame,
        Err(error) => {
            assert_eq!(error.kind(), Kind::BadFormat, "{error}");
            return Some(error);
        }
    };
    let mut again = Vec::new();
    frame.encode(&mut again);
    assert_eq!(again, bytes);
    // Nothing that is listed is longer than the frame.
    let words = match &frame {
        Frame::Grant(grant) => grant.landing.iter().count(),
        Frame::Notice(notice) => {
            // Runs without digests and indices are counted, not listed.
            let listed = |part: Rows<'_>| match part.digests {
                Digests::Without(count) => {
                    assert!(count as usize <= FRAME_MAX / 8, "{frame:?}");
                    13
                }
                digests => 13 + digests.iter().count(),
            };
            notice.parts().map(listed).sum()
        }
        Frame::Answer(answer) => answer.failed().map(|(_, runs)| 1 + runs.iter().count()).sum(),
        Frame::Hello(_)
        | Frame::Payload(_)
        | Frame::End { .. }
        | Frame::Failed { .. }
        | Frame::Drained { .. }
        | Frame::Known { .. } => 0,
    };
    assert!(4 * words <= bytes.len(), "{frame:?}");
    None
}
