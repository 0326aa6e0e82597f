//! What was measured at an operating point.

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

/// What was measured at one point.
#[derive(Debug)]
pub struct Measured {
    pub point: Point,
    /// The engine alone, and what launching it took on the host.
    pub alone: Vec<(f64, f64)>,
    pub orders: Vec<Ordered>,
    /// Steps whose layers were enqueued call by call, for an engine that only selects.
    pub calls: Vec<Took>,
    pub selecting: Selecting,
    pub beside: Vec<Layered>,
    /// By order, what the simulator says that a layer exposes, microseconds.
    pub predicted: Option<Vec<(Overlap, f64)>>,
    /// What was compared with the rule meanwhile.
    pub checked: u64,
    pub captured: bool,
    /// Sequences that were asked for; the point has fewer where no more fit the device.
    pub asked: u32,
    /// Different prompts of all sequences, and the bytes of the total pool.
    pub prompts: u32,
    pub pool: u64,
    /// As [`Asked::persistent`].
    pub persistent: Option<u32>,
}

/// Of an engine that only selects.
#[derive(Debug)]
pub struct Selecting {
    /// Resident steps in the order none.
    pub steps: Vec<Took>,
    /// The engine alone, microseconds.
    pub alone: Vec<f64>,
    /// As many operations that do nothing as forebay has, behind each other, microseconds.
    pub empty_us: f64,
}
