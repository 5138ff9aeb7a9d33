"""Addresses and interfaces of this machine, where processes of several machines meet."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

LOOPBACK = "127.0.0.1"
ATTEMPTS, ATTEMPT_S = 6, 5.0  # a machine that accepts no connection in 30 s is lost
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def free_address(host: str) -> str:
    """An address of this machine with a free port, for a rendezvous."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return f"tcp://{f'[{host}]' if ':' in host else host}:{probe.getsockname()[1]}"


class ReachabilityWatch:
    """Calls `on_lost` once if a machine accepts no connection in 6 attempts of 5 seconds, in a thread of its own.

    The kernel of that machine answers, so that a process that is busy or suspended there counts as reachable, and so
    does a port that nobody listens at.

    Args:
        address: host and port.
    """

    def __init__(self, address: tuple[str, int], on_lost: Callable[[], object]):
        self._address, self._on_lost, self._is_closed = address, on_lost, threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="verl reachability").start()

    def close(self) -> None:
        self._is_closed.set()

    def _watch(self) -> None:
        failures = 0
        while failures < ATTEMPTS:
            began = time.monotonic()
            failures = 0 if self._is_reachable() else failures + 1
            if self._is_closed.wait(max(0.0, ATTEMPT_S - (time.monotonic() - began))):
                return
        self._on_lost()

    def _is_reachable(self) -> bool:
        try:
            socket.create_connection(self._address, timeout=ATTEMPT_S).close()
        except TimeoutError:
            return False
        except OSError as error:
            return error.errno not in _UNREACHABLE
        return True


def interface_of(address: str) -> str:
    """The network interface of this machine that has an address of IPv4; empty where none does."""
    return next((name for name, own in _interfaces() if own == address), "")


def _interfaces() -> Iterator[tuple[str, str]]:
    """Interfaces with an IPv4 address, and the address."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                reply = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, name.encode()[:15].ljust(256, b"\0"))
                yield name, socket.inet_ntoa(reply[20:24])
