//! The host time of enqueueing a step, and whether the device waits for it.
//!
//! The host prepares and enqueues a step while the device runs the previous one, and retires it afterwards. So a step
//! takes the longer of its time on the device and its time on one core of the host. A captured step is one launch,
//! for any number of layers and micro-batches; otherwise each layer's operations and edges are driver calls, for
//! each micro-batch. Only forebay's calls are counted. An engine's own launches, dozens in an uncaptured layer, are
//! additional.

use super::batch::{Batch, draft_passes};
use crate::device::rates::HostCosts;
use crate::overlap::Overlap;
use crate::predict::setup::Setup;

/// Microseconds of one core for a step of all micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostTime {
    /// With captured layers.
    pub captured_us: f64,
    /// With layers enqueued one by one.
    pub uncaptured_us: f64,
}

/// The side that limits a step.
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
    /// Its name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Device => "device",
            Bound::HostUnlessCaptured => "host-unless-captured",
            Bound::Host => "host",
        }
    }
}

/// Operations and edges of a layer of one micro-batch with one attention wave: see [`crate::overlap::Schedule`]. An
/// edge is a record and a wait. In an index group a wait without a record of its own counts as one, a record without a
/// wait as none.
const fn calls(order: Overlap, selects: bool) -> (f64, f64) {
    match order {
        // R, G, S; S after P.
        Overlap::None if selects => (3.0, 1.0),
        Overlap::None => (2.0, 1.0),
        // R after top-k, G and A0 after R, A1 after G, S after P.
        Overlap::Da if selects => (3.0, 5.0),
        // R and G of each half, the second R after the second half's top-k.
        Overlap::Dba if selects => (5.0, 7.0),
        // G after the R of another layer, A or A1 after G, S after P.
        Overlap::Da | Overlap::Dba | Overlap::Ahead => (2.0, 3.0),
    }
}

impl HostTime {
    /// The host time of a step whose layers, draft layers with a pass last, run in these orders.
    pub(super) fn of(setup: &Setup, batch: &Batch, overlap: &[Overlap]) -> HostTime {
        let HostCosts { step_us, row_us, operation_us, edge_us } = setup.host();
        let (micro_batches, rows) = (batch.micro_batches() as f64, batch.rows.iter().sum::<u32>());
        let apart_us = step_us * micro_batches + row_us * f64::from(rows);
        let once = setup.shape().layers as usize;
        let layer = |(index, order): (usize, &Overlap)| {
            let times = if index < once { 1.0 } else { f64::from(draft_passes(batch)) };
            let layer = index as u32;
            let (operations, edges) = calls(*order, setup.shape().group_of(layer).0 == layer);
            times * (operations * operation_us + edges * edge_us)
        };
        let layers_us: f64 = overlap.iter().enumerate().map(layer).sum();
        HostTime { captured_us: apart_us + operation_us, uncaptured_us: apart_us + micro_batches * layers_us }
    }

    /// The side that limits a step of `step_ms` on the device.
    pub fn bound(&self, step_ms: f64) -> Bound {
        let longer = |us: f64| us > step_ms * 1e3;
        match (longer(self.captured_us), longer(self.uncaptured_us)) {
            (true, _) => Bound::Host,
            (false, true) => Bound::HostUnlessCaptured,
            (false, false) => Bound::Device,
        }
    }
}
