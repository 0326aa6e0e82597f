//! The C interface of forebay. `include/forebay.h` declares it and is generated from these files.
//!
//! | file | holds |
//! |---|---|
//! | `status` | status codes, one for each [`forebay::Kind`], versions, and message texts |
//! | `error_text` | the text of the last call that failed on an object |
//! | `device`, `config`, `cache`, `sequence`, `budget`, `prefix`, `ticket` | the objects, one file each |
//! | `step`, `layer`, `overlap`, `choice`, `capture` | the calls of a decode loop |
//! | `dense`, `dense_config`, `dense_sequence`, `dense_prefix`, `dense_step` | the caches of dense models |
//! | `dense_arrive` | sequences of dense caches that a transfer brings |
//! | `arrive` | sequences that a transfer brings, and aborts of them |
//! | `aborted` | the withheld pages of aborted sequences, by number |
//! | `salt` | numbers of sequences and steps that name nothing in another cache |
//! | `in_flight` | a cache's steps between prepare and retire |
//! | `weights`, `links`, `update` | weights that ranks share, their sessions, and new versions |
//! | `replicas` | copies of hot ranges of such weights |
//! | `ring` | the calls of a step that shared weights need |
//! | `transfer`, `sender`, `receiver` | rows that go from prefill to decode instances |
//! | `trace`, `requests`, `selections`, `plan` | recording, reading recordings, and planning |
//! | `handle`, `word` | the table in which every call looks up its handle |
//! | `cast` | the one file that turns a caller's pointers into references and values |
//! | `panic` | the boundary that no panic crosses |
//!
//! This crate decides nothing. A call casts its arguments, calls the library inside `panic`'s boundary, and turns the
//! result into a status and out-parameters. The head of the header states the conventions for callers;
//! `tests/header.rs` contains that head and compares the whole file.

mod aborted;
pub mod arrive;
pub mod budget;
pub mod cache;
pub mod capture;
mod cast;
pub mod choice;
pub mod config;
pub mod dense;
pub mod dense_arrive;
pub mod dense_config;
pub mod dense_prefix;
pub mod dense_sequence;
pub mod dense_step;
pub mod device;
pub mod error_text;
mod handle;
mod in_flight;
pub mod layer;
pub mod links;
pub mod overlap;
mod panic;
pub mod plan;
pub mod prefix;
pub mod receiver;
pub mod replicas;
pub mod requests;
pub mod ring;
mod salt;
pub mod selections;
pub mod sender;
pub mod sequence;
pub mod status;
pub mod step;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod ticket;
pub mod trace;
pub mod transfer;
pub mod update;
mod uses;
pub mod weights;
mod word;

#[cfg(test)]
#[path = "../tests/support/replay.rs"]
mod replay;
