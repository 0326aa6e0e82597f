//! The configuration of a cache, and the memory that a cache of this configuration takes.

use std::ffi::c_char;

use forebay::{Config, Error, Geometry, IndexGroup, Kind, Memory, Result, Shape, Share, ShareBy, Slots};

use crate::cast::{self, Plain, Versioned, create};
use crate::status::FbStatus;

/// The system backs the total pool with small pages, not with huge pages.
pub const FB_MEMORY_SMALL_PAGES: u32 = 1;
/// The system allocates the total pool's physical memory at the first write, not at creation.
pub const FB_MEMORY_LAZY: u32 = 2;
/// The total pool's memory is not locked, so the system may swap it out.
pub const FB_MEMORY_UNLOCKED: u32 = 4;
/// The cache may take more memory than the machine reports as available. Without this flag such a cache is refused
/// with FB_OUT_OF_MEMORY, and the error text gives both numbers.
pub const FB_MEMORY_OVERCOMMIT: u32 = 8;

/// Each sequence keeps its budget until the engine resizes it.
pub const FB_SHARE_NONE: u32 = 0;
/// The cache divides its slots so that each sequence has the same number.
pub const FB_SHARE_EQUAL: u32 = 1;
/// The cache divides its slots in proportion to the lengths of the sequences.
pub const FB_SHARE_LENGTH: u32 = 2;
/// The cache gives its slots to the sequences where they avoid the most misses, as estimated from past steps.
pub const FB_SHARE_MISSES: u32 = 3;

/// The configuration of a cache. An optional field that is 0 gets the default that its comment names.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbCacheConfig {
    /// sizeof(fb_cache_config).
    pub size: usize,
    /// Layers that every decode step runs once, without the draft layers. (The `layers` of fb_info count both.)
    pub layers: u32,
    /// Additional layers that draft tokens.
    pub draft_layers: u32,
    /// Bytes of one index key on the device; 0 for a model without an indexer.
    pub index_key_bytes: u32,
    /// Bytes of a row's runs, as multiples of 4. The second is 0 for rows in one run.
    pub row_bytes: [u32; 2],
    /// Tokens of a page: a power of two from 16 to 1024.
    pub page_tokens: u32,
    /// Positions that one query row selects in one layer.
    pub top_k: u32,
    /// The most sequences that may be open at once.
    pub lanes: u32,
    /// Tokens of the longest sequence: prompt plus promised tokens.
    pub max_tokens: u32,
    /// Slots that a typical sequence has in each layer. The defaults of `pool_slots` and `min_budget` follow from it;
    /// fb_open_config sets the number for each sequence.
    pub slots: u32,
    /// The most query rows of a sequence in one step: 1 + drafts.
    pub query_rows: u32,
    /// Optional: bytes from one row to the next in host memory. Default: the row's bytes rounded up to a multiple of
    /// 64.
    pub host_stride: u32,
    /// Optional: each slot block is padded to a multiple of this many bytes. Default: no padding.
    pub device_block_align: u32,
    /// Optional: pages of the total pool. Default: enough for every lane.
    pub host_pages: u32,
    /// Optional: pages of index keys. Default: enough for every lane.
    pub index_pages: u32,
    /// Optional: slots of each layer's pool, for all sequences together. Default: enough for every lane.
    pub pool_slots: u32,
    /// Optional: the fewest slots that a sequence may have in a layer. Default: `slots`.
    pub min_budget: u32,
    /// Optional: the most batch rows of a step. Default: `lanes`.
    pub batch: u32,
    /// Optional: the most steps of one sequence in flight. Default: 2.
    pub steps_in_flight: u32,
    /// Optional: micro-batches that may each have a step open at the same time. Default: 1.
    pub micro_batches: u32,
    /// Optional: FB_MEMORY_ flags. Default: huge pages, allocated at creation and locked. fb_cache_fallback names each
    /// of these options that the system refused.
    pub memory: u32,
    /// Optional: the most attention waves of a step. The waves use the same scratch slots one after the other, so a
    /// lane needs scratch slots for only one wave. Default: 1. With more than one, the engine must run split
    /// attention: fb_overlap, or fb_resolve and one fb_gather for each wave.
    pub attention_waves: u32,
    /// Optional: the NUMA node of the total pool, plus 1. Default: any node.
    pub numa_node: u32,
    /// Optional: 1 for replays. The cache then tracks which rows are resident and gathers no bytes. On a host device
    /// the total pool takes addresses, and memory only when a row is appended, whatever `memory` says. A CUDA device
    /// pins host memory, so there the pool takes all of its memory. Default: 0.
    pub residency_only: u32,
    /// Optional: slots of each layer's pool for all sequences together, one number for each layer, draft layers
    /// included. Set it or `pool_slots`, not both. Default: `pool_slots` in every layer.
    pub slots_by_layer: *const u32,
    /// Optional: an FB_SHARE_ constant: how the cache divides its slots over the sequences, by resizes of its own. The
    /// budget of fb_open_config is then the least that a sequence ever has. fb_open takes no slots yet, fb_join takes
    /// the sequence's share, and fb_prepare moves budgets towards the shares. Default: FB_SHARE_NONE.
    pub share: u32,
    /// Optional: the cache divides its slots again every so many calls of fb_prepare. Default: only when a sequence has
    /// joined, ended or outgrown its budget.
    pub share_every: u32,
    /// Optional: the least change of a budget, as a divisor of the budget. Default: 8, an eighth.
    pub share_least_change: u32,
    /// Optional: the most sequences that one step resizes. Default: 8.
    pub share_resizes_a_step: u32,
    /// Optional: the most bytes of rows that the shrinks of one step may move on the device. Default: 64 MiB.
    pub share_bytes_a_step: u64,
    /// Optional: the first layers that select for themselves, before the layers of `group_layers`. Default: none.
    pub lone_layers: u32,
    /// Optional: the layers, one after the other, that share the first one's selection (GLM-5.2: 4, after 2 lone
    /// layers). Only the first layer of such a group has a resolve and index keys. Default: every layer selects.
    pub group_layers: u32,
    /// Optional, instead of `lone_layers` and `group_layers`: one number for each layer, draft layers included: 1 for a
    /// layer that selects, 0 for one that shares the selection of the layer before (a model's list of indexer types).
    pub selects_by_layer: *const u32,
    /// Optional: the most sequences that may be parked at once (fb_park), in addition to the open ones. Default: 0.
    pub parked: u32,
    /// Optional: the most sequences that may arrive at once (fb_arrive), in addition to the open and parked ones.
    /// Default: 0.
    pub arriving: u32,
}

