//! The plan of a group: what is sharded, who owns which page, which buffer each layer uses, and how many bytes that is.
//!
//! **Buffers.** A layer's *ordinal* is its place among the shardable layers, resident or not, and never changes. Even
//! ordinals use buffer 0 and odd ones buffer 1, so one layer is pulled while the other is in use. A step is a circle:
//! the first layer of the next step is pulled while the last one of this step is in use. With an odd number of layers
//! the last and the first would share buffer 0, and the pull of the first would have to wait. There are two ways out,
//! [`Odd`]: a third buffer that the last layer alone uses, or one resident layer, the first or the last, which every
//! rank keeps whole. The third buffer is never the cheaper one. It is as large as what the last layer pulls, and the
//! layer's own part comes on top, which together is the whole layer; rounding can only add to it. So the plan keeps the
//! first layer resident or the last, whichever leaves fewer bytes (on a tie the first), which also needs no pull at
//! all. A caller can ask for each of the three.
//!
//! A single shardable layer stays resident: its buffer would always hold it, and save nothing. Of two layers the same
//! is true, but nothing has to be decided for them, so they are sharded as asked and the plan says that it saves
//! nothing.
//!
//! **Bytes** of a rank are its resident layers, its own shards and its buffers, in whole granules. A buffer is as large
//! as the largest part that this rank pulls into it. A decision must be the same on every rank, so it counts the bytes
//! that no rank exceeds, and no rank's own. The same bytes *before rounding* count a layer's bytes divided by the
//! ranks; published figures are of this kind.
//!
//! **From the host** ([`Source::Host`]) a rank pulls whole layers from its own pinned memory: nothing of a sharded
//! layer stays on the device, and every rank has its own copy on the host. Windows and buffers are the same.
//!
//! **Costs.** Time and memory are in proportion to the chosen tensors; a budget tries each even number of layers, which
//! is quadratic in the layers and nothing for any model.

use std::ops::Range;

use super::choose::{Patterns, spread};
use super::cut::{Cut, RANKS_MAX};
use super::layer::{Layout, Tensor};
use crate::error::{Error, Kind, Result};

/// The most layers of a plan: a larger number is a mistake.
pub const LAYERS_MAX: usize = 1 << 12;

/// The most bytes of the chosen ranges (1 EiB), so that all sums below stay far from the end of a `u64`.
const BYTES_MAX: u64 = 1 << 60;

/// What the digest is of; its number rises when the meaning of a plan changes.
const DIGEST_TAG: &[u8] = b"forebay weights plan 1\0";

/// The ranks that share one copy of the weights, and this rank's place among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Which group of the host: ranks of different groups have different bytes.
    pub id: u64,
    /// This rank, below `ranks`.
    pub rank: u32,
    /// Ranks of the group, from 1 to [`RANKS_MAX`].
    pub ranks: u32,
}

impl Group {
    /// The group of a rank under data parallelism of `dp` ranks times tensor parallelism of `tp`: the ranks of one
    /// tensor-parallel index hold the same bytes, so they share them.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for an index that is not below its count; those of [`Plan::new`] for the counts.
    pub fn of_dp_tp((dp_rank, dp): (u32, u32), (tp_rank, tp): (u32, u32)) -> Result<Group> {
        if tp_rank >= tp {
            return Err(Error::new(Kind::OutOfRange, "plan weights")
                .at("the tensor-parallel rank")
                .with("rank", tp_rank)
                .with("ranks", tp));
        }
        Group { id: u64::from(tp_rank), rank: dp_rank, ranks: dp }.checked()
    }

    fn checked(self) -> Result<Group> {
        let Group { rank, ranks, .. } = self;
        if ranks == 0 || ranks > RANKS_MAX {
            return Err(Error::new(Kind::InvalidConfig, "plan weights")
                .at("the ranks of a group")
                .with("ranks", ranks)
                .with("most", RANKS_MAX)
                .hint("pass 1 or more"));
        }
        if rank >= ranks {
            return Err(Error::new(Kind::OutOfRange, "plan weights")
                .at("the rank in its group")
                .with("rank", rank)
                .with("ranks", ranks));
        }
        Ok(self)
    }
}

/// Where the pages come from that a rank does not own on its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// The device memory of the other ranks.
    #[default]
    Peers,
    /// The rank's own pinned host memory, which holds every sharded layer whole.
    Host,
}

