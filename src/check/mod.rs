//! Checks of schedules for tests: whether all operations that touch the same memory are ordered, whatever the timing.
//!
//! [`order`] is the happens-before checker for streams, events and ranges. [`watch`] is a device that wraps another
//! one and reports to the checker what each operation touches. No cache or step uses them, no feature of the library
//! implies `check`, and a serving program does not need them. An engine's own tests do: they find an edge that the
//! engine's schedule lacks.

mod content;
pub mod order;
pub mod watch;
