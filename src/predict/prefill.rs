//! Computes the memory that a prefill instance needs on one GPU, and what it leaves.
//!
//! A pass of the model computes one chunk of each prompt of the batch, layer by layer. A layer writes its rows and
//! index keys into a part of the staging ring, and the part is given back when the receiver has acknowledged it. So the
//! GPU needs its weights, the activations of a pass, the engine's workspace, and the ring.
//!
//! **When the ring suffices.** If a pass computes whole prompts, attention reads the rows of the present layer alone,
//! and nothing is kept behind the ring. If prompts are computed in chunks, each layer of a later chunk reads the rows
//! of all earlier tokens, so the GPU keeps the pages of whole prompts, in all layers, until they are done. The plan
//! counts them ([`Planned::kept`]). The ring then serves the transfer alone: pages need not be held until a receiver
//! has them.
//!
//! **The depth of the ring** follows from three times: a layer computes, its part crosses the link, the receiver
//! acknowledges. A part is held for their sum. A layer cannot end more often than the larger of the first two lets it.
//! So the default depth is their sum divided by the larger one, rounded up: with fewer parts prefill would wait for the
//! ring, with more it gains nothing.
//!
//! **Equal parts.** Where layers share an indexer, some have no index keys. Every part has the bytes of the largest: in
//! a ring of parts of different lengths one may find no room at either end, and wait for a part that it does not need.
//!
//! **Ranks.** With the tokens of a pass divided over ranks, a rank has its slice of the activations, of each part and
//! of the pages. What ranks gather of each other for a layer's attention is workspace.
//!
//! **What it does not know.** Whether the receiver keeps pace: it may acknowledge later than assumed. Layers that draft
//! count only if the shape has them.

use crate::error::{Error, Kind, Result};
use crate::geometry::{Geometry, LINE, SLOT_BLOCK, Shape};

/// Published bytes of activations of a pass of [`PUBLISHED_TOKENS`] tokens. For how many GPUs is not said; it is taken
/// for one.
pub const PUBLISHED_ACTIVATIONS: u64 = 1_000_000_000;

/// Published microseconds of a layer in a pass of [`PUBLISHED_TOKENS`] tokens. For how many GPUs is not said; it is
/// taken for a rank's tokens. A slower layer needs no deeper ring.
pub const PUBLISHED_LAYER_US: f64 = 10_300.0;

/// The tokens of the pass whose figures are published.
pub const PUBLISHED_TOKENS: u32 = 16_384;

/// Bytes per second of a link of 400 Gb/s.
pub const LINK_RATE: f64 = 50e9;

/// Assumed microseconds from the last byte of a part to its acknowledgement.
pub const ACKNOWLEDGE_US: f64 = 1000.0;

/// Numbers above this, and positive ones below its inverse, are no time and no rate.
const MOST: f64 = 1e18;

/// The inputs of a plan. Bytes are of one GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// The model's cache.
    pub shape: Shape,
    /// Tokens of the longest sequence that the model was made for; none if unknown.
    pub longest: Option<u32>,
    /// Bytes of the GPU's memory.
    pub gpu: u64,
    /// Bytes of weights on it.
    pub weights: u64,
    /// Bytes of activations; none for the published figure, scaled by the tokens of a pass.
    pub activations: Option<u64>,
    /// Bytes of the engine's other memory: workspace, graphs, communication buffers.
    pub workspace: u64,
    /// Bytes of pinned host memory for the ring; none for a ring on the GPU.
    pub host: Option<u64>,
    /// Tokens of a prompt.
    pub context: u32,
    /// Tokens of each prompt in a pass, at most its tokens.
    pub chunk: u32,
    /// Prompts of a pass.
    pub batch: u32,
    /// GPUs that the tokens of a pass are divided over.
    pub ranks: u32,
    /// Bytes per second of the link that one GPU sends over.
    pub link_rate: f64,
    /// Microseconds that one layer of a pass computes; none for the published figure, scaled by the tokens of a pass.
    pub layer_us: Option<f64>,
    /// Microseconds from the last byte of a part to its acknowledgement.
    pub acknowledge_us: f64,
    /// Parts of the ring; none for the fewest with which prefill never waits for the ring.
    pub depth: Option<u32>,
}

