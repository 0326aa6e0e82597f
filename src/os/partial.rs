//! Temporary files in the same folder as the files that they will become.
//!
//! The temporary name is short, so that a target's name may be as long as the system allows. The writer holds a lock
//! on its file (`flock`), which the system releases however the process ends. So a file that can be locked belongs to
//! a dead process, and the next write into the folder removes it. On a file system without locks the name shows that,
//! and such files are left alone. On a network file system whose locks do not reach other machines, two machines must
//! not write into one folder at once: one could remove the other's file and make its write fail.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{Call, Faults};
use crate::sync::unique;

/// The number of names to try.
const NAMES: u32 = 64;
/// The most names of a folder that are examined for files of dead processes.
const SWEPT: usize = 100_000;
/// The beginning of temporary names.
const BEGIN: &str = ".forebay-";
/// The end of the name of a file whose writer holds a lock.
const LOCKED: &str = ".partial";
/// The end of the name on a file system without locks.
const UNLOCKED: &str = ".unlocked";

/// A temporary file. Dropping it before its rename removes it.
pub(super) struct Partial {
    pub(super) path: PathBuf,
    done: bool,
}

impl Partial {
    /// Creates it in the target's folder, so that the rename is atomic. First removes files of dead processes there.
    pub(super) fn beside(target: &Path, faults: &dyn Faults) -> io::Result<(File, Partial)> {
        if target.file_name().is_none() {
            return Err(io::Error::from_raw_os_error(libc::EISDIR));
        }
        if faults.before(Call::OpenFolder).is_none() {
            sweep(target.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new(".")));
        }
        let (mut tries, mut end) = (0, LOCKED);
        loop {
            // Never use a name twice: after another process has removed the file, a drop must not remove the next
            // file of that name.
            let path = target.with_file_name(format!("{BEGIN}{}-{}{end}", std::process::id(), unique()));
            let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && tries < NAMES => {
                    tries += 1;
                    continue;
                }
                Err(e) => return Err(e),
            };
            let partial = Partial { path, done: false };
            match lock(&file, faults) {
                // Between creation and lock, another process may have removed it as a dead process's file.
                Some(true) if end == LOCKED && file.metadata()?.nlink() == 0 && tries < NAMES => {
                    partial.done();
                    tries += 1;
                }
                Some(false) if end == LOCKED && tries < NAMES => {
                    partial.done();
                    tries += 1;
                }
                None if end == LOCKED => end = UNLOCKED,
                _ => return Ok((file, partial)),
            }
        }
    }

    /// Marks the file as renamed.
    pub(super) fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.done {
            // If even this fails, nothing can be done; the error in progress names the first failure.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether the lock was taken; `None` on a file system without locks.
fn lock(file: &File, faults: &dyn Faults) -> Option<bool> {
    if faults.before(Call::LockFile).is_some() {
        return None;
    }
    match file.try_lock() {
        Ok(()) => Some(true),
        Err(fs::TryLockError::WouldBlock) => Some(false),
        Err(fs::TryLockError::Error(_)) => None,
    }
}

/// Whether the name is that of a temporary file with a lock.
fn is_locked(name: &OsStr) -> bool {
    let middle =
        name.to_str().and_then(|name| name.strip_prefix(BEGIN)?.strip_suffix(LOCKED)?.split_once('-'));
    let number = |text: &str| text.parse::<u32>().is_ok();
    middle.is_some_and(|(process, count)| number(process) && number(count))
}

/// Removes the files of dead processes in the folder. Failures are ignored.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().take(SWEPT).flatten() {
        if is_locked(&entry.file_name()) {
            let _ = remove_dead(&entry.path());
        }
    }
}

/// Removes the file if its lock is free.
fn remove_dead(path: &Path) -> io::Result<()> {
    // Some network file systems lock only files that are open for writing.
    let open = |write| {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        OpenOptions::new().read(true).write(write).custom_flags(flags).open(path)
    };
    let file = open(true).or_else(|_| open(false))?;
    file.try_lock()?;
    // Its writer may have finished before we took the lock: then the name is gone, or names another file.
    let (held, there) = (file.metadata()?, fs::symlink_metadata(path)?);
    if held.is_file() && (held.dev(), held.ino()) == (there.dev(), there.ino()) {
        fs::remove_file(path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::NoFaults;
    use super::*;

    #[test]
    fn only_our_names_are_considered() {
        for name in [".forebay-1-0.partial", ".forebay-4294967295-64.partial"] {
            assert!(is_locked(OsStr::new(name)), "{name}");
        }
        for name in
            [".forebay-1-0.unlocked", ".forebay-1.partial", ".forebay-a-0.partial", ".x.1.0.partial", "a"]
        {
            assert!(!is_locked(OsStr::new(name)), "{name}");
        }
    }

    #[test]
    fn files_of_a_dead_process_are_removed_and_those_of_a_living_one_stay() {
        let folder = std::env::temp_dir().join(format!("forebay-{}-partials", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let name = |name: &str| folder.join(name);
        // A process id of ours may have been another process's before a restart: only the lock counts.
        let dead = [".forebay-1-0.partial".to_owned(), format!(".forebay-{}-7.partial", std::process::id())];
        let foreign = [".a.1.0.partial", ".forebay-1-0.unlocked", "data"];
        for file in dead.iter().map(String::as_str).chain(foreign) {
            fs::write(name(file), "left").unwrap();
        }
        std::os::unix::fs::symlink("data", name(".forebay-2-0.partial")).unwrap();
        fs::create_dir(name(".forebay-3-0.partial")).unwrap();
        let (alive, partial) = Partial::beside(&name("one"), &NoFaults).unwrap();
        let (second, other) = Partial::beside(&name("one"), &NoFaults).unwrap();
        assert!(dead.iter().all(|file| !name(file).exists()));
        for file in foreign.into_iter().chain([".forebay-2-0.partial", ".forebay-3-0.partial"]) {
            assert!(name(file).exists(), "{file}");
        }
        assert!(partial.path.exists() && other.path.exists() && partial.path != other.path);
        // The control: without the lock the file counts as a dead process's.
        alive.unlock().unwrap();
        sweep(&folder);
        assert!(!partial.path.exists() && other.path.exists());
        drop((alive, partial, second, other));
        fs::remove_dir_all(&folder).unwrap();
    }
}
