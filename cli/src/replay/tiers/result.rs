//! What a replay through two tiers found.

use crate::blocks::tiers::{Amount, Served, Tier, Tiers};
use crate::replay::requests::result::About;

/// The bytes of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockBytes {
    /// Of every block.
    Block(u64),
    /// Of every token of a block: rows and index keys of a model, in all layers.
    Token { model: String, bytes: u64 },
}

impl BlockBytes {
    /// Bytes of some blocks.
    pub fn of(&self, amount: Amount) -> f64 {
        match self {
            BlockBytes::Block(bytes) => amount.blocks as f64 * *bytes as f64,
            BlockBytes::Token { bytes, .. } => amount.tokens as f64 * *bytes as f64,
        }
    }
}

/// Rates of a machine, for the time to first token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Tokens that are computed in a second.
    pub prefill: f64,
    /// Bytes that come back in a second.
    pub link: f64,
}

/// Sums over the measured requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    pub requests: u64,
    /// Block references, and tokens of the prompts.
    pub asked: Amount,
    pub served: Served,
}

impl Sums {
    /// Adds a request of `blocks` blocks and `input_tokens` tokens.
    pub fn add(&mut self, blocks: usize, input_tokens: u64, served: &Served) {
        let amount = |sum: &mut Amount, more: &Amount| {
            sum.blocks += more.blocks;
            sum.tokens += more.tokens;
        };
        let tier = |sum: &mut Tier, more: &Tier| {
            amount(&mut sum.hits, &more.hits);
            sum.evicted_blocks += more.evicted_blocks;
        };
        self.requests += 1;
        amount(&mut self.asked, &Amount { blocks: blocks as u64, tokens: input_tokens });
        tier(&mut self.served.device, &served.device);
        tier(&mut self.served.host, &served.host);
        amount(&mut self.served.up, &served.up);
        amount(&mut self.served.down, &served.down);
    }

    /// Hits of both tiers.
    pub fn hits(&self) -> Amount {
        let [device, host] = [self.served.device.hits, self.served.host.hits];
        Amount { blocks: device.blocks + host.blocks, tokens: device.tokens + host.tokens }
    }
}

/// The percentiles that are reported.
pub const PERCENTILES: [u32; 4] = [10, 50, 90, 99];

/// Seconds of the time to first token that hits save: the hit tokens by the prefill rate, less the time of the bring-up
/// by the link rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Saved {
    pub rates: Rates,
    /// Of all requests, by hits on the device and by hits on the host.
    pub device: f64,
    pub host: f64,
    /// Of a request, both tiers.
    pub mean: f64,
    /// By [`PERCENTILES`].
    pub percentiles: [f64; 4],
    /// Requests that would start earlier if they computed all anew.
    pub slower: u64,
}

/// What hits on the device save, and hits on the host.
pub fn saved(served: &Served, rates: Rates, bytes: &BlockBytes) -> [f64; 2] {
    let [device, host] = [served.device, served.host].map(|tier| tier.hits.tokens as f64 / rates.prefill);
    [device, host - bytes.of(served.up) / rates.link]
}

impl Saved {
    /// Of what was served in all, and of each request's seconds.
    pub fn new(rates: Rates, bytes: &BlockBytes, served: &Served, mut seconds: Vec<f64>) -> Saved {
        seconds.sort_unstable_by(f64::total_cmp);
        let [device, host] = saved(served, rates, bytes);
        // The nearest rank: the least value that so many percent of all are not above.
        let at = |percent: u32| {
            let rank = (seconds.len() * percent as usize).div_ceil(100).max(1);
            seconds.get(rank - 1).copied().unwrap_or(0.0)
        };
        Saved {
            rates,
            device,
            host,
            mean: (device + host) / seconds.len().max(1) as f64,
            percentiles: PERCENTILES.map(at),
            slower: seconds.iter().filter(|seconds| **seconds < 0.0).count() as u64,
        }
    }
}

/// A trace's replay.
pub struct Replayed {
    pub about: About,
    pub tiers: Tiers,
    pub sums: Sums,
    /// The bytes of a block, if they are known.
    pub bytes: Option<BlockBytes>,
    /// If the rates are known.
    pub saved: Option<Saved>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_of_requests_and_a_loss_is_counted() {
        let rates = Rates { prefill: 100.0, link: 1000.0 };
        let hits = |device, host| Served {
            device: Tier { hits: Amount { blocks: 1, tokens: device }, evicted_blocks: 0 },
            host: Tier { hits: Amount { blocks: 1, tokens: host }, evicted_blocks: 0 },
            up: Amount { blocks: 1, tokens: host },
            down: Amount::default(),
        };
        let bytes = BlockBytes::Block(500);
        // 2 s of prefill less 0.5 s of the link, and 0.1 s less 0.5 s.
        let seconds = |served| saved(&served, rates, &bytes);
        assert_eq!([hits(150, 50), hits(0, 10)].map(seconds), [[1.5, 0.0], [0.0, -0.4]]);
        let token = BlockBytes::Token { model: "x".to_owned(), bytes: 10 };
        assert_eq!(saved(&hits(150, 60), rates, &token), [1.5, 0.0]);
        let all =
            Saved::new(rates, &bytes, &hits(150, 50), (0..200).rev().map(f64::from).chain([-1.0]).collect());
        assert_eq!((all.device, all.host, all.mean), (1.5, 0.0, 1.5 / 201.0));
        assert_eq!((all.percentiles, all.slower), ([19.0, 99.0, 179.0, 197.0], 1));
        assert_eq!(Saved::new(rates, &bytes, &Served::default(), Vec::new()).mean, 0.0);
    }
}