impl Demand {
    /// One prompt of `context` tokens at a time on a GPU of `gpu` bytes, in passes of up to [`PUBLISHED_TOKENS`]
    /// tokens, with published and assumed figures.
    pub fn new(shape: Shape, gpu: u64, context: u32) -> Demand {
        Demand {
            shape,
            longest: None,
            gpu,
            weights: 0,
            activations: None,
            workspace: 0,
            host: None,
            context,
            chunk: context.min(PUBLISHED_TOKENS),
            batch: 1,
            ranks: 1,
            link_rate: LINK_RATE,
            layer_us: None,
            acknowledge_us: ACKNOWLEDGE_US,
            depth: None,
        }
    }

    /// What is published or assumed instead of given, in sentences, as in
    /// [`Provenance`](super::provenance::Provenance::assumptions).
    pub fn assumptions(&self) -> Vec<String> {
        let scaled = format!("at {PUBLISHED_TOKENS} tokens, as published, in proportion to a rank's tokens");
        let mut all = Vec::new();
        if self.activations.is_none() {
            let gb = PUBLISHED_ACTIVATIONS as f64 / 1e9;
            all.push(format!("activations: {gb} GB {scaled}; other models may take more or less"));
        }
        if self.layer_us.is_none() {
            let ms = PUBLISHED_LAYER_US / 1e3;
            all.push(format!("a layer computes {ms} ms {scaled}; a long context takes longer"));
        }
        if self.link_rate == LINK_RATE {
            all.push(format!("the link moves {} GB/s, 400 Gb/s", LINK_RATE / 1e9));
        }
        if self.acknowledge_us == ACKNOWLEDGE_US {
            let ms = ACKNOWLEDGE_US / 1e3;
            all.push(format!("a part is acknowledged {ms} ms after its last byte, which was not measured"));
        }
        if self.ranks > 1 {
            all.push(
                "what ranks gather of each other for a layer's attention is part of the workspace".to_owned(),
            );
        }
        all
    }

    /// Whether a pass computes whole prompts.
    pub const fn in_one_pass(&self) -> bool {
        self.chunk == self.context
    }

    fn check(&self) -> Result<Geometry> {
        let geometry = Geometry::new(self.shape)?;
        let counts = [
            ("context", self.context),
            ("chunk", self.chunk),
            ("batch", self.batch),
            ("ranks", self.ranks),
            ("depth", self.depth.unwrap_or(1)),
        ];
        if let Some((field, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(invalid(field).with("value", 0_u32));
        }
        if let Some(longest) = self.longest.filter(|longest| self.context > *longest) {
            return Err(invalid("context is beyond the model's")
                .with("context", self.context)
                .with("most", longest));
        }
        if self.chunk > self.context {
            return Err(invalid("chunk is beyond the context")
                .with("chunk", self.chunk)
                .with("context", self.context)
                .hint("pass a chunk of at most the context"));
        }
        let times = [("link_rate", self.link_rate), ("layer_us", self.layer_us.unwrap_or(1.0))];
        if let Some((field, _)) = times.iter().find(|(_, value)| !(1.0 / MOST..=MOST).contains(value)) {
            return Err(invalid(field).hint("pass a number above 0"));
        }
        if !(0.0..=MOST).contains(&self.acknowledge_us) {
            return Err(invalid("acknowledge_us").hint("pass 0 or more"));
        }
        Ok(geometry)
    }
}

/// The staging ring of a plan. Bytes are of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ring {
    /// Bytes of rows in a part: a layer of a pass, at the host's stride. The link's time counts its padding too.
    pub row_bytes: u64,
    /// Bytes of index keys in it.
    pub key_bytes: u64,
    /// Bytes of a part, a multiple of 64.
    pub part: u64,
    /// Parts.
    pub depth: u32,
    /// Bytes of the ring.
    pub bytes: u64,
    /// Bytes of rows of the pass in all layers, which would be held without a ring until they are acknowledged.
    pub all_row_bytes: u64,
    /// The same for index keys.
    pub all_key_bytes: u64,
    /// Microseconds that a layer computes.
    pub layer_us: f64,
    /// Microseconds that a part takes on the link.
    pub transfer_us: f64,
    /// Microseconds from there to its acknowledgement.
    pub acknowledge_us: f64,
    /// Microseconds of each layer that prefill waits for the link or for a part.
    pub wait_us: f64,
}

