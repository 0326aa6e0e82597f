//! The division of a cache's slots over its sequences, and the choice of those that shrink for another.
//!
//! It reads the records and the free slots, and changes nothing but its own lists; `budgets` makes the changes. All
//! decisions depend on the engine's calls and on retired steps alone, never on how far a device has got.

use crate::cache::config::Config;
use crate::cache::record::Record;
use crate::error::{Error, Kind, Result};
use crate::geometry::{Geometries, SLOT_BLOCK};
use crate::sparse::{MissCurve, Share, ShareBy, SparsePool, Want};

/// What a division reads of a cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) records: &'a [Record],
    pub(super) sparse: &'a SparsePool,
    pub(super) config: &'a Config,
    pub(super) geometry: &'a Geometries,
}

/// The shared budgets of a cache.
#[derive(Debug)]
pub(super) struct Sharing {
    pub(super) policy: Share,
    pub(super) groups: usize,
    /// For each group, the misses of a layer by the part of the rows that had slots. Empty unless the policy asks for
    /// them.
    pub(super) curves: Vec<MissCurve>,
    /// The sequences that take part, in the order of their opening.
    pub(super) order: Vec<u32>,
    /// `[order][groups]`: each sequence's share, in slots.
    targets: Vec<u32>,
    wants: Vec<Want>,
    /// For each group, the blocks that the promise of a joining sequence lacks.
    lacks: Vec<u32>,
    /// For each group, the blocks that its share lacks.
    wishes: Vec<u32>,
    /// Places in the order of the sequences that shrink for a joining one.
    pub(super) chosen: Vec<u32>,
    /// There is cause to divide the slots again.
    pub(super) due: bool,
    /// Calls of `prepare` since the slots were last divided.
    pub(super) since: u32,
}

