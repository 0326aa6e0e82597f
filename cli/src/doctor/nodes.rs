//! NUMA nodes, as a finding.

use super::finding::{Finding, State};
use crate::input::numa_nodes::{Node, Nodes};
use crate::present::numbers::size;

/// One finding for all nodes of the machine.
pub fn finding(nodes: &Nodes) -> Finding {
    const NAME: &str = "NUMA nodes";
    let Some(all) = &nodes.all else {
        return Finding::unknown(NAME, "sys/devices/system/node/online");
    };
    let free = |node: &Node| node.free.map_or("unknown".to_owned(), |free| size(free as f64));
    let least = all.iter().min_by_key(|node| node.free).map_or(String::new(), free);
    let most = all.iter().max_by_key(|node| node.free).map_or(String::new(), free);
    let forbidden: Vec<String> = match &nodes.may_take {
        Some(may) => all.iter().filter(|n| !may.contains(&n.number)).map(|n| n.number.to_string()).collect(),
        None => Vec::new(),
    };
    let value = match all.len() {
        1 => return Finding::ok(NAME, format!("1, {least} free"), "all memory is on one node"),
        count => format!("{count}, {least} to {most} free on each"),
    };
    let means = match forbidden.as_slice() {
        [] => "a pool belongs on its GPU's node".to_owned(),
        some => format!("this process may not use the memory of node {}", some.join(", ")),
    };
    Finding::ok(NAME, value, means).but_if(
        !forbidden.is_empty(),
        State::Note,
        "widen cpuset.mems (docker: --cpuset-mems), if a GPU is on those nodes",
    )
}
