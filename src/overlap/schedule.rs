//! The schedule: one layer's work on four streams, by the edges of the paper's three orders.
//!
//! ESS (arXiv 2512.10576) hides the gather of a layer's missed rows behind the layer's own computation.
//! Engine: *I0* projections and index-key write; *I* logits and top-k; *P* preparation, which writes the
//! new rows; *A* attention; *M* merge. Ours: *R* resolve, *G* gather, *S* scatter of the new rows.
//!
//! ```text
//! none   compute: I0 I R G P A                        S behind P
//! DA     compute: I0 I . P . A0 . A1 M                A0 behind P, R: what was resident
//!        resolve:      R                              A1 behind A0, G: what was fetched
//!        gather:         G------------                S behind P
//! DBA    compute: I0 I1 . I2 . P . A0 . A1 M          the first half of the batch is resolved and gathered
//!        resolve:        R1   R2                      while the second half's top-k runs
//!        gather:           G1---G2-----
//! ```
//!
//! A layer's first work follows the last layer's merge, because both are in the compute stream. From this
//! the order of everything that layers share follows: the index lists, the lists of fetches and the scratch
//! slots of the layer before were read by an A1 that R of this layer is behind. So no edge leads from a
//! layer's end to the next one, but for the scatters, which the step joins at its end.
//!
//! **Several waves.** Where scratch holds a share of what a step may fetch, a wave fetches it, its A1
//! attends it, and the next wave's gather waits for that A1. Waves that a row does not need fetch and
//! attend nothing; how many there are never depends on data, so a captured graph holds them all.
//!
//! **Edges.** An edge between two streams is one event, recorded and waited for at once; between the same
//! stream it is nothing. Events are used again from layer to layer: a wait means the last record before it.
//!
//! **Capture.** Each side stream's last operation of a layer is waited for in the compute stream, S's at the
//! step's end ([`Schedule::join`]), so a captured step leaves no fork unjoined. Where micro-batches have compute
//! streams of their own, who captures forks and joins these: `Cache::capture`, or the engine.
//!
//! Costs: at most seven edges a layer and two more a further wave, beside R, G and S; nothing is allocated,
//! nothing is waited for. It does not choose the order (`choice`), nor know what a callback computes.

use crate::device::{Answer, Device, Event, PoolOp, Pools, Slice, SplitIndices, StepRange, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::{Layer, MicroBatch};
use crate::residency::QueryRange;
use crate::step::OverlapStreams;

/// What hides a layer's gather.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Overlap {
    /// Nothing: attention waits for it. What engines run today.
    #[default]
    None,
    /// Preparation and attention over what was resident.
    Da,
    /// These, and the indexer of the second half of the batch.
    Dba,
}

impl Overlap {
    /// All of them.
    pub const ALL: [Overlap; 3] = [Overlap::None, Overlap::Da, Overlap::Dba];

    /// The name that tables, files and the command line use.
    pub const fn name(self) -> &'static str {
        match self {
            Overlap::None => "none",
            Overlap::Da => "da",
            Overlap::Dba => "dba",
        }
    }
}

/// A part of a layer that is the engine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// I0: the projections that the indexer needs, and the write of the index keys.
    Project,
    /// I: logits and top-k of the call's batch rows, which write their selection.
    Index,
    /// P: the preparation of attention, which writes the new rows to their landing slots.
    Prepare,
    /// A: attention over some of the selected rows.
    Attend(Keys),
    /// M: merges attention's parts by their log-sum-exp. Only where attention ran in parts.
    Merge,
    /// What follows attention: output projection, experts, communication.
    Rest,
}

/// Which of the selected rows a call of attention reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Keys {
    /// All: the slots of the resolve's answer.
    All,
    /// What was resident or is born in this step: list 0 of the [`SplitIndices`].
    Resident,
    /// What a wave fetched: list `1 + wave`.
    Fetched {
        /// The wave.
        wave: u32,
    },
}

