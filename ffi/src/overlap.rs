//! A step's layers in an order that hides the gather. The engine enqueues its work in a callback, and the library
//! enqueues resolve, gather and scatter between those calls.
//!
//! The callback enqueues and returns. It runs inside the call, on the caller's thread, while the call has exclusive
//! access to the cache: a call on the same cache returns FB_BUSY there. A result other than 0 abandons the step and
//! becomes the call's result. The callback must return normally: neither an exception nor a longjmp may pass through
//! the library.

use std::ffi::c_void;

use forebay::device::Stream;
use forebay::overlap::{Attended, Engine, EngineCall, Overlap, OverlapStreams, Work};
use forebay::{Buffers, Error, Kind, Layer, Layers, Result, Step};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::choice::order;
use crate::handle::{self, change};
use crate::layer::Imports;
use crate::status::FbStatus;
use crate::step::FbStep;

/// I0: the projections for the indexer, and the write of the index keys.
pub const FB_WORK_PROJECT: u32 = 0;
/// I: logits and top-k for the call's batch rows. This work writes their selection. A layer that another one selects
/// for has no such call.
pub const FB_WORK_INDEX: u32 = 1;
/// P: the preparation of attention. This work writes the new rows to their landing slots.
pub const FB_WORK_PREPARE: u32 = 2;
/// A: attention over the rows that `attended` names.
pub const FB_WORK_ATTEND: u32 = 3;
/// M: the merge of split attention's results by their log-sum-exp. It is called only where attention was split.
pub const FB_WORK_MERGE: u32 = 4;
/// The rest of the layer after attention: output projection, experts, communication.
pub const FB_WORK_REST: u32 = 5;

/// For FB_WORK_ATTEND: all selected rows, in `slots`.
pub const FB_ATTEND_ALL: u32 = 0;
/// For FB_WORK_ATTEND: the rows that were resident or that this step writes, in index list 0.
pub const FB_ATTEND_RESIDENT: u32 = 1;
/// For FB_WORK_ATTEND: the rows that an attention wave fetched, in index list 1 + attention_wave.
pub const FB_ATTEND_FETCHED: u32 = 2;

/// One call of the engine's callback.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbEngineCall {
    /// sizeof(fb_engine_call) in the library. An older caller reads the fields that it knows.
    pub size: usize,
    /// What to enqueue: an FB_WORK_ constant.
    pub work: u32,
    /// For FB_WORK_ATTEND: an FB_ATTEND_ constant.
    pub attended: u32,
    /// For FB_ATTEND_FETCHED: the wave that fetched the rows, from 0.
    pub attention_wave: u32,
    /// The micro-batch.
    pub micro_batch: u32,
    /// The layer.
    pub layer: u32,
    /// The first batch row.
    pub first: u32,
    /// The number of batch rows: one of the two parts of the batch for DBA's indexer, otherwise all.
    pub count: u32,
    /// The first query row of each batch row.
    pub first_query_row: u32,
    /// The number of query rows of each batch row: 1 in a draft pass.
    pub query_rows: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Enqueues the work of `call` on `stream`, the compute stream of its micro-batch. If the callback enqueues work on
/// other streams, it orders `stream` after that work before it returns. It returns 0 for success; any other value,
/// normally an fb_status, abandons the step. Calls on the cache, even const ones, return FB_BUSY inside the callback:
/// call fb_landing_slot, fb_slab, fb_index_keys and fb_pages earlier.
pub type FbEnqueue =
    Option<unsafe extern "C" fn(data: *mut c_void, call: *const FbEngineCall, stream: *mut c_void) -> u32>;

/// The engine's callback.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbEngine {
    /// sizeof(fb_engine).
    pub size: usize,
    /// The library calls it for each piece of the engine's work, in the order of enqueueing.
    pub enqueue: FbEnqueue,
    /// The first argument of every call.
    pub data: *mut c_void,
}

// SAFETY: words and pointers; a function's address is any word, and 0 is none.
unsafe impl Plain for FbEngine {}
impl Versioned for FbEngine {
    const NAME: &'static str = "fb_engine";
    const REQUIRED: usize = std::mem::offset_of!(FbEngine, data) + 8;
}

/// The streams and buffers of a step's layers. Streams may be equal. The buffers have the shapes that fb_buffers
/// describes, for this struct's `batch` batch rows and the step's query rows. A draft pass has one query row: it uses
/// the beginning of each buffer, in the shape for one query row. This struct's `lists_batch` is what fb_buffers calls
/// `batch`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbOverlapConfig {
    /// sizeof(fb_overlap_config), the same in all entries of an array.
    pub size: usize,
    /// The stream of the engine's work, on which the step was prepared.
    pub compute: *mut c_void,
    /// The stream of the resolve, in FB_OVERLAP_DA and FB_OVERLAP_DBA.
    pub resolve: *mut c_void,
    /// The stream of the gather, in all orders but FB_OVERLAP_NONE, which has resolve and gather on `compute`.
    pub gather: *mut c_void,
    /// The stream of the scatter.
    pub scatter: *mut c_void,
    /// The selection (top-k indices), which the engine's top-k writes.
    pub selection: *const i32,
    /// Receives the slots of the selection.
    pub slots: *mut i32,
    /// Index lists of split attention. They may be NULL if every layer runs in FB_OVERLAP_NONE or FB_OVERLAP_AHEAD,
    /// with one attention wave.
    pub lists: *mut i32,
    /// The number of valid slots in each index list; NULL without index lists.
    pub counts: *mut u32,
    /// Batch rows of each index list; 0 without index lists.
    pub lists_batch: u32,
    /// The number of batch rows to enqueue, at least the step's. Required in a capture, where it is the batch rows of
    /// the bucket; if a launched step has fewer, the remaining ones do nothing. Optional outside a capture. Default:
    /// the step's number of batch rows.
    pub batch: u32,
    /// Optional: the first batch row of DBA's second half. Default: the batch is not divided.
    pub half: u32,
    /// In a capture: the micro-batch. Otherwise 0, because the step has its own.
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
    /// The device may use its buffers until every operation on them has ended.
    unsafe fn of_step(&self, imports: &Imports<'_>, step: &Step) -> Result<Layers> {
        if self.micro_batch != 0 {
            return Err(Error::new(Kind::InvalidConfig, "overlap")
                .at("micro_batch")
                .with("value", self.micro_batch)
                .hint("leave it 0: the step has its own micro-batch"));
        }
        let batch = if self.batch == 0 { step.rows() } else { self.batch };
        // SAFETY: this function's contract.
        unsafe { self.declare(imports, batch, step.query_rows()) }
    }

    /// The layers of this many batch rows and query rows.
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

