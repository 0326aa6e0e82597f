//! The calls of one layer of a step: resolve, gather, scatter, and the usual ones in one call.
//!
//! `fb_layer` is what an engine calls most: a look-up of the handle and of the step, two slices, and the call. A
//! caller's buffers are taken as exactly the words that the call needs.

use std::ffi::c_void;

use forebay::device::{Device, Slice, SplitIndices};
use forebay::{Buffers, Cache, Error, Kind, Layer, LayerCall, Result, Step, Streams};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::handle::change;
use crate::status::FbStatus;
use crate::step::FbStep;

/// In fb_step_range and fb_overlap: all query rows of the step; a draft layer's pass is its number + 1.
pub const FB_ALL_QUERY_ROWS: u32 = 0;

/// Which part of a step's layer a call works on.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbPart {
    /// sizeof(fb_step_range).
    pub size: usize,
    /// The layer.
    pub layer: u32,
    /// Optional: the first batch row,
    pub first: u32,
    /// Optional: and how many; all from the first on.
    pub count: u32,
    /// Optional: FB_ALL_QUERY_ROWS, or a draft layer's pass + 1: its one query row.
    pub draft_pass: u32,
}

// SAFETY: words, four of 4 bytes behind one of 8.
unsafe impl Plain for FbPart {}
impl Versioned for FbPart {
    const NAME: &'static str = "fb_step_range";
    const REQUIRED: usize = std::mem::offset_of!(FbPart, first);
}

/// Where a call finds the selection and puts the slots, on the device. Buffers must not overlap.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbBuffers {
    /// sizeof(fb_buffers).
    pub size: usize,
    /// Token positions, -1 for none: `[batch rows][query rows][top_k]` of the call's part.
    pub selection: *const i32,
    /// Of the same shape, receives their slots in the layer's slab, -1 for none.
    pub slots: *mut i32,
    /// Optional: the slots again as the index lists of attention in parts,
    /// `[1 + attention_waves][batch][query rows][top_k]`: what was resident, then what each pass fetches.
    pub lists: *mut i32,
    /// How many entries of each list are valid, `[1 + attention_waves][batch][query rows]`; NULL without lists.
    pub counts: *mut u32,
    /// Batch rows of a list, at least the step's; 0 without lists.
    pub batch: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: words and pointers, which are words; two of 4 bytes at the end.
unsafe impl Plain for FbBuffers {}
impl Versioned for FbBuffers {
    const NAME: &'static str = "fb_buffers";
    const REQUIRED: usize = std::mem::offset_of!(FbBuffers, lists);
}

impl FbPart {
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

/// Takes a caller's buffers, as exactly the words that a call needs.
pub(crate) struct Imports<'a> {
    device: &'a dyn Device,
    top_k: u64,
    /// Index lists of attention in parts.
    lists: u64,
}

fn overflow(place: &'static str) -> Error {
    Error::new(Kind::Overflow, "argument").at(place)
}

impl<'a> Imports<'a> {
    /// For `cache`, which stands on `device`.
    pub(crate) fn of(cache: &Cache, device: &'a dyn Device) -> Imports<'a> {
        let top_k = cache.geometry().shape().top_k.into();
        Imports { device, top_k, lists: 1 + u64::from(cache.attention_waves()) }
    }

    /// Whether one gather brings all that a resolve misses.
    fn check_one_pass(&self) -> Result<()> {
        match self.lists {
            2 => Ok(()),
            lists => Err(Error::new(Kind::InvalidConfig, "layer")
                .at("attention in several passes")
                .with("attention_waves", lists - 1)
                .hint("resolve with index lists, then gather by pass")),
        }
    }

    /// The words of a selection, and of its slots, of so many batch rows and query rows.
    fn words(&self, rows: u32, query_rows: u32) -> Result<u64> {
        let rows = u64::from(rows) * u64::from(query_rows);
        rows.checked_mul(self.top_k).ok_or_else(|| overflow("rows x query rows x top_k"))
    }

    /// A selection and its slots, of so many batch rows and query rows.
    ///
    /// # Safety
    /// Both are memory of the device, until every operation that names them has ended.
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

    /// The same, of so many words.
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

    /// The index lists of attention in parts, for so many batch rows and query rows, if there are any.
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

/// Resolves a layer's selection and gathers what it misses, all rows of the step, on one stream. `selection` holds
/// token positions, -1 for none, `[rows of the step][query rows][top_k]`; `slots`, of the same shape, receives their
/// slots in the layer's slab. A position at or beyond the sequence's length makes fb_retire answer FB_DEVICE_FAILED.
/// Rows beyond a sequence's budget are in scratch slots, which all layers share: attention of this layer comes before
/// the next layer's call. FB_INVALID_CONFIG in a cache of several attention_waves, whose slots are taken in turn:
/// fb_resolve, then fb_gather by pass.
///
/// # Safety
/// Both buffers are the device's to use until the stream has passed this call.
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
        imports.check_one_pass()?;
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

/// fb_layer of every layer, draft layers included, in one call: for replays and tests, which know all selections
/// beforehand. `selection` and `slots` are `[layers][rows of the step][query rows][top_k]`. Layers share the scratch
/// slots, which behind this call hold rows of the last layer alone: FB_INVALID_CONFIG, with nothing enqueued, where an
/// earlier layer might need one. None is needed where the budget of each of the step's sequences holds query rows x
/// top_k rows, or the whole sequence, nor in a cache of residency_only. On another error of one layer those before
/// it are enqueued: fb_abandon the step, or go on behind them with fb_layer.
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
        imports.check_one_pass()?;
        let words = imports.words(step.rows(), step.query_rows())?;
        let all = words.checked_mul(cache.layers() as u64).ok_or_else(|| overflow("layers"))?;
        // SAFETY: this call's contract.
        let (selection, slots) = unsafe { imports.pair_of(selection, slots, all) }?;
        let stream = cast::stream(stream);
        cache.cache.layers(step, Streams { resolve: stream, gather: stream }, selection, slots)
    })
}

/// Resolves a part of a layer's selection. fb_gather must follow, ordered behind it, before the layer's attention and
/// before the next resolve of the same rows: a step in which something missed was not gathered fails.
///
/// # Safety
/// `part` and `buffers` state their sizes truly; the buffers are the device's to use until the stream has passed this
/// call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_resolve(
    cache: *mut FbCache,
    step: FbStep,
    range: *const FbPart,
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

/// Fetches what the last resolve of these rows missed, or what pass `attention_wave` of attention reads of it, from
/// 0. Attention may read the slots behind it.
///
/// # Safety
/// `part` states its size truly.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_gather(
    cache: *mut FbCache,
    step: FbStep,
    range: *const FbPart,
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

/// Stores a layer's new rows in the total pool, once they stand in their landing slots.
#[unsafe(no_mangle)]
pub extern "C" fn fb_scatter(cache: *mut FbCache, step: FbStep, layer: u32, stream: *mut c_void) -> FbStatus {
    change(cache, |cache| {
        let step = cache.step(step)?;
        cache.cache.scatter(step, LayerCall::whole(Layer(layer)), cast::stream(stream))
    })
}

/// fb_scatter of a part of a layer.
///
/// # Safety
/// `part` states its size truly.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_scatter_range(
    cache: *mut FbCache,
    step: FbStep,
    range: *const FbPart,
    stream: *mut c_void,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract.
        let range = unsafe { cast::versioned(range) }?;
        let step = cache.step(step)?;
        cache.cache.scatter(step, range.call(step)?, cast::stream(stream))
    })
}
