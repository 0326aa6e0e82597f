//! `--together`: several selection traces as sequences of one engine, which share one total of slots in every layer.
//!
//! Each trace is a sequence. It arrives at its step, decodes one step of `mtp` query rows in every step of the engine,
//! and ends with its recording. What differs from a replay of each trace alone is the budget: *fixed*, the slots
//! divided by the most sequences that are alive at the same time; or *shared*, set anew by [`Share`] whenever a
//! sequence arrives, ends, or comes within a block of the end of its budget. Then a running lane is resized by the
//! rule (`LayerTables::resize`).
//!
//! The rule runs without cache and device: residency tables of one layer, a lane for each sequence. Layers do not
//! depend on each other, so they are replayed one after the other and in parallel. No row is moved; the moved rows are
//! counted.
//!
//! **At a sequence's arrival** all others shrink to their new shares, small changes too, so that it gets its own share
//! at once. It loads all its rows if they fit (bring-up), then the prompt's last selections run as a warm-up. At other
//! times changes that are not worth a resize ([`Share::is_worth`]) are left alone. The limits of one step's bytes and
//! resizes are not applied.
//!
//! Traces keep their positions: a row that no set names has a slot here if the whole prompt has.

use forebay::residency::{Fetch, LayerTables, Portable, QueryRange, Selected, TableShape, Workspace};
use forebay::trace::SelectionTrace;
use forebay::{Error, Kind, MissCurve, Result, SLOT_BLOCK, Share, Want};

use super::reserve;

/// One trace as a sequence.
#[derive(Clone, Copy)]
pub struct Member<'a> {
    /// Its selections.
    pub trace: &'a SelectionTrace,
    /// The engine's step at which it decodes first.
    pub arrives: u32,
    /// Prompt steps of its warm-up, at most the trace's.
    pub warmup: u32,
    /// Its decode steps.
    pub steps: u32,
}

/// The sequences of a replay and what they share.
pub struct Together<'a> {
    /// The sequences in the order in which they are opened. All have equally many layers and members of a set.
    pub members: Vec<Member<'a>>,
    /// Query rows of a step.
    pub mtp: u32,
    /// Slot blocks of each layer.
    pub blocks: u32,
}

/// How budgets are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budgets {
    /// The same number of blocks for each sequence, from its arrival to its end.
    Fixed,
    /// By a policy.
    Shared(Share),
}

/// What one sequence did in one step of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The sequence's index.
    pub sequence: u32,
    /// Its budget.
    pub slots: u32,
    /// Selected rows that were resident.
    pub hits: u32,
    /// Selected rows that were fetched.
    pub misses: u32,
}

/// One layer's replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The living sequences of every step, by index.
    pub steps: Vec<Vec<Cell>>,
    /// Budgets that were changed.
    pub resizes: u64,
    /// Rows that got another slot by that.
    pub moved: u64,
}

