//! The configuration of a dense cache, the shapes of published models, and the memory that a configuration takes.

use std::ffi::c_char;

use forebay::dense::{Config, GROUPS_MAX, Group, Layout, Runs, Save, Shape, Width};
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned, create};
use crate::config::{memory, or};
use crate::status::FbStatus;

/// The most groups of a dense model.
pub const FB_DENSE_GROUPS_MAX: usize = 4;

/// Each layer has its own device memory: `[pages][a page's rows of the layer]`.
pub const FB_DENSE_LAYER_FIRST: u32 = 0;
/// A page has the rows of all layers of its group side by side: `[pages][layers][a page's rows of a layer]`.
pub const FB_DENSE_PAGE_FIRST: u32 = 1;

/// K and V each have their own device memory.
pub const FB_DENSE_RUNS_APART: u32 = 0;
/// K and V of a layer are in one device memory: in a page first K of all its tokens, then V of all its tokens.
pub const FB_DENSE_RUNS_TOGETHER: u32 = 1;

/// Slots and positions in a step's tensors are int64_t.
pub const FB_DENSE_I64: u32 = 0;
/// Slots and positions in a step's tensors are int32_t.
pub const FB_DENSE_I32: u32 = 1;

/// A published page is copied to the host's tier by fb_dense_save (write-through).
pub const FB_DENSE_SAVE_PUBLISHED: u32 = 0;
/// A published page is copied to the host's tier when its device page goes to others (write-back).
pub const FB_DENSE_SAVE_EVICTED: u32 = 1;

/// The most layers of a shape. A larger number is refused before so many numbers are read.
const LAYERS_MAX: u32 = 1 << 12;

const _: () = assert!(FB_DENSE_GROUPS_MAX == GROUPS_MAX);

/// Layers of a dense model with the same rows and the same kind of attention. They share page tables. This struct never
/// grows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbDenseGroup {
    /// The model's layer numbers, ascending. Each layer, from 0 on, is in exactly one group.
    pub layers: *const u32,
    /// The number of layers.
    pub layer_count: u32,
    /// Tokens that a query reads, itself included, in layers with a sliding window; 0: all tokens before it.
    pub window: u32,
    /// Bytes of a token's K and of its V in one layer: multiples of 16, at most 1 MiB each. An MLA latent is one run:
    /// its bytes and 0. On a rank of tensor parallelism these are the bytes of the rank's own heads.
    pub row_bytes: [u32; 2],
}

// SAFETY: a pointer, which is a word, and four words of 4 bytes.
unsafe impl Plain for FbDenseGroup {}

