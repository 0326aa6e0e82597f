//! What has been enqueued of a step: which query rows of each layer were resolved, gathered and scattered.
//!
//! What an engine forgets shows nowhere else: a row that was never scattered is read from the total pool after an
//! eviction, and what stands there is what the page's last tenant left. So [`Cache::finish`](crate::Cache::finish)
//! asks here first, and refuses while something is missing. What only the device can know (a graph that holds less
//! than was said, or was never launched) the report of the step finds.
//!
//! **States**, of one query row of a batch row in one layer: nothing; resolved; `n` waves of attention gathered, in
//! their order; beside that, scattered or not. A resolve begins anew: what was gathered before it was of another
//! selection. A gather in front of its resolve, or of its wave's predecessor, counts for nothing.
//!
//! **Costs.** A call for all rows of the batch is one word a query row, whatever the batch. Calls for some rows
//! (halves) have a word for each of them. The memory is taken with the ring; a step that knew no halves begins with
//! one store a layer and query row.
//!
//! Words are atomics because engines enqueue through a shared reference. One thread at a time enqueues calls of one
//! step; nothing is ordered by these words. The words of rows are read and then written, since an update in one
//! instruction would lock each of them, and halves have one for each row. Those of whole batches are updated in one:
//! a lost [`APART`] would leave words of rows to the next step.

use crate::device::StepRange;
use crate::error::{Error, Kind, Result};
use crate::fallible::vector;
use crate::residency::QueryRange;
use crate::step::{RingShape, RowInFlight};
use crate::sync::{AtomicU32, Ordering::Relaxed};

/// In a word: its row was scattered.
const SCATTERED: u32 = 1 << 31;
/// In the word of a whole batch: rows have words of their own, beside this one.
const APART: u32 = 1 << 30;
/// 0, or 1 for a resolve and 1 for each wave that was gathered behind it.
const PROGRESS: u32 = APART - 1;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Enqueued {
    batch: usize,
    query_rows: usize,
    /// `[layers][query rows]`: what was enqueued for all batch rows at once.
    whole: Vec<AtomicU32>,
    /// `[layers][query rows][batch]`: for some of them.
    rows: Vec<AtomicU32>,
}

/// Which calls are due, for each query row in every layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    /// Waves of attention to gather; none where rows have no bytes.
    pub(crate) waves: u32,
    /// Rows have bytes, which are to be stored.
    pub(crate) scatter: bool,
}

impl Due {
    /// Whether a row that has come so far lacks nothing.
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
    /// Nothing yet, with room for any step of the ring.
    pub(crate) fn new(shape: &RingShape) -> Result<Enqueued> {
        let too_many = || Error::new(Kind::Overflow, "cache").at("layers x query rows x batch");
        let [layers, query_rows, batch] = [shape.layers, shape.query_rows, shape.batch].map(|n| n as usize);
        let whole = layers.checked_mul(query_rows).ok_or_else(too_many)?;
        let rows = whole.checked_mul(batch).ok_or_else(too_many)?;
        Ok(Enqueued { batch, query_rows, whole: words(whole)?, rows: words(rows)? })
    }

    /// A new step: nothing is enqueued.
    pub(crate) fn clear(&mut self) {
        for (place, whole) in self.whole.iter().enumerate() {
            if whole.load(Relaxed) & APART != 0 {
                let own = self.rows.iter().skip(place * self.batch).take(self.batch);
                own.for_each(|word| word.store(0, Relaxed));
            }
            whole.store(0, Relaxed);
        }
    }

    /// By query row of `rows` in a layer: the whole batch's word and those of its rows.
    fn words(&self, layer: u32, rows: QueryRange) -> impl Iterator<Item = (&AtomicU32, &[AtomicU32])> {
        let first = layer as usize * self.query_rows + rows.first as usize;
        let places = first..first + rows.count as usize;
        places.filter_map(|place| {
            Some((self.whole.get(place)?, self.rows.get(place * self.batch..(place + 1) * self.batch)?))
        })
    }

    /// The batch rows of a part; none where it is all `step_rows` of the step.
    fn some(range: &StepRange, step_rows: u32) -> Option<std::ops::Range<usize>> {
        let all = (range.first, range.count) == (0, step_rows);
        (!all).then(|| range.first as usize..(range.first + range.count) as usize)
    }

    /// The device took a resolve.
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
            // What all rows have come to, each has by itself now: these begin anew.
            if before & PROGRESS != 0 {
                rows.iter().for_each(|word| set(word, progress(word).max(before & PROGRESS)));
                set_whole(whole, 0);
            }
            whole.fetch_or(APART, Relaxed);
            rows.get(some).unwrap_or_default().iter().for_each(|word| set(word, 1));
        }
    }

    /// The device took a gather of this wave.
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

    /// The device took a scatter.
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

    /// A schedule has enqueued all that is due of these query rows of a layer, for the whole batch.
    pub(crate) fn scheduled(&self, layer: u32, rows: QueryRange) {
        self.words(layer, rows).for_each(|(whole, _)| {
            whole.fetch_or(SCATTERED | PROGRESS, Relaxed);
        });
    }

    /// Whether everything that is due of a step with these batch rows is enqueued.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the first call that is not: its layer, then its batch row, then the call.
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

    /// Whether nothing is missing of a layer: a look at each word, and no more.
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
            // A resolve of another layer has taken the lists that this gather would have read.
            let hint =
                "enqueue it, or abandon the step: behind another resolve of these rows it comes too late";
            return Err(refused("a gather was not enqueued", query).with("wave", come - 1).hint(hint));
        }
        match find(&|_, scattered| !scattered && due.scatter) {
            Some((query, _)) => Err(refused("a scatter was not enqueued", query).hint(hint)),
            None => Ok(()),
        }
    }
}

/// What a row has come to by the word of the whole batch and by its own.
fn both(whole: u32, own: u32) -> u32 {
    (whole & PROGRESS).max(own & PROGRESS) | ((whole | own) & SCATTERED)
}

fn progress(word: &AtomicU32) -> u32 {
    word.load(Relaxed) & PROGRESS
}

/// The progress of a whole batch's word, and none of its other bits.
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
