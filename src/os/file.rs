//! Atomic file writes: temporary file, fsync, rename.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::limit::unsignalled;
use super::partial::Partial;
use super::{Call, Faults, io_text};
use crate::error::{Error, Kind, Result};
use crate::text::echo;

/// Bytes of one write call.
const PART: usize = 1 << 20;

/// Writes `bytes` as the whole content of `path`: to a temporary file in the same folder, which is then renamed. If a
/// step fails, such as on a full disk or at the limit on file size, the temporary file is removed and the old file is
/// unchanged. The next write into the folder removes temporary files of killed processes. If several processes write
/// one path, the last to finish wins, with its whole content.
///
/// The target of a symbolic link is replaced or created, not the link. A link to another dangling link is rejected.
/// Bytes for a device or a pipe are written directly, since no other file may take its name; a pipe waits for its
/// reader.
///
/// # Errors
/// [`Kind::Io`] with the path, the step and the system's reason.
pub fn write_whole(path: impl AsRef<Path>, bytes: &[u8], faults: &dyn Faults) -> Result<()> {
    let path = path.as_ref();
    unsignalled(|| replace(path, bytes, faults)).map_err(|(step, error)| {
        let place = format!("{}: {step}: {}", echo(path.display()), io_text(&error));
        let error = Error::new(Kind::Io, "write file").at(place);
        error.with("bytes", bytes.len() as u64)
    })
}

/// The result of a step; an error names the step that failed.
type Step<T> = std::result::Result<T, (&'static str, io::Error)>;

/// Makes one step unless a fault replaces it.
fn step<T>(
    faults: &dyn Faults,
    call: Call,
    name: &'static str,
    take: impl FnOnce() -> io::Result<T>,
) -> Step<T> {
    match faults.before(call) {
        Some(errno) => Err((name, io::Error::from_raw_os_error(errno))),
        None => take().map_err(|error| (name, error)),
    }
}

fn replace(path: &Path, bytes: &[u8], faults: &dyn Faults) -> Step<()> {
    let old = fs::metadata(path).ok();
    // Check this before following links: a pipe that /dev/stdout points to has no path of its own.
    if old.as_ref().is_some_and(|old| !old.is_file()) {
        let open = || OpenOptions::new().write(true).open(path);
        return write(&mut step(faults, Call::CreateFile, "open", open)?, bytes, faults);
    }
    let target = target(path).map_err(|error| ("follow link", error))?;
    let (mut file, partial) =
        step(faults, Call::CreateFile, "create temporary file", || Partial::beside(&target, faults))?;
    write(&mut file, bytes, faults)?;
    if let Some(old) = old {
        // Keep the old file's permissions where allowed; a refusal is not an error.
        let _ = file.set_permissions(old.permissions());
    }
    step(faults, Call::Sync, "sync", || file.sync_all())?;
    step(faults, Call::Rename, "rename", || fs::rename(&partial.path, &target))?;
    partial.done();
    Ok(())
}

/// The identity of a file, whatever the spelling of its path, a link, or a second name in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
    /// The name of a file that does not exist yet, in the folder that the numbers identify.
    new: Option<OsString>,
}

/// The identity of the file at `path`; `None` if neither the file nor its folder exists.
pub fn identity(path: impl AsRef<Path>) -> Option<Identity> {
    let path = path.as_ref();
    if let Ok(there) = fs::metadata(path) {
        return Some(Identity { device: there.dev(), inode: there.ino(), new: None });
    }
    let target = target(path).ok()?;
    let folder = target.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    let (folder, name) = (fs::metadata(folder).ok()?, target.file_name()?.to_owned());
    Some(Identity { device: folder.dev(), inode: folder.ino(), new: Some(name) })
}

/// The path after following links; the file may not exist yet.
fn target(path: &Path) -> io::Result<PathBuf> {
    if let Ok(there) = fs::canonicalize(path) {
        return Ok(there);
    }
    // It does not exist: a new name, or a dangling link.
    let Ok(end) = fs::read_link(path) else {
        return Ok(path.to_owned());
    };
    // A relative target starts in the link's folder.
    let end = path.parent().unwrap_or(Path::new("")).join(end);
    if end.is_symlink() {
        return Err(io::Error::from_raw_os_error(libc::ELOOP));
    }
    Ok(end)
}

