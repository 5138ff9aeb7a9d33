"""The upload process (`python -m verl.checkpoint.remote.upload_process`), and `Uploader`, the trainer's side of it.

The process is started with the run, notified of each checkpoint, restarted when it died, and waited for at the end;
training never waits for it. It looks at the directory when it is asked to, and uploads what the store is to get and has
not confirmed, the newest first: that is the one to resume from. It ends with the trainer. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.commit.fencing import LockHolder
from verl.checkpoint.commit.upload_state import (
    UploadTarget,
    confirm_upload,
    is_upload_confirmed,
    last_upload,
    manifest_digest,
    withdraw_confirmation,
)
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.remote.commit_log import CommitLog
from verl.checkpoint.remote.lease import StoreLease
from verl.checkpoint.remote.upload import CheckpointUpload
from verl.errors import BadCheckpoint, CheckpointError, CheckpointFenced, StorageError, StorageRefused, VerlError
from verl.storage.config import Storage
from verl.storage.store import ObjectStore
from verl.utils.child_process.channel import Channel, ChannelClosed
from verl.utils.child_process.process import ChildProcess, run_child
from verl.utils.progress import Progress, ProgressWatch, report
from verl.utils.redact import redact

LOOK, FINISH = "look", "finish"
WORK, ROUNDS = 0, 1  # slots of the progress: pieces of work, and commands that were carried out
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0
LINEAGE = "lineage.jsonl"


@dataclass(frozen=True, kw_only=True)
class UploadSettings:
    """Settings of the upload process.

    Args:
        directory: of checkpoints.
        storage: the tier.
        claim: of this trainer on the tier.
        holder, lease_number: of the lease that this process renews; None where the run has none.
        shortest_pause_s: after the first failure in a row; doubled for each further one, up to two minutes.
    """

    directory: str
    storage: Storage
    claim: str
    cold: UploadTarget
    holder: LockHolder | None = None
    lease_number: int | None = None
    niceness: int = 10
    shortest_pause_s: float = SHORTEST_PAUSE_S


@dataclass(frozen=True, kw_only=True)
class UploadEvent:
    """Message of the upload process.

    Args:
        kind: `uploaded` with the name of a checkpoint, `failed` with an error, `fenced`, or `done` after FINISH.
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
        self._pusher = CheckpointUpload(store, self._log, self._directory.disk)
        self._has_claim = False
        self._bad: set[str] = set()

    def waiting(self, with_newest: bool = False) -> list[Checkpoint]:
        """Checkpoints that the store is to get, the newest first.

        Args:
            with_newest: the newest one whatever the interval says: it is the last of the run.
        """
        complete = self._directory.survey()[0]
        wanted = [checkpoint for checkpoint in complete if self._cold.wants(checkpoint)]
        if self._cold.upload_interval_s and not self.due_in_s():
            counted = [checkpoint for checkpoint in complete if self._cold.counts(checkpoint)]
            wanted += [checkpoint for checkpoint in counted[-1:] if checkpoint not in wanted]
        if with_newest and complete and complete[-1] not in wanted:
            wanted.append(complete[-1])
        return [one for one in reversed(wanted) if one.name not in self._bad and not self._is_there(one)]

    def due_in_s(self) -> float:
        """Seconds until the newest checkpoint may go up; 0 where it may now."""
        last = last_upload(self._directory.disk, self._directory.directory)
        passed = math.inf if last is None else max(0.0, time.time() - last)
        return max(0.0, self._cold.upload_interval_s - passed)

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
            pushed = self._pusher.push(checkpoint)
            confirm_upload(self._directory.disk, checkpoint, pushed.record.manifest, self._cold.address)
        except (BadCheckpoint, FileNotFoundError) as error:  # damaged on the local disk, or dropped meanwhile
            if isinstance(error, StorageError):
                raise
            self._bad.add(checkpoint.name)
            if self._directory.exists(checkpoint.directory):
                self._tell(UploadEvent(kind="failed", name=checkpoint.name, error=redact(str(error)), waiting=others))
            return
        self._keep_lineage()
        took_s = time.monotonic() - began
        self._tell(
            UploadEvent(
                kind="uploaded", name=checkpoint.name, waiting=others, sent_bytes=pushed.sent_bytes, took_s=took_s
            )
        )

    def _keep_lineage(self) -> None:
        """Upload the lineage that this directory knows; it is for people, so a failure is ignored."""
        with contextlib.suppress(OSError):
            self._pusher.store.put(LINEAGE, FileSystem().read(self._directory.directory / LINEAGE, 2**26))


