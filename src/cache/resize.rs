//! Changing budgets between steps: a sequence gets more slots, or gives some up.
//!
//! The cache takes the slot blocks that come, enqueues [`PoolOp::Resize`], and gives back the blocks that go. Nothing
//! crosses the link: every row is in the total pool already. The device moves the rows that stay but whose slots go.
//! Steps in flight are not disturbed, because the operation runs after the last finished step of the sequence, and its
//! next step after the operation.
//!
//! | what | how it is ordered |
//! |---|---|
//! | the sequence's earlier work, its finished steps included | [`Cache::take_over`] |
//! | the work of the sequence that gave up the blocks that come | a wait for `left` |
//! | the sequence that takes the blocks that go | waits for `left`, recorded after the resize |
//! | the sequence's next step | waits for `ready` |
//! | the next lists that the host stages for the lane | the host asks whether `ready` was reached |
//!
//! A resize has no ticket, since no caller waits for it, and it allocates nothing.
//!
//! **A refused call.** If the device refuses the operation, the blocks that came go back, and the budgets are as they
//! were. If it refuses a record after the operation, the new budgets hold. The sequence then stays unsettled, and keeps
//! the blocks that go behind its lists until the next resize or its end, both of which record `left` first.

use crate::cache::Cache;
use crate::cache::record::State;
use crate::device::{PoolOp, Resize, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, Sequence};
use crate::sparse::Budget;

impl Cache {
    /// Changes the budget of a sequence, layer by layer, between two of its steps. A smaller budget keeps the newest
    /// rows of the LRU order; a larger one adds empty slots, which misses fill. The call copies nothing over the link.
    /// Inside the device it moves the rows that stay but whose slots go, at most the smaller of the slots that go and
    /// those that stay. It enqueues that on `stream`; steps wait for it by an event. Captured graphs stay valid.
    ///
    /// Slots are taken and freed in whole blocks of 64, but a budget may be any number of slots. As in
    /// [`Cache::open`], slots beyond the tokens that the sequence may have are not taken.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that is not running; [`Kind::Busy`] while a step of the
    /// sequence is prepared and not finished, or before earlier work of the sequence, such as its last resize, has
    /// ended; [`Kind::InvalidConfig`] for an invalid budget, one below `min_budget`, and in a cache with
    /// [`Config::share`](crate::Config::share); [`Kind::OutOfRange`] for more
    /// slots than the layer has; [`Kind::Exhausted`] for more than are free; [`Kind::DeviceFailed`] if work of the
    /// sequence failed. These errors change nothing. If the device refuses the call half-way, the sequence has its old
    /// budgets or its new ones ([`Cache::budgets`]), and the engine may call again on any stream.
    pub fn resize(&mut self, sequence: Sequence, budget: &Budget, stream: Stream) -> Result<()> {
        let index = sequence.index as usize;
        let tokens = self.record(sequence)?.admitted.tokens;
        if self.sharing.is_some() {
            return Err(Error::new(Kind::InvalidConfig, "resize")
                .at("the cache shares its slots")
                .hint("leave share out of the configuration to set budgets yourself"));
        }
        let reach = self.config.reach(tokens)?;
        let mut budgets = std::mem::take(&mut self.budgets);
        let geometry = self.geometry.clone();
        let members = |group| geometry.members(group);
        let mut resized =
            budget.write(tokens, self.config.min_budget, &mut budgets, members).and_then(|()| {
                // More slots than tokens would never be used.
                budgets.iter_mut().for_each(|b| *b = (*b).min(reach));
                self.check_resize(index)?;
                self.check_sizes(&budgets)?;
                self.resize_to(index, &budgets, stream)
            });
        if resized.is_ok() {
            let admitted = &mut self.records[index].admitted;
            admitted.ratio = budget.ratio();
            resized = budget.write(tokens, self.config.min_budget, &mut admitted.asked, members);
        }
        self.budgets = budgets;
        resized
    }

