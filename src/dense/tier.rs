//! The memory of the host's tier: whole pages of each group, one group behind the other.

use crate::dense::config::Config;
use crate::device::{Device, Slice};
use crate::error::{Error, Kind, Result};
use crate::fallible::vector;
use crate::os::{Fallback, Faults, Map, Request};
use crate::sync::Arc;
use crate::total::memory::take;

/// The memory of the host's tier; none in a cache without one.
#[derive(Debug)]
pub(super) struct Tier {
    memory: Option<Arc<Map>>,
    /// All of it, as the device addresses it, and the pages of each group.
    all: Option<Slice>,
    groups: Vec<Slice>,
}

impl Tier {
    /// Takes the memory, if the configuration wants any. It adds the options that the system refused to `fallbacks`.
    pub(super) fn new(
        config: &Config,
        device: &dyn Device,
        faults: &dyn Faults,
        fallbacks: &mut Vec<Fallback>,
    ) -> Result<Tier> {
        let count = config.shape.groups.len();
        if config.host_pages.is_empty() {
            return Ok(Tier { memory: None, all: None, groups: Vec::new() });
        }
        let bytes = |group: usize| {
            let pages = config.host_pages.get(group).copied().unwrap_or(0);
            config.shape.page_bytes(group).checked_mul(pages.into())
        };
        let all = (0..count).try_fold(0_u64, |all, group| all.checked_add(bytes(group)?));
        let all = all.ok_or_else(|| Error::new(Kind::Overflow, "dense cache").at("host_pages"))?;
        // Private memory: no other process maps it, and the system has huge pages for it where it has none for shared.
        let request = Request { shared: false, ..config.memory.request(all) };
        let (map, memory, refused) = take(&request, device, faults)?;
        fallbacks.extend(refused);
        let mut groups = vector(count, "cache", "the host's tier")?;
        let mut start = 0;
        for group in 0..count {
            let own = bytes(group).unwrap_or(0);
            groups.push(memory.part(start, own)?);
            start += own;
        }
        Ok(Tier { memory: Some(map), all: Some(memory), groups })
    }

    /// The pages of a group.
    pub(super) fn pages(&self, group: usize) -> Option<Slice> {
        self.groups.get(group).copied()
    }

    /// Copies bytes to byte `at` of a part of the memory. No copy reads or writes them.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] beyond the part, and without a tier.
    pub(super) fn write(&self, part: &Slice, at: u64, bytes: &[u8]) -> Result<()> {
        let fits = at.checked_add(bytes.len() as u64).is_some_and(|end| end <= part.bytes());
        let first = self.all.and_then(|all| part.address().checked_sub(all.address()));
        match (&self.memory, first.filter(|_| fits)) {
            (Some(map), Some(first)) => map.copy_in(first + at, bytes),
            _ => Err(Error::new(Kind::OutOfRange, "store").at("pages of the host's tier").with("at", at)),
        }
    }
}
