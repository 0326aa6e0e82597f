//! The configuration of a dense cache: sizes that never change, and checks that name the wrong field.
//!
//! `check` checks all numbers before any memory is taken. What follows from them is computed beside it: the pages that
//! a sequence needs ([`reserve`](super::reserve)) and how a page lies in memory ([`planes`](super::planes)).

use crate::dense::shape::Shape;
use crate::device::descriptor::BATCH_MAX;
use crate::error::{Error, Kind, Result};
use crate::total::CAPACITY_MAX;
use crate::total::memory::Memory;

/// How the pages of a group lie in device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// Each layer has its own memory, `[pages][a page's rows of the layer]`, as most engines allocate it. A page is
    /// moved in one piece a layer.
    #[default]
    LayerFirst,
    /// A page has the rows of all layers side by side, `[pages][layers][a page's rows of a layer]`, so it is moved in
    /// one piece. The tensors of a layer have the stride of the whole page.
    PageFirst,
}

/// Where K and V of a token are, for groups that have two runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Runs {
    /// K and V each have their own memory: the pair of tensors that FlashAttention takes.
    #[default]
    Apart,
    /// One memory has both: in a page of a layer first K of all its tokens, then V of all its tokens,
    /// `[pages][2][...]`: the one tensor that FlashInfer takes.
    Together,
}

/// The integers of slots and positions in a step's tensors. Page tables and lengths are always i32, as kernels take
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Width {
    /// 32 bits.
    I32,
    /// 64 bits: vLLM's `slot_mapping` and `positions`.
    #[default]
    I64,
}

/// When a published page is copied to the host's tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Save {
    /// Write-through: after it is published, by [`Cache::save`](crate::dense::Cache::save), in the background. An
    /// eviction then copies nothing. A page that is evicted before its turn is lost.
    #[default]
    Published,
    /// Write-back: when its device page goes to others. Pages that no one evicts cost nothing; a step or an admission
    /// that evicts a page copies it first.
    Evicted,
}

/// The configuration of a dense cache. No part of a cache grows later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The shape of the model's cache.
    pub shape: Shape,
    /// How the pages of a group lie in device memory.
    pub layout: Layout,
    /// Where K and V are.
    pub runs: Runs,
    /// The integers of slots and positions.
    pub width: Width,
    /// Device pages of each group, the null page included: page 0, which is zeros and belongs to no sequence.
    pub device_pages: Vec<u32>,
    /// Host pages of each group: the second tier, which keeps published pages that the device has no room for, the
    /// pages of parked sequences, and those of sequences that arrive through the host. At least those of `max_tokens`
    /// tokens. Empty: no such tier; nothing can be parked, and nothing arrives through the host.
    pub host_pages: Vec<u32>,
    /// When published pages are copied to the host's tier.
    pub save: Save,
    /// Layers whose pages come back from the host together, and for which a step waits together, also where a sequence
    /// has arrived through the host ([`Way::Host`](crate::dense::Way)). A step may then compute its first layers while
    /// the pages of later ones still come: see [`Cache::arrived`](crate::dense::Cache::arrived). 0, or the model's
    /// layers or more: steps wait for all layers when they are prepared.
    pub bring_layers: u32,
    /// Sequences that may be open at the same time.
    pub sequences: u32,
    /// Tokens of the longest sequence: prompt plus promised tokens.
    pub max_tokens: u32,
    /// Rows of a batch, at most 32,767: a report can name no more.
    pub batch: u32,
    /// The most query rows of a step, over all its batch rows (vLLM's `max_num_batched_tokens`): at least
    /// `batch x query_rows`. A chunk of a prompt is one batch row with many query rows.
    pub step_tokens: u32,
    /// Query rows that a decoding sequence may have in a step: 1 + drafts. Pages for so many rows in each step in
    /// flight are reserved beyond a sequence's promised tokens. A batch row with more query rows is a chunk of a
    /// prompt, and none of its rows can be rejected.
    pub query_rows: u32,
    /// Steps of one sequence that may be in flight at the same time.
    pub steps_in_flight: u32,
    /// Micro-batches whose steps may be open at the same time.
    pub micro_batches: u32,
    /// How the host's memory is taken: the host's tier, the page tables and the step descriptors.
    pub memory: Memory,
    /// Skips the check that the machine has enough memory. For machines that report less memory than they can give.
    pub overcommit: bool,
}

