//! Benchmarks of the rule alone: resolve and commit.
//!
//! Their ceiling is the least work of any kernel: one launch, and the necessary bytes at the speed of the device's
//! memory. A real step has 61 layers of tables, with an engine's weights between them. So the figures cycle over
//! several layers, and a GPU's cache is emptied before each call ([`super::timer`]). A host's caches are not emptied:
//! cached tables are read faster than the ceiling assumes, so there a figure may exceed it.

use std::sync::Arc;

use forebay::measure::{Ceilings, Probe};
use forebay::{Result, SLOT_BLOCK};

use super::asked::Asked;
use super::oracle::{Wanted, compare_row, mix};
use super::result::{Figure, Target};
use super::rig::{Extents, Places, Rig};
use super::{host_memory, reuse};

/// Bytes of a row in host memory and in a slot.
const ROW: u32 = 656;

/// The full set of parameters, or a few to test the code path.
struct Points<'a> {
    batches: &'a [u32],
    queries: &'static [u32],
    budgets: &'static [u32],
    k: u32,
    context: u32,
    layers: u32,
}

/// Shares of the selected entries that are not resident.
const SHARES: [f64; 3] = [0.067, 0.134, 0.3];

const FULL: Points<'_> = Points {
    batches: &[1, 8, 32, 64, 160],
    queries: &[1, 2, 4],
    budgets: &[4096, 6881, 13_107],
    k: 2048,
    context: 32_768,
    layers: 4,
};

const QUICK: Points<'_> =
    Points { batches: &[1, 3], queries: &[1, 2], budgets: &[96, 160], k: 64, context: 1024, layers: 2 };

impl Points<'_> {
    fn of(quick: bool) -> Points<'static> {
        if quick { QUICK } else { FULL }
    }

    fn most(of: &[u32]) -> u32 {
        of.iter().copied().max().unwrap_or(1)
    }
}

/// Decode steps of the lanes before they resolve, so that equally old rows are as scattered as in
/// service.
pub fn decoded(quick: bool) -> u32 {
    if quick { reuse::DECODED_QUICK } else { reuse::DECODED }
}

/// The unit in which the device's memory is read, in bytes: a sector of a GPU, a line of the host.
pub fn sector(gpu: bool) -> u64 {
    if gpu { 32 } else { 64 }
}

/// Bytes touched by look-ups of `count` words at random places of a table of `words` words.
fn scattered(count: u64, words: u64, sector: u64) -> u64 {
    count.min((4 * words).div_ceil(sector)) * sector
}

/// Bytes that a resolve of one lane must touch: the selection and its slots; a look-up for each entry; the stamp
/// of every slot read, and the stamps of hits written; for each miss an entry of the list, its victim's position and
/// stamp, and the two rows' entries in the look-up table.
fn touched(extents: &Extents, wanted: Wanted, sector: u64) -> u64 {
    let entries = u64::from(wanted.hits + wanted.misses);
    let (tokens, budget) = (u64::from(extents.length), u64::from(extents.budget));
    let hits = u64::from(wanted.hits).min(budget);
    let misses = u64::from(wanted.misses);
    8 * entries
        + scattered(entries, tokens, sector)
        + 4 * budget
        + scattered(hits, budget, sector)
        + misses * 8
        + 2 * scattered(misses, budget, sector)
        + 2 * scattered(misses, tokens, sector)
}

/// The least microseconds of one launch and this many bytes of device memory.
pub fn least(ceilings: &Ceilings, bytes: u64) -> f64 {
    ceilings.launch_us + bytes as f64 / ceilings.memory * 1e6
}

/// The targets for 160 sequences.
fn target(batch: u32, query: u32, budget: u32, share: f64, us: f64) -> Option<Target> {
    match (batch, query, budget) {
        (160, 1, 6881) if share == SHARES[1] => Some(Target { text: "under 15 us", met: us < 15.0 }),
        (160, 2, 6881) if share == SHARES[1] => Some(Target { text: "under 25 us", met: us < 25.0 }),
        _ => None,
    }
}

