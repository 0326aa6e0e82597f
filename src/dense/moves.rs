//! Copies between the tiers, and their order.
//!
//! The host's tier has copies of published pages, and the pages of parked sequences. A page goes *down* to it when
//! it is saved or its sequence is parked, and comes *up* when a sequence with that prefix is opened or the parked
//! one is resumed. Both are copies of whole pages on streams that the engine names, beside its steps. Nothing waits
//! for them but what needs their bytes.
//!
//! **Who wins.** The directory decides which page is evicted by the order of use alone. It does not ask whether a copy
//! of that page has ended: then the decision would depend on the speed of a copy. A page whose copy may still run is
//! used again only behind that copy, on the device.
//!
//! **Order.** All copies down are one *line*, and all copies up are another. Each batch of a line waits for the event
//! of the line, copies, and records the event again. So the event covers all batches before it. Each page knows the
//! number of the last batch that touched it, in each line:
//!
//! | what happens next | waits for the line | because of |
//! |---|---|---|
//! | a page goes down | up | the host page, which one may still read; the device page, which one may still fill |
//! | a page comes up | down | the host page, which one may still fill; the device page, which one may still read |
//! | a step, a fork or a truncation takes a device page | down | the page, which a copy down may still read |
//! | a sequence shares a device page | up | the page, which a copy up may still fill |
//!
//! A layer of a sequence that arrives through the host goes up in the same line, and waits for nothing else: the host
//! has seen the end of what touched its pages before (`arrive`).
//!
//! A batch that the host has seen complete needs no wait. A parking begins with a batch down without copies, and gives
//! all its pages that number: who takes one waits for what the engine had enqueued for the sequence, and others do not.
//!
//! **Write-back.** With `Save::Evicted` a page that goes is copied down first. Some calls that take pages name no
//! stream. So the copy is noted, and the next call that takes pages, copies or begins a step on a stream enqueues it
//! before anything else, which is before anybody writes to the page or reads its copy.

use crate::dense::line::Moves;
use crate::dense::pool::Pool;
use crate::device::{CopyPages, Device, PageOp, Stream};
use crate::error::Result;

impl Moves {
    /// Enqueues the noted copies.
    pub(super) fn flush(&mut self, pools: &mut [Pool], stream: Stream, device: &dyn Device) -> Result<()> {
        self.down.settle(device)?;
        if !self.is_noted() {
            return Ok(());
        }
        self.down.begin(stream, device)?;
        for (noted, pool) in self.noted.iter_mut().zip(pools) {
            let last = noted.iter().map(|(page, host)| pool.ups(*page, *host)).max().unwrap_or(0);
            self.up.wait(last, stream, device)?;
            if !noted.is_empty() {
                // In the order of their targets no device needs memory to see that none is copied to twice.
                noted.sort_unstable_by_key(|(_, host)| *host);
                let op = CopyPages { planes: pool.down(), pages: noted };
                device.enqueue_pages(stream, PageOp::Copy(op))?;
                self.bytes[0] += pool.page_bytes() * noted.len() as u64;
                noted.clear();
            }
        }
        self.down.end(true, stream, device)
    }

    /// Enqueues copies of host pages to device pages: for each group pairs of them. Returns the batch's number.
    pub(super) fn bring(
        &mut self,
        pairs: &[Vec<(u32, u32)>],
        pools: &mut [Pool],
        stream: Stream,
        device: &dyn Device,
    ) -> Result<u64> {
        self.up.begin(stream, device)?;
        let number = self.up.next();
        for (pairs, pool) in pairs.iter().zip(&mut *pools) {
            let last = pairs.iter().map(|(host, page)| pool.downs(*page, *host)).max().unwrap_or(0);
            self.down.wait(last, stream, device)?;
            pairs.iter().for_each(|(host, page)| pool.note_up(*page, *host, number));
        }
        for part in 0..self.up.parts() {
            for (pages, pool) in pairs.iter().zip(&*pools) {
                let planes = pool.up(part as usize);
                if !pages.is_empty() && !planes.is_empty() {
                    device.enqueue_pages(stream, PageOp::Copy(CopyPages { planes, pages }))?;
                }
            }
            self.up.end(part + 1 == self.up.parts(), stream, device)?;
        }
        let bytes = pairs.iter().zip(pools).map(|(pairs, pool)| pool.page_bytes() * pairs.len() as u64);
        self.bytes[1] += bytes.sum::<u64>();
        Ok(number)
    }

    /// Enqueues copies of one layer of host pages to device pages of a group. Returns the number of the copy. The host
    /// has seen the end of all that touched these pages before, but for copies of other layers of them.
    pub(super) fn bring_layer(
        &mut self,
        (layer, pages): (u32, &[(u32, u32)]),
        pool: &mut Pool,
        stream: Stream,
        device: &dyn Device,
    ) -> Result<u64> {
        self.up.begin(stream, device)?;
        let number = self.up.next_part();
        pages.iter().for_each(|(host, page)| pool.note_up(*page, *host, number));
        let planes = pool.of_layer(layer);
        device.enqueue_pages(stream, PageOp::Copy(CopyPages { planes, pages }))?;
        self.up.end(true, stream, device)?;
        let bytes: u64 = planes.iter().map(|(_, plane)| plane.bytes).sum();
        self.bytes[1] += bytes * pages.len() as u64;
        Ok(number)
    }
}