fn write(file: &mut File, bytes: &[u8], faults: &dyn Faults) -> Step<()> {
    for part in bytes.chunks(PART) {
        step(faults, Call::Write, "write", || file.write_all(part))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Inject, NoFaults};
    use super::*;

    /// A directory of one test, removed at its end.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("forebay-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Directory(path)
        }

        fn names(&self) -> Vec<String> {
            let name = |e: io::Result<fs::DirEntry>| e.unwrap().file_name().into_string().unwrap();
            fs::read_dir(&self.0).unwrap().map(name).collect()
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_content_is_replaced_as_a_whole() {
        let directory = Directory::new("whole");
        let (path, link) = (directory.0.join("a"), directory.0.join("link"));
        let long = vec![7; 2 * PART + 1];
        write_whole(&path, &long, &NoFaults).unwrap();
        assert_eq!(fs::read(&path).unwrap(), long);
        std::os::unix::fs::symlink("a", &link).unwrap();
        write_whole(&link, b"short", &NoFaults).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"short");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(directory.names().len(), 2);
    }

    #[test]
    fn the_file_that_a_link_misses_is_created_and_the_link_stays() {
        let directory = Directory::new("dangling");
        let name = |name: &str| directory.0.join(name);
        fs::create_dir(name("under")).unwrap();
        std::os::unix::fs::symlink("under/a", name("link")).unwrap();
        std::os::unix::fs::symlink("link", name("twice")).unwrap();
        std::os::unix::fs::symlink("round", name("round")).unwrap();
        for refused in ["twice", "round"] {
            let e = write_whole(name(refused), b"bytes", &NoFaults).unwrap_err();
            assert!(e.place().ends_with("follow link: Too many levels of symbolic links"), "{e}");
        }
        write_whole(name("link"), b"bytes", &NoFaults).unwrap();
        assert_eq!(fs::read(name("under/a")).unwrap(), b"bytes");
        for link in ["link", "twice", "round"] {
            assert!(name(link).is_symlink());
        }
        assert_eq!(directory.names().len(), 4);
    }

    #[test]
    fn a_failure_at_any_step_leaves_the_old_content_alone() {
        let directory = Directory::new("full");
        let (old, new) = (directory.0.join("old"), directory.0.join("new"));
        fs::write(&old, b"before").unwrap();
        let long = vec![7; 2 * PART + 1];
        let counted = Inject::nth(u64::MAX, 0);
        write_whole(&new, &long, &counted).unwrap();
        fs::remove_file(&new).unwrap();
        assert_eq!(counted.count(), 8, "create, folder, lock, three writes, sync, rename");
        for n in 0..counted.count() {
            if [1, 2].contains(&n) {
                write_whole(&new, &long, &Inject::nth(n, libc::ENOLCK)).unwrap();
                assert_eq!(fs::read(&new).unwrap(), long, "a folder not swept, a file not locked");
                fs::remove_file(&new).unwrap();
                continue;
            }
            for path in [&old, &new] {
                let e = write_whole(path, &long, &Inject::nth(n, libc::ENOSPC)).unwrap_err();
                assert_eq!(e.kind(), Kind::Io);
                assert!(e.place().starts_with(path.to_str().unwrap()), "{e}");
                assert!(e.place().ends_with(": No space left on device"), "{e}");
            }
            assert_eq!(fs::read(&old).unwrap(), b"before");
            assert_eq!(directory.names(), ["old"], "step {n}");
        }
    }

    #[test]
    fn a_name_is_as_long_as_the_system_allows() {
        let directory = Directory::new("long");
        let longest = "é".repeat(127) + "a";
        assert_eq!(longest.len(), 255);
        write_whole(directory.0.join(&longest), b"bytes", &NoFaults).unwrap();
        assert_eq!(directory.names(), std::slice::from_ref(&longest));
        let e = write_whole(directory.0.join(longest + "b"), b"bytes", &NoFaults).unwrap_err();
        assert!(e.place().ends_with("rename: File name too long") && e.place().len() < 300, "{e}");
        assert_eq!(directory.names().len(), 1);
    }

    #[test]
    fn one_file_is_the_same_by_every_name() {
        let directory = Directory::new("identity");
        let name = |name: &str| directory.0.join(name);
        fs::create_dir(name("under")).unwrap();
        fs::write(name("a"), "").unwrap();
        fs::hard_link(name("a"), name("b")).unwrap();
        std::os::unix::fs::symlink("a", name("link")).unwrap();
        std::os::unix::fs::symlink("under/new", name("dangling")).unwrap();
        for (one, other) in [("a", "b"), ("a", "link"), ("a", "under/../a"), ("dangling", "under/new")] {
            assert!(identity(name(one)).is_some());
            assert_eq!(identity(name(one)), identity(name(other)), "{one} {other}");
        }
        for (one, other) in [("a", "new"), ("new", "under/new"), ("new", "newer"), ("under", "under/new")] {
            assert_ne!(identity(name(one)), identity(name(other)), "{one} {other}");
        }
        assert_eq!(identity(name("none/a")), None);
        assert_eq!(identity("new-here"), identity("./new-here"));
    }

    #[test]
    fn a_device_is_written_and_not_replaced() {
        write_whole("/dev/null", b"bytes", &NoFaults).unwrap();
        let e = write_whole("/dev/full", b"bytes", &NoFaults).unwrap_err();
        assert_eq!((e.kind(), e.place()), (Kind::Io, "/dev/full: write: No space left on device"));
        for device in ["/dev/null", "/dev/full"] {
            assert!(!fs::metadata(device).unwrap().is_file());
        }
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let directory = Directory::new("place");
        let path = directory.0.join("none/a");
        let e = write_whole(&path, b"", &NoFaults).unwrap_err();
        assert!(e.place().ends_with("create temporary file: No such file or directory"), "{e}");
        let e = write_whole(&directory.0, b"", &NoFaults).unwrap_err();
        assert!(e.place().ends_with("open: Is a directory"), "{e}");
    }
}
