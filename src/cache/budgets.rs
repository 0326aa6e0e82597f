//! Shared budgets: the cache sets the budgets of its sequences, so that all slots are in use.
//!
//! [`Share`] divides the slots of each layer. This module says when, and keeps the changes within the policy's limits.
//!
//! | call | what it does |
//! |---|---|
//! | `open` | takes no slots. It adds the budget of [`Open`](crate::Open) to what the cache has promised. |
//! | `join`, fork | first reclaims slots of others: for the promise, and for the share as far as the limits of a step allow. Then it takes the sequence's share, or what is free of it. |
//! | `prepare` | moves the budgets of its micro-batch's sequences towards their shares, if there is cause to. |
//! | [`Cache::share_slots`] | the same for all sequences, when the engine asks. |
//!
//! There is cause when a sequence has joined or ended, when one outgrows its budget, every
//! [`every`](Share::every) steps, and while the last changes were cut short by the policy's limits.
//!
//! **Admission reclaims before it refuses.** `open` refuses only if the promises of all sequences do not fit the
//! layer. What a sequence has above its promise can be taken back, except while a step of it is open. So a `join` may
//! be [`Kind::Busy`] for a moment, and then changes nothing.
//!
//! **Every rank does the same.** All inputs are the engine's calls, their results, and the counters of retired steps;
//! all arithmetic is in whole numbers; sequences come in the order of their opening. How fast a device works is no
//! input. A device must have run a sequence's last resize before the host may stage the next one, so `prepare` resizes
//! only sequences that have retired a step since. A `join` chooses sequences without that, and is [`Kind::Busy`] if the
//! device has not got so far. [`Cache::budgets_digest`] compares ranks.
//!
//! **Cost.** A `prepare` without cause compares two numbers for each of its rows. With cause it divides the slots of
//! each distinct layer ([`Share`] gives the time), and enqueues a resize for each sequence that changes. Nothing is
//! allocated.

use crate::cache::Cache;
use crate::cache::record::{Record, State};
use crate::device::Stream;
use crate::device::descriptor::LayerCount;
use crate::error::{Error, Kind, Result};
use crate::geometry::SLOT_BLOCK;
use crate::ids::{MicroBatch, Sequence};
use crate::sparse::{MissCurve, Share, ShareBy, Want};
use crate::step::Step;

/// The shared budgets of a cache.
#[derive(Debug)]
pub(super) struct Sharing {
    policy: Share,
    /// The index groups. Everything here is by group: the layers of one have the same slots.
    groups: usize,
    /// For each group, the misses of a layer by the part of the rows that had slots. Empty unless the policy asks for
    /// them.
    curves: Vec<MissCurve>,
    /// The sequences that take part, in the order of their opening.
    order: Vec<u32>,
    /// `[order][groups]`: each sequence's share, in slots.
    targets: Vec<u32>,
    wants: Vec<Want>,
    /// For each group, the blocks that the promise of a joining sequence lacks.
    lacks: Vec<u32>,
    /// For each group, the blocks that its share lacks.
    wishes: Vec<u32>,
    /// Places in the order of the sequences that shrink for a joining one.
    chosen: Vec<u32>,
    /// There is cause to divide the slots again.
    due: bool,
    /// Calls of `prepare` since the slots were last divided.
    since: u32,
}

/// What one call may still do.
#[derive(Debug)]
struct Allowance {
    resizes: u32,
    /// Rows that may move in each layer.
    rows: u64,
    /// Whether a sequence is so far below its share that small shrinks of others are worth while.
    hungry: bool,
    /// Whether it did all that was worth doing.
    done: bool,
}

impl Sharing {
    pub(super) fn new(policy: Share, lanes: usize, groups: usize) -> Box<Sharing> {
        let curves = if policy.by == ShareBy::Misses { groups } else { 0 };
        Box::new(Sharing {
            policy,
            groups,
            curves: vec![MissCurve::default(); curves],
            order: Vec::with_capacity(lanes),
            targets: vec![0; lanes * groups],
            wants: Vec::with_capacity(lanes),
            lacks: vec![0; groups],
            wishes: vec![0; groups],
            chosen: Vec::with_capacity(lanes),
            due: false,
            since: 0,
        })
    }

    /// The shares of the sequence at `place` of the order.
    fn targets(&self, place: usize) -> &[u32] {
        self.targets.get(place * self.groups..(place + 1) * self.groups).unwrap_or_default()
    }
}

