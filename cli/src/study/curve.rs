//! Miss-ratio curves of a selection trace: one pass counts each layer's stack distances, which gives the misses at
//! every pool size.
//!
//! The steps are those of a replay: warm-up, then groups of query rows with every draft accepted. No pool is built.
//! Layers are processed one after the other, because the working set of one layer fits into a CPU cache.

use forebay::Result;
use forebay::study::{MissRatioCurve, StackDistances};
use forebay::trace::{Header, SelectionTrace};

use super::pools::Setting;

/// The miss-ratio curves of a trace's layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Curves {
    /// One curve for each layer.
    pub layers: Vec<MissRatioCurve>,
}

impl Curves {
    /// Hits and misses of all layers together if each has `slots`.
    pub fn total(&self, slots: u32) -> (u64, u64) {
        self.layers
            .iter()
            .fold((0, 0), |(hits, misses), curve| (hits + curve.hits(slots), misses + curve.misses(slots)))
    }

    /// The smallest size for which the curves of all layers are exact.
    pub fn exact_from(&self) -> u32 {
        self.layers.iter().map(MissRatioCurve::exact_from).max().unwrap_or(1)
    }

    /// The smallest size beyond which no layer has fewer misses.
    pub fn flat_from(&self) -> u32 {
        self.layers.iter().map(MissRatioCurve::flat_from).max().unwrap_or(0)
    }
}

/// Bytes for each token that the stack-distance counts of a layer hold, and bytes of each layer's curve.
const DEPTHS: u64 = 48;
const CURVE: u64 = 8;

/// The bytes that [`curves`] holds, including its result.
pub fn bytes(header: &Header, setting: Setting) -> u64 {
    let tokens = u64::from(header.decode_start) + u64::from(setting.steps) * u64::from(setting.mtp);
    tokens * (DEPTHS + CURVE * u64::from(header.layers))
}

/// Counts the stack distances of every layer's steps as `setting` says; its slots are ignored. Calls `progress` after
/// every layer.
///
/// # Errors
/// [`forebay::Kind::OutOfMemory`]; any other error is a defect.
pub fn curves(trace: &SelectionTrace, setting: Setting, mut progress: impl FnMut()) -> Result<Curves> {
    let Setting { warmup, mtp, steps, .. } = setting;
    let header = trace.header();
    let start = header.decode_start;
    let mut depths = StackDistances::new(start + steps * mtp, start)?;
    let (mut layers, mut union) = (Vec::new(), Vec::new());
    for layer in 0..header.layers {
        for step in header.warm_steps - warmup..header.warm_steps {
            depths.warm(trace.selection(step, layer));
        }
        for group in 0..steps {
            depths.commit(if group == 0 { 0 } else { mtp }, mtp)?;
            let first = header.warm_steps + group * mtp;
            if mtp == 1 {
                depths.resolve(trace.selection(first, layer));
                continue;
            }
            union.clear();
            (first..first + mtp).for_each(|step| union.extend_from_slice(trace.selection(step, layer)));
            depths.resolve(&union);
        }
        layers.push(depths.finish(start)?);
        progress();
    }
    Ok(Curves { layers })
}
