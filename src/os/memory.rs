//! The state of the system's memory, read once before a mapping is made.
//!
//! Free memory is checked before pages are made resident, because otherwise the system might kill the process. The
//! process's control group may allow less than the system has free; each group up to the root has its own limit
//! (version 2; version 1 is not read). All numbers are hints: they may be missing (`None`, or no huge pages) and
//! outdated at the next call, whose result decides.

use std::path::Path;

use nix::unistd::{SysconfVar, sysconf};

/// The size of a base page in bytes.
pub fn page_size() -> u64 {
    let bytes = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    // Linux on x86-64 has no other base page.
    bytes.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(4096)
}

/// A reading of `/proc/meminfo`, the control groups' limits and the switch for transparent huge pages. A
/// [`super::Map`] request is checked against it. Values are 0, false or `None` where the system does not report them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryState {
    /// Bytes of the system's memory.
    pub total: Option<u64>,
    /// Bytes available without swapping, the least of the system's and the control groups' numbers.
    pub available: Option<u64>,
    /// The least memory limit of the process's control groups, in bytes.
    pub limit: Option<u64>,
    /// Bytes of a huge page of the default size; 0 where there are none.
    pub huge_page: u64,
    /// Huge pages neither used nor reserved.
    pub huge_free: u64,
    /// Whether private memory may be given transparent huge pages on demand.
    pub transparent: bool,
}

impl MemoryState {
    /// Whether the free huge pages hold `bytes` bytes.
    pub fn has_huge(&self, bytes: u64) -> bool {
        self.huge_page > 0 && bytes.div_ceil(self.huge_page) <= self.huge_free
    }

    /// Reads the files under `root`, which contains `proc` and `sys`: `/` is this machine.
    pub fn under(root: &Path) -> Self {
        let read = |file: &str| std::fs::read_to_string(root.join(file.trim_start_matches('/'))).ok();
        let meminfo = read("/proc/meminfo").unwrap_or_default();
        let switch = read("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        let system = Self::parse(&meminfo, &switch);
        let groups = Groups::read(&read("/proc/self/cgroup").unwrap_or_default(), read);
        let available = [system.available, groups.left].into_iter().flatten().min();
        MemoryState { available, limit: groups.limit, ..system }
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
            limit: None,
            huge_page: kib("Hugepagesize").filter(|n| n.is_power_of_two()).unwrap_or(0),
            huge_free: free.saturating_sub(field("HugePages_Rsvd").unwrap_or(0)),
            transparent: switch.contains("[always]") || switch.contains("[madvise]"),
        }
    }
}

/// Where control groups of version 2 are mounted.
const GROUPS: &str = "/sys/fs/cgroup";

/// The memory that control groups leave a process; `None` where no limit can be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Groups {
    /// The least limit in bytes.
    limit: Option<u64>,
    /// The bytes left below the limits.
    left: Option<u64>,
}

impl Groups {
    /// Reads the group that `/proc/self/cgroup` (`said`) names and all groups above it; `read` returns a file's text.
    fn read(said: &str, read: impl Fn(&str) -> Option<String>) -> Groups {
        let mut groups = Groups::default();
        let Some(group) = said.lines().find_map(|line| line.strip_prefix("0::")) else {
            return groups;
        };
        let mut group = group.trim_end_matches('/');
        loop {
            let text = |file| read(&format!("{GROUPS}{group}/{file}"));
            let number = |file| text(file)?.trim().parse::<u64>().ok();
            // "max" means that the group sets no limit.
            if let (Some(most), Some(used)) = (number("memory.max"), number("memory.current")) {
                // File pages count as used but are reclaimed on demand, as in the system's own number.
                let files = text("memory.stat").map_or(0, |stat| {
                    let lines = stat.lines().filter_map(|line| line.split_once(' '));
                    let files = lines.filter(|(name, _)| matches!(*name, "active_file" | "inactive_file"));
                    files.filter_map(|(_, n)| n.parse().ok()).fold(0, u64::saturating_add)
                });
                let left = most.saturating_sub(used.saturating_sub(files));
                groups.limit = Some(groups.limit.map_or(most, |least| least.min(most)));
                groups.left = Some(groups.left.map_or(left, |least| least.min(left)));
            }
            let Some((above, _)) = group.rsplit_once('/') else {
                return groups;
            };
            group = above;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_by_name() {
        let text = "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:   7 kB\nHugePages_Total: 9\nHugePages_Free:    5\n\
                    HugePages_Rsvd:    2\nHugepagesize:       2048 kB\n";
        let state = MemoryState::parse(text, "always [madvise] never\n");
        let want = MemoryState {
            total: Some(9216),
            available: Some(7168),
            limit: None,
            huge_page: 2 << 20,
            huge_free: 3,
            transparent: true,
        };
        assert_eq!(state, want);
        assert!(!MemoryState::parse(text, "always madvise [never]").transparent);
    }

    #[test]
    fn another_folder_is_read_as_another_machine() {
        let root = std::env::temp_dir().join(format!("forebay-machine-{}", std::process::id()));
        let files = [
            ("proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 90 kB\nHugepagesize: 2048 kB\n"),
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "30720\n"),
            ("sys/fs/cgroup/a/memory.current", "10240\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n"),
        ];
        for (file, text) in files {
            let file = root.join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        let (total, available, limit) = (Some(100 << 10), Some(20 << 10), Some(30 << 10));
        let want =
            MemoryState { total, available, limit, huge_page: 2 << 20, huge_free: 0, transparent: true };
        let found = MemoryState::under(&root);
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, want);
        assert_eq!(MemoryState::under(&root), MemoryState::default(), "a folder that is gone");
    }

    #[test]
    fn invalid_files_read_as_unknown() {
        let broken = "MemAvailable: x kB\nHugePages_Free: -1\nHugepagesize: 3 kB\nHugePages_Rsvd: 4";
        assert_eq!(MemoryState::parse(broken, ""), MemoryState::default());
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
        let group_allows = |said: &str, file| Groups::read(said, file).left;
        assert_eq!(Groups::read("0::/a/b\n", file).limit, Some(50), "the group above has less");
        assert_eq!(group_allows("0::/a/b\n", file), Some(20), "the group above allows less");
        assert_eq!(group_allows("1:name:/x\n0::/a/b/c\n", file), Some(20), "no files of its own");
        assert_eq!(group_allows("0::/full\n", file), Some(0), "over its limit");
        assert_eq!(group_allows("0::/files\n", file), Some(30), "file pages are available");
        assert_eq!(group_allows("0::/\n", file), None, "no limit");
        assert_eq!(group_allows("0::/x/../..\n", file), None);
        assert_eq!(group_allows("4:memory:/a/b\n", file), None, "version 1");
        assert_eq!(group_allows("", file), None);
    }
}
