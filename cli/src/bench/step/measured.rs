//! The measurements at an operating point.

use forebay::overlap::Overlap;

use super::interference::Layered;
use super::machine::Took;
use super::point::Point;

/// The steps of one order.
#[derive(Debug)]
pub struct Ordered {
    pub order: Overlap,
    pub missing: Vec<Took>,
    pub resident: Vec<Took>,
}

/// The measurements at one point.
#[derive(Debug)]
pub struct Measured {
    pub point: Point,
    /// The engine alone, with the host's time of its launch.
    pub alone: Vec<(f64, f64)>,
    pub orders: Vec<Ordered>,
    /// Steps whose layers were enqueued call by call, with an engine that only selects.
    pub calls: Vec<Took>,
    pub selecting: Selecting,
    pub beside: Vec<Layered>,
    /// By order, the simulator's exposed time of a layer in microseconds.
    pub predicted: Option<Vec<(Overlap, f64)>>,
    /// Comparisons with the rule during the measurements.
    pub checked: u64,
    pub captured: bool,
    /// The requested sequences; the point has fewer if no more fit on the device.
    pub asked: u32,
    /// Different prompts of all sequences, and the bytes of the total pool.
    pub prompts: u32,
    pub pool: u64,
    /// As [`Asked::persistent`].
    pub persistent: Option<u32>,
}

/// Times with an engine that only selects.
#[derive(Debug)]
pub struct Selecting {
    /// Resident steps in the order none.
    pub steps: Vec<Took>,
    /// The engine alone, microseconds.
    pub alone: Vec<f64>,
    /// As many empty operations as forebay has, one after the other, in microseconds.
    pub empty_us: f64,
}
