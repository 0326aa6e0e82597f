//! What a group of figures has to measure.

use forebay::Result;
use indicatif::ProgressBar;

use super::host_memory::Pool;
use super::json_lines::Lines;
use super::result::Figure;
use crate::input::device::{ProbeOptions, Target};

/// The extent of a run.
pub struct Asked {
    /// Steps timed for each figure, after some that warm up.
    pub rounds: u32,
    /// Tiny shapes, for tests and for devices whose speed does not matter.
    pub quick: bool,
    /// Progress, advanced by one for each figure.
    pub progress: ProgressBar,
    /// The device and how it is opened, for groups that open it in several ways.
    pub target: Target,
    pub options: ProbeOptions,
    /// Host memory of the rows.
    pub pool: Pool,
    /// Multiprocessors that persistent kernels leave free, if the engine's work runs as such.
    pub persistent: Option<u32>,
    /// Gathers use bulk copies.
    pub bulk: bool,
    /// Measures a single gather of this many rows.
    pub rows: Option<u32>,
    /// Measures a single resolve of this many sequences.
    pub batch: Option<u32>,
    /// The file for figures as they become known.
    pub lines: Lines,
}

impl Asked {
    /// Passes on a finished figure, and writes it to the file if one was requested.
    ///
    /// # Errors
    /// Errors of the file.
    pub fn known(&self, figure: Figure) -> Result<Figure> {
        self.lines.figure(&figure).map(|()| figure)
    }
}
