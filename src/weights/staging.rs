//! Pinned host memory that a device reaches, and a small piece of it through which the host reads and writes device
//! memory: for digests and files, at the start of a model and not while it serves.

use crate::device::{Device, Event, Slice, Stream};
use crate::error::Result;
use crate::os::{Fallback, Faults, Map, Request};
use crate::sync::Arc;
use crate::total::memory::take;

/// Bytes of pinned memory between the device and the host's hash or files, if a granule is not larger.
const STAGED: u64 = 4 << 20;

/// Pinned host memory that the device reaches.
pub(super) struct Pinned {
    pub map: Arc<Map>,
    pub slice: Slice,
    pub fallbacks: Vec<Fallback>,
}

pub(super) fn pinned(device: &dyn Device, bytes: u64, faults: &dyn Faults) -> Result<Pinned> {
    let request = Request { bytes, huge: true, populate: true, lock: true, node: None, shared: false };
    let (map, slice, fallbacks) = take(&request, device, faults)?;
    Ok(Pinned { map, slice, fallbacks })
}

/// Pinned memory through which the host reads and writes device memory, and the event that it waits for.
#[derive(Debug, Default)]
pub(super) struct Staging {
    memory: Option<(Arc<Map>, Slice)>,
    event: Option<Event>,
}

impl Staging {
    /// Waits until all that was enqueued on `stream` has run.
    pub fn drain(&mut self, device: &dyn Device, stream: Stream) -> Result<()> {
        let event = match self.event {
            Some(event) => event,
            None => *self.event.insert(device.event()?),
        };
        device.record(event, stream)?;
        device.synchronize(event)
    }

    /// The memory, in whole granules of `grain` bytes.
    pub fn memory(
        &mut self,
        device: &dyn Device,
        grain: u64,
        faults: &dyn Faults,
    ) -> Result<(Arc<Map>, Slice)> {
        if let Some((map, slice)) = &self.memory {
            return Ok((Arc::clone(map), *slice));
        }
        let Pinned { map, slice, .. } = pinned(device, STAGED.next_multiple_of(grain), faults)?;
        self.memory = Some((Arc::clone(&map), slice));
        Ok((map, slice))
    }
}
