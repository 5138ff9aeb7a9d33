"""A pool of processes: started ahead of their use, lent, and replaced when they have ended.

    starter threads ── start, await_ready ──> free ── take ──> lent ── give_back ──> free
                              ^                                  └── has ended ──> removed
                              └──────────── there is room <───────────────────────────┘

The threads that start processes live as long as the pool, since some processes (bubblewrap's) end with the thread that
started them.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from verl.utils.child_process.channel import ChannelClosed
from verl.utils.child_process.process import ChildProcess

JOIN_S = 30.0  # for threads whose processes were killed
RETRY_S = 0.2  # after a start that failed
EXIT_S = 2.0  # for the exit status of a process that has closed its connection


class PooledProcess(Protocol):
    @property
    def is_usable(self) -> bool:
        """Whether it may be lent."""
        ...

    def await_ready(self) -> None:
        """Wait until it may be lent; raises if it fails, or is killed meanwhile."""

    def kill(self) -> None:
        """End it with all that it has started; may be called again, and by another thread."""


class StartFailed(Exception):
    """A process did not send its first message; says why."""


class PooledChild:
    """A child process of a pool.

    Args:
        child: the process, which sends a message when it is ready.
        start_s: limit of that.
    """

    def __init__(self, child: ChildProcess, start_s: float):
        self.child, self.pid, self.channel = child, child.pid, child.channel
        self.start_s = start_s
        self.is_over = False  # it was killed

    @property
    def is_usable(self) -> bool:
        return not self.is_over and self.child.is_alive()

    def first_message(self) -> Any:
        """The message of a process that is ready; raises StartFailed if it has ended, or sends nothing in time."""
        try:
            return self.channel.receive(timeout_s=self.start_s)
        except TimeoutError as error:
            raise StartFailed(f"it did not finish within {self.start_s:g} s{self.state()}") from error
        except ChannelClosed as error:
            raise StartFailed(f"its process has ended ({self.exit_words()})") from error

    def exit_words(self) -> str:
        """Describe its end, after its connection was closed."""
        self.child.await_exit(EXIT_S)
        return self.child.describe_exit() or "its connection was closed"

    def state(self) -> str:
        """State by the operating system, to append to a message."""
        return f" ({state})" if (state := self.child.state()) else ""

    def kill(self) -> None:
        """End it with all that it has started; may be called again, and by another thread."""
        self.is_over = True
        self.child.kill()


P = TypeVar("P", bound=PooledProcess)


class PoolClosed(Exception):
    """The pool was closed."""


class ProcessPool(Generic[P]):
    """A pool of `size` processes that can be used.

    Args:
        start: starts a process without waiting for it.
        size: number of processes; with `is_used_once`, of those that are free.
        starters: number of processes that are started at the same time.
        is_used_once: a process is killed when it is given back.
        max_loans: of one process at a time; None for any number, and then the one with the fewest is lent.
    """

    def __init__(
        self,
        start: Callable[[], P],
        size: int,
        *,
        starters: int = 2,
        is_used_once: bool = False,
        max_loans: int | None = 1,
    ):
        self._start, self._size, self._is_used_once, self._max_loans = start, size, is_used_once, max_loans
        self._changed = threading.Condition()
        self.loans: dict[P, int] = {}
        self._unready: set[P] = set()
        self._num_starting = self._num_waiting = 0
        self._failure: Exception | None = None
        self._is_closed = False
        self._starters = [
            threading.Thread(target=self._keep_started, name="verl process pool", daemon=True)
            for _ in range(min(starters, size))
        ]
        for starter in self._starters:
            starter.start()
        atexit.register(self.close)

    @contextmanager
    def lend(self, timeout_s: float | None = None) -> Iterator[P]:
        """A process for the time of a `with` block; see `take`."""
        process = self.take(timeout_s)
        try:
            yield process
        finally:
            self.give_back(process)

    def take(self, timeout_s: float | None = None) -> P:
        """Wait for a process and take it; `give_back` must follow.

        Raises:
            PoolClosed: the pool was closed.
            TimeoutError: none is free within `timeout_s`.
            Exception: what `start` or `await_ready` raised, if a process that is waited for cannot be started.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if not self._num_waiting:
                self._failure = None  # of a start that nobody waited for
            self._num_waiting += 1
            self._changed.notify_all()
            try:
                while True:
                    if self._is_closed:
                        raise PoolClosed
                    if (process := self._free()) is not None:
                        loans = self.loans.pop(process) + 1
                        if not self._is_used_once:
                            self.loans[process] = loans
                        return process
                    if self._failure is not None:
                        failure, self._failure = self._failure, None
                        raise failure
                    left_s = None if deadline is None else deadline - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        raise TimeoutError(f"no process was ready within {timeout_s:g} s")
                    self._changed.wait(left_s)
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()

    def give_back(self, process: P) -> None:
        """End a loan. A process that cannot be used any more is killed with its last one."""
        with self._changed:
            loans = self.loans.pop(process, 0) - 1  # one that is used once, or of a closed pool, is not there
            is_kept = loans > 0 or (loans == 0 and process.is_usable)
            if is_kept:
                self.loans[process] = loans
            self._changed.notify_all()
        if not is_kept:
            process.kill()

    def kill_lent(self) -> None:
        """Kill the processes that are lent, so that nobody waits for them any longer."""
        for process in [process for process, loans in list(self.loans.items()) if loans]:
            process.kill()

    def close(self) -> None:
        """Kill all processes that are not in use once; may be called again."""
        atexit.unregister(self.close)
        with self._changed:
            self._is_closed = True
            processes = [*self.loans, *self._unready]
            self.loans.clear()
            self._changed.notify_all()
        for process in processes:
            process.kill()
        for starter in self._starters:
            starter.join(JOIN_S)

    def _free(self) -> P | None:
        for process in [p for p, loans in self.loans.items() if not loans and not p.is_usable]:
            del self.loans[process]  # it has ended while it waited
            process.kill()
        free = [p for p, loans in self.loans.items() if p.is_usable and loans < (self._max_loans or loans + 1)]
        return min(free, key=self.loans.__getitem__, default=None)

    def _has_room(self) -> bool:
        if self._failure is not None and not self._num_waiting:
            return False  # tried again for the next one who waits
        return sum(process.is_usable for process in self.loans) + self._num_starting < self._size

    def _keep_started(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._has_room())
                if self._is_closed:
                    return
                self._num_starting += 1
            process, failure = self._started()
            with self._changed:
                self._num_starting -= 1
                self._failure = failure
                is_closed = self._is_closed
                if process is not None and not is_closed:
                    self.loans[process] = 0
                self._changed.notify_all()
                if failure is not None and not is_closed:
                    self._changed.wait(RETRY_S)
            if process is not None and is_closed:
                process.kill()

    def _started(self) -> tuple[P | None, Exception | None]:
        process = None
        try:
            process = self._start()
            with self._changed:
                if self._is_closed:
                    raise PoolClosed
                self._unready.add(process)
            process.await_ready()
        except Exception as error:  # noqa: BLE001 - raised by `take`
            if process is not None:
                process.kill()
            return None, error
        finally:
            self._unready.discard(process)  # type: ignore[arg-type]
        return process, None
