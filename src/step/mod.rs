//! A decode step: prepare, the layers, finish, retire.
//!
//! | call | what the host does |
//! |---|---|
//! | prepare | fills a pinned step descriptor of the ring; enqueues its copy and the commit of the previous step |
//! | layer | enqueues R, G and S (resolve, gather, scatter) of one layer on the given streams |
//! | finish | enqueues the operation that writes the report to its pinned slot, then the step's event |
//! | retire | after that event, reads the report and frees the resources that only this step still named |
//!
//! A report holds counters, lengths and the sticky word (the step's error, if there was one), together with the step's
//! number. A [`Step`] is an owned token, not a borrow. It is *open* from prepare until finish, and then *in flight*
//! until it is retired. An open step becomes *abandoned* if one of its layers cannot be enqueued completely. The
//! engine must still finish and retire it, and must discard its tokens.
//!
//! A slot of the ring belongs to one step from prepare until retire. The host never writes its pinned descriptor while
//! a copy may still run (NVIDIA/TensorRT-LLM#15546 and vllm-project/vllm#51667 report this fault). A full ring is
//! [`crate::Kind::Busy`], never a wait. This module allocates nothing after construction.
//!
//! `phase` is the token and what it may still do. `ring` holds the slots, from prepare to retire, and `shape` their
//! sizes. `layer` has the calls between them, `streams` where those run, `enqueued` records which calls are still
//! missing, and `retire` has the results.

mod enqueued;
mod layer;
mod phase;
mod retire;
mod ring;
mod shape;
mod streams;

pub(crate) use enqueued::{Due, Enqueued};
pub(crate) use layer::LayerCalls;
pub use layer::{Buffers, LayerCall};
pub(crate) use phase::RowInFlight;
pub use phase::Step;
pub use retire::{Retired, Unretired};
pub(crate) use ring::{Ended, Ring};
pub(crate) use shape::RingShape;
pub use streams::{OverlapStreams, Streams};
