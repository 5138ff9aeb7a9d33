"""Disks for a writer process, which makes its own: what they do is said by environment variables."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.disks import CHANGING

from verl.checkpoint.core.filesystem import FileSystem

SLEEP, KILL_AT, KILLS, COUNTED = "TEST_DISK_SLEEP_S", "TEST_DISK_KILL_AT", "TEST_DISK_KILLS", "TEST_DISK_COUNTED"


def in_writer_process() -> bool:
    return sys.argv[0].endswith("writer_process.py")


class SlowDisk(FileSystem):
    """Sleeps before every sync."""

    def perform(self, operation: str, call: Callable[..., Any], *args: Any) -> Any:
        if operation == "sync":
            time.sleep(float(os.environ[SLEEP]))
        return super().perform(operation, call, *args)


class KillingProcessDisk(FileSystem):
    """Ends the writer process by SIGKILL before its n-th operation that changes something, as often as there are
    files left in a directory; counts the operations in a file. Does nothing in the trainer's process."""

    def __init__(self) -> None:
        self._done = 0

    def perform(self, operation: str, call: Callable[..., Any], *args: Any) -> Any:
        if operation in CHANGING and in_writer_process():
            if self._done == int(os.environ[KILL_AT]):
                for ticket in Path(os.environ[KILLS]).iterdir():
                    ticket.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
            self._done += 1
            Path(os.environ[COUNTED]).write_text(str(self._done))
        return super().perform(operation, call, *args)
