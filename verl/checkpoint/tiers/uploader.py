"""The process that uploads, as the trainer sees it: started with the run, told of each checkpoint, started again when
it died, waited for at the end. Training never waits for it before."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from verl.checkpoint.tiers.upload_process import FINISH, LOOK, Told, UploadSetting

log = logging.getLogger(__name__)

MOST_STARTS = 20
END_TIMEOUT_S = 5.0


class Uploader:
    """Uploads a directory's checkpoints in the background.

    >>> uploader = Uploader(setting)  # doctest: +SKIP
    >>> uploader.look()               # after each checkpoint that was published
    >>> for told in uploader.heard():
    ...     print(told.kind, told.name)
    >>> uploader.close(wait_s=600)

    Attributes:
        is_fenced: another trainer has claimed the tier; nothing is uploaded any more.
        is_refused: after `close`: the store refused what was left.
    """

    def __init__(self, setting: UploadSetting):
        self._setting = setting
        self._lock = threading.Lock()
        self._told: list[Told] = []
        self._changed = threading.Condition()
        self._is_done = self.is_fenced = self.is_refused = self._closing = False
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

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
                with contextlib.suppress(OSError):
                    _send(self._process, command)
                    return

    def _restarted(self) -> bool:
        if self._starts >= MOST_STARTS:
            return False
        code = None if self._process is None else self._process.returncode
        log.error("the uploader ended with %s; it is started again and goes on where it was", code)
        self._start()
        return True

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "verl.checkpoint.tiers.upload_process"]
        self._process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            process_group=0,
        )  # fmt: skip
        self._starts += 1
        with contextlib.suppress(OSError):
            _send(self._process, [os.path.abspath(one) for one in sys.path])
            _send(self._process, self._setting)
        threading.Thread(target=self._listen, args=(self._process,), name="uploader", daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
            while True:
                self._hear(pickle.load(process.stdout))
        with self._changed:
            self._changed.notify_all()

    def _hear(self, told: Told) -> None:
        with self._changed:
            self._is_done |= told.kind == "done"
            self.is_fenced |= told.kind == "fenced"
            self.is_refused |= self._closing and told.is_refused
            self._told.append(told)
            self._changed.notify_all()

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=END_TIMEOUT_S)


def _send(process: subprocess.Popen[bytes], what: Any) -> None:
    assert process.stdin is not None
    pickle.dump(what, process.stdin)
    process.stdin.flush()
