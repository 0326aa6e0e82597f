//! Host memory that a device reads and writes directly.
//!
//! **Order of calls.** A descriptor (on huge pages first, then on base pages, then none: private zeros), its size,
//! the mapping, the hint for transparent huge pages, the NUMA binding, the pages, the lock. The pages come after the
//! binding because existing pages are not moved. The lock comes last because it would populate the pages itself, and
//! would not report which of the two failed.
//!
//! **Huge pages are always populated.** The system reserves them for the machine, not for a node, and a page that the
//! bound node lacks would end the process at its first use. Populating finds that while base pages can still replace
//! them.
//!
//! **Size.** Rounded up to the page size in use, so at most one page is lost.

#[cfg(feature = "cuda")]
use std::fmt::Debug;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
#[cfg(feature = "cuda")]
use std::ptr::NonNull;

use super::machine::memory_state;
use super::memory::MemoryState;
use super::refusal::Refusal;
use super::{Fallback, Faults, Protection, Region, bind, lock, memfd, page_size};
use crate::error::{Error, Kind, Result};

/// The operation that errors of this file name.
const OPERATION: &str = "map host memory";

/// The request for a [`Map`]. Only the size is binding; the other options fall back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The size in bytes, above 0; rounded up to the page size.
    pub bytes: u64,
    /// Use huge pages: reserved ones if the memory is shared, transparent ones otherwise.
    pub huge: bool,
    /// Make all pages resident from the start.
    pub populate: bool,
    /// Lock the memory, so that no page is ever swapped out.
    pub lock: bool,
    /// Bind the memory to this NUMA node.
    pub node: Option<u32>,
    /// Give the memory a descriptor, so that a [`super::Range`] or another process can map it too.
    pub shared: bool,
}

/// Owned host memory, zero at first. It dereferences to its [`Region`], which has the reads and writes.
#[derive(Debug)]
pub struct Map {
    region: Region,
    page: u64,
    descriptor: Option<OwnedFd>,
}

impl Map {
    /// Allocates the memory, and lists the options of `request` that the system refused.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for 0 bytes; [`Kind::Overflow`] for more bytes than there are addresses;
    /// [`Kind::OutOfMemory`] with the bytes `wanted`; [`Kind::OsRefused`] for any other refusal that leaves no
    /// memory.
    pub fn new(request: &Request, faults: &dyn Faults) -> Result<(Map, Vec<Fallback>)> {
        if request.bytes == 0 {
            return Err(Error::new(Kind::InvalidConfig, OPERATION).at("bytes").with("bytes", 0_u32));
        }
        let state = memory_state(faults);
        let mut lost = Vec::new();
        let mut huge = None;
        if request.huge && request.shared {
            match Map::on_huge_pages(request, &state, faults) {
                Ok(taken) => huge = Some(taken),
                Err(cause) => {
                    lost.push(Fallback { what: Fallback::HUGE_PAGES, wanted: request.bytes, cause });
                }
            }
        }
        let (map, unbound) = match huge {
            Some(taken) => taken,
            None => Map::on_base_pages(request, &state, faults, &mut lost)?,
        };
        lost.extend(unbound);
        if request.lock
            && let Err(refusal) = lock::lock(&map, faults)
        {
            let cause = refusal.to_string();
            lost.push(Fallback { what: Fallback::LOCKED_MEMORY, wanted: map.len(), cause });
        }
        Ok((map, lost))
    }

    /// Wraps memory that a driver made. `owner` has it mapped, on pages of `page` bytes, and unmaps it. It has no
    /// descriptor.
    ///
    /// # Safety
    /// `bytes` bytes from `start` on are readable, writable and initialised as long as `owner` lives.
    #[cfg(feature = "cuda")]
    pub(crate) unsafe fn given(
        start: NonNull<u8>,
        bytes: u64,
        page: u64,
        owner: Box<dyn Debug + Send + Sync>,
    ) -> Map {
        // SAFETY: the same contract.
        let region = unsafe { Region::given(start, bytes, owner) };
        Map { region, page, descriptor: None }
    }

