//! Findings about host memory: its size, how much may be locked, its page sizes, and whether a trial mapping of the
//! total pool's kind gets what it asks for.

use forebay::os::{Fallback, Faults, Map, MemoryState, Request};

use super::finding::{Finding, State};
use crate::input::system_files::{Files, chosen, count, field};
use crate::present::numbers::size;

/// The capability to lock any amount of memory: its bit in `CapEff`.
const IPC_LOCK: u32 = 14;

const GIB: u64 = 1 << 30;

/// Bytes of the trial mapping: a few huge pages, little compared with the memory of a machine.
const TRIED: u64 = 64 << 20;

const MEMLOCK_FIX: &str = "raise it for the service: LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker), \
     memlock in /etc/security/limits.conf and a new login (ulimit -l shows it)";

/// How much memory this process may lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lockable {
    /// Unknown: the system does not report it.
    Unknown,
    /// No limit.
    Any,
    /// A limit in bytes that the process's capability overrides.
    Lifted(u64),
    /// A limit in bytes that applies.
    Bytes(u64),
}

impl Lockable {
    /// The limit in bytes, if one applies.
    pub fn binds(self) -> Option<u64> {
        match self {
            Lockable::Bytes(limit) => Some(limit),
            _ => None,
        }
    }

    /// Reads the files.
    pub fn read(files: &Files) -> Lockable {
        let limits = files.text("proc/self/limits").unwrap_or_default();
        let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
        let soft = match line.and_then(|line| line.split_whitespace().next()) {
            Some("unlimited") => return Lockable::Any,
            soft => soft.and_then(|number| number.parse::<u64>().ok()),
        };
        let status = files.text("proc/self/status").unwrap_or_default();
        let effective = field(&status, "CapEff").and_then(|bits| u64::from_str_radix(bits, 16).ok());
        match (soft, effective) {
            (None, _) => Lockable::Unknown,
            (Some(bytes), Some(bits)) if bits >> IPC_LOCK & 1 == 1 => Lockable::Lifted(bytes),
            (Some(bytes), _) => Lockable::Bytes(bytes),
        }
    }
}

fn bytes(bytes: u64) -> String {
    size(bytes as f64)
}

/// All findings about memory except its nodes.
pub fn findings(files: &Files) -> Vec<Finding> {
    let state = MemoryState::under(files.root());
    let meminfo = files.text("proc/meminfo").unwrap_or_default();
    let lockable = Lockable::read(files);
    let mut found = vec![room(&state), limit(files, &state)];
    found.push(lock(lockable, room_bytes(&state)));
    found.push(pinnable(&state));
    found.push(shared_pages(files, &meminfo, &state));
    found.extend(other_pages(files, &state));
    found.push(private_pages(files));
    found
}

/// Bytes of free reserved huge pages.
fn reserved(state: &MemoryState) -> u64 {
    state.huge_free.saturating_mul(state.huge_page)
}

/// Bytes that pools can use. The system does not count reserved huge pages as available.
fn room_bytes(state: &MemoryState) -> Option<u64> {
    state.available.map(|available| available.saturating_add(reserved(state)))
}

fn room(state: &MemoryState) -> Finding {
    const NAME: &str = "memory";
    let (Some(total), Some(available), Some(room)) = (state.total, state.available, room_bytes(state)) else {
        return Finding::unknown(NAME, "proc/meminfo");
    };
    let huge = match reserved(state) {
        0 => String::new(),
        held => format!(", {} on reserved huge pages", bytes(held)),
    };
    let value = format!("{} available of {}{huge}", bytes(available), bytes(total));
    Finding::ok(NAME, value, "the total pool takes its memory from it").but_if(
        room < total / 8,
        State::Warning,
        "end other programs that hold memory, or plan a smaller pool (forebay plan --host SIZE)",
    )
}

fn limit(files: &Files, state: &MemoryState) -> Finding {
    const NAME: &str = "memory limit";
    let groups = files.text("proc/self/cgroup").unwrap_or_default();
    let binds = |limit: &u64| state.total.is_none_or(|total| *limit < total);
    if let Some(limit) = state.limit.filter(binds) {
        return Finding::ok(NAME, bytes(limit), "the control group allows less than the machine has").but(
            State::Note,
            "raise the container's or service's memory limit: the total pool counts towards it",
        );
    }
    if let Some(limit) = first_version(files, &groups).filter(binds) {
        return Finding::ok(NAME, bytes(limit), "a control group of version 1, which forebay does not check")
            .but(State::Warning, "keep the pool well below it: the system kills a process that exceeds it");
    }
    match groups.is_empty() {
        true => Finding::unknown(NAME, "proc/self/cgroup"),
        false => Finding::ok(NAME, "none", "no control group allows less than the machine has"),
    }
}

