"""The lease of a run on its place in a store, which keeps two living runs from uploading to one prefix.

    leases/000000000007.json    its holder, and how often it was renewed; the highest number is valid

It is taken by creating the object of the next number, which succeeds for only one process, renewed by writing the
object again, and released by a final write. No lease is deleted: a number that was free again could be created by a
process whose listing is older than its successor. A run that finds a lease waits to see whether it is renewed, which
means that its holder is alive. Clocks of different machines are compared only for a lease that was not renewed for
many times its duration.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from verl.checkpoint.commit.fencing import LockHolder, is_alive
from verl.checkpoint.remote.commit_log import DIGITS
from verl.errors import ObjectNotFound, StorageError
from verl.storage.config import Storage
from verl.storage.store import ObjectStore
from verl.utils.external_input import ExternalInputError, parse_as

LEASES = "leases/"
LEASE_KEY = re.compile(rf"{LEASES}(\d{{{DIGITS}}})\.json")
LIMIT_BYTES, PADDED_BYTES = 2**20, 1024
CHANGING_BYTES = 256  # at most, of what a renewal changes
RENEW_EVERY_S = 10.0
LEASE_S = 60.0  # not renewed for so long, its run is taken for dead
CERTAINLY_OVER_S = 1800.0  # by the clock, beyond what clocks of machines differ in
LOOK_EVERY_S = 0.5
END_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LeaseRecord(LockHolder):
    """Content of a lease object.

    Args:
        machine: the boot and the process namespace that `pid` belongs to.
        renewals: how often it was renewed.
        renewed_at: time of the last renewal, by the holder's clock.
        is_released: the run has ended.
    """

    machine: str = ""
    renewals: int = 0
    renewed_at: float = 0.0
    is_released: bool = False

    @property
    def is_known_dead(self) -> bool:
        """Whether its holder is a process of this machine that has ended, or this process.

        Containers that see each other's processes, and a machine that was renamed, may have several host names.
        """
        here = socket.gethostname()
        return bool(self.machine) and self.machine == machine_id() and not is_alive(replace(self, host=here))


class StoreLease:
    """The lease of one run on one place of a store.

    Args:
        storage: the location.
        holder: this run.
        number: of a lease that another process of this run has taken.
    """

    def __init__(self, storage: Storage, holder: LockHolder, number: int | None = None):
        self.storage, self.holder, self.number = storage, holder, number
        self._own = LeaseRecord(**asdict(holder), machine=machine_id())
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, wait_s: float = LEASE_S) -> LeaseRecord | None:
        """Take the lease. Returns the holder if its run is alive, and None on success.

        Raises:
            StorageError: the store does not answer, or refuses.
        """
        with self.storage.connect() as store:
            while True:
                number, current = newest_lease(store)
                if current is not None and _lives(store, number, current, wait_s):
                    return current
                if store.create(_lease_key(number + 1), self._data()):
                    self.number = number + 1
                    return None

    def keep(self) -> None:
        """Renew it periodically in a thread, until `stop`."""
        if self.number is not None and self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._renew_all_the_time, name="store lease", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop renewing, because another process of the run does or the run ends. Does not wait."""
        self._over.set()

    def release(self) -> None:
        """Release it; if the store does not answer, the lease expires. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout=END_TIMEOUT_S)
        number, self.number = self.number, None
        if number is None:
            return
        self._own = replace(self._own, is_released=True)
        with suppress(StorageError), replace(self.storage, retries=0).connect() as store:
            if newest_lease(store)[0] == number:
                store.put(_lease_key(number), self._data())

    def renew(self, store: ObjectStore) -> bool:
        """Renew the lease once; returns whether it still belongs to this run.

        Raises:
            StorageError: the store does not answer.
        """
        number = self.number  # `release` may run meanwhile
        assert number is not None, "a lease is renewed after it was taken"
        if newest_lease(store)[0] > number:
            return False
        store.put(_lease_key(number), self._data())
        return True

    def _renew_all_the_time(self) -> None:
        with replace(self.storage.hasty, retries=0).connect() as store:  # one request without an answer costs no lease
            while True:
                try:
                    if self.number is None or not self.renew(store):
                        return  # the next record of the log says so
                except StorageError as error:
                    log.info("the lease on %s could not be renewed: %s", self.storage.address, error)
                if self._over.wait(RENEW_EVERY_S):
                    return

    def _data(self) -> bytes:
        self._own = replace(self._own, renewals=self._own.renewals + 1, renewed_at=time.time())
        line, constant = json.dumps(asdict(self._own)).encode(), json.dumps(asdict(self.holder)).encode()
        size = len(constant) + len(self._own.machine) + CHANGING_BYTES
        return line.ljust(-(-size // PADDED_BYTES) * PADDED_BYTES)  # constant length, for concurrent readers


def newest_lease(store: ObjectStore) -> tuple[int, LeaseRecord | None]:
    """Number and content of the current lease; 0 if there is none."""
    numbers = [int(match[1]) for stored in store.list(LEASES) if (match := LEASE_KEY.fullmatch(stored.key))]
    number = max(numbers, default=0)
    return number, _read(store, number) if number else None


def living_holder(storage: Storage, wait_s: float) -> LeaseRecord | None:
    """The run that holds the lease, if a renewal was seen within `wait_s`; does not take the lease."""
    with storage.connect() as store:
        number, current = newest_lease(store)
        return current if current is not None and _lives(store, number, current, wait_s) else None


def machine_id() -> str:
    """An id that is equal for two processes that can see each other's process ids."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _lives(store: ObjectStore, number: int, found: LeaseRecord, wait_s: float) -> bool:
    """Whether the holder of a lease is alive, that is, renews it."""
    if found.is_released or found.is_known_dead:
        return False
    if found.machine and found.machine == machine_id():
        return True
    if time.time() - found.renewed_at > CERTAINLY_OVER_S:
        return False
    if wait_s > RENEW_EVERY_S:
        log.warning("%s is held by %s: waiting up to %.0f s to see whether it is alive", store.address, found, wait_s)
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        time.sleep(LOOK_EVERY_S)
        later, now = newest_lease(store)
        if later != number or now is None:
            return now is not None and not now.is_released
        if now.is_released:
            return False
        if now != found:  # the count alone begins again with the process that renews
            return True
    return False


def _read(store: ObjectStore, number: int) -> LeaseRecord | None:
    """Read a lease; an unreadable one counts as released."""
    try:
        size = store.size(_lease_key(number))
        return parse_as(LeaseRecord, store.get(_lease_key(number), 0, size)) if size <= LIMIT_BYTES else None
    except (ObjectNotFound, ExternalInputError):
        return None


def _lease_key(number: int) -> str:
    return f"{LEASES}{number:0{DIGITS}d}.json"