// SAFETY: words and pointers, two of 4 bytes after each other wherever one of 8 follows.
unsafe impl Plain for FbCacheConfig {}
impl Versioned for FbCacheConfig {
    const NAME: &'static str = "fb_cache_config";
    const REQUIRED: usize = std::mem::offset_of!(FbCacheConfig, host_stride);
}

/// The bytes that a cache takes, by purpose.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbCacheFootprint {
    /// sizeof(fb_cache_footprint), set by the caller.
    pub size: usize,
    /// Device: index keys of every page, all layers.
    pub index_keys: u64,
    /// Device: the slots for the budgets of all sequences, all layers.
    pub slots: u64,
    /// Device: landing slots, all layers, in whole slot blocks.
    pub landing: u64,
    /// Device: scratch slots, which layers share: as many as one layer needs, for each layer of the largest index
    /// group.
    pub scratch: u64,
    /// Device: bytes that whole mappings of 2 MiB leave unused.
    pub padding: u64,
    /// Device: residency tables, page tables of the lanes, lists of fetches, the device's copies of step descriptors,
    /// and the working memory of resolves.
    pub tables: u64,
    /// Host: the rows of the total pool.
    pub rows: u64,
    /// Host: the pinned ring of step descriptors and reports, and the staging memory of a GPU's joins and truncations.
    pub step_descriptors: u64,
    /// Device: the GPU's own page tables for the registered host memory that it reaches, 8 bytes for each 4 KiB.
    pub host_page_tables: u64,
}

