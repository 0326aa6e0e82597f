//! The result of `--together` as JSON: one entry for each kind of budgets, as `docs/json.md` describes.

use forebay::Result;
use serde::Serialize;

use super::result::{Replayed, Run, Sequence};
use crate::present::json::{Head, list};
use crate::replay::result::{Count, RowSize, miss_ratio};

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    head: Head,
    budgets: &'static str,
    slots: u32,
    gap: u32,
    mtp: u32,
    layers: u32,
    k: u32,
    sequences: Vec<One<'a>>,
    total: Total,
    by_alive: Vec<ByAlive>,
    resizes: u64,
    moved_rows: u64,
    row_model: &'a str,
    row_bytes: u32,
    moved_bytes: u64,
    slots_over_time: Vec<Slots<'a>>,
}

#[derive(Serialize)]
struct One<'a> {
    trace: String,
    label: &'a str,
    model: &'a str,
    decode_start: u32,
    arrives: u32,
    warmup: u32,
    steps: u32,
    hits: u64,
    misses: u64,
}

#[derive(Serialize)]
struct Total {
    hits: u64,
    misses: u64,
    miss_ratio: f64,
}

#[derive(Serialize)]
struct ByAlive {
    sequences: usize,
    steps: u32,
    hits: u64,
    misses: u64,
    misses_per_step: f64,
}

#[derive(Serialize)]
struct Slots<'a> {
    step: u32,
    slots: &'a [u64],
}

fn entry<'a>(replayed: &'a Replayed, run: &'a Run, row: &'a RowSize) -> Entry<'a> {
    let one = |(sequence, count): (&'a Sequence, &Count)| One {
        trace: sequence.path.display().to_string(),
        label: &sequence.header.label,
        model: &sequence.header.model,
        decode_start: sequence.header.decode_start,
        arrives: sequence.arrives,
        warmup: sequence.warmup,
        steps: sequence.steps,
        hits: count.hits,
        misses: count.misses,
    };
    let total = run.total();
    let alive = run.alive.iter().enumerate().filter(|(_, alive)| alive.steps > 0);
    let (layers, k) =
        replayed.sequences.first().map_or((0, 0), |first| (first.header.layers, first.header.k));
    Entry {
        head: Head::new("together"),
        budgets: run.budgets,
        slots: replayed.slots,
        gap: replayed.gap,
        mtp: replayed.mtp,
        layers,
        k,
        sequences: replayed.sequences.iter().zip(&run.sequences).map(one).collect(),
        total: Total { hits: total.hits, misses: total.misses, miss_ratio: miss_ratio(total) },
        by_alive: alive
            .map(|(sequences, alive)| ByAlive {
                sequences,
                steps: alive.steps,
                hits: alive.count.hits,
                misses: alive.count.misses,
                misses_per_step: alive.misses_per_step(),
            })
            .collect(),
        resizes: run.resizes,
        moved_rows: run.moved,
        row_model: &row.model,
        row_bytes: row.bytes,
        moved_bytes: run.moved * u64::from(row.bytes),
        slots_over_time: run.slots.iter().map(|(step, slots)| Slots { step: *step, slots }).collect(),
    }
}

/// All entries as text, with a line end.
///
/// # Errors
/// [`forebay::Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(replayed: &Replayed, row: &RowSize) -> Result<Vec<u8>> {
    list(&replayed.runs.iter().map(|run| entry(replayed, run, row)).collect::<Vec<_>>())
}
