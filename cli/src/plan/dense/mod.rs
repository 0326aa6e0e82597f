//! `forebay plan --dense`: how many sequences of a dense model fit on a GPU, why one more does not, and what the host
//! holds beside them.
//!
//! It is a plan of its own: a dense model has no ratio and nothing to simulate, and its host memory is a second tier.

pub mod args;
mod json;
mod result;
mod run;
mod text;

pub use self::run::command;