impl Ring {
    /// Microseconds from the beginning of a layer to the acknowledgement of its part.
    pub fn held_us(&self) -> f64 {
        self.layer_us + self.transfer_us + self.acknowledge_us
    }

    /// Whether the link takes longer for a part than the layer computes.
    pub fn is_link_bound(&self) -> bool {
        self.transfer_us > self.layer_us
    }
}

/// Bytes of pages on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Rows, packed as attention reads them.
    pub rows: u64,
    /// Index keys.
    pub index_keys: u64,
}

impl Kept {
    /// Both.
    pub const fn bytes(&self) -> u64 {
        self.rows + self.index_keys
    }
}

/// A plan. Bytes are of one GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// Tokens of a pass on one rank.
    pub tokens: u64,
    /// Passes until a prompt is done.
    pub passes: u32,
    /// Bytes of activations.
    pub activations: u64,
    /// The staging ring.
    pub ring: Ring,
    /// The pages of prompts in chunks; nothing where a pass computes whole prompts.
    pub kept: Kept,
    /// Bytes of the GPU that all parts take together.
    pub bytes: u64,
    /// Bytes of the GPU that are left: for published prefixes and further prompts.
    pub left: u64,
    /// Tokens whose rows and index keys, in all layers, fit in [`Planned::left`].
    pub left_tokens: u64,
}

fn invalid(field: &'static str) -> Error {
    Error::new(Kind::InvalidConfig, "plan").at(field)
}

fn product(factors: &[u64]) -> Result<u64> {
    let all = factors.iter().try_fold(1_u64, |all, factor| all.checked_mul(*factor));
    all.ok_or_else(|| Error::new(Kind::Overflow, "plan").at("tokens of a pass, or parts of the ring"))
}

/// Makes a plan.
///
/// # Errors
/// [`Kind::InvalidConfig`] names an invalid field: a count of 0, a context beyond the model, a chunk beyond
/// the context, a rate or time that is none. [`Kind::OutOfMemory`] names the first part that does not fit, in the order
/// weights, activations, workspace, staging ring, pages, with `wanted`, `available` and `missing` bytes.
/// [`Kind::Overflow`] for sizes that overflow. Errors of [`Geometry::new`].
pub fn plan(demand: &Demand) -> Result<Planned> {
    let geometry = demand.check()?;
    let pass = u64::from(demand.chunk) * u64::from(demand.batch);
    let tokens = pass.div_ceil(u64::from(demand.ranks));
    let activations = demand.activations.unwrap_or_else(|| {
        let scaled = u128::from(PUBLISHED_ACTIVATIONS) * u128::from(tokens);
        u64::try_from(scaled.div_ceil(u128::from(PUBLISHED_TOKENS))).unwrap_or(u64::MAX)
    });
    let ring = ring(demand, &geometry, tokens)?;
    let kept = if demand.in_one_pass() { Kept::default() } else { kept(demand, &geometry)? };
    if let Some(host) = demand.host {
        fits("host: the staging ring", ring.bytes, host, RING_HINT)?;
    }
    let on_gpu = if demand.host.is_some() { 0 } else { ring.bytes };
    let parts = [
        ("gpu: weights", demand.weights, "plan with a larger GPU, or divide the weights over more of them"),
        ("gpu: activations", activations, "plan with a smaller chunk or batch, or with more ranks"),
        (
            "gpu: workspace",
            demand.workspace,
            "plan with a larger GPU, or divide the weights over more of them",
        ),
        ("gpu: the staging ring", on_gpu, RING_HINT),
        (
            "gpu: pages of prompts in chunks",
            kept.bytes(),
            "plan with a smaller context or batch, with more ranks, or with a chunk of the whole context",
        ),
    ];
    let left = parts
        .iter()
        .try_fold(demand.gpu, |available, (part, bytes, hint)| fits(part, *bytes, available, hint))?;
    let row = product(&[geometry.block_bytes().into(), geometry.layers().into()])? / u64::from(SLOT_BLOCK);
    let key = u64::from(demand.shape.index_key_bytes) * u64::from(geometry.index_layers());
    Ok(Planned {
        tokens,
        passes: demand.context.div_ceil(demand.chunk),
        activations,
        ring,
        kept,
        bytes: demand.gpu - left,
        left,
        left_tokens: left / (row + key).max(1),
    })
}

