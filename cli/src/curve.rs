//! A selection trace at every size at once: each layer's depths, counted in one pass.
//!
//! The steps are those of a replay: warm-up, then groups of query rows with every draft accepted. No pool
//! is built. Layers are taken one after the other, because what one of them needs fits into a cache.

use forebay::Result;
use forebay::study::{MissRatioCurve, StackDistances};
use forebay::trace::{Header, SelectionTrace};

use crate::pools::Setting;

/// The curves of a trace's layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Curves {
    /// By layer.
    pub layers: Vec<MissRatioCurve>,
}

impl Curves {
    /// Hits and misses of all layers together, each with `slots`.
    pub fn total(&self, slots: u32) -> (u64, u64) {
        self.layers
            .iter()
            .fold((0, 0), |(hits, misses), curve| (hits + curve.hits(slots), misses + curve.misses(slots)))
    }

    /// The smallest size that the curves of all layers are exact for.
    pub fn exact_from(&self) -> u32 {
        self.layers.iter().map(MissRatioCurve::exact_from).max().unwrap_or(1)
    }

    /// The smallest size beyond which no layer misses less.
    pub fn flat_from(&self) -> u32 {
        self.layers.iter().map(MissRatioCurve::flat_from).max().unwrap_or(0)
    }
}

/// Bytes that the depths of a layer hold for each token, and each layer's curve.
const DEPTHS: u64 = 48;
const CURVE: u64 = 8;

/// Bytes that [`curves`] holds, and what it returns.
pub fn bytes(header: &Header, setting: Setting) -> u64 {
    let tokens = u64::from(header.decode_start) + u64::from(setting.steps) * u64::from(setting.mtp);
    tokens * (DEPTHS + CURVE * u64::from(header.layers))
}

/// Counts the depths of every layer's steps as `setting` says, whatever its slots. Calls `progress` after
/// every layer.
///
/// # Errors
/// [`forebay::Kind::OutOfMemory`]; anything else is a defect.
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
