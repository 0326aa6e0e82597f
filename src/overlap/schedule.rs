//! The schedule: one layer's work on up to four streams, in one of four orders: none, DA, DBA or ahead.
//!
//! DA and DBA come from ESS (arXiv 2512.10576). They hide the gather of a layer's missed rows behind the layer's own
//! computation. Ahead hides it behind the computation of the layers before. It is for the layers that another one
//! selects for, whose missed rows are known that early.
//!
//! | letter | operation | done by |
//! |---|---|---|
//! | I0 | projections for the indexer, and the write of the index keys | the engine |
//! | I | indexer: logits and top-k; it writes the selection (I1 and I2: two parts of the batch) | the engine |
//! | R | resolve: maps the selection to slots, and decides misses and victims | forebay |
//! | G | gather: copies missed rows from the total pool to their slots | forebay |
//! | P | preparation of attention: writes the new rows to their landing slots | the engine |
//! | A | attention (A0: over resident and new rows, A1: over fetched rows) | the engine |
//! | M | merge of the results of split attention | the engine |
//! | Rest | the rest of the layer: output projection, experts | the engine |
//! | S | scatter: copies the new rows from the landing slots to the total pool | forebay |
//!
//! ```text
//! none   compute: I0 I R G P A Rest                   S after P
//! DA     compute: I0 I P . A0 . A1 M Rest             A0 (resident, new rows) after P, R
//!        resolve:      R                              A1 (fetched rows) after A0 and G
//!        gather:         G------                      S after P
//! DBA    compute: I0 I1 I2 P . A0 . A1 M Rest         R and G of the first half of the batch
//!        resolve:       R1 R2                         run while the second half's indexer runs
//!        gather:           G1-G2---
//! ahead  compute: I0 P . A Rest                       no I and R: another layer has selected
//!        gather:  (G, since that layer's R)
//! ```
//!
//! In the pictures a dot is a wait of the compute stream. DA (dual attention) calls attention twice, over resident and
//! new rows and over fetched rows; DBA also divides the batch in two for the indexer, R and G. The pictures show one
//! attention wave. With several, the order none splits attention too: I0 I R G P A0 A1 … M Rest, with a further G
//! before each further A1.
//!
//! On the compute stream, a layer's first operation follows the previous layer's last. This also orders all buffers
//! that the layers reuse. By the end of the previous layer, its attention has read that layer's index lists and scratch
//! slots, and its gather has read that layer's list of fetches. R of this layer comes after that. So no event is needed
//! between layers, except for the scatters, which the step joins at its end.
//!
//! **Several attention waves.** The fetched rows that have no budget slot are the *overflow*. If the overflow of a step
//! may be larger than the scratch slots hold, attention runs in waves. The first wave's G copies the fetched rows that
//! have budget slots to these slots, and a first part of the overflow to the scratch slots. Each further wave copies
//! another part of the overflow there. A1 reads what its wave copied, and the next wave's G waits for that A1. If a
//! batch row needs fewer waves, the other waves fetch and attend nothing for it. The number of waves never depends on
//! data, so a captured graph holds all of them.
//!
//! **Index groups.** Where layers share a selection, I and R are of the group's first layer only. Each other layer has
//! a G of its own. In the order none, G is on the compute stream, at the layer's place. In the others it waits for
//! nothing but R and the G before it on the gather stream, so it runs while the layers before compute. It may do so
//! because the layers of a group have scratch slots of their own (see `sparse::pool`): G overwrites no row that the
//! layer before still reads. DA also splits attention, for rows that come too late; DBA is DA there, since no indexer
//! is left to hide behind. With several attention waves, G also follows the waves of the layer before that are on its
//! stream.
//!
//! R of the next group follows the compute stream, which has waited for each G of this group. So R does not overwrite a
//! list of fetches that is still read, and the next group's G no scratch slots.
//!
//! **Edges.** An edge between two streams is one event: the schedule enqueues its record on one stream and, in the same
//! call, the wait on the other. On a single stream no event is needed. The schedule reuses its events from layer to
//! layer: a wait refers to the last record before it.
//!
//! **Capture.** In each layer the compute stream waits for the last R and G, and once, at the step's end, for all
//! scatters ([`Schedule::join`]). So a captured step joins every stream that it forks to. If micro-batches have compute
//! streams of their own, the caller that captures (`Cache::capture`, or the engine) must fork to them and join them.
//!
//! **Costs.** Besides R, G and S themselves, a layer costs at most seven edges. Each wave after the first costs two
//! more, and its G. The schedule allocates nothing and waits for nothing.
//!
//! The module `choice` chooses the order; the schedule does not. The engine's operations are callbacks, and what they
//! compute is the engine's own affair.