/// What becomes of an odd number of shardable layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Odd {
    /// What costs the fewest bytes: the first layer or the last stays resident.
    #[default]
    Cheapest,
    /// A third buffer, for the last layer alone.
    ThirdBuffer,
    /// The first layer stays resident.
    ResidentFirst,
    /// The last layer stays resident.
    ResidentLast,
}

/// How the plan keeps the last layer of a step and the first of the next one apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// They have different buffers by their ordinals; also if nothing is sharded.
    Even,
    /// The last layer has a third buffer.
    ThirdBuffer,
    /// The layer of this index, of all layers, is resident.
    Resident(usize),
}

/// Where a shardable layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Whole on every rank.
    Resident,
    /// Sharded; the pages of other ranks are pulled into the buffer of this number, 0 to 2.
    Buffer(u8),
}

/// What is sharded, and how. It is the same on all ranks of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// The tensors that are sharded; without patterns none are.
    pub patterns: Patterns,
    /// The most bytes that the chosen tensors may take on a rank's device, buffers included, in whole granules. The
    /// fewest layers are sharded that satisfy it. None: all layers are.
    pub budget: Option<u64>,
    /// What becomes of an odd number of layers, if all or all but one are sharded.
    pub odd: Odd,
    /// Where pulled pages come from.
    pub source: Source,
    /// The granularity of the device's mappings in bytes: a power of two, 2 MiB on current GPUs.
    pub grain: u64,
}

impl Sharding {
    /// All layers, from peers, in granules of 2 MiB.
    pub fn new(patterns: Patterns) -> Sharding {
        Sharding { patterns, budget: None, odd: Odd::default(), source: Source::default(), grain: 2 << 20 }
    }
}

/// A shardable layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerPlan {
    /// Its index among all layers of the model.
    pub layer: usize,
    /// Its chosen ranges in its window.
    pub layout: Layout,
    /// Which rank owns which page, if it is sharded. A resident layer has a cut too, by which it could be.
    pub cut: Cut,
    /// Where it is.
    pub place: Place,
}

/// Bytes that the chosen tensors take for one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Layers that stay resident, whole.
    pub resident: u64,
    /// The rank's own parts of sharded layers on its device.
    pub shards: u64,
    /// The buffers, by number.
    pub buffers: Vec<u64>,
    /// Pinned host memory of the rank, under [`Source::Host`].
    pub host: u64,
}

impl Bytes {
    /// All of it that is on the device.
    pub fn device(&self) -> u64 {
        self.resident + self.shards + self.buffers.iter().sum::<u64>()
    }

    /// What sharding saves of `whole` bytes; negative where rounding or a small model costs more than that.
    pub fn saved(&self, whole: u64) -> i64 {
        whole.cast_signed().wrapping_sub(self.device().cast_signed())
    }
}

/// The plan of one group, seen from one of its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    group: Group,
    source: Source,
    grain: u64,
    layers: Vec<LayerPlan>,
    closing: Closing,
    /// Layers of the model, shardable or not.
    all: usize,
}

/// What a plan decides for the shardable layers: by ordinal, the place of each, and how the step closes.
struct Decided {
    places: Vec<Place>,
    closing: Closing,
}

/// The buffer of an ordinal.
const fn parity(ordinal: usize) -> Place {
    Place::Buffer((ordinal % 2) as u8)
}

impl Decided {
    fn nothing(shardable: usize) -> Decided {
        Decided { places: vec![Place::Resident; shardable], closing: Closing::Even }
    }

    /// These ordinals sharded, each in the buffer of its parity.
    fn spread(shardable: usize, sharded: usize) -> Decided {
        let mut decided = Decided::nothing(shardable);
        for ordinal in spread(shardable, sharded) {
            decided.places.iter_mut().skip(ordinal).take(1).for_each(|place| *place = parity(ordinal));
        }
        decided
    }

    /// All of an even number sharded, or all but the ordinal `resident`.
    fn all_but(shardable: &[usize], resident: Option<usize>) -> Decided {
        let place = |ordinal| if Some(ordinal) == resident { Place::Resident } else { parity(ordinal) };
        let layer = resident.and_then(|ordinal| shardable.get(ordinal));
        Decided {
            places: (0..shardable.len()).map(place).collect(),
            closing: layer.map_or(Closing::Even, |layer| Closing::Resident(*layer)),
        }
    }

