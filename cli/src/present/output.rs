//! Where results and errors go: standard output, a file, standard error. None of it panics.

use std::io::{self, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use clap::error::ContextValue;
use forebay::os::{self, Identity, NoFaults};
pub use forebay::text::{echo, harmless};
use forebay::{Error, Kind, Result, text};

/// The exit status for bad input and for output that cannot be written.
pub const BAD_INPUT: u8 = 2;

/// A reader that went away asked for no more: that is no error.
pub fn forgive_closed_pipe(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Writes all of `text` to standard output.
///
/// # Errors
/// [`Kind::Io`], but not for a closed pipe.
pub fn print(text: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    forgive_closed_pipe(out.write_all(text).and_then(|()| out.flush()))
        .map_err(|e| Error::new(Kind::Io, "print").at(format!("standard output: {}", os::io_text(&e))))
}

/// What a command has made, once all its work has succeeded. Files are written first, each whole or not at all, and
/// standard output last: where a file cannot be written nothing was printed.
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

    /// Whether one of the results was named to be standard output.
    pub fn take_stdout(&self) -> bool {
        !self.printed.is_empty()
    }

    /// A report for people.
    pub fn print(&mut self, text: impl Into<Vec<u8>>) {
        self.printed.push(text.into());
    }

    /// Puts everything where it belongs.
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

/// Whether `--json` or `--html` names standard output: `-`, or by another name what it leads to.
pub fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-" || os::identity(STDOUT).is_some_and(|stdout| os::identity(path) == Some(stdout))
}

/// The most bytes of a text file that is read whole: a setup, misses, measurements.
const TEXT_MAX: u64 = 16 << 20;

/// Bytes that parsing takes for each byte of such a text, at most: a list of empty lists, in buffers that double.
const PARSED: usize = 64;

/// The text of a small file.
///
/// # Errors
/// [`Kind::Io`] names the file; [`Kind::BadFormat`] for one that is no text, or too large to be meant;
/// [`Kind::OutOfMemory`] where there is none to parse it: the JSON reader would end the process.
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
        return Err(bad("longer than such a file is").with("most bytes", TEXT_MAX));
    }
    let room = PARSED * bytes.len();
    Vec::<u8>::new().try_reserve_exact(room).map_err(|_| {
        let place = format!("{}: parsing it", echo(path.display()));
        Error::new(Kind::OutOfMemory, "read").at(place).with("bytes", room as u64).hint("free memory")
    })?;
    String::from_utf8(bytes).map_err(|_| bad("no UTF-8 text"))
}

/// The error with the file in which it was found.
pub fn within(error: Error, path: &Path) -> Error {
    let place = match error.place() {
        "" => echo(path.display()),
        place => format!("{}: {place}", echo(path.display())),
    };
    error.at(place)
}

/// Which file a target means.
fn meant(path: &Path) -> Option<Identity> {
    os::identity(if path.as_os_str() == "-" { Path::new(STDOUT) } else { path })
}

/// What an input is called, and its path.
pub type Input<'a> = (&'static str, &'a Path);

/// Refuses two results in one file, and a result in the place of an input: by whatever names.
///
/// # Errors
/// [`Kind::InvalidConfig`] names both.
pub fn check_targets(
    operation: &'static str,
    targets: &[(&str, Option<&Path>)],
    inputs: &[Input<'_>],
) -> Result<()> {
    let refused = |place: String| Error::new(Kind::InvalidConfig, operation).at(place);
    // Whoever reads and writes one device, such as a terminal, replaces nothing.
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

/// One line on standard error. Where that is closed there is nobody to tell.
pub fn complain(error: &Error) {
    let _ = writeln!(io::stderr(), "error: {error}");
}

/// What is wrong with the command line, in one line on standard error: the first paragraph of clap's answer, and what
/// it thinks was meant.
pub fn complain_of_arguments(error: &clap::Error) {
    let text = shortened(error);
    let paragraph: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let tips = text.lines().filter_map(|line| line.trim().strip_prefix("tip: "));
    // A tip that names the argument again would show more of a long one than an error does.
    let again = echoes(error).any(|argument| argument.len() > text::ECHO / 4);
    let meant: String = tips.filter(|_| !again).map(|tip| format!("; {tip}")).collect();
    let _ = writeln!(io::stderr(), "{} (see --help)", harmless(&(paragraph.join(" ") + &meant)));
}

/// Clap's answer, with no more of an argument than an error shows.
fn shortened(error: &clap::Error) -> String {
    let mut text = error.to_string();
    for argument in echoes(error) {
        // What is no line's end in the argument is none in the answer.
        let shown = echo(argument);
        if *argument != shown {
            text = text.replace(argument.as_str(), &shown);
        }
    }
    text
}

/// The texts that clap's answer was given.
fn echoes(error: &clap::Error) -> impl Iterator<Item = &String> {
    error.context().flat_map(|(_, value)| match value {
        ContextValue::String(one) => std::slice::from_ref(one),
        ContextValue::Strings(several) => several,
        _ => &[],
    })
}

/// Whether the terminal's locale can show more than ASCII.
pub fn speaks_utf8() -> bool {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
        .into_iter()
        .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    let locale = locale.unwrap_or_default().to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}
