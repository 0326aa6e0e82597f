//! The page about embedding shows programs that run: here those in C and C++, built against the installed header's
//! source and the shared library. `tests/integration.rs` has the Rust one, the Python package's tests theirs.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "support/gcc.rs"]
mod gcc;
