//! Host memory from which rows are gathered, to which they are scattered, and that steps run over.
//!
//! **How much.** Production has hundreds of GB, and a random row then costs a GPU a walk of its page tables: figures
//! of a pool that all tables of pages fit into say nothing of it. So a GPU's figures come from a fifth of the free
//! memory, up to 64 GiB, unless `--pool` says how much. It is bound to the GPU's NUMA node where the system tells it,
//! so what counts as free is what that node has, and an eighth of it stays for tables and for the system: a process
//! that takes the last of a node is ended. The host's own come from up to 1.5 GiB, more than any cache holds: to a
//! processor rows are no farther away in more of it, and a first run should not take a server's memory.
//!
//! **Filled once.** What a row holds follows from where it stands, so a wrong row shows. All groups of a run share one
//! mapping, which each group's device registers: 64 GiB are made resident and filled once, by up to 16 threads, and not
//! in minutes a group. What scatters leave in it stands there for whoever comes next; every comparison reads what is
//! there. Memory that a driver makes (`--pinned driver`) is one device's, and so made and filled for each group.

use std::cell::RefCell;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay::device::Slice;
use forebay::measure::{Facts, Probe, host_request};
use forebay::os::{self, Map, NoFaults, Request};
use forebay::{Error, Kind, Result};

use super::oracle::mix;
use crate::input::numa_nodes::node_free;

/// The most that is taken unless somebody asks for more: for a GPU, and for the host.
const MOST: u64 = 64 << 30;
const MOST_OF_A_HOST: u64 = 3 << 29;

/// Of the free memory, one part in so many.
const PART: u64 = 5;

/// Of the free memory, what nobody takes: one part in so many.
const KEPT: u64 = 8;

/// What tiny shapes take.
pub const QUICK: u64 = 4 << 20;

/// The fewest bytes for gathers and scatters: a gather's lanes have twice as many tokens as one of them fetches.
pub const LEAST: u64 = 192 << 20;

/// Bytes that are filled at a time, and threads that do so.
const CHUNK: u64 = 1 << 20;
const THREADS: u32 = 16;

/// For whom memory is taken.
#[derive(Clone, Copy, Debug)]
pub struct For {
    /// What was asked for.
    pub asked: Option<u64>,
    /// Tiny shapes.
    pub quick: bool,
    /// A GPU.
    pub gpu: bool,
    /// The fewest bytes that will do.
    pub least: u64,
}

/// What is free, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Free {
    /// Of the system; 0 is not known.
    pub system: u64,
    /// Of the NUMA node that memory is bound to, with its number, where the system tells.
    pub node: Option<(u32, u64)>,
}

impl Free {
    /// For memory of a device as `facts` describes it.
    pub fn beside(facts: &Facts) -> Free {
        let node = facts.gpu.as_ref().and_then(|gpu| os::node_beside(&gpu.bus));
        Free { node: node.and_then(|node| Some((node, node_free(node)?))), ..Free::anywhere() }
    }

    /// For memory of any node.
    fn anywhere() -> Free {
        Free { system: os::memory().1, node: None }
    }

    /// What may be taken of it; 0 is not known.
    fn most(self) -> u64 {
        let known = [self.system, self.node.map_or(0, |(_, bytes)| bytes)];
        let least = known.into_iter().filter(|bytes| *bytes > 0).min().unwrap_or(0);
        least - least / KEPT
    }

    /// Says in an error what there is too little of.
    fn told(self, error: Error) -> Error {
        let error = error.with("to be had", self.most());
        match self.node {
            Some((node, bytes)) if self.system == 0 || bytes < self.system => {
                error.with("NUMA node", node).with("free there", bytes)
            }
            _ => error.with("free", self.system),
        }
    }
}

