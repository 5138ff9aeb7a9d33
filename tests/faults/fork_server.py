"""Starts trainers and scripts in a tenth of the time: a process that has imported everything forks a child for each.

    test ──start──> server ──fork──> child: `python main_ppo.py ...`, in a session of its own
         <──pid───                     killed by the test, or by itself at a given place of the code
         ──wait───> server             its exit status

The server computes nothing before it forks, so that a child is as a fresh interpreter: no thread, no tensor, no seed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
LAZY = (  # what a run imports when it comes to it
    "peft",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.masking_utils",
    "torch._dynamo",
    "rich.console",
    "rich.live",
    "rich.progress",
    "rich.table",
    "rich.traceback",
    "hydra.main",
    "hydra._internal.hydra",
    "hydra.plugins.sweeper",
    "hydra._internal.core_plugins.basic_launcher",
    "hydra._internal.core_plugins.basic_sweeper",
)
NOT_LOADED = {"wandb", "tensorboard", "vllm", "ray", "cli", "replay"}  # heavy, or with threads, and not used


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

    def __init__(self, server: ForkServer, pid: int, log: Path):
        self.pid, self.log, self._server, self._status = pid, log, server, None

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
        if self._status is None:
            self._status = self._server.ask({"wait": self.pid, "timeout_s": timeout_s})["status"]
        return self._status


class ForkServer:
    """The server as a test sees it. A context manager.

    Args:
        prefix: words before its command, which say in what surroundings it runs.
    """

    def __init__(self, prefix: Sequence[str] = ()):
        self._prefix = prefix

    def __enter__(self) -> ForkServer:
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]),
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "faults.fork_server"],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        threads = self._answer()["threads"]
        assert threads == 1, f"{threads} threads, of which a child would have one"
        self._children: list[Child] = []
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
            env: the whole environment; that of the server by default.
        """
        log = directory / f"{name}.log"
        given = [*map(str, arguments), f"hydra.run.dir={directory / name}"]
        order: dict[str, Any] = {"script": str(ROOT / script), "arguments": given, "directory": str(directory)}
        order["log"] = str(log)
        if env is not None:
            order["environment"] = dict(env)
        answer = self.ask(order | {"cut": None if cut is None else asdict(cut)})
        self._children.append(Child(self, answer["pid"], log))
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
        with tempfile.TemporaryDirectory() as place:
            log, errors = Path(place, "stdout"), Path(place, "stderr")
            order = {"script": script, "arguments": arguments, "directory": str(cwd), "log": str(log), "cut": None}
            order |= {"errors": str(errors), "environment": dict(os.environ if env is None else env)}
            child = Child(self, self.ask(order)["pid"], log)
            self._children.append(child)
            status = child.wait(timeout_s)
            return subprocess.CompletedProcess(words, status, child.said(), errors.read_text(errors="replace"))

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        for child in self._children:  # of a test that failed
            child.kill()
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


# In the server's process


def serve() -> None:
    """Fork and wait as asked, until the test hangs up."""
    gc.disable()
    import_everything()
    gc.freeze()  # what was imported is not garbage of the child, and need not be copied for it
    _tell({"threads": len(os.listdir("/proc/self/task"))})
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _tell({"status": _wait(order["wait"], order["timeout_s"])})
            continue
        pid = os.fork()
        if pid == 0:
            _end(_become, order)
        _tell({"pid": pid})
    os._exit(0)  # as a child ends, see `_end`


def import_everything() -> None:
    """Import what trainers and workers import, and nothing that starts a thread."""
    import verl

    names = [module.name for module in pkgutil.walk_packages(verl.__path__, "verl.")]
    for name in [*(name for name in names if not NOT_LOADED & set(name.replace("_", ".").split("."))), *LAZY]:
        with contextlib.suppress(ImportError):  # of what is not installed; a child that needs it says so itself
            importlib.import_module(name)
    from verl.compose.compose import compose_root

    compose_root("ppo", ["actor.lora={rank:1}", "trainer.seed=1", "data=files"])  # the parser learns its grammar


def _end(main: Callable[[Mapping[str, Any]], None], order: Mapping[str, Any]) -> NoReturn:
    """Run what a child does and end it as the interpreter would, but for freeing everything that was imported.

    That takes 1.4 s of processor time: more than most of what is run here.
    """
    status: object = 0
    try:
        main(order)
    except SystemExit as error:
        status = 0 if error.code is None else error.code
    except BaseException:  # noqa: BLE001 - as an interpreter ends with it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)  # noqa: T201
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def _become(order: Mapping[str, Any]) -> None:
    """Be `python script arguments...`, to its end."""
    gc.enable()
    os.setsid()
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    errors = log if "errors" not in order else os.open(order["errors"], os.O_WRONLY | os.O_CREAT, 0o644)
    for source, target in ((nothing, 0), (log, 1), (errors, 2)):
        os.dup2(source, target)
    os.chdir(order["directory"])
    if "environment" in order:
        os.environ.clear()
        os.environ.update(order["environment"])
        first = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = [os.path.dirname(order["script"]), *first, *(path for path in sys.path if path not in first)]
    sys.argv = [order["script"], *order["arguments"]]
    if order["cut"] is not None:
        _place(Cut(**order["cut"]))
    runpy.run_path(order["script"], run_name="__main__")


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


def _wait(pid: int, timeout_s: float) -> int | None:
    end = time.monotonic() + timeout_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)


def _tell(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
