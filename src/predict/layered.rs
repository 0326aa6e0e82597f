//! Computes when the rows of a prefill pass are computed, told, moved and stored, layer by layer, on one clock.
//!
//! A GPU of a prefill instance computes a pass layer by layer, of one micro-batch after the other if there are two. A
//! layer of a micro-batch is a *part*. Its rows go through four stages, each of which takes one part at a time, in
//! order: the GPU computes and stages it in the ring; a core of the sender makes its digests and tells it; the link
//! moves it; a core of the receiver checks and stores it. So the slowest stage bounds all, and when the last part is
//! computed only what is still in the stages is exposed.
//!
//! **The ring.** A part's memory is free again when its acknowledgement has come. While no part is free, the GPU waits.
//!
//! **What slows prefill** is what the GPU does not need without the transfer: staging, and waits for the ring.
//!
//! **What it does not know.** Messages, several receivers that share a core, other traffic on the link, and layers of
//! different length. `forebay transfer demo` measures a host.

use crate::error::{Error, Kind, Result};
use crate::predict::MOST;

/// The most parts of a pass.
const PARTS_MAX: u64 = 1 << 16;

/// Bytes a second at which a GPU copies rows into the ring; assumed, a fraction of its memory's rate.
pub const STAGE_RATE: f64 = 1e12;

/// Bytes a second of which a core makes digests, and which a core checks and stores: measured on the host of
/// `docs/benchmarks.md`.
pub const DIGEST_RATE: f64 = 17e9;
/// See [`DIGEST_RATE`].
pub const CHECK_RATE: f64 = 10e9;
/// Bytes a second that a core stores without digests, measured there too.
pub const STORE_RATE: f64 = 17e9;

/// A pass on one GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pass {
    /// Layers of the model.
    pub layers: u32,
    /// Tokens of the pass on this GPU.
    pub tokens: u32,
    /// Micro-batches, of which each has its part of the tokens.
    pub micro_batches: u32,
    /// Bytes of a token's row and index key in a layer.
    pub token_bytes: u32,
    /// Microseconds in which the GPU computes a layer of all tokens.
    pub layer_us: f64,
    /// Bytes a second that the GPU stages.
    pub stage_rate: f64,
    /// Bytes a second of which a core of the sender makes digests; none without digests.
    pub digest_rate: Option<f64>,
    /// Bytes a second of the link.
    pub link_rate: f64,
    /// Bytes a second that a core of the receiver checks and stores.
    pub store_rate: f64,
    /// Microseconds from when a part is stored to its acknowledgement at the sender.
    pub acknowledge_us: f64,
    /// Parts of the ring.
    pub depth: u32,
}

/// When a part was where, in microseconds since the pass began.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Part {
    /// The layer.
    pub layer: u32,
    /// The micro-batch.
    pub micro_batch: u32,
    /// Begin and end of each stage: compute and stage, digests, link, store.
    pub stages: [[f64; 2]; 4],
}

/// A pass and its transfer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layered {
    /// All parts, in the order in which they are computed.
    pub parts: Vec<Part>,
    /// Bytes of all parts.
    pub bytes: u64,
    /// Microseconds until the last part is computed.
    pub compute_us: f64,
    /// Microseconds from there until all is stored.
    pub exposed_us: f64,
    /// Microseconds that the transfer takes if all parts are computed before it begins.
    pub alone_us: f64,
    /// Of that time the share that is not exposed.
    pub hidden: f64,
    /// How long the link is busy, as a share of [`Layered::compute_us`].
    pub link_load: f64,
    /// By what share of the computation alone the pass takes longer.
    pub slowed: f64,
    /// Microseconds that the GPU waits for the ring.
    pub wait_us: f64,
}

