//! What one side of a transfer says about its caches.

use crate::error::{Error, Kind, Result};
use crate::fallible::vector;

/// The name of the operation in errors.
pub(super) const OPERATION: &str = "transfer plan";

/// The most tokens of a page. vLLM's hybrid models raise the pages of attention to several thousand.
const PAGE_TOKENS_MAX: u32 = 1 << 16;
/// The most ranks of an instance.
const RANKS_MAX: u64 = 1 << 16;
/// The most components, and bytes of a name.
const COMPONENTS_MAX: usize = 64;
const NAME_MAX: usize = 64;
/// The most layers of a model, and places of a layer.
const LAYERS_MAX: usize = 1 << 10;
const PLACES_MAX: usize = 16;
/// The most heads of a component.
const HEADS_MAX: u32 = 1 << 12;
/// The most pairs of heads of a side that are compared, to find out whether its places overlap.
const STEPS_MAX: u64 = 1 << 22;

/// The bytes that every token has under one name in a layer: latents, rope keys, index keys, K or V.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Component {
    /// The name, which both sides use.
    pub name: String,
    /// The type of the numbers, which both sides call the same ("bf16", "fp8_e4m3"). Rows are never converted. What
    /// else the bytes mean something by, such as scales that are not a part of the row, belongs in the name too.
    pub dtype: String,
    /// KV heads of the model. 1 for what all heads share, such as MLA's latents and index keys.
    pub heads: u32,
    /// Bytes of one head of a token.
    pub head_bytes: u64,
}

/// Where a component of a layer is in the pages of a rank.
///
/// Head `h` of the rank's own heads of the page's token `t` is at byte `offset + t * token_stride + h * head_stride` of
/// its page in `plane`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The component: its index in [`Side::components`].
    pub component: u32,
    /// The plane: an index in [`Stage::page_bytes`].
    pub plane: u32,
    /// The first byte of the page's first token.
    pub offset: u64,
    /// Bytes from a token to the next one.
    pub token_stride: u64,
    /// Bytes from a head to the next one.
    pub head_stride: u64,
}

/// The places of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerPlaces {
    /// The layer's number in the model, layers of multi-token prediction included.
    pub layer: u32,
    /// Its components, each once. A layer without an indexer has no index keys.
    pub places: Vec<Place>,
}

/// The layers of a pipeline stage. All of its ranks have them at the same places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The layers.
    pub layers: Vec<LayerPlaces>,
    /// For each plane the bytes of a page.
    pub page_bytes: Vec<u64>,
}

/// How the ranks of a pipeline stage divide a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Tensor parallel: each rank has all tokens of its heads. Of fewer heads than ranks each has several copies.
    Heads,
    /// Sequence parallel prefill: requests that are computed together are concatenated, padded, and divided into even
    /// slices, one for each rank in turn. Each rank has all heads of its tokens. A receiver cannot be divided so. Other
    /// divisions of tokens, in turns (decode context parallel) or from both ends, are not known here.
    Tokens,
}

/// Where an instance keeps the rows of a request.
///
/// A rank is a replica, a stage and a lane, its place among the ranks of the stage. Engines number them in different
/// orders, so no rank has a number here. A side does not say which weights made the rows: a session compares that
/// before ([`Hello`](crate::peer::Hello)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// What tokens have. Sides may list them in another order.
    pub components: Vec<Component>,
    /// The pipeline stages.
    pub stages: Vec<Stage>,
    /// Ranks of a stage.
    pub width: u32,
    /// How they divide a request.
    pub split: Split,
    /// Independent copies of all of this, each for requests of its own (data parallel attention).
    pub replicas: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
}

impl Side {
    /// The number of ranks.
    pub fn ranks(&self) -> u64 {
        u64::from(self.replicas).saturating_mul(self.stages.len() as u64).saturating_mul(self.width.into())
    }

    /// The numbers that runs depend on.
    pub(super) fn shape(&self) -> Shape {
        let Side { width, split, replicas, page_tokens, .. } = *self;
        Shape { stages: self.stages.len() as u32, width, split, replicas, page_tokens }
    }

    /// Checks a side by itself.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the field.
    pub(super) fn check(&self) -> Result<()> {
        if self.page_tokens == 0 || self.page_tokens > PAGE_TOKENS_MAX {
            return Err(invalid("page_tokens").with("given", self.page_tokens).with("most", PAGE_TOKENS_MAX));
        }
        if self.ranks() == 0 || self.ranks() > RANKS_MAX {
            return Err(invalid("replicas, stages and width")
                .with("ranks", self.ranks())
                .with("most", RANKS_MAX));
        }
        if self.components.len() > COMPONENTS_MAX {
            return Err(invalid("components")
                .with("given", self.components.len() as u64)
                .with("most", COMPONENTS_MAX as u64));
        }
        for (index, component) in self.components.iter().enumerate() {
            self.check_component(component).map_err(|error| error.with("component", index as u64))?;
            if self.components.iter().take(index).any(|other| other.name == component.name) {
                return Err(invalid("a component's name twice").with("component", index as u64));
            }
        }
        self.check_layers()
    }