const RING_HINT: &str = "plan with a smaller chunk, batch or depth, with more ranks, or with more memory";

/// What a part leaves of memory.
fn fits(part: &'static str, wanted: u64, available: u64, hint: &'static str) -> Result<u64> {
    available.checked_sub(wanted).ok_or_else(|| {
        Error::new(Kind::OutOfMemory, "plan")
            .at(part)
            .with("wanted", wanted)
            .with("available", available)
            .with("missing", wanted - available)
            .hint(hint)
    })
}

/// The ring for passes of `tokens` tokens on a rank.
fn ring(demand: &Demand, geometry: &Geometry, tokens: u64) -> Result<Ring> {
    let row_bytes = product(&[tokens, geometry.host_stride().into()])?;
    let key_bytes = product(&[tokens, demand.shape.index_key_bytes.into()])?;
    let overflow = || Error::new(Kind::Overflow, "plan").at("bytes of a part");
    let part = row_bytes
        .checked_add(key_bytes)
        .and_then(|bytes| bytes.checked_next_multiple_of(LINE.into()))
        .ok_or_else(overflow)?;
    let scale = tokens as f64 / f64::from(PUBLISHED_TOKENS);
    let layer_us = demand.layer_us.unwrap_or(PUBLISHED_LAYER_US * scale);
    let transfer_us = part as f64 / demand.link_rate * 1e6;
    let held = layer_us + transfer_us + demand.acknowledge_us;
    let most = layer_us.max(transfer_us);
    // A depth beyond any ring saturates, and its bytes are refused.
    let depth = demand.depth.unwrap_or((held / most).ceil() as u32);
    let pace = most.max(held / f64::from(depth));
    Ok(Ring {
        row_bytes,
        key_bytes,
        part,
        depth,
        bytes: product(&[part, depth.into()])?,
        all_row_bytes: product(&[row_bytes, geometry.layers().into()])?,
        all_key_bytes: product(&[key_bytes, geometry.index_layers().into()])?,
        layer_us,
        transfer_us,
        acknowledge_us: demand.acknowledge_us,
        wait_us: pace - layer_us,
    })
}

