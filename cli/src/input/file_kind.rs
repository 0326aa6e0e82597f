//! Files of another kind than the one that is wanted: what a file seems to be by its beginning, and which command takes
//! it. It is looked at before it is read, so that a setup among traces is called a setup, not a damaged trace.
//!
//! What is not recognised is left to its reader, as is what cannot be read twice.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use forebay::trace::requests;
use forebay::{Error, Kind, Result};

use crate::present::output::echo;

/// How much of a file is looked at.
const START: u64 = 64 << 10;

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// Recorded selections.
    Selections,
    /// Recorded requests.
    Requests,
    /// What a step costs.
    Setup,
    /// What setups are fitted to.
    Measurements,
    /// What a command of forebay wrote as JSON.
    Results,
    /// The order of each layer.
    OverlapTable,
    /// A report.
    Page,
    /// A picture.
    Picture,
}

impl FileKind {
    /// What it is called.
    const fn name(self) -> &'static str {
        match self {
            FileKind::Selections => "a selection trace",
            FileKind::Requests => "a request trace",
            FileKind::Setup => "a setup",
            FileKind::Measurements => "measurements",
            FileKind::Results => "results that forebay wrote with --json",
            FileKind::OverlapTable => "an overlap table",
            FileKind::Page => "an HTML page",
            FileKind::Picture => "an SVG picture",
        }
    }

    /// Who takes it.
    const fn taken_by(self) -> &'static str {
        match self {
            FileKind::Selections => "pass it to forebay replay, or as --trace to plan and simulate",
            FileKind::Requests => "pass it to forebay replay",
            FileKind::Setup => "pass it as --setup to forebay plan or forebay simulate",
            FileKind::Measurements => "pass it to forebay fit, which makes a setup of it",
            FileKind::Results => "no input: of forebay doctor's, forebay fit takes the rates as --rates",
            FileKind::OverlapTable => "pass it as --table to forebay simulate",
            FileKind::Page | FileKind::Picture => "open it in a browser",
        }
    }

    /// What the file at `path` seems to be; none where nothing says so.
    pub fn of(path: &Path) -> Option<FileKind> {
        // What is no regular file may be readable once only.
        if !std::fs::metadata(path).ok()?.is_file() {
            return None;
        }
        let mut start = Vec::new();
        File::open(path).ok()?.take(START).read_to_end(&mut start).ok()?;
        let text = String::from_utf8_lossy(&start);
        let text = text.trim_start_matches('\u{feff}').trim_start();
        let lower = text.get(..16).unwrap_or(text).to_ascii_lowercase();
        let has = |key: &str| text.contains(&format!("\"{key}\""));
        match () {
            // Measurements hold the setup that is fitted.
            () if text.starts_with('{') && has("forebay_measurements") => Some(FileKind::Measurements),
            () if text.starts_with('{') && has("forebay_setup") => Some(FileKind::Setup),
            () if text.starts_with('[') && has("schema") && has("forebay") && has("kind") => {
                Some(FileKind::Results)
            }
            () if text.starts_with("forebay overlap table") => Some(FileKind::OverlapTable),
            () if lower.starts_with("<!doctype html") || lower.starts_with("<html") => Some(FileKind::Page),
            () if lower.starts_with("<svg") => Some(FileKind::Picture),
            () => match requests::is_request_trace(path).ok()?? {
                false => Some(FileKind::Selections),
                // A brace alone begins much else.
                true if !text.starts_with('{') || of_requests(text) => Some(FileKind::Requests),
                true => None,
            },
        }
    }
}

/// Whether the first line names what requests have.
fn of_requests(text: &str) -> bool {
    let line = text.lines().next().unwrap_or_default();
    ["hash_ids", "input_length", "requests"].iter().any(|key| line.contains(&format!("\"{key}\"")))
}

/// Refuses a file that is recognised as another kind than those that are taken here.
///
/// # Errors
/// [`Kind::BadFormat`] says what the file is, what is wanted, and who takes it.
pub fn expect(operation: &'static str, path: &Path, wanted: &[FileKind], what: &str) -> Result<()> {
    match FileKind::of(path) {
        Some(kind) if !wanted.contains(&kind) => {
            let place = format!("{} is {}, and {what} is wanted", echo(path.display()), kind.name());
            Err(Error::new(Kind::BadFormat, operation).at(place).hint(kind.taken_by()))
        }
        _ => Ok(()),
    }
}
