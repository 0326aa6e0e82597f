//! What several commands show things with: numbers, tables and lines of a terminal, JSON, pages and pictures, progress,
//! and the files that results go to. It knows no command.

pub mod html;
pub mod json;
pub mod numbers;
pub mod output;
pub mod progress;
pub mod provenance;
pub mod terminal;
