"""The pipe between the two processes: whole messages in order, and a sender that never waits."""

from __future__ import annotations

import multiprocessing
import random
import time

import pytest

from lastrow.server.channel import Channel


def pair() -> tuple[Channel, Channel]:
    one, other = multiprocessing.Pipe()
    return Channel(one), Channel(other)


def test_messages_of_all_sizes_come_whole_and_in_order() -> None:
    """The reader comes late, and goes on while more is sent: some messages go out at once, some in two parts, some with the thread."""
    sender, reader = pair()
    draw = random.Random(0)
    messages = [draw.randbytes(draw.choice([0, 1, 8, 4_000, 150_000, 3_000_000])) for _ in range(60)]
    for message in messages[:30]:
        sender.send(message)
    for number, message in enumerate(messages):
        assert reader.receive() == message
        if number < 30:
            sender.send(messages[30 + number])
    assert not reader.poll()
    sender.close(timeout=5)
    reader.close(timeout=5)


def test_a_full_pipe_holds_up_no_sender() -> None:
    sender, reader = pair()
    message = bytes(2**20)
    began = time.monotonic()
    for _ in range(20):
        sender.send(message)
    assert time.monotonic() - began < 5  # copies of 20 MiB; a pipe holds some hundred KiB
    for _ in range(20):
        assert reader.receive() == message
    sender.close(timeout=5)
    with pytest.raises(EOFError):
        reader.receive()


def test_the_end_of_the_peer_is_told_to_readers_and_not_to_senders() -> None:
    sender, reader = pair()
    sender.send(b"last")
    sender.close(timeout=5)
    assert reader.receive() == b"last" and reader.poll()
    reader.send(b"nobody reads this")
    reader.send(bytes(2**20))
    with pytest.raises(EOFError):
        reader.receive()
    reader.close(timeout=5)
