//! Host memory for the rows that are gathered and scattered, and for the rows of steps.
//!
//! **Size.** Production pools have hundreds of GB, where a random row costs a GPU a walk of its page tables. A pool
//! whose page tables fit into caches would not show that. So a GPU's figures use a fifth of the free memory, up to 64
//! GiB, unless `--pool` gives a size. The pool is bound to the GPU's NUMA node if the system reports it, so free
//! memory means that of the node. An eighth of it is left for tables and for the system: the system kills a process
//! that takes the last memory of a node. The host's own figures use up to 1.5 GiB, more than any cache holds: for a
//! processor a larger pool makes no row slower, and a first run should not take a server's memory.
//!
//! **Filled once.** A row's contents follow from its position, so a wrong row is detected. All groups of a run share
//! one mapping, which each group's device registers. So 64 GiB are populated and filled once, by up to 16 threads,
//! instead of for minutes in each group. Scatters of one group change the contents for the next; every comparison
//! reads the present contents. Memory from a driver (`--pinned driver`) belongs to one device, and is made and filled
//! for each group.

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

/// The default limit: for a GPU, and for the host.
const MOST: u64 = 64 << 30;
const MOST_OF_A_HOST: u64 = 3 << 29;

/// The default share of the free memory: one part in this many.
const PART: u64 = 5;

/// The share of the free memory that is never taken: one part in this many.
const KEPT: u64 = 8;

/// Bytes for tiny shapes.
pub const QUICK: u64 = 4 << 20;

/// The fewest bytes for gathers and scatters: a gather's lanes have twice as many tokens as one gather fetches.
pub const LEAST: u64 = 192 << 20;

/// Bytes filled at a time, and the number of threads.
const CHUNK: u64 = 1 << 20;
const THREADS: u32 = 16;

/// The demand for memory.
#[derive(Clone, Copy, Debug)]
pub struct For {
    /// The requested bytes.
    pub asked: Option<u64>,
    /// Tiny shapes.
    pub quick: bool,
    /// A GPU.
    pub gpu: bool,
    /// The fewest bytes that suffice.
    pub least: u64,
}

/// The free memory in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Free {
    /// Of the system; 0 if unknown.
    pub system: u64,
    /// Of the NUMA node that memory is bound to, with its number, if the system reports it.
    pub node: Option<(u32, u64)>,
}

impl Free {
    /// The free memory for a device with these facts.
    pub fn beside(facts: &Facts) -> Free {
        let node = facts.gpu.as_ref().and_then(|gpu| os::node_beside(&gpu.bus));
        Free { node: node.and_then(|node| Some((node, node_free(node)?))), ..Free::anywhere() }
    }

    /// The free memory of any node.
    fn anywhere() -> Free {
        Free { system: os::memory().1, node: None }
    }

    /// The most that may be taken; 0 if unknown.
    fn most(self) -> u64 {
        let known = [self.system, self.node.map_or(0, |(_, bytes)| bytes)];
        let least = known.into_iter().filter(|bytes| *bytes > 0).min().unwrap_or(0);
        least - least / KEPT
    }

    /// Adds the free memory to an error.
    fn told(self, error: Error) -> Error {
        let error = error.with("available", self.most());
        match self.node {
            Some((node, bytes)) if self.system == 0 || bytes < self.system => {
                error.with("NUMA node", node).with("free there", bytes)
            }
            _ => error.with("free", self.system),
        }
    }
}

/// The number of bytes to take.
///
/// # Errors
/// [`Kind::InvalidConfig`] for a request beyond what is available, or below what suffices; [`Kind::OutOfMemory`] if
/// there is no request and a fifth of the free memory does not suffice.
pub fn bytes(wanted: For, free: Free) -> Result<u64> {
    let For { asked, quick, gpu, least } = wanted;
    let wrong = |place: &'static str, kind: Kind| Error::new(kind, "bench").at(place);
    let most = free.most();
    let least = if quick { QUICK } else { least };
    match asked {
        Some(bytes) if most > 0 && bytes > most => {
            let error = wrong("--pool exceeds the available host memory", Kind::InvalidConfig);
            let error = free.told(error.with("bytes", bytes));
            Err(error.hint("pass less, or free some memory: an eighth is left for tables and the system"))
        }
        Some(bytes) if bytes < least => {
            Err(wrong("--pool is less than the groups need", Kind::InvalidConfig)
                .with("bytes", bytes)
                .with("least", least)
                .hint("pass more, or select groups that need less with --only"))
        }
        Some(bytes) => Ok(bytes),
        None if quick => Ok(QUICK),
        None => match (most / PART).min(if gpu { MOST } else { MOST_OF_A_HOST }) {
            bytes if bytes >= least => Ok(bytes),
            _ => Err(free
                .told(wrong("not enough host memory", Kind::OutOfMemory))
                .with("least", PART * least)
                .hint(
                    "free some, or pass --quick, which shows that everything works, and nothing about speed",
                )),
        },
    }
}