/// How many bytes are taken, where so many can be had.
///
/// # Errors
/// [`Kind::InvalidConfig`] for more than can be had, and fewer than will do; [`Kind::OutOfMemory`] where nobody asked
/// and a fifth of it is too little.
pub fn bytes(wanted: For, free: Free) -> Result<u64> {
    let For { asked, quick, gpu, least } = wanted;
    let wrong = |place: &'static str, kind: Kind| Error::new(kind, "bench").at(place);
    let most = free.most();
    let least = if quick { QUICK } else { least };
    match asked {
        Some(bytes) if most > 0 && bytes > most => {
            let error = wrong("--pool, beyond the host memory that can be had", Kind::InvalidConfig);
            let error = free.told(error.with("bytes", bytes));
            Err(error.hint("pass less, or free some: an eighth of it stays for tables and for the system"))
        }
        Some(bytes) if bytes < least => Err(wrong("--pool, less than the groups need", Kind::InvalidConfig)
            .with("bytes", bytes)
            .with("least", least)
            .hint("pass more, or name groups that need less by --only")),
        Some(bytes) => Ok(bytes),
        None if quick => Ok(QUICK),
        None => match (most / PART).min(if gpu { MOST } else { MOST_OF_A_HOST }) {
            bytes if bytes >= least => Ok(bytes),
            _ => Err(free
                .told(wrong("host memory that can be had", Kind::OutOfMemory))
                .with("least", PART * least)
                .hint("free some, or pass --quick, which shows that all works and says nothing about speed")),
        },
    }
}

/// The same for those that take little: the host's, whatever is measured.
///
/// # Errors
/// As [`bytes`].
pub fn little(quick: bool) -> Result<u64> {
    bytes(For { asked: None, quick, gpu: false, least: LEAST }, Free::anywhere())
}

/// Host memory that a device reads and writes, as a total pool has it: huge pages and locked where they can be had.
#[derive(Clone, Debug)]
pub struct Memory {
    /// The mapping.
    pub map: Arc<Map>,
    /// As the device sees it.
    pub slice: Slice,
}

impl Memory {
    /// Registered memory, zero.
    ///
    /// # Errors
    /// As [`Map::new`] and registering.
    pub fn new(device: &dyn Probe, bytes: u64) -> Result<Memory> {
        let map = Map::new(&host_request(device, bytes)?, &NoFaults)?.0;
        Memory::of(device, Arc::new(map), bytes)
    }

    /// The same with every word different from its neighbours.
    ///
    /// # Errors
    /// Likewise.
    pub fn filled(device: &dyn Probe, bytes: u64) -> Result<Memory> {
        // Pages are made resident by the threads that fill them, and locked by registering.
        let request = Request { populate: false, lock: false, ..host_request(device, bytes)? };
        let map = match device.host_memory(bytes, request.node)? {
            Some(made) => made,
            None => Arc::new(Map::new(&request, &NoFaults)?.0),
        };
        fill(&map, bytes)?;
        Memory::of(device, map, bytes)
    }

    /// A mapping that the device registers.
    fn of(device: &dyn Probe, map: Arc<Map>, bytes: u64) -> Result<Memory> {
        let slice = device.register(&map)?.part(0, bytes)?;
        Ok(Memory { map, slice })
    }
}

/// Fills a mapping, chunk by chunk, by as many threads as there are: words that differ from all around them.
fn fill(map: &Map, bytes: u64) -> Result<()> {
    let next = AtomicU64::new(0);
    let work = || -> Result<()> {
        let mut words = Vec::with_capacity(CHUNK as usize / 4);
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed) * CHUNK;
            if at >= bytes {
                return Ok(());
            }
            let count = CHUNK.min(bytes - at);
            words.clear();
            words.extend((at / 8..(at + count).div_ceil(8)).flat_map(|word| {
                let word = mix(word);
                [word as u32, (word >> 32) as u32]
            }));
            words.truncate((count / 4) as usize);
            map.copy_in_words(at, &words)?;
        }
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..os::threads().clamp(1, THREADS)).map(|_| scope.spawn(work)).collect();
        let own = work();
        let ended =
            others.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ended.fold(own, Result::and)
    })
}

/// The memory of a run's groups. See the module's head.
#[derive(Debug)]
pub struct Pool {
    /// How much.
    pub bytes: u64,
    /// Whether each device makes its own, which no other device takes.
    of_driver: bool,
    /// Once a group has asked for it.
    map: RefCell<Option<Arc<Map>>>,
}

impl Pool {
    /// Of so many bytes, none of which is taken yet.
    pub fn new(bytes: u64) -> Pool {
        Pool { bytes, of_driver: false, map: RefCell::new(None) }
    }

    /// The same of memory that drivers make, if `of_driver`.
    pub fn of_driver(self, of_driver: bool) -> Pool {
        Pool { of_driver, ..self }
    }

