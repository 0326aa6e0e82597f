//! The calls enqueued for a step: which query rows of each layer were resolved, gathered and scattered.
//!
//! No other check finds a call that the engine forgets. If a row is never scattered, a step that misses it after its
//! eviction reads the bytes that the previous owner of the page left in the total pool. So
//! [`Cache::finish`](crate::Cache::finish) checks here first, and fails while a call is missing. Some faults only the
//! device can find: a graph that holds fewer layers than declared, or that was never launched. The step's report shows
//! those.
//!
//! **States** of one query row of a batch row in one layer: nothing enqueued; resolved; `n` attention waves gathered,
//! in order. Independently, the row is scattered or not. A resolve resets the waves, because earlier gathers belonged
//! to another selection. A gather before its resolve, or before the preceding wave's gather, does not count.
//!
//! **Costs.** A call for all rows of the batch updates one word for each query row, whatever the size of the batch. A
//! call for some batch rows (halves) updates one word for each of them. The memory is allocated with the ring. If a
//! step used no halves, clearing its words takes one store for each layer and query row.
//!
//! The words are atomics because engines enqueue through a shared reference. Only one thread at a time enqueues calls
//! of one step, and these words order nothing. The words of single batch rows are read and then written, because an
//! atomic update would lock each of them. The words of whole batches are updated atomically: a lost [`APART`] would
//! leave the words of single rows to the next step.

use crate::device::StepRange;
use crate::error::{Error, Kind, Result};
use crate::fallible::vector;
use crate::residency::QueryRange;
use crate::step::phase::RowInFlight;
use crate::step::shape::RingShape;
use crate::sync::{AtomicU32, Ordering::Relaxed};

/// Bit of a word: the row was scattered.
const SCATTERED: u32 = 1 << 31;
/// Bit of a whole batch's word: single batch rows have words of their own in addition.
const APART: u32 = 1 << 30;
/// Bits of a word: 0, or 1 for a resolve plus 1 for each wave gathered after it.
const PROGRESS: u32 = APART - 1;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Enqueued {
    batch: usize,
    query_rows: usize,
    /// `[layers][query rows]`: the calls for all batch rows at once.
    whole: Vec<AtomicU32>,
    /// `[layers][query rows][batch]`: the calls for some batch rows.
    rows: Vec<AtomicU32>,
    /// See [`Enqueued::led`].
    led: AtomicU32,
}

/// The calls that each query row needs in every layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    /// Attention waves to gather; 0 if rows have no bytes (`residency_only`).
    pub(crate) waves: u32,
    /// Whether rows have bytes and so must be scattered.
    pub(crate) scatter: bool,
}

impl Due {
    /// Whether a row with this word has all the calls that it needs.
    fn is_met(self, word: u32) -> bool {
        word & PROGRESS > self.waves && (word & SCATTERED != 0 || !self.scatter)
    }
}

fn words(count: usize) -> Result<Vec<AtomicU32>> {
    let mut words = vector(count, "cache", "marks of steps")?;
    words.resize_with(count, || AtomicU32::new(0));
    Ok(words)
}

impl Enqueued {
    /// An empty record, large enough for any step of the ring.
    pub(crate) fn new(shape: &RingShape) -> Result<Enqueued> {
        let too_many = || Error::new(Kind::Overflow, "cache").at("layers x query rows x batch");
        let [layers, query_rows, batch] = [shape.layers, shape.query_rows, shape.batch].map(|n| n as usize);
        let whole = layers.checked_mul(query_rows).ok_or_else(too_many)?;
        let rows = whole.checked_mul(batch).ok_or_else(too_many)?;
        Ok(Enqueued { batch, query_rows, whole: words(whole)?, rows: words(rows)?, led: AtomicU32::new(0) })
    }

    /// Clears the record for a new step.
    pub(crate) fn clear(&mut self) {
        self.led(None);
        for (place, whole) in self.whole.iter().enumerate() {
            if whole.load(Relaxed) & APART != 0 {
                let own = self.rows.iter().skip(place * self.batch).take(self.batch);
                own.for_each(|word| word.store(0, Relaxed));
            }
            whole.store(0, Relaxed);
        }
    }

