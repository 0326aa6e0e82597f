//! Makes pages resident, locks them, and requests huge pages.

use memmap2::{Advice, MmapRaw};

use super::refusal::{OsResult, Refusal, ask};
use super::{Call, Faults, Region, page_size};

/// Keeps the region's pages in memory until it is unmapped.
pub(super) fn lock(region: &Region, faults: &dyn Faults) -> OsResult<()> {
    ask(faults, Call::Lock, "mlock")?;
    region.whole("mlock", MmapRaw::lock)
}

/// Requests transparent huge pages; the system may ignore it.
pub(super) fn advise_huge(region: &Region, faults: &dyn Faults) -> OsResult<()> {
    ask(faults, Call::AdviseHuge, "madvise for huge pages")?;
    region.whole("madvise for huge pages", |memory| memory.advise(Advice::HugePage))
}

/// Makes every page of a fresh region resident, by one call.
pub(super) fn populate(region: &Region, faults: &dyn Faults) -> OsResult<()> {
    ask(faults, Call::Populate, "madvise to populate")?;
    region.whole("madvise to populate", |memory| memory.advise(Advice::PopulateWrite))
}

/// As [`populate`], on base pages. Where the kernel lacks the call (before Linux 5.14), each page is written once.
/// Fails with `ENOMEM` when there is not enough memory.
pub(super) fn populate_or_touch(region: &Region, faults: &dyn Faults) -> OsResult<()> {
    match populate(region, faults) {
        Ok(()) => Ok(()),
        Err(Refusal { errno: libc::EINVAL | libc::ENOSYS | libc::EPERM, .. }) => {
            touch(region);
            Ok(())
        }
        // The call reports EFAULT where a page's first use would raise a signal: there is no memory for it.
        Err(Refusal { errno: libc::EFAULT, name }) => Err(Refusal { name, errno: libc::ENOMEM }),
        Err(refusal) => Err(refusal),
    }
}

/// Writes a byte of each page. The region is fresh: no other code has its address, and all bytes are zero.
fn touch(region: &Region) {
    for offset in (0..region.len()).step_by(page_size() as usize) {
        // Cannot fail: the byte is inside the region.
        let _ = region.fill(offset, 1, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Inject, NoFaults};
    use super::*;

    /// How many of the region's pages are in memory.
    fn resident(region: &Region) -> usize {
        let pages = (region.len() / page_size()) as usize;
        let mut seen = vec![0_u8; pages];
        // SAFETY: the region is mapped, and the vector has a byte for each of its pages.
        let rc = unsafe { libc::mincore(region.as_ptr().cast(), region.len() as usize, seen.as_mut_ptr()) };
        assert_eq!(rc, 0);
        seen.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn pages_become_resident_by_the_call_and_by_touching() {
        let region = || Region::new(None, 64 * page_size(), &NoFaults).unwrap();
        assert_eq!(resident(&region()), 0);
        for errno in [None, Some(libc::EINVAL), Some(libc::EPERM)] {
            let region = region();
            match errno {
                None => populate_or_touch(&region, &NoFaults).unwrap(),
                Some(e) => populate_or_touch(&region, &Inject::call(Call::Populate, e)).unwrap(),
            }
            assert_eq!(resident(&region), 64, "errno {errno:?}");
        }
    }

    #[test]
    fn too_little_memory_for_the_pages_is_reported_and_they_are_not_touched() {
        for errno in [libc::ENOMEM, libc::EFAULT] {
            let region = Region::new(None, 64 * page_size(), &NoFaults).unwrap();
            let refusal = populate_or_touch(&region, &Inject::call(Call::Populate, errno)).unwrap_err();
            assert_eq!((refusal.errno, resident(&region)), (libc::ENOMEM, 0));
        }
    }
}
