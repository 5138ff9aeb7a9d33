"""How agents on several hosts find the driver: its address and a key in torchrun's store, and authentication.

driver   DriverListener ──addresses, port, key──> store of torchrun ──> agent of rank r     DriverSearch
         <──────────── two connections, each opened by a proof that both sides have the key ──────────

Messages are pickles, which must not be read from strangers: the store is as open as that of torch.distributed, whose
users trust their network, but a connection by itself proves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from verl.cluster.network import addresses_towards
from verl.errors import VerlError
from verl.utils.child_process.channel import Channel, ChannelClosed
from verl.utils.torchrun import TorchrunPlace

DRIVER_KEY, ENDED = "verl/driver", b"ended"
LOOK_EVERY_S = 0.25
STORE_TIMEOUT_S = 30.0
HANDSHAKE_TIMEOUT_S = 5.0
HOST_TIMEOUT_S = 20.0  # after which a host that does not answer counts as lost
NONCE_BYTES, PROOF_BYTES = 16, 32
_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


@dataclass(frozen=True)
class DriverAddress:
    """Where the driver listens.

    Attributes:
        addresses: of its host, those first from which others may reach it.
        key: that both sides prove to have.
    """

    addresses: tuple[str, ...]
    port: int
    key: bytes

    def connect(self) -> Channel:
        """A connection to the driver.

        Raises:
            ConnectionError: no process with the key listens at any of its addresses.
        """
        for address in self.addresses:
            with contextlib.suppress(OSError):
                end = socket.create_connection((address, self.port), timeout=HANDSHAKE_TIMEOUT_S)
                try:
                    _prove_as_agent(end, self.key)
                except OSError:
                    end.close()
                    raise
                return watched_channel(end)
        raise ConnectionError(f"the driver does not answer at {', '.join(self.addresses)}, port {self.port}")


def _store(place: TorchrunPlace) -> Any:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - its public place

    return TCPStore(
        place.store_host,
        place.store_port,
        is_master=place.rank == 0 and not place.hosts_store,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
    )


class DriverSearch:
    """An agent's view of the store: the drivers that listen, one after the other.

    Raises:
        ConnectionError: the store does not answer.
    """

    def __init__(self, place: TorchrunPlace):
        try:
            self._store = _store(place)
        except RuntimeError as error:
            raise ConnectionError(f"torchrun's store does not answer: {error}") from error
        self._seen: bytes | None = None

    def next(self) -> DriverAddress | None:
        """The next driver that listens, waited for as long as there is a store; None once the last has ended.

        Raises:
            ConnectionError: the store is gone, and the driver with it.
        """
        while True:
            try:
                announced = self._store.get(DRIVER_KEY) if self._store.check([DRIVER_KEY]) else None
            except RuntimeError as error:
                raise ConnectionError(f"torchrun's store is gone: {error}") from error
            if announced == ENDED:
                return None
            if announced is not None and announced != self._seen:
                self._seen = announced
                found = json.loads(announced)
                return DriverAddress(tuple(found["addresses"]), int(found["port"]), bytes.fromhex(found["key"]))
            time.sleep(LOOK_EVERY_S)


def say_ended(place: TorchrunPlace) -> None:
    """Let agents that wait for the driver end: there is nothing more to do."""
    with contextlib.suppress(RuntimeError, OSError):
        _store(place).set(DRIVER_KEY, ENDED)


class DriverListener:
    """The driver's open door, published in the store."""

    def __init__(self, place: TorchrunPlace):
        self.address = DriverAddress(tuple(addresses_towards(place.store_host)), 0, secrets.token_bytes(32))
        self._socket = socket.create_server(("", 0), backlog=2 * place.world_size)
        port = self._socket.getsockname()[1]
        self.address = DriverAddress(self.address.addresses, port, self.address.key)
        announced = {"addresses": self.address.addresses, "port": port, "key": self.address.key.hex()}
        try:
            self._store = _store(place)  # kept: it may be served by this process
            self._store.set(DRIVER_KEY, json.dumps(announced).encode())
        except RuntimeError as error:
            self._socket.close()
            where = f"{place.store_host}:{place.store_port}"
            raise VerlError(f"torchrun's store at {where} does not answer: {error}") from error

    def connections(self, timeout_s: float) -> Iterator[Channel | None]:
        """Those that come and have the key, as they come; None each time that a while has passed without one."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            self._socket.settimeout(LOOK_EVERY_S)
            try:
                found, _ = self._socket.accept()
            except TimeoutError:
                yield None
                continue
            try:
                found.settimeout(HANDSHAKE_TIMEOUT_S)
                _prove_as_driver(found, self.address.key)
            except OSError:  # a stranger
                found.close()
                continue
            yield watched_channel(found)

    def close(self) -> None:
        """Stop accepting connections."""
        self._socket.close()


def watched_channel(end: socket.socket) -> Channel:
    """A connection that breaks when the other host does not answer any more."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, int(HOST_TIMEOUT_S / 4))
    limits = {"TCP_KEEPIDLE": every, "TCP_KEEPINTVL": every, "TCP_KEEPCNT": 3}
    for name, value in limits.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Channel(end, stuck_s=None)


def is_host_lost(error: BaseException) -> bool:
    """Whether a connection broke because the other host does not answer, and not because its process ended."""
    cause = error.__cause__ if isinstance(error, ChannelClosed) else error
    return isinstance(cause, OSError) and cause.errno in _LOST


def _prove_as_agent(end: socket.socket, key: bytes) -> None:
    own = secrets.token_bytes(NONCE_BYTES)
    end.sendall(own)
    announced = _exactly(end, NONCE_BYTES + PROOF_BYTES)
    nonce, proof = announced[:NONCE_BYTES], announced[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"driver", own, nonce)):
        raise ConnectionError("it is not the driver")
    end.sendall(_proof(key, b"agent", own, nonce))


def _prove_as_driver(end: socket.socket, key: bytes) -> None:
    theirs = _exactly(end, NONCE_BYTES)
    own = secrets.token_bytes(NONCE_BYTES)
    end.sendall(own + _proof(key, b"driver", theirs, own))
    if not hmac.compare_digest(_exactly(end, PROOF_BYTES), _proof(key, b"agent", theirs, own)):
        raise ConnectionError("it is not an agent of this run")


def _proof(key: bytes, side: bytes, *nonces: bytes) -> bytes:
    return hmac.new(key, side + b"".join(nonces), hashlib.sha256).digest()


def _exactly(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (part := end.recv(size - len(found))):
            raise ConnectionError("hung up")
        found += part
    return found