/// Figures of resolve: selections with a given share of misses, into full budgets.
///
/// # Errors
/// Errors of the device; [`forebay::Kind::Internal`] for a wrong slot.
pub fn resolve(device: &Arc<dyn Probe>, ceilings: &Ceilings, asked: &Asked) -> Result<Vec<Figure>> {
    let points = Points::of(asked.quick);
    let alone = asked.batch.as_ref().map(std::slice::from_ref);
    // For a profiler only one: one query row, the middle budget and the middle share.
    let (points, shares) = match alone {
        Some(batches) => {
            let (queries, budgets) = (&points.queries[..1], &points.budgets[1..2]);
            (Points { batches, queries, budgets, ..points }, &SHARES[1..2])
        }
        None => (points, &SHARES[..]),
    };
    let count = points.batches.len() * points.queries.len() * points.budgets.len() * shares.len();
    asked.progress.inc_length(count as u64);
    let mut figures = Vec::new();
    for budget in points.budgets {
        let extents = Extents {
            row: 4,
            stride: 4,
            page: 64,
            layers: points.layers,
            lanes: Points::most(points.batches),
            length: points.context,
            shorter: 0,
            growth: 0,
            k: points.k,
            query_rows: Points::most(points.queries),
            budget: *budget,
        };
        let mut rig = Rig::new(device, extents, Places::Tables, asked.quick)?;
        rig.fill(decoded(asked.quick))?;
        for query in points.queries {
            for batch in points.batches {
                for share in shares {
                    let figure = resolved(&mut rig, *batch, *query, *share, ceilings, asked)?;
                    figures.push(asked.known(figure)?);
                    asked.progress.inc(1);
                }
            }
        }
        rig.finish()?;
    }
    Ok(figures)
}

/// One figure of resolve.
fn resolved(
    rig: &mut Rig,
    batch: u32,
    query: u32,
    share: f64,
    ceilings: &Ceilings,
    asked: &Asked,
) -> Result<Figure> {
    let Extents { layers, k, budget, .. } = rig.extents;
    let (before, wanted) = (rig.checked, Wanted::share(k, query, share));
    let lanes: Vec<u32> = (0..batch).collect();
    let mut times = Vec::new();
    // An additional step warms up.
    for step in 0..=asked.rounds.div_ceil(layers) {
        rig.begin(&lanes, 0, query, |_, _, _| {})?;
        for layer in 0..layers {
            rig.select(layer, |_| wanted)?;
            let us = rig.timer.time(|stream| rig.resolve(layer, stream))?;
            rig.check_answers(layer)?;
            if step > 0 && times.len() < asked.rounds as usize {
                times.push(us);
            }
        }
        rig.end()?;
    }
    let gpu = rig.device.facts()?.gpu.is_some();
    let bytes = u64::from(batch) * touched(&rig.extents, wanted, sector(gpu));
    let ceiling = ("launch and memory", least(ceilings, bytes));
    let mut figure = Figure::new("resolve", "resolve", times, ceiling, rig.checked - before)
        .with("batch", batch)
        .with("query_rows", query)
        .with("budget", budget)
        .with("misses", share)
        .with("missed_rows", rig.oracle.counts.first().map_or(0, |count| count.misses))
        .with("k", k);
    figure.target = target(batch, query, budget, share, figure.us).filter(|_| gpu);
    Ok(figure)
}

/// Pools of 61 layers for commits, with as many slots a lane as memory allows, and landing slots with contents.
struct Landed {
    rig: Rig,
    /// The contents of the landing slots of a layer, the same for all layers.
    rows: Vec<u8>,
}

/// Layers of the model.
const LAYERS: u32 = 61;

impl Landed {
    fn new(device: &Arc<dyn Probe>, points: &Points<'_>, asked: &Asked) -> Result<Landed> {
        let facts = device.facts()?;
        let (layers, lanes) = (if asked.quick { 3 } else { LAYERS }, Points::most(points.batches));
        let query_rows = Points::most(points.queries);
        let free = if facts.gpu.is_some() && !asked.quick {
            facts.memory_free / 4
        } else {
            host_memory::little(asked.quick)?
        };
        let slots = (free / u64::from(layers * lanes * ROW)) as u32 / SLOT_BLOCK * SLOT_BLOCK;
        let budget = slots.clamp(SLOT_BLOCK, if asked.quick { 2 * SLOT_BLOCK } else { 6881 });
        let steps = (asked.rounds + 2) * points.batches.len() as u32;
        let extents = Extents {
            row: ROW,
            stride: 704,
            page: 64,
            layers,
            lanes,
            length: 2 * budget,
            shorter: 0,
            growth: steps * points.queries.iter().sum::<u32>(),
            k: SLOT_BLOCK,
            query_rows,
            budget,
        };
        // A commit reads no row of the total pool, so all lanes share one page of it.
        let page = device.allocate(u64::from(extents.page * extents.stride))?;
        let pages = vec![0; (lanes * extents.lane_pages()) as usize];
        let mut rig = Rig::new(device, extents, Places::Given(page, pages), asked.quick)?;
        // A commit only searches the oldest row.
        rig.fill(0)?;
        rig.touch()?;
        let rows: Vec<u8> = (0..u64::from(lanes * query_rows * ROW)).map(|at| mix(at) as u8).collect();
        for layer in 0..layers {
            device.write(rig.slot_rows(layer, rig.landing(0), lanes * query_rows)?, &rows)?;
        }
        Ok(Landed { rig, rows })
    }