/// The configuration of a dense cache. An optional field that is 0 gets the default that its comment names.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbDenseConfig {
    /// sizeof(fb_dense_config).
    pub size: usize,
    /// The groups of layers. fb_dense_preset fills them in for published models.
    pub groups: [FbDenseGroup; FB_DENSE_GROUPS_MAX],
    /// The number of groups.
    pub group_count: u32,
    /// Tokens of a page: 16, 32, 64, 128 or 256. Kernels take some of them only.
    pub page_tokens: u32,
    /// The most sequences that may be open at once.
    pub sequences: u32,
    /// Tokens of the longest sequence: prompt plus promised tokens.
    pub max_tokens: u32,
    /// Optional: how pages lie in device memory, FB_DENSE_LAYER_FIRST or FB_DENSE_PAGE_FIRST. Default:
    /// FB_DENSE_LAYER_FIRST.
    pub layout: u32,
    /// Optional: where K and V are, FB_DENSE_RUNS_APART or FB_DENSE_RUNS_TOGETHER. Default: FB_DENSE_RUNS_APART.
    pub runs: u32,
    /// Optional: the integers of slots and positions, FB_DENSE_I64 or FB_DENSE_I32. Default: FB_DENSE_I64.
    pub width: u32,
    /// Optional: when a published page is copied to the host's tier, FB_DENSE_SAVE_PUBLISHED or FB_DENSE_SAVE_EVICTED.
    /// Default: FB_DENSE_SAVE_PUBLISHED.
    pub save: u32,
    /// Optional: device pages of each group, its null page included: page 0, which is zeros and belongs to no sequence.
    /// Default: as many as fb_dense_pages_for returns for `sequences` and `max_tokens`.
    pub device_pages: [u32; FB_DENSE_GROUPS_MAX],
    /// Optional: host pages of each group: the second tier, which keeps published pages that the device has no room
    /// for, and the rows of parked sequences. Default: no such tier; then fb_dense_park always returns FB_EXHAUSTED.
    pub host_pages: [u32; FB_DENSE_GROUPS_MAX],
    /// Optional: the most batch rows of a step. Default: `sequences`, at most 32,767.
    pub batch: u32,
    /// Optional: the most query rows of a step, of all batch rows together: at least `batch` x `query_rows` (vLLM:
    /// max_num_batched_tokens). Default: 2048, or `batch` x `query_rows` if that is more.
    pub step_tokens: u32,
    /// Optional: query rows that a decoding sequence may have in a step: 1 + drafts. A batch row with more is a chunk
    /// of a prompt, and none of its rows can be rejected. Default: 1.
    pub query_rows: u32,
    /// Optional: the most steps of one sequence in flight. Default: 2.
    pub steps_in_flight: u32,
    /// Optional: micro-batches that may each have a step open at the same time. Default: 1.
    pub micro_batches: u32,
    /// Optional: FB_MEMORY_ flags for the host's tier; FB_MEMORY_UNLOCKED also for the page tables and step
    /// descriptors, and FB_MEMORY_OVERCOMMIT for all host memory. Default: huge pages, allocated at creation and
    /// locked. fb_dense_fallback names each of these options that the system refused.
    pub memory: u32,
    /// Optional: the NUMA node of the host's tier, plus 1. Default: any node.
    pub numa_node: u32,
    /// Optional: layers whose pages come back from the host together. A step may then compute its first layers while
    /// the pages of later ones still come: it must call fb_dense_arrived before it writes a layer's new rows.
    /// Default: all layers, for which fb_dense_prepare waits. Not with FB_DENSE_PAGE_FIRST, where a page comes back in
    /// one piece.
    pub bring_layers: u32,
}

// SAFETY: words and pointers, which are words; an even number of 4 bytes wherever one of 8 follows or the end.
unsafe impl Plain for FbDenseConfig {}
impl Versioned for FbDenseConfig {
    const NAME: &'static str = "fb_dense_config";
    const REQUIRED: usize = std::mem::offset_of!(FbDenseConfig, layout);
}

/// The bytes that a dense cache takes, by purpose.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbDenseCacheFootprint {
    /// sizeof(fb_dense_cache_footprint), set by the caller.
    pub size: usize,
    /// Device: the pages of all groups, the null pages included.
    pub pages: u64,
    /// Device: the page tables of the steps' batch rows, and two words for each sequence.
    pub tables: u64,
    /// Device: the other tensors of steps: slots, positions, lengths and starts.
    pub tensors: u64,
    /// Device: the GPU's own page tables for the registered host memory, 8 bytes for each 4 KiB. A host device has
    /// none.
    pub host_page_tables: u64,
    /// Host: the page tables of all sequences, pinned.
    pub host_tables: u64,
    /// Host: the pinned ring of step descriptors and reports.
    pub step_descriptors: u64,
    /// Host: the pages of the host's tier, pinned.
    pub host_pages: u64,
}

// SAFETY: words of 8 bytes.
unsafe impl Plain for FbDenseCacheFootprint {}
impl Versioned for FbDenseCacheFootprint {
    const NAME: &'static str = "fb_dense_cache_footprint";
    const REQUIRED: usize = std::mem::offset_of!(FbDenseCacheFootprint, host_pages) + 8;
}

fn refuse(place: &'static str, value: u32) -> Error {
    Error::new(Kind::InvalidConfig, "dense cache").at(place).with("value", value)
}

/// Renames the place of an error to the field's name in fb_dense_config.
pub(crate) fn in_words(error: Error) -> Error {
    match (error.kind(), error.place()) {
        (Kind::InvalidConfig, "runs") => error.at("row_bytes"),
        (Kind::InvalidConfig, "groups") => error.at("group_count"),
        _ => error,
    }
}

/// The value of a constant that has two.
fn one_of<T>(place: &'static str, value: u32, zero: T, one: T) -> Result<T> {
    match value {
        0 => Ok(zero),
        1 => Ok(one),
        other => Err(refuse(place, other).hint("pass one of the field's FB_DENSE_ constants")),
    }
}

