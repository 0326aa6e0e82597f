//! `forebay replay`: replays traces through pools and caches of several sizes.

pub mod args;
mod curve;
mod html;
pub mod json;
pub mod requests;
pub mod result;
pub mod run;
mod study;
pub mod text;
mod tiers;
mod together;

pub use self::args::Arguments;
pub use self::run::command;
