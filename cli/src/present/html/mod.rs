//! Pages and pictures: one HTML file that needs no other, and SVG.
//!
//! [`page`] assembles the file. [`svg`] and [`chart`] write the pictures without a plotting library, because light and
//! dark mode, phones, pointer hints and screen readers need classes, names and hints in the markup itself.

pub mod chart;
pub mod numbers;
pub mod page;
pub mod scale;
pub mod series;
pub mod svg;
