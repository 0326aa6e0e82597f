//! What checks schedules in tests: whether everything that touches the same is ordered, whatever the timing.
//!
//! [`order`] knows streams, events and ranges; [`watch`] is a device around a device that tells it what each operation
//! touches. No cache or step uses them, no feature of the library implies `check`, and a program that serves has no use
//! for either. An engine's own tests have: they find the edge that its schedule lacks.

pub mod order;
pub mod watch;
