//! Writes each figure to a file as soon as it is known. A run that is killed loses only the current figure, or, in the
//! group step, those of the current operating point, which are computed together.
//!
//! One line of JSON each: first the device with its ceilings, then the entries of `--json` in the order in which they
//! are measured. The file is new and grows by whole lines. The only cost is one write between figures.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use forebay::os::{Appender, NoFaults};
use forebay::{Error, Kind, Result};

use super::json;
use super::result::{Figure, Measured};
use crate::present::output;

/// The file, if one was requested.
#[derive(Default)]
pub struct Lines {
    file: Option<RefCell<Appender>>,
    /// Its name on the command line.
    device: String,
}

impl Lines {
    /// A new file at `path`; without a path nothing is written.
    ///
    /// # Errors
    /// Errors of [`Appender::create`]; [`Kind::InvalidConfig`] for standard output.
    pub fn create(device: String, path: Option<&Path>) -> Result<Lines> {
        if path.is_some_and(output::is_stdout) {
            return Err(Error::new(Kind::InvalidConfig, "bench")
                .at("--json-lines needs a new file, not standard output")
                .hint("pass a file, or use --json for a pipe"));
        }
        let file = path.map(|path| Appender::create(path, Arc::new(NoFaults))).transpose()?;
        Ok(Lines { file: file.map(RefCell::new), device })
    }

    /// Writes the device, with its ceilings.
    ///
    /// # Errors
    /// Errors of [`Appender::append`].
    pub fn begin(&self, measured: &Measured) -> Result<()> {
        self.append(|| json::device(measured))
    }

    /// Writes a figure.
    ///
    /// # Errors
    /// Errors of [`Appender::append`].
    pub fn figure(&self, figure: &Figure) -> Result<()> {
        self.append(|| json::figure(&self.device, figure))
    }

    fn append(&self, text: impl FnOnce() -> Result<Vec<u8>>) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        file.borrow_mut().append(&[&text()?])
    }
}
