//! What enqueueing a step takes of the host, and whether the device waits for it.
//!
//! The host prepares and enqueues a step while the device runs the last one, and retires it behind that. So a step
//! takes the longer of its time on the device and its time on the host's one core. A captured step is one launch,
//! whatever its layers and micro-batches; otherwise each layer's operations and edges are calls of the driver's, of
//! each micro-batch.
//! Only what forebay calls is counted: an engine's own launches, of which an uncaptured layer has dozens, come on top.

use super::world::{Batch, draft_passes};
use crate::device::rates::HostCosts;
use crate::overlap::Overlap;
use crate::predict::setup::Setup;

/// Microseconds of one core for a step of all micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostTime {
    /// Its layers captured.
    pub captured_us: f64,
    /// Its layers enqueued one by one.
    pub uncaptured_us: f64,
}

/// What a step waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The device, captured or not.
    Device,
    /// The host, unless the step is captured.
    HostUnlessCaptured,
    /// The host, captured or not.
    Host,
}

impl Bound {
    /// As JSON has it.
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Device => "device",
            Bound::HostUnlessCaptured => "host-unless-captured",
            Bound::Host => "host",
        }
    }
}

/// Operations and edges of a layer of one micro-batch, one wave of attention: see [`crate::overlap::Schedule`].
const fn calls(order: Overlap) -> (f64, f64) {
    match order {
        // R, G, S; S behind P.
        Overlap::None => (3.0, 1.0),
        // R behind top-k, G and A0 behind R, A1 behind G, S behind P.
        Overlap::Da => (3.0, 5.0),
        // R and G of each half, the second R behind the second half's top-k.
        Overlap::Dba => (5.0, 7.0),
    }
}

impl HostTime {
    /// Of a step whose layers, draft layers last where they have a pass, run in these orders.
    pub(super) fn of(setup: &Setup, batch: &Batch, overlap: &[Overlap]) -> HostTime {
        let HostCosts { step_us, row_us, operation_us, edge_us } = setup.host();
        let (micro_batches, rows) = (batch.micro_batches() as f64, batch.rows.iter().sum::<u32>());
        let apart_us = step_us * micro_batches + row_us * f64::from(rows);
        let once = setup.shape().layers as usize;
        let layer = |(index, order): (usize, &Overlap)| {
            let times = if index < once { 1.0 } else { f64::from(draft_passes(batch)) };
            let (operations, edges) = calls(*order);
            times * (operations * operation_us + edges * edge_us)
        };
        let layers_us: f64 = overlap.iter().enumerate().map(layer).sum();
        HostTime { captured_us: apart_us + operation_us, uncaptured_us: apart_us + micro_batches * layers_us }
    }

    /// What a step of `step_ms` on the device waits for.
    pub fn bound(&self, step_ms: f64) -> Bound {
        let longer = |us: f64| us > step_ms * 1e3;
        match (longer(self.captured_us), longer(self.uncaptured_us)) {
            (true, _) => Bound::Host,
            (false, true) => Bound::HostUnlessCaptured,
            (false, false) => Bound::Device,
        }
    }
}
