"""What a terminal does to a run: Ctrl-C reaches all its processes, and closing it sends SIGHUP and ends its output."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SHORT = ["tracker.tensorboard=null", "trainer.total_steps=100000", "trainer.num_threads=1"]


class Terminal:
    """A pseudo-terminal and the process that it controls."""

    def __init__(self, words: list[str], directory: Path):
        self.keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=directory,
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(screen)
        self.shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self.keyboard, 2**16)
            except OSError:
                return
            self.shown += piece

    def wait_for_steps(self, file: Path, count: int) -> None:
        end = time.monotonic() + 200
        while not (file.is_file() and file.read_bytes().count(b"\n") > count):
            assert self.process.poll() is None, self.shown.decode()
            assert time.monotonic() < end, self.shown.decode()
            time.sleep(0.1)


@contextmanager
def terminal(words: list[str], directory: Path) -> Iterator[Terminal]:
    made = Terminal(words, directory)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.mark.exhaustive  # the signal itself: utils/test_signals.py
@pytest.mark.parametrize("prefix", [[], ["nohup"]], ids=["closed", "closed under nohup"])
def test_a_closed_terminal_ends_a_run_as_sigterm_does_and_leaves_one_under_nohup_alone(prefix, tmp_path):
    run_dir = tmp_path / "run"
    words = ["-m", "verl.cli", "sft", "debug=smoke", f"hydra.run.dir={run_dir}", *SHORT]
    with terminal(["-c", START, *prefix, sys.executable, *words], tmp_path) as shown:
        shown.wait_for_steps(run_dir / "metrics.jsonl", 2)
        os.close(shown.keyboard)
        if prefix:
            before = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
            shown.wait_for_steps(run_dir / "metrics.jsonl", before + 3)
            shown.process.terminate()
        assert shown.process.wait(200) == (143 if prefix else 129)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    assert (run_dir / "actor/config.json").is_file()
    assert "Traceback" not in (run_dir / "run.log").read_text()


START = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
