//! Bytes and descriptors between two processes of a host, over a Unix stream socket.
//!
//! [`send`] and [`receive`] never block; [`wait`] blocks until one of them can do something, for at most a given time.
//! The kernel delivers bytes in order, and at most one descriptor with each call. It does not say with which of the
//! bytes the descriptor came, so the caller's format has to (`peer`).
//!
//! **The other process is not trusted.** More than one descriptor at a time is an error, and none of them stays open.
//! What a descriptor is, its receiver checks ([`super::Map::adopt`]). [`credentials`] are the kernel's own word on who
//! connected.
//!
//! **What it does not do.** It listens nowhere; the standard library's `UnixListener` does. Its `UnixStream` connects
//! too, but waits without end for a process that takes no connections, so [`connect`] is here. [`send`], [`receive`]
//! and [`wait`] take any stream socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    self, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, getsockopt, recvmsg,
    sendmsg, sockopt,
};

use super::refusal::{OsResult, Refusal, answer, ask};
use super::{Call, Faults};
use crate::error::{Error, Kind, Result};

/// The bytes of ancillary data with one descriptor, without padding: room for no second one.
const ONE: usize = size_of::<libc::cmsghdr>() + size_of::<RawFd>();

/// Room for the ancillary header and one descriptor, aligned as the header is.
#[repr(C, align(8))]
struct Ancillary([u8; ONE]);

/// What one call of [`receive`] got.
#[derive(Debug)]
pub struct Received {
    /// The bytes written to the caller's buffer, at least one.
    pub bytes: usize,
    /// A descriptor that came with one of them. It is close-on-exec.
    pub descriptor: Option<OwnedFd>,
}

/// The process at a socket's other end when it connected, as the kernel saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Its process id, in this process's namespace; 0 for a process outside it.
    pub process: i32,
    /// Its effective user.
    pub user: u32,
    /// Its effective group.
    pub group: u32,
}

/// The error of a refused call. A connection that was closed, or whose other end cannot be reached, is a lost peer.
fn failed(operation: &'static str) -> impl Fn(Refusal) -> Error {
    move |refusal| match refusal.errno {
        libc::EPIPE
        | libc::ECONNRESET
        | libc::ECONNREFUSED
        | libc::ETIMEDOUT
        | libc::EHOSTUNREACH
        | libc::ENETUNREACH => Error::new(Kind::PeerLost, operation).at(refusal.to_string()),
        _ => refusal.error(operation),
    }
}

/// Sends bytes, with the first of them a descriptor; the sender keeps its own. Returns how many bytes the system took:
/// 0 if it takes none now, and then no descriptor either.
///
/// # Errors
/// [`Kind::PeerLost`] if the other end is closed; [`Kind::OsRefused`].
pub fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
    faults: &dyn Faults,
) -> Result<usize> {
    let fds: Vec<RawFd> = descriptor.iter().map(AsRawFd::as_raw_fd).collect();
    send_raw(socket.as_fd().as_raw_fd(), bytes, &fds, faults).map_err(failed("send to a process"))
}

fn send_raw(socket: RawFd, bytes: &[u8], fds: &[RawFd], faults: &dyn Faults) -> OsResult<usize> {
    ask(faults, Call::Send, "sendmsg")?;
    let (data, rights) = ([IoSlice::new(bytes)], [ControlMessage::ScmRights(fds)]);
    let rights = if fds.is_empty() { &rights[..0] } else { &rights[..] };
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    let sent = uninterrupted("sendmsg", || sendmsg::<()>(socket, &data, rights, flags, None));
    sent.or_else(|refusal| if is_later(refusal) { Ok(0) } else { Err(refusal) })
}

