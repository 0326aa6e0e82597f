//! `--prefetch inter-layer`: counts what a prefetch would cover that fetches, before a layer's selection is known, the
//! rows that the preceding layer selected.
//!
//! In each decode step, before a layer resolves, the prefetch fetches the rows that the neighbour selected in this
//! step and that are not resident in the layer. They go into a buffer of the step. The buffer belongs to no pool,
//! evicts nothing and ends with the step, so residency and misses are those of the plain replay. If the layer then
//! selects a row of the buffer, that miss is *covered*: its transfer is hidden behind the neighbour's work. Any other
//! row of the buffer is *extra*. Rows born in the step are in no selection here. Warm-up is not a decode step and
//! prefetches nothing.
//!
//! The neighbour is the preceding layer *in the trace*, which may be some layers away in the model; the first layer
//! has none. Production does no such prefetch (`docs/policies.md` has the figures). layer has none. Production does
//! none of this (`docs/policies.md` has the figures).

use forebay::Result;
use forebay::trace::{Header, SelectionTrace};

use super::pools::Setting;
use super::threads;
use crate::policy::pool::{Pool, Selected};
use crate::policy::steps::Steps;
use crate::policy::{self, Job, run_watched};

/// What a prefetch fetches for one layer, over all decode steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefetched {
    /// Misses that it covers.
    pub covered: u64,
    /// Fetched rows that the layer did not select.
    pub extra: u64,
    /// The most extra rows in one step of one layer.
    pub extra_most: u64,
}

impl Prefetched {
    /// Of all layers together.
    pub fn total(layers: &[Prefetched]) -> Prefetched {
        layers.iter().fold(Prefetched::default(), |sum, layer| Prefetched {
            covered: sum.covered + layer.covered,
            extra: sum.extra + layer.extra,
            extra_most: sum.extra_most.max(layer.extra_most),
        })
    }
}

/// Bytes that the work on one layer holds: the steps of two layers, and a pool.
pub fn bytes(header: &Header, setting: Setting) -> u64 {
    2 * policy::bytes(header, setting.steps * setting.mtp)
}

/// Replays the trace for every job and counts, by job and layer, what a prefetch fetches. All jobs share warm-up,
/// `mtp` and steps. Calls `progress` with the steps of each job and layer.
///
/// # Errors
/// [`forebay::Kind::OutOfMemory`].
pub fn inter_layer(
    trace: &SelectionTrace,
    jobs: &[Job<'_>],
    progress: impl Fn(u64) + Sync,
) -> Result<Vec<Vec<Prefetched>>> {
    let Some(Job { setting, .. }) = jobs.first() else { return Ok(Vec::new()) };
    let steps = |layer| Steps::new(trace, layer, setting.warmup, setting.mtp, setting.steps);
    let layers = threads::each(trace.header().layers as usize, bytes(trace.header(), *setting), |layer| {
        let Some(neighbour) = layer.checked_sub(1) else {
            jobs.iter().for_each(|job| progress(u64::from(job.setting.steps)));
            return Ok(vec![Prefetched::default(); jobs.len()]);
        };
        let (neighbour, own) = (steps(neighbour as u32)?, steps(layer as u32)?);
        let run = |job: &Job<'_>| {
            let mut pool = job.pool(layer, &own)?;
            let mut sum = Prefetched::default();
            run_watched(&own, job.setting, pool.as_mut(), |step, pool| {
                let (covered, extra) = count(neighbour.selected(step), own.selected(step), pool);
                sum.covered += covered;
                sum.extra += extra;
                sum.extra_most = sum.extra_most.max(extra);
            });
            progress(u64::from(job.setting.steps));
            Ok(sum)
        };
        jobs.iter().map(run).collect::<Result<Vec<_>>>()
    })?;
    Ok((0..jobs.len()).map(|job| layers.iter().map(|layer| layer[job]).collect()).collect())
}

/// Among the neighbour's rows that the pool lacks: how many the layer selects, and how many it does not. Both
/// selections ascend.
fn count(neighbour: &[Selected], own: &[Selected], pool: &dyn Pool) -> (u64, u64) {
    let mut own = own.iter().peekable();
    let (mut covered, mut extra) = (0, 0);
    for row in neighbour.iter().filter(|row| !pool.holds(row.position)) {
        while own.next_if(|selected| selected.position < row.position).is_some() {}
        match own.peek() {
            Some(selected) if selected.position == row.position => covered += 1,
            _ => extra += 1,
        }
    }
    (covered, extra)
}
