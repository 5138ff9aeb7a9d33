"""Messages between the trainer and the engine's process, over a socket pair that nobody else can reach."""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HEADER = struct.Struct("!Q")  # bytes of the message that follows
PART_BYTES = 1 << 20
LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Start:
    """First message.

    Attributes:
        sys_path: the trainer's, so that what can be imported there can be imported here.
        setting: of the engine.
    """

    sys_path: tuple[str, ...]
    setting: Any


@dataclass(frozen=True)
class Call:
    """A method of the engine, to be carried out."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What became of a call.

    Attributes:
        error: what was raised, in one line.
        trace: all of it.
        lost: which of the engine's processes ended and how, where the error comes of that.
    """

    result: Any = None
    error: str | None = None
    trace: str = ""
    lost: str | None = None


class MessageSocket:
    """One end. Neither side can be made to wait for ever by one that is stopped in the middle of a message.

    Objects go through the plain pickler: that of multiprocessing would send tensors as handles, to be fetched later.
    """

    def __init__(self, end: socket.socket):
        self._end = end
        end.setblocking(False)

    def send(self, message: Any, while_waiting: Callable[[int], object] = lambda moved: None) -> None:
        """Send an object.

        Args:
            while_waiting: is called at least every `LOOK_EVERY_S`, with the bytes that were moved since the last time;
                raises to give up, and then the socket is of no further use.
        Raises:
            OSError: the other side is gone.
        """
        content = pickle.dumps(message)
        for part in (HEADER.pack(len(content)), content):
            left = memoryview(part)
            while left:
                self._is_ready(select.POLLOUT, LOOK_EVERY_S)
                try:
                    moved = self._end.send(left[:PART_BYTES])
                except BlockingIOError:
                    moved = 0
                left = left[moved:]
                while_waiting(moved)

    def receive(self, while_waiting: Callable[[int], object] = lambda moved: None) -> Any:
        """The next object; see `send`.

        Raises:
            EOFError, OSError: the other side is gone.
        """
        (size,) = HEADER.unpack(self._exactly(HEADER.size, while_waiting))
        return pickle.loads(self._exactly(size, while_waiting))

    def has_message(self, within_s: float = 0.0) -> bool:
        """Whether a message, or the other side's end, is there; waits so long for it."""
        return self._is_ready(select.POLLIN, within_s)

    def close(self) -> None:
        """Hang up. May be called again."""
        self._end.close()

    def _is_ready(self, event: int, within_s: float) -> bool:
        poll = select.poll()  # select takes no file descriptors above 1023
        poll.register(self._end, event)
        return bool(poll.poll(within_s * 1000))

    def _exactly(self, size: int, while_waiting: Callable[[int], object]) -> bytearray:
        received = bytearray(size)
        left = memoryview(received)
        while left:
            self.has_message(LOOK_EVERY_S)
            try:
                moved = self._end.recv_into(left[:PART_BYTES])
            except BlockingIOError:
                moved = 0
            else:
                if not moved:
                    raise EOFError
            left = left[moved:]
            while_waiting(moved)
        return received
