//! The findings as numbers, for programs; the texts of findings are for people.

use forebay::measure::Facts;
use forebay::os::MemoryState;
use serde::Serialize;

use super::link::Link;
use super::memory::Lockable;
use crate::input::numa_nodes::Nodes;
use crate::input::system_files::Files;

/// A GPU; unknown values are null.
#[derive(Serialize)]
pub struct GpuEntry {
    name: String,
    memory_total: u64,
    memory_free: u64,
    processors: u32,
    copy_engines: u32,
    cuda: Option<String>,
    capability: Option<String>,
    bus: Option<String>,
    numa_node: Option<u32>,
    link: Link,
}

impl GpuEntry {
    /// From the device's facts, and from the system's files on its bus and node.
    pub fn of(facts: &Facts, link: &Link, numa_node: Option<u32>) -> GpuEntry {
        let dotted = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        let gpu = facts.gpu.as_ref();
        GpuEntry {
            name: facts.name.clone(),
            memory_total: facts.memory_total,
            memory_free: facts.memory_free,
            processors: facts.processors,
            copy_engines: facts.copy_engines,
            cuda: gpu.map(|gpu| dotted(gpu.driver)),
            capability: gpu.map(|gpu| dotted(gpu.capability)),
            bus: gpu.map(|gpu| gpu.bus.clone()),
            numa_node,
            link: *link,
        }
    }
}

/// The machine: bytes, and counts of pages and nodes; values that are unknown or have no limit are null.
#[derive(Serialize)]
pub struct MachineEntry {
    memory_total: Option<u64>,
    memory_available: Option<u64>,
    memory_limit: Option<u64>,
    lock_limit: Option<u64>,
    huge_page: u64,
    huge_pages_free: u64,
    numa_nodes: Option<usize>,
}

impl MachineEntry {
    /// Reads the files.
    pub fn read(files: &Files, nodes: &Nodes) -> MachineEntry {
        let state = MemoryState::under(files.root());
        MachineEntry {
            memory_total: state.total,
            memory_available: state.available,
            memory_limit: state.limit,
            lock_limit: Lockable::read(files).binds(),
            huge_page: state.huge_page,
            huge_pages_free: state.huge_free,
            numa_nodes: nodes.all.as_ref().map(Vec::len),
        }
    }
}