/// The lowest limit of version 1 control groups, in bytes, according to `/proc/self/cgroup`.
fn first_version(files: &Files, groups: &str) -> Option<u64> {
    let named = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|name| name == "memory").then(|| path.to_owned())
    };
    let path = groups.lines().find_map(named)?;
    // In a container the group may be mounted as the root.
    let stat = |path: &str| files.text(&format!("sys/fs/cgroup/memory{path}/memory.stat"));
    let stat = stat(path.trim_end_matches('/')).or_else(|| stat(""))?;
    stat.lines().find_map(|line| line.strip_prefix("hierarchical_memory_limit ")?.trim().parse().ok())
}

fn lock(lockable: Lockable, room: Option<u64>) -> Finding {
    const NAME: &str = "locked-memory limit";
    match lockable {
        Lockable::Unknown => Finding::unknown(NAME, "proc/self/limits"),
        Lockable::Any => Finding::ok(NAME, "unlimited", "a pool of any size is locked"),
        Lockable::Lifted(limit) => Finding::ok(
            NAME,
            format!("{}, lifted by CAP_IPC_LOCK", bytes(limit)),
            "a pool of any size is locked",
        ),
        Lockable::Bytes(limit) => {
            let means = "a larger pool is not locked, so pages that no GPU driver pins may be swapped out";
            Finding::ok(NAME, bytes(limit), means).but_if(
                room.is_none_or(|room| limit < room),
                State::Warning,
                MEMLOCK_FIX,
            )
        }
    }
}

/// How much could be pinned now. A GPU's driver pins memory itself and ignores the limit on locked memory.
fn pinnable(state: &MemoryState) -> Finding {
    const NAME: &str = "memory to pin now";
    match room_bytes(state) {
        Some(room) => Finding::ok(
            NAME,
            bytes(room),
            "all available memory: the locked-memory limit does not apply to a GPU's driver",
        ),
        None => Finding::unknown(NAME, "proc/meminfo"),
    }
}

/// The pages of the total pool: it is shared memory, on reserved huge pages of the default size if possible.
fn shared_pages(files: &Files, meminfo: &str, state: &MemoryState) -> Finding {
    const NAME: &str = "huge pages for the pool";
    const SWITCH: &str = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let Some(total) = count(meminfo, "HugePages_Total") else {
        return Finding::unknown(NAME, "proc/meminfo");
    };
    let page = bytes(state.huge_page);
    let reserve = match state.huge_page < GIB {
        true => format!("reserve as many as the pool needs: sysctl vm.nr_hugepages=N (of {page} each)"),
        // On a running system such large free areas are rare.
        false => format!("reserve as many as the pool needs at boot: hugepages=N (of {page} each)"),
    };
    let (free, held) = (state.huge_free, reserved(state));
    if free > 0 {
        let value = format!("{free} of {total} free, of {page}");
        return Finding::ok(NAME, value, format!("a pool of up to {} uses them", bytes(held))).but_if(
            held < state.available.unwrap_or(0) / 8,
            State::Note,
            reserve,
        );
    }
    let reserved = match total {
        0 => "none reserved".to_owned(),
        total => format!("all {total} reserved ones in use"),
    };
    let switch = files.word(SWITCH);
    match switch.as_deref().and_then(chosen) {
        Some(switch @ ("always" | "within_size" | "advise" | "force")) => {
            let value = format!("{reserved}; transparent ones: {switch}");
            Finding::ok(NAME, value, "the pool uses huge pages as far as the system finds free ones")
                .but(State::Note, reserve)
        }
        switch => {
            let value = format!("{reserved}; transparent ones: {}", switch.unwrap_or("unknown"));
            let fix = format!("{reserve}, or: echo advise > /{SWITCH}");
            Finding::ok(NAME, value, "the pool uses pages of 4 KiB, which are slower to pin and to translate")
                .but(State::Warning, fix)
        }
    }
}

/// Pages of another size, reserved for other programs or by mistake.
fn other_pages(files: &Files, state: &MemoryState) -> Option<Finding> {
    const FOLDER: &str = "sys/kernel/mm/hugepages";
    let held: Vec<(String, u64, u64)> = files
        .names(FOLDER)
        .into_iter()
        .filter_map(|name| {
            let size = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()?;
            let size = size.checked_mul(1024).filter(|size| *size != state.huge_page)?;
            let count = files.word(&format!("{FOLDER}/{name}/nr_hugepages"))?.parse().ok()?;
            (count > 0).then_some((name, size, count))
        })
        .collect();
    let (name, ..) = held.first()?;
    let value: Vec<String> =
        held.iter().map(|(_, size, count)| format!("{count} of {}", bytes(*size))).collect();
    let means =
        format!("forebay uses pages of the default size, {}, and cannot use these", bytes(state.huge_page));
    let fix = format!(
        "release them: echo 0 > /{FOLDER}/{name}/nr_hugepages; or boot with their size as default_hugepagesz"
    );
    Some(Finding::ok("other huge pages", value.join(", "), means).but(State::Note, fix))
}

