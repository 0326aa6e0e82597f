//! `forebay bench`: measures how close a device comes to its ceilings.

mod ahead;
pub mod args;
mod asked;
mod fetch;
mod host_memory;
mod json;
mod json_lines;
mod link;
mod nodes;
mod oracle;
mod packed;
mod pages;
mod picture;
mod pull;
pub mod result;
mod reuse;
mod rig;
mod ring;
mod row_shape;
pub mod rows;
mod rule;
pub mod run;
mod step;
mod text;
mod timer;

pub use self::args::Arguments;
pub use self::run::command;
