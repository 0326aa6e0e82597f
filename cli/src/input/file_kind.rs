//! Recognises files of the wrong kind: from its beginning, what a file seems to be, and which command takes it. A file
//! is checked before it is read, so that a setup among traces is called a setup, not a damaged trace.
//!
//! Files that are not recognised, or that cannot be read twice, are left to their reader.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use forebay::trace::requests;
use forebay::{Error, Kind, Result};

use crate::present::output::echo;

/// The bytes of a file's beginning that are checked.
const START: u64 = 64 << 10;

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A selection trace.
    Selections,
    /// A request trace.
    Requests,
    /// A setup: the costs of a step.
    Setup,
    /// Measurements, to which setups are fitted.
    Measurements,
    /// JSON that a command of forebay wrote.
    Results,
    /// An overlap table: the order of each layer.
    OverlapTable,
    /// A report as a page.
    Page,
    /// A picture.
    Picture,
}

impl FileKind {
    /// The kind's name in errors.
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

    /// The command that takes it.
    const fn taken_by(self) -> &'static str {
        match self {
            FileKind::Selections => "pass it to forebay replay, or as --trace to plan and simulate",
            FileKind::Requests => "pass it to forebay replay",
            FileKind::Setup => "pass it as --setup to forebay plan or forebay simulate",
            FileKind::Measurements => "pass it to forebay fit, which makes a setup of it",
            FileKind::Results => {
                "of such results, only those of forebay doctor are an input: forebay fit --rates"
            }
            FileKind::OverlapTable => "pass it as --table to forebay simulate",
            FileKind::Page | FileKind::Picture => "open it in a browser",
        }
    }

    /// What the file at `path` seems to be; none if nothing identifies it.
    pub fn of(path: &Path) -> Option<FileKind> {
        // A file that is not regular may be readable only once.
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
            // Measurements contain the setup that is fitted, so they are checked first.
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
                // Many other texts begin with a brace, too.
                true if !text.starts_with('{') || of_requests(text) => Some(FileKind::Requests),
                true => None,
            },
        }
    }
}

/// Whether the first line has the field names of requests.
fn of_requests(text: &str) -> bool {
    let line = text.lines().next().unwrap_or_default();
    ["hash_ids", "input_length", "requests"].iter().any(|key| line.contains(&format!("\"{key}\"")))
}

/// Refuses a file that is recognised as another kind than the wanted ones.
///
/// # Errors
/// [`Kind::BadFormat`] names the kind of the file, the wanted kind, and the command that takes the file.
pub fn expect(operation: &'static str, path: &Path, wanted: &[FileKind], what: &str) -> Result<()> {
    match FileKind::of(path) {
        Some(kind) if !wanted.contains(&kind) => {
            let place = format!("{} is {}, but {what} is wanted", echo(path.display()), kind.name());
            Err(Error::new(Kind::BadFormat, operation).at(place).hint(kind.taken_by()))
        }
        _ => Ok(()),
    }
}
