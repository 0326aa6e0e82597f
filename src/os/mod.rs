//! Host memory.
