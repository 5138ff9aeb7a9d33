"""The writer process as the trainer sees it: started when it is needed, its death noticed, ended with the trainer."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

from verl.checkpoint.arena import Arena, Arenas
from verl.checkpoint.channel import Channel, ChannelClosed
from verl.checkpoint.plan import SavePlan, SaveReport
from verl.checkpoint.writer_process import PARENT_VARIABLE, SOCKET_VARIABLE, Answer, Order, Setting, Start
from verl.errors import VerlError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0


class WriterDied(VerlError, RuntimeError):
    """The writer process ended, or could not be started, or did not answer in time."""


class WriterProcess:
    """A process that carries out plans.

    Started with `subprocess`, not by multiprocessing: it never imports the trainer's main script. It stays in the
    trainer's session: in one of its own, its low priority would count for nothing (Linux shares processors among
    sessions first).

    Args:
        timeout_s: a plan that takes longer is treated as the death of the process.
    """

    def __init__(self, setting: Setting, arenas: Arenas, timeout_s: float):
        self._setting, self._arenas, self._timeout_s = setting, arenas, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    @property
    def process_id(self) -> int | None:
        """None while there is no process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, unless it is there.

        Raises:
            WriterDied: it could not be started.
        """
        if self._channel is not None:
            return
        try:
            self._channel = self._spawn()
            self._channel.send(Start(tuple(map(os.path.abspath, sys.path)), pickle.dumps(self._setting)))
            self._channel.receive(START_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            ending = self.kill()
            raise WriterDied(f"the checkpoint writer could not be started: {error}{ending}") from error

    def carry_out(self, plan: SavePlan, arena: Arena) -> SaveReport:
        """Have a plan carried out, and wait for it.

        Raises:
            WriterDied: nobody knows how far it came; may be tried again.
            Exception: what was raised over there.
        """
        self.start()
        assert self._channel is not None
        order = Order(plan, arena.number, arena.num_bytes, self._arenas.numbers)
        try:
            self._channel.send(order, arena.fd)
            answer: Answer
            answer, _ = self._channel.receive(self._timeout_s)
        except ChannelClosed as error:
            raise WriterDied(f"the checkpoint writer died while it saved step {plan.step}{self.kill()}") from error
        except TimeoutError as error:
            self.kill()
            raise WriterDied(
                f"the checkpoint writer has not saved step {plan.step} within {self._timeout_s:.0f} s and was ended"
            ) from error
        if answer.report is None:
            assert answer.error is not None
            log.debug("in the checkpoint writer:\n%s", answer.trace)
            raise pickle.loads(answer.error)
        return answer.report

    def end(self) -> None:
        """Hang up: it ends by itself, or is made to."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=END_TIMEOUT_S)
        self.kill()

    def kill(self) -> str:
        """End it at once. Returns how it ended, for a message."""
        if self._channel is not None:
            self._channel.close()
        process, self._process, self._channel = self._process, None, None
        if process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel ends when that lets it
            ended_by_itself = process.wait(timeout=0.2)
            return f" (it ended with {ended_by_itself})"
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_TIMEOUT_S)
        return ""

    def _spawn(self) -> Channel:
        package_root = str(Path(__file__).resolve().parents[2])
        ours, theirs = socket.socketpair()
        with theirs:
            env = os.environ | {
                "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
                SOCKET_VARIABLE: str(theirs.fileno()),
                PARENT_VARIABLE: str(os.getpid()),
            }
            command = [sys.executable, "-m", "verl.checkpoint.writer_process"]
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._process = process
        return Channel(ours, lambda: process.poll() is None)
