"""The process that uploads, as the trainer sees it: started with the run, told of each checkpoint, started again when
it died or makes no progress with what it was told, waited for at the end. Training never waits for it before."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from verl.checkpoint.tiers.upload_process import FINISH, LOOK, PROGRESS_VARIABLE, ROUNDS, Told, UploadSetting
from verl.utils.child_process import describe_exit, kill
from verl.utils.progress import Progress, ProgressWatch

log = logging.getLogger(__name__)

MOST_STARTS = 20
END_TIMEOUT_S = 5.0
LOOK_EVERY_S = 1.0
SETTING = "checkpoint.upload_timeout_s"


class Uploader:
    """Uploads a directory's checkpoints in the background.

    >>> uploader = Uploader(setting)  # doctest: +SKIP
    >>> uploader.look()               # after each checkpoint that was published
    >>> for told in uploader.heard():
    ...     print(told.kind, told.name)
    >>> uploader.close(wait_s=600)

    Args:
        timeout_s: without progress, after which it is ended and started again.
    Attributes:
        is_fenced: another trainer has claimed the tier; nothing is uploaded any more.
        is_refused: after `close`: the store refused what was left.
    """

    def __init__(self, setting: UploadSetting, timeout_s: float = 600.0):
        self._setting, self._timeout_s = setting, timeout_s
        self._lock = threading.Lock()
        self._told: list[Told] = []
        self._changed = threading.Condition()
        self._is_done = self.is_fenced = self.is_refused = self._closing = False
        self._starts = self._num_commands = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._progress = Progress(num_slots=2)
        self._is_over = threading.Event()
        self._start()
        self._watcher = threading.Thread(target=self._watch, name="uploader_watch", daemon=True)
        self._watcher.start()

    @property
    def process_id(self) -> int | None:
        """None where there is no process just now."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def look(self) -> None:
        """There is something new."""
        self._say(LOOK)

    def heard(self) -> list[Told]:
        """What has happened since it was last asked."""
        with self._changed:
            told, self._told = self._told, []
        return told

    def close(self, wait_s: float) -> list[Told]:
        """Have all uploaded, the newest whatever the interval, for at most `wait_s`; then end the process.

        A store that refuses is not waited for.

        Returns:
            What was told meanwhile.
        """
        if self._process is None:
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
                assert self._process is not None
                try:
                    _send(self._process, command)
                except BlockingIOError:  # it has not taken in what it was told before: `_watch` sees to it
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
        code = None if self._process is None else self._process.returncode
        ended = "" if code is None else f" with {describe_exit(code)}"
        log.error("the uploader ended%s; it is started again and goes on where it was", ended)
        self._start()
        return True

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "verl.checkpoint.tiers.upload_process"]
        before, self._progress = self._progress, Progress(num_slots=2)
        before.close()
        environment = os.environ | {"PYTHONPATH": path, PROGRESS_VARIABLE: str(self._progress.fd)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, process_group=0,
            pass_fds=[self._progress.fd],
        )  # fmt: skip
        self._starts += 1
        self._num_commands = 1  # it looks at once
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            _send(self._process, [os.path.abspath(one) for one in sys.path])
            _send(self._process, self._setting)
        os.set_blocking(self._process.stdin.fileno(), False)  # it may be stopped, and training waits for nobody
        threading.Thread(target=self._listen, args=(self._process,), name="uploader", daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        answers = io.BufferedReader(process.stdout)  # type: ignore[type-var]
        with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
            while True:
                self._hear(pickle.load(answers))
        with self._changed:
            self._changed.notify_all()

    def _hear(self, told: Told) -> None:
        with self._changed:
            self._is_done |= told.kind == "done"
            self.is_fenced |= told.kind == "fenced"
            self.is_refused |= self._closing and told.is_refused
            self._told.append(told)
            self._changed.notify_all()

    def _watch(self) -> None:
        """End a process that makes no progress with what it was told, and start it again."""
        watched, watch = None, None
        pause_s = min(LOOK_EVERY_S, self._timeout_s / 2)
        while not self._is_over.wait(pause_s):
            with self._lock:
                process, is_idle = self._process, self._progress.count(ROUNDS) >= self._num_commands or self.is_fenced
                if process is None or process.poll() is not None:
                    continue
                if process is not watched or watch is None or is_idle:
                    watched, watch = process, ProgressWatch(self._progress, self._timeout_s, look_every_s=2 * pause_s)
                if not watch.is_overdue:
                    continue
                log.error("the uploader %s", watch.describe(process.pid, SETTING))
                kill(process)
            self._say(FINISH if self._closing else LOOK)

    def _end(self) -> None:
        self._is_over.set()
        self._watcher.join(timeout=END_TIMEOUT_S)
        process, self._process = self._process, None
        assert process is not None
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            kill(process)
        if not self._watcher.is_alive():
            self._progress.close()


def _send(process: subprocess.Popen[bytes], what: Any) -> None:
    """Send an object, all of it or, where the process takes nothing in, nothing (BlockingIOError)."""
    assert process.stdin is not None
    data = memoryview(pickle.dumps(what))
    while data:
        data = data[os.write(process.stdin.fileno(), data) :]
