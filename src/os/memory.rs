//! What the system says about its memory, read once before a mapping is made.
//!
//! Free memory is compared before pages are made resident, because the system's other answer is to end
//! the process. All numbers are hints: they may be absent (`None`, or no huge pages) and may be outdated
//! by the next call, whose answer counts.

use super::{Answer, Call, Faults, ask};

/// The size of a base page in bytes.
pub fn page_size() -> u64 {
    // SAFETY: sysconf reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // Linux on x86-64 has no other base page.
    u64::try_from(bytes).unwrap_or(4096)
}

/// A reading of `/proc/meminfo` and of the switch for transparent huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryState {
    /// Bytes that can be had without swapping, where the system tells.
    pub available: Option<u64>,
    /// Bytes of a huge page of the default size; 0 where there are none.
    pub huge_page: u64,
    /// Huge pages neither used nor promised.
    pub huge_free: u64,
    /// Whether private memory may be given transparent huge pages on demand.
    pub transparent: bool,
}

impl MemoryState {
    pub(super) fn read(faults: &dyn Faults) -> Self {
        Self::try_read(faults).unwrap_or_default()
    }

    fn try_read(faults: &dyn Faults) -> Answer<Self> {
        ask(faults, Call::MemoryState, "read")?;
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let switch = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        Ok(Self::parse(&meminfo, &switch.unwrap_or_default()))
    }

    fn parse(meminfo: &str, switch: &str) -> Self {
        let field = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let kib = |name| field(name).and_then(|n| n.checked_mul(1024));
        let free = field("HugePages_Free").unwrap_or(0);
        MemoryState {
            available: kib("MemAvailable"),
            huge_page: kib("Hugepagesize").filter(|n| n.is_power_of_two()).unwrap_or(0),
            huge_free: free.saturating_sub(field("HugePages_Rsvd").unwrap_or(0)),
            transparent: switch.contains("[always]") || switch.contains("[madvise]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Inject, NoFaults};
    use super::*;

    #[test]
    fn meminfo_is_read_by_name() {
        let text = "MemFree: 1 kB\nMemAvailable:   7 kB\nHugePages_Total: 9\nHugePages_Free:    5\n\
                    HugePages_Rsvd:    2\nHugepagesize:       2048 kB\n";
        let state = MemoryState::parse(text, "always [madvise] never\n");
        let want = MemoryState { available: Some(7168), huge_page: 2 << 20, huge_free: 3, transparent: true };
        assert_eq!(state, want);
        assert!(!MemoryState::parse(text, "always madvise [never]").transparent);
    }

    #[test]
    fn nonsense_and_refusal_read_as_unknown() {
        let broken = "MemAvailable: x kB\nHugePages_Free: -1\nHugepagesize: 3 kB\nHugePages_Rsvd: 4";
        assert_eq!(MemoryState::parse(broken, ""), MemoryState::default());
        let faults = Inject::call(Call::MemoryState, libc::EACCES);
        assert_eq!(MemoryState::read(&faults), MemoryState::default());
        assert!(MemoryState::read(&NoFaults).available.is_some());
        assert_eq!(page_size(), 4096);
    }
}