// SAFETY: words of 8 bytes.
unsafe impl Plain for FbCacheFootprint {}
impl Versioned for FbCacheFootprint {
    const NAME: &'static str = "fb_cache_footprint";
    const REQUIRED: usize = std::mem::offset_of!(FbCacheFootprint, step_descriptors) + 8;
}

/// GPUs map memory in multiples of this many bytes.
const GPU_GRAIN: u64 = 2 << 20;

fn refuse(place: &'static str, value: u32) -> Error {
    Error::new(Kind::InvalidConfig, "create").at(place).with("value", value)
}

/// Renames the place of an error to the field's name in fb_cache_config.
pub(crate) fn in_words(error: Error) -> Error {
    match (error.kind(), error.place()) {
        (Kind::InvalidConfig, "runs") => error.at("row_bytes"),
        (Kind::InvalidConfig, "slots") => error.at("pool_slots"),
        _ => error,
    }
}

pub(crate) fn or<T: Default + PartialEq>(value: T, default: T) -> T {
    if value == T::default() { default } else { value }
}

/// How FB_MEMORY_ flags and a node plus 1 take memory, and whether they may take more than the machine reports.
pub(crate) fn memory(flags: u32, numa_node: u32) -> Result<(Memory, bool)> {
    let known = FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED | FB_MEMORY_OVERCOMMIT;
    if flags & !known != 0 {
        return Err(refuse("memory", flags).hint("pass FB_MEMORY_ flags only"));
    }
    let memory = Memory {
        huge: flags & FB_MEMORY_SMALL_PAGES == 0,
        populate: flags & FB_MEMORY_LAZY == 0,
        lock: flags & FB_MEMORY_UNLOCKED == 0,
        node: numa_node.checked_sub(1),
    };
    Ok((memory, flags & FB_MEMORY_OVERCOMMIT != 0))
}

impl FbCacheConfig {
    /// The shape of a preset.
    fn preset(name: &str) -> Result<Shape> {
        Shape::preset(name).ok_or_else(|| {
            Error::new(Kind::OutOfRange, "preset")
                .at(format!("name {name:?}"))
                .hint("the header lists the names at fb_preset")
        })
    }

    /// The model's fields.
    pub(crate) const fn shape(&self) -> Shape {
        Shape {
            layers: self.layers,
            draft_layers: self.draft_layers,
            runs: self.row_bytes,
            host_stride: self.host_stride,
            device_block_align: self.device_block_align,
            index_key_bytes: self.index_key_bytes,
            page_tokens: self.page_tokens,
            top_k: self.top_k,
            lone_layers: self.lone_layers,
            group_layers: self.group_layers,
        }
    }

    /// The slots of each layer's pool, if the caller configured them.
    ///
    /// # Safety
    /// `slots_by_layer` is null, or has a value for each declared layer.
    unsafe fn slots(&self) -> Result<Option<Slots>> {
        if self.slots_by_layer.is_null() {
            return Ok((self.pool_slots != 0).then_some(Slots::Uniform(self.pool_slots)));
        }
        if self.pool_slots != 0 {
            return Err(refuse("pool_slots and slots_by_layer", self.pool_slots).hint("set one of them"));
        }
        // An impossible number of layers is refused before that many values are read.
        let layers = Geometry::new(self.shape())?.layers();
        // SAFETY: the same contract.
        let table = unsafe { cast::slice(self.slots_by_layer, layers as usize, "slots_by_layer") }?;
        Ok(Some(Slots::ByLayer(table.to_vec())))
    }

    /// The index groups, if the caller lists them.
    ///
    /// # Safety
    /// `selects_by_layer` is null, or has a value for each declared layer.
    unsafe fn index_groups(&self) -> Result<Vec<IndexGroup>> {
        if self.selects_by_layer.is_null() {
            return Ok(Vec::new());
        }
        let wrong = |value, hint| refuse("selects_by_layer", value).hint(hint);
        if (self.lone_layers, self.group_layers) != (0, 0) {
            return Err(wrong(self.group_layers, "set it, or lone_layers and group_layers"));
        }
        let layers = Geometry::new(self.shape())?.layers();
        // SAFETY: the same contract.
        let table = unsafe { cast::slice(self.selects_by_layer, layers as usize, "selects_by_layer") }?;
        let mut groups: Vec<IndexGroup> = Vec::new();
        for (first, selects) in (0..).zip(table) {
            match (selects, groups.last_mut()) {
                (1, _) => groups.push(IndexGroup { first, layers: 1, top_k: 0 }),
                (0, Some(group)) => group.layers += 1,
                (0, None) => return Err(wrong(0, "the first layer selects for itself: pass 1")),
                (other, _) => return Err(wrong(*other, "pass 0 or 1 for each layer")),
            }
        }
        Ok(groups)
    }