use crate::device::{Device, Event, PoolOp, Pools, ResolveOutput, Slice, SplitIndices, StepRange, Stream};
use crate::error::{Error, Kind, Result};
use crate::geometry::Geometries;
use crate::ids::{Layer, MicroBatch};
use crate::residency::QueryRange;
use crate::step::OverlapStreams;

/// The order of a layer's work: which computation hides the gather.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Overlap {
    /// No computation: attention waits for the gather, as in today's engines.
    #[default]
    None,
    /// The preparation of attention, and attention over the resident rows.
    Da,
    /// The same, and the indexer of the second half of the batch.
    Dba,
    /// The layers before, back to the one that selects. Only for a layer that another one selects for. Attention is not
    /// split.
    Ahead,
}

impl Overlap {
    /// All orders.
    pub const ALL: [Overlap; 4] = [Overlap::None, Overlap::Da, Overlap::Dba, Overlap::Ahead];
    /// The orders of a layer that selects for itself.
    pub const FIRST: [Overlap; 3] = [Overlap::None, Overlap::Da, Overlap::Dba];
    /// The orders of a layer that another one selects for, without DBA, which would be DA.
    pub const FOLLOWER: [Overlap; 3] = [Overlap::None, Overlap::Da, Overlap::Ahead];

    /// The name that tables of orders, files and the command line use.
    pub const fn name(self) -> &'static str {
        match self {
            Overlap::None => "none",
            Overlap::Da => "da",
            Overlap::Dba => "dba",
            Overlap::Ahead => "ahead",
        }
    }
}

/// A piece of a layer's work that the engine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// I0: the projections that the indexer needs, and the write of the index keys. A layer that another one selects
    /// for has no indexer; there it is what comes before the preparation of attention.
    Project,
    /// I: logits and top-k of the call's batch rows, which write the selection. Not in a layer that another one selects
    /// for.
    Index,
    /// P: the preparation of attention, which writes the new rows to their landing slots.
    Prepare,
    /// A: attention over the selected rows that [`Attended`] names.
    Attend(Attended),
    /// M: merges the results of split attention by their log-sum-exp. Only after split attention.
    Merge,
    /// The rest of the layer after attention: output projection (but see [`Engine::enqueue_output`]), experts,
    /// communication.
    Rest,
}

/// Which of the selected rows a call of attention reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Attended {
    /// All selected rows, through the slots that the resolve returned.
    All,
    /// The rows that were resident, and the new rows of this step: index list 0 of the [`SplitIndices`].
    Resident,
    /// The rows that a wave fetched: index list `1 + wave`.
    Fetched {
        /// The wave.
        wave: u32,
    },
}

/// One call to the engine: the work to enqueue, and its place in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineCall {
    /// The work to enqueue.
    pub work: Work,
    /// The micro-batch.
    pub micro_batch: MicroBatch,
    /// The layer.
    pub layer: Layer,
    /// The first batch row.
    pub first: u32,
    /// The number of batch rows: a half of the batch for DBA's indexer, all of them otherwise.
    pub count: u32,
    /// The query rows of each batch row: one query row in a draft pass.
    pub rows: QueryRange,
}

/// The engine's side of a layer: callbacks that enqueue its work.
///
/// The methods with a default are for engines whose weights are not always where they are used, such as those of
/// [`crate::weights`]: [`Engine::enter`] comes before everything that reads a layer's attention weights, and
/// [`Engine::leave`] behind the output projection, which is their last reader. The experts come after that, so the
/// weights of a later layer can be fetched beside them.
pub trait Engine {
    /// Enqueues the work on `stream`. The callback may fork work to the engine's own streams, and must join it to
    /// `stream` before it returns. It enqueues that work without forebay: a device that sees the engine's work accepts
    /// it on `stream` only.
    ///
    /// # Errors
    /// The engine's own errors. After an error the layer is not enqueued any further, and the step is abandoned.
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()>;

    /// Called before the first work of a layer, or of a draft pass of a layer, is enqueued on `stream`, the
    /// micro-batch's compute stream. It may enqueue on any stream. By default nothing.
    ///
    /// # Errors
    /// As [`Engine::enqueue`].
    fn enter(&mut self, _layer: Layer, _micro_batch: MicroBatch, _stream: Stream) -> Result<()> {
        Ok(())
    }

