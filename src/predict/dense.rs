//! Computes how many sequences of a dense model fit on a GPU, and what the host's memory holds beside them.
//!
//! A plan is a [`Config`] and its bytes by [`Config::footprint`], as admission counts them: each sequence has all pages
//! that it will need, rows in flight included. So the most sequences of a plan are those that a cache made from it
//! admits. Weights, activations and workspace belong to the engine and are given; the rest of the GPU belongs to the
//! cache.
//!
//! The host is the second tier. It lets no further sequence decode, because attention reads every row of a sequence in
//! every step, but it keeps sequences that are parked, and prefixes that come again. The plan says how many of either.
//!
//! **What it does not know.** Time, and how often a prefix comes again: a replay of requests counts that.

use crate::dense::{Config, Footprint};
use crate::error::{Error, Kind, Result};
use crate::predict::plan::{Batch, available, most};

/// The inputs of a plan. Bytes are of one GPU, and of its part of the host's memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// The cache, of sequences of [`Config::max_tokens`] tokens: prompt and promised. The plan sets `sequences`,
    /// `batch` and `device_pages`, and enlarges `step_tokens` where a batch needs more.
    pub config: Config,
    /// Bytes of the GPU's memory.
    pub gpu: u64,
    /// Bytes of weights on it.
    pub weights: u64,
    /// Bytes of activations.
    pub activations: u64,
    /// Bytes of the engine's other memory: workspace, graphs, communication buffers.
    pub workspace: u64,
    /// Bytes of pinned host memory, page tables and step descriptors included; none for a cache without second tier.
    pub host: Option<u64>,
    /// Sequences.
    pub batch: Batch,
}

impl Demand {
    /// One GPU of `gpu` bytes that holds only the cache: as many sequences as fit, without second tier.
    pub const fn new(config: Config, gpu: u64) -> Demand {
        Demand { config, gpu, weights: 0, activations: 0, workspace: 0, host: None, batch: Batch::Most }
    }
}

/// What the host's memory holds as second tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostTier {
    /// Bytes for pages: the host's memory without page tables and step descriptors.
    pub bytes: u64,
    /// Tokens of published prefixes: whole pages of all groups.
    pub tokens: u64,
    /// Sequences of full length that can be parked, if no prefix takes any of it.
    pub sequences: u64,
}

/// A plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The configuration of the cache. Its sequences all fit on the device at full length.
    pub config: Config,
    /// Its bytes.
    pub bytes: Footprint,
    /// Bytes of the GPU that weights, activations and workspace leave.
    pub available: u64,
    /// The most sequences that fit.
    pub most: u32,
    /// The second tier; none without host memory for it.
    pub host: Option<HostTier>,
}

/// Makes a plan.
///
/// # Errors
/// Errors of [`Config::footprint`] for an invalid configuration. [`Kind::InvalidConfig`] for no sequences.
/// [`Kind::OutOfMemory`] names what does not fit, with `wanted` and `available` bytes: weights, activations and
/// workspace; the GPU, with the most sequences that fit; or the host, if it cannot hold one sequence.
/// [`Kind::Overflow`] for more sequences than any GPU serves.
pub fn plan(demand: &Demand) -> Result<Planned> {
    let parts =
        [("weights", demand.weights), ("activations", demand.activations), ("workspace", demand.workspace)];
    let available = available(demand.gpu, parts)?;
    // What is wrong with one sequence is wrong. What becomes wrong with more of them is too many.
    demand.of(1).footprint()?;
    let fits = |sequences| demand.of(sequences).footprint().is_ok_and(|bytes| bytes.device() <= available);
    let most = most(|sequences| Ok(fits(sequences)))?;
    let sequences = match demand.batch {
        Batch::Sequences(0) => {
            return Err(Error::new(Kind::InvalidConfig, "plan").at("batch").with("value", 0_u32));
        }
        Batch::Sequences(batch) => batch,
        Batch::Most => most.max(1),
    };
    let config = demand.of(sequences);
    let bytes = config.footprint()?;
    if bytes.device() > available {
        return Err(Error::new(Kind::OutOfMemory, "plan")
            .at("gpu: the pages of this batch, and its page tables")
            .with("batch", sequences)
            .with("most", most)
            .with("wanted", bytes.device())
            .with("available", available)
            .hint("plan with a smaller batch or context, or with more memory of the GPU: attention reads every row"));
    }
    let host = demand.host.map(|host| host_tier(&config, &bytes, host)).transpose()?;
    Ok(Planned { config, bytes, available, most, host })
}