def serve(channel: Channel, setting: UploadSettings, progress: Progress) -> None:
    """Upload on request, until the request to finish or the end of the channel."""
    logging.basicConfig(format="uploader: %(levelname)s %(name)s: %(message)s", level=logging.ERROR)
    with contextlib.suppress(OSError):
        os.nice(setting.niceness)
    store, lock = setting.storage.connect(), threading.Lock()
    if setting.holder is not None and setting.lease_number is not None:
        StoreLease(setting.storage, setting.holder, setting.lease_number).keep()

    def tell(event: UploadEvent) -> None:
        with lock, contextlib.suppress(ChannelClosed):
            channel.send(event)

    num_commands = [1]  # it looks at once
    uploading = UploadWorker(setting, store, tell)
    asked, finishing, over = threading.Event(), threading.Event(), threading.Event()

    def listen() -> None:
        try:
            while True:
                is_last = channel.receive() == FINISH
                num_commands[0] += 1
                if is_last:
                    finishing.set()
                asked.set()
        except ChannelClosed:
            over.set()
            os._exit(0)  # the trainer is gone, and what is under way is begun again by the next one

    threading.Thread(target=listen, name="commands", daemon=True).start()
    pause_s = setting.shortest_pause_s
    asked.set()
    while True:
        report("idle")
        asked.wait(uploading.due_in_s() or None)
        asked.clear()
        is_last, begun = finishing.is_set(), num_commands[0]
        report("looking for checkpoints to upload")
        try:
            uploading.go(with_newest=is_last)
            pause_s = setting.shortest_pause_s
        except CheckpointFenced as error:
            tell(UploadEvent(kind="fenced", error=str(error)))
            asked.wait()  # for the request to finish; uploads have ended
            break
        except (StorageError, CheckpointError, VerlError, OSError) as error:
            what, is_refused = redact(f"{type(error).__name__}: {error}"), isinstance(error, StorageRefused)
            tell(UploadEvent(kind="failed", error=what, waiting=_count(uploading), is_refused=is_refused))
            _pause(pause_s, finishing, is_last)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            asked.set()
            continue
        while progress.count(ROUNDS) < begun:
            progress.advance(slot=ROUNDS)
        if is_last:
            break
    tell(UploadEvent(kind="done"))
    over.wait()


def _pause(pause_s: float, finishing: threading.Event, is_last: bool) -> None:
    """Wait before a retry; shorter if the run is about to end."""
    while pause_s > 0 and (is_last or not finishing.is_set()):
        report("waiting to ask the store again")
        finishing.wait(min(1.0, pause_s)) if not is_last else time.sleep(min(1.0, pause_s))
        pause_s -= 1.0


def _count(uploading: UploadWorker) -> int:
    try:
        return len(uploading.waiting())
    except (CheckpointError, OSError):
        return 0


log = logging.getLogger(__name__)

MOST_STARTS = 20
END_TIMEOUT_S = 5.0
LOOK_EVERY_S = 1.0
SETTING = "checkpoint.upload_timeout_s"


