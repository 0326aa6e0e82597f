//! What a call has enqueued for a sequence, until somebody can tell when it has ended.
//!
//! A call that the device refuses half-way leaves work in its stream: it may still run, and it names the sequence's
//! pages, slots and lane. So a sequence is *unsettled* from before such work is enqueued:
//!
//! | | when |
//! |---|---|
//! | unsettled, on one stream | [`Cache::take_over`]: join, fork (the parent too), roll-back, an emptying |
//! | settled | [`Cache::settle`]: a ticket stands in that stream behind the work, and `ready` is recorded there |
//!
//! **Which event stands behind a sequence's work.** What the host issues for it alone ends with `ready`, an event of
//! its lane. A step ends with `stepped`, one event for all its rows, since a batch of hundreds would take as many calls
//! of the driver to record, and as many to wait for: a sequence whose last work is a step has no `ready` of its own
//! (`HostWork::stepped`). Steps of a micro-batch stand one behind the other, so who waits for a later one waits for the
//! sequence's too, and perhaps for a step that it was not in.
//!
//! Calls that end well settle it themselves. Of one that did not, whatever follows takes over: work on another
//! stream is ordered behind all of the first one, and a release first settles it and waits for that ticket. So
//! nothing that such work names is given out before its stream has come past it, or the device has failed, which
//! ends tickets. A step takes it over for good: its event, and `stepped`, which its end records, stand behind it.
//!
//! One stream is enough: what takes over is ordered behind the last before it enqueues anything of its own.

use crate::cache::Cache;
use crate::device::{Stream, Ticket};
use crate::error::Result;

impl Cache {
    /// Orders `stream` behind all earlier work of a sequence, on whichever stream, refused calls' included.
    pub(super) fn order_behind(&self, index: usize, stream: Stream) -> Result<()> {
        let record = &self.records[index];
        let lane = record.lane();
        if let Some(before) = record.work.unsettled.filter(|before| *before != stream) {
            self.record_ready(lane, before)?;
            return self.wait_ready(lane, stream);
        }
        match record.steps.micro_batch.filter(|_| record.work.stepped) {
            Some(micro_batch) => self.device.wait(stream, self.stepped[micro_batch.index()]),
            None => self.wait_ready(lane, stream),
        }
    }

    /// The same before work is enqueued there: from now on the sequence is unsettled. A refusal changes nothing.
    pub(super) fn take_over(&mut self, index: usize, stream: Stream) -> Result<()> {
        self.order_behind(index, stream)?;
        self.records[index].work.unsettled = Some(stream);
        Ok(())
    }

    /// The end of what was enqueued on `stream`: a ticket behind it, and `ready` for what follows elsewhere.
    pub(super) fn settle(&mut self, index: usize, stream: Stream) -> Result<Ticket> {
        let (ticket, completer) = Ticket::new();
        self.device.complete(stream, completer)?;
        self.record_ready(self.records[index].lane(), stream)?;
        let record = &mut self.records[index];
        record.work.ticket = Some(ticket.clone());
        (record.work.unsettled, record.work.stepped) = (None, false);
        Ok(ticket)
    }

    /// A device that has failed ends tickets when it is asked: so it is, before one is looked at that nothing else
    /// would end.
    pub(super) fn hear(&self) {
        // The answer stands in the tickets.
        let _ = self.device.query(self.left);
    }

    /// Gives back the pages that ended work has copied from.
    pub(super) fn release_held(&mut self, index: usize) -> Result<()> {
        if self.records[index].is_working() { Ok(()) } else { self.give_held_back(index) }
    }

    pub(super) fn give_held_back(&mut self, index: usize) -> Result<()> {
        for copy in std::mem::take(&mut self.records[index].owned.copied) {
            self.total.pages.release(copy.from.0)?;
            self.index.pages.release(copy.from.1)?;
        }
        Ok(())
    }
}
