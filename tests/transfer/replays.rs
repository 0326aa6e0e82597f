//! The bodies of fuzz targets over random bytes.

use crate::frame_bytes::frame_bytes;
use crate::transfer_ops::{Seen, transfer_ops};

/// Random bytes of a seed (xorshift).
fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(next).take(count).collect()
}

#[test]
fn any_operations_leave_nothing_and_store_nothing_wrong() {
    let soak = std::env::var_os("FOREBAY_SOAK").is_some();
    let mut all = Seen::default();
    for seed in 0..if soak { 200_000 } else { 3_000 } {
        let seen = std::panic::catch_unwind(|| transfer_ops(&bytes(seed, 900)));
        let seen = seen.unwrap_or_else(|_| panic!("seed {seed}"));
        all.whole += seen.whole;
        all.failed += seen.failed;
        all.stored += seen.stored;
        all.refused += seen.refused;
        all.wrong += seen.wrong;
        all.writes += seen.writes;
    }
    println!("{all:?}");
    let Seen { whole, failed, stored, refused, wrong, writes } = all;
    assert!(whole > 1000 && failed > 1000 && stored > 1000, "{all:?}");
    assert!(refused > 1000 && wrong > 100 && writes > 1000, "{all:?}");
}

#[test]
fn any_bytes_are_a_frame_or_of_a_bad_format() {
    let (mut frames, mut others) = (0, 0);
    for seed in 0..20_000 {
        let mut bytes = bytes(seed, seed as usize % 90);
        // Few kinds and small counts, as frames have.
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte %= if at == 0 { 10 } else { 3 };
        }
        match frame_bytes(&bytes) {
            None => frames += 1,
            Some(_) => others += 1,
        }
    }
    assert!(frames > 1000 && others > 1000, "{frames} {others}");
}