    /// The slots of a sequence in each index group: in each layer, if none share a selection.
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn budgets(&self, sequence: Sequence) -> Result<&[u32]> {
        Ok(&self.record(sequence)?.owned.slots.budgets)
    }

    /// Checks that the sequence's budgets may change now.
    pub(super) fn check_resize(&mut self, index: usize) -> Result<()> {
        self.hear();
        let record = &self.records[index];
        record.check_state(&[State::Running], "resize")?;
        record.check_ticket("resize")?;
        let busy = |place: &'static str| Error::new(Kind::Busy, "resize").at(place);
        if record.steps.open {
            return Err(busy("a step of the sequence is open").hint("finish it"));
        }
        if record.has_ticket() {
            return Err(busy("work of the sequence is in flight"));
        }
        self.check_staged(index, "resize")
    }

    /// Checks that the last resize of a sequence has run: the host may then stage other lists for its lane.
    pub(super) fn check_staged(&mut self, index: usize, operation: &'static str) -> Result<()> {
        match self.is_staged(index)? {
            true => Err(Error::new(Kind::Busy, operation).at("the last resize of the sequence is in flight")),
            false => Ok(()),
        }
    }

    /// Whether a resize of a sequence may still run.
    pub(super) fn is_staged(&mut self, index: usize) -> Result<bool> {
        let record = &self.records[index];
        let work = &record.work;
        if !work.staged {
            return Ok(false);
        }
        if let Some(before) = work.unsettled {
            self.record_ready(index, before)?;
        }
        let ended = self.ready.get(index).map_or(Ok(true), |ready| self.device.query(*ready))?;
        self.records[index].work.staged = !ended;
        Ok(!ended)
    }

    fn check_sizes(&self, budgets: &[u32]) -> Result<()> {
        let mut groups = self.sparse.slots().sizes().zip(budgets).enumerate();
        match groups.find(|(_, (slots, budget))| *budget > slots) {
            Some((group, (slots, budget))) => Err(Error::new(Kind::OutOfRange, "resize")
                .at("slots of a layer")
                .with("layer", self.geometry.members(group).start as u64)
                .with("wanted", *budget)
                .with("most", slots)),
            None => Ok(()),
        }
    }

    /// Changes the budgets of a sequence that [`Cache::check_resize`] accepted.
    pub(super) fn resize_to(&mut self, index: usize, budgets: &[u32], stream: Stream) -> Result<()> {
        let slots = &self.records[index].owned.slots;
        if slots.budgets == budgets && !slots.has_extra() {
            return Ok(());
        }
        self.sparse.slots().check_growth(slots, budgets)?;
        self.take_over(index, stream)?;
        // The blocks that come may just have been given up, on another stream.
        self.device.wait(stream, self.left)?;
        self.give_up_extra(index, stream)?;
        self.sparse.grow(&mut self.records[index].owned.slots, budgets)?;
        let slots = &self.records[index].owned.slots;
        let resize = Resize { lane: Lane(slots.lane), blocks: &slots.blocks, budgets };
        if let Err(error) = self.device.enqueue(self.pools, stream, PoolOp::Resize(resize)) {
            self.sparse.trim(&mut self.records[index].owned.slots)?;
            return Err(error);
        }
        let record = &mut self.records[index];
        record.owned.slots.budgets.copy_from_slice(budgets);
        record.owned.asks_at = 0;
        record.work.staged = true;
        record.note_issued();
        self.stats.resizes += 1;
        self.give_up_extra(index, stream)?;
        self.record_ready(index, stream)?;
        self.records[index].note_work();
        Ok(())
    }

    /// Gives back the blocks that a resize on `stream`, or before it, has given up.
    fn give_up_extra(&mut self, index: usize, stream: Stream) -> Result<()> {
        if !self.records[index].owned.slots.has_extra() {
            return Ok(());
        }
        self.device.record(self.left, stream)?;
        self.sparse.trim(&mut self.records[index].owned.slots)
    }
}
