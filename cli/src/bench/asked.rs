//! What a group of figures is asked for.

use forebay::Result;
use indicatif::ProgressBar;

use super::host_memory::Pool;
use super::json_lines::Lines;
use super::result::Figure;

/// How much is measured.
pub struct Asked {
    /// Steps timed for each figure, behind some that warm up.
    pub rounds: u32,
    /// Tiny shapes, for tests and for devices that are no measure.
    pub quick: bool,
    /// Advanced by one for each figure.
    pub progress: ProgressBar,
    /// Host memory of the rows.
    pub pool: Pool,
    /// Where an engine's work is to run as persistent kernels, how many multiprocessors these leave free.
    pub persistent: Option<u32>,
    /// Gathers go by bulk copies.
    pub bulk: bool,
    /// Of gathers, one of so many rows alone.
    pub rows: Option<u32>,
    /// Of resolves, one of so many sequences alone.
    pub batch: Option<u32>,
    /// Where each goes once it is known.
    pub lines: Lines,
}

impl Asked {
    /// The figure, written where one asked for it. Every figure of a group passes here as soon as it is whole.
    ///
    /// # Errors
    /// Those of the file.
    pub fn known(&self, figure: Figure) -> Result<Figure> {
        self.lines.figure(&figure).map(|()| figure)
    }
}