/// Whether a sequence has a part of the slots.
fn has_slots(record: &Record) -> bool {
    !matches!(record.state, State::Free | State::Closing) && record.owned.slots.budgets.iter().any(|b| *b > 0)
}

impl Cache {
    /// Moves the budgets of all sequences towards their shares, within the limits of [`Config::share`]. The cache does
    /// this by itself in `prepare`; this call is for an engine that wants it at a time of its own. Sequences in an open
    /// step, and those that have retired no step since they joined or were last resized or truncated, stay as they are.
    /// Returns the number of resized sequences: 0 when
    /// there is nothing left to do.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a cache without [`Config::share`]. If the device refuses a resize, the budgets of
    /// the sequences before it have changed.
    ///
    /// [`Config::share`]: crate::Config::share
    pub fn share_slots(&mut self, stream: Stream) -> Result<u32> {
        let Some(mut sharing) = self.sharing.take() else {
            return Err(Error::new(Kind::InvalidConfig, "share").at("the cache has no share"));
        };
        sharing.due = true;
        let shared = self.share_step(&mut sharing, None, stream);
        self.sharing = Some(sharing);
        shared
    }

    /// A digest of the budgets of all open sequences. It is equal on ranks that made the same calls. It waits for no
    /// device.
    pub fn budgets_digest(&self) -> u64 {
        let mut digest = 0_u64;
        for record in self.records.iter().filter(|record| record.is_taken()) {
            let budgets = (0_u64..).zip(&record.owned.slots.budgets);
            for (group, budget) in budgets {
                let word =
                    record.opened.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (group << 32 | u64::from(*budget));
                let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
                digest = digest.wrapping_add(word ^ (word >> 31));
            }
        }
        digest
    }

    /// Checks that a layer has blocks for the promises of all open sequences and for `least` slots more.
    pub(super) fn check_promises(&self, least: &[u32]) -> Result<()> {
        let blocks = |slots: &u32| u64::from(slots.div_ceil(SLOT_BLOCK));
        for (group, (slots, least)) in self.sparse.slots().sizes().zip(least).enumerate() {
            let taken = self.records.iter().filter(|record| record.is_taken());
            let promised: u64 = taken.filter_map(|r| r.owned.least.get(group)).map(blocks).sum();
            let free = u64::from(slots / SLOT_BLOCK).saturating_sub(promised);
            if blocks(least) > free {
                return Err(Error::new(Kind::Exhausted, "open")
                    .at("slot blocks")
                    .with("wanted", blocks(least))
                    .with("free", free)
                    .with("layer", self.geometry.members(group).start as u64));
            }
        }
        Ok(())
    }

    /// Takes slots for a sequence that joins: its share, as far as slots are free, and at least its promise.
    pub(super) fn take_share(&mut self, sequence: Sequence, stream: Stream) -> Result<()> {
        let index = sequence.index as usize;
        if has_slots(&self.records[index]) {
            return Ok(());
        }
        let Some(mut sharing) = self.sharing.take() else { return Ok(()) };
        let taken = self.take_share_of(&mut sharing, index, stream);
        self.sharing = Some(sharing);
        taken
    }

    fn take_share_of(&mut self, sharing: &mut Sharing, index: usize, stream: Stream) -> Result<()> {
        self.divide(sharing, Some(index));
        self.reclaim(sharing, index, stream)?;
        let place = sharing.order.iter().position(|i| *i as usize == index).unwrap_or(0);
        let mut budgets = std::mem::take(&mut self.budgets);
        for (group, budget) in budgets.iter_mut().enumerate() {
            let free = self.sparse.slots().free_blocks(group).saturating_mul(SLOT_BLOCK);
            let share = sharing.targets(place).get(group).copied().unwrap_or(0);
            let least = self.records[index].owned.least.get(group).copied().unwrap_or(0);
            *budget = share.max(least).min(free);
        }
        let slots = &mut self.records[index].owned.slots;
        let grown = self.sparse.grow(slots, &budgets);
        if grown.is_ok() {
            slots.budgets.copy_from_slice(&budgets);
        }
        self.budgets = budgets;
        sharing.due = true;
        grown
    }

