//! Resizes: budgets that change between the steps of a sequence, while its steps and those of others are in flight.
//!
//! The model has no slots: a resize changes a number and shortens a list of rows. The host does not always wait for a
//! resize, so that the next step follows it on the device alone.

use super::model::{State, blocks, budgets, declared_slots};
use super::run::World;
use super::share::changes;
use forebay::{Budget, Kind};

impl World {
    /// Free slot blocks by index group.
    pub fn free_blocks(&self) -> Vec<u32> {
        let mut free = blocks(&declared_slots(&self.config, &self.groups));
        for s in self.seqs.iter().filter(|s| s.state != State::Gone) {
            free.iter_mut().zip(&s.blocks).for_each(|(free, own)| *free -= own);
        }
        free
    }

    /// The budget of a wish: at and next to whole blocks, more and less at once, and invalid ones.
    fn new_budget(&self, wish: u8) -> Budget {
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
            11 => self.by_layer([150, 5, 70], wish > 200),
            12 => self.by_layer([7, 128, 20], false),
            13 if wish > 200 => Budget::ByLayer(vec![9, 9]),
            14 if wish > 200 => Budget::Ratio(0.0),
            15 if wish > 200 => Budget::Slots(3),
            _ => Budget::Slots(25),
        }
    }

    /// The reason why a resize must be refused, else the new budgets.
    fn resized(&self, seq: usize, budget: &Budget) -> Result<Vec<u32>, Kind> {
        let s = &self.seqs[seq];
        let table = budgets(&self.config, budget, s.admitted, &self.groups);
        let table = table.filter(|_| self.config.share.is_none()).ok_or(Kind::InvalidConfig)?;
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
        let (budget, wait) = (self.new_budget(budget), (stream / 3).is_multiple_of(2));
        let stream = self.engine.stream(u32::from(stream) % 3);
        let Some(seq) = self.pick(wish).filter(|_| wish < 250) else {
            let (dead, before) = (self.dead_handle(wish), self.snapshot());
            let result = self.cache.resize(dead, &budget, stream);
            self.expect(before, result, Some(Kind::Closed));
            return;
        };
        self.settle_resize(seq);
        let s = &self.seqs[seq];
        let (handle, resized, in_flight) = (s.handle, self.resized(seq, &budget), s.in_flight > 0);
        let before = self.snapshot();
        let result = self.cache.resize(handle, &budget, stream);
        let refused = resized.as_ref().err().copied();
        let table = match self.expect(before, result, refused) {
            Some(()) => resized.unwrap(),
            // A device that fails half-way leaves the old budgets or the new ones.
            None if self.failed() => self.cache.budgets(handle).unwrap().to_vec(),
            None => return,
        };
        if !self.failed() {
            self.seqs[seq].asked = budget;
        }
        if table == self.seqs[seq].budgets {
            return self.note("resize to the same budgets");
        }
        let (grows, shrinks) = changes(&self.seqs[seq].budgets, &table);
        let old = self.resize(seq, table, stream);
        self.learn_kept(&[(seq, old)]);
        for (what, is) in [("shrink", shrinks), ("grow", grows), ("resize in flight", in_flight)] {
            if is {
                self.note(what);
            }
        }
        if wait {
            self.settle_resize(seq);
        }
    }

    /// Waits until a sequence's resize has run, if the host has not seen its end.
    pub fn settle_resize(&mut self, seq: usize) {
        if let Some(stream) = self.seqs[seq].resizing.take() {
            self.engine.drain(stream);
        }
    }
}
