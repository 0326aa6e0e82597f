//! Making pages resident, keeping them so, and asking for large ones.

use std::ffi::c_void;

use super::{Answer, Call, Faults, Refusal, Region, answer, ask, page_size};

/// Keeps the region's pages in memory until it is unmapped.
pub(super) fn lock(region: &Region, faults: &dyn Faults) -> Answer<()> {
    ask(faults, Call::Lock, "mlock")?;
    // SAFETY: the region's addresses are mapped while it is borrowed.
    let returned = unsafe { libc::mlock(region.as_ptr().cast::<c_void>(), region.len() as usize) };
    answer("mlock", i64::from(returned)).map(drop)
}

/// Asks for transparent huge pages; granting them is the system's affair.
pub(super) fn advise_huge(region: &Region, faults: &dyn Faults) -> Answer<()> {
    ask(faults, Call::AdviseHuge, "madvise for huge pages")?;
    advise(region, libc::MADV_HUGEPAGE, "madvise for huge pages")
}

/// Makes every page of a fresh region resident, by one call.
pub(super) fn populate(region: &Region, faults: &dyn Faults) -> Answer<()> {
    ask(faults, Call::Populate, "madvise to populate")?;
    advise(region, libc::MADV_POPULATE_WRITE, "madvise to populate")
}

/// As [`populate`], on base pages: where the system does not know that call (before Linux 5.14) each
/// page is written once. Refused with `ENOMEM` when there is not so much memory.
pub(super) fn populate_or_touch(region: &Region, faults: &dyn Faults) -> Answer<()> {
    match populate(region, faults) {
        Ok(()) => Ok(()),
        Err(Refusal { errno: libc::EINVAL | libc::ENOSYS | libc::EPERM, .. }) => {
            touch(region);
            Ok(())
        }
        // What the call reports as EFAULT would be a signal at a page's first use: no memory for it.
        Err(Refusal { errno: libc::EFAULT, name }) => Err(Refusal { name, errno: libc::ENOMEM }),
        Err(refusal) => Err(refusal),
    }
}

fn touch(region: &Region) {
    let step = page_size() as usize;
    for offset in (0..region.len() as usize).step_by(step) {
        // SAFETY: inside the region, which is fresh: nobody else knows its address, all bytes are zero.
        unsafe { region.as_ptr().add(offset).write_volatile(0) };
    }
}

fn advise(region: &Region, advice: i32, name: &'static str) -> Answer<()> {
    // SAFETY: the region's addresses are mapped while it is borrowed; neither advice changes its bytes.
    let returned = unsafe { libc::madvise(region.as_ptr().cast::<c_void>(), region.len() as usize, advice) };
    answer(name, i64::from(returned)).map(drop)
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
    fn no_memory_for_the_pages_is_said_and_not_touched() {
        for errno in [libc::ENOMEM, libc::EFAULT] {
            let region = Region::new(None, 64 * page_size(), &NoFaults).unwrap();
            let refusal = populate_or_touch(&region, &Inject::call(Call::Populate, errno)).unwrap_err();
            assert_eq!((refusal.errno, resident(&region)), (libc::ENOMEM, 0));
        }
    }
}