    /// Shrinks other sequences until every layer has free slots for the promise of `index`, or changes nothing; and, as
    /// far as the limits of a step allow, for its share.
    fn reclaim(&mut self, sharing: &mut Sharing, index: usize, stream: Stream) -> Result<()> {
        let place = sharing.order.iter().position(|own| *own as usize == index).unwrap_or(0);
        for group in 0..sharing.groups {
            let blocks = |slots: &[u32]| slots.get(group).map_or(0, |slots| slots.div_ceil(SLOT_BLOCK));
            let free = self.sparse.slots().free_blocks(group);
            let lack = blocks(&self.records[index].owned.least).saturating_sub(free);
            self.lower_targets(sharing, group, lack)?;
            sharing.wishes[group] = blocks(sharing.targets(place)).saturating_sub(free);
            sharing.lacks[group] = lack;
        }
        self.choose(sharing);
        for place in &sharing.chosen {
            let other = sharing.order[*place as usize] as usize;
            let record = &self.records[other];
            if !record.work.covered && (record.has_ticket() || self.is_staged(other)?) {
                return Err(Error::new(Kind::Busy, "join")
                    .at("work of a sequence that must give up slots is in flight")
                    .hint("join again when the stream has passed it"));
            }
        }
        for place in &sharing.chosen {
            let other = sharing.order[*place as usize] as usize;
            let mut budgets = std::mem::take(&mut self.budgets);
            let present = &self.records[other].owned.slots.budgets;
            for ((budget, present), target) in
                budgets.iter_mut().zip(present).zip(sharing.targets(*place as usize))
            {
                *budget = *present.min(target);
            }
            let resized = self.resize_to(other, &budgets, stream);
            self.budgets = budgets;
            resized?;
        }
        Ok(())
    }

    /// Lowers shares in a layer, down to the promises, until giving up all above the shares frees `lack` blocks.
    fn lower_targets(&self, sharing: &mut Sharing, group: usize, lack: u32) -> Result<()> {
        let blocks = |slots: &[u32]| slots.get(group).map_or(0, |slots| slots.div_ceil(SLOT_BLOCK));
        let (mut left, mut above) = (lack, 0);
        for place in (0..sharing.order.len()).filter(|_| lack > 0) {
            let record = &self.records[sharing.order[place] as usize];
            if self.takes_resizes(record, None) {
                let present = blocks(&record.owned.slots.budgets);
                left = left.saturating_sub(present.saturating_sub(blocks(sharing.targets(place))));
                above += present.saturating_sub(blocks(&record.owned.least));
            }
        }
        if above < lack {
            return Err(Error::new(Kind::Busy, "join")
                .at("slots of sequences in open steps")
                .with("layer", self.geometry.members(group).start as u64)
                .with("wanted blocks", lack)
                .with("free blocks", above)
                .hint("join again when their steps are finished"));
        }
        for place in 0..sharing.order.len() {
            let record = &self.records[sharing.order[place] as usize];
            let target = blocks(sharing.targets(place)).min(blocks(&record.owned.slots.budgets));
            let give = left.min(target.saturating_sub(blocks(&record.owned.least)));
            if give > 0 && self.takes_resizes(record, None) {
                let least = record.owned.least.get(group).copied().unwrap_or(0);
                sharing.targets[place * sharing.groups + group] = ((target - give) * SLOT_BLOCK).max(least);
                left -= give;
            }
        }
        Ok(())
    }

    /// Chooses the sequences that shrink to their shares, in the order of opening: as many as the promise needs, then as
    /// many as the share needs and the limits of a step allow.
    fn choose(&self, sharing: &mut Sharing) {
        let Sharing { policy, groups, order, targets, lacks, wishes, chosen, .. } = sharing;
        chosen.clear();
        let mut bytes = policy.bytes_a_step;
        for (place, index) in order.iter().enumerate() {
            let record = &self.records[*index as usize];
            let targets = &targets[place * *groups..(place + 1) * *groups];
            let budgets = || record.owned.slots.budgets.iter().zip(targets);
            let given = |(now, then): (&u32, &u32)| {
                now.div_ceil(SLOT_BLOCK).saturating_sub(then.div_ceil(SLOT_BLOCK))
            };
            let helps =
                |lacks: &[u32]| lacks.iter().zip(budgets()).any(|(lack, pair)| *lack > 0 && given(pair) > 0);
            if !self.takes_resizes(record, None) || !(helps(lacks) || helps(wishes)) {
                continue;
            }
            let moved = |(group, (now, then)): (usize, (&u32, &u32))| {
                let rows = u64::from(now.saturating_sub(*then).min(*then));
                rows.saturating_mul(self.geometry.group_row_bytes(group))
            };
            let cost = budgets().enumerate().map(moved).fold(0, u64::saturating_add);
            let allowed =
                record.work.covered && cost <= bytes && chosen.len() < policy.resizes_a_step as usize;
            if helps(lacks) || allowed {
                for list in [&mut *lacks, &mut *wishes] {
                    list.iter_mut()
                        .zip(budgets())
                        .for_each(|(lack, pair)| *lack = lack.saturating_sub(given(pair)));
                }
                bytes = bytes.saturating_sub(cost);
                chosen.push(place as u32);
            }
        }
    }

