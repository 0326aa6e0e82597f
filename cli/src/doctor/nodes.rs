//! NUMA nodes, as a finding.

use super::finding::{Finding, State};
use crate::input::numa_nodes::{Node, Nodes};
use crate::present::numbers::size;

/// Of the machine: all nodes in one line.
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
        1 => return Finding::ok(NAME, format!("1, {least} free"), "nothing to place"),
        count => format!("{count}, {least} to {most} free on each"),
    };
    let means = match forbidden.as_slice() {
        [] => "a pool goes beside its GPU".to_owned(),
        some => format!("this process may take no memory of node {}", some.join(", ")),
    };
    Finding::ok(NAME, value, means).but_if(
        !forbidden.is_empty(),
        State::Note,
        "widen cpuset.mems (docker: --cpuset-mems), if a GPU is beside those nodes",
    )
}
