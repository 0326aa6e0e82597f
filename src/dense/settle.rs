//! Settling: copies that a call has enqueued for a sequence outside of steps, until a ticket shows their end.
//!
//! A fork and a truncation may copy a page that others share. If the device refuses such a call half-way, the copies
//! that it has already enqueued may still run. So the call marks the sequence as *unsettled* on its stream before it
//! enqueues them, and [`Cache::settle`] ends the mark: it enqueues a ticket after the copies, and records the
//! sequence's event `ready` for work on other streams. The pages that a copy reads stay the sequence's until then.
//!
//! **Which event comes after a sequence's work.** Copies end with `ready`, an event of the sequence. A step ends with
//! `stepped`, an event of its micro-batch. Steps of a micro-batch run one after the other, so a wait for a later step
//! of the micro-batch also covers the sequence's own.

use crate::dense::Cache;
use crate::dense::record::{Copied, Record};
use crate::device::{CopyPages, PageOp, Stream, Ticket};
use crate::error::Result;

impl Cache {
    /// Orders `stream` after all earlier work of a sequence on any stream, that of refused calls included.
    pub(super) fn order_behind(&self, index: usize, stream: Stream) -> Result<()> {
        let record = &self.records[index];
        if let Some(before) = record.work.unsettled.filter(|before| *before != stream) {
            self.device.record(self.ready[index], before)?;
            return self.device.wait(stream, self.ready[index]);
        }
        match record.steps.micro_batch.filter(|_| record.work.stepped) {
            Some(micro_batch) => self.device.wait(stream, self.stepped[micro_batch.index()]),
            None => self.device.wait(stream, self.ready[index]),
        }
    }

    /// Marks that `stream` gets work for a sequence, behind what a refused call has left on another stream.
    pub(super) fn unsettle(&mut self, index: usize, stream: Stream) -> Result<()> {
        if self.records[index].work.unsettled.is_some() {
            self.order_behind(index, stream)?;
        }
        self.records[index].work.unsettled = Some(stream);
        Ok(())
    }

    /// Enqueues copies of pages for a sequence.
    pub(super) fn copy_pages(&self, copies: &[Copied], stream: Stream) -> Result<()> {
        for (group, pool) in self.pools.iter().enumerate() {
            let of_group = copies.iter().filter(|copy| copy.group == group);
            for copy in of_group {
                let op = CopyPages { planes: pool.planes(), pages: &[(copy.from, copy.to)] };
                self.device.enqueue_pages(stream, PageOp::Copy(op))?;
            }
        }
        Ok(())
    }

    /// Ends the work that was enqueued on `stream`: enqueues a ticket after it, and records `ready` for work on other
    /// streams.
    pub(super) fn settle(&mut self, index: usize, stream: Stream) -> Result<Ticket> {
        let (ticket, completer) = Ticket::new();
        self.device.complete(stream, completer)?;
        self.device.record(self.ready[index], stream)?;
        let Record { work, coming, .. } = &mut self.records[index];
        work.ticket = Some(ticket.clone());
        (work.unsettled, work.stepped) = (None, false);
        coming.clear();
        Ok(ticket)
    }

    /// Queries the device, so that a failed device ends its tickets.
    pub(super) fn hear(&self) {
        // The tickets hold the result.
        let _ = self.device.query(self.left);
    }

    /// Frees the pages from which finished copies have read.
    pub(super) fn release_held(&mut self, index: usize) -> Result<()> {
        if self.records[index].is_working() { Ok(()) } else { self.give_held_back(index) }
    }

    pub(super) fn give_held_back(&mut self, index: usize) -> Result<()> {
        while let Some(copy) = self.records[index].copied.pop() {
            if let Some(pool) = self.pools.get_mut(copy.group) {
                pool.let_go(copy.from)?;
            }
        }
        Ok(())
    }
}
