"""Fencing: one trainer at a time writes a directory; a later claim fences the earlier writer out.

`owner.json` names the newest claim. A trainer checks, under a lock and immediately before it commits, that the claim is
still its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.checkpoint.core.filesystem import NO_LOCK, FileHandle, FileSystem, write_by_rename, write_errors
from verl.checkpoint.read.discovery import FORMAT, OWNER
from verl.errors import CheckpointFenced, CheckpointWriteFailed

log = logging.getLogger(__name__)
OWNER_LIMIT_BYTES = 65_536
LOCK_TIMEOUT_S = 30.0
LOCK_POLL_S = 0.02


class WriterLease:
    """A trainer's claim on a directory of checkpoints.

    Args:
        root: the directory; its `format.json`, which is never replaced, is what processes lock.
        run_id: of the run, for messages.
        claim: one that another process of the same run took and shares with this one; None to take one with `take`.
    """

    def __init__(self, disk: FileSystem, root: Path, run_id: str, claim: str | None = None):
        self.claim = claim
        self._disk, self._root, self._run_id = disk, root, run_id

    def take(self) -> str:
        """Claim the directory for this trainer. Call it with the lock held."""
        epoch = self._recorded().get("epoch")
        claim = f"{(epoch if isinstance(epoch, int) else 0) + 1}-{secrets.token_hex(8)}"
        self._record(claim)
        self.claim = claim  # only now: a claim that could not be recorded is taken anew
        return claim

    def borrow(self) -> None:
        """Act under the claim of whoever owns the directory now, if anybody does: for upkeep beside a living trainer,
        which must not be fenced out by it."""
        claim = self._recorded().get("claim")
        if isinstance(claim, str):
            self.claim = claim

    def check(self) -> None:
        """Call it with the lock held.

        Raises:
            CheckpointFenced: another trainer has claimed the directory since.
        """
        assert self.claim is not None, "a claim is checked after it was taken"
        recorded = self._recorded()
        if recorded.get("claim") == self.claim:
            return
        if "claim" not in recorded:
            self._record(self.claim)  # somebody cleaned up; a later owner would have left its own
            return
        raise CheckpointFenced(
            f"{self._root} was taken over by run {recorded.get('run_id')} (process {recorded.get('pid')} on "
            f"{recorded.get('host')}, {recorded.get('since')}); this run publishes nothing there any more. "
            "Stop one of the two, or give this one its own checkpoint.save_dir"
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other process that publishes or prunes here.

        Raises:
            CheckpointWriteFailed: another process held the lock for too long.
        """
        with write_errors("locking the directory of checkpoints"):
            handle = self._lock()
        try:
            yield
        finally:
            if handle is not None:
                with contextlib.suppress(OSError):  # the lock is gone all the same
                    self._disk.close(handle)

    def _lock(self) -> FileHandle | None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        try:
            while (handle := self._disk.lock(self._root / FORMAT)) is None:
                if time.monotonic() > deadline:
                    raise CheckpointWriteFailed(
                        f"{self._root / FORMAT} has been locked by another process for {LOCK_TIMEOUT_S:.0f} s; "
                        "is a trainer that saves there suspended?"
                    )
                time.sleep(LOCK_POLL_S)
        except OSError as error:
            if error.errno not in NO_LOCK:
                raise
            log.warning("%s has no file locks: two trainers there can notice each other too late", self._root)
            return None
        return handle

    def _recorded(self) -> dict[str, Any]:
        try:
            owner = json.loads(self._disk.read(self._root / OWNER, OWNER_LIMIT_BYTES))
        except (FileNotFoundError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def _record(self, claim: str) -> None:
        owner = {
            "claim": claim,
            "epoch": int(claim.split("-")[0]),
            "run_id": self._run_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_by_rename(self._disk, self._root / OWNER, json.dumps(owner, indent=2).encode() + b"\n")
        self._disk.sync_directory(self._root)