    /// For each query row of `rows` in a layer, the whole batch's word and the words of its batch rows.
    fn words(&self, layer: u32, rows: QueryRange) -> impl Iterator<Item = (&AtomicU32, &[AtomicU32])> {
        let first = layer as usize * self.query_rows + rows.first as usize;
        let places = first..first + rows.count as usize;
        places.filter_map(|place| {
            Some((self.whole.get(place)?, self.rows.get(place * self.batch..(place + 1) * self.batch)?))
        })
    }

    /// The batch rows of a range, or `None` if the range covers all `step_rows` rows of the step.
    fn some(range: &StepRange, step_rows: u32) -> Option<std::ops::Range<usize>> {
        let all = (range.first, range.count) == (0, step_rows);
        (!all).then(|| range.first as usize..(range.first + range.count) as usize)
    }

    /// Notes that the device accepted a resolve.
    pub(crate) fn resolved(&self, range: &StepRange, step_rows: u32) {
        for (whole, rows) in self.words(range.layer.0, range.rows) {
            let before = whole.load(Relaxed);
            let Some(some) = Enqueued::some(range, step_rows) else {
                if before & APART != 0 {
                    rows.iter().for_each(forget);
                }
                set_whole(whole, 1);
                continue;
            };
            // Each row now keeps its own progress. The rows of this call start again.
            if before & PROGRESS != 0 {
                rows.iter().for_each(|word| set(word, progress(word).max(before & PROGRESS)));
                set_whole(whole, 0);
            }
            whole.fetch_or(APART, Relaxed);
            rows.get(some).unwrap_or_default().iter().for_each(|word| set(word, 1));
        }
    }

    /// Notes that the device accepted a gather of this wave.
    pub(crate) fn gathered(&self, range: &StepRange, wave: u32, step_rows: u32) {
        let (wanted, come) = (wave.saturating_add(1), wave.saturating_add(2).min(PROGRESS));
        for (whole, rows) in self.words(range.layer.0, range.rows) {
            let before = whole.load(Relaxed);
            let some = Enqueued::some(range, step_rows);
            if some.is_none() && before & APART == 0 {
                if before & PROGRESS == wanted {
                    set_whole(whole, come);
                }
                continue;
            }
            whole.fetch_or(APART, Relaxed);
            let some = some.unwrap_or(0..step_rows as usize);
            for word in rows.get(some).unwrap_or_default() {
                if progress(word).max(before & PROGRESS) == wanted {
                    set(word, come);
                }
            }
        }
    }

    /// Notes that the device accepted a scatter.
    pub(crate) fn scattered(&self, range: &StepRange, step_rows: u32) {
        for (whole, rows) in self.words(range.layer.0, range.rows) {
            let Some(some) = Enqueued::some(range, step_rows) else {
                whole.fetch_or(SCATTERED, Relaxed);
                continue;
            };
            whole.fetch_or(APART, Relaxed);
            rows.get(some).unwrap_or_default().iter().for_each(|word| add(word, SCATTERED));
        }
    }

    /// Notes that a schedule has enqueued all calls of these query rows of a layer, for the whole batch.
    pub(crate) fn scheduled(&self, layer: u32, rows: QueryRange) {
        self.words(layer, rows).for_each(|(whole, _)| {
            whole.fetch_or(SCATTERED | PROGRESS, Relaxed);
        });
    }

    /// Notes who resolved last in this step: a schedule, for `layer` and those that it selects for, with or without
    /// index lists; or the engine itself (`None`).
    pub(crate) fn led(&self, by_schedule: Option<(u32, bool)>) {
        self.led.store(by_schedule.map_or(0, |(layer, lists)| 2 * (layer + 1) + u32::from(lists)), Relaxed);
    }

    /// The layer that a schedule resolved last, and whether it has index lists. `None` if the engine itself has
    /// resolved since, or none was resolved.
    pub(crate) fn is_led(&self) -> Option<(u32, bool)> {
        let led = self.led.load(Relaxed);
        (led != 0).then(|| (led / 2 - 1, led % 2 == 1))
    }

