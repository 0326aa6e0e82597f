"""A fault between a sender and a receiver: the first rows that are told arrive with one wrong bit.

The relay passes a connection on, record by record (docs/transfer.md, and the head of `src/transfer/socket/record.rs`).
Over TCP rows are in the records: it flips a bit there. Over shared memory the receiver reads the sender's memory, so it
flips a bit of that while it holds the notice back, whose digests are computed by then. It flips the bit back while it
holds the receiver's answer back, before the sender reads the rows again. So the fault does not depend on timing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HELLO, HEADER = 48, 12
FRAME, NOTICE, ANSWER = 4, 3, 4
"""A record that has a frame, and two kinds of frames."""


@dataclass(frozen=True)
class Notice:
    """The first part that a notice tells."""

    layer: int
    first: int


class Ended(Exception):
    """One of the ends has closed its connection."""


class Relay:
    """Passes one connection on, with the fault."""

    def __init__(self, fabric: str, at: Path, flip: Callable[[Notice], None]) -> None:
        """Listens.

        Args:
            fabric: "tcp" or "shm".
            at: the path where it listens for "shm".
            flip: flips a bit of a part's rows in the sender's memory.
        """
        self.flip = flip
        self.flipped = False
        # A part whose rows in memory are wrong now.
        self.wrong: Notice | None = None
        if fabric == "tcp":
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.address = "127.0.0.1:{}".format(self.listener.getsockname()[1])
        else:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(str(at))
            self.listener.listen()
            self.address = str(at)
        self.sockets: list[socket.socket] = []
        self.threads: list[threading.Thread] = []

    def connect(self, to: str) -> str:
        """Passes the connection that comes on to a receiver; returns the address to which the sender connects."""
        if self.listener.family == socket.AF_UNIX:
            receiver = socket.socket(socket.AF_UNIX)
            receiver.connect(to)
        else:
            host, _, port = to.rpartition(":")
            receiver = socket.create_connection((host, int(port)))
            receiver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets.append(receiver)
        self._start(self._accept, receiver)
        return self.address

    def _accept(self, receiver: socket.socket) -> None:
        sender, _ = self.listener.accept()
        if sender.family != socket.AF_UNIX:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets.append(sender)
        self._start(self._pass, receiver, sender, self._from_receiver)
        self._pass(sender, receiver, self._from_sender)

    def _start(self, work: Callable[..., None], *given: object) -> None:
        self.threads.append(threading.Thread(target=work, args=given, daemon=True))
        self.threads[-1].start()

    def _pass(
        self, source: socket.socket, to: socket.socket, look: Callable[[int, bytes, bytearray], None]
    ) -> None:
        """Passes on what one end says, until either has gone."""
        with contextlib.suppress(Ended, OSError):
            hello, _ = received(source, HELLO)
            to.sendall(hello)
            while True:
                header, files = received(source, HEADER)
                own, more = received(source, int.from_bytes(header[:4], "little"))
                behind, last = received(source, int.from_bytes(header[4:8], "little"))
                look(header[8], bytes(own), behind)
                send(to, header + own + behind, files + more + last)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _from_sender(self, says: int, own: bytes, behind: bytearray) -> None:
        """Behind a frame's kind, the notice's number (8) and its count of parts (2), a part begins with its fence (16),
        layer and first token (4 each).
        """
        if self.flipped or says != FRAME or own[0] != NOTICE:
            return
        self.flipped = True
        if behind:
            behind[-1] ^= 1
        else:
            self.wrong = Notice(int.from_bytes(own[27:31], "little"), int.from_bytes(own[31:35], "little"))
            self.flip(self.wrong)

    def _from_receiver(self, says: int, own: bytes, _behind: bytearray) -> None:
        """The first answer is that to the first notice."""
        if self.wrong is not None and says == FRAME and own[0] == ANSWER:
            self.flip(self.wrong)
            self.wrong = None

    def close(self) -> None:
        """Ends the connection and the threads."""
        # A thread that waits in `accept` is woken by this.
        for end in (self.listener, *self.sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for end in (self.listener, *self.sockets):
            end.close()


def received(source: socket.socket, size: int) -> tuple[bytearray, list[int]]:
    """So many bytes, and the descriptors that came with them.

    Raises:
        Ended: the other end has closed.
    """
    found, files = bytearray(), list[int]()
    while len(found) < size:
        data, more, _, _ = socket.recv_fds(source, size - len(found), 4)
        files += more
        if not data:
            raise Ended
        found += data
    return found, files


def send(to: socket.socket, data: bytearray, files: list[int]) -> None:
    """Sends bytes, and with the first of them descriptors, which are closed here."""
    sent = 0
    if files:
        sent = socket.send_fds(to, [bytes(data)], files)
        for file in files:
            os.close(file)
    to.sendall(data[sent:])
