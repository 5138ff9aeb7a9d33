"""The process that uploads: `python -m verl.checkpoint.tiers.upload_process`, started by `uploader.py` alone.

It looks at the directory when it is told to, and uploads what the store is to get and has not confirmed, the newest
first: that is the one to go on from. What it was killed in, it goes on with; it ends with the trainer. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from verl.checkpoint.discovery import CheckpointDirectory
from verl.checkpoint.disk import Disk
from verl.checkpoint.published import Published
from verl.checkpoint.tiers.log import RemoteLog
from verl.checkpoint.tiers.push import Pusher
from verl.checkpoint.waiting import Cold, confirm, is_confirmed, manifest_digest, withdraw
from verl.errors import BadCheckpoint, CheckpointError, CheckpointFenced, StorageError, StorageRefused, VerlError
from verl.storage.config import Storage
from verl.storage.store import ObjectStore
from verl.utils.child_process import resume_without_parent
from verl.utils.progress import Progress, report, report_to
from verl.utils.redact import redact

LOOK, FINISH = "look", "finish"
WORK, ROUNDS = 0, 1  # slots of the progress: pieces of work, and commands that were carried out
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0
LINEAGE = "lineage.jsonl"
PROGRESS_VARIABLE = "VERL_UPLOADER_PROGRESS"


@dataclass(frozen=True, kw_only=True)
class UploadSetting:
    """What the process is to do.

    Args:
        directory: of checkpoints.
        storage: the tier.
        claim: of this trainer on the tier.
        shortest_pause_s: after the first failure in a row; doubled for each further one, up to two minutes.
    """

    directory: str
    storage: Storage
    claim: str
    cold: Cold
    niceness: int = 10
    shortest_pause_s: float = SHORTEST_PAUSE_S


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the process says.

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


class Uploading:
    """One tier being filled from one directory.

    Args:
        tell: is given what happens.
    """

    def __init__(self, setting: UploadSetting, store: ObjectStore, tell: Callable[[Told], None]):
        self._cold, self._tell = setting.cold, tell
        self._directory = CheckpointDirectory(Path(setting.directory))
        self._log = RemoteLog(store, setting.claim)
        self._pusher = Pusher(store, self._log, self._directory.disk)
        self._has_claim = False
        self._bad: set[str] = set()

    def waiting(self, with_newest: bool = False) -> list[Published]:
        """What the store is to get, the newest first.

        Args:
            with_newest: the newest one whatever the interval says: it is the last of the run.
        """
        complete = self._directory.survey()[0]
        wanted = [published for published in complete if self._cold.wants(published)]
        if with_newest and complete and complete[-1] not in wanted:
            wanted.append(complete[-1])
        return [one for one in reversed(wanted) if one.name not in self._bad and not self._is_there(one)]

    def go(self, with_newest: bool = False) -> None:
        """Upload all that is waiting.

        Raises:
            CheckpointFenced: another trainer has claimed the tier.
            StorageError: the store does not answer, or refuses; what was uploaded is told and recorded.
        """
        if not self._has_claim:
            self._log.take_claim()
            self._withdraw_lost()
            self._has_claim = True
        while waiting := self.waiting(with_newest):
            self._upload(waiting[0], len(waiting) - 1)

    def _is_there(self, published: Published) -> bool:
        return is_confirmed(self._directory.disk, published, self._cold.address)

    def _withdraw_lost(self) -> None:
        """Upload again what the store had confirmed, and knows nothing of any more: somebody emptied it."""
        known = {record.manifest for record in self._log.records()}
        for published in self._directory.survey()[0]:
            if self._is_there(published) and manifest_digest(self._directory.disk, published) not in known:
                withdraw(self._directory.disk, published)

    def _upload(self, published: Published, others: int) -> None:
        began = time.monotonic()
        try:
            pushed = self._pusher.push(published)
            confirm(self._directory.disk, published, pushed.record.manifest, self._cold.address)
        except (BadCheckpoint, FileNotFoundError) as error:  # damaged on the local disk, or dropped meanwhile
            if isinstance(error, StorageError):
                raise
            self._bad.add(published.name)
            if self._directory.exists(published.directory):
                self._tell(Told(kind="failed", name=published.name, error=redact(str(error)), waiting=others))
            return
        self._keep_lineage()
        took_s = time.monotonic() - began
        self._tell(
            Told(kind="uploaded", name=published.name, waiting=others, sent_bytes=pushed.sent_bytes, took_s=took_s)
        )

    def _keep_lineage(self) -> None:
        """Which run came from which, as far as this directory knows: for people, so a failure is no matter."""
        with contextlib.suppress(OSError):
            self._pusher.store.put(LINEAGE, Disk().read(self._directory.directory / LINEAGE, 2**26))


def serve(setting: UploadSetting, commands: BinaryIO, tell: Callable[[Told], None], progress: Progress) -> None:
    """Upload when told to, until told to finish or hung up on."""
    store = setting.storage.connect()
    num_commands = [1]  # it looks at once
    uploading = Uploading(setting, store, tell)
    asked, finishing, over = threading.Event(), threading.Event(), threading.Event()

    def listen() -> None:
        try:
            while True:
                is_last = pickle.load(commands) == FINISH
                num_commands[0] += 1
                if is_last:
                    finishing.set()
                asked.set()
        except (EOFError, OSError, pickle.UnpicklingError):
            over.set()
            os._exit(0)  # the trainer is gone, and what is under way is begun again by the next one

    threading.Thread(target=listen, name="commands", daemon=True).start()
    pause_s = setting.shortest_pause_s
    asked.set()
    while True:
        report("idle")
        asked.wait()
        asked.clear()
        is_last, begun = finishing.is_set(), num_commands[0]
        report("looking for checkpoints to upload")
        try:
            uploading.go(with_newest=is_last)
            pause_s = setting.shortest_pause_s
        except CheckpointFenced as error:
            tell(Told(kind="fenced", error=str(error)))
            asked.wait()  # to be told to finish; nothing is uploaded any more
            break
        except (StorageError, CheckpointError, VerlError, OSError) as error:
            what, is_refused = redact(f"{type(error).__name__}: {error}"), isinstance(error, StorageRefused)
            tell(Told(kind="failed", error=what, waiting=_count(uploading), is_refused=is_refused))
            _pause(pause_s, finishing, is_last)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            asked.set()
            continue
        while progress.count(ROUNDS) < begun:
            progress.advance(slot=ROUNDS)
        if is_last:
            break
    tell(Told(kind="done"))
    over.wait()


def _pause(pause_s: float, finishing: threading.Event, is_last: bool) -> None:
    """Wait before the store is asked again; shorter where the run is about to end."""
    while pause_s > 0 and (is_last or not finishing.is_set()):
        report("waiting to ask the store again")
        finishing.wait(min(1.0, pause_s)) if not is_last else time.sleep(min(1.0, pause_s))
        pause_s -= 1.0


def _count(uploading: Uploading) -> int:
    try:
        return len(uploading.waiting())
    except (CheckpointError, OSError):
        return 0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a job: the trainer decides
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="uploader: %(levelname)s %(name)s: %(message)s", level=logging.ERROR)
    resume_without_parent()  # if it is stopped: to notice that the trainer is gone
    report_to(progress := Progress.open(int(os.environ.pop(PROGRESS_VARIABLE))), WORK)
    commands, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anybody prints is no answer
    path: list[str] = pickle.load(commands)
    sys.path[:] = [*path, *(one for one in sys.path if one not in path)]
    setting: UploadSetting = pickle.load(commands)
    with contextlib.suppress(OSError):
        os.nice(setting.niceness)
    lock = threading.Lock()

    def tell(what: Any) -> None:
        with lock, contextlib.suppress(BrokenPipeError):
            pickle.dump(what, answers)
            answers.flush()

    serve(setting, commands, tell, progress)


if __name__ == "__main__":
    from verl.checkpoint.tiers.upload_process import main as imported_main  # so that messages are of importable classes

    imported_main()
