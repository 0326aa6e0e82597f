//! Memory that another process maps: what each side may do, and descriptors that are refused.
//!
//! Both sides are in this process. What the system forbids belongs to the memory, not to the process, so this shows
//! the same as two processes; `tests/peers.rs` has those.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::error::{Error, Kind};
use crate::os::{Call, Inject, Map, NoFaults, Piece, Protection, Range, Request, page_size};
use crate::sync::Arc;

fn shared(bytes: u64) -> Map {
    let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: true };
    Map::new(&request, &NoFaults).unwrap().0
}

fn byte(map: &Map, offset: u64) -> u8 {
    let mut one = [0];
    map.copy_out(offset, &mut one).unwrap();
    one[0]
}

fn refused<T>(result: crate::error::Result<T>) -> (Kind, String) {
    let error: Error = result.err().unwrap();
    (error.kind(), error.place().to_owned())
}

#[test]
fn a_reader_sees_writes_and_can_make_none() {
    let (page, own) = (page_size(), Arc::new(shared(2 * page_size())));
    let before =
        Range::new(&[Piece { map: &own, offset: 0, bytes: page }], Protection::ReadWrite, &NoFaults).unwrap();
    let theirs = own.export(Protection::Read, &NoFaults).unwrap();
    let file = File::from(theirs.try_clone().unwrap());
    let adopted = Arc::new(Map::adopt(theirs, 2 * page, Protection::Read, &NoFaults).unwrap());
    // The owner still writes through the mappings that it has.
    own.copy_in(page, &[5]).unwrap();
    before.copy_in(0, &[6]).unwrap();
    assert_eq!((byte(&adopted, 0), byte(&adopted, page)), (6, 5));
    // A reader cannot, by any way: not through its region, a new mapping, or the descriptor.
    let read_only = (Kind::InvalidState, "memory that is mapped to be read only".to_owned());
    assert_eq!(refused(adopted.copy_in(0, &[1])), read_only);
    assert_eq!(refused(adopted.copy_in_words(0, &[1])), read_only);
    assert_eq!(refused(adopted.copy_within(0, 8, 1)), read_only);
    assert_eq!(refused(adopted.fill(0, 1, 1)), read_only);
    assert!(file.write_at(&[1], 0).is_err());
    let again = file.try_clone().unwrap().into();
    let (kind, place) = refused(Map::adopt(again, 2 * page, Protection::ReadWrite, &NoFaults));
    assert_eq!((kind, place.as_str()), (Kind::OsRefused, "mmap: Operation not permitted"));
    // Nor can the owner map it again to write; it can to read, and so can the reader.
    for map in [&own, &adopted] {
        let piece = Piece { map, offset: page, bytes: page };
        let error = Range::new(&[piece], Protection::ReadWrite, &NoFaults).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::OsRefused, "mmap: Operation not permitted"));
        assert_eq!(error.advice(), "map it before it is exported to be read only, or map it to be read");
        let read = Range::new(&[piece], Protection::Read, &NoFaults).unwrap();
        let mut one = [0];
        read.copy_out(0, &mut one).unwrap();
        assert_eq!((one, read.protection()), ([5], Protection::Read));
        assert_eq!(refused(read.fill(0, 1, 1)), read_only);
    }
    assert_eq!(byte(&adopted, page), 5);
}

#[test]
fn a_writer_writes_the_same_memory_after_its_owner_is_gone() {
    let own = shared(page_size());
    let theirs = own.export(Protection::ReadWrite, &NoFaults).unwrap();
    let adopted = Map::adopt(theirs, page_size(), Protection::ReadWrite, &NoFaults).unwrap();
    adopted.copy_in(3, &[9]).unwrap();
    assert_eq!(byte(&own, 3), 9);
    drop(own);
    assert_eq!(byte(&adopted, 3), 9);
}