impl FbDenseGroup {
    /// # Safety
    /// `layers` is null, or has `layer_count` numbers.
    unsafe fn declare(&self) -> Result<Group> {
        if self.layer_count > LAYERS_MAX {
            return Err(refuse("layer_count", self.layer_count).with("most", LAYERS_MAX));
        }
        // SAFETY: the same contract.
        let layers = unsafe { cast::slice(self.layers, self.layer_count as usize, "layers") }?;
        let window = (self.window != 0).then_some(self.window);
        Ok(Group { layers: layers.to_vec(), runs: self.row_bytes, window })
    }
}

impl FbDenseConfig {
    /// # Safety
    /// `layers` of each of the groups is null, or has as many numbers as stated.
    unsafe fn shape(&self) -> Result<Shape> {
        let count = self.group_count as usize;
        let groups = self.groups.get(..count).ok_or_else(|| {
            refuse("group_count", self.group_count).with("most", FB_DENSE_GROUPS_MAX as u64)
        })?;
        // SAFETY: the same contract.
        let groups = groups.iter().map(|group| unsafe { group.declare() }).collect::<Result<_>>()?;
        Ok(Shape { page_tokens: self.page_tokens, groups })
    }

    /// The numbers of the groups that there are.
    fn by_group(&self, pages: &[u32; FB_DENSE_GROUPS_MAX], place: &'static str) -> Result<Vec<u32>> {
        let (own, beyond) = pages.split_at(self.group_count as usize);
        match beyond.iter().find(|pages| **pages != 0) {
            Some(pages) => Err(refuse(place, *pages).hint("pass 0 for groups beyond group_count")),
            None => Ok(own.to_vec()),
        }
    }

    /// The configuration that the caller declared.
    ///
    /// # Safety
    /// `layers` of each of the groups is null, or has as many numbers as stated.
    pub(crate) unsafe fn declare(&self) -> Result<Config> {
        // SAFETY: the same contract.
        let shape = unsafe { self.shape() }?;
        let (memory, overcommit) = memory(self.memory, self.numa_node)?;
        let all = Config::new(shape, self.sequences, self.max_tokens);
        let (batch, query_rows) = (or(self.batch, all.batch), or(self.query_rows, all.query_rows));
        let step_tokens = all.step_tokens.max(batch.saturating_mul(query_rows));
        let host_pages = self.by_group(&self.host_pages, "host_pages")?;
        let mut config = Config {
            layout: one_of("layout", self.layout, Layout::LayerFirst, Layout::PageFirst)?,
            runs: one_of("runs", self.runs, Runs::Apart, Runs::Together)?,
            width: one_of("width", self.width, Width::I64, Width::I32)?,
            save: one_of("save", self.save, Save::Published, Save::Evicted)?,
            bring_layers: self.bring_layers,
            host_pages: if host_pages.iter().all(|pages| *pages == 0) { Vec::new() } else { host_pages },
            batch,
            step_tokens: or(self.step_tokens, step_tokens),
            query_rows,
            steps_in_flight: or(self.steps_in_flight, all.steps_in_flight),
            micro_batches: or(self.micro_batches, all.micro_batches),
            memory,
            overcommit,
            ..all
        };
        let given = self.by_group(&self.device_pages, "device_pages")?;
        let whole = config.pages_for(self.sequences, self.max_tokens);
        config.device_pages = given.into_iter().zip(whole).map(|(given, whole)| or(given, whole)).collect();
        Ok(config)
    }
}

