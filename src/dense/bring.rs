//! Pages that come back layer by layer, beside the first step that reads them.
//!
//! A step computes its layers one after the other. With [`Config::bring_layers`](crate::dense::Config::bring_layers)
//! pages come back in the same order, some layers at a time, and the step waits before each layer for that layer
//! alone. So copies of later layers run while earlier ones compute. (SGLang does this in HiCache's layer-wise load.)
//!
//! Copies up are one line, with an event after each part (`line`). A sequence knows the batch that its pages come with,
//! or the copy of each part, if it arrived layer by layer (`arrive`). `prepare` notes the newest copies of the step's
//! rows instead of waiting for them; [`Cache::arrived`] waits for those of a part; [`Cache::finish`] refuses a step
//! that left a part out. Later steps of the same sequences come behind this one, and need no waits of their own.
//!
//! Batches come up one after the other. So of a step with several sequences that come back, the last one comes layer by
//! layer, and the step waits for all layers of the others before its first one.
//!
//! A wait costs one call of the device, or nothing if the host has seen the end of the copies.

use crate::dense::Cache;
use crate::device::Stream;
use crate::error::{Error, Kind, Result};
use crate::step::Step;

impl Cache {
    /// Makes `stream` wait until the pages of the step's sequences are on the device in `layer` and all layers before
    /// it. Call it before each layer's new rows are written, on the stream that computes the layer: the last page
    /// comes back whole, and would overwrite them. It costs nothing if no pages are coming back, and without
    /// [`Config::bring_layers`](crate::dense::Config::bring_layers), where [`Cache::prepare`] has waited for all
    /// layers.
    ///
    /// A graph that is being captured cannot wait for a copy outside of it. For a captured step call this for the last
    /// layer, before the graph is launched.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for an unknown layer and for another cache's step; [`Kind::InvalidState`] for a finished
    /// step. After an error of the device call it again.
    pub fn arrived(&mut self, step: &Step, layer: u32, stream: Stream) -> Result<()> {
        self.check_unfinished(step, "arrived")?;
        let layers = self.config.shape.layers() as u32;
        if layer >= layers {
            return Err(Error::new(Kind::OutOfRange, "arrived")
                .at("layer")
                .with("layer", layer)
                .with("layers", layers));
        }
        let (micro_batch, part) = (step.micro_batch.index(), self.config.part(layer));
        let arrivals = &mut self.arrivals[micro_batch];
        // Layers that arrived by themselves may have come in any order.
        let number = arrivals.numbers.iter().take(part as usize + 1).copied().max().unwrap_or(0);
        self.moves.up.wait(number, stream, &*self.device)?;
        arrivals.parts = arrivals.parts.max(part + 1);
        Ok(())
    }

    /// Checks that a step has waited for the pages of all layers. It does not ask whether they came in time without a
    /// wait: an engine that forgets to wait learns it in its first step.
    pub(super) fn check_arrived(&self, step: &Step) -> Result<()> {
        let (parts, waited) = (self.config.parts(), self.arrivals[step.micro_batch.index()].parts);
        if parts > 1 && waited < parts && !step.is_abandoned() {
            return Err(Error::new(Kind::InvalidState, "finish")
                .at("the step did not wait for the pages of all layers")
                .with("first layer", waited.saturating_mul(self.config.bring_layers))
                .hint("call arrived before each layer, or abandon the step"));
        }
        Ok(())
    }
}