    /// Whether a driver made it.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_given(&self) -> bool {
        self.region.is_given()
    }

    /// Maps all of it on reserved huge pages, or returns why not.
    pub(super) fn on_huge_pages(
        request: &Request,
        state: &MemoryState,
        faults: &dyn Faults,
    ) -> std::result::Result<(Map, Option<Fallback>), String> {
        let page = state.huge_page;
        if page == 0 {
            return Err("the system names no huge page size".to_owned());
        }
        let bytes = request.bytes.checked_next_multiple_of(page).unwrap_or(u64::MAX);
        let pages = bytes.checked_div(page).unwrap_or(u64::MAX);
        if pages > state.huge_free {
            return Err(format!("{pages} reserved huge pages wanted, {} free", state.huge_free));
        }
        let take = || {
            let descriptor = memfd::create(true, faults)?;
            memfd::resize(&descriptor, bytes, faults)?;
            let region = Region::new(Some(descriptor.as_fd()), bytes, faults)?;
            let unbound = request.node.and_then(|node| bind::bind(&region, node, faults));
            lock::populate(&region, faults)?;
            Ok((Map { region, page, descriptor: Some(descriptor) }, unbound))
        };
        take().map_err(|refusal: Refusal| refusal.to_string())
    }

    /// Maps all of it on base pages, which the system may merge into transparent huge pages.
    fn on_base_pages(
        request: &Request,
        state: &MemoryState,
        faults: &dyn Faults,
        lost: &mut Vec<Fallback>,
    ) -> Result<(Map, Option<Fallback>)> {
        let page = page_size();
        let bytes = rounded(request.bytes, page)?;
        if (request.populate || request.lock)
            && let Some(available) = state.available
            && available < bytes
        {
            let error = Error::new(Kind::OutOfMemory, OPERATION).at("resident pages");
            return Err(error.with("wanted", bytes).with("available", available));
        }
        let failed = |refusal: Refusal| refusal.error(OPERATION).with("wanted", bytes);
        let mut descriptor = None;
        if request.shared {
            match memfd::create(false, faults) {
                Ok(fd) => {
                    memfd::resize(&fd, bytes, faults).map_err(failed)?;
                    descriptor = Some(fd);
                }
                Err(refusal) => {
                    let cause = refusal.to_string();
                    lost.push(Fallback { what: Fallback::SHARED_MEMORY, wanted: bytes, cause });
                }
            }
        }
        let region = Region::new(descriptor.as_ref().map(AsFd::as_fd), bytes, faults).map_err(failed)?;
        if request.huge {
            let cause = match lock::advise_huge(&region, faults) {
                Err(refusal) => Some(refusal.to_string()),
                Ok(()) if !state.transparent => Some("transparent huge pages are switched off".to_owned()),
                Ok(()) => None,
            };
            // For shared memory the refusal is already listed, with its cause.
            if let Some(cause) = cause.filter(|_| !request.shared) {
                lost.push(Fallback { what: Fallback::HUGE_PAGES, wanted: request.bytes, cause });
            }
        }
        let unbound = request.node.and_then(|node| bind::bind(&region, node, faults));
        if request.populate {
            lock::populate_or_touch(&region, faults).map_err(failed)?;
        }
        Ok((Map { region, page, descriptor }, unbound))
    }

    /// Maps memory that another process exported ([`Map::export`]), with `protection`. The other process is not
    /// trusted: the system is asked for size and seals. `bytes` is the size that the other process stated.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for a descriptor that is not shared memory of exactly this size, with its size sealed;
    /// [`Kind::OutOfMemory`] and [`Kind::OsRefused`], as for memory that may only be read.
    pub fn adopt(
        descriptor: OwnedFd,
        bytes: u64,
        protection: Protection,
        faults: &dyn Faults,
    ) -> Result<Map> {
        let page = memfd::check(&descriptor, bytes, protection, faults)?;
        let region = Region::shared(descriptor.as_fd(), bytes, protection, faults)
            .map_err(|refusal| refusal.error("adopt memory").with("wanted", bytes))?;
        Ok(Map { region, page, descriptor: Some(descriptor) })
    }

    /// A descriptor of the memory for another process, which may do with it what `protection` says. With
    /// [`Protection::Read`] the system refuses every later writable mapping, this process's too; those that exist
    /// stay. The first export decides. The memory lives as long as any process has it mapped or holds a descriptor
    /// of it.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] for memory without a descriptor; [`Kind::InvalidState`] for memory that was exported with
    /// another protection; [`Kind::OsRefused`], as where the system is older than Linux 5.1 and only reading is
    /// allowed.
    pub fn export(&self, protection: Protection, faults: &dyn Faults) -> Result<OwnedFd> {
        let Some(descriptor) = self.descriptor() else {
            return Err(Error::new(Kind::Unsupported, "export memory")
                .at("memory without a descriptor")
                .hint("ask for shared memory; where memfd_create is refused, allow it"));
        };
        memfd::seal(descriptor, protection, faults)?;
        memfd::duplicate(descriptor, faults).map_err(|refusal| refusal.error("export memory"))
    }

    /// The size of the pages in use, in bytes: the base page, or a reserved huge page.
    pub fn page_bytes(&self) -> u64 {
        self.page
    }

    /// The memory's descriptor; `None` if it was not requested or was refused.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(AsFd::as_fd)
    }
}

impl Deref for Map {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.region
    }
}

/// `bytes` rounded up to whole pages, at most what a pointer can span.
pub(super) fn rounded(bytes: u64, page: u64) -> Result<u64> {
    bytes
        .checked_next_multiple_of(page)
        .filter(|bytes| i64::try_from(*bytes).is_ok())
        .ok_or_else(|| Error::new(Kind::Overflow, OPERATION).at("bytes").with("wanted", bytes))
}
