//! Resizes: budgets that change between the steps of a sequence, while its steps and those of others are in flight.
//!
//! The model has no slots: a resize changes a number and shortens a list of rows. The host does not always wait for a
//! resize, so that the next step follows it on the device alone.
//!
//! In a world with shared budgets the cache resizes. The model does not divide: it learns the budgets from the cache
//! after each call that may change them, and holds the cache to what was promised.

use super::model::{Seq, State, blocks, budgets, declared_slots};
use super::run::World;
use forebay::device::Stream;
use forebay::{Budget, Error, Kind, SLOT_BLOCK, Share, ShareBy};

/// The policy of a world: none for an even number.
pub fn share(number: u8) -> Option<Share> {
    let by = [ShareBy::Equal, ShareBy::Length, ShareBy::Misses][usize::from(number / 2 % 3)];
    let share = Share { by, every: 3, least_change: 4, bytes_a_step: 1 << 16, resizes_a_step: 2 };
    (!number.is_multiple_of(2)).then_some(share)
}

impl World {
    /// Free slot blocks by layer.
    pub fn free_blocks(&self) -> Vec<u32> {
        let mut free = blocks(&declared_slots(&self.config, self.layers()));
        for s in self.seqs.iter().filter(|s| s.state != State::Gone) {
            free.iter_mut().zip(&s.blocks).for_each(|(free, own)| *free -= own);
        }
        free
    }

    /// Slot blocks by layer that no sequence was promised.
    pub fn unpromised(&self) -> Vec<u32> {
        let mut free = blocks(&declared_slots(&self.config, self.layers()));
        for s in self.seqs.iter().filter(|s| s.state != State::Gone) {
            // A resize may have lowered what the sequence was opened with.
            let own = if self.config.share.is_some() { blocks(&s.least) } else { s.blocks.clone() };
            free.iter_mut().zip(own).for_each(|(free, own)| *free -= own);
        }
        free
    }

    /// The kind of a refusal to take slots from sequences that cannot shrink now: those of open steps, those that
    /// failed or still join, and closed ones whose steps are in flight.
    pub fn cannot_reclaim<T>(&self, result: &Result<T, Error>) -> Option<Kind> {
        let error = result.as_ref().err()?;
        let stays = |s: &Seq| matches!(s.state, State::Failed | State::Joining | State::Closing);
        let stay = self.open.iter().any(Option::is_some) || self.seqs.iter().any(stays);
        let busy = error.place() == "slots of sequences in open steps";
        (self.config.share.is_some() && stay && busy).then_some(Kind::Busy)
    }

    /// The budgets after a call that may have changed them, on `stream`.
    pub fn learn_budgets(&mut self, stream: Stream) {
        if self.config.share.is_none() {
            return;
        }
        let mut changed = 0;
        for s in self.seqs.iter_mut().filter(|s| s.is_open()) {
            let budgets = self.cache.budgets(s.handle).unwrap();
            if budgets == s.budgets {
                continue;
            }
            assert!(budgets.iter().zip(&s.least).all(|(is, least)| is >= least), "{budgets:?} {:?}", s.least);
            (s.budgets, s.blocks) = (budgets.to_vec(), blocks(budgets));
            if s.state == State::Running {
                s.resizing = Some(stream);
                changed += 1;
            }
            s.oracles.iter_mut().zip(budgets).for_each(|(oracle, slots)| oracle.resize(*slots as usize));
        }
        self.counted.resizes += changed;
        if changed > 0 {
            self.note("slots are shared anew");
        }
    }

    /// The budget of a wish: at and next to whole blocks, more and less at once, and invalid ones.
    fn new_budget(wish: u8) -> Budget {
        match wish % 16 {
            0 => Budget::Slots(4),
            1 => Budget::Slots(11),
            2 => Budget::Slots(40),
            3 => Budget::Slots(63),
            4 => Budget::Slots(64),
            5 => Budget::Slots(65),
            6 => Budget::Slots(129),
            7 => Budget::Slots(1000),
            8 | 9 => Budget::Ratio(1.0),
            10 => Budget::Ratio(0.4),
            11 => Budget::ByLayer(vec![150, 5, 70]),
            12 => Budget::ByLayer(vec![7, 128, 20]),
            13 if wish > 200 => Budget::ByLayer(vec![9, 9]),
            14 if wish > 200 => Budget::Ratio(0.0),
            15 if wish > 200 => Budget::Slots(3),
            _ => Budget::Slots(25),
        }
    }

