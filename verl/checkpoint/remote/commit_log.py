"""The commit log of a remote store: numbered records, each created by a conditional put.

Claims of trainers and checkpoints are both records of the log. A writer can create only the number after the last
record, so it has read all earlier records; a trainer whose claim was superseded therefore finds out when it creates the
record that would have published its checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from verl.checkpoint.core.manifest import DIGEST, MANIFEST_LIMIT_BYTES, utc_now
from verl.checkpoint.read.discovery import RESERVED
from verl.errors import CheckpointFenced, ConfigError, ObjectDamaged
from verl.storage.store import ObjectStore
from verl.utils.external_input import ByteCount, ExternalInputError, checked_as, checked_name, parse_mapping

log = logging.getLogger(__name__)

LOG = "log/"
DIGITS = 12
KEY = re.compile(rf"{LOG}(\d{{{DIGITS}}})\.json")
RECORD_BYTES = 65_536
READERS = 8


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One line of the log.

    Args:
        kind: a trainer's claim on the tier, or a checkpoint; or the record is damaged, and may have been either.
        claim: of the trainer that wrote it; empty for a manual push.
        by: the writer, for information.
        manifest: digest of the checkpoint's manifest, of `manifest_bytes`.
    """

    number: int
    kind: Literal["claim", "checkpoint", "damaged"]
    claim: str = ""
    by: str = ""
    at: str = ""
    name: str = ""
    manifest: Annotated[str, Field(pattern=f"^({DIGEST.pattern})?$")] = ""
    manifest_bytes: Annotated[int, Field(ge=0, le=MANIFEST_LIMIT_BYTES)] = 0
    sequence: ByteCount = 0
    step: ByteCount = 0


class CommitLog:
    """The records of one tier.

    Args:
        claim: of this trainer, taken by `take_claim`; empty: append without being the owner of the tier.
    """

    def __init__(self, store: ObjectStore, claim: str = ""):
        self.store, self.claim = store, claim
        self._records: list[LogRecord] = []  # from number 1 on, as far as they were read

    def records(self) -> list[LogRecord]:
        """All records in order, damaged ones among them. Requests new ones from the store.

        Raises:
            StorageError: the store does not answer.
            ObjectDamaged: a record is missing.
        """
        listed = [stored.key for stored in self.store.list(LOG)]
        numbers = {int(match[1]) for key in listed if (match := KEY.fullmatch(key))}  # other objects are not records
        last = max(numbers, default=0)
        if len(numbers - {0}) < last:
            raise ObjectDamaged(f"{self.store.url(LOG)} lacks records before {_key(last)}")
        with ThreadPoolExecutor(READERS) as readers:
            self._records += readers.map(self._read, range(len(self._records) + 1, last + 1))
        return list(self._records)

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
        record = self._create(kind="claim")
        if self.store.create(_key(record.number), b'{"kind": "probe"}\n'):
            self.store.put(_key(record.number), _line(record))
            raise ConfigError(
                f"{self.store.address} replaces an object in spite of a conditional put: two trainers could publish "
                "over each other. Set conditional_put=false for it, and let one trainer alone use the prefix."
            )

    def append(self, **facts: Any) -> LogRecord:
        """Add the record of a checkpoint.

        Raises:
            CheckpointFenced: another trainer has claimed the tier since.
        """
        return self._create(kind="checkpoint", **facts)

    def _create(self, **facts: Any) -> LogRecord:
        """Create the next record, after reading those that others have created meanwhile, which may raise."""
        while True:
            if facts["kind"] == "checkpoint":
                self._refuse_if_fenced()
            number, by = len(self._records) + 1, f"process {os.getpid()} on {socket.gethostname()}"
            record = LogRecord(number=number, claim=self.claim, by=by, at=utc_now(), **facts)
            if self.store.create(_key(number), _line(record)):
                self._records.append(record)
                return record
            self._records.append(self._read(number))  # of another writer

    def _refuse_if_fenced(self) -> None:
        record = next((record for record in reversed(self._records) if record.kind != "checkpoint"), None)
        if self.claim and record is not None and record.claim != self.claim:
            raise CheckpointFenced(
                f"{self.store.address} was taken over by {record.by} at {record.at}; this run no longer uploads "
                "there. Stop one of the two, or give this one its own storage.prefix"
            )

    def _read(self, number: int) -> LogRecord:
        try:
            data = self.store.read(_key(number), RECORD_BYTES)
            record = checked_as(LogRecord, {**parse_mapping(data), "number": number})
            if record.kind == "checkpoint":
                checked_name(record.name, RESERVED)
                if not record.manifest:
                    raise ExternalInputError("manifest: there is no digest")
            return record
        except (ExternalInputError, ObjectDamaged) as error:
            log.error("NOT USING %s, which is not a record of a log: %s", self.store.url(_key(number)), error)
            return LogRecord(number=number, kind="damaged", by="a record that is damaged", at="an unknown time")


def _line(record: LogRecord) -> bytes:
    return json.dumps(asdict(record)).encode() + b"\n"


def _key(number: int) -> str:
    return f"{LOG}{number:0{DIGITS}d}.json"
