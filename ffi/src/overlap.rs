//! A step's layers in an order that hides the gather: the engine's work by a callback, the library's between.
//!
//! The callback enqueues and returns. It runs inside the call, on its thread, with the cache entered alone: a call on
//! the same cache answers FB_BUSY there. What it answers other than 0 abandons the step, and is the call's answer. It
//! must return: neither an exception nor a longjmp may pass through the library.

use std::ffi::c_void;

use forebay::device::Stream;
use forebay::overlap::{Engine, EngineCall, Keys, Overlap, OverlapStreams, Work};
use forebay::{Buffers, Error, Kind, Layer, Layers, Result, Step};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::choice::order;
use crate::handle::{self, change};
use crate::layer::Imports;
use crate::status::FbStatus;
use crate::step::FbStep;

/// I0: the projections that the indexer needs, and the write of the index keys.
pub const FB_WORK_PROJECT: u32 = 0;
/// I: logits and top-k of the call's batch rows, which write their selection.
pub const FB_WORK_INDEX: u32 = 1;
/// P: the preparation of attention, which writes the new rows to their landing slots.
pub const FB_WORK_PREPARE: u32 = 2;
/// A: attention over some of the selected rows: see `keys`.
pub const FB_WORK_ATTEND: u32 = 3;
/// M: merges attention's parts by their log-sum-exp. Only where attention ran in parts.
pub const FB_WORK_MERGE: u32 = 4;
/// What follows attention: output projection, experts, communication.
pub const FB_WORK_REST: u32 = 5;

/// Of FB_WORK_ATTEND: all rows, the slots of the answer.
pub const FB_KEYS_ALL: u32 = 0;
/// What was resident or is born in this step: list 0.
pub const FB_KEYS_RESIDENT: u32 = 1;
/// What an attention pass fetched: list 1 + attention_wave.
pub const FB_KEYS_FETCHED: u32 = 2;

/// One call of the engine.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbEngineCall {
    /// sizeof(fb_engine_call) of the library: an older caller reads what it knows.
    pub size: usize,
    /// FB_WORK_ something: what to enqueue.
    pub work: u32,
    /// Of FB_WORK_ATTEND: FB_KEYS_ something.
    pub keys: u32,
    /// Of FB_KEYS_FETCHED: which pass fetched them, from 0.
    pub attention_wave: u32,
    /// For which micro-batch.
    pub micro_batch: u32,
    /// In which layer.
    pub layer: u32,
    /// The first batch row,
    pub first: u32,
    /// and how many: half of the batch for the parts of DBA's indexer, else all.
    pub count: u32,
    /// The first query row of each batch row,
    pub first_query_row: u32,
    /// and how many: 1 in a draft layer's pass.
    pub query_rows: u32,
    /// 0.
    pub reserved: u32,
}

/// Enqueues the work of `call` on `stream`, which is the compute stream of its micro-batch; what it forks to other
/// streams it joins again before it returns. 0 is success; an fb_status other than 0 abandons the step. Calls on the
/// cache are FB_BUSY meanwhile, also const ones: ask fb_landing_slot, fb_slab, fb_index_keys and fb_pages before.
pub type FbEnqueue =
    Option<unsafe extern "C" fn(data: *mut c_void, call: *const FbEngineCall, stream: *mut c_void) -> u32>;

/// The engine's side of the layers.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbEngine {
    /// sizeof(fb_engine).
    pub size: usize,
    /// Called for each of the engine's works, in the order of the enqueueing.
    pub enqueue: FbEnqueue,
    /// What it is called with.
    pub data: *mut c_void,
}

// SAFETY: words and pointers; a function's address is any word, and 0 is none.
unsafe impl Plain for FbEngine {}
impl Versioned for FbEngine {
    const NAME: &'static str = "fb_engine";
    const REQUIRED: usize = std::mem::offset_of!(FbEngine, data) + 8;
}

/// Where the layers of a step are enqueued and what they share. Streams may be the same one; the buffers are as in
/// fb_buffers, made for `batch` rows and the step's query rows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbOverlapConfig {
    /// sizeof(fb_overlap_config), of all in an array the same.
    pub size: usize,
    /// The engine's work: the stream that the step was prepared on.
    pub compute: *mut c_void,
    /// The resolve, where it runs beside the preparation.
    pub resolve: *mut c_void,
    /// The gather.
    pub gather: *mut c_void,
    /// The scatter.
    pub scatter: *mut c_void,
    /// The selection, which the engine's top-k writes.
    pub selection: *const i32,
    /// The answer.
    pub slots: *mut i32,
    /// Index lists; NULL where every layer runs in the order none and in one attention pass.
    pub lists: *mut i32,
    /// Their counts; NULL without lists.
    pub counts: *mut u32,
    /// Batch rows of a list; 0 without lists.
    pub lists_batch: u32,
    /// Batch rows that are enqueued, at least the step's: those of the bucket in a capture, whose other rows are
    /// inert. Optional but in a capture: the step's.
    pub batch: u32,
    /// Optional: the first batch row of DBA's second half; it has one half.
    pub half: u32,
    /// In a capture: the micro-batch. Otherwise 0: a step has its own.
    pub micro_batch: u32,
}

