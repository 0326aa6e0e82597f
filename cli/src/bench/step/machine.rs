//! A cache with its sequences, and one step of them, which is timed and then compared with the rule.
//!
//! Each sequence has its own prompt, written row by row, so that the rows of a step are scattered over the total pool,
//! as in service. If the pool is too small, it has as many prompts as fit, at least one, and the other sequences are
//! forks of these in turn. Fewer or shorter sequences would be another operating point; forks need as many slots and
//! tables on the device, and fetch other rows of their prompt ([`super::selections`]). Every step's rows are accepted,
//! so each step commits what the previous one has landed.
//!
//! **Time** is measured on the compute stream, from before the step's begin to after its end. Some of the engine's
//! work runs first, so that the host is ahead of the device, as between the steps of an engine in service.
//!
//! **Compared with the rule**: hits and misses of every layer of every step; on demand every sequence's digest, and
//! the rows in a step's slots with the bytes that were written to the total pool.

use std::sync::Arc;
use std::time::Instant;

use forebay::device::{Device, Event, Outcome, Slice, SplitIndices, Stream, Ticket};
use forebay::measure::{Mark, Probe, host_request};
use forebay::overlap::{Overlap, OverlapStreams};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Captured, Config, Error, Geometry, Kind, Layer,
    LayerCall, Layers, Memory, MicroBatch, Open, Result, Sequence, Step,
};

use super::engine::{Works, products};
use super::point::Point;
use super::selections::{PATTERNS, Picks, Rule};
#[cfg(doc)]
use crate::bench::asked::Asked;

/// The most layers whose rows are checked.
const SAMPLED: u32 = 8;
/// Besides fetched rows, one of this many entries of a query row's slots is checked.
const EVERY: usize = 64;
/// Fetched rows of a sequence that are checked.
const FETCHED: usize = 24;

/// How a step's layers are enqueued.
pub enum Way<'a> {
    /// By one launch.
    Launch(&'a Captured),
    /// One call for each operation.
    Calls(&'a [Overlap], &'a mut Works),
}

/// The times of a step, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Took {
    /// On the device, the whole step.
    pub us: f64,
    /// On the device, its begin.
    pub begin_us: f64,
    /// On the device, its end.
    pub end_us: f64,
    /// On the host, the call of prepare.
    pub prepare_host_us: f64,
    /// On the host, launching its layers or enqueueing them.
    pub layers_host_us: f64,
    /// On the host, the calls of finish and retire.
    pub finish_host_us: f64,
    /// Whether everything was enqueued before the device had ended the run-up; otherwise the device waited for the
    /// host.
    pub ahead: bool,
}

/// See the module's head.
#[derive(Debug)]
pub struct Machine {
    /// The device.
    pub device: Arc<dyn Probe>,
    /// The cache.
    pub cache: Cache,
    /// Streams and buffers of all sequences.
    pub layers: Layers,
    /// By pattern, the prepared selections.
    pub staging: Slice,
    /// The expected outcome of the steps.
    pub rule: Rule,
    /// The number of comparisons so far.
    pub checked: u64,
    /// Rounds of the engine's work in the run-up, and their microseconds, as far as they are known.
    pub run_up: (u32, f64),
    /// As [`Asked::persistent`]: the same kernels as for the work that the rounds were calibrated with.
    pub persistent: Option<u32>,
    /// Different prompts: sequence i has the prompt of i modulo this number.
    pub prompts: u32,
    /// Bytes of the total pool.
    pub pool: u64,
    sequences: Vec<Sequence>,
    marks: [Mark; 4],
    ended: Event,
}

/// A comparison that failed.
fn wrong(place: &'static str) -> Error {
    Error::new(Kind::Internal, "bench step").at(place)
}

/// Microseconds since the instant.
pub fn since(begin: Instant) -> f64 {
    begin.elapsed().as_nanos() as f64 / 1e3
}

/// The bytes of a prompt's row, in whole words: they identify prompt, layer and position.
fn row_bytes(prompt: u32, layer: u32, position: u32, row: &mut [u8]) {
    let place = u64::from(prompt) << 48 | u64::from(layer) << 32 | u64::from(position);
    let mut seed = place.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    seed = (seed ^ (seed >> 31)).wrapping_mul(0x94D0_49BB_1331_11EB);
    seed ^= seed >> 29;
    for (number, word) in (1_u64..).zip(row.as_chunks_mut().0) {
        *word = seed.wrapping_add(number.wrapping_mul(0x9E37_79B9_7F4A_7C15)).to_le_bytes();
    }
}

