"""One end of the pipe between the server and the engine: whole messages, and sends that never wait.

A pipe with msgspec took a third of the processor time of zmq's asyncio sockets for the same messages (docs/server.md)."""

from __future__ import annotations

import os
import queue
import select
import socket
import struct
import threading
from multiprocessing.connection import Connection

_LENGTH = struct.Struct("!Q")


class Channel:
    """Bytes in order. What the pipe has room for is written by the sender, at once; the rest by a thread: a full pipe holds up the other
    side's reader, never the sender. With the thread for every message each one waited for Python's lock, which a busy sender keeps for
    5 ms at a time (docs/server.md: what 256 clients saw).

    connection: of a duplex Pipe; it is closed, the channel has its own descriptor. One thread sends. The peer's end shows as EOFError in
    `receive`; what is sent after it is dropped."""

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        self._waiting = select.poll()
        self._waiting.register(self._socket, select.POLLIN)
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_queued = 0  # the sender's count and the writer's: the pipe is the sender's while they are equal
        self._num_written = 0
        self._writer = threading.Thread(target=self._write, name="lastrow-channel", daemon=True)
        self._writer.start()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        data = _LENGTH.pack(len(message)) + message
        if self._num_queued == self._num_written:
            try:
                data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except OSError:  # the peer is gone, or this end was closed
                return
        if data:
            self._num_queued += 1
            self._queue.put(data)

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether a message (or the end) is there, within `timeout` seconds."""
        return bool(self._waiting.poll(timeout * 1e3))

    def receive(self) -> bytes:
        """The next message. Raises EOFError when the peer is gone."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                more = self._socket.recv(count - len(data), socket.MSG_WAITALL)
            except OSError:
                more = b""
            if not more:
                raise EOFError
            data = data + more if data else more
        return data

    def close(self, timeout: float) -> None:
        """Send what waits, for at most `timeout` seconds, and close."""
        self._queue.put(None)
        self._writer.join(timeout)
        self._socket.close()

    def _write(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                self._socket.sendall(data)
            except OSError:  # as in `send`
                return
            self._num_written += 1
