//! `forebay plan`: what fits on a GPU, and whether to offload; or what a prefill instance needs.

mod advice;
pub mod args;
mod dense;
mod deployment;
mod html;
mod json;
mod prefill;
mod pulls;
pub mod result;
pub mod run;
mod settings;
pub mod shards;
mod subject;
mod text;
mod weights_json;

pub use self::args::Arguments;
pub use self::run::command;