    fn check_component(&self, component: &Component) -> Result<()> {
        let Component { heads, head_bytes, .. } = *component;
        if component.name.len() > NAME_MAX || component.dtype.len() > NAME_MAX {
            return Err(invalid("a name of a component that is too long").with("most", NAME_MAX as u64));
        }
        if heads == 0 || heads > HEADS_MAX || head_bytes == 0 {
            return Err(invalid("heads and head_bytes of a component")
                .with("heads", heads)
                .with("bytes", head_bytes));
        }
        let divides = heads.is_multiple_of(self.width) || self.width.is_multiple_of(heads);
        if self.split == Split::Heads && !divides {
            return Err(invalid("heads that the ranks of a stage cannot divide")
                .with("heads", heads)
                .with("ranks", self.width)
                .hint("one number must be a multiple of the other"));
        }
        Ok(())
    }

    fn check_layers(&self) -> Result<()> {
        let layers = || self.stages.iter().flat_map(|stage| &stage.layers);
        if layers().count() > LAYERS_MAX {
            return Err(invalid("layers")
                .with("given", layers().count() as u64)
                .with("most", LAYERS_MAX as u64));
        }
        let of_stage = self.stages.iter().flat_map(|stage| stage.layers.iter().map(move |of| (stage, of)));
        for (index, (stage, of)) in of_stage.enumerate() {
            let at = |error: Error| error.with("layer", of.layer);
            if layers().take(index).any(|other| other.layer == of.layer) {
                return Err(at(invalid("a layer twice")));
            }
            if of.places.len() > PLACES_MAX {
                return Err(at(invalid("places of a layer").with("given", of.places.len() as u64)));
            }
            for (index, place) in of.places.iter().enumerate() {
                self.check_place(stage, place).map_err(at)?;
                if of.places.iter().take(index).any(|other| other.component == place.component) {
                    return Err(at(invalid("a component of a layer twice")));
                }
            }
        }
        let mut steps = STEPS_MAX;
        self.stages.iter().try_for_each(|stage| self.check_apart(&stage.layers, &mut steps))
    }

    /// The end of a place in its page.
    fn end(&self, place: &Place, component: &Component) -> Option<u64> {
        let tokens = place.token_stride.checked_mul(u64::from(self.page_tokens) - 1)?;
        let heads = place.head_stride.checked_mul(u64::from(self.shape().heads(component.heads)) - 1)?;
        place.offset.checked_add(tokens)?.checked_add(heads)?.checked_add(component.head_bytes)
    }

    fn check_place(&self, stage: &Stage, place: &Place) -> Result<()> {
        let Some(component) = self.components.get(place.component as usize) else {
            return Err(invalid("component of a place").with("given", place.component));
        };
        let Some(bytes) = stage.page_bytes.get(place.plane as usize) else {
            return Err(invalid("plane of a place").with("given", place.plane));
        };
        match self.end(place, component) {
            Some(end) if end <= *bytes => {}
            end => {
                return Err(invalid("a place beyond its page")
                    .with("end", end.unwrap_or(u64::MAX))
                    .with("page bytes", *bytes));
            }
        }
        let heads = self.shape().heads(component.heads);
        let row = Strided { offset: 0, stride: place.head_stride, count: heads, bytes: component.head_bytes };
        let tokens = Strided { offset: 0, stride: place.token_stride, count: self.page_tokens, ..row };
        // A head and the next one, a token and the next one: neither overlaps the other.
        let wide = row.overlaps_itself() || tokens.overlaps_itself();
        if wide || heads > 1 && self.page_tokens > 1 && !nests(&row, &tokens) {
            return Err(invalid("strides of a place, within which its own bytes overlap")
                .with("token stride", place.token_stride)
                .with("head stride", place.head_stride));
        }
        Ok(())
    }

    /// Checks that no two places of a stage share a byte of a page. `steps` is the work that is left for all stages.
    fn check_apart(&self, stage: &[LayerPlaces], steps: &mut u64) -> Result<()> {
        let count = stage.iter().map(|of| of.places.len()).sum();
        let mut taken = vector(count, OPERATION, "places of a stage")?;
        for (of, place) in stage.iter().flat_map(|of| of.places.iter().map(move |place| (of.layer, place))) {
            let Some(component) = self.components.get(place.component as usize) else { continue };
            let end = self.end(place, component).unwrap_or(u64::MAX);
            let heads = self.shape().heads(component.heads);
            taken.push(Taken { layer: of, place: *place, end, heads, bytes: component.head_bytes });
        }
        taken.sort_unstable_by_key(|taken| (taken.place.plane, taken.place.offset));
        for (index, first) in taken.iter().enumerate() {
            let meets =
                |next: &&Taken| next.place.plane == first.place.plane && next.place.offset < first.end;
            for other in taken.iter().skip(index + 1).take_while(meets) {
                let cost = first.cost(other);
                let shares =
                    |what| Err(invalid(what).with("layer", first.layer).with("other layer", other.layer));
                match steps.checked_sub(cost) {
                    None => return shares("places that are interleaved too finely to be checked"),
                    Some(left) => *steps = left,
                }
                if self.page_tokens > 1 && first.place.token_stride != other.place.token_stride {
                    return shares("interleaved places of different token strides");
                }
                if first.shares(other, self.page_tokens) {
                    return shares("two places that share bytes");
                }
            }
        }
        Ok(())
    }
}

