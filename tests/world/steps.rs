//! The steps of a world: batches that mix sequences, widths and accepted counts, layers as a whole and in halves, index
//! groups layer by layer and half by half, steps that must fail, and prepares that must be rejected.

use super::engine::{Work, key};
use super::model::{Origin, Seq, State, reach};
use super::ops::Random;
use super::run::World;
use super::share::By;
use forebay::device::Event;
use forebay::{Accepted, BatchRow, Kind, Layer, LayerCall, MicroBatch, Step};

/// A row of a step that is not retired yet.
#[derive(Clone, Debug)]
pub struct FlightRow {
    seq: usize,
    /// Committed tokens as of this step's commit.
    length: u32,
    landed: Vec<Origin>,
    /// The sequence may be closed while the step is open: the engine's copy of what it needs.
    key_pages: Vec<u32>,
}

/// A step, from prepare until retire.
#[derive(Debug)]
pub struct Flight {
    step: Step,
    micro: u32,
    rows: Vec<FlightRow>,
    calls: Vec<LayerCall>,
    next: usize,
    /// Hits, misses and scratch rows by index group.
    counts: Vec<[u64; 3]>,
    /// By batch row and query row, what the last layer that selects has selected.
    selected: Vec<Vec<Vec<i32>>>,
    /// The batch rows and layers that have not gathered what the first layer of their group missed.
    lacking: Vec<(usize, u32)>,
    /// The call whose selections reach beyond the length, if there is one, and it selects.
    beyond: Option<usize>,
    pub fails: bool,
    /// The step was given up, because a call of it is missing.
    abandoned: bool,
    /// A call whose rows were not stored.
    unstored: Option<LayerCall>,
    done: Option<Event>,
    random: Random,
}

impl Flight {
    /// Whether the step has a row of a sequence.
    pub fn names(&self, seq: usize) -> bool {
        self.rows.iter().any(|row| row.seq == seq)
    }
}

/// The arguments of a prepare.
struct Ask {
    micro: u32,
    width: u32,
    rows: Vec<BatchRow>,
    tensor: bool,
}

/// The result of a prepare that the model expects.
enum Verdict {
    Sound,
    Refused(Kind),
    /// More rows may be in flight than the library can decide about: either result is right.
    Perhaps(Kind),
}

impl World {
    fn is_eligible(&self, s: &Seq, micro: u32) -> bool {
        s.state == State::Running
            && s.micro.is_none_or(|own| own == micro)
            && s.in_flight < self.config.steps_in_flight
    }

    /// The row of a sequence in a step of `width`: a random share of its drafts is accepted, by the host's count or by
    /// the device's.
    fn wish(&self, seq: usize, width: u32, random: &mut Random) -> (BatchRow, u32) {
        let s = &self.seqs[seq];
        let accepted = random.below(s.landed.len() as u32 + 1);
        let count = if random.one_in(2) { Accepted::OnDevice } else { Accepted::Rows(accepted) };
        let query_rows = if random.one_in(3) { 1 + random.below(width) } else { width };
        (BatchRow { sequence: s.handle, accepted: count, query_rows }, accepted)
    }

    /// Prepares a step, or is refused.
    pub fn begin(&mut self, micro: u8, mask: u8, width: u8, seed: u16) {
        let mut random = Random::new(seed.into());
        let micro = u32::from(micro) % self.config.micro_batches;
        let width = 1 + u32::from(width) % self.config.query_rows;
        let mut chosen: Vec<usize> =
            (0..self.seqs.len()).filter(|s| self.is_eligible(&self.seqs[*s], micro)).collect();
        // A mask that leaves no sequence leaves all.
        let marked = |place: usize| mask >> (place % 8) & 1 == 0;
        let mut place = 0..chosen.len();
        if place.clone().any(marked) {
            chosen.retain(|_| place.next().is_some_and(marked));
        }
        chosen.truncate(self.config.batch as usize);
        let wishes: Vec<(BatchRow, u32)> = chosen.iter().map(|s| self.wish(*s, width, &mut random)).collect();
        let mut counts: Vec<u32> = wishes.iter().map(|(_, accepted)| *accepted).collect();
        let rows = wishes.into_iter().map(|(row, _)| row).collect();
        let mut ask = Ask { micro, width, rows, tensor: true };
        if random.one_in(8) {
            self.spoil(&mut ask, mask, &mut random);
        } else if ask.rows.is_empty() {
            return;
        }
        // An impossible count, which only the device can see.
        if random.one_in(24) && !chosen.is_empty() {
            counts[0] = self.seqs[chosen[0]].landed.len() as u32 + 1 + random.below(9);
        }
        counts.truncate(self.config.batch as usize);
        counts.resize(self.config.batch as usize, 77);
        self.prepare(&ask, &counts, random);
    }

