//! The directory of prefix blocks in two tiers: which blocks have a page on the device, which have one in host memory,
//! and which go next (SGLang: HiCache; vLLM: the block pool with a CPU offload).
//!
//! A model with full attention reads every row of a sequence in every step, so the pages of a running sequence are on
//! the device. A *block* is a published page: other sequences with the same prefix share it. Its host page, if it has
//! one, is a copy from which the block comes back after its device page went to another block. The directory is for one
//! group of layers, whose pages have one size.
//!
//! | state of a block | device page | host page | leaves it by |
//! |---|---|---|---|
//! | in use | yes | maybe | [`release`](Directory::release) by its last user |
//! | unused | yes | maybe | [`share`](Directory::share), or [`evict_device`](Directory::evict_device) |
//! | on the host only | no | yes | [`insert`](Directory::insert), or [`evict_host`](Directory::evict_host) |
//!
//! A block without any page is forgotten.
//!
//! **Orders.** Each tier has one LRU order. The device's has the unused blocks: a block enters it as the newest when
//! its last user releases it. A caller releases the last block of a sequence first, so that a prefix outlives its
//! continuations. The host's has all blocks with a host page, and every use of a block makes it the newest there too,
//! also a hit on the device. So if each block is saved when it is published, the hits of both tiers together are those
//! of one LRU cache with the pages of the larger tier.
//!
//! **When a block is saved** is up to the caller. Write-through: it saves the blocks that
//! [`unsaved`](Directory::unsaved) lists, in the background, so that an eviction copies nothing. Write-back: it saves
//! the block that [`victim`](Directory::victim) names before it evicts it. In both a block keeps its host page when it
//! comes back to the device, so that its next eviction copies nothing.
//!
//! **Copies in flight.** While a copy reads or writes a host page, or a sequence relies on it, the caller
//! [pins](Directory::pin) it; a pinned page is never evicted. A device page that a copy writes has a user. One that a
//! copy reads may be evicted meanwhile: the caller orders the page's next writes behind the copy.
//!
//! **Cost.** Every operation takes one look-up and a few links: constant time, whatever the number of blocks. All
//! memory is allocated at construction, [`Directory::ENTRY_BYTES`] for each page of both tiers at most.
//!
//! The directory moves no bytes and owns no page: it holds the numbers that the caller gives it. It does not know
//! whether a copy is done, and has no clock.
//!
//! **Invariants**, which [`Directory::validate`] checks: each block is found by its hash, and has a page; a page has
//! one block; no tier has more blocks than pages; a block with users has a device page; exactly the blocks with a
//! device page and no user are in the device's order; exactly the blocks with a host page and no pin are in the
//! host's; a block that is listed as unsaved has a device page and no host page.

use super::blocks::{BlockTable, Inserted};
use super::{BlockHash, Recency};
use crate::error::{Error, Kind, Result};
use crate::fallible::filled;
use crate::ids::{DevicePage, HostPage};

/// No page.
const NONE: u32 = u32::MAX;

const NEW: &str = "new directory";

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// [`NONE`] without a device page.
    device: u32,
    /// [`NONE`] without a host page.
    host: u32,
    /// Sequences that use the device page.
    users: u32,
    /// Copies from and to the host page.
    pins: u32,
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Located {
    /// Its page on the device.
    pub device: Option<DevicePage>,
    /// Its page in host memory.
    pub host: Option<HostPage>,
    /// The sequences that use its device page.
    pub users: u32,
    /// Whether its host page is pinned.
    pub kept: bool,
}

/// A block whose device page goes, or went, to another block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    /// Its name.
    pub block: BlockHash,
    /// Its page on the device.
    pub page: DevicePage,
    /// Whether it has a host page, and so remains known.
    pub saved: bool,
}

/// See the module's head.
#[derive(Debug)]
pub struct Directory {
    table: BlockTable,
    entries: Vec<Entry>,
    /// The pages of each tier.
    device_pages: u32,
    host_pages: u32,
    /// Blocks that have one.
    on_device: u32,
    on_host: u32,
    /// Blocks with a device page and no user, by the end of their last use.
    unused: Recency,
    /// Blocks with a host page and no pin, by their last use.
    host: Recency,
    /// Blocks that had no host page yet since they were published, by that time.
    unsaved: Recency,
}

