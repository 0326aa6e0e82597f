//! All system calls of forebay: host memory, its descriptors, shared libraries, files.
//!
//! **What it is for.** The total pool is one long mapping that the device reads and writes directly. So it has to be
//! resident (populated, locked), near the device (bound to its NUMA node), cheap to translate (huge pages), and
//! mappable twice (a descriptor that [`Range`] maps again). A machine can refuse each of these while everything else
//! works. A refusal that leaves the memory usable is a [`Fallback`], which the call returns to its caller; any other
//! is a [`crate::Error`].
//!
//! **Faults.** Each call first asks a [`Faults`], which may return an errno in the kernel's place. So every fallback
//! can be tested on any machine, and a scenario can be run once for each call that it makes, with that call failing.
//! It costs one indirect call per system call. A step makes no system call.
//!
//! **Invariants.** Every resource has an owner that frees it: mappings a [`Region`], descriptors an `OwnedFd`,
//! libraries a [`Library`], a half-written file the guard that removes it. No Rust reference into a mapping is ever
//! made, because devices, threads and other processes write it at the same time; [`Region`] defines what a copy then
//! means.
//!
//! **Crates.** nix, memmap2 or libloading make a call where that removes an unsafe block, and libc otherwise
//! (docs/design.md, "Packages").
//!
//! **What it does not do.** It reads no limits in advance except those of memory, and decides no sizes. It retries
//! only interrupted calls. Unmapping asks no fault, since no caller could handle one.

mod append;
mod bind;
mod fallback;
mod faults;
mod file;
mod library;
mod limit;
mod lock;
mod machine;
mod map;
mod memfd;
mod memory;
#[cfg(feature = "transfer")]
mod network;
mod numa;
mod partial;
mod random;
mod range;
mod refusal;
mod region;
mod socket;
#[cfg(test)]
mod tests;
mod words;

pub use append::Appender;
pub use bind::nodes;
pub use fallback::Fallback;
pub use faults::{Call, Faults, Inject, NoFaults};
pub use file::{Identity, identity, write_whole};
pub use library::Library;
pub use limit::unsignalled;
pub use machine::{memory, memory_state, node_beside, processor, threads};
pub use map::{Map, Request};
pub use memory::{MemoryState, page_size};
#[cfg(feature = "transfer")]
pub(crate) use network::connect_to;
pub use numa::near;
pub use random::random;
pub use range::{Piece, Range};
pub use refusal::io_text;
pub(crate) use region::move_bytes;
pub use region::{Protection, Region};
pub(crate) use socket::connect;
pub use socket::{Credentials, Received, credentials, receive, send, user, wait};
#[cfg(feature = "transfer")]
pub(crate) use socket::{has_hung_up, is_refused, shutdown};
pub(crate) use words::Words;
