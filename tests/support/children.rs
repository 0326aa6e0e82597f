//! Processes of a test, which are killed or end with it.

use std::process::{Child, Command};

use nix::sys::signal::{Signal, raise};

/// Tells a process that it is the child of a test.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// Whether this process runs the test alone. If not, runs it in such a process.
pub fn alone_in_a_process(name: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let exe = std::env::current_exe().unwrap();
    let run = Command::new(exe).args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    let wrong = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && said.contains("1 passed"), "{said}{wrong}");
    false
}

pub fn die() {
    raise(Signal::SIGKILL).unwrap();
}

/// The ranks of a group as processes, which are gone when the test is.
pub struct Processes(pub Vec<Child>);

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
