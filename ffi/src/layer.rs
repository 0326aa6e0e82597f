//! The calls of one layer of a step: resolve, gather, scatter, and `fb_layer` for the usual pair.
//!
//! An engine calls `fb_layer` most often. The call looks up the handle and the step, imports two buffers, and calls the
//! library. A buffer's size always follows from the step and the cache, never from the caller.

use std::ffi::c_void;

use forebay::device::{Device, Slice, SplitIndices};
use forebay::{Buffers, Cache, Error, Kind, Layer, LayerCall, Result, Step, Streams};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::handle::change;
use crate::status::FbStatus;
use crate::step::FbStep;

/// In fb_step_range and fb_overlap: all query rows of the step. Draft pass j, counted from 0, is given as j + 1.
pub const FB_ALL_QUERY_ROWS: u32 = 0;

/// The batch rows and the layer of a step that a call works on.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbStepRange {
    /// sizeof(fb_step_range).
    pub size: usize,
    /// The layer.
    pub layer: u32,
    /// Optional: the first batch row. Default: 0.
    pub first: u32,
    /// Optional: the number of batch rows. Default: all from `first` on.
    pub count: u32,
    /// Optional: FB_ALL_QUERY_ROWS, or j + 1 for draft pass j, counted from 0: the call then works on query row j of
    /// each batch row only.
    pub draft_pass: u32,
}

// SAFETY: words, four of 4 bytes after one of 8.
unsafe impl Plain for FbStepRange {}
impl Versioned for FbStepRange {
    const NAME: &'static str = "fb_step_range";
    const REQUIRED: usize = std::mem::offset_of!(FbStepRange, first);
}

/// The device buffers of a resolve. They must not overlap.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbBuffers {
    /// sizeof(fb_buffers).
    pub size: usize,
    /// The selection (top-k indices): token positions, -1 for none, `[batch rows][query rows][top_k]` of the call's
    /// range.
    pub selection: *const i32,
    /// Receives the slots of these positions in the layer's slab, in the same shape, -1 for none.
    pub slots: *mut i32,
    /// Optional: receives the slots again as the index lists of split attention, `[1 + attention_waves][batch][query
    /// rows][top_k]`. The batch rows are the step's, also in a call for a part of them, which writes only its own; the
    /// query rows are those of the call's range. Index list 0 has the rows that were resident and those that this step
    /// writes, index list 1 + w the rows that attention wave w fetches.
    pub lists: *mut i32,
    /// Receives the number of valid slots in each index list, `[1 + attention_waves][batch][query rows]` as in `lists`;
    /// NULL without index lists.
    pub counts: *mut u32,
    /// Batch rows of each index list, at least the step's; 0 without index lists.
    pub batch: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: words and pointers, which are words; two of 4 bytes at the end.
unsafe impl Plain for FbBuffers {}
impl Versioned for FbBuffers {
    const NAME: &'static str = "fb_buffers";
    const REQUIRED: usize = std::mem::offset_of!(FbBuffers, lists);
}

impl FbStepRange {
    fn call(&self, step: &Step) -> Result<LayerCall> {
        let batch_rows = match (self.first, self.count) {
            (0, 0) => None,
            (first, 0) => Some((
                first,
                step.rows().checked_sub(first).filter(|rows| *rows > 0).ok_or_else(|| {
                    Error::new(Kind::OutOfRange, "layer")
                        .at("rows of the step")
                        .with("first", first)
                        .with("rows", step.rows())
                })?,
            )),
            rows => Some(rows),
        };
        Ok(LayerCall { layer: Layer(self.layer), batch_rows, draft_pass: self.draft_pass.checked_sub(1) })
    }
}

/// Imports a caller's buffers with exactly the size that a call needs.
pub(crate) struct Imports<'a> {
    device: &'a dyn Device,
    top_k: u64,
    /// Index lists of split attention.
    lists: u64,
}

fn overflow(place: &'static str) -> Error {
    Error::new(Kind::Overflow, "argument").at(place)
}

