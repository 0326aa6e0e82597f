//! Captured graphs: their states from the beginning of a capture to the end of the last launch.
//!
//! | state | ends with |
//! |---|---|
//! | capturing | [`Graphs::end`]: it becomes a graph, or it was broken and is gone |
//! | graph | [`Graphs::release`]: it can no longer be launched |
//! | retiring | its last launch has ended: it is discarded by the next capture or release, or with the device |
//!
//! A capture belongs to its thread: work of other threads neither joins nor breaks it. Every refused enqueue returns
//! the driver's code to the caller. A broken capture ends with an error and without a graph, so it cannot be mistaken
//! for a step that lacks an operation.
//!
//! Launches of one graph run one after another, so the end of the last launch is the end of all. A release records an
//! event after the last launch; once it is reached, the graph's work can be dropped. While that stream is itself
//! being captured, nothing can be recorded, and the graph is kept until the device closes. A launch discards nothing,
//! because it is on the path of a step.
//!
//! **Dropping work.** Captured callbacks belong to an engine and may themselves own a graph. So [`Graphs`] only
//! returns the slots whose work can be dropped, and the caller empties them without holding the lock of [`Graphs`].
//! Slow calls are also made without it.

use super::driver::{Context, Current, DriverResult, Handle, Refusal, code, flag};
use super::memory::Worker;
use super::stream::OwnEvent;
use crate::device::Stream;
use crate::error::{Error, Kind, Result};
use crate::sync::Arc;

/// A stream's state of capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Capturing {
    /// Enqueued work runs.
    No,
    /// Enqueued work is recorded by the capture of this id.
    Active(u64),
    /// The capture is broken.
    Broken,
}

/// The driver's capture state of a stream.
pub(super) fn capturing(current: &Current<'_>, stream: Handle) -> DriverResult<Capturing> {
    let (mut status, mut id) = (0, 0);
    current.capture_info(stream, &mut status, &mut id, 0, 0, 0)?;
    Ok(match status {
        0 => Capturing::No,
        1 => Capturing::Active(id),
        _ => Capturing::Broken,
    })
}

/// A capture in progress that was begun by this device.
#[derive(Debug)]
struct Capture {
    origin: Stream,
    id: u64,
    /// The slots of its captured callbacks.
    calls: Vec<usize>,
}

/// The result of a capture.
#[derive(Debug)]
pub(super) struct Ended {
    /// The captured graph, for [`Executable::new`], or the refusal that broke the capture.
    pub graph: DriverResult<Handle>,
    /// The slots of its captured callbacks.
    pub calls: Vec<usize>,
}

/// A graph that can be launched.
#[derive(Debug)]
pub(super) struct Executable {
    context: Arc<Context>,
    raw: Handle,
    calls: Vec<usize>,
    /// Made with the graph, so that a release allocates nothing.
    end: OwnEvent,
    /// The stream of its last launch, unless that is known to have ended.
    last: Option<Handle>,
    /// Whether the event was recorded after the last launch.
    recorded: bool,
}

impl Executable {
    /// Instantiates and uploads a captured graph, so that even its first launch finds it on the device.
    pub fn new(context: &Arc<Context>, worker: &Worker, ended: &Ended) -> DriverResult<Executable> {
        let graph = Captured { context, raw: ended.graph.clone()? };
        Executable::of(context, worker, &graph, ended.calls.clone())
    }

    fn of(
        context: &Arc<Context>,
        worker: &Worker,
        graph: &Captured<'_>,
        calls: Vec<usize>,
    ) -> DriverResult<Executable> {
        let end = OwnEvent::new(context)?;
        let mut raw = 0;
        // Each kernel keeps the priority of the stream on which it was captured, not that of the launch's stream.
        context.relaxed()?.graph_instantiate(&mut raw, graph.raw, flag::GRAPH_NODE_PRIORITIES)?;
        let context = Arc::clone(context);
        let executable = Executable { context, raw, calls, end, last: None, recorded: false };
        worker.run(|current, stream| current.graph_upload(raw, stream))?;
        Ok(executable)
    }

    /// Whether all its launches have ended.
    fn has_ended(&self) -> DriverResult<bool> {
        match self.last {
            None => Ok(true),
            // Without a recorded event its end is never known.
            Some(_) if !self.recorded => Ok(false),
            Some(_) => match self.context.relaxed()?.event_query(self.end.raw) {
                Err(refusal) if refusal.code == code::NOT_READY => Ok(false),
                answer => answer.map(|()| true),
            },
        }
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        self.context.give_back(|driver| driver.graph_discard(self.raw));
    }
}

