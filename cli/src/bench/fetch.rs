//! Benchmarks of a step's misses and of a sequence's start: resolve with gather, and warm-up.

use std::sync::Arc;

use forebay::device::{PoolOp, Warm, WarmGather};
use forebay::measure::{Ceilings, Probe};
use forebay::{Lane, Result};

use super::asked::Asked;
use super::oracle::{Numbers, Wanted};
use super::result::{Figure, Parameter, Target};
use super::rig::{Extents, Places, Rig};
use super::rule::{decoded, least, sector};

const ROW: u32 = 656;
const STRIDE: u32 = 704;
const PAGE: u32 = 64;

/// The least bytes of host memory for a hundred sequences with more rows than slots.
pub const SEQUENCES_LEAST: u64 = 500 << 20;

/// The target with 410 misses a sequence.
fn target(figure: &Figure, batch: u32, misses: u32, ceilings: &Ceilings) -> Option<Target> {
    match (batch, misses) {
        (1, 410) => Some(Target { text: "under 15 us", met: figure.us < 15.0 }),
        (100, 410) => {
            let met = figure.rate().is_some_and(|rate| rate >= 0.9 * ceilings.read);
            Some(Target { text: "at the link's ceiling: 90% of what processors read", met })
        }
        _ => None,
    }
}

/// Figures of a resolve and the gather after it, for batches of one sequence, of ten and of a hundred, each with 410
/// misses among 2048 rows.
///
/// # Errors
/// Errors of the device; [`forebay::Kind::Internal`] for a wrong slot or row.
pub fn resolve_gather(device: &Arc<dyn Probe>, ceilings: &Ceilings, asked: &Asked) -> Result<Vec<Figure>> {
    let (lanes, k, budget, misses, batches) = match asked.quick {
        true => (4, 64, 160, 13, [1, 2, 4]),
        false => (100, 2048, 6881, 410, [1, 10, 100]),
    };
    asked.progress.inc_length(batches.len() as u64);
    let memory = asked.pool.on(&**device)?;
    let pages = memory.slice.bytes() / (u64::from(lanes) * u64::from(PAGE * STRIDE));
    let length = (pages as u32 * PAGE - 1).min(32_767);
    let extents = Extents {
        row: ROW,
        stride: STRIDE,
        page: PAGE,
        layers: 1,
        lanes,
        length,
        shorter: 0,
        growth: 0,
        k,
        query_rows: 1,
        budget,
    };
    let mut rig = Rig::new(device, extents, Places::Host(memory), asked.quick)?;
    rig.fill(decoded(asked.quick))?;
    rig.touch()?;
    let gpu = device.facts()?.gpu.is_some();
    let order = Numbers::new(6).shuffled(lanes);
    let mut turn = order.iter().cycle();
    let mut figures = Vec::new();
    for batch in batches {
        let (before, mut times) = (rig.checked, Vec::new());
        // Two additional steps warm up.
        for step in 0..asked.rounds + 2 {
            let lanes: Vec<u32> = turn.by_ref().take(batch as usize).copied().collect();
            rig.begin(&lanes, 0, 1, |_, _, _| {})?;
            rig.select(0, |_| Wanted { query: 1, misses, hits: k - misses })?;
            let us = rig.timer.time(|stream| {
                rig.resolve(0, stream)?;
                rig.gather(0, stream)
            })?;
            rig.check_answers(0)?;
            rig.check_rows(0)?;
            rig.end()?;
            if step >= 2 {
                times.push(us);
            }
        }
        let bytes = u64::from(batch * misses * ROW);
        let at = |rate: f64| ceilings.launch_us + bytes as f64 / rate * 1e6;
        let ceiling = ("processors read", at(ceilings.read));
        let figure = Figure::new("resolve-gather", "resolve + gather", times, ceiling, rig.checked - before)
            .with("batch", batch)
            .with("misses", batch * misses)
            .with("budget", budget)
            .with("context", length)
            .with("pool", Parameter::Bytes(asked.pool.bytes));
        let mut figure = Figure { bytes: Some(bytes), ..figure };
        figure.beside.push(("copy engine", at(ceilings.copy_up)));
        figure.target = target(&figure, batch, misses, ceilings).filter(|_| gpu);
        figures.push(asked.known(figure)?);
        asked.progress.inc(1);
    }
    rig.finish()?;
    Ok(figures)
}

/// The last selections of a prompt, which a warm-up replays.
const SELECTIONS: u32 = 32;

/// Layers of the model.
const LAYERS: u32 = 61;

/// Rounds of a warm-up: few, because one takes long.
const ROUNDS: u32 = 5;

