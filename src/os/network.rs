//! Connecting to an address of a network without waiting. The standard library's `TcpStream` waits until the other end
//! has answered, which an end that serves other connections cannot.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage};

/// Begins to connect to an address. A socket that can be sent to is connected, or its next call says why it is not.
///
/// # Errors
/// The system's.
pub fn connect_to(address: SocketAddr) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket::socket(family, SockType::Stream, flags, None)?;
    match socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(TcpStream::from(socket)),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::TcpListener;
    use std::os::fd::AsFd;
    use std::time::Duration;

    use super::super::{NoFaults, receive, send, wait};
    use super::*;

    #[test]
    fn a_socket_that_can_be_sent_to_is_connected_or_says_why_it_is_not() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let socket = connect_to(listener.local_addr().unwrap()).unwrap();
            assert!(wait(&[(socket.as_fd(), true)], Duration::from_secs(60), &NoFaults).unwrap());
            assert_eq!(send(&socket, b"x", None, &NoFaults).unwrap(), 1);
            let (other, _) = listener.accept().unwrap();
            assert!(wait(&[(other.as_fd(), false)], Duration::from_secs(60), &NoFaults).unwrap());
            assert_eq!(receive(&other, &mut [0; 4], &NoFaults).unwrap().unwrap().bytes, 1);
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        match connect_to(address) {
            Ok(socket) => {
                assert!(wait(&[(socket.as_fd(), true)], Duration::from_secs(60), &NoFaults).unwrap());
                assert!(receive(&socket, &mut [0; 4], &NoFaults).is_err());
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionRefused),
        }
    }
}
