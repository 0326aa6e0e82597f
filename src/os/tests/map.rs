//! Sizes, and each fallback by the fault that causes it.

use crate::error::Kind;
use crate::os::map::rounded;
use crate::os::memory::MemoryState;
use crate::os::{Call, Fallback, Inject, Map, NoFaults, Request, page_size};

const MIB: u64 = 1 << 20;

fn all_of(bytes: u64) -> Request {
    Request { bytes, huge: true, populate: true, lock: true, node: Some(0), shared: true }
}

fn plain(bytes: u64) -> Request {
    Request { bytes, huge: false, populate: false, lock: false, node: None, shared: true }
}

fn works(map: &Map) {
    map.copy_in(map.len() - 4, &[1, 2, 3, 4]).unwrap();
    let mut back = [0; 5];
    map.copy_out(map.len() - 5, &mut back).unwrap();
    assert_eq!(back, [0, 1, 2, 3, 4]);
}

/// The fallbacks called `what` when `call` is refused with `errno`; the map works nevertheless.
fn lost(request: &Request, what: &str, call: Call, errno: i32) -> (Map, Vec<Fallback>) {
    let (map, mut lost) = Map::new(request, &Inject::call(call, errno)).unwrap();
    works(&map);
    lost.retain(|f| f.what == what);
    (map, lost)
}

#[test]
fn no_size_grows_by_a_whole_page() {
    // 60 GB asked, 80 GB taken: the cost of rounding to a power of two. Nothing is populated here.
    let page = page_size();
    for bytes in [1, page - 1, page, page + 1, 3 * MIB + 1, 5 * (1 << 30) + 1] {
        let (map, lost) = Map::new(&plain(bytes), &NoFaults).unwrap();
        assert!(map.len() >= bytes && map.len() < bytes + page, "{bytes} became {}", map.len());
        assert_eq!((map.len() % page, map.page_bytes(), lost), (0, page, vec![]));
        works(&map);
        let file = std::fs::File::from(map.descriptor().unwrap().try_clone_to_owned().unwrap());
        assert_eq!(file.metadata().unwrap().len(), map.len());
    }
    assert_eq!(rounded(60_000_000_001, 2 * MIB).unwrap(), 60_001_615_872);
}

#[test]
fn everything_asked_for_works_or_is_listed() {
    let (map, lost) = Map::new(&all_of(3 * MIB), &NoFaults).unwrap();
    works(&map);
    assert!(map.page_bytes() > page_size() || lost.iter().any(|f| f.what == Fallback::HUGE_PAGES));
    assert!(map.descriptor().is_some() || lost.iter().any(|f| f.what == Fallback::SHARED_MEMORY));
}

#[test]
fn without_huge_pages_base_pages_are_taken() {
    for call in [Call::MemfdHuge, Call::MemoryState] {
        let (map, lost) = lost(&all_of(MIB), Fallback::HUGE_PAGES, call, libc::ENOENT);
        assert_eq!((map.page_bytes(), map.len(), lost.len()), (page_size(), MIB, 1), "{lost:?}");
        assert!(map.descriptor().is_some());
    }
    let private = Request { shared: false, ..all_of(MIB) };
    let (_, lost) = lost(&private, Fallback::HUGE_PAGES, Call::AdviseHuge, libc::EINVAL);
    assert_eq!(lost.len(), 1);
    assert_eq!(lost[0].cause, "madvise for huge pages: Invalid argument");
}

/// The fault reports huge pages, so that the calls for them are made on any system.
#[test]
fn unavailable_huge_pages_are_released_and_the_cause_is_reported() {
    let state = MemoryState { huge_page: 2 * MIB, huge_free: 9, ..MemoryState::default() };
    let request = all_of(3 * MIB);
    match Map::on_huge_pages(&request, &state, &NoFaults) {
        Ok((map, _)) => {
            works(&map);
            assert_eq!((map.page_bytes(), map.len()), (2 * MIB, 4 * MIB));
        }
        Err(cause) => assert_eq!(cause, "mmap: Cannot allocate memory"),
    }
    for (call, cause) in [
        (Call::MemfdHuge, "memfd_create with huge pages: Operation not permitted"),
        (Call::Truncate, "ftruncate: Operation not permitted"),
        (Call::Seal, "fcntl: Operation not permitted"),
        (Call::Map, "mmap: Operation not permitted"),
    ] {
        let refused = Map::on_huge_pages(&request, &state, &Inject::call(call, libc::EPERM));
        assert_eq!(refused.unwrap_err(), cause);
    }
    let too_many = Map::on_huge_pages(&all_of(18 * MIB + 1), &state, &NoFaults);
    assert_eq!(too_many.unwrap_err(), "10 reserved huge pages wanted, 9 free");
    let none = Map::on_huge_pages(&request, &MemoryState::default(), &NoFaults);
    assert_eq!(none.unwrap_err(), "the system names no huge page size");
}