impl<'a> Imports<'a> {
    /// For `cache`, which is on `device`.
    pub(crate) fn of(cache: &Cache, device: &'a dyn Device) -> Imports<'a> {
        let top_k = cache.geometry().shape().top_k.into();
        Imports { device, top_k, lists: 1 + u64::from(cache.attention_waves()) }
    }

    /// Refuses a cache in which one gather does not fetch every missed row.
    fn check_one_wave(&self) -> Result<()> {
        match self.lists {
            2 => Ok(()),
            lists => Err(Error::new(Kind::InvalidConfig, "layer")
                .at("a cache with several attention waves")
                .with("attention_waves", lists - 1)
                .hint("call fb_resolve with index lists, then fb_gather for each wave")),
        }
    }

    /// The number of words in a selection, and in its slots, for this many batch rows and query rows.
    fn words(&self, rows: u32, query_rows: u32) -> Result<u64> {
        let rows = u64::from(rows) * u64::from(query_rows);
        rows.checked_mul(self.top_k).ok_or_else(|| overflow("rows x query rows x top_k"))
    }

    /// A selection and its slots for this many batch rows and query rows.
    ///
    /// # Safety
    /// Both are memory of the device until every operation that uses them has ended.
    pub(crate) unsafe fn pair(
        &self,
        selection: *const i32,
        slots: *mut i32,
        rows: u32,
        query_rows: u32,
    ) -> Result<(Slice, Slice)> {
        // SAFETY: this function's contract.
        unsafe { self.pair_of(selection, slots, self.words(rows, query_rows)?) }
    }

    /// The same for this many words.
    ///
    /// # Safety
    /// As [`Imports::pair`].
    unsafe fn pair_of(&self, selection: *const i32, slots: *mut i32, words: u64) -> Result<(Slice, Slice)> {
        // SAFETY: this function's contract.
        unsafe {
            Ok((
                cast::buffer(self.device, selection, words, "selection")?,
                cast::buffer(self.device, slots.cast_const(), words, "slots")?,
            ))
        }
    }

    /// The index lists of split attention for this many batch rows and query rows, if the caller gave any.
    ///
    /// # Safety
    /// As [`Imports::pair`].
    pub(crate) unsafe fn split_indices(
        &self,
        lists: *mut i32,
        counts: *mut u32,
        rows: u32,
        query_rows: u32,
    ) -> Result<Option<SplitIndices>> {
        if lists.is_null() && counts.is_null() && rows == 0 {
            return Ok(None);
        }
        let all = self.words(rows, query_rows)?.checked_mul(self.lists).ok_or_else(|| overflow("lists"))?;
        let counted = u64::from(rows) * u64::from(query_rows);
        let counted = counted.checked_mul(self.lists).ok_or_else(|| overflow("counts"))?;
        // SAFETY: this function's contract.
        unsafe {
            Ok(Some(SplitIndices {
                lists: cast::buffer(self.device, lists.cast_const(), all, "lists")?,
                counts: cast::buffer(self.device, counts.cast_const(), counted, "counts")?,
                batch: rows,
            }))
        }
    }
}

/// Resolves a layer's selection (top-k indices) and gathers the missed rows, for all batch rows of the step, on one
/// stream. `selection` has token positions, -1 for none, `[batch rows][query rows][top_k]`. `slots`, of the same shape,
/// receives the slots of these positions in the layer's slab. Query row r, from 0, may select positions below L + r +
/// 1, where L is the committed length after this step's commit (fb_retired_lengths returns it). On any other position
/// except -1, fb_retire returns FB_DEVICE_FAILED. Fetched rows for which the budget has no slot are in scratch slots,
/// which other layers use too: enqueue this layer's attention before the next layer's call. FB_INVALID_CONFIG in a
/// cache with several attention waves: call fb_resolve, then fb_gather for each wave. FB_INVALID_STATE for a finished
/// step.
///
/// In a layer that another one selects for (`group_layers` of fb_cache_config) the call gathers only and writes no
/// slots: attention reads those of the group's first layer.
///
/// # Safety
/// The device may use both buffers until the stream has passed this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_layer(
    cache: *mut FbCache,
    step: FbStep,
    layer: u32,
    selection: *const i32,
    slots: *mut i32,
    stream: *mut c_void,
) -> FbStatus {
    change(cache, |cache| {
        let step = cache.step(step)?;
        let imports = Imports::of(&cache.cache, cache.device());
        imports.check_one_wave()?;
        // SAFETY: this call's contract.
        let (selection, slots) = unsafe { imports.pair(selection, slots, step.rows(), step.query_rows()) }?;
        let stream = cast::stream(stream);
        let streams = Streams { resolve: stream, gather: stream };
        cache.cache.layer(
            step,
            LayerCall::whole(Layer(layer)),
            streams,
            Buffers { selection, slots, split_indices: None },
        )
    })
}

