//! Rows that go from prefill instances to decode instances, layer by layer.
//!
//! Large deployments run prompts on some GPUs and decode on others (vLLM: disaggregated prefill; SGLang: PD
//! disaggregation). The rows of a prompt then cross from one instance to the other, and the two divide a model in
//! different ways: other tensor-parallel degrees, other pipeline stages, other page sizes, or prompts whose tokens are
//! spread over the ranks.
//!
//! **The plan** is pure arithmetic. A [`Side`] says where an instance keeps the rows. A [`Plan`] pairs two sides, or
//! refuses them with a reason, and then names for each request the [`Run`]s: which bytes of which rank and page go to
//! which bytes of which rank and page. Both instances compute the same runs from the same two sides and chunks, so
//! neither has to send lists of runs.
//!
//! **The protocol** is two state machines without I/O and clock: a [`Sender`] for each rank of the prefill instance and
//! a [`Receiver`] for each rank of the decode instance. They say [`Frame`]s to each other. Decode gives pages first.
//! Prefill tells rows layer by layer. The receiver moves them, run by run, checks each against its digest
//! ([`digest()`]), and answers. A [`Ledger`] says which layers have arrived.
//!
//! **Memory.** A [`StagingRing`] is the sender's memory for layers on their way. A [`Quarantine`] keeps pages that a
//! writer from afar may still reach from being used again.
//!
//! **What it does not do.** Only [`socket`] opens connections, and only [`thread`] starts a thread: a run names pages
//! by their order in a request. It converts nothing: other numbers, heads or sizes are refused.
//!
//! **Fabrics** carry frames and rows ([`fabric`]). An end ([`SendingEnd`], [`ReceivingEnd`]) joins a machine and its
//! fabric. [`socket`] has those over TCP and over shared memory. [`thread`] drives an end, so that the engine does not
//! wait. `conformance` holds a fabric to what the machines need. `model` is one in memory, driven by a seed, which can
//! go wrong in each way that a real one does. Both are of the feature `check`.

#[cfg(feature = "check")]
pub mod conformance;
mod digest;
pub mod ends;
pub mod fabric;
mod frames;
mod ledger;
pub mod memory;
#[cfg(feature = "check")]
pub mod model;
mod pairing;
mod plan;
mod quarantine;
pub mod receiver;
mod runs;
pub mod sender;
mod side;
pub mod socket;
mod staging;
pub mod thread;
mod wire;

pub use digest::digest;
pub use ends::{Polled, ReceivingEnd, SendingEnd, Store};
pub use frames::{
    Answer, Digests, FRAME_MAX, Frame, Grant, Greeting, LANDING_MAX, List, Notice, PAYLOAD_MAX, Payload,
    Rank, Reason, Rows,
};
pub use ledger::Ledger;
pub use plan::Plan;
pub use quarantine::{Fence, Quarantine, Writer};
pub use receiver::Receiver;
pub use runs::{Chunk, End, Of, Request, Run};
pub use sender::Sender;
pub use side::{Component, LayerPlaces, Place, Side, Split, Stage};
pub use staging::{Part, StagingRing};
pub use wire::VERSION;