#[test]
fn without_the_right_to_lock_memory_is_unlocked() {
    for errno in [libc::EPERM, libc::ENOMEM, libc::EAGAIN] {
        let (map, lost) = lost(&all_of(MIB), Fallback::LOCKED_MEMORY, Call::Lock, errno);
        assert_eq!((lost.len(), lost[0].wanted), (1, map.len()));
        assert!(lost[0].to_string().starts_with("locked memory (wanted "), "{}", lost[0]);
    }
}

#[test]
fn on_one_node_memory_is_unbound() {
    let request = Request { node: Some(1), ..all_of(MIB) };
    let (_, lost) = lost(&request, Fallback::NUMA_BINDING, Call::Nodes, libc::ENOENT);
    assert_eq!((lost.len(), lost[0].wanted), (1, 1));
    let (_, lost) = self::lost(&all_of(MIB), Fallback::NUMA_BINDING, Call::Bind, libc::EPERM);
    assert_eq!(lost[0].cause, "mbind: Operation not permitted");
}

#[test]
fn without_a_descriptor_memory_is_private() {
    let request = Request { huge: false, ..all_of(MIB) };
    let (map, lost) = lost(&request, Fallback::SHARED_MEMORY, Call::Memfd, libc::EPERM);
    assert_eq!((lost.len(), map.descriptor().is_none()), (1, true));
    assert_eq!(
        lost[0].to_string(),
        "shared memory (wanted 1048576 bytes): memfd_create: Operation not permitted"
    );
    let (map, lost) = Map::new(&Request { shared: false, ..plain(MIB) }, &NoFaults).unwrap();
    assert!(map.descriptor().is_none() && lost.is_empty());
}

#[test]
fn without_the_populating_call_pages_are_touched() {
    let request = Request { huge: false, ..all_of(MIB) };
    for errno in [libc::EINVAL, libc::EPERM] {
        works(&Map::new(&request, &Inject::call(Call::Populate, errno)).unwrap().0);
    }
    for errno in [libc::ENOMEM, libc::EFAULT] {
        let e = Map::new(&request, &Inject::call(Call::Populate, errno)).unwrap_err();
        assert_eq!((e.kind(), e.number("wanted")), (Kind::OutOfMemory, Some(MIB)));
    }
}

#[test]
fn without_memory_there_is_an_error_that_names_the_bytes() {
    for call in [Call::Map, Call::Truncate] {
        let e = Map::new(&plain(MIB), &Inject::call(call, libc::ENOMEM)).unwrap_err();
        assert_eq!((e.kind(), e.number("wanted")), (Kind::OutOfMemory, Some(MIB)));
        let e = Map::new(&plain(MIB), &Inject::call(call, libc::EPERM)).unwrap_err();
        assert_eq!(e.kind(), Kind::OsRefused);
        assert!(e.place().ends_with(": Operation not permitted"), "{e}");
    }
}

#[test]
fn more_than_the_machine_has_is_an_error_and_not_the_end_of_the_process() {
    let e = Map::new(&all_of(1 << 45), &NoFaults).unwrap_err();
    assert_eq!((e.kind(), e.number("wanted")), (Kind::OutOfMemory, Some(1 << 45)));
    assert!(e.number("available").is_some());
    let e = Map::new(&plain(u64::MAX - 5), &NoFaults).unwrap_err();
    assert_eq!(e.kind(), Kind::Overflow);
    assert_eq!(Map::new(&plain(0), &NoFaults).unwrap_err().kind(), Kind::InvalidConfig);
}