/// Receives bytes into `buffer`, which has room for at least one, and perhaps a descriptor. `None` if none are there.
///
/// # Errors
/// [`Kind::PeerLost`] if the other end is closed; [`Kind::BadFormat`] for more than one descriptor at a time;
/// [`Kind::OsRefused`], also where this process may open no further file. The bytes and the descriptor are gone then.
pub fn receive(socket: impl AsFd, buffer: &mut [u8], faults: &dyn Faults) -> Result<Option<Received>> {
    const OPERATION: &str = "receive from a process";
    ask(faults, Call::Receive, "recvmsg").map_err(failed(OPERATION))?;
    let socket = socket.as_fd().as_raw_fd();
    let mut ancillary = Ancillary([0; ONE]);
    let receive = || {
        let (mut data, room) = ([IoSliceMut::new(buffer)], Some(&mut ancillary.0[..]));
        let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
        let message = recvmsg::<()>(socket, &mut data, room, flags)?;
        Ok((message.bytes, message.flags))
    };
    let (bytes, flags) = match uninterrupted("recvmsg", receive) {
        Ok(got) => got,
        Err(refusal) if is_later(refusal) => return Ok(None),
        Err(refusal) => return Err(failed(OPERATION)(refusal)),
    };
    let descriptor = descriptor_in(ancillary);
    if bytes == 0 {
        return Err(Error::new(Kind::PeerLost, OPERATION).at("socket closed by its other end"));
    }
    if flags.contains(MsgFlags::MSG_CTRUNC) && descriptor.is_none() {
        // The system had room for one and gave none: this process has as many open files as it may.
        let refusal = Refusal { name: "recvmsg", errno: libc::EMFILE };
        return Err(refusal.error(OPERATION).hint("raise this process's limit of open files (ulimit -n)"));
    }
    if flags.contains(MsgFlags::MSG_CTRUNC) {
        return Err(Error::new(Kind::BadFormat, OPERATION)
            .at("more than one descriptor at a time")
            .hint("use the same forebay release at the other end"));
    }
    Ok(Some(Received { bytes, descriptor }))
}