/// One call of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineCall {
    /// What to enqueue.
    pub work: Work,
    /// For which micro-batch.
    pub micro_batch: MicroBatch,
    /// In which layer.
    pub layer: Layer,
    /// The first batch row,
    pub first: u32,
    /// and how many: half of the batch for the parts of DBA's indexer, else all.
    pub count: u32,
    /// The query rows of each batch row: one of them in a draft layer's pass.
    pub rows: QueryRange,
}

/// The engine's side of a layer.
pub trait Engine {
    /// Enqueues the work on `stream`. What it forks to streams of its own it joins again before it returns,
    /// and enqueues there by itself: a device that sees an engine's work takes it on this stream only.
    ///
    /// # Errors
    /// The engine's own; the layer is then not enqueued any further, and the step is abandoned.
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()>;
}

/// The events of one micro-batch, used again for every layer.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// A top-k has written its selection.
    selected: Event,
    /// R has answered.
    resolved: Event,
    /// G has fetched.
    gathered: Event,
    /// P has written the new rows.
    prepared: Event,
    /// A wave has been attended: its scratch slots are free.
    attended: Event,
    /// S has stored.
    scattered: Event,
}

/// One micro-batch's layers: everything that does not change from layer to layer.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// The micro-batch's events.
    pub schedule: Schedule,
    /// The micro-batch.
    pub micro_batch: MicroBatch,
    /// Batch rows: those of the step, or of the captured batch that it runs in, whose other rows are inert.
    pub batch: u32,
    /// The first batch row of DBA's second half; 0, or as many as there are, makes DBA's halves one.
    pub half: u32,
    /// Query rows of the step.
    pub query_rows: u32,
    /// Positions that a query row selects.
    pub top_k: u32,
    /// Waves of attention over fetched rows, at least 1.
    pub waves: u32,
    /// Rows have bytes: without them nothing is gathered and nothing stored.
    pub moves: bool,
    /// Its streams.
    pub streams: OverlapStreams,
    /// `[batch][query rows][k]` i32: the selected positions, which the engine's top-k writes. Of a buffer
    /// made for more rows the beginning is taken; so does a draft layer's pass, which has one query row.
    pub selection: Slice,
    /// The same: the slots of the answer.
    pub slots: Slice,
    /// The answer's index lists, for as many batch rows or more; nothing where every layer runs in the order
    /// `none` and in one wave.
    pub split_indices: Option<SplitIndices>,
}

/// One layer of a run, while it is enqueued.
struct LayerRun<'a> {
    device: &'a dyn Device,
    pools: Pools,
    run: &'a Run,
    layer: Layer,
    rows: QueryRange,
    split_indices: Option<SplitIndices>,
    engine: &'a mut dyn Engine,
}

impl Run {
    /// Whether the run can be enqueued in the order `overlap`, as far as that can be known beforehand.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for an order that needs index lists without them; [`Kind::OutOfRange`] for
    /// buffers that are too short, overlap, do not begin at a word, or are another device's.
    pub fn check(&self, device: &dyn Device, overlap: Overlap) -> Result<()> {
        if self.waves == 0 {
            return Err(refuse("waves of attention", 0));
        }
        if self.split_indices.is_none() && (overlap != Overlap::None || self.waves > 1) {
            return Err(refuse("attention in parts needs index lists", self.waves));
        }
        let rows = u64::from(self.batch) * u64::from(self.query_rows);
        let entries = |rows: u64| rows.saturating_mul(u64::from(self.top_k));
        let mut buffers = [("", self.selection, 0); 4];
        buffers[0] = ("selection", self.selection, entries(rows));
        buffers[1] = ("slots", self.slots, entries(rows));
        let mut used = 2;
        if let Some(SplitIndices { lists, counts, batch }) = self.split_indices {
            if batch < self.batch {
                return Err(Error::new(Kind::OutOfRange, "overlap")
                    .at("batch rows of the index lists")
                    .with("rows", batch)
                    .with("wanted", self.batch));
            }
            let rows = (1 + u64::from(self.waves))
                .saturating_mul(u64::from(batch))
                .saturating_mul(u64::from(self.query_rows));
            buffers[2] = ("index lists", lists, entries(rows));
            buffers[3] = ("counts of the index lists", counts, rows);
            used = 4;
        }
        for (index, (place, slice, words)) in buffers[..used].iter().enumerate() {
            let bytes = words.saturating_mul(4);
            let apart = buffers[..index].iter().all(|(_, other, _)| !slice.overlaps(other));
            if slice.bytes() < bytes || !device.owns(slice) || !slice.address().is_multiple_of(4) || !apart {
                return Err(Error::new(Kind::OutOfRange, "overlap")
                    .at(*place)
                    .with("bytes", slice.bytes())
                    .with("wanted", bytes)
                    .hint("give each buffer words of its own, enough of them, of this device"));
            }
        }
        Ok(())
    }
}