    /// All of an odd number sharded, the last with a buffer of its own.
    fn third(shardable: usize) -> Decided {
        let place =
            |ordinal: usize| if ordinal + 1 == shardable { Place::Buffer(2) } else { parity(ordinal) };
        Decided { places: (0..shardable).map(place).collect(), closing: Closing::ThirdBuffer }
    }

    /// Pages that no rank exceeds on its device.
    fn most(&self, pages: &[u64], cuts: &[Cut], source: Source) -> u64 {
        let (mut resident, mut sharded, mut buffers) = (0, 0, [0; 3]);
        for ((place, pages), cut) in self.places.iter().zip(pages).zip(cuts) {
            let Place::Buffer(buffer) = place else {
                resident += pages;
                continue;
            };
            let pulled = match source {
                Source::Peers => cut.most_gathered(),
                Source::Host => *pages,
            };
            sharded += pages;
            let own = buffers.iter_mut().skip(usize::from(*buffer)).take(1);
            own.for_each(|most: &mut u64| *most = pulled.max(*most));
        }
        // Totals differ by at most one page, so the largest is the mean, rounded up.
        let shards = match (source, cuts.first()) {
            (Source::Peers, Some(cut)) => sharded.div_ceil(u64::from(cut.ranks())),
            _ => 0,
        };
        resident + shards + buffers.iter().sum::<u64>()
    }
}

/// The shardable layers: their indices, and their pages.
struct Shardable<'a> {
    layers: &'a [usize],
    pages: &'a [u64],
    ranks: u32,
    sharding: &'a Sharding,
}

impl Shardable<'_> {
    /// The cuts, by ordinal. The remainder rotates through the sharded layers first, so that these are balanced, and
    /// then through the others.
    fn cuts(&self, places: &[Place]) -> Vec<Cut> {
        let mut order: Vec<usize> = (0..self.pages.len()).collect();
        order.sort_by_key(|ordinal| places.get(*ordinal) == Some(&Place::Resident));
        let pages = order.iter().map(|ordinal| self.pages.get(*ordinal).copied().unwrap_or(0));
        let mut cuts: Vec<(usize, Cut)> =
            order.iter().copied().zip(Cut::rotating(pages, self.ranks)).collect();
        cuts.sort_unstable_by_key(|(ordinal, _)| *ordinal);
        cuts.into_iter().map(|(_, cut)| cut).collect()
    }

    fn most(&self, decided: &Decided) -> u64 {
        decided.most(self.pages, &self.cuts(&decided.places), self.sharding.source)
    }

    /// All sharded, but for what an odd number needs.
    fn all(&self) -> Decided {
        let count = self.layers.len();
        if count < 2 {
            let closing = self.layers.first().map_or(Closing::Even, |layer| Closing::Resident(*layer));
            return Decided { closing, ..Decided::nothing(count) };
        }
        if count.is_multiple_of(2) {
            return Decided::all_but(self.layers, None);
        }
        let resident = |ordinal| Decided::all_but(self.layers, Some(ordinal));
        let (first, last, third) = (resident(0), resident(count - 1), Decided::third(count));
        match self.sharding.odd {
            Odd::ResidentFirst => first,
            Odd::ResidentLast => last,
            Odd::ThirdBuffer => third,
            Odd::Cheapest if self.most(&first) <= self.most(&last) => first,
            Odd::Cheapest => last,
        }
    }

    /// The fewest layers sharded with which no rank exceeds the budget.
    fn within(&self, budget: u64) -> Result<Decided> {
        let (count, all) = (self.layers.len(), self.all());
        let spread = (0..count.saturating_sub(1)).step_by(2).map(|sharded| Decided::spread(count, sharded));
        let mut least = u64::MAX;
        for decided in spread.chain([all]) {
            let bytes = self.most(&decided).saturating_mul(self.sharding.grain);
            if bytes <= budget {
                return Ok(decided);
            }
            least = least.min(bytes);
        }
        Err(Error::new(Kind::OutOfMemory, "plan weights")
            .at("the budget: no number of sharded layers satisfies it")
            .with("budget", budget)
            .with("least", least)
            .hint("raise the budget, or divide the layers among more ranks"))
    }
}