    /// Microseconds of the commit at the beginning of a step; compares the rows that it moved in some layers.
    fn step(&mut self, lanes: &[u32], accepted: u32, query: u32) -> Result<f64> {
        let layers = self.rig.extents.layers;
        let looked_at = [0, layers / 2, layers - 1];
        let mut moves = Vec::new();
        let us = self.rig.begin(lanes, accepted, query, |layer, lane, moved| {
            if looked_at.contains(&layer) {
                moves.push((layer, lane, moved));
            }
        })?;
        let (row, base) = (self.rig.extents.row as usize, self.rig.landing(0));
        let mut found = vec![0; row];
        for (layer, lane, moved) in &moves {
            self.rig.device.read(self.rig.slot_rows(*layer, moved.to, 1)?, &mut found)?;
            let wanted = self.rows.get((moved.from - base) as usize * row..).unwrap_or_default();
            compare_row(&found, wanted.get(..row).unwrap_or_default(), || {
                format!("layer {layer}, lane {lane}, committed row in slot {}", moved.to)
            })?;
        }
        self.rig.checked += moves.len() as u64;
        self.rig.end()?;
        Ok(us)
    }
}

/// Figures of commit: all rows of the step before are accepted, in every layer.
///
/// # Errors
/// Errors of the device; [`forebay::Kind::Internal`] for a wrong row.
pub fn commit(device: &Arc<dyn Probe>, ceilings: &Ceilings, asked: &Asked) -> Result<Vec<Figure>> {
    let points = Points::of(asked.quick);
    asked.progress.inc_length((points.batches.len() * points.queries.len()) as u64);
    let mut pools = Landed::new(device, &points, asked)?;
    let Extents { layers, budget, .. } = pools.rig.extents;
    let sector = sector(device.facts()?.gpu.is_some());
    let mut figures = Vec::new();
    for query in points.queries {
        for batch in points.batches {
            let (before, lanes) = (pools.rig.checked, (0..*batch).collect::<Vec<u32>>());
            // The rows that an earlier figure's steps landed are rejected; then one step warms up.
            pools.step(&lanes, 0, *query)?;
            pools.step(&lanes, *query, *query)?;
            let times: Vec<f64> =
                (0..asked.rounds).map(|_| pools.step(&lanes, *query, *query)).collect::<Result<_>>()?;
            // Of each lane its head; of each row its bytes twice, its slot's stamp and position, and the look-up
            // entries of itself, its victim and its landing slot.
            let of_lane = sector + u64::from(*query) * (2 * u64::from(ROW) + 5 * sector);
            let ceiling = ("launch and memory", least(ceilings, u64::from(layers * batch) * of_lane));
            let figure =
                Figure::new("commit", "step descriptor + commit", times, ceiling, pools.rig.checked - before)
                    .with("batch", *batch)
                    .with("query_rows", *query)
                    .with("layers", layers)
                    .with("budget", budget);
            let bytes = Some(u64::from(layers * batch * query * ROW));
            figures.push(asked.known(Figure { bytes, ..figure })?);
            asked.progress.inc(1);
        }
    }
    pools.rig.finish()?;
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ceiling_counts_each_byte_that_must_be_touched_once() {
        // A table of 100 words has no more than that to touch.
        assert_eq!([scattered(3, 100, 32), scattered(1000, 100, 32)], [96, 416]);
        let bytes = |share| touched(&Extents::ONE_LANE, Wanted::share(2048, 1, share), 32);
        // Without misses: 2048 slots and entries, look-ups of a sector each, all stamps read, stamps of hits written:
        // 6881 stamps are in 861 sectors.
        assert_eq!(bytes(0.0), 8 * 2048 + 32 * 2048 + 4 * 6881 + 32 * 861);
        assert!(bytes(0.3) > bytes(0.067));
    }
}
