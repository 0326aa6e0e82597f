//! `forebay simulate`: how long a step takes at an operating point.

pub mod args;
mod html;
mod json;
mod kernels;
mod lanes;
mod passes;
mod prefill;
pub mod result;
pub mod run;
pub mod shards;
pub mod text;
pub mod timeline;

pub use self::args::Arguments;
pub use self::run::command;