#[test]
fn the_first_export_decides() {
    let own = shared(page_size());
    let first = own.export(Protection::Read, &NoFaults).unwrap();
    own.export(Protection::Read, &NoFaults).unwrap();
    let (kind, place) = refused(own.export(Protection::ReadWrite, &NoFaults));
    assert_eq!(
        (kind, place.as_str()),
        (Kind::InvalidState, "memory that was exported with another protection before")
    );
    // A holder can neither resize the memory nor forbid anything more.
    let add = |seals| fcntl(&first, FcntlArg::F_ADD_SEALS(seals)).is_err();
    assert!(add(SealFlag::F_SEAL_WRITE) && add(SealFlag::F_SEAL_GROW));
    assert!(File::from(first).set_len(0).is_err());
    let private = Request { bytes: 1, huge: false, populate: false, lock: false, node: None, shared: false };
    let (kind, place) = refused(Map::new(&private, &NoFaults).unwrap().0.export(Protection::Read, &NoFaults));
    assert_eq!((kind, place.as_str()), (Kind::Unsupported, "memory without a descriptor"));
}

/// A memfd of `bytes` bytes with these seals.
fn foreign(bytes: u64, seals: SealFlag) -> OwnedFd {
    let fd = memfd_create(c"foreign", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    File::from(fd.try_clone().unwrap()).set_len(bytes).unwrap();
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    fd
}

#[test]
fn a_foreign_descriptor_is_refused_and_closed() {
    const NOT_SEALED: &str = "a descriptor that is not shared memory of sealed size";
    let page = page_size();
    let size = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    let open = size | SealFlag::F_SEAL_SEAL;
    let all = open | SealFlag::F_SEAL_FUTURE_WRITE;
    let adopt = |fd: OwnedFd, bytes| refused(Map::adopt(fd, bytes, Protection::Read, &NoFaults));
    let (reader, writer) = std::io::pipe().unwrap();
    let file = File::open("/proc/self/exe").unwrap();
    let whole = file.metadata().unwrap().len();
    for (fd, bytes) in [
        (foreign(page, SealFlag::empty()), page),
        (foreign(page, SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL), page),
        // A process that holds it could still forbid the mapping that is about to be made.
        (foreign(page, size), page),
        // Its holder could take pages out of it while they are read.
        (foreign(page, open), page),
        (OwnedFd::from(writer), page),
        (file.into(), whole),
    ] {
        assert_eq!(adopt(fd, bytes), (Kind::BadFormat, NOT_SEALED.to_owned()));
    }
    // The pipe's other end sees its end: the refused descriptor was closed.
    assert_eq!(std::io::read_to_string(reader).unwrap(), "");
    for (held, stated) in
        [(page, 2 * page), (2 * page, page), (page, 0), (0, 0), (page, page - 1), (page - 1, page - 1)]
    {
        let error = Map::adopt(foreign(held, all), stated, Protection::Read, &NoFaults).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::BadFormat, "shared memory of another size"));
        assert_eq!((error.number("stated"), error.number("size")), (Some(stated), Some(held)));
    }
    let map = Map::adopt(foreign(page, all), page, Protection::Read, &NoFaults).unwrap();
    assert_eq!((map.len(), map.page_bytes()), (page, page));
    Map::adopt(foreign(page, open | SealFlag::F_SEAL_WRITE), page, Protection::Read, &NoFaults).unwrap();
    // Memory that this process writes others may write too.
    Map::adopt(foreign(page, open), page, Protection::ReadWrite, &NoFaults).unwrap();
}

#[test]
fn each_refused_call_is_named() {
    for call in [Call::Seals, Call::Seal, Call::Duplicate] {
        let own = shared(page_size());
        let error = own.export(Protection::Read, &Inject::call(call, libc::EPERM));
        assert_eq!(
            refused(error),
            (Kind::OsRefused, "fcntl: Operation not permitted".to_owned()),
            "{call:?}"
        );
        // Only a refusal that came after the seal decided.
        assert_eq!(
            own.export(Protection::ReadWrite, &NoFaults).is_err(),
            call == Call::Duplicate,
            "{call:?}"
        );
    }
    let own = shared(page_size());
    drop(own.export(Protection::Read, &NoFaults).unwrap());
    for (call, place) in [
        (Call::Stat, "fstat: Operation not permitted"),
        (Call::Seals, "fcntl: Operation not permitted"),
        (Call::Map, "mmap: Operation not permitted"),
    ] {
        let theirs = own.descriptor().unwrap().as_fd().try_clone_to_owned().unwrap();
        let adopted = Map::adopt(theirs, page_size(), Protection::Read, &Inject::call(call, libc::EPERM));
        assert_eq!(refused(adopted), (Kind::OsRefused, place.to_owned()), "{call:?}");
    }
}
