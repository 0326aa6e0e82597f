//! What tools measure of a device: what it is, how long work took, and what it and its link give at best.
//!
//! A program that serves asks none of it, and no feature of the library implies `measure`: the command has it for
//! `forebay doctor` and `forebay bench`. [`Probe`] is the side of a device that can be measured. The host and the CUDA
//! device implement it beside what it looks into, `device/host/probe.rs` and `device/cuda/probe.rs`: streams, events
//! and contexts are theirs alone. [`Ceilings`] is measured through it.

mod ceilings;

pub use crate::device::probe::{Ability, Facts, GpuFacts, Mark, Probe};
pub use ceilings::{Ceilings, host_request};
