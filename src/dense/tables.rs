//! The page tables: on the host, where sequences have theirs, and on the device, where attention reads those of a step.
//!
//! **On the host.** Each group has a table in pinned memory, `[sequences][blocks]` i32. A sequence's row is the page
//! table that `Held` counts. The host writes an entry when the sequence takes a page, and writes the null page when it
//! gives one back. Steps in flight may read the row meanwhile. That is sound: the entries that such a step needs do
//! not change before it is retired, and attention reads no others. Calls that change an entry in use (a truncation that
//! replaces a shared page) wait until the sequence has no steps in flight.
//!
//! **On the device.** Each micro-batch has [`Tensors`] at addresses that never change, so a captured graph can read
//! them. A step's begin fills them. It copies the entries of page tables that the tensors do not have yet: all of a
//! sequence that was not in this batch row before, else those that were added or given back since. [`Sent`] remembers
//! for each batch row what its tensor has.

use crate::dense::config::{Config, Width};
use crate::dense::held::Held;
use crate::dense::pool::{NULL_PAGE, Pool};
use crate::dense::shape::GROUPS_MAX;
use crate::device::pages::descriptor::Changed;
use crate::device::{Device, PageTables, Slice};
use crate::error::Result;
use crate::fallible::{filled, vector};
use crate::os::{Fallback, Faults, Map, Request};
use crate::sync::Arc;

/// What attention kernels read in the steps of one micro-batch, in device memory. Rows and tokens beyond a step's batch
/// have a length of 0, a position of 0 and a slot of -1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensors {
    /// For each group the page tables, `[batch][blocks]` i32 (vLLM: `block_table`). Entries beyond a sequence's pages
    /// have no meaning.
    pub tables: Vec<Slice>,
    /// For each group where the new rows go, `[step tokens]` of [`Config::width`]: `page * page_tokens + token` (vLLM:
    /// `slot_mapping`).
    pub slots: Vec<Slice>,
    /// The position of each new row, `[step tokens]` of [`Config::width`].
    pub positions: Slice,
    /// Tokens of each batch row's sequence, new rows included, `[batch]` i32 (vLLM: `seq_lens`).
    pub lengths: Slice,
    /// Where the new rows of each batch row begin, `[batch + 1]` i32 (vLLM: `query_start_loc`).
    pub starts: Slice,
}

impl Tensors {
    /// Takes the memory of one micro-batch's tensors, for tables of `entries` blocks.
    pub(super) fn new(config: &Config, entries: u32, device: &dyn Device) -> Result<Tensors> {
        let word = match config.width {
            Width::I32 => 4,
            Width::I64 => 8,
        };
        let (batch, tokens) = (u64::from(config.batch), u64::from(config.step_tokens));
        let groups = config.shape.groups.len();
        let mut tensors = Tensors {
            tables: vector(groups, "cache", "tensors")?,
            slots: vector(groups, "cache", "tensors")?,
            positions: device.allocate(word * tokens)?,
            lengths: device.allocate(4 * batch)?,
            starts: device.allocate(4 * (batch + 1))?,
        };
        for _ in 0..groups {
            tensors.tables.push(device.allocate(4 * batch * u64::from(entries))?);
            tensors.slots.push(device.allocate(word * tokens)?);
        }
        Ok(tensors)
    }
}

/// The page tables of all sequences in pinned host memory.
#[derive(Debug)]
pub(super) struct HostTables {
    memory: Arc<Map>,
    /// The table of each group.
    groups: Vec<Slice>,
    sequences: u32,
    entries: u32,
}

impl HostTables {
    /// Takes the memory. It adds the options that the system refused to `fallbacks`.
    pub(super) fn new(
        config: &Config,
        entries: u32,
        device: &dyn Device,
        faults: &dyn Faults,
        fallbacks: &mut Vec<Fallback>,
    ) -> Result<HostTables> {
        let group = 4 * u64::from(config.sequences) * u64::from(entries);
        let groups = config.shape.groups.len() as u64;
        let bytes = group * groups;
        let lock = config.memory.lock;
        let request = Request { bytes, huge: false, populate: true, lock, node: None, shared: false };
        let (memory, missed) = Map::new(&request, faults)?;
        fallbacks.extend(missed);
        let memory = Arc::new(memory);
        let all = device.register(&memory)?;
        let groups = (0..groups).map(|at| all.part(at * group, group)).collect::<Result<_>>()?;
        Ok(HostTables { memory, groups, sequences: config.sequences, entries })
    }