/// Fills in the fields that describe a published model (`groups`, `group_count`, `page_tokens`) and leaves the other
/// fields unchanged. `layers` receives the layer numbers, and the groups point to them, so it must live as long as
/// `config` is used. The names are "llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "gemma-3-27b", "gpt-oss-20b",
/// "gpt-oss-120b", "deepseek-v3", "deepseek-r1" and "smollm2-135m": the whole model in BF16 with pages of 64 tokens. A
/// rank of tensor parallelism divides `row_bytes`, except those of an MLA latent. FB_OUT_OF_RANGE for another name, and
/// for a `room` of fewer than the model's layers (128 hold any of them). Set `size` of `config` before the call; the
/// other fields may be zero or filled. On failure, `text` receives the reason. Any thread may call it.
///
/// # Safety
/// `name` ends with a zero; `layers` has `room` places; `config` states its real size; `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_preset(
    name: *const c_char,
    text: *mut c_char,
    text_bytes: usize,
    layers: *mut u32,
    room: u32,
    config: *mut FbDenseConfig,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let mut known = cast::versioned(config.cast_const())?;
            let name = cast::text(name, "name")?;
            let shape = Shape::preset(name).ok_or_else(|| {
                Error::new(Kind::OutOfRange, "preset")
                    .at(format!("name {name:?}"))
                    .hint("the header lists the names at fb_dense_preset")
            })?;
            if shape.layers() > room as usize {
                return Err(Error::new(Kind::OutOfRange, "preset")
                    .at("room")
                    .with("room", room)
                    .with("wanted", shape.layers() as u64));
            }
            let places = cast::room(layers, room as usize, "layers")?;
            let mut first = 0;
            for (to, group) in known.groups.iter_mut().zip(&shape.groups) {
                *to = FbDenseGroup {
                    layers: layers.wrapping_add(first),
                    layer_count: group.layers.len() as u32,
                    window: group.window.unwrap_or(0),
                    row_bytes: group.runs,
                };
                for (place, layer) in places[first..].iter_mut().zip(&group.layers) {
                    place.write(*layer);
                }
                first += group.layers.len();
            }
            (known.group_count, known.page_tokens) = (shape.groups.len() as u32, shape.page_tokens);
            cast::versioned_out(config)?.set(&known);
            Ok(())
        })
    }
}

/// Computes the device pages of each group with which `sequences` sequences of `tokens` tokens fit: the null page, each
/// sequence's pages with its rows in flight, and for groups with a sliding window the pages of prompt chunks in flight.
/// `pages` receives FB_DENSE_GROUPS_MAX numbers, 0 for groups that there are not. They depend on `step_tokens`,
/// `query_rows`, `steps_in_flight`, `micro_batches` and `batch` of the configuration; its `device_pages` are ignored.
/// The call refuses every configuration that fb_dense_create refuses with these pages before it asks for memory. On
/// failure, `text` receives the reason. Any thread may call it.
///
/// # Safety
/// `config` states its real size, and the layers of its groups are valid; `text` has `text_bytes` bytes; `pages` has
/// FB_DENSE_GROUPS_MAX places.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_pages_for(
    config: *const FbDenseConfig,
    sequences: u32,
    tokens: u32,
    text: *mut c_char,
    text_bytes: usize,
    pages: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let places = cast::room(pages, FB_DENSE_GROUPS_MAX, "pages")?;
            let given = FbDenseConfig { device_pages: [0; FB_DENSE_GROUPS_MAX], ..cast::versioned(config)? };
            let mut config = given.declare()?;
            config.device_pages = config.pages_for(sequences, tokens);
            config.footprint().map_err(in_words)?;
            let all = config.device_pages.iter().copied().chain(std::iter::repeat(0));
            for (place, pages) in places.iter_mut().zip(all) {
                place.write(pages);
            }
            Ok(())
        })
    }
}

/// Computes what a dense cache of this configuration takes, in bytes, and takes nothing. The call refuses every
/// configuration that fb_dense_create refuses before it asks for memory. On failure, `text` receives the reason. Any
/// thread may call it.
///
/// # Safety
/// Both structs state their real sizes, and the layers of the groups are valid; `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_dense_footprint(
    config: *const FbDenseConfig,
    text: *mut c_char,
    text_bytes: usize,
    footprint: *mut FbDenseCacheFootprint,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let footprint = cast::versioned_out(footprint)?;
            let config = FbDenseConfig::declare(&cast::versioned(config)?)?;
            let all = config.footprint().map_err(in_words)?;
            footprint.set(&FbDenseCacheFootprint {
                size: size_of::<FbDenseCacheFootprint>(),
                pages: all.pages,
                tables: all.tables,
                tensors: all.tensors,
                host_page_tables: all.host_page_tables,
                host_tables: all.host_tables,
                step_descriptors: all.step_descriptors,
                host_pages: all.host_pages,
            });
            Ok(())
        })
    }
}
