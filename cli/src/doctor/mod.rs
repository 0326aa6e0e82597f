//! `forebay doctor`: what this machine and its GPUs can do for a cache.

pub mod args;
mod facts;
mod finding;
mod gpu;
mod json;
mod link;
mod machine;
mod memory;
mod nodes;
pub mod result;
pub mod run;
mod text;

pub use self::args::Arguments;
pub use self::run::command;
