//! What the section of a selection trace shows.

use super::figures::Figures;
use crate::policy::Policy;
use crate::present::html::numbers::{ratio, time};
use crate::replay::result::RowSize;

/// The data of a section: the figures, the row size, and the link.
pub struct View<'a> {
    /// The trace's figures.
    pub figures: &'a Figures,
    /// Bytes of a row.
    pub row: &'a RowSize,
    /// Bytes a second of the link to the device.
    pub link: f64,
}

impl View<'_> {
    /// Bytes to the device in a step, from misses over all steps.
    pub fn bytes(&self, misses: u64) -> f64 {
        misses as f64 / f64::from(self.figures.setting.steps) * f64::from(self.row.bytes)
    }

    /// The time that the link takes for them.
    pub fn time(&self, bytes: f64) -> String {
        time(bytes / self.link)
    }

    pub fn rate(&self) -> String {
        format!("{} GB/s", self.link / 1e9)
    }

    pub fn missed(&self, policy: Policy) -> u64 {
        self.figures.shown_misses(policy).unwrap_or(0)
    }

    /// The size shown, in words.
    pub fn here(&self) -> String {
        format!("prompt share {}", ratio(self.figures.prompt_share))
    }
}