/// The pages of the batch's prompts on a rank: rows in whole device blocks, as a cache with all rows on the device.
fn kept(demand: &Demand, geometry: &Geometry) -> Result<Kept> {
    // A rank of several has pages of its own for its tokens of each pass.
    let pages = match demand.ranks {
        1 => product(&[geometry.pages(demand.context).into(), demand.batch.into()])?,
        ranks => {
            let pass = product(&[demand.chunk.into(), demand.batch.into()])?.div_ceil(ranks.into());
            let pages = pass.div_ceil(geometry.page_tokens().into());
            product(&[demand.context.div_ceil(demand.chunk.max(1)).into(), pages])?
        }
    };
    let blocks = product(&[pages, geometry.page_tokens().into()])?.div_ceil(SLOT_BLOCK.into());
    let rows = product(&[blocks, geometry.block_bytes().into(), geometry.layers().into()])?;
    let index_keys = product(&[pages, geometry.index_page_bytes(), geometry.index_layers().into()])?;
    match rows.checked_add(index_keys) {
        Some(_) => Ok(Kept { rows, index_keys }),
        None => Err(Error::new(Kind::Overflow, "plan").at("pages")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn v32(context: u32) -> Demand {
        Demand::new(Shape::DEEPSEEK_V3_2, 141 * GIB, context)
    }

    /// By hand: a row takes 704 bytes in the ring and an index key 132, in 61 layers.
    #[test]
    fn a_pass_of_4096_tokens_of_v3_2_has_176_mb_of_rows_33_mb_of_keys_and_a_ring_of_two_parts() {
        let planned = plan(&v32(4096)).unwrap();
        let ring = planned.ring;
        assert_eq!((ring.all_row_bytes, ring.all_key_bytes), (175_898_624, 32_980_992));
        assert_eq!((ring.row_bytes, ring.key_bytes, ring.part), (2_883_584, 540_672, 3_424_256));
        // 2,575 us of computation, 68.5 on the link, 1,000 to the acknowledgement: 1.4 layers.
        assert_eq!((ring.depth, ring.bytes, ring.wait_us), (2, 6_848_512, 0.0));
        assert_eq!((ring.layer_us, ring.held_us().round()), (2575.0, 3643.0));
        assert_eq!((planned.tokens, planned.activations, planned.kept), (4096, 250_000_000, Kept::default()));
        assert_eq!(planned.bytes, 250_000_000 + 6_848_512);
        assert_eq!(planned.left, 141 * GIB - planned.bytes);
        // A token takes 656 and 132 bytes in each layer on the GPU.
        assert_eq!(planned.left_tokens, planned.left / (788 * 61));
    }

    #[test]
    fn prompts_in_chunks_keep_the_pages_of_all_their_tokens() {
        let planned = plan(&Demand { batch: 3, ..v32(131_072) }).unwrap();
        assert_eq!((planned.passes, planned.tokens, planned.activations), (8, 49_152, 3_000_000_000));
        let tokens = 3 * 131_072 * 61;
        assert_eq!(planned.kept, Kept { rows: tokens * 656, index_keys: tokens * 132 });
        assert_eq!(planned.bytes, 3_000_000_000 + planned.ring.bytes + tokens * 788);
        // One token less than the context is enough to keep all of them, in whole pages of 64 tokens.
        let almost = plan(&Demand { chunk: 99, ..v32(100) }).unwrap();
        assert_eq!((almost.passes, almost.kept.rows), (2, 128 * 61 * 656));
        assert_eq!(plan(&Demand { chunk: 100, ..v32(100) }).unwrap().kept.bytes(), 0);
    }

    #[test]
    fn a_rank_has_its_slice_and_a_ring_on_the_host_takes_none_of_the_gpu() {
        let one = plan(&v32(131_072)).unwrap();
        let slice = plan(&Demand { ranks: 8, ..v32(131_072) }).unwrap();
        assert_eq!((slice.tokens, slice.ring.part * 8), (2048, one.ring.part));
        assert_eq!((slice.kept.bytes() * 8, slice.activations * 8), (one.kept.bytes(), one.activations));
        // The last rank's slice of 100 tokens over 3 is padded, and a part has whole lines of 64 bytes.
        let padded = plan(&Demand { ranks: 3, ..v32(100) }).unwrap();
        assert_eq!((padded.tokens, padded.ring.part), (34, 28_480));
        let host = plan(&Demand { host: Some(one.ring.bytes), ..v32(131_072) }).unwrap();
        assert_eq!((host.ring, host.bytes), (one.ring, one.bytes - one.ring.bytes));
    }

    /// Of GLM-5.2's 78 layers 21 have an indexer. A part has room for its keys, whichever layer it is of.
    #[test]
    fn layers_without_an_indexer_have_parts_of_the_same_length() {
        let planned = plan(&Demand::new(Shape::GLM_5_2, GIB, 4096)).unwrap();
        assert_eq!(planned.ring.part, 4096 * (704 + 132));
        assert_eq!(planned.ring.all_row_bytes, 4096 * 704 * 78);
        assert_eq!(planned.ring.all_key_bytes, 4096 * 132 * 21);
    }

    #[test]
    fn what_does_not_fit_is_named_with_the_missing_bytes() {
        let whole = plan(&v32(16_384)).unwrap().bytes;
        assert_eq!(plan(&Demand { gpu: whole, ..v32(16_384) }).unwrap().left, 0);
        let chunked = plan(&v32(131_072)).unwrap().bytes;
        let cases = [
            ("gpu: weights", 5, Demand { gpu: GIB, weights: GIB + 5, ..v32(16_384) }),
            ("gpu: activations", 7, Demand { gpu: 999_999_993, ..v32(16_384) }),
            ("gpu: workspace", 1, Demand { gpu: whole, workspace: whole - 999_999_999, ..v32(16_384) }),
            ("gpu: the staging ring", 1, Demand { gpu: whole - 1, ..v32(16_384) }),
            ("gpu: pages of prompts in chunks", 9, Demand { gpu: chunked - 9, ..v32(131_072) }),
            ("host: the staging ring", 27_394_047, Demand { host: Some(1), ..v32(16_384) }),
        ];
        for (part, missing, demand) in cases {
            let error = plan(&demand).unwrap_err();
            assert_eq!((error.kind(), error.place()), (Kind::OutOfMemory, part));
            assert_eq!(error.number("missing"), Some(missing), "{part}");
            assert_eq!(error.number("wanted"), error.number("available").map(|it| it + missing), "{part}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let place = |demand: Demand| {
            let error = plan(&demand).unwrap_err();
            assert_eq!(error.kind(), Kind::InvalidConfig, "{error}");
            error.place().to_owned()
        };
        assert_eq!(place(Demand { context: 0, ..v32(64) }), "context");
        assert_eq!(place(Demand { chunk: 0, ..v32(64) }), "chunk");
        assert_eq!(place(Demand { batch: 0, ..v32(64) }), "batch");
        assert_eq!(place(Demand { ranks: 0, ..v32(64) }), "ranks");
        assert_eq!(place(Demand { depth: Some(0), ..v32(64) }), "depth");
        assert_eq!(place(Demand { chunk: 65, ..v32(64) }), "chunk is beyond the context");
        assert_eq!(place(Demand { longest: Some(63), ..v32(64) }), "context is beyond the model's");
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(place(Demand { link_rate: value, ..v32(64) }), "link_rate");
            assert_eq!(place(Demand { layer_us: Some(value), ..v32(64) }), "layer_us");
        }
        for value in [-1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(place(Demand { acknowledge_us: value, ..v32(64) }), "acknowledge_us");
        }
        // The largest counts overflow nothing.
        let vast = Demand { batch: u32::MAX, depth: Some(u32::MAX), activations: Some(0), ..v32(u32::MAX) };
        let kind = plan(&Demand { chunk: u32::MAX, gpu: u64::MAX, ..vast }).unwrap_err().kind();
        assert_eq!(kind, Kind::Overflow);
        let slow = Demand { acknowledge_us: MOST, link_rate: MOST, layer_us: Some(1.0 / MOST), ..v32(1) };
        assert!(plan(&slow).is_err());
    }

    #[test]
    fn given_figures_are_no_assumptions() {
        let all = v32(64).assumptions();
        assert_eq!(all.len(), 4);
        assert!(all[0].starts_with("activations: 1 GB at 16384 tokens, as published"), "{}", all[0]);
        assert!(all[1].starts_with("a layer computes 10.3 ms"), "{}", all[1]);
        let given = Demand {
            activations: Some(1),
            layer_us: Some(1.0),
            link_rate: 1e9,
            acknowledge_us: 0.0,
            ranks: 2,
            ..v32(64)
        };
        assert_eq!(given.assumptions().len(), 1, "what ranks gather");
    }
}
