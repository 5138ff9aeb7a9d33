"""Checkpoints on their way to object storage, while training goes on: what arrived, what waits, what failed."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from verl.checkpoint.commit.upload_state import write_upload_target
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.remote.resolve import CheckpointTier
from verl.checkpoint.remote.upload_process import Uploader, UploadEvent, UploadSettings
from verl.trainer.lineage import Lineage

_log = logging.getLogger(__name__)


class Uploads:
    """The uploads of one run.

    Args:
        directory: of checkpoints, claimed by this run.
        wait_s: most that `close` waits.
        timeout_s: see `Uploader`.
    Attributes:
        waiting: checkpoints that the store is to get and had not confirmed when it was last heard of.
    """

    def __init__(self, tier: CheckpointTier, directory: Path, lineage: Lineage, wait_s: float, timeout_s: float):
        self._tier, self._lineage, self._wait_s = tier, lineage, wait_s
        self.waiting = 0
        cold = tier.cold()
        write_upload_target(FileSystem(), directory, cold)
        claim = f"{lineage.run_id}-{secrets.token_hex(4)}"
        setting = UploadSettings(directory=str(directory), storage=tier.storage, claim=claim, cold=cold)
        self._uploader = Uploader(setting, timeout_s)

    def published(self) -> None:
        """There is a new checkpoint."""
        self._uploader.look()

    def hear(self) -> None:
        """Record what arrived, and say what did not."""
        self._record(self._uploader.heard())

    def close(self, waits: bool) -> None:
        """Have the rest uploaded, for as long as may be waited, and end the process. What is left goes up with the next
        start of the run."""
        if waits and not self._uploader.is_fenced:
            _log.info("waiting up to %g s for uploads to %s", self._wait_s, self._tier.address)
        self._record(self._uploader.close(self._wait_s if waits else 0.0))
        if waits and not self._uploader.is_done:
            _log.error(
                "NOT ALL checkpoints are in %s: %s on the local disk, and the next start of this run goes on uploading",
                self._tier.address,
                f"{self.waiting} wait" if self.waiting else "the last ones are",
            )

    def _record(self, told: list[UploadEvent]) -> None:
        for one in told:
            self.waiting = one.waiting
            if one.kind == "uploaded":
                size_mib = one.sent_bytes / 2**20
                _log.info("%s is in %s: %.1f MiB, %.1f s", one.name, self._tier.address, size_mib, one.took_s)
                self._lineage.add("uploaded", checkpoint=one.name, address=self._tier.address)
            elif one.kind == "fenced":
                _log.error("NOTHING MORE IS UPLOADED: %s. Training goes on, and saves to the local disk.", one.error)
            elif one.kind == "failed":
                what = one.name or "a checkpoint"
                _log.error(
                    "%s is NOT in %s: %s. Training goes on; %d wait on the local disk.",
                    what, self._tier.address, one.error, one.waiting,
                )  # fmt: skip
