//! Tests of the stand-in driver against the documented behaviour of the real one: order, captures, memory, failures.
//!
//! Every test that needs a seed has a control in which the tested property fails.

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