    /// What the begins of a micro-batch take of its tensors.
    pub(super) fn described(&self, config: &Config, pools: &[Pool], tensors: &Tensors) -> Vec<PageTables> {
        let parts = tensors.tables.iter().zip(&tensors.slots).zip(self.groups.iter().zip(pools));
        let described = parts.map(|((table, slots), (lanes, pool))| PageTables {
            lanes: *lanes,
            table: *table,
            slots: *slots,
            page_tokens: config.shape.page_tokens,
            pages: pool.count(),
        });
        described.collect()
    }

    fn offset(&self, group: usize, lane: usize, block: u32) -> u64 {
        let rows = group as u64 * u64::from(self.sequences) + lane as u64;
        4 * (rows * u64::from(self.entries) + u64::from(block))
    }

    /// Writes the pages of a sequence's blocks from `block` on.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`](crate::Kind::OutOfRange) beyond the memory.
    pub(super) fn write(&self, group: usize, lane: usize, block: u32, pages: &[u32]) -> Result<()> {
        self.memory.copy_in_words(self.offset(group, lane, block), pages)
    }

    /// Names the null page in the entries of a sequence's blocks from `first` to `end`.
    ///
    /// # Errors
    /// As [`HostTables::write`].
    pub(super) fn clear(&self, group: usize, lane: usize, first: u32, end: u32) -> Result<()> {
        const NONE: [u32; 64] = [NULL_PAGE; 64];
        (first..end).step_by(NONE.len()).try_for_each(|block| {
            let count = NONE.len().min((end - block) as usize);
            self.write(group, lane, block, &NONE[..count])
        })
    }

    /// Reads the pages of a sequence's first blocks.
    ///
    /// # Errors
    /// As [`HostTables::write`].
    pub(super) fn read(&self, group: usize, lane: usize, pages: &mut [u32]) -> Result<()> {
        self.memory.copy_out_words(self.offset(group, lane, 0), pages)
    }
}

/// What a batch row of the tensors has of its sequence's page tables.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    /// The number of the sequence; 0 for none.
    opened: u64,
    epoch: u32,
    /// The blocks of each group that the tensor has.
    blocks: [(u32, u32); GROUPS_MAX],
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Sent {
    batch: usize,
    rows: Vec<Row>,
}

impl Sent {
    /// Tensors that have nothing.
    pub(super) fn new(micro_batches: u32, batch: u32) -> Result<Sent> {
        let rows = micro_batches as usize * batch as usize;
        Ok(Sent { batch: batch as usize, rows: filled(rows, Row::default(), "cache", "batch rows")? })
    }

    /// The entries of each group that a batch row's tensor lacks of a sequence.
    pub(super) fn changes(
        &self,
        at: (usize, usize),
        opened: u64,
        epoch: u32,
        held: &[Held],
    ) -> [Changed; GROUPS_MAX] {
        let row = self.rows.get(at.0 * self.batch + at.1).copied().unwrap_or_default();
        let known = row.opened == opened && row.epoch == epoch;
        let mut changes = [Changed::default(); GROUPS_MAX];
        for ((change, held), (first, end)) in changes.iter_mut().zip(held).zip(row.blocks) {
            *change = match known {
                true if (held.first(), held.end()) == (first, end) => Changed::default(),
                // Blocks before `first` are gone from both; those up to the sequence's first block are gone since.
                true => {
                    let from = if held.first() == first { end } else { first };
                    Changed { first: from, count: held.end().saturating_sub(from) }
                }
                // Behind the sequence's own blocks its row on the host names the null page.
                false => Changed { first: 0, count: held.end().max(end) },
            };
        }
        changes
    }

    /// Notes that a batch row's tensor has the page tables of a sequence.
    pub(super) fn note(&mut self, at: (usize, usize), opened: u64, epoch: u32, held: &[Held]) {
        if let Some(row) = self.rows.get_mut(at.0 * self.batch + at.1) {
            (row.opened, row.epoch) = (opened, epoch);
            row.blocks.iter_mut().zip(held).for_each(|(blocks, held)| *blocks = (held.first(), held.end()));
        }
    }

    /// Notes that the tensors of a batch row may have anything.
    pub(super) fn forget(&mut self, at: (usize, usize)) {
        if let Some(row) = self.rows.get_mut(at.0 * self.batch + at.1) {
            row.opened = 0;
        }
    }
}
