"""The process of an engine: started, called and killed by the trainer. It never outlives the trainer, even
if that is killed.

A child process of the harness (`verl.utils.child_process`), whose output goes into a file.

    trainer ──method, arguments──> engine ── advance() ── step, tensor, layer ... ──EngineReply──> trainer
                              └── counter in shared memory: without a change for `call_timeout_s` the process is killed

Calls have no limit on their total time, as long as they make progress. A process without progress, because it is
stopped or hangs, is killed, and the caller gets `EngineDied` as after a crash.

`EngineFiles` are the files and shared memory of one engine, removed when its processes have ended in any way:

/dev/shm/verl_engine_X/                  adapters
/dev/shm/verl_engine_X_*, sem.verl_..._X  what the workers of an engine share (tensor parallel)
TMPDIR/verl_engine_X.tmp/                TMPDIR of the engine's processes
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from verl.errors import RolloutError
from verl.rollout.base import EngineLost
from verl.rollout.engine_process.messages import EngineReply, EngineSetup
from verl.utils.child_process.channel import ChannelClosed
from verl.utils.child_process.process import ChildLog, ChildProcess, LogExcerpt
from verl.utils.directories import KERNEL_CACHE_VARIABLE, kernel_cache_directory
from verl.utils.orphan_cleanup import CLEANUP, SHARED_MEMORY, members, remove_shared_memory
from verl.utils.progress import NUM_SLOTS, Progress, ProgressWatch, is_stopped, report, state_of

NAME_VARIABLE = "VERL_ENGINE_NAME"  # prefix of the names of shared memory of the engine's processes


class EngineFiles:
    """The directories of one engine. If this process is killed, its clean-up process removes them.

    Attributes:
        name: prefix of the names of shared memory.
        directory: for small or short-lived files; in memory if the system has a file system for that.
        temporary: TMPDIR of the engine's processes.
    """

    def __init__(self):
        self.name = f"verl_engine_{secrets.token_hex(6)}"
        in_memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self.directory = in_memory / self.name
        self.temporary = Path(tempfile.gettempdir()).absolute() / f"{self.name}.tmp"
        of_trainer = f"torch_{os.getpid()}_"  # made by torch for handles of memory on a GPU
        self._shared_memory = [f"{self.name}_", f"sem.{self.name}_"]
        self._registered = CLEANUP.register(
            directories=[self.directory, self.temporary], shared_memory=[*self._shared_memory, of_trainer]
        )
        self.directory.mkdir(mode=0o700)
        self.temporary.mkdir(mode=0o700)

    def variables(self) -> dict[str, str]:
        """Environment of the engine's processes."""
        return {
            NAME_VARIABLE: self.name,
            "TMPDIR": str(self.temporary),
            KERNEL_CACHE_VARIABLE: str(kernel_cache_directory() or self.temporary / "torchinductor"),
        }

    def ended(self) -> None:
        """Remove shared memory and temporary files after the engine's processes have ended."""
        self._remove_shared_memory()
        for path in self.temporary.glob("*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything. Idempotent."""
        self._remove_shared_memory()
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.temporary, ignore_errors=True)
        CLEANUP.withdraw(self._registered)

    def _remove_shared_memory(self) -> None:
        for prefix in self._shared_memory:
            remove_shared_memory(prefix)


END_TIMEOUT_S = 20.0  # limit for the exit of a process that disconnected or was killed
CORES_VARIABLE = "VERL_ENGINE_CORES"  # numbers with commas between them
FOREIGN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VERL_RENDEZVOUS")
TIMEOUT_SETTING = "rollout.call_timeout_s"


class EngineDied(EngineLost):
    """The engine's process ended, or made no progress and was ended.

    Args:
        reason: how it ended, as one sentence; the last line of the message.
        found: relevant lines of its log.
        log: path of the log; empty if it is a temporary file.
    """

    def __init__(self, reason: str, found: LogExcerpt | None = None, log: str = ""):
        self.reason, self.found, self.log = reason, found, log
        super().__init__(message_after_log(reason, found, log))

    def __reduce__(self):
        return type(self), (self.reason, self.found, self.log)


