"""Starts trainers and scripts in a tenth of the time: a process that has imported everything is copied for each.

test ──order──> worker_server ──clone──> child: `python main_ppo.py ...`, in a session of its own
     <──pid───                           killed by the test, or by itself at a given place of the code
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from worker_server import WorkerServer, end

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
SURROUNDINGS = {**ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Cut:
    """A place where a child kills itself.

    Attributes:
        at: a method, as `module:Class.method`.
        step: of the training, with whose beginning the counting of calls begins; or with that of a later one, where
            the training goes on from there.
        call: number of the call, from 1.
        after: whether the call is carried out before.
    """

    at: str
    step: int
    call: int = 1
    after: bool = False


class Child:
    """A trainer. `pid` leads its session."""

    def __init__(self, server: WorkerServer, order: Mapping[str, Any], log: Path, errors: Path | None = None):
        self.log, self._status = log, None
        with log.open("wb") as out, (errors or log).open("ab") as err:
            files = {1: out.fileno(), 2: err.fileno() if errors else out.fileno()}
            self.pid = server.fork({**order, "own_session": True}, files)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._status is None:  # else the number may be somebody else's
            os.kill(self.pid, number)

    def is_running(self) -> bool:
        return self._status is None and self._end(0.0) is None

    def wait(self, timeout_s: float = 300.0) -> int:
        """Exit status, or the negative number of the signal."""
        status = self._end(timeout_s)
        assert status is not None, f"still running after {timeout_s} s:\n{self.said()}"
        return status

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def _end(self, timeout_s: float) -> int | None:
        end = time.monotonic() + timeout_s
        while self._status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= end:
                break
            else:
                time.sleep(0.005)
        return self._status


class ForkServer:
    """Starts scripts through the server of this process; those that still run end with it. A context manager."""

    def __init__(self, server: WorkerServer):
        self._server, self._children = server, list[Child]()

    def __enter__(self) -> ForkServer:
        return self

    def start(
        self,
        directory: Path,
        name: str,
        arguments: Sequence[object],
        script: str = "main_ppo.py",
        cut: Cut | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Run a main script in `directory`, with the run's directory `name` below it.

        Args:
            env: the whole environment; that of this process with one thread by default.
        """
        given = [*map(str, arguments), f"hydra.run.dir={directory / name}"]
        order = {"script": str(ROOT / script), "arguments": given, "directory": str(directory)}
        order["environment"] = {**os.environ, **SURROUNDINGS} if env is None else dict(env)
        self._children.append(Child(self._server, {**order, "cut": cut and asdict(cut)}, directory / f"{name}.log"))
        return self._children[-1]

    def run(
        self, words: Sequence[object], cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)` gives.

        Args:
            env: the whole environment; that of this process by default. What Python reads as it starts is the
                server's: PYTHONPATH is put before it.
        """
        script, *arguments = map(str, words)
        order = {"script": script, "arguments": arguments, "directory": str(cwd), "cut": None}
        order["environment"] = dict(os.environ if env is None else env)
        with tempfile.TemporaryDirectory() as place:
            errors = Path(place, "stderr")
            self._children.append(child := Child(self._server, order, Path(place, "stdout"), errors))
            status = child.wait(timeout_s)
            return subprocess.CompletedProcess(words, status, child.said(), errors.read_text(errors="replace"))

    def __exit__(self, *_: object) -> None:
        for child in self._children:  # of a test that failed
            if child.is_running():
                child.kill()


# In the child


def run_script(order: Mapping[str, Any]) -> NoReturn:
    """Be `python script arguments...`."""
    status: object = 0
    try:
        first = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = [os.path.dirname(order["script"]), *first, *(path for path in sys.path if path not in first)]
        sys.argv = [order["script"], *order["arguments"]]
        if order["cut"] is not None:
            _place(Cut(**order["cut"]))
        runpy.run_path(order["script"], run_name="__main__")
    except SystemExit as error:
        status = 0 if error.code is None else error.code
    except BaseException:  # noqa: BLE001 - as an interpreter ends with it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)  # noqa: T201
        status = 1
    end(status)


def _place(cut: Cut) -> None:
    """Let the method end this process at the given call."""
    from verl.trainer.ppo import PPOTrainer
    from verl.trainer.sft import SFTTrainer

    calls: Iterator[int] | None = None

    def noting(step_of: Any) -> Any:
        @functools.wraps(step_of)
        def step(self: Any, batch: Any, number: int) -> Any:
            nonlocal calls
            if number >= cut.step and calls is None:
                calls = itertools.count(1)
            return step_of(self, batch, number)

        return step

    for trainer in (PPOTrainer, SFTTrainer):
        trainer.step = noting(trainer.step)
    module, _, path = cut.at.partition(":")
    kind, _, name = path.partition(".")
    owner = getattr(importlib.import_module(module), kind)
    method = vars(owner)[name]

    @functools.wraps(method)
    def cutting(*args: Any, **named: Any) -> Any:
        is_here = calls is not None and next(calls) == cut.call
        if is_here and not cut.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(*args, **named)
        if is_here:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, cutting)
