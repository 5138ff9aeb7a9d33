"""Letters between the driver and a worker: small ones through a socket, the bytes of tensors through shared memory.

    Post ──pack──> Letter ──Mailbox.send──> socket: pickle, where the bytes lie ──> Mailbox.receive ──> the value
                     └──bytes──> shared block ─────────────────────────────────────> its tensors lie here

The receiver says in his next letter which blocks he has done with, and the sender uses them again. A block is passed
on as an open file, so nothing with a name is left behind, whoever is killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from verl.cluster.memory import ALIGNMENT, Block, Blocks, lease, mapped
from verl.cluster.parcel import TakenRows, unwrap, wrap

SMALL = 2**15  # bytes: tensors that are less together go through the socket


@dataclass(frozen=True)
class Letter:
    """A value that is ready to be sent, to as many as it was packed for.

    Attributes:
        head: see `Parcel`.
        inline: the bytes of tensors, where they are few.
        block, spans: where else they lie, and there from where to where.
        room: memory that the receivers may write to.
    """

    head: bytes
    inline: list[bytes]
    block: Block | None = None
    spans: tuple[tuple[int, int], ...] = ()
    room: Block | None = None


@dataclass(frozen=True)
class _Envelope:
    """What goes through the socket; an open file follows for each block that is new to the receiver."""

    head: bytes
    inline: list[bytes]
    block: int | None
    spans: tuple[tuple[int, int], ...]
    room: int | None
    new: tuple[tuple[int, int], ...]  # numbers and sizes
    done_with: tuple[int, ...]  # blocks of the receiver's
    gone: tuple[int, ...]  # blocks of the sender's


class Post:
    """Packs what one process sends, into blocks that its receivers share."""

    def __init__(self):
        self.blocks = Blocks(shared=True)

    def pack(self, value: Any, receivers: int = 1, room: Block | None = None) -> Letter:
        """A letter to be sent to exactly so many; what it was made of may change from then on."""
        head, buffers = wrap(value)
        if sum(buffer.nbytes for buffer in buffers) < SMALL:
            return Letter(head, [_bytes(buffer) for buffer in buffers], room=room)
        spans, end = [], 0
        for buffer in buffers:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + buffer.nbytes
            spans.append((start, end))
        block = self.blocks.take(end, receivers)
        area = np.frombuffer(block.memory, np.uint8)
        for buffer, (start, stop) in zip(buffers, spans, strict=True):
            _write(buffer, area[start:stop])
        return Letter(head, [], block, tuple(spans), room)

    def close(self) -> None:
        """Let go of the memory."""
        self.blocks.close()


class Mailbox:
    """One end of a connection between two processes of this machine.

    One thread sends, and one receives; they may be two.

    Args:
        post: packs what is sent here.
    Attributes:
        room: that came with the letter received last, to be let go of before the answer is sent; None if none did.
    """

    room: np.ndarray | None = None

    def __init__(self, connection: Connection, post: Post):
        self._connection, self._blocks = connection, post.blocks
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._known: set[int] = set()  # blocks of ours that the other side has open
        self._theirs: dict[int, mmap.mmap] = {}
        self._done_with: deque[int] = deque()

    def send(self, letter: Letter) -> None:
        """Send a letter.

        Raises:
            OSError: the other side is gone.
        """
        known = self._known
        gone = tuple(known - self._blocks.numbers())
        known.difference_update(gone)
        block, room = (None if one is None else one.number for one in (letter.block, letter.room))
        new = [one for one in (letter.block, letter.room) if one is not None and one.number not in known]
        sizes = tuple((one.number, one.size) for one in new)
        done_with = tuple(self._done_with.popleft() for _ in range(len(self._done_with)))
        self._connection.send_bytes(
            pickle.dumps(_Envelope(letter.head, letter.inline, block, letter.spans, room, sizes, done_with, gone))
        )
        for one in new:
            if one.descriptor is None:
                raise OSError("the memory of a letter was let go of: the run is being closed")
            socket.send_fds(self._socket, [b"."], [one.descriptor])
            known.add(one.number)

    def receive(self) -> Any:
        """The value of the next letter; its tensors may be kept as long as one likes.

        Raises:
            EOFError, OSError: the other side is gone.
        """
        envelope: _Envelope = pickle.loads(self._connection.recv_bytes())
        for number in envelope.done_with:
            self._blocks.give_back(number)
        for number in envelope.gone:
            self._theirs.pop(number, None)
        for number, size in envelope.new:
            self._theirs[number] = self._opened(size)
        self.room = None if envelope.room is None else self._lease(envelope.room)
        if envelope.block is None:
            return unwrap((envelope.head, list(map(bytearray, envelope.inline))))
        area = self._lease(envelope.block)
        return unwrap((envelope.head, [area[start:end] for start, end in envelope.spans]))

    def close(self) -> None:
        """Let go of the connection."""
        self._socket.close()
        self._connection.close()

    def _lease(self, number: int) -> np.ndarray:
        """One of the sender's blocks, which he is told of once nothing that lies on it is left."""
        return lease(self._theirs[number], lambda: self._done_with.append(number))

    def _opened(self, size: int) -> mmap.mmap:
        """The memory of a file that comes next."""
        _, files, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not files:
            raise EOFError("the other side hung up in the midst of a letter")
        try:
            return mapped(files[0], size)
        finally:
            for file in files:
                os.close(file)


def quietly_send(mailbox: Mailbox, letter: Letter) -> None:
    """Send a letter, to somebody who may be gone: who listens to him will notice."""
    with contextlib.suppress(OSError):
        mailbox.send(letter)


def _write(buffer: np.ndarray | TakenRows, into: np.ndarray) -> None:
    if isinstance(buffer, TakenRows):
        buffer.write(into)
    else:
        into[:] = buffer


def _bytes(buffer: np.ndarray | TakenRows) -> bytes:
    if isinstance(buffer, TakenRows):
        into = np.empty(buffer.nbytes, np.uint8)
        buffer.write(into)
        return into.tobytes()
    return buffer.tobytes()