impl Together<'_> {
    /// The engine's steps.
    pub fn steps(&self) -> u32 {
        self.members.iter().map(Member::ends).max().unwrap_or(0)
    }

    /// The most sequences that are alive at the same time.
    pub fn most_alive(&self) -> u32 {
        let alive = |step: u32| self.members.iter().filter(|member| member.is_alive(step)).count();
        // Only an arrival raises the number.
        self.members.iter().map(|member| alive(member.arrives)).max().unwrap_or(0) as u32
    }

    /// The blocks of a fixed budget.
    pub fn fixed(&self) -> u32 {
        self.blocks / self.most_alive().max(1)
    }

    /// The least blocks of a shared budget: those of a step's selection, or the fixed ones if they are fewer.
    fn least(&self) -> u32 {
        self.selected().div_ceil(SLOT_BLOCK).min(self.fixed()).max(1)
    }

    /// The most rows that a step of one sequence selects.
    fn selected(&self) -> u32 {
        let k = self.members.first().map_or(0, |member| member.trace.header().k);
        k.saturating_mul(self.mtp)
    }

    /// The tables of a layer.
    fn shape(&self) -> Result<TableShape> {
        let overflow = || Error::new(Kind::Overflow, "replay").at("slots of a layer");
        let lanes = self.members.len() as u32;
        let scratch = self.selected().saturating_sub(self.least().saturating_mul(SLOT_BLOCK));
        let landing_base =
            lanes.checked_mul(scratch).and_then(|end| end.checked_add(1)).ok_or_else(overflow)?;
        let end = lanes.checked_mul(self.mtp).and_then(|rows| rows.checked_add(landing_base));
        let budget_base =
            end.and_then(|end| end.checked_next_multiple_of(SLOT_BLOCK)).ok_or_else(overflow)?;
        let shape = TableShape {
            lanes,
            tokens: self.members.iter().map(|member| member.reach(self.mtp)).max().unwrap_or(0),
            query_rows: self.mtp,
            scratch,
            waves: 1,
            scratch_base: 1,
            landing_base,
            budget_base,
            budget_blocks: self.blocks,
        };
        shape.check()?;
        Ok(shape)
    }

    /// Bytes that the replay of one layer holds, its outcome included.
    ///
    /// # Errors
    /// As [`Together::layer`], without taking memory.
    pub fn bytes(&self) -> Result<u64> {
        let shape = self.shape()?;
        let work = 16 * u64::from(shape.lane_blocks()) * u64::from(SLOT_BLOCK) + u64::from(shape.tokens);
        Ok(shape.bytes() + work + 64 * u64::from(self.selected()) + self.outcome_bytes())
    }

    /// Bytes of one layer's outcome.
    pub fn outcome_bytes(&self) -> u64 {
        let cells: u64 = self.members.iter().map(|member| u64::from(member.steps)).sum();
        size_of::<Cell>() as u64 * 2 * cells + size_of::<Vec<Cell>>() as u64 * u64::from(self.steps())
    }

    /// Replays one layer. Calls `progress` after every step.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] and [`Kind::Overflow`] for slots that no tables can have; [`Kind::OutOfMemory`]; any
    /// other error is a defect.
    pub fn layer(&self, layer: u32, budgets: Budgets, mut progress: impl FnMut()) -> Result<Outcome> {
        let mut pool = Pool::new(self, layer)?;
        let mut outcome = Outcome::default();
        reserve::grow(&mut outcome.steps, self.steps() as usize)?;
        for step in 0..self.steps() {
            let ended = pool.release_ended(step);
            match budgets {
                Budgets::Fixed => pool.join_fixed(step)?,
                Budgets::Shared(share) => pool.share(step, &share, ended, &mut outcome)?,
            }
            outcome.steps.push(pool.decode(step)?);
            progress();
        }
        Ok(outcome)
    }
}

impl Member<'_> {
    fn ends(&self) -> u32 {
        self.arrives + self.steps
    }

    fn is_alive(&self, step: u32) -> bool {
        (self.arrives..self.ends()).contains(&step)
    }

    /// Tokens at the end, the last step's rows included.
    fn reach(&self, mtp: u32) -> u32 {
        self.trace.header().decode_start + self.steps * mtp
    }

    /// Tokens at the beginning of a step.
    fn length(&self, step: u32, mtp: u32) -> u32 {
        self.trace.header().decode_start + (step - self.arrives) * mtp
    }
}

/// One layer's slots and lanes.
struct Pool<'a> {
    of: &'a Together<'a>,
    layer: u32,
    tables: LayerTables,
    work: Workspace,
    /// Blocks of no lane.
    free: Vec<u32>,
    /// Blocks and budget of each lane; a sequence's lane is its index. No budget: no sequence is in it.
    lanes: Vec<(Vec<u32>, u32)>,
    curve: MissCurve,
    /// A step's positions, slots and fetches.
    selection: Vec<i32>,
    slots: Vec<i32>,
    fetches: Vec<Fetch>,
}

