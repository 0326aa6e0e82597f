//! The stand-in driver against what the real one is known to do: order, captures, memory, failures.
//!
//! Every test that a seed is needed for has a control in which what it shows to be right goes wrong.

#[path = "driver/captures.rs"]
mod captures;
#[path = "driver/failures.rs"]
mod failures;
#[path = "driver/memory.rs"]
mod memory;
#[path = "driver/runs.rs"]
mod runs;
#[path = "../../tests/support/skip.rs"]
mod skip;
#[path = "driver/support.rs"]
mod support;
