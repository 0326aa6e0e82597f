//! Facts of the machine, as hints for reports and for the checks of free memory. A fact that cannot be read is empty, 0
//! or `None`.

use std::path::Path;

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

use super::faults::{Call, Faults, NoFaults};
use super::memory::MemoryState;
use super::refusal::{OsResult, ask};

/// The processor's name.
pub fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    named.map_or_else(|| "unknown processor".to_owned(), |(_, name)| name.trim().to_owned())
}

/// Hardware threads that this process may run on; at least 1.
pub fn threads() -> u32 {
    // 0 is the calling thread.
    let set = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
    let count = (0..CpuSet::count()).filter(|processor| set.is_set(*processor) == Ok(true)).count();
    u32::try_from(count).unwrap_or(1).max(1)
}

/// Bytes of memory: the total, and those available without swapping, within the limits of control groups.
pub fn memory() -> (u64, u64) {
    let state = memory_state(&NoFaults);
    (state.total.unwrap_or(0), state.available.unwrap_or(0))
}

/// The present state of the system's memory.
pub fn memory_state(faults: &dyn Faults) -> MemoryState {
    faults.memory(read(faults).unwrap_or_default())
}

fn read(faults: &dyn Faults) -> OsResult<MemoryState> {
    ask(faults, Call::MemoryState, "read")?;
    Ok(MemoryState::under(Path::new("/")))
}

/// The NUMA node of the device at a PCI address such as `0000:01:00.0`; `None` where the system does not report it.
pub fn node_beside(bus: &str) -> Option<u32> {
    node(&std::fs::read_to_string(format!("/sys/bus/pci/devices/{bus}/numa_node")).ok()?)
}

/// The system writes -1 if the firmware does not report a node.
fn node(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::Inject;
    use super::*;

    #[test]
    fn a_node_is_a_number_that_the_firmware_reports() {
        assert_eq!((node("0\n"), node("3\n")), (Some(0), Some(3)));
        assert_eq!((node("-1\n"), node(""), node("near\n")), (None, None, None));
        assert_eq!(node_beside("ffff:ff:1f.7"), None);
        // The nodes that this machine reports for its devices.
        let devices = std::fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
        for device in devices {
            let told = std::fs::read_to_string(device.path().join("numa_node")).unwrap_or_default();
            let beside = node_beside(&device.file_name().to_string_lossy());
            assert_eq!(beside.map_or(-1, i64::from), told.trim().parse().unwrap_or(-1));
        }
    }

    #[test]
    fn this_machine_has_a_name_threads_and_memory() {
        let (total, available) = memory();
        assert!(!processor().is_empty() && threads() >= 1);
        assert!(available > 0 && available <= total, "{available} of {total}");
    }

    #[test]
    fn a_refused_reading_is_unknown() {
        let faults = Inject::call(Call::MemoryState, libc::EACCES);
        assert_eq!(memory_state(&faults), MemoryState::default());
        assert!(memory_state(&NoFaults).available.is_some());
    }
}
