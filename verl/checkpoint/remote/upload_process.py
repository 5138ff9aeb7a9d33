"""The upload process (`python -m verl.checkpoint.remote.upload_process`), and `Uploader`, the trainer's side of it.

The process is started with the run; training never waits for it. If it dies, nothing more is uploaded in this run: the
run says so, and what the store lacks is uploaded when it is resumed. It looks at the directory
every half second, and uploads what the store is to get and has not confirmed, the newest first: that is the one to
resume from. At the end the trainer asks it to finish, and waits for that. It ends with the trainer. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.commit.upload_state import (
    UploadTarget,
    confirm_upload,
    is_upload_confirmed,
    last_upload,
    manifest_digest,
    withdraw_confirmation,
)
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.remote.commit_log import CommitLog
from verl.checkpoint.remote.transfer import upload
from verl.errors import BadCheckpoint, CheckpointError, CheckpointFenced, StorageError, StorageRefused, VerlError
from verl.storage.config import Storage
from verl.storage.store import ObjectStore
from verl.utils.child_process.channel import Channel, ChannelClosed
from verl.utils.child_process.process import ChildProcess, run_child
from verl.utils.progress import Progress, report
from verl.utils.redact import redact

FINISH = "finish"
NICENESS = 10  # added to the priority value of this process, so that training keeps its processors
LOOK_EVERY_S = 0.5
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0


@dataclass(frozen=True, kw_only=True)
class UploadSettings:
    """Settings of the upload process.

    Args:
        directory: of checkpoints.
        storage: the tier.
        claim: of this trainer on the tier.
        shortest_pause_s: after the first failure in a row; doubled for each further one, up to two minutes.
    """

    directory: str
    storage: Storage
    claim: str
    cold: UploadTarget
    shortest_pause_s: float = SHORTEST_PAUSE_S


@dataclass(frozen=True, kw_only=True)
class UploadEvent:
    """Message of the upload process.

    Args:
        kind: `uploaded` with the name of a checkpoint, `failed` with an error, `fenced`, or `done` after
            FINISH.
        waiting: checkpoints that the store is to get and has not confirmed.
        is_refused: the store answered, and asking again would not help.
    """

    kind: str
    name: str = ""
    error: str = ""
    waiting: int = 0
    sent_bytes: int = 0
    took_s: float = 0.0
    is_refused: bool = False


class UploadWorker:
    """One tier being filled from one directory.

    Args:
        tell: is given what happens.
    """

    def __init__(self, setting: UploadSettings, store: ObjectStore, tell: Callable[[UploadEvent], None]):
        self._cold, self._tell = setting.cold, tell
        self._directory = CheckpointDirectory(Path(setting.directory))
        self._log = CommitLog(store, setting.claim)
        self._has_claim = False
        self._bad: set[tuple[str, int]] = set()  # with their numbers: a name may be used again

    def waiting(self, with_newest: bool = False) -> list[Checkpoint]:
        """Checkpoints that the store is to get, the newest first.

        Args:
            with_newest: the newest one whatever the interval says: it is the last of the run.
        """
        complete = self._directory.survey()[0]
        due = complete[-1:] if with_newest else []
        if self._cold.upload_interval_s and self._is_due():
            due += [checkpoint for checkpoint in complete if self._cold.counts(checkpoint)][-1:]
        return [
            checkpoint
            for checkpoint in reversed(complete)
            if (self._cold.wants(checkpoint) or checkpoint in due)
            and (checkpoint.name, checkpoint.sequence) not in self._bad
            and not self._is_there(checkpoint)
        ]

    def situation(self) -> object:
        """Names in the directory, and whether the interval is over; without a change there is nothing new to upload."""
        there = self._directory.exists(self._directory.directory)
        return self._directory.disk.names(self._directory.directory) if there else [], self._is_due()

    def _is_due(self) -> bool:
        """Whether the newest checkpoint may go up by the interval of time."""
        if not self._cold.upload_interval_s:
            return True
        last = last_upload(self._directory.disk, self._directory.directory)
        return last is None or not 0 <= time.time() - last < self._cold.upload_interval_s  # the clock may be set back

    def go(self, with_newest: bool = False) -> None:
        """Upload all that is waiting.

        Raises:
            CheckpointFenced: another trainer has claimed the tier.
            StorageError: the store does not answer, or refuses; what was uploaded is reported and recorded.
        """
        if not self._has_claim:
            self._log.take_claim()
            self._withdraw_lost()
            self._has_claim = True
        while waiting := self.waiting(with_newest):
            self._upload(waiting[0], len(waiting) - 1)

    def _is_there(self, checkpoint: Checkpoint) -> bool:
        return is_upload_confirmed(self._directory.disk, checkpoint, self._cold.address)

    def _withdraw_lost(self) -> None:
        """Upload confirmed checkpoints again if the store no longer has them, since it was emptied."""
        known = {record.manifest for record in self._log.records()}
        for checkpoint in self._directory.survey()[0]:
            if self._is_there(checkpoint) and manifest_digest(self._directory.disk, checkpoint) not in known:
                withdraw_confirmation(self._directory.disk, checkpoint)

    def _upload(self, checkpoint: Checkpoint, others: int) -> None:
        began = time.monotonic()
        try:
            record, sent_bytes = upload(self._log, checkpoint, self._directory.disk)
            confirm_upload(self._directory.disk, checkpoint, record.manifest, self._cold.address)
        except (BadCheckpoint, FileNotFoundError) as error:  # damaged on the local disk, or dropped meanwhile
            if isinstance(error, StorageError):
                raise
            self._bad.add((checkpoint.name, checkpoint.sequence))
            if self._directory.exists(checkpoint.directory):
                self._tell(UploadEvent(kind="failed", name=checkpoint.name, error=redact(str(error)), waiting=others))
            return
        took_s = time.monotonic() - began
        self._tell(
            UploadEvent(kind="uploaded", name=checkpoint.name, waiting=others, sent_bytes=sent_bytes, took_s=took_s)
        )


def serve(channel: Channel, setting: UploadSettings, progress: Progress) -> None:
    """Upload until the trainer asks to finish and that is done, then wait until it hangs up."""
    logging.basicConfig(format="uploader: %(levelname)s %(name)s: %(message)s", level=logging.ERROR)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    worker, pause_s = None, setting.shortest_pause_s
    before: object = None
    is_last = is_over = False
    while True:
        report("looking for checkpoints to upload")
        wait_s = LOOK_EVERY_S
        try:
            worker = worker or UploadWorker(setting, setting.storage.connect(), channel.send)
            if not is_over and ((now := worker.situation()) != before or is_last):
                worker.go(with_newest=is_last)
                before, pause_s = now, setting.shortest_pause_s
                if is_last:
                    channel.send(UploadEvent(kind="done"))
                is_over = is_last
        except ChannelClosed:
            return
        except CheckpointFenced as error:
            channel.send(UploadEvent(kind="fenced", error=str(error)))
            is_over = True
        except (StorageError, CheckpointError, VerlError, OSError) as error:
            what, is_refused = redact(f"{type(error).__name__}: {error}"), isinstance(error, StorageRefused)
            channel.send(UploadEvent(kind="failed", error=what, waiting=_count(worker), is_refused=is_refused))
            before, wait_s, pause_s = None, pause_s, min(2 * pause_s, LONGEST_PAUSE_S)
        is_last |= _is_asked_to_finish(channel, wait_s)


def _is_asked_to_finish(channel: Channel, wait_s: float) -> bool:
    """Wait for a while, or until the trainer asks."""
    end = time.monotonic() + wait_s
    while (left_s := end - time.monotonic()) > 0:
        report("waiting")
        if channel.has_message(min(1.0, left_s)):
            return channel.receive() == FINISH
    return False


def _count(worker: UploadWorker | None) -> int:
    try:
        return 0 if worker is None else len(worker.waiting())
    except (CheckpointError, OSError):
        return 0


log = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0


class Uploader:
    """Uploads a directory's checkpoints in the background.

        uploader = Uploader(setting)
        for event in uploader.heard():
            print(event.kind, event.name)
        uploader.close(wait_s=600)

    Attributes:
        child: its process.
        is_done: after `close`: everything was uploaded.
        is_fenced: another trainer has claimed the tier; nothing is uploaded any more.
        is_refused: after `close`: the store refused what was left.
    """

    def __init__(self, setting: UploadSettings):
        self.is_done = self.is_fenced = self.is_refused = False
        self._is_over = self._has_ended = False
        self._progress = Progress(num_slots=1)
        self.child = ChildProcess("verl.checkpoint.remote.upload_process", self._progress, output=2)
        with contextlib.suppress(ChannelClosed):
            self.child.begin(setting)

    def heard(self) -> list[UploadEvent]:
        """Events since the last call."""
        return [*iter(lambda: self._next(0.0), None)]

    def close(self, wait_s: float) -> list[UploadEvent]:
        """Have all uploaded, the newest whatever the interval, for at most `wait_s`; then end the process.

        A store that refuses is not waited for.

        Returns:
            Events that arrived meanwhile.
        """
        if self._is_over:
            return []
        events, end = self.heard(), time.monotonic() + wait_s
        self._is_over = True
        with contextlib.suppress(OSError):  # it has ended, or is suspended
            self.child.channel.send(FINISH, timeout_s=0.0)
        while not (self.is_done or self.is_fenced or self.is_refused):
            if (event := self._next(max(0.0, end - time.monotonic()))) is None:
                break
            self.is_refused = event.is_refused
            events.append(event)
        self.child.end(END_TIMEOUT_S)
        self._progress.close()
        return events

    def _next(self, wait_s: float) -> UploadEvent | None:
        """The next event; None if none arrives within this time, or the process has ended."""
        try:
            if self._has_ended or not self.child.channel.has_message(wait_s):
                return None
            event: UploadEvent = self.child.channel.receive()
        except (ChannelClosed, pickle.UnpicklingError):
            self._has_ended = True
            self.child.await_exit(END_TIMEOUT_S)
            log.error(
                "the uploader ended with %s: nothing more is uploaded in this run. What the store lacks follows when "
                "it is resumed",
                self.child.describe_exit() or "a closed connection",
            )
            return None
        self.is_done |= event.kind == "done"
        self.is_fenced |= event.kind == "fenced"
        return event


if __name__ == "__main__":
    run_child("verl.checkpoint.remote.upload_process")
