//! `forebay replay --together`: several selection traces as sequences that share one total of slots, with fixed
//! budgets and with shared ones.

pub mod args;
mod html;
mod json;
mod result;
pub mod run;
mod text;