impl Directory {
    /// The most bytes for a block: its place in the table, its entry, and its links in three orders.
    pub const ENTRY_BYTES: u64 = BlockTable::ENTRY_BYTES + 16 + 24;

    /// An empty directory of a tier of `device_pages` and one of `host_pages`. A tier may have none.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if both have more than [`super::CAPACITY_MAX`] pages together; [`Kind::OutOfMemory`].
    pub fn new(device_pages: u32, host_pages: u32) -> Result<Directory> {
        // A sum that does not fit is beyond the most that the table takes.
        let blocks = device_pages.saturating_add(host_pages);
        let table = BlockTable::new(blocks, NEW)?;
        let nothing = Entry { device: NONE, host: NONE, users: 0, pins: 0 };
        let order = || {
            Recency::new(blocks).map_err(|bytes| {
                Error::new(Kind::OutOfMemory, NEW).at("an order of use").with("bytes", bytes)
            })
        };
        Ok(Directory {
            table,
            entries: filled(blocks as usize, nothing, NEW, "its tables")?,
            device_pages,
            host_pages,
            on_device: 0,
            on_host: 0,
            unused: order()?,
            host: order()?,
            unsaved: order()?,
        })
    }

    /// Blocks with a device page.
    pub fn on_device(&self) -> u32 {
        self.on_device
    }

    /// Blocks with a host page.
    pub fn on_host(&self) -> u32 {
        self.on_host
    }

    /// Blocks with a host page and no pin.
    pub fn evictable(&self) -> u32 {
        self.host.len()
    }

    /// Blocks with a device page and no user.
    pub fn unused(&self) -> u32 {
        self.unused.len()
    }

    /// Where a block is; `None` if it is in no tier.
    #[inline]
    pub fn find(&self, block: &BlockHash) -> Option<Located> {
        let entry = self.entries[self.table.find(block).ok()? as usize];
        Some(Located {
            device: Some(DevicePage(entry.device)).filter(|page| page.0 != NONE),
            host: Some(HostPage(entry.host)).filter(|page| page.0 != NONE),
            users: entry.users,
            kept: entry.pins > 0,
        })
    }

    /// Adds a user to a block on the device and returns its page; `None` if it has no device page.
    ///
    /// # Errors
    /// [`Kind::Overflow`] past 2^32 - 1 users.
    pub fn share(&mut self, block: &BlockHash) -> Result<Option<DevicePage>> {
        match self.table.find(block) {
            Ok(entry) if self.entries[entry as usize].device != NONE => {
                self.add_user(entry)?;
                Ok(Some(DevicePage(self.entries[entry as usize].device)))
            }
            _ => Ok(None),
        }
    }

    fn add_user(&mut self, entry: u32) -> Result<()> {
        let users = &mut self.entries[entry as usize].users;
        *users =
            users.checked_add(1).ok_or_else(|| Error::new(Kind::Overflow, "share").at("users of a block"))?;
        self.unused.remove(entry);
        self.used(entry);
        Ok(())
    }

    /// Makes a block the newest of the host's, if it can be evicted there.
    fn used(&mut self, entry: u32) {
        if self.host.contains(entry) {
            self.host.touch(entry);
        }
    }

    /// Gives a block a device page and one user: a block that a sequence has published, or one that comes back from the
    /// host. A block that had this page already gets one more user. A block that had no page in any tier is
    /// [unsaved](Directory::unsaved) from now on.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] if every device page has a block: [`Directory::evict_device`] makes room, unless all are in
    /// use. [`Kind::OutOfRange`] for page 2^32 - 1. [`Kind::Overflow`] as in [`Directory::share`].
    pub fn insert(&mut self, block: &BlockHash, page: DevicePage) -> Result<Inserted> {
        let found = self.table.find(block);
        if let Ok(entry) = found {
            match self.entries[entry as usize].device {
                NONE => {}
                known if known == page.0 => return self.add_user(entry).map(|()| Inserted::Known),
                _ => return Ok(Inserted::Twin),
            }
        }
        self.room("insert", "device pages", page.0, self.on_device, self.device_pages)?;
        let entry = match found {
            Ok(entry) => entry,
            Err(place) => self.insert_new(place, block)?,
        };
        let Entry { device, users, .. } = &mut self.entries[entry as usize];
        (*device, *users) = (page.0, 1);
        self.on_device += 1;
        self.used(entry);
        Ok(Inserted::New)
    }

