//! Shared budgets: the cache sets the budgets of its sequences, so that all slots are in use.
//!
//! `sharing` divides the slots of each layer. This module says when, and keeps the changes within the policy's limits.
//!
//! | call | what it does |
//! |---|---|
//! | `open` | takes no slots. It adds the budget of [`Open`](crate::Open) to what the cache has promised. |
//! | `join`, fork | reclaims slots of others, then takes the sequence's share, or what is free of it. |
//! | `join_early` | the same, for what the sequence was promised. It takes its share when it runs. |
//! | `prepare` | moves the budgets of its micro-batch's sequences towards their shares, if there is cause to. |
//! | [`Cache::share_slots`] | the same for all sequences, when the engine asks. |
//!
//! A `join` reclaims what the promise lacks, and what the share lacks as far as the limits of a step allow.
//!
//! There is cause when a sequence has joined or ended, when one outgrows its budget, when one may be resized again,
//! every [`every`](Share::every) steps, and while the last changes were cut short by the policy's limits.
//!
//! **Admission reclaims before it refuses.** `open` refuses only if the promises of all sequences do not fit the
//! layer. What a sequence has above its promise can be taken back, except while a step of it is open. So a `join` may
//! be [`Kind::Busy`] for a moment, and then changes nothing.
//!
//! **Every rank does the same.** All inputs are the engine's calls, their results, and the counters of retired steps;
//! all arithmetic is in whole numbers; sequences come in the order of their opening. How fast a device works is no
//! input. A device must have run a sequence's last resize before the host may stage the next one, so `prepare` resizes
//! only sequences that have retired a step since. A `join` chooses sequences without that, and is [`Kind::Busy`] if the
//! device has not got so far. The slots of a closed sequence are free once its last step is retired, whether its other
//! work has ended or not. [`Cache::budgets_digest`] compares ranks.
//!
//! **Cost.** A `prepare` without cause compares a length with a number for each of its rows. With cause it divides the
//! slots of each distinct layer ([`Share`] gives the time), and enqueues a resize for each sequence that changes. It
//! allocates nothing.

use crate::cache::Cache;
use crate::cache::record::Record;
use crate::cache::sharing::{Sharing, View};
use crate::device::Stream;
use crate::device::descriptor::LayerCount;
use crate::error::{Error, Kind, Result};
use crate::geometry::SLOT_BLOCK;
use crate::ids::{MicroBatch, Sequence};
use crate::sparse::Share;
use crate::step::Step;

/// The slots that a sequence takes when it joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    Share,
    /// What it was promised. For a sequence that cannot run yet, and so cannot shrink for others.
    Promise,
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

impl Cache {
    /// Moves the budgets of all sequences towards their shares, within the limits of [`Config::share`]. The cache does
    /// this by itself in `prepare`; this call is for an engine that wants it at a time of its own. Sequences in an open
    /// step, and those that have retired no step since they joined or were last resized or truncated, stay as they are.
    /// Returns the number of resized sequences: 0 when there is nothing left to do.
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
        for record in self.records.iter().filter(|record| record.is_alive()) {
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
        for (group, least) in least.iter().enumerate() {
            let (wanted, free) = (least.div_ceil(SLOT_BLOCK), self.unpromised_blocks(group));
            if wanted > free {
                return Err(Error::new(Kind::Exhausted, "open")
                    .at("slot blocks")
                    .with("wanted", wanted)
                    .with("free", free)
                    .with("layer", self.geometry.members(group).start as u64));
            }
        }
        Ok(())
    }

    /// The slots that can still be promised, of the layer with the fewest, in whole blocks.
    pub(super) fn unpromised(&self) -> u32 {
        let groups = 0..self.geometry.groups().len();
        groups.map(|group| self.unpromised_blocks(group)).min().unwrap_or(0) * SLOT_BLOCK
    }

    fn unpromised_blocks(&self, group: usize) -> u32 {
        let taken = self.records.iter().filter(|record| record.is_taken());
        let promised = taken.filter_map(|record| record.owned.least.get(group));
        let promised = promised.map(|least| least.div_ceil(SLOT_BLOCK)).fold(0, u32::saturating_add);
        self.sparse.slots().blocks(group).saturating_sub(promised)
    }

    /// Takes slots for a sequence that joins: its share, as far as slots are free, and at least its promise; or its
    /// promise alone.
    pub(super) fn take_share(&mut self, sequence: Sequence, takes: Takes, stream: Stream) -> Result<()> {
        let index = sequence.index as usize;
        if self.records[index].has_slots() {
            return Ok(());
        }
        let Some(mut sharing) = self.sharing.take() else { return Ok(()) };
        sharing.divide(&self.view(), Some(index));
        if takes == Takes::Promise {
            sharing.lower_to(index, &self.records[index].owned.least);
        }
        let taken = self.take_share_of(&mut sharing, index, stream);
        self.sharing = Some(sharing);
        taken
    }

    fn take_share_of(&mut self, sharing: &mut Sharing, index: usize, stream: Stream) -> Result<()> {
        self.reclaim(sharing, index, stream)?;
        let place = sharing.place_of(index);
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
        sharing.choose(&self.view(), index)?;
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

    fn view(&self) -> View<'_> {
        let Cache { records, sparse, config, geometry, .. } = self;
        View { records, sparse, config, geometry }
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

    /// Notes that a sequence has ended, or may be resized again.
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
        if rows.upper < owned.asks_at {
            return;
        }
        let budget = owned.slots.budgets.iter().min().copied().unwrap_or(0);
        // A budget of all its rows lasts to its end.
        owned.asks_at = if budget < admitted.tokens { budget.saturating_sub(SLOT_BLOCK) } else { u32::MAX };
        if rows.upper >= owned.asks_at {
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
                // Slots beyond the rows hold none.
                let length = record.rows.upper;
                slots += record
                    .owned
                    .slots
                    .budgets
                    .get(group)
                    .map_or(0, |budget| u64::from((*budget).min(length)));
                tokens += u64::from(length);
            }
            curve.note(slots, tokens, (*misses).into(), slot.rows.len() as u32);
        }
    }

    /// Moves budgets towards the shares: shrinks first, so that the others find free slots.
    fn share_step(
        &mut self,
        sharing: &mut Sharing,
        micro_batch: Option<MicroBatch>,
        stream: Stream,
    ) -> Result<u32> {
        sharing.divide(&self.view(), None);
        sharing.since = 0;
        let bytes: u64 = self.geometry.formats().iter().map(|layer| u64::from(layer.row_bytes())).sum();
        let policy = sharing.policy;
        let grows = |place: usize| {
            let record = &self.records[sharing.order[place] as usize];
            let mut pairs = record.owned.slots.budgets.iter().zip(sharing.targets(place));
            record.takes_share() && pairs.any(|(now, then)| now < then && policy.is_worth(*now, *then))
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
        if !self.records[index].takes_share() {
            return Ok(());
        }
        let present = &self.records[index].owned.slots.budgets;
        let reach = self.view().reach_of(&self.records[index]);
        let is_worth = |(now, then): (&u32, &u32)| {
            let small = allowance.hungry && then.div_ceil(SLOT_BLOCK) < now.div_ceil(SLOT_BLOCK);
            // With all its rows a sequence misses nothing.
            let whole = now < then && *then >= reach;
            (then < now) == shrinks && (small || whole || policy.is_worth(*now, *then))
        };
        if !present.iter().zip(sharing.targets(place)).any(is_worth) {
            return Ok(());
        }
        let record = &self.records[index];
        if allowance.resizes == 0 || !record.takes_resizes(micro_batch) {
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
