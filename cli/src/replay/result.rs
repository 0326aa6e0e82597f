//! What a replay of a selection trace found.

use std::path::PathBuf;

use forebay::trace::Header;

use crate::policy::Policy;
use crate::study::pools::Setting;
use crate::study::prefetch::Prefetched;

/// Decode steps whose misses are reported separately: the start-up cost of a sequence.
pub const FIRST_STEPS: u32 = 8;

/// The counts of one layer's pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Selected rows that were resident.
    pub hits: u64,
    /// Selected rows that were fetched.
    pub misses: u64,
}

/// Slots that were divided by the gain of each layer.
pub struct Divided {
    /// Slots of each layer.
    pub slots: Vec<u32>,
    /// Misses of all layers with a uniform split.
    pub uniform_misses: u64,
}

/// A trace's replay at one size, with everything that the reports show.
pub struct Replay {
    /// The replayed setting.
    pub setting: Setting,
    /// The eviction policy.
    pub policy: Policy,
    /// The slots of each layer, if they were divided; the setting's are the mean then.
    pub divided: Option<Divided>,
    /// Slots as a share of the prompt, as requested.
    pub prompt_share: f64,
    /// Hits and misses of every layer, over all decode steps.
    pub layers: Vec<Count>,
    /// What a prefetch fetches for each layer, if requested.
    pub prefetched: Option<Vec<Prefetched>>,
    /// Misses of each of the first [`FIRST_STEPS`] decode steps, all layers together.
    pub first: Vec<u64>,
    /// The same without warm-up.
    pub cold: Vec<u64>,
}

impl Replay {
    /// Hits and misses of all layers.
    pub fn total(&self) -> Count {
        self.layers.iter().fold(Count::default(), |sum, count| Count {
            hits: sum.hits + count.hits,
            misses: sum.misses + count.misses,
        })
    }

    /// The share of the uniform split's misses that dividing the slots avoids.
    pub fn gain(&self) -> Option<f64> {
        let before = self.divided.as_ref()?.uniform_misses as f64;
        Some((before - self.total().misses as f64) / before.max(1.0))
    }

    /// A count as a mean over the decode steps.
    pub fn per_step(&self, count: u64) -> f64 {
        count as f64 / f64::from(self.setting.steps)
    }

    /// The mean over the first steps and the layers.
    pub fn first_mean(&self, first: &[u64]) -> f64 {
        let cells = first.len() * self.layers.len();
        first.iter().sum::<u64>() as f64 / cells as f64
    }
}

/// All replays of one trace.
pub struct Replayed {
    /// The file, as named.
    pub path: PathBuf,
    /// The trace's header.
    pub header: Header,
    /// One replay for each size and policy, ordered by size.
    pub replays: Vec<Replay>,
}

/// The bytes of one row, and the model that they come from.
pub struct RowSize {
    /// The preset's name.
    pub model: String,
    /// Bytes.
    pub bytes: u32,
}

/// Misses as a share of all lookups; 0 if there were none.
pub fn miss_ratio(count: Count) -> f64 {
    count.misses as f64 / (count.hits + count.misses).max(1) as f64
}

/// Bytes copied to the device and stored to the host, over all decode steps and layers.
pub fn bytes(replay: &Replay, row: &RowSize) -> (u64, u64) {
    let setting = &replay.setting;
    let born = u64::from(setting.steps) * u64::from(setting.mtp) * replay.layers.len() as u64;
    (replay.total().misses * u64::from(row.bytes), born * u64::from(row.bytes))
}
