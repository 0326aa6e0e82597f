//! Attention as kernels compute it: in shares, each with its log-sum-exp, and their merge, in f32.

use crate::device::TestDevice;
use forebay::device::Slice;

use crate::reference::WIDTH;

/// Positions that a query row selects.
pub const K: usize = 16;
/// Bytes of a row.
pub const ROW: u64 = 4 * WIDTH as u64;

fn floats(bytes: &[u8]) -> [f32; WIDTH] {
    std::array::from_fn(|i| f32::from_le_bytes([0, 1, 2, 3].map(|b| bytes[4 * i + b])))
}

/// The attention of one share as a kernel returns it: valid entries, natural log-sum-exp, output.
pub fn attend(
    memory: &TestDevice,
    slab: Slice,
    (list, count): (Slice, Option<Slice>),
    asked: &[f32; WIDTH],
) -> (u32, f32, [f32; WIDTH]) {
    let word = |slice: Slice| {
        let mut word = [0; 4];
        memory.read(slice, &mut word).unwrap();
        i32::from_le_bytes(word)
    };
    let slots: Vec<i32> = (0..K as u64).map(|i| word(list.part(4 * i, 4).unwrap())).collect();
    let valid = slots.iter().filter(|slot| **slot >= 0).count() as u32;
    if let Some(count) = count {
        assert_eq!(word(count) as u32, valid, "the count is the list's");
        assert!(slots[..valid as usize].iter().all(|slot| *slot >= 0), "valid entries come first: {slots:?}");
    }
    let mut rows = Vec::new();
    for slot in slots.iter().filter(|slot| **slot >= 0) {
        let mut row = [0; ROW as usize];
        memory.read(slab.part(*slot as u64 * ROW, ROW).unwrap(), &mut row).unwrap();
        rows.push(floats(&row));
    }
    if rows.is_empty() {
        return (0, f32::INFINITY, [f32::NAN; WIDTH]);
    }
    let score = |row: &[f32; WIDTH]| row.iter().zip(asked).map(|(k, q)| k * q).sum::<f32>();
    let most = rows.iter().map(score).fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = rows.iter().map(|row| (score(row) - most).exp()).collect();
    let sum: f32 = weights.iter().sum();
    let out =
        std::array::from_fn(|i| rows.iter().zip(&weights).map(|(row, w)| row[i] * w).sum::<f32>() / sum);
    (valid, most + sum.ln(), out)
}

/// M: shares weigh by their log-sum-exp; one without a valid entry does not count.
pub fn merge(parts: &[(u32, f32, [f32; WIDTH])]) -> Option<[f32; WIDTH]> {
    let valid: Vec<_> = parts.iter().filter(|(count, ..)| *count > 0).collect();
    let most = valid.iter().map(|(_, lse, _)| *lse).fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = valid.iter().map(|(_, lse, _)| (lse - most).exp()).sum();
    (!valid.is_empty()).then(|| {
        std::array::from_fn(|i| valid.iter().map(|(_, lse, out)| out[i] * (lse - most).exp() / sum).sum())
    })
}