    /// The memory as a device sees it.
    ///
    /// # Errors
    /// As [`Memory::filled`].
    pub fn on(&self, device: &dyn Probe) -> Result<Memory> {
        let known = self.map.borrow().clone();
        if let Some(map) = known {
            return Memory::of(device, map, self.bytes);
        }
        let memory = Memory::filled(device, self.bytes)?;
        if !self.of_driver {
            self.map.replace(Some(Arc::clone(&memory.map)));
        }
        Ok(memory)
    }

    /// Gives it back, for those that take as much in another way.
    pub fn give_back(&self) {
        self.map.replace(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::device::host::{HostDevice, HostOptions};

    #[test]
    fn a_gpu_has_a_fifth_of_what_is_free_and_a_host_little() {
        let of = |gpu, quick, system| {
            let free = Free { system, node: None };
            bytes(For { asked: None, quick, gpu, least: LEAST }, free).map_err(|error| error.to_string())
        };
        assert_eq!(of(true, false, 2 << 40), Ok(64 << 30));
        // An eighth stays.
        assert_eq!(of(true, false, 80 << 30), Ok(14 << 30));
        assert_eq!(of(false, false, 80 << 30), Ok(3 << 29));
        assert_eq!(of(false, false, 4 << 30), Ok((7 << 29) / 5));
        assert_eq!(of(true, true, 1), Ok(4 << 20));
        let text = of(true, false, 500 << 20).unwrap_err();
        assert!(text.contains("host memory") && text.contains("--quick"), "{text}");
    }

    #[test]
    fn what_is_asked_for_is_taken_if_it_can_be_had_and_will_do() {
        let of = |asked, quick| {
            let wanted = For { asked: Some(asked), quick, gpu: false, least: 500 << 20 };
            let free = Free { system: 8 << 30, node: None };
            bytes(wanted, free).map_err(|error| (error.kind(), error.to_string()))
        };
        assert_eq!(of(7 << 30, false), Ok(7 << 30));
        assert_eq!(of(5 << 20, true), Ok(5 << 20));
        for (asked, quick, place) in
            [((7 << 30) + 1, false, "beyond"), (499 << 20, false, "less than"), (9, true, "less")]
        {
            let (kind, text) = of(asked, quick).unwrap_err();
            assert!(kind == Kind::InvalidConfig && text.contains("--pool") && text.contains(place), "{text}");
        }
        // A system that does not tell is believed to have it.
        let unknown = Free { system: 0, node: None };
        let wanted = For { asked: Some(1 << 30), quick: false, gpu: true, least: 1 };
        assert_eq!(bytes(wanted, unknown).unwrap(), 1 << 30);
    }

    #[test]
    fn no_more_is_taken_than_the_node_has_to_which_it_is_bound() {
        let of = |asked, node| {
            let free = Free { system: 400 << 30, node };
            let wanted = For { asked, quick: false, gpu: true, least: LEAST };
            bytes(wanted, free).map_err(|error| (error.kind(), error.to_string()))
        };
        let node = Some((1, 80 << 30));
        assert_eq!(of(Some(70 << 30), node), Ok(70 << 30));
        let (kind, text) = of(Some(71 << 30), node).unwrap_err();
        assert_eq!(kind, Kind::InvalidConfig);
        for part in ["--pool", "beyond", "NUMA node 1", "free there 85899345920", "an eighth"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains('\n'), "{text}");
        // Without one, and by default.
        assert_eq!(of(Some(71 << 30), None), Ok(71 << 30));
        assert_eq!((of(None, node), of(None, None)), (Ok(14 << 30), Ok(64 << 30)));
    }

    #[test]
    fn groups_share_one_mapping_whose_words_all_differ() {
        let device = HostDevice::new(HostOptions::default());
        let other = HostDevice::new(HostOptions::default());
        // Not a whole number of chunks.
        let size = 3 * CHUNK + 4096;
        let pool = Pool::new(size);
        let (first, second) = (pool.on(&*device).unwrap(), pool.on(&*other).unwrap());
        assert!(Arc::ptr_eq(&first.map, &second.map));
        let mut words = vec![0; size as usize / 4];
        first.map.copy_out_words(0, &mut words).unwrap();
        assert_eq!(words.last().copied(), Some((mix(size / 8 - 1) >> 32) as u32));
        words.sort_unstable();
        let before = words.len();
        words.dedup();
        assert!(words.len() * 1000 > before * 999, "{} of {before}", words.len());
        pool.give_back();
        assert!(!Arc::ptr_eq(&first.map, &pool.on(&*device).unwrap().map));
    }
}
