"""Who may write to a remote store: the commit log of numbered records, and the lease of a run on its place.

Claims of trainers and checkpoints are both records of the log, each created by a conditional put. A writer can create
only the number after the last record, so it has read all earlier records; a trainer whose claim was superseded
therefore finds out when it creates the record that would have published its checkpoint.

The lease keeps two living runs from uploading to one prefix:

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from verl.checkpoint.commit.fencing import LockHolder, is_alive
from verl.checkpoint.core.manifest import DIGEST, MANIFEST_LIMIT_BYTES, utc_now
from verl.checkpoint.read.discovery import RESERVED
from verl.errors import CheckpointFenced, ConfigError, ObjectDamaged, ObjectNotFound, StorageError
from verl.storage.config import Storage
from verl.storage.store import ObjectStore
from verl.utils.external_input import (
    ExternalInputError,
    checked_as,
    checked_name,
    parse_as,
    parse_mapping,
    whole_number,
)

LOG = "log/"
DIGITS = 12
KEY = re.compile(rf"{LOG}(\d{{{DIGITS}}})\.json")
UNLISTED = 1000  # records that a listing may not show yet
RECORD_BYTES = 65_536
READERS = 8
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
class LogRecord:
    """One line of the log.

    Args:
        number: from 1.
        kind: a trainer's claim on the tier, or a checkpoint.
        claim: of the trainer that wrote it; empty for a manual push.
        by: the writer, for information.
        manifest: digest of the checkpoint's manifest.
        manifest_bytes: its size.
    """

    number: int
    kind: Literal["claim", "checkpoint"]
    claim: str = ""
    by: str = ""
    at: str = ""
    name: str = ""
    manifest: str = ""
    manifest_bytes: int = 0
    sequence: int = 0
    step: int = 0


class CommitLog:
    """The records of one tier.

    Args:
        claim: of this trainer, taken by `take_claim`; empty: append without being the owner of the tier.
    """

    def __init__(self, store: ObjectStore, claim: str = ""):
        self.store, self.claim = store, claim
        self._last = 0  # number of the last record that was looked at
        self._records: dict[int, LogRecord] = {}

    def records(self) -> list[LogRecord]:
        """All records in order. Requests new ones from the store, by number if its listing is delayed.

        Raises:
            StorageError: the store does not answer.
            ObjectDamaged: a record cannot be read.
        """
        listed = [stored.key for stored in self.store.list(LOG)]
        numbers = {int(match[1]) for key in listed if (match := KEY.fullmatch(key))}  # other objects are not records
        if max(numbers, default=0) > 2 * (len(numbers) + self._last) + UNLISTED:
            raise ObjectDamaged(f"{self.store.url(LOG)} lacks most of the records before {_key(max(numbers))}")
        missing = [number for number in range(1, max(numbers, default=0) + 1) if number not in self._records]
        with ThreadPoolExecutor(READERS) as readers:
            for record in readers.map(self._read, missing):
                if record is None:
                    raise ObjectDamaged(f"{self.store.url(LOG)} lacks a record among those that are there")
                self._records[record.number] = record
        self._last = max(self._last, *numbers, 0)
        while (record := self._read(self._last + 1)) is not None:  # not in the store's listing yet
            self._last += 1
            self._records[self._last] = record
        return [self._records[number] for number in sorted(self._records)]

    def take_claim(self) -> None:
        """Become the owner of the tier, unless this claim is already recorded; see `append`.

        Raises:
            CheckpointFenced: it is recorded and another claim followed it.
            ConfigError: the store replaces an object although the request forbids it.
        """
        assert self.claim, "a claim has a name"
        if any(record.kind == "claim" and record.claim == self.claim for record in self.records()):
            self._refuse_if_fenced()
            return
        number = self._create(kind="claim")
        if self.store.create(_key(number), b'{"kind": "probe"}\n'):
            self.store.put(_key(number), _line(self._records[number]))
            raise ConfigError(
                f"{self.store.address} replaces an object in spite of a conditional put: two trainers could publish "
                "over each other. Set conditional_put=false for it, and let one trainer alone use the prefix."
            )

    def append(self, **facts: Any) -> LogRecord:
        """Add the record of a checkpoint.

        Raises:
            CheckpointFenced: another trainer has claimed the tier since.
        """
        number = self._create(kind="checkpoint", **facts)
        return self._records[number]

    def _create(self, **facts: Any) -> int:
        """Create the next record. If another writer has created that number, its record is read first, which may
        raise."""
        while True:
            if facts["kind"] == "checkpoint":
                self._refuse_if_fenced()
            number = self._last + 1
            by = f"process {os.getpid()} on {socket.gethostname()}"
            at = utc_now()
            record = LogRecord(number=number, claim=self.claim, by=by, at=at, **facts)
            if self.store.create(_key(number), _line(record)):
                self._records[number], self._last = record, number
                return number
            other = self._read(number)
            assert other is not None, "it was refused because it is there"
            self._records[number], self._last = other, number

    def _refuse_if_fenced(self) -> None:
        claims = [self._records[number] for number in sorted(self._records) if self._records[number].kind == "claim"]
        if self.claim and claims and (record := claims[-1]).claim != self.claim:
            raise CheckpointFenced(
                f"{self.store.address} was taken over by {record.by} at {record.at}; this run no longer uploads "
                "there. Stop one of the two, or give this one its own storage.prefix"
            )

    def _read(self, number: int) -> LogRecord | None:
        try:
            size = self.store.size(_key(number))
            if size > RECORD_BYTES:
                raise ObjectDamaged(f"{self.store.url(_key(number))} is not a record of a log: it has {size} bytes")
            data = self.store.get(_key(number), 0, size)
        except ObjectNotFound:
            return None
        try:
            record = checked_as(LogRecord, {**parse_mapping(data), "number": number})
            if record.kind == "checkpoint":
                checked_name(record.name, RESERVED)
                if not DIGEST.fullmatch(record.manifest):
                    raise ExternalInputError(f"manifest: {record.manifest[:80]!r} is not a digest")
                whole_number(record.manifest_bytes, MANIFEST_LIMIT_BYTES)
                whole_number(record.sequence)
                whole_number(record.step)
            return record
        except ExternalInputError as error:
            raise ObjectDamaged(f"{self.store.url(_key(number))} is not a record of a log: {error}") from error


def _line(record: LogRecord) -> bytes:
    return json.dumps(asdict(record)).encode() + b"\n"


def _key(number: int) -> str:
    return f"{LOG}{number:0{DIGITS}d}.json"


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
    """The run that holds the lease, if a renewal was seen within `wait_s`; does not take the lease.

    Raises:
        StorageError: the store does not answer, or refuses.
    """
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
