"""A training held before its last save, and let go once for every case in a process of its own.

    this process      forks the training, and for every case a process that resumes; knows nothing but the imports
      the training    saves the steps before the last one, then forks for every case
        a case        is armed, saves the last step, and ends: it returned, raised, or was killed

An interpreter with these imports takes seconds to start, a fork milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import random
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from faults.calls import Interposer, Strike
from peers.tools import Tool
from peers.training import LAST, Gate, Resumed

RETURNED, RAISED = 0, 3
LIMIT_S = 120
LOGGERS = ("", "transformers", "torch", "accelerate", "verl")


@dataclass(frozen=True)
class Ended:
    """How a save ended, and whether the call to be struck was reached."""

    how: Literal["returned", "raised", "killed"]
    was_struck: bool


@dataclass(frozen=True)
class Found:
    """What a resume found.

    Attributes:
        resumed: None where there was nothing, or an error.
        error: that it raised.
        said: warnings that it gave.
    """

    resumed: Resumed | None
    error: str | None = None
    said: tuple[str, ...] = ()


class HeldTraining:
    """See above.

    Args:
        root: where the tool saves; made here.
        kept: where the directory is copied to after each save.
    """

    def __init__(self, tool: Tool, root: Path, kept: Path):
        self.tool, self.root, self.kept = tool, root, kept
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)
        self._fired = ctypes.c_long.from_buffer(self._shared)
        self._ask, self._answer = os.pipe(), os.pipe()
        root.mkdir()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._ask[1])
            _end_by(self._train)
        os.close(self._ask[0])
        os.close(self._answer[1])
        self._answers = os.fdopen(self._answer[0])
        if not self._answers.readline():
            raise RuntimeError(f"{tool.name} did not come to its last save")

    def let_go(self, strike: Strike, log: Path | None = None) -> Ended:
        """Save the last step while the strike waits for its call; the directory is that after the step before."""
        self.put_back(LAST - 1)
        order = {"at": strike.at, "kind": strike.kind, "code": strike.code, "log": str(log) if log else None}
        os.write(self._ask[1], json.dumps(order).encode() + b"\n")
        code, was_struck = json.loads(self._answers.readline())
        how = {RETURNED: "returned", RAISED: "raised", -signal.SIGKILL: "killed"}
        if code not in how:
            raise RuntimeError(f"{self.tool.name} ended with {code} after: {strike}")
        return Ended(how[code], bool(was_struck))

    def put_back(self, step: int) -> None:
        """Make the directory what it was after the save of that step."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.kept / str(step), self.root, symlinks=True)

    def close(self) -> None:
        """End the training."""
        os.close(self._ask[1])
        self._answers.close()
        os.waitpid(self._pid, 0)

    def __enter__(self) -> HeldTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in the training's process -----------------------------------------------------------------------------------

    def _train(self) -> int:
        interposer = Interposer()

        def before_last() -> None:
            os.write(self._answer[1], b"ready\n")
            with os.fdopen(self._ask[0]) as orders:
                while line := orders.readline():
                    order = json.loads(line)
                    self._fired.value = 0
                    drawn = random.getstate()
                    pid = os.fork()
                    if pid == 0:
                        random.setstate(drawn)  # Python seeds it anew in a forked process
                        return self._arm(interposer, order)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    os.write(self._answer[1], json.dumps([code, self._fired.value]).encode() + b"\n")
            os._exit(0)

        def after(step: int) -> None:
            interposer.disarm()
            if step == LAST:
                os._exit(RETURNED)
            shutil.copytree(self.root, self.kept / str(step), symlinks=True)

        self.tool.train(self.root, Gate(before_last, after))
        raise AssertionError("the last save ends the process")

    def _arm(self, interposer: Interposer, order: dict[str, Any]) -> None:
        signal.alarm(LIMIT_S)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if order["log"] else -1
        interposer.arm(self.root.parent, Strike(order["at"], order["kind"], order["code"]), log, self._fired)


def resume(tool: Tool, root: Path) -> Found:
    """Resume in a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT_S)
        os.close(read)
        _end_by(lambda: _tell(tool, root, write))
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code or not text:
        return Found(None, error=f"the process ended with {code}")
    told = json.loads(text)
    resumed = Resumed(**told["resumed"]) if told["resumed"] else None
    return Found(resumed, told["error"], tuple(told["said"]))


def _tell(tool: Tool, root: Path, write: int) -> int:
    resumed, error = None, None
    with _listening() as said:
        try:
            resumed = tool.resume(root)
        except Exception as raised:  # noqa: BLE001  whatever it is, it is what the user sees
            error = f"{type(raised).__name__}: {raised}"
    told = {"resumed": resumed and vars(resumed), "error": error, "said": said}
    with os.fdopen(write, "w") as file:
        json.dump(told, file)
    return 0


class _Listener(logging.Handler):
    """Notes warnings and errors."""

    def __init__(self, said: list[str]):
        super().__init__(logging.WARNING)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    said: list[str] = []
    for name in LOGGERS:
        logging.getLogger(name).addHandler(_Listener(said))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(warning.message) for warning in caught]


def _end_by(work: Callable[[], int]) -> None:
    """Do the work of a forked process, silently, and end it."""
    code = RAISED
    try:
        if "TEST_PEERS_LOUD" not in os.environ:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
        code = work()
    except BaseException:  # noqa: BLE001  the process ends here, whatever it was
        traceback.print_exc()
    finally:
        os._exit(code)
