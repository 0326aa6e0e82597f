//! The operations of a world, and the mapping from any string of bytes to operations.

/// One operation. Its numbers are wishes: the interpreter maps them to valid arguments, or, if the wish is for
/// something that must be refused, uses them unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Opens a sequence and leaves it empty.
    Open { prompt: u8, promised: u8, budget: u8, whole: bool },
    /// Opens, appends the whole prompt, joins.
    Start { prompt: u8, promised: u8, budget: u8, whole: bool },
    /// A chunk of prompt rows in one layer.
    Append { seq: u8, layer: u8, count: u8 },
    /// Rows that are declared to be in place.
    InPlace { seq: u8, count: u8 },
    /// The rest of the prompt in every layer.
    Fill { seq: u8 },
    /// Joins with `warm` steps of selections and a bound of `bound` rows a call.
    Join { seq: u8, warm: u8, bound: u8, seed: u16 },
    /// The next stretch of a bounded warm-up.
    JoinMore { seq: u8 },
    /// Prepares a step and leaves it open.
    Begin { micro: u8, rows: u8, width: u8, seed: u16 },
    /// Some layer calls of an open step.
    Layers { micro: u8, count: u8 },
    /// The rest of an open step.
    Finish { micro: u8 },
    /// A whole step, enqueued and left in flight.
    Step { micro: u8, rows: u8, width: u8, seed: u16 },
    /// Retires one of the steps in flight: the oldest for an odd wish, else any.
    Retire { which: u8 },
    /// Tries to retire a step that is still open.
    RetireOpen { micro: u8 },
    /// Truncates a sequence, in one of several ways.
    Truncate { seq: u8, how: u8, by: u8 },
    /// Forks a sequence that has nothing in flight; otherwise the fork must be refused.
    Fork { seq: u8, promised: u8, budget: u8, whole: bool },
    /// Closes a sequence, even with work in flight.
    Close { seq: u8 },
    /// Releases everything that can be released.
    Reap,
    /// As `Start`, with tokens of one of a few scripts.
    StartShared { prompt: u8, promised: u8, budget: u8, script: u8 },
    /// Publishes pages, up to `by` tokens after those that are published.
    Publish { seq: u8, by: u8 },
    /// Changes a sequence's budgets, on one of the streams; sometimes the host waits for it.
    Resize { seq: u8, budget: u8, stream: u8 },
    /// Moves budgets towards their shares, on one of the streams.
    Share { stream: u8 },
    /// Admits more tokens to a sequence that has not joined or is parked, sometimes fewer than it has.
    Extend { seq: u8, prompt: u8, promised: u8 },
    /// Parks a sequence on one of the streams, most often after its steps have ended.
    Park { seq: u8, accepted: u8, stream: u8 },
    /// Resumes a parked sequence on one of the streams, most often with its whole prompt, with a bound as in `Join`.
    Resume { seq: u8, bound: u8, stream: u8 },
}

/// Bytes of an encoded operation.
pub const OP_BYTES: usize = 6;

impl Op {
    /// Whether it depends on the lengths of sequences.
    pub fn needs_lengths(&self) -> bool {
        matches!(
            self,
            Op::Truncate { .. }
                | Op::Fork { .. }
                | Op::JoinMore { .. }
                | Op::Extend { .. }
                | Op::Park { .. }
                | Op::Resume { .. }
        )
    }

    /// The operation that six bytes encode; every six bytes encode one.
    pub fn decode([kind, a, b, c, low, high]: [u8; OP_BYTES]) -> Op {
        let seed = u16::from_le_bytes([low, high]);
        let whole = c & 1 == 0;
        // The numbers that are left over: seeds from before these operations decode as they did.
        match kind {
            240..=245 => return Op::Park { seq: a, accepted: b, stream: c },
            246..=251 => return Op::Resume { seq: a, bound: b, stream: c },
            252.. => return Op::Extend { seq: a, prompt: b, promised: c },
            _ => (),
        }
        match kind % 60 {
            0 => Op::Open { prompt: a, promised: b, budget: low, whole },
            1..=3 => Op::Start { prompt: a, promised: b, budget: low, whole },
            4 | 5 => Op::Append { seq: a, layer: b, count: c },
            6 => Op::InPlace { seq: a, count: b },
            7 | 52 => Op::Fill { seq: a },
            8 | 9 => Op::Join { seq: a, warm: b, bound: c, seed },
            10 | 53 => Op::JoinMore { seq: a },
            11 | 12 => Op::Begin { micro: a, rows: b, width: c, seed },
            13 | 14 => Op::Layers { micro: a, count: b },
            15 => Op::Finish { micro: a },
            16..=24 => Op::Step { micro: a, rows: b, width: c, seed },
            25..=31 => Op::Retire { which: a },
            32 => Op::RetireOpen { micro: a },
            33..=35 => Op::Truncate { seq: a, how: b, by: c },
            36 | 37 => Op::Fork { seq: a, promised: b, budget: low, whole },
            38 => Op::Close { seq: a },
            39 => Op::Reap,
            40..=44 => Op::StartShared { prompt: a, promised: b, budget: low, script: high },
            45..=51 => Op::Publish { seq: a, by: b },
            54 => Op::Share { stream: a },
            _ => Op::Resize { seq: a, budget: b, stream: c },
        }
    }
}

/// The operations that `bytes` encode; a rest that is too short for one is left out.
pub fn ops_from_bytes(bytes: &[u8]) -> Vec<Op> {
    bytes.as_chunks::<OP_BYTES>().0.iter().map(|op| Op::decode(*op)).collect()
}

/// A plain generator of numbers: the world must not depend on a crate's definition of randomness.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Numbers of `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D)
    }

    /// A number below `limit`, 0 for no limit.
    pub fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as u32).checked_rem(limit).unwrap_or(0)
    }

    /// One time in `times`.
    pub fn one_in(&mut self, times: u32) -> bool {
        self.below(times) == 0
    }

    /// `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.below(256) as u8).collect()
    }
}