    fn insert_new(&mut self, place: usize, block: &BlockHash) -> Result<u32> {
        // Both tiers have a page for each entry, so a tier with room has a free one.
        let none = || Error::new(Kind::Internal, "insert").at("entries of the directory");
        let entry = self.table.insert(place, block).ok_or_else(none)?;
        self.entries[entry as usize] = Entry { device: NONE, host: NONE, users: 0, pins: 0 };
        if self.host_pages > 0 {
            self.unsaved.touch(entry);
        }
        Ok(entry)
    }

    /// Checks that a tier has room for one more block, in `page`.
    fn room(&self, call: &'static str, tier: &'static str, page: u32, held: u32, pages: u32) -> Result<()> {
        if page == NONE {
            return Err(Error::new(Kind::OutOfRange, call).at(tier).with("page", page));
        }
        if held == pages {
            return Err(Error::new(Kind::Exhausted, call).at(tier).with("pages", pages));
        }
        Ok(())
    }

    /// Removes a user. A block that loses its last user becomes the newest of the device's unused blocks.
    ///
    /// # Errors
    /// [`Kind::Internal`] if the block has no users.
    pub fn release(&mut self, block: &BlockHash) -> Result<()> {
        let used = self.table.find(block).ok().filter(|entry| self.entries[*entry as usize].users > 0);
        let entry = used.ok_or_else(|| Error::new(Kind::Internal, "release a block without users"))?;
        let users = &mut self.entries[entry as usize].users;
        *users -= 1;
        if *users == 0 {
            self.unused.touch(entry);
        }
        self.used(entry);
        Ok(())
    }

    /// Notes that a block on the device is saved to a host page. It is the newest of the host's.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] if every host page has a block: [`Directory::evict_host`] makes room, unless all are pinned.
    /// [`Kind::InvalidState`] if the block has no device page, or has a host page. [`Kind::OutOfRange`] for page
    /// 2^32 - 1.
    pub fn save(&mut self, block: &BlockHash, page: HostPage) -> Result<()> {
        let savable = |entry: &u32| {
            let Entry { device, host, .. } = self.entries[*entry as usize];
            device != NONE && host == NONE
        };
        let Some(entry) = self.table.find(block).ok().filter(savable) else {
            return Err(
                Error::new(Kind::InvalidState, "save").at("a block that has a host page, or no device page")
            );
        };
        self.room("save", "host pages", page.0, self.on_host, self.host_pages)?;
        self.entries[entry as usize].host = page.0;
        self.on_host += 1;
        self.unsaved.remove(entry);
        self.host.touch(entry);
        Ok(())
    }

    /// Keeps a block's host page from eviction until the same number of calls of [`Directory::unpin`], and returns it;
    /// `None` if the block has no host page.
    ///
    /// # Errors
    /// [`Kind::Overflow`] past 2^32 - 1 pins.
    pub fn pin(&mut self, block: &BlockHash) -> Result<Option<HostPage>> {
        let Ok(entry) = self.table.find(block) else { return Ok(None) };
        let Entry { host, pins, .. } = &mut self.entries[entry as usize];
        if *host == NONE {
            return Ok(None);
        }
        *pins = pins.checked_add(1).ok_or_else(|| Error::new(Kind::Overflow, "pin").at("pins of a block"))?;
        self.host.remove(entry);
        Ok(Some(HostPage(*host)))
    }

    /// Removes a pin. A block that loses its last pin becomes the newest of the host's.
    ///
    /// # Errors
    /// [`Kind::Internal`] if the block has no pins.
    pub fn unpin(&mut self, block: &BlockHash) -> Result<()> {
        let pinned = self.table.find(block).ok().filter(|entry| self.entries[*entry as usize].pins > 0);
        let entry = pinned.ok_or_else(|| Error::new(Kind::Internal, "unpin a block without pins"))?;
        let pins = &mut self.entries[entry as usize].pins;
        *pins -= 1;
        if *pins == 0 {
            self.host.touch(entry);
        }
        Ok(())
    }

