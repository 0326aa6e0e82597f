//! Captured work: from the beginning of a capture to the last launch of its graph.
//!
//! | state | who moves it on |
//! |---|---|
//! | capturing | [`Graphs::end`]: it becomes a graph, or it was broken and is gone |
//! | graph | [`Graphs::release`]: it can no longer be launched |
//! | retiring | its last launch has ended: it is discarded by the next capture or release, or with the device |
//!
//! A capture is the thread's own: what other threads do neither joins nor breaks it. Every refusal of an enqueue
//! reaches the caller with the driver's code, and a broken capture ends with an error and without a graph,
//! which is what tells it from a step that silently lacks an operation.
//!
//! Launches of one graph run one after the other, so the end of the last one is the end of all: an event behind it,
//! recorded when the graph is released, tells when its work may go. While that stream is itself being
//! captured nothing can be recorded, and the graph is kept until the device closes. A launch discards nothing: it is
//! a step's.
//!
//! **Work goes elsewhere.** What is captured is an engine's, and may itself own a graph: [`Graphs`] answers the slots
//! whose work may go, and the caller empties them without its lock. What takes long is done without it too.

use super::driver::{Answer, Context, Current, Handle, Refusal, code, flag};
use super::memory::Worker;
use super::stream::OwnEvent;
use crate::device::Stream;
use crate::error::{Error, Kind, Result};
use crate::sync::Arc;

/// A stream's state of capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Capturing {
    /// What is enqueued runs.
    No,
    /// It is recorded, by the capture of this number.
    Active(u64),
    /// Something has broken it.
    Broken,
}

/// What the driver says of a stream.
pub(super) fn capturing(current: &Current<'_>, stream: Handle) -> Answer<Capturing> {
    let (mut status, mut id) = (0, 0);
    current.capture_info(stream, &mut status, &mut id, 0, 0, 0)?;
    Ok(match status {
        0 => Capturing::No,
        1 => Capturing::Active(id),
        _ => Capturing::Broken,
    })
}

/// A capture that was begun here and not yet ended.
#[derive(Debug)]
struct Capture {
    origin: Stream,
    id: u64,
    /// Slots of the work that it holds.
    calls: Vec<usize>,
}

/// What a capture came to.
#[derive(Debug)]
pub(super) struct Ended {
    /// The graph as it was captured, to be given to [`Executable::new`], or what broke it.
    pub graph: Answer<Handle>,
    /// Slots of the work in it.
    pub calls: Vec<usize>,
}

/// A graph that can be launched.
#[derive(Debug)]
pub(super) struct Executable {
    context: Arc<Context>,
    raw: Handle,
    calls: Vec<usize>,
    /// Made with the graph, so that a release takes nothing.
    end: OwnEvent,
    /// Where it was launched last, as far as that is not known to have ended.
    last: Option<Handle>,
    /// Whether the event stands behind the last launch.
    recorded: bool,
}

impl Executable {
    /// Makes a captured graph ready: its first launch, too, finds it on the device.
    pub fn new(context: &Arc<Context>, worker: &Worker, ended: &Ended) -> Answer<Executable> {
        let graph = Captured { context, raw: ended.graph.clone()? };
        Executable::of(context, worker, &graph, ended.calls.clone())
    }

    fn of(
        context: &Arc<Context>,
        worker: &Worker,
        graph: &Captured<'_>,
        calls: Vec<usize>,
    ) -> Answer<Executable> {
        let end = OwnEvent::new(context)?;
        let mut raw = 0;
        // Each kernel has the priority of the stream that it was captured on, and not that of the launch's stream.
        context.relaxed()?.graph_instantiate(&mut raw, graph.raw, flag::GRAPH_NODE_PRIORITIES)?;
        let context = Arc::clone(context);
        let executable = Executable { context, raw, calls, end, last: None, recorded: false };
        worker.run(|current, stream| current.graph_upload(raw, stream))?;
        Ok(executable)
    }