// SAFETY: words and pointers, which are words; four of 4 bytes at the end.
unsafe impl Plain for FbOverlapConfig {}
impl Versioned for FbOverlapConfig {
    const NAME: &'static str = "fb_overlap_config";
    const REQUIRED: usize = std::mem::offset_of!(FbOverlapConfig, micro_batch) + 4;
}

impl FbOverlapConfig {
    /// The layers of an open step.
    ///
    /// # Safety
    /// Its buffers are the device's to use until every operation that names them has ended.
    unsafe fn of_step(&self, imports: &Imports<'_>, step: &Step) -> Result<Layers> {
        if self.micro_batch != 0 {
            return Err(Error::new(Kind::InvalidConfig, "overlap")
                .at("micro_batch")
                .with("value", self.micro_batch)
                .hint("0: the step's own is meant"));
        }
        let batch = if self.batch == 0 { step.rows() } else { self.batch };
        // SAFETY: this function's contract.
        unsafe { self.declare(imports, batch, step.query_rows()) }
    }

    /// The layers of so many batch rows and query rows.
    ///
    /// # Safety
    /// As [`FbOverlapConfig::of_step`].
    pub(crate) unsafe fn declare(
        &self,
        imports: &Imports<'_>,
        batch: u32,
        query_rows: u32,
    ) -> Result<Layers> {
        // SAFETY: this function's contract, for all of them.
        let (selection, slots, split_indices) = unsafe {
            let (selection, slots) = imports.pair(self.selection, self.slots, batch, query_rows)?;
            (selection, slots, imports.split_indices(self.lists, self.counts, self.lists_batch, query_rows)?)
        };
        let streams = OverlapStreams {
            compute: cast::stream(self.compute),
            resolve: cast::stream(self.resolve),
            gather: cast::stream(self.gather),
            scatter: cast::stream(self.scatter),
        };
        Ok(Layers { streams, batch, half: self.half, buffers: Buffers { selection, slots, split_indices } })
    }
}

/// An engine behind its callback.
pub(crate) struct Callback {
    enqueue: unsafe extern "C" fn(*mut c_void, *const FbEngineCall, *mut c_void) -> u32,
    data: *mut c_void,
    /// The one that it is called in.
    process: u64,
}

impl Callback {
    /// # Safety
    /// `engine` is null, or states its size truly; its callback may be called with its data as long as this lives.
    pub(crate) unsafe fn of(engine: *const FbEngine) -> Result<Callback> {
        // SAFETY: this function's contract.
        let engine = unsafe { cast::versioned(engine) }?;
        let none = || Error::new(Kind::InvalidConfig, "argument").at("enqueue").hint("pass a function");
        let enqueue = engine.enqueue.ok_or_else(none)?;
        Ok(Callback { enqueue, data: engine.data, process: handle::process() })
    }
}

impl FbEngineCall {
    fn of(call: &EngineCall) -> FbEngineCall {
        let (work, keys, attention_wave) = match call.work {
            Work::Project => (FB_WORK_PROJECT, 0, 0),
            Work::Index => (FB_WORK_INDEX, 0, 0),
            Work::Prepare => (FB_WORK_PREPARE, 0, 0),
            Work::Attend(Keys::All) => (FB_WORK_ATTEND, FB_KEYS_ALL, 0),
            Work::Attend(Keys::Resident) => (FB_WORK_ATTEND, FB_KEYS_RESIDENT, 0),
            Work::Attend(Keys::Fetched { wave }) => (FB_WORK_ATTEND, FB_KEYS_FETCHED, wave),
            Work::Merge => (FB_WORK_MERGE, 0, 0),
            Work::Rest => (FB_WORK_REST, 0, 0),
        };
        FbEngineCall {
            size: size_of::<FbEngineCall>(),
            work,
            keys,
            attention_wave,
            micro_batch: call.micro_batch.0,
            layer: call.layer.0,
            first: call.first,
            count: call.count,
            first_query_row: call.rows.first,
            query_rows: call.rows.count,
            reserved: 0,
        }
    }
}