    /// Notes a call of `prepare`, and moves budgets of `micro_batch` if there is cause.
    pub(super) fn share_at_prepare(&mut self, micro_batch: MicroBatch, stream: Stream) -> Result<()> {
        let Some(mut sharing) = self.sharing.take() else { return Ok(()) };
        sharing.since = sharing.since.saturating_add(1);
        sharing.due |= sharing.policy.every > 0 && sharing.since >= sharing.policy.every;
        let shared = match sharing.due {
            true => self.share_step(&mut sharing, Some(micro_batch), stream).map(|_| ()),
            false => Ok(()),
        };
        self.sharing = Some(sharing);
        shared
    }

    /// Notes that a sequence has ended.
    pub(super) fn share_is_due(&mut self) {
        if let Some(sharing) = &mut self.sharing {
            sharing.due = true;
        }
    }

    /// Notes that a sequence has begun a step. One that comes near the end of its budget is cause for a division. It is
    /// cause again a sixteenth of its budget later.
    pub(super) fn outgrows(&mut self, index: usize) {
        let Some(sharing) = &mut self.sharing else { return };
        let Record { rows, owned, admitted, .. } = &mut self.records[index];
        let budget = owned.slots.budgets.iter().min().copied().unwrap_or(0);
        let near = rows.upper.saturating_add(SLOT_BLOCK) > budget && budget < admitted.tokens;
        if near && rows.upper >= owned.asks_at {
            owned.asks_at = rows.upper.saturating_add((budget / 16).max(SLOT_BLOCK));
            sharing.due = true;
        }
    }

    /// Adds a retired step's counts to the curves.
    pub(super) fn note_misses(&mut self, step: &Step) {
        let Some(sharing) = self.sharing.as_mut().filter(|sharing| !sharing.curves.is_empty()) else {
            return;
        };
        let Ok(slot) = self.ring.slot(step) else { return };
        let report = self.ring.report();
        for (group, curve) in sharing.curves.iter_mut().enumerate() {
            // All layers of a group miss the same rows.
            let first = report.layers.get(self.geometry.members(group).start);
            let Some(LayerCount { misses, .. }) = first else { continue };
            let (mut slots, mut tokens) = (0, 0);
            for row in &slot.rows {
                let Some(record) = self.records.get(row.sequence as usize) else { continue };
                slots += record.owned.slots.budgets.get(group).map_or(0, |budget| u64::from(*budget));
                tokens += u64::from(record.rows.upper);
            }
            curve.note(slots, tokens, (*misses).into(), slot.rows.len() as u32);
        }
    }

    /// Divides the slots of every layer over the sequences that have slots, and over one that joins.
    fn divide(&self, sharing: &mut Sharing, joining: Option<usize>) {
        let Sharing { policy, groups, curves, order, targets, wants, .. } = sharing;
        order.clear();
        let takes_part = |(index, record): &(usize, &Record)| Some(*index) == joining || has_slots(record);
        order.extend(self.records.iter().enumerate().filter(takes_part).map(|(index, _)| index as u32));
        order.sort_unstable_by_key(|index| self.records[*index as usize].opened);
        let flight = self.config.query_rows.saturating_mul(self.config.steps_in_flight);
        let mut before: Option<(usize, u32)> = None;
        for group in 0..*groups {
            let held = |index: &u32| {
                self.records[*index as usize]
                    .owned
                    .slots
                    .blocks
                    .get(group)
                    .map_or(0, |blocks| blocks.len() as u32)
            };
            let blocks = self.sparse.slots().free_blocks(group) + order.iter().map(held).sum::<u32>();
            let least = |group: usize, index: &u32| {
                self.records[*index as usize].owned.least.get(group).copied().unwrap_or(0)
            };
            // Most layers are alike, and then so are their shares.
            let alike = |(other, given): (usize, u32)| {
                given == blocks
                    && curves.is_empty()
                    && order.iter().all(|i| least(group, i) == least(other, i))
            };
            if let Some((other, _)) = before.filter(|before| alike(*before)) {
                for place in 0..order.len() {
                    targets[place * *groups + group] = targets[place * *groups + other];
                }
                continue;
            }
            before = Some((group, blocks));
            wants.clear();
            wants.extend(order.iter().map(|index| {
                let record = &self.records[*index as usize];
                let length = record.rows.upper.max(record.admitted.prompt);
                Want::new(least(group, index), length, flight, self.reach_of(record))
            }));
            policy.targets(blocks, curves.get(group), wants);
            for (place, (index, want)) in order.iter().zip(&*wants).enumerate() {
                let reach = self.reach_of(&self.records[*index as usize]);
                targets[place * *groups + group] = want.blocks.saturating_mul(SLOT_BLOCK).min(reach);
            }
        }
    }