class Uploader:
    """Uploads a directory's checkpoints in the background.

        uploader = Uploader(setting)
        uploader.look()               # after each checkpoint that was published
        for message in uploader.heard():
            print(message.kind, message.name)
        uploader.close(wait_s=600)

    Args:
        timeout_s: without progress, after which it is ended and started again.
    Attributes:
        is_fenced: another trainer has claimed the tier; nothing is uploaded any more.
        is_refused: after `close`: the store refused what was left.
    """

    def __init__(self, setting: UploadSettings, timeout_s: float = 600.0):
        self._setting, self._timeout_s = setting, timeout_s
        self._lock = threading.Lock()
        self._events: list[UploadEvent] = []
        self._changed = threading.Condition()
        self._is_done = self.is_fenced = self.is_refused = self._closing = False
        self._starts = self._num_commands = 0
        self.child: ChildProcess | None = None
        self._progress = Progress(num_slots=2)
        self._is_over = threading.Event()
        self._start()
        self._watcher = threading.Thread(target=self._watch, name="uploader_watch", daemon=True)
        self._watcher.start()

    @property
    def process_id(self) -> int | None:
        """None where there is no process just now."""
        return None if self.child is None or not self.child.is_alive() else self.child.pid

    def look(self) -> None:
        """There is something new."""
        self._say(LOOK)

    def heard(self) -> list[UploadEvent]:
        """Events since the last call."""
        with self._changed:
            events, self._events = self._events, []
        return events

    def close(self, wait_s: float) -> list[UploadEvent]:
        """Have all uploaded, the newest whatever the interval, for at most `wait_s`; then end the process.

        A store that refuses is not waited for.

        Returns:
            Messages that arrived meanwhile.
        """
        if self.child is None:
            return []
        self._closing = True
        end = time.monotonic() + wait_s
        self._say(FINISH)
        with self._changed:
            while not (self._is_done or self.is_fenced or self.is_refused) and time.monotonic() < end:
                if not self._changed.wait(timeout=min(1.0, max(0.0, end - time.monotonic()))) and not self.process_id:
                    self._changed.release()
                    try:
                        self._say(FINISH)
                    finally:
                        self._changed.acquire()
        self._end()
        return self.heard()

    @property
    def is_done(self) -> bool:
        """After `close`: everything was uploaded."""
        return self._is_done

    def _say(self, command: str) -> None:
        with self._lock:
            for _ in range(2):
                if self.process_id is None and not self._restarted():
                    return
                assert self.child is not None
                try:
                    self.child.channel.send(command, timeout_s=0.0)  # it may be suspended, and training must not wait
                except TimeoutError:  # it has not received earlier messages: handled by `_watch`
                    self._num_commands += 1
                    return
                except OSError:
                    continue
                self._num_commands += 1
                return

    def _restarted(self) -> bool:
        if self._starts >= MOST_STARTS:
            if self._starts == MOST_STARTS:
                log.error("the uploader has ended %d times: NOTHING MORE IS UPLOADED by this run", MOST_STARTS)
            self._starts = MOST_STARTS + 1
            return False
        code = None if self.child is None else self.child.describe_exit()
        ended = f" with {code}" if code else ""
        log.error("the uploader ended%s; it is restarted and continues", ended)
        self._start()
        return True

    def _start(self) -> None:
        before, self._progress = self._progress, Progress(num_slots=2)
        before.close()
        if self.child is not None:
            self.child.kill()
        self.child = ChildProcess("verl.checkpoint.remote.upload_process", self._progress, slot=WORK, output=2)
        self._starts += 1
        self._num_commands = 1  # it looks at once
        with contextlib.suppress(ChannelClosed):
            self.child.begin(self._setting)
        threading.Thread(target=self._listen, args=(self.child,), name="uploader", daemon=True).start()

    def _listen(self, child: ChildProcess) -> None:
        with contextlib.suppress(ChannelClosed, pickle.UnpicklingError):
            while True:
                self._handle(child.channel.receive())
        with self._changed:
            self._changed.notify_all()

    def _handle(self, message: UploadEvent) -> None:
        with self._changed:
            self._is_done |= message.kind == "done"
            self.is_fenced |= message.kind == "fenced"
            self.is_refused |= self._closing and message.is_refused
            self._events.append(message)
            self._changed.notify_all()

    def _watch(self) -> None:
        """End a process that makes no progress with its request, and start it again."""
        watched, watch = None, None
        pause_s = min(LOOK_EVERY_S, self._timeout_s / 2)
        while not self._is_over.wait(pause_s):
            with self._lock:
                child, is_idle = self.child, self._progress.count(ROUNDS) >= self._num_commands or self.is_fenced
                if child is None or not child.is_alive():
                    continue
                if child is not watched or watch is None or is_idle:
                    watched, watch = child, ProgressWatch(self._progress, self._timeout_s, look_every_s=2 * pause_s)
                if not watch.is_overdue:
                    continue
                log.error("the uploader %s", watch.describe(child.pid, SETTING))
                child.kill()
            self._say(FINISH if self._closing else LOOK)

    def _end(self) -> None:
        self._is_over.set()
        self._watcher.join(timeout=END_TIMEOUT_S)
        child, self.child = self.child, None
        assert child is not None
        child.end(END_TIMEOUT_S)
        if not self._watcher.is_alive():
            self._progress.close()


if __name__ == "__main__":
    run_child("verl.checkpoint.remote.upload_process", outlives_parent=True)  # until it hears that it is gone
