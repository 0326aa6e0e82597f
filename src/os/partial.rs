//! Temporary files beside the files that they are to become.
//!
//! A name is short, so that a target's may be as long as the system allows. Whoever writes one holds a lock on it
//! (`flock`), which the system takes back however the process ends; so one that can be locked is a dead process's, and
//! the next write into the folder removes it. Where a file system has no locks a name says so, and is left alone. One
//! whose locks reach no other machine must not be written by two at once: the file of one could go, and its write fail.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{Call, Faults};
use crate::sync::unique;

/// How many names are tried.
const NAMES: u32 = 64;
/// How many names of a folder are looked at for those of dead processes.
const SWEPT: usize = 100_000;
/// What the names begin with.
const BEGIN: &str = ".forebay-";
/// How they end while their writer holds a lock.
const LOCKED: &str = ".partial";
/// How they end where there are no locks.
const UNLOCKED: &str = ".unlocked";

/// A temporary file, removed when it is dropped before it has taken its name.
pub(super) struct Partial {
    pub(super) path: PathBuf,
    done: bool,
}

impl Partial {
    /// Creates it in the target's folder, where a rename is one step. Removes those of dead processes there first.
    pub(super) fn beside(target: &Path, faults: &dyn Faults) -> io::Result<(File, Partial)> {
        if target.file_name().is_none() {
            return Err(io::Error::from_raw_os_error(libc::EISDIR));
        }
        if faults.before(Call::OpenFolder).is_none() {
            sweep(target.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new(".")));
        }
        let (mut tries, mut end) = (0, LOCKED);
        loop {
            // No name twice: who finds that another has removed its file must not remove the next one's.
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
                // Between creation and lock another process may have taken it for a dead one's and removed it.
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

    /// It has its name.
    pub(super) fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.done {
            // Nothing is left to do when even this fails; the error under way says what did first.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether the lock was taken; none where there are no locks.
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

/// Whether the name is one of a temporary file whose writer holds a lock.
fn is_locked(name: &OsStr) -> bool {
    let middle =
        name.to_str().and_then(|name| name.strip_prefix(BEGIN)?.strip_suffix(LOCKED)?.split_once('-'));
    let number = |text: &str| text.parse::<u32>().is_ok();
    middle.is_some_and(|(process, count)| number(process) && number(count))
}

/// Removes what dead processes left in the folder. What cannot be removed is no reason to fail.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().take(SWEPT).flatten() {
        if is_locked(&entry.file_name()) {
            let _ = remove_dead(&entry.path());
        }
    }
}

/// Removes the file if nobody holds its lock.
fn remove_dead(path: &Path) -> io::Result<()> {
    // Some file systems of a network lock only what is open to be written.
    let open = |write| {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        OpenOptions::new().read(true).write(write).custom_flags(flags).open(path)
    };
    let file = open(true).or_else(|_| open(false))?;
    file.try_lock()?;
    // Its writer may have ended well before the lock: then the name is gone, or another file's.
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
    fn only_names_of_ours_are_looked_at() {
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
    fn what_a_dead_process_left_goes_and_what_lives_stays() {
        let folder = std::env::temp_dir().join(format!("forebay-{}-partials", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let name = |name: &str| folder.join(name);
        // A number of ours may be another's before a restart: only the lock counts.
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
        // The control: without the lock it is taken for a dead one's.
        alive.unlock().unwrap();
        sweep(&folder);
        assert!(!partial.path.exists() && other.path.exists());
        drop((alive, partial, second, other));
        fs::remove_dir_all(&folder).unwrap();
    }
}
