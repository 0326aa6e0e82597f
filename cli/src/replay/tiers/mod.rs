//! `forebay replay --device-blocks`: what a prefix cache of two tiers hits, moves and saves on request traces.

pub mod args;
mod json;
mod result;
pub mod run;
mod text;
