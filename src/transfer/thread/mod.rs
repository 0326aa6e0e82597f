//! The transfer thread: drives an end, so that no thread of the engine waits for a transfer.
//!
//! A [`SendThread`] has a sender's end, a [`ReceiveThread`] a receiver's. The engine's threads give it calls and take
//! what has happened. Neither waits: a call is queued, and carried out in its turn. So the thread that launches a
//! layer's kernels spends microseconds, although rows are read for their digests, copied and stored meanwhile.
//!
//! **States.** The thread runs from `start` until `end`, until it is dropped, or until its end of the fabric fails.
//! Then connections are closed, and nothing is read or stored any more. After a failure `poll` gives the error from
//! then on.
//!
//! **What comes of a call.** An error of a call comes out of `poll`, in its place among the events: as
//! [`News::Refused`], or for a grant as its [`Event::Failed`](crate::transfer::receiver::Event::Failed). A call for a
//! request that has ended meanwhile does nothing, because its end was told. A panic in a store or a call ends the
//! thread with [`Kind::Internal`](crate::error::Kind::Internal).
//!
//! **Waiting.** `descriptor` is readable while there are events, so it fits into a loop of poll, epoll or asyncio.
//! `wait` waits for it.
//!
//! **Bounds.** An engine that takes no events has [`EVENTS_KEPT`] kept for it. Then its thread looks at no connection
//! and no deadline until some are taken, and other ends take it for lost in time. At most [`UNOPENED_KEPT`] reasons why
//! connections did not open are kept, because strangers can bring those about. Payloads are of kinds that a grant
//! names, each once.
//!
//! **Costs.** A thread, four descriptors, and for each call an allocation and a byte to a socket. The thread sleeps
//! while nothing happens, but wakes for signs of life.
//!
//! **What it does not do.** It knows no cache: it gives checked rows to a [`Store`](crate::transfer::Store).

mod drive;
mod receive;
mod run;
mod send;
mod wake;

pub use receive::{Grant, ReceiveStatistics, ReceiveThread};
pub use run::{EVENTS_KEPT, News, UNOPENED_KEPT};
pub use send::{SendStatistics, SendThread, Span};