/// Bytes of a host page of all layers.
fn page_bytes(point: &Point) -> Result<u64> {
    Ok(Geometry::new(point.shape())?.host_page_bytes() * u64::from(point.layers))
}

/// How many prompts fit in a pool of this size in addition to the sequences' tails; and the pages in all.
fn prompts(point: &Point, promised: u32, pool: u64) -> Result<(u32, u32)> {
    let page_tokens = point.shape().page_tokens;
    let prompt = point.context / page_tokens;
    let tails = point.batch * ((point.context + promised + point.query_rows).div_ceil(page_tokens) - prompt);
    let room = (pool / page_bytes(point)?.max(1)).saturating_sub(tails.into()) / u64::from(prompt.max(1));
    let prompts = room.clamp(1, point.batch.into()) as u32;
    Ok((prompts, prompts * prompt + tails))
}

/// The configuration of a point's cache with this many host pages, with its rows on `node`.
fn config(point: &Point, promised: u32, pages: u32, node: Option<u32>) -> Config {
    let shape = point.shape();
    let memory = Memory { huge: true, populate: true, lock: false, node };
    let tokens = point.context + promised;
    let all = Config {
        memory,
        query_rows: point.query_rows,
        steps_in_flight: 1,
        ..Config::new(shape, point.batch, tokens, point.budget)
    };
    Config { host_pages: pages, index_pages: pages, ..all }
}

/// The point with as many sequences as fit in the device's free memory.
fn fitting(device: &dyn Probe, mut point: Point, promised: u32, pool: u64) -> Result<Point> {
    let free = device.facts()?.memory_free;
    while point.batch > 1 && free > 0 {
        let (_, pages) = prompts(&point, promised, pool)?;
        let needed = config(&point, promised, pages, None).footprint(device.granularity())?.device();
        // A tenth is left for buffers, graphs and the driver.
        if needed <= free / 10 * 9 {
            break;
        }
        point.batch -= point.batch.div_ceil(8);
    }
    Ok(point)
}

impl Machine {
    /// Opens and joins the sequences of a point, or as many as fit in the device's memory, with as many prompts as fit
    /// in a total pool of `pool` bytes. Nothing is resident.
    ///
    /// # Errors
    /// Errors of cache and device.
    pub fn open(
        device: &Arc<dyn Probe>,
        point: &Point,
        promised: u32,
        share: f64,
        pool: u64,
    ) -> Result<Machine> {
        let point = fitting(&**device, point.clone(), promised, pool)?;
        let (prompts, pages) = prompts(&point, promised, pool)?;
        // Like the ceilings' memory: on the GPU's node, if the system reports it.
        let node = host_request(&**device, 0)?.node;
        let config = config(&point, promised, pages, node);
        let mut cache = Cache::new(config, Arc::clone(device) as Arc<dyn Device>)?;
        let stream = || device.stream();
        // As with an engine: the side streams have priority over its own.
        let compute = device.engine_stream()?;
        let streams = OverlapStreams { compute, resolve: stream()?, gather: stream()?, scatter: stream()? };
        let ended = device.event()?;
        let sequences = sequences(
            &mut cache,
            &point,
            (prompts, promised),
            &|ticket| {
                device.record(ended, streams.compute)?;
                device.synchronize(ended)?;
                match ticket.poll() {
                    Some(Outcome::Done) => Ok(()),
                    _ => Err(wrong("a sequence did not join")),
                }
            },
            streams.compute,
        )?;
        let entries = u64::from(point.batch) * u64::from(point.query_rows) * u64::from(point.top_k);
        let words = |count: u64| device.allocate(4 * count);
        let counts = u64::from(point.batch * point.query_rows);
        let split_indices =
            SplitIndices { lists: words(2 * entries)?, counts: words(2 * counts)?, batch: point.batch };
        let buffers = Buffers {
            selection: words(entries)?,
            slots: words(entries)?,
            split_indices: Some(split_indices),
        };
        let marks = [device.mark()?, device.mark()?, device.mark()?, device.mark()?];
        Ok(Machine {
            staging: words(u64::from(PATTERNS) * entries)?,
            layers: Layers { streams, batch: point.batch, half: point.batch / 2, buffers },
            rule: Rule::new(point.extent(promised, share))?,
            device: Arc::clone(device),
            cache,
            checked: 0,
            run_up: (0, 0.0),
            persistent: None,
            prompts,
            pool: u64::from(pages) * page_bytes(&point)?,
            sequences,
            marks,
            ended,
        })
    }

