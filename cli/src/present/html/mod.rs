//! Pages and pictures: one HTML file that needs no other, and SVG.
//!
//! [`page`] puts a page together. Pictures are written by [`svg`] and [`chart`] and not by a plotting library, because
//! what makes the page work by light and by dark, on a phone, under a pointer and read aloud are classes, names and
//! hints in the markup itself.

pub mod chart;
pub mod numbers;
pub mod page;
pub mod scale;
pub mod series;
pub mod svg;
