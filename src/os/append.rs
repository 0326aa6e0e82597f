//! Files that grow by whole pieces: after any failure they end with the last piece that was written completely.
//!
//! A new file's name is in its folder, and the folder is synced separately. Some folders cannot be synced: an
//! unreadable folder cannot be opened, and some network file systems refuse. So the folder is synced where possible,
//! and only the file is required: once it is synced, [`Appender::sync`] succeeds.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::limit::unsignalled;
use super::{Call, Faults, io_text};
use crate::error::{Error, Kind, Result};
use crate::text::echo;

/// The operation's name in errors of this file.
const OPERATION: &str = "record";

/// A new file, written piece by piece at its end. After the first failure it is closed: the partial piece is cut off,
/// and every later call returns the same error.
pub struct Appender {
    file: File,
    path: PathBuf,
    /// The bytes of all complete pieces.
    length: u64,
    /// The folder, until the file's name has been synced in it.
    folder: Option<File>,
    failed: Option<Error>,
    faults: Arc<dyn Faults>,
}

impl Appender {
    /// Creates the file at `path`, which must not exist: nothing is ever overwritten.
    ///
    /// # Errors
    /// [`Kind::Io`] with the path and the system's reason.
    pub fn create(path: &Path, faults: Arc<dyn Faults>) -> Result<Appender> {
        // Open it now, because the meaning of a relative path changes with the working directory.
        let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        let folder = take(&*faults, Call::OpenFolder, || File::open(parent)).ok();
        let create = || OpenOptions::new().write(true).create_new(true).open(path);
        let file = take(&*faults, Call::CreateFile, create).map_err(|e| {
            let there = e.kind() == io::ErrorKind::AlreadyExists;
            let error = refused(path, "create", &e);
            if there { error.hint("name a new file; an existing one is never overwritten") } else { error }
        })?;
        Ok(Appender { file, path: path.to_owned(), length: 0, folder, failed: None, faults })
    }

    /// The bytes of all complete pieces.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The error of the call that failed, if one did.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Appends `parts` as one piece. Interrupted calls are repeated.
    ///
    /// # Errors
    /// [`Kind::Io`]; the file then ends where it did before.
    pub fn append(&mut self, parts: &[&[u8]]) -> Result<()> {
        self.check()?;
        let written =
            parts.iter().try_fold(0, |sum, part| self.write(part).map(|()| sum + part.len() as u64));
        match written {
            Ok(bytes) => self.length += bytes,
            Err(e) => {
                let error = refused(&self.path, "write", &e);
                let cut = take(&*self.faults, Call::Truncate, || self.file.set_len(self.length));
                return Err(self.fail(match cut {
                    Ok(()) => error.with("whole bytes", self.length),
                    Err(_) => error.with("whole bytes", self.length).hint(
                        "free space and cut the file to the whole bytes: its incomplete end could not be removed",
                    ),
                }));
            }
        }
        Ok(())
    }

    /// Syncs the file to disk, and the file's name where possible.
    ///
    /// # Errors
    /// [`Kind::Io`]; the content of the disk is then unknown.
    pub fn sync(&mut self) -> Result<()> {
        self.check()?;
        if let Err(e) = take(&*self.faults, Call::Sync, || self.file.sync_all()) {
            return Err(self.fail(refused(&self.path, "sync", &e)));
        }
        if let Some(folder) = &self.folder
            && take(&*self.faults, Call::SyncFolder, || folder.sync_all()).is_ok()
        {
            self.folder = None;
        }
        Ok(())
    }

    /// Removes the file, which holds nothing useful.
    pub fn remove(&self) {
        // If this fails, nothing can be done; the error in progress names the first failure.
        let _ = fs::remove_file(&self.path);
    }

    /// Closes the file with an error: every later call returns `error`, and so does this one.
    pub fn fail(&mut self, error: Error) -> Error {
        self.failed.insert(error).clone()
    }

    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let file = &mut self.file;
            let pass = || file.write(bytes.get(..self.faults.passes(bytes.len())).unwrap_or(bytes));
            match unsignalled(|| take(&*self.faults, Call::Write, pass)) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            }
        }
        Ok(())
    }
}

/// Makes a call unless a fault replaces it.
fn take<T>(faults: &dyn Faults, call: Call, take: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    match faults.before(call) {
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        None => take(),
    }
}

fn refused(path: &Path, step: &str, e: &io::Error) -> Error {
    Error::new(Kind::Io, OPERATION).at(format!("{}: {step}: {}", echo(path.display()), io_text(e)))
}

#[cfg(test)]
mod tests {
    use super::super::{Inject, NoFaults};
    use super::*;

    /// The path of a file that does not exist, and is removed at the end.
    struct Fresh(PathBuf);

    impl Fresh {
        fn new(name: &str) -> Fresh {
            Fresh(std::env::temp_dir().join(format!("forebay-{}-append-{name}", std::process::id())))
        }
    }

    impl Drop for Fresh {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    /// Three pieces, the second of two parts, and the file synced twice.
    fn scenario(path: &Path, faults: Arc<dyn Faults>) -> Result<()> {
        let mut file = Appender::create(path, faults)?;
        let written = file.append(&[b"one"]).and_then(|()| file.append(&[b"two", b"three"]));
        let ended = written.and_then(|()| file.sync()).and_then(|()| file.append(&[b"four"]));
        let ended = ended.and_then(|()| file.sync());
        assert_eq!(file.check(), ended);
        assert!(ended.is_ok() || file.append(&[b"more"]) == ended && file.sync() == ended);
        assert_eq!(file.length(), fs::metadata(path).unwrap().len());
        ended
    }

    #[test]
    fn a_failure_at_any_call_leaves_whole_pieces_and_is_final() {
        let path = Fresh::new("pieces");
        let counted = Arc::new(Inject::nth(u64::MAX, 0));
        scenario(&path.0, counted.clone()).unwrap();
        assert_eq!(fs::read(&path.0).unwrap(), b"onetwothreefour");
        assert_eq!(counted.count(), 9, "folder, create, three writes, file and folder, a write, the file");
        for n in 0..counted.count() {
            let _ = fs::remove_file(&path.0);
            let ended = scenario(&path.0, Arc::new(Inject::nth(n, libc::EIO)));
            if [0, 6].contains(&n) {
                assert_eq!(ended, Ok(()), "the folder is stored where it can be");
                continue;
            }
            let e = ended.unwrap_err();
            assert!(e.kind() == Kind::Io && e.place().ends_with("Input/output error"), "{e}");
            let left = fs::read(&path.0).unwrap_or_default();
            assert!([&b""[..], b"one", b"onetwothree", b"onetwothreefour"].contains(&&left[..]), "call {n}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_opened_or_stored_ends_nothing() {
        for (call, errno, calls) in
            [(Call::OpenFolder, libc::EACCES, 8), (Call::SyncFolder, libc::EINVAL, 10)]
        {
            let path = Fresh::new("folder");
            let faults = Arc::new(Inject::call(call, errno));
            assert_eq!(scenario(&path.0, faults.clone()), Ok(()));
            assert_eq!(faults.count(), calls, "one that was not stored is tried again");
            assert_eq!(fs::read(&path.0).unwrap(), b"onetwothreefour");
        }
    }

    #[test]
    fn an_existing_file_is_not_touched() {
        let path = Fresh::new("there");
        fs::write(&path.0, "dear").unwrap();
        let e = Appender::create(&path.0, Arc::new(NoFaults)).err().unwrap();
        assert!(e.to_string().contains("create: File exists; name a new file"), "{e}");
        assert_eq!(fs::read(&path.0).unwrap(), b"dear");
    }
}