/// Calls fb_layer for every layer, draft layers included. It is for replays and tests, which have all selections
/// beforehand. `selection` and `slots` are `[index_groups of fb_info][batch rows][query rows][top_k]`: for each layer
/// that selects. Layers share the scratch slots, so after this call these hold rows of the last layer only; where
/// layers share a selection, of the last group's layers. If an earlier layer might need a scratch slot, the call
/// therefore returns FB_INVALID_CONFIG and enqueues nothing. No layer needs one if each sequence of the step has a
/// budget of at least query rows x top_k slots, or of a slot for each token of its prompt, its promised tokens and the
/// allowance for rows in flight (the cache's `query_rows` x `steps_in_flight`), or if the cache has residency_only set.
/// If another error stops the call at a layer, the layers before it are enqueued: abandon the step (fb_abandon), or
/// continue with fb_layer.
///
/// # Safety
/// As fb_layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_layers(
    cache: *mut FbCache,
    step: FbStep,
    selection: *const i32,
    slots: *mut i32,
    stream: *mut c_void,
) -> FbStatus {
    change(cache, |cache| {
        let step = cache.step(step)?;
        let imports = Imports::of(&cache.cache, cache.device());
        imports.check_one_wave()?;
        let words = imports.words(step.rows(), step.query_rows())?;
        let groups = cache.cache.geometries().groups().len() as u64;
        let all = words.checked_mul(groups).ok_or_else(|| overflow("layers"))?;
        // SAFETY: this call's contract.
        let (selection, slots) = unsafe { imports.pair_of(selection, slots, all) }?;
        let stream = cast::stream(stream);
        cache.cache.layers(step, Streams { resolve: stream, gather: stream }, selection, slots)
    })
}

/// Resolves the selection of a range of a step. FB_OUT_OF_RANGE for a layer that another one selects for
/// (`group_layers` of fb_cache_config): it only gathers. The caller must call fb_gather for these batch rows before
/// the next resolve of any of them, in any layer, and order it after this resolve: on the same stream, or by
/// fb_stream_order. The gather must also be ordered before the attention that reads the fetched rows; attention over
/// index list 0 may run before it. A step in which missed rows were not gathered fails.
///
/// # Safety
/// `range` and `buffers` state their real sizes. The device may use the buffers until the stream has passed this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_resolve(
    cache: *mut FbCache,
    step: FbStep,
    range: *const FbStepRange,
    buffers: *const FbBuffers,
    stream: *mut c_void,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract, for both.
        let (range, given) = unsafe { (cast::versioned(range)?, cast::versioned(buffers)?) };
        if given.reserved != 0 {
            return Err(Error::new(Kind::InvalidConfig, "resolve").at("reserved"));
        }
        let step = cache.step(step)?;
        let call = range.call(step)?;
        let rows = call.batch_rows.map_or(step.rows(), |(_, count)| count);
        let query_rows = call.draft_pass.map_or(step.query_rows(), |_| 1);
        let imports = Imports::of(&cache.cache, cache.device());
        // SAFETY: this call's contract, for all of them.
        let (selection, slots, split_indices) = unsafe {
            let (selection, slots) = imports.pair(given.selection, given.slots, rows, query_rows)?;
            (selection, slots, imports.split_indices(given.lists, given.counts, given.batch, query_rows)?)
        };
        cache.cache.resolve(step, call, cast::stream(stream), Buffers { selection, slots, split_indices })
    })
}

/// Fetches the rows that the last resolve of this range missed; with several attention waves, only the rows of wave
/// `attention_wave`, from 0. Attention that is ordered after this call may read the slots.
///
/// In a layer that another one selects for (`group_layers` of fb_cache_config) the resolve is that of the group's first
/// layer. There, this call may run at any time between that resolve and the layer's own attention: the layers of a
/// group have scratch slots of their own.
///
/// # Safety
/// `range` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_gather(
    cache: *mut FbCache,
    step: FbStep,
    range: *const FbStepRange,
    attention_wave: u32,
    stream: *mut c_void,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract.
        let range = unsafe { cast::versioned(range) }?;
        let step = cache.step(step)?;
        cache.cache.gather(step, range.call(step)?, attention_wave, cast::stream(stream))
    })
}

/// Stores a layer's new rows in the total pool. Enqueue it after the engine has written the rows to their landing
/// slots.
#[unsafe(no_mangle)]
pub extern "C" fn fb_scatter(cache: *mut FbCache, step: FbStep, layer: u32, stream: *mut c_void) -> FbStatus {
    change(cache, |cache| {
        let step = cache.step(step)?;
        cache.cache.scatter(step, LayerCall::whole(Layer(layer)), cast::stream(stream))
    })
}

/// Does the same as fb_scatter for a range of the step.
///
/// # Safety
/// `range` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_scatter_range(
    cache: *mut FbCache,
    step: FbStep,
    range: *const FbStepRange,
    stream: *mut c_void,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract.
        let range = unsafe { cast::versioned(range) }?;
        let step = cache.step(step)?;
        cache.cache.scatter(step, range.call(step)?, cast::stream(stream))
    })
}