impl Demand {
    /// The cache for so many sequences.
    fn of(&self, sequences: u32) -> Config {
        let template = &self.config;
        let batch = sequences.div_ceil(template.micro_batches.max(1));
        let step_tokens = template.step_tokens.max(batch.saturating_mul(template.query_rows));
        let mut config = Config { sequences, batch, step_tokens, ..template.clone() };
        config.device_pages = config.pages_for(sequences, config.max_tokens);
        config
    }
}

/// What `host` bytes hold as second tier of a cache whose own bytes are `bytes`.
fn host_tier(config: &Config, bytes: &Footprint, host: u64) -> Result<HostTier> {
    let reach = config.reach(config.max_tokens)?;
    let groups = 0..config.shape.groups.len();
    let held = |group| config.shape.page_bytes(group).saturating_mul(config.reserve(group, reach).into());
    let sequence = groups.clone().map(held).fold(0, u64::saturating_add);
    let page = groups.map(|group| config.shape.page_bytes(group)).fold(0, u64::saturating_add);
    let left = host.saturating_sub(bytes.host());
    if left < sequence {
        return Err(Error::new(Kind::OutOfMemory, "plan")
            .at("host: the second tier cannot hold one sequence beside page tables and step descriptors")
            .with("wanted", bytes.host().saturating_add(sequence))
            .with("available", host)
            .hint("plan with more host memory, a smaller context, or without second tier"));
    }
    // A valid shape has no empty page.
    let tokens = (left / page.max(1)).saturating_mul(config.shape.page_tokens.into());
    Ok(HostTier { bytes: left, tokens, sequences: left / sequence.max(1) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dense::{Runs, Shape};

    const GIB: u64 = 1 << 30;

    fn v3(gpu: u64) -> Demand {
        Demand::new(Config::new(Shape::deepseek_v3(2), 1, 4096), gpu)
    }

    /// One by one, by counting a page for each started run of tokens: the most sequences whose bytes fit.
    fn naive(demand: &Demand) -> u32 {
        let config = &demand.config;
        let tokens = config.max_tokens + config.query_rows * config.steps_in_flight;
        let pages = (0..tokens).step_by(config.shape.page_tokens as usize).count() as u64;
        let parts = demand.weights + demand.activations + demand.workspace;
        let fits = |sequences: u64| {
            let rows = (1 + sequences * pages) * config.shape.page_bytes(0);
            let table = 4 * pages * sequences * (1 + u64::from(config.micro_batches));
            // Whatever else there is, is far less than a page.
            parts + rows + table <= demand.gpu
        };
        (1..).take_while(|sequences| fits(*sequences)).count() as u32
    }

    /// A published decode card keeps 72 sequences of 4,096 tokens of DeepSeek-V3 in BF16 in "20 GB". By admission they
    /// are GiB, and one more is refused with the layer that drafts, or with pages of 128 tokens.
    #[test]
    fn seventy_two_sequences_of_deepseek_v3_fit_20_gib_and_one_more_is_refused_with_the_reason() {
        let mut drafts = v3(20 * GIB);
        drafts.config.shape.groups[0].layers.push(61);
        drafts.config.query_rows = 2;
        let mut large = v3(20 * GIB);
        large.config.shape.page_tokens = 128;
        for demand in [drafts, large] {
            let planned = plan(&demand).unwrap();
            assert_eq!((planned.most, planned.config.sequences, naive(&demand)), (72, 72, 72));
            let fits = Demand { batch: Batch::Sequences(72), ..demand.clone() };
            assert_eq!(plan(&fits).unwrap(), planned);
            let error = plan(&Demand { batch: Batch::Sequences(73), ..demand }).unwrap_err();
            assert_eq!(error.kind(), Kind::OutOfMemory);
            assert!(error.place().starts_with("gpu: "));
            assert_eq!([error.number("batch"), error.number("most")], [Some(73), Some(72)]);
            assert_eq!(error.number("available"), Some(20 * GIB));
            assert!(error.number("wanted").is_some_and(|wanted| wanted > 20 * GIB));
        }
        let error = plan(&Demand { batch: Batch::Sequences(72), ..v3(20_000_000_000) }).unwrap_err();
        assert_eq!((error.kind(), error.number("most")), (Kind::OutOfMemory, Some(68)));
        assert_eq!(plan(&v3(20 * GIB)).unwrap().most, 73);
    }

    #[test]
    fn the_most_sequences_are_those_of_a_naive_count() {
        for (name, gpu, context) in
            [("llama-3.1-8b", 24, 8192), ("llama-3.1-70b", 80, 131_072), ("qwen3-32b", 80, 999)]
        {
            for page_tokens in [16, 64, 256] {
                let shape = Shape { page_tokens, ..Shape::preset(name).unwrap() };
                let config = Config { runs: Runs::Together, query_rows: 3, ..Config::new(shape, 1, context) };
                let demand = Demand { weights: 3 * GIB, workspace: GIB, ..Demand::new(config, gpu * GIB) };
                let planned = plan(&demand).unwrap();
                assert_eq!((planned.most, planned.available), (naive(&demand), (gpu - 4) * GIB), "{name}");
                assert!(planned.bytes.device() <= planned.available && planned.host.is_none());
                assert_eq!(planned.bytes, planned.config.footprint().unwrap());
            }
        }
    }

    /// In BF16 a token takes 36 KiB in the 18 layers with full attention, and as much in those with a window: 9 GiB a
    /// sequence of 131,072 tokens, or half of it and a few pages.
    #[test]
    fn windows_let_twice_the_sequences_in() {
        let most = |windows: bool| {
            let mut shape = Shape::gpt_oss_120b(2);
            if !windows {
                shape.groups[1].window = None;
            }
            plan(&Demand::new(Config::new(shape, 1, 131_072), 80 * GIB)).unwrap().most
        };
        assert_eq!((most(false), most(true)), (8, 17));
    }

    #[test]
    fn the_host_holds_parked_sequences_and_prefixes_and_at_least_one_sequence() {
        let demand = Demand { host: Some(64 * GIB), ..v3(20 * GIB) };
        let planned = plan(&demand).unwrap();
        let host = planned.host.unwrap();
        let (page, sequence) = (64 * 61 * 1152, 65 * 64 * 61 * 1152);
        assert_eq!(host.bytes, 64 * GIB - planned.bytes.host());
        assert_eq!((host.tokens, host.sequences), (host.bytes / page * 64, host.bytes / sequence));
        let least = planned.bytes.host() + sequence;
        let tier = |host| plan(&Demand { host: Some(host), ..demand.clone() });
        assert_eq!(tier(least).unwrap().host.map(|host| host.sequences), Some(1));
        for host in [0, least - 1] {
            let error = tier(host).unwrap_err();
            assert_eq!((error.kind(), error.number("wanted")), (Kind::OutOfMemory, Some(least)));
            assert!(error.place().starts_with("host: "));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let place = |demand: Demand| plan(&demand).map_err(|error| error.place().to_owned()).unwrap_err();
        assert_eq!(place(Demand { batch: Batch::Sequences(0), ..v3(20 * GIB) }), "batch");
        assert_eq!(place(Demand::new(Config::new(Shape::gpt_oss_20b(2), 1, 100), GIB)), "window");
        assert!(place(Demand { weights: 20 * GIB, ..v3(20 * GIB) }).starts_with("weights"));
        assert!(place(v3(GIB / 10)).starts_with("gpu: "));
        // More sequences than batch rows of the micro-batches are no plan, however much memory there is.
        let small = Config { micro_batches: 2, ..Config::new(Shape::smollm2_135m(2), 1, 16) };
        assert_eq!(plan(&Demand::new(small, 1 << 50)).unwrap().most, 2 * 32_767);
    }
}
