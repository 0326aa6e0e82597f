//! Output that several commands share: numbers, tables and lines of a terminal, JSON, pages and pictures, progress, and
//! the files for results. It imports no command.

pub mod html;
pub mod json;
pub mod numbers;
pub mod output;
pub mod progress;
pub mod provenance;
pub mod terminal;
