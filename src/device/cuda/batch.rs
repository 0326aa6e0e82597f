//! Copies that one driver call enqueues together.
//!
//! **What it is for.** Pages that do not touch each other are a copy each for a copy engine, and each copy would be a
//! driver call. One call of `cuMemcpyBatchAsync` enqueues up to [`BATCH_COPIES`] of them.
//!
//! **Which drivers.** The call came with CUDA 12.8. Drivers of CUDA 13 have it too, beside a second version with an
//! argument less. Without the call, or where the driver says that it is not supported, copies are enqueued one by one
//! from then on. Those that a refused call may have enqueued before are then made twice, which does no harm: no copy of
//! a batch writes what another one reads.
//!
//! **Order.** A driver may run the copies of a batch in any order, and the batch as a whole in the stream's. So they
//! must not depend on each other: `checks` of `device::pages` refuses pieces that overlap.
//!
//! **Where not.** A driver does not capture a batch: it refuses the call, but the capture goes on without the copies.
//! The device therefore refuses copies of pages in a capture before they come here. A driver takes no batch on the
//! legacy stream either, so copies there are single ones.

use super::driver::{DriverResult, Handle, code, flag};
use super::pools::Enqueueing;
use super::structs::{BATCH_COPIES, CopyAttributes, Location};
use crate::sync::{AtomicU32, Ordering};

/// The attributes of all copies: in the stream's order, on the engines rather than on multiprocessors.
const ATTRIBUTES: CopyAttributes = {
    let nowhere = Location { kind: 0, ordinal: 0 };
    CopyAttributes {
        order: flag::COPY_IN_STREAM_ORDER,
        from: nowhere,
        to: nowhere,
        flags: flag::COPY_BESIDE_COMPUTE,
    }
};

/// Copies that wait for their call.
pub(super) struct Batch<'a> {
    /// Whether the device takes batches; 0 for no.
    batches: &'a AtomicU32,
    to: [Handle; BATCH_COPIES],
    from: [Handle; BATCH_COPIES],
    bytes: [u64; BATCH_COPIES],
    count: usize,
    /// Copies are enqueued one by one.
    single: bool,
}

impl Batch<'_> {
    /// An empty batch for a stream. If `batches` is 0, copies are enqueued one by one.
    pub fn new(stream: Handle, batches: &AtomicU32) -> Batch<'_> {
        // Either name of the legacy stream is 0 here.
        let single = stream == 0 || batches.load(Ordering::Relaxed) == 0;
        Batch {
            batches,
            to: [0; BATCH_COPIES],
            from: [0; BATCH_COPIES],
            bytes: [0; BATCH_COPIES],
            count: 0,
            single,
        }
    }

    /// Adds a copy, and enqueues the batch if that makes it full.
    pub fn add(&mut self, e: &Enqueueing<'_>, from: Handle, to: Handle, bytes: u64) -> DriverResult {
        if self.single {
            return e.current.copy(to, from, bytes, e.stream);
        }
        let lists =
            (self.to.get_mut(self.count), self.from.get_mut(self.count), self.bytes.get_mut(self.count));
        if let (Some(to_place), Some(from_place), Some(bytes_place)) = lists {
            (*to_place, *from_place, *bytes_place) = (to, from, bytes);
            self.count += 1;
        }
        if self.count == BATCH_COPIES { self.enqueue(e) } else { Ok(()) }
    }

    /// Enqueues the copies that wait.
    pub fn enqueue(&mut self, e: &Enqueueing<'_>) -> DriverResult {
        let count = std::mem::take(&mut self.count);
        if count > 1 {
            let (count, mut refused) = (count as u64, 0);
            let (to, from, bytes) = (&self.to, &self.from, &self.bytes);
            let call =
                e.current.copy_batch(to, from, bytes, count, &ATTRIBUTES, &0, 1, &mut refused, e.stream);
            match call {
                Err(refusal) if refusal.code == code::NOT_SUPPORTED => {
                    self.batches.store(0, Ordering::Relaxed);
                    self.single = true;
                }
                done => return done,
            }
        }
        let mut all = self.from.iter().zip(&self.to).zip(&self.bytes).take(count);
        all.try_for_each(|((from, to), bytes)| e.current.copy(*to, *from, *bytes, e.stream))
    }
}