class EngineError(RolloutError):
    """A call raised an error in the engine.

    Args:
        reason: the error in one line; the last line of the message.
        trace: its full traceback.
        found: relevant lines of the log of its worker processes.
    Attributes:
        summary: the last line.
    """

    def __init__(self, reason: str, trace: str = "", found: LogExcerpt | None = None):
        self.reason, self.trace, self.found = reason, trace, found
        lines = found.lines if found is not None and found.cause is not None else ()
        cause = f" The cause, in its log: {found.cause}" if found is not None and lines else ""
        self.summary = f"{reason}{cause}"
        super().__init__("\n".join([*lines, *trace.splitlines(), self.summary]))

    def __reduce__(self):
        return type(self), (self.reason, self.trace, self.found)


class EngineProcess:
    """One process with one engine, or the first of several.

    Args:
        setup: the engine, and its environment.
        files: directories of the engine; removed when the trainer ends.
        log: file for its output; None: a temporary file.
        call_timeout_s: largest time without progress.
    """

    def __init__(self, setup: EngineSetup, files: EngineFiles, log: Path | None, call_timeout_s: float = 300.0):
        self.setup, self.files, self.log = setup, files, log
        self.call_timeout_s = call_timeout_s
        self._log = ChildLog(log)
        self._child: ChildProcess | None = None
        self._progress: Progress | None = None
        self._watch: ProgressWatch | None = None
        self._method = "start"
        self._start_timeout_s = self._start_deadline = math.inf

    @property
    def process_id(self) -> int | None:
        """Process id; None while there is no process."""
        return None if self._child is None else self._child.pid

    @property
    def progress_path(self) -> str:
        """Path at which other processes of this machine can open its progress counter."""
        assert self._progress is not None
        return self._progress.path

    def is_alive(self) -> bool:
        """Whether the process exists, running or stopped."""
        return self._child is not None and self._child.is_alive()

    def is_busy(self) -> bool:
        """Whether the process runs and has not replied yet; for code that waits for side effects of a call.

        Raises:
            EngineDied: it makes no progress.
        """
        if self._child is None or not self._child.is_alive() or self._child.channel.has_message():
            return False
        self._poll()
        return True

    def start(self, timeout_s: float | None = None) -> Any:
        """Start the process and the engine in it; returns a description of the engine.

        Args:
            timeout_s: largest time until the engine is ready, even if it makes progress; None: no limit.
        Raises:
            EngineDied: the process ended, made no progress, or was not ready in time.
            EngineError: the engine could not be created.
        """
        self._progress = Progress(NUM_SLOTS)
        self._log.start = self._log.size
        child = self._child = ChildProcess(
            "verl.rollout.engine_process.serve",
            self._progress,
            environment=self.setup.environment | self.files.variables(),
            without=FOREIGN_VARIABLES,
            output=self._log.file,
            is_killed_with_parent=True,
            stuck_s=None,  # `_poll` has the limits
        )
        self._start_timeout_s = math.inf if timeout_s is None else timeout_s
        self._start_deadline = time.monotonic() + self._start_timeout_s
        try:
            self._ask("start", partial(child.begin, (self.setup.server, self.setup.setting)))
            return self.answer()
        except BaseException:
            self.kill()
            raise
        finally:
            self._start_deadline = math.inf

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and wait for its result.

        Raises:
            EngineDied: the process ended, or made no progress.
            EngineError: the method raised.
        """
        self.send(method, *args)
        return self.answer()

    def send(self, method: str, *args: Any) -> None:
        """Begin a call; `answer` ends it."""
        if self._child is None:
            raise EngineDied(f"The {self.setup.name} engine is not running.")
        self._ask(method, partial(self._child.channel.send, (method, args)))

    def answer(self) -> Any:
        """Wait for the result of the pending call."""
        if self._child is None:
            raise EngineDied(f"The {self.setup.name} engine is not running.")
        with self._killed_on_failure():  # a late answer must not be read as that of the next call
            answer: EngineReply = self._child.channel.receive(self._poll)
        if answer.lost is not None:
            death = EngineDied(f"{self._name} lost {answer.lost}.", self._log.excerpt(), self._log_name)
            self.kill()
            raise death
        excerpt = None if answer.error is None else self._log.excerpt()
        self._log.start = self._log.size  # the next answer belongs to the next call
        if answer.error is not None:
            raise EngineError(answer.error, answer.trace, excerpt)
        return answer.result

    def kill(self) -> None:
        """Kill the process and its children immediately, even if stopped, and remove their shared files.
        Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            self.files.ended()
        if self._progress is not None:
            self._progress.close()
        self._progress = self._watch = None

    def _ask(self, method: str, send: Callable[..., None]) -> None:
        assert self._progress is not None
        self._method, self._watch = method, ProgressWatch(self._progress, self.call_timeout_s)
        with self._killed_on_failure():  # a message may be half sent
            send(on_poll=self._poll)

    @contextlib.contextmanager
    def _killed_on_failure(self) -> Iterator[None]:
        """Context of an exchange with the process; raises EngineDied if it has closed its channel."""
        try:
            yield
        except ChannelClosed as error:
            death = self._death()
            self.kill()
            raise death from error
        except BaseException:
            self.kill()
            raise

    def _poll(self, moved: int = 0) -> None:
        """Called repeatedly while this process waits; transferred bytes count as progress too.

        Raises:
            EngineDied: it makes no progress, or did not start in time.
        """
        assert self._watch is not None
        if moved:
            self._watch.restart()
        idle_s = self._watch.idle_s
        if idle_s == 0.0:
            report()  # progress of this process
        if idle_s >= self.call_timeout_s:
            raise self._hung(self._watch.describe(setting=TIMEOUT_SETTING))
        if time.monotonic() > self._start_deadline:
            raise self._hung(f"was not ready within {self._start_timeout_s:g} s (rollout.start_timeout_s)")

    def _hung(self, words: str) -> EngineDied:
        state = "" if self._child is None else _state_of_group(self._child.pid)
        excerpt, log = self._log.excerpt(), self._log_name
        return EngineDied(f"{self._name} {words}{f'; {state}' if state else ''}. It was ended.", excerpt, log)

    def _death(self) -> EngineDied:
        """Description of how the process ended; waits briefly for a process that closed its channel but still runs."""
        assert self._child is not None
        self._child.await_exit(END_TIMEOUT_S)
        ended = self._child.describe_exit()
        ending = f"ended with {ended}" if ended else "hung up"
        stage = self._progress.stage() if self._progress is not None else ""
        excerpt = self._log.excerpt()
        cause = "" if excerpt.cause is None else f": {excerpt.cause}"
        return EngineDied(f"{self._name} {ending}{f', at: {stage}' if stage else ''}{cause}.", excerpt, self._log_name)

    @property
    def _name(self) -> str:
        return f"The {self.setup.name} engine (process {self.process_id}), asked to {self._method},"

    @property
    def _log_name(self) -> str:
        return "" if self.log is None else str(self.log)


def message_after_log(reason: str, excerpt: LogExcerpt | None, log: str) -> str:
    """A message that consists of the relevant lines of a log and, as its last line, the reason."""
    if excerpt is None:
        return reason
    location = f" ({log})" if log else ""
    if not excerpt.lines:
        return f"The log of the engine{location} shows no error.\n{reason}"
    return "\n".join([f"From the log of the engine{location}:", *(f"  {line}" for line in excerpt.lines), reason])


def _state_of_group(group: int) -> str:
    """The state of the processes that are stopped; of the first one if none is."""
    running = members(group)
    if stopped := [pid for pid in running if is_stopped(pid)]:
        if group in stopped:
            return state_of(group)
        return f"of its processes, {', '.join(map(str, stopped))} is stopped (SIGSTOP or SIGTSTP)"
    return state_of(group)
