//! What the system says about its memory, read once before a mapping is made.
//!
//! Free memory is compared before pages are made resident, because the system's other answer is to end
//! the process. The control group that the process is in may allow less than the system has free: each
//! group up to the root has a limit of its own (version 2; version 1 is not read). All numbers are hints:
//! they may be absent (`None`, or no huge pages) and may be outdated by the next call, whose answer counts.

use super::{Answer, Call, Faults, ask};

/// The size of a base page in bytes.
pub fn page_size() -> u64 {
    // SAFETY: sysconf reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // Linux on x86-64 has no other base page.
    u64::try_from(bytes).unwrap_or(4096)
}

/// A reading of `/proc/meminfo`, the control groups' limits and the switch for transparent huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryState {
    /// Bytes of the system's memory.
    pub total: Option<u64>,
    /// Bytes that can be had without swapping, of the system and of the control groups, where they tell.
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
        let system = Self::parse(&meminfo, &switch.unwrap_or_default());
        let group = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let allowed = group_allows(&group, |file| std::fs::read_to_string(file).ok());
        Ok(MemoryState { available: [system.available, allowed].into_iter().flatten().min(), ..system })
    }

    fn parse(meminfo: &str, switch: &str) -> Self {
        let field = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let kib = |name| field(name).and_then(|n| n.checked_mul(1024));
        let free = field("HugePages_Free").unwrap_or(0);
        MemoryState {
            total: kib("MemTotal"),
            available: kib("MemAvailable"),
            huge_page: kib("Hugepagesize").filter(|n| n.is_power_of_two()).unwrap_or(0),
            huge_free: free.saturating_sub(field("HugePages_Rsvd").unwrap_or(0)),
            transparent: switch.contains("[always]") || switch.contains("[madvise]"),
        }
    }
}

/// Where control groups of version 2 are mounted.
const GROUPS: &str = "/sys/fs/cgroup";

/// Bytes that the control groups still allow, of the group that `/proc/self/cgroup` (`said`) names and of
/// all above it; `read` answers a file's text. None without a limit that can be read.
fn group_allows(said: &str, read: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let mut group = said.lines().find_map(|line| line.strip_prefix("0::"))?.trim_end_matches('/');
    let mut least = None;
    loop {
        let text = |file| read(&format!("{GROUPS}{group}/{file}"));
        let number = |file| text(file)?.trim().parse::<u64>().ok();
        // "max" is no number: the group sets no limit.
        if let (Some(most), Some(used)) = (number("memory.max"), number("memory.current")) {
            // Pages of files count as used and are given up on demand, as in the system's own number.
            let files = text("memory.stat").map_or(0, |stat| {
                let lines = stat.lines().filter_map(|line| line.split_once(' '));
                let files = lines.filter(|(name, _)| matches!(*name, "active_file" | "inactive_file"));
                files.filter_map(|(_, n)| n.parse().ok()).fold(0, u64::saturating_add)
            });
            let left = most.saturating_sub(used.saturating_sub(files));
            least = Some(least.map_or(left, |least: u64| least.min(left)));
        }
        let Some((above, _)) = group.rsplit_once('/') else {
            return least;
        };
        group = above;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Inject, NoFaults};
    use super::*;

    #[test]
    fn meminfo_is_read_by_name() {
        let text = "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:   7 kB\nHugePages_Total: 9\nHugePages_Free:    5\n\
                    HugePages_Rsvd:    2\nHugepagesize:       2048 kB\n";
        let state = MemoryState::parse(text, "always [madvise] never\n");
        let (total, available) = (Some(9216), Some(7168));
        let want = MemoryState { total, available, huge_page: 2 << 20, huge_free: 3, transparent: true };
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

    #[test]
    fn the_least_that_a_control_group_allows_counts() {
        let file = |name: &str| {
            let text = match name {
                "/sys/fs/cgroup/a/b/memory.max" => "100\n",
                "/sys/fs/cgroup/a/b/memory.current" => "40\n",
                "/sys/fs/cgroup/a/memory.max" => "50\n",
                "/sys/fs/cgroup/a/memory.current" => "30\n",
                "/sys/fs/cgroup/memory.max" => "max\n",
                "/sys/fs/cgroup/memory.current" | "/sys/fs/cgroup/full/memory.max" => "7\n",
                "/sys/fs/cgroup/full/memory.current" => "9\n",
                "/sys/fs/cgroup/files/memory.max" | "/sys/fs/cgroup/files/memory.current" => "90\n",
                "/sys/fs/cgroup/files/memory.stat" => "anon 50\nfile 40\nactive_file 10\ninactive_file 20\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        assert_eq!(group_allows("0::/a/b\n", file), Some(20), "the group above allows less");
        assert_eq!(group_allows("1:name:/x\n0::/a/b/c\n", file), Some(20), "no files of its own");
        assert_eq!(group_allows("0::/full\n", file), Some(0), "over its limit");
        assert_eq!(group_allows("0::/files\n", file), Some(30), "what files hold can be had");
        assert_eq!(group_allows("0::/\n", file), None, "no limit");
        assert_eq!(group_allows("0::/x/../..\n", file), None);
        assert_eq!(group_allows("4:memory:/a/b\n", file), None, "version 1");
        assert_eq!(group_allows("", file), None);
    }
}
