//! Overlap: orders of a layer's work that hide the gather behind computation.
//!
//! | file | contents |
//! |---|---|
//! | `schedule` | the orders none, DA, DBA and ahead: the operations and events of one layer of one micro-batch |
//! | `choice` | the table of orders: which order each layer runs in, and when to change it |
//!
//! The engine's part of a layer is opaque: callbacks that enqueue work on the stream that they are given. The same
//! schedule runs on every device, so a plan made on the virtual clock matches the real step.

mod choice;
mod schedule;

pub use crate::step::OverlapStreams;
pub use choice::{Bucket, Choice, Chooser, Hysteresis, Prices, Table};
pub use schedule::{Attended, Engine, EngineCall, Overlap, Run, Schedule, Work, enqueue_layer, enqueue_step};
