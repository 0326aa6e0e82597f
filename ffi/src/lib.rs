//! The C side of forebay: what `include/forebay.h` declares, which is generated from these files.
//!
//! | file | holds |
//! |---|---|
//! | `status` | status codes, one for each [`forebay::Kind`], versions, and message texts |
//! | `device`, `config`, `cache`, `sequence`, `share`, `ticket` | what is held, by noun |
//! | `step`, `layer`, `overlap`, `choice`, `capture` | what a decode loop calls |
//! | `trace`, `requests`, `selections`, `plan` | recording, reading what was recorded, and planning |
//! | `handle`, `word` | the table in which every call looks its handle up |
//! | `cast` | the one place where a caller's pointers become references and values |
//! | `panic` | the wall: no unwinding leaves the library |
//!
//! Nothing is decided here. A call casts its arguments, calls the library behind the wall, and turns the
//! answer into a status and out-parameters. The conventions for callers stand at the head of the header;
//! `tests/header.rs` writes that head and compares the whole file.

pub mod cache;
pub mod capture;
mod cast;
pub mod choice;
pub mod config;
pub mod device;
mod handle;
pub mod layer;
pub mod overlap;
mod panic;
pub mod plan;
pub mod requests;
pub mod selections;
pub mod sequence;
pub mod share;
pub mod status;
pub mod step;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod ticket;
pub mod trace;
mod word;

#[cfg(test)]
#[path = "../tests/support/replay.rs"]
mod replay;
