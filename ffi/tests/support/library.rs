//! The library as a program outside this tree gets it: installed by the script that `make install` runs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The folder for builds that differ from the running one.
pub fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("c-tests")
}

/// The prefix of an installation, built with optimisation as shipped, once per test program.
pub fn installed() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = target().join("installed");
        succeed(install(&prefix));
        prefix
    })
}

/// The command that installs into `prefix`. The shipped build may exist already, next to the running build: cargo has
/// the folder of temporary files there.
pub fn install(prefix: &Path) -> Command {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut install = Command::new(root().join("ci/ffi-install"));
    install.arg(prefix).env("CARGO_TARGET_DIR", built).env("CARGO_NET_OFFLINE", "true");
    install
}

/// Runs a command that must succeed; returns its standard output.
pub fn succeed(mut command: Command) -> String {
    let ended = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{command:?}\n{out}{err}");
    out.into_owned()
}
