"""A channel between a trainer and its writer process: objects, and files handed over as open descriptors.

What arrives is unpickled: the other end is a process of the same run, over a socket pair that nobody else can reach.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from verl.utils.progress import ProgressWatch

LENGTH_BYTES = 8
STUCK_S = 60.0  # the other end takes a message that was begun within this time, or counts as dead
LOOK_EVERY_S = 0.5  # how soon the end of the other process is noticed where a third one holds the socket open

_living: weakref.WeakSet[Channel] = weakref.WeakSet()


class ChannelClosed(ConnectionError):
    """The other process has hung up or ended."""


class Channel:
    """One end.

    Args:
        is_other_alive: asked now and then while nothing arrives: a forked child of the trainer may hold the socket
            open after the trainer is gone.
        stuck_s: how long sending may take.
    """

    def __init__(self, end: socket.socket, is_other_alive: Callable[[], bool], stuck_s: float = STUCK_S):
        self._socket, self._is_other_alive = end, is_other_alive
        end.settimeout(stuck_s)
        _living.add(self)

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send an object and perhaps an open file.

        Raises:
            ChannelClosed: nobody is there to receive it.
        """
        data = pickle.dumps(message)
        try:
            fds = [] if fd is None else [fd]
            sent = socket.send_fds(self._socket, [len(data).to_bytes(LENGTH_BYTES, "little")], fds)
            assert sent == LENGTH_BYTES
            self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None, watch: ProgressWatch | None = None) -> tuple[Any, int | None]:
        """The next object, and the file that came with it, which the caller closes.

        Args:
            watch: of the other process, which is waited for as long as it makes progress.
        Raises:
            ChannelClosed: the other end has hung up, or its process is gone.
            TimeoutError: nothing came in time.
        """
        self._wait(timeout_s, watch)
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, LENGTH_BYTES, 1)
            head += self._exactly(LENGTH_BYTES - len(head)) if head else b""
            if not head:
                raise ChannelClosed("hung up")
            data = self._exactly(int.from_bytes(head, "little"))
        except ChannelClosed:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        for fd in fds:
            os.set_inheritable(fd, False)
        return pickle.loads(data), fds[0] if fds else None

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _wait(self, timeout_s: float | None, watch: ProgressWatch | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = LOOK_EVERY_S if deadline is None else min(LOOK_EVERY_S, deadline - time.monotonic())
            if watch is not None:
                left = min(left, watch.timeout_s / 2)
            try:
                if wait([self._socket], max(left, 0)):  # unlike select, for any number of open files
                    return
            except (OSError, ValueError) as error:  # closed by another thread
                raise ChannelClosed(str(error)) from error
            if not self._is_other_alive():
                # What it said before it ended is still there.
                if wait([self._socket], 0):
                    return
                raise ChannelClosed("the process is gone")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"no answer for {timeout_s} s")
            if watch is not None and watch.is_overdue:
                raise TimeoutError(f"no progress for {watch.timeout_s:g} s")

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise ChannelClosed("hung up within a message")
            view = view[received:]
        return bytes(data)


def _forget_in_child() -> None:
    for channel in list(_living):
        channel.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
