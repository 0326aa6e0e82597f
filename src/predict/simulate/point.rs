//! What is simulated: an operating point, and the options of a step there, with their checks against a setup.

use crate::error::{Error, Kind, Result};
use crate::overlap::Overlap;
use crate::predict::misses::Misses;
use crate::predict::outside;
use crate::predict::setup::Setup;
use crate::weights::Plan;

/// The most requests and query rows of a simulated step.
const BATCH_MAX: u32 = 1 << 14;
const MTP_MAX: u32 = 64;

/// An operating point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Tokens of context of each request.
    pub context: u32,
    /// Requests of one GPU.
    pub batch: u32,
    /// Query rows of a step: 1 is no drafts.
    pub mtp: u32,
    /// Tokens that a step yields for each request, 1 to `mtp`.
    pub accept: f64,
    /// Slots over context, above 0; at 1 nothing is missed.
    pub ratio: f64,
}

impl Point {
    /// Checks that the point can be simulated on `setup`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the field, or says that attention is dense; [`Kind::OutOfRange`] for a larger
    /// batch than the simulator supports.
    pub fn check(&self, setup: &Setup) -> Result<()> {
        if setup.is_dense() {
            return Err(bad("model: dense attention selects nothing; the simulator needs a top-k"));
        }
        let most = setup.dims().context_max;
        if self.context == 0 || self.context > most {
            let hint = "the context may be at most the model's longest";
            return Err(bad("context").with("tokens", self.context).with("most", most).hint(hint));
        }
        if self.batch == 0 {
            return Err(bad("batch").with("requests", 0_u32).with("most", BATCH_MAX));
        }
        if self.batch > BATCH_MAX {
            let hint = "use a smaller batch";
            return Err(outside("batch").with("requests", self.batch).with("most", BATCH_MAX).hint(hint));
        }
        if self.mtp == 0 || self.mtp > MTP_MAX {
            return Err(bad("mtp").with("query_rows", self.mtp).with("most", MTP_MAX));
        }
        if !(1.0..=f64::from(self.mtp)).contains(&self.accept) {
            return Err(bad(format!("accept: {} is not from 1 to mtp", self.accept)));
        }
        if !(self.ratio.is_finite() && self.ratio > 0.0) {
            return Err(bad(format!("ratio: {} is not above 0", self.ratio)));
        }
        Ok(())
    }
}

/// The choice of each layer's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Order {
    /// For each layer the order of least time.
    #[default]
    ByLayer,
    /// The same order for all layers. With [`Overlap::Ahead`] layers that select for themselves run in DA.
    All(Overlap),
    /// A given order for each layer, draft layers last.
    Table(Vec<Overlap>),
}

/// Other traffic on the link during the step: warm-up, transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Host to device, bytes per second.
    pub to_device: f64,
    /// Device to host, bytes per second.
    pub to_host: f64,
}

impl Traffic {
    pub(super) fn check(&self, setup: &Setup) -> Result<()> {
        let rates = setup.rates();
        for (name, rate, most) in
            [("to_device", self.to_device, rates.copy_up), ("to_host", self.to_host, rates.copy_down)]
        {
            if !(0.0..=most).contains(&rate) {
                return Err(bad(format!(
                    "traffic.{name}: {rate} bytes a second, but the link copies {most}"
                )));
            }
        }
        Ok(())
    }
}

/// The options of a simulated step.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The choice of each layer's order.
    pub order: Order,
    /// Two micro-batches; none for the setup's rule.
    pub two_batch: Option<bool>,
    /// Gives each micro-batch a compute stream of its own.
    pub fill: bool,
    /// Other traffic on the link.
    pub traffic: Traffic,
    /// Misses that replace the setup's.
    pub misses: Option<Misses>,
    /// The step of a replay's misses.
    pub step: u32,
    /// Weights that are pulled before they are used, seen from one rank; none if all are resident. The plan's layers
    /// are the setup's, with its draft layers if steps have drafts.
    pub sharded: Option<Plan>,
    /// Keeps the spans.
    pub spans: bool,
}

/// The error for a field of a point or of options that cannot be simulated.
pub(super) fn bad(place: impl Into<String>) -> Error {
    Error::new(Kind::InvalidConfig, "simulate").at(place.into())
}
