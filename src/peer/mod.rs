//! A session between two processes of a host, over a Unix socket: who the other side is, that it lives, and messages
//! with descriptors.
//!
//! Ranks that keep parts of each other's weights, and instances that hand rows over, need the same few things first:
//! that both sides speak one version and mean the same model and plan, memory descriptors, and to learn soon that the
//! other side is gone. A dead process's memory lives on in the descriptors that others hold, and copies from it go on
//! succeeding. So only its missing signs of life tell that it has died.
//!
//! **Parts.** A [`Session`] is the protocol without socket and clock: bytes that arrived go in, bytes to send come out,
//! and the caller passes the time. Tests and fuzzers drive it so. A [`Link`] is a session over a socket, with the
//! system's clock. A [`Hello`] is what each side says first. [`Links`] are the sessions of a process with all others of
//! its group, which meet in a folder.
//!
//! **Frames.** A frame is a header of 8 bytes and at most [`MESSAGE_MAX`] bytes after it; all numbers are
//! little-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 0 to 3 | bytes after the header |
//! | 4 | kind: 1 hello, 2 alive, 3 message, 4 end |
//! | 5 | 1 if a descriptor came with the frame's first byte, otherwise 0 |
//! | 6, 7 | 0 |
//!
//! **States.** Each side sends its hello at once and may send messages once it has accepted the other's. It sends
//! "alive" when it has sent nothing else for [`Limits::interval`]. A side that hears nothing for [`Limits::lost`] holds
//! the other for lost. "End" is a side's last frame, and owes no sign of life after it; the other side goes on giving
//! its own until it ends too. The session is over when both have ended. A connection that closes before is a lost peer.
//!
//! **Errors of the other side are final**: every later call returns the same error, and the descriptors that the
//! session held are closed. Errors of the caller, such as a message that is too long, change nothing.
//!
//! **Costs.** Memory does not depend on what the other side claims: an unfinished frame takes as many bytes as have
//! arrived of it, at most [`FRAME_MAX`], and at most [`DESCRIPTORS_MAX`] descriptors wait for their frames. Frames to
//! send take at most [`Limits::queue`] bytes. Messages that [`Links`] have to keep for later have a bound as well.
//!
//! **Ranks that end and come back.** A process that is started again meets its group as at the start, and the others
//! take it in ([`Links::readmit`]).
//!
//! **What it does not do.** It starts no thread, and does not protect against the user's own
//! processes: a socket's file mode does, and [`Link::new`] refuses other users' processes. It neither reads messages
//! nor maps memory.

mod ended;
mod frame;
mod hello;
mod joining;
mod kept;
mod link;
mod links;
mod rejoin;
mod seat;
mod session;

pub use frame::{FRAME_MAX, MESSAGE_MAX};
pub use hello::{Digest, Hello, VERSION};
pub use link::Link;
pub use links::Links;
pub(crate) use links::Mark;
pub use session::{DESCRIPTORS_MAX, Event, Limits, Outgoing, Session};
