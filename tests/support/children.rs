//! Processes of a test, which are killed or end with it.

use std::process::Child;

use nix::sys::signal::{Signal, raise};

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
