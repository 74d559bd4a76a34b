"""One end of the pipe between the server and the engine: whole messages, and sends that never wait.

A pipe with msgspec took a third of the processor time of zmq's asyncio sockets for the same messages (docs/server.md)."""

from __future__ import annotations

import queue
import threading
from multiprocessing.connection import Connection


class Channel:
    """Bytes in order, by a thread that writes: a full pipe holds up the other side's reader, never the sender.

    The peer's end shows as EOFError in `receive`; what is sent after it is dropped."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="lastrow-channel", daemon=True)
        self._writer.start()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: bytes) -> None:
        self._queue.put(message)

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether a message (or the end) is there, within `timeout` seconds."""
        return self._connection.poll(timeout)

    def receive(self) -> bytes:
        """The next message. Raises EOFError when the peer is gone."""
        try:
            return self._connection.recv_bytes()
        except OSError as error:
            raise EOFError from error

    def close(self, timeout: float) -> None:
        """Send what waits, for at most `timeout` seconds, and close."""
        self._queue.put(None)
        self._writer.join(timeout)
        self._connection.close()

    def _write(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._connection.send_bytes(message)
            except (OSError, ValueError):  # the peer is gone, or this end was closed
                return
