//! Binds a thread to a NUMA node: to the node's processors, with memory from that node first.
//!
//! Traffic to another socket is slower, so a thread that measures a device's link runs on the device's node, as a
//! pool for the device would. The memory policy belongs to the thread: it applies to all memory that the thread takes
//! from then on, and to no other thread. The node is preferred, not required: where it is full, memory comes from
//! another node.

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use super::bind::NODES;
use super::refusal::{OsResult, answer, ask};
use super::{Call, Fallback, Faults};

/// Binds the calling thread to `processors` and makes it prefer memory from `node`; returns what the system refused.
/// The binding stays, so use a short-lived thread.
pub fn near(node: u32, processors: &[u32], faults: &dyn Faults) -> Vec<Fallback> {
    let lost = |what, refused: OsResult<()>| {
        refused.err().map(|refusal| Fallback { what, wanted: u64::from(node), cause: refusal.to_string() })
    };
    [
        lost(Fallback::NODE_PROCESSORS, run_on(processors, faults)),
        lost(Fallback::NUMA_BINDING, take_from(node, faults)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn run_on(processors: &[u32], faults: &dyn Faults) -> OsResult<()> {
    ask(faults, Call::Affinity, "sched_setaffinity")?;
    let mut set = CpuSet::new();
    for processor in processors {
        // A number beyond the set's bits is refused, and no processor has such a number.
        let _ = set.set(*processor as usize);
    }
    // 0 is the calling thread.
    answer("sched_setaffinity", sched_setaffinity(Pid::from_raw(0), &set))
}

fn take_from(node: u32, faults: &dyn Faults) -> OsResult<()> {
    ask(faults, Call::Policy, "set_mempolicy")?;
    let mut mask = [0_u64; NODES / 64];
    if let Some(word) = mask.get_mut(node as usize / 64) {
        *word = 1 << (node % 64);
    }
    // SAFETY: the mask has NODES bits; the kernel uses one bit less than the number that it is given.
    let returned =
        unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, mask.as_ptr(), NODES + 1) };
    answer("set_mempolicy", Errno::result(returned)).map(drop)
}

#[cfg(test)]
mod tests {
    use nix::sched::sched_getaffinity;

    use super::super::{Inject, NoFaults, nodes};
    use super::*;

    /// The state of a thread after [`near`]: the refusals, its processors, its policy and the policy's nodes.
    fn gone(node: u32, processors: Vec<u32>, faults: Inject) -> (Vec<Fallback>, Vec<u32>, i32, u64) {
        let there = move || {
            let lost = near(node, &processors, &faults);
            let set = sched_getaffinity(Pid::from_raw(0)).unwrap();
            let on = (0..1024).filter(|n| set.is_set(*n as usize).unwrap()).collect();
            let (mut mode, mut mask) = (0_i32, [0_u64; NODES / 64]);
            // SAFETY: both places are large enough for what is written; no address is asked about.
            let _ = unsafe {
                libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, mask.as_mut_ptr(), NODES + 1, 0, 0)
            };
            (lost, on, mode, mask[0])
        };
        std::thread::spawn(there).join().unwrap()
    }

    fn none() -> Inject {
        Inject::nth(u64::MAX, 0)
    }

    #[test]
    fn a_thread_goes_to_the_processors_and_prefers_the_node() {
        let node = nodes(&NoFaults)[0];
        let (_, all, ..) = gone(node, vec![], Inject::call(Call::Affinity, libc::EPERM));
        let last = *all.last().unwrap();
        let (lost, on, mode, mask) = gone(node, vec![last], none());
        assert_eq!(on, [last]);
        // A container may forbid the policy; the result then lists it.
        match lost.as_slice() {
            [] => assert_eq!((mode, mask), (libc::MPOL_PREFERRED, 1 << node)),
            [one] => assert_eq!((one.what, mode), (Fallback::NUMA_BINDING, 0)),
            _ => panic!("{lost:?}"),
        }
    }

    #[test]
    fn a_refused_setting_is_reported_and_unchanged() {
        let (lost, on, ..) = gone(0, vec![], none());
        assert_eq!(lost[0].what, Fallback::NODE_PROCESSORS);
        assert_eq!(lost[0].cause, "sched_setaffinity: Invalid argument");
        assert!(!on.is_empty());
        let refused = Inject::call(Call::Policy, libc::EPERM);
        let (lost, _, mode, _) = gone(0, on, refused);
        assert_eq!((lost.len(), lost[0].what, mode), (1, Fallback::NUMA_BINDING, 0));
        assert_eq!(lost[0].cause, "set_mempolicy: Operation not permitted");
    }
}
