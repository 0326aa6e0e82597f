//! Settling: work that a call has enqueued for a sequence, until a ticket shows its end.
//!
//! If the device refuses a call half-way, the work that the call has already enqueued stays in its stream. It may
//! still run, and it names the sequence's pages, slots and lane. So a call marks the sequence as *unsettled* before it
//! enqueues such work:
//!
//! | state | entered by |
//! |---|---|
//! | unsettled, on one stream | [`Cache::take_over`]: joins, fork (the parent too), truncate, resize, keys, leave |
//! | settled | [`Cache::settle`]: enqueues a ticket after the work and records `ready` in the same stream |
//!
//! **Which event comes after a sequence's work.** Work that the host issues for one sequence alone ends with `ready`,
//! an event of the sequence's record: a sequence that is arriving has work, and no lane. A step ends with `stepped`,
//! one event for all its rows: with an event for each row, a batch of hundreds would need hundreds of driver calls to
//! record the events and as many to wait for them. So a sequence whose last work is a step has no current `ready` event
//! (`HostWork::stepped`). Steps of a micro-batch run one after the other. So a wait for a later step of the micro-batch
//! also covers the sequence's step; the sequence may thus wait for a step in which it takes no part.
//!
//! A call that succeeds settles its sequence. After a call that fails, the next call takes over: it orders work on
//! another stream after all work of the first stream, and a release first settles the sequence and waits for that
//! ticket. So the cache gives out no resource of such work before the stream has passed the work, or the device has
//! failed (a device failure ends all tickets). A step also takes over: its event and `stepped`, which its end records,
//! come after all earlier work, so the sequence is settled.
//!
//! One unsettled stream for each sequence is enough, because a call that takes over orders its stream after the
//! previous one before it enqueues its own work.

use crate::cache::Cache;
use crate::device::{Stream, Ticket};
use crate::error::Result;

impl Cache {
    /// Orders `stream` after all earlier work of a sequence on any stream, the work of refused calls included.
    pub(super) fn order_behind(&self, index: usize, stream: Stream) -> Result<()> {
        let record = &self.records[index];
        if let Some(before) = record.work.unsettled {
            // The end of a resize is read from `ready`, so a resize that was refused half-way needs its record too.
            if before != stream || record.work.staged {
                self.record_ready(index, before)?;
            }
            if before != stream {
                return self.wait_ready(index, stream);
            }
        }
        match record.steps.micro_batch.filter(|_| record.work.stepped) {
            Some(micro_batch) => self.device.wait(stream, self.stepped[micro_batch.index()]),
            None => self.wait_ready(index, stream),
        }
    }

    /// Calls `order_behind` before work is enqueued on `stream`, and marks the sequence as unsettled. An error changes
    /// nothing.
    pub(super) fn take_over(&mut self, index: usize, stream: Stream) -> Result<()> {
        self.order_behind(index, stream)?;
        self.records[index].work.unsettled = Some(stream);
        Ok(())
    }

    /// Ends the work that was enqueued on `stream`: enqueues a ticket after it, and records `ready` for work on other
    /// streams.
    pub(super) fn settle(&mut self, index: usize, stream: Stream) -> Result<Ticket> {
        let (ticket, completer) = Ticket::new();
        self.device.complete(stream, completer)?;
        self.record_ready(index, stream)?;
        let record = &mut self.records[index];
        record.work.ticket = Some(ticket.clone());
        record.note_work();
        Ok(ticket)
    }

    /// Queries the device, so that a failed device ends its tickets. Callers use this before they read a ticket that
    /// no other call would end.
    pub(super) fn hear(&self) {
        // The tickets hold the result.
        let _ = self.device.query(self.left);
    }

    /// Frees the pages from which finished work has copied.
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
