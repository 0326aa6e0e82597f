//! The reference: rows and queries as functions of their identity, and attention computed at once in f64.

/// Values of a row; each is an f32.
pub const WIDTH: usize = 8;

/// A number of [0, 1) from a seed and a few identifiers.
pub fn chance(seed: u64, names: &[u64]) -> f64 {
    let mut x = seed ^ 0x9E37_79B9_7F4A_7C15;
    for name in names {
        x = (x ^ name).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 32;
    }
    (x >> 11) as f64 / (1_u64 << 53) as f64
}

/// A row: the sequence that wrote it, for which token, in which layer. `version` distinguishes the rows that one
/// position had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    pub sequence: u64,
    pub layer: u64,
    pub position: u64,
    pub version: u64,
}

fn vector(names: &[u64]) -> [f32; WIDTH] {
    std::array::from_fn(|i| {
        let names: Vec<u64> = names.iter().copied().chain([i as u64]).collect();
        (chance(1, &names) * 4.0 - 2.0) as f32
    })
}

impl Token {
    pub fn row(&self) -> [f32; WIDTH] {
        vector(&[self.sequence, self.layer, self.position, self.version])
    }
}

/// The query of a query row.
pub fn query(sequence: u64, layer: u64, step: u64, row: u64) -> [f32; WIDTH] {
    vector(&[sequence + 1000, layer, step, row])
}

/// Attention computed at once: a row is key and value. Empty if nothing is selected.
pub fn attention(query: &[f32; WIDTH], rows: &[[f32; WIDTH]]) -> Option<[f64; WIDTH]> {
    let score = |row: &[f32; WIDTH]| -> f64 {
        row.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum()
    };
    let most = rows.iter().map(score).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = rows.iter().map(|row| (score(row) - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (!rows.is_empty()).then(|| {
        std::array::from_fn(|i| {
            rows.iter().zip(&weights).map(|(row, weight)| f64::from(row[i]) * weight / sum).sum()
        })
    })
}