impl Engine for Callback {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        let said = FbEngineCall::of(call);
        // SAFETY: the contract of `Callback::of`.
        let status = unsafe { (self.enqueue)(self.data, &said, cast::stream_pointer(stream)) };
        if handle::process() != self.process {
            // Pools of rows are shared with the parent: nothing may go on here.
            return Err(Error::new(Kind::Closed, "overlap").at("a forked child came out of the callback"));
        }
        if status == 0 {
            return Ok(());
        }
        // What is no status of ours is told by its number, as a cancellation.
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u32 == status).unwrap_or(Kind::Cancelled);
        Err(Error::new(kind, "overlap")
            .at("the engine's callback refused")
            .with("status", status)
            .with("work", said.work)
            .with("layer", said.layer))
    }
}

/// Enqueues one layer of a step, or one pass of a draft layer, in an order FB_OVERLAP_NONE, FB_OVERLAP_DA or
/// FB_OVERLAP_DBA: the engine's work by its callback; resolve, gather and scatter between. `draft_pass` is
/// FB_ALL_QUERY_ROWS, or the pass of a draft layer + 1. fb_finish orders the step's end behind all of it.
///
/// A layer that was not enqueued whole, because the callback or the device refused, abandons the step: it is still
/// to be finished and retired, which then answers FB_CANCELLED, and its sequences are rolled back or closed. The
/// callback finds the cache busy: see fb_enqueue. FB_CLOSED in a child that it forked.
///
/// # Safety
/// `layers` and `engine` state their sizes truly; the buffers are the device's to use until every stream has passed
/// this call; the callback returns, by no other way than its end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_overlap(
    cache: *mut FbCache,
    step: FbStep,
    layer: u32,
    draft_pass: u32,
    order: u32,
    layers: *const FbOverlapConfig,
    engine: *const FbEngine,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract, for both.
        let (layers, mut engine) = unsafe { (cast::versioned(layers)?, Callback::of(engine)?) };
        let overlap = self::order(layer as usize, order)?;
        let place = cache.place(step)?;
        let imports = Imports::of(&cache.cache, cache.device());
        // SAFETY: this call's contract.
        let layers = unsafe { layers.of_step(&imports, &cache.steps.open[place]) }?;
        let (layer, draft_pass) = (Layer(layer), draft_pass.checked_sub(1));
        cache.cache.overlap(&mut cache.steps.open[place], layer, draft_pass, overlap, &layers, &mut engine)
    })
}

/// Enqueues all layers of the open steps, at most one of each micro-batch: each layer once, then `draft_passes`
/// passes of the draft layers, the steps in turn. `steps` and `layers` have `count` entries; `by_layer` the order of
/// every layer, draft layers last. An error after the first work was enqueued abandons all the steps.
///
/// # Safety
/// As fb_overlap; `steps`, `layers` and `by_layer` have so many entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_overlap_steps(
    cache: *mut FbCache,
    steps: *const FbStep,
    layers: *const FbOverlapConfig,
    count: u32,
    by_layer: *const u32,
    draft_passes: u32,
    engine: *const FbEngine,
) -> FbStatus {
    change(cache, |cache| {
        cache.check_count("overlap", count)?;
        // SAFETY: this call's contract, for all of them.
        let (steps, by_layer, mut engine) = unsafe {
            let steps = cast::slice(steps, count as usize, "steps")?;
            (steps, cast::slice(by_layer, cache.layers(), "by_layer")?, Callback::of(engine)?)
        };
        // SAFETY: the same.
        let mut layers = unsafe { cast::versioned_list(layers, count as usize) };
        let mut orders = std::mem::take(&mut cache.steps.orders);
        let read = declare_orders(by_layer, &mut orders);
        let ended = read.and_then(|()| {
            let imports = Imports::of(&cache.cache, &*cache.tenant.device);
            // SAFETY: the same.
            let layers = |step: &Step| unsafe { layers.next().ok_or_else(missing)??.of_step(&imports, step) };
            let salt = cache.salted(0);
            cache.steps.with_layers(steps.iter().map(|step| step ^ salt), layers, |steps| {
                cache.cache.overlap_steps(steps, &orders, draft_passes, &mut engine)
            })
        });
        cache.steps.orders = orders;
        ended
    })
}

/// A list that is shorter than it was counted.
pub(crate) fn missing() -> Error {
    Error::new(Kind::Internal, "argument").at("layers")
}

/// Reads orders into a list that was made for as many.
pub(crate) fn declare_orders(by_layer: &[u32], orders: &mut Vec<Overlap>) -> Result<()> {
    orders.clear();
    for (layer, one) in by_layer.iter().enumerate() {
        orders.push(order(layer, *one)?);
    }
    Ok(())
}

#[cfg(test)]
#[path = "overlap_tests.rs"]
mod tests;
