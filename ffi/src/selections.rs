//! Reading recorded selections: a selection trace or a recording, fully in memory.
//!
//! Nothing changes the object of a handle, so any number of threads may read it at the same time.

use std::ffi::c_char;
use std::mem::MaybeUninit;

use forebay::trace::SelectionTrace;
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned, create};
use crate::handle::{self, Object, read};
use crate::status::FbStatus;

/// In fb_selections_text: the recording's short name.
pub const FB_SELECTIONS_LABEL: u32 = 0;
/// In fb_selections_text: the model that was run.
pub const FB_SELECTIONS_MODEL: u32 = 1;
/// In fb_selections_text: the model's architecture.
pub const FB_SELECTIONS_ARCH: u32 = 2;
/// In fb_selections_text: the score by which the selector ranked positions.
pub const FB_SELECTIONS_SCORE: u32 = 3;
/// In fb_selections_text: how the steps were produced.
pub const FB_SELECTIONS_MODE: u32 = 4;
/// In fb_selections_text: a description of what the model read.
pub const FB_SELECTIONS_TEXT: u32 = 5;

/// The numbers in a trace's header.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbTraceHeader {
    /// sizeof(fb_trace_header), set by the caller.
    pub size: usize,
    /// The number of recorded layers.
    pub layers: u32,
    /// Positions that one query selects. It selects fewer while the context is shorter.
    pub k: u32,
    /// The number of steps, those of the prompt included. In a trace a step is one recorded position.
    pub steps: u32,
    /// The number of leading steps that belong to the prompt.
    pub warm_steps: u32,
    /// The position of the query of step 0.
    pub first_position: u32,
    /// The position of the first decode step.
    pub decode_start: u32,
    /// Tokens of the context.
    pub context: u32,
    /// 1 for a recording that was not finished.
    pub unfinished: u32,
    /// In an unfinished recording: the bytes after its last complete group of steps, which the reader dropped.
    pub left_off_bytes: u64,
    /// The number of selected positions in all steps and layers together.
    pub members: u64,
}

// SAFETY: words, eight of 4 bytes between words of 8.
unsafe impl Plain for FbTraceHeader {}
impl Versioned for FbTraceHeader {
    const NAME: &'static str = "fb_trace_header";
    const REQUIRED: usize = std::mem::offset_of!(FbTraceHeader, members) + 8;
}

/// A selection trace in memory.
pub struct FbSelections(SelectionTrace);

impl Object for FbSelections {
    const KIND: u8 = 14;
    const NAME: &'static str = "fb_selections";
}

impl FbSelections {
    fn header(&self) -> FbTraceHeader {
        let header = self.0.header();
        FbTraceHeader {
            size: size_of::<FbTraceHeader>(),
            layers: header.layers,
            k: header.k,
            steps: header.steps,
            warm_steps: header.warm_steps,
            first_position: header.first_position,
            decode_start: header.decode_start,
            context: header.context,
            unfinished: header.unfinished.is_some().into(),
            left_off_bytes: header.unfinished.unwrap_or(0),
            members: self.0.members(),
        }
    }

    /// The number of positions in `steps` steps from `first` on, k for each layer.
    fn numbers(&self, first: u32, steps: u32) -> Result<usize> {
        let header = self.0.header();
        let inside = first.checked_add(steps).is_some_and(|end| end <= header.steps);
        let all = (steps as usize).checked_mul(header.layers as usize * header.k as usize);
        all.filter(|_| inside).ok_or_else(|| {
            Error::new(Kind::OutOfRange, "read selections")
                .at("steps of the trace")
                .with("first", first)
                .with("count", steps)
                .with("steps", header.steps)
        })
    }

    /// Copies the sets of the steps from `first` on, k places for each set.
    fn copy(&self, first: u32, places: &mut [MaybeUninit<i32>]) {
        let header = self.0.header();
        let sets = (first..header.steps).flat_map(|step| (0..header.layers).map(move |layer| (step, layer)));
        for (places, (step, layer)) in places.chunks_exact_mut(header.k as usize).zip(sets) {
            // Positions are below 2^24.
            let set = self.0.selection(step, layer).iter().map(|position| position.cast_signed());
            for (place, position) in places.iter_mut().zip(set.chain(std::iter::repeat(-1))) {
                place.write(position);
            }
        }
    }
}

/// Reads the selection trace in the file `path`, compressed or not. A recording that fb_trace_create began can be read
/// whether it was finished or not. On failure, `text` receives the reason.
///
/// # Safety
/// `path` ends with a zero byte; `text` has `text_bytes` bytes; `selections` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_selections_open(
    path: *const c_char,
    text: *mut c_char,
    text_bytes: usize,
    selections: *mut *mut FbSelections,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let (path, selections) = (cast::path(path, "path")?, cast::out(selections, "selections")?);
            selections.set(handle::give(|| Ok(FbSelections(SelectionTrace::read(path)?)))?);
            Ok(())
        })
    }
}

/// Copies the numbers of the trace's header.
///
/// # Safety
/// `header` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_selections_header(
    selections: *const FbSelections,
    header: *mut FbTraceHeader,
) -> FbStatus {
    read(selections, |selections| {
        // SAFETY: this call's contract.
        unsafe { cast::versioned_out(header) }?.set(&selections.header());
        Ok(())
    })
}

/// Copies one of the strings of the trace's header to `text`. An FB_SELECTIONS_ constant names it. The string is empty
/// if the trace does not have it.
///
/// # Safety
/// `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_selections_text(
    selections: *const FbSelections,
    which: u32,
    text: *mut c_char,
    text_bytes: usize,
) -> FbStatus {
    read(selections, |selections| {
        let header = selections.0.header();
        let texts = [&header.label, &header.model, &header.arch, &header.score, &header.mode, &header.text];
        let said = texts.get(which as usize).ok_or_else(|| {
            Error::new(Kind::OutOfRange, "read selections").at("which text").with("value", which)
        })?;
        let said = std::ffi::CString::new(said.replace('\0', " ")).unwrap_or_default();
        // SAFETY: this call's contract.
        unsafe { cast::write_text(text, text_bytes, said.as_bytes_with_nul()) };
        Ok(())
    })
}

/// Copies the model's own numbers of the recorded layers, as many as `room` allows, to `ids`. `count` receives how many
/// there are. `ids` may be NULL with a `room` of 0.
///
/// # Safety
/// `ids` has room for `room` numbers; `count` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_selections_layer_ids(
    selections: *const FbSelections,
    ids: *mut u32,
    room: u32,
    count: *mut u32,
) -> FbStatus {
    read(selections, |selections| {
        let numbers = selections.0.header().layer_ids.iter().copied();
        // SAFETY: this call's contract, for both.
        unsafe { cast::write_list(numbers, ids, room, "ids", count, "count") }
    })
}

/// Copies the selections of `steps` steps from `first_step` on: `[steps][layers][k]` positions. The positions of one
/// step and layer ascend; if they are fewer than k, -1 fills the rest.
///
/// # Safety
/// `positions` has room for `steps` x layers x k numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_selections_read(
    selections: *const FbSelections,
    first_step: u32,
    steps: u32,
    positions: *mut i32,
) -> FbStatus {
    read(selections, |selections| {
        let numbers = selections.numbers(first_step, steps)?;
        // SAFETY: this call's contract.
        selections.copy(first_step, unsafe { cast::room(positions, numbers, "positions") }?);
        Ok(())
    })
}

/// Destroys the handle.
#[unsafe(no_mangle)]
pub extern "C" fn fb_selections_destroy(selections: *mut FbSelections) -> FbStatus {
    handle::end(selections, |_| Ok(()))
}
