//! `forebay replay` of request traces: counts the hits of a prefix cache by its capacity.

pub mod args;
pub mod html;
mod json;
pub mod result;
pub mod run;
pub mod text;