/// Waits until bytes can be received from one of `sockets` or, where its `bool` says so, sent to it. Returns whether
/// this is so after at most `at_most`. A closed connection can be received from: [`receive`] then says so.
///
/// # Errors
/// [`Kind::OsRefused`].
pub fn wait(sockets: &[(BorrowedFd<'_>, bool)], at_most: Duration, faults: &dyn Faults) -> Result<bool> {
    let failed = |refusal: Refusal| refusal.error("wait for a process");
    let start = Instant::now();
    let wanted = |to_send| if to_send { PollFlags::POLLIN | PollFlags::POLLOUT } else { PollFlags::POLLIN };
    let polled = sockets.iter().map(|(socket, to_send)| PollFd::new(*socket, wanted(*to_send)));
    let mut polled: Vec<PollFd<'_>> = polled.collect();
    loop {
        ask(faults, Call::Poll, "poll").map_err(failed)?;
        // Rounded up to whole milliseconds, so that no time is left when the call ends.
        let left = at_most.saturating_sub(start.elapsed()).as_nanos().div_ceil(1_000_000);
        let timeout = i32::try_from(left).ok().and_then(|left| PollTimeout::try_from(left).ok());
        match poll(&mut polled, timeout.unwrap_or(PollTimeout::MAX)) {
            Err(Errno::EINTR) => {}
            Ok(0) if start.elapsed() < at_most => {}
            answered => return answer("poll", answered).map(|ready| ready > 0).map_err(failed),
        }
    }
}

/// Whether the other end of a connection of this host (a Unix socket) has closed it, or has ended. What it sent before
/// may still be there.
///
/// # Errors
/// [`Kind::OutOfMemory`]; [`Kind::OsRefused`].
#[cfg(feature = "transfer")]
pub fn has_hung_up(socket: BorrowedFd<'_>, faults: &dyn Faults) -> Result<bool> {
    let failed = |refusal: Refusal| refusal.error("look at a connection");
    // The end of a connection is told without being asked for.
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    loop {
        ask(faults, Call::Poll, "poll").map_err(failed)?;
        match poll(&mut polled, PollTimeout::ZERO) {
            Err(Errno::EINTR) => {}
            answered => return answer("poll", answered).map(|ended| ended > 0).map_err(failed),
        }
    }
}

/// Connects to the socket that a process has bound to `path`.
///
/// # Errors
/// The system's. A process that takes no connections and whose queue is full is
/// [`ErrorKind::WouldBlock`](io::ErrorKind::WouldBlock).
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    socket::connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    let socket = UnixStream::from(socket);
    socket.set_nonblocking(false)?;
    Ok(socket)
}

/// Whether a connection that [`connect_to`](super::connect_to) has begun was refused, because no process listens. The
/// system tells each failure once.
///
/// # Errors
/// [`Kind::PeerLost`] for a host that cannot be reached; [`Kind::OsRefused`].
#[cfg(feature = "transfer")]
pub fn is_refused(socket: impl AsFd, faults: &dyn Faults) -> Result<bool> {
    let failed = failed("connect to a process");
    ask(faults, Call::Credentials, "getsockopt").map_err(&failed)?;
    match answer("getsockopt", getsockopt(&socket.as_fd(), sockopt::SocketError)).map_err(&failed)? {
        0 => Ok(false),
        libc::ECONNREFUSED => Ok(true),
        errno => Err(failed(Refusal { name: "connect", errno })),
    }
}

/// Ends a connection for both sides, also where another process has inherited the socket. What was sent still arrives.
#[cfg(feature = "transfer")]
pub fn shutdown(socket: impl AsFd) {
    // One that is not connected has nothing to end.
    let _ = nix::sys::socket::shutdown(socket.as_fd().as_raw_fd(), nix::sys::socket::Shutdown::Both);
}

/// The effective user of this process, to compare with [`Credentials::user`].
pub fn user() -> u32 {
    // SAFETY: the call reads a number of the process and cannot fail.
    unsafe { libc::geteuid() }
}

/// Who connected.
///
/// # Errors
/// [`Kind::OsRefused`], as for a socket that is not of this host.
pub fn credentials(socket: impl AsFd, faults: &dyn Faults) -> Result<Credentials> {
    let failed = |refusal: Refusal| refusal.error("identify a process");
    ask(faults, Call::Credentials, "getsockopt").map_err(failed)?;
    let told = answer("getsockopt", getsockopt(&socket.as_fd(), sockopt::PeerCredentials)).map_err(failed)?;
    Ok(Credentials { process: told.pid(), user: told.uid(), group: told.gid() })
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

/// Whether the call would have blocked.
fn is_later(refusal: Refusal) -> bool {
    refusal.errno == libc::EAGAIN || refusal.errno == libc::EWOULDBLOCK
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
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::os::unix::net::UnixStream;

    use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};

    use super::super::{Inject, Map, NoFaults, Request, page_size};
    use super::*;

    fn got(socket: &UnixStream) -> Received {
        receive(socket, &mut [0; 16], &NoFaults).unwrap().unwrap()
    }

    #[test]
    fn both_ends_see_the_same_memory() {
        let bytes = page_size();
        let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: true };
        let (map, _) = Map::new(&request, &NoFaults).unwrap();
        let (a, b) = UnixStream::pair().unwrap();
        for _ in 0..2 {
            assert_eq!(send(&a, b"four", map.descriptor(), &NoFaults).unwrap(), 4);
        }
        for round in 1..=2_u8 {
            let mut words = [0; 16];
            let received = receive(&b, &mut words, &NoFaults).unwrap().unwrap();
            assert_eq!(&words[..received.bytes], b"four");
            let file = std::fs::File::from(received.descriptor.unwrap());
            map.copy_in(5, &[round]).unwrap();
            let mut one = [0];
            file.read_exact_at(&mut one, 5).unwrap();
            assert_eq!(one, [round]);
            let flags = FdFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFD).unwrap());
            assert!(flags.contains(FdFlag::FD_CLOEXEC));
        }
        assert!(receive(&b, &mut [0; 16], &NoFaults).unwrap().is_none());
    }

    #[test]
    fn bytes_need_no_descriptor_and_a_closed_socket_is_a_lost_peer() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(b"x").unwrap();
        let received = got(&b);
        assert!(received.bytes == 1 && received.descriptor.is_none());
        drop(a);
        let e = receive(&b, &mut [0], &NoFaults).unwrap_err();
        assert_eq!((e.kind(), e.place()), (Kind::PeerLost, "socket closed by its other end"));
        let e = send(&b, b"x", None, &NoFaults).unwrap_err();
        assert_eq!((e.kind(), e.place()), (Kind::PeerLost, "sendmsg: Broken pipe"));
    }

    #[test]
    fn a_second_descriptor_is_refused_and_not_kept() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        send_raw(a.as_raw_fd(), b"x", &[writer.as_raw_fd(); 2], &NoFaults).unwrap();
        drop(writer);
        assert_eq!(receive(&b, &mut [0], &NoFaults).unwrap_err().kind(), Kind::BadFormat);
        // The pipe ends when its other end has no owner: neither descriptor was kept.
        fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_full_socket_takes_a_part_and_then_nothing() {
        let (a, b) = UnixStream::pair().unwrap();
        let bytes = vec![7; 1 << 20];
        let mut sent = 0;
        loop {
            match send(&a, &bytes, None, &NoFaults).unwrap() {
                0 => break,
                some => sent += some,
            }
        }
        assert!(sent > 0 && sent.checked_rem(bytes.len()) != Some(0), "{sent}");
        // It can neither be sent to nor received from; after a reader has made room it can be sent to.
        assert!(!wait(&[(a.as_fd(), true)], Duration::from_millis(1), &NoFaults).unwrap());
        let mut room = vec![0; sent];
        (&b).read_exact(&mut room).unwrap();
        assert!(wait(&[(a.as_fd(), true)], Duration::from_secs(60), &NoFaults).unwrap());
    }

    #[test]
    fn a_wait_ends_at_its_time_or_with_bytes() {
        let (a, b) = UnixStream::pair().unwrap();
        let start = Instant::now();
        assert!(!wait(&[(b.as_fd(), false)], Duration::from_micros(2500), &NoFaults).unwrap());
        assert!(start.elapsed() >= Duration::from_micros(2500));
        send(&a, b"x", None, &NoFaults).unwrap();
        assert!(wait(&[(b.as_fd(), false)], Duration::MAX, &NoFaults).unwrap());
        drop((a, got(&b)));
        assert!(
            wait(&[(b.as_fd(), false)], Duration::MAX, &NoFaults).unwrap(),
            "a closed socket has something to say"
        );
    }

    #[test]
    fn the_kernel_names_the_other_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let told = credentials(&a, &NoFaults).unwrap();
        assert_eq!(told.process.unsigned_abs(), std::process::id());
        let own = std::fs::metadata("/proc/self").unwrap();
        assert_eq!((told.user, told.group, told.user), (own.uid(), own.gid(), user()));
        let (reader, _writer) = std::io::pipe().unwrap();
        let e = credentials(&reader, &NoFaults).unwrap_err();
        assert_eq!((e.kind(), e.place()), (Kind::OsRefused, "getsockopt: Socket operation on non-socket"));
    }

    #[test]
    fn a_refused_call_says_which() {
        let (a, b) = UnixStream::pair().unwrap();
        let e = send(&a, b"x", None, &Inject::call(Call::Send, libc::EPERM)).unwrap_err();
        assert_eq!(e.place(), "sendmsg: Operation not permitted");
        let e = receive(&a, &mut [0], &Inject::call(Call::Receive, libc::EMFILE)).unwrap_err();
        assert_eq!((e.kind(), e.place()), (Kind::OsRefused, "recvmsg: Too many open files"));
        for errno in [libc::ETIMEDOUT, libc::EHOSTUNREACH] {
            let refused = Inject::call(Call::Receive, errno);
            assert_eq!(receive(&a, &mut [0], &refused).unwrap_err().kind(), Kind::PeerLost);
            let refused = Inject::call(Call::Send, errno);
            assert_eq!(send(&a, b"x", None, &refused).unwrap_err().kind(), Kind::PeerLost);
        }
        let e =
            wait(&[(b.as_fd(), false)], Duration::ZERO, &Inject::call(Call::Poll, libc::ENOMEM)).unwrap_err();
        assert_eq!((e.kind(), e.place()), (Kind::OutOfMemory, "poll: Cannot allocate memory"));
    }

    #[cfg(feature = "transfer")]
    #[test]
    fn a_connection_that_the_other_end_has_closed_has_hung_up_also_with_bytes_left() {
        for closes in [true, false] {
            let (a, b) = UnixStream::pair().unwrap();
            assert!(!has_hung_up(b.as_fd(), &NoFaults).unwrap());
            (&a).write_all(b"left").unwrap();
            assert!(!has_hung_up(b.as_fd(), &NoFaults).unwrap(), "bytes are no end");
            // A child that was forked has the other end too.
            let forked = a.try_clone().unwrap();
            match closes {
                true => shutdown(&a),
                false => drop((a, forked)),
            }
            assert!(has_hung_up(b.as_fd(), &NoFaults).unwrap());
            let error = has_hung_up(b.as_fd(), &Inject::call(Call::Poll, libc::ENOMEM)).unwrap_err();
            assert_eq!(error.kind(), Kind::OutOfMemory);
        }
    }
}
