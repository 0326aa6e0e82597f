//! Binding of memory to a device's NUMA node.
//!
//! The binding applies to the memory, not to addresses: a [`super::Range`] over a bound map is bound. It must be made
//! before the pages are populated, because existing pages are not moved.

use std::ffi::c_void;

use nix::errno::Errno;

use super::refusal::{OsResult, answer, ask};
use super::{Call, Fallback, Faults, Region};

/// One bit for each node that Linux can number on x86-64.
pub(super) const NODES: usize = 1024;

/// The online NUMA nodes, ascending; only node 0 where the system does not report them.
pub fn nodes(faults: &dyn Faults) -> Vec<u32> {
    let read = || {
        ask(faults, Call::Nodes, "read").ok()?;
        parse(&std::fs::read_to_string("/sys/devices/system/node/online").ok()?)
    };
    read().unwrap_or_else(|| vec![0])
}

/// Reads a list such as `0-3,5`; `None` for anything else, an empty one included.
fn parse(text: &str) -> Option<Vec<u32>> {
    let mut nodes = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if last as usize >= NODES || first > last {
            return None;
        }
        nodes.extend(first..=last);
    }
    Some(nodes)
}

/// Binds the region's memory to `node`, or returns why it is left unbound.
pub(super) fn bind(region: &Region, node: u32, faults: &dyn Faults) -> Option<Fallback> {
    let online = nodes(faults);
    let cause = if online.contains(&node) {
        bind_to(region, node, faults).err()?.to_string()
    } else if online.len() == 1 {
        "this machine has one NUMA node".to_owned()
    } else {
        format!("node {node} is not online")
    };
    Some(Fallback { what: Fallback::NUMA_BINDING, wanted: u64::from(node), cause })
}

fn bind_to(region: &Region, node: u32, faults: &dyn Faults) -> OsResult<()> {
    ask(faults, Call::Bind, "mbind")?;
    let mut mask = [0_u64; NODES / 64];
    if let Some(word) = mask.get_mut(node as usize / 64) {
        *word = 1 << (node % 64);
    }
    // The kernel uses one bit less than this number.
    let bits = NODES + 1;
    // SAFETY: the region's addresses are mapped while it is borrowed, and the mask has NODES bits; a
    // policy changes no byte.
    let returned = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            region.as_ptr().cast::<c_void>(),
            region.len(),
            libc::MPOL_BIND,
            mask.as_ptr(),
            bits,
            0,
        )
    };
    answer("mbind", Errno::result(returned)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::super::{Inject, NoFaults, page_size};
    use super::*;

    #[test]
    fn lists_of_nodes_are_read() {
        assert_eq!(parse("0\n"), Some(vec![0]));
        assert_eq!(parse("0-2,5\n"), Some(vec![0, 1, 2, 5]));
        for bad in ["", "a", "3-1", "0-", "0,,1", "0-4000000000", "-1"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn one_node_is_assumed_where_the_system_names_none() {
        assert_eq!(nodes(&Inject::call(Call::Nodes, libc::ENOENT)), [0]);
        assert!(!nodes(&NoFaults).is_empty());
    }

    #[test]
    fn a_refused_binding_and_a_missing_node_are_reported() {
        let region = Region::new(None, page_size(), &NoFaults).unwrap();
        let one = Inject::call(Call::Nodes, libc::ENOENT);
        let lost = bind(&region, 1, &one).unwrap();
        assert_eq!(lost.to_string(), "NUMA binding (wanted node 1): this machine has one NUMA node");
        let online = nodes(&NoFaults)[0];
        let lost = bind(&region, online, &Inject::call(Call::Bind, libc::EPERM)).unwrap();
        assert_eq!((lost.what, lost.wanted), (Fallback::NUMA_BINDING, u64::from(online)));
        assert_eq!(lost.cause, "mbind: Operation not permitted");
    }

    #[test]
    fn the_mask_names_the_node_and_no_other() {
        let region = Region::new(None, page_size(), &NoFaults).unwrap();
        let online = nodes(&NoFaults)[0];
        if let Err(refusal) = bind_to(&region, online, &NoFaults) {
            // A kernel without NUMA, or a container that forbids the call.
            assert!([libc::ENOSYS, libc::EPERM].contains(&refusal.errno), "{refusal}");
            return;
        }
        let mut mode = 0_i32;
        let mut mask = [0_u64; NODES / 64];
        // SAFETY: both places are large enough for what is written, and the address is mapped.
        let rc = unsafe {
            let at = region.as_ptr();
            // MPOL_F_ADDR: the policy at an address.
            libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, mask.as_mut_ptr(), NODES + 1, at, 2)
        };
        assert_eq!((rc, mode, mask[0]), (0, libc::MPOL_BIND, 1 << online));
    }
}