impl Pass {
    fn check(&self) -> Result<()> {
        let invalid = |field| Err(Error::new(Kind::InvalidConfig, "simulate a transfer").at(field));
        let counts = [
            ("layers", self.layers),
            ("tokens", self.tokens),
            ("micro-batches", self.micro_batches),
            ("bytes of a token", self.token_bytes),
            ("parts of the ring", self.depth),
        ];
        if let Some((field, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return invalid(field);
        }
        if self.micro_batches > self.tokens {
            return invalid("more micro-batches than tokens");
        }
        if u64::from(self.layers) * u64::from(self.micro_batches) > PARTS_MAX {
            return invalid("layers and micro-batches");
        }
        let rates = [
            ("layer time", self.layer_us),
            ("stage rate", self.stage_rate),
            ("digest rate", self.digest_rate.unwrap_or(1.0)),
            ("link rate", self.link_rate),
            ("store rate", self.store_rate),
        ];
        if let Some((field, _)) = rates.into_iter().find(|(_, rate)| !(1.0 / MOST..=MOST).contains(rate)) {
            return invalid(field);
        }
        match (0.0..=MOST).contains(&self.acknowledge_us) {
            true => Ok(()),
            false => invalid("acknowledgement"),
        }
    }

    /// Tokens of a micro-batch: the first ones have one more where they are not equal.
    fn tokens_of(&self, micro_batch: u32) -> u32 {
        let (all, rest) = (self.tokens / self.micro_batches, self.tokens % self.micro_batches);
        all + u32::from(micro_batch < rest)
    }

    /// Microseconds of the stages of a part.
    fn times(&self, micro_batch: u32) -> [f64; 4] {
        let tokens = self.tokens_of(micro_batch);
        let bytes = f64::from(tokens) * f64::from(self.token_bytes);
        let at = |rate: f64| bytes / rate * 1e6;
        let compute = self.layer_us * f64::from(tokens) / f64::from(self.tokens);
        [
            compute + at(self.stage_rate),
            self.digest_rate.map_or(0.0, at),
            at(self.link_rate),
            at(self.store_rate),
        ]
    }

    /// All parts, with the GPU's work or with everything computed at the beginning. The second number is how long the
    /// GPU waited.
    fn run(&self, computes: bool) -> (Vec<Part>, f64) {
        let (mut parts, mut free, mut waited) = (Vec::new(), [0.0_f64; 4], 0.0);
        for (layer, micro_batch) in
            (0..self.layers).flat_map(|layer| (0..self.micro_batches).map(move |of| (layer, of)))
        {
            let mut times = self.times(micro_batch);
            let mut ready = 0.0_f64;
            if computes {
                // The part whose place it takes.
                let before = parts.len().checked_sub(self.depth as usize).and_then(|at| parts.get(at));
                ready = before.map_or(0.0, |part: &Part| part.stages[3][1] + self.acknowledge_us);
                waited += (ready - free[0]).max(0.0);
            } else {
                times[0] = 0.0;
            }
            let mut part = Part { layer, micro_batch, ..Part::default() };
            for ((stage, free), time) in part.stages.iter_mut().zip(&mut free).zip(times) {
                let begin = ready.max(*free);
                ready = begin + time;
                *free = ready;
                *stage = [begin, ready];
            }
            parts.push(part);
        }
        (parts, waited)
    }

    /// Runs the pass.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names a count of 0, a rate or time that is none, and too many parts.
    pub fn simulate(&self) -> Result<Layered> {
        self.check()?;
        let end = |parts: &[Part], stage: usize| parts.last().map_or(0.0, |part| part.stages[stage][1]);
        let (parts, wait_us) = self.run(true);
        let alone_us = end(&self.run(false).0, 3);
        let (compute_us, stored_us) = (end(&parts, 0), end(&parts, 3));
        let exposed_us = stored_us - compute_us;
        let link_us: f64 = parts.iter().map(|part| part.stages[2][1] - part.stages[2][0]).sum();
        Ok(Layered {
            bytes: u64::from(self.layers) * u64::from(self.tokens) * u64::from(self.token_bytes),
            compute_us,
            exposed_us,
            alone_us,
            hidden: (1.0 - exposed_us / alone_us).max(0.0),
            link_load: link_us / compute_us,
            slowed: compute_us / (self.layer_us * f64::from(self.layers)) - 1.0,
            wait_us,
            parts,
        })
    }
}