/// Query rows of a step by default: vLLM's `max_num_batched_tokens` where a model's server names none.
const STEP_TOKENS: u32 = 2048;

impl Config {
    /// A cache of `shape` for `sequences` sequences of up to `max_tokens` tokens. It has device pages for all of them
    /// at full length. All sequences fit one batch, with one query row each, and a step has at least 2,048 query rows.
    pub fn new(shape: Shape, sequences: u32, max_tokens: u32) -> Self {
        let batch = sequences.min(BATCH_MAX);
        let mut config = Config {
            shape,
            layout: Layout::default(),
            runs: Runs::default(),
            width: Width::default(),
            device_pages: Vec::new(),
            host_pages: Vec::new(),
            save: Save::default(),
            bring_layers: 0,
            sequences,
            max_tokens,
            batch,
            step_tokens: batch.max(STEP_TOKENS),
            query_rows: 1,
            steps_in_flight: 2,
            micro_batches: 1,
            memory: Memory::default(),
            overcommit: false,
        };
        config.device_pages = config.pages_for(sequences, max_tokens);
        config
    }

    /// The device pages of each group with which `sequences` sequences of `tokens` tokens fit, and not one page more:
    /// the null page, each sequence's pages with its rows in flight, and for groups with a window the pages of prompt
    /// chunks in flight. It depends on `step_tokens`, `query_rows`, `steps_in_flight`, `micro_batches` and `batch`, so
    /// call it again after changing them. `u32::MAX` where more would be needed.
    pub fn pages_for(&self, sequences: u32, tokens: u32) -> Vec<u32> {
        let reach = self.reach(tokens).unwrap_or(u32::MAX);
        let all = |pages: u32| u64::from(pages).saturating_mul(sequences.into());
        let pages = |group| self.demand(group, all(self.reserve(group, reach)), all(self.pages(reach)));
        let groups = 0..self.shape.groups.len();
        groups.map(|group| u32::try_from(pages(group).saturating_add(1)).unwrap_or(u32::MAX)).collect()
    }

    /// The tokens of a sequence together with its rows in flight.
    pub(crate) fn reach(&self, tokens: u32) -> Result<u32> {
        let rows = self.query_rows.checked_mul(self.steps_in_flight);
        rows.and_then(|rows| rows.checked_add(tokens)).ok_or_else(|| {
            Error::new(Kind::Overflow, "dense cache")
                .at("max_tokens and the rows in flight: query_rows x steps_in_flight")
                .with("max_tokens", tokens)
                .with("query_rows", self.query_rows)
                .with("steps_in_flight", self.steps_in_flight)
        })
    }

    /// The layers that a sequence may bring up one by one: none without a host's tier.
    pub(super) fn layers_up(&self) -> u32 {
        if self.host_pages.is_empty() { 1 } else { self.shape.layers() as u32 }
    }

    /// The parts in which pages come back: [`Config::bring_layers`] layers each.
    pub(crate) fn parts(&self) -> u32 {
        let layers = self.shape.layers() as u32;
        if self.bring_layers == 0 { 1 } else { layers.div_ceil(self.bring_layers) }
    }

    /// The part of a layer.
    pub(crate) fn part(&self, layer: u32) -> u32 {
        layer.checked_div(self.bring_layers).unwrap_or(0)
    }

    /// Entries of a sequence's page table, in every group: the pages of the longest reach.
    pub(crate) fn entries(&self) -> Result<u32> {
        Ok(self.pages(self.reach(self.max_tokens)?))
    }

