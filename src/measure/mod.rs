//! Measurements of a device for tools: its facts, the time of work, and the ceilings of the device and its link.
//!
//! A serving program uses none of it, and no feature of the library implies `measure`; `forebay doctor` and `forebay
//! bench` do. [`Probe`] is the trait of a device that can be measured. The host and CUDA devices implement it in
//! `device/host/probe.rs` and `device/cuda/probe.rs`, next to the streams, events and contexts that it needs.
//! [`Ceilings`] is measured through it.

mod ceilings;

pub use crate::device::probe::{Ability, Facts, GpuFacts, Mark, Probe};
pub use ceilings::{Ceilings, host_request};