    /// Changes a prepare so that it should, most often, be refused.
    fn spoil(&self, ask: &mut Ask, mask: u8, random: &mut Random) {
        let dead = self.dead_handle(mask);
        let any = self.pick(mask).map(|s| self.seqs[s].handle);
        let own = ask.rows.first().copied();
        let fresh = |sequence| BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 };
        match random.below(10) {
            0 => ask.rows.insert(0, fresh(dead)),
            1 => ask.rows.insert(0, fresh(any.unwrap_or(dead))),
            2 => ask.rows.extend(own),
            3 => ask.rows.iter_mut().for_each(|row| row.accepted = Accepted::Rows(9)),
            4 => ask.rows.iter_mut().for_each(|row| row.query_rows = 0),
            5 => ask.rows.iter_mut().for_each(|row| row.query_rows = ask.width + 1),
            6 => ask.tensor = false,
            7 => ask.width = self.config.query_rows + 1,
            8 => ask.rows.clear(),
            _ => ask.micro = self.config.micro_batches,
        }
    }

    /// The required result of a prepare.
    fn judge(&self, ask: &Ask, counts: &[u32]) -> Verdict {
        use Verdict::{Perhaps, Refused};
        let range = ask.rows.is_empty() || ask.rows.len() > self.config.batch as usize;
        if ask.micro >= self.config.micro_batches || range || ask.width > self.config.query_rows {
            return Refused(Kind::OutOfRange);
        }
        let ring = (self.config.steps_in_flight * self.config.micro_batches) as usize;
        let taken = self.flights.len() + self.open.iter().flatten().count();
        if taken == ring || self.open[ask.micro as usize].is_some() {
            return Refused(Kind::Busy);
        }
        let mut perhaps = false;
        for (place, row) in ask.rows.iter().enumerate() {
            let Some(seq) = self.seqs.iter().position(|s| s.handle == row.sequence && s.is_open()) else {
                return Refused(Kind::Closed);
            };
            let s = &self.seqs[seq];
            let landed = s.landed.len() as u32;
            let (accepted, untold) = match row.accepted {
                Accepted::Rows(count) => (count, false),
                Accepted::OnDevice => (if counts[place] > landed { 0 } else { counts[place] }, !ask.tensor),
            };
            let reached = s.length() + accepted + row.query_rows;
            let refused = match () {
                () if s.state != State::Running => Some(Kind::InvalidState),
                () if s.micro.is_some_and(|own| own != ask.micro) => Some(Kind::InvalidState),
                () if s.in_flight >= self.config.steps_in_flight => Some(Kind::Busy),
                () if row.query_rows == 0 || row.query_rows > ask.width => Some(Kind::OutOfRange),
                () if accepted > landed => Some(Kind::OutOfRange),
                () if untold => Some(Kind::InvalidConfig),
                () if reached > reach(&self.config, s.admitted) => Some(Kind::OutOfRange),
                () => None,
            };
            if let Some(kind) = refused {
                return if perhaps { Perhaps(kind) } else { Refused(kind) };
            }
            perhaps |= reached > s.admitted;
            if ask.rows[..place].iter().any(|earlier| earlier.sequence == row.sequence) {
                return if perhaps { Perhaps(Kind::InvalidConfig) } else { Refused(Kind::InvalidConfig) };
            }
        }
        if perhaps { Perhaps(Kind::OutOfRange) } else { Verdict::Sound }
    }

    fn prepare(&mut self, ask: &Ask, counts: &[u32], random: Random) {
        let verdict = self.judge(ask, counts);
        let (before, stream) = (self.snapshot(), self.engine.stream(ask.micro));
        let busy = self.open.get(ask.micro as usize).is_none_or(Option::is_some);
        let tensor = (ask.tensor && !busy).then(|| self.engine.accepted(ask.micro, counts));
        let micro_batch = MicroBatch(ask.micro);
        let result = self.cache.prepare(micro_batch, ask.width, &ask.rows, tensor, stream);
        self.learn_budgets(By::Prepare(ask.micro), stream);
        let refused = match verdict {
            Verdict::Sound => None,
            Verdict::Refused(kind) => Some(kind),
            Verdict::Perhaps(_) if result.is_ok() => None,
            // If several rows are refused, the library may report any of them, and so one of several kinds: accept the
            // reported kind if it is one of the two possible.
            Verdict::Perhaps(kind) => {
                let said = result.as_ref().unwrap_err().kind();
                let failed = said == Kind::DeviceFailed && self.failed();
                assert!(said == kind || said == Kind::OutOfRange || failed, "{said:?}");
                Some(said)
            }
        };
        let Some(step) = self.expect(before, result, refused) else { return };
        if self.open.iter().flatten().count() > 0 {
            self.note("two steps open");
        }
        self.enter_step(step, ask, counts, random);
    }

    /// The model's side of a prepare: the previous steps are committed, and new rows are expected to land.
    fn enter_step(&mut self, step: Step, ask: &Ask, counts: &[u32], random: Random) {
        let (mut random, mut rows) = (random, Vec::new());
        let mut fails = false;
        for (row, count) in ask.rows.iter().zip(counts) {
            let seq = self.seqs.iter().position(|s| s.handle == row.sequence).unwrap();
            self.release_held(seq);
            let owner = row.sequence.to_bits();
            let next = (0..row.query_rows).map(|j| Origin { owner, generation: self.generation + 1 + j });
            let next: Vec<Origin> = next.collect();
            self.generation += row.query_rows;
            let s = &mut self.seqs[seq];
            let lie = row.accepted == Accepted::OnDevice && *count > s.landed.len() as u32;
            let accepted = match row.accepted {
                Accepted::Rows(count) => count,
                // The count is not believed: nothing is accepted, and the step fails.
                Accepted::OnDevice if lie => 0,
                Accepted::OnDevice => *count,
            };
            let accepted = if s.tainted { 0 } else { accepted };
            fails |= lie || s.tainted;
            s.tainted |= lie;
            s.commit(accepted, next.clone());
            s.micro = Some(ask.micro);
            s.in_flight += 1;
            let (length, key_pages) = (s.length(), s.key_pages.clone());
            rows.push(FlightRow { seq, length, landed: next, key_pages });
        }
        let calls = self.plan_calls(ask, rows.len() as u32, &mut random);
        let beyond = random.one_in(16).then(|| random.below(calls.len() as u32) as usize);
        let counts = vec![[0; 3]; self.groups.len()];
        let selected = vec![vec![Vec::new(); ask.width as usize]; rows.len()];
        let flight = Flight {
            step,
            micro: ask.micro,
            rows,
            calls,
            next: 0,
            counts,
            selected,
            lacking: Vec::new(),
            beyond,
            fails,
            abandoned: false,
            unstored: None,
            done: None,
            random,
        };
        self.open[ask.micro as usize] = Some(flight);
    }

    /// Ordinary layers whole or in two halves of the batch, draft layers by draft pass. The layers of a group have
    /// halves of their own, or one half has all its layers before the other.
    fn plan_calls(&mut self, ask: &Ask, rows: u32, random: &mut Random) -> Vec<LayerCall> {
        let mut calls = Vec::new();
        for group in self.groups.clone() {
            if group.start >= self.config.shape.layers {
                let passes =
                    |layer| (0..ask.width).map(move |pass| LayerCall::draft_pass(Layer(layer), pass));
                calls.extend(group.flat_map(passes));
                continue;
            }
            let call = |layer, batch_rows| LayerCall { batch_rows, ..LayerCall::whole(Layer(layer)) };
            let mut parts = World::parts(rows, random);
            if group.len() > 1 && random.one_in(2) {
                let halves = parts.iter().flat_map(|part| group.clone().map(|layer| call(layer, *part)));
                calls.extend(halves);
                continue;
            }
            for layer in group.clone() {
                if layer > group.start {
                    let own = World::parts(rows, random);
                    if own != parts {
                        self.note("a group in other halves by layer");
                    }
                    parts = own;
                }
                calls.extend(parts.iter().map(|part| call(layer, *part)));
            }
        }
        calls
    }

    /// The whole batch, or two halves of it.
    fn parts(rows: u32, random: &mut Random) -> Vec<Option<(u32, u32)>> {
        if rows < 2 || !random.one_in(3) {
            return vec![None];
        }
        let cut = 1 + random.below(rows - 1);
        vec![Some((0, cut)), Some((cut, rows - cut))]
    }

    /// Entries of one query row that sees `limit` tokens: near a wandering centre, the newest ones among
    /// them, with repetitions and -1.
    fn positions(&self, limit: u32, random: &mut Random) -> Vec<i32> {
        let (centre, spread) = (random.below(limit), 1 + random.below(60));
        let position = |_| match random.below(12) {
            0 => -1,
            1 | 2 => (limit - 1 - random.below(limit.min(4))) as i32,
            _ => ((centre + random.below(spread)) % limit) as i32,
        };
        (0..self.config.shape.top_k).map(position).collect()
    }

    /// Enqueues the next layer call of an open step.
    pub fn layer(&mut self, micro: u8) {
        let micro = usize::from(micro) % self.open.len();
        let Some(mut flight) = self.open[micro].take() else { return };
        if let Some(call) = flight.calls.get(flight.next).copied() {
            let beyond = flight.beyond == Some(flight.next);
            let mut work = self.work(&mut flight, call, beyond);
            if flight.unstored.is_none() && flight.random.one_in(40) {
                (work.forgets, flight.unstored) = (true, Some(call));
            }
            self.engine.layer(&self.cache, &flight.step, work).unwrap();
            flight.next += 1;
        }
        self.open[micro] = Some(flight);
    }

    /// The selection of a layer call, the rows that it must find, and its writes; the oracles select the same. A layer
    /// that another one selects for finds rows of its own, and the oracles do not hear of it.
    fn work(&mut self, flight: &mut Flight, call: LayerCall, mut beyond: bool) -> Work {
        let (layer, selects) = (call.layer.0, self.selects(call.layer.0));
        let (first, count) = call.batch_rows.unwrap_or((0, flight.rows.len() as u32));
        let queries = call.draft_pass.map_or(0..flight.step.query_rows(), |pass| pass..pass + 1);
        let mut work = Work {
            step: flight.step.number(),
            call,
            selects,
            selection: Vec::new(),
            expected: Vec::new(),
            rows: Vec::new(),
            keys: Vec::new(),
            forgets: false,
        };
        let rows = flight.rows.iter().zip(&mut flight.selected).enumerate();
        for (place, (row, group)) in rows.skip(first as usize).take(count as usize) {
            flight.lacking.retain(|lacking| *lacking != (place, layer));
            let mut selected = Vec::new();
            for query in queries.clone() {
                let (limit, of_group) = (row.length + query + 1, &mut group[query as usize]);
                if selects {
                    *of_group = self.positions(limit, &mut flight.random);
                }
                let mut positions = of_group.clone();
                let Some(origin) = row.landed.get(query as usize) else {
                    // The step is wider than this row: these entries belong to no selection.
                    work.expected.extend(vec![None; positions.len()]);
                    work.selection.extend(positions);
                    continue;
                };
                if selects && std::mem::take(&mut beyond) {
                    positions[3] = [limit as i32, i32::MAX, -2][flight.random.below(3) as usize];
                    of_group.clone_from(&positions);
                    flight.fails = true;
                    self.seqs[row.seq].tainted = true;
                }
                let expected = positions.iter().map(|position| {
                    let position = u32::try_from(*position).ok().filter(|p| *p < limit)?;
                    let committed = self.seqs[row.seq].rows[layer as usize].get(position as usize);
                    let landed = || &row.landed[(position - row.length) as usize];
                    let origin = if position < row.length { committed.unwrap() } else { landed() };
                    Some(self.row(layer, position, *origin))
                });
                work.expected.extend(expected);
                selected.extend(positions.iter().filter_map(|p| u32::try_from(*p).ok()));
                work.selection.extend(positions);
                let position = row.length + query;
                let slot = self.seqs[row.seq].landing[query as usize];
                work.rows.push((slot, self.row(layer, position, *origin)));
                let offset = self.key_offset(&row.key_pages, position);
                work.keys.push((offset, key(self.format(layer), layer, position, *origin)));
            }
            if selects && queries.start < row.landed.len() as u32 {
                let group = self.group_of(layer);
                let found = self.seqs[row.seq].oracles[group].select(selected);
                let others = self.groups[group].clone().filter(|_| !found.misses.is_empty());
                flight.lacking.extend(others.skip(1).map(|layer| (place, layer)));
                let found = [found.hits.len(), found.misses.len(), found.scratch];
                flight.counts[group].iter_mut().zip(found).for_each(|(sum, n)| *sum += n as u64);
            }
        }
        work
    }

    /// Enqueues the rest of an open step and leaves it in flight.
    pub fn finish(&mut self, micro: u8) {
        let place = usize::from(micro) % self.open.len();
        self.finish_early(place);
        while self.open[place]
            .as_ref()
            .is_some_and(|flight| !flight.abandoned && flight.next < flight.calls.len())
        {
            self.layer(micro);
        }
        self.finish_early(place);
        let Some(mut flight) = self.open[place].take() else { return };
        let lanes = flight.rows.iter().map(|row| self.seqs[row.seq].lane).collect();
        let done = self.engine.finish(&mut self.cache, &mut flight.step, lanes).unwrap();
        let stream = self.engine.stream(flight.micro);
        let again = self.cache.finish(&mut flight.step, stream).unwrap_err();
        assert_eq!(again.kind(), Kind::InvalidState);
        // A step that was given up publishes nothing, and no later row builds on it.
        for row in flight.rows.iter().filter(|_| flight.abandoned) {
            let s = &mut self.seqs[row.seq];
            s.tainted = true;
            if s.state == State::Running {
                s.state = State::Failed;
            }
        }
        for (place, _) in &flight.lacking {
            self.seqs[flight.rows[*place].seq].lost = true;
            self.note("step given up within a group");
        }
        let late = self.cache.gather(&flight.step, flight.calls[0], 0, stream).unwrap_err();
        assert_eq!(late.kind(), Kind::InvalidState);
        flight.done = Some(done);
        self.flights.push(flight);
    }

    /// The first layer and batch row of an open step of which a call is missing.
    fn missing(flight: &Flight) -> Option<(u32, u32)> {
        let missing = flight.unstored.iter().chain(flight.calls.iter().skip(flight.next));
        let due = missing.filter_map(|call| {
            let (first, count) = call.batch_rows.unwrap_or((0, flight.rows.len() as u32));
            let is_due =
                |row: &u32| flight.rows[*row as usize].landed.len() as u32 > call.draft_pass.unwrap_or(0);
            Some((call.layer.0, (first..first + count).find(is_due)?))
        });
        due.min()
    }

    /// A step with a missing call is not finished: it is completed, or sometimes given up now.
    fn finish_early(&mut self, place: usize) {
        let Some(mut flight) = self.open[place].take() else { return };
        let all = flight.next == flight.calls.len();
        if let Some((layer, row)) = World::missing(&flight).filter(|_| !flight.abandoned)
            && (all || flight.random.one_in(4))
        {
            let (before, stream) = (self.snapshot(), self.engine.stream(flight.micro));
            let error = self.cache.finish(&mut flight.step, stream).unwrap_err();
            let named = ["layer", "batch row"].map(|name| error.number(name).unwrap());
            assert_eq!(named, [layer, row].map(u64::from), "{error}");
            self.expect::<()>(before, Err(error), Some(Kind::InvalidState));
            if flight.random.one_in(3) {
                self.cache.abandon(&mut flight.step).unwrap();
                (flight.abandoned, flight.fails) = (true, true);
                self.note("step given up");
            }
        }
        if let Some(call) = flight.unstored.take_if(|_| all && !flight.abandoned) {
            self.engine.store(&self.cache, &flight.step, call).unwrap();
            self.note("stored late");
        }
        self.open[place] = Some(flight);
    }

    /// An open step is not retired, and is returned.
    pub fn retire_open(&mut self, micro: u8) {
        let place = usize::from(micro) % self.open.len();
        let Some(mut flight) = self.open[place].take() else { return };
        let before = self.snapshot();
        let unretired = self.cache.retire(flight.step, self.engine.host).unwrap_err();
        flight.step = unretired.step.unwrap();
        self.open[place] = Some(flight);
        self.expect::<()>(before, Err(unretired.error), Some(Kind::Busy));
    }

    /// Retires a step: its counts equal the oracles' counts.
    pub fn retire(&mut self, which: u8) {
        if self.flights.is_empty() {
            return;
        }
        let place = if which & 1 == 1 { 0 } else { usize::from(which / 2) % self.flights.len() };
        let mut flight = self.flights.remove(place);
        self.note(if place == 0 { "retire in order" } else { "retire out of order" });
        self.note(if flight.fails { "step fails" } else { "step is sound" });
        self.engine.wait(flight.done.unwrap());
        self.counted.steps += 1;
        let host = self.engine.host;
        let number = flight.step.number();
        // Those of a group's layers are equal.
        let by_layer = (0..self.layers()).map(|layer| flight.counts[self.group_of(layer)]);
        let by_layer: Vec<[u64; 3]> = by_layer.collect();
        match self.cache.retire(flight.step, host) {
            Ok(retired) => {
                assert!(!flight.fails, "a step that must fail was retired well");
                let found = self.engine.found.lock().unwrap();
                let wrong = found.wrong.iter().find(|(step, _)| *step == number);
                assert_eq!(wrong, None, "retired well, and attention read wrong rows");
                assert_eq!(retired.step(), number);
                let counts = retired.layers().iter().map(|c| [c.hits, c.misses, c.scratch].map(u64::from));
                let counts: Vec<[u64; 3]> = counts.collect();
                assert_eq!(counts, by_layer, "hits, misses, scratch by layer");
                let lengths: Vec<u32> = flight.rows.iter().map(|row| row.length).collect();
                assert_eq!(retired.lengths(), lengths);
                for (layer, [hits, misses, scratch]) in (0..).zip(counts) {
                    self.counted.hits += hits;
                    self.counted.misses += misses;
                    self.counted.bytes_up += misses * u64::from(self.format(layer).row_bytes());
                    self.counted.scratch += scratch;
                    self.reached
                        .entry("scratch rows".to_owned())
                        .and_modify(|n| *n += scratch)
                        .or_insert(scratch);
                    self.log.extend([number, hits, misses, scratch]);
                }
            }
            Err(unretired) => {
                assert!(flight.fails || self.failed(), "{}", unretired.error);
                flight.fails = true;
                let kind = unretired.error.kind();
                let given_up = flight.abandoned && kind == Kind::Cancelled;
                assert!(given_up || kind == Kind::DeviceFailed, "{}", unretired.error);
                assert!(given_up || !flight.abandoned || self.failed(), "{}", unretired.error);
                assert_eq!(unretired.step, None);
            }
        }
        for row in flight.rows {
            let older = self.open.iter().flatten().chain(&self.flights).any(|other| {
                other.step.number() < number && other.rows.iter().any(|theirs| theirs.seq == row.seq)
            });
            let s = &mut self.seqs[row.seq];
            s.in_flight -= 1;
            if flight.fails && s.state == State::Running {
                s.state = State::Failed;
            }
            // Rows of an older step may still turn out to be invalid.
            if !flight.fails && !older {
                s.stored = s.stored.max(row.length);
            }
            if !flight.fails && s.in_flight == 0 && s.state == State::Running {
                s.stored = s.length();
            }
            if s.in_flight == 0 {
                self.settle_resize(row.seq);
            }
            self.leave(row.seq);
        }
    }
}
