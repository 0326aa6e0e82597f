//! What a call did without, because the system refused an option that the memory is usable without.
//!
//! It is a value, not an error and not a log line: the embedder decides whether a server without huge pages or without
//! locked memory may start. Its texts are constants, so that reports and tests compare them.

use std::fmt;

/// An option that the system refused and the call did without. It displays as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The refused option: one of this type's constants.
    pub what: &'static str,
    /// The bytes concerned; for [`Fallback::NUMA_BINDING`] and [`Fallback::NODE_PROCESSORS`] the node.
    pub wanted: u64,
    /// The call and the system's reason.
    pub cause: String,
}

impl Fallback {
    /// The memory is on base pages; the system may merge them later.
    pub const HUGE_PAGES: &'static str = "huge pages";
    /// The thread runs on any processors.
    pub const NODE_PROCESSORS: &'static str = "processors of the node";
    /// The memory may be swapped out.
    pub const LOCKED_MEMORY: &'static str = "locked memory";
    /// The memory is on any node.
    pub const NUMA_BINDING: &'static str = "NUMA binding";
    /// The memory has no descriptor: no other process and no [`super::Range`] can map it.
    pub const SHARED_MEMORY: &'static str = "shared memory";
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if [Fallback::NUMA_BINDING, Fallback::NODE_PROCESSORS].contains(&self.what) {
            write!(f, "{} (wanted node {}): {}", self.what, self.wanted, self.cause)
        } else {
            write!(f, "{} (wanted {} bytes): {}", self.what, self.wanted, self.cause)
        }
    }
}