    /// Checks all numbers.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] and [`Kind::Overflow`] name the field.
    pub(crate) fn check(&self) -> Result<()> {
        self.shape.check()?;
        let counts = [
            ("sequences", self.sequences),
            ("max_tokens", self.max_tokens),
            ("batch", self.batch),
            ("step_tokens", self.step_tokens),
            ("query_rows", self.query_rows),
            ("steps_in_flight", self.steps_in_flight),
            ("micro_batches", self.micro_batches),
        ];
        if let Some((name, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(invalid(name).with("value", 0_u32).hint("pass 1 or more"));
        }
        if self.batch > BATCH_MAX {
            let error = invalid("batch").with("value", self.batch).with("most", BATCH_MAX);
            return Err(error.hint("divide the batch over several micro-batches"));
        }
        // Positions, lengths and cumulative query rows are written as i32, and some values are reserved as marks.
        if self.reach(self.max_tokens)? >= i32::MAX as u32 {
            let error = invalid("max_tokens").with("value", self.max_tokens);
            return Err(error.hint("max_tokens + query_rows x steps_in_flight must stay below 2147483647"));
        }
        if self.step_tokens >= i32::MAX as u32 {
            let error = invalid("step_tokens").with("value", self.step_tokens);
            return Err(error.hint("pass less than 2147483647"));
        }
        let decoding = u64::from(self.batch) * u64::from(self.query_rows);
        if u64::from(self.step_tokens) < decoding {
            let error = invalid("step_tokens").with("value", self.step_tokens).with("least", decoding);
            return Err(error
                .hint("pass at least batch x query_rows, the rows of a step that decodes every batch row"));
        }
        if self.parts() > 1 && self.layout == Layout::PageFirst {
            let error = invalid("bring_layers").with("value", self.bring_layers);
            return Err(error.hint("pass 0: with Layout::PageFirst a page comes back in one piece"));
        }
        self.check_windows()?;
        self.check_pages()?;
        self.check_host()
    }

    /// Rejects a window that no sequence fills: its layers have full attention, and cost what those do.
    fn check_windows(&self) -> Result<()> {
        let windows = self.shape.groups.iter().enumerate().filter_map(|(g, group)| Some((g, group.window?)));
        let too_large = windows.into_iter().find(|(_, window)| *window > self.max_tokens);
        too_large.map_or(Ok(()), |(group, window)| {
            Err(invalid("window")
                .with("value", window)
                .with("max_tokens", self.max_tokens)
                .with("group", group as u64)
                .hint("leave the window out: it is larger than any sequence, so its layers read all tokens"))
        })
    }

    /// Rejects device pages that cannot hold a sequence of one token, or whose slots have no number.
    fn check_pages(&self) -> Result<()> {
        let groups = self.shape.groups.len();
        if self.device_pages.len() != groups {
            let error = invalid("device_pages").with("given", self.device_pages.len() as u64);
            return Err(error.with("wanted", groups as u64).hint("pass the pages of each group"));
        }
        let least = u64::from(self.pages(self.reach(1)?)) + 1;
        for (group, &pages) in self.device_pages.iter().enumerate() {
            let wrong = || invalid("device_pages").with("given", pages).with("group", group as u64);
            if u64::from(pages) < least {
                return Err(wrong().with("least", least).hint(
                    "pass at least the null page and the pages of one token and its rows in flight: \
                     query_rows x steps_in_flight",
                ));
            }
            let most = i32::MAX as u32 / if self.width == Width::I32 { self.shape.page_tokens } else { 1 };
            if pages > most {
                return Err(wrong().with("most", most).hint(match self.width {
                    Width::I32 => {
                        "pass fewer pages or slots of 64 bits: a slot is page x page_tokens + offset"
                    }
                    Width::I64 => "pass fewer pages: page tables are i32",
                }));
            }
        }
        Ok(())
    }
}

impl Config {
    /// Rejects a host's tier that cannot hold a sequence.
    fn check_host(&self) -> Result<()> {
        let groups = self.shape.groups.len();
        if self.host_pages.is_empty() {
            return Ok(());
        }
        if self.host_pages.len() != groups {
            let error = invalid("host_pages").with("given", self.host_pages.len() as u64);
            return Err(error
                .with("wanted", groups as u64)
                .hint("pass the pages of each group, or none for no tier"));
        }
        let all =
            self.device_pages.iter().zip(&self.host_pages).map(|(device, host)| device.saturating_add(*host));
        if let Some((group, pages)) = all.enumerate().find(|(_, pages)| *pages > CAPACITY_MAX) {
            let error =
                invalid("device_pages and host_pages").with("given", pages).with("most", CAPACITY_MAX);
            return Err(error.with("group", group as u64).hint("pass fewer, or larger pages"));
        }
        let least = self.pages(self.max_tokens);
        match self.host_pages.iter().enumerate().find(|(_, pages)| **pages < least) {
            Some((group, pages)) => Err(invalid("host_pages")
                .with("given", *pages)
                .with("least", least)
                .with("group", group as u64)
                .hint("pass at least the pages of the longest sequence, or leave the host's tier out")),
            None => Ok(()),
        }
    }
}

fn invalid(place: &'static str) -> Error {
    Error::new(Kind::InvalidConfig, "dense cache").at(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dense::shape::Group;

    type Change = fn(&mut Config);

    fn config() -> Config {
        Config::new(Shape::gpt_oss_20b(2), 8, 4096)
    }

    /// Of a change to a valid configuration: the field that the error names, and its numbers.
    fn refused(change: impl Fn(&mut Config)) -> (String, Vec<(&'static str, u64)>) {
        let mut config = config();
        change(&mut config);
        let error = config.check().unwrap_err();
        assert_eq!(error.operation(), "dense cache");
        assert_ne!(error.advice(), error.kind().hint(), "{error}");
        (error.place().to_owned(), error.numbers().to_vec())
    }

    #[test]
    fn a_new_configuration_is_valid_and_holds_all_its_sequences() {
        for (name, preset) in Shape::PRESETS {
            for (sequences, tokens) in [(1, 1024), (72, 4096), (40_000, 131_072)] {
                let config = Config::new(preset(2), sequences, tokens);
                assert_eq!(config.check(), Ok(()), "{name}");
                assert!(config.step_tokens >= config.batch);
            }
        }
        // Two rows in flight of each sequence: 4,098 tokens in pages of 64; a window of 128 is 4 pages.
        let config = config();
        assert_eq!(config.device_pages[0], 8 * 65 + 1);
        // 4,096 rows of chunks in flight fill 64 pages, and each of 8 sequences may begin one more.
        assert_eq!(config.device_pages[1], 8 * 4 + 64 + 7 + 1);
    }

    #[test]
    fn counts_of_nothing_are_refused_by_name() {
        let changes: [(&str, Change); 7] = [
            ("sequences", |config| config.sequences = 0),
            ("max_tokens", |config| config.max_tokens = 0),
            ("batch", |config| config.batch = 0),
            ("step_tokens", |config| config.step_tokens = 0),
            ("query_rows", |config| config.query_rows = 0),
            ("steps_in_flight", |config| config.steps_in_flight = 0),
            ("micro_batches", |config| config.micro_batches = 0),
        ];
        for (name, change) in changes {
            assert_eq!(refused(change), (name.to_owned(), vec![("value", 0)]));
        }
        assert_eq!(refused(|config| config.shape.groups.clear()).0, "groups");
    }

    #[test]
    fn numbers_that_do_not_fit_their_integers_are_refused() {
        let wrong = |name: &str, numbers: &[(&'static str, u64)]| (name.to_owned(), numbers.to_vec());
        assert_eq!(
            refused(|config| config.batch = BATCH_MAX + 1),
            wrong("batch", &[("value", 32768), ("most", 32767)])
        );
        let longest = i32::MAX as u32 - 3;
        let mut most = Config { max_tokens: longest, ..config() };
        most.device_pages = vec![5; 2];
        assert_eq!(most.check(), Ok(()));
        assert_eq!(
            refused(|config| config.max_tokens = longest + 1),
            wrong("max_tokens", &[("value", u64::from(longest) + 1)])
        );
        let overflow = Config { query_rows: 1 << 31, steps_in_flight: 2, ..config() }.check().unwrap_err();
        assert_eq!((overflow.kind(), overflow.number("query_rows")), (Kind::Overflow, Some(1 << 31)));
        assert_eq!(
            refused(|config| config.step_tokens = i32::MAX as u32),
            wrong("step_tokens", &[("value", i32::MAX as u64)])
        );
        assert_eq!(
            refused(|config| (config.step_tokens, config.query_rows) = (15, 2)),
            wrong("step_tokens", &[("value", 15), ("least", 16)])
        );
        // The last slot of 64-token pages that an i32 can name is of page 33,554,431.
        let pages = i32::MAX as u32 / 64;
        let slots = |width, pages| Config { width, device_pages: vec![70, pages], ..config() }.check();
        assert_eq!(slots(Width::I32, pages), Ok(()));
        assert_eq!(slots(Width::I64, i32::MAX as u32), Ok(()));
        let error = slots(Width::I32, pages + 1).unwrap_err();
        assert_eq!(
            (error.place(), error.number("most"), error.number("group")),
            ("device_pages", Some(pages.into()), Some(1))
        );
        assert_eq!(slots(Width::I64, i32::MAX as u32 + 1).unwrap_err().number("most"), Some(i32::MAX as u64));
    }

    #[test]
    fn windows_larger_than_sequences_and_pages_for_no_sequence_are_refused() {
        assert_eq!(
            refused(|config| config.max_tokens = 127),
            ("window".to_owned(), vec![("value", 128), ("max_tokens", 127), ("group", 1)])
        );
        assert_eq!(Config { max_tokens: 128, ..config() }.check(), Ok(()));
        assert_eq!(
            refused(|config| config.device_pages = vec![70]),
            ("device_pages".to_owned(), vec![("given", 1), ("wanted", 2)])
        );
        // One token and two rows in flight are one page, besides the null page; with 64 in flight they are two.
        assert_eq!(Config { device_pages: vec![2, 2], ..config() }.check(), Ok(()));
        assert_eq!(
            refused(|config| config.device_pages[1] = 1),
            ("device_pages".to_owned(), vec![("given", 1), ("group", 1), ("least", 2)])
        );
        let rows = |config: &mut Config| (config.device_pages, config.query_rows) = (vec![2, 70], 32);
        assert_eq!(refused(rows).1, [("given", 2), ("group", 0), ("least", 3)]);
    }

    /// The most sequences of `tokens` tokens that admission lets in, given the bytes of the pages alone.
    fn admitted(config: &Config, bytes: u64, tokens: u32) -> u64 {
        let pages = bytes / config.shape.page_bytes(0) - 1;
        let reserve = config.reserve(0, config.reach(tokens).unwrap());
        (0..)
            .take_while(|n| {
                config.demand(0, (n + 1) * u64::from(reserve), (n + 1) * u64::from(reserve)) <= pages
            })
            .count() as u64
    }

    /// A published decode card has 20 "GB" for 72 sequences of 4,096 tokens of DeepSeek-V3 in BF16. They are GiB.
    #[test]
    fn seventy_two_sequences_of_deepseek_v3_fill_20_gib_and_do_not_fit_20_gb() {
        const GIB: u64 = 20 << 30;
        let config = Config::new(Shape::deepseek_v3(2), 73, 4096);
        assert!(72 * u64::from(config.reserve(0, 4098)) * config.shape.page_bytes(0) > 20_000_000_000);
        assert_eq!(admitted(&config, 20_000_000_000, 4096), 68);
        // The rows in flight begin a page of their own: 65 pages of 64, or 33 of 128.
        assert_eq!(admitted(&config, GIB, 4096), 73);
        let mut pages = config.clone();
        pages.shape.page_tokens = 128;
        assert_eq!(admitted(&pages, GIB, 4096), 72);
        // With the layer that drafts, and with two rows in flight more.
        let mut drafts = Config { query_rows: 2, ..config };
        drafts.shape.groups[0].layers.push(61);
        assert_eq!(admitted(&drafts, GIB, 4096), 72);
    }

    #[test]
    fn pages_for_saturate() {
        let config = Config::new(Shape::llama_3_1_8b(2), u32::MAX, u32::MAX);
        assert_eq!(config.device_pages, [u32::MAX]);
        assert_eq!(config.check().unwrap_err().kind(), Kind::Overflow);
        let group = Group { layers: vec![0], runs: [16, 16], window: Some(u32::MAX) };
        let shape = Shape { page_tokens: 0, groups: vec![group] };
        assert_eq!(Config::new(shape, 1, 3).check().unwrap_err().place(), "page_tokens");
    }
}
