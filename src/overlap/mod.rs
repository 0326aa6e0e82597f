//! What hides the gather: the order in which one layer's work is enqueued.
//!
//! | file | knows |
//! |---|---|
//! | `schedule` | the edges of none, DA and DBA, for one layer of one micro-batch, over any device |
//!
//! The engine's part of a layer is opaque: callbacks that enqueue on the stream they are given. The same
//! schedule runs on every device, so what is planned on the virtual clock is what a step does.

mod schedule;

pub use crate::step::OverlapStreams;
pub use schedule::{Engine, EngineCall, Keys, Overlap, Run, Schedule, Work, enqueue_layer, enqueue_step};