    /// Checks that all calls that a step with these batch rows needs are enqueued.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] names the first missing call, ordered by layer, then batch row, then call.
    pub(crate) fn check(&self, rows: &[RowInFlight], due: Due) -> Result<()> {
        let layers = self.whole.len() / self.query_rows.max(1);
        let widest = rows.iter().map(|row| row.query_rows).max().unwrap_or(0);
        for layer in 0..layers as u32 {
            if self.is_whole(layer, rows, widest, due) {
                continue;
            }
            for (batch_row, row) in rows.iter().enumerate() {
                self.check_row(layer, batch_row, row.query_rows, due)?;
            }
        }
        Ok(())
    }

    /// Whether no call of a layer is missing. Reads each word once.
    fn is_whole(&self, layer: u32, rows: &[RowInFlight], widest: u32, due: Due) -> bool {
        let of_batch = self.whole.iter().skip(layer as usize * self.query_rows).take(widest as usize);
        if of_batch.map(|word| word.load(Relaxed)).all(|word| due.is_met(word)) {
            return true;
        }
        let mut words = (0..).zip(self.words(layer, QueryRange { first: 0, count: widest }));
        words.all(|(query, (whole, own))| {
            let whole = whole.load(Relaxed);
            let of_row = |(row, own): (&RowInFlight, &AtomicU32)| {
                row.query_rows <= query || due.is_met(both(whole, own.load(Relaxed)))
            };
            due.is_met(whole) || rows.iter().zip(own).all(of_row)
        })
    }

    fn check_row(&self, layer: u32, batch_row: usize, query_rows: u32, due: Due) -> Result<()> {
        let refused = |call: &'static str, query: u32| {
            Error::new(Kind::InvalidState, "finish")
                .at(call)
                .with("layer", layer)
                .with("batch row", batch_row as u64)
                .with("query row", query)
        };
        let hint = "enqueue it, or abandon the step";
        let find = |is_missing: &dyn Fn(u32, bool) -> bool| {
            let words = self.words(layer, QueryRange { first: 0, count: query_rows });
            (0..).zip(words).find_map(|(query, (whole, rows))| {
                let own = rows.get(batch_row).map_or(0, |word| word.load(Relaxed));
                let word = both(whole.load(Relaxed), own);
                is_missing(word & PROGRESS, word & SCATTERED != 0).then_some((query, word & PROGRESS))
            })
        };
        if let Some((query, _)) = find(&|come, _| come == 0) {
            return Err(refused("a resolve was not enqueued", query).hint(hint));
        }
        if let Some((query, come)) = find(&|come, _| come <= due.waves) {
            // A resolve of another layer has overwritten the lists that this gather would have read.
            let hint =
                "enqueue it, or abandon the step: after another resolve of these rows it comes too late";
            return Err(refused("a gather was not enqueued", query).with("wave", come - 1).hint(hint));
        }
        match find(&|_, scattered| !scattered && due.scatter) {
            Some((query, _)) => Err(refused("a scatter was not enqueued", query).hint(hint)),
            None => Ok(()),
        }
    }
}

/// The combined state of a row, from the whole batch's word and its own word.
fn both(whole: u32, own: u32) -> u32 {
    (whole & PROGRESS).max(own & PROGRESS) | ((whole | own) & SCATTERED)
}

fn progress(word: &AtomicU32) -> u32 {
    word.load(Relaxed) & PROGRESS
}

/// Sets the progress of a whole batch's word and keeps its other bits.
fn set_whole(whole: &AtomicU32, come: u32) {
    let _before = whole.fetch_update(Relaxed, Relaxed, |word| Some((word & !PROGRESS) | come));
}

fn add(word: &AtomicU32, mark: u32) {
    word.store(word.load(Relaxed) | mark, Relaxed);
}

fn forget(word: &AtomicU32) {
    set(word, 0);
}

fn set(word: &AtomicU32, come: u32) {
    word.store((word.load(Relaxed) & !PROGRESS) | come, Relaxed);
}
