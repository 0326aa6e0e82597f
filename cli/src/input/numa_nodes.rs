//! NUMA findings: the nodes, their free memory, and the nodes that this process may use.

use super::system_files::{Files, count, field, kib, list};

const FOLDER: &str = "sys/devices/system/node";

/// A node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub number: u32,
    /// Its processors; none if they are unknown.
    pub processors: Option<Vec<u32>>,
    /// Bytes of its memory.
    pub total: Option<u64>,
    /// Bytes that are free or hold files, without those of reserved huge pages.
    pub free: Option<u64>,
    /// Free reserved huge pages.
    pub huge_free: u64,
}

/// All nodes, and the parts that this process may use: none if unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// By ascending number.
    pub all: Option<Vec<Node>>,
    /// Processors on which this process may run.
    pub may_run: Option<Vec<u32>>,
    /// Nodes whose memory it may use.
    pub may_take: Option<Vec<u32>>,
}

impl Nodes {
    /// Reads the files.
    pub fn read(files: &Files) -> Nodes {
        let status = files.text("proc/self/status").unwrap_or_default();
        let allowed = |name| field(&status, name).and_then(list);
        let online = files.text(&format!("{FOLDER}/online")).and_then(|text| list(&text));
        let node = |number: u32| {
            let memory = files.text(&format!("{FOLDER}/node{number}/meminfo")).unwrap_or_default();
            let bytes = |name: &str| kib(&memory, &format!("Node {number} {name}"));
            let files_hold = |name| bytes(name).unwrap_or(0);
            let given_up = files_hold("Active(file)").saturating_add(files_hold("Inactive(file)"));
            Node {
                number,
                processors: files
                    .text(&format!("{FOLDER}/node{number}/cpulist"))
                    .and_then(|text| list(&text)),
                total: bytes("MemTotal"),
                huge_free: count(&memory, &format!("Node {number} HugePages_Free")).unwrap_or(0),
                free: bytes("MemFree").map(|free| free.saturating_add(given_up)),
            }
        };
        Nodes {
            all: online.filter(|all| !all.is_empty()).map(|all| all.into_iter().map(node).collect()),
            may_run: allowed("Cpus_allowed_list"),
            may_take: allowed("Mems_allowed_list"),
        }
    }

    /// The node with this number, if there is one.
    pub fn node(&self, number: u32) -> Option<&Node> {
        self.all.as_ref()?.iter().find(|node| node.number == number)
    }
}

/// Free bytes of a NUMA node of this machine; none if the system does not report them.
pub fn node_free(node: u32) -> Option<u64> {
    Nodes::read(&Files::under(None)).node(node)?.free
}