/// The number of bytes for users that take little: the host's memory, whatever device is measured.
///
/// # Errors
/// Errors of [`bytes`].
pub fn little(quick: bool) -> Result<u64> {
    bytes(For { asked: None, quick, gpu: false, least: LEAST }, Free::anywhere())
}

/// Host memory that a device reads and writes, mapped like a total pool: huge pages and locked if available.
#[derive(Clone, Debug)]
pub struct Memory {
    /// The mapping.
    pub map: Arc<Map>,
    /// Its address on the device.
    pub slice: Slice,
}

impl Memory {
    /// Registered memory, all zero.
    ///
    /// # Errors
    /// Errors of [`Map::new`] and of registering.
    pub fn new(device: &dyn Probe, bytes: u64) -> Result<Memory> {
        let map = Map::new(&host_request(device, bytes)?, &NoFaults)?.0;
        Memory::of(device, Arc::new(map), bytes)
    }

    /// Registered memory in which every word differs from its neighbours.
    ///
    /// # Errors
    /// As [`Memory::new`].
    pub fn filled(device: &dyn Probe, bytes: u64) -> Result<Memory> {
        // The threads that fill the pages populate them, and registering locks them.
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

/// Fills a mapping in chunks, on all threads, with words that differ from their neighbours.
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

/// The memory of a run's groups; see the module's head.
#[derive(Debug)]
pub struct Pool {
    /// Its size.
    pub bytes: u64,
    /// Whether each device makes its own memory, which no other device can use.
    of_driver: bool,
    /// The shared mapping, once a group has asked for it.
    map: RefCell<Option<Arc<Map>>>,
}

impl Pool {
    /// A pool of this size; nothing is taken yet.
    pub fn new(bytes: u64) -> Pool {
        Pool { bytes, of_driver: false, map: RefCell::new(None) }
    }

    /// The same, with memory from drivers if `of_driver`.
    pub fn of_driver(self, of_driver: bool) -> Pool {
        Pool { of_driver, ..self }
    }

    /// The memory for a device.
    ///
    /// # Errors
    /// Errors of [`Memory::filled`].
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

    /// Releases the mapping, for groups that take their memory in another way.
    pub fn give_back(&self) {
        self.map.replace(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::device::host::{HostDevice, HostOptions};

    #[test]
    fn by_default_a_gpu_takes_a_fifth_of_free_memory_and_the_host_little() {
        let of = |gpu, quick, system| {
            let free = Free { system, node: None };
            bytes(For { asked: None, quick, gpu, least: LEAST }, free).map_err(|error| error.to_string())
        };
        assert_eq!(of(true, false, 2 << 40), Ok(64 << 30));
        // An eighth is left free.
        assert_eq!(of(true, false, 80 << 30), Ok(14 << 30));
        assert_eq!(of(false, false, 80 << 30), Ok(3 << 29));
        assert_eq!(of(false, false, 4 << 30), Ok((7 << 29) / 5));
        assert_eq!(of(true, true, 1), Ok(4 << 20));
        let text = of(true, false, 500 << 20).unwrap_err();
        assert!(text.contains("host memory") && text.contains("--quick"), "{text}");
    }

    #[test]
    fn a_requested_size_is_used_if_it_is_available_and_large_enough() {
        let of = |asked, quick| {
            let wanted = For { asked: Some(asked), quick, gpu: false, least: 500 << 20 };
            let free = Free { system: 8 << 30, node: None };
            bytes(wanted, free).map_err(|error| (error.kind(), error.to_string()))
        };
        assert_eq!(of(7 << 30, false), Ok(7 << 30));
        assert_eq!(of(5 << 20, true), Ok(5 << 20));
        for (asked, quick, place) in
            [((7 << 30) + 1, false, "exceeds"), (499 << 20, false, "less than"), (9, true, "less")]
        {
            let (kind, text) = of(asked, quick).unwrap_err();
            assert!(kind == Kind::InvalidConfig && text.contains("--pool") && text.contains(place), "{text}");
        }
        // A system that does not report free memory is assumed to have enough.
        let unknown = Free { system: 0, node: None };
        let wanted = For { asked: Some(1 << 30), quick: false, gpu: true, least: 1 };
        assert_eq!(bytes(wanted, unknown).unwrap(), 1 << 30);
    }

    #[test]
    fn a_bound_process_leaves_an_eighth_of_its_node_free() {
        let of = |asked, node| {
            let free = Free { system: 400 << 30, node };
            let wanted = For { asked, quick: false, gpu: true, least: LEAST };
            bytes(wanted, free).map_err(|error| (error.kind(), error.to_string()))
        };
        let node = Some((1, 80 << 30));
        assert_eq!(of(Some(70 << 30), node), Ok(70 << 30));
        let (kind, text) = of(Some(71 << 30), node).unwrap_err();
        assert_eq!(kind, Kind::InvalidConfig);
        for part in ["--pool", "exceeds", "NUMA node 1", "free there 85899345920", "an eighth"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains('\n'), "{text}");
        // Without a node, and by default.
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
