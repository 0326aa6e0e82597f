//! Shared budgets: the cache divides the slots, and the model does not know how.
//!
//! After each call that may move budgets the model reads them, checks what a share promises, and applies the change to
//! its lists of rows as a resize. It predicts two things: an opening is refused exactly if the promises do not fit, and
//! a join exactly if the blocks that it lacks are not above the promises of sequences that can shrink.

use super::model::{Seq, State, blocks, declared_slots, reach};
use super::run::World;
use forebay::device::Stream;
use forebay::{Budget, Cache, Kind, Result, SLOT_BLOCK, Share, ShareBy};

/// Variants of a config: three row formats, half of them with shares, of twelve policies; `grouping` divides them by
/// thirds.
pub const VARIANTS: u8 = 72;

/// The share of a variant: by each measure, by events alone or every three steps too, with loose and tight limits.
/// `row_bytes` are those of a row in all layers.
pub fn share(variant: u8, row_bytes: u32) -> Option<Share> {
    let policy = usize::from(variant / 6);
    let by = [ShareBy::Equal, ShareBy::Length, ShareBy::Misses][policy % 3];
    let every = [0, 3][policy / 3 % 2];
    // In every layer a block of rows, the least that a share takes, or a block and a half.
    let few = u64::from(row_bytes) * [64, 96][policy / 3 % 2];
    let share = match policy / 6 % 2 {
        0 => Share { by, every, least_change: 1000, bytes_a_step: 1 << 30, resizes_a_step: 100 },
        _ => Share { by, every, least_change: 2, bytes_a_step: few, resizes_a_step: 1 },
    };
    (variant / 3 % 2 == 1).then_some(share)
}

/// A call that may move budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The join of a sequence, or of one that did not come to be.
    Join(Option<usize>),
    /// A prepare of a micro-batch.
    Prepare(u32),
    /// The engine asked for it.
    Call,
}

impl World {
    /// Blocks by index group that an opening may be promised.
    pub fn room_to_promise(&self) -> Vec<u32> {
        if self.config.share.is_none() {
            return self.free_blocks();
        }
        let mut room = blocks(&declared_slots(&self.config, &self.groups));
        for s in self.seqs.iter().filter(|s| s.state != State::Gone) {
            room.iter_mut().zip(blocks(&s.least)).for_each(|(room, least)| *room -= least);
        }
        room
    }

    /// The budget of a wish. Where slots are shared, it often promises little, so that many slots may move.
    pub fn wished(&self, wish: u8) -> Budget {
        self.budget(if self.config.share.is_some() && wish & 1 == 1 { 0 } else { wish })
    }

    /// Retires the oldest step where slots are shared, since budgets move after that only.
    pub fn retire_soon(&mut self, seed: u16) {
        if self.config.share.is_some() && seed & 3 > 0 {
            self.retire(1);
        }
    }

    fn can_shrink(&self, seq: usize) -> bool {
        let open = self.open.iter().flatten().any(|flight| flight.names(seq));
        self.seqs[seq].state == State::Running && !open
    }

    /// Whether a join with these promises must wait for others' steps.
    pub fn join_is_busy(&self, least: &[u32]) -> bool {
        if self.config.share.is_none() {
            return false;
        }
        let above = |s: &Seq| {
            let pairs = blocks(&s.budgets).into_iter().zip(blocks(&s.least));
            pairs.map(|(own, least)| own - least).collect::<Vec<u32>>()
        };
        let mut room = self.free_blocks();
        for seq in (0..self.seqs.len()).filter(|seq| self.can_shrink(*seq)) {
            room.iter_mut().zip(above(&self.seqs[seq])).for_each(|(room, above)| *room += above);
        }
        blocks(least).iter().zip(room).any(|(least, room)| *least > room)
    }

    /// Makes a call that may take slots from others. If the device has not run their last resizes, the call must change
    /// nothing, and is made again once it has. So how fast a device is changes nothing either.
    pub fn claim<T>(&mut self, call: impl Fn(&mut Cache) -> Result<T>) -> Result<T> {
        let before = self.snapshot();
        let result = call(&mut self.cache);
        let is_early = |error: &forebay::Error| {
            error.place() == "work of a sequence that must give up slots is in flight"
        };
        if !result.as_ref().is_err_and(is_early) {
            return result;
        }
        assert_eq!(result.as_ref().err().map(forebay::Error::kind), Some(Kind::Busy));
        assert_eq!(self.snapshot(), before, "busy, and changed all the same");
        self.seqs.iter().filter_map(|s| s.resizing).for_each(|stream| self.engine.drain(stream));
        self.engine.settle();
        call(&mut self.cache)
    }