    /// The blocks that had no host page yet since they were published, the oldest first. A block whose host page is
    /// evicted is not listed again: a host tier that is too small would be written for ever. Nothing is listed if there
    /// are no host pages.
    pub fn unsaved(&self) -> impl Iterator<Item = (BlockHash, DevicePage)> + '_ {
        self.unsaved
            .iter()
            .map(|entry| (*self.table.block(entry), DevicePage(self.entries[entry as usize].device)))
    }

    /// The block that [`Directory::evict_device`] takes next: the least recently used one of the unused blocks.
    pub fn victim(&self) -> Option<Victim> {
        let entry = self.unused.oldest()?;
        let Entry { device, host, .. } = self.entries[entry as usize];
        Some(Victim { block: *self.table.block(entry), page: DevicePage(device), saved: host != NONE })
    }

    /// Takes the device page of the least recently used one of the unused blocks. The caller frees the page. The block
    /// remains known if it has a host page. `None` if every block on the device is in use.
    pub fn evict_device(&mut self) -> Option<Victim> {
        let victim = self.victim()?;
        let entry = self.unused.pop_oldest()?;
        self.entries[entry as usize].device = NONE;
        self.on_device -= 1;
        self.unsaved.remove(entry);
        if !victim.saved {
            self.table.remove(entry);
        }
        Some(victim)
    }

    /// Takes the device page of a block, used or not: its rows are about to change. The block remains known if it has a
    /// host page. `None` if it has no device page.
    pub fn forget_device(&mut self, block: &BlockHash) -> Option<DevicePage> {
        let entry = self.table.find(block).ok()?;
        let Entry { device, host, users, .. } = &mut self.entries[entry as usize];
        let page = DevicePage(std::mem::replace(device, NONE));
        if page.0 == NONE {
            return None;
        }
        *users = 0;
        let saved = *host != NONE;
        self.on_device -= 1;
        self.unused.remove(entry);
        self.unsaved.remove(entry);
        if !saved {
            self.table.remove(entry);
        }
        Some(page)
    }

    /// Takes the host page of the least recently used one of the blocks that are not pinned. The caller frees the page.
    /// The block remains known if it has a device page. `None` if every block on the host is pinned.
    pub fn evict_host(&mut self) -> Option<(BlockHash, HostPage)> {
        let entry = self.host.pop_oldest()?;
        let Entry { device, host, .. } = &mut self.entries[entry as usize];
        let page = HostPage(std::mem::replace(host, NONE));
        self.on_host -= 1;
        if *device == NONE {
            self.table.remove(entry);
        }
        Some((*self.table.block(entry), page))
    }

    /// Checks every invariant in the module's head.
    ///
    /// # Errors
    /// [`Kind::Internal`] with the rule.
    pub fn validate(&self) -> Result<()> {
        let broken = |rule: &'static str| Err(Error::new(Kind::Internal, rule).at("directory"));
        let (mut device, mut host) = (Vec::new(), Vec::new());
        let mut blocks = 0;
        for entry in self.table.entries() {
            let Entry { device: on_device, host: on_host, users, pins } = self.entries[entry as usize];
            blocks += 1;
            device.extend(Some(on_device).filter(|page| *page != NONE));
            host.extend(Some(on_host).filter(|page| *page != NONE));
            let (has_device, has_host) = (on_device != NONE, on_host != NONE);
            for (holds, rule) in [
                (self.table.find(self.table.block(entry)) == Ok(entry), "a block is not found by its hash"),
                (has_device || has_host, "a block has no page"),
                (has_device || users == 0, "a block with users has no device page"),
                (has_host || pins == 0, "a block with pins has no host page"),
                (self.unused.contains(entry) == (has_device && users == 0), "the device's order is wrong"),
                (self.host.contains(entry) == (has_host && pins == 0), "the host's order is wrong"),
                (!self.unsaved.contains(entry) || has_device && !has_host, "an unsaved block is none"),
            ] {
                if !holds {
                    return broken(rule);
                }
            }
        }
        let orders = [&self.unused, &self.host, &self.unsaved];
        let stray = |order: &&Recency| {
            order.iter().any(|entry| self.table.find(self.table.block(entry)) != Ok(entry))
        };
        if blocks != self.table.len() || orders.iter().any(stray) {
            return broken("an entry without a block is in use");
        }
        for (mut pages, held, most) in
            [(device, self.on_device, self.device_pages), (host, self.on_host, self.host_pages)]
        {
            if pages.len() != held as usize || held > most {
                return broken("the blocks of a tier are not counted");
            }
            pages.sort_unstable();
            if pages.array_windows().any(|[page, next]| page == next) {
                return broken("two blocks have one page");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "directory_tests.rs"]
mod tests;
