//! Recording the selections of one sequence, step by step, into a file that is readable at every moment.
//!
//! A handle owns a [`TraceWriter`] until the recording is finished; after that every call but the destruction returns
//! FB_CLOSED. If the handle is destroyed earlier, the file is an unfinished recording with all its steps. A writer
//! takes its memory at creation. Recording a step costs a few loops over its numbers, and a write to the file when a
//! group is full. The call waits for the file, so make it on another thread than the one that enqueues.

use std::ffi::c_char;

use forebay::trace::{Frames, Recording, TraceWriter};
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned, create};
use crate::handle::{self, Object, change};
use crate::status::FbStatus;

/// The description of a recording. The file stores the steps in groups: a group is written when it has `group_steps`
/// steps or `group_bytes` bytes. An optional field that is 0 or NULL gets the default that its comment names. Strings
/// are UTF-8; readers only display them.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbTraceConfig {
    /// sizeof(fb_trace_config).
    pub size: usize,
    /// The number of recorded layers.
    pub layers: u32,
    /// Positions that one query selects. It selects fewer while the context is shorter.
    pub k: u32,
    /// The position of the query of the first recorded step.
    pub first_position: u32,
    /// The position of the first decode step. Earlier steps belong to the prompt.
    pub decode_start: u32,
    /// Optional: tokens of the longest context. Default: as many as were recorded.
    pub context: u32,
    /// Optional: the most steps of a group that is written at once. Default: 64.
    pub group_steps: u32,
    /// Optional: a group is written as soon as it has this many bytes. Default: 262144.
    pub group_bytes: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Optional: the model's own numbers of the recorded layers, `layers` of them, ascending. Default: 0, 1, 2 and so
    /// on.
    pub layer_ids: *const u32,
    /// Optional: for each layer the index, from 0, of the layer whose selection it uses, or its own index if it
    /// selects for itself. Default: every layer selects for itself.
    pub shares: *const u32,
    /// Optional: a short name of the recording.
    pub label: *const c_char,
    /// Optional: the model that runs.
    pub model: *const c_char,
    /// Optional: the model's architecture.
    pub arch: *const c_char,
    /// Optional: the score by which the selector ranks positions.
    pub score: *const c_char,
    /// Optional: how the steps are produced.
    pub mode: *const c_char,
    /// Optional: a description of what the model reads.
    pub text: *const c_char,
}

// SAFETY: words and pointers, which are words; eight of 4 bytes between words of 8.
unsafe impl Plain for FbTraceConfig {}
impl Versioned for FbTraceConfig {
    const NAME: &'static str = "fb_trace_config";
    const REQUIRED: usize = std::mem::offset_of!(FbTraceConfig, context);
}

/// A recording in progress.
pub struct FbTrace(Option<TraceWriter>);

impl Object for FbTrace {
    const KIND: u8 = 12;
    const NAME: &'static str = "fb_trace";
}

/// Numbers of a configuration, or none.
///
/// # Safety
/// As [`cast::slice`].
unsafe fn list(numbers: *const u32, count: u32, name: &'static str) -> Result<Vec<u32>> {
    match numbers.is_null() {
        true => Ok(Vec::new()),
        // SAFETY: this function's contract.
        false => unsafe { cast::slice(numbers, count as usize, name) }.map(<[u32]>::to_vec),
    }
}

impl FbTraceConfig {
    /// # Safety
    /// Everything it points to is valid.
    unsafe fn declare(&self) -> Result<(Recording, Frames)> {
        if self.reserved != 0 {
            return Err(Error::new(Kind::InvalidConfig, "record")
                .at("reserved")
                .with("value", self.reserved));
        }
        let mut recording = Recording::default();
        recording.layers = self.layers;
        recording.k = self.k;
        recording.first_position = self.first_position;
        recording.decode_start = self.decode_start;
        recording.context = (self.context != 0).then_some(self.context);
        // Too many layers are refused below, before that many values are read.
        if self.layers <= forebay::trace::LAYERS_MAX {
            // SAFETY: this function's contract.
            unsafe {
                recording.layer_ids = list(self.layer_ids, self.layers, "layer_ids")?;
                recording.shares = list(self.shares, self.layers, "shares")?;
            }
        }
        for (text, place, name) in [
            (self.label, &mut recording.label, "label"),
            (self.model, &mut recording.model, "model"),
            (self.arch, &mut recording.arch, "arch"),
            (self.score, &mut recording.score, "score"),
            (self.mode, &mut recording.mode, "mode"),
            (self.text, &mut recording.text, "text"),
        ] {
            if !text.is_null() {
                // SAFETY: this function's contract.
                *place = unsafe { cast::text(text, name) }?.to_owned();
            }
        }
        let mut frames = Frames::default();
        if self.group_steps != 0 {
            frames.steps = self.group_steps;
        }
        if self.group_bytes != 0 {
            frames.bytes = self.group_bytes;
        }
        Ok((recording, frames))
    }
}