/// Figures of a warm-up: the tables first, then the rows; for a budget that holds the whole prompt, and for one
/// that does not.
///
/// # Errors
/// Errors of the device; [`forebay::Kind::Internal`] for a wrong row or digest.
pub fn warm_up(device: &Arc<dyn Probe>, ceilings: &Ceilings, asked: &Asked) -> Result<Vec<Figure>> {
    let (prompt, k, bounded) = if asked.quick { (1000, 64, 160) } else { (32_768, 2048, 6881) };
    asked.progress.inc_length(4);
    let memory = asked.pool.on(&**device)?;
    let mut figures = Vec::new();
    for budget in [prompt, bounded] {
        let mut extents = Extents {
            row: ROW,
            stride: STRIDE,
            page: PAGE,
            layers: 1,
            lanes: 1,
            length: prompt,
            shorter: 0,
            growth: 0,
            k,
            query_rows: 1,
            budget,
        };
        let most = memory.slice.bytes() / extents.layer_bytes();
        extents.layers = if asked.quick { 3 } else { LAYERS.min(most as u32).max(1) };
        let mut rig = Rig::new(device, extents, Places::Host(memory.clone()), asked.quick)?;
        rig.touch()?;
        for figure in warmed(&mut rig, budget >= prompt, ceilings, asked)? {
            figures.push(asked.known(figure)?);
        }
        asked.progress.inc(2);
    }
    Ok(figures)
}

/// The figures of one budget.
fn warmed(rig: &mut Rig, whole: bool, ceilings: &Ceilings, asked: &Asked) -> Result<[Figure; 2]> {
    let Extents { layers, length, k, budget, .. } = rig.extents;
    let (mut residency, mut rows, mut resident) = (Vec::new(), Vec::new(), 0);
    let room = rig.device.allocate(u64::from(layers * SELECTIONS * k) * 4)?;
    let mut numbers = Numbers::new(7);
    for round in 0..=asked.rounds.min(ROUNDS) {
        rig.rejoin(0)?;
        let mut selections = Vec::with_capacity((layers * SELECTIONS * k) as usize);
        for _ in 0..layers {
            // Each selection of a layer has a quarter of the rows that may be selected at all.
            let mut liked = numbers.shuffled(length);
            liked.truncate(4 * k as usize);
            for _ in 0..SELECTIONS {
                numbers.draw(&mut liked, k as usize);
                selections.extend(liked.iter().take(k as usize).map(|position| *position as i32));
            }
        }
        rig.write_words(room, &selections)?;
        let warm = Warm { lane: Lane(0), group: None, whole, selections: Some(room), steps: SELECTIONS };
        let us = [
            rig.timer.time(|stream| rig.device.enqueue(rig.pools, stream, PoolOp::Warm(warm)))?,
            rig.timer.time(|stream| {
                let count = u64::from(layers * budget);
                rig.device.enqueue(
                    rig.pools,
                    stream,
                    PoolOp::WarmGather(WarmGather { lane: Lane(0), first: 0, count }),
                )
            })?,
        ];
        rig.oracle.warm(0, whole, &selections)?;
        resident = 0;
        for layer in 0..layers {
            let list = rig.oracle.residents(layer, 0);
            let wanted = |row: &forebay::residency::Fetch, bytes: &mut [u8]| {
                rig.host_row(layer, 0, row.position, bytes)
            };
            resident += rig.compare_rows(layer, 0, &list, wanted)?;
        }
        rig.checked += resident;
        rig.finish()?;
        if round > 0 {
            residency.push(us[0]);
            rows.push(us[1]);
        }
    }
    let sector = sector(rig.device.facts()?.gpu.is_some());
    // Bytes touched: of each selection its entries, a look-up for each, and every stamp; for the whole prompt three
    // words a row.
    let look_ups = u64::from(k).min((4 * u64::from(length)).div_ceil(sector)) * sector;
    let of_layer = u64::from(SELECTIONS) * (4 * u64::from(k) + look_ups + 4 * u64::from(budget))
        + if whole { 12 * u64::from(length) } else { 0 };
    let ceiling = ("launch and memory", least(ceilings, u64::from(layers) * of_layer));
    let named = |figure: Figure| {
        figure
            .with("prompt", length)
            .with("budget", budget)
            .with("layers", layers)
            .with("selections", SELECTIONS)
            .with("pool", Parameter::Bytes(asked.pool.bytes))
    };
    let first = Figure::new("warm-up", "residency", residency, ceiling, rig.checked);
    let bytes = resident * u64::from(ROW);
    let at = |rate: f64| ceilings.launch_us + bytes as f64 / rate * 1e6;
    let mut second =
        Figure::new("warm-up", "rows", rows, ("processors read", at(ceilings.read)), rig.checked);
    second.bytes = Some(bytes);
    second.beside.push(("copy engine", at(ceilings.copy_up)));
    Ok([named(first), named(second)])
}