    /// Sequences.
    pub fn batch(&self) -> u32 {
        self.sequences.len() as u32
    }

    /// Streams and buffers of a step's first `batch` sequences.
    pub fn bucket(&self, batch: u32) -> Layers {
        Layers { batch, half: batch / 2, ..self.layers }
    }

    /// Copies a step's selections to the buffers that the layers copy from.
    fn stage(&self, picks: &Picks) -> Result<()> {
        let range = Works::part_bytes(&self.staging);
        for (pattern, selection) in (0..).zip(&picks.selections) {
            let bytes: Vec<u8> = selection.iter().flat_map(|position| position.to_le_bytes()).collect();
            self.device.write(self.staging.part(pattern * range, bytes.len() as u64)?, &bytes)?;
        }
        Ok(())
    }

    fn prepare(&mut self, picks: &Picks, stream: Stream) -> Result<Step> {
        let rows = self.sequences.iter().zip(&picks.accepted).map(|(sequence, accepted)| BatchRow {
            sequence: *sequence,
            accepted: Accepted::Rows(*accepted),
            query_rows: picks.query_rows,
        });
        let rows: Vec<BatchRow> = rows.take(picks.batch as usize).collect();
        self.cache.prepare(MicroBatch(0), picks.query_rows, &rows, None, stream)
    }

    /// The run-up: some of the engine's work, so that the host is ahead of the device.
    pub fn run_up(&self) -> Result<()> {
        match self.run_up.0 {
            0 => Ok(()),
            rounds => products(&*self.device, self.layers.streams.compute, rounds, self.persistent),
        }
    }

    /// The time of `enqueue` on the compute stream, and on the host, after a run-up.
    ///
    /// # Errors
    /// Its errors.
    pub fn timed(&self, enqueue: impl FnOnce(Stream) -> Result<()>) -> Result<(f64, f64)> {
        let (compute, [from, to, ..]) = (self.layers.streams.compute, self.marks);
        self.run_up()?;
        self.device.stamp(from, compute)?;
        let begin = Instant::now();
        enqueue(compute)?;
        let host = since(begin);
        self.device.stamp(to, compute)?;
        Ok((self.device.elapsed_us(from, to)?, host))
    }

    /// One step, timed and compared with the rule.
    ///
    /// # Errors
    /// Errors of cache and device; [`Kind::Internal`] for other hits or misses than the rule's.
    pub fn step(&mut self, picks: &Picks, way: Way<'_>) -> Result<Took> {
        self.stage(picks)?;
        let (compute, [begin, prepared, done, end]) = (self.layers.streams.compute, self.marks);
        let enqueued = Instant::now();
        self.run_up()?;
        self.device.stamp(begin, compute)?;
        let at = Instant::now();
        let mut step = self.prepare(picks, compute)?;
        let prepare_host_us = since(at);
        self.device.stamp(prepared, compute)?;
        let at = Instant::now();
        match way {
            Way::Launch(captured) => self.cache.launch(captured, &mut [&mut step])?,
            Way::Calls(orders, works) => {
                let layers = self.bucket(picks.batch);
                self.cache.overlap_steps(&mut [(&mut step, layers)], orders, 0, works)?;
            }
        }
        let layers_host_us = since(at);
        self.device.stamp(done, compute)?;
        let at = Instant::now();
        self.cache.finish(&mut step, compute)?;
        let finish_host_us = since(at);
        self.device.stamp(end, compute)?;
        let ahead = since(enqueued) < self.run_up.1;
        let retire_host_us = self.retire(step, picks)?;
        Ok(Took {
            us: self.device.elapsed_us(begin, end)?,
            begin_us: self.device.elapsed_us(begin, prepared)?,
            end_us: self.device.elapsed_us(done, end)?,
            prepare_host_us,
            layers_host_us,
            finish_host_us: finish_host_us + retire_host_us,
            ahead,
        })
    }

    /// Waits for a step's end and compares its counts; returns the host's time of retire.
    fn retire(&mut self, step: Step, picks: &Picks) -> Result<f64> {
        let compute = self.layers.streams.compute;
        self.device.record(self.ended, compute)?;
        self.device.synchronize(self.ended)?;
        let at = Instant::now();
        let retired = self.cache.retire(step, compute).map_err(|unretired| unretired.error)?;
        let host_us = since(at);
        for (layer, found) in (0..).zip(retired.layers()) {
            let rule = &picks.counts[Picks::pattern(layer)];
            if (found.hits, found.misses, found.scratch) != (rule.hits, rule.misses, rule.scratch) {
                return Err(wrong("a layer's hits and misses are not the rule's")
                    .with("layer", layer)
                    .with("hits", found.hits)
                    .with("misses", found.misses)
                    .with("hits by the rule", rule.hits)
                    .with("misses by the rule", rule.misses));
            }
            self.checked += 1;
        }
        Ok(host_us)
    }

