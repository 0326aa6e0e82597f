//! `forebay transfer`: a prompt's rows go from one process to another, layer by layer, over a fabric of the library.
//!
//! `receive` and `send` are the two ends. `demo` starts both on this host and puts their reports together: how much of
//! the transfer is hidden behind the computation, and whether every byte arrived. A process of each end is as an
//! engine's: one thread computes, and the thread of the transfer polls an end.

pub mod args;
mod clock;
mod compute;
mod demo;
mod fabrics;
mod fault;
mod json;
mod picture;
mod receive;
mod report;
mod result;
mod run;
mod send;
mod shape;
mod text;

pub use self::args::Arguments;
pub use self::run::command;
