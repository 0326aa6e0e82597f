//! What hides the gather: the order in which one layer's work is enqueued.
//!
//! | file | knows |
//! |---|---|
//! | `choice` | which order each layer runs in, and when to change it |
//! | `schedule` | the edges of none, DA and DBA, for one layer of one micro-batch, over any device |
//!
//! The engine's part of a layer is opaque: callbacks that enqueue on the stream they are given. The same
//! schedule runs on every device, so what is planned on the virtual clock is what a step does.

mod choice;
mod schedule;

pub use crate::step::OverlapStreams;
pub use choice::{Bucket, Choice, Chooser, Hysteresis, Prices, Table};
pub use schedule::{Engine, EngineCall, Keys, Overlap, Run, Schedule, Work, enqueue_layer, enqueue_step};
