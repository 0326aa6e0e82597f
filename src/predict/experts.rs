//! What the experts of a layer cost on another number of GPUs than the costs are of.
//!
//! Attention runs on each GPU for its own sequences, so that only two works know how many GPUs there are: the
//! rest of a layer, where the routed experts are, and the exchange of their tokens. Both are the measured
//! cost and the *difference* of a bound on the two numbers of GPUs:
//!
//! - **Experts.** Of `E` experts on `G` GPUs each holds `E/G`. A micro-batch of `t` tokens on each GPU visits a share
//!   `1 - exp(-t G k/E)` of them. Their time is the longer of `2 t k` expert sizes over the operations a second,
//!   and of the visited experts' weights over the memory's bytes a second. Fewer GPUs read more weights.
//! - **Exchange.** A token's values go to `k` experts in FP8 and come back in BF16; `1 - n/G` of them cross the
//!   network, `(n-1)/G` cross NVLink inside the node of `n`, both at once.
//!
//! A number that comes out is *extrapolated*, and says so. What the model cannot price is refused: experts that
//! do not divide, a node that is only partly filled, GPUs too far from those that the costs are of. Whether the weights
//! fit is the planner's question: it knows the GPU's memory, and what is kept there. The model knows nothing of
//! experts that are visited unevenly or kept twice, nor of launches and waits between GPUs that grow with their
//! number. `docs/simulator.md` compares it with published times.

use super::cost::Load;
use super::setup::{Setup, Term};
use crate::error::{Error, Kind, Result};

/// So many times more, or fewer, GPUs than the costs are of are priced.
pub const FARTHEST: u32 = 4;

fn unpriced(place: String, hint: &'static str) -> Error {
    Error::new(Kind::OutOfRange, "price GPUs").at(place).hint(hint)
}

impl Setup {
    /// Whether the model can price the GPUs of this setup.
    pub(super) fn check_deployment(&self) -> Result<()> {
        let served = self.served();
        if !served.extrapolated {
            return Ok(());
        }
        let (gpus, own, experts) = (served.gpus, served.costs_gpus, self.dims().experts);
        let place = |why: String| format!("{gpus} GPUs: {why}");
        let fewest = own.div_ceil(FARTHEST);
        if gpus < fewest || gpus > own.saturating_mul(FARTHEST) {
            let why = format!(
                "the costs are of {own}, and are carried to {fewest} to {}",
                own.saturating_mul(FARTHEST)
            );
            return Err(unpriced(place(why), "name a number of GPUs in between, or take costs there"));
        }
        if !experts.is_multiple_of(gpus) {
            let why = format!("{experts} experts do not divide among them");
            return Err(unpriced(place(why), "name a number of GPUs that divides the experts"));
        }
        let node = self.file().deployment.node_gpus;
        if gpus > node && !gpus.is_multiple_of(node) {
            let why = format!("no whole nodes of {node}");
            return Err(unpriced(place(why), "name whole nodes, or a part of one"));
        }
        if self.file().deployment.nvlink_gb_s.is_none() {
            let why =
                "deployment.nvlink_gb_s is not there, and the exchange inside a node rests on it".to_owned();
            return Err(unpriced(place(why), "state it in the setup: docs/setup-format.md"));
        }
        Ok(())
    }

    /// The cost of a term on this setup's GPUs, of which `us` is the cost on those that the costs are of.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] where the cost is less than the part that goes: the bounds are too high for it.
    pub(super) fn elsewhere(&self, term: Term, load: &Load, us: f64) -> Result<f64> {
        let (here, there) = (self.roofline(), self.roofline_of_costs());
        let tokens = load.tokens();
        let more = match term {
            Term::Rest => here.routed(tokens) - there.routed(tokens),
            Term::Exchange => here.exchanged(tokens) - there.exchanged(tokens),
            _ => 0.0,
        };
        if us + more < 0.0 {
            let place = format!(
                "{} GPUs: costs.{} at {tokens} tokens is {us:.1} us, and {:.1} us of it would go",
                self.served().gpus,
                term.name(),
                -more
            );
            return Err(unpriced(
                place,
                "correct the GPU's shares, by which the experts take longer than measured",
            ));
        }
        Ok(us + more)
    }
}