impl Plan {
    /// Plans `layers`, each a list of named ranges, for one rank of `group`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names what is wrong with a group, a granule, a pattern or a tensor (with its layer);
    /// [`Kind::OutOfRange`] for a rank outside its group; [`Kind::OutOfMemory`] for a budget that no plan satisfies,
    /// with the least bytes; [`Kind::Overflow`] for more layers or bytes than any model has.
    pub fn new<T: AsRef<[Tensor]>>(layers: &[T], group: Group, sharding: &Sharding) -> Result<Plan> {
        let group = group.checked()?;
        let Sharding { source, grain, .. } = *sharding;
        if !grain.is_power_of_two() {
            return Err(Error::new(Kind::InvalidConfig, "plan weights")
                .at("the granule")
                .with("grain", grain)
                .hint("pass the device's granularity, a power of two"));
        }
        if layers.len() > LAYERS_MAX {
            return Err(Error::new(Kind::Overflow, "plan weights")
                .at("layers")
                .with("layers", layers.len() as u64)
                .with("most", LAYERS_MAX as u64));
        }
        let (indices, layouts) = laid_out(layers, &sharding.patterns, grain)?;
        let pages: Vec<u64> = layouts.iter().map(Layout::pages).collect();
        let ranks = if source == Source::Host { 1 } else { group.ranks };
        let shardable = Shardable { layers: &indices, pages: &pages, ranks, sharding };
        let decided = match sharding.budget {
            None => shardable.all(),
            Some(budget) => shardable.within(budget)?,
        };
        let cuts = shardable.cuts(&decided.places);
        let parts = indices.iter().zip(layouts).zip(cuts).zip(decided.places);
        let layers_of =
            parts.map(|(((layer, layout), cut), place)| LayerPlan { layer: *layer, layout, cut, place });
        let layers_of = layers_of.collect();
        Ok(Plan { group, source, grain, layers: layers_of, closing: decided.closing, all: layers.len() })
    }

    /// The group, and this rank's place in it.
    pub const fn group(&self) -> Group {
        self.group
    }

    /// Where a sharded layer's other pages come from.
    pub const fn source(&self) -> Source {
        self.source
    }

    /// Bytes of a page.
    pub const fn grain(&self) -> u64 {
        self.grain
    }

    /// Layers of the model, shardable or not.
    pub const fn model_layers(&self) -> usize {
        self.all
    }

    /// The shardable layers, by ordinal.
    pub fn layers(&self) -> &[LayerPlan] {
        &self.layers
    }

    /// How the last layer of a step and the first of the next are kept apart.
    pub const fn closing(&self) -> Closing {
        self.closing
    }

    /// How many layers are sharded.
    pub fn sharded(&self) -> usize {
        self.layers.iter().filter(|layer| layer.place != Place::Resident).count()
    }

    /// The pages of a layer's window that `rank` owns on its device: all of a resident layer, none under
    /// [`Source::Host`], else its part. None for a layer that is not shardable.
    pub fn part(&self, layer: usize, rank: u32) -> Option<Range<u64>> {
        let found = self.layers.binary_search_by_key(&layer, |one| one.layer).ok()?;
        self.layers.get(found).map(|one| self.own(one, rank))
    }

    fn own(&self, layer: &LayerPlan, rank: u32) -> Range<u64> {
        match (layer.place, self.source) {
            (Place::Resident, _) => 0..layer.layout.pages(),
            (Place::Buffer(_), Source::Host) => 0..0,
            (Place::Buffer(_), Source::Peers) => layer.cut.part(rank),
        }
    }

    /// Bytes of a layer's memory that `rank` gives to the others: its part, in granules; none of a layer that the plan
    /// keeps resident.
    pub(super) fn given(&self, layer: &LayerPlan, rank: u32) -> u64 {
        let pages = layer.cut.part(rank);
        if layer.place == Place::Resident { 0 } else { (pages.end - pages.start) * self.grain }
    }

    /// Bytes that this rank pulls to have a layer whole, in granules.
    pub fn pulled(&self, layer: &LayerPlan) -> u64 {
        let own = self.own(layer, self.group.rank);
        (layer.layout.pages() - (own.end - own.start)) * self.grain
    }

    /// The same before rounding: the layer's bytes without one rank's share of them.
    pub fn pulled_exactly(&self, layer: &LayerPlan) -> u64 {
        layer.layout.bytes() - self.own_exactly(layer)
    }

