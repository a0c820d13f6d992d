"""Channel: one end of a connection, with messages in and out, bounded in both directions.

Sending never waits for the other side unless asked to: what the socket does not take at once is queued, at most
MAX_QUEUED_BYTES, and sent by a thread of the channel's own. A peer that does not read for send_timeout_s, or lets the
queue fill up, loses its connection and harms nobody else.

Thread safety: one thread may receive; any thread may send or close.
"""

from __future__ import annotations

import array
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from tierkv.agent.protocol import HEADER_BYTES, MAX_BODY_BYTES, Header, ProtocolError, decode_header
from tierkv.errors import TierKVError

log = logging.getLogger("tierkv.agent")

MAX_QUEUED_BYTES = 2 * MAX_BODY_BYTES
_BUFFER_BYTES = 4 << 20
_FD_BYTES = array.array("i").itemsize
_MAX_PIECES = 64


class Disconnected(TierKVError):
    """The connection is gone: the other side closed it, did not read, or was too slow."""


class Channel:
    """A connected Unix stream socket that carries messages. Owns the socket."""

    def __init__(self, connection: socket.socket, *, send_timeout_s: float) -> None:
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)  # the kernel cuts it to its limit
        self._socket = connection
        self._send_timeout_s = send_timeout_s
        self._lock = threading.Lock()
        self._queued: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._sender: threading.Thread | None = None
        self._closed = False

    # Receiving

    def receive(
        self, *, wait_s: float | None, message_s: float, max_fds: int = 0
    ) -> tuple[Header, memoryview, list[int]]:
        """The next message: (header, body, the at most `max_fds` file descriptors that came with it).

        Waits `wait_s` for it to begin (None: until the channel closes) and `message_s` for the rest of it. Raises
        Disconnected or ProtocolError; then the channel is of no more use.
        """
        start = bytearray(HEADER_BYTES)
        fds: list[int] = []
        try:
            deadline_s = None if wait_s is None else time.monotonic() + wait_s
            self._fill(memoryview(start), deadline_s, message_s, fds, max_fds)
            header = decode_header(start)
            # Not zeroed: memory for bytes that are announced and never come is never touched.
            body = np.empty(header.body_bytes, np.uint8).data
            self._fill(body, time.monotonic() + message_s, message_s, fds, max_fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return header, body, fds

    def _fill(
        self, view: memoryview, deadline_s: float | None, message_s: float, fds: list[int], max_fds: int
    ) -> None:
        filled = 0
        while filled < len(view):
            try:
                count = self._receive_some(view[filled:], fds, max_fds)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline_s)
                continue
            except OSError as error:
                raise Disconnected(f"the connection broke: {error.strerror}") from error
            if count == 0:
                raise Disconnected("the other side closed the connection")
            if filled == 0 and deadline_s is None:
                deadline_s = time.monotonic() + message_s
            filled += count

    def _receive_some(self, view: memoryview, fds: list[int], max_fds: int) -> int:
        """Fills some of `view`. Descriptors beyond max_fds are refused before they can use this process's up."""
        room = max_fds - len(fds)
        # Without room for them the kernel lets no descriptor in.
        count, ancillary, flags, _ = self._socket.recvmsg_into(
            [view], socket.CMSG_SPACE(room * _FD_BYTES) if room else 0, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % _FD_BYTES])
                fds.extend(received)
        if flags & socket.MSG_CTRUNC or len(fds) > max_fds:  # the kernel rounds the room up
            raise ProtocolError("the other side sent file descriptors that do not belong to the message")
        return count

    def _wait(self, events: int, deadline_s: float | None) -> None:
        """Waits for the socket, without the GIL; Disconnected at the deadline or when it is closed."""
        poll = select.poll()
        if self._closed:
            raise Disconnected("the connection was closed")
        poll.register(self._socket, events)
        left_ms = None if deadline_s is None else max(0.0, (deadline_s - time.monotonic()) * 1000)
        if not poll.poll(left_ms):
            raise Disconnected("the other side is too slow")

    # Sending

    def send(
        self, buffers: Sequence[bytes | memoryview], *, fds: Sequence[int] = (), patient: bool = False
    ) -> None:
        """Sends a message. patient: on this thread, waiting send_timeout_s at most; else never waiting.

        Disconnected when the connection is gone or the other side does not read.
        """
        pieces = deque(memoryview(piece) for piece in buffers if len(piece))
        deadline_s = time.monotonic() + self._send_timeout_s
        with self._lock:
            if self._closed:
                raise Disconnected("the connection was closed")
            if not self._queued:
                self._send_some(pieces, fds)
                while pieces and patient:
                    self._wait_to_send(deadline_s)
                    self._send_some(pieces, ())
            if not pieces:
                return
            size = sum(len(piece) for piece in pieces)
            if self._queued_bytes + size > MAX_QUEUED_BYTES:
                self._break()
                raise Disconnected("the other side does not read its messages")
            self._queued.extend(memoryview(bytes(piece)) for piece in pieces)
            self._queued_bytes += size
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_queued, name="tierkv-send", daemon=True)
                self._sender.start()

    def _send_some(self, pieces: deque[memoryview], fds: Sequence[int]) -> None:
        """Sends what the socket takes now and removes it from `pieces`. Under the lock."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while pieces:
            first = [pieces[position] for position in range(min(len(pieces), _MAX_PIECES))]
            try:
                sent = self._socket.sendmsg(first, ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                self._break()
                raise Disconnected(f"the connection broke: {error.strerror}") from error
            ancillary = []
            while sent:
                if sent < len(pieces[0]):
                    pieces[0] = pieces[0][sent:]
                    break
                sent -= len(pieces.popleft())

    def _wait_to_send(self, deadline_s: float) -> None:
        try:
            self._wait(select.POLLOUT, deadline_s)
        except Disconnected:
            self._break()
            raise

    def _send_queued(self) -> None:
        """The sender's thread: ends when the queue is empty."""
        deadline_s = time.monotonic() + self._send_timeout_s
        while True:
            try:
                with self._lock:
                    if self._closed:
                        return
                    self._send_some(self._queued, ())
                    left = sum(len(piece) for piece in self._queued)
                    if left < self._queued_bytes:
                        deadline_s = time.monotonic() + self._send_timeout_s
                    self._queued_bytes = left
                    if not left:
                        self._sender = None
                        return
                self._wait(select.POLLOUT, deadline_s)
            except Disconnected as reason:
                log.info("closing a connection: %s", reason)
                self.close()
                return

    # Ending

    def is_open(self) -> bool:
        """Whether neither side has ended the connection; asks the kernel, so that nothing is seen late."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLRDHUP)
            ended = bool(poll.poll(0))
        except (OSError, ValueError):  # closed
            return False
        return not ended and not self._closed  # in this order: the descriptor may have been closed meanwhile

    def _break(self) -> None:
        """Makes both directions end; the descriptor itself is closed by close(). Under the lock."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is gone already

    def interrupt(self) -> None:
        """Ends both directions: a thread that receives gets Disconnected. The socket stays to be closed."""
        with self._lock:
            self._break()

    def close(self) -> None:
        """Ends the connection. Call it from the receiving thread, or after it has ended. Idempotent."""
        self.interrupt()
        sender = self._sender
        if sender is not None and sender is not threading.current_thread():
            sender.join(self._send_timeout_s)
        if sender is not threading.current_thread():
            self._socket.close()