fn refuse(place: &'static str, value: u32) -> Error {
    Error::new(Kind::InvalidConfig, "overlap").at(place).with("value", value)
}

impl Schedule {
    /// Takes the events.
    ///
    /// # Errors
    /// [`Kind::Exhausted`].
    pub fn new(device: &dyn Device) -> Result<Schedule> {
        Ok(Schedule {
            selected: device.event()?,
            resolved: device.event()?,
            gathered: device.event()?,
            prepared: device.event()?,
            attended: device.event()?,
            scattered: device.event()?,
        })
    }

    /// Orders `to` behind `from`, at the beginning of a captured step and around its launch.
    pub(crate) fn fork(&self, device: &dyn Device, from: Stream, to: Stream) -> Result<()> {
        edge(device, self.attended, from, to)
    }

    /// The end of a step: `to` is ordered behind everything that its layers have enqueued on `streams`.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for streams that are not the device's.
    pub fn join(&self, device: &dyn Device, streams: &OverlapStreams, to: Stream) -> Result<()> {
        edge(device, self.scattered, streams.scatter, to)?;
        edge(device, self.attended, streams.compute, to)
    }

    /// The same for a step of which a layer was not enqueued whole: behind all streams. All are tried.
    ///
    /// # Errors
    /// The first refusal, of those for a stream that is not the device's only where there is no other.
    pub fn join_all(&self, device: &dyn Device, streams: &OverlapStreams, to: Stream) -> Result<()> {
        let joined = [
            edge(device, self.resolved, streams.resolve, to),
            edge(device, self.gathered, streams.gather, to),
            edge(device, self.scattered, streams.scatter, to),
            edge(device, self.attended, streams.compute, to),
        ];
        let refused = |error: &&Result<()>| error.as_ref().is_err_and(|e| e.kind() != Kind::OutOfRange);
        joined.iter().find(refused).cloned().unwrap_or_else(|| joined.into_iter().collect())
    }

    /// The edge from R to G, for an engine that orders its layers itself.
    pub(crate) fn resolved(&self, device: &dyn Device, resolve: Stream, gather: Stream) -> Result<()> {
        edge(device, self.resolved, resolve, gather)
    }
}

/// Enqueues one layer, or draft_pass `draft_pass` of a draft layer, in the order `overlap`. The compute stream must be
/// ordered behind the step's begin.
///
/// # Errors
/// Those of [`Run::check`], before anything is enqueued. Afterwards [`Kind::InvalidConfig`] for a callback
/// that enqueues on another stream, on devices that see it; [`Kind::OutOfRange`] for layers and streams; the
/// callback's own.
pub fn enqueue_layer(
    device: &dyn Device,
    pools: Pools,
    run: &Run,
    layer: Layer,
    draft_pass: Option<u32>,
    overlap: Overlap,
    engine: &mut dyn Engine,
) -> Result<()> {
    run.check(device, overlap)?;
    let rows = match draft_pass {
        None => QueryRange { first: 0, count: run.query_rows },
        Some(draft_pass) => QueryRange { first: draft_pass, count: 1 },
    };
    let split_indices = run.split_indices.filter(|_| overlap != Overlap::None || run.waves > 1);
    let layer = LayerRun { device, pools, run, layer, rows, split_indices, engine };
    match overlap {
        Overlap::None => layer.none(),
        Overlap::Da => layer.da(),
        Overlap::Dba => layer.dba(),
    }
}