    /// Fills the slots with steps that miss all they select, until no slot is empty.
    ///
    /// # Errors
    /// Errors of [`Machine::step`].
    pub fn fill(&mut self, works: &mut Works) -> Result<()> {
        let config = self.cache.config();
        let (query_rows, budget) = (config.query_rows, config.min_budget);
        let orders = vec![Overlap::None; config.shape.layers as usize];
        let selected = self.rule.selected(query_rows);
        for _ in 0..fills(budget, selected) {
            let picks = self.rule.next(self.batch(), query_rows, selected)?;
            self.step(&picks, Way::Calls(&orders, works))?;
        }
        Ok(())
    }

    /// Compares every sequence's digest with the rule's.
    ///
    /// # Errors
    /// [`Kind::Internal`] names the sequence.
    pub fn check_digests(&mut self) -> Result<()> {
        let layers = self.cache.geometry().layers();
        for (lane, sequence) in (0..).zip(&self.sequences) {
            if self.cache.digest(*sequence)? != self.rule.digest(lane, layers) {
                return Err(wrong("a sequence's digest is not the rule's").with("sequence", lane));
            }
        }
        self.checked += u64::from(self.batch());
        Ok(())
    }

    /// One layer of an open step without the engine's work: the selection, R, and G if requested.
    ///
    /// # Errors
    /// Errors of cache and device.
    pub fn resolve(&self, step: &Step, layer: Layer, works: &Works, slots: Slice, rows: u32) -> Result<()> {
        let compute = self.layers.streams.compute;
        works.select(layer, 0, rows, compute)?;
        let selection = self.layers.buffers.selection.part(0, slots.bytes())?;
        let buffers = Buffers { selection, slots, split_indices: None };
        self.cache.resolve(step, LayerCall::whole(layer), compute, buffers)
    }