/// A captured graph, kept until it has been instantiated.
struct Captured<'a> {
    context: &'a Context,
    raw: Handle,
}

impl Drop for Captured<'_> {
    fn drop(&mut self) {
        if self.raw != 0 {
            self.context.give_back(|driver| driver.graph_destroy(self.raw));
        }
    }
}

/// The captures and graphs of a device.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    captures: Vec<Capture>,
    /// Graphs by ascending number. Released graphs are removed, and their numbers are not reused.
    graphs: Vec<(u32, Executable)>,
    next: u32,
    /// Released graphs that may still be running.
    retiring: Vec<Executable>,
}

fn failed(refusal: Refusal) -> Error {
    refusal.error("capture")
}

fn not_begun() -> Error {
    Error::new(Kind::InvalidState, "capture")
        .at("no capture began on this stream")
        .hint("end a capture on the stream on which it began")
}

impl Graphs {
    /// Begins a capture on `stream`.
    pub fn begin(&mut self, context: &Context, stream: Stream) -> Result<()> {
        let busy = || {
            let error = Error::new(Kind::Busy, "capture").at("the stream is being captured");
            error.hint("end the capture before you begin another one")
        };
        if self.captures.iter().any(|capture| capture.origin == stream) {
            return Err(busy());
        }
        let current = context.enter().map_err(failed)?;
        match current.capture_begin(stream.0, flag::CAPTURE_THREAD_LOCAL) {
            Err(refusal) if refusal.code == code::ILLEGAL_STATE => return Err(busy()),
            begun => begun.map_err(failed)?,
        }
        match capturing(&current, stream.0) {
            Ok(Capturing::Active(id)) => {
                self.captures.push(Capture { origin: stream, id, calls: Vec::new() });
                Ok(())
            }
            other => {
                // Without its id the capture cannot be distinguished from others.
                drop(Captured { context, raw: end(&current, stream).unwrap_or(0) });
                other.map_err(failed)?;
                Err(not_begun())
            }
        }
    }

    /// Checks that capture `id` was begun by this device.
    pub fn check_capture(&self, id: u64) -> Result<()> {
        match self.captures.iter().any(|capture| capture.id == id) {
            true => Ok(()),
            false => Err(Error::new(Kind::InvalidState, "call")
                .at("the stream is captured by another owner, whose graph would outlive the work")
                .hint("capture with this device, or enqueue the work outside of the capture")),
        }
    }

    /// Adds a callback's slot to capture `id`.
    pub fn hold(&mut self, id: u64, slot: usize) {
        if let Some(capture) = self.captures.iter_mut().find(|capture| capture.id == id) {
            capture.calls.push(slot);
        }
    }

    /// Ends the capture that began on `stream`.
    pub fn end(&mut self, context: &Context, stream: Stream) -> Result<Ended> {
        let at = self.captures.iter().position(|capture| capture.origin == stream).ok_or_else(not_begun)?;
        let graph = match context.relaxed().and_then(|current| end(&current, stream)) {
            // The capture continues: only its own thread may end it.
            Err(refusal) if refusal.code == code::CAPTURE_WRONG_THREAD => return Err(failed(refusal)),
            Err(refusal) => {
                // Try to end it again. If it has already ended, the driver only returns an error.
                let ended = context.relaxed().and_then(|current| end(&current, stream));
                drop(Captured { context, raw: ended.unwrap_or(0) });
                Err(refusal)
            }
            ended => ended,
        };
        Ok(Ended { graph, calls: self.captures.swap_remove(at).calls })
    }

    /// Adds a graph; returns its number.
    pub fn add(&mut self, executable: Executable) -> u32 {
        let number = self.next;
        self.next += 1;
        self.graphs.push((number, executable));
        number
    }

    /// Ends all captures in progress and discards them.
    pub fn abandon(&mut self, context: &Context) {
        for capture in self.captures.drain(..) {
            let ended = context.relaxed().and_then(|current| end(&current, capture.origin));
            drop(Captured { context, raw: ended.unwrap_or(0) });
        }
    }

    /// The index of the graph with this number.
    pub fn find(&self, number: usize) -> Option<usize> {
        self.graphs.binary_search_by_key(&number, |(number, _)| *number as usize).ok()
    }