/// A whole step: every layer once, then `draft_passes` passes of the draft layers, each of them for every
/// micro-batch in turn: with compute streams of their own, one computes while the other's rows are fetched.
/// `by_layer` says each layer's order; its last `draft_layers` entries are those of the draft layers.
/// [`Schedule::join`] comes next.
///
/// # Errors
/// As [`enqueue_layer`]; [`Kind::InvalidConfig`] for more draft layers than layers.
pub fn enqueue_step(
    device: &dyn Device,
    pools: Pools,
    runs: &[Run],
    by_layer: &[Overlap],
    draft_layers: u32,
    draft_passes: u32,
    engine: &mut dyn Engine,
) -> Result<()> {
    let Some(once) = by_layer.len().checked_sub(draft_layers as usize) else {
        return Err(refuse("draft layers", draft_layers));
    };
    let layers = (0..).map(Layer).zip(by_layer);
    let drafts = (0..draft_passes)
        .flat_map(|draft_pass| layers.clone().skip(once).map(move |of| (of, Some(draft_pass))));
    for ((layer, overlap), draft_pass) in layers.clone().take(once).map(|of| (of, None)).chain(drafts) {
        for run in runs {
            enqueue_layer(device, pools, run, layer, draft_pass, *overlap, engine)?;
        }
    }
    Ok(())
}

/// `to` waits for all that `from` holds by now.
fn edge(device: &dyn Device, event: Event, from: Stream, to: Stream) -> Result<()> {
    if from == to {
        return Ok(());
    }
    device.edge(event, from, to)
}