    /// Enqueues the output projection, for an engine that divides [`Work::Rest`] behind it; it is then no part of
    /// `Rest`. `call` is the one that [`Work::Rest`] gets next. By default nothing, and `Rest` contains it.
    ///
    /// # Errors
    /// As [`Engine::enqueue`].
    fn enqueue_output(&mut self, _call: &EngineCall, _stream: Stream) -> Result<()> {
        Ok(())
    }

    /// Called between [`Engine::enqueue_output`] and [`Work::Rest`]. It may enqueue on any stream. An engine whose
    /// output projection is a part of `Rest` still reads the weights after this, and must not give them up here. By
    /// default nothing.
    ///
    /// # Errors
    /// As [`Engine::enqueue`].
    fn leave(&mut self, _layer: Layer, _micro_batch: MicroBatch, _stream: Stream) -> Result<()> {
        Ok(())
    }

    /// Called once by the calls of a cache that enqueue all layers of a step, behind the last of them. `stream` is the
    /// first micro-batch's compute stream, on which a capture begins and ends: an engine that forked streams of its own
    /// in [`Engine::enter`] or [`Engine::leave`] of a captured step joins them to it. Draft passes that are enqueued
    /// layer by layer afterwards are not before it. By default nothing.
    ///
    /// # Errors
    /// As [`Engine::enqueue`].
    fn end(&mut self, _stream: Stream) -> Result<()> {
        Ok(())
    }
}

/// The events of one micro-batch, reused for every layer.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// After I: the selection is written.
    selected: Event,
    /// After R: the slots are written.
    resolved: Event,
    /// After G: the rows are fetched.
    gathered: Event,
    /// After P: the new rows are written.
    prepared: Event,
    /// After A1 of a wave: its scratch slots are free.
    attended: Event,
    /// After S: the new rows are stored.
    scattered: Event,
    /// Of an engine that orders its layers itself.
    by_hand: Event,
}

/// The arguments of one micro-batch that do not change from layer to layer.
#[derive(Clone, Debug)]
pub struct Run {
    /// The cache's layers and index groups.
    pub geometry: Geometries,
    /// The micro-batch's events.
    pub schedule: Schedule,
    /// The micro-batch.
    pub micro_batch: MicroBatch,
    /// The number of batch rows: of the step, or of the captured batch in which it runs. The other rows of a captured
    /// batch are inert.
    pub batch: u32,
    /// The first batch row of DBA's second half. With 0 or `batch`, DBA runs the whole batch at once.
    pub half: u32,
    /// Query rows of the step.
    pub query_rows: u32,
    /// Positions that a query row selects.
    pub top_k: u32,
    /// Attention waves over fetched rows, at least 1.
    pub waves: u32,
    /// Whether rows have bytes. If not, the schedule enqueues no gather and no scatter.
    pub moves: bool,
    /// Its streams.
    pub streams: OverlapStreams,
    /// The selected positions, `[batch][query rows][k]` i32, which the engine's top-k writes. The buffer may be larger;
    /// the layers use its beginning. So does a draft pass, which has one query row.
    pub selection: Slice,
    /// The slots that R writes, in the same shape.
    pub slots: Slice,
    /// The index lists of split attention, for `batch` rows or more. `None` if every layer runs in the order `none`
    /// with one wave.
    pub split_indices: Option<SplitIndices>,
}

/// One layer of a run, while it is enqueued.
struct LayerRun<'a> {
    device: &'a dyn Device,
    pools: Pools,
    run: &'a Run,
    layer: Layer,
    /// Whether the layer selects, for itself and its group.
    leads: bool,
    /// Whether it also selects for others.
    has_followers: bool,
    rows: QueryRange,
    split_indices: Option<SplitIndices>,
    engine: &'a mut dyn Engine,
}

impl Run {
    /// Checks, before anything is enqueued, that `layer` can be enqueued in the order `overlap`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for an order that needs index lists without them, and for the order ahead in a layer
    /// that selects for itself; [`Kind::OutOfRange`] for buffers that are too short, overlap, are not aligned to a
    /// word, or belong to another device.
    pub fn check(&self, device: &dyn Device, layer: Layer, overlap: Overlap) -> Result<()> {
        if self.waves == 0 {
            return Err(refuse("attention waves", 0));
        }
        let splits = matches!(overlap, Overlap::Da | Overlap::Dba) || self.waves > 1;
        if self.split_indices.is_none() && splits {
            return Err(refuse("split attention needs index lists", self.waves));
        }
        if overlap == Overlap::Ahead && self.geometry.first_of(layer.index()) == layer.index() {
            return Err(Error::new(Kind::InvalidConfig, "overlap")
                .at("the order ahead in a layer that selects for itself")
                .with("layer", layer.0)
                .hint("the layers behind the first of an index group can run ahead"));
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
                    .hint("give each buffer enough memory of its own, on this device"));
            }
        }
        Ok(())
    }
}

