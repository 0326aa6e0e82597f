//! The cost of a layer's experts on another number of GPUs than that of the measured costs.
//!
//! Each GPU runs attention for its own sequences, so only two works depend on the number of GPUs: the
//! rest of a layer, which contains the routed experts, and the exchange of their tokens. Each is the measured
//! cost plus the *difference* of a bound between the two numbers of GPUs:
//!
//! - **Experts.** Of `E` experts on `G` GPUs each GPU holds `E/G`. A micro-batch of `t` tokens on each GPU visits a
//!   fraction `1 - exp(-t G k/E)` of them. Their time is the longer of `2 t k` expert sizes over the operations a
//!   second, and of the visited experts' weights over the memory's bytes per second. Fewer GPUs read more weights.
//! - **Exchange.** A token's values go to `k` experts in FP8 and come back in BF16; `1 - n/G` of them cross the
//!   network, `(n-1)/G` cross NVLink inside the node of `n`, both at once.
//!
//! The result is marked as *extrapolated*. Cases that the model cannot price are refused: experts that do not divide
//! evenly, a partly filled node, a number of GPUs too far from that of the costs. The planner checks whether the
//! weights fit, because it has the GPU's memory and its other contents. The model ignores experts that are visited
//! unevenly or stored twice, and launches and waits between GPUs that grow with their number. `docs/simulator.md`
//! compares it with published times.

use super::cost::Load;
use super::setup::{Setup, Term};
use crate::error::{Error, Kind, Result};

/// The largest factor between the number of GPUs and that of the costs, in either direction.
pub const FARTHEST: u32 = 4;

fn unpriced(place: String, hint: &'static str) -> Error {
    Error::new(Kind::OutOfRange, "price GPUs").at(place).hint(hint)
}

impl Setup {
    /// Checks that the model can price the GPUs of this setup.
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
                "the costs are of {own}, and can be extrapolated to {fewest} to {}",
                own.saturating_mul(FARTHEST)
            );
            return Err(unpriced(place(why), "use a number of GPUs in this range, or measure costs there"));
        }
        if !experts.is_multiple_of(gpus) {
            let why = format!("{experts} experts do not divide among them");
            return Err(unpriced(place(why), "use a number of GPUs that divides the experts"));
        }
        let node = self.file().deployment.node_gpus;
        if gpus > node && !gpus.is_multiple_of(node) {
            let why = format!("not a multiple of a node's {node}");
            return Err(unpriced(place(why), "use whole nodes, or a part of one"));
        }
        if self.file().deployment.nvlink_gb_s.is_none() {
            let why = "deployment.nvlink_gb_s is missing, but the exchange inside a node needs it".to_owned();
            return Err(unpriced(place(why), "set it in the setup: docs/setup-format.md"));
        }
        Ok(())
    }

    /// The cost of a term on this setup's GPUs, given its cost `us` on the GPUs of the measured costs.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if the bound would remove more than the whole cost: it is too high for it.
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
                "{} GPUs: costs.{} at {tokens} tokens is {us:.1} us, but {:.1} us of it would be removed",
                self.served().gpus,
                term.name(),
                -more
            );
            return Err(unpriced(
                place,
                "correct the GPU's shares: with these the experts take longer than measured",
            ));
        }
        Ok(us + more)
    }
}
