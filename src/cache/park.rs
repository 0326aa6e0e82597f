//! Parking: a sequence gives its lane and slots back, keeps its pages, and comes back later without recomputing a row.
//!
//! A server that runs out of slots preempts a request. Every row of the request is in the total pool already, so there
//! is nothing to store and nothing to compute again: only the lane and the slots change hands. vLLM frees a preempted
//! request's blocks and computes its prompt again (`Scheduler._preempt_request`).
//!
//! | call | device | host |
//! |---|---|---|
//! | [`Cache::park`] | notes the newest rows, empties the lane | accepts landed rows, frees lane and slots |
//! | parked | nothing | may extend the prompt, append to it, truncate it, close |
//! | [`Cache::resume`] | joins a lane, with the noted rows as warm-up | takes a lane and slots |
//!
//! A parked sequence is a prompt without a lane: its tokens are all of the sequence. So a conversation parks, appends
//! the rows of its next turn, however many, and resumes.
//!
//! **The noted rows** are the newest of the rule's order, at most `top_k` for each index group. They stay on the
//! device, in one of [`Config::parked`](crate::Config::parked) *places*, and are read once, by the join. As a warm-up
//! they get one stamp, so their order among each other is lost. They are a hint: a place that could not be written
//! loads nothing. Rows of the last step, which `park` itself accepts, are not among them: no step has selected them.
//!
//! **Order.** A place's writer is ordered after its last reader by `warmed` and after its last writer by `left`, and
//! its reader after its writer by `left`, which also orders the lane's next sequence. A park waits for nothing, and
//! needs no ticket. It needs an idle sequence, because the next sequence stages its lists where operations of this one
//! may still read theirs.

use crate::cache::Cache;
use crate::cache::budgets::Takes;
use crate::cache::places::Place;
use crate::cache::record::{HostWork, State};
use crate::device::{Newest, PoolOp, Stream, Ticket};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, Sequence};
use crate::sparse::{Holding, WarmUp};

impl Cache {
    /// Parks a sequence: its lane and slots are free for others when the call returns, and its pages stay. `accepted`
    /// is how many rows of its last step count, as in [`Cache::prepare`]; the others are rejected. A sequence that has
    /// not joined may be parked too, with 0 accepted rows. [`Cache::resume`] brings it back. Until then it is a prompt
    /// that can be extended ([`Cache::extend`]), appended to and truncated.
    ///
    /// The device notes the rows that the sequence selected last, on `stream`, which is ordered after its earlier work.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::Exhausted`] if [`Config::parked`](crate::Config::parked) sequences are parked;
    /// [`Kind::InvalidState`] while it is joining, or after a failed step (truncate it first); [`Kind::Busy`] while
    /// work of the sequence is in flight; [`Kind::DeviceFailed`] if that work failed; [`Kind::OutOfRange`] for more
    /// accepted rows than landed. These errors change nothing. If the device refuses the call half-way, the sequence is
    /// as before, or as before its join ([`Length::landed`](crate::Length) is 0, and the accepted rows count): park it
    /// again, with 0 accepted rows then, or join it.
    pub fn park(&mut self, sequence: Sequence, accepted: u32, stream: Stream) -> Result<()> {
        let index = sequence.index as usize;
        self.record(sequence)?;
        self.hear();
        self.release_held(index)?;
        let record = self.record(sequence)?;
        record.check_state(&[State::Running, State::Filling], "park")?;
        record.check_idle("park")?;
        record.check_ticket("park")?;
        if accepted > record.rows.landed {
            return Err(Error::new(Kind::OutOfRange, "park")
                .at("accepted rows")
                .with("accepted", accepted)
                .with("landed", record.rows.landed));
        }
        self.check_staged(index, "park")?;
        if self.records[index].owned.place.is_none() {
            self.places.next()?;
        }
        self.take_over(index, stream)?;
        if self.records[index].state == State::Running {
            self.note_newest(index, stream)?;
            self.become_prompt(index, accepted);
        }
        self.empty_lane(Lane(self.records[index].lane()), stream)?;
        if self.records[index].owned.place.is_none() {
            self.records[index].owned.place = Some(Place { number: self.places.next()?, noted: false });
            self.places.take();
        }
        let groups = self.geometry.groups().len();
        let owned = &mut self.records[index].owned;
        owned.least.clear();
        owned.asks_at = 0;
        let slots = std::mem::replace(&mut owned.slots, Holding::none(groups));
        self.sparse.give_back(&slots)?;
        self.share_is_due();
        let record = &mut self.records[index];
        (record.state, record.work) = (State::Parked, HostWork::default());
        Ok(())
    }