    /// Reads the budgets after a call on `stream`, and checks every change. Returns the number of resized sequences.
    pub fn learn_budgets(&mut self, by: By, stream: Stream) -> u32 {
        let Some(share) = self.config.share else { return 0 };
        let (mut resized, mut rows) = (Vec::new(), 0);
        for seq in 0..self.seqs.len() {
            let s = &self.seqs[seq];
            if !s.is_open() {
                continue;
            }
            let now = self.cache.budgets(s.handle).unwrap().to_vec();
            if now == s.budgets {
                continue;
            }
            let most = reach(&self.config, s.admitted);
            let promised = now.iter().zip(&s.least).all(|(now, least)| (*least..=most).contains(now));
            assert!(promised, "{by:?}: {now:?} of at least {:?}, at most {most}", s.least);
            if by == By::Join(Some(seq)) {
                assert!(s.state == State::Filling && s.budgets.iter().all(|budget| *budget == 0));
                (self.seqs[seq].blocks, self.seqs[seq].budgets) = (blocks(&now), now);
                continue;
            }
            assert!(self.can_shrink(seq), "{by:?}: a sequence that is {:?} or in an open step", s.state);
            let (grows, shrinks) = changes(&s.budgets, &now);
            match by {
                By::Join(_) => assert!(!grows, "a join gave slots to another sequence"),
                By::Prepare(micro) => {
                    assert!(s.micro.is_none_or(|own| own == micro), "of another micro-batch")
                }
                By::Call => (),
            }
            let moved = |(old, new): (&u32, &u32)| old.saturating_sub(*new).min(*new);
            rows += u64::from(s.budgets.iter().zip(&now).map(moved).max().unwrap());
            let old = self.resize(seq, now, stream);
            resized.push((seq, old));
            let what = [("join", "joins"), ("share", "shares")][usize::from(!matches!(by, By::Join(_)))];
            for (is, verb) in [(grows, "grow"), (shrinks, "shrink")] {
                if is {
                    self.note(&format!("{verb} for a {}", what.0));
                }
            }
            if self.seqs[seq].in_flight > 0 {
                self.note(&format!("{} in flight", what.1));
            }
        }
        let bytes = rows * self.row_bytes();
        let within = bytes <= share.bytes_a_step && resized.len() <= share.resizes_a_step as usize;
        assert!(within || matches!(by, By::Join(_)), "{bytes} bytes, {} resizes", resized.len());
        self.learn_kept(&resized);
        resized.len() as u32
    }

    /// Applies new budgets to a sequence of the model. Returns the blocks that it had.
    pub fn resize(&mut self, seq: usize, budgets: Vec<u32>, stream: Stream) -> Vec<u32> {
        let s = &mut self.seqs[seq];
        let old = std::mem::replace(&mut s.blocks, blocks(&budgets));
        (s.budgets, s.resizing) = (budgets, Some(stream));
        s.oracles.iter_mut().zip(&s.budgets).for_each(|(oracle, budget)| oracle.resize(*budget as usize));
        self.counted.resizes += 1;
        old
    }

    /// If the device failed within a resize, the sequence keeps the blocks that should go.
    pub fn learn_kept(&mut self, resized: &[(usize, Vec<u32>)]) {
        let stats = self.cache.stats();
        let used = |world: &World| {
            let taken = world.seqs.iter().filter(|s| s.state != State::Gone);
            taken.map(|s| world.slots(&s.blocks)).sum::<u64>()
        };
        if !self.failed() || stats.slots_in_use == used(self) {
            return;
        }
        for (seq, old) in resized {
            let new = self.seqs[*seq].blocks.clone();
            self.seqs[*seq].blocks = old.iter().zip(&new).map(|(old, new)| *old.max(new)).collect();
            // They are not taken from another sequence, so none runs out of them.
            let pool = blocks(&declared_slots(&self.config, &self.groups));
            let fits = |group: usize| self.seqs.iter().map(|s| s.blocks[group]).sum::<u32>() <= pool[group];
            let least = || self.free_blocks().into_iter().min().unwrap() * SLOT_BLOCK;
            if used(self) == stats.slots_in_use && (0..pool.len()).all(fits) && least() == stats.free_slots {
                return;
            }
            self.seqs[*seq].blocks = new;
        }
        panic!("blocks of no sequence: {stats:?}");
    }

    /// The engine asks for a division.
    pub fn share_op(&mut self, stream: u8) {
        let stream = self.engine.stream(u32::from(stream) % 3);
        let before = self.snapshot();
        let result = self.cache.share_slots(stream);
        let resized = self.learn_budgets(By::Call, stream);
        let refused = self.config.share.is_none().then_some(Kind::InvalidConfig);
        if let Some(said) = self.expect(before, result, refused) {
            assert_eq!(said, resized);
        }
    }

    /// Sequences whose join found no slots try again.
    pub fn join_late(&mut self) {
        for seq in 0..self.seqs.len() {
            if self.seqs[seq].busy && self.seqs[seq].state == State::Filling {
                self.join(seq, 0, 0, 0);
                if self.seqs[seq].state != State::Filling {
                    self.note("join that was busy");
                }
            }
        }
    }
}

/// Whether some budget grows, and whether some shrinks.
pub fn changes(old: &[u32], new: &[u32]) -> (bool, bool) {
    let mut pairs = old.iter().zip(new);
    (pairs.clone().any(|(old, new)| new > old), pairs.any(|(old, new)| new < old))
}