fn refuse(place: &'static str, value: u32) -> Error {
    Error::new(Kind::InvalidConfig, "overlap").at(place).with("value", value)
}

impl Schedule {
    /// Creates the events.
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
            by_hand: device.event()?,
        })
    }

    /// Orders `to` after `from`, at the beginning of a captured step and around its launch.
    pub(crate) fn fork(&self, device: &dyn Device, from: Stream, to: Stream) -> Result<()> {
        edge(device, self.attended, from, to)
    }

    /// Orders `to`, at the end of a step, after all work that the step's layers have enqueued on `streams`.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for streams of another device.
    pub fn join(&self, device: &dyn Device, streams: &OverlapStreams, to: Stream) -> Result<()> {
        edge(device, self.scattered, streams.scatter, to)?;
        edge(device, self.attended, streams.compute, to)
    }

    /// Orders `to` after all of `streams`, for a step with a layer that was not enqueued completely. It tries every
    /// stream, even after an error.
    ///
    /// # Errors
    /// The first error. It returns an error for a stream of another device only if there is no other error.
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

    /// An edge between R and G of an engine that orders its layers itself. Its event is none of the schedule's.
    pub(crate) fn by_hand(&self, device: &dyn Device, from: Stream, to: Stream) -> Result<()> {
        edge(device, self.by_hand, from, to)
    }
}

/// Enqueues one layer, or draft pass `draft_pass` of a draft layer, in the order `overlap`. The compute stream must be
/// ordered after the step's begin. A layer that another one selects for must come behind that one's call.
///
/// # Errors
/// The errors of [`Run::check`], before anything is enqueued. Later [`Kind::InvalidConfig`] for a callback that
/// enqueues on another stream, if the device can see it; [`Kind::OutOfRange`] for layers and streams; the callback's
/// own errors.
pub fn enqueue_layer(
    device: &dyn Device,
    pools: Pools,
    run: &Run,
    layer: Layer,
    draft_pass: Option<u32>,
    overlap: Overlap,
    engine: &mut dyn Engine,
) -> Result<()> {
    run.check(device, layer, overlap)?;
    let rows = match draft_pass {
        None => QueryRange { first: 0, count: run.query_rows },
        Some(draft_pass) => QueryRange { first: draft_pass, count: 1 },
    };
    let group = run.geometry.members(run.geometry.group_of(layer.index()));
    let (leads, has_followers) = (group.start == layer.index(), group.len() > 1);
    // Another layer of the group may split its attention.
    let splits = overlap != Overlap::None || run.waves > 1 || has_followers;
    let split_indices = run.split_indices.filter(|_| splits);
    engine.enter(layer, run.micro_batch, run.streams.compute)?;
    let layer = LayerRun { device, pools, run, layer, leads, has_followers, rows, split_indices, engine };
    match overlap {
        Overlap::None => layer.none(),
        Overlap::Ahead => layer.follow(run.waves > 1),
        _ if !leads => layer.follow(true),
        Overlap::Da => layer.da(),
        Overlap::Dba => layer.dba(),
    }
}

/// Enqueues a whole step: every layer once, then `draft_passes` draft passes of the draft layers. In each layer and
/// each draft pass, the micro-batches take turns. If they have compute streams of their own, one micro-batch computes
/// while the rows of the other are fetched. `by_layer` gives the order of each layer; its last `draft_layers` entries
/// are those of the draft layers. Call [`Schedule::join`] next.
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