    /// Notes the rows that a running sequence selected last, in a place of its own. An error takes none.
    fn note_newest(&mut self, index: usize, stream: Stream) -> Result<()> {
        let number = self.places.next()?;
        let (lane, positions) = (Lane(self.records[index].lane()), self.places.slice(number)?);
        // Its last reader may be on another stream, and so may its last writer, if no one read it.
        self.device.wait(stream, self.warmed)?;
        self.device.wait(stream, self.left)?;
        self.device.enqueue(self.pools, stream, PoolOp::Newest(Newest { lane, positions }))?;
        self.places.take();
        self.records[index].owned.place = Some(Place { number, noted: true });
        Ok(())
    }

    /// Makes a running sequence a complete prompt that has not joined.
    fn become_prompt(&mut self, index: usize, accepted: u32) {
        let record = &mut self.records[index];
        let length = record.rows.committed + accepted;
        record.admitted.prompt = length;
        record.filled.fill(length);
        // Its steps wrote their keys.
        record.keys.fill(length);
        (record.rows.committed, record.rows.stored) = (length, length);
        (record.rows.landed, record.rows.upper) = (0, length);
        record.steps.micro_batch = None;
        record.state = State::Filling;
    }

    /// Resumes a parked sequence: takes a lane and slots, and joins, with the rows that were noted when it was parked
    /// as warm-up. It gets the slots that it was opened with or last resized to; after [`Cache::extend`], a ratio is of
    /// the new tokens. If `bytes_a_call` is not 0, it limits the bytes that the call gathers, and [`Cache::join_more`]
    /// gathers the rest. The sequence may enter any micro-batch.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that is not parked, or whose prompt is incomplete in a
    /// layer, or its index keys if it arrived; [`Kind::DeviceFailed`] if a copy of such keys failed;
    /// [`Kind::Exhausted`] names lanes or slot blocks; [`Kind::Busy`] as in [`Cache::join`]. These errors change
    /// nothing. If the device refuses the call half-way, the sequence has its lane, and [`Cache::join`] does the rest.
    pub fn resume(&mut self, sequence: Sequence, stream: Stream, bytes_a_call: u64) -> Result<Ticket> {
        let record = self.record(sequence)?;
        record.check_state(&[State::Parked], "resume")?;
        self.check_complete(record, "resume")?;
        self.take_lane(sequence, Takes::Share, stream)?;
        self.join(sequence, stream, WarmUp { bytes_a_call, ..WarmUp::default() })
    }

    /// Takes a lane and slots for a complete prompt that has none: parked, or arriving. It is then filling, and may
    /// join. An error takes nothing.
    pub(super) fn take_lane(&mut self, sequence: Sequence, takes: Takes, stream: Stream) -> Result<()> {
        let index = sequence.index as usize;
        let admitted = self.record(sequence)?.admitted.clone();
        let (slots, least) = self.take_slots(&admitted)?;
        let owned = &mut self.records[index].owned;
        (owned.slots, owned.least) = (slots, least);
        if let Err(error) = self.take_share(sequence, takes, stream) {
            let groups = self.geometry.groups().len();
            let owned = &mut self.records[index].owned;
            owned.least.clear();
            let slots = std::mem::replace(&mut owned.slots, Holding::none(groups));
            self.sparse.give_back(&slots)?;
            return Err(error);
        }
        self.records[index].state = State::Filling;
        Ok(())
    }

    /// The warm-up of a join: the given one, or the rows that were noted when the sequence was parked.
    pub(super) fn warm_up_of(&self, index: usize, given: WarmUp) -> Result<WarmUp> {
        match self.records[index].owned.place {
            Some(Place { number, noted: true }) if given.selections.is_none() => {
                Ok(WarmUp { selections: Some(self.places.slice(number)?), steps: 1, ..given })
            }
            _ => Ok(given),
        }
    }

    /// Frees the place of a sequence whose join has read it on `stream`.
    pub(super) fn leave_place(&mut self, index: usize, stream: Stream) -> Result<()> {
        if self.records[index].owned.place.is_some() {
            self.device.wait(stream, self.warmed)?;
            self.device.record(self.warmed, stream)?;
            self.places.give_back(self.records[index].owned.place.take());
        }
        Ok(())
    }
}