impl<'a> Pool<'a> {
    fn new(of: &'a Together<'a>, layer: u32) -> Result<Pool<'a>> {
        let shape = of.shape()?;
        let selected = of.selected() as usize;
        let mut free = reserve::vector(of.blocks as usize)?;
        free.extend((0..of.blocks).rev());
        Ok(Pool {
            of,
            layer,
            tables: LayerTables::new(shape)?,
            work: Workspace::new(&shape, of.selected())?,
            free,
            lanes: vec![(Vec::new(), 0); of.members.len()],
            curve: MissCurve::default(),
            selection: reserve::filled(selected, -1)?,
            slots: reserve::filled(selected, -1)?,
            fetches: reserve::filled(selected, Fetch { position: 0, slot: 0 })?,
        })
    }

    /// Frees the slots of the sequences that ended before `step`. Whether there was one.
    fn release_ended(&mut self, step: u32) -> bool {
        let mut any = false;
        for (lane, member) in (0..).zip(&self.of.members) {
            if member.ends() == step
                && let Some((blocks, budget)) = self.lanes.get_mut(lane as usize)
            {
                self.tables.leave(lane);
                self.free.append(blocks);
                *budget = 0;
                any = true;
            }
        }
        any
    }

    fn join_fixed(&mut self, step: u32) -> Result<()> {
        for index in 0..self.of.members.len() {
            let Some(member) = self.of.members.get(index).filter(|member| member.arrives == step) else {
                continue;
            };
            let slots = self.of.fixed().saturating_mul(SLOT_BLOCK);
            self.join(index, slots.min(member.reach(self.of.mtp)))?;
        }
        Ok(())
    }

    /// Sets the budgets of a step, if there is a reason to.
    fn share(&mut self, step: u32, share: &Share, ended: bool, outcome: &mut Outcome) -> Result<()> {
        let mtp = self.of.mtp;
        let arrives = self.of.members.iter().any(|member| member.arrives == step);
        let alive: Vec<(usize, &Member<'_>)> =
            self.of.members.iter().enumerate().filter(|(_, member)| member.is_alive(step)).collect();
        let is_near = |(index, member): &(usize, &Member<'_>)| {
            let rows = member.length(step, mtp).saturating_add(mtp);
            let budget = self.budget(*index);
            budget < member.reach(mtp) && (budget.saturating_sub(SLOT_BLOCK)..=budget).contains(&rows)
        };
        if !arrives && !ended && !alive.iter().any(is_near) {
            return Ok(());
        }
        let least = self.of.least().saturating_mul(SLOT_BLOCK);
        let want = |(_, member): &(usize, &Member<'_>)| {
            Want::new(least, member.length(step, mtp), mtp, member.reach(mtp))
        };
        let mut wants: Vec<Want> = alive.iter().map(want).collect();
        share.targets(self.of.blocks, Some(&self.curve), &mut wants);
        let targets = alive.iter().zip(&wants).map(|((index, member), want)| {
            (*index, want.blocks.saturating_mul(SLOT_BLOCK).min(member.reach(mtp)))
        });
        let targets: Vec<(usize, u32)> = targets.collect();
        for (index, target) in &targets {
            let budget = self.budget(*index);
            if *target < budget && (arrives || share.is_worth(budget, *target)) {
                self.resize(*index, *target, outcome)?;
            }
        }
        for (index, target) in targets {
            let budget = self.budget(index);
            let free = self.free.len() as u32 + budget.div_ceil(SLOT_BLOCK);
            let target = target.min(free.saturating_mul(SLOT_BLOCK));
            if budget == 0 {
                self.join(index, target)?;
            } else if target > budget && share.is_worth(budget, target) {
                self.resize(index, target, outcome)?;
            }
        }
        Ok(())
    }

    fn budget(&self, index: usize) -> u32 {
        self.lanes.get(index).map_or(0, |(_, budget)| *budget)
    }

    /// Gives a lane as many blocks as `slots` need, the last ones taken away or new ones appended.
    fn fit(&mut self, index: usize, slots: u32) -> Result<()> {
        let count = slots.div_ceil(SLOT_BLOCK) as usize;
        let none = || Error::new(Kind::Internal, "replay").at("more blocks than the layer has");
        let (blocks, budget) = self.lanes.get_mut(index).ok_or_else(none)?;
        while blocks.len() > count {
            self.free.extend(blocks.pop());
        }
        while blocks.len() < count {
            blocks.push(self.free.pop().ok_or_else(none)?);
        }
        *budget = slots;
        Ok(())
    }

    fn resize(&mut self, index: usize, slots: u32, outcome: &mut Outcome) -> Result<()> {
        self.fit(index, slots)?;
        let Some((blocks, budget)) = self.lanes.get(index) else { return Ok(()) };
        let resized = self.tables.resize(&Portable, index as u32, blocks, *budget, &mut self.work, |_| ())?;
        outcome.resizes += 1;
        outcome.moved += u64::from(resized.moved);
        Ok(())
    }

    /// A sequence joins with `slots` slots, brings up its rows if they fit, and warms up.
    fn join(&mut self, index: usize, slots: u32) -> Result<()> {
        self.fit(index, slots)?;
        let (Some((blocks, budget)), Some(member)) = (self.lanes.get(index), self.of.members.get(index))
        else {
            return Ok(());
        };
        let (lane, header) = (index as u32, member.trace.header());
        self.tables.join(lane, blocks, *budget, header.decode_start)?;
        self.tables.bring_up(lane);
        let k = header.k as usize;
        let too_few = || Error::new(Kind::Internal, "replay").at("buffers of a warm-up");
        for step in header.warm_steps - member.warmup..header.warm_steps {
            write(&mut self.selection, 0, k, member.trace.selection(step, self.layer));
            let selected = Selected {
                selection: self.selection.get(..k).ok_or_else(too_few)?,
                slots: self.slots.get_mut(..k).ok_or_else(too_few)?,
                fetches: self.fetches.get_mut(..k).ok_or_else(too_few)?,
            };
            self.tables.warm(&Portable, lane, selected, &mut self.work)?;
        }
        Ok(())
    }

    /// One step of all living sequences.
    fn decode(&mut self, step: u32) -> Result<Vec<Cell>> {
        let mtp = self.of.mtp;
        let mut cells = Vec::new();
        let (mut held, mut tokens, mut missed) = (0, 0, 0);
        for (lane, member) in (0..).zip(&self.of.members) {
            if !member.is_alive(step) {
                continue;
            }
            let (group, header) = (step - member.arrives, member.trace.header());
            for row in 0..mtp {
                let positions = member.trace.selection(header.warm_steps + group * mtp + row, self.layer);
                write(&mut self.selection, row as usize, header.k as usize, positions);
            }
            self.tables.commit(&Portable, lane, if group == 0 { 0 } else { mtp }, mtp, |_| ())?;
            let selected = Selected {
                selection: &self.selection[..],
                slots: &mut self.slots,
                fetches: &mut self.fetches,
            };
            let rows = QueryRange { first: 0, count: mtp };
            let counts = self.tables.resolve(&Portable, lane, rows, selected, &mut self.work)?.counts;
            let (length, slots) = (member.length(step, mtp), self.budget(lane as usize));
            held += u64::from(slots.min(length));
            tokens += u64::from(length);
            missed += u64::from(counts.misses);
            reserve::grow(&mut cells, 1)?;
            cells.push(Cell { sequence: lane, slots, hits: counts.hits, misses: counts.misses });
        }
        self.curve.note(held, tokens, missed, cells.len() as u32);
        Ok(cells)
    }
}

/// Writes the positions of query row `row`, of `k` words; the rest of a short selection is -1.
fn write(selection: &mut [i32], row: usize, k: usize, positions: &[u32]) {
    let words = selection.get_mut(row * k..(row + 1) * k).unwrap_or_default();
    let positions = positions.iter().map(|position| *position as i32);
    for (word, position) in words.iter_mut().zip(positions.chain(std::iter::repeat(-1))) {
        *word = position;
    }
}