/// Makes `to` wait for all work that `from` holds now.
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
        if self.leads {
            self.all(Work::Index)?;
            self.resolve(0, self.run.batch, compute)?;
            if self.has_followers {
                self.device.record(self.run.schedule.resolved, compute)?;
            }
        }
        self.gather(0, self.run.batch, 0, compute)?;
        self.prepare()?;
        if self.run.waves == 1 {
            self.all(Work::Attend(Attended::All))?;
            return self.rest();
        }
        self.all(Work::Attend(Attended::Resident))?;
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

    /// DA and ahead in a layer that another one selects for: its G follows R, which the group's first layer recorded,
    /// and nothing else.
    fn follow(mut self, splits: bool) -> Result<()> {
        let (events, OverlapStreams { compute, gather, .. }) = (self.run.schedule, self.run.streams);
        if gather != compute {
            self.device.wait(gather, events.resolved)?;
        }
        self.gather(0, self.run.batch, 0, gather)?;
        self.all(Work::Project)?;
        self.prepare()?;
        if splits {
            return self.attend();
        }
        edge(self.device, events.gathered, gather, compute)?;
        self.all(Work::Attend(Attended::All))?;
        self.rest()
    }

    /// P, and S after it.
    fn prepare(&mut self) -> Result<()> {
        let OverlapStreams { compute, scatter, .. } = self.run.streams;
        self.all(Work::Prepare)?;
        edge(self.device, self.run.schedule.prepared, compute, scatter)?;
        if !self.run.moves {
            return Ok(());
        }
        self.device.enqueue(self.pools, scatter, PoolOp::Scatter(self.range(0, self.run.batch)))
    }

    /// Attention over the resident rows after R, then over the fetched rows after G.
    fn attend(mut self) -> Result<()> {
        let OverlapStreams { compute, resolve, gather, .. } = self.run.streams;
        if self.leads {
            edge(self.device, self.run.schedule.resolved, resolve, compute)?;
        }
        self.all(Work::Attend(Attended::Resident))?;
        edge(self.device, self.run.schedule.gathered, gather, compute)?;
        self.fetched(gather)
    }

    /// Attention over the rows of each wave, and the merge. The first wave is already gathered.
    fn fetched(mut self, gather: Stream) -> Result<()> {
        let compute = self.run.streams.compute;
        self.all(Work::Attend(Attended::Fetched { wave: 0 }))?;
        for wave in 1..self.run.waves {
            edge(self.device, self.run.schedule.attended, compute, gather)?;
            self.gather(0, self.run.batch, wave, gather)?;
            edge(self.device, self.run.schedule.gathered, gather, compute)?;
            self.all(Work::Attend(Attended::Fetched { wave }))?;
        }
        self.all(Work::Merge)?;
        self.rest()
    }

    /// The output projection, the end of the use of the layer's attention weights, and the rest.
    fn rest(&mut self) -> Result<()> {
        let (layer, micro_batch, stream) = (self.layer, self.run.micro_batch, self.run.streams.compute);
        self.confined(Work::Rest, 0, self.run.batch, |engine, call| engine.enqueue_output(call, stream))?;
        self.engine.leave(layer, micro_batch, stream)?;
        self.all(Work::Rest)
    }

    fn range(&self, first: u32, count: u32) -> StepRange {
        let (micro_batch, layer, rows) = (self.run.micro_batch, self.layer, self.rows);
        StepRange { micro_batch, layer, first, count, rows }
    }

    /// R of `count` batch rows from `first` on.
    fn resolve(&mut self, first: u32, count: u32, stream: Stream) -> Result<()> {
        let (selection, slots) =
            (self.of(self.run.selection, first, count)?, self.of(self.run.slots, first, count)?);
        let output = ResolveOutput { slots, split_indices: self.split_indices };
        let range = self.range(first, count);
        self.device.enqueue(self.pools, stream, PoolOp::Resolve { range, selection, output })
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
        let stream = self.run.streams.compute;
        self.confined(work, first, count, |engine, call| engine.enqueue(call, stream))
    }

    /// One callback that may enqueue on the compute stream alone.
    fn confined(
        &mut self,
        work: Work,
        first: u32,
        count: u32,
        enqueue: impl FnOnce(&mut dyn Engine, &EngineCall) -> Result<()>,
    ) -> Result<()> {
        let (stream, micro_batch) = (self.run.streams.compute, self.run.micro_batch);
        let call = EngineCall { work, micro_batch, layer: self.layer, first, count, rows: self.rows };
        self.device.confine(Some(stream))?;
        // A callback that panics must not leave the device confined to this stream.
        let _lifted = Confined(self.device);
        let enqueued = enqueue(self.engine, &call);
        self.device.confine(None).and(enqueued)
    }

    /// The part of a `[batch][query rows][k]` buffer that belongs to `count` batch rows from `first` on. A draft pass
    /// has one query row and uses the beginning of the buffer.
    fn of(&self, buffer: Slice, first: u32, count: u32) -> Result<Slice> {
        let row = 4 * u64::from(self.run.top_k) * u64::from(self.rows.count);
        buffer.part(u64::from(first) * row, u64::from(count) * row)
    }
}

/// Lifts the confinement of a device to one stream when dropped.
struct Confined<'a>(&'a dyn Device);

impl Drop for Confined<'_> {
    fn drop(&mut self) {
        // If the callback did not panic, the confinement has already been lifted and its result checked.
        let _ = self.0.confine(None);
    }
}
