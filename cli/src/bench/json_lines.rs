//! Figures in a file from the moment at which each is known: a run that is killed loses the one under way alone, of a
//! step those of the operating point under way, which are compared with each other and so known together.
//!
//! A line of JSON each, the device in front with what it gives at best: the entries of `--json`, in the order in which
//! they are measured. The file is new and grows by whole lines; one line's write is all that it costs, between figures.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use forebay::os::{Appender, NoFaults};
use forebay::{Error, Kind, Result};

use super::json;
use super::result::{Figure, Measured};
use crate::present::output;

/// The file, where one was asked for.
#[derive(Default)]
pub struct Lines {
    file: Option<RefCell<Appender>>,
    /// As the command line names it.
    device: String,
}

impl Lines {
    /// A new file at `path`; without one nothing is written.
    ///
    /// # Errors
    /// Those of [`Appender::create`]; [`Kind::InvalidConfig`] for standard output.
    pub fn create(device: String, path: Option<&Path>) -> Result<Lines> {
        if path.is_some_and(output::is_stdout) {
            return Err(Error::new(Kind::InvalidConfig, "bench")
                .at("--json-lines takes a new file, not standard output")
                .hint("name a file, or a pipe by --json"));
        }
        let file = path.map(|path| Appender::create(path, Arc::new(NoFaults))).transpose()?;
        Ok(Lines { file: file.map(RefCell::new), device })
    }

    /// Writes the device, with its ceilings.
    ///
    /// # Errors
    /// Those of [`Appender::append`].
    pub fn begin(&self, measured: &Measured) -> Result<()> {
        self.append(|| json::device(measured))
    }

    /// Writes a figure.
    ///
    /// # Errors
    /// Likewise.
    pub fn figure(&self, figure: &Figure) -> Result<()> {
        self.append(|| json::figure(&self.device, figure))
    }

    fn append(&self, text: impl FnOnce() -> Result<Vec<u8>>) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        file.borrow_mut().append(&[&text()?])
    }
}
