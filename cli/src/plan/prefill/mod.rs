//! `forebay plan --role prefill`: the memory that a prefill instance needs on each GPU, its staging ring, and what is
//! left.
//!
//! It is a plan of its own: nothing is offloaded or simulated, and the options of decode mean nothing here.

pub mod args;
mod html;
mod json;
mod result;
mod run;
mod text;

pub use self::run::{check_role, command};
