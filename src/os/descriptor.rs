//! A descriptor handed to another process over a Unix socket.
//!
//! One message carries one byte and one descriptor; both sides block as the socket does. What the
//! receiver makes of the descriptor, and how much it trusts the sender, is for the caller to say.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::{Answer, Call, Faults, Refusal, answer, ask};
use crate::error::{Error, Kind, Result};

/// The byte that goes with a descriptor: a stream carries none without data.
const MARK: u8 = b'd';

/// Room for the ancillary header and one descriptor, aligned as the header is.
#[repr(C, align(8))]
struct Ancillary([u8; 32]);

/// The bytes of ancillary data with one descriptor, without padding: room for no second one.
fn one_descriptor() -> usize {
    // SAFETY: arithmetic on a length.
    let bytes = unsafe { libc::CMSG_LEN(size_of::<RawFd>() as u32) };
    bytes as usize
}

/// Sends `descriptor` over the Unix socket `socket`; the sender keeps its own.
///
/// # Errors
/// [`Kind::OsRefused`] with the system's answer, a peer that has closed included.
pub fn send(socket: impl AsFd, descriptor: impl AsFd, faults: &dyn Faults) -> Result<()> {
    let (socket, fd) = (socket.as_fd().as_raw_fd(), descriptor.as_fd().as_raw_fd());
    send_raw(socket, fd, faults).map_err(|refusal| refusal.error("send descriptor"))
}

fn send_raw(socket: RawFd, fd: RawFd, faults: &dyn Faults) -> Answer<()> {
    ask(faults, Call::SendDescriptor, "sendmsg")?;
    let mut mark = MARK;
    let mut ancillary = Ancillary([0; 32]);
    let mut part = libc::iovec { iov_base: (&raw mut mark).cast(), iov_len: 1 };
    let message = message(&mut part, &mut ancillary);
    // SAFETY: the message's ancillary room holds one header and one descriptor, so the first header
    // and its data are inside.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = one_descriptor();
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
    }
    uninterrupted("sendmsg", || {
        // SAFETY: the message points to locals that outlive the call.
        unsafe { libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) as i64 }
    })
    .map(drop)
}

/// Receives a descriptor over the Unix socket `socket`; it is closed when a program is executed.
///
/// # Errors
/// [`Kind::OsRefused`] with the system's answer, [`Kind::Io`] when the peer has closed,
/// [`Kind::BadFormat`] for a message without exactly one descriptor.
pub fn receive(socket: impl AsFd, faults: &dyn Faults) -> Result<OwnedFd> {
    const OPERATION: &str = "receive descriptor";
    ask(faults, Call::ReceiveDescriptor, "recvmsg").map_err(|refusal| refusal.error(OPERATION))?;
    let socket = socket.as_fd().as_raw_fd();
    let mut mark = 0_u8;
    let mut ancillary = Ancillary([0; 32]);
    let mut part = libc::iovec { iov_base: (&raw mut mark).cast(), iov_len: 1 };
    let mut message = message(&mut part, &mut ancillary);
    let got = uninterrupted("recvmsg", || {
        // SAFETY: the message points to locals that outlive the call.
        unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) as i64 }
    })
    .map_err(|refusal| refusal.error(OPERATION))?;
    // SAFETY: the system wrote whole headers and says in the message how many bytes; a header of this
    // level, type and length is followed by one descriptor.
    let fd = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        let ours = !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS
            && (*header).cmsg_len == one_descriptor();
        // The system gave this descriptor to us alone.
        ours.then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()))
    };
    if got == 0 {
        return Err(Error::new(Kind::Io, OPERATION).at("socket closed by its other end"));
    }
    match fd {
        Some(fd) if mark == MARK && message.msg_flags & libc::MSG_CTRUNC == 0 => Ok(fd),
        _ => Err(Error::new(Kind::BadFormat, OPERATION)
            .at("message without exactly one descriptor")
            .hint("let the other end send by the same release")),
    }
}

/// A message of one part and one descriptor.
fn message(part: &mut libc::iovec, ancillary: &mut Ancillary) -> libc::msghdr {
    // SAFETY: all of a message header may be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = ancillary.0.as_mut_ptr().cast();
    message.msg_controllen = one_descriptor();
    message
}

/// Makes a call again until no signal has interrupted it.
fn uninterrupted(name: &'static str, mut call: impl FnMut() -> i64) -> Answer<i64> {
    loop {
        match answer(name, call()) {
            Err(Refusal { errno: libc::EINTR, .. }) => {}
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::fs::FileExt;
    use std::os::unix::net::UnixStream;

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
            // SAFETY: an integer call on an open descriptor.
            let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFD) };
            assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
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
        let mut mark = MARK;
        let mut ancillary = Ancillary([0; 32]);
        let mut part = libc::iovec { iov_base: (&raw mut mark).cast(), iov_len: 1 };
        let mut message = message(&mut part, &mut ancillary);
        let (fds, bytes) = ([writer.as_raw_fd(); 2], 2 * size_of::<RawFd>());
        message.msg_controllen = one_descriptor() + size_of::<RawFd>();
        // SAFETY: the ancillary room is 32 bytes: a header of 16 and two descriptors of 4.
        let sent = unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(bytes as u32) as usize;
            libc::CMSG_DATA(header).cast::<[RawFd; 2]>().write_unaligned(fds);
            libc::sendmsg(a.as_raw_fd(), &raw const message, 0)
        };
        assert_eq!(sent, 1);
        drop(writer);
        assert_eq!(receive(&b, &NoFaults).unwrap_err().kind(), Kind::BadFormat);
        // The pipe ends when nobody holds its other end: neither descriptor was kept.
        // SAFETY: an integer call on an open descriptor.
        assert_eq!(unsafe { libc::fcntl(reader.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }, 0);
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