/// The engine's callback as the library's `Engine`.
pub(crate) struct Callback {
    enqueue: unsafe extern "C" fn(*mut c_void, *const FbEngineCall, *mut c_void) -> u32,
    data: *mut c_void,
    /// The process in which the callback is called.
    process: u64,
}

impl Callback {
    /// # Safety
    /// `engine` is null, or states its real size; its callback may be called with its data as long as this lives.
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
        let (work, attended, attention_wave) = match call.work {
            Work::Project => (FB_WORK_PROJECT, 0, 0),
            Work::Index => (FB_WORK_INDEX, 0, 0),
            Work::Prepare => (FB_WORK_PREPARE, 0, 0),
            Work::Attend(Attended::All) => (FB_WORK_ATTEND, FB_ATTEND_ALL, 0),
            Work::Attend(Attended::Resident) => (FB_WORK_ATTEND, FB_ATTEND_RESIDENT, 0),
            Work::Attend(Attended::Fetched { wave }) => (FB_WORK_ATTEND, FB_ATTEND_FETCHED, wave),
            Work::Merge => (FB_WORK_MERGE, 0, 0),
            Work::Rest => (FB_WORK_REST, 0, 0),
        };
        FbEngineCall {
            size: size_of::<FbEngineCall>(),
            work,
            attended,
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
            // The parent shares the pools of rows: the child must not continue.
            return Err(Error::new(Kind::Closed, "overlap").at("the callback returned in a forked child"));
        }
        if status == 0 {
            return Ok(());
        }
        // A number that is no status becomes a cancellation, with the number.
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u32 == status).unwrap_or(Kind::Cancelled);
        Err(Error::new(kind, "overlap")
            .at("the engine's callback refused")
            .with("status", status)
            .with("work", said.work)
            .with("layer", said.layer))
    }
}

/// Enqueues one layer of a step, or one draft pass, in an FB_OVERLAP_ order. The engine's callback enqueues the
/// engine's work; the call enqueues resolve, gather and scatter between the callback's calls. `draft_pass` is
/// FB_ALL_QUERY_ROWS, or j + 1 for draft pass j, counted from 0. fb_finish orders the step's end after all of it.
///
/// A layer that another one selects for (`group_layers` of fb_cache_config) runs in FB_OVERLAP_NONE, FB_OVERLAP_DA or
/// FB_OVERLAP_AHEAD; FB_OVERLAP_DBA is FB_OVERLAP_DA there. In another order than FB_OVERLAP_NONE it returns
/// FB_INVALID_STATE unless fb_overlap has enqueued the layer that selects for it earlier in this step, and no other
/// group's layer since.
///
/// If the callback or the device refuses something half-way, the step is abandoned. It must still be finished and
/// retired; fb_retire then returns FB_CANCELLED, and the caller truncates or closes its sequences. FB_INVALID_STATE for
/// a finished or abandoned step, for other streams than the step's earlier layers used, and for another compute stream
/// than the one the step was prepared on. FB_OUT_OF_RANGE for a layer, a draft pass, a number of batch rows or buffers
/// that do not fit the step, and for streams of another device. FB_INVALID_CONFIG for an order that needs index lists
/// without them, and for FB_OVERLAP_AHEAD in a layer that selects for itself. Inside the callback the cache is busy:
/// see fb_enqueue. FB_CLOSED in a child process that the callback forked.
///
/// # Safety
/// `layers` and `engine` state their real sizes. The device may use the buffers until every stream has passed this
/// call. The callback returns normally, without a throw or a longjmp.
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

/// Enqueues the layers of the open steps, at most one step of each micro-batch: each layer that is no draft layer once,
/// then `draft_passes` draft passes of each draft layer. The steps alternate in each layer and each draft pass. With
/// draft layers, fb_finish needs a draft pass of each draft layer for each query row of the step; those beyond
/// `draft_passes` are enqueued by fb_overlap. `layers` has the streams and buffers of each step. `by_layer` has the
/// order of every layer, draft layers last. An error after the first work was enqueued abandons all the steps.
///
/// # Safety
/// As fb_overlap. `steps` and `layers` have `count` entries; `by_layer` has one for each layer of the cache, draft
/// layers included.
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

/// The error for a list that is shorter than its count.
pub(crate) fn missing() -> Error {
    Error::new(Kind::Internal, "argument").at("layers")
}

/// Reads orders into a list that has room for them.
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