    fn own_exactly(&self, layer: &LayerPlan) -> u64 {
        match (layer.place, self.source) {
            (Place::Resident, _) => layer.layout.bytes(),
            (Place::Buffer(_), Source::Host) => 0,
            (Place::Buffer(_), Source::Peers) => layer.layout.bytes().div_ceil(u64::from(layer.cut.ranks())),
        }
    }

    /// Bytes of the chosen tensors, which a rank would hold without sharding. Exact.
    pub fn whole(&self) -> u64 {
        self.layers.iter().map(|layer| layer.layout.bytes()).sum()
    }

    /// What this rank takes, in whole granules.
    pub fn bytes(&self) -> Bytes {
        self.counted(|layer| layer.layout.pages() * self.grain, |layer| self.pulled(layer))
    }

    /// The same before rounding to granules, and without alignment.
    pub fn exact_bytes(&self) -> Bytes {
        self.counted(|layer| layer.layout.bytes(), |layer| self.pulled_exactly(layer))
    }

    fn counted(&self, whole: impl Fn(&LayerPlan) -> u64, pulled: impl Fn(&LayerPlan) -> u64) -> Bytes {
        let mut bytes = Bytes::default();
        for layer in &self.layers {
            let (whole, pulled) = (whole(layer), pulled(layer));
            let Place::Buffer(buffer) = layer.place else {
                bytes.resident += whole;
                continue;
            };
            let buffer = usize::from(buffer);
            bytes.buffers.resize(bytes.buffers.len().max(buffer + 1), 0);
            bytes.buffers.iter_mut().skip(buffer).take(1).for_each(|most| *most = pulled.max(*most));
            bytes.shards += whole - pulled;
            bytes.host += if self.source == Source::Host { whole } else { 0 };
        }
        bytes
    }

    /// BLAKE3 over everything that the ranks of a group have to agree on, and nothing of this rank alone: group and
    /// ranks, source, granule, and of each shardable layer its index, place, cut, and its ranges with their names.
    pub fn digest(&self) -> [u8; 32] {
        fn number(hash: &mut blake3::Hasher, number: u64) {
            hash.update(&number.to_le_bytes());
        }
        let mut hash = blake3::Hasher::new();
        hash.update(DIGEST_TAG);
        let group = [self.group.id, u64::from(self.group.ranks)];
        let all =
            [u64::from(self.source == Source::Host), self.grain, self.all as u64, self.layers.len() as u64];
        group.into_iter().chain(all).for_each(|one| number(&mut hash, one));
        for layer in &self.layers {
            let place = match layer.place {
                Place::Resident => u64::MAX,
                Place::Buffer(buffer) => u64::from(buffer),
            };
            let tensors = layer.layout.tensors();
            let own = [layer.layer as u64, place, u64::from(layer.cut.first()), layer.layout.pages()];
            own.into_iter().chain([tensors.len() as u64]).for_each(|one| number(&mut hash, one));
            for tensor in tensors {
                let sizes = [tensor.offset, tensor.bytes, tensor.name.len() as u64];
                sizes.into_iter().for_each(|one| number(&mut hash, one));
                hash.update(tensor.name.as_bytes());
            }
        }
        *hash.finalize().as_bytes()
    }
}

/// The indices of the shardable layers, and their layouts.
fn laid_out<T: AsRef<[Tensor]>>(
    layers: &[T],
    patterns: &Patterns,
    grain: u64,
) -> Result<(Vec<usize>, Vec<Layout>)> {
    let (mut indices, mut layouts) = (Vec::new(), Vec::new());
    let mut all = 0_u64;
    for (layer, (tensors, chosen)) in layers.iter().zip(patterns.choose(layers)?).enumerate() {
        if chosen.is_empty() {
            continue;
        }
        let own = chosen.iter().filter_map(|index| tensors.as_ref().get(*index));
        let layout = Layout::new(layer, own, grain)?;
        let bytes = layout.pages().checked_mul(grain).and_then(|bytes| all.checked_add(bytes));
        all = bytes.filter(|all| *all <= BYTES_MAX).ok_or_else(|| {
            Error::new(Kind::Overflow, "plan weights")
                .at(format!("layer {layer}: the chosen tensors up to here"))
                .with("most", BYTES_MAX)
        })?;
        indices.push(layer);
        layouts.push(layout);
    }
    Ok((indices, layouts))
}