    /// Whether no launch of it runs any more.
    fn has_ended(&self) -> Answer<bool> {
        match self.last {
            None => Ok(true),
            // What could not be recorded is never seen to end.
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

/// A graph as it was captured or made: needed until it can be launched.
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
    /// In the order of their numbers; those that were released are gone, and their numbers with them.
    graphs: Vec<(u32, Executable)>,
    next: u32,
    /// Released, and perhaps still running.
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
                // Without its number the capture cannot be told from others.
                drop(Captured { context, raw: end(&current, stream).unwrap_or(0) });
                other.map_err(failed)?;
                Err(not_begun())
            }
        }
    }

    /// Whether the capture of number `id` was begun here.
    pub fn check_capture(&self, id: u64) -> Result<()> {
        match self.captures.iter().any(|capture| capture.id == id) {
            true => Ok(()),
            false => Err(Error::new(Kind::InvalidState, "call")
                .at("the stream is captured by another owner, whose graph would outlive the work")
                .hint("capture with this device, or enqueue the work outside of the capture")),
        }
    }

    /// Adds a slot to the capture of number `id`.
    pub fn hold(&mut self, id: u64, slot: usize) {
        if let Some(capture) = self.captures.iter_mut().find(|capture| capture.id == id) {
            capture.calls.push(slot);
        }
    }

    /// Ends the capture that began on `stream`.
    pub fn end(&mut self, context: &Context, stream: Stream) -> Result<Ended> {
        let at = self.captures.iter().position(|capture| capture.origin == stream).ok_or_else(not_begun)?;
        let graph = match context.relaxed().and_then(|current| end(&current, stream)) {
            // The capture goes on: only its own thread may end it.
            Err(refusal) if refusal.code == code::CAPTURE_WRONG_THREAD => return Err(failed(refusal)),
            Err(refusal) => {
                // It may not have ended; where it has, the driver says so, and nothing is lost.
                let ended = context.relaxed().and_then(|current| end(&current, stream));
                drop(Captured { context, raw: ended.unwrap_or(0) });
                Err(refusal)
            }
            ended => ended,
        };
        Ok(Ended { graph, calls: self.captures.swap_remove(at).calls })
    }

    /// Adds a graph; answers its number.
    pub fn add(&mut self, executable: Executable) -> u32 {
        let number = self.next;
        self.next += 1;
        self.graphs.push((number, executable));
        number
    }

    /// Ends what is still being captured: nothing will come of it.
    pub fn abandon(&mut self, context: &Context) {
        for capture in self.captures.drain(..) {
            let ended = context.relaxed().and_then(|current| end(&current, capture.origin));
            drop(Captured { context, raw: ended.unwrap_or(0) });
        }
    }

    /// Where the graph of a number stands.
    pub fn find(&self, number: usize) -> Option<usize> {
        self.graphs.binary_search_by_key(&number, |(number, _)| *number as usize).ok()
    }

    /// Launches the graph that stands at `at`. A launch that were captured would be part of another graph, which
    /// this one's work does not know of: it is refused.
    pub fn launch(&mut self, context: &Context, at: usize, stream: Handle) -> Result<Answer> {
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

    /// Gives up the graph that stands at `at`: [`Graphs::reap`] discards it when its launches have ended. What
    /// the driver refuses keeps it until the device closes.
    pub fn release(&mut self, context: &Context, at: usize) -> Answer {
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

    /// Discards what has ended; answers the slots of its work, and what the driver refused.
    pub fn reap(&mut self) -> (Vec<usize>, Answer) {
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

    /// Nothing runs on `stream` any more, and nothing may be recorded on it.
    pub fn forget(&mut self, stream: Handle) {
        let retiring = self.retiring.iter_mut();
        for executable in self.graphs.iter_mut().map(|(_, executable)| executable).chain(retiring) {
            executable.last = executable.last.filter(|last| *last != stream);
        }
    }
}

/// Captures a fill, launches it, and looks whether it was done.
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

/// Makes the handle of a conditional node, which goes with its graph.
#[cfg(feature = "measure")]
pub(super) fn try_conditional(context: &Context) -> Answer {
    let current = context.relaxed()?;
    let mut raw = 0;
    current.graph_create(&mut raw, 0)?;
    let graph = Captured { context, raw };
    current.graph_conditional(&mut 0, graph.raw, context.handle, 0, 0)
}

/// Ends a capture; answers its graph.
fn end(current: &Current<'_>, stream: Stream) -> Answer<Handle> {
    let mut raw = 0;
    current.capture_end(stream.0, &mut raw)?;
    Ok(raw)
}