    /// The reason why a resize must be refused, else the new budgets.
    fn resized(&self, seq: usize, budget: &Budget) -> Result<Vec<u32>, Kind> {
        let s = &self.seqs[seq];
        if self.config.share.is_some() {
            return Err(Kind::InvalidConfig);
        }
        let table = budgets(&self.config, budget, s.admitted, self.layers()).ok_or(Kind::InvalidConfig)?;
        if s.state != State::Running {
            return Err(Kind::InvalidState);
        }
        if self.open.iter().flatten().any(|flight| flight.names(seq)) {
            return Err(Kind::Busy);
        }
        let mut wanted = blocks(&table).into_iter().zip(&s.blocks).zip(self.free_blocks());
        let fits = wanted.all(|((wanted, own), free)| wanted.saturating_sub(*own) <= free);
        if fits { Ok(table) } else { Err(Kind::Exhausted) }
    }

    /// Resizes a sequence, or is refused.
    pub fn resize_op(&mut self, wish: u8, budget: u8, stream: u8) {
        let (budget, wait) = (World::new_budget(budget), (stream / 3).is_multiple_of(2));
        let stream = self.engine.stream(u32::from(stream) % 3);
        let Some(seq) = self.pick(wish).filter(|_| wish < 250) else {
            let (dead, before) = (self.dead_handle(wish), self.snapshot());
            let result = self.cache.resize(dead, &budget, stream);
            self.expect(before, result, Some(Kind::Closed));
            return;
        };
        if self.config.share.is_some() && wait {
            let result = self.cache.share_slots(stream);
            let resized = self.counted.resizes + u64::from(result.unwrap());
            self.learn_budgets(stream);
            assert_eq!(self.counted.resizes, resized);
            return;
        }
        self.settle_resize(seq);
        let s = &self.seqs[seq];
        let (handle, resized, in_flight) = (s.handle, self.resized(seq, &budget), s.in_flight > 0);
        let (before, in_use) = (self.snapshot(), self.cache.stats().slots_in_use);
        let result = self.cache.resize(handle, &budget, stream);
        let refused = resized.as_ref().err().copied();
        let table = match self.expect(before, result, refused) {
            Some(()) => resized.unwrap(),
            // A device that fails half-way leaves the old budgets or the new ones.
            None if self.failed() => self.cache.budgets(handle).unwrap().to_vec(),
            None => return,
        };
        let failed = self.failed();
        let s = &mut self.seqs[seq];
        if table == s.budgets {
            return self.note("resize to the same budgets");
        }
        let grows = table.iter().zip(&s.budgets).any(|(new, old)| new > old);
        let shrinks = table.iter().zip(&s.budgets).any(|(new, old)| new < old);
        let new = blocks(&table);
        let both: Vec<u32> = s.blocks.iter().zip(&new).map(|(old, new)| *old.max(new)).collect();
        let [held, kept] =
            [&s.blocks, &both].map(|blocks| u64::from(blocks.iter().sum::<u32>() * SLOT_BLOCK));
        // Blocks that go are kept if the device fails before they are given back.
        let keeps = failed && self.cache.stats().slots_in_use == in_use - held + kept;
        s.blocks = if keeps { both } else { new };
        (s.budgets, s.resizing) = (table, Some(stream));
        s.oracles.iter_mut().zip(&s.budgets).for_each(|(oracle, budget)| oracle.resize(*budget as usize));
        self.counted.resizes += 1;
        for (what, is) in [("shrink", shrinks), ("grow", grows), ("resize in flight", in_flight)] {
            if is {
                self.note(what);
            }
        }
        if wait {
            self.settle_resize(seq);
        }
    }

    /// Waits until every resize has run.
    pub fn settle_resizes(&mut self) {
        (0..self.seqs.len()).for_each(|seq| self.settle_resize(seq));
    }

    /// Waits until a sequence's resize has run, if the host has not seen its end.
    pub fn settle_resize(&mut self, seq: usize) {
        if let Some(stream) = self.seqs[seq].resizing.take() {
            self.engine.drain(stream);
        }
    }
}
