//! Sends and receives a file descriptor over a Unix socket.
//!
//! One message carries one byte and one descriptor. Both sides block as the socket does. The caller decides how to
//! use the descriptor and how far to trust the sender.

use std::io::{IoSlice, IoSliceMut};
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, recvmsg, sendmsg};

use super::refusal::{OsResult, answer, ask};
use super::{Call, Faults};
use crate::error::{Error, Kind, Result};

/// The byte that goes with a descriptor, because a stream socket needs data to carry one.
const MARK: u8 = b'd';

/// The bytes of ancillary data with one descriptor, without padding: room for no second one.
const ONE: usize = size_of::<libc::cmsghdr>() + size_of::<RawFd>();

/// Room for the ancillary header and one descriptor, aligned as the header is.
#[repr(C, align(8))]
struct Ancillary([u8; ONE]);

/// Sends `descriptor` over the Unix socket `socket`; the sender keeps its own.
///
/// # Errors
/// [`Kind::OsRefused`] with the system's reason, including a peer that has closed.
pub fn send(socket: impl AsFd, descriptor: impl AsFd, faults: &dyn Faults) -> Result<()> {
    let (socket, fd) = (socket.as_fd().as_raw_fd(), descriptor.as_fd().as_raw_fd());
    send_raw(socket, &[fd], faults).map_err(|refusal| refusal.error("send descriptor"))
}

fn send_raw(socket: RawFd, fds: &[RawFd], faults: &dyn Faults) -> OsResult<()> {
    ask(faults, Call::SendDescriptor, "sendmsg")?;
    let (data, rights) = ([IoSlice::new(&[MARK])], [ControlMessage::ScmRights(fds)]);
    let send = || sendmsg::<()>(socket, &data, &rights, MsgFlags::MSG_NOSIGNAL, None);
    uninterrupted("sendmsg", send).map(drop)
}

/// Receives a descriptor over the Unix socket `socket`. The descriptor is close-on-exec.
///
/// # Errors
/// [`Kind::OsRefused`] with the system's reason; [`Kind::Io`] when the peer has closed; [`Kind::BadFormat`] for a
/// message without exactly one descriptor.
pub fn receive(socket: impl AsFd, faults: &dyn Faults) -> Result<OwnedFd> {
    const OPERATION: &str = "receive descriptor";
    ask(faults, Call::ReceiveDescriptor, "recvmsg").map_err(|refusal| refusal.error(OPERATION))?;
    let socket = socket.as_fd().as_raw_fd();
    let mut mark = [0_u8];
    let mut ancillary = Ancillary([0; ONE]);
    let receive = || {
        let (mut data, room) = ([IoSliceMut::new(&mut mark)], Some(&mut ancillary.0[..]));
        let message = recvmsg::<()>(socket, &mut data, room, MsgFlags::MSG_CMSG_CLOEXEC)?;
        Ok((message.bytes, message.flags))
    };
    let (got, flags) = uninterrupted("recvmsg", receive).map_err(|refusal| refusal.error(OPERATION))?;
    let fd = descriptor_in(ancillary);
    if got == 0 {
        return Err(Error::new(Kind::Io, OPERATION).at("socket closed by its other end"));
    }
    match fd {
        Some(fd) if mark == [MARK] && !flags.contains(MsgFlags::MSG_CTRUNC) => Ok(fd),
        _ => Err(Error::new(Kind::BadFormat, OPERATION)
            .at("message without exactly one descriptor")
            .hint("use the same forebay release at the other end")),
    }
}

/// The descriptor that `recvmsg` stored, if any. It is parsed here and not by nix: of a truncated message nix returns
/// nothing, and the descriptor that arrived would stay open forever.
fn descriptor_in(ancillary: Ancillary) -> Option<OwnedFd> {
    let word = |at: usize| ancillary.0.get(at..)?.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes));
    let length = ancillary.0.get(offset_of!(libc::cmsghdr, cmsg_len)..)?.first_chunk()?;
    let ours = usize::from_ne_bytes(*length) == ONE
        && word(offset_of!(libc::cmsghdr, cmsg_level)) == Some(libc::SOL_SOCKET)
        && word(offset_of!(libc::cmsghdr, cmsg_type)) == Some(libc::SCM_RIGHTS);
    let fd = word(size_of::<libc::cmsghdr>()).filter(|_| ours)?;
    // SAFETY: after a header of this level, type and length the system wrote a descriptor that it gave to us alone;
    // the room was zero before, and is consumed here.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Repeats a call until no signal interrupts it.
fn uninterrupted<T>(name: &'static str, mut call: impl FnMut() -> nix::Result<T>) -> OsResult<T> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            done => return answer(name, done),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::fs::FileExt;
    use std::os::unix::net::UnixStream;

    use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};

    use super::super::{Inject, Map, NoFaults, Request, page_size};
    use super::*;

    #[test]
    fn both_ends_see_the_same_memory() {
        let bytes = page_size();
        let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: true };
        let (map, _) = Map::new(&request, &NoFaults).unwrap();
        let (a, b) = UnixStream::pair().unwrap();
        send(&a, map.descriptor().unwrap(), &NoFaults).unwrap();
        send(&a, map.descriptor().unwrap(), &NoFaults).unwrap();
        for round in 1..=2_u8 {
            let file = std::fs::File::from(receive(&b, &NoFaults).unwrap());
            map.copy_in(5, &[round]).unwrap();
            let mut one = [0];
            file.read_exact_at(&mut one, 5).unwrap();
            assert_eq!(one, [round]);
            let flags = FdFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFD).unwrap());
            assert!(flags.contains(FdFlag::FD_CLOEXEC));
        }
    }

    #[test]
    fn a_message_without_a_descriptor_is_malformed() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&[MARK]).unwrap();
        assert_eq!(receive(&b, &NoFaults).unwrap_err().kind(), Kind::BadFormat);
        drop(a);
        assert_eq!(receive(&b, &NoFaults).unwrap_err().kind(), Kind::Io);
        let e = send(&b, &b, &NoFaults).unwrap_err();
        assert_eq!((e.kind(), e.place()), (Kind::OsRefused, "sendmsg: Broken pipe"));
    }

    #[test]
    fn a_second_descriptor_is_refused_and_not_kept() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        send_raw(a.as_raw_fd(), &[writer.as_raw_fd(); 2], &NoFaults).unwrap();
        drop(writer);
        assert_eq!(receive(&b, &NoFaults).unwrap_err().kind(), Kind::BadFormat);
        // The pipe ends when its other end has no owner: neither descriptor was kept.
        fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_refused_call_says_which() {
        let (a, b) = UnixStream::pair().unwrap();
        let e = send(&a, &b, &Inject::call(Call::SendDescriptor, libc::EPERM)).unwrap_err();
        assert_eq!(e.place(), "sendmsg: Operation not permitted");
        let e = receive(&a, &Inject::call(Call::ReceiveDescriptor, libc::EMFILE)).unwrap_err();
        assert_eq!(e.place(), "recvmsg: Too many open files");
    }
}
