//! Writes results and errors to standard output, files and standard error. Nothing here panics.

use std::io::{self, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use clap::error::ContextValue;
use forebay::os::{self, Identity, NoFaults};
pub use forebay::text::{echo, harmless};
use forebay::{Error, Kind, Result, text};

/// The exit status for bad input and for output that cannot be written.
pub const BAD_INPUT: u8 = 2;

/// Treats a closed pipe as success: its reader wanted no more.
pub fn forgive_closed_pipe(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Writes all of `text` to standard output.
///
/// # Errors
/// [`Kind::Io`], except for a closed pipe.
pub fn print(text: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    forgive_closed_pipe(out.write_all(text).and_then(|()| out.flush()))
        .map_err(|e| Error::new(Kind::Io, "print").at(format!("standard output: {}", os::io_text(&e))))
}

/// The results of a command, after all its work has succeeded. Files are written first, each atomically, and standard
/// output last: if a file cannot be written, nothing has been printed.
#[derive(Default)]
pub struct Results<'a> {
    files: Vec<(&'a Path, Vec<u8>)>,
    printed: Vec<Vec<u8>>,
}

impl<'a> Results<'a> {
    /// A result for the file at `path`; `-` is standard output.
    pub fn write(&mut self, path: &'a Path, text: impl Into<Vec<u8>>) {
        match is_stdout(path) {
            true => self.printed.push(text.into()),
            false => self.files.push((path, text.into())),
        }
    }

    /// Whether one of the results goes to standard output.
    pub fn take_stdout(&self) -> bool {
        !self.printed.is_empty()
    }

    /// A text report.
    pub fn print(&mut self, text: impl Into<Vec<u8>>) {
        self.printed.push(text.into());
    }

    /// Writes all results.
    ///
    /// # Errors
    /// [`Kind::Io`] names the file.
    pub fn deliver(self) -> Result<()> {
        self.files.iter().try_for_each(|(path, text)| os::write_whole(*path, text, &NoFaults))?;
        self.printed.iter().try_for_each(|text| print(text))
    }
}

/// Standard output, as a path.
const STDOUT: &str = "/proc/self/fd/1";

/// Whether `--json` or `--html` names standard output: as `-`, or by another name of the same file.
pub fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-" || os::identity(STDOUT).is_some_and(|stdout| os::identity(path) == Some(stdout))
}

/// The most bytes of a text file that is read at once: a setup, misses, measurements.
const TEXT_MAX: u64 = 16 << 20;

/// The most bytes that parsing takes for each byte of such a text: a list of empty lists, in buffers that double.
const PARSED: usize = 64;

/// The text of a small file.
///
/// # Errors
/// [`Kind::Io`] names the file; [`Kind::BadFormat`] for a file that is not text, or too large;
/// [`Kind::OutOfMemory`] if memory for parsing is missing, as the JSON reader would abort the process.
pub fn read_text(path: &Path) -> Result<String> {
    let io = |e: &io::Error| {
        Error::new(Kind::Io, "read").at(format!("{}: {}", echo(path.display()), os::io_text(e)))
    };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(|e| io(&e))?;
    file.take(TEXT_MAX + 1).read_to_end(&mut bytes).map_err(|e| io(&e))?;
    let bad =
        |what: &str| Error::new(Kind::BadFormat, "read").at(format!("{}: {what}", echo(path.display())));
    if bytes.len() as u64 > TEXT_MAX {
        return Err(bad("too long for such a file").with("most bytes", TEXT_MAX));
    }
    let room = PARSED * bytes.len();
    Vec::<u8>::new().try_reserve_exact(room).map_err(|_| {
        let place = format!("{}: while parsing it", echo(path.display()));
        Error::new(Kind::OutOfMemory, "read").at(place).with("bytes", room as u64).hint("free memory")
    })?;
    String::from_utf8(bytes).map_err(|_| bad("not UTF-8 text"))
}

/// Adds the file to an error found in it.
pub fn within(error: Error, path: &Path) -> Error {
    let place = match error.place() {
        "" => echo(path.display()),
        place => format!("{}: {place}", echo(path.display())),
    };
    error.at(place)
}

/// The identity of the file that a target names.
fn meant(path: &Path) -> Option<Identity> {
    os::identity(if path.as_os_str() == "-" { Path::new(STDOUT) } else { path })
}

/// The name and path of an input.
pub type Input<'a> = (&'static str, &'a Path);

/// Refuses two results in one file, and a result that would replace an input, under any of their names.
///
/// # Errors
/// [`Kind::InvalidConfig`] names both.
pub fn check_targets(
    operation: &'static str,
    targets: &[(&str, Option<&Path>)],
    inputs: &[Input<'_>],
) -> Result<()> {
    let refused = |place: String| Error::new(Kind::InvalidConfig, operation).at(place);
    // A device that is both read and written, such as a terminal, is not replaced.
    let replaceable =
        |path: &Path| std::fs::metadata(path).is_ok_and(|file| file.is_file() || file.file_type().is_fifo());
    let mut known: Vec<(&str, &Path, Option<Identity>)> = Vec::with_capacity(targets.len());
    for (option, path) in targets.iter().filter_map(|(option, path)| Some((*option, (*path)?))) {
        let file = meant(path);
        let same = |(_, other, its): &&(&str, &Path, Option<Identity>)| {
            *other == path || (file.is_some() && *its == file)
        };
        if let Some((other, ..)) = known.iter().find(same) {
            return Err(refused(format!("{other} and {option} name the same file"))
                .hint("name another file for one of them"));
        }
        let replaced = inputs
            .iter()
            .find(|(_, input)| replaceable(input) && file.is_some() && os::identity(input) == file);
        if let Some((what, input)) = replaced {
            let (path, input) = (echo(path.display()), echo(input.display()));
            return Err(refused(format!("{option} {path} would replace the {what} {input}"))
                .hint("name another file"));
        }
        known.push((option, path, file));
    }
    Ok(())
}

/// Prints an error as one line on standard error; does nothing if that is closed.
pub fn complain(error: &Error) {
    let _ = writeln!(io::stderr(), "error: {error}");
}

/// Prints what is wrong with the command line as one line on standard error: the first paragraph of clap's answer, and
/// its suggestion.
pub fn complain_of_arguments(error: &clap::Error) {
    let text = shortened(error);
    let paragraph: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let tips = text.lines().filter_map(|line| line.trim().strip_prefix("tip: "));
    // A tip that repeats the argument would show more of a long one than an error does.
    let again = echoes(error).any(|argument| argument.len() > text::ECHO / 4);
    let meant: String = tips.filter(|_| !again).map(|tip| format!("; {tip}")).collect();
    let _ = writeln!(io::stderr(), "{} (see --help)", harmless(&(paragraph.join(" ") + &meant)));
}

/// Clap's answer, with arguments as short as an error shows them.
fn shortened(error: &clap::Error) -> String {
    let mut text = error.to_string();
    for argument in echoes(error) {
        // A line end in the argument must not end a line of the answer.
        let shown = echo(argument);
        if *argument != shown {
            text = text.replace(argument.as_str(), &shown);
        }
    }
    text
}

/// The arguments that clap's answer contains.
fn echoes(error: &clap::Error) -> impl Iterator<Item = &String> {
    error.context().flat_map(|(_, value)| match value {
        ContextValue::String(one) => std::slice::from_ref(one),
        ContextValue::Strings(several) => several,
        _ => &[],
    })
}

/// Whether the locale of the terminal is UTF-8.
pub fn speaks_utf8() -> bool {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
        .into_iter()
        .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    let locale = locale.unwrap_or_default().to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}