impl LayerRun<'_> {
    fn none(mut self) -> Result<()> {
        let OverlapStreams { compute, .. } = self.run.streams;
        self.all(Work::Project)?;
        self.all(Work::Index)?;
        self.resolve(0, self.run.batch, compute)?;
        self.gather(0, self.run.batch, 0, compute)?;
        self.prepare()?;
        if self.run.waves == 1 {
            self.all(Work::Attend(Keys::All))?;
            return self.all(Work::Rest);
        }
        self.all(Work::Attend(Keys::Resident))?;
        self.fetched(compute)
    }

    fn da(mut self) -> Result<()> {
        let (events, OverlapStreams { compute, resolve, gather, .. }) = (self.run.schedule, self.run.streams);
        self.all(Work::Project)?;
        self.all(Work::Index)?;
        edge(self.device, events.selected, compute, resolve)?;
        self.resolve(0, self.run.batch, resolve)?;
        edge(self.device, events.resolved, resolve, gather)?;
        self.gather(0, self.run.batch, 0, gather)?;
        self.prepare()?;
        self.attend()
    }

    fn dba(mut self) -> Result<()> {
        let (events, OverlapStreams { compute, resolve, gather, .. }) = (self.run.schedule, self.run.streams);
        let (half, batch) = (self.run.half, self.run.batch);
        if half == 0 || half >= batch {
            return self.da();
        }
        self.all(Work::Project)?;
        for (first, count) in [(0, half), (half, batch - half)] {
            self.engine(Work::Index, first, count)?;
            edge(self.device, events.selected, compute, resolve)?;
            self.resolve(first, count, resolve)?;
            edge(self.device, events.resolved, resolve, gather)?;
            self.gather(first, count, 0, gather)?;
        }
        self.prepare()?;
        self.attend()
    }

    /// P, and S behind it.
    fn prepare(&mut self) -> Result<()> {
        let OverlapStreams { compute, scatter, .. } = self.run.streams;
        self.all(Work::Prepare)?;
        edge(self.device, self.run.schedule.prepared, compute, scatter)?;
        if !self.run.moves {
            return Ok(());
        }
        self.device.enqueue(self.pools, scatter, PoolOp::Scatter(self.range(0, self.run.batch)))
    }

    /// Attention over what was resident, once it is resolved; over what was fetched, once it is there.
    fn attend(mut self) -> Result<()> {
        let OverlapStreams { compute, resolve, gather, .. } = self.run.streams;
        edge(self.device, self.run.schedule.resolved, resolve, compute)?;
        self.all(Work::Attend(Keys::Resident))?;
        edge(self.device, self.run.schedule.gathered, gather, compute)?;
        self.fetched(gather)
    }

    /// Attention over what each wave fetches, the first of which is gathered, and the merge.
    fn fetched(mut self, gather: Stream) -> Result<()> {
        let compute = self.run.streams.compute;
        self.all(Work::Attend(Keys::Fetched { wave: 0 }))?;
        for wave in 1..self.run.waves {
            edge(self.device, self.run.schedule.attended, compute, gather)?;
            self.gather(0, self.run.batch, wave, gather)?;
            edge(self.device, self.run.schedule.gathered, gather, compute)?;
            self.all(Work::Attend(Keys::Fetched { wave }))?;
        }
        self.all(Work::Merge)?;
        self.all(Work::Rest)
    }

    fn range(&self, first: u32, count: u32) -> StepRange {
        let (micro_batch, layer, rows) = (self.run.micro_batch, self.layer, self.rows);
        StepRange { micro_batch, layer, first, count, rows }
    }

    /// R of some batch rows.
    fn resolve(&mut self, first: u32, count: u32, stream: Stream) -> Result<()> {
        let (selection, slots) =
            (self.of(self.run.selection, first, count)?, self.of(self.run.slots, first, count)?);
        let answer = Answer { slots, split_indices: self.split_indices };
        let range = self.range(first, count);
        self.device.enqueue(self.pools, stream, PoolOp::Resolve { range, selection, answer })
    }

    fn gather(&mut self, first: u32, count: u32, wave: u32, stream: Stream) -> Result<()> {
        if !self.run.moves {
            return Ok(());
        }
        let range = self.range(first, count);
        self.device.enqueue(self.pools, stream, PoolOp::Gather { range, wave })
    }

    /// The engine's work for all batch rows.
    fn all(&mut self, work: Work) -> Result<()> {
        self.engine(work, 0, self.run.batch)
    }

    fn engine(&mut self, work: Work, first: u32, count: u32) -> Result<()> {
        let (stream, micro_batch) = (self.run.streams.compute, self.run.micro_batch);
        let call = EngineCall { work, micro_batch, layer: self.layer, first, count, rows: self.rows };
        self.device.confine(Some(stream))?;
        // A callback that panics must not leave the device confined.
        let _lifted = Confined(self.device);
        let enqueued = self.engine.enqueue(&call, stream);
        self.device.confine(None).and(enqueued)
    }

    /// The part of a `[batch][query rows][k]` buffer that belongs to some batch rows. A draft layer's pass has
    /// one query row and takes the buffer's beginning.
    fn of(&self, buffer: Slice, first: u32, count: u32) -> Result<Slice> {
        let row = 4 * u64::from(self.run.top_k) * u64::from(self.rows.count);
        buffer.part(u64::from(first) * row, u64::from(count) * row)
    }
}

/// Lifts what confines a device.
struct Confined<'a>(&'a dyn Device);

impl Drop for Confined<'_> {
    fn drop(&mut self) {
        // Lifted already, with its answer, wherever nothing panicked.
        let _ = self.0.confine(None);
    }
}
