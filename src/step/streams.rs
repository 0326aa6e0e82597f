//! The streams that the engine names for a step, and those that the step remembers.
//!
//! The engine owns all streams. A call of one layer names two of them, a schedule four; `layer` explains the letters. A
//! step remembers the streams that hold its work, because its end must come after that work.

use crate::device::Stream;

/// The streams of R (resolve) and G (gather). They may be the same stream.
#[derive(Clone, Copy, Debug)]
pub struct Streams {
    /// The stream of R.
    pub resolve: Stream,
    /// The stream of G.
    pub gather: Stream,
}

/// The streams of one micro-batch. Some or all may be the same stream: operations on one stream need no event between
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverlapStreams {
    /// The stream of the engine's work.
    pub compute: Stream,
    /// The stream of R (resolve), which may run at the same time as P.
    pub resolve: Stream,
    /// The stream of G (gather).
    pub gather: Stream,
    /// The stream of S (scatter).
    pub scatter: Stream,
}

/// The streams that hold work of a step, in addition to the stream on which its end is enqueued. The end is ordered
/// after the work of all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkStreams {
    /// The streams of its layers, once a schedule has enqueued or launched one of them.
    pub(crate) layers: Option<OverlapStreams>,
    /// One more stream: that of a launch that is not yet ordered before all of them, or of an end that was refused.
    pub(crate) beside: Option<Stream>,
}
