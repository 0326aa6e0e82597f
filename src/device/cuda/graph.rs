//! Captured work: from the beginning of a capture to the last launch of its graph.
//!
//! | state | who moves it on |
//! |---|---|
//! | capturing | [`Graphs::end`]: it becomes a graph, or it was broken and is gone |
//! | graph | [`Graphs::release`]: it can no longer be launched |
//! | retiring | its last launch has ended: it is discarded by the next call here, or with the device |
//!
//! A capture is the thread's own: what other threads do neither joins nor breaks it. Every refusal of an enqueue
//! reaches the caller with the driver's code, and a broken capture ends with an error and without a graph,
//! which is what tells it from a step that silently lacks an operation.
//!
//! Launches of one graph run one after the other, so the end of the last one is the end of all: an event behind it,
//! recorded when the graph is released, tells when its work may go. While that stream is itself being
//! captured nothing can be recorded, and the graph is kept until the device closes.

use super::driver::{Answer, Context, Current, Handle, Refusal, code, flag};
use super::stream::{Calls, OwnEvent};
use crate::device::{Graph, Stream};
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

/// A graph that can be launched.
#[derive(Debug)]
struct Executable {
    context: Arc<Context>,
    raw: Handle,
    calls: Vec<usize>,
    /// Made with the graph, so that a release takes nothing.
    end: OwnEvent,
    /// Where it was launched last.
    last: Option<Handle>,
    /// Whether the event stands behind the last launch.
    recorded: bool,
}

impl Executable {
    /// Makes a captured graph ready.
    fn new(context: &Arc<Context>, raw: Handle, calls: &[usize]) -> Answer<Executable> {
        let graph = Captured { context, raw };
        let end = OwnEvent::new(context)?;
        let mut raw = 0;
        context.relaxed()?.graph_instantiate(&mut raw, graph.raw, 0)?;
        Ok(Executable {
            context: Arc::clone(context),
            raw,
            calls: calls.to_vec(),
            end,
            last: None,
            recorded: false,
        })
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        self.context.give_back(|driver| driver.graph_discard(self.raw));
    }
}

/// A graph as it was captured: needed until it can be launched.
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
    /// By number; those that were released are gone.
    graphs: Vec<Option<Executable>>,
    /// Released, and perhaps still running.
    retiring: Vec<Executable>,
}

fn failed(refusal: Refusal) -> Error {
    refusal.error("capture")
}

fn not_begun() -> Error {
    Error::new(Kind::InvalidConfig, "capture")
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
            false => Err(Error::new(Kind::InvalidConfig, "call")
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
    pub fn end(&mut self, context: &Arc<Context>, calls: &Calls, stream: Stream) -> Result<Graph> {
        self.reap(context, calls);
        let at = self.captures.iter().position(|capture| capture.origin == stream).ok_or_else(not_begun)?;
        let raw = match context.relaxed().and_then(|current| end(&current, stream)) {
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
        let capture = self.captures.swap_remove(at);
        match raw.and_then(|raw| Executable::new(context, raw, &capture.calls)) {
            Ok(executable) => {
                self.graphs.push(Some(executable));
                Ok(Graph(self.graphs.len() as u32 - 1))
            }
            Err(refusal) => {
                capture.calls.iter().for_each(|slot| calls.clear(*slot));
                Err(failed(refusal))
            }
        }
    }

    /// Ends what is still being captured: nothing will come of it.
    pub fn abandon(&mut self, context: &Context) {
        for capture in self.captures.drain(..) {
            let ended = context.relaxed().and_then(|current| end(&current, capture.origin));
            drop(Captured { context, raw: ended.unwrap_or(0) });
        }
    }

    fn graph(&mut self, graph: Graph) -> Result<&mut Option<Executable>> {
        let found = self.graphs.get_mut(graph.0 as usize).filter(|found| found.is_some());
        found.ok_or_else(|| super::bad("graph", graph.0))
    }

    /// Whether there is such a graph.
    pub fn check(&mut self, graph: Graph) -> Result<()> {
        self.graph(graph).map(|_| ())
    }

    /// Launches a graph. A launch that were captured would be part of another graph, which this one's work does
    /// not know of: it is refused.
    pub fn launch(&mut self, context: &Context, graph: Graph, stream: Handle) -> Result<Answer> {
        let Some(executable) = self.graph(graph)? else { return Err(super::bad("graph", graph.0)) };
        let current = match context.enter() {
            Ok(current) => current,
            Err(refusal) => return Ok(Err(refusal)),
        };
        match capturing(&current, stream) {
            Ok(Capturing::No) => {}
            Ok(_) => {
                return Err(Error::new(Kind::InvalidConfig, "launch")
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

    /// Gives a graph up: it goes when its launches have ended.
    pub fn release(&mut self, context: &Context, calls: &Calls, graph: Graph) -> Result<()> {
        let executable = self.graph(graph)?.take();
        self.reap(context, calls);
        let Some(mut executable) = executable else { return Ok(()) };
        if let Some(stream) = executable.last {
            let recorded = context.enter().and_then(|current| match capturing(&current, stream)? {
                Capturing::No => current.event_record(executable.end.raw, stream).map(|()| true),
                _ => Ok(false),
            });
            // What could not be recorded is never seen to end: the graph stays.
            executable.recorded = matches!(recorded, Ok(true));
            self.retiring.push(executable);
        } else {
            executable.calls.iter().for_each(|slot| calls.clear(*slot));
        }
        Ok(())
    }

    /// Discards what has ended.
    fn reap(&mut self, context: &Context, calls: &Calls) {
        if self.retiring.is_empty() {
            return;
        }
        let Ok(current) = context.relaxed() else { return };
        self.retiring.retain(|executable| {
            let ended = executable.recorded && current.event_query(executable.end.raw).is_ok();
            if ended {
                executable.calls.iter().for_each(|slot| calls.clear(*slot));
            }
            !ended
        });
    }
}

/// Ends a capture; answers its graph.
fn end(current: &Current<'_>, stream: Stream) -> Answer<Handle> {
    let mut raw = 0;
    current.capture_end(stream.0, &mut raw)?;
    Ok(raw)
}
