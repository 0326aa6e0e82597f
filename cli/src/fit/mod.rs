//! `forebay fit`: a setup from measurements.

pub mod args;
mod json;
pub mod result;
pub mod run;
mod text;

pub use self::args::Arguments;
pub use self::run::command;
