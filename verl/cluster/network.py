"""Addresses and interfaces of this machine, where processes of several machines meet."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def free_address(host: str) -> str:
    """Where processes can meet at an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return f"tcp://{f'[{host}]' if ':' in host else host}:{probe.getsockname()[1]}"


def interface_of(address: str) -> str:
    """The network interface of this machine that has an address of IPv4; empty where none does."""
    return next((name for name, own in _interfaces() if own == address), "")


def addresses_towards(host: str) -> list[str]:
    """Addresses of IPv4 of this machine: first that from which it reaches another one, its loopback last."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        found.append(probe.getsockname()[0])
    found += [own for _, own in _interfaces()]
    return sorted(dict.fromkeys([*found, LOOPBACK]), key=lambda own: own.startswith("127."))


def _interfaces() -> Iterator[tuple[str, str]]:
    """Those with an address of IPv4, and that."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                reply = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, name.encode()[:15].ljust(256, b"\0"))
                yield name, socket.inet_ntoa(reply[20:24])
