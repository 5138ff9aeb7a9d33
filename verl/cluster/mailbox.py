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
    """

    head: bytes
    inline: list[bytes]
    block: Block | None = None
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class _Envelope:
    """What goes through the socket; an open file follows where the block is new to the receiver."""

    head: bytes
    inline: list[bytes]
    block: int | None
    size: int
    spans: tuple[tuple[int, int], ...]
    is_new: bool
    done_with: tuple[int, ...]  # blocks of the receiver's
    gone: tuple[int, ...]  # blocks of the sender's


class Post:
    """Packs what one process sends, into blocks that its receivers share."""

    def __init__(self):
        self.blocks = Blocks(shared=True)

    def pack(self, value: Any, receivers: int = 1) -> Letter:
        """A letter to be sent to exactly so many; what it was made of may change from then on."""
        head, buffers = wrap(value)
        if sum(buffer.nbytes for buffer in buffers) < SMALL:
            return Letter(head, [_bytes(buffer) for buffer in buffers])
        spans, end = [], 0
        for buffer in buffers:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + buffer.nbytes
            spans.append((start, end))
        block = self.blocks.take(end, receivers)
        area = np.frombuffer(block.memory, np.uint8)
        for buffer, (start, stop) in zip(buffers, spans, strict=True):
            _write(buffer, area[start:stop])
        return Letter(head, [], block, tuple(spans))

    def close(self) -> None:
        """Let go of the memory."""
        self.blocks.close()


class Mailbox:
    """One end of a connection between two processes of this machine.

    One thread sends, and one receives; they may be two.

    Args:
        post: packs what is sent here.
    """

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
        block, known = letter.block, self._known
        gone = tuple(known - self._blocks.numbers())
        known.difference_update(gone)
        number, size = (None, 0) if block is None else (block.number, block.size)
        is_new = number is not None and number not in known
        done_with = tuple(self._done_with.popleft() for _ in range(len(self._done_with)))
        self._connection.send_bytes(
            pickle.dumps(_Envelope(letter.head, letter.inline, number, size, letter.spans, is_new, done_with, gone))
        )
        if is_new:
            assert block is not None
            if block.descriptor is None:
                raise OSError("the memory of a letter was let go of: the run is being closed")
            socket.send_fds(self._socket, [b"."], [block.descriptor])
            known.add(block.number)

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
        if envelope.is_new:
            self._open(envelope)
        if envelope.block is None:
            return unwrap((envelope.head, list(map(bytearray, envelope.inline))))
        number = envelope.block
        area = lease(self._theirs[number], lambda: self._done_with.append(number))
        return unwrap((envelope.head, [area[start:end] for start, end in envelope.spans]))

    def close(self) -> None:
        """Let go of the connection."""
        self._socket.close()
        self._connection.close()

    def _open(self, envelope: _Envelope) -> None:
        _, files, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not files:
            raise EOFError("the other side hung up in the midst of a letter")
        assert envelope.block is not None
        try:
            self._theirs[envelope.block] = mapped(files[0], envelope.size)
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
