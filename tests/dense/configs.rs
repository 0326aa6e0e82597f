//! Configurations of dense caches by a number, and the numbers of random worlds.

use forebay::Memory;
use forebay::dense::{Config, Group, Layout, Runs, Save, Shape, Width};

/// A plain generator of numbers: the world must not depend on a crate's definition of randomness.
/// It may also read them from bytes.
pub struct Random {
    state: u64,
    /// In their reversed order. Once they are used up, every number is 0.
    bytes: Option<Vec<u8>>,
}

impl Random {
    pub fn new(seed: u64) -> Random {
        let state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D;
        Random { state, bytes: None }
    }

    /// Reads all numbers from these bytes from now on.
    pub fn take_from(&mut self, bytes: &[u8]) {
        self.bytes = Some(bytes.iter().rev().copied().collect());
    }

    /// Whether there are bytes that no number has used.
    pub fn has_bytes(&self) -> bool {
        self.bytes.as_ref().is_some_and(|bytes| !bytes.is_empty())
    }

    pub fn below(&mut self, limit: u32) -> u32 {
        let number = match &mut self.bytes {
            Some(bytes) => {
                let mut next = || u32::from(bytes.pop().unwrap_or(0));
                if limit > 256 { next() << 8 | next() } else { next() }
            }
            None => {
                let state = self.state.wrapping_mul(6_364_136_223_846_793_005);
                self.state = state.wrapping_add(1_442_695_040_888_963_407);
                (self.state >> 33) as u32
            }
        };
        number.checked_rem(limit).unwrap_or(0)
    }

    pub fn one_in(&mut self, times: u32) -> bool {
        self.below(times) == 0
    }
}

/// One of many configurations.
pub fn config(variant: u64) -> Config {
    let mut random = Random::new(variant);
    let group = |layers: &[u32], runs, window| Group { layers: layers.to_vec(), runs, window };
    let groups = match random.below(4) {
        0 => vec![group(&[0, 1], [32, 16], None)],
        1 => vec![group(&[0], [48, 0], Some(20))],
        2 => vec![group(&[1], [32, 16], None), group(&[0, 2], [16, 0], Some(1 + random.below(70)))],
        _ => vec![group(&[2], [16, 16], Some(33)), group(&[0], [32, 0], None), group(&[1], [16, 0], Some(5))],
    };
    let shape = Shape { page_tokens: 16, groups };
    let sequences = 2 + random.below(4);
    let query_rows = 1 + random.below(3);
    let base = Config::new(shape, sequences, 100 + random.below(60));
    let mut config = Config {
        layout: if random.one_in(2) { Layout::LayerFirst } else { Layout::PageFirst },
        runs: if random.one_in(2) { Runs::Apart } else { Runs::Together },
        width: if random.one_in(2) { Width::I32 } else { Width::I64 },
        step_tokens: sequences * query_rows + random.below(50),
        query_rows,
        steps_in_flight: 1 + random.below(3),
        micro_batches: 1 + random.below(2),
        memory: Memory { huge: false, populate: false, lock: false, node: None },
        ..base
    };
    // Not always enough for all.
    let fitting = 1 + random.below(sequences);
    config.device_pages = config.pages_for(fitting, config.max_tokens);
    if random.below(4) > 0 {
        let least = config.max_tokens.div_ceil(16);
        config.host_pages = config.device_pages.iter().map(|_| least + random.below(60)).collect();
    }
    config.save = if random.one_in(2) { Save::Published } else { Save::Evicted };
    if config.layout == Layout::LayerFirst {
        config.bring_layers = random.below(3);
    }
    config
}