    /// A row of the total pool, of a sequence by its number.
    #[cfg(test)]
    pub fn row(&mut self, sequence: usize, layer: Layer, position: u32) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.cache.geometry().row_bytes() as usize];
        self.cache.read_row(self.sequences[sequence], layer, position, &mut bytes)?;
        Ok(bytes)
    }

    /// Begins a step whose layers the caller enqueues on the compute stream; [`Machine::ends`] comes next.
    ///
    /// # Errors
    /// Errors of cache and device.
    pub fn begins(&mut self, picks: &Picks) -> Result<Step> {
        self.stage(picks)?;
        self.run_up()?;
        self.prepare(picks, self.layers.streams.compute)
    }

    /// Ends the step, and compares its counts.
    ///
    /// # Errors
    /// Errors of [`Machine::step`].
    pub fn ends(&mut self, mut step: Step, picks: &Picks) -> Result<()> {
        self.cache.finish(&mut step, self.layers.streams.compute)?;
        self.retire(step, picks).map(|_| ())
    }

    /// One step, not timed, after which rows are read from the slots of some layers and compared with the bytes
    /// written to the total pool: rows that this step fetched, and rows that were resident before.
    ///
    /// # Errors
    /// Errors of [`Machine::step`]; [`Kind::Internal`] names layer, position and slot of a wrong row.
    pub fn check_rows(&mut self, picks: &Picks, works: &Works, answers: Slice) -> Result<()> {
        let (layers, bytes) = (self.cache.geometry().layers(), 4 * picks.selections[0].len() as u64);
        let every = layers.div_ceil(SAMPLED);
        let step = self.begins(picks)?;
        let compute = self.layers.streams.compute;
        for layer in (0..layers).map(Layer) {
            // The last place is for slots that are not checked.
            let place = if layer.0.is_multiple_of(every) { layer.0 / every } else { SAMPLED };
            let slots = answers.part(u64::from(place) * (answers.bytes() / u64::from(SAMPLED + 1)), bytes)?;
            self.resolve(&step, layer, works, slots, picks.batch)?;
            self.cache.gather(&step, LayerCall::whole(layer), 0, compute)?;
            self.cache.scatter(&step, LayerCall::whole(layer), compute)?;
        }
        self.ends(step, picks)?;
        for place in 0..layers.div_ceil(every) {
            let at = u64::from(place) * (answers.bytes() / u64::from(SAMPLED + 1));
            self.check_layer(picks, Layer(place * every), answers.part(at, bytes)?)?;
        }
        Ok(())
    }

    /// Memory for the slots that [`Machine::check_rows`] reads.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn answers(&self) -> Result<Slice> {
        self.device.allocate(u64::from(SAMPLED + 1) * self.layers.buffers.slots.bytes())
    }

    fn check_layer(&mut self, picks: &Picks, layer: Layer, answer: Slice) -> Result<()> {
        let mut bytes = vec![0; answer.bytes() as usize];
        self.device.read(answer, &mut bytes)?;
        let slots: Vec<i32> = bytes.as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word)).collect();
        let pattern = Picks::pattern(layer.0);
        let (selection, missed) = (&picks.selections[pattern], &picks.missed[pattern]);
        let (of_row, missed_of) =
            (selection.len() / picks.batch as usize, missed.len() / picks.batch as usize);
        let mut rows = vec![0, picks.batch as usize / 2, picks.batch as usize - 1];
        rows.dedup();
        for row in rows {
            let fetched = &missed[row * missed_of..][..missed_of.min(FETCHED)];
            for entry in row * of_row..(row + 1) * of_row {
                if entry.is_multiple_of(EVERY) || fetched.contains(&selection[entry]) {
                    self.check_row(layer, row, selection[entry] as u32, slots[entry])?;
                }
            }
        }
        Ok(())
    }

    fn check_row(&mut self, layer: Layer, row: usize, position: u32, slot: i32) -> Result<()> {
        let geometry = self.cache.geometry();
        let length = geometry.row_bytes() as usize;
        let (mut wanted, mut kept, mut found) = (vec![0; length], vec![0; length], vec![0; length]);
        row_bytes(row as u32 % self.prompts, layer.0, position, &mut wanted);
        self.cache.read_row(self.sequences[row], layer, position, &mut kept)?;
        let at = |place: &'static str| {
            wrong(place)
                .with("sequence", row as u64)
                .with("layer", layer.0)
                .with("position", position)
                .with("slot", slot.max(0) as u32)
        };
        if kept != wanted {
            return Err(at("a row of the total pool is not what was written there"));
        }
        let slab = self.cache.slab(layer)?;
        let slot = u32::try_from(slot).map_err(|_| at("a selected row got no slot"))?;
        for piece in geometry.pieces(slot).into_iter().filter(|piece| piece.bytes > 0) {
            let range = &mut found[piece.row as usize..][..piece.bytes as usize];
            self.device.read(slab.part(piece.slab, piece.bytes.into())?, range)?;
        }
        if found != wanted {
            return Err(at("the row in a slot is not that of its position"));
        }
        self.checked += 1;
        Ok(())
    }
}

/// Steps that miss everything they select, until a budget is full.
pub const fn fills(budget: u32, selected: u32) -> u32 {
    budget.div_ceil(selected) + 1
}

/// Opens one sequence for each prompt, writes the prompts, and forks the other sequences from them in turn; `wait`
/// waits for enqueued work and returns how its ticket ended.
fn sequences(
    cache: &mut Cache,
    point: &Point,
    (prompts, promised): (u32, u32),
    wait: &dyn Fn(&Ticket) -> Result<()>,
    stream: Stream,
) -> Result<Vec<Sequence>> {
    let budget = Budget::Slots(point.budget);
    let open = Open { prompt: point.context, promised, budget, bring_up: BringUp::Nothing };
    let page_rows = point.shape().page_tokens;
    let length = cache.geometry().row_bytes() as usize;
    let mut rows = vec![0; page_rows as usize * length];
    let mut sequences = Vec::new();
    for prompt in 0..prompts {
        let sequence = cache.open(&open)?;
        for layer in 0..point.layers {
            for page in 0..point.context / page_rows {
                for (position, row) in (page * page_rows..).zip(rows.chunks_exact_mut(length)) {
                    row_bytes(prompt, layer, position, row);
                }
                cache.append(sequence, Layer(layer), &rows)?;
            }
        }
        wait(&cache.join(sequence, stream, forebay::WarmUp::default())?)?;
        sequences.push(sequence);
    }
    for number in prompts..point.batch {
        let (sequence, joined) = cache.fork(sequences[(number % prompts) as usize], &open, stream)?;
        wait(&joined)?;
        sequences.push(sequence);
    }
    Ok(sequences)
}
