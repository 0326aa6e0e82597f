//! Joining before all layers are there: a sequence takes its lane and slots, and each layer is warmed up as it comes.
//!
//! A warm-up gathers rows over the link. A sequence that joins when its last layer has come gathers those of all layers
//! then, while its first step waits. If a lane is free earlier, it may join early: rows of the first layers come to
//! their slots while the transfer still brings the later layers. It costs slots that no step uses yet, so an engine
//! joins early only if nothing else wants them. With shared budgets it takes no more than it was promised, because it
//! cannot shrink for others until it runs. A step needs every layer, so the sequence runs after the last warm-up.
//!
//! | call | device | host |
//! |---|---|---|
//! | [`Cache::join_early`] | enters the lane, with nothing resident | takes a lane and slots |
//! | [`Cache::warm_layer`], a group's first layer | decides which rows of the group are resident, gathers its own | |
//! | [`Cache::warm_layer`], its other layers | gathers its own | |
//! | the last of them | | the sequence runs |
//!
//! Which rows are resident is a matter of the index group, and moves no bytes. So a group's first layer comes first.
//! The result is that of one join with the selections of all groups, stamps included. So ranks may warm up layers in
//! any order that keeps this.
//!
//! **Order.** Each call is ordered behind the sequence's work before it, on any stream, and the first step behind the
//! last one, by the event of the record. A call that the device refused goes on where it was: a decision is not made
//! twice, because each one moves the stamps on.

use crate::cache::Cache;
use crate::cache::budgets::Takes;
use crate::cache::record::{State, Warmed};
use crate::device::{PoolOp, Stream, Ticket, Warm, WarmGather};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, Layer, Sequence};
use crate::sparse::{BringUp, WarmUp};

impl Cache {
    /// Adds a sequence to the batch before its prompt is complete: takes a lane and slots for an arriving one, and
    /// enters the lane on `stream`. Its rows and index keys go on coming, and [`Cache::warm_layer`] loads each layer
    /// that is complete. It runs once all are.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] if the sequence has already joined, or is parked; [`Kind::Exhausted`]
    /// and [`Kind::Busy`] as in [`Cache::join`]; [`Kind::DeviceFailed`] if a copy of its index keys failed. These
    /// errors change nothing. If the device refuses the call half-way, it has its lane; try again on any stream, or
    /// call [`Cache::join`] when it is complete. After a join that was refused half-way it has the slots of that join,
    /// with shared budgets also those beyond its promise.
    pub fn join_early(&mut self, sequence: Sequence, stream: Stream) -> Result<Ticket> {
        let record = self.record(sequence)?;
        record.check_state(&[State::Filling, State::Arriving], "join_early")?;
        record.check_ticket("join_early")?;
        self.enter_lane(sequence, Takes::Promise, stream)?;
        self.leave_place(sequence.index as usize, stream)?;
        let ticket = self.settle(sequence.index as usize, stream)?;
        let layers = self.geometry.layers() as usize;
        let record = self.record_mut(sequence)?;
        record.work.warmed = vec![Warmed::Cold; layers];
        record.state = State::Warming;
        // A share counts what it will have. Its rows are not there yet.
        record.rows.upper = record.admitted.prompt;
        Ok(ticket)
    }

    /// Loads the rows of one layer of a sequence that joined early, once the layer has all rows of the prompt, and all
    /// index keys if it has any. Which rows: for the first layer of an index group as in [`Cache::join`], where the
    /// warm-up has this group's selections alone, `[steps][k]`. Another layer has the rows of its group, and takes no
    /// selections. The rows of a layer come in one gather, so [`WarmUp::bytes_a_call`] must be 0.
    ///
    /// After the last layer the sequence may take part in steps: [`Cache::is_running`].
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that did not join early, for an incomplete layer, for
    /// one that was warmed up before, and before the layer that selects for it; [`Kind::OutOfRange`] for an unknown
    /// layer, and for a warm-up of another size; [`Kind::DeviceFailed`] if work of the sequence failed. These errors
    /// change nothing. If the device refuses the call half-way, try again on any stream, with the same warm-up.
    pub fn warm_layer(
        &mut self,
        sequence: Sequence,
        layer: Layer,
        warm_up: WarmUp,
        stream: Stream,
    ) -> Result<Ticket> {
        self.check_warm_layer(sequence, layer, &warm_up)?;
        let (index, number) = (sequence.index as usize, layer.index());
        let (group, first) = (self.geometry.group_of(number), self.geometry.first_of(number));
        self.take_over(index, stream)?;
        let record = &self.records[index];
        let (lane, whole) = (Lane(record.lane()), record.admitted.bring_up == BringUp::Whole);
        if record.work.warmed[number] == Warmed::Cold && number == first {
            let (selections, steps) = (warm_up.selections, warm_up.steps);
            let warm = Warm { lane, group: Some(group as u32), whole, selections, steps };
            self.device.enqueue(self.pools, stream, PoolOp::Warm(warm))?;
        }
        self.note_warmed(index, number, Warmed::Decided);
        if !self.config.residency_only {
            let budgets = &self.records[index].owned.slots.budgets;
            let budget =
                |layer: usize| budgets.get(self.geometry.group_of(layer)).copied().map_or(0, u64::from);
            let gather = WarmGather { lane, first: (0..number).map(budget).sum(), count: budget(number) };
            self.device.enqueue(self.pools, stream, PoolOp::WarmGather(gather))?;
        }
        let ticket = self.settle(index, stream)?;
        self.note_warmed(index, number, Warmed::Gathered);
        let record = &mut self.records[index];
        if record.work.warmed.iter().all(|warmed| *warmed == Warmed::Gathered) {
            record.has_prompt();
            record.run();
        }
        Ok(ticket)
    }

    fn note_warmed(&mut self, index: usize, layer: usize, warmed: Warmed) {
        self.records[index].work.warmed.get_mut(layer).into_iter().for_each(|noted| *noted = warmed);
    }

    fn check_warm_layer(&self, sequence: Sequence, layer: Layer, warm_up: &WarmUp) -> Result<()> {
        const CALL: &str = "warm_layer";
        self.check_layer(layer)?;
        let record = self.record(sequence)?;
        record.check_state(&[State::Warming], "warm_layer")?;
        let (number, first) = (layer.index(), self.geometry.first_of(layer.index()));
        let wrong = |kind, place| Error::new(kind, CALL).at(place).with("layer", layer.0);
        let warmed = |layer: usize| record.work.warmed.get(layer).copied().unwrap_or_default();
        if warmed(number) == Warmed::Gathered {
            return Err(wrong(Kind::InvalidState, "a layer that was warmed up before"));
        }
        record.check_rows(CALL, number)?;
        if warm_up.bytes_a_call != 0 {
            return Err(wrong(Kind::OutOfRange, "bytes a call"));
        }
        if number == first {
            record.check_keys(CALL, self.geometry.group_of(number), number)?;
            self.check_selections(CALL, warm_up, 1)?;
        } else if warmed(first) == Warmed::Cold {
            let error = wrong(Kind::InvalidState, "the layer that selects for it is not warmed up");
            return Err(error.with("selected by", first as u64).hint("warm up that layer first"));
        } else if warm_up.selections.is_some() {
            return Err(wrong(Kind::OutOfRange, "selections of a layer that another one selects for"));
        }
        // A layer after a failed one must not look done.
        record.check_ticket(CALL)
    }
}