    /// The tokens that a sequence may have, with its rows in flight.
    fn reach_of(&self, record: &Record) -> u32 {
        self.config.reach(record.admitted.tokens).unwrap_or(record.admitted.tokens)
    }

    /// Whether the budget of a sequence may change, by a call for `micro_batch` or for all. It depends on calls alone.
    fn takes_resizes(&self, record: &Record, micro_batch: Option<MicroBatch>) -> bool {
        let other = record.steps.micro_batch.zip(micro_batch).is_some_and(|(own, asked)| own != asked);
        record.state == State::Running && !record.steps.open && !other && has_slots(record)
    }

    /// Moves budgets towards the shares: shrinks first, so that the others find free slots.
    fn share_step(
        &mut self,
        sharing: &mut Sharing,
        micro_batch: Option<MicroBatch>,
        stream: Stream,
    ) -> Result<u32> {
        self.divide(sharing, None);
        sharing.since = 0;
        let bytes: u64 = self.geometry.formats().iter().map(|layer| u64::from(layer.row_bytes())).sum();
        let policy = sharing.policy;
        let grows = |place: usize| {
            let budgets = &self.records[sharing.order[place] as usize].owned.slots.budgets;
            let mut pairs = budgets.iter().zip(sharing.targets(place));
            pairs.any(|(now, then)| now < then && policy.is_worth(*now, *then))
        };
        let hungry = (0..sharing.order.len()).any(grows);
        let rows = policy.bytes_a_step / bytes.max(1);
        let mut allowance = Allowance { resizes: policy.resizes_a_step, rows, hungry, done: true };
        for shrinks in [true, false] {
            for place in 0..sharing.order.len() {
                self.share_one(sharing, place, shrinks, micro_batch, stream, &mut allowance)?;
            }
        }
        sharing.due = !allowance.done;
        Ok(policy.resizes_a_step - allowance.resizes)
    }

    /// Moves the budgets of one sequence, if one of them shrinks (`shrinks`), or grows, by enough.
    fn share_one(
        &mut self,
        sharing: &Sharing,
        place: usize,
        shrinks: bool,
        micro_batch: Option<MicroBatch>,
        stream: Stream,
        allowance: &mut Allowance,
    ) -> Result<()> {
        let (index, policy) = (sharing.order[place] as usize, &sharing.policy);
        let present = &self.records[index].owned.slots.budgets;
        let is_worth = |(now, then): (&u32, &u32)| {
            let small = allowance.hungry && shrinks && then.div_ceil(SLOT_BLOCK) < now.div_ceil(SLOT_BLOCK);
            (then < now) == shrinks && (small || policy.is_worth(*now, *then))
        };
        if !present.iter().zip(sharing.targets(place)).any(is_worth) {
            return Ok(());
        }
        let record = &self.records[index];
        if allowance.resizes == 0 || !record.work.covered || !self.takes_resizes(record, micro_batch) {
            allowance.done = false;
            return Ok(());
        }
        let mut budgets = std::mem::take(&mut self.budgets);
        let present = &self.records[index].owned.slots.budgets;
        let (mut moved, mut changed) = (0, false);
        for (group, budget) in budgets.iter_mut().enumerate() {
            let now = present.get(group).copied().unwrap_or(0);
            let then = sharing.targets(place).get(group).copied().unwrap_or(now);
            let room = now.div_ceil(SLOT_BLOCK) + self.sparse.slots().free_blocks(group);
            let part = Share::within(now, then, allowance.rows);
            *budget = part.min(room.saturating_mul(SLOT_BLOCK));
            moved = moved.max(now.saturating_sub(*budget).min(*budget));
            changed |= now != *budget;
            allowance.done &= part == then;
        }
        let resized = if changed { self.resize_to(index, &budgets, stream) } else { Ok(()) };
        self.budgets = budgets;
        allowance.rows = allowance.rows.saturating_sub(moved.into());
        allowance.resizes -= u32::from(changed);
        resized
    }
}
