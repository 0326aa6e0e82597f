//! The cache of models whose attention reads every row: pages on the device, the host as second tier.
//!
//! Where a sparse cache ([`Cache`](crate::Cache)) keeps all rows on the host and the selected ones on the device, a
//! dense model reads every cached row of its layers in every step. So its rows are on the device, in pages, and
//! attention finds them by page tables. Pages are opaque bytes, and are moved whole.
//!
//! # Groups
//!
//! Layers with the same row format and the same kind of attention form a [`Group`] and share page tables: one page
//! holds its tokens' rows in every layer of the group. Most models are one group. Models with sliding-window layers are
//! two, and their window group keeps only the pages of the window. Each group has device pages of its own, and its page
//! 0, the *null page*, is zeros and belongs to no sequence: a page table names it wherever a sequence has no page.
//!
//! # Sizes
//!
//! A [`Config`] says everything: the [`Shape`], how pages lie in memory ([`Layout`], [`Runs`]), and how many there are.
//! Opening a sequence takes all pages that it will ever need, so a step allocates nothing and cannot run out of pages.
//! [`Config::pages_for`] says how many device pages that takes, [`Config::planes`] and [`Config::view`] where a layer's
//! rows are, and [`Config::footprint`] how many bytes.

mod config;
mod footprint;
mod planes;
mod presets;
mod reserve;
mod shape;

pub use config::{Config, Layout, Runs, Width};
pub use footprint::Footprint;
pub use planes::{PlaneShape, View};
pub use shape::{GROUPS_MAX, Group, Shape};
