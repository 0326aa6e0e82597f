//! `forebay plan`: what fits on a GPU, and whether to offload.

mod advice;
pub mod args;
mod dense;
mod deployment;
mod html;
mod json;
mod pulls;
pub mod result;
pub mod run;
mod settings;
pub mod shards;
mod text;
mod weights_json;

pub use self::args::Arguments;
pub use self::run::command;