/// A place, with its end in its page.
#[derive(Clone, Copy, Debug)]
struct Taken {
    layer: u32,
    place: Place,
    end: u64,
    heads: u32,
    bytes: u64,
}

impl Taken {
    /// Whether the distance of two pieces depends on the difference of their heads alone.
    fn has_heads_as(&self, other: &Taken) -> bool {
        self.heads == 1 || other.heads == 1 || self.place.head_stride == other.place.head_stride
    }

    /// How many distances [`Taken::shares`] looks at.
    fn cost(&self, other: &Taken) -> u64 {
        let (own, heads) = (u64::from(self.heads), u64::from(other.heads));
        if self.has_heads_as(other) { own + heads - 1 } else { own * heads }
    }

    /// Whether it shares a byte with another place of its plane that has its token stride: the distance of two of their
    /// pieces depends on the heads and on the difference of the tokens.
    fn shares(&self, other: &Taken, page_tokens: u32) -> bool {
        // No token overlaps the next one: it is at least 1.
        let stride = i128::from(self.place.token_stride.max(1));
        let most = i128::from(page_tokens) - 1;
        let base = i128::from(other.place.offset) - i128::from(self.place.offset);
        let [own, heads] =
            [self, other].map(|taken| (i128::from(taken.heads), i128::from(taken.place.head_stride)));
        let meets = |apart: i128| {
            // The tokens that bring the two pieces nearest to each other.
            let near = if most == 0 { 0 } else { -apart.div_euclid(stride) };
            (near - 1..=near + 1).map(|tokens| tokens.clamp(-most, most)).any(|tokens| {
                let apart = apart + tokens * stride;
                -i128::from(other.bytes) < apart && apart < i128::from(self.bytes)
            })
        };
        match self.has_heads_as(other) {
            true => {
                let stride = if self.heads == 1 { heads.1 } else { own.1 };
                (1 - own.0..heads.0).any(|apart| meets(base + apart * stride))
            }
            false => (0..own.0)
                .any(|first| (0..heads.0).any(|second| meets(base + second * heads.1 - first * own.1))),
        }
    }
}

/// The numbers of a side that runs depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub stages: u32,
    pub width: u32,
    pub split: Split,
    pub replicas: u32,
    pub page_tokens: u32,
}

impl Shape {
    /// Checks that there is a rank.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    pub fn check_rank(&self, stage: u32, lane: u32) -> Result<()> {
        match stage < self.stages && lane < self.width {
            true => Ok(()),
            false => Err(Error::new(Kind::OutOfRange, OPERATION)
                .at("a rank that is not there")
                .with("stage", stage)
                .with("lane", lane)),
        }
    }

    /// How many heads a rank has of `heads`.
    pub fn heads(&self, heads: u32) -> u32 {
        match self.split {
            Split::Heads => (heads / self.width).max(1),
            Split::Tokens => heads,
        }
    }

    /// The first of a rank's heads.
    pub fn first_head(&self, heads: u32, lane: u32) -> u32 {
        match self.split {
            Split::Heads => (u64::from(lane) * u64::from(heads) / u64::from(self.width)) as u32,
            Split::Tokens => 0,
        }
    }

    /// How many ranks of a stage have each head.
    pub fn copies(&self, heads: u32) -> u32 {
        match self.split {
            Split::Heads => (self.width / heads).max(1),
            Split::Tokens => 1,
        }
    }
}

/// Pieces of the same bytes at a distance from each other.
#[derive(Clone, Copy, Debug)]
struct Strided {
    offset: u64,
    stride: u64,
    count: u32,
    bytes: u64,
}

impl Strided {
    fn overlaps_itself(&self) -> bool {
        self.count > 1 && self.stride < self.bytes
    }

    fn extent(&self) -> u64 {
        self.offset + self.stride * u64::from(self.count - 1) + self.bytes
    }
}

/// Whether all heads of a token come before the next token, or all tokens of a head before the next head.
fn nests(heads: &Strided, tokens: &Strided) -> bool {
    heads.extent() <= tokens.stride || tokens.extent() <= heads.stride
}

pub(super) fn invalid(place: &'static str) -> Error {
    Error::new(Kind::InvalidConfig, OPERATION).at(place)
}