    /// How the cache divides its slots, if it does.
    fn share(&self) -> Result<Option<Share>> {
        let by = match self.share {
            FB_SHARE_NONE => {
                let numbers = [self.share_every, self.share_least_change, self.share_resizes_a_step];
                if numbers != [0; 3] || self.share_bytes_a_step != 0 {
                    return Err(refuse("share", FB_SHARE_NONE).hint("set it, or leave its other fields 0"));
                }
                return Ok(None);
            }
            FB_SHARE_EQUAL => ShareBy::Equal,
            FB_SHARE_LENGTH => ShareBy::Length,
            FB_SHARE_MISSES => ShareBy::Misses,
            other => return Err(refuse("share", other).hint("pass an FB_SHARE_ constant")),
        };
        let default = Share::default();
        Ok(Some(Share {
            by,
            every: or(self.share_every, default.every),
            least_change: or(self.share_least_change, default.least_change),
            bytes_a_step: or(self.share_bytes_a_step, default.bytes_a_step),
            resizes_a_step: or(self.share_resizes_a_step, default.resizes_a_step),
        }))
    }

    /// # Safety
    /// As [`FbCacheConfig::slots`] and [`FbCacheConfig::index_groups`].
    pub(crate) unsafe fn declare(&self) -> Result<Config> {
        // SAFETY: the same contract.
        let (slots, index_groups) = unsafe { (self.slots()?, self.index_groups()?) };
        // Without this check the error would name min_budget, whose default is `slots`.
        if self.slots == 0 && self.min_budget == 0 {
            return Err(refuse("slots", 0).hint("pass 1 or more"));
        }
        if self.residency_only > 1 {
            return Err(refuse("residency_only", self.residency_only).hint("pass 0 or 1"));
        }
        let (memory, overcommit) = memory(self.memory, self.numa_node)?;
        let all = Config::new(self.shape(), self.lanes, self.max_tokens, self.slots);
        Ok(Config {
            host_pages: or(self.host_pages, all.host_pages),
            index_pages: or(self.index_pages, all.index_pages),
            slots: slots.unwrap_or(all.slots),
            min_budget: or(self.min_budget, all.min_budget),
            attention_waves: or(self.attention_waves, all.attention_waves),
            share: self.share()?,
            index_groups,
            parked: self.parked,
            arriving: self.arriving,
            batch: or(self.batch, all.batch),
            query_rows: self.query_rows,
            steps_in_flight: or(self.steps_in_flight, all.steps_in_flight),
            micro_batches: or(self.micro_batches, all.micro_batches),
            memory,
            residency_only: self.residency_only == 1,
            overcommit,
            ..all
        })
    }
}

/// Fills in the fields that describe a model (`layers`, `draft_layers`, `index_key_bytes`, `row_bytes`, `page_tokens`,
/// `top_k`, `host_stride`, `device_block_align`, `lone_layers`, `group_layers`) and leaves the other fields unchanged.
/// The names are "deepseek-v3.2", "deepseek-v3.2-bf16", "deepseek-v3.2-int8", "glm-5", "glm-5.2", "glm-5.3" and
/// "gqa-8x128"; "deepseek-v3" and "deepseek-r1" are dense models and are meant for planning only. Another name is
/// FB_OUT_OF_RANGE. Set `size` of `config` before the call; the other fields may be zero or filled. On failure, `text`
/// receives the reason.
///
/// # Safety
/// `name` ends with a zero; `config` states its real size; `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_preset(
    name: *const c_char,
    text: *mut c_char,
    text_bytes: usize,
    config: *mut FbCacheConfig,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let known = cast::versioned(config.cast_const())?;
            let shape = FbCacheConfig::preset(cast::text(name, "name")?)?;
            cast::versioned_out(config)?.set(&FbCacheConfig {
                layers: shape.layers,
                draft_layers: shape.draft_layers,
                index_key_bytes: shape.index_key_bytes,
                row_bytes: shape.runs,
                page_tokens: shape.page_tokens,
                top_k: shape.top_k,
                host_stride: shape.host_stride,
                device_block_align: shape.device_block_align,
                lone_layers: shape.lone_layers,
                group_layers: shape.group_layers,
                ..known
            });
            Ok(())
        })
    }
}