impl FbTrace {
    fn writer(&mut self) -> Result<&mut TraceWriter> {
        self.0.as_mut().ok_or_else(finished)
    }
}

fn finished() -> Error {
    Error::new(Kind::Closed, "record").at("the recording was finished").hint("destroy its handle")
}

/// Creates the file `path`, which must not exist, and writes the recording's header. On failure, it leaves no new
/// file, and `text` receives the reason.
///
/// # Safety
/// `path` ends with a zero byte. `config` states its real size, and everything it points to is valid. `text` has
/// `text_bytes` bytes. `trace` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_trace_create(
    path: *const c_char,
    config: *const FbTraceConfig,
    text: *mut c_char,
    text_bytes: usize,
    trace: *mut *mut FbTrace,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let (path, trace) = (cast::path(path, "path")?, cast::out(trace, "trace")?);
            let (recording, frames) = cast::versioned(config)?.declare()?;
            let create = || TraceWriter::create(path, &recording, frames);
            trace.set(handle::give(|| Ok(FbTrace(Some(create()?))))?);
            Ok(())
        })
    }
}

/// Records the selection of the query at `position`: for each layer that selects for itself, in order, k positions in
/// any order, -1 for none. `selected` has `count` numbers in host memory. Record each accepted position once, in order,
/// from first_position on. On FB_OUT_OF_RANGE nothing is recorded and the caller may continue with a corrected call.
/// After FB_IO the file ends with the last group of steps that was written before, and every later call but
/// fb_trace_destroy fails.
///
/// # Safety
/// `selected` has `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_trace_record(
    trace: *mut FbTrace,
    position: u32,
    selected: *const i32,
    count: usize,
) -> FbStatus {
    change(trace, |trace| {
        // SAFETY: this call's contract.
        let selected = unsafe { cast::slice(selected, count, "selected") }?;
        trace.writer()?.record(position, selected)
    })
}

/// Writes the buffered steps. Written steps survive the process.
#[unsafe(no_mangle)]
pub extern "C" fn fb_trace_flush(trace: *mut FbTrace) -> FbStatus {
    change(trace, |trace| trace.writer()?.flush())
}

/// Flushes, and syncs the file to disk, so that it survives a loss of power.
#[unsafe(no_mangle)]
pub extern "C" fn fb_trace_sync(trace: *mut FbTrace) -> FbStatus {
    change(trace, |trace| trace.writer()?.sync())
}

/// Ends the recording: writes the buffered steps and the end, and syncs the file. `steps`, which may be NULL, receives
/// the number of recorded steps. Readers reject a file without any step. Whatever the result, the handle can then only
/// be destroyed. After FB_IO the file is an unfinished recording, readable up to what was written.
///
/// # Safety
/// `steps` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_trace_finish(trace: *mut FbTrace, steps: *mut u32) -> FbStatus {
    change(trace, |trace| {
        // SAFETY: this call's contract.
        let steps = unsafe { cast::out_or_none(steps, "steps") }?;
        let recorded = trace.0.take().ok_or_else(finished)?.finish()?;
        if let Some(steps) = steps {
            steps.set(recorded);
        }
        Ok(())
    })
}

/// Destroys the handle. A recording that was not finished keeps all its steps, unless writing fails or a call returned
/// FB_IO before, and readers report it as unfinished.
#[unsafe(no_mangle)]
pub extern "C" fn fb_trace_destroy(trace: *mut FbTrace) -> FbStatus {
    handle::end(trace, |_| Ok(()))
}

#[cfg(test)]
#[path = "trace_tests.rs"]
mod tests;