/// Huge pages of private memory, the fallback if shared memory is refused.
fn private_pages(files: &Files) -> Finding {
    const NAME: &str = "transparent huge pages";
    const SWITCH: &str = "sys/kernel/mm/transparent_hugepage/enabled";
    let switch = files.word(SWITCH);
    match switch.as_deref().and_then(chosen) {
        Some(switch @ ("always" | "madvise")) => {
            Finding::ok(NAME, switch, "private memory that asks for huge pages gets them")
        }
        Some(switch) => Finding::ok(NAME, switch, "private memory uses pages of 4 KiB")
            .but(State::Note, format!("echo madvise > /{SWITCH}")),
        None => Finding::unknown(NAME, SWITCH),
    }
}

/// Makes a small mapping in the way of the total pool, and reports the options that the system refused.
pub fn tried(node: Option<u32>, faults: &dyn Faults) -> Vec<Finding> {
    const NAME: &str = "a mapping, tried";
    let wanted = Request { bytes: TRIED, huge: true, populate: true, lock: true, node, shared: true };
    let (map, lost) = match Map::new(&wanted, faults) {
        Ok(taken) => taken,
        Err(error) => {
            let value = format!("{} refused", bytes(TRIED));
            return vec![Finding::refused(NAME, State::Problem, &value, &error)];
        }
    };
    let value = format!("{} on pages of {}", bytes(map.len()), bytes(map.page_bytes()));
    let mut found = vec![Finding::ok(NAME, value, "mapped like the total pool, and released")];
    found.extend(lost.iter().filter_map(fallback));
    found
}

/// An option that the system refused. Missing reserved huge pages have a finding of their own.
fn fallback(lost: &Fallback) -> Option<Finding> {
    let (name, means, fix) = match lost.what {
        Fallback::SHARED_MEMORY => (
            "shared memory, tried",
            "the pool is private: no other process can map it",
            "let the container call memfd_create",
        ),
        Fallback::LOCKED_MEMORY => {
            ("locked memory, tried", "the pool's pages may be swapped out", MEMLOCK_FIX)
        }
        Fallback::NUMA_BINDING => (
            "NUMA binding, tried",
            "the system chooses the pool's node",
            "let the container call mbind: --cap-add SYS_NICE (docker), and list the nodes in cpuset.mems",
        ),
        _ if lost.cause.contains("reserved huge pages wanted")
            || lost.cause.contains("no huge page size") =>
        {
            return None;
        }
        _ => (
            "reserved huge pages, tried",
            "the pool uses pages of 4 KiB, though huge pages are free",
            "check the container's hugetlb limit, and the nodes on which they are reserved",
        ),
    };
    Some(Finding::ok(name, lost.cause.clone(), means).but(State::Warning, fix))
}

#[cfg(test)]
mod tests {
    use forebay::os::{Call, Inject, NoFaults};

    use super::*;

    /// The finding with that name, if the trial has it.
    fn tried_with(call: Call, errno: i32, name: &str) -> Option<Finding> {
        tried(Some(0), &Inject::call(call, errno)).into_iter().find(|finding| finding.name == name)
    }

    #[test]
    fn each_refusal_of_a_mapping_is_a_finding_with_its_cause() {
        const EPERM: i32 = 1;
        const ENOMEM: i32 = 12;
        for (call, name, cause) in [
            (Call::Memfd, "shared memory, tried", "memfd_create"),
            (Call::Lock, "locked memory, tried", "mlock"),
            (Call::Bind, "NUMA binding, tried", "mbind"),
        ] {
            let found = tried_with(call, EPERM, name).unwrap();
            assert_eq!(found.state, State::Warning, "{name}");
            assert!(found.value.contains(cause) && !found.fix.is_empty(), "{found:?}");
        }
        let found = tried_with(Call::Map, ENOMEM, "a mapping, tried").unwrap();
        assert_eq!((found.state, found.fix.is_empty()), (State::Problem, false));
        assert!(found.means.contains("out of memory") && !found.means.ends_with(';'), "{found:?}");
        assert!(tried(None, &NoFaults).iter().any(|found| found.state == State::Ok));
    }

    #[test]
    fn missing_huge_pages_are_reported_once_and_so_are_refused_ones() {
        let lost = |cause: &str| {
            fallback(&Fallback { what: Fallback::HUGE_PAGES, wanted: 1, cause: cause.to_owned() })
        };
        assert_eq!(lost("32 reserved huge pages wanted, 0 free"), None);
        assert_eq!(lost("memfd_create with huge pages: denied").unwrap().state, State::Warning);
    }
}