    /// Launches the graph at index `at`. A launch inside a capture is rejected: it would become part of another
    /// graph, which does not keep this graph's work alive.
    pub fn launch(&mut self, context: &Context, at: usize, stream: Handle) -> Result<DriverResult> {
        let Some((_, executable)) = self.graphs.get_mut(at) else { return Ok(Ok(())) };
        let current = match context.enter() {
            Ok(current) => current,
            Err(refusal) => return Ok(Err(refusal)),
        };
        match capturing(&current, stream) {
            Ok(Capturing::No) => {}
            Ok(_) => {
                return Err(Error::new(Kind::InvalidState, "launch")
                    .at("the stream is being captured")
                    .hint("launch a graph outside of captures"));
            }
            Err(refusal) => return Ok(Err(refusal)),
        }
        let launched = current.graph_launch(executable.raw, stream);
        if launched.is_ok() {
            executable.last = Some(stream);
        }
        Ok(launched)
    }

    /// Releases the graph at index `at`: [`Graphs::reap`] discards it when its launches have ended. If the driver
    /// refuses the event, the graph is kept until the device closes.
    pub fn release(&mut self, context: &Context, at: usize) -> DriverResult {
        let (_, mut executable) = self.graphs.remove(at);
        let recorded = match executable.last {
            None => Ok(false),
            Some(stream) => context.enter().and_then(|current| match capturing(&current, stream)? {
                Capturing::No => current.event_record(executable.end.raw, stream).map(|()| true),
                _ => Ok(false),
            }),
        };
        executable.recorded = matches!(recorded, Ok(true));
        self.retiring.push(executable);
        recorded.map(|_| ())
    }

    /// Discards the released graphs that have ended; returns the slots of their callbacks, and any refusal of the
    /// driver.
    pub fn reap(&mut self) -> (Vec<usize>, DriverResult) {
        let (mut slots, mut heard) = (Vec::new(), Ok(()));
        self.retiring.retain(|executable| match executable.has_ended() {
            Ok(true) => {
                slots.extend(&executable.calls);
                false
            }
            Ok(false) => true,
            Err(refusal) => {
                heard = Err(refusal);
                true
            }
        });
        (slots, heard)
    }

    /// Forgets a drained stream, on which nothing may be recorded any more.
    pub fn forget(&mut self, stream: Handle) {
        let retiring = self.retiring.iter_mut();
        for executable in self.graphs.iter_mut().map(|(_, executable)| executable).chain(retiring) {
            executable.last = executable.last.filter(|last| *last != stream);
        }
    }
}

/// Captures a memory fill, launches it, and checks the result.
#[cfg(feature = "measure")]
pub(super) fn try_graph(context: &Arc<Context>, worker: &Worker) -> Result<()> {
    use super::{memory::Allocation, stream::KnownStream};
    const WORD: u32 = 0x0F0E_B000;
    let room = Allocation::new(context, worker, 4)?;
    let own = KnownStream::own(context).map_err(failed)?;
    let captured = context.relaxed().and_then(|current| {
        current.capture_begin(own.raw, flag::CAPTURE_THREAD_LOCAL)?;
        let enqueued = current.fill_words(room.address, WORD, 1, own.raw);
        let graph = Captured { context, raw: end(&current, Stream(own.raw))? };
        enqueued.map(|()| graph)
    });
    let executable =
        captured.and_then(|graph| Executable::of(context, worker, &graph, Vec::new())).map_err(failed)?;
    worker.run(|current, stream| current.graph_launch(executable.raw, stream)).map_err(failed)?;
    let mut found = [0; 4];
    worker.download(room.address, &mut found).map_err(failed)?;
    match u32::from_le_bytes(found) == WORD {
        true => Ok(()),
        false => Err(Error::new(Kind::DeviceFailed, "capture").at("a launched graph did not do its work")),
    }
}

/// Makes the handle of a conditional node, which is freed with its graph.
#[cfg(feature = "measure")]
pub(super) fn try_conditional(context: &Context) -> DriverResult {
    let current = context.relaxed()?;
    let mut raw = 0;
    current.graph_create(&mut raw, 0)?;
    let graph = Captured { context, raw };
    current.graph_conditional(&mut 0, graph.raw, context.handle, 0, 0)
}

/// Ends a capture; returns its graph.
fn end(current: &Current<'_>, stream: Stream) -> DriverResult<Handle> {
    let mut raw = 0;
    current.capture_end(stream.0, &mut raw)?;
    Ok(raw)
}