/// Computes what a cache of this configuration takes on a GPU, and takes nothing. A GPU maps memory in multiples of 2
/// MiB; a host device maps small pages and pads less. The call refuses every configuration that fb_cache_create
/// refuses before it asks for memory. On failure, `text` receives the reason.
///
/// # Safety
/// Both structs state their real sizes, and `slots_by_layer` and `selects_by_layer` are NULL or have an entry for each
/// layer; `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_footprint(
    config: *const FbCacheConfig,
    text: *mut c_char,
    text_bytes: usize,
    footprint: *mut FbCacheFootprint,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let footprint = cast::versioned_out(footprint)?;
            let config = FbCacheConfig::declare(&cast::versioned(config)?)?;
            let all = config.footprint(GPU_GRAIN).map_err(in_words)?;
            footprint.set(&FbCacheFootprint {
                size: size_of::<FbCacheFootprint>(),
                index_keys: all.index_keys,
                slots: all.slots,
                landing: all.landing,
                scratch: all.scratch,
                padding: all.padding,
                tables: all.tables,
                rows: all.rows,
                step_descriptors: all.step_descriptors,
                host_page_tables: all.host_page_tables,
            });
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> FbCacheConfig {
        FbCacheConfig {
            size: size_of::<FbCacheConfig>(),
            layers: 2,
            draft_layers: 0,
            index_key_bytes: 0,
            row_bytes: [64, 0],
            page_tokens: 64,
            top_k: 4,
            lanes: 1,
            max_tokens: 100,
            slots: 64,
            query_rows: 1,
            host_stride: 0,
            device_block_align: 0,
            host_pages: 0,
            index_pages: 0,
            pool_slots: 0,
            min_budget: 0,
            batch: 0,
            steps_in_flight: 0,
            micro_batches: 0,
            memory: FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED,
            attention_waves: 0,
            numa_node: 0,
            residency_only: 0,
            slots_by_layer: std::ptr::null(),
            share: FB_SHARE_NONE,
            share_every: 0,
            share_least_change: 0,
            share_resizes_a_step: 0,
            share_bytes_a_step: 0,
            lone_layers: 0,
            group_layers: 0,
            selects_by_layer: std::ptr::null(),
            parked: 0,
            arriving: 0,
        }
    }

    fn declare(config: &FbCacheConfig) -> Result<Config> {
        // SAFETY: tables of these tests have a value per layer.
        unsafe { config.declare() }
    }

    #[test]
    fn declared_fields_arrive_and_zero_fields_get_their_default() {
        let plain = declare(&small()).unwrap();
        assert_eq!(plain, Config { memory: plain.memory, ..Config::new(small().shape(), 1, 100, 64) });
        assert_eq!(plain.memory, Memory { huge: false, populate: false, lock: false, node: None });
        let over = declare(&FbCacheConfig { memory: FB_MEMORY_OVERCOMMIT, ..small() }).unwrap();
        assert!(over.overcommit && !plain.overcommit);
        let full = FbCacheConfig {
            host_stride: 128,
            device_block_align: 256,
            host_pages: 9,
            index_pages: 8,
            pool_slots: 640,
            min_budget: 32,
            batch: 7,
            steps_in_flight: 3,
            micro_batches: 2,
            memory: 0,
            attention_waves: 5,
            numa_node: 2,
            residency_only: 1,
            parked: 4,
            arriving: 6,
            ..small()
        };
        let wanted = Config {
            host_pages: 9,
            index_pages: 8,
            slots: Slots::Uniform(640),
            min_budget: 32,
            attention_waves: 5,
            batch: 7,
            steps_in_flight: 3,
            micro_batches: 2,
            residency_only: true,
            parked: 4,
            arriving: 6,
            memory: Memory { node: Some(1), ..Memory::default() },
            ..Config::new(full.shape(), 1, 100, 64)
        };
        assert_eq!(declare(&full).unwrap(), wanted);
        assert_eq!((full.shape().host_stride, full.shape().device_block_align), (128, 256));
        let table = [64, 128];
        let by_layer = FbCacheConfig { slots_by_layer: table.as_ptr(), ..small() };
        assert_eq!(declare(&by_layer).unwrap().slots, Slots::ByLayer(table.to_vec()));
    }

    #[test]
    fn layers_that_select_are_listed_or_counted() {
        let of = |layers: u32, table: &[u32]| {
            let selects_by_layer = table.as_ptr();
            declare(&FbCacheConfig { layers, draft_layers: 1, selects_by_layer, ..small() })
        };
        let group = |first, layers| IndexGroup { first, layers, top_k: 0 };
        let groups = |table: &[u32]| of(table.len() as u32 - 1, table).unwrap().index_groups;
        assert_eq!(groups(&[1, 1, 0, 0, 1, 1]), [group(0, 1), group(1, 3), group(4, 1), group(5, 1)]);
        assert_eq!(declare(&small()).unwrap().index_groups, []);
        for (table, value) in [([0, 1, 1], 0), ([1, 7, 1], 7)] {
            let error = of(2, &table).unwrap_err();
            assert_eq!((error.place(), error.number("value")), ("selects_by_layer", Some(value)));
        }
        let both = FbCacheConfig { group_layers: 2, selects_by_layer: [1, 0].as_ptr(), ..small() };
        assert!(declare(&both).unwrap_err().to_string().contains("or lone_layers and group_layers"));
    }

    #[test]
    fn a_share_is_declared_with_its_numbers_or_their_defaults() {
        let share = |config: FbCacheConfig| declare(&config).unwrap().share;
        assert_eq!(share(small()), None);
        for (number, by) in [
            (FB_SHARE_EQUAL, ShareBy::Equal),
            (FB_SHARE_LENGTH, ShareBy::Length),
            (FB_SHARE_MISSES, ShareBy::Misses),
        ] {
            let config = FbCacheConfig { share: number, ..small() };
            assert_eq!(share(config), Some(Share { by, ..Share::default() }));
            let config = FbCacheConfig {
                share_every: 5,
                share_least_change: 3,
                share_resizes_a_step: 2,
                share_bytes_a_step: 1 << 40,
                ..config
            };
            let wanted = Share { by, every: 5, least_change: 3, resizes_a_step: 2, bytes_a_step: 1 << 40 };
            assert_eq!(share(config), Some(wanted));
        }
    }

    #[test]
    fn invalid_and_contradictory_fields_are_refused() {
        let table = [64, 128];
        let slots_by_layer = table.as_ptr();
        for (config, kind, place) in [
            (FbCacheConfig { memory: 16, ..small() }, Kind::InvalidConfig, "memory"),
            (FbCacheConfig { slots: 0, ..small() }, Kind::InvalidConfig, "slots"),
            (FbCacheConfig { residency_only: 2, ..small() }, Kind::InvalidConfig, "residency_only"),
            (
                FbCacheConfig { pool_slots: 64, slots_by_layer, ..small() },
                Kind::InvalidConfig,
                "pool_slots and slots_by_layer",
            ),
            (FbCacheConfig { layers: u32::MAX, slots_by_layer, ..small() }, Kind::InvalidConfig, "layers"),
            (FbCacheConfig { share: 4, ..small() }, Kind::InvalidConfig, "share"),
            (FbCacheConfig { share_every: 1, ..small() }, Kind::InvalidConfig, "share"),
            (FbCacheConfig { share_bytes_a_step: 1, ..small() }, Kind::InvalidConfig, "share"),
        ] {
            let error = declare(&config).unwrap_err();
            assert_eq!((error.kind(), error.place()), (kind, place));
        }
    }
}