impl View<'_> {
    /// The tokens that a sequence may have, with its rows in flight.
    pub(super) fn reach_of(&self, record: &Record) -> u32 {
        self.config.reach(record.admitted.tokens).unwrap_or(record.admitted.tokens)
    }
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
    pub(super) fn targets(&self, place: usize) -> &[u32] {
        self.targets.get(place * self.groups..(place + 1) * self.groups).unwrap_or_default()
    }

    /// Sets the shares of a sequence, in slots.
    pub(super) fn lower_to(&mut self, index: usize, least: &[u32]) {
        let first = self.place_of(index) * self.groups;
        self.targets.iter_mut().skip(first).zip(least).for_each(|(target, least)| *target = *least);
    }

    /// The place of a sequence in the order.
    pub(super) fn place_of(&self, index: usize) -> usize {
        self.order.iter().position(|own| *own as usize == index).unwrap_or(0)
    }

    /// Divides the slots of every group over the sequences that have slots, and over one that joins.
    pub(super) fn divide(&mut self, view: &View<'_>, joining: Option<usize>) {
        let Sharing { policy, groups, curves, order, targets, wants, .. } = self;
        order.clear();
        let takes_part = |(index, record): &(usize, &Record)| {
            Some(*index) == joining || record.is_alive() && record.has_slots()
        };
        order.extend(view.records.iter().enumerate().filter(takes_part).map(|(index, _)| index as u32));
        order.sort_unstable_by_key(|index| view.records[*index as usize].opened);
        let flight = view.config.query_rows.saturating_mul(view.config.steps_in_flight);
        let mut before: Option<(usize, u32)> = None;
        for group in 0..*groups {
            let held = |group: usize, index: &u32| view.records[*index as usize].owned.slots.held(group);
            let blocks =
                view.sparse.slots().free_blocks(group) + order.iter().map(|i| held(group, i)).sum::<u32>();
            let least = |group: usize, index: &u32| {
                view.records[*index as usize].owned.least.get(group).copied().unwrap_or(0)
            };
            // A sequence that cannot be resized now keeps what it has, so that the others can have the rest.
            let keeps = |index: &u32| joining.is_none() && !view.records[*index as usize].takes_share();
            // Most groups are alike, and then so are their shares.
            let same = |other: usize, index: &u32| {
                least(group, index) == least(other, index)
                    && (!keeps(index) || held(group, index) == held(other, index))
            };
            let alike = |(other, given): (usize, u32)| {
                given == blocks && curves.is_empty() && order.iter().all(|index| same(other, index))
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
                let record = &view.records[*index as usize];
                // A sequence that joins has its prompt.
                let own = joining == Some(*index as usize);
                let length = if own { record.admitted.prompt } else { record.rows.upper };
                match keeps(index) {
                    true => Want::fixed(held(group, index), length),
                    false => Want::new(least(group, index), length, flight, view.reach_of(record)),
                }
            }));
            policy.targets(blocks, curves.get(group), wants);
            for (place, (index, want)) in order.iter().zip(&*wants).enumerate() {
                let reach = view.reach_of(&view.records[*index as usize]);
                targets[place * *groups + group] =
                    want.blocks.saturating_mul(SLOT_BLOCK).min(reach).max(least(group, index));
            }
        }
    }

    /// Chooses the sequences that shrink for the joining sequence `index`, and to which shares: enough for its promise
    /// in every group, or none; and, as far as the limits of a step allow, enough for its share.
    ///
    /// # Errors
    /// [`Kind::Busy`] if too many of the slots belong to sequences that cannot be resized now.
    pub(super) fn choose(&mut self, view: &View<'_>, index: usize) -> Result<()> {
        let place = self.place_of(index);
        for group in 0..self.groups {
            let blocks = |slots: &[u32]| slots.get(group).map_or(0, |slots| slots.div_ceil(SLOT_BLOCK));
            let free = view.sparse.slots().free_blocks(group);
            let lack = blocks(&view.records[index].owned.least).saturating_sub(free);
            self.lower_targets(view, group, lack)?;
            self.wishes[group] = blocks(self.targets(place)).saturating_sub(free);
            self.lacks[group] = lack;
        }
        self.choose_some(view);
        Ok(())
    }

    /// Lowers shares in a group, down to the promises, until giving up all above the shares frees `lack` blocks.
    fn lower_targets(&mut self, view: &View<'_>, group: usize, lack: u32) -> Result<()> {
        let blocks = |slots: &[u32]| slots.get(group).map_or(0, |slots| slots.div_ceil(SLOT_BLOCK));
        let (mut left, mut above) = (lack, 0);
        for place in (0..self.order.len()).filter(|_| lack > 0) {
            let record = &view.records[self.order[place] as usize];
            if record.takes_resizes(None) {
                let present = record.owned.slots.held(group);
                left = left.saturating_sub(present.saturating_sub(blocks(self.targets(place))));
                above += present.saturating_sub(blocks(&record.owned.least));
            }
        }
        if above < lack {
            return Err(Error::new(Kind::Busy, "join")
                .at("slots of sequences that cannot shrink now")
                .with("layer", view.geometry.members(group).start as u64)
                .with("wanted blocks", lack)
                .with("free blocks", above)
                .hint("join again when their steps are finished, and failed ones are truncated or closed"));
        }
        for place in 0..self.order.len() {
            let record = &view.records[self.order[place] as usize];
            let target = blocks(self.targets(place)).min(record.owned.slots.held(group));
            let give = left.min(target.saturating_sub(blocks(&record.owned.least)));
            if give > 0 && record.takes_resizes(None) {
                let least = record.owned.least.get(group).copied().unwrap_or(0);
                self.targets[place * self.groups + group] = ((target - give) * SLOT_BLOCK).max(least);
                left -= give;
            }
        }
        Ok(())
    }

    /// Chooses the sequences that shrink, in the order of opening: as many as the promise needs, and as many as the
    /// share needs and the limits of a step allow. Those within the limits shrink to their shares, the others by what
    /// the promise needs.
    fn choose_some(&mut self, view: &View<'_>) {
        let Sharing { policy, groups, order, targets, lacks, wishes, chosen, .. } = self;
        chosen.clear();
        let mut bytes = policy.bytes_a_step;
        for (place, index) in order.iter().enumerate() {
            let record = &view.records[*index as usize];
            let targets = &mut targets[place * *groups..(place + 1) * *groups];
            let needed = helps(lacks, record, targets);
            if !record.takes_resizes(None) || !(needed || helps(wishes, record, targets)) {
                continue;
            }
            let budgets = &record.owned.slots.budgets;
            let moved = |(now, then): (&u32, &u32)| u64::from(now.saturating_sub(*then).min(*then));
            let bytes_of = |(group, pair)| moved(pair).saturating_mul(view.geometry.group_row_bytes(group));
            let cost = budgets.iter().zip(&*targets).enumerate().map(bytes_of).fold(0, u64::saturating_add);
            let within = cost <= bytes && chosen.len() < policy.resizes_a_step as usize;
            let wanted = within && record.work.covered;
            if !(needed || wanted) {
                continue;
            }
            if !within {
                let budgets = targets.iter_mut().zip(&*lacks).zip(budgets);
                for (group, ((target, lack), budget)) in budgets.enumerate() {
                    let stays = record.owned.slots.held(group).saturating_sub(*lack);
                    *target = stays.saturating_mul(SLOT_BLOCK).min(*budget).max(*target);
                }
            }
            for list in [&mut *lacks, &mut *wishes] {
                list.iter_mut()
                    .zip(given(record, targets))
                    .for_each(|(lack, given)| *lack = lack.saturating_sub(given));
            }
            bytes = bytes.saturating_sub(cost);
            chosen.push(place as u32);
        }
    }
}

/// The blocks of each group that a sequence frees if it shrinks to `targets`, with those that it still has from a
/// resize that the device refused half-way.
fn given<'a>(record: &'a Record, targets: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
    let blocks = record.owned.slots.blocks.iter().zip(targets);
    blocks.map(|(own, then)| (own.len() as u32).saturating_sub(then.div_ceil(SLOT_BLOCK)))
}

/// Whether a sequence that shrinks to `targets` frees blocks of a group that lacks some.
fn helps(lacks: &[u32], record: &Record, targets: &[u32]) -> bool {
    lacks.iter().zip(given(record, targets)).any(|(lack, given)| *lack > 0 && given > 0)
}
